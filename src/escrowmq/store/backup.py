"""Back up a store, also while a broker uses it, and restore a backup.

The order makes sure that no file of the copy refers to something that its log does not contain:

1. copy the files that say how far something has come: consumers, delays, transactions;
2. get the end of the log: everything below is durable and belongs to the backup;
3. copy the files that may be newer than that, but not older: topics and groups;
4. copy the queues, which know the offsets of messages that have expired;
5. copy the log up to that end.

Key index and checkpoint are not copied. The first start on the copy reads the copied log once and
rebuilds queues and index. A flush mark says how far the log was durable, so that the start takes no
damaged record for a torn end. `escrowmq.backup` is written last: a copy without it is incomplete.
While a backup or a restore is under way, the copy contains `escrowmq.incomplete`, and no broker
starts on it.

A damaged store is backed up only if the operator allows it. The manifest lists the damage then, and
a restored copy must have this damage and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from escrowmq.errors import StoreDamaged, StoreError, StoreFailed
from escrowmq.store.check import CheckReport, Severity, check_store, is_store
from escrowmq.store.config_files import CONFIG_DIRECTORY as CONFIG_DIRECTORY
from escrowmq.store.consume_queue import QUEUE_DIRECTORY as QUEUE_DIRECTORY
from escrowmq.store.disk import (
    Disk,
    File,
    parent_directory,
    read_file,
    read_what_is_left,
    remove_file,
    replace_file,
    write_file,
)
from escrowmq.store.flush_marks import FlushMarks
from escrowmq.store.log_files import LogFiles
from escrowmq.store.recovery import SavedState
from escrowmq.store.snapshot_files import TRANSACTIONS_PATH
from escrowmq.store.store import ABORT_PATH, INCOMPLETE_PATH

MANIFEST_PATH: Final = "escrowmq.backup"
TOKEN_PATH: Final = "escrowmq.token"  # the running broker of a directory writes it there
_METADATA_FILES: Final = ("topics.json", "subscriptionGroup.json")
_CHUNK_BYTES: Final = 1 << 18
_ZEROS: Final = bytes(_CHUNK_BYTES)

ProgressCallback = Callable[[int, int], None]  # copied bytes of the log, total bytes
ReadFunction = Callable[[File, int, int], bytes]  # position, size


class BackupDamage(msgspec.Struct, frozen=True, kw_only=True):
    """Damage that was in a store when it was backed up; the field names are stored."""

    where: str
    position: int | None
    what: str


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of escrowmq.backup; the field names are stored."""

    log_begin: int
    log_end: int
    records: int
    made_ms: int
    source: str = ""
    damage: tuple[BackupDamage, ...] = ()


def check_target_is_empty(disk: Disk) -> None:
    """Raise StoreError unless the directory is empty or does not exist yet."""
    names = disk.names("")
    if names:
        raise StoreError(
            f"the directory is not empty ({names[0]} is in it); choose a new directory"
        )


def back_up(
    source: Disk,
    target: Disk,
    get_log_end: Callable[[], int],
    *,
    now_ms: int,
    source_name: str = "",
    allow_damage: bool = False,
    on_progress: ProgressCallback = lambda copied, total: None,
) -> tuple[BackupManifest, CheckReport]:
    """Copy a store and check the copy.

    `get_log_end` is called once, after the files that must not be newer than the log are copied.
    Raises StoreDamaged if the copy is damaged, and StoreError if a file cannot be read; with
    `allow_damage`, what cannot be read is damaged in the copy. Raises StoreError if the target is
    not empty.
    """
    check_target_is_empty(target)
    write_file(target, INCOMPLETE_PATH, b"")
    write_file(target, ABORT_PATH, b"")  # makes the first start recover, as after a crash
    configs = [name for name in source.names(CONFIG_DIRECTORY) if _is_config(name)]
    positions = [f"{CONFIG_DIRECTORY}/{name}" for name in configs if not _is_metadata(name)]
    metadata = [f"{CONFIG_DIRECTORY}/{name}" for name in configs if _is_metadata(name)]
    read = read_what_is_left if allow_damage else _read_or_fail
    _copy_files(source, target, [*positions, TRANSACTIONS_PATH], read)
    end = get_log_end()
    _copy_files(source, target, metadata, read)
    _copy_files(source, target, _queue_files(source), read)
    begin = _copy_log(source, target, end, on_progress, read)
    FlushMarks(target, end).close()
    report = _check_copy(target)
    damage = _damage_in(report)
    if damage and not allow_damage:
        raise StoreDamaged(
            f"the store is damaged, first in {damage[0].where}: {damage[0].what} "
            "(to back it up as it is, use --allow-damage)"
        )
    _raise_if_shorter(report, end)
    manifest = BackupManifest(
        log_begin=begin,
        log_end=end,
        records=report.records,
        made_ms=now_ms,
        source=source_name,
        damage=damage,
    )
    replace_file(target, MANIFEST_PATH, msgspec.json.encode(manifest))
    remove_file(target, INCOMPLETE_PATH)
    return manifest, report


