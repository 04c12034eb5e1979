"""Random runs of a whole world: network failures, dying clients, crashes, disk faults, clock jumps.

ESCROWMQ_SEEDS sets the number of runs. A failure names its seed; ESCROWMQ_SEED=… repeats that one.
"""

from __future__ import annotations

import os

import pytest

from tests.simulation.escrow_world import live

SEEDS = int(os.environ.get("ESCROWMQ_SEEDS", "200"))
ONLY = os.environ.get("ESCROWMQ_SEED")
BLOCKS = 20


@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_runs_of_a_world(block: int) -> None:
    seeds = range(block, SEEDS, BLOCKS) if ONLY is None else range(int(ONLY), int(ONLY) + 1)
    for seed in seeds:
        try:
            live(seed)
        except AssertionError as error:
            raise AssertionError(f"SEED={seed}: {error}") from error


@pytest.mark.slow
def test_a_seed_determines_the_run() -> None:
    one, other = live(11), live(11)
    assert one.disk.trace == other.disk.trace
    assert one.truth.told == other.truth.told
    assert one.clock.now_ms() == other.clock.now_ms()
