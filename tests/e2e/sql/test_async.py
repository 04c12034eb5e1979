"""AsyncEscrow and AsyncInbox: SQLite (aiosqlite), PostgreSQL (psycopg), MariaDB (aiomysql)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import event, insert, make_url, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from escrowmq import Consumer, Message, ReceivedMessage, Rollback, Verdict
from escrowmq.clock import ManualClock
from escrowmq.database.marker import HOUR_MS
from escrowmq.errors import (
    CommitUnknown,
    ConfigError,
    EscrowError,
    SessionEndedInBlock,
    TransactionMessageFailed,
    TransportError,
)
from escrowmq.sql import AsyncEscrow, AsyncInbox
from escrowmq.sql.statements import create_tables, insert_marker, marker_table, read_or_tombstone
from tests.e2e.sql.conftest import KINDS, url_of
from tests.support.brokers import LocalServer
from tests.support.databases import DatabaseServer
from tests.support.sql_bank import (
    Transfer,
    new_topic,
    received_message,
    tables,
    transfers,
)
from tests.support.sql_endings import ENDINGS, save
from tests.support.tcp_proxy import CuttingProxy

pytestmark = pytest.mark.slow


def async_driver(url: str) -> str:
    """Return the URL of a database with its driver for asyncio; psycopg is one already."""
    return url.replace("sqlite:", "sqlite+aiosqlite:").replace("mysql+pymysql:", "mysql+aiomysql:")


@pytest.fixture(params=KINDS)
def async_url(
    request: pytest.FixtureRequest, database_servers: dict[str, DatabaseServer], tmp_path: object
) -> str:
    return async_driver(url_of(request.param, database_servers, tmp_path))  # type: ignore[arg-type]


@asynccontextmanager
async def async_engine(url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.run_sync(tables.create_all)
    try:
        yield engine
    finally:
        await engine.dispose()


async def transfer_ids(engine: AsyncEngine) -> list[str]:
    async with engine.connect() as connection:
        query = select(transfers.c.id).order_by(transfers.c.id)
        return list((await connection.execute(query)).scalars())


async def pay(
    escrow: AsyncEscrow,
    topic: str,
    name: str,
    *,
    error: Exception | None = None,
    commit: bool = False,
) -> None:
    """Insert a row and send two messages; then raise the error or commit the session, if given."""
    async with escrow.transaction() as (session, tx):
        await session.execute(insert(transfers).values(id=name, amount=1))
        await tx.send(Message(topic, name.encode()))
        await tx.send(Message(topic, name.encode() + b" again"))
        if error is not None:
            raise error
        if commit:
            await session.commit()


async def test_row_and_messages_are_both_committed_or_neither_with_await(
    server: LocalServer, async_url: str
) -> None:
    topic = new_topic("async")
    async with (
        async_engine(async_url) as engine,
        AsyncEscrow(engine, server.namesrv_address, group=topic) as escrow,
    ):
        await pay(escrow, topic, "a")
        with pytest.raises(ZeroDivisionError):
            await pay(escrow, topic, "b", error=ZeroDivisionError())
        await pay(escrow, topic, "c", error=Rollback())
        with pytest.raises(IntegrityError):
            await pay(escrow, topic, "a")
        assert server.open_transactions() == []
        with pytest.raises(SessionEndedInBlock):
            await pay(escrow, topic, "d", commit=True)
        assert await transfer_ids(engine) == ["a", "d"]
        async with Consumer(
            server.namesrv_address, group=f"{topic}-c", subscribe={topic: "*"}
        ) as consumer:
            # The event loop runs meanwhile and answers the broker's checks.
            bodies = sorted([(await consumer.receive()).body for _ in range(4)])
        assert bodies == [b"a", b"a again", b"d", b"d again"]


async def test_a_half_that_cannot_be_sent_rolls_back_with_await(async_url: str) -> None:
    async with (
        async_engine(async_url) as engine,
        AsyncEscrow(engine, "127.0.0.1:1", group="unreachable", retries=0) as escrow,
    ):
        with pytest.raises(TransportError):
            await pay(escrow, "t", "a")
        with pytest.raises(TransactionMessageFailed):
            await _pay_and_ignore_the_error(escrow)
        assert await transfer_ids(engine) == []


async def _pay_and_ignore_the_error(escrow: AsyncEscrow) -> None:
    async with escrow.transaction() as (session, tx):
        await session.execute(insert(transfers).values(id="b", amount=1))
        with pytest.raises(TransportError):
            await tx.send(Message("t", b"b"))


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
@pytest.mark.parametrize("is_reachable", [True, False], ids=["reachable", "unreachable"])
async def test_a_commit_without_a_response_is_resolved_by_the_marker_with_await(
    server: LocalServer,
    kind: str,
    database_servers: dict[str, DatabaseServer],
    tmp_path: object,
    is_reachable: bool,
) -> None:
    """If the database cannot be reached after the commit, a check reads the marker later."""
    topic = new_topic("async-lost")
    url = make_url(async_driver(url_of(kind, database_servers, tmp_path)))  # type: ignore[arg-type]
    with CuttingProxy(url.port or 0) as proxy:
        proxy_url = url.set(port=proxy.port).render_as_string(hide_password=False)

        def lose_response(_: object) -> None:
            proxy.cut_next_response = True
            proxy.refuses_connections = not is_reachable

        async with (
            async_engine(proxy_url) as engine,
            AsyncEscrow(engine, server.namesrv_address, group=topic) as escrow,
        ):
            event.listen(engine.sync_engine, "commit", lose_response, once=True)
            if is_reachable:
                await pay(escrow, topic, "a")
            else:
                with pytest.raises(CommitUnknown):
                    await pay(escrow, topic, "a")
            proxy.refuses_connections = False
            async with Consumer(
                server.namesrv_address, group=f"{topic}-c", subscribe={topic: "*"}
            ) as consumer:
                bodies = sorted([(await consumer.receive()).body for _ in range(2)])
            assert bodies == [b"a", b"a again"]
            assert await transfer_ids(engine) == ["a"]


async def test_a_failure_in_the_last_flush_rolls_back_with_await(
    server: LocalServer, async_url: str
) -> None:
    topic = new_topic("async-flush")
    async with (
        async_engine(async_url) as engine,
        AsyncEscrow(engine, server.namesrv_address, group=topic) as escrow,
    ):
        async with escrow.transaction() as (session, _):
            await session.execute(insert(transfers).values(id="a", amount=1))
        with pytest.raises(IntegrityError):
            await _add_and_send(escrow, topic, "a")
        assert server.open_transactions() == []
        # A failed COMMIT would have been resolved by the marker, which leaves a tombstone.
        async with engine.connect() as connection:
            assert (await connection.execute(select(marker_table.c.id))).all() == []
    await server.assert_delivered_async(topic, [])


async def _add_and_send(escrow: AsyncEscrow, topic: str, name: str) -> None:
    """Add a row that reaches the database in the last flush."""
    async with escrow.transaction() as (session, tx):
        session.add(Transfer(id=name, amount=1))
        await tx.send(Message(topic, name.encode()))


async def test_messages_follow_their_savepoint_with_await(
    server: LocalServer, async_url: str
) -> None:
    topic = new_topic("async-savepoint")
    async with (
        async_engine(async_url) as engine,
        AsyncEscrow(engine, server.namesrv_address, group=topic) as escrow,
    ):
        async with escrow.transaction() as (session, tx):
            with contextlib.suppress(ZeroDivisionError):
                async with session.begin_nested():
                    await session.execute(insert(transfers).values(id="a", amount=1))
                    await tx.send(Message(topic, b"a"))
                    raise ZeroDivisionError
            async with session.begin_nested():
                await session.execute(insert(transfers).values(id="b", amount=1))
                await tx.send(Message(topic, b"b"))
        assert server.open_transactions() == []
        assert await transfer_ids(engine) == ["b"]
    await server.assert_delivered_async(topic, [b"b"])


async def test_messages_can_be_sent_at_the_same_time(server: LocalServer, async_url: str) -> None:
    topic = new_topic("async-gather")
    async with (
        async_engine(async_url) as engine,
        AsyncEscrow(engine, server.namesrv_address, group=topic) as escrow,
        escrow.transaction() as (_, tx),
    ):
        await asyncio.gather(*(tx.send(Message(topic, b"%d" % n)) for n in range(5)))
    await server.assert_delivered_async(topic, [b"0", b"1", b"2", b"3", b"4"])


@pytest.mark.parametrize("fails", [False, True])
async def test_a_message_is_refused_after_a_commit_in_the_block_with_await(
    server: LocalServer, async_url: str, fails: bool
) -> None:
    topic = new_topic("async-refused")
    async with (
        async_engine(async_url) as engine,
        AsyncEscrow(engine, server.namesrv_address, group=topic) as escrow,
    ):
        with pytest.raises(SessionEndedInBlock):
            await _commit_and_send(escrow, topic, fails=fails)
        assert await transfer_ids(engine) == ["a"]
        assert server.open_transactions() == []
    await server.assert_delivered_async(topic, [b"a"])


async def _commit_and_send(escrow: AsyncEscrow, topic: str, *, fails: bool) -> None:
    async with escrow.transaction() as (session, tx):
        await session.execute(insert(transfers).values(id="a", amount=1))
        await tx.send(Message(topic, b"a"))
        if fails:
            await (await session.connection()).commit()  # behind the session's back
        else:
            await session.commit()
        await session.execute(insert(transfers).values(id="b", amount=1))
        await tx.send(Message(topic, b"b"))


async def agree(server: LocalServer, engine: AsyncEngine, topic: str) -> None:
    """Assert that exactly the messages of saved rows are delivered."""
    await server.assert_settled_async()
    saved = [name.encode() for name in await transfer_ids(engine)]
    await server.assert_delivered_async(topic, saved)


@pytest.mark.parametrize("end", ENDINGS)
@pytest.mark.parametrize("fails", [False, True])
async def test_a_message_is_refused_after_the_transaction_ended_in_the_block_with_await(
    server: LocalServer, async_url: str, end: Callable[[Session], None], fails: bool
) -> None:
    topic = new_topic("async-ended")
    refused: list[BaseException] = []
    async with (
        async_engine(async_url) as engine,
        AsyncEscrow(engine, server.namesrv_address, group=topic) as escrow,
    ):
        with pytest.raises((EscrowError, ZeroDivisionError, DBAPIError)):
            await _end_and_send(escrow, topic, end, refused, fails=fails)
        assert [type(error) for error in refused] == [SessionEndedInBlock]
        await agree(server, engine, topic)


async def _end_and_send(
    escrow: AsyncEscrow,
    topic: str,
    end: Callable[[Session], None],
    refused: list[BaseException],
    *,
    fails: bool,
) -> None:
    async with escrow.transaction() as (session, tx):
        await session.run_sync(save, "a")
        await tx.send(Message(topic, b"a"))
        await session.run_sync(end)
        with contextlib.suppress(SQLAlchemyError):
            await session.run_sync(save, "b")  # begins another transaction
        try:
            await tx.send(Message(topic, b"b"))
        except SessionEndedInBlock as error:
            refused.append(error)
        if fails:
            raise ZeroDivisionError


@pytest.mark.parametrize("fails", [False, True])
async def test_a_statement_that_commits_by_itself_delivers_the_message_with_await(
    server: LocalServer, async_url: str, fails: bool
) -> None:
    """MariaDB commits before it creates a table; the other databases do not."""
    topic = new_topic("async-implicit")
    async with (
        async_engine(async_url) as engine,
        AsyncEscrow(engine, server.namesrv_address, group=topic) as escrow,
    ):
        with contextlib.suppress(ZeroDivisionError, SessionEndedInBlock):
            await _pay_and_create_table(escrow, topic, fails=fails)
        assert server.open_transactions() == []  # no check was needed
        await agree(server, engine, topic)


async def _pay_and_create_table(escrow: AsyncEscrow, topic: str, *, fails: bool) -> None:
    async with escrow.transaction() as (session, tx):
        await session.run_sync(save, "a")
        await tx.send(Message(topic, b"a"))
        await session.execute(text("CREATE TABLE extra (id integer)"))
        if fails:
            raise ZeroDivisionError


async def test_a_commit_whose_task_is_cancelled_is_decided_by_the_database(
    server: LocalServer, async_url: str
) -> None:
    topic = new_topic("async-cancelled")
    async with (
        async_engine(async_url) as engine,
        AsyncEscrow(engine, server.namesrv_address, group=topic) as escrow,
    ):
        task = asyncio.create_task(pay(escrow, topic, "a"))
        event.listen(engine.sync_engine, "commit", lambda _: task.cancel(), once=True)
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.assert_settled_async()
        bodies = [b"a", b"a again"] if await transfer_ids(engine) else []
    await server.assert_delivered_async(topic, bodies)


async def test_lock_errors_are_distinguished_from_other_errors_with_await(async_url: str) -> None:
    async with (
        async_engine(async_url) as engine,
        engine.connect() as owner,
        engine.connect() as other,
    ):
        with pytest.raises(DBAPIError):
            await other.run_sync(read_or_tombstone, "t", group="g")
        await owner.run_sync(create_tables)
        async with owner.begin():
            await owner.run_sync(insert_marker, "t", group="g")
            assert await other.run_sync(read_or_tombstone, "t", group="g") is Verdict.UNKNOWN
        assert await other.run_sync(read_or_tombstone, "t", group="g") is Verdict.COMMIT


async def test_markers_are_purged_with_await(server: LocalServer, async_url: str) -> None:
    topic = new_topic("async-old")
    clock = ManualClock()
    async with async_engine(async_url) as engine:
        for when_acknowledged in (True, False):
            async with AsyncEscrow(
                engine,
                server.namesrv_address,
                group=topic,
                clock=clock,
                purge_acknowledged=when_acknowledged,
            ) as escrow:
                await pay(escrow, topic, f"a{when_acknowledged}")
                with pytest.raises(ConfigError):
                    await escrow.purge(older_than_ms=1)
                if not when_acknowledged:
                    clock.advance(ms=HOUR_MS)  # until the next clean-up by age
                    async with engine.begin() as connection:
                        older_ms = marker_table.c.at_ms - 97 * HOUR_MS
                        await connection.execute(update(marker_table).values(at_ms=older_ms))
                await escrow.clean_up()
                async with engine.connect() as connection:
                    assert (await connection.execute(select(marker_table.c.id))).all() == []
    await server.assert_settled_async()
    await server.assert_delivered_async(topic, count=4)


async def test_a_redelivered_message_has_no_second_effect_with_await(async_url: str) -> None:
    async with async_engine(async_url) as engine:
        inbox = AsyncInbox(engine, group="g")
        await inbox.create_tables()

        @inbox.effect
        async def credit(session: AsyncSession, message: ReceivedMessage) -> None:
            await session.execute(insert(transfers).values(id=message.body.decode(), amount=1))
            if message.body == b"bad":
                raise ZeroDivisionError

        assert await credit(received_message("m1", b"a")) is True
        assert await credit(received_message("m1", b"a")) is False
        with pytest.raises(ZeroDivisionError):
            await credit(received_message("m2", b"bad"))
        with pytest.raises(IntegrityError):
            await credit(received_message("m2", b"a"))
        assert await credit(received_message("m2", b"b")) is True
        assert await transfer_ids(engine) == ["a", "b"]
        assert await inbox.purge(older_than_ms=-1000) == 2


async def test_an_inbox_runs_a_consumer_with_await(server: LocalServer, async_url: str) -> None:
    topic = new_topic("async-credits")
    async with async_engine(async_url) as engine:
        inbox = AsyncInbox(engine, group=topic)

        @inbox.effect
        async def credit(session: AsyncSession, message: ReceivedMessage) -> None:
            await session.execute(insert(transfers).values(id=message.body.decode(), amount=1))

        async with AsyncEscrow(engine, server.namesrv_address, group=f"{topic}-p") as escrow:
            await pay(escrow, topic, "a")
        async with engine.begin() as connection:
            await connection.execute(transfers.delete())
        async with Consumer(
            server.namesrv_address, group=topic, subscribe={topic: "*"}
        ) as consumer:
            await inbox.run(consumer, credit, limit=2)
        assert await transfer_ids(engine) == ["a", "a again"]


async def test_a_database_in_memory_is_refused_with_await() -> None:
    engine = create_async_engine("sqlite+aiosqlite://")
    with pytest.raises(ConfigError, match="file"):
        AsyncEscrow(engine, "127.0.0.1:1", group="g")
    await engine.dispose()
