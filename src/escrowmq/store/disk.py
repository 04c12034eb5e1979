"""The only file calls of the store, behind a protocol with few verbs.

Paths are relative, with forward slashes, below the root that the disk was opened with. A file
has a fixed length from its creation on (the unwritten part reads as zeros and takes no room),
is written with `write_at` and read through one `view` that shows every later write.

What a power cut may undo, and what makes it safe:
  bytes written, length changed    until `File.sync`
  a file created, renamed, removed until `Disk.sync_directory` of its directory

Writes go through `pwrite`, never through the map: a full disk must be an error, and a store into
a map of a sparse file would be a signal that ends the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from escrowmq.errors import StoreError, StoreFailed, StoreFull, StoreLocked

BytesLike = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """How full the file system below a disk is."""

    total_bytes: int
    free_bytes: int

    @property
    def used_ratio(self) -> float:
        return 1 - self.free_bytes / self.total_bytes if self.total_bytes else 0.0


class File(Protocol):
    @property
    def size(self) -> int: ...
    def write_at(self, position: int, data: BytesLike) -> None:
        """All of it, or an error; after an error any part may have been written."""

    def view(self) -> memoryview:
        """The whole file, read-only. Not to be used any more after `resize`."""

    def resize(self, size: int) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class Lock(Protocol):
    def release(self) -> None: ...


class Disk(Protocol):
    def create(self, path: str, size: int) -> File:
        """A file of `size` zeros under that name, whatever was there; directories are made."""

    def open(self, path: str, *, writable: bool = True) -> File: ...
    def names(self, path: str) -> list[str]:
        """What a directory holds, sorted; nothing if there is no such directory."""

    def exists(self, path: str) -> bool: ...
    def rename(self, old: str, new: str) -> None: ...
    def remove(self, path: str) -> None:
        """A file or an empty directory."""

    def sync_directory(self, path: str) -> None: ...
    def modified_ms(self, path: str) -> int: ...
    def usage(self) -> DiskUsage: ...
    def lock(self, path: str, content: bytes) -> Lock:
        """Own a directory: `path` becomes a locked file with that content."""


def read_file(disk: Disk, path: str) -> bytes | None:
    """A small file, whole; None if there is none."""
    if not disk.exists(path):
        return None
    file = disk.open(path, writable=False)
    try:
        return bytes(file.view())
    finally:
        file.close()


def write_file(disk: Disk, path: str, data: bytes) -> None:
    """A small file, durable but not atomic: a crash may leave any part of it."""
    _write_synced(disk, path, data)
    disk.sync_directory(parent_directory(path))


def replace_file(disk: Disk, path: str, data: bytes) -> None:
    """A small file, durable and atomic: after a crash it is the old one or the new one, whole."""
    temporary = path + ".tmp"
    _write_synced(disk, temporary, data)
    disk.rename(temporary, path)
    disk.sync_directory(parent_directory(path))


def _write_synced(disk: Disk, path: str, data: bytes) -> None:
    """Its bytes are safe then; its name is not yet."""
    file = disk.create(path, len(data))
    try:
        if data:
            file.write_at(0, data)
        file.sync()
    finally:
        file.close()


def remove_file(disk: Disk, path: str) -> None:
    """Gone for good, also after a power cut. Not there is fine."""
    if disk.exists(path):
        disk.remove(path)
        disk.sync_directory(parent_directory(path))


def parent_directory(path: str) -> str:
    return path.rpartition("/")[0]


class ViewCache:
    """Views of files that are read now and then: the ones used last stay open, so that a
    thousand queues do not need a thousand descriptors."""

    def __init__(self, disk: Disk, *, files_max: int = 512) -> None:
        self._disk = disk
        self._files_max = files_max
        self._files: OrderedDict[str, File] = OrderedDict()

    def view(self, path: str) -> memoryview:
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = self._disk.open(path, writable=False)
            if len(self._files) > self._files_max:
                self._files.popitem(last=False)[1].close()
        else:
            self._files.move_to_end(path)
        return file.view()

    def discard(self, path: str) -> None:
        """Before a file is resized or removed."""
        if path in self._files:
            self._files.pop(path).close()

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()


@contextlib.contextmanager
def _translate_errors(action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(f"{action}: {error.strerror}") from error
        raise StoreFailed(f"{action}: {error.strerror}") from error


class RealFile:
    def __init__(self, path: str, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        self._view: memoryview | None = None

    @property
    def size(self) -> int:
        return self._size

    def write_at(self, position: int, data: BytesLike) -> None:
        if position + len(data) > self._size:
            raise StoreError(f"{self._path}: a write past the end of the file")
        try:
            written = os.pwrite(self._descriptor, data, position)
        except OSError as error:
            raise _write_error(self._path, error) from error
        while written < len(data):  # a signal, or a disk that is nearly full
            with _translate_errors(f"writing {self._path}"):
                written += os.pwrite(
                    self._descriptor, memoryview(data)[written:], position + written
                )

    def view(self) -> memoryview:
        if self._view is None:
            if self._descriptor < 0:
                raise StoreFailed(f"mapping {self._path}: it is closed")
            if self._size == 0:
                return memoryview(b"")
            with _translate_errors(f"mapping {self._path}"):
                self._view = memoryview(
                    mmap.mmap(self._descriptor, self._size, prot=mmap.PROT_READ)
                )
        return self._view

    def resize(self, size: int) -> None:
        self._view = None
        with _translate_errors(f"resizing {self._path}"):
            os.ftruncate(self._descriptor, size)
        self._size = size

    def sync(self) -> None:
        if self._descriptor < 0:
            raise StoreFailed(f"flushing {self._path}: it is closed")
        with _translate_errors(f"flushing {self._path}"):
            os.fdatasync(self._descriptor)

    def close(self) -> None:
        # The map is not closed by hand: slices of it may still be on their way to a socket.
        # It goes when the last of them goes.
        self._view = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _write_error(path: str, error: OSError) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(f"writing {path}: {error.strerror}")
    return StoreFailed(f"writing {path}: {error.strerror}")


_FLOCK = struct.Struct("@hhqqi4x")  # Linux's struct flock: type, whence, start, length, pid


def _lock_first_byte(descriptor: int) -> None:
    """What the Java broker locks, so that it and we cannot own one directory together either."""
    if hasattr(fcntl, "F_OFD_SETLK"):
        # Unlike a plain POSIX lock this one belongs to the open file, not to the process: a
        # second store in this process is refused too, and closing another copy does not drop it.
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    else:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)


def _unlock_first_byte(descriptor: int) -> None:
    """Closing alone would leave the lock with a child that was forked meanwhile."""
    if hasattr(fcntl, "F_OFD_SETLK"):
        request = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 1, 0)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    else:
        fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, 0)


class RealLock:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        if self._descriptor >= 0:
            _unlock_first_byte(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


def _sync_directory(absolute_path: str) -> None:
    descriptor = os.open(absolute_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RealDisk:
    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(root)
        self._durable_directories: set[str] = set()  # directories that are known to be durable

    def __repr__(self) -> str:
        return f"RealDisk({self._root!r})"

    def create(self, path: str, size: int) -> RealFile:
        full = self._absolute_path(path)
        with _translate_errors(f"creating {path}"):
            self._make_directories(parent_directory(path))
            descriptor = os.open(full, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                os.ftruncate(descriptor, size)
            except OSError:
                os.close(descriptor)
                raise
        return RealFile(path, descriptor)

    def open(self, path: str, *, writable: bool = True) -> RealFile:
        with _translate_errors(f"opening {path}"):
            flags = os.O_CLOEXEC | (os.O_RDWR if writable else os.O_RDONLY)
            return RealFile(path, os.open(self._absolute_path(path), flags))

    def names(self, path: str) -> list[str]:
        with _translate_errors(f"listing {path or '.'}"):
            try:
                return sorted(os.listdir(self._absolute_path(path)))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def exists(self, path: str) -> bool:
        with _translate_errors(f"looking at {path}"):
            try:
                os.stat(self._absolute_path(path))
            except (FileNotFoundError, NotADirectoryError):
                return False
        return True

    def rename(self, old: str, new: str) -> None:
        with _translate_errors(f"renaming {old} to {new}"):
            os.rename(self._absolute_path(old), self._absolute_path(new))

    def remove(self, path: str) -> None:
        full = self._absolute_path(path)
        with _translate_errors(f"removing {path}"):
            if os.path.isdir(full):
                os.rmdir(full)
            else:
                os.unlink(full)

    def sync_directory(self, path: str) -> None:
        with _translate_errors(f"flushing directory {path or '.'}"):
            _sync_directory(self._absolute_path(path))

    def modified_ms(self, path: str) -> int:
        with _translate_errors(f"looking at {path}"):
            return os.stat(self._absolute_path(path)).st_mtime_ns // 1_000_000

    def usage(self) -> DiskUsage:
        with _translate_errors("looking at the file system"):
            found = os.statvfs(self._root)
        # Of what an ordinary user may fill: the share kept for root is neither used nor free.
        usable = found.f_blocks - found.f_bfree + found.f_bavail
        return DiskUsage(
            total_bytes=usable * found.f_frsize, free_bytes=found.f_bavail * found.f_frsize
        )

    def lock(self, path: str, content: bytes) -> RealLock:
        full = self._absolute_path(path)
        with _translate_errors(f"locking {path}"):
            self._make_directories(parent_directory(path))
            descriptor = os.open(full, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                _lock_first_byte(descriptor)
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, content, 0)
            except BlockingIOError as error:
                os.close(descriptor)
                raise StoreLocked(f"{full} is locked: another broker owns it") from error
            except OSError:
                os.close(descriptor)
                raise
        return RealLock(descriptor)

    def _absolute_path(self, path: str) -> str:
        return os.path.join(self._root, path) if path else self._root

    def _make_directories(self, path: str) -> None:
        """Each is made durable in its parent: a synced file that cannot be reached is lost."""
        full = self._absolute_path(path)
        if path in self._durable_directories and os.path.isdir(full):
            return
        if path:
            self._make_directories(parent_directory(path))
            with contextlib.suppress(FileExistsError):
                os.mkdir(full)
            self.sync_directory(parent_directory(path))
        elif not os.path.isdir(full):
            os.makedirs(full)
            _sync_directory(os.path.dirname(full))
        self._durable_directories.add(path)
