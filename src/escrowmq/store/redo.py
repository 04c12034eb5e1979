"""A redo file: writes that must all happen, or none, over several places of several files.

They are written down first, with a checksum, and made durable; then done; a start after a crash
does them again. A redo file that does not check out was never finished, so none of its writes
had begun.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from dataclasses import dataclass
from typing import Final
from zlib import crc32

import msgspec

from escrowmq.store.disk import Disk, File, parent, read_file, write_file

PATH: Final = "escrowmq.redo"
_CRC_BYTES: Final = 4
_WORD_AT: Final = struct.Struct(">II")
_pack_word = struct.Struct(">I").pack_into
_PAGE_BYTES: Final = 4096


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
    """One write for all words of a page: they are many, and a call each would be slow."""
    pages: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for pair in _WORD_AT.iter_unpack(words):
        pages[pair[0] // _PAGE_BYTES].append(pair)
    for page in sorted(pages):
        begin = page * _PAGE_BYTES
        content = bytearray(file.view()[begin : begin + _PAGE_BYTES])
        for position, word in pages[page]:
            _pack_word(content, position - begin, word)
        file.write_at(begin, content)
