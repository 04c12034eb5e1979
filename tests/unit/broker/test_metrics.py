"""Counters and metrics of a broker."""

from __future__ import annotations

import json
from typing import Any

from escrowmq.broker.broker import Broker
from escrowmq.broker.metrics import BrokerMetrics
from escrowmq.broker.statistics import BrokerCounters
from escrowmq.clock import ManualClock
from escrowmq.config import Config
from escrowmq.errors import FlushTimeout
from escrowmq.message.batch import BatchItem, encode_batch
from escrowmq.message.keys import UniqueKeyGenerator
from escrowmq.message.properties import encode_properties
from escrowmq.metrics import Registry
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import ConsumerSendMessageBack, NoFields
from escrowmq.remoting.headers_admin import TopicHeader
from escrowmq.testing.disks import MemoryDisk
from tests.support.broker_requests import FakeChannel, new_request, pull_request, send_request
from tests.support.scraping import Page, parse
from tests.support.stores import HOST, NOW_MS, TINY, open_store

UNIQUE = "UNIQ_KEY\x01AC\x02"  # without it a send takes the long way


class Bench:
    def __init__(self, *, sync: bool = False) -> None:
        disk = MemoryDisk()
        self.clock = ManualClock(NOW_MS)
        self.store = open_store(disk)
        self.waiting: list[Any] = []
        self.broker = Broker(
            disk,
            self.store,
            Config(store=TINY),
            UniqueKeyGenerator(address="127.0.0.1", process_id=1, salt=2),
            store_host=HOST,
            when_flushed=(lambda _, tell: self.waiting.append(tell)) if sync else None,
            counters=BrokerCounters(self.clock.elapsed_s),
        )
        self.channel = FakeChannel()
        self._registry = Registry()
        self._registry.add(BrokerMetrics(self.broker, self.clock.now_ms).collect)

    def turn(self, *requests: Any) -> None:
        for request in requests:
            self.broker.handle(self.channel, request, self.clock.now_ms())
        self.broker.end_turn(self.clock.now_ms())

    def page(self) -> Page:
        return parse("".join(self._registry.lines()))


def plain(topic: str, body: bytes = b"body", **changes: Any) -> Any:
    return send_request(topic, body, properties=UNIQUE, **changes)


def test_messages_are_counted_for_the_topic_they_were_sent_to() -> None:
    bench = Bench()
    bench.turn(plain("T"), send_request("T"), plain("U"))
    bench.turn(plain("T", queue_id=1))
    page = bench.page()
    came = "rocketmq_messages_in_total"
    assert page.value(came, topic="T", message_type="normal", is_system="false") == 3
    assert page.value(came, topic="U") == 1
    sizes = [record.size for record in bench.store.records() if record.topic == "T"]
    assert page.value("rocketmq_throughput_in_total", topic="T") == sum(sizes)
    assert page.value("rocketmq_message_size_count", topic="T") == 3
    assert page.value("rocketmq_message_size_sum", topic="T") == sum(sizes)
    assert page.value("rocketmq_message_size_bucket", topic="T", le="1024") == 3
    assert page.value("escrowmq_append_records_count") == 2
    assert page.value("escrowmq_append_records_sum") == 4


def test_long_messages_are_counted_in_another_bucket() -> None:
    bench = Bench()
    bench.turn(plain("T", b"x" * 2000), plain("T", b"x" * 2000), plain("T"))
    name = "rocketmq_message_size_bucket"
    assert bench.page().value(name, le="1024") == 1
    assert bench.page().value(name, le="4096") == 3


def test_each_message_of_a_batch_counts() -> None:
    bench = Bench()
    items = [BatchItem(flag=0, body=b"%d" % number, properties=b"") for number in range(5)]
    bench.turn(plain("T"), send_request("T", encode_batch(items), batch=True))
    assert bench.page().value("rocketmq_messages_in_total", topic="T") == 6


