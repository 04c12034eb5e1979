"""A redo file: writes that must all happen, or none, over several places of several files.

They are written down first, with a checksum, and made durable; then done; a start after a crash
does them again. A redo file that does not check out was never finished, so none of its writes
had begun.
"""

from __future__ import annotations

import sys
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from zlib import crc32

import msgspec

from escrowmq.store.disk import Disk, File, parent, read_file, write_file

PATH: Final = "escrowmq.redo"
_CRC_BYTES: Final = 4
_WORD_BYTES: Final = 4
_PAGE_BYTES: Final = 4096
_CLOSE_BYTES: Final = 256  # from one word to the next: sixteen of them in a page


@dataclass(frozen=True, slots=True)
class FileChange:
    path: str
    size: int  # of the file, if it has to be made
    writes: list[tuple[int, bytes]]  # position, bytes
    words: bytes = b""  # many four-byte writes, close together: position 4, word 4, each


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[FileChange])


def write_redo(disk: Disk, changes: list[FileChange]) -> None:
    data = _encoder.encode(changes)
    write_file(disk, PATH, crc32(data).to_bytes(_CRC_BYTES, "big") + data)


def load_redo(disk: Disk) -> list[FileChange]:
    content = read_file(disk, PATH) or b""
    data = content[_CRC_BYTES:]
    if len(content) <= _CRC_BYTES or crc32(data) != int.from_bytes(content[:_CRC_BYTES], "big"):
        return []
    return _decoder.decode(data)


def apply_changes(disk: Disk, changes: list[FileChange]) -> None:
    for change in changes:
        made = not disk.exists(change.path)
        file = disk.create(change.path, change.size) if made else disk.open(change.path)
        try:
            if file.size < change.size:  # a crash while it was made
                file.resize(change.size)
            for position, data in change.writes:
                file.write_at(position, data)
            _write_words(file, change.words)
            file.sync()
        finally:
            file.close()
        if made:
            disk.sync_directory(parent(change.path))


def _write_words(file: File, words: bytes) -> None:
    """They are many, and a call for each would be slow: those of a page are one write; where most
    pages have some, all are."""
    if not words:
        return
    pairs = array("I", words)
    positions, values = pairs[0::2], pairs[1::2]
    if sys.byteorder == "little":
        positions.byteswap()  # the values stay as they lie in the file
    begin, end = min(positions), max(positions) + _WORD_BYTES
    if end - begin <= len(positions) * _CLOSE_BYTES:
        _write_among(file, begin, end, positions, values)
        return
    pages: defaultdict[int, list[int]] = defaultdict(list)
    for at, position in enumerate(positions):
        pages[position // _PAGE_BYTES].append(at)
    for page, places in sorted(pages.items()):
        first = page * _PAGE_BYTES
        those, theirs = [positions[at] for at in places], [values[at] for at in places]
        _write_among(file, first, first + _PAGE_BYTES, those, theirs)


def _write_among(
    file: File, begin: int, end: int, positions: Sequence[int], values: Sequence[int]
) -> None:
    """These words, and what lies between them as it is."""
    content = bytearray(file.view()[begin:end])
    words = memoryview(content)[: len(content) // _WORD_BYTES * _WORD_BYTES].cast("I")
    for position, value in zip(positions, values, strict=True):
        words[(position - begin) // _WORD_BYTES] = value
    file.write_at(begin, content)
