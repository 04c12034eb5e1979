"""Small stores for tests: tiny files, sample records, and the check at the end of store tests."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from escrowmq.config import StoreConfig
from escrowmq.message.keys import encode_host
from escrowmq.message.properties import encode_properties
from escrowmq.message.record import NewRecord
from escrowmq.store.check import CheckReport, Severity, check_store
from escrowmq.store.disk import Disk, RealDisk
from escrowmq.store.store import MessageStore

HOST = encode_host("127.0.0.1", 10911)
NOW_MS = 1_700_000_000_000

# About ten records per log file, five entries per queue file, twenty keys per index file. Records
# have no record CRC, so that tests can damage fields that nothing else covers.
TINY = StoreConfig(
    segment_bytes=4096,
    queue_file_bytes=100,
    index_slots=7,
    index_entries=20,
    message_bytes_max=2048,
    sealed=False,
)


def sample(number: int = 0, **changes: Any) -> NewRecord:
    """Return a record that differs from the next one in queue, tag, keys and size."""
    fields: dict[str, Any] = {
        "topic": f"T{number % 2}",
        "queue_id": number % 2,
        "body": b"body %d " % number * (1 + number % 30),
        "properties": properties(
            TAGS=f"tag{number % 3}", UNIQ_KEY=f"U{number:04d}", KEYS=f"k{number} all"
        ),
        "born_ms": NOW_MS + number,
        "born_host": HOST,
    }
    return NewRecord(**{**fields, **changes})


def properties(**values: str) -> bytes:
    return encode_properties(values)


def open_store(disk: Disk, settings: StoreConfig = TINY) -> MessageStore:
    return MessageStore.open(disk, settings, store_host=HOST)


def fill(store: MessageStore, numbers: Iterable[int], *, batch: int = 3) -> None:
    """Append samples with these numbers, `batch` of them at a time."""
    all_numbers = list(numbers)
    for begin in range(0, len(all_numbers), batch):
        chunk = all_numbers[begin : begin + batch]
        store.append([sample(number) for number in chunk], now_ms=NOW_MS + chunk[0])


def locate(root: Path, log_offset: int) -> tuple[Path, int]:
    """Return the log file of a tiny store that holds this offset, and the position in the file."""
    base = log_offset - log_offset % TINY.segment_bytes
    return root / f"commitlog/{base:020d}", log_offset - base


def examine(store: Disk | str | os.PathLike[str], settings: StoreConfig = TINY) -> CheckReport:
    disk = RealDisk(store) if isinstance(store, str | os.PathLike) else store
    return check_store(disk, settings)


def assert_clean(store: Disk | str | os.PathLike[str], settings: StoreConfig = TINY) -> CheckReport:
    """Assert that a check finds no damage. Call this at the end of a store test."""
    report = examine(store, settings)
    assert not report.is_in_use, "the store is still open, so it was not checked completely"
    damage = [f for f in report.findings if f.severity is Severity.DAMAGE]
    assert not damage, "\n".join(f"{f.where} at {f.position}: {f.what}" for f in damage)
    return report
