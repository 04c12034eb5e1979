"""Something is killed with -9 in the middle of an exactly-once stream: no row lost, none doubled.

A few points of the many that `make spark-crash` goes through, chosen for what they have in common
with the rest: before and after the decision, in a task and in the driver.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark_crash.runs import Case, Field, all_cases, chosen, table

IN_CI = [
    Case("worker", "write-parked"),
    Case("worker", "decide-after"),
    Case("broker", "write-parked-one"),
    Case("broker", "decide-sent"),
    Case("driver", "decide-after"),
]


@pytest.mark.timeout(900)
def test_whatever_is_killed_every_row_is_there_once(tmp_path: Path) -> None:
    with Field(tmp_path) as field:
        outcomes = [field.run(case) for case in IN_CI]
    assert all(outcome.is_good for outcome in outcomes), f"\n{table(outcomes)}"


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_every_point_is_survived(tmp_path: Path) -> None:
    with Field(tmp_path) as field:
        outcomes = [field.run(case) for case in sorted(all_cases(), key=lambda case: case.master)]
    assert all(outcome.is_good for outcome in outcomes), f"\n{table(outcomes)}"


def test_the_runs_that_are_chosen_cover_every_case_before_any_twice() -> None:
    cases = all_cases()
    assert len(set(cases)) == len(cases)
    assert sorted(chosen(len(cases), seed=7)) == sorted(cases)
    assert len(chosen(200, seed=7)) == 200
