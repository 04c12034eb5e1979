"""Recovery after a crash at any byte, and in a directory that RocketMQ has written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from escrowmq.escrow.records import make_copy
from escrowmq.message import names
from escrowmq.message.record import LogOffset, NewRecord
from tests.support.broker_requests import bodies, send_request, stored_records
from tests.support.escrows import (
    COMMIT,
    ESCROW,
    ROLLBACK,
    EscrowBench,
    HalfPosition,
    append_final_without_op,
    decide_batch_request,
    end_many_request,
    end_request,
    half_request,
    query_writer_request,
    sent_checks,
    writer_state,
)
from tests.support.rocketmq_directories import RocketMQDirectory, record_position
from tests.support.stores import NOW_MS

OPEN, COMMITTED, ROLLED_BACK = "open", "committed", "rolled_back"
ATTEMPT: Final = {"ESCROW_WRITER": "w", "ESCROW_BATCH": "0", "ESCROW_ATTEMPT": "a"}


# --- the table of crashes ------------------------------------------------------------------------


def end_with(verdict: int) -> Callable[[EscrowBench, list[HalfPosition]], None]:
    return lambda bench, positions: bench.turn(end_request(positions[0], verdict))


def commit_both(bench: EscrowBench, positions: list[HalfPosition]) -> None:
    bench.turn(end_many_request([*positions], COMMIT))


def decide_batch(bench: EscrowBench, positions: list[HalfPosition]) -> None:
    bench.turn(decide_batch_request(0, 0, [("a", 1)]))


def strand(bench: EscrowBench, positions: list[HalfPosition]) -> None:
    half = bench.coordinator.find_open(*positions[0])
    assert half is not None
    half.checks = 99
    half.due_ms = bench.now_ms
    bench.coordinator.schedule.add(half.queue_offset, half.due_ms)
    bench.tick(100)


def move_halves(bench: EscrowBench, positions: list[HalfPosition]) -> None:
    half = bench.coordinator.find_open(*positions[0])
    assert half is not None
    bench.broker.transactions.move_half(half, bench.now_ms)
    bench.turn()


def park(bench: EscrowBench, positions: list[HalfPosition]) -> None:
    bench.turn(half_request("third"))


# For each step: a function that appends its records, and the states of both halves when the first
# 0, 1, 2, … of these records are complete.
CRASHES: Final = {
    "a half": (park, [(OPEN, OPEN)] * 2),
    "a commit": (end_with(COMMIT), [(OPEN, OPEN)] + [(COMMITTED, OPEN)] * 2),
    "a rollback": (end_with(ROLLBACK), [(OPEN, OPEN), (ROLLED_BACK, OPEN)]),
    "a group": (commit_both, [(OPEN, OPEN)] + [(COMMITTED, COMMITTED)] * 5),
    "a batch": (decide_batch, [(OPEN, OPEN)] + [(ROLLED_BACK, COMMITTED)] * 4),
    "a stranding": (strand, [(OPEN, OPEN)] + [("stranded", OPEN)] * 2),
    "a move": (move_halves, [(OPEN, OPEN)] * 3),
}


@pytest.mark.parametrize("with_snapshot", [True, False], ids=["snapshot", "no snapshot"])
@pytest.mark.parametrize("name", CRASHES)
def test_a_crash_at_any_byte_leaves_all_or_nothing(name: str, with_snapshot: bool) -> None:
    step, expected = CRASHES[name]
    bench = EscrowBench()
    attempts = [{**ATTEMPT, "ESCROW_ATTEMPT": "b"}, ATTEMPT] if name == "a batch" else [{}, {}]
    positions = [bench.park("k0", **attempts[0]), bench.park("k1", **attempts[1])]
    bench.save_snapshot()
    if not with_snapshot:
        bench.disk.remove("escrowmq.escrow")
    begin = bench.store.end
    step(bench, positions)
    end = bench.store.end
    sizes = [record.size for record in bench.store.records(begin)]
    assert len(sizes) == len(expected) - 1
    start: int = begin
    for size, states in zip([*sizes, 1], expected, strict=True):
        cuts = {start, start + 1, start + size // 2, start + size - 1}
        for cut in sorted(cuts & {*range(start, end + 1)}):
            restarted = bench.truncated(cut)
            for _ in range(2):
                check_states(restarted, positions, states)
                restarted = restarted.killed(with_snapshot=with_snapshot)
            check_decisions(restarted, positions, states)
        start += size


def check_states(
    bench: EscrowBench, positions: list[HalfPosition], states: tuple[str, str]
) -> None:
    """Check the states, the delivered messages and RocketMQ's half cursor."""
    assert tuple(bench.state_in_memory(position) for position in positions) == states
    delivered = sorted(b"k%d" % number for number, state in enumerate(states) if state == COMMITTED)
    assert sorted(bench.bodies()) == delivered
    bench.tick()
    bench.store.flush()
    bench.tick()
    first_open = bench.coordinator.states.first_open(0)
    assert bench.cursors()[0] <= first_open