def test_a_delayed_message_is_counted_once_for_its_real_topic() -> None:
    bench = Bench()
    later = encode_properties({"UNIQ_KEY": "A", "DELAY": "1"}).decode()
    bench.turn(plain("T"), send_request("T", properties=later))
    bench.clock.advance(ms=60_000)
    bench.broker.tick(bench.clock.now_ms())
    bench.broker.end_turn(bench.clock.now_ms())
    assert bench.store.max_offset("T", 0) == 2
    page = bench.page()
    came = "rocketmq_messages_in_total"
    assert page.value(came, topic="T", message_type="delay") == 1
    assert page.value(came, topic="T", message_type="normal") == 1
    assert len(page.labels(came)) == 2


def test_pulled_messages_are_counted_by_topic_and_group() -> None:
    bench = Bench()
    bench.turn(plain("T"), plain("T"), plain("T"))
    bench.turn(pull_request("T", consumer_group="g"), pull_request("T", 2, consumer_group="h"))
    page = bench.page()
    went, size = "rocketmq_messages_out_total", "rocketmq_throughput_out_total"
    assert page.value(went, topic="T", consumer_group="g", is_retry="false") == 3
    assert page.value(went, topic="T", consumer_group="h") == 1
    assert page.value(size, consumer_group="g") == 3 * page.value(size, consumer_group="h") > 0


def test_a_held_pull_is_counted_when_it_gets_its_response() -> None:
    bench = Bench()
    bench.turn(plain("T"))
    bench.turn(pull_request("T", 1))
    assert bench.page().value("escrowmq_waiting_pulls") == 1
    assert bench.page().labels("rocketmq_messages_out_total") == []
    bench.turn(plain("T"))
    page = bench.page()
    assert page.value("escrowmq_waiting_pulls") == 0
    assert page.value("rocketmq_messages_out_total", consumer_group="g") == 1


def test_the_lag_of_a_group_follows_sends_commits_and_time() -> None:
    bench = Bench()
    lag, age = "rocketmq_consumer_lag_messages", "rocketmq_consumer_lag_latency"
    bench.turn(*(plain("T") for _ in range(3)))
    bench.turn(pull_request("T"))
    bench.broker.offsets.commit("T", "g", 0, 1)
    bench.clock.advance(ms=700)
    page = bench.page()
    assert page.value(lag, topic="T", consumer_group="g", is_retry="false") == 2
    assert page.value(age, topic="T", consumer_group="g") == 700
    bench.turn(plain("T"))
    assert bench.page().value(lag) == 3
    bench.broker.offsets.commit("T", "g", 0, 3)
    assert (bench.page().value(lag), bench.page().value(age)) == (1, 0)
    bench.broker.offsets.commit("T", "g", 0, 4)
    bench.clock.advance(ms=700)
    assert (bench.page().value(lag), bench.page().value(age)) == (0, 0)
    bench.broker.offsets.commit("T", "g", 0, 100)  # a client may say anything
    assert bench.page().value(lag) == 0


def test_a_deleted_topic_has_no_metrics() -> None:
    bench = Bench()
    bench.turn(plain("T"), plain("U"))
    bench.turn(pull_request("T"), pull_request("U"))
    bench.broker.offsets.commit("T", "g", 0, 0)
    bench.turn(new_request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicHeader(topic="T")))
    page = bench.page()
    topics = {labels["topic"] for _, labels, _ in page.samples if "topic" in labels}
    assert topics == {"U"}
    assert set(bench.broker.counters.messages_in) == {("U", "normal")}


def test_counters_of_deleted_topics_are_purged_without_a_scrape() -> None:
    bench = Bench()
    bench.turn(plain("T"))
    bench.turn(pull_request("T"))
    bench.turn(new_request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicHeader(topic="T")))
    bench.clock.advance(ms=60_000)
    bench.broker.tick(bench.clock.now_ms())
    assert not bench.broker.counters.messages_in
    assert not bench.broker.counters.messages_out


