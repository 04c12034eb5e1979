"""The reading side of a store: by queue, by place, by key, by time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from escrowmq.errors import CorruptRecord, NoSuchRecord
from escrowmq.message.facts import derive
from escrowmq.message.ids import decode_offset_id
from escrowmq.message.offsets import LogOffset, QueueOffset
from escrowmq.message.record import StoredRecord
from escrowmq.store.commitlog import CommitLog
from escrowmq.store.consumequeue import BLANK_SIZE, ENTRY
from escrowmq.store.keyindex import FOUND_MAX, KeyIndex
from escrowmq.store.queuetable import QueueTable
from escrowmq.store.read import (
    SCANNED_MAX,
    Glance,
    QueueRead,
    first_stored_ms,
    glance_at,
    offset_by_time,
    read_queue,
)

_EVER_MS: Final = 1 << 62


class StoreReads:
    """What MessageStore can be asked, and what of it can be seen. Nothing here touches the disk."""

    _log: CommitLog
    _queues: QueueTable
    _index: KeyIndex
    _last_record: int

    def read(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        *,
        count_max: int = 32,
        bytes_max: int = 256 * 1024,
        accepts: Callable[[int], bool] | None = None,
        wants: Callable[[bytes], bool] | None = None,
        scanned_max: int = SCANNED_MAX,
    ) -> QueueRead:
        queue = self._queues.find(topic, queue_id)
        return read_queue(
            self._log,
            queue,
            queue_offset,
            count_max=count_max,
            bytes_max=bytes_max,
            accepts=accepts,
            wants=wants,
            scanned_max=scanned_max,
        )

    def record_at(self, log_offset: int) -> StoredRecord:
        return self._log.record_at(LogOffset(log_offset))

    def record_by_id(self, offset_id: str) -> StoredRecord:
        """The record that an offset id names, whatever host it speaks of."""
        return self.record_at(decode_offset_id(offset_id)[1])

    def bytes_of(self, record: StoredRecord) -> memoryview:
        """A record as it lies in the log."""
        return self._log.view(record.log_offset, record.log_offset + record.size)

    @property
    def last_record(self) -> int:
        """Where the newest record begins; -1 if there is none."""
        return self._last_record

    def records(self, begin: int = 0, end: int | None = None) -> Iterator[StoredRecord]:
        """Every record between two boundaries of the log."""
        return self._log.records(LogOffset(begin), None if end is None else LogOffset(end))

    def find_by_key(
        self,
        topic: str,
        key: str,
        *,
        count_max: int = 32,
        begin_ms: int = 0,
        end_ms: int = _EVER_MS,
    ) -> list[StoredRecord]:
        """Records of a topic that carry a key or unique key, the newest first."""
        sought = key.encode()
        found: list[StoredRecord] = []
        for log_offset in self._index.find(topic, sought, begin_ms, end_ms):
            try:
                record = self._log.record_at(log_offset)
            except (NoSuchRecord, CorruptRecord):
                continue  # expired, or an index that lies
            _, keys = derive(record.topic, record.properties, record.stored_ms)
            in_window = begin_ms <= record.stored_ms <= end_ms  # the index only knows seconds
            if self._queues.deleted.covers(topic, record.log_offset):
                continue
            if record.topic == topic and sought in keys and in_window:
                found.append(record)
                if len(found) >= min(count_max, FOUND_MAX):
                    break
        return found

    def entry_at(self, topic: str, queue_id: int, queue_offset: int) -> LogOffset | None:
        """Where the message at this place of a queue lies; None if there is none."""
        queue = self._queues.find(topic, queue_id)
        if queue is None or not queue.first <= queue_offset < queue.next:
            return None
        log_offset, size, _ = queue.entry(queue_offset)
        return None if size == BLANK_SIZE else LogOffset(log_offset)

    def entries(
        self, topic: str, queue_id: int, begin: int, count: int
    ) -> list[tuple[int, int, int]]:
        """Log offset, size and tags code of the messages from a place of a queue on."""
        queue = self._queues.find(topic, queue_id)
        found: list[tuple[int, int, int]] = []
        while queue is not None and len(found) < count:
            at = max(begin, queue.first) + len(found)
            entries = queue.entries(at, min(count - len(found), queue.end - at))
            if not entries:
                break
            found += ENTRY.iter_unpack(bytes(entries))
        return found

    def glances(self, topic: str, queue_id: int, begin: int, end: int) -> Iterator[Glance]:
        """What lies at each place of a queue, without a look at the bodies. One that does not look
        like a record at all is left out; whether it is whole, `record_at` finds out."""
        queue = self._queues.find(topic, queue_id)
        at = begin if queue is None else max(begin, queue.first)
        while queue is not None and at < min(end, queue.next):
            entries = queue.entries(at, min(end, queue.next) - at)
            for log_offset, size, _ in ENTRY.iter_unpack(bytes(entries)):
                found = None if size == BLANK_SIZE else glance_at(self._log, at, log_offset, size)
                if found is not None:
                    yield found
                at += 1

    def min_offset(self, topic: str, queue_id: int) -> QueueOffset:
        queue = self._queues.find(topic, queue_id)
        return QueueOffset(0) if queue is None else queue.min_offset(self._log.begin)

    def max_offset(self, topic: str, queue_id: int) -> QueueOffset:
        """The offset that the next message will have; of a queue on hold, of the first unseen."""
        queue = self._queues.find(topic, queue_id)
        return QueueOffset(0) if queue is None else queue.end

    def hold(self, topic: str, queue_id: int, queue_offset: int) -> None:
        """What lies from there on in this queue is seen by nobody until `show`."""
        self._queues.find_or_make(topic, queue_id).hold(queue_offset)

    def show(self, topic: str, queue_id: int) -> None:
        """As often as it was held."""
        self._queues.find_or_make(topic, queue_id).show()

    def offset_by_time(
        self, topic: str, queue_id: int, time_ms: int, *, upper: bool = False
    ) -> QueueOffset:
        queue = self._queues.find(topic, queue_id)
        if queue is None:
            return QueueOffset(0)
        return offset_by_time(self._log, queue, time_ms, upper=upper)

    def earliest_stored_ms(self, topic: str, queue_id: int) -> int:
        """When the oldest message of a queue was stored; -1 if it has none."""
        queue = self._queues.find(topic, queue_id)
        found = None
        if queue is not None:
            found = first_stored_ms(self._log, queue, queue.min_offset(self._log.begin))
        return -1 if found is None else found

    def stored_ms(self, topic: str, queue_id: int, queue_offset: int) -> int | None:
        """When the message at this place of a queue, or the next one there, was stored."""
        queue = self._queues.find(topic, queue_id)
        if queue is None:
            return None
        return first_stored_ms(
            self._log, queue, max(queue_offset, queue.min_offset(self._log.begin))
        )

    def queues(self) -> list[tuple[str, int]]:
        return [(queue.topic, queue.queue_id) for queue in self._queues]
