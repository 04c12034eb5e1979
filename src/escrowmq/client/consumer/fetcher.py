"""One queue of one consumer: pull while there is room, line up what came, note how far it is.

What a consumer has in hand of one queue, and how far that lets its group go on.

The offset that is committed is that of the first message not done with: after a crash nothing is
skipped, and what was done behind it comes again.

How much a consumer keeps in memory. At a bound, nothing more is pulled until there is room.

What a pull that is under way brings comes on top: one answer of a broker for each queue.

Messages that are pulled and not handed out yet: the queues in turn, so none waits for another.

Of an orderly consumer's queue one message is out at a time; the next follows when it is released.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from escrowmq.client.consumer.offset_store import ConsumeFrom, OffsetStore
from escrowmq.client.consumer.queue_client import QueueClient
from escrowmq.client.messages import MessageQueue, ReceivedMessage
from escrowmq.errors import EscrowError
from escrowmq.message.filter import FilterExpression
from escrowmq.message.names import RETRY_PREFIX


class InFlight:
    def __init__(self, next_offset: int) -> None:
        self._next_offset = next_offset
        self._sizes: dict[int, int] = {}  # queue offset: bytes, in the order they came
        self.body_bytes = 0

    def add(self, queue_offset: int, size: int = 0) -> None:
        """Offsets come in ascending order, as a queue has them."""
        self._sizes[queue_offset] = size
        self.body_bytes += size
        self._next_offset = max(self._next_offset, queue_offset + 1)

    def skip_to(self, next_offset: int) -> None:
        """Nothing of ours lies before it: what was between did not match."""
        self._next_offset = max(self._next_offset, next_offset)

    def remove(self, queue_offset: int) -> int | None:
        """Its size; None if it was not in hand."""
        size = self._sizes.pop(queue_offset, None)
        if size is not None:
            self.body_bytes -= size
        return size

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def commit_offset(self) -> int:
        return next(iter(self._sizes), self._next_offset)

    @property
    def span(self) -> int:
        """How many would come again after a crash now, at most."""
        return self._next_offset - self.commit_offset


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerLimits:
    """Messages that are pulled and not done with, and the bytes of their bodies."""

    per_queue: int = 1_000
    per_queue_bytes: int = 100 << 20
    total: int = 20_000
    total_bytes: int = 512 << 20
    span: int = 2_000  # from the first that is not done with to the last, in one queue

    def __post_init__(self) -> None:
        for name in ("per_queue", "per_queue_bytes", "total", "total_bytes", "span"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1")


class InFlightLimiter:
    """What all queues of one consumer have in hand."""

    def __init__(self, limits: ConsumerLimits) -> None:
        self._limits = limits
        self.message_count = 0
        self.body_bytes = 0
        self._capacity_freed = asyncio.Event()

    async def wait_for_capacity(self, in_flight: InFlight) -> None:
        """Until there is room for more of this queue."""
        while not self._has_capacity(in_flight):
            self._capacity_freed.clear()
            await self._capacity_freed.wait()

    def add(self, in_flight: InFlight, queue_offset: int, size: int) -> None:
        in_flight.add(queue_offset, size)
        self.message_count += 1
        self.body_bytes += size

    def remove(self, in_flight: InFlight, queue_offset: int) -> bool:
        """Whether it was in hand."""
        size = in_flight.remove(queue_offset)
        if size is None:
            return False
        self.message_count -= 1
        self.body_bytes -= size
        self._capacity_freed.set()
        return True

    def remove_all(self, in_flight: InFlight) -> None:
        """All of a queue that is somebody else's now."""
        self.message_count -= len(in_flight)
        self.body_bytes -= in_flight.body_bytes
        self._capacity_freed.set()

    def _has_capacity(self, in_flight: InFlight) -> bool:
        limits = self._limits
        return (
            len(in_flight) < limits.per_queue
            and in_flight.body_bytes < limits.per_queue_bytes
            and in_flight.span < limits.span
            and self.message_count < limits.total
            and self.body_bytes < limits.total_bytes
        )


Q = TypeVar("Q", bound=Hashable)  # whose messages they are
M = TypeVar("M")


