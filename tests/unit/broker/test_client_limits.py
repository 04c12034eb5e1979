"""What the broker keeps of a client's requests: names of a sane length, and no buffers."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest

from escrowmq.client_memory import ClientMemory, MemoryLimits, MemoryUse
from escrowmq.config import Config, ConsumeConfig, OverloadConfig
from escrowmq.remoting.codes import JSON, RequestCode, ResponseCode
from escrowmq.remoting.headers import NoFields
from escrowmq.remoting.requests import Request
from tests.interop.remoting import Response
from tests.support.broker_bench import BrokerBench
from tests.support.broker_requests import (
    FakeChannel,
    new_request,
    pull_request,
    send_request,
)
from tests.support.greedy import heartbeat_body, lock_body
from tests.support.stores import NOW_MS, TINY

LONG = "x" * 256


def heartbeat(channel: FakeChannel, bench: BrokerBench, *args: Any, **kwargs: Any) -> Response:
    body = heartbeat_body(*args, **kwargs)
    request = new_request(RequestCode.HEART_BEAT, NoFields(), body)
    [response] = bench.turn(request, channel=channel)
    return response


def lock(bench: BrokerBench, group: str, client_id: str, *queues: tuple[str, int]) -> Response:
    body = lock_body(group, client_id, queues)
    [response] = bench.turn(new_request(RequestCode.LOCK_BATCH_MQ, NoFields(), body))
    return response


def test_names_that_are_too_long_are_refused_with_the_limit() -> None:
    bench, channel = BrokerBench(), FakeChannel()
    bench.turn(send_request())
    responses = [
        heartbeat(channel, bench, LONG, ["g"]),
        heartbeat(channel, bench, "c", [LONG]),
        heartbeat(channel, bench, "c", producer_groups=[LONG]),
        lock(bench, "g", LONG, ("T", 0)),
    ]
    assert [response.code for response in responses] == [ResponseCode.INVALID_PARAMETER] * 4
    assert all("the limit is 255 bytes" in response.remark for response in responses)
    assert not bench.broker.consumers.names()
    assert not bench.broker.producers.names()


def test_a_subscription_to_a_topic_with_a_long_name_is_not_kept() -> None:
    bench, channel = BrokerBench(), FakeChannel()
    subscriptions = [{"topic": LONG}, {"topic": "T"}]
    assert heartbeat(channel, bench, "c", ["g"], subscriptions=subscriptions).code == 0
    assert bench.broker.consumers.subscription("g", "T") is not None
    assert bench.broker.consumers.subscription("g", LONG) is None


def test_a_long_body_is_refused_before_it_is_decoded() -> None:
    request = new_request(RequestCode.HEART_BEAT, NoFields(), b"[" * (1 << 20) + b"[")
    [response] = BrokerBench().turn(request)
    assert response.code == ResponseCode.INVALID_PARAMETER
    assert "the body has 1048577 bytes, the limit for HEART_BEAT is 1048576" in response.remark


def test_only_queues_that_exist_can_be_locked() -> None:
    bench = BrokerBench()
    bench.turn(send_request())
    queues = [("T", 0), ("T", 99), ("T", -1), *((f"made-up-{number}", 0) for number in range(100))]
    granted = json.loads(lock(bench, "g", "c", *queues).body)["lockOKMQSet"]
    assert [(queue["topic"], queue["queueId"]) for queue in granted] == [("T", 0)]


def with_buffer(request: Request[Any], body: bytes) -> tuple[Request[Any], bytearray]:
    """Return the request with a body that is a view of a longer buffer, as a connection has it."""
    buffer = bytearray(body) + bytes(1000)
    return Request(request.head, memoryview(buffer)[: len(body)], JSON), buffer


def assert_not_in_use(buffer: bytearray) -> None:
    buffer.append(0)  # raises BufferError if a view of the buffer exists


def test_a_held_pull_does_not_keep_the_buffer_of_its_request() -> None:
    bench = BrokerBench()
    bench.turn(send_request())
    request, buffer = with_buffer(pull_request(queue_offset=1), b"x" * 1000)
    assert bench.turn(request) == []
    del request
    assert bench.broker.pull_processor.held_count == 1
    assert_not_in_use(buffer)


@pytest.mark.parametrize("properties", ["", "TRAN_MSG\x01true\x02PGROUP\x01p\x02UNIQ_KEY\x01k\x02"])
def test_a_send_that_waits_for_the_flush_does_not_keep_its_buffer(properties: str) -> None:
    bench = BrokerBench(sync=True)
    request, buffer = with_buffer(send_request(properties=properties), b"x" * 1_500)
    channel = FakeChannel()
    assert bench.turn(request, channel=channel) == []
    del request
    assert_not_in_use(buffer)
    for callback in bench.flush_callbacks:
        callback(None)
    assert channel.response().code == 0


def test_a_refused_send_leaves_nothing_in_flow_control() -> None:
    config = Config(store=TINY, overload=OverloadConfig(topic_sends_max=5))
    bench = BrokerBench(config=config)
    bench.turn(*(send_request(topic=f"no such topic {number}") for number in range(10)))
    # Private: the size of the table is what this is about.
    assert not bench.broker.flow_control._buckets
    bench.turn(send_request())
    assert len(bench.broker.flow_control._buckets) == 1  # private, as above


def test_a_transactional_message_with_a_long_producer_group_is_refused() -> None:
    properties = f"TRAN_MSG\x01true\x02PGROUP\x01{LONG}\x02UNIQ_KEY\x01k\x02"
    [response] = BrokerBench().turn(send_request(properties=properties))
    assert response.code == ResponseCode.MESSAGE_ILLEGAL
    assert "the limit is 255 bytes" in response.remark


# --- greedy channels -----------------------------------------------------------------------------


def test_a_full_table_of_pulls_makes_room_for_a_channel_with_few() -> None:
    bench = BrokerBench(config=Config(store=TINY, consume=ConsumeConfig(waiting_pulls_max=10)))
    bench.turn(send_request())
    greedy, honest = FakeChannel("127.0.0.1:1"), FakeChannel("127.0.0.1:2")
    bench.turn(*(pull_request(queue_offset=1) for _ in range(12)), channel=greedy)
    assert bench.broker.pull_processor.held_count == 10
    assert bench.turn(pull_request(queue_offset=1), channel=honest) == []
    [evicted] = greedy.responses()
    assert evicted.code == ResponseCode.PULL_NOT_FOUND
    bench.turn(send_request())
    assert honest.response().code == ResponseCode.SUCCESS


def test_a_message_wakes_very_many_pulls_over_several_turns() -> None:
    ticks = count()
    bench = BrokerBench(elapsed_s=lambda: next(ticks) * 1e-5)  # every look at it takes 10 us
    bench.turn(send_request())
    channel = FakeChannel("127.0.0.1:1")
    bench.turn(*(pull_request(queue_offset=1) for _ in range(2_000)), channel=channel)
    bench.turn(send_request())
    responses = channel.responses()
    assert 0 < len(responses) < 2_000
    turns = 1
    while bench.broker.end_turn(NOW_MS):
        turns += 1
    responses += channel.responses()
    assert [response.code for response in responses] == [0] * 2_000
    assert turns > 1


def test_a_pull_of_a_client_that_does_not_read_gets_no_messages() -> None:
    bench = BrokerBench()
    bench.turn(send_request())
    channel = FakeChannel("127.0.0.1:1")
    bench.turn(pull_request(queue_offset=1), channel=channel)
    channel.can_send = False
    bench.turn(send_request())
    response = channel.response()
    assert (response.code, response.body) == (ResponseCode.PULL_NOT_FOUND, b"")


def test_what_is_kept_for_a_channel_is_counted_and_released() -> None:
    memory = ClientMemory(MemoryLimits(connection_max=100_000, hard_max=1 << 30))
    bench = BrokerBench(memory=memory)
    bench.turn(send_request())
    channel = FakeChannel("127.0.0.1:1")
    bench.turn(pull_request(queue_offset=1), channel=channel)
    assert heartbeat(channel, bench, "c", ["g"], producer_groups=["p"]).code == 0
    assert {use for use, _ in memory.uses_of(channel)} == {
        MemoryUse.HELD_PULLS,
        MemoryUse.MEMBERS,
        MemoryUse.SUBSCRIPTIONS,
    }
    groups = [f"g{number}" for number in range(1_000)]
    response = heartbeat(channel, bench, "c", producer_groups=groups)
    assert response.code == ResponseCode.SYSTEM_BUSY
    assert "escrowConnectionInFlightBytesMax" in response.remark
    bench.broker.channel_closed(channel)
    assert memory.total == 0
