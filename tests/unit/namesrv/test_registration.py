"""Requests that a broker sends to a name server, and their responses."""

from __future__ import annotations

import json
import zlib

from escrowmq.message.topic_config import TopicConfig
from escrowmq.namesrv.registration import (
    BrokerDescription,
    registration_request,
    unregistration_request,
)
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import encode_header
from tests.support.namesrv_requests import SLAVE, A, NameServerHarness, data_version, topic_config


def test_a_registration_has_all_fields_that_rocketmq_needs() -> None:
    orders = TopicConfig(topic_name="orders", read_queue_nums=4, write_queue_nums=4, attributes={})
    request = registration_request(A, [orders], data_version(2))
    assert request.code == RequestCode.REGISTER_BROKER
    assert encode_header(request.fields) == {
        "brokerName": "a",
        "brokerAddr": "10.0.0.1:10911",
        "clusterName": "c",
        "haServerAddr": "10.0.0.1:10912",
        "brokerId": "0",
        "enableActingMaster": "false",
        "compressed": "false",
        "bodyCrc32": str(zlib.crc32(request.body) & 0x7FFFFFFF),
    }
    assert json.loads(request.body) == {
        "topicConfigSerializeWrapper": {
            "topicConfigTable": {
                "orders": {
                    "topicName": "orders",
                    "readQueueNums": 4,
                    "writeQueueNums": 4,
                    "perm": 6,
                    "topicFilterType": "SINGLE_TAG",
                    "topicSysFlag": 0,
                    "order": False,
                    "attributes": {},
                }
            },
            "dataVersion": {"stateVersion": 0, "timestamp": 1_700_000_000_000, "counter": 2},
        },
        "filterServerList": [],
    }


def test_a_heartbeat_timeout_of_the_broker_is_sent() -> None:
    broker = BrokerDescription(
        cluster="c", name="a", address="x:1", ha_address="", heartbeat_timeout_ms=10_000
    )
    fields = encode_header(registration_request(broker, [], data_version()).fields)
    assert fields["heartbeatTimeoutMillis"] == "10000"


def test_an_unregistration_identifies_the_broker() -> None:
    request = unregistration_request(SLAVE)
    assert request.code == RequestCode.UNREGISTER_BROKER
    assert encode_header(request.fields) == {
        "brokerName": "a",
        "brokerAddr": "10.0.0.3:10911",
        "clusterName": "c",
        "brokerId": "1",
    }


def test_a_broker_registers_and_unregisters() -> None:
    harness = NameServerHarness()
    response = harness.call_registration(
        registration_request(A, [topic_config("orders")], data_version(1))
    )
    assert (response.code, response.body) == (0, b"")
    put = {"namespace": "ORDER_TOPIC_CONFIG", "key": "orders", "value": "a:4"}
    harness.call(RequestCode.PUT_KV_CONFIG, put)
    response = harness.call_registration(registration_request(SLAVE, [], data_version(1)))
    assert response.fields == {"masterAddr": A.address, "haServerAddr": A.ha_address}
    assert response.json() == {"table": {"orders": "a:4"}}
    for broker in (A, SLAVE):
        assert harness.call_registration(unregistration_request(broker)).code == 0
    assert harness.server.routes.broker_count == 0
