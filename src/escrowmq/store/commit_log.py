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
`LogBatch.add` would have made of each.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, count, repeat
from typing import Any, Final, NamedTuple

import msgspec

from escrowmq.errors import CorruptRecord, RecordNotFound, StoreDamaged, StoreError, StoreFailed
from escrowmq.message.batch import UNIQUE_KEY_PREFIX, RecordRun
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
    encode_record_pieces,
    encode_topic,
    pack_properties_length,
)
from escrowmq.store.disk import Disk, File

LOG_DIRECTORY = "commitlog"
NAME_DIGITS = 20
_RECORD_POSITION = struct.Struct(">iI20xq")  # of a record: its size, its magic, …, where it lies
_EMPTY_VIEW = memoryview(b"")
_MAGIC_PREFIX = MAGIC_V1 >> 8
assert _MAGIC_PREFIX == MAGIC_V2 >> 8


def file_name(base: int) -> str:
    return f"{base:0{NAME_DIGITS}d}"


@dataclass(slots=True)
class Segment:
    base: int
    file: File
    view: memoryview


@dataclass(slots=True)
class LogFlush:
    """One fsync that answers everything written before it began. `run` may go to a thread."""

    disk: Disk
    files: list[File]
    end: LogOffset
    files_created: int  # how many there were when it began
    has_new_files: bool

    def run(self) -> None:
        try:
            for file in self.files:
                file.sync()
            if self.has_new_files:
                self.disk.sync_directory(LOG_DIRECTORY)
        except StoreError as error:
            # Whatever the reason, also a full disk: the kernel may have dropped what it could
            # not write, and the next flush would not know.
            raise StoreFailed(f"the log could not be flushed: {error}") from error


@dataclass(slots=True)
class SegmentRemoval:
    """The oldest file on its way out. `run` and `release` may go to a thread."""

    disk: Disk
    segment: Segment
    is_removed: bool = False
    is_durable: bool = False

    def run(self) -> None:
        self.disk.remove(f"{LOG_DIRECTORY}/{file_name(self.segment.base)}")
        self.is_removed = True
        self.disk.sync_directory(LOG_DIRECTORY)
        self.is_durable = True

    def release(self) -> None:
        """Once the log has forgotten it: only now the file system gives the room back."""
        self.segment.view = _EMPTY_VIEW
        self.segment.file.close()


