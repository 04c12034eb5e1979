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

from escrowmq.client.connection import ClientConnection
from escrowmq.client.messages import Message, MessageQueue, Namespace, SendResult, SendStatus
from escrowmq.client.telemetry import Span
from escrowmq.errors import (
    EscrowError,
    HalfNotDurable,
    OutcomeUnknown,
    RequestRefused,
    Rollback,
    TransactionConflict,
    TransportError,
)
from escrowmq.message.keys import decode_offset_id
from escrowmq.message.names import TX_ID, TX_NAME
from escrowmq.message.transaction import STATE_BY_VERDICT, Verdict
from escrowmq.remoting.bodies import HalfPositions, encode_body
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.connection import Reply
from escrowmq.remoting.headers import EndTransaction, EndTransactions

log = logging.getLogger(__name__)

END_ATTEMPTS: Final = 4
RETRY_PAUSE_S: Final = 0.2  # after the first; doubled each time
_RETRIABLE_CODES: Final = (
    ResponseCode.FLUSH_DISK_TIMEOUT,
    ResponseCode.SYSTEM_BUSY,
    ResponseCode.SERVICE_NOT_AVAILABLE,
)


@dataclass(frozen=True, slots=True)
class TransactionOutcome:
    """How a transaction ended, as far as this process knows."""

    verdict: Verdict  # what was asked for; UNKNOWN: nothing, it is left to check-back
    acknowledged: bool  # all brokers concerned have said that it is so
    detail: str = ""
    oneway: bool = False  # it was sent without asking for an answer

    @property
    def state(self) -> str:
        if self.verdict is Verdict.UNKNOWN:
            return "open"
        return STATE_BY_VERDICT[self.verdict].text


class EndResult(NamedTuple):
    """By one broker. `missing` is why it is not known to be so there; empty if it is."""

    failure: str = ""
    oneway: bool = False


ConnectToBroker = Callable[[MessageQueue, bool], Awaitable[ClientConnection]]


