"""Damage the files of a store on a disk in memory."""

from __future__ import annotations

from escrowmq.testing.disks import MemoryDisk


def flip_bit_in_file(disk: MemoryDisk, path: str, position: int, bit: int) -> None:
    """Flip one bit of a file. The change is durable."""
    file = disk.open(path)
    (byte,) = file.read_at(position, 1)
    file.write_at(position, bytes([byte ^ 1 << bit]))
    file.sync()
    file.close()


def flip_bit_at(disk: MemoryDisk, segment_bytes: int, log_offset: int, bit: int) -> None:
    """Flip one bit of the log."""
    position = log_offset % segment_bytes
    flip_bit_in_file(disk, f"commitlog/{log_offset - position:020d}", position, bit)


def overwrite_log(disk: MemoryDisk, segment_bytes: int, log_offset: int, data: bytes) -> None:
    """Write bytes to the log, durably. They must be within one segment."""
    position = log_offset % segment_bytes
    file = disk.open(f"commitlog/{log_offset - position:020d}")
    file.write_at(position, data)
    file.sync()
    file.close()


def delete_files(disk: MemoryDisk, prefix: str) -> None:
    """Delete all files whose path begins like this, with the directories that are empty then."""
    directory = prefix.rstrip("/")
    if directory != prefix:
        for name in disk.names(directory):
            delete_files(disk, f"{directory}/{name}/")
    if disk.exists(directory):
        disk.remove(directory)
