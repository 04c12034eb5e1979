"""A program that kills or freezes itself at one point of a database transaction.

    python -m tests.support.sql_crashes URL NAMESRV NAME POINT kill|freeze BINDING

NAME is the group, the topic and the id of the row. BINDING is one of BINDINGS: a block of the
library, or a transaction of the program that is joined. The program observes the library from
outside, by events of SQLAlchemy and wrapped methods. A frozen program continues when it is resumed.
Exit code 3 means that the database refused the transaction.
"""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pymysql
from sqlalchemy import URL, Engine, create_engine, event, insert, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from escrowmq import Message, dbapi
from escrowmq.client.producer import transaction as client
from escrowmq.client.producer.transaction import TransactionOutcome
from escrowmq.dbapi.connection import DriverConnection
from escrowmq.message.transaction import Verdict
from escrowmq.sql import AsyncEscrow, Escrow
from tests.support.sql_bank import transfers

BEFORE_MARKER, AFTER_MARKER = "before marker", "after marker"
BEFORE_HALF, AFTER_HALF = "before half", "after half"
BEFORE_COMMIT, AFTER_COMMIT = "before commit", "after commit"
BEFORE_END, AFTER_END = "before end", "after end"
POINTS = (
    *(BEFORE_MARKER, AFTER_MARKER, BEFORE_HALF, AFTER_HALF),
    *(BEFORE_COMMIT, AFTER_COMMIT, BEFORE_END, AFTER_END),
)
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
REFUSED = 3


Reach = Callable[[str], None]


def main(url: str, namesrv: str, name: str, point: str, action: str, binding: str) -> int:
    has_stopped = False

    def reach(current_point: str) -> None:
        nonlocal has_stopped
        if current_point == point and not has_stopped:
            has_stopped = True  # a frozen process that is resumed may reach the point again
            # A signal for the process may stop another thread first, while this one goes on.
            signal.pthread_kill(threading.get_ident(), SIGNALS[action])

    watch_end(reach)
    try:
        BINDINGS[binding](url, namesrv, name, reach)
    except (DBAPIError, psycopg.Error, pymysql.Error, sqlite3.Error):
        return REFUSED
    return 0


# --- the bindings --------------------------------------------------------------------------------


def pay_in_block(url: str, namesrv: str, name: str, reach: Reach) -> None:
    engine = create_engine(url)
    with Escrow(engine, namesrv, group=name) as escrow:
        watch(engine, reach)
        with escrow.transaction() as (session, tx):
            session.execute(insert(transfers).values(id=name, amount=1))
            reach(BEFORE_HALF)
            tx.send(Message(name, b"paid"))
            reach(AFTER_HALF)
        reach(AFTER_END)


def pay_in_session(url: str, namesrv: str, name: str, reach: Reach) -> None:
    engine = create_engine(url)
    with Escrow(engine, namesrv, group=name) as escrow:
        watch(engine, reach)
        with Session(engine) as session:
            session.execute(insert(transfers).values(id=name, amount=1))
            reach(BEFORE_HALF)
            escrow.join(session).send(Message(name, b"paid"))
            reach(AFTER_HALF)
            session.commit()
        reach(AFTER_END)


def pay_on_connection(url: str, namesrv: str, name: str, reach: Reach) -> None:
    engine = create_engine(url)
    with Escrow(engine, namesrv, group=name) as escrow:
        watch(engine, reach)
        with engine.begin() as connection:
            connection.execute(insert(transfers).values(id=name, amount=1))
            reach(BEFORE_HALF)
            escrow.join(connection).send(Message(name, b"paid"))
            reach(AFTER_HALF)
        reach(AFTER_COMMIT)
    reach(AFTER_END)  # closing the Escrow has waited for the end


def pay_in_async_session(url: str, namesrv: str, name: str, reach: Reach) -> None:
    async def pay() -> None:
        engine = create_async_engine(async_driver(url))
        async with AsyncEscrow(engine, namesrv, group=name) as escrow:
            watch(engine.sync_engine, reach)
            async with AsyncSession(engine) as session:
                await session.execute(insert(transfers).values(id=name, amount=1))
                reach(BEFORE_HALF)
                await escrow.join(session).send(Message(name, b"paid"))
                reach(AFTER_HALF)
                await session.commit()
            reach(AFTER_END)
        await engine.dispose()

    asyncio.run(pay())


def pay_on_driver_connection(url: str, namesrv: str, name: str, reach: Reach) -> None:
    def connect() -> Any:
        return open_driver_connection(make_url(url))

    with dbapi.Escrow(connect, namesrv, group=name) as escrow:
        watch_driver(reach)
        connection = connect()
        with escrow.join(connection) as tx:
            connection.cursor().execute(f"INSERT INTO transfer (id, amount) VALUES ('{name}', 1)")
            reach(BEFORE_HALF)
            tx.send(Message(name, b"paid"))
            reach(AFTER_HALF)
        reach(AFTER_END)


