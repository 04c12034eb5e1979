"""One database transaction and any number of messages: both, or neither.

Escrow for an async engine: the same steps, the same promises, with `await`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, AsyncSessionTransaction
from sqlalchemy.orm import Session, SessionTransaction

from escrowmq.blocking import Producer
from escrowmq.client.messages import ReceivedMessage
from escrowmq.client.producer.producer import Producer as AsyncProducer
from escrowmq.clock import Clock
from escrowmq.database.marker import MARKERS_KEPT_MS, id_of, new_id
from escrowmq.database.transaction import (
    ROUND_S,
    AsyncHeldMessages,
    Caretaker,
    HeldMessages,
    Keeping,
)
from escrowmq.errors import CommitUnknown, EndedInside, Rollback
from escrowmq.message.transaction import Verdict
from escrowmq.sql import statements as marker
from escrowmq.sql.statements import make_tables as make_missing_tables
from escrowmq.sql.statements import markers

log = logging.getLogger(__name__)

ENDED_INSIDE = "the block committed or rolled back its session; leave that to the block's end"
NO_ANSWER = "the database did not say whether transaction {} has committed; check-back finds out"


class Escrow(Keeping):
    """Answers the broker's questions from the database, in this and any other process of its group.

    `sessions`: a sessionmaker, if not plain sessions are wanted. `make_tables=False` leaves the two
    tables to migrations. `kept_ms`: markers are removed when they are older; longer than the
    broker's `fileReservedTime`. `forget_acknowledged`: remove a marker as soon as the broker has
    acknowledged its end; only with brokers that flush before they answer.
    """

    def __init__(
        self,
        engine: Engine,
        servers: str,
        *,
        group: str,
        sessions: Callable[..., Session] = Session,
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
        marker.refuse_memory(engine)
        with engine.connect() as connection:
            if make_tables:
                make_missing_tables(connection)
            marker.refuse_unsafe(connection)
        self._producer = Producer(servers, group=group, **more)
        self._producer.checker("*")(self._check)
        self._producer.__enter__()
        self._caretaker = Caretaker(self.tidy, name=f"escrowmq-{group}")

    def __enter__(self) -> Escrow:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._caretaker.stop()
        try:
            self._remove_acknowledged()
        finally:
            self._producer.close()

    # --- the owner -------------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[tuple[Session, HeldMessages]]:
        """A session in a transaction of its own, and where to send the messages that go with it.

        Leaving commits the database, then the messages. An exception rolls both back; Rollback
        ends here. Raises CommitUnknown if the database does not say whether it has committed.
        """
        tx = HeldMessages(self._producer.transaction(id=new_id()))
        with self._sessions(bind=self._engine) as session:
            own = session.begin()
            try:
                now_ms = self._clock.now_ms()
                marker.claim(session.connection(), tx.id, group=self._group, now_ms=now_ms)
                yield session, tx
                self._finish(session, own, tx)
            except BaseException as error:
                self._roll_back(session, own, tx)
                if isinstance(error, Rollback):
                    return
                raise
            self._commit(session, tx)
        tx.end(Verdict.COMMIT)  # the connection is back in its pool by now
        self._has_ended(tx)

    def _finish(self, session: Session, own: SessionTransaction, tx: HeldMessages) -> None:
        """Everything that can still fail and be rolled back."""
        if session.get_transaction() is not own:
            raise EndedInside(ENDED_INSIDE)
        tx.must_be_whole()
        session.flush()
        if len(tx.halves) != 1:
            marker.count(session.connection(), tx.id, len(tx.halves))

    def _roll_back(self, session: Session, own: SessionTransaction, tx: HeldMessages) -> None:
        """The broker is told only if it is sure that the marker is not there and never will be."""
        if session.get_transaction() is not own:
            tx.leave("its session was ended inside the block")
            return
        try:
            session.rollback()
        except Exception as error:
            log.warning("rollback failed transaction=%s: %s", tx.id, error)
            tx.leave(f"the database did not answer its rollback: {error}")
            return
        tx.end(Verdict.ROLLBACK)

    def _commit(self, session: Session, tx: HeldMessages) -> None:
        """If the database does not answer, or refuses, the marker knows what it did."""
        try:
            session.commit()
        except Exception as error:
            with contextlib.suppress(Exception):
                session.rollback()
            match self._ask_now(tx.id):
                case Verdict.COMMIT:
                    log.warning("commit failed, and it is committed transaction=%s", tx.id)
                case Verdict.ROLLBACK:
                    tx.end(Verdict.ROLLBACK)
                    raise
                case Verdict.UNKNOWN:
                    tx.leave(str(error))
                    raise CommitUnknown(NO_ANSWER.format(tx.id)) from error

    # --- the checker -----------------------------------------------------------------------------

    def _ask_now(self, transaction_id: str) -> Verdict:
        try:
            return self._ask(transaction_id, may_be_forgotten=False)
        except Exception as error:
            log.warning("the database does not answer transaction=%s: %s", transaction_id, error)
            return Verdict.UNKNOWN

    def _check(self, message: ReceivedMessage) -> Verdict:
        """What it raises is logged by the client, and the broker asks again."""
        transaction_id = id_of(message)
        if transaction_id is None:
            return Verdict.UNKNOWN
        return self._ask(transaction_id, may_be_forgotten=self._may_be_forgotten(message))

    def _ask(self, transaction_id: str, *, may_be_forgotten: bool) -> Verdict:
        with self._engine.connect() as connection:
            return marker.ask(
                connection,
                transaction_id,
                group=self._group,
                now_ms=self._clock.now_ms(),
                may_be_forgotten=may_be_forgotten,
            )

    # --- clean-up --------------------------------------------------------------------------------

    def forget(self, *, older_than_ms: int | None = None) -> int:
        """Remove markers that nobody can ask about any more: how many. Raises ConfigError for an
        age below `kept_ms`: a checker takes it that younger ones are there."""
        before_ms = self._forgets_before_ms(older_than_ms)
        with self._engine.connect() as connection:
            return marker.forget_before(connection, markers, before_ms)

    def tidy(self) -> None:
        """What the caretaker does now and then."""
        self._remove_acknowledged()
        if self._chores.is_time():
            self.forget()

    def _remove_acknowledged(self) -> None:
        while ids := self._chores.some_acknowledged():
            with self._engine.connect() as connection:
                marker.forget_ids(connection, ids)


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
        self._producer = AsyncProducer(servers, group=group, **more)
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
