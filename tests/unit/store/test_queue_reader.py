"""Reads of queues with filters and limits, and queue offsets by time."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from escrowmq.consume.subscription import (
    TAG_SCAN_MAX,
    MessageFilter,
    compile_subscription,
    parse_subscription,
)
from escrowmq.errors import CorruptRecord, RecordNotFound
from escrowmq.message.keys import decode_offset_id, encode_offset_id
from escrowmq.message.record import NewRecord, QueueOffset
from escrowmq.store.commit_log import CommitLog, LogBatch
from escrowmq.store.consume_queue import ConsumeQueue, QueueBlocks
from escrowmq.store.damage import DamageKind
from escrowmq.store.disk import Disk, OpenFiles, RealDisk
from escrowmq.store.queue_reader import EntryFilter, ReadStatus, offset_by_time
from escrowmq.store.store import MessageStore
from escrowmq.testing import FaultyDisk, MemoryDisk
from tests.support.store_appends import FIRST_FILE, append, bodies, plain
from tests.support.stores import (
    HOST,
    NOW_MS,
    TINY,
    fill,
    open_store,
    properties,
)

# --- reading -------------------------------------------------------------------------------------


@pytest.fixture(params=["in memory", "in files", "in both"])
def ten_records(request: pytest.FixtureRequest) -> MessageStore:
    """Return a store with ten adjacent records; their entries are in memory or in files."""
    store = open_store(MemoryDisk(), replace(TINY, queue_file_bytes=80))
    for number in range(10):
        append(store, plain(b"%d" % number))
        if request.param == "in files" or (request.param == "in both" and number == 5):
            store.checkpoint()
    return store


def test_adjacent_records_are_one_slice(ten_records: MessageStore) -> None:
    forget_recent_appends(ten_records)
    result = ten_records.read("T", 0, 0)
    assert result.status is ReadStatus.FOUND
    assert [len(data) for data in result.slices] == [10 * 93]
    assert bodies(result) == [b"%d" % number for number in range(10)]
    assert (result.next_offset, result.min_offset, result.max_offset, result.size) == (
        10,
        0,
        10,
        930,
    )


def test_a_read_can_begin_at_any_offset(ten_records: MessageStore) -> None:
    for begin in range(10):
        result = ten_records.read("T", 0, begin)
        assert bodies(result) == [b"%d" % number for number in range(begin, 10)]
        assert result.next_offset == 10


def test_a_read_returns_at_most_count_max_records(ten_records: MessageStore) -> None:
    for begin in range(10):
        for count in range(1, 12):
            result = ten_records.read("T", 0, begin, count_max=count)
            end = min(10, begin + count)
            assert bodies(result) == [b"%d" % number for number in range(begin, end)]
            assert result.next_offset == end


@pytest.mark.parametrize(
    ("bytes_max", "count"), [(0, 1), (1, 1), (93, 1), (185, 1), (186, 2), (929, 9), (930, 10)]
)
def test_a_read_returns_at_most_bytes_max_but_at_least_one_record(
    ten_records: MessageStore, bytes_max: int, count: int
) -> None:
    result = ten_records.read("T", 0, 0, bytes_max=bytes_max)
    assert result.count == count
    assert result.next_offset == count
    assert len(bodies(result)) == count


def test_records_that_are_not_adjacent_are_separate_slices(store: MessageStore) -> None:
    append(store, plain(b"a"), plain(b"b"), plain(b"-", queue_id=1), plain(b"c"), plain(b"d"))
    result = store.read("T", 0, 0)
    assert [len(data) // 93 for data in result.slices] == [2, 2]
    assert bodies(result) == [b"a", b"b", b"c", b"d"]


def test_a_slice_does_not_cross_the_end_of_a_segment(store: MessageStore) -> None:
    append(store, *(plain(b"x" * 1000) for _ in range(5)))
    result = store.read("T", 0, 0)
    assert [len(data) // 1092 for data in result.slices] == [3, 2]
    assert result.count == 5


@pytest.mark.parametrize("kind", ["real", "memory"])
@pytest.mark.parametrize("is_recent", [True, False])
def test_slices_stay_valid_after_the_store_is_closed(
    tmp_path: Path, kind: str, is_recent: bool
) -> None:
    disk: Disk = RealDisk(tmp_path) if kind == "real" else MemoryDisk()
    store = open_store(disk)
    append(store, plain(b"first"), plain(b"second"))
    if not is_recent:
        forget_recent_appends(store)
    result = store.read("T", 0, 0)
    assert all(data.readonly for data in result.slices)
    store.close()
    assert bodies(result) == [b"first", b"second"]


def tagged(tag: str, body: bytes = b"") -> NewRecord:
    return plain(body, properties=properties(TAGS=tag))


def tag_filter(tag: str) -> EntryFilter:
    return compile_subscription(parse_subscription("T", tag))


def sql_filter(expression: str) -> MessageFilter:
    return compile_subscription(parse_subscription("T", expression, expression_type="SQL92"))


def test_a_filter_selects_by_tags_code(store: MessageStore) -> None:
    append(store, *(tagged("odd" if number % 2 else "even", b"%d" % number) for number in range(9)))
    odd = store.read("T", 0, 0, message_filter=tag_filter("odd"))
    assert bodies(odd) == [b"1", b"3", b"5", b"7"]
    assert odd.next_offset == 9
    first_read = store.read("T", 0, 0, message_filter=tag_filter("odd"), count_max=2)
    assert bodies(first_read) == [b"1", b"3"]
    assert bodies(store.read("T", 0, first_read.next_offset, message_filter=tag_filter("odd"))) == [
        b"5",
        b"7",
    ]


def test_a_filter_selects_by_properties(store: MessageStore) -> None:
    append(
        store, *(plain(b"%d" % number, properties=properties(n=str(number))) for number in range(9))
    )
    result = store.read("T", 0, 0, message_filter=sql_filter("n > 2 AND n < 5"))
    assert bodies(result) == [b"3", b"4"]
    assert result.next_offset == 9


def test_properties_are_read_only_if_the_tags_code_matches(store: MessageStore) -> None:
    append(store, *(tagged("odd" if number % 2 else "even", b"%d" % number) for number in range(9)))
    tested: list[bytes] = []

    def reject(encoded: bytes) -> bool:
        tested.append(encoded)
        return False

    odd = tag_filter("odd").tags_codes
    result = store.read("T", 0, 0, message_filter=MessageFilter(odd, reject))
    assert result.status is ReadStatus.NO_MATCH
    assert tested == [properties(TAGS="odd")] * 4


def test_a_filter_by_properties_limits_the_messages_it_tests(store: MessageStore) -> None:
    append(store, *(plain() for _ in range(9)))
    message_filter = replace(sql_filter("n = 1"), scan_max=4)
    first = store.read("T", 0, 0, message_filter=message_filter, count_max=2)
    assert (first.status, first.next_offset) == (ReadStatus.NO_MATCH, 4)
    second = store.read("T", 0, 0, message_filter=message_filter, count_max=6)
    assert (second.status, second.next_offset) == (ReadStatus.NO_MATCH, 6)


def test_a_filter_that_matches_nothing_still_advances_the_next_offset(store: MessageStore) -> None:
    append(store, *(tagged("a") for _ in range(9)))
    result = store.read("T", 0, 2, message_filter=tag_filter("b"))
    assert result.status is ReadStatus.NO_MATCH
    assert (result.next_offset, result.count, result.slices) == (9, 0, [])


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_filter_tests_a_limited_number_of_entries(checkpointed: bool) -> None:
    store = open_store(MemoryDisk(), replace(TINY, segment_bytes=1 << 20, queue_file_bytes=4000))
    append(store, *(tagged("a") for _ in range(TAG_SCAN_MAX + 50)), tagged("b", b"found"))
    if checkpointed:
        store.checkpoint()
    result = store.read("T", 0, 0, message_filter=tag_filter("b"))
    assert (result.status, result.next_offset) == (ReadStatus.NO_MATCH, TAG_SCAN_MAX)
    assert bodies(store.read("T", 0, result.next_offset, message_filter=tag_filter("b"))) == [
        b"found"
    ]
    long_read = store.read("T", 0, 0, message_filter=tag_filter("b"), count_max=TAG_SCAN_MAX + 51)
    assert bodies(long_read) == [b"found"]


def test_the_status_of_a_read_without_messages(store: MessageStore) -> None:
    append(store, plain(), plain())
    append(store, plain(topic="Half", sys_flag=4))

    def read_status(topic: str, offset: int) -> tuple[ReadStatus, int, int, int]:
        result = store.read(topic, 0, offset)
        assert (result.count, result.slices, result.size) == (0, [], 0)
        return result.status, result.next_offset, result.min_offset, result.max_offset

    assert read_status("Other", 5) == (ReadStatus.NO_QUEUE, 0, 0, 0)
    assert read_status("Half", 0) == (ReadStatus.NO_QUEUE, 0, 0, 0)
    assert read_status("Half", 3) == (ReadStatus.NO_QUEUE, 0, 0, 0)
    assert read_status("T", 2) == (ReadStatus.AT_END, 2, 0, 2)
    assert read_status("T", 3) == (ReadStatus.PAST_END, 2, 0, 2)
    assert read_status("T", 1 << 62) == (ReadStatus.PAST_END, 2, 0, 2)
    assert read_status("T", -1) == (ReadStatus.TOO_SMALL, 0, 0, 2)


def test_a_read_below_the_oldest_message_is_too_small(store: MessageStore) -> None:
    append(store, *(plain(b"x" * 1000) for _ in range(10)))  # three to a file
    store.checkpoint()
    store.remove_oldest_file()
    result = store.read("T", 0, 2)
    assert (result.status, result.next_offset, result.min_offset, result.max_offset) == (
        ReadStatus.TOO_SMALL,
        3,
        3,
        10,
    )
    assert store.read("T", 0, 3).count == 7
    assert (store.min_offset("T", 0), store.max_offset("T", 0)) == (3, 10)


def test_queue_offsets_continue_after_all_messages_have_expired(store: MessageStore) -> None:
    append(store, plain(b"first", topic="Old"), plain(b"second", topic="Old"))
    append(store, *(plain(b"x" * 1000) for _ in range(5)))
    store.checkpoint()
    store.remove_oldest_file()
    assert (store.min_offset("Old", 0), store.max_offset("Old", 0)) == (2, 2)
    assert store.read("Old", 0, 0).status is ReadStatus.TOO_SMALL
    assert store.read("Old", 0, 2).status is ReadStatus.AT_END
    (result,) = store.append([plain(b"new", topic="Old")], now_ms=NOW_MS)
    assert result.queue_offset == 2
    assert bodies(store.read("Old", 0, 2)) == [b"new"]
    assert store.min_offset("Old", 0) == 2


# Magic, body CRC, queue id, queue offset, log offset, body and topic of a record.
@pytest.mark.parametrize("position", [4, 8, 12, 20, 28, 88, 90])
def test_a_damaged_record_is_reported_once_and_passed(position: int) -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    append(store, plain(b"a"), plain(b"b"), plain(b"c"))
    flip(disk, FIRST_FILE, store.record_at(0).size + position)
    forget_recent_appends(store)
    for _ in range(3):
        result = store.read("T", 0, 0)
        assert bodies(result) == [b"a", b"c"]
        assert result.next_offset == 3
    assert bodies(store.read("T", 0, 1)) == [b"c"]
    assert store.damage.counts == {(DamageKind.LOG, False): 1}


def test_a_file_cut_short_under_a_running_store_costs_only_its_own_messages(
    tmp_path: Path,
) -> None:
    store = open_store(RealDisk(tmp_path))
    append(store, plain(b"a"), plain(b"b"), plain(b"c"))
    forget_recent_appends(store)
    os.truncate(tmp_path / FIRST_FILE, store.record_at(0).size + 10)
    assert bodies(store.read("T", 0, 0)) == [b"a"]
    with pytest.raises(CorruptRecord):
        store.record_at(store.last_record_offset)
    append(store, plain(b"d"))  # elsewhere the store works on
    assert bodies(store.read("T", 0, 3)) == [b"d"]
    store.abandon()


def test_a_bad_sector_costs_only_the_messages_in_it() -> None:
    disk = FaultyDisk()
    store = open_store(disk)
    offsets = append(store, plain(b"a"), plain(b"b"), plain(b"c"))
    store.checkpoint()
    forget_recent_appends(store)
    disk.bad_path, disk.bad_range = FIRST_FILE, range(offsets[1] + 5, offsets[1] + 6)
    assert bodies(store.read("T", 0, 0)) == [b"a", b"c"]
    assert [record.body for record in (store.record_at(offsets[0]), store.record_at(offsets[2]))]
    with pytest.raises(CorruptRecord):
        store.record_at(offsets[1])


def flip(disk: MemoryDisk, path: str, position: int) -> None:
    file = disk.open(path)
    file.write_at(position, bytes([file.read_at(position, 1)[0] ^ 1]))
    file.close()


def forget_recent_appends(store: MessageStore) -> None:
    """Let the store read from its files. Private: nothing else needs this."""
    store._log.recent.clear()


def test_a_record_is_found_by_its_offset_id(store: MessageStore) -> None:
    fill(store, range(30))
    for record in store.records():
        _, log_offset = decode_offset_id(encode_offset_id(HOST, record.log_offset))
        assert store.record_at(log_offset) == record


def test_a_log_offset_where_no_record_begins_is_an_error(store: MessageStore) -> None:
    offsets = append(store, *(plain() for _ in range(43)))
    assert offsets[-1] == 4096  # a blank record fills the first segment
    for outside in (-1, store.end, store.end + 1, 1 << 62):
        with pytest.raises(RecordNotFound):
            store.record_at(outside)
    for inside in (1, 95, 97, 42 * 96, 4095, 4097):
        with pytest.raises((RecordNotFound, CorruptRecord)):
            store.record_at(inside)


# --- offsets by time -----------------------------------------------------------------------------


TIMES_MS = [10, 20, 20, 20, 30, 50, 50]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    ("time_ms", "lower", "upper"),
    [
        (0, 0, 0),
        (9, 0, 0),
        (10, 0, 0),
        (11, 1, 0),
        (19, 1, 0),
        (20, 1, 3),
        (21, 4, 3),
        (30, 4, 4),
        (49, 5, 4),
        (50, 5, 6),
        (51, 7, 6),
        (1000, 7, 6),
    ],
)
def test_the_lower_and_upper_offset_of_a_time(
    store: MessageStore, checkpointed: bool, time_ms: int, lower: int, upper: int
) -> None:
    for stored_ms in TIMES_MS:
        append(store, plain(), now_ms=NOW_MS + stored_ms)
    if checkpointed:
        store.checkpoint()
    assert store.offset_by_time("T", 0, NOW_MS + time_ms) == lower
    assert store.offset_by_time("T", 0, NOW_MS + time_ms, upper=True) == upper


def test_the_offset_at_a_time_is_0_in_a_missing_or_empty_queue(store: MessageStore) -> None:
    append(store, plain(topic="Half", sys_flag=4))
    assert store.offset_by_time("T", 0, NOW_MS) == 0
    assert store.offset_by_time("Half", 0, NOW_MS) == 0
    assert store.offset_by_time("Half", 0, NOW_MS, upper=True) == 0


def test_the_offset_at_a_time_skips_expired_messages(store: MessageStore) -> None:
    for number in range(10):
        append(store, plain(b"x" * 1000), now_ms=NOW_MS + number)
    store.checkpoint()
    store.remove_oldest_file()
    assert store.offset_by_time("T", 0, NOW_MS) == 3
    assert store.offset_by_time("T", 0, NOW_MS, upper=True) == 3
    assert store.offset_by_time("T", 0, NOW_MS + 5) == 5


def gapped_queue() -> tuple[CommitLog, ConsumeQueue]:
    """Return a queue with seven entries; those at 0, 3 and 4 are messages, the others are blank.

    The messages were stored 10, 20 and 20 ms after NOW_MS.
    """
    disk = MemoryDisk()
    log = CommitLog(disk, segment_bytes=4096, store_host=HOST)
    queue = ConsumeQueue(QueueBlocks(disk, OpenFiles(disk), file_bytes=100), "T", 0)
    batch = LogBatch(log)
    positions = [batch.add(plain(), 0, NOW_MS + stored_ms) for stored_ms in (10, 20, 20)]
    batch.write()
    queue.add(*positions[0], 0)
    queue.add_blanks(QueueOffset(3), positions[1][0])
    queue.add(*positions[1], 0)
    queue.add(*positions[2], 0)
    queue.add_blanks(QueueOffset(7), log.end)
    return log, queue


@pytest.mark.parametrize(
    ("time_ms", "first_offset", "upper"),
    [(5, 0, 0), (10, 0, 0), (15, 3, 0), (20, 3, 4), (25, None, 4)],
)
def test_the_offset_at_a_time_skips_blank_entries(
    time_ms: int, first_offset: int | None, upper: int
) -> None:
    log, queue = gapped_queue()
    lower = offset_by_time(log, queue, NOW_MS + time_ms)
    offsets_from_lower = [queue_offset for queue_offset in (0, 3, 4) if queue_offset >= lower]
    assert (offsets_from_lower[0] if offsets_from_lower else None) == first_offset
    assert offset_by_time(log, queue, NOW_MS + time_ms, upper=True) == upper
