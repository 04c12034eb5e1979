"""Without the key index (messageIndexEnable=false), messages are stored but not found by key."""

from __future__ import annotations

from dataclasses import replace

import pytest

from escrowmq.config import StoreConfig
from escrowmq.store.store import MessageStore
from escrowmq.testing import MemoryDisk
from tests.support.stores import TINY, assert_clean, fill, open_store

INDEX_OFF = replace(TINY, index_enabled=False)
STOPPED_OR_KILLED = pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])


def found_numbers(store: MessageStore, numbers: range) -> list[int]:
    """Return the numbers of the samples that are found by key."""
    return [number for number in numbers if store.find_by_key(f"T{number % 2}", f"U{number:04d}")]


def stop(store: MessageStore, *, killed: bool) -> None:
    if killed:
        store.checkpoint()
        store.abandon()
    else:
        store.close()


def test_without_index_no_key_is_found_and_no_file_is_created() -> None:
    disk = MemoryDisk()
    store = open_store(disk, INDEX_OFF)
    fill(store, range(10))
    assert found_numbers(store, range(10)) == []
    store.checkpoint()
    assert found_numbers(store, range(10)) == []
    assert disk.names("index") == []
    assert (store.max_offset("T0", 0), store.max_offset("T1", 1)) == (5, 5)
    store.close()
    assert_clean(disk)


@STOPPED_OR_KILLED
@pytest.mark.parametrize("counts", [(3, 3, 3), (3, 3, 0, 3), (0, 3, 3), (30, 30, 30)])
def test_keys_are_found_except_those_stored_while_the_index_was_off(
    counts: tuple[int, ...], killed: bool
) -> None:
    # The index is on, off and on again; each start appends some messages.
    disk, expected, next_number = MemoryDisk(), list[int](), 0
    for step, count in enumerate(counts):
        store = open_store(disk, INDEX_OFF if step == 1 else TINY)
        numbers = range(next_number, next_number + count)
        fill(store, numbers)
        if step != 1:
            expected += numbers
        next_number += count
        assert found_numbers(store, range(next_number)) == expected
        stop(store, killed=killed)
    store = open_store(disk)
    assert found_numbers(store, range(next_number)) == expected
    assert store.recovery.damage == []
    store.close()
    assert_clean(disk)


@pytest.mark.parametrize("first_settings", [TINY, INDEX_OFF], ids=["on, then off", "off, then on"])
def test_recovery_follows_the_index_setting_of_the_new_start(first_settings: StoreConfig) -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    fill(store, range(5))
    store.close()
    store = open_store(disk, first_settings)
    fill(store, range(5, 10))
    store.abandon()
    for settings in (INDEX_OFF if first_settings is TINY else TINY, TINY):
        store = open_store(disk, settings)
        assert found_numbers(store, range(10)) == [*range(5 if first_settings is TINY else 10)]
        store.close()
    fill(store := open_store(disk), range(10, 15))
    assert found_numbers(store, range(10, 15)) == [*range(10, 15)]
    store.close()
    assert_clean(disk)


def test_a_missing_index_is_not_rebuilt_while_it_is_off() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    fill(store, range(10))
    store.close()
    for name in disk.names("index"):
        disk.remove(f"index/{name}")
    store = open_store(disk, INDEX_OFF)
    assert found_numbers(store, range(10)) == []
    assert disk.names("index") == []
    store.close()
    assert_clean(disk)
