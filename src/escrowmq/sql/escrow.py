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
from escrowmq.database.marker import MARKER_RETENTION_MS, new_transaction_id, transaction_id_of
from escrowmq.database.transaction import (
    CLEANUP_INTERVAL_S,
    AsyncTransactionMessages,
    CleanupThread,
    MarkerRetention,
    TransactionMessages,
)
from escrowmq.errors import CommitUnknown, Rollback, SessionEndedInBlock
from escrowmq.message.transaction import Verdict
from escrowmq.sql import statements as marker
from escrowmq.sql.statements import create_tables as make_missing_tables
from escrowmq.sql.statements import marker_table

log = logging.getLogger(__name__)

SESSION_ENDED_ERROR = (
    "the block committed or rolled back its session; leave that to the block's end"
)
COMMIT_UNKNOWN_ERROR = (
    "the database did not say whether transaction {} has committed; check-back finds out"
)


class Escrow(MarkerRetention):
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
        session_factory: Callable[..., Session] = Session,
        create_tables: bool = True,
        retention_ms: int = MARKER_RETENTION_MS,
        purge_acknowledged: bool = False,
        clock: Clock | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            group=group,
            retention_ms=retention_ms,
            purge_acknowledged=purge_acknowledged,
            clock=clock,
        )
        self._engine = engine
        self._session_factory = session_factory
        marker.reject_memory_database(engine)
        with engine.connect() as connection:
            if create_tables:
                make_missing_tables(connection)
            marker.check_transaction_support(connection)
        self._producer = Producer(servers, group=group, **options)
        self._producer.checker("*")(self._check)
        self._producer.__enter__()
        self._cleanup_thread = CleanupThread(self.clean_up, name=f"escrowmq-{group}")

    def __enter__(self) -> Escrow:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._cleanup_thread.stop()
        try:
            self._purge_acknowledged()
        finally:
            self._producer.close()

    # --- the owner -------------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[tuple[Session, TransactionMessages]]:
        """A session in a transaction of its own, and where to send the messages that go with it.

        Leaving commits the database, then the messages. An exception rolls both back; Rollback
        ends here. Raises CommitUnknown if the database does not say whether it has committed.
        """
        tx = TransactionMessages(self._producer.transaction(id=new_transaction_id()))
        with self._session_factory(bind=self._engine) as session:
            own = session.begin()
            try:
                now_ms = self._clock.now_ms()
                marker.insert_marker(session.connection(), tx.id, group=self._group, now_ms=now_ms)
                yield session, tx
                self._finish(session, own, tx)
            except BaseException as error:
                self._roll_back(session, own, tx)
                if isinstance(error, Rollback):
                    return
                raise
            self._commit(session, tx)
        tx.end(Verdict.COMMIT)  # the connection is back in its pool by now
        self._transaction_ended(tx)

    def _finish(
        self, session: Session, session_transaction: SessionTransaction, tx: TransactionMessages
    ) -> None:
        """Everything that can still fail and be rolled back."""
        if session.get_transaction() is not session_transaction:
            raise SessionEndedInBlock(SESSION_ENDED_ERROR)
        tx.raise_if_send_failed()
        session.flush()
        if len(tx.halves) != 1:
            marker.set_message_count(session.connection(), tx.id, len(tx.halves))

    def _roll_back(
        self, session: Session, session_transaction: SessionTransaction, tx: TransactionMessages
    ) -> None:
        """The broker is told only if it is sure that the marker is not there and never will be."""
        if session.get_transaction() is not session_transaction:
            tx.leave_to_check_back("its session was ended inside the block")
            return
        try:
            session.rollback()
        except Exception as error:
            log.warning("rollback failed transaction=%s: %s", tx.id, error)
            tx.leave_to_check_back(f"the database did not answer its rollback: {error}")
            return
        tx.end(Verdict.ROLLBACK)

    def _commit(self, session: Session, tx: TransactionMessages) -> None:
        """If the database does not answer, or refuses, the marker knows what it did."""
        try:
            session.commit()
        except Exception as error:
            with contextlib.suppress(Exception):
                session.rollback()
            match self._resolve_or_unknown(tx.id):
                case Verdict.COMMIT:
                    log.warning("commit failed, and it is committed transaction=%s", tx.id)
                case Verdict.ROLLBACK:
                    tx.end(Verdict.ROLLBACK)
                    raise
                case Verdict.UNKNOWN:
                    tx.leave_to_check_back(str(error))
                    raise CommitUnknown(COMMIT_UNKNOWN_ERROR.format(tx.id)) from error

    # --- the checker -----------------------------------------------------------------------------

    def _resolve_or_unknown(self, transaction_id: str) -> Verdict:
        try:
            return self._read_or_tombstone(transaction_id, may_be_purged=False)
        except Exception as error:
            log.warning("the database does not answer transaction=%s: %s", transaction_id, error)
            return Verdict.UNKNOWN

    def _check(self, message: ReceivedMessage) -> Verdict:
        """What it raises is logged by the client, and the broker asks again."""
        transaction_id = transaction_id_of(message)
        if transaction_id is None:
            return Verdict.UNKNOWN
        return self._read_or_tombstone(transaction_id, may_be_purged=self._may_be_purged(message))

    def _read_or_tombstone(self, transaction_id: str, *, may_be_purged: bool) -> Verdict:
        with self._engine.connect() as connection:
            return marker.read_or_tombstone(
                connection,
                transaction_id,
                group=self._group,
                now_ms=self._clock.now_ms(),
                may_be_purged=may_be_purged,
            )

    # --- clean-up --------------------------------------------------------------------------------

    def purge(self, *, older_than_ms: int | None = None) -> int:
        """Remove markers that nobody can ask about any more: how many. Raises ConfigError for an
        age below `kept_ms`: a checker takes it that younger ones are there."""
        before_ms = self._purge_before_ms(older_than_ms)
        with self._engine.connect() as connection:
            return marker.purge_before(connection, marker_table, before_ms)

    def clean_up(self) -> None:
        """What the caretaker does now and then."""
        self._purge_acknowledged()
        if self._cleanup_queue.is_cleanup_due():
            self.purge()

    def _purge_acknowledged(self) -> None:
        while ids := self._cleanup_queue.take_acknowledged():
            with self._engine.connect() as connection:
                marker.purge_ids(connection, ids)


