"""Responses that cannot be true raise BrokenResponse; checkers and listeners may raise anything."""

from __future__ import annotations

import asyncio
import json
import logging
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from escrowmq import (
    LiteConsumer,
    Message,
    MessageQueue,
    Producer,
    PullConsumer,
    ReceivedMessage,
    TransactionListener,
    TransactionProducer,
    Verdict,
    blocking,
)
from escrowmq.client.consumer import fetcher, queue_client
from escrowmq.client.consumer.fetcher import ConsumerLimits
from escrowmq.client.consumer.queue_client import decode_messages
from escrowmq.client.loop_thread import client_loop, run_on
from escrowmq.client.messages import BODY_BYTES_MAX
from escrowmq.errors import (
    BrokenResponse,
    CallbackFailed,
    NotSent,
    OutcomeUnknown,
    TransportError,
)
from escrowmq.message.compression import compress_body
from escrowmq.message.properties import encode_properties
from escrowmq.message.record import (
    COMPRESSION_LZ4,
    COMPRESSION_ZLIB,
    COMPRESSION_ZSTD,
    NewRecord,
    encode_record,
    with_compression,
)
from escrowmq.remoting.bodies import QueueRoute, TopicRoute, encode_body
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import encode_response
from tests.support.fake_cluster import FakeCluster, Responder
from tests.support.lying_relay import join_frame
from tests.support.stores import HOST, NOW_MS
from tests.support.waiting import wait_until_async

SEND, PULL = RequestCode.SEND_MESSAGE_V2, RequestCode.PULL_MESSAGE
IMPOSSIBLE_NUMBERS = [
    "x",
    "",
    "-2",
    "1.5",
    "1e3",
    "9" * 30,
    str(2**63),
    "0x1",
    " 1",
    "\u0661",
    "9" * 9999,
]
QUEUE = MessageQueue("t", "a", 0)


def respond(body: bytes = b"", code: int = 0, /, **fields: str) -> Responder:
    """Return a responder with these header fields."""

    def responder(request: Request[Any]) -> bytes:
        header = {"code": code, "flag": 1, "opaque": request.head.opaque, "extFields": fields}
        return join_frame(json.dumps(header).encode(), body)

    return responder


# --- producers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", IMPOSSIBLE_NUMBERS, ids=lambda text: text[:10])
@pytest.mark.parametrize("name", ["queueId", "queueOffset"])
async def test_a_send_with_an_impossible_position_may_have_happened(name: str, text: str) -> None:
    async with FakeCluster("a") as cluster:
        cluster["a"].responders[SEND] = respond(msgId="", **{name: text})
        async with Producer(cluster.address, group="g", retries=0) as producer:
            with pytest.raises(BrokenResponse, match=name) as raised:
                await producer.send(Message("t", b"x"))
    assert raised.value.may_have_happened


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"msgId": "zz", "queueOffset": "1"},
        {"msgId": "00", "queueOffset": "1"},
        {"msgId": "F" * 32, "queueOffset": "1"},  # a negative log offset
        {"msgId": "0" * 32},
    ],
    ids=str,
)
async def test_a_half_that_could_not_be_ended_fails_before_the_local_work(
    fields: dict[str, str],
) -> None:
    async with FakeCluster("a") as cluster:
        cluster["a"].responders[SEND] = respond(**fields)
        async with Producer(cluster.address, group="g", retries=0) as producer:
            with pytest.raises(BrokenResponse):
                await producer.transaction(Message("t", b"x")).__aenter__()


@pytest.mark.parametrize(
    "counts", [(2**31 - 1, 4), (4, 2**31 - 1), (-1, 4), (4, -(2**31)), (100_001, 0)]
)
async def test_a_route_with_an_impossible_number_of_queues_is_refused(
    counts: tuple[int, int],
) -> None:
    read_count, write_count = counts
    entry = QueueRoute(
        broker_name="a", read_queue_nums=read_count, write_queue_nums=write_count, perm=6
    )
    async with FakeCluster("a") as cluster, Producer(cluster.address, group="g") as producer:
        answer_routes(cluster, encode_body(TopicRoute(queue_datas=[entry])))
        with pytest.raises(TransportError, match="queues"):
            await producer.send(Message("t", b"x"))


