"""Encoded responses: templates equal the general encoder, and one-way requests get none."""

from __future__ import annotations

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
SPECIAL_TEXT = 'a"b\\c\x01\n中%d%'  # characters that JSON or a format string would treat specially


def send_request(*, serializer: int = JSON, flag: int = 0, opaque: int = 7) -> Request[Any]:
    return Request(
        RequestHead(code=310, opaque=opaque, flag=flag, fields=NoFields()), b"", serializer
    )


def decode(data: bytes) -> tuple[Command, bytes]:
    decoder = FrameDecoder(Frame)
    decoder.receive(data)
    (frame,) = decoder.frames()
    return decode_command(frame.serializer, frame.header), bytes(frame.body)


@pytest.mark.parametrize("serializer", [JSON, ROCKETMQ])
@pytest.mark.parametrize("transaction_id", [None, "", "7F00", SPECIAL_TEXT])
def test_a_send_response_from_the_template_equals_the_general_one(
    serializer: int, transaction_id: str | None
) -> None:
    request = send_request(serializer=serializer, opaque=-5)
    templates = responses.SendResponseEncoder(store_host=HOST, region=SPECIAL_TEXT, trace_on=False)
    encoded = templates.encode(
        request,
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
        region=SPECIAL_TEXT,
        trace_on=False,
    )
    assert encoded == responses.encode_response(
        request, general, code=ResponseCode.FLUSH_DISK_TIMEOUT
    )
    command, _ = decode(encoded)
    assert command.opaque == -5
    assert command.flag == FLAG_RESPONSE


def test_a_send_response_has_the_position_of_the_message_and_the_trace_flag() -> None:
    encoder = responses.SendResponseEncoder(store_host=HOST)
    command, _ = decode(encoder.encode(send_request(), log_offset=255, queue_id=3, queue_offset=7))
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
    command, _ = decode(encoder.encode_batch(send_request(serializer=serializer), [1, 255], 3, 7))
    first, second = "0A00000100002A9F0000000000000001", "0A00000100002A9F00000000000000FF"
    assert command.ext_fields["msgId"] == f"{first},{second}"
    assert command.ext_fields["queueOffset"] == "7"
    assert command.ext_fields["MSG_REGION"] == "DefaultRegion"


@pytest.mark.parametrize("serializer", [JSON, ROCKETMQ])
@pytest.mark.parametrize("remark", ["", "FOUND", SPECIAL_TEXT])
def test_a_pull_response_does_not_copy_its_body(serializer: int, remark: str) -> None:
    request = send_request(serializer=serializer)
    pieces: list[Body] = [b"first", memoryview(b"second")]
    head, *sent_pieces = responses.encode_pull_response(
        request,
        next_offset=34,
        min_offset=2,
        max_offset=99,
        suggested_broker_id=1,
        topic_sys_flag=2,
        group_sys_flag=3,
        remark=remark,
        body=pieces,
    )
    assert all(sent is piece for sent, piece in zip(sent_pieces, pieces, strict=True))
    general = PullMessageResponse(
        suggest_which_broker_id=1,
        next_begin_offset=34,
        min_offset=2,
        max_offset=99,
        topic_sys_flag=2,
        group_sys_flag=3,
    )
    joined = b"".join((head, *sent_pieces))
    assert joined == responses.encode_response(request, general, remark=remark, body=b"firstsecond")


@pytest.mark.parametrize("serializer", [JSON, ROCKETMQ])
def test_a_response_in_pieces_equals_a_joined_one_and_copies_nothing(serializer: int) -> None:
    request = send_request(serializer=serializer)
    header = SendMessageResponse(msg_id="m", queue_id=1, queue_offset=2)
    pieces: list[Body] = [b"first", memoryview(b"second")]
    head, *sent_pieces = responses.encode_response_in_pieces(request, header, pieces, remark="r")
    assert all(sent is piece for sent, piece in zip(sent_pieces, pieces, strict=True))
    joined = b"".join((head, *sent_pieces))
    assert joined == responses.encode_response(request, header, remark="r", body=b"firstsecond")


@pytest.mark.parametrize("serializer", [JSON, ROCKETMQ])
def test_the_success_template_equals_the_general_response(serializer: int) -> None:
    request = send_request(serializer=serializer)
    assert responses.encode_success(request) == responses.encode_response(request)


def test_a_success_response_has_the_known_bytes() -> None:
    header = (
        b'{"code":0,"language":"PYTHON","version":479,"opaque":7,"flag":1,'
        b'"serializeTypeCurrentRPC":"JSON"}'
    )
    prefix = bytes([0, 0, 0, len(header) + 4, 0, 0, 0, 97])
    assert responses.encode_success(send_request()) == prefix + header


def test_a_one_way_request_gets_no_response() -> None:
    for serializer in (JSON, ROCKETMQ):
        request = send_request(flag=FLAG_ONEWAY, serializer=serializer)
        templates = responses.SendResponseEncoder(store_host=HOST)
        assert responses.encode_response(request, code=1, remark="no") == b""
        assert responses.encode_error(request, InvalidField(1, "no")) == b""
        assert responses.encode_success(request) == b""
        assert templates.encode(request, log_offset=0, queue_id=0, queue_offset=0) == b""
        pull_response = responses.encode_pull_response(
            request, next_offset=0, min_offset=0, max_offset=0, body=[b"x"]
        )
        assert pull_response == []


def test_an_error_response_has_the_code_and_the_remark() -> None:
    command, body = decode(responses.encode_error(send_request(), InvalidField(1, "no topic")))
    assert (command.code, command.remark, body) == (1, "no topic", b"")


def test_text_that_is_not_unicode_is_a_local_error() -> None:
    with pytest.raises(LocalProtocolError):
        responses.SendResponseEncoder(store_host=HOST).encode(
            send_request(), log_offset=0, queue_id=0, queue_offset=0, transaction_id="\ud800"
        )
