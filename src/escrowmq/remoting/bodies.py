"""JSON that travels in bodies: heartbeats, routes, locks, registrations.

Java's fastjson writes maps with number keys unquoted, `{0:"10.0.0.1:10911"}`, which is not JSON; we
read it and never write it. C++ clients write enums as numbers and longs as strings; both are
read. Unknown keys are skipped; what is None is not written.

Bodies of the requests that only our broker knows (`headers_transaction.py`).

A REGISTER_BROKER body, packed. Some brokers send it; we read it and never write it.

A zlib stream of:

    sized   data version, JSON
    int     number of topics, then for each
    sized     name readQueues writeQueues perm filterType [attributes]     between single spaces
    sized   filter servers, JSON
    ...     from version 5.0.0 on, where the queues of static topics lie: not read

`sized` is an int and that many bytes; ints have four bytes, big-endian. Attributes are not read:
no route has them.
"""

from __future__ import annotations

import contextlib
import struct
from typing import Any, Final, TypeVar

import msgspec
from msgspec import field

from escrowmq.errors import BrokenBody, LocalProtocolError
from escrowmq.message import record as sysflag
from escrowmq.message.compression import decompress_body
from escrowmq.message.topic_config import DataVersion, TopicConfig
from escrowmq.parsing import Int32, Int64, parse_lenient_json

B = TypeVar("B", bound=msgspec.Struct)


class JsonBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    pass


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
        # By name from here on, whichever way it was written.
        _number_to_name(self, "consume_type", _CONSUME_TYPES)
        _number_to_name(self, "message_model", _MESSAGE_MODELS)
        _number_to_name(self, "consume_from_where", _CONSUME_FROM_WHERE)


class Heartbeat(JsonBody, frozen=True, kw_only=True):
    client_id: str = field(name="clientID")
    producer_data_set: list[ProducerEntry] = []
    consumer_data_set: list[ConsumerEntry] = []
    heartbeat_fingerprint: Int32 = 0
    without_sub: bool = False


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


class QueueRoute(JsonBody, frozen=True, kw_only=True):
    broker_name: str
    read_queue_nums: Int32
    write_queue_nums: Int32
    perm: Int32
    topic_sys_flag: Int32 = 0


class BrokerRoute(JsonBody, frozen=True, kw_only=True):
    broker_name: str
    cluster: str | None = None
    broker_addrs: dict[int, str] = {}  # broker id -> ip:port; 0 is the master
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
    broker_addr: str | None = None  # of system topics: who can be asked for the rest of them


class BrokerMembers(JsonBody, frozen=True, kw_only=True):
    """GET_BROKER_MEMBER_GROUP's answer, inside `brokerMemberGroup`."""

    cluster: str
    broker_name: str
    broker_addrs: dict[int, str] = {}


class BrokerMemberGroup(JsonBody, frozen=True, kw_only=True):
    broker_member_group: BrokerMembers | None = None


class TopicConfigs(JsonBody, frozen=True, kw_only=True):
    """GET_ALL_TOPIC_CONFIG's answer, and part of a registration."""

    topic_config_table: dict[str, TopicConfig] = {}
    data_version: DataVersion = DataVersion()


class RegisterBrokerBody(JsonBody, frozen=True, kw_only=True):
    topic_config_serialize_wrapper: TopicConfigs = TopicConfigs()
    filter_server_list: list[str] = []


class KvTable(JsonBody, frozen=True, kw_only=True):
    """A namespace of key-value settings."""

    table: dict[str, str] = {}


def decode_body(body_type: type[B], body: bytes | memoryview) -> B:
    """Raises BrokenBody, whatever is wrong."""
    try:
        # A null is what Java writes for "not set", so it must not override a default.
        return msgspec.convert(_without_nulls(parse_lenient_json(body)), body_type, strict=False)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BrokenBody(f"{body_type.__name__}: {error}") from error


_decode_registration = msgspec.json.Decoder(RegisterBrokerBody, strict=False).decode


