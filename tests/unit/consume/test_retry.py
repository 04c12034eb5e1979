"""Messages sent back: retry or dead letter, delay, and properties."""

from __future__ import annotations

import pytest

from escrowmq.consume.retry import FailedMessage, Redelivery, RetryPolicy, redirect, send_back
from escrowmq.message.names import dlq_topic, group_of_retry_topic, retry_topic

RETRY = "%RETRY%g"
DLQ = "%DLQ%g"
INT32_MAX = (1 << 31) - 1


def failed(times: int = 0, topic: str = "orders", /, **properties: str) -> FailedMessage:
    return FailedMessage(
        topic=topic, reconsume_times=times, properties=properties, offset_id="FFFF"
    )


@pytest.mark.parametrize(
    ("times", "delay_level", "policy", "topic", "level", "new_times"),
    [
        (0, 0, RetryPolicy(), RETRY, 3, 1),
        (1, 0, RetryPolicy(), RETRY, 4, 2),
        (15, 0, RetryPolicy(), RETRY, 18, 16),
        (16, 0, RetryPolicy(), DLQ, 0, 17),
        (0, 5, RetryPolicy(), RETRY, 5, 1),
        (0, -1, RetryPolicy(), DLQ, 0, 1),
        (2, 0, RetryPolicy(requested_max_times=2), DLQ, 0, 3),
        (2, 0, RetryPolicy(requested_max_times=2, client_version=63), RETRY, 5, 3),
        (2, 0, RetryPolicy(max_reconsume_times=2), DLQ, 0, 3),
        (2, 0, RetryPolicy(max_reconsume_times=2, requested_max_times=3), RETRY, 5, 3),
        (2, 0, RetryPolicy(requested_max_times=-1), RETRY, 5, 3),
        (0, 0, RetryPolicy(requested_max_times=0), DLQ, 0, 1),
        (-9, 0, RetryPolicy(), RETRY, 3, 1),
        (INT32_MAX, 0, RetryPolicy(), DLQ, 0, INT32_MAX),
    ],
    ids=[
        "first",
        "second",
        "last",
        "too often",
        "requested level",
        "requested dead letter",
        "maximum of the client",
        "maximum of an old client is ignored",
        "maximum of the group",
        "maximum of the client before that of the group",
        "client without a maximum",
        "client without retries",
        "negative times",
        "largest number of a record",
    ],
)
def test_a_message_is_retried_up_to_the_maximum_and_then_a_dead_letter(
    times: int, delay_level: int, policy: RetryPolicy, topic: str, level: int, new_times: int
) -> None:
    redelivery = send_back(failed(times), "g", policy, delay_level=delay_level)
    assert redelivery is not None
    assert (redelivery.topic, redelivery.delay_level, redelivery.reconsume_times) == (
        topic,
        level,
        new_times,
    )
    assert redelivery.properties.get("DELAY") == (str(level) if level else None)
    assert redelivery.is_dead_letter is (topic == DLQ)


def test_a_group_without_retry_queues_drops_messages() -> None:
    assert send_back(failed(), "g", RetryPolicy(retry_queue_count=0), delay_level=0) is None


def test_a_retry_topic_has_several_queues_and_a_dead_letter_topic_one() -> None:
    policy = RetryPolicy(retry_queue_count=4)
    counts = []
    for level in (0, -1):
        redelivery = send_back(failed(), "g", policy, delay_level=level)
        assert redelivery is not None
        counts.append(redelivery.queue_count)
    assert counts == [4, 1]


def test_the_first_failure_stores_the_origin_of_the_message() -> None:
    redelivery = send_back(failed(KEYS="k"), "g", RetryPolicy(), delay_level=0)
    assert redelivery is not None
    assert redelivery.properties == {
        "KEYS": "k",
        "RETRY_TOPIC": "orders",
        "ORIGIN_MESSAGE_ID": "FFFF",
        "DELAY": "3",
    }


def test_later_failures_keep_the_origin() -> None:
    record = failed(1, RETRY, RETRY_TOPIC="orders", ORIGIN_MESSAGE_ID="AAAA", DELAY="3")
    redelivery = send_back(record, "g", RetryPolicy(), delay_level=0)
    assert redelivery is not None
    assert redelivery.properties == {
        "RETRY_TOPIC": "orders",
        "ORIGIN_MESSAGE_ID": "AAAA",
        "DELAY": "4",
    }


def test_a_dead_letter_has_its_origin_and_no_delay() -> None:
    record = failed(16, RETRY, RETRY_TOPIC="orders", UNIQ_KEY="U1", DELAY="18", TIMER_DELAY_SEC="9")
    redelivery = send_back(record, "g", RetryPolicy(), delay_level=0)
    assert redelivery is not None
    assert redelivery.properties == {
        "RETRY_TOPIC": "orders",
        "UNIQ_KEY": "U1",
        "ORIGIN_MESSAGE_ID": "FFFF",
        "DLQ_ORIGIN_TOPIC": "orders",
        "DLQ_ORIGIN_MESSAGE_ID": "U1",
    }


