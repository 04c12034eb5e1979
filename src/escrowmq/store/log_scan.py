"""Read a log from record to record: past damage, up to its end, and never into a body.

The body of a message may contain bytes that look exactly like a record, with the right log offset
and the right checksum. So the position of a record is never found by searching. It follows from
what the store knows:

    the record before it      a valid record says where the next one begins
    segment ends              no record crosses one
    flush marks, checkpoint   the log was flushed up to here, and a flush ends with a record
    queue entries             each names the log offset and the size of a record

Behind a damaged record the scan continues at the end that the record itself claims, by its size and
by the sum of the lengths of its parts, if that can be trusted:

- Both are equal, and magic and log offset are right up to one bit: the damage is elsewhere.
- They differ, so one of them is damaged. The right one leads from record to record to a known
  boundary, past other damaged records. If both do, the log is taken up where the ways meet.
- Otherwise the scan continues at the next known boundary.

Whether invalid bytes are damage or the torn end of a crash, `LogHistory` decides: it says how far
the log was durable.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol

from escrowmq.errors import CorruptRecord
from escrowmq.message.record import (
    BLANK,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    RECORD_BYTES_MIN,
    LogOffset,
    RecordClaims,
    StoredRecord,
    decode_record,
    read_claims,
)
from escrowmq.store.commit_log import is_file_name
from escrowmq.store.consume_queue import (
    BLANK_SIZE,
    ENTRY,
    QUEUE_DIRECTORY,
    QUEUE_ENTRY_BYTES,
    queue_directories,
)
from escrowmq.store.disk import Disk, read_what_is_left

_CHUNK_BYTES: Final = 1 << 20
_ZEROS: Final = bytes(_CHUNK_BYTES)
# Behind the end of a log so many bytes are all tested, and then a sample of each interval. What a
# crash leaves is right behind the end; the remaining part is usually a hole of a sparse file.
_FULL_TEST_BYTES: Final = 8 << 20
_SAMPLE_BYTES: Final = 4096
_SAMPLE_INTERVAL_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Damage:
    """A range of the log that once held durable records and is invalid now."""

    begin: LogOffset
    end: LogOffset
    reason: str
    claims: RecordClaims | None = None  # what the first damaged record says about itself

    @property
    def size(self) -> int:
        return self.end - self.begin


class LogSource(Protocol):
    """The bytes of a log."""

    @property
    def segment_bytes(self) -> int: ...
    def files_end(self) -> LogOffset:
        """Return where the last segment ends."""

    def read_bytes(self, begin: int, end: int) -> bytes:
        """Return bytes of one segment: fewer if its file is shorter, none if it is missing."""


class KnownBoundaries:
    """Log offsets at which a record begins or ends, from everything but the log itself.

    Queue entries are read only for segments that need them, because there can be many.
    """

    def __init__(
        self, segment_bytes: int, log_offsets: Iterable[int] = (), queues: Disk | None = None
    ) -> None:
        self._segment_bytes = segment_bytes
        self._log_offsets = set(log_offsets)
        self._queues = queues
        self._by_segment: dict[int, list[int]] = {}

    def load_segment(self, log_offset: int) -> list[int]:
        """Return all known boundaries inside a segment, in order."""
        base = log_offset - log_offset % self._segment_bytes
        if base not in self._by_segment:
            end = base + self._segment_bytes
            boundaries = {offset for offset in self._log_offsets if base < offset < end}
            if self._queues is not None:
                boundaries |= _entry_boundaries(self._queues, base, end)
            self._by_segment[base] = sorted(boundaries)
        return self._by_segment[base]

    def load_damaged_segments(self, scanner: LogScanner, begin: LogOffset) -> None:
        """Read the queue entries of all segments that have invalid bytes, and none later."""
        if self._queues is not None and self._queues.names(QUEUE_DIRECTORY):
            for position in scanner.find_invalid(begin):
                self.load_segment(position)
        self._queues = None

    def next_after(self, log_offset: int) -> int:
        """Return the next known boundary. The end of the segment is always known."""
        boundaries = self.load_segment(log_offset)
        index = bisect_right(boundaries, log_offset)
        if index < len(boundaries):
            return boundaries[index]
        return (log_offset // self._segment_bytes + 1) * self._segment_bytes


def _entry_boundaries(disk: Disk, begin: int, end: int) -> set[int]:
    """Return where the records begin and end that queue entries name in a range of the log."""
    records = sorted(
        entry
        for topic, queue_id in queue_directories(disk)
        for entry in _entries_of(disk, f"{QUEUE_DIRECTORY}/{topic}/{queue_id}", begin, end)
    )
    # Two entries that overlap cannot both be right. Neither is used.
    is_wrong = {
        entry
        for entry, following in pairwise(records)
        if entry[0] + entry[1] > following[0] and entry != following
        for entry in (entry, following)
    }
    sound = [entry for entry in records if entry not in is_wrong]
    return {offset for offset, _ in sound} | {offset + size for offset, size in sound}


def _entries_of(disk: Disk, directory: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield log offset and size of the entries of one queue in a range of the log."""
    # The last file that begins below the range, and those that begin inside it.
    for name in reversed([name for name in disk.names(directory) if is_file_name(name)]):
        file = disk.open(f"{directory}/{name}", writable=False)
        try:
            content = read_what_is_left(file, 0, file.size)
        finally:
            file.close()
        content = content[: len(content) - len(content) % QUEUE_ENTRY_BYTES]
        count = len(content) // QUEUE_ENTRY_BYTES

        def log_offset_at(number: int, content: bytes = content) -> int:
            log_offset, size, _ = ENTRY.unpack_from(content, number * QUEUE_ENTRY_BYTES)
            return log_offset if size > 0 else 1 << 63  # behind the last entry

        first = bisect_left(range(count), begin, key=log_offset_at)
        last = bisect_left(range(count), end, key=log_offset_at)
        part = content[first * QUEUE_ENTRY_BYTES : last * QUEUE_ENTRY_BYTES]
        for log_offset, size, _ in ENTRY.iter_unpack(part):
            if size != BLANK_SIZE and begin <= log_offset < end and log_offset + size <= end:
                yield log_offset, size
        if first > 0:
            return


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHistory:
    """What is known about how a log was written."""

    boundaries: KnownBoundaries
    # Everything below was durable, so invalid bytes there are damage. None if that is unknown.
    durable_end: int | None = None
    # Everything that was written is there: the last process closed the store, or was killed while
    # the machine went on. So a torn end has no records behind it.
    has_all_writes: bool = False
    # Records that were stored up to this time were durable (RocketMQ's checkpoint).
    durable_ms: int = 0


