"""Open a directory after a stop of any kind: find the end of the log, rebuild everything else.

1. Load the checkpoint. It says up to which log offset records, queue entries and keys are durable.
   Without a checkpoint that fits this log, begin at the first record.
2. Load the flush marks. They say how far the log itself was durable, which may be further.
3. Trust queues and key index up to the checkpoint. If they do not agree with it, begin at the first
   record too and rebuild them.
4. Replay the log from there: give each valid record its queue entry and its keys.
5. Decide at each invalid record. What was durable is damaged: report it, skip it and keep every
   record that follows. Above that it is the torn end of a crash: the log ends there.

The result depends only on the log, on what is known about its durable part and its record
boundaries, and on the list of deleted topics. A crash during recovery is harmless: the next start
does the same.

    recover()            chooses where to begin
    _LogReplay           one pass over the log
      LogScanner         finds the records, damage and the end (log_scan.py)
      _QueueRestorer     gives each record its queue entry, or says why it cannot have one
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from escrowmq.errors import CorruptRecord, RecordRefused
from escrowmq.message.keys import has_keys, has_queue_entry, tags_and_keys
from escrowmq.message.record import (
    RECORD_BYTES_MIN,
    LogOffset,
    QueueOffset,
    RecordClaims,
    StoredRecord,
)
from escrowmq.store.checkpoint import (
    Checkpoint,
    load_checkpoint,
    load_checkpoint_file,
    load_rocketmq_checkpoint,
)
from escrowmq.store.commit_log import LOG_DIRECTORY, CommitLog, is_file_name
from escrowmq.store.consume_queue import (
    BLANK_SIZE,
    QUEUE_DIRECTORY,
    ConsumeQueue,
    QueueTable,
    queue_directories,
)
from escrowmq.store.damage import DamageKind, DamageReports
from escrowmq.store.disk import Disk
from escrowmq.store.flush_marks import SavedMarks, load_marks
from escrowmq.store.key_index import KeyIndex
from escrowmq.store.log_scan import Damage as Damage
from escrowmq.store.log_scan import KnownBoundaries, LogHistory, LogScanner

log = logging.getLogger(__name__)

DAMAGE_LINES_MAX: Final = 20
SPILL_INTERVAL_RECORDS = 100_000  # bounds the memory of a replay to some 50 MiB
LOOK_AHEAD_RECORDS: Final = 10_000  # how far to search for a record that confirms a gap
UNCONFIRMED_GAP_MAX: Final = 1_000  # queue offsets


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
    queue_problem: str | None = None  # why the queue files could not be used

    def report(self, reports: DamageReports) -> None:
        """Report what was found. Damage is an error: messages that were durable are lost."""
        for damage in self.damage[:DAMAGE_LINES_MAX]:
            description = f"its messages are lost: {damage.reason}"
            place = f"log_offset={damage.begin} bytes={damage.size}"
            reports.add(DamageKind.LOG, place, description, is_repaired=False)
        if len(self.damage) > DAMAGE_LINES_MAX:
            log.error(
                "the log is damaged in %d more places; `escrowmq store check` shows them",
                len(self.damage) - DAMAGE_LINES_MAX,
            )
        if self.torn_reason is not None:
            log.warning(
                "cut off the torn end of the log, nothing of it was flushed log_offset=%d: %s",
                self.end,
                self.torn_reason,
            )
        if self.queue_problem is not None:
            description = f"{self.queue_problem}; all queues were restored from the log"
            reports.add(DamageKind.QUEUE, QUEUE_DIRECTORY, description, is_repaired=True)
        if self.rebuilt_queues or self.rebuilt_index:
            log.warning(
                "rebuilt from the log queues=%s key_index=%s records_read=%d",
                self.rebuilt_queues,
                self.rebuilt_index,
                self.records,
            )


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
    damage: DamageReports,
) -> Recovery:
    """Find the end of the log and bring queues and index up to it.

    `spill` is called from time to time and writes what queues and index hold in memory to files.
    `damage` gets what had to be repaired for that; the result reports the remainder.
    """
    saved = SavedState.load(disk, was_clean=was_clean)
    last_record = _checkpointed_record(saved.checkpoint, log)
    has_rows = saved.checkpoint is not None and saved.checkpoint.has_queue_rows
    queues.open(lists_files=last_record is None or not has_rows)
    index.open()
    if saved.checkpoint is not None and not saved.checkpoint.is_indexed:
        # Records behind the last index file have no keys in it. A new file for the records that
        # come now keeps the file from claiming the whole range in between.
        index.close_last_file()
    recovery = queue_problem = None
    if saved.checkpoint is not None and last_record is not None:
        try:
            recovery = _LogReplay(log, queues, index, delay_levels_ms, spill).from_checkpoint(
                saved, saved.checkpoint
            )
            recovery.damage[:0] = last_record
        except _InconsistentQueues:
            # They were durable before the checkpoint was. RocketMQ may have changed them since.
            if not saved.was_used_by_rocketmq:
                queue_problem = "files are missing or do not agree with the checkpoint"
    if recovery is None:
        if (
            saved.checkpoint is not None
            and saved.checkpoint.queue_file_bytes == queues.blocks.file_bytes
        ):
            for topic, queue_id in queue_directories(disk):
                directory = f"{QUEUE_DIRECTORY}/{topic}/{queue_id}"
                _cut_longer_files(
                    disk, directory, queues.blocks.file_bytes, DamageKind.QUEUE, damage
                )
        queues.open()  # first: it raises if the configuration does not fit the files
        index.clear()
        replay = _LogReplay(log, queues, index, delay_levels_ms, spill)
        recovery = replay.from_start(disk, saved)
        recovery.queue_problem = queue_problem
    queues.deleted_topics.trim(log_begin=log.begin, log_end=recovery.end)
    durable_end = saved.durable_end
    if durable_end is not None and durable_end > recovery.end:
        lost_end = LogOffset(durable_end)
        recovery.damage.append(Damage(recovery.end, lost_end, "was durable and is missing"))
    return recovery


def cut_longer_segments(disk: Disk, segment_bytes: int, damage: DamageReports) -> None:
    """Cut what something else has added to segments, before the log is opened.

    Only if a checkpoint says that segments of this length were written. Otherwise the files may be
    right and the configuration wrong.
    """
    checkpoint = load_checkpoint(disk)
    if checkpoint is not None and checkpoint.segment_bytes == segment_bytes:
        _cut_longer_files(disk, LOG_DIRECTORY, segment_bytes, DamageKind.LOG, damage)


def _cut_longer_files(
    disk: Disk, directory: str, file_bytes: int, kind: DamageKind, damage: DamageReports
) -> None:
    for name, size in disk.sizes(directory).items():
        if not is_file_name(name) or size <= file_bytes:
            continue
        path = f"{directory}/{name}"
        file = disk.open(path)
        try:
            file.resize(file_bytes)
            file.sync()
        finally:
            file.close()
        description = f"had {size} bytes instead of {file_bytes}; the others were cut off"
        damage.add(kind, path, description, is_repaired=True)


@dataclass(frozen=True, slots=True)
class SavedState:
    """What the last process has saved about the log."""

    was_clean: bool  # it has closed the store
    checkpoint: Checkpoint | None
    queue_rows: bytes  # of the checkpoint
    marks: SavedMarks
    rocketmq_ms: int  # RocketMQ's checkpoint: records stored before were durable

    @classmethod
    def load(cls, disk: Disk, *, was_clean: bool) -> SavedState:
        checkpoint, queue_rows = load_checkpoint_file(disk) or (None, b"")
        rocketmq = load_rocketmq_checkpoint(disk)
        rocketmq_ms = 0 if rocketmq is None else rocketmq.log_ms
        return cls(was_clean, checkpoint, queue_rows, load_marks(disk), rocketmq_ms)

    @property
    def was_used_by_rocketmq(self) -> bool:
        """Return whether RocketMQ has used the directory since our last checkpoint.

        Every checkpoint saves one time in both files. If RocketMQ's is later, it may have cut the
        log below our marks, written other records, and changed the queues.
        """
        return self.checkpoint is not None and self.rocketmq_ms > self.checkpoint.stored_ms

    @property
    def durable_end(self) -> int | None:
        """Return the log offset below which everything was durable; None if it is unknown."""
        ends = [] if self.checkpoint is None else [self.checkpoint.log_offset]
        if not self.was_used_by_rocketmq and self.marks.log_offsets:
            ends.append(self.marks.end)
        return max(ends, default=None)

    def history(self, segment_bytes: int, *, queues: Disk | None = None) -> LogHistory:
        """Return what a scan must know. Pass the disk to use the entries of its queue files."""
        marks = () if self.was_used_by_rocketmq else self.marks.log_offsets
        checkpoints = () if self.checkpoint is None else (self.checkpoint.log_offset,)
        durable_end = self.durable_end
        return LogHistory(
            boundaries=KnownBoundaries(segment_bytes, (*marks, *checkpoints), queues),
            durable_end=durable_end,
            has_all_writes=self.was_clean or self.marks.is_same_boot,
            durable_ms=self.rocketmq_ms if durable_end is None else 0,
        )


def _checkpointed_record(checkpoint: Checkpoint | None, log: CommitLog) -> list[Damage] | None:
    """Return None if a checkpoint is not of this log: its last record must end where it says.

    Otherwise return the damage to that record, usually none. One flipped bit in it must not make
    the checkpoint useless.
    """
    if checkpoint is None or not log.begin <= checkpoint.log_offset <= log.files_end():
        return None
    if checkpoint.last_record < 0:
        return [] if checkpoint.log_offset == log.begin else None
    if checkpoint.last_record < log.begin:
        return None
    begin, end = LogOffset(checkpoint.last_record), LogOffset(checkpoint.log_offset)
    scanner = LogScanner(log, LogHistory(boundaries=KnownBoundaries(log.segment_bytes)))
    try:
        record = scanner.record_at(begin)
    except CorruptRecord as error:
        claims = scanner.claims_at(begin)
        is_same = (
            claims is not None
            and claims.wrong_bits(begin) <= 1
            and end - begin in (claims.size, claims.parts_size)
        )
        return [Damage(begin, end, error.reason, claims)] if is_same else None
    return [] if record is not None and begin + record.size == end else None


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

    def from_checkpoint(self, saved: SavedState, checkpoint: Checkpoint) -> Recovery:
        """Replay what follows a checkpoint.

        Raises _InconsistentQueues if the queues do not agree with the checkpoint or the log.
        """
        begin = LogOffset(checkpoint.log_offset)
        if checkpoint.has_queue_rows:
            is_consistent = self._queues.restore(saved.queue_rows, begin)
        else:
            totals = checkpoint.queue_count, checkpoint.entry_total, checkpoint.first_total
            is_consistent = self._queues.trust_files(begin)
            is_consistent = is_consistent and _totals_match(self._queues.totals(), totals)
        if not is_consistent:
            raise _InconsistentQueues
        recovery = Recovery(was_clean=saved.was_clean, scanned_from=begin, end=begin)
        recovery.last_record_offset, recovery.stored_ms = (
            checkpoint.last_record,
            checkpoint.stored_ms,
        )
        if not _index_matches(self._index, checkpoint):
            recovery.rebuilt_index = True
            self._rebuild_index(recovery, saved, begin)
        self._replay(recovery, saved.history(self._log.segment_bytes), is_strict=True)
        return recovery

    def from_start(self, disk: Disk, saved: SavedState) -> Recovery:
        """Replay the whole log. The saved state need not fit it."""
        begin = self._log.begin
        history = saved.history(self._log.segment_bytes, queues=disk)
        # The entries of the queue files tell record boundaries in segments with damage. They are
        # read before the files are cut. Without damage this costs one more reading of the log.
        history.boundaries.load_damaged_segments(LogScanner(self._log, history), begin)
        self._queues.trust_files(begin)
        recovery = Recovery(was_clean=saved.was_clean, scanned_from=begin, end=begin)
        recovery.rebuilt_queues = recovery.rebuilt_index = self._log.files_end() > begin
        self._replay(recovery, history, is_strict=False)
        return recovery

    def _replay(self, recovery: Recovery, history: LogHistory, *, is_strict: bool) -> None:
        scanner = LogScanner(self._log, history)
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
        restorer.reserve_lost_offsets()
        recovery.end, recovery.torn_reason = scanner.end, scanner.torn_reason
        recovery.damage += scanner.damage
        self._log.end = recovery.end
        # What the kernel shows us of the replayed part need not be on the disk: a process that was
        # killed may not have flushed it. The checkpoint that ends the start flushes it again.
        self._log.flushed_offset = recovery.scanned_from

    def _rebuild_index(self, recovery: Recovery, saved: SavedState, end: LogOffset) -> None:
        self._index.clear()
        history = saved.history(self._log.segment_bytes, queues=self._queues.blocks.disk)
        scanner = LogScanner(self._log, history)
        for number, record in enumerate(scanner.records(self._log.begin), 1):
            if record.log_offset >= end:
                break
            _, keys = tags_and_keys(record.topic, record.properties)
            _restore_keys(self._index, record, keys)
            if number % SPILL_INTERVAL_RECORDS == 0:
                self._spill()
        recovery.damage += [damage for damage in scanner.damage if damage.begin < end]


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

    In records without a record CRC no checksum covers topic, queue id and queue offset. A record
    that is valid otherwise can therefore still be damaged. It is rejected if it cannot be part of
    its queue.
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
        if record.queue_offset < 0:
            return f"its queue offset is {record.queue_offset}"
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
        gap = record.queue_offset - queue.next_offset
        if is_first and self._is_strict and not 0 < gap <= self._lost_records_max():
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
        if queue.is_empty:  # nothing has expired, so only damage explains a first offset above 0
            return gap <= self._lost_records_max()
        return gap <= max(UNCONFIRMED_GAP_MAX, self._lost_records_max())

    def _lost_records_max(self) -> int:
        """Return how many records the damage so far can have held."""
        return sum(damage.size for damage in self._scanner.damage) // RECORD_BYTES_MIN

    def _following_offset(self, record: StoredRecord, at_least: int) -> QueueOffset | None:
        """Return the queue offset of the next record of the same queue.

        Lower offsets than `at_least` are taken already, so such a record is damaged: skip it.
        """
        scanner = LogScanner(self._log, self._scanner.history)
        records = scanner.records(LogOffset(record.log_offset + record.size))
        for following in islice(records, LOOK_AHEAD_RECORDS):
            if (
                (following.topic, following.queue_id) == (record.topic, record.queue_id)
                and has_queue_entry(following.sys_flag)
                and following.queue_offset >= at_least
            ):
                return following.queue_offset
        return None

    def reserve_lost_offsets(self) -> None:
        """Give lost records that were the last of their queue a blank entry.

        Otherwise the next message would get the queue offset of a lost one, and consumers that
        have received the lost message would not look there again. A lost record may be wrong
        about one thing: topic, queue id or queue offset. So a blank entry is added to every queue
        for which two of them are right. One entry too many does no harm, since readers pass it.
        """
        for position, claims in self._scanner.lost_records:
            queues = [queue for queue in self._queues if _may_be_of(queue, position, claims)]
            for queue in queues:
                queue.add_blanks(QueueOffset(queue.next_offset + 1), position)
                self._queues.dirty.add(queue)


def _may_be_of(queue: ConsumeQueue, position: int, claims: RecordClaims) -> bool:
    """Return whether a lost record may have been the last one of a queue."""
    matches = (queue.topic == claims.topic) + (queue.queue_id == claims.queue_id)
    if matches + (queue.next_offset == claims.queue_offset) < 2 or not queue.next_offset:
        return False
    return _last_entry_end(queue) <= position


def _last_entry_end(queue: ConsumeQueue) -> int:
    """Return the log offset behind the last record of a queue; 0 if the queue is empty."""
    if queue.next_offset == queue.first_offset:
        return 0
    log_offset, size, _ = queue.entry(queue.next_offset - 1)
    return log_offset if size == BLANK_SIZE else log_offset + size
