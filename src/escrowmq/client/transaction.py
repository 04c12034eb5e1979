"""A block that commits when it is left, rolls back on Rollback, and is asked about otherwise.

    async with producer.transaction(Message("orders", b"o-1")) as tx:
        ...                                        # local work
        await tx.send(Message("stock", b"o-1"))    # another topic, the same decision

The first message is parked before the block runs: if that fails, nothing has happened. Any other
exception than Rollback leaves the transaction open, because the local work may have been done: the
broker asks the checker, which knows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

from escrowmq.client.ending import Ends, Outcome
from escrowmq.client.messages import TX_ID, TX_NAME, Message, SendResult, SendStatus
from escrowmq.client.telemetry import Span
from escrowmq.errors import HalfNotSafe, Rollback, TransactionContradicted
from escrowmq.message.verdict import Verdict

__all__ = ["TX_ID", "TX_NAME", "Outcome", "Transaction"]

Park = Callable[[Message, dict[str, str], Any], Awaitable[SendResult]]


class Transaction:
    """`park` sends a half, `ends` tells brokers the verdict."""

    def __init__(
        self,
        message: Message | None,
        *,
        park: Park,
        ends: Ends,
        id: str = "",
        name: str = "",
        on_error: Verdict = Verdict.UNKNOWN,
        span: Span | None = None,
    ) -> None:
        self._first = message
        self._park = park
        self._ends = ends
        self._on_error = on_error
        self._span = span
        self.name = name
        self.halves: list[SendResult] = []
        self.outcome: Outcome | None = None
        self.id = id  # of its first message, if none was given

    async def __aenter__(self) -> Transaction:
        if self._first is not None:
            try:
                await self.send(self._first)
            except BaseException as error:
                self._close_span(error)
                raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        try:
            return await self._leave(kind)
        finally:
            self._close_span(error)

    async def _leave(self, kind: type[BaseException] | None) -> bool:
        if self.outcome is not None:
            return False  # ended by hand
        if kind is None:
            await self.end(Verdict.COMMIT)
        elif issubclass(kind, Rollback):
            await self.end(Verdict.ROLLBACK)
            return True
        elif self._on_error is not Verdict.UNKNOWN:
            await self.end(self._on_error)
        else:
            self.outcome = Outcome(Verdict.UNKNOWN, False, f"left by {kind.__name__}")
        return False

    async def send(self, message: Message) -> SendResult:
        """One more message under the same decision."""
        if self.outcome is not None:
            raise TransactionContradicted("this transaction has ended", self.outcome.state)
        more = {TX_ID: self.id} if self.id else {}
        if self.name:
            more[TX_NAME] = self.name
        result = await self._park(message, more, self._span)
        self.halves.append(result)
        self.id = self.id or result.message_id
        if result.status is not SendStatus.SEND_OK:
            await self.end(Verdict.ROLLBACK)
            raise HalfNotSafe(f"the half was answered with {result.status.name}: rolled back")
        return result

    async def end(self, verdict: Verdict, *, remark: str = "") -> Outcome:
        """Decide, once. Raises TransactionContradicted if somebody has decided otherwise, and
        RequestRefused if a broker does not know a half."""
        self.outcome = Outcome(verdict, False, "being told")
        self.outcome, refusal = await self._ends.end(self.halves, verdict, remark=remark)
        if refusal is not None:
            raise refusal
        return self.outcome

    def _close_span(self, error: BaseException | None) -> None:
        if self._span is not None:
            state = self.outcome.state if self.outcome is not None else "open"
            self._span.end({"escrowmq.transaction.state": state}, error)
            self._span = None
