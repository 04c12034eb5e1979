"""Escrow for an async engine: the same steps, the same promises, with `await`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, AsyncSessionTransaction

from escrowmq.binding.caretaker import ROUND_S
from escrowmq.binding.held import AsyncHeldMessages
from escrowmq.binding.keeping import Keeping
from escrowmq.binding.marker import MARKERS_KEPT_MS, id_of, new_id
from escrowmq.client.messages import ReceivedMessage
from escrowmq.client.producer import Producer
from escrowmq.clock import Clock
from escrowmq.errors import CommitUnknown, EndedInside, Rollback
from escrowmq.message.verdict import Verdict
from escrowmq.sql import marker
from escrowmq.sql.escrow import ENDED_INSIDE, NO_ANSWER
from escrowmq.sql.tables import make_tables as make_missing_tables
from escrowmq.sql.tables import markers

log = logging.getLogger(__name__)


class AsyncEscrow(Keeping):
    """See Escrow. It begins with `async with`, in the loop that it is used in."""

    def __init__(
        self,
        engine: AsyncEngine,
        servers: str,
        *,
        group: str,
        sessions: Callable[..., AsyncSession] = AsyncSession,
        make_tables: bool = True,
        kept_ms: int = MARKERS_KEPT_MS,
        forget_acknowledged: bool = False,
        clock: Clock | None = None,
        **more: Any,
    ) -> None:
        super().__init__(
            group=group, kept_ms=kept_ms, forget_acknowledged=forget_acknowledged, clock=clock
        )
        self._engine = engine
        self._sessions = sessions
        self._make_tables = make_tables
        marker.refuse_memory(engine.sync_engine)
        self._producer = Producer(servers, group=group, **more)
        self._producer.checker("*")(self._check)
        self._caretaker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AsyncEscrow:
        async with self._engine.connect() as connection:
            if self._make_tables:
                await connection.run_sync(make_missing_tables)
            await connection.run_sync(marker.refuse_unsafe)
        await self._producer.__aenter__()
        self._caretaker = asyncio.create_task(self._take_care())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._caretaker is not None:
            self._caretaker.cancel()
            await asyncio.gather(self._caretaker, return_exceptions=True)
        try:
            await self._remove_acknowledged()
        finally:
            await self._producer.close()

    # --- the owner -------------------------------------------------------------------------------

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[tuple[AsyncSession, AsyncHeldMessages]]:
        """See Escrow.transaction. A task that is cancelled while the database commits leaves its
        messages to check-back."""
        tx = AsyncHeldMessages(self._producer.transaction(id=new_id()))
        async with self._sessions(bind=self._engine) as session:
            own = await session.begin()
            try:
                await self._claim(session, tx.id)
                yield session, tx
                await self._finish(session, own, tx)
            except BaseException as error:
                await self._roll_back(session, own, tx)
                if isinstance(error, Rollback):
                    return
                raise
            await self._commit(session, tx)
        await tx.end(Verdict.COMMIT)
        self._has_ended(tx)

    async def _claim(self, session: AsyncSession, transaction_id: str) -> None:
        connection = await session.connection()
        now_ms = self._clock.now_ms()
        await connection.run_sync(marker.claim, transaction_id, group=self._group, now_ms=now_ms)

    async def _finish(
        self, session: AsyncSession, own: AsyncSessionTransaction, tx: AsyncHeldMessages
    ) -> None:
        if not _is_current(session, own):
            raise EndedInside(ENDED_INSIDE)
        tx.must_be_whole()
        await session.flush()
        if len(tx.halves) != 1:
            connection = await session.connection()
            await connection.run_sync(marker.count, tx.id, len(tx.halves))

    async def _roll_back(
        self, session: AsyncSession, own: AsyncSessionTransaction, tx: AsyncHeldMessages
    ) -> None:
        if not _is_current(session, own):
            tx.leave("its session was ended inside the block")
            return
        try:
            await session.rollback()
        except Exception as error:
            log.warning("rollback failed transaction=%s: %s", tx.id, error)
            tx.leave(f"the database did not answer its rollback: {error}")
            return
        await tx.end(Verdict.ROLLBACK)

    async def _commit(self, session: AsyncSession, tx: AsyncHeldMessages) -> None:
        try:
            await session.commit()
        except Exception as error:
            with contextlib.suppress(Exception):
                await session.rollback()
            match await self._ask_now(tx.id):
                case Verdict.COMMIT:
                    log.warning("commit failed, and it is committed transaction=%s", tx.id)
                case Verdict.ROLLBACK:
                    await tx.end(Verdict.ROLLBACK)
                    raise
                case Verdict.UNKNOWN:
                    tx.leave(str(error))
                    raise CommitUnknown(NO_ANSWER.format(tx.id)) from error

    # --- the checker -----------------------------------------------------------------------------

    async def _ask_now(self, transaction_id: str) -> Verdict:
        try:
            return await self._ask(transaction_id, may_be_forgotten=False)
        except Exception as error:
            log.warning("the database does not answer transaction=%s: %s", transaction_id, error)
            return Verdict.UNKNOWN

    async def _check(self, message: ReceivedMessage) -> Verdict:
        transaction_id = id_of(message)
        if transaction_id is None:
            return Verdict.UNKNOWN
        return await self._ask(transaction_id, may_be_forgotten=self._may_be_forgotten(message))

    async def _ask(self, transaction_id: str, *, may_be_forgotten: bool) -> Verdict:
        async with self._engine.connect() as connection:
            return await connection.run_sync(
                marker.ask,
                transaction_id,
                group=self._group,
                now_ms=self._clock.now_ms(),
                may_be_forgotten=may_be_forgotten,
            )

    # --- clean-up --------------------------------------------------------------------------------

    async def forget(self, *, older_than_ms: int | None = None) -> int:
        """See Escrow.forget."""
        before_ms = self._forgets_before_ms(older_than_ms)
        async with self._engine.connect() as connection:
            return await connection.run_sync(marker.forget_before, markers, before_ms)

    async def tidy(self) -> None:
        """What the caretaker does now and then."""
        await self._remove_acknowledged()
        if self._chores.is_time():
            await self.forget()

    async def _remove_acknowledged(self) -> None:
        while ids := self._chores.some_acknowledged():
            async with self._engine.connect() as connection:
                await connection.run_sync(marker.forget_ids, ids)

    async def _take_care(self) -> None:
        while True:
            await asyncio.sleep(ROUND_S)
            try:
                await self.tidy()
            except Exception:
                log.exception("a round of the caretaker failed; the next one tries again")


def _is_current(session: AsyncSession, own: AsyncSessionTransaction) -> bool:
    return session.sync_session.get_transaction() is own.sync_transaction
