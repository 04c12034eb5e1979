"""Escrow and AsyncEscrow: one database transaction and any number of messages.

Both perform the steps of `escrowmq.database.transaction`, with a Session and an AsyncSession.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Final, Unpack

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import MissingGreenlet
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    AsyncSessionTransaction,
    async_scoped_session,
)
from sqlalchemy.orm import Session, SessionTransaction, scoped_session
from sqlalchemy.util import await_only

from escrowmq.blocking import Producer
from escrowmq.client.messages import ReceivedMessage
from escrowmq.client.mistakes import AsyncioClient, BlockingClient
from escrowmq.client.producer.producer import Producer as AsyncProducer
from escrowmq.client.producer.producer import ProducerOptions
from escrowmq.clock import Clock
from escrowmq.database.marker import (
    MARKER_RETENTION_MS,
    began_ms,
    new_transaction_id,
    transaction_id_of,
)
from escrowmq.database.owner import finish_markers, insert_main_marker, require_current
from escrowmq.database.retention import CLEANUP_INTERVAL_S, CleanupThread, MarkerRetention
from escrowmq.database.transaction import (
    AsyncTransactionMessages,
    MessageScope,
    TransactionMessages,
    run_steps,
    run_steps_async,
    transaction_steps,
)
from escrowmq.errors import ClientClosed, ConfigError
from escrowmq.message.transaction import Verdict
from escrowmq.sql import joined, statements
from escrowmq.sql.joined import (
    ConnectionMarkers,
    JoinedTransaction,
    JoiningEscrow,
    prepare_send,
)
from escrowmq.sql.statements import marker_table

log = logging.getLogger(__name__)

# They end transactions of connections in the background, and wait for brokers that do not respond.
END_THREADS: Final = 4


class Escrow(MarkerRetention, BlockingClient):
    """Commits the database and sends the messages, or does neither.

        escrow = Escrow(engine, "127.0.0.1:9876", group="bank")
        with escrow.transaction() as (session, tx):
            session.execute(...)
            tx.send(Message("transfers", payload))

    It also answers the broker's checks from the database, for transactions of any process of its
    group, so give it a producer group of its own. It may be used by several threads. Create one
    for each process that uses the database, and close it at the end.

    `servers`: addresses of name servers, "127.0.0.1:9876" or several.
    `session_factory`: a sessionmaker, for sessions with other options.
    `create_tables`: False leaves the two tables of `escrowmq.sql.metadata` to migrations.
    `retention_ms`: markers are deleted when they are older. It must be longer than the brokers
    keep their log (`fileReservedTime`) and the same in all processes.
    `purge_acknowledged`: delete a marker soon after the broker has acknowledged the end. Use it
    only with brokers that flush before they respond (SYNC_FLUSH).
    `options`: further parameters of `escrowmq.Producer`.

    Raises ConfigError for a database that cannot be used, TypeError for an AsyncEngine, and what
    the database raises.
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
        **options: Unpack[ProducerOptions],
    ) -> None:
        self._engine = statements.check_engine(engine, Engine, "Escrow")
        super().__init__(
            group=group,
            retention_ms=retention_ms,
            purge_acknowledged=purge_acknowledged,
            clock=clock,
        )
        self._session_factory = session_factory
        statements.reject_memory_database(engine)
        with engine.connect() as connection:
            if create_tables:
                statements.create_tables(connection)
            statements.check_transaction_support(connection)
            self._database_time.observe(statements.now_ms(connection))
        self._warn_on_event_loop()
        joined.listen_to(engine)
        self._joining = JoiningEscrow(engine, group, self._end_joined, self._end_joined_later)
        self._end_executor = ThreadPoolExecutor(
            END_THREADS, thread_name_prefix=f"escrowmq-end-{group}"
        )
        self._endings: set[Future[None]] = set()
        self._producer = _EscrowProducer(servers, group=group, **options)
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
        """Stop the clean-up and answering checks, and disconnect from the brokers."""
        self._cleanup_thread.stop()
        self._end_executor.shutdown()
        wait(set(self._endings))
        try:
            self._purge_acknowledged()
        finally:
            self._producer.close()

    @contextmanager
    def transaction(self) -> Iterator[tuple[Session, TransactionMessages]]:
        """Run a block in a database transaction; `tx.send` sends messages that belong to it.

        Leaving the block commits the database and then the messages. An exception rolls both
        back and is propagated; `Rollback` rolls back quietly. The block must not commit or roll
        back its session: that raises SessionEndedInBlock. Raises CommitUnknown if the database
        does not say whether it has committed; a check finds out, and the messages follow it. Raises
        WrongProcess after a fork.
        """
        self._check_process()
        self._warn_on_event_loop()
        tx = self._new_messages()
        with self._session_factory(bind=self._engine) as session:
            steps, ops = transaction_steps(tx), _SessionOps(self, session, tx)
            tx.prepare_send = ops.prepare_send
            joined.remember_messages(self._joining, session, tx)
            run_steps(steps, ops)
            try:
                yield session, tx
            except BaseException as error:
                run_steps(steps, ops, error)
            else:
                run_steps(steps, ops)

    def join(self, session: Session | scoped_session[Any] | Connection) -> TransactionMessages:
        """Return what sends messages with a transaction that you begin and end yourself.

            tx = escrow.join(session)
            session.execute(...)
            tx.send(Message("transfers", payload))
            session.commit()                       # or roll back, or close

        `session` is a session of this Escrow's engine, or a connection. Its current transaction, or
        else its next one, decides the messages with `commit` or `rollback`; savepoints count too.
        Each further call in the same transaction returns the same object. Joining executes nothing;
        the first message inserts the marker. Join again after the end.

        The `commit` raises SessionEndedInBlock or TransactionMessageFailed, after rolling back, if
        the messages cannot be committed. If it raises an error of the database, a marker or a check
        decides the messages: the database may have committed. Raises ConfigError for a session of
        another engine.
        """
        self._check_process()
        self._warn_on_event_loop()
        target = session() if isinstance(session, scoped_session) else session
        tx = joined.find_messages(self._joining, target)
        if tx is None:
            tx = self._new_messages()
            tx.began_ms = self._database_time.now_ms()
            transaction = joined.join(self._joining, target, tx)
            tx.prepare_send = transaction.prepare_send
        assert isinstance(tx, TransactionMessages)
        return tx

    def _new_messages(self) -> TransactionMessages:
        return TransactionMessages(
            self._producer.transaction(id=new_transaction_id()),
            begin_scope=lambda scope_id: self._producer.transaction(id=scope_id),
        )

    def _end_joined(self, transaction: JoinedTransaction) -> None:
        assert isinstance(transaction.tx, TransactionMessages)
        run_steps(transaction.end_steps(), _JoinedOps(self, transaction.tx))

    def _end_joined_later(self, transaction: JoinedTransaction) -> None:
        try:
            self._end_executor.submit(self._end_joined, transaction)
        except RuntimeError as error:  # it is closed
            transaction.tx.leave_to_check_back(str(error))

    def purge(self, *, older_than_ms: int | None = None) -> int:
        """Delete markers older than `retention_ms`, or than a longer time, and return how many.

        This happens once an hour by itself. Raises ConfigError for a time below `retention_ms`.
        """
        age_ms = self._purge_age_ms(older_than_ms)
        with self._engine.connect() as connection:
            return statements.purge_older(connection, marker_table, age_ms, self._database_time)

    def clean_up(self) -> None:
        """Delete the markers that are due. Called every ten seconds by a thread."""
        self._purge_acknowledged()
        if self._cleanup_queue.is_cleanup_due():
            self.purge()

    def _purge_acknowledged(self) -> None:
        while transaction_ids := self._cleanup_queue.take_acknowledged():
            with self._engine.connect() as connection:
                statements.purge_ids(connection, transaction_ids)

    def _check(self, message: ReceivedMessage) -> Verdict:
        """Answer a check. The client logs what this raises, and the broker checks again."""
        transaction_id = transaction_id_of(message)
        if transaction_id is None:
            return Verdict.UNKNOWN
        purged_from_ms = began_ms(message) + self._retention_ms
        with self._engine.connect() as connection:
            return statements.read_or_tombstone(
                connection,
                transaction_id,
                group=self._group,
                may_be_purged=lambda now_ms: now_ms >= purged_from_ms,
            )


