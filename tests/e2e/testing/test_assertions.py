"""The assertions of `escrowmq.testing` wait, hold, and fail with the reason."""

from __future__ import annotations

import asyncio
import threading

import pytest

from escrowmq import Message, Producer, Rollback, Verdict, blocking
from escrowmq.testing import LocalBroker

pytestmark = pytest.mark.slow

NOT_LONG_S = 0.1  # for an assertion that is expected to fail


def roll_back(broker: LocalBroker, topic: str, **options: str) -> blocking.Transaction:
    with (
        blocking.Producer(broker.servers, group=topic) as producer,
        producer.transaction(Message(topic, b"1", **options)) as tx,  # type: ignore[arg-type]
    ):
        raise Rollback("no money")
    return tx


def test_messages_are_expected_by_bodies_in_any_order(
    broker: LocalBroker, escrowmq_topic: str
) -> None:
    with blocking.Producer(broker.servers, group="p") as producer:
        for body in (b"2", b"1", b"1"):
            producer.send(Message(escrowmq_topic, body, keys=body.decode()))
    broker.assert_delivered(escrowmq_topic, [b"1", b"2", b"1"])
    broker.assert_delivered(escrowmq_topic, count=3)
    broker.assert_delivered(escrowmq_topic)
    (two,) = broker.assert_delivered(escrowmq_topic, count=1, where=lambda m: m.keys == "2")
    assert two.body == b"2"
    assert [message.body for message in broker.messages(escrowmq_topic)] == [b"2", b"1", b"1"]


@pytest.mark.parametrize(
    ("bodies", "count"), [([b"1"], None), ([b"1", b"2"], None), ([], None), (None, 1)]
)
def test_more_messages_than_expected_fail_at_once(
    broker: LocalBroker, escrowmq_topic: str, bodies: list[bytes] | None, count: int | None
) -> None:
    with blocking.Producer(broker.servers, group="p") as producer:
        for _ in range(2):
            producer.send(Message(escrowmq_topic, b"1"))
    with pytest.raises(AssertionError, match="delivered: 2") as caught:
        broker.assert_delivered(escrowmq_topic, bodies, count=count, timeout_s=3600)
    assert str(caught.value).count("b'1' id=") == 2


def test_a_message_that_comes_later_is_waited_for(broker: LocalBroker, escrowmq_topic: str) -> None:
    with blocking.Producer(broker.servers, group="p") as producer:

        def send() -> None:
            producer.send(Message("not-" + escrowmq_topic, b"1"))

        timer = threading.Timer(0.1, send)
        timer.start()
        broker.assert_delivered("not-" + escrowmq_topic, [b"1"])
        timer.join()


def test_a_missing_message_is_explained_by_its_transaction(
    broker: LocalBroker, escrowmq_topic: str
) -> None:
    roll_back(broker, escrowmq_topic)
    with pytest.raises(AssertionError, match="no money") as caught:
        broker.assert_delivered(escrowmq_topic, [b"1"], timeout_s=NOT_LONG_S)
    text = str(caught.value)
    assert "delivered: 0" in text
    assert "rolled_back" in text
    assert "parked" in text
    with pytest.raises(AssertionError, match="no transaction of topic 'nothing' was begun"):
        broker.assert_delivered("nothing", timeout_s=NOT_LONG_S)


def test_a_broker_that_is_stopped_is_named_in_the_failure() -> None:
    with LocalBroker() as broker:
        broker.stop()
        with pytest.raises(AssertionError, match="the broker cannot be read"):
            broker.assert_delivered("any", timeout_s=NOT_LONG_S)


def test_a_rolled_back_transaction_is_known_by_its_object_id_or_key(
    broker: LocalBroker, escrowmq_topic: str
) -> None:
    tx = roll_back(broker, escrowmq_topic, keys=f"k-{escrowmq_topic} other")
    broker.assert_rolled_back(tx)
    broker.assert_rolled_back(tx.halves[0].message_id)
    broker.assert_rolled_back(f"k-{escrowmq_topic}")
    broker.assert_nothing_delivered(escrowmq_topic)


def test_a_committed_transaction_is_not_rolled_back(
    broker: LocalBroker, escrowmq_topic: str
) -> None:
    with (
        blocking.Producer(broker.servers, group=escrowmq_topic) as producer,
        producer.transaction(Message(escrowmq_topic, b"1")) as tx,
    ):
        pass
    with pytest.raises(AssertionError, match="committed"):
        broker.assert_rolled_back(tx, timeout_s=3600)
    with pytest.raises(AssertionError, match="delivered: 1"):
        broker.assert_nothing_delivered(escrowmq_topic, timeout_s=3600)


def test_an_open_transaction_is_neither_settled_nor_rolled_back(
    broker: LocalBroker, escrowmq_topic: str
) -> None:
    with blocking.Producer(broker.servers, group=escrowmq_topic) as producer:
        with pytest.raises(KeyError), producer.transaction(Message(escrowmq_topic, b"1")) as tx:
            raise KeyError
        with pytest.raises(AssertionError, match="open"):
            broker.assert_settled(escrowmq_topic, timeout_s=NOT_LONG_S)
        with pytest.raises(AssertionError, match="open"):
            broker.assert_nothing_delivered(escrowmq_topic, timeout_s=NOT_LONG_S)
        with pytest.raises(AssertionError, match="open"):
            broker.assert_rolled_back(tx, timeout_s=NOT_LONG_S)
        producer.checker("*")(lambda message: Verdict.ROLLBACK)
        broker.check_back_now(escrowmq_topic)
        broker.assert_rolled_back(tx)
        broker.assert_settled(escrowmq_topic)


def test_an_unknown_transaction_is_not_rolled_back(broker: LocalBroker) -> None:
    with pytest.raises(AssertionError, match="no transaction has the message id or key nothing"):
        broker.assert_rolled_back("nothing", timeout_s=NOT_LONG_S)


async def test_a_coroutine_awaits_what_its_own_event_loop_does(
    broker: LocalBroker, escrowmq_topic: str
) -> None:
    async with Producer(broker.servers, group=escrowmq_topic) as producer:

        async def check(message: object) -> Verdict:
            await asyncio.sleep(0)
            return Verdict.COMMIT

        producer.checker("*")(check)
        with pytest.raises(KeyError):
            async with producer.transaction(Message(escrowmq_topic, b"1")):
                raise KeyError
        broker.check_back_now(escrowmq_topic)
        await broker.assert_settled_async(escrowmq_topic)
        await broker.assert_delivered_async(escrowmq_topic, [b"1"])
        with pytest.raises(AssertionError):
            await broker.assert_nothing_delivered_async(escrowmq_topic)
        async with producer.transaction(Message(escrowmq_topic, b"2")) as tx:
            raise Rollback
        await broker.assert_rolled_back_async(tx)


async def test_an_assertion_refuses_to_stop_an_event_loop(broker: LocalBroker) -> None:
    with pytest.raises(RuntimeError, match="_async"):
        broker.assert_delivered("any")
