"""The consumer with a real broker: acknowledgement, rebalancing, retries, limits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from escrowmq import Consumer, ConsumerLimits, PullConsumer, ReceivedMessage
from escrowmq.client.consumer import rebalance as rebalance_module
from escrowmq.client.consumer.offset_store import ConsumeFrom
from escrowmq.client.consumer.rebalance import average_by_circle
from escrowmq.errors import InvalidSubscription, LocalProtocolError
from escrowmq.message.filter import FilterLike
from tests.support.brokers import LocalServer
from tests.support.clients import (
    CONF,
    WAIT_S,
    Broker,
    numbered_bodies,
    queues_of_topic,
    receive,
    send,
    send_to,
    wait_until_caught_up,
)
from tests.support.waiting import wait_until_async

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Broker]:
    with LocalServer(CONF) as server:
        yield server


def subscriber(server: Broker, group: str, **subscribe: FilterLike) -> Consumer:
    return Consumer(server.namesrv_address, group=group, subscribe=subscribe)


async def test_a_group_gets_every_message_once(server: Broker) -> None:
    bodies = numbered_bodies(20)
    await send(server, "bills", *bodies)
    async with subscriber(server, "billing", bills="*") as first:
        received = []
        async with asyncio.timeout(WAIT_S):
            async for message in first:
                received.append(message.body)
                if len(received) == 12:
                    break
    async with subscriber(server, "billing", bills="*") as second:
        received += await receive(second, 8)
    assert sorted(received) == bodies


async def test_a_message_in_flight_during_an_exception_comes_again(server: Broker) -> None:
    await send(server, "fragile", b"only")
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with subscriber(server, "g-fragile", fragile="*") as first:
            async for _ in first:
                raise ZeroDivisionError
    async with subscriber(server, "g-fragile", fragile="*") as second:
        assert await receive(second, 1) == [b"only"]


async def test_a_tag_filter_selects_messages(server: Broker) -> None:
    # "Aa" and "BB" have the same hash in Java. A broker compares hashes, the client compares tags.
    await send(server, "tagged", b"other tag", tags="c")
    await send(server, "tagged", b"same hash", tags="BB")
    await send(server, "tagged", b"match 1", tags="b")
    await send(server, "tagged", b"match 2", tags="Aa")
    member = Consumer(server.namesrv_address, group="g-tags")
    seen: list[bytes] = []

    @member.on("tagged", "Aa || b")
    async def handle(message: ReceivedMessage) -> None:
        seen.append(message.body)

    running = asyncio.create_task(member.run())
    await wait_until_caught_up(
        server, member, "tagged"
    )  # offsets of filtered messages are committed too
    await member.close()
    await running
    assert sorted(seen) == [b"match 1", b"match 2"]


async def test_a_message_sent_back_comes_again_with_its_original_topic(server: Broker) -> None:
    await send(server, "again", b"x", tags="a")
    async with subscriber(server, "g-again", again="a") as member, asyncio.timeout(WAIT_S):
        first = await member.receive()
        assert (first.topic, first.reconsume_times) == ("again", 0)
        await member.retry_later(first, delay_level=1)
        second = await member.receive()
        assert (second.body, second.topic, second.reconsume_times) == (b"x", "again", 1)
        await member.retry_later(second)
        third = await member.receive()
        assert (third.body, third.reconsume_times) == (b"x", 2)
        with pytest.raises(LocalProtocolError, match="not acknowledged"):
            await member.retry_later(first)


async def test_a_message_sent_back_too_often_moves_to_the_dead_letters(server: Broker) -> None:
    await send(server, "hopeless", b"x")
    member = Consumer(
        server.namesrv_address, group="g-dead", subscribe={"hopeless": "*"}, max_reconsume_times=1
    )
    async with member, asyncio.timeout(WAIT_S):
        await member.retry_later(await member.receive())
        again = await member.receive()
        assert again.reconsume_times == 1
        await member.retry_later(again)
        await send(server, "hopeless", b"y")
        assert (await member.receive()).body == b"y"
    async with PullConsumer(server.namesrv_address, group="operator") as pull_consumer:
        (queue,) = await pull_consumer.queues("%DLQ%g-dead")
        pulled = await pull_consumer.pull(queue, 0)
        assert [message.body for message in pulled.messages] == [b"x"]


async def test_two_members_divide_the_queues_and_the_last_one_gets_all(
    server: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They rebalance when the broker reports a change, not only at the next interval."""
    monkeypatch.setattr(rebalance_module, "REBALANCE_INTERVAL_S", 10 * WAIT_S)
    await send(server, "shared", b"first")
    async with subscriber(server, "g-shared", shared="*") as first:
        assert await receive(first, 1) == [b"first"]
        await wait_until_async(
            lambda: len(first.assigned_queues) == 5
        )  # four and that of the retry topic
        all_queues = set(first.assigned_queues)
        async with subscriber(server, "g-shared", shared="*") as second:
            await wait_until_async(
                lambda: not set(first.assigned_queues) & set(second.assigned_queues)
            )
            assert {*first.assigned_queues, *second.assigned_queues} == all_queues
            assert len(queues_of_topic(second.assigned_queues, "shared")) == 2
        await wait_until_async(lambda: set(first.assigned_queues) == all_queues)