class _EscrowProducer(Producer):
    _has_warned = True  # the Escrow warns about an event loop


class _EndOps:
    """The steps that end the messages of a transaction."""

    def __init__(self, escrow: Escrow, tx: TransactionMessages) -> None:
        self._escrow = escrow
        self._tx = tx

    def read_marker(self, marker_id: str, keep_tombstone: bool) -> Verdict:
        with self._escrow._engine.connect() as connection:
            return statements.read_or_tombstone(
                connection, marker_id, group=self._escrow._group, keep_tombstone=keep_tombstone
            )

    def end(self) -> None:
        self._tx.end(self._tx.verdict)
        self._escrow._transaction_ended(self._tx)


class _JoinedOps(_EndOps):
    """The steps that end the messages of a joined transaction.

    They do not wait for the broker. The threads of an application take turns with the event loop of
    the client, so each wait costs them more than the request.
    """

    def end(self) -> None:
        endings, ending = self._escrow._endings, self._tx.start_end(self._tx.verdict)
        endings.add(ending)
        ending.add_done_callback(self._end_ended)

    def _end_ended(self, ending: Future[None]) -> None:
        self._escrow._endings.discard(ending)
        self._escrow._transaction_ended(self._tx)


class _SessionOps(_EndOps):
    """The steps of one transaction on a Session."""

    def __init__(self, escrow: Escrow, session: Session, tx: TransactionMessages) -> None:
        super().__init__(escrow, tx)
        self._session = session
        self._session_transaction: SessionTransaction | None = None

    def begin(self) -> None:
        self._session_transaction = self._session.begin()

    def insert_marker(self) -> None:
        self._tx.began_ms = self._escrow._database_time.now_ms()
        insert_main_marker(self._tx, self._markers())

    def prepare_send(self) -> MessageScope:
        require_current(self._is_current())
        return prepare_send(self._session.connection(), self._tx, self._escrow._group)

    def flush(self) -> None:
        require_current(self._is_current())
        self._session.flush()
        while (nested := self._session.get_nested_transaction()) is not None:
            nested.commit()  # the block left a savepoint open
        finish_markers(self._tx, self._markers())

    def commit(self) -> Verdict:
        self._session.commit()
        return Verdict.COMMIT

    def roll_back(self, error: BaseException) -> str:
        self._session.rollback()
        return ""

    def read_marker(self, marker_id: str, keep_tombstone: bool) -> Verdict:
        with contextlib.suppress(Exception):
            self._session.close()  # its connection may be the last one of the pool
        return super().read_marker(marker_id, keep_tombstone)

    def release_connection(self) -> None:
        self._session.close()

    def _is_current(self) -> bool:
        return self._session.get_transaction() is self._session_transaction

    def _markers(self) -> ConnectionMarkers:
        return ConnectionMarkers(self._session.connection(), self._escrow._group)


