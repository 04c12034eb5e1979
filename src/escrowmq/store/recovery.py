"""Open a directory after anything: find where the log ends, and make all else agree with it.

1. Start where the checkpoint says that everything is durable; without one, at the first record.
2. Believe queues and index up to there. If they do not add up, start at the first record.
3. Walk the log. Each record that checks out gets its queue entry and its keys.
4. At the first that does not: behind what was known to be durable, it is the torn end of a crash,
   and the log is cut there. Before it, it is damage to something that was acknowledged: it is
   stepped over and reported, and every good record behind it is kept.

The result depends on the log and on which topics were deleted (deleted.py), never on what the
derived files happened to hold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from escrowmq.errors import CorruptRecord, RecordRefused
from escrowmq.message.keys import has_keys, has_queue_entry, tags_and_keys
from escrowmq.message.record import MAGIC_V1, MAGIC_V2, RECORD_BYTES_MIN, LogOffset, StoredRecord
from escrowmq.store.checkpoint import Checkpoint, load_checkpoint
from escrowmq.store.commit_log import CommitLog
from escrowmq.store.consume_queue import ConsumeQueue, QueueTable
from escrowmq.store.disk import Disk
from escrowmq.store.key_index import KeyIndex

SPILL_INTERVAL_RECORDS = 100_000  # memory for a walk over any log stays within some 50 MiB
_MAGICS = (MAGIC_V1.to_bytes(4, "big"), MAGIC_V2.to_bytes(4, "big"))


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of the log that held a record once and do not check out."""

    begin: LogOffset
    end: LogOffset
    reason: str


@dataclass(slots=True, kw_only=True)
class Recovery:
    """What opening a directory found. Records from `walked_from` on were read again: the tail."""

    was_clean: bool  # the last stop was in order
    scanned_from: LogOffset
    end: LogOffset
    records: int = 0
    last_record_offset: int = -1
    stored_ms: int = 0
    torn_reason: str | None = None  # why the log was cut at `end`; None if it ended in order
    damage: list[Damage] = field(default_factory=list)
    rebuilt_queues: bool = False
    rebuilt_index: bool = False


class _InconsistentQueues(Exception):
    """The queues are not what the checkpoint says they are."""


def recover(
    disk: Disk,
    log: CommitLog,
    queues: QueueTable,
    index: KeyIndex,
    *,
    was_clean: bool,
    spill: Callable[[], None],
) -> Recovery:
    """Find the end of the log. `spill` writes out what queues and index hold in memory."""
    saved = load_checkpoint(disk)
    checkpoint = saved if saved is not None and _belongs_to(saved, log) else None
    queues.open()
    index.open()
    if saved is not None and not saved.is_indexed:
        index.close_last_file()
    found = None
    if checkpoint is not None:
        with contextlib.suppress(_InconsistentQueues):
            found = _LogReplay(log, queues, index, spill).from_checkpoint(
                checkpoint, was_clean=was_clean
            )
    if found is None:
        index.clear()
        queues.open()
        found = _LogReplay(log, queues, index, spill).from_start(saved, was_clean=was_clean)
    queues.deleted_topics.trim(log_begin=log.begin, log_end=found.end)
    if saved is not None and saved.log_offset > found.end:
        lost_end = LogOffset(saved.log_offset)
        found.damage.append(Damage(found.end, lost_end, "was durable, and is not there"))
    return found


def _belongs_to(checkpoint: Checkpoint, log: CommitLog) -> bool:
    """Whether it is of this log: its last record is there, and ends where it says."""
    if not log.begin <= checkpoint.log_offset <= log.files_end():
        return False
    if checkpoint.last_record < 0:
        return checkpoint.log_offset == log.begin
    if checkpoint.last_record < log.begin:
        return False
    log.end = log.files_end()  # until the walk finds the real one
    try:
        record = log.record_at(LogOffset(checkpoint.last_record))
    except CorruptRecord:
        return False
    return record.log_offset + record.size == checkpoint.log_offset


