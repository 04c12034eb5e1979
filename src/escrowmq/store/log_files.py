"""The files of a log, for reading only, with whatever is wrong with them.

Unlike `CommitLog` this opens any directory: it finds out how long the files are, copes with files
that are missing or cut short, and reads on behind a place that does not check out. It takes no
lock and changes nothing, so it may look at a log that a broker is writing.
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
from escrowmq.store.disk import Disk, ViewCache

FULL_SCAN_BYTES: Final = 8 << 20  # so far behind the end every byte is looked at; farther on
_SAMPLE_BYTES: Final = 4096  # only the first so many
_SAMPLE_INTERVAL_BYTES: Final = 16 << 20  # of so many
_CHUNK_BYTES: Final = 256 << 10
_ZEROS: Final = bytes(_CHUNK_BYTES)
_MAGIC_POSITION: Final = 4
_MAGIC_PATTERN = re.compile(
    b"|".join(re.escape(m.to_bytes(4, "big")) for m in (MAGIC_V1, MAGIC_V2))
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
    """Bytes of the log that are no record."""

    begin: LogOffset
    end: LogOffset  # where the next good record lies; where the files end if there is none
    first_nonzero: LogOffset  # the first byte that is not zero
    reason: str
    is_last: bool  # no good record lies behind it


class LogFiles:
    def __init__(self, disk: Disk) -> None:
        self._views = ViewCache(disk, files_max=2)
        names = disk.names(LOG_DIRECTORY)
        self.unknown_names = [name for name in names if not is_file_name(name)]
        found = [
            LogFile(int(name), file_size(disk, f"{LOG_DIRECTORY}/{name}"))
            for name in names
            if is_file_name(name)
        ]
        self.segment_bytes = most_common_size(file.size for file in found)
        self.misaligned_files = [
            f for f in found if self.segment_bytes and f.base % self.segment_bytes
        ]
        self.files = [file for file in found if file not in self.misaligned_files]
        self._last_view = -1, memoryview(b"")
        self._by_base = {file.base: file for file in self.files}
        self.begin = LogOffset(self.files[0].base if self.files else 0)
        self.files_end = LogOffset(self.files[-1].base + self.segment_bytes if self.files else 0)
        self.end = self.begin  # behind the last good record that a walk has met

    def close(self) -> None:
        self._last_view = -1, memoryview(b"")
        self._views.close()

    def locate(self, log_offset: int) -> tuple[str, int]:
        """The path of the file that holds this offset, there or not, and the position in it."""
        position = log_offset % self.segment_bytes if self.segment_bytes else 0
        return f"{LOG_DIRECTORY}/{file_name(log_offset - position)}", position

    def has_file(self, log_offset: int) -> bool:
        return log_offset - log_offset % self.segment_bytes in self._by_base

    def scan(self, begin: int = 0) -> Iterator[StoredRecord | DamagedRange]:
        """Every record from `begin` on, a record's boundary, and every place that holds none."""
        at = LogOffset(max(begin, self.begin))
        while at < self.files_end:
            file = self._by_base.get(at - at % self.segment_bytes)
            if file is not None and self._is_blank(file, at):
                at = LogOffset(file.base + self.segment_bytes)
                continue
            try:
                record = self._record_at(file, at)
            except CorruptRecord as error:
                place = self._find_damage(at, error.reason)
                if place is None:
                    return
                yield place
                if place.is_last:
                    return
                at = place.end
            else:
                at = self.end = LogOffset(at + record.size)
                yield record

    def next_valid_record(self, log_offset: int) -> LogOffset | None:
        """The first good record at an offset or behind it, whatever lies between."""
        for file in self.files:
            if file.base + self.segment_bytes > log_offset:
                found = self._find_valid_record(file, max(0, log_offset - file.base))
                if found is not None:
                    return found
        return None

    def _view(self, file: LogFile) -> memoryview:
        base, view = self._last_view
        if base != file.base:
            view = self._views.view(file.path)[: self.segment_bytes]
            self._last_view = file.base, view
        return view

    def _record_at(self, file: LogFile | None, log_offset: LogOffset) -> StoredRecord:
        if file is None:
            raise CorruptRecord(log_offset, "the file is missing")
        return decode_record(self._view(file), log_offset - file.base, log_offset)

    def _is_blank(self, file: LogFile, log_offset: LogOffset) -> bool:
        view, position = self._view(file), log_offset - file.base
        if len(view) - position < BLANK.size:
            return False
        remaining, magic = BLANK.unpack_from(view, position)
        return bool(magic == MAGIC_BLANK and remaining == self.segment_bytes - position)

    def _find_damage(self, log_offset: LogOffset, reason: str) -> DamagedRange | None:
        """None if there is nothing but zeros: the log ends here, as it should."""
        seen_from: int | None = None
        following: LogOffset | None = None
        for file in self.files:
            if file.base + self.segment_bytes <= log_offset:
                continue
            nonzero = first_nonzero(self._view(file), max(0, log_offset - file.base))
            if nonzero is None:
                continue
            if seen_from is None:
                seen_from = file.base + nonzero
            following = self._find_valid_record(file, max(0, log_offset + 1 - file.base))
            if following is not None:
                break
        if seen_from is None:
            return None
        return DamagedRange(
            begin=log_offset,
            end=self.files_end if following is None else following,
            first_nonzero=LogOffset(seen_from),
            reason=reason,
            is_last=following is None,
        )

    def _find_valid_record(self, file: LogFile, position: int) -> LogOffset | None:
        view = self._view(file)
        for found in _MAGIC_PATTERN.finditer(view, position + _MAGIC_POSITION):
            candidate = found.start() - _MAGIC_POSITION
            try:
                return decode_record(view, candidate, LogOffset(file.base + candidate)).log_offset
            except CorruptRecord:
                continue
        return None


def first_nonzero(
    view: memoryview, position: int, full_scan_bytes: int = FULL_SCAN_BYTES
) -> int | None:
    """Where the first byte lies that is not zero. What a crash leaves lies right behind the end;
    of the rest of a sparse file only samples are taken, for to look at all would fill the memory
    with its pages."""
    whole_end = min(len(view), position + full_scan_bytes)
    chunks = [
        (at, min(at + _CHUNK_BYTES, whole_end)) for at in range(position, whole_end, _CHUNK_BYTES)
    ]
    chunks += [
        (at, at + _SAMPLE_BYTES) for at in range(whole_end, len(view), _SAMPLE_INTERVAL_BYTES)
    ]
    for begin, end in chunks:
        chunk = bytes(view[begin:end])
        if chunk != _ZEROS[: len(chunk)]:
            return begin + len(chunk) - len(chunk.lstrip(b"\0"))
    return None


def most_common_size(sizes: Iterable[int]) -> int:
    """How long files of one kind should be: what most of them are, or the longest; 0 if none is."""
    counts = Counter(size for size in sizes if size)
    return max(counts, key=lambda size: (counts[size], size), default=0)


def file_size(disk: Disk, path: str) -> int:
    file = disk.open(path, writable=False)
    try:
        return file.size
    finally:
        file.close()
