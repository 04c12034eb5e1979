"""Checks of stores with a damaged log: each finding has a position and a severity.

Most tests create a small store on disk, change a few bytes in it and check it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from escrowmq.errors import StoreError
from escrowmq.store.check import check_store
from escrowmq.store.disk import RealDisk
from escrowmq.store.flush_marks import MARKS_PATH
from escrowmq.testing.disks import FaultyDisk, MemoryDisk
from tests.interop.fixtures import SHUTDOWNS, VERSIONS, Shutdown, unpack_store
from tests.support.store_damage import (
    RECORDS,
    damage,
    edit_file,
    flip,
    index_files,
    log_end,
    log_records,
    make_store,
    notes,
    only_damage,
    relative_name,
)
from tests.support.stores import (
    NOW_MS,
    TINY,
    assert_clean,
    examine,
    fill,
    locate,
    open_store,
    properties,
    sample,
)

TORN_RECORD = b"\xda\xa3\x20\xa7 half a record"


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """Return a store that was killed; half of its records follow the last checkpoint."""
    return make_store(tmp_path / "store", killed=True)


# --- intact stores ---------------------------------------------------------------------------


def test_a_clean_store_has_no_findings(clean: Path) -> None:
    report = examine(clean)
    assert report.findings == []
    assert report.is_clean
    assert report.records == report.queue_entries == RECORDS
    assert report.keys == 3 * RECORDS
    assert (report.queues, report.log_end) == (2, log_end(clean))
    assert report.log_files > 2
    assert report.index_files > 2


def test_an_empty_store_is_clean(tmp_path: Path) -> None:
    open_store(RealDisk(tmp_path)).close()
    assert examine(tmp_path).findings == []


def test_a_store_in_memory_can_be_checked_too() -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    fill(store, range(10))
    store.close()
    assert assert_clean(disk).records == 10


def test_a_store_without_its_oldest_segment_is_clean(clean: Path) -> None:
    store = open_store(RealDisk(clean))
    store.remove_oldest_file()
    store.close()
    report = examine(clean)
    assert report.findings == []
    assert report.log_begin == TINY.segment_bytes


def test_prepared_and_rolled_back_records_need_no_queue_entry(tmp_path: Path) -> None:
    store = open_store(RealDisk(tmp_path))
    records = [
        sample(number, sys_flag=transaction_type)
        for number, transaction_type in enumerate((0, 4, 8, 12))
    ]
    store.append(records, now_ms=NOW_MS)
    store.close()
    report = examine(tmp_path)
    assert report.findings == []
    assert (report.records, report.queue_entries, report.keys) == (4, 2, 9)


def test_a_check_changes_nothing(killed: Path) -> None:
    def state() -> dict[str, tuple[bytes, int]]:
        files = [path for path in killed.rglob("*") if path.is_file()]
        # A check locks the store as a broker does, which changes the lock file's mtime.
        return {
            str(path): (path.read_bytes(), 0 if path.name == "lock" else path.stat().st_mtime_ns)
            for path in files
        }

    before = state()
    examine(killed)
    assert state() == before


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("ending", SHUTDOWNS)
def test_a_store_of_apache_rocketmq_is_clean(
    version: str, ending: Shutdown, tmp_path: Path
) -> None:
    report = check_store(RealDisk(unpack_store(version, ending, tmp_path)))
    assert damage(report) == []
    assert [note.where for note in notes(report)] == ([] if ending == "clean" else ["abort"])
    assert report.records == report.queue_entries > 60
    assert report.keys > 100


# --- after a crash ---------------------------------------------------------------------------


def test_queue_entries_that_recovery_restores_are_a_note(killed: Path) -> None:
    report = examine(killed)
    assert report.is_clean
    assert not report.stopped_cleanly
    assert {note.where.split("/")[0] for note in notes(report)} == {"abort", "consumequeue"}


def test_a_torn_end_after_a_crash_is_a_note_and_recovery_truncates_it(killed: Path) -> None:
    end = log_end(killed)
    path, position = locate(killed, end)
    edit_file(path, position, TORN_RECORD)
    report = examine(killed)
    assert damage(report) == []
    assert (relative_name(killed, path), position) in [
        (note.where, note.position) for note in notes(report)
    ]
    store = open_store(RealDisk(killed))
    assert store.recovery.end == end
    store.close()
    assert examine(killed).findings == []


def test_an_invalid_record_that_was_flushed_is_damage(killed: Path) -> None:
    record = log_records(killed)[-3]
    path, position = locate(killed, record.log_offset)
    edit_file(path, position + 90, flip)
    finding = only_damage(killed)
    assert (finding.where, finding.position) == (relative_name(killed, path), position)


def test_a_flipped_bit_in_the_flush_marks_is_found(killed: Path) -> None:
    edit_file(killed / MARKS_PATH, 512, flip)
    finding = only_damage(killed)
    assert (finding.where, finding.position) == (MARKS_PATH, 512)


def test_a_flush_mark_that_a_power_cut_has_torn_is_a_note() -> None:
    disk = FaultyDisk()
    store = open_store(disk)
    fill(store, range(5))
    store.flush()
    after_cut = disk.power_cut(Random(0), "all")
    after_cut.open(MARKS_PATH).write_at(512 + 16, b"torn")
    report = examine(after_cut)
    assert report.is_clean
    assert MARKS_PATH in [note.where for note in notes(report)]


def test_an_invalid_record_that_no_mark_covers_is_a_torn_end(killed: Path) -> None:
    (killed / MARKS_PATH).unlink()  # as after a power cut
    record = log_records(killed)[-3]
    path, position = locate(killed, record.log_offset)
    edit_file(path, position + 90, flip)
    report = examine(killed)
    assert damage(report) == []
    assert report.records == RECORDS - 3
    store = open_store(RealDisk(killed))
    assert store.recovery.end == record.log_offset
    store.close()
    assert examine(killed).findings == []


def test_an_invalid_record_below_the_checkpoint_is_damage_even_after_a_crash(killed: Path) -> None:
    path, position = locate(killed, log_records(killed)[2].log_offset)
    edit_file(path, position + 90, flip)
    findings = damage(examine(killed))
    assert [(finding.where, finding.position) for finding in findings] == [
        (relative_name(killed, path), position)
    ]


def test_a_torn_queue_entry_above_the_checkpoint_is_a_note(killed: Path) -> None:
    record = log_records(killed)[RECORDS // 2 + 3]
    directory = killed / f"consumequeue/{record.topic}/{record.queue_id}"
    base, position = divmod(record.queue_offset * 20, TINY.queue_file_bytes)
    path = directory / f"{base * TINY.queue_file_bytes:020d}"
    if not path.exists():
        path.write_bytes(bytes(TINY.queue_file_bytes))
    edit_file(path, position, struct.pack(">qiq", record.log_offset, record.size + 1, 0))
    report = examine(killed)
    assert damage(report) == []
    open_store(RealDisk(killed)).close()
    assert examine(killed).findings == []


def test_keys_that_were_being_written_at_a_crash_are_a_note(killed: Path) -> None:
    last = index_files(killed)[-1]
    edit_file(last, 36, b"\0\0\0\1")  # the header, which is written last
    report = examine(killed)
    assert damage(report) == []
    assert "escrowmq.redo" in [note.where for note in notes(report)]
    open_store(RealDisk(killed)).close()
    assert examine(killed).findings == []


# --- the log ---------------------------------------------------------------------------------


def test_a_bit_flip_in_a_body_is_found(clean: Path) -> None:
    record = log_records(clean)[5]
    path, position = locate(clean, record.log_offset)
    edit_file(path, position + 88, flip)
    finding = only_damage(clean)
    assert (finding.where, finding.position) == (relative_name(clean, path), position)
    assert "checksum" in finding.what
    assert f"goes on at {record.log_offset + record.size}" in finding.what


@pytest.mark.parametrize(
    "field_position", [0, 4, 28, 84], ids=["size", "magic", "log offset", "body size"]
)
def test_a_bit_flip_in_a_header_is_found(field_position: int, clean: Path) -> None:
    record = log_records(clean)[5]
    path, position = locate(clean, record.log_offset)
    edit_file(path, position + field_position, flip)
    finding = only_damage(clean)
    assert (finding.where, finding.position) == (relative_name(clean, path), position)


def test_a_bit_flip_in_a_queue_offset_is_found_by_comparing_it_with_the_queue(clean: Path) -> None:
    path, position = locate(clean, log_records(clean)[5].log_offset)
    edit_file(path, position + 20, flip)  # the highest byte: an impossible offset
    finding = only_damage(clean)
    assert (finding.where, finding.position) == (relative_name(clean, path), position)
    assert "queue offset" in finding.what


def test_a_bit_flip_anywhere_in_a_record_with_crc_is_found(tmp_path: Path) -> None:
    store = open_store(RealDisk(tmp_path), replace(TINY, sealed=True))
    fill(store, range(5))
    store.close()
    record = log_records(tmp_path)[2]
    path, position = locate(tmp_path, record.log_offset)
    edit_file(path, position + 19, flip)  # the user's flag, which only the record CRC covers
    finding = only_damage(tmp_path)
    assert (finding.where, finding.position) == (relative_name(tmp_path, path), position)
    assert "record CRC" in finding.what


def test_a_missing_segment_is_found_and_the_others_are_checked(clean: Path) -> None:
    missing = clean / f"commitlog/{TINY.segment_bytes:020d}"
    missing.unlink()
    report = examine(clean)
    findings = damage(report)
    assert [(finding.where, finding.position) for finding in findings] == [
        (relative_name(clean, missing), None)
    ]
    assert 0 < report.records < RECORDS


def test_a_missing_last_log_file_is_found(clean: Path) -> None:
    last = sorted((clean / "commitlog").iterdir())[-1]
    last.unlink()
    assert any("was durable up to" in finding.what for finding in damage(examine(clean)))


def test_a_short_log_file_is_found(clean: Path) -> None:
    path = clean / f"commitlog/{TINY.segment_bytes:020d}"
    with path.open("r+b") as file:
        file.truncate(3000)
    findings = damage(examine(clean))
    assert (findings[0].where, findings[0].position) == (relative_name(clean, path), None)
    assert findings[0].what == "has 3000 bytes, not 4096"
    assert {finding.where for finding in findings} == {relative_name(clean, path)}


def test_a_short_last_log_file_after_a_crash_is_a_note(killed: Path) -> None:
    last = sorted((killed / "commitlog").iterdir())[-1]
    with last.open("r+b") as file:
        file.truncate(log_end(killed) % TINY.segment_bytes)
    report = examine(killed)
    assert damage(report) == []
    assert relative_name(killed, last) in [note.where for note in notes(report)]


def test_empty_log_files_above_the_checkpoint_are_a_note_after_a_crash(killed: Path) -> None:
    (killed / MARKS_PATH).unlink()  # nothing says that they were flushed
    for path in sorted((killed / "commitlog").iterdir())[-2:]:
        path.write_bytes(b"")
    report = examine(killed)
    assert damage(report) == []
    assert report.records < RECORDS
    open_store(RealDisk(killed)).close()
    assert examine(killed).findings == []


def test_garbage_after_the_end_of_the_log_is_damage_after_a_clean_stop(clean: Path) -> None:
    path, position = locate(clean, log_end(clean) + 200)
    edit_file(path, position, TORN_RECORD)
    finding = only_damage(clean)
    assert (finding.where, finding.position) == (relative_name(clean, path), position)


def test_a_torn_record_at_the_end_of_the_log_is_damage_after_a_clean_stop(clean: Path) -> None:
    path, position = locate(clean, log_end(clean))
    edit_file(path, position, TORN_RECORD)
    finding = only_damage(clean)
    assert (finding.where, finding.position) == (relative_name(clean, path), position)


def test_a_segment_with_an_impossible_name_is_found(clean: Path) -> None:
    stray = clean / f"commitlog/{12_345:020d}"
    stray.write_bytes(bytes(TINY.segment_bytes))
    assert (only_damage(clean).where, only_damage(clean).position) == (
        relative_name(clean, stray),
        None,
    )


def test_a_clock_that_was_set_back_is_a_note(clean: Path) -> None:
    path, position = locate(clean, log_records(clean)[5].log_offset)
    edit_file(path, position + 56, struct.pack(">q", NOW_MS - 1))
    findings = notes(examine(clean))
    assert [(finding.where, finding.position) for finding in findings] == [
        (relative_name(clean, path), position)
    ]


# --- stores that cannot be checked ----------------------------------------------------------------


def test_a_broker_can_start_after_a_check(clean: Path) -> None:
    examine(clean)
    open_store(RealDisk(clean)).close()


def test_a_directory_that_is_not_a_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"mine")
    with pytest.raises(StoreError, match="not a store"):
        examine(tmp_path)
    assert (tmp_path / "lock").read_bytes() == b"mine"


@pytest.fixture(autouse=True)
def assert_lock_is_released(tmp_path: Path) -> Iterator[None]:
    """Fail a test that leaves its store locked."""
    yield
    if (tmp_path / "store/lock").exists():
        RealDisk(tmp_path / "store").lock("lock", b"lock").release()


def test_an_invalid_topic_name_is_damage(tmp_path: Path) -> None:
    store = open_store(RealDisk(tmp_path))
    store.append([sample(0, topic="abcd", properties=properties(TAGS="t"))], now_ms=NOW_MS)
    store.close()
    record = log_records(tmp_path)[0]
    path, position = locate(tmp_path, record.log_offset)
    edit_file(path, position + 88 + len(record.body) + 1, b"../x")
    findings = damage(examine(tmp_path))
    assert (findings[0].where, findings[0].position) == (relative_name(tmp_path, path), position)
    assert "../x" in findings[0].what
