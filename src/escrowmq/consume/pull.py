"""One pull, decided: refuse it, read, and name what the read has found.

Refusals, in this order (the number is the answer's code):

    16  the broker serves no reads             26  no such group      16  the group is switched off
    17  no such topic     16  the topic serves no reads               29  no such queue
  with an expression in the request:
    23  it cannot be read
  without one, by the group's subscription:
    24  nobody of the group is connected       16  it may not consume by broadcasting
    24  it has not subscribed to this topic    25  we know an older subscription than the client's
  either way:
     1  SQL92 is not enabled
  without an expression in the request:
    27  the group's is SQL92 and cannot be read

What a read found (names as in the store):

    FOUND 0    NO_MATCH 20    AT_END 19    TOO_SMALL, PAST_END 21
    NO_QUEUE, EMPTY 19 if asked from offset 0, else 21

Of these 19 may be held, if the client said so and this is the first time the request is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from escrowmq.consume.members import ConsumerGroup
from escrowmq.consume.subscription import (
    SQL92,
    Subscription,
    compile_subscription,
    parse_subscription,
)
from escrowmq.errors import InvalidSubscription

# sysFlag of a pull.
FLAG_COMMIT_OFFSET: Final = 1
FLAG_SUSPEND: Final = 2
FLAG_SUBSCRIPTION: Final = 4

# Codes of answers.
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

# forbiddenType of an answer, for clients of 5.x.
BROKER_FORBIDDEN: Final = 1
GROUP_FORBIDDEN: Final = 2
TOPIC_FORBIDDEN: Final = 3
BROADCASTING_FORBIDDEN: Final = 4

COUNT_MAX: Final = 32
BYTES_MAX: Final = 256 * 1024
BULK_COUNT_MAX: Final = 8_192  # of whoever reads whole queues, and says so
BULK_BYTES_MAX: Final = 1 << 20
HOLD_MS_MAX: Final = 120_000  # clients ask for 15 or 20 s
SHORT_POLLING_MS: Final = 1_000  # with long polling switched off

SQL_NOT_ENABLED: Final = (
    "this broker does not filter by SQL92: set enablePropertyFilter=true in its configuration"
)
_PERM_READ: Final = 4  # a bit of `perm`


class GroupAccess(Protocol):
    """The part of a group's settings that a pull looks at."""

    consume_enable: bool
    consume_broadcast_enable: bool


class TopicAccess(Protocol):
    read_queue_nums: int
    perm: int


class _NamedStatus(Protocol):
    """What the store's read ended with: a member of its enum."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class PullRefusal:
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
    topic: TopicAccess | None,
) -> PullRefusal | None:
    """Whether this queue may be read by this group at all."""
    if not broker_perm & _PERM_READ:
        return PullRefusal(NO_PERMISSION, "this broker serves no reads", BROKER_FORBIDDEN)
    if group is None:
        return PullRefusal(SUBSCRIPTION_GROUP_NOT_EXIST, f"group {group_name} does not exist")
    if not group.consume_enable:
        return PullRefusal(NO_PERMISSION, f"group {group_name} is switched off", GROUP_FORBIDDEN)
    if topic is None:
        return PullRefusal(TOPIC_NOT_EXIST, f"topic {topic_name} does not exist")
    if not topic.perm & _PERM_READ:
        return PullRefusal(NO_PERMISSION, f"topic {topic_name} serves no reads", TOPIC_FORBIDDEN)
    if not 0 <= queue_id < topic.read_queue_nums:
        count = topic.read_queue_nums
        return PullRefusal(
            INVALID_PARAMETER, f"queue {queue_id} of {topic_name}, which has {count}"
        )
    return None


def request_subscription(
    topic_name: str,
    expression: str | None,
    *,
    expression_type: str | None,
    version: int,
    sql_enabled: bool = False,
) -> Subscription | PullRefusal:
    """Of a request with HAS_SUBSCRIPTION: the one in the request counts, alone."""
    try:
        subscription = parse_subscription(
            topic_name, expression, expression_type=expression_type, version=version
        )
    except InvalidSubscription as error:
        return PullRefusal(SUBSCRIPTION_PARSE_FAILED, str(error))
    return _check_sql_enabled(subscription, sql_enabled)


def group_subscription(
    topic_name: str,
    *,
    version: int,
    access: GroupAccess,
    group: ConsumerGroup | None,
    sql_enabled: bool = False,
) -> Subscription | PullRefusal:
    """Of a request without HAS_SUBSCRIPTION: the group's, as heartbeats have told it."""
    if group is None:
        return PullRefusal(SUBSCRIPTION_NOT_EXIST, "nobody of this group is connected")
    if group.is_broadcasting and not access.consume_broadcast_enable:
        remark = f"group {group.name} may not consume by broadcasting"
        return PullRefusal(NO_PERMISSION, remark, BROADCASTING_FORBIDDEN)
    subscription = group.subscriptions.get(topic_name)
    if subscription is None:
        remark = f"group {group.name} has not subscribed to {topic_name}"
        return PullRefusal(SUBSCRIPTION_NOT_EXIST, remark)
    if subscription.version < version:
        return PullRefusal(
            SUBSCRIPTION_NOT_LATEST, "your latest subscription has not come here yet"
        )
    enabled = _check_sql_enabled(subscription, sql_enabled)
    if isinstance(enabled, PullRefusal):
        return enabled
    try:
        return compile_subscription(enabled)
    except InvalidSubscription as error:
        return PullRefusal(FILTER_DATA_NOT_EXIST, str(error))


def _check_sql_enabled(subscription: Subscription, sql_enabled: bool) -> Subscription | PullRefusal:
    if subscription.expression_type == SQL92 and not sql_enabled:
        return PullRefusal(SYSTEM_ERROR, SQL_NOT_ENABLED)
    return subscription


@dataclass(frozen=True, slots=True)
class ReadLimits:
    count_max: int
    bytes_max: int


def read_limits(requested_count: int, requested_bytes: int | None = None) -> ReadLimits:
    """One message at least, whatever was asked: a client that gets none asks for ever."""
    bytes_max = BYTES_MAX if requested_bytes is None or requested_bytes <= 0 else requested_bytes
    return ReadLimits(max(1, min(requested_count, COUNT_MAX)), min(bytes_max, BYTES_MAX))


def bulk_read_limits(requested_count: int) -> ReadLimits:
    """Of a pull that says `bulk`, which no client of RocketMQ's does."""
    return ReadLimits(max(1, min(requested_count, BULK_COUNT_MAX)), BULK_BYTES_MAX)


# By the store's name: code from offset 0, code from another, RocketMQ's name (the remark).
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
    """Code and remark of the answer."""
    from_zero, from_elsewhere, remark = _RESULTS[status.name]
    return (from_zero if queue_offset == 0 else from_elsewhere), remark


def hold_ms(
    code: int, sys_flag: int, suspend_ms: int, *, is_first_attempt: bool, long_polling: bool = True
) -> int:
    """For how long to hold the pull; 0: answer it now."""
    if code != PULL_NOT_FOUND or not sys_flag & FLAG_SUSPEND or not is_first_attempt:
        return 0
    return max(0, min(suspend_ms, HOLD_MS_MAX)) if long_polling else SHORT_POLLING_MS
