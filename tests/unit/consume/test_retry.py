"""Messages that are sent back: the table of retry.py, row by row."""

from __future__ import annotations

import pytest

from escrowmq.consume.retry import FailedMessage, Redelivery, RetryPolicy, redirect, send_back
from escrowmq.message.names import dlq_topic, group_of_retry_topic, retry_topic

RETRY = "%RETRY%g"
DEAD = "%DLQ%g"
INT32_MAX = (1 << 31) - 1


def failed(times: int = 0, topic: str = "orders", /, **properties: str) -> FailedMessage:
    return FailedMessage(
        topic=topic, reconsume_times=times, properties=properties, offset_id="FFFF"
    )


@pytest.mark.parametrize(
    ("times", "delay_level", "rules", "topic", "level", "new_times"),
    [
        (0, 0, RetryPolicy(), RETRY, 3, 1),
        (1, 0, RetryPolicy(), RETRY, 4, 2),
        (15, 0, RetryPolicy(), RETRY, 18, 16),
        (16, 0, RetryPolicy(), DEAD, 0, 17),
        (0, 5, RetryPolicy(), RETRY, 5, 1),
        (0, -1, RetryPolicy(), DEAD, 0, 1),
        (2, 0, RetryPolicy(requested_max_times=2), DEAD, 0, 3),
        (2, 0, RetryPolicy(requested_max_times=2, client_version=63), RETRY, 5, 3),
        (2, 0, RetryPolicy(max_reconsume_times=2), DEAD, 0, 3),
        (2, 0, RetryPolicy(max_reconsume_times=2, requested_max_times=3), RETRY, 5, 3),
        (2, 0, RetryPolicy(requested_max_times=-1), RETRY, 5, 3),
        (0, 0, RetryPolicy(requested_max_times=0), DEAD, 0, 1),
        (-9, 0, RetryPolicy(), RETRY, 3, 1),
        (INT32_MAX, 0, RetryPolicy(), DEAD, 0, INT32_MAX),
    ],
    ids=[
        "first",
        "second",
        "last",
        "too often",
        "a level asked for",
        "dead letters asked for",
        "the client's maximum",
        "an old client's maximum means nothing",
        "the group's maximum",
        "the client's counts more",
        "the client has none",
        "the client wants no retries",
        "negative times",
        "as many as a record can hold",
    ],
)
def test_where_a_message_is_sent_back_to(
    times: int, delay_level: int, rules: RetryPolicy, topic: str, level: int, new_times: int
) -> None:
    again = send_back(failed(times), "g", rules, delay_level=delay_level)
    assert again is not None
    assert (again.topic, again.delay_level, again.reconsume_times) == (topic, level, new_times)
    assert again.properties.get("DELAY") == (str(level) if level else None)
    assert again.is_dead_letter is (topic == DEAD)


def test_a_group_without_retry_queues_drops_messages() -> None:
    assert send_back(failed(), "g", RetryPolicy(retry_queue_count=0), delay_level=0) is None


def test_any_of_the_retry_queues_will_do_but_there_is_one_for_dead_letters() -> None:
    rules = RetryPolicy(retry_queue_count=4)
    counts = []
    for level in (0, -1):
        again = send_back(failed(), "g", rules, delay_level=level)
        assert again is not None
        counts.append(again.queue_count)
    assert counts == [4, 1]


def test_the_first_failure_stores_the_origin_of_the_message() -> None:
    again = send_back(failed(KEYS="k"), "g", RetryPolicy(), delay_level=0)
    assert again is not None
    assert again.properties == {
        "KEYS": "k",
        "RETRY_TOPIC": "orders",
        "ORIGIN_MESSAGE_ID": "FFFF",
        "DELAY": "3",
    }


def test_later_failures_keep_the_origin() -> None:
    record = failed(1, RETRY, RETRY_TOPIC="orders", ORIGIN_MESSAGE_ID="AAAA", DELAY="3")
    again = send_back(record, "g", RetryPolicy(), delay_level=0)
    assert again is not None
    assert again.properties == {
        "RETRY_TOPIC": "orders",
        "ORIGIN_MESSAGE_ID": "AAAA",
        "DELAY": "4",
    }


def test_a_dead_letter_has_its_origin_and_no_delay() -> None:
    record = failed(16, RETRY, RETRY_TOPIC="orders", UNIQ_KEY="U1", DELAY="18", TIMER_DELAY_SEC="9")
    again = send_back(record, "g", RetryPolicy(), delay_level=0)
    assert again is not None
    assert again.properties == {
        "RETRY_TOPIC": "orders",
        "UNIQ_KEY": "U1",
        "ORIGIN_MESSAGE_ID": "FFFF",
        "DLQ_ORIGIN_TOPIC": "orders",
        "DLQ_ORIGIN_MESSAGE_ID": "U1",
    }


def test_without_a_unique_key_a_dead_letter_is_known_by_its_first_offset_id() -> None:
    again = send_back(failed(16), "g", RetryPolicy(), delay_level=0)
    assert again is not None
    assert again.properties["DLQ_ORIGIN_MESSAGE_ID"] == "FFFF"


@pytest.mark.parametrize("name", ["TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS", "DELAY"])
def test_the_original_delay_does_not_apply_again(name: str) -> None:
    again = send_back(failed(**{name: "77"}), "g", RetryPolicy(), delay_level=0)
    assert again is not None
    assert "77" not in again.properties.values()


def test_the_properties_of_the_record_are_not_touched() -> None:
    record = failed(DELAY="2")
    send_back(record, "g", RetryPolicy(), delay_level=-1)
    assert record.properties == {"DELAY": "2"}


@pytest.mark.parametrize(
    ("times", "rules", "has_locks", "is_diverted"),
    [
        (16, RetryPolicy(), False, False),
        (17, RetryPolicy(), False, True),
        (0, RetryPolicy(), True, True),
        (3, RetryPolicy(requested_max_times=2), False, True),
        (3, RetryPolicy(requested_max_times=2, client_version=63), False, False),
    ],
    ids=["often", "too often", "orderly", "the client's maximum", "an old client's"],
)
def test_a_send_to_the_retry_topic_may_become_a_dead_letter(
    times: int, rules: RetryPolicy, has_locks: bool, is_diverted: bool
) -> None:
    sent = {"RETRY_TOPIC": "orders", "DELAY": "5", "UNIQ_KEY": "U1"}
    again = redirect(sent, "g", rules, reconsume_times=times, group_has_locks=has_locks)
    if not is_diverted:
        assert again is None
        return
    assert again == Redelivery(
        topic=DEAD,
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


def test_a_message_without_properties_can_become_a_dead_letter() -> None:
    again = redirect({}, "g", RetryPolicy(), reconsume_times=99, group_has_locks=False)
    assert again is not None
    assert again.properties == {}


def test_retry_and_dead_letter_topics_are_named_after_the_group() -> None:
    assert (retry_topic("g"), dlq_topic("g")) == (RETRY, DEAD)
    assert group_of_retry_topic("%RETRY%g") == "g"
    assert group_of_retry_topic("orders") is None
