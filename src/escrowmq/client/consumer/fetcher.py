"""Fetch the messages of one queue: pull while the limits allow it, queue them for delivery, and
compute the offset that may be committed.

    QueueFetcher._run ──pull──> InFlight (per queue)  ──> DeliveryQueue ──> handler or iterator
           ▲                    InFlightLimiter (all queues)                     │
           └────── capacity ◀──────────── mark_done ◀────────────────────────────┘

The committed offset is that of the first message that is not done. After a crash no message is
skipped, and messages done after the first undone one are delivered again.
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
from escrowmq.client.messages import MessageQueue, ReceivedMessage, retained_bytes
from escrowmq.errors import EscrowError, LocalProtocolError
from escrowmq.limited_log import RepeatedLog
from escrowmq.message.filter import FilterExpression
from escrowmq.message.names import RETRY_PREFIX

log = logging.getLogger(__name__)

PULL_BATCH_SIZE: Final = 32
LONG_POLL_S: Final = 15.0
RETRY_PAUSE_S: Final = 1.0  # after a failed pull
# A broker holds a pull that finds nothing. One that answers sooner than this has not held it.
NOT_HELD_S: Final = 0.1
NOT_HELD_MAX: Final = 3  # such answers in a row before the fetcher pauses
FIRST_PAUSE_S: Final = 0.05  # then twice as long each time, up to RETRY_PAUSE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerLimits:
    """Limits of the messages that a consumer has in flight: pulled and not done.

    At a limit the consumer pulls no more until messages are done. Bytes are counted as the
    application gets them, decompressed and with properties; the last message may exceed a limit.
    Of messages, pulls that are on their way come on top: at most one response of a broker for each
    queue. Raises ValueError for a limit below 1.
    """

    per_queue: int = 1_000  # messages of one queue
    per_queue_bytes: int = 100 << 20  # and their bytes
    total: int = 20_000  # messages of all queues of the consumer
    total_bytes: int = 512 << 20
    span: int = 2_000  # offsets of one queue from the first message not done to the last pulled

    def __post_init__(self) -> None:
        for name in ("per_queue", "per_queue_bytes", "total", "total_bytes", "span"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


class Delivery(NamedTuple):
    """A message and the InFlight it was added to.

    A seek starts a new InFlight. Deliveries of the old one no longer count.
    """

    message: ReceivedMessage
    in_flight: InFlight


class QueueFetcher:
    """Pulls one queue in a background task and keeps track of its messages.

    `start` is where a group without a committed offset begins; `is_new_queue` says that the queue
    appeared while the consumer was running.
    """

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
        repeated_log: RepeatedLog | None = None,
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
        self._repeated_log = repeated_log or RepeatedLog(log)
        self._in_flight: InFlight | None = None
        self._next_offset: int | None = None  # of the next pull
        self._committed_offset = -1
        self._backoff = PullBackoff()
        self._can_pull = asyncio.Event()
        self._can_pull.set()
        self._task: asyncio.Task[None] | None = None
        self.is_dropped = False
        self._is_stopped = False

    # --- start and stop --------------------------------------------------------------------------

    def start(self, *, grace_s: float = 0.0, offset: int | None = None) -> None:
        """Pull from `offset`, or from the committed offset if it is None, after `grace_s`."""
        self._is_stopped = False
        self._next_offset = offset
        self._task = asyncio.create_task(self._run(grace_s))

    async def stop(self) -> None:
        """Stop pulling and delivering. Messages already delivered can still be marked done."""
        self._is_stopped = True
        self._delivery_queue.clear(self)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        # Once more: the pull may have returned while the task was being cancelled.
        self._delivery_queue.clear(self)

    def drop(self) -> None:
        """Give the queue up. Another member gets the messages that are not done."""
        self.is_dropped = True
        self._delivery_queue.remove(self)
        if self._in_flight is not None:
            self._limiter.remove_all(self._in_flight)

    async def seek(self, offset: int) -> None:
        """Continue at another offset. Messages delivered before no longer count."""
        await self.stop()
        if self._in_flight is not None:
            self._limiter.remove_all(self._in_flight)
        self._in_flight = InFlight(offset)
        self._delivery_queue.release(self)
        self.start(offset=offset)

    def change_filter(self, expression: FilterExpression, version: int) -> None:
        """Change the filter and restart a held pull, which would skip messages that match only
        the new filter."""
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
        """Count a message as done: processed, or sent back to the broker."""
        if delivery.in_flight is self._in_flight and not self.is_dropped:
            self._limiter.remove(delivery.in_flight, delivery.message.queue_offset)

    def can_redeliver(self, delivery: Delivery) -> bool:
        """Return whether the message may be delivered by this consumer once more."""
        return delivery.in_flight is self._in_flight and not self._is_stopped

    @property
    def commit_offset(self) -> int | None:
        """The offset of the first message not done; None before the first pull."""
        return None if self._in_flight is None else self._in_flight.commit_offset

    @property
    def in_flight_totals(self) -> tuple[int, int]:
        """The number of messages in flight, and their bytes."""
        if self._in_flight is None:
            return 0, 0
        return len(self._in_flight), self._in_flight.message_bytes

    async def commit(self) -> None:
        """Store the commit offset if it changed. Raises TransportError or RequestRefused."""
        offset = self.commit_offset
        if offset is not None and offset != self._committed_offset and not self.is_dropped:
            await self._offset_store.write(self.queue, offset)
            self._committed_offset = offset

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
                self._repeated_log.ended(self._pull_state)
                if pause_s := self._backoff.pause_s:
                    await asyncio.sleep(pause_s)
            except EscrowError as error:
                now_s = asyncio.get_running_loop().time()
                self._repeated_log.warning(
                    now_s,
                    self._pull_state,
                    "pull failed, retrying group=%s queue=%s: %s",
                    self._queue_client.group,
                    self.queue,
                    error,
                )
                await asyncio.sleep(RETRY_PAUSE_S)
            except Exception:
                # A bug. Ending the task would stop the queue without a word.
                log.exception("pull failed, retrying queue=%s", self.queue)
                await asyncio.sleep(RETRY_PAUSE_S)

    @property
    def _pull_state(self) -> str:
        """The state for which a failed pull is logged: the queues of a topic on a broker fail
        together."""
        return f"{self.queue.topic} {self.queue.broker}"

    async def _first_offset(self) -> int:
        committed = await self._offset_store.read(self.queue, is_new_queue=self._is_new_queue)
        if committed is not None:
            return committed
        # A message in the retry topic was sent back by this group, so it is never skipped.
        if self._start == "earliest" or self.queue.topic.startswith(RETRY_PREFIX):
            offset = await self._queue_client.earliest_offset(self.queue)
        elif self._start == "latest":
            offset = await self._queue_client.latest_offset(self.queue)
        else:
            assert not isinstance(self._start, str)
            offset = await self._queue_client.offset_at_time(
                self.queue, int(self._start.timestamp() * 1000)
            )
        # Commit at once. If another member took over before the first message was done, it would
        # start at a later "latest" and skip the messages that arrived in between.
        await self._offset_store.write(self.queue, offset)
        return offset

    async def _pull(self, offset: int, in_flight: InFlight) -> int:
        """Pull once and return the next offset."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        result = await self._queue_client.pull(
            self.queue,
            offset,
            self._expression,
            version=self._version,
            max_messages=PULL_BATCH_SIZE,
            hold_s=LONG_POLL_S,
            free_bytes=lambda: self._limiter.free_bytes(in_flight),
        )
        messages = result.messages
        is_progress = bool(messages) or result.next_offset > offset
        self._backoff.pull_ended(is_progress=is_progress, elapsed_s=loop.time() - began_s)
        for message in messages:
            self._limiter.add(in_flight, message.queue_offset, retained_bytes(message))
        if result.next_offset < offset:
            # The queue is shorter than before: its broker lost the end of its log. Messages at
            # these offsets will be new ones, so the ones in flight no longer count.
            log.warning(
                "queue=%s was cut off, continuing at %d instead of %d",
                self.queue,
                result.next_offset,
                offset,
            )
            self._delivery_queue.clear(self)
            self._limiter.remove_all(in_flight)
            self._in_flight = None
            return result.next_offset
        in_flight.skip_to(result.next_offset)
        self._delivery_queue.put(self, [Delivery(message, in_flight) for message in messages])
        return result.next_offset