def answer_routes(cluster: FakeCluster, body: bytes) -> None:
    """Let the name server answer every question with this body."""
    cluster.route_responder = lambda request: encode_response(request, body=body)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"7", b'{"queueDatas":7}', b"[" * 99_999, b'{"queueDatas":[{}]}']
)
async def test_a_route_that_cannot_be_read_is_a_transport_error(body: bytes) -> None:
    async with FakeCluster("a") as cluster:
        answer_routes(cluster, body)
        async with Producer(cluster.address, group="g") as producer:
            with pytest.raises(TransportError):
                await producer.send(Message("t", b"x"))


@pytest.mark.parametrize(
    "address", ["", "x", "a:0", "a:99999", "\ud800:1", "a..b:1", "[:1", "x" * 999]
)
async def test_an_absurd_address_of_a_broker_is_a_transport_error(address: str) -> None:
    route = {
        "queueDatas": [{"brokerName": "a", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}],
        "brokerDatas": [{"brokerName": "a", "brokerAddrs": {"0": address}}],
    }
    async with FakeCluster("a") as cluster:
        answer_routes(cluster, json.dumps(route).encode())
        async with Producer(cluster.address, group="g", retries=0) as producer:
            with pytest.raises(TransportError):
                await producer.send(Message("t", b"x"))


async def test_a_broker_that_reads_nothing_does_not_hold_a_send() -> None:
    async with (
        FakeCluster("a") as cluster,
        Producer(cluster.address, group="g", timeout_s=0.2, retries=0) as producer,
    ):
        await producer.send(Message("t", b"first"))
        for transport in cluster["a"].transports:
            transport.pause_reading()
        body = b"x" * (4 << 20)
        sends = [producer.send(Message("t", body, keys="k")) for _ in range(8)]
        results = await asyncio.gather(*sends, return_exceptions=True)
        assert {type(result) for result in results} <= {OutcomeUnknown, NotSent}


# --- consumers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", IMPOSSIBLE_NUMBERS, ids=lambda text: text[:10])
@pytest.mark.parametrize("name", ["nextBeginOffset", "minOffset", "maxOffset"])
async def test_a_pull_with_an_impossible_offset_raises(name: str, text: str) -> None:
    async with FakeCluster("a") as cluster, PullConsumer(cluster.address, group="g") as puller:
        cluster["a"].responders[PULL] = respond(**{name: text})
        with pytest.raises(BrokenResponse, match=name):
            await puller.pull(QUEUE, 0)


@pytest.mark.parametrize("text", [None, *IMPOSSIBLE_NUMBERS], ids=lambda text: str(text)[:10])
async def test_an_impossible_offset_raises(text: str | None) -> None:
    fields = {} if text is None else {"offset": text}
    async with FakeCluster("a") as cluster, PullConsumer(cluster.address, group="g") as puller:
        for code in (
            RequestCode.QUERY_CONSUMER_OFFSET,
            RequestCode.GET_MIN_OFFSET,
            RequestCode.GET_MAX_OFFSET,
        ):
            cluster["a"].responders[code] = respond(**fields)
        for question in (puller.committed, puller.earliest_offset, puller.latest_offset):
            with pytest.raises(BrokenResponse, match="offset"):
                await question(QUEUE)


async def test_a_pull_that_continues_far_behind_the_queue_raises() -> None:
    async with FakeCluster("a") as cluster, PullConsumer(cluster.address, group="g") as puller:
        cluster["a"].responders[PULL] = respond(nextBeginOffset=str(2**62), maxOffset="10")
        with pytest.raises(BrokenResponse, match="ends at 10"):
            await puller.pull(QUEUE, 0)


def encoded(queue_offset: int, body: bytes = b"body", sys_flag: int = 0) -> bytes:
    record = NewRecord(topic="t", queue_id=0, body=body, sys_flag=sys_flag)
    return encode_record(record, queue_offset, 1000 * queue_offset, NOW_MS, HOST)