class AsyncEscrow(MarkerRetention, AsyncioClient):
    """Escrow for an AsyncEngine; see Escrow for the parameters.

        async with AsyncEscrow(engine, "127.0.0.1:9876", group="bank") as escrow:
            async with escrow.transaction() as (session, tx):
                await session.execute(...)
                await tx.send(Message("transfers", payload))

    It starts with `async with`, in the event loop in which it is used.
    """

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
        **options: Unpack[ProducerOptions],
    ) -> None:
        self._engine = statements.check_engine(engine, AsyncEngine, "AsyncEscrow")
        super().__init__(
            group=group,
            retention_ms=retention_ms,
            purge_acknowledged=purge_acknowledged,
            clock=clock,
        )
        self._session_factory = session_factory
        self._creates_tables = create_tables
        statements.reject_memory_database(engine.sync_engine)
        joined.listen_to(engine.sync_engine)
        self._joining = JoiningEscrow(
            engine.sync_engine, group, self._end_joined, self._end_joined_later
        )
        self._end_tasks: set[asyncio.Task[None]] = set()
        self._producer = AsyncProducer(servers, group=group, **options)
        self._producer.checker("*")(self._check)
        self._cleanup_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AsyncEscrow:
        async with self._engine.connect() as connection:
            if self._creates_tables:
                await connection.run_sync(statements.create_tables)
            await connection.run_sync(statements.check_transaction_support)
            self._database_time.observe(await connection.run_sync(statements.now_ms))
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
        """Stop the clean-up and answering checks, and disconnect from the brokers."""
        if self._cleanup_task is not None:
            self._cleanup_task.cancel()
            await asyncio.gather(self._cleanup_task, return_exceptions=True)
        await asyncio.gather(*self._end_tasks, return_exceptions=True)
        try:
            await self._purge_acknowledged()
        finally:
            await self._producer.close()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[tuple[AsyncSession, AsyncTransactionMessages]]:
        """Run a block in a database transaction; see `Escrow.transaction`.

        If the task is cancelled while the database commits, a check decides the messages. Raises
        ClientClosed if the AsyncEscrow was not started.
        """
        self._check_usable()
        tx = self._new_messages()
        async with self._session_factory(bind=self._engine) as session:
            steps, ops = transaction_steps(tx), _AsyncSessionOps(self, session, tx)
            tx.prepare_send = ops.prepare_send
            joined.remember_messages(self._joining, session.sync_session, tx)
            await run_steps_async(steps, ops)
            try:
                yield session, tx
            except BaseException as error:
                await run_steps_async(steps, ops, error)
            else:
                await run_steps_async(steps, ops)

    def join(
        self, session: AsyncSession | async_scoped_session[Any] | AsyncConnection
    ) -> AsyncTransactionMessages:
        """Return what sends messages with a transaction of your own; see `Escrow.join`.

        tx = escrow.join(session)
        await session.execute(...)
        await tx.send(Message("transfers", payload))
        await session.commit()
        """
        self._check_usable()
        owner = session() if isinstance(session, async_scoped_session) else session
        target = owner.sync_session if isinstance(owner, AsyncSession) else owner.sync_connection
        if target is None:
            raise ConfigError("the connection is not open; use `async with engine.connect()`")
        tx = joined.find_messages(self._joining, target)
        if tx is None:
            tx = self._new_messages()
            tx.began_ms = self._database_time.now_ms()
            transaction = joined.join(self._joining, target, tx)
            tx.prepare_send = lambda: owner.run_sync(transaction.prepare_send)
        assert isinstance(tx, AsyncTransactionMessages)
        return tx

    def _check_usable(self) -> None:
        self._check_process()
        if self._cleanup_task is None:
            raise ClientClosed(
                "this AsyncEscrow is not started: use it in a block, `async with AsyncEscrow(…) as "
                "escrow:`"
            )

    def _new_messages(self) -> AsyncTransactionMessages:
        return AsyncTransactionMessages(
            self._producer.transaction(id=new_transaction_id()),
            begin_scope=lambda scope_id: self._producer.transaction(id=scope_id),
        )

    async def _run_end_steps(self, transaction: JoinedTransaction) -> None:
        assert isinstance(transaction.tx, AsyncTransactionMessages)
        await run_steps_async(transaction.end_steps(), _AsyncEndOps(self, transaction.tx))

    def _end_joined(self, transaction: JoinedTransaction) -> None:
        """End the messages, in the greenlet in which SQLAlchemy ends the session."""
        ending = self._run_end_steps(transaction)
        try:
            await_only(ending)
        except MissingGreenlet as error:  # the session was closed by the garbage collector
            ending.close()
            transaction.tx.leave_to_check_back(str(error))

    def _end_joined_later(self, transaction: JoinedTransaction) -> None:
        ending = self._run_end_steps(transaction)
        try:
            task = asyncio.get_running_loop().create_task(ending)
        except RuntimeError as error:  # the connection was closed outside of the event loop
            ending.close()
            transaction.tx.leave_to_check_back(str(error))
            return
        self._end_tasks.add(task)
        task.add_done_callback(self._end_tasks.discard)

    async def purge(self, *, older_than_ms: int | None = None) -> int:
        """Delete markers by age and return how many; see `Escrow.purge`."""
        age_ms = self._purge_age_ms(older_than_ms)
        async with self._engine.connect() as connection:
            return await connection.run_sync(
                statements.purge_older, marker_table, age_ms, self._database_time
            )

    async def clean_up(self) -> None:
        """Delete the markers that are due. Called every ten seconds by a task."""
        await self._purge_acknowledged()
        if self._cleanup_queue.is_cleanup_due():
            await self.purge()

    async def _purge_acknowledged(self) -> None:
        while transaction_ids := self._cleanup_queue.take_acknowledged():
            async with self._engine.connect() as connection:
                await connection.run_sync(statements.purge_ids, transaction_ids)

    async def _cleanup_loop(self) -> None:
        while True:
            await asyncio.sleep(CLEANUP_INTERVAL_S)
            try:
                await self.clean_up()
            except Exception:
                log.exception("clean-up failed, will retry")

    async def _check(self, message: ReceivedMessage) -> Verdict:
        transaction_id = transaction_id_of(message)
        if transaction_id is None:
            return Verdict.UNKNOWN
        purged_from_ms = began_ms(message) + self._retention_ms
        async with self._engine.connect() as connection:
            return await connection.run_sync(
                statements.read_or_tombstone,
                transaction_id,
                group=self._group,
                may_be_purged=lambda now_ms: now_ms >= purged_from_ms,
            )


