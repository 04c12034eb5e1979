"""Checkpoints: two small files that say what is durable, so that the next start reads little.

`escrowmq.checkpoint` is our own. It promises that every record below `log_offset`, its queue entry
and its keys are durable. Behind it follows one row for each queue (consume_queue.py): its first and
next offset and the checksums of its blocks, so that a start need not open the files of the queues.
The file has a checksum and is replaced as a whole. Recovery does not depend on it: without it, or
if it does not fit the other files, recovery reads more of the log and comes to the same result.

    checksum of the remaining bytes, 8 hex digits | \n | Checkpoint as JSON | \n | rows

`checkpoint` is RocketMQ's, for a RocketMQ broker that may open the directory later. 4096 bytes:

    log flushed up to, ms 8 | queues, ms 8 | index, ms 8 | zeros
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple
from zlib import crc32

import msgspec

from escrowmq.errors import StoreError
from escrowmq.message.record import LogOffset
from escrowmq.store.commit_log import LogFlush
from escrowmq.store.consume_queue import QueueFlush
from escrowmq.store.damage import DamageKind, DamageReports
from escrowmq.store.disk import Disk, read_file, replace_file, write_file
from escrowmq.store.flush_marks import FlushMarks
from escrowmq.store.key_index import IndexFlush, expired_files

CHECKPOINT_PATH: Final = "escrowmq.checkpoint"
ROCKETMQ_PATH: Final = "checkpoint"
ROCKETMQ_BYTES: Final = 4096
# To flush a file takes about a millisecond. So many together take longer than to flush the whole
# file system once, with whatever other programs have written.
QUEUES_SYNCED_AT_ONCE_MIN = 256
_TIMES = struct.Struct(">qqq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The content of escrowmq.checkpoint; the field names are stored."""

    log_offset: int  # everything below is durable in log, queues and key index
    last_record: int  # log offset of the last record below; -1 if there is none
    stored_ms: int  # when that record was stored
    queue_count: int
    entry_total: int  # sum of the next offsets of all queues
    index_files: list[str]
    index_end_offset: int
    is_indexed: bool = True  # False if records behind the last index file have no keys in it
    # Sum of the first offsets of all queues, in a checkpoint without rows. Recovery compares these
    # totals with the queue files, and a missing file changes one of them.
    first_total: int = 0
    has_queue_rows: bool = False  # False in a checkpoint of an earlier version
    # The lengths of the files, so that a longer one is known to be damaged and not of another
    # configuration; 0 in a checkpoint of an earlier version.
    segment_bytes: int = 0
    queue_file_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RocketMQCheckpoint:
    """The content of RocketMQ's checkpoint file."""

    log_ms: int
    queues_ms: int
    index_ms: int


class CheckpointFile(NamedTuple):
    """The content of escrowmq.checkpoint."""

    checkpoint: Checkpoint
    queue_rows: bytes


def save_checkpoint(disk: Disk, checkpoint: Checkpoint, queue_rows: bytes = b"") -> None:
    """Replace the checkpoint file. A crash leaves the old one or the new one."""
    data = b"%s\n%s" % (msgspec.json.encode(checkpoint), queue_rows)
    replace_file(disk, CHECKPOINT_PATH, b"%08x\n%s" % (crc32(data), data))


def load_checkpoint(disk: Disk) -> Checkpoint | None:
    """Return the last checkpoint; None if there is none with a correct checksum."""
    file = load_checkpoint_file(disk)
    return None if file is None else file.checkpoint


def load_checkpoint_file(disk: Disk) -> CheckpointFile | None:
    """Return the last checkpoint and the rows of its queues; None if it cannot be used."""
    try:
        content = read_file(disk, CHECKPOINT_PATH) or b""
    except StoreError:
        return None
    if not has_right_checksum(content):
        return None
    _, _, data = content.partition(b"\n")
    encoded, _, queue_rows = data.partition(b"\n")
    try:
        return CheckpointFile(msgspec.json.decode(encoded, type=Checkpoint), queue_rows)
    except msgspec.MsgspecError:  # written by another version
        return None