def pull_responder(bodies: Callable[[int], bytes], end: int) -> Responder:
    """Return a responder that has one record for each offset before `end`."""

    def responder(request: Request[Any]) -> bytes | None:
        fields = request.head.fields
        offset = fields.queue_offset
        count = min(fields.max_msg_nums, end - offset)
        if count <= 0:
            return respond(b"", 19, nextBeginOffset=str(offset), maxOffset=str(end))(request)
        body = b"".join(bodies(offset + number) for number in range(count))
        next_offset = str(offset + count)
        return respond(body, nextBeginOffset=next_offset, maxOffset=str(end))(request)

    return responder


async def test_a_record_with_an_impossible_size_costs_only_its_own_message() -> None:
    def body(queue_offset: int) -> bytes:
        return b"\xff" * 120 if queue_offset == 3 else encoded(queue_offset)

    async with FakeCluster("a") as cluster, PullConsumer(cluster.address, group="g") as puller:
        cluster["a"].responders[PULL] = pull_responder(body, end=8)
        offset, offsets = 0, []
        while offset < 8:
            result = await puller.pull(QUEUE, offset)
            offsets += [message.queue_offset for message in result.messages]
            assert result.next_offset > offset
            offset = result.next_offset
    assert offsets == [0, 1, 2, 4, 5, 6, 7]


@pytest.mark.parametrize("size", [0, 1, 90, 2**31 - 1, 2**32 - 1])
def test_decoding_stops_at_a_record_with_an_impossible_size(size: int) -> None:
    body = encoded(0) + size.to_bytes(4, "big") + encoded(1)[4:] + encoded(2)
    decoded = decode_messages(body, "a", offsets=range(10))
    assert [message.queue_offset for message in decoded.messages] == [0]
    assert (decoded.stopped_at, decoded.is_full) == (1, False)


def test_records_that_were_not_asked_for_are_left_out() -> None:
    """An offset that comes twice, goes back or is far away would break the count of the limits."""
    body = b"".join(map(encoded, (5, 5, 4, 7, 99, 6, 8)))
    decoded = decode_messages(body, "a", offsets=range(5, 10))
    assert [message.queue_offset for message in decoded.messages] == [5, 7, 8]


def test_properties_count_with_the_memory_that_they_take() -> None:
    properties = encode_properties({f"{number:x}": "v" for number in range(4_000)})
    record = NewRecord(topic="t", queue_id=0, body=b"", properties=properties)
    body = b"".join(encode_record(record, offset, 0, NOW_MS, HOST) for offset in range(32))
    tracemalloc.start()
    try:
        decoded = decode_messages(body, "a", offsets=range(32), bytes_max=2 << 20)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert decoded.is_full
    assert len(decoded.messages) < 32
    assert kept_bytes < 3 << 20


@pytest.mark.parametrize("compression", [COMPRESSION_ZLIB, COMPRESSION_LZ4, COMPRESSION_ZSTD])
async def test_decompressed_bytes_are_limited(compression: int) -> None:
    bomb = compress_body(bytes(BODY_BYTES_MAX), compression)
    flag = with_compression(0, compression)
    limits = ConsumerLimits(per_queue_bytes=100 << 20, total_bytes=150 << 20)
    async with FakeCluster("a", queues=4) as cluster:
        cluster["a"].responders |= {
            PULL: pull_responder(lambda offset: encoded(offset, bomb, flag), end=64),
            RequestCode.QUERY_CONSUMER_OFFSET: respond(offset="0"),
        }
        async with LiteConsumer(cluster.address, group="g", limits=limits) as consumer:
            await consumer.assign(await consumer.queues("t"))
            # Private: what the limiter counts is what is in memory.
            limiter = consumer._rebalancer.limiter
            await wait_until_async(lambda: limiter.message_bytes >= limits.total_bytes)
            await asyncio.gather(*(consumer.committed(QUEUE) for _ in range(20)))
            assert limiter.message_bytes <= limits.total_bytes + BODY_BYTES_MAX
            offsets = [message.queue_offset for message in await consumer.poll(max_messages=99)]
            await consumer.poll(timeout_s=0)  # acknowledges, so that more can be pulled
            await wait_until_async(lambda: limiter.message_bytes >= limits.total_bytes)
    assert len(offsets) <= 3


