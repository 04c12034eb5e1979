"""Joined transactions: messages for a transaction that the application begins and ends itself.

    tx = escrow.join(session)       attaches nothing yet, and executes nothing
    tx.send(message)                attaches to the transaction of the session's connection
    session.commit()                the events of SQLAlchemy do the rest:

        Engine   commit, before the COMMIT         check the markers; an error rolls back
        Session  after_commit                      the database has committed
        Session  after_transaction_end             the connection is back in its pool: end the
                                                   messages, here and now
        Engine   rollback, before the ROLLBACK     nothing more may be sent

A session that is bound to a Connection is decided by the transaction of that one. There is no event
after the end of a transaction of a Connection: its messages are ended in the background, by asking
the marker, which waits for the end of the transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, Engine, RootTransaction, TwoPhaseTransaction, event
from sqlalchemy.orm import Session, SessionTransaction

from escrowmq.database.owner import announce_message, finish_markers, require_current
from escrowmq.database.transaction import (
    BaseTransactionMessages,
    MessageScope,
    Steps,
    joined_end_steps,
)
from escrowmq.errors import ConfigError
from escrowmq.sql import statements

# Keys in the `info` of sessions and connections.
_JOINED: Final = "escrowmq.joined"  # of both: the list of their joined transactions
_MESSAGES: Final = "escrowmq.messages"  # of a session: what `join` returns, by Escrow


@dataclass(frozen=True, eq=False)
class JoiningEscrow:
    """What joined transactions need from their Escrow or AsyncEscrow.

    `end` ends the messages of a transaction that is over, and waits for the broker. `end_later`
    does so in the background.
    """

    engine: Engine
    group: str
    end: Callable[[JoinedTransaction], None]
    end_later: Callable[[JoinedTransaction], None]


class JoinedTransaction:
    """A transaction of the application, and the messages that belong to it."""

    def __init__(
        self, escrow: JoiningEscrow, tx: BaseTransactionMessages, target: Session | Connection
    ) -> None:
        self.tx = tx
        self.target = target
        self._escrow = escrow
        self._is_ended_by_session = outer_connection(target) is None
        self._root: RootTransaction | None = None  # set by the first message
        self._commit_began = False
        self._is_committed = False

    def prepare_send(self, *_: object) -> MessageScope:
        """Prepare the next message; see `TransactionOps`."""
        target = self.target
        connection = target.connection() if isinstance(target, Session) else target
        if self._root is None:
            self.attach(connection)
        require_current(connection.get_transaction() is self._root)
        return prepare_send(connection, self.tx, self._escrow.group)

    def attach(self, connection: Connection) -> None:
        """Attach to the transaction of a connection, whose events are ours from now on."""
        require_engine(connection, self._escrow)
        if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
            raise ConfigError("the session commits each statement by itself (AUTOCOMMIT)")
        root = connection.get_transaction() or connection.begin()
        if isinstance(root, TwoPhaseTransaction):
            raise ConfigError("a session with two-phase commits cannot be joined")
        if any(other.is_attached_to(connection) for other in connection.info.get(_JOINED, [])):
            # On some databases the checks of one would remove the savepoints of the other.
            raise ConfigError(
                "the transaction was joined before, by another Escrow or through its connection; "
                "send all its messages with the same object"
            )
        connection.info[_JOINED] = [self]
        self._root = root

    def is_attached_to(self, connection: Connection) -> bool:
        return self._root is connection.get_transaction()

    def is_of(self, escrow: JoiningEscrow, connection: Connection) -> bool:
        return self._escrow is escrow and self.is_attached_to(connection) and self.tx.is_open

    def before_commit(self, connection: Connection) -> None:
        """Check the markers. An error rolls the transaction back and is propagated."""
        self.tx.refuse_sends()
        try:
            self.tx.raise_if_send_failed()
            self.tx.raise_if_unawaited()
            markers = ConnectionMarkers(connection, self._escrow.group)
            finish_markers(self.tx, markers)
            self._commit_began = True
        except BaseException:
            # SQLAlchemy takes an error here for one of the COMMIT, and sends no ROLLBACK any more.
            # A connection that is used on would commit the work with its next transaction.
            with suppress(Exception):
                connection.dialect.do_rollback(connection.connection)
            raise
        finally:
            self._end_later()

    def before_rollback(self) -> None:
        self.tx.refuse_sends()
        self._end_later()

    def after_session_commit(self) -> None:
        self._is_committed = self._commit_began or self._root is None

    def after_session_end(self) -> None:
        self._escrow.end(self)

    def end_steps(self) -> Steps:
        """Yield the steps that end the messages."""
        return joined_end_steps(
            self.tx, is_committed=self._is_committed, keep_tombstones=self._commit_began
        )

    def _end_later(self) -> None:
        if not self._is_ended_by_session:
            self._escrow.end_later(self)


# --- events --------------------------------------------------------------------------------------


def listen_to(engine: Engine) -> None:
    """Call the joined transactions of an engine before they end."""
    if not event.contains(engine, "commit", _before_commit):
        event.listen(engine, "commit", _before_commit)
        event.listen(engine, "rollback", _before_rollback)


def _before_commit(connection: Connection) -> None:
    for joined in _take_joined(connection):
        joined.before_commit(connection)


def _before_rollback(connection: Connection) -> None:
    for joined in _take_joined(connection):
        joined.before_rollback()


def _take_joined(connection: Connection) -> list[JoinedTransaction]:
    """Return the joined transactions of a connection for the last time.

    The next user of the connection may be another thread, as soon as this transaction is over. A
    connection that broke has none any more: a session ends its messages by itself, and those of a
    Connection are left to a check.
    """
    if connection.closed or connection.invalidated:
        return []
    joined: list[JoinedTransaction] = connection.info.pop(_JOINED, [])
    return [transaction for transaction in joined if transaction.is_attached_to(connection)]


# These two are called for all sessions of the process; a session without a joined transaction costs
# a look into its dictionary.


@event.listens_for(Session, "after_commit")
def _after_session_commit(session: Session) -> None:
    if not session.in_nested_transaction():
        for joined in session.info.get(_JOINED, []):
            joined.after_session_commit()


@event.listens_for(Session, "after_transaction_end")
def _after_session_end(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None:
        session.info.pop(_MESSAGES, None)
        for joined in session.info.pop(_JOINED, []):
            joined.after_session_end()


# --- what join returns ---------------------------------------------------------------------------


def find_messages(
    escrow: JoiningEscrow, target: Session | Connection
) -> BaseTransactionMessages | None:
    """Return what sends the messages of the current transaction of a session or connection.

    None if `escrow` has neither begun nor joined it.
    """
    if isinstance(target, Session):
        tx: BaseTransactionMessages | None = target.info.get(_MESSAGES, {}).get(escrow)
        if tx is not None and tx.is_open:
            return tx
    if (connection := outer_connection(target)) is None:
        return None
    # The dictionary of a connection outlives it: it is that of the driver's connection in the pool.
    joined: list[JoinedTransaction] = connection.info.get(_JOINED, [])
    for transaction in joined:
        if transaction.is_of(escrow, connection):
            transaction.target = target
            return transaction.tx
    return None


def remember_messages(escrow: JoiningEscrow, session: Session, tx: BaseTransactionMessages) -> None:
    """Make `find_messages` return `tx` as long as messages can be sent."""
    session.info.setdefault(_MESSAGES, {})[escrow] = tx


def join(
    escrow: JoiningEscrow, target: Session | Connection, tx: BaseTransactionMessages
) -> JoinedTransaction:
    """Join the current or the next transaction of a session or connection.

    Raises ConfigError for a session or connection of another engine.
    """
    require_engine(target.get_bind() if isinstance(target, Session) else target, escrow)
    joined = JoinedTransaction(escrow, tx, target)
    if (connection := outer_connection(target)) is None:
        assert isinstance(target, Session)
        remember_messages(escrow, target, tx)
        target.info.setdefault(_JOINED, []).append(joined)
    elif connection.in_transaction():
        joined.attach(connection)
    return joined


def outer_connection(target: Session | Connection) -> Connection | None:
    """Return the connection whose transaction decides; None if it is the session's own."""
    bind = target.get_bind() if isinstance(target, Session) else target
    return bind if isinstance(bind, Connection) else None


