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
from escrowmq.client.consumer.broker_requests import Answering
from escrowmq.client.consumer.fetcher import Delivery, Limits, QueuePull
from escrowmq.client.consumer.handlers import Handler, Handlers
from escrowmq.client.consumer.offset_store import Start
from escrowmq.client.consumer.queue_client import DEAD, TIMES_MAX, send_back
from escrowmq.client.consumer.rebalance import Habits, Member, Strategy, average
from escrowmq.client.filters import Subscribed, Wanted, parse_filter
from escrowmq.client.messages import Queue, ReceivedMessage
from escrowmq.client.producer.request_reply import send_reply
from escrowmq.client.telemetry import Telemetry
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import LocalProtocolError, NotSent

log = logging.getLogger(__name__)

AGAIN_S: Final = 5.0  # a message that could not be given back is handed out here once more


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
        subscribe: Subscribed | None = None,
        start: Start = "earliest",
        share: Strategy = average,
        orderly: bool = False,
        broadcast: bool = False,
        offsets: str | Path | None = None,
        at_once: int = 20,
        stop_s: float = 30.0,
        times_max: int | None = None,
        suspend_s: float = 1.0,
        limits: Limits | None = None,
        namespace: str = "",
        telemetry: Any = None,
        clock: Clock | None = None,
        access: Access | None = None,
    ) -> None:
        if at_once < 1:
            raise ValueError("at_once is at least 1")
        self.group = group
        habits = Habits(
            start=start,
            share=share,
            orderly=orderly,
            broadcast=broadcast,
            offsets=None if offsets is None else Path(offsets),
            limits=limits or Limits(),
            namespace=namespace,
        )
        self._orderly, self._broadcast = orderly, broadcast
        self._at_once, self._stop_s = at_once, stop_s
        self._times_max, self._suspend_s = times_max, suspend_s
        self._handlers = Handlers(at_once, Telemetry.of(telemetry))
        self._answering = Answering(self._handlers)
        self._clock = clock or SystemClock()
        self._member = Member(servers, group, habits, self._answering.asked, self._clock, access)
        self._answering.member = self._member
        for topic, wanted in (subscribe or {}).items():
            self._member.subscribe(topic, parse_filter(wanted))
        self._out: dict[int, tuple[QueuePull, Delivery]] = {}  # by the message's id()
        self._in_hand: ReceivedMessage | None = None  # of who iterates
        self._workers: list[asyncio.Task[None]] = []
        self._later: set[asyncio.TimerHandle] = set()
        self._is_begun = False
        self._stopped = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None

    # --- life ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Consumer:
        if not self._is_begun:
            self._is_begun = True
            await self._member.begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._acknowledge()
        await self.close()

    async def run(self) -> None:
        """Hand messages to the functions that `on` registered until the process is told to stop
        (SIGTERM, SIGINT), or `stop` or `close` is called. What is in hand then is finished."""
        if not self._handlers.topics:
            raise LocalProtocolError("nothing to run: register a function with on() first")
        await self.__aenter__()
        try:
            with _on_signals(self.stop):
                self._workers = [asyncio.create_task(self._work()) for _ in range(self._at_once)]
                await self._stopped.wait()
                await self.close()
        finally:
            await self.close()

    def stop(self) -> None:
        """From anywhere on the loop, a handler too: `run` ends when what is in hand is done."""
        self._stopped.set()

    async def close(self) -> None:
        """Finish what handlers have in hand, note what is done with, leave the group."""
        self.stop()
        if asyncio.current_task() in self._workers:
            return  # a handler: `run` goes on with it, once the handler has returned
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._member.halt()
        for timer in self._later:
            timer.cancel()
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=self._stop_s)
            if late:
                log.warning("%d handlers did not end in %g s", len(late), self._stop_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*self._workers, return_exceptions=True)
        await self._answering.close()
        self._handlers.close()
        await self._member.end()

    # --- messages, pushed ------------------------------------------------------------------------

    def on(self, topic: str, wanted: Wanted = "*") -> Callable[[Handler], Handler]:
        """Register a function for a topic, or for some tags of it. It is a coroutine, or runs in
        a thread. An exception means that the message comes again, later each time."""
        found = parse_filter(wanted)

        def register(handler: Handler) -> Handler:
            before = self._member.wanted(topic)
            self._member.subscribe(topic, found if before is None else before | found)
            self._handlers.register(topic, found, handler)
            return handler

        return register

    async def _work(self) -> None:
        while (got := await self._member.waiting.get()) is not None:
            message = self._hand_out(*got)
            try:
                await self._handlers.call(message)
            except (Exception, asyncio.CancelledError):
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise  # it is we who are to end; else something that the handler awaited
                log.exception("handler failed topic=%s id=%s", message.topic, message.message_id)
                await self._failed(message)
            else:
                self._done(message)

    async def _failed(self, message: ReceivedMessage) -> None:
        pull, delivery = self._out.get(id(message), (None, None))
        if pull is None or delivery is None:
            return  # the handler gave it back itself, and failed then
        if pull.is_given_up:
            self._done(message)  # somebody else has it by now
            return
        if self._broadcast:
            self._done(message)  # it has nowhere to go back to
            return
        try:
            await self.later(message)
        except Exception as error:
            log.warning("not given back, it comes again here id=%s: %s", message.message_id, error)
            self._put_again(pull, delivery, AGAIN_S)

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
        got = await self._member.waiting.get()
        self._in_hand = None if got is None else self._hand_out(*got)
        return self._in_hand

    def _acknowledge(self) -> None:
        if self._in_hand is not None:
            message, self._in_hand = self._in_hand, None
            self._done(message)

    # --- back ------------------------------------------------------------------------------------

    async def later(self, message: ReceivedMessage, *, delay_level: int = 0) -> None:
        """Give it back: it comes again after a while, longer each time, and in the end it goes to
        the dead letters of the group. `delay_level`: after so long; -1: to the dead letters now.
        An orderly consumer's comes again as the next of its queue, after `suspend_s`."""
        if id(message) not in self._out:
            raise LocalProtocolError("only a message that is in hand can be given back")
        if self._broadcast:
            raise LocalProtocolError("who broadcasts has no group that a message could go back to")
        pull, delivery = self._out[id(message)]
        limit = TIMES_MAX if self._times_max is None else self._times_max
        if self._orderly and delay_level != DEAD:
            if self._times_max is None or message.reconsume_times < limit:
                self._put_again(pull, delivery, self._suspend_s)
                return
            delay_level = DEAD
        await send_back(
            message,
            pull.queue,
            line_to=self._member.membership.line_to,
            group=self._member.group,
            namespace=self._member.habits.namespace,
            delay_level=delay_level,
            times_max=limit,
        )
        self._done(message)

    async def reply(
        self,
        message: ReceivedMessage,
        body: bytes,
        *,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """To who sent it by `producer.request`. It is acknowledged as any other message is. Raises
        TransportError or RequestRefused."""
        if id(message) not in self._out:
            raise LocalProtocolError("only a message that is in hand can be replied to")
        queue = self._out[id(message)][0].queue
        await send_reply(
            message,
            body,
            properties or {},
            line=await self._member.membership.line_to(queue.address),
            queue=queue,
            group=self._member.group,
            now_ms=self._clock.now_ms(),
        )

    def _put_again(self, pull: QueuePull, delivery: Delivery, after_s: float) -> None:
        """Hand it out here once more, in front of what waits of its queue."""
        message = delivery.message
        self._out.pop(id(message), None)
        once_more = replace(message, reconsume_times=message.reconsume_times + 1)

        def put() -> None:
            self._later.discard(timer)
            waiting = self._member.waiting
            if pull.is_mine(delivery):
                waiting.put_first(pull, delivery._replace(message=once_more))
            waiting.release(pull)

        timer = asyncio.get_running_loop().call_later(after_s, put)
        self._later.add(timer)

    def _hand_out(self, pull: QueuePull, delivery: Delivery) -> ReceivedMessage:
        self._out[id(delivery.message)] = pull, delivery
        return delivery.message

    def _done(self, message: ReceivedMessage) -> None:
        pull, delivery = self._out.pop(id(message), (None, None))
        if pull is not None and delivery is not None:
            pull.done(delivery)
            self._member.waiting.release(pull)

    # --- what it has -----------------------------------------------------------------------------

    @property
    def queues(self) -> list[Queue]:
        """Those that are this member's now."""
        return sorted(self._member.pulls)


@contextlib.contextmanager
def _on_signals(stop: Callable[[], Any]) -> Iterator[None]:
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
