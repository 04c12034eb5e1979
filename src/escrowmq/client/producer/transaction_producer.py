"""Transactions as RocketMQ's own clients write them: a listener that does the local work.

`send_in_transaction` parks a half, has the listener do the local work, and tells the broker:

    the half was answered with      the local work      the transaction
    SEND_OK                         is done             ends as it says; Rollback rolls back
      and None comes back, an exception, or no verdict  stays open; the exception is the remark
    another status                  is not done         is rolled back
    an error                        is not done         the error is raised
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from escrowmq.client.messages import Message, MessageQueue, ReceivedMessage, SendResult, SendStatus
from escrowmq.client.producer.checker import ALL_TOPICS
from escrowmq.client.producer.producer import Producer
from escrowmq.client.producer.transaction import TransactionOutcome
from escrowmq.client.telemetry import Span
from escrowmq.errors import Rollback
from escrowmq.message import names
from escrowmq.message.names import TRANSACTION_ID
from escrowmq.message.transaction import Verdict

log = logging.getLogger(__name__)


ListenerResult = Verdict | None | Awaitable[Verdict | None]


class TransactionListener(ABC):
    """Both methods may be plain or coroutines. Plain ones run in a thread."""

    @abstractmethod
    def execute_local_transaction(self, message: Message, arg: Any) -> ListenerResult:
        """Do the local work. `message.transaction_id` says which it is."""

    @abstractmethod
    def check_local_transaction(self, message: ReceivedMessage) -> ListenerResult:
        """What became of it? Asked in any process of the group, also after a crash."""


@dataclass(frozen=True, slots=True)
class TransactionSendResult:
    status: SendStatus
    message_id: str
    queue: MessageQueue
    queue_offset: int
    transaction_id: str
    local_state: Verdict
    outcome: TransactionOutcome
    error: Exception | None = None  # what the local transaction raised


class ParkedHalf(NamedTuple):
    """Between the half and the end."""

    half: SendResult
    span: Span | None = None


class TransactionProducer(Producer):
    """A Producer with a listener, which also answers for every transaction of the group that has
    no checker of its own. Options are those of Producer."""

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        group: str,
        listener: TransactionListener,
        **options: Any,
    ) -> None:
        for method in ("execute_local_transaction", "check_local_transaction"):
            if not callable(getattr(listener, method, None)):
                raise TypeError(
                    f"a transaction needs a listener with {method}; got {type(listener).__name__}"
                )
        super().__init__(servers, group=group, **options)
        self.listener = listener
        self.checker(ALL_TOPICS)(listener.check_local_transaction)

    async def send_in_transaction(self, message: Message, arg: Any = None) -> TransactionSendResult:
        """Park, do the local work, tell the broker. Raises what `send` raises, and
        TransactionContradicted if it was decided otherwise meanwhile."""
        parked = await self.park(message)
        if parked.half.status is not SendStatus.SEND_OK:
            return await self.finish(parked, Verdict.ROLLBACK)
        local = local_message(message, parked.half)
        verdict: Verdict = Verdict.UNKNOWN
        error: Exception | None = None
        try:
            execute = self.listener.execute_local_transaction
            if inspect.iscoroutinefunction(execute):
                said: Any = await execute(local, arg)
            else:
                said = await asyncio.to_thread(execute, local, arg)
                said = await said if inspect.isawaitable(said) else said
            verdict = to_verdict(said)
        except Rollback:
            verdict = Verdict.ROLLBACK
        except Exception as failure:
            error = failure
        return await self.finish(parked, verdict, error)

    async def park(self, message: Message) -> ParkedHalf:
        """The first step: the half is stored, where no consumer looks."""
        span = self._telemetry.start_transaction() if self._telemetry is not None else None
        try:
            return ParkedHalf(await self._park(message, {}, span), span)
        except BaseException as error:
            if span is not None:
                span.end({}, error)
            raise

    async def finish(
        self, parked_half: ParkedHalf, verdict: Verdict, error: Exception | None = None
    ) -> TransactionSendResult:
        """The last step: what became of it."""
        half, remark = parked_half.half, ""
        if error is not None:
            log.error("local transaction failed id=%s", half.message_id, exc_info=error)
            remark = f"local transaction failed: {error!r}"
        outcome, refusal = await self._ender.end([half], verdict, remark=remark)
        if parked_half.span is not None:
            parked_half.span.end({"escrowmq.transaction.state": outcome.state}, refusal or error)
        if refusal is not None:
            raise refusal
        return TransactionSendResult(
            status=half.status,
            message_id=half.message_id,
            queue=half.queue,
            queue_offset=half.queue_offset,
            transaction_id=half.transaction_id or half.message_id,
            local_state=verdict,
            outcome=outcome,
            error=error,
        )


def local_message(message: Message, half: SendResult) -> Message:
    """What the local transaction sees: the message, and the id that it goes by."""
    id = half.transaction_id or half.message_id
    known = {**message.properties, TRANSACTION_ID: id, names.UNIQUE_KEY: half.message_id}
    return replace(message, properties=known)


def to_verdict(value: Any) -> Verdict:
    """Raises ValueError if it is none."""
    return Verdict.UNKNOWN if value is None else Verdict(value)
