"""`escrowmq store …`: check, dump, back up and restore a store directory."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

import click
import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from escrowmq.admin.cluster import error_text
from escrowmq.cli.options import access_options, current_access
from escrowmq.cli.output import PlainConsole, ignore_broken_pipe, print_json
from escrowmq.cli.rendering import record_json, record_text
from escrowmq.client.sync_connection import SyncConnection
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
    stored_log_end,
)
from escrowmq.store.check import CheckReport, Severity, check_store, is_store
from escrowmq.store.disk import Disk, RealDisk, read_file
from escrowmq.store.log_files import DamagedRange, LogFiles
from escrowmq.store.store import LOCK_PATH

_json_object_option: Final = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead of text."
)


@click.group()
def store() -> None:
    """Check, dump, back up and restore a store directory of EscrowMQ or RocketMQ.

    These commands never change the directory that they read.
    """


# --- check ---------------------------------------------------------------------------------------


@store.command()
@click.argument("directory", type=click.Path())
@_json_object_option
@click.pass_context
def check(context: click.Context, directory: str, as_json: bool) -> None:
    """Check the log, queues, index and configuration files in DIRECTORY.

    A broker may be running on DIRECTORY. Then the log and the queues are checked up to its last
    checkpoint, which is about a second old. What it is still writing is left out, and so is the key
    index: stop the broker to check all of it.

    Exit code 0: everything that was written is there. 1: something is damaged. 2: DIRECTORY cannot
    be checked, because it is missing, unreadable, or not a store.
    """
    try:
        report = check_store(_open_disk(directory))
    except StoreError as error:
        raise StoreError(f"{directory}: {error}") from error
    with ignore_broken_pipe():
        if as_json:
            print_json(_report_json(report))
        else:
            print_report(PlainConsole(), report)
    context.exit(0 if report.is_clean else 1)


_SEVERITY_STYLES: Final = {Severity.DAMAGE: "bold red", Severity.NOTE: "yellow"}


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
    left_out = ""
    if report.is_in_use:
        left_out = (
            "\na broker is running on it: what it has written since its last checkpoint, and the "
            "key index, were not checked"
        )
    return f"{counts}: {verdict}" + (f", {notes} notes" if notes else "") + left_out


def _report_json(report: CheckReport) -> dict[str, Any]:
    # The names of the fields are the keys, so the fields of CheckReport and Finding keep theirs.
    content = asdict(report)
    for finding in content["findings"]:
        finding["severity"] = finding["severity"].value
    return {"clean": report.is_clean, **content}


# --- dump ----------------------------------------------------------------------------------------


@store.command()
@click.argument("directory", type=click.Path())
@click.option("--topic", help="Only records of this topic.")
@click.option("--queue", "queue_id", type=int, metavar="N", help="Only records of this queue id.")
@click.option("--key", help="Only records with this key or unique key.")
@click.option(
    "--from",
    "begin",
    type=click.IntRange(min=0),
    default=0,
    metavar="LOG_OFFSET",
    help="Start at this log offset.",
)
@click.option(
    "--limit", type=click.IntRange(min=0), metavar="N", help="Print at most this many records."
)
@click.option("--body/--no-body", "with_body", default=True, help="Print bodies.  [--body]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def dump(
    directory: str,
    topic: str | None,
    queue_id: int | None,
    key: str | None,
    begin: int,
    limit: int | None,
    with_body: bool,
    as_json: bool,
) -> None:
    """Print the records in DIRECTORY in the order of the log.

    A broker may be running on DIRECTORY. Damaged parts are reported, and the records after them
    are printed too.
    """
    try:
        disk = _open_disk(directory)
        _require_store(disk)
        log = LogFiles(disk)
        with ignore_broken_pipe():
            items = _matching_items(log, begin, topic, queue_id, key)
            for item in _limit_records(items, limit):
                if isinstance(item, DamagedRange):
                    _print_damage(log, item, as_json=as_json)
                elif as_json:
                    print_json(record_json(item, with_body=with_body))
                else:
                    click.echo(record_text(item, with_body=with_body))
    except StoreError as error:
        raise StoreError(f"{directory}: {error}") from error


def _matching_items(
    log: LogFiles, begin: int, topic: str | None, queue_id: int | None, key: str | None
) -> Iterator[StoredRecord | DamagedRange]:
    """Yield the records that match, and every damaged range."""
    # `begin` need not be the beginning of a record: start with the first one from there on.
    for item in log.scan_from(begin):
        if isinstance(item, DamagedRange) or _matches(item, topic, queue_id, key):
            yield item


def _limit_records(
    items: Iterator[StoredRecord | DamagedRange], limit: int | None
) -> Iterator[StoredRecord | DamagedRange]:
    """Stop after `limit` records. Damaged ranges do not count."""
    count = 0
    for item in items if limit != 0 else ():
        yield item
        count += isinstance(item, StoredRecord)
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
    _, keys = tags_and_keys(record.topic, record.properties)
    return key.encode() in keys


def _print_damage(log: LogFiles, damage: DamagedRange, *, as_json: bool) -> None:
    path, position = log.locate(damage.begin)
    if as_json:
        print_json(
            {
                "log_offset": damage.begin,
                "where": path,
                "position": position,
                "bad": damage.reason,
            }
        )
        return
    following = "no valid record follows" if damage.is_last else f"continuing at {damage.end}"
    text = (
        f"{damage.begin:>12}  NO RECORD: {damage.reason} ({path} at byte {position}); {following}"
    )
    click.echo(click.style(text, fg="red"))


# --- backup --------------------------------------------------------------------------------------


@store.command("backup")
@click.argument("directory", type=click.Path())
@click.argument("backup", type=click.Path())
@click.option(
    "--broker",
    metavar="ADDR",
    default="127.0.0.1:10911",
    show_default=True,
    help="Address of the broker that runs on DIRECTORY, if there is one.",
)
@click.option(
    "--allow-damage",
    is_flag=True,
    help="Back up a store that is damaged or partly unreadable, and list the damage.",
)
@_json_object_option
@access_options
def backup_command(
    directory: str, backup: str, broker: str, allow_damage: bool, as_json: bool
) -> None:
    """Copy the store in DIRECTORY to the new directory BACKUP, and check the copy.

    A broker may be running on DIRECTORY and keeps serving. Everything that it had acknowledged as
    durable when the backup started is in the backup. Exit code 2: there is no complete backup. A
    damaged store is backed up only with --allow-damage.
    """
    source, target = RealDisk(directory), RealDisk(backup)
    try:
        _require_store(source)
        with _ProgressBar("copying the log", quiet=as_json) as on_progress:
            check_target_is_empty(target)
            manifest, report = _run_backup(
                source,
                target,
                directory,
                broker,
                allow_damage=allow_damage,
                on_progress=on_progress,
            )
    except StoreError as error:
        raise StoreError(f"{directory} to {backup}: {error}") from error
    _print_outcome("backed up", backup, manifest, report, as_json=as_json)


def _run_backup(
    source: Disk,
    target: Disk,
    directory: str,
    broker: str,
    *,
    allow_damage: bool,
    on_progress: ProgressCallback,
) -> tuple[BackupManifest, CheckReport]:
    now_ms = SystemClock().now_ms()
    try:
        lock = source.lock(LOCK_PATH, b"lock")
    except StoreLocked:
        # The first call flushes, so that what is copied first is of this moment; `back_up` calls
        # again after it has copied what must not be ahead of the log.
        prepare_backup(broker, source, directory)
        return back_up(
            source,
            target,
            lambda: prepare_backup(broker, source, directory),
            now_ms=now_ms,
            source_name=directory,
            allow_damage=allow_damage,
            on_progress=on_progress,
        )
    try:
        return back_up(
            source,
            target,
            lambda: stored_log_end(source),
            now_ms=now_ms,
            source_name=directory,
            allow_damage=allow_damage,
            on_progress=on_progress,
        )
    finally:
        lock.release()


def prepare_backup(address: str, source: Disk, directory: str) -> int:
    """Let the broker on `directory` flush, and return the log offset up to which all is durable.

    The broker writes a token into its directory. A token that does not appear in `directory` means
    that the broker at `address` runs on another one. Raises StoreError.
    """
    token = secrets.token_hex(16)
    try:
        with SyncConnection(address, current_access()) as connection:
            reply = connection.call(RequestCode.PREPARE_BACKUP, PrepareBackup(token=token))
        response = decode_header(PrepareBackupResponse, reply.ext_fields)
    except EscrowError as error:
        reason = error_text(error)
        if isinstance(error, RequestRefused):
            reason = f"{address} refused: {reason}"
        raise StoreError(
            f"a broker runs on {directory} and has to prepare the backup: {reason} "
            "(give its address with --broker HOST:PORT)"
        ) from error
    if read_file(source, TOKEN_PATH) != token.encode():
        raise StoreError(
            f"the broker at {address} does not run on {directory}, but another one does "
            "(give its address with --broker HOST:PORT)"
        )
    return response.log_end


# --- restore -------------------------------------------------------------------------------------


@store.command("restore")
@click.argument("backup", type=click.Path())
@click.argument("directory", type=click.Path())
@_json_object_option
def restore_command(backup: str, directory: str, as_json: bool) -> None:
    """Create the new directory DIRECTORY from BACKUP, and check it.

    Then start a broker on it. The first start reads the whole log to rebuild queues and index.
    """
    try:
        with _ProgressBar("copying the log", quiet=as_json) as on_progress:
            manifest, report = restore(
                RealDisk(backup), RealDisk(directory), on_progress=on_progress
            )
    except StoreError as error:
        raise StoreError(f"{backup} to {directory}: {error}") from error
    _print_outcome("restored", directory, manifest, report, as_json=as_json)
    if not as_json:
        click.echo(f"start a broker on it: escrowmq serve --data {directory}")


# --- shared by the commands ----------------------------------------------------------------------


def _open_disk(directory: str) -> Disk:
    disk = RealDisk(directory)
    if not disk.exists(""):
        raise StoreError("no such directory")
    return disk


def _require_store(disk: Disk) -> None:
    if not is_store(disk):
        raise StoreError("not a store: it has no directory commitlog")


def _print_outcome(
    verb: str, directory: str, manifest: BackupManifest, report: CheckReport, *, as_json: bool
) -> None:
    if as_json:
        print_json(
            {
                "directory": directory,
                "log_begin": manifest.log_begin,
                "log_end": manifest.log_end,
                "records": report.records,
                "clean": report.is_clean,
                "damage": msgspec.to_builtins(manifest.damage),
            }
        )
        return
    for damage in manifest.damage:
        position = "" if damage.position is None else f" at byte {damage.position}"
        click.echo(f"DAMAGE {damage.where}{position}: {damage.what}")
    verdict = "all of them checked"
    if manifest.damage:
        verdict = "with the damage that is listed above"
    click.echo(
        f"{verb} to {directory}: {report.records} records, log {manifest.log_begin} to "
        f"{manifest.log_end}, {verdict}"
    )


class _ProgressBar:
    """A progress bar on a terminal; nothing elsewhere."""

    def __init__(self, label: str, *, quiet: bool) -> None:
        self._bar = Progress(transient=True, disable=quiet or not sys.stdout.isatty())
        self._task = self._bar.add_task(label)

    def __enter__(self) -> ProgressCallback:
        self._bar.start()
        return lambda done, total: self._bar.update(self._task, completed=done, total=total)

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()
