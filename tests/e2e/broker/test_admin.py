"""Admin requests over real connections: what reaches a consumer, and what survives a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.interop.remoting import RESPONSE, Client
from tests.support.brokers import Server, next_response

pytestmark = pytest.mark.slow

RUNNING_INFO, RESET, DELETE_TOPIC, CONFIG, CHANGE_CONFIG = 307, 222, 215, 26, 25


def join_group(client: Client) -> None:
    heartbeat = {
        "clientID": "c",
        "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [{"topic": "orders"}]}],
    }
    client.expect(34, {}, json.dumps(heartbeat).encode())


def next_request(client: Client, code: int) -> tuple[dict[str, Any], bytes]:
    """Return the broker's next request with this code; other frames are skipped."""
    while True:
        header, body = client.next_frame()
        if not header["flag"] & RESPONSE and header["code"] == code:
            return header, body


def test_an_admin_request_is_forwarded_to_the_consumer_and_its_response_comes_back(
    tmp_path: Path,
) -> None:
    fields = {"consumerGroup": "g", "clientId": "c", "jstackEnable": "false"}
    with Server(tmp_path) as served, served.client() as consumer, served.client() as operator:
        join_group(consumer)
        operator.send_request(RUNNING_INFO, fields, b"", flag=0)
        header, _ = next_request(consumer, RUNNING_INFO)
        assert header["extFields"]["clientId"] == "c"
        response = {"code": 0, "flag": 1, "opaque": header["opaque"], "language": "JAVA"}
        text = json.dumps({**response, "version": 401}).encode()
        body = b'{"mine":1}'
        size = (4 + len(text) + len(body)).to_bytes(4, "big")
        consumer.socket.sendall(size + len(text).to_bytes(4, "big") + text + body)
        assert next_response(operator).body == body

        # The consumer disconnects instead of responding.
        operator.send_request(RUNNING_INFO, fields, b"", flag=0)
        next_request(consumer, RUNNING_INFO)
        consumer.close()
        assert next_response(operator).code == 207
        assert operator.request(RUNNING_INFO, fields, b"").code == 1


def test_members_are_notified_of_an_offset_reset(tmp_path: Path) -> None:
    with Server(tmp_path) as served, served.client() as consumer, served.client() as operator:
        operator.create_topic("orders", queues=1)
        operator.send("orders", b"1")
        join_group(consumer)
        fields = {"topic": "orders", "group": "g", "timestamp": -1, "isForce": "true"}
        operator.expect(RESET, fields)
        _, body = next_request(consumer, 220)
        expected_body = (
            b'{"offsetTable":{{"topic":"orders","brokerName":"broker-a","queueId":0}:1}}'
        )
        assert body == expected_body


def test_deletions_and_setting_changes_survive_a_kill(tmp_path: Path) -> None:
    with Server(tmp_path) as served:
        with served.client() as client:
            client.create_topic("orders", queues=1)
            client.create_topic("bills", queues=1)
            client.send("orders", b"old")
            client.send("bills", b"bill")
            client.create_group("g")
            client.commit_offset("g", "orders", 0, 1)
            client.expect(DELETE_TOPIC, {"topic": "orders"})
            client.expect(CHANGE_CONFIG, {}, b"maxMessageSize=100\nescrowLogLevel=ERROR\n")
            client.expect(CHANGE_CONFIG, {}, b"listenPort=1\n", allowed=(29,))
            assert b"maxMessageSize=100\n" in client.expect(CONFIG, {}).body
        served.kill()
        served.start()
        with served.client() as client:
            assert b"maxMessageSize=100\n" in client.expect(CONFIG, {}).body
            client.create_topic("orders", queues=1)
            assert client.send("orders", b"new").queue_offset == 0
            assert client.committed_offset("g", "orders", 0) == 0
            assert [record.body for record in client.pull_all("bills", 0)] == [b"bill"]
    served.assert_clean()


def test_key_values_of_a_name_server_survive_a_kill(tmp_path: Path) -> None:
    with Server(tmp_path) as served:
        key = {"namespace": "space", "key": "colour"}
        with served.namesrv_client() as name_server:
            name_server.expect(100, {**key, "value": "red"})
        served.kill()
        served.start()
        with served.namesrv_client() as name_server:
            assert name_server.expect(101, key).ext_fields["value"] == "red"
