"""The commit log: all records in the order of their appends. It is the only source of truth.

    commitlog/00000000000000000000   records … | blank record
    commitlog/00000000001073741824   records … | zeros

The log is cut into segments, files of equal length that are named by the log offset at which they
begin. A record never crosses a boundary: a blank record fills the end of a segment.

    CommitLog              the segments: read, flush, truncate, remove
    LogBatch, RunLogBatch  append: encode records for the offsets that they will have, then write
                           them in one call, or in two if the batch crosses into the next segment

A batch is in the log once all of it is written. If a write fails, everything that it may have left
behind is set to zero again, so that recovery cannot find a part of it later.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, count, repeat
from typing import Any, Final, NamedTuple

import msgspec

from escrowmq.errors import (
    CorruptRecord,
    ReadFailed,
    RecordNotFound,
    StoreDamaged,
    StoreError,
    StoreFailed,
    StoreUnavailable,
)
from escrowmq.message.batch import UNIQUE_KEY_PREFIX, RecordRun
from escrowmq.message.record import (
    BLANK,
    BORN_HOST_IPV6,
    CRC_MASK,
    CRC_PROPERTY_BYTES,
    HEAD_V4,
    MAGIC_BLANK,
    STORE_HOST_IPV6,
    LogOffset,
    NewRecord,
    QueueOffset,
    StoredRecord,
    crc32,
    decode_record,
    encode_blank,
    encode_crc_properties,
    encode_record_pieces,
    encode_topic,
    has_crc_property,
    pack_properties_length,
)
from escrowmq.native import NativePath
from escrowmq.store.disk import BytesLike, Disk, File, read_what_is_left
from escrowmq.store.flush_marks import FlushMarks
from escrowmq.store.log_reads import LogRange, RecentAppends, check_records, group_ranges

LOG_DIRECTORY = "commitlog"
NAME_DIGITS = 20
_SIZE = struct.Struct(">i")
# One read of a record that is somewhere in the log fetches so much, and one of a record that
# follows the record read before so much. Both are more than most records have.
_SINGLE_READ_BYTES: Final = 4096
_SEQUENTIAL_READ_BYTES: Final = 256 << 10
# Who reads the records of one queue finds those of others between them.
_SEQUENTIAL_GAP_BYTES: Final = 8 << 10
# A block for pulls, and what is read behind it so that most records that begin in it are complete.
_BLOCK_BYTES: Final = 256 << 10
_BLOCK_MARGIN_BYTES: Final = 16 << 10


def file_name(base: int) -> str:
    """Return the name of the file that begins at a log offset."""
    return f"{base:0{NAME_DIGITS}d}"


def is_file_name(name: str) -> bool:
    return len(name) == NAME_DIGITS and name.isdigit()


@dataclass(slots=True)
class Segment:
    base: int  # the log offset of its first byte
    file: File


@dataclass(slots=True)
class LogFlush:
    """An fsync of everything that was written before it began. `run` may be called in a thread."""

    disk: Disk
    files: list[File]
    end: LogOffset
    files_created: int  # the count when it began
    has_new_files: bool
    marks: FlushMarks | None
    syncs_marks: bool

    def run(self) -> None:
        is_synced = False
        try:
            for file in self.files:
                file.sync()
            is_synced = True
            if self.has_new_files:
                self.disk.sync_directory(LOG_DIRECTORY)
            if self.marks is not None:
                # Before anything is acknowledged: from now on it is damage if this part is invalid.
                self.marks.add(self.end)
                if self.syncs_marks:
                    self.marks.sync()
        except Exception as error:
            if is_synced and isinstance(error, StoreUnavailable):
                raise  # the directory could not be opened now: nothing failed, repeat the flush
            # This is fatal for whatever reason, even if the disk is only full. The kernel may have
            # dropped the pages that it could not write, and the next fsync would report success.
            raise StoreFailed(f"the log could not be flushed: {error}") from error


@dataclass(slots=True)
class SegmentRemoval:
    """The removal of the oldest segment. `run` and `release` may be called in a thread."""

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
        """Close the file after `finish_removal`. Only now the file system frees its space."""
        self.segment.file.close()


class RunPositions(NamedTuple):
    """The positions of the records of a run. Their queue offsets are consecutive."""

    log_offsets: list[int]
    sizes: list[int]


class AppendResult(msgspec.Struct, frozen=True, gc=False):
    """Where a record was stored.

    For a run: the offsets of its first record, the size of all, and the positions of each.
    """

    log_offset: LogOffset
    queue_offset: QueueOffset
    size: int
    run: RunPositions | None = None

    @classmethod
    def of_run(cls, positions: RunPositions, next_offset: QueueOffset) -> AppendResult:
        """Return the result for a run. `next_offset` is the queue offset behind its last record."""
        log_offsets, sizes = positions
        queue_offset = QueueOffset(next_offset - len(sizes))
        return cls(LogOffset(log_offsets[0]), queue_offset, sum(sizes), positions)


_NO_WINDOW: Final = -1, memoryview(b"")


class CommitLog:
    """The segments of a log. One thread owns it; flushes and removals may run in others."""

    def __init__(
        self,
        disk: Disk,
        *,
        segment_bytes: int,
        store_host: bytes,
        append_crc: bool = False,
        native: NativePath | None = None,
    ) -> None:
        """`native`: the native path, with which records are checked. None: not used."""
        self._native = None if native is None else native.module
        self._disk = disk
        self.segment_bytes = segment_bytes
        self.store_host = store_host
        self.append_crc = append_crc
        self._segments: dict[int, Segment] = {}  # by number: log offset // segment_bytes
        self.begin = LogOffset(0)
        self.end = LogOffset(0)
        self.flushed_offset = LogOffset(0)
        self._files_created = 0
        self._files_synced = 0  # of those, how many have a durable directory entry
        self._failure: Exception | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._is_closed = False
        # None until the first checkpoint of this process: a checkpoint says the same.
        self.marks: FlushMarks | None = None
        self.recent = RecentAppends()
        # Called with what was encoded here, for the native path, which knows what it has encoded.
        self.on_append: Callable[[int, bytes], None] | None = None
        self._window = _NO_WINDOW  # log offset and bytes of the last sequential read
        self._next_read = -1  # the log offset behind the record that was read last
        try:
            self._open_files()
        except StoreError:
            self.close()
            raise

    # --- writing -------------------------------------------------------------------------------

    def get_or_create_segment(self, segment_number: int) -> Segment:
        """Return a segment by its number. Raises StoreError if it cannot be created."""
        segment = self._segments.get(segment_number)
        if segment is None:
            base = segment_number * self.segment_bytes
            file = self._disk.create(f"{LOG_DIRECTORY}/{file_name(base)}", self.segment_bytes)
            segment = self._segments[segment_number] = Segment(base, file)
            self._files_created += 1
        return segment

    def write_encoded(self, parts: Sequence[tuple[LogOffset, BytesLike]], end: LogOffset) -> None:
        """Append encoded records: the bytes for each segment, with the offset where they begin.

        If that fails, none of them is in the log; raises StoreError.
        """
        self.check_not_failed()
        try:
            for begin, data in parts:
                segment = self.get_or_create_segment(begin // self.segment_bytes)
                segment.file.write_at(begin - segment.base, data)
        except Exception as error:  # a MemoryError too must leave nothing behind
            self._undo_append(error)
            raise
        for begin, data in parts:
            self.recent.add(begin, data)
            if self.on_append is not None and type(data) is bytes:
                self.on_append(begin, data)
        self.end = end
        self._window = _NO_WINDOW  # it may contain what was here before the append

    def _undo_append(self, cause: Exception) -> None:
        """Remove what a failed append has written, so that not even a crash can bring it back."""
        try:
            self.truncate(self.end)
        except Exception as error:
            self.fail(error)
            raise StoreFailed(
                f"{cause}; what was written of it could not be removed: {error}"
            ) from cause

    def truncate(self, begin: LogOffset) -> None:
        """Set everything from `begin` on to zero, durably. Whole segments are removed."""
        self._window = _NO_WINDOW
        self._remove_unknown_files()
        for number in sorted(self._segments, reverse=True):
            segment = self._segments[number]
            keep = begin - segment.base
            if keep < 0:
                self._remove_segment(number)
            elif keep < self.segment_bytes:
                # Shrinking and growing the file leaves zeros.
                segment.file.resize(keep)
                segment.file.resize(self.segment_bytes)
                segment.file.sync()

    def check_not_failed(self) -> None:
        if self._failure is not None:
            raise StoreFailed(f"the log accepts no more writes: {self._failure}")

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def fail(self, error: Exception) -> None:
        """Refuse all further writes, because it is no longer known what is on the disk."""
        self._failure = error
        self.on_failure()

    # --- flushing ------------------------------------------------------------------------------

    def begin_flush(self, *, syncs_marks: bool = False) -> LogFlush:
        """Return a flush of everything up to here. With `syncs_marks`, its mark is durable too."""
        self.check_not_failed()
        first, last = self.flushed_offset // self.segment_bytes, self.end // self.segment_bytes
        numbers = [number for number in range(first, last + 1) if number in self._segments]
        return LogFlush(
            self._disk,
            [self._segments[number].file for number in numbers],
            self.end,
            self._files_created,
            # Do not count them as synced yet: this flush may fail, or another may finish first.
            self._files_created > self._files_synced,
            self.marks,
            syncs_marks,
        )

    def finish_flush(self, flush: LogFlush) -> None:
        self.flushed_offset = max(self.flushed_offset, flush.end)
        self._files_synced = max(self._files_synced, flush.files_created)

    # --- reading -------------------------------------------------------------------------------

    def view(self, begin: int, end: int) -> memoryview:
        """Return the bytes between two log offsets of one segment.

        Raises RecordNotFound if the log does not have them, and CorruptRecord if they cannot be
        read.
        """
        segment = self._segments.get(begin // self.segment_bytes)
        is_known = segment is not None and self.begin <= begin <= end <= self.end
        if segment is None or not is_known or end > segment.base + self.segment_bytes:
            raise RecordNotFound(f"the log has no bytes {begin} to {end}")
        found = self.recent.find_append(begin)
        if found is not None:
            data, position = found
            if position + end - begin <= len(data):
                return data[position : position + end - begin]
        window_begin, window = self._window
        if window_begin <= begin and end <= window_begin + len(window):
            return window[begin - window_begin : end - window_begin]
        return memoryview(self._read(segment, begin, end))

    def _read(self, segment: Segment, begin: int, end: int) -> bytes:
        try:
            return segment.file.read_at(begin - segment.base, end - begin)
        except ReadFailed:
            pass  # try once more: an error that passes must not cost a message or a half
        try:
            return segment.file.read_at(begin - segment.base, end - begin)
        except ReadFailed as error:
            raise CorruptRecord(begin, f"it cannot be read: {error}") from error

    def read_bytes(self, begin: int, end: int) -> bytes:
        """Return bytes of one segment, also behind the end of the log.

        Pages that cannot be read are 0xFF, so that recovery finds damage there and goes on.
        """
        segment = self._segments.get(begin // self.segment_bytes)
        if segment is None:
            return b""
        return read_what_is_left(segment.file, begin - segment.base, end - begin)

    def read_block(self, begin: int, end: int, is_dense: bool) -> tuple[int, bytes]:
        """Return bytes of one segment, read from the disk, and the log offset where they begin.

        If the caller wants most of these bytes (`is_dense`), it or another one will soon want those
        around them: they are read too, in blocks that all callers share. Nothing is checked.
        Raises RecordNotFound or CorruptRecord.
        """
        segment = self._segments.get(begin // self.segment_bytes)
        if segment is None or not self.begin <= begin < end <= self.end:
            raise RecordNotFound(f"the log has no bytes {begin} to {end}")
        block_begin, block_end = begin, end
        if is_dense:
            block_begin -= begin % _BLOCK_BYTES
            block_end = max(end, block_begin + _BLOCK_BYTES + _BLOCK_MARGIN_BYTES)
        block_begin = max(block_begin, self.begin, segment.base)
        block_end = min(block_end, self.end, segment.base + self.segment_bytes)
        if end > block_end:
            raise CorruptRecord(begin, "a queue entry points past the end of its segment")
        return block_begin, self._read(segment, block_begin, block_end)

    def slices(self, ranges: list[LogRange], topic: str, queue_id: int) -> list[memoryview]:
        """Return ranges of records of one queue, in the order of the queue.

        New records are returned as they were appended. Others are read from the disk and checked,
        so that a damaged record is never sent to a client. Raises RecordNotFound or CorruptRecord.
        """
        slices: list[memoryview] = []
        for group in group_ranges(ranges, self.segment_bytes):
            begin, end = group[0][0], group[-1][1]
            if not self.begin <= begin < end <= self.end:
                raise RecordNotFound(f"log_offset={begin} is not in {self.begin} to {self.end}")
            recent = self._find_recent(group)
            slices += self._read_checked(group, topic, queue_id) if recent is None else recent
        return slices

    def _find_recent(self, ranges: list[LogRange]) -> list[memoryview] | None:
        slices: list[memoryview] = []
        for begin, end, _ in ranges:
            found = self.recent.find(begin, end)
            if found is None:
                return None
            slices += found
        return slices

    def _read_checked(self, ranges: list[LogRange], topic: str, queue_id: int) -> list[memoryview]:
        """Read ranges that are near each other from the disk, and check their records."""
        begin, end = ranges[0][0], ranges[-1][1]
        segment = self._segments[begin // self.segment_bytes]
        if end > segment.base + self.segment_bytes:
            raise CorruptRecord(begin, "a queue entry points past the end of its segment")
        try:
            data = self._read(segment, begin, end)
        except CorruptRecord:
            if len(ranges) == 1:
                raise
            # Perhaps only a gap between them cannot be read.
            return [
                part for single in ranges for part in self._read_checked([single], topic, queue_id)
            ]
        check_records(data, begin, ranges, topic, queue_id, self._native)
        if len(ranges) == 1:
            return [memoryview(data)]
        # A copy without the gaps: a response may wait long for a slow client.
        view = memoryview(data)
        parts = [view[first - begin : last - begin] for first, last, _ in ranges]
        return [memoryview(b"".join(parts))]

    def record_at(self, log_offset: LogOffset) -> StoredRecord:
        """Decode the record at an offset. Raises RecordNotFound or CorruptRecord."""
        if not self.begin <= log_offset < self.end:
            raise RecordNotFound(f"log_offset={log_offset} is not in {self.begin} to {self.end}")
        data, position = self.recent.find_append(log_offset) or self._read_record(log_offset)
        record = decode_record(data, position, log_offset)
        self._next_read = log_offset + record.size
        return record

    def _read_record(self, log_offset: int) -> tuple[memoryview, int]:
        """Read a record from the disk. Return bytes that contain it, and its position in them."""
        begin, window = self._window
        position = log_offset - begin
        if 0 <= position <= len(window) - _SIZE.size:
            (size,) = _SIZE.unpack_from(window, position)
            if 0 < size <= len(window) - position:
                return window, position
        segment = self._segments[log_offset // self.segment_bytes]
        limit = min(segment.base + self.segment_bytes, self.end)
        is_sequential = (
            0 <= self._next_read <= log_offset <= self._next_read + _SEQUENTIAL_GAP_BYTES
        )
        read_bytes = _SEQUENTIAL_READ_BYTES if is_sequential else _SINGLE_READ_BYTES
        try:
            data = segment.file.read_at(
                log_offset - segment.base, min(read_bytes, limit - log_offset)
            )
        except ReadFailed:
            # Perhaps only what follows the record cannot be read.
            is_sequential = False
            data = self._read(segment, log_offset, min(log_offset + _SIZE.size, limit))
        size = _SIZE.unpack_from(data)[0] if len(data) >= _SIZE.size else 0
        if len(data) < size <= limit - log_offset:
            data = self._read(segment, log_offset, log_offset + size)
        elif is_sequential:
            self._window = log_offset, memoryview(data)
        return memoryview(data), 0

    def segment_end(self, log_offset: int) -> int:
        """Return the log offset behind the segment that contains `log_offset`."""
        return (log_offset // self.segment_bytes + 1) * self.segment_bytes

    def is_blank(self, log_offset: int) -> bool:
        """Return whether the blank record that ends a segment begins here."""
        remaining = self.segment_end(log_offset) - log_offset
        if remaining < BLANK.size or log_offset + BLANK.size > self.end:
            return False
        try:
            size, magic = BLANK.unpack(self.view(log_offset, log_offset + BLANK.size))
        except CorruptRecord:
            return False
        return bool(magic == MAGIC_BLANK and size == remaining)

    def records(self, begin: LogOffset, end: LogOffset | None = None) -> Iterator[StoredRecord]:
        """Yield the records between two record boundaries. Raises CorruptRecord."""
        if self._is_closed:
            raise StoreFailed("the store is closed")
        log_offset: int = max(begin, self.begin)
        while log_offset < (self.end if end is None else end):
            if self.is_blank(log_offset):
                log_offset = self.segment_end(log_offset)
                continue
            record = self.record_at(LogOffset(log_offset))
            yield record
            log_offset += record.size

    def segment_bases(self) -> list[int]:
        """Return the log offsets at which the segments begin, in order."""
        return [number * self.segment_bytes for number in sorted(self._segments)]

    def modified_ms(self, base: int) -> int:
        """Return when the segment that begins at `base` was last written."""
        return self._disk.modified_ms(f"{LOG_DIRECTORY}/{file_name(base)}")

    # --- files ---------------------------------------------------------------------------------

    def begin_removal(self, *, below: LogOffset) -> SegmentRemoval:
        """Begin to remove the oldest segment.

        Raises StoreError if it is the only segment or is not entirely below the given offset.
        """
        numbers = sorted(self._segments)
        if len(numbers) < 2 or numbers[1] * self.segment_bytes > below:
            raise StoreError("the oldest segment of the log is still needed")
        return SegmentRemoval(self._disk, self._segments[numbers[0]])

    def finish_removal(self, removal: SegmentRemoval) -> None:
        """Take a removed segment out of the log. Call this also if `run` failed.

        The file may be gone even then.
        """
        if removal.is_removed:
            del self._segments[removal.segment.base // self.segment_bytes]
            # If the directory was not synced, a power cut could bring the file back. Counting it as
            # a new file makes the next flush sync the directory.
            self._files_created += not removal.is_durable
            self.begin = LogOffset(min(self._segments) * self.segment_bytes)

    def close(self) -> None:
        for segment in self._segments.values():
            segment.file.close()
        self._segments.clear()
        if self.marks is not None:
            self.marks.close()
        self.recent.clear()
        self._window = _NO_WINDOW
        self.begin = self.end
        self._is_closed = True
        self._failure = StoreFailed("the log is closed")

    def files_end(self) -> LogOffset:
        """Return where the last segment ends. Recovery finds out how much of it are records."""
        return LogOffset((max(self._segments) + 1) * self.segment_bytes if self._segments else 0)

    def _remove_segment(self, segment_number: int) -> None:
        segment = self._segments[segment_number]
        self._disk.remove(f"{LOG_DIRECTORY}/{file_name(segment.base)}")
        del self._segments[segment_number]
        segment.file.close()
        self._disk.sync_directory(LOG_DIRECTORY)

    def _remove_unknown_files(self) -> None:
        """Remove files that are not segments of this log, the newest first.

        A segment whose creation failed may exist nevertheless.
        """
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
            self._segments[int(name) // self.segment_bytes] = Segment(int(name), file)
            # Check before anything is changed: the files may be right and the configuration wrong.
            self._check_file_size(name, file.size)
        numbers = sorted(self._segments)
        for number, following in itertools.pairwise(numbers):
            if following != number + 1:
                missing = file_name((number + 1) * self.segment_bytes)
                raise StoreDamaged(
                    f"{LOG_DIRECTORY}/{missing} is missing between two other segments"
                )
        for segment in self._segments.values():
            if (
                segment.file.size < self.segment_bytes
            ):  # a crash interrupted its creation or a truncation
                segment.file.resize(self.segment_bytes)
        # The process that created them may have been killed before it synced the directory.
        self._files_created = len(numbers)
        if numbers:
            self.begin = self.end = self.flushed_offset = LogOffset(numbers[0] * self.segment_bytes)

    def _check_file_size(self, name: str, size: int) -> None:
        if int(name) % self.segment_bytes or size > self.segment_bytes:
            raise StoreDamaged(
                f"{LOG_DIRECTORY}/{name} has {size} bytes, but the configured segment size is "
                f"{self.segment_bytes}; set mappedFileSizeCommitLog to the size it was written with"
            )


# --- appending -----------------------------------------------------------------------------------


class LogBatch:
    """Records that are encoded for their log offsets and not written yet."""

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
        # Data that completes a segment, and the log offset at which it begins.
        self._full_segments: list[tuple[LogOffset, bytes]] = []

    def add(self, record: NewRecord, queue_offset: int, stored_ms: int) -> tuple[LogOffset, int]:
        """Add a record. Return its log offset and its size."""
        offset = self._end
        host, append_crc = self._store_host, self._append_crc
        size, pieces = encode_record_pieces(
            record, queue_offset, offset, stored_ms, host, append_crc
        )
        if size > self._remaining_bytes:
            # The record contains its own log offset, so it is encoded again for the next segment.
            offset = self._roll_segment(offset)
            size, pieces = encode_record_pieces(
                record, queue_offset, offset, stored_ms, host, append_crc
            )
        self._pieces += pieces
        self._end = offset + size  # type: ignore[assignment]  # LogOffset() would cost every send
        self._remaining_bytes -= size
        return offset, size

    def write(self) -> None:
        """Write all records. If that fails, none of them is in the log; raises StoreError."""
        parts: list[tuple[LogOffset, BytesLike]] = [*self._full_segments]
        if data := b"".join(self._pieces):
            parts.append((self._piece_begin, data))
        self._log.write_encoded(parts, self._end)

    def _roll_segment(self, log_offset: LogOffset) -> LogOffset:
        """End this segment with the blank record. Return where the next segment begins."""
        remaining = self._remaining_bytes + BLANK.size
        self._pieces.append(encode_blank(remaining))
        self._full_segments.append((self._piece_begin, b"".join(self._pieces)))
        self._pieces = []
        self._piece_begin = LogOffset(log_offset + remaining)
        self._remaining_bytes = self._log.segment_bytes - BLANK.size
        return self._piece_begin


_HOST_BITS: Final = BORN_HOST_IPV6 | STORE_HOST_IPV6
_HOST_V4_BYTES: Final = 8
# The layout of HEAD_V4 with the fields that all records of a run share as prepacked bytes: magic,
# queue id, and everything from sysFlag to the prepared offset.
_RUN_HEAD: Final = struct.Struct(">i4sI4siqq48si")
_SHARED_FIELDS: Final = struct.Struct(">iq8sq8siq")
assert _RUN_HEAD.size == HEAD_V4.size


class RunLogBatch(LogBatch):
    """A batch that also accepts runs (message/batch.py).

    The fields that all records of a run share are encoded once, the others column by column. The
    bytes are the same as `LogBatch.add` would produce; a test compares them.
    """

    __slots__ = ()

    def add_run(self, run: RecordRun, queue_offset: int, stored_ms: int) -> RunPositions:
        """Add all records of a run. Return their positions."""
        is_uniform = {len(self._store_host), len(run.born_host)} == {_HOST_V4_BYTES}
        if not is_uniform or has_crc_property(run.extra_properties):
            return self._add_records(run, queue_offset, stored_ms)
        magic, topic = encode_topic(run.topic)
        suffix = b"\x02" + run.extra_properties
        if self._append_crc and not suffix.endswith(b"\x02"):
            suffix += b"\x02"
        properties_bytes = len(UNIQUE_KEY_PREFIX) + len(run.keys[0]) + len(suffix)
        properties_bytes += CRC_PROPERTY_BYTES if self._append_crc else 0
        middle = topic + pack_properties_length(properties_bytes) + UNIQUE_KEY_PREFIX
        fixed_bytes = HEAD_V4.size + len(topic) + 2 + properties_bytes
        lengths = list(map(len, run.bodies))
        sizes = [fixed_bytes + length for length in lengths]
        log_offsets = list(accumulate(sizes, initial=int(self._end)))
        end = log_offsets.pop()
        if end - self._end > self._remaining_bytes:  # crosses into the next segment, which is rare
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
        pieces: list[Any] = self._pieces  # bodies may be memoryviews
        if self._append_crc:
            head_list, tails = list(heads), [middle + key for key in run.keys]
            crcs = map(crc32, tails, map(crc32, run.bodies, map(crc32, head_list)))
            seals = encode_crc_properties([crc32(suffix, crc) for crc in crcs])
            records = zip(head_list, run.bodies, tails, repeat(suffix), seals, strict=False)
        else:
            records = zip(heads, run.bodies, repeat(middle), run.keys, repeat(suffix), strict=False)
        pieces.extend(chain.from_iterable(records))
        self._remaining_bytes -= end - self._end
        self._end = LogOffset(end)
        return RunPositions(log_offsets, sizes)

    def _add_records(self, run: RecordRun, queue_offset: int, stored_ms: int) -> RunPositions:
        added = [
            self.add(record, offset, stored_ms)
            for offset, record in enumerate(run.records(), queue_offset)
        ]
        return RunPositions([int(offset) for offset, _ in added], [size for _, size in added])

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
