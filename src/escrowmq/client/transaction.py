"""A block that commits when it is left, rolls back on Rollback, and is asked about otherwise.

    async with producer.transaction(Message("orders", b"o-1")) as tx:
        ...                                        # local work
        await tx.send(Message("stock", b"o-1"))    # another topic, the same decision

The first message is parked before the block runs: if that fails, nothing has happened. Any other
exception than Rollback leaves the transaction open, because the local work may have been done: the
broker asks the checker, which knows.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from escrowmq.client.line import Line, Reply
from escrowmq.client.messages import Message, SendResult, SendStatus
from escrowmq.errors import (
    HalfNotSafe,
    RequestRefused,
    Rollback,
    TransactionContradicted,
    TransportError,
)
from escrowmq.message.ids import decode_offset_id
from escrowmq.message.verdict import STATE_OF, Verdict
from escrowmq.wire.bodies import encode_body
from escrowmq.wire.bodies_transaction import HalfPlaces
from escrowmq.wire.codes import RequestCode, ResponseCode
from escrowmq.wire.headers_send import EndTransaction
from escrowmq.wire.headers_transaction import EndTransactions

log = logging.getLogger(__name__)

END_S: Final = 3.0  # for one attempt
END_ATTEMPTS: Final = 4
PAUSE_S: Final = 0.2  # after the first; doubled each time
TX_ID: Final = "TX_ID"  # on every message of a transaction: the id of its first


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a transaction ended, as far as this process knows."""

    verdict: Verdict  # what was asked for; UNKNOWN: nothing, it is left to check-back
    acknowledged: bool  # a broker has said that it is so
    detail: str = ""

    @property
    def state(self) -> str:
        if self.verdict is Verdict.UNKNOWN:
            return "open"
        return STATE_OF[self.verdict].text


Park = Callable[[Message, dict[str, str]], Awaitable[SendResult]]
LineTo = Callable[[str], Awaitable[Line]]


class Transaction:
    """`park` sends a half; `line_to` finds a broker's master by its name."""

    def __init__(
        self,
        message: Message | None,
        *,
        group: str,
        id: str = "",
        park: Park,
        line_to: LineTo,
        on_error: Verdict = Verdict.UNKNOWN,
    ) -> None:
        self._first = message
        self._group = group
        self._park = park
        self._line_to = line_to
        self._on_error = on_error
        self.halves: list[SendResult] = []
        self.outcome: Outcome | None = None
        self.id = id  # of its first message, if none was given

    async def __aenter__(self) -> Transaction:
        if self._first is not None:
            await self.send(self._first)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
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
        result = await self._park(message, {TX_ID: self.id} if self.id else {})
        self.halves.append(result)
        self.id = self.id or result.message_id
        if result.status is not SendStatus.SEND_OK:
            await self.end(Verdict.ROLLBACK)
            raise HalfNotSafe(f"the half was answered with {result.status.name}: rolled back")
        return result

    async def end(self, verdict: Verdict) -> Outcome:
        """Decide, once. Raises TransactionContradicted if somebody has decided otherwise."""
        by_broker: defaultdict[str, list[SendResult]] = defaultdict(list)
        for half in self.halves:
            by_broker[half.queue.broker].append(half)
        self.outcome = Outcome(verdict, False, "being told")
        told = await asyncio.gather(
            *(self._end_at(broker, halves, verdict) for broker, halves in by_broker.items())
        )
        missing = [detail for detail in told if detail]
        self.outcome = Outcome(verdict, not missing, "; ".join(missing))
        return self.outcome

    async def _end_at(self, broker: str, halves: Sequence[SendResult], verdict: Verdict) -> str:
        """Why it is not known to be so there; nothing if it is."""
        pause_s = PAUSE_S
        for attempt in range(END_ATTEMPTS):
            if attempt:
                await asyncio.sleep(pause_s)
                pause_s *= 2
            try:
                line = await self._line_to(broker)
                await self._tell(line, halves, verdict)
                return ""
            except TransportError as error:
                detail = f"{broker}: {error}"
        log.warning("end not acknowledged, check-back will settle it id=%s: %s", self.id, detail)
        return detail

    async def _tell(self, line: Line, halves: Sequence[SendResult], verdict: Verdict) -> None:
        if len(halves) > 1:
            reply = await self._tell_together(line, halves, verdict)
            if reply.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                _refuse(reply)
                return
        # One by one: there is only one, or the broker is RocketMQ's.
        for half in halves:
            fields = self._end_of(half, verdict)
            _refuse(await line.call(RequestCode.END_TRANSACTION, fields, timeout_s=END_S))

    async def _tell_together(
        self, line: Line, halves: Sequence[SendResult], verdict: Verdict
    ) -> Reply:
        fields = EndTransactions(producer_group=self._group, commit_or_rollback=int(verdict))
        places = [(half.queue_offset, decode_offset_id(half.offset_id)[1]) for half in halves]
        body = encode_body(HalfPlaces(halves=places))
        return await line.call(RequestCode.END_TRANSACTIONS, fields, body, timeout_s=END_S)

    def _end_of(self, half: SendResult, verdict: Verdict) -> EndTransaction:
        return EndTransaction(
            topic=half.queue.topic,
            producer_group=self._group,
            tran_state_table_offset=half.queue_offset,
            commit_log_offset=decode_offset_id(half.offset_id)[1],
            commit_or_rollback=int(verdict),
            msg_id=half.message_id,
            transaction_id=half.transaction_id or half.message_id,
            broker_name=half.queue.broker,
        )


def _refuse(reply: Reply) -> None:
    if reply.code == ResponseCode.TRANSACTION_CONTRADICTED:
        raise TransactionContradicted(reply.remark, "")
    if reply.code in (ResponseCode.FLUSH_DISK_TIMEOUT, ResponseCode.SYSTEM_BUSY):
        raise TransportError(f"code {reply.code}: {reply.remark}")
    if reply.code:
        raise RequestRefused(reply.code, reply.remark or f"code {reply.code}")
