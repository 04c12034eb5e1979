"""Options of the source and the sink: one table, read by name, every name checked.

    chosen = choose(options, READ)
    chosen[SERVERS]

A side has a tuple of options; what it does not name is refused, with the name that was perhaps
meant. Spark hands over lower-case names and texts.

The options of reading, and which of them go together.

Who we are to a cluster: access key and TLS. All lines of source and sink get them here.

The options of writing, and which of them go together.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Generic, TypeVar

from escrowmq.auth.signature import Signer
from escrowmq.errors import InvalidOption, NotSent
from escrowmq.parsing import did_you_mean, parse_address, parse_servers
from escrowmq.secret import Secret
from escrowmq.spark.offsets import (
    SymbolicOffset,
    parse_offsets,
    parse_queues,
    parse_time,
    parse_times_by_queue,
)

T = TypeVar("T")

# What Spark itself puts among the options of a source or sink.
_SPARK_OPTION_NAMES: Final = frozenset({"checkpointlocation", "queryname", "paths"})


@dataclass(frozen=True)
class Option(Generic[T]):
    name: str
    parse: Callable[[str], T]  # raises ValueError with what would be right
    default: T
    description: str
    aliases: tuple[str, ...] = ()
    is_secret: bool = False

    def all_names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class Options:
    """Values by option. It is pickled with the reader, so it holds nothing else."""

    values: Mapping[str, Any]
    explicit: frozenset[str] = field(default_factory=frozenset)  # what the user said himself

    def __getitem__(self, option: Option[T]) -> T:
        value: T = self.values[option.name]
        return value

    def is_set(self, option: Option[Any]) -> bool:
        return option.name in self.explicit


def parse_options(texts: Mapping[str, str], known_options: Sequence[Option[Any]]) -> Options:
    """Raises BadOption: an unknown name, one that is there twice, a value that cannot be read."""
    by_name = {name.lower(): option for option in known_options for name in option.all_names()}
    values = {option.name: option.default for option in known_options}
    told: dict[str, str] = {}
    for name, text in texts.items():
        option = by_name.get(name.lower())
        if option is None:
            if name.lower() in _SPARK_OPTION_NAMES:
                continue
            known = [name for option in known_options for name in option.all_names()]
            raise InvalidOption(
                f"there is no option {name!r}{did_you_mean(name, known)}; "
                f"there are {', '.join(option.name for option in known_options)}"
            )
        if told.get(option.name, text) != text:
            raise InvalidOption(f"option {option.name} is there twice, with different values")
        told[option.name] = text
        values[option.name] = _parse_value(option, name, text)
    return Options(values, frozenset(told))


def _parse_value(option: Option[T], name: str, text: str) -> T:
    try:
        return option.parse(text)
    except ValueError as error:
        shown = "" if option.is_secret else f" {text!r}"
        raise InvalidOption(f"option {option.name}{shown}: {error}") from error


# --- how a text is read --------------------------------------------------------------------------


def parse_names(text: str) -> list[str]:
    """`a, b` as two; one at the least."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise ValueError("a name is missing")
    return found


def parse_bool(text: str) -> bool:
    if text.strip().lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.strip().lower() == "true"


def int_between(minimum: int = 1, maximum: int = 2**62) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ValueError("a whole number is wanted") from None
        if number < minimum:
            raise ValueError(f"it must be {minimum} at least")
        if number > maximum:
            raise ValueError(f"it must be {maximum} at most")
        return number

    return read


