"""Read a queue: which records a pull gets, as slices of the log, not copied."""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from escrowmq.errors import RecordNotFound
from escrowmq.message.record import BORN_HOST_IPV6, MAGIC_V1, MAGIC_V2, STORE_HOST_IPV6, QueueOffset
from escrowmq.store.commit_log import CommitLog
from escrowmq.store.consume_queue import BLANK_SIZE, ENTRY, ConsumeQueue
from escrowmq.store.settings import QUEUE_ENTRY_BYTES

SCANNED_MAX: Final = 800  # entries that one read may look at while a filter refuses them
_STORED_MS = struct.Struct(">q")
_SIZE_MAGIC = struct.Struct(">iI")
_INT = struct.Struct(">i")


class ReadStatus(enum.Enum):
    FOUND = "found"
    NO_MATCH = "no message matched the filter, as far as was looked"
    NO_QUEUE = "there is no such queue"
    EMPTY = "the queue has no message"
    TOO_SMALL = "the offset is below the oldest message"
    AT_END = "the offset is that of the next message to come"
    PAST_END = "the offset is past the next message to come"


@dataclass(slots=True, kw_only=True)
class QueueRead:
    status: ReadStatus
    next_offset: QueueOffset  # where to read on
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
    tag_filter: Callable[[int], bool] | None = None,
    property_filter: Callable[[bytes], bool] | None = None,
    scanned_max: int = SCANNED_MAX,
) -> QueueRead:
    """At most `count_max` records and `bytes_max` bytes, but one record at the least.

    `accepts` is asked with the tags code of each entry, `wants` with the properties of its record;
    refused ones are stepped over, `scanned_max` of them at most.
    """
    nothing = _empty_read(log, queue, queue_offset)
    if nothing is not None or queue is None:
        assert nothing is not None
        return nothing
    found = QueueRead(
        status=ReadStatus.NO_MATCH,
        next_offset=QueueOffset(queue_offset),
        min_offset=queue.min_offset(log.begin),
        max_offset=queue.visible_end,
    )
    picker = _SliceCollector(log, found, count_max, bytes_max, tag_filter, property_filter)
    scanned = 0
    is_filtered = tag_filter is not None or property_filter is not None
    scanned_max = max(count_max, scanned_max) if is_filtered else count_max
    while scanned < scanned_max and found.next_offset < queue.visible_end:
        entries = queue.entries(
            found.next_offset, min(scanned_max - scanned, queue.visible_end - found.next_offset)
        )
        scanned += len(entries) // QUEUE_ENTRY_BYTES
        if not picker.add_entries(entries):
            break
    picker.finish()
    if found.count:
        found.status = ReadStatus.FOUND
    return found


def _empty_read(log: CommitLog, queue: ConsumeQueue | None, queue_offset: int) -> QueueRead | None:
    if queue is None:
        zero = QueueOffset(0)
        return QueueRead(
            status=ReadStatus.NO_QUEUE, next_offset=zero, min_offset=zero, max_offset=zero
        )
    low, high = queue.min_offset(log.begin), queue.visible_end
    if high == 0 or low == high == queue_offset:
        status = ReadStatus.EMPTY if high == 0 else ReadStatus.AT_END
        return QueueRead(status=status, next_offset=high, min_offset=low, max_offset=high)
    if queue_offset < low:
        return QueueRead(
            status=ReadStatus.TOO_SMALL, next_offset=low, min_offset=low, max_offset=high
        )
    if queue_offset == high:
        return QueueRead(
            status=ReadStatus.AT_END, next_offset=high, min_offset=low, max_offset=high
        )
    if queue_offset > high:
        return QueueRead(
            status=ReadStatus.PAST_END, next_offset=high, min_offset=low, max_offset=high
        )
    return None


