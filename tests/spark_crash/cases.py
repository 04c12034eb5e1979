"""Who dies where, in which order, and what came of it.

A chain of runs is one query: in each of its epochs, but the first and the last, somebody dies.
A row that is lost or doubled belongs to an epoch, and so to a run.
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
    """Every case in turn, in an order that the seed says; those of one master together. `only`:
    those whose victim and point contain one of these texts."""
    cases = [case for case in all_cases() if not only or any(text in str(case) for text in only)]
    random.Random(seed).shuffle(cases)
    return sorted(itertools.islice(itertools.cycle(cases), count), key=lambda case: case.master)


def chains(cases: Iterable[Case], longest: int = CHAIN_MAX) -> list[list[Case]]:
    """In their order, as few as can be. Who was frozen finds his query at its end: he is last."""
    made: list[list[Case]] = []
    for case in cases:
        last = made[-1] if made else []
        is_full = len(last) == longest or (last and last[-1].victim == "freeze")
        if not last or is_full or last[-1].master != case.master:
            made.append([])
        made[-1].append(case)
    return made


@dataclass(frozen=True)
class Outcome:
    """Of one try of a run."""

    case: Case
    fired: bool  # somebody was killed there, and it was seen
    lost: int
    doubled: int
    torn: int  # times that somebody looked and saw a part of the epoch
    said: str  # of the chain: what the driver said in the end

    @property
    def did_harm(self) -> bool:
        return bool(self.lost or self.doubled or self.torn) or not self.ended_well

    @property
    def ended_well(self) -> bool:
        """Nothing else may have failed in the end than a driver that was frozen."""
        return self.said == "done" or is_taken_over(self.said)


def failures(cases: Iterable[Case], outcomes: Sequence[Outcome]) -> list[str]:
    """What is wrong: harm in any try, or a point that was not killed at as often as was wanted."""
    wrong = [f"{one.case}: {one}" for one in outcomes if one.did_harm]
    fired = Counter(one.case for one in outcomes if one.fired)
    missing = Counter(cases) - fired
    return [*wrong, *(f"{case}: {count} times not reached" for case, count in missing.items())]


def table(outcomes: Iterable[Outcome]) -> str:
    """A line for each point. Tries without a kill are in it too; no try is left out."""
    rows: dict[Case, list[Outcome]] = {}
    for outcome in outcomes:
        rows.setdefault(outcome.case, []).append(outcome)
    head = "killed     at                 fired tries  lost doubled  torn  remarks"
    lines = [head, *(_line(case, all_of) for case, all_of in sorted(rows.items()))]
    everything = [one for all_of in rows.values() for one in all_of]
    return "\n".join([*lines, _numbers("all", "", everything)])


def _line(case: Case, outcomes: Sequence[Outcome]) -> str:
    remarks = sorted({one.said[:300] for one in outcomes if not one.ended_well})
    return f"{_numbers(case.victim, case.point, outcomes)}  {'; '.join(remarks)}".rstrip()


def _numbers(first: str, second: str, outcomes: Sequence[Outcome]) -> str:
    fired, lost, doubled, torn = (
        sum(getattr(one, name) for one in outcomes) for name in ("fired", "lost", "doubled", "torn")
    )
    return f"{first:10} {second:18} {fired:5} {len(outcomes):5} {lost:5} {doubled:7} {torn:5}"
