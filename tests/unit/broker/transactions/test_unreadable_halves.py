"""An open half that the log cannot read: it is reported, and nothing waits for it."""

from __future__ import annotations

import logging

import pytest

from escrowmq.config import StoreConfig
from tests.support.escrows import COMMIT, ROLLBACK, EscrowBench, HalfPosition, an_end_of_many
from tests.unit.broker.transactions.test_rocketmq_weak_points import IMMUNITY_MS

SMALL = StoreConfig(segment_bytes=4096, queue_file_bytes=200, index_slots=7, index_entries=99)


def damage(bench: EscrowBench, position: HalfPosition, at: int) -> None:
    """Flip the bits of one byte of the record."""
    base = position.log_offset - position.log_offset % SMALL.segment_bytes
    file = bench.disk.open(f"commitlog/{base:020d}")
    was = file.view()[position.log_offset - base + at]
    file.write_at(position.log_offset - base + at, bytes([was ^ 0xFF]))
    file.close()


def fill(bench: EscrowBench) -> None:
    for number in range(40):
        bench.end(bench.park(f"other {number}", body=b"x" * 200), ROLLBACK)


@pytest.mark.parametrize("is_known", [True, False], ids=["checked", "never read"])
def test_an_unreadable_half_does_not_keep_its_segment(
    is_known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bench = EscrowBench(settings=SMALL)
    lost, whole = bench.park("lost"), bench.park("whole")
    fill(bench)
    damage(bench, lost, 90)
    if is_known:
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
    bench = EscrowBench(settings=SMALL)
    lost = bench.park("lost")
    damage(bench, lost, 90)
    bench.heartbeat(bench.channel, "p")
    bench.tick(IMMUNITY_MS)
    assert bench.state_in_memory(lost) == "open"
    assert [half.is_unreadable for half in bench.coordinator.halves] == [True]
    damage(bench, lost, 90)  # the record is readable again
    fill(bench)
    while bench.store.begin == 0:
        assert bench.remove_log_file()
    assert bench.end(lost, COMMIT).code == 0
    assert bench.bodies() == [b"lost"]


@pytest.mark.parametrize("with_snapshot", [True, False])
def test_recovery_reports_unreadable_halves(
    with_snapshot: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bench = EscrowBench(settings=SMALL)
    lost, whole = bench.park("lost"), bench.park("whole")
    fill(bench)
    bench.store.checkpoint()
    bench.broker.transactions.save(force=True)
    damage(bench, lost, 4)  # the magic number: nothing looks like a record here
    with caplog.at_level(logging.ERROR):
        bench = bench.killed(with_snapshot=with_snapshot)
    assert "half messages lost: unreadable queue_offsets=0..0" in caplog.text
    assert bench.coordinator.counters.unreadable_halves == 1
    assert bench.state_in_memory(whole) == "open"
    while bench.store.begin == 0:
        assert bench.remove_log_file()


def group_with_a_half_damaged_after_its_decision() -> tuple[EscrowBench, list[HalfPosition]]:
    """Return halves whose common commit is stored; the last one was damaged before its piece."""
    bench = EscrowBench(settings=SMALL, piece_bytes=1000)
    positions = [bench.park(f"k{number}", body=b"x" * 200) for number in range(8)]
    bench = bench.restarted()  # forgets the cached finals, so that the halves are read
    bench.turn(an_end_of_many(list(positions), COMMIT))
    damage(bench, positions[-1], 90)
    while not (answers := bench.channel.answers()):
        bench.tick(100)
    assert answers[0].code == 0
    assert len(bench.bodies()) == len(positions) - 1
    return bench, positions


@pytest.mark.parametrize(("verdict", "code"), [(COMMIT, 1), (ROLLBACK, 0)])
def test_a_half_damaged_after_its_group_decision_can_be_ended(verdict: int, code: int) -> None:
    bench, positions = group_with_a_half_damaged_after_its_decision()
    assert bench.end(positions[-1], verdict).code == code


def test_a_half_damaged_after_its_group_decision_does_not_keep_its_segment() -> None:
    bench, positions = group_with_a_half_damaged_after_its_decision()
    fill(bench)
    while bench.store.begin <= positions[-1].log_offset:
        assert bench.remove_log_file()
    assert len(bench.coordinator.halves) == 0