class _SliceCollector:
    """Turns queue entries into slices of the log; records that lie side by side become one."""

    def __init__(
        self,
        log: CommitLog,
        result: QueueRead,
        count_max: int,
        bytes_max: int,
        tag_filter: Callable[[int], bool] | None,
        property_filter: Callable[[bytes], bool] | None,
    ) -> None:
        self._log = log
        self._result = result
        self._count_max = self._remaining_count = count_max
        self._remaining_bytes = bytes_max
        self._tag_filter = tag_filter
        self._property_filter = property_filter
        self._ranges: list[tuple[int, int]] = []

    def add_entries(self, entries: bytes | bytearray | memoryview) -> bool:
        """Whether there is room for more."""
        accepts, wants, runs = self._tag_filter, self._property_filter, self._ranges
        begin, end = runs[-1] if runs else (-1, -1)
        count_left, bytes_left, seen = self._remaining_count, self._remaining_bytes, 0
        for log_offset, size, tags_code in ENTRY.iter_unpack(entries):
            if (
                size != BLANK_SIZE
                and (accepts is None or accepts(tags_code))
                and (wants is None or wants(self._properties(log_offset, size)))
            ):
                bytes_left -= size
                if count_left == 0 or (bytes_left < 0 and count_left < self._count_max):
                    bytes_left = -1
                    break
                count_left -= 1
                if log_offset == end:
                    end += size
                    runs[-1] = begin, end
                else:
                    begin, end = log_offset, log_offset + size
                    runs.append((begin, end))
            seen += 1
        found = self._result
        found.next_offset = QueueOffset(found.next_offset + seen)
        found.count += self._remaining_count - count_left
        self._remaining_count, self._remaining_bytes = count_left, bytes_left
        return count_left > 0 and bytes_left >= 0

    def _properties(self, log_offset: int, size: int) -> bytes:
        glance = read_record_summary(self._log, 0, log_offset, size)
        return b"" if glance is None else glance.properties

    def finish(self) -> None:
        self._result.slices = self._log.slices(self._ranges)


class RecordSummary(msgspec.Struct, frozen=True, gc=False):
    """A record, as far as its queue and its edges tell."""

    queue_offset: int
    log_offset: int
    size: int
    stored_ms: int
    properties: bytes


def read_record_summary(
    log: CommitLog, queue_offset: int, log_offset: int, size: int
) -> RecordSummary | None:
    try:
        view = log.view(log_offset, log_offset + size)
        own_size, magic = _SIZE_MAGIC.unpack_from(view)
        host_bits = view[39]
        at = 56 if not host_bits & BORN_HOST_IPV6 else 68
        stored_ms = _STORED_MS.unpack_from(view, at)[0]
        at += 28 if not host_bits & STORE_HOST_IPV6 else 40
        at += 4 + _INT.unpack_from(view, at)[0]  # the body
        at += 1 + view[at] if magic == MAGIC_V1 else 2 + view[at] * 256 + view[at + 1]  # the topic
        length = view[at] * 256 + view[at + 1]
    except (RecordNotFound, struct.error, IndexError):
        return None
    if own_size != size or magic not in (MAGIC_V1, MAGIC_V2) or at + 2 + length != size:
        return None
    return RecordSummary(queue_offset, log_offset, size, stored_ms, bytes(view[at + 2 :]))


def stored_ms_at(log: CommitLog, log_offset: int, size: int) -> int:
    """When the record there was stored, without decoding the rest of it."""
    view = log.view(log_offset, log_offset + size)
    at = 68 if view[39] & BORN_HOST_IPV6 else 56
    return int(_STORED_MS.unpack_from(view, at)[0])


def offset_by_time(
    log: CommitLog, queue: ConsumeQueue, time_ms: int, *, upper: bool = False
) -> QueueOffset:
    """The first message stored at `time_ms` or later; with `upper`, the last one not later."""
    low, high = queue.min_offset(log.begin), queue.next_offset
    first = low
    while low < high:
        middle = QueueOffset((low + high) // 2)
        stored_ms = first_stored_ms(log, queue, middle)
        if stored_ms is not None and (stored_ms <= time_ms if upper else stored_ms < time_ms):
            low = QueueOffset(middle + 1)
        else:
            high = middle
    return max(first, QueueOffset(low - 1)) if upper else low


def first_stored_ms(log: CommitLog, queue: ConsumeQueue, queue_offset: int) -> int | None:
    """Of the message at this offset, or of the next one that is there."""
    for at in range(queue_offset, queue.next_offset):
        log_offset, size, _ = queue.entry(at)
        if size != BLANK_SIZE:
            return stored_ms_at(log, log_offset, size)
    return None
