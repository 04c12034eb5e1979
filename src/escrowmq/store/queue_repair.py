"""Compare entries of a consume queue with the records that they name, and repair them from the log.

An entry is right if a record of this topic, queue and queue offset begins at its log offset, and if
size and tags code are those of the record. For a wrong entry the record is searched:

1. at the log offsets that differ from the entry's in one bit;
2. between the records of the entries before and behind it, from record to record.

If the log does not have the record, the entry stays if it fits between its neighbours: then the
record is what is damaged. Otherwise a blank entry takes its place. Both are known gaps, which
consumers pass. Entries of records that have expired cannot be compared, and nobody reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from escrowmq.errors import CorruptRecord, RecordNotFound
from escrowmq.message.keys import has_queue_entry, tags_and_keys
from escrowmq.message.names import SCHEDULE_TOPIC
from escrowmq.message.record import RECORD_BYTES_MIN, LogOffset, StoredRecord
from escrowmq.store.commit_log import CommitLog
from escrowmq.store.config_files import DeletedTopics
from escrowmq.store.consume_queue import (
    BLANK_SIZE,
    ENTRY,
    ConsumeQueue,
)
from escrowmq.store.damage import DamageKind, DamageReports

QueueEntry = tuple[int, int, int]  # log offset, size, tags code
# Yields the readable records of a log from an offset on, past damage.
ReadRecords = Callable[[LogOffset], Iterator[StoredRecord]]
_OFFSET_BITS: Final = 63


class QueueRepair:
    """Repairs entries of consume queues. An instance is the `compare_with_log` of `QueueBlocks`."""

    def __init__(
        self,
        log: CommitLog,
        read_records: ReadRecords,
        deleted_topics: DeletedTopics,
        delay_levels_ms: Sequence[int],
        damage: DamageReports,
    ) -> None:
        self._log = log
        self._read_records = read_records
        self._deleted_topics = deleted_topics
        self._delay_levels_ms = delay_levels_ms
        self._damage = damage

    def __call__(
        self,
        queue: ConsumeQueue,
        first_offset: int,
        entries: bytes | None,
        count: int,
        reason: str | None,
    ) -> bytes:
        """Return the right entries. Report what was wrong, and `reason`, which led here."""
        stored = [None] * count if entries is None else list(ENTRY.iter_unpack(entries))
        right: list[QueueEntry | None] = []
        is_behind_expired = True  # every entry so far is of a record that has expired
        for offset, entry in enumerate(stored, first_offset):
            checked = None if entry is None else self._check(queue, offset, entry)
            if is_behind_expired and entry is not None and self._is_expired(entry):
                checked = entry  # what has expired is at the beginning of a queue
            is_behind_expired = checked is not None and self._is_expired(checked)
            right.append(checked)
        missing = [first_offset + i for i, entry in enumerate(right) if entry is None]
        if missing:
            self._search(queue, first_offset, stored, right, missing)
        result = b"".join(ENTRY.pack(*entry) for entry in right if entry is not None)
        self._report(queue, first_offset, entries, result, reason)
        return result

    def _check(
        self, queue: ConsumeQueue, queue_offset: int, entry: QueueEntry
    ) -> QueueEntry | None:
        """Return the right entry if the record is where the entry says; None if it is not."""
        log_offset, size, tags_code = entry
        if size == BLANK_SIZE:
            return None  # the record may exist nevertheless
        record = self._record_of(queue, queue_offset, log_offset)
        if record is not None:
            if queue.topic == SCHEDULE_TOPIC:
                return log_offset, record.size, self._due_ms(record, tags_code)
            return self._entry_of(record)
        for bit in range(_OFFSET_BITS):
            record = self._record_of(queue, queue_offset, log_offset ^ 1 << bit)
            if record is not None:
                return self._entry_of(record)
        return None

    def _record_of(
        self, queue: ConsumeQueue, queue_offset: int, log_offset: int
    ) -> StoredRecord | None:
        if not self._log.begin <= log_offset < self._log.end:
            return None
        try:
            record = self._log.record_at(LogOffset(log_offset))
        except (RecordNotFound, CorruptRecord):
            return None
        is_right = (
            record.queue_offset == queue_offset
            and record.queue_id == queue.queue_id
            and record.topic == queue.topic
        )
        return record if is_right else None

    def _entry_of(self, record: StoredRecord) -> QueueEntry:
        tags_code, _ = tags_and_keys(
            record.topic, record.properties, record.stored_ms, self._delay_levels_ms
        )
        return record.log_offset, record.size, tags_code

    def _due_ms(self, record: StoredRecord, tags_code: int) -> int:
        """Return the tags code of a delayed message: the time at which it is due.

        It follows from the delay levels, which may have been changed since. So a value is accepted
        if it is a time at which the message can be due.
        """
        due_ms = self._entry_of(record)[2]
        latest_ms = record.stored_ms + max(self._delay_levels_ms, default=0)
        return tags_code if record.stored_ms <= tags_code <= latest_ms else due_ms

    def _is_expired(self, entry: QueueEntry) -> bool:
        log_offset, size, _ = entry
        return 0 <= log_offset < self._log.begin or (size == BLANK_SIZE and log_offset == 0)

    def _search(
        self,
        queue: ConsumeQueue,
        first_offset: int,
        stored: Sequence[QueueEntry | None],
        entries: list[QueueEntry | None],
        missing: list[int],
    ) -> None:
        """Fill in the missing entries from the log, and what stands for records that are lost."""
        begin = self._search_begin(queue, first_offset, entries, missing[0])
        last = missing[-1] - first_offset
        following = next((entry for entry in entries[last + 1 :] if entry is not None), None)
        end = self._log.end if following is None else following[0]
        found: dict[int, QueueEntry] = {}
        for record in self._read_records(LogOffset(begin)):
            if record.log_offset >= end or len(found) == len(missing):
                break
            if self._belongs_to(record, queue):
                if record.queue_offset > missing[-1]:
                    break
                found.setdefault(record.queue_offset, self._entry_of(record))
        previous_end = begin
        for index, entry in enumerate(entries):
            offset = first_offset + index
            if entry is None and offset in found:
                entry = entries[index] = found[offset]
            if entry is None:
                known = next((known for known in entries[index + 1 :] if known is not None), None)
                next_begin = end if known is None else known[0]
                candidate = stored[index]
                if candidate is not None and _fits(candidate, previous_end, next_begin):
                    entry = candidate
                else:
                    entry = next_begin, BLANK_SIZE, 0
                entries[index] = entry
            if entry[1] != BLANK_SIZE:
                previous_end = entry[0] + entry[1]

    def _search_begin(
        self,
        queue: ConsumeQueue,
        first_offset: int,
        entries: list[QueueEntry | None],
        first_missing: int,
    ) -> int:
        """Return the log offset behind the nearest known record before the first missing one."""
        previous: QueueEntry | None = None
        if first_missing > first_offset:
            previous = entries[first_missing - first_offset - 1]
        elif first_offset > queue.first_offset:
            previous = queue.entry(first_offset - 1)
        if previous is None or previous[1] == BLANK_SIZE or self._is_expired(previous):
            return self._log.begin if previous is None else max(self._log.begin, previous[0])
        return previous[0] + previous[1]

    def _belongs_to(self, record: StoredRecord, queue: ConsumeQueue) -> bool:
        return (
            record.topic == queue.topic
            and record.queue_id == queue.queue_id
            and has_queue_entry(record.sys_flag)
            and not self._deleted_topics.is_deleted(record.topic, record.log_offset)
        )

    def _report(
        self,
        queue: ConsumeQueue,
        first_offset: int,
        entries: bytes | None,
        right: bytes,
        reason: str | None,
    ) -> None:
        if entries == right and reason is None:
            return
        wrong = len(right) // ENTRY.size
        if entries is not None:
            pairs = zip(ENTRY.iter_unpack(entries), ENTRY.iter_unpack(right), strict=True)
            wrong = sum(stored != restored for stored, restored in pairs)
        self._damage.add(
            DamageKind.QUEUE,
            queue.directory,
            f"{reason or 'entries do not agree with the log'}; {wrong} entries from offset "
            f"{first_offset} on were restored from the log",
            is_repaired=True,
        )


def _fits(entry: QueueEntry, begin: int, end: int) -> bool:
    """Return whether an entry can be that of a record between two log offsets."""
    log_offset, size, _ = entry
    is_record = RECORD_BYTES_MIN <= size < BLANK_SIZE
    return is_record and begin <= log_offset and log_offset + size <= end
