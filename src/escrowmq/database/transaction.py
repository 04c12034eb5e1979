"""A database transaction with messages: the steps in their order, for all bindings.

`transaction_steps` is a generator that yields one step after the other and is sent the result of
each. It contains the order and the whole error handling once. A binding has an object that
performs the steps, its ops; `run_steps` drives the generator with blocking ops, `run_steps_async`
with asyncio ones. Neither knows what comes next, and the generator does not know what waits:

    transaction_steps()  ──step──>  run_steps()  ──method──>  ops: SQLAlchemy, asyncio, Django
                         <─result─               <──result──
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol

from escrowmq import blocking
from escrowmq.client.messages import Message, ReceivedMessage, SendResult
from escrowmq.client.producer import transaction as client
from escrowmq.client.producer.transaction import TransactionOutcome, describe_error
from escrowmq.clock import Clock, SystemClock
from escrowmq.database.marker import HOUR_MS, PURGE_BATCH_ROWS, check_retention_ms
from escrowmq.errors import (
    CommitUnknown,
    ConfigError,
    Rollback,
    TransactionConflict,
    TransactionMessageFailed,
)
from escrowmq.message.transaction import Verdict

log = logging.getLogger(__name__)

LEFT_TO_CHECK_BACK: Final = "left to check-back"

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
    """Write what is pending and the number of messages: everything that can still fail."""

    message_count: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Commit. The result is the verdict for the messages, or None if it is not decided here."""


