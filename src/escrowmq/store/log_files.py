"""The segments of a log, opened for reading only, with whatever is wrong with them.

Unlike `CommitLog` this opens any directory. It finds out how long the segments are, tolerates
segments that are missing or cut short, and continues behind damaged bytes. It takes no lock and
changes nothing, so it can read a log while a broker writes it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from escrowmq.errors import CorruptRecord
from escrowmq.message.record import (
    BLANK,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    LogOffset,
    StoredRecord,
    decode_record,
)
from escrowmq.store.commit_log import LOG_DIRECTORY, file_name, is_file_name
from escrowmq.store.disk import BufferedFiles, Disk

# `first_nonzero` tests every byte up to here, and then a sample at the start of each interval.
FULL_SCAN_BYTES: Final = 8 << 20
_SAMPLE_BYTES: Final = 4096
_SAMPLE_INTERVAL_BYTES: Final = 16 << 20
_CHUNK_BYTES: Final = 256 << 10
_RECORD_BYTES: Final = 4096  # more than most records have
_ZEROS: Final = bytes(_CHUNK_BYTES)
_MAGIC_POSITION: Final = 4  # in a record
_MAGIC_PATTERN = re.compile(
    b"|".join(re.escape(magic.to_bytes(4, "big")) for magic in (MAGIC_V1, MAGIC_V2))
)


@dataclass(frozen=True, slots=True)
class LogFile:
    base: int
    size: int

    @property
    def path(self) -> str:
        return f"{LOG_DIRECTORY}/{file_name(self.base)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedRange:
    """A range of the log without valid records."""

    begin: LogOffset
    end: LogOffset  # of the next valid record, or the end of the files
    first_nonzero: LogOffset  # the first byte that is not zero
    reason: str
    is_last: bool  # no valid record follows


class LogFiles:
    """All segments of a log. `end` is behind the last valid record that `scan` has yielded."""

    def __init__(self, disk: Disk) -> None:
        self._open_files = BufferedFiles(disk, files_max=2)
        names = disk.names(LOG_DIRECTORY)
        self.unknown_names = [name for name in names if not is_file_name(name)]
        files = [
            LogFile(int(name), file_size(disk, f"{LOG_DIRECTORY}/{name}"))
            for name in names
            if is_file_name(name)
        ]
        self.segment_bytes = most_common_size(file.size for file in files)
        self.misaligned_files = [
            file for file in files if self.segment_bytes and file.base % self.segment_bytes
        ]
        self.files = [file for file in files if file not in self.misaligned_files]
        self._by_base = {file.base: file for file in self.files}
        self.begin = LogOffset(self.files[0].base if self.files else 0)
        self.files_end = LogOffset(self.files[-1].base + self.segment_bytes if self.files else 0)
        self.end = self.begin

    def close(self) -> None:
        self._open_files.close()

    def locate(self, log_offset: int) -> tuple[str, int]:
        """Return the path of the file for a log offset, and the position in it.

        The file need not exist.
        """
        position = log_offset % self.segment_bytes if self.segment_bytes else 0
        return f"{LOG_DIRECTORY}/{file_name(log_offset - position)}", position

    def has_file(self, log_offset: int) -> bool:
        return log_offset - log_offset % self.segment_bytes in self._by_base

    def scan(self, begin: int = 0) -> Iterator[StoredRecord | DamagedRange]:
        """Yield records and damaged ranges in order. `begin` must be a record boundary."""
        log_offset = LogOffset(max(begin, self.begin))
        while log_offset < self.files_end:
            file = self._by_base.get(log_offset - log_offset % self.segment_bytes)
            if file is not None and self._is_blank(file, log_offset):
                log_offset = LogOffset(file.base + self.segment_bytes)
                continue
            try:
                record = self._record_at(file, log_offset)
            except CorruptRecord as error:
                damage = self._find_damage(log_offset, error.reason)
                if damage is None:
                    return
                yield damage
                if damage.is_last:
                    return
                log_offset = damage.end
            else:
                log_offset = self.end = LogOffset(log_offset + record.size)
                yield record

    def next_valid_record(self, log_offset: int) -> LogOffset | None:
        """Return the offset of the first valid record at or above `log_offset`, or None."""
        for file in self.files:
            if file.base + self.segment_bytes > log_offset:
                record_offset = self._find_valid_record(file, max(0, log_offset - file.base))
                if record_offset is not None:
                    return record_offset
        return None

    def _read(self, file: LogFile, position: int, size: int) -> bytes:
        return self._open_files.read(file.path, position, min(size, self.segment_bytes - position))

    def _record_at(self, file: LogFile | None, log_offset: LogOffset) -> StoredRecord:
        if file is None:
            raise CorruptRecord(log_offset, "the file is missing")
        return self._decode(file, log_offset - file.base)

    def _decode(self, file: LogFile, position: int) -> StoredRecord:
        data = self._read(file, position, _RECORD_BYTES)
        size = int.from_bytes(data[:4], "big", signed=True)
        if len(data) < size <= self.segment_bytes - position:
            data = self._read(file, position, size)
        return decode_record(memoryview(data), 0, LogOffset(file.base + position))

    def _is_blank(self, file: LogFile, log_offset: LogOffset) -> bool:
        position = log_offset - file.base
        data = self._read(file, position, BLANK.size)
        if len(data) < BLANK.size:
            return False
        remaining, magic = BLANK.unpack(data)
        return bool(magic == MAGIC_BLANK and remaining == self.segment_bytes - position)

    def _find_damage(self, log_offset: LogOffset, reason: str) -> DamagedRange | None:
        """Return the damage that begins here.

        Return None if only zeros follow: this is the regular end of the log.
        """
        nonzero_offset: int | None = None
        following: LogOffset | None = None
        for file in self.files:
            if file.base + self.segment_bytes <= log_offset:
                continue
            nonzero = first_nonzero(
                self._open_files, file.path, max(0, log_offset - file.base), self.segment_bytes
            )
            if nonzero is None:
                continue
            if nonzero_offset is None:
                nonzero_offset = file.base + nonzero
            following = self._find_valid_record(file, max(0, log_offset + 1 - file.base))
            if following is not None:
                break
        if nonzero_offset is None:
            return None
        return DamagedRange(
            begin=log_offset,
            end=self.files_end if following is None else following,
            first_nonzero=LogOffset(nonzero_offset),
            reason=reason,
            is_last=following is None,
        )

    def _find_valid_record(self, file: LogFile, position: int) -> LogOffset | None:
        for begin in range(position + _MAGIC_POSITION, self.segment_bytes, _CHUNK_BYTES):
            # Chunks overlap by 3 bytes, or a magic across their boundary would be missed.
            chunk = self._read(file, begin, _CHUNK_BYTES + 3)
            for match in _MAGIC_PATTERN.finditer(chunk):
                try:
                    return self._decode(file, begin + match.start() - _MAGIC_POSITION).log_offset
                except CorruptRecord:
                    continue
        return None


def first_nonzero(
    files: BufferedFiles,
    path: str,
    position: int,
    end: int,
    full_scan_bytes: int = FULL_SCAN_BYTES,
) -> int | None:
    """Return the position of the first byte that is not zero; None if there is none.

    What a crash leaves is right behind the end of the log, so the first bytes are all tested. The
    remaining part of a segment is usually a hole of a sparse file, of which only samples are
    tested: to read all of it would fill the memory with pages of zeros.
    """
    end = min(end, files.size(path))
    full_end = min(end, position + full_scan_bytes)
    chunks = [
        (begin, min(begin + _CHUNK_BYTES, full_end))
        for begin in range(position, full_end, _CHUNK_BYTES)
    ]
    chunks += [
        (begin, begin + _SAMPLE_BYTES) for begin in range(full_end, end, _SAMPLE_INTERVAL_BYTES)
    ]
    for begin, chunk_end in chunks:
        chunk = files.read(path, begin, chunk_end - begin)
        if chunk != _ZEROS[: len(chunk)]:
            return begin + len(chunk) - len(chunk.lstrip(b"\0"))
    return None


def most_common_size(sizes: Iterable[int]) -> int:
    """Return the size that most files have, the largest of several; 0 if all files are empty."""
    counts = Counter(size for size in sizes if size)
    return max(counts, key=lambda size: (counts[size], size), default=0)


def file_size(disk: Disk, path: str) -> int:
    file = disk.open(path, writable=False)
    try:
        return file.size
    finally:
        file.close()
