"""A database transaction with messages: the steps in their order, for all bindings.

`transaction_steps` is a generator that yields one step after the other and is sent the result of
each. It contains the order and the whole error handling once. A binding has an object that
performs the steps, its ops; `run_steps` drives the generator with blocking ops, `run_steps_async`
with asyncio ones. Neither knows what comes next, and the generator does not know what waits:

    transaction_steps()  ──step──>  run_steps()  ──method──>  ops: SQLAlchemy, asyncio, Django
                         <─result─               <──result──
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final, Protocol

from escrowmq import blocking
from escrowmq.client.messages import Message, ReceivedMessage, SendResult
from escrowmq.client.producer import transaction as client
from escrowmq.client.producer.transaction import TransactionOutcome, describe_error
from escrowmq.clock import Clock, SystemClock
from escrowmq.database.marker import (
    HOUR_MS,
    PURGE_BATCH_ROWS,
    DatabaseTime,
    check_retention_ms,
)
from escrowmq.errors import (
    CommitUnknown,
    ConfigError,
    Rollback,
    SessionEndedInBlock,
    TransactionConflict,
    TransactionMessageFailed,
)
from escrowmq.message.names import TX_TIME
from escrowmq.message.transaction import Verdict

log = logging.getLogger(__name__)

LEFT_TO_CHECK_BACK: Final = "left to check-back"
SESSION_ENDED: Final = (
    "the block ended its database transaction, or rolled back a savepoint that was set in plain "
    "SQL; leave the end to the block, and use begin_nested() or atomic() for savepoints"
)
COMMITTED_BEFORE_ERROR: Final = (
    "the database had committed before the block failed, so the messages are delivered"
)

# --- steps ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin a database transaction."""


@dataclass(frozen=True, slots=True)
class InsertMarker:
    """Insert the marker, as the first statement."""


@dataclass(frozen=True, slots=True)
class Work:
    """Let the application work. The generator is resumed, or gets its exception, afterwards."""


@dataclass(frozen=True, slots=True)
class Flush:
    """Write what is pending and the numbers of messages: everything that can still fail.

    Raises SessionEndedInBlock if the database transaction is not the one of the marker any more.
    """


@dataclass(frozen=True, slots=True)
class Commit:
    """Commit. The result is the verdict for the messages, or None if it is not decided here."""


@dataclass(frozen=True, slots=True)
class RollBack:
    """Roll back because of an error.

    The result is empty, or says why nothing is decided yet: an outer block has to roll back too.
    """

    error: BaseException


@dataclass(frozen=True, slots=True)
class ReadMarker:
    """Ask a marker, in a new transaction, how the database transaction ended: a verdict.

    `keep_tombstone`: if there is no marker, leave a tombstone in its place.
    """

    id: str
    keep_tombstone: bool


@dataclass(frozen=True, slots=True)
class ReleaseConnection:
    """Return the connection to its pool, so that it is not held while the broker responds."""


@dataclass(frozen=True, slots=True)
class End:
    """Tell the broker the verdicts of all scopes."""


Step = (
    Begin | InsertMarker | Work | Flush | Commit | RollBack | ReadMarker | ReleaseConnection | End
)
Steps = Generator[Step, Any, None]


def transaction_steps(tx: BaseTransactionMessages, *, is_nested: bool = False) -> Steps:
    """Yield the steps of one database transaction with messages.

    `is_nested`: it is a savepoint of another transaction, which decides it later.

    Raises what the block raises, except Rollback, and CommitUnknown if the database does not say
    whether it has committed.
    """
    yield Begin()
    try:
        # The marker comes first. If a checker was faster and has inserted a tombstone, this
        # fails before the application has done anything.
        yield InsertMarker()
        yield Work()
        tx.refuse_sends()
        tx.raise_if_send_failed()
        yield Flush()
    except BaseException as error:
        tx.refuse_sends()
        yield from _undo(tx, error)
        if not isinstance(error, Rollback):
            raise
        if tx.is_committed:
            # Quietly ending the block would tell the caller that nothing had happened.
            raise SessionEndedInBlock(COMMITTED_BEFORE_ERROR) from error
        return
    try:
        verdict: Verdict | None = yield Commit()
    except Exception as error:
        if tx.outcome is not None:
            raise  # the commit succeeded and has ended the messages; something after it failed
        if is_nested:
            yield from _undo(tx, error)
            raise
        yield from _resolve_failed_commit(tx, error)
        return
    except BaseException:
        # KeyboardInterrupt or CancelledError: the caller wants to leave, so nothing more is asked.
        if tx.outcome is None:
            tx.leave_to_check_back("the commit was interrupted")
        raise
    if verdict is not None:
        tx.set_verdicts(verdict)
        yield ReleaseConnection()
        yield End()