def restore(
    backup: Disk, target: Disk, *, on_progress: ProgressCallback = lambda copied, total: None
) -> tuple[BackupManifest, CheckReport]:
    """Copy a backup to a directory on which a broker can start, and check the copy.

    The backup is not changed. Raises StoreDamaged if the copy is not what was backed up.
    """
    manifest = read_manifest(backup)
    check_target_is_empty(target)
    write_file(target, INCOMPLETE_PATH, b"")
    write_file(target, ABORT_PATH, b"")
    configs = [f"{CONFIG_DIRECTORY}/{name}" for name in backup.names(CONFIG_DIRECTORY)]
    _copy_files(backup, target, [*configs, TRANSACTIONS_PATH, *_queue_files(backup)])
    _copy_log(backup, target, manifest.log_end, on_progress)
    FlushMarks(target, manifest.log_end).close()
    report = _check_copy(target)
    for damage in _damage_in(report):
        if damage not in manifest.damage:
            raise StoreDamaged(f"the copy is damaged: {damage.where}: {damage.what}")
    _raise_if_shorter(report, manifest.log_end)
    if report.records != manifest.records:
        raise StoreDamaged(
            f"the copy has {report.records} records, but {manifest.records} were backed up"
        )
    remove_file(target, INCOMPLETE_PATH)
    return manifest, report


def stored_log_end(disk: Disk) -> int:
    """Return the log offset at which a store ends that no broker uses, by reading its log.

    Damaged records at the end belong to it if they were durable: a backup must not lose them
    without a word.
    """
    log = LogFiles(disk)
    try:
        saved = SavedState.load(disk, was_clean=not disk.exists(ABORT_PATH))
        for _ in log.scan(history=saved.history(log.segment_bytes, queues=disk)):
            pass
        return log.end
    finally:
        log.close()


def read_manifest(backup: Disk) -> BackupManifest:
    """Return the manifest of a backup. Raises StoreError if the backup is incomplete or none."""
    content = read_file(backup, MANIFEST_PATH)
    if content is None:
        kind = "a store, not a backup" if is_store(backup) else "not a backup"
        raise StoreError(f"{kind}: a complete backup contains the file {MANIFEST_PATH}")
    try:
        return msgspec.json.decode(content, type=BackupManifest)
    except msgspec.DecodeError as error:
        raise StoreDamaged(f"{MANIFEST_PATH} is invalid: {error}") from error


def _check_copy(target: Disk) -> CheckReport:
    if is_store(target):
        return check_store(target, is_being_copied=True)
    return CheckReport(stopped_cleanly=False)  # the store never had a message


def _damage_in(report: CheckReport) -> tuple[BackupDamage, ...]:
    return tuple(
        BackupDamage(where=finding.where, position=finding.position, what=finding.what)
        for finding in report.findings
        if finding.severity is Severity.DAMAGE
    )


def _raise_if_shorter(report: CheckReport, log_end: int) -> None:
    if report.log_end != log_end:
        raise StoreDamaged(f"the copied log ends at {report.log_end}, not at {log_end}")


def _is_config(name: str) -> bool:
    return name.removesuffix(".bak").endswith(".json")


def _is_metadata(name: str) -> bool:
    return name.removesuffix(".bak") in _METADATA_FILES


def _queue_files(disk: Disk) -> Iterator[str]:
    for topic in disk.names(QUEUE_DIRECTORY):
        for queue in disk.names(f"{QUEUE_DIRECTORY}/{topic}"):
            directory = f"{QUEUE_DIRECTORY}/{topic}/{queue}"
            yield from (f"{directory}/{name}" for name in disk.names(directory))


def _read_or_fail(file: File, position: int, size: int) -> bytes:
    return file.read_at(position, size)


def _copy_files(
    source: Disk, target: Disk, paths: Iterable[str], read: ReadFunction = _read_or_fail
) -> None:
    directories = set()
    for path in paths:
        if _copy_file(source, target, path, read):
            directories.add(parent_directory(path))
    for directory in sorted(directories):
        target.sync_directory(directory)


def _copy_log(
    source: Disk,
    target: Disk,
    log_end: int,
    on_progress: ProgressCallback,
    read: ReadFunction = _read_or_fail,
) -> int:
    """Copy the segments below `log_end`. Return the log offset at which the copy begins.

    A segment may expire before it is copied. The copy begins behind it then.
    """
    log = LogFiles(source)
    log.close()
    files = [file for file in log.files if file.base < log_end] or log.files[:1]
    begin = files[0].base if files else log_end
    copied = 0
    for file in files:
        on_progress(copied, log_end - begin)
        if _copy_file(source, target, file.path, read, data_end=log_end - file.base):
            copied += min(log_end - file.base, log.segment_bytes)
        elif copied:
            raise StoreError(f"{file.path} was removed while the log was copied; try again")
        else:
            begin = file.base + log.segment_bytes
    if files:
        target.sync_directory(parent_directory(files[0].path))
    on_progress(copied, log_end - begin)
    return begin


def _copy_file(
    source: Disk, target: Disk, path: str, read: ReadFunction, *, data_end: int | None = None
) -> bool:
    """Copy a file with its length, but with zeros from `data_end` on. Return False if it is gone.

    Chunks of zeros are not written, so that the copy of a sparse file is sparse too.
    """
    try:
        original = source.open(path, writable=False)
    except StoreFailed:
        if source.exists(path):
            raise
        return False
    try:
        copy = target.create(path, original.size)
        try:
            end = original.size if data_end is None else min(data_end, original.size)
            for position in range(0, end, _CHUNK_BYTES):
                chunk = read(original, position, min(_CHUNK_BYTES, end - position))
                if chunk != _ZEROS[: len(chunk)]:
                    copy.write_at(position, chunk)
            copy.sync()
        finally:
            copy.close()
    finally:
        original.close()
    return True
