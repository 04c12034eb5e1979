"""JSON bodies of clients, name servers and transactions: heartbeats, routes, histories and others.

Java's fastjson writes maps with number keys unquoted, `{0:"10.0.0.1:10911"}`, which is not JSON.
They are read, but never written. C++ clients write enums as numbers and longs as strings; both are
read. Unknown keys are skipped; fields that are None are not written.

The last part decodes a REGISTER_BROKER body in the packed form that some RocketMQ brokers send.
"""

from __future__ import annotations

import contextlib
import struct
from functools import cache
from typing import Any, Final, TypeVar

import msgspec
from msgspec import field

from escrowmq.errors import BrokenBody, LocalProtocolError
from escrowmq.message.compression import decompress_in_slices
from escrowmq.message.topic_config import DataVersion, TopicConfig
from escrowmq.parsing import Int32, Int64, parse_lenient_json
from escrowmq.sliced_work import SlicedResult, run_to_end

B = TypeVar("B", bound=msgspec.Struct)

# Limits of request bodies. The first is enough for a lock of 10,000 queues; up to the second, null
# and keys without quotes are understood, which takes ten times as long.
REQUEST_BODY_BYTES_MAX: Final = 1 << 20
LENIENT_BODY_BYTES_MAX: Final = 64 << 10
HEARTBEAT_BYTES_MAX: Final = 512 << 10
HALF_POSITIONS_BYTES_MAX: Final = 4 << 20  # a hundred thousand positions with long offsets
REGISTRATION_BYTES_MAX: Final = 8 << 20  # of a broker with some fifty thousand topics


class JsonBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base of the bodies."""


def decode_body(body_type: type[B], body: bytes | memoryview) -> B:
    """Return the decoded body. Raises BrokenBody, whatever is wrong with it."""
    # Strict JSON without null, which is what most clients write, takes a tenth of the time.
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = str(body, "utf-8")
        if "null" not in text:
            decoded: B = _decoder(body_type).decode(text)
            return decoded
    return _decode_lenient(body_type, body)


def decode_request_body(
    body_type: type[B], body: bytes | memoryview, *, bytes_max: int = REQUEST_BODY_BYTES_MAX
) -> B:
    """Do the same with the body of a request, within bounds. Raises BrokenBody.

    A body cannot be decoded in parts, so its length bounds the time for which others wait.
    """
    if len(body) > bytes_max:
        raise BrokenBody(f"{body_type.__name__}: {len(body)} bytes, the limit is {bytes_max}")
    if len(body) <= LENIENT_BODY_BYTES_MAX:
        return decode_body(body_type, body)
    try:
        text = str(body, "utf-8")
        if "null" in text:
            raise BrokenBody(
                f"{body_type.__name__}: null is not accepted in a body of more than "
                f"{LENIENT_BODY_BYTES_MAX} bytes"
            )
        decoded: B = _decoder(body_type).decode(text)
        return decoded
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BrokenBody(f"{body_type.__name__}: {error}") from error


def _decode_lenient(body_type: type[B], body: bytes | memoryview) -> B:
    try:
        # Java writes null for "not set", so null must not override a default.
        return msgspec.convert(_without_nulls(parse_lenient_json(body)), body_type, strict=False)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BrokenBody(f"{body_type.__name__}: {error}") from error


@cache
def _decoder(body_type: type[B]) -> msgspec.json.Decoder[B]:
    return msgspec.json.Decoder(body_type, strict=False)


def encode_body(body: msgspec.Struct) -> bytes:
    """Return a body as JSON, without fields that are None. Raises LocalProtocolError."""
    try:
        encoded = msgspec.json.encode(body)
        if b"null" not in encoded:  # no field is None
            return encoded
        return msgspec.json.encode(_without_nulls(msgspec.to_builtins(body, str_keys=True)))
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"{type(body).__name__}: cannot encode text: {error}") from error


def _without_nulls(value: Any) -> Any:
    match value:
        case dict():
            return {key: _without_nulls(item) for key, item in value.items() if item is not None}
        case list():
            return [_without_nulls(item) for item in value if item is not None]
        case _:
            return value


# --- clients -------------------------------------------------------------------------------------


class ProducerEntry(JsonBody, frozen=True, kw_only=True):
    group_name: str


class SubscriptionEntry(JsonBody, frozen=True, kw_only=True):
    topic: str
    sub_string: str = "*"
    tags_set: list[str] = []
    code_set: list[Int32] = []
    sub_version: Int64 = 0
    expression_type: str | None = "TAG"
    class_filter_mode: bool = False


_CONSUME_TYPES = ("CONSUME_ACTIVELY", "CONSUME_PASSIVELY", "CONSUME_POP")
_MESSAGE_MODELS = ("BROADCASTING", "CLUSTERING")
_CONSUME_FROM_WHERE = (
    "CONSUME_FROM_LAST_OFFSET",
    "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST",
    "CONSUME_FROM_MIN_OFFSET",
    "CONSUME_FROM_MAX_OFFSET",
    "CONSUME_FROM_FIRST_OFFSET",
    "CONSUME_FROM_TIMESTAMP",
)


class ConsumerEntry(JsonBody, frozen=True, kw_only=True):
    group_name: str
    consume_type: str | int = "CONSUME_PASSIVELY"
    message_model: str | int = "CLUSTERING"
    consume_from_where: str | int = "CONSUME_FROM_LAST_OFFSET"
    subscription_data_set: list[SubscriptionEntry] = []
    unit_mode: bool = False

    def __post_init__(self) -> None:
        # C++ clients write numbers; all other code compares names.
        _number_to_name(self, "consume_type", _CONSUME_TYPES)
        _number_to_name(self, "message_model", _MESSAGE_MODELS)
        _number_to_name(self, "consume_from_where", _CONSUME_FROM_WHERE)


def _number_to_name(entry: ConsumerEntry, name: str, names: tuple[str, ...]) -> None:
    value = getattr(entry, name)
    if isinstance(value, str) and not value.isdecimal():
        return
    number = int(value)
    if number not in range(len(names)):
        raise ValueError(f"{name} {number} is not one of {', '.join(names)}")
    msgspec.structs.force_setattr(entry, name, names[number])


class Heartbeat(JsonBody, frozen=True, kw_only=True):
    client_id: str = field(name="clientID")
    producer_data_set: list[ProducerEntry] = []
    consumer_data_set: list[ConsumerEntry] = []
    heartbeat_fingerprint: Int32 = 0
    without_sub: bool = False


HEARTBEAT_SUBSCRIPTIONS_MAX: Final = 4_096  # of all groups together


def decode_heartbeat(body: bytes | memoryview) -> Heartbeat:
    """Return the decoded heartbeat of a request. Raises BrokenBody, also if it is too large."""
    heartbeat = decode_request_body(Heartbeat, body, bytes_max=HEARTBEAT_BYTES_MAX)
    count = sum(len(consumer.subscription_data_set) for consumer in heartbeat.consumer_data_set)
    if count > HEARTBEAT_SUBSCRIPTIONS_MAX:
        raise BrokenBody(
            f"the heartbeat has {count} subscriptions, the limit is {HEARTBEAT_SUBSCRIPTIONS_MAX}"
        )
    return heartbeat


class CheckClientConfig(JsonBody, frozen=True, kw_only=True):
    client_id: str
    group: str
    subscription_data: SubscriptionEntry
    namespace: str | None = None


class ConsumerList(JsonBody, frozen=True, kw_only=True):
    consumer_id_list: list[str] = []


class QueueName(JsonBody, frozen=True, kw_only=True):
    topic: str
    broker_name: str
    queue_id: Int32


class LockBatch(JsonBody, frozen=True, kw_only=True):
    """LOCK_BATCH_MQ and UNLOCK_BATCH_MQ."""

    consumer_group: str
    client_id: str
    only_this_broker: bool = False
    mq_set: list[QueueName] = []


class LockBatchResponse(JsonBody, frozen=True, kw_only=True):
    locked: list[QueueName] = field(default_factory=list, name="lockOKMQSet")


# --- name server ---------------------------------------------------------------------------------


class QueueRoute(JsonBody, frozen=True, kw_only=True):
    broker_name: str
    read_queue_nums: Int32
    write_queue_nums: Int32
    perm: Int32
    topic_sys_flag: Int32 = 0


class BrokerRoute(JsonBody, frozen=True, kw_only=True):
    broker_name: str
    cluster: str | None = None
    broker_addrs: dict[int, str] = {}  # ip:port by broker id; 0 is the master
    enable_acting_master: bool | None = None
    zone_name: str | None = None


class TopicRoute(JsonBody, frozen=True, kw_only=True):
    queue_datas: list[QueueRoute] = []
    broker_datas: list[BrokerRoute] = []
    filter_server_table: dict[str, list[str]] = {}
    order_topic_conf: str | None = None


class ClusterInfo(JsonBody, frozen=True, kw_only=True):
    broker_addr_table: dict[str, BrokerRoute] = {}
    cluster_addr_table: dict[str, list[str]] = {}


class TopicList(JsonBody, frozen=True, kw_only=True):
    topic_list: list[str] = []
    broker_addr: str | None = None  # of system topics: a broker that knows the others


class BrokerMembers(JsonBody, frozen=True, kw_only=True):
    """Part of BrokerMemberGroup."""

    cluster: str
    broker_name: str
    broker_addrs: dict[int, str] = {}


class BrokerMemberGroup(JsonBody, frozen=True, kw_only=True):
    """The response to GET_BROKER_MEMBER_GROUP."""

    broker_member_group: BrokerMembers | None = None


class TopicConfigs(JsonBody, frozen=True, kw_only=True):
    """The response to GET_ALL_TOPIC_CONFIG, and part of a registration."""

    topic_config_table: dict[str, TopicConfig] = {}
    data_version: DataVersion = DataVersion()


class RegisterBrokerBody(JsonBody, frozen=True, kw_only=True):
    topic_config_serialize_wrapper: TopicConfigs = TopicConfigs()
    filter_server_list: list[str] = []


class _RawTopicConfigs(JsonBody, frozen=True, kw_only=True):
    topic_config_table: dict[str, msgspec.Raw] = {}
    data_version: DataVersion = DataVersion()


class _RawRegistration(JsonBody, frozen=True, kw_only=True):
    """A registration whose topics are not decoded yet."""

    topic_config_serialize_wrapper: _RawTopicConfigs = _RawTopicConfigs()
    filter_server_list: list[str] = []


def decode_registration(body: bytes | memoryview) -> RegisterBrokerBody:
    """Return the decoded registration. Raises BrokenBody."""
    return run_to_end(decode_registration_in_slices(body))


def decode_registration_in_slices(
    body: bytes | memoryview, *, bytes_max: int = REGISTRATION_BYTES_MAX
) -> SlicedResult[RegisterBrokerBody]:
    """Do the same in slices: a registration may have ten thousand topics. Raises BrokenBody."""
    if len(body) <= LENIENT_BODY_BYTES_MAX:
        return decode_body(RegisterBrokerBody, body)
    raw = decode_request_body(_RawRegistration, body, bytes_max=bytes_max)
    raw_topics = raw.topic_config_serialize_wrapper
    topics: dict[str, TopicConfig] = {}
    decode = _decoder(TopicConfig).decode
    for name, topic in raw_topics.topic_config_table.items():
        try:
            topics[name] = decode(topic)
        except msgspec.DecodeError as error:
            raise BrokenBody(f"topic {name[:80]}: {error}") from error
        yield
    return RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigs(
            topic_config_table=topics, data_version=raw_topics.data_version
        ),
        filter_server_list=raw.filter_server_list,
    )


class KvTable(JsonBody, frozen=True, kw_only=True):
    """The key-value settings of one namespace."""

    table: dict[str, str] = {}


# --- transactions: only EscrowMQ brokers understand these ----------------------------------------


class HalfPositions(JsonBody, frozen=True, kw_only=True):
    """Halves, each as the queue offset and the log offset from the response to its send."""

    halves: list[tuple[Int64, Int64]]


class WinningAttempt(JsonBody, frozen=True, kw_only=True):
    attempt: str
    count: Int64  # the number of its halves; the decision is refused if the broker has another


def decode_half_positions(body: bytes | memoryview) -> list[tuple[int, int]]:
    """Return the positions in the body of a request. Raises BrokenBody."""
    return decode_request_body(HalfPositions, body, bytes_max=HALF_POSITIONS_BYTES_MAX).halves


class BatchWinners(JsonBody, frozen=True, kw_only=True):
    winners: list[WinningAttempt]
    fingerprint: str = ""  # of the input of the batch, so that the writer can compare it


class WriterState(JsonBody, frozen=True, kw_only=True):
    """A writer and the last batch that it decided; -1 if it has decided none."""

    writer: str
    fence: Int64 = 0
    batch: Int64 = -1
    winners: list[WinningAttempt] = msgspec.field(default_factory=list)
    fingerprint: str = ""
    run: str = ""  # the run that registered last, if it has a name


class TransactionEntry(JsonBody, frozen=True, kw_only=True, omit_defaults=True):
    """One transaction of a list. Times are milliseconds since 1970."""

    transaction_id: str
    group: str
    topic: str
    queue_id: Int32
    state: str
    parked_at: Int64
    checks: Int32
    next_due: Int64 | None = None
    queue_offset: Int64
    log_offset: Int64
    size: Int64
    why: str = ""


class TransactionList(JsonBody, frozen=True, kw_only=True):
    transactions: list[TransactionEntry] = msgspec.field(default_factory=list)
    more: bool = False
    next_after: Int64 = -1  # if there is more: the `after` of the next page


class StepRecord(JsonBody, frozen=True, kw_only=True):
    """A record that a step of a transaction stored."""

    kind: str  # half, op, final, stranded
    topic: str
    queue_id: Int32
    queue_offset: Int64
    log_offset: Int64


class TransactionStep(JsonBody, frozen=True, kw_only=True):
    at: Int64  # 0: the time was not recorded
    # parked, asked, unknown, unknown_at_send, stranded, resumed, appended_again, committed,
    # rolled_back
    what: str
    who: str = ""
    reason: str = ""  # given with the decision, or with UNKNOWN
    detail: str = ""
    records: list[StepRecord] = msgspec.field(default_factory=list)


class TransactionHistory(JsonBody, frozen=True, kw_only=True):
    transaction: TransactionEntry
    steps: list[TransactionStep] = msgspec.field(default_factory=list)
    pending_because: str = ""


class TransactionCursors(JsonBody, frozen=True, kw_only=True):
    """How far a broker is with its half and op queues. The ends are the offsets of the next ones.

    None: a RocketMQ broker does not say.
    """

    half_cursor: Int64  # every half before it is decided
    half_end: Int64
    op_cursor: Int64  # every op before it is about a half before the half cursor
    op_end: Int64
    first_open: Int64 | None = None  # queue offset of the first open half; None if there is none
    open: Int64 | None = None
    stranded: Int64 | None = None
    next_due: Int64 | None = None  # of the next check; None if none is scheduled


# --- packed registrations ------------------------------------------------------------------------

# A zlib stream of:
#
#     sized   data version, JSON
#     int     number of topics, then for each
#     sized     name readQueues writeQueues perm filterType [attributes]     separated by one space
#     sized   filter servers, JSON
#     ...     since 5.0.0 the positions of static topics; not read
#
# `sized` is an int and that many bytes; ints have four bytes, big-endian. Attributes are not read,
# because no route contains them.

UNPACKED_BYTES_MAX: Final = 16 * 1024 * 1024
PACKED_TOPICS_MAX: Final = 100_000

_INT = struct.Struct(">i")


def decode_packed_registration(
    body: bytes | memoryview, *, bytes_max: int = UNPACKED_BYTES_MAX
) -> RegisterBrokerBody:
    """Return the decoded registration. Raises BrokenBody, whatever is wrong with it.

    `bytes_max` limits the size after decompression.
    """
    return run_to_end(decode_packed_in_slices(body, bytes_max=bytes_max))


def decode_packed_in_slices(
    body: bytes | memoryview, *, bytes_max: int = UNPACKED_BYTES_MAX
) -> SlicedResult[RegisterBrokerBody]:
    """Do the same in slices: a few kilobytes may become as much as `bytes_max`."""
    reader = _Reader((yield from decompress_in_slices(body, bytes_max=bytes_max)))
    version = decode_request_body(DataVersion, reader.read_sized("data version"))
    topic_count = reader.read_count("number of topics")
    if topic_count > PACKED_TOPICS_MAX:
        raise BrokenBody(
            f"packed registration: {topic_count} topics, the limit is {PACKED_TOPICS_MAX}"
        )
    topics = {}
    for _ in range(topic_count):
        topic = _parse_topic(reader.read_sized("topic"))
        topics[topic.topic_name] = topic
        yield
    servers = reader.read_sized("filter servers")
    if len(servers) > LENIENT_BODY_BYTES_MAX:
        raise BrokenBody(
            f"packed registration: {len(servers)} bytes of filter servers, the limit is "
            f"{LENIENT_BODY_BYTES_MAX}"
        )
    try:
        return RegisterBrokerBody(
            topic_config_serialize_wrapper=TopicConfigs(
                topic_config_table=topics, data_version=version
            ),
            filter_server_list=msgspec.convert(parse_lenient_json(servers), list[str]),
        )
    except msgspec.ValidationError as error:
        raise BrokenBody(f"packed registration: filter servers: {error}") from error


def _parse_topic(data: bytes) -> TopicConfig:
    try:
        name, read_queues, write_queues, perm, filter_type, *_ = data.decode().split(" ", 5)
        fields = {
            "topicName": name,
            "readQueueNums": read_queues,
            "writeQueueNums": write_queues,
            "perm": perm,
            "topicFilterType": filter_type,
        }
        return msgspec.convert(fields, TopicConfig, strict=False)
    except (UnicodeDecodeError, ValueError) as error:
        raise BrokenBody(f"packed registration: topic {data[:80]!r}: {error}") from error


class _Reader:
    """Reads ints and sized values; `field_name` is for error texts."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def read_count(self, field_name: str) -> int:
        remaining = len(self._data) - self._position
        if remaining < _INT.size:
            raise BrokenBody(f"packed registration: it ends before {field_name}")
        (number,) = _INT.unpack_from(self._data, self._position)
        self._position += _INT.size
        if not 0 <= number <= remaining - _INT.size:
            raise BrokenBody(
                f"packed registration: {field_name} is {number}, {remaining} bytes remain"
            )
        return int(number)

    def read_sized(self, field_name: str) -> bytes:
        length = self.read_count(field_name)
        self._position += length
        return self._data[self._position - length : self._position]
