"""The reading side of a store: by queue, by log offset, by key and by time. It writes nothing.

`MessageStore` is a `StoreReader` that can also append.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from escrowmq.errors import CorruptRecord, RecordNotFound
from escrowmq.message.keys import tags_and_keys
from escrowmq.message.record import LogOffset, QueueOffset, StoredRecord
from escrowmq.sliced_work import SlicedResult, run_to_end
from escrowmq.store.commit_log import CommitLog
from escrowmq.store.consume_queue import BLANK_SIZE, ENTRY, ConsumeQueue, QueueTable
from escrowmq.store.damage import DamageKind, DamageReports
from escrowmq.store.key_index import RESULTS_MAX, KeyIndex
from escrowmq.store.queue_reader import (
    EntryFilter,
    QueueRead,
    RecordSummary,
    RecordWindow,
    first_stored_ms,
    offset_by_time,
    read_queue,
    read_record_summary,
)

PIECE_BYTES: Final = 256 * 1024  # of a record that is read in pieces
_TIME_MAX_MS: Final = 1 << 62
_WINDOW_BYTES_MAX: Final = 1 << 20
_RECORD_DISTANCE_MAX: Final = 16 * 1024  # on average; to read what is between them costs more


class StoreReader:
    """The reading side of a store: by queue, log offset, key and time. It writes nothing."""

    _log: CommitLog
    _queues: QueueTable
    _index: KeyIndex
    _last_record_offset: int
    damage: DamageReports

    def read(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        *,
        count_max: int = 32,
        bytes_max: int = 256 * 1024,
        message_filter: EntryFilter | None = None,
        is_over: Callable[[], bool] | None = None,
    ) -> QueueRead:
        """Read messages of a queue, see `read_queue`."""
        queue = self._queues.find(topic, queue_id)
        return read_queue(
            self._log,
            queue,
            queue_offset,
            count_max=count_max,
            bytes_max=bytes_max,
            message_filter=message_filter,
            is_over=is_over,
            report_damage=self._report_damaged_record,
        )

    def find_queue(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """Return a queue for the native path, which reads its entries itself."""
        return self._queues.find(topic, queue_id)

    def read_block(self, begin: int, end: int, is_dense: bool) -> tuple[int, bytes]:
        """Return bytes of the log that are not checked, see `CommitLog.read_block`."""
        return self._log.read_block(begin, end, is_dense)

    def _report_damaged_record(
        self, queue: ConsumeQueue, queue_offset: int, error: CorruptRecord | RecordNotFound
    ) -> None:
        description = f"message {queue_offset} of this queue cannot be read: {error}"
        self.damage.add(DamageKind.LOG, queue.directory, description, is_repaired=False)

    def record_at(self, log_offset: int) -> StoredRecord:
        """Decode the record at a log offset. Raises RecordNotFound or CorruptRecord."""
        return self._log.record_at(LogOffset(log_offset))

    def record_bytes(self, record: StoredRecord) -> memoryview:
        """Return the encoded record. Raises RecordNotFound or CorruptRecord."""
        return self._log.view(record.log_offset, record.log_offset + record.size)

    def record_pieces(self, record: StoredRecord) -> Iterator[bytes]:
        """Yield copies of the encoded record's pieces: 4 MiB at once take some milliseconds.

        Raises as `record_bytes` does, also behind the first piece.
        """
        end = record.log_offset + record.size
        for begin in range(record.log_offset, end, PIECE_BYTES):
            yield bytes(self._log.view(begin, min(begin + PIECE_BYTES, end)))

    @property
    def last_record_offset(self) -> int:
        """Return the log offset of the newest record; -1 if there is none."""
        return self._last_record_offset

    def records(self, begin: int = 0, end: int | None = None) -> Iterator[StoredRecord]:
        """Yield the records between two record boundaries of the log."""
        return self._log.records(LogOffset(begin), None if end is None else LogOffset(end))

    def find_by_key(
        self,
        topic: str,
        key: str,
        *,
        count_max: int = 32,
        begin_ms: int = 0,
        end_ms: int = _TIME_MAX_MS,
    ) -> list[StoredRecord]:
        """Return records of a topic with a key or unique key, the newest first."""
        limits = {"count_max": count_max, "begin_ms": begin_ms, "end_ms": end_ms}
        return run_to_end(self.search_by_key(topic, key, with_bodies=True, **limits))

    def search_by_key(
        self,
        topic: str,
        key: str,
        *,
        count_max: int = 32,
        begin_ms: int = 0,
        end_ms: int = _TIME_MAX_MS,
        with_bodies: bool = True,
    ) -> SlicedResult[list[StoredRecord]]:
        """Do the same as `find_by_key` in slices: many keys may have the hash of this one.

        Without bodies the records are short, and many searches can go on at the same time.
        """
        key_bytes = key.encode()
        matching: list[StoredRecord] = []
        for log_offset in self._index.find_in_slices(topic, key_bytes, begin_ms, end_ms):
            yield
            if log_offset is None:
                continue
            try:
                record = self._log.record_at(log_offset)
            except (RecordNotFound, CorruptRecord):
                continue  # the record has expired, or the index entry is damaged
            _, keys = tags_and_keys(record.topic, record.properties)
            in_window = begin_ms <= record.stored_ms <= end_ms  # the index stores only seconds
            if self._queues.deleted_topics.is_deleted(topic, record.log_offset):
                continue
            if record.topic == topic and key_bytes in keys and in_window:
                if not with_bodies:
                    record = msgspec.structs.replace(record, body=b"")
                matching.append(record)
                if len(matching) >= min(count_max, RESULTS_MAX):
                    break
        return matching

    def log_offset_of(self, topic: str, queue_id: int, queue_offset: int) -> LogOffset | None:
        """Return the log offset of a message by its queue offset; None if there is none."""
        queue = self._queues.find(topic, queue_id)
        if queue is None or not queue.first_offset <= queue_offset < queue.next_offset:
            return None
        log_offset, size, _ = queue.entry(queue_offset)
        return None if size == BLANK_SIZE else LogOffset(log_offset)

    def entries(
        self, topic: str, queue_id: int, begin: int, count: int
    ) -> list[tuple[int, int, int]]:
        """Return log offset, size and tags code of up to `count` entries of a queue."""
        queue = self._queues.find(topic, queue_id)
        result: list[tuple[int, int, int]] = []
        while queue is not None and len(result) < count:
            offset = max(begin, queue.first_offset) + len(result)
            entries = queue.entries(offset, min(count - len(result), queue.visible_end - offset))
            if not entries:
                break
            result += ENTRY.iter_unpack(bytes(entries))
        return result

    def record_summaries(
        self, topic: str, queue_id: int, begin: int, end: int
    ) -> Iterator[RecordSummary]:
        """Yield summaries of the records of a queue, without their bodies.

        Entries that do not point to anything like a record are skipped. The CRC is not checked;
        `record_at` does that.
        """
        queue = self._queues.find(topic, queue_id)
        offset = begin if queue is None else max(begin, queue.first_offset)
        while queue is not None and offset < min(end, queue.next_offset):
            entries = queue.entries(offset, min(end, queue.next_offset) - offset)
            for log_offset, size, _ in ENTRY.iter_unpack(bytes(entries)):
                summary = (
                    None
                    if size == BLANK_SIZE
                    else read_record_summary(self._log, offset, log_offset, size)
                )
                if summary is not None:
                    yield summary
                offset += 1

    def record_window(self, topic: str, queue_id: int, begin: int, end: int) -> RecordWindow | None:
        """Return neighbouring records of a queue from `begin` on, at most a mebibyte.

        Nothing is checked; an entry may point anywhere. Return None if the records are far apart,
        or if they cannot be read.
        """
        queue = self._queues.find(topic, queue_id)
        if queue is None or not queue.first_offset <= begin < min(end, queue.next_offset):
            return None
        entries = bytes(queue.entries(begin, min(end, queue.next_offset) - begin))
        data_begin, _, _ = ENTRY.unpack_from(entries)
        segment_bytes = self._log.segment_bytes
        segment_end = (data_begin // segment_bytes + 1) * segment_bytes
        data_end_max = min(data_begin + _WINDOW_BYTES_MAX, segment_end)

        def record_end(index: int) -> int:
            log_offset, size, _ = ENTRY.unpack_from(entries, index * ENTRY.size)
            return int(log_offset + size)

        # Log offsets increase from entry to entry, so the last one that fits is found by bisection.
        count = bisect_right(range(len(entries) // ENTRY.size), data_end_max, key=record_end)
        if not count or record_end(count - 1) - data_begin > count * _RECORD_DISTANCE_MAX:
            return None
        try:
            data = bytes(self._log.view(data_begin, record_end(count - 1)))
        except (RecordNotFound, CorruptRecord):
            return None
        return RecordWindow(count, entries[: count * ENTRY.size], data, data_begin)

    def min_offset(self, topic: str, queue_id: int) -> QueueOffset:
        """Return the offset of the oldest message of a queue; 0 if the queue does not exist."""
        queue = self._queues.find(topic, queue_id)
        return QueueOffset(0) if queue is None else queue.min_offset(self._log.begin)

    def max_offset(self, topic: str, queue_id: int) -> QueueOffset:
        """Return the offset of the next message, or of the first hidden message."""
        queue = self._queues.find(topic, queue_id)
        return QueueOffset(0) if queue is None else queue.visible_end

    def hide(self, topic: str, queue_id: int, queue_offset: int) -> None:
        """Hide the messages of a queue from an offset on, until `unhide`."""
        self._queues.get_or_create(topic, queue_id).hide(queue_offset)

    def unhide(self, topic: str, queue_id: int) -> None:
        """Undo one `hide`. Messages are visible again after as many calls."""
        self._queues.get_or_create(topic, queue_id).unhide()

    def offset_by_time(
        self, topic: str, queue_id: int, time_ms: int, *, upper: bool = False
    ) -> QueueOffset:
        """Return the offset of a message by its stored time, see queue_reader.offset_by_time."""
        queue = self._queues.find(topic, queue_id)
        if queue is None:
            return QueueOffset(0)
        return offset_by_time(self._log, queue, time_ms, upper=upper)

    def earliest_stored_ms(self, topic: str, queue_id: int) -> int:
        """Return when the oldest message of a queue was stored; -1 if it has none."""
        queue = self._queues.find(topic, queue_id)
        stored_ms = None
        if queue is not None:
            stored_ms = first_stored_ms(self._log, queue, queue.min_offset(self._log.begin))
        return -1 if stored_ms is None else stored_ms

    def stored_ms(self, topic: str, queue_id: int, queue_offset: int) -> int | None:
        """Return when the message at an offset, or the next existing one, was stored, or None."""
        queue = self._queues.find(topic, queue_id)
        if queue is None:
            return None
        return first_stored_ms(
            self._log, queue, max(queue_offset, queue.min_offset(self._log.begin))
        )

    def has_queue(self, topic: str, queue_id: int) -> bool:
        return self._queues.find(topic, queue_id) is not None

    def queues(self) -> list[tuple[str, int]]:
        """Return topic and queue id of every queue."""
        return [(queue.topic, queue.queue_id) for queue in self._queues]
