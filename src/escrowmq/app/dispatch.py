"""Dispatch: run the handlers of the messages that a consumer receives.

    Consumer ──> HandlerQueue of the topic ──> `concurrency` workers ──> handler ──> acknowledge
                      ▲                                                    │
                      └── in order: again after the delay ─────────────────┤ it raised
                                                retry_later, dead_letter ──┘

A handler has its own queue and workers, so a slow one delays no other. What waits there counts
against the limits of the consumer, so the queues stay short.

What always holds:
  - a message is acknowledged when its handler has returned, never before;
  - a message that waited here when its queue of the topic went to another member is not handled;
  - with `ordered`, a message is not started before those of its key that were stored earlier are
    done: their handler returned, or they are dead letters.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from escrowmq.app.databases import AsyncDatabase, BlockingDatabase, HandlerDatabase
from escrowmq.app.handlers import AppHandler
from escrowmq.client.callbacks import is_own_cancellation, keep_running, run_callback
from escrowmq.client.consumer.consumer import REDELIVERY_DELAY_S, Consumer
from escrowmq.client.consumer.fetcher import DeliveryQueue
from escrowmq.client.messages import Message, ReceivedMessage
from escrowmq.client.telemetry import Telemetry
from escrowmq.errors import EscrowError, InvalidPayload, LocalProtocolError
from escrowmq.message.names import SHARDING_KEY
from escrowmq.metrics import LATENCY_BOUNDS_S, Counter, Distribution, Gauge, Histogram, Samples

log = logging.getLogger(__name__)

RECEIVE_MAX: Final = 256  # messages that are taken from the consumer in one turn
SendMessage = Callable[[Message], Awaitable[object]]

HANDLED: Final = Counter(
    "escrowmq_app_messages_total",
    "Messages of a handler by outcome: done, retried or dead (moved to the dead letters).",
    ("handler", "topic", "outcome"),
)
HANDLER_SECONDS: Final = Histogram(
    "escrowmq_app_handler_seconds",
    "Duration of a handler with its database transaction; of a batch as a whole.",
    ("handler", "topic"),
)
RUNNING: Final = Gauge("escrowmq_app_running", "Handlers that run now.", ("handler", "topic"))
WAITING: Final = Gauge(
    "escrowmq_app_waiting", "Messages that wait for a free handler.", ("handler", "topic")
)


@dataclass(slots=True, eq=False)
class PendingMessage:
    """A message on its way through a handler. `failures` are those since it was received."""

    message: ReceivedMessage
    payload: Any = None
    failures: int = 0


@dataclass(slots=True)
class HandlerCounts:
    """What metrics say about one handler."""

    outcomes: dict[str, int] = field(default_factory=lambda: {"done": 0, "retried": 0, "dead": 0})
    seconds: Distribution = field(default_factory=lambda: Distribution(LATENCY_BOUNDS_S))
    running: int = 0


class HandlerQueue:
    """The messages that wait for one handler."""

    def __init__(self, handler: AppHandler) -> None:
        self.handler = handler
        self.counts = HandlerCounts()
        self._waiting: DeliveryQueue[str, PendingMessage] = DeliveryQueue(
            orderly=handler.ordered, is_shared=True
        )

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: ReceivedMessage) -> None:
        self._waiting.put(self._key(message), (PendingMessage(message),))

    def put_back(self, pending: PendingMessage) -> None:
        """Put a message back in front of the others of its key."""
        self._waiting.put_front(self._key(pending.message), pending)

    async def get(self) -> list[PendingMessage] | None:
        """Wait for the next message or batch; None once closed."""
        entries = await self._waiting.get_batch(self.handler.batch_size, None)
        return None if entries is None else [pending for _, pending in entries]

    def release(self, pending: PendingMessage) -> None:
        """Allow the next message of the same key."""
        self._waiting.release(self._key(pending.message))

    def close(self) -> None:
        self._waiting.close()

    def _key(self, message: ReceivedMessage) -> str:
        if not self.handler.ordered:
            return ""
        # Without a key, the order is that of the queue.
        key = message.properties.get(SHARDING_KEY)
        return f"{message.broker}:{message.queue_id}" if key is None else f"key {key}"


class Dispatcher:
    """Runs handlers until `stop`. `send` sends results of handlers without a transaction."""

    def __init__(
        self,
        consumer: Consumer,
        handlers: Sequence[AppHandler],
        *,
        database: HandlerDatabase | None,
        send: SendMessage,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._consumer = consumer
        self._database = database
        self._send = send
        self._telemetry = telemetry
        self.queues = [HandlerQueue(handler) for handler in handlers]
        self._by_topic: dict[str, list[HandlerQueue]] = {}
        for queue in self.queues:
            self._by_topic.setdefault(queue.handler.topic, []).append(queue)
            # Also for an operator who has one message handled: CONSUME_MESSAGE_DIRECTLY.
            consumer.on(queue.handler.topic, queue.handler.subscribed)(self._handle_directly)
        thread_count = sum(handler.concurrency for handler in handlers if self._in_thread(handler))
        self._threads = ThreadPoolExecutor(max(1, thread_count), "escrowmq-handler")
        self._receiver: asyncio.Task[None] | None = None
        self._workers: list[asyncio.Task[None]] = []
        self._timers: set[asyncio.TimerHandle] = set()

    # --- start and stop --------------------------------------------------------------------------

    def start(self) -> None:
        """Handle the messages that the consumer receives from now on."""
        self._receiver = asyncio.create_task(keep_running("receive", self._receive))
        self._workers = [
            asyncio.create_task(self._work(queue))
            for queue in self.queues
            for _ in range(queue.handler.concurrency)
        ]

    async def stop(self, timeout_s: float) -> int:
        """Start no handler any more, and wait for those that run.

        Return how many did not end in time. Coroutines among them are cancelled, threads continue.
        """
        if self._receiver is not None:
            self._receiver.cancel()
            await asyncio.gather(self._receiver, return_exceptions=True)
        for queue in self.queues:
            queue.close()
        late: set[asyncio.Task[None]] = set()
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=timeout_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        for timer in self._timers:
            timer.cancel()
        self._threads.shutdown(wait=False)
        if late:
            log.warning("cut off %d handlers that did not end in %g s", len(late), timeout_s)
        return len(late)

    def collect(self) -> Iterator[Samples]:
        """Yield the metrics of all handlers."""
        labels = {queue: (queue.handler.name, queue.handler.topic) for queue in self.queues}
        yield HANDLED.samples(
            ((*labels[queue], outcome), count)
            for queue in self.queues
            for outcome, count in queue.counts.outcomes.items()
        )
        yield HANDLER_SECONDS.samples((labels[q], q.counts.seconds) for q in self.queues)
        yield RUNNING.samples((labels[queue], queue.counts.running) for queue in self.queues)
        yield WAITING.samples((labels[queue], len(queue)) for queue in self.queues)

    # --- from the consumer to a handler ----------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            for message in await self._consumer.receive_batch(RECEIVE_MAX, auto_acknowledge=False):
                queue = self._find(message)
                if queue is not None:
                    queue.put(message)
                    continue
                # It was sent back by an earlier version of the application, for example.
                error = LocalProtocolError(f"no handler for {_describe(message)}")
                with contextlib.suppress(EscrowError):  # it comes again after a restart
                    await self._consumer.dead_letter(message, cause=error)

    def _find(self, message: ReceivedMessage) -> HandlerQueue | None:
        for queue in self._by_topic.get(message.topic, ()):
            if queue.handler.expression.matches_tag(message.tags):
                return queue
        return None

    async def _work(self, queue: HandlerQueue) -> None:
        while (batch := await queue.get()) is not None:
            try:
                await self._handle(queue, batch)
            except Exception:
                # A bug. Ending the worker would take one from the concurrency without a word.
                log.exception("message could not be handled, it comes again after a restart")
                for pending in batch:
                    queue.release(pending)

    async def _handle(self, queue: HandlerQueue, batch: Sequence[PendingMessage]) -> None:
        """Handle the messages of a batch, or the only one, whatever happens to it."""
        current = []
        for pending in batch:
            if not self._consumer.is_in_flight(pending.message):
                self._finish(queue, pending)  # another member has its queue now
                continue
            try:
                pending.payload = queue.handler.decode(pending.message)
            except InvalidPayload as error:
                await self._fail(queue, pending, error)
            else:
                current.append(pending)
        if not current:
            return
        try:
            await self._run_timed(queue, current)
        except (Exception, asyncio.CancelledError) as error:
            if is_own_cancellation(error):
                raise
            if len(current) == 1:
                await self._fail(queue, current[0], error)
                return
            # One message of the batch may be the reason, and the others must not share its fate.
            log.warning(
                "batch failed, handling its messages one by one handler=%s messages=%d: %r",
                queue.handler.name,
                len(current),
                error,
            )
            for pending in current:
                await self._handle(queue, [pending])
            return
        queue.counts.outcomes["done"] += len(current)
        for pending in current:
            self._finish(queue, pending)

    def _finish(self, queue: HandlerQueue, pending: PendingMessage) -> None:
        self._consumer.acknowledge(pending.message)
        queue.release(pending)

    # --- running a handler -----------------------------------------------------------------------

    async def _handle_directly(self, message: ReceivedMessage) -> None:
        """Run the handler of one message, and raise what it raises."""
        queue = self._find(message)
        if queue is None:
            raise LocalProtocolError(f"no handler for {_describe(message)}")
        await self._run_timed(queue, [PendingMessage(message, queue.handler.decode(message))])

    async def _run_timed(self, queue: HandlerQueue, batch: Sequence[PendingMessage]) -> None:
        loop, counts = asyncio.get_running_loop(), queue.counts
        messages = [pending.message for pending in batch]
        payloads = [pending.payload for pending in batch]
        began_s = loop.time()
        counts.running += 1
        try:
            if self._telemetry is None or len(messages) > 1:
                await self._run(queue.handler, messages, payloads)
            else:
                with self._telemetry.continue_trace("process", messages[0]):
                    await self._run(queue.handler, messages, payloads)
        finally:
            counts.running -= 1
            counts.seconds.observe(loop.time() - began_s)

    async def _run(
        self, handler: AppHandler, messages: list[ReceivedMessage], payloads: list[Any]
    ) -> None:
        """Run a handler with what belongs to it: the transaction, and the messages it sends."""
        database = self._database
        if database is not None and database.uses_transaction(handler):
            run = _run_async if isinstance(database, AsyncDatabase) else _run_blocking
            await self._call(handler, run, database, handler, messages, payloads)
            return
        result = await self._call(handler, handler.call, messages, payloads, None, None)
        for message in handler.messages_of(result):
            await self._send(message)

    async def _call(
        self, handler: AppHandler, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        if self._in_thread(handler):
            # A thread gets the context of this task, so that spans and context variables are seen.
            context = contextvars.copy_context()
            return await run_callback(function, *arguments, executor=self._threads, context=context)
        return await run_callback(_await_call, function, arguments)

    @staticmethod
    def _in_thread(handler: AppHandler) -> bool:
        return not handler.signature.is_async

    # --- failures --------------------------------------------------------------------------------

    async def _fail(
        self, queue: HandlerQueue, pending: PendingMessage, cause: BaseException
    ) -> None:
        """Have a message come again later, or move it to the dead letters."""
        handler, message = queue.handler, pending.message
        if not self._consumer.is_in_flight(message):
            self._finish(queue, pending)  # another member has its queue now, and gets it again
            return
        pending.failures += 1
        failures = message.reconsume_times + pending.failures
        delay_s = handler.retry.delay_s(failures)
        is_dead = isinstance(cause, InvalidPayload) or failures > handler.retry.times
        log.log(
            logging.WARNING if isinstance(cause, InvalidPayload) else logging.ERROR,
            "handler failed, %s handler=%s topic=%s id=%s failures=%d: %r",
            "giving up" if is_dead else f"again in {delay_s:g} s",
            handler.name,
            message.topic,
            message.message_id,
            failures,
            cause,
            exc_info=None if isinstance(cause, InvalidPayload) else cause,
        )
        if handler.ordered and not is_dead:
            queue.counts.outcomes["retried"] += 1
            self._redeliver(queue, pending, delay_s)
            return
        try:
            if is_dead:
                await self._consumer.dead_letter(message, cause=cause, attempts=failures)
            else:
                await self._consumer.retry_later(message, delay_s=delay_s, cause=cause)
        except EscrowError as error:
            log.warning(
                "message could not be sent back, redelivering in %g s id=%s: %s",
                REDELIVERY_DELAY_S,
                message.message_id,
                error,
            )
            self._redeliver(queue, pending, REDELIVERY_DELAY_S)
            return
        queue.counts.outcomes["dead" if is_dead else "retried"] += 1
        queue.release(pending)

    def _redeliver(self, queue: HandlerQueue, pending: PendingMessage, delay_s: float) -> None:
        """Handle a message here again after a delay, before the others of its key."""

        def put_back() -> None:
            self._timers.discard(timer)
            queue.put_back(pending)
            queue.release(pending)

        timer = asyncio.get_running_loop().call_later(delay_s, put_back)
        self._timers.add(timer)


async def _await_call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return await function(*arguments)


def _run_blocking(
    database: BlockingDatabase,
    handler: AppHandler,
    messages: list[ReceivedMessage],
    payloads: list[Any],
) -> None:
    """Run a function in a transaction, in the thread of the caller."""
    with database.transaction(messages, sends=handler.sends) as scope:
        if scope.new_ids:
            new = _select_new(messages, payloads, scope.new_ids)
            result = handler.call(*new, scope.session, scope.tx)
            for message in handler.messages_of(result):
                scope.tx.send(message)


async def _run_async(
    database: AsyncDatabase,
    handler: AppHandler,
    messages: list[ReceivedMessage],
    payloads: list[Any],
) -> None:
    """Run a coroutine function in a transaction."""
    async with database.transaction(messages, sends=handler.sends) as scope:
        if scope.new_ids:
            new = _select_new(messages, payloads, scope.new_ids)
            result = await handler.call(*new, scope.session, scope.tx)
            for message in handler.messages_of(result):
                await scope.tx.send(message)


def _select_new(
    messages: list[ReceivedMessage], payloads: list[Any], new_ids: frozenset[str]
) -> tuple[list[ReceivedMessage], list[Any]]:
    """Return the messages that had no effect before, each id once, and their payloads."""
    by_id = {
        message.message_id: (message, payload)
        for message, payload in zip(messages, payloads, strict=True)
        if message.message_id in new_ids
    }
    return [message for message, _ in by_id.values()], [payload for _, payload in by_id.values()]


def _describe(message: ReceivedMessage) -> str:
    return f"topic {message.topic!r} and tag {message.tags!r}"
