"""A turn is bounded by time, and connections are served in turn, whatever one of them sends.

The clock moves only while a request is handled, so that a test counts requests instead of seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from escrowmq.clock import ManualClock
from escrowmq.config import NetworkConfig
from escrowmq.remoting.codes import JSON, RequestCode
from escrowmq.remoting.frame import encode_frame
from escrowmq.remoting.requests import Request
from escrowmq.server.remoting_server import (
    CLOSED_PER_TURN_MAX,
    LONG_CHUNKS_MAX,
    REQUEST_HEADER_BYTES_MAX,
    SHARE_EVENTS_MAX,
    PlainRequestHandler,
    RemotingServer,
)
from escrowmq.server.server_connection import LONG_CHUNK_BYTES, ServerConnection
from escrowmq.sliced_work import SlicedWork
from tests.support.fake_transport import FakeTransport


class CostlyHandler:
    """Notes every request and lets time pass for it; sliced requests take as many slices."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.handled: list[tuple[str, int]] = []  # address of the connection, opaque
        self.cost_ms: dict[str, int] = {}
        self.slices: dict[str, int] = {}
        self.fails_for: set[str] = set()
        self.on_slice: Callable[[], None] = lambda: None

    def handle(
        self, connection: ServerConnection, request: Request[Any], now_ms: int
    ) -> SlicedWork | None:
        address = connection.address
        if address in self.fails_for:
            raise ValueError("a bug")
        if address in self.slices:
            return self._handle_in_slices(connection, request)
        self._finish(connection, request)
        return None

    def _handle_in_slices(self, connection: ServerConnection, request: Request[Any]) -> SlicedWork:
        for _ in range(self.slices[connection.address]):
            self._clock.advance(ms=1)
            self.on_slice()
            yield
        self._finish(connection, request)

    def _finish(self, connection: ServerConnection, request: Request[Any]) -> None:
        self.handled.append((connection.address, request.head.opaque))
        self._clock.advance(ms=self.cost_ms.get(connection.address, 0))
        connection.respond(request)

    def end_turn(self, now_ms: int) -> bool:
        return False

    def channel_closed(self, connection: ServerConnection) -> None: ...


class NothingIsPlain:
    """Stands in for the native path, and leaves every request to the handler."""

    def handle(self, chunks: list[Any], now_ms: int) -> list[tuple[int, bytes, bool]]:
        return [(index, rest + data, True) for index, (_, _, rest, data) in enumerate(chunks)]


class FairBench:
    def __init__(self, *, plain_requests: PlainRequestHandler | None = None) -> None:
        self.clock = ManualClock()
        self.handler = CostlyHandler(self.clock)
        self.server = RemotingServer(
            self.handler, self.clock, NetworkConfig(), plain_requests=plain_requests
        )
        self._next_opaque = 0

    def connect(self, port: int) -> tuple[ServerConnection, FakeTransport]:
        connection, transport = ServerConnection(self.server), FakeTransport(port)
        connection.connection_made(transport)
        return connection, transport

    def requests(self, count: int) -> bytes:
        """Return so many requests, as one chunk of bytes."""
        frames = []
        for _ in range(count):
            self._next_opaque += 1
            header = b'{"code":%d,"opaque":%d,"extFields":{"topic":"t"}}' % (
                RequestCode.GET_ROUTEINFO_BY_TOPIC,
                self._next_opaque,
            )
            frames.append(encode_frame(JSON, header))
        return b"".join(frames)

    def count(self, connection: ServerConnection) -> int:
        return sum(address == connection.address for address, _ in self.handler.handled)


async def test_costly_requests_of_one_connection_do_not_delay_those_of_another() -> None:
    bench = FairBench()
    greedy, _ = bench.connect(1)
    other, _ = bench.connect(2)
    bench.handler.cost_ms[greedy.address] = 1
    greedy.data_received(bench.requests(1_000))
    for turn in range(50):
        before = bench.count(greedy)
        other.data_received(bench.requests(1))
        assert bench.count(other) == turn + 1  # at once
        bench.server.end_turn()
        assert bench.count(greedy) - before <= 3


async def test_connections_that_send_more_than_their_share_are_served_in_turn() -> None:
    bench = FairBench()
    connections = [bench.connect(port)[0] for port in range(1, 6)]
    for connection in connections:
        bench.handler.cost_ms[connection.address] = 1
        connection.data_received(bench.requests(100))
    for _ in range(10):  # until each has had its first slice
        bench.server.end_turn()
    before = [bench.count(connection) for connection in connections]
    for _ in range(40):
        counts = [
            bench.count(connection) - count
            for connection, count in zip(connections, before, strict=True)
        ]
        assert max(counts) - min(counts) <= 1
        bench.server.end_turn()


