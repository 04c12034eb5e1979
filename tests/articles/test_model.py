"""The model: a half message, a verdict, and a broker that asks if there is none.

 1 Local transaction and message are one: both take effect, or neither.
   e2e/sql/test_crashes.py test_database_and_message_agree_after_a_kill_or_a_freeze
 2 A half message is invisible to consumers.
   test_a_half_message_is_invisible_to_consumers
 3 A commit turns the half into an ordinary message.
   test_a_committed_half_is_delivered
 4 A rollback drops the half.
   test_a_rolled_back_half_is_never_delivered
 5 Without a verdict the broker asks the producer.
   test_the_broker_asks_the_producer_if_no_verdict_arrives
 6 A verdict is COMMIT_MESSAGE, ROLLBACK_MESSAGE or UNKNOW: 8, 12 or 0.
   test_a_verdict_is_one_of_three_numbers
 7 After UNKNOW the broker asks again later.
   test_a_half_answered_with_unknown_is_checked_again
 8 A half that was checked too often is dropped. Here it waits for an operator.
   unit/broker/transactions/test_rocketmq_weak_points.py
   test_w02_a_stranded_half_can_be_decided_once
 9 The half is in a queue of its own, not in that of its topic.
   test_a_half_is_in_the_half_queue_and_not_in_that_of_its_topic
10 In the end it is an ordinary message or nothing. Here it may also be stranded and resumed.
   unit/broker/transactions/test_admin.py test_a_resumed_transaction_is_checked_again
"""

from __future__ import annotations

import pytest

from tests.interop.producers import TOPIC, Producer
from tests.interop.remoting import COMMIT, HALF_TOPIC, ROLLBACK, UNKNOWN
from tests.support.raw_transactions import (
    END_TRANSACTION,
    end_fields,
    send_half,
    wait_until_delivered,
)

pytestmark = pytest.mark.slow


def test_a_half_message_is_invisible_to_consumers(producer: Producer) -> None:
    producer.park("invisible")
    producer.park_and_end(["sent after the invisible one"], COMMIT)
    wait_until_delivered(producer, "sent after the invisible one")
    assert producer.delivered()["invisible"] == 0


def test_a_committed_half_is_delivered(producer: Producer) -> None:
    producer.park_and_end(["committed"], COMMIT)
    wait_until_delivered(producer, "committed")
    assert producer.delivered()["committed"] == 1


def test_a_rolled_back_half_is_never_delivered(producer: Producer) -> None:
    producer.park_and_end(["rolled back"], ROLLBACK)
    producer.park_and_end(["sent after the rollback"], COMMIT)
    wait_until_delivered(producer, "sent after the rollback")
    assert producer.delivered()["rolled back"] == 0


def test_the_broker_asks_the_producer_if_no_verdict_arrives(producer: Producer) -> None:
    producer.park("without a verdict")
    producer.respond_until(lambda: producer.checks["without a verdict"] > 0, {})
    assert producer.delivered()["without a verdict"] == 0


@pytest.mark.parametrize(
    ("verdict", "is_delivered", "is_checked"),
    [(8, True, False), (12, False, False), (0, False, True)],
    ids=["COMMIT_MESSAGE", "ROLLBACK_MESSAGE", "UNKNOW"],
)
def test_a_verdict_is_one_of_three_numbers(
    producer: Producer, verdict: int, is_delivered: bool, is_checked: bool
) -> None:
    name, later_name = f"ended with {verdict}", f"open after {verdict}"
    half = producer.park(name)
    producer.client.send_one_way(END_TRANSACTION, end_fields(half, verdict))
    producer.park(later_name)  # its check comes after one of the first half would have come
    # RocketMQ sends checks in several threads, so two of them may arrive in the other order.
    awaited = (name, later_name) if is_checked else (later_name,)
    producer.respond_until(lambda: all(producer.checks[each] > 0 for each in awaited), {})
    assert (producer.checks[name] > 0) == is_checked
    assert (producer.delivered()[name] > 0) == is_delivered


def test_a_half_answered_with_unknown_is_checked_again(producer: Producer) -> None:
    producer.park("unknown at first")
    producer.respond_until(
        lambda: producer.checks["unknown at first"] >= 2, {"unknown at first": UNKNOWN}
    )
    producer.respond_until(
        lambda: producer.delivered()["unknown at first"] == 1, {"unknown at first": COMMIT}
    )


def test_a_half_is_in_the_half_queue_and_not_in_that_of_its_topic(producer: Producer) -> None:
    client = producer.client
    end = client.max_offset(TOPIC, 1)
    half = send_half(producer, "in the half queue")
    assert client.view_by_id(half.message_id).topic == HALF_TOPIC
    assert client.max_offset(HALF_TOPIC, 0) > half.queue_offset
    assert client.max_offset(TOPIC, 1) == end
