"""Append and read on one open store: places, limits, statuses, times and keys.

On a disk in memory with tiny files. What crashes do is in tests/simulation and test_recovery.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from escrowmq.errors import (
    CorruptRecord,
    NoSuchRecord,
    RecordRefused,
    StoreError,
    StoreFailed,
    StoreFull,
    StoreLocked,
)
from escrowmq.message.ids import decode_offset_id, encode_host, encode_offset_id
from escrowmq.message.javahash import java_hash
from escrowmq.message.offsets import QueueOffset
from escrowmq.message.record import NewRecord, encode_record
from escrowmq.store.commitlog import CommitLog
from escrowmq.store.consumequeue import ConsumeQueue
from escrowmq.store.disk import Disk, OpenViews, RealDisk, read_file
from escrowmq.store.logbatch import Batch
from escrowmq.store.read import SCANNED_MAX, QueueRead, ReadStatus, offset_by_time
from escrowmq.store.store import MessageStore
from escrowmq.testing import FaultyDisk, MemoryDisk
from tests.stores import (
    HOST,
    NOW_MS,
    TINY,
    assert_clean,
    fill,
    open_store,
    properties,
    sample,
)

FIRST_FILE = f"commitlog/{0:020d}"
SECOND_FILE = f"commitlog/{4096:020d}"


def plain(body: bytes = b"body", **changes: Any) -> NewRecord:
    """In one queue, with nothing to derive."""
    fields: dict[str, Any] = {"topic": "T", "queue_id": 0, "body": body, "properties": b""}
    return NewRecord(**{**fields, **changes})


def append(store: MessageStore, *records: NewRecord, now_ms: int = NOW_MS) -> list[int]:
    return [placed.log_offset for placed in store.append(records, now_ms=now_ms)]


def bodies(found: QueueRead) -> list[bytes]:
    """Of the records in the slices, which lie one behind the other."""
    read = []
    for data in found.slices:
        at = 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 4], "big")
            length = int.from_bytes(data[at + 84 : at + 88], "big")
            read.append(bytes(data[at + 88 : at + 88 + length]))
            at += size
    assert len(read) == found.count
    return read


def all_bodies(store: MessageStore) -> list[bytes]:
    return [bytes(record.body) for record in store.records()]


def state(store: MessageStore) -> object:
    """Everything that a refused append must leave as it was."""
    queues = store.queues()
    offsets = [(store.min_offset(*queue), store.max_offset(*queue)) for queue in queues]
    return store.end, store.begin, queues, offsets, all_bodies(store)


@pytest.fixture
def store() -> MessageStore:
    return open_store(MemoryDisk())


# --- placing -------------------------------------------------------------------------------------


def test_records_lie_one_behind_the_other_and_each_queue_counts_for_itself(
    store: MessageStore,
) -> None:
    placed = store.append(
        [plain(), plain(queue_id=1), plain(), plain(topic="U"), plain()], now_ms=NOW_MS
    )
    assert [place.queue_offset for place in placed] == [0, 0, 1, 0, 2]
    assert [place.size for place in placed] == [91 + 1 + 4] * 5
    assert [place.log_offset for place in placed] == [0, 96, 192, 288, 384]
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


def test_nothing_to_append_is_nothing_appended() -> None:
    disk = FaultyDisk()
    store = open_store(disk)
    calls = disk.calls
    assert store.append([], now_ms=NOW_MS) == []
    assert disk.calls == calls
    assert store.end == 0


def log_writes(disk: FaultyDisk, since: int) -> list[str]:
    return [call for call in disk.trace[since:] if call.startswith("write_at commitlog/")]


def test_a_batch_is_one_write_and_no_flush() -> None:
    disk = FaultyDisk()
    store = open_store(disk)
    append(store, plain())
    before = len(disk.trace)
    append(store, *(plain(queue_id=number % 3) for number in range(20)))
    assert disk.trace[before:] == [f"write_at {FIRST_FILE} 96+{20 * 96}"]


def test_a_batch_across_the_end_of_a_file_is_one_write_to_each() -> None:
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


def test_the_rest_of_a_full_file_is_a_blank_record() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    append(store, *(plain() for _ in range(42)))  # 4032 bytes: 64 remain
    append(store, plain(b"next"))
    content = read_file(disk, FIRST_FILE)
    assert content is not None
    assert content[4032:] == bytes.fromhex("00000040 cbd43194") + bytes(56)
    assert store.record_at(4096).body == b"next"


@pytest.mark.parametrize(("spare", "rolls"), [(8, False), (7, True)])
def test_a_record_goes_into_this_file_if_eight_bytes_remain_behind_it(
    spare: int, rolls: bool
) -> None:
    store = open_store(MemoryDisk(), replace(TINY, message_bytes_max=4096))
    (first,) = append(store, plain(b"x" * 2000))
    room = 4096 - store.end
    (second,) = append(store, plain(b"y" * (room - 92 - spare)))
    assert (first, second) == (0, 4096 if rolls else 2092)
    append(store, plain(b"z"))
    assert [len(body) for body in all_bodies(store)] == [2000, room - 92 - spare, 1]


def test_prepared_and_rolled_back_records_take_no_place_in_their_queue(
    store: MessageStore,
) -> None:
    keyed = properties(UNIQ_KEY="U", KEYS="k")
    records = [
        plain(b"none", sys_flag=0, properties=keyed),
        plain(b"prepared", sys_flag=4, properties=keyed),
        plain(b"commit", sys_flag=8, properties=keyed),
        plain(b"rollback", sys_flag=12, properties=keyed),
        plain(b"last", sys_flag=0, properties=keyed),
    ]
    placed = store.append(records, now_ms=NOW_MS)
    assert [place.queue_offset for place in placed] == [0, 0, 1, 0, 2]
    assert [store.record_at(place.log_offset).queue_offset for place in placed] == [0, 0, 1, 0, 2]
    assert bodies(store.read("T", 0, 0)) == [b"none", b"commit", b"last"]
    by_key = [bytes(record.body) for record in store.find_by_key("T", "k")]
    assert by_key == [b"last", b"commit", b"prepared", b"none"]
    assert len(all_bodies(store)) == 5


def test_a_store_timestamp_never_falls_when_the_clock_jumps_back() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    for now_ms in (NOW_MS, NOW_MS + 10, NOW_MS - 60_000, 0, NOW_MS + 11):
        append(store, plain(), now_ms=now_ms)
    stored = [record.stored_ms - NOW_MS for record in store.records()]
    assert stored == [0, 10, 10, 10, 11]
    store.close()
    store = open_store(disk)
    append(store, plain(), now_ms=5)
    assert [record.stored_ms - NOW_MS for record in store.records()][-1] == 11


def test_hosts_of_ipv6_are_stored_and_found() -> None:
    host = encode_host("2001:db8::1", 10911)
    store = MessageStore.open(MemoryDisk(), TINY, store_host=host)
    (first, second) = append(store, plain(b"a", born_host=host), plain(b"b", born_host=HOST))
    assert store.record_at(first).store_host == store.record_at(first).born_host == host
    assert store.record_at(second).born_host == HOST
    assert store.offset_by_time("T", 0, NOW_MS) == 0
    assert store.offset_by_time("T", 0, NOW_MS + 1) == 2


def test_sealed_records_end_with_their_seal() -> None:
    store = open_store(MemoryDisk(), replace(TINY, sealed=True))
    (at,) = append(store, plain(properties=properties(TAGS="a")))
    assert store.record_at(at).properties[:16] == b"TAGS\x01a\x02__CRC32#\x01"


# --- refusing ------------------------------------------------------------------------------------

LONGEST_PROPERTIES = 32_767 - 21  # a seal must still fit


@pytest.mark.parametrize(
    "wrong",
    [
        plain(b"x" * 2049),
        plain(topic=""),
        plain(topic="../x"),
        plain(topic=".."),
        plain(topic="a/b"),
        plain(topic="a b"),
        plain(topic="a\0b"),
        plain(topic="a\n"),
        plain(topic="tópico"),
        plain(topic="t" * 256),
        plain(topic="t" * 300),
        plain(queue_id=-1),
        plain(queue_id=1 << 31),
        plain(properties=b"x" * 4000),
        plain(b"x" * 2048, properties=b"x" * 2040),
    ],
    ids=lambda record: f"{record.topic[:9]!r} {record.queue_id} {len(record.body)}",
)
@pytest.mark.parametrize("kind", [0, 4, 12], ids=["none", "prepared", "rollback"])
def test_what_does_not_fit_is_refused_and_changes_nothing(wrong: NewRecord, kind: int) -> None:
    store = open_store(MemoryDisk())
    append(store, plain(b"before"))
    before = state(store)
    fields = {name: getattr(wrong, name) for name in wrong.__struct_fields__}
    with pytest.raises(RecordRefused):
        append(store, NewRecord(**{**fields, "sys_flag": kind}))
    assert state(store) == before
    append(store, plain(b"behind"))
    assert bodies(store.read("T", 0, 0)) == [b"before", b"behind"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"flag": 1 << 31},
        {"sys_flag": 1 << 31},
        {"reconsume_times": 1 << 31},
        {"born_ms": 1 << 63},
        {"prepared_offset": -(1 << 63) - 1},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_number_that_its_field_cannot_hold_is_refused(
    store: MessageStore, wrong: dict[str, int]
) -> None:
    append(store, plain(b"before"))
    before = state(store)
    with pytest.raises(RecordRefused):
        append(store, plain(b"wrong", **wrong))
    assert state(store) == before


def test_properties_that_no_reader_would_take_for_whole_are_refused() -> None:
    # A zero byte in a record is what an unwritten sector looks like: recovery would cut there,
    # and everything behind it would be gone.
    disk = MemoryDisk()
    store = open_store(disk)
    append(store, plain(b"before"))
    with pytest.raises(RecordRefused):
        append(store, plain(b"zero", properties=b"name\x01va\0lue\x02"))
    append(store, plain(b"behind"))
    store.flush()
    store.abandon()
    assert all_bodies(open_store(disk)) == [b"before", b"behind"]


def test_a_refused_record_takes_its_whole_batch_along(store: MessageStore) -> None:
    append(store, plain(b"before"))
    before = state(store)
    batch = [plain(b"a"), plain(b"b", topic="New"), plain(b"c", queue_id=7), plain(topic="a/b")]
    with pytest.raises(RecordRefused):
        store.append(batch, now_ms=NOW_MS + 99)
    assert state(store) == before
    assert store.read("New", 0, 0).status is ReadStatus.NO_QUEUE
    append(store, plain(b"behind"))
    assert [record.stored_ms for record in store.records()] == [NOW_MS, NOW_MS]


def test_a_refused_batch_gives_its_places_in_the_queue_back(store: MessageStore) -> None:
    append(store, plain(b"before"))
    with pytest.raises(RecordRefused):
        append(store, plain(b"a"), plain(b"b"), plain(topic="a/b"))
    (placed,) = store.append([plain(b"behind")], now_ms=NOW_MS)
    assert placed.queue_offset == 1
    assert store.max_offset("T", 0) == 2
    assert bodies(store.read("T", 0, 0)) == [b"before", b"behind"]


def test_the_largest_record_fits() -> None:
    settings = replace(TINY, segment_bytes=1 << 20, message_bytes_max=100_000, sealed=True)
    store = open_store(MemoryDisk(), settings)
    largest = plain(
        b"x" * 100_000, topic="t" * 255, properties=b"k\x01" + b"v" * (LONGEST_PROPERTIES - 2)
    )
    (at,) = append(store, largest)
    assert len(store.record_at(at).properties) == 32_767
    with pytest.raises(RecordRefused, match="properties of"):
        append(store, plain(properties=b"k\x01" + b"v" * (LONGEST_PROPERTIES - 1)))
    with pytest.raises(RecordRefused, match="body of 100001 bytes, limit 100000"):
        append(store, plain(b"x" * 100_001))


def test_a_record_never_outgrows_a_file() -> None:
    store = open_store(MemoryDisk(), replace(TINY, message_bytes_max=1 << 20))
    append(store, plain(b"x" * (4096 - 8 - 92)))
    with pytest.raises(RecordRefused, match="record of 4089 bytes, limit 4088"):
        append(store, plain(b"x" * (4096 - 8 - 91)))


def test_a_store_that_accepts_no_writes_is_full(store: MessageStore) -> None:
    append(store, plain())
    before = state(store)
    store.accepts_writes = False
    with pytest.raises(StoreFull, match="nearly full"):
        append(store, plain())
    assert state(store) == before
    assert store.read("T", 0, 0).count == 1
    store.accepts_writes = True
    append(store, plain())


@pytest.mark.parametrize(
    "use",
    [
        lambda store: store.append([plain()], now_ms=NOW_MS),
        lambda store: store.flush(),
        lambda store: store.checkpoint(),
        lambda store: store.record_at(0),
        lambda store: store.read("T", 0, 0),
        lambda store: list(store.records()),
        lambda store: store.offset_by_time("T", 0, NOW_MS),
        lambda store: store.min_offset("T", 0),
    ],
    ids=[
        "append",
        "flush",
        "checkpoint",
        "record_at",
        "read",
        "records",
        "offset_by_time",
        "min_offset",
    ],
)
def test_a_closed_store_refuses_and_does_not_look_empty(
    tmp_path: Path, use: Callable[[MessageStore], object]
) -> None:
    store = open_store(RealDisk(tmp_path))
    append(store, plain())
    store.close()
    with pytest.raises(StoreError):
        use(store)


def test_closing_twice_is_closing_once(store: MessageStore) -> None:
    append(store, plain())
    store.close()
    store.close()
    assert store.has_failed


def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    store = open_store(RealDisk(tmp_path))
    append(store, plain())
    with pytest.raises(StoreLocked):
        open_store(RealDisk(tmp_path))
    append(store, plain())
    store.close()
    again = open_store(RealDisk(tmp_path))
    assert len(all_bodies(again)) == 2
    assert again.recovery.clean
    again.close()


def test_a_store_that_was_refused_does_not_mark_the_directory(tmp_path: Path) -> None:
    store = open_store(RealDisk(tmp_path))
    (tmp_path / "abort").unlink()
    with pytest.raises(StoreLocked):
        open_store(RealDisk(tmp_path))
    assert not (tmp_path / "abort").exists()
    store.close()


# --- reading -------------------------------------------------------------------------------------


@pytest.fixture(params=["in memory", "in files", "in both"])
def ten(request: pytest.FixtureRequest) -> MessageStore:
    """Ten records of one queue, side by side; their entries still in memory, or not."""
    store = open_store(MemoryDisk(), replace(TINY, queue_file_bytes=80))
    for number in range(10):
        append(store, plain(b"%d" % number))
        if request.param == "in files" or (request.param == "in both" and number == 5):
            store.checkpoint()
    return store


def test_neighbours_are_one_slice(ten: MessageStore) -> None:
    found = ten.read("T", 0, 0)
    assert found.status is ReadStatus.FOUND
    assert [len(data) for data in found.slices] == [10 * 93]
    assert bodies(found) == [b"%d" % number for number in range(10)]
    assert (found.next, found.min, found.max, found.size) == (10, 0, 10, 930)


def test_a_read_may_begin_anywhere(ten: MessageStore) -> None:
    for begin in range(10):
        found = ten.read("T", 0, begin)
        assert bodies(found) == [b"%d" % number for number in range(begin, 10)]
        assert found.next == 10


def test_a_count_limits_a_read(ten: MessageStore) -> None:
    for begin in range(10):
        for count in range(1, 12):
            found = ten.read("T", 0, begin, count_max=count)
            end = min(10, begin + count)
            assert bodies(found) == [b"%d" % number for number in range(begin, end)]
            assert found.next == end


@pytest.mark.parametrize(
    ("bytes_max", "count"), [(0, 1), (1, 1), (93, 1), (185, 1), (186, 2), (929, 9), (930, 10)]
)
def test_bytes_limit_a_read_but_one_record_always_comes(
    ten: MessageStore, bytes_max: int, count: int
) -> None:
    found = ten.read("T", 0, 0, bytes_max=bytes_max)
    assert found.count == count
    assert found.next == count
    assert len(bodies(found)) == count


def test_records_with_others_between_them_are_slices_each(store: MessageStore) -> None:
    append(store, plain(b"a"), plain(b"b"), plain(b"-", queue_id=1), plain(b"c"), plain(b"d"))
    found = store.read("T", 0, 0)
    assert [len(data) // 93 for data in found.slices] == [2, 2]
    assert bodies(found) == [b"a", b"b", b"c", b"d"]


def test_a_slice_does_not_cross_the_end_of_a_file(store: MessageStore) -> None:
    append(store, *(plain(b"x" * 1000) for _ in range(5)))
    found = store.read("T", 0, 0)
    assert [len(data) // 1092 for data in found.slices] == [3, 2]
    assert found.count == 5


@pytest.mark.parametrize("kind", ["real", "memory"])
def test_slices_are_the_file_itself_and_not_copies(tmp_path: Path, kind: str) -> None:
    disk: Disk = RealDisk(tmp_path) if kind == "real" else MemoryDisk()
    store = open_store(disk)
    append(store, plain(b"first"), plain(b"second"))
    found = store.read("T", 0, 0)
    disk.open(FIRST_FILE).write_at(88, b"FIRST")  # behind the store's back
    assert bodies(found) == [b"FIRST", b"second"]
    assert all(data.readonly for data in found.slices)
    store.close()
    assert bodies(found) == [b"FIRST", b"second"]


def tagged(tag: str, body: bytes = b"") -> NewRecord:
    return plain(body, properties=properties(TAGS=tag))


def accepts(tag: str) -> Callable[[int], bool]:
    return java_hash(tag).__eq__


def test_a_filter_picks_by_tags_code(store: MessageStore) -> None:
    append(store, *(tagged("odd" if n % 2 else "even", b"%d" % n) for n in range(9)))
    odd = store.read("T", 0, 0, accepts=accepts("odd"))
    assert bodies(odd) == [b"1", b"3", b"5", b"7"]
    assert odd.next == 9
    some = store.read("T", 0, 0, accepts=accepts("odd"), count_max=2)
    assert bodies(some) == [b"1", b"3"]
    assert bodies(store.read("T", 0, some.next, accepts=accepts("odd"))) == [b"5", b"7"]


def test_a_filter_that_matches_nothing_still_moves_on(store: MessageStore) -> None:
    append(store, *(tagged("a") for _ in range(9)))
    found = store.read("T", 0, 2, accepts=accepts("b"))
    assert found.status is ReadStatus.NO_MATCH
    assert (found.next, found.count, found.slices) == (9, 0, [])


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_filter_looks_at_so_many_entries_and_no_more(checkpointed: bool) -> None:
    store = open_store(MemoryDisk(), replace(TINY, segment_bytes=1 << 20, queue_file_bytes=4000))
    append(store, *(tagged("a") for _ in range(SCANNED_MAX + 50)), tagged("b", b"found"))
    if checkpointed:
        store.checkpoint()
    found = store.read("T", 0, 0, accepts=accepts("b"))
    assert (found.status, found.next) == (ReadStatus.NO_MATCH, SCANNED_MAX)
    assert bodies(store.read("T", 0, found.next, accepts=accepts("b"))) == [b"found"]
    many = store.read("T", 0, 0, accepts=accepts("b"), count_max=SCANNED_MAX + 51)
    assert bodies(many) == [b"found"]


def test_what_a_read_says_when_there_is_nothing_to_read(store: MessageStore) -> None:
    append(store, plain(), plain())
    append(store, plain(topic="Half", sys_flag=4))

    def ask(topic: str, offset: int) -> tuple[ReadStatus, int, int, int]:
        found = store.read(topic, 0, offset)
        assert (found.count, found.slices, found.size) == (0, [], 0)
        return found.status, found.next, found.min, found.max

    assert ask("Other", 5) == (ReadStatus.NO_QUEUE, 0, 0, 0)
    assert ask("Half", 0) == (ReadStatus.NO_QUEUE, 0, 0, 0)
    assert ask("Half", 3) == (ReadStatus.NO_QUEUE, 0, 0, 0)
    assert ask("T", 2) == (ReadStatus.AT_END, 2, 0, 2)
    assert ask("T", 3) == (ReadStatus.PAST_END, 2, 0, 2)
    assert ask("T", 1 << 62) == (ReadStatus.PAST_END, 2, 0, 2)
    assert ask("T", -1) == (ReadStatus.TOO_SMALL, 0, 0, 2)


def test_below_the_oldest_message_is_too_small(store: MessageStore) -> None:
    append(store, *(plain(b"x" * 1000) for _ in range(10)))  # three to a file
    store.checkpoint()
    store.remove_oldest_file()
    found = store.read("T", 0, 2)
    assert (found.status, found.next, found.min, found.max) == (ReadStatus.TOO_SMALL, 3, 3, 10)
    assert store.read("T", 0, 3).count == 7
    assert (store.min_offset("T", 0), store.max_offset("T", 0)) == (3, 10)


def test_a_queue_whose_messages_are_all_gone_keeps_counting(store: MessageStore) -> None:
    append(store, plain(b"gone", topic="Old"), plain(b"gone too", topic="Old"))
    append(store, *(plain(b"x" * 1000) for _ in range(5)))
    store.checkpoint()
    store.remove_oldest_file()
    assert (store.min_offset("Old", 0), store.max_offset("Old", 0)) == (2, 2)
    assert store.read("Old", 0, 0).status is ReadStatus.TOO_SMALL
    assert store.read("Old", 0, 2).status is ReadStatus.AT_END
    (placed,) = store.append([plain(b"new", topic="Old")], now_ms=NOW_MS)
    assert placed.queue_offset == 2
    assert bodies(store.read("Old", 0, 2)) == [b"new"]
    assert store.min_offset("Old", 0) == 2


def test_an_entry_that_points_at_no_record_is_said_to(store: MessageStore) -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    append(store, plain(b"a"), plain(b"b"))
    disk.open(FIRST_FILE).write_at(4, bytes(4))
    with pytest.raises(CorruptRecord, match="log_offset=0"):
        store.read("T", 0, 0)
    assert bodies(store.read("T", 0, 1)) == [b"b"]


def test_a_record_is_found_by_its_offset_id(store: MessageStore) -> None:
    fill(store, range(30))
    for record in store.records():
        _, log_offset = decode_offset_id(encode_offset_id(HOST, record.log_offset))
        assert store.record_at(log_offset) == record


def test_no_record_is_found_where_none_begins(store: MessageStore) -> None:
    offsets = append(store, *(plain() for _ in range(43)))
    assert offsets[-1] == 4096  # so that there is a blank record too
    for nowhere in (-1, store.end, store.end + 1, 1 << 62):
        with pytest.raises(NoSuchRecord):
            store.record_at(nowhere)
    for between in (1, 95, 97, 42 * 96, 4095, 4097):
        with pytest.raises((NoSuchRecord, CorruptRecord)):
            store.record_at(between)


# --- by time -------------------------------------------------------------------------------------

TIMES = [10, 20, 20, 20, 30, 50, 50]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    ("time", "lower", "upper"),
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
def test_the_offset_at_a_time(
    store: MessageStore, checkpointed: bool, time: int, lower: int, upper: int
) -> None:
    for stored in TIMES:
        append(store, plain(), now_ms=NOW_MS + stored)
    if checkpointed:
        store.checkpoint()
    assert store.offset_by_time("T", 0, NOW_MS + time) == lower
    assert store.offset_by_time("T", 0, NOW_MS + time, upper=True) == upper


def test_no_queue_and_an_empty_one_have_no_time(store: MessageStore) -> None:
    append(store, plain(topic="Half", sys_flag=4))
    assert store.offset_by_time("T", 0, NOW_MS) == 0
    assert store.offset_by_time("Half", 0, NOW_MS) == 0
    assert store.offset_by_time("Half", 0, NOW_MS, upper=True) == 0


def test_the_offset_at_a_time_among_what_is_left(store: MessageStore) -> None:
    for number in range(10):
        append(store, plain(b"x" * 1000), now_ms=NOW_MS + number)
    store.checkpoint()
    store.remove_oldest_file()
    assert store.offset_by_time("T", 0, NOW_MS) == 3
    assert store.offset_by_time("T", 0, NOW_MS, upper=True) == 3
    assert store.offset_by_time("T", 0, NOW_MS + 5) == 5


def gapped_queue() -> tuple[CommitLog, ConsumeQueue]:
    """Messages at 0, 3 and 4, stored at 10, 20 and 20; nothing at 1, 2, 5 and 6."""
    disk = MemoryDisk()
    log = CommitLog(disk, segment_bytes=4096, store_host=HOST)
    queue = ConsumeQueue(disk, OpenViews(disk), "T", 0, file_bytes=100)
    batch = Batch(log)
    places = [batch.add(plain(), 0, NOW_MS + ms) for ms in (10, 20, 20)]
    batch.write()
    queue.add(*places[0], 0)
    queue.add_blanks(QueueOffset(3), places[1][0])
    queue.add(*places[1], 0)
    queue.add(*places[2], 0)
    queue.add_blanks(QueueOffset(7), log.end)
    return log, queue


@pytest.mark.parametrize(
    ("time", "first_found", "upper"),
    [(5, 0, 0), (10, 0, 0), (15, 3, 0), (20, 3, 4), (25, None, 4)],
)
def test_the_offset_at_a_time_where_messages_are_missing(
    time: int, first_found: int | None, upper: int
) -> None:
    log, queue = gapped_queue()
    lower = offset_by_time(log, queue, NOW_MS + time)
    there = [at for at in (0, 3, 4) if at >= lower]
    assert (there[0] if there else None) == first_found
    assert offset_by_time(log, queue, NOW_MS + time, upper=True) == upper


# --- by key --------------------------------------------------------------------------------------


@pytest.fixture(params=["in memory", "in files", "in both"])
def settle(request: pytest.FixtureRequest) -> Callable[[MessageStore, int], None]:
    """Called after each append: brings the keys to the files, or does not."""

    def after(store: MessageStore, number: int) -> None:
        if request.param == "in files" or (request.param == "in both" and number % 7 == 3):
            store.checkpoint()

    return after


def keyed(key: str, body: bytes = b"", **changes: Any) -> NewRecord:
    return plain(body, properties=properties(KEYS=key), **changes)


def found_bodies(store: MessageStore, topic: str, key: str, **limits: int) -> list[bytes]:
    return [bytes(record.body) for record in store.find_by_key(topic, key, **limits)]


@pytest.mark.parametrize("slots", [1, 7])
def test_keys_are_found_newest_first(
    settle: Callable[[MessageStore, int], None], slots: int
) -> None:
    store = open_store(MemoryDisk(), replace(TINY, index_slots=slots))
    for number in range(30):
        append(store, sample(number), now_ms=NOW_MS + number)
        settle(store, number)
    for number in range(30):
        body = sample(number).body
        topic = sample(number).topic
        assert found_bodies(store, topic, f"U{number:04d}") == [body]
        assert found_bodies(store, topic, f"k{number}") == [body]
    expected = [sample(number).body for number in range(28, -1, -2)]
    assert found_bodies(store, "T0", "all") == expected
    assert found_bodies(store, "T0", "all", count_max=4) == expected[:4]
    assert found_bodies(store, "T2", "all") == []
    assert found_bodies(store, "T0", "k") == []


def test_keys_with_one_hash_are_told_apart(settle: Callable[[MessageStore, int], None]) -> None:
    store = open_store(MemoryDisk(), replace(TINY, index_slots=1))
    assert java_hash("T#Aa") == java_hash("T#BB")
    for number, key in enumerate(["Aa", "BB", "Aa", "AaAa", "AaBB", "BBAa"]):
        append(store, keyed(key, b"%d" % number))
        settle(store, number)
    assert found_bodies(store, "T", "Aa") == [b"2", b"0"]
    assert found_bodies(store, "T", "BB") == [b"1"]
    assert found_bodies(store, "T", "AaBB") == [b"4"]
    assert found_bodies(store, "T", "BBBB") == []


def test_a_topic_that_ends_like_a_key_begins_is_another_topic(
    settle: Callable[[MessageStore, int], None], store: MessageStore
) -> None:
    append(store, keyed("b#c", b"one", topic="a"))
    settle(store, 3)
    assert found_bodies(store, "a", "b#c") == [b"one"]
    assert found_bodies(store, "a#b", "c") == []


def test_a_record_that_says_a_key_twice_is_found_once(
    settle: Callable[[MessageStore, int], None], store: MessageStore
) -> None:
    append(store, plain(b"one", properties=properties(UNIQ_KEY="k", KEYS="k k")))
    settle(store, 3)
    assert found_bodies(store, "T", "k") == [b"one"]


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (0, 10_000, [4, 3, 2, 1, 0]),
        (0, 0, [0]),
        (1, 999, [1]),
        (500, 500, [1]),
        (501, 1499, []),
        (1500, 2500, [3, 2]),
        (2501, 10_000, [4]),
        (9_001, 10_000, []),
    ],
)
def test_a_window_of_time_counts_both_its_ends(
    settle: Callable[[MessageStore, int], None],
    store: MessageStore,
    begin: int,
    end: int,
    expected: list[int],
) -> None:
    for number, ms in enumerate((0, 500, 1500, 2500, 9000)):
        append(store, keyed("k", b"%d" % number), now_ms=NOW_MS + ms)
        settle(store, number)
    found = found_bodies(store, "T", "k", begin_ms=NOW_MS + begin, end_ms=NOW_MS + end)
    assert found == [b"%d" % number for number in expected]


def test_at_most_64_records_are_found(settle: Callable[[MessageStore, int], None]) -> None:
    store = open_store(MemoryDisk(), replace(TINY, segment_bytes=1 << 16))
    for number in range(70):
        append(store, keyed("k", b"%d" % number))
        settle(store, number)
    newest_first = [b"%d" % number for number in reversed(range(70))]
    assert found_bodies(store, "T", "k", count_max=1000) == newest_first[:64]
    assert found_bodies(store, "T", "k") == newest_first[:32]


def test_what_expired_is_not_found_by_key(store: MessageStore) -> None:
    append(store, *(keyed("k", b"%d" % n + b"x" * 1000) for n in range(6)))
    store.checkpoint()
    store.remove_oldest_file()
    assert [body[:1] for body in found_bodies(store, "T", "k")] == [b"5", b"4", b"3"]


# --- flushing ------------------------------------------------------------------------------------


def test_a_flush_covers_what_was_appended_before_it_began(store: MessageStore) -> None:
    append(store, plain())
    flush = store.begin_flush()
    append(store, plain())
    flush.run()
    assert store.flushed == 0
    assert store.finish_flush(flush) == 96
    assert store.flushed == 96
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
    flushed = store.flushed
    after = open_store(disk.power_cut(Random(0), "none"))
    assert after.end >= flushed


def test_a_checkpoint_overtakes_a_flush_and_claims_no_more_than_is_safe() -> None:
    disk = FaultyDisk()
    store = open_store(disk)
    append(store, *(plain() for _ in range(43)))
    store.begin_flush()  # on its way to a thread
    store.checkpoint()
    after = open_store(disk.power_cut(Random(0), "none"))
    assert after.recovery.damaged == []
    assert len(all_bodies(after)) == 43


def test_one_checkpoint_at_a_time(store: MessageStore) -> None:
    append(store, plain())
    job = store.begin_checkpoint()
    with pytest.raises(StoreFailed, match="already"):
        store.begin_checkpoint()
    job.run()
    store.finish_checkpoint(job)
    assert store.checkpointed == store.end
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
    assert found_bodies(store, "T", "k") == [b"behind", b"meanwhile", b"before"]
    store.finish_checkpoint(job)
    assert found_bodies(store, "T", "k") == [b"behind", b"meanwhile", b"before"]
    assert bodies(store.read("T", 0, 0)) == [b"before", b"meanwhile", b"behind"]
    assert store.checkpointed < store.end
    store.close()
    again = open_store(disk)
    assert bodies(again.read("T", 0, 0)) == [b"before", b"meanwhile", b"behind"]
    again.close()
    assert_clean(disk)


def test_an_offset_id_alone_finds_its_record_and_no_other(store: MessageStore) -> None:
    append(store, plain(b"before"), plain(b"sought"))
    sought = list(store.records())[1]
    offset_id = encode_offset_id(sought.store_host, sought.log_offset)
    assert store.record_by_id(offset_id).body == b"sought"
    with pytest.raises(NoSuchRecord):
        store.record_by_id(encode_offset_id(sought.store_host, store.end))