@dataclass(frozen=True, slots=True)
class RollBack:
    """Roll back because of an error. The result is why this is uncertain, or an empty text."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class ReadMarker:
    """Ask the marker, on another connection, how the database transaction ended: a verdict."""


@dataclass(frozen=True, slots=True)
class ReleaseConnection:
    """Return the connection to its pool, so that it is not held while the broker responds."""


@dataclass(frozen=True, slots=True)
class End:
    """Tell the broker the verdict."""

    verdict: Verdict


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
        tx.raise_if_send_failed()
        yield Flush(len(tx.halves))
    except BaseException as error:
        yield from _roll_back(tx, error)
        if isinstance(error, Rollback):
            return
        raise
    try:
        verdict: Verdict | None = yield Commit()
    except Exception as error:
        if tx.outcome is not None:
            raise  # the commit succeeded and has ended the messages; something after it failed
        if is_nested:
            yield from _roll_back(tx, error)
            raise
        verdict = yield from _resolve_failed_commit(tx, error)
        if verdict is Verdict.ROLLBACK:
            yield End(Verdict.ROLLBACK)
            raise
    if verdict is not None:
        yield ReleaseConnection()
        yield End(verdict)


def _roll_back(tx: BaseTransactionMessages, error: BaseException) -> Steps:
    """Roll back. The broker is told only if it is certain that the marker is not there and never
    will be; otherwise a check finds out."""
    tx.remark = describe_error(error)
    try:
        uncertain: str = yield RollBack(error)
    except Exception as failure:
        log.warning("rollback failed transaction=%s: %s", tx.id, failure)
        uncertain = f"the database did not confirm the rollback: {failure}"
    if uncertain:
        tx.leave_to_check_back(uncertain)
    else:
        yield End(Verdict.ROLLBACK)


def _resolve_failed_commit(
    tx: BaseTransactionMessages, error: Exception
) -> Generator[Step, Any, Verdict]:
    """Find out what a commit that raised an error did: the marker knows.

    The error may have been raised before or after the database committed, for example because the
    connection broke. Raises CommitUnknown if the marker cannot be read either.
    """
    tx.remark = describe_error(error)
    with contextlib.suppress(Exception):
        yield RollBack(error)
    try:
        verdict: Verdict = yield ReadMarker()
    except Exception as failure:
        log.warning("cannot read the marker transaction=%s: %s", tx.id, failure)
        verdict = Verdict.UNKNOWN
    if verdict is Verdict.UNKNOWN:
        tx.leave_to_check_back(str(error))
        raise CommitUnknown(
            f"the database did not say whether transaction {tx.id} has committed; "
            "check-back finds out"
        ) from error
    if verdict is Verdict.COMMIT:
        log.warning("commit raised an error, but the marker is committed transaction=%s", tx.id)
    return verdict


# --- drivers -------------------------------------------------------------------------------------


class TransactionOps(Protocol):
    """Performs the steps of a blocking binding. Each method is the step of the same name."""

    def begin(self) -> None: ...
    def insert_marker(self) -> None: ...
    def flush(self, message_count: int) -> None: ...
    def commit(self) -> Verdict | None: ...
    def roll_back(self, error: BaseException) -> str: ...
    def read_marker(self) -> Verdict: ...
    def release_connection(self) -> None: ...
    def end(self, verdict: Verdict) -> None: ...


class AsyncTransactionOps(Protocol):
    """Performs the steps of an asyncio binding."""

    async def begin(self) -> None: ...
    async def insert_marker(self) -> None: ...
    async def flush(self, message_count: int) -> None: ...
    async def commit(self) -> Verdict | None: ...
    async def roll_back(self, error: BaseException) -> str: ...
    async def read_marker(self) -> Verdict: ...
    async def release_connection(self) -> None: ...
    async def end(self, verdict: Verdict) -> None: ...


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
        case Flush(message_count):
            return ops.flush(message_count)
        case Commit():
            return ops.commit()
        case RollBack(error):
            return ops.roll_back(error)
        case ReadMarker():
            return ops.read_marker()
        case ReleaseConnection():
            return ops.release_connection()
        case End(verdict):
            return ops.end(verdict)
        case Work():
            raise AssertionError("the application performs its work")


# --- messages of a transaction -------------------------------------------------------------------


class BaseTransactionMessages:
    """What TransactionMessages and AsyncTransactionMessages have in common.

    `id` is the id of the transaction and of its marker. `outcome` is None until the end.
    """

    def __init__(self, inner: blocking.Transaction | client.Transaction) -> None:
        self.id = inner.id
        self.outcome: TransactionOutcome | None = None
        self.remark = ""  # why it is rolled back, for the operators of the broker
        self._client_transaction = inner
        self._failure: BaseException | None = None

    @property
    def halves(self) -> Sequence[SendResult]:
        """The messages that are parked so far."""
        return self._client_transaction.halves

    def raise_if_send_failed(self) -> None:
        """Raise TransactionMessageFailed if a send failed and the block caught its error.

        Committing would lose the message, so the transaction can only be rolled back.
        """
        if self._failure is not None:
            raise TransactionMessageFailed(
                "a message of this transaction could not be sent, so the database is rolled back; "
                "let the error of send() leave the block"
            ) from self._failure

    def leave_to_check_back(self, reason: str) -> None:
        """End without telling the broker. It will check, and the marker decides."""
        self.outcome = TransactionOutcome(Verdict.UNKNOWN, False, f"{LEFT_TO_CHECK_BACK}: {reason}")

    def _record_no_messages(self, verdict: Verdict) -> None:
        self.outcome = TransactionOutcome(verdict, True, "no messages")

    def _record_end(self, verdict: Verdict, outcome: TransactionOutcome) -> None:
        if not outcome.acknowledged:
            outcome = TransactionOutcome(verdict, False, f"{LEFT_TO_CHECK_BACK}: {outcome.detail}")
        self.outcome = outcome

    def _record_end_failure(self, verdict: Verdict, error: Exception) -> None:
        # The database has decided already, and no error of the broker can change that. Raising it
        # would make the caller believe that its work failed.
        self.outcome = TransactionOutcome(verdict, False, f"{LEFT_TO_CHECK_BACK}: {error}")
        if isinstance(error, TransactionConflict):
            log.error(
                "transaction=%s ended as %s in the database, but an operator decided otherwise: %s",
                self.id,
                verdict.name,
                error,
            )
        else:
            log.warning("end failed, %s transaction=%s: %s", LEFT_TO_CHECK_BACK, self.id, error)


class TransactionMessages(BaseTransactionMessages):
    """Sends the messages of one database transaction. The end of the block decides them all."""

    def __init__(self, inner: blocking.Transaction) -> None:
        super().__init__(inner)
        self._inner = inner

    def send(self, message: Message) -> SendResult:
        """Park a message, which is delivered if and only if the database commits.

        Raises what `producer.send` raises. The transaction can then only be rolled back, even if
        the block catches the error.
        """
        self.raise_if_send_failed()
        try:
            return self._inner.send(message)
        except BaseException as error:
            self._failure = error
            raise

    def end(self, verdict: Verdict) -> None:
        """Tell the broker what the database has decided. Called by the binding.

        Raises nothing: if the broker does not respond, it will check.
        """
        if not self.halves:
            self._record_no_messages(verdict)
            return
        try:
            self._record_end(verdict, self._inner.end(verdict, remark=self.remark))
        except Exception as error:
            self._record_end_failure(verdict, error)


class AsyncTransactionMessages(BaseTransactionMessages):
    """TransactionMessages for asyncio."""

    def __init__(self, inner: client.Transaction) -> None:
        super().__init__(inner)
        self._inner = inner

    async def send(self, message: Message) -> SendResult:
        """Park a message; see `TransactionMessages.send`."""
        self.raise_if_send_failed()
        try:
            return await self._inner.send(message)
        except BaseException as error:
            self._failure = error
            raise

    async def end(self, verdict: Verdict) -> None:
        """Tell the broker what the database has decided; see `TransactionMessages.end`."""
        if not self.halves:
            self._record_no_messages(verdict)
            return
        try:
            self._record_end(verdict, await self._inner.end(verdict, remark=self.remark))
        except Exception as error:
            self._record_end_failure(verdict, error)


# --- retention and clean-up ----------------------------------------------------------------------

CLEANUP_INTERVAL_S: Final = 10.0
ACKNOWLEDGED_MAX: Final = 100_000  # ids that wait to be purged; beyond that, rows go by age


class CleanupQueue:
    """Markers to delete, and the time of the next deletion by age."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_cleanup_ms = clock.now_ms()  # none at the start, when there is enough to do
        self._acknowledged: deque[str] = deque(maxlen=ACKNOWLEDGED_MAX)

    def add_acknowledged(self, transaction_id: str) -> None:
        self._acknowledged.append(transaction_id)

    def take_acknowledged(self) -> list[str]:
        """Return up to PURGE_BATCH_ROWS ids whose markers may be deleted now."""
        count = min(len(self._acknowledged), PURGE_BATCH_ROWS)
        return [self._acknowledged.popleft() for _ in range(count)]

    def is_cleanup_due(self) -> bool:
        """Return True once an hour."""
        if self._clock.now_ms() - self._last_cleanup_ms < HOUR_MS:
            return False
        self._last_cleanup_ms = self._clock.now_ms()
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
            except Exception:
                log.exception("clean-up failed, will retry")


