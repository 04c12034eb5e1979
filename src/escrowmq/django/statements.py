"""The marker protocol, the inbox and their clean-up, on a Django connection."""

from __future__ import annotations

from typing import Any, Final

from django.db import IntegrityError, OperationalError, connections, transaction
from django.db.utils import DatabaseError

from escrowmq.database.marker import (
    COMMITTED,
    INBOX_TABLE,
    MARKER_TABLE,
    PURGE_BATCH_ROWS,
    TOMBSTONE,
    TombstoneResult,
    is_lock_error,
    resolve_marker,
    short_lock_wait,
)
from escrowmq.message.transaction import Verdict

_INSERT: Final = (
    f"INSERT INTO {MARKER_TABLE} (id, outcome, at_ms, producer_group, messages) "
    "VALUES (%s, %s, %s, %s, %s)"
)
_KEYS: Final = {MARKER_TABLE: ("id",), INBOX_TABLE: ("consumer_group", "message_id")}


def insert_marker(alias: str, transaction_id: str, *, group: str, now_ms: int) -> None:
    """Before any message is sent. Raises IntegrityError if a checker was faster."""
    _execute(alias, _INSERT, [transaction_id, COMMITTED, now_ms, group, 1])


def set_message_count(alias: str, transaction_id: str, message_count: int) -> None:
    """The last statement: how many messages went with it. Nobody asks about none."""
    if message_count == 0:
        _execute(alias, f"DELETE FROM {MARKER_TABLE} WHERE id = %s", [transaction_id])
    elif message_count != 1:
        change = f"UPDATE {MARKER_TABLE} SET messages = %s WHERE id = %s"
        _execute(alias, change, [message_count, transaction_id])


def read_or_tombstone(
    alias: str, transaction_id: str, *, group: str, now_ms: int, may_be_purged: bool = False
) -> Verdict:
    """In transactions of its own. Raises what the database raises, unless it is only a lock."""

    def read() -> str | None:
        query = f"SELECT outcome FROM {MARKER_TABLE} WHERE id = %s"
        found = _scalar(alias, query, [transaction_id])
        return None if found is None else str(found)

    def bury() -> TombstoneResult:
        vendor = connections[alias].vendor
        try:
            with transaction.atomic(using=alias), short_lock_wait(vendor, scalar):
                _execute(alias, _INSERT, [transaction_id, TOMBSTONE, now_ms, group, 0])
        except IntegrityError:
            return TombstoneResult.EXISTS
        except (OperationalError, DatabaseError) as error:
            if is_lock_error(error.__cause__):
                return TombstoneResult.LOCKED
            raise
        return TombstoneResult.INSERTED

    def scalar(sql: str) -> object:
        return _scalar(alias, sql, None)

    return resolve_marker(
        transaction_id, read=read, insert_tombstone=bury, may_be_purged=may_be_purged
    )


def insert_inbox_row(alias: str, message_id: str, *, group: str, now_ms: int) -> None:
    """Raises IntegrityError if it was received before."""
    statement = f"INSERT INTO {INBOX_TABLE} (consumer_group, message_id, at_ms) VALUES (%s, %s, %s)"
    _execute(alias, statement, [group, message_id, now_ms])


def purge_before(alias: str, table: str, before_ms: int) -> int:
    """How many rows are gone; a few at a time, found first and removed by their keys."""
    keys = _KEYS[table]
    old = f"SELECT {', '.join(keys)} FROM {table} WHERE at_ms < %s LIMIT {PURGE_BATCH_ROWS}"
    one = f"DELETE FROM {table} WHERE {' AND '.join(f'{key} = %s' for key in keys)}"
    gone = 0
    while True:
        with connections[alias].cursor() as cursor:
            cursor.execute(old, [before_ms])
            found = cursor.fetchall()
            with transaction.atomic(using=alias):
                cursor.executemany(one, found)
        gone += len(found)
        if len(found) < PURGE_BATCH_ROWS:
            return gone


def _execute(alias: str, sql: str, values: list[Any]) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql, values)


def _scalar(alias: str, sql: str, values: list[Any] | None) -> object:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql, values)
        row = cursor.fetchone() if cursor.description else None
    return None if row is None else row[0]
