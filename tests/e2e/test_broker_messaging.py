"""Ordinary messaging with a broker that is a process of its own, by a client that is not ours.

One broker serves the whole file; every test has topics and groups of its own.
"""

from __future__ import annotations

import itertools
import json
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.brokers import Served, begin_pull, next_answer
from tests.interop.records import Record, decode_records, encode_properties
from tests.interop.remoting import Answer, Client

pytestmark = pytest.mark.slow

NOTIFY_CONSUMER_IDS_CHANGED = 40
_numbers = itertools.count()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("broker")) as server:
        yield server
    server.assert_clean()
    assert "Traceback" not in server.errors, server.errors


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with served.client() as line:
        yield line


@pytest.fixture
def other(served: Served) -> Iterator[Client]:
    with served.client() as line:
        yield line


@pytest.fixture
def topic(client: Client) -> str:
    name = f"topic-{next(_numbers)}"
    client.create_topic(name)
    return name


@pytest.fixture
def group() -> str:
    return f"group-{next(_numbers)}"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def v1(topic: str, **changes: object) -> dict[str, object]:
    """The header of SEND_MESSAGE."""
    fields: dict[str, object] = {
        "producerGroup": "producers",
        "topic": topic,
        "defaultTopic": "TBW102",
        "defaultTopicQueueNums": 4,
        "queueId": 0,
        "sysFlag": 0,
        "bornTimestamp": now_ms(),
        "flag": 0,
        "properties": "",
        "reconsumeTimes": 0,
        "unitMode": False,
    }
    return {**fields, **changes}


def batch(*messages: tuple[bytes, Mapping[str, str]], flag: int = 0) -> bytes:
    encoded = b""
    for body, properties in messages:
        text = encode_properties(properties).encode()
        size = 22 + len(body) + len(text)
        encoded += struct.pack(">iiiii", size, 0, 0, flag, len(body)) + body
        encoded += struct.pack(">h", len(text)) + text
    return encoded


def bodies(records: list[Record]) -> list[bytes]:
    return [record.body for record in records]


def wait_for(client: Client, topic: str, queue_offset: int, *, seconds: int = 10) -> list[Record]:
    """What comes to queue 0 from there on, as soon as there is something."""
    begin_pull(client, topic, queue_offset, wait_ms=seconds * 1000)
    return decode_records(next_answer(client).body)


# --- producing -----------------------------------------------------------------------------------


def test_a_first_generation_send_is_stored_as_it_was_sent(client: Client, topic: str) -> None:
    born_ms = now_ms() - 1000
    properties = encode_properties({"TAGS": "a", "KEYS": "k1 k2", "mine": "ä\u20ac"})
    fields = v1(topic, queueId=2, flag=7, bornTimestamp=born_ms, properties=properties)
    answer = client.expect(10, fields, b"body")
    assert answer.ext_fields["queueId"] == "2"
    assert answer.ext_fields["queueOffset"] == "0"
    [record] = client.pull_all(topic, 2)
    assert (record.body, record.flag, record.born_ms) == (b"body", 7, born_ms)
    assert record.properties["mine"] == "ä\u20ac"
    assert record.properties["TAGS"] == "a"
    assert record.properties["CLUSTER"] == "DefaultCluster"
    assert record.properties["MSG_REGION"] == "DefaultRegion"
    assert int(answer.ext_fields["msgId"][-16:], 16) == record.log_offset
    assert record.born_host.startswith("127.0.0.1:")
    assert record.store_host == client.address


def test_sends_get_consecutive_offsets(client: Client, topic: str) -> None:
    sent = [client.send(topic, b"%d" % number) for number in range(40)]
    assert [each.queue_offset for each in sent] == list(range(40))
    assert bodies(client.pull_all(topic, 0)) == [b"%d" % number for number in range(40)]


def test_a_send_without_a_unique_key_is_given_one(client: Client, topic: str) -> None:
    client.send(topic, b"1")
    client.send(topic, b"2")
    first, second = client.pull_all(topic, 0)
    assert first.properties["UNIQ_KEY"] != second.properties["UNIQ_KEY"]


