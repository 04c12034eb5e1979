"""The marker: a row that says whether a database transaction committed, once and for all.

The owner of a transaction inserts a marker with the transaction's id as its first statement, so
the row becomes visible together with the work or not at all. A checker reads it. If it is not
there, the checker tries to insert a tombstone under the same id:

    the insert waits, in vain        the owner is still working               UNKNOWN
    the owner's marker is there      the owner committed                      COMMIT
    a tombstone is there             an earlier check was answered            ROLLBACK
    the tombstone is inserted        the owner rolled back, died or never     ROLLBACK, for ever:
                                     began                                    the owner's own insert
                                                                              fails from now on

The messages that are sent inside a savepoint have a marker of their own, inserted inside it, so the
database undoes it with the savepoint.

All times are those of the database: a marker is stamped and aged by one clock, so a process whose
clock is wrong can neither stamp a marker that looks old nor delete one that is young.
"""

from __future__ import annotations

import enum
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from escrowmq.client.messages import ReceivedMessage
from escrowmq.clock import Clock
from escrowmq.errors import ConfigError
from escrowmq.message.names import TX_ID, TX_TIME
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
_TIME_DIGITS_MAX: Final = 18

HOUR_MS: Final = 3_600_000
# A broker can check a transaction as long as it keeps its log: 72 hours by default.
MARKER_RETENTION_MS: Final = 96 * HOUR_MS
# No transaction may be open longer than its tombstone is kept, so this is the shortest retention.
TRANSACTION_MAX_MS: Final = HOUR_MS
# A message can be delivered again as long as the log keeps it, and an operator may send a dead
# letter again even later.
INBOX_RETENTION_MS: Final = 168 * HOUR_MS
PURGE_BATCH_ROWS: Final = 500  # rows that are deleted in one transaction

# How far the clock of a database may gain on ours before it counts as set, and not as fast.
CLOCK_SLACK_MS: Final = 60_000

# The time of the database in milliseconds since 1970, as an expression of its SQL. The functions of
# MySQL for milliseconds depend on the time zone of the session, so its times are whole seconds.
# SQLite runs in the process and has the clock of its machine.
NOW_MS_SQL: Final = {
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)",
    "mysql": "(UNIX_TIMESTAMP() * 1000)",
    "mariadb": "(UNIX_TIMESTAMP() * 1000)",
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
}

_SQLITE_BUSY, _SQLITE_LOCKED = 5, 6
# PostgreSQL: lock not available, serialization failure, deadlock.
_LOCK_SQLSTATES: Final = {"55P03", "40001", "40P01"}
# MySQL and MariaDB: lock wait timeout, deadlock, NOWAIT.
_LOCK_ERROR_NUMBERS: Final = {1205, 1213, 3572}
_NO_SUCH_SAVEPOINT: Final = 1305  # MySQL and MariaDB


def new_transaction_id(database: str = "") -> str:
    """Return a new id for a transaction, unique and at most 64 characters long.

    `database` is the name of one of several databases, for `database_of`. Raises ConfigError if
    the name is too long.
    """
    suffix = _DATABASE_SEPARATOR + database if database else ""
    transaction_id = f"{_ID_PREFIX}{secrets.token_hex(16)}{suffix}"
    if len(transaction_id) > ID_CHARS_MAX:
        raise ConfigError(f"the database name {database!r} is too long for a transaction id")
    return transaction_id


def database_of(transaction_id: str) -> str:
    """Return the database of a transaction; empty for the default one."""
    return transaction_id.partition(_DATABASE_SEPARATOR)[2]


def transaction_id_of(message: ReceivedMessage) -> str | None:
    """Return the id of the marker that belongs to a message.

    None, with an error in the log, if the message was not sent by a database binding.
    """
    transaction_id = message.properties.get(TX_ID, "")
    if transaction_id.startswith(_ID_PREFIX):
        return transaction_id
    log.error(
        "message=%s was not sent through a database binding; give the binding a group of its own",
        message.message_id,
    )
    return None


def began_ms(message: ReceivedMessage) -> int:
    """Return when the marker of a message was inserted, by the clock of the database.

    A message of an older release does not say it; then it is when the message was created.
    """
    text = message.properties.get(TX_TIME, "")
    is_time = text.isascii() and text.isdigit() and len(text) <= _TIME_DIGITS_MAX
    return int(text) if is_time else message.born_ms


# --- the time of a database ----------------------------------------------------------------------


