"""Store maintenance, step by step on a disk in memory, and once as the task of a broker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from escrowmq.clock import ManualClock
from escrowmq.config import StoreConfig
from escrowmq.errors import StoreFailed, StoreFull
from escrowmq.message.record import LogOffset
from escrowmq.server.tasks import StoreMaintenance
from escrowmq.store.disk import DiskUsage
from escrowmq.store.store import MessageStore
from escrowmq.testing import FaultyDisk
from tests.support.stores import NOW_MS, TINY, assert_clean, fill, open_store, sample


def opened(disk: FaultyDisk | None = None) -> tuple[FaultyDisk, MessageStore, ManualClock]:
    clock = ManualClock(NOW_MS)
    disk = disk or FaultyDisk(clock=clock)
    return disk, open_store(disk), clock


def run(steps: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(steps, 20))


def test_a_flush_makes_what_was_appended_durable() -> None:
    disk, store, clock = opened()
    fill(store, range(5))
    assert store.flushed_offset < store.end
    run(StoreMaintenance(store, disk, clock, TINY).flush())
    assert store.flushed_offset == store.end


def test_a_flush_with_nothing_to_do_leaves_the_disk_alone() -> None:
    disk, store, clock = opened()
    calls = disk.calls
    run(StoreMaintenance(store, disk, clock, TINY).flush())
    run(StoreMaintenance(store, disk, clock, TINY).checkpoint())
    assert disk.calls == calls


def test_after_a_checkpoint_the_next_start_reads_no_records() -> None:
    disk, store, clock = opened()
    fill(store, range(20))
    run(StoreMaintenance(store, disk, clock, TINY).checkpoint())
    store.abandon()
    again = open_store(disk)
    assert again.recovery.records == 0
    again.close()
    assert_clean(disk)


def test_expiry_keeps_needed_segments() -> None:
    disk, store, clock = opened()
    fill(store, range(60))
    needed = LogOffset(2 * TINY.segment_bytes)
    upkeep = StoreMaintenance(store, disk, clock, TINY, oldest_needed_offset=lambda: needed)
    run(upkeep.checkpoint())
    clock.advance(ms=73 * 3_600_000)
    disk.capacity_bytes = 4096  # much more is used than that
    run(upkeep.expire())
    assert store.begin == needed
    assert not store.has_disk_space


class WatchedDisk(FaultyDisk):
    """Rather full. Notes which thread removes files, and lets it wait."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.removed_by: list[int] = []
        self.may_remove = threading.Event()
        self.is_removing = threading.Event()

    def usage(self) -> DiskUsage:
        return DiskUsage(total_bytes=1 << 40, free_bytes=(1 << 40) * 12 // 100)  # old files must go

    def remove(self, path: str) -> None:
        if path.startswith("commitlog/"):
            self.removed_by.append(threading.get_ident())
            self.is_removing.set()
            assert self.may_remove.wait(20)
        super().remove(path)


def expiring() -> tuple[WatchedDisk, MessageStore, StoreMaintenance]:
    clock = ManualClock(NOW_MS)
    disk = WatchedDisk(clock=clock)
    store = open_store(disk)
    fill(store, range(60))
    store.checkpoint()
    keep_from = LogOffset(2 * TINY.segment_bytes)
    return (
        disk,
        store,
        StoreMaintenance(store, disk, clock, TINY, oldest_needed_offset=lambda: keep_from),
    )


def test_files_are_removed_in_a_thread_and_reads_and_appends_go_on_meanwhile() -> None:
    disk, store, upkeep = expiring()

    async def watch() -> None:
        expiry = asyncio.create_task(upkeep.expire())
        while not disk.is_removing.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert store.begin == 0
        assert store.record_at(0).log_offset == 0
        fill(store, range(60, 63))
        store.flush()
        disk.may_remove.set()
        await expiry

    run(watch())
    assert store.begin == 2 * TINY.segment_bytes
    assert len(disk.removed_by) == 2
    assert threading.get_ident() not in disk.removed_by
    store.close()
    assert_clean(disk)


def test_a_cancelled_expiry_finishes_its_file() -> None:
    disk, store, upkeep = expiring()

    async def watch() -> None:
        expiry = asyncio.create_task(upkeep.expire())
        while not disk.is_removing.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0)
        expiry.cancel()
        await asyncio.sleep(0)
        disk.may_remove.set()
        with pytest.raises(asyncio.CancelledError):
            await expiry

    run(watch())
    assert store.begin == TINY.segment_bytes
    assert len(disk.removed_by) == 1
    store.close()
    assert_clean(disk)


@pytest.mark.parametrize(("call", "begin"), [(1, 0), (2, TINY.segment_bytes)])
def test_a_failed_removal_leaves_log_and_directory_consistent(call: int, begin: int) -> None:
    """The first call removes the name, the second makes that durable."""
    disk, store, upkeep = expiring()
    disk.may_remove.set()
    disk.error, disk.fail_at = StoreFull, disk.calls + call
    with pytest.raises(StoreFull):
        run(upkeep.expire())
    assert store.begin == begin == int(disk.names("commitlog")[0])
    run(upkeep.expire())
    assert store.begin == 2 * TINY.segment_bytes
    store.close()
    assert_clean(disk)


def test_a_full_disk_postpones_a_checkpoint_and_the_next_one_makes_up_for_it() -> None:
    disk, store, clock = opened()
    fill(store, range(20))
    upkeep = StoreMaintenance(store, disk, clock, TINY)
    disk.error, disk.fail_at = StoreFull, disk.calls + 6
    with pytest.raises(StoreFull):
        run(upkeep.checkpoint())
    assert not store.has_failed
    run(upkeep.checkpoint())
    assert store.checkpointed_offset == store.end
    store.close()
    assert_clean(disk)


def test_maintenance_flushes_and_checkpoints() -> None:
    disk, store, clock = opened()
    soon = StoreConfig(flush_interval_ms=1, checkpoint_interval_ms=1, expire_interval_ms=1)

    async def watch() -> None:
        loop = asyncio.create_task(StoreMaintenance(store, disk, clock, soon).run())
        fill(store, range(10))
        while store.checkpointed_offset < store.end or store.flushed_offset < store.end:  # noqa: ASYNC110
            await asyncio.sleep(0)
        loop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loop

    run(watch())


def test_maintenance_ends_when_a_flush_fails() -> None:
    disk, store, clock = opened()
    fill(store, range(10))
    disk.fail_from = disk.calls + 1
    soon = StoreConfig(
        flush_interval_ms=1, checkpoint_interval_ms=60_000, expire_interval_ms=60_000
    )

    async def watch() -> None:
        loop = asyncio.create_task(StoreMaintenance(store, disk, clock, soon).run())
        while not store.has_failed:  # noqa: ASYNC110
            await asyncio.sleep(0)
        loop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loop

    run(watch())
    with pytest.raises(StoreFailed):
        store.append([sample(11)], now_ms=NOW_MS)
