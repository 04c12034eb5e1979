"""Which topics and groups belong to brokers, to consumer groups and to users."""

from __future__ import annotations

import pytest

from escrowmq.message.names import (
    dlq_topic,
    group_of_retry_topic,
    is_group_topic,
    is_internal_topic,
    is_shared_name,
    is_system_group,
    is_system_topic,
    reply_topic,
    retry_topic,
)

SERVER_NAMES = ["Shop", "broker-a"]


def test_groups_have_topics_for_retries_and_dead_letters() -> None:
    assert (retry_topic("g"), dlq_topic("g")) == ("%RETRY%g", "%DLQ%g")
    assert group_of_retry_topic("%RETRY%g") == "g"
    assert group_of_retry_topic("%DLQ%g") is None
    assert is_group_topic("%RETRY%g")
    assert is_group_topic("%DLQ%g")
    assert not is_group_topic("orders")


@pytest.mark.parametrize(
    "topic",
    [
        *("TBW102", "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "rmq_sys_wheel_timer"),
        *("RMQ_SYS_TRANS_OP_HALF_TOPIC", "TRANS_CHECK_MAX_TIME_TOPIC", "rmq_sys_anything"),
        *("ESCROW_JOURNAL", "ESCROW_DECISION", "BenchmarkTest", "SELF_TEST_TOPIC"),
    ],
)
def test_a_system_topic_is_internal_and_the_same_in_every_namespace(topic: str) -> None:
    assert is_system_topic(topic)
    assert is_internal_topic(topic, SERVER_NAMES)
    assert is_shared_name(topic)


@pytest.mark.parametrize(
    "topic",
    ["%RETRY%g", "%DLQ%g", reply_topic("Shop"), "RMQ_SYS_TRACE_TOPIC", "Shop", "broker-a"],
)
def test_a_topic_that_brokers_or_groups_create_is_internal_but_no_system_topic(topic: str) -> None:
    assert is_internal_topic(topic, SERVER_NAMES)
    assert not is_system_topic(topic)


@pytest.mark.parametrize(
    "topic", ["orders", "rmq", "broker", "broker-events", "Shops", reply_topic("orders")]
)
def test_a_topic_of_a_user_is_not_internal(topic: str) -> None:
    assert not is_internal_topic(topic, SERVER_NAMES)
    assert not is_shared_name(topic)


def test_system_groups_are_known_by_name() -> None:
    assert is_system_group("TOOLS_CONSUMER")
    assert not is_system_group("billing")
    assert is_shared_name("CID_RMQ_SYS_TRANS")
