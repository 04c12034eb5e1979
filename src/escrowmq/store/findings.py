"""What an examination of a store found: where, and how bad.

DAMAGE  what was written is not there, or not as it was written
NOTE    worth knowing, and nothing is lost: the next start puts it right, or it was never ours
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

PER_FILE_MAX: Final = 20  # one broken file may break every entry in it; nobody reads a million


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
        self._kept: list[Finding] = []
        self._seen: Counter[tuple[str, Severity]] = Counter()

    def add(self, severity: Severity, where: str, position: int | None, what: str) -> None:
        self._seen[where, severity] += 1
        if self._seen[where, severity] <= PER_FILE_MAX:
            self._kept.append(Finding(severity, where, position, what))

    def damage(self, where: str, position: int | None, what: str) -> None:
        self.add(Severity.DAMAGE, where, position, what)

    def note(self, where: str, position: int | None, what: str) -> None:
        self.add(Severity.NOTE, where, position, what)

    def all(self) -> list[Finding]:
        """Damage first, each kind in the order of its places."""
        left_out = [
            Finding(severity, where, None, f"and {count - PER_FILE_MAX} more of this kind")
            for (where, severity), count in self._seen.items()
            if count > PER_FILE_MAX
        ]
        found = [*self._kept, *left_out]
        return sorted(found, key=lambda finding: finding.severity is Severity.NOTE)


@dataclass(slots=True, kw_only=True)
class Report:
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