async def test_one_request_does_not_wait_for_all_that_send_more_than_their_share() -> None:
    bench = FairBench()
    greedy = [bench.connect(port)[0] for port in range(1, 51)]
    for connection in greedy:
        bench.handler.cost_ms[connection.address] = 1
        connection.data_received(bench.requests(1_000))
    for _ in range(100):  # until each has had its first slice
        bench.server.end_turn()
    other, _ = bench.connect(99)
    bench.clock.advance(ms=30)  # so late in the turn that its request has to wait
    other.data_received(bench.requests(1))
    assert bench.count(other) == 0
    for _ in range(2):
        bench.server.end_turn()
    assert bench.count(other) == 1


async def test_all_requests_are_handled_in_order_and_then_reading_goes_on() -> None:
    bench = FairBench()
    greedy, transport = bench.connect(1)
    bench.handler.cost_ms[greedy.address] = 1
    greedy.data_received(bench.requests(100))
    assert not transport.is_reading()
    while not transport.is_reading():
        bench.server.end_turn()
    assert [opaque for _, opaque in bench.handler.handled] == list(range(1, 101))
    greedy.data_received(bench.requests(1))
    assert bench.count(greedy) == 101


async def test_the_share_of_a_turn_counts_all_chunks_of_it() -> None:
    bench = FairBench()
    greedy, transport = bench.connect(1)
    for _ in range(3):
        if transport.is_reading():
            greedy.data_received(bench.requests(SHARE_EVENTS_MAX - 10))
    assert bench.count(greedy) == SHARE_EVENTS_MAX
    bench.server.end_turn()
    assert transport.is_reading()


async def test_new_requests_wait_when_the_turn_has_taken_too_long() -> None:
    bench = FairBench()
    connections = [bench.connect(port)[0] for port in range(1, 101)]
    for connection in connections:
        bench.handler.cost_ms[connection.address] = 1
        connection.data_received(bench.requests(1))
    in_first_turn = len(bench.handler.handled)
    assert in_first_turn <= 5
    for _ in range(100):
        bench.server.end_turn()
    assert {address for address, _ in bench.handler.handled} == {
        connection.address for connection in connections
    }


async def test_a_single_request_is_served_in_its_turn_before_those_that_pipeline() -> None:
    bench = FairBench(plain_requests=NothingIsPlain())
    greedy = [bench.connect(port)[0] for port in range(1, 61)]
    for connection in greedy:
        bench.handler.cost_ms[connection.address] = 1
        connection.data_received(bench.requests(100))
    other, _ = bench.connect(99)
    other.data_received(bench.requests(1))
    began_s = bench.clock.elapsed_s()
    bench.server.end_turn()
    assert bench.count(other) == 1
    assert bench.clock.elapsed_s() - began_s < 0.008  # of the manual clock, which requests move


async def test_the_end_of_a_connection_does_not_lengthen_the_turn_of_the_others() -> None:
    bench = FairBench(plain_requests=NothingIsPlain())
    began_s = bench.clock.elapsed_s()
    for port in range(1, 61):
        connection, _ = bench.connect(port)
        bench.handler.cost_ms[connection.address] = 1
        connection.data_received(bench.requests(100))
        connection.eof_received()
    assert bench.clock.elapsed_s() - began_s < 0.008


async def test_connections_that_end_together_are_closed_in_turn_behind_their_responses() -> None:
    bench = FairBench(plain_requests=NothingIsPlain())
    transports = []
    for port in range(1, 3 * CLOSED_PER_TURN_MAX + 1):
        connection, transport = bench.connect(port)
        transports.append(transport)
        connection.data_received(bench.requests(1))
        assert connection.eof_received()
    closed = []
    for _ in range(3):
        bench.server.end_turn()
        closed.append(sum(transport.is_closing() for transport in transports))
    assert closed == [CLOSED_PER_TURN_MAX * turn for turn in (1, 2, 3)]
    assert all(b"".join(transport.written) for transport in transports)


