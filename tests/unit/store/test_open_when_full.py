"""A store that is opened on a full disk can be read, and accepts appends once there is space."""

from __future__ import annotations

import pytest

from escrowmq.errors import StoreFull
from escrowmq.store.retention import update_disk_state
from escrowmq.store.store import MessageStore
from escrowmq.testing.disks import MemoryDisk
from tests.support.stores import NOW_MS, TINY, assert_clean, fill, open_store, sample


def bodies(store: MessageStore) -> list[bytes]:
    log_offsets = [store.log_offset_of("T0", 0, queue_offset) for queue_offset in range(3)]
    return [
        bytes(store.record_at(log_offset).body)
        for log_offset in log_offsets
        if log_offset is not None
    ]


def test_a_crashed_store_is_readable_on_a_full_disk() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    fill(store, range(6))
    expected = bodies(store)
    assert len(expected) == 3
    store.flush()
    store.abandon()
    disk.capacity_bytes = 4096  # less than the store uses
    store = open_store(disk)
    assert bodies(store) == expected
    assert not store.is_checkpointed
    update_disk_state(store, disk.usage())
    assert not store.is_writable
    with pytest.raises(StoreFull):
        store.append([sample(6)], now_ms=NOW_MS)
    with pytest.raises(StoreFull):
        store.checkpoint()
    disk.capacity_bytes = None
    update_disk_state(store, disk.usage())
    store.append([sample(6)], now_ms=NOW_MS)
    assert bodies(store) == expected
    store.close()
    assert_clean(disk, TINY)
