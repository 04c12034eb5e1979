"""Check consume queues and key index against the log.

Queues: each record has its entry, and each entry its record. The log is read once, in order, and
each queue along with it. An entry that is passed over, because a record has a later entry of the
same queue, belongs to no record. So only one number per queue has to be remembered.

Key index: chains and slots are intact, each key has an entry, and each entry a record. Keys are
indexed in the order of the log, so the entries of all files are read along with the log as well. A
chain is intact if each entry names the entry that was the newest of its slot before, and the slot
names the last one. This finds every entry that a look-up would not reach. Checksums find the rest.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from escrowmq.config import StoreConfig
from escrowmq.message.keys import has_keys
from escrowmq.message.names import LIGHT_QUEUE_PREFIX, SCHEDULE_TOPIC, TAGS
from escrowmq.message.properties import find_property
from escrowmq.message.record import INNER_BATCH, NEED_UNWRAP, StoredRecord, crc32
from escrowmq.store.check_log import Findings, LogCheck, Severity, ShutdownState
from escrowmq.store.columns import key_hash
from escrowmq.store.commit_log import file_name, is_file_name
from escrowmq.store.consume_queue import (
    BLANK_SIZE,
    ENTRY,
    QUEUE_DIRECTORY,
    QUEUE_ENTRY_BYTES,
    queue_directories,
)
from escrowmq.store.disk import BufferedFiles, Disk
from escrowmq.store.index_checksums import (
    CHECKSUM_DIRECTORY,
    ENTRIES_PER_CRC,
    SLOTS_PER_SUM,
    IndexChecksums,
    sum_slots,
)
from escrowmq.store.key_index import (
    DAMAGED_PATH,
    HEADER,
    INDEX_DIRECTORY,
    INDEX_ENTRY,
    SLOT,
    IndexFile,
)
from escrowmq.store.log_files import file_size, first_nonzero, most_common_size

_FULL_SCAN_BYTES: Final = 64 << 10
_FIELDS: Final = ("log offset", "size", "tags code")

# --- queues --------------------------------------------------------------------------------------

QueueIndexEntry = tuple[int, int, int]  # log offset, size, tags code


class QueueFiles:
    """The files of one queue, and how far they have been checked."""

    def __init__(
        self, directory: str, files: BufferedFiles, file_sizes: dict[int, int], file_bytes: int
    ) -> None:
        self.directory = directory
        self._files = files
        self._file_sizes = file_sizes
        self._file_bytes = file_bytes
        self.next_offset = min(file_sizes, default=0) // QUEUE_ENTRY_BYTES
        self.end_offset = (max(file_sizes, default=0) + file_bytes) // QUEUE_ENTRY_BYTES
        self.has_records = False
        self.missing: MissingEntries | None = None

    def locate(self, queue_offset: int) -> tuple[str, int]:
        """Return the path of the file with an entry, and the position of the entry in it."""
        position = queue_offset * QUEUE_ENTRY_BYTES
        file_position = position % self._file_bytes if self._file_bytes else position
        return f"{self.directory}/{file_name(position - file_position)}", file_position

    def entry(self, queue_offset: int) -> QueueIndexEntry | None:
        """Return an entry; None if it was never written."""
        path, position = self.locate(queue_offset)
        if queue_offset * QUEUE_ENTRY_BYTES - position not in self._file_sizes:
            return None
        entry = self._files.read(path, position, QUEUE_ENTRY_BYTES)
        if len(entry) < QUEUE_ENTRY_BYTES:
            return None
        log_offset, size, tags_code = ENTRY.unpack(entry)
        return (log_offset, size, tags_code) if log_offset or size or tags_code else None

    def points_at(self, queue_offset: int, log_offset: int) -> bool:
        entry = self.entry(queue_offset)
        return entry is not None and entry[0] == log_offset and entry[1] != BLANK_SIZE

    def find_trailing_data(self, queue_offset: int) -> tuple[str, int] | None:
        """Return path and position of the first byte from an entry on that is not zero, or None."""
        position = queue_offset * QUEUE_ENTRY_BYTES
        for base in sorted(self._file_sizes):
            if base + self._file_bytes <= position:
                continue
            path = f"{self.directory}/{file_name(base)}"
            begin = max(0, position - base)
            nonzero = first_nonzero(self._files, path, begin, self._file_bytes, _FULL_SCAN_BYTES)
            if nonzero is not None:
                return path, nonzero
        return None


@dataclass(slots=True)
class MissingEntries:
    """Consecutive records without entries."""

    first_offset: int  # queue offset
    log_offset: int
    count: int = 1


class QueueCheck:
    """Compares the consume queues with the log, record by record."""

    def __init__(
        self, disk: Disk, log: LogCheck, shutdown: ShutdownState, findings: Findings
    ) -> None:
        self._log = log
        self._shutdown = shutdown
        self._findings = findings
        self._open_files = BufferedFiles(disk)
        self._queues: dict[tuple[str, int], QueueFiles] = {}
        self._file_bytes = 0
        self._open(disk)
        self.entries = 0

    def __len__(self) -> int:
        return len(self._queues)

    def close(self) -> None:
        self._open_files.close()

    def totals(self) -> tuple[int, int]:
        """Return how many queues ever had a message, and the sum of their next offsets."""
        offsets = [queue.next_offset for queue in self._queues.values() if queue.next_offset]
        return len(offsets), sum(offsets)

    # --- records -------------------------------------------------------------------------------

    def check_record(self, record: StoredRecord, tags_code: int) -> None:
        """Check the entry of the next record of the log."""
        if record.sys_flag & (INNER_BATCH | NEED_UNWRAP):
            return  # a batch in one record: RocketMQ has its queue entries in other files
        queue = self._queue(record.topic, record.queue_id)
        queue_offset: int = record.queue_offset
        if queue_offset != queue.next_offset and queue.points_at(
            queue.next_offset, record.log_offset
        ):
            # The queue has the record at the expected offset, so the record itself is damaged.
            self._findings.add_damage(
                *self._log.locate(record.log_offset),
                f"the record has queue offset {queue_offset}; its queue has it at "
                f"{queue.next_offset}",
            )
            queue_offset = queue.next_offset
        if queue_offset < queue.next_offset and queue.has_records:
            description = f"the record at log offset {record.log_offset} has this queue offset too"
            self._report_wrong(queue, queue_offset, record.log_offset, description)
            return
        for skipped in range(queue.next_offset, min(queue_offset, queue.end_offset)):
            self._report_unclaimed(queue, skipped)
        queue.has_records = True
        self._compare(queue, queue_offset, record, tags_code)
        queue.next_offset = queue_offset + 1

    def finish(self) -> None:
        """Check what follows in the queues after the last record of the log."""
        for queue in self._queues.values():
            if queue.missing is not None:
                self._report_missing(queue, at_log_end=True)
            if self._shutdown.is_in_use:
                continue  # what follows belongs to records behind the checkpoint
            while queue.entry(queue.next_offset) is not None:
                self._report_unclaimed(queue, queue.next_offset)
                queue.next_offset += 1
            trailing_data = queue.find_trailing_data(queue.next_offset)
            if trailing_data is not None:
                severity = Severity.DAMAGE if self._shutdown.was_clean else Severity.NOTE
                self._findings.add(
                    severity,
                    *trailing_data,
                    f"the queue ends at {queue.next_offset}, but not all following bytes are zero",
                )

    def _compare(
        self, queue: QueueFiles, queue_offset: int, record: StoredRecord, tags_code: int
    ) -> None:
        expected = (record.log_offset, record.size, tags_code)
        actual = queue.entry(queue_offset)
        if actual is None:
            if queue.missing is None:
                queue.missing = MissingEntries(queue_offset, record.log_offset)
            else:
                queue.missing.count += 1
            return
        if queue.missing is not None:
            self._report_missing(queue, at_log_end=False)
        self.entries += 1
        if actual == expected:
            return
        differing = [i for i in range(3) if actual[i] != expected[i]]
        description = ", ".join(f"{_FIELDS[i]} {actual[i]}, not {expected[i]}" for i in differing)
        if record.topic == SCHEDULE_TOPIC and differing == [2]:
            # The tags code of a delayed message is its delivery time, which this setting decides.
            description += ", or messageDelayLevel was not the default"
            self._findings.add_note(
                *queue.locate(queue_offset), f"entry {queue_offset}: {description}"
            )
            return
        self._report_wrong(queue, queue_offset, record.log_offset, description)

    def _report_unclaimed(self, queue: QueueFiles, queue_offset: int) -> None:
        """Report an entry without a record, unless that is to be expected."""
        entry = queue.entry(queue_offset)
        if entry is None:
            if not self._log.has_damage:
                self._report_wrong(
                    queue, queue_offset, self._log.end, "is empty, but entries follow"
                )
            return
        log_offset, size, _ = entry
        if size == BLANK_SIZE or self._log.is_damaged(log_offset):
            return
        if log_offset < self._log.begin:
            if queue.has_records:
                description = (
                    f"points to {log_offset}, which has expired; records before it have not"
                )
                self._report_wrong(queue, queue_offset, log_offset, description)
            return
        if log_offset + size > self._log.end:
            severity = Severity.DAMAGE if self._shutdown.was_clean else Severity.NOTE
            description = f"entry {queue_offset}: points to {log_offset}, behind the end of the log"
            self._findings.add(severity, *queue.locate(queue_offset), description)
            return
        description = f"points to {log_offset}, but no record of this queue is there"
        self._report_wrong(queue, queue_offset, log_offset, description)

    def _report_wrong(
        self, queue: QueueFiles, queue_offset: int, log_offset: int, description: str
    ) -> None:
        will_be_rebuilt = self._shutdown.will_be_rebuilt(log_offset)
        severity = Severity.NOTE if will_be_rebuilt else Severity.DAMAGE
        self._findings.add(
            severity, *queue.locate(queue_offset), f"entry {queue_offset}: {description}"
        )

    def _report_missing(self, queue: QueueFiles, *, at_log_end: bool) -> None:
        assert queue.missing is not None
        first, log_offset, count = (
            queue.missing.first_offset,
            queue.missing.log_offset,
            queue.missing.count,
        )
        queue.missing = None
        entries = (
            f"entries {first} to {first + count - 1} are missing"
            if count > 1
            else f"entry {first} is missing"
        )
        # Without a checkpoint of ours, a crash explains missing entries only at the end of the log.
        is_crash = not self._shutdown.was_clean and self._shutdown.checkpoint is None
        if self._shutdown.will_be_rebuilt(log_offset) or (at_log_end and is_crash):
            self._findings.add_note(*queue.locate(first), f"{entries}: the next start restores it")
        else:
            self._findings.add_damage(
                *queue.locate(first), f"{entries}, but the log has the records"
            )

    def names(self) -> list[tuple[str, int]]:
        """Return topic and queue id of each queue that has files or records."""
        return list(self._queues)

    # --- files ---------------------------------------------------------------------------------

    def _open(self, disk: Disk) -> None:
        queues = queue_directories(disk)
        directories = {
            (topic, queue_id): f"{QUEUE_DIRECTORY}/{topic}/{queue_id}"
            for topic, queue_id in queues
            if not topic.startswith(LIGHT_QUEUE_PREFIX)
        }
        if len(directories) < len(queues):
            skipped = len(queues) - len(directories)
            self._findings.add_note(
                QUEUE_DIRECTORY, None, f"{skipped} light queues were not checked"
            )
        sizes = {
            key: {
                int(name): file_size(disk, f"{directory}/{name}")
                for name in disk.names(directory)
                if is_file_name(name)
            }
            for key, directory in directories.items()
        }
        self._file_bytes = most_common_size(
            size for files in sizes.values() for size in files.values()
        )
        for key, files in sizes.items():
            self._check_files(directories[key], files)
            self._queues[key] = QueueFiles(
                directories[key], self._open_files, files, self._file_bytes
            )

    def _check_files(self, directory: str, sizes: dict[int, int]) -> None:
        expected = self._file_bytes
        for base, size in sizes.items():
            path = f"{directory}/{file_name(base)}"
            if expected and base % expected:
                description = f"its name is not a multiple of {expected}, the size of queue files"
                self._findings.add_damage(path, None, description)
            elif size != expected:
                is_unfinished = size < expected and not self._shutdown.was_clean
                severity = Severity.NOTE if is_unfinished else Severity.DAMAGE
                self._findings.add(severity, path, None, f"has {size} bytes, not {expected}")
        for base in sorted(sizes)[1:]:
            if base - expected not in sizes:
                path = f"{directory}/{file_name(base - expected)}"
                self._findings.add_damage(path, None, "is missing between two others")

    def _queue(self, topic: str, queue_id: int) -> QueueFiles:
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            directory = f"{QUEUE_DIRECTORY}/{topic}/{queue_id}"
            queue = QueueFiles(directory, self._open_files, {}, self._file_bytes)
            self._queues[topic, queue_id] = queue
        return queue


# --- the key index -------------------------------------------------------------------------------

_OFFSET_POSITION: Final = 4  # of the log offset in an index entry
_OFFSET = struct.Struct(">q")
_CANDIDATES_MAX: Final = 10_000
_SEARCHED_BYTES_MAX: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class IndexLayout:
    """How many slots and entries an index file has room for."""

    slots: int
    entries: int

    @property
    def entries_position(self) -> int:
        return HEADER.size + self.slots * SLOT.size

    @property
    def size(self) -> int:
        return self.entries_position + self.entries * INDEX_ENTRY.size


_DEFAULT_CONFIG = StoreConfig()
DEFAULT_LAYOUT: Final = IndexLayout(_DEFAULT_CONFIG.index_slots, _DEFAULT_CONFIG.index_entries)


class IndexEntry(NamedTuple):
    file: IndexFile
    number: int
    position: int
    key_hash: int
    log_offset: int


class IndexCheck:
    """Compares the key index with the log, record by record."""

    def __init__(
        self,
        disk: Disk,
        log: LogCheck,
        shutdown: ShutdownState,
        findings: Findings,
        config: StoreConfig | None,
    ) -> None:
        self._disk = disk
        self._log = log
        self._shutdown = shutdown
        self._findings = findings
        self._open_files = BufferedFiles(disk, files_max=2)
        self._layouts: dict[str, IndexLayout] = {}
        self._wrong_files: set[str] = set()  # their names
        self.files = 0
        self.keys = 0
        self._readable_files = self._open(config)
        self._entries = self._read_entries()
        self._next_entry = next(self._entries, None)
        self._unindexed_keys = 0

    def close(self) -> None:
        self._open_files.close()

    def check_record(self, record: StoredRecord, keys: list[bytes]) -> None:
        """Check the index entries of the next record of the log."""
        expected: set[int] = set()
        if has_keys(record.sys_flag):
            expected = {key_hash(record.topic, key) for key in keys}
        indexed: set[int] = set()
        while (entry := self._next_entry) is not None and entry.log_offset <= record.log_offset:
            if entry.log_offset < record.log_offset:
                self._report_unmatched(entry)
            elif entry.key_hash in expected:
                indexed.add(entry.key_hash)
            elif entry.key_hash != _tag_hash(record):
                description = (
                    f"entry {entry.number}: its hash is of no key of the record at "
                    f"{entry.log_offset}"
                )
                self._report_wrong(entry.file, entry.position, description)
            self._next_entry = next(self._entries, None)
        self.keys += len(indexed)
        if len(indexed) < len(expected):
            self._report_missing(record, len(expected) - len(indexed))

    def finish(self) -> None:
        """Report the entries behind the last record, and keys that no file contains."""
        while (entry := self._next_entry) is not None:
            self._report_unmatched(entry)
            self._next_entry = next(self._entries, None)
        self._check_checksums()
        if self._unindexed_keys:
            self._findings.add_note(
                INDEX_DIRECTORY,
                None,
                f"{self._unindexed_keys} keys are in no file: a file is missing; it can be rebuilt",
            )

    def _report_unmatched(self, entry: IndexEntry) -> None:
        """Report an entry whose record is not in the log, unless it has expired or is damaged."""
        log_offset = entry.log_offset
        if log_offset < self._log.begin or self._log.is_damaged(log_offset):
            return
        problem = (
            "behind the end of the log"
            if log_offset >= self._log.end
            else "where no record begins, or is out of order"
        )
        description = f"entry {entry.number}: points to {log_offset}, {problem}"
        self._report_wrong(entry.file, entry.position, description)

    def _report_missing(self, record: StoredRecord, count: int) -> None:
        """Report missing keys of a record, if its log offset is within the range of the index."""
        log_offset, files = record.log_offset, self._readable_files
        covering = [file for file in files if file.begin_offset <= log_offset <= file.end_offset]
        is_inside = any(file.begin_offset < log_offset < file.end_offset for file in covering)
        if is_inside or len(covering) > 1:
            description = f"lacks {count} of the keys of the record at {log_offset}"
            self._report_wrong(covering[0], None, description)
        elif files and files[0].begin_offset < log_offset < files[-1].end_offset:
            # The record is between two files, or its keys are split between one and a missing one.
            self._unindexed_keys += count

    def _report_wrong(self, file: IndexFile, position: int | None, description: str) -> None:
        # After a crash RocketMQ drops the files that are newer than its checkpoint.
        checkpoint = self._shutdown.rocketmq_checkpoint
        durable_ms = 0 if checkpoint is None else checkpoint.index_ms
        will_be_dropped = not self._shutdown.was_clean and file.end_ms > durable_ms
        severity = Severity.NOTE if will_be_dropped else Severity.DAMAGE
        self._findings.add(severity, file.path, position, description)
        self._wrong_files.add(file.name)

    # --- checksums -----------------------------------------------------------------------------

    def _check_checksums(self) -> None:
        """Check the files of checksums, and with them what the log does not say about an index."""
        if self._disk.exists(DAMAGED_PATH):
            self._findings.add_damage(
                DAMAGED_PATH, None, "the broker has found damage: the next start rebuilds the index"
            )
        for file in self._readable_files:
            if not self._disk.exists(file.checksum_path):
                continue  # RocketMQ has written the file
            checksums = IndexChecksums.decode(_read_all(self._open_files, file.checksum_path))
            if checksums is None:
                self._findings.add_damage(
                    file.checksum_path,
                    None,
                    "has a wrong checksum: the next start computes the checksums of the index file "
                    "again",
                )
            elif file.name not in self._wrong_files:  # what is known to be wrong is reported once
                self._compare_with(file, checksums)
        for name in self._disk.names(CHECKSUM_DIRECTORY):
            if name.isdigit() and not self._disk.exists(f"{INDEX_DIRECTORY}/{name}"):
                path = f"{CHECKSUM_DIRECTORY}/{name}"
                self._findings.add_note(path, None, "there is no index file of this name")

    def _compare_with(self, file: IndexFile, checksums: IndexChecksums) -> None:
        layout = self._layouts[file.name]
        header = self._open_files.read(file.path, 0, HEADER.size)
        if header != checksums.header:
            saved = IndexFile(file.name, *HEADER.unpack(checksums.header))
            if file.count > saved.count and file.end_offset > saved.end_offset:
                self._findings.add_note(
                    file.path, None, "RocketMQ has added keys: the checksums are not used any more"
                )
            else:
                self._report_wrong(
                    file,
                    0,
                    "the header is not the one that was written: the next start restores it",
                )
            return
        page_bytes = SLOTS_PER_SUM * SLOT.size
        for page, expected in enumerate(checksums.slot_sums):
            position = HEADER.size + page * page_bytes
            size = min(page_bytes, layout.entries_position - position)
            if sum_slots(self._open_files.read(file.path, position, size)) != expected:
                self._report_wrong(file, position, f"the slots of page {page} have a wrong sum")
        block_bytes = ENTRIES_PER_CRC * INDEX_ENTRY.size
        end = layout.entries_position + file.count * INDEX_ENTRY.size
        for block, expected in enumerate(checksums.entry_crcs):
            position = layout.entries_position + block * block_bytes
            size = min(block_bytes, end - position)
            if crc32(self._open_files.read(file.path, position, size)) != expected:
                description = f"the entries from {block * ENTRIES_PER_CRC} on have a wrong checksum"
                self._report_wrong(file, position, description)

    # --- one file ------------------------------------------------------------------------------

    def _read_entries(self) -> Iterator[IndexEntry]:
        """Yield the entries of all files in order, and check the chains on the way."""
        for file in self._readable_files:
            layout = self._layouts[file.name]
            newest = array("i", bytes(layout.slots * SLOT.size))
            position = layout.entries_position + INDEX_ENTRY.size
            end = layout.entries_position + file.count * INDEX_ENTRY.size
            entries = self._open_files.read(file.path, position, end - position)
            for number, entry in enumerate(INDEX_ENTRY.iter_unpack(entries), 1):
                value, log_offset, _, previous = entry
                slot = value % layout.slots
                if previous != newest[slot]:
                    description = (
                        f"entry {number}: follows entry {previous}, not {newest[slot]}, "
                        "so a look-up does not find the entries before it"
                    )
                    self._report_wrong(file, position, description)
                newest[slot] = number
                yield IndexEntry(file, number, position, value, log_offset)
                position += INDEX_ENTRY.size
            self._check_slots(file, layout, newest)

    def _check_slots(self, file: IndexFile, layout: IndexLayout, newest: array[int]) -> None:
        slots_bytes = layout.entries_position - HEADER.size
        slots = array("i", self._open_files.read(file.path, HEADER.size, slots_bytes))
        if sys.byteorder == "little":
            slots.byteswap()
        used = layout.slots - newest.count(0)
        if file.used_slots != used:
            description = f"the header counts {file.used_slots} used slots, but {used} are used"
            self._report_wrong(file, 32, description)
        if slots == newest:
            return
        for slot, (actual, expected) in enumerate(zip(slots, newest, strict=True)):
            if actual != expected:
                position = HEADER.size + slot * SLOT.size
                description = f"slot {slot}: names entry {actual}, but the newest is {expected}"
                self._report_wrong(file, position, description)

    def _check_header(self, file: IndexFile, layout: IndexLayout) -> None:
        first, last = (self._log_offset_of(file, layout, number) for number in (1, file.count - 1))
        if (file.begin_offset, file.end_offset) != (first, last):
            description = (
                f"the header covers {file.begin_offset} to {file.end_offset}, but the entries "
                f"{first} to {last}"
            )
            self._report_wrong(file, 16, description)
        if file.begin_ms > file.end_ms:
            self._report_wrong(
                file,
                0,
                f"the header begins at {file.begin_ms} ms and ends before, at {file.end_ms} ms",
            )

    def _log_offset_of(self, file: IndexFile, layout: IndexLayout, number: int) -> int:
        position = layout.entries_position + number * INDEX_ENTRY.size + _OFFSET_POSITION
        return int(_OFFSET.unpack(self._open_files.read(file.path, position, _OFFSET.size))[0])

    # --- files ---------------------------------------------------------------------------------

    def _open(self, config: StoreConfig | None) -> list[IndexFile]:
        readable = []
        for name in self._disk.names(INDEX_DIRECTORY):
            path = f"{INDEX_DIRECTORY}/{name}"
            if not name.isdigit():
                self._findings.add_note(path, None, "is not an index file")
                continue
            self.files += 1
            size = self._open_files.size(path)
            if size < HEADER.size:
                description = f"has {size} bytes, less than a header; it can be rebuilt"
                self._findings.add(self._severity_after_crash(), path, None, description)
                continue
            file = IndexFile(name, *HEADER.unpack(self._open_files.read(path, 0, HEADER.size)))
            file.count = max(1, file.count)  # RocketMQ writes 0 into a new file
            layout = detect_layout(file, self._open_files, config)
            if layout is None:
                self._findings.add_note(
                    path,
                    None,
                    "was not checked: its layout is unknown or damaged; it can be rebuilt",
                )
            elif not 1 <= file.count <= layout.entries:
                description = (
                    f"the header counts {file.count} entries, but the file has room for "
                    f"{layout.entries}"
                )
                self._report_wrong(file, 36, description)
            elif file.count > 1:
                self._layouts[name] = layout
                self._check_header(file, layout)
                readable.append(file)
        return readable

    def _severity_after_crash(self) -> Severity:
        return Severity.DAMAGE if self._shutdown.was_clean else Severity.NOTE


def _read_all(files: BufferedFiles, path: str) -> bytes:
    return files.read(path, 0, files.size(path))


def _tag_hash(record: StoredRecord) -> int | None:
    """Return the hash of the tags: RocketMQ 5.5 indexes a message by its tags too."""
    tags = find_property(record.properties, TAGS.encode())
    return None if tags is None else key_hash(record.topic, b"T#" + tags)


def detect_layout(
    file: IndexFile, files: BufferedFiles, config: StoreConfig | None
) -> IndexLayout | None:
    """Return the layout of a file, which the file itself does not contain.

    Try the configuration, then RocketMQ's default, then a guess. Return None if nothing fits.
    """
    layouts = [DEFAULT_LAYOUT]
    if config is not None:
        layouts.insert(0, IndexLayout(config.index_slots, config.index_entries))
    for layout in layouts:
        if layout.size == files.size(file.path):
            return layout
    guesses = list(_candidate_layouts(file, files))
    for layout in guesses:
        if _newest_entry_is_in_slot(file, files, layout):
            return layout
    return guesses[0] if len(guesses) == 1 else None


def _candidate_layouts(file: IndexFile, files: BufferedFiles) -> Iterator[IndexLayout]:
    """Yield layouts in which first and last entry have the log offsets of the header."""
    if file.count < 2:
        return
    size = files.size(file.path)
    data = files.read(file.path, 0, min(size, _SEARCHED_BYTES_MAX))
    last_offset = _OFFSET.pack(file.end_offset)
    position = HEADER.size
    for _ in range(_CANDIDATES_MAX):
        position = data.find(last_offset, position + 1)
        if position < 0:
            return
        entries_position = position - _OFFSET_POSITION - (file.count - 1) * INDEX_ENTRY.size
        slots, slots_remainder = divmod(entries_position - HEADER.size, SLOT.size)
        entries, entries_remainder = divmod(size - entries_position, INDEX_ENTRY.size)
        if slots < 1 or slots_remainder or entries_remainder or entries < file.count:
            continue
        first_position = entries_position + INDEX_ENTRY.size + _OFFSET_POSITION
        if _OFFSET.unpack_from(data, first_position)[0] == file.begin_offset:
            yield IndexLayout(slots, entries)


def _newest_entry_is_in_slot(file: IndexFile, files: BufferedFiles, layout: IndexLayout) -> bool:
    position = layout.entries_position + (file.count - 1) * INDEX_ENTRY.size
    entry = files.read(file.path, position, INDEX_ENTRY.size)
    value: int = INDEX_ENTRY.unpack(entry)[0]
    slot_position = HEADER.size + value % layout.slots * SLOT.size
    slot = files.read(file.path, slot_position, SLOT.size)
    return bool(SLOT.unpack(slot)[0] == file.count - 1)
