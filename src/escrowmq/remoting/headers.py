"""What a header's extFields hold, typed: the base, and both directions.

On the wire a header is a flat map of strings. Here it is a struct whose fields are named as the
wire names them, in snake case. Unknown keys are skipped, so that a newer peer can talk to us.
A required key is one that no client leaves out and no handler can do without.

Numbers and booleans are read from text: `true` and `false` in any case, and 1 and 0, which is how
C++ clients write them. Numbers are bounded as in Java, int or long, so that what is read here
fits a record there. Booleans are written `true` and `false`; None is not written.

Headers of sending, of transactions, and of replies.

SEND_MESSAGE_V2 is SEND_MESSAGE with one-letter keys; it decodes to a subclass, so a handler
sees one type. SEND_BATCH_MESSAGE and SEND_REPLY_MESSAGE_V2 use the short keys as well.

Headers of consuming: who is connected, pulls, offsets, look-ups, POP.

Headers of requests that only our broker knows: many halves at once, writers, operators.

A RocketMQ broker answers them with REQUEST_CODE_NOT_SUPPORTED; a client that gets that falls back
to one END_TRANSACTION per half. Bodies are JSON, described in `bodies_transaction.py`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import field

from escrowmq.errors import InvalidField
from escrowmq.remoting.codes import ResponseCode
from escrowmq.remoting.command import Int32, Int64

H = TypeVar("H", bound="Header")


class Header(msgspec.Struct, frozen=True, kw_only=True, rename="camel", gc=False):
    pass


class NoFields(Header, frozen=True):
    """For a request or an answer that has no fields of its own."""


def decode_header(header_type: type[H], ext_fields: dict[str, str]) -> H:
    """Raises BadField, which names the field, if one is missing or does not fit its type."""
    try:
        return msgspec.convert(ext_fields, header_type, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidField(ResponseCode.SYSTEM_ERROR, f"{header_type.__name__}: {error}") from error


def encode_header(header: Header) -> dict[str, str]:
    values = zip(header.__struct_encode_fields__, msgspec.structs.astuple(header), strict=True)
    return {name: _text(value) for name, value in values if value is not None}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


class SendMessage(Header, frozen=True, kw_only=True):
    producer_group: str
    topic: str
    default_topic: str = ""  # the template, if the topic is to be created
    default_topic_queue_nums: Int32 = 4
    queue_id: Int32  # negative: the broker chooses
    sys_flag: Int32 = 0
    born_timestamp: Int64 = 0
    flag: Int32 = 0
    properties: str = ""
    reconsume_times: Int32 = 0
    unit_mode: bool = False
    max_reconsume_times: Int32 | None = None
    batch: bool = False  # this decides how the body is read, not the request code
    broker_name: str | None = field(default=None, name="bname")
    # Ours: of a batch, only the first id is wanted in the answer; RocketMQ does not look at it.
    bulk: bool | None = None


class SendMessageV2(SendMessage, frozen=True, kw_only=True):
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


class SendMessageResponse(Header, frozen=True, kw_only=True):
    msg_id: str  # the offset id; for a batch, all of them with commas between
    queue_id: Int32
    queue_offset: Int64
    transaction_id: str | None = None
    batch_uniq_id: str | None = None
    recall_handle: str | None = None
    region: str | None = field(default=None, name="MSG_REGION")
    trace_on: bool | None = field(default=None, name="TRACE_ON")


class EndTransaction(Header, frozen=True, kw_only=True):
    topic: str | None = None  # the user's topic, or the half topic in reply to a check
    producer_group: str
    tran_state_table_offset: Int64  # a queue offset
    commit_log_offset: Int64  # a log offset
    commit_or_rollback: Int32  # 8 commit, 12 rollback, 0 unknown
    from_transaction_check: bool = False
    msg_id: str = ""
    transaction_id: str | None = None
    broker_name: str | None = field(default=None, name="bname")


class EndTransactionResponse(Header, frozen=True, kw_only=True):
    """Ours; RocketMQ answers with a code alone. A committed message's place is in it."""

    state: str | None = None  # open, committed, rolled_back, stranded; not from RocketMQ
    transaction_id: str | None = None
    topic: str | None = None
    queue_id: Int32 | None = None
    queue_offset: Int64 | None = None
    msg_id: str | None = None  # an offset id