def test_a_users_property_that_sounds_like_one_of_ours_is_only_the_users(
    client: Client, topic: str
) -> None:
    """Names are compared whole: `MY_UNIQ_KEY` is not `UNIQ_KEY`."""
    client.send(topic, b"1", {"MY_UNIQ_KEY": "x", "THEIR_MSG_REGION": "y"})
    [record] = client.pull_all(topic, 0)
    assert record.properties["MY_UNIQ_KEY"] == "x"
    assert "UNIQ_KEY" in record.properties
    assert record.properties["MSG_REGION"] == "DefaultRegion"


def test_a_batch_is_stored_as_single_messages(client: Client, topic: str) -> None:
    body = batch((b"one", {"UNIQ_KEY": "u1", "TAGS": "a"}), (b"two", {"UNIQ_KEY": "u2"}), flag=3)
    fields = {"a": "p", "b": topic, "c": "TBW102", "d": 4, "e": 1, "f": 0, "g": 5, "h": 0}
    answer = client.expect(320, {**fields, "i": "", "m": True}, body)
    first, second = client.pull_all(topic, 1)
    assert (first.body, first.properties["UNIQ_KEY"], first.flag) == (b"one", "u1", 3)
    assert (second.body, second.properties["UNIQ_KEY"]) == (b"two", "u2")
    ids = answer.ext_fields["msgId"].split(",")
    assert [int(each[-16:], 16) for each in ids] == [first.log_offset, second.log_offset]
    assert answer.ext_fields["queueOffset"] == "0"


