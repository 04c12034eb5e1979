"""Pulls, long polling and refusals; offsets; queries by key and time."""

from __future__ import annotations

import time

import pytest

from tests.interop.records import decode_records
from tests.interop.remoting import Client
from tests.support.brokers import next_response, start_pull
from tests.support.messaging import bodies

pytestmark = pytest.mark.slow


# --- pulling -------------------------------------------------------------------------------------


def test_every_pull_response_has_the_four_offsets(client: Client, topic: str) -> None:
    client.send(topic, b"1")
    names = ["suggestWhichBrokerId", "nextBeginOffset", "minOffset", "maxOffset"]
    for queue_offset, code in ((0, 0), (1, 19), (9, 21)):
        response = client.pull(topic, 0, queue_offset)
        assert response.code == code
        assert [response.ext_fields[name] for name in names] == ["0", "1", "0", "1"]


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
def test_a_refused_pull_gets_the_code_of_rocketmq(
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

    def pull(expression: str) -> list[bytes]:
        return bodies(decode_records(client.pull(topic, 0, 0, subscription=expression).body))

    assert pull("a") == [b"0", b"3"]
    assert pull("a || c") == [b"0", b"2", b"3"]
    assert pull("*") == [b"0", b"1", b"2", b"3", b"none"]
    response = client.pull(topic, 0, 0, subscription="d")
    assert (response.code, response.ext_fields["nextBeginOffset"]) == (20, "5")


def test_a_pull_returns_at_most_the_requested_number(client: Client, topic: str) -> None:
    for number in range(40):
        client.send(topic, b"%d" % number)
    assert len(decode_records(client.pull(topic, 0, 0, max_messages=3).body)) == 3
    assert len(decode_records(client.pull(topic, 0, 0, max_messages=1000).body)) == 32
    assert len(decode_records(client.pull(topic, 0, 38, max_messages=1000).body)) == 2


def test_a_held_pull_gets_the_next_message(client: Client, other: Client, topic: str) -> None:
    for number in range(20):
        start_pull(client, topic, number)
        other.send(topic, b"%d" % number)
        response = next_response(client)
        assert response.code == 0
        assert bodies(decode_records(response.body)) == [b"%d" % number]
        assert response.ext_fields["nextBeginOffset"] == str(number + 1)


def test_a_held_pull_ignores_other_tags(client: Client, other: Client, topic: str) -> None:
    start_pull(client, topic, 0, subscription="a")
    other.send(topic, b"0", {"TAGS": "b"})
    client.max_offset(topic, 0)
    assert client.pending_frames == []
    other.send(topic, b"1", {"TAGS": "a"})
    assert bodies(decode_records(next_response(client).body)) == [b"1"]


def test_a_held_pull_ends_with_19_when_its_time_is_over(
    client: Client, other: Client, topic: str
) -> None:
    start_pull(other, topic, 0, wait_ms=15_000)
    started_s = time.monotonic()
    start_pull(client, topic, 0, wait_ms=300)
    response = next_response(client)
    assert (response.code, response.ext_fields["nextBeginOffset"]) == (19, "0")
    # Not before its own time, and not at the time of the pull that waits longer.
    assert time.monotonic() - started_s >= 0.3
    other.max_offset(topic, 0)
    assert other.pending_frames == []


def test_many_pulls_are_held_on_one_connection(client: Client, other: Client, topic: str) -> None:
    for queue_id in range(4):
        start_pull(client, topic, 0, queue_id=queue_id)
    for queue_id in (2, 0, 3, 1):
        other.send(topic, b"%d" % queue_id, queue_id=queue_id)
        [record] = decode_records(next_response(client).body)
        assert record.queue_id == queue_id


# --- offsets and queries -------------------------------------------------------------------------


def test_the_committed_offset_is_the_last_one(client: Client, topic: str, group: str) -> None:
    client.create_group(group)
    fields = {"consumerGroup": group, "topic": topic, "queueId": 1}
    assert client.request(14, {**fields, "setZeroIfNotFound": False}).code == 22
    assert client.request(14, fields).ext_fields == {"offset": "0"}  # all messages are still there
    client.commit_offset(group, topic, 1, 17)
    assert client.committed_offset(group, topic, 1) == 17
    client.commit_offset(group, topic, 1, 3)
    assert client.committed_offset(group, topic, 1) == 3


def test_a_pull_can_commit_an_offset(client: Client, topic: str, group: str) -> None:
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
    client.request(11, {**fields, "commitOffset": -1})  # a client without an offset yet
    assert client.committed_offset(group, topic, 0) == 9


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"topic": "no-such-topic"}, 17), ({"consumerGroup": "no-such-group"}, 26)],
)
def test_a_commit_for_an_unknown_topic_or_group_is_refused(
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
    assert len(client.query_by_key(topic, "blue", max_messages=1)) == 1
    assert client.query_by_key(topic, "green") == []
    assert bodies(client.query_by_key(topic, f"U-{topic}", unique=True)) == [b"1"]
    assert client.view_by_id(sent.message_id).body == b"1"
    assert client.request(33, {"offset": sent.log_offset + 1}).code == 1


def test_the_response_to_a_query_by_key_fits_into_a_frame(client: Client, topic: str) -> None:
    """A frame holds 16 MiB, and clients refuse a longer one."""
    for _ in range(18):
        client.send(topic, b"x" * (1 << 20), {"KEYS": "many"})
    fields = {"topic": topic, "key": "many", "maxNum": 2**31 - 1}
    response = client.expect(12, {**fields, "beginTimestamp": 0, "endTimestamp": 2**63 - 1})
    assert 1 <= len(decode_records(response.body)) <= 15
    assert len(response.body) <= 16 << 20
