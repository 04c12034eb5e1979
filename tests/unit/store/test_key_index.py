"""The key index without a store: the bytes of its files, new files, damage and the redo file.

A file has seven slots and six entries, so that a few keys cover all cases. Entry 0 is never used,
so five keys fit into a file.
"""

from __future__ import annotations

import struct

import pytest

from escrowmq.store.columns import key_hash
from escrowmq.store.damage import DamageReports
from escrowmq.store.disk import OpenFiles, read_file, remove_file, write_file
from escrowmq.store.key_index import DAMAGED_PATH, KeyIndex, load_redo
from escrowmq.store.key_index import REDO_PATH as REDO_PATH
from escrowmq.testing import FaultyDisk, MemoryDisk, PowerCut
from tests.support.stores import NOW_MS

SLOTS = 7
ENTRIES = 6
ENTRIES_POSITION = 40 + SLOTS * 4
FILE_BYTES = ENTRIES_POSITION + ENTRIES * 20
FAR_FUTURE_MS = 1 << 62
FIRST_NAME = "20231114221320000"  # NOW_MS in UTC


def make(disk: MemoryDisk, *, slots: int = SLOTS, entries: int = ENTRIES) -> KeyIndex:
    index = KeyIndex(disk, OpenFiles(disk), slot_count=slots, entry_count=entries)
    index.open()
    return index


def put(index: KeyIndex, *keys: tuple[str, int, int], now_ms: int = NOW_MS) -> None:
    """Add keys of topic T, given as (key, log offset, ms after NOW_MS), and flush once."""
    for key, log_offset, ms in keys:
        index.add("T", [key.encode()], log_offset, NOW_MS + ms)
    flush = index.begin_flush(now_ms)
    flush.run()
    index.finish_flush(flush)


def find(index: KeyIndex, key: str, begin_ms: int = 0, end_ms: int = FAR_FUTURE_MS) -> list[int]:
    return list(index.find("T", key.encode(), begin_ms, end_ms))


def file_content(disk: MemoryDisk, name: str = FIRST_NAME) -> bytes:
    data = read_file(disk, f"index/{name}")
    assert data is not None
    return data


def slots_of(data: bytes) -> list[int]:
    return list(struct.unpack(f">{SLOTS}i", data[40:ENTRIES_POSITION]))


def entry(data: bytes, number: int) -> tuple[int, ...]:
    return struct.unpack_from(">iqii", data, ENTRIES_POSITION + number * 20)


def test_a_key_hash_equals_the_hash_of_rocketmq() -> None:
    assert key_hash("TopicTest", b"KEY1") == 1656969516


def test_the_hash_without_an_absolute_value_becomes_zero() -> None:
    # Java's hash of this key is -2**31, whose absolute value is not an int in Java.
    assert key_hash("TopicTest", b"aXA4ptp") == 0


def test_the_bytes_of_a_file_follow_the_format() -> None:
    disk = MemoryDisk()
    # The hashes of T#a (81906) and T#h (81913) share a slot; that of T#b (81907) has its own.
    put(make(disk), ("a", 1000, 0), ("b", 2000, 1500), ("h", 3000, 7999))
    data = file_content(disk)
    assert disk.names("index") == [FIRST_NAME]
    assert len(data) == FILE_BYTES
    assert data[:40] == struct.pack(
        ">qqqqii", NOW_MS, NOW_MS + 7999, 1000, 3000, 2, 4
    )  # begin, end, begin offset, end offset, used slots, count
    slots = [0] * SLOTS
    slots[81906 % SLOTS] = 3
    slots[81907 % SLOTS] = 2
    assert slots_of(data) == slots
    assert entry(data, 0) == (0, 0, 0, 0)
    assert entry(data, 1) == (81906, 1000, 0, 0)
    assert entry(data, 2) == (81907, 2000, 1, 0)
    assert entry(data, 3) == (81913, 3000, 7, 1)
    assert not any(data[ENTRIES_POSITION + 80 :])


