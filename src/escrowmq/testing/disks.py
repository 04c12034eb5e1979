"""Disks in memory: one that works, and one that fails or loses power at a chosen call.

    disk = FaultyDisk(power_cut_at=17)      # the 17th call raises PowerCut
    ...
    disk = disk.power_cut(Random(seed))     # what the machine finds when it is on again

Both know what a power cut may undo:

- A file: every sector and every length that has changed since its last sync. A cut leaves each of
  these sectors old, new or torn (new up to some byte, old from there), and one of the lengths. Only
  the survival "scrambled" mixes old and new words within a sector, which no drive should do.
- A directory: every create, rename and remove since its last sync. A cut keeps the first few of
  them: a journal loses its end, not its middle. A rename is one operation of both directories, and
  a sync of either makes it durable. A directory is durable as soon as it is created.
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
from escrowmq.errors import ReadFailed, StoreError, StoreFailed, StoreFull, StoreLocked
from escrowmq.store.disk import BytesLike, DiskUsage, parent_directory

PAGE_BYTES = 4096  # the unit in which a sparse file takes space
SECTOR_BYTES = 512  # the unit that a drive writes completely, or tears

Survival = Literal["none", "all", "mixed", "scrambled"]

OnFault = Callable[["FaultyDisk"], None]


class PowerCut(BaseException):
    """The machine has lost power. Not an Exception: no program on the machine can handle it."""


@dataclass(eq=False)
class MemoryFile:
    """An open file of a MemoryDisk."""

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
            raise StoreError(f"{self._path}: write past the end of the file")
        self._check("writing", self._is_writable and position >= 0)
        self._disk._call(
            f"write_at {self._path} {position}+{len(data)}",
            lambda faults: faults._fail_write(self._path, self._inode, position, data),
        )
        self._disk._write(self._path, self._inode, position, data)

    def read_at(self, position: int, size: int) -> bytes:
        self._check("reading", position >= 0)
        self._disk._read(f"read_at {self._path} {position}+{size}")
        data = bytes(memoryview(self._inode.buffer)[position : position + size])
        if len(data) < size:
            raise ReadFailed(f"reading {self._path}: the file ends at {position + len(data)}")
        return data

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


class MemorySyncAll:
    """Makes the content of all files durable, but no names."""

    def __init__(self, disk: MemoryDisk) -> None:
        self._disk = disk

    def run(self) -> None:
        inodes = [inode for inode in self._disk._names.values() if not inode.is_directory]

        def fail(faults: FaultyDisk) -> None:
            for inode in inodes:
                inode.fail_sync(drops_pages=faults.sync_failure_drops_pages)

        self._disk._call("sync_all", fail)
        for inode in inodes:
            inode.sync()

    def close(self) -> None: ...


# One operation of the journal: its directories, and what each changed name refers to afterwards.
_DirectoryChange = tuple[set[str], dict[str, "Inode | None"]]


def _apply(changes: dict[str, Inode | None], names: dict[str, Inode]) -> None:
    for path, inode in changes.items():
        if inode is None:
            names.pop(path, None)
        else:
            names[path] = inode


@dataclass(kw_only=True, eq=False)
class MemoryDisk:
    """A disk in memory. A removed file frees its space at once, even while it is open."""

    clock: Clock = field(default_factory=ManualClock)
    capacity_bytes: int | None = None  # may be set at any time

    def __post_init__(self) -> None:
        self._names: dict[str, Inode] = {}
        self._synced_names: dict[str, Inode] = {}
        self._journal: list[_DirectoryChange] = []  # what leads from the synced names to the names
        self._boot_number = 1

    def create(self, path: str, size: int) -> MemoryFile:
        """Create a file of `size` zeros, or replace an existing one. Directories are created."""
        self._call(f"create {path} {size}", lambda faults: faults._fail_create(path, size))
        return self._create(path, size)

    def open(self, path: str, *, writable: bool = True) -> MemoryFile:
        """Open an existing file."""
        self._call(f"open {path}")
        return MemoryFile(self, path, self._file(path, "opening"), writable)

    def names(self, path: str) -> list[str]:
        """Return the names in a directory, sorted; none if the directory does not exist."""
        prefix = path + "/" if path else ""
        relative = [name[len(prefix) :] for name in self._names if name.startswith(prefix)]
        return sorted(name for name in relative if name and "/" not in name)

    def sizes(self, path: str) -> dict[str, int]:
        """Return the names and lengths of the files in a directory."""
        prefix = path + "/" if path else ""
        return {
            name: len(self._names[prefix + name].buffer)
            for name in self.names(path)
            if not self._is_directory(prefix + name)
        }

    def size(self, path: str) -> int | None:
        """Return the length of a file; None if it does not exist."""
        return len(self._names[path].buffer) if path in self._names else None

    def exists(self, path: str) -> bool:
        """Return whether there is a file or directory."""
        return path in self._names

    def rename(self, old: str, new: str) -> None:
        """Rename a file, and replace what has the new name."""
        self._call(f"rename {old} {new}")
        inode = self._file(old, "renaming")
        if self._is_directory(new) or not self._is_directory(parent_directory(new)):
            raise StoreFailed(
                f"renaming {old} to {new}: the target is a directory, or its directory is missing"
            )
        if old != new:
            self._change({old: None, new: inode})

    def remove(self, path: str) -> None:
        """Remove a file or an empty directory."""
        self._call(f"remove {path}")
        if self._inode(path, "removing").is_directory and self.names(path):
            raise StoreFailed(f"removing {path}: Directory not empty")
        self._change({path: None})

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable."""
        self._call(f"sync_directory {path or '.'}")
        if not self._is_directory(path):
            raise StoreFailed(f"flushing directory {path or '.'}: No such directory")
        self._commit(path)

    def begin_sync_all(self) -> MemorySyncAll:
        """Begin to make all files durable."""
        return MemorySyncAll(self)

    def modified_ms(self, path: str) -> int:
        """Return when a file was written last."""
        return self._inode(path, "reading the status of").modified_ms

    def usage(self) -> DiskUsage:
        """Return how full the disk is."""
        total = 1 << 40 if self.capacity_bytes is None else self.capacity_bytes
        used = sum(len(inode.written_pages) for inode in self._names.values()) * PAGE_BYTES
        return DiskUsage(total_bytes=total, free_bytes=max(0, total - used))

    def boot_id(self) -> str:
        """Return a text that changes whenever the machine starts."""
        return f"boot {self._boot_number}"

    def lock(self, path: str, content: bytes) -> MemoryLock:
        """Lock a directory by a locked file with this content. Raises StoreLocked."""
        self._call(f"lock {path}")
        inode = self._get_or_create(path)
        if inode.is_locked:
            raise StoreLocked(f"{path} is locked: another broker uses this directory")
        inode.resize(len(content))
        self._write(path, inode, 0, content)
        inode.is_locked = True
        return MemoryLock(inode)

    def _call(self, operation: str, on_fault: OnFault | None = None) -> None:
        """Begin an operation that can fail. FaultyDisk raises here."""

    def _read(self, operation: str) -> None:
        """Begin a read. FaultyDisk raises here."""

    def _create(self, path: str, size: int) -> MemoryFile:
        inode = self._get_or_create(path)
        inode.resize(0)  # the same file, emptied: open files see that
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
        # Removing a directory also counts as an operation of that directory. It comes after all
        # operations that have emptied it.
        directories |= {path for path in changes if self._is_directory(path)}
        self._journal.append((directories, changes))
        _apply(changes, self._names)

    def _commit(self, directory: str) -> None:
        """Make the operations of a directory durable, with those of others that they depend on."""
        needed = {directory}
        remaining: list[_DirectoryChange] = []
        committed: list[_DirectoryChange] = []
        for operation in reversed(self._journal):
            if needed.isdisjoint(operation[0]):
                remaining.append(operation)
            else:
                needed |= operation[0]
                committed.append(operation)
        for _, changes in reversed(committed):
            _apply(changes, self._synced_names)
        self._journal = remaining[::-1]

    def _write(self, path: str, inode: Inode, position: int, data: BytesLike) -> None:
        if self.capacity_bytes is None:  # counting the pages of all files takes longer than writing
            inode.write(position, data)
            return
        new_pages = [
            page
            for page in covered_units(position, len(data), PAGE_BYTES)
            if page not in inode.written_pages
        ]
        free_pages = self.usage().free_bytes // PAGE_BYTES
        fitting_bytes = len(data)
        if len(new_pages) > free_pages:
            fitting_bytes = max(0, new_pages[free_pages] * PAGE_BYTES - position)
        inode.write(position, data[:fitting_bytes])
        if fitting_bytes < len(data):
            raise StoreFull(f"writing {path}: No space left on device")


