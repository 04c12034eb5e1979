"""Operators' requests over real lines: what is handed on to a consumer, what survives a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.interop.remoting import RESPONSE, Client
from tests.support.brokers import Served, next_answer

pytestmark = pytest.mark.slow

RUNNING_INFO, RESET, DELETE_TOPIC, CONFIG, CHANGE_CONFIG = 307, 222, 215, 26, 25


def join(client: Client) -> None:
    beat = {
        "clientID": "c",
        "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [{"topic": "orders"}]}],
    }
    client.expect(34, {}, json.dumps(beat).encode())


def asked_of(client: Client, code: int) -> tuple[dict[str, Any], bytes]:
    """The broker's next question of this kind."""
    while True:
        header, body = client.next_frame()
        if not header["flag"] & RESPONSE and header["code"] == code:
            return header, body


def test_a_question_goes_to_the_consumer_and_its_answer_back(tmp_path: Path) -> None:
    fields = {"consumerGroup": "g", "clientId": "c", "jstackEnable": "false"}
    with Served(tmp_path) as served, served.client() as consumer, served.client() as operator:
        join(consumer)
        operator.send_request(RUNNING_INFO, fields, b"", flag=0)
        header, _ = asked_of(consumer, RUNNING_INFO)
        assert header["extFields"]["clientId"] == "c"
        answer = {"code": 0, "flag": 1, "opaque": header["opaque"], "language": "JAVA"}
        text = json.dumps({**answer, "version": 401}).encode()
        body = b'{"mine":1}'
        size = (4 + len(text) + len(body)).to_bytes(4, "big")
        consumer.socket.sendall(size + len(text).to_bytes(4, "big") + text + body)
        assert next_answer(operator).body == body

        operator.send_request(RUNNING_INFO, fields, b"", flag=0)
        asked_of(consumer, RUNNING_INFO)
        consumer.close()
        assert next_answer(operator).code == 207
        assert operator.request(RUNNING_INFO, fields, b"").code == 1


def test_members_hear_of_a_reset(tmp_path: Path) -> None:
    with Served(tmp_path) as served, served.client() as consumer, served.client() as operator:
        operator.create_topic("orders", queues=1)
        operator.send("orders", b"1")
        join(consumer)
        fields = {"topic": "orders", "group": "g", "timestamp": -1, "isForce": "true"}
        operator.expect(RESET, fields)
        _, body = asked_of(consumer, 220)
        told = b'{"offsetTable":{{"topic":"orders","brokerName":"broker-a","queueId":0}:1}}'
        assert body == told


def test_what_was_deleted_or_changed_stays_so_after_a_kill(tmp_path: Path) -> None:
    with Served(tmp_path) as served:
        with served.client() as client:
            client.create_topic("orders", queues=1)
            client.create_topic("bills", queues=1)
            client.send("orders", b"old")
            client.send("bills", b"kept")
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
            assert [record.body for record in client.pull_all("bills", 0)] == [b"kept"]
    served.assert_clean()


def test_a_name_server_keeps_its_keys(tmp_path: Path) -> None:
    with Served(tmp_path) as served:
        key = {"namespace": "space", "key": "colour"}
        with served.name_client() as names:
            names.expect(100, {**key, "value": "red"})
        served.kill()
        served.start()
        with served.name_client() as names:
            assert names.expect(101, key).ext_fields["value"] == "red"
