"""The command line of the crash runs; `make spark-crash RUNS=… SEED=…` calls it."""

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
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no chain later")
    parser.add_argument("--chain", type=int, default=CHAIN_MAX, help="maximum runs of one query")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        help="a part of VICTIM POINT, like 'broker decide'",
    )
    parser.add_argument(
        "--foreach-batch", action="store_true", help="write with foreach_batch_writer"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # runs the cleanup
    cases = select_cases(arguments.runs, arguments.seed, arguments.only)
    with (
        # A killed process may still be writing for a moment.
        tempfile.TemporaryDirectory(prefix="spark-crash-", ignore_cleanup_errors=True) as name,
        CrashHarness(Path(name), is_foreach_batch=arguments.foreach_batch) as harness,
    ):
        return run(harness, chains(cases, arguments.chain), arguments.seconds)


def run(harness: CrashHarness, case_chains: Sequence[Sequence[Case]], seconds: float) -> int:
    """Run the chains and print the table, also after an exception. Returns the exit code."""
    start_s = time.monotonic()
    cases: list[Case] = []
    outcomes: list[Outcome] = []
    unfinished: Sequence[Case] = ()
    try:
        for chain in case_chains:
            if time.monotonic() - start_s > seconds:
                break
            unfinished = chain
            chain_outcomes = harness.run(chain)
            cases, outcomes, unfinished = [*cases, *chain], [*outcomes, *chain_outcomes], ()
            sys.stderr.write(f"{len(cases)} runs, {time.monotonic() - start_s:.0f} s\n")
            sys.stderr.writelines(f"    {outcome}\n" for outcome in chain_outcomes)
    finally:
        failed = failures(cases, outcomes)
        starts, slow_starts = harness.query_starts["all"], harness.query_starts["slow"]
        sys.stdout.write(
            f"{table(outcomes)}\n{len(cases)} runs in {time.monotonic() - start_s:.0f} s, "
            f"{len(failed)} failures; {harness.drivers.start_count} drivers; {starts} starts of "
            f"queries, {slow_starts} of them failed because Python started too slowly\n"
        )
        sys.stdout.writelines(f"FAILURE {text}\n" for text in failed)
        if unfinished:
            sys.stdout.write(f"unfinished: {', '.join(map(str, unfinished))}\n")
        sys.stdout.flush()
    return 1 if failed or not cases else 0


if __name__ == "__main__":
    raise SystemExit(main())
