"""Counters and metrics of a broker."""

from __future__ import annotations

import json
from typing import Any

from escrowmq.broker.metrics import BrokerMetrics
from escrowmq.broker.statistics import BrokerCounters
from escrowmq.clock import ManualClock
from escrowmq.errors import FlushTimeout
from escrowmq.message.batch import BatchItem, encode_batch
from escrowmq.message.properties import encode_properties
from escrowmq.metrics import Registry
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import ConsumerSendMessageBack, NoFields
from escrowmq.remoting.headers_admin import TopicHeader
from tests.interop.remoting import Response
from tests.support.broker_bench import BrokerBench
from tests.support.broker_requests import FakeChannel, new_request, pull_request, send_request
from tests.support.scraping import Page, parse
from tests.support.stores import NOW_MS

UNIQUE = "UNIQ_KEY\x01AC\x02"  # a send without a unique key does not take the fast path


class Bench(BrokerBench):
    """A broker with a clock and a page of metrics."""

    def __init__(self, *, sync: bool = False) -> None:
        self.clock = ManualClock(NOW_MS)
        super().__init__(sync=sync, counters=BrokerCounters(self.clock.elapsed_s))
        self._registry = Registry()
        self._registry.add(BrokerMetrics(self.broker, self.clock.now_ms).collect)

    def turn(
        self, *requests: Any, at_ms: int | None = None, channel: FakeChannel | None = None
    ) -> list[Response]:
        at_ms = self.clock.now_ms() if at_ms is None else at_ms
        return super().turn(*requests, at_ms=at_ms, channel=channel)

    def page(self) -> Page:
        return parse("".join(self._registry.lines()))


def fast_send(topic: str, body: bytes = b"body", **changes: Any) -> Any:
    return send_request(topic, body, properties=UNIQUE, **changes)


def test_messages_are_counted_for_the_topic_they_were_sent_to() -> None:
    bench = Bench()
    bench.turn(fast_send("T"), send_request("T"), fast_send("U"))
    bench.turn(fast_send("T", queue_id=1))
    page = bench.page()
    name = "rocketmq_messages_in_total"
    assert page.value(name, topic="T", message_type="normal", is_system="false") == 3
    assert page.value(name, topic="U") == 1
    sizes = [record.size for record in bench.store.records() if record.topic == "T"]
    assert page.value("rocketmq_throughput_in_total", topic="T") == sum(sizes)
    assert page.value("rocketmq_message_size_count", topic="T") == 3
    assert page.value("rocketmq_message_size_sum", topic="T") == sum(sizes)
    assert page.value("rocketmq_message_size_bucket", topic="T", le="1024") == 3
    assert page.value("escrowmq_append_records_count") == 2
    assert page.value("escrowmq_append_records_sum") == 4


def test_long_messages_are_counted_in_another_bucket() -> None:
    bench = Bench()
    bench.turn(fast_send("T", b"x" * 2000), fast_send("T", b"x" * 2000), fast_send("T"))
    name = "rocketmq_message_size_bucket"
    assert bench.page().value(name, le="1024") == 1
    assert bench.page().value(name, le="4096") == 3


def test_each_message_of_a_batch_counts() -> None:
    bench = Bench()
    items = [BatchItem(flag=0, body=b"%d" % number, properties=b"") for number in range(5)]
    bench.turn(fast_send("T"), send_request("T", encode_batch(items), batch=True))
    assert bench.page().value("rocketmq_messages_in_total", topic="T") == 6


def test_a_delayed_message_is_counted_once_for_its_real_topic() -> None:
    bench = Bench()
    delayed = encode_properties({"UNIQ_KEY": "A", "DELAY": "1"}).decode()
    bench.turn(fast_send("T"), send_request("T", properties=delayed))
    bench.clock.advance(ms=60_000)
    bench.tick(bench.clock.now_ms())
    assert bench.store.max_offset("T", 0) == 2
    page = bench.page()
    name = "rocketmq_messages_in_total"
    assert page.value(name, topic="T", message_type="delay") == 1
    assert page.value(name, topic="T", message_type="normal") == 1
    assert len(page.labels(name)) == 2


def test_pulled_messages_are_counted_by_topic_and_group() -> None:
    bench = Bench()
    bench.turn(fast_send("T"), fast_send("T"), fast_send("T"))
    bench.turn(pull_request("T", consumer_group="g"), pull_request("T", 2, consumer_group="h"))
    page = bench.page()
    messages, size = "rocketmq_messages_out_total", "rocketmq_throughput_out_total"
    assert page.value(messages, topic="T", consumer_group="g", is_retry="false") == 3
    assert page.value(messages, topic="T", consumer_group="h") == 1
    assert page.value(size, consumer_group="g") == 3 * page.value(size, consumer_group="h") > 0


def test_a_held_pull_is_counted_when_it_gets_its_response() -> None:
    bench = Bench()
    bench.turn(fast_send("T"))
    bench.turn(pull_request("T", 1))
    assert bench.page().value("escrowmq_waiting_pulls") == 1
    assert bench.page().labels("rocketmq_messages_out_total") == []
    bench.turn(fast_send("T"))
    page = bench.page()
    assert page.value("escrowmq_waiting_pulls") == 0
    assert page.value("rocketmq_messages_out_total", consumer_group="g") == 1


