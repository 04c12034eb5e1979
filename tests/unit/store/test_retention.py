"""Which segments expire and when: the rule as a table, then expiry passes over a store."""

from __future__ import annotations

from dataclasses import replace

import pytest

from escrowmq.clock import ManualClock
from escrowmq.config import StoreConfig
from escrowmq.errors import StoreError, StoreFull
from escrowmq.message.record import LogOffset, NewRecord
from escrowmq.store.disk import DiskUsage
from escrowmq.store.log_ages import LogAges
from escrowmq.store.queue_reader import ReadStatus
from escrowmq.store.retention import SEGMENTS_PER_PASS_MAX, expire, should_remove
from escrowmq.store.store import MessageStore
from escrowmq.testing import MemoryDisk
from tests.support.stores import NOW_MS, TINY, assert_clean, open_store, properties

HOUR_MS = 3_600_000
RETENTION_MS = 72 * HOUR_MS
SEGMENT_BYTES = TINY.segment_bytes
DELETE_HOUR = 4
NOON_HOUR = 12


@pytest.mark.parametrize(
    ("age_ms", "hour", "used_ratio", "expected"),
    [
        (RETENTION_MS, DELETE_HOUR, 0.10, False),
        (RETENTION_MS + 1, DELETE_HOUR, 0.10, True),
        (RETENTION_MS + 1, NOON_HOUR, 0.10, False),
        (RETENTION_MS + 1, NOON_HOUR, 0.75, False),
        (RETENTION_MS + 1, NOON_HOUR, 0.76, True),
        (RETENTION_MS, NOON_HOUR, 0.76, False),
        (RETENTION_MS, DELETE_HOUR, 0.76, False),
        (0, NOON_HOUR, 0.85, False),
        (0, NOON_HOUR, 0.86, True),
        (0, DELETE_HOUR, 0.86, True),
        (-HOUR_MS, NOON_HOUR, 0.10, False),
        (-HOUR_MS, NOON_HOUR, 0.86, True),
    ],
    ids=[
        "exactly at the retention time",
        "expired, at the delete hour",
        "expired, at another hour",
        "expired, at the cleaning ratio",
        "expired, above the cleaning ratio",
        "not expired, above the cleaning ratio",
        "not expired, at the delete hour, above the cleaning ratio",
        "new, at the forced cleaning ratio",
        "new, above the forced cleaning ratio",
        "new, at the delete hour, above the forced cleaning ratio",
        "written in the future",
        "written in the future, above the forced cleaning ratio",
    ],
)
def test_which_segments_expire(age_ms: int, hour: int, used_ratio: float, expected: bool) -> None:
    settings = StoreConfig()
    assert should_remove(age_ms, hour=hour, used_ratio=used_ratio, config=settings) is expected