def choice_of(*names: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        for name in names:
            if text.strip().lower() == name.lower():
                return name
        raise ValueError(f"one of {', '.join(names)}")

    return read


def parse_non_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty")
    return text.strip()


def _checked_servers(text: str) -> str:
    parse_servers(text)
    return text


# --- of both sides -------------------------------------------------------------------------------

SERVERS: Final = Option(
    "servers",
    _checked_servers,
    "",
    "Name servers, `host:port`, separated by `;` or `,`.",
    ("nameServer", "namesrvAddr", "nameServers", "namesrv"),
)
ACCESS_KEY: Final = Option("accessKey", parse_non_empty, "", "ACL: who asks.")
SECRET_KEY: Final = Option(
    "secretKey", parse_non_empty, "", "ACL: the secret of it.", is_secret=True
)
SECURITY_TOKEN: Final = Option(
    "securityToken", parse_non_empty, "", "ACL: of a temporary access key.", is_secret=True
)
TLS: Final = Option("tls", parse_bool, False, "Whether to speak TLS.", ("useTLS", "tlsEnable"))
TLS_CA: Final = Option("tlsCa", parse_non_empty, "", "File with the certificates to trust.")
TLS_CERT: Final = Option("tlsCert", parse_non_empty, "", "File with our own certificate.")
TLS_KEY: Final = Option("tlsKey", parse_non_empty, "", "File with the key of it.")
TLS_VERIFY: Final = Option("tlsVerify", parse_bool, True, "Whether the server must prove itself.")
TIMEOUT_MS: Final = Option(
    "timeoutMs", int_between(), 30_000, "How long an answer may take.", ("pullTimeoutMs",)
)

CONNECTION_OPTIONS: Final[tuple[Option[Any], ...]] = (
    *(SERVERS, ACCESS_KEY, SECRET_KEY, SECURITY_TOKEN),
    *(TLS, TLS_CA, TLS_CERT, TLS_KEY, TLS_VERIFY, TIMEOUT_MS),
)


MESSAGES, TRANSACTIONS = "messages", "transactions"

SUBSCRIBE: Final[Option[list[str]]] = Option(
    "subscribe", parse_names, [], "Topics, with commas.", ("topic", "topics")
)
SUBSCRIBE_PATTERN: Final = Option(
    "subscribePattern", parse_non_empty, "", "Topics, as a regular expression."
)
ASSIGN: Final = Option("assign", parse_queues, None, "Queues: JSON, topic -> broker -> [queue].")
MODE: Final = Option(
    "mode", choice_of(MESSAGES, TRANSACTIONS), MESSAGES, "What to read: messages or transactions."
)
PATH: Final = Option("path", parse_non_empty, "", "A broker's directory: read its log files.")
COLUMNS: Final[Option[list[str]]] = Option("columns", parse_names, [], "Only these columns.")
INCLUDE_SYSTEM: Final = Option(
    "includeSystem", parse_bool, False, "Whether a pattern also finds the brokers' own topics."
)
TAGS: Final = Option(
    "tags",
    parse_non_empty,
    "*",
    "Only messages with this tag: `a || b`.",
    ("subExpression", "expression"),
)
SQL: Final = Option(
    "sql", parse_non_empty, "", "Only messages for which this SQL92 expression is true."
)
CONSUMER_GROUP: Final = Option(
    "group",
    parse_non_empty,
    "",
    "The consumer group.",
    ("groupId", "consumerGroup", "consumer.group"),
)
REPORT_OFFSETS: Final = Option(
    "reportOffsets", parse_bool, False, "Stream: whether the group's offsets follow."
)
STARTING_OFFSETS: Final = Option(
    "startingOffsets", parse_offsets, None, "earliest, latest, or JSON."
)
ENDING_OFFSETS: Final = Option("endingOffsets", parse_offsets, None, "latest, or JSON. Batch only.")
STARTING_TIMESTAMP: Final = Option(
    "startingTimestamp", parse_time, None, "From this time on, ms since 1970."
)
ENDING_TIMESTAMP: Final = Option(
    "endingTimestamp", parse_time, None, "Up to this time. Batch only."
)
STARTING_OFFSETS_BY_TIMESTAMP: Final = Option(
    "startingOffsetsByTimestamp", parse_times_by_queue, None, "The same by queue, JSON."
)
ENDING_OFFSETS_BY_TIMESTAMP: Final = Option(
    "endingOffsetsByTimestamp", parse_times_by_queue, None, "The same by queue, JSON."
)
FAIL_ON_DATA_LOSS: Final = Option(
    "failOnDataLoss",
    parse_bool,
    True,
    "Whether to fail if messages are gone, or go on behind them.",
)
MIN_PARTITIONS: Final = Option("minPartitions", int_between(), 1, "So many tasks at the least.")
MAX_BYTES_PER_PARTITION: Final = Option(
    "maxBytesPerPartition", int_between(), 0, "So many tasks that none reads more."
)
MAX_OFFSETS_PER_TRIGGER: Final = Option(
    "maxOffsetsPerTrigger", int_between(), 0, "At most so many messages in a micro-batch."
)
MAX_BYTES_PER_TRIGGER: Final = Option(
    "maxBytesPerTrigger", int_between(), 0, "At most about so many bytes in a micro-batch."
)
PULL_BATCH_SIZE: Final = Option(
    "pullBatchSize", int_between(), 8_192, "At most so many messages in a pull; brokers allow less."
)

READ_OPTIONS: Final[tuple[Option[Any], ...]] = (
    *CONNECTION_OPTIONS,
    *(SUBSCRIBE, SUBSCRIBE_PATTERN, ASSIGN, MODE, PATH, COLUMNS, INCLUDE_SYSTEM, TAGS, SQL),
    *(
        CONSUMER_GROUP,
        REPORT_OFFSETS,
        STARTING_OFFSETS,
        ENDING_OFFSETS,
        STARTING_TIMESTAMP,
        ENDING_TIMESTAMP,
    ),
    *(
        STARTING_OFFSETS_BY_TIMESTAMP,
        ENDING_OFFSETS_BY_TIMESTAMP,
        FAIL_ON_DATA_LOSS,
        MIN_PARTITIONS,
        MAX_BYTES_PER_PARTITION,
    ),
    *(MAX_OFFSETS_PER_TRIGGER, MAX_BYTES_PER_TRIGGER, PULL_BATCH_SIZE),
)

_STREAM_ONLY: Final = (MAX_OFFSETS_PER_TRIGGER, MAX_BYTES_PER_TRIGGER, REPORT_OFFSETS)
_BATCH_ONLY: Final = (ENDING_OFFSETS, ENDING_TIMESTAMP, ENDING_OFFSETS_BY_TIMESTAMP)
_FILE_OPTIONS: Final = (
    PATH,
    SUBSCRIBE,
    MODE,
    COLUMNS,
    FAIL_ON_DATA_LOSS,
    MIN_PARTITIONS,
    MAX_BYTES_PER_PARTITION,
)
_TOPIC_SELECTORS: Final = (SUBSCRIBE, SUBSCRIBE_PATTERN, ASSIGN)


def parse_read_options(texts: Mapping[str, str], *, is_stream: bool) -> Options:
    """Raises BadOption."""
    chosen = parse_options(texts, READ_OPTIONS)
    _reject_options(chosen, _BATCH_ONLY if is_stream else _STREAM_ONLY, is_stream)
    if chosen.is_set(PATH):
        _check_file_options(chosen, is_stream)
        return chosen
    if not chosen[SERVERS]:
        raise InvalidOption(
            'option servers is missing: the name server, .option("servers", "host:9876"); '
            "or path, to read a broker's files"
        )
    which = [option.name for option in _TOPIC_SELECTORS if chosen.is_set(option)]
    if chosen[MODE] == TRANSACTIONS:
        if which:
            raise InvalidOption(f"mode=transactions knows its topics: leave {which[0]} out")
    elif len(which) != 1:
        named = " and ".join(which) or "none of them"
        raise InvalidOption(
            f"one of subscribe, subscribePattern, assign is wanted; there is {named}"
        )
    if chosen.is_set(TAGS) and chosen.is_set(SQL):
        raise InvalidOption("tags or sql, not both")
    if chosen[REPORT_OFFSETS] and not chosen[CONSUMER_GROUP]:
        raise InvalidOption("reportOffsets needs a group whose offsets follow: option group")
    if not is_stream and start_position(chosen, is_stream=False) is SymbolicOffset.LATEST:
        raise InvalidOption("a batch that starts at latest would be empty")
    if end_position(chosen) is SymbolicOffset.EARLIEST:
        raise InvalidOption("a batch that ends at earliest would be empty")
    return chosen


def start_position(options: Options, *, is_stream: bool) -> Any:
    """A time counts more than times by queue, and these more than offsets."""
    said = (
        options[STARTING_TIMESTAMP]
        or options[STARTING_OFFSETS_BY_TIMESTAMP]
        or options[STARTING_OFFSETS]
    )
    if said is not None:
        return said
    return SymbolicOffset.LATEST if is_stream else SymbolicOffset.EARLIEST


def end_position(options: Options) -> Any:
    said = (
        options[ENDING_TIMESTAMP] or options[ENDING_OFFSETS_BY_TIMESTAMP] or options[ENDING_OFFSETS]
    )
    return SymbolicOffset.LATEST if said is None else said


def _reject_options(options: Options, disallowed: tuple[Option[Any], ...], is_stream: bool) -> None:
    for option in disallowed:
        if options.is_set(option):
            where = "a batch" if is_stream else "a stream"
            raise InvalidOption(f"option {option.name} is for {where} only")


def _check_file_options(options: Options, is_stream: bool) -> None:
    if is_stream:
        raise InvalidOption("log files are read in a batch; a stream reads from brokers: servers")
    fit = {option.name for option in _FILE_OPTIONS}
    for name in sorted(options.explicit - fit):
        raise InvalidOption(
            f"option {name} does not go with path; these do: {', '.join(sorted(fit))}"
        )


@dataclass(frozen=True)
class SparkAccess:
    access_key: str = ""
    secret_key: str = field(default="", repr=False)
    security_token: str = field(default="", repr=False)
    tls: bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    verify_server: bool = True
    timeout_s: float = 30.0  # for an answer

    def sign(self, fields: Mapping[str, str], body: bytes) -> dict[str, str]:
        """The fields of a request, and what proves that they are ours."""
        if not self.access_key:
            return dict(fields)
        return _signer(self)(dict(fields), body)

    def connect(self, address: str, timeout_s: float) -> socket.socket:
        """Raises NotSent."""
        try:
            host, port = parse_address(address)
            line = socket.create_connection((host, port), timeout=timeout_s)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, ValueError) as error:
            raise NotSent(f"{address} cannot be reached: {error}") from error
        if not self.tls:
            return line
        try:
            return _tls_context(self).wrap_socket(line, server_hostname=host)
        except OSError as error:
            line.close()
            raise NotSent(f"{address} speaks no TLS that we trust: {error}") from error


