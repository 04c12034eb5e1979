"""Examine the log: every record, the files' names and lengths, and how the log ends.

A place that is no record is judged by how the last owner stopped:

    below what our checkpoint calls durable                damage
    behind it, and there was no time for a clean stop      a torn end; the next start cuts it off
    behind it, after a clean stop                          damage

What an examination of a store found: where, and how bad.

DAMAGE  what was written is not there, or not as it was written
NOTE    worth knowing, and nothing is lost: the next start puts it right, or it was never ours
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from escrowmq.errors import RecordRefused
from escrowmq.message.record import RECORD_BYTES_MIN, StoredRecord
from escrowmq.store.checkpoint import (
    CHECKPOINT_PATH,
    Checkpoint,
    RocketMQCheckpoint,
    load_checkpoint,
    load_rocketmq_checkpoint,
)
from escrowmq.store.commit_log import LOG_DIRECTORY, file_name
from escrowmq.store.consume_queue import check_queue_name
from escrowmq.store.disk import Disk
from escrowmq.store.log_files import DamagedRange, LogFile, LogFiles
from escrowmq.store.store import ABORT_PATH

FINDINGS_PER_FILE_MAX: Final = (
    20  # one broken file may break every entry in it; nobody reads a million
)


class Severity(enum.Enum):
    DAMAGE = "damage"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    severity: Severity
    where: str  # a path below the store's directory
    position: int | None  # the byte in that file; None if it is about the file as a whole
    what: str


class Findings:
    """Gathers findings; of the many that one file may have, the first few and their number."""

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
        """Damage first, each kind in the order of its places."""
        left_out = [
            Finding(severity, where, None, f"and {count - FINDINGS_PER_FILE_MAX} more of this kind")
            for (where, severity), count in self._counts.items()
            if count > FINDINGS_PER_FILE_MAX
        ]
        found = [*self._findings, *left_out]
        return sorted(found, key=lambda finding: finding.severity is Severity.NOTE)


@dataclass(slots=True, kw_only=True)
class CheckReport:
    findings: list[Finding] = field(default_factory=list)
    stopped_cleanly: bool = True  # no `abort` file
    has_lock_file: bool = False
    log_begin: int = 0
    log_end: int = 0
    log_files: int = 0
    records: int = 0
    queues: int = 0
    queue_entries: int = 0  # that speak of a record which is there
    index_files: int = 0
    keys: int = 0  # that lead to a record which is there

    @property
    def is_clean(self) -> bool:
        return not any(finding.severity is Severity.DAMAGE for finding in self.findings)


@dataclass(frozen=True, slots=True)
class ShutdownState:
    """How the last owner of a directory left it."""

    was_clean: bool
    checkpoint: Checkpoint | None
    rocketmq_checkpoint: RocketMQCheckpoint | None

    @classmethod
    def load(cls, disk: Disk) -> ShutdownState:
        return cls(
            not disk.exists(ABORT_PATH), load_checkpoint(disk), load_rocketmq_checkpoint(disk)
        )

    @property
    def durable_end(self) -> int | None:
        """Everything below was on disk; None if nobody said."""
        return None if self.checkpoint is None else self.checkpoint.log_offset

    def will_be_rebuilt(self, log_offset: int) -> bool:
        """Whether the next start derives anew what is known of the record there."""
        return (
            not self.was_clean and self.durable_end is not None and log_offset >= self.durable_end
        )


class LogCheck:
    def __init__(self, log: LogFiles, shutdown: ShutdownState, findings: Findings) -> None:
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
        """Every good record, in order; what is not good becomes a finding."""
        stored_ms = 0
        for met in self._log.scan():
            if isinstance(met, DamagedRange):
                if self._report_damage(met):
                    break
                continue
            self.records += 1
            if met.stored_ms < stored_ms:
                # RocketMQ takes its clock as it is, also when somebody sets it back.
                self._findings.add_note(
                    *self._log.locate(met.log_offset),
                    f"stored at {met.stored_ms} ms, before the record in front of it ({stored_ms})",
                )
            stored_ms = met.stored_ms
            try:
                check_queue_name(met.topic, met.queue_id)
            except RecordRefused as error:
                self._findings.add_damage(*self._log.locate(met.log_offset), str(error))
                continue
            yield met
        self._check_end()

    def is_damaged(self, log_offset: int) -> bool:
        """Whether a record may have been there once: who points there is not to blame."""
        return any(place.begin <= log_offset < place.end for place in self._damaged_ranges)

    def _report_damage(self, damage: DamagedRange) -> bool:
        if not self._log.has_file(damage.begin):  # a finding already
            self._damaged_ranges.append(damage)
            return False
        if self._is_cut_by_recovery(damage):
            self._findings.add_note(
                *self._log.locate(damage.begin),
                f"torn end ({damage.reason}): the next start cuts the log here",
            )
            return True
        self._damaged_ranges.append(damage)
        if damage.is_last and damage.first_nonzero >= damage.begin + RECORD_BYTES_MIN:
            # RocketMQ does not wipe what it cuts off; we do.
            ours = self._shutdown.checkpoint is not None
            severity = Severity.DAMAGE if ours else Severity.NOTE
            what = f"the log ends at {damage.begin}, and what follows is not all zeros"
            self._findings.add(severity, *self._log.locate(damage.first_nonzero), what)
            return False
        goes_on = "nothing good follows" if damage.is_last else f"the log goes on at {damage.end}"
        what = f"log offset {damage.begin}: {damage.reason}; {goes_on}"
        self._findings.add_damage(*self._log.locate(damage.begin), what)
        return False

    def _is_cut_by_recovery(self, damage: DamagedRange) -> bool:
        if self._shutdown.was_clean:
            return False
        if self._shutdown.durable_end is not None:
            return damage.begin >= self._shutdown.durable_end
        # Nobody said what was durable. Files are filled one after the other, so only the last
        # can have a torn end with good records behind it.
        last_base = self._log.files[-1].base
        return damage.is_last or damage.begin >= last_base

    def _check_end(self) -> None:
        checkpoint, end = self._shutdown.checkpoint, self._log.end
        if checkpoint is None:
            return
        if checkpoint.log_offset > end and not self.is_damaged(end):
            what = f"was durable up to {checkpoint.log_offset}, and ends at {end}"
            self._findings.add_damage(*self._log.locate(end), what)
        if checkpoint.log_offset < end and self._shutdown.was_clean:
            what = f"speaks of a log that ends at {checkpoint.log_offset}; it ends at {end}"
            self._findings.add_note(
                CHECKPOINT_PATH, None, f"{what}: another broker wrote, or this file is old"
            )

    # --- files ---------------------------------------------------------------------------------

    def _check_files(self) -> None:
        log = self._log
        for name in log.unknown_names:
            self._findings.add_note(f"{LOG_DIRECTORY}/{name}", None, "is not a file of the log")
        for file in log.misaligned_files:
            what = f"its name is no multiple of {log.segment_bytes}, the length of the files"
            self._findings.add_damage(file.path, None, what)
        for file in log.files:
            if file.size != log.segment_bytes:
                severity = Severity.NOTE if self._is_unfinished(file) else Severity.DAMAGE
                what = f"has {file.size} bytes, not {log.segment_bytes}"
                self._findings.add(severity, file.path, None, what)
        for before, after in itertools.pairwise(log.files):
            missing = (after.base - before.base) // log.segment_bytes - 1
            if missing:
                path = f"{LOG_DIRECTORY}/{file_name(before.base + log.segment_bytes)}"
                more = f", and so are {missing - 1} behind it" if missing > 1 else ""
                self._findings.add_damage(path, None, f"is missing between two others{more}")

    def _is_unfinished(self, file: LogFile) -> bool:
        """A crash came while it was made: no record that was durable can be lost that way."""
        if file.size > self._log.segment_bytes:
            return False
        is_last = file is self._log.files[-1]
        if self._shutdown.was_clean:
            return is_last and file.size == 0
        durable_end = self._shutdown.durable_end
        return is_last if durable_end is None else file.base + file.size >= durable_end
