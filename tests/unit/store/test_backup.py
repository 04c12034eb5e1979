"""Backups of a store that is in use, and stores restored from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from escrowmq.errors import StoreDamaged, StoreError
from escrowmq.store.backup import (
    MANIFEST_PATH,
    back_up,
    read_manifest,
    restore,
    stored_log_end,
)
from escrowmq.store.disk import Disk, RealDisk, read_file, write_file
from escrowmq.store.store import MessageStore
from escrowmq.testing.disks import FaultyDisk, MemoryDisk
from tests.support.store_damage import RECORDS, edit_file, flip, log_end, log_records, make_store
from tests.support.stores import NOW_MS, fill, locate, open_store

MANY = 60  # several files
OFFSETS = "config/consumerOffset.json"
TOPICS = "config/topics.json"


def flush_then(store: MessageStore, after_flush: Callable[[], None]) -> Callable[[], int]:
    """Return a function that flushes, calls `after_flush` and returns the flushed end."""

    def flush() -> int:
        end = store.flush()
        after_flush()
        return end

    return flush


def back_up_to_memory(
    store: MessageStore, disk: Disk, after_flush: Callable[[], None] = lambda: None
) -> MemoryDisk:
    """Back up a store to a new disk; call `after_flush` when the end of the backup is set."""
    target = MemoryDisk()
    back_up(disk, target, flush_then(store, after_flush), now_ms=NOW_MS)
    return target


def queue_contents(store: MessageStore) -> list[bytes]:
    """Return the stored bytes of both queues."""
    contents = []
    for topic, queue_id in (("T0", 0), ("T1", 1)):
        low, high = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
        result = store.read(topic, queue_id, low, count_max=1000, bytes_max=1 << 20)
        assert result.count == high - low
        contents.append(b"".join(result.slices))
    return contents


def restore_and_open(backup: MemoryDisk) -> MessageStore:
    target = MemoryDisk()
    restore(backup, target)
    return open_store(target)


def test_a_backup_ends_where_the_log_ended_when_its_end_was_read() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    fill(store, range(40))  # several files
    before = queue_contents(store)

    def continue_appending() -> None:
        fill(store, range(40, 80))
        store.checkpoint()  # queue files are ahead of the copied log now

    restored = restore_and_open(back_up_to_memory(store, disk, continue_appending))
    assert queue_contents(restored) == before
    assert not restored.recovery.damage
    assert restored.recovery.torn_reason is None
    fill(restored, range(40, 60))  # the restored queue accepts messages
    assert restored.max_offset("T0", 0) == 30


def test_a_restored_queue_continues_after_expired_messages() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    fill(store, range(0, 20, 2))  # T0 alone
    fill(store, range(1, 81, 2))  # T1 alone
    store.checkpoint()
    while store.min_offset("T0", 0) < 10:
        store.remove_oldest_file()
    store.checkpoint()
    assert restore_and_open(back_up_to_memory(store, disk)).max_offset("T0", 0) == 10


def test_consumer_offsets_are_copied_before_the_flush_and_topics_after_it() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    fill(store, range(5))
    write_file(disk, OFFSETS, b'{"old":1}')
    write_file(disk, TOPICS, b'{"old":1}')

    def save_new_files() -> None:
        write_file(disk, OFFSETS, b'{"new":1}')
        write_file(disk, TOPICS, b'{"new":1}')

    target = back_up_to_memory(store, disk, save_new_files)
    assert read_file(target, OFFSETS) == b'{"old":1}'
    assert read_file(target, TOPICS) == b'{"new":1}'


def test_a_segment_may_expire_during_a_backup() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    fill(store, range(60))
    store.checkpoint()
    target = MemoryDisk()
    removed_offsets: list[int] = []

    def remove_oldest_file_once(copied_bytes: int, total_bytes: int) -> None:
        if not removed_offsets:  # the first call is before the first file is copied
            removed_offsets.append(store.begin)
            store.remove_oldest_file()

    manifest, _ = back_up(
        disk, target, store.flush, now_ms=NOW_MS, on_progress=remove_oldest_file_once
    )
    assert manifest.log_begin == store.begin > 0
    assert queue_contents(restore_and_open(target)) == queue_contents(store)


def test_an_incomplete_copy_is_not_a_backup() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    fill(store, range(5))
    target = MemoryDisk()
    with pytest.raises(StoreDamaged, match="the store is damaged, first in commitlog/0"):
        back_up(disk, target, lambda: store.flush() + 100, now_ms=NOW_MS)
    assert not target.exists(MANIFEST_PATH)
    with pytest.raises(StoreError, match="a store, not a backup"):
        read_manifest(target)


def test_a_backup_and_a_restore_refuse_a_target_that_is_not_empty() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    with pytest.raises(StoreError, match="is not empty"):
        back_up(disk, disk, store.flush, now_ms=NOW_MS)
    backup = back_up_to_memory(store, disk)
    with pytest.raises(StoreError, match="is not empty"):
        restore(backup, backup)


def test_an_empty_store_can_be_backed_up() -> None:
    disk = MemoryDisk()
    assert queue_contents(restore_and_open(back_up_to_memory(open_store(disk), disk))) == [b"", b""]


# --- damage --------------------------------------------------------------------------------------


def damaged_store(path: Path, *, last_but: int) -> tuple[RealDisk, int]:
    """Return the disk of a closed store with one damaged record, and the end of its log."""
    make_store(path)
    end, record = log_end(path), log_records(path)[-1 - last_but]
    file, position = locate(path, record.log_offset)
    edit_file(file, position + record.size // 2, flip)
    return RealDisk(path), end


@pytest.mark.parametrize("last_but", [0, 3, 40], ids=["last record", "near the end", "within"])
def test_a_damaged_store_is_backed_up_if_that_is_allowed_with_all_other_records(
    tmp_path: Path, last_but: int
) -> None:
    disk, end = damaged_store(tmp_path / "store", last_but=last_but)
    with pytest.raises(StoreDamaged, match="--allow-damage"):
        back_up(disk, MemoryDisk(), lambda: stored_log_end(disk), now_ms=NOW_MS)
    backup, restored_disk = MemoryDisk(), MemoryDisk()
    manifest, report = back_up(
        disk, backup, lambda: stored_log_end(disk), now_ms=NOW_MS, allow_damage=True
    )
    assert (manifest.log_end, manifest.records) == (end, RECORDS - 1)
    assert len(manifest.damage) == 1
    assert not report.is_clean

    restore(backup, restored_disk)
    restored = open_store(restored_disk)
    assert restored.end == end  # nothing was cut off as a torn end
    assert len(restored.recovery.damage) == 1
    total = restored.max_offset("T0", 0) + restored.max_offset("T1", 1)
    assert total == RECORDS


@pytest.mark.parametrize(
    "path", ["commitlog/00000000000000004096", "consumequeue/T0/0/" + "0" * 20]
)
def test_what_cannot_be_read_is_damaged_in_a_backup_that_allows_damage(path: str) -> None:
    disk = FaultyDisk()
    store = open_store(disk)
    fill(store, range(MANY))
    store.close()
    disk.bad_path, disk.bad_range = path, range(20, 21)
    with pytest.raises(StoreError, match="made to fail"):
        back_up(disk, MemoryDisk(), lambda: stored_log_end(disk), now_ms=NOW_MS)
    backup, restored_disk = MemoryDisk(), MemoryDisk()
    manifest, _ = back_up(
        disk, backup, lambda: stored_log_end(disk), now_ms=NOW_MS, allow_damage=True
    )
    assert {damage.where for damage in manifest.damage} == {path}
    restore(backup, restored_disk)
    restored = open_store(restored_disk)
    assert restored.end == manifest.log_end
    assert restored.max_offset("T0", 0) + restored.max_offset("T1", 1) == MANY


def test_a_backup_with_other_damage_than_it_was_made_with_is_not_restored(tmp_path: Path) -> None:
    disk, _ = damaged_store(tmp_path / "store", last_but=40)
    backup = RealDisk(tmp_path / "backup")
    back_up(disk, backup, lambda: stored_log_end(disk), now_ms=NOW_MS, allow_damage=True)
    record = log_records(tmp_path / "backup")[5]
    file, position = locate(tmp_path / "backup", record.log_offset)
    edit_file(file, position + record.size // 2, flip)
    with pytest.raises(StoreDamaged, match="the copy is damaged"):
        restore(backup, MemoryDisk())


def test_a_manifest_without_damage_is_what_earlier_versions_wrote() -> None:
    disk = MemoryDisk()
    backup = back_up_to_memory(open_store(disk), disk)
    assert b"damage" not in (read_file(backup, MANIFEST_PATH) or b"")
    assert read_manifest(backup).damage == ()
