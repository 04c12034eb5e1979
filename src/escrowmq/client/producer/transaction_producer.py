"""Transactions in the style of RocketMQ's own clients: a listener does the local work.

`send_in_transaction` parks a half message, calls the listener and ends the transaction:

    half message         local transaction                  transaction
    SEND_OK              returns a verdict, or raises       ends with that verdict
                         Rollback
    SEND_OK              returns None, raises, or returns   stays open for a check; the exception
                         something that is no verdict       is sent as the remark
    SEND_OK              raises SystemExit or the like      the same; the error of the result is
                                                            CallbackFailed
    another status       is not called                      is rolled back
    error                is not called                      the error is raised
"""

from __future__ import annotations

import contextvars
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Unpack

from escrowmq.client.callbacks import describe, run_callback
from escrowmq.client.messages import Message, MessageQueue, ReceivedMessage, SendResult, SendStatus
from escrowmq.client.mistakes import check_callable, short_traceback
from escrowmq.client.producer.checker import ALL_TOPICS, to_verdict
from escrowmq.client.producer.producer import Producer, ProducerOptions
from escrowmq.client.producer.transaction import TransactionOutcome
from escrowmq.client.telemetry import Span
from escrowmq.clock import Clock
from escrowmq.errors import Rollback
from escrowmq.message import names
from escrowmq.message.names import TRANSACTION_ID
from escrowmq.message.transaction import Verdict

log = logging.getLogger(__name__)


ListenerResult = Verdict | None | Awaitable[Verdict | None]


class TransactionListener(ABC):
    """Does and checks local transactions for a TransactionProducer.

    Both methods may be coroutine functions or plain functions. Plain ones run in a thread.
    """

    @abstractmethod
    def execute_local_transaction(self, message: Message, arg: Any) -> ListenerResult:
        """Do the local work of `message.transaction_id` and return the verdict."""

    @abstractmethod
    def check_local_transaction(self, message: ReceivedMessage) -> ListenerResult:
        """Return what became of `message.transaction_id`.

        It may be called in any process of the group, also after a crash of the one that sent the
        message. None and UNKNOWN make the broker check again later.
        """


@dataclass(frozen=True, slots=True)
class TransactionSendResult:
    """The result of `send_in_transaction`."""

    status: SendStatus  # of the half message
    message_id: str
    queue: MessageQueue
    queue_offset: int
    transaction_id: str
    local_state: Verdict  # of the local transaction
    outcome: TransactionOutcome
    error: BaseException | None = None  # raised by the local transaction


class ParkedHalf(NamedTuple):
    """A transaction between `_park_half` and `_finish`."""

    half: SendResult
    span: Span | None = None


class TransactionProducer(Producer):
    """A Producer with a listener, as RocketMQ's TransactionMQProducer.

        class Orders(TransactionListener): ...

        async with TransactionProducer(servers, group="orders", listener=Orders()) as producer:
            await producer.send_in_transaction(Message("orders", b"o-1"), arg=order)

    The listener also checks every transaction of the group that has no checker of its own.
    The `options` are those of Producer: `check_executor` runs the checks, as `setExecutorService`
    does in RocketMQ. With `check_concurrency=1` checks come one at a time, as RocketMQ's client
    makes them by default. Raises TypeError if the listener lacks a method.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        group: str,
        listener: TransactionListener,
        clock: Clock | None = None,
        **options: Unpack[ProducerOptions],
    ) -> None:
        for method in ("execute_local_transaction", "check_local_transaction"):
            if not callable(getattr(listener, method, None)):
                raise TypeError(f"the listener {type(listener).__name__} has no method {method}")
        check_callable(
            listener.execute_local_transaction,
            "execute_local_transaction of a listener",
            ("message", "arg"),
        )
        super().__init__(servers, group=group, clock=clock, **options)
        self.listener = listener
        self.checker(ALL_TOPICS)(listener.check_local_transaction)

    @short_traceback
    async def send_in_transaction(self, message: Message, arg: Any = None) -> TransactionSendResult:
        """Park the message, run the local transaction with `arg`, and end the transaction.

        An exception of the local transaction is returned as `error` of the result. Raises what
        `send` raises, and TransactionConflict if the transaction was decided otherwise meanwhile.
        """
        parked = await self._park_half(message)
        if parked.half.status is not SendStatus.SEND_OK:
            return await self._finish(parked, Verdict.ROLLBACK)
        local_message = to_local_message(message, parked.half)
        verdict: Verdict = Verdict.UNKNOWN
        failure: Exception | None = None
        try:
            execute = self.listener.execute_local_transaction
            context = contextvars.copy_context()
            verdict = to_verdict(await run_callback(execute, local_message, arg, context=context))
        except Rollback:
            verdict = Verdict.ROLLBACK
        except Exception as error:
            failure = error
        return await self._finish(parked, verdict, failure)

    async def _park_half(self, message: Message) -> ParkedHalf:
        """Store the message as a half message: the first step of `send_in_transaction`."""
        span = self._telemetry.start_transaction() if self._telemetry is not None else None
        try:
            return ParkedHalf(await self._park(message, {}, span), span)
        except BaseException as error:
            if span is not None:
                span.end({}, error)
            raise

    async def _finish(
        self, parked_half: ParkedHalf, verdict: Verdict, error: BaseException | None = None
    ) -> TransactionSendResult:
        """End the transaction: the last step of `send_in_transaction`."""
        half, remark = parked_half.half, ""
        if error is not None:
            log.error("local transaction failed id=%s", half.message_id, exc_info=error)
            remark = f"local transaction failed: {describe(error)}"
        elif half.status is not SendStatus.SEND_OK:
            log.warning(
                "half message stored with %s, rolling back id=%s topic=%s",
                half.status.name,
                half.message_id,
                half.queue.topic,
            )
        elif verdict is not Verdict.COMMIT:
            log.info(
                "local transaction returned %s id=%s topic=%s",
                verdict.name,
                half.message_id,
                half.queue.topic,
            )
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


def to_local_message(message: Message, half: SendResult) -> Message:
    """Return the message for the local transaction, with the transaction's id."""
    transaction_id = half.transaction_id or half.message_id
    properties = {
        **message.properties,
        TRANSACTION_ID: transaction_id,
        names.UNIQUE_KEY: half.message_id,
    }
    return replace(message, properties=properties)
