"""Queries to one broker: which entries are omitted, and which responses are errors."""

from __future__ import annotations

from typing import Any

import pytest

from escrowmq.admin import SyncConnection
from escrowmq.admin.queries import (
    all_progress,
    broker_settings,
    consumer_connections,
    group_configs,
    topic_offsets,
    total_lag,
)
from escrowmq.errors import BrokenBody, RequestRefused
from escrowmq.remoting.bodies import encode_body
from escrowmq.remoting.bodies_admin import ClientEntry, ConsumeOffset, ConsumerConnections
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import encode_response
from tests.support.scripted_broker import ScriptedBroker, json_response, queue_name


def test_topics_that_do_not_exist_are_omitted() -> None:
    with ScriptedBroker() as broker, SyncConnection(broker.address) as connection:
        broker.serve_topic("orders", (0, 5), (2, 3))
        offsets = topic_offsets(connection, ["deleted", "orders"])
    assert list(offsets) == ["orders"]
    assert offsets["orders"][queue_name("orders", 1)].min_offset == 2


def test_any_other_refusal_is_raised() -> None:
    with ScriptedBroker() as broker, SyncConnection(broker.address) as connection:
        broker.responses[RequestCode.GET_TOPIC_STATS_INFO] = lambda request: encode_response(
            request, code=ResponseCode.NO_PERMISSION, remark="not allowed"
        )
        with pytest.raises(RequestRefused, match="not allowed"):
            topic_offsets(connection, ["orders"])


def test_the_progress_of_groups_is_read_from_rocketmq_4_which_sends_no_pull_offset() -> None:
    offset = b'{"brokerOffset": 5, "consumerOffset": 3, "lastTimestamp": 1}'
    key = b'{"brokerName": "a", "queueId": 0, "topic": "orders"}'
    table = b'{"consumeTps": 0.0, "offsetTable": {%s: %s}}' % (key, offset)
    body = b'{"brokerAddr": "h:1", "consumeStatsList": [{"g": [%s]}], "totalDiff": 2}' % table
    with ScriptedBroker() as broker, SyncConnection(broker.address) as connection:
        broker.responses[RequestCode.GET_BROKER_CONSUME_STATS] = json_response(body)
        [progress] = all_progress(connection)["g"].values()
    assert (progress.broker_offset, progress.consumer_offset) == (5, 3)


def test_groups_without_connected_members_are_omitted() -> None:
    def respond(request: Request[Any]) -> bytes:
        if request.head.fields.consumer_group == "offline":
            return encode_response(request, code=ResponseCode.CONSUMER_NOT_ONLINE)
        client = ClientEntry(client_id="c1", client_addr="h:1", language="PYTHON", version=1)
        body = ConsumerConnections(
            connection_set=[client],
            subscription_table={},
            consume_type="CONSUME_PASSIVELY",
            message_model="CLUSTERING",
            consume_from_where="CONSUME_FROM_LAST_OFFSET",
        )
        return encode_response(request, body=encode_body(body))

    with ScriptedBroker() as broker, SyncConnection(broker.address) as connection:
        broker.responses[RequestCode.GET_CONSUMER_CONNECTION_LIST] = respond
        connections = consumer_connections(connection, ["offline", "online"])
    assert list(connections) == ["online"]
    assert [client.client_id for client in connections["online"].connection_set] == ["c1"]


def test_a_response_that_is_not_an_object_is_an_error() -> None:
    with ScriptedBroker() as broker, SyncConnection(broker.address) as connection:
        broker.responses[RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG] = json_response(b"[1]")
        with pytest.raises(BrokenBody, match="not a JSON object but list"):
            group_configs(connection)


def test_settings_are_parsed_without_comments_and_invalid_lines() -> None:
    with ScriptedBroker() as broker, SyncConnection(broker.address) as connection:
        broker.responses[RequestCode.GET_BROKER_CONFIG] = json_response(
            b"#Wed Jan 1\nlistenPort=10911\n secret = ***\ninvalid line\n"
        )
        assert broker_settings(connection) == {"listenPort": "10911", "secret": "***"}


def test_the_lag_of_a_queue_is_never_negative() -> None:
    """A group is ahead of a queue that was deleted and created again."""

    def offset(broker_offset: int, consumer_offset: int) -> ConsumeOffset:
        return ConsumeOffset(
            broker_offset=broker_offset,
            consumer_offset=consumer_offset,
            pull_offset=0,
            last_timestamp=0,
        )

    assert total_lag([offset(10, 7), offset(2, 9)]) == 3
