"""The check schedule: no half is due early, the oldest comes first, and none is lost."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from escrowmq.escrow.checks import EXAMINED_ENTRIES_MAX, SLOT_MS, CheckSchedule
from escrowmq.escrow.half_table import HalfTable, PythonHalfTable

times = st.lists(st.integers(0, 3_000), max_size=40)


def table_of(queue_offsets: Iterable[int]) -> HalfTable:
    """Return a table with undecided halves at these offsets."""
    table = PythonHalfTable()
    for queue_offset in queue_offsets:
        half = table.new_half("T", 0, "p", b"%d" % queue_offset, 0, 0, None)
        half.queue_offset = queue_offset
        table.add(half)
    return table


@given(times, st.lists(st.tuples(st.integers(0, 4_000), st.integers(0, 10)), max_size=20))
def test_every_half_is_taken_once_and_not_before_its_time(
    due_times: list[int], takes: list[tuple[int, int]]
) -> None:
    schedule = CheckSchedule()
    for offset, due_ms in enumerate(due_times):
        schedule.add(offset, due_ms)
    halves = table_of(range(len(due_times)))
    remaining = dict(enumerate(due_times))
    for now_ms, count_max in [*takes, (10_000, 1_000)]:
        due = schedule.take_due(now_ms, count_max, halves)
        assert len(due) <= count_max
        taken_times = [remaining.pop(offset) for offset in due]
        assert all(due_ms <= now_ms for due_ms in taken_times)
        if len(due) < count_max:
            # All due halves were taken, except those whose slot has not ended.
            assert all(due_ms > now_ms - SLOT_MS for due_ms in remaining.values())
    assert not remaining


@given(times)
def test_the_oldest_slot_comes_first(due_times: list[int]) -> None:
    schedule = CheckSchedule()
    for offset, due_ms in enumerate(due_times):
        schedule.add(offset, due_ms)
    halves = table_of(range(len(due_times)))
    slots = []
    while due := schedule.take_due(10_000, 1, halves):
        slots.append(math.ceil(due_times[due[0]] / SLOT_MS))
    assert slots == sorted(slots)
    assert len(slots) == len(due_times)


def test_a_half_is_due_at_the_end_of_its_slot() -> None:
    schedule = CheckSchedule()
    schedule.add(1, 9 * SLOT_MS + 1)
    schedule.add(2, SLOT_MS + 1)
    halves = table_of([1, 2])
    assert schedule.next_slot_ms == 2 * SLOT_MS
    assert schedule.take_due(2 * SLOT_MS - 1, 9, halves) == []
    assert schedule.take_due(2 * SLOT_MS, 9, halves) == [2]
    assert schedule.next_slot_ms == 10 * SLOT_MS
    assert schedule.take_due(10 * SLOT_MS - 1, 9, halves) == []
    assert schedule.take_due(10 * SLOT_MS, 9, halves) == [1]
    assert schedule.next_slot_ms is None


def test_decided_halves_do_not_delay_the_others() -> None:
    schedule = CheckSchedule()
    schedule.add_many(
        array("q", range(20_000)), 100
    )  # as many as are decided in a tenth of a second
    schedule.add(20_000, 100)
    schedule.add(20_001, 200)
    assert schedule.take_due(200, 5, table_of([20_000, 20_001])) == [20_000, 20_001]


def test_a_call_examines_a_limited_number_of_entries() -> None:
    schedule = CheckSchedule()
    schedule.add(EXAMINED_ENTRIES_MAX + 1, 100)
    schedule.add_many(array("q", range(EXAMINED_ENTRIES_MAX)), 100)  # taken before it
    halves = table_of([EXAMINED_ENTRIES_MAX + 1])
    assert schedule.take_due(100, 1_000, halves) == []
    assert schedule.take_due(100, 1_000, halves) == [EXAMINED_ENTRIES_MAX + 1]
