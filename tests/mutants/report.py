"""The report of the planted mistakes, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.mutants.selection import Mutant


class Verdict(StrEnum):
    """Whether the tests noticed a mistake."""

    NOTICED = "noticed"
    TIMED_OUT = "timed out"
    SURVIVED = "survived"
    NOT_COVERED = "not covered"


@dataclass(frozen=True, slots=True)
class Trial:
    """A planted mistake and its verdict. No test runs for a mistake that is not covered."""

    mutant: Mutant
    verdict: Verdict
    tests_covering: int = 0
    tests_chosen: int = 0
    noticed_by: str | None = None

    @property
    def is_noticed(self) -> bool:
        """Return whether a test failed or hung."""
        return self.verdict in (Verdict.NOTICED, Verdict.TIMED_OUT)


def table(trials: Sequence[Trial]) -> str:
    """Return a table of the counts per package, and every mistake that was not noticed."""
    by_package = {trial.mutant.package: Counter[str]() for trial in trials}
    for trial in trials:
        by_package[trial.mutant.package] += _counts(trial)
    total = sum(by_package.values(), Counter[str]())
    width = max(len("package"), *map(len, by_package), 0)
    rows = [*sorted(by_package.items()), ("total", total)]
    lines = [f"{'package':{width}}  planted  noticed  survived  not covered"]
    for package, counts in rows:
        lines.append(
            f"{package:{width}}  {counts['planted']:7}  {counts['noticed']:7}"
            f"  {counts[Verdict.SURVIVED]:8}  {counts[Verdict.NOT_COVERED]:11}"
        )
    if total[Verdict.TIMED_OUT]:
        lines.append(f"{total[Verdict.TIMED_OUT]} of the noticed mistakes made a test time out.")
    for trial in trials:
        if not trial.is_noticed:
            lines += ["", _headline(trial)]
            lines += [f"  - {trial.mutant.old_line}", f"  + {trial.mutant.new_line}"]
    return "\n".join(lines)


def as_json(trials: Sequence[Trial], *, seed: int, tests: Sequence[str]) -> dict[str, object]:
    """Return the report as JSON values, with the test that noticed each mistake."""
    return {
        "seed": seed,
        "tests": list(tests),
        "mutants": [
            {
                "package": trial.mutant.package,
                "file": trial.mutant.path,
                "line": trial.mutant.mutation.line,
                "operator": trial.mutant.mutation.operator,
                "old": trial.mutant.old_line,
                "new": trial.mutant.new_line,
                "verdict": trial.verdict,
                "tests_covering": trial.tests_covering,
                "tests_chosen": trial.tests_chosen,
                "noticed_by": trial.noticed_by,
            }
            for trial in trials
        ],
    }


def _counts(trial: Trial) -> Counter[str]:
    counts = Counter[str](planted=1)
    counts[trial.verdict] = 1
    counts["noticed"] = int(trial.is_noticed)
    return counts


def _headline(trial: Trial) -> str:
    where, operator = trial.mutant.where, trial.mutant.mutation.operator
    if trial.verdict is Verdict.NOT_COVERED:
        return f"{where}: not covered ({operator})"
    test_counts = f"{trial.tests_chosen} of {trial.tests_covering} covering tests ran"
    return f"{where}: survived ({operator}; {test_counts})"
