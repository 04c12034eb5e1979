"""When the broker wants to be called: seldom if nothing is due, and exactly when something is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from escrowmq.broker.broker import TICK_MS_MIN
from escrowmq.escrow.checks import SLOT_MS
from tests.support.broker_requests import FakeChannel, pull_request, send_request
from tests.support.escrows import EscrowBench

RETRY_MS = 100
IDLE_TICK_MS = 1_000  # as the server does if nothing is due
MINUTE_MS = 60_000


def next_tick_ms(bench: EscrowBench) -> int | None:
    return bench.broker.next_tick_ms(bench.now_ms, RETRY_MS)


def run_until(bench: EscrowBench, is_done: Callable[[], bool]) -> int:
    """Tick when the broker wants to, until something is true or a minute has passed.

    Return the number of ticks.
    """
    ticks, end_ms = 0, bench.now_ms + MINUTE_MS
    while bench.now_ms < end_ms and not is_done():
        delay_ms = next_tick_ms(bench)
        bench.tick(IDLE_TICK_MS if delay_ms is None else min(IDLE_TICK_MS, delay_ms))
        ticks += 1
    return ticks


def send_delayed(bench: EscrowBench, delay: str) -> None:
    text = f"UNIQ_KEY\x01k\x02{delay}\x02"
    assert bench.request(send_request(body=b"delayed", properties=text)).code == 0


def test_an_idle_broker_wants_at_most_two_ticks_a_second() -> None:
    bench = EscrowBench()
    assert run_until(bench, lambda: False) <= 120


def test_halves_and_pulls_that_are_not_due_cost_no_ticks() -> None:
    bench = EscrowBench()
    bench.coordinator.config = replace(bench.config, immunity_ms=10 * MINUTE_MS)
    for number in range(100):
        bench.park(f"k{number}")
    hold_pull(bench, wait_ms=2 * MINUTE_MS)
    assert run_until(bench, lambda: False) <= 120


def test_halves_that_wait_for_a_producer_cost_no_ticks() -> None:
    bench = EscrowBench()
    for number in range(100):
        bench.park(f"k{number}")
    bench.disconnect(bench.channel)
    bench.tick(MINUTE_MS)
    assert bench.checker.backlog_size() == 100
    assert run_until(bench, lambda: False) <= 120


def test_the_next_tick_comes_when_a_check_is_due() -> None:
    bench = EscrowBench()
    bench.tick()
    assert next_tick_ms(bench) is None
    bench.park("k")
    [half] = bench.coordinator.halves
    due_ms = half.due_ms
    delay_ms = next_tick_ms(bench)
    assert delay_ms is not None
    assert 0 <= bench.now_ms + delay_ms - due_ms < SLOT_MS
    bench.now_ms = due_ms + 500
    assert next_tick_ms(bench) == TICK_MS_MIN


@pytest.mark.parametrize(
    ("delay", "delay_ms"),
    [("DELAY\x013", 10_000), ("TIMER_DELAY_MS\x013210", 3_210), ("TIMER_DELAY_SEC\x012", 2_000)],
)
def test_a_delayed_message_is_delivered_at_its_time(delay: str, delay_ms: int) -> None:
    bench = EscrowBench()
    bench.tick()
    sent_ms = bench.now_ms
    send_delayed(bench, delay)
    ticks = run_until(bench, lambda: bench.bodies() == [b"delayed"])
    assert 0 <= bench.now_ms - sent_ms - delay_ms < TICK_MS_MIN
    assert ticks <= 2 + delay_ms // IDLE_TICK_MS


def test_a_message_is_delivered_in_time_that_waits_behind_another_one() -> None:
    bench = EscrowBench()
    sent_ms = bench.now_ms
    send_delayed(bench, "DELAY\x013")
    bench.tick(700)
    send_delayed(bench, "DELAY\x013")
    run_until(bench, lambda: len(bench.bodies()) == 2)
    assert 0 <= bench.now_ms - sent_ms - 10_700 < TICK_MS_MIN


def test_delayed_messages_of_a_full_disk_are_tried_again_soon() -> None:
    bench = EscrowBench()
    send_delayed(bench, "DELAY\x011")
    bench.tick()
    bench.store.has_disk_space = False
    bench.tick(1_000)
    assert bench.bodies() == []
    assert next_tick_ms(bench) == RETRY_MS
    bench.store.has_disk_space = True
    bench.tick(RETRY_MS)
    assert bench.bodies() == [b"delayed"]


def hold_pull(bench: EscrowBench, *, wait_ms: int) -> FakeChannel:
    consumer = FakeChannel("consumer")
    request = pull_request(suspend_timeout_millis=wait_ms)
    bench.turn(request, channel=consumer)
    assert bench.broker.pull_processor.held_count == 1
    return consumer


def test_a_held_pull_is_answered_when_its_time_is_over() -> None:
    bench = EscrowBench()
    bench.tick()
    began_ms, consumer = bench.now_ms, hold_pull(bench, wait_ms=5_555)
    run_until(bench, lambda: bench.broker.pull_processor.held_count == 0)
    assert 0 <= bench.now_ms - began_ms - 5_555 < TICK_MS_MIN
    assert len(consumer.responses()) == 1


def test_checks_without_an_answer_make_room_for_others_after_a_second() -> None:
    bench = EscrowBench()
    for number in range(150):
        bench.park(f"k{number}")

    def checks() -> int:
        return len(bench.channel.oneway_requests)

    run_until(bench, lambda: checks() >= 100)
    began_ms = bench.now_ms
    run_until(bench, lambda: checks() >= 150)
    assert bench.now_ms - began_ms <= 1_000 + RETRY_MS