def check_decisions(
    bench: EscrowBench, positions: list[HalfPosition], states: tuple[str, str]
) -> None:
    """Check that open halves can be committed, and that decided ones cannot be changed."""
    for position, state in zip(positions, states, strict=True):
        is_rolled_back = state == ROLLED_BACK
        assert bench.end(position, COMMIT).code == (3701 if is_rolled_back else 0)
        assert bench.end(position, ROLLBACK).code == (0 if is_rolled_back else 3701)
    delivered = [b"k%d" % number for number in range(2) if states[number] != ROLLED_BACK]
    assert sorted(bench.bodies()) == delivered
    restarted = bench.killed(with_snapshot=False)
    assert sorted(restarted.bodies()) == delivered
    assert restarted.coordinator.halves.find(positions[0].queue_offset) is None


def test_an_ordinary_message_is_not_taken_for_a_final_of_the_half_at_log_offset_0() -> None:
    """Every message without a half has the prepared offset 0 too."""
    bench = EscrowBench()
    position = bench.park("k")
    assert position == (0, 0)
    bench.turn(send_request(body=b"x", properties="UNIQ_KEY\x01k\x02"))  # has the same key
    for sys_flag in (8, 0):
        bench.turn(send_request(body=b"y", properties="UNIQ_KEY\x01u\x02", sys_flag=sys_flag))
        bench = bench.killed(with_snapshot=False)
        assert bench.state(position) == OPEN
    assert bench.end(position, COMMIT).code == 0
    assert bench.bodies().count(b"k") == 1


def test_a_final_of_the_half_at_log_offset_0_is_recognised() -> None:
    bench = EscrowBench()
    position = bench.park("k")
    [half] = bench.coordinator.halves
    append_final_without_op(bench, half)
    assert bench.killed().state(position) == COMMITTED


def test_a_moved_half_whose_op_is_cut_off_is_committed_at_all_its_positions() -> None:
    bench = EscrowBench()
    old = bench.park("k")
    move_halves(bench, [old])
    [half] = bench.coordinator.halves
    new = HalfPosition(half.queue_offset, half.log_offset)
    append_final_without_op(bench, half)
    for with_snapshot in (True, False):
        bench = bench.killed(with_snapshot=with_snapshot)
        assert [bench.end(position, COMMIT).code for position in (old, new)] == [0, 0]
        assert bench.bodies() == [b"k"]


def test_a_moved_half_of_a_batch_is_counted_once() -> None:
    bench = EscrowBench()
    position = bench.park("k", **ATTEMPT)
    move_halves(bench, [position])
    restarted = bench.killed()
    assert restarted.request(decide_batch_request(0, 0, [("a", 1)])).code == 0
    assert restarted.bodies() == [b"k"]


@pytest.mark.parametrize("with_snapshot", [True, False])
def test_the_number_of_checks_survives_a_crash(with_snapshot: bool) -> None:
    bench = EscrowBench()
    bench.park("k")
    bench.tick(ESCROW.immunity_ms)
    bench.save_snapshot()
    bench.tick(ESCROW.check_interval_ms)
    bench.store.flush()
    restarted = bench.killed(with_snapshot=with_snapshot)
    [half] = restarted.coordinator.halves
    assert half.checks == 2
    assert half.due_ms == restarted.now_ms + ESCROW.check_interval_ms