def decode_registration(body: bytes | memoryview) -> RegisterBrokerBody:
    """The same as decode_body, several times faster where nothing is odd: topics can be many."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = str(body, "utf-8")
        if "null" not in text:
            return _decode_registration(text)
    return decode_body(RegisterBrokerBody, body)


def encode_body(body: msgspec.Struct) -> bytes:
    try:
        written = msgspec.json.encode(body)
        if b"null" not in written:  # nothing to leave out
            return written
        return msgspec.json.encode(_without_nulls(msgspec.to_builtins(body, str_keys=True)))
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"{type(body).__name__}: not valid text: {error}") from error


def _without_nulls(value: Any) -> Any:
    match value:
        case dict():
            return {key: _without_nulls(item) for key, item in value.items() if item is not None}
        case list():
            return [_without_nulls(item) for item in value if item is not None]
        case _:
            return value


def _number_to_name(entry: ConsumerEntry, name: str, names: tuple[str, ...]) -> None:
    value = getattr(entry, name)
    if isinstance(value, str) and not value.isdecimal():
        return
    number = int(value)
    if number not in range(len(names)):
        raise ValueError(f"{name} {number} is not one of {', '.join(names)}")
    msgspec.structs.force_setattr(entry, name, names[number])


class HalfPositions(JsonBody, frozen=True, kw_only=True):
    """Halves, each as its queue offset and its log offset: what the send's answer said."""

    halves: list[tuple[Int64, Int64]]


class WinningAttempt(JsonBody, frozen=True, kw_only=True):
    attempt: str
    count: Int64  # of its halves: a decision over other than all of them is refused


class BatchWinners(JsonBody, frozen=True, kw_only=True):
    winners: list[WinningAttempt]
    fingerprint: str = ""  # of what the batch was made from, for whoever compares


class WriterState(JsonBody, frozen=True, kw_only=True):
    """A writer, and the last batch that it decided; -1 if none."""

    writer: str
    fence: Int64 = 0
    batch: Int64 = -1
    winners: list[WinningAttempt] = msgspec.field(default_factory=list)
    fingerprint: str = ""
    run: str = ""  # that registered last, if it said what it is called


class TransactionEntry(JsonBody, frozen=True, kw_only=True, omit_defaults=True):
    """One transaction, as a list shows it. Times are milliseconds since 1970."""

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
    next_after: Int64 = -1  # if there is more: where to go on


class TransactionStep(JsonBody, frozen=True, kw_only=True):
    at: Int64  # 0: nobody noted when
    what: str  # parked, asked, unknown, stranded, resumed, appended_again, committed, rolled_back
    who: str = ""
    reason: str = ""  # of whoever decided
    detail: str = ""


class TransactionHistory(JsonBody, frozen=True, kw_only=True):
    transaction: TransactionEntry
    steps: list[TransactionStep] = msgspec.field(default_factory=list)
    pending_because: str = ""


UNPACKED_BYTES_MAX: Final = 64 * 1024 * 1024

_INT = struct.Struct(">i")
_ZLIB = sysflag.COMPRESSED | sysflag.COMPRESSION_ZLIB


def decode_packed_registration(
    body: bytes | memoryview, *, bytes_max: int = UNPACKED_BYTES_MAX
) -> RegisterBrokerBody:
    """Raises BrokenBody, whatever is wrong."""
    reader = _Reader(decompress_body(body, _ZLIB, body_bytes_max=bytes_max))
    version = decode_body(DataVersion, reader.read_sized("data version"))
    topics = {}
    for _ in range(reader.read_count("number of topics")):
        topic = _parse_topic(reader.read_sized("topic"))
        topics[topic.topic_name] = topic
    servers = parse_lenient_json(reader.read_sized("filter servers"))
    try:
        return RegisterBrokerBody(
            topic_config_serialize_wrapper=TopicConfigs(
                topic_config_table=topics, data_version=version
            ),
            filter_server_list=msgspec.convert(servers, list[str]),
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
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def read_count(self, field_name: str) -> int:
        left = len(self._data) - self._position
        if left < _INT.size:
            raise BrokenBody(f"packed registration: ends before {field_name}")
        (number,) = _INT.unpack_from(self._data, self._position)
        self._position += _INT.size
        if not 0 <= number <= left - _INT.size:
            raise BrokenBody(f"packed registration: {field_name}: {number}, {left} bytes are left")
        return int(number)

    def read_sized(self, field_name: str) -> bytes:
        length = self.read_count(field_name)
        self._position += length
        return self._data[self._position - length : self._position]
