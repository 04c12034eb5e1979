"""Checks of stores with damaged queues, a damaged key index or damaged small files.

Most tests create a small store on disk, change a few bytes in it and check it.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from escrowmq.store.check import Severity, check_store
from escrowmq.store.check_indexes import DEFAULT_LAYOUT, IndexLayout
from escrowmq.store.check_log import FINDINGS_PER_FILE_MAX
from escrowmq.store.disk import RealDisk
from escrowmq.store.index_checksums import CHECKSUM_DIRECTORY
from escrowmq.store.key_index import DAMAGED_PATH, HEADER
from tests.support.store_damage import (
    RECORDS,
    damage,
    edit_file,
    flip,
    index_files,
    log_records,
    notes,
    only_damage,
    relative_name,
)
from tests.support.stores import NOW_MS, TINY, examine, fill, locate, open_store, sample

# --- queues ----------------------------------------------------------------------------------


@pytest.fixture
def queue_file(clean: Path) -> Path:
    """Return the second file of a queue, which has entries 5 to 9."""
    return clean / f"consumequeue/T1/1/{TINY.queue_file_bytes:020d}"


@pytest.mark.parametrize(
    ("field_position", "field_name"),
    [(7, "log offset"), (11, "size"), (19, "tags code")],
    ids=lambda v: str(v),
)
def test_a_bit_flip_in_a_queue_entry_is_found(
    field_position: int, field_name: str, clean: Path, queue_file: Path
) -> None:
    edit_file(queue_file, 40 + field_position, flip)
    finding = only_damage(clean)
    assert (finding.where, finding.position) == (relative_name(clean, queue_file), 40)
    assert finding.what.startswith(f"entry 7: {field_name}")


def test_a_missing_queue_entry_is_found(clean: Path, queue_file: Path) -> None:
    edit_file(queue_file, 40, bytes(20))
    finding = only_damage(clean)
    assert (finding.where, finding.position) == (relative_name(clean, queue_file), 40)
    assert "entry 7 is missing" in finding.what


def test_missing_entries_at_the_end_of_a_queue_are_damage_after_a_clean_stop(clean: Path) -> None:
    last = sorted((clean / "consumequeue/T1/1").iterdir())[-1]
    edit_file(last, 0, bytes(TINY.queue_file_bytes))
    finding = only_damage(clean)
    assert (finding.where, finding.position) == (relative_name(clean, last), 0)


def test_a_missing_queue_file_is_found(clean: Path, queue_file: Path) -> None:
    queue_file.unlink()
    findings = damage(examine(clean))
    assert {finding.where for finding in findings} == {relative_name(clean, queue_file)}
    assert findings[0].what == "is missing between two others"


def test_a_short_queue_file_is_found(clean: Path, queue_file: Path) -> None:
    with queue_file.open("r+b") as file:
        file.truncate(60)
    findings = damage(examine(clean))
    assert (findings[0].where, findings[0].what) == (
        relative_name(clean, queue_file),
        "has 60 bytes, not 100",
    )
    assert findings[1].position == 60


def test_a_queue_entry_for_an_offset_after_the_end_of_the_log_is_found(tmp_path: Path) -> None:
    store = open_store(RealDisk(tmp_path))
    fill(store, range(4))
    store.close()
    path = tmp_path / f"consumequeue/T0/0/{0:020d}"
    edit_file(path, 40, struct.pack(">qiq", 3000, 100, 0))
    finding = only_damage(tmp_path)
    assert (finding.where, finding.position) == (relative_name(tmp_path, path), 40)
    assert "behind the end of the log" in finding.what


def test_garbage_after_the_end_of_a_queue_is_found(tmp_path: Path) -> None:
    store = open_store(RealDisk(tmp_path))
    fill(store, range(4))
    store.close()
    path = tmp_path / f"consumequeue/T0/0/{0:020d}"
    edit_file(path, 85, b"x")
    finding = only_damage(tmp_path)
    assert (finding.where, finding.position) == (relative_name(tmp_path, path), 85)


def test_the_blank_entry_of_a_damaged_record_is_not_a_finding(clean: Path) -> None:
    path, position = locate(clean, log_records(clean)[5].log_offset)
    edit_file(path, position + 88, flip)
    (clean / "escrowmq.checkpoint").unlink()
    store = open_store(RealDisk(clean))  # reads the whole log and skips the damage
    assert len(store.recovery.damage) == 1
    store.close()
    finding = only_damage(clean)
    assert (finding.where, finding.position) == (relative_name(clean, path), position)


def test_many_findings_in_one_file_are_summarized(tmp_path: Path) -> None:
    settings = replace(TINY, queue_file_bytes=2000, segment_bytes=1 << 16)
    store = open_store(RealDisk(tmp_path), settings)
    store.append([sample(0, queue_id=0) for _ in range(60)], now_ms=NOW_MS)
    store.close()
    path = tmp_path / f"consumequeue/T0/0/{0:020d}"
    for number in range(60):
        edit_file(path, number * 20 + 19, flip)
    findings = damage(examine(tmp_path, settings))
    assert len(findings) == FINDINGS_PER_FILE_MAX + 1
    assert findings[-1].what == f"and {60 - FINDINGS_PER_FILE_MAX} more of this kind"


# --- index -----------------------------------------------------------------------------------

ENTRIES_AT = 40 + TINY.index_slots * 4


def test_a_wrong_index_slot_is_found(clean: Path) -> None:
    path = index_files(clean)[1]
    slots = struct.unpack_from(f">{TINY.index_slots}i", path.read_bytes(), 40)
    slot = next(number for number, entry in enumerate(slots) if entry)
    edit_file(path, 40 + 4 * slot, struct.pack(">i", 999))
    finding = only_damage(clean)
    assert (finding.where, finding.position) == (relative_name(clean, path), 40 + 4 * slot)
    assert f"slot {slot}: names entry 999" in finding.what


def test_a_broken_index_chain_is_found(clean: Path) -> None:
    path = index_files(clean)[1]
    edit_file(
        path, ENTRIES_AT + 15 * 20 + 16, struct.pack(">i", 17)
    )  # a link to a later entry makes a loop
    finding = only_damage(clean)
    assert (finding.where, finding.position) == (relative_name(clean, path), ENTRIES_AT + 15 * 20)
    assert "follows entry 17" in finding.what


def test_an_index_entry_with_an_invalid_log_offset_is_found(clean: Path) -> None:
    path = index_files(clean)[1]
    position = ENTRIES_AT + 5 * 20
    edit_file(path, position + 11, flip)  # the log offset
    findings = damage(examine(clean))
    assert (relative_name(clean, path), position) in [
        (finding.where, finding.position) for finding in findings
    ]
    assert {finding.where for finding in findings} == {relative_name(clean, path)}


def test_an_index_entry_with_a_wrong_hash_is_found(clean: Path) -> None:
    path = index_files(clean)[1]
    position = ENTRIES_AT + 5 * 20
    edit_file(path, position, flip)
    findings = damage(examine(clean))
    assert (relative_name(clean, path), position) in [
        (finding.where, finding.position) for finding in findings
    ]
    assert any("lacks 1 of the keys" in finding.what for finding in findings)


def test_a_broken_index_header_is_found(clean: Path) -> None:
    path = index_files(clean)[0]
    edit_file(path, 36, struct.pack(">i", 1_000_000))
    finding = only_damage(clean)
    assert (finding.where, finding.position) == (relative_name(clean, path), 36)


def test_a_flipped_bit_in_the_checksums_of_an_index_file_is_found(clean: Path) -> None:
    checksums = sorted((clean / CHECKSUM_DIRECTORY).iterdir())[0]
    edit_file(checksums, 20, flip)
    finding = only_damage(clean)
    assert finding.where == relative_name(clean, checksums)
    assert "wrong checksum" in finding.what


@pytest.mark.parametrize(
    ("position", "what"),
    [
        (7, "the header is not the one that was written"),  # the time of the first key
        (15, "the header is not the one that was written"),  # the time of the last key
        (HEADER.size + TINY.index_slots * 4 + 20 + 15, "wrong checksum"),  # the time of a key
    ],
    ids=["first time", "last time", "time of an entry"],
)
def test_what_the_log_does_not_say_about_an_index_file_is_compared_with_its_checksums(
    position: int, what: str, clean: Path
) -> None:
    file = index_files(clean)[0]
    edit_file(file, position, flip)
    finding = only_damage(clean)
    assert finding.where == relative_name(clean, file)
    assert what in finding.what


def test_checksums_without_an_index_file_are_a_note(clean: Path) -> None:
    checksums = sorted((clean / CHECKSUM_DIRECTORY).iterdir())[0]
    checksums.with_name("20261118000000000").write_bytes(checksums.read_bytes())
    report = examine(clean)
    assert report.is_clean
    assert "there is no index file" in notes(report)[0].what


def test_damage_that_the_broker_has_found_in_the_index_is_reported(clean: Path) -> None:
    (clean / DAMAGED_PATH).write_bytes(b"")
    assert "the next start rebuilds the index" in only_damage(clean).what


def test_a_missing_index_file_is_a_note(clean: Path) -> None:
    file = index_files(clean)[1]
    file.unlink()
    report = examine(clean)
    assert damage(report) == []
    checksums = f"{CHECKSUM_DIRECTORY}/{file.name}"
    assert [note.where for note in notes(report)] == [checksums, "index"]


def test_the_layout_of_an_index_is_detected_without_configuration(clean: Path) -> None:
    assert check_store(RealDisk(clean)).keys == 3 * RECORDS
    path = index_files(clean)[1]
    edit_file(path, ENTRIES_AT + 5 * 20 + 16, struct.pack(">i", 17))
    findings = damage(check_store(RealDisk(clean)))
    assert (findings[0].where, findings[0].position) == (
        relative_name(clean, path),
        ENTRIES_AT + 5 * 20,
    )


def test_the_default_index_file_is_as_long_as_rocketmqs() -> None:
    assert DEFAULT_LAYOUT.size == 420_000_040
    assert IndexLayout(5_000_000, 20_000_000) == DEFAULT_LAYOUT


# --- the small files -------------------------------------------------------------------------


def test_a_broken_checkpoint_is_found(clean: Path) -> None:
    edit_file(clean / "escrowmq.checkpoint", 20, flip)
    assert (only_damage(clean).where, only_damage(clean).position) == ("escrowmq.checkpoint", None)


def test_a_stale_checkpoint_is_a_note(clean: Path) -> None:
    saved = (clean / "escrowmq.checkpoint").read_bytes()
    store = open_store(RealDisk(clean))
    fill(store, range(RECORDS, RECORDS + 5))
    store.close()
    (clean / "escrowmq.checkpoint").write_bytes(saved)
    report = examine(clean)
    assert damage(report) == []
    assert [note.where for note in notes(report)] == ["escrowmq.checkpoint"]


def test_a_log_that_is_shorter_than_its_checkpoint_is_damage(clean: Path) -> None:
    record = log_records(clean)[-1]
    path, position = locate(clean, record.log_offset)
    edit_file(path, position, bytes(record.size))
    findings = damage(examine(clean))
    assert (findings[0].where, findings[0].position) == (relative_name(clean, path), position)
    assert "is not that of a record" in findings[0].what


def test_a_short_rocketmq_checkpoint_is_a_note(clean: Path) -> None:
    (clean / "checkpoint").write_bytes(b"\0" * 10)
    assert [(f.severity, f.where) for f in examine(clean).findings] == [
        (Severity.NOTE, "checkpoint")
    ]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xff", b'{"a":'])
def test_invalid_json_is_damage_unless_there_is_a_backup_file(content: bytes, clean: Path) -> None:
    config = clean / "config"
    config.mkdir()
    (config / "topics.json").write_bytes(content)
    (config / "consumerOffset.json").write_bytes(b'{"offsetTable":{"T@G":{0:12,1:3}}}')
    assert (only_damage(clean).where, only_damage(clean).position) == ("config/topics.json", None)
    (config / "topics.json.bak").write_bytes(b"{}")
    report = examine(clean)
    assert report.is_clean
    assert [note.where for note in notes(report)] == ["config/topics.json"]