class RowRetention:
    """The part of every Escrow and Inbox that decides which rows may be deleted."""

    def __init__(self, *, group: str, retention_ms: int, clock: Clock | None) -> None:
        self._group = group
        self._retention_ms = retention_ms
        self._clock = clock or SystemClock()
        self._cleanup_queue = CleanupQueue(self._clock)

    def _purge_before_ms(self, older_than_ms: int | None) -> int:
        age_ms = self._retention_ms if older_than_ms is None else older_than_ms
        return self._clock.now_ms() - age_ms


class MarkerRetention(RowRetention):
    """The part of Escrow and AsyncEscrow that decides which markers may be deleted."""

    def __init__(
        self, *, group: str, retention_ms: int, purge_acknowledged: bool, clock: Clock | None
    ) -> None:
        super().__init__(group=group, retention_ms=check_retention_ms(retention_ms), clock=clock)
        self._purges_acknowledged = purge_acknowledged

    def _transaction_committed(self, tx: BaseTransactionMessages) -> None:
        """Queue the marker for deletion if the broker has acknowledged the end."""
        if self._purges_acknowledged and tx.outcome is not None and tx.outcome.acknowledged:
            self._cleanup_queue.add_acknowledged(tx.id)

    def _may_be_purged(self, message: ReceivedMessage) -> bool:
        """Return whether the marker of a message's transaction may have been deleted by age."""
        return self._clock.now_ms() - message.born_ms >= self._retention_ms

    def _purge_before_ms(self, older_than_ms: int | None) -> int:
        if older_than_ms is not None and older_than_ms < self._retention_ms:
            raise ConfigError(
                f"older_than_ms={older_than_ms} is less than retention_ms={self._retention_ms}; "
                "checkers rely on markers being kept for that long"
            )
        return super()._purge_before_ms(older_than_ms)


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
            except Exception:
                log.exception("effect failed, will retry message=%s", message.message_id)
                consumer.retry_later(message)
            if self._cleanup_queue.is_cleanup_due():
                self.purge()

    def purge(self, *, older_than_ms: int | None = None) -> int:
        """Delete rows older than `retention_ms`, or another age, and return how many."""
        raise NotImplementedError

    def _before_message(self) -> None:
        """Prepare the binding for the next message."""
