"""Deleted topics: their queues are removed durably, and later messages begin at offset 0."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from escrowmq.errors import StoreError, StoreFailed
from escrowmq.store.disk import Disk
from escrowmq.store.store import MessageStore
from escrowmq.testing import FaultyDisk, MemoryDisk
from escrowmq.testing.disks import Survival
from tests.support.stores import NOW_MS, assert_clean, fill, open_store, sample


def queue_lengths(store: MessageStore) -> dict[tuple[str, int], int]:
    return {queue: store.max_offset(*queue) for queue in store.queues() if store.max_offset(*queue)}


def store_without_t0(disk: Disk) -> MessageStore:
    """Return a store with messages of T0 and T1 where T0 was deleted."""
    store = open_store(disk)
    fill(store, range(40))
    store.checkpoint()
    assert store.remove_topic("T0") == 1
    return store


def test_a_deleted_topic_has_no_queues_keys_and_files() -> None:
    disk = MemoryDisk()
    store = store_without_t0(disk)
    assert queue_lengths(store) == {("T1", 1): 20}
    assert store.max_offset("T0", 0) == 0
    assert store.find_by_key("T0", "U0000") == []
    assert len(store.find_by_key("T1", "U0001")) == 1
    assert disk.names("consumequeue") == ["T1"]


def test_a_message_after_the_deletion_has_offset_0() -> None:
    disk = MemoryDisk()
    store = store_without_t0(disk)
    [result] = store.append([sample(0)], now_ms=NOW_MS)
    assert result.queue_offset == 0
    assert len(store.find_by_key("T0", "U0000")) == 1
    store.close()
    reopened = open_store(disk)
    assert queue_lengths(reopened) == {("T0", 0): 1, ("T1", 1): 20}
    reopened.close()
    assert_clean(disk)


def test_deleting_an_unknown_topic_changes_nothing() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    assert store.remove_topic("none") == 0
    assert store.is_checkpointed
    assert not disk.exists("config/escrowDeletedTopics.json")


@pytest.mark.parametrize("ending", ["clean stop", "crash", "crash without checkpoint"])
def test_a_topic_stays_deleted_after_a_restart(ending: str) -> None:
    disk = MemoryDisk()
    store = store_without_t0(disk)
    assert not store.is_checkpointed
    if ending == "clean stop":
        store.close()
    else:
        store.abandon()
    if ending == "crash without checkpoint":
        disk.remove("escrowmq.checkpoint")  # the next start reads the whole log
    store = open_store(disk)
    assert queue_lengths(store) == {("T1", 1): 20}
    fill(store, [0, 2])
    assert queue_lengths(store) == {("T0", 0): 2, ("T1", 1): 20}
    store.close()
    disk.remove("escrowmq.checkpoint")
    store = open_store(disk)
    assert queue_lengths(store) == {("T0", 0): 2, ("T1", 1): 20}
    store.close()
    assert_clean(disk)


def test_a_deletion_is_forgotten_when_the_last_record_of_the_topic_expires() -> None:
    disk = MemoryDisk()
    store = store_without_t0(disk)
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


def test_records_appended_after_a_power_cut_are_not_deleted_by_an_older_deletion() -> None:
    # A power cut tears off the records before the deletion. New records take their log offsets
    # and must not count as deleted.
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
def test_a_power_cut_at_any_call_of_a_deletion_keeps_all_messages_or_none(
    survival: Survival,
) -> None:
    # Either all messages of the topic are there or none; the other topic is unchanged.
    seen_outcomes = set()
    for call in itertools.count(1):
        disk = FaultyDisk(seed=call)
        store = open_store(disk)
        fill(store, range(40))
        store.checkpoint()
        disk.fail_from = disk.calls + call
        was_acknowledged = True
        try:
            store.remove_topic("T0")
        except StoreError:
            was_acknowledged = False
        is_complete = disk.calls < disk.fail_from
        disk = disk.power_cut(Random(call), survival)
        store = open_store(disk)
        lengths = queue_lengths(store)
        assert lengths.pop(("T1", 1)) == 20
        assert lengths in ({}, {("T0", 0): 20})
        assert not (was_acknowledged and lengths)
        seen_outcomes.add(bool(lengths))
        fill(store, [0])
        assert store.max_offset("T0", 0) == lengths.get(("T0", 0), 0) + 1
        store.close()
        assert_clean(disk)
        if is_complete:
            break
    assert seen_outcomes == {True, False}
    assert call > 5
