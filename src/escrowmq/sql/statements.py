"""The two tables of the binding, and all SQL statements on them.

The functions take a SQLAlchemy connection. Those of an owner expect it to be in the owner's
transaction; the others expect it to be in none and use short transactions of their own. Async
engines call them through `run_sync`. The tables are a contract with users: docs/sql.md.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, TypeVar

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    TextClause,
    bindparam,
    delete,
    func,
    insert,
    select,
    text,
    true,
    update,
)
from sqlalchemy.dialects.mysql import VARCHAR
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import SingletonThreadPool, StaticPool
from sqlalchemy.sql.functions import FunctionElement

from escrowmq.client.messages import ReceivedMessage
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

T = TypeVar("T")

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


class _NowMs(FunctionElement[int]):
    """The time of the database in milliseconds since 1970."""

    type = BigInteger()
    inherit_cache = True
    name = "now_ms"


@compiles(_NowMs)
def _compile_now_ms(_: _NowMs, compiler: Any, **__: Any) -> str:
    return NOW_MS_SQL[compiler.dialect.name]


# Built once, because every transaction uses one of them.
_INSERT_MARKER: Final = insert(marker_table).values(at_ms=_NowMs())
_INSERT_INBOX_ROW: Final = insert(inbox_table).values(at_ms=_NowMs())
_IS_MARKER: Final = marker_table.c.id == bindparam("marker_id")
_READ_OUTCOME: Final = select(marker_table.c.outcome).where(_IS_MARKER)
_DELETE_MARKER: Final = delete(marker_table).where(_IS_MARKER)

# --- the owner's transaction ---------------------------------------------------------------------
#
# The owner must notice if its database transaction ends before its block does, in whatever way: by
# a commit of the session, of the driver or in SQL, by a statement that commits by itself, or
# because the database gave it up. So each marker has a proof of its transaction:
#
#   PostgreSQL   the number of the transaction
#   the others   the name of a savepoint behind the marker, which ends with the transaction; it is
#                set again for each message
#
# On MariaDB, what belongs together is one compound statement, so a transaction with one message
# takes three requests less; MySQL has them only in stored procedures. The last step is not one: a
# driver may not accept a result from the middle of it, nor count a row that did not change.
#
# The marker also counts the messages as they are sent. If a part of the transaction is rolled back,
# for example to a savepoint that was set in plain SQL, the count goes back too.
#
# The check before the commit needs no statement if PostgreSQL has answered it already. What writes
# marker and count also sets `application_name` to both, for this transaction only. PostgreSQL
# reports each change of this setting with the response to the statement that caused it, and psycopg
# keeps the last report. The end of the transaction sets it back, however it came about, and so does
# a rollback to a savepoint before it. So as long as the last report is what the last message has
# set, the transaction is open and the count is right. Otherwise a statement asks.

_TRANSACTION_NUMBER: Final = func.txid_current()
_COUNT_ONE_MORE: Final = (
    update(marker_table)
    .where(_IS_MARKER, marker_table.c.messages == bindparam("count") - 1)
    .values(messages=bindparam("count"))
)
_READ_MESSAGES: Final = select(marker_table.c.messages).where(_IS_MARKER)
# The same with the number of the transaction.
_SET_REPORTED: Final = func.set_config("application_name", bindparam("reported"), true())
_NUMBERED_INSERT: Final = _INSERT_MARKER.returning(_TRANSACTION_NUMBER, _SET_REPORTED)
_NUMBERED_COUNT: Final = _COUNT_ONE_MORE.returning(_TRANSACTION_NUMBER, _SET_REPORTED)
_NUMBERED_READ: Final = _READ_MESSAGES.add_columns(_TRANSACTION_NUMBER)


_COUNT_SQL: Final = (
    f"UPDATE {MARKER_TABLE} SET messages = :count WHERE id = :marker_id AND messages = :before"
)
_INSERT_MARKER_SQL: Final = (
    f"INSERT INTO {MARKER_TABLE} (id, outcome, at_ms, producer_group, messages) "
    f"VALUES (:id, :outcome, {NOW_MS_SQL['mariadb']}, :producer_group, :messages)"
)


@lru_cache(maxsize=64)  # one for each savepoint that is used
def _compound(*statements: str) -> TextClause:
    return text(f"BEGIN NOT ATOMIC {'; '.join(statements)}; END")


def insert_marker(
    connection: Connection,
    transaction_id: str,
    *,
    group: str,
    savepoint: str = "escrowmq_0",
    messages: int = 0,
) -> str:
    """Insert the owner's marker and return its proof; see above.

    `messages`: how many messages it announces.

    `savepoint` is the name of the proof where it is a savepoint; no other proof of the transaction
    may have it. Raises IntegrityError if a checker has inserted a tombstone, and ConfigError if the
    connection commits each statement by itself.
    """
    row = {**_row(transaction_id, COMMITTED, group), "messages": messages}
    if _has_transaction_numbers(connection):
        values = {**row, "reported": _reported_text(transaction_id, messages)}
        return str(connection.execute(_NUMBERED_INSERT, values).scalar_one())
    if _has_compound_statements(connection):
        connection.execute(_compound(_INSERT_MARKER_SQL, f"SAVEPOINT {savepoint}"), row)
        return savepoint
    connection.execute(_INSERT_MARKER, row)
    # SQLite would begin a transaction with the savepoint, and so hide that there was none.
    if not getattr(connection.connection.driver_connection, "in_transaction", True):
        raise ConfigError("the session commits each statement by itself (AUTOCOMMIT)")
    _scalar(connection, f"SAVEPOINT {savepoint}")
    return savepoint


def count_message(connection: Connection, transaction_id: str, proof: str, count: int) -> bool:
    """Take note of the `count`-th message of a marker.

    Return False if the connection is not in the transaction of the marker any more, or if a part of
    it that had messages was rolled back.
    """
    values: dict[str, object] = {"marker_id": transaction_id, "count": count}
    if _has_transaction_numbers(connection):
        values["reported"] = _reported_text(transaction_id, count)
        return str(connection.execute(_NUMBERED_COUNT, values).scalar_one_or_none()) == proof
    if _has_compound_statements(connection):
        return _count_in_one_statement(connection, transaction_id, proof, count)
    if not _release_savepoint(connection, proof):
        return False
    _scalar(connection, f"SAVEPOINT {proof}")
    return connection.execute(_COUNT_ONE_MORE, values).rowcount == 1


def finish_marker(connection: Connection, transaction_id: str, proof: str, count: int) -> bool:
    """Check the marker with the last statements before the commit.

    Return False as `count_message` does. Without messages the marker is deleted, because no broker
    can ask about it.
    """
    values = {"marker_id": transaction_id}
    if _has_transaction_numbers(connection):
        if count and _last_report(connection) == _reported_text(transaction_id, count):
            return True
        row = connection.execute(_NUMBERED_READ, values).one_or_none()
        is_open = row is not None and (row[0], str(row[1])) == (count, proof)
    else:
        is_open = (
            _release_savepoint(connection, proof)
            and connection.execute(_READ_MESSAGES, values).scalar_one_or_none() == count
        )
    if is_open and count == 0:
        connection.execute(_DELETE_MARKER, values)
    return is_open


def read_message_counts(connection: Connection, transaction_ids: Sequence[str]) -> dict[str, int]:
    """Return the numbers of messages of these markers. Those that are not there are left out."""
    is_one = marker_table.c.id.in_(transaction_ids)
    rows = connection.execute(select(marker_table.c.id, marker_table.c.messages).where(is_one))
    return {row[0]: row[1] for row in rows}


def insert_inbox_row(connection: Connection, message: ReceivedMessage, *, group: str) -> bool:
    """Insert the id of a message. Return False if it is there already.

    It must be the first statement of its transaction, which can only be rolled back after False.
    """
    row = {"consumer_group": group, "message_id": message.message_id}
    try:
        connection.execute(_INSERT_INBOX_ROW, row)
    except IntegrityError:
        return False
    return True


def insert_inbox_rows(
    connection: Connection, messages: Sequence[ReceivedMessage], *, group: str
) -> frozenset[str]:
    """Insert the ids of several messages, and return those that were not there before.

    Raises IntegrityError if another transaction inserts one of them at the same time.
    """
    ids = sorted({message.message_id for message in messages})  # one order prevents deadlocks
    query = select(inbox_table.c.message_id).where(
        inbox_table.c.consumer_group == group, inbox_table.c.message_id.in_(ids)
    )
    received = set(connection.execute(query).scalars())
    new = [message_id for message_id in ids if message_id not in received]
    if new:
        rows = [{"consumer_group": group, "message_id": message_id} for message_id in new]
        connection.execute(_INSERT_INBOX_ROW, rows)
    return frozenset(new)


def _has_transaction_numbers(connection: Connection) -> bool:
    return connection.dialect.name == "postgresql"


def _reported_text(transaction_id: str, count: int) -> str:
    return f"{transaction_id} {count}"


def _last_report(connection: Connection) -> str | None:
    """Return the `application_name` that PostgreSQL reported last; None if it was not kept."""
    info = getattr(connection.connection.driver_connection, "info", None)
    parameter_status = getattr(info, "parameter_status", None)  # of psycopg
    return None if parameter_status is None else parameter_status("application_name")


def _has_compound_statements(connection: Connection) -> bool:
    return bool(getattr(connection.dialect, "is_mariadb", False))


def _count_in_one_statement(
    connection: Connection, transaction_id: str, proof: str, count: int
) -> bool:
    """Do what `count_message` does, on MariaDB."""
    values = {"marker_id": transaction_id, "count": count, "before": count - 1}
    statement = _compound(f"RELEASE SAVEPOINT {proof}", f"SAVEPOINT {proof}", _COUNT_SQL)
    try:
        return connection.execute(statement, values).rowcount == 1
    except DBAPIError as error:
        if is_missing_savepoint(error.orig):
            return False
        raise


def _release_savepoint(connection: Connection, savepoint: str) -> bool:
    """Release a savepoint. Return False if it does not exist."""
    try:
        _scalar(connection, f"RELEASE SAVEPOINT {savepoint}")
    except DBAPIError as error:
        if is_missing_savepoint(error.orig):
            return False
        raise
    return True


# --- a checker's transactions --------------------------------------------------------------------


def read_or_tombstone(
    connection: Connection,
    transaction_id: str,
    *,
    group: str,
    may_be_purged: Callable[[int], bool] = lambda _: False,
    keep_tombstone: bool = True,
) -> Verdict:
    """Answer a check; see `database/marker.py`.

    `may_be_purged` is called with the time of the database, if there is no marker, and returns
    whether it may have been deleted by age. `keep_tombstone` False rolls the tombstone back: for
    an owner that has ended its transaction and asks what became of it. Raises what the database
    raises, except errors that only mean that the row is locked.
    """

    dialect = connection.dialect.name

    def read() -> str | None:
        with connection.begin():
            values = {"marker_id": transaction_id}
            return connection.execute(_READ_OUTCOME, values).scalar_one_or_none()

    def insert_tombstone() -> TombstoneResult:
        try:
            with connection.begin() as transaction:
                with short_lock_wait(dialect, lambda sql: _scalar(connection, sql)):
                    connection.execute(_INSERT_MARKER, _row(transaction_id, TOMBSTONE, group))
                if not keep_tombstone:
                    transaction.rollback()
        except IntegrityError:
            return TombstoneResult.EXISTS
        except DBAPIError as error:
            if is_lock_error(error.orig):
                return TombstoneResult.LOCKED
            raise
        return TombstoneResult.INSERTED

    return resolve_marker(
        transaction_id,
        read=read,
        insert_tombstone=insert_tombstone,
        may_be_purged=lambda: may_be_purged(now_ms(connection)),
    )


def now_ms(connection: Connection) -> int:
    """Return the time of the database in milliseconds since 1970, in a transaction of its own."""
    with connection.begin():
        return int(connection.execute(select(_NowMs())).scalar_one())


def _row(transaction_id: str, outcome: str, group: str) -> dict[str, object]:
    return {"id": transaction_id, "outcome": outcome, "producer_group": group, "messages": 0}


def _scalar(connection: Connection, sql: str) -> object:
    result = connection.exec_driver_sql(sql)
    return result.scalar() if result.returns_rows else None


# --- clean-up ------------------------------------------------------------------------------------


def purge_ids(connection: Connection, transaction_ids: Sequence[str]) -> None:
    """Delete markers of this process whose end the broker has acknowledged."""
    with connection.begin():
        connection.execute(delete(marker_table).where(marker_table.c.id.in_(transaction_ids)))


def purge_older(
    connection: Connection, table: Table, age_ms: int, database_time: DatabaseTime
) -> int:
    """Delete rows that are older than `age_ms`, by the database's clock, and return how many."""
    return purge_before(connection, table, database_time.observe(now_ms(connection)) - age_ms)


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


def check_engine(engine: object, engine_type: type[T], user: str) -> T:
    """Return an engine of this type, Engine or AsyncEngine. Raises TypeError.

    `user` is the class that needs it: `Escrow`.
    """
    if isinstance(engine, engine_type):
        return engine
    kind, creator, other = "an Engine", "sqlalchemy.create_engine()", f"Async{user}"
    if engine_type is AsyncEngine:
        kind, creator = "an AsyncEngine", "sqlalchemy.ext.asyncio.create_async_engine()"
        other = user.removeprefix("Async")
    text = f"{user} needs {kind}, which {creator} creates, not {type(engine).__name__}"
    if isinstance(engine, Engine | AsyncEngine):
        text += f"; {other} takes this one"
    raise TypeError(text)


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
        connection.execute(_INSERT_MARKER, _row(probe, COMMITTED, ""))
        transaction.rollback()
    with connection.begin():
        remaining = connection.execute(_DELETE_MARKER, {"marker_id": probe}).rowcount
    if remaining:
        raise ConfigError(
            f"{connection.dialect.name} did not roll back a row; use an engine without AUTOCOMMIT, "
            "and tables that support transactions (InnoDB)"
        )
