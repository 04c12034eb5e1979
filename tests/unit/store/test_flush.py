"""What flushes and checkpoints make durable while appends go on."""

from __future__ import annotations

from random import Random

import pytest

from escrowmq.errors import StoreFailed
from escrowmq.store.store import MessageStore
from escrowmq.testing import FaultyDisk, MemoryDisk
from tests.support.store_appends import all_bodies, append, bodies, bodies_by_key, keyed, plain
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


def test_flushes_that_overlap_never_claim_too_much() -> None:
    # Two begin, the second is done first, and the power goes: what it answered for is there.
    # The first would have made the name of the new file durable.
    disk = FaultyDisk()
    store = open_store(disk)
    append(store, *(plain() for _ in range(43)))
    store.begin_flush()
    second = store.begin_flush()
    second.run()
    store.finish_flush(second)
    flushed = store.flushed_offset
    after = open_store(disk.power_cut(Random(0), "none"))
    assert after.end >= flushed


def test_a_checkpoint_that_overtakes_a_flush_claims_only_durable_records() -> None:
    disk = FaultyDisk()
    store = open_store(disk)
    append(store, *(plain() for _ in range(43)))
    store.begin_flush()  # on its way to a thread
    store.checkpoint()
    after = open_store(disk.power_cut(Random(0), "none"))
    assert after.recovery.damage == []
    assert len(all_bodies(after)) == 43


def test_one_checkpoint_at_a_time(store: MessageStore) -> None:
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
    append(store, keyed("k", b"meanwhile"))
    assert bodies(store.read("T", 0, 0)) == [b"before", b"meanwhile"]
    job.run()
    append(store, keyed("k", b"behind"))
    assert bodies_by_key(store, "T", "k") == [b"behind", b"meanwhile", b"before"]
    store.finish_checkpoint(job)
    assert bodies_by_key(store, "T", "k") == [b"behind", b"meanwhile", b"before"]
    assert bodies(store.read("T", 0, 0)) == [b"before", b"meanwhile", b"behind"]
    assert store.checkpointed_offset < store.end
    store.close()
    again = open_store(disk)
    assert bodies(again.read("T", 0, 0)) == [b"before", b"meanwhile", b"behind"]
    again.close()
    assert_clean(disk)
