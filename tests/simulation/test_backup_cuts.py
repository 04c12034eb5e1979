"""A backup or a restore is cut at every call of its target disk: by a kill, and by a power cut.

What is left is either complete or refused: by `restore`, by a start of the broker and by a check.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from random import Random

import pytest

from escrowmq.errors import StoreDamaged, StoreError
from escrowmq.store.backup import MANIFEST_PATH, back_up, restore
from escrowmq.store.check import check_store, is_store
from escrowmq.store.disk import Disk
from escrowmq.store.store import INCOMPLETE_PATH, MessageStore
from escrowmq.testing import FaultyDisk, MemoryDisk, PowerCut
from tests.support.stores import NOW_MS, fill, open_store

MESSAGES = 40
SURVIVALS = 3  # seeds of what a power cut leaves


@pytest.fixture(scope="module")
def source() -> Iterator[tuple[MessageStore, Disk]]:
    disk = MemoryDisk()
    store = open_store(disk)
    fill(store, range(MESSAGES // 2))
    store.checkpoint()
    fill(store, range(MESSAGES // 2, MESSAGES))  # not all queue entries are in their files
    yield store, disk
    store.close()


def cut_targets(copy: Callable[[FaultyDisk], object]) -> Iterator[FaultyDisk]:
    """Cut the copy at each call in turn. Yield what the target may have then."""
    for n in itertools.count(1):
        target = FaultyDisk(power_cut_at=n)
        try:
            copy(target)
        except PowerCut:
            yield target.after_kill()
            for seed in range(SURVIVALS):
                yield target.power_cut(Random(1000 * n + seed))
        else:
            assert n > 20  # many calls were cut
            return


def message_count(store: MessageStore) -> int:
    return store.max_offset("T0", 0) + store.max_offset("T1", 1)


def assert_complete_or_refused(target: MemoryDisk) -> bool:
    """Return whether a broker starts on a directory, which has everything then."""
    if not target.names(""):
        return False  # the directory is as empty as before
    if target.exists(INCOMPLETE_PATH):
        with pytest.raises(StoreDamaged, match="was interrupted"):
            open_store(target)
        assert not is_store(target) or not check_store(target).is_clean
        return False
    store = open_store(target)
    assert message_count(store) == MESSAGES
    assert not store.recovery.damage
    store.close()
    return True


def test_a_backup_that_was_cut_is_complete_or_refused(source: tuple[MessageStore, Disk]) -> None:
    store, disk = source
    complete = 0
    for target in cut_targets(lambda target: back_up(disk, target, store.flush, now_ms=NOW_MS)):
        restored = FaultyDisk()
        if target.exists(MANIFEST_PATH):
            restore(target, restored)
            assert assert_complete_or_refused(restored)
            complete += 1
        else:
            with pytest.raises(StoreError, match="a complete backup contains the file"):
                restore(target, restored)
            assert not assert_complete_or_refused(target)
    assert complete  # it was cut after its last file, too


def test_a_restore_that_was_cut_is_complete_or_refused(source: tuple[MessageStore, Disk]) -> None:
    store, disk = source
    backup = MemoryDisk()
    back_up(disk, backup, store.flush, now_ms=NOW_MS)
    refused = sum(
        not assert_complete_or_refused(target)
        for target in cut_targets(lambda target: restore(backup, target))
    )
    assert refused
    target = MemoryDisk()
    restore(backup, target)
    assert assert_complete_or_refused(target)
