"""The broker as a whole, on disks that fail: nothing is lost, and things happen in order."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from escrowmq.broker.broker import Broker
from escrowmq.config import Config
from escrowmq.message.keys import UniqueKeyGenerator
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import ConsumerSendMessageBack, QueueHeader, UpdateConsumerOffset
from escrowmq.remoting.headers_admin import CreateTopic
from escrowmq.store.config_files import GroupConfig
from escrowmq.store.store import MessageStore
from escrowmq.testing.disks import FaultyDisk, MemoryDisk
from tests.interop.remoting import Response
from tests.support.broker_requests import FakeChannel, a_pull, a_send, ask, bodies
from tests.support.stores import HOST, NOW_MS, TINY, assert_clean, open_store


class Bench:
    def __init__(self, disk: MemoryDisk | None = None) -> None:
        self.disk = disk or FaultyDisk()
        self.store = open_store(self.disk)
        self.broker = Broker(
            self.disk,
            self.store,
            Config(store=TINY),
            UniqueKeyGenerator(address="127.0.0.1", process_id=1, salt=2),
            store_host=HOST,
        )
        self.channel = FakeChannel()

    def turn(self, *requests: Any, at_ms: int = NOW_MS) -> list[Response]:
        for request in requests:
            self.broker.handle(self.channel, request, at_ms)
        self.broker.end_turn(at_ms)
        return self.channel.answers()

    def tick(self, at_ms: int) -> None:
        self.broker.tick(at_ms)
        self.broker.end_turn(at_ms)

    def after_power_cut(self) -> Bench:
        assert isinstance(self.disk, FaultyDisk)
        return Bench(self.disk.power_cut(Random(0), "none"))


DELAYED = [
    pytest.param({"properties": "DELAY\x011\x02"}, id="level"),
    pytest.param({"properties": "TIMER_DELAY_MS\x011000\x02"}, id="timer"),
]


@pytest.mark.parametrize("delayed", DELAYED)
def test_a_delayed_message_is_delivered_once_the_full_store_has_room_again(
    delayed: dict[str, str],
) -> None:
    bench = Bench()
    bench.turn(a_send(body=b"late", **delayed))
    bench.store.has_disk_space = False  # the disk is full, for a while
    bench.tick(NOW_MS + 1000)
    bench.store.has_disk_space = True
    bench.tick(NOW_MS + 2000)
    assert bodies(bench.store, "T") == [b"late"]


@pytest.mark.parametrize("delayed", DELAYED)
@pytest.mark.parametrize("saved", [False, True], ids=["before a save", "after a save"])
def test_a_power_cut_does_not_lose_a_delayed_message(delayed: dict[str, str], saved: bool) -> None:
    """Saved progress must not be ahead of what is durable in the log."""
    bench = Bench()
    bench.turn(a_send(body=b"late", **delayed))
    bench.store.checkpoint()
    bench.tick(NOW_MS + 1000)
    assert bodies(bench.store, "T") == [b"late"]
    if saved:
        bench.broker.save()
    again = bench.after_power_cut()
    again.tick(NOW_MS + 5000)
    assert b"late" in bodies(again.store, "T")


@pytest.mark.parametrize("delayed", DELAYED)
def test_a_save_between_tick_and_turn_does_not_lose_a_delayed_message(
    delayed: dict[str, str],
) -> None:
    """The server saves in another task, which may run at that moment, and is then killed."""
    bench = Bench()
    bench.turn(a_send(body=b"late", **delayed))
    bench.broker.tick(NOW_MS + 1000)
    bench.broker.save()
    bench.store.abandon()
    again = Bench(bench.disk)
    again.tick(NOW_MS + 5000)
    assert b"late" in bodies(again.store, "T")


def topic_saves(disk: MemoryDisk) -> int:
    assert isinstance(disk, FaultyDisk)
    return disk.trace.count("rename config/topics.json.tmp config/topics.json")


def a_topic(name: str) -> Any:
    fields = CreateTopic(
        topic=name, default_topic="TBW102", read_queue_nums=1, write_queue_nums=1, perm=6
    )
    return ask(RequestCode.UPDATE_AND_CREATE_TOPIC, fields)


def test_the_topics_of_a_turn_are_saved_together_and_before_the_responses() -> None:
    """One save per topic would rewrite the file ten thousand times for ten thousand topics."""
    bench = Bench()
    bench.turn()
    before = topic_saves(bench.disk)
    created = [a_topic(f"created-{number}") for number in range(100)]
    made = [a_send(f"made-{number}") for number in range(100)]
    for request in (*created, *made):
        bench.broker.handle(bench.channel, request, NOW_MS)
    assert topic_saves(bench.disk) == before  # nor is anything written that leaves before the end
    bench.broker.end_turn(NOW_MS)
    assert topic_saves(bench.disk) == before + 1
    assert [answer.code for answer in bench.channel.answers()] == [0] * 200
    again = bench.after_power_cut()
    assert {f"{how}-99" for how in ("created", "made")} <= again.broker.topics.configs().keys()
    bench.turn(a_topic("created-0"))
    assert topic_saves(bench.disk) == before + 1  # it is as it was


def test_delays_and_offsets_are_saved_separately() -> None:
    bench = Bench()
    bench.turn(a_send(properties="DELAY\x011\x02"))
    bench.broker.groups.put(GroupConfig(group_name="g"), now_ms=NOW_MS)
    commit = UpdateConsumerOffset(consumer_group="g", topic="T", queue_id=0, commit_offset=1)
    bench.turn(ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit))
    bench.tick(NOW_MS + 1000)
    bench.store.flush()
    bench.broker.save_offsets()
    assert bench.disk.exists("config/consumerOffset.json")
    assert not bench.disk.exists("config/delayOffset.json")
    bench.broker.save_delayed_messages()
    assert bench.disk.exists("config/delayOffset.json")


def test_sending_back_to_a_full_store_is_not_acknowledged() -> None:
    bench = Bench()
    bench.broker.groups.put(GroupConfig(group_name="g"), now_ms=NOW_MS)
    bench.turn(a_send())
    bench.store.has_disk_space = False
    fields = ConsumerSendMessageBack(offset=0, group="g", delay_level=1)
    [answer] = bench.turn(ask(RequestCode.CONSUMER_SEND_MSG_BACK, fields))
    assert answer.code != 0


def test_a_send_to_a_full_store_is_refused_and_the_next_one_is_accepted() -> None:
    bench = Bench()
    bench.store.has_disk_space = False
    [answer] = bench.turn(a_send(body=b"1"))
    assert answer.code == 14
    bench.store.has_disk_space = True
    [answer] = bench.turn(a_send(body=b"2"))
    assert answer.code == 0
    assert bodies(bench.store, "T") == [b"2"]


class BrokenStore(MessageStore):
    """A store with a bug."""

    def append(self, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a bug")


def test_after_a_bug_at_the_end_of_a_turn_every_send_gets_a_response() -> None:
    """Without a response, the clients of that turn would wait until their timeout."""
    bench = Bench()
    bench.store.__class__ = BrokenStore
    bench.broker.handle(bench.channel, a_send(), NOW_MS)
    bench.broker.end_turn(NOW_MS)
    assert bench.channel.answer().code == 1


def test_a_held_pull_gets_its_response_in_the_turn_of_the_send() -> None:
    bench = Bench()
    bench.broker.topics.ensure("T", queue_count=4, now_ms=NOW_MS)
    reader = FakeChannel("reader")
    bench.broker.handle(reader, a_pull(), NOW_MS)
    bench.turn(a_send(body=b"1"))
    assert reader.answer().code == 0


def test_a_held_pull_gets_a_delayed_message() -> None:
    bench = Bench()
    bench.broker.topics.ensure("T", queue_count=4, now_ms=NOW_MS)
    reader = FakeChannel("reader")
    bench.broker.handle(reader, a_pull(suspend_timeout_millis=60_000), NOW_MS)
    bench.turn(a_send(properties="DELAY\x011\x02"))
    bench.tick(NOW_MS + 999)
    assert reader.answers() == []
    bench.tick(NOW_MS + 1000)
    assert reader.answer().code == 0


def test_saved_tables_are_loaded_after_a_restart() -> None:
    bench = Bench(MemoryDisk())
    bench.turn(a_send("orders"))
    bench.broker.groups.put(GroupConfig(group_name="g", retry_max_times=2), now_ms=NOW_MS)
    commit = UpdateConsumerOffset(
        consumer_group="g", topic="orders", queue_id=1, commit_offset=2**62
    )
    bench.turn(ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit))
    bench.broker.save()
    bench.store.close()
    again = Bench(bench.disk)
    assert again.broker.topics.find("orders") is not None
    group = again.broker.groups.find("g")
    assert group is not None
    assert group.retry_max_times == 2
    assert again.broker.offsets.query("orders", "g", 1) == 2**62
    again.store.close()
    assert_clean(bench.disk)


@pytest.mark.parametrize("code", [RequestCode.GET_MAX_OFFSET, RequestCode.GET_MIN_OFFSET])
@pytest.mark.parametrize("queue_id", [-1, 2**31 - 1])
def test_a_query_of_a_queue_that_does_not_exist_creates_none(code: int, queue_id: int) -> None:
    bench = Bench()
    [answer] = bench.turn(ask(code, QueueHeader(topic="../x", queue_id=queue_id)))
    assert answer.ext_fields.get("offset", "0") == "0"
    assert not bench.disk.exists("consumequeue")


def test_a_send_to_a_topic_that_could_not_be_saved_is_refused() -> None:
    bench = Bench()
    bench.turn(a_send("known"))  # the broker's own topics are saved with it
    assert isinstance(bench.disk, FaultyDisk)
    bench.disk.fail_from = bench.disk.calls + 1
    [refused] = bench.turn(a_send("new"))
    assert refused.code != 0
    assert bench.store.max_offset("new", 0) == 0
    bench.disk.fail_from = None
    [taken] = bench.turn(a_send("new", body=b"again"))
    assert taken.code == 0
    again = bench.after_power_cut()
    assert again.broker.topics.find("new") is not None
