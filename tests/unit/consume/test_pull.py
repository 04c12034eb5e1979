"""Rules for pulls: the order of refusals, the response to each result of a read, and limits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from escrowmq.config import ConsumeConfig
from escrowmq.consume.members import BROADCASTING, ConsumerGroup, ConsumerGroupSettings
from escrowmq.consume.pull import (
    BULK_BYTES_MAX,
    BULK_COUNT_MAX,
    HOLD_MS_MAX,
    PullRefusal,
    ReadLimits,
    bulk_read_limits,
    check_queue_access,
    group_filter,
    hold_ms,
    pull_result,
    read_limits,
    request_filter,
)
from escrowmq.consume.subscription import MessageFilter, Subscription
from escrowmq.message.filter import ExpressionType
from escrowmq.message.keys import java_hash
from escrowmq.message.topic_config import TopicConfig
from escrowmq.store.config_files import GroupConfig
from escrowmq.store.queue_reader import ReadStatus


@dataclass
class QueueAccess:
    """A request in which everything is wrong. Each row of the test corrects one thing more."""

    broker_perm: int = 2
    group: GroupConfig | None = None
    topic: TopicConfig | None = None
    queue_id: int = 4


DISABLED = GroupConfig(group_name="g", consume_enable=False)
ENABLED = GroupConfig(group_name="g")
UNREADABLE = TopicConfig(topic_name="orders", perm=2, read_queue_nums=4)
READABLE = TopicConfig(topic_name="orders", perm=6, read_queue_nums=4)


@pytest.mark.parametrize(
    ("access", "code", "forbidden"),
    [
        (QueueAccess(), 16, 1),
        (QueueAccess(broker_perm=6), 26, 0),
        (QueueAccess(broker_perm=6, group=DISABLED), 16, 2),
        (QueueAccess(broker_perm=6, group=ENABLED), 17, 0),
        (QueueAccess(broker_perm=6, group=ENABLED, topic=UNREADABLE), 16, 3),
        (QueueAccess(broker_perm=6, group=ENABLED, topic=READABLE), 29, 0),
        (QueueAccess(broker_perm=6, group=ENABLED, topic=READABLE, queue_id=-1), 29, 0),
        (QueueAccess(broker_perm=6, group=ENABLED, topic=READABLE, queue_id=3), None, 0),
    ],
    ids=[
        "unreadable broker",
        "unknown group",
        "disabled group",
        "unknown topic",
        "unreadable topic",
        "queue beyond the last",
        "negative queue",
        "valid",
    ],
)
def test_queue_access_is_checked_in_order(
    access: QueueAccess, code: int | None, forbidden: int
) -> None:
    refusal = check_queue_access(
        "g",
        "orders",
        access.queue_id,
        broker_perm=access.broker_perm,
        group=access.group,
        topic=access.topic,
    )
    if code is None:
        assert refusal is None
    else:
        assert refusal is not None
        assert (refusal.code, refusal.forbidden_type) == (code, forbidden)
        assert refusal.remark


@pytest.mark.parametrize(
    ("expression", "expression_type", "code"),
    [
        ("a || b", "TAG", None),
        (None, None, None),
        ("||", "TAG", 23),
        ("a", "X", 23),
        ("a > 1", "SQL92", 1),
        ("a >", "SQL92", 23),
    ],
)
def test_the_subscription_in_a_request_is_compiled_or_refused(
    expression: str | None, expression_type: str | None, code: int | None
) -> None:
    result = request_filter("orders", expression, expression_type=expression_type, version=3)
    if code is None:
        assert isinstance(result, MessageFilter)
        assert result.matches(java_hash("a"), b"")
        assert result.matches(java_hash("c"), b"") is (expression is None)
    else:
        assert isinstance(result, PullRefusal)
        assert result.code == code


def connected_group(
    *topics: str,
    model: str = "CLUSTERING",
    version: int = 5,
    expression_type: ExpressionType = "TAG",
) -> ConsumerGroup:
    return ConsumerGroup(
        name="g",
        settings=ConsumerGroupSettings(message_model=model),
        subscriptions={
            topic: Subscription(topic=topic, version=version, expression_type=expression_type)
            for topic in topics
        },
    )


NO_BROADCAST = GroupConfig(group_name="g", consume_broadcast_enable=False)


@pytest.mark.parametrize(
    ("config", "group", "code"),
    [
        (NO_BROADCAST, None, 24),
        (NO_BROADCAST, connected_group(model=BROADCASTING), 16),
        (ENABLED, connected_group(model=BROADCASTING), 24),
        (ENABLED, connected_group("stock"), 24),
        (ENABLED, connected_group("orders", version=4), 25),
        (ENABLED, connected_group("orders", expression_type="SQL92"), 1),
        (ENABLED, connected_group("orders", version=5), None),
        (ENABLED, connected_group("orders", version=6), None),
        (ENABLED, connected_group("orders", model=BROADCASTING), None),
    ],
    ids=[
        "no member",
        "broadcasting not allowed",
        "no subscription",
        "another topic",
        "older version",
        "SQL92 not enabled",
        "same version",
        "newer version",
        "broadcasting",
    ],
)
def test_the_subscription_of_a_group_is_refused_in_order(
    config: GroupConfig, group: ConsumerGroup | None, code: int | None
) -> None:
    result = group_filter("orders", version=5, access=config, group=group)
    assert (result.code if isinstance(result, PullRefusal) else None) == code


def test_an_invalid_expression_of_the_group_is_refused_when_it_pulls() -> None:
    subscription = Subscription(topic="orders", expression="a >", expression_type="SQL92")
    group = ConsumerGroup(
        name="g", settings=ConsumerGroupSettings(), subscriptions={"orders": subscription}
    )
    result = group_filter("orders", version=0, access=ENABLED, group=group, sql_enabled=True)
    assert isinstance(result, PullRefusal)
    assert result.code == 27


@pytest.mark.parametrize(
    ("status", "from_zero", "from_nine"),
    [
        (ReadStatus.FOUND, 0, 0),
        (ReadStatus.NO_MATCH, 20, 20),
        (ReadStatus.NO_QUEUE, 19, 21),
        (ReadStatus.EMPTY, 19, 21),
        (ReadStatus.AT_END, 19, 19),
        (ReadStatus.TOO_SMALL, 21, 21),
        (ReadStatus.PAST_END, 21, 21),
    ],
)
def test_the_response_code_of_a_read(status: ReadStatus, from_zero: int, from_nine: int) -> None:
    assert pull_result(status, 0)[0] == from_zero
    assert pull_result(status, 9)[0] == from_nine


def test_every_status_of_a_read_has_its_own_remark() -> None:
    remarks = {pull_result(status, 0)[1] for status in ReadStatus}
    assert len(remarks) == len(ReadStatus)


@pytest.mark.parametrize(
    ("code", "sys_flag", "suspend_ms", "expected_ms"),
    [
        (19, 2, 15_000, 15_000),
        (19, 7, 15_000, 15_000),
        (19, 4, 15_000, 0),
        (20, 2, 15_000, 0),
        (0, 2, 15_000, 0),
        (19, 2, -1, 0),
        (19, 2, 1 << 62, HOLD_MS_MAX),
    ],
)
def test_only_a_pull_that_found_nothing_is_held(
    code: int, sys_flag: int, suspend_ms: int, expected_ms: int
) -> None:
    assert hold_ms(code, sys_flag, suspend_ms, ConsumeConfig()) == expected_ms


def test_without_long_polling_a_pull_is_held_for_the_short_polling_time() -> None:
    config = ConsumeConfig(long_polling=False, short_poll_ms=700)
    assert hold_ms(19, 2, 15_000, config) == 700


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [
        (10, None, ReadLimits(10, 500_000)),
        (50, 1 << 31, ReadLimits(50, 500_000)),
        (1_000, 4_096, ReadLimits(64, 4_096)),
        (0, 0, ReadLimits(1, 500_000)),
        (-5, -5, ReadLimits(1, 500_000)),
    ],
)
def test_a_read_is_limited_and_gets_at_least_one_message(
    count: int, size: int | None, expected: ReadLimits
) -> None:
    config = ConsumeConfig(pull_messages_max=64, pull_bytes_max=500_000)
    assert read_limits(count, size, config) == expected


def test_a_bulk_pull_has_its_own_limits() -> None:
    assert bulk_read_limits(0) == ReadLimits(1, BULK_BYTES_MAX)
    assert bulk_read_limits(1 << 30) == ReadLimits(BULK_COUNT_MAX, BULK_BYTES_MAX)
