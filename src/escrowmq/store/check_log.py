"""Check the log: every record, the names and lengths of the segments, and the end of the log.

The log is read as recovery reads it (log_scan.py), so both come to the same result. How the last
process stopped decides about a range without valid records:

    below what checkpoint and flush marks call durable       damage
    above it, followed by valid records, and either the
    store was closed or there was no power cut               damage
    above it otherwise, and the store was not closed         a torn end, which the next start cuts
    above it otherwise, and the store was closed             damage

Findings are collected here too, because all checks report them:

    DAMAGE  something that was written is missing or changed
    NOTE    nothing is lost: the next start repairs it, or EscrowMQ has not written it
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from escrowmq.errors import RecordRefused
from escrowmq.message.record import RECORD_BYTES_MIN, StoredRecord
from escrowmq.store.checkpoint import (
    CHECKPOINT_PATH,
    Checkpoint,
    RocketMQCheckpoint,
    load_rocketmq_checkpoint,
)
from escrowmq.store.commit_log import LOG_DIRECTORY, file_name
from escrowmq.store.consume_queue import check_queue_name
from escrowmq.store.disk import Disk
from escrowmq.store.flush_marks import SavedMarks
from escrowmq.store.log_files import DamagedRange, LogFile, LogFiles
from escrowmq.store.recovery import SavedState
from escrowmq.store.store import ABORT_PATH

# One damaged file can make every entry in it wrong. The first findings are enough to see that.
FINDINGS_PER_FILE_MAX: Final = 20


class Severity(enum.Enum):
    DAMAGE = "damage"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. The field names are keys of `escrowmq store check --json`."""

    severity: Severity
    where: str  # a path relative to the directory of the store
    position: int | None  # the byte in that file; None if the finding is about the whole file
    what: str


class Findings:
    """Collects findings. Of many findings in one file only the first and their number are kept."""

    def __init__(self) -> None:
        self._findings: list[Finding] = []
        self._counts: Counter[tuple[str, Severity]] = Counter()

    def add(self, severity: Severity, path: str, position: int | None, description: str) -> None:
        self._counts[path, severity] += 1
        if self._counts[path, severity] <= FINDINGS_PER_FILE_MAX:
            self._findings.append(Finding(severity, path, position, description))

    def add_damage(self, path: str, position: int | None, description: str) -> None:
        self.add(Severity.DAMAGE, path, position, description)

    def add_note(self, path: str, position: int | None, description: str) -> None:
        self.add(Severity.NOTE, path, position, description)

    def to_list(self) -> list[Finding]:
        """Return the findings, damage first, otherwise in the order in which they were added."""
        omitted = [
            Finding(severity, path, None, f"and {count - FINDINGS_PER_FILE_MAX} more of this kind")
            for (path, severity), count in self._counts.items()
            if count > FINDINGS_PER_FILE_MAX
        ]
        findings = [*self._findings, *omitted]
        return sorted(findings, key=lambda finding: finding.severity is Severity.NOTE)


@dataclass(slots=True, kw_only=True)
class CheckReport:
    """The result of a check. The field names are keys of `escrowmq store check --json`."""

    findings: list[Finding] = field(default_factory=list)
    stopped_cleanly: bool = True  # no `abort` file
    is_in_use: bool = False  # by a broker: only what its last checkpoint describes was checked
    has_lock_file: bool = False
    log_begin: int = 0
    log_end: int = 0
    log_files: int = 0
    records: int = 0
    queues: int = 0
    queue_entries: int = 0  # entries whose record exists
    index_files: int = 0
    keys: int = 0  # index entries whose record exists

    @property
    def is_clean(self) -> bool:
        return not any(finding.severity is Severity.DAMAGE for finding in self.findings)


@dataclass(frozen=True, slots=True)
class ShutdownState:
    """How the last process that used a directory left it, or that a broker is using it now."""

    was_clean: bool
    checkpoint: Checkpoint | None
    rocketmq_checkpoint: RocketMQCheckpoint | None
    saved: SavedState
    is_in_use: bool = False

    @classmethod
    def load(cls, disk: Disk, *, is_in_use: bool = False) -> ShutdownState:
        was_clean = not disk.exists(ABORT_PATH)
        saved = SavedState.load(disk, was_clean=was_clean)
        if is_in_use:
            # The marks go on while the log is read; the checkpoint says where the check ends.
            saved = replace(saved, marks=SavedMarks())
        return cls(was_clean, saved.checkpoint, load_rocketmq_checkpoint(disk), saved, is_in_use)

    @property
    def durable_end(self) -> int | None:
        """Return the log offset below which the log was durable; None if it is unknown."""
        return self.saved.durable_end

    @property
    def unchanging_end(self) -> int | None:
        """Return the log offset where a check has to end; None if nobody writes the log."""
        if not self.is_in_use or self.checkpoint is None:
            return None
        return self.checkpoint.log_offset

    def will_be_rebuilt(self, log_offset: int) -> bool:
        """Return whether the next start restores queue entry and keys of the record there."""
        checkpoint = self.checkpoint
        return not self.was_clean and checkpoint is not None and log_offset >= checkpoint.log_offset


