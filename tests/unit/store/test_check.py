"""The check, against stores in which one thing was broken: it names that thing, and its place.

Each test makes a small real store, changes a few bytes in it, and looks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from escrowmq.errors import StoreError, StoreLocked
from escrowmq.message.record import StoredRecord
from escrowmq.store.check import Finding, Report, Severity, check_store
from escrowmq.store.check_index import DEFAULT, Geometry
from escrowmq.store.disk import RealDisk
from escrowmq.store.findings import PER_FILE_MAX
from escrowmq.store.logfiles import BadPlace, LogFiles
from escrowmq.testing.disks import MemoryDisk
from tests.interop.fixtures import ENDINGS, VERSIONS, Ending, unpack_store
from tests.stores import NOW_MS, TINY, assert_clean, examine, fill, open_store, properties, sample

RECORDS = 60
TORN = b"\xda\xa3\x20\xa7 half a record"


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    """Closed in order: several files of each kind."""
    return make(tmp_path / "store")


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """Given up without a close; the second half came after the last checkpoint."""
    return make(tmp_path / "store", killed=True)


def make(path: Path, *, killed: bool = False) -> Path:
    store = open_store(RealDisk(path))
    fill(store, range(RECORDS // 2))
    store.checkpoint()
    fill(store, range(RECORDS // 2, RECORDS))
    store.flush()
    store.abandon() if killed else store.close()
    return path


def records(store: Path) -> list[StoredRecord]:
    return [met for met in LogFiles(RealDisk(store)).walk() if not isinstance(met, BadPlace)]


def log_end(store: Path) -> int:
    last = records(store)[-1]
    return last.log_offset + last.size


def log_place(store: Path, log_offset: int) -> tuple[Path, int]:
    base = log_offset - log_offset % TINY.segment_bytes
    return store / f"commitlog/{base:020d}", log_offset - base


def change(path: Path, position: int, edit: Callable[[bytes], bytes] | bytes) -> None:
    """Write bytes at a place, or flip them."""
    with path.open("r+b") as file:
        file.seek(position)
        new = edit if isinstance(edit, bytes) else edit(file.read(1))
        file.seek(position)
        file.write(new)


def flip(old: bytes) -> bytes:
    return bytes([old[0] ^ 1])


def damage(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.severity is Severity.DAMAGE]


def notes(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.severity is Severity.NOTE]


def the_damage(store: Path) -> Finding:
    found = damage(examine(store))
    assert len(found) == 1, found
    return found[0]


def name(store: Path, path: Path) -> str:
    return str(path.relative_to(store))


def index_files(store: Path) -> list[Path]:
    return sorted((store / "index").iterdir())


# --- nothing wrong ---------------------------------------------------------------------------


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


def test_a_store_whose_oldest_file_went_is_clean(clean: Path) -> None:
    store = open_store(RealDisk(clean))
    store.remove_oldest_file()
    store.close()
    report = examine(clean)
    assert report.findings == []
    assert report.log_begin == TINY.segment_bytes


def test_prepared_and_rolled_back_records_need_no_queue_entry(tmp_path: Path) -> None:
    store = open_store(RealDisk(tmp_path))
    kinds = [sample(number, sys_flag=kind) for number, kind in enumerate((0, 4, 8, 12))]
    store.append(kinds, now_ms=NOW_MS)
    store.close()
    report = examine(tmp_path)
    assert report.findings == []
    assert (report.records, report.queue_entries, report.keys) == (4, 2, 9)


def test_a_check_changes_nothing(killed: Path) -> None:
    def state() -> dict[str, tuple[bytes, int]]:
        files = [path for path in killed.rglob("*") if path.is_file()]
        # The lock file is taken as a broker takes it, which touches it.
        return {
            str(path): (path.read_bytes(), 0 if path.name == "lock" else path.stat().st_mtime_ns)
            for path in files
        }

    before = state()
    examine(killed)
    assert state() == before


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_store_of_apache_rocketmq_is_clean(version: str, ending: Ending, tmp_path: Path) -> None:
    report = check_store(RealDisk(unpack_store(version, ending, tmp_path)))
    assert damage(report) == []
    assert [note.where for note in notes(report)] == ([] if ending == "clean" else ["abort"])
    assert report.records == report.queue_entries > 60
    assert report.keys > 100


# --- after a crash ---------------------------------------------------------------------------


def test_what_recovery_puts_back_is_a_note(killed: Path) -> None:
    report = examine(killed)
    assert report.is_clean
    assert not report.stopped_cleanly
    assert {note.where.split("/")[0] for note in notes(report)} == {"abort", "consumequeue"}


def test_a_torn_end_after_a_crash_is_a_note_and_recovery_cuts_there(killed: Path) -> None:
    end = log_end(killed)
    path, position = log_place(killed, end)
    change(path, position, TORN)
    report = examine(killed)
    assert damage(report) == []
    assert (name(killed, path), position) in [(n.where, n.position) for n in notes(report)]
    store = open_store(RealDisk(killed))
    assert store.recovery.end == end
    store.close()
    assert examine(killed).findings == []


def test_a_bad_record_behind_the_checkpoint_is_the_torn_end_of_a_crash(killed: Path) -> None:
    record = records(killed)[-3]
    path, position = log_place(killed, record.log_offset)
    change(path, position + 90, flip)
    report = examine(killed)
    assert damage(report) == []
    assert report.records == RECORDS - 3
    store = open_store(RealDisk(killed))
    assert store.recovery.end == record.log_offset
    store.close()
    assert examine(killed).findings == []


def test_a_bad_record_below_the_checkpoint_is_damage_also_after_a_crash(killed: Path) -> None:
    path, position = log_place(killed, records(killed)[2].log_offset)
    change(path, position + 90, flip)
    found = damage(examine(killed))
    assert [(f.where, f.position) for f in found] == [(name(killed, path), position)]


def test_an_entry_that_a_crash_tore_behind_the_checkpoint_is_a_note(killed: Path) -> None:
    record = records(killed)[RECORDS // 2 + 3]
    directory = killed / f"consumequeue/{record.topic}/{record.queue_id}"
    base, position = divmod(record.queue_offset * 20, TINY.queue_file_bytes)
    path = directory / f"{base * TINY.queue_file_bytes:020d}"
    if not path.exists():
        path.write_bytes(bytes(TINY.queue_file_bytes))
    change(path, position, struct.pack(">qiq", record.log_offset, record.size + 1, 0))
    report = examine(killed)
    assert damage(report) == []
    open_store(RealDisk(killed)).close()
    assert examine(killed).findings == []


def test_keys_that_were_being_written_at_a_crash_are_a_note(killed: Path) -> None:
    last = index_files(killed)[-1]
    change(last, 36, b"\0\0\0\1")  # the header, which is written last
    report = examine(killed)
    assert damage(report) == []
    assert "escrowmq.redo" in [note.where for note in notes(report)]
    open_store(RealDisk(killed)).close()
    assert examine(killed).findings == []


# --- the log ---------------------------------------------------------------------------------


def test_a_bit_flip_in_a_body_is_found(clean: Path) -> None:
    record = records(clean)[5]
    path, position = log_place(clean, record.log_offset)
    change(path, position + 88, flip)
    found = the_damage(clean)
    assert (found.where, found.position) == (name(clean, path), position)
    assert "checksum" in found.what
    assert f"goes on at {record.log_offset + record.size}" in found.what


@pytest.mark.parametrize("field", [0, 4, 28, 84], ids=["size", "magic", "log offset", "body size"])
def test_a_bit_flip_in_a_header_is_found(field: int, clean: Path) -> None:
    record = records(clean)[5]
    path, position = log_place(clean, record.log_offset)
    change(path, position + field, flip)
    found = the_damage(clean)
    assert (found.where, found.position) == (name(clean, path), position)


def test_a_bit_flip_in_a_queue_offset_is_found_by_the_queue(clean: Path) -> None:
    path, position = log_place(clean, records(clean)[5].log_offset)
    change(path, position + 20, flip)  # the highest byte: millions of years of messages
    found = the_damage(clean)
    assert (found.where, found.position) == (name(clean, path), position)
    assert "queue offset" in found.what


def test_a_bit_flip_anywhere_in_a_sealed_record_is_found(tmp_path: Path) -> None:
    store = open_store(RealDisk(tmp_path), replace(TINY, sealed=True))
    fill(store, range(5))
    store.close()
    record = records(tmp_path)[2]
    path, position = log_place(tmp_path, record.log_offset)
    change(path, position + 19, flip)  # the user's flag, which nothing else covers
    found = the_damage(tmp_path)
    assert (found.where, found.position) == (name(tmp_path, path), position)
    assert "seal" in found.what


def test_a_missing_log_file_is_found_and_the_rest_is_examined(clean: Path) -> None:
    missing = clean / f"commitlog/{TINY.segment_bytes:020d}"
    missing.unlink()
    report = examine(clean)
    found = damage(report)
    assert [(f.where, f.position) for f in found] == [(name(clean, missing), None)]
    assert 0 < report.records < RECORDS


def test_a_missing_last_log_file_is_found(clean: Path) -> None:
    last = sorted((clean / "commitlog").iterdir())[-1]
    last.unlink()
    assert any("was durable up to" in finding.what for finding in damage(examine(clean)))


def test_a_short_log_file_is_found(clean: Path) -> None:
    path = clean / f"commitlog/{TINY.segment_bytes:020d}"
    with path.open("r+b") as file:
        file.truncate(3000)
    found = damage(examine(clean))
    assert (found[0].where, found[0].position) == (name(clean, path), None)
    assert found[0].what == "has 3000 bytes, not 4096"
    assert {f.where for f in found} == {name(clean, path)}


def test_a_short_last_log_file_after_a_crash_is_a_note(killed: Path) -> None:
    last = sorted((killed / "commitlog").iterdir())[-1]
    with last.open("r+b") as file:
        file.truncate(log_end(killed) % TINY.segment_bytes)
    report = examine(killed)
    assert damage(report) == []
    assert name(killed, last) in [note.where for note in notes(report)]


def test_garbage_behind_the_end_after_a_clean_stop_is_damage(clean: Path) -> None:
    path, position = log_place(clean, log_end(clean) + 200)
    change(path, position, TORN)
    found = the_damage(clean)
    assert (found.where, found.position) == (name(clean, path), position)


def test_a_torn_record_at_the_end_after_a_clean_stop_is_damage(clean: Path) -> None:
    path, position = log_place(clean, log_end(clean))
    change(path, position, TORN)
    found = the_damage(clean)
    assert (found.where, found.position) == (name(clean, path), position)


def test_a_log_file_with_a_name_that_cannot_be_is_found(clean: Path) -> None:
    stray = clean / f"commitlog/{12_345:020d}"
    stray.write_bytes(bytes(TINY.segment_bytes))
    assert (the_damage(clean).where, the_damage(clean).position) == (name(clean, stray), None)


def test_a_clock_that_was_set_back_is_a_note(clean: Path) -> None:
    path, position = log_place(clean, records(clean)[5].log_offset)
    change(path, position + 56, struct.pack(">q", NOW_MS - 1))
    found = notes(examine(clean))
    assert [(f.where, f.position) for f in found] == [(name(clean, path), position)]


# --- queues ----------------------------------------------------------------------------------


@pytest.fixture
def queue_file(clean: Path) -> Path:
    """The second file of a queue: entries 5 to 9."""
    return clean / f"consumequeue/T1/1/{TINY.queue_file_bytes:020d}"


@pytest.mark.parametrize(
    ("field", "word"), [(7, "log offset"), (11, "size"), (19, "tags code")], ids=lambda v: str(v)
)
def test_a_bit_flip_in_a_queue_entry_is_found(
    field: int, word: str, clean: Path, queue_file: Path
) -> None:
    change(queue_file, 40 + field, flip)
    found = the_damage(clean)
    assert (found.where, found.position) == (name(clean, queue_file), 40)
    assert found.what.startswith(f"entry 7: {word}")


def test_a_missing_queue_entry_is_found(clean: Path, queue_file: Path) -> None:
    change(queue_file, 40, bytes(20))
    found = the_damage(clean)
    assert (found.where, found.position) == (name(clean, queue_file), 40)
    assert "entry 7 missing" in found.what


def test_entries_missing_at_the_end_after_a_clean_stop_are_damage(clean: Path) -> None:
    last = sorted((clean / "consumequeue/T1/1").iterdir())[-1]
    change(last, 0, bytes(TINY.queue_file_bytes))
    found = the_damage(clean)
    assert (found.where, found.position) == (name(clean, last), 0)


def test_a_missing_queue_file_is_found(clean: Path, queue_file: Path) -> None:
    queue_file.unlink()
    found = damage(examine(clean))
    assert {f.where for f in found} == {name(clean, queue_file)}
    assert found[0].what == "is missing between two others"


def test_a_short_queue_file_is_found(clean: Path, queue_file: Path) -> None:
    with queue_file.open("r+b") as file:
        file.truncate(60)
    found = damage(examine(clean))
    assert (found[0].where, found[0].what) == (
        name(clean, queue_file),
        "has 60 bytes, not 100",
    )
    assert found[1].position == 60


def test_an_entry_behind_the_end_of_the_log_is_found(tmp_path: Path) -> None:
    store = open_store(RealDisk(tmp_path))
    fill(store, range(4))
    store.close()
    path = tmp_path / f"consumequeue/T0/0/{0:020d}"
    change(path, 40, struct.pack(">qiq", 3000, 100, 0))
    found = the_damage(tmp_path)
    assert (found.where, found.position) == (name(tmp_path, path), 40)
    assert "behind the end of the log" in found.what


def test_garbage_behind_the_end_of_a_queue_is_found(tmp_path: Path) -> None:
    store = open_store(RealDisk(tmp_path))
    fill(store, range(4))
    store.close()
    path = tmp_path / f"consumequeue/T0/0/{0:020d}"
    change(path, 85, b"x")
    found = the_damage(tmp_path)
    assert (found.where, found.position) == (name(tmp_path, path), 85)


def test_blank_entries_hold_the_place_of_a_damaged_record(clean: Path) -> None:
    path, position = log_place(clean, records(clean)[5].log_offset)
    change(path, position + 88, flip)
    (clean / "escrowmq.checkpoint").unlink()
    store = open_store(RealDisk(clean))  # reads all of the log, and steps over it
    assert len(store.recovery.damaged) == 1
    store.close()
    found = the_damage(clean)
    assert (found.where, found.position) == (name(clean, path), position)


def test_of_very_many_findings_in_one_file_only_some_are_kept(tmp_path: Path) -> None:
    settings = replace(TINY, queue_file_bytes=2000, segment_bytes=1 << 16)
    store = open_store(RealDisk(tmp_path), settings)
    store.append([sample(0, queue_id=0) for _ in range(60)], now_ms=NOW_MS)
    store.close()
    path = tmp_path / f"consumequeue/T0/0/{0:020d}"
    for number in range(60):
        change(path, number * 20 + 19, flip)
    found = damage(examine(tmp_path, settings))
    assert len(found) == PER_FILE_MAX + 1
    assert found[-1].what == f"and {60 - PER_FILE_MAX} more of this kind"


# --- index -----------------------------------------------------------------------------------

ENTRIES_AT = 40 + TINY.index_slots * 4


def test_a_wrong_index_slot_is_found(clean: Path) -> None:
    path = index_files(clean)[1]
    slots = struct.unpack_from(f">{TINY.index_slots}i", path.read_bytes(), 40)
    slot = next(number for number, entry in enumerate(slots) if entry)
    change(path, 40 + 4 * slot, struct.pack(">i", 999))
    found = the_damage(clean)
    assert (found.where, found.position) == (name(clean, path), 40 + 4 * slot)
    assert f"slot {slot}: names entry 999" in found.what


def test_a_broken_chain_is_found(clean: Path) -> None:
    path = index_files(clean)[1]
    change(path, ENTRIES_AT + 15 * 20 + 16, struct.pack(">i", 17))  # forwards: a loop
    found = the_damage(clean)
    assert (found.where, found.position) == (name(clean, path), ENTRIES_AT + 15 * 20)
    assert "follows entry 17" in found.what


def test_an_index_entry_that_points_nowhere_is_found(clean: Path) -> None:
    path = index_files(clean)[1]
    position = ENTRIES_AT + 5 * 20
    change(path, position + 11, flip)  # the log offset
    found = damage(examine(clean))
    assert (name(clean, path), position) in [(f.where, f.position) for f in found]
    assert {f.where for f in found} == {name(clean, path)}


def test_a_hash_that_is_of_no_key_is_found(clean: Path) -> None:
    path = index_files(clean)[1]
    position = ENTRIES_AT + 5 * 20
    change(path, position, flip)
    found = damage(examine(clean))
    assert (name(clean, path), position) in [(f.where, f.position) for f in found]
    assert any("lacks 1 of the keys" in f.what for f in found)


def test_a_broken_index_header_is_found(clean: Path) -> None:
    path = index_files(clean)[0]
    change(path, 36, struct.pack(">i", 1_000_000))
    found = the_damage(clean)
    assert (found.where, found.position) == (name(clean, path), 36)


def test_a_missing_index_file_is_a_note(clean: Path) -> None:
    index_files(clean)[1].unlink()
    report = examine(clean)
    assert damage(report) == []
    assert [note.where for note in notes(report)] == ["index"]


def test_an_index_without_settings_is_examined_all_the_same(clean: Path) -> None:
    assert check_store(RealDisk(clean)).keys == 3 * RECORDS
    path = index_files(clean)[1]
    change(path, ENTRIES_AT + 5 * 20 + 16, struct.pack(">i", 17))
    found = damage(check_store(RealDisk(clean)))
    assert (found[0].where, found[0].position) == (name(clean, path), ENTRIES_AT + 5 * 20)


def test_the_default_index_file_is_as_long_as_rocketmqs() -> None:
    assert DEFAULT.size == 420_000_040
    assert Geometry(5_000_000, 20_000_000) == DEFAULT


# --- the small files -------------------------------------------------------------------------


def test_a_broken_checkpoint_is_found(clean: Path) -> None:
    change(clean / "escrowmq.checkpoint", 20, flip)
    assert (the_damage(clean).where, the_damage(clean).position) == ("escrowmq.checkpoint", None)


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
    record = records(clean)[-1]
    path, position = log_place(clean, record.log_offset)
    change(path, position, bytes(record.size))
    found = damage(examine(clean))
    assert (found[0].where, found[0].position) == (name(clean, path), position)
    assert "was durable up to" in found[0].what


def test_a_short_rocketmq_checkpoint_is_a_note(clean: Path) -> None:
    (clean / "checkpoint").write_bytes(b"\0" * 10)
    assert [(f.severity, f.where) for f in examine(clean).findings] == [
        (Severity.NOTE, "checkpoint")
    ]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xff", b'{"a":'])
def test_bad_json_is_found(content: bytes, clean: Path) -> None:
    config = clean / "config"
    config.mkdir()
    (config / "topics.json").write_bytes(content)
    (config / "consumerOffset.json").write_bytes(b'{"offsetTable":{"T@G":{0:12,1:3}}}')
    assert (the_damage(clean).where, the_damage(clean).position) == ("config/topics.json", None)
    (config / "topics.json.bak").write_bytes(b"{}")
    report = examine(clean)
    assert report.is_clean
    assert [note.where for note in notes(report)] == ["config/topics.json"]


# --- what cannot be looked at ----------------------------------------------------------------


def test_a_directory_that_a_broker_owns_cannot_be_checked(clean: Path) -> None:
    store = open_store(RealDisk(clean))
    with pytest.raises(StoreLocked):
        examine(clean)
    store.close()
    assert examine(clean).is_clean


def test_a_broker_can_start_after_a_check(clean: Path) -> None:
    examine(clean)
    open_store(RealDisk(clean)).close()


def test_a_directory_that_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"mine")
    with pytest.raises(StoreError, match="not a store"):
        examine(tmp_path)
    assert (tmp_path / "lock").read_bytes() == b"mine"


@pytest.fixture(autouse=True)
def no_directory_is_left_locked(tmp_path: Path) -> Iterator[None]:
    yield
    if (tmp_path / "store/lock").exists():
        RealDisk(tmp_path / "store").lock("lock", b"lock").release()


def test_a_topic_that_no_directory_can_have_is_damage(tmp_path: Path) -> None:
    store = open_store(RealDisk(tmp_path))
    store.append([sample(0, topic="abcd", properties=properties(TAGS="t"))], now_ms=NOW_MS)
    store.close()
    record = records(tmp_path)[0]
    path, position = log_place(tmp_path, record.log_offset)
    change(path, position + 88 + len(record.body) + 1, b"../x")
    found = damage(examine(tmp_path))
    assert (found[0].where, found[0].position) == (name(tmp_path, path), position)
    assert "../x" in found[0].what