def _undo(tx: BaseTransactionMessages, error: BaseException) -> Steps:
    """Roll back, and tell the broker what the markers say.

    The database may have committed although the block failed: MySQL does so before it creates a
    table, and the block may have done it. So the markers are asked, even if the rollback succeeded.
    """
    tx.remark = describe_error(error)
    try:
        undecided = ""
        try:
            undecided = yield RollBack(error)
        except Exception as failure:
            log.warning("rollback failed transaction=%s: %s", tx.id, failure)
        if undecided:
            tx.leave_to_check_back(undecided)
            return
        yield from _ask_markers(tx, keep_tombstone=False)
        if tx.is_committed:
            log.error("%s transaction=%s: %r", COMMITTED_BEFORE_ERROR, tx.id, error)
            error.add_note(f"{COMMITTED_BEFORE_ERROR} (transaction {tx.id})")
        yield End()
    except BaseException:
        if tx.outcome is None:
            tx.leave_to_check_back("the rollback was interrupted")
        raise


def _resolve_failed_commit(tx: BaseTransactionMessages, error: Exception) -> Steps:
    """Find out what a commit that raised an error did: the markers know.

    The error may have been raised before or after the database committed, for example because the
    connection broke. Raises it if the database rolled back, and CommitUnknown if the markers cannot
    be read.
    """
    tx.remark = describe_error(error)
    with contextlib.suppress(Exception):
        yield RollBack(error)
    if not tx.halves:
        # No marker was left, so it cannot be asked. The error of the database is all that is known.
        tx.leave_to_check_back(str(error))
        raise error
    yield from _ask_markers(tx, keep_tombstone=True)
    yield End()
    if tx.is_committed:
        log.warning("commit raised an error, but the marker is committed transaction=%s", tx.id)
        return
    if tx.is_undecided:
        raise CommitUnknown(
            f"the database did not say whether transaction {tx.id} has committed; "
            "check-back finds out"
        ) from error
    raise error


def _ask_markers(tx: BaseTransactionMessages, *, keep_tombstone: bool) -> Steps:
    """Set the verdict of each scope to what its marker says."""
    for scope in tx.scopes:
        if not scope.halves:
            scope.verdict = Verdict.ROLLBACK
            continue
        try:
            scope.verdict = yield ReadMarker(scope.id, keep_tombstone)
        except Exception as failure:
            log.warning("cannot read the marker transaction=%s: %s", scope.id, failure)
            scope.verdict = Verdict.UNKNOWN


# --- drivers -------------------------------------------------------------------------------------


class TransactionOps(Protocol):
    """Performs the steps of a blocking binding. Each method is the step of the same name.

    `prepare_send` is no step: `TransactionMessages.send` calls it before each message. It returns
    the scope of the current savepoint, with its marker inserted, and counts the message there.
    Raises SessionEndedInBlock if the database transaction is not the one of the scope's marker.
    """

    def begin(self) -> None: ...
    def insert_marker(self) -> None: ...
    def prepare_send(self) -> MessageScope: ...
    def flush(self) -> None: ...
    def commit(self) -> Verdict | None: ...
    def roll_back(self, error: BaseException) -> str: ...
    def read_marker(self, marker_id: str, keep_tombstone: bool) -> Verdict: ...
    def release_connection(self) -> None: ...
    def end(self) -> None: ...


class AsyncTransactionOps(Protocol):
    """Performs the steps of an asyncio binding."""

    async def begin(self) -> None: ...
    async def insert_marker(self) -> None: ...
    async def prepare_send(self) -> MessageScope: ...
    async def flush(self) -> None: ...
    async def commit(self) -> Verdict | None: ...
    async def roll_back(self, error: BaseException) -> str: ...
    async def read_marker(self, marker_id: str, keep_tombstone: bool) -> Verdict: ...
    async def release_connection(self) -> None: ...
    async def end(self) -> None: ...


