"""Orderly consumers: one message of a queue at a time, one member for each queue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from escrowmq import Consumer, PullConsumer, ReceivedMessage
from escrowmq.client.consumer import rebalance as rebalance_module
from escrowmq.client.heartbeat import ConsumerHeartbeat
from escrowmq.clock import SystemClock
from tests.support.brokers import LocalServer
from tests.support.clients import CONF, WAIT_S, Broker, numbered_bodies, queues_of_topic, send
from tests.support.waiting import wait_until_async

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Broker]:
    with LocalServer(CONF) as server:
        yield server


def orderly(server: Broker, group: str, **options: object) -> Consumer:
    return Consumer(server.namesrv_address, group=group, orderly=True, suspend_s=0.1, **options)  # type: ignore[arg-type]


async def test_a_queue_stays_in_order_although_a_message_fails(server: Broker) -> None:
    for key in "xyz":
        await send(server, "steps", *numbered_bodies(8, key), sharding_key=key)
    consumer = orderly(server, "g-steps")
    seen: list[bytes] = []
    failed: list[int] = []
    busy: set[int] = set()

    @consumer.on("steps")
    async def handle(message: ReceivedMessage) -> None:
        assert message.queue_id not in busy
        busy.add(message.queue_id)
        await asyncio.sleep(0.01)  # lets another handler run, if one were started too early
        busy.remove(message.queue_id)
        if message.body == b"y003" and len(failed) < 2:
            failed.append(message.reconsume_times)
            raise OSError("not yet")
        seen.append(message.body)

    running = asyncio.create_task(consumer.run())
    await wait_until_async(lambda: len(seen) == 24)
    consumer.stop()
    await running
    assert failed == [0, 1]
    for key in "xyz":
        bodies = [body for body in seen if body.startswith(key.encode())]
        assert bodies == sorted(bodies)
        assert len(bodies) == 8


async def test_a_message_that_fails_too_often_moves_to_the_dead_letters(server: Broker) -> None:
    await send(server, "barred", *numbered_bodies(3), sharding_key="k")
    consumer = orderly(server, "g-barred", max_reconsume_times=2)
    seen: list[tuple[bytes, int]] = []

    @consumer.on("barred")
    async def handle(message: ReceivedMessage) -> None:
        seen.append((message.body, message.reconsume_times))
        if message.body == b"001":
            raise OSError("planted")

    running = asyncio.create_task(consumer.run())
    await wait_until_async(lambda: (b"002", 0) in seen)
    await consumer.close()
    await running
    assert seen == [(b"000", 0), (b"001", 0), (b"001", 1), (b"001", 2), (b"002", 0)]
    async with PullConsumer(server.namesrv_address, group="operator") as pull_consumer:
        (queue,) = await pull_consumer.queues("%DLQ%g-barred")
        # It is stored in the log by now. Apache RocketMQ adds it to its queue a little later.
        pulled = await pull_consumer.pull(queue, 0, wait_s=WAIT_S)
        assert [message.body for message in pulled.messages] == [b"001"]


async def test_a_second_member_continues_where_the_first_one_stopped(server: Broker) -> None:
    await send(server, "handed", *numbered_bodies(6), sharding_key="k")
    subscribe = {"handed": "*"}
    async with orderly(server, "g-handed", subscribe=subscribe) as first:
        async with asyncio.timeout(WAIT_S):
            seen = [(await first.receive()).body for _ in range(3)]
        second = orderly(server, "g-handed", subscribe=subscribe)
        async with second:
            # A delivered message keeps its queue locked until it is done.
            await wait_until_async(lambda: len(first.assigned_queues) < 5)
            receiving = asyncio.create_task(first.receive())
            await wait_until_async(
                lambda: (
                    len(queues_of_topic(first.assigned_queues, "handed")) == 2
                    and len(queues_of_topic(second.assigned_queues, "handed")) == 2
                )
            )
            # Either member may own the queue of the remaining messages now.
            other_receiving = asyncio.create_task(second.receive())
            tasks = [receiving, other_receiving]
            await asyncio.wait(tasks, return_when="FIRST_COMPLETED", timeout=WAIT_S)
            owner = first if receiving.done() else second
            seen.append((receiving if receiving.done() else other_receiving).result().body)
            async with asyncio.timeout(WAIT_S):
                seen += [(await owner.receive()).body for _ in range(2)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await wait_until_async(lambda: len(queues_of_topic(first.assigned_queues, "handed")) == 4)
    assert seen == numbered_bodies(6)


async def test_a_queue_locked_by_another_member_is_released(
    server: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens after a long pause of the process, when its locks have expired."""
    monkeypatch.setattr(rebalance_module, "LOCK_INTERVAL_S", 0.2)
    await send(server, "stolen", b"x")
    async with orderly(server, "g-stolen", subscribe={"stolen": "*"}) as member:
        await wait_until_async(lambda: len(queues_of_topic(member.assigned_queues, "stolen")) == 4)
        queue = next(queue for queue in member.assigned_queues if queue.topic == "stolen")
        # Private: the state of a member has no public view.
        heartbeat = member._rebalancer.heartbeat
        other = ConsumerHeartbeat(
            server.namesrv_address,
            lambda connection, request: None,
            group="g-stolen",
            client_id="other",
            # Private: the state of a member has no public view.
            entry=member._rebalancer.consumer_entry,
            clock=SystemClock(),
        )
        async with asyncio.timeout(WAIT_S):
            await heartbeat.unlock([queue])
            while not (await other.lock([queue]))[queue]:  # the lock was extended in between
                await heartbeat.unlock([queue])
        await wait_until_async(lambda: queue not in member.assigned_queues)
        assert (await heartbeat.lock([queue])) == {queue: False}
        await other.unlock([queue])
        await other.leave()
        await wait_until_async(lambda: queue in member.assigned_queues)


async def test_a_message_that_fails_while_its_queue_is_released_goes_to_the_next_owner(
    server: Broker,
) -> None:
    await send(server, "refused", *numbered_bodies(3), sharding_key="k")
    first = orderly(server, "g-refused")
    handler_started = asyncio.Event()
    may_fail = asyncio.Event()

    @first.on("refused")
    async def handle(message: ReceivedMessage) -> None:
        handler_started.set()
        await may_fail.wait()
        raise OSError("planted")

    running = asyncio.create_task(first.run())
    async with asyncio.timeout(WAIT_S):
        await handler_started.wait()
        first.stop()
        may_fail.set()
        await running
        async with orderly(server, "g-refused", subscribe={"refused": "*"}) as second:
            assert [(await second.receive()).body for _ in range(3)] == numbered_bodies(3)
