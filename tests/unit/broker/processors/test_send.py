"""Sends: refusals in RocketMQ's order, and the records of accepted messages."""

from __future__ import annotations

from typing import Any

import pytest

from escrowmq.config import BrokerConfig, Config
from escrowmq.errors import FlushTimeout, StoreError, StoreFailed
from escrowmq.message.batch import BatchItem, encode_batch
from escrowmq.message.keys import tags_and_keys
from escrowmq.message.topic_config import TopicConfig
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import ConsumerSendMessageBack
from escrowmq.store.config_files import GroupConfig
from tests.interop.remoting import Response
from tests.support.broker_bench import BrokerBench
from tests.support.broker_requests import (
    FakeChannel,
    bodies,
    decoded_properties,
    new_request,
    send_request,
    stored_records,
)
from tests.support.sliced import finish
from tests.support.stores import HOST, NOW_MS, TINY, assert_clean


class Bench(BrokerBench):
    """A broker with topic T. `settings` are those of BrokerConfig."""

    def __init__(self, *, sync: bool = False, **settings: Any) -> None:
        config = Config(broker=BrokerConfig(cluster_name="C1", **settings), store=TINY)
        super().__init__(config=config, sync=sync)
        self.topic("T")

    def topic(self, name: str, **changes: Any) -> None:
        fields = {"topic_name": name, "read_queue_nums": 4, "write_queue_nums": 4}
        self.broker.topics.put(TopicConfig(**{**fields, **changes}), now_ms=NOW_MS)

    def send(self, topic: str = "T", body: bytes = b"body", **changes: Any) -> Response:
        [response] = self.turn(send_request(topic, body, **changes))
        return response

    def stored_properties(self) -> dict[str, str]:
        """Return the properties of the first message of topic T."""
        return decoded_properties(stored_records(self.store, "T")[0])


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize(
    ("topic", "changes", "code"),
    [
        ("", {}, 29),
        ("a/b", {}, 29),
        ("x" * 128, {}, 29),
        ("a/b", {"queue_id": 99, "default_topic": ""}, 29),
        ("SCHEDULE_TOPIC_XXXX", {"queue_id": 99}, 16),
        ("RMQ_SYS_TRANS_HALF_TOPIC", {}, 16),
        ("RMQ_SYS_TRANS_OP_HALF_TOPIC", {}, 16),
        ("TRANS_CHECK_MAX_TIME_TOPIC", {}, 16),
        ("SELF_TEST_TOPIC", {}, 16),
        ("OFFSET_MOVED_EVENT", {}, 16),
        ("rmq_sys_wheel_timer", {}, 16),
        ("unknown", {"default_topic": "none", "queue_id": 99}, 17),
        ("unknown", {"default_topic_queue_nums": -1}, 29),
        ("T", {"queue_id": 4}, 29),
        ("T", {"queue_id": 4, "properties": "a" * 40_000}, 29),
        (f"%RETRY%{'g' * 121}", {}, 26),
        ("%RETRY%unknown", {"queue_id": 1}, 29),
        ("T", {"properties": "a" * 40_000}, 13),
        ("T", {"body": b"x" * 2049}, 13),
        ("read-only", {}, 16),
    ],
)
def test_the_first_failed_check_gives_the_response_code(
    bench: Bench, topic: str, changes: dict[str, Any], code: int
) -> None:
    bench.topic("read-only", perm=4)
    response = bench.send(topic, **changes)
    assert response.code == code, response.remark
    assert list(bench.store.records()) == []


def test_a_broker_that_is_not_writable_refuses_ordered_topics() -> None:
    bench = Bench(broker_permission=4)
    bench.topic("ordered", order=True)
    assert bench.send("ordered").code == 16


def test_a_send_may_name_a_queue_that_is_only_read() -> None:
    """A topic that shrinks has fewer write queues than read queues for a time."""
    bench = Bench()
    bench.topic("shrinking", read_queue_nums=8, write_queue_nums=2)
    assert bench.send("shrinking", queue_id=7).code == 0
    chosen = {int(bench.send("shrinking", queue_id=-1).ext_fields["queueId"]) for _ in range(40)}
    assert chosen == {0, 1}


def test_a_topic_without_queues_accepts_no_message(bench: Bench) -> None:
    """There is no queue from which the message could be read."""
    bench.topic("closed", read_queue_nums=0, write_queue_nums=0)
    assert bench.send("closed", queue_id=-1).code != 0
    assert list(bench.store.records()) == []


def test_the_response_has_the_position_of_the_message(bench: Bench) -> None:
    bench.send(queue_id=2)
    response = bench.send(queue_id=2)
    second = stored_records(bench.store, "T", 2)[1]
    assert response.ext_fields["queueId"] == "2"
    assert response.ext_fields["queueOffset"] == "1"
    assert response.ext_fields["msgId"] == f"{HOST.hex().upper()}{second.log_offset:016X}"


