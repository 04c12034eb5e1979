"""Sends repeated after their transaction was decided and the broker was restarted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from escrowmq.escrow import recovery
from escrowmq.message import names
from tests.support.escrows import COMMIT, ROLLBACK, EscrowBench

STARTS: dict[str, Callable[[EscrowBench], EscrowBench]] = {
    "stopped": EscrowBench.restarted,
    "killed": EscrowBench.killed,
    "without a snapshot": lambda bench: bench.killed(with_snapshot=False),
}


@pytest.mark.parametrize("verdict", [COMMIT, ROLLBACK])
@pytest.mark.parametrize("restart", STARTS.values(), ids=STARTS)
def test_a_repeated_send_of_a_decided_half_gets_the_first_position(
    restart: Callable[[EscrowBench], EscrowBench], verdict: int
) -> None:
    bench = EscrowBench()
    position = bench.park("k")
    bench.end(position, verdict)
    bench = restart(bench)
    assert bench.park("k") == position
    assert not len(bench.coordinator.halves)
    assert bench.coordinator.counters.duplicate_sends == 1


def test_the_same_key_of_another_group_is_another_half() -> None:
    bench = EscrowBench()
    position = bench.park("k")
    bench.end(position, COMMIT)
    bench = bench.killed()
    assert bench.park("k", group="other") != position


def test_a_repeated_send_of_a_moved_half_gets_the_last_position() -> None:
    bench = EscrowBench()
    first = bench.park("k")
    half = bench.coordinator.find_open(*first)
    assert half is not None
    bench.broker.transactions.move_half(half, bench.now_ms, is_resume=False)
    bench.turn()
    assert bench.end(first, COMMIT).code == 0
    bench = bench.killed()
    assert bench.park("k") == (half.queue_offset, half.log_offset) != first


def test_recovery_remembers_a_bounded_number_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "RECENT_HALVES_MAX", 2)
    bench = EscrowBench()
    positions = [bench.park(key) for key in ("a", "b", "c")]
    for position in positions:
        bench.end(position, COMMIT)
    bench = bench.killed()
    repeated = [bench.park(key) for key in ("a", "b", "c")]
    assert repeated[0] != positions[0]
    assert repeated[1:] == positions[1:]
    assert bench.store.max_offset(names.HALF_TOPIC, 0) == 4
