"""Clients that do not read their responses: how much is kept for them, and what they get later."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from escrowmq.clock import ManualClock
from escrowmq.config import NetworkConfig
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import encode_response
from escrowmq.server.remoting_server import RemotingServer, bind, bound_port
from escrowmq.server.server_connection import TURN_RESPONSE_BYTES_MAX, ServerConnection
from tests.support.waiting import wait_until_async

MIB = 1 << 20
REQUESTS = 1_000
BODY = b"x" * 100_000
_HEADER = b'{"code":105,"opaque":%d,"flag":0,"version":401,"extFields":{"topic":"t"}}'


def frame(number: int) -> bytes:
    header = _HEADER % number
    return (4 + len(header)).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header


class GenerousHandler:
    """Responds to every request with 100,000 bytes."""

    def __init__(self) -> None:
        self.handled = 0

    def handle(self, connection: ServerConnection, request: Request[Any], now_ms: int) -> None:
        self.handled += 1
        connection.respond(request, body=BODY)

    def end_turn(self, now_ms: int) -> bool:
        return False

    def channel_closed(self, connection: ServerConnection) -> None: ...


async def settled(server: RemotingServer) -> int:
    """Wait until the server handles no more requests, and return how many bytes are unsent."""
    before = -1
    while server.unsent_bytes() != before or before == 0:
        before = server.unsent_bytes()
        for _ in range(50):  # turns of the loop
            await asyncio.sleep(0.001)
    return before


def unsent_after_sweep(server: RemotingServer) -> int:
    server.sweep_connections()
    return server.unsent_bytes()


class AtOnceHandler(GenerousHandler):
    """Responds at once, as the native path does, to all requests or to every second one."""

    def __init__(self, *, every: int) -> None:
        super().__init__()
        self._every = every

    def handle(self, connection: ServerConnection, request: Request[Any], now_ms: int) -> None:
        if self.handled % self._every:
            super().handle(connection, request, now_ms)
        else:
            self.handled += 1
            connection.write_at_once(encode_response(request, body=BODY))


class ViewHandler(GenerousHandler):
    """Responds with views of one large block, as pulls do that find messages in one."""

    def __init__(self) -> None:
        super().__init__()
        self.block = bytearray(BODY)

    def handle(self, connection: ServerConnection, request: Request[Any], now_ms: int) -> None:
        self.handled += 1
        connection.write_pieces([encode_response(request, body=b""), memoryview(self.block)])


async def test_what_a_client_does_not_read_is_copied_and_keeps_no_block() -> None:
    handler = ViewHandler()
    server = RemotingServer(handler, ManualClock(), NetworkConfig())
    listening_socket = bind("127.0.0.1", 0)
    await server.listen(listening_socket)
    peer = socket.create_connection(("127.0.0.1", bound_port(listening_socket)))
    peer.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(peer, b"".join(map(frame, range(REQUESTS))))
        assert await settled(server) > 0
        # A bytearray with views cannot be resized: this raises if one is left.
        handler.block.clear()
    finally:
        peer.close()
        await server.close()


@pytest.mark.parametrize("limit_mib", [16, 40])
@pytest.mark.parametrize(
    "handler",
    [GenerousHandler(), AtOnceHandler(every=1), AtOnceHandler(every=2)],
    ids=["at the end of the turn", "at once", "both"],
)
async def test_responses_are_kept_up_to_the_limit_of_the_connection(
    limit_mib: int, handler: GenerousHandler
) -> None:
    handler.handled = 0
    config = NetworkConfig(connection_in_flight_bytes_max=limit_mib * MIB)
    server = RemotingServer(handler, ManualClock(), config)
    listening_socket = bind("127.0.0.1", 0)
    await server.listen(listening_socket)
    peer = socket.create_connection(("127.0.0.1", bound_port(listening_socket)))
    peer.setblocking(False)
    try:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(peer, b"".join(map(frame, range(REQUESTS))))
        unsent = await settled(server)
        assert limit_mib * MIB <= unsent <= limit_mib * MIB + 2 * TURN_RESPONSE_BYTES_MAX
        assert handler.handled < REQUESTS
        assert server.memory.total >= unsent
        # The client reads at last: it gets every response, in order.
        data = bytearray()
        for number in range(REQUESTS):
            while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
                data += await loop.sock_recv(peer, 1 << 20)
            size = 4 + int.from_bytes(data[:4], "big")
            assert b'"opaque":%d,' % number in data[:size]
            assert data[:size].endswith(BODY)
            del data[:size]
        # The transport does not say when it has sent the last bytes; the regular sweep notices.
        await wait_until_async(lambda: unsent_after_sweep(server) == 0)
    finally:
        peer.close()
        await server.close()


async def test_above_the_soft_limit_a_greedy_connection_is_held_and_a_small_one_served() -> None:
    handler = GenerousHandler()
    config = NetworkConfig(client_memory_max=20 * MIB)
    server = RemotingServer(handler, ManualClock(), config)
    listening_socket = bind("127.0.0.1", 0)
    await server.listen(listening_socket)
    address = "127.0.0.1", bound_port(listening_socket)
    greedy, honest = socket.create_connection(address), socket.create_connection(address)
    for peer in (greedy, honest):
        peer.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(greedy, b"".join(map(frame, range(REQUESTS))))
        await wait_until_async(lambda: server.watermark.held_count > 0)
        await loop.sock_sendall(honest, frame(7))
        data = b""
        while len(data) < len(BODY):
            data += await loop.sock_recv(honest, 1 << 20)
        assert server.memory.total <= 20 * MIB + 2 * TURN_RESPONSE_BYTES_MAX
    finally:
        greedy.close()
        honest.close()
        await server.close()


def end_with_garbage(peer: socket.socket) -> None:
    peer.sendall(b"\xff" * 64)


def end_with_eof(peer: socket.socket) -> None:
    peer.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("end", [end_with_garbage, end_with_eof])
async def test_connections_that_are_being_closed_count_until_their_clients_read(
    end: Callable[[socket.socket], None],
) -> None:
    handler = GenerousHandler()
    config = NetworkConfig(connection_in_flight_bytes_max=16 * MIB, client_memory_max=40 * MIB)
    server = RemotingServer(handler, ManualClock(), config)
    listening_socket = bind("127.0.0.1", 0)
    await server.listen(listening_socket)
    address = "127.0.0.1", bound_port(listening_socket)
    peers = [socket.create_connection(address) for _ in range(12)]
    try:
        for peer in peers:
            peer.sendall(b"".join(map(frame, range(140))))
            end(peer)
            await asyncio.sleep(0)
        await settled(server)
        kept = sum(connection.unsent_bytes() for connection in server.connections)
        assert kept <= 40 * MIB + 2 * TURN_RESPONSE_BYTES_MAX
        assert server.watermark.closed_connections > 0
    finally:
        for peer in peers:
            peer.close()
        await server.close()


@pytest.mark.parametrize("end", [end_with_garbage, end_with_eof])
async def test_a_client_can_read_its_responses_after_its_last_request(
    end: Callable[[socket.socket], None],
) -> None:
    server = RemotingServer(GenerousHandler(), ManualClock(), NetworkConfig())
    listening_socket = bind("127.0.0.1", 0)
    await server.listen(listening_socket)
    peer = socket.create_connection(("127.0.0.1", bound_port(listening_socket)))
    loop = asyncio.get_running_loop()
    try:
        peer.sendall(b"".join(map(frame, range(200))))
        end(peer)
        peer.setblocking(False)
        size = 0
        while chunk := await loop.sock_recv(peer, 1 << 20):
            size += len(chunk)
        assert size > 200 * len(BODY)
        await wait_until_async(lambda: not server.connections)
    finally:
        peer.close()
        await server.close()
