"""What flushes and checkpoints make durable while appends go on."""

from __future__ import annotations

from random import Random

import pytest

from escrowmq.errors import StoreFailed
from escrowmq.store.store import MessageStore
from escrowmq.testing import FaultyDisk, MemoryDisk
from tests.support.store_appends import all_bodies, append, bodies, found_bodies, keyed, plain
from tests.support.stores import (
    assert_clean,
    open_store,
)


def test_a_flush_covers_what_was_appended_before_it_began(store: MessageStore) -> None:
    append(store, plain())
    flush = store.begin_flush()
    append(store, plain())
    flush.run()
    assert store.flushed_offset == 0
    assert store.finish_flush(flush) == 96
    assert store.flushed_offset == 96
    assert store.flush() == store.end == 192


def test_overlapping_flushes_report_only_durable_records() -> None:
    # Two flushes begin, the second finishes first, then the power fails. What the second flush
    # reported must be durable, although the first one, which never ran, had to make the directory
    # entry of the new segment durable.
    disk = FaultyDisk()
    store = open_store(disk)
    append(store, *(plain() for _ in range(43)))
    store.begin_flush()
    second = store.begin_flush()
    second.run()
    store.finish_flush(second)
    flushed_offset = store.flushed_offset
    reopened = open_store(disk.power_cut(Random(0), "none"))
    assert reopened.end >= flushed_offset


def test_a_checkpoint_during_an_unfinished_flush_covers_only_durable_records() -> None:
    disk = FaultyDisk()
    store = open_store(disk)
    append(store, *(plain() for _ in range(43)))
    store.begin_flush()  # it has not run yet
    store.checkpoint()
    reopened = open_store(disk.power_cut(Random(0), "none"))
    assert reopened.recovery.damage == []
    assert len(all_bodies(reopened)) == 43


def test_a_second_checkpoint_is_refused_while_one_runs(store: MessageStore) -> None:
    append(store, plain())
    job = store.begin_checkpoint()
    with pytest.raises(StoreFailed, match="another checkpoint"):
        store.begin_checkpoint()
    job.run()
    store.finish_checkpoint(job)
    assert store.checkpointed_offset == store.end
    store.checkpoint()


def test_appends_and_reads_go_on_during_a_checkpoint() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    append(store, keyed("k", b"before"))
    job = store.begin_checkpoint()
    append(store, keyed("k", b"during"))
    assert bodies(store.read("T", 0, 0)) == [b"before", b"during"]
    job.run()
    append(store, keyed("k", b"after"))
    assert found_bodies(store, "T", "k") == [b"after", b"during", b"before"]
    store.finish_checkpoint(job)
    assert found_bodies(store, "T", "k") == [b"after", b"during", b"before"]
    assert bodies(store.read("T", 0, 0)) == [b"before", b"during", b"after"]
    assert store.checkpointed_offset < store.end
    store.close()
    reopened = open_store(disk)
    assert bodies(reopened.read("T", 0, 0)) == [b"before", b"during", b"after"]
    reopened.close()
    assert_clean(disk)
