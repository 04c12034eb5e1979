"""All SQL statements of the bindings that have no SQLAlchemy: Django and plain DB-API connections.

The functions take a `SqlConnection`. Those of an owner expect it to be in the owner's transaction;
the others expect it to be in none and use short transactions of their own. `sql/statements.py` has
the same for SQLAlchemy, and says what the proof of a transaction is.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Final, Protocol

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
from escrowmq.errors import ConfigError
from escrowmq.message.transaction import Verdict

_KEYS: Final = {MARKER_TABLE: ("id",), INBOX_TABLE: ("consumer_group", "message_id")}
_IS_MARKER: Final = "WHERE id = %s"
_COUNT_ONE_MORE: Final = f"UPDATE {MARKER_TABLE} SET messages = %s {_IS_MARKER} AND messages = %s"
_TRANSACTION_NUMBER: Final = "txid_current()"


class SqlConnection(Protocol):
    """A connection that executes SQL, with `%s` in the place of each value."""

    @property
    def vendor(self) -> str:
        """The database: a key of NOW_MS_SQL."""

    @property
    def integrity_error(self) -> type[Exception]:
        """What a violated key raises."""

    @property
    def database_error(self) -> type[Exception]:
        """What any other error of the database raises."""

    def execute(self, sql: str, values: Sequence[str | int] = ()) -> int:
        """Execute a statement and return how many rows it changed."""

    def query(self, sql: str, values: Sequence[str | int] = ()) -> list[tuple[Any, ...]]:
        """Execute a statement and return its rows; none if it has no result."""

    def execute_many(self, sql: str, rows: Sequence[Sequence[str | int]]) -> None:
        """Execute a statement for each row of values."""

    def atomic(self) -> AbstractContextManager[None]:
        """Run a block in a transaction of its own, which an exception rolls back."""


class _RollBack(Exception):
    """Leaves a short transaction, which is rolled back."""


# --- the owner's transaction ---------------------------------------------------------------------


class SqlMarkers:
    """The owner's statements on the markers of the transaction of a connection."""

    def __init__(self, connection: SqlConnection, group: str) -> None:
        self._connection = connection
        self._group = group

    def insert_marker(self, marker_id: str, number: int, messages: int) -> str:
        """Insert the owner's marker and return its proof.

        Raises an integrity error if a checker has inserted a tombstone.
        """
        if self._has_transaction_numbers:
            returning = f" RETURNING {_TRANSACTION_NUMBER}"
            rows = _insert_row(
                self._connection, marker_id, COMMITTED, self._group, messages, returning
            )
            return str(rows[0][0])
        _insert_row(self._connection, marker_id, COMMITTED, self._group, messages)
        # A transaction may have several markers, so the names of their proofs are not numbers.
        savepoint = f"escrowmq_{marker_id.partition('-')[2][:32]}"
        self._connection.execute(f"SAVEPOINT {savepoint}")
        return savepoint

    def count_message(self, marker_id: str, proof: str, count: int) -> bool:
        """Take note of the `count`-th message of a marker.

        Return False if the connection is not in the transaction of the marker any more, or if a
        part of it that had messages was rolled back.
        """
        values = (count, marker_id, count - 1)
        if self._has_transaction_numbers:
            statement = f"{_COUNT_ONE_MORE} RETURNING {_TRANSACTION_NUMBER}"
            return [str(row[0]) for row in self._connection.query(statement, values)] == [proof]
        if not self._release_savepoint(proof):
            return False
        self._connection.execute(f"SAVEPOINT {proof}")
        return self._connection.execute(_COUNT_ONE_MORE, values) == 1

    def finish_marker(self, marker_id: str, proof: str, count: int) -> bool:
        """Check the marker with the last statements of the transaction.

        Return False as `count_message` does. Without messages the marker is deleted, because no
        broker can ask about it.
        """
        query = f"SELECT messages FROM {MARKER_TABLE} {_IS_MARKER}"
        if self._has_transaction_numbers:
            query = f"SELECT messages, {_TRANSACTION_NUMBER} FROM {MARKER_TABLE} {_IS_MARKER}"
            rows = self._connection.query(query, [marker_id])
            is_open = [(row[0], str(row[1])) for row in rows] == [(count, proof)]
        else:
            is_open = self._release_savepoint(proof) and self._connection.query(
                query, [marker_id]
            ) == [(count,)]
        if is_open and count == 0:
            self._connection.execute(f"DELETE FROM {MARKER_TABLE} {_IS_MARKER}", [marker_id])
        return is_open

    def read_message_counts(self, marker_ids: Sequence[str]) -> dict[str, int]:
        """Return the numbers of messages of these markers. Those that are not there are missing."""
        places = ", ".join(["%s"] * len(marker_ids))
        query = f"SELECT id, messages FROM {MARKER_TABLE} WHERE id IN ({places})"
        return {row[0]: row[1] for row in self._connection.query(query, marker_ids)}

    @property
    def _has_transaction_numbers(self) -> bool:
        return self._connection.vendor == "postgresql"

    def _release_savepoint(self, savepoint: str) -> bool:
        """Release a savepoint. Return False if it does not exist."""
        try:
            self._connection.execute(f"RELEASE SAVEPOINT {savepoint}")
        except self._connection.database_error as error:
            if is_missing_savepoint(_driver_error(error)):
                return False
            raise
        return True


