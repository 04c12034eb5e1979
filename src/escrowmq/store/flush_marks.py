"""Flush marks: how far the log was durable when the last process stopped.

Each flush of the log writes the log offset that it has reached into a small file, before anything
that waited for it is acknowledged. So recovery can tell what was durable and is damaged now from
what a crash has torn. A mark is also a record boundary: an append never ends inside a record.

    escrowmq.flushed    header 512 | slots, 16 bytes each, used in turn

    header   magic 8 | boot id, 64 | CRC 4 | zeros
    slot     log offset 8 | CRC 4 | zeros 4           an unused slot is all zeros

The marks are synced by the timed flush and by checkpoints and not by every group commit, which
would cost a second fsync. After a process was killed they are exact, because the kernel still has
what was written. After a power cut they may be as old as the last sync, never wrong: a mark is
written only after the flush that it describes.

The boot id changes whenever the machine starts. If it is the same, there was no power cut, and the
log has everything that was ever written to it. So only its very end can be torn.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from zlib import crc32

from escrowmq.errors import StoreError
from escrowmq.store.damage import DamageKind, DamageReports
from escrowmq.store.disk import Disk, File, read_file, replace_file

MARKS_PATH: Final = "escrowmq.flushed"
HEADER_BYTES: Final = 512
SLOT_COUNT: Final = 2048  # more than the group commits between two checkpoints
_MAGIC: Final = b"FLUSHED1"
_HEADER: Final = struct.Struct(">8s64sI")
_SLOT: Final = struct.Struct(">QII")
_OFFSET: Final = struct.Struct(">Q")
_FILE_BYTES: Final = HEADER_BYTES + SLOT_COUNT * _SLOT.size


class FlushMarks:
    """The marks of this process. Several threads may add marks."""

    def __init__(self, disk: Disk, log_end: int) -> None:
        """Replace the file of the last process. Everything below `log_end` must be durable."""
        # Written in full length, so that no later mark needs space on the disk.
        content = _encode_header(disk.boot_id()) + _encode_slot(log_end)
        replace_file(disk, MARKS_PATH, content.ljust(_FILE_BYTES, b"\0"))
        self._file: File = disk.open(MARKS_PATH)
        self._numbers = itertools.count(1)
        self._unsynced_count = 0

    def add(self, log_end: int) -> None:
        """Record that everything below a record boundary is durable. Raises StoreError."""
        number = next(self._numbers) % SLOT_COUNT  # `next` of a count is atomic
        self._file.write_at(HEADER_BYTES + number * _SLOT.size, _encode_slot(log_end))
        self._unsynced_count += 1

    @property
    def needs_sync(self) -> bool:
        return self._unsynced_count > 0

    def sync(self) -> None:
        """Make the marks durable. Raises StoreError."""
        self._unsynced_count = 0
        self._file.sync()

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class SavedMarks:
    """What the last process has left."""

    log_offsets: Sequence[int] = ()  # in rising order
    is_same_boot: bool = False
    invalid_count: int = 0  # slots, and the header, that hold something else than a mark
    invalid_position: int = -1  # of the first of them

    @property
    def end(self) -> int:
        """Return the highest log offset below which everything was durable; -1 if unknown."""
        return self.log_offsets[-1] if self.log_offsets else -1

    @property
    def are_damaged(self) -> bool:
        """Return whether the marks are not what the last process has written.

        A power cut may have torn marks that were not synced, and only the header tells whether
        there was one. So invalid marks of another boot are no damage; an invalid header always is.
        """
        return self.invalid_count > 0 and (self.is_same_boot or self.invalid_position == 0)


def load_marks(disk: Disk) -> SavedMarks:
    """Read the marks of the last process. There are none if it has removed the file."""
    try:
        content = read_file(disk, MARKS_PATH)
    except StoreError:  # without marks, more may look like a torn end; the log is still read
        content = b""
    if content is None:
        return SavedMarks()
    boot_id = _decode_header(content)
    log_offsets: set[int] = set()
    invalid = [] if boot_id is not None else [0]
    slots = content[HEADER_BYTES:]
    slots = slots[: len(slots) - len(slots) % _SLOT.size]
    # Most starts find few marks in thousands of slots: do not look at the unused slots at the end.
    used_bytes = len(slots.rstrip(b"\0"))
    slots = slots[: used_bytes + -used_bytes % _SLOT.size]
    for number, (log_offset, crc, zero) in enumerate(_SLOT.iter_unpack(slots)):
        if crc == _slot_crc(log_offset):
            log_offsets.add(log_offset)
        if zero or (crc != _slot_crc(log_offset) and (log_offset or crc)):
            invalid.append(HEADER_BYTES + number * _SLOT.size)
    is_same_boot = bool(boot_id) and boot_id == disk.boot_id()
    position = invalid[0] if invalid else -1
    return SavedMarks(sorted(log_offsets), is_same_boot, len(invalid), position)


def report_damaged_marks(disk: Disk, damage: DamageReports) -> None:
    """Report the marks of the last process if they are not what it has written."""
    marks = load_marks(disk)
    if marks.are_damaged:
        description = f"{marks.invalid_count} parts of it are invalid and were not used"
        place = f"{MARKS_PATH} position={marks.invalid_position}"
        damage.add(DamageKind.FLUSH_MARKS, place, description, is_repaired=True)


def _encode_header(boot_id: str) -> bytes:
    encoded = boot_id.encode()[:64].ljust(64, b"\0")
    return _HEADER.pack(_MAGIC, encoded, crc32(_MAGIC + encoded)).ljust(HEADER_BYTES, b"\0")


def _decode_header(content: bytes) -> str | None:
    """Return the boot id of a file; None if its header is invalid."""
    if len(content) < HEADER_BYTES:
        return None
    magic, encoded, crc = _HEADER.unpack_from(content)
    has_rest = any(content[_HEADER.size : HEADER_BYTES])
    if magic != _MAGIC or crc != crc32(magic + encoded) or has_rest:
        return None
    return str(encoded.rstrip(b"\0"), "ascii", "replace")


def _encode_slot(log_offset: int) -> bytes:
    return _SLOT.pack(log_offset, _slot_crc(log_offset), 0)


def _slot_crc(log_offset: int) -> int:
    # Never 0: a slot of zeros was not used yet.
    return crc32(_OFFSET.pack(log_offset)) or 1
