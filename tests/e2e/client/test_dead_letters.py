"""The cause of a failure is stored with the retry and with the dead letter of a message."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator

import pytest

from escrowmq import Consumer, PullConsumer, ReceivedMessage, blocking
from escrowmq.errors import LocalProtocolError
from tests.support.brokers import LocalServer
from tests.support.clients import CONF, WAIT_S, Broker, send
from tests.support.waiting import wait_until_async

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Broker]:
    with LocalServer(CONF) as server:
        yield server


async def dead_letters(server: Broker, group: str) -> list[ReceivedMessage]:
    async with PullConsumer(server.namesrv_address, group="operator") as consumer:
        [queue] = await consumer.queues(f"%DLQ%{group}")
        return (await consumer.pull(queue, 0)).messages


class BadPayload(Exception):
    """An error of an application."""


async def test_the_exception_of_a_handler_is_the_cause_of_retry_and_dead_letter(
    server: Broker,
) -> None:
    await send(server, "raising", b"x")
    consumer = Consumer(server.namesrv_address, group="g-raising", max_reconsume_times=1)
    failures = []

    @consumer.on("raising")
    async def handle(message: ReceivedMessage) -> None:
        failures.append(message.failure)
        raise BadPayload(f"attempt {len(failures)}\nof two")

    running = asyncio.create_task(consumer.run())
    await wait_until_async(lambda: len(failures) == 2)
    await consumer.close()
    await running
    assert failures[0] is None
    assert failures[1] is not None
    assert failures[1].cause == f"{__name__}.BadPayload: attempt 1 of two"
    [dead] = await dead_letters(server, "g-raising")
    assert dead.failure is not None
    assert dead.failure.error_type == f"{__name__}.BadPayload"
    assert dead.failure.error_text == "attempt 2 of two"
    assert (dead.failure.attempts, dead.failure.host) == (2, socket.gethostname())
    assert dead.failure.address.startswith("127.0.0.1:")
    assert dead.born_ms <= dead.failure.failed_ms <= dead.stored_ms
    assert not dead.failure.is_from_client


async def test_a_consumer_moves_a_message_to_the_dead_letters_with_a_cause(
    server: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    await send(server, "moved", b"x")
    group = Consumer(server.namesrv_address, group="g-moved", subscribe={"moved": "*"})
    with caplog.at_level(logging.WARNING):
        async with group as member, asyncio.timeout(WAIT_S):
            message = await member.receive()
            with pytest.raises(TypeError, match="an exception or a string, not 7"):
                await member.dead_letter(message, cause=7)  # type: ignore[arg-type]
            await member.dead_letter(message, cause="not JSON\n\x1b[31m")
            with pytest.raises(LocalProtocolError, match="not acknowledged"):
                await member.dead_letter(message, cause="twice")
    [dead] = await dead_letters(server, "g-moved")
    assert dead.failure is not None
    assert (dead.failure.cause, dead.failure.attempts) == ("not JSON [31m", 1)
    logged = [line for line in caplog.messages if "moved to the dead letters" in line]
    assert len(logged) == 1
    assert logged[0].endswith(": not JSON [31m")


async def test_an_orderly_consumer_counts_the_attempts_that_no_broker_has_seen(
    server: Broker,
) -> None:
    await send(server, "ordered", b"x")
    consumer = Consumer(
        server.namesrv_address,
        group="g-ordered",
        subscribe={"ordered": "*"},
        orderly=True,
        max_reconsume_times=2,
        suspend_s=0.01,
    )
    async with consumer, asyncio.timeout(WAIT_S):
        for _ in range(3):
            await consumer.retry_later(await consumer.receive(), cause=BadPayload("no"))
    [dead] = await dead_letters(server, "g-ordered")
    assert dead.failure is not None
    assert (dead.failure.attempts, dead.failure.error_text) == (3, "no")


async def test_an_error_whose_text_cannot_be_shown_still_has_its_type(server: Broker) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    await send(server, "unprintable", b"x")
    consumer = Consumer(
        server.namesrv_address, group="g-unprintable", subscribe={"unprintable": "*"}
    )
    async with consumer, asyncio.timeout(WAIT_S):
        await consumer.dead_letter(await consumer.receive(), cause=Unprintable())
    [dead] = await dead_letters(server, "g-unprintable")
    assert dead.failure is not None
    assert "Unprintable: its text cannot be shown" in dead.failure.cause


async def test_the_blocking_consumer_does_the_same(server: Broker) -> None:
    await send(server, "blocking", b"1", b"2")

    def consume() -> None:
        with blocking.Consumer(
            server.namesrv_address, group="g-blocking", subscribe={"blocking": "*"}
        ) as consumer:
            consumer.dead_letter(consumer.receive(), cause=BadPayload("first"))
            consumer.retry_later(consumer.receive(), delay_level=-1, cause="second")

    await asyncio.wait_for(asyncio.to_thread(consume), WAIT_S)
    causes = {
        dead.failure and dead.failure.error_text
        for dead in await dead_letters(server, "g-blocking")
    }
    assert causes == {"first", "second"}
