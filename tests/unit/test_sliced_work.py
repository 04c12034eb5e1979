"""Work in slices: who gets the next slice, and what one piece of work costs the others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from escrowmq.clock import ManualClock
from escrowmq.sliced_work import SlicedResult, SlicedWork, SliceScheduler, run_to_end

# Multiples of an eighth of a second, which floats add up exactly.
STEP_MS, SLICE_MS, TURN_MS = 125, 250, 1_000


class Workshop:
    """A scheduler on a clock that every step of the work moves, and the steps in their order."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.steps: list[str] = []
        self.scheduler = SliceScheduler(
            self.clock.elapsed_s, slice_s=SLICE_MS / 1000, turn_s=TURN_MS / 1000
        )

    def work(self, name: str, step_count: int, *, step_ms: int = STEP_MS) -> SlicedWork:
        for _ in range(step_count):
            self.steps.append(name)
            self.clock.advance(ms=step_ms)
            yield

    def add(self, name: str, step_count: int, *, step_ms: int = STEP_MS, origin: str = "") -> None:
        self.scheduler.add(self.work(name, step_count, step_ms=step_ms), origin=origin)


def test_every_old_work_gets_a_slice_before_one_gets_two() -> None:
    workshop = Workshop()
    for name in "abc":
        workshop.add(name, 100)
    for _ in range(2):
        workshop.scheduler.run_turn()
    workshop.steps.clear()
    for _ in range(3):
        workshop.scheduler.run_turn()
    assert all(workshop.steps.count(name) == 8 for name in "abc")


@pytest.mark.parametrize("greedy_count", [1, 50])
def test_new_work_waits_for_one_slice_however_much_work_is_old(greedy_count: int) -> None:
    workshop = Workshop()
    for _ in range(greedy_count):
        workshop.add("greedy", 1_000_000)
    for _ in range(100):
        workshop.scheduler.run_turn()
    workshop.steps.clear()
    workshop.add("new", 1)
    workshop.scheduler.run_turn()
    assert "new" in workshop.steps[:3]


def test_old_work_goes_on_however_much_work_is_new() -> None:
    workshop = Workshop()
    workshop.add("old", 50)
    for _ in range(20):
        for _ in range(100):
            workshop.add("new", 1)
        workshop.scheduler.run_turn()
    assert workshop.steps.count("old") == 50


def test_a_thousand_connections_of_one_origin_get_no_more_time_than_one_of_another() -> None:
    workshop = Workshop()
    for _ in range(1_000):
        workshop.add("greedy", 100, origin="attacker")
    workshop.scheduler.run_turn()
    workshop.steps.clear()
    workshop.add("honest", 4, origin="honest")
    workshop.scheduler.run_turn()
    assert workshop.steps == ["greedy"] * 2 + ["honest"] * 2 + ["greedy"] * 2 + ["honest"] * 2
    assert len(workshop.scheduler) == 1_001


def test_work_that_is_added_while_work_runs_is_not_lost() -> None:
    workshop = Workshop()

    def adding() -> SlicedWork:
        workshop.add("added", 1, origin="same")
        yield

    workshop.scheduler.add(adding(), origin="same")
    while workshop.scheduler.run_turn():
        pass
    assert workshop.steps == ["added"]


def test_a_turn_ends_when_its_time_is_used_up() -> None:
    workshop = Workshop()
    for name in "abcdefgh":
        workshop.add(name, 100)
    workshop.scheduler.run_turn()
    assert workshop.clock.elapsed_s() == TURN_MS / 1000
    assert "".join(workshop.steps) == "aaaabbaa"  # new work takes turns with old work
    workshop.scheduler.run_turn()
    assert workshop.clock.elapsed_s() == 2 * TURN_MS / 1000


def test_a_step_that_is_longer_than_a_turn_still_makes_progress() -> None:
    workshop = Workshop()
    workshop.add("long", 3, step_ms=10 * TURN_MS)
    turns = 1
    while workshop.scheduler.run_turn():
        turns += 1
    assert workshop.steps == ["long"] * 3
    assert turns == 4  # the last one finds that nothing is left


def test_work_that_fails_costs_no_other_work(caplog: pytest.LogCaptureFixture) -> None:
    workshop = Workshop()

    def failing() -> SlicedWork:
        yield
        raise ValueError("a bug")

    workshop.scheduler.add(failing())
    workshop.add("other", 3)
    while workshop.scheduler.run_turn():
        pass
    assert workshop.steps == ["other"] * 3
    assert "work given up" in caplog.text


def test_without_a_clock_everything_is_done_in_one_turn() -> None:
    workshop = Workshop()
    stopped: Callable[[], float] = lambda: 0.0  # noqa: E731  # as the broker's default
    scheduler = SliceScheduler(stopped)
    scheduler.add(workshop.work("a", 1_000))
    scheduler.add(workshop.work("b", 1_000))
    assert not scheduler.run_turn()
    assert len(workshop.steps) == 2_000
    assert len(scheduler) == 0


def test_a_result_is_returned_when_all_slices_are_done() -> None:
    def total() -> SlicedResult[int]:
        yield
        yield
        return 7

    assert run_to_end(total()) == 7
