"""The two tables of the binding, and all SQL statements on them.

The functions take a SQLAlchemy connection. Those of an owner expect it to be in the owner's
transaction; the others expect it to be in none and use short transactions of their own. Async
engines call them through `run_sync`. The tables are a contract with users: docs/sql.md.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    bindparam,
    delete,
    insert,
    select,
    update,
)
from sqlalchemy.dialects.mysql import VARCHAR
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.pool import SingletonThreadPool, StaticPool

from escrowmq.client.messages import ReceivedMessage
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
from escrowmq.errors import ConfigError
from escrowmq.message.transaction import Verdict

metadata = MetaData()
_BINARY_COLLATION: Final = "utf8mb4_bin"


def _exact_string(length: int) -> String:
    """Return a text type that distinguishes case. MySQL's default collation does not."""
    exact = VARCHAR(length, charset="utf8mb4", collation=_BINARY_COLLATION)
    return String(length).with_variant(exact, "mysql", "mariadb")


# A row for each database transaction: there if and only if the transaction committed, or a checker
# has decided that it never will (a tombstone).
marker_table = Table(
    MARKER_TABLE,
    metadata,
    Column("id", _exact_string(64), primary_key=True),
    Column("outcome", String(16), nullable=False),
    Column("at_ms", BigInteger, nullable=False, index=True),
    Column("producer_group", _exact_string(255), nullable=False),
    Column("messages", Integer, nullable=False),
)

# A row for each message that had its effect.
inbox_table = Table(
    INBOX_TABLE,
    metadata,
    Column("consumer_group", _exact_string(255), primary_key=True),
    Column("message_id", _exact_string(128), primary_key=True),
    Column("at_ms", BigInteger, nullable=False, index=True),
)


def create_tables(connection: Connection) -> None:
    """Create the tables that do not exist. Several processes may do this at the same time."""
    try:
        with connection.begin():
            metadata.create_all(connection)
    except DBAPIError:
        with connection.begin():
            # Another process has created them in between, or this says what is wrong.
            metadata.create_all(connection)


# Built once, because every transaction uses one of them.
_INSERT_MARKER: Final = insert(marker_table)
_INSERT_INBOX_ROW: Final = insert(inbox_table)

# --- the owner's transaction ---------------------------------------------------------------------


def insert_marker(connection: Connection, transaction_id: str, *, group: str, now_ms: int) -> None:
    """Insert the owner's marker. Raises IntegrityError if a checker has inserted a tombstone."""
    connection.execute(_INSERT_MARKER, _row(transaction_id, COMMITTED, group, now_ms))


def set_message_count(connection: Connection, transaction_id: str, message_count: int) -> None:
    """Store how many messages belong to the transaction. Not needed for one message.

    Without messages the marker is deleted, because no broker can ask about it.
    """
    is_own = marker_table.c.id == transaction_id
    if message_count == 0:
        connection.execute(delete(marker_table).where(is_own))
    else:
        connection.execute(update(marker_table).where(is_own).values(messages=message_count))


def insert_inbox_row(
    connection: Connection, message: ReceivedMessage, *, group: str, now_ms: int
) -> bool:
    """Insert the id of a message. Return False if it is there already.

    It must be the first statement of its transaction, which can only be rolled back after False.
    """
    row = {"consumer_group": group, "message_id": message.message_id, "at_ms": now_ms}
    try:
        connection.execute(_INSERT_INBOX_ROW, row)
    except IntegrityError:
        return False
    return True


# --- a checker's transactions --------------------------------------------------------------------


