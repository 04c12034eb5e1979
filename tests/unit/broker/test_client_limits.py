"""What the broker keeps of a client's requests: names of a sane length, and no buffers."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest

from escrowmq.broker.statistics import (
    OTHER_TRAFFIC,
    TRAFFIC_PAIRS_MAX,
    BrokerCounters,
    Statistics,
)
from escrowmq.client_memory import ClientMemory, MemoryLimits, MemoryUse
from escrowmq.config import BrokerConfig, Config, ConsumeConfig, OverloadConfig
from escrowmq.remoting.codes import JSON, RequestCode, ResponseCode
from escrowmq.remoting.headers import NoFields, UpdateConsumerOffset
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


# --- names that are created automatically --------------------------------------------------------


def test_topics_are_created_automatically_up_to_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    config = Config(store=TINY, broker=BrokerConfig(auto_topics_max=20))
    bench = BrokerBench(config=config)
    responses = bench.turn(*(send_request(topic=f"made-up-{number}") for number in range(40)))
    stored = [response.code for response in responses].count(ResponseCode.SUCCESS)
    assert 0 < stored <= 20
    refused = [response for response in responses if response.code != ResponseCode.SUCCESS]
    assert {response.code for response in refused} == {ResponseCode.TOPIC_NOT_EXIST}
    assert all("escrowAutoTopicsMax=20" in response.remark for response in refused)
    assert bench.broker.topics.find("made-up-39") is None
    assert bench.broker.topics.refused_creations == 40 - stored
    assert 0 < caplog.text.count("topic not created") <= 10
    bench.broker.topics.ensure("by-hand", queue_count=1, now_ms=NOW_MS)
    assert bench.turn(send_request(topic="by-hand"))[0].code == ResponseCode.SUCCESS


def test_the_limit_of_topics_can_be_raised_at_run_time() -> None:
    broker_config = BrokerConfig(auto_topics_max=0)
    bench = BrokerBench(config=Config(store=TINY, broker=broker_config))
    assert bench.turn(send_request())[0].code == ResponseCode.TOPIC_NOT_EXIST
    bench.broker.change_config(Config(store=TINY))
    assert bench.turn(send_request())[0].code == ResponseCode.SUCCESS


def test_groups_are_created_automatically_up_to_a_limit() -> None:
    config = Config(store=TINY, broker=BrokerConfig(auto_groups_max=20))
    bench, channel = BrokerBench(config=config), FakeChannel("127.0.0.1:1")
    bench.turn(send_request())
    assert heartbeat(channel, bench, "c", [f"g{number}" for number in range(40)]).code == 0
    groups = bench.broker.groups.configs()
    assert len(groups) == 20
    retry_topics = [name for name in bench.broker.topics.configs() if name.startswith("%RETRY%")]
    assert len(retry_topics) <= 20
    assert len(bench.broker.consumers.names()) <= 20
    assert bench.broker.groups.refused_creations > 0
    [pull] = bench.turn(pull_request(consumer_group="g39"))
    assert pull.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert "escrowAutoGroupsMax=20" in pull.remark
    assert "escrowAutoGroupsMax" not in bench.turn(pull_request(consumer_group="a b"))[0].remark
    existing = next(group for group in groups if group.startswith("g"))
    assert heartbeat(channel, bench, "c2", [existing]).code == 0


def commit_offset(bench: BrokerBench, group: str, queue_id: int, offset: int = 1) -> Response:
    fields = UpdateConsumerOffset(
        consumer_group=group, topic="T", queue_id=queue_id, commit_offset=offset
    )
    [response] = bench.turn(new_request(RequestCode.UPDATE_CONSUMER_OFFSET, fields))
    return response


def test_offsets_are_stored_up_to_a_limit_and_existing_ones_still_change() -> None:
    bench = BrokerBench()
    bench.turn(send_request())
    for group in ("g", "h"):
        bench.broker.groups.get_or_create(group, now_ms=NOW_MS)
    assert commit_offset(bench, "g", 0).code == ResponseCode.SUCCESS
    bench.broker.offsets.offsets_max = len(bench.broker.offsets)
    refused = commit_offset(bench, "h", 0)
    assert refused.code == ResponseCode.SYSTEM_BUSY
    assert "escrowOffsetsMax" in refused.remark
    assert commit_offset(bench, "g", 0, 7).code == ResponseCode.SUCCESS
    assert bench.broker.offsets.query("T", "g", 0) == 7
    # A pull that commits gets its messages all the same.
    [pull] = bench.turn(pull_request(sys_flag=5, consumer_group="h", commit_offset=1))
    assert pull.code == ResponseCode.SUCCESS
    assert bench.broker.offsets.query("T", "h", 0) is None
    assert bench.broker.offsets.refused == 2


def test_traffic_is_counted_for_a_limited_number_of_topics_and_groups() -> None:
    counters = BrokerCounters()
    for number in range(TRAFFIC_PAIRS_MAX + 100):
        counters.record_pull("T", f"g{number}", 1, 10)
    assert len(counters.messages_out) == TRAFFIC_PAIRS_MAX + 1
    assert counters.messages_out[OTHER_TRAFFIC, OTHER_TRAFFIC] == [100, 1_000]
    assert counters.fetched_messages == TRAFFIC_PAIRS_MAX + 100


def test_samples_of_topics_without_traffic_take_no_memory() -> None:
    counters = BrokerCounters()
    counters.record_message("T", "normal", 10)
    counters.record_pull("T", "g", 1, 10)
    statistics = Statistics(counters, now_ms=NOW_MS)
    first = statistics.take_sample(NOW_MS)
    second = statistics.take_sample(NOW_MS + 1)
    assert second.traffic_in is first.traffic_in
    assert second.traffic_out is first.traffic_out
    counters.record_message("U", "normal", 10)
    third = statistics.take_sample(NOW_MS + 2)
    assert third.traffic_in == {"T": (1, 10), "U": (1, 10)}
    assert third.traffic_in["T"] is first.traffic_in["T"]
