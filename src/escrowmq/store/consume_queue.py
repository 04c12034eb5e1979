"""Consume queues: for each queue, where in the log its n-th message is, 20 bytes per message.

    log offset 8 | record size 4 | tags code 8        entry n is at byte 20 n of the files

The files are in consumequeue/<topic>/<queue id>/. They have equal lengths and are named by the byte
position at which they begin. Everything in them follows from the log. New entries are collected in
memory (`tail`) and reach the files with a checkpoint; recovery restores what a crash loses.

A blank entry (log offset, 0x7FFFFFFF, 0) stands for a message that is missing. At the head of a
file its log offset is 0, elsewhere it is that of the next existing message. So the log offsets of a
queue never decrease, and a binary search works.

    ConsumeQueue    one queue
    QueueTable      all queues of a store
    DeletedTopics   topics that were deleted, so that recovery does not restore their queues
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from escrowmq.errors import RecordRefused, StoreDamaged, StoreFailed
from escrowmq.message.record import TOPIC_BYTES_MAX, QueueOffset
from escrowmq.store.columns import pack_rows
from escrowmq.store.commit_log import file_name, is_file_name
from escrowmq.store.config_files import ConfigFile
from escrowmq.store.disk import Disk, File, ViewCache

QUEUE_DIRECTORY: Final = "consumequeue"
ENTRY: Final = struct.Struct(">qiq")
_pack_entry = ENTRY.pack
BLANK_SIZE: Final = 0x7FFFFFFF
BLANK_ENTRY: Final = ENTRY.pack(0, BLANK_SIZE, 0)
QUEUE_ENTRY_BYTES: Final = ENTRY.size


@dataclass(slots=True)
class QueueFlush:
    """Writes entries to the files of one queue. `run` may be called in a thread."""

    queue: ConsumeQueue
    first_offset: QueueOffset
    entries: bytes

    def sort_key(self) -> tuple[str, int]:
        return self.queue.topic, self.queue.queue_id

    def run(self) -> None:
        self.queue.write_entries(self.first_offset, self.entries)


class ConsumeQueue:
    """One queue: its files, and the entries that are not in files yet."""

    def __init__(
        self, disk: Disk, views: ViewCache, topic: str, queue_id: int, *, file_bytes: int
    ) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.next_offset = QueueOffset(0)
        self.tail = bytearray()
        self._disk = disk
        self._views = views
        self._directory = f"{QUEUE_DIRECTORY}/{topic}/{queue_id}"
        self._file_bytes = file_bytes
        self._min_offset = -1, self.next_offset  # cached: begin of the log, first offset in it
        self._hide_count = 0
        self._hidden_from = self.next_offset
        self._stored_end = 0  # queue offset behind the last entry in the files; `tail` follows
        self._bases = [int(n) for n in disk.names(self._directory) if is_file_name(n)]

    # --- writing -------------------------------------------------------------------------------

    def add(self, log_offset: int, size: int, tags_code: int) -> None:
        self.tail += _pack_entry(log_offset, size, tags_code)
        self.next_offset += 1  # type: ignore[assignment]  # QueueOffset() would cost every send

    def add_run(self, log_offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Add the entries of a run, whose messages have no tags."""
        no_tags = array("Q", bytes(8 * len(sizes)))
        self.tail += pack_rows(array("Q", log_offsets), array("I", sizes), no_tags)
        self.next_offset = QueueOffset(self.next_offset + len(sizes))

    def remove_last(self) -> None:
        """Undo the last `add`, because its message did not reach the log."""
        del self.tail[-QUEUE_ENTRY_BYTES:]
        self.next_offset = QueueOffset(self.next_offset - 1)

    def start_at(self, queue_offset: QueueOffset) -> None:
        """Let an empty queue begin at an offset, behind messages that have expired."""
        self._min_offset = -1, queue_offset
        self._stored_end = self.next_offset = queue_offset

    def add_blanks(self, end_offset: QueueOffset, log_offset: int) -> None:
        """Add blank entries up to `end_offset`. `log_offset` is that of the next message."""
        self.tail += ENTRY.pack(log_offset, BLANK_SIZE, 0) * (end_offset - self.next_offset)
        self.next_offset = end_offset

    def begin_flush(self) -> QueueFlush:
        """Copy the entries that are not in files. Appends may go on while they are written."""
        return QueueFlush(self, QueueOffset(self._stored_end), bytes(self.tail))

    def finish_flush(self, flush: QueueFlush) -> None:
        del self.tail[: len(flush.entries)]
        self._stored_end += len(flush.entries) // QUEUE_ENTRY_BYTES

    def write_entries(self, first_offset: QueueOffset, entries: bytes) -> None:
        """Write entries to the files, durably. May be called in a thread."""
        position, written = first_offset * QUEUE_ENTRY_BYTES, 0
        while written < len(entries):
            base = position - position % self._file_bytes
            part = entries[written : written + base + self._file_bytes - position]
            file = self._file_for_writing(base, position)
            try:
                file.write_at(position - base, part)
                file.sync()
            finally:
                file.close()
            written += len(part)
            position += len(part)

    def _file_for_writing(self, base: int, position: int) -> File:
        path = self._path(base)
        if base in self._bases:
            return self._disk.open(path)
        file = self._disk.create(path, self._file_bytes)
        if not self._bases and position > base:
            # The queue begins in the middle of its first file: earlier messages have expired.
            file.write_at(0, BLANK_ENTRY * ((position - base) // QUEUE_ENTRY_BYTES))
        self._disk.sync_directory(self._directory)
        self._bases.append(base)
        return file

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

    def entries(self, first_offset: int, count: int) -> bytes | memoryview | bytearray:
        """Return at least one and at most `count` entries from an offset on, if there are any.

        There may be fewer than exist, because one call reads from one file or from memory only.
        """
        count = min(count, self.next_offset - first_offset)
        if count <= 0:
            return b""
        if first_offset >= self._stored_end:
            begin = (first_offset - self._stored_end) * QUEUE_ENTRY_BYTES
            return self.tail[begin : begin + count * QUEUE_ENTRY_BYTES]
        position = first_offset * QUEUE_ENTRY_BYTES
        base = position - position % self._file_bytes
        begin = position - base
        count = min(count, self._stored_end - first_offset)
        end = min(begin + count * QUEUE_ENTRY_BYTES, self._file_bytes)
        return self._view(base)[begin:end]

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

    def _view(self, base: int) -> memoryview:
        return self._views.view(self._path(base))

    def _path(self, base: int) -> str:
        return f"{self._directory}/{file_name(base)}"

    # --- recovery and expiry -------------------------------------------------------------------

    @property
    def is_hidden(self) -> bool:
        return self._hide_count > 0

    def is_older_than(self, log_offset: int) -> bool:
        """Return whether the first entry, if any, is of a record below `log_offset`."""
        for base in self._bases[:1]:
            for entry_offset, size, _ in ENTRY.iter_unpack(self._view(base)):
                if size and not (size == BLANK_SIZE and entry_offset == 0):
                    return bool(entry_offset < log_offset)
        return True

    def delete(self) -> None:
        """Remove the files of the queue, durably."""
        for base in self._bases:
            self._views.discard(self._path(base))
            self._disk.remove(self._path(base))
        self._bases.clear()
        if self._disk.exists(self._directory):
            self._disk.sync_directory(self._directory)
            if not self._disk.names(self._directory):  # leave a directory with foreign files
                self._disk.remove(self._directory)

    def trust_files(self, log_end: int) -> QueueOffset:
        """Accept the entries of the files up to the first that is not entirely below `log_end`.

        Return the offset behind the last accepted entry.
        """
        self._stored_end = self.next_offset = self.first_offset
        for base in reversed(self._bases):
            view = self._view(base)
            low, high = 0, self._file_bytes // QUEUE_ENTRY_BYTES
            if not _is_below(view, 0, log_end):
                continue
            while low < high:
                middle = (low + high) // 2
                if _is_below(view, middle, log_end):
                    low = middle + 1
                else:
                    high = middle
            self._stored_end = self.next_offset = QueueOffset(base // QUEUE_ENTRY_BYTES + low)
            break
        return self.next_offset

    def truncate(self, queue_offset: QueueOffset) -> None:
        """Remove every entry from `queue_offset` on, in memory and, durably, in the files."""
        self._min_offset = -1, queue_offset
        self.tail.clear()
        position = queue_offset * QUEUE_ENTRY_BYTES
        for base in reversed(list(self._bases)):
            path = self._path(base)
            self._views.discard(path)
            if base > position or (base == position and base != self._bases[0]):
                self._disk.remove(path)
                self._bases.remove(base)
            elif position < base + self._file_bytes:
                file = self._disk.open(path)
                try:
                    file.resize(max(0, position - base))
                    file.resize(self._file_bytes)
                    file.sync()
                finally:
                    file.close()
        if self._bases:
            self._disk.sync_directory(self._directory)
        self._stored_end = self.next_offset = min(self.next_offset, queue_offset)

    def has_trailing_data(self) -> bool:
        """Return whether the files hold anything behind the last accepted entry."""
        position = self._stored_end * QUEUE_ENTRY_BYTES
        for base in self._bases:
            if base + self._file_bytes <= position:
                continue
            begin = max(0, position - base)
            view = self._view(base)
            if any(view[begin : begin + QUEUE_ENTRY_BYTES]):
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
        expired = self._count_expired_files(log_begin)
        for _ in range(expired):
            base = self._bases.pop(0)
            self._views.discard(self._path(base))
            self._disk.remove(self._path(base))
        if expired:
            self._disk.sync_directory(self._directory)
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

    def check_file_sizes(self) -> None:
        """Raise StoreDamaged if the files have another length than configured.

        This is checked before anything is changed: the files may be right and the configuration
        wrong.
        """
        for base in self._bases:
            size = len(self._view(base))
            if base % self._file_bytes or size > self._file_bytes:
                raise StoreDamaged(
                    f"{self._path(base)} has {size} bytes, but the configured size of queue files "
                    f"is {self._file_bytes}; set mappedFileSizeConsumeQueue to the size they were "
                    "written with"
                )

    def extend_short_files(self) -> bool:
        """Extend files that a crash has left too short.

        Return False if entries are missing: a file is missing between two others, or a file before
        the last was too short.
        """
        span = self._bases[-1] - self._bases[0] if self._bases else 0
        is_complete = span == (len(self._bases) - 1) * self._file_bytes if self._bases else True
        for base in self._bases:
            if len(self._view(base)) < self._file_bytes:
                self._views.discard(self._path(base))
                file = self._disk.open(self._path(base))
                try:
                    file.resize(self._file_bytes)
                finally:
                    file.close()
                is_complete = is_complete and base == self._bases[-1]
        return is_complete


def _is_below(view: memoryview, index: int, log_end: int) -> bool:
    log_offset, size, _ = ENTRY.unpack_from(view, index * QUEUE_ENTRY_BYTES)
    if size == BLANK_SIZE:
        return True
    return bool(size > 0 and log_offset >= 0 and log_offset + size <= log_end)


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

    def __init__(
        self, disk: Disk, views: ViewCache, deleted_topics: DeletedTopics, *, file_bytes: int
    ) -> None:
        self._disk = self.disk = disk
        self.deleted_topics = deleted_topics
        self._views = views
        self._file_bytes = file_bytes
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._is_closed = False
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
            queue = ConsumeQueue(
                self._disk, self._views, topic, queue_id, file_bytes=self._file_bytes
            )
            self._queues[topic, queue_id] = queue
        return queue

    def close(self) -> None:
        """Refuse further look-ups: a closed store must not look like an empty one."""
        self._is_closed = True

    def discard_if_unused(self, queue: ConsumeQueue) -> None:
        """Remove a queue that was created for a message which was refused then."""
        if queue.is_empty and not queue.next_offset:
            self._queues.pop((queue.topic, queue.queue_id), None)

    def open(self) -> None:
        """Find the queues in the directory. Their entries are not trusted yet."""
        self._queues.clear()
        self.dirty.clear()
        for topic, queue_id in queue_directories(self._disk):
            if is_topic_name(topic):  # leave foreign directories alone
                self.get_or_create(topic, queue_id)
        for queue in self:
            queue.check_file_sizes()
        # A crash may have interrupted the deletion of a topic. Remove what it has left.
        for topic in {queue.topic for queue in self if queue.topic in self.deleted_topics}:
            self._remove(
                [
                    queue
                    for queue in self.queues_of(topic)
                    if queue.is_older_than(self.deleted_topics.deleted_end(topic))
                ]
            )

    def queues_of(self, topic: str) -> list[ConsumeQueue]:
        return [queue for queue in self if queue.topic == topic]

    def remove_topic(self, topic: str) -> int:
        """Remove all queues of a topic with their files. Return how many there were."""
        queues = self.queues_of(topic)
        self._remove(queues)
        return len(queues)

    def _remove(self, queues: list[ConsumeQueue]) -> None:
        for queue in queues:
            self._queues.pop((queue.topic, queue.queue_id), None)
            self.dirty.discard(queue)
            queue.delete()
        for topic in {queue.topic for queue in queues}:
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

    def totals(self, log_begin: int = 0) -> tuple[int, int, int]:
        """Return the numbers with which a checkpoint describes the queues.

        They are the number of queues that ever had a message, the sum of their next offsets, and
        the sum of their first offsets after files of records below `log_begin` are removed.
        """
        used = [queue for queue in self if queue.next_offset]
        firsts = [queue.first_offset_after_expiry(log_begin) for queue in used]
        return len(used), sum(queue.next_offset for queue in used), sum(firsts)


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


# --- deleted topics ------------------------------------------------------------------------------

_DELETED_TOPICS_KEY = "deletedTopics"


class DeletedTopics:
    """How far into the log the records of deleted topics no longer count.

    The log keeps the records of a deleted topic until they expire, and recovery gives every record
    its queue entry. So a deletion is saved before anything is removed, and it stays saved until the
    last of these records has expired: config/escrowDeletedTopics.json, topic -> log offset.
    """

    def __init__(self, disk: Disk) -> None:
        self._file = ConfigFile(disk, "escrowDeletedTopics.json")
        self._log_ends = self._file.str_keys(_DELETED_TOPICS_KEY)

    def is_deleted(self, topic: str, log_offset: int) -> bool:
        """Return whether the record of a topic at a log offset was deleted with the topic."""
        return bool(self._log_ends) and log_offset < self._log_ends.get(topic, 0)

    def deleted_end(self, topic: str) -> int:
        """Return the log offset below which the records of a topic are deleted; 0 if none are."""
        return self._log_ends.get(topic, 0)

    def __contains__(self, topic: str) -> bool:
        return topic in self._log_ends

    def mark_deleted(self, topic: str, *, log_begin: int, log_end: int) -> None:
        """Delete all records of a topic below the end of the log, durably."""
        self._save({**self._remaining(log_begin, log_end), topic: log_end})

    def trim(self, *, log_begin: int, log_end: int) -> None:
        """Adapt the offsets to the log that recovery has found.

        The log may end below an offset that was saved, because a crash has cut it. New records that
        are appended there must not count as deleted.
        """
        remaining = self._remaining(log_begin, log_end)
        if remaining != self._log_ends:
            self._save(remaining)

    def _remaining(self, log_begin: int, log_end: int) -> dict[str, int]:
        return {
            topic: min(end, log_end) for topic, end in self._log_ends.items() if end > log_begin
        }

    def _save(self, log_ends: dict[str, int]) -> None:
        self._file.save(**{_DELETED_TOPICS_KEY: log_ends})
        self._log_ends = log_ends
