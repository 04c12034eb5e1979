"""Let every disk call of a scenario fail in turn, go on, crash, recover and check.

The scenario appends, flushes, makes checkpoints, expires segments and closes the store; opening it
again is part of it. A call fails once (a passing fault) or from then on (a dead disk).
"""

from __future__ import annotations

import itertools
from random import Random

import pytest

from escrowmq.errors import StoreError, StoreFailed, StoreFull
from escrowmq.testing import FaultyDisk
from tests.simulation.store_run import SETTINGS, StoreRun, outcome
from tests.support.stores import NOW_MS, open_store, sample


def go_on(run: StoreRun) -> None:
    """Do what a broker does after an error: try again, and stop if necessary."""
    for _ in range(3):
        try:
            if run.store is None:
                run.open()
            run.append([30, 50])
            run.flush()
            run.checkpoint()
        except StoreError:
            continue


@pytest.mark.slow
@pytest.mark.parametrize("error", [StoreFailed, StoreFull])
@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize("goes_on", [False, True], ids=["then crash", "go on, then crash"])
def test_every_call_fails_in_turn(error: type[StoreError], for_ever: bool, goes_on: bool) -> None:
    for call in itertools.count(1):
        disk = FaultyDisk(seed=call, error=error)
        disk.fail_from, disk.fail_at = (call, None) if for_ever else (None, call)
        run = StoreRun(Random(1), disk)
        failed = outcome(run)
        if failed is None and disk.calls < call:
            break
        if failed is not None and goes_on:
            go_on(run)
        run.crash(disk.power_cut(Random(call), "mixed"))
        run.open()
        run.judge()
    assert call > 100


@pytest.mark.slow
def test_every_call_of_recovery_fails_in_turn() -> None:
    for call in itertools.count(1):
        first = StoreRun(Random(2), FaultyDisk(seed=call))
        first.disk.power_cut_at = 230
        with pytest.raises(BaseException, match=r".*"):
            first.scenario()
        disk = first.disk.power_cut(Random(3), "mixed")
        disk.fail_at = call
        run = StoreRun(
            Random(4),
            disk,
            first.everything,
            durable=first.durable,
            acknowledged=first.acknowledged,
            expired=first.expired,
        )
        try:
            run.open()
        except StoreError:
            run.open()  # the fault has passed; the lock was given back
        got_through = disk.calls < call
        disk.fail_at = None
        run.judge()
        if got_through:
            break
    assert call > 20


@pytest.mark.slow
def test_a_full_disk_refuses_appends_until_there_is_space() -> None:
    for pages in itertools.count(8):
        disk = FaultyDisk(seed=pages, capacity_bytes=pages * 4096)
        run = StoreRun(Random(pages), disk)
        refusals = 0
        for _ in range(60):
            try:
                if run.store is None:
                    run.open()
                run.append([400])
                if run.acknowledged % 4 == 0:
                    run.checkpoint()
            except StoreFull:
                refusals += 1
        if not refusals:  # it all fits
            break
        disk.capacity_bytes = None
        if run.store is None:
            run.open()
        run.append([400])
        run.close()
        run.open()
        run.judge()
        assert run.acknowledged > 0
    assert pages > 20


@pytest.mark.slow
def test_a_segment_that_a_power_cut_brings_back_has_its_keys() -> None:
    """The removal of a segment succeeds, the sync of its directory fails, the store goes on."""
    for seed in range(20):
        run = StoreRun(Random(1), FaultyDisk(seed=seed, error=StoreFull))
        store = run.open()
        for _ in range(30):
            run.append([200])
        run.checkpoint()
        run.disk.fail_at = run.disk.calls + 2
        with pytest.raises(StoreFull):
            run.expire()
        assert store.begin == SETTINGS.segment_bytes
        run.append([200])
        run.checkpoint()
        run.crash(run.disk.power_cut(Random(seed), "mixed"))
        run.open()
        run.judge()


@pytest.mark.slow
def test_a_refused_batch_does_not_come_back_after_a_power_cut() -> None:
    # It was written in part and wiped; were the wiping not durable, the power could undo it.
    kept, *refused = (sample(0, body=letter * 600) for letter in (b"1", b"2", b"3", b"4"))
    for seed in range(400):
        disk = FaultyDisk(seed=seed, error=StoreFull)
        store = open_store(disk, SETTINGS)
        store.append([kept], now_ms=NOW_MS)
        store.flush()
        disk.fail_at = disk.calls + 1
        with pytest.raises(StoreFull):
            store.append(refused, now_ms=NOW_MS)
        disk.fail_at = None
        again = open_store(disk.power_cut(Random(seed), "mixed"), SETTINGS)
        assert [record.body for record in again.records()] == [kept.body], f"SEED={seed}"
