"""Requests and replies with a real broker, and handlers that continue the producer's trace."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from escrowmq import Consumer, Message, Producer, ReceivedMessage, blocking
from escrowmq.errors import LocalProtocolError, OutcomeUnknown
from tests.support.brokers import LocalServer
from tests.support.clients import CONF, WAIT_S
from tests.support.waiting import wait_until_async

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with LocalServer(CONF) as server:
        yield server


async def test_each_request_gets_its_own_reply(server: LocalServer) -> None:
    async with (
        Producer(server.namesrv_address, group="requesters") as producer,
        Producer(server.namesrv_address, group="requesters") as other,
        Consumer(server.namesrv_address, group="replies") as consumer,
    ):

        @consumer.on("requests")
        async def reply(message: ReceivedMessage) -> None:
            await consumer.reply(message, b"re: " + message.body, properties={"a": "b"})

        running = asyncio.create_task(consumer.run())
        replies = await asyncio.gather(
            *(
                requester.request(Message("requests", b"%d" % number), WAIT_S)
                for number, requester in enumerate([producer, other] * 5)
            )
        )
        consumer.stop()
        await running
    assert [reply.body for reply in replies] == [b"re: %d" % number for number in range(10)]
    assert {reply.properties["a"] for reply in replies} == {"b"}


async def test_a_large_request_in_a_namespace_is_replied_to(server: LocalServer) -> None:
    address, size = server.namesrv_address, 20_000
    async with (
        Producer(address, group="requesters", namespace="n") as producer,
        Consumer(address, group="large", subscribe={"large": "*"}, namespace="n") as consumer,
    ):
        requesting = asyncio.create_task(producer.request(Message("large", b"x" * size), WAIT_S))
        message = await consumer.receive()
        await consumer.reply(message, message.body)
        assert (await requesting).body == b"x" * size


async def test_a_missing_reply_raises_and_a_late_one_is_dropped(server: LocalServer) -> None:
    address = server.namesrv_address
    async with (
        Producer(address, group="requesters") as producer,
        Consumer(address, group="late", subscribe={"late": "*"}) as consumer,
    ):
        await producer.send(Message("late", b"creates the topic"))
        await consumer.receive()
        with pytest.raises(OutcomeUnknown, match=r"no reply in 0.5 s"):
            await producer.request(Message("late", b"?"), 0.5)
        await consumer.reply(await consumer.receive(), b"too late")
        requesting = asyncio.create_task(producer.request(Message("late", b"again"), WAIT_S))
        await consumer.reply(await consumer.receive(), b"in time")
        assert (await requesting).body == b"in time"
        # Private: what stays in memory has no public view.
        assert producer._pending_replies._pending == {}


async def test_only_a_request_in_flight_can_be_replied_to(server: LocalServer) -> None:
    address = server.namesrv_address
    async with (
        Producer(address, group="requesters") as producer,
        Consumer(address, group="wrong", subscribe={"wrong": "*"}) as consumer,
    ):
        for body in (b"1", b"2"):
            await producer.send(Message("wrong", body))
        first = await consumer.receive()
        with pytest.raises(LocalProtocolError, match="is not a request"):
            await consumer.reply(first, b"x")
        await consumer.receive()
        with pytest.raises(LocalProtocolError, match="not acknowledged"):
            await consumer.reply(first, b"x")


def test_blocking_clients_request_and_reply(server: LocalServer) -> None:
    address = server.namesrv_address

    with (
        blocking.Producer(address, group="requesters") as producer,
        blocking.Consumer(address, group="blocking", subscribe={"blocking": "*"}) as consumer,
    ):

        def reply_once() -> None:
            consumer.reply(consumer.receive(), b"yes")

        replier = threading.Thread(target=reply_once)
        replier.start()
        assert producer.request(Message("blocking", b"?"), WAIT_S).body == b"yes"
        replier.join()


# --- traces --------------------------------------------------------------------------------------


async def test_handlers_continue_the_trace_of_the_sender(server: LocalServer) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    current_spans: dict[bytes, int] = {}  # the span id in the handler, by message body
    consumer = Consumer(server.namesrv_address, group="traced", telemetry=provider)

    def record_span(message: ReceivedMessage) -> None:
        current_spans[message.body] = trace.get_current_span().get_span_context().span_id

    @consumer.on("traced", "loop")
    async def on_the_loop(message: ReceivedMessage) -> None:
        record_span(message)

    @consumer.on("traced", "thread")
    def in_a_thread(message: ReceivedMessage) -> None:
        record_span(message)
        if not message.reconsume_times:
            raise ZeroDivisionError

    async with Producer(server.namesrv_address, group="p", telemetry=provider) as producer:
        await producer.send(Message("traced", b"l", tags="loop"))
        await producer.send(Message("traced", b"t", tags="thread"))
    running = asyncio.create_task(consumer.run())
    await wait_until_async(
        lambda: len(processed(exporter)) == 3
    )  # the failed message is delivered twice
    consumer.stop()
    await running
    sent = {
        span.context.span_id
        for span in exporter.get_finished_spans()
        if span.name == "send traced" and span.context is not None
    }
    spans = processed(exporter)
    assert {span.parent.span_id for span in spans if span.parent is not None} == sent
    ids = {span.context.span_id for span in spans if span.context is not None}
    assert set(current_spans.values()) <= ids
    failed = [span for span in spans if not span.status.is_ok]
    assert len(failed) == 1
    assert [event.name for event in failed[0].events] == ["exception"]


def processed(exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name.startswith("process")]
