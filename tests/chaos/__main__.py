"""The command line of a chaos run; `make chaos MINUTES=… SEED=…` calls it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import tempfile
from pathlib import Path

from tests.chaos.faults import print_progress
from tests.chaos.run import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--minutes", type=float, default=1.0, help="duration of the faults [1]")
    parser.add_argument("--seed", type=int, help="seed of an earlier run, to repeat its faults")
    arguments = parser.parse_args()
    seed = random.randrange(10_000) if arguments.seed is None else arguments.seed
    print_progress(f"seed {seed}")
    logging.getLogger("escrowmq").setLevel(logging.CRITICAL)  # the clients log every fault
    with tempfile.TemporaryDirectory(prefix="escrowmq-chaos-") as name:
        report = asyncio.run(run(Path(name), seconds=arguments.minutes * 60, seed=seed))
    sys.stdout.write(f"{report}\n")
    return 1 if report.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
