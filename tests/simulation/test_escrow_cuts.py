"""Cut the power at every write and flush of a fixed scenario in turn, and go on.

The scenario parks and decides in all ways: single halves, groups, pieces, writers that replace each
other, an operator, no answer at all; with checkpoints, snapshots, expiry, a kill and a stop. After
the cut the broker starts again and the world comes to rest. `escrow_truth.py` defines what must
hold at every step, at every start, and at the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from escrowmq.testing.disks import Survival
from tests.simulation.escrow_world import World

BLOCKS = 8
LONG = "ESCROWMQ_SEEDS" in os.environ
SURVIVALS: list[Survival] = ["none", "all", "mixed"]
SEED = 1

# Where to cut, by what survives. If nothing does, a flush loses all that the writes before it
# would; if everything does, only a write is torn. A night tries the rest as well.
EVERYTHING = ("write_at", "sync", "resize", "create", "rename", "remove")
CHANGES: dict[Survival, tuple[str, ...]] = {
    "none": EVERYTHING if LONG else ("sync",),
    "all": EVERYTHING if LONG else ("write_at",),
    "mixed": EVERYTHING if LONG else ("write_at", "sync"),
}


def scenario(world: World) -> Iterator[None]:
    """Yield between steps, so that the caller can stop."""
    one, two = world.producers
    world.run(3)
    one.begin()
    one.begin(how="one way")
    two.begin(commits=False)
    two.begin(how="contradicted")
    one.begin(3)
    two.begin(4, size=300)  # more than goes to the log in one piece
    two.begin(2, commits=False)
    world.begin_writer("w0", batches=1)
    yield from steps(world, 9)
    world.tend("begin_checkpoint")
    one.begin(4, size=300, how="forgotten")
    two.begin(how="forgotten")
    world.begin_writer("w0", batches=1)  # replaces a driver that is still running
    yield from steps(world, 4)
    world.tend("finish_checkpoint")
    world.tend("note")
    one.die()  # its transactions are checked with other producers
    yield from steps(world, 14)
    world.is_silent = True
    two.begin(how="forgotten")
    two.begin(how="forgotten")
    two.begin(2, how="forgotten")
    yield from steps(world, 45)  # checked too often: stranded, then resumed by an operator
    for _ in range(3):
        world.tend("begin_checkpoint")
        world.tend("finish_checkpoint")
        world.tend("expire")  # open halves move, then the oldest segment is deleted
        yield from steps(world, 1)
    world.doing(world.kill)
    yield from steps(world, 6)
    world.is_silent = False
    yield from steps(world, 10)
    world.tend("save")
    world.tend("note")
    world.doing(world.stop)
    yield from steps(world, 4)


def steps(world: World, count: int) -> Iterator[None]:
    for _ in range(count):
        world.step()
        yield


def played(survival: Survival = "none", cut_at: int | None = None) -> World:
    """Run the scenario up to the cut, and then let the world come to rest."""
    with World(SEED) as world:
        world.survivals = (survival,)
        world.disk.power_cut_at = cut_at
        world.judges_disk = cut_at is None  # up to the cut it is always the same
        for _ in scenario(world):
            if world.cuts:
                break
        world.rest()
    return world


def calls_to_cut(survival: Survival) -> list[int]:
    """Return the numbers of the disk calls that change something."""
    with World(SEED) as world:
        world.judges_disk = False
        for _ in scenario(world):
            pass
    kinds = CHANGES[survival]
    return [at for at, call in enumerate(world.disk.trace, 1) if call.startswith(kinds)]


def test_the_scenario_covers_everything() -> None:
    world = played()
    truth = world.truth
    assert sorted(set(truth.told.values())) == ["committed", "rolled_back"]
    assert truth.again, "nobody was stranded and resumed"
    assert max(truth.asked.values()) > 1
    assert len(truth.winners) >= 2
    assert world.process is not None
    assert world.process.store.begin > 0, "no file has expired"
    assert len(calls_to_cut("mixed")) > 150


@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("survival", SURVIVALS)
def test_power_cut_at_every_write_and_flush(survival: Survival, block: int) -> None:
    for cut_at in calls_to_cut(survival)[block::BLOCKS]:
        try:
            played(survival, cut_at)
        except AssertionError as error:
            raise AssertionError(f"CUT={cut_at} {survival}: {error}") from error
