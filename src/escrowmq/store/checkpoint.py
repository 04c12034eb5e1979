"""What is known to be on disk: two small files that make the next start short.

`escrowmq.checkpoint` is ours: every record below `log_offset`, its queue entry and its keys are
durable. It is replaced as a whole and carries a checksum; without it, or with one that does not
fit the rest of the directory, recovery reads more of the log, and finds the same.

`checkpoint` is RocketMQ's, for the broker that may open the directory after us. 4096 bytes:

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
from escrowmq.store.key_index import IndexFlush, expired_files

CHECKPOINT_PATH: Final = "escrowmq.checkpoint"
ROCKETMQ_PATH: Final = "checkpoint"
ROCKETMQ_BYTES: Final = 4096
_TIMES = struct.Struct(">qqq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    log_offset: int  # everything below is durable, in the log, the queues and the index
    last_record: int  # where the last record below begins; -1 if there is none
    stored_ms: int  # when it was stored
    queue_count: int
    entry_total: int  # sum of the next offsets of all queues: a missing queue file shows here
    first_total: int  # sum of their first offsets: and so does one that is missing in front
    index_files: list[str]
    index_end_offset: int
    is_indexed: bool = True  # False: records behind the last index file were not


@dataclass(frozen=True, slots=True)
class RocketMQCheckpoint:
    log_ms: int
    queues_ms: int
    index_ms: int


def save_checkpoint(disk: Disk, checkpoint: Checkpoint) -> None:
    data = msgspec.json.encode(checkpoint)
    replace_file(disk, CHECKPOINT_PATH, b"%08x\n%s\n" % (crc32(data), data))


def load_checkpoint(disk: Disk) -> Checkpoint | None:
    """The last one saved; None if there is none that can be trusted."""
    checksum, _, data = (read_file(disk, CHECKPOINT_PATH) or b"").strip().partition(b"\n")
    if not data or checksum != b"%08x" % crc32(data):
        return None
    try:
        return msgspec.json.decode(data, type=Checkpoint)
    except msgspec.MsgspecError:  # of another version
        return None


def save_rocketmq_checkpoint(disk: Disk, stored_ms: int) -> None:
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
    content = read_file(disk, ROCKETMQ_PATH) or b""
    if len(content) < _TIMES.size:
        return None
    return RocketMQCheckpoint(*_TIMES.unpack_from(content))


@dataclass(slots=True)
class CheckpointJob:
    """Everything that makes the next start short. `run` may go to a thread."""

    disk: Disk
    log_flush: LogFlush
    queue_flushes: list[QueueFlush]
    index_flush: IndexFlush
    log_offset: LogOffset
    last_record_offset: int
    stored_ms: int
    log_begin: LogOffset  # what lies below is removed once this is done
    queue_count: int
    entry_total: int
    first_total: int

    def run(self) -> None:
        # In this order: a queue entry that is durable never points at a record that is not.
        self.log_flush.run()
        for queue in sorted(
            self.queue_flushes, key=QueueFlush.sort_key
        ):  # a crash can be played again
            queue.run()
        self.index_flush.run()
        expired = expired_files(self.index_flush.files, self.log_begin)
        files = [f for f in self.index_flush.files if f.count > 1 and f not in expired]
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
