"""Inbox for an async engine: effects are coroutines."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import wraps

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from escrowmq.binding.caretaker import Chores
from escrowmq.binding.marker import INBOX_KEPT_MS
from escrowmq.client.consumer import Consumer
from escrowmq.client.messages import ReceivedMessage
from escrowmq.clock import Clock, SystemClock
from escrowmq.sql import marker
from escrowmq.sql.inbox import is_first
from escrowmq.sql.tables import inbox
from escrowmq.sql.tables import make_tables as make_missing_tables

log = logging.getLogger(__name__)

AsyncEffect = Callable[[AsyncSession, ReceivedMessage], Awaitable[None]]
AsyncOnce = Callable[[ReceivedMessage], Awaitable[bool]]


class AsyncInbox:
    """See Inbox. `make_tables` is a call here, for those who have no migrations."""

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        group: str,
        sessions: Callable[..., AsyncSession] = AsyncSession,
        kept_ms: int = INBOX_KEPT_MS,
        clock: Clock | None = None,
    ) -> None:
        self._engine = engine
        self._group = group
        self._sessions = sessions
        self._kept_ms = kept_ms
        self._clock = clock or SystemClock()
        self._chores = Chores(self._clock)

    async def make_tables(self) -> None:
        async with self._engine.connect() as connection:
            await connection.run_sync(make_missing_tables)

    def effect(self, function: AsyncEffect) -> AsyncOnce:
        """See Inbox.effect."""

        @wraps(function)
        async def once(message: ReceivedMessage) -> bool:
            async with self._sessions(bind=self._engine) as session:
                connection = await session.connection()
                now_ms = self._clock.now_ms()
                first = await connection.run_sync(
                    is_first, message, group=self._group, now_ms=now_ms
                )
                if not first:
                    await session.rollback()
                    return False
                await function(session, message)
                await session.commit()
            return True

        return once

    async def run(self, consumer: Consumer, once: AsyncOnce, *, limit: int | None = None) -> None:
        """See Inbox.run."""
        taken = 0
        while limit is None or taken < limit:
            message = await consumer.receive()
            taken += 1
            try:
                await once(message)
            except Exception:
                log.exception("effect failed, it will come again message=%s", message.message_id)
                await consumer.later(message)
            if self._chores.is_time():
                await self.forget()

    async def forget(self, *, older_than_ms: int | None = None) -> int:
        """See Inbox.forget."""
        age_ms = self._kept_ms if older_than_ms is None else older_than_ms
        before_ms = self._clock.now_ms() - age_ms
        async with self._engine.connect() as connection:
            return await connection.run_sync(marker.forget_before, inbox, before_ms)
