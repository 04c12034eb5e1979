"""The client's consumer against a real broker: what is acknowledged, shared out and given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from escrowmq import Consumer, Message, Producer
from escrowmq.client.assignment import share_evenly
from escrowmq.client.hand import Hand
from escrowmq.client.messages import Queue
from tests.brokers import Served

pytestmark = pytest.mark.slow

WAIT_S = 30.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    conf = {"messageDelayLevel": "1s 1s 1s 1s 1s"}
    with Served(tmp_path_factory.mktemp("consumer"), conf=conf) as served:
        yield served


@asynccontextmanager
async def sent(served: Served, topic: str, *bodies: bytes, tags: str = "") -> AsyncIterator[None]:
    async with Producer(served.namesrv_address, group="p") as producer:
        for body in bodies:
            await producer.send(Message(topic, body, tags=tags))
        yield


def consumer(served: Served, group: str, **subscribe: str) -> Consumer:
    return Consumer(served.namesrv_address, group=group, subscribe=subscribe)


async def receive(consumer: Consumer, count: int) -> list[bytes]:
    async with asyncio.timeout(WAIT_S):
        return [(await consumer.receive()).body for _ in range(count)]


async def test_a_group_gets_every_message_once(served: Served) -> None:
    bodies = [b"%d" % number for number in range(20)]
    async with sent(served, "orders", *bodies):
        async with consumer(served, "billing", orders="*") as first:
            found = []
            async with asyncio.timeout(WAIT_S):
                async for message in first:
                    found.append(message.body)
                    if len(found) == 12:
                        break
        async with consumer(served, "billing", orders="*") as second:
            found += await receive(second, 8)
    assert sorted(found) == sorted(bodies)


async def test_what_an_exception_leaves_in_hand_comes_again(served: Served) -> None:
    async with sent(served, "fragile", b"only"):
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with consumer(served, "g-fragile", fragile="*") as first:
                async for _ in first:
                    raise ZeroDivisionError
        async with consumer(served, "g-fragile", fragile="*") as second:
            assert await receive(second, 1) == [b"only"]


async def test_only_the_tags_that_are_wanted(served: Served) -> None:
    async with (
        sent(served, "tagged", b"no", tags="c"),
        sent(served, "tagged", b"yes", tags="b"),
        consumer(served, "g-tags", tagged="a || b") as one,
    ):
        assert await receive(one, 1) == [b"yes"]


async def test_what_is_given_back_comes_later(served: Served) -> None:
    async with (
        sent(served, "again", b"x"),
        consumer(served, "g-again", again="*") as one,
        asyncio.timeout(WAIT_S),
    ):
        first = await one.receive()
        assert first.reconsume_times == 0
        await one.later(first, delay_level=1)
        second = await one.receive()
        assert (second.body, second.reconsume_times) == (b"x", 1)


async def test_two_members_share_the_queues_and_the_last_one_has_them_all(served: Served) -> None:
    async with sent(served, "shared", b"made"), consumer(served, "g-shared", shared="*") as first:
        assert await receive(first, 1) == [b"made"]
        queues = {queue for queue in first._pulls if queue.topic == "shared"}
        assert len(queues) == 4
        async with consumer(served, "g-shared", shared="*") as second, asyncio.timeout(WAIT_S):
            while len(second._pulls) < 2 or len(first._pulls) > 3:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            shares = [set(member._pulls) for member in (first, second)]
            assert not shares[0] & shares[1]
        async with asyncio.timeout(WAIT_S):
            while not queues <= set(first._pulls):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@pytest.mark.parametrize(("queues", "members"), [(8, 3), (4, 4), (3, 5), (0, 2), (16, 1)])
def test_every_queue_is_one_member_s(queues: int, members: int) -> None:
    everything = [Queue("t", "b", number) for number in range(queues)]
    names = [f"m{number}" for number in range(members)]
    shares = [share_evenly(everything, names, name) for name in names]
    assert [queue for share in shares for queue in share] == everything
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert share_evenly(everything, names, "a stranger") == []


def test_nothing_that_is_open_is_committed() -> None:
    hand = Hand(5)
    assert hand.committable == 5
    for offset in (5, 6, 8):
        hand.take(offset)
    hand.done(6)
    assert hand.committable == 5
    hand.done(5)
    assert hand.committable == 8
    hand.done(8)
    hand.passed(12)
    assert (hand.committable, len(hand)) == (12, 0)
