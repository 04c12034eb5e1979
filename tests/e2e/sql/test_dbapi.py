"""A connection of a driver with messages: sqlite3, psycopg and PyMySQL, without SQLAlchemy."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest
from psycopg.rows import dict_row
from sqlalchemy import Engine, inspect, make_url, text

from escrowmq import Message, Rollback, Verdict
from escrowmq.clock import ManualClock
from escrowmq.database.marker import HOUR_MS
from escrowmq.dbapi import Escrow, JoinedMessages
from escrowmq.errors import (
    ConfigError,
    EscrowError,
    SessionEndedInBlock,
    TransactionConflict,
    TransactionMessageFailed,
    TransportError,
)
from escrowmq.sql import metadata
from tests.support.brokers import LocalServer
from tests.support.sql_bank import (
    delivered_bodies,
    new_topic,
    open_halves,
    saved_ids,
)
from tests.support.tcp_proxy import CuttingProxy
from tests.support.transfers import open_driver_connection

pytestmark = pytest.mark.slow

DRIVER_ERRORS = (sqlite3.Error, psycopg.Error, pymysql.Error)
Connect = Callable[[], Any]


@pytest.fixture
def connect(url: str, engine: Engine) -> Connect:
    """Return a function that connects to a database with the tables of the bank."""
    return lambda: open_driver_connection(make_url(url))


@pytest.fixture
def connection(connect: Connect) -> Iterator[Any]:
    with closing(connect()) as connection:
        yield connection


@pytest.fixture
def topic() -> str:
    return new_topic("dbapi")


@pytest.fixture
def escrow(server: LocalServer, connect: Connect, topic: str) -> Iterator[Escrow]:
    with Escrow(connect, server.namesrv_address, group=topic) as escrow:
        yield escrow


def execute(connection: Any, sql: str) -> None:
    with closing(connection.cursor()) as cursor:
        cursor.execute(sql)


def save(connection: Any, name: str) -> None:
    execute(connection, f"INSERT INTO transfer (id, amount) VALUES ('{name}', 1)")


def pay(
    escrow: Escrow, connection: Any, topic: str, name: str, *, error: Exception | None = None
) -> JoinedMessages:
    """Insert a row and send two messages in one block, which raises the error if one is given."""
    with escrow.join(connection) as tx:
        save(connection, name)
        tx.send(Message(topic, name.encode()))
        tx.send(Message(f"{topic}-more", name.encode()))
        if error is not None:
            raise error
    return tx


def agree(server: LocalServer, engine: Engine, topic: str) -> None:
    """Assert that exactly the messages of saved rows are delivered."""
    server.assert_settled()
    saved = [name.encode() for name in saved_ids(engine)]
    assert delivered_bodies(server, topic) == saved


def test_row_and_messages_are_both_committed_or_neither(
    server: LocalServer, engine: Engine, escrow: Escrow, connection: Any, topic: str
) -> None:
    save(connection, "before")  # in the transaction that is joined
    tx = pay(escrow, connection, topic, "a")
    assert tx.outcome is not None
    assert (tx.outcome.verdict, tx.outcome.acknowledged) == (Verdict.COMMIT, True)
    with pytest.raises(ZeroDivisionError):
        pay(escrow, connection, topic, "b", error=ZeroDivisionError())
    pay(escrow, connection, topic, "c", error=Rollback())
    with pytest.raises(DRIVER_ERRORS):
        pay(escrow, connection, topic, "a")
    assert open_halves(server) == 0
    assert saved_ids(engine) == ["a", "before"]
    assert delivered_bodies(server, topic) == delivered_bodies(server, f"{topic}-more") == [b"a"]


def test_code_without_a_block_commits_or_rolls_back(
    server: LocalServer, engine: Engine, escrow: Escrow, connection: Any, topic: str
) -> None:
    for name, end in (("a", JoinedMessages.commit), ("b", JoinedMessages.rollback)):
        tx = escrow.join(connection)
        save(connection, name)
        tx.send(Message(topic, name.encode()))
        end(tx)
        for late in (tx.commit, tx.rollback, lambda tx=tx: tx.send(Message(topic, b"late"))):
            with pytest.raises(TransactionConflict):
                late()
    with escrow.join(connection) as tx:
        save(connection, "c")
        tx.send(Message(topic, b"c"))
        tx.commit()
    assert open_halves(server) == 0
    assert saved_ids(engine) == ["a", "c"]
    agree(server, engine, topic)


@pytest.mark.parametrize("end", ["commit", "rollback", "close"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_messages_follow_a_connection_that_ends_by_itself(
    server: LocalServer,
    engine: Engine,
    escrow: Escrow,
    connect: Connect,
    topic: str,
    end: str,
    fails: bool,
) -> None:
    connection = connect()
    with pytest.raises((ZeroDivisionError, SessionEndedInBlock, *DRIVER_ERRORS)):
        _end_and_send(escrow, connection, topic, end, fails=fails)
    with contextlib.suppress(*DRIVER_ERRORS):
        connection.close()
    assert saved_ids(engine) == (["a"] if end == "commit" else [])
    agree(server, engine, topic)


def _end_and_send(escrow: Escrow, connection: Any, topic: str, end: str, *, fails: bool) -> None:
    with escrow.join(connection) as tx:
        save(connection, "a")
        tx.send(Message(topic, b"a"))
        getattr(connection, end)()
        with pytest.raises((SessionEndedInBlock, *DRIVER_ERRORS)):
            tx.send(Message(topic, b"b"))
        raise Rollback if end == "commit" and not fails else ZeroDivisionError


def test_a_commit_without_the_escrow_is_delivered_by_a_check(
    server: LocalServer, engine: Engine, escrow: Escrow, connection: Any, topic: str
) -> None:
    tx = escrow.join(connection)
    save(connection, "a")
    tx.send(Message(topic, b"a"))
    connection.commit()
    agree(server, engine, topic)


def test_a_savepoint_that_was_rolled_back_rolls_everything_back(
    server: LocalServer, engine: Engine, escrow: Escrow, connection: Any, topic: str
) -> None:
    with contextlib.suppress(SessionEndedInBlock, *DRIVER_ERRORS), escrow.join(connection) as tx:
        save(connection, "a")
        tx.send(Message(topic, b"a"))
        execute(connection, "SAVEPOINT mine")
        save(connection, "b")
        tx.send(Message(topic, b"b"))
        execute(connection, "ROLLBACK TO SAVEPOINT mine")
    assert saved_ids(engine) == []
    agree(server, engine, topic)


def test_a_message_that_was_not_sent_rolls_back(
    server: LocalServer, engine: Engine, connect: Connect, connection: Any
) -> None:
    with Escrow(connect, "127.0.0.1:1", group="unreachable", retries=0) as escrow:
        with pytest.raises(TransportError):
            pay(escrow, connection, "t", "a")
        with pytest.raises(TransactionMessageFailed):
            _pay_and_ignore_the_error(escrow, connection)
    assert saved_ids(engine) == []


def _pay_and_ignore_the_error(escrow: Escrow, connection: Any) -> None:
    with escrow.join(connection) as tx:
        save(connection, "b")
        with contextlib.suppress(TransportError):
            tx.send(Message("t", b"b"))


def test_a_commit_without_a_response_is_resolved_by_the_marker(
    server: LocalServer, engine: Engine, topic: str
) -> None:
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite is not behind a network")
    with CuttingProxy(engine.url.port or 0) as proxy:
        url = engine.url.set(port=proxy.port)
        with (
            Escrow(
                lambda: open_driver_connection(url), server.namesrv_address, group=topic
            ) as escrow,
            closing(open_driver_connection(url)) as connection,
            escrow.join(connection) as tx,
        ):
            save(connection, "a")
            tx.send(Message(topic, b"a"))
            lose_next_commit(connection, proxy)
    assert saved_ids(engine) == ["a"]
    agree(server, engine, topic)


def lose_next_commit(connection: Any, proxy: CuttingProxy) -> None:
    """Cut the connection before the response to its commit."""
    commit = connection.commit

    def lose_response() -> None:
        proxy.cut_next_response = True
        commit()

    connection.commit = lose_response


def test_rows_of_a_connection_may_be_of_any_kind(
    server: LocalServer, engine: Engine, connect: Connect, topic: str
) -> None:
    def connect_with_dictionaries() -> Any:
        connection = connect()
        if isinstance(connection, psycopg.Connection):
            connection.row_factory = dict_row
        elif isinstance(connection, sqlite3.Connection):
            connection.row_factory = lambda cursor, row: {"row": row}
        else:
            connection.cursorclass = pymysql.cursors.DictCursor
        return connection

    with (
        Escrow(connect_with_dictionaries, server.namesrv_address, group=topic) as escrow,
        closing(connect_with_dictionaries()) as connection,
    ):
        pay(escrow, connection, topic, "a")
        with pytest.raises(ZeroDivisionError):
            pay(escrow, connection, topic, "b", error=ZeroDivisionError())
    agree(server, engine, topic)


def test_a_connection_that_commits_each_statement_is_refused(
    escrow: Escrow, connection: Any
) -> None:
    match connection:
        case sqlite3.Connection():
            connection.isolation_level = None  # allowed: the Escrow begins the transaction itself
            with escrow.join(connection):
                assert connection.in_transaction
            return
        case psycopg.Connection():
            connection.autocommit = True
        case _:
            connection.autocommit(True)
    with pytest.raises(ConfigError, match="autocommit"):
        escrow.join(connection)


def test_a_connection_of_another_driver_is_named(escrow: Escrow) -> None:
    other: Any = object()
    with pytest.raises(ConfigError, match="builtins"):
        escrow.join(other)


def test_an_in_memory_database_is_refused(server: LocalServer) -> None:
    with pytest.raises((ConfigError, sqlite3.Error)):
        Escrow(lambda: sqlite3.connect(":memory:"), server.namesrv_address, group="memory")


def test_the_table_is_that_of_sqlalchemy(
    url: str, escrow: Escrow, engine: Engine, tmp_path: Path
) -> None:
    table = inspect(engine)
    ours = [
        (column["name"], str(column["type"]), column["nullable"])
        for column in table.get_columns("escrowmq_marker")
    ]
    indexes = [index["column_names"] for index in table.get_indexes("escrowmq_marker")]
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE escrowmq_marker"))
    metadata.create_all(engine)
    table = inspect(engine)
    assert ours == [
        (column["name"], str(column["type"]), column["nullable"])
        for column in table.get_columns("escrowmq_marker")
    ]
    assert indexes == [index["column_names"] for index in table.get_indexes("escrowmq_marker")]


def test_old_markers_are_purged(
    server: LocalServer, engine: Engine, connect: Connect, connection: Any, topic: str
) -> None:
    clock = ManualClock()
    with Escrow(connect, server.namesrv_address, group=topic, clock=clock) as escrow:
        pay(escrow, connection, topic, "a")
        with pytest.raises(ConfigError):
            escrow.purge(older_than_ms=1)
        assert escrow.purge() == 0
        clock.advance(ms=HOUR_MS)
        execute(connection, f"UPDATE escrowmq_marker SET at_ms = at_ms - {97 * HOUR_MS}")
        connection.commit()
        escrow.clean_up()
        with engine.connect() as other:
            assert other.scalar(text("SELECT count(*) FROM escrowmq_marker")) == 0


def test_a_transaction_without_messages_leaves_no_marker(
    engine: Engine, escrow: Escrow, connection: Any
) -> None:
    with escrow.join(connection):
        save(connection, "a")
    with engine.connect() as other:
        assert other.scalar(text("SELECT count(*) FROM escrowmq_marker")) == 0
    assert saved_ids(engine) == ["a"]


def test_the_binding_does_not_import_sqlalchemy() -> None:
    script = "import sys, escrowmq.dbapi; print([m for m in sys.modules if m == 'sqlalchemy'])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_a_database_that_cannot_be_reached_is_named(server: LocalServer) -> None:
    def connect() -> Any:
        raise sqlite3.OperationalError("unable to open database file")

    with pytest.raises((EscrowError, sqlite3.Error), match="unable to open"):
        Escrow(connect, server.namesrv_address, group="nowhere")


def test_another_process_can_start_while_a_transaction_is_open(
    server: LocalServer,
    engine: Engine,
    escrow: Escrow,
    connect: Connect,
    connection: Any,
    topic: str,
) -> None:
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite locks the whole file")
    with escrow.join(connection) as tx:
        tx.send(Message(topic, b"a"))
        Escrow(connect, server.namesrv_address, group=topic).close()
