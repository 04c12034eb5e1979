"""Incomplete requests are dropped after a timeout, or when they take too much memory together."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from escrowmq.clock import ManualClock
from escrowmq.config import NetworkConfig
from escrowmq.config.settings import FRAME_BYTES_MAX
from escrowmq.server.remoting_server import RemotingServer, bind, bound_port
from tests.support.silent_handler import SilentHandler
from tests.support.waiting import wait_until_async

IDLE_S = 100
_HEADER = b'{"code":105,"opaque":1,"flag":0,"version":401,"extFields":{"topic":"t"}}'
_BODY = b"x" * 8_000_000
FRAME = (
    (4 + len(_HEADER) + len(_BODY)).to_bytes(4, "big")
    + len(_HEADER).to_bytes(4, "big")
    + _HEADER
    + _BODY
)


class Bench:
    """A server with a clock that a test moves, and clients."""

    def __init__(self, **limits: Any) -> None:
        self.clock = ManualClock()
        config = NetworkConfig(idle_max_s=IDLE_S, **limits)
        self.server = RemotingServer(SilentHandler(), self.clock, config)
        self.bound = bind("127.0.0.1", 0)

    async def connect(self) -> socket.socket:
        count = len(self.server.connections)
        peer = socket.create_connection(("127.0.0.1", bound_port(self.bound)))
        await wait_until_async(lambda: len(self.server.connections) == count + 1)
        return peer

    async def send(self, peer: socket.socket, data: bytes) -> None:
        """Send a part of a request, and wait until the server has received it."""
        expected = self.server.partial_bytes + len(data)
        await asyncio.to_thread(peer.sendall, data)
        await wait_until_async(lambda: self.server.partial_bytes == expected)


async def test_an_incomplete_request_is_dropped_even_if_bytes_keep_arriving() -> None:
    bench = Bench()
    await bench.server.listen(bench.bound)
    slow, other = await bench.connect(), await bench.connect()
    for byte in FRAME[:11]:
        assert bench.server.dropped_partial_requests == 0
        await bench.send(slow, bytes([byte]))
        bench.clock.advance(ms=IDLE_S * 100)  # a tenth of the idle time
    bench.server.sweep_connections()
    assert bench.server.dropped_partial_requests == 1
    assert bench.server.partial_bytes == 0
    slow.close()
    other.close()
    await bench.server.close()


async def test_the_oldest_incomplete_request_is_dropped_when_memory_is_short() -> None:
    bench = Bench(in_flight_bytes_max=20_000_000, connection_in_flight_bytes_max=FRAME_BYTES_MAX)
    await bench.server.listen(bench.bound)
    peers = [await bench.connect() for _ in range(3)]
    for peer in peers[:2]:
        await bench.send(peer, FRAME[:7_200_000])
    await asyncio.to_thread(peers[2].sendall, FRAME[:7_200_000])
    await wait_until_async(
        lambda: bench.server.dropped_partial_requests == 1 and len(bench.server.connections) == 2
    )
    await wait_until_async(lambda: bench.server.partial_bytes == 14_400_000)
    first = f"127.0.0.1:{peers[0].getsockname()[1]}"
    assert first not in {connection.address for connection in bench.server.connections}
    for peer in peers[1:]:
        await asyncio.to_thread(peer.sendall, FRAME[7_200_000:])
    await wait_until_async(lambda: bench.server.partial_bytes == 0)
    assert bench.server.dropped_partial_requests == 1
    for peer in peers:
        peer.close()
    await bench.server.close()


async def test_a_busy_connection_with_split_requests_is_not_dropped() -> None:
    bench = Bench()
    await bench.server.listen(bench.bound)
    peer = await bench.connect()
    for _ in range(5):
        await bench.send(peer, FRAME[:600_000])
        bench.clock.advance(ms=IDLE_S * 600)
        bench.server.sweep_connections()
        await asyncio.to_thread(peer.sendall, FRAME[600_000:])
        await wait_until_async(lambda: bench.server.partial_bytes == 0)
        bench.clock.advance(ms=IDLE_S * 300)
    assert bench.server.dropped_partial_requests == 0
    peer.close()
    await bench.server.close()
