"""Options of the source and the sink: declared in tables, parsed once, every name checked.

    parsed = parse_options(texts, READ_OPTIONS)
    parsed[SERVERS]

An option that is not in the table is refused, with a suggestion. Spark passes names in lower case
and values as text. The module has three parts: how options are declared and parsed, the options of
reading, and the options of writing; those of a connection belong to both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from escrowmq.client.access import NO_ACCESS, Access
from escrowmq.errors import InvalidOption
from escrowmq.parsing import did_you_mean, parse_servers
from escrowmq.spark.offsets import (
    Offsets,
    QueueTimes,
    SymbolicOffset,
    parse_offsets,
    parse_queues,
    parse_time,
    parse_times_by_queue,
)

T = TypeVar("T")

# Options that Spark itself adds to those of a source or sink.
_SPARK_OPTION_NAMES: Final = frozenset({"checkpointlocation", "queryname", "paths"})


@dataclass(frozen=True)
class Option(Generic[T]):
    """The declaration of an option."""

    name: str
    parse: Callable[[str], T]  # raises ValueError with a text that says what is expected
    default: T
    description: str
    aliases: tuple[str, ...] = ()
    is_secret: bool = False

    def all_names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class Options:
    """Parsed values of options. They are pickled with the reader."""

    values: Mapping[str, Any]
    explicit: frozenset[str] = field(default_factory=frozenset)  # names that the user has set

    def __getitem__(self, option: Option[T]) -> T:
        value: T = self.values[option.name]
        return value

    def is_set(self, option: Option[Any]) -> bool:
        return option.name in self.explicit


def parse_options(texts: Mapping[str, str], known_options: Sequence[Option[Any]]) -> Options:
    """Return the values, with defaults.

    Raises InvalidOption for an unknown name, for two values of one option, for an invalid value.
    """
    by_name = {name.lower(): option for option in known_options for name in option.all_names()}
    values = {option.name: option.default for option in known_options}
    given_texts: dict[str, str] = {}
    for name, text in texts.items():
        option = by_name.get(name.lower())
        if option is None:
            if name.lower() in _SPARK_OPTION_NAMES:
                continue
            all_names = [name for option in known_options for name in option.all_names()]
            raise InvalidOption(
                f"there is no option {name!r}{did_you_mean(name, all_names)}; "
                f"there are {', '.join(option.name for option in known_options)}"
            )
        # A user may set an option and its alias.
        if given_texts.get(option.name, text) != text:
            raise InvalidOption(f"option {option.name} is given twice, with different values")
        given_texts[option.name] = text
        values[option.name] = _parse_value(option, text)
    return Options(values, frozenset(given_texts))


def _parse_value(option: Option[T], text: str) -> T:
    try:
        return option.parse(text)
    except ValueError as error:
        shown = "" if option.is_secret else f" {text!r}"
        raise InvalidOption(f"option {option.name}{shown}: {error}") from error


# --- values --------------------------------------------------------------------------------------


def parse_names(text: str) -> list[str]:
    """Parse a comma-separated list with at least one name."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ValueError("a name is missing")
    return words


def parse_bool(text: str) -> bool:
    if text.strip().lower() not in ("true", "false"):
        raise ValueError("expected true or false")
    return text.strip().lower() == "true"