def test_a_later_flush_continues_the_file() -> None:
    disk = MemoryDisk()
    index = make(disk)
    put(index, ("a", 1000, 0), ("b", 2000, 0))
    put(index, ("a", 3000, 2000), now_ms=NOW_MS + 99_000)
    data = file_content(disk)
    assert disk.names("index") == [FIRST_NAME]
    assert data[:40] == struct.pack(">qqqqii", NOW_MS, NOW_MS + 2000, 1000, 3000, 2, 4)
    assert entry(data, 3) == (81906, 3000, 2, 1)
    assert slots_of(data)[81906 % SLOTS] == 3


def test_several_flushes_write_the_same_file_as_one() -> None:
    keys = [("a", 1000, 0), ("h", 2000, 10), ("a", 3000, 2000), ("b", 4000, 2001)]
    together, apart = MemoryDisk(), MemoryDisk()
    put(make(together), *keys)
    index = make(apart)
    for key in keys:
        put(index, key)
    assert file_content(together) == file_content(apart)


def test_a_full_file_is_followed_by_another() -> None:
    disk = MemoryDisk()
    index = make(disk)
    put(index, *((f"k{number}", number * 100, number) for number in range(12)))
    names = disk.names("index")
    assert names == [FIRST_NAME, f"{int(FIRST_NAME) + 1}", f"{int(FIRST_NAME) + 2}"]
    headers = [struct.unpack_from(">qqqqii", file_content(disk, name)) for name in names]
    assert [header[5] for header in headers] == [6, 6, 3]
    assert [(header[2], header[3]) for header in headers] == [(0, 400), (500, 900), (1000, 1100)]
    assert [header[0] - NOW_MS for header in headers] == [0, 5, 10]
    for number in range(12):
        assert find(index, f"k{number}") == [number * 100]


def test_a_new_file_is_named_by_its_creation_time() -> None:
    disk = MemoryDisk()
    index = make(disk)
    put(index, *((f"k{number}", number, 0) for number in range(5)))
    put(index, ("k5", 5, 0), now_ms=NOW_MS + 60_001)
    assert disk.names("index") == [FIRST_NAME, "20231114221420001"]


def test_file_names_ascend_when_the_clock_is_set_back() -> None:
    disk = MemoryDisk()
    index = make(disk)
    put(index, *((f"k{number}", number, 0) for number in range(5)))
    put(index, ("k5", 5, 0), now_ms=NOW_MS - 86_400_000)
    assert disk.names("index") == [FIRST_NAME, f"{int(FIRST_NAME) + 1}"]


def test_the_newest_key_is_found_first_across_files_and_memory() -> None:
    index = make(MemoryDisk())
    for number in range(12):
        put(index, ("k", number, 0))
    index.add("T", [b"k"], 12, NOW_MS)
    assert find(index, "k") == list(range(12, -1, -1))


def test_every_key_is_found_while_a_flush_runs() -> None:
    index = make(MemoryDisk())
    for number in range(12):
        put(index, ("k", number, 0))
    index.add("T", [b"k"], 12, NOW_MS)
    flush = index.begin_flush(NOW_MS)
    index.add("T", [b"k"], 13, NOW_MS)
    assert find(index, "k") == list(range(13, -1, -1))
    flush.run()  # a thread has written the files, but finish_flush was not called yet
    assert find(index, "k") == list(range(13, -1, -1))
    index.finish_flush(flush)
    assert find(index, "k") == list(range(13, -1, -1))


def test_an_opened_index_finds_what_was_written() -> None:
    disk = MemoryDisk()
    put(make(disk), *((f"k{number % 4}", number, number) for number in range(12)))
    index = make(disk)
    assert find(index, "k1") == [9, 5, 1]
    assert index.end_offset == 11
    put(index, ("k1", 12, 0))
    assert find(index, "k1") == [12, 9, 5, 1]


