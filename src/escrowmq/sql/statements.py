"""The marker protocol and its clean-up, on a SQLAlchemy connection that is in no transaction
(the owner's are in one). Async engines run these through `run_sync`.

Two small tables in the application's own database. Their columns are a contract: docs/sql.md.
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
    """Text that is compared as it is: MariaDB would take "Bank" and "bank" for the same."""
    exact = VARCHAR(length, charset="utf8mb4", collation=_BINARY_COLLATION)
    return String(length).with_variant(exact, "mysql", "mariadb")


# One row per local transaction: it is there if and only if that transaction committed, or a checker
# has ruled that it never will.
marker_table = Table(
    MARKER_TABLE,
    metadata,
    Column("id", _exact_string(64), primary_key=True),
    Column("outcome", String(16), nullable=False),
    Column("at_ms", BigInteger, nullable=False, index=True),
    Column("producer_group", _exact_string(255), nullable=False),
    Column("messages", Integer, nullable=False),
)

# One row per message that had its effect.
inbox_table = Table(
    INBOX_TABLE,
    metadata,
    Column("consumer_group", _exact_string(255), primary_key=True),
    Column("message_id", _exact_string(128), primary_key=True),
    Column("at_ms", BigInteger, nullable=False, index=True),
)


def create_tables(connection: Connection) -> None:
    """Those that are not there. Another process may do the same at the same time."""
    try:
        with connection.begin():
            metadata.create_all(connection)
    except DBAPIError:
        with connection.begin():
            metadata.create_all(connection)  # it finds what the other one has made, or says why not


_INSERT: Final = insert(marker_table)  # made once: it is in every transaction

# --- the owner, inside its transaction -----------------------------------------------------------


def insert_marker(connection: Connection, transaction_id: str, *, group: str, now_ms: int) -> None:
    """The first statement. Raises IntegrityError if a checker was faster."""
    connection.execute(_INSERT, _row(transaction_id, COMMITTED, group, now_ms))


def set_message_count(connection: Connection, transaction_id: str, message_count: int) -> None:
    """The last statement: how many messages went with it, if it is not one. Nobody asks about
    none."""
    mine = marker_table.c.id == transaction_id
    if message_count == 0:
        connection.execute(delete(marker_table).where(mine))
    else:
        connection.execute(update(marker_table).where(mine).values(messages=message_count))


# --- a checker, in short transactions of its own -------------------------------------------------


def read_or_tombstone(
    connection: Connection,
    transaction_id: str,
    *,
    group: str,
    now_ms: int,
    may_be_purged: bool = False,
) -> Verdict:
    """Raises what the database raises, unless it only says that the row is locked."""
    query = select(marker_table.c.outcome).where(marker_table.c.id == transaction_id)
    tombstone = _row(transaction_id, TOMBSTONE, group, now_ms, messages=0)

    def read() -> str | None:
        with connection.begin():
            return connection.execute(query).scalar_one_or_none()

    def bury() -> TombstoneResult:
        try:
            with (
                connection.begin(),
                short_lock_wait(connection.dialect.name, lambda sql: _scalar(connection, sql)),
            ):
                connection.execute(_INSERT, tombstone)
        except IntegrityError:
            return TombstoneResult.EXISTS
        except DBAPIError as error:
            if is_lock_error(error.orig):
                return TombstoneResult.LOCKED
            raise
        return TombstoneResult.INSERTED

    return resolve_marker(
        transaction_id, read=read, insert_tombstone=bury, may_be_purged=may_be_purged
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
    """Rows of the owner's own whose end was acknowledged."""
    with connection.begin():
        connection.execute(delete(marker_table).where(marker_table.c.id.in_(transaction_ids)))


def purge_before(connection: Connection, table: Table, before_ms: int) -> int:
    """How many rows are gone. A few at a time, found first and removed by their keys: nobody waits
    long, and no range of the table is locked."""
    keys = list(table.primary_key.columns)
    old = select(*keys).where(table.c.at_ms < before_ms).limit(PURGE_BATCH_ROWS)
    one = delete(table).where(*(key == bindparam(f"the_{key.name}") for key in keys))
    gone = 0
    while True:
        with connection.begin():
            found = connection.execute(old).mappings().all()
        if found:
            rows = [{f"the_{name}": value for name, value in row.items()} for row in found]
            with connection.begin():
                connection.execute(one, rows)
        gone += len(found)
        if len(found) < PURGE_BATCH_ROWS:
            return gone


# --- what cannot work ----------------------------------------------------------------------------


def reject_memory_database(engine: Engine) -> None:
    """Raises ConfigError if a checker could not have a connection of its own."""
    if engine.dialect.name == "sqlite" and isinstance(
        engine.pool, StaticPool | SingletonThreadPool
    ):
        raise ConfigError("a checker needs a connection of its own: use a SQLite file, not memory")


def check_transaction_support(connection: Connection) -> None:
    """Raises ConfigError if what is rolled back stays, or is seen before."""
    if str(connection.get_isolation_level()).upper() == "READ UNCOMMITTED":
        raise ConfigError(
            "isolation level READ UNCOMMITTED: a checker would believe what is not committed; "
            'give engine.execution_options(isolation_level="READ COMMITTED"), or a higher one'
        )
    probe = f"probe-{secrets.token_hex(16)}"
    with connection.begin() as transaction:
        insert_marker(connection, probe, group="", now_ms=0)
        transaction.rollback()
    with connection.begin():
        stayed = connection.execute(delete(marker_table).where(marker_table.c.id == probe)).rowcount
    if stayed:
        raise ConfigError(
            f"{connection.dialect.name}: what is rolled back stays; use an engine without "
            "AUTOCOMMIT, and tables that know transactions"
        )
