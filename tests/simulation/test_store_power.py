"""Cut the power at every disk call of a scenario in turn, recover and check.

SQLite is tested in the same way: cut at the n-th call, for n = 1, 2, 3 … until a run completes. The
other tests cut a second time at every call of the recovery, or run random scenarios.

In CI a cut at any call leaves a mixture of old and new sectors; at every second call also nothing
of what was not durable, and at the others all of it. ESCROWMQ_SEEDS makes a long run: every call
with every survival, and this number of random scenarios. A failure names its seed.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from random import Random

import pytest

from escrowmq.config import StoreConfig
from escrowmq.store import checkpoint
from escrowmq.testing import FaultyDisk, PowerCut
from escrowmq.testing.disks import Survival
from tests.simulation.store_run import SETTINGS, StoreRun
from tests.support.stores import NOW_MS, assert_clean, open_store, sample

SEEDS = int(os.environ.get("ESCROWMQ_SEEDS", "200"))
IS_LONG_RUN = "ESCROWMQ_SEEDS" in os.environ
# The first call at which to cut, the distance to the next, and how many mixtures to try.
CALLS_TO_CUT: dict[Survival, tuple[int, int, int]] = {
    "none": (1, 1, 1) if IS_LONG_RUN else (1, 2, 1),
    "all": (1, 1, 1) if IS_LONG_RUN else (2, 2, 1),
    "mixed": (1, 1, 3) if IS_LONG_RUN else (1, 1, 1),
}


def run_with_power_cut(power_cut_at: int) -> tuple[StoreRun, bool]:
    """Run the fixed scenario with a power cut at a call. Return also whether it completed."""
    run = StoreRun(Random(1), FaultyDisk(seed=power_cut_at, power_cut_at=power_cut_at))
    try:
        run.run_scenario()
    except PowerCut:
        return run, False
    return run, True


def check_after_power_cut(run: StoreRun, seed: int, survival: Survival) -> None:
    """Open what a power cut leaves, check it, and go on with it."""
    run_after_cut = run.after_crash(Random(seed), run.disk.power_cut(Random(seed), survival))
    run_after_cut.open()
    run_after_cut.check()
    run_after_cut.append([10, 20])
    run_after_cut.close()
    run_after_cut.open()
    run_after_cut.check()


@pytest.mark.slow
@pytest.mark.both_paths
@pytest.mark.parametrize("survival", ["none", "all", "mixed"])
def test_a_power_cut_at_any_call_loses_nothing_durable(survival: Survival) -> None:
    first, distance, mixtures = CALLS_TO_CUT[survival]
    for power_cut_at in itertools.count(first, distance):
        run, is_complete = run_with_power_cut(power_cut_at)
        # Another seed for each call, or a short run would tear all of them in the same way.
        for seed in range(power_cut_at, power_cut_at + mixtures):
            check_after_power_cut(run, seed, survival)
        if is_complete:
            break
    assert power_cut_at > 100


@pytest.mark.slow
def test_a_power_cut_loses_nothing_durable_if_queues_are_flushed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint, "QUEUES_SYNCED_AT_ONCE_MIN", 2)
    for power_cut_at in itertools.count(1, 1 if IS_LONG_RUN else 3):
        run, is_complete = run_with_power_cut(power_cut_at)
        check_after_power_cut(run, power_cut_at, "mixed")
        if is_complete:
            break
    assert power_cut_at > 100


@pytest.mark.slow
def test_a_power_cut_during_recovery_loses_nothing_durable() -> None:
    for power_cut_at in range(5, 400, 5 if IS_LONG_RUN else 53):
        run, is_complete = run_with_power_cut(power_cut_at)
        if is_complete:
            break
        for second_cut in itertools.count(1):
            disk = run.disk.power_cut(Random(power_cut_at), "mixed")
            disk.power_cut_at = second_cut
            run_after_cut = run.after_crash(Random(second_cut), disk)
            try:
                run_after_cut.open()
            except PowerCut:
                disk_after_second_cut = disk.power_cut(Random(second_cut), "mixed")
                run_after_cut.crash(disk_after_second_cut)
                run_after_cut.open()
                run_after_cut.check()
            else:
                disk.power_cut_at = None
                run_after_cut.check()
                break


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_a_random_run_with_power_cuts_loses_nothing_durable(block: int) -> None:
    for seed in range(block, SEEDS, 10):
        try:
            run_and_crash(seed, ("none", "all", "mixed", "mixed"), SETTINGS)
        except AssertionError as error:
            raise AssertionError(f"SEED={seed}: {error}") from error


@pytest.mark.slow
def test_records_with_a_crc_survive_a_drive_that_scrambles_sectors() -> None:
    # Without record CRCs no checksum covers a record's header, so words of it that were never
    # written could not be distinguished from zeros.
    for seed in range(SEEDS):
        try:
            run_and_crash(seed, ("scrambled",), replace(SETTINGS, sealed=True))
        except AssertionError as error:
            raise AssertionError(f"SEED={seed}: {error}") from error


def run_and_crash(seed: int, survivals: tuple[Survival, ...], settings: StoreConfig) -> None:
    rng = Random(seed)
    run = StoreRun(rng, FaultyDisk(seed=seed), settings=settings)
    for _ in range(rng.randint(1, 5)):
        run.disk.power_cut_at = run.disk.calls + rng.randint(1, 120)
        try:
            run.open()
            run.check()
            while True:
                run.run_random_step()
        except PowerCut:
            run.crash(run.disk.power_cut(rng, rng.choice(survivals)))
    run.open()
    run.check()


def test_a_record_after_the_torn_end_is_never_recovered() -> None:
    # The second of three records is torn, and the third is complete. If recovery did not overwrite
    # the end with zeros, the third would be found again after a new second record of the same
    # length.
    disk = FaultyDisk()
    store = open_store(disk, SETTINGS)
    first, second, third, new_second = (
        sample(0, body=letter * 700) for letter in (b"1", b"2", b"3", b"4")
    )
    store.append([first], now_ms=NOW_MS)
    store.checkpoint()
    torn_offset = store.end
    store.append([second, third], now_ms=NOW_MS)
    store.abandon()
    disk = disk.power_cut(Random(0), "all")  # only a power cut leaves holes
    file = disk.open("commitlog/00000000000000000000")
    file.write_at(torn_offset + 100, b"\0" * 8)
    file.sync()
    store = open_store(disk, SETTINGS)
    assert [record.body for record in store.records()] == [first.body]
    store.append([new_second], now_ms=NOW_MS)
    store.abandon()
    store = open_store(disk, SETTINGS)
    assert [record.body for record in store.records()] == [first.body, new_second.body]
    store.close()
    assert_clean(disk, SETTINGS)
