"""What a broker sends to a name server, and how it reads the responses."""

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


def answered(code: int = 0, remark: str = "", **ext_fields: str) -> Command:
    return Command(code=code, opaque=1, flag=FLAG_RESPONSE, remark=remark, ext_fields=ext_fields)


def test_a_registration_has_what_rocketmq_demands() -> None:
    orders = TopicConfig(topic_name="orders", read_queue_nums=4, write_queue_nums=4, attributes={})
    asked = registration_request(A, [orders], data_version(2))
    assert asked.code == RequestCode.REGISTER_BROKER
    assert encode_header(asked.fields) == {
        "brokerName": "a",
        "brokerAddr": "10.0.0.1:10911",
        "clusterName": "c",
        "haServerAddr": "10.0.0.1:10912",
        "brokerId": "0",
        "enableActingMaster": "false",
        "compressed": "false",
        "bodyCrc32": str(zlib.crc32(asked.body) & 0x7FFFFFFF),
    }
    assert json.loads(asked.body) == {
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


def test_a_time_limit_of_our_own_is_sent() -> None:
    card = BrokerDescription(
        cluster="c", name="a", address="x:1", ha_address="", heartbeat_timeout_ms=10_000
    )
    fields = encode_header(registration_request(card, [], data_version()).fields)
    assert fields["heartbeatTimeoutMillis"] == "10000"


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (unregistration_request(SLAVE), RequestCode.UNREGISTER_BROKER),
        (data_version_request(SLAVE, data_version()), RequestCode.QUERY_DATA_VERSION),
    ],
)
def test_the_other_requests_identify_the_broker(asked: RegistrationRequest, code: int) -> None:
    assert asked.code == code
    assert encode_header(asked.fields) == {
        "brokerName": "a",
        "brokerAddr": "10.0.0.3:10911",
        "clusterName": "c",
        "brokerId": "1",
    }


def test_a_broker_registers_asks_and_unregisters() -> None:
    harness = NameServerHarness()
    reply = harness.call_registration(data_version_request(A, data_version(1)))
    assert parse_data_version_response(reply.command, reply.body) == DataVersionResult(True, None)
    reply = harness.call_registration(
        registration_request(A, [topic_config("orders")], data_version(1))
    )
    assert parse_registration_response(reply.command, reply.body) == RegistrationResult()
    reply = harness.call_registration(data_version_request(A, data_version(1)))
    assert parse_data_version_response(reply.command, reply.body) == DataVersionResult(
        False, data_version(1)
    )
    put = {"namespace": "ORDER_TOPIC_CONFIG", "key": "orders", "value": "a:4"}
    harness.call(RequestCode.PUT_KV_CONFIG, put)
    reply = harness.call_registration(registration_request(SLAVE, [], data_version(1)))
    assert parse_registration_response(reply.command, reply.body) == RegistrationResult(
        A.address, A.ha_address, {"orders": "a:4"}
    )
    for card in (A, SLAVE):
        parse_unregistration_response(
            harness.call_registration(unregistration_request(card)).command
        )
    assert harness.server.routes.broker_count == 0


def test_a_refusal_is_raised_with_its_code_and_remark() -> None:
    refusal = answered(1, "register broker failed")
    for read in (
        parse_registration_response,
        parse_data_version_response,
        lambda command, _: parse_unregistration_response(command),
    ):
        with pytest.raises(RequestRefused, match="register broker failed") as refused:
            read(refusal, b"")
        assert refused.value.code == 1


def test_a_response_that_cannot_be_decoded_is_a_remote_error() -> None:
    with pytest.raises(InvalidField, match="changed"):
        parse_data_version_response(answered(), b"")
    with pytest.raises(BrokenBody):
        parse_data_version_response(answered(changed="true"), b"{")
    with pytest.raises(BrokenBody):
        parse_registration_response(answered(), b"[]")
