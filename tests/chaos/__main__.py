"""The command line of a chaos run, which `make chaos` calls."""

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

_FLUSH_MODES = {"sync": "SYNC_FLUSH", "async": "ASYNC_FLUSH"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--minutes", type=float, default=1.0, help="duration of the faults [1]")
    parser.add_argument("--seed", type=int, help="seed of an earlier run, to repeat its faults")
    parser.add_argument(
        "--kills", type=int, default=0, help="kill the broker so often, instead of other faults"
    )
    parser.add_argument(
        "--flush",
        choices=["seed", *_FLUSH_MODES, "both"],
        default="seed",
        help="the flush mode; `seed` lets the seed choose, `both` runs once in each [seed]",
    )
    parser.add_argument(
        "--request-path",
        choices=["seed", "native", "python"],
        default="seed",
        help="how the broker handles requests; `seed` lets the seed choose [seed]",
    )
    arguments = parser.parse_args()
    request_path = "" if arguments.request_path == "seed" else arguments.request_path
    seed = random.randrange(10_000) if arguments.seed is None else arguments.seed
    print_progress(f"seed {seed}")
    logging.getLogger("escrowmq").setLevel(logging.CRITICAL)  # the clients log every fault
    modes = list(_FLUSH_MODES) if arguments.flush == "both" else [arguments.flush]
    violations = 0
    for mode in modes:
        with tempfile.TemporaryDirectory(prefix="escrowmq-chaos-") as name:
            report = asyncio.run(
                run(
                    Path(name),
                    seconds=arguments.minutes * 60,
                    seed=seed,
                    flush_mode=_FLUSH_MODES.get(mode, ""),
                    request_path=request_path,
                    kills=arguments.kills,
                )
            )
        sys.stdout.write(f"{report}\n")
        sys.stdout.flush()
        violations += len(report.violations)
    return 1 if violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