class _LogReplay:
    """One pass over the log that gives every record its queue entry and its keys again."""

    def __init__(
        self, log: CommitLog, queues: QueueTable, index: KeyIndex, spill: Callable[[], None]
    ) -> None:
        self._log = log
        self._queues = queues
        self._index = index
        self._spill = spill
        log.end = log.files_end()  # until the walk finds the real one

    def from_checkpoint(self, checkpoint: Checkpoint, *, was_clean: bool) -> Recovery:
        begin = LogOffset(checkpoint.log_offset)
        whole = self._queues.trust_files(begin)
        totals = checkpoint.queue_count, checkpoint.entry_total, checkpoint.first_total
        if not whole or not _totals_match(self._queues.totals(), totals):
            raise _InconsistentQueues
        found = Recovery(was_clean=was_clean, scanned_from=begin, end=begin)
        found.last_record_offset, found.stored_ms = checkpoint.last_record, checkpoint.stored_ms
        if not _index_matches(self._index, checkpoint):
            found.rebuilt_index = True
            self._rebuild_index(begin)
        self._replay(found, durable_end=begin, is_strict=True)
        return found

    def from_start(self, checkpoint: Checkpoint | None, *, was_clean: bool) -> Recovery:
        begin = self._log.begin
        self._queues.trust_files(begin)
        found = Recovery(was_clean=was_clean, scanned_from=begin, end=begin)
        found.rebuilt_queues = found.rebuilt_index = self._log.files_end() > begin
        durable_end: int | None = self._log.files_end() if was_clean else None
        if checkpoint is not None and not was_clean:
            # Also one that does not fit any more: what it knew to be durable was.
            durable_end = checkpoint.log_offset
        self._replay(found, durable_end=durable_end, is_strict=False)
        return found

    def _replay(self, recovery: Recovery, *, durable_end: int | None, is_strict: bool) -> None:
        walker = LogScanner(self._log, durable_end)
        restorer = _QueueRestorer(self._queues, is_strict=is_strict)
        indexed = self._index.end_offset
        for record in walker.records(recovery.scanned_from):
            tags_code, keys = tags_and_keys(record.topic, record.properties, record.stored_ms)
            try:
                restorer.add(record, tags_code)
            except (RecordRefused, CorruptRecord) as error:
                if walker.reject(record, str(error)):
                    continue
                break
            if record.log_offset > indexed:
                _restore_keys(self._index, record, keys)
            recovery.records += 1
            recovery.last_record_offset, recovery.stored_ms = record.log_offset, record.stored_ms
            if recovery.records % SPILL_INTERVAL_RECORDS == 0:
                self._spill()
        recovery.end, recovery.torn_reason, recovery.damage = (
            walker.end,
            walker.torn_reason,
            walker.damage,
        )
        self._log.end = recovery.end
        # Written is not durable: what was walked is flushed once more.
        self._log.flushed_offset = recovery.scanned_from

    def _rebuild_index(self, end: LogOffset) -> None:
        self._index.clear()
        for number, record in enumerate(LogScanner(self._log, end).records(self._log.begin), 1):
            if record.log_offset >= end:
                break
            _, keys = tags_and_keys(record.topic, record.properties, record.stored_ms)
            _restore_keys(self._index, record, keys)
            if number % SPILL_INTERVAL_RECORDS == 0:
                self._spill()


def _totals_match(actual: tuple[int, int, int], expected: tuple[int, int, int]) -> bool:
    """As many queues and messages as noted. A queue may still begin earlier: what has expired is
    removed after the checkpoint that says so."""
    return actual[:2] == expected[:2] and actual[2] <= expected[2]


def _index_matches(index: KeyIndex, checkpoint: Checkpoint) -> bool:
    names = {file.name for file in index.files}
    return names >= set(checkpoint.index_files) and index.end_offset >= checkpoint.index_end_offset


def _restore_keys(index: KeyIndex, record: StoredRecord, keys: list[bytes]) -> None:
    if has_keys(record.sys_flag):
        index.add(record.topic, keys, record.log_offset, record.stored_ms)