class PullBackoff:
    """Tells how long to wait before the next pull, if a server does not hold pulls.

    A broker that may hold no more pulls answers at once, and so does a broken one. Without a pause
    the fetcher would pull again as fast as both of them can.
    """

    def __init__(self) -> None:
        self._not_held_count = 0

    def pull_ended(self, *, is_progress: bool, elapsed_s: float) -> None:
        if is_progress or elapsed_s >= NOT_HELD_S:
            self._not_held_count = 0
        else:
            self._not_held_count += 1

    @property
    def pause_s(self) -> float:
        exponent = min(self._not_held_count - NOT_HELD_MAX, 10)
        return min(RETRY_PAUSE_S, FIRST_PAUSE_S * 2.0**exponent) if exponent >= 0 else 0.0


# --- messages in flight --------------------------------------------------------------------------


class InFlight:
    """The messages of one queue that are in flight. `next_offset` is the one of the next pull."""

    def __init__(self, next_offset: int) -> None:
        self._next_offset = next_offset
        self._sizes: dict[int, int] = {}  # queue offset -> bytes, in ascending order of offsets
        self.message_bytes = 0

    def add(self, queue_offset: int, size: int = 0) -> None:
        """Add a message. Offsets must be added in ascending order."""
        self._sizes[queue_offset] = size
        self.message_bytes += size
        self._next_offset = max(self._next_offset, queue_offset + 1)

    def skip_to(self, next_offset: int) -> None:
        """Move past messages that did not match the filter."""
        self._next_offset = max(self._next_offset, next_offset)

    def remove(self, queue_offset: int) -> int | None:
        """Remove a message and return its size; None if it is not in flight."""
        size = self._sizes.pop(queue_offset, None)
        if size is not None:
            self.message_bytes -= size
        return size

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def commit_offset(self) -> int:
        """The offset of the first message not done, or of the next pull if all are done."""
        return next(iter(self._sizes), self._next_offset)

    @property
    def span(self) -> int:
        """The number of offsets that would be read again after a crash now."""
        return self._next_offset - self.commit_offset


