"""Something is killed with -9 in the middle of an exactly-once stream: no row lost, none doubled.

A few points of the many that `make spark-crash` goes through, chosen for what they have in common
with the rest: before and after the decision, in a task and in the broker. A driver that is killed
is another start of Java, which CI has no time for.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark_crash.runs import Case, Field, Outcome, all_cases, chains, chosen, table

IN_CI = [
    Case("worker", "read-task"),
    Case("broker", "write-parked-one"),
    Case("worker", "write-parked"),
    Case("broker", "decide-before"),
    Case("worker", "decide-sent"),
    Case("broker", "decide-sent"),
    Case("worker", "decide-after"),
    Case("broker", "commit-end"),
]
WITH_MORE_DRIVERS = [
    Case("driver", "write-parked"),
    Case("driver", "decide-after"),
    Case("freeze", "decide-before"),
]


@pytest.mark.timeout(1800)
def test_whatever_is_killed_every_row_is_there_once(tmp_path: Path) -> None:
    outcomes = outcomes_of(IN_CI, tmp_path)
    assert all(outcome.is_good for outcome in outcomes), f"\n{table(outcomes)}"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_driver_is_killed_or_frozen_and_every_row_is_there_once(tmp_path: Path) -> None:
    outcomes = outcomes_of(WITH_MORE_DRIVERS, tmp_path)
    assert all(outcome.is_good for outcome in outcomes), f"\n{table(outcomes)}"


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_every_point_is_survived(tmp_path: Path) -> None:
    outcomes = outcomes_of(sorted(all_cases(), key=lambda case: case.master), tmp_path)
    assert all(outcome.is_good for outcome in outcomes), f"\n{table(outcomes)}"


def outcomes_of(cases: list[Case], directory: Path) -> list[Outcome]:
    with Field(directory) as field:
        return [outcome for chain in chains(cases) for outcome in field.run(chain)]


def test_chains_hold_every_run_and_end_where_a_driver_was_frozen() -> None:
    made = chains(chosen(200, seed=7))
    assert [case for chain in made for case in chain] == chosen(200, seed=7)
    for chain in made:
        assert len({case.master for case in chain}) == 1
        assert all(case.victim != "freeze" for case in chain[:-1])


def test_the_runs_that_are_chosen_cover_every_case_before_any_twice() -> None:
    cases = all_cases()
    assert len(set(cases)) == len(cases)
    assert sorted(chosen(len(cases), seed=7)) == sorted(cases)
    assert len(chosen(200, seed=7)) == 200
