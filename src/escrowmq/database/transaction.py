"""The messages of one local transaction: held by the broker until the database has decided.

The work that nobody waits for: removing rows that are done with.

What every Escrow knows about its markers: whose they are, and for how long they stay.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from escrowmq import blocking
from escrowmq.client.messages import Message, ReceivedMessage, SendResult
from escrowmq.client.producer import transaction as client
from escrowmq.client.producer.transaction import TransactionOutcome
from escrowmq.clock import Clock, SystemClock
from escrowmq.database.marker import HOUR_MS, PURGE_BATCH_ROWS, check_retention_ms
from escrowmq.errors import ConfigError, TransactionConflict, TransactionMessageFailed
from escrowmq.message.transaction import Verdict

log = logging.getLogger(__name__)

LEFT_TO_CHECK_BACK: Final = "left to check-back"


class _MessagesBase:
    """What both kinds know."""

    def __init__(self, inner: blocking.Transaction | client.Transaction) -> None:
        self.id = inner.id
        self.outcome: TransactionOutcome | None = None  # once it is decided
        self._client_transaction = inner
        self._failure: BaseException | None = None

    @property
    def halves(self) -> Sequence[SendResult]:
        return self._client_transaction.halves

    def raise_if_send_failed(self) -> None:
        """Raises NotHeld: a send has failed, and the block has gone on."""
        if self._failure is not None:
            raise TransactionMessageFailed(
                "a message of this transaction could not be sent, so the database is rolled back; "
                "let the error of send() leave the block"
            ) from self._failure

    def leave_to_check_back(self, reason: str) -> None:
        """Nothing is said to the broker: it will ask."""
        self.outcome = TransactionOutcome(Verdict.UNKNOWN, False, f"{LEFT_TO_CHECK_BACK}: {reason}")

    def _record_end(self, verdict: Verdict, outcome: TransactionOutcome) -> None:
        if not outcome.acknowledged:
            outcome = TransactionOutcome(verdict, False, f"{LEFT_TO_CHECK_BACK}: {outcome.detail}")
        self.outcome = outcome

    def _record_end_failure(self, verdict: Verdict, error: Exception) -> None:
        # The database has decided: its work is done or undone, and no error changes that.
        self.outcome = TransactionOutcome(verdict, False, f"{LEFT_TO_CHECK_BACK}: {error}")
        if isinstance(error, TransactionConflict):
            log.error(
                "transaction=%s ended as %s in the database, and was settled otherwise by hand: %s",
                *(self.id, verdict.name, error),
            )
        else:
            log.warning("end failed, %s transaction=%s: %s", LEFT_TO_CHECK_BACK, self.id, error)


class TransactionMessages(_MessagesBase):
    """`send` parks a message; the binding ends them all together."""

    def __init__(self, inner: blocking.Transaction) -> None:
        super().__init__(inner)
        self._inner = inner

    def send(self, message: Message) -> SendResult:
        """Raises what a producer's send raises; then the transaction can only be rolled back."""
        self.raise_if_send_failed()
        try:
            return self._inner.send(message)
        except BaseException as error:
            self._failure = error
            raise

    def end(self, verdict: Verdict) -> None:
        """Tell the broker what the database has decided. Raises no error: it asks if need be."""
        if not self.halves:
            self.outcome = TransactionOutcome(verdict, True, "no messages")
            return
        try:
            self._record_end(verdict, self._inner.end(verdict))
        except Exception as error:
            self._record_end_failure(verdict, error)


class AsyncTransactionMessages(_MessagesBase):
    """The same for asyncio."""

    def __init__(self, inner: client.Transaction) -> None:
        super().__init__(inner)
        self._inner = inner

    async def send(self, message: Message) -> SendResult:
        self.raise_if_send_failed()
        try:
            return await self._inner.send(message)
        except BaseException as error:
            self._failure = error
            raise

    async def end(self, verdict: Verdict) -> None:
        if not self.halves:
            self.outcome = TransactionOutcome(verdict, True, "no messages")
            return
        try:
            self._record_end(verdict, await self._inner.end(verdict))
        except Exception as error:
            self._record_end_failure(verdict, error)


CLEANUP_INTERVAL_S: Final = 10.0
ACKNOWLEDGED_MAX: Final = 100_000  # ids that wait for their removal; age removes what is beyond


class CleanupQueue:
    """What is to be removed, and when to look again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_cleanup_ms = clock.now_ms()  # a start is busy enough
        self._acknowledged: deque[str] = deque(maxlen=ACKNOWLEDGED_MAX)

    def add_acknowledged(self, transaction_id: str) -> None:
        self._acknowledged.append(transaction_id)

    def take_acknowledged(self) -> list[str]:
        """Ids whose rows may go now; empty when there are no more."""
        waiting = min(len(self._acknowledged), PURGE_BATCH_ROWS)
        return [self._acknowledged.popleft() for _ in range(waiting)]

    def is_cleanup_due(self) -> bool:
        """Once an hour."""
        if self._clock.now_ms() - self._last_cleanup_ms < HOUR_MS:
            return False
        self._last_cleanup_ms = self._clock.now_ms()
        return True


class CleanupThread:
    """A thread that does one round of work now and then, until it is stopped."""

    def __init__(
        self, work: Callable[[], None], *, name: str, interval_s: float = CLEANUP_INTERVAL_S
    ) -> None:
        self._work = work
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self._work()
            except Exception:
                log.exception("a round of the caretaker failed; the next one tries again")


class MarkerRetention:
    def __init__(
        self, *, group: str, retention_ms: int, purge_acknowledged: bool, clock: Clock | None
    ) -> None:
        self._group = group
        self._retention_ms = check_retention_ms(retention_ms)
        self._purges_acknowledged = purge_acknowledged
        self._clock = clock or SystemClock()
        self._cleanup_queue = CleanupQueue(self._clock)

    def _transaction_ended(self, tx: TransactionMessages | AsyncTransactionMessages) -> None:
        """If the broker has acknowledged that, nobody asks about its marker any more."""
        if self._purges_acknowledged and tx.outcome is not None and tx.outcome.acknowledged:
            self._cleanup_queue.add_acknowledged(tx.id)

    def _may_be_purged(self, message: ReceivedMessage) -> bool:
        """Its marker, by age."""
        return self._clock.now_ms() - message.born_ms >= self._retention_ms

    def _purge_before_ms(self, older_than_ms: int | None) -> int:
        age_ms = self._retention_ms if older_than_ms is None else older_than_ms
        if age_ms < self._retention_ms:
            raise ConfigError(
                f"markers are kept for {self._retention_ms} ms; kept_ms=… changes that"
            )
        return self._clock.now_ms() - age_ms
