"""Store maintenance: each step alone on a disk in memory, and all of them as a task."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from escrowmq.clock import ManualClock, SteadyClock
from escrowmq.config import StoreConfig
from escrowmq.errors import StoreFailed, StoreFull
from escrowmq.message.record import LogOffset
from escrowmq.server.tasks import StoreMaintenance
from escrowmq.store.disk import DiskUsage
from escrowmq.store.store import MessageStore
from escrowmq.testing import FaultyDisk
from tests.support.stores import NOW_MS, TINY, assert_clean, fill, open_store, sample
from tests.support.waiting import wait_until_async


def new_store() -> tuple[FaultyDisk, MessageStore, SteadyClock]:
    clock = ManualClock(NOW_MS)
    disk = FaultyDisk(clock=clock)
    return disk, open_store(disk), SteadyClock(clock)


async def test_a_flush_makes_appended_records_durable() -> None:
    disk, store, clock = new_store()
    fill(store, range(5))
    assert store.flushed_offset < store.end
    await StoreMaintenance(store, disk, clock, TINY).flush()
    assert store.flushed_offset == store.end


async def test_without_new_records_flush_and_checkpoint_do_not_use_the_disk() -> None:
    disk, store, clock = new_store()
    calls = disk.calls
    await StoreMaintenance(store, disk, clock, TINY).flush()
    await StoreMaintenance(store, disk, clock, TINY).checkpoint()
    assert disk.calls == calls


async def test_after_a_checkpoint_the_next_start_reads_no_records() -> None:
    disk, store, clock = new_store()
    fill(store, range(20))
    await StoreMaintenance(store, disk, clock, TINY).checkpoint()
    store.abandon()
    reopened = open_store(disk)
    assert reopened.recovery.records == 0
    reopened.close()
    assert_clean(disk)


async def test_under_load_a_checkpoint_does_not_wait_for_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("escrowmq.server.tasks.CHECKPOINT_BACKLOG_BYTES", 2000)
    disk, store, clock = new_store()
    settings = replace(TINY, checkpoint_interval_ms=3_600_000)
    maintenance = asyncio.create_task(StoreMaintenance(store, disk, clock, settings).run())
    fill(store, range(20))
    await wait_until_async(lambda: store.checkpointed_offset == store.end)
    maintenance.cancel()
    await asyncio.gather(maintenance, return_exceptions=True)
    store.close()


async def test_expiry_keeps_needed_segments() -> None:
    disk, store, clock = new_store()
    fill(store, range(60))
    needed = LogOffset(2 * TINY.segment_bytes)
    maintenance = StoreMaintenance(store, disk, clock, TINY)
    maintenance.keep_needed_segments(lambda: needed, lambda end: None)
    await maintenance.checkpoint()
    disk.capacity_bytes = 4096  # far below what the store uses
    await maintenance.expire()
    assert store.begin == needed
    assert not store.has_disk_space


class WatchedDisk(FaultyDisk):
    """An almost full disk that records which thread removes files, and lets it wait."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.removed_by: list[int] = []
        self.may_remove = threading.Event()
        self.is_removing = threading.Event()

    def usage(self) -> DiskUsage:
        # So full that old segments are deleted.
        return DiskUsage(total_bytes=1 << 40, free_bytes=(1 << 40) * 12 // 100)

    def remove(self, path: str) -> None:
        if path.startswith("commitlog/"):
            self.removed_by.append(threading.get_ident())
            self.is_removing.set()
            assert self.may_remove.wait(20)
        super().remove(path)


def expiring_store() -> tuple[WatchedDisk, MessageStore, StoreMaintenance]:
    """Return a store whose first two segments can be deleted."""
    clock = ManualClock(NOW_MS)
    disk = WatchedDisk(clock=clock)
    store = open_store(disk)
    fill(store, range(60))
    store.checkpoint()
    needed = LogOffset(2 * TINY.segment_bytes)
    maintenance = StoreMaintenance(store, disk, SteadyClock(clock), TINY)
    maintenance.keep_needed_segments(lambda: needed, lambda end: None)
    return disk, store, maintenance


async def test_files_are_removed_in_a_thread_while_reads_and_appends_continue() -> None:
    disk, store, maintenance = expiring_store()
    expiry = asyncio.create_task(maintenance.expire())
    await wait_until_async(disk.is_removing.is_set)
    assert store.begin == 0
    assert store.record_at(0).log_offset == 0
    fill(store, range(60, 63))
    store.flush()
    disk.may_remove.set()
    await expiry
    assert store.begin == 2 * TINY.segment_bytes
    assert len(disk.removed_by) == 2
    assert threading.get_ident() not in disk.removed_by
    store.close()
    assert_clean(disk)


async def test_a_cancelled_expiry_finishes_its_file() -> None:
    disk, store, maintenance = expiring_store()
    expiry = asyncio.create_task(maintenance.expire())
    await wait_until_async(disk.is_removing.is_set)
    expiry.cancel()
    await asyncio.sleep(0)
    disk.may_remove.set()
    with pytest.raises(asyncio.CancelledError):
        await expiry
    assert store.begin == TINY.segment_bytes
    assert len(disk.removed_by) == 1
    store.close()
    assert_clean(disk)


@pytest.mark.parametrize(("call", "begin"), [(1, 0), (2, TINY.segment_bytes)])
async def test_a_failed_removal_leaves_log_and_directory_consistent(call: int, begin: int) -> None:
    """The first call removes the name, the second makes the removal durable."""
    disk, store, maintenance = expiring_store()
    disk.may_remove.set()
    disk.error, disk.fail_at = StoreFull, disk.calls + call
    with pytest.raises(StoreFull):
        await maintenance.expire()
    assert store.begin == begin == int(disk.names("commitlog")[0])
    await maintenance.expire()
    assert store.begin == 2 * TINY.segment_bytes
    store.close()
    assert_clean(disk)


async def test_a_checkpoint_that_failed_on_a_full_disk_is_completed_by_the_next_one() -> None:
    disk, store, clock = new_store()
    fill(store, range(20))
    maintenance = StoreMaintenance(store, disk, clock, TINY)
    disk.error, disk.fail_at = StoreFull, disk.calls + 6
    with pytest.raises(StoreFull):
        await maintenance.checkpoint()
    assert not store.has_failed
    await maintenance.checkpoint()
    assert store.checkpointed_offset == store.end
    store.close()
    assert_clean(disk)


async def cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_task_flushes_and_checkpoints() -> None:
    disk, store, clock = new_store()
    config = StoreConfig(flush_interval_ms=1, checkpoint_interval_ms=1, expire_interval_ms=1)
    task = asyncio.create_task(StoreMaintenance(store, disk, clock, config).run())
    fill(store, range(10))
    await wait_until_async(lambda: store.checkpointed_offset == store.flushed_offset == store.end)
    await cancel(task)


async def test_after_a_failed_flush_the_store_refuses_appends() -> None:
    disk, store, clock = new_store()
    fill(store, range(10))
    disk.fail_from = disk.calls + 1
    config = StoreConfig(
        flush_interval_ms=1, checkpoint_interval_ms=60_000, expire_interval_ms=60_000
    )
    task = asyncio.create_task(StoreMaintenance(store, disk, clock, config).run())
    await task  # it ends with the store
    assert store.has_failed
    with pytest.raises(StoreFailed):
        store.append([sample(11)], now_ms=NOW_MS)
