"""However a block ends, the database decides: what is committed is delivered, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from escrowmq import Message, Rollback, Verdict
from escrowmq.database.transaction import TransactionMessages
from escrowmq.errors import EscrowError, SessionEndedInBlock, TransactionConflict
from escrowmq.sql import Escrow
from tests.support.brokers import LocalServer
from tests.support.sql_bank import (
    new_topic,
    saved_ids,
)
from tests.support.sql_endings import ENDINGS, commit_by_driver, save
from tests.support.tcp_proxy import CuttingProxy

pytestmark = pytest.mark.slow


def agree(server: LocalServer, engine: Engine, topic: str) -> None:
    """Assert that exactly the messages of saved rows are delivered."""
    server.assert_settled()
    server.assert_delivered(topic, [name.encode() for name in saved_ids(engine)])


@pytest.mark.parametrize("fails", [False, True])
def test_a_statement_that_commits_by_itself_delivers_the_message(
    server: LocalServer, engine: Engine, fails: bool
) -> None:
    """MariaDB commits before it creates a table; the other databases do not."""
    topic = new_topic("implicit")
    with Escrow(engine, server.namesrv_address, group=topic) as escrow:
        with contextlib.suppress(ZeroDivisionError, SessionEndedInBlock):
            _pay_and_create_table(escrow, topic, fails=fails)
        assert server.open_transactions() == []  # the marker was asked at once, no check was needed
        agree(server, engine, topic)


def _pay_and_create_table(escrow: Escrow, topic: str, *, fails: bool) -> None:
    with escrow.transaction() as (session, tx):
        save(session, "a")
        tx.send(Message(topic, b"a"))
        session.execute(text("CREATE TABLE extra (id integer)"))
        if fails:
            raise ZeroDivisionError


def test_a_quiet_rollback_after_a_commit_is_reported(server: LocalServer, sqlite: Engine) -> None:
    topic = new_topic("quiet")
    with Escrow(sqlite, server.namesrv_address, group=topic) as escrow:
        with pytest.raises(SessionEndedInBlock):
            _commit_and_roll_back_quietly(escrow, topic)
        agree(server, sqlite, topic)


def _commit_and_roll_back_quietly(escrow: Escrow, topic: str) -> None:
    with escrow.transaction() as (session, tx):
        save(session, "a")
        tx.send(Message(topic, b"a"))
        commit_by_driver(session)
        raise Rollback


@pytest.mark.parametrize("end", ENDINGS)
@pytest.mark.parametrize("fails", [False, True])
def test_a_message_is_refused_after_the_transaction_ended_in_the_block(
    server: LocalServer, engine: Engine, end: Callable[[Session], None], fails: bool
) -> None:
    topic = new_topic("ended")
    refused: list[BaseException] = []
    with Escrow(engine, server.namesrv_address, group=topic) as escrow:
        with pytest.raises((EscrowError, ZeroDivisionError, DBAPIError)):
            _end_and_send(escrow, topic, end, refused, fails=fails)
        assert [type(error) for error in refused] == [SessionEndedInBlock]
        agree(server, engine, topic)


def _end_and_send(
    escrow: Escrow,
    topic: str,
    end: Callable[[Session], None],
    refused: list[BaseException],
    *,
    fails: bool,
) -> None:
    with escrow.transaction() as (session, tx):
        save(session, "a")
        tx.send(Message(topic, b"a"))
        end(session)
        with contextlib.suppress(SQLAlchemyError):
            save(session, "b")  # begins another transaction
        try:
            tx.send(Message(topic, b"b"))
        except SessionEndedInBlock as error:
            refused.append(error)
        if fails:
            raise ZeroDivisionError


def test_a_message_is_refused_after_the_block(server: LocalServer, sqlite: Engine) -> None:
    with Escrow(sqlite, server.namesrv_address, group="g-after") as escrow:
        with escrow.transaction() as (_, tx):
            pass
        with pytest.raises(TransactionConflict):
            tx.send(Message("t", b"late"))
    assert server.open_transactions() == []


def test_a_transaction_that_the_database_gave_up_is_not_committed(
    server: LocalServer, engine: Engine
) -> None:
    """PostgreSQL answers the COMMIT of an aborted transaction with a rollback, not an error."""
    topic = new_topic("aborted")
    with Escrow(engine, server.namesrv_address, group=topic) as escrow:
        with contextlib.suppress(DBAPIError, EscrowError):
            _pay_and_ignore_an_error(escrow, topic)
        agree(server, engine, topic)


def _pay_and_ignore_an_error(escrow: Escrow, topic: str) -> None:
    with escrow.transaction() as (session, tx):
        save(session, "a")
        tx.send(Message(topic, b"a"))
        with contextlib.suppress(DBAPIError):
            session.execute(text("SELECT * FROM there_is_no_such_table"))


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interrupted_commit_is_decided_by_the_database(
    server: LocalServer, engine: Engine, interrupt: type[BaseException], moment: str
) -> None:
    topic = new_topic("interrupted")

    def interrupt_commit(*_: object) -> None:
        raise interrupt

    with Escrow(engine, server.namesrv_address, group=topic) as escrow:
        if moment == "before":
            event.listen(engine, "commit", interrupt_commit, once=True)
        else:
            event.listen(Session, "after_commit", interrupt_commit, once=True)
        with pytest.raises(interrupt):
            _pay(escrow, topic)
        agree(server, engine, topic)


def _pay(escrow: Escrow, topic: str) -> None:
    with escrow.transaction() as (session, tx):
        save(session, "a")
        tx.send(Message(topic, b"a"))


def test_a_database_that_cannot_be_asked_leaves_the_message_to_a_check(
    server: LocalServer, engine: Engine
) -> None:
    topic = new_topic("unasked")
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite is not behind a network")
    with CuttingProxy(engine.url.port or 0) as proxy:
        through_proxy = create_engine(make_url(engine.url).set(port=proxy.port))
        with Escrow(through_proxy, server.namesrv_address, group=topic) as escrow:
            messages: list[TransactionMessages] = []
            with pytest.raises((DBAPIError, EscrowError)):
                _pay_and_lose_the_database(escrow, topic, proxy, messages)
            assert messages[0].outcome is not None
            assert messages[0].outcome.verdict is Verdict.UNKNOWN
            proxy.refuses_connections = False
            agree(server, engine, topic)
        through_proxy.dispose()


def _pay_and_lose_the_database(
    escrow: Escrow, topic: str, proxy: CuttingProxy, messages: list[TransactionMessages]
) -> None:
    with escrow.transaction() as (session, tx):
        messages.append(tx)
        save(session, "a")
        tx.send(Message(topic, b"a"))
        proxy.cut_next_response = proxy.refuses_connections = True
        save(session, "b")


# --- savepoints ----------------------------------------------------------------------------------


def pay_in_savepoint(session: Session, tx: TransactionMessages, topic: str, name: str) -> None:
    with session.begin_nested():
        save(session, name)
        tx.send(Message(topic, name.encode()))


def fail_in_savepoint(session: Session, tx: TransactionMessages, topic: str, name: str) -> None:
    with contextlib.suppress(ZeroDivisionError), session.begin_nested():
        save(session, name)
        tx.send(Message(topic, name.encode()))
        raise ZeroDivisionError


def test_messages_follow_their_savepoint(server: LocalServer, engine: Engine) -> None:
    topic = new_topic("savepoint")
    with Escrow(engine, server.namesrv_address, group=topic) as escrow:
        with escrow.transaction() as (session, tx):
            save(session, "a")
            tx.send(Message(topic, b"a"))
            pay_in_savepoint(session, tx, topic, "b")
            fail_in_savepoint(session, tx, topic, "c")
            with contextlib.suppress(ZeroDivisionError), session.begin_nested():
                pay_in_savepoint(session, tx, topic, "d")  # released, then rolled back outside
                raise ZeroDivisionError
            with session.begin_nested():
                fail_in_savepoint(session, tx, topic, "e")
                save(session, "f")
                tx.send(Message(topic, b"f"))
            save(session, "g")
            tx.send(Message(topic, b"g"))
        assert tx.outcome is not None
        assert (tx.outcome.verdict, tx.outcome.acknowledged) == (Verdict.COMMIT, True)
        assert server.open_transactions() == []
        assert saved_ids(engine) == ["a", "b", "f", "g"]
        agree(server, engine, topic)


def test_messages_only_in_savepoints_are_decided_too(server: LocalServer, engine: Engine) -> None:
    topic = new_topic("only")
    with Escrow(engine, server.namesrv_address, group=topic) as escrow:
        with escrow.transaction() as (session, tx):
            pay_in_savepoint(session, tx, topic, "a")
            fail_in_savepoint(session, tx, topic, "b")
        with contextlib.suppress(ZeroDivisionError), escrow.transaction() as (session, tx):
            pay_in_savepoint(session, tx, topic, "c")
            raise ZeroDivisionError
        assert server.open_transactions() == []
        assert saved_ids(engine) == ["a"]
        agree(server, engine, topic)


def test_a_crash_after_the_commit_does_not_deliver_a_savepoint_that_was_rolled_back(
    server: LocalServer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = new_topic("crash")
    with Escrow(engine, server.namesrv_address, group=topic) as escrow:
        # The broker is not told, as if the process had been killed after the commit.
        monkeypatch.setattr(TransactionMessages, "end", lambda *_: None)
        with escrow.transaction() as (session, tx):
            save(session, "a")
            tx.send(Message(topic, b"a"))
            fail_in_savepoint(session, tx, topic, "b")
            pay_in_savepoint(session, tx, topic, "c")
        agree(server, engine, topic)
        assert saved_ids(engine) == ["a", "c"]


def test_a_savepoint_of_the_connection_counts_too(server: LocalServer, engine: Engine) -> None:
    topic = new_topic("core")
    with Escrow(engine, server.namesrv_address, group=topic) as escrow:
        with escrow.transaction() as (session, tx):
            savepoint = session.connection().begin_nested()
            save(session, "a")
            tx.send(Message(topic, b"a"))
            savepoint.rollback()
            save(session, "b")
            tx.send(Message(topic, b"b"))
        assert saved_ids(engine) == ["b"]
        agree(server, engine, topic)


def test_a_savepoint_in_plain_sql_never_delivers_what_it_rolled_back(
    server: LocalServer, engine: Engine
) -> None:
    topic = new_topic("plain")
    with Escrow(engine, server.namesrv_address, group=topic) as escrow:
        with contextlib.suppress(SessionEndedInBlock, DBAPIError):
            _roll_back_to_a_plain_savepoint(escrow, topic)
        agree(server, engine, topic)


def _roll_back_to_a_plain_savepoint(escrow: Escrow, topic: str) -> None:
    with escrow.transaction() as (session, tx):
        save(session, "a")
        tx.send(Message(topic, b"a"))
        session.execute(text("SAVEPOINT mine"))
        save(session, "b")
        tx.send(Message(topic, b"b"))
        session.execute(text("ROLLBACK TO SAVEPOINT mine"))
