"""The commit log: one run of records, cut into files of equal length named by where they begin.

    commitlog/00000000000000000000   records … | blank record
    commitlog/00000000001073741824   records … | zeros

Appends go through a batch, see `logbatch.py`.

Appending to the commit log: records are encoded for the place they will have, then written in
one call (two when the batch crosses into the next file).

A batch counts once it is written whole. If that fails, what it may have left behind is wiped, so
that recovery cannot find it later.

Where appended records lie.

Runs of records (`message/batch.py`) on their way into the log.

What is the same for all of them is encoded once, the rest column by column; what comes out is what
`Batch.add` would have made of each.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, count, repeat
from typing import Any, Final, NamedTuple

import msgspec

from escrowmq.errors import CorruptRecord, NoSuchRecord, StoreDamaged, StoreError, StoreFailed
from escrowmq.message.batch import KEY_BEGIN, NewRun
from escrowmq.message.record import (
    BLANK,
    BORN_HOST_IPV6,
    CRC_MASK,
    HEAD_V4,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    STORE_HOST_IPV6,
    LogOffset,
    NewRecord,
    QueueOffset,
    StoredRecord,
    crc32,
    decode_record,
    encode_blank,
    properties_length,
    record_pieces,
    topic_field,
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


class Batch:
    """Records on their way into the log: encoded, placed, not yet written."""

    __slots__ = (
        "_at",
        "_full",
        "_log",
        "_piece_begin",
        "_pieces",
        "_room",
        "_sealed",
        "_store_host",
    )

    def __init__(self, log: CommitLog) -> None:
        log.refuse_if_failed()
        self._log = log
        self._store_host = log.store_host
        self._sealed = log.sealed
        self._at = log.end
        self._room = log.segment_bytes - BLANK.size - self._at % log.segment_bytes
        self._pieces: list[bytes] = []
        self._piece_begin = self._at
        self._full: list[tuple[LogOffset, bytes]] = []  # what fills up a file, and where

    def add(self, record: NewRecord, queue_offset: int, stored_ms: int) -> tuple[LogOffset, int]:
        """Place one record behind the others: its log offset and its size."""
        at = self._at
        host, sealed = self._store_host, self._sealed
        size, pieces = record_pieces(record, queue_offset, at, stored_ms, host, sealed)
        if size > self._room:
            at = self._roll(at)
            size, pieces = record_pieces(record, queue_offset, at, stored_ms, host, sealed)
        self._pieces += pieces
        self._at = at + size  # type: ignore[assignment]  # no LogOffset(): every send comes by here
        self._room -= size
        return at, size

    def write(self) -> None:
        """All of it into the log, or none of it and an error."""
        log, pieces = self._log, self._pieces
        data = b"".join(pieces)
        try:
            for begin, filled in self._full:
                self._write_at(begin, filled)
            if data:
                self._write_at(self._piece_begin, data)
        except StoreError as error:
            self._undo(error)
            raise
        log.end = self._at

    def _write_at(self, begin: LogOffset, data: bytes) -> None:
        segment = self._log.segment_at(begin // self._log.segment_bytes)
        segment.file.write_at(begin - segment.base, data)

    def _roll(self, at: LogOffset) -> LogOffset:
        """Fill this file up with the blank record; go on in the next."""
        remaining = self._room + BLANK.size
        self._pieces.append(encode_blank(remaining))
        self._full.append((self._piece_begin, b"".join(self._pieces)))
        self._pieces = []
        self._piece_begin = LogOffset(at + remaining)
        self._room = self._log.segment_bytes - BLANK.size
        return self._piece_begin

    def _undo(self, cause: StoreError) -> None:
        """Nothing of a refused batch may be found again, also not after a crash."""
        try:
            self._log.wipe(self._log.end)
        except StoreError as error:
            self._log.fail(error)
            raise StoreFailed(f"{cause}; and what it left could not be wiped: {error}") from cause


class RunPlaces(NamedTuple):
    """Of each record of a run; in their queue they lie one behind the other."""

    log_offsets: list[int]
    sizes: list[int]


class Placed(msgspec.Struct, frozen=True, gc=False):
    """Where a record went; of a run where the first one went, the size of all, and each of them."""

    log_offset: LogOffset
    queue_offset: QueueOffset
    size: int
    run: RunPlaces | None = None

    @classmethod
    def of_run(cls, places: RunPlaces, queue_next: QueueOffset) -> Placed:
        """`queue_next`: behind the last of them."""
        log_offsets, sizes = places
        queue_offset = QueueOffset(queue_next - len(sizes))
        return cls(LogOffset(log_offsets[0]), queue_offset, sum(sizes), places)


_HOST_BITS: Final = BORN_HOST_IPV6 | STORE_HOST_IPV6
_HOST_V4_BYTES: Final = 8
# HEAD_V4, but what a run has once is packed once: magic, queue id, sysFlag to prepared offset.
_HEAD: Final = struct.Struct(">i4sI4siqq48si")
_SAME_FOR_ALL: Final = struct.Struct(">iq8sq8siq")
assert _HEAD.size == HEAD_V4.size


class RunBatch(Batch):
    """A batch that takes runs as well."""

    __slots__ = ()

    def add_run(self, run: NewRun, queue_offset: int, stored_ms: int) -> RunPlaces:
        """Place them all behind what is there."""
        if self._sealed or {len(self._store_host), len(run.born_host)} != {_HOST_V4_BYTES}:
            return self._add_one_by_one(run, queue_offset, stored_ms)
        magic, topic = topic_field(run.topic)
        marks = b"\x02" + run.marks
        properties_bytes = len(KEY_BEGIN) + len(run.keys[0]) + len(marks)
        middle = topic + properties_length(properties_bytes) + KEY_BEGIN
        fixed_bytes = HEAD_V4.size + len(topic) + 2 + properties_bytes
        lengths = list(map(len, run.bodies))
        sizes = [fixed_bytes + length for length in lengths]
        log_offsets = list(accumulate(sizes, initial=int(self._at)))
        end = log_offsets.pop()
        if end - self._at > self._room:  # over the end of this file, once in a long while
            return self._add_one_by_one(run, queue_offset, stored_ms)
        heads = map(
            _HEAD.pack,
            sizes,
            repeat(struct.pack(">I", magic)),
            [crc & CRC_MASK for crc in map(crc32, run.bodies)],
            repeat(struct.pack(">i", run.queue_id)),
            run.flags,
            count(queue_offset),
            log_offsets,
            repeat(self._same_for_all(run, stored_ms)),
            lengths,
        )
        records = zip(heads, run.bodies, repeat(middle), run.keys, repeat(marks), strict=False)
        pieces: list[Any] = self._pieces  # some of them are views
        pieces.extend(chain.from_iterable(records))
        self._room -= end - self._at
        self._at = LogOffset(end)
        return RunPlaces(log_offsets, sizes)

    def _add_one_by_one(self, run: NewRun, queue_offset: int, stored_ms: int) -> RunPlaces:
        numbered = enumerate(run.records(), queue_offset)
        added = [self.add(record, at, stored_ms) for at, record in numbered]
        return RunPlaces([int(at) for at, _ in added], [size for _, size in added])

    def _same_for_all(self, run: NewRun, stored_ms: int) -> bytes:
        return _SAME_FOR_ALL.pack(
            run.sys_flag & ~_HOST_BITS,
            run.born_ms,
            run.born_host,
            stored_ms,
            self._store_host,
            run.reconsume_times,
            run.prepared_offset,
        )
