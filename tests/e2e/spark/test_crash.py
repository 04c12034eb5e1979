"""Something is killed with -9 in the middle of an exactly-once stream: no row lost, none doubled.

A dozen points of the many that `make spark-crash` goes through, chosen for what they have in common
with the rest: before and after the decision, in a task, in the broker, in the driver. A driver that
is killed is another start of Java, so there is one; it dies where it does not know what it decided.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.spark_crash.cases import (
    CLUSTER,
    Case,
    Outcome,
    all_cases,
    chains,
    failures,
    select_cases,
    table,
)
from tests.spark_crash.runs import CrashHarness, Observations, outcomes_of

IN_CI = [
    Case("worker", "read-task"),
    Case("worker", "write-registered"),
    Case("broker", "write-parked-one"),
    Case("worker", "write-parked"),
    Case("broker", "write-end"),
    Case("worker", "commit-begin"),
    Case("broker", "decide-before"),
    Case("worker", "decide-sent"),
    Case("driver", "decide-sent"),
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
    survives(IN_CI, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_driver_is_killed_or_frozen_and_every_row_is_there_once(tmp_path: Path) -> None:
    survives(WITH_MORE_DRIVERS, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_every_point_is_survived(tmp_path: Path) -> None:
    survives(sorted(all_cases(), key=lambda case: case.master), tmp_path)


def survives(cases: list[Case], directory: Path) -> None:
    with CrashHarness(directory) as field:
        outcomes = [outcome for chain in chains(cases) for outcome in field.run(chain)]
    assert not failures(cases, outcomes), f"\n{table(outcomes)}"


def test_chains_hold_every_run_and_end_where_a_driver_was_frozen() -> None:
    made = chains(select_cases(200, seed=7))
    assert [case for chain in made for case in chain] == select_cases(200, seed=7)
    for chain in made:
        assert len({case.master for case in chain}) == 1
        assert all(case.victim != "freeze" for case in chain[:-1])


def test_the_runs_that_are_chosen_cover_every_case_before_any_twice() -> None:
    cases = all_cases()
    assert len(set(cases)) == len(cases)
    assert sorted(select_cases(len(cases), seed=7)) == sorted(cases)
    assert len(select_cases(200, seed=7)) == 200
    executors = select_cases(12, seed=7, only=["executor"])
    assert {case.master for case in executors} == {CLUSTER}
    assert sorted(executors) == sorted(executors[:6] * 2)


def test_a_try_without_a_kill_is_told_of_and_does_not_count() -> None:
    case = Case("driver", "decide-sent")
    missed, hit = (Outcome(case, fired, 0, 0, 0, "done") for fired in (False, True))
    assert failures([case], [missed, hit]) == []
    assert len(failures([case], [missed])) == 1
    assert len(failures([case, case], [missed, hit])) == 1
    harm = Outcome(case, True, 1, 2, 3, "done")
    assert len(failures([case], [hit, harm])) == 1
    assert len(failures([case], [hit, Outcome(case, True, 0, 0, 0, "failed: why")])) == 1
    line = table([missed, hit, harm]).splitlines()[1]
    assert line.split() == ["driver", "decide-sent", "2", "3", "1", "2", "3"]


def test_a_shot_that_missed_is_no_kill() -> None:
    chain = [Case("driver", "read-plan"), Case("worker", "read-plan"), Case("driver", "write-end")]
    seen = Observations("done", Counter(driver=1), Counter())
    made = outcomes_of(chain, [True] * 3, Counter({0: 4, 1: 1}), Counter({4: 2}), seen)
    assert [one.fired for one in made] == [False, True, False]
    assert [(one.lost, one.doubled) for one in made] == [(5, 0), (0, 0), (0, 2)]
