"""A process is killed with SIGKILL during an exactly-once stream: no row is lost or duplicated.

`make spark-crash` goes through all points. CI takes three that differ most: a task whose halves are
parked, the broker just before the decision, and the driver when the decision is sent and its result
is not known.
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
    Case("worker", "write-parked"),
    Case("broker", "decide-before"),
    Case("driver", "decide-sent"),
]
DRIVER_CASES = [
    Case("driver", "write-parked"),
    Case("driver", "decide-after"),
    Case("freeze", "decide-before"),
]


@pytest.mark.timeout(1800)
def test_every_row_is_stored_once_after_a_kill_at_three_points(tmp_path: Path) -> None:
    assert_cases_survive(IN_CI, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_every_row_is_stored_once_after_a_driver_is_killed_or_frozen(tmp_path: Path) -> None:
    assert_cases_survive(DRIVER_CASES, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_every_row_is_stored_once_after_a_kill_at_every_point(tmp_path: Path) -> None:
    assert_cases_survive(sorted(all_cases(), key=lambda case: case.master), tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_foreach_batch_stores_every_row_once_after_processes_are_killed(tmp_path: Path) -> None:
    assert_cases_survive([*IN_CI, *DRIVER_CASES], tmp_path, is_foreach_batch=True)


def assert_cases_survive(
    cases: list[Case], directory: Path, *, is_foreach_batch: bool = False
) -> None:
    with CrashHarness(directory, is_foreach_batch=is_foreach_batch) as harness:
        outcomes = [outcome for chain in chains(cases) for outcome in harness.run(chain)]
    assert not failures(cases, outcomes), f"\n{table(outcomes)}"


def test_chains_contain_every_case_and_end_where_a_driver_is_frozen() -> None:
    case_chains = chains(select_cases(200, seed=7))
    assert [case for chain in case_chains for case in chain] == select_cases(200, seed=7)
    for chain in case_chains:
        assert len({case.master for case in chain}) == 1
        assert all(case.victim != "freeze" for case in chain[:-1])


def test_chosen_cases_cover_every_case_before_one_is_repeated() -> None:
    cases = all_cases()
    assert len(set(cases)) == len(cases)
    assert sorted(select_cases(len(cases), seed=7)) == sorted(cases)
    assert len(select_cases(200, seed=7)) == 200
    executors = select_cases(12, seed=7, only=["executor"])
    assert {case.master for case in executors} == {CLUSTER}
    assert sorted(executors) == sorted(executors[:6] * 2)


def test_an_attempt_without_a_kill_is_reported_and_does_not_count() -> None:
    case = Case("driver", "decide-sent")
    missed, hit = (Outcome(case, fired, 0, 0, 0, "done") for fired in (False, True))
    assert failures([case], [missed, hit]) == []
    assert len(failures([case], [missed])) == 1
    assert len(failures([case, case], [missed, hit])) == 1
    damaged = Outcome(case, True, 1, 2, 3, "done")
    assert len(failures([case], [hit, damaged])) == 1
    assert len(failures([case], [hit, Outcome(case, True, 0, 0, 0, "failed: reason")])) == 1
    row = table([missed, hit, damaged]).splitlines()[1]
    assert row.split() == ["driver", "decide-sent", "2", "3", "1", "2", "3"]


def test_a_kill_that_hit_no_process_does_not_count() -> None:
    chain = [Case("driver", "read-plan"), Case("worker", "read-plan"), Case("driver", "write-end")]
    watched = Observations("done", Counter(driver=1), Counter())
    outcomes = outcomes_of(chain, [True] * 3, Counter({0: 4, 1: 1}), Counter({4: 2}), watched)
    assert [outcome.fired for outcome in outcomes] == [False, True, False]
    counts = [(outcome.lost, outcome.doubled) for outcome in outcomes]
    assert counts == [(5, 0), (0, 0), (0, 2)]
