"""Transactions: a block that parks messages and decides them, and the requests that end it."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NamedTuple

from escrowmq.client.callbacks import describe, shorten
from escrowmq.client.connection import ClientConnection
from escrowmq.client.messages import Message, MessageQueue, Namespace, SendResult, SendStatus
from escrowmq.client.mistakes import AsyncioClient, UnawaitedCalls, short_traceback
from escrowmq.client.telemetry import Span
from escrowmq.errors import (
    BrokenResponse,
    EscrowError,
    HalfNotDurable,
    LocalProtocolError,
    OutcomeUnknown,
    RemoteProtocolError,
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
RETRY_PAUSE_S: Final = 0.2  # after the first attempt; doubled each time
_RETRIABLE_CODES: Final = (
    ResponseCode.FLUSH_DISK_TIMEOUT,
    ResponseCode.SYSTEM_BUSY,
    ResponseCode.SERVICE_NOT_AVAILABLE,
)


@dataclass(frozen=True, slots=True)
class TransactionOutcome:
    """How a transaction ended, as far as this process knows.

    `acknowledged` means that all brokers of the transaction confirmed the verdict. If it is False,
    a check decides the transaction later, and `detail` says why.
    """

    verdict: Verdict  # UNKNOWN: left open for a check
    acknowledged: bool
    detail: str = ""
    oneway: bool = False  # sent without a response, as RocketMQ does for UNKNOWN

    @property
    def state(self) -> str:
        """The state as the command line shows it: "committed", "rolled_back" or "open"."""
        if self.verdict is Verdict.UNKNOWN:
            return "open"
        return STATE_BY_VERDICT[self.verdict].text


# Sends a half message with extra properties, in a parent span.
ParkHalf = Callable[[Message, dict[str, str], Any], Awaitable[SendResult]]


class Transaction(AsyncioClient):
    """A block that commits its messages when it is left normally.

        async with producer.transaction(Message("orders", b"o-1")) as tx:
            ...                                        # local work
            await tx.send(Message("stock", b"o-1"))    # another topic, the same decision

    The first message is parked before the block runs: if that fails, the local work never starts.
    Leaving the block commits. `raise Rollback` rolls back and ends the block quietly. Any other
    exception is propagated and leaves the transaction open, because the local work may have been
    done: the broker then asks a checker. `on_error` of `producer.transaction` changes that.

    `id` identifies the transaction for checkers, `halves` are the parked messages, `outcome` is
    None until the end.
    """

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
        self.id = id  # if empty, set to the id of the first message
        self._calls = UnawaitedCalls()

    @short_traceback
    async def __aenter__(self) -> Transaction:
        if self._first_message is not None:
            try:
                await self._send(self._first_message)
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
            if error is None:
                try:
                    self._calls.raise_if_any("tx.send()")
                except LocalProtocolError as mistake:
                    await self._end_block(mistake)
                    raise
            return await self._end_block(error)
        finally:
            self._close_span(error)

    async def _end_block(self, error: BaseException | None) -> bool:
        """End the transaction. Return whether the exception is handled."""
        if self.outcome is not None:
            return False  # end() was called inside the block
        if error is None:
            await self.end(Verdict.COMMIT)
        elif isinstance(error, Rollback):
            await self.end(Verdict.ROLLBACK, remark=describe_error(error))
            return True
        elif self._on_error is not Verdict.UNKNOWN:
            await self.end(self._on_error, remark=describe_error(error))
        else:
            self.outcome = TransactionOutcome(
                Verdict.UNKNOWN, False, f"the block raised {type(error).__name__}"
            )
        return False

    def send(self, message: Message) -> Coroutine[Any, Any, SendResult]:
        """Park another message, which is committed or rolled back with the others.

        Raises what `producer.send` raises, TransactionConflict if the transaction has ended, and
        HalfNotDurable, after rolling back, if the broker did not store it safely. If it was not
        awaited, the end of the block raises LocalProtocolError and does not commit.
        """
        return self._calls.watch(self._send(message))

    @short_traceback
    async def _send(self, message: Message) -> SendResult:
        if self.outcome is not None:
            raise TransactionConflict("this transaction has ended", self.outcome.state)
        properties = {TX_ID: self.id} if self.id else {}
        if self.name:
            properties[TX_NAME] = self.name
        result = await self._park(message, properties, self._span)
        self.halves.append(result)
        self.id = self.id or result.message_id
        if result.status is not SendStatus.SEND_OK:
            await self.end(Verdict.ROLLBACK)
            raise HalfNotDurable(
                f"the broker stored the half message with {result.status.name}; "
                "the transaction is rolled back"
            )
        return result

    @short_traceback
    async def end(self, verdict: Verdict, *, remark: str = "") -> TransactionOutcome:
        """Commit or roll back now; the end of the block then does nothing.

        The broker keeps the remark of a rollback or an UNKNOWN for operators, up to 200 characters.
        The outcome is not acknowledged if a broker did not respond; a check decides there. Raises
        TransactionConflict if the transaction was decided otherwise, by a check or an operator,
        and RequestRefused if a broker does not know a half message.
        """
        # Set before the requests: if this task is cancelled in between, the end of the block
        # must not send another verdict.
        self.outcome = TransactionOutcome(verdict, False, "the end request was interrupted")
        self.outcome, refusal = await self._ender.end(self.halves, verdict, remark=remark)
        if refusal is not None:
            raise refusal
        return self.outcome

    def _close_span(self, error: BaseException | None) -> None:
        if self._span is not None:
            state = self.outcome.state if self.outcome is not None else "open"
            self._span.end({"escrowmq.transaction.state": state}, error)
            self._span = None


def describe_error(error: BaseException) -> str:
    """Return the remark that tells the broker's operators why a transaction was rolled back."""
    return shorten(str(error)) if isinstance(error, Rollback) else describe(error)


