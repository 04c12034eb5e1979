"""All SQL statements of the binding, on a Django connection. See also `sql/statements.py`."""

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

_INSERT_MARKER: Final = (
    f"INSERT INTO {MARKER_TABLE} (id, outcome, at_ms, producer_group, messages) "
    "VALUES (%s, %s, %s, %s, %s)"
)
_KEYS: Final = {MARKER_TABLE: ("id",), INBOX_TABLE: ("consumer_group", "message_id")}


def insert_marker(alias: str, transaction_id: str, *, group: str, now_ms: int) -> None:
    """Insert the owner's marker. Raises IntegrityError if a checker has inserted a tombstone."""
    _execute(alias, _INSERT_MARKER, [transaction_id, COMMITTED, now_ms, group, 1])


def set_message_count(alias: str, transaction_id: str, message_count: int) -> None:
    """Store how many messages belong to the transaction; `insert_marker` has stored one.

    Without messages the marker is deleted, because no broker can ask about it.
    """
    if message_count == 0:
        _execute(alias, f"DELETE FROM {MARKER_TABLE} WHERE id = %s", [transaction_id])
    elif message_count != 1:
        update = f"UPDATE {MARKER_TABLE} SET messages = %s WHERE id = %s"
        _execute(alias, update, [message_count, transaction_id])


def read_or_tombstone(
    alias: str, transaction_id: str, *, group: str, now_ms: int, may_be_purged: bool = False
) -> Verdict:
    """Answer a check, in short transactions; see `database/marker.py`.

    Raises what the database raises, except errors that only mean that the row is locked.
    """

    def read() -> str | None:
        query = f"SELECT outcome FROM {MARKER_TABLE} WHERE id = %s"
        outcome = _scalar(alias, query, [transaction_id])
        return None if outcome is None else str(outcome)

    def insert_tombstone() -> TombstoneResult:
        vendor = connections[alias].vendor
        try:
            with transaction.atomic(using=alias), short_lock_wait(vendor, scalar):
                _execute(alias, _INSERT_MARKER, [transaction_id, TOMBSTONE, now_ms, group, 0])
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
        transaction_id, read=read, insert_tombstone=insert_tombstone, may_be_purged=may_be_purged
    )


def insert_inbox_row(alias: str, message_id: str, *, group: str, now_ms: int) -> None:
    """Insert the id of a message. Raises IntegrityError if it is there already."""
    statement = f"INSERT INTO {INBOX_TABLE} (consumer_group, message_id, at_ms) VALUES (%s, %s, %s)"
    _execute(alias, statement, [group, message_id, now_ms])


def purge_before(alias: str, table: str, before_ms: int) -> int:
    """Delete rows older than `before_ms` and return how many.

    Rows are selected first and deleted by their keys, a batch in each transaction: other
    transactions never wait long, and no range of the table is locked.
    """
    keys = _KEYS[table]
    select_old = f"SELECT {', '.join(keys)} FROM {table} WHERE at_ms < %s LIMIT {PURGE_BATCH_ROWS}"
    delete_row = f"DELETE FROM {table} WHERE {' AND '.join(f'{key} = %s' for key in keys)}"
    deleted = 0
    while True:
        with connections[alias].cursor() as cursor:
            cursor.execute(select_old, [before_ms])
            old = cursor.fetchall()
            with transaction.atomic(using=alias):
                cursor.executemany(delete_row, old)
        deleted += len(old)
        if len(old) < PURGE_BATCH_ROWS:
            return deleted


def _execute(alias: str, sql: str, values: list[Any]) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql, values)


def _scalar(alias: str, sql: str, values: list[Any] | None) -> object:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql, values)
        row = cursor.fetchone() if cursor.description else None
    return None if row is None else row[0]
