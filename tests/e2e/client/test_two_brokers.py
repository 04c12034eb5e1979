"""Two brokers, one of them killed with SIGKILL: sends continue, nothing acknowledged is lost, and a
transaction over both is decided alike."""

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
from tests.support.sql_bank import open_halves
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
MORE = 400  # acknowledged after the kill, before the load ends


class Pair:
    """Two brokers. `first` is also the name server; only `second` is killed."""

    def __init__(self, directory: Path) -> None:
        a, b = NAMES
        self.first = Server(directory / a, conf={**CONF, "brokerName": a})
        at = self.first.namesrv_address
        self.second = Server(
            directory / b, role="broker", conf={**CONF, "brokerName": b, "namesrvAddr": at}
        )
        self.namesrv_address = at

    async def make_topic(self, topic: str) -> None:
        for served in (self.first, self.second):
            with served.client() as client:
                client.create_topic(topic)
        async with Producer(self.namesrv_address, group="looks") as producer:
            async with asyncio.timeout(WAIT_S):
                while True:
                    with contextlib.suppress(EscrowError):
                        if {q.broker for q in await producer.queues(topic)} == set(NAMES):
                            return
                    # Private: clients refresh their routes only every half minute.
                    await producer._routes.refresh()
                    await asyncio.sleep(0.05)

    async def stored(self, topic: str) -> dict[str, list[bytes]]:
        """Return the bodies of all messages of a topic, by broker."""
        stored: dict[str, list[bytes]] = {name: [] for name in NAMES}
        async with PullConsumer(self.namesrv_address, group="looks") as pull_consumer:
            for queue in await pull_consumer.queues(topic):
                offset, end = 0, await pull_consumer.latest_offset(queue)
                while offset < end:
                    messages, offset, *_ = await pull_consumer.pull(queue, offset, max_messages=32)
                    stored[queue.broker] += [message.body for message in messages]
        return stored


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("pair"))
    with pair.first, pair.second:
        yield pair


async def test_sends_continue_when_a_broker_is_killed_and_nothing_acknowledged_is_lost(
    pair: Pair,
) -> None:
    await pair.make_topic("load")
    acknowledged: dict[bytes, SendResult] = {}
    refused: list[EscrowError] = []
    is_over = asyncio.Event()

    async def send_on(producer: Producer, sender: int) -> None:
        number = 0
        while not is_over.is_set():
            body = b"%d-%d" % (sender, number)
            number += 1
            try:
                acknowledged[body] = await producer.send(Message("load", body))
            except EscrowError as error:
                refused.append(error)

    async with Producer(pair.namesrv_address, group="load", timeout_s=10) as producer:
        senders = [asyncio.create_task(send_on(producer, n)) for n in range(SENDERS)]
        await wait_until_async(
            lambda: {r.queue.broker for r in acknowledged.values()} == set(NAMES)
        )
        await wait_until_async(lambda: len(acknowledged) > MORE)
        pair.second.kill()
        after = len(acknowledged) + MORE
        await wait_until_async(lambda: len(acknowledged) > after)
        is_over.set()
        await asyncio.gather(*senders)
    assert refused == []  # a failed attempt was repeated on the other broker
    pair.second.start()
    await pair.make_topic("load")
    stored = await pair.stored("load")
    for body, result in acknowledged.items():
        assert body in stored[result.queue.broker]
    # A message is there twice only if the killed broker stored it without responding.
    assert all(max(Counter(bodies).values()) == 1 for bodies in stored.values())


async def park_on_both(tx: Transaction, topic: str) -> None:
    """Sends use the queues in turn, so both brokers soon have half messages."""
    while {half.queue.broker for half in tx.halves} != set(NAMES):
        await tx.send(Message(topic, b"x"))


@pytest.mark.parametrize("verdict", [Verdict.COMMIT, Verdict.ROLLBACK])
async def test_a_transaction_over_two_brokers_is_decided_alike_although_one_is_killed(
    pair: Pair, verdict: Verdict
) -> None:
    topic = f"to-{verdict.name.lower()}"
    await pair.make_topic(topic)
    asked: list[str] = []
    async with Producer(pair.namesrv_address, group="both", heartbeat_s=1) as producer:

        @producer.checker(topic)
        async def was_it_saved(message: ReceivedMessage) -> Verdict:
            asked.append(message.broker or message.transaction_id)
            return verdict

        tx = await producer.transaction(Message(topic, b"x"), id="t-1").__aenter__()
        await park_on_both(tx, topic)
        halves = Counter(half.queue.broker for half in tx.halves)
        pair.second.kill()
        outcome = await tx.end(verdict)
        assert not outcome.acknowledged  # broker-a confirmed it, broker-b did not respond
        assert NAMES[1] in outcome.detail
        assert NAMES[0] not in outcome.detail
        pair.second.start()
        await wait_until_async(lambda: asked)  # the killed broker checks after its restart
        wanted = dict(halves) if verdict is Verdict.COMMIT else dict.fromkeys(NAMES, 0)
        await wait_until_async(lambda: open_halves(pair.second) == 0)
    await pair.make_topic(topic)
    stored = await pair.stored(topic)
    assert {name: len(bodies) for name, bodies in stored.items()} == wanted
    assert open_halves(pair.first) == 0
