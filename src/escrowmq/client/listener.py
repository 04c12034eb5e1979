"""Transactions as RocketMQ's own clients write them: a listener that does the local work.

class Orders(TransactionListener):
    def execute_local_transaction(self, message, arg):   # the half is parked: do the work
        return Verdict.COMMIT
    def check_local_transaction(self, message):          # the broker asks what became of it
        return Verdict.COMMIT

async with TransactionProducer("127.0.0.1:9876", group="orders", listener=Orders()) as producer:
    result = await producer.send_in_transaction(Message("orders", b"o-1"), arg=order)

the half was answered with      the local work      the transaction
SEND_OK                         is done             ends as it says
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
from typing import Any, Final

from escrowmq.client.checkers import ALL
from escrowmq.client.ending import Outcome
from escrowmq.client.messages import Message, Queue, ReceivedMessage, SendResult, SendStatus
from escrowmq.client.producer import Producer
from escrowmq.message import names
from escrowmq.message.verdict import Verdict

log = logging.getLogger(__name__)

TRANSACTION_ID: Final = "__transactionId__"

Said = Verdict | None | Awaitable[Verdict | None]


class TransactionListener(ABC):
    """Both methods may be plain or coroutines. Plain ones run in a thread."""

    @abstractmethod
    def execute_local_transaction(self, message: Message, arg: Any) -> Said:
        """Do the local work. `message.transaction_id` says which it is."""

    @abstractmethod
    def check_local_transaction(self, message: ReceivedMessage) -> Said:
        """What became of it? Asked in any process of the group, also after a crash."""


@dataclass(frozen=True, slots=True)
class TransactionSendResult:
    status: SendStatus
    message_id: str
    queue: Queue
    queue_offset: int
    transaction_id: str
    local_state: Verdict
    outcome: Outcome
    error: Exception | None = None  # what the local transaction raised


class TransactionProducer(Producer):
    """A Producer with a listener, which also answers for every transaction of the group that has
    no checker of its own. Options are those of Producer."""

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        group: str,
        listener: TransactionListener,
        **more: Any,
    ) -> None:
        for method in ("execute_local_transaction", "check_local_transaction"):
            if not callable(getattr(listener, method, None)):
                raise TypeError(
                    f"a transaction needs a listener with {method}; got {type(listener).__name__}"
                )
        super().__init__(servers, group=group, **more)
        self.listener = listener
        self.checker(ALL)(listener.check_local_transaction)

    async def send_in_transaction(self, message: Message, arg: Any = None) -> TransactionSendResult:
        half = await self.park(message)
        if half.status is not SendStatus.SEND_OK:
            return await self.finish(half, Verdict.ROLLBACK)
        local = local_message(message, half)
        verdict, error = Verdict.UNKNOWN, None
        try:
            execute = self.listener.execute_local_transaction
            if inspect.iscoroutinefunction(execute):
                said: Any = await execute(local, arg)
            else:
                said = await asyncio.to_thread(execute, local, arg)
                said = await said if inspect.isawaitable(said) else said
            verdict = verdict_of(said)
        except Exception as failure:
            error = failure
        return await self.finish(half, verdict, error)

    async def park(self, message: Message) -> SendResult:
        """The first step: the half is stored, where no consumer looks."""
        return await self._park(message, {})

    async def finish(
        self, half: SendResult, verdict: Verdict, error: Exception | None = None
    ) -> TransactionSendResult:
        """The last step. Raises TransactionContradicted if it was decided otherwise meanwhile."""
        remark = ""
        if error is not None:
            log.error("local transaction failed id=%s", half.message_id, exc_info=error)
            remark = f"local transaction failed: {error!r}"
        outcome, refusal = await self._ends.end([half], verdict, remark=remark)
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


def verdict_of(said: Any) -> Verdict:
    """Raises ValueError if it is none."""
    return Verdict.UNKNOWN if said is None else Verdict(said)
