"""Sending with a real broker: batches, order, delays, compression, namespaces, traces."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from escrowmq import Consumer, Message, MessageQueue, Producer, ReceivedMessage, Verdict, blocking
from escrowmq.client.telemetry import Telemetry
from escrowmq.errors import LocalProtocolError, RequestRefused
from tests.interop.records import Record
from tests.support.brokers import LocalServer
from tests.support.clients import WAIT_S
from tests.support.waiting import wait_until_async

pytestmark = pytest.mark.slow

CONF = {"transactionTimeOut": 500, "transactionCheckInterval": 500}


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with LocalServer(CONF) as server:
        yield server


def stored_records(server: LocalServer, topic: str) -> list[Record]:
    with server.client() as reader:
        return [record for queue in range(4) for record in reader.pull_all(topic, queue)]


async def receive(server: LocalServer, topic: str, count: int) -> list[ReceivedMessage]:
    async with (
        asyncio.timeout(WAIT_S),
        Consumer(server.namesrv_address, group=f"g-{topic}", subscribe={topic: "*"}) as consumer,
    ):
        return [await consumer.receive() for _ in range(count)]


# --- batches -------------------------------------------------------------------------------------


async def test_a_batch_is_stored_in_order_with_an_id_for_each(server: LocalServer) -> None:
    messages = [
        Message("batched", b"%d" % n, keys=f"k{n}", tags="x", properties={"n": str(n)}, flag=n)
        for n in range(50)
    ]
    async with Producer(server.namesrv_address, group="p") as producer:
        results = await producer.send_batch(messages)
    records = stored_records(server, "batched")
    assert [record.body for record in records] == [message.body for message in messages]
    assert [record.properties["UNIQ_KEY"] for record in records] == [
        result.message_id for result in results
    ]
    assert [record.queue_offset for record in records] == [
        result.queue_offset for result in results
    ]
    assert [record.properties["KEYS"] for record in records] == [f"k{n}" for n in range(50)]
    assert len({result.offset_id for result in results}) == 50
    with server.client() as reader:
        for record, result in zip(records, results, strict=True):
            assert reader.view_by_id(result.offset_id).body == record.body


async def test_a_batch_beyond_the_limit_takes_several_requests(server: LocalServer) -> None:
    messages = [Message("cut", b"%04d" % n * 100, sharding_key="s") for n in range(40)]
    async with Producer(server.namesrv_address, group="p", batch_bytes_max=2000) as producer:
        results = await producer.send_batch(messages)
    assert [record.body for record in stored_records(server, "cut")] == [m.body for m in messages]
    assert len({result.message_id for result in results}) == 40
    assert [result.queue_offset for result in results] == list(range(40))


def test_a_blocking_producer_sends_batches(server: LocalServer) -> None:
    with blocking.Producer(server.namesrv_address, group="p") as producer:
        [queue, *_] = producer.queues("blocking-batch")
        messages = [Message("blocking-batch", b"a"), Message("blocking-batch", b"b")]
        results = producer.send_batch(messages, queue=queue)
        with pytest.raises(LocalProtocolError, match="one topic"):
            producer.send_batch([Message("a", b""), Message("b", b"")])
    assert [result.queue.queue_id for result in results] == [queue.queue_id] * 2


# --- order, one way ------------------------------------------------------------------------------


async def test_a_selector_chooses_the_queue(server: LocalServer) -> None:
    def by_size(queues: Sequence[MessageQueue], message: Message) -> MessageQueue:
        return queues[len(message.body) % len(queues)]

    async with Producer(server.namesrv_address, group="p") as producer:
        for size in (1, 5, 9, 2):
            await producer.send(Message("selected", b"x" * size), queue=by_size)
    with server.client() as reader:
        assert [len(record.body) for record in reader.pull_all("selected", 1)] == [1, 5, 9]
        assert [len(record.body) for record in reader.pull_all("selected", 2)] == [2]


async def test_a_oneway_message_arrives(server: LocalServer) -> None:
    async with Producer(server.namesrv_address, group="p") as producer:
        for number in range(100):
            await producer.send_oneway(Message("one-way", b"%d" % number))
    messages = await receive(server, "one-way", 100)
    assert sorted(int(message.body) for message in messages) == list(range(100))


# --- delays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["delay_level", "delay_s", "deliver_at"])
async def test_a_delayed_message_is_delivered_when_it_is_due(
    server: LocalServer, kind: str
) -> None:
    topic = kind.replace("_", "-")
    later = datetime.now(UTC) + timedelta(seconds=1)
    message = {
        "delay_level": Message(topic, b"later", delay_level=1),
        "delay_s": Message(topic, b"later", delay_s=1),
        "deliver_at": Message(topic, b"later", deliver_at=later),
    }[kind]
    async with Producer(server.namesrv_address, group="p") as producer:
        await producer.send(message)
        await producer.send(Message(topic, b"now"))
    assert [record.body for record in stored_records(server, topic)] == [b"now"]
    received = {message.body: message for message in await receive(server, topic, 2)}
    late = received[b"later"]
    due_ms = later.timestamp() * 1000 if kind == "deliver_at" else late.born_ms + 1000
    assert late.stored_ms >= due_ms - 100


async def test_a_delay_in_a_transaction_counts_from_the_commit(server: LocalServer) -> None:
    async with Producer(server.namesrv_address, group="p") as producer:
        async with producer.transaction(Message("delayed-half", b"x", delay_s=1)):
            pass
        assert stored_records(server, "delayed-half") == []
    [message] = await receive(server, "delayed-half", 1)
    assert message.stored_ms - message.born_ms >= 900


async def test_a_delay_beyond_the_broker_s_limit_is_refused(server: LocalServer) -> None:
    async with Producer(server.namesrv_address, group="p") as producer:
        with pytest.raises(RequestRefused, match="limit") as refused:
            await producer.send(Message("too-late", b"x", delay_s=365 * 86_400))
    assert not refused.value.retriable


# --- compression ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["zlib", "lz4", "zstd"])
async def test_a_long_body_is_sent_compressed(server: LocalServer, kind: str) -> None:
    body = b"the same again and again " * 2000
    topic = f"compressed-{kind}"
    async with Producer(server.namesrv_address, group="p", compression=kind) as producer:
        await producer.send(Message(topic, body))
        async with producer.transaction(Message(topic, body)):
            pass
    assert all(len(record.body) < 5000 for record in stored_records(server, topic))
    assert [message.body for message in await receive(server, topic, 2)] == [body, body]


# --- namespaces ----------------------------------------------------------------------------------


async def test_two_namespaces_do_not_see_each_other(server: LocalServer) -> None:
    checked_topics: list[str] = []
    for name in ("first", "second"):
        async with Producer(server.namesrv_address, group="p", namespace=name) as producer:

            @producer.checker("shared")
            async def commit(message: ReceivedMessage) -> Verdict:
                checked_topics.append(message.topic)
                return Verdict.COMMIT

            result = await producer.send(Message("shared", name.encode()))
            assert result.queue.topic == "shared"
            with pytest.raises(ZeroDivisionError):
                async with producer.transaction(Message("shared", b"checked")):
                    raise ZeroDivisionError
            topic = f"{name}%shared"
            await wait_until_async(lambda topic=topic: len(stored_records(server, topic)) == 2)  # type: ignore[misc]  # bound now
        assert {record.body for record in stored_records(server, f"{name}%shared")} == {
            name.encode(),
            b"checked",
        }
    assert set(checked_topics) == {"shared"}


# --- traces --------------------------------------------------------------------------------------


async def test_a_trace_goes_from_the_sender_through_the_checker_to_the_consumer(
    server: LocalServer,
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with Producer(server.namesrv_address, group="traced", telemetry=provider) as producer:

        @producer.checker("traced")
        async def commit(message: ReceivedMessage) -> Verdict:
            return Verdict.COMMIT

        await producer.send(Message("traced", b"plain"))
        await producer.send_batch([Message("traced", b"a"), Message("traced", b"b")])
        with pytest.raises(ZeroDivisionError):
            async with producer.transaction(Message("traced", b"half"), name="work"):
                raise ZeroDivisionError
        with pytest.raises(RequestRefused):
            await producer.send(Message("refused", b"x", properties={"long": "x" * 40_000}))
        messages = {m.body: m for m in await receive(server, "traced", 4)}
    tracing = Telemetry.from_option(provider)
    assert tracing is not None
    with tracing.continue_trace("process", messages[b"half"]):
        pass
    spans: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        spans.setdefault(span.name, []).append(span)
    [transaction] = spans["transaction work"]
    half = next(span for span in spans["send traced"] if span.parent is not None)
    assert half.parent is not None
    assert half.parent.span_id == transaction.context.span_id
    for name in ("check traced", "process traced"):
        for span in spans[name]:
            assert span.parent is not None
            assert span.parent.span_id == half.context.span_id
    assert transaction.status.is_ok is False
    [refused] = spans["send refused"]
    assert refused.status.is_ok is False
    assert messages[b"a"].properties["traceparent"] == messages[b"b"].properties["traceparent"]


def test_a_blocking_send_is_part_of_its_callers_trace(server: LocalServer) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with (
        blocking.Producer(server.namesrv_address, group="p", telemetry=provider) as producer,
        provider.get_tracer("test").start_as_current_span("request") as request,
    ):
        producer.send(Message("traced-blocking", b"x"))
    [sent] = [span for span in exporter.get_finished_spans() if span.name.startswith("send")]
    assert sent.parent is not None
    assert sent.parent.span_id == request.get_span_context().span_id
