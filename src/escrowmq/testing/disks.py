"""Disks in memory: one that works, and one that fails or loses power on command.

Both remember what a power cut could bring back: of a file (inode.py) every sector and length since
its last sync, of a directory the names at its last sync and every create, rename and remove since.
A cut keeps the first few of those: a journal loses its end, not its middle. A rename is one
operation of both its directories, and to sync either makes it safe. Directories are safe once made.

One file in memory, and what a power cut leaves of it.

Every sector changed since the last sync is remembered as it was then, and so is every length. A
cut leaves each of those sectors old, new or torn (new up to some byte, old from there; only
"scrambled" mixes them by the word, as no drive should), and the file at one of those lengths.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from escrowmq.clock import Clock, ManualClock
from escrowmq.errors import StoreError, StoreFailed, StoreFull, StoreLocked
from escrowmq.store.disk import BytesLike, DiskUsage, parent_directory

PAGE_BYTES = 4096  # what a sparse file takes room in
SECTOR_BYTES = 512  # what a drive writes whole, or tears

Survival = Literal["none", "all", "mixed", "scrambled"]

# Mixed, often nearly all is kept, or lost: one odd sector among many is the hardest to notice.
_SURVIVAL_RATIOS: dict[Survival, list[float]] = {
    "none": [0],
    "all": [1],
    "mixed": [0.1, 0.5, 0.9],
    "scrambled": [0.1, 0.5, 0.9],
}


class CrashOutcome:
    """What one power cut leaves of what was not safe."""

    def __init__(self, rng: Random, survival: Survival) -> None:
        self._rng = rng
        self._ratio = rng.choice(_SURVIVAL_RATIOS[survival])
        self._is_scrambled = survival == "scrambled"

    def is_kept(self) -> bool:
        return self._rng.random() < self._ratio

    def surviving_sector(self, old: bytes, new: bytes) -> bytes:
        if self._ratio in (0, 1) or self._rng.random() >= 0.15:
            return new if self.is_kept() else old
        if not self._is_scrambled:
            at = self._rng.randint(0, SECTOR_BYTES)
            return new[:at] + old[at:]
        words = ((self._rng.choice((old, new)), at) for at in range(0, SECTOR_BYTES, 8))
        return b"".join(source[at : at + 8] for source, at in words)


class Inode:
    """A file, under its name or still open under none; or a directory."""

    def __init__(self, clock: Clock, *, is_directory: bool = False) -> None:
        self._clock = clock
        self.is_directory = is_directory
        self.buffer = _zeros(0)
        self.written_pages: set[int] = set()  # those ever written
        self.modified_ms = clock.now_ms()
        self.is_locked = False
        self._sizes = [0]  # the safe one, then all since
        self._synced_sectors: dict[int, bytes] = {}  # of each sector changed since the last sync
        self._dropped_sectors: dict[int, bytes] = {}  # the same, but no later sync will write them
        # What each cut of the file took away since, by its place among the sizes: if the power
        # goes before that cut is safe, it may all be there again.
        self._truncations: list[tuple[int, dict[int, bytes]]] = []

    def write(self, position: int, data: BytesLike) -> None:
        self._save_synced_sectors(covered_units(position, len(data), SECTOR_BYTES))
        self._put(position, data)
        self.modified_ms = self._clock.now_ms()

    def resize(self, size: int) -> None:
        if size < len(self.buffer):
            gone = {
                s: self._sector(s) for s in self._synced_sectors if (s + 1) * SECTOR_BYTES > size
            }
            self._truncations.append((len(self._sizes), gone))
        for page in [page for page in self.written_pages if (page + 1) * PAGE_BYTES > size]:
            self._save_synced_sectors(covered_units(page * PAGE_BYTES, PAGE_BYTES, SECTOR_BYTES))
        before, self.buffer = self.buffer, _zeros(size)
        pages, self.written_pages = self.written_pages, set()
        for page in sorted(pages):  # not all of it: most of a large file was never touched
            self._put(page * PAGE_BYTES, before[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])
        if size != self._sizes[-1]:
            self._sizes.append(size)
        self.modified_ms = self._clock.now_ms()

    def sync(self) -> None:
        self._synced_sectors.clear()
        self._truncations.clear()
        del self._sizes[:-1]

    def fail_sync(self, *, drops_pages: bool) -> None:
        """After a failed flush Linux takes the pages for clean: the next one skips them."""
        if drops_pages:
            self._dropped_sectors |= self._synced_sectors
            self._synced_sectors.clear()

    def after_power_cut(self, outcome: CrashOutcome) -> Inode:
        left = Inode(self._clock, is_directory=self.is_directory)
        later_sizes = itertools.takewhile(lambda size: outcome.is_kept(), self._sizes[1:])
        sizes = [self._sizes[0], *later_sizes]
        left.resize(sizes[-1])
        for page in sorted(self.written_pages):
            left._put(page * PAGE_BYTES, self.buffer[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])
        back_again: dict[int, bytes] = {}
        for place, gone in reversed(self._truncations):
            if place >= len(sizes):
                back_again |= gone
        for sector, old in (self._synced_sectors | self._dropped_sectors).items():
            new = back_again.get(sector) or self._sector(sector)
            left._put(sector * SECTOR_BYTES, outcome.surviving_sector(old, new))
        left.sync()
        left.modified_ms = self.modified_ms
        return left

    def _put(self, position: int, data: BytesLike) -> None:
        """What of it lies inside the file."""
        fitting = data[: max(0, len(self.buffer) - position)]
        self.buffer[position : position + len(fitting)] = fitting
        self.written_pages.update(covered_units(position, len(fitting), PAGE_BYTES))

    def _save_synced_sectors(self, sectors: range) -> None:
        for sector in sectors:
            if sector not in self._synced_sectors:
                forgotten = self._dropped_sectors.pop(sector, None)
                self._synced_sectors[sector] = (
                    self._sector(sector) if forgotten is None else forgotten
                )

    def _sector(self, sector: int) -> bytes:
        return bytes(self.buffer[sector * SECTOR_BYTES : (sector + 1) * SECTOR_BYTES]).ljust(
            SECTOR_BYTES, b"\0"
        )


def _zeros(size: int) -> bytearray | mmap.mmap:
    """A large file takes no memory where it was never written, and no time to make."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return bytearray(size) if size <= 1 << 16 else mmap.mmap(-1, size, flags=flags)


