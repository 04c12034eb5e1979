"""The typed headers of requests and responses that clients and brokers exchange.

On the wire a header is a flat map of strings, `extFields`. Here it is a struct whose fields have
the names of the wire in snake case. `@request` on a struct names the request codes that carry it
and the header of their response; `remoting/requests.py` collects them:

    @request(RequestCode.VIEW_MESSAGE_BY_ID)
    class ViewMessage(Header, frozen=True, kw_only=True):
        offset: Int64

Unknown keys are skipped, so that newer peers can talk to us. A field is required only if no client
leaves it out and no handler can do without it.

Numbers and booleans are read from text: `true` and `false` in any case, and 1 and 0 as C++ clients
write them. Numbers have the bounds of Java's int or long, so that a number that is read here fits
into a record. Booleans are written as `true` and `false`; fields that are None are not written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from msgspec import field

from escrowmq.errors import InvalidField
from escrowmq.parsing import Int32, Int64
from escrowmq.remoting.codes import RequestCode, ResponseCode

H = TypeVar("H", bound="Header")


class Header(msgspec.Struct, frozen=True, kw_only=True, rename="camel", gc=False):
    """Base of all headers."""


class NoFields(Header, frozen=True):
    """The header of a request or response that has no fields of its own."""


@dataclass(frozen=True, slots=True)
class HeaderTypes:
    """The headers of one request code."""

    request: type[Header]
    response: type[Header]


def request(*codes: RequestCode, response: type[Header] = NoFields) -> Callable[[type[H]], type[H]]:
    """Declare that requests with these codes carry the decorated header.

    `response` is the header of a successful response. Raises ValueError if a code has a header
    already.
    """

    def register(header_type: type[H]) -> type[H]:
        for code in codes:
            if code in _header_types:
                registered = _header_types[code].request.__name__
                raise ValueError(f"{code.name} already has the header {registered}")
            _header_types[code] = HeaderTypes(header_type, response)
        return header_type

    return register


def registered_requests() -> Mapping[int, HeaderTypes]:
    """Return the headers by request code of all modules imported so far. See REQUESTS."""
    return _header_types


_header_types: dict[int, HeaderTypes] = {}


def decode_header(header_type: type[H], ext_fields: dict[str, str]) -> H:
    """Return the typed header of these fields.

    Raises InvalidField, which names the field, if one is missing or does not fit its type.
    """
    try:
        return msgspec.convert(ext_fields, header_type, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidField(ResponseCode.SYSTEM_ERROR, f"{header_type.__name__}: {error}") from error


def encode_header(header: Header) -> dict[str, str]:
    """Return the fields of a header as the wire carries them."""
    values = zip(header.__struct_encode_fields__, msgspec.structs.astuple(header), strict=True)
    return {
        name: "true" if value is True else "false" if value is False else str(value)
        for name, value in values
        if value is not None
    }


# --- sending -------------------------------------------------------------------------------------


class SendMessageResponse(Header, frozen=True, kw_only=True):
    msg_id: str  # the offset id; of a batch, all offset ids separated by commas
    queue_id: Int32
    queue_offset: Int64
    transaction_id: str | None = None
    batch_uniq_id: str | None = None
    recall_handle: str | None = None
    region: str | None = field(default=None, name="MSG_REGION")
    trace_on: bool | None = field(default=None, name="TRACE_ON")


@request(RequestCode.SEND_MESSAGE, RequestCode.SEND_REPLY_MESSAGE, response=SendMessageResponse)
class SendMessage(Header, frozen=True, kw_only=True):
    producer_group: str
    topic: str
    default_topic: str = ""  # the template from which an unknown topic is created
    default_topic_queue_nums: Int32 = 4
    queue_id: Int32  # negative: the broker chooses
    sys_flag: Int32 = 0
    born_timestamp: Int64 = 0
    flag: Int32 = 0
    properties: str = ""
    reconsume_times: Int32 = 0
    unit_mode: bool = False
    max_reconsume_times: Int32 | None = None
    batch: bool = False  # whether the body is a batch; the request code does not matter
    broker_name: str | None = field(default=None, name="bname")
    # EscrowMQ only: respond with the first id of a batch, not with all. RocketMQ ignores it.
    bulk: bool | None = None


@request(
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.SEND_BATCH_MESSAGE,
    RequestCode.SEND_REPLY_MESSAGE_V2,
    response=SendMessageResponse,
)
class SendMessageV2(SendMessage, frozen=True, kw_only=True):
    """The same header with one-letter keys. It is a subclass, so that handlers see one type."""

    producer_group: str = field(name="a")
    topic: str = field(name="b")
    default_topic: str = field(default="", name="c")
    default_topic_queue_nums: Int32 = field(default=4, name="d")
    queue_id: Int32 = field(name="e")
    sys_flag: Int32 = field(default=0, name="f")
    born_timestamp: Int64 = field(default=0, name="g")
    flag: Int32 = field(default=0, name="h")
    properties: str = field(default="", name="i")
    reconsume_times: Int32 = field(default=0, name="j")
    unit_mode: bool = field(default=False, name="k")
    max_reconsume_times: Int32 | None = field(default=None, name="l")
    batch: bool = field(default=False, name="m")
    broker_name: str | None = field(default=None, name="n")


@request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT)
class PushReplyMessage(Header, frozen=True, kw_only=True):
    producer_group: str
    topic: str
    default_topic: str = ""
    default_topic_queue_nums: Int32 = 4
    queue_id: Int32
    sys_flag: Int32 = 0
    born_timestamp: Int64 = 0
    flag: Int32 = 0
    properties: str = ""
    reconsume_times: Int32 = 0
    unit_mode: bool = False
    born_host: str | None = None  # ip:port
    store_host: str | None = None
    store_timestamp: Int64 = 0


@request(RequestCode.CONSUMER_SEND_MSG_BACK)
class ConsumerSendMessageBack(Header, frozen=True, kw_only=True):
    offset: Int64  # a log offset
    group: str
    delay_level: Int32
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool = False
    max_reconsume_times: Int32 | None = None
    broker_name: str | None = field(default=None, name="bname")
    # EscrowMQ only: why the delivery failed. RocketMQ ignores these fields.
    error_type: str | None = None
    error_text: str | None = None
    consumer_host: str | None = None
    attempts: Int32 | None = None
    # EscrowMQ only: the exact delay, instead of a delay level that is not negative.
    delay_ms: Int64 | None = None


# --- transactions --------------------------------------------------------------------------------


class EndTransactionResponse(Header, frozen=True, kw_only=True):
    """EscrowMQ only; RocketMQ responds with a code alone.

    After a commit, the position is that of the final message.
    """

    state: str | None = None  # open, committed, rolled_back or stranded
    transaction_id: str | None = None
    topic: str | None = None
    queue_id: Int32 | None = None
    queue_offset: Int64 | None = None
    msg_id: str | None = None  # an offset id


@request(RequestCode.END_TRANSACTION, response=EndTransactionResponse)
class EndTransaction(Header, frozen=True, kw_only=True):
    topic: str | None = None  # the user's topic, or the half topic in the response to a check
    producer_group: str
    tran_state_table_offset: Int64  # a queue offset
    commit_log_offset: Int64  # a log offset
    commit_or_rollback: Int32  # a Verdict: 8 commit, 12 rollback, 0 unknown
    from_transaction_check: bool = False
    msg_id: str = ""
    transaction_id: str | None = None
    broker_name: str | None = field(default=None, name="bname")


@request(RequestCode.CHECK_TRANSACTION_STATE)
class CheckTransactionState(Header, frozen=True, kw_only=True):
    topic: str | None = None
    tran_state_table_offset: Int64
    commit_log_offset: Int64
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None
    broker_name: str | None = field(default=None, name="bname")


@request(RequestCode.RESUME_CHECK_HALF_MESSAGE)
class ResumeCheckHalfMessage(Header, frozen=True, kw_only=True):
    msg_id: str  # the offset id of the stranded record
    topic: str | None = None


# EscrowMQ only. A RocketMQ broker responds with REQUEST_CODE_NOT_SUPPORTED, and a client that gets
# this falls back to one END_TRANSACTION for each half. The bodies are JSON, see bodies.py.


class EndTransactionsResponse(Header, frozen=True, kw_only=True):
    state: str  # committed or rolled_back
    count: Int32  # the halves that were still open


@request(RequestCode.END_TRANSACTIONS, response=EndTransactionsResponse)
class EndTransactions(Header, frozen=True, kw_only=True):
    """Decide many halves at once. The body is HalfPositions."""

    producer_group: str
    commit_or_rollback: Int32  # 8 commit, 12 rollback


@request(RequestCode.QUERY_WRITER)
class WriterHeader(Header, frozen=True, kw_only=True):
    """The body of the response is WriterState."""

    writer: str


@request(RequestCode.REGISTER_WRITER)
class RegisterWriter(Header, frozen=True, kw_only=True):
    writer: str
    run: str = ""  # one process of the writer; the same run gets the same fence again
    # Register only if this is still the fence of the writer, so that a writer that shuts down
    # does not fence the next one.
    fence: Int64 | None = None


@request(RequestCode.DECIDE_BATCH)
class DecideBatch(Header, frozen=True, kw_only=True):
    """Commit the winning attempts of a batch, roll back the others. The body is BatchWinners."""

    writer: str
    batch: Int64
    fence: Int64
    last: bool = False  # the writer decides nothing more, so the broker may purge it


@request(RequestCode.LIST_TRANSACTIONS)
class ListTransactions(Header, frozen=True, kw_only=True):
    """Undecided transactions come in the order they were parked, decided ones newest first."""

    state: str | None = None  # open, stranded, committed or rolled_back; None: open and stranded
    topic: str | None = None
    group: str | None = None
    older_than_ms: Int64 | None = None
    checks_min: Int32 | None = None
    after: Int64 = -1  # continue a list: the `next_after` of its last page
    count_max: Int32 = 1_000


@request(RequestCode.SHOW_TRANSACTION)
class TransactionHeader(Header, frozen=True, kw_only=True):
    """Clients choose ids, so several transactions may have the same.

    The group and the offset in the half queue say which one is meant. If they do not, the response
    is TRANSACTION_AMBIGUOUS and lists the candidates.
    """

    transaction_id: str
    producer_group: str | None = None
    half_offset: Int64 | None = None


@request(RequestCode.TRANSACTION_CURSORS)
class TransactionCursorsHeader(Header, frozen=True, kw_only=True):
    """The body of the response is TransactionCursors."""


class SettleTransactionResponse(Header, frozen=True, kw_only=True):
    transaction_id: str
    state: str  # committed or rolled_back
    already: bool = False  # it had this state before


@request(RequestCode.SETTLE_TRANSACTION, response=SettleTransactionResponse)
class SettleTransaction(TransactionHeader, frozen=True, kw_only=True):
    """Decide a transaction on behalf of an operator."""

    commit_or_rollback: Int32
    reason: str
    operator: str = ""


@request(RequestCode.RESUME_TRANSACTION)
class ResumeTransaction(TransactionHeader, frozen=True, kw_only=True):
    """Check a stranded transaction again."""

    reason: str = ""
    operator: str = ""


# --- connected clients ---------------------------------------------------------------------------


class HeartbeatResponse(Header, frozen=True, kw_only=True):
    is_support_heart_beat_v2: bool | None = field(default=None, name="IS_SUPPORT_HEART_BEAT_V2")
    is_sub_change: bool | None = field(default=None, name="IS_SUB_CHANGE")


request(RequestCode.HEART_BEAT, response=HeartbeatResponse)(NoFields)
request(RequestCode.CHECK_CLIENT_CONFIG, RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ)(
    NoFields
)


@request(RequestCode.UNREGISTER_CLIENT)
class UnregisterClient(Header, frozen=True, kw_only=True):
    client_id: str = field(name="clientID")
    producer_group: str | None = None  # C++ clients send "" for the group that is not meant
    consumer_group: str | None = None


@request(
    RequestCode.GET_CONSUMER_LIST_BY_GROUP,
    RequestCode.NOTIFY_CONSUMER_IDS_CHANGED,
    RequestCode.GET_CONSUMER_CONNECTION_LIST,
)
class ConsumerGroupHeader(Header, frozen=True, kw_only=True):
    consumer_group: str


# --- reading -------------------------------------------------------------------------------------


class PullMessageResponse(Header, frozen=True, kw_only=True):
    suggest_which_broker_id: Int64
    next_begin_offset: Int64
    min_offset: Int64
    max_offset: Int64
    offset_delta: Int64 | None = None
    topic_sys_flag: Int32 | None = None
    group_sys_flag: Int32 | None = None
    forbidden_type: Int32 | None = None


@request(RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE, response=PullMessageResponse)
class PullMessage(Header, frozen=True, kw_only=True):
    consumer_group: str
    topic: str
    queue_id: Int32
    queue_offset: Int64
    max_msg_nums: Int32
    sys_flag: Int32  # bits: 1 commit offset, 2 suspend, 4 subscription, 8 class filter, 16 lite
    commit_offset: Int64 = 0
    suspend_timeout_millis: Int64 = 0
    subscription: str | None = None
    sub_version: Int64 = 0
    expression_type: str | None = None
    max_msg_bytes: Int32 | None = None
    request_source: Int32 | None = None
    proxy_forward_client_id: str | None = field(default=None, name="proxyFrowardClientId")
    # EscrowMQ only: fill the response up to the size of a frame. RocketMQ ignores it.
    bulk: bool | None = None


class QueryMessageResponse(Header, frozen=True, kw_only=True):
    index_last_update_timestamp: Int64
    index_last_update_phyoffset: Int64


@request(RequestCode.QUERY_MESSAGE, response=QueryMessageResponse)
class QueryMessage(Header, frozen=True, kw_only=True):
    topic: str
    key: str
    max_num: Int32
    begin_timestamp: Int64
    end_timestamp: Int64
    is_unique_key: bool = field(default=False, name="_UNIQUE_KEY_QUERY")


@request(RequestCode.VIEW_MESSAGE_BY_ID)
class ViewMessage(Header, frozen=True, kw_only=True):
    offset: Int64  # a log offset
    topic: str | None = None


# --- offsets -------------------------------------------------------------------------------------


class OffsetResponse(Header, frozen=True, kw_only=True):
    offset: Int64  # a queue offset


class TimestampResponse(Header, frozen=True, kw_only=True):
    timestamp: Int64


@request(RequestCode.GET_EARLIEST_MSG_STORETIME, response=TimestampResponse)
@request(RequestCode.GET_MAX_OFFSET, RequestCode.GET_MIN_OFFSET, response=OffsetResponse)
class QueueHeader(Header, frozen=True, kw_only=True):
    topic: str
    queue_id: Int32
    committed: bool | None = None


@request(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, response=OffsetResponse)
class SearchOffset(Header, frozen=True, kw_only=True):
    topic: str
    queue_id: Int32
    timestamp: Int64
    boundary_type: str | None = None  # lower or upper


@request(RequestCode.QUERY_CONSUMER_OFFSET, response=OffsetResponse)
class QueryConsumerOffset(Header, frozen=True, kw_only=True):
    consumer_group: str
    topic: str
    queue_id: Int32
    set_zero_if_not_found: bool = True


@request(RequestCode.UPDATE_CONSUMER_OFFSET)
class UpdateConsumerOffset(Header, frozen=True, kw_only=True):
    consumer_group: str
    topic: str
    queue_id: Int32
    commit_offset: Int64


# --- requests of a broker to its consumers -------------------------------------------------------


@request(RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
class ResetConsumerOffset(Header, frozen=True, kw_only=True):
    topic: str
    group: str
    timestamp: Int64
    is_force: bool = False


@request(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT)
class GetConsumerStatus(Header, frozen=True, kw_only=True):
    topic: str
    group: str
    client_addr: str | None = None


@request(RequestCode.GET_CONSUMER_RUNNING_INFO)
class GetConsumerRunningInfo(Header, frozen=True, kw_only=True):
    consumer_group: str
    client_id: str
    jstack_enable: bool = False


@request(RequestCode.CONSUME_MESSAGE_DIRECTLY)
class ConsumeMessageDirectly(Header, frozen=True, kw_only=True):
    consumer_group: str
    client_id: str | None = None
    msg_id: str | None = None
    broker_name: str | None = None
    topic: str | None = None
    topic_sys_flag: Int32 | None = None
    group_sys_flag: Int32 | None = None
