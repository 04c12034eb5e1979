"""Encode responses: the general encoder, and templates for those that a busy broker sends most.

A one-way request gets no response: every function here returns nothing (b"" or []) for it, so that
callers need not check. A response has the same serializer as its request.

A template produces the same bytes as the general encoder, only faster. It holds all constant parts,
already escaped; text that comes from a client is escaped when it is inserted. Responses to requests
with a ROCKETMQ header use the general encoder.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from escrowmq.errors import LocalProtocolError, RequestRefused
from escrowmq.message.keys import encode_offset_ids
from escrowmq.remoting.codes import (
    FLAG_ONEWAY,
    FLAG_RESPONSE,
    JSON,
    VERSION,
    Language,
    ResponseCode,
)
from escrowmq.remoting.command import JSON_NAME, Command, encode_command
from escrowmq.remoting.frame import encode_frame, frame_prefix
from escrowmq.remoting.headers import (
    Header,
    PullMessageResponse,
    SendMessageResponse,
    encode_header,
)
from escrowmq.remoting.requests import Body, Request

REGION: Final = "DefaultRegion"

_HEADER_START = (
    b'{"code":%%d,"language":"%b","version":%d,"opaque":%%d,"flag":%d,'
    b'"serializeTypeCurrentRPC":"%b"'
) % (Language.PYTHON.name.encode(), VERSION, FLAG_RESPONSE, JSON_NAME.encode())
_SUCCESS_TEMPLATE = _HEADER_START + b"}"
_SUCCESS = int(ResponseCode.SUCCESS)  # a plain int is formatted faster than an enum member
_PULL_TEMPLATE = (
    _HEADER_START + b'%b,"extFields":{"suggestWhichBrokerId":"%d","nextBeginOffset":"%d",'
    b'"minOffset":"%d","maxOffset":"%d","topicSysFlag":"%d","groupSysFlag":"%d"}}'
)

_encode_text = msgspec.json.Encoder().encode
_pack_prefix = struct.Struct(">II").pack
assert JSON == 0


def encode_response(
    request: Request[Any],
    fields: Header | None = None,
    *,
    code: int = _SUCCESS,
    remark: str = "",
    body: Body = b"",
) -> bytes:
    """Return a response as a frame. Raises LocalProtocolError if it is too long for one."""
    if request.head.flag & FLAG_ONEWAY:
        return b""
    header = _encode_response_header(request, fields, code, remark)
    return encode_frame(request.serializer, header, body)


def encode_response_in_pieces(
    request: Request[Any],
    fields: Header | None,
    body: Sequence[Body],
    *,
    code: int = _SUCCESS,
    remark: str = "",
) -> list[Body]:
    """Return the pieces to write, in order. Those of the body are not joined or copied."""
    if request.head.flag & FLAG_ONEWAY:
        return []
    header = _encode_response_header(request, fields, code, remark)
    prefix = frame_prefix(request.serializer, len(header), sum(map(len, body)))
    return [prefix + header, *body]


def encode_error(request: Request[Any], error: RequestRefused) -> bytes:
    """Return the response with the code and the remark of an error."""
    return encode_response(request, code=error.code, remark=error.remark)


def encode_success(request: Request[Any]) -> bytes:
    """Return a successful response without fields and body."""
    if request.head.flag & FLAG_ONEWAY:
        return b""
    if request.serializer != JSON:
        return encode_response(request)
    return _frame(_SUCCESS_TEMPLATE % (_SUCCESS, request.head.opaque))


class SendResponseEncoder:
    """Encodes the responses to sends of one broker, whose address is part of every message id."""

    def __init__(self, *, store_host: bytes, region: str = REGION, trace_on: bool = True) -> None:
        self.store_host, self.region, self.trace_on = store_host, region, trace_on
        self._host_text = store_host.hex().upper()
        # What ends every response, behind the fields that differ.
        self.tail = b',"MSG_REGION":%b,"TRACE_ON":"%b"}}' % (
            _quote(region),
            b"true" if trace_on else b"false",
        )
        self._template = (
            _HEADER_START
            + b',"extFields":{"msgId":"'
            + self._host_text.encode()
            + b'%016X","queueId":"%d","queueOffset":"%d"%b'
            + self.tail.replace(b"%", b"%%")
        )

    def encode(
        self,
        request: Request[Any],
        log_offset: int,
        queue_id: int,
        queue_offset: int,
        code: int = _SUCCESS,
        transaction_id: str | None = None,
    ) -> bytes:
        """Return the response to a send of one message."""
        if request.head.flag & FLAG_ONEWAY:
            return b""
        if request.serializer != JSON:
            fields = SendMessageResponse(
                msg_id=f"{self._host_text}{log_offset:016X}",
                queue_id=queue_id,
                queue_offset=queue_offset,
                transaction_id=transaction_id,
                region=self.region,
                trace_on=self.trace_on,
            )
            return encode_response(request, fields, code=code)
        optional = b""
        if transaction_id is not None:
            optional = b',"transactionId":' + _quote(transaction_id)
        opaque = request.head.opaque
        header = self._template % (code, opaque, log_offset, queue_id, queue_offset, optional)
        length = len(header)
        # The header is short and JSON is serializer 0, so its length is also its mark.
        return _pack_prefix(4 + length, length) + header

    def encode_batch(
        self,
        request: Request[Any],
        log_offsets: Sequence[int],
        queue_id: int,
        queue_offset: int,
        code: int = _SUCCESS,
    ) -> bytes:
        """Encode the response to a send of several messages: the id of each, comma-separated."""
        fields = SendMessageResponse(
            msg_id=",".join(encode_offset_ids(self.store_host, log_offsets)),
            queue_id=queue_id,
            queue_offset=queue_offset,
            region=self.region,
            trace_on=self.trace_on,
        )
        return encode_response(request, fields, code=code)


def encode_pull_response(
    request: Request[Any],
    *,
    next_offset: int,
    min_offset: int,
    max_offset: int,
    suggested_broker_id: int = 0,
    topic_sys_flag: int = 0,
    group_sys_flag: int = 0,
    code: int = _SUCCESS,
    remark: str = "",
    body: Sequence[Body] = (),
) -> list[Body]:
    """Return the pieces to write, in order. Those of the body are not joined or copied."""
    if request.head.flag & FLAG_ONEWAY:
        return []
    if request.serializer == JSON:
        optional = b',"remark":' + _quote(remark) if remark else b""
        offsets = suggested_broker_id, next_offset, min_offset, max_offset
        sys_flags = topic_sys_flag, group_sys_flag
        header = _PULL_TEMPLATE % (code, request.head.opaque, optional, *offsets, *sys_flags)
    else:
        fields = PullMessageResponse(
            suggest_which_broker_id=suggested_broker_id,
            next_begin_offset=next_offset,
            min_offset=min_offset,
            max_offset=max_offset,
            topic_sys_flag=topic_sys_flag,
            group_sys_flag=group_sys_flag,
        )
        header = _encode_response_header(request, fields, code, remark)
    prefix = frame_prefix(request.serializer, len(header), sum(map(len, body)))
    return [prefix + header, *body]


def _encode_response_header(
    request: Request[Any], fields: Header | None, code: int, remark: str
) -> bytes:
    command = Command(
        code=code,
        opaque=request.head.opaque,
        flag=FLAG_RESPONSE,
        remark=remark,
        ext_fields={} if fields is None else encode_header(fields),
    )
    return encode_command(command, request.serializer)


def _frame(header: bytes) -> bytes:
    return frame_prefix(JSON, len(header), 0) + header


def _quote(text: str) -> bytes:
    try:
        return _encode_text(text)
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"cannot encode text: {error}") from error
