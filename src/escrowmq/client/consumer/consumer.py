"""Receive messages as a member of a group: the queues are shared out, each message goes to one.

    async with Consumer("127.0.0.1:9876", group="billing", subscribe={"orders": "*"}) as consumer:
        async for message in consumer:     # asking for the next acknowledges this one
            ...

    consumer = Consumer("127.0.0.1:9876", group="billing")

    @consumer.on("orders", "created || paid")
    async def handle(message): ...         # what it raises means: later

    await consumer.run()                   # until SIGTERM, SIGINT or close()

Leaving the loop by an exception does not acknowledge the message in hand: it comes again. So does
whatever was delivered and not acknowledged when a process dies: at least once, never less.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from escrowmq.client.access import Access
from escrowmq.client.consumer.broker_requests import BrokerRequests
from escrowmq.client.consumer.fetcher import ConsumerLimits, Delivery, QueueFetcher
from escrowmq.client.consumer.handlers import HandlerRegistry, MessageHandler
from escrowmq.client.consumer.offset_store import ConsumeFrom
from escrowmq.client.consumer.queue_client import (
    DEAD_LETTER_DELAY_LEVEL,
    DEFAULT_MAX_RECONSUME_TIMES,
    send_back,
)
from escrowmq.client.consumer.rebalance import (
    AssignmentStrategy,
    ConsumerSettings,
    Rebalancer,
    average,
)
from escrowmq.client.messages import MessageQueue, ReceivedMessage
from escrowmq.client.producer.request_reply import send_reply
from escrowmq.client.telemetry import Telemetry
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import LocalProtocolError, NotSent
from escrowmq.message.filter import FilterLike, Subscriptions, parse_filter

log = logging.getLogger(__name__)

REDELIVERY_DELAY_S: Final = (
    5.0  # a message that could not be given back is handed out here once more
)


class Consumer:
    """`subscribe`: topics, each with what is wanted of it: "*", "a || b", or an Sql(…).
    `start`: where a group that has never been here begins: "earliest", "latest" or a datetime.
    `share`: how queues are shared out, see `escrowmq.client.consumer.rebalance`.
    `orderly`: one message of a queue at a time; one that fails holds up its queue.
    `broadcast`: every member gets everything, and notes in the file `offsets` how far it is.
    `at_once`: how many handlers run at the same time. `stop_s`: how long `close` waits for them.
    `times_max`: so often a message comes again before it goes to the dead letters (16; orderly:
    for ever). `suspend_s`: orderly, the pause before it comes again.
    `telemetry`: True or a TracerProvider: a handler runs in a span of the producer's trace.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        group: str,
        subscribe: Subscriptions | None = None,
        start: ConsumeFrom = "earliest",
        assignment: AssignmentStrategy = average,
        orderly: bool = False,
        broadcast: bool = False,
        offsets_file: str | Path | None = None,
        concurrency: int = 20,
        shutdown_timeout_s: float = 30.0,
        max_reconsume_times: int | None = None,
        suspend_s: float = 1.0,
        limits: ConsumerLimits | None = None,
        namespace: str = "",
        telemetry: Any = None,
        clock: Clock | None = None,
        access: Access | None = None,
    ) -> None:
        if concurrency < 1:
            raise ValueError("at_once is at least 1")
        self.group = group
        habits = ConsumerSettings(
            start=start,
            assignment=assignment,
            orderly=orderly,
            broadcast=broadcast,
            offsets_file=None if offsets_file is None else Path(offsets_file),
            limits=limits or ConsumerLimits(),
            namespace=namespace,
        )
        self._orderly, self._broadcast = orderly, broadcast
        self._concurrency, self._shutdown_timeout_s = concurrency, shutdown_timeout_s
        self._max_reconsume_times, self._suspend_s = max_reconsume_times, suspend_s
        self._handlers = HandlerRegistry(concurrency, Telemetry.from_option(telemetry))
        self._broker_requests = BrokerRequests(self._handlers)
        self._clock = clock or SystemClock()
        self._rebalancer = Rebalancer(
            servers, group, habits, self._broker_requests.on_request, self._clock, access
        )
        self._broker_requests.rebalancer = self._rebalancer
        for topic, wanted in (subscribe or {}).items():
            self._rebalancer.subscribe(topic, parse_filter(wanted))
        self._in_flight: dict[int, tuple[QueueFetcher, Delivery]] = {}  # by the message's id()
        self._current: ReceivedMessage | None = None  # of who iterates
        self._workers: list[asyncio.Task[None]] = []
        self._retry_timers: set[asyncio.TimerHandle] = set()
        self._is_started = False
        self._stop_requested = asyncio.Event()
        self._close_task: asyncio.Task[None] | None = None

    # --- life ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Consumer:
        if not self._is_started:
            self._is_started = True
            await self._rebalancer.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is None:
            self._acknowledge()
        await self.close()

    async def run(self) -> None:
        """Hand messages to the functions that `on` registered until the process is told to stop
        (SIGTERM, SIGINT), or `stop` or `close` is called. What is in hand then is finished."""
        if not self._handlers.topics:
            raise LocalProtocolError("nothing to run: register a function with on() first")
        await self.__aenter__()
        try:
            with _stop_on_signals(self.stop):
                self._workers = [
                    asyncio.create_task(self._run_worker()) for _ in range(self._concurrency)
                ]
                await self._stop_requested.wait()
                await self.close()
        finally:
            await self.close()

    def stop(self) -> None:
        """From anywhere on the loop, a handler too: `run` ends when what is in hand is done."""
        self._stop_requested.set()

    async def close(self) -> None:
        """Finish what handlers have in hand, note what is done with, leave the group."""
        self.stop()
        if asyncio.current_task() in self._workers:
            return  # a handler: `run` goes on with it, once the handler has returned
        if self._close_task is None:
            self._close_task = asyncio.create_task(self._close())
        await asyncio.shield(self._close_task)

    async def _close(self) -> None:
        await self._rebalancer.stop()
        for timer in self._retry_timers:
            timer.cancel()
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=self._shutdown_timeout_s)
            if late:
                log.warning("%d handlers did not end in %g s", len(late), self._shutdown_timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*self._workers, return_exceptions=True)
        await self._broker_requests.close()
        self._handlers.close()
        await self._rebalancer.close()

    # --- messages, pushed ------------------------------------------------------------------------

    def on(
        self, topic: str, expression: FilterLike = "*"
    ) -> Callable[[MessageHandler], MessageHandler]:
        """Register a function for a topic, or for some tags of it. It is a coroutine, or runs in
        a thread. An exception means that the message comes again, later each time."""
        found = parse_filter(expression)

        def register(handler: MessageHandler) -> MessageHandler:
            before = self._rebalancer.subscription(topic)
            self._rebalancer.subscribe(topic, found if before is None else before | found)
            self._handlers.register(topic, found, handler)
            return handler

        return register

    async def _run_worker(self) -> None:
        while (got := await self._rebalancer.delivery_queue.get()) is not None:
            message = self._deliver(*got)
            try:
                await self._handlers.call(message)
            except (Exception, asyncio.CancelledError):
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise  # it is we who are to end; else something that the handler awaited
                log.exception("handler failed topic=%s id=%s", message.topic, message.message_id)
                await self._handle_failure(message)
            else:
                self._mark_done(message)

    async def _handle_failure(self, message: ReceivedMessage) -> None:
        pull, delivery = self._in_flight.get(id(message), (None, None))
        if pull is None or delivery is None:
            return  # the handler gave it back itself, and failed then
        if pull.is_dropped:
            self._mark_done(message)  # somebody else has it by now
            return
        if self._broadcast:
            self._mark_done(message)  # it has nowhere to go back to
            return
        try:
            await self.retry_later(message)
        except Exception as error:
            log.warning("not given back, it comes again here id=%s: %s", message.message_id, error)
            self._redeliver(pull, delivery, REDELIVERY_DELAY_S)

    # --- messages, one by one --------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        return self._messages()

    async def _messages(self) -> AsyncIterator[ReceivedMessage]:
        while (message := await self.next_message()) is not None:
            yield message
            self._acknowledge()

    async def receive(self) -> ReceivedMessage:
        """The next message. Asking for it acknowledges the one before."""
        message = await self.next_message()
        if message is None:
            raise NotSent("the consumer is closed")
        return message

    async def next_message(self) -> ReceivedMessage | None:
        """As `receive`, but None once it is closed."""
        self._acknowledge()
        got = await self._rebalancer.delivery_queue.get()
        self._current = None if got is None else self._deliver(*got)
        return self._current

    def _acknowledge(self) -> None:
        if self._current is not None:
            message, self._current = self._current, None
            self._mark_done(message)

    # --- back ------------------------------------------------------------------------------------

    async def retry_later(self, message: ReceivedMessage, *, delay_level: int = 0) -> None:
        """Give it back: it comes again after a while, longer each time, and in the end it goes to
        the dead letters of the group. `delay_level`: after so long; -1: to the dead letters now.
        An orderly consumer's comes again as the next of its queue, after `suspend_s`."""
        if id(message) not in self._in_flight:
            raise LocalProtocolError("only a message that is in hand can be given back")
        if self._broadcast:
            raise LocalProtocolError("who broadcasts has no group that a message could go back to")
        pull, delivery = self._in_flight[id(message)]
        limit = (
            DEFAULT_MAX_RECONSUME_TIMES
            if self._max_reconsume_times is None
            else self._max_reconsume_times
        )
        if self._orderly and delay_level != DEAD_LETTER_DELAY_LEVEL:
            if self._max_reconsume_times is None or message.reconsume_times < limit:
                self._redeliver(pull, delivery, self._suspend_s)
                return
            delay_level = DEAD_LETTER_DELAY_LEVEL
        await send_back(
            message,
            pull.queue,
            connect=self._rebalancer.heartbeat.connect,
            group=self._rebalancer.group,
            namespace=self._rebalancer.settings.namespace,
            delay_level=delay_level,
            max_reconsume_times=limit,
        )
        self._mark_done(message)

    async def reply(
        self,
        message: ReceivedMessage,
        body: bytes,
        *,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """To who sent it by `producer.request`. It is acknowledged as any other message is. Raises
        TransportError or RequestRefused."""
        if id(message) not in self._in_flight:
            raise LocalProtocolError("only a message that is in hand can be replied to")
        queue = self._in_flight[id(message)][0].queue
        await send_reply(
            message,
            body,
            properties or {},
            connection=await self._rebalancer.heartbeat.connect(queue.address),
            queue=queue,
            group=self._rebalancer.group,
            now_ms=self._clock.now_ms(),
        )

    def _redeliver(self, fetcher: QueueFetcher, delivery: Delivery, after_s: float) -> None:
        """Hand it out here once more, in front of what waits of its queue."""
        message = delivery.message
        self._in_flight.pop(id(message), None)
        once_more = replace(message, reconsume_times=message.reconsume_times + 1)

        def put() -> None:
            self._retry_timers.discard(timer)
            waiting = self._rebalancer.delivery_queue
            if fetcher.can_redeliver(delivery):
                waiting.put_front(fetcher, delivery._replace(message=once_more))
            waiting.release(fetcher)

        timer = asyncio.get_running_loop().call_later(after_s, put)
        self._retry_timers.add(timer)

    def _deliver(self, fetcher: QueueFetcher, delivery: Delivery) -> ReceivedMessage:
        self._in_flight[id(delivery.message)] = fetcher, delivery
        return delivery.message

    def _mark_done(self, message: ReceivedMessage) -> None:
        pull, delivery = self._in_flight.pop(id(message), (None, None))
        if pull is not None and delivery is not None:
            pull.mark_done(delivery)
            self._rebalancer.delivery_queue.release(pull)

    # --- what it has -----------------------------------------------------------------------------

    @property
    def assigned_queues(self) -> list[MessageQueue]:
        """Those that are this member's now."""
        return sorted(self._rebalancer.fetchers)


@contextlib.contextmanager
def _stop_on_signals(stop: Callable[[], Any]) -> Iterator[None]:
    """SIGTERM and SIGINT stop it, if this loop may have signals: in the main thread alone."""
    loop = asyncio.get_running_loop()
    taken = []
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            loop.add_signal_handler(number, stop)
            taken.append(number)
    try:
        yield
    finally:
        for number in taken:
            loop.remove_signal_handler(number)