@lru_cache(maxsize=16)
def _signer(access: SparkAccess) -> Signer:
    return Signer(access.access_key, Secret(access.secret_key), Secret(access.security_token))


@lru_cache(maxsize=16)
def _tls_context(access: SparkAccess) -> ssl.SSLContext:
    """Raises BadOption: the files are read where the line is, in the driver and in every task."""
    try:
        context = ssl.create_default_context(cafile=access.ca_file or None)
        if not access.verify_server:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if access.cert_file:
            context.load_cert_chain(access.cert_file, access.key_file or None)
    except OSError as error:
        files = ", ".join(filter(None, (access.ca_file, access.cert_file, access.key_file)))
        raise InvalidOption(
            f"tlsCa, tlsCert, tlsKey: {files} cannot be used on {socket.gethostname()}: {error}"
        ) from error
    return context


def parse_access(options: Options) -> SparkAccess:
    """Raises BadOption."""
    access_key, secret_key = options[ACCESS_KEY], options[SECRET_KEY]
    if bool(access_key) != bool(secret_key):
        raise InvalidOption("accessKey and secretKey go together: one of them is missing")
    for option in (TLS_CA, TLS_CERT, TLS_KEY, TLS_VERIFY):
        if options.is_set(option) and not options[TLS]:
            raise InvalidOption(f"option {option.name} needs tls=true: nothing would be encrypted")
    return SparkAccess(
        access_key=access_key,
        secret_key=secret_key,
        security_token=options[SECURITY_TOKEN],
        tls=options[TLS],
        ca_file=options[TLS_CA],
        cert_file=options[TLS_CERT],
        key_file=options[TLS_KEY],
        verify_server=options[TLS_VERIFY],
        timeout_s=options[TIMEOUT_MS] / 1000,
    )


