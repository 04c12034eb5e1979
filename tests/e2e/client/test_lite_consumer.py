"""Lite and pull consumers, which the application drives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from escrowmq import LiteConsumer, PullConsumer, blocking
from escrowmq.errors import LocalProtocolError, NoRoute
from tests.support.brokers import LocalServer
from tests.support.clients import (
    CONF,
    WAIT_S,
    Broker,
    numbered_bodies,
    queues_of_topic,
    send,
    send_to,
)
from tests.support.waiting import wait_until_async

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Broker]:
    with LocalServer(CONF) as server:
        yield server


async def poll(lite: LiteConsumer, count: int) -> list[bytes]:
    received: list[bytes] = []
    async with asyncio.timeout(WAIT_S):
        while len(received) < count:
            received += [message.body for message in await lite.poll(1)]
    return received


async def test_polled_messages_are_committed_and_the_next_consumer_continues(
    server: Broker,
) -> None:
    await send(server, "polled", *numbered_bodies(10))
    subscribe = {"polled": "*"}
    async with LiteConsumer(server.namesrv_address, group="g-l", subscribe=subscribe) as lite:
        assert sorted(await poll(lite, 10)) == numbered_bodies(10)
        assert await lite.poll(0.05) == []
    await send(server, "polled", b"more")
    async with LiteConsumer(server.namesrv_address, group="g-l", subscribe=subscribe) as lite:
        assert await poll(lite, 1) == [b"more"]


async def test_without_auto_commit_only_commit_stores_offsets(server: Broker) -> None:
    await send(server, "manual", *numbered_bodies(6))

    def lite() -> LiteConsumer:
        return LiteConsumer(
            server.namesrv_address, group="g-m", subscribe={"manual": "*"}, auto_commit=False
        )

    async with lite() as first:
        assert sorted(await poll(first, 6)) == numbered_bodies(6)
    async with lite() as second:
        assert sorted(await poll(second, 6)) == numbered_bodies(6)
        await second.commit()
        offsets = [await second.committed(queue) for queue in second.assigned_queues]
        assert sum(offset or 0 for offset in offsets) == 6
    await send(server, "manual", b"more")
    async with lite() as third:
        assert await poll(third, 1) == [b"more"]


async def test_assigned_queues_can_be_read_from_any_offset_and_paused(server: Broker) -> None:
    await send(server, "seeked", b"first")
    await send_to(server, "seeked", 1, *numbered_bodies(3, "old"))
    await asyncio.sleep(0.05)  # only time separates the messages: stored times are compared in ms
    moment = datetime.now(tz=UTC)
    await send_to(server, "seeked", 1, *numbered_bodies(3, "new"))
    async with LiteConsumer(server.namesrv_address, group="g-s", auto_commit=False) as lite:
        queue, other = (await lite.queues("seeked"))[1:3]
        await lite.assign([queue])
        assert lite.assigned_queues == [queue]
        polled = await poll(lite, 6)
        expected = numbered_bodies(3, "old") + numbered_bodies(3, "new")
        assert [body for body in polled if body != b"first"] == expected
        await lite.seek_to_begin(queue)
        assert await poll(lite, len(polled)) == polled
        # Private: the state of a member has no public view.
        await lite.seek(queue, await lite._rebalancer.queue_client.latest_offset(queue) - 2)
        assert await poll(lite, 2) == expected[-2:]
        await lite.seek_to_time(queue, moment)
        assert (await poll(lite, 3))[-3:] == numbered_bodies(3, "new")
        await lite.seek_to_end(queue)
        lite.pause(queue)
        await send_to(server, "seeked", 1, b"last")
        assert await lite.poll(0.3) == []  # only time can show that nothing arrives
        lite.resume(queue)
        assert await poll(lite, 1) == [b"last"]
        await lite.assign([other])
        assert lite.assigned_queues == [other]
        with pytest.raises(LocalProtocolError, match="assigned"):
            lite.pause(queue)
        with pytest.raises(ValueError, match="negative"):
            await lite.seek(other, -1)


async def test_lite_consumers_divide_the_queues(server: Broker) -> None:
    await send(server, "halved", b"first")

    def lite() -> LiteConsumer:
        subscribe = {"halved": "*"}
        return LiteConsumer(server.namesrv_address, group="g-h", subscribe=subscribe)

    async with lite() as first, lite() as second:
        await wait_until_async(
            lambda: (
                len(queues_of_topic(first.assigned_queues, "halved")) == 2
                and len(queues_of_topic(second.assigned_queues, "halved")) == 2
            )
        )
        with pytest.raises(LocalProtocolError, match="subscribe="):
            await first.assign(second.assigned_queues)


async def test_queues_are_pulled_by_hand(server: Broker) -> None:
    await send(server, "pulled", b"first")
    await send_to(server, "pulled", 2, *numbered_bodies(40))
    async with PullConsumer(server.namesrv_address, group="g-d") as pull_consumer:
        queue = (await pull_consumer.queues("pulled"))[2]
        assert not await pull_consumer.committed(queue)
        begin = await pull_consumer.latest_offset(queue) - 40
        pulled = await pull_consumer.pull(queue, begin, max_messages=5)
        assert [message.body for message in pulled.messages] == numbered_bodies(5)
        assert pulled.next_offset == begin + 5
        await pull_consumer.commit(queue, pulled.next_offset)
        assert await pull_consumer.committed(queue) == begin + 5
        end = await pull_consumer.latest_offset(queue)
        assert (await pull_consumer.pull(queue, end)).messages == []
        waiting = asyncio.create_task(pull_consumer.pull(queue, end, wait_s=10))
        await send_to(server, "pulled", 2, b"late")
        assert [message.body for message in (await waiting).messages] == [b"late"]
        assert await pull_consumer.offset_at_time(queue, datetime.fromtimestamp(0, tz=UTC)) == 0
        assert len(await pull_consumer.assigned_queues("pulled")) == 4
        with pytest.raises(NoRoute):
            await pull_consumer.queues("nowhere")


def test_blocking_consumers_poll_pull_and_commit(server: Broker) -> None:
    address = server.namesrv_address
    asyncio.run(send(server, "plain", *numbered_bodies(4)))
    with blocking.LiteConsumer(address, group="g-p", subscribe={"plain": "*"}) as lite:
        received: list[bytes] = []
        while len(received) < 4:
            received += [message.body for message in lite.poll(10)]
        assert sorted(received) == numbered_bodies(4)
        lite.commit()
        queue = lite.assigned_queues[0]
        lite.seek_to_end(queue)
        lite.pause(queue)
        lite.resume(queue)
    with blocking.PullConsumer(address, group="g-p") as pull_consumer:
        queues = pull_consumer.queues("plain")
        assert sum(pull_consumer.committed(queue) or 0 for queue in queues) == 4
        bodies = [m.body for queue in queues for m in pull_consumer.pull(queue, 0).messages]
        assert sorted(bodies) == numbered_bodies(4)