def test_a_time_window_misses_no_record() -> None:
    # The file stores whole seconds, so the index may return more records, but never fewer.
    index = make(MemoryDisk())
    stored_ms = [0, 999, 1000, 1999, 5500]
    put(index, *(("k", ms, ms) for ms in stored_ms))
    for begin in range(0, 6000, 250):
        for end in range(begin, 6000, 250):
            inside = {ms for ms in stored_ms if begin <= ms <= end}
            assert inside <= set(find(index, "k", NOW_MS + begin, NOW_MS + end))


def test_the_time_of_an_entry_is_limited_to_the_range_of_its_field() -> None:
    disk = MemoryDisk()
    index = make(disk)
    put(index, ("a", 1, 0), ("b", 2, -5000), ("c", 3, 1 << 50))
    data = file_content(disk)
    assert [entry(data, number)[2] for number in (1, 2, 3)] == [0, 0, 0x7FFFFFFF]
    assert find(index, "b") == [2]


# --- damage --------------------------------------------------------------------------------------


def open_damaged(disk: MemoryDisk, position: int, data: bytes) -> KeyIndex:
    """Write these bytes into the first index file, without checksums, and open the index."""
    remove_file(disk, REDO_PATH)  # it would repair the damage
    remove_file(disk, f"escrowmq.index/{FIRST_NAME}")  # RocketMQ writes none
    disk.open(f"index/{FIRST_NAME}").write_at(position, data)
    return make(disk)


def disk_with_chain() -> MemoryDisk:
    """Return a disk with an index that has entries 1 to 4 in one chain."""
    disk = MemoryDisk()
    put(make(disk), *(("a", number, 0) for number in (1, 2, 3, 4)))
    return disk


def previous_position(number: int) -> int:
    return ENTRIES_POSITION + number * 20 + 16


@pytest.mark.parametrize("previous", [2, 3, 5, 100, 0x7FFFFFFF, -1, -0x80000000])
def test_a_chain_ends_at_a_link_that_does_not_descend(previous: int) -> None:
    index = open_damaged(disk_with_chain(), previous_position(2), struct.pack(">i", previous))
    assert find(index, "a") == [4, 3, 2]


@pytest.mark.parametrize("slot_value", [0, 5, 100, 0x7FFFFFFF, -1])
def test_an_invalid_slot_counts_as_empty(slot_value: int) -> None:
    slot_position = 40 + 81906 % SLOTS * 4
    assert (
        find(open_damaged(disk_with_chain(), slot_position, struct.pack(">i", slot_value)), "a")
        == []
    )


def test_every_key_is_found_whichever_bit_of_a_file_is_flipped() -> None:
    disk = MemoryDisk()
    put(make(disk), *((f"k{number % 2}", number, number) for number in range(5)))
    remove_file(disk, REDO_PATH)
    for path in (f"index/{FIRST_NAME}", f"escrowmq.index/{FIRST_NAME}"):
        for position in range(disk.open(path).size):
            byte = disk.open(path).read_at(position, 1)[0]
            disk.open(path).write_at(position, bytes([byte ^ 1 << position % 8]))
            damage = DamageReports()
            index = KeyIndex(
                disk,
                OpenFiles(disk),
                slot_count=SLOTS,
                entry_count=ENTRIES,
                damage=damage,
                log_offsets_between=lambda begin, end: iter(range(begin, end + 1)),
            )
            index.open()
            # Where entries are damaged, the caller looks at every record of their range.
            assert set(find(index, "k0")) >= {0, 2, 4}, (path, position)
            assert set(find(index, "k1")) >= {1, 3}, (path, position)
            assert damage.total, (path, position)
            disk.open(path).write_at(position, bytes([byte]))
            remove_file(disk, DAMAGED_PATH)


@pytest.mark.parametrize("count", [0, -1, 2, 1000, 0x7FFFFFFF])
@pytest.mark.parametrize("slot_value", [4, 900])
def test_a_header_with_a_wrong_count_returns_no_false_offsets_and_accepts_keys(
    count: int, slot_value: int
) -> None:
    disk = disk_with_chain()
    slot_position = 40 + 81906 % SLOTS * 4
    disk.open(f"index/{FIRST_NAME}").write_at(slot_position, struct.pack(">i", slot_value))
    index = open_damaged(disk, 36, struct.pack(">i", count))
    assert set(find(index, "a")) <= {1, 2, 3, 4}
    put(index, ("new", 9, 0))
    assert find(index, "new") == [9]


