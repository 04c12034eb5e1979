"""Recovery after a clean stop, after a kill, and of a log with a torn end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from escrowmq.message.record import StoredRecord
from tests.support.store_recovery import (
    CHECKPOINTED_COUNT,
    SAMPLE_COUNT,
    check_usable,
    end_of,
    flip_bit,
    lose_marks,
    make_store,
    overwrite,
    read_all,
    reopen,
)
from tests.support.stores import NOW_MS, TINY, assert_clean, locate, sample

pytestmark = pytest.mark.slow  # dozens of real fsyncs each


# --- clean stops and kills -----------------------------------------------------------------------


def test_an_empty_directory_is_an_empty_store(root: Path) -> None:
    store = reopen(root)
    recovery = store.recovery
    assert (recovery.was_clean, recovery.records, recovery.end, recovery.torn_reason) == (
        True,
        0,
        0,
        None,
    )
    assert not recovery.rebuilt_queues
    assert store.queues() == []
    store.close()
    assert_clean(root)


def test_after_a_clean_stop_nothing_is_replayed(root: Path) -> None:
    records = make_store(root, killed=False)
    store = reopen(root)
    recovery = store.recovery
    assert (recovery.was_clean, recovery.records, recovery.torn_reason, recovery.damage) == (
        True,
        0,
        None,
        [],
    )
    assert recovery.scanned_from == recovery.end == end_of(records)
    assert (recovery.last_record_offset, recovery.stored_ms) == (
        records[-1].log_offset,
        records[-1].stored_ms,
    )
    assert not recovery.rebuilt_queues
    assert not recovery.rebuilt_index
    check_usable(root, store, records)


def test_after_a_kill_the_tail_is_replayed(root: Path) -> None:
    records = make_store(root, killed=True)
    store = reopen(root)
    recovery = store.recovery
    assert (recovery.was_clean, recovery.torn_reason, recovery.damage) == (False, None, [])
    assert recovery.scanned_from == records[CHECKPOINTED_COUNT].log_offset
    assert (recovery.records, recovery.end) == (SAMPLE_COUNT - CHECKPOINTED_COUNT, end_of(records))
    assert not recovery.rebuilt_queues
    assert not recovery.rebuilt_index
    check_usable(root, store, records)


def test_after_a_kill_right_after_opening_nothing_is_replayed(root: Path) -> None:
    records = make_store(root, killed=True)
    reopen(root).abandon()
    store = reopen(root)
    assert not store.recovery.was_clean
    assert (store.recovery.records, store.recovery.scanned_from) == (0, end_of(records))
    check_usable(root, store, records)


def test_prepared_and_rolled_back_records_survive_without_queue_entries(root: Path) -> None:
    store = reopen(root)
    transaction_types = [0, 4, 12, 8, 4, 0]
    batch = [
        sample(0, sys_flag=transaction_type, body=b"%d" % transaction_type)
        for transaction_type in transaction_types
    ]
    store.append(batch, now_ms=NOW_MS)
    store.flush()
    store.abandon()
    store = reopen(root)
    assert [record.sys_flag for record in store.records()] == transaction_types
    assert [offset for offset, _ in read_all(store, ("T0", 0), 0)] == [0, 1, 2]
    assert len(store.find_by_key("T0", "U0000")) == 5
    store.close()
    assert_clean(root)


def test_records_with_a_crc_survive(root: Path) -> None:
    settings = replace(TINY, sealed=True)
    records = make_store(root, killed=True, settings=settings)
    check_usable(root, reopen(root, settings), records, settings)


@pytest.mark.parametrize("enabled_first", [False, True], ids=["enable it", "disable it"])
def test_the_record_crc_setting_can_be_changed_for_an_existing_store(
    root: Path, enabled_first: bool
) -> None:
    records = make_store(root, killed=True, settings=replace(TINY, sealed=enabled_first))
    settings = replace(TINY, sealed=not enabled_first)
    check_usable(root, reopen(root, settings), records, settings)


# --- the torn end --------------------------------------------------------------------------------


def test_a_truncated_log_file_keeps_the_records_before_the_truncation(root: Path) -> None:
    records = make_store(root, killed=True)
    lose_marks(root)
    path, position = locate(root, records[-2].log_offset + 50)
    with path.open("r+b") as file:
        file.truncate(position)
    store = reopen(root)
    assert store.recovery.torn_reason is not None
    assert store.end == records[-2].log_offset
    assert path.stat().st_size == TINY.segment_bytes
    check_usable(root, store, records[:-2], missing=records[-2:])


@pytest.mark.parametrize(
    ("tail", "is_torn"),
    [
        (lambda record: bytes(record.size), False),
        (lambda record: b"\xff" * record.size, True),
        (lambda record: bytes(range(1, 92)), True),
        (lambda record: b"\xcb\xd4\x31\x94" * 20, True),
    ],
    ids=["zeros", "ones", "garbage", "the magic of a blank record"],
)
def test_a_last_record_that_was_not_written_completely_is_truncated(
    root: Path, tail: Callable[[StoredRecord], bytes], is_torn: bool
) -> None:
    records = make_store(root, killed=True)
    lose_marks(root)
    overwrite(
        root,
        records[-1].log_offset,
        tail(records[-1])[: records[-1].size].ljust(records[-1].size, b"\0"),
    )
    store = reopen(root)
    assert (store.recovery.torn_reason is not None) == is_torn
    assert store.recovery.damage == []
    assert store.end == records[-1].log_offset
    check_usable(root, store, records[:-1], missing=records[-1:])


@pytest.mark.parametrize(
    "number", [CHECKPOINTED_COUNT, CHECKPOINTED_COUNT + 1, SAMPLE_COUNT - 2, SAMPLE_COUNT - 1]
)
def test_an_invalid_record_that_no_mark_covers_ends_the_log(root: Path, number: int) -> None:
    records = make_store(root, killed=True)
    lose_marks(root)
    flip_bit(root, records[number])
    store = reopen(root)
    assert store.recovery.torn_reason == "the body's checksum is wrong"
    assert store.recovery.damage == []
    assert store.recovery.records == number - CHECKPOINTED_COUNT
    assert store.end == records[number].log_offset
    check_usable(root, store, records[:number], missing=records[number:])


@pytest.mark.parametrize(
    "number", [CHECKPOINTED_COUNT, CHECKPOINTED_COUNT + 1, SAMPLE_COUNT - 2, SAMPLE_COUNT - 1]
)
def test_an_invalid_record_that_was_flushed_is_damage(root: Path, number: int) -> None:
    records = make_store(root, killed=True)
    flip_bit(root, records[number])
    store = reopen(root)
    assert [damage.begin for damage in store.recovery.damage] == [records[number].log_offset]
    assert store.recovery.torn_reason is None
    assert not store.recovery.rebuilt_queues
    assert store.end == end_of(records)
    lost = records[number]
    queue = lost.topic, lost.queue_id
    assert store.max_offset(*queue) > lost.queue_offset  # its offset is not used again
    for record in records[:number] + records[number + 1 :]:
        assert store.record_at(record.log_offset) == record
        messages = read_all(store, (record.topic, record.queue_id), record.queue_offset)
        assert messages[0] == (record.queue_offset, record.body)
    assert lost.body not in [body for _, body in read_all(store, queue, 0)]
    store.append([sample(1000)], now_ms=NOW_MS)
    store.close()
    reopened = reopen(root)
    assert reopened.recovery.damage == []
    reopened.close()


def test_garbage_after_the_last_record_is_removed(root: Path) -> None:
    records = make_store(root, killed=True)
    path, position = locate(root, end_of(records))
    garbage = b"\xda\xa3\x20\xa7" * ((TINY.segment_bytes - position) // 4)
    overwrite(root, end_of(records), garbage)
    store = reopen(root)
    assert store.recovery.torn_reason is not None
    assert not any(path.read_bytes()[position:])
    check_usable(root, store, records)


def test_garbage_after_the_last_record_is_removed_after_a_clean_stop_too(root: Path) -> None:
    records = make_store(root, killed=False)
    overwrite(root, end_of(records), b"garbage " * 12)
    store = reopen(root)
    assert store.recovery.was_clean
    assert store.recovery.torn_reason is not None
    check_usable(root, store, records)


def test_a_record_after_unwritten_bytes_is_not_recovered(root: Path) -> None:
    # The drive wrote the last sectors of the log, but not the sectors before them.
    records = make_store(root, killed=True)
    lose_marks(root)
    overwrite(root, records[-3].log_offset, bytes(records[-3].size))
    store = reopen(root)
    assert store.end == records[-3].log_offset
    check_usable(root, store, records[:-3], missing=records[-3:])


def test_an_empty_segment_is_accepted(root: Path) -> None:
    records = make_store(root, killed=True)
    base = (end_of(records) // TINY.segment_bytes + 1) * TINY.segment_bytes
    (root / f"commitlog/{base:020d}").write_bytes(b"")
    store = reopen(root)
    assert store.end == end_of(records)
    check_usable(root, store, records)
