"""Topics, consumer groups, their members and queue locks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.interop.records import decode_records
from tests.interop.remoting import Client, Response
from tests.support.brokers import LocalServer
from tests.support.messaging import bodies, send_v1_fields, unique_numbers

pytestmark = pytest.mark.slow

NOTIFY_CONSUMER_IDS_CHANGED, LOCK, UNLOCK = 40, 41, 42


# --- topics and groups ---------------------------------------------------------------------------


def test_the_first_message_creates_a_topic_like_its_template(
    server: LocalServer, client: Client
) -> None:
    name = f"auto-{next(unique_numbers)}"
    client.expect(10, send_v1_fields(name, defaultTopicQueueNums=100), b"1")
    assert (
        client.request(10, send_v1_fields(name, queueId=7), b"2").code == 0
    )  # the template has 8 queues
    assert client.request(10, send_v1_fields(name, queueId=8), b"3").code == 29
    assert bodies(client.pull_all(name, 0)) == [b"1"]


@pytest.mark.parametrize(
    "name",
    [
        *("", "a/b", "a b", "T" * 128, "\u4e2d"),
        *("SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "TBW102", "BenchmarkTest"),
        *("rmq_sys_wheel_timer", "rmq_sys_anything"),
    ],
)
def test_invalid_names_and_system_topics_cannot_be_created(client: Client, name: str) -> None:
    fields = {"topic": name, "defaultTopic": "TBW102", "readQueueNums": 1, "writeQueueNums": 1}
    fields |= {"perm": 6, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": False}
    assert client.request(17, fields).code == 29


@pytest.mark.parametrize("name", ["SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer", "TBW102"])
def test_system_topics_cannot_be_deleted(client: Client, name: str) -> None:
    assert client.request(215, {"topic": name}).code != 0


def test_a_topic_is_deleted_with_its_offsets(client: Client, topic: str, group: str) -> None:
    client.create_group(group)
    client.send(topic, b"1")
    client.commit_offset(group, topic, 0, 1)
    client.expect(215, {"topic": topic})
    assert client.pull(topic, 0, 0).code == 17
    fields = {"consumerGroup": group, "topic": topic, "queueId": 0, "setZeroIfNotFound": False}
    assert client.request(14, fields).code == 22


def test_a_group_keeps_the_settings_it_was_created_with(
    client: Client, topic: str, group: str
) -> None:
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
def test_an_invalid_group_is_refused(client: Client, body: bytes) -> None:
    assert client.request(200, body=body).code != 0


# --- members and locks ---------------------------------------------------------------------------


def heartbeat(client: Client, client_id: str, group: str, topic: str, **changes: Any) -> Response:
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
    response = client.expect(38, {"consumerGroup": group})
    return sorted(json.loads(response.body)["consumerIdList"])


def notifications(client: Client) -> list[str]:
    """Return the groups of which the client was notified that their members changed."""
    client.max_offset(
        "any", 0
    )  # notifications from before the response are in `pending_frames` now
    frames, client.pending_frames[:] = list(client.pending_frames), []
    assert {header["code"] for header, _ in frames} <= {NOTIFY_CONSUMER_IDS_CHANGED}
    assert all(header["flag"] == 2 for header, _ in frames)
    return [header["extFields"]["consumerGroup"] for header, _ in frames]


def test_members_are_listed_and_notified_of_each_other(
    server: LocalServer, client: Client, topic: str, group: str
) -> None:
    response = heartbeat(client, "c1", group, topic)
    assert response.ext_fields["IS_SUPPORT_HEART_BEAT_V2"] == "true"
    assert members(client, group) == ["c1"]
    notifications(client)
    with server.client() as other:
        heartbeat(other, "c2", group, topic)
        assert notifications(client) == [group]
        assert group in notifications(other)
        assert members(client, group) == ["c1", "c2"]
        heartbeat(other, "c2", group, topic)
        assert notifications(client) == []  # the members have not changed
        other.expect(35, {"clientID": "c2", "consumerGroup": group, "producerGroup": ""})
        assert notifications(client) == [group]
        assert members(client, group) == ["c1"]
        heartbeat(other, "c2", group, topic)
        notifications(client)
    header, _ = client.receive_frame()  # a closed connection unregisters its client
    assert (header["code"], header["extFields"]["consumerGroup"]) == (40, group)
    assert members(client, group) == ["c1"]


def test_members_of_a_broadcasting_group_are_not_notified(
    client: Client, other: Client, topic: str, group: str
) -> None:
    heartbeat(client, "c1", group, topic, messageModel="BROADCASTING")
    heartbeat(other, "c2", group, topic, messageModel="BROADCASTING")
    assert notifications(client) == []
    assert members(client, group) == ["c1", "c2"]


def test_a_heartbeat_with_enum_numbers_is_accepted(client: Client, topic: str, group: str) -> None:
    heartbeat(client, "c1", group, topic, consumeType=1, messageModel=1, consumeFromWhere=0)
    assert members(client, group) == ["c1"]


def test_listing_a_group_without_members_is_an_error(client: Client, group: str) -> None:
    assert client.request(38, {"consumerGroup": group}).code == 1


def test_a_heartbeat_creates_the_group_and_its_retry_topic(
    client: Client, topic: str, group: str
) -> None:
    heartbeat(client, "c1", group, topic)
    assert client.pull(f"%RETRY%{group}", 0, 0, group=group).code == 19


@pytest.mark.parametrize("tag", ["b", "b" * 10_240], ids=["short", "10 KiB"])
def test_a_pull_can_use_the_subscription_of_the_heartbeat(
    client: Client, topic: str, group: str, tag: str
) -> None:
    subscription = {"topic": topic, "subString": tag, "subVersion": 7}
    heartbeat(client, "c1", group, topic, subscriptionDataSet=[subscription])
    client.send(topic, b"1", {"TAGS": "a"})
    client.send(topic, b"2", {"TAGS": tag})
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
    response = client.expect(11, {**fields, "subVersion": 7})
    assert bodies(decode_records(response.body)) == [b"2"]
    assert client.request(11, {**fields, "subVersion": 8}).code == 25


def test_a_queue_is_locked_by_one_member(client: Client, topic: str, group: str) -> None:
    def request(code: int, client_id: str, *queue_ids: int) -> list[int]:
        """Lock or unlock queues, and return those that were locked."""
        queues = [
            {"topic": topic, "brokerName": "broker-a", "queueId": queue_id}
            for queue_id in queue_ids
        ]
        body = {"consumerGroup": group, "clientId": client_id, "mqSet": queues}
        response = client.expect(code, body=json.dumps(body).encode())
        locked = json.loads(response.body)["lockOKMQSet"] if response.body else []
        return sorted(queue["queueId"] for queue in locked)

    assert request(LOCK, "c1", 0, 1) == [0, 1]
    assert request(LOCK, "c2", 1, 2) == [2]
    assert request(LOCK, "c1", 0, 1, 2) == [0, 1]
    request(UNLOCK, "c2", 0, 1)  # has no effect: these queues are locked by c1
    assert request(LOCK, "c2", 0, 1) == []
    request(UNLOCK, "c1", 1)
    assert request(LOCK, "c2", 0, 1) == [1]