def require_engine(bind: Engine | Connection, escrow: JoiningEscrow) -> None:
    """Raise ConfigError unless `bind` belongs to the engine of the Escrow, or shares its pool."""
    if bind.engine is not escrow.engine and bind.engine.pool is not escrow.engine.pool:
        raise ConfigError(
            f"the session uses the engine {bind.engine.url!r} and the Escrow another one, "
            f"{escrow.engine.url!r}, whose markers it reads; create the Escrow with the engine "
            "of the session"
        )


# --- markers on a connection ---------------------------------------------------------------------


class ConnectionMarkers:
    """The owner's statements on the markers of the transaction of a connection.

    `name` is that of the proofs that are savepoints; see `statements.insert_marker`.
    """

    def __init__(self, connection: Connection, group: str, name: str = "escrowmq") -> None:
        self._connection = connection
        self._group = group
        self._name = name

    def insert_marker(self, marker_id: str, number: int, messages: int) -> str:
        return statements.insert_marker(
            self._connection,
            marker_id,
            group=self._group,
            savepoint=f"{self._name}_{number}",
            messages=messages,
        )

    def count_message(self, marker_id: str, proof: str, count: int) -> bool:
        return statements.count_message(self._connection, marker_id, proof, count)

    def finish_marker(self, marker_id: str, proof: str, count: int) -> bool:
        return statements.finish_marker(self._connection, marker_id, proof, count)

    def read_message_counts(self, marker_ids: Sequence[str]) -> dict[str, int]:
        return statements.read_message_counts(self._connection, marker_ids)


def prepare_send(
    connection: Connection, tx: BaseTransactionMessages, group: str, name: str = "escrowmq"
) -> MessageScope:
    """Return the scope of the connection's savepoint, after counting one more message in it."""
    require_current(
        connection.in_transaction() and not connection.closed and not connection.invalidated
    )
    savepoint = connection.get_nested_transaction()
    return announce_message(tx, savepoint, ConnectionMarkers(connection, group, name))
