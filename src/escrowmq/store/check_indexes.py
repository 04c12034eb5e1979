"""Examine the consume queues: each record has its entry, and each entry its record.

The log is walked once, in order, and so is each queue beside it: an entry that the walk has not
met when it meets a later one of the same queue belongs to no record. So nothing is kept but one
number per queue.

Examine the key index: chains, slots, and that keys lead to their records and back.

Keys are indexed in the order of the log, so the entries of all files, one after the other, are
walked beside the log. A chain is right if each entry names the one that was the newest of its slot
before it, and the slot names the last: this finds every entry that a look-up would not reach.
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
from escrowmq.message.names import SCHEDULE_TOPIC, TAGS
from escrowmq.message.properties import find_property
from escrowmq.message.record import INNER_BATCH, NEED_UNWRAP, StoredRecord
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
from escrowmq.store.disk import Disk, ViewCache
from escrowmq.store.key_index import HEADER, INDEX_DIRECTORY, INDEX_ENTRY, SLOT, IndexFile
from escrowmq.store.log_files import file_size, first_nonzero, most_common_size

_LIGHT_QUEUE_PREFIX: Final = "%LMQ%"  # RocketMQ's; their entries speak of records of other topics
_FULL_SCAN_BYTES: Final = 64 << 10
_FIELDS: Final = ("log offset", "size", "tags code")

QueueIndexEntry = tuple[int, int, int]


class QueueFiles:
    """The files of one queue, for reading only, and how far they have been examined."""

    def __init__(
        self, directory: str, views: ViewCache, file_sizes: dict[int, int], file_bytes: int
    ) -> None:
        self.directory = directory
        self._views = views
        self._file_sizes = file_sizes
        self._file_bytes = file_bytes
        self.next_offset = min(file_sizes, default=0) // QUEUE_ENTRY_BYTES
        self.end_offset = (
            max(file_sizes, default=0) + file_bytes
        ) // QUEUE_ENTRY_BYTES  # the files hold no more
        self.has_records = False
        self.missing: MissingEntries | None = None

    def locate(self, queue_offset: int) -> tuple[str, int]:
        position = queue_offset * QUEUE_ENTRY_BYTES
        within = position % self._file_bytes if self._file_bytes else position
        return f"{self.directory}/{file_name(position - within)}", within

    def entry(self, queue_offset: int) -> QueueIndexEntry | None:
        """None where nothing was written."""
        path, at = self.locate(queue_offset)
        if queue_offset * QUEUE_ENTRY_BYTES - at not in self._file_sizes:
            return None
        view = self._views.view(path)
        if at + QUEUE_ENTRY_BYTES > len(view):
            return None
        log_offset, size, tags_code = ENTRY.unpack_from(view, at)
        return (log_offset, size, tags_code) if log_offset or size or tags_code else None

    def points_at(self, queue_offset: int, log_offset: int) -> bool:
        entry = self.entry(queue_offset)
        return entry is not None and entry[0] == log_offset and entry[1] != BLANK_SIZE

    def find_trailing_data(self, queue_offset: int) -> tuple[str, int] | None:
        """The first byte from an entry on that is not zero."""
        position = queue_offset * QUEUE_ENTRY_BYTES
        for base in sorted(self._file_sizes):
            if base + self._file_bytes <= position:
                continue
            path = f"{self.directory}/{file_name(base)}"
            found = first_nonzero(self._views.view(path), max(0, position - base), _FULL_SCAN_BYTES)
            if found is not None:
                return path, found
        return None


@dataclass(slots=True)
class MissingEntries:
    """A run of records whose entries are not there."""

    first_offset: int  # queue offset
    log_offset: int
    count: int = 1


class QueueCheck:
    def __init__(
        self, disk: Disk, log: LogCheck, shutdown: ShutdownState, findings: Findings
    ) -> None:
        self._log = log
        self._shutdown = shutdown
        self._findings = findings
        self._views = ViewCache(disk)
        self._queues: dict[tuple[str, int], QueueFiles] = {}
        self._file_bytes = 0
        self._open(disk)
        self.entries = 0

    def __len__(self) -> int:
        return len(self._queues)

    def close(self) -> None:
        self._views.close()

    def totals(self) -> tuple[int, int]:
        """How many queues have had a message, and how many messages all of them together."""
        offsets = [queue.next_offset for queue in self._queues.values() if queue.next_offset]
        return len(offsets), sum(offsets)

    # --- along the log -------------------------------------------------------------------------

    def check_record(self, record: StoredRecord, tags_code: int) -> None:
        """The next record of the log that should have an entry."""
        if record.sys_flag & (INNER_BATCH | NEED_UNWRAP):
            return  # many messages in one record: RocketMQ keeps their places elsewhere
        queue = self._queue(record.topic, record.queue_id)
        number: int = record.queue_offset
        if number != queue.next_offset and queue.points_at(queue.next_offset, record.log_offset):
            # The queue has it in its place, so it is the record that is wrong.
            what = f"says that its queue offset is {number}; the queue says {queue.next_offset}"
            self._findings.add_damage(*self._log.locate(record.log_offset), what)
            number = queue.next_offset
        if number < queue.next_offset and queue.has_records:
            what = f"is also the place of the record at log offset {record.log_offset}"
            self._report_wrong(queue, number, record.log_offset, what)
            return
        for between in range(queue.next_offset, min(number, queue.end_offset)):
            self._report_unclaimed(queue, between)
        queue.has_records = True
        self._compare(queue, number, record, tags_code)
        queue.next_offset = number + 1

    def finish(self) -> None:
        """The walk has reached the end of the log."""
        for queue in self._queues.values():
            if queue.missing is not None:
                self._report_missing(queue, at_log_end=True)
            while queue.entry(queue.next_offset) is not None:
                self._report_unclaimed(queue, queue.next_offset)
                queue.next_offset += 1
            leftover = queue.find_trailing_data(queue.next_offset)
            if leftover is not None:
                severity = Severity.DAMAGE if self._shutdown.was_clean else Severity.NOTE
                what = f"the queue ends at {queue.next_offset}, and what follows is not all zeros"
                self._findings.add(severity, *leftover, what)

    def _compare(
        self, queue: QueueFiles, queue_offset: int, record: StoredRecord, tags_code: int
    ) -> None:
        expected = (record.log_offset, record.size, tags_code)
        found = queue.entry(queue_offset)
        if found is None:
            if queue.missing is None:
                queue.missing = MissingEntries(queue_offset, record.log_offset)
            else:
                queue.missing.count += 1
            return
        if queue.missing is not None:
            self._report_missing(queue, at_log_end=False)
        self.entries += 1
        if found == expected:
            return
        differing = [i for i in range(3) if found[i] != expected[i]]
        what = ", ".join(f"{_FIELDS[i]} {found[i]}, not {expected[i]}" for i in differing)
        if record.topic == SCHEDULE_TOPIC and differing == [2]:
            what += ": or messageDelayLevel was not the default"
            self._findings.add_note(*queue.locate(queue_offset), f"entry {queue_offset}: {what}")
            return
        self._report_wrong(queue, queue_offset, record.log_offset, what)

    def _report_unclaimed(self, queue: QueueFiles, queue_offset: int) -> None:
        """An entry that the log has no record for."""
        entry = queue.entry(queue_offset)
        if entry is None:
            if not self._log.has_damage:
                self._report_wrong(
                    queue, queue_offset, self._log.end, "is empty, and the queue goes on"
                )
            return
        log_offset, size, _ = entry
        if size == BLANK_SIZE or self._log.is_damaged(log_offset):
            return
        if log_offset < self._log.begin:
            if queue.has_records:
                what = f"points at {log_offset}, which is gone; entries before it are not"
                self._report_wrong(queue, queue_offset, log_offset, what)
            return
        if log_offset + size > self._log.end:
            severity = Severity.DAMAGE if self._shutdown.was_clean else Severity.NOTE
            what = f"entry {queue_offset}: points at {log_offset}, behind the end of the log"
            self._findings.add(severity, *queue.locate(queue_offset), what)
            return
        what = f"points at {log_offset}, where no record of this queue is"
        self._report_wrong(queue, queue_offset, log_offset, what)

    def _report_wrong(
        self, queue: QueueFiles, queue_offset: int, log_offset: int, description: str
    ) -> None:
        rewritten = self._shutdown.will_be_rebuilt(log_offset)
        severity = Severity.NOTE if rewritten else Severity.DAMAGE
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
        what = f"entries {first} to {first + count - 1}" if count > 1 else f"entry {first}"
        what += " missing"
        unclean = not self._shutdown.was_clean and self._shutdown.durable_end is None
        if self._shutdown.will_be_rebuilt(log_offset) or (at_log_end and unclean):
            self._findings.add_note(*queue.locate(first), f"{what}: the next start puts them back")
        else:
            self._findings.add_damage(*queue.locate(first), f"{what}: the log has the records")

    # --- files ---------------------------------------------------------------------------------

    def _open(self, disk: Disk) -> None:
        queues = queue_directories(disk)
        directories = {
            (topic, queue_id): f"{QUEUE_DIRECTORY}/{topic}/{queue_id}"
            for topic, queue_id in queues
            if not topic.startswith(_LIGHT_QUEUE_PREFIX)
        }
        if len(directories) < len(queues):
            skipped = len(queues) - len(directories)
            self._findings.add_note(
                QUEUE_DIRECTORY, None, f"{skipped} light queues were not examined"
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
            self._queues[key] = QueueFiles(directories[key], self._views, files, self._file_bytes)

    def _check_files(self, directory: str, sizes: dict[int, int]) -> None:
        expected = self._file_bytes
        for base, size in sizes.items():
            path = f"{directory}/{file_name(base)}"
            if expected and base % expected:
                what = f"its name is no multiple of {expected}, the length of the files"
                self._findings.add_damage(path, None, what)
            elif size != expected:
                unfinished = size < expected and not self._shutdown.was_clean
                severity = Severity.NOTE if unfinished else Severity.DAMAGE
                self._findings.add(severity, path, None, f"has {size} bytes, not {expected}")
        for base in sorted(sizes)[1:]:
            if base - expected not in sizes:
                path = f"{directory}/{file_name(base - expected)}"
                self._findings.add_damage(path, None, "is missing between two others")

    def _queue(self, topic: str, queue_id: int) -> QueueFiles:
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            directory = f"{QUEUE_DIRECTORY}/{topic}/{queue_id}"
            queue = QueueFiles(directory, self._views, {}, self._file_bytes)
            self._queues[topic, queue_id] = queue
        return queue


_OFFSET_POSITION: Final = 4  # of the log offset in an entry
_OFFSET = struct.Struct(">q")
_CANDIDATES_MAX: Final = 10_000
_SEARCHED_BYTES_MAX: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class IndexLayout:
    slots: int
    entries: int

    @property
    def entries_position(self) -> int:
        return HEADER.size + self.slots * SLOT.size

    @property
    def size(self) -> int:
        return self.entries_position + self.entries * INDEX_ENTRY.size


_DEFAULT_SETTINGS = StoreConfig()
DEFAULT_LAYOUT: Final = IndexLayout(_DEFAULT_SETTINGS.index_slots, _DEFAULT_SETTINGS.index_entries)


class IndexEntry(NamedTuple):
    file: IndexFile
    number: int
    position: int
    key_hash: int
    log_offset: int


class IndexCheck:
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
        self._views = ViewCache(disk, files_max=2)
        self._layouts: dict[str, IndexLayout] = {}
        self.files = 0
        self.keys = 0
        self._readable_files = self._open(config)
        self._entries = self._read_entries()
        self._next_entry = next(self._entries, None)
        self._unindexed_keys = 0

    def close(self) -> None:
        self._views.close()

    def check_record(self, record: StoredRecord, keys: list[bytes]) -> None:
        """The next record of the log."""
        expected: set[int] = set()
        if has_keys(record.sys_flag):
            expected = {key_hash(record.topic, key) for key in keys}
        found: set[int] = set()
        while (entry := self._next_entry) is not None and entry.log_offset <= record.log_offset:
            if entry.log_offset < record.log_offset:
                self._report_unmatched(entry)
            elif entry.key_hash in expected:
                found.add(entry.key_hash)
            elif entry.key_hash != _tag_hash(record):
                what = f"entry {entry.number}: no key of the record at {entry.log_offset} hashes so"
                self._report_wrong(entry.file, entry.position, what)
            self._next_entry = next(self._entries, None)
        self.keys += len(found)
        if len(found) < len(expected):
            self._report_missing(record, len(expected) - len(found))

    def finish(self) -> None:
        while (entry := self._next_entry) is not None:
            self._report_unmatched(entry)
            self._next_entry = next(self._entries, None)
        if self._unindexed_keys:
            what = (
                f"{self._unindexed_keys} keys are in no file: one is missing; it can be built again"
            )
            self._findings.add_note(INDEX_DIRECTORY, None, what)

    def _report_unmatched(self, entry: IndexEntry) -> None:
        """An entry that the log, up to here, has no record for."""
        at = entry.log_offset
        if at < self._log.begin or self._log.is_damaged(at):
            return
        where = "behind the end of the log" if at >= self._log.end else "where no record begins"
        what = f"entry {entry.number}: points at {at}, {where}, or is out of order"
        self._report_wrong(entry.file, entry.position, what)

    def _report_missing(self, record: StoredRecord, count: int) -> None:
        at = record.log_offset
        holders = [
            file for file in self._readable_files if file.begin_offset <= at <= file.end_offset
        ]
        if any(file.begin_offset < at < file.end_offset for file in holders) or len(holders) > 1:
            what = f"lacks {count} of the keys of the record at {at}"
            self._report_wrong(holders[0], None, what)
        elif (
            self._readable_files
            and self._readable_files[0].begin_offset < at < self._readable_files[-1].end_offset
        ):
            self._unindexed_keys += (
                count  # between two files, or in one of them and one that is gone
            )

    def _report_wrong(self, file: IndexFile, position: int | None, description: str) -> None:
        # After a crash RocketMQ drops the files that its checkpoint does not vouch for.
        vouched_ms = (
            0
            if self._shutdown.rocketmq_checkpoint is None
            else self._shutdown.rocketmq_checkpoint.index_ms
        )
        dropped = not self._shutdown.was_clean and file.end_ms > vouched_ms
        severity = Severity.NOTE if dropped else Severity.DAMAGE
        self._findings.add(severity, file.path, position, description)

    # --- one file ------------------------------------------------------------------------------

    def _read_entries(self) -> Iterator[IndexEntry]:
        for file in self._readable_files:
            geometry = self._layouts[file.name]
            view = self._views.view(file.path)
            newest = array("i", bytes(geometry.slots * SLOT.size))
            at = geometry.entries_position + INDEX_ENTRY.size
            end = geometry.entries_position + file.count * INDEX_ENTRY.size
            for number, entry in enumerate(INDEX_ENTRY.iter_unpack(view[at:end]), 1):
                value, log_offset, _, previous = entry
                slot = value % geometry.slots
                if previous != newest[slot]:
                    what = f"entry {number}: follows entry {previous}, not {newest[slot]}"
                    self._report_wrong(file, at, f"{what}: what is before it cannot be found")
                newest[slot] = number
                yield IndexEntry(file, number, at, value, log_offset)
                at += INDEX_ENTRY.size
            self._check_slots(file, view, geometry, newest)

    def _check_slots(
        self, file: IndexFile, view: memoryview, layout: IndexLayout, newest: array[int]
    ) -> None:
        slots = array("i")
        slots.frombytes(view[HEADER.size : layout.entries_position])
        if sys.byteorder == "little":
            slots.byteswap()
        used = layout.slots - newest.count(0)
        if file.used_slots != used:
            what = f"the header says that {file.used_slots} slots are in use; {used} are"
            self._report_wrong(file, 32, what)
        if slots == newest:
            return
        for slot, (found, expected) in enumerate(zip(slots, newest, strict=True)):
            if found != expected:
                position = HEADER.size + slot * SLOT.size
                what = f"slot {slot}: names entry {found}; the newest is {expected}"
                self._report_wrong(file, position, what)

    def _check_header(self, file: IndexFile, view: memoryview, layout: IndexLayout) -> None:
        first, last = (
            _OFFSET.unpack_from(
                view, layout.entries_position + number * INDEX_ENTRY.size + _OFFSET_POSITION
            )[0]
            for number in (1, file.count - 1)
        )
        if (file.begin_offset, file.end_offset) != (first, last):
            what = (
                f"covers {file.begin_offset} to {file.end_offset}; its entries, {first} to {last}"
            )
            self._report_wrong(file, 16, f"the header says that it {what}")
        if file.begin_ms > file.end_ms:
            self._report_wrong(
                file, 0, f"begins at {file.begin_ms} ms, after its end at {file.end_ms}"
            )

    # --- files ---------------------------------------------------------------------------------

    def _open(self, config: StoreConfig | None) -> list[IndexFile]:
        usable = []
        for name in self._disk.names(INDEX_DIRECTORY):
            path = f"{INDEX_DIRECTORY}/{name}"
            if not name.isdigit():
                self._findings.add_note(path, None, "is not a file of the index")
                continue
            self.files += 1
            view = self._views.view(path)
            if len(view) < HEADER.size:
                what = f"has {len(view)} bytes: not even a header; it can be built again"
                self._findings.add(self._severity_after_crash(), path, None, what)
                continue
            file = IndexFile(name, *HEADER.unpack_from(view, 0))
            file.count = max(1, file.count)  # RocketMQ leaves 0 in a file it has just made
            geometry = detect_layout(file, view, config)
            if geometry is None:
                what = "was made with other settings, or is damaged: not examined; it can be built"
                self._findings.add_note(path, None, f"{what} again")
            elif not 1 <= file.count <= geometry.entries:
                what = f"the header counts {file.count} entries; there is room for"
                self._report_wrong(file, 36, f"{what} {geometry.entries}")
            elif file.count > 1:
                self._layouts[name] = geometry
                self._check_header(file, view, geometry)
                usable.append(file)
        return usable

    def _severity_after_crash(self) -> Severity:
        return Severity.DAMAGE if self._shutdown.was_clean else Severity.NOTE


def _tag_hash(record: StoredRecord) -> int | None:
    """RocketMQ 5.5 indexes a message by its tags too."""
    tags = find_property(record.properties, TAGS.encode())
    return None if tags is None else key_hash(record.topic, b"T#" + tags)


def detect_layout(
    file: IndexFile, view: memoryview, config: StoreConfig | None
) -> IndexLayout | None:
    """How a file is laid out, which it does not say: as set, as RocketMQ does it, or a guess."""
    known = [DEFAULT_LAYOUT]
    if config is not None:
        known.insert(0, IndexLayout(config.index_slots, config.index_entries))
    for geometry in known:
        if geometry.size == len(view):
            return geometry
    guesses = list(_candidate_layouts(file, view))
    for geometry in guesses:
        if _newest_entry_is_in_slot(file, view, geometry):
            return geometry
    return guesses[0] if len(guesses) == 1 else None


def _candidate_layouts(file: IndexFile, view: memoryview) -> Iterator[IndexLayout]:
    """Layouts in which the first and the last entry speak of what the header says they do."""
    if file.count < 2:
        return
    data = bytes(view[:_SEARCHED_BYTES_MAX])
    sought = _OFFSET.pack(file.end_offset)
    found = HEADER.size
    for _ in range(_CANDIDATES_MAX):
        found = data.find(sought, found + 1)
        if found < 0:
            return
        entries_at = found - _OFFSET_POSITION - (file.count - 1) * INDEX_ENTRY.size
        slots, odd = divmod(entries_at - HEADER.size, SLOT.size)
        entries, rest = divmod(len(view) - entries_at, INDEX_ENTRY.size)
        if slots < 1 or odd or rest or entries < file.count:
            continue
        first_at = entries_at + INDEX_ENTRY.size + _OFFSET_POSITION
        if _OFFSET.unpack_from(data, first_at)[0] == file.begin_offset:
            yield IndexLayout(slots, entries)


def _newest_entry_is_in_slot(file: IndexFile, view: memoryview, layout: IndexLayout) -> bool:
    at = layout.entries_position + (file.count - 1) * INDEX_ENTRY.size
    value: int = INDEX_ENTRY.unpack_from(view, at)[0]
    slot_at = HEADER.size + value % layout.slots * SLOT.size
    return bool(SLOT.unpack_from(view, slot_at)[0] == file.count - 1)
