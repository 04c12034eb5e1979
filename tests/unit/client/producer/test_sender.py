"""Sends to brokers that fail, refuse, do not respond, stop and return."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from escrowmq import Message, MessageQueue, Producer
from escrowmq.client.producer.sender import queue_for_key
from escrowmq.client.topic_route import Route
from escrowmq.errors import (
    ClientClosed,
    LocalProtocolError,
    NotSent,
    OutcomeUnknown,
    PartialSend,
    RequestRefused,
)
from escrowmq.message.keys import java_hash
from escrowmq.remoting.codes import RequestCode, ResponseCode
from tests.support.fake_cluster import SENDS, FakeCluster, no_response, refuse_with
from tests.support.waiting import wait_until_async

SEND = RequestCode.SEND_MESSAGE_V2
SHORT_TIMEOUT_S = 0.3


async def test_a_broker_that_refuses_is_avoided_and_another_one_used() -> None:
    async with FakeCluster("a", "b") as cluster, Producer(cluster.address, group="g") as producer:
        cluster["a"].responders[SEND] = refuse_with(ResponseCode.SYSTEM_BUSY)
        results = [await producer.send(Message("t", b"x")) for _ in range(12)]
        assert {result.queue.broker for result in results} == {"b"}
        assert len(cluster["a"].received(*SENDS)) <= 1


async def test_a_slow_broker_is_avoided_although_it_responds() -> None:
    async with FakeCluster("a", "b") as cluster, Producer(cluster.address, group="g") as producer:
        queues = {queue.broker: queue for queue in await producer.queues("t")}
        # Private: a slow response is recorded without waiting for one.
        producer._sender.fault_tolerance.record_response("a", 2.0, producer._clock.elapsed_s())
        results = [await producer.send(Message("t", b"x")) for _ in range(8)]
        assert {result.queue.broker for result in results} == {"b"}
        # A queue that the caller chose is used anyway, and a quick response ends the avoidance.
        assert (await producer.send(Message("t", b"x"), queue=queues["a"])).queue.broker == "a"
        results = [await producer.send(Message("t", b"x")) for _ in range(8)]
        assert {result.queue.broker for result in results} == {"a", "b"}


async def test_every_attempt_has_the_same_unique_key() -> None:
    async with FakeCluster("a", "b") as cluster:
        for name in "ab":
            cluster[name].responders[SEND] = refuse_with(ResponseCode.SYSTEM_BUSY)
        async with Producer(cluster.address, group="g", retries=3) as producer:
            with pytest.raises(RequestRefused):
                await producer.send(Message("t", b"x"))
        requests = cluster["a"].received(*SENDS) + cluster["b"].received(*SENDS)
        assert len(requests) == 4
        assert len({request.head.fields.properties for request in requests}) == 1


@pytest.mark.parametrize("kind", ["send", "oneway", "batch", "request", "transaction"])
async def test_an_empty_body_is_refused_before_anything_is_sent(kind: str) -> None:
    empty = Message("t", b"")
    async with FakeCluster("a") as cluster, Producer(cluster.address, group="g") as producer:
        sends: dict[str, Callable[[], Awaitable[object]]] = {
            "send": lambda: producer.send(empty),
            "oneway": lambda: producer.send_oneway(empty),
            "batch": lambda: producer.send_batch([Message("t", b"x"), empty]),
            "request": lambda: producer.request(empty),
            "transaction": lambda: producer.transaction(empty).__aenter__(),
        }
        with pytest.raises(LocalProtocolError, match="the body of a message to topic t is empty"):
            await sends[kind]()
        assert not cluster["a"].received(*SENDS)


async def test_errors_that_are_not_retriable_are_not_retried() -> None:
    async with FakeCluster("a", "b") as cluster:
        for name in "ab":
            cluster[name].responders[SEND] = refuse_with(ResponseCode.MESSAGE_ILLEGAL)
        async with Producer(cluster.address, group="g") as producer:
            with pytest.raises(RequestRefused) as refused:
                await producer.send(Message("t", b"x"))
        assert not refused.value.retriable
        assert len(cluster["a"].received(*SENDS) + cluster["b"].received(*SENDS)) == 1


async def test_a_missing_response_is_an_unknown_outcome_even_if_the_retry_is_refused() -> None:
    async with FakeCluster("a") as cluster:
        cluster["a"].responders[SEND] = no_response
        async with Producer(
            cluster.address, group="g", timeout_s=SHORT_TIMEOUT_S, retries=1
        ) as producer:
            sending = asyncio.ensure_future(producer.send(Message("t", b"x")))
            await wait_until_async(lambda: bool(cluster["a"].received(*SENDS)))
            cluster["a"].responders[SEND] = refuse_with(ResponseCode.SYSTEM_BUSY)
            with pytest.raises(OutcomeUnknown) as failed:
                await sending
        assert failed.value.may_have_happened
        assert len(cluster["a"].received(*SENDS)) == 2


async def test_a_broken_connection_is_an_unknown_outcome_and_is_opened_again() -> None:
    async with (
        FakeCluster("a") as cluster,
        Producer(cluster.address, group="g", retries=0) as producer,
    ):
        await producer.send(Message("t", b"x"))
        cluster["a"].responders[SEND] = lambda request: cluster["a"].transports[-1].abort()
        with pytest.raises(OutcomeUnknown):
            await producer.send(Message("t", b"x"))
        del cluster["a"].responders[SEND]
        await producer.send(Message("t", b"x"))
        assert len(cluster["a"].transports) == 2
        # The producer registers on a new connection before it sends.
        assert len(cluster["a"].received(RequestCode.HEART_BEAT)) == 2


async def test_name_servers_that_are_down_are_skipped() -> None:
    async with FakeCluster("a") as cluster:
        servers = ["127.0.0.1:1", cluster.address, "127.0.0.1:2"]
        async with Producer(servers, group="g") as producer:
            for topic in "tuv":
                await producer.send(Message(topic, b"x"))
        async with Producer("127.0.0.1:1;127.0.0.1:2", group="g") as producer:
            with pytest.raises(NotSent):
                await producer.send(Message("t", b"x"))


async def test_without_a_name_server_the_cached_route_is_used() -> None:
    async with FakeCluster("a", "b") as cluster, Producer(cluster.address, group="g") as producer:
        await producer.send(Message("t", b"x"))
        cluster.is_silent = True
        cluster["a"].responders[SEND] = refuse_with(ResponseCode.SYSTEM_BUSY)
        results = await asyncio.gather(*(producer.send(Message("t", b"x")) for _ in range(4)))
        assert {result.queue.broker for result in results} == {"b"}


async def test_concurrent_first_sends_fetch_the_route_and_register_once() -> None:
    async with FakeCluster("a") as cluster, Producer(cluster.address, group="g") as producer:
        await asyncio.gather(*(producer.send(Message("t", b"x")) for _ in range(50)))
        assert cluster.route_request_count == 1
        assert len(cluster["a"].transports) == 1
        assert len(cluster["a"].received(RequestCode.HEART_BEAT)) == 1


async def test_routes_are_refreshed_and_heartbeats_sent_in_the_background() -> None:
    async with FakeCluster("a", "b") as cluster:
        cluster["b"].is_listed = False
        async with Producer(cluster.address, group="g", heartbeat_s=0.05) as producer:
            await producer.send(Message("t", b"x"))
            cluster["b"].is_listed = True
            count = len(cluster["a"].received(RequestCode.HEART_BEAT))
            await wait_until_async(
                lambda: len(cluster["a"].received(RequestCode.HEART_BEAT)) > count + 1
            )
            assert {queue.broker for queue in await producer.queues("t")} == {"a", "b"}
            cluster.is_silent = True  # the cached route is used
            await producer.send(Message("t", b"x"))


async def test_a_sharding_key_keeps_its_queue_while_the_route_does_not_change() -> None:
    async with (
        FakeCluster("a", "b") as cluster,
        Producer(cluster.address, group="g", retries=2) as producer,
    ):
        message = Message("t", b"x", sharding_key="customer-7")
        first = (await producer.send(message)).queue
        owner = cluster[first.broker]
        owner.responders[SEND] = refuse_with(ResponseCode.SYSTEM_BUSY)
        with pytest.raises(RequestRefused):  # another queue would break the order
            await producer.send(message)
        del owner.responders[SEND]
        assert (await producer.send(message)).queue == first
        owner.is_listed = False  # the route changes: its keys move to the other queues
        # Private: clients refresh their routes only every half minute.
        await producer._routes.refresh()
        moved = (await producer.send(message)).queue
        assert moved.broker != first.broker
        owner.is_listed = True
        # Private: clients refresh their routes only every half minute.
        await producer._routes.refresh()
        assert (await producer.send(message)).queue == first


@pytest.mark.parametrize("key", ["a", "customer-7", "polygenelubricants", "中文", "-"])
def test_a_sharding_key_selects_the_queue_that_a_java_client_selects(key: str) -> None:
    queues = tuple(MessageQueue("t", "a", number) for number in range(7))
    value = java_hash(key)
    expected = abs(value) % 7 if value != -(2**31) else 2
    assert queue_for_key(key, Route("t", queues, queues, {}, {})).queue_id == expected


def test_a_sharding_key_keeps_its_queue_when_its_topic_is_created() -> None:
    """The first send creates the topic on one broker only."""
    queues = tuple(MessageQueue("t", broker, number) for broker in "ab" for number in range(4))
    before = queue_for_key("k", Route("t", queues, queues, {}, {}, is_template=True))
    after = queue_for_key("k", Route("t", queues[:4], queues[:4], {}, {}))
    assert before == after


async def test_a_selector_must_choose_one_of_the_queues() -> None:
    offered: list[Sequence[MessageQueue]] = []

    def select_last(queues: Sequence[MessageQueue], message: Message) -> MessageQueue:
        offered.append(queues)
        return queues[-1]

    async with FakeCluster("a", "b") as cluster, Producer(cluster.address, group="g") as producer:
        result = await producer.send(Message("t", b"x"), queue=select_last)
        assert (result.queue.broker, result.queue.queue_id) == ("b", 3)
        assert len(offered[0]) == 8
        with pytest.raises(LocalProtocolError, match="no writable queue 9 on broker a"):
            await producer.send(Message("t", b"x"), queue=MessageQueue("t", "a", 9))


async def test_a_batch_that_fails_in_the_middle_returns_the_results_of_its_first_part() -> None:
    async with FakeCluster("a") as cluster:
        options = {"batch_bytes_max": 200, "retries": 0}
        async with Producer(cluster.address, group="g", **options) as producer:  # type: ignore[arg-type]
            refuse = refuse_with(ResponseCode.MESSAGE_ILLEGAL)
            responders = iter([cluster["a"].store_response, refuse])
            cluster["a"].responders[RequestCode.SEND_BATCH_MESSAGE] = lambda request: next(
                responders
            )(request)
            with pytest.raises(PartialSend) as failed:
                await producer.send_batch([Message("t", b"x" * 100) for _ in range(3)])
        assert len(failed.value.results) == 1
        assert isinstance(failed.value.cause, RequestRefused)


async def test_a_producer_with_a_checker_registers_with_all_brokers_and_after_reconnecting() -> (
    None
):
    async with FakeCluster("a", "b") as cluster, Producer(cluster.address, group="g") as producer:
        producer.checker(name="n")(lambda message: None)
        await wait_until_async(
            lambda: all(cluster[name].received(RequestCode.HEART_BEAT) for name in "ab")
        )
        cluster["b"].transports[0].abort()
        await wait_until_async(lambda: len(cluster["b"].received(RequestCode.HEART_BEAT)) == 2)


async def test_heartbeats_continue_while_one_broker_is_down() -> None:
    async with FakeCluster("a", "b") as cluster:
        cluster["b"].address = "127.0.0.1:1"
        async with Producer(cluster.address, group="g", heartbeat_s=0.05) as producer:
            producer.checker("*")(lambda message: None)
            await wait_until_async(lambda: len(cluster["a"].received(RequestCode.HEART_BEAT)) > 3)


async def test_a_closed_client_raises_client_closed() -> None:
    async with FakeCluster("a") as cluster:
        async with Producer(cluster.address, group="g") as producer:
            await producer.send(Message("t", b"x"))
        with pytest.raises(ClientClosed) as closed:
            await producer.send(Message("t", b"x"))
        assert not closed.value.retriable


async def test_the_sends_of_one_turn_are_written_together() -> None:
    async with FakeCluster("a") as cluster, Producer(cluster.address, group="g") as producer:
        await producer.send(Message("t", b"x"))
        # Private: no public method shows what waits to be written.
        connection = producer._heartbeat.ready_connection(cluster["a"].address)
        assert connection is not None
        sending = [asyncio.ensure_future(producer.send(Message("t", b"x"))) for _ in range(20)]
        await asyncio.sleep(0)
        assert len(connection._outgoing) == 19  # the first one was written at once
        await asyncio.gather(*sending)
        # Private, for the same reason.
        assert not connection._outgoing