def test_a_message_of_a_batch_without_a_unique_key_is_given_one(client: Client, topic: str) -> None:
    fields = {"a": "p", "b": topic, "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 5, "h": 0}
    client.expect(320, {**fields, "m": True}, batch((b"one", {}), (b"two", {})))
    first, second = client.pull_all(topic, 0)
    assert first.properties["UNIQ_KEY"] != second.properties["UNIQ_KEY"]


@pytest.mark.parametrize(
    "body",
    [b"", b"\0" * 21, batch((b"x", {}))[:-1], batch((b"x", {"DELAY": "1"})), b"\xff" * 40],
    ids=["empty", "short", "cut", "delayed", "garbage"],
)
def test_a_bad_batch_is_refused_and_stores_nothing(client: Client, topic: str, body: bytes) -> None:
    fields = {"a": "p", "b": topic, "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 5, "h": 0}
    assert client.request(320, {**fields, "m": True}, body).code == 13
    assert client.max_offset(topic, 0) == 0


def test_a_one_way_send_is_stored_and_never_answered(client: Client, topic: str) -> None:
    client.one_way(10, v1(topic), b"quiet")
    client.one_way(10, v1(topic, queueId=99), b"refused, quietly")
    client.max_offset(topic, 0)  # may be in the same turn, so before they are stored
    assert client.max_offset(topic, 0) == 1
    assert client.unasked == []


def test_the_broker_chooses_a_queue_if_none_is_named(client: Client, topic: str) -> None:
    chosen = {client.send(topic, b"x", queue_id=-1).queue_id for _ in range(60)}
    assert chosen == {0, 1, 2, 3}
    assert sum(client.max_offset(topic, queue_id) for queue_id in range(4)) == 60


def test_compressed_bodies_are_handed_back_untouched(client: Client, topic: str) -> None:
    client.send(topic, b"\x78\x9c compressed, as far as the broker knows", sys_flag=1)
    [record] = client.pull_all(topic, 0)
    assert record.sys_flag == 1
    assert record.body.startswith(b"\x78\x9c")


def test_a_delay_level_holds_a_message_back_for_its_time(client: Client, topic: str) -> None:
    began_ms = now_ms()
    sent = client.send(topic, b"later", {"DELAY": "1", "UNIQ_KEY": "U1"}, queue_id=0)
    assert sent.queue_id == 0
    assert client.max_offset(topic, 0) == 0
    [record] = wait_for(client, topic, 0)
    assert 1000 <= record.stored_ms - began_ms < 2500
    assert record.body == b"later"
    assert record.properties["UNIQ_KEY"] == "U1"
    assert "DELAY" not in record.properties


@pytest.mark.parametrize("name", ["TIMER_DELIVER_MS", "TIMER_DELAY_SEC", "TIMER_DELAY_MS"])
def test_a_message_may_name_its_time_of_delivery(client: Client, topic: str, name: str) -> None:
    began_ms = now_ms()
    value = {
        "TIMER_DELIVER_MS": began_ms + 700,
        "TIMER_DELAY_SEC": 1,
        "TIMER_DELAY_MS": 700,
    }[name]
    client.send(topic, b"late", {name: str(value)})
    client.send(topic, b"at once", {"TIMER_DELIVER_MS": str(began_ms - 5)})
    assert bodies(client.pull_all(topic, 0)) == [b"at once"]
    [record] = wait_for(client, topic, 1)
    assert record.body == b"late"
    assert 700 <= record.stored_ms - began_ms < 2500


@pytest.mark.parametrize("value", ["soon", "-1", str(2**63 - 1), "9" * 40])
def test_a_time_of_delivery_that_is_none_is_refused(client: Client, topic: str, value: str) -> None:
    fields = v1(topic, properties=encode_properties({"TIMER_DELIVER_MS": value}))
    assert client.request(10, fields, b"x").code == 13
    assert client.max_offset(topic, 0) == 0


def test_a_reply_is_pushed_to_the_client_that_waits_for_it(client: Client, other: Client) -> None:
    client.heartbeat("asker", producer_groups=("askers",))
    properties = encode_properties({"REPLY_TO_CLIENT": "asker", "CORRELATION_ID": "c1"})
    fields = v1("DefaultCluster_REPLY_TOPIC", properties=properties)
    other.expect(324, fields, b"the answer")
    client.max_offset("x", 0)
    [(header, body)] = client.unasked
    assert (header["code"], body) == (326, b"the answer")
    assert "CORRELATION_ID\x01c1" in header["extFields"]["properties"]


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"topic": ""}, 29),
        ({"topic": "../../etc"}, 29),
        ({"topic": "a b"}, 29),
        ({"topic": "a\0b"}, 29),
        ({"topic": "T" * 128}, 29),
        ({"topic": "ünï"}, 29),
        ({"topic": "SCHEDULE_TOPIC_XXXX"}, 16),
        ({"topic": "RMQ_SYS_TRANS_HALF_TOPIC"}, 16),
        ({"topic": "RMQ_SYS_TRANS_OP_HALF_TOPIC"}, 16),
        ({"topic": "TRANS_CHECK_MAX_TIME_TOPIC"}, 16),
        ({"topic": "SELF_TEST_TOPIC"}, 16),
        ({"topic": "OFFSET_MOVED_EVENT"}, 16),
        ({"topic": "nobody-made-it", "defaultTopic": "no-template"}, 17),
        ({"topic": "nobody-made-it", "defaultTopic": ""}, 17),
        ({"queueId": 4}, 29),
        ({"queueId": 2**31 - 1}, 29),
        ({"topic": "%RETRY%no-such-group"}, 26),
        ({"properties": "a\x01" + "x" * 33_000}, 13),
    ],
)
def test_a_refused_send_has_rocketmqs_code(
    client: Client, topic: str, changes: dict[str, object], code: int
) -> None:
    answer = client.request(10, {**v1(topic), **changes}, b"x")
    assert answer.code == code, answer.remark
    assert answer.remark


def test_a_body_longer_than_the_limit_is_refused(client: Client, topic: str) -> None:
    limit = 4 << 20
    assert client.request(10, v1(topic), b"x" * (limit + 1)).code == 13
    client.expect(10, v1(topic), b"x" * limit)
    [record] = client.pull_all(topic, 0)
    assert len(record.body) == limit


