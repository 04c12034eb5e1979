"""A simulated network: seeded, driven by a given clock, and as unreliable as it is told.

A connection has two endpoints, each with a `remoting.connection.Connection`: bytes travel, and the
real protocol code runs on both sides. Each frame can be late, lost, repeated or overtaken by
others. TCP does none of this within one connection. But connections that break, clients that retry
and proxies in between do, and to a server that looks the same.

    connect()      open a connection; returns the client's and the server's endpoint
    deliver()      hand everything that is due to the peers
    disconnect()   close a connection: both peers are told, and frames in flight are lost

An endpoint is what a broker uses as a Channel. What is written to it leaves with `flush`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, Protocol

from escrowmq.clock import Clock
from escrowmq.message.keys import encode_host
from escrowmq.peer import host_of
from escrowmq.remoting.codes import ResponseCode
from escrowmq.remoting.connection import Connection, Event
from escrowmq.remoting.headers import Header
from escrowmq.remoting.requests import Body, Request
from escrowmq.remoting.responses import (
    SendResponseEncoder,
    encode_pull_response,
    encode_response,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFaults:
    """What happens to frames: probabilities from 0 to 1, and delays."""

    loss: float = 0.0
    duplication: float = 0.0
    lateness: float = 0.0  # that a frame takes `late_ms`, so that others overtake it
    delay_ms: tuple[int, int] = (1, 4)
    late_ms: tuple[int, int] = (20, 400)


NO_FAULTS = NetworkFaults()
SERVER_ADDRESS: Final = ("10.0.0.1", 10911)  # where every simulated server listens


class SimulatedPeer(Protocol):
    """The owner of an endpoint: a simulated client or server."""

    def received(self, end: Endpoint, data: bytes) -> None: ...
    def closed(self, end: Endpoint) -> None: ...


class Endpoint:
    """One end of a connection."""

    def __init__(self, network: Network, owner: SimulatedPeer, peer: str) -> None:
        address, _, port = peer.rpartition(":")
        self.address = peer
        self.origin = host_of(peer)
        self.peer_host = encode_host(address, int(port))
        self.owner = owner
        self.connection = Connection()
        self.is_open = True
        self.can_send = True
        self.on_oneway: Callable[[int, Header], None] = lambda code, fields: None  # observes
        self._network = network
        self._send_response_encoder = SendResponseEncoder(store_host=encode_host(*SERVER_ADDRESS))
        self._outgoing = bytearray()
        self._other: Endpoint | None = None

    def set_account(self, access_key: str) -> None:
        self.origin = f"account {access_key}"

    def events(self, data: bytes) -> Iterator[Event]:
        self.connection.receive(data)
        return self.connection.events()

    def write(self, data: Body) -> None:
        if self.is_open:
            self._outgoing += data

    def write_at_once(self, data: Body) -> None:
        self.write(data)

    def write_pieces(self, pieces: Sequence[Body]) -> None:
        for piece in pieces:
            self.write(piece)

    def respond(
        self,
        request: Request[Any],
        header: Header | None = None,
        *,
        code: int = ResponseCode.SUCCESS,
        remark: str = "",
        body: Body = b"",
    ) -> None:
        self.write(encode_response(request, header, code=code, remark=remark, body=body))

    def respond_in_pieces(
        self, request: Request[Any], header: Header, body: Sequence[Body]
    ) -> None:
        self.respond(request, header, body=b"".join(body))

    def respond_send(
        self,
        request: Request[Any],
        log_offset: int,
        queue_id: int,
        queue_offset: int,
        code: int = ResponseCode.SUCCESS,
        transaction_id: str | None = None,
    ) -> None:
        encode = self._send_response_encoder.encode
        self.write(encode(request, log_offset, queue_id, queue_offset, code, transaction_id))

    def respond_send_batch(
        self,
        request: Request[Any],
        log_offsets: Sequence[int],
        queue_id: int,
        queue_offset: int,
        code: int = ResponseCode.SUCCESS,
    ) -> None:
        encode = self._send_response_encoder.encode_batch
        self.write(encode(request, log_offsets, queue_id, queue_offset, code))

    def respond_pull(
        self,
        request: Request[Any],
        *,
        next_offset: int,
        min_offset: int,
        max_offset: int,
        topic_sys_flag: int = 0,
        group_sys_flag: int = 0,
        code: int = ResponseCode.SUCCESS,
        remark: str = "",
        slices: Sequence[Body] = (),
    ) -> None:
        pieces = encode_pull_response(
            request,
            next_offset=next_offset,
            min_offset=min_offset,
            max_offset=max_offset,
            topic_sys_flag=topic_sys_flag,
            group_sys_flag=group_sys_flag,
            code=code,
            remark=remark,
            body=slices,
        )
        self.write(b"".join(pieces))

    def send_oneway(self, code: int, fields: Header, body: Body = b"") -> bool:
        if self.is_open:
            self.write(self.connection.send_oneway(code, fields, body))
            self.on_oneway(code, fields)
        return self.is_open

    def flush(self) -> None:
        """Send what was written, frame by frame."""
        data, self._outgoing = bytes(self._outgoing), bytearray()
        begin = 0
        while self._other is not None and begin < len(data):
            size = 4 + int.from_bytes(data[begin : begin + 4], "big")
            self._network.transmit(self._other, data[begin : begin + size])
            begin += size


class Network:
    """All connections of a simulation and the frames in flight."""

    def __init__(self, rng: Random, clock: Clock, faults: NetworkFaults = NO_FAULTS) -> None:
        self.faults = faults  # may change at any time
        self._rng = rng
        self._clock = clock
        self._numbers = itertools.count(1)
        self._in_flight: list[tuple[float, int, Endpoint, bytes]] = []

    def connect(self, client: SimulatedPeer, server: SimulatedPeer) -> tuple[Endpoint, Endpoint]:
        """Return the endpoints of client and server. The address of each is that of its peer."""
        port = 40_000 + next(self._numbers) % 20_000
        client_endpoint = Endpoint(self, client, "{}:{}".format(*SERVER_ADDRESS))
        server_endpoint = Endpoint(self, server, f"10.0.0.2:{port}")
        client_endpoint._other, server_endpoint._other = server_endpoint, client_endpoint
        return client_endpoint, server_endpoint

    def transmit(self, end: Endpoint, frame: bytes) -> None:
        """Put a frame on its way to an endpoint, or lose it."""
        faults, rng = self.faults, self._rng
        copies = 1 + (rng.random() < faults.duplication)
        for _ in range(copies):
            if rng.random() < faults.loss:
                continue
            is_late = rng.random() < faults.lateness
            delay_ms = rng.randint(*(faults.late_ms if is_late else faults.delay_ms))
            due_s = self._clock.elapsed_s() + delay_ms / 1000
            heapq.heappush(self._in_flight, (due_s, next(self._numbers), end, frame))

    def deliver(self) -> int:
        """Hand frames that are due to open endpoints. Return how many."""
        now_s, count = self._clock.elapsed_s(), 0
        while self._in_flight and self._in_flight[0][0] <= now_s:
            _, _, end, frame = heapq.heappop(self._in_flight)
            if end.is_open:
                count += 1
                end.owner.received(end, frame)
        return count

    @property
    def in_flight(self) -> int:
        """How many frames are on their way to ends that are open."""
        return sum(end.is_open for _, _, end, _ in self._in_flight)

    def disconnect(self, end: Endpoint) -> None:
        """Close a connection and tell both peers. Frames in flight are lost."""
        endpoints = [
            endpoint for endpoint in (end, end._other) if endpoint is not None and endpoint.is_open
        ]
        for endpoint in endpoints:
            endpoint.is_open = False
        for endpoint in endpoints:
            endpoint.owner.closed(endpoint)