class InFlightLimiter:
    """Totals over all queues of one consumer, and the wait for capacity."""

    def __init__(self, limits: ConsumerLimits) -> None:
        self._limits = limits
        self.message_count = 0
        self.message_bytes = 0
        self._capacity_freed = asyncio.Event()

    async def wait_for_capacity(self, in_flight: InFlight) -> None:
        """Wait until the limits allow to pull more messages of this queue."""
        while not self._has_capacity(in_flight):
            self._capacity_freed.clear()
            await self._capacity_freed.wait()

    def free_bytes(self, in_flight: InFlight) -> int:
        """Return how many bytes of this queue may be added; none if a limit is reached."""
        if not self._has_capacity(in_flight):
            return 0
        return min(
            self._limits.per_queue_bytes - in_flight.message_bytes,
            self._limits.total_bytes - self.message_bytes,
        )

    def add(self, in_flight: InFlight, queue_offset: int, size: int) -> None:
        in_flight.add(queue_offset, size)
        self.message_count += 1
        self.message_bytes += size

    def remove(self, in_flight: InFlight, queue_offset: int) -> bool:
        """Remove a message. Return whether it was in flight."""
        size = in_flight.remove(queue_offset)
        if size is None:
            return False
        self.message_count -= 1
        self.message_bytes -= size
        self._capacity_freed.set()
        return True

    def remove_all(self, in_flight: InFlight) -> None:
        """Take all messages of a queue out of the totals."""
        self.message_count -= len(in_flight)
        self.message_bytes -= in_flight.message_bytes
        self._capacity_freed.set()

    def _has_capacity(self, in_flight: InFlight) -> bool:
        limits = self._limits
        return (
            len(in_flight) < limits.per_queue
            and in_flight.message_bytes < limits.per_queue_bytes
            and in_flight.span < limits.span
            and self.message_count < limits.total
            and self.message_bytes < limits.total_bytes
        )


