"""The key index: message keys to log offsets, one hash table per file.

    header 40   begin ms 8 | end ms 8 | begin offset 8 | end offset 8 | used slots 4 | count 4
    slots       4 each: number of the newest entry with this hash, 0 for none
    entries     20 each: hash 4 | log offset 8 | seconds since begin 4 | previous entry 4

The hashed text is `topic#key`. Entries are numbered from 1. Different keys can have the same hash,
so a look-up must compare the key of the record itself.

New keys are collected in memory and reach the files with a checkpoint. One flush changes slots,
entries and headers in many places of several files. A crash between two of these writes would break
the chains of the hash table. So a flush writes all its changes to a redo file first, with a
checksum, makes that durable, and then applies them:

    pending keys --> list of FileChange --> escrowmq.redo (fsync) --> index files (fsync)

A start applies the redo file again. To apply it twice does no harm. A redo file with a wrong
checksum was never complete, so none of its changes had begun.
"""

from __future__ import annotations

import itertools
import struct
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final
from zlib import crc32

import msgspec

from escrowmq.message.record import LogOffset
from escrowmq.parsing import format_file_timestamp
from escrowmq.store.columns import KeyColumns, PendingKeys, key_hash, newest_first, pack_rows
from escrowmq.store.disk import (
    Disk,
    File,
    ViewCache,
    parent_directory,
    read_file,
    remove_file,
    write_file,
)

REDO_PATH: Final = "escrowmq.redo"
INDEX_DIRECTORY: Final = "index"
HEADER: Final = struct.Struct(">qqqqii")
SLOT: Final = struct.Struct(">i")
INDEX_ENTRY: Final = struct.Struct(">iqii")
STORED_TIME_WAIT_MAX_MS: Final = 600_000  # for which stored times stand still after a set-back
RESULTS_MAX: Final = 64
SECONDS_MAX: Final = 0x7FFFFFFF
assert (HEADER.size, SLOT.size, INDEX_ENTRY.size) == (40, 4, 20)


@dataclass(slots=True)
class IndexFile:
    """The header of one index file."""

    name: str
    begin_ms: int = 0
    end_ms: int = 0
    begin_offset: int = 0
    end_offset: int = 0
    used_slots: int = 0
    count: int = 1
    # True if records without keys follow it in the log. The next key begins a new file, so that no
    # file claims a range of the log that it does not cover.
    is_closed: bool = False

    @property
    def path(self) -> str:
        return f"{INDEX_DIRECTORY}/{self.name}"

    def header(self) -> bytes:
        return HEADER.pack(
            self.begin_ms,
            self.end_ms,
            self.begin_offset,
            self.end_offset,
            self.used_slots,
            self.count,
        )


@dataclass(frozen=True, slots=True)
class FileChange:
    """What one flush changes in one file. It is stored in the redo file."""

    path: str
    size: int  # of the file, if it has to be created
    writes: list[tuple[int, bytes]]  # position, bytes
    words: bytes = b""  # many writes of four bytes: position 4 | word 4, repeated


@dataclass(slots=True)
class IndexFlush:
    """Writes keys to the files. `run` may be called in a thread, and again after it failed."""

    index: KeyIndex
    keys: list[PendingKeys]
    files: list[IndexFile]  # after `run`: the headers as they are then
    now_ms: int
    # A flush that failed, perhaps in the middle. It must be completed before anything else, because
    # the chains in the files may be broken until then.
    previous: IndexFlush | None = None
    is_previous_done: bool = False
    changes: list[FileChange] | None = None

    def run(self) -> None:
        if self.previous is not None and not self.is_previous_done:
            self.previous.run()
            self.files, self.is_previous_done = self.previous.files, True
        if self.changes is None:
            self.files, self.changes = self.index.plan_changes(self)
        self.index.apply(self.changes)


