"""Which segments expire and when: the rule as a table, then passes over a store in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from escrowmq.clock import ManualClock
from escrowmq.config import StoreConfig
from escrowmq.errors import StoreError, StoreFull
from escrowmq.message.record import LogOffset, NewRecord
from escrowmq.store.disk import DiskUsage
from escrowmq.store.queue_reader import ReadStatus
from escrowmq.store.retention import SEGMENTS_PER_PASS_MAX, expire, should_remove
from escrowmq.store.store import MessageStore
from escrowmq.testing import MemoryDisk
from tests.support.stores import NOW_MS, TINY, assert_clean, open_store, properties

HOUR_MS = 3_600_000
KEPT_MS = 72 * HOUR_MS
SEGMENT = TINY.segment_bytes
DELETE_HOUR = 4
NOON = 12


@pytest.mark.parametrize(
    ("age_ms", "hour", "used_ratio", "expected"),
    [
        (KEPT_MS, DELETE_HOUR, 0.10, False),
        (KEPT_MS + 1, DELETE_HOUR, 0.10, True),
        (KEPT_MS + 1, NOON, 0.10, False),
        (KEPT_MS + 1, NOON, 0.75, False),
        (KEPT_MS + 1, NOON, 0.76, True),
        (KEPT_MS, NOON, 0.76, False),
        (KEPT_MS, DELETE_HOUR, 0.76, False),
        (0, NOON, 0.85, False),
        (0, NOON, 0.86, True),
        (0, DELETE_HOUR, 0.86, True),
        (-HOUR_MS, NOON, 0.10, False),
        (-HOUR_MS, NOON, 0.86, True),
    ],
    ids=[
        "just not old",
        "old at the hour",
        "old at another hour",
        "old, at the ratio",
        "old, above the ratio",
        "young, above the ratio",
        "young at the hour, above the ratio",
        "new, at the forcing ratio",
        "new, above the forcing ratio",
        "new at the hour, above the forcing ratio",
        "written in the future",
        "written in the future, above the forcing ratio",
    ],
)
def test_which_segments_expire(age_ms: int, hour: int, used_ratio: float, expected: bool) -> None:
    settings = StoreConfig()
    assert (
        should_remove(
            NOW_MS - age_ms, now_ms=NOW_MS, hour=hour, used_ratio=used_ratio, config=settings
        )
        is expected
    )


class Aged:
    """A store whose segments were written an hour apart, with one record of three queues each."""

    def __init__(self, files: int, settings: StoreConfig = TINY) -> None:
        self.clock = ManualClock(NOW_MS)
        self.disk = MemoryDisk(clock=self.clock)
        self.store = open_store(self.disk, settings)
        self.used = 0.1
        self.files = 0
        self.write(files)

    def write(self, files: int) -> None:
        for _ in range(files):
            number = self.files
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
            self.clock.advance(ms=HOUR_MS)
            self.files += 1

    def usage(self) -> DiskUsage:
        return DiskUsage(total_bytes=10_000, free_bytes=round(10_000 * (1 - self.used)))

    def expire(self, *, hour: int = NOON, keep_from: int | None = None) -> int:
        return expire(
            self.store,
            now_ms=self.clock.now_ms(),
            hour=hour,
            read_usage=self.usage,
            oldest_needed_offset=None if keep_from is None else LogOffset(keep_from),
        )

    def left(self) -> list[int]:
        return [base // SEGMENT for base, _ in self.store.log_files()]


def checkpointed(files: int, settings: StoreConfig = TINY) -> Aged:
    aged = Aged(files, settings)
    aged.store.checkpoint()
    return aged


def test_segments_expire_oldest_first_up_to_the_first_young_one() -> None:
    aged = checkpointed(6)
    aged.clock.advance(ms=KEPT_MS - 4 * HOUR_MS + 1)  # two of them are old now
    assert aged.expire(hour=DELETE_HOUR) == 2
    assert aged.left() == [2, 3, 4, 5]
    assert aged.expire(hour=DELETE_HOUR) == 0


def test_at_another_hour_old_segments_stay_until_the_disk_fills_up() -> None:
    aged = checkpointed(4)
    aged.clock.advance(ms=KEPT_MS)
    assert aged.expire(hour=NOON) == 0
    aged.used = 0.8
    assert aged.expire(hour=NOON) == 3


def test_on_a_full_disk_young_segments_expire_too() -> None:
    aged = checkpointed(6)
    ratios = [0.88, 0.87, 0.86, 0.84]

    def usage() -> DiskUsage:
        return DiskUsage(total_bytes=100, free_bytes=round(100 * (1 - ratios.pop(0))))

    assert expire(aged.store, now_ms=NOW_MS, hour=NOON, read_usage=usage) == 3
    assert ratios == []
    assert aged.left() == [3, 4, 5]


def test_the_last_segment_always_stays() -> None:
    aged = checkpointed(3)
    aged.used = 0.88
    assert aged.expire() == 2
    assert aged.left() == [2]
    assert aged.expire() == 0


def test_a_pass_removes_a_limited_number_of_segments() -> None:
    aged = checkpointed(SEGMENTS_PER_PASS_MAX + 4)
    aged.used = 0.88
    assert SEGMENTS_PER_PASS_MAX == 10
    assert aged.expire() == 10
    assert aged.expire() == 3
    assert aged.left() == [13]


@pytest.mark.parametrize(
    ("keep_from", "removed"),
    [(0, 0), (1, 0), (SEGMENT - 1, 0), (SEGMENT, 1), (SEGMENT + 1, 1), (3 * SEGMENT, 3)],
)
def test_needed_segments_stay_whatever_their_age(keep_from: int, removed: int) -> None:
    aged = checkpointed(6)
    aged.used = 0.88
    assert aged.expire(keep_from=keep_from) == removed
    assert aged.store.begin <= keep_from


def test_segments_above_the_checkpoint_stay() -> None:
    aged = Aged(3)
    aged.used = 0.88
    assert aged.expire() == 0
    aged.store.checkpoint()
    aged.write(3)
    assert aged.expire() == 2
    assert aged.left() == [2, 3, 4, 5]
    with pytest.raises(StoreError, match="still needed"):
        aged.store.remove_oldest_file()
    aged.store.checkpoint()
    assert aged.expire() == 3


@pytest.mark.parametrize(("used", "accepts"), [(0.5, True), (0.90, True), (0.91, False)])
def test_a_nearly_full_disk_refuses_messages(used: float, accepts: bool) -> None:
    aged = checkpointed(2)
    aged.used = used
    aged.expire()
    assert aged.store.has_disk_space is accepts
    if not accepts:
        with pytest.raises(StoreFull):
            aged.write(1)
    aged.used = 0.5
    aged.expire()
    assert aged.store.has_disk_space
    aged.write(1)


def test_the_age_of_a_segment_is_its_last_write() -> None:
    aged = checkpointed(3)
    aged.clock.advance(ms=KEPT_MS)
    first = aged.disk.open(f"commitlog/{0:020d}")
    first.write_at(SEGMENT - 1, b"\0")
    assert aged.expire(hour=DELETE_HOUR) == 0


def test_queue_files_expire_with_their_messages() -> None:
    aged = checkpointed(12, replace(TINY, queue_file_bytes=60))  # three entries each
    aged.used = 0.88
    assert len(aged.disk.names("consumequeue/T/0")) == 4
    aged.expire(keep_from=7 * SEGMENT)
    assert aged.left()[0] == 7
    assert len(aged.disk.names("consumequeue/T/0")) == 4  # the checkpoint on disk counts on them
    aged.store.checkpoint()
    assert aged.disk.names("consumequeue/T/0") == [f"{120:020d}", f"{180:020d}"]
    assert aged.disk.names("consumequeue/T/2") == [f"{120:020d}", f"{180:020d}"]
    for queue_id in range(3):
        assert aged.store.min_offset("T", queue_id) == 7
        assert aged.store.max_offset("T", queue_id) == 12


def test_index_files_expire_with_their_messages() -> None:
    settings = replace(TINY, index_entries=7)  # six keys each: two log files
    aged = checkpointed(8, settings)
    names = aged.disk.names("index")
    assert len(names) == 4
    aged.used = 0.88
    aged.expire(keep_from=5 * SEGMENT)
    aged.store.checkpoint()
    assert aged.disk.names("index") == names[2:]
    assert aged.store.find_by_key("T", "k4") == []
    assert len(aged.store.find_by_key("T", "k5")) == 3


def test_reading_continues_behind_expired_messages() -> None:
    aged = checkpointed(6)
    aged.used = 0.88
    aged.expire(keep_from=4 * SEGMENT)
    found = aged.store.read("T", 1, 0)
    assert (found.status, found.next_offset, found.min_offset, found.max_offset) == (
        ReadStatus.TOO_SMALL,
        4,
        4,
        6,
    )
    assert aged.store.read("T", 1, 3).status is ReadStatus.TOO_SMALL
    assert aged.store.read("T", 1, 4).count == 2
    assert [bytes(record.body[:2]) for record in aged.store.records()][::3] == [b"4.", b"5."]
    with pytest.raises(StoreError, match="log_offset=0 is not in"):
        aged.store.record_at(0)


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_a_restart_keeps_what_has_not_expired(killed: bool) -> None:
    aged = checkpointed(6)
    aged.used = 0.88
    aged.expire(keep_from=4 * SEGMENT)
    aged.write(1)
    aged.store.flush()
    if killed:
        aged.store.abandon()
    else:
        aged.store.close()
    store = open_store(aged.disk)
    assert store.recovery.damage == []
    assert store.begin == 4 * SEGMENT
    for queue_id in range(3):
        assert (store.min_offset("T", queue_id), store.max_offset("T", queue_id)) == (4, 7)
        assert store.read("T", queue_id, 4).count == 3
    store.close()
    assert_clean(aged.disk)


def test_slices_that_were_read_outlive_their_file() -> None:
    aged = checkpointed(3)
    found = aged.store.read("T", 0, 0, count_max=1)
    before = [bytes(data) for data in found.slices]
    aged.used = 0.88
    aged.expire()
    aged.store.close()
    assert [bytes(data) for data in found.slices] == before


def test_nothing_expires_in_an_empty_store() -> None:
    store: MessageStore = open_store(MemoryDisk())
    full = DiskUsage(total_bytes=100, free_bytes=0)
    assert expire(store, now_ms=NOW_MS, hour=NOON, read_usage=lambda: full) == 0
