"""Let every disk call of a scenario fail in turn, continue, crash, recover and check.

The scenario opens the store, appends, flushes, makes checkpoints, expires segments and closes it. A
call fails once (a temporary fault) or always from then on (a broken disk), and then the process
crashes at once or continues first.

A long run (ESCROWMQ_SEEDS) lets every call fail in all sixteen ways: four errors, four courses. In
CI every call fails in four of them, so that each call meets every error once and every course once.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from random import Random

import pytest

from escrowmq.errors import StoreError, StoreFailed, StoreFull, StoreUnavailable
from escrowmq.store import checkpoint
from escrowmq.testing import FaultyDisk, PowerCut
from tests.simulation.store_run import SETTINGS, StoreRun, scenario_error
from tests.support.stores import NOW_MS, open_store, sample

IS_LONG_RUN = "ESCROWMQ_SEEDS" in os.environ
ERRORS: list[type[Exception]] = [StoreFailed, StoreFull, StoreUnavailable, MemoryError]


def calls_to_fail(error: type[Exception], is_permanent: bool, continues: bool) -> Iterator[int]:
    """Return the numbers of the calls that fail in this way, without an end."""
    if IS_LONG_RUN:
        return itertools.count(1)
    # A Latin square: in each row and column of errors and courses, every remainder occurs once.
    course = 2 * is_permanent + continues
    return itertools.count(1 + (ERRORS.index(error) + course) % len(ERRORS), len(ERRORS))


def test_every_call_fails_with_every_error_and_in_every_course() -> None:
    ways = list(itertools.product(ERRORS, (False, True), (False, True)))
    calls = {way: set(itertools.islice(calls_to_fail(*way), 100)) for way in ways}
    for call in range(1, 101):
        ways_of_call = [way for way in ways if call in calls[way]]
        assert {error for error, *_ in ways_of_call} == set(ERRORS)
        assert {tuple(course) for _, *course in ways_of_call} == {way[1:] for way in ways}


def continue_after_error(run: StoreRun) -> None:
    """Retry as a broker does after an error."""
    for _ in range(3):
        try:
            if run.store is None:
                run.open()
            run.append([30, 50])
            run.flush()
            run.checkpoint()
        except (StoreError, MemoryError):
            continue


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("is_permanent", [False, True], ids=["temporary", "permanent"])
@pytest.mark.parametrize("continues", [False, True], ids=["crash", "continue, then crash"])
def test_a_failed_call_of_the_scenario_loses_nothing(
    error: type[Exception], is_permanent: bool, continues: bool
) -> None:
    fail_calls(error, is_permanent, continues)


def fail_calls(error: type[Exception], is_permanent: bool, continues: bool) -> None:
    """Let calls of the scenario fail, each in a run of its own, and check what a crash leaves."""
    for call in calls_to_fail(error, is_permanent, continues):
        disk = FaultyDisk(seed=call, error=error)
        disk.fail_from, disk.fail_at = (call, None) if is_permanent else (None, call)
        run = StoreRun(Random(1), disk)
        run_error = scenario_error(run)
        if run_error is None and disk.calls < call:
            break
        if run_error is not None and continues:
            continue_after_error(run)
        run.crash(disk.power_cut(Random(call), "mixed"))
        run.open()
        run.check()
    assert call > 100


@pytest.mark.slow
@pytest.mark.parametrize("is_permanent", [False, True], ids=["temporary", "permanent"])
def test_a_failed_call_loses_nothing_if_queues_are_flushed_at_once(
    monkeypatch: pytest.MonkeyPatch, is_permanent: bool
) -> None:
    monkeypatch.setattr(checkpoint, "QUEUES_SYNCED_AT_ONCE_MIN", 2)
    fail_calls(StoreFailed, is_permanent, continues=True)


@pytest.mark.slow
def test_a_failed_call_of_recovery_loses_nothing() -> None:
    for call in itertools.count(1):
        first = StoreRun(Random(2), FaultyDisk(seed=call))
        first.disk.power_cut_at = 230
        with pytest.raises(PowerCut):
            first.run_scenario()
        disk = first.disk.power_cut(Random(3), "mixed")
        disk.fail_at = call
        run = first.after_crash(Random(4), disk)
        try:
            run.open()
        except StoreError:
            run.open()  # the fault was temporary, and the failed open has released the lock
        is_complete = disk.calls < call
        disk.fail_at = None
        run.check()
        if is_complete:
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
                if run.acknowledged_count % 4 == 0:
                    run.checkpoint()
            except StoreFull:
                refusals += 1
        if not refusals:  # everything fits
            break
        disk.capacity_bytes = None
        if run.store is None:
            run.open()
        run.append([400])
        run.close()
        run.open()
        run.check()
        assert run.acknowledged_count > 0
    assert pages > 20


@pytest.mark.slow
def test_a_segment_that_a_power_cut_restores_has_its_keys() -> None:
    # The segment is removed, but the sync of its directory fails, and the store continues.
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
        run.check()


@pytest.mark.slow
def test_a_refused_batch_does_not_come_back_after_a_power_cut() -> None:
    # The batch was written in part and then overwritten with zeros. If the zeros were not durable,
    # a power cut could restore the batch.
    first, *refused = (sample(0, body=letter * 600) for letter in (b"1", b"2", b"3", b"4"))
    for seed in range(400):
        disk = FaultyDisk(seed=seed, error=StoreFull)
        store = open_store(disk, SETTINGS)
        store.append([first], now_ms=NOW_MS)
        store.flush()
        disk.fail_at = disk.calls + 1
        with pytest.raises(StoreFull):
            store.append(refused, now_ms=NOW_MS)
        disk.fail_at = None
        reopened = open_store(disk.power_cut(Random(seed), "mixed"), SETTINGS)
        assert [record.body for record in reopened.records()] == [first.body], f"SEED={seed}"