# --- messages that wait for delivery -------------------------------------------------------------

Q = TypeVar("Q", bound=Hashable)  # the key of a queue
M = TypeVar("M")


class DeliveryQueue(Generic[Q, M]):
    """Messages that were pulled and not delivered yet.

    Queues take turns, one message each, so that a busy queue does not delay the others. With
    `orderly`, at most one message of a queue is delivered at a time; `release` allows the next.
    Only one call of `get_batch` may wait, unless it `is_shared` by several tasks.
    """

    def __init__(self, *, orderly: bool = False, is_shared: bool = False) -> None:
        self._orderly = orderly
        self._is_shared = is_shared
        self._messages: dict[Q, deque[M]] = {}
        self._ready: asyncio.Queue[Q | None] = asyncio.Queue()  # turns; None: closed
        self._scheduled: set[Q] = set()  # queues that have a turn in `_ready`
        self._delivered: set[Q] = set()  # orderly: queues with a message that is not released
        self._paused: set[Q] = set()
        self._released = asyncio.Event()
        self._is_waiting = False  # a call of get_batch() does
        self._is_closed = False

    def __len__(self) -> int:
        return sum(map(len, self._messages.values()))

    def put(self, queue: Q, messages: Iterable[M]) -> None:
        self._messages.setdefault(queue, deque()).extend(messages)
        self._schedule(queue)

    def put_front(self, queue: Q, message: M) -> None:
        """Put a message back in front of the others of its queue."""
        self._messages.setdefault(queue, deque()).appendleft(message)
        self._schedule(queue)

    async def get(self) -> tuple[Q, M] | None:
        """Wait for the next message; None once closed."""
        while True:
            queue = await self._ready.get()
            if queue is None:
                self._ready.put_nowait(None)  # for the next caller
                return None
            if (message := self._pop(queue)) is not None:
                return queue, message

    def get_nowait(self) -> tuple[Q, M] | None:
        """Return the next message; None if there is none now."""
        while not self._ready.empty() and not self._is_closed:
            queue = self._ready.get_nowait()
            if queue is not None and (message := self._pop(queue)) is not None:
                return queue, message
        return None

    async def get_batch(
        self, max_messages: int, timeout_s: float | None
    ) -> list[tuple[Q, M]] | None:
        """Wait for a message, and return it with others that are there; None once closed.

        The list is empty if no message came within `timeout_s`; None waits without end. Raises
        LocalProtocolError if another call waits and must not.
        """
        if self._is_waiting and not self._is_shared:
            raise LocalProtocolError(
                "another task or thread waits for messages of this consumer, and each would "
                "acknowledge those of the other; use handlers with run(), or a consumer for each"
            )
        if (first := self.get_nowait()) is None:
            self._is_waiting = True
            try:
                async with asyncio.timeout(timeout_s):
                    first = await self.get()
            except TimeoutError:
                return []
            finally:
                self._is_waiting = False
        if first is None:
            return None
        batch = [first]
        while len(batch) < max_messages and (entry := self.get_nowait()) is not None:
            batch.append(entry)
        return batch

    def release(self, queue: Q) -> None:
        """Allow the next message of an orderly queue."""
        self._delivered.discard(queue)
        self._released.set()
        self._schedule(queue)

    async def wait_released(self, queue: Q) -> None:
        """Wait until no message of an orderly queue is delivered and not released."""
        while queue in self._delivered:
            self._released.clear()
            await self._released.wait()

    def pause(self, queue: Q) -> None:
        self._paused.add(queue)

    def resume(self, queue: Q) -> None:
        self._paused.discard(queue)
        self._schedule(queue)

    def clear(self, queue: Q) -> None:
        """Discard the waiting messages of a queue."""
        self._messages.pop(queue, None)

    def remove(self, queue: Q) -> None:
        """Discard the messages and the state of a queue."""
        self.clear(queue)
        self._paused.discard(queue)
        self._delivered.discard(queue)

    def close(self) -> None:
        """Discard all messages and make `get` return None."""
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
        if not messages:
            del self._messages[queue]
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
