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
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from escrowmq import blocking
from escrowmq.client.messages import Message, SendResult
from escrowmq.client.mistakes import UnawaitedCalls
from escrowmq.client.producer import transaction as client
from escrowmq.client.producer.transaction import TransactionOutcome, describe_error
from escrowmq.errors import (
    CommitUnknown,
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
# How often the markers of a joined transaction are asked. Each attempt waits for a transaction that
# is not over yet, see `short_lock_wait`.
JOINED_ASK_ATTEMPTS: Final = 5
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


def transaction_steps(
    tx: BaseTransactionMessages, *, is_nested: bool = False, has_begun: bool = False
) -> Steps:
    """Yield the steps of one database transaction with messages.

    `is_nested`: it is a savepoint of another transaction, which decides it later. `has_begun`: the
    application has begun it, and the first message inserts the marker.

    Raises what the block raises, except Rollback, and CommitUnknown if the database does not say
    whether it has committed.
    """
    if not has_begun:
        yield Begin()
    try:
        if not has_begun:
            # The marker comes first. If a checker was faster and has inserted a tombstone, this
            # fails before the application has done anything.
            yield InsertMarker()
        yield Work()
        tx.refuse_sends()
        tx.raise_if_send_failed()
        tx.raise_if_unawaited()
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


def joined_end_steps(
    tx: BaseTransactionMessages, *, is_committed: bool, keep_tombstones: bool
) -> Steps:
    """Yield the steps that end the messages of a joined transaction, after it is over.

    `is_committed`: the database has said so, and the markers were checked before the commit.
    Otherwise the markers are asked.
    """
    tx.refuse_sends()
    try:
        if is_committed:
            tx.set_verdicts(Verdict.COMMIT)
        else:
            for _ in range(JOINED_ASK_ATTEMPTS):
                yield from _ask_markers(tx, keep_tombstone=keep_tombstones)
                if not tx.is_undecided:
                    break
        yield End()
    except BaseException:
        if tx.outcome is None:
            tx.leave_to_check_back("the end was interrupted")
        raise


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


class EndOps(Protocol):
    """Performs the steps of `joined_end_steps` for a blocking binding."""

    def read_marker(self, marker_id: str, keep_tombstone: bool) -> Verdict: ...
    def end(self) -> None: ...


class AsyncEndOps(Protocol):
    """Performs the steps of `joined_end_steps` for an asyncio binding."""

    async def read_marker(self, marker_id: str, keep_tombstone: bool) -> Verdict: ...
    async def end(self) -> None: ...


class TransactionOps(EndOps, Protocol):
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
    def release_connection(self) -> None: ...


class AsyncTransactionOps(AsyncEndOps, Protocol):
    """Performs the steps of an asyncio binding."""

    async def begin(self) -> None: ...
    async def insert_marker(self) -> None: ...
    async def prepare_send(self) -> MessageScope: ...
    async def flush(self) -> None: ...
    async def commit(self) -> Verdict | None: ...
    async def roll_back(self, error: BaseException) -> str: ...
    async def release_connection(self) -> None: ...


def run_steps(steps: Steps, ops: EndOps, error: BaseException | None = None) -> None:
    """Perform steps up to the application's work, or from there to the end.

    `ops` is a TransactionOps for `transaction_steps`.
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
    steps: Steps, ops: AsyncEndOps, error: BaseException | None = None
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


def _perform(step: Step, ops: Any) -> Any:
    """Call the method of a step: a result, or an awaitable of one.

    `ops` has a method for each step that its generator yields, see the protocols above.
    """
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
    have another marker, see `scopes`.
    """

    def __init__(self, inner: ClientTransaction, begin_scope: BeginScope | None = None) -> None:
        self.id = inner.id
        self._outcome: TransactionOutcome | None = None
        self.remark = ""  # why it is rolled back, for the operators of the broker
        self.scopes = [MessageScope(inner)]
        self.began_ms: int | None = None  # by the clock of the database
        self._begin_scope = begin_scope
        self._failure: BaseException | None = None
        self._refuses_sends = False

    @property
    def outcome(self) -> TransactionOutcome | None:
        """How the transaction ended; None until the end."""
        return self._outcome

    @outcome.setter
    def outcome(self, outcome: TransactionOutcome) -> None:
        self._outcome = outcome

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
    def is_open(self) -> bool:
        """Whether messages can be sent, as far as we know."""
        return not self._refuses_sends and self._outcome is None

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

    def raise_if_unawaited(self) -> None:
        """Raise LocalProtocolError if the block forgot to await a send: with asyncio only."""

    def set_verdicts(self, verdict: Verdict) -> None:
        """Set what the database has decided: one verdict for all scopes that still exist."""
        for scope in self.scopes:
            scope.verdict = Verdict.ROLLBACK if scope.is_rolled_back else verdict

    def leave_to_check_back(self, reason: str) -> None:
        """End without telling the broker. It will check, and the marker decides."""
        self.outcome = TransactionOutcome(Verdict.UNKNOWN, False, f"{LEFT_TO_CHECK_BACK}: {reason}")

    def _raise_if_ended(self) -> None:
        if not self.is_open:
            state = "open" if self._outcome is None else self._outcome.state
            raise TransactionConflict("this transaction has ended; send in the next one", state)

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

    async def _end_scopes(self, verdict: Verdict) -> None:
        """Tell the broker the verdict of each scope, and record the outcome of `verdict`."""
        outcomes = [await self._end_scope(scope) for scope in self.scopes if scope.halves]
        self._record_outcome(verdict, outcomes)

    async def _end_scope(self, scope: MessageScope) -> TransactionOutcome:
        if scope.verdict is Verdict.UNKNOWN:
            return _UNASKED
        inner = scope.client_transaction
        if isinstance(inner, blocking.Transaction):
            inner = inner.asyncio_transaction
        try:
            outcome = await inner.end(scope.verdict, remark=self.remark)
        except Exception as error:
            return self._end_failure(scope, error)
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
        self._ending: Future[None] | None = None
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
        self.raise_if_send_failed()
        try:
            with self._prepare_lock:
                scope = self.main_scope if self.prepare_send is None else self.prepare_send()
            inner = scope.client_transaction
            assert isinstance(inner, blocking.Transaction)
            return inner.send(self._stamp(message))
        except BaseException as error:
            self._failure = error
            raise

    @property
    def outcome(self) -> TransactionOutcome | None:
        """How the transaction ended; None until the end.

        If the messages of a joined transaction are just being ended, wait for the brokers.
        """
        if self._ending is not None:
            self._ending.result()
        return self._outcome

    @outcome.setter
    def outcome(self, outcome: TransactionOutcome) -> None:
        self._outcome = outcome

    def end(self, verdict: Verdict) -> None:
        """Tell the broker what the database has decided. Called by the binding.

        `verdict` is that of the transaction; savepoints that were rolled back have their own.
        Raises nothing: if the broker does not respond, it will check.
        """
        blocking.run(self._end_scopes(verdict))

    def start_end(self, verdict: Verdict) -> Future[None]:
        """Do the same without waiting for the broker; `outcome` waits."""
        self._ending = blocking.start(self._end_scopes(verdict))
        return self._ending


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
        self._calls = UnawaitedCalls()

    def send(self, message: Message) -> Coroutine[Any, Any, SendResult]:
        """Park a message; see `TransactionMessages.send`.

        If it was not awaited, the end of the block raises LocalProtocolError and rolls back.
        """
        return self._calls.watch(self._send(message))

    def raise_if_unawaited(self) -> None:
        """Raise LocalProtocolError if the block forgot to await a send."""
        self._calls.raise_if_any("tx.send()")

    async def _send(self, message: Message) -> SendResult:
        self._raise_if_ended()
        self.raise_if_send_failed()
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
        await self._end_scopes(verdict)