async def test_one_pull_does_not_fill_the_memory() -> None:
    bomb = compress_body(bytes(BODY_BYTES_MAX), COMPRESSION_ZSTD)
    flag = with_compression(0, COMPRESSION_ZSTD)
    async with FakeCluster("a") as cluster, PullConsumer(cluster.address, group="g") as puller:
        cluster["a"].responders[PULL] = pull_responder(
            lambda offset: encoded(offset, bomb, flag), end=64
        )
        result = await puller.pull(QUEUE, 0, max_messages=64)
        assert [message.queue_offset for message in result.messages] == [0]
        assert (await puller.pull(QUEUE, result.next_offset)).messages[0].queue_offset == 1


async def test_a_queue_continues_after_a_response_that_cannot_be_true(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fetcher, "RETRY_PAUSE_S", 0.01)
    async with FakeCluster("a", queues=1) as cluster:
        responders = cluster["a"].responders
        responders[RequestCode.QUERY_CONSUMER_OFFSET] = respond(offset="0")
        responders[PULL] = respond(encoded(0), nextBeginOffset="soon")
        async with LiteConsumer(cluster.address, group="g") as consumer:
            await consumer.assign([QUEUE])
            with caplog.at_level(logging.WARNING):
                await wait_until_async(lambda: "pull failed" in caplog.text)
            responders[PULL] = pull_responder(encoded, end=1)
            assert [message.queue_offset for message in await consumer.poll(20)] == [0]


async def test_a_queue_continues_after_a_bug(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fetcher, "RETRY_PAUSE_S", 0.01)
    errors = iter([KeyError("a bug")])

    def decode_badly(*arguments: Any, **options: Any) -> Any:
        for error in errors:
            raise error
        return decode_messages(*arguments, **options)

    monkeypatch.setattr(queue_client, "decode_messages", decode_badly)
    async with FakeCluster("a", queues=1) as cluster:
        cluster["a"].responders |= {
            RequestCode.QUERY_CONSUMER_OFFSET: respond(offset="0"),
            PULL: pull_responder(encoded, end=1),
        }
        async with LiteConsumer(cluster.address, group="g") as consumer:
            await consumer.assign([QUEUE])
            assert [message.queue_offset for message in await consumer.poll(20)] == [0]
    assert "a bug" in caplog.text


# --- checkers and listeners ----------------------------------------------------------------------

SEVERE = [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, BaseException]


def check_request(body: bytes) -> bytes:
    """Return the check of a half message, as a broker sends it."""
    fields = {"tranStateTableOffset": "1", "commitLogOffset": "1000", "transactionId": "t"}
    header = {"code": 39, "flag": 2, "opaque": 1, "extFields": fields}
    return join_frame(json.dumps(header).encode(), body)


