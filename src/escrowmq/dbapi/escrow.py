"""Escrow: messages for the transaction of a connection that the application has.

It performs the steps of `escrowmq.database.transaction` on the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import TracebackType
from typing import Unpack

from escrowmq.blocking import Producer
from escrowmq.client.messages import ReceivedMessage
from escrowmq.client.producer.producer import ProducerOptions
from escrowmq.clock import Clock
from escrowmq.database import statements
from escrowmq.database.marker import (
    MARKER_RETENTION_MS,
    MARKER_TABLE,
    began_ms,
    new_transaction_id,
    transaction_id_of,
)
from escrowmq.database.owner import announce_message, finish_markers
from escrowmq.database.retention import CleanupThread, MarkerRetention
from escrowmq.database.statements import SqlMarkers
from escrowmq.database.transaction import (
    MessageScope,
    TransactionMessages,
    run_steps,
    transaction_steps,
)
from escrowmq.dbapi.connection import DatabaseConnection, DriverConnection
from escrowmq.errors import Rollback
from escrowmq.message.transaction import Verdict


class Escrow(MarkerRetention):
    """Commits a connection and sends the messages, or does neither.

        escrow = Escrow(lambda: psycopg.connect("dbname=bank"), "127.0.0.1:9876", group="bank")
        with escrow.join(connection) as tx:
            connection.execute(...)
            tx.send(Message("transfers", payload))

    It also answers the broker's checks from the database, for transactions of any process of its
    group, so give it a producer group of its own. It may be used by several threads. Create one
    for each process that uses the database, and close it at the end.

    `connect`: opens a connection to the same database, for checks and clean-up; called in any
    thread. It must not commit each statement by itself (autocommit).
    `servers`: addresses of name servers, "127.0.0.1:9876" or several.
    `create_table`: False leaves the table of markers to migrations; docs/sql.md has its columns.
    `retention_ms`: markers are deleted when they are older. It must be longer than the brokers
    keep their log (`fileReservedTime`) and the same in all processes.
    `options`: further parameters of `escrowmq.Producer`.

    Raises ConfigError for a database that cannot be used, and what the database raises.
    """

    def __init__(
        self,
        connect: Callable[[], DatabaseConnection],
        servers: str,
        *,
        group: str,
        create_table: bool = True,
        retention_ms: int = MARKER_RETENTION_MS,
        clock: Clock | None = None,
        **options: Unpack[ProducerOptions],
    ) -> None:
        super().__init__(
            group=group, retention_ms=retention_ms, purge_acknowledged=False, clock=clock
        )
        self._connect = connect
        with self._own_connection() as connection:
            if create_table:
                statements.create_marker_table(connection)
        with self._own_connection() as connection:
            statements.check_transaction_support(connection)
            self._database_time.observe(statements.now_ms(connection))
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
        """Stop the clean-up and answering checks, and disconnect from the brokers."""
        self._cleanup_thread.stop()
        self._producer.close()

    def join(self, connection: DatabaseConnection) -> JoinedMessages:
        """Return what sends messages with the transaction of a connection; use it with `with`.

            with escrow.join(connection) as tx:
                connection.execute(...)
                tx.send(Message("transfers", payload))

        Leaving the block commits the connection, with all that was done in its transaction before,
        and then the messages. An exception rolls both back and is propagated; `Rollback` rolls back
        quietly. Code without a block calls `tx.commit()` or `tx.rollback()` instead. If the
        connection is committed or rolled back in another way, the messages follow it too, and
        SessionEndedInBlock says so. Raises CommitUnknown if the database does not say whether it
        has committed; a check finds out, and the messages follow it.

        Raises ConfigError for a connection that commits each statement by itself, and what the
        database raises.
        """
        driver_connection = DriverConnection(connection)
        tx = JoinedMessages(self._producer.transaction(id=new_transaction_id()))
        tx.began_ms = self._database_time.now_ms()
        tx._ops = _ConnectionOps(self, driver_connection, tx)
        tx.prepare_send = tx._ops.prepare_send
        driver_connection.begin()
        return tx

    def purge(self, *, older_than_ms: int | None = None) -> int:
        """Delete markers older than `retention_ms`, or than a longer time, and return how many.

        This happens once an hour by itself. Raises ConfigError for a time below `retention_ms`.
        """
        age_ms = self._purge_age_ms(older_than_ms)
        with self._own_connection() as connection:
            return statements.purge_older(connection, MARKER_TABLE, age_ms, self._database_time)

    def clean_up(self) -> None:
        """Delete the markers that are due. Called every ten seconds by a thread."""
        if self._cleanup_queue.is_cleanup_due():
            self.purge()

    @contextmanager
    def _own_connection(self) -> Iterator[DriverConnection]:
        with closing(self._connect()) as connection:
            yield DriverConnection(connection)

    def _check(self, message: ReceivedMessage) -> Verdict:
        """Answer a check. The client logs what this raises, and the broker checks again."""
        transaction_id = transaction_id_of(message)
        if transaction_id is None:
            return Verdict.UNKNOWN
        purged_from_ms = began_ms(message) + self._retention_ms
        with self._own_connection() as connection:
            return statements.read_or_tombstone(
                connection,
                transaction_id,
                group=self._group,
                may_be_purged=lambda now_ms: now_ms >= purged_from_ms,
            )


class JoinedMessages(TransactionMessages):
    """Sends the messages of the transaction of a connection, and ends both; see `Escrow.join`."""

    _ops: _ConnectionOps

    def __enter__(self) -> JoinedMessages:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not self.is_open:
            return False  # commit() or rollback() was called in the block
        self._end_transaction(error)  # raises the error, unless it is a Rollback
        return error is not None

    def commit(self) -> None:
        """Commit the connection and then the messages; raises as the end of the block does."""
        self._raise_if_ended()
        self._end_transaction(None)

    def rollback(self) -> None:
        """Roll back the connection and the messages.

        Raises SessionEndedInBlock if the connection was committed before.
        """
        self._raise_if_ended()
        self._end_transaction(Rollback())

    def _end_transaction(self, error: BaseException | None) -> None:
        steps = transaction_steps(self, has_begun=True)
        run_steps(steps, self._ops)
        run_steps(steps, self._ops, error)


class _ConnectionOps:
    """The steps of one transaction on a connection of the application."""

    def __init__(
        self, escrow: Escrow, connection: DriverConnection, tx: TransactionMessages
    ) -> None:
        self._escrow = escrow
        self._connection = connection
        self._tx = tx
        self._markers = SqlMarkers(connection, escrow._group)

    def prepare_send(self) -> MessageScope:
        return announce_message(self._tx, None, self._markers)

    def flush(self) -> None:
        finish_markers(self._tx, self._markers)

    def commit(self) -> Verdict:
        self._connection.commit()
        return Verdict.COMMIT

    def roll_back(self, error: BaseException) -> str:
        self._connection.roll_back()
        return ""

    def read_marker(self, marker_id: str, keep_tombstone: bool) -> Verdict:
        with self._escrow._own_connection() as connection:
            return statements.read_or_tombstone(
                connection, marker_id, group=self._escrow._group, keep_tombstone=keep_tombstone
            )

    def release_connection(self) -> None:
        pass  # it is the application's

    def end(self) -> None:
        self._tx.end(self._tx.verdict)