def test_without_a_unique_key_a_dead_letter_has_the_first_offset_id() -> None:
    redelivery = send_back(failed(16), "g", RetryPolicy(), delay_level=0)
    assert redelivery is not None
    assert redelivery.properties["DLQ_ORIGIN_MESSAGE_ID"] == "FFFF"


@pytest.mark.parametrize(
    "name", ["TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS", "TIMER_OUT_MS", "DELAY"]
)
def test_the_original_delay_is_removed(name: str) -> None:
    redelivery = send_back(failed(**{name: "77"}), "g", RetryPolicy(), delay_level=0)
    assert redelivery is not None
    assert "77" not in redelivery.properties.values()


@pytest.mark.parametrize(
    ("level", "times", "topic", "delays"),
    [
        (0, 0, RETRY, {"TIMER_DELAY_MS": "250"}),
        (4, 0, RETRY, {"TIMER_DELAY_MS": "250"}),
        (-1, 0, DLQ, {}),
        (0, 16, DLQ, {}),
    ],
)
def test_an_exact_delay_replaces_a_level_but_no_dead_letter(
    level: int, times: int, topic: str, delays: dict[str, str]
) -> None:
    redelivery = send_back(failed(times), "g", RetryPolicy(), delay_level=level, delay_ms=250)
    assert redelivery is not None
    assert (redelivery.topic, redelivery.delay_level) == (topic, 0)
    found = {name: value for name, value in redelivery.properties.items() if "DELAY" in name}
    assert found == delays


@pytest.mark.parametrize("delay_ms", [None, 0, -1])
def test_without_an_exact_delay_the_level_counts(delay_ms: int | None) -> None:
    redelivery = send_back(failed(), "g", RetryPolicy(), delay_level=4, delay_ms=delay_ms)
    assert redelivery is not None
    assert redelivery.properties["DELAY"] == "4"
    assert "TIMER_DELAY_MS" not in redelivery.properties


def test_the_properties_of_the_failed_message_are_not_changed() -> None:
    record = failed(DELAY="2")
    send_back(record, "g", RetryPolicy(), delay_level=-1)
    assert record.properties == {"DELAY": "2"}


@pytest.mark.parametrize(
    ("times", "policy", "has_locks", "is_dead_letter"),
    [
        (16, RetryPolicy(), False, False),
        (17, RetryPolicy(), False, True),
        (0, RetryPolicy(), True, True),
        (3, RetryPolicy(requested_max_times=2), False, True),
        (3, RetryPolicy(requested_max_times=2, client_version=63), False, False),
    ],
    ids=["last", "too often", "orderly", "maximum of the client", "maximum of an old client"],
)
def test_a_send_to_the_retry_topic_may_become_a_dead_letter(
    times: int, policy: RetryPolicy, has_locks: bool, is_dead_letter: bool
) -> None:
    properties = {"RETRY_TOPIC": "orders", "DELAY": "5", "UNIQ_KEY": "U1"}
    redelivery = redirect(properties, "g", policy, reconsume_times=times, group_has_locks=has_locks)
    if not is_dead_letter:
        assert redelivery is None
        return
    assert redelivery == Redelivery(
        topic=DLQ,
        queue_count=1,
        reconsume_times=times,
        delay_level=0,
        properties={
            "RETRY_TOPIC": "orders",
            "UNIQ_KEY": "U1",
            "DLQ_ORIGIN_TOPIC": "orders",
            "DLQ_ORIGIN_MESSAGE_ID": "U1",
        },
    )


@pytest.mark.parametrize(("times", "is_dead_letter"), [(0, False), (15, False), (16, True)])
def test_a_resent_message_passes_the_locks_of_its_group_until_its_attempts_are_used(
    times: int, is_dead_letter: bool
) -> None:
    redelivery = redirect(
        {"DLQ_RESENT_FROM": "id"}, "g", RetryPolicy(), reconsume_times=times, group_has_locks=True
    )
    assert (redelivery is not None) is is_dead_letter


def test_a_message_without_properties_can_become_a_dead_letter() -> None:
    redelivery = redirect({}, "g", RetryPolicy(), reconsume_times=99, group_has_locks=False)
    assert redelivery is not None
    assert redelivery.properties == {}


def test_retry_and_dead_letter_topics_are_named_after_the_group() -> None:
    assert (retry_topic("g"), dlq_topic("g")) == (RETRY, DLQ)
    assert group_of_retry_topic("%RETRY%g") == "g"
    assert group_of_retry_topic("orders") is None
