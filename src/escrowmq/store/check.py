"""Examine a store's directory without changing it: is all there that was written?

It looks at everything and believes nothing: the log record by record, queues and index against the
log, the small files by themselves. Directories of Apache RocketMQ (4.9, 5.x) are examined too; how
long their files are is found out from the files. What recovery does at the next start anyway is a
note, not damage. Memory grows with the number of queues, not of records.
"""

from __future__ import annotations

import struct
from typing import Final
from zlib import crc32

from escrowmq.config import StoreConfig
from escrowmq.errors import ProtocolError, StoreDamaged, StoreError, StoreFailed
from escrowmq.message.keys import has_queue_entry, tags_and_keys
from escrowmq.parsing import parse_lenient_json
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
from escrowmq.store.checkpoint import ROCKETMQ_BYTES, ROCKETMQ_PATH
from escrowmq.store.commit_log import LOG_DIRECTORY as LOG_DIRECTORY
from escrowmq.store.consume_queue import DeletedTopics
from escrowmq.store.disk import Disk, Lock, read_file
from escrowmq.store.key_index import REDO_PATH as REDO_PATH
from escrowmq.store.key_index import FileChange, load_redo
from escrowmq.store.log_files import LogFiles
from escrowmq.store.store import ABORT_PATH, LOCK_PATH

__all__ = ["CheckReport", "Finding", "Severity", "check_store", "is_store"]

_CONFIG_DIRECTORY: Final = "config"
_WORD_WRITE: Final = struct.Struct(">I4s")  # position, four bytes


def is_store(disk: Disk) -> bool:
    """Whether a broker has ever owned this directory."""
    return disk.exists(LOG_DIRECTORY) or disk.exists(CHECKPOINT_PATH)


def check_store(disk: Disk, config: StoreConfig | None = None) -> CheckReport:
    """What is wrong with the directory. `config` say how index files are laid out.

    Raises StoreLocked if a broker runs on it: it would change while it is looked at. None can
    start as long as this runs.
    """
    if not is_store(disk):
        raise StoreError("not a store: there is no commitlog in it")
    lock = _acquire_lock(disk)
    try:
        return _check(disk, config)
    finally:
        if lock is not None:
            lock.release()


def _acquire_lock(disk: Disk) -> Lock | None:
    if not disk.exists(LOCK_PATH):
        return None  # nobody has; to make one would be a change
    try:
        return disk.lock(LOCK_PATH, b"lock")
    except StoreFailed:
        return None  # not ours to write, as a backup may be: then no broker of ours writes it


def _check(disk: Disk, config: StoreConfig | None) -> CheckReport:
    findings = Findings()
    stop = ShutdownState.load(disk)
    files = LogFiles(disk)
    log = LogCheck(files, stop, findings)
    queues = QueueCheck(disk, log, stop, findings)
    deleted = _deleted_topics(disk)
    index = None
    if _is_index_consistent(disk, stop, findings):
        index = IndexCheck(disk, log, stop, findings, config)
    try:
        for record in log.scan():
            tags_code, keys = tags_and_keys(record.topic, record.properties, record.stored_ms)
            is_gone = deleted is not None and deleted.is_deleted(record.topic, record.log_offset)
            if has_queue_entry(record.sys_flag) and not is_gone:
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
    _check_checkpoints(disk, stop, queues, log.end, findings)
    _check_config(disk, findings)
    if not stop.was_clean:
        findings.add_note(
            ABORT_PATH, None, "the last stop was not in order: the next start recovers"
        )
    return CheckReport(
        findings=findings.to_list(),
        stopped_cleanly=stop.was_clean,
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
        return None  # `_check_config` says so


def _check_checkpoints(
    disk: Disk, shutdown: ShutdownState, queues: QueueCheck, log_end: int, findings: Findings
) -> None:
    saved = read_file(disk, CHECKPOINT_PATH)
    if saved is not None and shutdown.checkpoint is None:
        checksum, _, data = saved.strip().partition(b"\n")
        if checksum == b"%08x" % crc32(data):
            findings.add_note(
                CHECKPOINT_PATH, None, "is of another version: the next start is long"
            )
        else:
            findings.add_damage(CHECKPOINT_PATH, None, "does not check out: the next start is long")
    if shutdown.checkpoint is not None and shutdown.checkpoint.log_offset == log_end:
        said = shutdown.checkpoint.queue_count, shutdown.checkpoint.entry_total
        if shutdown.was_clean and said != queues.totals():
            counted = "{} queues with {} entries".format(*queues.totals())
            what = "speaks of {} queues with {} entries; there are".format(*said)
            findings.add_note(CHECKPOINT_PATH, None, f"{what} {counted}: they will be built again")
    other = read_file(disk, ROCKETMQ_PATH)
    if other is None or len(other) != ROCKETMQ_BYTES:
        size = "missing" if other is None else f"{len(other)} bytes, not {ROCKETMQ_BYTES}"
        if log_end or other is not None:
            findings.add_note(ROCKETMQ_PATH, None, f"{size}: RocketMQ would begin with a new one")


def _is_index_consistent(disk: Disk, shutdown: ShutdownState, findings: Findings) -> bool:
    """False if a crash came while keys were written: the next start finishes that first."""
    content = read_file(disk, REDO_PATH)
    changes = load_redo(disk)
    if content and not changes:
        findings.add_note(REDO_PATH, None, "was not finished: no write of it had begun")
    if shutdown.was_clean or all(_is_applied(disk, change) for change in changes):
        return True
    what = "keys were being written: the next start finishes that; the index was not examined"
    findings.add_note(REDO_PATH, None, what)
    return False


def _is_applied(disk: Disk, change: FileChange) -> bool:
    content = disk.open(change.path, writable=False) if disk.exists(change.path) else None
    if content is None:
        return False
    try:
        view = content.view()
        return all(
            view[position : position + len(data)] == data
            for position, data in (*change.writes, *_WORD_WRITE.iter_unpack(change.words))
        )
    finally:
        content.close()


def _check_config(disk: Disk, findings: Findings) -> None:
    names = {name.removesuffix(".bak") for name in disk.names(_CONFIG_DIRECTORY)}
    for name in sorted(name for name in names if name.endswith(".json")):
        path = f"{_CONFIG_DIRECTORY}/{name}"
        problem = _json_problem(disk, path)
        if problem is None:
            continue
        if _json_problem(disk, path + ".bak") is None:
            findings.add_note(path, None, f"{problem}; its .bak is good and will be read instead")
        else:
            findings.add_damage(path, None, f"{problem}; and its .bak is no better")


def _json_problem(disk: Disk, path: str) -> str | None:
    content = read_file(disk, path)
    if not content:
        return "is missing" if content is None else "is empty"
    try:
        parse_lenient_json(content)
    except ProtocolError as error:
        return str(error)
    return None
