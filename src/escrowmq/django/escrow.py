"""`escrow.atomic()`: Django's atomic block with messages.

It performs the steps of `escrowmq.database.transaction` on Django's connections.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections, transaction

from escrowmq.blocking import Producer
from escrowmq.client.messages import Message, ReceivedMessage, SendResult
from escrowmq.clock import Clock, SystemClock
from escrowmq.database import statements
from escrowmq.database.marker import (
    MARKER_RETENTION_MS,
    MARKER_TABLE,
    DatabaseTime,
    began_ms,
    check_retention_ms,
    database_of,
    new_transaction_id,
    transaction_id_of,
)
from escrowmq.database.owner import (
    announce_message,
    finish_markers,
    insert_main_marker,
    require_current,
)
from escrowmq.database.retention import CleanupQueue, CleanupThread
from escrowmq.database.statements import SqlMarkers
from escrowmq.database.transaction import (
    MessageScope,
    TransactionMessages,
    joined_end_steps,
    run_steps,
    transaction_steps,
)
from escrowmq.django.connection import AliasConnection
from escrowmq.errors import ConfigError
from escrowmq.message.transaction import Verdict

M = TypeVar("M", bound=TransactionMessages)


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
        self._database_times: dict[str, DatabaseTime] = {}  # by alias
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
        tx, group = self._new_messages(using, TransactionMessages)
        ops = _AtomicOps(self, tx, using, group)
        tx.prepare_send = ops.prepare_send
        steps = transaction_steps(tx, is_nested=ops.is_nested)
        run_steps(steps, ops)
        try:
            yield tx
        except BaseException as error:
            run_steps(steps, ops, error)
        else:
            run_steps(steps, ops)

    def join(self, using: str = DEFAULT_DB_ALIAS) -> TransactionMessages:
        """Return what sends messages with the atomic block that runs, for code that has none.

            with transaction.atomic():                     # or ATOMIC_REQUESTS
                ...
                escrow.join().send(Message("transfers", payload))

        The messages are committed when the outermost atomic block is, and rolled back with the
        innermost one in which they were sent. A message that cannot be sent makes that one roll
        back, even if its error is caught. Each further call in the same transaction returns the
        same object. Joining executes nothing; the first message inserts the marker.

        Raises TransactionManagementError outside of an atomic block, and ConfigError for invalid
        settings.
        """
        connection = connections[using]
        if not connection.in_atomic_block:
            raise transaction.TransactionManagementError(
                "escrow.join() needs an atomic block; use it inside transaction.atomic(), or "
                "escrow.atomic() instead"
            )
        # The hooks that Django still has are those of this transaction. The last one is that of the
        # innermost block of ours, if one runs.
        for _, hook, *_ in reversed(connection.run_on_commit):
            ops = getattr(hook, "__self__", None)
            if isinstance(ops, _AtomicOps | _JoinedOps) and ops.escrow is self and ops.tx.is_open:
                return ops.tx
        tx, group = self._new_messages(using, _JoinedMessages)
        tx.using = using
        tx.prepare_send = _JoinedOps(self, tx, using, group).prepare_send
        return tx

    def _new_messages(self, using: str, messages: type[M]) -> tuple[M, str]:
        """Return what sends the messages of a new transaction, and the group. Raises ConfigError"""
        producer = self._started_producer()
        escrow_settings = EscrowSettings.load()
        if using not in escrow_settings.databases:
            raise ConfigError(f"add {using!r} to settings.ESCROWMQ['databases'] and migrate it")
        database = "" if using == DEFAULT_DB_ALIAS else using
        tx = messages(
            producer.transaction(id=new_transaction_id(database)),
            begin_scope=lambda scope_id: producer.transaction(id=scope_id),
        )
        tx.began_ms = self._now_ms(using)
        return tx, escrow_settings.group

    def purge(self) -> int:
        """Delete markers older than `retention_ms` and return how many. Done once an hour."""
        escrow_settings = EscrowSettings.load()
        return sum(
            statements.purge_older(
                AliasConnection(alias),
                MARKER_TABLE,
                escrow_settings.retention_ms,
                self._database_time(alias),
            )
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
        escrow_settings = EscrowSettings.load()
        purged_from_ms = began_ms(message) + escrow_settings.retention_ms
        try:
            return statements.read_or_tombstone(
                AliasConnection(using),
                transaction_id,
                group=escrow_settings.group,
                may_be_purged=lambda now_ms: now_ms >= purged_from_ms,
            )
        finally:
            connections[using].close()  # the connection belongs to this thread

    def _database_time(self, alias: str) -> DatabaseTime:
        return self._database_times.setdefault(alias, DatabaseTime(self._clock))

    def _now_ms(self, alias: str) -> int:
        """Return the time of a database, which is asked only once."""
        database_time = self._database_time(alias)
        now_ms = database_time.now_ms()
        if now_ms is None:
            now_ms = database_time.observe(statements.now_ms(AliasConnection(alias)))
        return now_ms


class _AtomicOps:
    """The steps of one transaction in an atomic block.

    The messages are ended by an on_commit hook, because a nested block is committed only with the
    outermost one, and because Django calls hooks in order: those of the application, registered
    later, find that the messages are on their way.
    """

    def __init__(self, escrow: Escrow, tx: TransactionMessages, using: str, group: str) -> None:
        self.escrow = escrow
        self.tx = tx
        self._using = using
        self._group = group
        self._connection = AliasConnection(using)
        self._markers = SqlMarkers(self._connection, group)
        self._atomic = transaction.atomic(using=using)
        self._has_exited = False
        self._outer_savepoints = 0
        connection = connections[using]
        self.is_nested = connection.in_atomic_block or not connection.get_autocommit()

    def begin(self) -> None:
        self._atomic.__enter__()
        self._outer_savepoints = len(connections[self._using].savepoint_ids)

    def insert_marker(self) -> None:
        insert_main_marker(self.tx, self._markers)
        transaction.on_commit(self._after_commit, using=self._using)

    def prepare_send(self) -> MessageScope:
        connection = connections[self._using]
        require_current(connection.in_atomic_block)
        savepoint = _innermost_savepoint(self._using, self._outer_savepoints)
        return announce_message(self.tx, savepoint, self._markers)

    def flush(self) -> None:
        connection = connections[self._using]
        require_current(connection.in_atomic_block)
        if connection.needs_rollback:
            return  # set_rollback(True): the block is rolled back, and no statement is allowed
        finish_markers(self.tx, self._markers)

    def commit(self) -> Verdict | None:
        self._has_exited = True
        self._atomic.__exit__(None, None, None)
        if self.is_nested or self.tx.outcome is not None:
            return None  # the hook ends the messages, or has done so
        return Verdict.ROLLBACK  # set_rollback(True): rolled back without an error

    def roll_back(self, error: BaseException) -> str:
        if not self._has_exited:
            self._has_exited = True
            self._atomic.__exit__(type(error), error, error.__traceback__)
        if self.tx.outcome is None and connections[self._using].needs_rollback:
            return "the block around it has to roll back"
        return ""

    def read_marker(self, marker_id: str, keep_tombstone: bool) -> Verdict:
        connection = connections[self._using]
        if connection.in_atomic_block or not connection.get_autocommit():
            # The savepoint was rolled back, and the marker with it. If it is there all the same,
            # the outer transaction decides.
            is_there = bool(self._markers.read_message_counts([marker_id]))
            return Verdict.UNKNOWN if is_there else Verdict.ROLLBACK
        if keep_tombstone:
            connection.close()  # its state is unknown after a failed commit
        else:
            connection.close_if_unusable_or_obsolete()
        return statements.read_or_tombstone(
            self._connection, marker_id, group=self._group, keep_tombstone=keep_tombstone
        )

    def release_connection(self) -> None:
        pass  # Django keeps a connection for each thread

    def end(self) -> None:
        self.tx.end(self.tx.verdict)

    def _after_commit(self) -> None:
        """End the messages: Django's hook.

        PostgreSQL answers the COMMIT of a transaction that failed with a rollback and no error, and
        Django calls the hooks all the same. A nested block was not the last to use the transaction,
        so its markers are read first.
        """
        tx = self.tx
        tx.set_verdicts(Verdict.COMMIT)
        if self.is_nested and tx.halves:
            committed = self._markers.read_message_counts([scope.id for scope in tx.scopes])
            for scope in tx.scopes:
                if scope.verdict is Verdict.COMMIT and scope.id not in committed:
                    scope.verdict = Verdict.UNKNOWN
        self.end()


class _JoinedMessages(TransactionMessages):
    """Sends the messages of an atomic block that somebody else has begun."""

    using = DEFAULT_DB_ALIAS

    def send(self, message: Message) -> SendResult:
        try:
            return super().send(message)
        except BaseException:
            # Django has no hook before the commit that could refuse it.
            if connections[self.using].in_atomic_block:
                transaction.set_rollback(True, using=self.using)
            raise


class _JoinedOps:
    """The messages of an atomic block that somebody else has begun.

    The first message of each savepoint registers the hook again, because Django drops the hooks of
    a savepoint that is rolled back. The first hook that is called ends all messages.
    """

    def __init__(self, escrow: Escrow, tx: TransactionMessages, using: str, group: str) -> None:
        self.tx = tx
        self.escrow = escrow
        self._using = using
        self._group = group
        self._connection = AliasConnection(using)
        self._markers = SqlMarkers(self._connection, group)
        transaction.on_commit(self.after_commit, using=using)

    def prepare_send(self) -> MessageScope:
        require_current(connections[self._using].in_atomic_block)
        savepoint = _innermost_savepoint(self._using, 0)
        scope = announce_message(self.tx, savepoint, self._markers)
        if scope.message_count == 1:
            transaction.on_commit(self.after_commit, using=self._using)
        return scope

    def after_commit(self) -> None:
        """End the messages: Django's hook. The markers say what has been committed."""
        if self.tx.outcome is None:
            run_steps(joined_end_steps(self.tx, is_committed=False, keep_tombstones=False), self)

    def read_marker(self, marker_id: str, keep_tombstone: bool) -> Verdict:
        if self._markers.read_message_counts([marker_id]):
            return Verdict.COMMIT
        return statements.read_or_tombstone(
            self._connection, marker_id, group=self._group, keep_tombstone=keep_tombstone
        )

    def end(self) -> None:
        self.tx.end(self.tx.verdict)


def _innermost_savepoint(using: str, outer_savepoints: int) -> str | None:
    """Return the savepoint of the innermost atomic block; None if that is an outer block."""
    inner = connections[using].savepoint_ids[outer_savepoints:]
    return next((name for name in reversed(inner) if name is not None), None)


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
