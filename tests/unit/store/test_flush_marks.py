"""Flush marks are found in any slot, and everything else in a slot is reported."""

from __future__ import annotations

import pytest

from escrowmq.store.flush_marks import (
    HEADER_BYTES,
    MARKS_PATH,
    SLOT_COUNT,
    FlushMarks,
    load_marks,
)
from escrowmq.testing.disks import MemoryDisk

SLOT_BYTES = 16
LAST_SLOT = HEADER_BYTES + (SLOT_COUNT - 1) * SLOT_BYTES


@pytest.fixture
def disk() -> MemoryDisk:
    """Return a disk with the marks 100, 200 and 300 in the first three slots."""
    disk = MemoryDisk()
    marks = FlushMarks(disk, 100)
    for log_end in (200, 300):
        marks.add(log_end)
    marks.close()
    return disk


def test_marks_are_found_around_unused_slots(disk: MemoryDisk) -> None:
    assert load_marks(disk).log_offsets == [100, 200, 300]
    file = disk.open(MARKS_PATH)
    first_slot = file.read_at(HEADER_BYTES, SLOT_BYTES)
    file.write_at(HEADER_BYTES, b"\0" * SLOT_BYTES)
    file.write_at(LAST_SLOT, first_slot)
    saved = load_marks(disk)
    assert (saved.log_offsets, saved.invalid_count) == ([100, 200, 300], 0)


def test_marks_that_fill_all_slots_are_found() -> None:
    disk = MemoryDisk()
    marks = FlushMarks(disk, 0)
    for log_end in range(1, SLOT_COUNT + 2):  # the last two replace the first two
        marks.add(log_end)
    assert load_marks(disk).log_offsets == list(range(2, SLOT_COUNT + 2))


@pytest.mark.parametrize("slot", [HEADER_BYTES + 3 * SLOT_BYTES, LAST_SLOT], ids=["next", "last"])
@pytest.mark.parametrize("position", range(SLOT_BYTES))
def test_a_wrong_byte_in_an_unused_slot_is_reported(
    disk: MemoryDisk, slot: int, position: int
) -> None:
    disk.open(MARKS_PATH).write_at(slot + position, b"\x01")
    saved = load_marks(disk)
    assert saved.log_offsets == [100, 200, 300]
    assert (saved.invalid_count, saved.invalid_position) == (1, slot)
