"""A joined transaction of an AsyncSession or AsyncConnection: its end decides the messages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import event, insert, make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
)
from sqlalchemy.orm import Session

from escrowmq import Message, Verdict
from escrowmq.errors import (
    ConfigError,
    EscrowError,
    TransactionConflict,
    TransactionMessageFailed,
    TransportError,
)
from escrowmq.sql import AsyncEscrow, AsyncTransactionMessages
from tests.e2e.sql.conftest import url_of
from tests.e2e.sql.test_async import agree, async_driver, async_engine, async_url, transfer_ids
from tests.support.brokers import LocalServer
from tests.support.databases import DatabaseServer
from tests.support.sql_bank import (
    delivered_bodies,
    new_topic,
    open_halves,
    transfers,
)
from tests.support.sql_endings import ENDINGS, save
from tests.support.tcp_proxy import CuttingProxy

pytestmark = pytest.mark.slow
__all__ = ["async_url"]  # the fixture

COMMITTED, ROLLED_BACK = (Verdict.COMMIT, True), (Verdict.ROLLBACK, True)


@asynccontextmanager
async def joining(
    server: LocalServer, url: str, topic: str
) -> AsyncIterator[tuple[AsyncEngine, AsyncEscrow]]:
    async with (
        async_engine(url) as engine,
        AsyncEscrow(engine, server.namesrv_address, group=topic) as escrow,
    ):
        yield engine, escrow


async def pay(
    escrow: AsyncEscrow,
    target: AsyncSession | async_scoped_session[AsyncSession] | AsyncConnection,
    topic: str,
    name: str,
) -> AsyncTransactionMessages:
    """Insert a row and send a message in the transaction of a session or a connection."""
    tx = escrow.join(target)
    await target.execute(insert(transfers).values(id=name, amount=1))
    await tx.send(Message(topic, name.encode()))
    return tx


def outcome_of(tx: AsyncTransactionMessages) -> tuple[Verdict, bool] | None:
    return None if tx.outcome is None else (tx.outcome.verdict, tx.outcome.acknowledged)


async def test_the_end_of_each_transaction_of_a_session_decides_its_messages(
    server: LocalServer, async_url: str
) -> None:
    topic = new_topic("async-join")
    async with joining(server, async_url, topic) as (engine, escrow):
        async with AsyncSession(engine) as session:
            committed = await pay(escrow, session, topic, "a")
            with contextlib.suppress(ZeroDivisionError):
                async with session.begin_nested():
                    assert await pay(escrow, session, topic, "undone") is committed
                    raise ZeroDivisionError
            await session.commit()
            assert outcome_of(committed) == COMMITTED
            with pytest.raises(TransactionConflict):
                await committed.send(Message(topic, b"late"))
            rolled_back = await pay(escrow, session, topic, "b")
            await session.rollback()
            assert outcome_of(rolled_back) == ROLLED_BACK
            closed = await pay(escrow, session, topic, "c")
        assert outcome_of(closed) == ROLLED_BACK
        async with async_sessionmaker(engine).begin() as session:
            await pay(escrow, session, topic, "d")
        assert await asyncio.to_thread(open_halves, server) == 0  # no check was needed
        assert await transfer_ids(engine) == ["a", "d"]
        await agree(server, engine, topic)


async def test_a_scoped_session_and_a_block_have_one_set_of_messages(
    server: LocalServer, async_url: str
) -> None:
    topic = new_topic("async-scoped")
    async with joining(server, async_url, topic) as (engine, escrow):
        registry = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
        tx = await pay(escrow, registry, topic, "a")
        assert escrow.join(registry()) is tx
        await registry.commit()
        await registry.remove()
        async with escrow.transaction() as (session, tx):
            assert await pay(escrow, session, topic, "b") is tx
        await agree(server, engine, topic)


async def test_the_end_of_a_transaction_of_a_connection_decides_its_messages(
    server: LocalServer, async_url: str
) -> None:
    topic = new_topic("async-connection")
    async with joining(server, async_url, topic) as (engine, escrow):
        async with engine.begin() as connection:
            committed = await pay(escrow, connection, topic, "a")
        async with engine.connect() as connection:
            rolled_back = await pay(escrow, connection, topic, "b")
        with pytest.raises(ConfigError, match="not open"):
            escrow.join(engine.connect())
    # Closing the Escrow has waited for the ends.
    assert outcome_of(committed) == COMMITTED
    assert outcome_of(rolled_back) == ROLLED_BACK
    assert await asyncio.to_thread(delivered_bodies, server, topic) == [b"a"]


@pytest.mark.parametrize("end", ENDINGS)
@pytest.mark.parametrize("commits", [False, True])
async def test_the_messages_follow_a_transaction_that_ends_behind_the_session(
    server: LocalServer, async_url: str, end: Callable[[Session], None], commits: bool
) -> None:
    topic = new_topic("async-join-ended")
    async with joining(server, async_url, topic) as (engine, escrow):
        async with AsyncSession(engine) as session:
            with contextlib.suppress(EscrowError, SQLAlchemyError):
                tx = await pay(escrow, session, topic, "a")
                await session.run_sync(end)
                await session.run_sync(save, "b")  # begins another transaction
                with contextlib.suppress(EscrowError):
                    await tx.send(Message(topic, b"b"))
                    pytest.fail("a message was sent after its transaction had ended")
                if commits:
                    await session.commit()
        saved = await transfer_ids(engine)
        await server.assert_settled_async()
    expected = [b"a"] if "a" in saved else []
    assert await asyncio.to_thread(delivered_bodies, server, topic) == expected


async def test_a_commit_whose_task_is_cancelled_is_decided_by_the_database(
    server: LocalServer, async_url: str
) -> None:
    topic = new_topic("async-join-cancelled")
    async with joining(server, async_url, topic) as (engine, escrow):

        async def pay_and_commit() -> None:
            async with AsyncSession(engine) as session:
                await pay(escrow, session, topic, "a")
                await session.commit()

        task = asyncio.create_task(pay_and_commit())
        event.listen(engine.sync_engine, "commit", lambda _: task.cancel(), once=True)
        with pytest.raises(asyncio.CancelledError):
            await task
        await agree(server, engine, topic)


async def test_a_message_that_was_not_sent_makes_the_commit_fail(async_url: str) -> None:
    async with (
        async_engine(async_url) as engine,
        AsyncEscrow(engine, "127.0.0.1:1", group="unreachable", retries=0) as escrow,
    ):
        async with AsyncSession(engine) as session:
            with pytest.raises(TransportError):
                await pay(escrow, session, "t", "a")
            with pytest.raises(TransactionMessageFailed):
                await session.commit()
        assert await transfer_ids(engine) == []


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
@pytest.mark.parametrize("is_reachable", [True, False], ids=["reachable", "unreachable"])
async def test_a_commit_without_a_response_is_decided_by_the_marker(
    server: LocalServer,
    kind: str,
    database_servers: dict[str, DatabaseServer],
    tmp_path: object,
    is_reachable: bool,
) -> None:
    topic = new_topic("async-join-lost")
    url = make_url(async_driver(url_of(kind, database_servers, tmp_path)))  # type: ignore[arg-type]
    with CuttingProxy(url.port or 0) as proxy:
        proxy_url = url.set(port=proxy.port).render_as_string(hide_password=False)

        def lose_response(_: object) -> None:
            proxy.cut_next_response = True
            proxy.refuses_connections = not is_reachable

        async with joining(server, proxy_url, topic) as (engine, escrow):
            event.listen(engine.sync_engine, "commit", lose_response, once=True)
            async with AsyncSession(engine) as session:
                tx = await pay(escrow, session, topic, "a")
                with pytest.raises(DBAPIError):
                    await session.commit()
            assert outcome_of(tx) == (COMMITTED if is_reachable else (Verdict.UNKNOWN, False))
            proxy.refuses_connections = False
            await agree(server, engine, topic)
            assert await transfer_ids(engine) == ["a"]


async def test_many_tasks_join_with_a_pool_that_is_too_small(
    server: LocalServer, async_url: str
) -> None:
    topic = new_topic("async-crowd")
    async with joining(server, async_url, topic) as (engine, escrow):
        slots = asyncio.Semaphore(15)  # the size of the pool, with its overflow

        async def work(number: int) -> None:
            async with slots:
                if number % 3 == 0:
                    async with engine.begin() as connection:
                        await pay(escrow, connection, topic, f"{number:02}")
                    return
                async with AsyncSession(engine) as session:
                    await pay(escrow, session, topic, f"{number:02}")
                    await (session.commit() if number % 3 == 1 else session.rollback())

        await asyncio.gather(*(work(number) for number in range(24)))
        assert len(await transfer_ids(engine)) == 16
        await agree(server, engine, topic)
