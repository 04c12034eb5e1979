"""The command line of the crash runs."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.spark_crash.runs import Field, Outcome, chains, chosen, table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.spark_crash")
    parser.add_argument("--runs", type=int, default=52)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="a part of VICTIM POINT, like 'broker decide'")
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="spark-crash-") as name, Field(Path(name)) as field:
        cases = [
            case
            for case in chosen(arguments.runs, arguments.seed)
            if arguments.only in f"{case.victim} {case.point}"
        ]
        for chain in chains(cases):
            began_s = time.monotonic()
            outcomes += field.run(chain)
            sys.stderr.write(f"{len(outcomes)}/{len(cases)} {time.monotonic() - began_s:.0f} s\n")
            for outcome in outcomes[-len(chain) :]:
                sys.stderr.write(f"    {outcome}\n")
    bad = sum(not outcome.is_good for outcome in outcomes)
    sys.stdout.write(f"{table(outcomes)}\n{len(outcomes)} runs, {bad} bad\n")
    return 1 if bad or not outcomes else 0


if __name__ == "__main__":
    raise SystemExit(main())
