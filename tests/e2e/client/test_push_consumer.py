"""Message handlers: concurrency, redelivery after a failure, and a stop that waits for them."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from escrowmq import Consumer, Message, PullConsumer, ReceivedMessage, blocking
from escrowmq.client.consumer import consumer as consumer_module
from escrowmq.errors import InvalidSubscription, LocalProtocolError
from tests.support.brokers import LocalServer
from tests.support.clients import CONF, WAIT_S, Broker, numbered_bodies, send
from tests.support.waiting import wait_until_async

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Broker]:
    with LocalServer(CONF) as server:
        yield server


async def unacknowledged_count(server: Broker, group: str, topic: str) -> int:
    """Return how many messages of a topic the group has not acknowledged."""
    async with PullConsumer(server.namesrv_address, group=group) as pull_consumer:
        return sum(
            [
                await pull_consumer.latest_offset(queue)
                - (await pull_consumer.committed(queue) or 0)
                for queue in await pull_consumer.queues(topic)
            ]
        )


async def test_functions_and_coroutines_get_the_messages_they_registered_for(
    server: Broker,
) -> None:
    await send(server, "pushed", b"a", tags="a")
    await send(server, "pushed", b"b", tags="b")
    await send(server, "pushed", b"c", tags="c")
    await send(server, "aside", b"d")
    consumer = Consumer(server.namesrv_address, group="g-pushed")
    seen: list[tuple[str, bytes]] = []

    @consumer.on("pushed", "a")
    async def on_loop(message: ReceivedMessage) -> None:
        seen.append(("loop", message.body))

    @consumer.on("pushed", "b || x")
    def in_thread(message: ReceivedMessage) -> None:
        assert threading.current_thread() is not threading.main_thread()
        seen.append(("thread", message.body))

    @consumer.on("aside")
    async def aside(message: ReceivedMessage) -> None:
        seen.append(("aside", message.body))

    running = asyncio.create_task(consumer.run())
    await wait_until_async(lambda: len(seen) == 3)
    await consumer.close()
    await running
    assert sorted(seen) == [("aside", b"d"), ("loop", b"a"), ("thread", b"b")]
    assert await unacknowledged_count(server, "g-pushed", "pushed") == 0


async def test_a_handler_registered_later_widens_the_filter(server: Broker) -> None:
    await send(server, "grown", b"first", tags="a")
    consumer = Consumer(server.namesrv_address, group="g-grown")
    seen: list[bytes] = []

    async def handle(message: ReceivedMessage) -> None:
        seen.append(message.body)

    consumer.on("grown", "a")(handle)
    running = asyncio.create_task(consumer.run())
    await wait_until_async(lambda: seen == [b"first"])
    await wait_until_async(
        lambda: len(consumer.assigned_queues) == 5
    )  # four and that of the retry topic
    consumer.on("grown", "b")(handle)
    consumer.on("sprung")(handle)
    await send(server, "grown", b"second", tags="b")
    await send(server, "sprung", b"third")
    await wait_until_async(lambda: sorted(seen) == [b"first", b"second", b"third"])
    consumer.stop()
    await running


async def test_no_more_handlers_run_than_concurrency_allows(server: Broker) -> None:
    await send(server, "wide", *numbered_bodies(20))
    consumer = Consumer(server.namesrv_address, group="g-wide", concurrency=4)
    running_count, most, done = 0, 0, 0

    @consumer.on("wide")
    async def handle(message: ReceivedMessage) -> None:
        nonlocal running_count, most, done
        running_count += 1
        most = max(most, running_count)
        await asyncio.sleep(0.02)  # lets other handlers start meanwhile
        running_count -= 1
        done += 1

    running = asyncio.create_task(consumer.run())
    await wait_until_async(lambda: done == 20)
    consumer.stop()
    await running
    assert most == 4


async def test_a_message_comes_again_after_an_exception(server: Broker) -> None:
    await send(server, "flaky", b"x")
    consumer = Consumer(server.namesrv_address, group="g-flaky")
    times: list[int] = []

    @consumer.on("flaky")
    async def handle(message: ReceivedMessage) -> None:
        times.append(message.reconsume_times)
        if len(times) < 3:
            raise OSError("planted")
        consumer.stop()

    async with asyncio.timeout(WAIT_S):
        await consumer.run()
    assert times == [0, 1, 2]


async def test_stop_finishes_running_handlers_and_leaves_the_other_messages(server: Broker) -> None:
    await send(server, "halted", *numbered_bodies(12))
    consumer = Consumer(server.namesrv_address, group="g-halted", concurrency=3)
    started: list[bytes] = []
    ended: list[bytes] = []
    may_end = asyncio.Event()

    @consumer.on("halted")
    async def handle(message: ReceivedMessage) -> None:
        started.append(message.body)
        await may_end.wait()
        ended.append(message.body)

    running = asyncio.create_task(consumer.run())
    await wait_until_async(lambda: len(started) == 3)
    closing = asyncio.create_task(consumer.close())
    await asyncio.sleep(0.1)  # only time can show that close() waits for the handlers
    assert not closing.done()
    may_end.set()
    await closing
    await running
    assert sorted(started) == sorted(ended)
    assert len(ended) == 3
    second = Consumer(server.namesrv_address, group="g-halted", subscribe={"halted": "*"})
    async with second, asyncio.timeout(WAIT_S):
        remaining = {(await second.receive()).body for _ in range(9)}
    assert remaining | set(ended) == set(numbered_bodies(12))


ASYNCIO_PROGRAM = """
import asyncio, sys
from escrowmq import Consumer

