"""A redo file: writes that must all happen, or none, over several places of several files.

They are written down first, with a checksum, and made durable; then done; a start after a crash
does them again. A redo file that does not check out was never finished, so none of its writes
had begun.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from zlib import crc32

import msgspec

from escrowmq.store.disk import Disk, parent, read_file, write_file

PATH: Final = "escrowmq.redo"
_CRC_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class FileChange:
    path: str
    size: int  # of the file, if it has to be made
    writes: list[tuple[int, bytes]]  # position, bytes


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
            file.sync()
        finally:
            file.close()
        if made:
            disk.sync_directory(parent(change.path))
