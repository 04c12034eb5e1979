"""The simulated network: it does to frames what it was told to, and the seed chooses to which."""

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


class Somebody:
    """Answers every request, and notes what comes."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.is_told = False

    def received(self, end: Endpoint, data: bytes) -> None:
        for event in end.events(data):
            match event:
                case Request():
                    self.heard.append(event.head.fields.writer)
                    end.write(encode_success(event))
                case Response() | UnmatchedResponse():
                    self.heard.append(type(event).__name__)
        end.flush()

    def closed(self, end: Endpoint) -> None:
        self.is_told = True


class Bench:
    def __init__(self, weather: NetworkFaults = NO_FAULTS, seed: int = 0) -> None:
        self.clock = ManualClock()
        self.network = Network(Random(seed), self.clock, weather)
        self.client, self.server = Somebody(), Somebody()
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


def test_in_calm_weather_everything_comes_once() -> None:
    bench = Bench()
    bench.call("a", "b")
    assert bench.server.heard == []
    bench.wait()
    assert sorted(bench.server.heard) == ["a", "b"]
    assert bench.client.heard == ["Response", "Response"]
    assert bench.network.in_flight == 0


def test_what_is_lost_does_not_come() -> None:
    bench = Bench(NetworkFaults(loss=1.0))
    bench.call("a")
    bench.wait()
    assert bench.server.heard == []


def test_what_comes_twice_is_answered_twice_and_heard_once() -> None:
    bench = Bench(NetworkFaults(duplication=1.0))
    bench.call("a")
    bench.wait()
    assert bench.server.heard == ["a", "a"]
    assert bench.client.heard == [
        "Response",
        "UnmatchedResponse",
        "UnmatchedResponse",
        "UnmatchedResponse",
    ]


def test_a_late_frame_is_overtaken() -> None:
    orders = set()
    for seed in range(30):
        bench = Bench(NetworkFaults(lateness=0.5), seed)
        bench.call("a", "b", "c")
        bench.wait()
        orders.add(tuple(bench.server.heard))
    assert len(orders) == 6


def test_the_same_seed_is_the_same_weather() -> None:
    heard = []
    for _ in range(2):
        bench = Bench(NetworkFaults(loss=0.3, duplication=0.3, lateness=0.3), seed=5)
        bench.call(*"abcdefgh")
        bench.wait()
        heard.append((bench.server.heard, bench.client.heard))
    assert heard[0] == heard[1]


@pytest.mark.parametrize("by_client", [True, False])
def test_a_line_that_is_cut_takes_along_what_was_under_way(by_client: bool) -> None:
    bench = Bench()
    bench.call("a")
    bench.network.disconnect(bench.near if by_client else bench.far)
    bench.wait()
    assert bench.server.heard == []
    assert bench.client.is_told
    assert bench.server.is_told
    assert not bench.far.send_oneway(RequestCode.QUERY_WRITER, WriterHeader(writer="b"))
    assert len(bench.near.connection.close()) == 1


def test_whoever_looks_on_hears_what_is_posted() -> None:
    bench, seen = Bench(), list[int]()
    bench.far.on_oneway = lambda code, fields: seen.append(code)
    assert bench.far.send_oneway(RequestCode.QUERY_WRITER, WriterHeader(writer="b"))
    assert seen == [RequestCode.QUERY_WRITER]
