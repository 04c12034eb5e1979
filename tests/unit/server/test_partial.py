"""Incomplete requests: dropped after a timeout, or when all together take too much memory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from escrowmq.clock import ManualClock
from escrowmq.config import NetworkConfig
from escrowmq.config.settings import FRAME_BYTES_MAX
from escrowmq.server.remoting_server import RemotingServer, bind, bound_port
from tests.unit.server.test_idle_connections import Nobody

IDLE_S = 100
_HEADER = b'{"code":105,"opaque":1,"flag":0,"version":401,"extFields":{"topic":"t"}}'
_BODY = b"x" * 8_000_000
FRAME = (
    (4 + len(_HEADER) + len(_BODY)).to_bytes(4, "big")
    + len(_HEADER).to_bytes(4, "big")
    + _HEADER
    + _BODY
)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Bench:
    def __init__(self, **limits: Any) -> None:
        self.clock = ManualClock()
        self.port = RemotingServer(Nobody(), self.clock, NetworkConfig(idle_max_s=IDLE_S, **limits))
        self.bound = bind("127.0.0.1", 0)

    async def connect(self) -> socket.socket:
        count = len(self.port.connections)
        peer = socket.create_connection(("127.0.0.1", bound_port(self.bound)))
        await until(lambda: len(self.port.connections) == count + 1)
        return peer

    async def send(self, peer: socket.socket, data: bytes) -> None:
        wanted = self.port.partial_bytes + len(data)
        await asyncio.to_thread(peer.sendall, data)
        await until(lambda: self.port.partial_bytes == wanted)


async def test_an_incomplete_request_is_dropped_even_if_bytes_keep_arriving() -> None:
    bench = Bench()
    await bench.port.listen(bench.bound)
    slow, other = await bench.connect(), await bench.connect()
    for byte in FRAME[:11]:
        assert bench.port.dropped_partial_requests == 0
        await bench.send(slow, bytes([byte]))
        bench.clock.advance(ms=IDLE_S * 100)  # never silent for long
    bench.port.sweep_connections()
    assert bench.port.dropped_partial_requests == 1
    assert bench.port.partial_bytes == 0
    slow.close()
    other.close()
    await bench.port.close()


async def test_the_oldest_incomplete_request_is_dropped_when_memory_is_short() -> None:
    bench = Bench(in_flight_bytes_max=20_000_000, connection_in_flight_bytes_max=FRAME_BYTES_MAX)
    await bench.port.listen(bench.bound)
    peers = [await bench.connect() for _ in range(3)]
    for peer in peers[:2]:
        await bench.send(peer, FRAME[:7_200_000])
    await asyncio.to_thread(peers[2].sendall, FRAME[:7_200_000])
    await until(
        lambda: bench.port.dropped_partial_requests == 1 and len(bench.port.connections) == 2
    )
    await until(lambda: bench.port.partial_bytes == 14_400_000)
    first = f"127.0.0.1:{peers[0].getsockname()[1]}"
    assert first not in {line.address for line in bench.port.connections}
    for peer in peers[1:]:
        await asyncio.to_thread(peer.sendall, FRAME[7_200_000:])
    await until(lambda: bench.port.partial_bytes == 0)
    assert bench.port.dropped_partial_requests == 1
    for peer in peers:
        peer.close()
    await bench.port.close()


async def test_a_busy_connection_with_split_requests_is_not_dropped() -> None:
    bench = Bench()
    await bench.port.listen(bench.bound)
    peer = await bench.connect()
    for _ in range(5):
        await bench.send(peer, FRAME[:600_000])
        bench.clock.advance(ms=IDLE_S * 600)
        bench.port.sweep_connections()
        await asyncio.to_thread(peer.sendall, FRAME[600_000:])
        await until(lambda: bench.port.partial_bytes == 0)
        bench.clock.advance(ms=IDLE_S * 300)
    assert bench.port.dropped_partial_requests == 0
    peer.close()
    await bench.port.close()
