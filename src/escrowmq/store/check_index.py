"""Examine the key index: chains, slots, and that keys lead to their records and back.

Keys are indexed in the order of the log, so the entries of all files, one after the other, are
walked beside the log. A chain is right if each entry names the one that was the newest of its slot
before it, and the slot names the last: this finds every entry that a look-up would not reach.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from escrowmq.message.facts import has_keys
from escrowmq.message.names import TAGS
from escrowmq.message.properties import find_property
from escrowmq.message.record import StoredRecord
from escrowmq.store.check_log import LogCheck, Stop
from escrowmq.store.disk import Disk, OpenViews
from escrowmq.store.findings import Findings, Severity
from escrowmq.store.keyindex import DIRECTORY, ENTRY, HEADER, SLOT, IndexFile
from escrowmq.store.settings import StoreSettings
from escrowmq.store.waitingkeys import key_hash

_OFFSET_AT: Final = 4  # of the log offset in an entry
_OFFSET = struct.Struct(">q")
_GUESSES_MAX: Final = 10_000
_GUESSED_BYTES_MAX: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Geometry:
    slots: int
    entries: int

    @property
    def entries_at(self) -> int:
        return HEADER.size + self.slots * SLOT.size

    @property
    def size(self) -> int:
        return self.entries_at + self.entries * ENTRY.size


_DEFAULTS = StoreSettings()
DEFAULT: Final = Geometry(_DEFAULTS.index_slots, _DEFAULTS.index_entries)


class KeyEntry(NamedTuple):
    file: IndexFile
    number: int
    position: int
    hash: int
    log_offset: int


class IndexCheck:
    def __init__(
        self,
        disk: Disk,
        log: LogCheck,
        stop: Stop,
        findings: Findings,
        settings: StoreSettings | None,
    ) -> None:
        self._disk = disk
        self._log = log
        self._stop = stop
        self._findings = findings
        self._views = OpenViews(disk, files_max=2)
        self._geometry: dict[str, Geometry] = {}
        self.files = 0
        self.keys = 0
        self._usable = self._open(settings)
        self._entries = self._read()
        self._ahead = next(self._entries, None)
        self._in_no_file = 0

    def close(self) -> None:
        self._views.close()

    def see(self, record: StoredRecord, keys: list[bytes]) -> None:
        """The next record of the log."""
        expected: set[int] = set()
        if has_keys(record.sys_flag):
            expected = {key_hash(record.topic, key) for key in keys}
        found: set[int] = set()
        while (entry := self._ahead) is not None and entry.log_offset <= record.log_offset:
            if entry.log_offset < record.log_offset:
                self._stray(entry)
            elif entry.hash in expected:
                found.add(entry.hash)
            elif entry.hash != _tag_hash(record):
                what = f"entry {entry.number}: no key of the record at {entry.log_offset} hashes so"
                self._wrong(entry.file, entry.position, what)
            self._ahead = next(self._entries, None)
        self.keys += len(found)
        if len(found) < len(expected):
            self._missing(record, len(expected) - len(found))

    def finish(self) -> None:
        while (entry := self._ahead) is not None:
            self._stray(entry)
            self._ahead = next(self._entries, None)
        if self._in_no_file:
            what = f"{self._in_no_file} keys are in no file: one is missing; it can be built again"
            self._findings.note(DIRECTORY, None, what)

    def _stray(self, entry: KeyEntry) -> None:
        """An entry that the log, up to here, has no record for."""
        at = entry.log_offset
        if at < self._log.begin or self._log.lies_in_damage(at):
            return
        where = "behind the end of the log" if at >= self._log.end else "where no record begins"
        what = f"entry {entry.number}: points at {at}, {where}, or is out of order"
        self._wrong(entry.file, entry.position, what)

    def _missing(self, record: StoredRecord, count: int) -> None:
        at = record.log_offset
        holders = [file for file in self._usable if file.begin_offset <= at <= file.end_offset]
        if any(file.begin_offset < at < file.end_offset for file in holders) or len(holders) > 1:
            what = f"lacks {count} of the keys of the record at {at}"
            self._wrong(holders[0], None, what)
        elif self._usable and self._usable[0].begin_offset < at < self._usable[-1].end_offset:
            self._in_no_file += count  # between two files, or in one of them and one that is gone

    def _wrong(self, file: IndexFile, position: int | None, what: str) -> None:
        # After a crash RocketMQ drops the files that its checkpoint does not vouch for.
        vouched_ms = 0 if self._stop.rocketmq is None else self._stop.rocketmq.index_ms
        dropped = not self._stop.clean and file.end_ms > vouched_ms
        severity = Severity.NOTE if dropped else Severity.DAMAGE
        self._findings.add(severity, file.path, position, what)

    # --- one file ------------------------------------------------------------------------------

    def _read(self) -> Iterator[KeyEntry]:
        for file in self._usable:
            geometry = self._geometry[file.name]
            view = self._views.view(file.path)
            newest = array("i", bytes(geometry.slots * SLOT.size))
            at = geometry.entries_at + ENTRY.size
            end = geometry.entries_at + file.count * ENTRY.size
            for number, entry in enumerate(ENTRY.iter_unpack(view[at:end]), 1):
                value, log_offset, _, previous = entry
                slot = value % geometry.slots
                if previous != newest[slot]:
                    what = f"entry {number}: follows entry {previous}, not {newest[slot]}"
                    self._wrong(file, at, f"{what}: what is before it cannot be found")
                newest[slot] = number
                yield KeyEntry(file, number, at, value, log_offset)
                at += ENTRY.size
            self._check_slots(file, view, geometry, newest)

    def _check_slots(
        self, file: IndexFile, view: memoryview, geometry: Geometry, newest: array[int]
    ) -> None:
        slots = array("i")
        slots.frombytes(view[HEADER.size : geometry.entries_at])
        if sys.byteorder == "little":
            slots.byteswap()
        used = geometry.slots - newest.count(0)
        if file.used_slots != used:
            what = f"the header says that {file.used_slots} slots are in use; {used} are"
            self._wrong(file, 32, what)
        if slots == newest:
            return
        for slot, (found, expected) in enumerate(zip(slots, newest, strict=True)):
            if found != expected:
                position = HEADER.size + slot * SLOT.size
                what = f"slot {slot}: names entry {found}; the newest is {expected}"
                self._wrong(file, position, what)

    def _check_header(self, file: IndexFile, view: memoryview, geometry: Geometry) -> None:
        first, last = (
            _OFFSET.unpack_from(view, geometry.entries_at + number * ENTRY.size + _OFFSET_AT)[0]
            for number in (1, file.count - 1)
        )
        if (file.begin_offset, file.end_offset) != (first, last):
            what = (
                f"covers {file.begin_offset} to {file.end_offset}; its entries, {first} to {last}"
            )
            self._wrong(file, 16, f"the header says that it {what}")
        if file.begin_ms > file.end_ms:
            self._wrong(file, 0, f"begins at {file.begin_ms} ms, after its end at {file.end_ms}")

    # --- files ---------------------------------------------------------------------------------

    def _open(self, settings: StoreSettings | None) -> list[IndexFile]:
        usable = []
        for name in self._disk.names(DIRECTORY):
            path = f"{DIRECTORY}/{name}"
            if not name.isdigit():
                self._findings.note(path, None, "is not a file of the index")
                continue
            self.files += 1
            view = self._views.view(path)
            if len(view) < HEADER.size:
                what = f"has {len(view)} bytes: not even a header; it can be built again"
                self._findings.add(self._unless_clean(), path, None, what)
                continue
            file = IndexFile(name, *HEADER.unpack_from(view, 0))
            file.count = max(1, file.count)  # RocketMQ leaves 0 in a file it has just made
            geometry = find_geometry(file, view, settings)
            if geometry is None:
                what = "was made with other settings, or is damaged: not examined; it can be built"
                self._findings.note(path, None, f"{what} again")
            elif not 1 <= file.count <= geometry.entries:
                what = f"the header counts {file.count} entries; there is room for"
                self._wrong(file, 36, f"{what} {geometry.entries}")
            elif file.count > 1:
                self._geometry[name] = geometry
                self._check_header(file, view, geometry)
                usable.append(file)
        return usable

    def _unless_clean(self) -> Severity:
        return Severity.DAMAGE if self._stop.clean else Severity.NOTE


def _tag_hash(record: StoredRecord) -> int | None:
    """RocketMQ 5.5 indexes a message by its tags too."""
    tags = find_property(record.properties, TAGS.encode())
    return None if tags is None else key_hash(record.topic, b"T#" + tags)


def find_geometry(
    file: IndexFile, view: memoryview, settings: StoreSettings | None
) -> Geometry | None:
    """How a file is laid out, which it does not say: as set, as RocketMQ does it, or a guess."""
    known = [DEFAULT]
    if settings is not None:
        known.insert(0, Geometry(settings.index_slots, settings.index_entries))
    for geometry in known:
        if geometry.size == len(view):
            return geometry
    guesses = list(_guesses(file, view))
    for geometry in guesses:
        if _newest_is_in_its_slot(file, view, geometry):
            return geometry
    return guesses[0] if len(guesses) == 1 else None


def _guesses(file: IndexFile, view: memoryview) -> Iterator[Geometry]:
    """Layouts in which the first and the last entry speak of what the header says they do."""
    if file.count < 2:
        return
    data = bytes(view[:_GUESSED_BYTES_MAX])
    sought = _OFFSET.pack(file.end_offset)
    found = HEADER.size
    for _ in range(_GUESSES_MAX):
        found = data.find(sought, found + 1)
        if found < 0:
            return
        entries_at = found - _OFFSET_AT - (file.count - 1) * ENTRY.size
        slots, odd = divmod(entries_at - HEADER.size, SLOT.size)
        entries, rest = divmod(len(view) - entries_at, ENTRY.size)
        if slots < 1 or odd or rest or entries < file.count:
            continue
        first_at = entries_at + ENTRY.size + _OFFSET_AT
        if _OFFSET.unpack_from(data, first_at)[0] == file.begin_offset:
            yield Geometry(slots, entries)


def _newest_is_in_its_slot(file: IndexFile, view: memoryview, geometry: Geometry) -> bool:
    at = geometry.entries_at + (file.count - 1) * ENTRY.size
    value: int = ENTRY.unpack_from(view, at)[0]
    slot_at = HEADER.size + value % geometry.slots * SLOT.size
    return bool(SLOT.unpack_from(view, slot_at)[0] == file.count - 1)
