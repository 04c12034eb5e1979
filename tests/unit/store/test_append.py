"""Appends: the offsets and bytes of the records, and the writes to disk."""

from __future__ import annotations

from dataclasses import replace

import pytest

from escrowmq.message.keys import encode_host
from escrowmq.message.record import encode_record
from escrowmq.store.disk import read_file
from escrowmq.store.store import MessageStore
from escrowmq.testing import FaultyDisk, MemoryDisk
from tests.support.store_appends import FIRST_FILE, all_bodies, append, bodies, plain
from tests.support.stores import (
    HOST,
    NOW_MS,
    TINY,
    assert_clean,
    open_store,
    properties,
)

HOUR_MS = 3_600_000
SECOND_FILE = f"commitlog/{4096:020d}"


def test_records_are_consecutive_in_the_log_and_each_queue_counts_its_own(
    store: MessageStore,
) -> None:
    results = store.append(
        [plain(), plain(queue_id=1), plain(), plain(topic="U"), plain()], now_ms=NOW_MS
    )
    assert [result.queue_offset for result in results] == [0, 0, 1, 0, 2]
    assert [result.size for result in results] == [91 + 1 + 4] * 5
    assert [result.log_offset for result in results] == [0, 96, 192, 288, 384]
    assert store.end == 480
    assert store.max_offset("T", 0) == 3
    assert store.min_offset("T", 0) == 0


def test_the_log_holds_exactly_the_encoded_records() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    append(store, plain(b"a"), now_ms=NOW_MS)
    append(store, plain(b"b"), now_ms=NOW_MS + 5)
    expected = encode_record(plain(b"a"), 0, 0, NOW_MS, HOST)
    expected += encode_record(plain(b"b"), 1, len(expected), NOW_MS + 5, HOST)
    content = read_file(disk, FIRST_FILE)
    assert content == expected.ljust(4096, b"\0")


def test_an_empty_append_changes_nothing() -> None:
    disk = FaultyDisk()
    store = open_store(disk)
    calls = disk.calls
    assert store.append([], now_ms=NOW_MS) == []
    assert disk.calls == calls
    assert store.end == 0


def log_writes(disk: FaultyDisk, since: int) -> list[str]:
    """Return the writes to log files after the first `since` calls of the disk."""
    return [call for call in disk.trace[since:] if call.startswith("write_at commitlog/")]


def test_a_batch_is_one_write_and_no_flush() -> None:
    disk = FaultyDisk()
    store = open_store(disk)
    append(store, plain())
    before = len(disk.trace)
    append(store, *(plain(queue_id=number % 3) for number in range(20)))
    assert disk.trace[before:] == [f"write_at {FIRST_FILE} 96+{20 * 96}"]


def test_a_batch_across_the_end_of_a_segment_is_one_write_to_each_segment() -> None:
    disk = FaultyDisk()
    store = open_store(disk)
    append(store, *(plain() for _ in range(40)))  # 3840 of 4096 bytes
    before = len(disk.trace)
    offsets = append(store, *(plain() for _ in range(4)))
    assert offsets == [3840, 3936, 4096, 4192]
    assert log_writes(disk, before) == [
        f"write_at {FIRST_FILE} 3840+{2 * 96 + 8}",
        f"write_at {SECOND_FILE} 0+{2 * 96}",
    ]


def test_a_blank_record_fills_the_end_of_a_segment() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    append(store, *(plain() for _ in range(42)))  # 4032 bytes: 64 remain
    append(store, plain(b"next"))
    content = read_file(disk, FIRST_FILE)
    assert content is not None
    assert content[4032:] == bytes.fromhex("00000040 cbd43194") + bytes(56)
    assert store.record_at(4096).body == b"next"


@pytest.mark.parametrize(("bytes_left", "begins_new_file"), [(8, False), (7, True)])
def test_a_record_is_stored_in_the_current_segment_if_eight_bytes_remain_after_it(
    bytes_left: int, begins_new_file: bool
) -> None:
    # Eight bytes are the size of the blank record that fills a segment.
    store = open_store(MemoryDisk(), replace(TINY, message_bytes_max=4096))
    (first,) = append(store, plain(b"x" * 2000))
    free_bytes = 4096 - store.end
    (second,) = append(store, plain(b"y" * (free_bytes - 92 - bytes_left)))
    assert (first, second) == (0, 4096 if begins_new_file else 2092)
    append(store, plain(b"z"))
    assert [len(body) for body in all_bodies(store)] == [2000, free_bytes - 92 - bytes_left, 1]