EXACTLY_ONCE: Final = "exactly-once"
AT_LEAST_ONCE: Final = "at-least-once"
_MAX_NAME_LENGTH: Final = 200
_MAX_BATCH_BYTES: Final = 3 << 20  # a broker takes 4 MiB in one message


def _parse_guarantee(text: str) -> str:
    return choice_of(EXACTLY_ONCE, AT_LEAST_ONCE)(text.replace("_", "-"))


def _parse_transactional_id(text: str) -> str:
    if len(text.strip()) > _MAX_NAME_LENGTH or not text.isprintable():
        raise ValueError(f"at most {_MAX_NAME_LENGTH} printable characters")
    return parse_non_empty(text)


TOPIC: Final = Option(
    "topic", parse_non_empty, "", "Where rows go that have no topic of their own."
)
GUARANTEE: Final = Option(
    "guarantee",
    _parse_guarantee,
    "",  # the best that the brokers can do
    f"{EXACTLY_ONCE} (if the brokers can) or {AT_LEAST_ONCE}.",
    ("delivery",),
)
TRANSACTIONAL_ID: Final = Option(
    "transactional.id",
    _parse_transactional_id,
    "",
    "The sink's name; else the query's id, or a random one for a batch.",
)
EPOCH: Final[Option[int | None]] = Option(
    "epoch",
    int_between(0),
    None,
    "Number of a batch write: with transactional.id, a repeated one writes nothing.",
)
PRODUCER_GROUP: Final = Option(
    "group", parse_non_empty, "escrowmq-spark", "Producer group.", ("producerGroup",)
)
TIMEOUT: Final = Option(
    "timeout", int_between(1, 86_400), 60, "Seconds to keep trying when a broker does not answer."
)
BATCH_BYTES: Final = Option(
    "batchBytes",
    int_between(1, _MAX_BATCH_BYTES),
    256 << 10,
    "Bytes of messages that travel together.",
)
IN_FLIGHT_BYTES: Final = Option(
    "inFlightBytes",
    int_between(1, 2**31),
    8 << 20,
    "Bytes that may be on their way to one broker, unanswered.",
)

