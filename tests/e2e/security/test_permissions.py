"""Permissions of accounts, attacked over the network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.interop.remoting import Response, SendResult
from tests.support.acl_broker import (
    ADMIN,
    READER,
    USER,
    WRITER,
    assert_refused,
    broker_with_acl,
    send_fields,
)
from tests.support.brokers import Served
from tests.support.signing import SignedClient


def heartbeat(client: SignedClient, group: str, topic: str) -> Response:
    wanted = {"topic": topic, "subString": "*", "subVersion": 1}
    consumer = {"groupName": group, "subscriptionDataSet": [wanted]}
    body = {"clientID": "c", "producerDataSet": [], "consumerDataSet": [consumer]}
    return client.request(34, body=json.dumps(body).encode())


def lock(client: SignedClient, group: str, topic: str) -> Response:
    queue = {"topic": topic, "brokerName": "broker-a", "queueId": 0}
    body = {"consumerGroup": group, "clientId": "c", "mqSet": [queue]}
    return client.request(41, body=json.dumps(body).encode())


def offset_fields(group: str, topic: str) -> dict[str, object]:
    return {"consumerGroup": group, "topic": topic, "queueId": 0}


def by_key(topic: str) -> dict[str, object]:
    return {"topic": topic, "key": "k", "maxNum": 1, "beginTimestamp": 0, "endTimestamp": 9}


Ask = Callable[[SignedClient], Response]
NOT_FOR_WRITER: dict[str, Ask] = {
    "send elsewhere": lambda c: c.request(310, send_fields("others"), b"x"),
    "send to a new topic": lambda c: c.request(310, send_fields("brand-new"), b"x"),
    "send to a group's retries": lambda c: c.request(310, send_fields("%RETRY%readers"), b"x"),
    "send to a group's dead": lambda c: c.request(310, send_fields("%DLQ%readers"), b"x"),
    "send to the halves": lambda c: c.request(310, send_fields("RMQ_SYS_TRANS_HALF_TOPIC"), b"x"),
    "a reply to elsewhere": lambda c: c.request(
        325, send_fields("others", "REPLY_TO_CLIENT\x01c\x02"), b"x"
    ),
    "read": lambda c: c.pull("orders", 0, 0, group="readers"),
    "how far it goes": lambda c: c.request(30, {"topic": "orders", "queueId": 0}),
    "find by key": lambda c: c.request(12, by_key("orders")),
    "another's writer": lambda c: c.request(3702, {"writer": "readers"}),
    "make a topic": lambda c: c.request(
        17, {"topic": "mine", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
    ),
    "remove a topic": lambda c: c.request(215, {"topic": "orders"}),
    "make a group": lambda c: c.request(200, body=b'{"groupName":"mine"}'),
    "list transactions": lambda c: c.request(3711),
    "show one": lambda c: c.request(3712, {"transactionId": "x"}),
    "settle one": lambda c: c.request(
        3713, {"transactionId": "x", "commitOrRollback": 8, "reason": "because"}
    ),
    "resume one": lambda c: c.request(3714, {"transactionId": "x"}),
    "resume one, as RocketMQ": lambda c: c.request(323, {"topic": "t", "msgId": "x"}),
    "what nobody has thought of": lambda c: c.request(21),
}
NOT_FOR_READER: dict[str, Ask] = {
    "send": lambda c: c.request(310, send_fields("orders"), b"x"),
    "read elsewhere": lambda c: c.pull("others", 0, 0, group="readers"),
    "read as another group": lambda c: c.pull("orders", 0, 0, group="strangers"),
    "read another's retries": lambda c: c.pull("%RETRY%strangers", 0, 0, group="readers"),
    "read another's dead": lambda c: c.pull("%DLQ%strangers", 0, 0, group="readers"),
    "read halves": lambda c: c.pull("RMQ_SYS_TRANS_HALF_TOPIC", 0, 0, group="readers"),
    "join another group": lambda c: heartbeat(c, "strangers", "orders"),
    "subscribe elsewhere": lambda c: heartbeat(c, "readers", "others"),
    "who is in another group": lambda c: c.request(38, {"consumerGroup": "strangers"}),
    "unregister another group": lambda c: c.request(
        35, {"clientID": "c", "consumerGroup": "strangers"}
    ),
    "another's offset": lambda c: c.request(14, offset_fields("strangers", "orders")),
    "move another's offset": lambda c: c.request(
        15, {**offset_fields("strangers", "orders"), "commitOffset": 9}
    ),
    "move an offset elsewhere": lambda c: c.request(
        15, {**offset_fields("readers", "others"), "commitOffset": 9}
    ),
    "lock for another group": lambda c: lock(c, "strangers", "orders"),
    "lock elsewhere": lambda c: lock(c, "readers", "others"),
    "send back for another group": lambda c: c.request(
        36, {"offset": 0, "group": "strangers", "delayLevel": 0}
    ),
}


@pytest.mark.parametrize("attack", NOT_FOR_WRITER)
def test_a_writer_is_refused_what_it_may_not_do(
    served: Served, admin: SignedClient, attack: str
) -> None:
    ends = [admin.max_offset(topic, 0) for topic in ("orders", "others")]
    with SignedClient(served.address, *WRITER) as client:
        assert_refused(NOT_FOR_WRITER[attack](client))
    assert [admin.max_offset(topic, 0) for topic in ("orders", "others")] == ends


@pytest.mark.parametrize("attack", NOT_FOR_READER)
def test_a_reader_is_refused_what_it_may_not_do(served: Served, attack: str) -> None:
    with SignedClient(served.address, *READER) as client:
        assert_refused(NOT_FOR_READER[attack](client))


def test_refused_requests_had_no_effect(served: Served, admin: SignedClient) -> None:
    for group, topic in (("strangers", "orders"), ("readers", "others")):
        assert admin.committed_offset(group, topic, 0) != 9
    assert admin.request(38, {"consumerGroup": "strangers"}).code == 1  # nobody is in it
    with SignedClient(served.namesrv_address, *ADMIN) as names:
        assert names.route("brand-new") is None
        assert names.route("mine") is None


def test_accounts_may_do_what_their_permissions_allow(served: Served) -> None:
    with SignedClient(served.address, *WRITER) as writer:
        sent = writer.send("orders", b"to be read")
        writer.send("RMQ_SYS_TRACE_TOPIC", b"every client traces")
        writer.heartbeat("w", producer_groups=("g",))
        assert writer.request(3702, {"writer": "loader"}).code == 0
    with SignedClient(served.address, *READER) as reader:
        assert heartbeat(reader, "readers", "orders").code == 0
        assert reader.pull("orders", 0, sent.queue_offset, group="readers").code == 0
        assert reader.view_by_id(sent.message_id).body == b"to be read"
        reader.commit_offset("readers", "orders", 0, 1)
        assert lock(reader, "readers", "orders").code == 0
    with SignedClient(served.address, *USER) as user:
        user.send("orders", b"of a user with policies")
        assert_refused(user.request(310, send_fields("others"), b"x"))
        assert_refused(user.pull("orders", 0, 0, group="readers"))  # that is for 10.0.0.0/8


def test_access_to_a_message_depends_on_its_stored_topic(
    served: Served, admin: SignedClient
) -> None:
    hidden = admin.send("others", b"not for the reader")
    with SignedClient(served.address, *READER) as reader:
        offset = int(hidden.message_id[-16:], 16)
        assert_refused(reader.request(33, {"offset": offset, "topic": "orders"}))
        assert_refused(reader.request(36, {"offset": offset, "group": "readers", "delayLevel": 0}))


def half(client: SignedClient, topic: str, key: str) -> SendResult:
    return client.send_half(topic, b"half", {"UNIQ_KEY": key}, group="banks")


def test_only_an_account_that_may_write_the_topic_ends_a_transaction(
    served: Served, admin: SignedClient
) -> None:
    parked = half(admin, "others", "tx-1")
    end = admin.max_offset("others", 0)
    with SignedClient(served.address, *WRITER) as writer:
        assert_refused(writer.end_transaction(parked, 8, topic="orders", group="banks"))
        assert_refused(writer.end_transaction(parked, 8, topic="", group="banks"))
        places = json.dumps({"halves": [[parked.queue_offset, parked.log_offset]]}).encode()
        assert_refused(
            writer.request(3701, {"producerGroup": "banks", "commitOrRollback": 8}, places)
        )
        # One way, there is no answer; and there is no effect.
        fields = {"topic": "orders", "producerGroup": "banks", "commitOrRollback": 8}
        at = {"tranStateTableOffset": parked.queue_offset, "commitLogOffset": parked.log_offset}
        writer.send_one_way(37, {**fields, **at, "msgId": "tx-1"})
        assert writer.request(3702, {"writer": "loader"}).code == 0  # so that one was read
        own = half(writer, "orders", "tx-2")
        assert writer.end_transaction(own, 8, topic="orders", group="banks").code == 0
    assert admin.max_offset("others", 0) == end
    settled = {"transactionId": "tx-1", "commitOrRollback": 12, "reason": "the test is over"}
    assert admin.request(3713, settled).code == 0


def test_only_a_producer_that_may_write_the_topic_gets_checks(tmp_path: Path) -> None:
    """Any client can claim a producer group; that alone must not let it read half messages."""
    quick: dict[str, object] = {"transactionTimeOut": 100, "transactionCheckInterval": 100}
    with broker_with_acl(tmp_path, quick) as server, SignedClient(server.address, *READER) as spy:
        spy.heartbeat("spy", producer_groups=("banks",))
        with SignedClient(server.address, *ADMIN) as sender:
            sender.create_topic("orders", queues=1)
            half(sender, "orders", "tx-3")
        spy.heartbeat("spy", producer_groups=("banks",))
        with SignedClient(server.address, *WRITER) as writer:
            writer.heartbeat("writer", producer_groups=("banks",))
            header, body = writer.next_frame()
            assert header["code"] == 39
            assert b"half" in body
        spy.heartbeat("spy", producer_groups=("banks",))
        assert spy.pending_frames == []
