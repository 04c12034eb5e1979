"""The push consumer: receive messages as a member of a group, by iteration or by handlers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, overload

from escrowmq.client.access import Access
from escrowmq.client.callbacks import failure_report, wait_for_close
from escrowmq.client.consumer.broker_requests import BrokerRequests
from escrowmq.client.consumer.fetcher import ConsumerLimits, Delivery, QueueFetcher
from escrowmq.client.consumer.handlers import HandlerRegistry, HandlerT
from escrowmq.client.consumer.offset_store import ConsumeFrom
from escrowmq.client.consumer.queue_client import (
    DEAD_LETTER_DELAY_LEVEL,
    DEFAULT_MAX_RECONSUME_TIMES,
    delay_level_for,
)
from escrowmq.client.consumer.rebalance import (
    AssignmentStrategy,
    ConsumerSettings,
    Rebalancer,
    average,
)
from escrowmq.client.messages import DELAY_MAX_S, MessageQueue, Namespace, ReceivedMessage
from escrowmq.client.mistakes import (
    AsyncioClient,
    check_callable,
    check_seconds,
    check_topic_argument,
    short_traceback,
)
from escrowmq.client.producer.request_reply import send_reply
from escrowmq.client.telemetry import Telemetry
from escrowmq.client.termination import termination
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import ClientClosed, LocalProtocolError
from escrowmq.message.filter import FilterLike, Subscriptions, parse_filter, parse_subscriptions
from escrowmq.parsing import suggest_arguments

log = logging.getLogger(__name__)

RECEIVE_BATCH_SIZE: Final = 32
# A message that could not be sent back to its broker is delivered here again after this time.
REDELIVERY_DELAY_S: Final = 5.0
NOT_STARTED: Final = (
    "this consumer is not started: use it in a block, `async with Consumer(…) as consumer:`, or a "
    "plain `with` if it is from escrowmq.blocking"
)


@suggest_arguments
class Consumer(AsyncioClient):
    """A member of a consumer group. Each message goes to one member, at least once.

        async with Consumer(servers, group="billing", subscribe={"orders": "*"}) as consumer:
            async for message in consumer:     # asking for the next one acknowledges this one
                ...

        consumer = Consumer(servers, group="billing")

        @consumer.on("orders", "created || paid")
        async def handle(message): ...         # an exception makes the message come again

        await consumer.run()                   # until SIGTERM, SIGINT, stop() or close()

    A message that was delivered and not acknowledged comes again, to this member or another: if
    the process dies, and also if the loop is left by an exception. SIGTERM ends the program when
    it asks for the next message; see `escrowmq.client.termination`.

    `servers`: addresses of name servers, "127.0.0.1:9876" or several.
    `subscribe`: a topic, a list of topics, or a filter for each topic: "*", tags such as "a || b",
    or an `SqlFilter`.
    `start`: where a group without committed offsets starts: "earliest", "latest" or a datetime.
    `assignment`: how queues are divided, see `escrowmq.client.consumer.rebalance`. All members
    must use the same.
    `orderly`: process the messages of a queue one after the other; a message that fails holds up
    its queue and comes again after `suspend_s` seconds.
    `broadcast`: deliver every message to every member. Each stores its offsets in `offsets_file`
    (by default ~/.escrowmq/offsets/<group>.json). A failed message does not come again.
    `concurrency`: how many handlers run at the same time.
    `shutdown_timeout_s`: how long `close` waits for running handlers.
    `max_reconsume_times`: how often a failed message comes again before it moves to the dead
    letters. None is 16, and without end for an orderly consumer.
    `limits`: how many messages are kept in memory.
    `telemetry`: True or a TracerProvider, to run handlers in spans of the producer's trace.

    Raises ValueError or InvalidSubscription for invalid arguments.
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
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        self.group = group
        settings = ConsumerSettings(
            start=start,
            assignment=assignment,
            orderly=orderly,
            broadcast=broadcast,
            offsets_file=None if offsets_file is None else Path(offsets_file),
            limits=limits or ConsumerLimits(),
            namespace=Namespace(namespace),
        )
        self._orderly, self._broadcast = orderly, broadcast
        self._concurrency, self._shutdown_timeout_s = concurrency, shutdown_timeout_s
        self._max_reconsume_times, self._suspend_s = max_reconsume_times, suspend_s
        self._handlers = HandlerRegistry(concurrency, Telemetry.from_option(telemetry))
        self._broker_requests = BrokerRequests(self._handlers)
        self._clock = clock or SystemClock()
        self._rebalancer = self._broker_requests.rebalancer = Rebalancer(
            servers, group, settings, self._broker_requests.on_request, self._clock, access
        )
        for topic, expression in parse_subscriptions(subscribe).items():
            self._rebalancer.subscribe(topic, expression)
        # Delivered messages by their id(): equal messages can be delivered twice, and users only
        # hand the message back.
        self._in_flight: dict[int, tuple[QueueFetcher, Delivery]] = {}
        self._current: list[ReceivedMessage] = []  # what the last receive or iteration returned
        self._in_hand: set[int] = set()  # what the application acknowledges itself
        self._workers: list[asyncio.Task[None]] = []
        self._retry_timers: set[asyncio.TimerHandle] = set()
        self._is_started = False
        self._stop_requested = asyncio.Event()
        self._close_task: asyncio.Task[None] | None = None

    # --- start and stop --------------------------------------------------------------------------

    @short_traceback
    async def __aenter__(self) -> Consumer:
        self._rebalancer.heartbeat.check_usable()
        if not self._is_started:
            self._is_started = True
            await self._rebalancer.start()
            termination.watch(self)
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

    @short_traceback
    async def run(self) -> None:
        """Run the handlers until SIGTERM or SIGINT arrives, or `stop` or `close` is called.

        Handlers that run at that time are finished. Raises LocalProtocolError if no handler was
        registered with `on`, and what starting a consumer raises.
        """
        if not self._handlers.topics:
            raise LocalProtocolError("there are no handlers: register one with on() first")
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
        """Make `run` finish the running handlers and return. Call it on the event loop; handlers
        may call it too."""
        self._stop_requested.set()

    async def close(self) -> None:
        """Finish running handlers, commit, leave the group and disconnect."""
        self.stop()
        if asyncio.current_task() in self._workers:
            return  # called by a handler: run() closes the consumer when the handler has returned
        if self._close_task is None:
            self._close_task = asyncio.create_task(self._close())
        try:
            await wait_for_close(self._close_task, self._close)
        finally:
            await termination.unwatch_async(self)

    async def _close(self) -> None:
        await self._rebalancer.stop()
        for timer in self._retry_timers:
            timer.cancel()
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=self._shutdown_timeout_s)
            if late:
                log.warning(
                    "cancelled %d handlers that did not end in %g s",
                    len(late),
                    self._shutdown_timeout_s,
                )
            for task in late:
                task.cancel()
            await asyncio.gather(*self._workers, return_exceptions=True)
        await self._broker_requests.close()
        self._handlers.close()
        await self._rebalancer.close()

    # --- handlers --------------------------------------------------------------------------------

    def on(self, topic: str, expression: FilterLike = "*") -> Callable[[HandlerT], HandlerT]:
        """Register a handler for a topic, or for some tags of it; a decorator.

        A coroutine function runs on the event loop, a plain function in a thread. If the handler
        raises, the message comes again after a delay that grows each time. Raises
        InvalidSubscription for an invalid topic or filter, and TypeError if the handler does not
        take one message.
        """
        check_topic_argument(topic, "@consumer.on('orders')")
        parsed = parse_filter(expression)

        def register(handler: HandlerT) -> HandlerT:
            check_callable(handler, "a handler of messages", ("message",))
            subscribed = self._rebalancer.subscription(topic)
            self._rebalancer.subscribe(topic, parsed if subscribed is None else subscribed | parsed)
            self._handlers.register(topic, parsed, handler)
            return handler

        return register

    async def _run_worker(self) -> None:
        while (entry := await self._rebalancer.delivery_queue.get()) is not None:
            message = self._deliver(*entry)
            try:
                await self._handlers.call(message)
            except (Exception, asyncio.CancelledError) as error:
                # A CancelledError ends this worker only if the worker itself was cancelled, and
                # not a task that the handler awaited.
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
                log.exception("handler failed topic=%s id=%s", message.topic, message.message_id)
                await self._handle_failure(message, error)
            else:
                self._mark_done(message)

    async def _handle_failure(self, message: ReceivedMessage, cause: BaseException) -> None:
        fetcher, delivery = self._in_flight.get(id(message), (None, None))
        if fetcher is None or delivery is None:
            return  # the handler called retry_later() before it raised
        if fetcher.is_dropped or self._broadcast:
            # Another member has the queue now, or a broadcast message cannot be sent back.
            self._mark_done(message)
            return
        try:
            await self.retry_later(message, cause=cause)
        except Exception as error:
            log.warning(
                "message could not be sent back, redelivering in %g s id=%s: %s",
                REDELIVERY_DELAY_S,
                message.message_id,
                error,
            )
            self._redeliver(fetcher, delivery, REDELIVERY_DELAY_S)

    # --- iteration -------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        return self._messages()

    async def _messages(self) -> AsyncIterator[ReceivedMessage]:
        while (message := await self.next_message()) is not None:
            yield message
            self._acknowledge()

    @overload
    async def receive(self) -> ReceivedMessage: ...

    @overload
    async def receive(self, *, timeout_s: float | None) -> ReceivedMessage | None: ...

    async def receive(self, *, timeout_s: float | None = None) -> ReceivedMessage | None:
        """Wait for the next message. Acknowledges the one before, also if no message comes.

        Return None if none came within `timeout_s`; 0 does not wait, and None waits without end.
        Raises ClientClosed if the consumer is closed or was not started, and LocalProtocolError if
        it subscribes to no topic.
        """
        messages = await self.receive_batch(1, timeout_s=timeout_s)
        return messages[0] if messages else None

    async def receive_batch(
        self,
        max_messages: int = RECEIVE_BATCH_SIZE,
        *,
        timeout_s: float | None = None,
        auto_acknowledge: bool = True,
    ) -> list[ReceivedMessage]:
        """Wait for a message, and return it with others that have arrived, up to `max_messages`.

        Acknowledges all messages of the call before, except those given to `retry_later`. If the
        block of the consumer is left by an exception, the last batch comes again as a whole. An
        orderly consumer returns at most one message of each queue.

        With `auto_acknowledge=False` the messages of this call are not acknowledged by the next
        one, but one by one and in any order by `acknowledge`.

        Return an empty list if none came within `timeout_s`; 0 does not wait, and None waits
        without end. Raises what `receive` raises, and ValueError if `max_messages` is below 1.
        """
        check_seconds("timeout_s", timeout_s)
        if max_messages < 1:
            raise ValueError(f"max_messages must be at least 1, not {max_messages}")
        messages = await self._next_messages(
            max_messages, timeout_s, auto_acknowledge=auto_acknowledge
        )
        if messages is None:
            raise ClientClosed("the consumer is closed; create a new one to receive more")
        return messages

    async def next_message(self) -> ReceivedMessage | None:
        """Wait for the next message, as `receive` does; return None if the consumer is closed."""
        messages = await self._next_messages(1, None)
        return messages[0] if messages else None

    def acknowledge(self, message: ReceivedMessage) -> None:
        """Acknowledge a message. Has no effect if it is not in flight any more."""
        self._mark_done(message)

    def is_in_flight(self, message: ReceivedMessage) -> bool:
        """Return whether a message that was received is still this member's to process.

        It is not once it is acknowledged, or once another member has its queue, which delivers it
        there again.
        """
        fetcher, delivery = self._in_flight.get(id(message), (None, None))
        return fetcher is not None and delivery is not None and fetcher.can_redeliver(delivery)

    async def _next_messages(
        self, max_messages: int, timeout_s: float | None, *, auto_acknowledge: bool = True
    ) -> list[ReceivedMessage] | None:
        """Acknowledge the messages before and return the next ones; None once closed."""
        self._check_receiving()
        self._acknowledge()
        await termination.check_async(self)
        entries = await self._rebalancer.delivery_queue.get_batch(max_messages, timeout_s)
        if entries is None:
            return None
        messages = [self._deliver(*entry) for entry in entries]
        if auto_acknowledge:
            self._current = list(messages)
        else:
            self._in_hand.update(map(id, messages))
        return messages

    def _check_receiving(self) -> None:
        """Raise an error if no message would ever come."""
        if not self._is_started:
            raise ClientClosed(NOT_STARTED)
        self._rebalancer.heartbeat.check_owner()
        if not self._rebalancer.filters:
            raise LocalProtocolError(
                "this consumer subscribes to no topic: give subscribe=, or register handlers with "
                "on() and call run()"
            )

    @property
    def has_messages_in_hand(self) -> bool:
        """Whether messages were received and are not acknowledged yet. Handlers do not count."""
        return bool(self._current or self._in_hand)

    def _acknowledge(self) -> None:
        messages, self._current = self._current, []
        for message in messages:
            self._mark_done(message)

    # --- retries and replies ---------------------------------------------------------------------

    @short_traceback
    async def retry_later(
        self,
        message: ReceivedMessage,
        *,
        delay_level: int = 0,
        delay_s: float | None = None,
        cause: BaseException | str | None = None,
    ) -> None:
        """Have the message delivered again later, instead of acknowledging it.

        The delay grows with each time, or is RocketMQ's `delay_level` (1 is 1 s, 18 is 2 h by
        default); -1 moves the message to the dead letters, as does the end of
        `max_reconsume_times`. `delay_s` is exact with an EscrowMQ broker, which may be late by its
        `timerPrecisionMs`; Apache RocketMQ takes the next longer of its levels. An orderly consumer
        gets the message again as the next one of its queue, after `delay_s` or `suspend_s` seconds.

        `cause` is the exception that made it fail, or a text. Its type and text (1 KiB) are stored
        with the retry and the dead letter: see `message.failure`. Apache RocketMQ stores them only
        with the dead letter.

        Raises LocalProtocolError for a message that is not in flight or a broadcast consumer,
        ValueError for two delays or a negative one, TransportError or RequestRefused.
        """
        if delay_s is not None and (delay_level != 0 or not 0 <= delay_s < DELAY_MAX_S):
            raise ValueError(
                f"give delay_level or a delay_s from 0 to {DELAY_MAX_S}, not "
                f"delay_level={delay_level} and delay_s={delay_s}"
            )
        await self._send_back(message, delay_level, delay_s, cause, message.reconsume_times + 1)

    async def _send_back(
        self,
        message: ReceivedMessage,
        delay_level: int,
        delay_s: float | None,
        cause: BaseException | str | None,
        attempts: int,
    ) -> None:
        if id(message) not in self._in_flight:
            raise LocalProtocolError(
                "retry_later() needs a message of this consumer that is not acknowledged yet"
            )
        if self._broadcast:
            raise LocalProtocolError("a broadcast consumer cannot send messages back")
        fetcher, delivery = self._in_flight[id(message)]
        limit = self._max_reconsume_times
        if self._orderly and delay_level != DEAD_LETTER_DELAY_LEVEL:
            if limit is None or message.reconsume_times < limit:
                self._redeliver(fetcher, delivery, self._suspend_s if delay_s is None else delay_s)
                return
            delay_level, delay_s = DEAD_LETTER_DELAY_LEVEL, None
        await self._rebalancer.queue_client.send_back(
            message,
            fetcher.queue,
            delay_level=delay_level if delay_s is None else delay_level_for(delay_s),
            delay_ms=None if delay_s is None else max(1, round(delay_s * 1000)),
            max_reconsume_times=DEFAULT_MAX_RECONSUME_TIMES if limit is None else limit,
            report=failure_report(cause, attempts=attempts),
            now_ms=self._clock.now_ms(),
        )
        self._mark_done(message)

    @short_traceback
    async def dead_letter(
        self, message: ReceivedMessage, *, cause: BaseException | str, attempts: int = 0
    ) -> None:
        """Move a message to the dead letters of the group now, instead of acknowledging it.

        Use it for a message that no retry can help, such as one that cannot be decoded. `cause` is
        an exception or a text. Its type and text (1 KiB) are stored with the dead letter;
        `escrowmq message dead list` shows them. `attempts` is how often it was tried, if that is
        more often than it was delivered.

        Raises TypeError for any other cause, LocalProtocolError for a message that is not in flight
        or a broadcast consumer, TransportError or RequestRefused.
        """
        if not isinstance(cause, (BaseException, str)):
            raise TypeError(f"cause must be an exception or a string, not {cause!r}")
        message_id, topic = message.message_id, message.topic
        attempts = max(attempts, message.reconsume_times + 1)
        await self._send_back(message, DEAD_LETTER_DELAY_LEVEL, None, cause, attempts)
        log.warning(
            "message moved to the dead letters group=%s topic=%s id=%s: %s",
            self.group,
            topic,
            message_id,
            failure_report(cause).cause,
        )

    @short_traceback
    async def reply(
        self,
        message: ReceivedMessage,
        body: bytes,
        *,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Send a reply to the producer that sent the message with `producer.request`.

        The message is acknowledged like any other. Raises LocalProtocolError if it is not in
        flight or is no request, TransportError or RequestRefused.
        """
        if id(message) not in self._in_flight:
            raise LocalProtocolError(
                "reply() needs a message of this consumer that is not acknowledged yet"
            )
        queue = self._in_flight[id(message)][0].queue
        await send_reply(
            message,
            body,
            properties or {},
            connection=await self._rebalancer.heartbeat.connect(queue),
            queue=queue,
            group=self._rebalancer.group,
            now_ms=self._clock.now_ms(),
        )

    def _redeliver(self, fetcher: QueueFetcher, delivery: Delivery, delay_s: float) -> None:
        """Deliver a message here again after `delay_s`, before the others of its queue."""
        message = delivery.message
        self._in_hand.discard(id(message))
        self._in_flight.pop(id(message), None)
        retried = replace(message, reconsume_times=message.reconsume_times + 1)

        def put_back() -> None:
            self._retry_timers.discard(timer)
            delivery_queue = self._rebalancer.delivery_queue
            if fetcher.can_redeliver(delivery):
                delivery_queue.put_front(fetcher, delivery._replace(message=retried))
            delivery_queue.release(fetcher)

        timer = asyncio.get_running_loop().call_later(delay_s, put_back)
        self._retry_timers.add(timer)

    def _deliver(self, fetcher: QueueFetcher, delivery: Delivery) -> ReceivedMessage:
        self._in_flight[id(delivery.message)] = fetcher, delivery
        return delivery.message

    def _mark_done(self, message: ReceivedMessage) -> None:
        self._in_hand.discard(id(message))
        fetcher, delivery = self._in_flight.pop(id(message), (None, None))
        if fetcher is not None and delivery is not None:
            fetcher.mark_done(delivery)
            self._rebalancer.delivery_queue.release(fetcher)

    # --- state -----------------------------------------------------------------------------------

    @property
    def assigned_queues(self) -> list[MessageQueue]:
        """The queues that this member has now."""
        return sorted(self._rebalancer.fetchers)


@contextlib.contextmanager
def _stop_on_signals(stop: Callable[[], Any]) -> Iterator[None]:
    """Call `stop` on SIGTERM and SIGINT. Has no effect outside of the main thread, where an event
    loop cannot handle signals."""
    loop = asyncio.get_running_loop()
    handled = []
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            loop.add_signal_handler(number, stop)
            handled.append(number)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
