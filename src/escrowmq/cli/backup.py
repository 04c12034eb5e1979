"""`escrowmq store backup` and `store restore`."""

from __future__ import annotations

import json
import secrets
import sys

import click
from rich.progress import Progress

from escrowmq.cli.call import Caller, reason_of
from escrowmq.clock import SystemClock
from escrowmq.errors import EscrowError, RequestRefused, StoreError, StoreLocked
from escrowmq.store.backup import TOKEN_PATH, Manifest, Told, back_up, refuse_taken, restore
from escrowmq.store.check import Report, is_store
from escrowmq.store.disk import Disk, RealDisk, read_file
from escrowmq.store.logfiles import LogFiles
from escrowmq.store.store import LOCK_PATH
from escrowmq.wire.codes import RequestCode
from escrowmq.wire.headers import decode_header
from escrowmq.wire.headers_admin import PrepareBackup, PrepareBackupAnswer


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
    with _Progress("copying the log", quiet=in_json) as told:
        try:
            refuse_taken(target)
            manifest, report = _back_up(source, target, directory, broker, told)
        except StoreError as error:
            raise StoreError(f"{directory} to {backup}: {error}") from error
    _say("backed up", backup, manifest, report, in_json=in_json)


@click.command("restore")
@click.argument("backup", type=click.Path())
@click.argument("directory", type=click.Path())
@click.option("--json", "in_json", is_flag=True, help="One JSON object instead of text.")
def restore_command(backup: str, directory: str, in_json: bool) -> None:
    """Make DIRECTORY, a new one, from BACKUP, and examine it.

    Then start a broker on it. The first start reads the log once, to make queues and index anew.
    """
    with _Progress("copying the log", quiet=in_json) as told:
        try:
            manifest, report = restore(RealDisk(backup), RealDisk(directory), told=told)
        except StoreError as error:
            raise StoreError(f"{backup} to {directory}: {error}") from error
    _say("restored", directory, manifest, report, in_json=in_json)
    if not in_json:
        click.echo(f"start a broker on it: escrowmq serve --data {directory}")


def _back_up(
    source: Disk, target: Disk, directory: str, broker: str, told: Told
) -> tuple[Manifest, Report]:
    now_ms = SystemClock().now_ms()
    try:
        lock = source.lock(LOCK_PATH, b"lock")
    except StoreLocked:
        prepare(broker, source, directory)  # so that what is copied first is of this moment
        return back_up(
            source,
            target,
            lambda: prepare(broker, source, directory),
            now_ms=now_ms,
            name=directory,
            told=told,
        )
    try:
        return back_up(
            source, target, lambda: _end_of(source), now_ms=now_ms, name=directory, told=told
        )
    finally:
        lock.release()


def prepare(address: str, source: Disk, directory: str) -> int:
    """Where the log ends that the broker on `directory` has made durable."""
    token = secrets.token_hex(16)
    try:
        with Caller(address) as caller:
            reply = caller.call(RequestCode.PREPARE_BACKUP, PrepareBackup(token=token))
        answer = decode_header(PrepareBackupAnswer, reply.ext_fields)
    except EscrowError as error:
        why = reason_of(error)
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


def _end_of(source: Disk) -> int:
    log = LogFiles(source)
    try:
        for _ in log.walk():
            pass
        return log.end
    finally:
        log.close()


def _say(what: str, where: str, manifest: Manifest, report: Report, *, in_json: bool) -> None:
    if in_json:
        found = {
            "directory": where,
            "log_begin": manifest.log_begin,
            "log_end": manifest.log_end,
            "records": report.records,
            "clean": report.is_clean,
        }
        click.echo(json.dumps(found))
        return
    click.echo(
        f"{what} to {where}: {report.records} records, log {manifest.log_begin} to "
        f"{manifest.log_end}, every one of them examined"
    )


class _Progress:
    """A bar on a terminal, nothing elsewhere."""

    def __init__(self, what: str, *, quiet: bool) -> None:
        self._bar = Progress(transient=True, disable=quiet or not sys.stdout.isatty())
        self._task = self._bar.add_task(what)

    def __enter__(self) -> Told:
        self._bar.start()
        return lambda done, whole: self._bar.update(self._task, completed=done, total=whole)

    def __exit__(self, *ended: object) -> None:
        self._bar.stop()
