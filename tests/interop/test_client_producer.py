"""Our producer sends messages and ends transactions at Apache RocketMQ.

RocketMQ responds to an end with COMMIT or ROLLBACK, and carries out a second one as well. It does
not respond to UNKNOWN, and does not support the requests that only EscrowMQ has.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from escrowmq import (
    Message,
    Producer,
    ReceivedMessage,
    Rollback,
    SendStatus,
    TransactionListener,
    TransactionProducer,
    Verdict,
)
from escrowmq.message.compression import decompress_body
from tests.interop import jars
from tests.interop.apache import ApacheRocketMQ
from tests.interop.remoting import Client
from tests.interop.skipping import call_or_skip
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.apache, pytest.mark.slow]

SETTINGS: dict[str, object] = {
    "mappedFileSizeCommitLog": 16 << 20,
    "transactionTimeOut": 2_000,
    "transactionCheckInterval": 1_000,
}
TIMEOUT_S = 60.0
QUEUES = 4


class Listener(TransactionListener):
    """Commits or rolls back as the argument of the transaction says, and counts the checks."""

    def __init__(self) -> None:
        self.checked: Counter[bytes] = Counter()

    async def execute_local_transaction(self, message: Message, arg: Any) -> Verdict | None:
        if arg == "raise":
            raise RuntimeError("the local transaction fails")
        return Verdict.ROLLBACK if arg == "no" else Verdict.COMMIT

    def check_local_transaction(self, message: ReceivedMessage) -> Verdict:
        self.checked[message.body] += 1
        # RocketMQ also checks decided halves, because it writes their ops a moment later.
        return Verdict.ROLLBACK if message.body == b"no" else Verdict.COMMIT


@pytest.fixture(scope="module", params=["5.5.0", pytest.param("4.9.7", marks=pytest.mark.nightly)])
def rocketmq(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApacheRocketMQ]:
    """Start one broker for all tests of this file, because a start takes long."""
    version: str = request.param
    call_or_skip(f"RocketMQ {version}", lambda: jars.fetch(version))
    with ApacheRocketMQ(version, tmp_path_factory.mktemp("apache"), SETTINGS) as rocketmq:
        yield rocketmq


def stored(rocketmq: ApacheRocketMQ, topic: str) -> Counter[bytes]:
    bodies: Counter[bytes] = Counter()
    with Client(rocketmq.address) as reader:
        for queue in range(QUEUES):
            for record in reader.pull_all(topic, queue):
                bodies[decompress_body(record.body, record.sys_flag, body_bytes_max=1 << 22)] += 1
    return bodies


async def wait_until_stored(
    rocketmq: ApacheRocketMQ, topic: str, condition: Callable[[Counter[bytes]], object]
) -> None:
    """Wait until the stored bodies of a topic fulfil the condition."""
    await asyncio.to_thread(
        wait_until,
        lambda: condition(stored(rocketmq, topic)),
        f"the messages of {topic} are stored",
        timeout_s=TIMEOUT_S,
    )


async def test_sends_batches_and_compressed_bodies_are_stored(rocketmq: ApacheRocketMQ) -> None:
    long_body = b"a long body " * 1000
    async with Producer(rocketmq.namesrv_address, group="p") as producer:
        first = await producer.send(Message("plain", b"first"))
        assert first.status is SendStatus.SEND_OK
        await wait_until_stored(rocketmq, "plain", bool)
        results = await producer.send_batch([Message("plain", b"%d" % n) for n in range(20)])
        assert len({result.offset_id for result in results}) == 20
        assert [result.queue_offset - results[0].queue_offset for result in results] == list(
            range(20)
        )
        for compression in ("zlib", "lz4", "zstd"):
            if rocketmq.version.startswith("4.") and compression != "zlib":
                continue  # consumers of 4.9.7 support only zlib
            options = {"group": "p", "compression": compression}
            async with Producer(rocketmq.namesrv_address, **options) as compressing:  # type: ignore[arg-type]
                await compressing.send(Message("plain", long_body))
        expected = Counter({b"first": 1, long_body: 1 if rocketmq.version.startswith("4.") else 3})
        expected.update(b"%d" % n for n in range(20))
        await wait_until_stored(rocketmq, "plain", lambda bodies: bodies == expected)


async def test_the_halves_of_a_transaction_are_ended_one_by_one(rocketmq: ApacheRocketMQ) -> None:
    async with Producer(rocketmq.namesrv_address, group="p") as producer:
        await producer.send(Message("grouped", b"plain"))
        async with producer.transaction(Message("grouped", b"1")) as tx:
            for number in (2, 3):
                await tx.send(Message("grouped", b"%d" % number))
        assert tx.outcome is not None
        assert (tx.outcome.acknowledged, tx.outcome.oneway) == (True, False)
        async with producer.transaction(Message("grouped", b"no")) as rolled_back:
            await rolled_back.send(Message("grouped", b"nor this"))
            raise Rollback
        assert rolled_back.outcome is not None
        assert rolled_back.outcome.acknowledged
        [half, *_] = tx.halves
        # Private: the request goes past the public API.
        connection = await producer._connect(half.queue, False)
        # Private: the kind of broker has no public view.
        assert not await producer._heartbeat.is_escrowmq(connection)
        # Private: clients refresh their routes only every half minute.
        assert await producer._routes.all_master_addresses() == {rocketmq.address}
        expected = Counter({b"plain": 1, b"1": 1, b"2": 1, b"3": 1})
        await wait_until_stored(rocketmq, "grouped", lambda bodies: bodies == expected)


async def test_a_transaction_listener_decides_and_is_checked(rocketmq: ApacheRocketMQ) -> None:
    listener = Listener()
    async with TransactionProducer(
        rocketmq.namesrv_address, group="p", listener=listener, namespace="ns"
    ) as producer:
        await producer.send(Message("listened", b"plain"))
        # The producer drops the delay, because RocketMQ loses half messages that have one.
        delayed = Message("listened", b"delayed", delay_level=5)
        result = await producer.send_in_transaction(delayed)
        assert (result.local_state, result.outcome.acknowledged) == (Verdict.COMMIT, True)
        await producer.send_in_transaction(Message("listened", b"no"), "no")
        failed = await producer.send_in_transaction(Message("listened", b"checked"), "raise")
        assert failed.local_state is Verdict.UNKNOWN
        assert (failed.outcome.acknowledged, failed.outcome.oneway) == (False, True)
        expected = {b"plain", b"delayed", b"checked"}
        await wait_until_stored(rocketmq, "ns%listened", lambda bodies: bodies.keys() >= expected)
        assert b"no" not in stored(rocketmq, "ns%listened")
    assert listener.checked[b"checked"] >= 1
