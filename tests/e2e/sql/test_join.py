"""A joined transaction: its own commit or rollback decides the messages, however it comes about."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from sqlalchemy import Connection, Engine, create_engine, delete, event, insert, make_url, text
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.orm.session import JoinTransactionMode

from escrowmq import Message, Verdict
from escrowmq.database.transaction import TransactionMessages
from escrowmq.errors import (
    ConfigError,
    EscrowError,
    SessionEndedInBlock,
    TransactionConflict,
    TransactionMessageFailed,
    TransportError,
)
from escrowmq.sql import Escrow
from tests.support.brokers import LocalServer
from tests.support.sql_bank import (
    Transfer,
    delivered_bodies,
    new_topic,
    open_halves,
    saved_ids,
    transfers,
)
from tests.support.sql_endings import (
    ENDINGS,
    roll_back_by_driver,
    roll_back_by_statement,
    save,
)
from tests.support.tcp_proxy import CuttingProxy
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def topic() -> str:
    return new_topic("join")


@pytest.fixture
def escrow(server: LocalServer, engine: Engine, topic: str) -> Iterator[Escrow]:
    with Escrow(engine, server.namesrv_address, group=topic) as escrow:
        yield escrow


def agree(server: LocalServer, engine: Engine, topic: str) -> None:
    """Assert that exactly the messages of saved rows are delivered."""
    server.assert_settled()
    assert delivered_bodies(server, topic) == [name.encode() for name in saved_ids(engine)]


def pay(
    escrow: Escrow, target: Session | scoped_session[Session] | Connection, topic: str, name: str
) -> TransactionMessages:
    """Insert a row and send a message in the transaction of a session or a connection."""
    tx = escrow.join(target)
    target.execute(insert(transfers).values(id=name, amount=1))
    tx.send(Message(topic, name.encode()))
    return tx


def outcome_of(tx: TransactionMessages) -> tuple[Verdict, bool] | None:
    return None if tx.outcome is None else (tx.outcome.verdict, tx.outcome.acknowledged)


def wait_until_ended(tx: TransactionMessages) -> None:
    wait_until(lambda: tx.outcome is not None, "the messages are ended")


COMMITTED, ROLLED_BACK = (Verdict.COMMIT, True), (Verdict.ROLLBACK, True)


# --- sessions ------------------------------------------------------------------------------------


def test_the_end_of_each_transaction_of_a_session_decides_its_messages(
    server: LocalServer, engine: Engine, escrow: Escrow, topic: str
) -> None:
    with Session(engine) as session:
        committed = pay(escrow, session, topic, "a")
        assert pay(escrow, session, topic, "b") is committed
        assert delivered_bodies(server, topic) == []
        session.commit()
        assert outcome_of(committed) == COMMITTED
        rolled_back = pay(escrow, session, topic, "c")
        session.rollback()
        assert outcome_of(rolled_back) == ROLLED_BACK
        closed = pay(escrow, session, topic, "d")
    assert outcome_of(closed) == ROLLED_BACK
    with sessionmaker(engine).begin() as session:
        in_block = pay(escrow, session, topic, "e")
    assert outcome_of(in_block) == COMMITTED
    assert open_halves(server) == 0  # no check was needed
    assert saved_ids(engine) == ["a", "b", "e"]
    agree(server, engine, topic)


def test_closing_the_escrow_waits_for_the_brokers(
    server: LocalServer, engine: Engine, topic: str
) -> None:
    with Escrow(engine, server.namesrv_address, group=topic) as escrow, Session(engine) as session:
        tx = pay(escrow, session, topic, "a")
        session.commit()
    assert outcome_of(tx) == COMMITTED


def test_a_joined_transaction_without_messages_leaves_nothing(
    engine: Engine, escrow: Escrow
) -> None:
    with Session(engine) as session:
        tx = escrow.join(session)
        save(session, "a")
        session.commit()
        assert outcome_of(tx) == COMMITTED
        with pytest.raises(TransactionConflict):
            tx.send(Message("t", b"late"))
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM escrowmq_marker")) == 0


def test_rows_of_the_last_flush_and_messages_of_a_listener_belong_to_the_transaction(
    server: LocalServer, engine: Engine, escrow: Escrow, topic: str
) -> None:
    with Session(engine) as session:
        tx = escrow.join(session)

        @event.listens_for(session, "before_commit")
        def send_domain_events(_: Session) -> None:
            tx.send(Message(topic, b"a"))

        session.add(Transfer(id="a", amount=1))
        session.commit()
    assert outcome_of(tx) == COMMITTED
    agree(server, engine, topic)


def test_a_scoped_session_is_joined_like_a_session(
    server: LocalServer, engine: Engine, escrow: Escrow, topic: str
) -> None:
    registry = scoped_session(sessionmaker(engine))
    tx = pay(escrow, registry, topic, "a")
    assert escrow.join(registry()) is tx
    registry.commit()
    removed = pay(escrow, registry, topic, "b")
    registry.remove()
    assert (outcome_of(tx), outcome_of(removed)) == (COMMITTED, ROLLED_BACK)
    assert open_halves(server) == 0
    agree(server, engine, topic)


def test_messages_follow_their_savepoint(
    server: LocalServer, engine: Engine, escrow: Escrow, topic: str
) -> None:
    with Session(engine) as session:
        with session.begin_nested():
            tx = pay(escrow, session, topic, "a")
        with contextlib.suppress(ZeroDivisionError), session.begin_nested():
            assert pay(escrow, session, topic, "b") is tx
            raise ZeroDivisionError
        with contextlib.suppress(ZeroDivisionError), session.begin_nested():
            with session.begin_nested():
                pay(escrow, session, topic, "c")  # released, then rolled back outside
            raise ZeroDivisionError
        pay(escrow, session, topic, "d")
        session.commit()
    assert outcome_of(tx) == COMMITTED
    assert open_halves(server) == 0
    assert saved_ids(engine) == ["a", "d"]
    agree(server, engine, topic)


@pytest.mark.parametrize("mode", ["create_savepoint", "control_fully", "rollback_only"])
def test_a_session_inside_an_outer_transaction_is_decided_by_that_one(
    server: LocalServer, engine: Engine, escrow: Escrow, topic: str, mode: JoinTransactionMode
) -> None:
    for name, commits in (("a", True), ("b", False)):
        with engine.connect() as connection:
            outer = connection.begin()
            connection.execute(insert(transfers).values(id=name, amount=1))
            tx = escrow.join(connection)
            with Session(connection, join_transaction_mode=mode) as session:
                assert pay(escrow, session, topic, f"{name}-inside") is tx
                if mode != "control_fully":
                    session.commit()
                    assert tx.is_open
                    assert pay(escrow, session, topic, f"{name}-next") is tx
                    session.commit()
                if mode == "create_savepoint":
                    escrow.join(session).send(Message(topic, b"undone"))  # begins the savepoint
                    session.rollback()
                if mode == "control_fully":
                    session.commit() if commits else session.rollback()
            if mode != "control_fully":
                assert f"{name}-inside".encode() not in delivered_bodies(server, topic)
                outer.commit() if commits else outer.rollback()
            wait_until_ended(tx)
            assert outcome_of(tx) == (COMMITTED if commits else ROLLED_BACK)
    with engine.begin() as connection:
        connection.execute(delete(transfers).where(transfers.c.id == "a"))  # it had no message
    assert saved_ids(engine) == ["a-inside", "a-next"][: 1 if mode == "control_fully" else 2]
    agree(server, engine, topic)


def test_a_rollback_of_a_session_may_roll_back_the_transaction_around_it(
    server: LocalServer, engine: Engine, escrow: Escrow, topic: str
) -> None:
    with engine.connect() as connection:
        connection.begin()
        with Session(connection, join_transaction_mode="rollback_only") as session:
            tx = pay(escrow, session, topic, "a")
            session.rollback()
        wait_until_ended(tx)
        assert outcome_of(tx) == ROLLED_BACK
    agree(server, engine, topic)


def test_a_block_of_the_escrow_and_its_session_have_the_same_messages(
    server: LocalServer, engine: Engine, escrow: Escrow, topic: str
) -> None:
    with escrow.transaction() as (session, tx):
        assert pay(escrow, session, topic, "a") is tx
    assert outcome_of(tx) == COMMITTED
    agree(server, engine, topic)


# --- connections ---------------------------------------------------------------------------------


def test_the_end_of_each_transaction_of_a_connection_decides_its_messages(
    server: LocalServer, engine: Engine, escrow: Escrow, topic: str
) -> None:
    ends: list[Callable[[Connection], None]] = [
        Connection.commit,
        Connection.rollback,
        Connection.close,
    ]
    for number, end in enumerate(ends):
        with engine.connect() as connection:
            connection.execute(text("SELECT 1"))
            tx = pay(escrow, connection, topic, f"a{number}")
            assert pay(escrow, connection, topic, f"b{number}") is tx
            end(connection)
            with pytest.raises(TransactionConflict):
                tx.send(Message(topic, b"late"))
            wait_until_ended(tx)
            assert outcome_of(tx) == (COMMITTED if end is Connection.commit else ROLLED_BACK)
    with engine.begin() as connection:
        pay(escrow, connection, topic, "c")
        with connection.begin_nested() as savepoint:
            pay(escrow, connection, topic, "d")
            savepoint.rollback()
    assert saved_ids(engine) == ["a0", "b0", "c"]
    agree(server, engine, topic)


def test_a_connection_is_not_confused_with_the_next_user_of_its_driver_connection(
    server: LocalServer, engine: Engine, escrow: Escrow, topic: str
) -> None:
    single = create_engine(engine.url, pool_size=1, max_overflow=0)
    with Escrow(single, server.namesrv_address, group=f"{topic}-single") as escrow:
        with single.connect() as connection:
            unused = escrow.join(connection)
        with single.connect() as connection:
            tx = pay(escrow, connection, topic, "a")
            assert tx is not unused
            connection.commit()
        wait_until_ended(tx)
    single.dispose()
    agree(server, engine, topic)


# --- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("end", ENDINGS)
@pytest.mark.parametrize("commits", [False, True])
def test_the_messages_follow_a_transaction_that_ends_behind_the_session(
    server: LocalServer,
    engine: Engine,
    escrow: Escrow,
    topic: str,
    end: Callable[[Session], None],
    commits: bool,
) -> None:
    with Session(engine) as session, contextlib.suppress(EscrowError, SQLAlchemyError):
        tx = pay(escrow, session, topic, "a")
        end(session)
        save(session, "b")  # begins another transaction
        with contextlib.suppress(EscrowError):
            tx.send(Message(topic, b"b"))
            pytest.fail("a message was sent after its transaction had ended")
        if commits:
            session.commit()
            # A new transaction of the session is committed without a message.
            assert end.__name__.endswith(("session", "connection"))
    server.assert_settled()
    delivered = [b"a"] if "a" in saved_ids(engine) else []
    assert delivered_bodies(server, topic) == delivered


@pytest.mark.parametrize("end", [roll_back_by_statement, roll_back_by_driver])
def test_a_commit_after_a_rollback_behind_the_session_is_refused(
    server: LocalServer, engine: Engine, escrow: Escrow, topic: str, end: Callable[[Session], None]
) -> None:
    with Session(engine) as session:
        pay(escrow, session, topic, "a")
        end(session)
        save(session, "b")  # begins another transaction
        with pytest.raises((SessionEndedInBlock, DBAPIError)):
            session.commit()
    assert saved_ids(engine) == []
    agree(server, engine, topic)


@contextmanager
def statements_of(engine: Engine) -> Iterator[list[str]]:
    """Yield a list to which the statements are added that an engine executes."""
    statements: list[str] = []

    def add(*arguments: object) -> None:
        statements.append(str(arguments[2]))

    event.listen(engine, "before_cursor_execute", add)
    yield statements
    event.remove(engine, "before_cursor_execute", add)


def test_a_message_takes_one_statement_with_psycopg(
    server: LocalServer, engine: Engine, escrow: Escrow, topic: str
) -> None:
    if engine.dialect.name != "postgresql":
        pytest.skip("only PostgreSQL reports that a transaction is still open")
    with statements_of(engine) as statements, Session(engine) as session:
        pay(escrow, session, topic, "a")
        session.commit()
    assert [statement.split()[:3] for statement in statements] == [
        ["INSERT", "INTO", "transfer"],
        ["INSERT", "INTO", "escrowmq_marker"],
    ]
    with statements_of(engine) as statements, Session(engine) as session:
        pay(escrow, session, topic, "b")
        session.execute(text("SET LOCAL application_name = 'mine'"))
        session.commit()
    assert statements[-1].startswith("SELECT escrowmq_marker.messages")
    with engine.connect() as connection:  # the same one, from the pool
        assert connection.scalar(text("SHOW application_name")) == ""
    agree(server, engine, topic)


@contextmanager
def unreachable_escrow(engine: Engine) -> Iterator[Escrow]:
    with Escrow(engine, "127.0.0.1:1", group="unreachable", retries=0) as escrow:
        yield escrow


def test_a_message_that_was_not_sent_makes_the_commit_fail(engine: Engine) -> None:
    with unreachable_escrow(engine) as escrow:
        with Session(engine) as session:
            with pytest.raises(TransportError):
                pay(escrow, session, "t", "a")
            with pytest.raises(TransactionMessageFailed):
                session.commit()
            session.rollback()
            save(session, "b")
            session.commit()
        assert saved_ids(engine) == ["b"]


def test_a_refused_commit_does_not_commit_with_the_next_one(engine: Engine) -> None:
    """SQLAlchemy sends no ROLLBACK after a commit that failed."""
    with unreachable_escrow(engine) as escrow, engine.connect() as connection:
        with pytest.raises(TransportError):
            pay(escrow, connection, "t", "a")
        with pytest.raises(TransactionMessageFailed):
            connection.commit()
        connection.rollback()
        connection.execute(insert(transfers).values(id="b", amount=1))
        connection.commit()
    assert saved_ids(engine) == ["b"]


def test_a_commit_that_the_database_refuses_rolls_the_messages_back(
    server: LocalServer, engine: Engine, escrow: Escrow, topic: str
) -> None:
    """SQLite and PostgreSQL check deferred constraints only at the commit."""
    if engine.dialect.name == "mysql":
        pytest.skip("MariaDB has no deferred constraints")
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE TABLE child (id varchar(64) REFERENCES transfer (id) "
                "DEFERRABLE INITIALLY DEFERRED)"
            )
        )
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", lambda c, _: c.execute("PRAGMA foreign_keys = ON"))
        engine.dispose()
    with Session(engine) as session:
        tx = pay(escrow, session, topic, "a")
        session.execute(text("INSERT INTO child (id) VALUES ('orphan')"))
        with pytest.raises(IntegrityError):
            session.commit()
        session.rollback()
    assert outcome_of(tx) == ROLLED_BACK
    agree(server, engine, topic)


@pytest.mark.parametrize("is_reachable", [True, False], ids=["reachable", "unreachable"])
def test_a_commit_without_a_response_is_decided_by_the_marker(
    server: LocalServer, engine: Engine, topic: str, is_reachable: bool
) -> None:
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite is not behind a network")
    with CuttingProxy(engine.url.port or 0) as proxy:
        through_proxy = create_engine(make_url(engine.url).set(port=proxy.port))

        def lose_response(_: object) -> None:
            proxy.cut_next_response = True
            proxy.refuses_connections = not is_reachable

        with Escrow(through_proxy, server.namesrv_address, group=topic) as escrow:
            event.listen(through_proxy, "commit", lose_response, once=True)
            with Session(through_proxy) as session:
                tx = pay(escrow, session, topic, "a")
                with pytest.raises(DBAPIError):
                    session.commit()
            assert outcome_of(tx) == (COMMITTED if is_reachable else (Verdict.UNKNOWN, False))
            proxy.refuses_connections = False
            agree(server, engine, topic)
        through_proxy.dispose()
    assert saved_ids(engine) == ["a"]


def test_a_transaction_that_the_database_gave_up_is_not_committed(
    server: LocalServer, engine: Engine, escrow: Escrow, topic: str
) -> None:
    """PostgreSQL answers the COMMIT of an aborted transaction with a rollback, not an error."""
    with Session(engine) as session, contextlib.suppress(SQLAlchemyError, EscrowError):
        pay(escrow, session, topic, "a")
        with contextlib.suppress(DBAPIError):
            session.execute(text("SELECT * FROM there_is_no_such_table"))
        session.commit()
    agree(server, engine, topic)


def test_a_plain_savepoint_that_was_rolled_back_makes_the_commit_fail(
    server: LocalServer, engine: Engine, escrow: Escrow, topic: str
) -> None:
    with Session(engine) as session:
        pay(escrow, session, topic, "a")
        session.execute(text("SAVEPOINT mine"))
        with contextlib.suppress(SessionEndedInBlock, DBAPIError):
            pay(escrow, session, topic, "b")
            session.execute(text("ROLLBACK TO SAVEPOINT mine"))
            session.commit()
            pytest.fail("the commit would lose a message")
    agree(server, engine, topic)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interrupted_commit_is_decided_by_the_database(
    server: LocalServer,
    engine: Engine,
    escrow: Escrow,
    topic: str,
    interrupt: type[BaseException],
    moment: str,
) -> None:
    def interrupt_commit(*_: object) -> None:
        raise interrupt

    if moment == "before":
        event.listen(engine, "commit", interrupt_commit, once=True)
    else:
        event.listen(Session, "after_commit", interrupt_commit, once=True)
    with Session(engine) as session:
        pay(escrow, session, topic, "a")
        with pytest.raises(interrupt):
            session.commit()
    agree(server, engine, topic)


# --- what cannot be joined -----------------------------------------------------------------------


def test_a_session_of_another_engine_is_refused(engine: Engine, escrow: Escrow) -> None:
    other = create_engine(engine.url)
    with Session(other) as session, pytest.raises(ConfigError, match="engine"):
        escrow.join(session)
    with other.connect() as connection, pytest.raises(ConfigError, match="engine"):
        escrow.join(connection)
    other.dispose()


def test_a_session_of_an_option_engine_is_joined(
    server: LocalServer, engine: Engine, escrow: Escrow, topic: str
) -> None:
    with Session(engine.execution_options(logging_token="x")) as session:
        pay(escrow, session, topic, "a")
        session.commit()
    agree(server, engine, topic)


def test_a_session_that_commits_each_statement_is_refused(engine: Engine, escrow: Escrow) -> None:
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    with Session(autocommit) as session, pytest.raises(ConfigError, match="AUTOCOMMIT"):
        escrow.join(session).send(Message("t", b"a"))


def test_a_session_with_two_phases_is_refused(engine: Engine, escrow: Escrow) -> None:
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite has no two-phase commit")
    with Session(engine, twophase=True) as session, pytest.raises(ConfigError, match="two-phase"):
        escrow.join(session).send(Message("t", b"a"))


def test_a_transaction_that_another_escrow_has_joined_is_refused(
    server: LocalServer, engine: Engine, escrow: Escrow, topic: str
) -> None:
    with (
        Escrow(engine, server.namesrv_address, group=f"{topic}-other") as other,
        Session(engine) as session,
    ):
        pay(escrow, session, topic, "a")
        with pytest.raises(ConfigError, match="another Escrow"):
            pay(other, session, topic, "b")


# --- many at once --------------------------------------------------------------------------------


def test_many_threads_join_with_a_pool_that_is_too_small(server: LocalServer, url: str) -> None:
    """The end of a transaction waits for no second connection while it has its own."""
    topic = new_topic("crowd")
    single = create_engine(url, pool_size=1, max_overflow=0, pool_timeout=120)
    with contextlib.ExitStack() as stack:
        stack.callback(single.dispose)
        with single.begin() as connection:
            transfers.metadata.create_all(connection)
        escrow = stack.enter_context(Escrow(single, server.namesrv_address, group=topic))

        def work(number: int) -> None:
            name = f"{number:02}"
            if number % 3 == 0:
                with single.begin() as connection:
                    pay(escrow, connection, topic, name)
                return
            with Session(single) as session:
                pay(escrow, session, topic, name)
                session.commit() if number % 3 == 1 else session.rollback()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(24)))
        assert len(saved_ids(single)) == 16
        agree(server, single, topic)
