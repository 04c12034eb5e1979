"""`escrow.atomic()`: Django's atomic block with messages.

It performs the steps of `escrowmq.database.transaction` on Django's connections.
"""

from __future__ import annotations

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
from escrowmq.database.transaction import (
    CleanupQueue,
    CleanupThread,
    TransactionMessages,
    run_steps,
    transaction_steps,
)
from escrowmq.django import statements
from escrowmq.errors import ConfigError
from escrowmq.message.transaction import Verdict


@dataclass(frozen=True, kw_only=True)
class EscrowSettings:
    """The dictionary `settings.ESCROWMQ`.

    `servers`: addresses of name servers. `group`: the producer group, used by nothing else.
    `databases`: aliases of the databases that have the two tables. `retention_ms`: markers are
    deleted when they are older; longer than the brokers keep their log. `options`: further
    parameters of `escrowmq.Producer`.
    """

    servers: str
    group: str
    databases: tuple[str, ...] = (DEFAULT_DB_ALIAS,)
    retention_ms: int = MARKER_RETENTION_MS
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls) -> EscrowSettings:
        """Read the settings of the process. Raises ConfigError for a missing or unknown key."""
        try:
            values = dict(getattr(settings, "ESCROWMQ", {}))
            loaded = cls(**{**values, "databases": tuple(values.get("databases", cls.databases))})
        except TypeError as error:
            raise ConfigError(f"settings.ESCROWMQ: {error}") from error
        check_retention_ms(loaded.retention_ms)
        return loaded


