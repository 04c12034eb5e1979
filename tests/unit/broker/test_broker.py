"""The broker as a whole, on disks that fail: nothing is lost, and responses come in order."""

from __future__ import annotations

from typing import Any

import pytest

from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import ConsumerSendMessageBack, QueueHeader, UpdateConsumerOffset
from escrowmq.remoting.headers_admin import CreateTopic
from escrowmq.store.config_files import GroupConfig
from escrowmq.store.store import MessageStore
from escrowmq.testing.disks import FaultyDisk, MemoryDisk
from tests.support.broker_bench import BrokerBench
from tests.support.broker_requests import (
    FakeChannel,
    bodies,
    new_request,
    pull_request,
    send_request,
)
from tests.support.stores import NOW_MS, assert_clean

DELAYED = [
    pytest.param({"properties": "DELAY\x011\x02"}, id="level"),
    pytest.param({"properties": "TIMER_DELAY_MS\x011000\x02"}, id="timer"),
]


@pytest.mark.parametrize("delayed", DELAYED)
def test_a_delayed_message_is_delivered_once_the_full_store_has_room_again(
    delayed: dict[str, str],
) -> None:
    bench = BrokerBench()
    bench.turn(send_request(body=b"late", **delayed))
    bench.store.has_disk_space = False
    bench.tick(NOW_MS + 1000)
    bench.store.has_disk_space = True
    bench.tick(NOW_MS + 2000)
    assert bodies(bench.store, "T") == [b"late"]


@pytest.mark.parametrize("delayed", DELAYED)
@pytest.mark.parametrize("saved", [False, True], ids=["before a save", "after a save"])
def test_a_power_cut_does_not_lose_a_delayed_message(delayed: dict[str, str], saved: bool) -> None:
    """The saved progress must not be ahead of the durable part of the log."""
    bench = BrokerBench()
    bench.turn(send_request(body=b"late", **delayed))
    bench.store.checkpoint()
    bench.tick(NOW_MS + 1000)
    assert bodies(bench.store, "T") == [b"late"]
    if saved:
        bench.broker.save()
    restarted = bench.after_power_cut()
    restarted.tick(NOW_MS + 5000)
    assert b"late" in bodies(restarted.store, "T")


@pytest.mark.parametrize("delayed", DELAYED)
def test_a_save_between_tick_and_turn_does_not_lose_a_delayed_message(
    delayed: dict[str, str],
) -> None:
    """The server saves in another task, which may run between the two, and may then be killed."""
    bench = BrokerBench()
    bench.turn(send_request(body=b"late", **delayed))
    bench.broker.tick(NOW_MS + 1000)
    bench.broker.save()
    bench.store.abandon()
    restarted = BrokerBench(bench.disk)
    restarted.tick(NOW_MS + 5000)
    assert b"late" in bodies(restarted.store, "T")


def topic_saves(disk: MemoryDisk) -> int:
    """Return how often the file of the topics was replaced."""
    assert isinstance(disk, FaultyDisk)
    return disk.trace.count("rename config/topics.json.tmp config/topics.json")


def create_topic_request(name: str) -> Any:
    fields = CreateTopic(
        topic=name, default_topic="TBW102", read_queue_nums=1, write_queue_nums=1, perm=6
    )
    return new_request(RequestCode.UPDATE_AND_CREATE_TOPIC, fields)


def test_the_topics_of_a_turn_are_saved_together_and_before_the_responses() -> None:
    """One save per topic would rewrite the file ten thousand times for ten thousand topics."""
    bench = BrokerBench()
    bench.turn()
    before = topic_saves(bench.disk)
    creations = [create_topic_request(f"created-{number}") for number in range(100)]
    sends = [send_request(f"sent-to-{number}") for number in range(100)]
    for request in (*creations, *sends):
        bench.broker.handle(bench.channel, request, NOW_MS)
    assert topic_saves(bench.disk) == before
    bench.broker.end_turn(NOW_MS)
    assert topic_saves(bench.disk) == before + 1
    assert [response.code for response in bench.channel.responses()] == [0] * 200
    restarted = bench.after_power_cut()
    assert {"created-99", "sent-to-99"} <= restarted.broker.topics.configs().keys()
    bench.turn(create_topic_request("created-0"))
    assert topic_saves(bench.disk) == before + 1  # the topic did not change


def test_delays_and_offsets_are_saved_separately() -> None:
    bench = BrokerBench()
    bench.turn(send_request(properties="DELAY\x011\x02"))
    bench.broker.groups.put(GroupConfig(group_name="g"), now_ms=NOW_MS)
    commit = UpdateConsumerOffset(consumer_group="g", topic="T", queue_id=0, commit_offset=1)
    bench.turn(new_request(RequestCode.UPDATE_CONSUMER_OFFSET, commit))
    bench.tick(NOW_MS + 1000)
    bench.store.flush()
    bench.broker.save_offsets()
    assert bench.disk.exists("config/consumerOffset.json")
    assert not bench.disk.exists("config/delayOffset.json")
    bench.broker.save_delayed_messages()
    assert bench.disk.exists("config/delayOffset.json")


