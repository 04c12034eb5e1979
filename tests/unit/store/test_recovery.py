"""Recovery after a clean stop, a kill and a torn log."""

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
    make_store,
    overwrite,
    read_all,
    reopen,
)
from tests.support.stores import NOW_MS, TINY, assert_clean, locate, sample

pytestmark = pytest.mark.slow  # dozens of real fsyncs each


# --- how it was stopped --------------------------------------------------------------------------


def test_an_empty_directory_is_an_empty_store(root: Path) -> None:
    store = reopen(root)
    found = store.recovery
    assert (found.was_clean, found.records, found.end, found.torn_reason) == (True, 0, 0, None)
    assert not found.rebuilt_queues
    assert store.queues() == []
    store.close()
    assert_clean(root)


def test_after_a_clean_stop_nothing_is_replayed(root: Path) -> None:
    kept = make_store(root, killed=False)
    store = reopen(root)
    found = store.recovery
    assert (found.was_clean, found.records, found.torn_reason, found.damage) == (True, 0, None, [])
    assert found.scanned_from == found.end == end_of(kept)
    assert (found.last_record_offset, found.stored_ms) == (kept[-1].log_offset, kept[-1].stored_ms)
    assert not found.rebuilt_queues
    assert not found.rebuilt_index
    check_usable(root, store, kept)


def test_after_a_kill_the_tail_is_replayed(root: Path) -> None:
    kept = make_store(root, killed=True)
    store = reopen(root)
    found = store.recovery
    assert (found.was_clean, found.torn_reason, found.damage) == (False, None, [])
    assert found.scanned_from == kept[CHECKPOINTED_COUNT].log_offset
    assert (found.records, found.end) == (SAMPLE_COUNT - CHECKPOINTED_COUNT, end_of(kept))
    assert not found.rebuilt_queues
    assert not found.rebuilt_index
    check_usable(root, store, kept)


def test_after_a_kill_right_after_opening_nothing_is_replayed(root: Path) -> None:
    kept = make_store(root, killed=True)
    reopen(root).abandon()
    store = reopen(root)
    assert not store.recovery.was_clean
    assert (store.recovery.records, store.recovery.scanned_from) == (0, end_of(kept))
    check_usable(root, store, kept)


def test_prepared_and_rolled_back_records_survive_without_queue_entries(root: Path) -> None:
    store = reopen(root)
    kinds = [0, 4, 12, 8, 4, 0]
    batch = [sample(0, sys_flag=kind, body=b"%d" % kind) for kind in kinds]
    store.append(batch, now_ms=NOW_MS)
    store.flush()
    store.abandon()
    store = reopen(root)
    assert [record.sys_flag for record in store.records()] == kinds
    assert [offset for offset, _ in read_all(store, ("T0", 0), 0)] == [0, 1, 2]
    assert len(store.find_by_key("T0", "U0000")) == 5
    store.close()
    assert_clean(root)


def test_records_with_a_crc_survive(root: Path) -> None:
    settings = replace(TINY, sealed=True)
    kept = make_store(root, killed=True, settings=settings)
    check_usable(root, reopen(root, settings), kept, settings)


def test_crcs_can_be_enabled_and_disabled(root: Path) -> None:
    settings = replace(TINY, sealed=True)
    kept = make_store(root, killed=True)
    check_usable(root, reopen(root, settings), kept, settings)


# --- the torn end --------------------------------------------------------------------------------


def test_a_log_file_cut_short_keeps_what_is_before_the_cut(root: Path) -> None:
    kept = make_store(root, killed=True)
    path, position = locate(root, kept[-2].log_offset + 50)
    with path.open("r+b") as file:
        file.truncate(position)
    store = reopen(root)
    assert store.recovery.torn_reason is not None
    assert store.end == kept[-2].log_offset
    assert path.stat().st_size == TINY.segment_bytes
    check_usable(root, store, kept[:-2], missing=kept[-2:])


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
def test_a_last_record_that_was_not_written_is_cut_off(
    root: Path, tail: Callable[[StoredRecord], bytes], is_torn: bool
) -> None:
    kept = make_store(root, killed=True)
    overwrite(
        root, kept[-1].log_offset, tail(kept[-1])[: kept[-1].size].ljust(kept[-1].size, b"\0")
    )
    store = reopen(root)
    assert (store.recovery.torn_reason is not None) == is_torn
    assert store.recovery.damage == []
    assert store.end == kept[-1].log_offset
    check_usable(root, store, kept[:-1], missing=kept[-1:])


@pytest.mark.parametrize(
    "number", [CHECKPOINTED_COUNT, CHECKPOINTED_COUNT + 1, SAMPLE_COUNT - 2, SAMPLE_COUNT - 1]
)
def test_behind_the_checkpoint_an_invalid_record_ends_the_log(root: Path, number: int) -> None:
    kept = make_store(root, killed=True)
    flip_bit(root, kept[number])
    store = reopen(root)
    assert store.recovery.torn_reason == "the body's checksum is wrong"
    assert store.recovery.damage == []
    assert store.recovery.records == number - CHECKPOINTED_COUNT
    assert store.end == kept[number].log_offset
    check_usable(root, store, kept[:number], missing=kept[number:])


def test_garbage_behind_the_last_record_is_removed(root: Path) -> None:
    kept = make_store(root, killed=True)
    path, position = locate(root, end_of(kept))
    garbage = b"\xda\xa3\x20\xa7" * ((TINY.segment_bytes - position) // 4)
    overwrite(root, end_of(kept), garbage)
    store = reopen(root)
    assert store.recovery.torn_reason is not None
    assert not any(path.read_bytes()[position:])
    check_usable(root, store, kept)


def test_garbage_after_a_clean_stop_is_removed_too(root: Path) -> None:
    kept = make_store(root, killed=False)
    overwrite(root, end_of(kept), b"garbage " * 12)
    store = reopen(root)
    assert store.recovery.was_clean
    assert store.recovery.torn_reason is not None
    check_usable(root, store, kept)


def test_an_old_record_behind_zeros_is_not_recovered(root: Path) -> None:
    # A drive that wrote the last sectors and not those before them.
    kept = make_store(root, killed=True)
    overwrite(root, kept[-3].log_offset, bytes(kept[-3].size))
    store = reopen(root)
    assert store.end == kept[-3].log_offset
    check_usable(root, store, kept[:-3], missing=kept[-3:])


def test_an_empty_segment_is_accepted(root: Path) -> None:
    kept = make_store(root, killed=True)
    base = (end_of(kept) // TINY.segment_bytes + 1) * TINY.segment_bytes
    (root / f"commitlog/{base:020d}").write_bytes(b"")
    store = reopen(root)
    assert store.end == end_of(kept)
    check_usable(root, store, kept)