def run_steps(steps: Steps, ops: TransactionOps, error: BaseException | None = None) -> None:
    """Perform steps up to the application's work, or from there to the end.

    `error` is what the application raised. Call it once before the work and once after it.
    """
    try:
        step = next(steps) if error is None else steps.throw(error)
        while not isinstance(step, Work):
            try:
                result = _perform(step, ops)
            except BaseException as failure:
                step = steps.throw(failure)
            else:
                step = steps.send(result)
    except StopIteration:
        return


async def run_steps_async(
    steps: Steps, ops: AsyncTransactionOps, error: BaseException | None = None
) -> None:
    """Do the same with asyncio ops."""
    try:
        step = next(steps) if error is None else steps.throw(error)
        while not isinstance(step, Work):
            try:
                result = await _perform(step, ops)
            except BaseException as failure:
                step = steps.throw(failure)
            else:
                step = steps.send(result)
    except StopIteration:
        return


def _perform(step: Step, ops: TransactionOps | AsyncTransactionOps) -> Any:
    """Call the method of a step: a result, or an awaitable of one."""
    match step:
        case Begin():
            return ops.begin()
        case InsertMarker():
            return ops.insert_marker()
        case Flush():
            return ops.flush()
        case Commit():
            return ops.commit()
        case RollBack(error):
            return ops.roll_back(error)
        case ReadMarker(marker_id, keep_tombstone):
            return ops.read_marker(marker_id, keep_tombstone)
        case ReleaseConnection():
            return ops.release_connection()
        case End():
            return ops.end()
        case Work():
            raise AssertionError("the application performs its work")


# --- messages of a transaction -------------------------------------------------------------------

ClientTransaction = blocking.Transaction | client.Transaction
# Begins the client's transaction of one scope, which has this id.
BeginScope = Callable[[str], ClientTransaction]


class MessageScope:
    """The messages of one marker: those of a transaction, or those sent inside one savepoint.

    `savepoint` identifies the savepoint; None outside of any. `proof` is what the binding needs to
    recognise the database transaction of the marker.
    """

    def __init__(self, inner: ClientTransaction, savepoint: object = None) -> None:
        self.id = inner.id
        self.client_transaction = inner
        self.savepoint = savepoint
        self.proof = ""
        self.message_count = 0  # announced to the database; the last one may have failed
        self.is_rolled_back = False  # with its savepoint, by the application
        self.verdict = Verdict.UNKNOWN

    @property
    def halves(self) -> Sequence[SendResult]:
        return self.client_transaction.halves


