"""Open a directory after a stop of any kind: find the end of the log, rebuild everything else.

1. Load the checkpoint. It says up to which log offset records, queue entries and keys are durable.
   Without a checkpoint that fits this log, begin at the first record.
2. Trust queues and key index up to there. If they do not agree with the checkpoint, begin at the
   first record too and rebuild them.
3. Replay the log from there: give each valid record its queue entry and its keys.
4. Decide at the first invalid record. If it is above the checkpoint, it is the torn end of a crash:
   the log ends there. If it is below, a record that was durable is damaged: report it, skip it and
   keep every valid record that follows.

The result depends only on the log and on the list of deleted topics, never on what the queue and
index files happen to hold. So a crash during recovery is harmless: the next start does the same.

    recover()            chooses where to begin
    _LogReplay           one pass over the log
      LogScanner         finds the records, damage and the end
      _QueueRestorer     gives each record its queue entry, or says why it cannot have one
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from escrowmq.errors import CorruptRecord, RecordRefused
from escrowmq.message.keys import has_keys, has_queue_entry, tags_and_keys
from escrowmq.message.record import (
    MAGIC_V1,
    MAGIC_V2,
    RECORD_BYTES_MIN,
    LogOffset,
    QueueOffset,
    StoredRecord,
)
from escrowmq.store.checkpoint import Checkpoint, load_checkpoint_file
from escrowmq.store.commit_log import CommitLog
from escrowmq.store.consume_queue import BLANK_SIZE, ConsumeQueue, QueueTable
from escrowmq.store.disk import Disk
from escrowmq.store.key_index import KeyIndex

SPILL_INTERVAL_RECORDS = 100_000  # bounds the memory of a replay to some 50 MiB
LOOK_AHEAD_RECORDS: Final = 10_000  # how far to search for a record that confirms a gap
UNCONFIRMED_GAP_MAX: Final = 1_000  # queue offsets
_MAGICS = (MAGIC_V1.to_bytes(4, "big"), MAGIC_V2.to_bytes(4, "big"))


@dataclass(frozen=True, slots=True)
class Damage:
    """A range of the log that once held durable records and is invalid now."""

    begin: LogOffset
    end: LogOffset
    reason: str

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclass(slots=True, kw_only=True)
class Recovery:
    """The result of opening a directory. Records from `scanned_from` on were replayed."""

    was_clean: bool  # the last process closed the store
    scanned_from: LogOffset
    end: LogOffset
    records: int = 0
    last_record_offset: int = -1
    stored_ms: int = 0
    torn_reason: str | None = None  # why the log was cut at `end`; None if it was complete
    damage: list[Damage] = field(default_factory=list)
    rebuilt_queues: bool = False
    rebuilt_index: bool = False


class _InconsistentQueues(Exception):
    """The queue files do not agree with the checkpoint."""


def recover(
    disk: Disk,
    log: CommitLog,
    queues: QueueTable,
    index: KeyIndex,
    delay_levels_ms: Sequence[int],
    *,
    was_clean: bool,
    spill: Callable[[], None],
) -> Recovery:
    """Find the end of the log and bring queues and index up to it.

    `spill` is called from time to time and writes what queues and index hold in memory to files.
    """
    saved_file = load_checkpoint_file(disk)
    saved, queue_rows = (None, b"") if saved_file is None else saved_file
    checkpoint = saved if saved is not None and _belongs_to(saved, log) else None
    has_rows = checkpoint is not None and checkpoint.has_queue_rows
    queues.open(lists_files=not has_rows)
    index.open()
    if saved is not None and not saved.is_indexed:
        # Records behind the last index file have no keys in it. A new file for the records that
        # come now keeps the file from claiming the whole range in between.
        index.close_last_file()
    recovery = None
    if checkpoint is not None:
        with contextlib.suppress(_InconsistentQueues):
            recovery = _LogReplay(log, queues, index, delay_levels_ms, spill).from_checkpoint(
                checkpoint, queue_rows, was_clean=was_clean
            )
    if recovery is None:
        queues.open()  # first: it raises if the configuration does not fit the files
        index.clear()
        replay = _LogReplay(log, queues, index, delay_levels_ms, spill)
        recovery = replay.from_start(saved, was_clean=was_clean)
    queues.deleted_topics.trim(log_begin=log.begin, log_end=recovery.end)
    if saved is not None and saved.log_offset > recovery.end:
        lost_end = LogOffset(saved.log_offset)
        recovery.damage.append(Damage(recovery.end, lost_end, "was durable and is missing"))
    return recovery


def _belongs_to(checkpoint: Checkpoint, log: CommitLog) -> bool:
    """Return whether a checkpoint is of this log: its last record must end where it says."""
    if not log.begin <= checkpoint.log_offset <= log.files_end():
        return False
    if checkpoint.last_record < 0:
        return checkpoint.log_offset == log.begin
    if checkpoint.last_record < log.begin:
        return False
    log.end = log.files_end()  # so that records can be read; the replay finds the real end
    try:
        record = log.record_at(LogOffset(checkpoint.last_record))
    except CorruptRecord:
        return False
    return record.log_offset + record.size == checkpoint.log_offset


class _LogReplay:
    """One pass over the log that restores the queue entry and the keys of every record."""

    def __init__(
        self,
        log: CommitLog,
        queues: QueueTable,
        index: KeyIndex,
        delay_levels_ms: Sequence[int],
        spill: Callable[[], None],
    ) -> None:
        self._log = log
        self._queues = queues
        self._index = index
        self._delay_levels_ms = delay_levels_ms
        self._spill = spill
        log.end = log.files_end()  # so that records can be read; the replay finds the real end

    def from_checkpoint(
        self, checkpoint: Checkpoint, queue_rows: bytes, *, was_clean: bool
    ) -> Recovery:
        """Replay what follows a checkpoint.

        Raises _InconsistentQueues if the queues do not agree with the checkpoint or the log.
        """
        begin = LogOffset(checkpoint.log_offset)
        if checkpoint.has_queue_rows:
            is_consistent = self._queues.restore(queue_rows, begin)
        else:
            totals = checkpoint.queue_count, checkpoint.entry_total, checkpoint.first_total
            is_consistent = self._queues.trust_files(begin)
            is_consistent = is_consistent and _totals_match(self._queues.totals(), totals)
        if not is_consistent:
            raise _InconsistentQueues
        recovery = Recovery(was_clean=was_clean, scanned_from=begin, end=begin)
        recovery.last_record_offset, recovery.stored_ms = (
            checkpoint.last_record,
            checkpoint.stored_ms,
        )
        if not _index_matches(self._index, checkpoint):
            recovery.rebuilt_index = True
            self._rebuild_index(begin)
        self._replay(recovery, durable_end=begin, is_strict=True)
        return recovery

    def from_start(self, checkpoint: Checkpoint | None, *, was_clean: bool) -> Recovery:
        """Replay the whole log. `checkpoint` need not fit it."""
        begin = self._log.begin
        self._queues.trust_files(begin)
        recovery = Recovery(was_clean=was_clean, scanned_from=begin, end=begin)
        recovery.rebuilt_queues = recovery.rebuilt_index = self._log.files_end() > begin
        durable_end: int | None = self._log.files_end() if was_clean else None
        if checkpoint is not None and not was_clean:
            # Even if the checkpoint does not fit any more, records below it were durable once. So
            # an invalid record below it is damage, not the torn end of a crash.
            durable_end = checkpoint.log_offset
        self._replay(recovery, durable_end=durable_end, is_strict=False)
        return recovery

    def _replay(self, recovery: Recovery, *, durable_end: int | None, is_strict: bool) -> None:
        scanner = LogScanner(self._log, durable_end)
        restorer = _QueueRestorer(self._log, self._queues, scanner, is_strict=is_strict)
        indexed_end = self._index.end_offset
        for record in scanner.records(recovery.scanned_from):
            tags_code, keys = tags_and_keys(
                record.topic, record.properties, record.stored_ms, self._delay_levels_ms
            )
            reason = restorer.add(record, tags_code)
            if reason is not None:
                if scanner.reject(record, reason):
                    continue
                break
            if record.log_offset > indexed_end:
                _restore_keys(self._index, record, keys)
            recovery.records += 1
            recovery.last_record_offset, recovery.stored_ms = record.log_offset, record.stored_ms
            if recovery.records % SPILL_INTERVAL_RECORDS == 0:
                self._spill()
        recovery.end, recovery.torn_reason, recovery.damage = (
            scanner.end,
            scanner.torn_reason,
            scanner.damage,
        )
        self._log.end = recovery.end
        # What the kernel shows us of the replayed part need not be on the disk: a process that was
        # killed may not have flushed it. The checkpoint that ends the start flushes it again.
        self._log.flushed_offset = recovery.scanned_from

    def _rebuild_index(self, end: LogOffset) -> None:
        self._index.clear()
        for number, record in enumerate(LogScanner(self._log, end).records(self._log.begin), 1):
            if record.log_offset >= end:
                break
            _, keys = tags_and_keys(record.topic, record.properties)
            _restore_keys(self._index, record, keys)
            if number % SPILL_INTERVAL_RECORDS == 0:
                self._spill()


def _totals_match(actual: tuple[int, int, int], expected: tuple[int, int, int]) -> bool:
    """Return whether there are as many queues and messages as the checkpoint counted.

    A queue may begin earlier than counted, because expired files are removed only after the
    checkpoint that no longer counts them.
    """
    return actual[:2] == expected[:2] and actual[2] <= expected[2]


def _index_matches(index: KeyIndex, checkpoint: Checkpoint) -> bool:
    if index.is_damaged:
        return False
    names = {file.name for file in index.files}
    return names >= set(checkpoint.index_files) and index.end_offset >= checkpoint.index_end_offset


def _restore_keys(index: KeyIndex, record: StoredRecord, keys: list[bytes]) -> None:
    if has_keys(record.sys_flag):
        index.add(record.topic, keys, record.log_offset, record.stored_ms)


# --- queue entries -------------------------------------------------------------------------------


class _QueueRestorer:
    """Gives replayed records their queue entries.

    Unless records carry a CRC over the whole record, no checksum covers their topic, queue id and
    queue offset. A record that is valid otherwise can therefore still be damaged. It is rejected if
    it cannot be part of its queue.
    """

    def __init__(
        self, log: CommitLog, queues: QueueTable, scanner: LogScanner, *, is_strict: bool
    ) -> None:
        self._log = log
        self._queues = queues
        self._scanner = scanner
        self._is_strict = is_strict
        self._seen_queues: set[ConsumeQueue] = set()

    def add(self, record: StoredRecord, tags_code: int) -> str | None:
        """Add the queue entry of a record. Return the reason if the record is to be rejected.

        In strict mode the first record of each queue must continue what its files hold. Raises
        _InconsistentQueues if it does not.
        """
        if not has_queue_entry(record.sys_flag):
            return None
        if self._queues.deleted_topics.is_deleted(record.topic, record.log_offset):
            return None
        try:
            queue = self._queues.get_or_create(record.topic, record.queue_id)
        except RecordRefused as error:
            return str(error)
        if self._is_strict and queue not in self._seen_queues:
            queue.remove_trailing_entries()
        if record.queue_offset != queue.next_offset:
            reason = self._close_gap(queue, record)
            if reason is not None:
                self._queues.discard_if_unused(queue)
                return reason
        self._seen_queues.add(queue)
        queue.add(record.log_offset, record.size, tags_code)
        self._queues.dirty.add(queue)
        return None

    def _close_gap(self, queue: ConsumeQueue, record: StoredRecord) -> str | None:
        """Bring the end of a queue to the offset of its next record, or return why not."""
        is_first = queue not in self._seen_queues
        if is_first and self._is_strict:
            raise _InconsistentQueues
        if record.queue_offset < queue.next_offset:
            if not is_first:
                return f"another record has this queue offset ({record.queue_offset})"
            queue.truncate(record.queue_offset)
            return None
        if not self._is_plausible_gap(queue, record):
            return f"its queue offset is {record.queue_offset}, the next queue offset is " + str(
                queue.next_offset
            )
        if queue.is_empty:
            queue.start_at(record.queue_offset)
        else:
            queue.add_blanks(record.queue_offset, record.log_offset)
        return None

    def _is_plausible_gap(self, queue: ConsumeQueue, record: StoredRecord) -> bool:
        """Return whether queue offsets are missing, or this record's queue offset is damaged.

        Messages are missing if their records are damaged, or if the damage has put them into
        another queue. Both leave traces:

        - The log between the previous record of the queue and this one must have room for the
          missing records. This also bounds the memory for blank entries.
        - The next record of the queue must have a higher offset. If instead it continues in front
          of the gap, then this record is the wrong one. Without this check, a queue offset that is
          too high would make every sound record that follows look wrong.

        If no later record of the queue is near, a gap is accepted up to a moderate size, or up to
        what the damage so far explains: losing a sound message would be worse than a gap.
        """
        gap = record.queue_offset - queue.next_offset
        if gap * RECORD_BYTES_MIN > record.log_offset - _last_entry_end(queue):
            return False
        if queue.is_empty and self._log.begin > 0:
            return True  # the beginning of the queue has expired: any first offset is normal
        following = self._following_offset(record, at_least=queue.next_offset)
        if following is not None:
            return following > record.queue_offset
        damaged_bytes = sum(damage.size for damage in self._scanner.damage)
        return gap <= max(UNCONFIRMED_GAP_MAX, damaged_bytes // RECORD_BYTES_MIN)

    def _following_offset(self, record: StoredRecord, at_least: int) -> QueueOffset | None:
        """Return the queue offset of the next record of the same queue.

        Lower offsets than `at_least` are taken already, so such a record is damaged: skip it.
        """
        scanner = LogScanner(self._log, self._scanner.durable_end)
        records = scanner.records(LogOffset(record.log_offset + record.size))
        for following in islice(records, LOOK_AHEAD_RECORDS):
            if (
                (following.topic, following.queue_id) == (record.topic, record.queue_id)
                and has_queue_entry(following.sys_flag)
                and following.queue_offset >= at_least
            ):
                return following.queue_offset
        return None


def _last_entry_end(queue: ConsumeQueue) -> int:
    """Return the log offset behind the last record of a queue; 0 if the queue is empty."""
    if queue.next_offset == queue.first_offset:
        return 0
    log_offset, size, _ = queue.entry(queue.next_offset - 1)
    return log_offset if size == BLANK_SIZE else log_offset + size


# --- records, damage and the end of the log ------------------------------------------------------


class LogScanner:
    """Reads a log from record to record, past damage, up to its end.

    Records below `durable_end` were durable once. With None that is unknown.
    """

    def __init__(self, log: CommitLog, durable_end: int | None) -> None:
        self._log = log
        self.durable_end = durable_end
        self.end = log.begin
        self.torn_reason: str | None = None
        self.damage: list[Damage] = []

    def records(self, begin: LogOffset) -> Iterator[StoredRecord]:
        """Yield the valid records from `begin` on. `end` and `damage` follow the iteration."""
        log, position, limit = self._log, begin, self._log.files_end()
        self.end = begin
        # Invalid bytes are damage only if a valid record follows. Otherwise they are the torn end.
        skipped: list[Damage] = []
        while position < limit:
            if log.is_blank(position):
                position = LogOffset(log.segment_end(position))
                continue
            try:
                record = log.record_at(position)
            except CorruptRecord as error:
                following = self._next_after_damage(position)
                skipped.append(Damage(position, LogOffset(following or limit), error.reason))
                position = LogOffset(following or limit)
                continue
            self.damage += skipped
            skipped.clear()
            yield record
            position = LogOffset(record.log_offset + record.size)
            self.end = position
        if skipped and not self._is_zero(skipped[0].begin):
            self.torn_reason = skipped[0].reason

    def reject(self, record: StoredRecord, reason: str) -> bool:
        """Treat a record that was just yielded as invalid. Return whether to read on.

        False means that the log ends in front of the record.
        """
        following = self._next_after_damage(record.log_offset)
        if following is None:
            self.end, self.torn_reason = record.log_offset, reason
            return False
        self.damage.append(Damage(record.log_offset, following, reason))
        return True

    def _next_after_damage(self, log_offset: LogOffset) -> LogOffset | None:
        """Return where to read on after invalid bytes; None if the log ends there."""
        log = self._log
        segment_end = log.segment_end(log_offset)
        is_last = segment_end == log.files_end()
        if self.durable_end is not None:
            if log_offset >= self.durable_end:
                return None
            following = self._next_valid_record(log_offset, segment_end)
            return LogOffset(segment_end) if following is None and not is_last else following
        # It is unknown what was durable. Segments are filled one after the other, so a crash tears
        # only the last one. Invalid bytes in an earlier segment are damage.
        if is_last:
            return None
        following = self._next_valid_record(log_offset, segment_end)
        if following is None and log.segment_end(segment_end) != log.files_end():
            return LogOffset(segment_end)
        return following

    def _next_valid_record(self, log_offset: LogOffset, segment_end: int) -> LogOffset | None:
        """Search a segment for the next record, by its magic number. None if there is none."""
        first = (
            4 + 1
        )  # the magic is 4 bytes into a record; the one of the invalid record is skipped
        chunk_bytes = 1 << 20
        for begin in range(first, segment_end - log_offset, chunk_bytes):
            # Chunks overlap by 3 bytes, or a magic across their boundary would be missed.
            chunk_end = min(log_offset + begin + chunk_bytes + 3, segment_end)
            chunk = self._log.read_bytes(log_offset + begin, chunk_end)
            for position in _magic_positions(chunk):
                candidate = LogOffset(log_offset + begin + position - 4)
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
        """Return whether no byte was ever written here: the regular end of a log."""
        end = min(log_offset + RECORD_BYTES_MIN, self._log.segment_end(log_offset))
        return not any(self._log.read_bytes(log_offset, end))


def _magic_positions(chunk: bytes) -> Iterator[int]:
    """Yield the positions of magic numbers in ascending order."""
    begin = 0
    while True:
        positions = [position for magic in _MAGICS if (position := chunk.find(magic, begin)) >= 0]
        if not positions:
            return
        yield min(positions)
        begin = min(positions) + 1