def test_the_broker_adds_its_properties(bench: Bench) -> None:
    bench.send(properties="TAGS\x01a")
    values = bench.stored_properties()
    assert values.pop("UNIQ_KEY")
    assert values == {
        "TAGS": "a",
        "MSG_REGION": "DefaultRegion",
        "TRACE_ON": "true",
        "CLUSTER": "C1",
    }


def test_a_unique_key_of_the_client_is_kept(bench: Bench) -> None:
    bench.send(properties="UNIQ_KEY\x01mine\x02")
    assert bench.stored_properties()["UNIQ_KEY"] == "mine"


@pytest.mark.parametrize("properties", ["MY_UNIQ_KEY\x01x\x02", "UNIQ_KEY\x01\x02"])
def test_a_property_that_only_looks_like_a_unique_key_does_not_count(
    bench: Bench, properties: str
) -> None:
    bench.send(properties=properties)
    assert bench.stored_properties().get("UNIQ_KEY")


def test_a_user_property_that_looks_like_a_region_is_harmless(bench: Bench) -> None:
    bench.send(properties="MY_MSG_REGION\x01x\x02")
    assert bench.stored_properties()["CLUSTER"] == "C1"


def test_pop_properties_are_removed(bench: Bench) -> None:
    """They belong to the broker. A client that forwards a message may still send them."""
    bench.send(properties="POP_CK\x010 1 2 3 4 b 5 6\x02TAGS\x01a\x02")
    assert "POP_CK" not in bench.stored_properties()


def test_a_forwarded_message_has_only_the_properties_of_this_broker(bench: Bench) -> None:
    """A consumer forwards a message with the properties that the first broker added."""
    received = "TAGS\x01a\x02MSG_REGION\x01far\x02TRACE_ON\x01false\x02CLUSTER\x01C9\x02"
    bench.send(properties=f"UNIQ_KEY\x01k\x02{received}")
    [record] = stored_records(bench.store, "T")
    # Compare bytes: a dict would hide a property that occurs twice.
    assert sorted(record.properties.rstrip(b"\x02").split(b"\x02")) == [
        b"CLUSTER\x01C1",
        b"MSG_REGION\x01DefaultRegion",
        b"TAGS\x01a",
        b"TRACE_ON\x01true",
        b"UNIQ_KEY\x01k",
    ]


def test_a_one_way_send_is_stored_without_a_response(bench: Bench) -> None:
    assert bench.turn(send_request(one_way=True), send_request("a/b", one_way=True)) == []
    assert bodies(bench.store, "T") == [b"body"]


def test_nothing_is_stored_or_responded_to_before_the_turn_ends(bench: Bench) -> None:
    channels = [FakeChannel(str(number)) for number in range(3)]
    for number, channel in enumerate(channels):
        bench.broker.handle(channel, send_request(body=b"%d" % number), NOW_MS)
    assert list(bench.store.records()) == []
    assert [channel.responses() for channel in channels] == [[], [], []]
    bench.broker.end_turn(NOW_MS)
    assert bodies(bench.store, "T") == [b"0", b"1", b"2"]
    assert [channel.response().ext_fields["queueOffset"] for channel in channels] == ["0", "1", "2"]


@pytest.mark.parametrize(
    "request_",
    [
        send_request(body=b"bad", properties="a\x01\0\x02"),
        send_request(
            batch=True,
            body=encode_batch([BatchItem(0, b"x", b"a\x01" + b"x" * 1100), BatchItem(0, b"y")]),
            properties="",
        ),
    ],
    ids=["refused", "batch"],
)
def test_a_message_does_not_affect_others_of_its_turn(bench: Bench, request_: Any) -> None:
    other = FakeChannel("other")
    bench.broker.handle(bench.channel, send_request(body=b"before"), NOW_MS)
    finish(bench.broker.handle(other, request_, NOW_MS))
    bench.broker.handle(bench.channel, send_request(body=b"after"), NOW_MS)
    bench.broker.end_turn(NOW_MS)
    assert [response.code for response in bench.channel.responses()] == [0, 0]
    assert len(other.responses()) == 1
    stored_bodies = bodies(bench.store, "T")
    assert (stored_bodies[0], stored_bodies[-1]) == (b"before", b"after")


def test_a_batch_is_stored_as_single_messages(bench: Bench) -> None:
    items = [BatchItem(number, b"%d" % number, b"TAGS\x01a") for number in range(3)]
    response = bench.send(body=encode_batch(items), batch=True, queue_id=1)
    records = stored_records(bench.store, "T", 1)
    assert [bytes(record.body) for record in records] == [b"0", b"1", b"2"]
    assert [record.flag for record in records] == [0, 1, 2]
    ids = [f"{HOST.hex().upper()}{record.log_offset:016X}" for record in records]
    assert response.ext_fields["msgId"] == ",".join(ids)
    assert response.ext_fields["queueOffset"] == "0"


