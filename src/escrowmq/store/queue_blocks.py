"""Blocks of consume queue files, and the rows with which a checkpoint describes the queues.

The files are read in blocks of 4096 entries. Each block has a checksum, which is in the row of its
queue in the checkpoint, and is checked when it is read. A block without a correct checksum is
compared with the log, entry by entry, and repaired from it (queue_repair.py).
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from escrowmq.errors import ReadFailed, StoreDamaged, StoreError
from escrowmq.message.record import QueueOffset, crc32
from escrowmq.store.commit_log import file_name
from escrowmq.store.disk import Disk, OpenFiles

if TYPE_CHECKING:
    from escrowmq.store.consume_queue import ConsumeQueue

ENTRY: Final = struct.Struct(">qiq")
BLANK_SIZE: Final = 0x7FFFFFFF
BLANK_ENTRY: Final = ENTRY.pack(0, BLANK_SIZE, 0)
QUEUE_ENTRY_BYTES: Final = ENTRY.size
BLOCK_ENTRIES: Final = 4096
BLOCK_BYTES: Final = BLOCK_ENTRIES * QUEUE_ENTRY_BYTES
_CACHED_BYTES_MAX: Final = 16 << 20
UNKNOWN: Final = -1  # the checksum of a block that was not written by us


ROW: Final = struct.Struct(">iqqIH")  # queue id, first offset, next offset, checksums, topic bytes


@dataclass(slots=True)
class QueueRow:
    """What a checkpoint says about one queue."""

    topic: str
    queue_id: int
    first_offset: int
    next_offset: int
    checksums: array[int]
    data: bytes


def decode_rows(data: bytes) -> Iterator[QueueRow]:
    """Yield the rows of a checkpoint. Raises ValueError or struct.error if they are incomplete."""
    position = 0
    while position < len(data):
        queue_id, first, following, count, topic_bytes = ROW.unpack_from(data, position)
        topic_begin = position + ROW.size
        checksums_begin = topic_begin + topic_bytes
        end = checksums_begin + 8 * count
        checksums = array("q", data[checksums_begin:end])
        if sys.byteorder == "little":
            checksums.byteswap()
        topic = sys.intern(data[topic_begin:checksums_begin].decode())
        yield QueueRow(topic, queue_id, first, following, checksums, data[position:end])
        position = end


# --- blocks --------------------------------------------------------------------------------------

# Compares entries with the log: queue, first offset, entries (None: unreadable), their number, and
# what is wrong with them. Returns the right entries.
CompareWithLog = Callable[["ConsumeQueue", int, bytes | None, int, str | None], bytes]


def _no_log(
    queue: ConsumeQueue, first_offset: int, entries: bytes | None, count: int, reason: str | None
) -> bytes:
    if entries is None or reason is not None:
        raise StoreDamaged(f"{queue.directory} from entry {first_offset} on: {reason}")
    return entries


class QueueBlocks:
    """Reads blocks of queue files. The blocks that were used last stay in memory.

    A block is checked when it is read: by its checksum, or against the log if there is none or if
    the checksum is wrong. A block that was repaired is written back.
    """

    def __init__(self, disk: Disk, files: OpenFiles, *, file_bytes: int) -> None:
        self.disk = disk
        self.file_bytes = file_bytes
        self.blocks_per_file = -(-file_bytes // BLOCK_BYTES)
        self.compare_with_log: CompareWithLog = _no_log
        self._files = files
        self._cache: OrderedDict[tuple[ConsumeQueue, int], bytes] = OrderedDict()
        self._cached_bytes = 0
        # Repaired blocks that could not be written. They stay in memory as long as the process.
        self._unwritten: dict[tuple[ConsumeQueue, int], bytes] = {}

    def read(self, queue: ConsumeQueue, position: int, size: int) -> bytes:
        """Return the block that begins at a byte position of a queue, checked.

        `size`: how many of its bytes are written.
        """
        key = queue, position
        block = self._cache.get(key)
        if block is None or len(block) < size:
            block = self._unwritten.get(key)
            if block is None or len(block) < size:
                block = self._read_checked(queue, position, size)
            self._put(key, block)
        else:
            self._cache.move_to_end(key)
        return block

    def read_unchecked(self, path: str, position: int, size: int) -> bytes:
        """Return bytes of a file; zeros, as if never written, if they cannot be read."""
        try:
            return self._files.read(path, position, size)
        except ReadFailed:
            return bytes(size)

    def discard(self, queue: ConsumeQueue, queue_offset: int) -> None:
        """Forget the block with an entry, because entries are added to it."""
        position = queue_offset * QUEUE_ENTRY_BYTES
        self._pop((queue, position - position % self.file_bytes % BLOCK_BYTES))

    def discard_queue(self, queue: ConsumeQueue) -> None:
        for key in [key for key in self._cache if key[0] is queue]:
            self._pop(key)
        for key in [key for key in self._unwritten if key[0] is queue]:
            del self._unwritten[key]

    def discard_file(self, path: str) -> None:
        """Close a file that is about to be resized or removed."""
        self._files.discard(path)

    def _read_checked(self, queue: ConsumeQueue, position: int, size: int) -> bytes:
        base = position - position % self.file_bytes
        path = f"{queue.directory}/{file_name(base)}"
        entries: bytes | None = None
        reason: str | None = None
        try:
            entries = self._files.read(path, position - base, size)
        except ReadFailed as error:
            reason = str(error)
        except StoreError:
            if self.disk.exists(path):
                raise  # it cannot be opened now, which says nothing about what is in it
            reason = f"{path} is missing"
        checksum = queue.checksum_at(position)
        if entries is not None and checksum is not None:
            if crc32(entries) == checksum:
                return entries
            reason = f"{path} at {position - base}: the checksum of {size} bytes is wrong"
        count = size // QUEUE_ENTRY_BYTES
        right = self.compare_with_log(queue, position // QUEUE_ENTRY_BYTES, entries, count, reason)
        queue.put_checksum(position, crc32(right))
        if right != entries:
            self._write_back(queue, position, right)
        return right

    def _write_back(self, queue: ConsumeQueue, position: int, entries: bytes) -> None:
        try:
            queue.write_entries(QueueOffset(position // QUEUE_ENTRY_BYTES), entries, syncs=True)
        except StoreError:  # the next start tries again
            self._unwritten[queue, position] = entries

    def _put(self, key: tuple[ConsumeQueue, int], block: bytes) -> None:
        self._pop(key)
        self._cache[key] = block
        self._cached_bytes += len(block)
        while self._cached_bytes > _CACHED_BYTES_MAX and len(self._cache) > 1:
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= len(oldest)

    def _pop(self, key: tuple[ConsumeQueue, int]) -> None:
        block = self._cache.pop(key, None)
        if block is not None:
            self._cached_bytes -= len(block)
