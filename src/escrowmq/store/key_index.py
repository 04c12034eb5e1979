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

Checksums of each file (index_checksums.py) are part of the same changes. A look-up checks what it
reads. In a file that is damaged it searches the entries one by one instead of following the chains,
and the log where entries are damaged, so the key is found. The next start rebuilds the index.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import sys
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Final
from zlib import crc32

import msgspec

from escrowmq.errors import ReadFailed, StoreError
from escrowmq.message.record import LogOffset
from escrowmq.native import NativePath, load_native
from escrowmq.parsing import format_file_timestamp
from escrowmq.store.columns import (
    KeyColumns,
    LinkedEntries,
    PendingKeys,
    find_pending,
    key_hash,
    pack_rows,
)
from escrowmq.store.damage import DamageKind, DamageReports
from escrowmq.store.disk import (
    Disk,
    File,
    OpenFiles,
    parent_directory,
    read_file,
    read_what_is_left,
    remove_file,
    replace_file,
    write_file,
)
from escrowmq.store.index_checksums import (
    CHECKSUM_DIRECTORY,
    ENTRIES_PER_CRC,
    SLOTS_PER_SUM,
    IndexChecksums,
    sum_slots,
)

REDO_PATH: Final = "escrowmq.redo"
INDEX_DIRECTORY: Final = "index"
DAMAGED_PATH: Final = f"{CHECKSUM_DIRECTORY}/damaged"  # exists if the next start has to rebuild
HEADER: Final = struct.Struct(">qqqqii")
SLOT: Final = struct.Struct(">i")
INDEX_ENTRY: Final = struct.Struct(">iqii")
STORED_TIME_WAIT_MAX_MS: Final = 600_000  # for which stored times stand still after a set-back
RESULTS_MAX: Final = 64
ENTRIES_PER_SLICE: Final = 256  # of the index, until a search may be interrupted
_SINGLE_READS_MAX: Final = 4096  # to read all slots at once takes as long as so many reads
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
    checksums: IndexChecksums | None = None  # None if RocketMQ has written the file
    is_damaged: bool = False

    @property
    def checksum_path(self) -> str:
        return f"{CHECKSUM_DIRECTORY}/{self.name}"

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


LogOffsetsBetween = Callable[[int, int], Iterator[int]]