def test_a_file_of_another_length_is_removed() -> None:
    disk = disk_with_chain()
    write_file(disk, "index/20231114221320001", bytes(FILE_BYTES - 1))
    write_file(disk, "index/20231114221320002", b"")
    index = make(disk)
    assert disk.names("index") == [FIRST_NAME]
    assert find(index, "a") == [4, 3, 2, 1]


def test_an_empty_file_that_was_just_created_is_used() -> None:
    disk = MemoryDisk()
    write_file(disk, f"index/{FIRST_NAME}", bytes(FILE_BYTES))
    index = make(disk)
    assert index.end_offset == -1
    put(index, ("a", 7, 0))
    assert find(index, "a") == [7]
    assert disk.names("index") == [FIRST_NAME]
    assert entry(file_content(disk), 1) == (81906, 7, 0, 0)


# --- the redo file -------------------------------------------------------------------------------


def index_contents(disk: MemoryDisk) -> dict[str, bytes]:
    return {name: file_content(disk, name) for name in disk.names("index")}


def test_applying_a_redo_file_twice_changes_nothing() -> None:
    disk = MemoryDisk()
    index = make(disk)
    put(index, *((f"k{number}", number, 0) for number in range(4)))
    put(index, *((f"k{number}", number, 0) for number in range(4, 9)))
    before = index_contents(disk)
    assert load_redo(disk)
    for _ in range(3):
        make(disk)
        assert index_contents(disk) == before


def test_a_power_cut_at_any_call_of_a_flush_is_repaired_at_the_next_start() -> None:
    complete_disk = MemoryDisk()
    index = make(complete_disk)
    put(index, *((f"k{number}", number, 0) for number in range(4)))
    put(index, *((f"k{number}", number, 0) for number in range(4, 9)))
    for call in range(1, 100):
        disk = FaultyDisk(seed=call)
        index = make(disk)
        put(index, *((f"k{number}", number, 0) for number in range(4)))
        before = index_contents(disk)
        disk.power_cut_at = disk.calls + call
        try:
            put(index, *((f"k{number}", number, 0) for number in range(4, 9)))
        except PowerCut:
            disk.power_cut_at = None
            make(disk)
            assert index_contents(disk) in (before, index_contents(complete_disk))
        else:
            break
    assert call > 8


@pytest.mark.parametrize("garbage", [b"", b"\0\0\0\0", b"\0\0\0\0\x90", b"\xff" * 40])
def test_a_redo_file_with_a_wrong_checksum_is_ignored(garbage: bytes) -> None:
    disk = disk_with_chain()
    before = index_contents(disk)
    write_file(disk, REDO_PATH, garbage)
    make(disk)
    assert index_contents(disk) == before


def test_clear_removes_all_files_and_the_redo_file() -> None:
    disk = disk_with_chain()
    index = make(disk)
    index.add("T", [b"waiting"], 9, NOW_MS)
    index.clear()
    assert disk.names("index") == []
    assert load_redo(disk) == []
    assert find(index, "a") == []
    assert find(index, "waiting") == []
    assert find(make(disk), "a") == []


def test_expired_files_are_removed_except_the_last() -> None:
    disk = MemoryDisk()
    index = make(disk)
    put(index, *((f"k{number}", number * 100, 0) for number in range(12)))
    names = disk.names("index")
    assert index.remove_expired(400) == 0
    assert index.remove_expired(401) == 1
    assert disk.names("index") == names[1:]
    assert find(index, "k0") == []
    assert find(index, "k5") == [500]
    assert index.remove_expired(1 << 40) == 1
    assert disk.names("index") == names[2:]
    assert find(make(disk), "k11") == [1100]
    assert disk.names("index") == names[2:]  # the redo file restores none
