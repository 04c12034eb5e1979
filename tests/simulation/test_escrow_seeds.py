"""Random simulations with network failures, dying clients, crashes, disk faults and clock jumps.

ESCROWMQ_SEEDS sets the number of runs. A failure names its seed; ESCROWMQ_SEED=… repeats that run.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.simulation.escrow_simulation import run_random

SEEDS = int(os.environ.get("ESCROWMQ_SEEDS", "120"))
ONLY_SEED = os.environ.get("ESCROWMQ_SEED")
BLOCKS = 20

PRINT_RUN = """
from tests.simulation.escrow_simulation import run_random

simulation = run_random(11)
print(*simulation.disk.trace, sep="\\n")
print(simulation.model.reported_states, simulation.clock.now_ms())
"""


@pytest.mark.slow
@pytest.mark.both_paths
@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_random_simulation_violates_no_rule_of_the_model(block: int) -> None:
    seeds = list(range(SEEDS))[block::BLOCKS] if ONLY_SEED is None else [int(ONLY_SEED)]
    for seed in seeds:
        try:
            run_random(seed)
        except AssertionError as error:
            raise AssertionError(f"SEED={seed}: {error}") from error


@pytest.mark.slow
def test_a_seed_determines_the_run_in_every_process() -> None:
    # The hash seed changes the order of sets of strings, as it is from process to process.
    runs = [
        subprocess.run(
            [sys.executable, "-c", PRINT_RUN],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "3")
    ]
    assert runs[0].count("\n") > 100
    assert runs[0] == runs[1]
