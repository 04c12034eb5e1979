"""Create small stores on disk, damage them, and read the findings of a check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from escrowmq.message.record import StoredRecord
from escrowmq.store.check import CheckReport, Finding, Severity
from escrowmq.store.disk import RealDisk
from escrowmq.store.log_files import DamagedRange, LogFiles
from tests.support.stores import examine, fill, open_store

RECORDS = 60


def make_store(path: Path, *, killed: bool = False) -> Path:
    """Create a store with several files of each kind and a checkpoint half-way."""
    store = open_store(RealDisk(path))
    fill(store, range(RECORDS // 2))
    store.checkpoint()
    fill(store, range(RECORDS // 2, RECORDS))
    store.flush()
    store.abandon() if killed else store.close()
    return path


def log_records(store: Path) -> list[StoredRecord]:
    """Return the records in the log files of a store that is not open."""
    return [item for item in LogFiles(RealDisk(store)).scan() if not isinstance(item, DamagedRange)]


def log_end(store: Path) -> int:
    last = log_records(store)[-1]
    return last.log_offset + last.size


def edit_file(path: Path, position: int, edit: Callable[[bytes], bytes] | bytes) -> None:
    """Write bytes at a position of a file, or change the byte there by a function."""
    with path.open("r+b") as file:
        file.seek(position)
        new = edit if isinstance(edit, bytes) else edit(file.read(1))
        file.seek(position)
        file.write(new)


def flip(byte: bytes) -> bytes:
    return bytes([byte[0] ^ 1])


def damage(report: CheckReport) -> list[Finding]:
    return [finding for finding in report.findings if finding.severity is Severity.DAMAGE]


def notes(report: CheckReport) -> list[Finding]:
    return [finding for finding in report.findings if finding.severity is Severity.NOTE]


def only_damage(store: Path) -> Finding:
    """Check a store and return the one damage that the check finds."""
    findings = damage(examine(store))
    assert len(findings) == 1, findings
    return findings[0]


def relative_name(store: Path, path: Path) -> str:
    return str(path.relative_to(store))


def index_files(store: Path) -> list[Path]:
    return sorted((store / "index").iterdir())