class CommitLog:
    def __init__(
        self, disk: Disk, *, segment_bytes: int, store_host: bytes, append_crc: bool = False
    ) -> None:
        self._disk = disk
        self.segment_bytes = segment_bytes
        self.store_host = store_host
        self.append_crc = append_crc
        self._segments: dict[int, Segment] = {}  # by number: log offset // segment_bytes
        self.begin = LogOffset(0)
        self.end = LogOffset(0)
        self.flushed_offset = LogOffset(0)
        self._files_created = 0
        self._files_synced = 0  # so many of those are safe under their names
        self._failure: StoreError | None = None
        self._is_closed = False
        try:
            self._open_files()
        except StoreError:
            self.close()
            raise

    # --- writing -------------------------------------------------------------------------------

    def get_or_create_segment(self, segment_number: int) -> Segment:
        segment = self._segments.get(segment_number)
        if segment is None:
            base = segment_number * self.segment_bytes
            file = self._disk.create(f"{LOG_DIRECTORY}/{file_name(base)}", self.segment_bytes)
            segment = self._segments[segment_number] = Segment(base, file, file.view())
            self._files_created += 1
        return segment

    def truncate(self, begin: LogOffset) -> None:
        """Make everything from `begin` on zeros again, for good."""
        self._remove_unknown_files()
        for number in sorted(self._segments, reverse=True):
            segment = self._segments[number]
            keep = begin - segment.base
            if keep < 0:
                self._remove_segment(number)
            elif keep < self.segment_bytes:
                segment.view = _EMPTY_VIEW
                segment.file.resize(keep)
                segment.file.resize(self.segment_bytes)
                segment.file.sync()
                segment.view = segment.file.view()

    def check_not_failed(self) -> None:
        if self._failure is not None:
            raise StoreFailed(f"the log takes no more writes: {self._failure}")

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def fail(self, error: StoreError) -> None:
        """Nothing more is taken: what is on disk is no longer known."""
        self._failure = error

    # --- flushing ------------------------------------------------------------------------------

    def begin_flush(self) -> LogFlush:
        self.check_not_failed()
        first, last = self.flushed_offset // self.segment_bytes, self.end // self.segment_bytes
        numbers = [number for number in range(first, last + 1) if number in self._segments]
        return LogFlush(
            self._disk,
            [self._segments[number].file for number in numbers],
            self.end,
            self._files_created,
            # Another flush may be on its way, so this is settled when one is finished, not here.
            self._files_created > self._files_synced,
        )

    def finish_flush(self, flush: LogFlush) -> None:
        self.flushed_offset = max(self.flushed_offset, flush.end)
        self._files_synced = max(self._files_synced, flush.files_created)

    # --- reading -------------------------------------------------------------------------------

    def view(self, begin: int, end: int) -> memoryview:
        """The bytes of the log between two offsets of one file, not copied."""
        number = begin // self.segment_bytes
        segment = self._segments.get(number)
        if segment is None or begin < self.begin or end > self.end or end < begin:
            raise RecordNotFound(f"the log has no bytes {begin} to {end}")
        return segment.view[begin - segment.base : end - segment.base]

    def slices(self, ranges: list[tuple[int, int]]) -> list[memoryview]:
        """Runs of records, from one offset to another, not copied. Each must begin with a record
        that knows its place: what a queue entry points at wrongly is never handed out."""
        found = []
        base = limit = -1
        view = _EMPTY_VIEW
        for begin, end in ranges:
            if not base <= begin < limit:
                if not self.begin <= begin < self.end:
                    raise RecordNotFound(f"log_offset={begin} is not in {self.begin} to {self.end}")
                base = begin - begin % self.segment_bytes
                view = self._segments[begin // self.segment_bytes].view
                limit = min(base + self.segment_bytes, self.end)
            if end > limit:
                raise CorruptRecord(begin, "a queue entry points past the end")
            _, magic, own_offset = _RECORD_POSITION.unpack_from(view, begin - base)
            if own_offset != begin or magic >> 8 != _MAGIC_PREFIX:
                raise CorruptRecord(begin, "a queue entry points here, and no record is here")
            found.append(view[begin - base : end - base])
        return found

    def record_at(self, log_offset: LogOffset) -> StoredRecord:
        if not self.begin <= log_offset < self.end:
            raise RecordNotFound(f"log_offset={log_offset} is not in {self.begin} to {self.end}")
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

    def segment_bases(self) -> list[int]:
        """Where each file begins, in order."""
        return [number * self.segment_bytes for number in sorted(self._segments)]

    def modified_ms(self, base: int) -> int:
        return self._disk.modified_ms(f"{LOG_DIRECTORY}/{file_name(base)}")

    # --- files ---------------------------------------------------------------------------------

    def begin_removal(self, *, below: LogOffset) -> SegmentRemoval:
        """Of the first file, if it lies wholly below that offset and is not the last."""
        numbers = sorted(self._segments)
        if len(numbers) < 2 or numbers[1] * self.segment_bytes > below:
            raise StoreError("the oldest file of the log is still needed")
        return SegmentRemoval(self._disk, self._segments[numbers[0]])

    def finish_removal(self, removal: SegmentRemoval) -> None:
        """Also after it failed: then the file may be gone all the same."""
        if removal.is_removed:
            del self._segments[removal.segment.base // self.segment_bytes]
            # A power cut may bring it back until the next flush has made sure of the directory.
            self._files_created += not removal.is_durable
            self.begin = LogOffset(min(self._segments) * self.segment_bytes)

    def close(self) -> None:
        for segment in self._segments.values():
            segment.view = _EMPTY_VIEW
            segment.file.close()
        self._segments.clear()
        self.begin = self.end
        self._is_closed = True
        self.fail(StoreFailed("it is closed"))

    def files_end(self) -> LogOffset:
        """Where the files end; what of that is records, recovery finds out."""
        return LogOffset((max(self._segments) + 1) * self.segment_bytes if self._segments else 0)

    def _remove_segment(self, segment_number: int) -> None:
        segment = self._segments[segment_number]
        self._disk.remove(f"{LOG_DIRECTORY}/{file_name(segment.base)}")
        del self._segments[segment_number]
        segment.view = _EMPTY_VIEW
        segment.file.close()
        self._disk.sync_directory(LOG_DIRECTORY)

    def _remove_unknown_files(self) -> None:
        """A file that could not be made may be there all the same, newest first."""
        for name in reversed(self._file_names()):
            if int(name) // self.segment_bytes not in self._segments:
                self._disk.remove(f"{LOG_DIRECTORY}/{name}")
                self._disk.sync_directory(LOG_DIRECTORY)

    def _file_names(self) -> list[str]:
        return [name for name in self._disk.names(LOG_DIRECTORY) if is_file_name(name)]

    def _open_files(self) -> None:
        names = self._file_names()
        for name in names:
            file = self._disk.open(f"{LOG_DIRECTORY}/{name}")
            self._segments[int(name) // self.segment_bytes] = Segment(int(name), file, _EMPTY_VIEW)
            # Before anything is changed: these files may be right, and the settings wrong.
            self._check_file_size(name, file.size)
        numbers = sorted(self._segments)
        for before, after in itertools.pairwise(numbers):
            if after != before + 1:
                missing = file_name((before + 1) * self.segment_bytes)
                raise StoreDamaged(f"{LOG_DIRECTORY}/{missing} is missing between two others")
        for segment in self._segments.values():
            if segment.file.size < self.segment_bytes:  # a crash while it was created, or cut
                segment.file.resize(self.segment_bytes)
            segment.view = segment.file.view()
        # Whoever made them may have been killed before their names were safe.
        self._files_created = len(numbers)
        if numbers:
            self.begin = self.end = self.flushed_offset = LogOffset(numbers[0] * self.segment_bytes)

    def _check_file_size(self, name: str, size: int) -> None:
        if int(name) % self.segment_bytes or size > self.segment_bytes:
            raise StoreDamaged(
                f"{LOG_DIRECTORY}/{name} has {size} bytes, and this log is to be in files of "
                f"{self.segment_bytes}; set mappedFileSizeCommitLog to what it was written with"
            )


def is_file_name(name: str) -> bool:
    return len(name) == NAME_DIGITS and name.isdigit()


class LogBatch:
    """Records on their way into the log: encoded, placed, not yet written."""

    __slots__ = (
        "_append_crc",
        "_end",
        "_full_segments",
        "_log",
        "_piece_begin",
        "_pieces",
        "_remaining_bytes",
        "_store_host",
    )

    def __init__(self, log: CommitLog) -> None:
        log.check_not_failed()
        self._log = log
        self._store_host = log.store_host
        self._append_crc = log.append_crc
        self._end = log.end
        self._remaining_bytes = log.segment_bytes - BLANK.size - self._end % log.segment_bytes
        self._pieces: list[bytes] = []
        self._piece_begin = self._end
        self._full_segments: list[tuple[LogOffset, bytes]] = []  # what fills up a file, and where

    def add(self, record: NewRecord, queue_offset: int, stored_ms: int) -> tuple[LogOffset, int]:
        """Place one record behind the others: its log offset and its size."""
        at = self._end
        host, sealed = self._store_host, self._append_crc
        size, pieces = encode_record_pieces(record, queue_offset, at, stored_ms, host, sealed)
        if size > self._remaining_bytes:
            at = self._roll_segment(at)
            size, pieces = encode_record_pieces(record, queue_offset, at, stored_ms, host, sealed)
        self._pieces += pieces
        self._end = at + size  # type: ignore[assignment]  # no LogOffset(): every send comes by here
        self._remaining_bytes -= size
        return at, size

    def write(self) -> None:
        """All of it into the log, or none of it and an error."""
        log, pieces = self._log, self._pieces
        data = b"".join(pieces)
        try:
            for begin, filled in self._full_segments:
                self._write_at(begin, filled)
            if data:
                self._write_at(self._piece_begin, data)
        except StoreError as error:
            self._undo(error)
            raise
        log.end = self._end

    def _write_at(self, begin: LogOffset, data: bytes) -> None:
        segment = self._log.get_or_create_segment(begin // self._log.segment_bytes)
        segment.file.write_at(begin - segment.base, data)

    def _roll_segment(self, log_offset: LogOffset) -> LogOffset:
        """Fill this file up with the blank record; go on in the next."""
        remaining = self._remaining_bytes + BLANK.size
        self._pieces.append(encode_blank(remaining))
        self._full_segments.append((self._piece_begin, b"".join(self._pieces)))
        self._pieces = []
        self._piece_begin = LogOffset(log_offset + remaining)
        self._remaining_bytes = self._log.segment_bytes - BLANK.size
        return self._piece_begin

    def _undo(self, cause: StoreError) -> None:
        """Nothing of a refused batch may be found again, also not after a crash."""
        try:
            self._log.truncate(self._log.end)
        except StoreError as error:
            self._log.fail(error)
            raise StoreFailed(f"{cause}; and what it left could not be wiped: {error}") from cause


class RunPositions(NamedTuple):
    """Of each record of a run; in their queue they lie one behind the other."""

    log_offsets: list[int]
    sizes: list[int]


class AppendResult(msgspec.Struct, frozen=True, gc=False):
    """Where a record went; of a run where the first one went, the size of all, and each of them."""

    log_offset: LogOffset
    queue_offset: QueueOffset
    size: int
    run: RunPositions | None = None

    @classmethod
    def of_run(cls, positions: RunPositions, next_offset: QueueOffset) -> AppendResult:
        """`queue_next`: behind the last of them."""
        log_offsets, sizes = positions
        queue_offset = QueueOffset(next_offset - len(sizes))
        return cls(LogOffset(log_offsets[0]), queue_offset, sum(sizes), positions)


_HOST_BITS: Final = BORN_HOST_IPV6 | STORE_HOST_IPV6
_HOST_V4_BYTES: Final = 8
# HEAD_V4, but what a run has once is packed once: magic, queue id, sysFlag to prepared offset.
_RUN_HEAD: Final = struct.Struct(">i4sI4siqq48si")
_SHARED_FIELDS: Final = struct.Struct(">iq8sq8siq")
assert _RUN_HEAD.size == HEAD_V4.size


class RunLogBatch(LogBatch):
    """A batch that takes runs as well."""

    __slots__ = ()

    def add_run(self, run: RecordRun, queue_offset: int, stored_ms: int) -> RunPositions:
        """Place them all behind what is there."""
        if self._append_crc or {len(self._store_host), len(run.born_host)} != {_HOST_V4_BYTES}:
            return self._add_records(run, queue_offset, stored_ms)
        magic, topic = encode_topic(run.topic)
        marks = b"\x02" + run.extra_properties
        properties_bytes = len(UNIQUE_KEY_PREFIX) + len(run.keys[0]) + len(marks)
        middle = topic + pack_properties_length(properties_bytes) + UNIQUE_KEY_PREFIX
        fixed_bytes = HEAD_V4.size + len(topic) + 2 + properties_bytes
        lengths = list(map(len, run.bodies))
        sizes = [fixed_bytes + length for length in lengths]
        log_offsets = list(accumulate(sizes, initial=int(self._end)))
        end = log_offsets.pop()
        if (
            end - self._end > self._remaining_bytes
        ):  # over the end of this file, once in a long while
            return self._add_records(run, queue_offset, stored_ms)
        heads = map(
            _RUN_HEAD.pack,
            sizes,
            repeat(struct.pack(">I", magic)),
            [crc & CRC_MASK for crc in map(crc32, run.bodies)],
            repeat(struct.pack(">i", run.queue_id)),
            run.flags,
            count(queue_offset),
            log_offsets,
            repeat(self._pack_shared_fields(run, stored_ms)),
            lengths,
        )
        records = zip(heads, run.bodies, repeat(middle), run.keys, repeat(marks), strict=False)
        pieces: list[Any] = self._pieces  # some of them are views
        pieces.extend(chain.from_iterable(records))
        self._remaining_bytes -= end - self._end
        self._end = LogOffset(end)
        return RunPositions(log_offsets, sizes)

    def _add_records(self, run: RecordRun, queue_offset: int, stored_ms: int) -> RunPositions:
        numbered = enumerate(run.records(), queue_offset)
        added = [self.add(record, at, stored_ms) for at, record in numbered]
        return RunPositions([int(at) for at, _ in added], [size for _, size in added])

    def _pack_shared_fields(self, run: RecordRun, stored_ms: int) -> bytes:
        return _SHARED_FIELDS.pack(
            run.sys_flag & ~_HOST_BITS,
            run.born_ms,
            run.born_host,
            stored_ms,
            self._store_host,
            run.reconsume_times,
            run.prepared_offset,
        )