class CheckTransactionState(Header, frozen=True, kw_only=True):
    topic: str | None = None
    tran_state_table_offset: Int64
    commit_log_offset: Int64
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None
    broker_name: str | None = field(default=None, name="bname")


class ResumeCheckHalfMessage(Header, frozen=True, kw_only=True):
    msg_id: str  # the offset id of the stranded record
    topic: str | None = None


class ConsumerSendMessageBack(Header, frozen=True, kw_only=True):
    offset: Int64  # a log offset
    group: str
    delay_level: Int32
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool = False
    max_reconsume_times: Int32 | None = None
    broker_name: str | None = field(default=None, name="bname")


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


class RecallMessage(Header, frozen=True, kw_only=True):
    producer_group: str | None = None
    topic: str
    recall_handle: str


class RecallMessageResponse(Header, frozen=True, kw_only=True):
    msg_id: str


class HeartbeatResponse(Header, frozen=True, kw_only=True):
    is_support_heart_beat_v2: bool | None = field(default=None, name="IS_SUPPORT_HEART_BEAT_V2")
    is_sub_change: bool | None = field(default=None, name="IS_SUB_CHANGE")


class UnregisterClient(Header, frozen=True, kw_only=True):
    client_id: str = field(name="clientID")
    producer_group: str | None = None  # C++ sends "" for the one it does not mean
    consumer_group: str | None = None


class ConsumerGroupHeader(Header, frozen=True, kw_only=True):
    """GET_CONSUMER_LIST_BY_GROUP and NOTIFY_CONSUMER_IDS_CHANGED."""

    consumer_group: str


class PullMessage(Header, frozen=True, kw_only=True):
    consumer_group: str
    topic: str
    queue_id: Int32
    queue_offset: Int64
    max_msg_nums: Int32
    sys_flag: Int32  # 1 commit offset, 2 suspend, 4 subscription, 8 class filter, 16 lite
    commit_offset: Int64 = 0
    suspend_timeout_millis: Int64 = 0
    subscription: str | None = None
    sub_version: Int64 = 0
    expression_type: str | None = None
    max_msg_bytes: Int32 | None = None
    request_source: Int32 | None = None
    proxy_forward_client_id: str | None = field(default=None, name="proxyFrowardClientId")
    bulk: bool | None = None  # ours: as much as a frame should hold; RocketMQ does not look at it


class PullMessageResponse(Header, frozen=True, kw_only=True):
    suggest_which_broker_id: Int64
    next_begin_offset: Int64
    min_offset: Int64
    max_offset: Int64
    offset_delta: Int64 | None = None
    topic_sys_flag: Int32 | None = None
    group_sys_flag: Int32 | None = None
    forbidden_type: Int32 | None = None


class QueryConsumerOffset(Header, frozen=True, kw_only=True):
    consumer_group: str
    topic: str
    queue_id: Int32
    set_zero_if_not_found: bool = True


class UpdateConsumerOffset(Header, frozen=True, kw_only=True):
    consumer_group: str
    topic: str
    queue_id: Int32
    commit_offset: Int64


class QueueHeader(Header, frozen=True, kw_only=True):
    """GET_MAX_OFFSET, GET_MIN_OFFSET and GET_EARLIEST_MSG_STORETIME."""

    topic: str
    queue_id: Int32
    committed: bool | None = None


class SearchOffset(Header, frozen=True, kw_only=True):
    topic: str
    queue_id: Int32
    timestamp: Int64
    boundary_type: str | None = None  # lower or upper


class OffsetResponse(Header, frozen=True, kw_only=True):
    offset: Int64


class TimestampResponse(Header, frozen=True, kw_only=True):
    timestamp: Int64


class QueryMessage(Header, frozen=True, kw_only=True):
    topic: str
    key: str
    max_num: Int32
    begin_timestamp: Int64
    end_timestamp: Int64
    is_unique_key: bool = field(default=False, name="_UNIQUE_KEY_QUERY")


class QueryMessageResponse(Header, frozen=True, kw_only=True):
    index_last_update_timestamp: Int64
    index_last_update_phyoffset: Int64


class ViewMessage(Header, frozen=True, kw_only=True):
    offset: Int64  # a log offset
    topic: str | None = None