async def test_requests_of_a_connection_that_exceeded_its_share_leave_time_for_others() -> None:
    bench = FairBench()
    greedy = [bench.connect(port)[0] for port in range(1, 11)]
    for connection in greedy:
        bench.handler.cost_ms[connection.address] = 1
        connection.exceeds_share = True
        connection.data_received(bench.requests(1))
    assert len(bench.handler.handled) == 2  # of four that fit into a turn
    other, _ = bench.connect(99)
    other.data_received(bench.requests(1))
    assert bench.count(other) == 1


async def test_a_connection_with_a_long_chunk_is_read_again_in_the_next_turn() -> None:
    bench = FairBench(plain_requests=NothingIsPlain())
    greedy, transport = bench.connect(1)
    frame = (LONG_CHUNK_BYTES * 4).to_bytes(4, "big") + (100).to_bytes(4, "big")
    greedy.data_received(frame + bytes(LONG_CHUNK_BYTES))
    assert not transport.is_reading()
    bench.server.end_turn()
    assert transport.is_reading()


async def test_connections_with_long_chunks_are_read_in_turn_and_not_all_in_one_turn() -> None:
    bench = FairBench(plain_requests=NothingIsPlain())
    frame = (LONG_CHUNK_BYTES * 100).to_bytes(4, "big") + (100).to_bytes(4, "big")
    connections = [bench.connect(port) for port in range(1, 4 * LONG_CHUNKS_MAX + 1)]
    for connection, _ in connections:
        connection.data_received(frame + bytes(LONG_CHUNK_BYTES))
    chunks = [0] * len(connections)
    for _ in range(12):
        bench.server.end_turn()
        readable = [index for index, (_, side) in enumerate(connections) if side.is_reading()]
        assert len(readable) == LONG_CHUNKS_MAX
        for index in readable:
            chunks[index] += 1
            connections[index][0].data_received(bytes(LONG_CHUNK_BYTES))
    assert set(chunks) == {3}


async def test_a_request_in_slices_delays_only_the_requests_behind_it() -> None:
    bench = FairBench()
    slow, _ = bench.connect(1)
    other, _ = bench.connect(2)
    bench.handler.slices[slow.address] = 50
    slow.data_received(bench.requests(2))
    turns = 0
    while bench.count(slow) < 2:
        other.data_received(bench.requests(1))
        turns += 1
        assert bench.count(other) == turns
        bench.server.end_turn()
    assert turns > 20
    assert [opaque for address, opaque in bench.handler.handled if address == slow.address] == [
        1,
        2,
    ]


async def test_a_response_leaves_before_others_have_their_slices() -> None:
    bench = FairBench()
    slow, _ = bench.connect(1)
    other, other_transport = bench.connect(2)
    bench.handler.slices[slow.address] = 50
    slow.data_received(bench.requests(1))
    bench.server.end_turn()
    other.data_received(bench.requests(1))
    written_during_slices: list[int] = []
    bench.handler.on_slice = lambda: written_during_slices.append(len(other_transport.written))
    bench.server.end_turn()
    assert written_during_slices
    assert set(written_during_slices) == {1}


async def test_a_request_in_slices_is_dropped_when_its_connection_closes() -> None:
    bench = FairBench()
    slow, transport = bench.connect(1)
    bench.handler.slices[slow.address] = 50
    slow.data_received(bench.requests(2))
    transport.close()
    for _ in range(100):
        bench.server.end_turn()
    assert bench.count(slow) == 0


async def test_a_connection_that_cannot_be_written_to_costs_no_other_its_response() -> None:
    bench = FairBench()
    broken, broken_transport = bench.connect(1)
    other, other_transport = bench.connect(2)
    broken_transport.fails = True
    broken.data_received(bench.requests(1))
    other.data_received(bench.requests(1))
    bench.server.end_turn()
    assert broken_transport.is_closing()
    assert len(other_transport.written) == 1


async def test_a_request_that_fails_costs_the_connection_no_other_response() -> None:
    bench = FairBench()
    connection, transport = bench.connect(1)
    bench.handler.fails_for.add(connection.address)
    connection.data_received(bench.requests(1))
    bench.handler.fails_for.clear()
    connection.data_received(bench.requests(1))
    bench.server.end_turn()
    assert len(transport.written) == 1
    assert not transport.is_closing()


async def test_a_header_that_is_too_long_closes_the_connection() -> None:
    bench = FairBench()
    connection, transport = bench.connect(1)
    header = b'{"code":105,"opaque":1,"extFields":{"topic":"%b"}}'
    connection.data_received(encode_frame(JSON, header % (b"t" * REQUEST_HEADER_BYTES_MAX)))
    assert transport.is_closing()
    assert not bench.handler.handled
