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
from escrowmq.errors import BadOption, NotSent
from escrowmq.parsing import suggestion
from escrowmq.secret import Secret
from escrowmq.spark.offsets import Position, at_time, by_times, places, queues_named

T = TypeVar("T")

# What Spark itself puts among the options of a source or sink.
_SPARKS_OWN: Final = frozenset({"checkpointlocation", "queryname", "paths"})


@dataclass(frozen=True)
class Option(Generic[T]):
    name: str
    read: Callable[[str], T]  # raises ValueError with what would be right
    default: T
    says: str
    aliases: tuple[str, ...] = ()
    is_secret: bool = False

    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class Chosen:
    """Values by option. It is pickled with the reader, so it holds nothing else."""

    values: Mapping[str, Any]
    given: frozenset[str] = field(default_factory=frozenset)  # what the user said himself

    def __getitem__(self, option: Option[T]) -> T:
        value: T = self.values[option.name]
        return value

    def has(self, option: Option[Any]) -> bool:
        return option.name in self.given


def choose(given: Mapping[str, str], table: Sequence[Option[Any]]) -> Chosen:
    """Raises BadOption: an unknown name, one that is there twice, a value that cannot be read."""
    by_name = {name.lower(): option for option in table for name in option.names()}
    values = {option.name: option.default for option in table}
    told: dict[str, str] = {}
    for name, text in given.items():
        option = by_name.get(name.lower())
        if option is None:
            if name.lower() in _SPARKS_OWN:
                continue
            known = [name for option in table for name in option.names()]
            raise BadOption(
                f"there is no option {name!r}{suggestion(name, known)}; "
                f"there are {', '.join(option.name for option in table)}"
            )
        if told.get(option.name, text) != text:
            raise BadOption(f"option {option.name} is there twice, with different values")
        told[option.name] = text
        values[option.name] = _read(option, name, text)
    return Chosen(values, frozenset(told))


def _read(option: Option[T], name: str, text: str) -> T:
    try:
        return option.read(text)
    except ValueError as error:
        shown = "" if option.is_secret else f" {text!r}"
        raise BadOption(f"option {option.name}{shown}: {error}") from error


# --- how a text is read --------------------------------------------------------------------------