class BaseTransactionMessages:
    """What TransactionMessages and AsyncTransactionMessages have in common.

    `id` is the id of the transaction and of its marker. Messages that are sent inside a savepoint
    have another marker, see `scopes`. `outcome` is None until the end.
    """

    def __init__(self, inner: ClientTransaction, begin_scope: BeginScope | None = None) -> None:
        self.id = inner.id
        self.outcome: TransactionOutcome | None = None
        self.remark = ""  # why it is rolled back, for the operators of the broker
        self.scopes = [MessageScope(inner)]
        self.began_ms: int | None = None  # by the clock of the database
        self._begin_scope = begin_scope
        self._failure: BaseException | None = None
        self._refuses_sends = False

    @property
    def main_scope(self) -> MessageScope:
        """The scope of the messages that are sent outside of savepoints."""
        return self.scopes[0]

    @property
    def halves(self) -> Sequence[SendResult]:
        """The messages that are parked so far."""
        return [half for scope in self.scopes for half in scope.halves]

    @property
    def verdict(self) -> Verdict:
        """What the database has decided, as far as it is known. A scope that was rolled back with
        its savepoint does not count, nor does one without messages if there are others."""
        verdicts = [scope.verdict for scope in self.scopes if scope.halves]
        if Verdict.COMMIT in verdicts:
            return Verdict.COMMIT
        return verdicts[0] if verdicts else self.main_scope.verdict

    @property
    def is_committed(self) -> bool:
        """Whether the database has committed any scope with messages, as far as its marker says."""
        return any(scope.verdict is Verdict.COMMIT for scope in self.scopes if scope.halves)

    @property
    def is_undecided(self) -> bool:
        """Whether a marker could not be asked."""
        return any(scope.verdict is Verdict.UNKNOWN for scope in self.scopes if scope.halves)

    def find_scope(self, savepoint: object) -> MessageScope | None:
        """Return the scope of a savepoint; None if nothing was sent inside it yet."""
        return next((scope for scope in self.scopes if scope.savepoint == savepoint), None)

    def new_scope(self, scope_id: str, savepoint: object) -> MessageScope:
        """Return a scope for a savepoint. The binding adds it when its marker is inserted."""
        assert self._begin_scope is not None, "the binding sends nothing inside savepoints"
        return MessageScope(self._begin_scope(scope_id), savepoint)

    def compare_counts(self, counts: Mapping[str, int]) -> None:
        """Find out which savepoints were rolled back, from the numbers of messages of the markers
        that are still there. Raises SessionEndedInBlock if one was rolled back in part."""
        for scope in self.scopes[1:]:
            scope.is_rolled_back = scope.id not in counts
            if not scope.is_rolled_back and counts[scope.id] != scope.message_count:
                raise SessionEndedInBlock(SESSION_ENDED)

    def refuse_sends(self) -> None:
        """Refuse all further messages, because the block has ended."""
        self._refuses_sends = True

    def raise_if_send_failed(self) -> None:
        """Raise TransactionMessageFailed if a send failed and the block caught its error.

        Committing would lose the message, so the transaction can only be rolled back.
        """
        if self._failure is not None:
            raise TransactionMessageFailed(
                "a message of this transaction could not be sent, so the database is rolled back; "
                "let the error of send() leave the block"
            ) from self._failure

    def set_verdicts(self, verdict: Verdict) -> None:
        """Set what the database has decided: one verdict for all scopes that still exist."""
        for scope in self.scopes:
            scope.verdict = Verdict.ROLLBACK if scope.is_rolled_back else verdict

    def leave_to_check_back(self, reason: str) -> None:
        """End without telling the broker. It will check, and the marker decides."""
        self.outcome = TransactionOutcome(Verdict.UNKNOWN, False, f"{LEFT_TO_CHECK_BACK}: {reason}")

    def _raise_if_ended(self) -> None:
        if self._refuses_sends or self.outcome is not None:
            state = "open" if self.outcome is None else self.outcome.state
            raise TransactionConflict("the block of this transaction has ended", state)
        self.raise_if_send_failed()

    def _stamp(self, message: Message) -> Message:
        """Return the message with the time of its transaction, for the checker."""
        if self.began_ms is None:
            return message
        return replace(message, properties={**message.properties, TX_TIME: str(self.began_ms)})

    def _record_outcome(self, verdict: Verdict, outcomes: Sequence[TransactionOutcome]) -> None:
        """Combine the outcomes of the scopes that have messages."""
        self.outcome = TransactionOutcome(
            verdict,
            all(outcome.acknowledged for outcome in outcomes),
            "; ".join(filter(None, (outcome.detail for outcome in outcomes)))
            if outcomes
            else "no messages",
        )

    def _end_result(self, scope: MessageScope, outcome: TransactionOutcome) -> TransactionOutcome:
        if outcome.acknowledged:
            return outcome
        detail = f"{LEFT_TO_CHECK_BACK}: {outcome.detail}"
        return TransactionOutcome(scope.verdict, False, detail)

    def _end_failure(self, scope: MessageScope, error: Exception) -> TransactionOutcome:
        # The database has decided already, and no error of the broker can change that. Raising it
        # would make the caller believe that its work failed.
        if isinstance(error, TransactionConflict):
            log.error(
                "transaction=%s ended as %s in the database, but an operator decided otherwise: %s",
                scope.id,
                scope.verdict.name,
                error,
            )
        else:
            log.warning("end failed, %s transaction=%s: %s", LEFT_TO_CHECK_BACK, scope.id, error)
        return TransactionOutcome(scope.verdict, False, f"{LEFT_TO_CHECK_BACK}: {error}")


