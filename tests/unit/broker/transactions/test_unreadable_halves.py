"""Open halves that cannot be read from the log: they are reported, and nothing waits for them."""

from __future__ import annotations

import logging

import pytest

from tests.support.escrows import (
    COMMIT,
    ESCROW,
    ROLLBACK,
    SMALL_SEGMENTS,
    EscrowBench,
    HalfPosition,
    end_many_request,
    fill_segments,
)

IMMUNITY_MS = ESCROW.immunity_ms


def damage(bench: EscrowBench, position: HalfPosition, index: int) -> None:
    """Flip the bits of one byte of a record. A second call repairs it."""
    base = position.log_offset - position.log_offset % SMALL_SEGMENTS.segment_bytes
    file_position = position.log_offset - base + index
    file = bench.disk.open(f"commitlog/{base:020d}")
    file.write_at(file_position, bytes([file.read_at(file_position, 1)[0] ^ 0xFF]))
    file.close()
    # Private: what was appended last is in memory, where the damage would not be seen.
    bench.store._log.recent.clear()


@pytest.mark.parametrize("is_checked", [True, False], ids=["checked", "never read"])
def test_an_unreadable_half_does_not_keep_its_segment(
    is_checked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bench = EscrowBench(settings=SMALL_SEGMENTS)
    lost, whole = bench.park("lost"), bench.park("whole")
    fill_segments(bench)
    damage(bench, lost, 90)
    if is_checked:
        bench.heartbeat(bench.channel, "p")
        bench.tick(IMMUNITY_MS)
    with caplog.at_level(logging.ERROR):
        while bench.store.begin == 0:
            assert bench.remove_log_file()
    assert "unreadable half message rolled back queue_offset=0" in caplog.text
    assert bench.coordinator.counters.unreadable_halves == 1
    assert [half.key for half in bench.coordinator.halves] == [b"whole"]
    assert bench.state_in_memory(whole) == "open"
    assert bench.end(whole, COMMIT).code == 0
    assert bench.end(lost, COMMIT).code != 0  # it does not count as delivered
    assert bench.bodies() == [b"whole"]


def test_an_unreadable_half_stays_open_until_its_segment_expires() -> None:
    bench = EscrowBench(settings=SMALL_SEGMENTS)
    lost = bench.park("lost")
    damage(bench, lost, 90)
    bench.heartbeat(bench.channel, "p")
    bench.tick(IMMUNITY_MS)
    assert bench.state_in_memory(lost) == "open"
    assert [half.is_unreadable for half in bench.coordinator.halves] == [True]
    damage(bench, lost, 90)  # makes the record readable again
    fill_segments(bench)
    while bench.store.begin == 0:
        assert bench.remove_log_file()
    assert bench.end(lost, COMMIT).code == 0
    assert bench.bodies() == [b"lost"]


@pytest.mark.parametrize("with_snapshot", [True, False])
def test_recovery_reports_unreadable_halves(
    with_snapshot: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bench = EscrowBench(settings=SMALL_SEGMENTS)
    lost, whole = bench.park("lost"), bench.park("whole")
    fill_segments(bench)
    bench.store.checkpoint()
    bench.broker.transactions.save(force=True)
    damage(bench, lost, 4)  # the magic number, so that no record begins here
    with caplog.at_level(logging.ERROR):
        bench = bench.killed(with_snapshot=with_snapshot)
    assert "half messages lost: unreadable queue_offsets=0..0" in caplog.text
    assert bench.coordinator.counters.unreadable_halves == 1
    assert bench.state_in_memory(whole) == "open"
    while bench.store.begin == 0:
        assert bench.remove_log_file()


def group_with_a_half_damaged_after_its_decision() -> tuple[EscrowBench, list[HalfPosition]]:
    """Return halves whose common commit is stored; the last one was damaged before its piece."""
    bench = EscrowBench(settings=SMALL_SEGMENTS, piece_bytes=1000)
    positions = [bench.park(f"k{number}", body=b"x" * 200) for number in range(8)]
    bench = bench.restarted()  # forgets the cached finals, so that the halves are read
    bench.turn(end_many_request(list(positions), COMMIT))
    damage(bench, positions[-1], 90)
    while not (responses := bench.channel.responses()):
        bench.tick(100)
    assert responses[0].code == 0
    assert len(bench.bodies()) == len(positions) - 1
    return bench, positions


@pytest.mark.parametrize(("verdict", "code"), [(COMMIT, 1), (ROLLBACK, 0)])
def test_a_half_damaged_after_its_group_decision_can_be_ended(verdict: int, code: int) -> None:
    bench, positions = group_with_a_half_damaged_after_its_decision()
    assert bench.end(positions[-1], verdict).code == code


def test_a_half_damaged_after_its_group_decision_does_not_keep_its_segment() -> None:
    bench, positions = group_with_a_half_damaged_after_its_decision()
    fill_segments(bench)
    while bench.store.begin <= positions[-1].log_offset:
        assert bench.remove_log_file()
    assert len(bench.coordinator.halves) == 0