def test_one_message_that_cannot_be_stored_does_not_cost_the_others_of_its_turn(
    served: Served, client: Client, other: Client, topic: str
) -> None:
    """Both requests are there when the broker wakes up, so they share one append."""
    fields = {"a": "p", "b": topic, "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 5, "h": 0}
    too_much = batch((b"x", {"a": "x" * (32_767 - 3)}))
    with served.frozen():
        other._send(320, {**fields, "m": True}, too_much, flag=0)
        client._send(10, v1(topic), b"good", flag=0)
    assert next_answer(other).code == 13
    assert next_answer(client).code == 0
    assert bodies(client.pull_all(topic, 0)) == [b"good"]


def test_a_zero_byte_in_the_properties_does_not_cost_the_others_of_its_turn(
    served: Served, client: Client, other: Client, topic: str
) -> None:
    with served.frozen():
        other._send(10, v1(topic, properties="a\x01\0\x02"), b"bad", flag=0)
        client._send(10, v1(topic), b"good", flag=0)
    assert next_answer(other).code in (1, 13)
    assert next_answer(client).code == 0


# --- topics and groups ---------------------------------------------------------------------------


def test_the_first_message_makes_a_topic_like_its_template(served: Served, client: Client) -> None:
    name = f"auto-{next(_numbers)}"
    client.expect(10, v1(name, defaultTopicQueueNums=100), b"1")
    assert client.request(10, v1(name, queueId=7), b"2").code == 0  # the template has 8
    assert client.request(10, v1(name, queueId=8), b"3").code == 29
    assert bodies(client.pull_all(name, 0)) == [b"1"]


@pytest.mark.parametrize(
    "name",
    [
        *("", "a/b", "a b", "T" * 128, "\u4e2d"),
        *("SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "TBW102", "BenchmarkTest"),
        *("rmq_sys_wheel_timer", "rmq_sys_anything"),
    ],
)
def test_bad_names_and_system_topics_cannot_be_created(client: Client, name: str) -> None:
    fields = {"topic": name, "defaultTopic": "TBW102", "readQueueNums": 1, "writeQueueNums": 1}
    more = {"perm": 6, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": False}
    assert client.request(17, {**fields, **more}).code == 29


@pytest.mark.parametrize("name", ["SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer", "TBW102"])
def test_system_topics_cannot_be_deleted(client: Client, name: str) -> None:
    assert client.request(215, {"topic": name}).code != 0


def test_a_deleted_topic_is_gone_with_its_offsets(client: Client, topic: str, group: str) -> None:
    client.create_group(group)
    client.send(topic, b"1")
    client.commit_offset(group, topic, 0, 1)
    client.expect(215, {"topic": topic})
    assert client.pull(topic, 0, 0).code == 17
    fields = {"consumerGroup": group, "topic": topic, "queueId": 0, "setZeroIfNotFound": False}
    assert client.request(14, fields).code == 22


def test_a_group_is_what_it_was_created_as(client: Client, topic: str, group: str) -> None:
    client.expect(200, body=json.dumps({"groupName": group, "consumeEnable": False}).encode())
    assert client.pull(topic, 0, 0, group=group).code == 16
    client.create_group(group)
    assert client.pull(topic, 0, 0, group=group).code == 19


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[]", b"{}", b'{"groupName":""}', b'{"groupName":"a/b"}', b'{"groupName":7}'),
        b'{"groupName":"g","retryQueueNums":-5}',
        b'{"groupName":"g","retryQueueNums":2000000000}',
    ],
)
def test_a_bad_group_is_refused(client: Client, body: bytes) -> None:
    assert client.request(200, body=body).code != 0


# --- pulling -------------------------------------------------------------------------------------


def test_a_pull_says_all_four_numbers_whatever_it_found(client: Client, topic: str) -> None:
    client.send(topic, b"1")
    names = ["suggestWhichBrokerId", "nextBeginOffset", "minOffset", "maxOffset"]
    for queue_offset, code, following in ((0, 0, "1"), (1, 19, "1"), (9, 21, "1")):
        answer = client.pull(topic, 0, queue_offset)
        assert answer.code == code
        assert [answer.ext_fields[name] for name in names] == ["0", following, "0", "1"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"topic": "no-such-topic"}, 17),
        ({"queueId": 4}, 29),
        ({"queueId": -1}, 29),
        ({"consumerGroup": "a/b"}, 26),
        ({"expressionType": "XPATH"}, 23),
        ({"expressionType": "SQL92", "subscription": "a > 1"}, 1),
        ({"sysFlag": 0}, 24),
        ({"queueOffset": 5}, 21),
        ({}, 19),
    ],
)
def test_a_refused_pull_has_rocketmqs_code(
    client: Client, topic: str, changes: dict[str, object], code: int
) -> None:
    fields: dict[str, object] = {
        "consumerGroup": "pullers",
        "topic": topic,
        "queueId": 0,
        "queueOffset": 0,
        "maxMsgNums": 32,
        "sysFlag": 4,
        "commitOffset": 0,
        "suspendTimeoutMillis": 0,
        "subscription": "*",
        "subVersion": 0,
        "expressionType": "TAG",
    }
    assert client.request(11, {**fields, **changes}).code == code


