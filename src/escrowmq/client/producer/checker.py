"""Answers to the broker's questions: what became of this transaction?

A checker is registered for a transaction's name, for a topic and a tag, for a topic, or for all.
Coroutines run on the loop, plain functions in threads; so many at once, and what comes beyond
waits its turn. Nothing is dropped: what does not fit is answered with UNKNOWN, and so is what a
checker raises, with the cause in the log and in the remark. The broker asks again.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

from escrowmq.client.connection import ClientConnection
from escrowmq.client.messages import Namespace, ReceivedMessage, to_received_message
from escrowmq.client.telemetry import Telemetry
from escrowmq.errors import BrokenBody, CorruptRecord, TransportError
from escrowmq.message.record import LogOffset, decode_record
from escrowmq.message.transaction import Verdict
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import CheckTransactionState, EndTransaction
from escrowmq.remoting.requests import Request

log = logging.getLogger(__name__)

DEFAULT_CONCURRENCY: Final = 16
PENDING_CHECKS_MAX: Final = 10_000
CLOSE_TIMEOUT_S: Final = 3.0  # so long a closing client waits for the answers that are under way
ALL_TOPICS: Final = "*"

Checker = Callable[[ReceivedMessage], "Verdict | Awaitable[Verdict | None] | None"]


@dataclass(slots=True)
class CheckResultCounts:
    """Since the client was made."""

    received: int = 0
    committed: int = 0
    rolled_back: int = 0
    unknown: int = 0  # of these:
    failed: int = 0  # the checker raised, or said something that is no verdict
    unregistered: int = 0  # there is no checker for it
    unreadable: int = 0
    overflowed: int = 0  # too many were waiting


class CheckerRegistry:
    def __init__(
        self,
        group: str,
        *,
        namespace: Namespace | None = None,
        telemetry: Telemetry | None = None,
        concurrency: int = DEFAULT_CONCURRENCY,
        pending_max: int = PENDING_CHECKS_MAX,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"one checker at least runs at a time, not {concurrency}")
        self._group = group
        self._namespace = namespace or Namespace()
        self._telemetry = telemetry
        self._concurrency = concurrency
        self._pending_max = pending_max
        self._by_name: dict[str, Checker] = {}
        self._by_topic: dict[tuple[str, str], Checker] = {}
        self._slots = asyncio.Semaphore(concurrency)
        self._threads: ThreadPoolExecutor | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.counts = CheckResultCounts()

    def register(self, checker: Checker, *, topic: str = "", tag: str = "", name: str = "") -> None:
        if bool(topic) == bool(name):
            raise ValueError(
                "a checker is for a topic ('*': for all), or for a transaction's name; give one"
            )
        if tag and (not topic or topic == ALL_TOPICS):
            raise ValueError("a tag is one of a topic's: give the topic too")
        if name:
            self._by_name[name] = checker
        else:
            self._by_topic[topic, tag] = checker

    def has_checkers(self) -> bool:
        return bool(self._by_topic or self._by_name)

    def on_check(
        self, connection: ClientConnection, request: Request[CheckTransactionState]
    ) -> None:
        """A question came. It is answered by and by."""
        self.counts.received += 1
        fields = request.head.fields
        if len(self._tasks) >= self._pending_max:
            self.counts.overflowed += 1
            log.error("%d checks wait, one more is answered with UNKNOWN", len(self._tasks))
            remark = f"{self._pending_max} checks are waiting in this producer"
            self._send_verdict(connection, fields, Verdict.UNKNOWN, fields.msg_id or "", remark)
            return
        body = bytes(request.body)  # the chunk that it is a view of is about to go
        task = asyncio.ensure_future(self._handle_check(connection, fields, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Finish what was asked so far."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _handle_check(
        self, connection: ClientConnection, fields: CheckTransactionState, body: bytes
    ) -> None:
        try:
            offset = LogOffset(fields.commit_log_offset)
            message = to_received_message(
                decode_record(body, 0, offset), broker=fields.broker_name or ""
            )
        except (CorruptRecord, BrokenBody) as error:
            self.counts.unreadable += 1
            log.error("a check that cannot be read: %s", error)
            self._send_verdict(connection, fields, Verdict.UNKNOWN, fields.msg_id or "", str(error))
            return
        if self._namespace.name:
            message = replace(message, topic=self._namespace.unwrap(message.topic))
        async with self._slots:
            verdict, remark = await self._run_checker(message)
        self._send_verdict(connection, fields, verdict, message.message_id, remark)

    def _send_verdict(
        self,
        connection: ClientConnection,
        fields: CheckTransactionState,
        verdict: Verdict,
        message_id: str,
        remark: str,
    ) -> None:
        counts = self.counts
        counts.committed += verdict is Verdict.COMMIT
        counts.rolled_back += verdict is Verdict.ROLLBACK
        counts.unknown += verdict is Verdict.UNKNOWN
        end = EndTransaction(
            topic=fields.topic,
            producer_group=self._group,
            tran_state_table_offset=fields.tran_state_table_offset,
            commit_log_offset=fields.commit_log_offset,
            commit_or_rollback=int(verdict),
            from_transaction_check=True,
            msg_id=message_id,
            transaction_id=fields.transaction_id,
        )
        try:
            connection.send_oneway(RequestCode.END_TRANSACTION, end, remark=remark)
        except TransportError as error:
            log.warning("the answer to a check was not sent, it will come again: %s", error)

    async def _run_checker(self, message: ReceivedMessage) -> tuple[Verdict, str]:
        """The verdict, and why it is none."""
        checker = self._find(message)
        if checker is None:
            self.counts.unregistered += 1
            log.error(
                "nobody can say what became of transaction=%s topic=%s: register a checker for it",
                message.transaction_id,
                message.topic,
            )
            return Verdict.UNKNOWN, f"no checker for topic {message.topic}"
        telemetry = self._telemetry
        span = telemetry.continue_trace("check", message) if telemetry else nullcontext()
        try:
            with span:
                found: Any = await self._call(checker, message)
                return (Verdict.UNKNOWN, "") if found is None else (Verdict(found), "")
        except Exception as error:
            self.counts.failed += 1
            log.exception("checker failed transaction=%s", message.transaction_id)
            return Verdict.UNKNOWN, f"checker failed: {error!r}"

    async def _call(self, checker: Checker, message: ReceivedMessage) -> Any:
        if inspect.iscoroutinefunction(checker):
            return await checker(message)
        if self._threads is None:
            # Of its own: the loop's has few threads on a small machine, and is everybody's.
            self._threads = ThreadPoolExecutor(self._concurrency, "escrowmq-checker")
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, checker, message)
        return await found if inspect.isawaitable(found) else found

    def _find(self, message: ReceivedMessage) -> Checker | None:
        if message.transaction_name in self._by_name:
            return self._by_name[message.transaction_name]
        for place in ((message.topic, message.tags), (message.topic, ""), (ALL_TOPICS, "")):
            if place in self._by_topic:
                return self._by_topic[place]
        return None