class AgedStore:
    """A store with segments written an hour apart. Each has one record of each of three queues."""

    def __init__(self, segments: int, settings: StoreConfig = TINY) -> None:
        self.clock = ManualClock(NOW_MS)
        self.disk = MemoryDisk(clock=self.clock)
        self.store = open_store(self.disk, settings)
        self.used_ratio = 0.1
        self.segments = 0
        self.ages = LogAges("boot", None)
        self.write(segments)

    def write(self, segments: int) -> None:
        for _ in range(segments):
            number = self.segments
            records = [
                NewRecord(
                    topic="T",
                    queue_id=queue_id,
                    body=b"%d." % number + b"x" * 1100,
                    properties=properties(KEYS=f"k{number}"),
                )
                for queue_id in range(3)
            ]
            self.store.append(records, now_ms=self.clock.now_ms())
            self.ages.add_mark(self.store.end, elapsed_ms=self.elapsed_ms(), broker_ms=0)
            self.clock.advance(ms=HOUR_MS)
            self.segments += 1

    def elapsed_ms(self) -> int:
        return round(self.clock.elapsed_s() * 1000)

    def age_of(self, log_offset: int) -> int:
        return self.ages.age_ms(log_offset, elapsed_ms=self.elapsed_ms())

    def usage(self) -> DiskUsage:
        return DiskUsage(total_bytes=10_000, free_bytes=round(10_000 * (1 - self.used_ratio)))

    def expire(self, *, hour: int = NOON_HOUR, keep_from: int | None = None) -> int:
        return expire(
            self.store,
            age_of=self.age_of,
            hour=hour,
            read_usage=self.usage,
            oldest_needed_offset=None if keep_from is None else LogOffset(keep_from),
        )

    def segment_numbers(self) -> list[int]:
        return [base // SEGMENT_BYTES for base, _ in self.store.log_files()]


def checkpointed_store(segments: int, settings: StoreConfig = TINY) -> AgedStore:
    aged_store = AgedStore(segments, settings)
    aged_store.store.checkpoint()
    return aged_store


def test_segments_expire_oldest_first_up_to_the_first_that_is_not_old_enough() -> None:
    aged_store = checkpointed_store(6)
    aged_store.clock.advance(ms=RETENTION_MS - 4 * HOUR_MS + 1)  # two of them have expired
    assert aged_store.expire(hour=DELETE_HOUR) == 2
    assert aged_store.segment_numbers() == [2, 3, 4, 5]
    assert aged_store.expire(hour=DELETE_HOUR) == 0


def test_expired_segments_stay_at_other_hours_until_the_disk_fills_up() -> None:
    aged_store = checkpointed_store(4)
    aged_store.clock.advance(ms=RETENTION_MS)
    assert aged_store.expire(hour=NOON_HOUR) == 0
    aged_store.used_ratio = 0.8
    assert aged_store.expire(hour=NOON_HOUR) == 3


def test_new_segments_are_removed_too_when_the_disk_is_full() -> None:
    aged_store = checkpointed_store(6)
    ratios = [0.88, 0.87, 0.86, 0.84]

    def usage() -> DiskUsage:
        return DiskUsage(total_bytes=100, free_bytes=round(100 * (1 - ratios.pop(0))))

    age_of = aged_store.age_of
    assert expire(aged_store.store, age_of=age_of, hour=NOON_HOUR, read_usage=usage) == 3
    assert ratios == []
    assert aged_store.segment_numbers() == [3, 4, 5]


def test_the_last_segment_always_stays() -> None:
    aged_store = checkpointed_store(3)
    aged_store.used_ratio = 0.88
    assert aged_store.expire() == 2
    assert aged_store.segment_numbers() == [2]
    assert aged_store.expire() == 0


def test_a_pass_removes_a_limited_number_of_segments() -> None:
    aged_store = checkpointed_store(SEGMENTS_PER_PASS_MAX + 4)
    aged_store.used_ratio = 0.88
    assert SEGMENTS_PER_PASS_MAX == 10
    assert aged_store.expire() == 10
    assert aged_store.expire() == 3
    assert aged_store.segment_numbers() == [13]


@pytest.mark.parametrize(
    ("keep_from", "removed_count"),
    [
        (0, 0),
        (1, 0),
        (SEGMENT_BYTES - 1, 0),
        (SEGMENT_BYTES, 1),
        (SEGMENT_BYTES + 1, 1),
        (3 * SEGMENT_BYTES, 3),
    ],
)
def test_needed_segments_stay_whatever_their_age(keep_from: int, removed_count: int) -> None:
    aged_store = checkpointed_store(6)
    aged_store.used_ratio = 0.88
    assert aged_store.expire(keep_from=keep_from) == removed_count
    assert aged_store.store.begin <= keep_from


def test_segments_above_the_checkpoint_stay() -> None:
    aged_store = AgedStore(3)
    aged_store.used_ratio = 0.88
    assert aged_store.expire() == 0
    aged_store.store.checkpoint()
    aged_store.write(3)
    assert aged_store.expire() == 2
    assert aged_store.segment_numbers() == [2, 3, 4, 5]
    with pytest.raises(StoreError, match="still needed"):
        aged_store.store.remove_oldest_file()
    aged_store.store.checkpoint()
    assert aged_store.expire() == 3


@pytest.mark.parametrize(
    ("used_ratio", "accepts_messages"), [(0.5, True), (0.90, True), (0.91, False)]
)
def test_a_nearly_full_disk_refuses_messages(used_ratio: float, accepts_messages: bool) -> None:
    aged_store = checkpointed_store(2)
    aged_store.used_ratio = used_ratio
    aged_store.expire()
    assert aged_store.store.has_disk_space is accepts_messages
    if not accepts_messages:
        with pytest.raises(StoreFull):
            aged_store.write(1)
    aged_store.used_ratio = 0.5
    aged_store.expire()
    assert aged_store.store.has_disk_space
    aged_store.write(1)


def test_a_clock_that_is_far_ahead_removes_nothing() -> None:
    aged_store = checkpointed_store(3)
    aged_store.clock.step_wall_clock(ms=1000 * RETENTION_MS)
    assert aged_store.expire(hour=DELETE_HOUR) == 0
    aged_store.clock.step_wall_clock(ms=-2000 * RETENTION_MS)
    aged_store.clock.advance(ms=RETENTION_MS)  # a clock that is behind does not keep them either
    assert aged_store.expire(hour=DELETE_HOUR) == 2


def test_queue_files_expire_with_their_messages() -> None:
    aged_store = checkpointed_store(12, replace(TINY, queue_file_bytes=60))  # three entries each
    aged_store.used_ratio = 0.88
    assert len(aged_store.disk.names("consumequeue/T/0")) == 4
    aged_store.expire(keep_from=7 * SEGMENT_BYTES)
    assert aged_store.segment_numbers()[0] == 7
    assert (
        len(aged_store.disk.names("consumequeue/T/0")) == 4
    )  # the checkpoint on disk refers to them
    aged_store.store.checkpoint()
    assert aged_store.disk.names("consumequeue/T/0") == [f"{120:020d}", f"{180:020d}"]
    assert aged_store.disk.names("consumequeue/T/2") == [f"{120:020d}", f"{180:020d}"]
    for queue_id in range(3):
        assert aged_store.store.min_offset("T", queue_id) == 7
        assert aged_store.store.max_offset("T", queue_id) == 12


def test_index_files_expire_with_their_messages() -> None:
    settings = replace(TINY, index_entries=7)  # six keys per file: those of two segments
    aged_store = checkpointed_store(8, settings)
    names = aged_store.disk.names("index")
    assert len(names) == 4
    aged_store.used_ratio = 0.88
    aged_store.expire(keep_from=5 * SEGMENT_BYTES)
    aged_store.store.checkpoint()
    assert aged_store.disk.names("index") == names[2:]
    assert aged_store.store.find_by_key("T", "k4") == []
    assert len(aged_store.store.find_by_key("T", "k5")) == 3


def test_reads_continue_after_expired_messages() -> None:
    aged_store = checkpointed_store(6)
    aged_store.used_ratio = 0.88
    aged_store.expire(keep_from=4 * SEGMENT_BYTES)
    result = aged_store.store.read("T", 1, 0)
    assert (result.status, result.next_offset, result.min_offset, result.max_offset) == (
        ReadStatus.TOO_SMALL,
        4,
        4,
        6,
    )
    assert aged_store.store.read("T", 1, 3).status is ReadStatus.TOO_SMALL
    assert aged_store.store.read("T", 1, 4).count == 2
    assert [bytes(record.body[:2]) for record in aged_store.store.records()][::3] == [b"4.", b"5."]
    with pytest.raises(StoreError, match="log_offset=0 is not in"):
        aged_store.store.record_at(0)


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_a_restart_keeps_what_has_not_expired(killed: bool) -> None:
    aged_store = checkpointed_store(6)
    aged_store.used_ratio = 0.88
    aged_store.expire(keep_from=4 * SEGMENT_BYTES)
    aged_store.write(1)
    aged_store.store.flush()
    if killed:
        aged_store.store.abandon()
    else:
        aged_store.store.close()
    store = open_store(aged_store.disk)
    assert store.recovery.damage == []
    assert store.begin == 4 * SEGMENT_BYTES
    for queue_id in range(3):
        assert (store.min_offset("T", queue_id), store.max_offset("T", queue_id)) == (4, 7)
        assert store.read("T", queue_id, 4).count == 3
    store.close()
    assert_clean(aged_store.disk)


def test_slices_of_a_read_stay_valid_after_their_segment_is_removed() -> None:
    aged_store = checkpointed_store(3)
    result = aged_store.store.read("T", 0, 0, count_max=1)
    before = [bytes(data) for data in result.slices]
    aged_store.used_ratio = 0.88
    aged_store.expire()
    aged_store.store.close()
    assert [bytes(data) for data in result.slices] == before


def test_nothing_expires_in_an_empty_store() -> None:
    store: MessageStore = open_store(MemoryDisk())
    full = DiskUsage(total_bytes=100, free_bytes=0)
    assert expire(store, age_of=lambda _: 0, hour=NOON_HOUR, read_usage=lambda: full) == 0
