"""The message store: append records, read them back, survive anything in between.

    append -> commit log (the truth) -> queue entries and keys, in memory
    flush:       the log's own fsync; answers everything that waited for it
    checkpoint:  flush, then queue entries, then keys, then the note that says so

One thread owns a store. A flush or a checkpoint is begun by the owner, `run` in any thread, and
finished by the owner; appends and reads go on meanwhile. Nothing here waits, and nothing here
reads a clock.

The reading side of a store: by queue, by place, by key, by time.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from typing import Final

from escrowmq.config import StoreConfig
from escrowmq.errors import (
    CorruptRecord,
    RecordNotFound,
    RecordRefused,
    StoreError,
    StoreFailed,
    StoreFull,
)
from escrowmq.message.batch import Appendable, RecordRun
from escrowmq.message.keys import QUEUED_AND_KEYED, decode_offset_id, tags_and_keys
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
from escrowmq.store.checkpoint import CheckpointJob
from escrowmq.store.columns import PendingKeyRun, PendingKeys
from escrowmq.store.commit_log import (
    AppendResult,
    CommitLog,
    LogFlush,
    RunLogBatch,
    RunPositions,
    SegmentRemoval,
)
from escrowmq.store.consume_queue import (
    BLANK_SIZE,
    ENTRY,
    ConsumeQueue,
    DeletedTopics,
    QueueTable,
    check_queue_name,
)
from escrowmq.store.disk import Disk, Lock, ViewCache, remove_file, write_file
from escrowmq.store.key_index import REDO_PATH as REDO_PATH
from escrowmq.store.key_index import RESULTS_MAX, KeyIndex
from escrowmq.store.queue_reader import (
    EntryFilter,
    QueueRead,
    RecordSummary,
    first_stored_ms,
    offset_by_time,
    read_queue,
    read_record_summary,
)
from escrowmq.store.recovery import Recovery, recover

_TIME_MAX_MS: Final = 1 << 62


class StoreReader:
    """What MessageStore can be asked, and what of it can be seen. Nothing here touches the disk."""

    _log: CommitLog
    _queues: QueueTable
    _index: KeyIndex
    _last_record_offset: int

    def read(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        *,
        count_max: int = 32,
        bytes_max: int = 256 * 1024,
        message_filter: EntryFilter | None = None,
    ) -> QueueRead:
        queue = self._queues.find(topic, queue_id)
        return read_queue(
            self._log,
            queue,
            queue_offset,
            count_max=count_max,
            bytes_max=bytes_max,
            message_filter=message_filter,
        )

    def record_at(self, log_offset: int) -> StoredRecord:
        return self._log.record_at(LogOffset(log_offset))

    def record_by_id(self, offset_id: str) -> StoredRecord:
        """The record that an offset id names, whatever host it speaks of."""
        return self.record_at(decode_offset_id(offset_id)[1])

    def record_bytes(self, record: StoredRecord) -> memoryview:
        """A record as it lies in the log."""
        return self._log.view(record.log_offset, record.log_offset + record.size)

    @property
    def last_record_offset(self) -> int:
        """Where the newest record begins; -1 if there is none."""
        return self._last_record_offset

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
        end_ms: int = _TIME_MAX_MS,
    ) -> list[StoredRecord]:
        """Records of a topic that carry a key or unique key, the newest first."""
        sought = key.encode()
        found: list[StoredRecord] = []
        for log_offset in self._index.find(topic, sought, begin_ms, end_ms):
            try:
                record = self._log.record_at(log_offset)
            except (RecordNotFound, CorruptRecord):
                continue  # expired, or an index that lies
            _, keys = tags_and_keys(record.topic, record.properties, record.stored_ms)
            in_window = begin_ms <= record.stored_ms <= end_ms  # the index only knows seconds
            if self._queues.deleted_topics.is_deleted(topic, record.log_offset):
                continue
            if record.topic == topic and sought in keys and in_window:
                found.append(record)
                if len(found) >= min(count_max, RESULTS_MAX):
                    break
        return found

    def log_offset_of(self, topic: str, queue_id: int, queue_offset: int) -> LogOffset | None:
        """Where the message at this place of a queue lies; None if there is none."""
        queue = self._queues.find(topic, queue_id)
        if queue is None or not queue.first_offset <= queue_offset < queue.next_offset:
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
            at = max(begin, queue.first_offset) + len(found)
            entries = queue.entries(at, min(count - len(found), queue.visible_end - at))
            if not entries:
                break
            found += ENTRY.iter_unpack(bytes(entries))
        return found

    def record_summaries(
        self, topic: str, queue_id: int, begin: int, end: int
    ) -> Iterator[RecordSummary]:
        """What lies at each place of a queue, without a look at the bodies. One that does not look
        like a record at all is left out; whether it is whole, `record_at` finds out."""
        queue = self._queues.find(topic, queue_id)
        at = begin if queue is None else max(begin, queue.first_offset)
        while queue is not None and at < min(end, queue.next_offset):
            entries = queue.entries(at, min(end, queue.next_offset) - at)
            for log_offset, size, _ in ENTRY.iter_unpack(bytes(entries)):
                found = (
                    None
                    if size == BLANK_SIZE
                    else read_record_summary(self._log, at, log_offset, size)
                )
                if found is not None:
                    yield found
                at += 1

    def min_offset(self, topic: str, queue_id: int) -> QueueOffset:
        queue = self._queues.find(topic, queue_id)
        return QueueOffset(0) if queue is None else queue.min_offset(self._log.begin)

    def max_offset(self, topic: str, queue_id: int) -> QueueOffset:
        """The offset that the next message will have; of a queue on hold, of the first unseen."""
        queue = self._queues.find(topic, queue_id)
        return QueueOffset(0) if queue is None else queue.visible_end

    def hide(self, topic: str, queue_id: int, queue_offset: int) -> None:
        """What lies from there on in this queue is seen by nobody until `show`."""
        self._queues.get_or_create(topic, queue_id).hide(queue_offset)

    def unhide(self, topic: str, queue_id: int) -> None:
        """As often as it was held."""
        self._queues.get_or_create(topic, queue_id).unhide()

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


LOCK_PATH: Final = "lock"
ABORT_PATH: Final = "abort"


class MessageStore(StoreReader):
    """Use `MessageStore.open`; `close` makes the next start a clean one."""

    def __init__(
        self, disk: Disk, config: StoreConfig, store_host: bytes, lock: Lock, *, was_clean: bool
    ) -> None:
        self._disk = disk
        self._lock = lock
        self._views = ViewCache(disk)
        self._log = CommitLog(
            disk,
            segment_bytes=config.segment_bytes,
            store_host=store_host,
            append_crc=config.sealed,
        )
        self._queues: QueueTable = QueueTable(
            disk, self._views, DeletedTopics(disk), file_bytes=config.queue_file_bytes
        )
        self._index = KeyIndex(
            disk,
            self._views,
            slot_count=config.index_slots,
            entry_count=config.index_entries,
            is_enabled=config.index_enabled,
        )
        self.change_config(config)
        self._expired_below = -1  # derived files that speak only of what lies below
        self._checkpoint_job: CheckpointJob | None = None
        self._has_removed_topic = False  # queues that the last checkpoint has counted
        self.has_disk_space = True  # False while the disk is nearly full
        self.recovery: Recovery = recover(
            disk, self._log, self._queues, self._index, was_clean=was_clean, spill=self._spill
        )
        self.checkpointed_offset = (
            self._log.begin
        )  # everything below is durable and has its entries
        self._last_record_offset = self.recovery.last_record_offset
        self._last_stored_ms = self.recovery.stored_ms

    @classmethod
    def open(cls, disk: Disk, config: StoreConfig, *, store_host: bytes) -> MessageStore:
        """Own the directory, recover what is in it, and be ready for appends.

        On a full disk it is ready for reads: its checkpoint is made when there is room.
        """
        lock = disk.lock(LOCK_PATH, b"lock")
        try:
            clean = not disk.exists(ABORT_PATH)
            write_file(disk, ABORT_PATH, b"")
            store = cls(disk, config, store_host, lock, was_clean=clean)
            if not clean or store.recovery.torn_reason is not None:
                store._log.truncate(store._log.end)
            with contextlib.suppress(StoreFull):
                store.checkpoint()
        except BaseException:
            lock.release()
            raise
        return store

    def close(self) -> None:
        """Write everything out and say that this stop was in order."""
        try:
            if not self.has_failed:
                self.checkpoint()
                remove_file(self._disk, REDO_PATH)  # done with; another broker may come next
                remove_file(self._disk, ABORT_PATH)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Give the directory up as it is, like a process that was killed."""
        self._queues.close()
        self._views.close()
        self._log.close()
        self._lock.release()

    def change_config(self, config: StoreConfig) -> None:
        """What is accepted and kept may change at any time; how files are laid out may not."""
        self.config = config
        # A record with less in it is within every limit and need not be measured.
        self._unchecked_bytes_max = min(
            config.message_bytes_max, config.record_bytes_max - 1024, 30_000
        )

    # --- appending -----------------------------------------------------------------------------

    def append(self, records: Sequence[Appendable], *, now_ms: int) -> list[AppendResult]:
        """All records in one write, or none and an error. A crash leaves a prefix of them."""
        self._check_disk_space()
        stored_ms = now_ms if now_ms > self._last_stored_ms else self._last_stored_ms
        batch = RunLogBatch(self._log)
        add, find_or_make, small_bytes = (
            batch.add,
            self._queues.get_or_create,
            self._unchecked_bytes_max,
        )
        placed: list[AppendResult] = []
        added: list[ConsumeQueue] = []
        waiting: list[PendingKeys] = []
        wait = waiting.append
        queue: ConsumeQueue | None = None
        try:
            for record in records:
                if type(record) is RecordRun:
                    queue = find_or_make(record.topic, record.queue_id)
                    places = self._add_run(batch, record, queue, stored_ms)
                    added += [queue] * len(places.sizes)
                    wait(PendingKeyRun(record.topic, record.keys, places.log_offsets, stored_ms))
                    placed.append(AppendResult.of_run(places, queue.next_offset))
                    continue
                topic, queue_id, sys_flag = record.topic, record.queue_id, record.sys_flag
                properties = record.properties
                if len(record.body) + len(properties) > small_bytes:
                    self._check_record_size(record)
                if 0 in properties:
                    raise RecordRefused("a zero byte in the properties")
                tags_code, keys = record.tags_and_keys or tags_and_keys(
                    topic, properties, stored_ms
                )
                is_shown, is_keyed = QUEUED_AND_KEYED[sys_flag & TRANSACTION_MASK]
                if is_shown:
                    if queue is None or queue.queue_id != queue_id or queue.topic != topic:
                        queue = find_or_make(topic, queue_id)
                    queue_offset = queue.next_offset
                    log_offset, size = add(record, queue_offset, stored_ms)
                    queue.add(log_offset, size, tags_code)
                    added.append(queue)
                else:
                    check_queue_name(topic, queue_id)
                    queue_offset = QueueOffset(0)
                    log_offset, size = add(record, queue_offset, stored_ms)
                placed.append(AppendResult(log_offset, queue_offset, size))
                if is_keyed:
                    for key in keys:
                        wait((topic, key, log_offset, stored_ms))
            batch.write()
        except BaseException as error:
            self._undo_append(added, queue)
            if isinstance(error, struct.error):
                raise RecordRefused(f"a number that a record cannot hold: {error}") from error
            raise
        self._apply_append(placed, added, waiting, stored_ms)
        return placed

    def _apply_append(
        self,
        results: list[AppendResult],
        queues: list[ConsumeQueue],
        pending_keys: list[PendingKeys],
        now_ms: int,
    ) -> None:
        self._last_stored_ms = now_ms
        self._queues.dirty.update(queues)
        self._index.pending += pending_keys if self._index.is_enabled else ()
        self._last_record_offset = results[-1].log_offset if results else self._last_record_offset

    def _check_disk_space(self) -> None:
        if not self.has_disk_space:
            raise StoreFull("the disk is nearly full: no new messages until there is room")

    def _undo_append(self, queues: list[ConsumeQueue], last_queue: ConsumeQueue | None) -> None:
        for queue in queues:
            queue.remove_last()
        for queue in queues if last_queue is None else [*queues, last_queue]:
            self._queues.discard_if_unused(queue)

    def _add_run(
        self, batch: RunLogBatch, run: RecordRun, queue: ConsumeQueue, stored_ms: int
    ) -> RunPositions:
        longest = max(map(len, run.bodies)) + len(run.keys[0]) + len(run.extra_properties)
        if longest + 1024 > self._unchecked_bytes_max:
            for record in run.records():
                self._check_record_size(record)
        places = batch.add_run(run, queue.next_offset, stored_ms)
        queue.add_run(places.log_offsets, places.sizes)
        return places

    def _check_record_size(self, record: NewRecord) -> None:
        body_bytes, properties_bytes = len(record.body), len(record.properties)
        limit = self.config.message_bytes_max
        if body_bytes > limit:
            raise RecordRefused(f"a body of {body_bytes} bytes, limit {limit}")
        if properties_bytes > PROPERTIES_BYTES_MAX - CRC_PROPERTY_BYTES_MAX:
            limit = PROPERTIES_BYTES_MAX - CRC_PROPERTY_BYTES_MAX
            raise RecordRefused(f"properties of {properties_bytes} bytes, limit {limit}")
        size = encoded_size(
            record, store_host=self._log.store_host, append_crc=self._log.append_crc
        )
        if size > self.config.record_bytes_max:
            limit = self.config.record_bytes_max
            raise RecordRefused(f"a record of {size} bytes, limit {limit}")

    # --- making durable ------------------------------------------------------------------------

    @property
    def end(self) -> LogOffset:
        """Where the next record will lie. Durable once `flushed` has reached it."""
        return self._log.end

    @property
    def last_stored_ms(self) -> int:
        """The time never runs backwards here: the next record is not older than this."""
        return self._last_stored_ms

    @property
    def begin(self) -> LogOffset:
        return self._log.begin

    @property
    def flushed_offset(self) -> LogOffset:
        return self._log.flushed_offset

    def begin_flush(self) -> LogFlush:
        return self._log.begin_flush()

    def finish_flush(self, flush: LogFlush) -> LogOffset:
        self._log.finish_flush(flush)
        return self._log.flushed_offset

    @property
    def has_failed(self) -> bool:
        """Whether only a restart can help."""
        return self._log.has_failed

    @property
    def is_writable(self) -> bool:
        """Whether an append would be tried: there is room, and nothing has failed."""
        return self.has_disk_space and not self.has_failed

    def fail(self, error: StoreError) -> None:
        """After a flush that failed: the kernel may have dropped what it could not write, so
        nothing more is taken until a restart has found out what is there."""
        self._log.fail(error)

    def flush(self) -> LogOffset:
        """Flush here and now."""
        flush = self.begin_flush()
        try:
            flush.run()
        except StoreError as error:
            self.fail(error)
            raise
        return self.finish_flush(flush)

    def begin_checkpoint(self) -> CheckpointJob:
        if self._checkpoint_job is not None:
            raise StoreFailed("a checkpoint is being made already")
        queue_count, entry_total, first_total = self._queues.totals(self._log.begin)
        self._checkpoint_job = CheckpointJob(
            disk=self._disk,
            log_flush=self._log.begin_flush(),
            queue_flushes=[queue.begin_flush() for queue in self._queues.dirty],
            index_flush=self._index.begin_flush(self._last_stored_ms),
            log_offset=self._log.end,
            last_record_offset=self._last_record_offset,
            stored_ms=self._last_stored_ms,
            log_begin=self._log.begin,
            queue_count=queue_count,
            entry_total=entry_total,
            first_total=first_total,
        )
        return self._checkpoint_job

    @property
    def is_checkpointed(self) -> bool:
        """Whether another checkpoint would say nothing new."""
        return self.checkpointed_offset == self._log.end and not self._has_removed_topic

    def finish_checkpoint(self, job: CheckpointJob) -> None:
        self._checkpoint_job = None
        self._has_removed_topic = False
        self.checkpointed_offset = job.log_offset
        self._log.finish_flush(job.log_flush)
        has_expired = self._expired_below != job.log_begin
        if has_expired:
            # Before the queues take note of what is in their files now: just what the checkpoint
            # has counted as gone may go.
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

    def fail_checkpoint(self, error: StoreError) -> None:
        """A checkpoint that found no room can be made again; one that failed otherwise cannot."""
        self._checkpoint_job = None
        if not isinstance(error, StoreFull):
            self._log.fail(error)

    def checkpoint(self) -> None:
        """Make a checkpoint here and now."""
        job = self.begin_checkpoint()
        try:
            job.run()
        except StoreError as error:
            self.fail_checkpoint(error)
            raise
        self.finish_checkpoint(job)

    def _spill(self) -> None:
        """Bring what recovery gathered to the files, so that memory stays bounded."""
        for queue in list(self._queues.dirty):
            entries = queue.begin_flush()
            entries.run()
            queue.finish_flush(entries)
        self._queues.dirty.clear()
        keys = self._index.begin_flush(self._newest_pending_ms())
        keys.run()
        self._index.finish_flush(keys)

    def _newest_pending_ms(self) -> int:
        return self._index.pending[-1][3] if self._index.pending else 0

    # --- forgetting ----------------------------------------------------------------------------

    def can_remove_topic(self, topic: str) -> bool:
        """Not while a checkpoint writes to its files, nor while somebody waits to show them."""
        return self._checkpoint_job is None and not any(
            queue.is_hidden for queue in self._queues.queues_of(topic)
        )

    def remove_topic(self, topic: str) -> int:
        """Delete its queues, for good: how many. Its records are found no more and stay in the log
        until they expire; a message that comes later begins a new queue at 0."""
        if not self.can_remove_topic(topic):
            raise StoreFailed(f"the queues of {topic} are in use")
        if topic in self._queues.deleted_topics or self._queues.queues_of(topic):
            log = self._log
            self._queues.deleted_topics.mark_deleted(topic, log_begin=log.begin, log_end=log.end)
            self._has_removed_topic = True
        try:
            return self._queues.remove_topic(topic)
        except StoreError as error:  # files are left that a new queue must not find
            self._log.fail(error)
            raise

    def log_files(self) -> list[tuple[LogOffset, int]]:
        """Where each file of the log begins and when it was last written, oldest first."""
        return [
            (LogOffset(base), self._log.modified_ms(base)) for base in self._log.segment_bases()
        ]

    def modified_ms(self, base: LogOffset) -> int:
        """When the file that begins there was last written."""
        return self._log.modified_ms(base)

    def begin_removal(self) -> SegmentRemoval:
        """Of the oldest file of the log. What only speaks of it goes after the next checkpoint,
        which knows that it will be missing; none may be made meanwhile."""
        # Only below a checkpoint, or a queue could forget how far it had counted.
        return self._log.begin_removal(below=self.checkpointed_offset)

    def finish_removal(self, removal: SegmentRemoval) -> None:
        self._log.finish_removal(removal)

    def remove_oldest_file(self) -> None:
        """Forget it here and now."""
        removal = self.begin_removal()
        try:
            removal.run()
        finally:
            self.finish_removal(removal)
        removal.release()
