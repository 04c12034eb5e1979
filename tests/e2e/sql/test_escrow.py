"""Escrow with a real database and a real broker: they agree after every failure."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, event, insert, make_url, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session, sessionmaker

from escrowmq import Message, Rollback, Verdict
from escrowmq.blocking import Producer
from escrowmq.clock import ManualClock, SystemClock
from escrowmq.errors import (
    CommitUnknown,
    ConfigError,
    SessionEndedInBlock,
    TransactionMessageFailed,
    TransportError,
)
from escrowmq.sql import Escrow
from escrowmq.sql.statements import marker_table
from tests.e2e.sql.conftest import url_of
from tests.support.brokers import LocalServer
from tests.support.databases import DatabaseServer
from tests.support.sql_bank import (
    Transfer,
    new_topic,
    pay,
    saved_ids,
    tables,
    transfers,
)
from tests.support.tcp_proxy import CuttingProxy
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

UNREACHABLE = "127.0.0.1:1"
HOUR_MS = 3_600_000


def markers(engine: Engine) -> list[tuple[str, int]]:
    """Return the outcome and the number of messages of each marker."""
    with engine.connect() as connection:
        query = select(marker_table.c.outcome, marker_table.c.messages).order_by(
            marker_table.c.messages
        )
        return [(outcome, count) for outcome, count in connection.execute(query)]


def test_row_and_messages_are_both_committed_or_neither(
    server: LocalServer, engine: Engine
) -> None:
    topic = new_topic("both")
    with Escrow(engine, server.namesrv_address, group="g-both") as escrow:
        pay(escrow, topic, "a")
        with pytest.raises(ZeroDivisionError):
            pay(escrow, topic, "b", fails=ZeroDivisionError())
        pay(escrow, topic, "c", fails=Rollback())
    assert saved_ids(engine) == ["a"]
    server.assert_delivered(topic, [b"a", b"a again"])
    assert markers(engine) == [("committed", 2)]
    assert server.open_transactions() == []


def test_a_transaction_without_messages_leaves_no_marker(
    server: LocalServer, sqlite: Engine
) -> None:
    with Escrow(sqlite, server.namesrv_address, group="g-none") as escrow:
        with escrow.transaction() as (session, tx):
            session.execute(insert(transfers).values(id="a", amount=1))
        assert tx.outcome is not None
        assert tx.outcome.verdict is Verdict.COMMIT
    assert saved_ids(sqlite) == ["a"]
    assert markers(sqlite) == []


def test_a_statement_that_the_database_refuses_rolls_the_messages_back(
    server: LocalServer, engine: Engine
) -> None:
    topic = new_topic("twice")
    with Escrow(engine, server.namesrv_address, group="g-twice") as escrow:
        pay(escrow, topic, "a")
        with pytest.raises(IntegrityError):
            pay(escrow, topic, "a")
    server.assert_delivered(topic, [b"a", b"a again"])
    assert server.open_transactions() == []


def test_a_failure_in_the_last_flush_rolls_back_without_reading_the_marker(
    server: LocalServer, engine: Engine
) -> None:
    topic = new_topic("flush")
    with Escrow(engine, server.namesrv_address, group=topic) as escrow:
        pay(escrow, new_topic("paid"), "a")
        markers_before = markers(engine)
        with pytest.raises(IntegrityError):
            _add_and_send(escrow, topic, "a")
        assert server.open_transactions() == []
    server.assert_delivered(topic, [])
    # A failed COMMIT would have been resolved by the marker, which leaves a tombstone.
    assert markers(engine) == markers_before


def _add_and_send(escrow: Escrow, topic: str, name: str) -> None:
    """Add a row that reaches the database in the last flush."""
    with escrow.transaction() as (session, tx):
        session.add(Transfer(id=name, amount=1))
        tx.send(Message(topic, name.encode()))


def test_a_half_that_cannot_be_sent_rolls_the_database_back(sqlite: Engine) -> None:
    with Escrow(sqlite, UNREACHABLE, group="g-unreachable", retries=0) as escrow:
        with pytest.raises(TransportError):
            pay(escrow, "t", "a")
        with pytest.raises(TransactionMessageFailed):
            _pay_and_ignore_the_error(escrow, "b")
    assert saved_ids(sqlite) == []


def _pay_and_ignore_the_error(escrow: Escrow, name: str) -> None:
    with escrow.transaction() as (session, tx):
        session.execute(insert(transfers).values(id=name, amount=1))
        with contextlib.suppress(TransportError):
            tx.send(Message("t", name.encode()))


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_session_ended_inside_the_block_is_decided_by_a_check(
    server: LocalServer, sqlite: Engine, end: str
) -> None:
    topic = new_topic("inside")
    with Escrow(sqlite, server.namesrv_address, group=topic) as escrow:
        with pytest.raises(SessionEndedInBlock):
            _pay_and_end(escrow, topic, end)
        server.assert_settled()
    assert saved_ids(sqlite) == (["a"] if end == "commit" else [])
    server.assert_delivered(topic, ([b"a"] if end == "commit" else []))


def _pay_and_end(escrow: Escrow, topic: str, end: str) -> None:
    with escrow.transaction() as (session, tx):
        session.execute(insert(transfers).values(id="a", amount=1))
        tx.send(Message(topic, b"a"))
        session.commit() if end == "commit" else session.rollback()


def test_the_application_can_provide_its_sessions(server: LocalServer, sqlite: Engine) -> None:
    class BankSession(Session):
        pass

    sessions = sessionmaker(class_=BankSession, expire_on_commit=False)
    with (
        Escrow(sqlite, server.namesrv_address, group="g-own", session_factory=sessions) as escrow,
        escrow.transaction() as (session, _),
    ):
        assert isinstance(session, BankSession)


def test_an_end_that_fails_raises_no_error(sqlite: Engine) -> None:
    with LocalServer() as server:
        # The broker knows whom to check after its restart as soon as a heartbeat has arrived.
        with Escrow(sqlite, server.namesrv_address, group="g-end", heartbeat_s=0.5) as escrow:
            event.listen(sqlite, "commit", lambda _: server.kill(), once=True)
            with escrow.transaction() as (session, tx):
                session.execute(insert(transfers).values(id="a", amount=1))
                tx.send(Message("t", b"a"))
            assert tx.outcome is not None
            assert tx.outcome.verdict is Verdict.COMMIT
            assert not tx.outcome.acknowledged
            assert "left to check-back" in tx.outcome.detail
            server.start()
            escrow.clean_up()
            server.assert_settled()
        server.assert_delivered("t", [b"a"])


# --- a COMMIT without a response -----------------------------------------------------------------


@pytest.fixture
def postgres(database_servers: dict[str, DatabaseServer], tmp_path: Path) -> str:
    return url_of("postgresql", database_servers, tmp_path)


def engine_through(proxy: CuttingProxy, url: str) -> Engine:
    engine = create_engine(make_url(url).set(port=proxy.port))
    tables.create_all(engine)
    return engine


def test_a_commit_without_a_response_is_resolved_by_the_marker(
    server: LocalServer, postgres: str
) -> None:
    topic = new_topic("lost")
    with CuttingProxy(make_url(postgres).port or 0) as proxy:
        engine = engine_through(proxy, postgres)
        with Escrow(engine, server.namesrv_address, group=topic) as escrow:
            event.listen(
                engine, "commit", lambda _: setattr(proxy, "cut_next_response", True), once=True
            )
            pay(escrow, topic, "a")
        assert saved_ids(engine) == ["a"]
        engine.dispose()
    server.assert_delivered(topic, [b"a", b"a again"])


def test_a_commit_that_cannot_be_resolved_is_decided_by_a_check(
    server: LocalServer, postgres: str
) -> None:
    topic = new_topic("unresolved")
    with CuttingProxy(make_url(postgres).port or 0) as proxy:
        engine = engine_through(proxy, postgres)

        def lose_connection(_: object) -> None:
            proxy.cut_next_response = proxy.refuses_connections = True

        with Escrow(engine, server.namesrv_address, group=topic) as escrow:
            event.listen(engine, "commit", lose_connection, once=True)
            with pytest.raises(CommitUnknown, match="check-back") as raised:
                pay(escrow, topic, "a")
            assert raised.value.may_have_happened
            assert isinstance(raised.value.__cause__, DBAPIError)
            proxy.refuses_connections = False
            server.assert_settled()
        assert saved_ids(engine) == ["a"]
        engine.dispose()
    server.assert_delivered(topic, [b"a", b"a again"])


def test_a_session_that_ends_before_the_commit_is_rolled_back(
    server: LocalServer, postgres: str
) -> None:
    topic = new_topic("gone")
    engine = create_engine(postgres)
    tables.create_all(engine)
    with Escrow(engine, server.namesrv_address, group=topic) as escrow:
        with pytest.raises(DBAPIError):
            _pay_and_terminate_session(escrow, engine, topic)
        assert server.open_transactions() == []  # the verdict was sent, no check was needed
    assert saved_ids(engine) == []
    server.assert_delivered(topic, [])
    engine.dispose()


def _pay_and_terminate_session(escrow: Escrow, engine: Engine, topic: str) -> None:
    """Pay, and terminate the session in the database just before its commit."""
    with escrow.transaction() as (session, tx):
        session.execute(insert(transfers).values(id="a", amount=1))
        tx.send(Message(topic, b"a"))
        pid = session.scalar(text("SELECT pg_backend_pid()"))

        def terminate(_: object) -> None:
            other = create_engine(engine.url)
            with other.connect() as connection:
                connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
            other.dispose()

        event.listen(engine, "commit", terminate, once=True)


# --- check-back ----------------------------------------------------------------------------------


def test_another_member_of_the_group_answers_checks_before_it_sends(
    server: LocalServer, sqlite: Engine
) -> None:
    topic = new_topic("other")
    with Producer(server.namesrv_address, group=topic) as producer:
        tx = producer.transaction(id="escrow-never-claimed")
        tx.send(Message(topic, b"a"))
    assert len(server.open_transactions()) == 1
    with Escrow(sqlite, server.namesrv_address, group=topic):
        server.assert_settled()
    assert markers(sqlite) == [("tombstone", 0)]
    server.assert_delivered(topic, [])


def test_a_half_of_another_producer_gets_no_verdict(
    server: LocalServer, sqlite: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    topic = new_topic("foreign")
    with Producer(server.namesrv_address, group=topic) as producer:
        abandoned = producer.transaction()
        abandoned.send(Message(topic, b"a"))
    with caplog.at_level(logging.ERROR), Escrow(sqlite, server.namesrv_address, group=topic):
        wait_until(lambda: "a group of its own" in caplog.text, "the half is checked")
    assert markers(sqlite) == []
    with Producer(server.namesrv_address, group=topic) as producer:
        producer.send(Message(topic, b"b"))
        # The half message is still open, so its own producer can commit it.
        successor = producer.transaction()
        successor.halves.extend(abandoned.halves)
        successor.end(Verdict.COMMIT)
    server.assert_delivered(topic, [b"a", b"b"])


# --- clean-up ------------------------------------------------------------------------------------


def test_markers_are_purged_when_their_retention_is_over(
    server: LocalServer, sqlite: Engine
) -> None:
    clock = ManualClock()
    topic = new_topic("old")
    with Escrow(
        sqlite, server.namesrv_address, group="g-old", retention_ms=80 * HOUR_MS, clock=clock
    ) as escrow:
        pay(escrow, topic, "a")
        with pytest.raises(ConfigError, match="288000000"):
            escrow.purge(older_than_ms=1)
        assert escrow.purge() == 0
        with sqlite.begin() as connection:
            older_ms = marker_table.c.at_ms - 80 * HOUR_MS - 1
            connection.execute(update(marker_table).values(at_ms=older_ms))
        pay(escrow, topic, "b")
        clock.advance(ms=HOUR_MS)
        escrow.clean_up()  # runs once an hour
        assert len(markers(sqlite)) == 1


def test_a_half_is_not_decided_when_its_marker_may_have_been_purged(
    server: LocalServer, sqlite: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Both the age of a marker and the age of a half are measured by the database's clock."""
    topic = new_topic("too-old")
    began_ms = SystemClock().now_ms() - 97 * HOUR_MS
    with Producer(server.namesrv_address, group=topic) as producer:
        tx = producer.transaction(id="escrow-may-be-purged")
        tx.send(Message(topic, b"a", properties={"TX_TIME": str(began_ms)}))
    clock = ManualClock()  # years behind, so it would take the half for young
    with (
        caplog.at_level(logging.ERROR),
        Escrow(sqlite, server.namesrv_address, group=topic, clock=clock),
    ):
        wait_until(lambda: "older than markers are kept" in caplog.text, "the half is checked")
    assert markers(sqlite) == []
    with Producer(server.namesrv_address, group=topic) as producer:
        producer.send(Message(topic, b"b"))
        successor = producer.transaction()
        successor.halves.extend(tx.halves)
        successor.end(Verdict.ROLLBACK)


def test_markers_can_be_purged_after_the_acknowledgement(
    server: LocalServer, sqlite: Engine
) -> None:
    topic = new_topic("at-once")
    with Escrow(sqlite, server.namesrv_address, group="g-once", purge_acknowledged=True) as escrow:
        pay(escrow, topic, "a")
        assert len(markers(sqlite)) == 1
        escrow.clean_up()
        assert markers(sqlite) == []
        pay(escrow, topic, "b")
    assert markers(sqlite) == []
    server.assert_delivered(topic, count=4)
