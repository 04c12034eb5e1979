"""One pull request: refuse it or find its filter, limit the read, and name the result.

The checks come in this order. The number is the response code:

    16  the broker serves no reads
    26  the group does not exist                16  the group is disabled
    17  the topic does not exist                16  the topic serves no reads
    29  the queue does not exist
  if the request carries an expression (FLAG_SUBSCRIPTION), `request_filter`:
    23  the expression is invalid
  otherwise the subscription of the group counts, `group_filter`:
    24  no member of the group is connected     16  the group may not consume by broadcasting
    24  the group has no such subscription      25  the client has a newer subscription
  in both cases:
     1  SQL92 is not enabled
  without an expression in the request:
    27  the SQL92 expression of the group is invalid

The result of a read (the store's name for it) becomes a response code, `pull_result`:

    FOUND 0    NO_MATCH 20    AT_END 19    TOO_SMALL, PAST_END 21
    NO_QUEUE, EMPTY: 19 if the pull began at offset 0, else 21

A pull with result 19 may be held (`hold_ms`) if the client allows it and this is its first read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from escrowmq.config import ConsumeConfig
from escrowmq.consume.members import ConsumerGroup
from escrowmq.consume.subscription import (
    MessageFilter,
    Subscription,
    compile_subscription,
    parse_subscription,
)
from escrowmq.errors import InvalidSubscription
from escrowmq.message.filter import SQL92
from escrowmq.message.topic_config import PERM_READ, TopicConfig

# Bits of the sysFlag of a pull request.
FLAG_COMMIT_OFFSET: Final = 1
FLAG_SUSPEND: Final = 2
FLAG_SUBSCRIPTION: Final = 4

# Response codes.
SUCCESS: Final = 0
SYSTEM_ERROR: Final = 1
NO_PERMISSION: Final = 16
TOPIC_NOT_EXIST: Final = 17
PULL_NOT_FOUND: Final = 19
PULL_RETRY_IMMEDIATELY: Final = 20
PULL_OFFSET_MOVED: Final = 21
SUBSCRIPTION_PARSE_FAILED: Final = 23
SUBSCRIPTION_NOT_EXIST: Final = 24
SUBSCRIPTION_NOT_LATEST: Final = 25
SUBSCRIPTION_GROUP_NOT_EXIST: Final = 26
FILTER_DATA_NOT_EXIST: Final = 27
INVALID_PARAMETER: Final = 29

# forbiddenType of a response, which clients of RocketMQ 5.x read.
BROKER_FORBIDDEN: Final = 1
GROUP_FORBIDDEN: Final = 2
TOPIC_FORBIDDEN: Final = 3
BROADCASTING_FORBIDDEN: Final = 4

BULK_COUNT_MAX: Final = 8_192  # for clients that read whole queues and set `bulk`
BULK_BYTES_MAX: Final = 1 << 20
HOLD_MS_MAX: Final = 120_000  # clients request 15 or 20 s

SQL_NOT_ENABLED: Final = (
    "this broker does not filter by SQL92: set enablePropertyFilter=true in its configuration"
)


class GroupAccess(Protocol):
    """The settings of a group that a pull depends on."""

    @property
    def consume_enable(self) -> bool: ...
    @property
    def consume_broadcast_enable(self) -> bool: ...


class _NamedStatus(Protocol):
    """The status of a read: a member of the store's enum, which this package does not import."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class PullRefusal:
    """Why a pull is refused: the response code, its remark and, if not 0, its forbiddenType."""

    code: int
    remark: str
    forbidden_type: int = 0


def check_queue_access(
    group_name: str,
    topic_name: str,
    queue_id: int,
    *,
    broker_perm: int,
    group: GroupAccess | None,
    topic: TopicConfig | None,
) -> PullRefusal | None:
    """Return why this group may not read this queue, or None if it may."""
    if not broker_perm & PERM_READ:
        return PullRefusal(NO_PERMISSION, "this broker serves no reads", BROKER_FORBIDDEN)
    if group is None:
        return PullRefusal(SUBSCRIPTION_GROUP_NOT_EXIST, f"group {group_name} does not exist")
    if not group.consume_enable:
        return PullRefusal(NO_PERMISSION, f"group {group_name} is disabled", GROUP_FORBIDDEN)
    if topic is None:
        return PullRefusal(TOPIC_NOT_EXIST, f"topic {topic_name} does not exist")
    if not topic.perm & PERM_READ:
        return PullRefusal(NO_PERMISSION, f"topic {topic_name} serves no reads", TOPIC_FORBIDDEN)
    if not 0 <= queue_id < topic.read_queue_nums:
        count = topic.read_queue_nums
        return PullRefusal(
            INVALID_PARAMETER,
            f"topic {topic_name} has no queue {queue_id}: its {count} queues start at 0",
        )
    return None