async def send_check(cluster: FakeCluster, body: bytes) -> Request[Any]:
    """Send a check on every connection of the broker, and return the first answer."""
    broker = cluster["a"]
    await wait_until_async(lambda: broker.received(RequestCode.HEART_BEAT))
    answered = len(broker.received(RequestCode.END_TRANSACTION))
    for transport in broker.transports:
        transport.write(check_request(body))
    await wait_until_async(lambda: len(broker.received(RequestCode.END_TRANSACTION)) > answered)
    return broker.received(RequestCode.END_TRANSACTION)[answered]


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
@pytest.mark.parametrize("error_type", SEVERE)
async def test_a_checker_that_raises_anything_answers_unknown_and_nothing_hangs(
    error_type: type[BaseException], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def plain(message: ReceivedMessage) -> Verdict:
        raise error_type("no verdict")

    async def coroutine(message: ReceivedMessage) -> Verdict:
        raise error_type("no verdict")

    checker: Any = {"plain": plain, "coroutine": coroutine}[kind]
    async with FakeCluster("a") as cluster:

        def use_producer(loop: asyncio.AbstractEventLoop) -> tuple[int, str]:
            with blocking.Producer(cluster.address, group="g") as producer:
                producer.checker("*")(checker)
                answers = [
                    asyncio.run_coroutine_threadsafe(send_check(cluster, encoded(1)), loop).result()
                    for _ in range(2)
                ]
                producer.send(Message("t", b"x"))  # the event loop of the client still runs
                assert producer.check_counts.failed == 2
            return answers[1].head.fields.commit_or_rollback, answers[1].head.remark

        verdict, remark = await asyncio.to_thread(use_producer, asyncio.get_running_loop())
    assert verdict == Verdict.UNKNOWN
    assert "no verdict" in remark
    assert "checker failed" in caplog.text


async def test_the_event_loop_of_the_blocking_clients_survives_anything() -> None:
    async def end_the_loop() -> None:
        raise SystemExit("from a task")

    async def answer() -> int:
        return 7

    def use_loop() -> int:
        with pytest.raises(SystemExit):
            run_on(client_loop(), end_the_loop())
        return run_on(client_loop(), answer())

    assert await asyncio.to_thread(use_loop) == 7


async def test_checks_that_would_fill_the_memory_get_unknown() -> None:
    bomb = encoded(
        1,
        compress_body(bytes(BODY_BYTES_MAX), COMPRESSION_ZSTD),
        with_compression(0, COMPRESSION_ZSTD),
    )
    release = asyncio.Event()
    held: list[int] = []

    async def wait(message: ReceivedMessage) -> Verdict:
        held.append(len(message.body))
        await release.wait()
        return Verdict.COMMIT

    async with FakeCluster("a") as cluster, Producer(cluster.address, group="g") as producer:
        producer.checker("*")(wait)
        broker = cluster["a"]
        await wait_until_async(lambda: broker.received(RequestCode.HEART_BEAT))
        for _ in range(16):
            broker.transports[-1].write(check_request(bomb))
        await wait_until_async(lambda: producer.check_counts.received == 16)
        await wait_until_async(lambda: producer.check_counts.unknown >= 12)
        assert sum(held) <= 256 << 20
        release.set()
        await wait_until_async(lambda: len(broker.received(RequestCode.END_TRANSACTION)) == 16)


class SevereListener(TransactionListener):
    """A listener whose local transaction raises something that is no Exception."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def execute_local_transaction(self, message: Message, arg: Any) -> Verdict:
        raise self._error

    def check_local_transaction(self, message: ReceivedMessage) -> Verdict:
        raise self._error


@pytest.mark.parametrize("error_type", SEVERE)
async def test_a_listener_that_raises_anything_leaves_the_transaction_open(
    error_type: type[BaseException],
) -> None:
    async with (
        FakeCluster("a") as cluster,
        TransactionProducer(
            cluster.address, group="g", listener=SevereListener(error_type("why"))
        ) as producer,
    ):
        result = await producer.send_in_transaction(Message("t", b"x"))
        assert result.local_state is Verdict.UNKNOWN
        assert isinstance(result.error, CallbackFailed)
        await wait_until_async(lambda: cluster["a"].received(RequestCode.END_TRANSACTION))
        assert "why" in cluster["a"].received(RequestCode.END_TRANSACTION)[0].head.remark


@pytest.mark.parametrize("error_type", SEVERE)
async def test_a_listener_in_the_thread_of_the_caller_tells_the_broker_and_raises(
    error_type: type[BaseException],
) -> None:
    async with FakeCluster("a") as cluster:

        def use_producer() -> None:
            listener = SevereListener(error_type("why"))
            with blocking.TransactionProducer(
                cluster.address, group="g", listener=listener
            ) as producer:
                with pytest.raises(error_type):
                    producer.send_in_transaction(Message("t", b"x"))
                producer.send(Message("t", b"y"))

        await asyncio.to_thread(use_producer)
        end = cluster["a"].received(RequestCode.END_TRANSACTION)[0].head
        assert (end.fields.commit_or_rollback, "why" in end.remark) == (Verdict.UNKNOWN, True)