class DeliveryQueue(Generic[Q, M]):
    def __init__(self, *, orderly: bool = False) -> None:
        self._orderly = orderly
        self._messages: dict[Q, deque[M]] = {}
        self._ready: asyncio.Queue[Q | None] = asyncio.Queue()  # None: it is closed
        self._scheduled: set[Q] = set()  # those that have a turn coming
        self._delivered: set[Q] = set()  # orderly: those with a message out
        self._paused: set[Q] = set()
        self._released = asyncio.Event()
        self._is_closed = False

    def __len__(self) -> int:
        return sum(map(len, self._messages.values()))

    def put(self, queue: Q, messages: Iterable[M]) -> None:
        self._messages.setdefault(queue, deque()).extend(messages)
        self._schedule(queue)

    def put_front(self, queue: Q, message: M) -> None:
        """Back to where it came from."""
        self._messages.setdefault(queue, deque()).appendleft(message)
        self._schedule(queue)

    async def get(self) -> tuple[Q, M] | None:
        """None once it is closed."""
        while True:
            queue = await self._ready.get()
            if queue is None:
                self._ready.put_nowait(None)  # for the next who asks
                return None
            if (message := self._pop(queue)) is not None:
                return queue, message

    def get_nowait(self) -> tuple[Q, M] | None:
        """None if there is nothing."""
        while not self._ready.empty() and not self._is_closed:
            queue = self._ready.get_nowait()
            if queue is not None and (message := self._pop(queue)) is not None:
                return queue, message
        return None

    def release(self, queue: Q) -> None:
        """The message that is out is done with."""
        self._delivered.discard(queue)
        self._released.set()
        self._schedule(queue)

    async def wait_released(self, queue: Q) -> None:
        """Orderly: until no message of it is out."""
        while queue in self._delivered:
            self._released.clear()
            await self._released.wait()

    def pause(self, queue: Q) -> None:
        self._paused.add(queue)

    def resume(self, queue: Q) -> None:
        self._paused.discard(queue)
        self._schedule(queue)

    def clear(self, queue: Q) -> None:
        """What waits of it is not to be handed out."""
        self._messages.pop(queue, None)

    def remove(self, queue: Q) -> None:
        """It is somebody else's now."""
        self.clear(queue)
        self._paused.discard(queue)
        self._delivered.discard(queue)

    def close(self) -> None:
        """Nothing more is handed out."""
        if not self._is_closed:
            self._is_closed = True
            self._messages.clear()
            self._ready.put_nowait(None)

    def _pop(self, queue: Q) -> M | None:
        self._scheduled.discard(queue)
        messages = self._messages.get(queue)
        if not messages or queue in self._paused:
            return None
        message = messages.popleft()
        if self._orderly:
            self._delivered.add(queue)
        else:
            self._schedule(queue)
        return message

    def _schedule(self, queue: Q) -> None:
        if self._is_closed or queue in self._scheduled or queue in self._delivered:
            return
        if queue not in self._paused and self._messages.get(queue):
            self._scheduled.add(queue)
            self._ready.put_nowait(queue)


log = logging.getLogger(__name__)

PULL_BATCH_SIZE: Final = 32
LONG_POLL_S: Final = 15.0
RETRY_PAUSE_S: Final = 1.0  # after something went wrong


class Delivery(NamedTuple):
    """A message, and the hand that it was taken into: a queue that is read from another place
    has a new one, and what was out before no longer counts."""

    message: ReceivedMessage
    in_flight: InFlight


