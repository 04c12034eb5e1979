"""SQL92 filters on the wire: pulls, pulls that wait, subscriptions of heartbeats, refusals."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.records import decode_records
from tests.interop.remoting import Client, Response
from tests.support.brokers import Served, begin_pull, next_answer

pytestmark = pytest.mark.slow

GROUP = "sql-readers"
_numbers = itertools.count()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("broker"), conf={"enablePropertyFilter": "true"}) as server:
        yield server
    server.assert_clean()
    assert "Traceback" not in server.errors, server.errors


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with served.client() as line:
        yield line


@pytest.fixture
def topic(client: Client) -> str:
    name = f"topic-{next(_numbers)}"
    client.create_topic(name)
    return name


def bodies(answer: Response) -> list[bytes]:
    return [record.body for record in decode_records(answer.body)]


def check_config(client: Client, expression: str) -> Response:
    wanted = {"topic": "orders", "subString": expression, "expressionType": "SQL92"}
    body = {"clientId": "c", "group": GROUP, "subscriptionData": wanted}
    return client.request(46, body=json.dumps(body).encode())


def heartbeat(client: Client, topic: str, expression: str, version: int) -> None:
    wanted = {
        "topic": topic,
        "subString": expression,
        "expressionType": "SQL92",
        "subVersion": version,
    }
    consumer = {"groupName": GROUP, "subscriptionDataSet": [wanted]}
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


def test_a_pull_gets_what_matches_and_steps_over_the_rest(client: Client, topic: str) -> None:
    for price in range(10):
        client.send(topic, b"%d" % price, {"price": str(price), "TAGS": ["even", "odd"][price % 2]})
    answer = client.pull(
        topic, 0, 0, subscription="price > 3 AND TAGS = 'odd'", expression_type="SQL92"
    )
    assert bodies(answer) == [b"5", b"7", b"9"]
    assert answer.ext_fields["nextBeginOffset"] == "10"
    nothing = client.pull(topic, 0, 2, subscription="price > 100", expression_type="SQL92")
    assert (nothing.code, nothing.ext_fields["nextBeginOffset"]) == (20, "10")


def test_only_a_message_that_matches_wakes_a_pull(
    served: Served, client: Client, topic: str
) -> None:
    with served.client() as waiting:
        begin_pull(waiting, topic, 0, subscription="price > 3", kind="SQL92")
        client.send(topic, b"cheap", {"price": "1"})
        client.send(topic, b"unpriced")
        waiting.max_offset(topic, 0)
        assert not waiting.pending_frames
        client.send(topic, b"dear", {"price": "4"})
        assert bodies(next_answer(waiting)) == [b"dear"]


def test_the_subscription_of_a_heartbeat_filters_too(client: Client, topic: str) -> None:
    client.send(topic, b"cheap", {"price": "1"})
    client.send(topic, b"dear", {"price": "4"})
    heartbeat(client, topic, "price BETWEEN 3 AND 5", version=1)
    assert bodies(pull_as_subscribed(client, topic, 1)) == [b"dear"]
    heartbeat(client, topic, "price < 3", version=2)
    assert bodies(pull_as_subscribed(client, topic, 2)) == [b"cheap"]
    assert pull_as_subscribed(client, topic, 3).code == 25
    heartbeat(client, topic, "price < < 3", version=4)
    refused = pull_as_subscribed(client, topic, 4)
    assert refused.code == 27
    assert "at character 9" in refused.remark


def test_a_bad_expression_is_refused_with_its_place(client: Client, topic: str) -> None:
    assert check_config(client, "a > 1").code == 0
    refused = check_config(client, "a > 1 AND (b = 2")
    assert (refused.code, refused.remark) == (
        23,
        "SQL92, at character 17: ) is missing before the end",
    )
    refused = client.pull(topic, 0, 0, subscription="a >", expression_type="SQL92")
    assert refused.code == 23
    assert "at character 4" in refused.remark


def test_without_the_setting_sql_is_refused_and_the_refusal_names_it(tmp_path: Path) -> None:
    with Served(tmp_path) as served, served.client() as client:
        client.create_topic("orders")
        for refused in (
            client.pull("orders", 0, 0, subscription="a > 1", expression_type="SQL92"),
            check_config(client, "a > 1"),
        ):
            assert refused.code == 1
            assert "enablePropertyFilter" in refused.remark