def test_requests_and_refusals_are_counted_by_code() -> None:
    bench = Bench()
    bench.turn(
        plain("T"),
        send_request("T", queue_id=99),
        send_request("T", queue_id=99),
        pull_request("none"),
    )
    page = bench.page()
    requests, refusals = "escrowmq_requests_total", "escrowmq_refusals_total"
    assert page.value(requests, request_code="send_message") == 3
    assert page.value(requests, request_code="pull_message") == 1
    wrong = {"request_code": "send_message", "response_code": "invalid_parameter"}
    assert page.value(refusals, **wrong) == 2
    assert page.value(refusals, request_code="pull_message", response_code="topic_not_exist") == 1
    assert page.value("rocketmq_messages_in_total") == 1


def test_send_seconds_are_measured_from_the_start_of_the_turn_to_the_response() -> None:
    bench = Bench(sync=True)
    began_s = bench.clock.elapsed_s()
    bench.broker.counters.turn_start_s = lambda: began_s
    bench.turn(plain("T"), plain("T"))
    assert bench.page().value("escrowmq_send_seconds_count") == 0
    bench.clock.advance(ms=30)
    bench.waiting.pop()(None)
    page = bench.page()
    assert page.value("escrowmq_send_seconds_count") == 2
    assert page.value("escrowmq_send_seconds_bucket", le="0.025") == 0
    assert page.value("escrowmq_send_seconds_bucket", le="0.05") == 2


def test_a_send_that_was_not_flushed_in_time_counts_as_refused() -> None:
    bench = Bench(sync=True)
    bench.turn(plain("T"))
    bench.waiting.pop()(FlushTimeout("not flushed in time"))
    refusals = bench.page().value("escrowmq_refusals_total", response_code="flush_disk_timeout")
    assert refusals == 1


def test_connections_are_counted_by_group() -> None:
    bench = Bench()
    beat = {
        "clientID": "c",
        "producerDataSet": [{"groupName": "p"}],
        "consumerDataSet": [{"groupName": "g", "consumeType": "CONSUME_PASSIVELY"}],
    }
    bench.turn(new_request(RequestCode.HEART_BEAT, NoFields(), json.dumps(beat).encode()))
    page = bench.page()
    assert page.value("rocketmq_producer_connections") == 1
    connected = "rocketmq_consumer_connections"
    assert page.value(connected, consumer_group="g", consume_mode="push") == 1
    bench.broker.channel_closed(bench.channel)
    assert bench.page().value("rocketmq_producer_connections") == 0
    assert bench.page().labels(connected) == []


def test_dead_letters_are_counted_by_group() -> None:
    bench = Bench()
    bench.turn(plain("T"))
    bench.turn(pull_request("T"))
    fields = ConsumerSendMessageBack(offset=0, group="g", delay_level=-1, origin_topic="T")
    bench.turn(new_request(RequestCode.CONSUMER_SEND_MSG_BACK, fields))
    dead = "rocketmq_send_to_dlq_messages_total"
    assert bench.page().value(dead, consumer_group="g") == 1


def test_log_offsets_and_unflushed_bytes_are_shown() -> None:
    bench = Bench()
    bench.turn(plain("T"))
    page = bench.page()
    end = page.value("escrowmq_log_end_bytes")
    assert end == bench.store.end > 0
    assert page.value("rocketmq_storage_flush_behind_bytes", storage_type="local") == end
    bench.clock.advance(ms=1234)
    bench.store.flush()
    page = bench.page()
    assert page.value("rocketmq_storage_flush_behind_bytes") == 0
    assert page.value("escrowmq_log_flushed_bytes") == end
    assert page.value("rocketmq_storage_message_reserve_time") == 1234
    assert page.value("escrowmq_store_writable") == 1
    bench.store.has_disk_space = False
    assert bench.page().value("escrowmq_store_writable") == 0
