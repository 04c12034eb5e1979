"""A disabled key index (messageIndexEnable=false): messages are stored but not found by key."""

from __future__ import annotations

from dataclasses import replace

import pytest

from escrowmq.config import StoreConfig
from escrowmq.store.store import MessageStore
from escrowmq.testing import MemoryDisk
from tests.support.stores import TINY, assert_clean, fill, open_store

OFF = replace(TINY, index_enabled=False)
ENDINGS = pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])


def found(store: MessageStore, numbers: range) -> list[int]:
    return [n for n in numbers if store.find_by_key(f"T{n % 2}", f"U{n:04d}")]


def end(store: MessageStore, *, killed: bool) -> None:
    if killed:
        store.checkpoint()
        store.abandon()
    else:
        store.close()


def test_without_index_no_key_is_found_and_no_file_is_created() -> None:
    disk = MemoryDisk()
    store = open_store(disk, OFF)
    fill(store, range(10))
    assert found(store, range(10)) == []
    store.checkpoint()
    assert found(store, range(10)) == []
    assert disk.names("index") == []
    assert (store.max_offset("T0", 0), store.max_offset("T1", 1)) == (5, 5)
    store.close()
    assert_clean(disk)


@ENDINGS
@pytest.mark.parametrize("counts", [(3, 3, 3), (3, 3, 0, 3), (0, 3, 3), (30, 30, 30)])
def test_keys_are_found_except_those_stored_while_the_index_was_off(
    counts: tuple[int, ...], killed: bool
) -> None:
    """The index is on, off and on again; each start appends some messages."""
    disk, wanted, end_of = MemoryDisk(), list[int](), 0
    for step, count in enumerate(counts):
        store = open_store(disk, OFF if step == 1 else TINY)
        new = range(end_of, end_of + count)
        fill(store, new)
        if step != 1:
            wanted += new
        end_of += count
        assert found(store, range(end_of)) == wanted
        end(store, killed=killed)
    store = open_store(disk)
    assert found(store, range(end_of)) == wanted
    assert store.recovery.damage == []
    store.close()
    assert_clean(disk)


@pytest.mark.parametrize("first", [TINY, OFF], ids=["on, then off", "off, then on"])
def test_recovery_indexes_by_the_configuration_of_its_start(first: StoreConfig) -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    fill(store, range(5))
    store.close()
    store = open_store(disk, first)
    fill(store, range(5, 10))
    store.abandon()
    for settings in (OFF if first is TINY else TINY, TINY):
        store = open_store(disk, settings)
        assert found(store, range(10)) == [*range(5 if first is TINY else 10)]
        store.close()
    fill(store := open_store(disk), range(10, 15))
    assert found(store, range(10, 15)) == [*range(10, 15)]
    store.close()
    assert_clean(disk)


def test_a_missing_index_is_not_rebuilt_while_it_is_off() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    fill(store, range(10))
    store.close()
    for name in disk.names("index"):
        disk.remove(f"index/{name}")
    store = open_store(disk, OFF)
    assert found(store, range(10)) == []
    assert disk.names("index") == []
    store.close()
    assert_clean(disk)
