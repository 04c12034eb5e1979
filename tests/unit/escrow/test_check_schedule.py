"""The check schedule: no half is due early, the oldest comes first, and none is lost."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from escrowmq.escrow.checks import SLOT_MS, CheckSchedule

times = st.lists(st.integers(0, 3_000), max_size=40)


@given(times, st.lists(st.tuples(st.integers(0, 4_000), st.integers(0, 10)), max_size=20))
def test_every_half_is_taken_once_and_not_before_its_time(
    due_times: list[int], takes: list[tuple[int, int]]
) -> None:
    schedule = CheckSchedule()
    for offset, due_ms in enumerate(due_times):
        schedule.add(offset, due_ms)
    remaining = dict(enumerate(due_times))
    for now_ms, count_max in [*takes, (10_000, 1_000)]:
        due = schedule.take_due(now_ms, count_max)
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
    slots = []
    while due := schedule.take_due(10_000, 1):
        slots.append(math.ceil(due_times[due[0]] / SLOT_MS))
    assert slots == sorted(slots)
    assert len(slots) == len(due_times)


def test_a_half_is_due_at_the_end_of_its_slot() -> None:
    schedule = CheckSchedule()
    schedule.add(1, 950)
    schedule.add(2, 101)
    assert schedule.take_due(199, 9) == []
    assert schedule.take_due(200, 9) == [2]
    assert schedule.take_due(999, 9) == []
    assert schedule.take_due(1000, 9) == [1]
