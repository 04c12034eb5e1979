"""Copy a store that may be in use, and bring a copy back.

In this order, so that no file of the copy speaks of what is not in its log:

1. what says how far something has come: consumers, delays, transactions;
2. then the end of the log is asked for: everything below is durable, and is the backup;
3. what may speak of more, and must not speak of less: topics and groups;
4. the queues, which remember the offsets of messages that have expired;
5. the log up to that end.

The index is not copied, nor what would make the next start short: that start reads the copied log
once and makes queues and index anew. `escrowmq.backup` comes last: a copy without it is not whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from escrowmq.errors import StoreDamaged, StoreError, StoreFailed
from escrowmq.store.check import CheckReport, check_store, is_store
from escrowmq.store.config_files import CONFIG_DIRECTORY as CONFIG_DIRECTORY
from escrowmq.store.consume_queue import QUEUE_DIRECTORY as QUEUE_DIRECTORY
from escrowmq.store.disk import Disk, parent_directory, read_file, replace_file, write_file
from escrowmq.store.log_files import LogFiles
from escrowmq.store.store import ABORT_PATH

MANIFEST_PATH: Final = "escrowmq.backup"
TOKEN_PATH: Final = "escrowmq.token"  # left there by the broker that runs on a directory
ESCROW_PATH: Final = "escrowmq.escrow"
_METADATA_FILES: Final = ("topics.json", "subscriptionGroup.json")
_CHUNK_BYTES: Final = 1 << 18
_ZEROS: Final = bytes(_CHUNK_BYTES)

ProgressCallback = Callable[[int, int], None]  # bytes of the log copied so far, and of how many


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    log_begin: int
    log_end: int
    records: int
    made_ms: int
    source: str = ""


def check_target_is_empty(disk: Disk) -> None:
    """Into an empty directory only, or one that is not there yet."""
    names = disk.names("")
    if names:
        raise StoreError(f"is not empty ({names[0]} is in it): name a new directory")


def back_up(
    source: Disk,
    target: Disk,
    get_log_end: Callable[[], int],
    *,
    now_ms: int,
    source_name: str = "",
    on_progress: ProgressCallback = lambda done, whole: None,
) -> tuple[BackupManifest, CheckReport]:
    """`end_of_log` is asked once, after what must not be ahead of it was copied."""
    check_target_is_empty(target)
    write_file(target, ABORT_PATH, b"")  # its first start recovers, as after a crash
    configs = [path for path in source.names(CONFIG_DIRECTORY) if _is_config(path)]
    behind = [f"{CONFIG_DIRECTORY}/{path}" for path in configs if not _is_metadata(path)]
    _copy_files(source, target, [*behind, ESCROW_PATH])
    end = get_log_end()
    _copy_files(
        source, target, [f"{CONFIG_DIRECTORY}/{path}" for path in configs if _is_metadata(path)]
    )
    _copy_files(source, target, _queue_files(source))
    begin = _copy_log(source, target, end, on_progress)
    report = _check_copy(target)
    _raise_if_damaged(report, end)
    manifest = BackupManifest(
        log_begin=begin, log_end=end, records=report.records, made_ms=now_ms, source=source_name
    )
    replace_file(target, MANIFEST_PATH, msgspec.json.encode(manifest))
    return manifest, report


def restore(
    backup: Disk, target: Disk, *, on_progress: ProgressCallback = lambda done, whole: None
) -> tuple[BackupManifest, CheckReport]:
    """A directory that a broker can start on. The backup is not changed."""
    manifest = read_manifest(backup)
    check_target_is_empty(target)
    write_file(target, ABORT_PATH, b"")
    configs = [f"{CONFIG_DIRECTORY}/{path}" for path in backup.names(CONFIG_DIRECTORY)]
    _copy_files(backup, target, [*configs, ESCROW_PATH, *_queue_files(backup)])
    _copy_log(backup, target, manifest.log_end, on_progress)
    report = _check_copy(target)
    _raise_if_damaged(report, manifest.log_end)
    if report.records != manifest.records:
        raise StoreDamaged(f"{report.records} records, but {manifest.records} were backed up")
    return manifest, report


def read_manifest(backup: Disk) -> BackupManifest:
    content = read_file(backup, MANIFEST_PATH)
    if content is None:
        what = "a store, but no backup" if is_store(backup) else "no backup"
        raise StoreError(f"{what}: there is no {MANIFEST_PATH} in it, which a whole backup has")
    try:
        return msgspec.json.decode(content, type=BackupManifest)
    except msgspec.DecodeError as error:
        raise StoreDamaged(f"{MANIFEST_PATH} does not check out: {error}") from error


def _check_copy(target: Disk) -> CheckReport:
    if is_store(target):
        return check_store(target)
    return CheckReport(stopped_cleanly=False)  # nothing was ever sent


def _raise_if_damaged(report: CheckReport, log_end: int) -> None:
    if not report.is_clean:
        first = next(f for f in report.findings if f.severity.name == "DAMAGE")
        raise StoreDamaged(f"the copy is damaged: {first.where}: {first.what}")
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


def _copy_files(source: Disk, target: Disk, paths: Iterable[str]) -> None:
    directories = set()
    for path in paths:
        if _copy_file(source, target, path):
            directories.add(parent_directory(path))
    for directory in sorted(directories):
        target.sync_directory(directory)


def _copy_log(source: Disk, target: Disk, log_end: int, on_progress: ProgressCallback) -> int:
    """The files below `end`. One may expire before its turn comes; then the copy begins later."""
    log = LogFiles(source)
    log.close()
    files = [file for file in log.files if file.base < log_end] or log.files[:1]
    begin = files[0].base if files else log_end
    done = 0
    for file in files:
        on_progress(done, log_end - begin)
        if _copy_file(source, target, file.path, data_end=log_end - file.base):
            done += min(log_end - file.base, log.segment_bytes)
        elif done:
            raise StoreError(f"{file.path} went while it was copied: try again")
        else:
            begin = file.base + log.segment_bytes
    if files:
        target.sync_directory(parent_directory(files[0].path))
    on_progress(done, log_end - begin)
    return begin


def _copy_file(source: Disk, target: Disk, path: str, *, data_end: int | None = None) -> bool:
    """As long as it is, but with zeros from `end` on. Zeros take no room. False: it is gone."""
    try:
        opened = source.open(path, writable=False)
    except StoreFailed:
        if source.exists(path):
            raise
        return False
    try:
        view = opened.view()
        made = target.create(path, len(view))
        try:
            last = len(view) if data_end is None else min(data_end, len(view))
            for at in range(0, last, _CHUNK_BYTES):
                chunk = bytes(view[at : min(at + _CHUNK_BYTES, last)])
                if chunk != _ZEROS[: len(chunk)]:
                    made.write_at(at, chunk)
            made.sync()
        finally:
            made.close()
    finally:
        opened.close()
    return True