def test_sending_back_to_a_full_store_is_not_acknowledged() -> None:
    bench = BrokerBench()
    bench.broker.groups.put(GroupConfig(group_name="g"), now_ms=NOW_MS)
    bench.turn(send_request())
    bench.store.has_disk_space = False
    fields = ConsumerSendMessageBack(offset=0, group="g", delay_level=1)
    [response] = bench.turn(new_request(RequestCode.CONSUMER_SEND_MSG_BACK, fields))
    assert response.code != 0


def test_a_send_to_a_full_store_is_refused_and_the_next_one_is_accepted() -> None:
    bench = BrokerBench()
    bench.store.has_disk_space = False
    [response] = bench.turn(send_request(body=b"1"))
    assert response.code == 14
    bench.store.has_disk_space = True
    [response] = bench.turn(send_request(body=b"2"))
    assert response.code == 0
    assert bodies(bench.store, "T") == [b"2"]


class BrokenStore(MessageStore):
    """A store with a bug."""

    def append(self, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a bug")


def test_after_a_bug_at_the_end_of_a_turn_every_send_gets_a_response() -> None:
    """Without a response, the clients of that turn would wait until their timeout."""
    bench = BrokerBench()
    bench.store.__class__ = BrokenStore
    bench.broker.handle(bench.channel, send_request(), NOW_MS)
    bench.broker.end_turn(NOW_MS)
    assert bench.channel.response().code == 1


def test_a_held_pull_gets_its_response_in_the_turn_of_the_send() -> None:
    bench = BrokerBench()
    bench.broker.topics.ensure("T", queue_count=4, now_ms=NOW_MS)
    reader = FakeChannel("reader")
    bench.broker.handle(reader, pull_request(), NOW_MS)
    bench.turn(send_request(body=b"1"))
    assert reader.response().code == 0


def test_a_held_pull_gets_a_delayed_message() -> None:
    bench = BrokerBench()
    bench.broker.topics.ensure("T", queue_count=4, now_ms=NOW_MS)
    reader = FakeChannel("reader")
    bench.broker.handle(reader, pull_request(suspend_timeout_millis=60_000), NOW_MS)
    bench.turn(send_request(properties="DELAY\x011\x02"))
    bench.tick(NOW_MS + 999)
    assert reader.responses() == []
    bench.tick(NOW_MS + 1000)
    assert reader.response().code == 0


def test_saved_tables_are_loaded_after_a_restart() -> None:
    bench = BrokerBench(MemoryDisk())
    bench.turn(send_request("orders"))
    bench.broker.groups.put(GroupConfig(group_name="g", retry_max_times=2), now_ms=NOW_MS)
    commit = UpdateConsumerOffset(
        consumer_group="g", topic="orders", queue_id=1, commit_offset=2**62
    )
    bench.turn(new_request(RequestCode.UPDATE_CONSUMER_OFFSET, commit))
    bench.broker.save()
    bench.store.close()
    restarted = BrokerBench(bench.disk)
    assert restarted.broker.topics.find("orders") is not None
    group = restarted.broker.groups.find("g")
    assert group is not None
    assert group.retry_max_times == 2
    assert restarted.broker.offsets.query("orders", "g", 1) == 2**62
    restarted.store.close()
    assert_clean(bench.disk)


@pytest.mark.parametrize("code", [RequestCode.GET_MAX_OFFSET, RequestCode.GET_MIN_OFFSET])
@pytest.mark.parametrize("queue_id", [-1, 2**31 - 1])
def test_a_query_of_a_queue_that_does_not_exist_creates_none(code: int, queue_id: int) -> None:
    bench = BrokerBench()
    [response] = bench.turn(new_request(code, QueueHeader(topic="../x", queue_id=queue_id)))
    assert response.ext_fields.get("offset", "0") == "0"
    assert not bench.disk.exists("consumequeue")


def test_a_send_to_a_topic_that_could_not_be_saved_is_refused() -> None:
    bench = BrokerBench()
    bench.turn(send_request("existing"))  # the system topics are saved with it
    assert isinstance(bench.disk, FaultyDisk)
    bench.disk.fail_from = bench.disk.calls + 1
    [refused] = bench.turn(send_request("new"))
    assert refused.code != 0
    assert bench.store.max_offset("new", 0) == 0
    bench.disk.fail_from = None
    [accepted] = bench.turn(send_request("new", body=b"repeated"))
    assert accepted.code == 0
    restarted = bench.after_power_cut()
    assert restarted.broker.topics.find("new") is not None