class LogCheck:
    """Reads all records of a log and reports what is wrong with it."""

    def __init__(
        self, disk: Disk, log: LogFiles, shutdown: ShutdownState, findings: Findings
    ) -> None:
        self._disk = disk
        self._log = log
        self._shutdown = shutdown
        self._findings = findings
        self._damaged_ranges: list[DamagedRange] = []
        self.records = 0
        self._check_files()

    @property
    def begin(self) -> int:
        return self._log.begin

    @property
    def end(self) -> int:
        return self._log.end

    def locate(self, log_offset: int) -> tuple[str, int]:
        return self._log.locate(log_offset)

    @property
    def has_damage(self) -> bool:
        return bool(self._damaged_ranges)

    def scan(self) -> Iterator[StoredRecord]:
        """Yield the valid records in order, and report everything else as findings."""
        stored_ms = 0
        history = self._shutdown.saved.history(self._log.segment_bytes, queues=self._disk)
        for item in self._log.scan(history=history):
            if isinstance(item, DamagedRange):
                if self._report_damage(item):
                    break
                continue
            record = item
            self.records += 1
            if record.stored_ms < stored_ms:
                # RocketMQ stores the time of its clock even if that was set back.
                self._findings.add_note(
                    *self._log.locate(record.log_offset),
                    f"was stored at {record.stored_ms} ms, before the preceding record "
                    f"({stored_ms} ms)",
                )
            stored_ms = record.stored_ms
            try:
                check_queue_name(record.topic, record.queue_id)
            except RecordRefused as error:
                self._findings.add_damage(*self._log.locate(record.log_offset), str(error))
                continue
            yield record
        self._check_end()

    def is_damaged(self, log_offset: int) -> bool:
        """Return whether an offset is in a damaged range.

        A queue or index entry that points there may be right: its record is what is damaged.
        """
        return any(damage.begin <= log_offset < damage.end for damage in self._damaged_ranges)

    def _report_damage(self, damage: DamagedRange) -> bool:
        """Report a range without valid records. Return whether the log ends there."""
        if not self._log.has_file(damage.begin):  # `_check_files` has reported it
            self._damaged_ranges.append(damage)
            return False
        if damage.is_last and not self._shutdown.was_clean:
            self._findings.add_note(
                *self._log.locate(damage.begin),
                f"torn end ({damage.reason}): the next start cuts the log here",
            )
            return True
        self._damaged_ranges.append(damage)
        if damage.is_last and damage.first_nonzero >= damage.begin + RECORD_BYTES_MIN:
            # RocketMQ leaves the bytes that it cuts off. EscrowMQ sets them to zero.
            is_ours = self._shutdown.checkpoint is not None
            severity = Severity.DAMAGE if is_ours else Severity.NOTE
            description = f"the log ends at {damage.begin}, but not all following bytes are zero"
            self._findings.add(severity, *self._log.locate(damage.first_nonzero), description)
            return False
        following = (
            "no valid record follows" if damage.is_last else f"the log goes on at {damage.end}"
        )
        description = f"log offset {damage.begin}: {damage.reason}; {following}"
        self._findings.add_damage(*self._log.locate(damage.begin), description)
        return False

    def _check_end(self) -> None:
        checkpoint, end = self._shutdown.checkpoint, self._log.end
        durable_end = self._shutdown.durable_end
        if durable_end is not None and durable_end > end and not self.is_damaged(end):
            description = f"the log was durable up to {durable_end}, but ends at {end}"
            self._findings.add_damage(*self._log.locate(end), description)
        if checkpoint is None:
            return
        if checkpoint.log_offset < end and self._shutdown.was_clean:
            self._findings.add_note(
                CHECKPOINT_PATH,
                None,
                f"says that the log ends at {checkpoint.log_offset}, but it ends at {end}: "
                "RocketMQ has used the directory since, or this file is old",
            )

    # --- files ---------------------------------------------------------------------------------

    def _check_files(self) -> None:
        log = self._log
        for name in log.unknown_names:
            self._findings.add_note(f"{LOG_DIRECTORY}/{name}", None, "is not a segment of the log")
        for file in log.misaligned_files:
            description = f"its name is not a multiple of {log.segment_bytes}, the segment size"
            self._findings.add_damage(file.path, None, description)
        for file in log.files:
            if file.size != log.segment_bytes:
                severity = Severity.NOTE if self._is_unfinished(file) else Severity.DAMAGE
                description = f"has {file.size} bytes, not {log.segment_bytes}"
                self._findings.add(severity, file.path, None, description)
        for file, following in itertools.pairwise(log.files):
            missing = (following.base - file.base) // log.segment_bytes - 1
            if missing:
                path = f"{LOG_DIRECTORY}/{file_name(file.base + log.segment_bytes)}"
                others = f", and so are the {missing - 1} after it" if missing > 1 else ""
                self._findings.add_damage(path, None, f"is missing between two others{others}")

    def _is_unfinished(self, file: LogFile) -> bool:
        """Return whether a crash can have interrupted the creation of a segment.

        No durable record is lost that way.
        """
        if file.size > self._log.segment_bytes:
            return False
        is_last = file is self._log.files[-1]
        if self._shutdown.was_clean:
            return is_last and file.size == 0
        durable_end = self._shutdown.durable_end
        return is_last if durable_end is None else file.base + file.size >= durable_end
