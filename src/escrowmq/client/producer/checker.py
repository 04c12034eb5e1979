"""Checkers: answer a broker's transaction checks.

A checker is registered for the name of a transaction, for a topic and a tag, for a topic, or for
all topics; the most specific one is called. Coroutine functions run on the event loop, plain
functions in threads, or in an executor of the user's own. At most `concurrency` run at the same
time, and at most `request_hold_max` wait.

Every check is answered. The verdict is UNKNOWN if too many checks wait, if there is no checker,
or if it raises anything; the cause is logged and sent to the broker as a remark. The broker checks
again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from escrowmq.client.callbacks import describe, run_callback, shorten
from escrowmq.client.connection import ClientConnection
from escrowmq.client.messages import (
    BODY_BYTES_MAX,
    Namespace,
    ReceivedMessage,
    to_received_message,
)
from escrowmq.client.telemetry import Telemetry
from escrowmq.errors import BrokenBody, CorruptRecord, EscrowError
from escrowmq.message.record import LogOffset, decode_record
from escrowmq.message.transaction import Verdict
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import CheckTransactionState, EndTransaction
from escrowmq.remoting.requests import Request

log = logging.getLogger(__name__)

DEFAULT_CONCURRENCY: Final = 16
CHECK_REQUEST_HOLD_MAX: Final = 2_000  # RocketMQ's checkRequestHoldMax
CHECK_BYTES_MAX: Final = 256 << 20  # of the messages of all checks that wait or run
CLOSE_TIMEOUT_S: Final = 3.0  # how long close() waits for running checkers
ALL_TOPICS: Final = "*"

Checker = Callable[[ReceivedMessage], "Verdict | Awaitable[Verdict | None] | None"]
CheckerT = TypeVar("CheckerT", bound=Checker)  # a decorator returns what it was given


@dataclass(slots=True)
class CheckResultCounts:
    """Counters of the checks that a producer has received since it was created."""

    received: int = 0
    committed: int = 0
    rolled_back: int = 0
    unknown: int = 0  # including the following
    failed: int = 0  # the checker raised, or returned something that is no verdict
    unregistered: int = 0  # there is no checker for the transaction
    unreadable: int = 0
    overflowed: int = 0  # too many checks were waiting


class CheckerRegistry:
    """Finds and runs the checkers of one producer."""

    def __init__(
        self,
        group: str,
        *,
        namespace: Namespace | None = None,
        telemetry: Telemetry | None = None,
        concurrency: int = DEFAULT_CONCURRENCY,
        request_hold_max: int = CHECK_REQUEST_HOLD_MAX,
        executor: Executor | None = None,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"check_concurrency must be at least 1, not {concurrency}")
        if request_hold_max < 0:
            raise ValueError(f"check_request_hold_max must be at least 0, not {request_hold_max}")
        if executor is not None and not isinstance(executor, Executor):
            raise TypeError(
                "check_executor must be a concurrent.futures.Executor, "
                f"not {type(executor).__name__}"
            )
        self._group = group
        self._namespace = namespace or Namespace()
        self._telemetry = telemetry
        self._concurrency = concurrency
        self._request_hold_max = request_hold_max
        self._executor = executor  # of the user
        self._by_name: dict[str, Checker] = {}
        self._by_topic: dict[tuple[str, str], Checker] = {}  # (topic, tag or "")
        self._slots = asyncio.Semaphore(concurrency)
        self._threads: ThreadPoolExecutor | None = None  # if the user gave no executor
        self._tasks: set[asyncio.Task[None]] = set()
        self._held_bytes = 0  # of the messages of all tasks
        self.counts = CheckResultCounts()

    def register(self, checker: Checker, *, topic: str = "", tag: str = "", name: str = "") -> None:
        """Register a checker, replacing one for the same topic and tag or the same name."""
        if bool(topic) == bool(name):
            raise ValueError(
                "a checker is registered for a topic ('*' for all) or for a transaction's name: "
                "give one of them"
            )
        if tag and (not topic or topic == ALL_TOPICS):
            raise ValueError("tag= needs the topic that the tag belongs to")
        if name:
            self._by_name[name] = checker
        else:
            self._by_topic[topic, tag] = checker

    def has_checkers(self) -> bool:
        return bool(self._by_topic or self._by_name)

    def on_check(
        self, connection: ClientConnection, request: Request[CheckTransactionState]
    ) -> None:
        """Start to answer a check."""
        self.counts.received += 1
        fields = request.head.fields
        if (
            len(self._tasks) >= self._concurrency + self._request_hold_max
            or self._held_bytes + len(request.body) > CHECK_BYTES_MAX
        ):
            self.counts.overflowed += 1
            waiting = max(0, len(self._tasks) - self._concurrency)
            log.error("%d checks are waiting, answering UNKNOWN to another one", waiting)
            remark = f"{waiting} checks are waiting in this producer"
            self._send_verdict(connection, fields, Verdict.UNKNOWN, fields.msg_id or "", remark)
            return
        body = bytes(request.body)  # a copy: a view would keep the received chunk alive
        task = asyncio.ensure_future(self._handle_check(connection, fields, body))
        self._tasks.add(task)
        self._held_bytes += len(body)
        task.add_done_callback(lambda task: self._check_done(task, len(body)))

    async def close(self) -> None:
        """Wait up to CLOSE_TIMEOUT_S for checks in progress, and cancel the others."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _check_done(self, task: asyncio.Task[None], body_bytes: int) -> None:
        self._tasks.discard(task)
        self._held_bytes -= body_bytes

    async def _handle_check(
        self, connection: ClientConnection, fields: CheckTransactionState, body: bytes
    ) -> None:
        message_id = fields.msg_id or ""
        async with self._slots:
            message: ReceivedMessage | None = None
            try:
                message = self._decode(fields, body)
                message_id = message.message_id
                verdict, remark = await self._run_checker(message)
            except (CorruptRecord, BrokenBody) as error:
                self.counts.unreadable += 1
                log.error("unreadable check, answering UNKNOWN: %s", error)
                verdict, remark = Verdict.UNKNOWN, str(error)
            except Exception as error:
                self.counts.failed += 1
                log.exception("check failed, answering UNKNOWN id=%s", message_id)
                verdict, remark = Verdict.UNKNOWN, describe(error)
            finally:
                if message is not None:
                    self._held_bytes -= len(message.body)
        self._send_verdict(connection, fields, verdict, message_id, remark)

    def _decode(self, fields: CheckTransactionState, body: bytes) -> ReceivedMessage:
        """Return the message of a check. A compressed one may be as long as the limit allows."""
        message = to_received_message(
            decode_record(body, 0, LogOffset(fields.commit_log_offset)),
            broker=fields.broker_name or "",
            body_bytes_max=max(0, min(BODY_BYTES_MAX, CHECK_BYTES_MAX - self._held_bytes)),
        )
        self._held_bytes += len(message.body)
        if self._namespace.name:
            message = replace(message, topic=self._namespace.unwrap(message.topic))
        return message

    async def _run_checker(self, message: ReceivedMessage) -> tuple[Verdict, str]:
        """Return the verdict, and the reason if it is UNKNOWN."""
        checker = self._find(message)
        if checker is None:
            self.counts.unregistered += 1
            log.error(
                "no checker for transaction=%s topic=%s; register one with producer.checker(), or "
                "give this producer another group than those that have checkers",
                message.transaction_id,
                message.topic,
            )
            return Verdict.UNKNOWN, f"no checker for topic {message.topic}"
        telemetry = self._telemetry
        span = telemetry.continue_trace("check", message) if telemetry else nullcontext()
        try:
            with span:
                result: Any = await self._call(checker, message)
                verdict = to_verdict(result)
        except Exception as error:
            self.counts.failed += 1
            log.exception("checker failed transaction=%s", message.transaction_id)
            return Verdict.UNKNOWN, f"checker failed: {describe(error)}"
        if verdict is not Verdict.COMMIT:
            log.warning(
                "check answered with %s id=%s transaction=%s topic=%s",
                verdict.name,
                message.message_id,
                message.transaction_id,
                message.topic,
            )
        return verdict, ""

    def _find(self, message: ReceivedMessage) -> Checker | None:
        if message.transaction_name in self._by_name:
            return self._by_name[message.transaction_name]
        for key in ((message.topic, message.tags), (message.topic, ""), (ALL_TOPICS, "")):
            if key in self._by_topic:
                return self._by_topic[key]
        return None

    async def _call(self, checker: Checker, message: ReceivedMessage) -> Any:
        executor = self._executor if self._executor is not None else self._own_threads()
        return await run_callback(checker, message, executor=executor)

    def _own_threads(self) -> ThreadPoolExecutor:
        if self._threads is None:
            # A pool of its own: the default pool of the loop is small and shared with the
            # application, so checks could wait for the very work that they are about.
            self._threads = ThreadPoolExecutor(self._concurrency, "escrowmq-checker")
        return self._threads

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
            connection.send_oneway(RequestCode.END_TRANSACTION, end, remark=shorten(remark))
        except EscrowError as error:
            log.warning("verdict not sent, the broker will check again: %s", error)


def to_verdict(value: Any) -> Verdict:
    """Convert what a checker or listener returned; None is UNKNOWN. Raises ValueError."""
    if value is None:
        return Verdict.UNKNOWN
    if isinstance(value, bool) or value not in set(Verdict):
        raise ValueError(
            "a checker or listener returns Verdict.COMMIT, Verdict.ROLLBACK or Verdict.UNKNOWN, "
            f"not {value!r}"
        )
    return Verdict(value)
