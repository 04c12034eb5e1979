"""Answers to the broker's questions: what became of this transaction?

A checker is registered for a topic, or for a topic and a tag. Coroutines run on the loop, plain
functions in threads; so many at once, and what comes beyond waits its turn. An exception is
UNKNOWN, logged with its cause: the broker will ask again.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from escrowmq.client.line import Line
from escrowmq.client.messages import ReceivedMessage, received
from escrowmq.errors import BrokenBody, CorruptRecord, TransportError
from escrowmq.message.offsets import LogOffset
from escrowmq.message.record import decode_record
from escrowmq.message.verdict import Verdict
from escrowmq.wire.codes import RequestCode
from escrowmq.wire.fastpath import Request
from escrowmq.wire.headers_send import CheckTransactionState, EndTransaction

log = logging.getLogger(__name__)

AT_ONCE: Final = 16
WAITING_MAX: Final = 10_000
ANSWER_S: Final = 3.0

Checker = Callable[[ReceivedMessage], "Verdict | Awaitable[Verdict | None] | None"]


class Checkers:
    def __init__(self, group: str, *, at_once: int = AT_ONCE) -> None:
        self._group = group
        self._checkers: dict[tuple[str, str], Checker] = {}
        self._room = asyncio.Semaphore(at_once)
        self._running: set[asyncio.Task[None]] = set()

    def register(self, topic: str, tag: str, checker: Checker) -> None:
        self._checkers[topic, tag] = checker

    def asked(self, line: Line, request: Request[CheckTransactionState]) -> None:
        """A question came. It is answered by and by, or the broker asks again."""
        if len(self._running) >= WAITING_MAX:
            log.error("check dropped, %d are waiting; the broker will ask again", WAITING_MAX)
            return
        body = bytes(request.body)  # the chunk that it is a view of is about to go
        task = asyncio.ensure_future(self._answer(line, request.head.fields, body))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """Finish what was asked so far."""
        if self._running:
            await asyncio.wait(self._running, timeout=ANSWER_S)
        for task in self._running:
            task.cancel()

    async def _answer(self, line: Line, fields: CheckTransactionState, body: bytes) -> None:
        try:
            offset = LogOffset(fields.commit_log_offset)
            message = received(decode_record(body, 0, offset), broker=fields.broker_name or "")
        except (CorruptRecord, BrokenBody) as error:
            log.error("a check that cannot be read: %s", error)
            return
        async with self._room:
            verdict = await self._ask(message)
        end = EndTransaction(
            topic=fields.topic,
            producer_group=self._group,
            tran_state_table_offset=fields.tran_state_table_offset,
            commit_log_offset=fields.commit_log_offset,
            commit_or_rollback=int(verdict),
            from_transaction_check=True,
            msg_id=message.message_id,
            transaction_id=fields.transaction_id,
        )
        try:
            line.post(RequestCode.END_TRANSACTION, end)
        except TransportError as error:
            log.warning("the answer to a check was not sent, it will come again: %s", error)

    async def _ask(self, message: ReceivedMessage) -> Verdict:
        checker = self._find(message)
        if checker is None:
            log.error(
                "nobody can say what became of transaction=%s topic=%s: register a checker for it",
                message.transaction_id,
                message.topic,
            )
            return Verdict.UNKNOWN
        try:
            if inspect.iscoroutinefunction(checker):
                found: Any = await checker(message)
            else:
                found = await asyncio.to_thread(checker, message)
        except Exception:
            log.exception("checker failed transaction=%s", message.transaction_id)
            return Verdict.UNKNOWN
        return Verdict.UNKNOWN if found is None else Verdict(found)

    def _find(self, message: ReceivedMessage) -> Checker | None:
        for place in ((message.topic, message.tags), (message.topic, ""), ("*", "")):
            if place in self._checkers:
                return self._checkers[place]
        return None
