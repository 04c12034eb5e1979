"""The key index: message key to log offset, a hash table per file.

    header 40   begin ms 8 | end ms 8 | begin offset 8 | end offset 8 | used slots 4 | count 4
    slots       4 each: number of the newest entry with this hash, 0 for none
    entries     20 each: hash 4 | log offset 8 | seconds since begin 4 | previous entry 4

The text that is hashed is `topic#key`. Entries are numbered from 1. Different keys can share a
hash, so who looks up must compare the record itself.

New keys gather in memory and reach the files with a checkpoint. A power cut between two writes
into a hash table would break its chains, so every change is first written, whole, to a redo file
and applied again at the next start; applying it twice does no harm.

A redo file: writes that must all happen, or none, over several places of several files.

They are written down first, with a checksum, and made durable; then done; a start after a crash
does them again. A redo file that does not check out was never finished, so none of its writes
had begun.
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
_CRC_BYTES: Final = 4
_WORD_BYTES: Final = 4
_PAGE_BYTES: Final = 4096
_DENSE_BYTES: Final = 256  # from one word to the next: sixteen of them in a page


@dataclass(frozen=True, slots=True)
class FileChange:
    path: str
    size: int  # of the file, if it has to be made
    writes: list[tuple[int, bytes]]  # position, bytes
    words: bytes = b""  # many four-byte writes, close together: position 4, word 4, each


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[FileChange])


def write_redo(disk: Disk, changes: list[FileChange]) -> None:
    data = _encoder.encode(changes)
    write_file(disk, REDO_PATH, crc32(data).to_bytes(_CRC_BYTES, "big") + data)


def load_redo(disk: Disk) -> list[FileChange]:
    content = read_file(disk, REDO_PATH) or b""
    data = content[_CRC_BYTES:]
    if len(content) <= _CRC_BYTES or crc32(data) != int.from_bytes(content[:_CRC_BYTES], "big"):
        return []
    return _decoder.decode(data)


def apply_changes(disk: Disk, changes: list[FileChange]) -> None:
    for change in changes:
        made = not disk.exists(change.path)
        file = disk.create(change.path, change.size) if made else disk.open(change.path)
        try:
            if file.size < change.size:  # a crash while it was made
                file.resize(change.size)
            for position, data in change.writes:
                file.write_at(position, data)
            _write_words(file, change.words)
            file.sync()
        finally:
            file.close()
        if made:
            disk.sync_directory(parent_directory(change.path))


def _write_words(file: File, words: bytes) -> None:
    """They are many, and a call for each would be slow: those of a page are one write; where most
    pages have some, all are."""
    if not words:
        return
    pairs = array("I", words)
    positions, values = pairs[0::2], pairs[1::2]
    if sys.byteorder == "little":
        positions.byteswap()  # the values stay as they lie in the file
    begin, end = min(positions), max(positions) + _WORD_BYTES
    if end - begin <= len(positions) * _DENSE_BYTES:
        _write_merged(file, begin, end, positions, values)
        return
    pages: defaultdict[int, list[int]] = defaultdict(list)
    for at, position in enumerate(positions):
        pages[position // _PAGE_BYTES].append(at)
    for page, places in sorted(pages.items()):
        first = page * _PAGE_BYTES
        those, theirs = [positions[at] for at in places], [values[at] for at in places]
        _write_merged(file, first, first + _PAGE_BYTES, those, theirs)


def _write_merged(
    file: File, begin: int, end: int, positions: Sequence[int], values: Sequence[int]
) -> None:
    """These words, and what lies between them as it is."""
    content = bytearray(file.view()[begin:end])
    words = memoryview(content)[: len(content) // _WORD_BYTES * _WORD_BYTES].cast("I")
    for position, value in zip(positions, values, strict=True):
        words[(position - begin) // _WORD_BYTES] = value
    file.write_at(begin, content)


INDEX_DIRECTORY: Final = "index"
HEADER: Final = struct.Struct(">qqqqii")
SLOT: Final = struct.Struct(">i")
INDEX_ENTRY: Final = struct.Struct(">iqii")
RESULTS_MAX: Final = 64
SECONDS_MAX: Final = 0x7FFFFFFF
assert (HEADER.size, SLOT.size, INDEX_ENTRY.size) == (40, 4, 20)


@dataclass(slots=True)
class IndexFile:
    """What the header of one file says."""

    name: str
    begin_ms: int = 0
    end_ms: int = 0
    begin_offset: int = 0
    end_offset: int = 0
    used_slots: int = 0
    count: int = 1
    is_closed: bool = False  # records that were not indexed follow: the next key begins a file

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


@dataclass(slots=True)
class IndexFlush:
    """Keys on their way to the files. `run` may go to a thread, and again after it failed."""

    index: KeyIndex
    keys: list[PendingKeys]
    files: list[IndexFile]  # in the end, as they will be
    now_ms: int
    # One that failed, perhaps half done: it must be done whole before anything else.
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
    def __init__(
        self,
        disk: Disk,
        views: ViewCache,
        *,
        slot_count: int,
        entry_count: int,
        is_enabled: bool = True,
    ) -> None:
        self.is_enabled = is_enabled  # else no key is taken; those that are there can be found
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
        failed, keys = self._flush, self.pending
        flush = IndexFlush(self, keys, self.files, now_ms, failed)
        if failed is not None and failed.changes is None:
            # It failed before it began: its keys go along with these, behind what it followed.
            flush = replace(failed, keys=failed.keys + keys)
        self._flush = flush
        self.pending = []
        return flush

    def finish_flush(self, flush: IndexFlush) -> None:
        self.files = flush.files
        self._flush = None

    def plan_changes(self, flush: IndexFlush) -> tuple[list[IndexFile], list[FileChange]]:
        files = [replace(file) for file in flush.files]
        changes = []
        keys, done = KeyColumns.from_pending(flush.keys), 0
        while done < len(keys.hashes):
            if not files or files[-1].is_closed or files[-1].count >= self._entry_count:
                files.append(IndexFile(_new_file_name(files, flush.now_ms)))
            room = self._entry_count - files[-1].count
            changes.append(self._plan_file_change(files[-1], keys.part(done, done + room)))
            done += room
        return files, changes

    def apply(self, changes: list[FileChange]) -> None:
        if changes:
            write_redo(self._disk, changes)
            apply_changes(self._disk, changes)

    def _plan_file_change(self, file: IndexFile, keys: KeyColumns) -> FileChange:
        """The writes that put these keys into a file, and the file's new header."""
        hashes, log_offsets, stored = keys
        first = file.count
        if first == 1:
            file.begin_ms, file.begin_offset = stored[0], log_offsets[0]
        slots = [value % self._slot_count for value in hashes]
        previous = self._slot_heads(file, slots)
        file.used_slots += previous.count(0)
        newest = dict(zip(slots, itertools.count(first), strict=False))  # the last one per slot
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
        """What the file holds for each of these slots: the number of an entry, or 0."""
        if file.count <= 1:
            return [0] * len(slots)
        words = self._views.view(file.path)[HEADER.size : self._entries_position].cast("I")
        heads = array("I", [words[slot] for slot in slots])
        if sys.byteorder == "little":
            heads.byteswap()
        return [head if head < file.count else 0 for head in heads]

    def _seconds_since(self, stored_ms: Sequence[int], begin_ms: int) -> list[int]:
        found = {ms: (ms - begin_ms) // 1000 for ms in set(stored_ms)}
        bounded = {ms: min(max(0, seconds), SECONDS_MAX) for ms, seconds in found.items()}
        return [bounded[ms] for ms in stored_ms]

    # --- reading -------------------------------------------------------------------------------

    def find(self, topic: str, key: bytes, begin_ms: int, end_ms: int) -> Iterator[LogOffset]:
        """Where records with this key may lie, the newest first. The caller compares the key."""
        seen = set()
        sought = (topic, key)
        for waiting in self._unwritten_keys():
            for entry_topic, entry_key, log_offset, stored_ms in newest_first(waiting):
                is_it = (entry_topic, entry_key) == sought and begin_ms <= stored_ms <= end_ms
                if is_it and log_offset not in seen:
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
        # Not only up to the count we know: a flush that is on its way may have put more there.
        number = self._slot_head(view, hash_value % self._slot_count, self._entry_count)
        while number > 0:
            entry_hash, log_offset, seconds, previous = INDEX_ENTRY.unpack_from(
                view, self._entries_position + number * INDEX_ENTRY.size
            )
            stored_ms = file.begin_ms + seconds * 1000  # rounded down to a second
            if entry_hash == hash_value and begin_ms - 999 <= stored_ms <= end_ms:
                yield log_offset
            # Numbers fall along a chain; one that does not is damage, and would be a loop.
            number = previous if previous < number else 0

    def _slot_head(self, view: memoryview, slot: int, count: int) -> int:
        (number,) = SLOT.unpack_from(view, HEADER.size + slot * SLOT.size)
        return number if 0 < number < count else 0

    # --- opening and expiry --------------------------------------------------------------------

    def open(self) -> None:
        """Finish what a crash interrupted, then read the headers."""
        apply_changes(self._disk, [c for c in load_redo(self._disk) if self._can_apply(c)])
        self.files = []
        for name in self._disk.names(INDEX_DIRECTORY):
            if not name.isdigit():
                continue
            view = self._views.view(f"{INDEX_DIRECTORY}/{name}")
            if len(view) == self._file_bytes:
                file = IndexFile(name, *HEADER.unpack_from(view, 0))
                # RocketMQ leaves 0 in a file it has just made; more than fits is damage.
                file.count = min(max(1, file.count), self._entry_count)
                self.files.append(file)
            else:  # made with other settings, or cut short: the log has it all
                self._views.discard(f"{INDEX_DIRECTORY}/{name}")
                remove_file(self._disk, f"{INDEX_DIRECTORY}/{name}")

    def _can_apply(self, change: FileChange) -> bool:
        """Not if another broker has worked on the file since: it has gone on, or removed it."""
        (entries_at, _), (_, header) = change.writes
        if not self._disk.exists(change.path):
            return entries_at == self._entries_position + INDEX_ENTRY.size  # it begins the file
        view = self._views.view(change.path)
        count = HEADER.unpack_from(view)[-1] if len(view) >= HEADER.size else 0
        self._views.discard(change.path)
        return bool(count <= HEADER.unpack(header)[-1])

    @property
    def end_offset(self) -> int:
        """The last record that is in the files; -1 if none is."""
        return max((file.end_offset for file in self.files if file.count > 1), default=-1)

    def close_last_file(self) -> None:
        if self.files:
            self.files[-1].is_closed = True

    def clear(self) -> None:
        remove_file(self._disk, REDO_PATH)
        while self.files:
            self._remove(self.files.pop())
        self.pending.clear()

    def remove_expired(self, log_begin: int) -> int:
        expired = expired_files(self.files, log_begin)
        if expired:
            remove_file(self._disk, REDO_PATH)  # or a start could make a removed file again
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
    """Let entries that came together into one slot follow each other; how many did so in a slot
    that was empty before."""
    numbered = zip(slots, itertools.count(first), strict=False)
    shared = {slot for slot, number in numbered if newest[slot] != number}
    before: dict[int, int] = {}
    were_empty = 0
    for at in [at for at, slot in enumerate(slots) if slot in shared]:
        slot = slots[at]
        if slot in before:
            were_empty += not previous[at]
            previous[at] = before[slot]
        before[slot] = first + at
    return were_empty


def expired_files(files: list[IndexFile], log_begin: int) -> list[IndexFile]:
    """Those that speak only of what is gone from the log; the last one stays."""
    return list(itertools.takewhile(lambda file: file.end_offset < log_begin, files[:-1]))


def _new_file_name(files: list[IndexFile], now_ms: int) -> str:
    name = format_file_timestamp(now_ms)
    return max(name, f"{int(files[-1].name) + 1:017d}") if files else name