def test_prepared_and_rolled_back_records_get_no_queue_offset(
    store: MessageStore,
) -> None:
    key_properties = properties(UNIQ_KEY="U", KEYS="k")
    records = [
        plain(b"none", sys_flag=0, properties=key_properties),
        plain(b"prepared", sys_flag=4, properties=key_properties),
        plain(b"commit", sys_flag=8, properties=key_properties),
        plain(b"rollback", sys_flag=12, properties=key_properties),
        plain(b"last", sys_flag=0, properties=key_properties),
    ]
    results = store.append(records, now_ms=NOW_MS)
    assert [result.queue_offset for result in results] == [0, 0, 1, 0, 2]
    assert [store.record_at(result.log_offset).queue_offset for result in results] == [
        0,
        0,
        1,
        0,
        2,
    ]
    assert bodies(store.read("T", 0, 0)) == [b"none", b"commit", b"last"]
    by_key = [bytes(record.body) for record in store.find_by_key("T", "k")]
    assert by_key == [b"last", b"commit", b"prepared", b"none"]
    assert len(all_bodies(store)) == 5


def test_stored_times_do_not_decrease_when_the_clock_is_set_back_a_little() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    for now_ms in (NOW_MS, NOW_MS + 10, NOW_MS - 60_000, NOW_MS + 11):
        append(store, plain(), now_ms=now_ms)
    stored_ms = [record.stored_ms - NOW_MS for record in store.records()]
    assert stored_ms == [0, 10, 10, 11]
    store.close()
    store = open_store(disk)
    append(store, plain(), now_ms=NOW_MS - 60_000)
    assert [record.stored_ms - NOW_MS for record in store.records()][-1] == 11


def test_messages_after_a_clock_that_was_far_ahead_have_the_right_time_and_are_found() -> None:
    """Otherwise all messages would have the wrong time until the clock has caught up."""
    disk = MemoryDisk()
    store = open_store(disk)
    append(store, plain(properties=properties(KEYS="before")), now_ms=NOW_MS)
    append(store, plain(properties=properties(KEYS="wrong")), now_ms=NOW_MS + 700 * HOUR_MS)
    for number in range(3):
        append(store, plain(properties=properties(KEYS="after")), now_ms=NOW_MS + number)
    for _ in range(2):
        stored_ms = [record.stored_ms - NOW_MS for record in store.records()]
        assert stored_ms == [0, 700 * HOUR_MS, 0, 1, 2]
        found = store.find_by_key("T", "after", begin_ms=NOW_MS, end_ms=NOW_MS + HOUR_MS)
        assert len(found) == 3
        assert len(store.find_by_key("T", "before", end_ms=NOW_MS)) == 1
        assert len(store.find_by_key("T", "wrong", begin_ms=NOW_MS + HOUR_MS)) == 1
        store.close()
        assert_clean(disk)
        store = open_store(disk)


def test_ipv6_hosts_are_stored() -> None:
    host = encode_host("2001:db8::1", 10911)
    store = MessageStore.open(MemoryDisk(), TINY, store_host=host)
    (first, second) = append(store, plain(b"a", born_host=host), plain(b"b", born_host=HOST))
    assert store.record_at(first).store_host == store.record_at(first).born_host == host
    assert store.record_at(second).born_host == HOST
    assert store.offset_by_time("T", 0, NOW_MS) == 0
    assert store.offset_by_time("T", 0, NOW_MS + 1) == 2


def test_the_record_crc_is_the_last_property() -> None:
    store = open_store(MemoryDisk(), replace(TINY, sealed=True))
    (log_offset,) = append(store, plain(properties=properties(TAGS="a")))
    record = store.record_at(log_offset)
    assert record.properties == b"TAGS\x01a\x02"
    assert bytes(store.record_bytes(record)[-20:-11]) == b"__CRC32#\x01"
