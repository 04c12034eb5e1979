"""Handlers in a database transaction: inbox row, changes and sent messages have one outcome."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import pytest
from sqlalchemy import Engine, insert, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from escrowmq import Message, ReceivedMessage
from escrowmq.app import App, Retry
from escrowmq.sql import AsyncTransactionMessages, TransactionMessages
from escrowmq.sql.statements import inbox_table
from tests.support.apps import outcomes, running, topic_messages, wait_dead_letters, wait_messages
from tests.support.brokers import Server
from tests.support.clients import numbered_bodies, send
from tests.support.sql_bank import new_topic, saved_ids, transfers
from tests.support.waiting import wait_until_async

pytestmark = pytest.mark.slow

AT_ONCE = Retry(times=2, first_s=0, factor=1)


@dataclass
class Transfer:
    id: str
    fails: bool = False


@dataclass
class Receipt:
    id: str


def payload(name: str, *, fails: bool = False) -> bytes:
    return b'{"id":"%s","fails":%s}' % (name.encode(), b"true" if fails else b"false")


def inbox_count(engine: Engine) -> int:
    with engine.connect() as connection:
        return len(connection.execute(select(inbox_table.c.message_id)).all())


def send_twice(server: Server, topic: str, body: bytes) -> None:
    """Store a message twice with one unique key, as a producer does that repeats a send."""
    key = secrets.token_hex(16).upper()
    with server.client() as client:
        for queue_id in range(2):
            client.send(topic, body, {"UNIQ_KEY": key}, queue_id=queue_id)


async def test_a_message_that_is_delivered_twice_has_one_effect(
    server: Server, engine: Engine
) -> None:
    topic, calls = new_topic("twice"), []
    app = App(server.namesrv_address, group=f"g-{topic}", database=engine)

    @app.on(topic)
    def credit(session: Session, transfer: Transfer, message: ReceivedMessage) -> None:
        calls.append(message.message_id)
        session.execute(insert(transfers).values(id=transfer.id, amount=1))

    send_twice(server, topic, payload("a"))
    async with running(app):
        await wait_until_async(lambda: outcomes(app)["done"] == 2)
    assert saved_ids(engine) == ["a"]
    assert len(calls) == inbox_count(engine) == 1


async def test_a_handler_that_fails_leaves_nothing_and_is_tried_again(
    server: Server, engine: Engine
) -> None:
    topic, calls = new_topic("fails"), []
    app = App(server.namesrv_address, group=f"g-{topic}", database=engine)

    @app.on(topic, retry=AT_ONCE)
    def credit(session: Session, transfer: Transfer) -> None:
        calls.append(transfer.id)
        session.execute(insert(transfers).values(id=transfer.id, amount=1))
        if transfer.fails or calls.count(transfer.id) == 1:
            raise ZeroDivisionError

    await send(server, topic, payload("a"), payload("b", fails=True))
    async with running(app):
        await wait_until_async(lambda: saved_ids(engine) == ["a"])
        dead = await wait_dead_letters(server, f"g-{topic}")
    assert saved_ids(engine) == ["a"]
    assert inbox_count(engine) == 1
    assert calls.count("b") == 3
    assert [message.body for message in dead] == [payload("b", fails=True)]


async def test_a_result_is_sent_if_and_only_if_the_transaction_commits(
    server: Server, engine: Engine
) -> None:
    topic, out = new_topic("consume"), new_topic("produce")
    calls: list[str] = []
    app = App(server.namesrv_address, group=f"g-{topic}", database=engine)

    @app.on(topic, retry=AT_ONCE, send_to=out)
    def credit(session: Session, transfer: Transfer, tx: TransactionMessages) -> Receipt:
        calls.append(transfer.id)
        tx.send(Message(out, f"by hand {transfer.id}".encode()))
        session.execute(insert(transfers).values(id=transfer.id, amount=1))
        session.flush()
        if transfer.fails or calls.count(transfer.id) == 1:
            raise ZeroDivisionError
        return Receipt(transfer.id)

    send_twice(server, topic, payload("a"))
    await send(server, topic, payload("b", fails=True))
    async with running(app):
        await wait_until_async(lambda: outcomes(app) == {"done": 2, "retried": 3, "dead": 1})
        await wait_messages(server, out, 2)
        await server.assert_settled_async()
    bodies = sorted(message.body for message in await topic_messages(server, out))
    assert bodies == [b"by hand a", b'{"id":"a"}']


async def test_a_batch_is_one_transaction_without_the_messages_that_had_their_effect(
    server: Server, engine: Engine
) -> None:
    topic, batches = new_topic("batch"), []
    app = App(server.namesrv_address, group=f"g-{topic}", database=engine)

    @app.on(topic, retry=AT_ONCE, concurrency=1)
    def credit(session: Session, payments: list[Transfer]) -> None:
        batches.append([payment.id for payment in payments])
        for payment in payments:
            session.execute(insert(transfers).values(id=payment.id, amount=1))
        session.flush()
        if any(payment.fails for payment in payments):
            raise ZeroDivisionError

    names = [body.decode() for body in numbered_bodies(20)]
    for name in names[:3]:
        send_twice(server, topic, payload(name))
    await send(server, topic, *(payload(name) for name in names[3:]), payload("bad", fails=True))
    async with running(app):
        await wait_until_async(lambda: outcomes(app) == {"done": 23, "retried": 2, "dead": 1})
    assert saved_ids(engine) == names
    assert inbox_count(engine) == 20
    assert max(map(len, batches)) > 1


# --- asyncio -------------------------------------------------------------------------------------


def new_async_engine(engine: Engine) -> AsyncEngine:
    """Return an asyncio engine for the same database. Skips the test if there is no driver."""
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+psycopg"}
    if engine.dialect.name not in drivers:
        pytest.skip(f"no asyncio driver for {engine.dialect.name}")
    return create_async_engine(engine.url.set(drivername=drivers[engine.dialect.name]))


async def test_coroutines_have_the_same_transactions(server: Server, engine: Engine) -> None:
    async_engine = new_async_engine(engine)
    topic, out = new_topic("async"), new_topic("async-out")
    calls: list[str] = []
    app = App(server.namesrv_address, group=f"g-{topic}", database=async_engine)

    @app.on(topic, retry=AT_ONCE, send_to=out)
    async def credit(
        session: AsyncSession, tx: AsyncTransactionMessages, transfer: Transfer
    ) -> Receipt:
        calls.append(transfer.id)
        await session.execute(insert(transfers).values(id=transfer.id, amount=1))
        await tx.send(Message(out, b"by hand"))
        if calls.count(transfer.id) == 1:
            raise ZeroDivisionError
        return Receipt(transfer.id)

    @app.on(f"{topic}-plain")
    async def plain(session: AsyncSession, transfers_: list[Transfer]) -> None:
        for transfer in transfers_:
            await session.execute(insert(transfers).values(id=transfer.id, amount=1))

    send_twice(server, topic, payload("a"))
    send_twice(server, f"{topic}-plain", payload("b"))
    async with running(app):
        await wait_until_async(lambda: outcomes(app)["done"] == 4)
        await wait_messages(server, out, 2)
        await server.assert_settled_async()
    await async_engine.dispose()
    bodies = sorted(message.body for message in await topic_messages(server, out))
    assert bodies == [b"by hand", b'{"id":"a"}']
    assert saved_ids(engine) == ["a", "b"]
    assert inbox_count(engine) == 2


async def test_the_sessions_of_an_application_are_used(server: Server, sqlite: Engine) -> None:
    class OwnSession(Session):
        """A session with something of its own."""

    topic, seen = new_topic("own"), []
    app = App(
        server.namesrv_address, group=f"g-{topic}", database=sqlite, session_factory=OwnSession
    )

    def handle(session: Session, body: bytes) -> None:
        seen.append(type(session))
        session.execute(text("SELECT 1"))

    app.on(topic)(handle)
    await send(server, topic, b"x")
    async with running(app):
        await wait_until_async(lambda: seen == [OwnSession])
