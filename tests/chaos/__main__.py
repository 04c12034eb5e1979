"""The command line of a chaos run; `make chaos MINUTES=… SEED=…` calls it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import tempfile
from pathlib import Path

from tests.chaos.faults import say
from tests.chaos.run import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--minutes", type=float, default=1.0, help="of faults [1]")
    parser.add_argument("--seed", type=int, help="of an earlier run, to see it again")
    given = parser.parse_args()
    seed = random.randrange(10_000) if given.seed is None else given.seed
    say(f"seed {seed}")
    logging.getLogger("escrowmq").setLevel(logging.CRITICAL)  # clients complain, as they should
    with tempfile.TemporaryDirectory(prefix="escrowmq-chaos-") as name:
        report = asyncio.run(run(Path(name), seconds=given.minutes * 60, seed=seed))
    sys.stdout.write(f"{report}\n")
    return 1 if report.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
