"""A start after a crash at any byte, and in a directory that RocketMQ has written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from escrowmq.message import names
from escrowmq.message.properties import change_properties, encode_properties
from escrowmq.message.record import NewRecord, StoredRecord, copy_record
from tests.support.broker_requests import a_send, bodies, stored
from tests.support.escrows import (
    COMMIT,
    CURSOR_GROUP,
    ESCROW,
    ROLLBACK,
    EscrowBench,
    HalfPosition,
    a_batch_decision,
    a_half,
    a_writer_query,
    an_end,
    an_end_of_many,
    append_final_without_op,
    sent_checks,
    writer_state,
)
from tests.support.stores import HOST, NOW_MS

OPEN, COMMITTED, ROLLED_BACK = "open", "committed", "rolled_back"
ATTEMPT: Final = {"ESCROW_WRITER": "w", "ESCROW_BATCH": "0", "ESCROW_ATTEMPT": "a"}


def noted(bench: EscrowBench) -> None:
    bench.store.flush()
    bench.broker.transactions.save(force=True)


# --- the table of crashes ------------------------------------------------------------------------


def end_with(verdict: int) -> Callable[[EscrowBench, list[HalfPosition]], None]:
    return lambda bench, positions: bench.turn(an_end(positions[0], verdict))


def commit_both(bench: EscrowBench, positions: list[HalfPosition]) -> None:
    bench.turn(an_end_of_many([*positions], COMMIT))


def decide_batch(bench: EscrowBench, positions: list[HalfPosition]) -> None:
    bench.turn(a_batch_decision(0, 0, [("a", 1)]))


def strand(bench: EscrowBench, positions: list[HalfPosition]) -> None:
    half = bench.coordinator.find_open(*positions[0])
    assert half is not None
    half.checks = 99
    half.due_ms = bench.now_ms
    bench.coordinator.schedule.add(half.queue_offset, half.due_ms)
    bench.tick(100)


def renew(bench: EscrowBench, positions: list[HalfPosition]) -> None:
    half = bench.coordinator.find_open(*positions[0])
    assert half is not None
    bench.broker.transactions.move_half(half, bench.now_ms)
    bench.turn()


def park(bench: EscrowBench, positions: list[HalfPosition]) -> None:
    bench.turn(a_half("third"))


# What is appended, and what the first and second half are when so many of its records are whole.
CRASHES: Final = {
    "a half": (park, [(OPEN, OPEN)] * 2),
    "a commit": (end_with(COMMIT), [(OPEN, OPEN)] + [(COMMITTED, OPEN)] * 2),
    "a rollback": (end_with(ROLLBACK), [(OPEN, OPEN), (ROLLED_BACK, OPEN)]),
    "a group": (commit_both, [(OPEN, OPEN)] + [(COMMITTED, COMMITTED)] * 5),
    "a batch": (decide_batch, [(OPEN, OPEN)] + [(ROLLED_BACK, COMMITTED)] * 4),
    "a stranding": (strand, [(OPEN, OPEN)] + [("stranded", OPEN)] * 2),
    "a move": (renew, [(OPEN, OPEN)] * 3),
}


@pytest.mark.parametrize("with_note", [True, False], ids=["noted", "without a note"])
@pytest.mark.parametrize("what", CRASHES)
def test_a_crash_at_any_byte_leaves_all_or_nothing(what: str, with_note: bool) -> None:
    step, expected = CRASHES[what]
    bench = EscrowBench()
    attempts = [{**ATTEMPT, "ESCROW_ATTEMPT": "b"}, ATTEMPT] if what == "a batch" else [{}, {}]
    positions = [
        bench.park("k0", **attempts[0]),
        bench.park("k1", **attempts[1]),
    ]
    noted(bench)
    if not with_note:
        bench.disk.remove("escrowmq.escrow")
    begin = bench.store.end
    step(bench, positions)
    end = bench.store.end
    sizes = [record.size for record in bench.store.records(begin)]
    assert len(sizes) == len(expected) - 1
    at: int = begin
    for size, states in zip([*sizes, 1], expected, strict=True):
        for position in sorted({at, at + 1, at + size // 2, at + size - 1} & {*range(at, end + 1)}):
            again = bench.truncated(position)
            for _ in range(2):
                check_states(again, positions, states)
                again = again.killed(with_snapshot=with_note)
            finish(again, positions, states)
        at += size


def check_states(
    bench: EscrowBench, positions: list[HalfPosition], states: tuple[str, str]
) -> None:
    assert tuple(bench.state_in_memory(position) for position in positions) == states
    delivered = sorted(b"k%d" % number for number, state in enumerate(states) if state == COMMITTED)
    assert sorted(bench.bodies()) == delivered
    bench.tick()
    bench.store.flush()
    bench.tick()
    first_open = bench.coordinator.states.first_open(0)
    assert bench.cursors()[0] <= first_open


def finish(bench: EscrowBench, positions: list[HalfPosition], states: tuple[str, str]) -> None:
    """What was open can be decided, what was decided cannot be turned, and each comes once."""
    for position, state in zip(positions, states, strict=True):
        is_lost = state == ROLLED_BACK
        assert bench.end(position, COMMIT).code == (3701 if is_lost else 0)
        assert bench.end(position, ROLLBACK).code == (0 if is_lost else 3701)
    delivered = [b"k%d" % number for number in range(2) if states[number] != ROLLED_BACK]
    assert sorted(bench.bodies()) == delivered
    again = bench.killed(with_snapshot=False)
    assert sorted(again.bodies()) == delivered
    assert again.coordinator.halves.find(positions[0].queue_offset) is None


def test_the_first_half_of_all_lies_at_log_offset_0_and_is_no_ordinary_messages() -> None:
    """0 is also what stands in every message that no half belongs to."""
    bench = EscrowBench()
    position = bench.park("k")
    assert position == (0, 0)
    bench.turn(a_send(body=b"x", properties="UNIQ_KEY\x01k\x02"))  # the same key, and no final
    for sys_flag in (8, 0):
        bench.turn(a_send(body=b"y", properties="UNIQ_KEY\x01u\x02", sys_flag=sys_flag))
        bench = bench.killed(with_snapshot=False)
        assert bench.state(position) == OPEN
    assert bench.end(position, COMMIT).code == 0
    assert bench.bodies().count(b"k") == 1


def test_a_final_of_the_first_half_is_seen_as_such() -> None:
    bench = EscrowBench()
    position = bench.park("k")
    [half] = bench.coordinator.halves
    append_final_without_op(bench, half)
    assert bench.killed().state(position) == COMMITTED


def test_a_moved_half_whose_op_is_cut_off_is_committed_in_all_its_places() -> None:
    bench = EscrowBench()
    old = bench.park("k")
    renew(bench, [old])
    [half] = bench.coordinator.halves
    new = HalfPosition(half.queue_offset, half.log_offset)
    append_final_without_op(bench, half)
    for with_note in (True, False):
        bench = bench.killed(with_snapshot=with_note)
        assert [bench.end(position, COMMIT).code for position in (old, new)] == [0, 0]
        assert bench.bodies() == [b"k"]


def test_a_moved_half_of_a_batch_is_counted_once() -> None:
    bench = EscrowBench()
    position = bench.park("k", **ATTEMPT)
    renew(bench, [position])
    again = bench.killed()
    assert again.request(a_batch_decision(0, 0, [("a", 1)])).code == 0
    assert again.bodies() == [b"k"]


@pytest.mark.parametrize("with_note", [True, False])
def test_what_was_asked_is_remembered(with_note: bool) -> None:
    bench = EscrowBench()
    bench.park("k")
    bench.tick(ESCROW.immunity_ms)
    noted(bench)
    bench.tick(ESCROW.check_interval_ms)
    bench.store.flush()
    again = bench.killed(with_snapshot=with_note)
    [half] = again.coordinator.halves
    assert half.checks == 2
    assert half.due_ms == again.now_ms + ESCROW.check_interval_ms


def test_a_note_that_is_of_no_use_is_done_without() -> None:
    bench = EscrowBench()
    position = bench.park("k")
    bench.end(position, COMMIT)
    noted(bench)
    bench.store.abandon()
    for content in (b"", b"abc", b"\0" * 40):
        file = bench.disk.create("escrowmq.escrow", len(content))
        file.write_at(0, content)
        bench = bench.reopen(bench.disk)
        assert bench.state(position) == COMMITTED
        bench.store.abandon()


def test_a_note_is_not_ahead_of_the_log() -> None:
    """A power cut takes the end of the log, and must not leave a memory of it; not even one that
    comes up when the log has grown again."""
    bench = EscrowBench()
    position = bench.park("k")
    bench.store.flush()
    bench.turn(an_end(position, COMMIT))
    for _ in range(2):
        bench.broker.transactions.save(force=True)  # it waits for the flush
    again = bench.power_cut()
    assert again.state(position) == OPEN
    assert again.bodies() == []
    for number in range(5):
        again.park(f"other {number}")
    last = again.killed()
    assert last.state(position) == OPEN
    assert last.end(position, ROLLBACK).code == 0


def test_cursors_are_not_ahead_of_the_log() -> None:
    bench = EscrowBench()
    position = bench.park("k")
    bench.store.flush()
    bench.turn(an_end(position, ROLLBACK))
    for _ in range(3):
        bench.tick()
        bench.broker.save()
    again = bench.power_cut()
    assert again.cursors()[0] == 0
    assert again.state(position) == OPEN


def test_writers_are_remembered_with_a_note_and_without() -> None:
    bench = EscrowBench()
    bench.request(a_batch_decision(4, 0, []))
    for with_note in (False, True):
        noted(bench)
        bench = bench.killed(with_snapshot=with_note)
        assert writer_state(bench.request(a_writer_query())).batch == 4


# --- as RocketMQ leaves it -----------------------------------------------------------------------


class Theirs:
    """A directory in which RocketMQ parks, asks and settles."""

    def __init__(self) -> None:
        self.bench = EscrowBench()
        self.store = self.bench.store

    def half(self, key: str, **properties: str) -> StoredRecord:
        text = {"TRAN_MSG": "true", "PGROUP": "p", "UNIQ_KEY": key, **properties}
        text |= {"REAL_TOPIC": "T", "REAL_QID": "0"}
        record = NewRecord(
            names.HALF_TOPIC, 0, key.encode(), encode_properties(text), born_host=HOST
        )
        return self._append(record)

    def put_back(self, half: StoredRecord, checks: int = 1) -> StoredRecord:
        """What it does for each question: a copy at the end of the half queue."""
        properties = change_properties(
            half.properties, update={"TRANSACTION_CHECK_TIMES": str(checks)}
        )
        return self._append(
            copy_record(half, topic=names.HALF_TOPIC, queue_id=0, properties=properties)
        )

    def deliver(self, half: StoredRecord) -> None:
        self._append(
            NewRecord(
                "T",
                0,
                bytes(half.body),
                half.properties,
                sys_flag=8,
                prepared_offset=half.log_offset,
            )
        )

    def op(self, *halves: StoredRecord, commas: bool = True) -> None:
        body = "".join(f"{half.queue_offset}," for half in halves)
        body = body if commas else body.rstrip(",")
        self._append(NewRecord(names.OP_TOPIC, 0, body.encode(), b"TAGS\x01d\x02"))

    def opened(self, half_cursor: int = 0, op_cursor: int = 0) -> EscrowBench:
        offsets = self.bench.broker.offsets
        offsets.commit(names.HALF_TOPIC, CURSOR_GROUP, 0, half_cursor)
        offsets.commit(names.OP_TOPIC, CURSOR_GROUP, 0, op_cursor)
        self.bench.broker.save()
        again = self.bench.killed()
        again.heartbeat(again.channel, "p")
        return again

    def _append(self, record: NewRecord) -> StoredRecord:
        [position] = self.store.append([record], now_ms=NOW_MS)
        return self.store.record_at(position.log_offset)


def position(record: StoredRecord) -> HalfPosition:
    return HalfPosition(record.queue_offset, record.log_offset)


@pytest.mark.parametrize("commas", [True, False])
def test_its_halves_and_ops_are_read(commas: bool) -> None:
    theirs = Theirs()
    open_one, committed, rolled_back = (theirs.half(key) for key in ("o", "c", "r"))
    theirs.deliver(committed)
    theirs.op(committed, commas=commas)
    theirs.op(rolled_back, commas=commas)
    bench = theirs.opened()
    assert [half.key for half in bench.coordinator.halves] == [b"o"]
    assert bench.end(position(committed), COMMIT).code == 0
    assert bench.end(position(rolled_back), COMMIT).code == 3701
    assert bench.end(position(open_one), COMMIT).code == 0
    assert bench.bodies() == [b"c", b"o"]


def test_one_that_it_delivered_without_an_op_is_not_asked_about() -> None:
    """It keeps ops in memory for seconds, and loses them in a crash."""
    theirs = Theirs()
    half = theirs.half("k")
    theirs.deliver(half)
    theirs.half("another")
    bench = theirs.opened()
    bench.tick(ESCROW.immunity_ms)
    assert [key for key, _ in sent_checks(bench.channel)] == ["another"]
    assert bench.end(position(half), COMMIT).code == 0
    assert bench.bodies() == [b"k"]


def test_of_its_copies_the_newest_lives_and_the_older_lead_to_it() -> None:
    theirs = Theirs()
    first = theirs.half("k")
    second = theirs.put_back(first)
    third = theirs.put_back(second, 2)
    bench = theirs.opened(half_cursor=2)
    bench.tick(ESCROW.immunity_ms)
    assert sent_checks(bench.channel) == [("k", position(third))]
    assert bench.end(position(first), COMMIT).code == 0
    for record in (first, second, third):
        assert bench.end(position(record), COMMIT).code == 0
        assert bench.end(position(record), ROLLBACK).code == 3701
    assert bench.bodies() == [b"k"]
    again = bench.killed(with_snapshot=False)
    assert len(again.coordinator.halves) == 0
    assert again.end(position(second), COMMIT).code == 0


def test_what_its_cursor_has_passed_is_over() -> None:
    theirs = Theirs()
    passed, open_one = theirs.half("passed"), theirs.half("open")
    bench = theirs.opened(half_cursor=1)
    assert [half.key for half in bench.coordinator.halves] == [b"open"]
    assert bench.end(position(passed), COMMIT).code != 0
    assert bench.end(position(open_one), ROLLBACK).code == 0
    assert bench.bodies() == []


def test_a_half_that_wants_nowhere_is_left_alone() -> None:
    theirs = Theirs()
    theirs._append(NewRecord(names.HALF_TOPIC, 0, b"x", b"TRAN_MSG\x01true\x02"))
    good = theirs.half("k")
    bench = theirs.opened()
    assert bench.end(position(good), COMMIT).code == 0
    assert bench.end((0, 0), COMMIT).code == 1
    assert bench.bodies() == [b"k"]


def test_what_we_leave_it_reads_as_its_own() -> None:
    """From the cursors on: halves without an op, and those are the open ones."""
    bench = EscrowBench()
    positions = [bench.park(f"k{number}") for number in range(9)]
    for number in (0, 1, 3, 4, 7):
        bench.end(positions[number], COMMIT if number % 2 else ROLLBACK)
    renew(bench, [positions[2]])
    bench.end(positions[2], ROLLBACK)
    renew(bench, [positions[5]])
    for _ in range(2):
        bench.tick()
        bench.store.flush()
    assert left_to_rocketmq(bench) == [b"k5", b"k6", b"k8"]
    assert bench.cursors()[0] == 6


def test_a_moved_half_is_left_to_it_once() -> None:
    bench = EscrowBench()
    positions = [bench.park(f"k{number}") for number in range(3)]
    renew(bench, [positions[1]])
    bench.end(positions[2], ROLLBACK)
    for _ in range(2):
        bench.tick()
        bench.store.flush()
    assert left_to_rocketmq(bench) == [b"k0", b"k1"]


def left_to_rocketmq(bench: EscrowBench) -> list[bytes]:
    """The halves from its cursor on of which no op from its other cursor on speaks."""
    half_cursor, op_cursor = bench.cursors()
    ops = {int(body) for body in bodies(bench.store, names.OP_TOPIC)[op_cursor:]}
    halves = stored(bench.store, names.HALF_TOPIC)[half_cursor:]
    undecided = [record for record in halves if record.queue_offset not in ops]
    tracked = {half.queue_offset for half in bench.coordinator.halves}
    assert {record.queue_offset for record in undecided} == tracked
    return sorted(bytes(record.body) for record in undecided)
