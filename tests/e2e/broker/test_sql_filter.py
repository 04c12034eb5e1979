"""SQL92 filters over the network: pulls, long polling, subscriptions of heartbeats, refusals."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.records import decode_records
from tests.interop.remoting import Client, Response
from tests.support.brokers import Server, next_response, start_pull

pytestmark = pytest.mark.slow

GROUP = "sql-readers"
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("broker"), conf={"enablePropertyFilter": "true"}) as server:
        yield server
    server.assert_clean()
    assert "Traceback" not in server.errors, server.errors


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def topic(client: Client) -> str:
    name = f"topic-{next(_numbers)}"
    client.create_topic(name)
    return name


def bodies(response: Response) -> list[bytes]:
    return [record.body for record in decode_records(response.body)]


def check_config(client: Client, expression: str) -> Response:
    subscription = {"topic": "orders", "subString": expression, "expressionType": "SQL92"}
    body = {"clientId": "c", "group": GROUP, "subscriptionData": subscription}
    return client.request(46, body=json.dumps(body).encode())


def heartbeat(client: Client, topic: str, expression: str, version: int) -> None:
    subscription = {
        "topic": topic,
        "subString": expression,
        "expressionType": "SQL92",
        "subVersion": version,
    }
    consumer = {"groupName": GROUP, "subscriptionDataSet": [subscription]}
    client.expect(
        34, body=json.dumps({"clientID": "reader", "consumerDataSet": [consumer]}).encode()
    )


def pull_as_subscribed(client: Client, topic: str, version: int) -> Response:
    return client.request(
        11,
        {
            "consumerGroup": GROUP,
            "topic": topic,
            "queueId": 0,
            "queueOffset": 0,
            "maxMsgNums": 32,
            "sysFlag": 0,
            "commitOffset": 0,
            "suspendTimeoutMillis": 0,
            "subVersion": version,
        },
    )


def test_a_pull_returns_matching_messages_and_skips_the_others(client: Client, topic: str) -> None:
    for price in range(10):
        client.send(topic, b"%d" % price, {"price": str(price), "TAGS": ["even", "odd"][price % 2]})
    response = client.pull(
        topic, 0, 0, subscription="price > 3 AND TAGS = 'odd'", expression_type="SQL92"
    )
    assert bodies(response) == [b"5", b"7", b"9"]
    assert response.ext_fields["nextBeginOffset"] == "10"
    no_match = client.pull(topic, 0, 2, subscription="price > 100", expression_type="SQL92")
    assert (no_match.code, no_match.ext_fields["nextBeginOffset"]) == (20, "10")


def test_only_a_matching_message_wakes_a_pull(server: Server, client: Client, topic: str) -> None:
    with server.client() as waiting:
        start_pull(waiting, topic, 0, subscription="price > 3", kind="SQL92")
        client.send(topic, b"cheap", {"price": "1"})
        client.send(topic, b"unpriced")
        waiting.max_offset(topic, 0)
        assert not waiting.pending_frames
        client.send(topic, b"expensive", {"price": "4"})
        response = next_response(waiting)
        while not response.body:  # a busy broker tests a part of the messages at a time
            next_offset = int(response.ext_fields["nextBeginOffset"])
            start_pull(waiting, topic, next_offset, subscription="price > 3", kind="SQL92")
            response = next_response(waiting)
        assert bodies(response) == [b"expensive"]


def test_the_subscription_of_a_heartbeat_filters_pulls(client: Client, topic: str) -> None:
    client.send(topic, b"cheap", {"price": "1"})
    client.send(topic, b"expensive", {"price": "4"})
    heartbeat(client, topic, "price BETWEEN 3 AND 5", version=1)
    assert bodies(pull_as_subscribed(client, topic, 1)) == [b"expensive"]
    heartbeat(client, topic, "price < 3", version=2)
    assert bodies(pull_as_subscribed(client, topic, 2)) == [b"cheap"]
    assert pull_as_subscribed(client, topic, 3).code == 25
    heartbeat(client, topic, "price < < 3", version=4)
    refused = pull_as_subscribed(client, topic, 4)
    assert refused.code == 27
    assert "at character 9" in refused.remark


def test_an_invalid_expression_is_refused_with_the_position_of_the_error(
    client: Client, topic: str
) -> None:
    assert check_config(client, "a > 1").code == 0
    refused = check_config(client, "a > 1 AND (b = 2")
    assert (refused.code, refused.remark) == (
        23,
        "SQL92, at character 17: ) is missing before the end",
    )
    refused = client.pull(topic, 0, 0, subscription="a >", expression_type="SQL92")
    assert refused.code == 23
    assert "at character 4" in refused.remark


def test_without_enable_property_filter_sql_is_refused_and_the_refusal_names_the_setting(
    tmp_path: Path,
) -> None:
    with Server(tmp_path) as server, server.client() as client:
        client.create_topic("orders")
        for refused in (
            client.pull("orders", 0, 0, subscription="a > 1", expression_type="SQL92"),
            check_config(client, "a > 1"),
        ):
            assert refused.code == 1
            assert "enablePropertyFilter" in refused.remark
