"""The databases of SQLAlchemy: an Engine for functions, an AsyncEngine for coroutines.

Both run the same statements; see `escrowmq.app.databases` for what they promise.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from escrowmq.app.databases import (
    AsyncDatabase,
    BlockingDatabase,
    HandlerScope,
    ProducerSettings,
)
from escrowmq.client.callbacks import keep_running
from escrowmq.client.messages import ReceivedMessage
from escrowmq.database.retention import CLEANUP_INTERVAL_S, CleanupThread
from escrowmq.errors import Rollback
from escrowmq.sql import statements
from escrowmq.sql.escrow import AsyncEscrow, Escrow
from escrowmq.sql.inbox import AsyncInbox, Inbox


class EngineDatabase(BlockingDatabase):
    """An Engine of SQLAlchemy."""

    name = "an Engine"
    session_type = Session

    def __init__(
        self, engine: Engine, group: str, session_factory: Callable[..., Session] = Session
    ) -> None:
        self._engine = engine
        self._group = group
        self._session_factory = session_factory
        self._escrow: Escrow | None = None
        self._cleanup_thread: CleanupThread | None = None

    async def open(self, producer: ProducerSettings, *, sends: bool) -> None:
        await asyncio.to_thread(self._open, producer, sends)

    def _open(self, producer: ProducerSettings, sends: bool) -> None:
        inbox = Inbox(self._engine, group=self._group)
        if sends:
            self._escrow = Escrow(
                self._engine,
                producer.servers,
                group=producer.group,
                session_factory=self._session_factory,
                **producer.options,
            )
        self._cleanup_thread = CleanupThread(inbox.clean_up, name=f"escrowmq-{self._group}-inbox")

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if self._cleanup_thread is not None:
            self._cleanup_thread.stop()
        if self._escrow is not None:
            self._escrow.close()

    @contextmanager
    def transaction(
        self, messages: Sequence[ReceivedMessage], *, sends: bool
    ) -> Iterator[HandlerScope]:
        if sends:
            assert self._escrow is not None, "open() was not called, or without sends"
            with self._escrow.transaction() as (session, tx):
                new_ids = _insert_inbox_rows(session.connection(), messages, self._group)
                yield HandlerScope(session, tx, new_ids)
                if not new_ids:
                    raise Rollback
            return
        with self._session_factory(bind=self._engine) as session:
            new_ids = _insert_inbox_rows(session.connection(), messages, self._group)
            yield HandlerScope(session, None, new_ids)
            if new_ids:
                session.commit()


class AsyncEngineDatabase(AsyncDatabase):
    """An AsyncEngine of SQLAlchemy."""

    name = "an AsyncEngine"
    session_type = AsyncSession

    def __init__(
        self,
        engine: AsyncEngine,
        group: str,
        session_factory: Callable[..., AsyncSession] = AsyncSession,
    ) -> None:
        self._engine = engine
        self._group = group
        self._session_factory = session_factory
        self._inbox = AsyncInbox(engine, group=group)
        self._escrow: AsyncEscrow | None = None
        self._cleanup_task: asyncio.Task[None] | None = None

    async def open(self, producer: ProducerSettings, *, sends: bool) -> None:
        await self._inbox.create_tables()
        if sends:
            escrow = AsyncEscrow(
                self._engine,
                producer.servers,
                group=producer.group,
                session_factory=self._session_factory,
                **producer.options,
            )
            self._escrow = await escrow.__aenter__()
        self._cleanup_task = asyncio.create_task(keep_running("inbox", self._clean_up))

    async def _clean_up(self) -> None:
        while True:
            await asyncio.sleep(CLEANUP_INTERVAL_S)
            await self._inbox.clean_up()

    async def close(self) -> None:
        if self._cleanup_task is not None:
            self._cleanup_task.cancel()
            await asyncio.gather(self._cleanup_task, return_exceptions=True)
        if self._escrow is not None:
            await self._escrow.close()

    @asynccontextmanager
    async def transaction(
        self, messages: Sequence[ReceivedMessage], *, sends: bool
    ) -> AsyncIterator[HandlerScope]:
        if sends:
            assert self._escrow is not None, "open() was not called, or without sends"
            async with self._escrow.transaction() as (session, tx):
                connection = await session.connection()
                new_ids = await connection.run_sync(_insert_inbox_rows, messages, self._group)
                yield HandlerScope(session, tx, new_ids)
                if not new_ids:
                    raise Rollback
            return
        async with self._session_factory(bind=self._engine) as session:
            connection = await session.connection()
            new_ids = await connection.run_sync(_insert_inbox_rows, messages, self._group)
            yield HandlerScope(session, None, new_ids)
            if new_ids:
                await session.commit()


def _insert_inbox_rows(
    connection: Connection, messages: Sequence[ReceivedMessage], group: str
) -> frozenset[str]:
    if len(messages) > 1:
        return statements.insert_inbox_rows(connection, messages, group=group)
    is_new = statements.insert_inbox_row(connection, messages[0], group=group)
    return frozenset((messages[0].message_id,) if is_new else ())
