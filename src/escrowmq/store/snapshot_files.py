"""Snapshots: files that only shorten a start, because everything in them follows from the log.

    CRC of the data 4 | data

A snapshot that is damaged or cannot be read is reported and not used. What is in the data is the
business of its owner in the broker.
"""

from __future__ import annotations

from typing import Final
from zlib import crc32

from escrowmq.errors import StoreError
from escrowmq.store.damage import DamageKind, DamageReports
from escrowmq.store.disk import Disk, read_file, replace_file

TRANSACTIONS_PATH: Final = "escrowmq.escrow"  # the states of all halves
DELAYS_PATH: Final = "escrowmq.delays"  # which timers are delivered
SNAPSHOT_PATHS: Final = (TRANSACTIONS_PATH, DELAYS_PATH)
_CRC_BYTES: Final = 4


def save_snapshot(disk: Disk, path: str, data: bytes) -> None:
    """Replace a snapshot, durably and atomically. Raises StoreError."""
    replace_file(disk, path, crc32(data).to_bytes(_CRC_BYTES, "big") + data)


def load_snapshot(disk: Disk, path: str, damage: DamageReports, consequence: str) -> bytes | None:
    """Return the data of a snapshot; None if there is none that can be used.

    `consequence`: what the start does instead, for the report.
    """
    data, problem = _read(disk, path)
    if problem is not None:
        damage.add(DamageKind.SNAPSHOT, path, f"{problem}; {consequence}", is_repaired=True)
    return data


def snapshot_problem(disk: Disk, path: str) -> str | None:
    """Return what is wrong with a snapshot; None if it is right, or if there is none."""
    return _read(disk, path)[1]


def _read(disk: Disk, path: str) -> tuple[bytes | None, str | None]:
    """Return the data, if it can be used, and what is wrong with the file otherwise."""
    try:
        content = read_file(disk, path)
    except StoreError as error:
        return None, str(error)
    if content is None:
        return None, None
    data = content[_CRC_BYTES:]
    if not data or crc32(data) != int.from_bytes(content[:_CRC_BYTES], "big"):
        return None, "has a wrong checksum"
    return data, None
