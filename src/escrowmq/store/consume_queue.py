"""Consume queues: for each queue, where in the log its n-th message is, 20 bytes per message.

    log offset 8 | record size 4 | tags code 8        entry n is at byte 20 n of the files

The files are in consumequeue/<topic>/<queue id>/. They have equal lengths and are named by the byte
position at which they begin. Everything in them follows from the log. New entries are collected in
memory (`tail`) and reach the files with a checkpoint; recovery restores what a crash loses.

A blank entry (log offset, 0x7FFFFFFF, 0) stands for a message that is missing. At the head of a
file its log offset is 0, elsewhere it is that of the next existing message. So the log offsets of a
queue never decrease, and a binary search works.

The files are read in blocks of 4096 entries. Each block has a checksum, which is saved with the
checkpoint, and is checked when it is read. A block without a correct checksum is compared with the
log, entry by entry, and repaired from it (queue_repair.py). So a wrong entry never hides a message.

    ConsumeQueue    one queue
    QueueTable      all queues of a store, and their rows in a checkpoint
"""

from __future__ import annotations

import re
import struct
import sys
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from escrowmq.errors import RecordRefused, StoreDamaged, StoreFailed
from escrowmq.message.record import TOPIC_BYTES_MAX, QueueOffset, crc32
from escrowmq.sliced_work import SlicedWork, run_to_end
from escrowmq.store.columns import pack_rows
from escrowmq.store.commit_log import file_name, is_file_name
from escrowmq.store.config_files import DeletedTopics
from escrowmq.store.disk import Disk, File
from escrowmq.store.queue_blocks import (
    BLANK_ENTRY,
    BLOCK_BYTES,
    ROW,
    UNKNOWN,
    QueueRow,
    decode_rows,
)
from escrowmq.store.queue_blocks import BLANK_SIZE as BLANK_SIZE
from escrowmq.store.queue_blocks import ENTRY as ENTRY
from escrowmq.store.queue_blocks import QUEUE_ENTRY_BYTES as QUEUE_ENTRY_BYTES
from escrowmq.store.queue_blocks import QueueBlocks as QueueBlocks

QUEUE_DIRECTORY: Final = "consumequeue"
_pack_entry = ENTRY.pack


@dataclass(slots=True)
class QueueFlush:
    """Writes entries to the files of one queue. `run` may be called in a thread."""

    queue: ConsumeQueue
    first_offset: QueueOffset
    entries: bytes
    blank_count: int  # of these entries: they precede the first message of the queue
    checksums: dict[int, int]  # of the blocks that change, by the byte position of the block

    def sort_key(self) -> tuple[str, int]:
        return self.queue.topic, self.queue.queue_id

    @property
    def end_offset(self) -> int:
        return self.first_offset + len(self.entries) // QUEUE_ENTRY_BYTES

    def run(self, *, syncs: bool) -> None:
        """Write the entries; with `syncs`, durably."""
        self.queue.write_entries(self.first_offset, self.entries, syncs=syncs)


