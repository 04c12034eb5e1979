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
from escrowmq.consume.subscription import SQL92, Subscription, parse_subscription, with_filter
from escrowmq.errors import BadSubscription

# sysFlag of a pull.
HAS_COMMIT_OFFSET: Final = 1
MAY_SUSPEND: Final = 2
HAS_SUBSCRIPTION: Final = 4

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
SHORT_HOLD_MS: Final = 1_000  # with long polling switched off

SQL_NOT_ENABLED: Final = (
    "this broker does not filter by SQL92: set enablePropertyFilter=true in its configuration"
)
_READABLE: Final = 4  # a bit of `perm`


class GroupRules(Protocol):
    """The part of a group's settings that a pull looks at."""

    consume_enable: bool
    consume_broadcast_enable: bool


class TopicRules(Protocol):
    read_queue_nums: int
    perm: int


class ReadStatus(Protocol):
    """What the store's read ended with: a member of its enum."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Refusal:
    code: int
    remark: str
    forbidden: int = 0


def refuse_place(
    group_name: str,
    topic_name: str,
    queue_id: int,
    *,
    broker_perm: int,
    group: GroupRules | None,
    topic: TopicRules | None,
) -> Refusal | None:
    """Whether this queue may be read by this group at all."""
    if not broker_perm & _READABLE:
        return Refusal(NO_PERMISSION, "this broker serves no reads", BROKER_FORBIDDEN)
    if group is None:
        return Refusal(SUBSCRIPTION_GROUP_NOT_EXIST, f"group {group_name} does not exist")
    if not group.consume_enable:
        return Refusal(NO_PERMISSION, f"group {group_name} is switched off", GROUP_FORBIDDEN)
    if topic is None:
        return Refusal(TOPIC_NOT_EXIST, f"topic {topic_name} does not exist")
    if not topic.perm & _READABLE:
        return Refusal(NO_PERMISSION, f"topic {topic_name} serves no reads", TOPIC_FORBIDDEN)
    if not 0 <= queue_id < topic.read_queue_nums:
        count = topic.read_queue_nums
        return Refusal(INVALID_PARAMETER, f"queue {queue_id} of {topic_name}, which has {count}")
    return None


def subscription_sent(
    topic_name: str,
    expression: str | None,
    *,
    kind: str | None,
    version: int,
    allows_sql: bool = False,
) -> Subscription | Refusal:
    """Of a request with HAS_SUBSCRIPTION: the one in the request counts, alone."""
    try:
        subscription = parse_subscription(topic_name, expression, kind=kind, version=version)
    except BadSubscription as error:
        return Refusal(SUBSCRIPTION_PARSE_FAILED, str(error))
    return _enabled(subscription, allows_sql)


def subscription_known(
    topic_name: str,
    *,
    version: int,
    rules: GroupRules,
    connected: ConsumerGroup | None,
    allows_sql: bool = False,
) -> Subscription | Refusal:
    """Of a request without HAS_SUBSCRIPTION: the group's, as heartbeats have told it."""
    if connected is None:
        return Refusal(SUBSCRIPTION_NOT_EXIST, "nobody of this group is connected")
    if connected.is_broadcasting and not rules.consume_broadcast_enable:
        remark = f"group {connected.name} may not consume by broadcasting"
        return Refusal(NO_PERMISSION, remark, BROADCASTING_FORBIDDEN)
    subscription = connected.subscriptions.get(topic_name)
    if subscription is None:
        remark = f"group {connected.name} has not subscribed to {topic_name}"
        return Refusal(SUBSCRIPTION_NOT_EXIST, remark)
    if subscription.version < version:
        return Refusal(SUBSCRIPTION_NOT_LATEST, "your latest subscription has not come here yet")
    enabled = _enabled(subscription, allows_sql)
    if isinstance(enabled, Refusal):
        return enabled
    try:
        return with_filter(enabled)
    except BadSubscription as error:
        return Refusal(FILTER_DATA_NOT_EXIST, str(error))


def _enabled(subscription: Subscription, allows_sql: bool) -> Subscription | Refusal:
    if subscription.kind == SQL92 and not allows_sql:
        return Refusal(SYSTEM_ERROR, SQL_NOT_ENABLED)
    return subscription


@dataclass(frozen=True, slots=True)
class ReadLimits:
    count_max: int
    bytes_max: int


def limits(count_asked: int, bytes_asked: int | None = None) -> ReadLimits:
    """One message at least, whatever was asked: a client that gets none asks for ever."""
    bytes_max = BYTES_MAX if bytes_asked is None or bytes_asked <= 0 else bytes_asked
    return ReadLimits(max(1, min(count_asked, COUNT_MAX)), min(bytes_max, BYTES_MAX))


def bulk_limits(count_asked: int) -> ReadLimits:
    """Of a pull that says `bulk`, which no client of RocketMQ's does."""
    return ReadLimits(max(1, min(count_asked, BULK_COUNT_MAX)), BULK_BYTES_MAX)


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


def result_of(status: ReadStatus, queue_offset: int) -> tuple[int, str]:
    """Code and remark of the answer."""
    from_zero, from_elsewhere, remark = _RESULTS[status.name]
    return (from_zero if queue_offset == 0 else from_elsewhere), remark


def hold_ms(
    code: int, sys_flag: int, suspend_ms: int, *, is_first_look: bool, long_polling: bool = True
) -> int:
    """For how long to hold the pull; 0: answer it now."""
    if code != PULL_NOT_FOUND or not sys_flag & MAY_SUSPEND or not is_first_look:
        return 0
    return max(0, min(suspend_ms, HOLD_MS_MAX)) if long_polling else SHORT_HOLD_MS
