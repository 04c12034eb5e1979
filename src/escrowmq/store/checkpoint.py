"""Checkpoints: two small files that say what is durable, so that the next start reads little.

`escrowmq.checkpoint` is our own. It promises that every record below `log_offset`, its queue entry
and its keys are durable. It has a checksum and is replaced as a whole. Recovery does not depend on
it: without it, or if it does not fit the other files, recovery reads more of the log and comes to
the same result.

`checkpoint` is RocketMQ's, for a RocketMQ broker that may open the directory later. 4096 bytes:

    log flushed up to, ms 8 | queues, ms 8 | index, ms 8 | zeros
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final
from zlib import crc32

import msgspec

from escrowmq.message.record import LogOffset
from escrowmq.store.commit_log import LogFlush
from escrowmq.store.consume_queue import QueueFlush
from escrowmq.store.disk import Disk, read_file, replace_file, write_file
from escrowmq.store.flush_marks import FlushMarks
from escrowmq.store.key_index import IndexFlush, expired_files

CHECKPOINT_PATH: Final = "escrowmq.checkpoint"
ROCKETMQ_PATH: Final = "checkpoint"
ROCKETMQ_BYTES: Final = 4096
_TIMES = struct.Struct(">qqq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The content of escrowmq.checkpoint; the field names are stored."""

    log_offset: int  # everything below is durable in log, queues and key index
    last_record: int  # log offset of the last record below; -1 if there is none
    stored_ms: int  # when that record was stored
    # Recovery compares these totals with the queue files. A missing file changes one of them.
    queue_count: int
    entry_total: int  # sum of the next offsets of all queues
    first_total: int  # sum of the first offsets of all queues
    index_files: list[str]
    index_end_offset: int
    is_indexed: bool = True  # False if records behind the last index file have no keys in it


@dataclass(frozen=True, slots=True)
class RocketMQCheckpoint:
    """The content of RocketMQ's checkpoint file."""

    log_ms: int
    queues_ms: int
    index_ms: int


def save_checkpoint(disk: Disk, checkpoint: Checkpoint) -> None:
    """Replace the checkpoint file. A crash leaves the old one or the new one."""
    data = msgspec.json.encode(checkpoint)
    replace_file(disk, CHECKPOINT_PATH, b"%08x\n%s\n" % (crc32(data), data))


def load_checkpoint(disk: Disk) -> Checkpoint | None:
    """Return the last checkpoint; None if there is none with a correct checksum."""
    checksum, _, data = (read_file(disk, CHECKPOINT_PATH) or b"").strip().partition(b"\n")
    if not data or checksum != b"%08x" % crc32(data):
        return None
    try:
        return msgspec.json.decode(data, type=Checkpoint)
    except msgspec.MsgspecError:  # written by another version
        return None


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
    content = read_file(disk, ROCKETMQ_PATH) or b""
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
    first_total: int
    has_marks: bool  # False: the first checkpoint of this process starts its flush marks
    new_marks: FlushMarks | None = None

    def run(self) -> None:
        # The order matters. The log comes first: a durable queue entry must never point to a record
        # that a power cut can take away. The checkpoint comes last: it promises all the others.
        self.log_flush.run()
        # Sorted, so that a simulated crash at the n-th write is the same in every run.
        for queue_flush in sorted(self.queue_flushes, key=QueueFlush.sort_key):
            queue_flush.run()
        self.index_flush.run()
        expired = expired_files(self.index_flush.files, self.log_begin)
        files = [file for file in self.index_flush.files if file.count > 1 and file not in expired]
        checkpoint = Checkpoint(
            log_offset=self.log_offset,
            last_record=self.last_record_offset,
            stored_ms=self.stored_ms,
            queue_count=self.queue_count,
            entry_total=self.entry_total,
            first_total=self.first_total,
            index_files=[file.name for file in files],
            index_end_offset=files[-1].end_offset if files else -1,
            is_indexed=self.index_flush.index.is_enabled and not (files and files[-1].is_closed),
        )
        save_checkpoint(self.disk, checkpoint)
        save_rocketmq_checkpoint(self.disk, self.stored_ms)
        if not self.has_marks:
            self.new_marks = FlushMarks(self.disk, self.log_offset)
