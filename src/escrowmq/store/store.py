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
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from escrowmq.errors import (
    CorruptRecord,
    NoSuchRecord,
    RecordRefused,
    StoreError,
    StoreFailed,
    StoreFull,
)
from escrowmq.message.batch import NewRun, ToAppend
from escrowmq.message.keys import SHOWN_AND_KEYED, decode_offset_id, derive
from escrowmq.message.record import (
    PROPERTIES_BYTES_MAX,
    SEAL_BYTES_MAX,
    TRANSACTION_MASK,
    LogOffset,
    NewRecord,
    QueueOffset,
    StoredRecord,
    encoded_size,
)
from escrowmq.store.checkpoint import CheckpointJob
from escrowmq.store.columns import Waiting, WaitingRun
from escrowmq.store.commit_log import CommitLog, Flush, Placed, Removal, RunBatch, RunPlaces
from escrowmq.store.consume_queue import (
    BLANK_SIZE,
    ENTRY,
    ConsumeQueue,
    DeletedTopics,
    QueueTable,
    refuse_bad_name,
)
from escrowmq.store.disk import Disk, Lock, OpenViews, remove_file, write_file
from escrowmq.store.key_index import FOUND_MAX, KeyIndex
from escrowmq.store.key_index import PATH as REDO_PATH
from escrowmq.store.queue_reader import (
    SCANNED_MAX,
    Glance,
    QueueRead,
    first_stored_ms,
    glance_at,
    offset_by_time,
    read_queue,
)
from escrowmq.store.recovery import Recovery, recover
from escrowmq.store.settings import StoreSettings

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


LOCK_PATH: Final = "lock"
ABORT_PATH: Final = "abort"


