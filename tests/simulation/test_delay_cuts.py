"""Cut the power at every write and flush of a scenario with delayed messages, in both flush modes.

Nothing that was promised is lost, and nothing is delivered twice: levels, timers, retries, and
committed delayed transactions. `delay_run.py` has the scenario and the model.

In CI every write is cut with a mixture of old and new sectors, every flush with nothing that
survives, and every second write with everything, all of the files that cannot be rebuilt. A long
run (ESCROWMQ_SEEDS) cuts at every disk call with every survival.
"""

from __future__ import annotations

import functools
import os

import pytest

from escrowmq.testing.disks import Survival
from tests.simulation.delay_run import run_scenario

BLOCKS = 4
IS_LONG_RUN = "ESCROWMQ_SEEDS" in os.environ
SURVIVALS: list[Survival] = ["none", "all", "mixed"]
ALL_CALLS = ("write_at", "sync", "resize", "create", "rename", "remove")
# As in test_escrow_cuts.py: calls at which a cut can make a difference. A long run cuts at all.
CALLS_TO_CUT: dict[Survival, tuple[str, ...]] = {
    "none": ALL_CALLS if IS_LONG_RUN else ("sync", "rename"),
    "all": ALL_CALLS if IS_LONG_RUN else ("write_at", "rename"),
    "mixed": ALL_CALLS if IS_LONG_RUN else ("write_at",),
}
# Files that recovery rebuilds; test_store_power.py cuts the power there. A long run does so too.
DERIVED = ("index", "consumequeue", "escrowmq.redo")


@functools.cache
def calls_to_cut(survival: Survival, *, sync: bool) -> list[int]:
    _, calls = run_scenario(survival, sync=sync)
    kinds = CALLS_TO_CUT[survival]
    numbers = [
        number
        for number, call in calls.items()
        if call.startswith(kinds) and (IS_LONG_RUN or not call.split()[1].startswith(DERIVED))
    ]
    return numbers[:: 2 if survival == "all" and not IS_LONG_RUN else 1]


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_the_scenario_delivers_in_every_way(sync: bool) -> None:
    run, _ = run_scenario("none", sync=sync)
    assert run.power_cuts == 0
    keys = {key for _, key in run.promised}
    assert {"level-1", "timer-long", "tx-level", "tx-timer", "group-2", "fails-1"} <= keys
    assert run.moved_count, "no message was moved out of an expired segment"


@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("survival", SURVIVALS)
@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_a_power_cut_at_any_write_or_flush_loses_and_repeats_nothing(
    sync: bool, survival: Survival, block: int
) -> None:
    for call in calls_to_cut(survival, sync=sync)[block::BLOCKS]:
        try:
            run, _ = run_scenario(survival, sync=sync, power_cut_at=call)
        except AssertionError as error:
            raise AssertionError(f"power cut at call {call}, {survival}: {error}") from error
        assert run.power_cuts == 1