def pay_in_atomic_block(url: str, namesrv: str, name: str, reach: Reach) -> None:
    configure_django(make_url(url), namesrv, name)
    from django.db import DatabaseError, connection, transaction  # configured now

    from escrowmq.django import escrow

    escrow.start()
    try:
        with connection.execute_wrapper(marker_watcher(reach)), transaction.atomic():
            # Hooks are called in the order of their registration, so this one is before ours.
            transaction.on_commit(lambda: reach(AFTER_COMMIT))
            with connection.cursor() as cursor:
                cursor.execute("INSERT INTO transfer (id, amount) VALUES (%s, 1)", [name])
            reach(BEFORE_HALF)
            escrow.join().send(Message(name, b"paid"))
            reach(AFTER_HALF)
            reach(BEFORE_COMMIT)
    except DatabaseError as error:
        raise error.__cause__ or error from error
    reach(AFTER_END)
    escrow.close()


BINDINGS: dict[str, Callable[[str, str, str, Reach], None]] = {
    "transaction": pay_in_block,
    "session": pay_in_session,
    "async session": pay_in_async_session,
    "connection": pay_on_connection,
    "driver": pay_on_driver_connection,
    "django": pay_in_atomic_block,
}


DJANGO_BACKENDS = {"sqlite": "sqlite3", "postgresql": "postgresql", "mysql": "mysql"}


def async_driver(url: str) -> str:
    """Return the URL of a database with its driver for asyncio; psycopg is one already."""
    return url.replace("sqlite:", "sqlite+aiosqlite:").replace("mysql+pymysql:", "mysql+aiomysql:")


def open_driver_connection(url: URL) -> Any:
    """Connect to a database without SQLAlchemy."""
    match url.get_backend_name():
        case "sqlite":
            return sqlite3.connect(str(url.database))
        case "postgresql":
            options = str(url.query.get("options", ""))
            return psycopg.connect(
                host=url.host,
                port=url.port,
                user=url.username,
                dbname=url.database,
                options=options,
            )
        case _:
            return pymysql.connect(
                host=url.host, port=url.port or 0, user=url.username, database=url.database
            )


def configure_django(url: URL, namesrv: str, group: str) -> None:
    import django  # only this binding needs it
    from django.conf import settings

    pymysql.install_as_MySQLdb()  # Django's backend for MariaDB has no driver of its own
    settings.configure(
        INSTALLED_APPS=["escrowmq.django"],
        DATABASES={
            "default": {
                "ENGINE": f"django.db.backends.{DJANGO_BACKENDS[url.get_backend_name()]}",
                "NAME": url.database,
                "HOST": url.host,
                "PORT": url.port,
                "USER": url.username,
            }
        },
        USE_TZ=True,
        ESCROWMQ={"servers": namesrv, "group": group},
    )
    django.setup()


# --- the points that are inside the library ------------------------------------------------------


def watch(engine: Engine, reach: Reach) -> None:
    """Watch SQLAlchemy."""

    def is_marker(arguments: tuple[Any, ...]) -> bool:
        return "INSERT INTO escrowmq_marker" in str(arguments[2])

    @event.listens_for(engine, "before_cursor_execute")
    def before_execute(*arguments: Any) -> None:
        if is_marker(arguments):
            reach(BEFORE_MARKER)

    @event.listens_for(engine, "after_cursor_execute")
    def after_execute(*arguments: Any) -> None:
        if is_marker(arguments):
            reach(AFTER_MARKER)

    @event.listens_for(engine, "commit")
    def before_commit(_: Any) -> None:
        reach(BEFORE_COMMIT)

    @event.listens_for(Session, "after_commit")
    def after_commit(_: Any) -> None:
        reach(AFTER_COMMIT)


def watch_driver(reach: Reach) -> None:
    """Watch the connections of database drivers."""
    query, commit = DriverConnection.query, DriverConnection.commit

    def watched_query(self: DriverConnection, sql: str, values: Any = ()) -> Any:
        return marker_watcher(reach)(lambda *_: query(self, sql, values), sql)

    def watched_commit(self: DriverConnection) -> None:
        reach(BEFORE_COMMIT)
        commit(self)
        reach(AFTER_COMMIT)

    DriverConnection.query = watched_query  # type: ignore[method-assign]
    DriverConnection.commit = watched_commit  # type: ignore[method-assign]


def marker_watcher(reach: Reach) -> Callable[..., Any]:
    """Return a function that executes a statement, in the form that Django wants."""

    def execute(run: Callable[..., Any], sql: str, *arguments: Any) -> Any:
        is_marker = "INSERT INTO escrowmq_marker" in sql
        if is_marker:
            reach(BEFORE_MARKER)
        result = run(sql, *arguments)
        if is_marker:
            reach(AFTER_MARKER)
        return result

    return execute


def watch_end(reach: Reach) -> None:
    """Watch the client: all bindings end their messages with it."""
    end = client.Transaction.end

    async def watched_end(
        self: client.Transaction, verdict: Verdict, *, remark: str = ""
    ) -> TransactionOutcome:
        reach(BEFORE_END)
        return await end(self, verdict, remark=remark)

    client.Transaction.end = watched_end  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