class LogScanner:
    """One pass over a log. `end`, `torn_reason` and `damage` follow the iteration."""

    def __init__(self, source: LogSource, history: LogHistory) -> None:
        self.source = source
        self.history = history
        self.end = LogOffset(0)
        self.torn_reason: str | None = None  # why the log is cut at `end`; None if it is complete
        self.torn_offset = LogOffset(0)  # where the invalid bytes begin
        self.damage: list[Damage] = []
        # Position and claims of each damaged record, as far as its bytes say something.
        self.lost_records: list[tuple[int, RecordClaims]] = []
        self._data = b""  # a part of a segment
        self._data_begin = 0

    def records(self, begin: LogOffset) -> Iterator[StoredRecord]:
        """Yield the valid records from a record boundary on."""
        return (item for item in self.items(begin) if isinstance(item, StoredRecord))

    def items(self, begin: LogOffset) -> Iterator[StoredRecord | Damage]:
        """Yield records and damaged ranges in order, from a record boundary on."""
        position, limit = begin, self.source.files_end()
        self.end = begin
        while position < limit:
            try:
                record = self.record_at(position)
            except CorruptRecord as error:
                damage = self._judge(position, error.reason)
                if damage is None:
                    return
                self._add_damage(damage)
                position = damage.end
                # A damaged blank record at the end of a log is not part of it.
                self.end = position if position % self.source.segment_bytes else self.end
                yield damage
                continue
            if record is None:
                position = self._segment_end(position)
                continue
            position = self.end = LogOffset(record.log_offset + record.size)
            yield record

    def reject(self, record: StoredRecord, reason: str) -> bool:
        """Treat the record that was just yielded as invalid. Return whether to read on.

        False means that the log ends in front of the record.
        """
        end = LogOffset(record.log_offset + record.size)
        if not self._is_damage(record.log_offset, end):
            self.end = self.torn_offset = record.log_offset
            self.torn_reason = reason
            return False
        self._add_damage(Damage(record.log_offset, end, reason, self.claims_at(record.log_offset)))
        return True

    def find_invalid(self, begin: LogOffset) -> Iterator[LogOffset]:
        """Yield the first invalid position of each segment that has one."""
        position, limit = begin, self.source.files_end()
        while position < limit:
            try:
                record = self.record_at(position)
            except CorruptRecord:
                if self._is_zero_from(position):
                    return
                yield position
                record = None
            if record is None:
                position = self._segment_end(position)
            else:
                position = LogOffset(record.log_offset + record.size)

    # --- damage or the end ---------------------------------------------------------------------

    def _add_damage(self, damage: Damage) -> None:
        """Add a range. It becomes one with the previous range, if that ends where it begins."""
        if damage.claims is not None and damage.claims.magic != MAGIC_BLANK:
            self.lost_records.append((damage.begin, damage.claims))
        if self.damage and self.damage[-1].end == damage.begin:
            previous = self.damage.pop()
            damage = Damage(previous.begin, damage.end, previous.reason, previous.claims)
        self.damage.append(damage)

    def _judge(self, position: LogOffset, reason: str) -> Damage | None:
        """Return the damage that begins here; None if the log ends here."""
        durable_end = self.history.durable_end
        was_durable = durable_end is not None and position < durable_end
        if not was_durable and self._is_zero_from(position):
            return None
        end = self._next_boundary(position)
        if not was_durable and not self._is_damage(position, end):
            self.torn_offset, self.torn_reason = position, reason
            return None
        return Damage(position, end, reason, self.claims_at(position))

    def _is_damage(self, position: int, end: LogOffset) -> bool:
        """Return whether invalid bytes were durable. `end` is the next record boundary."""
        history = self.history
        if history.durable_end is not None and position < history.durable_end:
            return True
        following = self._first_record_from(end)
        if following is None:
            return False
        if history.has_all_writes or following.stored_ms <= history.durable_ms:
            return True
        # Segments are filled one after the other, so a crash tears only the last one.
        return history.durable_end is None and self._is_followed_by_a_segment(position)

    def _first_record_from(self, position: LogOffset) -> StoredRecord | None:
        """Return the record at a boundary, or the first of the next segment behind a blank."""
        if position >= self.source.files_end():
            return None
        try:
            record = self.record_at(position)
            if record is None and self._segment_end(position) < self.source.files_end():
                record = self.record_at(self._segment_end(position))
        except CorruptRecord:
            return None
        return record

    def _is_followed_by_a_segment(self, position: int) -> bool:
        return self._first_record_from(self._segment_end(position)) is not None

    def _is_zero_from(self, position: int) -> bool:
        """Return whether nothing was ever written from here on: the regular end of a log."""
        for base in range(position, self.source.files_end(), self.source.segment_bytes):
            begin = max(position, base - base % self.source.segment_bytes)
            if first_nonzero_offset(self.source, begin, self._segment_end(begin)) is not None:
                return False
        return True

    # --- boundaries ----------------------------------------------------------------------------

    def _next_boundary(self, position: LogOffset) -> LogOffset:
        """Return where the next record begins behind invalid bytes."""
        boundary = self.history.boundaries.next_after(position)
        claims = self.claims_at(position)
        if claims is None or self._is_damaged_blank(position, claims):
            return LogOffset(boundary)
        ends = self._claimed_ends(position, claims, boundary)
        if claims.size == claims.parts_size and ends and claims.wrong_bits(position) <= 1:
            return ends.pop()
        for passes_damage in (False, True):
            common = _Ways(self, boundary, passes_damage).common_positions(ends)
            if common is not None:
                return min(common)
        return LogOffset(boundary)

    def _claimed_ends(
        self, position: LogOffset, claims: RecordClaims, boundary: int
    ) -> set[LogOffset]:
        """Return where a damaged record ends, by its size and by the sum of its parts."""
        last_end = self._segment_end(position) - BLANK.size  # a blank record follows the last one
        return {
            LogOffset(position + size)
            for size in (claims.size, claims.parts_size)
            if size >= RECORD_BYTES_MIN and position + size <= min(boundary, last_end)
        }

    def _is_damaged_blank(self, position: int, claims: RecordClaims) -> bool:
        remaining = self._segment_end(position) - position
        is_record = claims.magic in (MAGIC_V1, MAGIC_V2)
        return claims.magic == MAGIC_BLANK or (claims.size == remaining and not is_record)

    def next_positions(
        self, position: LogOffset, begin: LogOffset, boundary: int, passes_damage: bool
    ) -> set[LogOffset]:
        """Return where a way to a known boundary can go on from a position; nowhere if it ends.

        `begin` is where the way begins. The end of the log counts as the known boundary.
        """
        try:
            record = self.record_at(position)
        except CorruptRecord:
            # A claimed end in the unwritten part leads to no record, so it proves nothing.
            is_unflushed = position >= (self.history.durable_end or 0)
            if position > begin and is_unflushed and self._is_zero_from(position):
                return {LogOffset(boundary)}
            claims = self.claims_at(position) if passes_damage else None
            # Only one thing may be wrong with it, or any bytes would look like a damaged record.
            is_alike = claims is not None and (
                claims.size == claims.parts_size or claims.wrong_bits(position) == 0
            )
            if claims is None or not is_alike:
                return set()
            return self._claimed_ends(position, claims, boundary)
        if record is None:
            return {self._segment_end(position)}
        return {LogOffset(position + record.size)}

    # --- reading -------------------------------------------------------------------------------

    def _segment_end(self, position: int) -> LogOffset:
        segment_bytes = self.source.segment_bytes
        return LogOffset((position // segment_bytes + 1) * segment_bytes)

    def record_at(self, position: LogOffset) -> StoredRecord | None:
        """Decode the record at a boundary; None if it is a blank record. Raises CorruptRecord."""
        data, index = self._bytes_at(position, RECORD_BYTES_MIN)
        if len(data) - index < BLANK.size:
            raise CorruptRecord(position, "the file is missing or too short")
        size, magic = BLANK.unpack_from(data, index)
        remaining = self._segment_end(position) - position
        if magic == MAGIC_BLANK and size == remaining:
            return None
        if size > len(data) - index and size <= remaining and self._may_be_long(position):
            data, index = self._bytes_at(position, size)
        return decode_record(data, index, position)

    def _may_be_long(self, position: LogOffset) -> bool:
        """Return whether it makes sense to read a long record. A damaged size may be any number."""
        claims = self.claims_at(position)
        return claims is not None and claims.size == claims.parts_size

    def claims_at(self, position: int) -> RecordClaims | None:
        """Return what the bytes at a position say about a record, valid or not."""
        segment_end = self._segment_end(position)

        def read(begin: int, end: int) -> bytes:
            first, last = position + begin, min(position + end, segment_end)
            if self._data_begin <= first and last <= self._data_begin + len(self._data):
                return self._data[first - self._data_begin : last - self._data_begin]
            return self.source.read_bytes(first, last) if first < last else b""

        return read_claims(read)

    def _bytes_at(self, position: int, size: int) -> tuple[bytes, int]:
        """Return bytes that contain `size` bytes from a position on, and the index of the first.

        There are fewer if the segment or its file ends before.
        """
        index = position - self._data_begin
        if index < 0 or index + size > len(self._data):
            end = min(position + max(size, _CHUNK_BYTES), self._segment_end(position))
            self._data = self.source.read_bytes(position, end)
            self._data_begin, index = position, 0
        return self._data, index


_FORKS_MAX: Final = 100


class _Ways:
    """The ways from record to record that lead to a known boundary.

    A way forks at a damaged record whose size and parts disagree: one of them is right. A fork that
    leads into a body ends there, unless the body contains forged records. So what all ways to the
    boundary have in common is right.
    """

    def __init__(self, scanner: LogScanner, boundary: int, passes_damage: bool) -> None:
        self._scanner = scanner
        self._boundary = boundary
        self._passes_damage = passes_damage
        self._by_fork: dict[frozenset[LogOffset], set[LogOffset] | None] = {}

    def common_positions(self, begins: Iterable[LogOffset]) -> set[LogOffset] | None:
        """Return the positions that are on every way from one of these; None if there is none.

        The known boundary is one of them.
        """
        fork = frozenset(begins)
        if fork not in self._by_fork:
            if len(self._by_fork) >= _FORKS_MAX:
                return None
            self._by_fork[fork] = None  # until it is known
            ways = [way for begin in fork if (way := self._follow(begin)) is not None]
            self._by_fork[fork] = set.intersection(*ways) if ways else None
        return self._by_fork[fork]

    def _follow(self, begin: LogOffset) -> set[LogOffset] | None:
        positions, position = {begin}, begin
        while position < self._boundary:
            following = self._scanner.next_positions(
                position, begin, self._boundary, self._passes_damage
            )
            if len(following) > 1:
                common = self.common_positions(following)
                return None if common is None else positions | common
            if not following:
                return None
            [position] = following
            positions.add(position)
        return positions if position == self._boundary else None


def first_nonzero_offset(source: LogSource, begin: int, end: int) -> int | None:
    """Return the log offset of the first byte in a segment that is not zero; None if none is."""
    full_end = min(end, begin + _FULL_TEST_BYTES)
    ranges = [
        (first, min(first + _CHUNK_BYTES, full_end))
        for first in range(begin, full_end, _CHUNK_BYTES)
    ]
    ranges += [
        (first, min(first + _SAMPLE_BYTES, end))
        for first in range(full_end, end, _SAMPLE_INTERVAL_BYTES)
    ]
    for first, last in ranges:
        chunk = source.read_bytes(first, last)
        if chunk != _ZEROS[: len(chunk)]:
            return first + len(chunk) - len(chunk.lstrip(b"\0"))
    return None