def test_an_unusable_snapshot_is_ignored() -> None:
    bench = EscrowBench()
    position = bench.park("k")
    bench.end(position, COMMIT)
    bench.save_snapshot()
    bench.store.abandon()
    for content in (b"", b"abc", b"\0" * 40):
        file = bench.disk.create("escrowmq.escrow", len(content))
        file.write_at(0, content)
        bench = bench.reopen(bench.disk)
        assert bench.state(position) == COMMITTED
        bench.store.abandon()


def test_a_snapshot_is_not_ahead_of_the_log() -> None:
    """A power cut removes the end of the log, and no snapshot of the removed part may remain.

    When the log has grown again, such a snapshot would seem to fit.
    """
    bench = EscrowBench()
    position = bench.park("k")
    bench.store.flush()
    bench.turn(end_request(position, COMMIT))
    for _ in range(2):
        bench.broker.transactions.save(force=True)  # writes nothing before the flush
    restarted = bench.power_cut()
    assert restarted.state(position) == OPEN
    assert restarted.bodies() == []
    for number in range(5):
        restarted.park(f"other {number}")
    last = restarted.killed()
    assert last.state(position) == OPEN
    assert last.end(position, ROLLBACK).code == 0


def test_cursors_are_not_ahead_of_the_log() -> None:
    bench = EscrowBench()
    position = bench.park("k")
    bench.store.flush()
    bench.turn(end_request(position, ROLLBACK))
    for _ in range(3):
        bench.tick()
        bench.broker.save()
    restarted = bench.power_cut()
    assert restarted.cursors()[0] == 0
    assert restarted.state(position) == OPEN


def test_writers_are_recovered_with_and_without_a_snapshot() -> None:
    bench = EscrowBench()
    bench.request(decide_batch_request(4, 0, []))
    for with_snapshot in (False, True):
        bench.save_snapshot()
        bench = bench.killed(with_snapshot=with_snapshot)
        assert writer_state(bench.request(query_writer_request())).batch == 4


# --- directories of RocketMQ ---------------------------------------------------------------------


@pytest.mark.parametrize("commas", [True, False])
def test_halves_and_ops_of_rocketmq_are_read(commas: bool) -> None:
    rocketmq = RocketMQDirectory()
    open_half, committed, rolled_back = (rocketmq.half(key) for key in ("o", "c", "r"))
    rocketmq.deliver(committed)
    rocketmq.op(committed, commas=commas)
    rocketmq.op(rolled_back, commas=commas)
    bench = rocketmq.opened()
    assert [half.key for half in bench.coordinator.halves] == [b"o"]
    assert bench.end(record_position(committed), COMMIT).code == 0
    assert bench.end(record_position(rolled_back), COMMIT).code == 3701
    assert bench.end(record_position(open_half), COMMIT).code == 0
    assert bench.bodies() == [b"c", b"o"]


def test_a_half_that_rocketmq_delivered_without_an_op_is_not_checked() -> None:
    """RocketMQ holds ops in memory for seconds and loses them in a crash."""
    rocketmq = RocketMQDirectory()
    half = rocketmq.half("k")
    rocketmq.deliver(half)
    rocketmq.half("another")
    bench = rocketmq.opened()
    bench.tick(ESCROW.immunity_ms)
    assert [key for key, _ in sent_checks(bench.channel)] == ["another"]
    assert bench.end(record_position(half), COMMIT).code == 0
    assert bench.bodies() == [b"k"]


def test_older_copies_by_rocketmq_lead_to_the_newest() -> None:
    rocketmq = RocketMQDirectory()
    first = rocketmq.half("k")
    second = rocketmq.put_back(first)
    third = rocketmq.put_back(second, 2)
    bench = rocketmq.opened(half_cursor=2)
    bench.tick(ESCROW.immunity_ms)
    assert sent_checks(bench.channel) == [("k", record_position(third))]
    assert bench.end(record_position(first), COMMIT).code == 0
    for record in (first, second, third):
        assert bench.end(record_position(record), COMMIT).code == 0
        assert bench.end(record_position(record), ROLLBACK).code == 3701
    assert bench.bodies() == [b"k"]
    restarted = bench.killed(with_snapshot=False)
    assert len(restarted.coordinator.halves) == 0
    assert restarted.end(record_position(second), COMMIT).code == 0


