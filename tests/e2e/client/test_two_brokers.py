"""Two brokers, one of which is killed with SIGKILL: sends continue, no acknowledged message is
lost, and a transaction over both brokers is decided the same way on both."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from escrowmq import Message, Producer, PullConsumer, ReceivedMessage, Verdict
from escrowmq.client.messages import SendResult
from escrowmq.client.producer.transaction import Transaction
from escrowmq.errors import EscrowError
from tests.support.brokers import Server
from tests.support.clients import WAIT_S
from tests.support.waiting import wait_until_async

pytestmark = pytest.mark.slow

NAMES = ("broker-a", "broker-b")
CONF = {
    "transactionTimeOut": 500,
    "transactionCheckInterval": 500,
    "transactionCheckMax": 1000,
    "registerNameServerPeriod": 10_000,
}
SENDERS = 16
MESSAGES = 400  # acknowledged before the kill, and again after it


class TwoBrokers:
    """Two brokers. `first` is also the name server; only `second` is killed."""

    def __init__(self, directory: Path) -> None:
        a, b = NAMES
        self.first = Server(directory / a, conf={**CONF, "brokerName": a})
        self.namesrv_address = self.first.namesrv_address
        conf = {**CONF, "brokerName": b, "namesrvAddr": self.namesrv_address}
        self.second = Server(directory / b, role="broker", conf=conf)

    async def create_topic(self, topic: str) -> None:
        """Create a topic on both brokers, and wait until both are in its route."""
        for broker in (self.first, self.second):
            with broker.client() as client:
                client.create_topic(topic)
        async with Producer(self.namesrv_address, group="observers") as producer:
            async with asyncio.timeout(WAIT_S):
                while True:
                    with contextlib.suppress(EscrowError):
                        queues = await producer.queues(topic)
                        if {queue.broker for queue in queues} == set(NAMES):
                            return
                    # Private: clients refresh their routes only every half minute.
                    await producer._routes.refresh()
                    await asyncio.sleep(0.05)

    async def stored(self, topic: str) -> dict[str, list[bytes]]:
        """Return the bodies of all messages of a topic, by broker."""
        stored: dict[str, list[bytes]] = {name: [] for name in NAMES}
        async with PullConsumer(self.namesrv_address, group="observers") as pull_consumer:
            for queue in await pull_consumer.queues(topic):
                offset, end = 0, await pull_consumer.latest_offset(queue)
                while offset < end:
                    messages, offset, *_ = await pull_consumer.pull(queue, offset, max_messages=32)
                    stored[queue.broker] += [message.body for message in messages]
        return stored


@pytest.fixture(scope="module")
def two_brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoBrokers]:
    two_brokers = TwoBrokers(tmp_path_factory.mktemp("two_brokers"))
    with two_brokers.first, two_brokers.second:
        yield two_brokers


async def test_sends_continue_when_a_broker_is_killed_and_nothing_acknowledged_is_lost(
    two_brokers: TwoBrokers,
) -> None:
    await two_brokers.create_topic("load")
    acknowledged: dict[bytes, SendResult] = {}
    refused: list[EscrowError] = []
    should_stop = asyncio.Event()

    async def send_until_stopped(producer: Producer, sender: int) -> None:
        number = 0
        while not should_stop.is_set():
            body = b"%d-%d" % (sender, number)
            number += 1
            try:
                acknowledged[body] = await producer.send(Message("load", body))
            except EscrowError as error:
                refused.append(error)

    async with Producer(two_brokers.namesrv_address, group="load", timeout_s=10) as producer:
        senders = [asyncio.create_task(send_until_stopped(producer, n)) for n in range(SENDERS)]
        await wait_until_async(
            lambda: {r.queue.broker for r in acknowledged.values()} == set(NAMES)
        )
        await wait_until_async(lambda: len(acknowledged) > MESSAGES)
        two_brokers.second.kill()
        target = len(acknowledged) + MESSAGES
        await wait_until_async(lambda: len(acknowledged) > target)
        should_stop.set()
        await asyncio.gather(*senders)
    assert refused == []  # a failed attempt was repeated on the other broker
    two_brokers.second.start()
    await two_brokers.create_topic("load")
    stored = await two_brokers.stored("load")
    for body, result in acknowledged.items():
        assert body in stored[result.queue.broker]
    # A message may be on both brokers if the killed one stored it without responding.
    assert all(max(Counter(bodies).values()) == 1 for bodies in stored.values())


async def park_on_both(tx: Transaction, topic: str) -> None:
    """Send until both brokers have half messages; sends use the queues in turn."""
    while {half.queue.broker for half in tx.halves} != set(NAMES):
        await tx.send(Message(topic, b"x"))


@pytest.mark.parametrize("verdict", [Verdict.COMMIT, Verdict.ROLLBACK])
async def test_a_transaction_over_two_brokers_has_one_decision_although_one_is_killed(
    two_brokers: TwoBrokers, verdict: Verdict
) -> None:
    topic = f"to-{verdict.name.lower()}"
    await two_brokers.create_topic(topic)
    checked: list[str] = []
    async with Producer(two_brokers.namesrv_address, group="both", heartbeat_s=1) as producer:

        @producer.checker(topic)
        async def check(message: ReceivedMessage) -> Verdict:
            checked.append(message.broker or message.transaction_id)
            return verdict

        tx = await producer.transaction(Message(topic, b"x"), id="t-1").__aenter__()
        await park_on_both(tx, topic)
        halves = Counter(half.queue.broker for half in tx.halves)
        two_brokers.second.kill()
        outcome = await tx.end(verdict)
        assert not outcome.acknowledged  # broker-a confirmed it, broker-b did not respond
        assert NAMES[1] in outcome.detail
        assert NAMES[0] not in outcome.detail
        two_brokers.second.start()
        await wait_until_async(lambda: checked)  # the killed broker checks after its restart
        expected = dict(halves) if verdict is Verdict.COMMIT else dict.fromkeys(NAMES, 0)
        await two_brokers.second.assert_settled_async()
    await two_brokers.create_topic(topic)
    stored = await two_brokers.stored(topic)
    assert {name: len(bodies) for name, bodies in stored.items()} == expected
    assert two_brokers.first.open_transactions() == []