class Escrow:
    """Commits the database and sends the messages, or does neither.

    Use the instance `escrowmq.django.escrow`. It connects to the brokers on first use, once in
    each process, also in a child after a fork. Any thread may use it.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._cleanup_queue = CleanupQueue(self._clock)
        self._lock = threading.Lock()
        self._process_id = 0
        self._producer: Producer | None = None
        self._cleanup_thread: CleanupThread | None = None

    def start(self) -> None:
        """Connect, and answer the broker's checks from now on. `atomic` does this by itself.

        Call it in a process that sends nothing but should answer for others of its group.
        """
        self._started_producer()

    def close(self) -> None:
        """Stop answering checks and disconnect. The next use connects again."""
        cleanup_thread, self._cleanup_thread = self._cleanup_thread, None
        is_own_process = self._process_id == os.getpid()
        if cleanup_thread is not None and is_own_process:
            cleanup_thread.stop()
        with self._lock:
            producer, self._producer = self._producer, None
        if producer is not None and is_own_process:
            producer.close()

    @contextmanager
    def atomic(self, using: str = DEFAULT_DB_ALIAS) -> Iterator[TransactionMessages]:
        """Run a block as `transaction.atomic(using)` does; yield what sends its messages.

        The messages are committed when the outermost atomic block is, and rolled back with this
        one. An exception rolls this block back and is propagated; `Rollback` rolls it back quietly.
        Raises CommitUnknown if the database does not say whether it has committed; a check finds
        out, and the messages follow it. Raises ConfigError for invalid settings.
        """
        producer = self._started_producer()
        escrow_settings = EscrowSettings.load()
        if using not in escrow_settings.databases:
            raise ConfigError(f"add {using!r} to settings.ESCROWMQ['databases'] and migrate it")
        database = "" if using == DEFAULT_DB_ALIAS else using
        tx = TransactionMessages(producer.transaction(id=new_transaction_id(database)))
        ops = _AtomicOps(self, tx, using, escrow_settings.group)
        steps = transaction_steps(tx, is_nested=ops.is_nested)
        run_steps(steps, ops)
        try:
            yield tx
        except BaseException as error:
            run_steps(steps, ops, error)
        else:
            run_steps(steps, ops)

    def purge(self) -> int:
        """Delete markers older than `retention_ms` and return how many. Done once an hour."""
        escrow_settings = EscrowSettings.load()
        before_ms = self._clock.now_ms() - escrow_settings.retention_ms
        return sum(
            statements.purge_before(alias, MARKER_TABLE, before_ms)
            for alias in escrow_settings.databases
        )

    def clean_up(self) -> None:
        """Delete old markers if it is due. Called every ten seconds by a thread of its own."""
        if self._cleanup_queue.is_cleanup_due():
            try:
                self.purge()
            finally:
                connections.close_all()

    def _started_producer(self) -> Producer:
        with self._lock:
            if self._producer is None or self._process_id != os.getpid():
                escrow_settings = EscrowSettings.load()
                check_isolation_level(escrow_settings)
                producer = Producer(
                    escrow_settings.servers, group=escrow_settings.group, **escrow_settings.options
                )
                producer.checker("*")(self._check)
                producer.__enter__()
                self._process_id = os.getpid()
                self._producer = producer
                self._cleanup_thread = CleanupThread(
                    self.clean_up, name=f"escrowmq-{escrow_settings.group}"
                )
            return self._producer

    def _check(self, message: ReceivedMessage) -> Verdict:
        """Answer a check, in a thread of the client, which logs what this raises."""
        transaction_id = transaction_id_of(message)
        if transaction_id is None:
            return Verdict.UNKNOWN
        using = database_of(transaction_id) or DEFAULT_DB_ALIAS
        age_ms = self._clock.now_ms() - message.born_ms
        may_be_purged = age_ms >= EscrowSettings.load().retention_ms
        try:
            return self._read_or_tombstone(transaction_id, using, may_be_purged=may_be_purged)
        finally:
            connections[using].close()  # the connection belongs to this thread

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


class _AtomicOps:
    """The steps of one transaction in an atomic block.

    The messages are ended by an on_commit hook, because a nested block is committed only with the
    outermost one, and because Django calls hooks in order: those of the application, registered
    later, find that the messages are on their way.
    """

    def __init__(self, escrow: Escrow, tx: TransactionMessages, using: str, group: str) -> None:
        self._escrow = escrow
        self._tx = tx
        self._using = using
        self._group = group
        self._atomic = transaction.atomic(using=using)
        self._has_exited = False
        connection = connections[using]
        self.is_nested = connection.in_atomic_block or not connection.get_autocommit()

    def begin(self) -> None:
        self._atomic.__enter__()

    def insert_marker(self) -> None:
        now_ms = self._escrow._clock.now_ms()
        statements.insert_marker(self._using, self._tx.id, group=self._group, now_ms=now_ms)
        transaction.on_commit(lambda: self.end(Verdict.COMMIT), using=self._using)

    def flush(self, message_count: int) -> None:
        statements.set_message_count(self._using, self._tx.id, message_count)

    def commit(self) -> Verdict | None:
        self._has_exited = True
        self._atomic.__exit__(None, None, None)
        if self.is_nested or self._tx.outcome is not None:
            return None  # the hook ends the messages, or has done so
        return Verdict.ROLLBACK  # set_rollback(True): rolled back without an error

    def roll_back(self, error: BaseException) -> str:
        if not self._has_exited:
            self._has_exited = True
            self._atomic.__exit__(type(error), error, error.__traceback__)
        if self._tx.outcome is None and connections[self._using].needs_rollback:
            return "the block around it has to roll back"
        return ""

    def read_marker(self) -> Verdict:
        connections[self._using].close()  # its state is unknown after a failed commit
        return self._escrow._read_or_tombstone(self._tx.id, self._using, may_be_purged=False)

    def release_connection(self) -> None:
        pass  # Django keeps a connection for each thread

    def end(self, verdict: Verdict) -> None:
        self._tx.end(verdict)


def check_isolation_level(escrow_settings: EscrowSettings) -> None:
    """Raise ConfigError if a checker could see markers that are not committed."""
    for alias in escrow_settings.databases:
        options = connections[alias].settings_dict.get("OPTIONS", {})
        if str(options.get("isolation_level")).lower() == "read uncommitted":
            raise ConfigError(
                f"database {alias!r}: with isolation level READ UNCOMMITTED a checker would see "
                "uncommitted markers; use READ COMMITTED or a higher level"
            )


escrow = Escrow()
