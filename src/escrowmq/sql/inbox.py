"""The consuming side: a message that is delivered again has no second effect.

The effect's transaction begins with the message's identity. If that is there already, nothing has
happened yet, and the transaction is rolled back as a whole: no savepoint is needed.

Inbox for an async engine: effects are coroutines.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import wraps
from itertools import islice
from typing import Final

from sqlalchemy import Connection, Engine, insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from escrowmq.blocking import Consumer
from escrowmq.client.consumer.consumer import Consumer as AsyncConsumer
from escrowmq.client.messages import ReceivedMessage
from escrowmq.clock import Clock, SystemClock
from escrowmq.database.marker import INBOX_RETENTION_MS
from escrowmq.database.transaction import CleanupQueue
from escrowmq.sql import statements as marker
from escrowmq.sql.statements import create_tables as make_missing_tables
from escrowmq.sql.statements import inbox_table

log = logging.getLogger(__name__)

_INSERT: Final = insert(inbox_table)
Effect = Callable[[Session, ReceivedMessage], None]
IdempotentHandler = Callable[[ReceivedMessage], bool]


def insert_inbox_row(
    connection: Connection, message: ReceivedMessage, *, group: str, now_ms: int
) -> bool:
    """The first statement of a transaction; if it is false, the transaction can only be ended."""
    row = {"consumer_group": group, "message_id": message.message_id, "at_ms": now_ms}
    try:
        connection.execute(_INSERT, row)
    except IntegrityError:
        return False
    return True


class Inbox:
    """`kept_ms`: rows that are older are removed, by `forget` and now and then by `run`; longer
    than a message may come again."""

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
        self._engine = engine
        self._group = group
        self._session_factory = session_factory
        self._retention_ms = retention_ms
        self._clock = clock or SystemClock()
        self._cleanup_queue = CleanupQueue(self._clock)
        if create_tables:
            with engine.connect() as connection:
                make_missing_tables(connection)

    def effect(self, function: Effect) -> IdempotentHandler:
        """Runs it inside a database transaction that also holds the message's identity. The
        function that comes back takes a message and says whether it had its effect now."""

        @wraps(function)
        def once(message: ReceivedMessage) -> bool:
            with self._session_factory(bind=self._engine) as session:
                connection = session.connection()
                now_ms = self._clock.now_ms()
                if not insert_inbox_row(connection, message, group=self._group, now_ms=now_ms):
                    session.rollback()
                    return False
                function(session, message)
                session.commit()
            return True

        return once

    def run(
        self, consumer: Consumer, handler: IdempotentHandler, *, limit: int | None = None
    ) -> None:
        """Take messages for ever, or so many. One whose effect fails is given back: it comes again
        later, and in the end goes to the dead letters of the group."""
        for message in islice(consumer, limit):
            try:
                handler(message)
            except Exception:
                log.exception("effect failed, it will come again message=%s", message.message_id)
                consumer.retry_later(message)
            if self._cleanup_queue.is_cleanup_due():
                self.purge()

    def purge(self, *, older_than_ms: int | None = None) -> int:
        """Remove rows of messages that can no longer come again: how many."""
        age_ms = self._retention_ms if older_than_ms is None else older_than_ms
        with self._engine.connect() as connection:
            return marker.purge_before(connection, inbox_table, self._clock.now_ms() - age_ms)


AsyncEffect = Callable[[AsyncSession, ReceivedMessage], Awaitable[None]]
AsyncIdempotentHandler = Callable[[ReceivedMessage], Awaitable[bool]]


class AsyncInbox:
    """See Inbox. `make_tables` is a call here, for those who have no migrations."""

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        group: str,
        session_factory: Callable[..., AsyncSession] = AsyncSession,
        retention_ms: int = INBOX_RETENTION_MS,
        clock: Clock | None = None,
    ) -> None:
        self._engine = engine
        self._group = group
        self._session_factory = session_factory
        self._retention_ms = retention_ms
        self._clock = clock or SystemClock()
        self._cleanup_queue = CleanupQueue(self._clock)

    async def create_tables(self) -> None:
        async with self._engine.connect() as connection:
            await connection.run_sync(make_missing_tables)

    def effect(self, function: AsyncEffect) -> AsyncIdempotentHandler:
        """See Inbox.effect."""

        @wraps(function)
        async def once(message: ReceivedMessage) -> bool:
            async with self._session_factory(bind=self._engine) as session:
                connection = await session.connection()
                now_ms = self._clock.now_ms()
                first = await connection.run_sync(
                    insert_inbox_row, message, group=self._group, now_ms=now_ms
                )
                if not first:
                    await session.rollback()
                    return False
                await function(session, message)
                await session.commit()
            return True

        return once

    async def run(
        self, consumer: AsyncConsumer, handler: AsyncIdempotentHandler, *, limit: int | None = None
    ) -> None:
        """See Inbox.run."""
        taken = 0
        while limit is None or taken < limit:
            message = await consumer.receive()
            taken += 1
            try:
                await handler(message)
            except Exception:
                log.exception("effect failed, it will come again message=%s", message.message_id)
                await consumer.retry_later(message)
            if self._cleanup_queue.is_cleanup_due():
                await self.purge()

    async def purge(self, *, older_than_ms: int | None = None) -> int:
        """See Inbox.forget."""
        age_ms = self._retention_ms if older_than_ms is None else older_than_ms
        before_ms = self._clock.now_ms() - age_ms
        async with self._engine.connect() as connection:
            return await connection.run_sync(marker.purge_before, inbox_table, before_ms)