class _AsyncEndOps:
    """The steps that end the messages of a transaction, with asyncio."""

    def __init__(self, escrow: AsyncEscrow, tx: AsyncTransactionMessages) -> None:
        self._escrow = escrow
        self._tx = tx

    async def read_marker(self, marker_id: str, keep_tombstone: bool) -> Verdict:
        async with self._escrow._engine.connect() as connection:
            return await connection.run_sync(
                statements.read_or_tombstone,
                marker_id,
                group=self._escrow._group,
                keep_tombstone=keep_tombstone,
            )

    async def end(self) -> None:
        await self._tx.end(self._tx.verdict)
        self._escrow._transaction_ended(self._tx)


class _AsyncSessionOps(_AsyncEndOps):
    """The steps of one transaction on an AsyncSession."""

    def __init__(
        self, escrow: AsyncEscrow, session: AsyncSession, tx: AsyncTransactionMessages
    ) -> None:
        super().__init__(escrow, tx)
        self._session = session
        self._session_transaction: AsyncSessionTransaction | None = None

    async def begin(self) -> None:
        self._session_transaction = await self._session.begin()

    async def insert_marker(self) -> None:
        self._tx.began_ms = self._escrow._database_time.now_ms()
        connection = await self._session.connection()
        await connection.run_sync(lambda sync: insert_main_marker(self._tx, self._markers(sync)))

    async def prepare_send(self) -> MessageScope:
        require_current(self._is_current())
        connection = await self._session.connection()
        return await connection.run_sync(prepare_send, self._tx, self._escrow._group)

    async def flush(self) -> None:
        require_current(self._is_current())
        await self._session.flush()
        while (nested := self._session.get_nested_transaction()) is not None:
            await nested.commit()  # the block left a savepoint open
        connection = await self._session.connection()
        await connection.run_sync(lambda sync: finish_markers(self._tx, self._markers(sync)))

    async def commit(self) -> Verdict:
        await self._session.commit()
        return Verdict.COMMIT

    async def roll_back(self, error: BaseException) -> str:
        await self._session.rollback()
        return ""

    async def read_marker(self, marker_id: str, keep_tombstone: bool) -> Verdict:
        with contextlib.suppress(Exception):
            await self._session.close()  # its connection may be the last one of the pool
        return await super().read_marker(marker_id, keep_tombstone)

    async def release_connection(self) -> None:
        await self._session.close()

    def _markers(self, connection: Connection) -> ConnectionMarkers:
        return ConnectionMarkers(connection, self._escrow._group)

    def _is_current(self) -> bool:
        # The AsyncSession creates a new proxy on each call, so compare what is behind it.
        own = self._session_transaction
        return (
            own is not None and self._session.sync_session.get_transaction() is own.sync_transaction
        )
