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

import enum
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from escrowmq.client.messages import ReceivedMessage
from escrowmq.errors import ConfigError
from escrowmq.message.names import TX_ID
from escrowmq.message.transaction import Verdict

log = logging.getLogger(__name__)

MARKER_TABLE: Final = "escrowmq_marker"
INBOX_TABLE: Final = "escrowmq_inbox"
COMMITTED: Final = "committed"
TOMBSTONE: Final = "tombstone"
_VERDICTS: Final = {COMMITTED: Verdict.COMMIT, TOMBSTONE: Verdict.ROLLBACK}

ID_CHARS_MAX: Final = 64
_ID_PREFIX: Final = "escrow-"
_DATABASE_SEPARATOR: Final = "@"

HOUR_MS: Final = 3_600_000
# A broker asks about a transaction for as long as it keeps its log: 72 hours unless told otherwise.
MARKER_RETENTION_MS: Final = 96 * HOUR_MS
# No transaction may be open for longer: its tombstone would be gone.
TRANSACTION_MAX_MS: Final = HOUR_MS
# A message comes again as long as the log has it; an operator may send a dead letter later.
INBOX_RETENTION_MS: Final = 168 * HOUR_MS
PURGE_BATCH_ROWS: Final = 500  # that are removed in one transaction

_SQLITE_BUSY, _SQLITE_LOCKED = 5, 6
_LOCK_SQLSTATES: Final = {"55P03", "40001", "40P01"}  # lock not available; two that lost a race
_LOCK_ERROR_NUMBERS: Final = {1205, 1213, 3572}  # waited too long; deadlock; would have to wait


def new_transaction_id(database: str = "") -> str:
    """Of a transaction. `place`: which of several databases knows about it."""
    found = (
        f"{_ID_PREFIX}{secrets.token_hex(16)}{_DATABASE_SEPARATOR + database if database else ''}"
    )
    if len(found) > ID_CHARS_MAX:
        raise ConfigError(f"the name of database {database!r} is too long for an id")
    return found


def transaction_id_of(message: ReceivedMessage) -> str | None:
    """What to look for in the database; None, and a log, if it is no transaction of a binding."""
    found = message.properties.get(TX_ID, "")
    if found.startswith(_ID_PREFIX):
        return found
    log.error(
        "message=%s was not sent through a database binding; give the binding a group of its own",
        message.message_id,
    )
    return None


def database_of(transaction_id: str) -> str:
    return transaction_id.partition(_DATABASE_SEPARATOR)[2]


class TombstoneResult(enum.Enum):
    """What became of a tombstone."""

    INSERTED = enum.auto()
    EXISTS = enum.auto()  # somebody's row is there
    LOCKED = enum.auto()  # somebody is at work on it


def resolve_marker(
    transaction_id: str,
    *,
    read: Callable[[], str | None],
    insert_tombstone: Callable[[], TombstoneResult],
    may_be_purged: bool,
) -> Verdict:
    """A checker's question. `may_be_forgotten`: so old that its row may have been removed, and
    that there is none says nothing."""
    outcome = read()
    if outcome is None:
        if may_be_purged:
            log.error(
                "transaction=%s is older than markers are kept: an operator must settle it",
                transaction_id,
            )
            return Verdict.UNKNOWN
        match insert_tombstone():
            case TombstoneResult.INSERTED:
                return Verdict.ROLLBACK
            case TombstoneResult.LOCKED:
                return Verdict.UNKNOWN
            case TombstoneResult.EXISTS:
                outcome = read()  # committed while we waited
    return Verdict.UNKNOWN if outcome is None else _VERDICTS[outcome]


def is_lock_error(error: BaseException | None) -> bool:
    """Whether a driver's error says that somebody else holds the row, and nothing worse."""
    if error is None:
        return False
    sqlite_code = getattr(error, "sqlite_errorcode", None)
    if sqlite_code is not None:
        return sqlite_code & 0xFF in (_SQLITE_BUSY, _SQLITE_LOCKED)
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    number = error.args[0] if error.args else None  # MariaDB's drivers; its state says nothing
    return state in _LOCK_SQLSTATES or number in _LOCK_ERROR_NUMBERS


@contextmanager
def short_lock_wait(database: str, scalar: Callable[[str], object]) -> Iterator[None]:
    """Inside a transaction: its next statement waits a moment for a lock, not longer. What is
    changed for that is as it was afterwards."""
    match database:
        case "postgresql":
            scalar("SET LOCAL lock_timeout = '300ms'")  # ends with the transaction
            yield
        case "mysql" | "mariadb":
            before = scalar("SELECT @@SESSION.innodb_lock_wait_timeout")
            scalar("SET SESSION innodb_lock_wait_timeout = 1")  # it counts whole seconds
            try:
                yield
            finally:
                scalar(f"SET SESSION innodb_lock_wait_timeout = {before}")
        case "sqlite":
            before = scalar("PRAGMA busy_timeout")
            scalar("PRAGMA busy_timeout = 300")
            try:
                yield
            finally:
                scalar(f"PRAGMA busy_timeout = {before}")
        case _:
            raise ConfigError(f"{database}: use SQLite, PostgreSQL, MariaDB or MySQL")


def check_retention_ms(retention_ms: int) -> int:
    """Raises ConfigError if tombstones would go before their owners can have given up."""
    if retention_ms < TRANSACTION_MAX_MS:
        raise ConfigError(
            f"markers are kept for {TRANSACTION_MAX_MS} ms at least, not {retention_ms}"
        )
    return retention_ms
