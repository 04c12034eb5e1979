"""A wall clock that jumps, and a steady clock that does not, so that no timeout is affected."""

from __future__ import annotations

import json
from typing import Any

import pytest

from escrowmq.broker.broker import Broker
from escrowmq.clock import ManualClock, SteadyClock
from escrowmq.config import Config
from escrowmq.message.keys import UniqueKeyGenerator
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import NoFields
from escrowmq.testing.disks import MemoryDisk
from tests.support.broker_requests import (
    FakeChannel,
    bodies,
    new_request,
    pull_request,
    send_request,
)
from tests.support.escrows import EscrowBench
from tests.support.stores import HOST, NOW_MS, TINY, open_store

HOUR_MS = 3_600_000
JUMPS = [pytest.param(5 * HOUR_MS, id="forwards"), pytest.param(-5 * HOUR_MS, id="backwards")]


@pytest.mark.parametrize("jump_ms", [*JUMPS, 100 * 24 * HOUR_MS])
def test_a_jump_is_followed_at_a_tenth_of_the_speed_of_time(jump_ms: int) -> None:
    clock = ManualClock(NOW_MS)
    steady = SteadyClock(clock)
    clock.advance(ms=1000)
    assert steady.now_ms() == NOW_MS + 1000
    clock.step_wall_clock(ms=jump_ms)
    assert steady.now_ms() == NOW_MS + 1000
    clock.advance(ms=10_000)
    assert steady.now_ms() == NOW_MS + 11_000 + (1000 if jump_ms > 0 else -1000)


@pytest.mark.parametrize("jump_ms", JUMPS)
def test_the_steady_clock_reaches_wall_time_and_never_runs_backwards(jump_ms: int) -> None:
    clock = ManualClock(NOW_MS)
    steady = SteadyClock(clock)
    clock.step_wall_clock(ms=jump_ms)
    before_ms = steady.now_ms()
    for _ in range(60):
        clock.advance(ms=HOUR_MS)
        assert steady.now_ms() > before_ms
        before_ms = steady.now_ms()
    assert abs(before_ms - clock.now_ms()) <= 1


class Bench:
    """A broker as the server runs it, with steady time, and wall time for stored messages."""

    def __init__(self) -> None:
        self.clock = ManualClock(NOW_MS)
        self.steady = SteadyClock(self.clock)
        disk = MemoryDisk()
        self.store = open_store(disk)
        self.broker = Broker(
            disk,
            self.store,
            Config(store=TINY),
            UniqueKeyGenerator(address="127.0.0.1", process_id=1, salt=2),
            store_host=HOST,
            wall_ms=lambda now_ms: self.clock.now_ms(),
        )
        self.channel = FakeChannel()

    def turn(self, *requests: Any) -> None:
        now_ms = self.steady.now_ms()
        for request in requests:
            self.broker.handle(self.channel, request, now_ms)
        self.broker.end_turn(now_ms)

    def wait(self, ms: int) -> None:
        for _ in range(0, ms, 500):
            self.clock.advance(ms=500)
            now_ms = self.steady.now_ms()
            self.broker.tick(now_ms)
            self.broker.end_turn(now_ms)


def heartbeat_request() -> Any:
    consumers = [
        {"groupName": "g", "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING"}
    ]
    heartbeat = {"clientID": "c", "producerDataSet": [], "consumerDataSet": consumers}
    return new_request(RequestCode.HEART_BEAT, NoFields(), json.dumps(heartbeat).encode())


@pytest.mark.parametrize("jump_ms", JUMPS)
def test_a_jump_does_not_expire_members_or_prolong_held_pulls(jump_ms: int) -> None:
    bench = Bench()
    bench.turn(heartbeat_request(), send_request(body=b"x"))
    bench.channel.responses()
    bench.turn(pull_request(queue_offset=1, suspend_timeout_millis=15_000, sys_flag=6))
    bench.clock.step_wall_clock(ms=jump_ms)
    bench.wait(11_000)
    assert bench.broker.consumers.member_ids("g") == ["c"]
    assert bench.channel.responses() == []
    bench.wait(8_000)
    assert len(bench.channel.responses()) == 1
    bench.wait(200_000)  # the member sends no heartbeat
    assert bench.broker.consumers.member_ids("g") == []


def test_a_delay_level_does_not_take_longer_if_the_wall_clock_is_set_back() -> None:
    bench = Bench()
    bench.turn(send_request(body=b"before", properties="DELAY\x012\x02"))  # 5 s
    bench.clock.step_wall_clock(ms=-5 * HOUR_MS)
    bench.turn(send_request(body=b"after", properties="DELAY\x012\x02"))
    bench.wait(4_000)
    assert bodies(bench.store, "T") == []
    bench.wait(4_000)
    assert bodies(bench.store, "T") == [b"before", b"after"]
    bench.turn(send_request(body=b"later", properties="DELAY\x012\x02"))
    bench.wait(3_000)
    assert bodies(bench.store, "T") == [b"before", b"after"]  # nor is it delivered at once
    bench.wait(5_000)
    assert bodies(bench.store, "T") == [b"before", b"after", b"later"]


def test_a_timer_follows_the_wall_clock() -> None:
    bench = Bench()
    due_ms = NOW_MS + 2 * HOUR_MS
    bench.turn(send_request(body=b"timed", properties=f"TIMER_DELIVER_MS\x01{due_ms}\x02"))
    bench.wait(1_000)
    assert bodies(bench.store, "T") == []
    bench.clock.step_wall_clock(ms=2 * HOUR_MS)
    bench.wait(1_000)
    assert bodies(bench.store, "T") == [b"timed"]


def test_a_jump_neither_checks_nor_strands_a_transaction() -> None:
    clock = ManualClock(NOW_MS)
    steady = SteadyClock(clock)
    bench = EscrowBench()
    bench.park("k")
    clock.step_wall_clock(ms=100 * 24 * HOUR_MS)
    clock.advance(ms=1_000)
    bench.broker.tick(steady.now_ms())
    assert bench.broker.transactions.checker.counters.sent == 0
    clock.advance(ms=6_000)
    bench.broker.tick(steady.now_ms())
    assert bench.broker.transactions.checker.counters.sent == 1
    assert bench.broker.transactions.coordinator.counters.stranded == 0