def request_filter(
    topic_name: str,
    expression: str | None,
    *,
    expression_type: str | None,
    version: int,
    sql_enabled: bool = False,
) -> MessageFilter | PullRefusal:
    """Return the filter of a request with FLAG_SUBSCRIPTION. Only its own expression counts."""
    try:
        subscription = parse_subscription(
            topic_name, expression, expression_type=expression_type, version=version
        )
        return _sql_refusal(subscription, sql_enabled) or compile_subscription(subscription)
    except InvalidSubscription as error:
        return PullRefusal(SUBSCRIPTION_PARSE_FAILED, str(error))


def group_filter(
    topic_name: str,
    *,
    version: int,
    access: GroupAccess,
    group: ConsumerGroup | None,
    sql_enabled: bool = False,
) -> MessageFilter | PullRefusal:
    """Return the filter of a request without FLAG_SUBSCRIPTION.

    It is the one of the group's subscription, which the last heartbeat of a member has set.
    """
    if group is None:
        return PullRefusal(SUBSCRIPTION_NOT_EXIST, "no member of this group is connected")
    if group.is_broadcasting and not access.consume_broadcast_enable:
        remark = f"group {group.name} may not consume by broadcasting"
        return PullRefusal(NO_PERMISSION, remark, BROADCASTING_FORBIDDEN)
    subscription = group.subscriptions.get(topic_name)
    if subscription is None:
        remark = f"group {group.name} has not subscribed to {topic_name}"
        return PullRefusal(SUBSCRIPTION_NOT_EXIST, remark)
    if subscription.version < version:
        return PullRefusal(
            SUBSCRIPTION_NOT_LATEST, "this broker has not received your latest subscription yet"
        )
    try:
        return _sql_refusal(subscription, sql_enabled) or compile_subscription(subscription)
    except InvalidSubscription as error:
        return PullRefusal(FILTER_DATA_NOT_EXIST, str(error))


def _sql_refusal(subscription: Subscription, sql_enabled: bool) -> PullRefusal | None:
    if subscription.expression_type == SQL92 and not sql_enabled:
        return PullRefusal(SYSTEM_ERROR, SQL_NOT_ENABLED)
    return None


@dataclass(frozen=True, slots=True)
class ReadLimits:
    count_max: int
    bytes_max: int


def read_limits(
    requested_count: int, requested_bytes: int | None, config: ConsumeConfig
) -> ReadLimits:
    """Limit a read to what the broker allows.

    At least one message is read whatever the request says: a client that gets none would repeat
    the same request forever.
    """
    bytes_max = config.pull_bytes_max
    if requested_bytes is not None and 0 < requested_bytes < bytes_max:
        bytes_max = requested_bytes
    return ReadLimits(max(1, min(requested_count, config.pull_messages_max)), bytes_max)


def bulk_read_limits(requested_count: int) -> ReadLimits:
    """Limit the read of a pull with `bulk`, an extension that only our own clients send."""
    return ReadLimits(max(1, min(requested_count, BULK_COUNT_MAX)), BULK_BYTES_MAX)


# By the store's name of a status: the code if the pull began at offset 0, the code otherwise, and
# RocketMQ's name of the status, which is the remark of the response.
_RESULTS: Final[dict[str, tuple[int, int, str]]] = {
    "FOUND": (SUCCESS, SUCCESS, "FOUND"),
    "NO_MATCH": (PULL_RETRY_IMMEDIATELY, PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE"),
    "AT_END": (PULL_NOT_FOUND, PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE"),
    "TOO_SMALL": (PULL_OFFSET_MOVED, PULL_OFFSET_MOVED, "OFFSET_TOO_SMALL"),
    "PAST_END": (PULL_OFFSET_MOVED, PULL_OFFSET_MOVED, "OFFSET_OVERFLOW_BADLY"),
    "NO_QUEUE": (PULL_NOT_FOUND, PULL_OFFSET_MOVED, "NO_MATCHED_LOGIC_QUEUE"),
    "EMPTY": (PULL_NOT_FOUND, PULL_OFFSET_MOVED, "NO_MESSAGE_IN_QUEUE"),
}


def pull_result(status: _NamedStatus, queue_offset: int) -> tuple[int, str]:
    """Return the code and the remark of the response."""
    code_at_zero, code_elsewhere, remark = _RESULTS[status.name]
    return (code_at_zero if queue_offset == 0 else code_elsewhere), remark


def hold_ms(code: int, sys_flag: int, suspend_ms: int, config: ConsumeConfig) -> int:
    """Return how long to hold the pull after its first read in milliseconds; 0: respond now."""
    if code != PULL_NOT_FOUND or not sys_flag & FLAG_SUSPEND:
        return 0
    return max(0, min(suspend_ms, HOLD_MS_MAX)) if config.long_polling else config.short_poll_ms
