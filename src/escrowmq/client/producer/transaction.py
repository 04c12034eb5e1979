"""A block that commits when it is left, rolls back on Rollback, and is asked about otherwise.

    async with producer.transaction(Message("orders", b"o-1")) as tx:
        ...                                        # local work
        await tx.send(Message("stock", b"o-1"))    # another topic, the same decision

The first message is parked before the block runs: if that fails, nothing has happened. Any other
exception than Rollback leaves the transaction open, because the local work may have been done: the
broker asks the checker, which knows.

Tell the brokers how a transaction ends, as surely as each of them allows.

EscrowMQ          one request for all halves of a broker; repeated until it is answered, which
                  is safe, because the first decision stands
Apache RocketMQ   one request for each half, which it answers. A commit whose answer is lost is
                  not repeated: it would be delivered twice. Check-back settles it
verdict UNKNOWN   one way: RocketMQ does not answer it
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NamedTuple

from escrowmq.client.connection import Line, Reply
from escrowmq.client.messages import (
    TX_ID,
    TX_NAME,
    Message,
    Namespace,
    Queue,
    SendResult,
    SendStatus,
)
from escrowmq.client.telemetry import Span
from escrowmq.errors import (
    EscrowError,
    HalfNotSafe,
    OutcomeUnknown,
    RequestRefused,
    Rollback,
    TransactionContradicted,
    TransportError,
)
from escrowmq.message.keys import decode_offset_id
from escrowmq.message.transaction import STATE_OF, Verdict
from escrowmq.remoting.bodies import HalfPlaces, encode_body
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import EndTransaction, EndTransactions

log = logging.getLogger(__name__)

ATTEMPTS: Final = 4
PAUSE_S: Final = 0.2  # after the first; doubled each time
_AGAIN: Final = (
    ResponseCode.FLUSH_DISK_TIMEOUT,
    ResponseCode.SYSTEM_BUSY,
    ResponseCode.SERVICE_NOT_AVAILABLE,
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a transaction ended, as far as this process knows."""

    verdict: Verdict  # what was asked for; UNKNOWN: nothing, it is left to check-back
    acknowledged: bool  # all brokers concerned have said that it is so
    detail: str = ""
    one_way: bool = False  # it was sent without asking for an answer

    @property
    def state(self) -> str:
        if self.verdict is Verdict.UNKNOWN:
            return "open"
        return STATE_OF[self.verdict].text


class Told(NamedTuple):
    """By one broker. `missing` is why it is not known to be so there; empty if it is."""

    missing: str = ""
    one_way: bool = False


LineTo = Callable[[Queue, bool], Awaitable[Line]]


class Ends:
    """`line_to` finds the master of a queue's broker, after asking anew where it is if told so."""

    def __init__(
        self,
        group: str,
        namespace: Namespace,
        *,
        line_to: LineTo,
        is_ours: Callable[[Line], Awaitable[bool]],
        timeout_s: float,
    ) -> None:
        self._group = group
        self._namespace = namespace
        self._line_to = line_to
        self._is_ours = is_ours
        self._timeout_s = timeout_s  # for one attempt

    async def end(
        self, halves: Sequence[SendResult], verdict: Verdict, *, remark: str = ""
    ) -> tuple[Outcome, EscrowError | None]:
        """And the refusal, if a broker has decided otherwise or does not know the half."""
        by_broker: defaultdict[str, list[SendResult]] = defaultdict(list)
        for half in halves:
            by_broker[half.queue.broker].append(half)
        told = await asyncio.gather(
            *(self._end_at(part, verdict, remark) for part in by_broker.values()),
            return_exceptions=True,
        )
        refusal: EscrowError | None = None
        missing: list[str] = []
        one_way = False
        for one in told:
            if isinstance(one, EscrowError):
                refusal = refusal or one
                missing.append(str(one))
            elif isinstance(one, BaseException):
                raise one
            else:
                one_way = one_way or one.one_way
                missing += [one.missing] if one.missing else []
        acknowledged = not missing and not one_way
        return Outcome(verdict, acknowledged, "; ".join(missing), one_way), refusal

    async def _end_at(self, halves: list[SendResult], verdict: Verdict, remark: str) -> Told:
        if verdict is Verdict.UNKNOWN:
            return await self._say_unknown(halves, remark)
        queue = halves[0].queue
        missing, pause_s = "", PAUSE_S
        left = list(halves)
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(pause_s)
                pause_s *= 2
            is_ours = True
            try:
                line = await self._line_to(queue, attempt > 0)
                is_ours = await self._is_ours(line)
                await self._tell(line, left, verdict, is_ours)
                return Told()
            except TransportError as error:
                missing = f"{queue.broker}: {error}"
                unsure = isinstance(error, OutcomeUnknown)
                if unsure and not is_ours and verdict is Verdict.COMMIT:
                    break
        log.warning("end not acknowledged, check-back will settle it: %s", missing)
        return Told(missing)

    async def _say_unknown(self, halves: Sequence[SendResult], remark: str) -> Told:
        try:
            line = await self._line_to(halves[0].queue, False)
            for half in halves:
                fields = self.fields_of(half, Verdict.UNKNOWN)
                line.post(RequestCode.END_TRANSACTION, fields, remark=remark)
        except EscrowError as error:
            log.info("the broker was not told that the outcome is unknown: %s", error)
            return Told(str(error), one_way=True)
        return Told(one_way=True)

    async def _tell(
        self, line: Line, left: list[SendResult], verdict: Verdict, is_ours: bool
    ) -> None:
        if is_ours and len(left) > 1:
            reply = await self._tell_together(line, left, verdict)
            if reply.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                _refuse(reply)
                return
        while left:
            fields = self.fields_of(left[0], verdict)
            _refuse(await line.call(RequestCode.END_TRANSACTION, fields, timeout_s=self._timeout_s))
            del left[0]  # never told twice

    async def _tell_together(
        self, line: Line, halves: Sequence[SendResult], verdict: Verdict
    ) -> Reply:
        fields = EndTransactions(producer_group=self._group, commit_or_rollback=int(verdict))
        places = [(half.queue_offset, decode_offset_id(half.offset_id)[1]) for half in halves]
        body = encode_body(HalfPlaces(halves=places))
        return await line.call(
            RequestCode.END_TRANSACTIONS, fields, body, timeout_s=self._timeout_s
        )

    def fields_of(self, half: SendResult, verdict: Verdict) -> EndTransaction:
        return EndTransaction(
            topic=self._namespace.wrap(half.queue.topic),
            producer_group=self._group,
            tran_state_table_offset=half.queue_offset,
            commit_log_offset=decode_offset_id(half.offset_id)[1],
            commit_or_rollback=int(verdict),
            msg_id=half.message_id,
            transaction_id=half.transaction_id or half.message_id,
            broker_name=half.queue.broker,
        )


def _refuse(reply: Reply) -> None:
    if not reply.code:
        return
    if reply.code == ResponseCode.TRANSACTION_CONTRADICTED:
        raise TransactionContradicted(reply.remark, "")
    if reply.code in _AGAIN:
        raise TransportError(f"code {reply.code}: {reply.remark}")
    raise RequestRefused(reply.code, reply.remark or f"code {reply.code}")


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
