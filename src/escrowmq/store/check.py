"""Check the directory of a store without changing it: is everything there that was written?

The check reads everything and trusts nothing: the log record by record (check_log.py), queues and
key index against the log (check_indexes.py), and the small files by themselves. Directories of
Apache RocketMQ (4.9 and 5.x) can be checked too; the lengths of their files are detected. What
recovery repairs at the next start is a note, not damage. The memory that a check needs grows with
the number of queues, not with the number of records.

A broker may be using the directory. Then only what its last checkpoint describes is checked: the
log and the queue entries below it do not change any more. The key index does, and so do the files
that say what is durable; they are left out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from escrowmq.config import StoreConfig
from escrowmq.errors import StoreDamaged, StoreError, StoreFailed, StoreLocked
from escrowmq.message.keys import has_queue_entry, tags_and_keys
from escrowmq.message.names import is_system_topic
from escrowmq.store.check_indexes import IndexCheck, QueueCheck
from escrowmq.store.check_log import (
    CheckReport,
    Finding,
    Findings,
    LogCheck,
    Severity,
    ShutdownState,
)
from escrowmq.store.checkpoint import CHECKPOINT_PATH as CHECKPOINT_PATH
from escrowmq.store.checkpoint import ROCKETMQ_BYTES, ROCKETMQ_PATH, has_right_checksum
from escrowmq.store.commit_log import LOG_DIRECTORY as LOG_DIRECTORY
from escrowmq.store.commit_log import is_file_name
from escrowmq.store.config_files import (
    CONFIG_DIRECTORY,
    DeletedTopics,
    config_problems,
    missing_topics,
    topics_file,
)
from escrowmq.store.consume_queue import QUEUE_DIRECTORY, queue_directories
from escrowmq.store.disk import Disk, Lock, read_file, read_what_is_left
from escrowmq.store.flush_marks import MARKS_PATH
from escrowmq.store.key_index import REDO_PATH as REDO_PATH
from escrowmq.store.key_index import FileChange, load_redo
from escrowmq.store.log_ages import AGES_PATH, WITHOUT_AGES, find_damage
from escrowmq.store.log_files import LogFiles
from escrowmq.store.snapshot_files import SNAPSHOT_PATHS, snapshot_problem
from escrowmq.store.store import (
    ABORT_PATH,
    DEFAULT_DELAY_LEVELS_MS,
    INCOMPLETE_COPY,
    INCOMPLETE_PATH,
    LOCK_PATH,
)

__all__ = ["CheckReport", "Finding", "Severity", "check_store", "is_store"]

_WORD_WRITE: Final = struct.Struct(">I4s")  # position, four bytes


def is_store(disk: Disk) -> bool:
    """Return whether a broker has ever used this directory."""
    return disk.exists(LOG_DIRECTORY) or disk.exists(CHECKPOINT_PATH)


def check_store(
    disk: Disk, config: StoreConfig | None = None, *, is_being_copied: bool = False
) -> CheckReport:
    """Check a directory. `config` says how index files are laid out, if it is known.

    `is_being_copied`: the directory is the copy of a backup or a restore that is under way.

    If no broker uses the directory, none can start on it while the check runs. Raises StoreLocked
    if one uses it and there is no checkpoint, and StoreError if it removed files meanwhile.
    """
    if not is_store(disk):
        raise StoreError("not a store: it contains no commitlog directory")
    try:
        lock = _acquire_lock(disk)
    except StoreLocked:
        return _check_in_use(disk)
    try:
        report = _check(disk, config, ShutdownState.load(disk))
        if disk.exists(INCOMPLETE_PATH) and not is_being_copied:
            incomplete = Finding(Severity.DAMAGE, INCOMPLETE_PATH, None, INCOMPLETE_COPY)
            report.findings.insert(0, incomplete)
        return report
    finally:
        if lock is not None:
            lock.release()


def _check_in_use(disk: Disk) -> CheckReport:
    """Check the part of a directory that the broker which uses it does not change any more."""
    # Loaded first: whatever is listed after this contains everything below the checkpoint.
    shutdown = ShutdownState.load(disk, is_in_use=True)
    if shutdown.checkpoint is None:
        raise StoreLocked(
            "a broker uses this directory, and there is no checkpoint of EscrowMQ that says what "
            "it does not change any more: try again in a moment, or stop the broker"
        )
    files_before = _log_and_queue_files(disk)
    try:
        report = _check(disk, None, shutdown)
    finally:  # whatever the check has found: it may be because of a removed file
        _raise_if_removed(disk, files_before)
    return report


def _log_and_queue_files(disk: Disk) -> set[str]:
    directories = [LOG_DIRECTORY] + [
        f"{QUEUE_DIRECTORY}/{topic}/{queue_id}" for topic, queue_id in queue_directories(disk)
    ]
    return {
        f"{directory}/{name}"
        for directory in directories
        for name in disk.names(directory)
        if is_file_name(name)
    }


def _raise_if_removed(disk: Disk, files_before: set[str]) -> None:
    if removed := files_before - _log_and_queue_files(disk):
        raise StoreError(
            f"{min(removed)} was removed during the check, because its messages expired or its "
            "topic was deleted: check again"
        )


def _acquire_lock(disk: Disk) -> Lock | None:
    if not disk.exists(LOCK_PATH):
        return None  # no broker has used it, and a check creates no files
    try:
        return disk.lock(LOCK_PATH, b"lock")
    except StoreFailed:
        return None  # a read-only directory, perhaps a backup: no broker can write it either


def _check(disk: Disk, config: StoreConfig | None, shutdown: ShutdownState) -> CheckReport:
    findings = Findings()
    files = LogFiles(disk, limit=shutdown.unchanging_end)
    log = LogCheck(disk, files, shutdown, findings)
    queues = QueueCheck(disk, log, shutdown, findings)
    deleted_topics = _deleted_topics(disk)
    index = None
    if not shutdown.is_in_use and _is_index_consistent(disk, shutdown, findings):
        index = IndexCheck(disk, log, shutdown, findings, config)
    try:
        for record in log.scan():
            tags_code, keys = tags_and_keys(
                record.topic, record.properties, record.stored_ms, DEFAULT_DELAY_LEVELS_MS
            )
            is_deleted = deleted_topics is not None and deleted_topics.is_deleted(
                record.topic, record.log_offset
            )
            if has_queue_entry(record.sys_flag) and not is_deleted:
                queues.check_record(record, tags_code)
            if index is not None:
                index.check_record(record, keys)
        queues.finish()
        if index is not None:
            index.finish()
    finally:
        files.close()
        queues.close()
        if index is not None:
            index.close()
    if not shutdown.is_in_use:
        _check_checkpoints(disk, shutdown, queues, log.end, findings)
        _check_topics(disk, queues.names(), deleted_topics, findings)
    _check_config(disk, findings)
    _check_snapshots(disk, findings)
    if not (shutdown.was_clean or shutdown.is_in_use):
        findings.add_note(ABORT_PATH, None, "the store was not closed: the next start recovers it")
    return CheckReport(
        findings=findings.to_list(),
        stopped_cleanly=shutdown.was_clean,
        is_in_use=shutdown.is_in_use,
        has_lock_file=disk.exists(LOCK_PATH),
        log_begin=log.begin,
        log_end=log.end,
        log_files=len(files.files),
        records=log.records,
        queues=len(queues),
        queue_entries=queues.entries,
        index_files=0 if index is None else index.files,
        keys=0 if index is None else index.keys,
    )


def _deleted_topics(disk: Disk) -> DeletedTopics | None:
    try:
        return DeletedTopics(disk)
    except StoreDamaged:
        return None  # `_check_config` reports it


def _check_checkpoints(
    disk: Disk, shutdown: ShutdownState, queues: QueueCheck, log_end: int, findings: Findings
) -> None:
    saved = _read_or_empty(disk, CHECKPOINT_PATH)
    if saved is not None and shutdown.checkpoint is None:
        if has_right_checksum(saved):
            findings.add_note(
                CHECKPOINT_PATH,
                None,
                "was written by another version: the next start reads the whole log",
            )
        else:
            findings.add_damage(
                CHECKPOINT_PATH, None, "has a wrong checksum: the next start reads the whole log"
            )
    marks = shutdown.saved.marks
    if marks.invalid_count:
        others = f"; {marks.invalid_count - 1} more are" if marks.invalid_count > 1 else ""
        severity = Severity.DAMAGE if marks.are_damaged else Severity.NOTE
        description = f"a flush mark is invalid{others}: it is not used"
        findings.add(severity, MARKS_PATH, marks.invalid_position, description)
    if shutdown.checkpoint is not None and shutdown.checkpoint.log_offset == log_end:
        expected = shutdown.checkpoint.queue_count, shutdown.checkpoint.entry_total
        if shutdown.was_clean and expected != queues.totals():
            description = (
                "counts {} queues with {} entries; there are {} queues with {} entries: "
                "the next start rebuilds them"
            ).format(*expected, *queues.totals())
            findings.add_note(CHECKPOINT_PATH, None, description)
    rocketmq = _read_or_empty(disk, ROCKETMQ_PATH)
    if rocketmq is None or len(rocketmq) != ROCKETMQ_BYTES:
        size = (
            "is missing" if rocketmq is None else f"has {len(rocketmq)} bytes, not {ROCKETMQ_BYTES}"
        )
        if log_end or rocketmq is not None:
            findings.add_note(ROCKETMQ_PATH, None, f"{size}: RocketMQ would create a new one")


def _read_or_empty(disk: Disk, path: str) -> bytes | None:
    """Return the content of a file; nothing of it if it cannot be read; None if it is missing."""
    try:
        return read_file(disk, path)
    except StoreError:
        return b""


def _is_index_consistent(disk: Disk, shutdown: ShutdownState, findings: Findings) -> bool:
    """Return False if a crash interrupted a flush of keys. The next start completes it first."""
    content = _read_or_empty(disk, REDO_PATH)
    changes = load_redo(disk)
    if content and not changes:
        findings.add_note(REDO_PATH, None, "is incomplete: none of its changes had begun")
    if shutdown.was_clean or all(_is_applied(disk, change) for change in changes):
        return True
    findings.add_note(
        REDO_PATH,
        None,
        "a flush of keys was interrupted: the next start completes it; the index was not checked",
    )
    return False


def _is_applied(disk: Disk, change: FileChange) -> bool:
    if not disk.exists(change.path):
        return False
    file = disk.open(change.path, writable=False)
    try:
        return all(
            read_what_is_left(file, position, len(data)) == data
            for position, data in (*change.writes, *_WORD_WRITE.iter_unpack(change.words))
        )
    finally:
        file.close()


def _check_config(disk: Disk, findings: Findings) -> None:
    names = {name.removesuffix(".bak") for name in disk.names(CONFIG_DIRECTORY)}
    for name in sorted(name for name in names if name.endswith(".json")):
        path = f"{CONFIG_DIRECTORY}/{name}"
        problem, copy_problem = config_problems(disk, path)
        if problem and copy_problem:
            findings.add_damage(path, None, f"{problem}; its .bak is missing or invalid too")
        elif problem:
            findings.add_note(path, None, f"{problem}; its .bak is valid and is read instead")
        elif copy_problem:
            findings.add_note(path + ".bak", None, f"{copy_problem}; the file itself is valid")


def _check_topics(
    disk: Disk,
    queues: Iterable[tuple[str, int]],
    deleted_topics: DeletedTopics | None,
    findings: Findings,
) -> None:
    """Find topics that have queues and are not in the table, because its file is too old."""
    try:
        file = topics_file(disk)
        missing = missing_topics(file, queues)
    except StoreDamaged:
        return  # `_check_config` reports it
    if not file.content:
        return  # no broker has started here, or the next start restores all topics
    for topic, count in missing.items():
        if is_system_topic(topic) or (deleted_topics is not None and topic in deleted_topics):
            continue
        description = f"topic {topic} is not in the table but has {count} queues: "
        description += (
            "the next start creates it again with default settings"
            if file.has_checksum or not file.was_intact
            else "it cannot be read unless it is created"
        )
        findings.add_note(f"{CONFIG_DIRECTORY}/topics.json", None, description)


def _check_snapshots(disk: Disk, findings: Findings) -> None:
    for path in SNAPSHOT_PATHS:
        problem = snapshot_problem(disk, path)
        if problem is not None:
            findings.add_damage(path, None, f"{problem}: the next start reads more of the log")
    if ages_problem := find_damage(disk):
        findings.add_damage(AGES_PATH, None, f"{ages_problem}: {WITHOUT_AGES}")
