"""Checks of a store that a broker is using: what its last checkpoint describes, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from escrowmq.errors import StoreError, StoreLocked
from escrowmq.store.check import check_store
from escrowmq.store.checkpoint import CHECKPOINT_PATH
from escrowmq.store.disk import RealDisk, RealFile
from escrowmq.store.store import MessageStore
from tests.support.store_damage import edit_file, flip, log_records, only_damage
from tests.support.stores import TINY, examine, fill, locate, open_store

CHECKED = 44  # records below the checkpoint
LATER = 25


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Iterator[MessageStore]:
    """An open store, with a checkpoint and records behind it."""
    store = open_store(RealDisk(root))
    fill(store, range(CHECKED))
    store.checkpoint()
    fill(store, range(CHECKED, CHECKED + LATER))
    store.flush()
    yield store
    store.abandon()  # a test may have damaged it


def test_what_the_checkpoint_describes_is_checked(root: Path, store: MessageStore) -> None:
    report = examine(root)
    assert report.is_in_use
    assert report.findings == []
    assert report.records == report.queue_entries == CHECKED
    assert report.log_end == store.checkpointed_offset
    assert (report.index_files, report.keys) == (0, 0)
    store.checkpoint()
    assert examine(root).records == CHECKED + LATER


def test_a_store_that_was_left_is_checked_as_a_whole(root: Path, store: MessageStore) -> None:
    store.abandon()
    report = examine(root)
    assert not report.is_in_use
    assert report.records == CHECKED + LATER


def test_damage_below_the_checkpoint_is_found(root: Path, store: MessageStore) -> None:
    path, position = locate(root, log_records(root)[CHECKED // 2].log_offset)
    edit_file(path, position + 90, flip)
    assert only_damage(root).where.startswith("commitlog/")


def test_a_damaged_queue_entry_is_found(root: Path, store: MessageStore) -> None:
    edit_file(min((root / "consumequeue/T0/0").iterdir()), 5, flip)
    assert only_damage(root).where.startswith("consumequeue/T0/0/")


def test_a_log_that_ends_before_its_checkpoint_is_damaged(root: Path, store: MessageStore) -> None:
    path, position = locate(root, log_records(root)[CHECKED - 1].log_offset)
    edit_file(path, position, bytes(TINY.segment_bytes - position))
    assert not examine(root).is_clean


def test_what_is_being_written_is_not_damage(root: Path, store: MessageStore) -> None:
    """The second half of a record is on the disk before the first, and more records follow."""
    path, position = locate(root, log_records(root)[CHECKED].log_offset)
    edit_file(path, position, bytes(40))
    entries_end = CHECKED // 2 * 20 % TINY.queue_file_bytes  # of T0, behind the checkpoint
    newest_file = max((root / "consumequeue/T0/0").iterdir())
    edit_file(newest_file, entries_end, b"half an entry")
    assert examine(root).findings == []


def test_without_a_checkpoint_nothing_can_be_checked(root: Path, store: MessageStore) -> None:
    (root / CHECKPOINT_PATH).unlink()
    with pytest.raises(StoreLocked, match="try again in a moment, or stop the broker"):
        examine(root)


@pytest.mark.parametrize("removed", ["commitlog", "consumequeue/T1/1"])
def test_a_file_that_is_removed_during_the_check_is_not_reported_as_damage(
    root: Path, store: MessageStore, removed: str
) -> None:
    oldest = min((root / removed).iterdir())

    class Disk(RealDisk):
        """Removes the file when the check opens the third segment, as the broker might."""

        def open(self, path: str, *, writable: bool = True) -> RealFile:
            if path.endswith(f"{2 * TINY.segment_bytes:020d}"):
                oldest.unlink(missing_ok=True)
            return super().open(path, writable=writable)

    with pytest.raises(StoreError, match=r"was removed during the check, .*: check again"):
        check_store(Disk(root), TINY)
