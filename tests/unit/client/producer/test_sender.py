"""Sends that meet brokers which fail, refuse, do not answer, come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from escrowmq import Message, MessageQueue, Producer
from escrowmq.client.producer.sender import queue_for_key
from escrowmq.client.routes import Route
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
from tests.support.peers import SENDS, Peers, refusing, silent

SEND = RequestCode.SEND_MESSAGE_V2
SOON_S = 0.3


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_broker_that_refuses_is_left_for_another_and_avoided() -> None:
    async with Peers("a", "b") as peers, Producer(peers.address, group="g") as producer:
        peers["a"].answers[SEND] = refusing(ResponseCode.SYSTEM_BUSY)
        results = [await producer.send(Message("t", b"x")) for _ in range(12)]
        assert {result.queue.broker for result in results} == {"b"}
        assert len(peers["a"].asked(*SENDS)) <= 1


async def test_a_slow_broker_is_passed_over_though_it_answers() -> None:
    async with Peers("a", "b") as peers, Producer(peers.address, group="g") as producer:
        queues = {queue.broker: queue for queue in await producer.queues("t")}
        producer._sender.fault_tolerance.record_response("a", 2.0, producer._clock.elapsed_s())
        results = [await producer.send(Message("t", b"x")) for _ in range(8)]
        assert {result.queue.broker for result in results} == {"b"}
        # Whoever names a queue gets it all the same; and a quick answer makes up for a slow one.
        assert (await producer.send(Message("t", b"x"), queue=queues["a"])).queue.broker == "a"
        results = [await producer.send(Message("t", b"x")) for _ in range(8)]
        assert {result.queue.broker for result in results} == {"a", "b"}


async def test_every_attempt_carries_the_same_key() -> None:
    async with Peers("a", "b") as peers:
        for name in "ab":
            peers[name].answers[SEND] = refusing(ResponseCode.SYSTEM_BUSY)
        async with Producer(peers.address, group="g", retries=3) as producer:
            with pytest.raises(RequestRefused):
                await producer.send(Message("t", b"x"))
        asked = peers["a"].asked(*SENDS) + peers["b"].asked(*SENDS)
        assert len(asked) == 4
        assert len({request.head.fields.properties for request in asked}) == 1


async def test_what_will_not_help_is_not_tried_again() -> None:
    async with Peers("a", "b") as peers:
        for name in "ab":
            peers[name].answers[SEND] = refusing(ResponseCode.MESSAGE_ILLEGAL)
        async with Producer(peers.address, group="g") as producer:
            with pytest.raises(RequestRefused) as refused:
                await producer.send(Message("t", b"x"))
        assert not refused.value.retriable
        assert len(peers["a"].asked(*SENDS) + peers["b"].asked(*SENDS)) == 1


async def test_no_answer_is_an_unknown_outcome_also_if_a_later_attempt_is_refused() -> None:
    async with Peers("a") as peers:
        peers["a"].answers[SEND] = silent
        async with Producer(peers.address, group="g", timeout_s=SOON_S, retries=1) as producer:
            sending = asyncio.ensure_future(producer.send(Message("t", b"x")))
            await until(lambda: bool(peers["a"].asked(*SENDS)))
            peers["a"].answers[SEND] = refusing(ResponseCode.SYSTEM_BUSY)
            with pytest.raises(OutcomeUnknown) as failed:
                await sending
        assert failed.value.may_have_happened
        assert len(peers["a"].asked(*SENDS)) == 2


async def test_a_line_that_breaks_is_an_unknown_outcome_and_is_made_again() -> None:
    async with Peers("a") as peers, Producer(peers.address, group="g", retries=0) as producer:
        await producer.send(Message("t", b"x"))
        peers["a"].answers[SEND] = lambda request: peers["a"].lines[-1].abort()
        with pytest.raises(OutcomeUnknown):
            await producer.send(Message("t", b"x"))
        del peers["a"].answers[SEND]
        await producer.send(Message("t", b"x"))
        assert len(peers["a"].lines) == 2
        assert len(peers["a"].asked(RequestCode.HEART_BEAT)) == 2  # known before it sends


async def test_name_servers_that_are_down_are_stepped_over() -> None:
    async with Peers("a") as peers:
        servers = ["127.0.0.1:1", peers.address, "127.0.0.1:2"]
        async with Producer(servers, group="g") as producer:
            for topic in "tuv":
                await producer.send(Message(topic, b"x"))
        async with Producer("127.0.0.1:1;127.0.0.1:2", group="g") as producer:
            with pytest.raises(NotSent):
                await producer.send(Message("t", b"x"))


async def test_without_a_name_server_the_known_brokers_still_serve() -> None:
    async with Peers("a", "b") as peers, Producer(peers.address, group="g") as producer:
        await producer.send(Message("t", b"x"))
        peers.is_silent = True
        peers["a"].answers[SEND] = refusing(ResponseCode.SYSTEM_BUSY)
        results = await asyncio.gather(*(producer.send(Message("t", b"x")) for _ in range(4)))
        assert {result.queue.broker for result in results} == {"b"}


async def test_many_first_sends_ask_and_introduce_themselves_once() -> None:
    async with Peers("a") as peers, Producer(peers.address, group="g") as producer:
        await asyncio.gather(*(producer.send(Message("t", b"x")) for _ in range(50)))
        assert peers.asked_for_routes == 1
        assert len(peers["a"].lines) == 1
        assert len(peers["a"].asked(RequestCode.HEART_BEAT)) == 1


async def test_routes_are_refreshed_and_brokers_hear_from_us_in_the_background() -> None:
    async with Peers("a", "b") as peers:
        peers["b"].is_listed = False
        async with Producer(peers.address, group="g", heartbeat_s=0.05) as producer:
            await producer.send(Message("t", b"x"))
            peers["b"].is_listed = True
            beats = len(peers["a"].asked(RequestCode.HEART_BEAT))
            await until(lambda: len(peers["a"].asked(RequestCode.HEART_BEAT)) > beats + 1)
            assert {queue.broker for queue in await producer.queues("t")} == {"a", "b"}
            peers.is_silent = True  # the old route serves on
            await producer.send(Message("t", b"x"))


async def test_a_sharding_key_keeps_its_queue_while_the_route_stays() -> None:
    async with Peers("a", "b") as peers, Producer(peers.address, group="g", retries=2) as producer:
        message = Message("t", b"x", sharding_key="customer-7")
        first = (await producer.send(message)).queue
        owner = peers[first.broker]
        owner.answers[SEND] = refusing(ResponseCode.SYSTEM_BUSY)
        with pytest.raises(RequestRefused):  # never another queue: order is worth more
            await producer.send(message)
        del owner.answers[SEND]
        assert (await producer.send(message)).queue == first
        owner.is_listed = False  # its broker is gone for good: the rest share the keys out anew
        await producer._routes.refresh()
        moved = (await producer.send(message)).queue
        assert moved.broker != first.broker
        owner.is_listed = True
        await producer._routes.refresh()
        assert (await producer.send(message)).queue == first


@pytest.mark.parametrize("key", ["a", "customer-7", "polygenelubricants", "中文", "-"])
def test_a_key_goes_where_a_java_client_sends_it(key: str) -> None:
    queues = tuple(MessageQueue("t", "a", number) for number in range(7))
    value = java_hash(key)
    expected = abs(value) % 7 if value != -(2**31) else 2
    assert queue_for_key(key, Route("t", queues, queues, {}, {})).queue_id == expected


def test_a_key_of_a_topic_to_be_made_goes_to_one_broker() -> None:
    queues = tuple(MessageQueue("t", broker, number) for broker in "ab" for number in range(4))
    made = queue_for_key("k", Route("t", queues, queues, {}, {}, is_template=True))
    there = queue_for_key("k", Route("t", queues[:4], queues[:4], {}, {}))
    assert made == there


async def test_a_selector_chooses_and_must_choose_one_of_them() -> None:
    seen: list[Sequence[MessageQueue]] = []

    def last(queues: Sequence[MessageQueue], message: Message) -> MessageQueue:
        seen.append(queues)
        return queues[-1]

    async with Peers("a", "b") as peers, Producer(peers.address, group="g") as producer:
        result = await producer.send(Message("t", b"x"), queue=last)
        assert (result.queue.broker, result.queue.queue_id) == ("b", 3)
        assert len(seen[0]) == 8
        with pytest.raises(LocalProtocolError, match="no writable queue 9 on broker a"):
            await producer.send(Message("t", b"x"), queue=MessageQueue("t", "a", 9))


async def test_a_batch_that_breaks_says_what_is_stored() -> None:
    async with Peers("a") as peers:
        options = {"batch_bytes_max": 200, "retries": 0}
        async with Producer(peers.address, group="g", **options) as producer:  # type: ignore[arg-type]
            stored = iter([True, False])
            peers["a"].answers[RequestCode.SEND_BATCH_MESSAGE] = lambda request: (
                peers["a"].sent(request)
                if next(stored)
                else refusing(ResponseCode.MESSAGE_ILLEGAL)(request)
            )
            with pytest.raises(PartialSend) as partly:
                await producer.send_batch([Message("t", b"x" * 100) for _ in range(3)])
        assert len(partly.value.results) == 1
        assert isinstance(partly.value.cause, RequestRefused)


async def test_who_has_a_checker_is_known_to_all_brokers_and_again_when_one_comes_back() -> None:
    async with Peers("a", "b") as peers, Producer(peers.address, group="g") as producer:
        producer.checker(name="n")(lambda message: None)
        await until(lambda: all(peers[name].asked(RequestCode.HEART_BEAT) for name in "ab"))
        peers["b"].lines[0].abort()
        await until(lambda: len(peers["b"].asked(RequestCode.HEART_BEAT)) == 2)


async def test_heartbeats_go_on_though_one_broker_is_not_there() -> None:
    async with Peers("a", "b") as peers:
        peers["b"].address = "127.0.0.1:1"
        async with Producer(peers.address, group="g", heartbeat_s=0.05) as producer:
            producer.checker("*")(lambda message: None)
            await until(lambda: len(peers["a"].asked(RequestCode.HEART_BEAT)) > 3)


async def test_a_closed_client_says_so() -> None:
    async with Peers("a") as peers:
        async with Producer(peers.address, group="g") as producer:
            await producer.send(Message("t", b"x"))
        with pytest.raises(ClientClosed) as closed:
            await producer.send(Message("t", b"x"))
        assert not closed.value.retriable


async def test_the_sends_of_one_turn_leave_together() -> None:
    async with Peers("a") as peers, Producer(peers.address, group="g") as producer:
        await producer.send(Message("t", b"x"))
        line = producer._heartbeat.ready_connection(peers["a"].address)
        assert line is not None
        sending = [asyncio.ensure_future(producer.send(Message("t", b"x"))) for _ in range(20)]
        await asyncio.sleep(0)
        assert len(line._outgoing) == 19  # the first did not wait for the others
        await asyncio.gather(*sending)
        assert not line._outgoing