def read_or_tombstone(
    connection: Connection,
    transaction_id: str,
    *,
    group: str,
    now_ms: int,
    may_be_purged: bool = False,
) -> Verdict:
    """Answer a check; see `database/marker.py`.

    Raises what the database raises, except errors that only mean that the row is locked.
    """
    query = select(marker_table.c.outcome).where(marker_table.c.id == transaction_id)
    tombstone = _row(transaction_id, TOMBSTONE, group, now_ms, messages=0)

    def read() -> str | None:
        with connection.begin():
            return connection.execute(query).scalar_one_or_none()

    def insert_tombstone() -> TombstoneResult:
        try:
            with (
                connection.begin(),
                short_lock_wait(connection.dialect.name, lambda sql: _scalar(connection, sql)),
            ):
                connection.execute(_INSERT_MARKER, tombstone)
        except IntegrityError:
            return TombstoneResult.EXISTS
        except DBAPIError as error:
            if is_lock_error(error.orig):
                return TombstoneResult.LOCKED
            raise
        return TombstoneResult.INSERTED

    return resolve_marker(
        transaction_id, read=read, insert_tombstone=insert_tombstone, may_be_purged=may_be_purged
    )


def _row(
    transaction_id: str, outcome: str, group: str, now_ms: int, *, messages: int = 1
) -> dict[str, object]:
    return {
        "id": transaction_id,
        "outcome": outcome,
        "at_ms": now_ms,
        "producer_group": group,
        "messages": messages,
    }


def _scalar(connection: Connection, sql: str) -> object:
    result = connection.exec_driver_sql(sql)
    return result.scalar() if result.returns_rows else None


# --- clean-up ------------------------------------------------------------------------------------


def purge_ids(connection: Connection, transaction_ids: Sequence[str]) -> None:
    """Delete markers of this process whose end the broker has acknowledged."""
    with connection.begin():
        connection.execute(delete(marker_table).where(marker_table.c.id.in_(transaction_ids)))


def purge_before(connection: Connection, table: Table, before_ms: int) -> int:
    """Delete rows older than `before_ms` and return how many.

    Rows are selected first and deleted by their keys, a batch in each transaction: other
    transactions never wait long, and no range of the table is locked.
    """
    keys = list(table.primary_key.columns)
    select_old = select(*keys).where(table.c.at_ms < before_ms).limit(PURGE_BATCH_ROWS)
    delete_row = delete(table).where(*(key == bindparam(f"the_{key.name}") for key in keys))
    deleted = 0
    while True:
        with connection.begin():
            old = connection.execute(select_old).mappings().all()
        if old:
            rows = [{f"the_{name}": value for name, value in row.items()} for row in old]
            with connection.begin():
                connection.execute(delete_row, rows)
        deleted += len(old)
        if len(old) < PURGE_BATCH_ROWS:
            return deleted


# --- checks at the start -------------------------------------------------------------------------


def reject_memory_database(engine: Engine) -> None:
    """Raise ConfigError if all connections share one SQLite database in memory."""
    if engine.dialect.name == "sqlite" and isinstance(
        engine.pool, StaticPool | SingletonThreadPool
    ):
        raise ConfigError(
            "a SQLite database in memory cannot be used, because a checker needs a second "
            "connection; use a file"
        )


def check_transaction_support(connection: Connection) -> None:
    """Raise ConfigError if the database shows uncommitted rows, or does not roll back."""
    if str(connection.get_isolation_level()).upper() == "READ UNCOMMITTED":
        raise ConfigError(
            "with isolation level READ UNCOMMITTED a checker would see uncommitted markers; use "
            'engine.execution_options(isolation_level="READ COMMITTED") or a higher level'
        )
    probe = f"probe-{secrets.token_hex(16)}"
    with connection.begin() as transaction:
        insert_marker(connection, probe, group="", now_ms=0)
        transaction.rollback()
    with connection.begin():
        is_probe = marker_table.c.id == probe
        remaining = connection.execute(delete(marker_table).where(is_probe)).rowcount
    if remaining:
        raise ConfigError(
            f"{connection.dialect.name} did not roll back a row; use an engine without AUTOCOMMIT, "
            "and tables that support transactions (InnoDB)"
        )
