"""Checksums of an index file, kept in a file of their own: escrowmq.index/<name of the index file>.

The index file itself has no room for them: RocketMQ reads it. The slots are covered by one sum for
each page of 1024, because a flush changes single slots anywhere, and a sum can follow such a change
without reading the page. The entries are only ever appended: one CRC for each block of 1024. The
header is stored as a copy.

    checksum 4 | header 40 | number of sums 4, of CRCs 4 | sums 8 each | CRCs 4 each
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from escrowmq.message.record import crc32

CHECKSUM_DIRECTORY: Final = "escrowmq.index"
SLOTS_PER_SUM: Final = 1024
ENTRIES_PER_CRC: Final = 1024
_HEAD: Final = struct.Struct(">I40sII")
_UNUSED_ENTRY: Final = bytes(20)  # entries are numbered from 1


@dataclass(slots=True)
class IndexChecksums:
    header: bytes
    slot_sums: array[int]
    entry_crcs: array[int]  # that of the last block covers the entries that it has

    @classmethod
    def empty(cls, slot_count: int) -> Self:
        """Return the checksums of a new file."""
        sums = array("q", bytes(8 * -(-slot_count // SLOTS_PER_SUM)))
        return cls(b"", sums, array("I", [crc32(_UNUSED_ENTRY)]))

    @classmethod
    def of_content(cls, header: bytes, slots: bytes, entries: bytes) -> Self:
        """Return the checksums of a file that has none. `entries` begin with the unused one."""
        page, block = SLOTS_PER_SUM * 4, ENTRIES_PER_CRC * len(_UNUSED_ENTRY)
        sums = [sum_slots(slots[begin : begin + page]) for begin in range(0, len(slots), page)]
        crcs = [crc32(entries[begin : begin + block]) for begin in range(0, len(entries), block)]
        return cls(header, array("q", sums), array("I", crcs))

    def copy(self) -> IndexChecksums:
        return IndexChecksums(self.header, self.slot_sums[:], self.entry_crcs[:])

    def change_sums(self, changes: Iterable[tuple[int, int]]) -> None:
        """Follow a change of slots: pages, and by how much their sums change."""
        sums = self.slot_sums
        for page, difference in changes:
            sums[page] += difference

    def add_entries(self, first_number: int, entries: bytes) -> None:
        """Follow entries that are appended."""
        width, written, crcs = len(_UNUSED_ENTRY), 0, self.entry_crcs
        while written < len(entries):
            block, in_block = divmod(first_number + written // width, ENTRIES_PER_CRC)
            part = entries[written : written + (ENTRIES_PER_CRC - in_block) * width]
            if in_block:
                crcs[block] = crc32(part, crcs[block])
            else:
                crcs.append(crc32(part))
            written += len(part)

    def encode(self) -> bytes:
        sums, crcs = self.slot_sums[:], self.entry_crcs[:]
        if sys.byteorder == "little":
            sums.byteswap()
            crcs.byteswap()
        head = _HEAD.pack(0, self.header, len(sums), len(crcs))
        data = b"".join((head[4:], sums.tobytes(), crcs.tobytes()))
        return crc32(data).to_bytes(4, "big") + data

    @classmethod
    def decode(cls, content: bytes) -> Self | None:
        """Return the checksums in a file; None if they are damaged."""
        if len(content) < _HEAD.size:
            return None
        checksum, header, sum_count, crc_count = _HEAD.unpack_from(content)
        sums_end = _HEAD.size + 8 * sum_count
        end = sums_end + 4 * crc_count
        if len(content) < end or crc32(content[4:end]) != checksum:
            return None
        sums, crcs = array("q", content[_HEAD.size : sums_end]), array("I", content[sums_end:end])
        if sys.byteorder == "little":
            sums.byteswap()
            crcs.byteswap()
        return cls(header, sums, crcs)


def sum_slots(page: bytes) -> int:
    """Return the sum of the slots of a page."""
    slots = array("I", page)
    if sys.byteorder == "little":
        slots.byteswap()
    return sum(slots)