class PopMessage(Header, frozen=True, kw_only=True):
    consumer_group: str
    topic: str
    queue_id: Int32  # -1: any
    max_msg_nums: Int32
    invisible_time: Int64
    poll_time: Int64 = 0
    born_time: Int64 = 0
    init_mode: Int32 = 0  # 0 oldest, 1 newest
    exp_type: str | None = None
    exp: str | None = None
    order: bool = False
    attempt_id: str | None = None


class PopMessageResponse(Header, frozen=True, kw_only=True):
    pop_time: Int64
    invisible_time: Int64
    revive_qid: Int32
    rest_num: Int64 = 0
    start_offset_info: str | None = None
    msg_offset_info: str | None = None
    order_count_info: str | None = None


class AckMessage(Header, frozen=True, kw_only=True):
    consumer_group: str
    topic: str
    queue_id: Int32
    extra_info: str  # POP_CK, as it came with the message
    offset: Int64


class ChangeInvisibleTime(Header, frozen=True, kw_only=True):
    consumer_group: str
    topic: str
    queue_id: Int32
    extra_info: str
    offset: Int64
    invisible_time: Int64


class ChangeInvisibleTimeResponse(Header, frozen=True, kw_only=True):
    pop_time: Int64
    invisible_time: Int64
    revive_qid: Int32


class Notification(Header, frozen=True, kw_only=True):
    consumer_group: str
    topic: str
    queue_id: Int32
    poll_time: Int64
    born_time: Int64
    order: bool = False
    attempt_id: str | None = None
    exp_type: str | None = None
    exp: str | None = None


class NotificationResponse(Header, frozen=True, kw_only=True):
    has_msg: bool
    polling_full: bool | None = None


class ResetConsumerOffset(Header, frozen=True, kw_only=True):
    topic: str
    group: str
    timestamp: Int64
    is_force: bool = False


class GetConsumerStatus(Header, frozen=True, kw_only=True):
    topic: str
    group: str
    client_addr: str | None = None


class GetConsumerRunningInfo(Header, frozen=True, kw_only=True):
    consumer_group: str
    client_id: str
    jstack_enable: bool = False


class ConsumeMessageDirectly(Header, frozen=True, kw_only=True):
    consumer_group: str
    client_id: str | None = None
    msg_id: str | None = None
    broker_name: str | None = None
    topic: str | None = None


class EndTransactions(Header, frozen=True, kw_only=True):
    """The body names the halves."""

    producer_group: str
    commit_or_rollback: Int32  # 8 commit, 12 rollback


class EndTransactionsResponse(Header, frozen=True, kw_only=True):
    state: str  # committed, rolled_back
    count: Int32  # of halves that were still open


class WriterHeader(Header, frozen=True, kw_only=True):
    writer: str


class RegisterWriter(Header, frozen=True, kw_only=True):
    writer: str
    run: str = ""  # one life of the writer: it gets one fence, and loses it for good to the next
    fence: Int64 | None = None  # only if this is still his: whoever gives up disturbs nobody


class DecideBatch(Header, frozen=True, kw_only=True):
    """The body names the attempts that won."""

    writer: str
    batch: Int64
    fence: Int64
    last: bool = False  # he will decide nothing more, and need not be remembered for ever


class ListTransactions(Header, frozen=True, kw_only=True):
    """Those that are not settled in the order they were parked, those that are the newest first."""

    state: str | None = None  # open, stranded; both without; or committed, or rolled_back
    topic: str | None = None
    group: str | None = None
    older_than_ms: Int64 | None = None
    checks_min: Int32 | None = None
    after: Int64 = -1  # go on where the list before ended: its `next_after`
    count_max: Int32 = 1_000


class TransactionHeader(Header, frozen=True, kw_only=True):
    transaction_id: str


class SettleTransaction(Header, frozen=True, kw_only=True):
    transaction_id: str
    commit_or_rollback: Int32
    reason: str
    operator: str = ""


class SettleTransactionResponse(Header, frozen=True, kw_only=True):
    transaction_id: str
    state: str  # committed, rolled_back
    already: bool = False  # it was so before


class ResumeTransaction(Header, frozen=True, kw_only=True):
    transaction_id: str
    reason: str = ""
    operator: str = ""