def test_halves_before_the_cursor_of_rocketmq_are_open_without_a_proof() -> None:
    """RocketMQ passes a half that has an op, a newer copy or a discarded copy, and no other."""
    rocketmq = RocketMQDirectory()
    decided, checked, unproven = (rocketmq.half(key) for key in ("decided", "checked", "unproven"))
    rocketmq.op(decided)
    copy = rocketmq.put_back(checked)
    bench = rocketmq.opened(half_cursor=3, op_cursor=1)
    assert [half.key for half in bench.coordinator.halves] == [b"unproven", b"checked"]
    assert bench.end(record_position(decided), COMMIT).code == 3701
    assert bench.end(record_position(unproven), COMMIT).code == 0
    assert bench.end(record_position(checked), COMMIT).code == 0
    assert bench.end(record_position(copy), COMMIT).code == 0
    assert bench.bodies() == [b"unproven", b"checked"]


def test_a_half_without_a_topic_is_ignored() -> None:
    rocketmq = RocketMQDirectory()
    rocketmq.append(NewRecord(names.HALF_TOPIC, 0, b"x", b"TRAN_MSG\x01true\x02"))
    half = rocketmq.half("k")
    bench = rocketmq.opened()
    assert bench.end(record_position(half), COMMIT).code == 0
    assert bench.end((0, 0), COMMIT).code == 1
    assert bench.bodies() == [b"k"]


def test_rocketmq_finds_the_open_halves_in_a_directory_of_escrowmq() -> None:
    """RocketMQ treats the halves that have no op, from its cursors on, as open."""
    bench = EscrowBench()
    positions = [bench.park(f"k{number}") for number in range(9)]
    for number in (0, 1, 3, 4, 7):
        bench.end(positions[number], COMMIT if number % 2 else ROLLBACK)
    move_halves(bench, [positions[2]])
    bench.end(positions[2], ROLLBACK)
    move_halves(bench, [positions[5]])
    for _ in range(2):
        bench.tick()
        bench.store.flush()
    assert open_for_rocketmq(bench) == [b"k5", b"k6", b"k8"]
    assert bench.cursors()[0] == 6


def test_rocketmq_finds_a_moved_half_once() -> None:
    bench = EscrowBench()
    positions = [bench.park(f"k{number}") for number in range(3)]
    move_halves(bench, [positions[1]])
    bench.end(positions[2], ROLLBACK)
    for _ in range(2):
        bench.tick()
        bench.store.flush()
    assert open_for_rocketmq(bench) == [b"k0", b"k1"]


def open_for_rocketmq(bench: EscrowBench) -> list[bytes]:
    """Return the halves from the half cursor on that have no op from the op cursor on."""
    half_cursor, op_cursor = bench.cursors()
    ops = {int(body) for body in bodies(bench.store, names.OP_TOPIC)[op_cursor:]}
    halves = stored_records(bench.store, names.HALF_TOPIC)[half_cursor:]
    undecided = [record for record in halves if record.queue_offset not in ops]
    tracked = {half.queue_offset for half in bench.coordinator.halves}
    assert {record.queue_offset for record in undecided} == tracked
    return sorted(bytes(record.body) for record in undecided)


@pytest.mark.parametrize("whole_records", [0, 1, 2])
def test_a_crash_during_recovery_does_not_lose_the_commit_that_lacks_its_op(
    whole_records: int,
) -> None:
    """Recovery looks for such a final only at the end of the log, so it appends its op first."""
    bench = EscrowBench()
    moved = bench.park("moved")
    record = bench.store.record_at(LogOffset(moved.log_offset))
    bench.store.append([make_copy(record, moved.queue_offset)], now_ms=NOW_MS)  # its op is missing
    committed = bench.park("k")
    half = bench.coordinator.find_open(*committed)
    assert half is not None
    append_final_without_op(bench, half)
    log_end = bench.store.end
    recovered = bench.killed(with_snapshot=False)
    appended = [*recovered.store.records(log_end)]
    assert [record.topic for record in appended] == [names.OP_TOPIC] * 2
    ends = [log_end, *(record.log_offset + record.size for record in appended)]
    restarted = recovered.truncated(ends[whole_records])
    assert restarted.state(committed) == COMMITTED
    assert restarted.bodies() == [b"k"]
    assert restarted.state(moved) == OPEN