async def test_three_members_get_each_message_once(server: Broker) -> None:
    await send(server, "trio", b"first")
    seen: list[bytes] = []
    trio = [Consumer(server.namesrv_address, group="g-trio", concurrency=3) for _ in range(3)]

    async def handle(message: ReceivedMessage) -> None:
        seen.append(message.body)

    running = []
    for member in trio:
        member.on("trio")(handle)
        running.append(asyncio.create_task(member.run()))

    def shares() -> list[int]:
        return sorted(len(queues_of_topic(member.assigned_queues, "trio")) for member in trio)

    await wait_until_async(lambda: shares() == [1, 1, 2] and seen == [b"first"])
    await send(server, "trio", *numbered_bodies(200))
    await wait_until_async(lambda: len(seen) >= 201)
    for member in trio:  # the other members take over its queues, without a second delivery
        await member.close()
    await asyncio.gather(*running)
    assert sorted(seen) == [*numbered_bodies(200), b"first"]


async def test_after_a_rebalance_only_unacknowledged_messages_come_again(server: Broker) -> None:
    bodies = numbered_bodies(40)
    await send(server, "moved", *bodies)
    seen: list[bytes] = []
    async with subscriber(server, "g-moved", moved="*") as first:
        seen += await receive(first, 20)
        in_flight_body = seen[-1]  # the next receive() would acknowledge it
        async with subscriber(server, "g-moved", moved="*") as second:
            await wait_until_async(
                lambda: not set(first.assigned_queues) & set(second.assigned_queues)
            )

            async def consume_all(member: Consumer) -> None:
                async for message in member:
                    seen.append(message.body)

            tasks = [asyncio.create_task(consume_all(member)) for member in (first, second)]
            await wait_until_async(lambda: set(seen) == set(bodies))
            await send(server, "moved", b"last")
            await wait_until_async(lambda: b"last" in seen)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    duplicates = {body for body in seen if seen.count(body) > 1}
    assert duplicates <= {in_flight_body}


async def test_a_running_consumer_discovers_a_new_topic(server: Broker) -> None:
    member = Consumer(
        server.namesrv_address, group="g-early", subscribe={"created-later": "*"}, start="latest"
    )
    async with member:
        await send(server, "created-later", b"first")
        assert await receive(member, 1) == [b"first"]


async def test_a_new_group_starts_at_the_given_position(server: Broker) -> None:
    if getattr(server, "version", "") == "4.9.7":
        pytest.skip("4.x starts a young queue at 0 in any case: docs/compatibility.md")
    await send(server, "since", *numbered_bodies(4, "old"))
    await asyncio.sleep(0.1)  # only time separates the messages: stored times are compared in ms
    moment = datetime.now(tz=UTC)
    await send(server, "since", b"new")

    async def received(group: str, start: ConsumeFrom, newest: bytes) -> list[bytes]:
        member = Consumer(server.namesrv_address, group=group, start=start)
        seen: list[bytes] = []

        @member.on("since")
        async def handle(message: ReceivedMessage) -> None:
            seen.append(message.body)

        running = asyncio.create_task(member.run())
        # Private: the state of a member has no public view.
        await wait_until_async(lambda: member._rebalancer.fetchers)
        await wait_until_async(
            lambda: all(
                fetcher.commit_offset is not None
                # Private: the state of a member has no public view.
                for fetcher in member._rebalancer.fetchers.values()
            )
        )
        await send(server, "since", newest)
        await wait_until_caught_up(server, member, "since")
        await member.close()
        await running
        return sorted(seen)

    assert await received("g-since-latest", "latest", b"x") == [b"x"]
    assert await received("g-since-time", moment, b"y") == [b"new", b"x", b"y"]
    assert len(await received("g-since-all", "earliest", b"z")) == 8


