"""The owner's side of the markers: what a send and the end of a transaction do to them.

The messages that are sent outside of savepoints have one marker, those of each savepoint have
another. A binding says in which savepoint its connection is, and executes the statements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from escrowmq.database.marker import database_of, new_transaction_id
from escrowmq.database.transaction import SESSION_ENDED, BaseTransactionMessages, MessageScope
from escrowmq.errors import SessionEndedInBlock


class OwnerStatements(Protocol):
    """The statements of a binding on the markers of one database transaction.

    `number` is 0 for the marker of the transaction, and counts its savepoints.
    """

    def insert_marker(self, marker_id: str, number: int, messages: int) -> str:
        """Insert a marker, and return the proof of its transaction."""

    def count_message(self, marker_id: str, proof: str, count: int) -> bool:
        """Count a message; False if the transaction is not that of the proof any more."""

    def finish_marker(self, marker_id: str, proof: str, count: int) -> bool:
        """Check a marker before the commit; False as for `count_message`."""

    def read_message_counts(self, marker_ids: Sequence[str]) -> dict[str, int]:
        """Return the numbers of messages of the markers that are there."""


def insert_main_marker(tx: BaseTransactionMessages, statements: OwnerStatements) -> None:
    """Insert the marker of a transaction before its first message."""
    _insert_marker(tx.main_scope, statements, number=0, messages=0)


def _insert_marker(
    scope: MessageScope, statements: OwnerStatements, *, number: int, messages: int
) -> None:
    scope.proof = statements.insert_marker(scope.id, number, messages)


def announce_message(
    tx: BaseTransactionMessages, savepoint: object, statements: OwnerStatements
) -> MessageScope:
    """Return the scope of a savepoint, after counting one more message in it.

    The first message of a scope inserts its marker, unless `insert_main_marker` did. Raises
    SessionEndedInBlock if the transaction is not that of the marker any more.
    """
    scope = tx.find_scope(savepoint)
    is_new = scope is None
    if scope is None:
        scope = tx.new_scope(new_transaction_id(database_of(tx.id)), savepoint)
    count = scope.message_count + 1
    if scope.proof:
        require_current(statements.count_message(scope.id, scope.proof, count))
    else:
        number = len(tx.scopes) if is_new else 0
        _insert_marker(scope, statements, number=number, messages=count)
    if is_new:
        tx.scopes.append(scope)
    scope.message_count = count
    return scope


def finish_markers(tx: BaseTransactionMessages, statements: OwnerStatements) -> None:
    """Check the markers before the commit, and find out which savepoints were rolled back.

    Raises SessionEndedInBlock if the transaction is not that of the markers any more.
    """
    main = tx.main_scope
    if main.proof:
        require_current(statements.finish_marker(main.id, main.proof, main.message_count))
    if len(tx.scopes) > 1:
        tx.compare_counts(statements.read_message_counts([scope.id for scope in tx.scopes[1:]]))


def require_current(is_current: bool) -> None:
    """Raise SessionEndedInBlock if a database transaction is not the one of its marker."""
    if not is_current:
        raise SessionEndedInBlock(SESSION_ENDED)
