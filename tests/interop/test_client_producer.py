"""Our producer against Apache RocketMQ: what it sends is there, and ends come out as meant.

RocketMQ answers an end that commits or rolls back, and carries out a second one too. It never
answers one that says UNKNOWN, and does not know our own requests.
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

pytestmark = [pytest.mark.apache, pytest.mark.slow]

SETTINGS: dict[str, object] = {
    "mappedFileSizeCommitLog": 16 << 20,
    "transactionTimeOut": 2_000,
    "transactionCheckInterval": 1_000,
}
WAIT_S = 60.0
QUEUES = 4


class Store(TransactionListener):
    def __init__(self) -> None:
        self.checked: Counter[bytes] = Counter()

    async def execute_local_transaction(self, message: Message, arg: Any) -> Verdict | None:
        if arg == "raise":
            raise RuntimeError("after the work")
        return Verdict.ROLLBACK if arg == "no" else Verdict.COMMIT

    def check_local_transaction(self, message: ReceivedMessage) -> Verdict:
        self.checked[message.body] += 1
        # Also about what was told it in time: RocketMQ notes an end late, and asks meanwhile.
        return Verdict.ROLLBACK if message.body == b"no" else Verdict.COMMIT


@pytest.fixture(scope="module", params=["5.5.0", pytest.param("4.9.7", marks=pytest.mark.nightly)])
def rocketmq(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApacheRocketMQ]:
    """One for all tests here: starting it is what takes long."""
    if reason := jars.unavailable_reason():
        pytest.skip(reason)
    try:
        jars.fetch(request.param)
    except jars.Unavailable as error:
        pytest.skip(str(error))
    with ApacheRocketMQ(request.param, tmp_path_factory.mktemp("apache"), SETTINGS) as rocketmq:
        yield rocketmq


def stored(rocketmq: ApacheRocketMQ, topic: str) -> Counter[bytes]:
    found: Counter[bytes] = Counter()
    with Client(rocketmq.address) as reader:
        for queue in range(QUEUES):
            for record in reader.pull_all(topic, queue):
                found[decompress_body(record.body, record.sys_flag, body_bytes_max=1 << 22)] += 1
    return found


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await asyncio.to_thread(is_so):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_sends_batches_and_compressed_bodies_are_stored(rocketmq: ApacheRocketMQ) -> None:
    long = b"again and again " * 1000
    async with Producer(rocketmq.namesrv_address, group="p") as producer:
        first = await producer.send(Message("plain", b"one"))
        assert first.status is SendStatus.SEND_OK
        await until(lambda: bool(stored(rocketmq, "plain")))
        results = await producer.send_batch([Message("plain", b"%d" % n) for n in range(20)])
        assert len({result.offset_id for result in results}) == 20
        assert [result.queue_offset - results[0].queue_offset for result in results] == list(
            range(20)
        )
        for kind in ("zlib", "lz4", "zstd"):
            if rocketmq.version.startswith("4.") and kind != "zlib":
                continue  # its consumers know zlib alone
            options = {"group": "p", "compression": kind}
            async with Producer(rocketmq.namesrv_address, **options) as other:  # type: ignore[arg-type]
                await other.send(Message("plain", long))
        expected = Counter({b"one": 1, long: 1 if rocketmq.version.startswith("4.") else 3})
        expected.update(b"%d" % n for n in range(20))
        await until(lambda: stored(rocketmq, "plain") == expected)


async def test_a_group_of_halves_is_ended_one_by_one(rocketmq: ApacheRocketMQ) -> None:
    async with Producer(rocketmq.namesrv_address, group="p") as producer:
        await producer.send(Message("grouped", b"plain"))
        async with producer.transaction(Message("grouped", b"1")) as tx:
            for number in (2, 3):
                await tx.send(Message("grouped", b"%d" % number))
        assert tx.outcome is not None
        assert (tx.outcome.acknowledged, tx.outcome.oneway) == (True, False)
        async with producer.transaction(Message("grouped", b"no")) as rolled:
            await rolled.send(Message("grouped", b"nor this"))
            raise Rollback
        assert rolled.outcome is not None
        assert rolled.outcome.acknowledged
        [half, *_] = tx.halves
        # Private: the request goes past the public API.
        line = await producer._connect(half.queue, False)
        # Private: the kind of broker has no public view.
        assert not await producer._heartbeat.is_escrowmq(line)
        # Private: clients refresh their routes only every half minute.
        assert await producer._routes.all_master_addresses() == {rocketmq.address}
        expected = Counter({b"plain": 1, b"1": 1, b"2": 1, b"3": 1})
        await until(lambda: stored(rocketmq, "grouped") == expected)


async def test_the_articles_form_with_a_delay_and_check_back(rocketmq: ApacheRocketMQ) -> None:
    listener = Store()
    async with TransactionProducer(
        rocketmq.namesrv_address, group="p", listener=listener, namespace="ns"
    ) as producer:
        await producer.send(Message("listened", b"plain"))
        # RocketMQ loses a half with a delay; so it goes without.
        delayed = Message("listened", b"delayed", delay_level=5)
        result = await producer.send_in_transaction(delayed)
        assert (result.local_state, result.outcome.acknowledged) == (Verdict.COMMIT, True)
        await producer.send_in_transaction(Message("listened", b"no"), "no")
        crashed = await producer.send_in_transaction(Message("listened", b"crashed"), "raise")
        assert crashed.local_state is Verdict.UNKNOWN
        assert (crashed.outcome.acknowledged, crashed.outcome.oneway) == (False, True)
        expected = {b"plain", b"delayed", b"crashed"}
        await until(lambda: stored(rocketmq, "ns%listened").keys() >= expected)
        assert b"no" not in stored(rocketmq, "ns%listened")
    assert listener.checked[b"crashed"] >= 1
