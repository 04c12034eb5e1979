"""The fast path for headers: which it decodes, and which it leaves to the plain path."""

from __future__ import annotations

import pytest

from escrowmq.remoting.headers import EndTransaction, SendMessageV2
from escrowmq.remoting.requests import decode_request_head

JAVA = (
    b'{"code":310,"extFields":{"a":"group","b":"orders","c":"TBW102","d":"4","e":"1","f":"4",'
    b'"g":"1700000000000","h":"0","i":"TRAN_MSG\\u0001true\\u0002","j":"0","k":"false","m":"false"},'
    b'"flag":0,"language":"JAVA","opaque":12,"serializeTypeCurrentRPC":"JSON","version":453}'
)
CPP = (
    b'{"code":310,"extFields":{"a":"group","b":"orders","c":"TBW102","d":4,"e":1,"f":4,'
    b'"g":"1700000000000","h":0,"i":"TRAN_MSG\\u0001true\\u0002","j":0,"k":"0","m":"0",'
    b'"AccessKey":"","OnsChannel":"ALIYUN","Signature":"x"},'
    b'"flag":0,"language":"CPP","opaque":12,"remark":"","version":453}\n'
)


@pytest.mark.parametrize("header", [JAVA, CPP], ids=["java", "cpp"])
def test_the_send_of_a_client_is_decoded(header: bytes) -> None:
    head = decode_request_head(header)
    assert head is not None
    assert (head.code, head.opaque, head.flag, head.version, head.remark) == (310, 12, 0, 453, "")
    assert head.fields == SendMessageV2(
        producer_group="group",
        topic="orders",
        default_topic="TBW102",
        queue_id=1,
        sys_flag=4,
        born_timestamp=1_700_000_000_000,
        properties="TRAN_MSG\x01true\x02",
    )


@pytest.mark.parametrize(
    "beginning",
    [b'{"code":37,', b'{"code": 37,', b'{ "code":37,', b'{"code":"37",', b'{"flag":2,"code":37,'],
)
def test_the_code_is_found_at_any_position(beginning: bytes) -> None:
    fields = (
        b'"extFields":{"producerGroup":"g","tranStateTableOffset":"7","commitLogOffset":"4096",'
        b'"commitOrRollback":"8"},"remark":"no such row","flag":2}'
    )
    head = decode_request_head(beginning + fields)
    assert head is not None
    assert isinstance(head.fields, EndTransaction)
    assert head.is_oneway
    assert head.remark == "no such row"


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{}",
        b'{"code":310}',
        b'{"code":98765,"extFields":{}}',
        b'{"code":310,"extFields":{"a":"g","b":"t","e":"x"}}',
        b'{"code":310,"extFields":{"a":"g","b":"t","e":"1"},"flag":1}',
        b'{"code":310,"extFields":{"a":"g","b":"t","e":"1"},"code":11}',
        b'{"code":310,"extFields":{"a":"g","b":"t","e":"1","z":"\xff"}}',
        b'{"code":310,"extFields":{"a":"g","b":"t","e":"1"},"z":' + b"[" * 100_000,
    ],
)
def test_unusual_headers_are_left_to_the_plain_path(header: bytes) -> None:
    assert decode_request_head(header) is None
