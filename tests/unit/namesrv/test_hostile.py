"""Every request with fields missing, of the wrong type, negative, huge; with bodies cut and mad.

An answer comes back, always. Where it is an error, nothing has changed.
"""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import pytest

from escrowmq.namesrv.registration import registration_request, unregistration_request
from escrowmq.remoting import headers_admin as headers
from escrowmq.remoting.bodies import QueueRoute, TopicRoute, encode_body
from escrowmq.remoting.codes import JSON, ROCKETMQ, RequestCode
from escrowmq.remoting.headers import encode_header
from tests.support.namesrv_requests import A, B, NameServerHarness, everything, topic, version

STOCK = TopicRoute(
    queue_datas=[QueueRoute(broker_name="a", read_queue_nums=1, write_queue_nums=1, perm=6)]
)
REGISTER = registration_request(B, [topic("orders"), topic("stock")], version())
IDENTITY = encode_header(unregistration_request(A).fields)
KEY = {"namespace": "n", "key": "k"}
BEAT = headers.BrokerHeartbeat(
    cluster_name="c",
    broker_addr=A.address,
    broker_name="a",
    broker_id=0,
    epoch=1,
    max_offset=1,
    confirm_offset=1,
    heartbeat_timeout_mills=1,
)

# Every request that has something in it: fields that succeed, and a body.
SENT: dict[RequestCode, tuple[dict[str, str], bytes]] = {
    RequestCode.REGISTER_BROKER: (
        encode_header(REGISTER.fields) | {"heartbeatTimeoutMillis": "9000"},
        REGISTER.body,
    ),
    RequestCode.UNREGISTER_BROKER: (IDENTITY, b""),
    RequestCode.QUERY_DATA_VERSION: (IDENTITY, encode_body(version())),
    RequestCode.BROKER_HEARTBEAT: (encode_header(BEAT), b""),
    RequestCode.GET_BROKER_MEMBER_GROUP: ({"clusterName": "c", "brokerName": "a"}, b""),
    RequestCode.WIPE_WRITE_PERM_OF_BROKER: ({"brokerName": "a"}, b""),
    RequestCode.ADD_WRITE_PERM_OF_BROKER: ({"brokerName": "a"}, b""),
    RequestCode.REGISTER_TOPIC_IN_NAMESRV: ({"topic": "stock"}, encode_body(STOCK)),
    RequestCode.DELETE_TOPIC_IN_NAMESRV: ({"topic": "orders"}, b""),
    RequestCode.GET_ROUTEINFO_BY_TOPIC: (
        {"topic": "orders", "acceptStandardJsonOnly": "true"},
        b"",
    ),
    RequestCode.GET_TOPICS_BY_CLUSTER: ({"cluster": "c"}, b""),
    RequestCode.PUT_KV_CONFIG: (KEY | {"value": "w"}, b""),
    RequestCode.GET_KV_CONFIG: (KEY, b""),
    RequestCode.DELETE_KV_CONFIG: (KEY, b""),
    RequestCode.GET_KVLIST_BY_NAMESPACE: ({"namespace": "n"}, b""),
}
OPTIONAL = {
    "acceptStandardJsonOnly",
    "bodyCrc32",
    "compressed",
    "enableActingMaster",
    "haServerAddr",
    "heartbeatTimeoutMillis",
}
FIELDS = [(code, name) for code, (fields, _) in SENT.items() for name in fields]
REQUIRED = [
    (code, name)
    for code, name in FIELDS
    if name in ("brokerName", "brokerAddr", "clusterName")
    or (name not in OPTIONAL and code != RequestCode.BROKER_HEARTBEAT)
]
HUGE = "n" * 100_000
NO_NUMBERS = ["", "x", "1.5", "--1", "0x10", "9" * 40, "-" + "9" * 40, HUGE]
ODD_TEXTS = ["", " ", "null", "\0", "../..", "%s%n", "{}", "\U0001f4a3", "a;b:1", HUGE]


@pytest.fixture
def harness() -> NameServerHarness:
    harness = NameServerHarness()
    harness.register(A, topic("orders"), topic("TBW102", perm=7))
    harness.server.kv_config.put("n", "k", "v")
    return harness


def named(code: RequestCode, name: str) -> str:
    return f"{code.name}-{name}"


every_request = pytest.mark.parametrize("code", SENT, ids=lambda code: code.name)
every_field = pytest.mark.parametrize(
    ("code", "name"), FIELDS, ids=[named(code, name) for code, name in FIELDS]
)


@every_request
def test_the_unchanged_requests_succeed(harness: NameServerHarness, code: RequestCode) -> None:
    reply = harness.ask(code, *SENT[code])
    assert reply.code == 0, reply.remark


@pytest.mark.parametrize(
    ("code", "name"), REQUIRED, ids=[named(code, name) for code, name in REQUIRED]
)
def test_a_field_that_is_missing_is_named(
    harness: NameServerHarness, code: RequestCode, name: str
) -> None:
    fields, body = SENT[code]
    before = everything(harness.server)
    reply = harness.ask(code, {key: text for key, text in fields.items() if key != name}, body)
    assert reply.code == 1
    assert name in reply.remark
    assert everything(harness.server) == before


@pytest.mark.parametrize("serializer", [JSON, ROCKETMQ])
@every_field
def test_a_field_with_odd_text_gets_a_response(
    harness: NameServerHarness, code: RequestCode, name: str, serializer: int
) -> None:
    fields, body = SENT[code]
    for odd in ODD_TEXTS + NO_NUMBERS:
        before = everything(harness.server)
        reply = harness.ask(code, fields | {name: odd}, body, serializer=serializer)
        if reply.code:
            assert reply.remark
            assert len(reply.remark) < 1_000
            assert everything(harness.server) == before, odd