class ConsumeQueue:
    """One queue: its files, and the entries that are not in files yet."""

    # A broker may have tens of thousands of queues, most of them idle.
    __slots__ = (
        "_bases",
        "_begins_at",
        "_blocks",
        "_checksums",
        "_hidden_from",
        "_hide_count",
        "_min_offset",
        "_stored_end",
        "_unreadable",
        "next_offset",
        "queue_id",
        "row",
        "tail",
        "topic",
    )

    def __init__(
        self, blocks: QueueBlocks, topic: str, queue_id: int, bases: Sequence[int] | None = None
    ) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.next_offset = QueueOffset(0)
        self.tail = bytearray()
        self.row: bytes | None = None  # of the last checkpoint, if it is still up to date
        self._blocks = blocks
        self._min_offset = -1, self.next_offset  # cached: begin of the log, first offset in it
        self._hide_count = 0
        self._hidden_from = self.next_offset
        self._stored_end = 0  # queue offset behind the last entry in the files; `tail` follows
        self._begins_at = 0  # the offset of the first message, until the first flush
        # Messages whose records cannot be read. Their entries are right and stay in the files.
        self._unreadable: dict[int, bytes] | None = None
        self._checksums = array("q")  # of the blocks of all files, in order
        self._bases: list[int] = []
        if bases is None:
            self.find_files()
        else:
            self._bases += bases

    def find_files(self) -> None:
        """Find out which files the queue has."""
        names = self._blocks.disk.names(self.directory)
        self._bases = [int(name) for name in names if is_file_name(name)]

    @property
    def directory(self) -> str:
        return f"{QUEUE_DIRECTORY}/{self.topic}/{self.queue_id}"

    # --- writing -------------------------------------------------------------------------------

    def add(self, log_offset: int, size: int, tags_code: int) -> None:
        self.tail += _pack_entry(log_offset, size, tags_code)
        self.next_offset += 1  # type: ignore[assignment]  # QueueOffset() would cost every send

    def add_run(self, log_offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Add the entries of a run, whose messages have no tags."""
        no_tags = array("Q", bytes(8 * len(sizes)))
        self.tail += pack_rows(array("Q", log_offsets), array("I", sizes), no_tags)
        self.next_offset = QueueOffset(self.next_offset + len(sizes))

    def add_entries(self, entries: bytes) -> None:
        """Add entries that are encoded already."""
        self.tail += entries
        self.next_offset = QueueOffset(self.next_offset + len(entries) // QUEUE_ENTRY_BYTES)

    def remove_last(self) -> None:
        """Undo the last `add`, because its message did not reach the log."""
        del self.tail[-QUEUE_ENTRY_BYTES:]
        self.next_offset = QueueOffset(self.next_offset - 1)

    def start_at(self, queue_offset: QueueOffset) -> None:
        """Let an empty queue begin at an offset, behind messages that have expired."""
        self._min_offset = -1, queue_offset
        self._stored_end = self.next_offset = self._begins_at = queue_offset
        self.row = None

    def add_blanks(self, end_offset: QueueOffset, log_offset: int) -> None:
        """Add blank entries up to `end_offset`. `log_offset` is that of the next message."""
        self.tail += ENTRY.pack(log_offset, BLANK_SIZE, 0) * (end_offset - self.next_offset)
        self.next_offset = end_offset

    def begin_flush(self) -> QueueFlush:
        """Copy the entries that are not in files. Appends may go on while they are written."""
        first_offset, entries, blank_count = self._stored_end, bytes(self.tail), 0
        if entries and self._begins_at:
            # The queue begins in the middle of its first file: earlier messages have expired.
            blank_count = first_offset % (self._blocks.file_bytes // QUEUE_ENTRY_BYTES)
            first_offset -= blank_count
            entries = BLANK_ENTRY * blank_count + entries
        checksums = self._checksums_after(first_offset * QUEUE_ENTRY_BYTES, entries)
        return QueueFlush(self, QueueOffset(first_offset), entries, blank_count, checksums)

    def finish_flush(self, flush: QueueFlush) -> None:
        if not flush.entries:
            return
        del self.tail[: len(flush.entries) - flush.blank_count * QUEUE_ENTRY_BYTES]
        self._blocks.discard(self, self._stored_end)
        self._stored_end = flush.end_offset
        self._begins_at = 0
        self._put_checksums(flush.checksums)

    def write_entries(self, first_offset: QueueOffset, entries: bytes, *, syncs: bool) -> None:
        """Write entries to the files; with `syncs`, durably. May be called in a thread."""
        position, written = first_offset * QUEUE_ENTRY_BYTES, 0
        file_bytes = self._blocks.file_bytes
        while written < len(entries):
            base = position - position % file_bytes
            part = entries[written : written + base + file_bytes - position]
            file = self._file_for_writing(base)
            try:
                file.write_at(position - base, part)
                if syncs:
                    file.sync()
            finally:
                file.close()
            written += len(part)
            position += len(part)

    def _file_for_writing(self, base: int) -> File:
        disk, path = self._blocks.disk, self._path(base)
        if base in self._bases:
            file = disk.open(path)
            if file.size < self._blocks.file_bytes:
                # A power cut has left it short, and a start opens no queue file to notice that.
                file.resize(self._blocks.file_bytes)
            return file
        file = disk.create(path, self._blocks.file_bytes)
        disk.sync_directory(self.directory)
        self._bases.append(base)
        return file

    # --- checksums -----------------------------------------------------------------------------

    def _block_index(self, position: int) -> int:
        """Return the index of the block with a byte position, counted from the first file."""
        file_number, in_file = divmod(position - self._bases[0], self._blocks.file_bytes)
        return file_number * self._blocks.blocks_per_file + in_file // BLOCK_BYTES

    def _checksums_after(self, position: int, entries: bytes) -> dict[int, int]:
        """Return the checksums of the blocks that change when entries are written there."""
        file_bytes = self._blocks.file_bytes
        checksums: dict[int, int] = {}
        written = 0
        while written < len(entries):
            in_file = position % file_bytes
            in_block = in_file % BLOCK_BYTES
            size = min(BLOCK_BYTES - in_block, file_bytes - in_file, len(entries) - written)
            block = position - in_block
            checksum = self._checksum_of(block, in_block) if in_block else 0
            checksums[block] = crc32(entries[written : written + size], checksum)
            position += size
            written += size
        return checksums

    def _checksum_of(self, block: int, size: int) -> int:
        """Return the checksum of the block at a position; read it if the checksum is unknown."""
        checksum = self.checksum_at(block)
        return crc32(self._blocks.read(self, block, size)) if checksum is None else checksum

    def checksum_at(self, block: int) -> int | None:
        """Return the checksum of the stored entries of a block; None if it is unknown."""
        index = self._block_index(block)
        checksum = self._checksums[index] if index < len(self._checksums) else UNKNOWN
        return None if checksum == UNKNOWN else checksum

    def put_checksum(self, block: int, checksum: int) -> None:
        """Set the checksum of a block that was compared with the log."""
        self._put_checksums({block: checksum})

    def _put_checksums(self, checksums: dict[int, int]) -> None:
        for block, checksum in checksums.items():
            index = self._block_index(block)
            self._checksums.extend([UNKNOWN] * (index + 1 - len(self._checksums)))
            self._checksums[index] = checksum
        self.row = None

    # --- reading -------------------------------------------------------------------------------

    @property
    def visible_end(self) -> QueueOffset:
        """Return the offset behind the last message that may be read."""
        return self._hidden_from if self._hide_count else self.next_offset

    def hide(self, queue_offset: int) -> None:
        """Hide messages from an offset on until `unhide` was called as often as `hide`."""
        if not self._hide_count:
            self._hidden_from = QueueOffset(queue_offset)
        self._hide_count += 1

    def unhide(self) -> None:
        self._hide_count -= 1

    @property
    def is_empty(self) -> bool:
        return not self._bases and not self.tail

    @property
    def stored_end(self) -> QueueOffset:
        """Return the offset behind the last entry in the files."""
        return QueueOffset(self._stored_end)

    def entries(self, first_offset: int, count: int) -> bytes | memoryview | bytearray:
        """Return at least one and at most `count` entries from an offset on, if there are any.

        There may be fewer than exist, because one call reads from one block or from memory only.
        Raises StoreError if the files cannot be read and the log cannot replace them.
        """
        count = min(count, self.next_offset - first_offset)
        if count <= 0:
            return b""
        if first_offset >= self._stored_end:
            begin = (first_offset - self._stored_end) * QUEUE_ENTRY_BYTES
            entries: bytes | memoryview | bytearray = self.tail[
                begin : begin + count * QUEUE_ENTRY_BYTES
            ]
        else:
            position = first_offset * QUEUE_ENTRY_BYTES
            begin = position % self._blocks.file_bytes % BLOCK_BYTES
            block = self._blocks.read(self, position - begin, self._block_bytes(position - begin))
            entries = memoryview(block)[begin : begin + count * QUEUE_ENTRY_BYTES]
        return entries if self._unreadable is None else self._blank_out(first_offset, entries)

    def copy_entries(self, first_offset: int, count: int) -> bytes:
        """Return a copy of what `entries` returns."""
        return bytes(self.entries(first_offset, count))

    def _block_bytes(self, position: int) -> int:
        """Return how many bytes of a block are written."""
        in_file = position % self._blocks.file_bytes
        written = self._stored_end * QUEUE_ENTRY_BYTES - position
        return min(BLOCK_BYTES, self._blocks.file_bytes - in_file, written)

    def _blank_out(
        self, first_offset: int, entries: bytes | memoryview | bytearray
    ) -> bytes | memoryview | bytearray:
        assert self._unreadable is not None
        count = len(entries) // QUEUE_ENTRY_BYTES
        numbers = [
            offset - first_offset
            for offset in self._unreadable
            if first_offset <= offset < first_offset + count
        ]
        if not numbers:
            return entries
        copy = bytearray(entries)
        for number in numbers:
            begin = number * QUEUE_ENTRY_BYTES
            copy[begin : begin + QUEUE_ENTRY_BYTES] = self._unreadable[first_offset + number]
        return copy

    def mark_unreadable(self, queue_offset: int) -> None:
        """Let a blank entry stand for a message whose record is damaged, until the next start."""
        log_offset, size, _ = self.entry(queue_offset)
        if size != BLANK_SIZE:
            self._unreadable = self._unreadable or {}
            self._unreadable[queue_offset] = ENTRY.pack(log_offset, BLANK_SIZE, 0)

    def entry(self, queue_offset: int) -> tuple[int, int, int]:
        """Return log offset, size and tags code of an entry."""
        log_offset, size, tags_code = ENTRY.unpack(self.entries(queue_offset, 1))
        return log_offset, size, tags_code

    @property
    def first_offset(self) -> QueueOffset:
        """Return the lowest offset with an entry. The log may no longer have its message."""
        return QueueOffset(self._bases[0] // QUEUE_ENTRY_BYTES if self._bases else self._stored_end)

    def min_offset(self, log_begin: int) -> QueueOffset:
        """Return the offset of the first message that the log still has."""
        if self._min_offset[0] != log_begin:
            self._min_offset = log_begin, self._find_min_offset(log_begin)
        return self._min_offset[1]

    def _find_min_offset(self, log_begin: int) -> QueueOffset:
        # A binary search: log offsets never decrease within a queue.
        low, high = self.first_offset, self.next_offset
        while low < high:
            middle = QueueOffset((low + high) // 2)
            log_offset, size, _ = self.entry(middle)
            if log_offset < log_begin or (size == BLANK_SIZE and log_offset == 0):
                low = QueueOffset(middle + 1)
            else:
                high = middle
        return low

    def _path(self, base: int) -> str:
        return f"{self.directory}/{file_name(base)}"

    # --- recovery and expiry -------------------------------------------------------------------

    @property
    def is_hidden(self) -> bool:
        return self._hide_count > 0

    def is_older_than(self, log_offset: int) -> bool:
        """Return whether the first entry, if any, is of a record below `log_offset`."""
        for base in self._bases[:1]:
            for position in range(0, self._blocks.file_bytes, BLOCK_BYTES):
                size = min(BLOCK_BYTES, self._blocks.file_bytes - position)
                block = self._blocks.read_unchecked(self._path(base), position, size)
                for entry_offset, entry_size, _ in ENTRY.iter_unpack(block):
                    if entry_size and not (entry_size == BLANK_SIZE and entry_offset == 0):
                        return bool(entry_offset < log_offset)
        return True

    def delete(self) -> None:
        """Remove the files of the queue, durably."""
        disk = self._blocks.disk
        for base in self._bases:
            self._blocks.discard_file(self._path(base))
            disk.remove(self._path(base))
        self._bases.clear()
        del self._checksums[:]
        self._blocks.discard_queue(self)
        if disk.exists(self.directory):
            disk.sync_directory(self.directory)
            if not disk.names(self.directory):  # leave a directory with foreign files
                disk.remove(self.directory)

    def trust_files(self, log_end: int) -> QueueOffset:
        """Accept the entries of the files up to the first that is not entirely below `log_end`.

        Return the offset behind the last accepted entry. Nothing is known about these entries, so
        each is compared with its record when it is read.
        """
        self._stored_end = self.next_offset = self.first_offset
        self._forget_blocks()
        file_bytes = self._blocks.file_bytes
        for base in reversed(self._bases):
            low, high = 0, file_bytes // QUEUE_ENTRY_BYTES
            if not self._is_below(base, 0, log_end):
                continue
            while low < high:
                middle = (low + high) // 2
                if self._is_below(base, middle, log_end):
                    low = middle + 1
                else:
                    high = middle
            self._stored_end = self.next_offset = QueueOffset(base // QUEUE_ENTRY_BYTES + low)
            break
        return self.next_offset

    def _is_below(self, base: int, index: int, log_end: int) -> bool:
        entry = self._blocks.read_unchecked(
            self._path(base), index * QUEUE_ENTRY_BYTES, QUEUE_ENTRY_BYTES
        )
        log_offset, size, _ = ENTRY.unpack(entry)
        if size == BLANK_SIZE:
            return True
        return bool(size > 0 and log_offset >= 0 and log_offset + size <= log_end)

    def _forget_blocks(self) -> None:
        del self._checksums[:]
        self._blocks.discard_queue(self)
        self._unreadable = self.row = None

    def truncate(self, queue_offset: QueueOffset) -> None:
        """Remove every entry from `queue_offset` on, in memory and, durably, in the files."""
        self._min_offset = -1, queue_offset
        self.tail.clear()
        disk, file_bytes = self._blocks.disk, self._blocks.file_bytes
        position = queue_offset * QUEUE_ENTRY_BYTES
        for base in reversed(list(self._bases)):
            path = self._path(base)
            self._blocks.discard_file(path)
            if base > position or (base == position and base != self._bases[0]):
                disk.remove(path)
                self._bases.remove(base)
            elif position < base + file_bytes:
                file = disk.open(path)
                try:
                    file.resize(max(0, position - base))
                    file.resize(file_bytes)
                    file.sync()
                finally:
                    file.close()
        if self._bases:
            disk.sync_directory(self.directory)
        if queue_offset < self._stored_end:
            # The blocks before the one that was cut keep their checksums.
            kept = self._block_index(position) if self._bases else 0
            del self._checksums[max(0, kept) :]
        self._blocks.discard_queue(self)
        self.row = None
        self._stored_end = self.next_offset = min(self.next_offset, queue_offset)

    def remove_trailing_entries(self) -> None:
        """Remove what a crash during a checkpoint has left in the files behind the last entry."""
        first = self._bases[0] if self._bases else 0
        self.find_files()
        self._bases = [base for base in self._bases if base >= first]
        if self.has_trailing_data():
            self.truncate(self.next_offset)

    def has_trailing_data(self) -> bool:
        """Return whether the files hold anything behind the last accepted entry."""
        position, file_bytes = self._stored_end * QUEUE_ENTRY_BYTES, self._blocks.file_bytes
        for base in self._bases:
            if base + file_bytes <= position:
                continue
            begin = max(0, position - base)
            entry = self._blocks.read_unchecked(self._path(base), begin, QUEUE_ENTRY_BYTES)
            if any(entry):
                return True
        return False

    def first_offset_after_expiry(self, log_begin: int) -> int:
        """Return what `first_offset` will be after `remove_expired`."""
        expired = self._count_expired_files(log_begin)
        return self._bases[expired] // QUEUE_ENTRY_BYTES if expired else self.first_offset

    def remove_expired(self, log_begin: int) -> int:
        """Remove files whose messages are all gone from the log. The last file always stays.

        It remembers the next offset of the queue. Return how many files were removed.
        """
        if len(self._bases) < 2:
            return 0
        expired = self._count_expired_files(log_begin)
        for _ in range(expired):
            base = self._bases.pop(0)
            self._blocks.discard_file(self._path(base))
            self._blocks.disk.remove(self._path(base))
        if expired:
            self._blocks.disk.sync_directory(self.directory)
            self._blocks.discard_queue(self)
            del self._checksums[: expired * self._blocks.blocks_per_file]
            self.row = None
        return expired

    def _count_expired_files(self, log_begin: int) -> int:
        count = 0
        while count + 1 < len(self._bases):
            following = self._bases[count + 1]
            if following >= self._stored_end * QUEUE_ENTRY_BYTES:
                break
            log_offset, size, _ = self.entry(following // QUEUE_ENTRY_BYTES - 1)
            if log_offset >= log_begin and (size != BLANK_SIZE or log_offset > 0):
                break
            count += 1
        return count

    def check_file_sizes(self, sizes: dict[str, int]) -> None:
        """Raise StoreDamaged if the files have another length than configured.

        This is checked before anything is changed: the files may be right and the configuration
        wrong.
        """
        file_bytes = self._blocks.file_bytes
        for base in self._bases:
            size = sizes.get(file_name(base), 0)
            if base % file_bytes or size > file_bytes:
                raise StoreDamaged(
                    f"{self._path(base)} has {size} bytes, but the configured size of queue files "
                    f"is {file_bytes}; set mappedFileSizeConsumeQueue to the size they were "
                    "written with"
                )

    def extend_short_files(self) -> bool:
        """Extend files that a crash has left too short.

        Return False if entries are missing: a file is missing between two others, or a file before
        the last was too short.
        """
        disk, file_bytes = self._blocks.disk, self._blocks.file_bytes
        span = self._bases[-1] - self._bases[0] if self._bases else 0
        is_complete = span == (len(self._bases) - 1) * file_bytes if self._bases else True
        sizes = disk.sizes(self.directory)
        for base in self._bases:
            if sizes.get(file_name(base), 0) < file_bytes:
                self._blocks.discard_file(self._path(base))
                file = disk.open(self._path(base))
                try:
                    file.resize(file_bytes)
                finally:
                    file.close()
                is_complete = is_complete and base == self._bases[-1]
        return is_complete

    # --- rows of a checkpoint ------------------------------------------------------------------

    def make_row(self, log_begin: int, flush: QueueFlush | None = None) -> bytes:
        """Return the row that describes the queue as it is after a flush and after expiry."""
        stored_end = self._stored_end if flush is None else max(self._stored_end, flush.end_offset)
        file_bytes, per_file = self._blocks.file_bytes, self._blocks.blocks_per_file
        first_offset = self.first_offset_after_expiry(log_begin)
        if flush is not None and flush.entries and not self._bases:
            first_offset = flush.first_offset
        first_base = first_offset * QUEUE_ENTRY_BYTES
        expired = (first_base - self._bases[0]) // file_bytes if self._bases else 0
        checksums = self._checksums[expired * per_file :]
        for block, checksum in ({} if flush is None else flush.checksums).items():
            file_number, in_file = divmod(block - first_base, file_bytes)
            index = file_number * per_file + in_file // BLOCK_BYTES
            checksums.extend([UNKNOWN] * (index + 1 - len(checksums)))
            checksums[index] = checksum
        if sys.byteorder == "little":
            checksums.byteswap()
        topic = self.topic.encode()
        head = ROW.pack(self.queue_id, first_offset, stored_end, len(checksums), len(topic))
        self.row = head + topic + checksums.tobytes()
        return self.row

    def restore(self, row: QueueRow) -> bool:
        """Take over what a checkpoint says about the queue, without opening or listing its files.

        Return False if one of them is missing or has another length.
        """
        disk, file_bytes = self._blocks.disk, self._blocks.file_bytes
        first, end = row.first_offset * QUEUE_ENTRY_BYTES, row.next_offset * QUEUE_ENTRY_BYTES
        self._bases = list(range(first, end, file_bytes))
        sizes = {disk.size(self._path(base)) for base in self._bases}
        if first % file_bytes or (sizes and sizes != {file_bytes}):
            return False
        self._checksums = row.checksums
        self._stored_end = self.next_offset = QueueOffset(row.next_offset)
        self.row = row.data
        return True


def queue_directories(disk: Disk) -> list[tuple[str, int]]:
    """Return every (topic, queue id) that has a directory."""
    return [
        (topic, int(queue_id))
        for topic in disk.names(QUEUE_DIRECTORY)
        for queue_id in disk.names(f"{QUEUE_DIRECTORY}/{topic}")
        if queue_id.isdigit() and len(queue_id) <= 10 and int(queue_id) < 1 << 31
    ]


# --- all queues ----------------------------------------------------------------------------------


class QueueTable:
    """All consume queues of a store, by topic and queue id."""

    def __init__(self, blocks: QueueBlocks, deleted_topics: DeletedTopics) -> None:
        self.blocks = blocks
        self._disk = blocks.disk
        self.deleted_topics = deleted_topics
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        # Queues of deleted topics whose files are not removed yet.
        self._removed: deque[ConsumeQueue] = deque()
        self._file_sizes: dict[
            ConsumeQueue, dict[str, int]
        ] = {}  # by name, while a store is opened
        self._is_closed = False
        self._rows_log_begin = -1  # the begin of the log for which the rows of the queues are right
        self.dirty: set[ConsumeQueue] = set()  # queues with entries that are not in files yet

    def __iter__(self) -> Iterator[ConsumeQueue]:
        return iter(self._queues.values())

    def __len__(self) -> int:
        return len(self._queues)

    def find(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """Return a queue; None if it does not exist. Raises StoreFailed after `close`."""
        if self._is_closed:
            raise StoreFailed("the store is closed")
        return self._queues.get((topic, queue_id))

    def get_or_create(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Return a queue, which is created in memory. Raises RecordRefused for an invalid name."""
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            check_queue_name(topic, queue_id)
            queue = ConsumeQueue(self.blocks, topic, queue_id)
            self._queues[topic, queue_id] = queue
        return queue

    def close(self) -> None:
        """Refuse further look-ups: a closed store must not look like an empty one."""
        self._is_closed = True

    def discard_if_unused(self, queue: ConsumeQueue) -> None:
        """Remove a queue that was created for a message which was refused then."""
        if queue.is_empty and not queue.next_offset:
            self._queues.pop((queue.topic, queue.queue_id), None)

    def open(self, *, lists_files: bool = True) -> None:
        """Find the queues in the directory. Their entries are not trusted yet.

        Without `lists_files` their files are not looked at; `restore` does that.
        """
        self._queues.clear()
        self.dirty.clear()
        for topic, queue_id in queue_directories(self._disk):
            if not is_topic_name(topic):  # leave foreign directories alone
                continue
            queue = ConsumeQueue(self.blocks, sys.intern(topic), queue_id, ())
            if lists_files:
                queue.find_files()
                queue.check_file_sizes(self._disk.sizes(queue.directory))
            self._queues[queue.topic, queue_id] = queue
        # A crash may have interrupted the deletion of a topic. Remove what it has left.
        for topic in {queue.topic for queue in self if queue.topic in self.deleted_topics}:
            queues = self.queues_of(topic)
            for queue in queues:
                queue.find_files()
            end = self.deleted_topics.deleted_end(topic)
            self.remove([queue for queue in queues if queue.is_older_than(end)])
        run_to_end(self.remove_files())

    def queues_of(self, topic: str) -> list[ConsumeQueue]:
        return [queue for queue in self if queue.topic == topic]

    def remove(self, queues: Sequence[ConsumeQueue]) -> None:
        """Remove queues from the table. Their files remain until `remove_files`.

        Messages that arrive meanwhile begin new queues. These are in memory only, and must not be
        written to files before the old ones are removed.
        """
        for queue in queues:
            self._queues.pop((queue.topic, queue.queue_id), None)
            self.dirty.discard(queue)
        self._removed.extend(queues)

    @property
    def has_removed(self) -> bool:
        """Return whether removed queues still have files."""
        return bool(self._removed)

    def remove_files(self) -> SlicedWork:
        """Remove the files of all queues that were removed, durably, in slices."""
        while self._removed:
            queue = self._removed[0]
            queue.delete()
            if len(self._removed) == 1 or self._removed[1].topic != queue.topic:
                self._remove_topic_directory(queue.topic)
            self._removed.popleft()  # only now: until then no checkpoint may be made
            yield

    def _remove_topic_directory(self, topic: str) -> None:
        directory = f"{QUEUE_DIRECTORY}/{topic}"
        if self._disk.exists(directory):
            self._disk.sync_directory(directory)
            if not self._disk.names(directory):
                self._disk.remove(directory)

    def trust_files(self, log_end: int) -> bool:
        """Accept the entries of records below `log_end` and remove all others.

        Return False if a file is missing or was cut short.
        """
        is_complete = True
        for queue in self:
            is_complete = queue.extend_short_files() and is_complete
            end = queue.trust_files(log_end)
            if queue.has_trailing_data():
                queue.truncate(end)
        return is_complete

    def restore(self, rows: bytes, log_end: int) -> bool:
        """Take over the rows of a checkpoint. No file of a queue with a row is opened.

        Return False if the files do not fit the rows. The blocks of the files are checked when they
        are read.
        """
        restored: set[ConsumeQueue] = set()
        try:
            for row in decode_rows(rows):
                queue = self._queues.get((row.topic, row.queue_id))
                if queue is None:
                    return False
                if not queue.restore(row):
                    return False
                restored.add(queue)
        except (ValueError, struct.error):
            return False
        for queue in self:
            if queue not in restored:
                # It is newer than the checkpoint, or empty, or nobody knows where it comes from.
                queue.find_files()
                queue.extend_short_files()
                if queue.trust_files(log_end) > queue.first_offset:
                    return False
        return True

    def rows(self, log_begin: int, flushes: Sequence[QueueFlush]) -> list[bytes]:
        """Return the rows of all queues that ever had a message, as they are after the flushes."""
        by_queue = {flush.queue: flush for flush in flushes}
        is_moved = log_begin != self._rows_log_begin
        self._rows_log_begin = log_begin
        rows = []
        for queue in self:
            row = queue.row
            if row is None or is_moved or queue in by_queue:
                row = queue.make_row(log_begin, by_queue.get(queue))
            if queue.next_offset:
                rows.append(row)
        return rows

    def entry_total(self) -> int:
        """Return the sum of the next offsets of all queues."""
        return sum([queue.next_offset for queue in self])

    def totals(self) -> tuple[int, int, int]:
        """Return the numbers with which a checkpoint of an earlier version describes the queues.

        They are the number of queues that ever had a message, the sum of their next offsets, and
        the sum of their first offsets.
        """
        used = [queue for queue in self if queue.next_offset]
        return len(used), self.entry_total(), sum(queue.first_offset for queue in used)


# --- names ---------------------------------------------------------------------------------------

# RocketMQ's rule. Here it also keeps the name of a topic from being a path outside the store.
_TOPIC_PATTERN = re.compile(r"[%|a-zA-Z0-9_-]+")


def is_topic_name(topic: str) -> bool:
    return bool(_TOPIC_PATTERN.fullmatch(topic)) and len(topic) <= TOPIC_BYTES_MAX


def check_queue_name(topic: str, queue_id: int) -> None:
    """Raise RecordRefused if there can be no queue of this name."""
    if not is_topic_name(topic):
        raise RecordRefused(
            f"invalid topic {topic[:300]!r}: only letters, digits and %|_- are allowed, "
            f"up to {TOPIC_BYTES_MAX} bytes"
        )
    if not 0 <= queue_id < 1 << 31:
        raise RecordRefused(f"invalid queue id {queue_id}: it must be 0 or more")
