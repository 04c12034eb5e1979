"""A response that cannot be made, and a channel that is broken, cost only the request itself."""

from __future__ import annotations

from typing import Any

import pytest

from escrowmq.errors import LocalProtocolError
from escrowmq.remoting.codes import ResponseCode
from escrowmq.remoting.requests import Request
from tests.support.broker_bench import BrokerBench
from tests.support.broker_requests import FakeChannel, pull_request, send_request
from tests.support.escrows import EscrowBench, end_request, half_request

COMMIT = 8


class BrokenChannel(FakeChannel):
    """A channel on which every response fails, or only every first one (`is_repaired`)."""

    def __init__(self, name: str = "127.0.0.1:50000", *, is_repaired: bool = False) -> None:
        super().__init__(name)
        self._is_repaired = is_repaired

    def respond_send(self, request: Request[Any], *args: Any, **changes: Any) -> None:
        raise LocalProtocolError("the frame would be too long")

    def respond_send_batch(self, request: Request[Any], *args: Any, **changes: Any) -> None:
        raise LocalProtocolError("the frame would be too long")

    def respond_pull(self, request: Request[Any], **fields: Any) -> None:
        raise LocalProtocolError("the frame would be too long")

    def respond(self, request: Request[Any], *args: Any, **fields: Any) -> None:
        if not self._is_repaired:
            raise OSError("broken")
        super().respond(request, *args, **fields)


@pytest.mark.parametrize("sync", [False, True])
def test_a_send_whose_response_fails_costs_no_other_send_its_response(sync: bool) -> None:
    bench = BrokerBench(sync=sync)
    broken, repaired, other = BrokenChannel(), BrokenChannel(is_repaired=True), FakeChannel()
    for channel in (broken, repaired, other):
        bench.broker.handle(channel, send_request(), 1)
    bench.broker.end_turn(1)
    for callback in bench.flush_callbacks:
        callback(None)
    assert other.response().code == ResponseCode.SUCCESS
    assert repaired.response().code == ResponseCode.SYSTEM_ERROR


def test_a_held_pull_whose_response_fails_costs_no_other_pull_its_response() -> None:
    bench = BrokerBench()
    bench.turn(send_request())
    broken, other = BrokenChannel(), FakeChannel()
    for channel in (broken, other):
        bench.broker.handle(channel, pull_request(queue_offset=1), 1)
    bench.turn(send_request())
    assert other.response().code == ResponseCode.SUCCESS
    for channel in (broken, other):
        bench.broker.handle(channel, pull_request(queue_offset=2), 1)
    bench.tick(2_000_000_000_000)
    assert other.response().code == ResponseCode.PULL_NOT_FOUND


def test_a_half_whose_response_fails_costs_no_other_half_its_response() -> None:
    bench = EscrowBench()
    broken, other = BrokenChannel(), FakeChannel()
    bench.broker.handle(broken, half_request("a"), bench.now_ms)
    bench.broker.handle(other, half_request("b"), bench.now_ms)
    bench.turn()
    bench.flush()
    assert other.response().code == ResponseCode.SUCCESS


def test_a_part_of_the_turn_that_fails_costs_no_send_its_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = BrokerBench()

    def fail(now_ms: int) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(bench.broker.transactions.checker, "end_turn", fail)
    monkeypatch.setattr(bench.broker.group_decisions, "end_turn", fail)
    [response] = bench.turn(send_request())
    assert response.code == ResponseCode.SUCCESS


def test_an_end_whose_response_fails_costs_no_other_end_its_response() -> None:
    bench = EscrowBench()
    positions = [bench.park("a"), bench.park("b")]
    broken, other = BrokenChannel(), FakeChannel()
    for channel, position in zip((broken, other), positions, strict=True):
        bench.broker.handle(channel, end_request(position, COMMIT), bench.now_ms)
    bench.turn()
    bench.flush()
    assert other.response().code == ResponseCode.SUCCESS
