"""The segments of a log, opened for reading only, with whatever is wrong with them.

Unlike `CommitLog` this opens any directory. It finds out how long the segments are, tolerates
segments that are missing or cut short, and continues behind damaged bytes as recovery does
(log_scan.py). It takes no lock and changes nothing, so it can read a log while a broker writes it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from escrowmq.message.record import LogOffset, StoredRecord
from escrowmq.store.commit_log import LOG_DIRECTORY, file_name, is_file_name
from escrowmq.store.disk import BufferedFiles, Disk
from escrowmq.store.log_scan import (
    Damage,
    KnownBoundaries,
    LogHistory,
    LogScanner,
    first_nonzero_offset,
)

# `first_nonzero` tests every byte up to here, and then a sample at the start of each interval.
FULL_SCAN_BYTES: Final = 8 << 20
_SAMPLE_BYTES: Final = 4096
_SAMPLE_INTERVAL_BYTES: Final = 16 << 20
_CHUNK_BYTES: Final = 256 << 10
_ZEROS: Final = bytes(_CHUNK_BYTES)


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
    first_nonzero: LogOffset  # the first byte that is not zero; `end` if all are
    reason: str
    is_last: bool  # no valid record follows, and the bytes may be the torn end of a crash


class LogFiles:
    """All segments of a log. `end` is behind the last valid record that `scan` has yielded.

    `limit`: a record boundary. What is behind it is not read, because it is still being written.
    """

    def __init__(self, disk: Disk, *, limit: int | None = None) -> None:
        self._disk = disk
        self._limit = limit
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
        self.end = self.begin

    def files_end(self) -> LogOffset:
        """Return where the last segment ends, or the limit."""
        end = self.files[-1].base + self.segment_bytes if self.files else 0
        return LogOffset(end if self._limit is None else min(end, self._limit))

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

    def scan(
        self, begin: int = 0, history: LogHistory | None = None
    ) -> Iterator[StoredRecord | DamagedRange]:
        """Yield records and damaged ranges in order. `begin` must be a record boundary.

        `history` says what was durable. Without it, bytes in front of a valid record are damage.
        """
        if not self.files:
            return
        if history is None:
            boundaries = KnownBoundaries(self.segment_bytes, queues=self._disk)
            history = LogHistory(boundaries=boundaries, has_all_writes=True)
        scanner = LogScanner(self, history)
        for item in scanner.items(LogOffset(max(begin, self.begin))):
            self.end = scanner.end
            if isinstance(item, Damage):
                yield self._damaged_range(item, is_last=False)
            else:
                yield item
        self.end = scanner.end
        if scanner.torn_reason is not None:
            torn = Damage(scanner.torn_offset, self.files_end(), scanner.torn_reason)
            yield self._damaged_range(torn, is_last=True)

    def _damaged_range(self, damage: Damage, *, is_last: bool) -> DamagedRange:
        first_nonzero: int | None = None
        for base in range(damage.begin, damage.end, self.segment_bytes):
            begin = max(damage.begin, base - base % self.segment_bytes)
            end = min(damage.end, begin - begin % self.segment_bytes + self.segment_bytes)
            first_nonzero = first_nonzero_offset(self, begin, end)
            if first_nonzero is not None:
                break
        return DamagedRange(
            begin=damage.begin,
            end=damage.end,
            first_nonzero=LogOffset(damage.end if first_nonzero is None else first_nonzero),
            reason=damage.reason,
            is_last=is_last,
        )

    def scan_from(self, log_offset: int) -> Iterator[StoredRecord | DamagedRange]:
        """Yield what `scan` yields from any log offset on. It need not be a record boundary."""
        if log_offset <= self.begin:
            yield from self.scan()
            return
        # Records are read from the last known boundary on, because none is found by searching.
        boundaries = KnownBoundaries(self.segment_bytes, queues=self._disk)
        known = boundaries.load_segment(log_offset)
        index = bisect_right(known, log_offset)
        begin = known[index - 1] if index else log_offset - log_offset % self.segment_bytes
        for item in self.scan(begin):
            last = item.log_offset if isinstance(item, StoredRecord) else item.end - 1
            if last >= log_offset:
                yield item

    def read_bytes(self, begin: int, end: int) -> bytes:
        """Return bytes of one segment: fewer if its file is shorter, none if it is missing."""
        file = self._by_base.get(begin - begin % self.segment_bytes)
        if file is None:
            return b""
        return self._read(file, begin - file.base, end - begin)

    def _read(self, file: LogFile, position: int, size: int) -> bytes:
        return self._open_files.read(file.path, position, min(size, self.segment_bytes - position))


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