def covered_units(position: int, length: int, unit: int) -> range:
    return range(position // unit, -(-(position + length) // unit)) if length else range(0)


OnFault = Callable[["FaultyDisk"], None]


class PowerCut(BaseException):
    """The machine is off. Not an Exception: nothing that runs on the machine may handle it."""


@dataclass(eq=False)
class MemoryFile:
    _disk: MemoryDisk
    _path: str
    _inode: Inode
    _is_writable: bool
    _is_open: bool = True

    @property
    def size(self) -> int:
        return len(self._inode.buffer)

    def write_at(self, position: int, data: BytesLike) -> None:
        if position + len(data) > self.size:
            raise StoreError(f"{self._path}: a write past the end of the file")
        self._check("writing", self._is_writable and position >= 0)
        self._disk._call(
            f"write_at {self._path} {position}+{len(data)}",
            lambda faults: faults._fail_write(self._path, self._inode, position, data),
        )
        self._disk._write(self._path, self._inode, position, data)

    def view(self) -> memoryview:
        self._check("mapping")
        return memoryview(self._inode.buffer).toreadonly()

    def resize(self, size: int) -> None:
        self._check("resizing", self._is_writable and size >= 0)
        self._disk._call(f"resize {self._path} {size}")
        self._inode.resize(size)

    def sync(self) -> None:
        self._check("flushing")
        self._disk._call(
            f"sync {self._path}",
            lambda faults: self._inode.fail_sync(drops_pages=faults.sync_failure_drops_pages),
        )
        self._inode.sync()

    def close(self) -> None:
        self._is_open = False

    def _check(self, operation: str, is_valid: bool = True) -> None:
        if not (self._is_open and is_valid):
            raise StoreFailed(f"{operation} {self._path}: closed, read-only or a negative argument")


class MemoryLock:
    def __init__(self, inode: Inode) -> None:
        self._locked_inodes = [inode]

    def release(self) -> None:
        while self._locked_inodes:
            self._locked_inodes.pop().is_locked = False


# One operation of the journal: where it happened, and what is under a name from then on.
_DirectoryChange = tuple[set[str], dict[str, Inode | None]]


def _apply(changes: dict[str, Inode | None], names: dict[str, Inode]) -> None:
    for path, inode in changes.items():
        if inode is None:
            names.pop(path, None)
        else:
            names[path] = inode


@dataclass(kw_only=True, eq=False)
class MemoryDisk:
    """A removed file gives its room back at once, also while it is open."""

    clock: Clock = field(default_factory=ManualClock)
    capacity_bytes: int | None = None  # may be set at any time

    def __post_init__(self) -> None:
        self._names: dict[str, Inode] = {}
        self._synced_names: dict[str, Inode] = {}
        self._journal: list[_DirectoryChange] = []  # from the safe names to those of now

    def create(self, path: str, size: int) -> MemoryFile:
        self._call(f"create {path} {size}", lambda faults: faults._fail_create(path, size))
        return self._create(path, size)

    def open(self, path: str, *, writable: bool = True) -> MemoryFile:
        self._call(f"open {path}")
        return MemoryFile(self, path, self._file(path, "opening"), writable)

    def names(self, path: str) -> list[str]:
        below = path + "/" if path else ""
        inside = [name[len(below) :] for name in self._names if name.startswith(below)]
        return sorted(name for name in inside if name and "/" not in name)

    def exists(self, path: str) -> bool:
        return path in self._names

    def rename(self, old: str, new: str) -> None:
        self._call(f"rename {old} {new}")
        inode = self._file(old, "renaming")
        if self._is_directory(new) or not self._is_directory(parent_directory(new)):
            raise StoreFailed(f"renaming {old} to {new}: it is a directory, or has none")
        if old != new:
            self._change({old: None, new: inode})

    def remove(self, path: str) -> None:
        self._call(f"remove {path}")
        if self._inode(path, "removing").is_directory and self.names(path):
            raise StoreFailed(f"removing {path}: Directory not empty")
        self._change({path: None})

    def sync_directory(self, path: str) -> None:
        self._call(f"sync_directory {path or '.'}")
        if not self._is_directory(path):
            raise StoreFailed(f"flushing directory {path or '.'}: No such directory")
        self._commit(path)

    def modified_ms(self, path: str) -> int:
        return self._inode(path, "looking at").modified_ms

    def usage(self) -> DiskUsage:
        total = 1 << 40 if self.capacity_bytes is None else self.capacity_bytes
        used = sum(len(inode.written_pages) for inode in self._names.values()) * PAGE_BYTES
        return DiskUsage(total_bytes=total, free_bytes=max(0, total - used))

    def lock(self, path: str, content: bytes) -> MemoryLock:
        self._call(f"lock {path}")
        inode = self._get_or_create(path)
        if inode.is_locked:
            raise StoreLocked(f"{path} is locked: another broker owns this directory")
        inode.resize(len(content))
        self._write(path, inode, 0, content)
        inode.is_locked = True
        return MemoryLock(inode)

    def _call(self, operation: str, on_fault: OnFault | None = None) -> None:
        """Every call that a disk may fail begins here, and fails here if it is to."""

    def _create(self, path: str, size: int) -> MemoryFile:
        inode = self._get_or_create(path)
        inode.resize(0)  # the same file, emptied: whoever holds it sees that
        inode.resize(size)
        return MemoryFile(self, path, inode, True)

    def _inode(self, path: str, operation: str) -> Inode:
        if path not in self._names:
            raise StoreFailed(f"{operation} {path}: No such file or directory")
        return self._names[path]

    def _file(self, path: str, operation: str) -> Inode:
        if self._is_directory(path):
            raise StoreFailed(f"{operation} {path}: Is a directory")
        return self._inode(path, operation)

    def _is_directory(self, path: str) -> bool:
        return path in self._names and self._names[path].is_directory

    def _get_or_create(self, path: str) -> Inode:
        self._make_directories(parent_directory(path))
        if path not in self._names:
            self._change({path: Inode(self.clock)})
        return self._file(path, "creating")

    def _make_directories(self, path: str) -> None:
        if self._is_directory(path):
            return
        if path in self._names:
            raise StoreFailed(f"creating {path}: Not a directory")
        if path:
            self._make_directories(parent_directory(path))
        self._commit(parent_directory(path))
        self._names[path] = self._synced_names[path] = Inode(self.clock, is_directory=True)

    def _change(self, changes: dict[str, Inode | None]) -> None:
        directories = {parent_directory(path) for path in changes}
        for directory in directories:
            self._names[directory].modified_ms = self.clock.now_ms()
        # To remove a directory is also a step in it: the last, after all that emptied it.
        directories |= {path for path in changes if self._is_directory(path)}
        self._journal.append((directories, changes))
        _apply(changes, self._names)

    def _commit(self, directory: str) -> None:
        """Its steps, and whatever had to happen before them in another directory."""
        needed, later, safe = {directory}, list[_DirectoryChange](), list[_DirectoryChange]()
        for step in reversed(self._journal):
            if needed.isdisjoint(step[0]):
                later.append(step)
            else:
                needed |= step[0]
                safe.append(step)
        for _, changes in reversed(safe):
            _apply(changes, self._synced_names)
        self._journal = later[::-1]

    def _write(self, path: str, inode: Inode, position: int, data: BytesLike) -> None:
        new = [
            page
            for page in covered_units(position, len(data), PAGE_BYTES)
            if page not in inode.written_pages
        ]
        free = self.usage().free_bytes // PAGE_BYTES
        room = len(data) if len(new) <= free else max(0, new[free] * PAGE_BYTES - position)
        inode.write(position, data[:room])
        if room < len(data):
            raise StoreFull(f"writing {path}: No space left on device")


@dataclass(kw_only=True, eq=False)
class FaultyDisk(MemoryDisk):
    """Calls are counted from 1. What is to happen at which call may be set at any time."""

    seed: int = 0
    fail_at: int | None = None  # this one call
    fail_from: int | None = None  # this call and all later ones
    error: type[StoreError] = StoreFailed
    sync_failure_drops_pages: bool = True
    power_cut_at: int | None = None  # PowerCut, and nothing works any more

    def __post_init__(self) -> None:
        super().__post_init__()
        self.calls = 0
        self.trace: list[str] = []
        self._rng = Random(self.seed)

    def power_cut(self, rng: Random, survival: Survival = "mixed") -> FaultyDisk:
        """The disk that the machine finds when it is on again. This one stays as it is."""
        cut = CrashOutcome(rng, survival)
        names = dict(self._synced_names)
        ended: set[str] = set()
        for directories, changes in self._journal:
            if ended.isdisjoint(directories) and cut.is_kept():
                _apply(changes, names)
            else:
                ended |= directories
        found = FaultyDisk(clock=self.clock, capacity_bytes=self.capacity_bytes)
        found._names = {path: inode.after_power_cut(cut) for path, inode in names.items()}
        found._synced_names = dict(found._names)
        return found

    def _call(self, operation: str, on_fault: OnFault | None = None) -> None:
        if self.power_cut_at is not None and self.calls >= self.power_cut_at:
            raise PowerCut(operation)
        self.calls += 1
        self.trace.append(operation)
        if self.calls == self.power_cut_at:
            fault: BaseException = PowerCut(operation)
        elif self.calls == self.fail_at or self.calls >= (self.fail_from or self.calls + 1):
            fault = self.error(f"{operation}: made to fail")
        else:
            return
        self.trace[-1] += f" -> {type(fault).__name__}"
        if on_fault is not None:
            with contextlib.suppress(StoreError):  # from a disk that is full as well
                on_fault(self)
        raise fault

    def _fail_write(self, path: str, inode: Inode, position: int, data: BytesLike) -> None:
        """Some of it is done: up to any byte, or up to the end of a sector."""
        end = position + self._rng.randint(0, len(data))
        end -= self._rng.choice((0, end % SECTOR_BYTES))
        self._write(path, inode, position, data[: max(0, end - position)])

    def _fail_create(self, path: str, size: int) -> None:
        done = None if self.calls == self.power_cut_at else self._rng.choice((None, 0, size))
        if done is not None:
            self._create(path, done)
