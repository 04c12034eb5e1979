"""Typical programs of users, for type checkers only: `make check` runs mypy and pyright on it.

Each `assert_type` says what an editor shows for an expression. Nothing here is executed.
"""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime
from typing import Any, assert_type

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from escrowmq import (
    Access,
    Consumer,
    DeliveryFailure,
    LiteConsumer,
    LocalTransactionState,
    Message,
    MessageQueue,
    Producer,
    PullConsumer,
    PullResult,
    ReceivedMessage,
    SendResult,
    SendStatus,
    SqlFilter,
    Transaction,
    TransactionListener,
    TransactionOutcome,
    TransactionProducer,
    TransactionSendResult,
    Verdict,
    blocking,
    dbapi,
)
from escrowmq.admin import Cluster
from escrowmq.admin.dead_letters import DeadLetter, find_dead_letters
from escrowmq.admin.queries import broker_runtime
from escrowmq.errors import EscrowError, RequestRefused
from escrowmq.sql import AsyncEscrow, AsyncTransactionMessages, Escrow, Inbox, TransactionMessages

SERVERS = "127.0.0.1:9876"


# --- producers -----------------------------------------------------------------------------------


async def produce() -> None:
    access = Access(access_key="k", secret_key="s", tls=True)
    async with Producer([SERVERS], group="g", access=access, retries=1) as producer:
        assert_type(producer, Producer)
        result = await producer.send(Message("orders", b"1", keys=["a", "b"], delay_s=1.5))
        assert_type(result, SendResult)
        assert_type(result.status, SendStatus)
        assert_type(result.queue, MessageQueue)
        assert_type(result.queue.queue_id, int)
        await producer.send(
            Message("orders", b"2", deliver_at=datetime.now(UTC)),
            queue=lambda queues, message: queues[len(message.body) % len(queues)],
        )
        assert_type(await producer.send_batch([Message("orders", b"3")]), list[SendResult])
        assert_type(await producer.request(Message("prices", b"lamp")), ReceivedMessage)
        assert_type(await producer.queues("orders"), list[MessageQueue])

        async with producer.transaction(Message("orders", b"4"), name="order") as tx:
            assert_type(tx, Transaction)
            assert_type(await tx.send(Message("stock", b"4")), SendResult)
        assert_type(tx.outcome, TransactionOutcome | None)


def produce_blocking() -> None:
    with blocking.Producer(SERVERS, group="g") as producer:
        assert_type(producer, blocking.Producer)
        assert_type(producer.send(Message("orders", b"1")), SendResult)
        with producer.transaction(Message("orders", b"2")) as tx:
            assert_type(tx, blocking.Transaction)
        assert_type(tx.outcome, TransactionOutcome | None)


async def register_checkers(producer: Producer, message: ReceivedMessage) -> None:
    @producer.checker("orders")
    async def check(message: ReceivedMessage) -> Verdict:
        return Verdict.COMMIT if message.transaction_id else Verdict.ROLLBACK

    @producer.checker(name="order")
    def check_plain(message: ReceivedMessage) -> Verdict | None:
        return None

    # A decorator keeps what it decorates.
    assert_type(await check(message), Verdict)
    assert_type(check_plain(message=message), Verdict | None)


class Orders(TransactionListener):
    def execute_local_transaction(self, message: Message, arg: Any) -> LocalTransactionState:
        assert_type(message.transaction_id, str)
        return LocalTransactionState.COMMIT_MESSAGE

    async def check_local_transaction(self, message: ReceivedMessage) -> LocalTransactionState:
        return LocalTransactionState.UNKNOW


async def produce_with_listener() -> None:
    async with TransactionProducer(SERVERS, group="g", listener=Orders(), retries=1) as producer:
        assert_type(producer, TransactionProducer)
        result = await producer.send_in_transaction(Message("orders", b"1"), arg={"id": 1})
        assert_type(result, TransactionSendResult)
        assert_type(result.local_state, Verdict)
    with blocking.TransactionProducer(
        SERVERS, group="g", listener=Orders(), check_concurrency=1
    ) as blocking_producer:
        blocking_result = blocking_producer.send_in_transaction(Message("orders", b"1"))
        assert_type(blocking_result, TransactionSendResult)


