"""Inbox and AsyncInbox: a message that is delivered again has no second effect.

The transaction of an effect starts by inserting the message's id. If the id is there already, the
transaction is rolled back as a whole before anything was done, so no savepoint is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import wraps

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from escrowmq.client.consumer.consumer import Consumer as AsyncConsumer
from escrowmq.client.messages import ReceivedMessage
from escrowmq.clock import Clock
from escrowmq.database.marker import INBOX_RETENTION_MS
from escrowmq.database.retention import BlockingInbox, IdempotentHandler, RowRetention, check_effect
from escrowmq.sql import statements
from escrowmq.sql.statements import inbox_table, insert_inbox_row

log = logging.getLogger(__name__)

Effect = Callable[[Session, ReceivedMessage], None]
AsyncEffect = Callable[[AsyncSession, ReceivedMessage], Awaitable[None]]
AsyncIdempotentHandler = Callable[[ReceivedMessage], Awaitable[bool]]


class Inbox(BlockingInbox):
    """Runs the effect of each message once, however often the message is delivered.

        inbox = Inbox(engine, group="bank-b")

        @inbox.effect
        def credit(session, message):
            session.execute(...)

        with Consumer(servers, group="bank-b", subscribe={"transfers": "*"}) as consumer:
            inbox.run(consumer, credit)

    `group`: the consumer group; different groups process the same message independently.
    `session_factory`: a sessionmaker, for sessions with other options.
    `create_tables`: False leaves the tables of `escrowmq.sql.metadata` to migrations.
    `retention_ms`: rows are deleted when they are older. It must be longer than a message can
    be delivered again, including dead letters that are sent again.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        group: str,
        session_factory: Callable[..., Session] = Session,
        create_tables: bool = True,
        retention_ms: int = INBOX_RETENTION_MS,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(group=group, retention_ms=retention_ms, clock=clock)
        self._engine = statements.check_engine(engine, Engine, "Inbox")
        self._session_factory = session_factory
        if create_tables:
            with engine.connect() as connection:
                statements.create_tables(connection)
                self._database_time.observe(statements.now_ms(connection))

    def effect(self, function: Effect) -> IdempotentHandler:
        """Make a function idempotent; a decorator.

        The function runs in a database transaction that also contains the message's id, and must
        not commit or roll back its session. The decorated function takes a message, and returns
        True if it had its effect now and False if it had it before. It raises what the function or
        the database raises; nothing has happened then. Raises TypeError for a coroutine function,
        or one with other parameters.
        """
        check_effect(function, ("session", "message"))

        @wraps(function)
        def handle_once(message: ReceivedMessage) -> bool:
            with self._session_factory(bind=self._engine) as session:
                connection = session.connection()
                if not insert_inbox_row(connection, message, group=self._group):
                    session.rollback()
                    return False
                function(session, message)
                session.commit()
            return True

        return handle_once

    def purge(self, *, older_than_ms: int | None = None) -> int:
        """Delete rows older than `retention_ms`, or another age, and return how many."""
        age_ms = self._purge_age_ms(older_than_ms)
        with self._engine.connect() as connection:
            return statements.purge_older(connection, inbox_table, age_ms, self._database_time)


class AsyncInbox(RowRetention):
    """Inbox for an AsyncEngine; see Inbox. Without migrations, await `create_tables` first."""

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        group: str,
        session_factory: Callable[..., AsyncSession] = AsyncSession,
        retention_ms: int = INBOX_RETENTION_MS,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(group=group, retention_ms=retention_ms, clock=clock)
        self._engine = statements.check_engine(engine, AsyncEngine, "AsyncInbox")
        self._session_factory = session_factory

    async def create_tables(self) -> None:
        """Create the tables that do not exist yet."""
        async with self._engine.connect() as connection:
            await connection.run_sync(statements.create_tables)
            self._database_time.observe(await connection.run_sync(statements.now_ms))

    def effect(self, function: AsyncEffect) -> AsyncIdempotentHandler:
        """Make a coroutine function idempotent; see `Inbox.effect`."""
        check_effect(function, ("session", "message"), is_async=True)

        @wraps(function)
        async def handle_once(message: ReceivedMessage) -> bool:
            async with self._session_factory(bind=self._engine) as session:
                connection = await session.connection()
                is_first = await connection.run_sync(insert_inbox_row, message, group=self._group)
                if not is_first:
                    await session.rollback()
                    return False
                await function(session, message)
                await session.commit()
            return True

        return handle_once

    async def run(
        self, consumer: AsyncConsumer, handler: AsyncIdempotentHandler, *, limit: int | None = None
    ) -> None:
        """Handle the messages of a consumer; see `Inbox.run`. Raises NotSent once it is closed."""
        handled = 0
        while limit is None or handled < limit:
            message = await consumer.receive()
            handled += 1
            try:
                await handler(message)
            except Exception as error:
                log.exception("effect failed, will retry message=%s", message.message_id)
                await consumer.retry_later(message, cause=error)
            await self.clean_up()

    async def clean_up(self) -> None:
        """Delete old rows if it is due, once an hour."""
        if self._cleanup_queue.is_cleanup_due():
            await self.purge()

    async def purge(self, *, older_than_ms: int | None = None) -> int:
        """Delete rows by age and return how many; see `Inbox.purge`."""
        age_ms = self._purge_age_ms(older_than_ms)
        async with self._engine.connect() as connection:
            return await connection.run_sync(
                statements.purge_older, inbox_table, age_ms, self._database_time
            )
