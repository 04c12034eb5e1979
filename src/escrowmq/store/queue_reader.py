"""Read a queue: choose the records of a pull and return them as slices of the log.

    queue entries --filter, limits--> ranges of the log --> memoryviews

A record that is damaged is reported and passed like a message that does not exist: the read goes on
behind it, so a consumer neither stops there nor gets bytes that are not a message.

Also look up records by time (`offset_by_time`) and read the edges of a record without decoding all
of it (`RecordSummary`).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from escrowmq.errors import CorruptRecord, RecordNotFound
from escrowmq.message.record import BORN_HOST_IPV6, MAGIC_V1, MAGIC_V2, STORE_HOST_IPV6, QueueOffset
from escrowmq.store.commit_log import CommitLog
from escrowmq.store.consume_queue import BLANK_SIZE, ENTRY, QUEUE_ENTRY_BYTES, ConsumeQueue

_STORED_MS = struct.Struct(">q")
_SIZE_MAGIC = struct.Struct(">iI")
_INT = struct.Struct(">i")
_HEAD_BYTES_MAX = 112  # of a record, up to its body, if both hosts are IPv6 addresses

# Called with a queue, a queue offset, and what is wrong with the record there.
ReportDamage = Callable[[ConsumeQueue, int, CorruptRecord | RecordNotFound], None]


class EntryFilter(Protocol):
    """Which messages a reader wants, as far as the store has to know it.

    The tags code of a message is in its queue entry. Its properties are in the log, so they are
    read only if the tags code matches and `matches_properties` is not None.
    """

    @property
    def tags_codes(self) -> frozenset[int] | None:
        """The tags codes that match; None means that every code does."""

    @property
    def matches_properties(self) -> Callable[[bytes], bool] | None:
        """A test of the encoded properties; None means that there is none."""

    @property
    def scan_max(self) -> int:
        """How many entries one read may test, unless it may return more messages than that."""


class ReadStatus(enum.Enum):
    FOUND = "found"
    NO_MATCH = "no message matched the filter within the entries that were tested"
    NO_QUEUE = "the queue does not exist"
    EMPTY = "the queue has no message"
    TOO_SMALL = "the offset is below the oldest message"
    AT_END = "the offset is that of the next message to come"
    PAST_END = "the offset is above that of the next message to come"


@dataclass(slots=True, kw_only=True)
class QueueRead:
    """The result of a read. The slices are bytes of the log and stay valid."""

    status: ReadStatus
    next_offset: QueueOffset  # where the next read continues
    min_offset: QueueOffset
    max_offset: QueueOffset
    count: int = 0
    slices: list[memoryview] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(map(len, self.slices))


def read_queue(
    log: CommitLog,
    queue: ConsumeQueue | None,
    queue_offset: int,
    *,
    count_max: int,
    bytes_max: int,
    message_filter: EntryFilter | None = None,
    is_over: Callable[[], bool] | None = None,
    report_damage: ReportDamage = lambda queue, queue_offset, error: None,
) -> QueueRead:
    """Read at most `count_max` records and `bytes_max` bytes, but at least one record.

    Messages that the filter rejects are skipped; `next_offset` of the result is behind them. After
    `message_filter.scan_max` entries (or `count_max`, if that is more) the read returns what it
    has, so that a filter that matches nothing does not hold up other requests. So it does once
    `is_over` returns True, which is asked after each message whose properties were tested.
    """
    if queue is None:
        zero = QueueOffset(0)
        return QueueRead(
            status=ReadStatus.NO_QUEUE, next_offset=zero, min_offset=zero, max_offset=zero
        )
    low, high = queue.min_offset(log.begin), queue.visible_end
    if not low <= queue_offset < high:
        return _empty_read(queue_offset, low, high)
    for is_last_attempt in (False, False, True):
        result = QueueRead(
            status=ReadStatus.NO_MATCH,
            next_offset=QueueOffset(queue_offset),
            min_offset=low,
            max_offset=high,
        )
        collector = _SliceCollector(
            log, queue, result, count_max, bytes_max, message_filter, is_over
        )
        scanned, scan_max = 0, collector.scan_max
        while scanned < scan_max and result.next_offset < high:
            entries = queue.entries(
                result.next_offset, min(scan_max - scanned, high - result.next_offset)
            )
            scanned += len(entries) // QUEUE_ENTRY_BYTES
            if not collector.add_entries(entries):
                break
        try:
            result.slices = collector.slices()
        except (CorruptRecord, RecordNotFound) as error:
            # Read again without the records that are damaged. There is none if a read has failed
            # that succeeds now.
            _mark_unreadable(log, queue, queue_offset, result.next_offset, report_damage)
            if is_last_attempt:
                raise error
            continue
        if result.count:
            result.status = ReadStatus.FOUND
        break
    return result


def _mark_unreadable(
    log: CommitLog, queue: ConsumeQueue, begin: int, end: int, report_damage: ReportDamage
) -> None:
    """Find the damaged records between two queue offsets and let blank entries stand for them."""
    for queue_offset in range(begin, end):
        log_offset, size, _ = queue.entry(queue_offset)
        if size == BLANK_SIZE:
            continue
        try:
            log.slices([(log_offset, log_offset + size, queue_offset)], queue.topic, queue.queue_id)
        except (CorruptRecord, RecordNotFound) as error:
            queue.mark_unreadable(queue_offset)
            report_damage(queue, queue_offset, error)


def _empty_read(queue_offset: int, low: QueueOffset, high: QueueOffset) -> QueueRead:
    status, next_offset = ReadStatus.AT_END, high
    if high == 0:
        status = ReadStatus.EMPTY
    elif queue_offset < low:
        status, next_offset = ReadStatus.TOO_SMALL, low
    elif queue_offset > high:
        status = ReadStatus.PAST_END
    return QueueRead(status=status, next_offset=next_offset, min_offset=low, max_offset=high)


class _SliceCollector:
    """Turns queue entries into ranges of the log. Neighbouring records become one range."""

    def __init__(
        self,
        log: CommitLog,
        queue: ConsumeQueue,
        result: QueueRead,
        count_max: int,
        bytes_max: int,
        message_filter: EntryFilter | None,
        is_over: Callable[[], bool] | None,
    ) -> None:
        self._log = log
        self._queue = queue
        self._result = result
        self._count_max = self._remaining_count = self.scan_max = count_max
        self._remaining_bytes = bytes_max
        self._tags_codes: frozenset[int] | None = None
        self._matches_properties: Callable[[bytes], bool] | None = None
        self._is_over: Callable[[], bool] | None = None
        if message_filter is not None:
            self._tags_codes = message_filter.tags_codes
            self._matches_properties = message_filter.matches_properties
            if self._tags_codes is not None or self._matches_properties is not None:
                self.scan_max = max(count_max, message_filter.scan_max)
            if self._matches_properties is not None:
                self._is_over = is_over
        self._ranges: list[tuple[int, int, int]] = []  # begin, end, first queue offset

    def add_entries(self, entries: bytes | bytearray | memoryview) -> bool:
        """Add the matching entries. Return whether the limits allow more."""
        # The inner loop of every pull: local names, a set look-up instead of a call for tags.
        tags_codes, matches_properties = self._tags_codes, self._matches_properties
        ranges = self._ranges
        begin, end, first_offset = ranges[-1] if ranges else (-1, -1, -1)
        remaining_count, remaining_bytes = self._remaining_count, self._remaining_bytes
        is_over, has_time = self._is_over, True
        tested, next_offset = 0, self._result.next_offset
        for log_offset, size, tags_code in ENTRY.iter_unpack(entries):
            if (
                size != BLANK_SIZE
                and (tags_codes is None or tags_code in tags_codes)
                and (
                    matches_properties is None
                    or matches_properties(self._properties(log_offset, size))
                )
            ):
                remaining_bytes -= size
                # The byte limit does not apply to the first record.
                if remaining_bytes < 0 and remaining_count < self._count_max:
                    break
                remaining_count -= 1
                if log_offset == end:
                    end += size
                    ranges[-1] = begin, end, first_offset
                else:
                    begin, end, first_offset = log_offset, log_offset + size, next_offset + tested
                    ranges.append((begin, end, first_offset))
                if remaining_count == 0 or remaining_bytes < 0:
                    tested += 1
                    break
            tested += 1
            if is_over is not None and is_over():
                has_time = False
                break
        result = self._result
        result.next_offset = QueueOffset(result.next_offset + tested)
        result.count += self._remaining_count - remaining_count
        self._remaining_count, self._remaining_bytes = remaining_count, remaining_bytes
        return remaining_count > 0 and remaining_bytes >= 0 and has_time

    def slices(self) -> list[memoryview]:
        return self._log.slices(self._ranges, self._queue.topic, self._queue.queue_id)

    def _properties(self, log_offset: int, size: int) -> bytes:
        summary = read_record_summary(self._log, 0, log_offset, size)
        return b"" if summary is None else summary.properties


# --- records without their bodies ----------------------------------------------------------------


class RecordSummary(msgspec.Struct, frozen=True, gc=False):
    """What can be read of a record without decoding its body or checking its CRC."""

    queue_offset: int
    log_offset: int
    size: int
    stored_ms: int
    properties: bytes


class RecordWindow(msgspec.Struct, frozen=True, gc=False):
    """Queue entries, and a part of the log that has their records."""

    count: int
    entries: bytes
    data: bytes
    data_begin: int  # log offset


def read_record_summary(
    log: CommitLog, queue_offset: int, log_offset: int, size: int
) -> RecordSummary | None:
    """Return the summary of a record, or None if the bytes there do not look like one."""
    try:
        view = log.view(log_offset, log_offset + min(size, _HEAD_BYTES_MAX))
        own_size, magic = _SIZE_MAGIC.unpack_from(view)
        if own_size != size or magic not in (MAGIC_V1, MAGIC_V2):
            return None
        # The layout is in message/record.py. Host addresses, body and topic vary in length.
        host_bits = view[39]
        position = 56 if not host_bits & BORN_HOST_IPV6 else 68
        stored_ms = _STORED_MS.unpack_from(view, position)[0]
        position += 28 if not host_bits & STORE_HOST_IPV6 else 40
        position += 4 + _INT.unpack_from(view, position)[0]  # the body
        if not 0 < position < size:
            return None
        view = log.view(log_offset + position, log_offset + size)
        topic_bytes = 1 + view[0] if magic == MAGIC_V1 else 2 + view[0] * 256 + view[1]
        properties_bytes = view[topic_bytes] * 256 + view[topic_bytes + 1]
    except (RecordNotFound, CorruptRecord, struct.error, IndexError):
        return None
    if topic_bytes + 2 + properties_bytes != len(view):
        return None
    properties = bytes(view[topic_bytes + 2 :])
    return RecordSummary(queue_offset, log_offset, size, stored_ms, properties)


# --- records by time -----------------------------------------------------------------------------


def offset_by_time(
    log: CommitLog, queue: ConsumeQueue, time_ms: int, *, upper: bool = False
) -> QueueOffset:
    """Return the offset of the first message stored at `time_ms` or later.

    With `upper`, return the offset of the last message that is not later. The result is within the
    queue, or its next offset if every message is older.
    """
    low, high = queue.min_offset(log.begin), queue.next_offset
    first = low
    # A binary search. Stored times decrease only where a clock was wrong by more than ten minutes,
    # and then the result may be the first message that was stored with the wrong time.
    while low < high:
        middle = QueueOffset((low + high) // 2)
        stored_ms = first_stored_ms(log, queue, middle)
        if stored_ms is not None and (stored_ms <= time_ms if upper else stored_ms < time_ms):
            low = QueueOffset(middle + 1)
        else:
            high = middle
    return max(first, QueueOffset(low - 1)) if upper else low


def first_stored_ms(log: CommitLog, queue: ConsumeQueue, queue_offset: int) -> int | None:
    """Return when the message at this offset was stored, or the next one if it is missing.

    Return None if no message follows.
    """
    for offset in range(queue_offset, queue.next_offset):
        log_offset, size, _ = queue.entry(offset)
        if size != BLANK_SIZE:
            stored_ms = _stored_ms(log, log_offset, size)
            if stored_ms is not None:
                return stored_ms
    return None


def _stored_ms(log: CommitLog, log_offset: int, size: int) -> int | None:
    """Return when a record was stored; None if it cannot be read."""
    try:
        view = log.view(log_offset, log_offset + min(size, _HEAD_BYTES_MAX))
        own_size, magic = _SIZE_MAGIC.unpack_from(view)
        position = 68 if view[39] & BORN_HOST_IPV6 else 56
        stored_ms = int(_STORED_MS.unpack_from(view, position)[0])
    except (RecordNotFound, CorruptRecord, struct.error, IndexError):
        return None
    return stored_ms if own_size == size and magic in (MAGIC_V1, MAGIC_V2) else None
