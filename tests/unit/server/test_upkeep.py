"""Upkeep, step by step on a disk in memory, and once as the loop that a broker runs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from escrowmq.clock import ManualClock
from escrowmq.errors import StoreFailed, StoreFull
from escrowmq.message.offsets import LogOffset
from escrowmq.server.upkeep import Upkeep, UpkeepSettings
from escrowmq.store.store import MessageStore
from escrowmq.testing import FaultyDisk
from tests.stores import NOW_MS, TINY, assert_clean, fill, open_store, sample


def opened(disk: FaultyDisk | None = None) -> tuple[FaultyDisk, MessageStore, ManualClock]:
    clock = ManualClock(NOW_MS)
    disk = disk or FaultyDisk(clock=clock)
    return disk, open_store(disk), clock


def run(steps: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(steps, 20))


def test_a_flush_makes_what_was_appended_durable() -> None:
    disk, store, clock = opened()
    fill(store, range(5))
    assert store.flushed < store.end
    run(Upkeep(store, disk, clock).flush())
    assert store.flushed == store.end


def test_a_flush_with_nothing_to_do_leaves_the_disk_alone() -> None:
    disk, store, clock = opened()
    calls = disk.calls
    run(Upkeep(store, disk, clock).flush())
    run(Upkeep(store, disk, clock).checkpoint())
    assert disk.calls == calls


def test_a_checkpoint_lets_the_next_start_walk_nothing() -> None:
    disk, store, clock = opened()
    fill(store, range(20))
    run(Upkeep(store, disk, clock).checkpoint())
    store.abandon()
    again = open_store(disk)
    assert again.recovery.records == 0
    again.close()
    assert_clean(disk)


def test_expiry_keeps_what_somebody_still_needs() -> None:
    disk, store, clock = opened()
    fill(store, range(60))
    needed = LogOffset(2 * TINY.segment_bytes)
    upkeep = Upkeep(store, disk, clock, keep_from=lambda: needed)
    run(upkeep.checkpoint())
    clock.advance(ms=73 * 3_600_000)
    disk.capacity_bytes = 4096  # much more is used than that
    run(upkeep.expire())
    assert store.begin == needed
    assert not store.accepts_writes


def test_a_full_disk_postpones_a_checkpoint_and_the_next_one_makes_up_for_it() -> None:
    disk, store, clock = opened()
    fill(store, range(20))
    upkeep = Upkeep(store, disk, clock)
    disk.error, disk.fail_at = StoreFull, disk.calls + 6
    with pytest.raises(StoreFull):
        run(upkeep.checkpoint())
    assert not store.has_failed
    run(upkeep.checkpoint())
    assert store.checkpointed == store.end
    store.close()
    assert_clean(disk)


def test_the_loop_flushes_and_makes_checkpoints_by_itself() -> None:
    disk, store, clock = opened()
    soon = UpkeepSettings(
        flush_interval_s=0.001, checkpoint_interval_s=0.001, expire_interval_s=0.001
    )

    async def watch() -> None:
        loop = asyncio.create_task(Upkeep(store, disk, clock, soon).run())
        fill(store, range(10))
        while store.checkpointed < store.end or store.flushed < store.end:  # noqa: ASYNC110
            await asyncio.sleep(0)
        loop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loop

    run(watch())


def test_the_loop_ends_when_a_flush_fails_and_the_store_takes_no_more() -> None:
    disk, store, clock = opened()
    fill(store, range(10))
    disk.fail_from = disk.calls + 1
    soon = UpkeepSettings(flush_interval_s=0.001, checkpoint_interval_s=60, expire_interval_s=60)

    async def watch() -> None:
        loop = asyncio.create_task(Upkeep(store, disk, clock, soon).run())
        while not store.has_failed:  # noqa: ASYNC110
            await asyncio.sleep(0)
        loop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loop

    run(watch())
    with pytest.raises(StoreFailed):
        store.append([sample(11)], now_ms=NOW_MS)