def report_damaged_checkpoint(disk: Disk, damage: DamageReports) -> None:
    """Report the checkpoint file if it is not what was written."""
    try:
        content = read_file(disk, CHECKPOINT_PATH)
        problem = None if content is None or has_right_checksum(content) else "has a wrong checksum"
    except StoreError as error:
        problem = str(error)
    if problem is not None:
        description = f"{problem}; queues and key index are restored from the whole log"
        damage.add(DamageKind.CHECKPOINT, CHECKPOINT_PATH, description, is_repaired=True)


def has_right_checksum(content: bytes) -> bool:
    """Return whether the content of the checkpoint file is what was written."""
    checksum, _, data = content.partition(b"\n")
    # Earlier versions ended the file with a line break that the checksum did not include.
    return bool(data) and checksum in (b"%08x" % crc32(data), b"%08x" % crc32(data.rstrip(b"\n")))


def save_rocketmq_checkpoint(disk: Disk, stored_ms: int) -> None:
    """Tell RocketMQ that log, queues and index are durable up to a stored time."""
    times = _TIMES.pack(stored_ms, stored_ms, stored_ms)
    if not disk.exists(ROCKETMQ_PATH):
        write_file(disk, ROCKETMQ_PATH, times.ljust(ROCKETMQ_BYTES, b"\0"))
        return
    file = disk.open(ROCKETMQ_PATH)
    try:
        if file.size < ROCKETMQ_BYTES:
            file.resize(ROCKETMQ_BYTES)
        file.write_at(0, times)
        file.sync()
    finally:
        file.close()


def load_rocketmq_checkpoint(disk: Disk) -> RocketMQCheckpoint | None:
    """Return RocketMQ's checkpoint; None if the file is missing or too short."""
    try:
        content = read_file(disk, ROCKETMQ_PATH) or b""
    except StoreError:
        return None
    if len(content) < _TIMES.size:
        return None
    return RocketMQCheckpoint(*_TIMES.unpack_from(content))


@dataclass(slots=True)
class CheckpointJob:
    """One checkpoint. `run` may be called in a thread; it works on copies of what it writes."""

    disk: Disk
    log_flush: LogFlush
    queue_flushes: list[QueueFlush]
    index_flush: IndexFlush
    log_offset: LogOffset
    last_record_offset: int
    stored_ms: int
    log_begin: LogOffset  # queue and index files of records below are removed afterwards
    queue_count: int
    entry_total: int
    queue_rows: bytes
    segment_bytes: int
    queue_file_bytes: int
    has_marks: bool  # False: the first checkpoint of this process starts its flush marks
    new_marks: FlushMarks | None = None

    def run(self) -> None:
        # The order matters. The log comes first: a durable queue entry must never point to a record
        # that a power cut can take away. The checkpoint comes last: it promises all the others.
        self.log_flush.run()
        write_queue_entries(self.disk, self.queue_flushes)
        self.index_flush.run()
        expired = expired_files(self.index_flush.files, self.log_begin)
        files = [file for file in self.index_flush.files if file.count > 1 and file not in expired]
        checkpoint = Checkpoint(
            log_offset=self.log_offset,
            last_record=self.last_record_offset,
            stored_ms=self.stored_ms,
            queue_count=self.queue_count,
            entry_total=self.entry_total,
            has_queue_rows=True,
            segment_bytes=self.segment_bytes,
            queue_file_bytes=self.queue_file_bytes,
            index_files=[file.name for file in files],
            index_end_offset=files[-1].end_offset if files else -1,
            is_indexed=self.index_flush.index.is_enabled and not (files and files[-1].is_closed),
        )
        save_checkpoint(self.disk, checkpoint, self.queue_rows)
        save_rocketmq_checkpoint(self.disk, self.stored_ms)
        if not self.has_marks:
            self.new_marks = FlushMarks(self.disk, self.log_offset)


def write_queue_entries(disk: Disk, flushes: Sequence[QueueFlush]) -> None:
    """Write entries of queues, durably: each file by itself, or many files at once."""
    sync_all = disk.begin_sync_all() if len(flushes) >= QUEUES_SYNCED_AT_ONCE_MIN else None
    try:
        # Sorted, so that a simulated crash at the n-th write is the same in every run.
        for flush in sorted(flushes, key=QueueFlush.sort_key):
            flush.run(syncs=sync_all is None)
        if sync_all is not None:
            sync_all.run()
    finally:
        if sync_all is not None:
            sync_all.close()