class TransactionEnder:
    """`line_to` finds the master of a queue's broker, after asking anew where it is if told so."""

    def __init__(
        self,
        group: str,
        namespace: Namespace,
        *,
        connect: ConnectToBroker,
        is_escrowmq: Callable[[ClientConnection], Awaitable[bool]],
        timeout_s: float,
    ) -> None:
        self._group = group
        self._namespace = namespace
        self._connect = connect
        self._is_escrowmq = is_escrowmq
        self._timeout_s = timeout_s  # for one attempt

    async def end(
        self, halves: Sequence[SendResult], verdict: Verdict, *, remark: str = ""
    ) -> tuple[TransactionOutcome, EscrowError | None]:
        """And the refusal, if a broker has decided otherwise or does not know the half."""
        by_broker: defaultdict[str, list[SendResult]] = defaultdict(list)
        for half in halves:
            by_broker[half.queue.broker].append(half)
        told = await asyncio.gather(
            *(self._end_on_broker(part, verdict, remark) for part in by_broker.values()),
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
                one_way = one_way or one.oneway
                missing += [one.failure] if one.failure else []
        acknowledged = not missing and not one_way
        return TransactionOutcome(verdict, acknowledged, "; ".join(missing), one_way), refusal

    async def _end_on_broker(
        self, halves: list[SendResult], verdict: Verdict, remark: str
    ) -> EndResult:
        if verdict is Verdict.UNKNOWN:
            return await self._send_unknown(halves, remark)
        queue = halves[0].queue
        missing, pause_s = "", RETRY_PAUSE_S
        left = list(halves)
        for attempt in range(END_ATTEMPTS):
            if attempt:
                await asyncio.sleep(pause_s)
                pause_s *= 2
            is_ours = True
            try:
                line = await self._connect(queue, attempt > 0)
                is_ours = await self._is_escrowmq(line)
                await self._send_ends(line, left, verdict, is_ours)
                return EndResult()
            except TransportError as error:
                missing = f"{queue.broker}: {error}"
                unsure = isinstance(error, OutcomeUnknown)
                if unsure and not is_ours and verdict is Verdict.COMMIT:
                    break
        log.warning("end not acknowledged, check-back will settle it: %s", missing)
        return EndResult(missing)

    async def _send_unknown(self, halves: Sequence[SendResult], remark: str) -> EndResult:
        try:
            line = await self._connect(halves[0].queue, False)
            for half in halves:
                fields = self.end_header(half, Verdict.UNKNOWN)
                line.send_oneway(RequestCode.END_TRANSACTION, fields, remark=remark)
        except EscrowError as error:
            log.info("the broker was not told that the outcome is unknown: %s", error)
            return EndResult(str(error), oneway=True)
        return EndResult(oneway=True)

    async def _send_ends(
        self,
        connection: ClientConnection,
        remaining: list[SendResult],
        verdict: Verdict,
        is_escrowmq: bool,
    ) -> None:
        if is_escrowmq and len(remaining) > 1:
            reply = await self._send_together(connection, remaining, verdict)
            if reply.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                _raise_for_code(reply)
                return
        while remaining:
            fields = self.end_header(remaining[0], verdict)
            _raise_for_code(
                await connection.call(
                    RequestCode.END_TRANSACTION, fields, timeout_s=self._timeout_s
                )
            )
            del remaining[0]  # never told twice

    async def _send_together(
        self, connection: ClientConnection, halves: Sequence[SendResult], verdict: Verdict
    ) -> Reply:
        fields = EndTransactions(producer_group=self._group, commit_or_rollback=int(verdict))
        places = [(half.queue_offset, decode_offset_id(half.offset_id)[1]) for half in halves]
        body = encode_body(HalfPositions(halves=places))
        return await connection.call(
            RequestCode.END_TRANSACTIONS, fields, body, timeout_s=self._timeout_s
        )

    def end_header(self, half: SendResult, verdict: Verdict) -> EndTransaction:
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


def _raise_for_code(reply: Reply) -> None:
    if not reply.code:
        return
    if reply.code == ResponseCode.TRANSACTION_CONFLICT:
        raise TransactionConflict(reply.remark, "")
    if reply.code in _RETRIABLE_CODES:
        raise TransportError(f"code {reply.code}: {reply.remark}")
    raise RequestRefused(reply.code, reply.remark or f"code {reply.code}")


__all__ = ["TX_ID", "TX_NAME", "Transaction", "TransactionOutcome"]

ParkHalf = Callable[[Message, dict[str, str], Any], Awaitable[SendResult]]


class Transaction:
    """`park` sends a half, `ends` tells brokers the verdict."""

    def __init__(
        self,
        message: Message | None,
        *,
        park: ParkHalf,
        ender: TransactionEnder,
        id: str = "",
        name: str = "",
        on_error: Verdict = Verdict.UNKNOWN,
        span: Span | None = None,
    ) -> None:
        self._first_message = message
        self._park = park
        self._ender = ender
        self._on_error = on_error
        self._span = span
        self.name = name
        self.halves: list[SendResult] = []
        self.outcome: TransactionOutcome | None = None
        self.id = id  # of its first message, if none was given

    async def __aenter__(self) -> Transaction:
        if self._first_message is not None:
            try:
                await self.send(self._first_message)
            except BaseException as error:
                self._close_span(error)
                raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        try:
            return await self._end_block(exc_type)
        finally:
            self._close_span(error)

    async def _end_block(self, exc_type: type[BaseException] | None) -> bool:
        if self.outcome is not None:
            return False  # ended by hand
        if exc_type is None:
            await self.end(Verdict.COMMIT)
        elif issubclass(exc_type, Rollback):
            await self.end(Verdict.ROLLBACK)
            return True
        elif self._on_error is not Verdict.UNKNOWN:
            await self.end(self._on_error)
        else:
            self.outcome = TransactionOutcome(
                Verdict.UNKNOWN, False, f"left by {exc_type.__name__}"
            )
        return False

    async def send(self, message: Message) -> SendResult:
        """One more message under the same decision."""
        if self.outcome is not None:
            raise TransactionConflict("this transaction has ended", self.outcome.state)
        more = {TX_ID: self.id} if self.id else {}
        if self.name:
            more[TX_NAME] = self.name
        result = await self._park(message, more, self._span)
        self.halves.append(result)
        self.id = self.id or result.message_id
        if result.status is not SendStatus.SEND_OK:
            await self.end(Verdict.ROLLBACK)
            raise HalfNotDurable(f"the half was answered with {result.status.name}: rolled back")
        return result

    async def end(self, verdict: Verdict, *, remark: str = "") -> TransactionOutcome:
        """Decide, once. Raises TransactionContradicted if somebody has decided otherwise, and
        RequestRefused if a broker does not know a half."""
        self.outcome = TransactionOutcome(verdict, False, "being told")
        self.outcome, refusal = await self._ender.end(self.halves, verdict, remark=remark)
        if refusal is not None:
            raise refusal
        return self.outcome

    def _close_span(self, error: BaseException | None) -> None:
        if self._span is not None:
            state = self.outcome.state if self.outcome is not None else "open"
            self._span.end({"escrowmq.transaction.state": state}, error)
            self._span = None
