"""The fake channel of the tests records exactly what a real connection sends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from escrowmq.broker.dispatch import Channel
from escrowmq.clock import ManualClock
from escrowmq.config import NetworkConfig
from escrowmq.errors import LocalProtocolError
from escrowmq.remoting.codes import ResponseCode
from escrowmq.remoting.command import decode_command
from escrowmq.remoting.frame import FRAME_LENGTH_MAX, Frame, FrameDecoder
from escrowmq.remoting.headers import OffsetResponse
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import SendResponseEncoder
from escrowmq.server.remoting_server import RemotingServer, RequestHandler
from escrowmq.server.server_connection import ServerConnection
from tests.interop.remoting import Response
from tests.support.broker_requests import FakeChannel, pull_request, send_request
from tests.support.stores import HOST

# The server adds these fields when it encodes a response; the fake omits them.
SERVER_FIELDS = ("MSG_REGION", "TRACE_ON")

Respond = Callable[[Channel, Request[Any]], None]

RESPONSES: dict[str, Respond] = {
    "success": lambda channel, request: channel.respond(request),
    "header": lambda channel, request: channel.respond(request, OffsetResponse(offset=7)),
    "error": lambda channel, request: channel.respond(
        request, code=ResponseCode.SYSTEM_BUSY, remark="größer"
    ),
    "body": lambda channel, request: channel.respond(request, body=memoryview(b"body")),
    "send": lambda channel, request: channel.respond_send(request, 255, 3, 9),
    "half": lambda channel, request: channel.respond_send(
        request, 255, 3, 9, ResponseCode.FLUSH_DISK_TIMEOUT, "key"
    ),
    "batch": lambda channel, request: channel.respond_send_batch(request, [1, 255], 3, 9),
    "pull": lambda channel, request: channel.respond_pull(
        request, next_offset=3, min_offset=1, max_offset=8, slices=[b"one", memoryview(b"two")]
    ),
    "no message": lambda channel, request: channel.respond_pull(
        request,
        next_offset=3,
        min_offset=1,
        max_offset=3,
        code=ResponseCode.PULL_NOT_FOUND,
        remark="none",
    ),
}


class CollectingTransport:
    """A transport that collects what a connection writes."""

    def __init__(self) -> None:
        self.data = b""

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return "127.0.0.1", 40000

    def set_write_buffer_limits(self, high: int) -> None: ...
    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.data += data

    def writelines(self, pieces: list[bytes]) -> None:
        self.data += b"".join(pieces)

    def get_write_buffer_size(self) -> int:
        return 0


def real_responses(respond: Respond, request: Request[Any]) -> list[Response]:
    """Return what a server connection writes, decoded."""

    async def run() -> bytes:
        server = RemotingServer(
            cast(RequestHandler, None),  # not called: no request arrives on this connection
            ManualClock(),
            NetworkConfig(),
            send_response_encoder=SendResponseEncoder(store_host=HOST),
        )
        connection, transport = ServerConnection(server), CollectingTransport()
        connection.connection_made(cast(asyncio.Transport, transport))
        respond(connection, request)
        connection.flush()
        return transport.data

    decoder = FrameDecoder(Frame)
    decoder.receive(asyncio.run(run()))
    return [
        Response(command.code, command.remark, command.ext_fields, bytes(frame.body))
        for frame in decoder.frames()
        for command in [decode_command(frame.serializer, frame.header)]
    ]


def fake_responses(respond: Respond, request: Request[Any]) -> list[Response]:
    channel = FakeChannel()
    respond(channel, request)
    return channel.responses()


@pytest.mark.parametrize("name", RESPONSES)
def test_the_fake_channel_records_what_the_real_one_sends(name: str) -> None:
    [real] = real_responses(RESPONSES[name], pull_request())
    [fake] = fake_responses(RESPONSES[name], pull_request())
    for field in SERVER_FIELDS:
        real.ext_fields.pop(field, None)
    assert fake == real


@pytest.mark.parametrize("name", RESPONSES)
def test_a_one_way_request_gets_no_response(name: str) -> None:
    request = send_request(one_way=True)
    assert real_responses(RESPONSES[name], request) == []
    assert fake_responses(RESPONSES[name], request) == []


def test_a_response_that_is_too_large_for_a_frame_is_refused() -> None:
    def respond(channel: Channel, request: Request[Any]) -> None:
        channel.respond(request, body=bytes(FRAME_LENGTH_MAX + 1))

    for responses in (real_responses, fake_responses):
        with pytest.raises(LocalProtocolError):
            responses(respond, pull_request())