def words(text: str) -> list[str]:
    """`a, b` as two; one at the least."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise ValueError("a name is missing")
    return found


def yes_no(text: str) -> bool:
    if text.strip().lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.strip().lower() == "true"


def whole(at_least: int = 1, at_most: int = 2**62) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ValueError("a whole number is wanted") from None
        if number < at_least:
            raise ValueError(f"it must be {at_least} at least")
        if number > at_most:
            raise ValueError(f"it must be {at_most} at most")
        return number

    return read


def one_of(*names: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        for name in names:
            if text.strip().lower() == name.lower():
                return name
        raise ValueError(f"one of {', '.join(names)}")

    return read


def full(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty")
    return text.strip()


# --- of both sides -------------------------------------------------------------------------------

SERVERS: Final = Option(
    "servers",
    full,
    "",
    "Name servers, `host:port`, with `;` between them.",
    ("nameServer", "namesrvAddr", "nameServers", "namesrv"),
)
ACCESS_KEY: Final = Option("accessKey", full, "", "ACL: who asks.")
SECRET_KEY: Final = Option("secretKey", full, "", "ACL: the secret of it.", is_secret=True)
SECURITY_TOKEN: Final = Option(
    "securityToken", full, "", "ACL: of a temporary access key.", is_secret=True
)
TLS: Final = Option("tls", yes_no, False, "Whether to speak TLS.", ("useTLS", "tlsEnable"))
TLS_CA: Final = Option("tlsCa", full, "", "File with the certificates to trust.")
TLS_CERT: Final = Option("tlsCert", full, "", "File with our own certificate.")
TLS_KEY: Final = Option("tlsKey", full, "", "File with the key of it.")
TLS_VERIFY: Final = Option("tlsVerify", yes_no, True, "Whether the server must prove itself.")
TIMEOUT_MS: Final = Option(
    "timeoutMs", whole(), 30_000, "How long an answer may take.", ("pullTimeoutMs",)
)

CONNECTION: Final[tuple[Option[Any], ...]] = (
    *(SERVERS, ACCESS_KEY, SECRET_KEY, SECURITY_TOKEN),
    *(TLS, TLS_CA, TLS_CERT, TLS_KEY, TLS_VERIFY, TIMEOUT_MS),
)


MESSAGES, TRANSACTIONS = "messages", "transactions"

SUBSCRIBE: Final[Option[list[str]]] = Option(
    "subscribe", words, [], "Topics, with commas.", ("topic", "topics")
)
SUBSCRIBE_PATTERN: Final = Option("subscribePattern", full, "", "Topics, as a regular expression.")
ASSIGN: Final = Option("assign", queues_named, None, "Queues: JSON, topic -> broker -> [queue].")
MODE: Final = Option(
    "mode", one_of(MESSAGES, TRANSACTIONS), MESSAGES, "What to read: messages or transactions."
)
PATH: Final = Option("path", full, "", "A broker's directory: read its log files.")
COLUMNS: Final[Option[list[str]]] = Option("columns", words, [], "Only these columns.")
INCLUDE_SYSTEM: Final = Option(
    "includeSystem", yes_no, False, "Whether a pattern also finds the brokers' own topics."
)
TAGS: Final = Option(
    "tags", full, "*", "Only messages with this tag: `a || b`.", ("subExpression", "expression")
)
SQL: Final = Option("sql", full, "", "Only messages for which this SQL92 expression is true.")
CONSUMER_GROUP: Final = Option(
    "group", full, "", "The consumer group.", ("groupId", "consumerGroup", "consumer.group")
)
REPORT_OFFSETS: Final = Option(
    "reportOffsets", yes_no, False, "Stream: whether the group's offsets follow."
)
STARTING: Final = Option("startingOffsets", places, None, "earliest, latest, or JSON.")
ENDING: Final = Option("endingOffsets", places, None, "latest, or JSON. Batch only.")
STARTING_TIME: Final = Option(
    "startingTimestamp", at_time, None, "From this time on, ms since 1970."
)
ENDING_TIME: Final = Option("endingTimestamp", at_time, None, "Up to this time. Batch only.")
STARTING_TIMES: Final = Option(
    "startingOffsetsByTimestamp", by_times, None, "The same by queue, JSON."
)
ENDING_TIMES: Final = Option("endingOffsetsByTimestamp", by_times, None, "The same by queue, JSON.")
FAIL_ON_DATA_LOSS: Final = Option(
    "failOnDataLoss", yes_no, True, "Whether to fail if messages are gone, or go on behind them."
)
MIN_PARTITIONS: Final = Option("minPartitions", whole(), 1, "So many tasks at the least.")
MAX_BYTES_PER_PARTITION: Final = Option(
    "maxBytesPerPartition", whole(), 0, "So many tasks that none reads more."
)
MAX_OFFSETS_PER_TRIGGER: Final = Option(
    "maxOffsetsPerTrigger", whole(), 0, "At most so many messages in a micro-batch."
)
MAX_BYTES_PER_TRIGGER: Final = Option(
    "maxBytesPerTrigger", whole(), 0, "At most about so many bytes in a micro-batch."
)
PULL_BATCH: Final = Option(
    "pullBatchSize", whole(), 8_192, "At most so many messages in a pull; brokers allow less."
)

READ: Final[tuple[Option[Any], ...]] = (
    *CONNECTION,
    *(SUBSCRIBE, SUBSCRIBE_PATTERN, ASSIGN, MODE, PATH, COLUMNS, INCLUDE_SYSTEM, TAGS, SQL),
    *(CONSUMER_GROUP, REPORT_OFFSETS, STARTING, ENDING, STARTING_TIME, ENDING_TIME),
    *(STARTING_TIMES, ENDING_TIMES, FAIL_ON_DATA_LOSS, MIN_PARTITIONS, MAX_BYTES_PER_PARTITION),
    *(MAX_OFFSETS_PER_TRIGGER, MAX_BYTES_PER_TRIGGER, PULL_BATCH),
)

_OF_A_STREAM: Final = (MAX_OFFSETS_PER_TRIGGER, MAX_BYTES_PER_TRIGGER, REPORT_OFFSETS)
_OF_A_BATCH: Final = (ENDING, ENDING_TIME, ENDING_TIMES)
_OF_FILES: Final = (
    PATH,
    SUBSCRIBE,
    MODE,
    COLUMNS,
    FAIL_ON_DATA_LOSS,
    MIN_PARTITIONS,
    MAX_BYTES_PER_PARTITION,
)
_WHICH: Final = (SUBSCRIBE, SUBSCRIBE_PATTERN, ASSIGN)


def read_options(given: Mapping[str, str], *, is_stream: bool) -> Chosen:
    """Raises BadOption."""
    chosen = choose(given, READ)
    _refuse(chosen, _OF_A_BATCH if is_stream else _OF_A_STREAM, is_stream)
    if chosen.has(PATH):
        _check_files(chosen, is_stream)
        return chosen
    if not chosen[SERVERS]:
        raise BadOption(
            'option servers is missing: the name server, .option("servers", "host:9876"); '
            "or path, to read a broker's files"
        )
    which = [option.name for option in _WHICH if chosen.has(option)]
    if chosen[MODE] == TRANSACTIONS:
        if which:
            raise BadOption(f"mode=transactions knows its topics: leave {which[0]} out")
    elif len(which) != 1:
        named = " and ".join(which) or "none of them"
        raise BadOption(f"one of subscribe, subscribePattern, assign is wanted; there is {named}")
    if chosen.has(TAGS) and chosen.has(SQL):
        raise BadOption("tags or sql, not both")
    if chosen[REPORT_OFFSETS] and not chosen[CONSUMER_GROUP]:
        raise BadOption("reportOffsets needs a group whose offsets follow: option group")
    if not is_stream and start_of(chosen, is_stream=False) is Position.LATEST:
        raise BadOption("a batch that starts at latest would be empty")
    if end_of(chosen) is Position.EARLIEST:
        raise BadOption("a batch that ends at earliest would be empty")
    return chosen


def start_of(chosen: Chosen, *, is_stream: bool) -> Any:
    """A time counts more than times by queue, and these more than offsets."""
    said = chosen[STARTING_TIME] or chosen[STARTING_TIMES] or chosen[STARTING]
    if said is not None:
        return said
    return Position.LATEST if is_stream else Position.EARLIEST


def end_of(chosen: Chosen) -> Any:
    said = chosen[ENDING_TIME] or chosen[ENDING_TIMES] or chosen[ENDING]
    return Position.LATEST if said is None else said


def _refuse(chosen: Chosen, unfit: tuple[Option[Any], ...], is_stream: bool) -> None:
    for option in unfit:
        if chosen.has(option):
            where = "a batch" if is_stream else "a stream"
            raise BadOption(f"option {option.name} is for {where} only")


def _check_files(chosen: Chosen, is_stream: bool) -> None:
    if is_stream:
        raise BadOption("log files are read in a batch; a stream reads from brokers: servers")
    fit = {option.name for option in _OF_FILES}
    for name in sorted(chosen.given - fit):
        raise BadOption(f"option {name} does not go with path; these do: {', '.join(sorted(fit))}")


@dataclass(frozen=True)
class Access:
    access_key: str = ""
    secret_key: str = field(default="", repr=False)
    security_token: str = field(default="", repr=False)
    tls: bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    verify: bool = True
    timeout_s: float = 30.0  # for an answer

    def signed(self, fields: Mapping[str, str], body: bytes) -> dict[str, str]:
        """The fields of a request, and what proves that they are ours."""
        if not self.access_key:
            return dict(fields)
        return _signer(self)(dict(fields), body)

    def connect(self, address: str, timeout_s: float) -> socket.socket:
        """Raises NotSent."""
        host, _, port = address.rpartition(":")
        try:
            line = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, ValueError) as error:
            raise NotSent(f"{address} cannot be reached: {error}") from error
        if not self.tls:
            return line
        try:
            return _context(self).wrap_socket(line, server_hostname=host.strip("[]"))
        except OSError as error:
            line.close()
            raise NotSent(f"{address} speaks no TLS that we trust: {error}") from error


@lru_cache(maxsize=16)
def _signer(access: Access) -> Signer:
    return Signer(access.access_key, Secret(access.secret_key), Secret(access.security_token))


@lru_cache(maxsize=16)
def _context(access: Access) -> ssl.SSLContext:
    """Raises BadOption: the files are read where the line is, in the driver and in every task."""
    try:
        context = ssl.create_default_context(cafile=access.ca_file or None)
        if not access.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if access.cert_file:
            context.load_cert_chain(access.cert_file, access.key_file or None)
    except OSError as error:
        files = ", ".join(filter(None, (access.ca_file, access.cert_file, access.key_file)))
        raise BadOption(
            f"tlsCa, tlsCert, tlsKey: {files} cannot be used on {socket.gethostname()}: {error}"
        ) from error
    return context


def access_of(chosen: Chosen) -> Access:
    """Raises BadOption."""
    access_key, secret_key = chosen[ACCESS_KEY], chosen[SECRET_KEY]
    if bool(access_key) != bool(secret_key):
        raise BadOption("accessKey and secretKey go together: one of them is missing")
    for option in (TLS_CA, TLS_CERT, TLS_KEY, TLS_VERIFY):
        if chosen.has(option) and not chosen[TLS]:
            raise BadOption(f"option {option.name} needs tls=true: nothing would be encrypted")
    return Access(
        access_key=access_key,
        secret_key=secret_key,
        security_token=chosen[SECURITY_TOKEN],
        tls=chosen[TLS],
        ca_file=chosen[TLS_CA],
        cert_file=chosen[TLS_CERT],
        key_file=chosen[TLS_KEY],
        verify=chosen[TLS_VERIFY],
        timeout_s=chosen[TIMEOUT_MS] / 1000,
    )


EXACTLY_ONCE: Final = "exactly-once"
AT_LEAST_ONCE: Final = "at-least-once"
_NAME_MAX: Final = 200
_BATCH_BYTES_MAX: Final = 3 << 20  # a broker takes 4 MiB in one message


def _guarantee(text: str) -> str:
    return one_of(EXACTLY_ONCE, AT_LEAST_ONCE)(text.replace("_", "-"))


def _name(text: str) -> str:
    if len(text.strip()) > _NAME_MAX or not text.isprintable():
        raise ValueError(f"at most {_NAME_MAX} printable characters")
    return full(text)


TOPIC: Final = Option("topic", full, "", "Where rows go that have no topic of their own.")
GUARANTEE: Final = Option(
    "guarantee",
    _guarantee,
    "",  # the best that the brokers can do
    f"{EXACTLY_ONCE} (if the brokers can) or {AT_LEAST_ONCE}.",
    ("delivery",),
)
TRANSACTIONAL_ID: Final = Option(
    "transactional.id",
    _name,
    "",
    "The sink's name; else the query's id, or a random one for a batch.",
)
EPOCH: Final[Option[int | None]] = Option(
    "epoch",
    whole(0),
    None,
    "Number of a batch write: with transactional.id, a repeated one writes nothing.",
)
PRODUCER_GROUP: Final = Option(
    "group", full, "escrowmq-spark", "Producer group.", ("producerGroup",)
)
TIMEOUT: Final = Option(
    "timeout", whole(1, 86_400), 60, "Seconds to keep trying when a broker does not answer."
)
BATCH_BYTES: Final = Option(
    "batchBytes", whole(1, _BATCH_BYTES_MAX), 256 << 10, "Bytes of messages that travel together."
)
IN_FLIGHT_BYTES: Final = Option(
    "inFlightBytes",
    whole(1, 2**31),
    8 << 20,
    "Bytes that may be on their way to one broker, unanswered.",
)

WRITE: Final[tuple[Option[Any], ...]] = (
    *CONNECTION,
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
    access: Access = Access()  # it is frozen
    topic: str = TOPIC.default
    guarantee: str = GUARANTEE.default
    transactional_id: str = TRANSACTIONAL_ID.default
    epoch: int | None = EPOCH.default
    group: str = PRODUCER_GROUP.default
    timeout_s: float = TIMEOUT.default
    batch_bytes: int = BATCH_BYTES.default
    in_flight_bytes: int = IN_FLIGHT_BYTES.default


def write_options(given: Mapping[str, str], *, streaming: bool) -> WriteOptions:
    """Raises BadOption, which says what to write instead."""
    if any(name.lower() == "path" for name in given):
        raise BadOption(
            "the sink has no path: name the topic with .option('topic', …), then save() or start()"
        )
    chosen = choose(given, WRITE)
    if not chosen[SERVERS]:
        raise BadOption(
            "option servers is missing: the name servers, like .option('servers', '127.0.0.1:9876')"
        )
    found = WriteOptions(
        servers=chosen[SERVERS],
        access=access_of(chosen),
        topic=chosen[TOPIC],
        guarantee=chosen[GUARANTEE],
        transactional_id=chosen[TRANSACTIONAL_ID],
        epoch=chosen[EPOCH],
        group=chosen[PRODUCER_GROUP],
        timeout_s=chosen[TIMEOUT],
        batch_bytes=chosen[BATCH_BYTES],
        in_flight_bytes=chosen[IN_FLIGHT_BYTES],
    )
    _refuse_half_a_name(found, streaming=streaming)
    return found


def _refuse_half_a_name(options: WriteOptions, *, streaming: bool) -> None:
    if streaming and options.epoch is not None:
        raise BadOption(
            "option epoch is for batch writes: a stream counts its epochs itself, leave it out"
        )
    if not streaming and bool(options.transactional_id) != (options.epoch is not None):
        raise BadOption(
            "a batch write that may be repeated needs both transactional.id (the job's name) and "
            "epoch (a number that grows with every run, like 20240131); without either of them it "
            "is atomic, and a second run writes everything again"
        )
