"""The marker: did this local transaction commit? Asked so that the answer can never change.

The owner inserts its id first: the row becomes visible with its work or not at all. A checker
tries to insert a tombstone under the same id:

    it waits in vain        the owner is still at work                      UNKNOWN
    the row is the owner's  it has committed                                COMMIT
    the row is a tombstone  somebody has answered before                    ROLLBACK
    it succeeds             rolled back, died, or never began               ROLLBACK for ever:
                            an owner that wakes up late fails on its own insert
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, Engine, insert, select, text
from sqlalchemy.exc import IntegrityError, OperationalError

from escrowmq.message.verdict import Verdict
from escrowmq.sql.tables import markers

COMMITTED: Final = "committed"
TOMBSTONE: Final = "tombstone"
_VERDICTS: Final = {COMMITTED: Verdict.COMMIT, TOMBSTONE: Verdict.ROLLBACK}
LOCK_WAIT_MS: Final = 300


def claim(connection: Connection, transaction_id: str, *, now_ms: int) -> None:
    """The owner's first statement. Raises IntegrityError if a checker was faster."""
    connection.execute(insert(markers).values(id=transaction_id, outcome=COMMITTED, at_ms=now_ms))


def ask(engine: Engine, transaction_id: str, *, now_ms: int) -> Verdict:
    """A checker's question, in a short transaction of its own."""
    known = _read(engine, transaction_id)
    if known is not None:
        return known
    try:
        with engine.begin() as connection:
            _wait_briefly(connection)
            connection.execute(
                insert(markers).values(id=transaction_id, outcome=TOMBSTONE, at_ms=now_ms)
            )
    except IntegrityError:
        # Whoever had the key has committed it while we waited.
        return _read(engine, transaction_id) or Verdict.UNKNOWN
    except OperationalError:
        return Verdict.UNKNOWN  # still locked: the owner is at work
    return Verdict.ROLLBACK


def _read(engine: Engine, transaction_id: str) -> Verdict | None:
    query = select(markers.c.outcome).where(markers.c.id == transaction_id)
    with engine.connect() as connection:
        outcome = connection.execute(query).scalar_one_or_none()
    return None if outcome is None else _VERDICTS[outcome]


def _wait_briefly(connection: Connection) -> None:
    """For the owner's lock; what is set here ends with this transaction or this statement."""
    match connection.dialect.name:
        case "postgresql":
            connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_WAIT_MS}ms'"))
        case "mysql" | "mariadb":
            # Whole seconds, and of the session: every checker sets it, nobody else uses it.
            connection.execute(text("SET SESSION innodb_lock_wait_timeout = 1"))
        case "sqlite":
            connection.execute(text(f"PRAGMA busy_timeout = {LOCK_WAIT_MS}"))
        case _:
            pass
