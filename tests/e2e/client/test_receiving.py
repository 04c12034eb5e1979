"""Receive with a time limit, and in batches: what is returned, and what is acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from escrowmq import Consumer, ReceivedMessage
from escrowmq.blocking import Consumer as BlockingConsumer
from escrowmq.errors import ClientClosed
from tests.support.brokers import LocalServer
from tests.support.clients import CONF, WAIT_S, numbered_bodies, receive, send

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with LocalServer(CONF) as server:
        yield server


def subscriber(server: LocalServer, topic: str) -> Consumer:
    return Consumer(server.namesrv_address, group=f"g-{topic}", subscribe={topic: "*"})


async def receive_batches(consumer: Consumer, count: int) -> list[bytes]:
    """Receive batches until there are `count` messages, and return their bodies."""
    bodies: list[bytes] = []
    async with asyncio.timeout(WAIT_S):
        while len(bodies) < count:
            batch = await consumer.receive_batch(count - len(bodies))
            bodies += [message.body for message in batch]
    return bodies


async def test_receive_returns_none_after_its_timeout_and_acknowledges(server: LocalServer) -> None:
    await send(server, "limited", b"only")
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with subscriber(server, "limited") as first:
            assert await receive(first, 1) == [b"only"]
            assert await first.receive(timeout_s=0.01) is None
            assert await first.receive(timeout_s=0) is None
            raise ZeroDivisionError  # a message that is not acknowledged would come again
    await send(server, "limited", b"next")
    async with subscriber(server, "limited") as second:
        assert await receive(second, 1) == [b"next"]


async def test_a_batch_is_acknowledged_by_the_next_call(server: LocalServer) -> None:
    bodies = numbered_bodies(20)
    await send(server, "batches", *bodies)
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with subscriber(server, "batches") as first:
            received = await receive_batches(first, 20)
            assert sorted(received) == bodies
            assert await first.receive_batch(timeout_s=0.01) == []
            await send(server, "batches", b"x", b"y", b"z")
            interrupted = await first.receive_batch(2, timeout_s=WAIT_S)
            assert 1 <= len(interrupted) <= 2
            raise ZeroDivisionError
    async with subscriber(server, "batches") as second:
        assert sorted(await receive_batches(second, 3)) == [b"x", b"y", b"z"]


async def test_a_message_of_a_batch_that_is_retried_comes_again_alone(server: LocalServer) -> None:
    await send(server, "partly", b"a", b"b", b"c")
    async with subscriber(server, "partly") as consumer, asyncio.timeout(WAIT_S):
        seen: list[bytes] = []
        while len(seen) < 3:
            for message in await consumer.receive_batch():
                seen.append(message.body)
                if message.body == b"b":
                    await consumer.retry_later(message, delay_level=1)
        again = await consumer.receive_batch()
        assert [(message.body, message.reconsume_times) for message in again] == [(b"b", 1)]
    async with subscriber(server, "partly") as other:
        await send(server, "partly", b"d")
        assert await receive(other, 1) == [b"d"]


async def test_a_batch_of_an_orderly_consumer_has_one_message_of_each_queue(
    server: LocalServer,
) -> None:
    await send(server, "ordered", *numbered_bodies(8), sharding_key="same")
    consumer = Consumer(
        server.namesrv_address, group="g-ordered", subscribe={"ordered": "*"}, orderly=True
    )
    async with consumer, asyncio.timeout(WAIT_S):
        received = [[m.body for m in await consumer.receive_batch()] for _ in range(8)]
    assert received == [[body] for body in numbered_bodies(8)]


def test_the_blocking_consumer_receives_with_a_timeout_and_in_batches(server: LocalServer) -> None:
    asyncio.run(send(server, "threads", *numbered_bodies(6)))
    with BlockingConsumer(
        server.namesrv_address, group="g-threads", subscribe={"threads": "*"}
    ) as consumer:
        bodies = [message.body for message in consumer.receive_batch(4, timeout_s=WAIT_S)]
        while len(bodies) < 6:
            message = consumer.receive(timeout_s=WAIT_S)
            assert message is not None
            bodies.append(message.body)
        assert sorted(bodies) == numbered_bodies(6)
        assert consumer.receive(timeout_s=0.01) is None
        assert consumer.receive_batch(timeout_s=0.01) == []
    with pytest.raises(ClientClosed, match="create a new one"):
        consumer.receive_batch()


async def test_an_impossible_size_of_a_batch_is_refused(server: LocalServer) -> None:
    async with subscriber(server, "sizes") as consumer:
        with pytest.raises(ValueError, match="max_messages must be at least 1, not 0"):
            await consumer.receive_batch(0)


async def test_messages_are_acknowledged_one_by_one_and_in_any_order(server: LocalServer) -> None:
    await send(server, "singly", b"a", b"b", b"c")
    async with subscriber(server, "singly") as first, asyncio.timeout(WAIT_S):
        messages: list[ReceivedMessage] = []
        while len(messages) < 3:
            messages += await first.receive_batch(auto_acknowledge=False)
        assert await first.receive_batch(timeout_s=0.01) == []  # acknowledges none of them
        assert all(map(first.is_in_flight, messages))
        for message in messages:
            if message.body != b"b":
                first.acknowledge(message)
        assert [m.body for m in messages if first.is_in_flight(m)] == [b"b"]
        a = next(message for message in messages if message.body == b"a")
        first.acknowledge(a)  # once more, without an effect
    async with subscriber(server, "singly") as second:
        await send(server, "singly", b"d")
        received = await receive_batches(second, 2)
    assert b"b" in received
    assert set(received).issubset({b"b", b"c", b"d"})


async def test_a_message_comes_again_after_an_exact_delay(server: LocalServer) -> None:
    await send(server, "delayed", b"x")
    async with subscriber(server, "delayed") as consumer, asyncio.timeout(WAIT_S):
        first = await consumer.receive()
        for level, delay_s in ((1, 1.0), (0, -1.0), (-1, 0.5)):
            with pytest.raises(ValueError, match="give delay_level or a delay_s"):
                await consumer.retry_later(first, delay_level=level, delay_s=delay_s)
        await consumer.retry_later(first, delay_s=0.25, cause="a reason")
        second = await consumer.receive()
        await consumer.retry_later(second, delay_s=1.5)
        third = await consumer.receive()
    # A retry is stored in its topic when it is due.
    assert second.stored_ms - first.stored_ms >= 250
    assert third.stored_ms - second.stored_ms >= 1500
    assert (second.reconsume_times, third.reconsume_times) == (1, 2)
    assert second.failure is not None
    assert second.failure.cause == "a reason"
