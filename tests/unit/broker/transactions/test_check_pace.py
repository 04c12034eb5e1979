"""Very many halves that are due leave the broker time for other requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from escrowmq.broker.transactions.check import CHECKS_AT_ONCE_MAX, CHECKS_PER_MS
from escrowmq.escrow.checks import CheckPace
from tests.support.broker_requests import FakeChannel
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
    bench = EscrowBench(config=replace(ESCROW, check_interval_ms=3_600_000))
    bench.turn(*(half_request(f"k{number}") for number in range(HALVES)))
    bench.tick(IMMUNITY_MS)
    assert answer_at_once(bench, verdict) == CHECKS_AT_ONCE_MAX
    bench.tick(10)
    assert answer_at_once(bench, verdict) == 10 * CHECKS_PER_MS
    answered = CHECKS_AT_ONCE_MAX + 10 * CHECKS_PER_MS
    while answered < HALVES:
        delay_ms = bench.broker.next_tick_ms(bench.now_ms, RETRY_MS)
        assert delay_ms == 10  # it need not wait for anything else
        bench.tick(delay_ms)
        answered += answer_at_once(bench, verdict)
    assert answered == HALVES


def test_groups_with_many_due_halves_take_turns() -> None:
    bench = EscrowBench()
    channels = [FakeChannel(f"producer-{number}") for number in range(CHECKS_AT_ONCE_MAX + 50)]
    for number, channel in enumerate(channels):
        for key in range(3):
            bench.park(f"{number}-{key}", group=f"g{number}", channel=channel)
    bench.tick(IMMUNITY_MS)
    for _ in range(15):
        bench.tick(1)
    checked = [len(sent_checks(channel)) for channel in channels]
    assert sum(checked) == CHECKS_AT_ONCE_MAX + 15 * CHECKS_PER_MS
    assert min(checked) == 1


def test_a_clock_that_is_set_back_does_not_stop_checks() -> None:
    pace = CheckPace(2, at_once_max=10)
    for _ in range(pace.allowed(100_000)):
        pace.check_sent()
    assert pace.allowed(5_000) == 0
    assert pace.allowed(5_003) == 6
    assert pace.allowed(9_000) == 10