def test_tags_are_filtered_by_the_broker(client: Client, topic: str) -> None:
    for number, tag in enumerate(["a", "b", "c", "a"]):
        client.send(topic, b"%d" % number, {"TAGS": tag})
    client.send(topic, b"none")

    def pulled(expression: str) -> list[bytes]:
        return bodies(decode_records(client.pull(topic, 0, 0, subscription=expression).body))

    assert pulled("a") == [b"0", b"3"]
    assert pulled("a || c") == [b"0", b"2", b"3"]
    assert pulled("*") == [b"0", b"1", b"2", b"3", b"none"]
    answer = client.pull(topic, 0, 0, subscription="d")
    assert (answer.code, answer.ext_fields["nextBeginOffset"]) == (20, "5")


def test_a_pull_brings_at_most_what_was_asked_for(client: Client, topic: str) -> None:
    for number in range(40):
        client.send(topic, b"%d" % number)
    assert len(decode_records(client.pull(topic, 0, 0, most=3).body)) == 3
    assert len(decode_records(client.pull(topic, 0, 0, most=1000).body)) == 32
    assert len(decode_records(client.pull(topic, 0, 38, most=1000).body)) == 2


def test_a_waiting_pull_is_answered_by_the_next_message(
    client: Client, other: Client, topic: str
) -> None:
    for number in range(20):
        begin_pull(client, topic, number)
        other.send(topic, b"%d" % number)
        answer = next_answer(client)
        assert answer.code == 0
        assert bodies(decode_records(answer.body)) == [b"%d" % number]
        assert answer.ext_fields["nextBeginOffset"] == str(number + 1)


def test_a_waiting_pull_is_not_woken_by_tags_it_does_not_want(
    client: Client, other: Client, topic: str
) -> None:
    begin_pull(client, topic, 0, subscription="wanted")
    other.send(topic, b"0", {"TAGS": "unwanted"})
    client.max_offset(topic, 0)
    assert client.unasked == []
    other.send(topic, b"1", {"TAGS": "wanted"})
    assert bodies(decode_records(next_answer(client).body)) == [b"1"]


def test_a_waiting_pull_ends_with_19_when_its_time_is_over(client: Client, topic: str) -> None:
    began_s = time.monotonic()
    begin_pull(client, topic, 0, wait_ms=300)
    answer = next_answer(client)
    assert (answer.code, answer.ext_fields["nextBeginOffset"]) == (19, "0")
    assert 0.3 <= time.monotonic() - began_s < 1.5


def test_many_pulls_wait_on_one_line(client: Client, other: Client, topic: str) -> None:
    for queue_id in range(4):
        begin_pull(client, topic, 0, queue_id=queue_id)
    for queue_id in (2, 0, 3, 1):
        other.send(topic, b"%d" % queue_id, queue_id=queue_id)
        [record] = decode_records(next_answer(client).body)
        assert record.queue_id == queue_id


# --- offsets and look-ups ------------------------------------------------------------------------


def test_offsets_are_what_was_committed_last(client: Client, topic: str, group: str) -> None:
    client.create_group(group)
    fields = {"consumerGroup": group, "topic": topic, "queueId": 1}
    assert client.request(14, {**fields, "setZeroIfNotFound": False}).code == 22
    assert client.request(14, fields).ext_fields == {"offset": "0"}  # the queue is young
    client.commit_offset(group, topic, 1, 17)
    assert client.committed_offset(group, topic, 1) == 17
    client.commit_offset(group, topic, 1, 3)
    assert client.committed_offset(group, topic, 1) == 3


def test_a_pull_may_bring_a_commit(client: Client, topic: str, group: str) -> None:
    fields = {
        "consumerGroup": group,
        "topic": topic,
        "queueId": 0,
        "queueOffset": 0,
        "maxMsgNums": 32,
        "sysFlag": 5,
        "commitOffset": 9,
        "suspendTimeoutMillis": 0,
        "subscription": "*",
        "subVersion": 0,
        "expressionType": "TAG",
    }
    assert client.request(11, fields).code == 19
    assert client.committed_offset(group, topic, 0) == 9
    client.request(11, {**fields, "commitOffset": -1})  # does not know yet
    assert client.committed_offset(group, topic, 0) == 9