class KeyIndex:
    """All index files of a store and the keys that are not in files yet."""

    def __init__(
        self,
        disk: Disk,
        views: ViewCache,
        *,
        slot_count: int,
        entry_count: int,
        is_enabled: bool = True,
    ) -> None:
        self.is_enabled = is_enabled  # if not, no key is added; existing keys are still found
        self._disk = disk
        self._views = views
        self._slot_count = slot_count
        self._entry_count = entry_count
        self._entries_position = HEADER.size + slot_count * SLOT.size
        self._file_bytes = self._entries_position + entry_count * INDEX_ENTRY.size
        self.pending: list[PendingKeys] = []
        self._flush: IndexFlush | None = None
        self.files: list[IndexFile] = []

    # --- writing -------------------------------------------------------------------------------

    def add(self, topic: str, keys: list[bytes], log_offset: int, stored_ms: int) -> None:
        if self.is_enabled:
            for key in keys:
                self.pending.append((topic, key, log_offset, stored_ms))

    def begin_flush(self, now_ms: int) -> IndexFlush:
        """Take the pending keys out of memory for writing. They are still found by `find`."""
        failed, keys = self._flush, self.pending
        flush = IndexFlush(self, keys, self.files, now_ms, failed)
        if failed is not None and failed.changes is None:
            # It failed before it changed anything, so its keys are written together with these.
            flush = replace(failed, keys=failed.keys + keys)
        self._flush = flush
        self.pending = []
        return flush

    def finish_flush(self, flush: IndexFlush) -> None:
        self.files = flush.files
        self._flush = None

    def plan_changes(self, flush: IndexFlush) -> tuple[list[IndexFile], list[FileChange]]:
        """Return the headers after a flush and the changes that it makes. Nothing is written."""
        files = [replace(file) for file in flush.files]
        changes = []
        keys, planned = KeyColumns.from_pending(flush.keys), 0
        while planned < len(keys.hashes):
            if not files or self._is_full(files[-1], keys.stored_ms[planned]):
                files.append(IndexFile(_new_file_name(files, flush.now_ms)))
            capacity = self._entry_count - files[-1].count
            end = _end_of_ascent(keys.stored_ms, planned, planned + capacity)
            changes.append(self._plan_file_change(files[-1], keys.part(planned, end)))
            planned = end
        return files, changes

    def _is_full(self, file: IndexFile, stored_ms: int) -> bool:
        """Return whether a key of this stored time needs another file.

        A file covers a range of time that grows at its end. After a clock that was wrong, the times
        of the next keys are before that range.
        """
        is_before = file.count > 1 and stored_ms < file.end_ms - STORED_TIME_WAIT_MAX_MS
        return file.is_closed or file.count >= self._entry_count or is_before

    def apply(self, changes: list[FileChange]) -> None:
        """Write changes so that a crash at any point leaves all of them or none."""
        if changes:
            write_redo(self._disk, changes)
            apply_changes(self._disk, changes)

    def _plan_file_change(self, file: IndexFile, keys: KeyColumns) -> FileChange:
        """Return the writes that add keys to a file, and update its header in memory."""
        hashes, log_offsets, stored = keys
        first = file.count
        if first == 1:
            file.begin_ms, file.begin_offset = stored[0], log_offsets[0]
        slots = [value % self._slot_count for value in hashes]
        previous = self._slot_heads(file, slots)
        file.used_slots += previous.count(0)
        newest = dict(
            zip(slots, itertools.count(first), strict=False)
        )  # number of the last entry per slot
        if len(newest) < len(slots):
            file.used_slots -= _link_shared_slots(slots, previous, first, newest)
        seconds = self._seconds_since(stored, file.begin_ms)
        entries = pack_rows(
            array("I", hashes), array("Q", log_offsets), array("I", seconds), array("I", previous)
        )
        file.count = first + len(hashes)
        file.end_offset, file.end_ms = log_offsets[-1], stored[-1]
        positions = [HEADER.size + slot * SLOT.size for slot in newest]
        return FileChange(
            path=file.path,
            size=self._file_bytes,
            writes=[
                (self._entries_position + first * INDEX_ENTRY.size, entries),
                (0, file.header()),
            ],
            words=pack_rows(array("I", positions), array("I", newest.values())),
        )

    def _slot_heads(self, file: IndexFile, slots: list[int]) -> list[int]:
        """Return what the file holds in each of these slots: the number of an entry, or 0."""
        if file.count <= 1:
            return [0] * len(slots)
        words = self._views.view(file.path)[HEADER.size : self._entries_position].cast("I")
        heads = array("I", [words[slot] for slot in slots])
        if sys.byteorder == "little":
            heads.byteswap()
        return [head if head < file.count else 0 for head in heads]

    def _seconds_since(self, stored_ms: Sequence[int], begin_ms: int) -> list[int]:
        # Few distinct times, many keys: convert each time once.
        seconds = {ms: min(max(0, (ms - begin_ms) // 1000), SECONDS_MAX) for ms in set(stored_ms)}
        return [seconds[ms] for ms in stored_ms]

    # --- reading -------------------------------------------------------------------------------

    def find(self, topic: str, key: bytes, begin_ms: int, end_ms: int) -> Iterator[LogOffset]:
        """Yield log offsets of records that may have this key, the newest first.

        The caller must compare the key and the stored time: the files know only hashes and seconds.
        """
        seen = set()  # a key may be in memory and in a file while a flush is running
        for pending in self._unwritten_keys():
            for entry_topic, entry_key, log_offset, stored_ms in newest_first(pending):
                is_match = (entry_topic, entry_key) == (topic, key)
                is_match = is_match and begin_ms <= stored_ms <= end_ms
                if is_match and log_offset not in seen:
                    seen.add(log_offset)
                    yield LogOffset(log_offset)
        for file in reversed(self.files):
            if file.count > 1 and begin_ms <= file.end_ms + 999 and end_ms >= file.begin_ms - 999:
                for log_offset in self._find_in_file(file, key_hash(topic, key), begin_ms, end_ms):
                    if log_offset not in seen:
                        seen.add(log_offset)
                        yield LogOffset(log_offset)

    def _unwritten_keys(self) -> Iterator[list[PendingKeys]]:
        yield self.pending
        flush = self._flush
        while flush is not None:
            yield flush.keys
            flush = flush.previous

    def _find_in_file(
        self, file: IndexFile, hash_value: int, begin_ms: int, end_ms: int
    ) -> Iterator[int]:
        view = self._views.view(file.path)
        # Entries above the count of the header may exist already: a flush may be writing them in
        # a thread. So the number is checked against the capacity of the file.
        number = self._slot_head(view, hash_value % self._slot_count, self._entry_count)
        while number > 0:
            entry_hash, log_offset, seconds, previous = INDEX_ENTRY.unpack_from(
                view, self._entries_position + number * INDEX_ENTRY.size
            )
            stored_ms = file.begin_ms + seconds * 1000  # rounded down to a second
            if entry_hash == hash_value and begin_ms - 999 <= stored_ms <= end_ms:
                yield log_offset
            # Numbers decrease along a chain. One that does not is damaged and could form a loop.
            number = previous if previous < number else 0

    def _slot_head(self, view: memoryview, slot: int, count: int) -> int:
        (number,) = SLOT.unpack_from(view, HEADER.size + slot * SLOT.size)
        return number if 0 < number < count else 0

    # --- opening and expiry --------------------------------------------------------------------

    def open(self) -> None:
        """Complete a flush that a crash interrupted, then read the headers of all files."""
        changes = [change for change in load_redo(self._disk) if self._can_apply(change)]
        apply_changes(self._disk, changes)
        self.files = []
        for name in self._disk.names(INDEX_DIRECTORY):
            if not name.isdigit():
                continue
            view = self._views.view(f"{INDEX_DIRECTORY}/{name}")
            if len(view) == self._file_bytes:
                file = IndexFile(name, *HEADER.unpack_from(view, 0))
                # RocketMQ writes 0 into a new file. A count above the capacity is damaged.
                file.count = min(max(1, file.count), self._entry_count)
                self.files.append(file)
            else:  # of another configuration, or cut short; recovery rebuilds it from the log
                self._views.discard(f"{INDEX_DIRECTORY}/{name}")
                remove_file(self._disk, f"{INDEX_DIRECTORY}/{name}")

    def _can_apply(self, change: FileChange) -> bool:
        """Return False if RocketMQ's broker has added keys to the file or removed it since."""
        (entries_position, _), (_, header) = change.writes
        if not self._disk.exists(change.path):
            # Only a change that begins a file may create it.
            return entries_position == self._entries_position + INDEX_ENTRY.size
        view = self._views.view(change.path)
        count = HEADER.unpack_from(view)[-1] if len(view) >= HEADER.size else 0
        self._views.discard(change.path)
        return bool(count <= HEADER.unpack(header)[-1])

    @property
    def end_offset(self) -> int:
        """Return the log offset of the last record in the files; -1 if there is none."""
        return max((file.end_offset for file in self.files if file.count > 1), default=-1)

    def close_last_file(self) -> None:
        """Let the next key begin a new file, because records without keys come before it."""
        if self.files:
            self.files[-1].is_closed = True

    def clear(self) -> None:
        """Remove all files and pending keys, before the index is rebuilt."""
        remove_file(self._disk, REDO_PATH)
        while self.files:
            self._remove(self.files.pop())
        self.pending.clear()

    def remove_expired(self, log_begin: int) -> int:
        """Remove files whose records are all below `log_begin`. Return how many."""
        expired = expired_files(self.files, log_begin)
        if expired:
            remove_file(
                self._disk, REDO_PATH
            )  # otherwise the next start would create a removed file again
        for file in expired:
            self.files.remove(file)
            self._remove(file)
        return len(expired)

    def _remove(self, file: IndexFile) -> None:
        self._views.discard(file.path)
        remove_file(self._disk, file.path)


def _link_shared_slots(
    slots: list[int], previous: list[int], first: int, newest: dict[int, int]
) -> int:
    """Chain new entries that share a slot with each other, by changing `previous`.

    `previous` holds what the file has in the slot of each entry. For the second and later new
    entries of a slot it must be the new entry before. Return how many of these were counted as the
    first entry of an empty slot.
    """
    numbered = zip(slots, itertools.count(first), strict=False)
    shared = {slot for slot, number in numbered if newest[slot] != number}
    last_numbers: dict[int, int] = {}
    miscounted = 0
    for index in [index for index, slot in enumerate(slots) if slot in shared]:
        slot = slots[index]
        if slot in last_numbers:
            miscounted += not previous[index]
            previous[index] = last_numbers[slot]
        last_numbers[slot] = first + index
    return miscounted


def expired_files(files: list[IndexFile], log_begin: int) -> list[IndexFile]:
    """Return the files whose records are all below `log_begin`. The last file always stays."""
    return list(itertools.takewhile(lambda file: file.end_offset < log_begin, files[:-1]))


def _end_of_ascent(times_ms: list[int], begin: int, end: int) -> int:
    """Return where the times decrease by much; `end`, or the end of the list, if nowhere."""
    part = times_ms[begin:end]
    if part == sorted(part):  # nearly always, and a loop would cost much more
        return begin + len(part)
    for index, (first, second) in enumerate(itertools.pairwise(part), begin + 1):
        if second < first - STORED_TIME_WAIT_MAX_MS:
            return index
    return begin + len(part)


def _new_file_name(files: list[IndexFile], now_ms: int) -> str:
    """Return a name by the time of its creation, as RocketMQ does, but after all existing names."""
    name = format_file_timestamp(now_ms)
    return max(name, f"{int(files[-1].name) + 1:017d}") if files else name


# --- the redo file -------------------------------------------------------------------------------

_CRC_BYTES: Final = 4
_WORD_BYTES: Final = 4
_PAGE_BYTES: Final = 4096
# If words are on average not farther apart than this (16 in a page), one write covers all of them.
_DENSE_BYTES: Final = 256


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[FileChange])


def write_redo(disk: Disk, changes: list[FileChange]) -> None:
    """Write the redo file durably."""
    data = _encoder.encode(changes)
    write_file(disk, REDO_PATH, crc32(data).to_bytes(_CRC_BYTES, "big") + data)


def load_redo(disk: Disk) -> list[FileChange]:
    """Return the changes in the redo file; none if there is no complete one."""
    content = read_file(disk, REDO_PATH) or b""
    data = content[_CRC_BYTES:]
    if len(content) <= _CRC_BYTES or crc32(data) != int.from_bytes(content[:_CRC_BYTES], "big"):
        return []
    return _decoder.decode(data)


def apply_changes(disk: Disk, changes: list[FileChange]) -> None:
    """Make changes durably. They may have been made before, in part or as a whole."""
    for change in changes:
        is_new = not disk.exists(change.path)
        file = disk.create(change.path, change.size) if is_new else disk.open(change.path)
        try:
            if file.size < change.size:  # a crash interrupted its creation
                file.resize(change.size)
            for position, data in change.writes:
                file.write_at(position, data)
            _write_words(file, change.words)
            file.sync()
        finally:
            file.close()
        if is_new:
            disk.sync_directory(parent_directory(change.path))


def _write_words(file: File, words: bytes) -> None:
    """Write many words with few calls, because one call per word would be slow.

    The words of a page become one write. If most pages have words, all of them become one write.
    """
    if not words:
        return
    pairs = array("I", words)
    positions, values = pairs[0::2], pairs[1::2]
    if sys.byteorder == "little":
        positions.byteswap()  # the values are copied as they are
    begin, end = min(positions), max(positions) + _WORD_BYTES
    if end - begin <= len(positions) * _DENSE_BYTES:
        _write_merged(file, begin, end, positions, values)
        return
    pages: defaultdict[int, list[int]] = defaultdict(list)
    for index, position in enumerate(positions):
        pages[position // _PAGE_BYTES].append(index)
    for page, indexes in sorted(pages.items()):
        page_begin = page * _PAGE_BYTES
        page_positions = [positions[index] for index in indexes]
        page_values = [values[index] for index in indexes]
        _write_merged(file, page_begin, page_begin + _PAGE_BYTES, page_positions, page_values)


def _write_merged(
    file: File, begin: int, end: int, positions: Sequence[int], values: Sequence[int]
) -> None:
    """Write words and the unchanged bytes between them in one call."""
    content = bytearray(file.view()[begin:end])
    words = memoryview(content)[: len(content) // _WORD_BYTES * _WORD_BYTES].cast("I")
    for position, value in zip(positions, values, strict=True):
        words[(position - begin) // _WORD_BYTES] = value
    file.write_at(begin, content)
