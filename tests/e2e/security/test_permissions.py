"""Permissions of accounts: requests that must be refused, sent over the network."""

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
from tests.support.brokers import Server
from tests.support.signing import SignedClient


def heartbeat(client: SignedClient, group: str, topic: str) -> Response:
    subscription = {"topic": topic, "subString": "*", "subVersion": 1}
    consumer = {"groupName": group, "subscriptionDataSet": [subscription]}
    body = {"clientID": "c", "producerDataSet": [], "consumerDataSet": [consumer]}
    return client.request(34, body=json.dumps(body).encode())


def lock(client: SignedClient, group: str, topic: str) -> Response:
    queue = {"topic": topic, "brokerName": "broker-a", "queueId": 0}
    body = {"consumerGroup": group, "clientId": "c", "mqSet": [queue]}
    return client.request(41, body=json.dumps(body).encode())


def offset_fields(group: str, topic: str) -> dict[str, object]:
    return {"consumerGroup": group, "topic": topic, "queueId": 0}


def query_fields(topic: str) -> dict[str, object]:
    return {"topic": topic, "key": "k", "maxNum": 1, "beginTimestamp": 0, "endTimestamp": 9}


RequestFunction = Callable[[SignedClient], Response]
NOT_FOR_WRITER: dict[str, RequestFunction] = {
    "send to another topic": lambda c: c.request(310, send_fields("others"), b"x"),
    "send to a new topic": lambda c: c.request(310, send_fields("brand-new"), b"x"),
    "send to a retry topic": lambda c: c.request(310, send_fields("%RETRY%readers"), b"x"),
    "send to the dead letters": lambda c: c.request(310, send_fields("%DLQ%readers"), b"x"),
    "send to the half topic": lambda c: c.request(
        310, send_fields("RMQ_SYS_TRANS_HALF_TOPIC"), b"x"
    ),
    "reply to another topic": lambda c: c.request(
        325, send_fields("others", "REPLY_TO_CLIENT\x01c\x02"), b"x"
    ),
    "read": lambda c: c.pull("orders", 0, 0, group="readers"),
    "get the end offset": lambda c: c.request(30, {"topic": "orders", "queueId": 0}),
    "find by key": lambda c: c.request(12, query_fields("orders")),
    "register another writer": lambda c: c.request(3702, {"writer": "readers"}),
    "create a topic": lambda c: c.request(
        17, {"topic": "mine", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
    ),
    "delete a topic": lambda c: c.request(215, {"topic": "orders"}),
    "create a group": lambda c: c.request(200, body=b'{"groupName":"mine"}'),
    "list transactions": lambda c: c.request(3711),
    "show a transaction": lambda c: c.request(3712, {"transactionId": "x"}),
    "decide a transaction": lambda c: c.request(
        3713, {"transactionId": "x", "commitOrRollback": 8, "reason": "because"}
    ),
    "resume a transaction": lambda c: c.request(3714, {"transactionId": "x"}),
    "resume a transaction as in RocketMQ": lambda c: c.request(323, {"topic": "t", "msgId": "x"}),
    "a request without a handler": lambda c: c.request(21),
}
NOT_FOR_READER: dict[str, RequestFunction] = {
    "send": lambda c: c.request(310, send_fields("orders"), b"x"),
    "read another topic": lambda c: c.pull("others", 0, 0, group="readers"),
    "read as another group": lambda c: c.pull("orders", 0, 0, group="other-group"),
    "read another group's retries": lambda c: c.pull("%RETRY%other-group", 0, 0, group="readers"),
    "read another group's dead letters": lambda c: c.pull(
        "%DLQ%other-group", 0, 0, group="readers"
    ),
    "read half messages": lambda c: c.pull("RMQ_SYS_TRANS_HALF_TOPIC", 0, 0, group="readers"),
    "join another group": lambda c: heartbeat(c, "other-group", "orders"),
    "subscribe to another topic": lambda c: heartbeat(c, "readers", "others"),
    "list the members of another group": lambda c: c.request(38, {"consumerGroup": "other-group"}),
    "unregister another group": lambda c: c.request(
        35, {"clientID": "c", "consumerGroup": "other-group"}
    ),
    "get another group's offset": lambda c: c.request(14, offset_fields("other-group", "orders")),
    "commit another group's offset": lambda c: c.request(
        15, {**offset_fields("other-group", "orders"), "commitOffset": 9}
    ),
    "commit an offset of another topic": lambda c: c.request(
        15, {**offset_fields("readers", "others"), "commitOffset": 9}
    ),
    "lock a queue for another group": lambda c: lock(c, "other-group", "orders"),
    "lock a queue of another topic": lambda c: lock(c, "readers", "others"),
    "send back for another group": lambda c: c.request(
        36, {"offset": 0, "group": "other-group", "delayLevel": 0}
    ),
}


@pytest.mark.parametrize("attack", NOT_FOR_WRITER)
def test_a_writer_is_refused_requests_without_permission(
    served: Server, admin: SignedClient, attack: str
) -> None:
    ends = [admin.max_offset(topic, 0) for topic in ("orders", "others")]
    with SignedClient(served.address, *WRITER) as client:
        assert_refused(NOT_FOR_WRITER[attack](client))
    assert [admin.max_offset(topic, 0) for topic in ("orders", "others")] == ends


@pytest.mark.parametrize("attack", NOT_FOR_READER)
def test_a_reader_is_refused_requests_without_permission(served: Server, attack: str) -> None:
    with SignedClient(served.address, *READER) as client:
        assert_refused(NOT_FOR_READER[attack](client))


def test_refused_requests_had_no_effect(served: Server, admin: SignedClient) -> None:
    for group, topic in (("other-group", "orders"), ("readers", "others")):
        assert admin.committed_offset(group, topic, 0) != 9
    assert admin.request(38, {"consumerGroup": "other-group"}).code == 1  # has no members
    with SignedClient(served.namesrv_address, *ADMIN) as name_server:
        assert name_server.route("brand-new") is None
        assert name_server.route("mine") is None


def test_accounts_may_do_what_their_permissions_allow(served: Server) -> None:
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
        assert_refused(user.pull("orders", 0, 0, group="readers"))  # allowed only from 10.0.0.0/8


def test_access_to_a_message_depends_on_its_stored_topic(
    served: Server, admin: SignedClient
) -> None:
    hidden = admin.send("others", b"not for the reader")
    with SignedClient(served.address, *READER) as reader:
        offset = int(hidden.message_id[-16:], 16)
        assert_refused(reader.request(33, {"offset": offset, "topic": "orders"}))
        assert_refused(reader.request(36, {"offset": offset, "group": "readers", "delayLevel": 0}))


def park(client: SignedClient, topic: str, key: str) -> SendResult:
    return client.send_half(topic, b"half", {"UNIQ_KEY": key}, group="banks")


def test_only_an_account_that_may_write_the_topic_ends_a_transaction(
    served: Server, admin: SignedClient
) -> None:
    half = park(admin, "others", "tx-1")
    end = admin.max_offset("others", 0)
    with SignedClient(served.address, *WRITER) as writer:
        assert_refused(writer.end_transaction(half, 8, topic="orders", group="banks"))
        assert_refused(writer.end_transaction(half, 8, topic="", group="banks"))
        body = json.dumps({"halves": [[half.queue_offset, half.log_offset]]}).encode()
        assert_refused(
            writer.request(3701, {"producerGroup": "banks", "commitOrRollback": 8}, body)
        )
        # A one-way request gets no response, so only its missing effect can be seen.
        fields = {"topic": "orders", "producerGroup": "banks", "commitOrRollback": 8}
        position = {
            "tranStateTableOffset": half.queue_offset,
            "commitLogOffset": half.log_offset,
        }
        writer.send_one_way(37, {**fields, **position, "msgId": "tx-1"})
        # Requests of a connection are read in order, so the broker has read the one-way request.
        assert writer.request(3702, {"writer": "loader"}).code == 0
        own = park(writer, "orders", "tx-2")
        assert writer.end_transaction(own, 8, topic="orders", group="banks").code == 0
    assert admin.max_offset("others", 0) == end
    rollback = {"transactionId": "tx-1", "commitOrRollback": 12, "reason": "the test is over"}
    assert admin.request(3713, rollback).code == 0


def test_only_a_producer_that_may_write_the_topic_gets_checks(tmp_path: Path) -> None:
    """Any client can claim a producer group; that alone must not let it read half messages."""
    conf: dict[str, object] = {"transactionTimeOut": 100, "transactionCheckInterval": 100}
    with (
        broker_with_acl(tmp_path, conf) as server,
        SignedClient(server.address, *READER) as reader,
    ):
        reader.heartbeat("reader", producer_groups=("banks",))
        with SignedClient(server.address, *ADMIN) as sender:
            sender.create_topic("orders", queues=1)
            park(sender, "orders", "tx-3")
        reader.heartbeat("reader", producer_groups=("banks",))
        with SignedClient(server.address, *WRITER) as writer:
            writer.heartbeat("writer", producer_groups=("banks",))
            header, body = writer.next_frame()
            assert header["code"] == 39
            assert b"half" in body
        reader.heartbeat("reader", producer_groups=("banks",))
        assert reader.pending_frames == []
