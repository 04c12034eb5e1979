"""Group commit on a disk whose flushes wait at a gate, so that a test decides what overlaps.

The flush thread waits at the gate, and `flush_started` waits until it is there.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

import pytest

from escrowmq.errors import FlushTimeout, StoreError, StoreFailed
from escrowmq.server.tasks import GroupCommit
from escrowmq.store.store import MessageStore
from escrowmq.testing import FaultyDisk, MemoryDisk
from escrowmq.testing.disks import OnFault
from tests.support.stores import NOW_MS, open_store, sample

TIMEOUT_S = 20  # only a test that hangs takes so long


@dataclass(kw_only=True, eq=False)
class GatedDisk(MemoryDisk):
    """A disk whose flushes of the log wait until the gate is open."""

    gate: threading.Event = field(default_factory=threading.Event)
    waiting_flushes: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def _call(self, what: str, on_fault: OnFault | None = None) -> None:
        if what.startswith("sync commitlog/"):
            self.waiting_flushes.release()
            assert self.gate.wait(TIMEOUT_S)

    async def flush_started(self) -> None:
        """Wait until a flush is at the gate."""
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(None, self.waiting_flushes.acquire, True, TIMEOUT_S)


def gated_store() -> tuple[GatedDisk, MessageStore]:
    """Return a store with one flushed record, and its disk with the gate closed."""
    disk = GatedDisk()
    disk.gate.set()
    store = open_store(disk)
    store.append([sample(0)], now_ms=NOW_MS)
    store.flush()
    while disk.waiting_flushes.acquire(blocking=False):
        pass
    disk.gate.clear()
    return disk, store


class CallbackLog:
    """Append records and log the callbacks for them as (number, type of the error), in order."""

    def __init__(self, store: MessageStore, commit: GroupCommit) -> None:
        self._store = store
        self._commit = commit
        self.calls: list[tuple[int, type[StoreError] | None]] = []

    def append(self, number: int) -> None:
        self._store.append([sample(number)], now_ms=NOW_MS)
        self._commit.when_flushed(
            self._store.end,
            lambda error: self.calls.append((number, None if error is None else type(error))),
        )


def gated_commit(
    timeout_s: float = TIMEOUT_S,
) -> tuple[GatedDisk, MessageStore, GroupCommit, CallbackLog]:
    disk, store = gated_store()
    commit = GroupCommit(store, timeout_s=timeout_s)
    return disk, store, commit, CallbackLog(store, commit)


def successes(*numbers: int) -> list[tuple[int, type[StoreError] | None]]:
    return [(number, None) for number in numbers]


async def test_one_flush_serves_all_waiting_appends() -> None:
    disk, store, commit, callbacks = gated_commit()
    for number in range(1, 6):
        callbacks.append(number)
    await disk.flush_started()
    assert callbacks.calls == []
    disk.gate.set()
    await commit.close()
    assert callbacks.calls == successes(1, 2, 3, 4, 5)
    assert commit.flush_count == 1
    assert store.flushed_offset == store.end


async def test_an_append_during_a_flush_waits_for_the_next_flush() -> None:
    disk, store, commit, callbacks = gated_commit()
    callbacks.append(1)
    await disk.flush_started()
    for number in (2, 3, 4):
        callbacks.append(number)
    flushed_before = store.flushed_offset
    assert callbacks.calls == []
    disk.gate.set()
    await commit.close()
    assert callbacks.calls == successes(1, 2, 3, 4)
    assert commit.flush_count == 2
    assert flushed_before < store.flushed_offset == store.end


async def test_a_flushed_offset_is_reported_at_once() -> None:
    _, store = gated_store()
    commit = GroupCommit(store)
    errors: list[StoreError | None] = []
    commit.when_flushed(store.end, errors.append)
    assert errors == [None]
    assert await commit.wait_flushed(0) is None
    assert commit.flush_count == 0
    await commit.close()


async def test_a_flush_by_a_checkpoint_counts_too() -> None:
    disk, store = gated_store()
    commit = GroupCommit(store)
    disk.gate.set()
    store.append([sample(1)], now_ms=NOW_MS)
    store.checkpoint()
    assert await commit.wait_flushed(store.end) is None
    assert commit.flush_count == 0
    await commit.close()


async def test_callbacks_are_called_once_and_in_order() -> None:
    store = open_store(MemoryDisk())
    commit = GroupCommit(store)
    callbacks = CallbackLog(store, commit)
    for number in range(200):
        callbacks.append(number)
        if number % 7 == 0:
            await asyncio.sleep(0)
        if number % 50 == 0:
            await commit.wait_flushed(store.end)
    await commit.close()
    assert callbacks.calls == successes(*range(200))
    assert commit.flush_count < 200


async def test_a_failed_flush_fails_all_callbacks_and_the_store() -> None:
    disk = FaultyDisk()
    store = open_store(disk)
    commit = GroupCommit(store)
    callbacks = CallbackLog(store, commit)
    for number in range(3):
        callbacks.append(number)
    disk.fail_at = disk.calls + 1
    await commit.close()
    assert callbacks.calls == [(number, StoreFailed) for number in range(3)]
    assert store.has_failed
    with pytest.raises(StoreFailed):
        store.append([sample(9)], now_ms=NOW_MS)


class FailingDisk(GatedDisk):
    """A disk on which a flush that had to wait at the gate fails."""

    def _call(self, what: str, on_fault: OnFault | None = None) -> None:
        is_closed = not self.gate.is_set()
        super()._call(what, on_fault)
        if is_closed and what.startswith("sync commitlog/"):
            raise StoreFailed("injected failure")


async def test_an_append_during_a_failing_flush_fails_too() -> None:
    disk = FailingDisk()
    disk.gate.set()
    store = open_store(disk)
    disk.gate.clear()
    commit = GroupCommit(store)
    callbacks = CallbackLog(store, commit)
    callbacks.append(1)
    await disk.flush_started()
    callbacks.append(2)
    disk.gate.set()
    await commit.close()
    assert callbacks.calls == [(1, StoreFailed), (2, StoreFailed)]
    assert commit.flush_count == 1


async def test_a_store_that_fails_elsewhere_fails_all_callbacks() -> None:
    # A checkpoint fails during the flush. That flush succeeds, but no other may start.
    disk, store, commit, callbacks = gated_commit()
    callbacks.append(1)
    await disk.flush_started()
    callbacks.append(2)
    store.fail(StoreFailed("a checkpoint failed"))
    disk.gate.set()
    await commit.close()
    assert callbacks.calls == [(1, None), (2, StoreFailed)]


async def test_a_failed_store_fails_later_callbacks() -> None:
    store = open_store(MemoryDisk())
    commit = GroupCommit(store)
    store.append([sample(1)], now_ms=NOW_MS)
    store.fail(StoreFailed("a checkpoint failed"))
    assert type(await commit.wait_flushed(store.end)) is StoreFailed
    await commit.close()


async def test_a_timeout_is_reported_once() -> None:
    disk, store, commit, callbacks = gated_commit(timeout_s=0.01)
    callbacks.append(1)
    assert type(await commit.wait_flushed(store.end)) is FlushTimeout
    assert callbacks.calls == [(1, FlushTimeout)]
    disk.gate.set()
    await commit.close()
    assert callbacks.calls == [(1, FlushTimeout)]
    assert store.flushed_offset == store.end


async def test_an_append_after_a_timeout_has_its_own_deadline() -> None:
    disk, store, commit, callbacks = gated_commit(timeout_s=0.01)
    callbacks.append(1)
    assert type(await commit.wait_flushed(store.end)) is FlushTimeout
    callbacks.append(2)
    assert type(await commit.wait_flushed(store.end)) is FlushTimeout
    disk.gate.set()
    await commit.close()
    assert callbacks.calls == [(1, FlushTimeout), (2, FlushTimeout)]
    commit = GroupCommit(store)
    callbacks = CallbackLog(store, commit)
    callbacks.append(3)
    await commit.close()
    assert callbacks.calls == successes(3)


async def test_closing_completes_requested_flushes() -> None:
    disk, _, commit, callbacks = gated_commit()
    callbacks.append(1)
    await disk.flush_started()
    callbacks.append(2)
    closing = asyncio.ensure_future(commit.close())
    await asyncio.sleep(0)
    assert not closing.done()
    disk.gate.set()
    await closing
    assert callbacks.calls == successes(1, 2)


async def test_closing_without_callbacks_flushes_nothing() -> None:
    _, store = gated_store()
    store.append([sample(1)], now_ms=NOW_MS)
    commit = GroupCommit(store)
    await commit.close()
    assert commit.flush_count == 0
    assert store.flushed_offset < store.end


async def test_a_cancelled_waiter_does_not_affect_the_others() -> None:
    disk, store, commit, callbacks = gated_commit()
    store.append([sample(1)], now_ms=NOW_MS)
    waiter = asyncio.ensure_future(commit.wait_flushed(store.end))
    callbacks.append(2)
    await disk.flush_started()
    waiter.cancel()
    disk.gate.set()
    await commit.close()
    assert waiter.cancelled()
    assert callbacks.calls == successes(2)


async def test_reads_and_appends_continue_while_a_flush_runs() -> None:
    disk, store, commit, callbacks = gated_commit()
    callbacks.append(2)
    await disk.flush_started()
    positions = store.append([sample(4), sample(6)], now_ms=NOW_MS)
    assert store.read("T0", 0, 0).count == 4
    assert store.record_at(positions[-1].log_offset).body == sample(6).body
    disk.gate.set()
    await commit.close()
    assert callbacks.calls == successes(2)
    with pytest.raises(StoreError):
        store.record_at(store.end)
