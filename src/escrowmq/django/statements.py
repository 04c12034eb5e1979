"""All SQL statements of the binding, on a Django connection.

See `sql/statements.py` for the proof that a transaction is still the one of its marker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from django.db import IntegrityError, OperationalError, connections, transaction
from django.db.utils import DatabaseError

from escrowmq.database.marker import (
    COMMITTED,
    INBOX_TABLE,
    MARKER_TABLE,
    NOW_MS_SQL,
    PURGE_BATCH_ROWS,
    TOMBSTONE,
    DatabaseTime,
    TombstoneResult,
    is_lock_error,
    is_missing_savepoint,
    resolve_marker,
    short_lock_wait,
)
from escrowmq.message.transaction import Verdict

_KEYS: Final = {MARKER_TABLE: ("id",), INBOX_TABLE: ("consumer_group", "message_id")}


_IS_MARKER: Final = "WHERE id = %s"
_COUNT_ONE_MORE: Final = f"UPDATE {MARKER_TABLE} SET messages = %s {_IS_MARKER} AND messages = %s"
_TRANSACTION_NUMBER: Final = "txid_current()"

# --- the owner's transaction ---------------------------------------------------------------------


def insert_marker(
    alias: str, transaction_id: str, *, group: str, savepoint: str = "escrowmq_0"
) -> str:
    """Insert the owner's marker and return its proof.

    `savepoint` is the name of the proof where it is a savepoint; no other proof of the transaction
    may have it. Raises IntegrityError if a checker has inserted a tombstone.
    """
    if _has_transaction_numbers(alias):
        returning = f" RETURNING {_TRANSACTION_NUMBER}"
        return str(_insert_row(alias, transaction_id, COMMITTED, group, returning))
    _insert_row(alias, transaction_id, COMMITTED, group)
    _execute(alias, f"SAVEPOINT {savepoint}")
    return savepoint


def count_message(alias: str, transaction_id: str, proof: str, count: int) -> bool:
    """Take note of the `count`-th message of a marker.

    Return False if the connection is not in the transaction of the marker any more, or if a part of
    it that had messages was rolled back.
    """
    values = [count, transaction_id, count - 1]
    if _has_transaction_numbers(alias):
        statement = f"{_COUNT_ONE_MORE} RETURNING {_TRANSACTION_NUMBER}"
        return str(_scalar(alias, statement, values)) == proof
    if not _release_savepoint(alias, proof):
        return False
    _execute(alias, f"SAVEPOINT {proof}")
    return _execute(alias, _COUNT_ONE_MORE, values) == 1


def finish_marker(alias: str, transaction_id: str, proof: str, count: int) -> bool:
    """Check the marker with the last statements of the block.

    Return False as `count_message` does. Without messages the marker is deleted, because no broker
    can ask about it.
    """
    has_numbers = _has_transaction_numbers(alias)
    if not has_numbers and not _release_savepoint(alias, proof):
        return False
    if has_numbers and str(_scalar(alias, f"SELECT {_TRANSACTION_NUMBER}")) != proof:
        return False
    if read_message_counts(alias, [transaction_id]).get(transaction_id) != count:
        return False
    if count == 0:
        _execute(alias, f"DELETE FROM {MARKER_TABLE} {_IS_MARKER}", [transaction_id])
    return True


def read_message_counts(alias: str, transaction_ids: Sequence[str]) -> dict[str, int]:
    """Return the numbers of messages of these markers. Those that are not there are left out."""
    places = ", ".join(["%s"] * len(transaction_ids))
    query = f"SELECT id, messages FROM {MARKER_TABLE} WHERE id IN ({places})"
    with connections[alias].cursor() as cursor:
        cursor.execute(query, list(transaction_ids))
        return {row[0]: row[1] for row in cursor.fetchall()}


def insert_inbox_row(alias: str, message_id: str, *, group: str) -> None:
    """Insert the id of a message. Raises IntegrityError if it is there already."""
    statement = (
        f"INSERT INTO {INBOX_TABLE} (consumer_group, message_id, at_ms) "
        f"VALUES (%s, %s, {_now_sql(alias)})"
    )
    _execute(alias, statement, [group, message_id])


def insert_inbox_rows(alias: str, message_ids: Sequence[str], *, group: str) -> frozenset[str]:
    """Insert the ids of several messages, and return those that were not there before.

    Raises IntegrityError if another transaction inserts one of them at the same time.
    """
    ids = sorted(set(message_ids))  # one order prevents deadlocks
    places = ", ".join(["%s"] * len(ids))
    query = (
        f"SELECT message_id FROM {INBOX_TABLE} "
        f"WHERE consumer_group = %s AND message_id IN ({places})"
    )
    with connections[alias].cursor() as cursor:
        cursor.execute(query, [group, *ids])
        received = {row[0] for row in cursor.fetchall()}
    new = [message_id for message_id in ids if message_id not in received]
    for message_id in new:
        insert_inbox_row(alias, message_id, group=group)
    return frozenset(new)


def _insert_row(
    alias: str, transaction_id: str, outcome: str, group: str, returning: str = ""
) -> object:
    statement = (
        f"INSERT INTO {MARKER_TABLE} (id, outcome, at_ms, producer_group, messages) "
        f"VALUES (%s, %s, {_now_sql(alias)}, %s, 0){returning}"
    )
    return _scalar(alias, statement, [transaction_id, outcome, group])


def _has_transaction_numbers(alias: str) -> bool:
    return connections[alias].vendor == "postgresql"


def _release_savepoint(alias: str, savepoint: str) -> bool:
    """Release a savepoint. Return False if it does not exist."""
    try:
        _execute(alias, f"RELEASE SAVEPOINT {savepoint}")
    except DatabaseError as error:
        if is_missing_savepoint(error.__cause__):
            return False
        raise
    return True


# --- a checker's transactions --------------------------------------------------------------------


def read_or_tombstone(
    alias: str,
    transaction_id: str,
    *,
    group: str,
    may_be_purged: Callable[[int], bool] = lambda _: False,
    keep_tombstone: bool = True,
) -> Verdict:
    """Answer a check, in short transactions; see `database/marker.py`.

    `may_be_purged` is called with the time of the database, if there is no marker, and returns
    whether it may have been deleted by age. `keep_tombstone` False rolls the tombstone back: for
    an owner that has ended its transaction and asks what became of it. Raises what the database
    raises, except errors that only mean that the row is locked.
    """

    def read() -> str | None:
        outcome = _scalar(
            alias, f"SELECT outcome FROM {MARKER_TABLE} {_IS_MARKER}", [transaction_id]
        )
        return None if outcome is None else str(outcome)

    def insert_tombstone() -> TombstoneResult:
        vendor = connections[alias].vendor
        try:
            with transaction.atomic(using=alias):
                with short_lock_wait(vendor, lambda sql: _scalar(alias, sql)):
                    _insert_row(alias, transaction_id, TOMBSTONE, group)
                if not keep_tombstone:
                    transaction.set_rollback(True, using=alias)
        except IntegrityError:
            return TombstoneResult.EXISTS
        except (OperationalError, DatabaseError) as error:
            if is_lock_error(error.__cause__):
                return TombstoneResult.LOCKED
            raise
        return TombstoneResult.INSERTED

    return resolve_marker(
        transaction_id,
        read=read,
        insert_tombstone=insert_tombstone,
        may_be_purged=lambda: may_be_purged(now_ms(alias)),
    )


def now_ms(alias: str) -> int:
    """Return the time of the database in milliseconds since 1970."""
    return int(str(_scalar(alias, f"SELECT {_now_sql(alias)}")))


# --- clean-up ------------------------------------------------------------------------------------


def purge_older(alias: str, table: str, age_ms: int, database_time: DatabaseTime) -> int:
    """Delete rows that are older than `age_ms`, by the database's clock, and return how many."""
    return purge_before(alias, table, database_time.observe(now_ms(alias)) - age_ms)


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


def _now_sql(alias: str) -> str:
    return NOW_MS_SQL[connections[alias].vendor]


def _execute(alias: str, sql: str, values: list[Any] | None = None) -> int:
    """Execute a statement and return how many rows it changed."""
    with connections[alias].cursor() as cursor:
        cursor.execute(sql, values)
        return int(cursor.rowcount)


def _scalar(alias: str, sql: str, values: list[Any] | None = None) -> object:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql, values)
        row = cursor.fetchone() if cursor.description else None
    return None if row is None else row[0]