@pytest.mark.parametrize("name", ["brokerId", "heartbeatTimeoutMillis", "bodyCrc32"])
@pytest.mark.parametrize("odd", [*NO_NUMBERS, "-1", str(-(2**63)), str(2**63)])
def test_a_registration_with_an_invalid_number_is_refused(
    harness: NameServerHarness, name: str, odd: str
) -> None:
    fields, body = SENT[RequestCode.REGISTER_BROKER]
    before = everything(harness.server)
    reply = harness.ask(RequestCode.REGISTER_BROKER, fields | {name: odd}, body)
    assert reply.code == 1
    assert name in reply.remark
    assert everything(harness.server) == before


@pytest.mark.parametrize("odd", ["0", "86400001", str(2**63 - 1)])
def test_a_time_limit_of_nothing_or_of_years_is_refused(
    harness: NameServerHarness, odd: str
) -> None:
    fields, body = SENT[RequestCode.REGISTER_BROKER]
    reply = harness.ask(RequestCode.REGISTER_BROKER, fields | {"heartbeatTimeoutMillis": odd}, body)
    assert (reply.code, "heartbeatTimeoutMillis" in reply.remark) == (1, True)


@pytest.mark.parametrize("name", ["brokerName", "brokerAddr", "clusterName", "haServerAddr"])
def test_a_registration_with_a_huge_name_is_refused(harness: NameServerHarness, name: str) -> None:
    fields, body = SENT[RequestCode.REGISTER_BROKER]
    before = everything(harness.server)
    reply = harness.ask(RequestCode.REGISTER_BROKER, fields | {name: HUGE}, body)
    assert reply.code == 1
    assert reply.remark.startswith(f"{name} has 100000 characters, the limit is 512")
    assert everything(harness.server) == before


BODIES = [
    b"x",
    b"{",
    b"[]",
    b"null",
    b"1",
    b'"text"',
    b"\xff\xfe",
    b"\x00" * 64,
    b"x\x9c" + b"\x00" * 40,
    b"[" * 200_000,
    b'{"a":' * 50_000,
    b'{"queueDatas":7,"counter":[],"topicConfigSerializeWrapper":[]}',
    b'{"queueDatas":[{}],"counter":"x","topicConfigSerializeWrapper":{"dataVersion":3}}',
    b'{"queueDatas":[7],"counter":1e99,"topicConfigSerializeWrapper":{"topicConfigTable":[]}}',
    zlib.compress(struct.pack(">i", 2**31 - 1)),
]


@pytest.mark.parametrize(
    "code",
    [
        RequestCode.REGISTER_BROKER,
        RequestCode.QUERY_DATA_VERSION,
        RequestCode.REGISTER_TOPIC_IN_NAMESRV,
    ],
    ids=lambda code: code.name,
)
@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_a_body_that_cannot_be_read_is_refused(
    harness: NameServerHarness, code: RequestCode, body: bytes
) -> None:
    fields = SENT[code][0] | {"bodyCrc32": "0"}
    before = everything(harness.server)
    for ask_version in (36, 479):
        reply = harness.ask(code, fields, body, version=ask_version)
        if ask_version == 36 and code == RequestCode.REGISTER_BROKER and reply.code == 0:
            # To a broker as old as that, none of these keys mean anything.
            assert body.startswith(b"{")
            harness.server.routes.unregister("c", "b", B.address)
            continue
        assert reply.code == 1
        assert reply.remark
        assert everything(harness.server) == before


def changed_topic(**fields: Any) -> bytes:
    registration = json.loads(REGISTER.body)
    table = registration["topicConfigSerializeWrapper"]["topicConfigTable"]
    table["stock"] = {**table["stock"], **fields}
    return json.dumps(registration).encode()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"readQueueNums": -1}, "topic stock: readQueueNums is -1"),
        ({"writeQueueNums": 65_537}, "topic stock: writeQueueNums is 65537"),
        ({"writeQueueNums": 2**31}, "writeQueueNums"),
        ({"readQueueNums": "many"}, "readQueueNums"),
        ({"perm": -1}, "topic stock: perm is -1"),
        ({"perm": 16}, "topic stock: perm is 16"),
        ({"perm": {}}, "perm"),
        ({"topicName": ""}, "topicName is empty"),
        ({"topicName": HUGE}, "topicName has 100000 characters"),
        ({"topicName": None}, "topicName"),
        ({"topicName": 7}, "topicName"),
    ],
)
def test_one_bad_topic_refuses_the_whole_registration(
    harness: NameServerHarness, fields: dict[str, Any], why: str
) -> None:
    before = everything(harness.server)
    sent = SENT[RequestCode.REGISTER_BROKER][0] | {"bodyCrc32": "0"}
    reply = harness.ask(RequestCode.REGISTER_BROKER, sent, changed_topic(**fields))
    assert reply.code == 1
    assert why in reply.remark
    assert everything(harness.server) == before


@pytest.mark.parametrize("perm", [-1, 16])
def test_a_single_topic_with_a_bad_permission_is_refused(
    harness: NameServerHarness, perm: int
) -> None:
    queues = QueueRoute(broker_name="a", read_queue_nums=1, write_queue_nums=1, perm=perm)
    body = encode_body(TopicRoute(queue_datas=[queues]))
    before = everything(harness.server)
    reply = harness.ask(RequestCode.REGISTER_TOPIC_IN_NAMESRV, {"topic": "stock"}, body)
    assert (reply.code, "perm" in reply.remark) == (1, True)
    assert everything(harness.server) == before