class _QueueRestorer:
    """Gives records of the walked part their queue entries again."""

    def __init__(self, queues: QueueTable, *, is_strict: bool) -> None:
        self._queues = queues
        self._is_strict = is_strict
        self._seen_queues: set[ConsumeQueue] = set()

    def add(self, record: StoredRecord, tags_code: int) -> None:
        if not has_queue_entry(record.sys_flag):
            return
        if self._queues.deleted_topics.is_deleted(record.topic, record.log_offset):
            return
        queue = self._queues.get_or_create(record.topic, record.queue_id)
        if queue not in self._seen_queues:
            self._align_queue(queue, record)
        if record.queue_offset < queue.next_offset:
            raise CorruptRecord(record.log_offset, "another has its place in the queue")
        if record.queue_offset > queue.next_offset:
            queue.add_blanks(record.queue_offset, record.log_offset)
        queue.add(record.log_offset, record.size, tags_code)
        self._queues.dirty.add(queue)

    def _align_queue(self, queue: ConsumeQueue, record: StoredRecord) -> None:
        self._seen_queues.add(queue)
        if record.queue_offset == queue.next_offset:
            return
        if self._is_strict:
            raise _InconsistentQueues
        if queue.is_empty:
            queue.start_at(record.queue_offset)
        elif record.queue_offset < queue.next_offset:
            queue.truncate(record.queue_offset)


class LogScanner:
    """Reads a log from one record to the next, past damage, up to its end."""

    def __init__(self, log: CommitLog, durable_end: int | None) -> None:
        self._log = log
        self._durable_end = durable_end
        self.end = log.begin
        self.torn_reason: str | None = None
        self.damage: list[Damage] = []

    def records(self, begin: LogOffset) -> Iterator[StoredRecord]:
        log, at, limit = self._log, begin, self._log.files_end()
        self.end = begin
        stepped_over: list[Damage] = []  # damage only if a good record follows
        while at < limit:
            if log.is_blank(at):
                at = LogOffset(log.segment_end(at))
                continue
            try:
                record = log.record_at(at)
            except CorruptRecord as error:
                following = self._next_after_damage(at)
                stepped_over.append(Damage(at, LogOffset(following or limit), error.reason))
                at = LogOffset(following or limit)
                continue
            self.damage += stepped_over
            stepped_over.clear()
            yield record
            at = LogOffset(record.log_offset + record.size)
            self.end = at
        if stepped_over and not self._is_zero(stepped_over[0].begin):
            self.torn_reason = stepped_over[0].reason

    def reject(self, record: StoredRecord, reason: str) -> bool:
        """A record that checks out and still cannot be one of ours: whether to read on."""
        following = self._next_after_damage(record.log_offset)
        if following is None:
            self.end, self.torn_reason = record.log_offset, reason
            return False
        self.damage.append(Damage(record.log_offset, following, reason))
        return True

    def _next_after_damage(self, log_offset: LogOffset) -> LogOffset | None:
        """Where to read on, if what is at `at` is damage and not the end of the log."""
        log = self._log
        segment_end = log.segment_end(log_offset)
        is_last = segment_end == log.files_end()
        if self._durable_end is not None:
            if log_offset >= self._durable_end:
                return None
            following = self._next_valid_record(log_offset, segment_end)
            return LogOffset(segment_end) if following is None and not is_last else following
        # Nothing is known to be durable. A good record behind the bad one in a file that is
        # not the last says that this was no torn end: files are filled one after the other.
        if is_last:
            return None
        following = self._next_valid_record(log_offset, segment_end)
        if following is None and log.segment_end(segment_end) != log.files_end():
            return LogOffset(segment_end)
        return following

    def _next_valid_record(self, log_offset: LogOffset, segment_end: int) -> LogOffset | None:
        segment = self._log.view(log_offset, segment_end)
        position = 4 + 1  # a magic stands 4 bytes into its record; the bad one does not count
        chunk_bytes = 1 << 20
        for begin in range(position, len(segment), chunk_bytes):
            chunk = bytes(segment[begin : begin + chunk_bytes + 3])
            for place in _magic_positions(chunk):
                candidate = LogOffset(log_offset + begin + place - 4)
                if self._is_valid_record(candidate):
                    return candidate
        return None

    def _is_valid_record(self, log_offset: LogOffset) -> bool:
        try:
            self._log.record_at(log_offset)
        except CorruptRecord:
            return False
        return True

    def _is_zero(self, log_offset: LogOffset) -> bool:
        end = min(log_offset + RECORD_BYTES_MIN, self._log.segment_end(log_offset))
        return not any(self._log.view(log_offset, end))


def _magic_positions(chunk: bytes) -> Iterator[int]:
    """Where in a chunk a magic stands, from left to right."""
    at = 0
    while True:
        found = [place for magic in _MAGICS if (place := chunk.find(magic, at)) >= 0]
        if not found:
            return
        yield min(found)
        at = min(found) + 1
