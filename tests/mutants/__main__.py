"""The command line of the mutation tests. `make mutants COUNT=… SEED=… PACKAGES="…"` runs it."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.mutants.coverage_map import CoverageMap, PytestDidNotRun, coverage_map
from tests.mutants.report import Trial, Verdict, as_json, table
from tests.mutants.selection import Mutant, mutants_of, packages, sample
from tests.mutants.workspace import Workspace, workspace

ROOT: Final = Path(__file__).parents[2]
QUICK_SUITES: Final = ("tests/unit", "tests/property")
SHARE_OF_TIMEOUT: Final = 0.5
"""The part of a mutant's time limit that its tests may take, by their durations with coverage."""
TESTS_FAILED: Final = 1  # exit codes of pytest
NO_TESTS_COLLECTED: Final = 5


def main(argv: Sequence[str] | None = None, *, root: Path = ROOT) -> int:
    """Plant mistakes and print the report. Return the exit code, which is 0 with survivors too."""
    parser = _parser()
    options = parser.parse_args(argv)
    available = packages(root)
    if unknown := set(options.package) - set(available):
        parser.error(
            f"no package {', '.join(sorted(unknown))} in src; there are {', '.join(available)}"
        )
    chosen_packages = options.package or list(available)
    mutants = sample(
        {name: mutants_of(root, name, available[name]) for name in chosen_packages},
        options.count,
        options.seed,
    )
    trials: list[Trial] = []
    try:
        with workspace(root) as space:
            tests_by_line = coverage_map(root, options.tests, space)
            _leave_out_broken(tests_by_line, mutants, space)
            for number, mutant in enumerate(mutants, 1):
                trial = _try(mutant, tests_by_line, space, options)
                trials.append(trial)
                sys.stderr.write(f"{number}/{len(mutants)} {mutant.where}: {trial.verdict}\n")
    except PytestDidNotRun as error:
        sys.stderr.write(f"{error}\nThe tests do not run without a mutant; see the output above.\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("Stopped early.\n")
    sys.stdout.write(f"{table(trials)}\n")
    if options.json:
        report = as_json(trials, seed=options.seed, tests=options.tests)
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=50, help="mistakes to plant [50]")
    parser.add_argument("--seed", type=int, default=1, help="selects the mistakes [1]")
    parser.add_argument(
        "--package", action="append", default=[], help="a package of src, can be repeated [all]"
    )
    parser.add_argument(
        "--tests", nargs="+", default=list(QUICK_SUITES), help=f"[{' '.join(QUICK_SUITES)}]"
    )
    parser.add_argument(
        "--tests-per-mutant",
        type=int,
        default=500,
        help="run at most this many tests, nearest first [500]",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="time limit of a mutant; a test that hangs has noticed it [60]",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to a file too")
    return parser


def _leave_out_broken(
    tests_by_line: CoverageMap, mutants: Sequence[Mutant], space: Workspace
) -> None:
    """Leave out tests that fail without a mutant, in the recorded run or in another order.

    Such a test would seem to notice every mistake. To save time, only the nearest test of each
    mutant is run again.
    """
    covering = (tests_by_line.covering_tests(mutant) for mutant in mutants)
    nearest = list(dict.fromkeys(tests[0] for tests in covering if tests))
    failing = list(tests_by_line.failed)
    if nearest:
        run = space.run_without_mutant(nearest, tests_by_line.tests)
        if run.exit_code not in (0, TESTS_FAILED):
            raise PytestDidNotRun(run.output)
        failing += run.failed
        tests_by_line.leave_out(run.failed)
    if failing:
        listed = "\n  ".join(failing)
        sys.stderr.write(f"These fail without a mutant and are left out:\n  {listed}\n")


def _try(
    mutant: Mutant, tests_by_line: CoverageMap, space: Workspace, options: argparse.Namespace
) -> Trial:
    covering = tests_by_line.covering_tests(mutant)
    if not covering:
        return Trial(mutant, Verdict.NOT_COVERED)
    chosen = tests_by_line.affordable(
        covering, options.tests_per_mutant, options.seconds * SHARE_OF_TIMEOUT
    )
    with space.planted(mutant):
        run = space.run(chosen, tests_by_line.tests, seed=options.seed, timeout_s=options.seconds)
    if run.exit_code is None:
        verdict = Verdict.TIMED_OUT
    elif run.exit_code in (0, NO_TESTS_COLLECTED):
        verdict = Verdict.SURVIVED
    else:
        verdict = Verdict.NOTICED
    noticed_by = run.failed[0] if run.failed else None
    return Trial(mutant, verdict, len(covering), len(chosen), noticed_by)


if __name__ == "__main__":
    # After SIGTERM, the program still removes the copy and reports the trials so far.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise SystemExit(main())