def insert_inbox_row(connection: SqlConnection, message_id: str, *, group: str) -> None:
    """Insert the id of a message. Raises an integrity error if it is there already."""
    statement = (
        f"INSERT INTO {INBOX_TABLE} (consumer_group, message_id, at_ms) "
        f"VALUES (%s, %s, {NOW_MS_SQL[connection.vendor]})"
    )
    connection.execute(statement, [group, message_id])


def insert_inbox_rows(
    connection: SqlConnection, message_ids: Sequence[str], *, group: str
) -> frozenset[str]:
    """Insert the ids of several messages, and return those that were not there before.

    Raises an integrity error if another transaction inserts one of them at the same time.
    """
    ids = sorted(set(message_ids))  # one order prevents deadlocks
    places = ", ".join(["%s"] * len(ids))
    query = (
        f"SELECT message_id FROM {INBOX_TABLE} "
        f"WHERE consumer_group = %s AND message_id IN ({places})"
    )
    received = {row[0] for row in connection.query(query, [group, *ids])}
    new = [message_id for message_id in ids if message_id not in received]
    for message_id in new:
        insert_inbox_row(connection, message_id, group=group)
    return frozenset(new)


def _insert_row(
    connection: SqlConnection,
    marker_id: str,
    outcome: str,
    group: str,
    messages: int = 0,
    returning: str = "",
) -> list[tuple[Any, ...]]:
    statement = (
        f"INSERT INTO {MARKER_TABLE} (id, outcome, at_ms, producer_group, messages) "
        f"VALUES (%s, %s, {NOW_MS_SQL[connection.vendor]}, %s, %s){returning}"
    )
    return connection.query(statement, [marker_id, outcome, group, messages])


def _driver_error(error: BaseException) -> BaseException:
    """Return the error of the driver, which Django keeps as the cause of its own."""
    return error.__cause__ or error


# --- a checker's transactions --------------------------------------------------------------------


