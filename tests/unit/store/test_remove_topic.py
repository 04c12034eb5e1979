"""Deleting topics: their queues are removed durably and begin again at 0."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from escrowmq.errors import StoreError, StoreFailed
from escrowmq.store.check import check_store
from escrowmq.store.disk import Disk
from escrowmq.store.store import MessageStore
from escrowmq.testing import FaultyDisk, MemoryDisk
from tests.support.stores import NOW_MS, TINY, fill, open_store, sample


def queue_lengths(store: MessageStore) -> dict[tuple[str, int], int]:
    return {place: store.max_offset(*place) for place in store.queues() if store.max_offset(*place)}


def assert_nothing_is_wrong(disk: Disk) -> None:
    report = check_store(disk, TINY)
    assert report.is_clean, report.findings


def removed(disk: Disk) -> MessageStore:
    store = open_store(disk)
    fill(store, range(40))
    store.checkpoint()
    assert store.remove_topic("T0") == 1
    return store


def test_a_deleted_topic_has_no_queues_keys_and_files() -> None:
    disk = MemoryDisk()
    store = removed(disk)
    assert queue_lengths(store) == {("T1", 1): 20}
    assert store.max_offset("T0", 0) == 0
    assert store.find_by_key("T0", "U0000") == []
    assert len(store.find_by_key("T1", "U0001")) == 1
    assert disk.names("consumequeue") == ["T1"]


def test_a_message_after_the_deletion_has_offset_0() -> None:
    disk = MemoryDisk()
    store = removed(disk)
    [placed] = store.append([sample(0)], now_ms=NOW_MS)
    assert placed.queue_offset == 0
    assert len(store.find_by_key("T0", "U0000")) == 1
    store.close()
    again = open_store(disk)
    assert queue_lengths(again) == {("T0", 0): 1, ("T1", 1): 20}
    again.close()
    assert_nothing_is_wrong(disk)


def test_deleting_an_unknown_topic_changes_nothing() -> None:
    disk = MemoryDisk()
    with_none = open_store(disk)
    assert with_none.remove_topic("none") == 0
    assert with_none.is_checkpointed
    assert not disk.exists("config/escrowDeletedTopics.json")


@pytest.mark.parametrize("stop", ["in order", "crash", "everything again"])
def test_a_topic_stays_deleted(stop: str) -> None:
    disk = MemoryDisk()
    store = removed(disk)
    assert not store.is_checkpointed
    if stop == "in order":
        store.close()
    else:
        store.abandon()
    if stop == "everything again":
        disk.remove("escrowmq.checkpoint")
    store = open_store(disk)
    assert queue_lengths(store) == {("T1", 1): 20}
    fill(store, [0, 2])
    assert queue_lengths(store) == {("T0", 0): 2, ("T1", 1): 20}
    store.close()
    disk.remove("escrowmq.checkpoint")
    store = open_store(disk)
    assert queue_lengths(store) == {("T0", 0): 2, ("T1", 1): 20}
    store.close()
    assert_nothing_is_wrong(disk)


def test_a_deletion_is_forgotten_with_the_last_record() -> None:
    disk = MemoryDisk()
    store = removed(disk)
    end = store.end
    while store.begin < end:
        fill(store, range(1, 41, 2))
        store.checkpoint()
        store.remove_oldest_file()
    store.checkpoint()
    store.close()
    store = open_store(disk)
    # Private: the list of deleted topics has no public view.
    assert "T0" not in store._queues.deleted_topics
    store.close()


def test_a_topic_is_not_deleted_during_a_checkpoint_or_while_messages_are_hidden() -> None:
    store = open_store(MemoryDisk())
    fill(store, range(4))
    job = store.begin_checkpoint()
    assert not store.can_remove_topic("T0")
    with pytest.raises(StoreFailed, match="in use"):
        store.remove_topic("T0")
    job.run()
    store.finish_checkpoint(job)
    store.hide("T0", 0, 1)
    assert not store.can_remove_topic("T0")
    assert store.can_remove_topic("T1")
    store.unhide("T0", 0)
    assert store.can_remove_topic("T0")


def test_a_torn_log_may_end_before_the_deletion() -> None:
    """New records in place of those that a power cut has torn off are not deleted."""
    disk = FaultyDisk(seed=1)
    store = open_store(disk)
    fill(store, range(4))
    store.checkpoint()
    fill(store, range(4, 8))  # not durable
    store.remove_topic("T0")
    disk = disk.power_cut(Random(1), "none")
    store = open_store(disk)
    fill(store, [10, 12, 14, 16])
    store.close()
    disk.remove("escrowmq.checkpoint")
    store = open_store(disk)
    assert store.max_offset("T0", 0) == 4
    assert queue_lengths(store)["T1", 1] >= 2


@pytest.mark.parametrize("survival", ["none", "mixed", "all", "scrambled"])
def test_a_power_cut_at_any_call(survival: str) -> None:
    """Either all messages of the topic are there or none; the other topic is unchanged."""
    seen = set()
    for call in itertools.count(1):
        disk = FaultyDisk(seed=call)
        store = open_store(disk)
        fill(store, range(40))
        store.checkpoint()
        disk.fail_from = disk.calls + call
        answered = True
        try:
            store.remove_topic("T0")
        except StoreError:
            answered = False
        is_over = disk.calls < disk.fail_from
        disk = disk.power_cut(Random(call), survival)  # type: ignore[arg-type]
        store = open_store(disk)
        found = queue_lengths(store)
        assert found.pop(("T1", 1)) == 20
        assert found in ({}, {("T0", 0): 20})
        assert not (answered and found)
        seen.add(bool(found))
        fill(store, [0])
        assert store.max_offset("T0", 0) == found.get(("T0", 0), 0) + 1
        store.close()
        assert_nothing_is_wrong(disk)
        if is_over:
            break
    assert seen == {True, False}
    assert call > 5
