"""The only file calls of the store, behind a protocol with few operations.

Paths are relative to the root of the disk and use forward slashes. A file has a fixed length from
its creation on; the part that is not written yet reads as zeros and takes no space. It is written
with `write_at` and read with `read_at`.

What a power cut can undo, and what prevents that:

    bytes written, length changed        until `File.sync`
    file created, renamed or removed     until `Disk.sync_directory` of its directory

What an error of the system means for the caller:

    ENOSPC, EDQUOT                            StoreFull         refused; try again later
    EMFILE, ENFILE, ENOMEM, EAGAIN, EBUSY,    StoreUnavailable  refused; try again soon
    EINTR, ENOBUFS
    any other error, and any error of a       StoreFailed       unknown what is on the disk
    flush except a full disk

No file is mapped into memory. A bad sector, a file that was cut short and a full disk are errors of
`pread` and `pwrite`, which concern one read or one write. Under a memory map each of them would
raise SIGBUS and end the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import re
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from escrowmq.errors import (
    ReadFailed,
    StoreError,
    StoreFailed,
    StoreFull,
    StoreLocked,
    StoreUnavailable,
)

BytesLike = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """How full the file system of a disk is."""

    total_bytes: int
    free_bytes: int

    @property
    def used_ratio(self) -> float:
        return 1 - self.free_bytes / self.total_bytes if self.total_bytes else 0.0


class File(Protocol):
    @property
    def size(self) -> int: ...
    def write_at(self, position: int, data: BytesLike) -> None:
        """Write all of `data`. Raises StoreError; any part may have been written then."""

    def read_at(self, position: int, size: int) -> bytes:
        """Return `size` bytes. Raises ReadFailed if the disk does not deliver all of them.

        May be called in any thread.
        """

    def resize(self, size: int) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class Lock(Protocol):
    def release(self) -> None: ...


class SyncAll(Protocol):
    """Makes durable what was written to any file since it was created."""

    def run(self) -> None: ...
    def close(self) -> None: ...


class Disk(Protocol):
    def create(self, path: str, size: int) -> File:
        """Create a file of `size` zeros, or replace an existing one. Directories are created."""

    def open(self, path: str, *, writable: bool = True) -> File: ...
    def names(self, path: str) -> list[str]:
        """Return the names in a directory, sorted; none if the directory does not exist."""

    def sizes(self, path: str) -> dict[str, int]:
        """Return the names and lengths of the files in a directory, without directories in it."""

    def size(self, path: str) -> int | None:
        """Return the length of a file, without opening it; None if it does not exist."""

    def exists(self, path: str) -> bool: ...
    def rename(self, old: str, new: str) -> None: ...
    def remove(self, path: str) -> None:
        """Remove a file or an empty directory."""

    def sync_directory(self, path: str) -> None: ...
    def begin_sync_all(self) -> SyncAll | None:
        """Begin to make many files durable at once. Return None if the system cannot do that.

        It is about the content of files; new names need `sync_directory`.
        """

    def modified_ms(self, path: str) -> int: ...
    def usage(self) -> DiskUsage: ...
    def boot_id(self) -> str:
        """Return a text that changes whenever the machine starts; empty if it is unknown.

        While it stays the same, whatever was written can be read, synced or not.
        """

    def lock(self, path: str, content: bytes) -> Lock:
        """Lock the directory by a locked file with this content. Raises StoreLocked."""


def read_file(disk: Disk, path: str) -> bytes | None:
    """Return the content of a small file; None if it does not exist. Raises StoreError."""
    if not disk.exists(path):
        return None
    file = disk.open(path, writable=False)
    try:
        return file.read_at(0, file.size)
    finally:
        file.close()


def write_file(disk: Disk, path: str, data: bytes) -> None:
    """Write a small file, durably but not atomically: a crash may leave any part of it."""
    _write_synced(disk, path, data)
    disk.sync_directory(parent_directory(path))


def replace_file(disk: Disk, path: str, data: bytes) -> None:
    """Replace a small file, durably and atomically: a crash leaves the old or the new content.

    The order matters: the new bytes are synced before the rename, or a power cut could leave the
    new name without bytes.
    """
    temporary = path + ".tmp"
    _write_synced(disk, temporary, data)
    disk.rename(temporary, path)
    disk.sync_directory(parent_directory(path))


def _write_synced(disk: Disk, path: str, data: bytes) -> None:
    """Write a file and sync its bytes. Its directory entry is not durable yet."""
    file = disk.create(path, len(data))
    try:
        if data:
            file.write_at(0, data)
        file.sync()
    finally:
        file.close()


def remove_file(disk: Disk, path: str) -> None:
    """Remove a file, durably. A missing file is no error."""
    if disk.exists(path):
        disk.remove(path)
        disk.sync_directory(parent_directory(path))


def parent_directory(path: str) -> str:
    return path.rpartition("/")[0]


class OpenFiles:
    """Files that are read from time to time.

    The files that were used last stay open, so that thousands of queues do not need thousands of
    file descriptors.
    """

    def __init__(self, disk: Disk, *, files_max: int = 512) -> None:
        self._disk = disk
        self._files_max = files_max
        self._files: OrderedDict[str, File] = OrderedDict()

    def read(self, path: str, position: int, size: int) -> bytes:
        """Return bytes of a file. Raises StoreError."""
        return self._file(path).read_at(position, size)

    def size(self, path: str) -> int:
        return self._file(path).size

    def discard(self, path: str) -> None:
        """Close a file. Call this before the file is resized or removed."""
        if path in self._files:
            self._files.pop(path).close()

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def _file(self, path: str) -> File:
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = self._disk.open(path, writable=False)
            if len(self._files) > self._files_max:
                self._files.popitem(last=False)[1].close()
        else:
            self._files.move_to_end(path)
        return file


_BUFFER_BYTES: Final = 1 << 18
_PAGE_BYTES: Final = 4096


def read_what_is_left(file: File, position: int, size: int) -> bytes:
    """Return bytes of a file, with 0xFF for pages that cannot be read; fewer at its end.

    Zeros would not do: they are what a file has where it was never written.
    """
    size = max(0, min(size, file.size - position))
    try:
        return file.read_at(position, size)
    except ReadFailed:
        return b"".join(_read_pages(file, position, position + size))


def _read_pages(file: File, begin: int, end: int) -> Iterator[bytes]:
    while begin < end:
        page_end = min(end, begin - begin % _PAGE_BYTES + _PAGE_BYTES)
        try:
            yield file.read_at(begin, page_end - begin)
        except ReadFailed:
            yield b"\xff" * (page_end - begin)
        begin = page_end


class BufferedFiles:
    """Many small reads near each other, with few calls. For programs that check or copy files.

    What is in the buffer is not read again, so a file must not change meanwhile. Pages that cannot
    be read are 0xFF, see `read_what_is_left`.
    """

    def __init__(self, disk: Disk, *, files_max: int = 512) -> None:
        self._disk = disk
        self._files_max = files_max
        self._files: OrderedDict[str, tuple[File, int, bytes]] = OrderedDict()

    def size(self, path: str) -> int:
        return self._open(path)[0].size

    def read(self, path: str, position: int, size: int) -> bytes:
        """Return at most `size` bytes, fewer at the end of the file."""
        file, begin, buffer = self._open(path)
        size = max(0, min(size, file.size - position))
        if not begin <= position <= position + size <= begin + len(buffer):
            begin = position
            buffer = read_what_is_left(file, position, max(size, _BUFFER_BYTES))
            if size < _BUFFER_BYTES:  # what is longer is probably read only once
                self._files[path] = file, begin, buffer
        return buffer[position - begin : position - begin + size]

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1][0].close()

    def _open(self, path: str) -> tuple[File, int, bytes]:
        found = self._files.get(path)
        if found is None:
            found = self._disk.open(path, writable=False), 0, b""
            self._files[path] = found
            if len(self._files) > self._files_max:
                self._files.popitem(last=False)[1][0].close()
        else:
            self._files.move_to_end(path)
        return found


# --- the real disk -------------------------------------------------------------------------------


_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_PASSING: Final = (
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS),
    *(errno.EAGAIN, errno.EBUSY, errno.EINTR),
)


@contextlib.contextmanager
def _translate_errors(action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _store_error(action, error) from error


def _store_error(action: str, error: OSError) -> StoreError:
    text = f"{action}: {error.strerror}"
    if error.errno in _FULL:
        return StoreFull(text)
    return StoreUnavailable(text) if error.errno in _PASSING else StoreFailed(text)


@contextlib.contextmanager
def _translate_flush_errors(action: str) -> Iterator[None]:
    """Translate the errors of fsync. None but a full disk passes by itself.

    The kernel may have dropped the pages that it could not write, and the next fsync would report
    success.
    """
    try:
        yield
    except OSError as error:
        kind = StoreFull if error.errno in _FULL else StoreFailed
        raise kind(f"{action}: {error.strerror}") from error


class RealFile:
    def __init__(self, path: str, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size

    @property
    def size(self) -> int:
        return self._size

    def write_at(self, position: int, data: BytesLike) -> None:
        if position + len(data) > self._size:
            raise StoreError(f"{self._path}: write past the end of the file")
        # Not `_translate_errors`: every append comes here, and a context manager costs more.
        try:
            written = os.pwrite(self._descriptor, data, position)
        except OSError as error:
            raise _store_error(f"writing {self._path}", error) from error
        while written < len(data):  # interrupted by a signal, or the disk is nearly full
            with _translate_errors(f"writing {self._path}"):
                written += os.pwrite(
                    self._descriptor, memoryview(data)[written:], position + written
                )

    def read_at(self, position: int, size: int) -> bytes:
        # Not `_translate_errors`: every pull comes here, and a context manager costs more.
        try:
            data = os.pread(self._descriptor, size, position)
            while len(data) < size:
                more = os.pread(self._descriptor, size - len(data), position + len(data))
                if not more:
                    raise ReadFailed(
                        f"reading {self._path}: the file ends at {position + len(data)}, "
                        f"before {position + size}"
                    )
                data += more
        except OSError as error:
            raise ReadFailed(
                f"reading {self._path} at {position}: {error.strerror or error}"
            ) from error
        return data

    def resize(self, size: int) -> None:
        with _translate_errors(f"resizing {self._path}"):
            os.ftruncate(self._descriptor, size)
        self._size = size

    def sync(self) -> None:
        if self._descriptor < 0:
            raise StoreFailed(f"flushing {self._path}: the file is closed")
        with _translate_flush_errors(f"flushing {self._path}"):
            os.fdatasync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


_FLOCK = struct.Struct("@hhqqi4x")  # Linux's struct flock: type, whence, start, length, pid


def _lock_first_byte(descriptor: int) -> None:
    """Lock what the Java broker locks, so that it cannot own the directory at the same time."""
    if hasattr(fcntl, "F_OFD_SETLK"):
        # Unlike a plain POSIX lock, this lock belongs to the open file, not to the process. A
        # second store in the same process is refused too, and closing another descriptor of the
        # file does not release the lock.
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    else:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)


def _unlock_first_byte(descriptor: int) -> None:
    """Release the lock. Closing the file is not enough: a forked child would keep the lock."""
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
        with _translate_flush_errors(f"flushing directory {absolute_path}"):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RealSyncAll:
    """Flushes a whole file system. Its descriptor knows of failed writes since it was opened."""

    def __init__(self, descriptor: int, flush: Callable[[int], int]) -> None:
        self._descriptor = descriptor
        self._flush = flush

    def run(self) -> None:
        with _translate_flush_errors("flushing all files"):
            if self._flush(self._descriptor):
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error))

    def close(self) -> None:
        os.close(self._descriptor)


def _find_syncfs() -> Callable[[int], int] | None:
    """Return syncfs() of the system; None if it does not report failed writes: before Linux 5.8."""
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    if sys.platform != "linux" or version is None:
        return None
    if (int(version[1]), int(version[2])) < (5, 8):
        return None
    function: Callable[[int], int] | None = getattr(
        ctypes.CDLL(None, use_errno=True), "syncfs", None
    )
    return function


_SYNCFS: Final = _find_syncfs()

_BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"


class RealDisk:
    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(root)
        self._durable_directories: set[str] = set()

    def __repr__(self) -> str:
        return f"RealDisk({self._root!r})"

    def create(self, path: str, size: int) -> RealFile:
        absolute_path = self._absolute_path(path)
        with _translate_errors(f"creating {path}"):
            self._make_directories(parent_directory(path))
            descriptor = os.open(
                absolute_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644
            )
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

    def sizes(self, path: str) -> dict[str, int]:
        with _translate_errors(f"listing {path or '.'}"):
            try:
                with os.scandir(self._absolute_path(path)) as entries:
                    return {
                        entry.name: entry.stat().st_size
                        for entry in entries
                        if not entry.is_dir(follow_symlinks=False)
                    }
            except (FileNotFoundError, NotADirectoryError):
                return {}

    def size(self, path: str) -> int | None:
        with _translate_errors(f"reading the status of {path}"):
            try:
                return os.stat(self._absolute_path(path)).st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def exists(self, path: str) -> bool:
        with _translate_errors(f"reading the status of {path}"):
            try:
                os.stat(self._absolute_path(path))
            except (FileNotFoundError, NotADirectoryError):
                return False
        return True

    def rename(self, old: str, new: str) -> None:
        with _translate_errors(f"renaming {old} to {new}"):
            os.rename(self._absolute_path(old), self._absolute_path(new))

    def remove(self, path: str) -> None:
        absolute_path = self._absolute_path(path)
        with _translate_errors(f"removing {path}"):
            if os.path.isdir(absolute_path):
                os.rmdir(absolute_path)
            else:
                os.unlink(absolute_path)

    def sync_directory(self, path: str) -> None:
        with _translate_errors(f"flushing directory {path or '.'}"):
            _sync_directory(self._absolute_path(path))

    def begin_sync_all(self) -> RealSyncAll | None:
        if _SYNCFS is None:
            return None
        with _translate_errors("opening the directory"):
            descriptor = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return RealSyncAll(descriptor, _SYNCFS)

    def modified_ms(self, path: str) -> int:
        with _translate_errors(f"reading the status of {path}"):
            return os.stat(self._absolute_path(path)).st_mtime_ns // 1_000_000

    def usage(self) -> DiskUsage:
        with _translate_errors("reading the status of the file system"):
            status = os.statvfs(self._root)
        # Count only what an ordinary user may fill. The blocks reserved for root are neither used
        # nor free.
        usable_blocks = status.f_blocks - status.f_bfree + status.f_bavail
        return DiskUsage(
            total_bytes=usable_blocks * status.f_frsize,
            free_bytes=status.f_bavail * status.f_frsize,
        )

    def boot_id(self) -> str:
        try:
            with open(_BOOT_ID_PATH, encoding="ascii") as file:
                return file.read().strip()
        except (OSError, UnicodeDecodeError):
            return ""  # not Linux

    def lock(self, path: str, content: bytes) -> RealLock:
        absolute_path = self._absolute_path(path)
        with _translate_errors(f"locking {path}"):
            self._make_directories(parent_directory(path))
            descriptor = os.open(absolute_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                _lock_first_byte(descriptor)
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, content, 0)
            except BlockingIOError as error:
                os.close(descriptor)
                raise StoreLocked(
                    f"{absolute_path} is locked: another broker uses this directory"
                ) from error
            except OSError:
                os.close(descriptor)
                raise
        return RealLock(descriptor)

    def _absolute_path(self, path: str) -> str:
        return os.path.join(self._root, path) if path else self._root

    def _make_directories(self, path: str) -> None:
        """Create directories and sync each in its parent.

        Otherwise a power cut could lose a directory, and with it files that were synced.
        """
        absolute_path = self._absolute_path(path)
        if path in self._durable_directories and os.path.isdir(absolute_path):
            return
        if path:
            self._make_directories(parent_directory(path))
            with contextlib.suppress(FileExistsError):
                os.mkdir(absolute_path)
            self.sync_directory(parent_directory(path))
        elif not os.path.isdir(absolute_path):
            os.makedirs(absolute_path)
            _sync_directory(os.path.dirname(absolute_path))
        self._durable_directories.add(path)
