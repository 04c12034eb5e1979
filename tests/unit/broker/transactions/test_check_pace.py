"""Very many halves that are due leave the broker time for other requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from escrowmq.broker.broker import TICK_MS_MIN
from escrowmq.escrow.checks import (
    BESIDE_OTHERS_AT_ONCE,
    BESIDE_OTHERS_PER_MS,
    CHECKS_AT_ONCE_MAX,
    CHECKS_PER_MS,
    CheckPace,
)
from tests.support.broker_requests import FakeChannel, send_request
from tests.support.escrows import (
    ESCROW,
    ROLLBACK,
    UNKNOWN,
    EscrowBench,
    end_request,
    half_request,
    sent_checks,
)

HALVES = 1_000
RETRY_MS = 100
IMMUNITY_MS = ESCROW.immunity_ms


def bench_with_due_halves() -> EscrowBench:
    bench = EscrowBench(config=replace(ESCROW, check_interval_ms=3_600_000))
    bench.turn(*(half_request(f"k{number}") for number in range(HALVES)))
    bench.now_ms += IMMUNITY_MS
    for _ in range(HALVES):  # all of them come into the backlog
        bench.broker.tick(bench.now_ms)
    return bench


def answer_at_once(bench: EscrowBench, verdict: int) -> int:
    """Answer checks until no more are sent at this time. Return how many were answered."""
    answered = 0
    while checks := sent_checks(bench.channel):
        answered += len(checks)
        ends = (end_request(position, verdict, check=True) for _, position in checks)
        bench.turn(*ends)
    return answered


@pytest.mark.parametrize("verdict", [UNKNOWN, ROLLBACK])
def test_a_producer_that_answers_at_once_does_not_get_all_checks_at_once(verdict: int) -> None:
    bench = bench_with_due_halves()
    answered = answer_at_once(bench, verdict)
    assert answered == CHECKS_AT_ONCE_MAX
    bench.tick(3)
    answered += answer_at_once(bench, verdict)
    assert answered == CHECKS_AT_ONCE_MAX + 3 * CHECKS_PER_MS
    while answered < HALVES:
        delay_ms = bench.broker.next_tick_ms(bench.now_ms, RETRY_MS)
        assert delay_ms == TICK_MS_MIN  # it need not wait for anything else
        bench.tick(delay_ms)
        answered += answer_at_once(bench, verdict)
    assert answered == HALVES


def test_beside_other_requests_there_are_few_checks_at_once() -> None:
    bench = bench_with_due_halves()
    answer_at_once(bench, UNKNOWN)
    answered = []
    for _ in range(100):
        bench.now_ms += 1
        bench.turn(send_request())
        answered.append(answer_at_once(bench, UNKNOWN))
    assert set(answered) == {0, BESIDE_OTHERS_AT_ONCE}
    assert sum(answered) == 100 * BESIDE_OTHERS_PER_MS


def test_groups_with_many_due_halves_take_turns() -> None:
    bench = EscrowBench()
    channels = [FakeChannel(f"producer-{number}") for number in range(2 * BESIDE_OTHERS_AT_ONCE)]
    for number, channel in enumerate(channels):
        for key in range(10):
            bench.park(f"{number}-{key}", group=f"g{number}", channel=channel)
    bench.now_ms += IMMUNITY_MS
    bench.turn(send_request())
    checked = []
    for _ in range(2):
        bench.tick(BESIDE_OTHERS_AT_ONCE // BESIDE_OTHERS_PER_MS)
        checked += [channel for channel in channels for _ in sent_checks(channel)]
    assert sorted(map(id, checked)) == sorted(map(id, channels))


def test_a_clock_that_is_set_back_does_not_stop_checks() -> None:
    pace = CheckPace()
    pace.turn_ended(1_000_000, other_count=1)
    for _ in range(pace.allowed(1_000_000)):
        pace.check_sent()
    assert pace.allowed(5_000) == 0
    assert pace.allowed(5_003) == 3 * CHECKS_PER_MS
