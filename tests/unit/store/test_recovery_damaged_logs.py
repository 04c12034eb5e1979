"""A table of damaged logs: which records recovery keeps, reports as damaged and truncates.

Every log of the table has the same twelve messages, alternating between two queues. The topic of
the first queue is short and that of the second is long, so every other record has the second of
the two record layouts and its magic. Eight of the messages are below the checkpoint. All of them
are in one segment, so only the checkpoint distinguishes damage from the torn end of a crash.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import pytest

from escrowmq.config import StoreConfig
from escrowmq.message.record import MAGIC_V1, MAGIC_V2, StoredRecord
from escrowmq.store.checkpoint import CHECKPOINT_PATH as CHECKPOINT_PATH
from escrowmq.store.checkpoint import (
    ROCKETMQ_PATH,
    Checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from escrowmq.store.commit_log import CommitLog
from escrowmq.store.config_files import DeletedTopics
from escrowmq.store.consume_queue import ENTRY, QueueBlocks, QueueTable
from escrowmq.store.damage import DamageKind, DamageReports
from escrowmq.store.disk import OpenFiles
from escrowmq.store.flush_marks import MARKS_PATH
from escrowmq.store.key_index import REDO_PATH as REDO_PATH
from escrowmq.store.key_index import KeyIndex
from escrowmq.store.recovery import Recovery, recover
from escrowmq.testing.disks import MemoryDisk
from tests.support.store_recovery import check_content, detached_copy, end_of
from tests.support.stores import HOST, NOW_MS, TINY, assert_clean, fill, open_store, sample

MESSAGES: Final = 12
CHECKPOINTED_MESSAGES: Final = 8  # messages below the checkpoint
TOPICS: Final = ("short", "long" * 32)
SETTINGS: Final = StoreConfig(
    segment_bytes=1 << 14,
    queue_file_bytes=200,
    index_slots=7,
    index_entries=100,
    sealed=False,
)

QUEUE_ID_POSITION: Final = 12  # bytes into a record
QUEUE_OFFSET_POSITION: Final = 20
BODY_POSITION: Final = 88

Records = list[StoredRecord]
DamageFunction = Callable[[MemoryDisk, Records], None]


def write_messages(disk: MemoryDisk) -> Records:
    """Append all messages with a checkpoint in between, and stop like a killed process."""
    store = open_store(disk, SETTINGS)
    for number in range(MESSAGES):
        if number == CHECKPOINTED_MESSAGES:
            store.checkpoint()
        message = sample(number, topic=TOPICS[number % 2], queue_id=0)
        store.append([message], now_ms=NOW_MS + number)
    store.flush()
    records = [detached_copy(record) for record in store.records()]
    store.abandon()
    assert [record.magic for record in records] == [MAGIC_V1, MAGIC_V2] * (MESSAGES // 2)
    assert end_of(records) < SETTINGS.segment_bytes
    return records


def overwrite(disk: MemoryDisk, path: str, position: int, data: bytes) -> None:
    file = disk.open(path)
    file.write_at(position, data)
    file.close()


def overwrite_log(disk: MemoryDisk, log_offset: int, data: bytes) -> None:
    overwrite(disk, f"commitlog/{0:020d}", log_offset, data)


def remove_queues(disk: MemoryDisk) -> None:
    """Make the next start read the log from its first record. The checkpoint stays."""
    for topic in TOPICS:
        for name in disk.names(f"consumequeue/{topic}/0"):
            disk.remove(f"consumequeue/{topic}/0/{name}")


def saved_checkpoint(disk: MemoryDisk) -> Checkpoint:
    checkpoint = load_checkpoint(disk)
    assert checkpoint is not None
    return checkpoint


# --- damage to records ---------------------------------------------------------------------------


def change_body(disk: MemoryDisk, record: StoredRecord) -> None:
    overwrite_log(disk, record.log_offset + BODY_POSITION, b"\xee")


def change_magic(disk: MemoryDisk, record: StoredRecord) -> None:
    overwrite_log(disk, record.log_offset + 4, b"\xee")


def set_first_queue_offset(disk: MemoryDisk, record: StoredRecord) -> None:
    """Give a record the queue offset of the first message. No checksum covers this field."""
    overwrite_log(disk, record.log_offset + QUEUE_OFFSET_POSITION, bytes(8))


def set_queue_offset(queue_offset: int) -> Callable[[MemoryDisk, StoredRecord], None]:
    """Return a function that gives a record this queue offset. No checksum covers this field."""

    def damage(disk: MemoryDisk, record: StoredRecord) -> None:
        overwrite_log(
            disk, record.log_offset + QUEUE_OFFSET_POSITION, queue_offset.to_bytes(8, "big")
        )

    return damage


def raise_queue_offset(disk: MemoryDisk, record: StoredRecord) -> None:
    """Give a record the queue offset of the next message of its queue."""
    set_queue_offset(record.queue_offset + 1)(disk, record)


def change_topic(disk: MemoryDisk, record: StoredRecord) -> None:
    """Write a slash, which is invalid, into the topic. No checksum covers this field."""
    length_bytes = 1 if record.magic == MAGIC_V1 else 2
    topic_position = record.log_offset + BODY_POSITION + len(record.body) + length_bytes
    overwrite_log(disk, topic_position, b"/")


def change_queue_id(disk: MemoryDisk, record: StoredRecord) -> None:
    overwrite_log(disk, record.log_offset + QUEUE_ID_POSITION, (-1).to_bytes(4, "big", signed=True))


@dataclass(frozen=True, kw_only=True)
class DamagedLog:
    """Which records are damaged and how, and what recovery reports."""

    damage: Callable[[MemoryDisk, StoredRecord], None]
    numbers: tuple[int, ...]
    reason: str
    has_checkpoint: bool = True
    removes_queues: bool = True
    loses_marks: bool = False  # as after a power cut: only the checkpoint says what was durable


WRONG_CHECKSUM: Final = "the body's checksum is wrong"
OFFSET_TAKEN: Final = "another record has this queue offset"
OFFSET_TOO_HIGH: Final = "the next queue offset is"

SKIPPED_DAMAGE: Final = {
    "a record before one of the second layout": DamagedLog(
        damage=change_body, numbers=(2,), reason=WRONG_CHECKSUM
    ),
    "a record before one of the first layout": DamagedLog(
        damage=change_body, numbers=(3,), reason=WRONG_CHECKSUM
    ),
    "neighbours of both layouts that still look like records": DamagedLog(
        damage=change_body, numbers=(2, 3), reason=WRONG_CHECKSUM
    ),
    "neighbours of both layouts that no longer look like records": DamagedLog(
        damage=change_magic,
        numbers=(2, 3, 4),
        reason="its magic 0xeea320a7 is not that of a record",
    ),
    "a queue offset that is taken": DamagedLog(
        damage=set_first_queue_offset, numbers=(4,), reason=OFFSET_TAKEN
    ),
    "a queue offset that is taken, in the second layout": DamagedLog(
        damage=set_first_queue_offset, numbers=(5,), reason=OFFSET_TAKEN
    ),
    "a queue offset far too high": DamagedLog(
        damage=set_queue_offset(2**50), numbers=(4,), reason=OFFSET_TOO_HIGH
    ),
    "the highest queue offset": DamagedLog(
        damage=set_queue_offset(2**63 - 1), numbers=(5,), reason=OFFSET_TOO_HIGH
    ),
    "a queue offset one too high": DamagedLog(
        damage=raise_queue_offset, numbers=(4,), reason=OFFSET_TOO_HIGH
    ),
    "a queue offset three too high": DamagedLog(
        damage=set_queue_offset(5), numbers=(5,), reason=OFFSET_TOO_HIGH
    ),
    "a queue offset far too high in the first record of a queue": DamagedLog(
        damage=set_queue_offset(2**50), numbers=(0,), reason=OFFSET_TOO_HIGH
    ),
    "a queue offset one too high in the first record of a queue": DamagedLog(
        damage=raise_queue_offset, numbers=(1,), reason=OFFSET_TOO_HIGH
    ),
    "queue offsets far too high in both queues": DamagedLog(
        damage=set_queue_offset(2**50), numbers=(4, 5), reason=OFFSET_TOO_HIGH
    ),
    "an invalid topic": DamagedLog(
        damage=change_topic, numbers=(4,), reason="only letters, digits"
    ),
    "an invalid queue id": DamagedLog(
        damage=change_queue_id, numbers=(4,), reason="invalid queue id -1"
    ),
}

TORN_ENDS: Final = {
    "a wrong checksum above the checkpoint": DamagedLog(
        damage=change_body, numbers=(9,), reason=WRONG_CHECKSUM, removes_queues=False
    ),
    "a queue offset that is taken above the checkpoint": DamagedLog(
        damage=set_first_queue_offset, numbers=(10,), reason=OFFSET_TAKEN, removes_queues=False
    ),
    "a queue offset that is taken above the checkpoint, when the whole log is read": DamagedLog(
        damage=set_first_queue_offset, numbers=(9,), reason=OFFSET_TAKEN
    ),
    "a queue offset far too high above the checkpoint": DamagedLog(
        damage=set_queue_offset(2**50), numbers=(10,), reason=OFFSET_TOO_HIGH, removes_queues=False
    ),
    "a queue offset far too high in the first record above the checkpoint": DamagedLog(
        damage=set_queue_offset(2**50), numbers=(8,), reason=OFFSET_TOO_HIGH, removes_queues=False
    ),
    "a queue offset one too high above the checkpoint": DamagedLog(
        damage=raise_queue_offset, numbers=(9,), reason=OFFSET_TOO_HIGH
    ),
    "a queue offset far too high in the last record": DamagedLog(
        damage=set_queue_offset(2**50), numbers=(11,), reason=OFFSET_TOO_HIGH
    ),
    "a queue offset far too high, without a checkpoint": DamagedLog(
        damage=set_queue_offset(2**50), numbers=(4,), reason=OFFSET_TOO_HIGH, has_checkpoint=False
    ),
    "an invalid topic above the checkpoint": DamagedLog(
        damage=change_topic, numbers=(9,), reason="only letters", removes_queues=False
    ),
    "a queue offset that is taken, without a checkpoint": DamagedLog(
        damage=set_first_queue_offset, numbers=(4,), reason=OFFSET_TAKEN, has_checkpoint=False
    ),
}


def damaged_disk(case: DamagedLog) -> tuple[MemoryDisk, Records]:
    disk = MemoryDisk()
    records = write_messages(disk)
    for number in case.numbers:
        case.damage(disk, records[number])
    if case.loses_marks:
        disk.remove(MARKS_PATH)
    if case.removes_queues:
        remove_queues(disk)
    if not case.has_checkpoint:
        disk.remove(CHECKPOINT_PATH)
        disk.remove(ROCKETMQ_PATH)  # its times say what was durable, too
    return disk, records


@pytest.mark.parametrize("case", SKIPPED_DAMAGE.values(), ids=SKIPPED_DAMAGE.keys())
def test_damage_to_durable_records_loses_those_records_alone(case: DamagedLog) -> None:
    disk, records = damaged_disk(case)
    first, next_number = case.numbers[0], case.numbers[-1] + 1
    store = open_store(disk, SETTINGS)
    damage = store.recovery.damage
    assert len(damage) == 1
    assert damage[0].begin == records[first].log_offset
    assert damage[-1].end == records[next_number].log_offset
    assert all(case.reason in damaged_range.reason for damaged_range in damage)
    assert not any(
        "log_offset" in damaged_range.reason for damaged_range in damage
    )  # `begin` has it
    assert store.recovery.torn_reason is None
    assert store.recovery.records == MESSAGES - len(case.numbers)
    assert store.end == end_of(records)
    lost = [records[number] for number in case.numbers]
    remaining = [record for record in records if record not in lost]
    check_content(store, remaining, missing=lost)
    store.abandon()
    reopened = open_store(disk, SETTINGS)
    assert not reopened.recovery.rebuilt_queues
    assert reopened.recovery.damage == []  # damage is reported only once
    check_content(reopened, remaining, missing=lost)
    reopened.close()


@pytest.mark.parametrize("case", TORN_ENDS.values(), ids=TORN_ENDS.keys())
def test_damage_that_may_be_the_torn_end_of_a_crash_ends_the_log(case: DamagedLog) -> None:
    disk, records = damaged_disk(replace(case, loses_marks=True))
    [first] = case.numbers
    store = open_store(disk, SETTINGS)
    assert store.recovery.torn_reason is not None
    assert case.reason in store.recovery.torn_reason
    assert "log_offset" not in store.recovery.torn_reason  # `end` has it
    assert store.recovery.damage == []
    assert store.end == records[first].log_offset
    check_content(store, records[:first], missing=records[first:])
    store.append([sample(100, topic=TOPICS[first % 2], queue_id=0)], now_ms=NOW_MS + 100)
    store.close()
    assert_clean(disk, SETTINGS)


def test_a_queue_offset_far_too_high_is_rejected_in_a_queue_with_expired_messages() -> None:
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
    overwrite(disk, path, QUEUE_OFFSET_POSITION, (2**50).to_bytes(8, "big"))
    for name in disk.names(f"consumequeue/{first.topic}/{first.queue_id}"):
        disk.remove(f"consumequeue/{first.topic}/{first.queue_id}/{name}")
    store = open_store(disk, TINY)
    assert [damage.begin for damage in store.recovery.damage] == [first.log_offset]
    assert OFFSET_TOO_HIGH in store.recovery.damage[0].reason
    check_content(store, records[1:], missing=[first])
    store.close()


def test_a_gap_in_a_queue_is_accepted_if_later_records_confirm_it() -> None:
    # A topic that was changed to another valid topic leaves a gap in the queue of its record.
    disk = MemoryDisk()
    records = write_messages(disk)
    topic_position = records[4].log_offset + BODY_POSITION + len(records[4].body) + 1
    overwrite_log(disk, topic_position, b"X")
    remove_queues(disk)
    store = open_store(disk, SETTINGS)
    # Nothing explains why the other queue would begin above 0, so this message is the wrong one.
    assert [damage.begin for damage in store.recovery.damage] == [records[4].log_offset]
    check_content(store, records[:4] + records[5:])
    store.close()


def test_a_small_gap_before_the_last_record_of_a_queue_is_accepted() -> None:
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


# --- checkpoints and queues that contradict the log ----------------------------------------------


def end_checkpoint_after_its_record(disk: MemoryDisk, records: Records) -> None:
    """Let the checkpoint end one byte too late. It still has the right number of queue entries."""
    checkpoint = saved_checkpoint(disk)
    save_checkpoint(disk, replace(checkpoint, log_offset=checkpoint.log_offset + 1))


def end_checkpoint_inside_its_record(disk: MemoryDisk, records: Records) -> None:
    checkpoint = saved_checkpoint(disk)
    save_checkpoint(disk, replace(checkpoint, log_offset=checkpoint.log_offset - 1))


def name_an_older_record_as_last(disk: MemoryDisk, records: Records) -> None:
    last = records[CHECKPOINTED_MESSAGES - 2].log_offset
    save_checkpoint(disk, replace(saved_checkpoint(disk), last_record=last))


def name_no_record_as_last(disk: MemoryDisk, records: Records) -> None:
    save_checkpoint(disk, replace(saved_checkpoint(disk), last_record=-1))


def move_an_entry_to_the_other_queue(disk: MemoryDisk, records: Records) -> None:
    """Move the last entry of one queue to the other, so the total number of entries is right."""
    last = records[CHECKPOINTED_MESSAGES - 1]
    end = (CHECKPOINTED_MESSAGES // 2) * ENTRY.size
    overwrite(disk, f"consumequeue/{TOPICS[1]}/0/{0:020d}", end - ENTRY.size, bytes(ENTRY.size))
    entry = ENTRY.pack(last.log_offset, last.size, 0)
    overwrite(disk, f"consumequeue/{TOPICS[0]}/0/{0:020d}", end, entry)


CONTRADICTIONS: Final[dict[str, DamageFunction]] = {
    "a checkpoint that ends after its last record": end_checkpoint_after_its_record,
    "a checkpoint that ends inside its last record": end_checkpoint_inside_its_record,
    "a checkpoint whose last record ends earlier": name_an_older_record_as_last,
    "a checkpoint that names no last record": name_no_record_as_last,
}


@pytest.mark.parametrize("damage", CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_files_that_contradict_the_log_are_rebuilt_from_it(damage: DamageFunction) -> None:
    disk = MemoryDisk()
    records = write_messages(disk)
    damage(disk, records)
    store = open_store(disk, SETTINGS)
    assert store.recovery.rebuilt_queues
    assert store.recovery.scanned_from == 0
    assert store.recovery.records == MESSAGES
    assert store.recovery.torn_reason is None
    assert store.recovery.damage == []
    check_content(store, records)
    store.close()
    assert_clean(disk, SETTINGS)


def test_an_entry_in_the_wrong_queue_is_repaired_when_it_is_read() -> None:
    disk = MemoryDisk()
    records = write_messages(disk)
    move_an_entry_to_the_other_queue(disk, records)
    store = open_store(disk, SETTINGS)
    assert not store.recovery.rebuilt_queues
    check_content(store, records)
    assert store.damage.counts == {(DamageKind.QUEUE, True): 1}
    store.close()
    assert_clean(disk, SETTINGS)


def test_only_the_records_above_a_valid_checkpoint_are_replayed() -> None:
    disk = MemoryDisk()
    records = write_messages(disk)
    store = open_store(disk, SETTINGS)
    assert not store.recovery.rebuilt_queues
    assert store.recovery.scanned_from == records[CHECKPOINTED_MESSAGES].log_offset
    assert store.recovery.records == MESSAGES - CHECKPOINTED_MESSAGES
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
    open_files = OpenFiles(disk)
    log = CommitLog(disk, segment_bytes=SETTINGS.segment_bytes, store_host=HOST)
    blocks = QueueBlocks(disk, open_files, file_bytes=SETTINGS.queue_file_bytes)
    queues = QueueTable(blocks, DeletedTopics(disk))
    index = KeyIndex(
        disk, open_files, slot_count=SETTINGS.index_slots, entry_count=SETTINGS.index_entries
    )
    return recover(
        disk, log, queues, index, (), was_clean=False, spill=spill, damage=DamageReports()
    )


def remove_index(disk: MemoryDisk) -> None:
    disk.remove(REDO_PATH)  # it would restore the keys of the last checkpoint
    for name in disk.names("index"):
        disk.remove(f"index/{name}")


@pytest.mark.parametrize(
    ("remove", "spills"),
    [
        (remove_queues, MESSAGES // 3),
        # The keys below the checkpoint are read in a separate pass, before those above it.
        (remove_index, CHECKPOINTED_MESSAGES // 3 + (MESSAGES - CHECKPOINTED_MESSAGES) // 3),
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
def test_a_replay_with_spills_restores_all_records(
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
