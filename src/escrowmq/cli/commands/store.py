"""`escrowmq store …`: look at a store's directory, and copy it, without changing it.

`escrowmq store backup` and `store restore`.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from escrowmq.cli.call import SyncConnection, error_text
from escrowmq.cli.output import PlainConsole, ignore_broken_pipe
from escrowmq.cli.rendering import record_json, record_text
from escrowmq.clock import SystemClock
from escrowmq.errors import EscrowError, RequestRefused, StoreError, StoreLocked
from escrowmq.message.keys import tags_and_keys
from escrowmq.message.record import StoredRecord
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import decode_header
from escrowmq.remoting.headers_admin import PrepareBackup, PrepareBackupResponse
from escrowmq.store.backup import (
    TOKEN_PATH,
    BackupManifest,
    ProgressCallback,
    back_up,
    check_target_is_empty,
    restore,
)
from escrowmq.store.check import CheckReport, Severity, check_store, is_store
from escrowmq.store.disk import Disk, RealDisk, read_file
from escrowmq.store.log_files import DamagedRange, LogFiles
from escrowmq.store.store import LOCK_PATH


@click.command("backup")
@click.argument("directory", type=click.Path())
@click.argument("backup", type=click.Path())
@click.option(
    "--broker",
    metavar="ADDR",
    default="127.0.0.1:10911",
    show_default=True,
    help="The broker that runs on DIRECTORY, if one does.",
)
@click.option("--json", "in_json", is_flag=True, help="One JSON object instead of text.")
def backup_command(directory: str, backup: str, broker: str, in_json: bool) -> None:
    """Copy the store in DIRECTORY to BACKUP, a new directory, and examine the copy.

    A broker may run on DIRECTORY and goes on serving; what it had acknowledged as durable when
    this began is in the backup. Exits with 2 if there is no whole backup.
    """
    source, target = RealDisk(directory), RealDisk(backup)
    if not is_store(source):
        raise StoreError(f"{directory}: not a store: there is no commitlog in it")
    with _ProgressBar("copying the log", quiet=in_json) as told:
        try:
            check_target_is_empty(target)
            manifest, report = _run_backup(source, target, directory, broker, told)
        except StoreError as error:
            raise StoreError(f"{directory} to {backup}: {error}") from error
    _print_outcome("backed up", backup, manifest, report, in_json=in_json)


@click.command("restore")
@click.argument("backup", type=click.Path())
@click.argument("directory", type=click.Path())
@click.option("--json", "in_json", is_flag=True, help="One JSON object instead of text.")
def restore_command(backup: str, directory: str, in_json: bool) -> None:
    """Make DIRECTORY, a new one, from BACKUP, and examine it.

    Then start a broker on it. The first start reads the log once, to make queues and index anew.
    """
    with _ProgressBar("copying the log", quiet=in_json) as told:
        try:
            manifest, report = restore(RealDisk(backup), RealDisk(directory), on_progress=told)
        except StoreError as error:
            raise StoreError(f"{backup} to {directory}: {error}") from error
    _print_outcome("restored", directory, manifest, report, in_json=in_json)
    if not in_json:
        click.echo(f"start a broker on it: escrowmq serve --data {directory}")


def _run_backup(
    source: Disk, target: Disk, directory: str, broker: str, on_progress: ProgressCallback
) -> tuple[BackupManifest, CheckReport]:
    now_ms = SystemClock().now_ms()
    try:
        lock = source.lock(LOCK_PATH, b"lock")
    except StoreLocked:
        prepare_backup(broker, source, directory)  # so that what is copied first is of this moment
        return back_up(
            source,
            target,
            lambda: prepare_backup(broker, source, directory),
            now_ms=now_ms,
            source_name=directory,
            on_progress=on_progress,
        )
    try:
        return back_up(
            source,
            target,
            lambda: _log_end(source),
            now_ms=now_ms,
            source_name=directory,
            on_progress=on_progress,
        )
    finally:
        lock.release()


def prepare_backup(address: str, source: Disk, directory: str) -> int:
    """Where the log ends that the broker on `directory` has made durable."""
    token = secrets.token_hex(16)
    try:
        with SyncConnection(address) as caller:
            reply = caller.call(RequestCode.PREPARE_BACKUP, PrepareBackup(token=token))
        answer = decode_header(PrepareBackupResponse, reply.ext_fields)
    except EscrowError as error:
        why = error_text(error)
        if isinstance(error, RequestRefused):
            why = f"{address} refused: {why}"
        raise StoreError(
            f"a broker runs on {directory}, and has to be asked: {why} (--broker HOST:PORT)"
        ) from error
    if read_file(source, TOKEN_PATH) != token.encode():
        raise StoreError(
            f"the broker at {address} does not run on {directory}, another does "
            "(--broker HOST:PORT)"
        )
    return answer.log_end


def _log_end(source: Disk) -> int:
    log = LogFiles(source)
    try:
        for _ in log.scan():
            pass
        return log.end
    finally:
        log.close()


def _print_outcome(
    verb: str, directory: str, manifest: BackupManifest, report: CheckReport, *, in_json: bool
) -> None:
    if in_json:
        found = {
            "directory": directory,
            "log_begin": manifest.log_begin,
            "log_end": manifest.log_end,
            "records": report.records,
            "clean": report.is_clean,
        }
        click.echo(json.dumps(found))
        return
    click.echo(
        f"{verb} to {directory}: {report.records} records, log {manifest.log_begin} to "
        f"{manifest.log_end}, every one of them examined"
    )


class _ProgressBar:
    """A bar on a terminal, nothing elsewhere."""

    def __init__(self, label: str, *, quiet: bool) -> None:
        self._bar = Progress(transient=True, disable=quiet or not sys.stdout.isatty())
        self._task = self._bar.add_task(label)

    def __enter__(self) -> ProgressCallback:
        self._bar.start()
        return lambda done, whole: self._bar.update(self._task, completed=done, total=whole)

    def __exit__(self, *ended: object) -> None:
        self._bar.stop()


_SEVERITY_STYLES = {Severity.DAMAGE: "bold red", Severity.NOTE: "yellow"}


@click.group()
def store() -> None:
    """Look at a store's directory, ours or RocketMQ's, and back it up. It is not changed."""


store.add_command(backup_command)
store.add_command(restore_command)


# --- check -----------------------------------------------------------------------------------


@store.command()
@click.argument("directory", type=click.Path())
@click.option("--json", "in_json", is_flag=True, help="One JSON object instead of text.")
@click.pass_context
def check(context: click.Context, directory: str, in_json: bool) -> None:
    """Examine DIRECTORY: log, queues, index and the small files.

    Exits with 0 if all that was written is there, 1 if not, 2 if it cannot be looked at: it is
    missing, unreadable, no store, or a broker runs on it.
    """
    try:
        report = check_store(_open_disk(directory))
    except StoreError as error:
        raise StoreError(f"{directory}: {error}") from error
    with ignore_broken_pipe():
        if in_json:
            click.echo(json.dumps(_report_json(report)))
        else:
            print_report(PlainConsole(), report)
    context.exit(0 if report.is_clean else 1)


def print_report(console: Console, report: CheckReport) -> None:
    for finding in report.findings:
        line = Text(f"{finding.severity.name:<6} ", style=_SEVERITY_STYLES[finding.severity])
        line.append(finding.where, style="bold")
        if finding.position is not None:
            line.append(f" at byte {finding.position}")
        line.append(f": {finding.what}", style="not bold default")
        console.print(line)
    console.print(Text(_report_summary(report)))


def _report_summary(report: CheckReport) -> str:
    counts = (
        f"{report.log_files} log files with {report.records} records "
        f"({report.log_begin} to {report.log_end}), {report.queues} queues with "
        f"{report.queue_entries} entries, {report.index_files} index files with {report.keys} keys"
    )
    damaged = sum(finding.severity is Severity.DAMAGE for finding in report.findings)
    notes = len(report.findings) - damaged
    verdict = "clean" if report.is_clean else f"DAMAGED in {damaged} places"
    return f"{counts}: {verdict}" + (f", {notes} notes" if notes else "")


def _report_json(report: CheckReport) -> dict[str, Any]:
    content = asdict(report)
    for finding in content["findings"]:
        finding["severity"] = finding["severity"].value
    return {"clean": report.is_clean, **content}


# --- dump ------------------------------------------------------------------------------------


@store.command()
@click.argument("directory", type=click.Path())
@click.option("--topic", help="Only records of this topic.")
@click.option("--queue", "queue_id", type=int, help="Only records of this queue id.")
@click.option("--key", help="Only records with this key or unique key.")
@click.option("--from", "begin", type=click.IntRange(min=0), default=0, help="A log offset.")
@click.option("--limit", type=click.IntRange(min=0), help="So many records, and no more.")
@click.option("--body/--no-body", "with_body", default=True, help="Bodies too, which is usual.")
@click.option("--json", "in_json", is_flag=True, help="One JSON object per line.")
def dump(
    directory: str,
    topic: str | None,
    queue_id: int | None,
    key: str | None,
    begin: int,
    limit: int | None,
    with_body: bool,
    in_json: bool,
) -> None:
    """Print the records of DIRECTORY, in the order of the log.

    A broker may run on it. What does not check out is named, and the records behind it are printed
    too.
    """
    try:
        disk = _open_disk(directory)
        if not is_store(disk):
            raise StoreError("not a store: there is no commitlog in it")
        log = LogFiles(disk)
        with ignore_broken_pipe():
            for met in _limit_records(_matching_records(log, begin, topic, queue_id, key), limit):
                if isinstance(met, DamagedRange):
                    _print_damage(log, met, in_json=in_json)
                elif in_json:
                    click.echo(json.dumps(record_json(met, with_body=with_body)))
                else:
                    click.echo(record_text(met, with_body=with_body))
    except StoreError as error:
        raise StoreError(f"{directory}: {error}") from error


def _matching_records(
    log: LogFiles, begin: int, topic: str | None, queue_id: int | None, key: str | None
) -> Iterator[StoredRecord | DamagedRange]:
    # `begin` need not be a boundary: the first record from there on.
    first = log.begin if begin <= log.begin else log.next_valid_record(begin)
    if first is None:
        return
    for met in log.scan(first):
        if isinstance(met, DamagedRange) or _matches(met, topic, queue_id, key):
            yield met


def _limit_records(
    records: Iterator[StoredRecord | DamagedRange], limit: int | None
) -> Iterator[StoredRecord | DamagedRange]:
    """Bad places do not count."""
    count = 0
    for met in records if limit != 0 else ():
        yield met
        count += isinstance(met, StoredRecord)
        if count == limit:
            return


def _matches(
    record: StoredRecord, topic: str | None, queue_id: int | None, key: str | None
) -> bool:
    if topic is not None and record.topic != topic:
        return False
    if queue_id is not None and record.queue_id != queue_id:
        return False
    if key is None:
        return True
    return key.encode() in tags_and_keys(record.topic, record.properties, record.stored_ms)[1]


def _print_damage(log: LogFiles, damage: DamagedRange, *, in_json: bool) -> None:
    path, position = log.locate(damage.begin)
    if in_json:
        found = {
            "log_offset": damage.begin,
            "where": path,
            "position": position,
            "bad": damage.reason,
        }
        click.echo(json.dumps(found))
        return
    goes_on = "nothing good follows" if damage.is_last else f"going on at {damage.end}"
    what = f"{damage.begin:>12}  NO RECORD: {damage.reason} ({path} at byte {position}); {goes_on}"
    click.echo(click.style(what, fg="red"))


def _open_disk(directory: str) -> Disk:
    disk = RealDisk(directory)
    if not disk.exists(""):
        raise StoreError("no such directory")
    return disk
