"""Headers of sending, of transactions, and of replies.

SEND_MESSAGE_V2 is SEND_MESSAGE with one-letter keys; it decodes to a subclass, so a handler
sees one type. SEND_BATCH_MESSAGE and SEND_REPLY_MESSAGE_V2 use the short keys as well.
"""

from __future__ import annotations

from msgspec import field

from escrowmq.wire.command import Int32, Int64
from escrowmq.wire.headers import Header


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


class SendMessageAnswer(Header, frozen=True, kw_only=True):
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


class EndTransactionAnswer(Header, frozen=True, kw_only=True):
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


class RecallMessageAnswer(Header, frozen=True, kw_only=True):
    msg_id: str