class KeyIndex:
    """All index files of a store and the keys that are not in files yet."""

    def __init__(
        self,
        disk: Disk,
        open_files: OpenFiles,
        *,
        slot_count: int,
        entry_count: int,
        is_enabled: bool = True,
        damage: DamageReports | None = None,
        log_offsets_between: LogOffsetsBetween = lambda begin, end: iter(()),
        native: NativePath | None = None,
    ) -> None:
        """`log_offsets_between` yields the records of the log in a range, for damaged entries.

        `native`: the native path; if there is none, it is used if it is installed.
        """
        self._native = (load_native() if native is None else native).module
        self.is_enabled = is_enabled  # if not, no key is added; existing keys are still found
        self._disk = disk
        self._open_files = open_files
        self._damage = DamageReports() if damage is None else damage
        self._log_offsets_between = log_offsets_between
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
                checksums = IndexChecksums.empty(self._slot_count)
                files.append(IndexFile(_new_file_name(files, flush.now_ms), checksums=checksums))
            file = files[-1]
            capacity = self._entry_count - file.count
            end = _end_of_ascent(keys.stored_ms, planned, planned + capacity)
            changes.append(self._plan_file_change(file, keys.part(planned, end)))
            if file.checksums is not None:
                content = file.checksums.encode()
                changes.append(FileChange(file.checksum_path, len(content), [(0, content)]))
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
            apply_changes(self._disk, changes, self._native)

    def _plan_file_change(self, file: IndexFile, keys: KeyColumns) -> FileChange:
        """Return the writes that add keys to a file, and update its header in memory."""
        hashes, log_offsets, stored = keys
        first = file.count
        if first == 1:
            file.begin_ms, file.begin_offset = stored[0], log_offsets[0]
        linked = self._link_natively(file, keys) or self._link(file, keys)
        file.used_slots += linked.new_slots
        file.count = first + len(hashes)
        file.end_offset, file.end_ms = log_offsets[-1], stored[-1]
        if file.checksums is not None:
            checksums = file.checksums = file.checksums.copy()
            checksums.change_sums(linked.sum_changes)
            checksums.add_entries(first, linked.entries)
            checksums.header = file.header()
        return FileChange(
            path=file.path,
            size=self._file_bytes,
            writes=[
                (self._entries_position + first * INDEX_ENTRY.size, linked.entries),
                (0, file.header()),
            ],
            words=linked.words,
        )

    def _link_natively(self, file: IndexFile, keys: KeyColumns) -> LinkedEntries | None:
        """Link many keys without holding the interpreter's lock: requests are handled meanwhile.

        None if there are few, or no native module.
        """
        if self._native is None or len(keys.hashes) <= _SINGLE_READS_MAX:
            return None
        slots = b""
        if file.count > 1:
            slots_bytes = self._slot_count * SLOT.size
            slots = self._open_files.read(file.path, HEADER.size, slots_bytes)
        linked: LinkedEntries = self._native.link_entries(
            keys.hashes.tobytes(),
            keys.log_offsets.tobytes(),
            keys.stored_ms.tobytes(),
            begin_ms=file.begin_ms,
            slot_count=self._slot_count,
            first=file.count,
            slots=slots,
        )
        return linked

    def _link(self, file: IndexFile, keys: KeyColumns) -> LinkedEntries:
        """Link keys. This is the specification of the native version."""
        hashes, log_offsets, stored = keys
        first = file.count
        slots = [value % self._slot_count for value in hashes]
        previous = self._slot_heads(file, slots)
        heads = dict(zip(slots, previous, strict=True))
        new_slots = previous.count(0)
        newest = dict(
            zip(slots, itertools.count(first), strict=False)
        )  # number of the last entry per slot
        if len(newest) < len(slots):
            new_slots -= _link_shared_slots(slots, previous, first, newest)
        seconds = self._seconds_since(stored, file.begin_ms)
        entries = pack_rows(
            array("I", hashes), array("Q", log_offsets), array("I", seconds), array("I", previous)
        )
        positions = [HEADER.size + slot * SLOT.size for slot in newest]
        return LinkedEntries(
            entries,
            pack_rows(array("I", positions), array("I", newest.values())),
            [(slot // SLOTS_PER_SUM, number - heads[slot]) for slot, number in newest.items()],
            new_slots,
        )

    def _slot_heads(self, file: IndexFile, slots: list[int]) -> list[int]:
        """Return what the file holds in each of these slots: the number of an entry, or 0."""
        if file.count <= 1:
            return [0] * len(slots)
        if len(slots) > _SINGLE_READS_MAX:
            size = self._entries_position - HEADER.size
            words = array("I", self._open_files.read(file.path, HEADER.size, size))
            heads = array("I", [words[slot] for slot in slots])
        else:
            heads = array("I")
            for slot in slots:
                position = HEADER.size + slot * SLOT.size
                heads.frombytes(self._open_files.read(file.path, position, SLOT.size))
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
        found = self.find_in_slices(topic, key, begin_ms, end_ms)
        return (log_offset for log_offset in found if log_offset is not None)

    def find_in_slices(
        self, topic: str, key: bytes, begin_ms: int, end_ms: int
    ) -> Iterator[LogOffset | None]:
        """Yield what `find` yields, and None whenever some entries were passed in vain.

        A caller may pause after each. What is added meanwhile may be missing.
        """
        seen = set()  # a key may be in memory and in a file while a flush is running
        passed = 0
        for pending in self._unwritten_keys():
            for entry in find_pending(pending, topic, key):
                if entry is not None and begin_ms <= entry[1] <= end_ms and entry[0] not in seen:
                    seen.add(entry[0])
                    yield LogOffset(entry[0])
                passed += 1
                if passed % ENTRIES_PER_SLICE == 0:
                    yield None
        for file in list(reversed(self.files)):
            if file.count > 1 and begin_ms <= file.end_ms + 999 and end_ms >= file.begin_ms - 999:
                for found in self._find_safely(file, key_hash(topic, key), begin_ms, end_ms):
                    if found is None:
                        yield None
                    elif found not in seen:
                        seen.add(found)
                        yield LogOffset(found)

    def _unwritten_keys(self) -> Iterator[list[PendingKeys]]:
        yield self.pending
        flush = self._flush
        while flush is not None:
            yield flush.keys
            flush = flush.previous

    def _find_safely(
        self, file: IndexFile, hash_value: int, begin_ms: int, end_ms: int
    ) -> Iterator[int | None]:
        """Yield the matching entries of a file, also if it is damaged."""
        if not file.is_damaged:
            try:
                # A list, so that damage is found before the first entry is returned.
                found: list[int] = []
                for log_offset in self._find_in_file(file, hash_value, begin_ms, end_ms):
                    if log_offset is None:
                        yield None
                    else:
                        found.append(log_offset)
            except _DamagedIndex as error:
                self._report_damage(file, str(error))
            else:
                yield from found
                return
        yield from self._search_entries(file, hash_value)

    def _find_in_file(
        self, file: IndexFile, hash_value: int, begin_ms: int, end_ms: int
    ) -> Iterator[int | None]:
        # Entries above the count of the header may exist already: a flush may be writing them in
        # a thread. So the number is checked against the capacity of the file.
        number = self._slot_head(file, hash_value % self._slot_count)
        passed = 0
        while number > 0:
            entry_hash, log_offset, seconds, previous = self._entry(file, number)
            stored_ms = file.begin_ms + seconds * 1000  # rounded down to a second
            if entry_hash == hash_value and begin_ms - 999 <= stored_ms <= end_ms:
                yield log_offset
            passed += 1
            if passed % ENTRIES_PER_SLICE == 0:
                yield None
            # Numbers decrease along a chain. One that does not is damaged and could form a loop.
            number = previous if previous < number else 0

    def _slot_head(self, file: IndexFile, slot: int) -> int:
        page = slot // SLOTS_PER_SUM
        first = page * SLOTS_PER_SUM
        size = min(SLOTS_PER_SUM, self._slot_count - first) * SLOT.size
        content = self._read(file, HEADER.size + first * SLOT.size, size)
        checksums = self._checksums(file)
        if checksums is not None and sum_slots(content) != checksums.slot_sums[page]:
            raise _DamagedIndex(f"the sum of the slots from {first} on is wrong")
        (number,) = SLOT.unpack_from(content, (slot - first) * SLOT.size)
        return number if 0 < number < self._entry_count else 0

    def _entry(self, file: IndexFile, number: int) -> tuple[int, int, int, int]:
        checksums = self._checksums(file)
        if checksums is None:
            position = self._entries_position + number * INDEX_ENTRY.size
            entry = INDEX_ENTRY.unpack(self._read(file, position, INDEX_ENTRY.size))
        else:
            block, in_block = divmod(number, ENTRIES_PER_CRC)
            content = self._block(file, block)
            if content is None or number >= file.count:
                raise _DamagedIndex(f"the checksum of the entries near {number} is wrong")
            entry = INDEX_ENTRY.unpack_from(content, in_block * INDEX_ENTRY.size)
        return entry[0], entry[1], entry[2], entry[3]

    def _block(self, file: IndexFile, block: int) -> bytes | None:
        """Return the entries of a block; None if their checksum is wrong."""
        first = block * ENTRIES_PER_CRC
        count = min(ENTRIES_PER_CRC, file.count - first)
        position = self._entries_position + first * INDEX_ENTRY.size
        try:
            content = self._read(file, position, max(0, count) * INDEX_ENTRY.size)
        except _DamagedIndex:
            return None
        crcs = None if file.checksums is None else file.checksums.entry_crcs
        if crcs is None or (block < len(crcs) and crc32(content) == crcs[block]):
            return content
        return None

    def _checksums(self, file: IndexFile) -> IndexChecksums | None:
        """Return the checksums of a file; None while a flush is changing it in a thread."""
        is_changing = self._flush is not None and file is self.files[-1]
        return None if is_changing else file.checksums

    def _read(self, file: IndexFile, position: int, size: int) -> bytes:
        try:
            return self._open_files.read(file.path, position, size)
        except StoreError as error:
            raise _DamagedIndex(str(error)) from error

    def _search_entries(self, file: IndexFile, hash_value: int) -> Iterator[int]:
        """Yield log offsets of records that may have a key, from the entries of a damaged file.

        The chains are not used, and a damaged block of entries is replaced by the part of the log
        that it is about.
        """
        following_offset = file.end_offset
        for block in range((file.count - 1) // ENTRIES_PER_CRC, -1, -1):
            content = self._block(file, block)
            if content is None:
                begin = self._last_offset_before(file, block)
                yield from reversed(list(self._log_offsets_between(begin, following_offset)))
                following_offset = begin
                continue
            entries = list(INDEX_ENTRY.iter_unpack(content))[1 if block == 0 else 0 :]
            for entry_hash, log_offset, _, _ in reversed(entries):
                if entry_hash == hash_value:
                    yield log_offset
            following_offset = entries[0][1] if entries else following_offset

    def _last_offset_before(self, file: IndexFile, block: int) -> int:
        """Return the log offset of the last sound entry before a block."""
        for previous in range(block - 1, -1, -1):
            content = self._block(file, previous)
            if content is not None and len(content) > INDEX_ENTRY.size:
                return int(INDEX_ENTRY.unpack(content[-INDEX_ENTRY.size :])[1])
        return file.begin_offset

    def _report_damage(self, file: IndexFile, description: str) -> None:
        file.is_damaged = True
        self._damage.add(
            DamageKind.INDEX,
            file.path,
            f"{description}; keys are searched in its entries and in the log, and the next start "
            "rebuilds it",
            is_repaired=True,
        )
        with contextlib.suppress(StoreError):  # the damage is found again then
            write_file(self._disk, DAMAGED_PATH, b"")

    # --- opening and expiry --------------------------------------------------------------------

    def open(self) -> None:
        """Complete a flush that a crash interrupted, then read the headers of all files."""
        changes = [change for change in load_redo(self._disk) if self._can_apply(change)]
        apply_changes(self._disk, changes)
        self.files = []
        for name, size in sorted(self._disk.sizes(INDEX_DIRECTORY).items()):
            if not name.isdigit():
                continue
            path = f"{INDEX_DIRECTORY}/{name}"
            if size == self._file_bytes:
                self.files.append(self._open_file(name))
            else:  # of another configuration, or cut short; recovery rebuilds it from the log
                self._open_files.discard(path)
                remove_file(self._disk, path)

    @property
    def is_damaged(self) -> bool:
        """Return whether damage was found before, so that the index has to be rebuilt."""
        return self._disk.exists(DAMAGED_PATH)

    def _open_file(self, name: str) -> IndexFile:
        try:
            header = self._open_files.read(f"{INDEX_DIRECTORY}/{name}", 0, HEADER.size)
        except ReadFailed:
            header = bytes(HEADER.size)
        file = self._file_of(name, header)
        if not self._disk.exists(file.checksum_path):
            return file
        file.checksums = self._load_checksums(file)
        saved = file.checksums.header
        if header == saved:
            return file
        saved_file = self._file_of(name, saved)
        if file.count > saved_file.count and file.end_offset > saved_file.end_offset:
            # RocketMQ has added keys since. The file has no checksums from now on.
            file.checksums = None
            remove_file(self._disk, file.checksum_path)
            return file
        self._damage.add(
            DamageKind.INDEX,
            file.path,
            "the header is not what was written, and was restored from its copy",
            is_repaired=True,
        )
        apply_changes(self._disk, [FileChange(file.path, self._file_bytes, [(0, saved)])])
        saved_file.checksums = file.checksums
        return saved_file

    def _file_of(self, name: str, header: bytes) -> IndexFile:
        file = IndexFile(name, *HEADER.unpack(header))
        # RocketMQ writes 0 into a new file. A count above the capacity is damaged.
        file.count = min(max(1, file.count), self._entry_count)
        return file

    def _load_checksums(self, file: IndexFile) -> IndexChecksums:
        """Return the checksums of a file. If they are damaged, compute them again."""
        content = None
        with contextlib.suppress(StoreError):
            content = read_file(self._disk, file.checksum_path)
        checksums = IndexChecksums.decode(content or b"")
        if checksums is not None:
            return checksums
        opened = self._disk.open(file.path, writable=False)
        try:
            slots_bytes = self._slot_count * SLOT.size
            checksums = IndexChecksums.of_content(
                file.header(),
                read_what_is_left(opened, HEADER.size, slots_bytes),
                read_what_is_left(opened, self._entries_position, file.count * INDEX_ENTRY.size),
            )
        finally:
            opened.close()
        self._damage.add(
            DamageKind.INDEX,
            file.checksum_path,
            "the checksums of an index file are damaged, and were computed again",
            is_repaired=True,
        )
        replace_file(self._disk, file.checksum_path, checksums.encode())
        return checksums

    def _can_apply(self, change: FileChange) -> bool:
        """Return False if RocketMQ's broker has added keys to the file or removed it since."""
        if not change.path.startswith(INDEX_DIRECTORY):
            return True  # checksums: they are compared with the header of their file afterwards
        (entries_position, _), (_, header) = change.writes
        if not self._disk.exists(change.path):
            # Only a change that begins a file may create it.
            return entries_position == self._entries_position + INDEX_ENTRY.size
        content = b""
        with contextlib.suppress(StoreError):
            content = self._open_files.read(change.path, 0, HEADER.size)
        count = HEADER.unpack(content)[-1] if content else 0
        self._open_files.discard(change.path)
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
        remove_file(self._disk, DAMAGED_PATH)

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
        self._open_files.discard(file.path)
        remove_file(self._disk, file.path)
        remove_file(self._disk, file.checksum_path)


class _DamagedIndex(Exception):
    """A part of an index file is not what was written, or cannot be read."""


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


def _end_of_ascent(times_ms: array[int], begin: int, end: int) -> int:
    """Return where the times decrease by much; `end`, or the end of the column, if nowhere."""
    part = times_ms[begin:end]
    if part == array("q", sorted(part)):  # nearly always, and a loop would cost much more
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
    content = b""
    with contextlib.suppress(ReadFailed):
        content = read_file(disk, REDO_PATH) or b""
    data = content[_CRC_BYTES:]
    if len(content) <= _CRC_BYTES or crc32(data) != int.from_bytes(content[:_CRC_BYTES], "big"):
        return []
    return _decoder.decode(data)


def apply_changes(disk: Disk, changes: list[FileChange], native: ModuleType | None = None) -> None:
    """Make changes durably. They may have been made before, in part or as a whole."""
    for change in changes:
        is_new = not disk.exists(change.path)
        file = disk.create(change.path, change.size) if is_new else disk.open(change.path)
        try:
            if file.size < change.size:  # a crash interrupted its creation
                file.resize(change.size)
            for position, data in change.writes:
                file.write_at(position, data)
            if native is None:
                _write_words(file, change.words)
            else:
                _write_words_natively(file, change.words, native)
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


def _write_words_natively(file: File, words: bytes, native: ModuleType) -> None:
    """Do the same with the native module."""
    for begin, end, part in native.plan_words(words, _PAGE_BYTES, _DENSE_BYTES):
        content = bytearray(read_what_is_left(file, begin, end - begin))
        native.merge_words(content, begin, part)
        file.write_at(begin, content)


def _write_merged(
    file: File, begin: int, end: int, positions: Sequence[int], values: Sequence[int]
) -> None:
    """Write words and the unchanged bytes between them in one call."""
    content = bytearray(read_what_is_left(file, begin, end - begin))
    words = memoryview(content)[: len(content) // _WORD_BYTES * _WORD_BYTES].cast("I")
    for position, value in zip(positions, values, strict=True):
        words[(position - begin) // _WORD_BYTES] = value
    file.write_at(begin, content)