async def test_a_handler_that_never_returns_holds_up_no_other_queue(server: Broker) -> None:
    """The committed offset of its own queue stays before the message."""
    await send(server, "stuck", b"first")
    async with PullConsumer(server.namesrv_address, group="g-stuck") as pull_consumer:
        queues = await pull_consumer.queues("stuck")
        for queue in queues:
            await pull_consumer.commit(queue, await pull_consumer.latest_offset(queue))
        await send_to(server, "stuck", 0, b"blocks", *numbered_bodies(5, "a"))
        await send_to(server, "stuck", 1, *numbered_bodies(5, "b"))
        member = Consumer(
            server.namesrv_address, group="g-stuck", concurrency=2, shutdown_timeout_s=0.1
        )
        seen: list[bytes] = []
        never = asyncio.Event()

        @member.on("stuck")
        async def handle(message: ReceivedMessage) -> None:
            seen.append(message.body)
            if message.body == b"blocks":
                await never.wait()

        running = asyncio.create_task(member.run())
        await wait_until_async(lambda: len(seen) == 11)
        member.stop()
        await running
        committed = await pull_consumer.committed(queues[0])
        assert committed is not None
        # The message that blocks and the five after it are not committed.
        assert await pull_consumer.latest_offset(queues[0]) - committed == 6
        assert await pull_consumer.committed(queues[1]) == await pull_consumer.latest_offset(
            queues[1]
        )


async def test_no_more_messages_are_pulled_than_the_limits_allow(server: Broker) -> None:
    bodies = numbered_bodies(200)
    await send(server, "crowd", *bodies)
    member = Consumer(
        server.namesrv_address,
        group="g-crowd",
        subscribe={"crowd": "*"},
        limits=ConsumerLimits(per_queue=10, total=20),
    )
    async with member:
        # Private: the state of a member has no public view.
        limiter = member._rebalancer.limiter
        await wait_until_async(lambda: limiter.message_count >= 20)
        # Only time can show that no pull goes beyond the limit.
        await asyncio.sleep(0.3)
        limit = 4 * 32  # one response for each queue may have been in flight
        assert limiter.message_count <= limit
        received = await receive(member, 200)
        assert sorted(received) == bodies
        assert limiter.message_count <= limit


async def test_queues_can_be_assigned_in_turn(server: Broker) -> None:
    await send(server, "cards", b"first")

    def new_member() -> Consumer:
        return Consumer(
            server.namesrv_address,
            group="g-cards",
            subscribe={"cards": "*"},
            assignment=average_by_circle,
        )

    async with new_member() as first, new_member() as second:
        await wait_until_async(
            lambda: (
                len(queues_of_topic(first.assigned_queues, "cards"))
                == len(queues_of_topic(second.assigned_queues, "cards"))
                == 2
            )
        )
        ids = sorted(
            [queue.queue_id for queue in member.assigned_queues if queue.topic == "cards"]
            for member in (first, second)
        )
        assert ids == [[0, 2], [1, 3]]


async def test_a_consumer_sees_only_its_namespace(server: Broker) -> None:
    await send(server, "spaced", b"outside")
    await send(server, "ns%spaced", b"inside")
    member = Consumer(
        server.namesrv_address, group="g-ns", subscribe={"spaced": "*"}, namespace="ns"
    )
    async with member, asyncio.timeout(WAIT_S):
        message = await member.receive()
        assert (message.topic, message.body) == ("spaced", b"inside")
        await member.retry_later(message, delay_level=1)
        message = await member.receive()
        assert (message.topic, message.body, message.reconsume_times) == ("spaced", b"inside", 1)
        assert "%RETRY%ns%g-ns" in {queue.topic for queue in member.assigned_queues}


@pytest.mark.parametrize(
    "options",
    [
        {"start": "yesterday"},
        {"orderly": True, "broadcast": True},
        {"concurrency": 0},
        {"offsets_file": "x"},
    ],
)
async def test_invalid_arguments_are_refused(server: Broker, options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Consumer(server.namesrv_address, group="g", **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidSubscription):
        Consumer(server.namesrv_address, group="g", subscribe={"t": 3})  # type: ignore[dict-item]