# --- consumers -----------------------------------------------------------------------------------


async def consume() -> None:
    async with Consumer(
        SERVERS, group="g", subscribe={"orders": SqlFilter("price > 3"), "stock": "a || b"}
    ) as consumer:
        async for message in consumer:
            assert_type(message, ReceivedMessage)
            assert_type(message.body, bytes)
            assert_type(message.properties.get("color"), str | None)
            assert_type(message.failure, DeliveryFailure | None)
        assert_type(await consumer.receive(), ReceivedMessage)
        assert_type(await consumer.receive(timeout_s=1), ReceivedMessage | None)
        assert_type(await consumer.receive_batch(10), list[ReceivedMessage])


async def handle_messages(received: ReceivedMessage) -> None:
    consumer = Consumer(SERVERS, group="g", start=datetime.now(UTC))

    @consumer.on("orders", "created")
    async def bill(message: ReceivedMessage) -> int:
        try:
            return int(message.body)
        except ValueError as error:
            await consumer.dead_letter(message, cause=error)
            return 0

    assert_type(await bill(received), int)
    await consumer.run()


async def pull() -> None:
    async with LiteConsumer(SERVERS, group="g", subscribe={"orders": "*"}) as lite:
        assert_type(await lite.poll(timeout_s=1), list[ReceivedMessage])
        await lite.seek_to_time(lite.assigned_queues[0], datetime.now(UTC))
    async with PullConsumer(SERVERS, group="g") as puller:
        [queue, *_] = await puller.queues("orders")
        offset = await puller.committed(queue)
        assert_type(offset, int | None)
        result = await puller.pull(queue, offset or 0)
        assert_type(result, PullResult)
        assert_type(result.next_offset, int)


# --- databases, administration, errors -----------------------------------------------------------


def escrow(received: ReceivedMessage) -> None:
    engine = create_engine("sqlite://")
    inbox = Inbox(engine, group="g")

    @inbox.effect
    def credit(session: Session, message: ReceivedMessage) -> None:
        assert_type(session.get(dict, message.keys), dict[Any, Any] | None)

    assert_type(credit(received), bool)
    with (
        Escrow(engine, SERVERS, group="g", retries=1) as escrow,
        escrow.transaction() as (session, tx),
    ):
        assert_type(session, Session)
        assert_type(tx, TransactionMessages)
        assert_type(tx.send(Message("orders", b"1")), SendResult)
        assert_type(escrow.join(session), TransactionMessages)
        assert_type(escrow.join(scoped_session(sessionmaker(engine))), TransactionMessages)
        assert_type(escrow.join(engine.connect()), TransactionMessages)


def escrow_of_a_driver(connection: sqlite3.Connection) -> None:
    with (
        dbapi.Escrow(lambda: sqlite3.connect("bank.db"), SERVERS, group="g") as escrow,
        escrow.join(connection) as tx,
    ):
        assert_type(tx, dbapi.JoinedMessages)
        assert_type(tx.send(Message("orders", b"1")), SendResult)


async def escrow_async() -> None:
    engine = create_async_engine("sqlite+aiosqlite://")
    async with (
        AsyncEscrow(engine, SERVERS, group="g") as escrow,
        escrow.transaction() as (session, tx),
    ):
        assert_type(session, AsyncSession)
        assert_type(tx, AsyncTransactionMessages)
        assert_type(escrow.join(session), AsyncTransactionMessages)


def administrate() -> None:
    with Cluster(SERVERS) as cluster:
        assert_type(cluster.topics(), list[str])
        for broker, runtime in cluster.ask_all(broker_runtime):
            assert_type(broker.name, str)
            assert_type(runtime, dict[str, str])
        for letter in find_dead_letters(cluster):
            assert_type(letter, DeadLetter)
            assert_type(letter.cause, str)


async def handle_errors(producer: Producer) -> None:
    try:
        await producer.send(Message("orders", b"1"))
    except RequestRefused as error:
        assert_type(error.code, int)
    except EscrowError as error:
        assert_type(error.retriable, bool)
        assert_type(error.may_have_happened, bool)
