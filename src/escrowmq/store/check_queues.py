"""Examine the consume queues: each record has its entry, and each entry its record.

The log is walked once, in order, and so is each queue beside it: an entry that the walk has not
met when it meets a later one of the same queue belongs to no record. So nothing is kept but one
number per queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from escrowmq.message.names import SCHEDULE_TOPIC
from escrowmq.message.record import StoredRecord
from escrowmq.message.sysflag import INNER_BATCH, NEED_UNWRAP
from escrowmq.store.check_log import LogCheck, Stop
from escrowmq.store.commitlog import file_name, is_file_name
from escrowmq.store.consumequeue import BLANK_SIZE, DIRECTORY, ENTRY, queue_directories
from escrowmq.store.disk import Disk, OpenViews
from escrowmq.store.findings import Findings, Severity
from escrowmq.store.logfiles import file_size, first_nonzero, likely_size
from escrowmq.store.settings import QUEUE_ENTRY_BYTES

_LIGHT_QUEUES: Final = "%LMQ%"  # RocketMQ's; their entries speak of records of other topics
_WHOLE_BYTES: Final = 64 << 10
_FIELDS: Final = ("log offset", "size", "tags code")

Entry = tuple[int, int, int]


class QueueFiles:
    """The files of one queue, for reading only, and how far they have been examined."""

    def __init__(self, directory: str, views: OpenViews, sizes: dict[int, int], size: int) -> None:
        self.directory = directory
        self._views = views
        self._bases = sizes
        self._file_bytes = size
        self.next = min(sizes, default=0) // QUEUE_ENTRY_BYTES
        self.limit = (max(sizes, default=0) + size) // QUEUE_ENTRY_BYTES  # the files hold no more
        self.is_met = False
        self.missing: Missing | None = None

    def place(self, number: int) -> tuple[str, int]:
        position = number * QUEUE_ENTRY_BYTES
        within = position % self._file_bytes if self._file_bytes else position
        return f"{self.directory}/{file_name(position - within)}", within

    def entry(self, number: int) -> Entry | None:
        """None where nothing was written."""
        path, at = self.place(number)
        if number * QUEUE_ENTRY_BYTES - at not in self._bases:
            return None
        view = self._views.view(path)
        if at + QUEUE_ENTRY_BYTES > len(view):
            return None
        log_offset, size, tags_code = ENTRY.unpack_from(view, at)
        return (log_offset, size, tags_code) if log_offset or size or tags_code else None

    def points_at(self, number: int, log_offset: int) -> bool:
        entry = self.entry(number)
        return entry is not None and entry[0] == log_offset and entry[1] != BLANK_SIZE

    def leftover(self, number: int) -> tuple[str, int] | None:
        """The first byte from an entry on that is not zero."""
        position = number * QUEUE_ENTRY_BYTES
        for base in sorted(self._bases):
            if base + self._file_bytes <= position:
                continue
            path = f"{self.directory}/{file_name(base)}"
            found = first_nonzero(self._views.view(path), max(0, position - base), _WHOLE_BYTES)
            if found is not None:
                return path, found
        return None


@dataclass(slots=True)
class Missing:
    """A run of records whose entries are not there."""

    first: int  # queue offset
    log_offset: int
    count: int = 1


class QueueCheck:
    def __init__(self, disk: Disk, log: LogCheck, stop: Stop, findings: Findings) -> None:
        self._log = log
        self._stop = stop
        self._findings = findings
        self._views = OpenViews(disk)
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
        offsets = [queue.next for queue in self._queues.values() if queue.next]
        return len(offsets), sum(offsets)

    # --- along the log -------------------------------------------------------------------------

    def see(self, record: StoredRecord, tags_code: int) -> None:
        """The next record of the log that should have an entry."""
        if record.sys_flag & (INNER_BATCH | NEED_UNWRAP):
            return  # many messages in one record: RocketMQ keeps their places elsewhere
        queue = self._queue(record.topic, record.queue_id)
        number: int = record.queue_offset
        if number != queue.next and queue.points_at(queue.next, record.log_offset):
            # The queue has it in its place, so it is the record that is wrong.
            what = f"says that its queue offset is {number}; the queue says {queue.next}"
            self._findings.damage(*self._log.place(record.log_offset), what)
            number = queue.next
        if number < queue.next and queue.is_met:
            what = f"is also the place of the record at log offset {record.log_offset}"
            self._wrong(queue, number, record.log_offset, what)
            return
        for between in range(queue.next, min(number, queue.limit)):
            self._unclaimed(queue, between)
        queue.is_met = True
        self._compare(queue, number, record, tags_code)
        queue.next = number + 1

    def finish(self) -> None:
        """The walk has reached the end of the log."""
        for queue in self._queues.values():
            if queue.missing is not None:
                self._report_missing(queue, at_end=True)
            while queue.entry(queue.next) is not None:
                self._unclaimed(queue, queue.next)
                queue.next += 1
            leftover = queue.leftover(queue.next)
            if leftover is not None:
                severity = Severity.DAMAGE if self._stop.clean else Severity.NOTE
                what = f"the queue ends at {queue.next}, and what follows is not all zeros"
                self._findings.add(severity, *leftover, what)

    def _compare(
        self, queue: QueueFiles, number: int, record: StoredRecord, tags_code: int
    ) -> None:
        expected = (record.log_offset, record.size, tags_code)
        found = queue.entry(number)
        if found is None:
            if queue.missing is None:
                queue.missing = Missing(number, record.log_offset)
            else:
                queue.missing.count += 1
            return
        if queue.missing is not None:
            self._report_missing(queue, at_end=False)
        self.entries += 1
        if found == expected:
            return
        differing = [i for i in range(3) if found[i] != expected[i]]
        what = ", ".join(f"{_FIELDS[i]} {found[i]}, not {expected[i]}" for i in differing)
        if record.topic == SCHEDULE_TOPIC and differing == [2]:
            what += ": or messageDelayLevel was not the default"
            self._findings.note(*queue.place(number), f"entry {number}: {what}")
            return
        self._wrong(queue, number, record.log_offset, what)

    def _unclaimed(self, queue: QueueFiles, number: int) -> None:
        """An entry that the log has no record for."""
        entry = queue.entry(number)
        if entry is None:
            if not self._log.has_damage:
                self._wrong(queue, number, self._log.end, "is empty, and the queue goes on")
            return
        log_offset, size, _ = entry
        if size == BLANK_SIZE or self._log.lies_in_damage(log_offset):
            return
        if log_offset < self._log.begin:
            if queue.is_met:
                what = f"points at {log_offset}, which is gone; entries before it are not"
                self._wrong(queue, number, log_offset, what)
            return
        if log_offset + size > self._log.end:
            severity = Severity.DAMAGE if self._stop.clean else Severity.NOTE
            what = f"entry {number}: points at {log_offset}, behind the end of the log"
            self._findings.add(severity, *queue.place(number), what)
            return
        what = f"points at {log_offset}, where no record of this queue is"
        self._wrong(queue, number, log_offset, what)

    def _wrong(self, queue: QueueFiles, number: int, log_offset: int, what: str) -> None:
        rewritten = self._stop.is_rewritten(log_offset)
        severity = Severity.NOTE if rewritten else Severity.DAMAGE
        self._findings.add(severity, *queue.place(number), f"entry {number}: {what}")

    def _report_missing(self, queue: QueueFiles, *, at_end: bool) -> None:
        assert queue.missing is not None
        first, log_offset, count = (
            queue.missing.first,
            queue.missing.log_offset,
            queue.missing.count,
        )
        queue.missing = None
        what = f"entries {first} to {first + count - 1}" if count > 1 else f"entry {first}"
        what += " missing"
        unclean = not self._stop.clean and self._stop.durable_end is None
        if self._stop.is_rewritten(log_offset) or (at_end and unclean):
            self._findings.note(*queue.place(first), f"{what}: the next start puts them back")
        else:
            self._findings.damage(*queue.place(first), f"{what}: the log has the records")

    # --- files ---------------------------------------------------------------------------------

    def _open(self, disk: Disk) -> None:
        queues = queue_directories(disk)
        directories = {
            (topic, queue_id): f"{DIRECTORY}/{topic}/{queue_id}"
            for topic, queue_id in queues
            if not topic.startswith(_LIGHT_QUEUES)
        }
        if len(directories) < len(queues):
            skipped = len(queues) - len(directories)
            self._findings.note(DIRECTORY, None, f"{skipped} light queues were not examined")
        sizes = {
            key: {
                int(name): file_size(disk, f"{directory}/{name}")
                for name in disk.names(directory)
                if is_file_name(name)
            }
            for key, directory in directories.items()
        }
        self._file_bytes = likely_size(size for files in sizes.values() for size in files.values())
        for key, files in sizes.items():
            self._check_files(directories[key], files)
            self._queues[key] = QueueFiles(directories[key], self._views, files, self._file_bytes)

    def _check_files(self, directory: str, sizes: dict[int, int]) -> None:
        expected = self._file_bytes
        for base, size in sizes.items():
            path = f"{directory}/{file_name(base)}"
            if expected and base % expected:
                what = f"its name is no multiple of {expected}, the length of the files"
                self._findings.damage(path, None, what)
            elif size != expected:
                unfinished = size < expected and not self._stop.clean
                severity = Severity.NOTE if unfinished else Severity.DAMAGE
                self._findings.add(severity, path, None, f"has {size} bytes, not {expected}")
        for base in sorted(sizes)[1:]:
            if base - expected not in sizes:
                path = f"{directory}/{file_name(base - expected)}"
                self._findings.damage(path, None, "is missing between two others")

    def _queue(self, topic: str, queue_id: int) -> QueueFiles:
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            directory = f"{DIRECTORY}/{topic}/{queue_id}"
            queue = QueueFiles(directory, self._views, {}, self._file_bytes)
            self._queues[topic, queue_id] = queue
        return queue