@pytest.mark.parametrize("properties", [b"TAGS\x01a", b"UNIQ_KEY\x01K%d\x02"])
def test_the_response_to_a_bulk_batch_has_only_the_first_id(
    bench: Bench, properties: bytes
) -> None:
    items = [BatchItem(0, b"x", properties.replace(b"%d", b"%d" % number)) for number in range(3)]
    response = bench.send(body=encode_batch(items), batch=True, bulk=True, queue_id=1)
    records = stored_records(bench.store, "T", 1)
    assert len(records) == 3
    assert response.ext_fields["msgId"] == f"{HOST.hex().upper()}{records[0].log_offset:016X}"


@pytest.mark.parametrize("delay", [b"DELAY\x013\x02", b"TIMER_DELAY_SEC\x015\x02"])
def test_a_delayed_message_of_a_batch_is_delivered_at_once_as_by_rocketmq(
    bench: Bench, delay: bytes
) -> None:
    items = [BatchItem(0, b"first", b"UNIQ_KEY\x01K1\x02"), BatchItem(0, b"second", delay)]
    assert bench.send(body=encode_batch(items), batch=True).code == 0
    records = stored_records(bench.store, "T")
    assert [bytes(record.body) for record in records] == [b"first", b"second"]
    assert delay in records[1].properties


def test_a_message_of_a_batch_is_found_by_its_key_and_has_no_tag(bench: Bench) -> None:
    bench.send(body=encode_batch([BatchItem(0, b"x", b"UNIQ_KEY\x01K1\x02")]), batch=True)
    [record] = stored_records(bench.store, "T")
    assert tags_and_keys("T", record.properties, 0) == (0, [b"K1"])
    assert bench.store.find_by_key("T", "K1") == [record]


@pytest.mark.parametrize(
    ("topic", "changes"),
    [
        ("T", {"body": b""}),
        ("T", {"body": b"garbage"}),
        ("T", {"sys_flag": 4}),
        ("T", {"body": encode_batch([BatchItem(0, b"x", b"TRAN_MSG\x01true\x02")])}),
        ("T", {"properties": "DELAY\x013\x02"}),
        ("%RETRY%g", {}),
    ],
)
def test_an_invalid_batch_is_refused(bench: Bench, topic: str, changes: dict[str, Any]) -> None:
    bench.broker.groups.put(GroupConfig(group_name="g"), now_ms=NOW_MS)
    valid = {"body": encode_batch([BatchItem(0, b"x")]), "batch": True}
    response = bench.send(topic, **{**valid, **changes})
    assert response.code == 13
    assert list(bench.store.records()) == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (FlushTimeout("late"), 10),
        (StoreFailed("broken"), 1),
    ],
)
def test_with_sync_flush_the_response_waits_for_the_flush(
    error: StoreError | None, code: int
) -> None:
    bench = Bench(sync=True)
    assert bench.turn(send_request()) == []
    [when_flushed] = bench.flush_callbacks
    when_flushed(error)
    response = bench.channel.response()
    assert (response.code, response.ext_fields["queueOffset"]) == (code, "0")


def test_with_sync_flush_a_send_with_wait_false_gets_its_response_at_once() -> None:
    bench = Bench(sync=True)
    assert bench.send(properties="WAIT\x01false\x02").code == 0
    # NO_WAIT is a property of the user and has no effect.
    assert bench.turn(send_request(properties="NO_WAIT\x01false\x02")) == []


def test_with_sync_flush_a_message_sent_back_is_durable_before_the_response() -> None:
    """After the response the consumer commits past the message, so it must not be lost."""
    bench = Bench(sync=True)
    bench.broker.groups.put(GroupConfig(group_name="g"), now_ms=NOW_MS)
    bench.turn(send_request(properties="WAIT\x01false\x02"))
    [record] = stored_records(bench.store, "T")
    fields = ConsumerSendMessageBack(offset=record.log_offset, group="g", delay_level=1)
    assert bench.turn(new_request(RequestCode.CONSUMER_SEND_MSG_BACK, fields)) == []
    for when_flushed in bench.flush_callbacks:
        when_flushed(None)
    assert bench.channel.response().code == 0


def test_the_store_check_finds_nothing_after_all_kinds_of_sends(bench: Bench) -> None:
    for number in range(30):
        bench.send(body=b"%d" % number, queue_id=number % 4, properties=f"KEYS\x01k{number}")
    bench.send(properties="DELAY\x011\x02")
    for prefix, properties in ((b"A", b""), (b"B", b"TAGS\x01t\x02"), (b"C", b"KEYS\x01a b\x02")):
        items = [
            BatchItem(0, b"x", b"UNIQ_KEY\x01%b%d\x02" % (prefix, number) + properties)
            for number in range(5)
        ]
        bench.send(body=encode_batch(items), batch=True)
    bench.store.close()
    assert_clean(bench.disk)