@dataclass(kw_only=True, eq=False)
class FaultyDisk(MemoryDisk):
    """A disk that fails at chosen calls.

    Calls that change something are counted from 1 (`calls`) and recorded (`trace`). Reads have a
    count of their own (`reads`). All fields may be changed at any time.
    """

    seed: int = 0
    fail_at: int | None = None  # this call alone
    fail_from: int | None = None  # this call and all later ones
    error: type[Exception] = StoreFailed  # also MemoryError
    sync_failure_drops_pages: bool = True
    power_cut_at: int | None = None  # this call and all later ones raise PowerCut
    fail_read_at: int | None = None  # this read alone
    bad_path: str | None = None  # every read of this file that touches `bad_range` fails
    bad_range: range = field(default_factory=lambda: range(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.calls = 0
        self.reads = 0
        self.trace: list[str] = []
        self._rng = Random(self.seed)

    def power_cut(self, rng: Random, survival: Survival = "mixed") -> FaultyDisk:
        """Return the disk that the machine finds when it is on again. This one stays as it is."""
        outcome = CrashOutcome(rng, survival)
        names = dict(self._synced_names)
        # Once an operation of a directory is lost, all later ones of that directory are lost too.
        cut_directories: set[str] = set()
        for directories, changes in self._journal:
            if cut_directories.isdisjoint(directories) and outcome.is_kept():
                _apply(changes, names)
            else:
                cut_directories |= directories
        survivor = FaultyDisk(clock=self.clock, capacity_bytes=self.capacity_bytes)
        survivor._names = {path: inode.after_power_cut(outcome) for path, inode in names.items()}
        survivor._synced_names = dict(survivor._names)
        survivor._boot_number = self._boot_number + 1
        return survivor

    def after_kill(self) -> FaultyDisk:
        """Return a copy as the next process finds it if only the process is killed.

        Everything that was written is there. This disk stays as it is.
        """
        survivor = self.power_cut(Random(0), "all")
        survivor._boot_number = self._boot_number
        return survivor

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
            with contextlib.suppress(StoreError):  # the disk may be full as well
                on_fault(self)
        raise fault

    def _read(self, operation: str) -> None:
        self.reads += 1
        if self.reads == self.fail_read_at or self._is_bad(operation):
            raise ReadFailed(f"{operation}: Input/output error, made to fail")

    def _is_bad(self, operation: str) -> bool:
        if self.bad_path is None:
            return False
        _, path, extent = operation.split(" ")
        begin, size = map(int, extent.split("+"))
        return path == self.bad_path and (
            begin < self.bad_range.stop and self.bad_range.start < begin + size
        )

    def _fail_write(self, path: str, inode: Inode, position: int, data: BytesLike) -> None:
        """Write a part of the data: up to any byte, or up to the end of a sector."""
        end = position + self._rng.randint(0, len(data))
        end -= self._rng.choice((0, end % SECTOR_BYTES))
        self._write(path, inode, position, data[: max(0, end - position)])

    def _fail_create(self, path: str, size: int) -> None:
        """Create nothing, an empty file, or the complete file."""
        is_cut = self.calls == self.power_cut_at
        created_bytes = None if is_cut else self._rng.choice((None, 0, size))
        if created_bytes is not None:
            self._create(path, created_bytes)


# --- files and power cuts ------------------------------------------------------------------------

# "mixed" often keeps or loses nearly everything: one sector that differs from all others is the
# hardest to notice.
_SURVIVAL_RATIOS: dict[Survival, list[float]] = {
    "none": [0],
    "all": [1],
    "mixed": [0.1, 0.5, 0.9],
    "scrambled": [0.1, 0.5, 0.9],
}


class CrashOutcome:
    """Decides what one power cut leaves of everything that was not durable."""

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
            end = self._rng.randint(0, SECTOR_BYTES)
            return new[:end] + old[end:]
        words = ((self._rng.choice((old, new)), begin) for begin in range(0, SECTOR_BYTES, 8))
        return b"".join(source[begin : begin + 8] for source, begin in words)


class Inode:
    """A file or a directory. A removed file lives on as long as it is open."""

    def __init__(self, clock: Clock, *, is_directory: bool = False) -> None:
        self._clock = clock
        self.is_directory = is_directory
        self.buffer = _zeros(0)
        self.written_pages: set[int] = set()
        self.modified_ms = clock.now_ms()
        self.is_locked = False
        self._sizes = [0]  # the durable size, then every size since
        # The durable content of each sector that has changed since the last sync.
        self._synced_sectors: dict[int, bytes] = {}
        # The same for sectors that no later sync will write, see `fail_sync`.
        self._dropped_sectors: dict[int, bytes] = {}
        # Sectors that each truncation has removed since the last sync, with the index of its size.
        # A power cut before the truncation is durable may bring them back.
        self._truncations: list[tuple[int, dict[int, bytes]]] = []

    def write(self, position: int, data: BytesLike) -> None:
        self._save_synced_sectors(covered_units(position, len(data), SECTOR_BYTES))
        self._put(position, data)
        self.modified_ms = self._clock.now_ms()

    def resize(self, size: int) -> None:
        if size < len(self.buffer):
            removed = {
                sector: self._sector(sector)
                for sector in self._synced_sectors
                if (sector + 1) * SECTOR_BYTES > size
            }
            self._truncations.append((len(self._sizes), removed))
        for page in [page for page in self.written_pages if (page + 1) * PAGE_BYTES > size]:
            self._save_synced_sectors(covered_units(page * PAGE_BYTES, PAGE_BYTES, SECTOR_BYTES))
        old_buffer, self.buffer = self.buffer, _zeros(size)
        pages, self.written_pages = self.written_pages, set()
        for page in sorted(pages):  # copy only these: most of a large file was never written
            self._put(page * PAGE_BYTES, old_buffer[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])
        if size != self._sizes[-1]:
            self._sizes.append(size)
        self.modified_ms = self._clock.now_ms()

    def sync(self) -> None:
        self._synced_sectors.clear()
        self._truncations.clear()
        del self._sizes[:-1]

    def fail_sync(self, *, drops_pages: bool) -> None:
        """Fail like Linux: pages of a failed fsync count as clean, so no later one writes them."""
        if drops_pages:
            self._dropped_sectors |= self._synced_sectors
            self._synced_sectors.clear()

    def after_power_cut(self, outcome: CrashOutcome) -> Inode:
        """Return the file as it is after a power cut. This one stays as it is."""
        survivor = Inode(self._clock, is_directory=self.is_directory)
        later_sizes = itertools.takewhile(lambda size: outcome.is_kept(), self._sizes[1:])
        sizes = [self._sizes[0], *later_sizes]
        survivor.resize(sizes[-1])
        for page in sorted(self.written_pages):
            content = self.buffer[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
            survivor._put(page * PAGE_BYTES, content)
        restored: dict[int, bytes] = {}
        for size_index, removed in reversed(self._truncations):
            if size_index >= len(sizes):
                restored |= removed
        for sector, old in (self._synced_sectors | self._dropped_sectors).items():
            new = restored.get(sector) or self._sector(sector)
            survivor._put(sector * SECTOR_BYTES, outcome.surviving_sector(old, new))
        survivor.sync()
        survivor.modified_ms = self.modified_ms
        return survivor

    def _put(self, position: int, data: BytesLike) -> None:
        """Copy the part of `data` that fits into the file."""
        fitting = data[: max(0, len(self.buffer) - position)]
        self.buffer[position : position + len(fitting)] = fitting
        self.written_pages.update(covered_units(position, len(fitting), PAGE_BYTES))

    def _save_synced_sectors(self, sectors: range) -> None:
        for sector in sectors:
            if sector not in self._synced_sectors:
                # A dropped sector that is written again can be synced again. Its durable content is
                # still the one from before the failed sync.
                dropped = self._dropped_sectors.pop(sector, None)
                self._synced_sectors[sector] = self._sector(sector) if dropped is None else dropped

    def _sector(self, sector: int) -> bytes:
        return bytes(self.buffer[sector * SECTOR_BYTES : (sector + 1) * SECTOR_BYTES]).ljust(
            SECTOR_BYTES, b"\0"
        )


def _zeros(size: int) -> bytearray | mmap.mmap:
    """Return a buffer of zeros. A large one takes no memory and no time where it is not written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return bytearray(size) if size <= 1 << 16 else mmap.mmap(-1, size, flags=flags)


def covered_units(position: int, length: int, unit: int) -> range:
    """Return the numbers of the units (sectors or pages) that a range of bytes touches."""
    return range(position // unit, -(-(position + length) // unit)) if length else range(0)
