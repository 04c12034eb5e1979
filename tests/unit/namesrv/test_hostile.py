"""Requests with missing, invalid, negative and huge fields, and with invalid bodies.

Each of them gets a response. If it is an error, the request has changed nothing.
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
from tests.support.namesrv_requests import (
    A,
    B,
    NameServerHarness,
    data_version,
    topic_config,
    visible_state,
)

STOCK = TopicRoute(
    queue_datas=[QueueRoute(broker_name="a", read_queue_nums=1, write_queue_nums=1, perm=6)]
)
REGISTER = registration_request(B, [topic_config("orders"), topic_config("stock")], data_version())
IDENTITY = encode_header(unregistration_request(A).fields)
KEY = {"namespace": "n", "key": "k"}
HEARTBEAT = headers.BrokerHeartbeat(
    cluster_name="c",
    broker_addr=A.address,
    broker_name="a",
    broker_id=0,
    epoch=1,
    max_offset=1,
    confirm_offset=1,
    heartbeat_timeout_mills=1,
)

# Valid fields and a valid body of every request that has any.
VALID: dict[RequestCode, tuple[dict[str, str], bytes]] = {
    RequestCode.REGISTER_BROKER: (
        encode_header(REGISTER.fields) | {"heartbeatTimeoutMillis": "9000"},
        REGISTER.body,
    ),
    RequestCode.UNREGISTER_BROKER: (IDENTITY, b""),
    RequestCode.QUERY_DATA_VERSION: (IDENTITY, encode_body(data_version())),
    RequestCode.BROKER_HEARTBEAT: (encode_header(HEARTBEAT), b""),
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
FIELDS = [(code, name) for code, (fields, _) in VALID.items() for name in fields]
REQUIRED_FIELDS = [
    (code, name)
    for code, name in FIELDS
    if name in ("brokerName", "brokerAddr", "clusterName")
    or (name not in OPTIONAL and code != RequestCode.BROKER_HEARTBEAT)
]
HUGE = "n" * 100_000
INVALID_NUMBERS = ["", "x", "1.5", "--1", "0x10", "9" * 40, "-" + "9" * 40, HUGE]
UNUSUAL_TEXTS = ["", " ", "null", "\0", "../..", "%s%n", "{}", "\U0001f4a3", "a;b:1", HUGE]


@pytest.fixture
def harness() -> NameServerHarness:
    harness = NameServerHarness()
    harness.register(A, topic_config("orders"), topic_config("TBW102", perm=7))
    harness.server.kv_config.put("n", "k", "v")
    return harness


def field_id(code: RequestCode, name: str) -> str:
    return f"{code.name}-{name}"


every_request = pytest.mark.parametrize("code", VALID, ids=lambda code: code.name)
every_field = pytest.mark.parametrize(
    ("code", "name"), FIELDS, ids=[field_id(code, name) for code, name in FIELDS]
)


@every_request
def test_the_valid_requests_succeed(harness: NameServerHarness, code: RequestCode) -> None:
    response = harness.call(code, *VALID[code])
    assert response.code == 0, response.remark


@pytest.mark.parametrize(
    ("code", "name"), REQUIRED_FIELDS, ids=[field_id(code, name) for code, name in REQUIRED_FIELDS]
)
def test_a_missing_field_is_named_in_the_error(
    harness: NameServerHarness, code: RequestCode, name: str
) -> None:
    fields, body = VALID[code]
    before = visible_state(harness.server)
    response = harness.call(code, {key: text for key, text in fields.items() if key != name}, body)
    assert response.code == 1
    assert name in response.remark
    assert visible_state(harness.server) == before


@pytest.mark.parametrize("serializer", [JSON, ROCKETMQ])
@every_field
def test_a_request_with_an_unusual_field_succeeds_or_changes_nothing(
    harness: NameServerHarness, code: RequestCode, name: str, serializer: int
) -> None:
    fields, body = VALID[code]
    for value in UNUSUAL_TEXTS + INVALID_NUMBERS:
        before = visible_state(harness.server)
        response = harness.call(code, fields | {name: value}, body, serializer=serializer)
        if response.code:
            assert response.remark
            assert len(response.remark) < 1_000
            assert visible_state(harness.server) == before, value


@pytest.mark.parametrize("name", ["brokerId", "heartbeatTimeoutMillis", "bodyCrc32"])
@pytest.mark.parametrize("value", [*INVALID_NUMBERS, "-1", str(-(2**63)), str(2**63)])
def test_a_registration_with_an_invalid_number_is_refused(
    harness: NameServerHarness, name: str, value: str
) -> None:
    fields, body = VALID[RequestCode.REGISTER_BROKER]
    before = visible_state(harness.server)
    response = harness.call(RequestCode.REGISTER_BROKER, fields | {name: value}, body)
    assert response.code == 1
    assert name in response.remark
    assert visible_state(harness.server) == before


@pytest.mark.parametrize("value", ["0", "86400001", str(2**63 - 1)])
def test_a_heartbeat_timeout_of_zero_or_of_more_than_a_day_is_refused(
    harness: NameServerHarness, value: str
) -> None:
    fields, body = VALID[RequestCode.REGISTER_BROKER]
    response = harness.call(
        RequestCode.REGISTER_BROKER, fields | {"heartbeatTimeoutMillis": value}, body
    )
    assert (response.code, "heartbeatTimeoutMillis" in response.remark) == (1, True)


@pytest.mark.parametrize("name", ["brokerName", "brokerAddr", "clusterName", "haServerAddr"])
def test_a_registration_with_a_huge_name_is_refused(harness: NameServerHarness, name: str) -> None:
    fields, body = VALID[RequestCode.REGISTER_BROKER]
    before = visible_state(harness.server)
    response = harness.call(RequestCode.REGISTER_BROKER, fields | {name: HUGE}, body)
    assert response.code == 1
    assert response.remark.startswith(f"{name} has 100000 characters, the limit is 512")
    assert visible_state(harness.server) == before


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
    fields = VALID[code][0] | {"bodyCrc32": "0"}
    before = visible_state(harness.server)
    for client_version in (36, 479):
        response = harness.call(code, fields, body, version=client_version)
        if client_version == 36 and code == RequestCode.REGISTER_BROKER and response.code == 0:
            # A registration of such an old broker has none of these keys, so they are ignored.
            assert body.startswith(b"{")
            harness.server.routes.unregister("c", "b", B.address)
            continue
        assert response.code == 1
        assert response.remark
        assert visible_state(harness.server) == before


def registration_with_topic(**fields: Any) -> bytes:
    """Return the body of the registration with these fields in one of its two topics."""
    registration = json.loads(REGISTER.body)
    table = registration["topicConfigSerializeWrapper"]["topicConfigTable"]
    table["stock"] = {**table["stock"], **fields}
    return json.dumps(registration).encode()


@pytest.mark.parametrize(
    ("topic_fields", "reason"),
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
def test_a_registration_with_one_invalid_topic_is_refused(
    harness: NameServerHarness, topic_fields: dict[str, Any], reason: str
) -> None:
    before = visible_state(harness.server)
    fields = VALID[RequestCode.REGISTER_BROKER][0] | {"bodyCrc32": "0"}
    body = registration_with_topic(**topic_fields)
    response = harness.call(RequestCode.REGISTER_BROKER, fields, body)
    assert response.code == 1
    assert reason in response.remark
    assert visible_state(harness.server) == before


@pytest.mark.parametrize("perm", [-1, 16])
def test_a_single_topic_with_an_invalid_permission_is_refused(
    harness: NameServerHarness, perm: int
) -> None:
    queues = QueueRoute(broker_name="a", read_queue_nums=1, write_queue_nums=1, perm=perm)
    body = encode_body(TopicRoute(queue_datas=[queues]))
    before = visible_state(harness.server)
    response = harness.call(RequestCode.REGISTER_TOPIC_IN_NAMESRV, {"topic": "stock"}, body)
    assert (response.code, "perm" in response.remark) == (1, True)
    assert visible_state(harness.server) == before