class AsyncEscrow(MarkerRetention):
    """See Escrow. It begins with `async with`, in the loop that it is used in."""

    def __init__(
        self,
        engine: AsyncEngine,
        servers: str,
        *,
        group: str,
        session_factory: Callable[..., AsyncSession] = AsyncSession,
        create_tables: bool = True,
        retention_ms: int = MARKER_RETENTION_MS,
        purge_acknowledged: bool = False,
        clock: Clock | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            group=group,
            retention_ms=retention_ms,
            purge_acknowledged=purge_acknowledged,
            clock=clock,
        )
        self._engine = engine
        self._session_factory = session_factory
        self._creates_tables = create_tables
        marker.reject_memory_database(engine.sync_engine)
        self._producer = AsyncProducer(servers, group=group, **options)
        self._producer.checker("*")(self._check)
        self._cleanup_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AsyncEscrow:
        async with self._engine.connect() as connection:
            if self._creates_tables:
                await connection.run_sync(make_missing_tables)
            await connection.run_sync(marker.check_transaction_support)
        await self._producer.__aenter__()
        self._cleanup_task = asyncio.create_task(self._cleanup_loop())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._cleanup_task is not None:
            self._cleanup_task.cancel()
            await asyncio.gather(self._cleanup_task, return_exceptions=True)
        try:
            await self._purge_acknowledged()
        finally:
            await self._producer.close()

    # --- the owner -------------------------------------------------------------------------------

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[tuple[AsyncSession, AsyncTransactionMessages]]:
        """See Escrow.transaction. A task that is cancelled while the database commits leaves its
        messages to check-back."""
        tx = AsyncTransactionMessages(self._producer.transaction(id=new_transaction_id()))
        async with self._session_factory(bind=self._engine) as session:
            own = await session.begin()
            try:
                await self._insert_marker(session, tx.id)
                yield session, tx
                await self._finish(session, own, tx)
            except BaseException as error:
                await self._roll_back(session, own, tx)
                if isinstance(error, Rollback):
                    return
                raise
            await self._commit(session, tx)
        await tx.end(Verdict.COMMIT)
        self._transaction_ended(tx)

    async def _insert_marker(self, session: AsyncSession, transaction_id: str) -> None:
        connection = await session.connection()
        now_ms = self._clock.now_ms()
        await connection.run_sync(
            marker.insert_marker, transaction_id, group=self._group, now_ms=now_ms
        )

    async def _finish(
        self,
        session: AsyncSession,
        session_transaction: AsyncSessionTransaction,
        tx: AsyncTransactionMessages,
    ) -> None:
        if not _is_current(session, session_transaction):
            raise SessionEndedInBlock(SESSION_ENDED_ERROR)
        tx.raise_if_send_failed()
        await session.flush()
        if len(tx.halves) != 1:
            connection = await session.connection()
            await connection.run_sync(marker.set_message_count, tx.id, len(tx.halves))

    async def _roll_back(
        self,
        session: AsyncSession,
        session_transaction: AsyncSessionTransaction,
        tx: AsyncTransactionMessages,
    ) -> None:
        if not _is_current(session, session_transaction):
            tx.leave_to_check_back("its session was ended inside the block")
            return
        try:
            await session.rollback()
        except Exception as error:
            log.warning("rollback failed transaction=%s: %s", tx.id, error)
            tx.leave_to_check_back(f"the database did not answer its rollback: {error}")
            return
        await tx.end(Verdict.ROLLBACK)

    async def _commit(self, session: AsyncSession, tx: AsyncTransactionMessages) -> None:
        try:
            await session.commit()
        except Exception as error:
            with contextlib.suppress(Exception):
                await session.rollback()
            match await self._resolve_or_unknown(tx.id):
                case Verdict.COMMIT:
                    log.warning("commit failed, and it is committed transaction=%s", tx.id)
                case Verdict.ROLLBACK:
                    await tx.end(Verdict.ROLLBACK)
                    raise
                case Verdict.UNKNOWN:
                    tx.leave_to_check_back(str(error))
                    raise CommitUnknown(COMMIT_UNKNOWN_ERROR.format(tx.id)) from error

    # --- the checker -----------------------------------------------------------------------------

    async def _resolve_or_unknown(self, transaction_id: str) -> Verdict:
        try:
            return await self._read_or_tombstone(transaction_id, may_be_purged=False)
        except Exception as error:
            log.warning("the database does not answer transaction=%s: %s", transaction_id, error)
            return Verdict.UNKNOWN

    async def _check(self, message: ReceivedMessage) -> Verdict:
        transaction_id = transaction_id_of(message)
        if transaction_id is None:
            return Verdict.UNKNOWN
        return await self._read_or_tombstone(
            transaction_id, may_be_purged=self._may_be_purged(message)
        )

    async def _read_or_tombstone(self, transaction_id: str, *, may_be_purged: bool) -> Verdict:
        async with self._engine.connect() as connection:
            return await connection.run_sync(
                marker.read_or_tombstone,
                transaction_id,
                group=self._group,
                now_ms=self._clock.now_ms(),
                may_be_purged=may_be_purged,
            )

    # --- clean-up --------------------------------------------------------------------------------

    async def purge(self, *, older_than_ms: int | None = None) -> int:
        """See Escrow.forget."""
        before_ms = self._purge_before_ms(older_than_ms)
        async with self._engine.connect() as connection:
            return await connection.run_sync(marker.purge_before, marker_table, before_ms)

    async def clean_up(self) -> None:
        """What the caretaker does now and then."""
        await self._purge_acknowledged()
        if self._cleanup_queue.is_cleanup_due():
            await self.purge()

    async def _purge_acknowledged(self) -> None:
        while ids := self._cleanup_queue.take_acknowledged():
            async with self._engine.connect() as connection:
                await connection.run_sync(marker.purge_ids, ids)

    async def _cleanup_loop(self) -> None:
        while True:
            await asyncio.sleep(CLEANUP_INTERVAL_S)
            try:
                await self.clean_up()
            except Exception:
                log.exception("a round of the caretaker failed; the next one tries again")


def _is_current(session: AsyncSession, session_transaction: AsyncSessionTransaction) -> bool:
    return session.sync_session.get_transaction() is session_transaction.sync_transaction