@pytest.mark.parametrize(
    ("changes", "code"), [({"topic": "no-such-topic"}, 17), ({"consumerGroup": "nobody"}, 26)]
)
def test_a_commit_of_an_unknown_place_is_refused(
    client: Client, topic: str, group: str, changes: dict[str, object], code: int
) -> None:
    client.create_group(group)
    fields = {"consumerGroup": group, "topic": topic, "queueId": 0, "commitOffset": 5}
    assert client.request(15, {**fields, **changes}).code == code


def test_offsets_are_found_by_time(client: Client, topic: str) -> None:
    for number in range(3):
        client.send(topic, b"%d" % number)
    assert (client.min_offset(topic, 0), client.max_offset(topic, 0)) == (0, 3)
    times = [record.stored_ms for record in client.pull_all(topic, 0)]
    assert client.search_offset(topic, 0, timestamp_ms=times[0]) == 0
    assert client.search_offset(topic, 0, timestamp_ms=0) == 0
    assert client.search_offset(topic, 0, timestamp_ms=times[2] + 1000) in (2, 3)
    earliest = client.expect(32, {"topic": topic, "queueId": 0})
    assert int(earliest.ext_fields["timestamp"]) == times[0]


def test_messages_are_found_by_key_and_by_id(client: Client, topic: str) -> None:
    sent = client.send(topic, b"1", {"KEYS": "red blue", "UNIQ_KEY": f"U-{topic}"})
    client.send(topic, b"2", {"KEYS": "blue"})
    assert bodies(client.query_by_key(topic, "red")) == [b"1"]
    assert sorted(bodies(client.query_by_key(topic, "blue"))) == [b"1", b"2"]
    assert len(client.query_by_key(topic, "blue", most=1)) == 1
    assert client.query_by_key(topic, "green") == []
    assert bodies(client.query_by_key(topic, f"U-{topic}", unique=True)) == [b"1"]
    assert client.view_by_id(sent.message_id).body == b"1"
    assert client.request(33, {"offset": sent.log_offset + 1}).code == 1


def test_a_look_up_by_key_is_bounded_whatever_was_asked_for(client: Client, topic: str) -> None:
    """A frame holds 16 MiB, and clients read no longer one."""
    for _ in range(18):
        client.send(topic, b"x" * (1 << 20), {"KEYS": "many"})
    fields = {"topic": topic, "key": "many", "maxNum": 2**31 - 1}
    answer = client.expect(12, {**fields, "beginTimestamp": 0, "endTimestamp": 2**63 - 1})
    assert 1 <= len(decode_records(answer.body)) <= 15
    assert len(answer.body) <= 16 << 20


# --- members, locks ------------------------------------------------------------------------------


def beat(client: Client, client_id: str, group: str, topic: str, **changes: Any) -> Answer:
    subscription = {"topic": topic, "subString": "*", "subVersion": 1, "expressionType": "TAG"}
    consumer = {
        "groupName": group,
        "consumeType": "CONSUME_PASSIVELY",
        "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
        "subscriptionDataSet": [subscription],
        "unitMode": False,
        **changes,
    }
    body = {"clientID": client_id, "producerDataSet": [], "consumerDataSet": [consumer]}
    return client.expect(34, body=json.dumps(body).encode())


def members(client: Client, group: str) -> list[str]:
    answer = client.expect(38, {"consumerGroup": group})
    return sorted(json.loads(answer.body)["consumerIdList"])


def told(client: Client) -> list[str]:
    """Of which groups it was told that somebody came or went."""
    client.max_offset("any", 0)  # what came before the answer is in `unasked` now
    news, client.unasked[:] = list(client.unasked), []
    assert {header["code"] for header, _ in news} <= {NOTIFY_CONSUMER_IDS_CHANGED}
    assert all(header["flag"] == 2 for header, _ in news)
    return [header["extFields"]["consumerGroup"] for header, _ in news]


def test_members_are_listed_and_told_of_each_other(
    served: Served, client: Client, topic: str, group: str
) -> None:
    answer = beat(client, "c1", group, topic)
    assert answer.ext_fields["IS_SUPPORT_HEART_BEAT_V2"] == "true"
    assert members(client, group) == ["c1"]
    told(client)
    with served.client() as other:
        beat(other, "c2", group, topic)
        assert told(client) == [group]
        assert group in told(other)
        assert members(client, group) == ["c1", "c2"]
        beat(other, "c2", group, topic)
        assert told(client) == []  # nothing new
        other.expect(35, {"clientID": "c2", "consumerGroup": group, "producerGroup": ""})
        assert told(client) == [group]
        assert members(client, group) == ["c1"]
        beat(other, "c2", group, topic)
        told(client)
    header, _ = client._receive()  # a line that closes is a goodbye
    assert (header["code"], header["extFields"]["consumerGroup"]) == (40, group)
    assert members(client, group) == ["c1"]


