"""The simulated network loses, delays and repeats frames as configured, depending on its seed."""

from __future__ import annotations

from random import Random

import pytest

from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.connection import Response, UnmatchedResponse
from escrowmq.remoting.headers import WriterHeader
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import encode_success
from escrowmq.testing import ManualClock, Network, NetworkFaults
from escrowmq.testing.network import NO_FAULTS, Endpoint


class RecordingPeer:
    """A peer that responds to every request and records what arrives."""

    def __init__(self) -> None:
        self.received_names: list[str] = []
        self.is_closed = False

    def received(self, end: Endpoint, data: bytes) -> None:
        for event in end.events(data):
            match event:
                case Request():
                    self.received_names.append(event.head.fields.writer)
                    end.write(encode_success(event))
                case Response() | UnmatchedResponse():
                    self.received_names.append(type(event).__name__)
        end.flush()

    def closed(self, end: Endpoint) -> None:
        self.is_closed = True


class Bench:
    """A client and a server on a simulated network."""

    def __init__(self, faults: NetworkFaults = NO_FAULTS, seed: int = 0) -> None:
        self.clock = ManualClock()
        self.network = Network(Random(seed), self.clock, faults)
        self.client, self.server = RecordingPeer(), RecordingPeer()
        self.near, self.far = self.network.connect(self.client, self.server)

    def call(self, *names: str) -> None:
        for name in names:
            fields = WriterHeader(writer=name)
            _, data = self.near.connection.call(RequestCode.QUERY_WRITER, fields, deadline_s=9)
            self.near.write(data)
        self.near.flush()

    def wait(self, ms: int = 1_000) -> None:
        for _ in range(ms):
            self.clock.advance(ms=1)
            self.network.deliver()


def test_without_faults_every_frame_arrives_once() -> None:
    bench = Bench()
    bench.call("a", "b")
    assert bench.server.received_names == []
    bench.wait()
    assert sorted(bench.server.received_names) == ["a", "b"]
    assert bench.client.received_names == ["Response", "Response"]
    assert bench.network.in_flight == 0


def test_a_lost_frame_does_not_arrive() -> None:
    bench = Bench(NetworkFaults(loss=1.0))
    bench.call("a")
    bench.wait()
    assert bench.server.received_names == []


def test_a_repeated_request_gets_two_responses_and_only_the_first_is_matched() -> None:
    bench = Bench(NetworkFaults(duplication=1.0))
    bench.call("a")
    bench.wait()
    assert bench.server.received_names == ["a", "a"]
    # Both responses are repeated too.
    assert bench.client.received_names == ["Response", *["UnmatchedResponse"] * 3]


def test_a_late_frame_is_overtaken() -> None:
    orders = set()
    for seed in range(30):
        bench = Bench(NetworkFaults(lateness=0.5), seed)
        bench.call("a", "b", "c")
        bench.wait()
        orders.add(tuple(bench.server.received_names))
    assert len(orders) == 6


def test_the_same_seed_causes_the_same_faults() -> None:
    runs = []
    for _ in range(2):
        bench = Bench(NetworkFaults(loss=0.3, duplication=0.3, lateness=0.3), seed=5)
        bench.call(*"abcdefgh")
        bench.wait()
        runs.append((bench.server.received_names, bench.client.received_names))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("by_client", [True, False])
def test_a_closed_connection_loses_frames_in_flight(by_client: bool) -> None:
    bench = Bench()
    bench.call("a")
    bench.network.disconnect(bench.near if by_client else bench.far)
    bench.wait()
    assert bench.server.received_names == []
    assert bench.client.is_closed
    assert bench.server.is_closed
    assert not bench.far.send_oneway(RequestCode.QUERY_WRITER, WriterHeader(writer="b"))
    assert len(bench.near.connection.close()) == 1


def test_on_oneway_observes_oneway_requests() -> None:
    bench, codes = Bench(), list[int]()
    bench.far.on_oneway = lambda code, fields: codes.append(code)
    assert bench.far.send_oneway(RequestCode.QUERY_WRITER, WriterHeader(writer="b"))
    assert codes == [RequestCode.QUERY_WRITER]
