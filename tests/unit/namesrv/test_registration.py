"""What our broker sends to a name server, and how it reads the answers."""

from __future__ import annotations

import json
import zlib

import pytest

from escrowmq.errors import BadField, BrokenBody, RequestRefused
from escrowmq.namesrv.registration import (
    Accepted,
    Ask,
    BrokerCard,
    KnownVersion,
    query_version,
    read_registered,
    read_unregistered,
    read_version,
    register,
    unregister,
)
from escrowmq.remoting.bodies import TopicConfig
from escrowmq.remoting.codes import FLAG_RESPONSE, RequestCode
from escrowmq.remoting.command import Command
from escrowmq.remoting.headers import encode_header
from tests.support.namesrv_requests import SLAVE, A, Desk, topic, version


def answered(code: int = 0, remark: str = "", **ext_fields: str) -> Command:
    return Command(code=code, opaque=1, flag=FLAG_RESPONSE, remark=remark, ext_fields=ext_fields)


def test_a_registration_says_what_apache_wants_to_hear() -> None:
    orders = TopicConfig(topic_name="orders", read_queue_nums=4, write_queue_nums=4, attributes={})
    asked = register(A, [orders], version(2))
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
    card = BrokerCard(
        cluster="c", name="a", address="x:1", ha_address="", heartbeat_timeout_ms=10_000
    )
    fields = encode_header(register(card, [], version()).fields)
    assert fields["heartbeatTimeoutMillis"] == "10000"


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (unregister(SLAVE), RequestCode.UNREGISTER_BROKER),
        (query_version(SLAVE, version()), RequestCode.QUERY_DATA_VERSION),
    ],
)
def test_the_others_say_who_we_are(asked: Ask, code: int) -> None:
    assert asked.code == code
    assert encode_header(asked.fields) == {
        "brokerName": "a",
        "brokerAddr": "10.0.0.3:10911",
        "clusterName": "c",
        "brokerId": "1",
    }


def test_a_whole_life_at_our_own_name_server() -> None:
    desk = Desk()
    heard = desk.make(query_version(A, version(1)))
    assert read_version(heard.command, heard.body) == KnownVersion(True, None)
    heard = desk.make(register(A, [topic("orders")], version(1)))
    assert read_registered(heard.command, heard.body) == Accepted()
    heard = desk.make(query_version(A, version(1)))
    assert read_version(heard.command, heard.body) == KnownVersion(False, version(1))
    put = {"namespace": "ORDER_TOPIC_CONFIG", "key": "orders", "value": "a:4"}
    desk.ask(RequestCode.PUT_KV_CONFIG, put)
    heard = desk.make(register(SLAVE, [], version(1)))
    assert read_registered(heard.command, heard.body) == Accepted(
        A.address, A.ha_address, {"orders": "a:4"}
    )
    for card in (A, SLAVE):
        read_unregistered(desk.make(unregister(card)).command)
    assert desk.server.routes.broker_count == 0


def test_a_refusal_is_raised_with_its_code_and_remark() -> None:
    refusal = answered(1, "register broker failed")
    for read in (read_registered, read_version, lambda command, _: read_unregistered(command)):
        with pytest.raises(RequestRefused, match="register broker failed") as refused:
            read(refusal, b"")
        assert refused.value.code == 1


def test_an_answer_that_cannot_be_read_is_their_fault() -> None:
    with pytest.raises(BadField, match="changed"):
        read_version(answered(), b"")
    with pytest.raises(BrokenBody):
        read_version(answered(changed="true"), b"{")
    with pytest.raises(BrokenBody):
        read_registered(answered(), b"[]")
