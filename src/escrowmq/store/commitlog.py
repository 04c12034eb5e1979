"""The commit log: one run of records, cut into files of equal length named by where they begin.

    commitlog/00000000000000000000   records … | blank record
    commitlog/00000000001073741824   records … | zeros

Appends go through a batch, see `logbatch.py`.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from escrowmq.errors import CorruptRecord, NoSuchRecord, StoreDamaged, StoreError, StoreFailed
from escrowmq.message.offsets import LogOffset
from escrowmq.message.record import (
    BLANK,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    StoredRecord,
    decode_record,
)
from escrowmq.store.disk import Disk, File

DIRECTORY = "commitlog"
NAME_DIGITS = 20
_PLACE = struct.Struct(">iI20xq")  # of a record: its size, its magic, …, where it lies
_NOTHING = memoryview(b"")
_MAGICS_TOP = MAGIC_V1 >> 8
assert _MAGICS_TOP == MAGIC_V2 >> 8


def file_name(base: int) -> str:
    return f"{base:0{NAME_DIGITS}d}"


@dataclass(slots=True)
class Segment:
    base: int
    file: File
    view: memoryview


@dataclass(slots=True)
class Flush:
    """One fsync that answers everything written before it began. `run` may go to a thread."""

    disk: Disk
    files: list[File]
    end: LogOffset
    files_made: int  # how many there were when it began
    new_files: bool

    def run(self) -> None:
        try:
            for file in self.files:
                file.sync()
            if self.new_files:
                self.disk.sync_directory(DIRECTORY)
        except StoreError as error:
            # Whatever the reason, also a full disk: the kernel may have dropped what it could
            # not write, and the next flush would not know.
            raise StoreFailed(f"the log could not be flushed: {error}") from error


@dataclass(slots=True)
class Removal:
    """The oldest file on its way out. `run` and `release` may go to a thread."""

    disk: Disk
    segment: Segment
    is_gone: bool = False
    is_safe: bool = False

    def run(self) -> None:
        self.disk.remove(f"{DIRECTORY}/{file_name(self.segment.base)}")
        self.is_gone = True
        self.disk.sync_directory(DIRECTORY)
        self.is_safe = True

    def release(self) -> None:
        """Once the log has forgotten it: only now the file system gives the room back."""
        self.segment.view = _NOTHING
        self.segment.file.close()


class CommitLog:
    def __init__(
        self, disk: Disk, *, segment_bytes: int, store_host: bytes, sealed: bool = False
    ) -> None:
        self._disk = disk
        self.segment_bytes = segment_bytes
        self.store_host = store_host
        self.sealed = sealed
        self._segments: dict[int, Segment] = {}  # by number: log offset // segment_bytes
        self.begin = LogOffset(0)
        self.end = LogOffset(0)
        self.flushed = LogOffset(0)
        self._files_made = 0
        self._names_flushed = 0  # so many of those are safe under their names
        self._failure: StoreError | None = None
        self._is_closed = False
        try:
            self._open_files()
        except StoreError:
            self.close()
            raise

    # --- writing -------------------------------------------------------------------------------

    def segment_at(self, number: int) -> Segment:
        segment = self._segments.get(number)
        if segment is None:
            base = number * self.segment_bytes
            file = self._disk.create(f"{DIRECTORY}/{file_name(base)}", self.segment_bytes)
            segment = self._segments[number] = Segment(base, file, file.view())
            self._files_made += 1
        return segment

    def wipe(self, begin: LogOffset) -> None:
        """Make everything from `begin` on zeros again, for good."""
        self._remove_strays()
        for number in sorted(self._segments, reverse=True):
            segment = self._segments[number]
            keep = begin - segment.base
            if keep < 0:
                self._remove(number)
            elif keep < self.segment_bytes:
                segment.view = _NOTHING
                segment.file.resize(keep)
                segment.file.resize(self.segment_bytes)
                segment.file.sync()
                segment.view = segment.file.view()

    def refuse_if_failed(self) -> None:
        if self._failure is not None:
            raise StoreFailed(f"the log takes no more writes: {self._failure}")

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def fail(self, error: StoreError) -> None:
        """Nothing more is taken: what is on disk is no longer known."""
        self._failure = error

    # --- flushing ------------------------------------------------------------------------------

    def begin_flush(self) -> Flush:
        self.refuse_if_failed()
        first, last = self.flushed // self.segment_bytes, self.end // self.segment_bytes
        numbers = [number for number in range(first, last + 1) if number in self._segments]
        return Flush(
            self._disk,
            [self._segments[number].file for number in numbers],
            self.end,
            self._files_made,
            # Another flush may be on its way, so this is settled when one is finished, not here.
            self._files_made > self._names_flushed,
        )

    def finish_flush(self, flush: Flush) -> None:
        self.flushed = max(self.flushed, flush.end)
        self._names_flushed = max(self._names_flushed, flush.files_made)

    # --- reading -------------------------------------------------------------------------------

    def view(self, begin: int, end: int) -> memoryview:
        """The bytes of the log between two offsets of one file, not copied."""
        number = begin // self.segment_bytes
        segment = self._segments.get(number)
        if segment is None or begin < self.begin or end > self.end or end < begin:
            raise NoSuchRecord(f"the log has no bytes {begin} to {end}")
        return segment.view[begin - segment.base : end - segment.base]

    def slices(self, runs: list[tuple[int, int]]) -> list[memoryview]:
        """Runs of records, from one offset to another, not copied. Each must begin with a record
        that knows its place: what a queue entry points at wrongly is never handed out."""
        found = []
        base = limit = -1
        view = _NOTHING
        for begin, end in runs:
            if not base <= begin < limit:
                if not self.begin <= begin < self.end:
                    raise NoSuchRecord(f"log_offset={begin} is not in {self.begin} to {self.end}")
                base = begin - begin % self.segment_bytes
                view = self._segments[begin // self.segment_bytes].view
                limit = min(base + self.segment_bytes, self.end)
            if end > limit:
                raise CorruptRecord(begin, "a queue entry points past the end")
            _, magic, own_offset = _PLACE.unpack_from(view, begin - base)
            if own_offset != begin or magic >> 8 != _MAGICS_TOP:
                raise CorruptRecord(begin, "a queue entry points here, and no record is here")
            found.append(view[begin - base : end - base])
        return found

    def record_at(self, log_offset: LogOffset) -> StoredRecord:
        if not self.begin <= log_offset < self.end:
            raise NoSuchRecord(f"log_offset={log_offset} is not in {self.begin} to {self.end}")
        segment = self._segments[log_offset // self.segment_bytes]
        return decode_record(segment.view, log_offset - segment.base, log_offset)

    def segment_end(self, log_offset: int) -> int:
        return (log_offset // self.segment_bytes + 1) * self.segment_bytes

    def is_blank(self, log_offset: int) -> bool:
        """Whether the rest of this file is the blank record that ends it."""
        segment = self._segments[log_offset // self.segment_bytes]
        at = log_offset - segment.base
        if self.segment_bytes - at < BLANK.size:
            return False
        remaining, magic = BLANK.unpack_from(segment.view, at)
        return bool(magic == MAGIC_BLANK and remaining == self.segment_bytes - at)

    def records(self, begin: LogOffset, end: LogOffset | None = None) -> Iterator[StoredRecord]:
        """Every record from one boundary to another; the first corrupt one raises."""
        if self._is_closed:
            raise StoreFailed("the store is closed")
        at: int = max(begin, self.begin)
        while at < (self.end if end is None else end):
            if self.is_blank(at):
                at = self.segment_end(at)
                continue
            record = self.record_at(LogOffset(at))
            yield record
            at += record.size

    def bases(self) -> list[int]:
        """Where each file begins, in order."""
        return [number * self.segment_bytes for number in sorted(self._segments)]

    def modified_ms(self, base: int) -> int:
        return self._disk.modified_ms(f"{DIRECTORY}/{file_name(base)}")

    # --- files ---------------------------------------------------------------------------------

    def begin_removal(self, *, below: LogOffset) -> Removal:
        """Of the first file, if it lies wholly below that offset and is not the last."""
        numbers = sorted(self._segments)
        if len(numbers) < 2 or numbers[1] * self.segment_bytes > below:
            raise StoreError("the oldest file of the log is still needed")
        return Removal(self._disk, self._segments[numbers[0]])

    def finish_removal(self, removal: Removal) -> None:
        """Also after it failed: then the file may be gone all the same."""
        if removal.is_gone:
            del self._segments[removal.segment.base // self.segment_bytes]
            # A power cut may bring it back until the next flush has made sure of the directory.
            self._files_made += not removal.is_safe
            self.begin = LogOffset(min(self._segments) * self.segment_bytes)

    def close(self) -> None:
        for segment in self._segments.values():
            segment.view = _NOTHING
            segment.file.close()
        self._segments.clear()
        self.begin = self.end
        self._is_closed = True
        self.fail(StoreFailed("it is closed"))

    def scan_end(self) -> LogOffset:
        """Where the files end; what of that is records, recovery finds out."""
        return LogOffset((max(self._segments) + 1) * self.segment_bytes if self._segments else 0)

    def _remove(self, number: int) -> None:
        segment = self._segments[number]
        self._disk.remove(f"{DIRECTORY}/{file_name(segment.base)}")
        del self._segments[number]
        segment.view = _NOTHING
        segment.file.close()
        self._disk.sync_directory(DIRECTORY)

    def _remove_strays(self) -> None:
        """A file that could not be made may be there all the same, newest first."""
        for name in reversed(self._file_names()):
            if int(name) // self.segment_bytes not in self._segments:
                self._disk.remove(f"{DIRECTORY}/{name}")
                self._disk.sync_directory(DIRECTORY)

    def _file_names(self) -> list[str]:
        return [name for name in self._disk.names(DIRECTORY) if is_file_name(name)]

    def _open_files(self) -> None:
        names = self._file_names()
        for name in names:
            file = self._disk.open(f"{DIRECTORY}/{name}")
            self._segments[int(name) // self.segment_bytes] = Segment(int(name), file, _NOTHING)
            # Before anything is changed: these files may be right, and the settings wrong.
            self._refuse_other_lengths(name, file.size)
        numbers = sorted(self._segments)
        for before, after in itertools.pairwise(numbers):
            if after != before + 1:
                missing = file_name((before + 1) * self.segment_bytes)
                raise StoreDamaged(f"{DIRECTORY}/{missing} is missing between two others")
        for segment in self._segments.values():
            if segment.file.size < self.segment_bytes:  # a crash while it was created, or cut
                segment.file.resize(self.segment_bytes)
            segment.view = segment.file.view()
        # Whoever made them may have been killed before their names were safe.
        self._files_made = len(numbers)
        if numbers:
            self.begin = self.end = self.flushed = LogOffset(numbers[0] * self.segment_bytes)

    def _refuse_other_lengths(self, name: str, size: int) -> None:
        if int(name) % self.segment_bytes or size > self.segment_bytes:
            raise StoreDamaged(
                f"{DIRECTORY}/{name} has {size} bytes, and this log is to be in files of "
                f"{self.segment_bytes}; set mappedFileSizeCommitLog to what it was written with"
            )


def is_file_name(name: str) -> bool:
    return len(name) == NAME_DIGITS and name.isdigit()
