"""`escrow.atomic()`: Django's atomic block, and messages that are decided with it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections, transaction

from escrowmq.blocking import Producer
from escrowmq.client.messages import ReceivedMessage
from escrowmq.clock import Clock, SystemClock
from escrowmq.database.marker import (
    MARKER_RETENTION_MS,
    MARKER_TABLE,
    check_retention_ms,
    database_of,
    new_transaction_id,
    transaction_id_of,
)
from escrowmq.database.transaction import CleanupQueue, CleanupThread, TransactionMessages
from escrowmq.django import statements
from escrowmq.errors import CommitUnknown, ConfigError, Rollback
from escrowmq.message.transaction import Verdict

log = logging.getLogger(__name__)

COMMIT_UNKNOWN_ERROR = (
    "the database did not say whether transaction {} has committed; check-back finds out"
)


@dataclass(frozen=True, kw_only=True)
class EscrowSettings:
    """`settings.ESCROWMQ`. `databases`: the aliases that have the two tables. `options`: more for
    the producer."""

    servers: str
    group: str
    databases: tuple[str, ...] = (DEFAULT_DB_ALIAS,)
    kept_ms: int = MARKER_RETENTION_MS
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls) -> EscrowSettings:
        try:
            given = dict(getattr(settings, "ESCROWMQ", {}))
            found = cls(**{**given, "databases": tuple(given.get("databases", cls.databases))})
        except TypeError as error:
            raise ConfigError(f"settings.ESCROWMQ: {error}") from error
        check_retention_ms(found.kept_ms)
        return found


class Escrow:
    """One for a process: made when it is first wanted, and once more in a child after a fork."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._cleanup_queue = CleanupQueue(self._clock)
        self._lock = threading.Lock()
        self._process_id = 0
        self._producer: Producer | None = None
        self._cleanup_thread: CleanupThread | None = None

    def start(self) -> None:
        """From here on this process answers the broker's questions; `atomic` does it by itself."""
        self._started_producer()

    def close(self) -> None:
        caretaker, self._cleanup_thread = self._cleanup_thread, None
        is_ours = self._process_id == os.getpid()
        if caretaker is not None and is_ours:
            caretaker.stop()  # first: it would begin anew
        with self._lock:
            producer, self._producer = self._producer, None
        if producer is not None and is_ours:
            producer.close()

    def _started_producer(self) -> Producer:
        with self._lock:
            if self._producer is None or self._process_id != os.getpid():
                wanted = EscrowSettings.load()
                check_isolation_level(wanted)
                producer = Producer(wanted.servers, group=wanted.group, **wanted.options)
                producer.checker("*")(self._check)
                producer.__enter__()
                self._process_id = os.getpid()
                self._producer = producer
                self._cleanup_thread = CleanupThread(self.clean_up, name=f"escrowmq-{wanted.group}")
            return self._producer

    # --- the owner -------------------------------------------------------------------------------

    @contextmanager
    def atomic(self, using: str = DEFAULT_DB_ALIAS) -> Iterator[TransactionMessages]:
        """As `transaction.atomic(using)`; what it yields sends the messages that go with it.

        They are committed when the outermost atomic block is, and rolled back with this one.
        Rollback rolls this block back and ends here. Raises CommitUnknown if the database does not
        say whether it has committed.
        """
        producer = self._started_producer()
        wanted = EscrowSettings.load()
        if using not in wanted.databases:
            raise ConfigError(f"add {using!r} to settings.ESCROWMQ['databases'], and migrate it")
        connection = connections[using]
        is_outermost = connection.get_autocommit() and not connection.in_atomic_block
        place = "" if using == DEFAULT_DB_ALIAS else using
        tx = TransactionMessages(producer.transaction(id=new_transaction_id(place)))
        is_done = False
        try:
            with transaction.atomic(using=using):
                now_ms = self._clock.now_ms()
                statements.insert_marker(using, tx.id, group=wanted.group, now_ms=now_ms)
                # The first hook: those of the application see that the messages are on their way.
                transaction.on_commit(lambda: tx.end(Verdict.COMMIT), using=using)
                yield tx
                tx.raise_if_send_failed()
                statements.set_message_count(using, tx.id, len(tx.halves))
                is_done = True
        except Exception as error:
            if is_done and is_outermost and tx.outcome is None:
                self._resolve_failed_commit(tx, using, error)
                return
            if tx.outcome is None:
                self._end_rolled_back(tx, using)
            if not isinstance(error, Rollback):
                raise
        if is_outermost and tx.outcome is None:
            tx.end(Verdict.ROLLBACK)  # `set_rollback(True)`: it was rolled back without an error

    def _end_rolled_back(self, tx: TransactionMessages, using: str) -> None:
        if connections[using].needs_rollback:
            tx.leave_to_check_back("the block around it has to roll back")
        else:
            tx.end(Verdict.ROLLBACK)

    def _resolve_failed_commit(self, tx: TransactionMessages, using: str, error: Exception) -> None:
        """COMMIT has failed, or its answer is lost: the marker knows what the database did."""
        try:
            connections[using].close()
            verdict = self._read_or_tombstone(tx.id, using, may_be_purged=False)
        except Exception as second:
            log.warning("the database does not answer transaction=%s: %s", tx.id, second)
            verdict = Verdict.UNKNOWN
        match verdict:
            case Verdict.COMMIT:
                log.warning("commit failed, and it is committed transaction=%s", tx.id)
                tx.end(Verdict.COMMIT)
            case Verdict.ROLLBACK:
                tx.end(Verdict.ROLLBACK)
                raise error
            case Verdict.UNKNOWN:
                tx.leave_to_check_back(str(error))
                raise CommitUnknown(COMMIT_UNKNOWN_ERROR.format(tx.id)) from error

    # --- the checker -----------------------------------------------------------------------------

    def _check(self, message: ReceivedMessage) -> Verdict:
        """In a thread of the client. What it raises is logged there, and the broker asks again."""
        transaction_id = transaction_id_of(message)
        if transaction_id is None:
            return Verdict.UNKNOWN
        using = database_of(transaction_id) or DEFAULT_DB_ALIAS
        age_ms = self._clock.now_ms() - message.born_ms
        is_old = age_ms >= EscrowSettings.load().kept_ms
        try:
            return self._read_or_tombstone(transaction_id, using, may_be_purged=is_old)
        finally:
            connections[using].close()

    def _read_or_tombstone(
        self, transaction_id: str, using: str, *, may_be_purged: bool
    ) -> Verdict:
        return statements.read_or_tombstone(
            using,
            transaction_id,
            group=EscrowSettings.load().group,
            now_ms=self._clock.now_ms(),
            may_be_purged=may_be_purged,
        )

    # --- clean-up --------------------------------------------------------------------------------

    def purge(self) -> int:
        """Remove markers that nobody can ask about any more: how many."""
        wanted = EscrowSettings.load()
        before_ms = self._clock.now_ms() - wanted.kept_ms
        return sum(statements.purge_before(at, MARKER_TABLE, before_ms) for at in wanted.databases)

    def clean_up(self) -> None:
        """What the caretaker does now and then, in a thread of its own."""
        if self._cleanup_queue.is_cleanup_due():
            try:
                self.purge()
            finally:
                connections.close_all()


def check_isolation_level(escrow_settings: EscrowSettings) -> None:
    """Raises ConfigError if a checker would believe what is not committed."""
    for alias in escrow_settings.databases:
        options = connections[alias].settings_dict.get("OPTIONS", {})
        if str(options.get("isolation_level")).lower() == "read uncommitted":
            raise ConfigError(f"database {alias!r}: a checker must not read what is uncommitted")


escrow = Escrow()