def int_between(minimum: int = 1, maximum: int = 2**62) -> Callable[[str], int]:
    """Return a parser of whole numbers within these limits."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ValueError("expected a whole number") from None
        if number < minimum:
            raise ValueError(f"the minimum is {minimum}")
        if number > maximum:
            raise ValueError(f"the maximum is {maximum}")
        return number

    return parse


def choice_of(*names: str) -> Callable[[str], str]:
    """Return a parser that accepts these names, in any case."""

    def parse(text: str) -> str:
        for name in names:
            if text.strip().lower() == name.lower():
                return name
        raise ValueError(f"expected one of {', '.join(names)}")

    return parse


def parse_non_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty")
    return text.strip()


def _checked_servers(text: str) -> str:
    parse_servers(text)
    return text


# --- connection ----------------------------------------------------------------------------------

SERVERS: Final = Option(
    "servers",
    _checked_servers,
    "",
    "Name servers, `host:port`, separated by `;` or `,`.",
    ("nameServer", "namesrvAddr", "nameServers", "namesrv"),
)
ACCESS_KEY: Final = Option("accessKey", parse_non_empty, "", "ACL: the account.")
SECRET_KEY: Final = Option(
    "secretKey", parse_non_empty, "", "ACL: the secret of the account.", is_secret=True
)
SECURITY_TOKEN: Final = Option(
    "securityToken", parse_non_empty, "", "ACL: the token of a temporary account.", is_secret=True
)
STRONG_SIGNATURE: Final = Option(
    "strongSignature",
    parse_bool,
    False,
    "ACL: whether to sign with EscrowMQ's own signature, which RocketMQ does not know.",
)
TLS: Final = Option("tls", parse_bool, False, "Whether to use TLS.", ("useTLS", "tlsEnable"))
TLS_CA: Final = Option("tlsCa", parse_non_empty, "", "File with the certificates to trust.")
TLS_CERT: Final = Option("tlsCert", parse_non_empty, "", "File with the client's certificate.")
TLS_KEY: Final = Option("tlsKey", parse_non_empty, "", "File with the key of that certificate.")
TLS_VERIFY: Final = Option(
    "tlsVerify", parse_bool, True, "Whether to verify the server's certificate."
)
TIMEOUT_MS: Final = Option(
    "timeoutMs", int_between(), 30_000, "How long to wait for a response.", ("pullTimeoutMs",)
)

CONNECTION_OPTIONS: Final[tuple[Option[Any], ...]] = (
    *(SERVERS, ACCESS_KEY, SECRET_KEY, SECURITY_TOKEN, STRONG_SIGNATURE),
    *(TLS, TLS_CA, TLS_CERT, TLS_KEY, TLS_VERIFY, TIMEOUT_MS),
)


def parse_access(options: Options) -> Access:
    """Return account and TLS settings. Raises InvalidOption.

    The TLS files are read where a connection is opened: in the driver and in every task.
    """
    access_key, secret_key = options[ACCESS_KEY], options[SECRET_KEY]
    if bool(access_key) != bool(secret_key):
        raise InvalidOption("accessKey and secretKey belong together: one of them is missing")
    if options[STRONG_SIGNATURE] and not access_key:
        raise InvalidOption("strongSignature needs accessKey and secretKey")
    for option in (TLS_CA, TLS_CERT, TLS_KEY, TLS_VERIFY):
        if options.is_set(option) and not options[TLS]:
            raise InvalidOption(f"option {option.name} needs tls=true")
    try:
        return Access(
            access_key=access_key,
            secret_key=secret_key,
            security_token=options[SECURITY_TOKEN],
            tls=options[TLS],
            ca_file=options[TLS_CA],
            cert_file=options[TLS_CERT],
            key_file=options[TLS_KEY],
            verify_server=options[TLS_VERIFY],
            strong_signature=options[STRONG_SIGNATURE],
        )
    except ValueError as error:
        raise InvalidOption(f"options tlsCa, tlsCert, tlsKey: {error}") from error


# --- read ----------------------------------------------------------------------------------------

MESSAGES, TRANSACTIONS = "messages", "transactions"  # values of `mode`

SUBSCRIBE: Final[Option[list[str]]] = Option(
    "subscribe", parse_names, [], "Topics, separated by commas.", ("topic", "topics")
)
SUBSCRIBE_PATTERN: Final = Option(
    "subscribePattern", parse_non_empty, "", "A regular expression that whole topic names match."
)
ASSIGN: Final = Option("assign", parse_queues, None, "Queues, JSON: topic -> broker -> [queue].")
MODE: Final = Option(
    "mode", choice_of(MESSAGES, TRANSACTIONS), MESSAGES, "What to read: messages or transactions."
)
PATH: Final = Option("path", parse_non_empty, "", "A broker's directory, to read its log files.")
COLUMNS: Final[Option[list[str]]] = Option("columns", parse_names, [], "Read only these columns.")
INCLUDE_SYSTEM: Final = Option(
    "includeSystem", parse_bool, False, "Whether subscribePattern includes internal topics."
)
TAGS: Final = Option(
    "tags",
    parse_non_empty,
    "*",
    "Only messages with one of these tags: `a || b`.",
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
    "reportOffsets", parse_bool, False, "Stream: whether to set the group's offsets."
)
STARTING_OFFSETS: Final = Option(
    "startingOffsets", parse_offsets, None, "earliest, latest, or JSON."
)
ENDING_OFFSETS: Final = Option("endingOffsets", parse_offsets, None, "latest, or JSON. Batch only.")
STARTING_TIMESTAMP: Final = Option(
    "startingTimestamp", parse_time, None, "Start at this time, ms since 1970."
)
ENDING_TIMESTAMP: Final = Option(
    "endingTimestamp", parse_time, None, "End before this time. Batch only."
)
STARTING_OFFSETS_BY_TIMESTAMP: Final = Option(
    "startingOffsetsByTimestamp", parse_times_by_queue, None, "Starting times by queue, JSON."
)
ENDING_OFFSETS_BY_TIMESTAMP: Final = Option(
    "endingOffsetsByTimestamp", parse_times_by_queue, None, "Ending times by queue, JSON."
)
FAIL_ON_DATA_LOSS: Final = Option(
    "failOnDataLoss",
    parse_bool,
    True,
    "Whether to fail if messages are gone, or to continue behind them.",
)
MIN_PARTITIONS: Final = Option("minPartitions", int_between(), 1, "Minimum number of tasks.")
MAX_BYTES_PER_PARTITION: Final = Option(
    "maxBytesPerPartition", int_between(), 0, "Maximum number of bytes that a task reads."
)
MAX_OFFSETS_PER_TRIGGER: Final = Option(
    "maxOffsetsPerTrigger", int_between(), 0, "Maximum number of messages in a micro-batch."
)
MAX_BYTES_PER_TRIGGER: Final = Option(
    "maxBytesPerTrigger", int_between(), 0, "Approximate maximum of bytes in a micro-batch."
)
PULL_BATCH_SIZE: Final = Option(
    "pullBatchSize", int_between(), 8_192, "Maximum number of messages in a pull; brokers limit it."
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
    """Return the options of a read. Raises InvalidOption, also for options that exclude others."""
    parsed = parse_options(texts, READ_OPTIONS)
    _reject_options(parsed, _BATCH_ONLY if is_stream else _STREAM_ONLY, is_stream)
    if parsed.is_set(PATH):
        _check_file_options(parsed, is_stream)
        return parsed
    if not parsed[SERVERS]:
        raise InvalidOption(
            'option servers is missing: name a name server with .option("servers", "host:9876"), '
            "or path to read a broker's files"
        )
    selectors = [option.name for option in _TOPIC_SELECTORS if parsed.is_set(option)]
    if parsed[MODE] == TRANSACTIONS:
        if selectors:
            raise InvalidOption(f"mode=transactions has its own topics: remove {selectors[0]}")
    elif len(selectors) != 1:
        given = " and ".join(selectors) or "none of them"
        raise InvalidOption(
            f"one of subscribe, subscribePattern, assign is required; there is {given}"
        )
    if parsed.is_set(TAGS) and parsed.is_set(SQL):
        raise InvalidOption("use tags or sql, not both")
    if parsed[REPORT_OFFSETS] and not parsed[CONSUMER_GROUP]:
        raise InvalidOption("reportOffsets needs the group whose offsets it sets: option group")
    if not is_stream and start_position(parsed, is_stream=False) is SymbolicOffset.LATEST:
        raise InvalidOption("a batch that starts at latest would be empty")
    if end_position(parsed) is SymbolicOffset.EARLIEST:
        raise InvalidOption("a batch that ends at earliest would be empty")
    return parsed


Position = SymbolicOffset | QueueTimes | Offsets


def start_position(options: Options, *, is_stream: bool) -> Position:
    """Return where to start. One time takes precedence over times by queue, these over offsets."""
    position: Position | None = (
        options[STARTING_TIMESTAMP]
        or options[STARTING_OFFSETS_BY_TIMESTAMP]
        or options[STARTING_OFFSETS]
    )
    if position is not None:
        return position
    return SymbolicOffset.LATEST if is_stream else SymbolicOffset.EARLIEST


def end_position(options: Options) -> Position:
    """Return where to end, with the same precedence."""
    position: Position | None = (
        options[ENDING_TIMESTAMP] or options[ENDING_OFFSETS_BY_TIMESTAMP] or options[ENDING_OFFSETS]
    )
    return SymbolicOffset.LATEST if position is None else position


def _reject_options(options: Options, disallowed: tuple[Option[Any], ...], is_stream: bool) -> None:
    for option in disallowed:
        if options.is_set(option):
            other_kind = "a batch" if is_stream else "a stream"
            raise InvalidOption(f"option {option.name} is for {other_kind} only")


def _check_file_options(options: Options, is_stream: bool) -> None:
    if is_stream:
        raise InvalidOption(
            "log files can only be read in a batch; a stream reads from brokers: use servers"
        )
    allowed = {option.name for option in _FILE_OPTIONS}
    for name in sorted(options.explicit - allowed):
        raise InvalidOption(
            f"option {name} cannot be used with path; allowed are {', '.join(sorted(allowed))}"
        )


# --- write ---------------------------------------------------------------------------------------

EXACTLY_ONCE: Final = "exactly-once"
AT_LEAST_ONCE: Final = "at-least-once"
_MAX_NAME_LENGTH: Final = 200
_MAX_BATCH_BYTES: Final = 3 << 20  # brokers accept 4 MiB in one message


def _parse_guarantee(text: str) -> str:
    return choice_of(EXACTLY_ONCE, AT_LEAST_ONCE)(text.replace("_", "-"))


def _parse_transactional_id(text: str) -> str:
    if len(text.strip()) > _MAX_NAME_LENGTH or not text.isprintable():
        raise ValueError(f"expected at most {_MAX_NAME_LENGTH} printable characters")
    return parse_non_empty(text)


TOPIC: Final = Option("topic", parse_non_empty, "", "The topic of rows that have no column topic.")
GUARANTEE: Final = Option(
    "guarantee",
    _parse_guarantee,
    "",  # the best that the brokers support
    f"{EXACTLY_ONCE} (if the brokers support it) or {AT_LEAST_ONCE}.",
    ("delivery",),
)
TRANSACTIONAL_ID: Final = Option(
    "transactional.id",
    _parse_transactional_id,
    "",
    "The sink's name. Default: the query's id, or a random name for a batch.",
)
EPOCH: Final[Option[int | None]] = Option(
    "epoch",
    int_between(0),
    None,
    "Number of a batch write. With transactional.id, a repeated number writes nothing.",
)
PRODUCER_GROUP: Final = Option(
    "group", parse_non_empty, "escrowmq-spark", "Producer group.", ("producerGroup",)
)
TIMEOUT: Final = Option(
    "timeout", int_between(1, 86_400), 60, "Seconds to retry while a broker does not respond."
)
BATCH_BYTES: Final = Option(
    "batchBytes",
    int_between(1, _MAX_BATCH_BYTES),
    256 << 10,
    "Bytes of messages in one request.",
)
IN_FLIGHT_BYTES: Final = Option(
    "inFlightBytes",
    int_between(1, 2**31),
    8 << 20,
    "Bytes sent to one broker that may be without a response.",
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
    """The options of a write, as its tasks use them."""

    servers: str
    access: Access = NO_ACCESS
    response_timeout_s: float = TIMEOUT_MS.default / 1000
    topic: str = TOPIC.default
    guarantee: str = GUARANTEE.default
    transactional_id: str = TRANSACTIONAL_ID.default
    epoch: int | None = EPOCH.default
    group: str = PRODUCER_GROUP.default
    timeout_s: float = TIMEOUT.default
    batch_bytes: int = BATCH_BYTES.default
    in_flight_bytes: int = IN_FLIGHT_BYTES.default


def parse_write_options(texts: Mapping[str, str], *, is_stream: bool) -> WriteOptions:
    """Return the options of a write. Raises InvalidOption."""
    if any(name.lower() == "path" for name in texts):
        raise InvalidOption(
            "the sink has no path: name the topic with .option('topic', …), then save() or start()"
        )
    parsed = parse_options(texts, WRITE_OPTIONS)
    if not parsed[SERVERS]:
        raise InvalidOption(
            "option servers is missing: name a name server with "
            ".option('servers', '127.0.0.1:9876')"
        )
    options = WriteOptions(
        servers=parsed[SERVERS],
        access=parse_access(parsed),
        response_timeout_s=parsed[TIMEOUT_MS] / 1000,
        topic=parsed[TOPIC],
        guarantee=parsed[GUARANTEE],
        transactional_id=parsed[TRANSACTIONAL_ID],
        epoch=parsed[EPOCH],
        group=parsed[PRODUCER_GROUP],
        timeout_s=parsed[TIMEOUT],
        batch_bytes=parsed[BATCH_BYTES],
        in_flight_bytes=parsed[IN_FLIGHT_BYTES],
    )
    _check_batch_identity(options, is_stream=is_stream)
    return options


def _check_batch_identity(options: WriteOptions, *, is_stream: bool) -> None:
    if is_stream and options.epoch is not None:
        raise InvalidOption(
            "option epoch is for batch writes: a stream counts its epochs itself, remove it"
        )
    if not is_stream and bool(options.transactional_id) != (options.epoch is not None):
        raise InvalidOption(
            "a batch write that may be repeated needs both transactional.id (the job's name) and "
            "epoch (a number that grows with every run, like 20240131); without both, the write "
            "is atomic, but a second run writes everything again"
        )
