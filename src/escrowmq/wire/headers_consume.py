"""Headers of consuming: who is connected, pulls, offsets, look-ups, POP."""

from __future__ import annotations

from msgspec import field

from escrowmq.wire.command import Int32, Int64
from escrowmq.wire.headers import Header


class HeartbeatAnswer(Header, frozen=True, kw_only=True):
    is_support_heart_beat_v2: bool | None = field(default=None, name="IS_SUPPORT_HEART_BEAT_V2")
    is_sub_change: bool | None = field(default=None, name="IS_SUB_CHANGE")


class UnregisterClient(Header, frozen=True, kw_only=True):
    client_id: str = field(name="clientID")
    producer_group: str | None = None  # C++ sends "" for the one it does not mean
    consumer_group: str | None = None


class ConsumerGroup(Header, frozen=True, kw_only=True):
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


class PullMessageAnswer(Header, frozen=True, kw_only=True):
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


class QueueOf(Header, frozen=True, kw_only=True):
    """GET_MAX_OFFSET, GET_MIN_OFFSET and GET_EARLIEST_MSG_STORETIME."""

    topic: str
    queue_id: Int32
    committed: bool | None = None


class SearchOffset(Header, frozen=True, kw_only=True):
    topic: str
    queue_id: Int32
    timestamp: Int64
    boundary_type: str | None = None  # lower or upper


class OffsetAnswer(Header, frozen=True, kw_only=True):
    offset: Int64


class TimestampAnswer(Header, frozen=True, kw_only=True):
    timestamp: Int64


class QueryMessage(Header, frozen=True, kw_only=True):
    topic: str
    key: str
    max_num: Int32
    begin_timestamp: Int64
    end_timestamp: Int64
    is_unique_key: bool = field(default=False, name="_UNIQUE_KEY_QUERY")


class QueryMessageAnswer(Header, frozen=True, kw_only=True):
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


class PopMessageAnswer(Header, frozen=True, kw_only=True):
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


class ChangeInvisibleTimeAnswer(Header, frozen=True, kw_only=True):
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


class NotificationAnswer(Header, frozen=True, kw_only=True):
    has_msg: bool
    polling_full: bool | None = None


class ResetConsumerOffset(Header, frozen=True, kw_only=True):
    topic: str
    group: str
    timestamp: Int64
    is_force: bool = False


class ConsumerStatus(Header, frozen=True, kw_only=True):
    topic: str
    group: str
    client_addr: str | None = None


class ConsumerRunning(Header, frozen=True, kw_only=True):
    consumer_group: str
    client_id: str
    jstack_enable: bool = False


class ConsumeDirectly(Header, frozen=True, kw_only=True):
    consumer_group: str
    client_id: str | None = None
    msg_id: str | None = None
    broker_name: str | None = None
    topic: str | None = None
