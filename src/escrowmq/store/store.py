"""The message store: append records, read them back, and survive a crash at any point.

    append      records --> commit log, then queue entries and keys in memory
    flush       fsync the log; everything appended before is durable then
    checkpoint  flush the log, write queue entries, write keys, save that all of this is durable
    read        queue offset --> queue entry --> slices of the log

One thread owns a store. Its methods never wait and never read a clock. Only flushes, checkpoints
and removals of segments take long: the owner begins them, `run` may be called in any thread, and
the owner finishes them. Appends and reads go on meanwhile.

    job = store.begin_checkpoint()   # owner
    job.run()                        # any thread
    store.finish_checkpoint(job)     # owner
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from escrowmq.config import DelayConfig, StoreConfig
from escrowmq.errors import (
    RecordRefused,
    StoreDamaged,
    StoreError,
    StoreFailed,
    StoreFull,
    StoreUnavailable,
    panic_as_exception,
)
from escrowmq.message.batch import Appendable, RecordRun
from escrowmq.message.keys import QUEUED_AND_KEYED, tags_and_keys
from escrowmq.message.record import (
    CRC_PROPERTY_BYTES_MAX,
    PROPERTIES_BYTES_MAX,
    TRANSACTION_MASK,
    LogOffset,
    NewRecord,
    QueueOffset,
    StoredRecord,
    encoded_size,
)
from escrowmq.native import NativePath, load_native
from escrowmq.sliced_work import SlicedResult, SlicedWork, run_to_end
from escrowmq.store.checkpoint import (
    CheckpointJob,
    report_damaged_checkpoint,
    write_queue_entries,
)
from escrowmq.store.columns import KeyBlock, PendingKeyRun, PendingKeys, newest_stored_ms
from escrowmq.store.commit_log import (
    AppendResult,
    CommitLog,
    LogFlush,
    RunLogBatch,
    RunPositions,
    SegmentRemoval,
)
from escrowmq.store.config_files import DeletedTopics
from escrowmq.store.consume_queue import (
    ConsumeQueue,
    QueueBlocks,
    QueueTable,
    check_queue_name,
)
from escrowmq.store.damage import DamageReports
from escrowmq.store.disk import Disk, Lock, OpenFiles, remove_file, write_file
from escrowmq.store.flush_marks import MARKS_PATH, report_damaged_marks
from escrowmq.store.key_index import REDO_PATH as REDO_PATH
from escrowmq.store.key_index import STORED_TIME_WAIT_MAX_MS, KeyIndex
from escrowmq.store.log_scan import KnownBoundaries, LogHistory, LogScanner
from escrowmq.store.queue_repair import QueueRepair
from escrowmq.store.recovery import Recovery, cut_longer_segments, recover
from escrowmq.store.store_reader import StoreReader

LOCK_PATH: Final = "lock"
ABORT_PATH: Final = "abort"
INCOMPLETE_PATH: Final = "escrowmq.incomplete"  # a backup or a restore has not copied everything
INCOMPLETE_COPY: Final = (
    "messages are missing: a backup to this directory, or a restore, was interrupted or has failed "
    "(remove the directory and repeat the command)"
)
DEFAULT_DELAY_LEVELS_MS: Final = DelayConfig().delay_levels_ms


class EncodableBatch(Protocol):
    """Records that encode themselves once their offsets are known."""

    @property
    def queues(self) -> Sequence[tuple[str, int]]:
        """Topic and queue id of each queue that gets messages."""

    def encode(
        self, log_end: int, segment_bytes: int, stored_ms: int, next_offsets: Sequence[int]
    ) -> None:
        """Encode all records for the end of the log. `next_offsets` are those of the queues."""

    @property
    def pieces(self) -> Sequence[tuple[int, memoryview]]:
        """The bytes for each segment, with the log offset at which they begin."""

    @property
    def end(self) -> int:
        """The log offset behind the last record."""

    @property
    def last_record_offset(self) -> int: ...
    @property
    def entries(self) -> Sequence[bytes]:
        """The queue entries of each queue."""

    def take_keys(self) -> KeyBlock:
        """Return the keys of all records."""


class MessageStore(StoreReader):
    """A store in one directory. Create it with `MessageStore.open`."""

    def __init__(
        self,
        disk: Disk,
        config: StoreConfig,
        store_host: bytes,
        lock: Lock,
        delay_levels_ms: tuple[int, ...],
        *,
        was_clean: bool,
        native: NativePath | None,
    ) -> None:
        self._disk = disk
        self._delay_levels_ms = delay_levels_ms
        self._lock = lock
        self.damage = DamageReports()
        self._open_files = OpenFiles(disk)
        cut_longer_segments(disk, config.segment_bytes, self.damage)
        native = load_native() if native is None else native
        self._log = CommitLog(
            disk,
            segment_bytes=config.segment_bytes,
            store_host=store_host,
            append_crc=config.sealed,
            native=native,
        )
        blocks = QueueBlocks(disk, self._open_files, file_bytes=config.queue_file_bytes)
        deleted_topics = DeletedTopics(disk, self.damage)
        blocks.compare_with_log = QueueRepair(
            self._log, self.readable_records, deleted_topics, delay_levels_ms, self.damage
        )
        self._queues: QueueTable = QueueTable(blocks, deleted_topics)
        self._index = KeyIndex(
            disk,
            self._open_files,
            slot_count=config.index_slots,
            entry_count=config.index_entries,
            is_enabled=config.index_enabled,
            damage=self.damage,
            log_offsets_between=self._log_offsets_between,
            native=native,
        )
        self.change_config(config)
        # Queue and index files of records below this log offset are removed already.
        self._expired_below = -1
        self._checkpoint_job: CheckpointJob | None = None
        self._has_removed_topic = False  # since the last checkpoint, which has counted its queues
        self.has_disk_space = True  # False while the disk is nearly full
        self._on_change: Callable[[], None] = lambda: None
        report_damaged_checkpoint(disk, self.damage)
        report_damaged_marks(disk, self.damage)
        self.recovery: Recovery = recover(
            disk,
            self._log,
            self._queues,
            self._index,
            delay_levels_ms,
            was_clean=was_clean,
            spill=self._spill,
            damage=self.damage,
        )
        # Everything below this log offset is durable, with its queue entries and keys.
        self.checkpointed_offset = self._log.begin
        self._last_record_offset = self.recovery.last_record_offset
        self._last_stored_ms = self.recovery.stored_ms

    @classmethod
    def open(
        cls,
        disk: Disk,
        config: StoreConfig,
        *,
        store_host: bytes,
        delay_levels_ms: tuple[int, ...] = DEFAULT_DELAY_LEVELS_MS,
        native: NativePath | None = None,
    ) -> MessageStore:
        """Lock the directory, recover what is in it and return a store that is ready for appends.

        `delay_levels_ms`: the due time of a delayed message, which its queue entry holds, follows
        from it. `native`: the native path; unless given, it is used if it is installed. On a full
        disk the store is ready for reads, and its checkpoint is made later.

        Raises StoreLocked if another broker uses the directory, and StoreDamaged if segments are
        missing or have another size than configured, or if the directory is an incomplete copy.
        """
        if disk.exists(INCOMPLETE_PATH):
            raise StoreDamaged(INCOMPLETE_COPY)
        lock = disk.lock(LOCK_PATH, b"lock")
        try:
            # `abort` exists while a process uses the directory. If it exists now, the last process
            # was killed. RocketMQ uses the same file.
            clean = not disk.exists(ABORT_PATH)
            write_file(disk, ABORT_PATH, b"")
            store = cls(
                disk, config, store_host, lock, delay_levels_ms, was_clean=clean, native=native
            )
            # Remove what is behind the end of the log. Otherwise a later append could stop right in
            # front of an old, valid record, and the next recovery would take it for a new one.
            if not clean or store.recovery.torn_reason is not None:
                store._log.truncate(store._log.end)
            store.recovery.report(store.damage)
            with contextlib.suppress(StoreFull, StoreUnavailable):
                store.checkpoint()
        except BaseException:
            lock.release()
            raise
        return store

    def close(self) -> None:
        """Make a last checkpoint and record that the store was closed. Raises StoreError."""
        try:
            if not self.has_failed:
                self.checkpoint()
                remove_file(self._disk, REDO_PATH)  # applied; RocketMQ may change the index next
                remove_file(self._disk, MARKS_PATH)  # the checkpoint says it; RocketMQ may cut it
                remove_file(self._disk, ABORT_PATH)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Release the directory as it is, like a process that was killed."""
        self._queues.close()
        self._open_files.close()
        self._log.close()
        self._lock.release()

    def readable_records(self, begin: LogOffset) -> Iterator[StoredRecord]:
        """Yield the records from a record boundary on, past those that are damaged."""
        log = self._log
        known = KnownBoundaries(log.segment_bytes, (log.flushed_offset, log.end), self._disk)
        history = LogHistory(boundaries=known, durable_end=log.end)
        for record in LogScanner(log, history).records(begin):
            if record.log_offset >= log.end:
                return
            yield record

    def _log_offsets_between(self, begin: int, end: int) -> Iterator[int]:
        """Yield the log offsets of the records from `begin` up to `end`, both included."""
        for record in self.readable_records(LogOffset(max(begin, self._log.begin))):
            if record.log_offset > end:
                break
            yield record.log_offset

    def change_config(self, config: StoreConfig) -> None:
        """Apply new limits and retention times. The layout of files cannot change."""
        self.config = config
        # A record with fewer bytes is within every limit, so that `append` need not measure it.
        # Body and properties of this length together fit into every limit.
        self.unchecked_bytes_max = min(config.record_bytes_max - 1024, 30_000)

    # --- appending -----------------------------------------------------------------------------

    def append(self, records: Sequence[Appendable], *, now_ms: int) -> list[AppendResult]:
        """Append all records in one write, or none of them. Return where each was stored.

        A crash during the append leaves the first n of the records. They are durable only after a
        flush. Raises RecordRefused for an invalid record, StoreFull, or StoreFailed.
        """
        self._check_disk_space()
        stored_ms = now_ms if now_ms > self._last_stored_ms else self._time_not_before_last(now_ms)
        batch = RunLogBatch(self._log)
        # This loop runs once per message: bound methods are looked up once.
        add, get_or_create = batch.add, self._queues.get_or_create
        unchecked_bytes_max, delay_levels_ms = self.unchecked_bytes_max, self._delay_levels_ms
        results: list[AppendResult] = []
        changed_queues: list[ConsumeQueue] = []  # once per entry that was added
        pending_keys: list[PendingKeys] = []
        add_key = pending_keys.append
        queue: ConsumeQueue | None = None
        is_encoded = False
        try:
            for record in records:
                if type(record) is RecordRun:
                    queue = get_or_create(record.topic, record.queue_id)
                    positions = self._add_run(batch, record, queue, stored_ms)
                    changed_queues += [queue] * len(positions.sizes)
                    add_key(
                        PendingKeyRun(record.topic, record.keys, positions.log_offsets, stored_ms)
                    )
                    results.append(AppendResult.of_run(positions, queue.next_offset))
                    continue
                topic, queue_id, sys_flag = record.topic, record.queue_id, record.sys_flag
                properties = record.properties
                if len(record.body) + len(properties) > unchecked_bytes_max:
                    self._check_record_size(record)
                if 0 in properties:
                    # It would look like an unwritten sector: recovery would cut the log here.
                    raise RecordRefused("the properties contain a zero byte")
                tags_code, keys = record.tags_and_keys or tags_and_keys(
                    topic, properties, stored_ms, delay_levels_ms
                )
                is_queued, is_keyed = QUEUED_AND_KEYED[sys_flag & TRANSACTION_MASK]
                if is_queued:
                    if queue is None or queue.queue_id != queue_id or queue.topic != topic:
                        queue = get_or_create(topic, queue_id)
                    queue_offset = queue.next_offset
                    log_offset, size = add(record, queue_offset, stored_ms)
                    queue.add(log_offset, size, tags_code)
                    changed_queues.append(queue)
                else:
                    check_queue_name(topic, queue_id)
                    queue_offset = QueueOffset(0)
                    log_offset, size = add(record, queue_offset, stored_ms)
                results.append(AppendResult(log_offset, queue_offset, size))
                if is_keyed:
                    for key in keys:
                        add_key((topic, key, log_offset, stored_ms))
            is_encoded = True
            batch.write()
        except BaseException as error:
            self._undo_append(changed_queues, queue)
            if not is_encoded and isinstance(error, MemoryError):
                # It may have come between the entry of a queue and the note of it.
                self.fail(error)
            if isinstance(error, struct.error):
                raise RecordRefused(f"a number is out of range for its field: {error}") from error
            raise
        try:
            last_offset = results[-1].log_offset if results else self._last_record_offset
            self._apply_append(last_offset, changed_queues, pending_keys, stored_ms)
        except Exception as error:  # a MemoryError
            # The records are in the log, but memory does not know all of them. A restart helps.
            self.fail(error)
            raise StoreFailed(f"the records are stored but not indexed: {error}") from error
        return results

    def append_encoded(self, batch: EncodableBatch, *, now_ms: int) -> None:
        """Append records that encode themselves. Otherwise the same as `append`."""
        self._check_disk_space()
        stored_ms = now_ms if now_ms > self._last_stored_ms else self._time_not_before_last(now_ms)
        log = self._log
        queues: list[ConsumeQueue] = []
        try:
            for topic, queue_id in batch.queues:
                queues.append(self._queues.get_or_create(topic, queue_id))
            next_offsets = [queue.next_offset for queue in queues]
            batch.encode(log.end, log.segment_bytes, stored_ms, next_offsets)
            parts = [(LogOffset(begin), part) for begin, part in batch.pieces]
            log.write_encoded(parts, LogOffset(batch.end))
        except BaseException:
            for queue in queues:
                self._queues.discard_if_unused(queue)
            raise
        try:
            for queue, entries in zip(queues, batch.entries, strict=True):
                queue.add_entries(entries)
            self._apply_append(batch.last_record_offset, queues, [batch.take_keys()], stored_ms)
        except BaseException as raised:  # a MemoryError, or a panic of the native module
            error = panic_as_exception(raised)
            self.fail(error)
            raise StoreFailed(f"the records are stored but not indexed: {error}") from raised

    def _apply_append(
        self,
        last_record_offset: int,
        queues: list[ConsumeQueue],
        pending_keys: list[PendingKeys],
        now_ms: int,
    ) -> None:
        self._last_stored_ms = now_ms
        self._queues.dirty.update(queues)
        self._index.pending += pending_keys if self._index.is_enabled else ()
        self._last_record_offset = last_record_offset
        self._on_change()

    def _time_not_before_last(self, now_ms: int) -> int:
        """Return the stored time of records if the clock does not show more than at the last one.

        Look-ups by time expect that stored times do not decrease, so a clock that is set back a
        little waits. If the last record is far in the future, a clock was wrong when it was stored;
        waiting for that time would give wrong times to all messages until then.
        """
        is_wrong = self._last_stored_ms - now_ms > STORED_TIME_WAIT_MAX_MS
        return now_ms if is_wrong else self._last_stored_ms

    def _check_disk_space(self) -> None:
        if not self.has_disk_space:
            raise StoreFull(
                "the disk is nearly full: new messages are refused until there is space "
                "(diskSpaceWarningLevelRatio)"
            )

    def _undo_append(self, queues: list[ConsumeQueue], last_queue: ConsumeQueue | None) -> None:
        for queue in queues:
            queue.remove_last()
        for queue in queues if last_queue is None else [*queues, last_queue]:
            self._queues.discard_if_unused(queue)

    def _add_run(
        self, batch: RunLogBatch, run: RecordRun, queue: ConsumeQueue, stored_ms: int
    ) -> RunPositions:
        longest = max(map(len, run.bodies)) + len(run.keys[0]) + len(run.extra_properties)
        if longest + 1024 > self.unchecked_bytes_max:
            for record in run.records():
                self._check_record_size(record)
        positions = batch.add_run(run, queue.next_offset, stored_ms)
        queue.add_run(positions.log_offsets, positions.sizes)
        return positions

    def _check_record_size(self, record: NewRecord) -> None:
        properties_bytes = len(record.properties)
        if properties_bytes > PROPERTIES_BYTES_MAX - CRC_PROPERTY_BYTES_MAX:
            limit = PROPERTIES_BYTES_MAX - CRC_PROPERTY_BYTES_MAX
            raise RecordRefused(f"properties are {properties_bytes} bytes, the limit is {limit}")
        size = encoded_size(
            record, store_host=self._log.store_host, append_crc=self._log.append_crc
        )
        if size > self.config.record_bytes_max:
            limit = self.config.record_bytes_max
            raise RecordRefused(f"record is {size} bytes, the limit is {limit}")

    def watch_appends(self, on_append: Callable[[int, bytes], None]) -> None:
        """Let `on_append` be called with log offset and bytes of what `append` has written."""
        self._log.on_append = on_append

    def watch_changes(self, on_change: Callable[[], None]) -> None:
        """Let `on_change` be called after whatever may need a flush, a checkpoint or a new start.

        That is an append, a flush of the log, the removal of a topic, and a failure. It is called
        often, in the thread that changes the store.
        """
        self._on_change = self._log.on_failure = on_change

    # --- making durable ------------------------------------------------------------------------

    @property
    def end(self) -> LogOffset:
        """Return the log offset of the next record.

        Records are durable once `flushed_offset` has reached the end that followed their append.
        """
        return self._log.end

    @property
    def last_stored_ms(self) -> int:
        """Return the stored time of the newest record."""
        return self._last_stored_ms

    @property
    def begin(self) -> LogOffset:
        return self._log.begin

    @property
    def flushed_offset(self) -> LogOffset:
        return self._log.flushed_offset

    def begin_flush(self, *, syncs_marks: bool = False) -> LogFlush:
        """Return a flush of everything up to here. With `syncs_marks`, its mark is durable too."""
        return self._log.begin_flush(syncs_marks=syncs_marks)

    @property
    def has_unsynced_marks(self) -> bool:
        """Return whether a power cut can lose flush marks (not what they mark)."""
        return self._log.marks is not None and self._log.marks.needs_sync

    def finish_flush(self, flush: LogFlush) -> LogOffset:
        self._log.finish_flush(flush)
        self._on_change()
        return self._log.flushed_offset

    @property
    def has_failed(self) -> bool:
        """Return whether the store refuses writes until the next start."""
        return self._log.has_failed

    @property
    def is_writable(self) -> bool:
        """Return whether an append is possible: the disk has space and nothing has failed."""
        return self.has_disk_space and not self.has_failed

    def fail(self, error: Exception) -> None:
        """Refuse all writes after a failed flush, or if memory does not match the log any more.

        The kernel may have dropped the pages that it could not write. Only recovery at the next
        start finds out what is on the disk.
        """
        self._log.fail(error)

    def flush(self) -> LogOffset:
        """Flush in this thread."""
        flush = self.begin_flush()
        try:
            flush.run()
        except StoreUnavailable:
            raise
        except StoreError as error:
            self.fail(error)
            raise
        return self.finish_flush(flush)

    def begin_checkpoint(self) -> CheckpointJob:
        """Return a job that makes everything up to here durable. Only one at a time."""
        if self._checkpoint_job is not None:
            raise StoreFailed("another checkpoint is running")
        if self.is_removing_files:
            raise StoreUnavailable("the files of a deleted topic are being removed; try again")
        log_flush = self._log.begin_flush()
        queue_flushes = [queue.begin_flush() for queue in self._queues.dirty]
        queue_rows = self._queues.rows(self._log.begin, queue_flushes)
        self._checkpoint_job = CheckpointJob(
            disk=self._disk,
            log_flush=log_flush,
            queue_flushes=queue_flushes,
            index_flush=self._index.begin_flush(self._last_stored_ms),
            log_offset=self._log.end,
            last_record_offset=self._last_record_offset,
            stored_ms=self._last_stored_ms,
            log_begin=self._log.begin,
            queue_count=len(queue_rows),
            entry_total=self._queues.entry_total(),
            queue_rows=b"".join(queue_rows),
            segment_bytes=self._log.segment_bytes,
            queue_file_bytes=self._queues.blocks.file_bytes,
            has_marks=self._log.marks is not None,
        )
        return self._checkpoint_job

    @property
    def is_checkpointed(self) -> bool:
        """Return whether the last checkpoint is still up to date."""
        return self.checkpointed_offset == self._log.end and not self._has_removed_topic

    def finish_checkpoint(self, job: CheckpointJob) -> None:
        """Apply a job that has run: entries and keys are in files now, expired files go."""
        self._checkpoint_job = None
        self._has_removed_topic = False
        self.checkpointed_offset = job.log_offset
        self._log.finish_flush(job.log_flush)
        if job.new_marks is not None:
            self._log.marks = job.new_marks
        has_expired = self._expired_below != job.log_begin
        if has_expired:
            # Before `finish_flush`, because the checkpoint has counted the first offsets before it.
            # Exactly the files that it no longer counts may be removed.
            for queue in self._queues:
                queue.remove_expired(job.log_begin)
        for flush in job.queue_flushes:
            flush.queue.finish_flush(flush)
            if not flush.queue.tail:
                self._queues.dirty.discard(flush.queue)
        self._index.finish_flush(job.index_flush)
        if has_expired:
            self._index.remove_expired(job.log_begin)
            self._expired_below = job.log_begin

    def fail_checkpoint(self, error: Exception) -> None:
        """Undo `begin_checkpoint`. Only a passing error leaves the store writable.

        The next checkpoint writes everything again that this one may have written.
        """
        self._checkpoint_job = None
        if not isinstance(error, StoreFull | StoreUnavailable):
            self._log.fail(error)

    def checkpoint(self) -> None:
        """Make a checkpoint in this thread."""
        run_to_end(self._remove_files())
        job = self.begin_checkpoint()
        try:
            job.run()
        except Exception as error:
            self.fail_checkpoint(error)
            raise
        self.finish_checkpoint(job)

    def _spill(self) -> None:
        """Write what recovery has collected to the files, so that its memory stays bounded."""
        flushes = [queue.begin_flush() for queue in self._queues.dirty]
        write_queue_entries(self._disk, flushes)
        for flush in flushes:
            flush.queue.finish_flush(flush)
        self._queues.dirty.clear()
        keys = self._index.begin_flush(self._newest_pending_ms())
        keys.run()
        self._index.finish_flush(keys)

    def _newest_pending_ms(self) -> int:
        return newest_stored_ms(self._index.pending)

    # --- removing ------------------------------------------------------------------------------

    def can_remove_topic(self, topic: str) -> bool:
        """Return False while a checkpoint writes its files or some of its messages are hidden."""
        return self._checkpoint_job is None and not any(
            queue.is_hidden for queue in self._queues.queues_of(topic)
        )

    def remove_topic(self, topic: str) -> int:
        """Delete all queues of a topic, durably. Return how many there were.

        Its records stay in the log until they expire, but are no longer found. A later message
        begins a new queue at offset 0. Raises StoreFailed if `can_remove_topic` is False.
        """
        return run_to_end(self.remove_topic_in_slices(topic))

    def remove_topic_in_slices(self, topic: str) -> SlicedResult[int]:
        """Do the same in slices: a topic may have thousands of queues.

        The messages are gone before the first slice ends. The files follow; no checkpoint can be
        made until they are removed (`is_removing_files`).
        """
        if not self.can_remove_topic(topic):
            raise StoreFailed(f"the queues of topic {topic} are in use; try again")
        queues = self._queues.queues_of(topic)
        if queues or topic in self._queues.deleted_topics:
            log = self._log
            self._queues.deleted_topics.mark_deleted(topic, log_begin=log.begin, log_end=log.end)
            self._has_removed_topic = True
            self._on_change()
        self._queues.remove(queues)
        yield from self._remove_files()
        return len(queues)

    @property
    def is_removing_files(self) -> bool:
        """Return whether a deleted topic still has files, which a checkpoint might overwrite."""
        return self._queues.has_removed

    def _remove_files(self) -> SlicedWork:
        try:
            yield from self._queues.remove_files()
        except StoreError as error:  # a new queue must not find the files that are left
            self._log.fail(error)
            raise

    def log_files(self) -> list[tuple[LogOffset, int]]:
        """Return begin and last modification time of each segment, the oldest first."""
        return [
            (LogOffset(base), self._log.modified_ms(base)) for base in self._log.segment_bases()
        ]

    def begin_removal(self) -> SegmentRemoval:
        """Begin to remove the oldest segment. No checkpoint may be made until it is finished.

        Queue and index files that describe only this segment are removed after the next checkpoint,
        which no longer counts them.
        """
        # Only below a checkpoint: the queue entries must be durable before their records go, or a
        # queue could start again at a lower offset.
        return self._log.begin_removal(below=self.checkpointed_offset)

    def finish_removal(self, removal: SegmentRemoval) -> None:
        self._log.finish_removal(removal)

    def remove_oldest_file(self) -> None:
        """Remove the oldest segment in this thread."""
        removal = self.begin_removal()
        try:
            removal.run()
        finally:
            self.finish_removal(removal)
        removal.release()