def read_or_tombstone(
    connection: SqlConnection,
    marker_id: str,
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
        query = f"SELECT outcome FROM {MARKER_TABLE} {_IS_MARKER}"
        with connection.atomic():
            rows = connection.query(query, [marker_id])
        return str(rows[0][0]) if rows else None

    def scalar(sql: str) -> object:
        rows = connection.query(sql)
        return rows[0][0] if rows else None

    def insert_tombstone() -> TombstoneResult:
        try:
            with suppress(_RollBack), connection.atomic():
                with short_lock_wait(connection.vendor, scalar):
                    _insert_row(connection, marker_id, TOMBSTONE, group)
                if not keep_tombstone:
                    raise _RollBack
        except connection.integrity_error:
            return TombstoneResult.EXISTS
        except connection.database_error as error:
            if is_lock_error(_driver_error(error)):
                return TombstoneResult.LOCKED
            raise
        return TombstoneResult.INSERTED

    return resolve_marker(
        marker_id,
        read=read,
        insert_tombstone=insert_tombstone,
        may_be_purged=lambda: may_be_purged(now_ms(connection)),
    )


def now_ms(connection: SqlConnection) -> int:
    """Return the time of the database in milliseconds since 1970."""
    with connection.atomic():
        return int(connection.query(f"SELECT {NOW_MS_SQL[connection.vendor]}")[0][0])


# --- clean-up ------------------------------------------------------------------------------------


def purge_older(
    connection: SqlConnection, table: str, age_ms: int, database_time: DatabaseTime
) -> int:
    """Delete rows that are older than `age_ms`, by the database's clock, and return how many."""
    return purge_before(connection, table, database_time.observe(now_ms(connection)) - age_ms)


def purge_before(connection: SqlConnection, table: str, before_ms: int) -> int:
    """Delete rows older than `before_ms` and return how many.

    Rows are selected first and deleted by their keys, a batch in each transaction: other
    transactions never wait long, and no range of the table is locked.
    """
    keys = _KEYS[table]
    select_old = f"SELECT {', '.join(keys)} FROM {table} WHERE at_ms < %s LIMIT {PURGE_BATCH_ROWS}"
    delete_row = f"DELETE FROM {table} WHERE {' AND '.join(f'{key} = %s' for key in keys)}"
    deleted = 0
    while True:
        with connection.atomic():
            old = connection.query(select_old, [before_ms])
        with connection.atomic():
            connection.execute_many(delete_row, old)
        deleted += len(old)
        if len(old) < PURGE_BATCH_ROWS:
            return deleted


# --- at the start --------------------------------------------------------------------------------

# The text of MySQL's default collation does not distinguish case.
_EXACT_TEXT: Final = {"mysql": "VARCHAR({}) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"}
_READ_ISOLATION: Final = {
    "postgresql": "SHOW transaction_isolation",
    "mysql": "SHOW SESSION VARIABLES WHERE Variable_name IN ('tx_isolation', "
    "'transaction_isolation')",
    "sqlite": "PRAGMA read_uncommitted",
}

_UNCOMMITTED_LEVELS: Final = {"READ UNCOMMITTED", "READ-UNCOMMITTED", "1"}


def create_marker_table(connection: SqlConnection) -> None:
    """Create the table of markers if it does not exist. Several processes may do this at once."""
    # CREATE INDEX IF NOT EXISTS would wait for every open transaction that has a marker, and others
    # would wait for it.
    if _has_marker_table(connection):
        return
    try:
        _create_marker_table(connection)
    except connection.database_error:
        if not _has_marker_table(connection):  # another process has created it in between
            raise


def _has_marker_table(connection: SqlConnection) -> bool:
    try:
        with connection.atomic():
            connection.query(f"SELECT id FROM {MARKER_TABLE} WHERE 1 = 0")
    except connection.database_error:
        return False
    return True


def _create_marker_table(connection: SqlConnection) -> None:
    exact_text = _EXACT_TEXT.get(connection.vendor, "VARCHAR({})")
    index = f"ix_{MARKER_TABLE}_at_ms"
    # MySQL commits after each statement, so its index is part of the table.
    has_inline_index = connection.vendor == "mysql"
    inline_index = f", INDEX {index} (at_ms)" if has_inline_index else ""
    with connection.atomic():
        connection.execute(
            f"CREATE TABLE {MARKER_TABLE} (id {exact_text.format(64)} NOT NULL, "
            "outcome VARCHAR(16) NOT NULL, at_ms BIGINT NOT NULL, "
            f"producer_group {exact_text.format(255)} NOT NULL, messages INTEGER NOT NULL, "
            f"PRIMARY KEY (id){inline_index})"
        )
        if not has_inline_index:
            connection.execute(f"CREATE INDEX {index} ON {MARKER_TABLE} (at_ms)")


def check_transaction_support(connection: SqlConnection) -> None:
    """Raise ConfigError if the database shows uncommitted rows, or does not roll back."""
    with connection.atomic():
        levels = [
            str(row[-1]).upper() for row in connection.query(_READ_ISOLATION[connection.vendor])
        ]
    if {"READ UNCOMMITTED", "READ-UNCOMMITTED", "1"}.intersection(levels):
        raise ConfigError(
            "with isolation level READ UNCOMMITTED a checker would see uncommitted markers; use "
            "READ COMMITTED or a higher level"
        )
    probe = f"probe-{secrets.token_hex(16)}"
    with suppress(_RollBack), connection.atomic():
        _insert_row(connection, probe, COMMITTED, "")
        raise _RollBack
    with connection.atomic():
        remaining = connection.execute(f"DELETE FROM {MARKER_TABLE} {_IS_MARKER}", [probe])
    if remaining:
        raise ConfigError(
            f"{connection.vendor} did not roll back a row; use tables that support transactions "
            "(InnoDB)"
        )