def test_nobody_is_told_in_a_broadcasting_group(
    client: Client, other: Client, topic: str, group: str
) -> None:
    beat(client, "c1", group, topic, messageModel="BROADCASTING")
    beat(other, "c2", group, topic, messageModel="BROADCASTING")
    assert told(client) == []
    assert members(client, group) == ["c1", "c2"]


def test_a_heartbeat_in_numbers_is_one_too(client: Client, topic: str, group: str) -> None:
    beat(client, "c1", group, topic, consumeType=1, messageModel=1, consumeFromWhere=0)
    assert members(client, group) == ["c1"]


def test_a_group_without_members_is_an_error(client: Client, group: str) -> None:
    assert client.request(38, {"consumerGroup": group}).code == 1


def test_a_heartbeat_makes_the_group_and_its_retry_topic(
    client: Client, topic: str, group: str
) -> None:
    beat(client, "c1", group, topic)
    assert client.pull(f"%RETRY%{group}", 0, 0, group=group).code == 19


def test_a_pull_may_rely_on_the_subscription_of_the_heartbeat(
    client: Client, topic: str, group: str
) -> None:
    subscription = {"topic": topic, "subString": "b", "subVersion": 7}
    beat(client, "c1", group, topic, subscriptionDataSet=[subscription])
    client.send(topic, b"1", {"TAGS": "a"})
    client.send(topic, b"2", {"TAGS": "b"})
    fields = {
        "consumerGroup": group,
        "topic": topic,
        "queueId": 0,
        "queueOffset": 0,
        "maxMsgNums": 32,
        "sysFlag": 0,
        "commitOffset": 0,
        "suspendTimeoutMillis": 0,
    }
    answer = client.expect(11, {**fields, "subVersion": 7})
    assert bodies(decode_records(answer.body)) == [b"2"]
    assert client.request(11, {**fields, "subVersion": 8}).code == 25


def test_a_queue_is_locked_by_one_member(client: Client, topic: str, group: str) -> None:
    def ask(code: int, client_id: str, *queue_ids: int) -> list[int]:
        queues = [{"topic": topic, "brokerName": "broker-a", "queueId": at} for at in queue_ids]
        body = {"consumerGroup": group, "clientId": client_id, "mqSet": queues}
        answer = client.expect(code, body=json.dumps(body).encode())
        granted = json.loads(answer.body)["lockOKMQSet"] if answer.body else []
        return sorted(queue["queueId"] for queue in granted)

    assert ask(41, "c1", 0, 1) == [0, 1]
    assert ask(41, "c2", 1, 2) == [2]
    assert ask(41, "c1", 0, 1, 2) == [0, 1]
    ask(42, "c2", 0, 1)  # not its own
    assert ask(41, "c2", 0, 1) == []
    ask(42, "c1", 1)
    assert ask(41, "c2", 0, 1) == [1]


# --- messages that failed ------------------------------------------------------------------------


def test_a_message_that_was_sent_back_comes_again_after_its_delay(
    client: Client, topic: str, group: str
) -> None:
    client.create_group(group)
    sent = client.send(topic, b"try again", {"UNIQ_KEY": "U7", "KEYS": "k"})
    began_ms = now_ms()
    client.expect(36, {"offset": sent.log_offset, "group": group, "delayLevel": 1})
    client.send(f"%RETRY%{group}", b"by the client itself", reconsume_times=1)  # makes the topic
    [record] = wait_for(client, f"%RETRY%{group}", 1)
    assert record.body == b"try again"
    assert record.reconsume_times == 1
    assert record.properties["RETRY_TOPIC"] == topic
    assert record.properties["ORIGIN_MESSAGE_ID"] == sent.message_id
    assert record.properties["UNIQ_KEY"] == "U7"
    assert 1000 <= record.stored_ms - began_ms < 2500