def check_half(half: SendResult) -> None:
    """Raise BrokenResponse if the broker did not say where a half message is: it cannot be ended.

    It is better to fail now than after the local work is done. The broker checks the half.
    """
    try:
        _, log_offset = decode_offset_id(half.offset_id)
    except RemoteProtocolError as error:
        raise BrokenResponse(f"the response to a half message: {error}") from error
    if log_offset < 0 or half.queue_offset < 0:
        raise BrokenResponse("the response to a half message has impossible offsets")


# --- end requests --------------------------------------------------------------------------------


class EndResult(NamedTuple):
    """The result of ending a transaction on one broker. `failure` is empty if it confirmed it."""

    failure: str = ""
    oneway: bool = False


# Connects to the broker of a queue; with True, after asking the name server for its address again.
ConnectToBroker = Callable[[MessageQueue, bool], Awaitable[ClientConnection]]


class TransactionEnder:
    """Sends the verdict of a transaction to its brokers, as safely as each of them allows.

    EscrowMQ          one request for all halves on a broker, repeated until it responds. This is
                      safe, because the first decision stands.
    Apache RocketMQ   one request for each half. A commit without a response is not repeated,
                      because RocketMQ would deliver the message twice; a check decides instead.
    verdict UNKNOWN   one-way, because RocketMQ does not respond to it.
    """

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
        self._timeout_s = timeout_s  # of one attempt

    async def end(
        self, halves: Sequence[SendResult], verdict: Verdict, *, remark: str = ""
    ) -> tuple[TransactionOutcome, EscrowError | None]:
        """End a transaction on all its brokers at the same time.

        Also return the first refusal: a broker has decided otherwise or does not know a half.
        """
        by_broker: defaultdict[str, list[SendResult]] = defaultdict(list)
        for half in halves:
            by_broker[half.queue.broker].append(half)
        results = await asyncio.gather(
            *(self._end_on_broker(part, verdict, remark) for part in by_broker.values()),
            return_exceptions=True,
        )
        refusal: EscrowError | None = None
        failures: list[str] = []
        oneway = False
        for result in results:
            if isinstance(result, EscrowError):
                refusal = refusal or result
                failures.append(str(result))
            elif isinstance(result, BaseException):
                raise result
            else:
                oneway = oneway or result.oneway
                failures += [result.failure] if result.failure else []
        acknowledged = not failures and not oneway
        return TransactionOutcome(verdict, acknowledged, "; ".join(failures), oneway), refusal

    async def _end_on_broker(
        self, halves: list[SendResult], verdict: Verdict, remark: str
    ) -> EndResult:
        if verdict is Verdict.UNKNOWN:
            return await self._send_unknown(halves, remark)
        queue = halves[0].queue
        failure, pause_s = "", RETRY_PAUSE_S
        remaining = list(halves)
        for attempt in range(END_ATTEMPTS):
            if attempt:
                await asyncio.sleep(pause_s)
                pause_s *= 2
            is_escrowmq = True
            try:
                connection = await self._connect(queue, attempt > 0)
                is_escrowmq = await self._is_escrowmq(connection)
                await self._send_ends(connection, remaining, verdict, is_escrowmq, remark)
                return EndResult()
            except TransportError as error:
                failure = f"{queue.broker}: {error}"
                may_be_committed = isinstance(error, OutcomeUnknown) and verdict is Verdict.COMMIT
                if may_be_committed and not is_escrowmq:
                    break  # repeating it could deliver the message twice
        log.warning("end not acknowledged, left to a check: %s", failure)
        return EndResult(failure)

    async def _send_unknown(self, halves: Sequence[SendResult], remark: str) -> EndResult:
        try:
            connection = await self._connect(halves[0].queue, False)
            for half in halves:
                fields = self.end_header(half, Verdict.UNKNOWN)
                connection.send_oneway(RequestCode.END_TRANSACTION, fields, remark=remark)
        except EscrowError as error:
            log.info("verdict UNKNOWN not sent: %s", error)
            return EndResult(str(error), oneway=True)
        return EndResult(oneway=True)

    async def _send_ends(
        self,
        connection: ClientConnection,
        remaining: list[SendResult],
        verdict: Verdict,
        is_escrowmq: bool,
        remark: str,
    ) -> None:
        """End the remaining halves. Acknowledged ones are removed from the list."""
        if is_escrowmq and len(remaining) > 1:
            reply = await self._send_together(connection, remaining, verdict, remark)
            if reply.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                _raise_for_code(reply)
                return
        while remaining:
            fields = self.end_header(remaining[0], verdict)
            reply = await connection.call(
                RequestCode.END_TRANSACTION, fields, timeout_s=self._timeout_s, remark=remark
            )
            _raise_for_code(reply)
            del remaining[0]  # so that a further attempt does not end it twice

    async def _send_together(
        self,
        connection: ClientConnection,
        halves: Sequence[SendResult],
        verdict: Verdict,
        remark: str,
    ) -> Reply:
        fields = EndTransactions(producer_group=self._group, commit_or_rollback=int(verdict))
        positions = [(half.queue_offset, decode_offset_id(half.offset_id)[1]) for half in halves]
        return await connection.call(
            RequestCode.END_TRANSACTIONS,
            fields,
            encode_body(HalfPositions(halves=positions)),
            timeout_s=self._timeout_s,
            remark=remark,
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
