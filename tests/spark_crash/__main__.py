"""The command line of the crash runs."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.spark_crash.cases import CHAIN_MAX, Case, Outcome, chains, failures, select_cases, table
from tests.spark_crash.runs import CrashHarness


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.spark_crash")
    parser.add_argument("--runs", type=int, default=45)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end about then")
    parser.add_argument("--chain", type=int, default=CHAIN_MAX, help="most runs of one query")
    parser.add_argument(
        "--only", action="append", default=[], help="a part of VICTIM POINT, like 'broker decide'"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # and cleans up
    cases = select_cases(arguments.runs, arguments.seed, arguments.only)
    with (
        # Who was killed a moment ago may still be writing.
        tempfile.TemporaryDirectory(prefix="spark-crash-", ignore_cleanup_errors=True) as name,
        CrashHarness(Path(name)) as field,
    ):
        return run(field, chains(cases, arguments.chain), arguments.seconds)


def run(field: CrashHarness, wanted: Sequence[Sequence[Case]], seconds: float) -> int:
    """A table in any case; a chain that was cut off is named in it."""
    began_s = time.monotonic()
    cases: list[Case] = []
    outcomes: list[Outcome] = []
    cut_off: Sequence[Case] = ()
    try:
        for chain in wanted:
            if time.monotonic() - began_s > seconds:
                break
            cut_off = chain
            made = field.run(chain)
            cases, outcomes, cut_off = [*cases, *chain], [*outcomes, *made], ()
            sys.stderr.write(f"{len(cases)} runs, {time.monotonic() - began_s:.0f} s\n")
            sys.stderr.writelines(f"    {outcome}\n" for outcome in made)
    finally:
        wrong = failures(cases, outcomes)
        counted = field.counted
        sys.stdout.write(
            f"{table(outcomes)}\n{len(cases)} runs in {time.monotonic() - began_s:.0f} s, "
            f"{len(wrong)} wrong; {field.drivers.started} drivers; {counted['starts']} starts of "
            f"queries, {counted['slow']} in vain, for Python was too slow to start\n"
        )
        sys.stdout.writelines(f"WRONG {text}\n" for text in wrong)
        if cut_off:
            sys.stdout.write(f"cut off: {', '.join(map(str, cut_off))}\n")
        sys.stdout.flush()
    return 1 if wrong or not cases else 0


if __name__ == "__main__":
    raise SystemExit(main())
