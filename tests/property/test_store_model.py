"""The store against a list: any order of appends, reads, flushes, checkpoints, crashes, expiry.

A crash here is a killed process: what was written stays, flushed or not. Power cuts are in
tests/simulation.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from escrowmq.config import StoreConfig
from escrowmq.consume.subscription import MessageFilter
from escrowmq.errors import RecordRefused, StoreFull
from escrowmq.message.keys import java_hash
from escrowmq.message.properties import encode_properties
from escrowmq.message.record import LogOffset, NewRecord
from escrowmq.store.disk import DiskUsage
from escrowmq.store.queue_reader import ReadStatus
from escrowmq.store.retention import expire
from escrowmq.store.store import MessageStore
from escrowmq.testing import MemoryDisk
from tests.support.stores import HOST, NOW_MS, assert_clean

SETTINGS = StoreConfig(
    segment_bytes=4096,
    queue_file_bytes=80,
    index_slots=3,
    index_entries=9,
    message_bytes_max=1500,
)
EMPTY = DiskUsage(total_bytes=100, free_bytes=50)
FULL = DiskUsage(total_bytes=100, free_bytes=12)  # the oldest must go
PACKED = DiskUsage(total_bytes=100, free_bytes=5)  # and nothing new is taken

Queue = tuple[str, int]
queues = st.tuples(st.sampled_from(["orders", "stock"]), st.integers(0, 1))
keys = st.sampled_from(["a", "b", "Aa", "BB", "none"])
tags = st.sampled_from(["x", "y"])
sizes = st.sampled_from([0, 1, 50, 400, 1400])
kinds = st.sampled_from([0, 0, 0, 4, 8, 12])


@dataclass(frozen=True)
class Kept:
    """One record of the model, which is a list of these in the order of the log."""

    queue: Queue
    offset: int | None  # in its queue; None if it has no place there
    log_offset: int
    body: bytes
    tag: str
    key: str
    kind: int
    stored_ms: int


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.disk = MemoryDisk()
        self.kept: list[Kept] = []
        self.next: dict[Queue, int] = {}  # how far each queue has counted
        self.now_ms = NOW_MS
        self.stored_ms = 0
        self.count = 0

    @initialize()
    def open(self) -> None:
        self.store = MessageStore.open(self.disk, SETTINGS, store_host=HOST)
        assert self.store.recovery.damage == []
        assert self.store.recovery.torn_reason is None

    # --- steps -----------------------------------------------------------------------------------

    @rule(
        batch=st.lists(st.tuples(queues, sizes, tags, keys, kinds), min_size=1, max_size=6),
        step_ms=st.sampled_from([-5000, 0, 1, 700, 5000]),
    )
    def append(self, batch: list[tuple[Queue, int, str, str, int]], step_ms: int) -> None:
        self.now_ms += step_ms
        records = [self.record(*item) for item in batch]
        if not self.store.has_disk_space:
            with pytest.raises(StoreFull):
                self.store.append(records, now_ms=self.now_ms)
            return
        placed = self.store.append(records, now_ms=self.now_ms)
        self.stored_ms = max(self.stored_ms, self.now_ms)
        for record, place, (queue, _, tag, key, kind) in zip(records, placed, batch, strict=True):
            offset = None if kind in (4, 12) else self.next.get(queue, 0)
            assert place.queue_offset == (offset or 0)
            if offset is not None:
                self.next[queue] = offset + 1
            self.kept.append(
                Kept(queue, offset, place.log_offset, record.body, tag, key, kind, self.stored_ms)
            )

    @rule(queue=queues, bad=st.booleans())
    def append_what_is_refused(self, queue: Queue, bad: bool) -> None:
        good = self.record(queue, 10, "x", "a", 0)
        wrong = self.record(("../x" if bad else "orders", 0), 10 if bad else 1600, "x", "a", 0)
        expected = RecordRefused if self.store.has_disk_space else StoreFull
        with pytest.raises(expected):
            self.store.append([good, wrong], now_ms=self.now_ms)

    def record(self, queue: Queue, size: int, tag: str, key: str, kind: int) -> NewRecord:
        self.count += 1
        return NewRecord(
            topic=queue[0],
            queue_id=queue[1],
            body=b"%d:" % self.count + b"x" * size,
            properties=encode_properties({"TAGS": tag, "KEYS": key, "UNIQ_KEY": f"U{self.count}"}),
            sys_flag=kind,
        )

    @rule()
    def flush(self) -> None:
        assert self.store.flush() == self.store.end

    @rule()
    def checkpoint(self) -> None:
        self.store.checkpoint()
        assert self.store.checkpointed_offset == self.store.end

    @rule()
    def kill_and_open(self) -> None:
        self.store.abandon()
        self.open()

    @rule()
    def close_and_open(self) -> None:
        self.store.close()
        assert_clean(self.disk, SETTINGS)
        self.open()
        assert self.store.recovery.was_clean
        assert self.store.recovery.records == 0

    @rule(usage=st.sampled_from([EMPTY, FULL, PACKED]), keep=st.none() | st.integers(0, 5))
    def expire(self, usage: DiskUsage, keep: int | None) -> None:
        files = [base for base, _ in self.store.log_files()]
        limit = None if keep is None else LogOffset(files[0] + keep * 4096 if files else 0)
        removable = [
            base
            for base in files[:-1]
            if base + 4096 <= self.store.checkpointed_offset
            and (limit is None or base + 4096 <= limit)
        ]
        expected = 0 if usage is EMPTY else min(10, len(removable))
        removed = expire(
            self.store,
            now_ms=self.now_ms,
            hour=12,
            read_usage=lambda: usage,
            oldest_needed_offset=limit,
        )
        assert removed == expected
        assert self.store.has_disk_space is (usage is not PACKED)
        if removed:
            begin = files[removed]
            self.kept = [kept for kept in self.kept if kept.log_offset >= begin]

    # --- questions -------------------------------------------------------------------------------

    def alive(self, queue: Queue) -> dict[int, Kept]:
        return {
            kept.offset: kept
            for kept in self.kept
            if kept.queue == queue and kept.offset is not None
        }

    @rule(
        queue=queues,
        step=st.integers(-2, 40),
        count=st.integers(1, 5),
        room=st.sampled_from([0, 300, 100_000]),
        tag=st.none() | tags,
    )
    def read(self, queue: Queue, step: int, count: int, room: int, tag: str | None) -> None:
        alive, end = self.alive(queue), self.next.get(queue, 0)
        begin = min(alive, default=end)
        at = begin + step
        message_filter = None if tag is None else MessageFilter(frozenset({java_hash(tag)}))
        found = self.store.read(
            *queue, at, count_max=count, bytes_max=room, message_filter=message_filter
        )
        if at < begin or at >= end:
            assert found.count == 0
            assert found.status in NOTHING
            return
        assert (found.min_offset, found.max_offset) == (begin, end)
        expected: list[Kept] = []
        size = 0
        for offset in range(at, end):
            kept = alive[offset]
            length = self.store.record_at(kept.log_offset).size
            if tag is not None and kept.tag != tag:
                continue
            if len(expected) == count or (expected and size + length > room):
                break
            expected.append(kept)
            size += length
        assert found.count == len(expected)
        assert b"".join(found.slices) == b"".join(map(self.bytes_of, expected))
        assert found.size == size
        passed = {offset for offset in alive if at <= offset < found.next_offset}
        assert {kept.offset for kept in expected} == {
            offset for offset in passed if tag is None or alive[offset].tag == tag
        }

    def bytes_of(self, kept: Kept) -> bytes:
        record = self.store.record_at(kept.log_offset)
        assert record.body == kept.body
        found = self.store.read(*kept.queue, kept.offset or 0, count_max=1)
        return b"".join(found.slices)

    @rule(topic=st.sampled_from(["orders", "stock"]), key=keys, count=st.integers(1, 100))
    def find_by_key(self, topic: str, key: str, count: int) -> None:
        found = self.store.find_by_key(topic, key, count_max=count)
        expected = [
            kept.log_offset
            for kept in reversed(self.kept)
            if kept.queue[0] == topic and kept.key == key and kept.kind != 12
        ]
        assert [record.log_offset for record in found] == expected[: min(count, 64)]

    @rule(queue=queues, step_ms=st.integers(-10_000, 1000), upper=st.booleans())
    def offset_by_time(self, queue: Queue, step_ms: int, upper: bool) -> None:
        alive, end = self.alive(queue), self.next.get(queue, 0)
        time_ms = self.stored_ms + step_ms
        found = self.store.offset_by_time(*queue, time_ms, upper=upper)
        begin = min(alive, default=end)
        if upper:
            at_most = [at for at, kept in alive.items() if kept.stored_ms <= time_ms]
            assert found == max(at_most, default=begin)
        else:
            at_least = [at for at, kept in alive.items() if kept.stored_ms >= time_ms]
            assert found == min(at_least, default=end)

    # --- what always holds -----------------------------------------------------------------------

    @invariant()
    def the_log_holds_what_was_kept(self) -> None:
        found = [(record.log_offset, bytes(record.body)) for record in self.store.records()]
        assert found == [(kept.log_offset, kept.body) for kept in self.kept]

    @invariant()
    def queues_count_on(self) -> None:
        for queue, end in self.next.items():
            assert self.store.max_offset(*queue) == end
            assert self.store.min_offset(*queue) == min(self.alive(queue), default=end)

    @invariant()
    def offsets_stand_in_order(self) -> None:
        assert (
            self.store.begin
            <= self.store.checkpointed_offset
            <= self.store.flushed_offset
            <= self.store.end
        )

    @precondition(lambda self: self.kept)
    @invariant()
    def the_newest_is_found_by_its_unique_key(self) -> None:
        newest = self.kept[-1]
        key = "U" + newest.body.split(b":")[0].decode()
        found = [record.log_offset for record in self.store.find_by_key(newest.queue[0], key)]
        assert found == ([] if newest.kind == 12 else [newest.log_offset])

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            assert_clean(self.disk, SETTINGS)


NOTHING = {
    ReadStatus.NO_QUEUE,
    ReadStatus.EMPTY,
    ReadStatus.TOO_SMALL,
    ReadStatus.AT_END,
    ReadStatus.PAST_END,
}

StoreMachine.TestCase.settings = settings(stateful_step_count=40)
TestStore = pytest.mark.slow(StoreMachine.TestCase)