_UNASKED: Final = TransactionOutcome(
    Verdict.UNKNOWN, False, f"{LEFT_TO_CHECK_BACK}: the database could not be asked"
)


class TransactionMessages(BaseTransactionMessages):
    """Sends the messages of one database transaction. The end of the block decides them all."""

    def __init__(
        self,
        inner: blocking.Transaction,
        begin_scope: BeginScope | None = None,
        prepare_send: Callable[[], MessageScope] | None = None,
    ) -> None:
        super().__init__(inner, begin_scope)
        self.prepare_send = prepare_send  # of the binding's ops
        self._prepare_lock = threading.Lock()  # a database connection serves one thread at a time

    def send(self, message: Message) -> SendResult:
        """Park a message, which is delivered if and only if the database commits.

        A message that is sent inside a savepoint is delivered only if the savepoint is not rolled
        back. It uses the connection of the database transaction, so no other statement may run
        there at the same time.

        Raises what `producer.send` raises, SessionEndedInBlock if the block has ended its own
        database transaction, and TransactionConflict after the block. The transaction can then
        only be rolled back, even if the block catches the error.
        """
        self._raise_if_ended()
        try:
            with self._prepare_lock:
                scope = self.main_scope if self.prepare_send is None else self.prepare_send()
            inner = scope.client_transaction
            assert isinstance(inner, blocking.Transaction)
            return inner.send(self._stamp(message))
        except BaseException as error:
            self._failure = error
            raise

    def end(self, verdict: Verdict) -> None:
        """Tell the broker what the database has decided. Called by the binding.

        `verdict` is that of the transaction; savepoints that were rolled back have their own.
        Raises nothing: if the broker does not respond, it will check.
        """
        outcomes = [self._end_scope(scope) for scope in self.scopes if scope.halves]
        self._record_outcome(verdict, outcomes)

    def _end_scope(self, scope: MessageScope) -> TransactionOutcome:
        if scope.verdict is Verdict.UNKNOWN:
            return _UNASKED
        inner = scope.client_transaction
        assert isinstance(inner, blocking.Transaction)
        try:
            return self._end_result(scope, inner.end(scope.verdict, remark=self.remark))
        except Exception as error:
            return self._end_failure(scope, error)


class AsyncTransactionMessages(BaseTransactionMessages):
    """TransactionMessages for asyncio."""

    def __init__(
        self,
        inner: client.Transaction,
        begin_scope: BeginScope | None = None,
        prepare_send: Callable[[], Awaitable[MessageScope]] | None = None,
    ) -> None:
        super().__init__(inner, begin_scope)
        self.prepare_send = prepare_send  # of the binding's ops
        self._prepare_lock = asyncio.Lock()  # a database connection serves one task at a time

    async def send(self, message: Message) -> SendResult:
        """Park a message; see `TransactionMessages.send`."""
        self._raise_if_ended()
        try:
            async with self._prepare_lock:
                scope = self.main_scope if self.prepare_send is None else await self.prepare_send()
            inner = scope.client_transaction
            assert isinstance(inner, client.Transaction)
            return await inner.send(self._stamp(message))
        except BaseException as error:
            self._failure = error
            raise

    async def end(self, verdict: Verdict) -> None:
        """Tell the broker what the database has decided; see `TransactionMessages.end`."""
        outcomes = [await self._end_scope(scope) for scope in self.scopes if scope.halves]
        self._record_outcome(verdict, outcomes)

    async def _end_scope(self, scope: MessageScope) -> TransactionOutcome:
        if scope.verdict is Verdict.UNKNOWN:
            return _UNASKED
        inner = scope.client_transaction
        assert isinstance(inner, client.Transaction)
        try:
            return self._end_result(scope, await inner.end(scope.verdict, remark=self.remark))
        except Exception as error:
            return self._end_failure(scope, error)


# --- retention and clean-up ----------------------------------------------------------------------

CLEANUP_INTERVAL_S: Final = 10.0
ACKNOWLEDGED_MAX: Final = 100_000  # ids that wait to be purged; beyond that, rows go by age


