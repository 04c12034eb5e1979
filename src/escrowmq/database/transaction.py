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
from escrowmq.client.producer.transaction import Outcome
from escrowmq.clock import Clock, SystemClock
from escrowmq.database.marker import HOUR_MS, ROWS_AT_ONCE, checked_kept_ms
from escrowmq.errors import ConfigError, NotHeld, TransactionContradicted
from escrowmq.message.transaction import Verdict

log = logging.getLogger(__name__)

LEFT: Final = "left to check-back"


class _Held:
    """What both kinds know."""

    def __init__(self, inner: blocking.Transaction | client.Transaction) -> None:
        self.id = inner.id
        self.outcome: Outcome | None = None  # once it is decided
        self._known = inner
        self._failure: BaseException | None = None

    @property
    def halves(self) -> Sequence[SendResult]:
        return self._known.halves

    def must_be_whole(self) -> None:
        """Raises NotHeld: a send has failed, and the block has gone on."""
        if self._failure is not None:
            raise NotHeld(
                "a message of this transaction could not be sent, so the database is rolled back; "
                "let the error of send() leave the block"
            ) from self._failure

    def leave(self, why: str) -> None:
        """Nothing is said to the broker: it will ask."""
        self.outcome = Outcome(Verdict.UNKNOWN, False, f"{LEFT}: {why}")

    def _ended(self, verdict: Verdict, outcome: Outcome) -> None:
        if not outcome.acknowledged:
            outcome = Outcome(verdict, False, f"{LEFT}: {outcome.detail}")
        self.outcome = outcome

    def _not_ended(self, verdict: Verdict, error: Exception) -> None:
        # The database has decided: its work is done or undone, and no error changes that.
        self.outcome = Outcome(verdict, False, f"{LEFT}: {error}")
        if isinstance(error, TransactionContradicted):
            log.error(
                "transaction=%s ended as %s in the database, and was settled otherwise by hand: %s",
                *(self.id, verdict.name, error),
            )
        else:
            log.warning("end failed, %s transaction=%s: %s", LEFT, self.id, error)


class HeldMessages(_Held):
    """`send` parks a message; the binding ends them all together."""

    def __init__(self, inner: blocking.Transaction) -> None:
        super().__init__(inner)
        self._inner = inner

    def send(self, message: Message) -> SendResult:
        """Raises what a producer's send raises; then the transaction can only be rolled back."""
        self.must_be_whole()
        try:
            return self._inner.send(message)
        except BaseException as error:
            self._failure = error
            raise

    def end(self, verdict: Verdict) -> None:
        """Tell the broker what the database has decided. Raises no error: it asks if need be."""
        if not self.halves:
            self.outcome = Outcome(verdict, True, "no messages")
            return
        try:
            self._ended(verdict, self._inner.end(verdict))
        except Exception as error:
            self._not_ended(verdict, error)


class AsyncHeldMessages(_Held):
    """The same for asyncio."""

    def __init__(self, inner: client.Transaction) -> None:
        super().__init__(inner)
        self._inner = inner

    async def send(self, message: Message) -> SendResult:
        self.must_be_whole()
        try:
            return await self._inner.send(message)
        except BaseException as error:
            self._failure = error
            raise

    async def end(self, verdict: Verdict) -> None:
        if not self.halves:
            self.outcome = Outcome(verdict, True, "no messages")
            return
        try:
            self._ended(verdict, await self._inner.end(verdict))
        except Exception as error:
            self._not_ended(verdict, error)


ROUND_S: Final = 10.0
ACKNOWLEDGED_MAX: Final = 100_000  # ids that wait for their removal; age removes what is beyond


class Chores:
    """What is to be removed, and when to look again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looked_ms = clock.now_ms()  # a start is busy enough
        self._acknowledged: deque[str] = deque(maxlen=ACKNOWLEDGED_MAX)

    def acknowledged(self, transaction_id: str) -> None:
        self._acknowledged.append(transaction_id)

    def some_acknowledged(self) -> list[str]:
        """Ids whose rows may go now; empty when there are no more."""
        waiting = min(len(self._acknowledged), ROWS_AT_ONCE)
        return [self._acknowledged.popleft() for _ in range(waiting)]

    def is_time(self) -> bool:
        """Once an hour."""
        if self._clock.now_ms() - self._looked_ms < HOUR_MS:
            return False
        self._looked_ms = self._clock.now_ms()
        return True


class Caretaker:
    """A thread that does one round of work now and then, until it is stopped."""

    def __init__(self, work: Callable[[], None], *, name: str, every_s: float = ROUND_S) -> None:
        self._work = work
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                self._work()
            except Exception:
                log.exception("a round of the caretaker failed; the next one tries again")


class Keeping:
    def __init__(
        self, *, group: str, kept_ms: int, forget_acknowledged: bool, clock: Clock | None
    ) -> None:
        self._group = group
        self._kept_ms = checked_kept_ms(kept_ms)
        self._forget_acknowledged = forget_acknowledged
        self._clock = clock or SystemClock()
        self._chores = Chores(self._clock)

    def _has_ended(self, tx: HeldMessages | AsyncHeldMessages) -> None:
        """If the broker has acknowledged that, nobody asks about its marker any more."""
        if self._forget_acknowledged and tx.outcome is not None and tx.outcome.acknowledged:
            self._chores.acknowledged(tx.id)

    def _may_be_forgotten(self, message: ReceivedMessage) -> bool:
        """Its marker, by age."""
        return self._clock.now_ms() - message.born_ms >= self._kept_ms

    def _forgets_before_ms(self, older_than_ms: int | None) -> int:
        age_ms = self._kept_ms if older_than_ms is None else older_than_ms
        if age_ms < self._kept_ms:
            raise ConfigError(f"markers are kept for {self._kept_ms} ms; kept_ms=… changes that")
        return self._clock.now_ms() - age_ms
