"""Handlers in a running App: payloads, retries, dead letters, order, batches, results."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import defaultdict
from dataclasses import dataclass

import pydantic
import pytest

from escrowmq import Message, Producer, ReceivedMessage
from escrowmq.app import App, InvalidHandler, InvalidPayload, Retry
from tests.support.apps import (
    outcomes,
    running,
    topic_messages,
    unacknowledged_count,
    wait_dead_letters,
    wait_messages,
)
from tests.support.brokers import Server
from tests.support.clients import numbered_bodies, send
from tests.support.ports import free_ports
from tests.support.sql_bank import new_topic
from tests.support.waiting import wait_until_async

pytestmark = pytest.mark.slow

AT_ONCE = Retry(times=2, first_s=0, factor=1)


@dataclass
class Transfer:
    cents: int


class Order(pydantic.BaseModel):
    item: str


# --- payloads ------------------------------------------------------------------------------------


async def test_each_handler_gets_the_payload_that_its_annotation_says(server: Server) -> None:
    names = [new_topic("payload") for _ in range(3)]
    seen: list[object] = []
    app = App(server.namesrv_address, group=new_topic("g"))

    @app.on(names[0])
    async def on_loop(transfer: Transfer) -> None:
        assert threading.current_thread() is threading.main_thread()
        seen.append(transfer)

    @app.on(names[1])
    def in_thread(order: Order) -> None:
        assert threading.current_thread() is not threading.main_thread()
        seen.append(order)

    @app.on(names[2], "b || c")
    def with_message(text: str, message: ReceivedMessage) -> None:
        seen.append((text, message.tags))

    @app.on(names[2], "a")
    def raw(body: bytes) -> None:
        seen.append(body)

    await send(server, names[0], b'{"cents":1}')
    await send(server, names[1], b'{"item":"lamp"}')
    await send(server, names[2], b"x", tags="a")
    await send(server, names[2], b"y", tags="b")
    async with running(app):
        await wait_until_async(lambda: len(seen) == 4)
    for expected in (Transfer(1), Order(item="lamp"), ("y", "b"), b"x"):
        assert expected in seen


async def test_a_bad_payload_is_a_dead_letter_with_its_reason_and_not_retried(
    server: Server,
) -> None:
    topic, seen = new_topic("bad"), []
    app = App(server.namesrv_address, group=f"g-{topic}")

    @app.on(topic)
    async def handle(transfer: Transfer) -> None:
        seen.append(transfer)

    await send(server, topic, b'{"cents":"many"}', b'{"cents":1}')
    async with running(app):
        await wait_until_async(lambda: seen == [Transfer(1)])
        dead = await wait_dead_letters(server, f"g-{topic}")
    [message] = dead
    assert message.body == b'{"cents":"many"}'
    assert message.failure is not None
    assert message.failure.error_type == "escrowmq.errors.InvalidPayload"
    assert message.failure.error_text.startswith("no Transfer: Expected `int`, got `str`")
    assert message.failure.attempts == 1
    assert seen == [Transfer(1)]


async def test_a_handler_can_refuse_a_message_for_ever(server: Server) -> None:
    topic, calls = new_topic("refused"), []
    app = App(server.namesrv_address, group=f"g-{topic}")

    @app.on(topic, retry=AT_ONCE)
    async def handle(transfer: Transfer) -> None:
        calls.append(transfer)
        raise InvalidPayload("no such account")

    await send(server, topic, b'{"cents":1}')
    async with running(app):
        dead = await wait_dead_letters(server, f"g-{topic}")
    assert dead[0].failure is not None
    assert dead[0].failure.error_text == "no such account"
    assert calls == [Transfer(1)]


async def test_a_message_without_a_handler_is_a_dead_letter(server: Server) -> None:
    """As after a deployment that removed a handler while a retry of its topic was waiting."""
    topic, group = new_topic("removed"), new_topic("g-removed")
    before = App(server.namesrv_address, group=group)

    @before.on(topic, retry=Retry(times=100, first_s=0.5, factor=1))
    async def fail(body: bytes) -> None:
        raise ZeroDivisionError

    await send(server, topic, b"x")
    async with running(before):
        await wait_until_async(lambda: outcomes(before)["retried"])
    after = App(server.namesrv_address, group=group)

    @after.on(f"{topic}-other")
    async def other(body: bytes) -> None: ...

    async with running(after):
        dead = await wait_dead_letters(server, group)
    assert dead[0].failure is not None
    assert dead[0].failure.error_text == f"no handler for topic {topic!r} and tag ''"


# --- retries -------------------------------------------------------------------------------------


async def test_a_failed_message_comes_again_after_its_delays_and_is_a_dead_letter_in_the_end(
    server: Server,
) -> None:
    topic, times = new_topic("retried"), []
    app = App(server.namesrv_address, group=f"g-{topic}")

    @app.on(topic, retry=Retry(times=2, first_s=0.2, factor=3))
    async def handle(message: ReceivedMessage) -> None:
        times.append((message.reconsume_times, message.stored_ms))
        raise ZeroDivisionError(f"attempt {message.reconsume_times}")

    await send(server, topic, b"x")
    async with running(app):
        dead = await wait_dead_letters(server, f"g-{topic}")
    assert [count for count, _ in times] == [0, 1, 2]
    # A retry is stored in its topic when it is due, so the delays are at least these.
    assert times[1][1] - times[0][1] >= 200
    assert times[2][1] - times[1][1] >= 600
    assert dead[0].failure is not None
    assert (dead[0].failure.cause, dead[0].failure.attempts) == ("ZeroDivisionError: attempt 2", 3)


async def test_what_would_end_the_event_loop_fails_only_its_message(server: Server) -> None:
    topic, seen = new_topic("exit"), []
    app = App(server.namesrv_address, group=f"g-{topic}")

    @app.on(topic, retry=Retry(times=0))
    async def handle(body: bytes) -> None:
        if body == b"exit":
            raise SystemExit(3)
        seen.append(body)

    await send(server, topic, b"exit", b"next")
    async with running(app):
        await wait_until_async(lambda: seen == [b"next"])
        dead = await wait_dead_letters(server, f"g-{topic}")
    assert dead[0].failure is not None
    assert dead[0].failure.error_type == "SystemExit"


# --- order and concurrency -----------------------------------------------------------------------


async def test_messages_of_a_key_keep_their_order_though_one_fails(server: Server) -> None:
    topic = new_topic("ordered")
    by_key: dict[str, list[bytes]] = defaultdict(list)
    running_keys: set[str] = set()
    most_at_once, failures = 0, 0
    app = App(server.namesrv_address, group=f"g-{topic}")

    @app.on(topic, ordered=True, concurrency=4, retry=Retry(times=3, first_s=0.05, factor=1))
    async def handle(body: bytes, message: ReceivedMessage) -> None:
        nonlocal most_at_once, failures
        key = message.properties["__SHARDINGKEY"]
        assert key not in running_keys
        running_keys.add(key)
        most_at_once = max(most_at_once, len(running_keys))
        await asyncio.sleep(0.005)  # other keys run meanwhile
        running_keys.discard(key)
        if body.endswith(b"3") and failures < 6:
            failures += 1
            raise ZeroDivisionError
        by_key[key].append(body)

    keys, bodies = ["a", "b", "c", "d"], numbered_bodies(10)
    async with Producer(server.namesrv_address, group="p") as producer:
        for body in bodies:
            for key in keys:
                await producer.send(Message(topic, body, sharding_key=key))
    async with running(app):
        await wait_until_async(lambda: sum(map(len, by_key.values())) == 40)
    assert by_key == dict.fromkeys(keys, bodies)
    assert failures == 6
    assert most_at_once > 1


async def test_an_ordered_message_that_never_succeeds_makes_room_as_a_dead_letter(
    server: Server,
) -> None:
    topic, seen = new_topic("poison"), []
    app = App(server.namesrv_address, group=f"g-{topic}")

    @app.on(topic, ordered=True, retry=AT_ONCE)
    async def handle(body: bytes) -> None:
        seen.append(body)
        if body == b"1":
            raise ZeroDivisionError

    await send(server, topic, b"1", b"2", sharding_key="k")
    async with running(app):
        await wait_until_async(lambda: seen == [b"1", b"1", b"1", b"2"])
    [dead] = await wait_dead_letters(server, f"g-{topic}")
    assert dead.failure is not None
    assert (dead.body, dead.failure.attempts) == (b"1", 3)


async def test_a_slow_handler_delays_no_other(server: Server) -> None:
    slow, fast = new_topic("slow"), new_topic("fast")
    release, started, done = asyncio.Event(), 0, []
    app = App(server.namesrv_address, group=f"g-{slow}")

    @app.on(slow, concurrency=2)
    async def wait(body: bytes) -> None:
        nonlocal started
        started += 1
        await release.wait()

    @app.on(fast, concurrency=1)
    async def handle(body: bytes) -> None:
        done.append(body)

    await send(server, slow, *numbered_bodies(20))
    await send(server, fast, *numbered_bodies(20))
    async with running(app):
        await wait_until_async(lambda: len(done) == 20)
        assert started == 2
        release.set()
        await wait_until_async(lambda: started == 20)


# --- batches -------------------------------------------------------------------------------------


async def test_messages_that_wait_come_as_a_batch(server: Server) -> None:
    topic, batches = new_topic("batch"), []
    release = asyncio.Event()
    app = App(server.namesrv_address, group=f"g-{topic}")

    @app.on(topic, batch_size=8, concurrency=1)
    async def handle(texts: list[str], messages: list[ReceivedMessage]) -> None:
        assert texts == [message.body.decode() for message in messages]
        batches.append(texts)
        await release.wait()

    await send(server, topic, *numbered_bodies(40))
    async with running(app):
        await wait_until_async(lambda: batches)
        release.set()
        await wait_until_async(lambda: sum(map(len, batches)) == 40)
    assert max(map(len, batches)) == 8
    assert await unacknowledged_count(server, f"g-{topic}", topic) == 0


async def test_of_a_failed_batch_only_the_message_that_fails_comes_again(server: Server) -> None:
    topic, handled = new_topic("halfbad"), []
    app = App(server.namesrv_address, group=f"g-{topic}")

    @app.on(topic, concurrency=1, retry=AT_ONCE)
    def handle(texts: list[str]) -> None:
        if "003" in texts:
            raise ZeroDivisionError
        handled.extend(texts)

    await send(server, topic, *numbered_bodies(10), b"\xff")
    async with running(app):
        dead = await wait_dead_letters(server, f"g-{topic}", 2)
        await wait_until_async(lambda: len(handled) == 9)
    assert sorted(handled) == [f"00{number}" for number in range(10) if number != 3]
    attempts = {
        message.body: message.failure.attempts for message in dead if message.failure is not None
    }
    assert attempts == {b"003": 3, b"\xff": 1}


# --- results -------------------------------------------------------------------------------------


async def test_results_without_a_database_are_sent_before_the_message_is_acknowledged(
    server: Server,
) -> None:
    topic, out = new_topic("question"), new_topic("answer")
    app = App(server.namesrv_address, group=f"g-{topic}")

    @app.on(topic, send_to=out)
    async def double(transfer: Transfer) -> Transfer | None:
        return Transfer(transfer.cents * 2) if transfer.cents else None

    @app.on(f"{topic}-raw")
    def forward(body: bytes) -> list[Message]:
        return [Message(out, body, keys="k"), Message(out, body + b"!")]

    await send(server, topic, b'{"cents":0}', b'{"cents":2}')
    await send(server, f"{topic}-raw", b"x")
    async with running(app):
        results = await wait_messages(server, out, 3)
    assert sorted(message.body for message in results) == [b"x", b"x!", b'{"cents":4}']


# --- operators -----------------------------------------------------------------------------------


async def test_an_operator_can_have_one_message_handled_and_sees_what_it_raises(
    server: Server,
) -> None:
    topic, seen = new_topic("directly"), list[Transfer]()
    group = f"g-{topic}"
    app = App(server.namesrv_address, group=group)

    @app.on(topic)
    async def handle(transfer: Transfer) -> None:
        seen.append(transfer)
        if len(seen) == 3:
            raise ZeroDivisionError("this time")

    await send(server, topic, b'{"cents":1}')
    async with running(app):
        await wait_until_async(lambda: len(seen) == 1)
        [message] = await topic_messages(server, topic)

        def consume_directly() -> dict[str, str]:
            """Do what `mqadmin queryMsgById -g GROUP -d CLIENT` does."""
            with server.client() as client:
                members = json.loads(client.expect(38, {"consumerGroup": group}).body)
                fields = {
                    "consumerGroup": group,
                    "clientId": members["consumerIdList"][0],
                    "msgId": message.offset_id,
                }
                result: dict[str, str] = json.loads(client.expect(309, fields).body)
            return result

        first, second = [await asyncio.to_thread(consume_directly) for _ in range(2)]
    assert first["consumeResult"] == "CR_SUCCESS"
    assert second["consumeResult"] == "CR_THROW_EXCEPTION"
    assert "this time" in second["remark"]
    assert seen == [Transfer(1)] * 3


# --- start and stop ------------------------------------------------------------------------------


async def test_a_stop_waits_for_running_handlers_and_starts_no_other(server: Server) -> None:
    topic, finished = new_topic("stopping"), []
    release = asyncio.Event()
    app = App(server.namesrv_address, group=f"g-{topic}")
    started: list[bytes] = []

    @app.on(topic, concurrency=2)
    async def handle(body: bytes) -> None:
        started.append(body)
        await release.wait()
        finished.append(body)

    await send(server, topic, *numbered_bodies(5))
    async with running(app):
        await wait_until_async(lambda: len(started) == 2)
        app.stop()
        await wait_until_async(lambda: app.not_ready_reason == "the worker is stopping")
        release.set()
    assert len(started) == len(finished) == 2
    assert await unacknowledged_count(server, f"g-{topic}", topic) >= 3
    release.set()
    async with running(app):  # an App can run again
        await wait_until_async(lambda: len(finished) == 5)
    assert sorted(finished) == numbered_bodies(5)  # none of them twice


async def test_handlers_that_take_too_long_are_cut_off_and_their_messages_come_again(
    server: Server,
) -> None:
    topic, cancelled = new_topic("late"), []
    app = App(server.namesrv_address, group=f"g-{topic}")
    started = asyncio.Event()

    @app.on(topic)
    async def handle(body: bytes) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(body)
            raise

    await send(server, topic, b"x")
    task = asyncio.create_task(app.run(shutdown_timeout_s=0.05))
    await started.wait()
    app.stop()
    assert await task == 1
    assert cancelled == [b"x"]
    assert await unacknowledged_count(server, f"g-{topic}", topic) == 1


async def test_an_app_waits_for_a_server_that_does_not_respond_yet() -> None:
    (port,) = free_ports(1)
    app = App(f"127.0.0.1:{port}", group="g")

    @app.on("t")
    async def handle(body: bytes) -> None: ...

    task = asyncio.create_task(app.run())
    await wait_until_async(lambda: str(app.not_ready_reason).startswith("no server responds"))
    app.stop()
    assert await task == 0


async def test_an_app_without_handlers_cannot_run() -> None:
    with pytest.raises(InvalidHandler, match="no handlers"):
        await App("127.0.0.1:1", group="g").run()
