"""The messages of one local transaction: held by the broker until the database has decided."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from escrowmq import blocking
from escrowmq.client import transaction as client
from escrowmq.client.messages import Message, SendResult
from escrowmq.client.transaction import Outcome
from escrowmq.errors import NotHeld, TransactionContradicted
from escrowmq.message.verdict import Verdict

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