class QueueFetcher:
    def __init__(
        self,
        queue: MessageQueue,
        expression: FilterExpression,
        *,
        version: int,
        start: ConsumeFrom,
        is_new_queue: bool,
        queue_client: QueueClient,
        offset_store: OffsetStore,
        limiter: InFlightLimiter,
        delivery_queue: DeliveryQueue[QueueFetcher, Delivery],
    ) -> None:
        self.queue = queue
        self._expression = expression
        self._version = version
        self._start = start
        self._is_new_queue = is_new_queue
        self._queue_client = queue_client
        self._offset_store = offset_store
        self._limiter = limiter
        self._delivery_queue = delivery_queue
        self._in_flight: InFlight | None = None
        self._next_offset: int | None = None  # that of the next pull
        self._committed_offset = -1
        self._can_pull = asyncio.Event()
        self._can_pull.set()
        self._task: asyncio.Task[None] | None = None
        self.is_dropped = False
        self._is_stopped = False

    # --- life ------------------------------------------------------------------------------------

    def start(self, *, grace_s: float = 0.0, offset: int | None = None) -> None:
        """`at`: from this offset on, whatever was noted."""
        self._is_stopped = False
        self._next_offset = offset
        self._task = asyncio.create_task(self._run(grace_s))

    async def stop(self) -> None:
        """Pull nothing more and hand out nothing more. What is out can still be done with."""
        self._is_stopped = True
        self._delivery_queue.clear(self)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._delivery_queue.clear(self)

    def drop(self) -> None:
        """It is somebody else's now: what was out comes again there."""
        self.is_dropped = True
        self._delivery_queue.remove(self)
        if self._in_flight is not None:
            self._limiter.remove_all(self._in_flight)

    async def seek(self, offset: int) -> None:
        """Go on from there. What was out before no longer counts."""
        await self.stop()
        if self._in_flight is not None:
            self._limiter.remove_all(self._in_flight)
        self._in_flight = InFlight(offset)
        self._delivery_queue.release(self)
        self.start(offset=offset)

    def change_filter(self, expression: FilterExpression, version: int) -> None:
        """From the next message on. A pull that waits would pass by what is wanted only now."""
        self._expression, self._version = expression, version
        if self._task is not None and self._next_offset is not None and not self._is_stopped:
            self._task.cancel()
            self.start(offset=self._next_offset)

    def pause(self) -> None:
        self._can_pull.clear()
        self._delivery_queue.pause(self)

    def resume(self) -> None:
        self._can_pull.set()
        self._delivery_queue.resume(self)

    # --- messages --------------------------------------------------------------------------------

    def mark_done(self, delivery: Delivery) -> None:
        """It is processed, or somebody else's business now."""
        if delivery.in_flight is self._in_flight and not self.is_dropped:
            self._limiter.remove(delivery.in_flight, delivery.message.queue_offset)

    def can_redeliver(self, delivery: Delivery) -> bool:
        """Whether it may be handed out here once more."""
        return delivery.in_flight is self._in_flight and not self._is_stopped

    @property
    def commit_offset(self) -> int | None:
        """The first that is not done with; None before the first answer."""
        return None if self._in_flight is None else self._in_flight.commit_offset

    @property
    def in_flight_totals(self) -> tuple[int, int]:
        """Messages and bytes."""
        return (
            (0, 0)
            if self._in_flight is None
            else (len(self._in_flight), self._in_flight.body_bytes)
        )

    async def commit(self) -> None:
        """Note how far it is. Raises TransportError or RequestRefused."""
        wanted = self.commit_offset
        if wanted is not None and wanted != self._committed_offset and not self.is_dropped:
            await self._offset_store.write(self.queue, wanted)
            self._committed_offset = wanted

    # --- pulling ---------------------------------------------------------------------------------

    async def _run(self, grace_s: float) -> None:
        await asyncio.sleep(grace_s)
        while True:
            try:
                if self._next_offset is None:
                    self._next_offset = await self._first_offset()
                if self._in_flight is None:
                    self._in_flight = InFlight(self._next_offset)
                await self._can_pull.wait()
                await self._limiter.wait_for_capacity(self._in_flight)
                self._next_offset = await self._pull(self._next_offset, self._in_flight)
            except EscrowError as error:
                log.warning("pull failed queue=%s: %s", self.queue, error)
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _first_offset(self) -> int:
        noted = await self._offset_store.read(self.queue, is_new_queue=self._is_new_queue)
        if noted is not None:
            return noted
        if self._start == "earliest" or self.queue.topic.startswith(RETRY_PREFIX):
            offset = await self._queue_client.earliest_offset(self.queue)
        elif self._start == "latest":
            offset = await self._queue_client.latest_offset(self.queue)
        else:
            assert not isinstance(self._start, str)
            offset = await self._queue_client.offset_at_time(
                self.queue, int(self._start.timestamp() * 1000)
            )
        # At once: whoever takes over before the first message must not skip what came since.
        await self._offset_store.write(self.queue, offset)
        return offset

    async def _pull(self, offset: int, in_flight: InFlight) -> int:
        """Where to go on."""
        pulled = await self._queue_client.pull(
            self.queue,
            offset,
            self._expression,
            version=self._version,
            max_messages=PULL_BATCH_SIZE,
            hold_s=LONG_POLL_S,
        )
        fresh = [message for message in pulled.messages if message.queue_offset >= offset]
        for message in fresh:
            self._limiter.add(in_flight, message.queue_offset, len(message.body))
        if pulled.next_offset < offset:
            # The queue ends before what we know of it: its broker has lost its end.
            log.warning("queue=%s goes back from %d to %s", self.queue, offset, pulled.next_offset)
            self._delivery_queue.clear(self)
            self._limiter.remove_all(in_flight)
            self._in_flight = None
            return pulled.next_offset
        in_flight.skip_to(pulled.next_offset)
        self._delivery_queue.put(self, [Delivery(message, in_flight) for message in fresh])
        return pulled.next_offset
