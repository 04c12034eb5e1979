"""A network between simulated peers: seeded, on a clock that is handed in, as bad as it is told.

A line has two ends, and each is a `wire.connection.Connection`: what goes over it are bytes, and
the real wire code runs on both sides. Every frame has a fate of its own: it is late, lost, comes
twice, overtakes another. TCP does none of this to a line that lives; lines that break, clients
that try again and proxies in between do, and to whoever is asked it looks the same.

    connect()   a line: the end of whoever asks, and that of whoever serves
    deliver()   everything that is due by now, to the peer at its end
    cut()       a line is gone: both peers are told, and what was under way is lost

An End is what a broker takes for a Line. What is written to it leaves with `flush`.
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
    """What can happen to a frame, as probabilities."""

    loss: float = 0.0
    duplication: float = 0.0
    lateness: float = 0.0  # that it takes long: others overtake it
    delay_ms: tuple[int, int] = (1, 4)
    late_ms: tuple[int, int] = (20, 400)


NO_FAULTS = NetworkFaults()
SERVER_ADDRESS: Final = ("10.0.0.1", 10911)  # where every simulated server listens


class SimulatedPeer(Protocol):
    """Whoever sits at an end."""

    def received(self, end: Endpoint, data: bytes) -> None: ...
    def closed(self, end: Endpoint) -> None: ...


class Endpoint:
    """One end of a line. Compares and hashes as itself."""

    def __init__(self, network: Network, owner: SimulatedPeer, peer: str) -> None:
        address, _, port = peer.rpartition(":")
        self.address = peer
        self.peer_host = encode_host(address, int(port))
        self.owner = owner
        self.connection = Connection()
        self.is_open = True
        self.on_oneway: Callable[[int, Header], None] = lambda code, fields: None  # to look on
        self._network = network
        self._send_response_encoder = SendResponseEncoder(store_host=encode_host(*SERVER_ADDRESS))
        self._outgoing = bytearray()
        self._other: Endpoint | None = None

    def events(self, data: bytes) -> Iterator[Event]:
        self.connection.receive(data)
        return self.connection.events()

    def write(self, data: bytes) -> None:
        if self.is_open:
            self._outgoing += data

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
        code: int = ResponseCode.SUCCESS,
        remark: str = "",
        slices: Sequence[Body] = (),
    ) -> None:
        pieces = encode_pull_response(
            request,
            next_offset=next_offset,
            min_offset=min_offset,
            max_offset=max_offset,
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
        """What was written leaves, a frame at a time."""
        out, self._outgoing = bytes(self._outgoing), bytearray()
        at = 0
        while self._other is not None and at < len(out):
            size = 4 + int.from_bytes(out[at : at + 4], "big")
            self._network.transmit(self._other, out[at : at + size])
            at += size


class Network:
    def __init__(self, rng: Random, clock: Clock, faults: NetworkFaults = NO_FAULTS) -> None:
        self.faults = faults  # may change at any time
        self._rng = rng
        self._clock = clock
        self._numbers = itertools.count(1)
        self._in_flight: list[tuple[float, int, Endpoint, bytes]] = []

    def connect(self, client: SimulatedPeer, server: SimulatedPeer) -> tuple[Endpoint, Endpoint]:
        """The client's end and the server's; whoever is at one sees the address of the other."""
        port = 40_000 + next(self._numbers) % 20_000
        near, far = (
            Endpoint(self, client, "{}:{}".format(*SERVER_ADDRESS)),
            Endpoint(self, server, f"10.0.0.2:{port}"),
        )
        near._other, far._other = far, near
        return near, far

    def transmit(self, end: Endpoint, frame: bytes) -> None:
        """Towards this end, if the weather lets it."""
        weather, rng = self.faults, self._rng
        copies = 1 + (rng.random() < weather.duplication)
        for _ in range(copies):
            if rng.random() < weather.loss:
                continue
            is_late = rng.random() < weather.lateness
            delay_ms = rng.randint(*(weather.late_ms if is_late else weather.delay_ms))
            due_s = self._clock.elapsed_s() + delay_ms / 1000
            heapq.heappush(self._in_flight, (due_s, next(self._numbers), end, frame))

    def deliver(self) -> int:
        """How many frames came to an end that is still there."""
        now_s, count = self._clock.elapsed_s(), 0
        while self._in_flight and self._in_flight[0][0] <= now_s:
            _, _, end, frame = heapq.heappop(self._in_flight)
            if end.is_open:
                count += 1
                end.owner.received(end, frame)
        return count

    @property
    def in_flight(self) -> int:
        return sum(end.is_open for _, _, end, _ in self._in_flight)

    def disconnect(self, end: Endpoint) -> None:
        ends = [one for one in (end, end._other) if one is not None and one.is_open]
        for one in ends:
            one.is_open = False
        for one in ends:
            one.owner.closed(one)
