"""A table of damaged logs: what recovery keeps, reports and cuts off.

Every log of the table holds the same twelve messages, alternating between two queues. The topic of
the first queue is short and that of the second is long, so every other record has the second of
the two record layouts and its magic. Eight of the messages are below the checkpoint. All of them
are in one segment, so that only the checkpoint tells damage from the torn end of a crash.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import pytest

from escrowmq.config import StoreConfig
from escrowmq.message.record import MAGIC_V1, MAGIC_V2, StoredRecord
from escrowmq.store.checkpoint import CHECKPOINT_PATH as CHECKPOINT_PATH
from escrowmq.store.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from escrowmq.store.commit_log import CommitLog
from escrowmq.store.consume_queue import ENTRY, DeletedTopics, QueueTable
from escrowmq.store.disk import ViewCache
from escrowmq.store.key_index import REDO_PATH as REDO_PATH
from escrowmq.store.key_index import KeyIndex
from escrowmq.store.recovery import Recovery, recover
from escrowmq.testing.disks import MemoryDisk
from tests.support.store_recovery import check_content, detached_copy, end_of
from tests.support.stores import HOST, NOW_MS, TINY, assert_clean, fill, open_store, sample

COUNT: Final = 12
CHECKPOINTED: Final = 8  # so many lie below the checkpoint
TOPICS: Final = ("short", "long" * 32)
SETTINGS: Final = StoreConfig(
    segment_bytes=1 << 14, queue_file_bytes=200, index_slots=7, index_entries=100
)

QUEUE_ID_AT: Final = 12  # bytes into a record
QUEUE_OFFSET_AT: Final = 20
BODY_AT: Final = 88

Records = list[StoredRecord]
Damaging = Callable[[MemoryDisk, Records], None]


def write_messages(disk: MemoryDisk) -> Records:
    """Append all messages, make a checkpoint on the way, and end like a killed process."""
    store = open_store(disk, SETTINGS)
    for number in range(COUNT):
        if number == CHECKPOINTED:
            store.checkpoint()
        message = sample(number, topic=TOPICS[number % 2], queue_id=0)
        store.append([message], now_ms=NOW_MS + number)
    store.flush()
    records = [detached_copy(record) for record in store.records()]
    store.abandon()
    assert [record.magic for record in records] == [MAGIC_V1, MAGIC_V2] * (COUNT // 2)
    assert end_of(records) < SETTINGS.segment_bytes
    return records


def overwrite(disk: MemoryDisk, path: str, position: int, data: bytes) -> None:
    file = disk.open(path)
    file.write_at(position, data)
    file.close()


def overwrite_log(disk: MemoryDisk, log_offset: int, data: bytes) -> None:
    overwrite(disk, f"commitlog/{0:020d}", log_offset, data)


def remove_queues(disk: MemoryDisk) -> None:
    """Make the next start read the log from its first record. It still knows what was durable."""
    for topic in TOPICS:
        for name in disk.names(f"consumequeue/{topic}/0"):
            disk.remove(f"consumequeue/{topic}/0/{name}")


def saved_checkpoint(disk: MemoryDisk) -> Checkpoint:
    checkpoint = load_checkpoint(disk)
    assert checkpoint is not None
    return checkpoint


# --- damage to records ---------------------------------------------------------------------------


def change_body(disk: MemoryDisk, record: StoredRecord) -> None:
    overwrite_log(disk, record.log_offset + BODY_AT, b"\xee")


def change_magic(disk: MemoryDisk, record: StoredRecord) -> None:
    overwrite_log(disk, record.log_offset + 4, b"\xee")


def set_first_queue_offset(disk: MemoryDisk, record: StoredRecord) -> None:
    """Let a record claim the queue offset of the first message. No checksum covers this field."""
    overwrite_log(disk, record.log_offset + QUEUE_OFFSET_AT, bytes(8))


def set_queue_offset(queue_offset: int) -> Callable[[MemoryDisk, StoredRecord], None]:
    """Let a record claim a queue offset that is too high. No checksum covers this field."""

    def damage(disk: MemoryDisk, record: StoredRecord) -> None:
        overwrite_log(disk, record.log_offset + QUEUE_OFFSET_AT, queue_offset.to_bytes(8, "big"))

    return damage


def raise_queue_offset(disk: MemoryDisk, record: StoredRecord) -> None:
    """Let a record claim the queue offset of the next message of its queue."""
    set_queue_offset(record.queue_offset + 1)(disk, record)


def change_topic(disk: MemoryDisk, record: StoredRecord) -> None:
    """Put a slash into the topic, which no topic may have. No checksum covers this field."""
    length_bytes = 1 if record.magic == MAGIC_V1 else 2
    topic_at = record.log_offset + BODY_AT + len(record.body) + length_bytes
    overwrite_log(disk, topic_at, b"/")


def change_queue_id(disk: MemoryDisk, record: StoredRecord) -> None:
    overwrite_log(disk, record.log_offset + QUEUE_ID_AT, (-1).to_bytes(4, "big", signed=True))


@dataclass(frozen=True, kw_only=True)
class DamagedLog:
    """Which records are damaged, how, and what recovery reports."""

    damage: Callable[[MemoryDisk, StoredRecord], None]
    numbers: tuple[int, ...]
    why: str
    has_checkpoint: bool = True
    reads_from_the_start: bool = True
    ranges: int = 1  # damage that is reported separately


CHECKSUM: Final = "the body's checksum is wrong"
TAKEN: Final = "another record has this queue offset"
TOO_HIGH: Final = "the next queue offset is"

STEPPED_OVER: Final = {
    "a record before one of the second layout": DamagedLog(
        damage=change_body, numbers=(2,), why=CHECKSUM
    ),
    "a record before one of the first layout": DamagedLog(
        damage=change_body, numbers=(3,), why=CHECKSUM
    ),
    "neighbours of both layouts that still look like records": DamagedLog(
        damage=change_body, numbers=(2, 3), why=CHECKSUM
    ),
    "neighbours of both layouts that no longer look like records": DamagedLog(
        damage=change_magic, numbers=(2, 3, 4), why="its magic 0xeea320a7 is not that of a record"
    ),
    "a queue offset that is taken": DamagedLog(
        damage=set_first_queue_offset, numbers=(4,), why=TAKEN
    ),
    "a queue offset that is taken, in the second layout": DamagedLog(
        damage=set_first_queue_offset, numbers=(5,), why=TAKEN
    ),
    "a queue offset far too high": DamagedLog(
        damage=set_queue_offset(2**50), numbers=(4,), why=TOO_HIGH
    ),
    "the highest queue offset": DamagedLog(
        damage=set_queue_offset(2**63 - 1), numbers=(5,), why=TOO_HIGH
    ),
    "a queue offset one too high": DamagedLog(
        damage=raise_queue_offset, numbers=(4,), why=TOO_HIGH
    ),
    "a queue offset three too high": DamagedLog(
        damage=set_queue_offset(5), numbers=(5,), why=TOO_HIGH
    ),
    "a queue offset far too high in the first record of a queue": DamagedLog(
        damage=set_queue_offset(2**50), numbers=(0,), why=TOO_HIGH
    ),
    "a queue offset one too high in the first record of a queue": DamagedLog(
        damage=raise_queue_offset, numbers=(1,), why=TOO_HIGH
    ),
    "queue offsets far too high in both queues": DamagedLog(
        damage=set_queue_offset(2**50), numbers=(4, 5), why=TOO_HIGH, ranges=2
    ),
    "a topic that no queue can have": DamagedLog(
        damage=change_topic, numbers=(4,), why="only letters, digits"
    ),
    "a queue id that no queue can have": DamagedLog(
        damage=change_queue_id, numbers=(4,), why="invalid queue id -1"
    ),
}

CUT_OFF: Final = {
    "a checksum behind the checkpoint": DamagedLog(
        damage=change_body, numbers=(9,), why=CHECKSUM, reads_from_the_start=False
    ),
    "a taken queue offset behind the checkpoint": DamagedLog(
        damage=set_first_queue_offset, numbers=(10,), why=TAKEN, reads_from_the_start=False
    ),
    "a taken queue offset behind the checkpoint, all of the log read": DamagedLog(
        damage=set_first_queue_offset, numbers=(9,), why=TAKEN
    ),
    "a queue offset far too high behind the checkpoint": DamagedLog(
        damage=set_queue_offset(2**50), numbers=(10,), why=TOO_HIGH, reads_from_the_start=False
    ),
    "a queue offset far too high right behind the checkpoint": DamagedLog(
        damage=set_queue_offset(2**50), numbers=(8,), why=TOO_HIGH, reads_from_the_start=False
    ),
    "a queue offset one too high behind the checkpoint": DamagedLog(
        damage=raise_queue_offset, numbers=(9,), why=TOO_HIGH
    ),
    "a queue offset far too high in the last record": DamagedLog(
        damage=set_queue_offset(2**50), numbers=(11,), why=TOO_HIGH
    ),
    "a queue offset far too high without a checkpoint": DamagedLog(
        damage=set_queue_offset(2**50), numbers=(4,), why=TOO_HIGH, has_checkpoint=False
    ),
    "a bad topic behind the checkpoint": DamagedLog(
        damage=change_topic, numbers=(9,), why="only letters", reads_from_the_start=False
    ),
    "a taken queue offset without a checkpoint": DamagedLog(
        damage=set_first_queue_offset, numbers=(4,), why=TAKEN, has_checkpoint=False
    ),
}


def damaged_disk(case: DamagedLog) -> tuple[MemoryDisk, Records]:
    disk = MemoryDisk()
    records = write_messages(disk)
    for number in case.numbers:
        case.damage(disk, records[number])
    if case.reads_from_the_start:
        remove_queues(disk)
    if not case.has_checkpoint:
        disk.remove(CHECKPOINT_PATH)
    return disk, records


@pytest.mark.parametrize("case", STEPPED_OVER.values(), ids=STEPPED_OVER.keys())
def test_damage_to_durable_records_loses_those_records_alone(case: DamagedLog) -> None:
    disk, records = damaged_disk(case)
    first, behind = case.numbers[0], case.numbers[-1] + 1
    store = open_store(disk, SETTINGS)
    damage = store.recovery.damage
    assert len(damage) == case.ranges
    assert damage[0].begin == records[first].log_offset
    assert damage[-1].end == records[behind].log_offset
    assert all(case.why in part.reason for part in damage)
    assert not any("log_offset" in part.reason for part in damage)  # `begin` says it already
    assert store.recovery.torn_reason is None
    assert store.recovery.records == COUNT - len(case.numbers)
    assert store.end == end_of(records)
    lost = [records[number] for number in case.numbers]
    remaining = [record for record in records if record not in lost]
    check_content(store, remaining, missing=lost)
    store.abandon()
    again = open_store(disk, SETTINGS)
    assert not again.recovery.rebuilt_queues
    assert again.recovery.damage == []  # it is reported only once
    check_content(again, remaining, missing=lost)
    again.close()


@pytest.mark.parametrize("case", CUT_OFF.values(), ids=CUT_OFF.keys())
def test_damage_that_may_be_the_torn_end_of_a_crash_ends_the_log(case: DamagedLog) -> None:
    disk, records = damaged_disk(case)
    [first] = case.numbers
    store = open_store(disk, SETTINGS)
    assert store.recovery.torn_reason is not None
    assert case.why in store.recovery.torn_reason
    assert "log_offset" not in store.recovery.torn_reason  # `end` says it already
    assert store.recovery.damage == []
    assert store.end == records[first].log_offset
    check_content(store, records[:first], missing=records[first:])
    store.append([sample(100, topic=TOPICS[first % 2], queue_id=0)], now_ms=NOW_MS + 100)
    store.close()
    assert_clean(disk, SETTINGS)


def test_a_queue_offset_far_too_high_is_rejected_when_the_queue_has_expired_in_part() -> None:
    disk = MemoryDisk()
    store = open_store(disk, TINY)
    fill(store, range(40))
    store.checkpoint()
    store.remove_oldest_file()
    store.checkpoint()
    records = [detached_copy(record) for record in store.records()]
    store.abandon()
    first = records[0]
    path = f"commitlog/{TINY.segment_bytes:020d}"
    overwrite(disk, path, QUEUE_OFFSET_AT, (2**50).to_bytes(8, "big"))
    for name in disk.names(f"consumequeue/{first.topic}/{first.queue_id}"):
        disk.remove(f"consumequeue/{first.topic}/{first.queue_id}/{name}")
    store = open_store(disk, TINY)
    assert [damage.begin for damage in store.recovery.damage] == [first.log_offset]
    assert TOO_HIGH in store.recovery.damage[0].reason
    check_content(store, records[1:], missing=[first])
    store.close()


def test_a_gap_without_damage_is_kept_if_later_records_confirm_it() -> None:
    """A topic that was changed to another valid topic leaves a gap in the queue of its record."""
    disk = MemoryDisk()
    records = write_messages(disk)
    topic_at = records[4].log_offset + BODY_AT + len(records[4].body) + 1
    overwrite_log(disk, topic_at, b"X")
    remove_queues(disk)
    store = open_store(disk, SETTINGS)
    assert store.recovery.damage == []
    assert store.recovery.records == COUNT
    check_content(store, records[:4] + records[5:])
    store.close()


def test_a_gap_in_front_of_the_last_record_of_a_queue_is_kept_if_it_is_small() -> None:
    disk = MemoryDisk()
    records = write_messages(disk)
    raise_queue_offset(disk, records[11])
    store = open_store(disk, SETTINGS)
    assert store.recovery.torn_reason is None
    assert store.max_offset(TOPICS[1], 0) == 7
    assert store.log_offset_of(TOPICS[1], 0, 5) is None
    assert store.log_offset_of(TOPICS[1], 0, 6) == records[11].log_offset
    store.close()
    assert_clean(disk, SETTINGS)


# --- checkpoints and queues that do not fit the log ----------------------------------------------


def end_checkpoint_behind_its_record(disk: MemoryDisk, records: Records) -> None:
    """It still counts the same queue entries: only the end of the record says that it is wrong."""
    checkpoint = saved_checkpoint(disk)
    save_checkpoint(disk, replace(checkpoint, log_offset=checkpoint.log_offset + 1))


def end_checkpoint_inside_its_record(disk: MemoryDisk, records: Records) -> None:
    checkpoint = saved_checkpoint(disk)
    save_checkpoint(disk, replace(checkpoint, log_offset=checkpoint.log_offset - 1))


def name_an_older_record_as_last(disk: MemoryDisk, records: Records) -> None:
    last = records[CHECKPOINTED - 2].log_offset
    save_checkpoint(disk, replace(saved_checkpoint(disk), last_record=last))


def name_no_record_as_last(disk: MemoryDisk, records: Records) -> None:
    save_checkpoint(disk, replace(saved_checkpoint(disk), last_record=-1))


def move_an_entry_to_the_other_queue(disk: MemoryDisk, records: Records) -> None:
    """One queue lacks its last entry and the other has one too many, so the totals still fit."""
    last = records[CHECKPOINTED - 1]
    end = (CHECKPOINTED // 2) * ENTRY.size
    overwrite(disk, f"consumequeue/{TOPICS[1]}/0/{0:020d}", end - ENTRY.size, bytes(ENTRY.size))
    entry = ENTRY.pack(last.log_offset, last.size, 0)
    overwrite(disk, f"consumequeue/{TOPICS[0]}/0/{0:020d}", end, entry)


MISFITS: Final[dict[str, Damaging]] = {
    "a checkpoint that ends behind its last record": end_checkpoint_behind_its_record,
    "a checkpoint that ends inside its last record": end_checkpoint_inside_its_record,
    "a checkpoint whose last record ends earlier": name_an_older_record_as_last,
    "a checkpoint that names no last record": name_no_record_as_last,
    "two queues whose next offsets do not fit": move_an_entry_to_the_other_queue,
}


@pytest.mark.parametrize("damage", MISFITS.values(), ids=MISFITS.keys())
def test_files_that_contradict_the_log_are_rebuilt_from_it(damage: Damaging) -> None:
    disk = MemoryDisk()
    records = write_messages(disk)
    damage(disk, records)
    store = open_store(disk, SETTINGS)
    assert store.recovery.rebuilt_queues
    assert store.recovery.scanned_from == 0
    assert store.recovery.records == COUNT
    assert store.recovery.torn_reason is None
    assert store.recovery.damage == []
    check_content(store, records)
    store.close()
    assert_clean(disk, SETTINGS)


def test_a_valid_checkpoint_saves_the_replay_of_what_is_below() -> None:
    disk = MemoryDisk()
    records = write_messages(disk)
    store = open_store(disk, SETTINGS)
    assert not store.recovery.rebuilt_queues
    assert store.recovery.scanned_from == records[CHECKPOINTED].log_offset
    assert store.recovery.records == COUNT - CHECKPOINTED
    check_content(store, records)
    store.close()


def test_a_checkpoint_that_names_an_expired_record_is_ignored() -> None:
    disk = MemoryDisk()
    store = open_store(disk, TINY)
    fill(store, range(40))
    store.checkpoint()
    store.remove_oldest_file()
    store.checkpoint()
    fill(store, range(40, 44))
    store.flush()
    records = [detached_copy(record) for record in store.records()]
    store.abandon()
    save_checkpoint(disk, replace(saved_checkpoint(disk), last_record=0))
    store = open_store(disk, TINY)
    assert store.recovery.scanned_from == store.begin == TINY.segment_bytes
    assert store.recovery.damage == []
    check_content(store, records)
    store.close()
    assert_clean(disk, TINY)


# --- long replays --------------------------------------------------------------------------------


def replay(disk: MemoryDisk, spill: Callable[[], None]) -> Recovery:
    """Recover a log without a store, to count the calls of `spill`."""
    views = ViewCache(disk)
    log = CommitLog(disk, segment_bytes=SETTINGS.segment_bytes, store_host=HOST)
    queues = QueueTable(disk, views, DeletedTopics(disk), file_bytes=SETTINGS.queue_file_bytes)
    index = KeyIndex(
        disk, views, slot_count=SETTINGS.index_slots, entry_count=SETTINGS.index_entries
    )
    return recover(disk, log, queues, index, was_clean=False, spill=spill)


def remove_index(disk: MemoryDisk) -> None:
    disk.remove(REDO_PATH)  # else the next start writes the keys of the last checkpoint again
    for name in disk.names("index"):
        disk.remove(f"index/{name}")


@pytest.mark.parametrize(
    ("remove", "spills"),
    [
        (remove_queues, COUNT // 3),
        # The index below the checkpoint is a walk of its own, before that over the tail.
        (remove_index, CHECKPOINTED // 3 + (COUNT - CHECKPOINTED) // 3),
    ],
    ids=["queues and index are rebuilt", "the index is rebuilt"],
)
def test_a_long_replay_spills_its_memory_to_files(
    remove: Callable[[MemoryDisk], None], spills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("escrowmq.store.recovery.SPILL_INTERVAL_RECORDS", 3)
    disk = MemoryDisk()
    records = write_messages(disk)
    remove(disk)
    calls: list[None] = []
    recovery = replay(disk, spill=lambda: calls.append(None))
    assert recovery.end == end_of(records)
    assert len(calls) == spills


@pytest.mark.parametrize("remove", [remove_queues, remove_index])
def test_a_replay_with_spills_restores_the_same(
    remove: Callable[[MemoryDisk], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("escrowmq.store.recovery.SPILL_INTERVAL_RECORDS", 3)
    disk = MemoryDisk()
    records = write_messages(disk)
    remove(disk)
    store = open_store(disk, SETTINGS)
    check_content(store, records)
    store.close()
    assert_clean(disk, SETTINGS)
