"""Templates give the same bytes as the general way, one-way requests get none, text is escaped."""

from __future__ import annotations

import json
from typing import Any

import pytest

from escrowmq.errors import InvalidField, LocalProtocolError
from escrowmq.remoting import responses
from escrowmq.remoting.codes import FLAG_ONEWAY, FLAG_RESPONSE, JSON, ROCKETMQ, ResponseCode
from escrowmq.remoting.command import Command, decode_command
from escrowmq.remoting.frame import Frame, FrameDecoder
from escrowmq.remoting.headers import NoFields, PullMessageResponse, SendMessageResponse
from escrowmq.remoting.requests import Body, Request, RequestHead

HOST = bytes.fromhex("0A00000100002A9F")
NASTY = 'a"b\\c\x01\n中%d%'


def request(*, serializer: int = JSON, flag: int = 0, opaque: int = 7) -> Request[Any]:
    return Request(
        RequestHead(code=310, opaque=opaque, flag=flag, fields=NoFields()), b"", serializer
    )


def read(data: bytes) -> tuple[Command, bytes]:
    reader = FrameDecoder(Frame)
    reader.receive(data)
    (frame,) = reader.frames()
    return decode_command(frame.serializer, frame.header), bytes(frame.body)


@pytest.mark.parametrize("serializer", [JSON, ROCKETMQ])
@pytest.mark.parametrize("transaction_id", [None, "", "7F00", NASTY])
def test_a_send_response_from_the_template_equals_the_general_one(
    serializer: int, transaction_id: str | None
) -> None:
    asked = request(serializer=serializer, opaque=-5)
    templates = responses.SendResponseEncoder(store_host=HOST, region=NASTY, trace_on=False)
    written = templates.encode(
        asked,
        log_offset=123456789,
        queue_id=3,
        queue_offset=2**40,
        transaction_id=transaction_id,
        code=ResponseCode.FLUSH_DISK_TIMEOUT,
    )
    general = SendMessageResponse(
        msg_id="0A00000100002A9F00000000075BCD15",
        queue_id=3,
        queue_offset=2**40,
        transaction_id=transaction_id,
        region=NASTY,
        trace_on=False,
    )
    assert written == responses.encode_response(
        asked, general, code=ResponseCode.FLUSH_DISK_TIMEOUT
    )
    command, _ = read(written)
    assert command.opaque == -5
    assert command.flag == FLAG_RESPONSE


def test_a_send_response_says_where_the_message_is_and_that_it_is_traced() -> None:
    encoder = responses.SendResponseEncoder(store_host=HOST)
    command, _ = read(encoder.encode(request(), log_offset=255, queue_id=3, queue_offset=7))
    assert command.ext_fields == {
        "msgId": "0A00000100002A9F00000000000000FF",
        "queueId": "3",
        "queueOffset": "7",
        "MSG_REGION": "DefaultRegion",
        "TRACE_ON": "true",
    }


@pytest.mark.parametrize("serializer", [JSON, ROCKETMQ])
def test_a_batch_response_has_the_id_of_each_message(serializer: int) -> None:
    encoder = responses.SendResponseEncoder(store_host=HOST)
    command, _ = read(encoder.encode_batch(request(serializer=serializer), [1, 255], 3, 7))
    first, second = "0A00000100002A9F0000000000000001", "0A00000100002A9F00000000000000FF"
    assert command.ext_fields["msgId"] == f"{first},{second}"
    assert command.ext_fields["queueOffset"] == "7"
    assert command.ext_fields["MSG_REGION"] == "DefaultRegion"


@pytest.mark.parametrize("serializer", [JSON, ROCKETMQ])
@pytest.mark.parametrize("remark", ["", "FOUND", NASTY])
def test_a_pull_response_passes_the_pieces_of_its_body_on(serializer: int, remark: str) -> None:
    asked = request(serializer=serializer)
    pieces: list[Body] = [b"first", memoryview(b"second")]
    first, *rest = responses.encode_pull_response(
        asked,
        next_offset=34,
        min_offset=2,
        max_offset=99,
        suggested_broker_id=1,
        topic_sys_flag=2,
        group_sys_flag=3,
        remark=remark,
        body=pieces,
    )
    assert all(piece is given for piece, given in zip(rest, pieces, strict=True))
    general = PullMessageResponse(
        suggest_which_broker_id=1,
        next_begin_offset=34,
        min_offset=2,
        max_offset=99,
        topic_sys_flag=2,
        group_sys_flag=3,
    )
    joined = b"".join((first, *rest))
    assert joined == responses.encode_response(asked, general, remark=remark, body=b"firstsecond")


@pytest.mark.parametrize("serializer", [JSON, ROCKETMQ])
def test_plain_success(serializer: int) -> None:
    asked = request(serializer=serializer)
    assert responses.encode_success(asked) == responses.encode_response(asked)


def test_success_byte_by_byte() -> None:
    header = (
        b'{"code":0,"language":"PYTHON","version":479,"opaque":7,"flag":1,'
        b'"serializeTypeCurrentRPC":"JSON"}'
    )
    assert (
        responses.encode_success(request())
        == bytes([0, 0, 0, len(header) + 4, 0, 0, 0, 97]) + header
    )
    assert json.loads(header)["flag"] == FLAG_RESPONSE


def test_a_one_way_request_gets_no_response() -> None:
    for serializer in (JSON, ROCKETMQ):
        asked = request(flag=FLAG_ONEWAY, serializer=serializer)
        templates = responses.SendResponseEncoder(store_host=HOST)
        assert responses.encode_response(asked, code=1, remark="no") == b""
        assert responses.encode_error(asked, InvalidField(1, "no")) == b""
        assert responses.encode_success(asked) == b""
        assert templates.encode(asked, log_offset=0, queue_id=0, queue_offset=0) == b""
        assert (
            responses.encode_pull_response(
                asked, next_offset=0, min_offset=0, max_offset=0, body=[b"x"]
            )
            == []
        )


def test_a_refusal_carries_its_code_and_remark() -> None:
    command, body = read(responses.encode_error(request(), InvalidField(1, "no topic")))
    assert (command.code, command.remark, body) == (1, "no topic", b"")


def test_text_that_is_not_unicode_is_a_local_error() -> None:
    with pytest.raises(LocalProtocolError):
        responses.SendResponseEncoder(store_host=HOST).encode(
            request(), log_offset=0, queue_id=0, queue_offset=0, transaction_id="\ud800"
        )
