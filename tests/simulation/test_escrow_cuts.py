"""Cut the power at every write and flush of a fixed scenario in turn, and continue.

The scenario parks and decides in all ways: single halves, groups, decisions in pieces, writers that
replace each other, an operator, transactions without a verdict. It has checkpoints, snapshots,
expiry, a kill and a stop. After the power cut the broker starts again and decides all that is open.
`escrow_model.py` defines what must hold at every step, at every start, and at the end.

In CI a cut at any write or flush leaves a mixture of old and new sectors; at every fourth flush
also nothing, and at every fourth write everything. A long run (ESCROWMQ_SEEDS) cuts at every disk
call with every survival.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

import pytest

from escrowmq.testing.disks import Survival
from tests.simulation.escrow_broker import BrokerProcess
from tests.simulation.escrow_simulation import Simulation

BLOCKS = 8
IS_LONG_RUN = "ESCROWMQ_SEEDS" in os.environ
SURVIVALS: list[Survival] = ["none", "all", "mixed"]
SEED = 1

# The disk calls at which the power is cut. If nothing survives, cutting at a flush loses all the
# writes before it, too. If everything survives, only a write can be torn.
ALL_CALLS = ("write_at", "sync", "resize", "create", "rename", "remove")
CALLS_TO_CUT: dict[Survival, tuple[str, ...]] = {
    "none": ALL_CALLS if IS_LONG_RUN else ("sync",),
    "all": ALL_CALLS if IS_LONG_RUN else ("write_at",),
    "mixed": ALL_CALLS if IS_LONG_RUN else ("write_at", "sync"),
}
# Of these calls, every n-th.
STRIDES: dict[Survival, int] = {} if IS_LONG_RUN else {"none": 4, "all": 4}


def scenario(simulation: Simulation) -> Iterator[None]:
    """Run the fixed scenario. Yield after every step, so that the caller can stop."""
    first, second = simulation.producers
    simulation.run(3)
    first.begin()
    first.begin(end_mode="one way")
    second.begin(commits=False)
    second.begin(end_mode="contradicted")
    first.begin(3)
    second.begin(4, size=300)  # larger than one piece of a decision
    second.begin(2, commits=False)
    simulation.start_writer("w0", batches=1)
    yield from run_steps(simulation, 9)
    simulation.maintain(BrokerProcess.begin_checkpoint)
    first.begin(4, size=300, end_mode="never")
    second.begin(end_mode="never")
    simulation.start_writer("w0", batches=1)  # replaces a driver that is still running
    yield from run_steps(simulation, 4)
    simulation.maintain(BrokerProcess.finish_checkpoint)
    simulation.maintain(BrokerProcess.save_snapshot)
    first.die()  # its transactions are checked with other producers
    yield from run_steps(simulation, 14)
    simulation.ignores_checks = True
    second.begin(end_mode="never")
    second.begin(end_mode="never")
    second.begin(2, end_mode="never")
    yield from run_steps(simulation, 45)  # until halves are stranded, and resumed by the operator
    for _ in range(3):
        simulation.maintain(BrokerProcess.begin_checkpoint)
        simulation.maintain(BrokerProcess.finish_checkpoint)
        simulation.maintain(BrokerProcess.expire)  # moves open halves, then deletes a segment
        yield from run_steps(simulation, 1)
    simulation.attempt(simulation.kill)
    yield from run_steps(simulation, 6)
    simulation.ignores_checks = False
    yield from run_steps(simulation, 10)
    simulation.maintain(BrokerProcess.save)
    simulation.maintain(BrokerProcess.save_snapshot)
    simulation.attempt(simulation.stop)
    yield from run_steps(simulation, 4)


def run_steps(simulation: Simulation, count: int) -> Iterator[None]:
    for _ in range(count):
        simulation.step()
        yield


def run_scenario(survival: Survival = "none", power_cut_at: int | None = None) -> Simulation:
    """Run the scenario up to the power cut, and then until everything is decided."""
    with Simulation(SEED) as simulation:
        simulation.survivals = (survival,)
        simulation.disk.power_cut_at = power_cut_at
        simulation.checks_disk = power_cut_at is None  # before the power cut it is always the same
        for _ in scenario(simulation):
            if simulation.power_cut_count:
                break
        simulation.run_until_idle()
    return simulation


@functools.cache
def calls_to_cut(survival: Survival, request_path: str) -> list[int]:
    """Return the numbers of the disk calls of the scenario at which to cut the power.

    `request_path` is that of the test, and only distinguishes the results.
    """
    with Simulation(SEED) as simulation:
        simulation.checks_disk = False
        for _ in scenario(simulation):
            pass
    kinds = CALLS_TO_CUT[survival]
    calls = [
        number for number, call in enumerate(simulation.disk.trace, 1) if call.startswith(kinds)
    ]
    return calls[:: STRIDES.get(survival, 1)]


@pytest.mark.both_paths
def test_the_scenario_covers_all_kinds_of_decisions(request_path: str) -> None:
    simulation = run_scenario()
    model = simulation.model
    assert sorted(set(model.reported_states.values())) == ["committed", "rolled_back"]
    assert model.resumed, "no half was stranded and resumed"
    assert max(model.check_counts.values()) > 1
    assert len(model.winners) >= 2
    assert simulation.process is not None
    assert simulation.process.store.begin > 0, "no segment has expired"
    assert len(calls_to_cut("mixed", request_path)) > 150


@pytest.mark.slow
@pytest.mark.both_paths
@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("survival", SURVIVALS)
def test_a_power_cut_at_any_write_or_flush_loses_nothing(
    survival: Survival, block: int, request_path: str
) -> None:
    for call in calls_to_cut(survival, request_path)[block::BLOCKS]:
        try:
            run_scenario(survival, power_cut_at=call)
        except AssertionError as error:
            raise AssertionError(f"power cut at call {call}, {survival}: {error}") from error