@pytest.mark.parametrize(
    "changes",
    [{"delayLevel": -1}, {"delayLevel": 0, "maxReconsumeTimes": 0}],
    ids=["asked for", "past the maximum"],
)
def test_a_message_past_hope_goes_to_the_dead_letters(
    client: Client, topic: str, group: str, changes: dict[str, object]
) -> None:
    client.create_group(group)
    sent = client.send(topic, b"hopeless")
    client.expect(36, {"offset": sent.log_offset, "group": group, **changes})
    [record] = client.pull_all(f"%DLQ%{group}", 0)
    assert (record.body, record.reconsume_times) == (b"hopeless", 1)
    assert record.properties["RETRY_TOPIC"] == topic


def test_a_client_that_retries_too_often_itself_ends_in_the_dead_letters(
    client: Client, group: str
) -> None:
    client.create_group(group)
    fields = v1(f"%RETRY%{group}", reconsumeTimes=17)
    client.expect(10, fields, b"hopeless")
    client.expect(10, {**fields, "reconsumeTimes": 3, "maxReconsumeTimes": 2}, b"hopeless too")
    assert bodies(client.pull_all(f"%DLQ%{group}", 0)) == [b"hopeless", b"hopeless too"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"group": "no-such-group"}, 26), ({"offset": 2**62}, 1), ({"offset": -1}, 1)],
)
def test_a_send_back_that_makes_no_sense_is_refused(
    client: Client, topic: str, group: str, changes: dict[str, object], code: int
) -> None:
    client.create_group(group)
    sent = client.send(topic, b"1")
    fields = {"offset": sent.log_offset, "group": group, "delayLevel": 1}
    assert client.request(36, {**fields, **changes}).code == code


# --- restarts ------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A broker for one test alone."""
    with Served(tmp_path_factory.mktemp("own")) as server:
        yield server
    server.assert_clean()


def test_a_restart_keeps_topics_groups_offsets_and_messages(own: Served) -> None:
    with own.client() as client:
        client.create_topic("orders", queues=3)
        client.expect(200, body=b'{"groupName":"off","consumeEnable":false}')
        client.create_group("readers")
        client.send("auto", b"1", queue_id=3)
        client.send("orders", b"2", {"KEYS": "k"}, queue_id=2)
        client.commit_offset("readers", "orders", 2, 1)
    own.restart()
    with own.client() as client:
        assert client.pull("orders", 2, 0, group="off").code == 16
        assert client.request(10, v1("orders", queueId=3), b"x").code == 29
        assert client.committed_offset("readers", "orders", 2) == 1
        assert bodies(client.pull_all("auto", 3)) == [b"1"]
        assert bodies(client.query_by_key("orders", "k")) == [b"2"]
        assert client.send("orders", b"3", queue_id=2).queue_offset == 1


def test_what_is_due_while_the_broker_is_down_is_delivered_once_afterwards(own: Served) -> None:
    with own.client() as client:
        client.create_topic("orders")
        client.send("orders", b"by time", {"TIMER_DELAY_MS": "200"}, queue_id=1)
        client.send("orders", b"by level", {"DELAY": "1"})
    own.restart()
    with own.client() as client:
        assert bodies(wait_for(client, "orders", 0)) == [b"by level"]
    own.restart()
    with own.client() as client:
        client.send("orders", b"a second later", {"DELAY": "1"})
        assert bodies(wait_for(client, "orders", 1)) == [b"a second later"]
        assert bodies(client.pull_all("orders", 0)) == [b"by level", b"a second later"]
        assert bodies(client.pull_all("orders", 1)) == [b"by time"]


def test_a_restart_does_not_deliver_again_what_overtook_a_later_one(own: Served) -> None:
    """The first message is due in an hour, the second at once: the second is not due twice."""
    with own.client() as client:
        client.create_topic("orders")
        client.send("orders", b"in an hour", {"TIMER_DELAY_SEC": "3600"})
        client.send("orders", b"soon", {"TIMER_DELAY_MS": "100"})
        assert bodies(wait_for(client, "orders", 0)) == [b"soon"]
    own.restart()
    with own.client() as client:
        client.send("orders", b"later", {"TIMER_DELAY_MS": "400"})
        wait_for(client, "orders", 1)
        assert bodies(client.pull_all("orders", 0)) == [b"soon", b"later"]
