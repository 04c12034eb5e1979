"""Backups of a store that is in use, and restoring them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from escrowmq.errors import StoreDamaged, StoreError
from escrowmq.store.backup import MANIFEST_PATH, back_up, read_manifest, restore
from escrowmq.store.disk import Disk, read_file, write_file
from escrowmq.store.store import MessageStore
from escrowmq.testing.disks import MemoryDisk
from tests.support.stores import NOW_MS, fill, open_store

OFFSETS = "config/consumerOffset.json"
TOPICS = "config/topics.json"


def flushed(store: MessageStore, *, then: Callable[[], None] = lambda: None) -> Callable[[], int]:
    """Return a function that flushes, returns the end of the log and then calls `then`."""

    def ask() -> int:
        end = store.flush()
        then()
        return end

    return ask


def copied(store: MessageStore, disk: Disk, then: Callable[[], None] = lambda: None) -> MemoryDisk:
    target = MemoryDisk()
    back_up(disk, target, flushed(store, then=then), now_ms=NOW_MS)
    return target


def bodies(store: MessageStore) -> list[bytes]:
    found = []
    for topic, queue_id in (("T0", 0), ("T1", 1)):
        low, high = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
        read = store.read(topic, queue_id, low, count_max=1000, bytes_max=1 << 20)
        assert read.count == high - low
        found.append(b"".join(read.slices))
    return found


def reopened(backup: MemoryDisk) -> MessageStore:
    target = MemoryDisk()
    restore(backup, target)
    return open_store(target)


def test_a_backup_ends_where_the_log_ended_when_its_end_was_read() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    fill(store, range(40))  # several files
    before = bodies(store)

    def goes_on() -> None:
        fill(store, range(40, 80))
        store.checkpoint()  # queue files are ahead of the copied log now

    again = reopened(copied(store, disk, goes_on))
    assert bodies(again) == before
    assert not again.recovery.damage
    assert again.recovery.torn_reason is None
    fill(again, range(40, 60))  # and goes on where it was
    assert again.max_offset("T0", 0) == 30


def test_a_restored_queue_continues_behind_expired_messages() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    fill(store, range(0, 20, 2))  # T0 alone
    fill(store, range(1, 81, 2))  # T1 alone
    store.checkpoint()
    while store.min_offset("T0", 0) < 10:
        store.remove_oldest_file()
    store.checkpoint()
    assert reopened(copied(store, disk)).max_offset("T0", 0) == 10


def test_progress_is_copied_before_the_end_is_known_and_topics_after() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    fill(store, range(5))
    write_file(disk, OFFSETS, b'{"old":1}')
    write_file(disk, TOPICS, b'{"old":1}')

    def goes_on() -> None:
        write_file(disk, OFFSETS, b'{"new":1}')
        write_file(disk, TOPICS, b'{"new":1}')

    target = copied(store, disk, goes_on)
    assert read_file(target, OFFSETS) == b'{"old":1}'
    assert read_file(target, TOPICS) == b'{"new":1}'


def test_a_segment_may_expire_during_a_backup() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    fill(store, range(60))
    store.checkpoint()
    target = MemoryDisk()
    removed: list[int] = []

    def told(done: int, whole: int) -> None:
        if not removed:  # before the first file
            removed.append(store.begin)
            store.remove_oldest_file()

    manifest, _ = back_up(disk, target, flushed(store), now_ms=NOW_MS, on_progress=told)
    assert manifest.log_begin == store.begin > 0
    assert bodies(reopened(target)) == bodies(store)


def test_an_incomplete_copy_is_not_a_backup() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    fill(store, range(5))
    target = MemoryDisk()
    with pytest.raises(StoreDamaged, match="ends at"):
        back_up(disk, target, lambda: store.flush() + 100, now_ms=NOW_MS)
    assert not target.exists(MANIFEST_PATH)
    with pytest.raises(StoreError, match="a store, not a backup"):
        read_manifest(target)


def test_nothing_is_overwritten() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    with pytest.raises(StoreError, match="is not empty"):
        back_up(disk, disk, flushed(store), now_ms=NOW_MS)
    backup = copied(store, disk)
    with pytest.raises(StoreError, match="is not empty"):
        restore(backup, backup)


def test_an_empty_store_can_be_backed_up() -> None:
    disk = MemoryDisk()
    assert bodies(reopened(copied(open_store(disk), disk))) == [b"", b""]