class DatabaseTime:
    """The time of one database, as this process has observed it.

    Between two observations it runs like the clock of this process that never jumps. The wall clock
    of this process is not used at all.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._observed_ms: int | None = None
        self._observed_s = 0.0

    def observe(self, database_ms: int) -> int:
        """Take note of the time that the database says, and return the time to believe.

        A clock that was set forward since the last observation is not believed: rows would look
        old at once. A clock that was set back is, because rows then only live longer.
        """
        expected_ms = self.now_ms()
        if expected_ms is not None and database_ms > expected_ms + CLOCK_SLACK_MS:
            log.warning(
                "the clock of the database was set forward by %d s; rows are aged without that",
                (database_ms - expected_ms) // 1000,
            )
            return expected_ms
        self._observed_ms, self._observed_s = database_ms, self._clock.elapsed_s()
        return database_ms

    def now_ms(self) -> int | None:
        """Return the time of the database now; None before the first observation."""
        if self._observed_ms is None:
            return None
        return self._observed_ms + int((self._clock.elapsed_s() - self._observed_s) * 1000)


# --- the checker's side --------------------------------------------------------------------------


class TombstoneResult(enum.Enum):
    """The result of trying to insert a tombstone."""

    INSERTED = enum.auto()
    EXISTS = enum.auto()  # a row with this id is there: a marker or a tombstone
    LOCKED = enum.auto()  # another transaction has inserted a row and has not ended yet


def resolve_marker(
    transaction_id: str,
    *,
    read: Callable[[], str | None],
    insert_tombstone: Callable[[], TombstoneResult],
    may_be_purged: Callable[[], bool],
) -> Verdict:
    """Answer a check: read the marker, and insert a tombstone if there is none.

    `may_be_purged` returns whether the transaction is so old that its marker may have been deleted.
    Then a missing one means nothing, and the verdict is UNKNOWN.
    """
    outcome = read()
    if outcome is None:
        if may_be_purged():
            log.error(
                "transaction=%s is older than markers are kept; an operator must decide it",
                transaction_id,
            )
            return Verdict.UNKNOWN
        match insert_tombstone():
            case TombstoneResult.INSERTED:
                return Verdict.ROLLBACK
            case TombstoneResult.LOCKED:
                return Verdict.UNKNOWN
            case TombstoneResult.EXISTS:
                outcome = read()  # the owner committed while the insert waited
    return Verdict.UNKNOWN if outcome is None else _VERDICTS[outcome]


def is_lock_error(error: BaseException | None) -> bool:
    """Return whether a database driver's error means only that another transaction has a lock."""
    if error is None:
        return False
    sqlite_code = getattr(error, "sqlite_errorcode", None)
    if sqlite_code is not None:
        return sqlite_code & 0xFF in (_SQLITE_BUSY, _SQLITE_LOCKED)
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    # Drivers of MySQL and MariaDB put the number first; their SQLSTATE is too general.
    number = error.args[0] if error.args else None
    return state in _LOCK_SQLSTATES or number in _LOCK_ERROR_NUMBERS


def is_missing_savepoint(error: BaseException | None) -> bool:
    """Return whether a database driver's error means that a savepoint does not exist."""
    if error is None:
        return False
    number = error.args[0] if error.args else None
    return number == _NO_SUCH_SAVEPOINT or "no such savepoint" in str(error)


@contextmanager
def short_lock_wait(database: str, scalar: Callable[[str], object]) -> Iterator[None]:
    """Limit the wait for locks inside a transaction to 300 ms (MySQL, MariaDB: 1 s).

    A checker must not wait as long as the owner works. `scalar` executes a statement and returns
    its single value. The setting is restored afterwards. Raises ConfigError for an unsupported
    database.
    """
    match database:
        case "postgresql":
            scalar("SET LOCAL lock_timeout = '300ms'")  # ends with the transaction
            yield
        case "mysql" | "mariadb":
            previous = scalar("SELECT @@SESSION.innodb_lock_wait_timeout")
            scalar("SET SESSION innodb_lock_wait_timeout = 1")  # in whole seconds
            try:
                yield
            finally:
                scalar(f"SET SESSION innodb_lock_wait_timeout = {previous}")
        case "sqlite":
            previous = scalar("PRAGMA busy_timeout")
            scalar("PRAGMA busy_timeout = 300")
            try:
                yield
            finally:
                scalar(f"PRAGMA busy_timeout = {previous}")
        case _:
            raise ConfigError(
                f"database {database} is not supported; use SQLite, PostgreSQL, MariaDB or MySQL"
            )


def check_retention_ms(retention_ms: int) -> int:
    """Return `retention_ms`. Raises ConfigError if it is shorter than a transaction may last."""
    if retention_ms < TRANSACTION_MAX_MS:
        raise ConfigError(f"retention_ms must be at least {TRANSACTION_MAX_MS}, not {retention_ms}")
    return retention_ms
