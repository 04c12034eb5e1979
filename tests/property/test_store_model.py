"""The store against a list: appends, reads, flushes, checkpoints, crashes and expiry in any order.

A crash is a killed process here: all that was written stays, flushed or not. Power cuts are in
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
ENOUGH_SPACE = DiskUsage(total_bytes=100, free_bytes=50)
MUST_EXPIRE = DiskUsage(total_bytes=100, free_bytes=12)  # expire old segments
MUST_REFUSE = DiskUsage(total_bytes=100, free_bytes=5)  # and refuse appends

Queue = tuple[str, int]
queues = st.tuples(st.sampled_from(["orders", "stock"]), st.integers(0, 1))
keys = st.sampled_from(["a", "b", "Aa", "BB", "none"])
tags = st.sampled_from(["x", "y"])
sizes = st.sampled_from([0, 1, 50, 400, 1400])
transaction_types = st.sampled_from([0, 0, 0, 4, 8, 12])


@dataclass(frozen=True)
class ModelRecord:
    """A record of the model, which is a list of records in the order of the log."""

    queue: Queue
    queue_offset: int | None  # None if the record has no queue entry
    log_offset: int
    body: bytes
    tag: str
    key: str
    transaction_type: int
    stored_ms: int


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.disk = MemoryDisk()
        self.records: list[ModelRecord] = []
        self.next_offsets: dict[Queue, int] = {}
        self.now_ms = NOW_MS
        self.stored_ms = 0
        self.count = 0

    @initialize()
    def open(self) -> None:
        self.store = MessageStore.open(self.disk, SETTINGS, store_host=HOST)
        assert self.store.recovery.damage == []
        assert self.store.recovery.torn_reason is None

    # --- changes ---------------------------------------------------------------------------------

    @rule(
        batch=st.lists(
            st.tuples(queues, sizes, tags, keys, transaction_types), min_size=1, max_size=6
        ),
        step_ms=st.sampled_from([-5000, 0, 1, 700, 5000]),
    )
    def append(self, batch: list[tuple[Queue, int, str, str, int]], step_ms: int) -> None:
        self.now_ms += step_ms
        records = [self.new_record(*item) for item in batch]
        if not self.store.has_disk_space:
            with pytest.raises(StoreFull):
                self.store.append(records, now_ms=self.now_ms)
            return
        results = self.store.append(records, now_ms=self.now_ms)
        self.stored_ms = max(self.stored_ms, self.now_ms)
        for record, result, (queue, _, tag, key, transaction_type) in zip(
            records, results, batch, strict=True
        ):
            offset = None if transaction_type in (4, 12) else self.next_offsets.get(queue, 0)
            assert result.queue_offset == (offset or 0)
            if offset is not None:
                self.next_offsets[queue] = offset + 1
            self.records.append(
                ModelRecord(
                    queue,
                    offset,
                    result.log_offset,
                    record.body,
                    tag,
                    key,
                    transaction_type,
                    self.stored_ms,
                )
            )

    @rule(queue=queues, has_bad_topic=st.booleans())
    def append_invalid_record(self, queue: Queue, has_bad_topic: bool) -> None:
        valid = self.new_record(queue, 10, "x", "a", 0)
        if has_bad_topic:
            invalid = self.new_record(("../x", 0), 10, "x", "a", 0)
        else:
            invalid = self.new_record(("orders", 0), SETTINGS.segment_bytes, "x", "a", 0)
        expected = RecordRefused if self.store.has_disk_space else StoreFull
        with pytest.raises(expected):
            self.store.append([valid, invalid], now_ms=self.now_ms)

    def new_record(
        self, queue: Queue, size: int, tag: str, key: str, transaction_type: int
    ) -> NewRecord:
        self.count += 1
        return NewRecord(
            topic=queue[0],
            queue_id=queue[1],
            body=b"%d:" % self.count + b"x" * size,
            properties=encode_properties({"TAGS": tag, "KEYS": key, "UNIQ_KEY": f"U{self.count}"}),
            sys_flag=transaction_type,
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

    @rule(
        usage=st.sampled_from([ENOUGH_SPACE, MUST_EXPIRE, MUST_REFUSE]),
        removable_count=st.none() | st.integers(0, 5),
    )
    def expire(self, usage: DiskUsage, removable_count: int | None) -> None:
        segments = [base for base, _ in self.store.log_files()]
        oldest_needed = None
        if removable_count is not None:
            oldest_needed = LogOffset(segments[0] + removable_count * 4096 if segments else 0)
        removable = [
            base
            for base in segments[:-1]
            if base + 4096 <= self.store.checkpointed_offset
            and (oldest_needed is None or base + 4096 <= oldest_needed)
        ]
        expected = 0 if usage is ENOUGH_SPACE else min(10, len(removable))
        removed = expire(
            self.store,
            age_of=lambda _: 0,
            hour=12,
            read_usage=lambda: usage,
            oldest_needed_offset=oldest_needed,
        )
        assert removed == expected
        assert self.store.has_disk_space is (usage is not MUST_REFUSE)
        if removed:
            begin = segments[removed]
            self.records = [record for record in self.records if record.log_offset >= begin]

    # --- reads -----------------------------------------------------------------------------------

    def live_records(self, queue: Queue) -> dict[int, ModelRecord]:
        """Return the records of a queue that have not expired, by queue offset."""
        return {
            record.queue_offset: record
            for record in self.records
            if record.queue == queue and record.queue_offset is not None
        }

    @rule(
        queue=queues,
        step=st.integers(-2, 40),
        count=st.integers(1, 5),
        bytes_max=st.sampled_from([0, 300, 100_000]),
        tag=st.none() | tags,
    )
    def read(self, queue: Queue, step: int, count: int, bytes_max: int, tag: str | None) -> None:
        live_records, max_offset = self.live_records(queue), self.next_offsets.get(queue, 0)
        min_offset = min(live_records, default=max_offset)
        begin_offset = min_offset + step
        message_filter = None if tag is None else MessageFilter(frozenset({java_hash(tag)}))
        result = self.store.read(
            *queue,
            begin_offset,
            count_max=count,
            bytes_max=bytes_max,
            message_filter=message_filter,
        )
        if begin_offset < min_offset or begin_offset >= max_offset:
            assert result.count == 0
            assert result.status in EMPTY_READS
            return
        assert (result.min_offset, result.max_offset) == (min_offset, max_offset)
        expected: list[ModelRecord] = []
        total_bytes = 0
        for offset in range(begin_offset, max_offset):
            record = live_records[offset]
            record_bytes = self.store.record_at(record.log_offset).size
            if tag is not None and record.tag != tag:
                continue
            if len(expected) == count or (expected and total_bytes + record_bytes > bytes_max):
                break
            expected.append(record)
            total_bytes += record_bytes
        assert result.count == len(expected)
        assert b"".join(result.slices) == b"".join(map(self.bytes_of, expected))
        assert result.size == total_bytes
        passed_offsets = {
            offset for offset in live_records if begin_offset <= offset < result.next_offset
        }
        assert {record.queue_offset for record in expected} == {
            offset for offset in passed_offsets if tag is None or live_records[offset].tag == tag
        }

    def bytes_of(self, record: ModelRecord) -> bytes:
        """Return the stored bytes of a record that has a queue entry."""
        assert self.store.record_at(record.log_offset).body == record.body
        result = self.store.read(*record.queue, record.queue_offset or 0, count_max=1)
        return b"".join(result.slices)

    @rule(topic=st.sampled_from(["orders", "stock"]), key=keys, count=st.integers(1, 100))
    def find_by_key(self, topic: str, key: str, count: int) -> None:
        records = self.store.find_by_key(topic, key, count_max=count)
        expected = [
            record.log_offset
            for record in reversed(self.records)
            if record.queue[0] == topic and record.key == key and record.transaction_type != 12
        ]
        assert [record.log_offset for record in records] == expected[: min(count, 64)]

    @rule(queue=queues, step_ms=st.integers(-10_000, 1000), upper=st.booleans())
    def offset_by_time(self, queue: Queue, step_ms: int, upper: bool) -> None:
        live_records, end = self.live_records(queue), self.next_offsets.get(queue, 0)
        time_ms = self.stored_ms + step_ms
        actual = self.store.offset_by_time(*queue, time_ms, upper=upper)
        begin = min(live_records, default=end)
        if upper:
            at_most = [
                queue_offset
                for queue_offset, record in live_records.items()
                if record.stored_ms <= time_ms
            ]
            assert actual == max(at_most, default=begin)
        else:
            at_least = [
                queue_offset
                for queue_offset, record in live_records.items()
                if record.stored_ms >= time_ms
            ]
            assert actual == min(at_least, default=end)

    # --- invariants ------------------------------------------------------------------------------

    @invariant()
    def log_equals_the_model(self) -> None:
        actual = [(record.log_offset, bytes(record.body)) for record in self.store.records()]
        assert actual == [(record.log_offset, record.body) for record in self.records]

    @invariant()
    def queue_offsets_equal_the_model(self) -> None:
        for queue, end in self.next_offsets.items():
            assert self.store.max_offset(*queue) == end
            assert self.store.min_offset(*queue) == min(self.live_records(queue), default=end)

    @invariant()
    def log_offsets_are_in_order(self) -> None:
        assert (
            self.store.begin
            <= self.store.checkpointed_offset
            <= self.store.flushed_offset
            <= self.store.end
        )

    @precondition(lambda self: self.records)
    @invariant()
    def newest_record_is_found_by_its_unique_key(self) -> None:
        newest = self.records[-1]
        key = "U" + newest.body.split(b":")[0].decode()
        actual = [record.log_offset for record in self.store.find_by_key(newest.queue[0], key)]
        assert actual == ([] if newest.transaction_type == 12 else [newest.log_offset])

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            assert_clean(self.disk, SETTINGS)


EMPTY_READS = {
    ReadStatus.NO_QUEUE,
    ReadStatus.EMPTY,
    ReadStatus.TOO_SMALL,
    ReadStatus.AT_END,
    ReadStatus.PAST_END,
}

StoreMachine.TestCase.settings = settings(stateful_step_count=40)
TestStore = pytest.mark.slow(StoreMachine.TestCase)
