"""Requests that a broker sends to a name server, and the parsing of their responses."""

from __future__ import annotations

import json
import zlib

import pytest

from escrowmq.errors import BrokenBody, InvalidField, RequestRefused
from escrowmq.message.topic_config import TopicConfig
from escrowmq.namesrv.registration import (
    BrokerDescription,
    DataVersionResult,
    RegistrationRequest,
    RegistrationResult,
    data_version_request,
    parse_data_version_response,
    parse_registration_response,
    parse_unregistration_response,
    registration_request,
    unregistration_request,
)
from escrowmq.remoting.codes import FLAG_RESPONSE, RequestCode
from escrowmq.remoting.command import Command
from escrowmq.remoting.headers import encode_header
from tests.support.namesrv_requests import SLAVE, A, NameServerHarness, data_version, topic_config


def response_command(code: int = 0, remark: str = "", **ext_fields: str) -> Command:
    return Command(code=code, opaque=1, flag=FLAG_RESPONSE, remark=remark, ext_fields=ext_fields)


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


@pytest.mark.parametrize(
    ("registration", "code"),
    [
        (unregistration_request(SLAVE), RequestCode.UNREGISTER_BROKER),
        (data_version_request(SLAVE, data_version()), RequestCode.QUERY_DATA_VERSION),
    ],
)
def test_the_other_requests_identify_the_broker(
    registration: RegistrationRequest, code: int
) -> None:
    assert registration.code == code
    assert encode_header(registration.fields) == {
        "brokerName": "a",
        "brokerAddr": "10.0.0.3:10911",
        "clusterName": "c",
        "brokerId": "1",
    }


def test_a_broker_registers_queries_its_version_and_unregisters() -> None:
    harness = NameServerHarness()
    response = harness.call_registration(data_version_request(A, data_version(1)))
    assert parse_data_version_response(response.command, response.body) == DataVersionResult(
        True, None
    )
    response = harness.call_registration(
        registration_request(A, [topic_config("orders")], data_version(1))
    )
    assert parse_registration_response(response.command, response.body) == RegistrationResult()
    response = harness.call_registration(data_version_request(A, data_version(1)))
    assert parse_data_version_response(response.command, response.body) == DataVersionResult(
        False, data_version(1)
    )
    put = {"namespace": "ORDER_TOPIC_CONFIG", "key": "orders", "value": "a:4"}
    harness.call(RequestCode.PUT_KV_CONFIG, put)
    response = harness.call_registration(registration_request(SLAVE, [], data_version(1)))
    assert parse_registration_response(response.command, response.body) == RegistrationResult(
        A.address, A.ha_address, {"orders": "a:4"}
    )
    for broker in (A, SLAVE):
        response = harness.call_registration(unregistration_request(broker))
        parse_unregistration_response(response.command)
    assert harness.server.routes.broker_count == 0


def test_a_refusal_is_raised_with_its_code_and_remark() -> None:
    refusal = response_command(1, "register broker failed")
    for parse in (
        parse_registration_response,
        parse_data_version_response,
        lambda command, _: parse_unregistration_response(command),
    ):
        with pytest.raises(RequestRefused, match="register broker failed") as refused:
            parse(refusal, b"")
        assert refused.value.code == 1


def test_a_response_that_cannot_be_decoded_is_a_remote_error() -> None:
    with pytest.raises(InvalidField, match="changed"):
        parse_data_version_response(response_command(), b"")
    with pytest.raises(BrokenBody):
        parse_data_version_response(response_command(changed="true"), b"{")
    with pytest.raises(BrokenBody):
        parse_registration_response(response_command(), b"[]")