class MessageStore(StoreReads):
    """Use `MessageStore.open`; `close` makes the next start a clean one."""

    def __init__(
        self, disk: Disk, settings: StoreSettings, store_host: bytes, lock: Lock, *, clean: bool
    ) -> None:
        self._disk = disk
        self._lock = lock
        self._views = OpenViews(disk)
        self._log = CommitLog(
            disk,
            segment_bytes=settings.segment_bytes,
            store_host=store_host,
            sealed=settings.sealed,
        )
        self._queues: QueueTable = QueueTable(
            disk, self._views, DeletedTopics(disk), file_bytes=settings.queue_file_bytes
        )
        self._index = KeyIndex(
            disk,
            self._views,
            slots=settings.index_slots,
            entries=settings.index_entries,
            is_on=settings.index_enabled,
        )
        self.change_settings(settings)
        self._removed_below = -1  # derived files that speak only of what lies below
        self._job: CheckpointJob | None = None
        self._has_removed = False  # queues that the last checkpoint has counted
        self.accepts_writes = True  # False while the disk is nearly full
        self.recovery: Recovery = recover(
            disk, self._log, self._queues, self._index, clean=clean, spill=self._spill
        )
        self.checkpointed = self._log.begin  # everything below is durable and has its entries
        self._last_record = self.recovery.last_record
        self._stored_ms = self.recovery.stored_ms

    @classmethod
    def open(cls, disk: Disk, settings: StoreSettings, *, store_host: bytes) -> MessageStore:
        """Own the directory, recover what is in it, and be ready for appends.

        On a full disk it is ready for reads: its checkpoint is made when there is room.
        """
        lock = disk.lock(LOCK_PATH, b"lock")
        try:
            clean = not disk.exists(ABORT_PATH)
            write_file(disk, ABORT_PATH, b"")
            store = cls(disk, settings, store_host, lock, clean=clean)
            if not clean or store.recovery.torn is not None:
                store._log.wipe(store._log.end)
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

    def change_settings(self, settings: StoreSettings) -> None:
        """What is accepted and kept may change at any time; how files are laid out may not."""
        self.settings = settings
        # A record with less in it is within every limit and need not be measured.
        self._small_bytes = min(
            settings.message_bytes_max, settings.record_bytes_max - 1024, 30_000
        )

    # --- appending -----------------------------------------------------------------------------

    def append(self, records: Sequence[ToAppend], *, now_ms: int) -> list[Placed]:
        """All records in one write, or none and an error. A crash leaves a prefix of them."""
        self._refuse_if_full()
        stored_ms = now_ms if now_ms > self._stored_ms else self._stored_ms
        batch = RunBatch(self._log)
        add, find_or_make, small_bytes = batch.add, self._queues.find_or_make, self._small_bytes
        placed: list[Placed] = []
        added: list[ConsumeQueue] = []
        waiting: list[Waiting] = []
        wait = waiting.append
        queue: ConsumeQueue | None = None
        try:
            for record in records:
                if type(record) is NewRun:
                    queue = find_or_make(record.topic, record.queue_id)
                    places = self._add_run(batch, record, queue, stored_ms)
                    added += [queue] * len(places.sizes)
                    wait(WaitingRun(record.topic, record.keys, places.log_offsets, stored_ms))
                    placed.append(Placed.of_run(places, queue.next))
                    continue
                topic, queue_id, sys_flag = record.topic, record.queue_id, record.sys_flag
                properties = record.properties
                if len(record.body) + len(properties) > small_bytes:
                    self._refuse_unfit(record)
                if 0 in properties:
                    raise RecordRefused("a zero byte in the properties")
                tags_code, keys = record.derived or derive(topic, properties, stored_ms)
                is_shown, is_keyed = SHOWN_AND_KEYED[sys_flag & TRANSACTION_MASK]
                if is_shown:
                    if queue is None or queue.queue_id != queue_id or queue.topic != topic:
                        queue = find_or_make(topic, queue_id)
                    queue_offset = queue.next
                    log_offset, size = add(record, queue_offset, stored_ms)
                    queue.add(log_offset, size, tags_code)
                    added.append(queue)
                else:
                    refuse_bad_name(topic, queue_id)
                    queue_offset = QueueOffset(0)
                    log_offset, size = add(record, queue_offset, stored_ms)
                placed.append(Placed(log_offset, queue_offset, size))
                if is_keyed:
                    for key in keys:
                        wait((topic, key, log_offset, stored_ms))
            batch.write()
        except BaseException as error:
            self._take_back(added, queue)
            if isinstance(error, struct.error):
                raise RecordRefused(f"a number that a record cannot hold: {error}") from error
            raise
        self._note(placed, added, waiting, stored_ms)
        return placed

    def _note(
        self,
        placed: list[Placed],
        added: list[ConsumeQueue],
        waiting: list[Waiting],
        now_ms: int,
    ) -> None:
        self._stored_ms = now_ms
        self._queues.dirty.update(added)
        self._index.waiting += waiting if self._index.is_on else ()
        self._last_record = placed[-1].log_offset if placed else self._last_record

    def _refuse_if_full(self) -> None:
        if not self.accepts_writes:
            raise StoreFull("the disk is nearly full: no new messages until there is room")

    def _take_back(self, added: list[ConsumeQueue], last: ConsumeQueue | None) -> None:
        for queue in added:
            queue.drop_last()
        for queue in added if last is None else [*added, last]:
            self._queues.forget(queue)

    def _add_run(
        self, batch: RunBatch, run: NewRun, queue: ConsumeQueue, stored_ms: int
    ) -> RunPlaces:
        longest = max(map(len, run.bodies)) + len(run.keys[0]) + len(run.marks)
        if longest + 1024 > self._small_bytes:
            for record in run.records():
                self._refuse_unfit(record)
        places = batch.add_run(run, queue.next, stored_ms)
        queue.add_run(places.log_offsets, places.sizes)
        return places

    def _refuse_unfit(self, record: NewRecord) -> None:
        body_bytes, properties_bytes = len(record.body), len(record.properties)
        limit = self.settings.message_bytes_max
        if body_bytes > limit:
            raise RecordRefused(f"a body of {body_bytes} bytes, limit {limit}")
        if properties_bytes > PROPERTIES_BYTES_MAX - SEAL_BYTES_MAX:
            limit = PROPERTIES_BYTES_MAX - SEAL_BYTES_MAX
            raise RecordRefused(f"properties of {properties_bytes} bytes, limit {limit}")
        size = encoded_size(record, store_host=self._log.store_host, sealed=self._log.sealed)
        if size > self.settings.record_bytes_max:
            limit = self.settings.record_bytes_max
            raise RecordRefused(f"a record of {size} bytes, limit {limit}")

    # --- making durable ------------------------------------------------------------------------

    @property
    def end(self) -> LogOffset:
        """Where the next record will lie. Durable once `flushed` has reached it."""
        return self._log.end

    @property
    def last_stored_ms(self) -> int:
        """The time never runs backwards here: the next record is not older than this."""
        return self._stored_ms

    @property
    def begin(self) -> LogOffset:
        return self._log.begin

    @property
    def flushed(self) -> LogOffset:
        return self._log.flushed

    def begin_flush(self) -> Flush:
        return self._log.begin_flush()

    def finish_flush(self, flush: Flush) -> LogOffset:
        self._log.finish_flush(flush)
        return self._log.flushed

    @property
    def has_failed(self) -> bool:
        """Whether only a restart can help."""
        return self._log.has_failed

    @property
    def takes_writes(self) -> bool:
        """Whether an append would be tried: there is room, and nothing has failed."""
        return self.accepts_writes and not self.has_failed

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
        if self._job is not None:
            raise StoreFailed("a checkpoint is being made already")
        queue_count, entry_total, first_total = self._queues.totals(self._log.begin)
        self._job = CheckpointJob(
            disk=self._disk,
            flush=self._log.begin_flush(),
            queues=[queue.begin_flush() for queue in self._queues.dirty],
            index=self._index.begin_flush(self._stored_ms),
            log_offset=self._log.end,
            last_record=self._last_record,
            stored_ms=self._stored_ms,
            log_begin=self._log.begin,
            queue_count=queue_count,
            entry_total=entry_total,
            first_total=first_total,
        )
        return self._job

    @property
    def is_checkpointed(self) -> bool:
        """Whether another checkpoint would say nothing new."""
        return self.checkpointed == self._log.end and not self._has_removed

    def finish_checkpoint(self, job: CheckpointJob) -> None:
        self._job = None
        self._has_removed = False
        self.checkpointed = job.log_offset
        self._log.finish_flush(job.flush)
        has_expired = self._removed_below != job.log_begin
        if has_expired:
            # Before the queues take note of what is in their files now: just what the checkpoint
            # has counted as gone may go.
            for queue in self._queues:
                queue.remove_expired(job.log_begin)
        for flush in job.queues:
            flush.queue.finish_flush(flush)
            if not flush.queue.tail:
                self._queues.dirty.discard(flush.queue)
        self._index.finish_flush(job.index)
        if has_expired:
            self._index.remove_expired(job.log_begin)
            self._removed_below = job.log_begin

    def fail_checkpoint(self, error: StoreError) -> None:
        """A checkpoint that found no room can be made again; one that failed otherwise cannot."""
        self._job = None
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
        keys = self._index.begin_flush(self._last_spill_ms())
        keys.run()
        self._index.finish_flush(keys)

    def _last_spill_ms(self) -> int:
        return self._index.waiting[-1][3] if self._index.waiting else 0

    # --- forgetting ----------------------------------------------------------------------------

    def may_remove_topic(self, topic: str) -> bool:
        """Not while a checkpoint writes to its files, nor while somebody waits to show them."""
        return self._job is None and not any(queue.is_held for queue in self._queues.of(topic))

    def remove_topic(self, topic: str) -> int:
        """Delete its queues, for good: how many. Its records are found no more and stay in the log
        until they expire; a message that comes later begins a new queue at 0."""
        if not self.may_remove_topic(topic):
            raise StoreFailed(f"the queues of {topic} are in use")
        if topic in self._queues.deleted or self._queues.of(topic):
            log = self._log
            self._queues.deleted.note(topic, log_begin=log.begin, log_end=log.end)
            self._has_removed = True
        try:
            return self._queues.remove_topic(topic)
        except StoreError as error:  # files are left that a new queue must not find
            self._log.fail(error)
            raise

    def log_files(self) -> list[tuple[LogOffset, int]]:
        """Where each file of the log begins and when it was last written, oldest first."""
        return [(LogOffset(base), self._log.modified_ms(base)) for base in self._log.bases()]

    def modified_ms(self, base: LogOffset) -> int:
        """When the file that begins there was last written."""
        return self._log.modified_ms(base)

    def begin_removal(self) -> Removal:
        """Of the oldest file of the log. What only speaks of it goes after the next checkpoint,
        which knows that it will be missing; none may be made meanwhile."""
        # Only below a checkpoint, or a queue could forget how far it had counted.
        return self._log.begin_removal(below=self.checkpointed)

    def finish_removal(self, removal: Removal) -> None:
        self._log.finish_removal(removal)

    def remove_oldest_file(self) -> None:
        """Forget it here and now."""
        removal = self.begin_removal()
        try:
            removal.run()
        finally:
            self.finish_removal(removal)
        removal.release()
