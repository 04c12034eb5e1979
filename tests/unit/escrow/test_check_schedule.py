"""Due times: never early, the longest overdue first, nothing lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from escrowmq.escrow.checks import SLOT_MS, CheckSchedule

times = st.lists(st.integers(0, 3_000), max_size=40)


@given(times, st.lists(st.tuples(st.integers(0, 4_000), st.integers(0, 10)), max_size=20))
def test_everything_is_taken_once_and_none_before_its_time(
    due_times: list[int], takes: list[tuple[int, int]]
) -> None:
    due = CheckSchedule()
    for offset, due_ms in enumerate(due_times):
        due.add(offset, due_ms)
    left = dict(enumerate(due_times))
    for now_ms, count_max in [*takes, (10_000, 1_000)]:
        found = due.take_due(now_ms, count_max)
        assert len(found) <= count_max
        taken = [left.pop(offset) for offset in found]
        assert all(due_ms <= now_ms for due_ms in taken)
        if len(found) < count_max:  # all that is due, but for the slot that is not over
            assert all(due_ms > now_ms - SLOT_MS for due_ms in left.values())
    assert not left
    assert due.next_due_ms() is None


@given(times)
def test_what_is_longest_overdue_comes_first(due_times: list[int]) -> None:
    due = CheckSchedule()
    for offset, due_ms in enumerate(due_times):
        due.add(offset, due_ms)
    slots = []
    while found := due.take_due(10_000, 1):
        slots.append(-(-due_times[found[0]] // SLOT_MS))
    assert slots == sorted(slots)
    assert len(slots) == len(due_times)


def test_the_next_time_is_that_of_the_first_slot() -> None:
    due = CheckSchedule()
    due.add(1, 950)
    due.add(2, 101)
    assert due.next_due_ms() == 200
    assert due.take_due(199, 9) == []
    assert due.take_due(200, 9) == [2]
    assert due.next_due_ms() == 1000
