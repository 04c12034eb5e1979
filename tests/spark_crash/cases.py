"""Which process is killed at which point, in which order, and with which outcome.

A chain of runs is one query: a process is killed in each of its epochs, except the first and the
last. A lost or duplicate row belongs to an epoch, and so to a run.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tests.spark_crash.job import is_taken_over
from tests.spark_crash.points import DRIVER, POINTS, READ, TASK

LOCAL: Final = "local[2,3]"
CLUSTER: Final = "local-cluster[2,1,512]"
CHAIN_MAX: Final = 12
FREEZES: Final = ("write-parked", "commit-begin", "decide-before")


@dataclass(frozen=True, order=True)
class Case:
    """A process to kill (or a driver to freeze), and the point where it happens."""

    victim: str
    point: str

    @property
    def master(self) -> str:
        return CLUSTER if self.victim == "executor" else LOCAL

    def __str__(self) -> str:
        return f"{self.victim} {self.point}"


def all_cases() -> list[Case]:
    return [
        *(Case("driver", point) for point in POINTS),
        *(Case("worker", point) for point in POINTS),
        *(Case("executor", point) for point in (READ[-1], *TASK)),
        *(Case("broker", point) for point in (*TASK, *DRIVER)),
        *(Case("freeze", point) for point in FREEZES),
    ]


def select_cases(count: int, seed: int, only: Sequence[str] = ()) -> list[Case]:
    """Return `count` cases: all of them in random order, repeated, grouped by master.

    `only` restricts them to those whose victim and point contain one of these texts.
    """
    cases = [case for case in all_cases() if not only or any(text in str(case) for text in only)]
    random.Random(seed).shuffle(cases)
    return sorted(itertools.islice(itertools.cycle(cases), count), key=lambda case: case.master)


def chains(cases: Iterable[Case], max_length: int = CHAIN_MAX) -> list[list[Case]]:
    """Split the cases into as few chains as possible, in order.

    A freeze ends its chain, because another driver completes the query meanwhile.
    """
    result: list[list[Case]] = []
    for case in cases:
        last = result[-1] if result else []
        is_full = len(last) == max_length or (last and last[-1].victim == "freeze")
        if not last or is_full or last[-1].master != case.master:
            result.append([])
        result[-1].append(case)
    return result


@dataclass(frozen=True)
class Outcome:
    """The outcome of one attempt of a run."""

    case: Case
    fired: bool  # the victim was killed at the point, and its end was observed
    lost: int
    doubled: int
    torn: int  # how often only a part of the epoch was visible
    query_result: str  # of the whole chain: "done" or "failed: reason"

    @property
    def is_failure(self) -> bool:
        return bool(self.lost or self.doubled or self.torn) or not self.is_query_complete

    @property
    def is_query_complete(self) -> bool:
        """Return whether the query is complete, or its driver was frozen and replaced."""
        return self.query_result == "done" or is_taken_over(self.query_result)


def failures(cases: Iterable[Case], outcomes: Sequence[Outcome]) -> list[str]:
    """Return a text for every failed attempt, and for every case that fired too rarely."""
    failed = [f"{outcome.case}: {outcome}" for outcome in outcomes if outcome.is_failure]
    fired = Counter(outcome.case for outcome in outcomes if outcome.fired)
    missing = Counter(cases) - fired
    return [*failed, *(f"{case}: {count} times not reached" for case, count in missing.items())]


def table(outcomes: Iterable[Outcome]) -> str:
    """Return a table with a line for each case. It includes attempts without a kill."""
    outcomes_by_case: dict[Case, list[Outcome]] = {}
    for outcome in outcomes:
        outcomes_by_case.setdefault(outcome.case, []).append(outcome)
    lines = ["killed     at                 fired tries  lost doubled  torn  remarks"]
    lines += [_line(case, group) for case, group in sorted(outcomes_by_case.items())]
    everything = [outcome for group in outcomes_by_case.values() for outcome in group]
    return "\n".join([*lines, _numbers("all", "", everything)])


def _line(case: Case, outcomes: Sequence[Outcome]) -> str:
    remarks = sorted(
        {outcome.query_result[:300] for outcome in outcomes if not outcome.is_query_complete}
    )
    return f"{_numbers(case.victim, case.point, outcomes)}  {'; '.join(remarks)}".rstrip()


def _numbers(first: str, second: str, outcomes: Sequence[Outcome]) -> str:
    fired = sum(outcome.fired for outcome in outcomes)
    lost = sum(outcome.lost for outcome in outcomes)
    doubled = sum(outcome.doubled for outcome in outcomes)
    torn = sum(outcome.torn for outcome in outcomes)
    return f"{first:10} {second:18} {fired:5} {len(outcomes):5} {lost:5} {doubled:7} {torn:5}"