def test_the_lag_of_a_group_follows_sends_commits_and_time() -> None:
    bench = Bench()
    lag, age = "rocketmq_consumer_lag_messages", "rocketmq_consumer_lag_latency"
    bench.turn(*(fast_send("T") for _ in range(3)))
    bench.turn(pull_request("T"))
    bench.broker.offsets.commit("T", "g", 0, 1)
    bench.clock.advance(ms=700)
    page = bench.page()
    assert page.value(lag, topic="T", consumer_group="g", is_retry="false") == 2
    assert page.value(age, topic="T", consumer_group="g") == 700
    bench.turn(fast_send("T"))
    assert bench.page().value(lag) == 3
    bench.broker.offsets.commit("T", "g", 0, 3)
    assert (bench.page().value(lag), bench.page().value(age)) == (1, 0)
    bench.broker.offsets.commit("T", "g", 0, 4)
    bench.clock.advance(ms=700)
    assert (bench.page().value(lag), bench.page().value(age)) == (0, 0)
    bench.broker.offsets.commit("T", "g", 0, 100)  # a client may commit any offset
    assert bench.page().value(lag) == 0


def test_a_deleted_topic_has_no_metrics() -> None:
    bench = Bench()
    bench.turn(fast_send("T"), fast_send("U"))
    bench.turn(pull_request("T"), pull_request("U"))
    bench.broker.offsets.commit("T", "g", 0, 0)
    bench.turn(new_request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicHeader(topic="T")))
    page = bench.page()
    topics = {labels["topic"] for _, labels, _ in page.samples if "topic" in labels}
    assert topics == {"U"}
    assert set(bench.broker.counters.messages_in) == {("U", "normal")}


def test_counters_of_deleted_topics_are_purged_without_a_scrape() -> None:
    bench = Bench()
    bench.turn(fast_send("T"))
    bench.turn(pull_request("T"))
    bench.turn(new_request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicHeader(topic="T")))
    bench.clock.advance(ms=60_000)
    bench.broker.tick(bench.clock.now_ms())
    assert not bench.broker.counters.messages_in
    assert not bench.broker.counters.messages_out


def test_requests_and_refusals_are_counted_by_code() -> None:
    bench = Bench()
    bench.turn(
        fast_send("T"),
        send_request("T", queue_id=99),
        send_request("T", queue_id=99),
        pull_request("none"),
    )
    page = bench.page()
    requests, refusals = "escrowmq_requests_total", "escrowmq_refusals_total"
    assert page.value(requests, request_code="send_message") == 3
    assert page.value(requests, request_code="pull_message") == 1
    invalid = {"request_code": "send_message", "response_code": "invalid_parameter"}
    assert page.value(refusals, **invalid) == 2
    assert page.value(refusals, request_code="pull_message", response_code="topic_not_exist") == 1
    assert page.value("rocketmq_messages_in_total") == 1


def test_send_seconds_are_measured_from_the_start_of_the_turn_to_the_response() -> None:
    bench = Bench(sync=True)
    start_s = bench.clock.elapsed_s()
    bench.broker.counters.turn_start_s = lambda: start_s
    bench.turn(fast_send("T"), fast_send("T"))
    assert bench.page().value("escrowmq_send_seconds_count") == 0
    bench.clock.advance(ms=30)
    bench.flush_callbacks.pop()(None)
    page = bench.page()
    assert page.value("escrowmq_send_seconds_count") == 2
    assert page.value("escrowmq_send_seconds_bucket", le="0.025") == 0
    assert page.value("escrowmq_send_seconds_bucket", le="0.05") == 2


def test_a_send_that_was_not_flushed_in_time_counts_as_refused() -> None:
    bench = Bench(sync=True)
    bench.turn(fast_send("T"))
    bench.flush_callbacks.pop()(FlushTimeout("not flushed in time"))
    refusals = bench.page().value("escrowmq_refusals_total", response_code="flush_disk_timeout")
    assert refusals == 1


def test_connections_are_counted_by_group() -> None:
    bench = Bench()
    heartbeat = {
        "clientID": "c",
        "producerDataSet": [{"groupName": "p"}],
        "consumerDataSet": [{"groupName": "g", "consumeType": "CONSUME_PASSIVELY"}],
    }
    bench.turn(new_request(RequestCode.HEART_BEAT, NoFields(), json.dumps(heartbeat).encode()))
    page = bench.page()
    assert page.value("rocketmq_producer_connections") == 1
    consumers = "rocketmq_consumer_connections"
    assert page.value(consumers, consumer_group="g", consume_mode="push") == 1
    bench.broker.channel_closed(bench.channel)
    assert bench.page().value("rocketmq_producer_connections") == 0
    assert bench.page().labels(consumers) == []


def test_dead_letters_are_counted_by_group() -> None:
    bench = Bench()
    bench.turn(fast_send("T"))
    bench.turn(pull_request("T"))
    fields = ConsumerSendMessageBack(offset=0, group="g", delay_level=-1, origin_topic="T")
    bench.turn(new_request(RequestCode.CONSUMER_SEND_MSG_BACK, fields))
    dead_letters = "rocketmq_send_to_dlq_messages_total"
    assert bench.page().value(dead_letters, consumer_group="g") == 1


def test_log_offsets_and_unflushed_bytes_are_shown() -> None:
    bench = Bench()
    bench.turn(fast_send("T"))
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