WRITE_OPTIONS: Final[tuple[Option[Any], ...]] = (
    *CONNECTION_OPTIONS,
    *(
        TOPIC,
        GUARANTEE,
        TRANSACTIONAL_ID,
        EPOCH,
        PRODUCER_GROUP,
        TIMEOUT,
        BATCH_BYTES,
        IN_FLIGHT_BYTES,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """What was chosen, as the tasks use it."""

    servers: str
    access: SparkAccess = SparkAccess()  # it is frozen
    topic: str = TOPIC.default
    guarantee: str = GUARANTEE.default
    transactional_id: str = TRANSACTIONAL_ID.default
    epoch: int | None = EPOCH.default
    group: str = PRODUCER_GROUP.default
    timeout_s: float = TIMEOUT.default
    batch_bytes: int = BATCH_BYTES.default
    in_flight_bytes: int = IN_FLIGHT_BYTES.default


def parse_write_options(texts: Mapping[str, str], *, is_stream: bool) -> WriteOptions:
    """Raises BadOption, which says what to write instead."""
    if any(name.lower() == "path" for name in texts):
        raise InvalidOption(
            "the sink has no path: name the topic with .option('topic', …), then save() or start()"
        )
    chosen = parse_options(texts, WRITE_OPTIONS)
    if not chosen[SERVERS]:
        raise InvalidOption(
            "option servers is missing: the name servers, like .option('servers', '127.0.0.1:9876')"
        )
    found = WriteOptions(
        servers=chosen[SERVERS],
        access=parse_access(chosen),
        topic=chosen[TOPIC],
        guarantee=chosen[GUARANTEE],
        transactional_id=chosen[TRANSACTIONAL_ID],
        epoch=chosen[EPOCH],
        group=chosen[PRODUCER_GROUP],
        timeout_s=chosen[TIMEOUT],
        batch_bytes=chosen[BATCH_BYTES],
        in_flight_bytes=chosen[IN_FLIGHT_BYTES],
    )
    _check_batch_identity(found, is_stream=is_stream)
    return found


def _check_batch_identity(options: WriteOptions, *, is_stream: bool) -> None:
    if is_stream and options.epoch is not None:
        raise InvalidOption(
            "option epoch is for batch writes: a stream counts its epochs itself, leave it out"
        )
    if not is_stream and bool(options.transactional_id) != (options.epoch is not None):
        raise InvalidOption(
            "a batch write that may be repeated needs both transactional.id (the job's name) and "
            "epoch (a number that grows with every run, like 20240131); without either of them it "
            "is atomic, and a second run writes everything again"
        )
