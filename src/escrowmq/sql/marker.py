"""The marker protocol and its clean-up, on a SQLAlchemy connection that is in no transaction
(the owner's are in one). Async engines run these through `run_sync`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

from sqlalchemy import Connection, Engine, Table, bindparam, delete, insert, select, update
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.pool import SingletonThreadPool, StaticPool

from escrowmq.binding.marker import (
    COMMITTED,
    ROWS_AT_ONCE,
    TOMBSTONE,
    Burial,
    decide,
    is_lock,
    short_lock_wait,
)
from escrowmq.errors import ConfigError
from escrowmq.message.verdict import Verdict
from escrowmq.sql.tables import markers

_INSERT: Final = insert(markers)  # made once: it is in every transaction

# --- the owner, inside its transaction -----------------------------------------------------------


def claim(connection: Connection, transaction_id: str, *, group: str, now_ms: int) -> None:
    """The first statement. Raises IntegrityError if a checker was faster."""
    connection.execute(_INSERT, _row(transaction_id, COMMITTED, group, now_ms))


def count(connection: Connection, transaction_id: str, messages: int) -> None:
    """The last statement: how many messages went with it, if it is not one. Nobody asks about
    none."""
    mine = markers.c.id == transaction_id
    if messages == 0:
        connection.execute(delete(markers).where(mine))
    else:
        connection.execute(update(markers).where(mine).values(messages=messages))


# --- a checker, in short transactions of its own -------------------------------------------------


def ask(
    connection: Connection,
    transaction_id: str,
    *,
    group: str,
    now_ms: int,
    may_be_forgotten: bool = False,
) -> Verdict:
    """Raises what the database raises, unless it only says that the row is locked."""
    query = select(markers.c.outcome).where(markers.c.id == transaction_id)
    tombstone = _row(transaction_id, TOMBSTONE, group, now_ms, messages=0)

    def read() -> str | None:
        with connection.begin():
            return connection.execute(query).scalar_one_or_none()

    def bury() -> Burial:
        try:
            with (
                connection.begin(),
                short_lock_wait(connection.dialect.name, lambda sql: _scalar(connection, sql)),
            ):
                connection.execute(_INSERT, tombstone)
        except IntegrityError:
            return Burial.TAKEN
        except DBAPIError as error:
            if is_lock(error.orig):
                return Burial.LOCKED
            raise
        return Burial.DONE

    return decide(transaction_id, read=read, bury=bury, may_be_forgotten=may_be_forgotten)


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


def forget_ids(connection: Connection, ids: Sequence[str]) -> None:
    """Rows of the owner's own whose end was acknowledged."""
    with connection.begin():
        connection.execute(delete(markers).where(markers.c.id.in_(ids)))


def forget_before(connection: Connection, table: Table, before_ms: int) -> int:
    """How many rows are gone. A few at a time, found first and removed by their keys: nobody waits
    long, and no range of the table is locked."""
    keys = list(table.primary_key.columns)
    old = select(*keys).where(table.c.at_ms < before_ms).limit(ROWS_AT_ONCE)
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
        if len(found) < ROWS_AT_ONCE:
            return gone


# --- what cannot work ----------------------------------------------------------------------------


def refuse_memory(engine: Engine) -> None:
    """Raises ConfigError if a checker could not have a connection of its own."""
    if engine.dialect.name == "sqlite" and isinstance(
        engine.pool, StaticPool | SingletonThreadPool
    ):
        raise ConfigError("a checker needs a connection of its own: use a SQLite file, not memory")


def refuse_unsafe(connection: Connection) -> None:
    """Raises ConfigError if what is rolled back stays, or is seen before."""
    if str(connection.get_isolation_level()).upper() == "READ UNCOMMITTED":
        raise ConfigError(
            "isolation level READ UNCOMMITTED: a checker would believe what is not committed; "
            'give engine.execution_options(isolation_level="READ COMMITTED"), or a higher one'
        )
    probe = f"probe-{secrets.token_hex(16)}"
    with connection.begin() as transaction:
        claim(connection, probe, group="", now_ms=0)
        transaction.rollback()
    with connection.begin():
        stayed = connection.execute(delete(markers).where(markers.c.id == probe)).rowcount
    if stayed:
        raise ConfigError(
            f"{connection.dialect.name}: what is rolled back stays; use an engine without "
            "AUTOCOMMIT, and tables that know transactions"
        )