class CleanupQueue:
    """Markers to delete, and the time of the next deletion by age."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_cleanup_s = clock.elapsed_s()  # none at the start, when there is enough to do
        self._acknowledged: deque[str] = deque(maxlen=ACKNOWLEDGED_MAX)

    def add_acknowledged(self, transaction_id: str) -> None:
        self._acknowledged.append(transaction_id)

    def take_acknowledged(self) -> list[str]:
        """Return up to PURGE_BATCH_ROWS ids whose markers may be deleted now."""
        count = min(len(self._acknowledged), PURGE_BATCH_ROWS)
        return [self._acknowledged.popleft() for _ in range(count)]

    def is_cleanup_due(self) -> bool:
        """Return True once an hour."""
        if self._clock.elapsed_s() - self._last_cleanup_s < HOUR_MS / 1000:
            return False
        self._last_cleanup_s = self._clock.elapsed_s()
        return True


class CleanupThread:
    """A thread that calls a function every `interval_s` until it is stopped.

    An exception is logged, and the next round tries again.
    """

    def __init__(
        self, work: Callable[[], None], *, name: str, interval_s: float = CLEANUP_INTERVAL_S
    ) -> None:
        self._work = work
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop, and wait for a round that runs."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self._work()
            except BaseException:  # nothing may end the thread without a word
                log.exception("clean-up failed, will retry")


class RowRetention:
    """The part of every Escrow and Inbox that decides which rows may be deleted.

    `clock` only measures how long something took: rows are aged by the clock of the database.
    """

    def __init__(self, *, group: str, retention_ms: int, clock: Clock | None) -> None:
        self._group = group
        self._retention_ms = retention_ms
        self._clock = clock or SystemClock()
        self._cleanup_queue = CleanupQueue(self._clock)
        self._database_time = DatabaseTime(self._clock)

    def _purge_age_ms(self, older_than_ms: int | None) -> int:
        return self._retention_ms if older_than_ms is None else older_than_ms


class MarkerRetention(RowRetention):
    """The part of Escrow and AsyncEscrow that decides which markers may be deleted."""

    def __init__(
        self, *, group: str, retention_ms: int, purge_acknowledged: bool, clock: Clock | None
    ) -> None:
        super().__init__(group=group, retention_ms=check_retention_ms(retention_ms), clock=clock)
        self._purges_acknowledged = purge_acknowledged

    def _transaction_ended(self, tx: BaseTransactionMessages) -> None:
        """Queue the markers for deletion if the broker has acknowledged that they committed."""
        if self._purges_acknowledged and tx.outcome is not None and tx.outcome.acknowledged:
            for scope in tx.scopes:
                if scope.verdict is Verdict.COMMIT:
                    self._cleanup_queue.add_acknowledged(scope.id)

    def _purge_age_ms(self, older_than_ms: int | None) -> int:
        if older_than_ms is not None and older_than_ms < self._retention_ms:
            raise ConfigError(
                f"older_than_ms={older_than_ms} is less than retention_ms={self._retention_ms}; "
                "checkers rely on markers being kept for that long"
            )
        return super()._purge_age_ms(older_than_ms)


# --- inboxes -------------------------------------------------------------------------------------

IdempotentHandler = Callable[[ReceivedMessage], bool]


class BlockingInbox(RowRetention):
    """What the inboxes of SQLAlchemy and Django share: `run`."""

    def run(
        self, consumer: blocking.Consumer, handler: IdempotentHandler, *, limit: int | None = None
    ) -> None:
        """Handle the messages of a consumer until it is closed, or `limit` messages.

        A message whose effect raises comes again later, and moves to the dead letters of the group
        in the end. Deletes old rows once an hour.
        """
        for message in islice(consumer, limit):
            self._before_message()
            try:
                handler(message)
            except Exception as error:
                log.exception("effect failed, will retry message=%s", message.message_id)
                consumer.retry_later(message, cause=error)
            self.clean_up()

    def clean_up(self) -> None:
        """Delete old rows if it is due, once an hour."""
        if self._cleanup_queue.is_cleanup_due():
            self.purge()

    def purge(self, *, older_than_ms: int | None = None) -> int:
        """Delete rows older than `retention_ms`, or another age, and return how many."""
        raise NotImplementedError

    def _before_message(self) -> None:
        """Prepare the binding for the next message."""