async def main():
    consumer = Consumer(sys.argv[1], group="g-signal")

    @consumer.on("signalled")
    async def handle(message):
        print("started", flush=True)
        await asyncio.sleep(1)
        print("ended", flush=True)

    await consumer.run()
    print("left", flush=True)

asyncio.run(main())
"""
BLOCKING_PROGRAM = """
import sys, threading
from escrowmq.blocking import Consumer

consumer = Consumer(sys.argv[1], group="g-signal")

@consumer.on("signalled")
def handle(message):
    print("started", flush=True)
    threading.Event().wait(1)
    print("ended", flush=True)

consumer.run()
print("left", flush=True)
"""


async def start_program(
    program: str, server: Broker, directory: Path
) -> asyncio.subprocess.Process:
    path = directory / "program.py"
    path.write_text(program)
    return await asyncio.create_subprocess_exec(
        *(sys.executable, str(path), server.namesrv_address), stdout=asyncio.subprocess.PIPE
    )


@pytest.mark.parametrize(
    "program", [ASYNCIO_PROGRAM, BLOCKING_PROGRAM], ids=["asyncio", "blocking"]
)
async def test_a_signal_ends_the_process_after_the_running_handler(
    server: Broker, program: str, tmp_path: Path
) -> None:
    await send(server, "signalled", b"x")
    process = await start_program(program, server, tmp_path)
    assert process.stdout is not None
    async with asyncio.timeout(WAIT_S):
        assert await process.stdout.readline() == b"started\n"
        process.send_signal(signal.SIGTERM)
        assert await process.stdout.read() == b"ended\nleft\n"
        assert await process.wait() == 0
    assert await unacknowledged_count(server, "g-signal", "signalled") == 0


async def test_messages_of_a_killed_member_go_to_the_others(server: Broker, tmp_path: Path) -> None:
    await send(server, "orphaned", b"x")
    program = ASYNCIO_PROGRAM.replace("signalled", "orphaned").replace("g-signal", "g-orphaned")
    program = program.replace("sleep(1)", "sleep(1000)")
    process = await start_program(program, server, tmp_path)
    assert process.stdout is not None
    async with asyncio.timeout(WAIT_S):
        assert await process.stdout.readline() == b"started\n"
        member = Consumer(server.namesrv_address, group="g-orphaned", subscribe={"orphaned": "*"})
        async with member:
            process.kill()
            await process.wait()
            assert (await member.receive()).body == b"x"


async def test_a_message_that_the_broker_has_lost_is_sent_back_as_a_copy(server: Broker) -> None:
    await send(server, "copied", b"x")
    member = Consumer(server.namesrv_address, group="g-copied", subscribe={"copied": "*"})
    async with member, asyncio.timeout(WAIT_S):
        message = await member.receive()
        # The private queue client, because only a wrong log offset makes the broker refuse.
        await member._rebalancer.queue_client.send_back(
            replace(message, log_offset=1 << 40),
            next(queue for queue in member.assigned_queues if queue.topic == "copied"),
            delay_level=1,
        )
        again = await member.receive()
        assert (again.topic, again.body, again.reconsume_times) == ("copied", b"x", 1)


async def test_a_message_that_fails_while_its_broker_is_down_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It cannot be sent back, so the same consumer handles it again, and then later messages."""
    monkeypatch.setattr(consumer_module, "REDELIVERY_DELAY_S", 0.1)
    with LocalServer(CONF, in_process=False) as server:
        await send(server, "outlived", b"x")
        consumer = Consumer(server.namesrv_address, group="g-outlived")
        seen: list[tuple[bytes, int]] = []

        @consumer.on("outlived")
        async def handle(message: ReceivedMessage) -> None:
            seen.append((message.body, message.reconsume_times))
            if len(seen) == 1:
                await asyncio.to_thread(server.kill)
                raise OSError

        running = asyncio.create_task(consumer.run())
        await wait_until_async(lambda: len(seen) == 2)
        await asyncio.to_thread(server.start)
        await send(server, "outlived", b"y")
        await wait_until_async(lambda: len(seen) == 3)
        await consumer.close()
        await running
        assert seen == [(b"x", 0), (b"x", 1), (b"y", 0)]
        assert await unacknowledged_count(server, "g-outlived", "outlived") == 0


async def test_invalid_handlers_are_refused(server: Broker) -> None:
    consumer = Consumer(server.namesrv_address, group="g")
    with pytest.raises(LocalProtocolError, match="on\\(\\)"):
        await consumer.run()
    with pytest.raises(TypeError):
        consumer.on("t")(3)  # type: ignore[type-var]
    with pytest.raises(InvalidSubscription):
        consumer.on("t", "||")
    await consumer.close()


def test_a_blocking_consumer_runs_handlers_in_threads(server: Broker) -> None:
    with blocking.Producer(server.namesrv_address, group="p") as producer:
        for body in numbered_bodies(3):
            producer.send(Message("blocked", body))
    consumer = blocking.Consumer(server.namesrv_address, group="g-blocked", concurrency=2)
    seen: list[bytes] = []

    @consumer.on("blocked")
    def handle(message: ReceivedMessage) -> None:
        seen.append(message.body)
        if len(seen) == 3:
            consumer.stop()

    consumer.run()
    assert sorted(seen) == numbered_bodies(3)
