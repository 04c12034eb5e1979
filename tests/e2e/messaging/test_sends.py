"""Sends to a real broker: fields, batches, one-way, delays, replies, and refusals."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import pytest

from tests.interop.records import encode_properties
from tests.interop.remoting import Client
from tests.support.brokers import LocalServer, next_response
from tests.support.messaging import bodies, now_ms, send_v1_fields, wait_for_messages
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


def encode_batch(*messages: tuple[bytes, Mapping[str, str]], flag: int = 0) -> bytes:
    """Encode messages, given as body and properties, as the body of a batch."""
    encoded = b""
    for body, properties in messages:
        text = encode_properties(properties).encode()
        size = 22 + len(body) + len(text)
        encoded += struct.pack(">iiiii", size, 0, 0, flag, len(body)) + body
        encoded += struct.pack(">h", len(text)) + text
    return encoded


# --- sends ---------------------------------------------------------------------------------------


def test_a_send_with_long_field_names_is_stored_unchanged(client: Client, topic: str) -> None:
    born_ms = now_ms() - 1000
    properties = encode_properties({"TAGS": "a", "KEYS": "k1 k2", "mine": "ä\u20ac"})
    fields = send_v1_fields(topic, queueId=2, flag=7, bornTimestamp=born_ms, properties=properties)
    response = client.expect(10, fields, b"body")
    assert response.ext_fields["queueId"] == "2"
    assert response.ext_fields["queueOffset"] == "0"
    [record] = client.pull_all(topic, 2)
    assert (record.body, record.flag, record.born_ms) == (b"body", 7, born_ms)
    assert record.properties["mine"] == "ä\u20ac"
    assert record.properties["TAGS"] == "a"
    assert record.properties["CLUSTER"] == "DefaultCluster"
    assert record.properties["MSG_REGION"] == "DefaultRegion"
    assert int(response.ext_fields["msgId"][-16:], 16) == record.log_offset
    assert record.born_host.startswith("127.0.0.1:")
    assert record.store_host == client.address


def test_sends_get_consecutive_offsets(client: Client, topic: str) -> None:
    results = [client.send(topic, b"%d" % number) for number in range(40)]
    assert [result.queue_offset for result in results] == list(range(40))
    assert bodies(client.pull_all(topic, 0)) == [b"%d" % number for number in range(40)]


def test_a_send_without_a_unique_key_gets_one(client: Client, topic: str) -> None:
    client.send(topic, b"1")
    client.send(topic, b"2")
    first, second = client.pull_all(topic, 0)
    assert first.properties["UNIQ_KEY"] != second.properties["UNIQ_KEY"]


def test_a_user_property_whose_name_ends_like_a_system_property_is_stored_unchanged(
    client: Client, topic: str
) -> None:
    """Whole names are compared: `MY_UNIQ_KEY` is not `UNIQ_KEY`."""
    client.send(topic, b"1", {"MY_UNIQ_KEY": "x", "THEIR_MSG_REGION": "y"})
    [record] = client.pull_all(topic, 0)
    assert record.properties["MY_UNIQ_KEY"] == "x"
    assert "UNIQ_KEY" in record.properties
    assert record.properties["MSG_REGION"] == "DefaultRegion"


def test_a_batch_is_stored_as_single_messages(client: Client, topic: str) -> None:
    body = encode_batch(
        (b"one", {"UNIQ_KEY": "u1", "TAGS": "a"}), (b"two", {"UNIQ_KEY": "u2"}), flag=3
    )
    fields = {"a": "p", "b": topic, "c": "TBW102", "d": 4, "e": 1, "f": 0, "g": 5, "h": 0}
    response = client.expect(320, {**fields, "i": "", "m": True}, body)
    first, second = client.pull_all(topic, 1)
    assert (first.body, first.properties["UNIQ_KEY"], first.flag) == (b"one", "u1", 3)
    assert (second.body, second.properties["UNIQ_KEY"]) == (b"two", "u2")
    ids = response.ext_fields["msgId"].split(",")
    assert [int(id_[-16:], 16) for id_ in ids] == [first.log_offset, second.log_offset]
    assert response.ext_fields["queueOffset"] == "0"


def test_a_message_of_a_batch_without_a_unique_key_gets_one(client: Client, topic: str) -> None:
    fields = {"a": "p", "b": topic, "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 5, "h": 0}
    client.expect(320, {**fields, "m": True}, encode_batch((b"one", {}), (b"two", {})))
    first, second = client.pull_all(topic, 0)
    assert first.properties["UNIQ_KEY"] != second.properties["UNIQ_KEY"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0" * 21,
        encode_batch((b"x", {}))[:-1],
        encode_batch((b"x", {"TRAN_MSG": "true"})),
        b"\xff" * 40,
    ],
    ids=["empty", "too short", "truncated", "transactional", "garbage"],
)
def test_an_invalid_batch_is_refused_and_stores_nothing(
    client: Client, topic: str, body: bytes
) -> None:
    fields = {"a": "p", "b": topic, "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 5, "h": 0}
    assert client.request(320, {**fields, "m": True}, body).code == 13
    assert client.max_offset(topic, 0) == 0


def test_a_one_way_send_is_stored_without_a_response(client: Client, topic: str) -> None:
    client.send_one_way(10, send_v1_fields(topic), b"stored")
    client.send_one_way(10, send_v1_fields(topic, queueId=99), b"refused")
    # The first response may come in the same turn, before the message is stored.
    client.max_offset(topic, 0)
    assert client.max_offset(topic, 0) == 1
    assert client.pending_frames == []


def test_the_broker_chooses_the_queue_of_a_send_without_one(client: Client, topic: str) -> None:
    queue_ids = {client.send(topic, b"x", queue_id=-1).queue_id for _ in range(60)}
    assert queue_ids == {0, 1, 2, 3}
    assert sum(client.max_offset(topic, queue_id) for queue_id in range(4)) == 60


def test_compressed_bodies_are_returned_unchanged(client: Client, topic: str) -> None:
    # The broker does not decompress a body, so it does not notice that this one is invalid.
    client.send(topic, b"\x78\x9c not really compressed", sys_flag=1)
    [record] = client.pull_all(topic, 0)
    assert record.sys_flag == 1
    assert record.body.startswith(b"\x78\x9c")


def test_a_delay_level_delays_a_message(client: Client, topic: str) -> None:
    sent_ms = now_ms()
    sent = client.send(topic, b"later", {"DELAY": "1", "UNIQ_KEY": "U1"}, queue_id=0)
    assert sent.queue_id == 0
    assert client.max_offset(topic, 0) == 0
    [record] = wait_for_messages(client, topic, 0)
    assert 1000 <= record.stored_ms - sent_ms < 5000  # not the delay of the next level
    assert record.body == b"later"
    assert record.properties["UNIQ_KEY"] == "U1"
    assert record.properties["DELAY"] == "1"  # as in RocketMQ, for getDelayTimeLevel()


@pytest.mark.parametrize("name", ["TIMER_DELIVER_MS", "TIMER_DELAY_SEC", "TIMER_DELAY_MS"])
def test_a_timer_property_sets_the_time_of_delivery(client: Client, topic: str, name: str) -> None:
    sent_ms = now_ms()
    value = {
        "TIMER_DELIVER_MS": sent_ms + 700,
        "TIMER_DELAY_SEC": 1,
        "TIMER_DELAY_MS": 700,
    }[name]
    client.send(topic, b"late", {name: str(value)})
    client.send(topic, b"overdue", {"TIMER_DELIVER_MS": str(sent_ms - 5)})
    assert bodies(client.pull_all(topic, 0)) == [b"overdue"]
    [record] = wait_for_messages(client, topic, 1)
    assert record.body == b"late"
    assert record.stored_ms - sent_ms >= 700


@pytest.mark.parametrize("value", ["soon", "-1", str(2**63 - 1), "9" * 40])
def test_an_invalid_time_of_delivery_is_refused(client: Client, topic: str, value: str) -> None:
    fields = send_v1_fields(topic, properties=encode_properties({"TIMER_DELIVER_MS": value}))
    assert client.request(10, fields, b"x").code == 13
    assert client.max_offset(topic, 0) == 0


REPLY_TOPIC = "DefaultCluster_REPLY_TOPIC"


def reply_fields(requester: str) -> dict[str, object]:
    properties = {"REPLY_TO_CLIENT": requester, "CORRELATION_ID": "c1"}
    return send_v1_fields(REPLY_TOPIC, properties=encode_properties(properties))


@pytest.mark.parametrize(("requester_code", "code"), [(0, 0), (1, 1)], ids=["accepted", "refused"])
def test_a_reply_is_pushed_to_the_requester_and_gets_its_response(
    client: Client, other: Client, requester_code: int, code: int
) -> None:
    client.heartbeat("requester", producer_groups=("requesters",))
    end = other.max_offset(REPLY_TOPIC, 0)
    other.send_request(324, reply_fields("requester"), b"the reply", flag=0)
    header, body = client.receive_frame()
    assert (header["code"], header["flag"], body) == (326, 0, b"the reply")
    fields = header["extFields"]
    assert "CORRELATION_ID\x01c1\x02" in fields["properties"]
    assert "PUSH_REPLY_TIME\x01" in fields["properties"]
    assert fields["bornHost"] == "{}:{}".format(*other.socket.getsockname())
    assert fields["storeHost"] == other.address
    client.respond(header, code=requester_code)
    response = next_response(other)
    assert response.code == code
    if code == 0:
        assert response.ext_fields["queueOffset"] == str(end)
    assert other.max_offset(REPLY_TOPIC, 0) == end + 1


@pytest.mark.parametrize("requester", ["disconnected", "unknown"])
def test_a_reply_to_a_requester_that_is_not_connected_is_an_error(
    client: Client, server: LocalServer, requester: str
) -> None:
    with server.client() as disconnected:
        disconnected.heartbeat("disconnected", producer_groups=("requesters",))
    wait_until(
        lambda: client.request(324, reply_fields(requester), b"late").remark.endswith("broker"),
        "the broker notices that the requester has disconnected",
    )
    end = client.max_offset(REPLY_TOPIC, 0)
    response = client.request(324, reply_fields(requester), b"later")
    assert (response.code, response.remark) == (
        1,
        f"the requester {requester} is not connected to this broker",
    )
    assert client.max_offset(REPLY_TOPIC, 0) == end + 1  # stored, so that an operator can find it


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
        ({"topic": "no-such-topic", "defaultTopic": "no-template"}, 17),
        ({"topic": "no-such-topic", "defaultTopic": ""}, 17),
        ({"queueId": 4}, 29),
        ({"queueId": 2**31 - 1}, 29),
        ({"topic": f"%RETRY%{'g' * 121}"}, 26),
        ({"properties": "a\x01" + "x" * 33_000}, 13),
    ],
)
def test_a_refused_send_gets_the_code_of_rocketmq(
    client: Client, topic: str, changes: dict[str, object], code: int
) -> None:
    response = client.request(10, {**send_v1_fields(topic), **changes}, b"x")
    assert response.code == code, response.remark
    assert response.remark


def test_a_body_longer_than_the_limit_is_refused(client: Client, topic: str) -> None:
    limit = 4 << 20
    assert client.request(10, send_v1_fields(topic), b"x" * (limit + 1)).code == 13
    client.expect(10, send_v1_fields(topic), b"x" * limit)
    [record] = client.pull_all(topic, 0)
    assert len(record.body) == limit


def test_a_message_that_cannot_be_stored_does_not_affect_others_of_its_turn(
    server: LocalServer, client: Client, other: Client, topic: str
) -> None:
    """Both requests arrive in the same turn, so they share one append."""
    fields = {"a": "p", "b": topic, "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 5, "h": 0}
    too_long = encode_batch((b"x", {"a": "x" * (32_767 - 3)}))
    with server.frozen():
        other.send_request(320, {**fields, "m": True}, too_long, flag=0)
        client.send_request(10, send_v1_fields(topic), b"good", flag=0)
    assert next_response(other).code == 13
    assert next_response(client).code == 0
    assert bodies(client.pull_all(topic, 0)) == [b"good"]


def test_a_zero_byte_in_the_properties_does_not_affect_others_of_its_turn(
    server: LocalServer, client: Client, other: Client, topic: str
) -> None:
    with server.frozen():
        other.send_request(10, send_v1_fields(topic, properties="a\x01\0\x02"), b"bad", flag=0)
        client.send_request(10, send_v1_fields(topic), b"good", flag=0)
    assert next_response(other).code in (1, 13)
    assert next_response(client).code == 0
