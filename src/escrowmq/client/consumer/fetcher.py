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

from escrowmq.client.consumer.offset_store import Places, Start
from escrowmq.client.consumer.queue_client import QueueCalls
from escrowmq.client.filters import Filter
from escrowmq.client.messages import Queue, ReceivedMessage
from escrowmq.errors import EscrowError


class Hand:
    def __init__(self, next_offset: int) -> None:
        self._next = next_offset
        self._open: dict[int, int] = {}  # queue offset: bytes, in the order they came
        self.bytes = 0

    def take(self, queue_offset: int, size: int = 0) -> None:
        """Offsets come in ascending order, as a queue has them."""
        self._open[queue_offset] = size
        self.bytes += size
        self._next = max(self._next, queue_offset + 1)

    def passed(self, next_offset: int) -> None:
        """Nothing of ours lies before it: what was between did not match."""
        self._next = max(self._next, next_offset)

    def done(self, queue_offset: int) -> int | None:
        """Its size; None if it was not in hand."""
        size = self._open.pop(queue_offset, None)
        if size is not None:
            self.bytes -= size
        return size

    def __len__(self) -> int:
        return len(self._open)

    @property
    def committable(self) -> int:
        return next(iter(self._open), self._next)

    @property
    def span(self) -> int:
        """How many would come again after a crash now, at most."""
        return self._next - self.committable


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
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


class Room:
    """What all queues of one consumer have in hand."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.messages = 0
        self.bytes = 0
        self._freed = asyncio.Event()

    async def wait(self, hand: Hand) -> None:
        """Until there is room for more of this queue."""
        while not self._has_room(hand):
            self._freed.clear()
            await self._freed.wait()

    def take(self, hand: Hand, queue_offset: int, size: int) -> None:
        hand.take(queue_offset, size)
        self.messages += 1
        self.bytes += size

    def done(self, hand: Hand, queue_offset: int) -> bool:
        """Whether it was in hand."""
        size = hand.done(queue_offset)
        if size is None:
            return False
        self.messages -= 1
        self.bytes -= size
        self._freed.set()
        return True

    def give_up(self, hand: Hand) -> None:
        """All of a queue that is somebody else's now."""
        self.messages -= len(hand)
        self.bytes -= hand.bytes
        self._freed.set()

    def _has_room(self, hand: Hand) -> bool:
        limits = self._limits
        return (
            len(hand) < limits.per_queue
            and hand.bytes < limits.per_queue_bytes
            and hand.span < limits.span
            and self.messages < limits.total
            and self.bytes < limits.total_bytes
        )


Q = TypeVar("Q", bound=Hashable)  # whose messages they are
M = TypeVar("M")


class Waiting(Generic[Q, M]):
    def __init__(self, *, orderly: bool = False) -> None:
        self._orderly = orderly
        self._messages: dict[Q, deque[M]] = {}
        self._turns: asyncio.Queue[Q | None] = asyncio.Queue()  # None: it is closed
        self._in_line: set[Q] = set()  # those that have a turn coming
        self._out: set[Q] = set()  # orderly: those with a message out
        self._paused: set[Q] = set()
        self._came_back = asyncio.Event()
        self._is_closed = False

    def __len__(self) -> int:
        return sum(map(len, self._messages.values()))

    def put(self, queue: Q, messages: Iterable[M]) -> None:
        self._messages.setdefault(queue, deque()).extend(messages)
        self._line_up(queue)

    def put_first(self, queue: Q, message: M) -> None:
        """Back to where it came from."""
        self._messages.setdefault(queue, deque()).appendleft(message)
        self._line_up(queue)

    async def get(self) -> tuple[Q, M] | None:
        """None once it is closed."""
        while True:
            queue = await self._turns.get()
            if queue is None:
                self._turns.put_nowait(None)  # for the next who asks
                return None
            if (message := self._take(queue)) is not None:
                return queue, message

    def get_nowait(self) -> tuple[Q, M] | None:
        """None if there is nothing."""
        while not self._turns.empty() and not self._is_closed:
            queue = self._turns.get_nowait()
            if queue is not None and (message := self._take(queue)) is not None:
                return queue, message
        return None

    def release(self, queue: Q) -> None:
        """The message that is out is done with."""
        self._out.discard(queue)
        self._came_back.set()
        self._line_up(queue)

    async def until_back(self, queue: Q) -> None:
        """Orderly: until no message of it is out."""
        while queue in self._out:
            self._came_back.clear()
            await self._came_back.wait()

    def pause(self, queue: Q) -> None:
        self._paused.add(queue)

    def resume(self, queue: Q) -> None:
        self._paused.discard(queue)
        self._line_up(queue)

    def drop(self, queue: Q) -> None:
        """What waits of it is not to be handed out."""
        self._messages.pop(queue, None)

    def forget(self, queue: Q) -> None:
        """It is somebody else's now."""
        self.drop(queue)
        self._paused.discard(queue)
        self._out.discard(queue)

    def close(self) -> None:
        """Nothing more is handed out."""
        if not self._is_closed:
            self._is_closed = True
            self._messages.clear()
            self._turns.put_nowait(None)

    def _take(self, queue: Q) -> M | None:
        self._in_line.discard(queue)
        messages = self._messages.get(queue)
        if not messages or queue in self._paused:
            return None
        message = messages.popleft()
        if self._orderly:
            self._out.add(queue)
        else:
            self._line_up(queue)
        return message

    def _line_up(self, queue: Q) -> None:
        if self._is_closed or queue in self._in_line or queue in self._out:
            return
        if queue not in self._paused and self._messages.get(queue):
            self._in_line.add(queue)
            self._turns.put_nowait(queue)


log = logging.getLogger(__name__)

PULLED: Final = 32
HOLD_S: Final = 15.0
PAUSE_S: Final = 1.0  # after something went wrong


class Delivery(NamedTuple):
    """A message, and the hand that it was taken into: a queue that is read from another place
    has a new one, and what was out before no longer counts."""

    message: ReceivedMessage
    hand: Hand


class QueuePull:
    def __init__(
        self,
        queue: Queue,
        wanted: Filter,
        *,
        version: int,
        start: Start,
        is_late: bool,
        calls: QueueCalls,
        places: Places,
        room: Room,
        waiting: Waiting[QueuePull, Delivery],
    ) -> None:
        self.queue = queue
        self._wanted = wanted
        self._version = version
        self._start = start
        self._is_late = is_late
        self._calls = calls
        self._places = places
        self._room = room
        self._waiting = waiting
        self._hand: Hand | None = None
        self._offset: int | None = None  # that of the next pull
        self._noted = -1
        self._may_pull = asyncio.Event()
        self._may_pull.set()
        self._task: asyncio.Task[None] | None = None
        self.is_given_up = False
        self._is_halted = False

    # --- life ------------------------------------------------------------------------------------

    def begin(self, *, grace_s: float = 0.0, at: int | None = None) -> None:
        """`at`: from this offset on, whatever was noted."""
        self._is_halted = False
        self._offset = at
        self._task = asyncio.create_task(self._run(grace_s))

    async def halt(self) -> None:
        """Pull nothing more and hand out nothing more. What is out can still be done with."""
        self._is_halted = True
        self._waiting.drop(self)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._waiting.drop(self)

    def give_up(self) -> None:
        """It is somebody else's now: what was out comes again there."""
        self.is_given_up = True
        self._waiting.forget(self)
        if self._hand is not None:
            self._room.give_up(self._hand)

    async def seek(self, offset: int) -> None:
        """Go on from there. What was out before no longer counts."""
        await self.halt()
        if self._hand is not None:
            self._room.give_up(self._hand)
        self._hand = Hand(offset)
        self._waiting.release(self)
        self.begin(at=offset)

    def want(self, wanted: Filter, version: int) -> None:
        """From the next message on. A pull that waits would pass by what is wanted only now."""
        self._wanted, self._version = wanted, version
        if self._task is not None and self._offset is not None and not self._is_halted:
            self._task.cancel()
            self.begin(at=self._offset)

    def pause(self) -> None:
        self._may_pull.clear()
        self._waiting.pause(self)

    def resume(self) -> None:
        self._may_pull.set()
        self._waiting.resume(self)

    # --- messages --------------------------------------------------------------------------------

    def done(self, delivery: Delivery) -> None:
        """It is processed, or somebody else's business now."""
        if delivery.hand is self._hand and not self.is_given_up:
            self._room.done(delivery.hand, delivery.message.queue_offset)

    def is_mine(self, delivery: Delivery) -> bool:
        """Whether it may be handed out here once more."""
        return delivery.hand is self._hand and not self._is_halted

    @property
    def position(self) -> int | None:
        """The first that is not done with; None before the first answer."""
        return None if self._hand is None else self._hand.committable

    @property
    def in_hand(self) -> tuple[int, int]:
        """Messages and bytes."""
        return (0, 0) if self._hand is None else (len(self._hand), self._hand.bytes)

    async def commit(self) -> None:
        """Note how far it is. Raises TransportError or RequestRefused."""
        wanted = self.position
        if wanted is not None and wanted != self._noted and not self.is_given_up:
            await self._places.write(self.queue, wanted)
            self._noted = wanted

    # --- pulling ---------------------------------------------------------------------------------

    async def _run(self, grace_s: float) -> None:
        await asyncio.sleep(grace_s)
        while True:
            try:
                if self._offset is None:
                    self._offset = await self._first()
                if self._hand is None:
                    self._hand = Hand(self._offset)
                await self._may_pull.wait()
                await self._room.wait(self._hand)
                self._offset = await self._pull(self._offset, self._hand)
            except EscrowError as error:
                log.warning("pull failed queue=%s: %s", self.queue, error)
                await asyncio.sleep(PAUSE_S)

    async def _first(self) -> int:
        noted = await self._places.read(self.queue, is_late=self._is_late)
        if noted is not None:
            return noted
        if self._start == "earliest" or self.queue.topic.startswith("%RETRY%"):
            offset = await self._calls.earliest(self.queue)
        elif self._start == "latest":
            offset = await self._calls.latest(self.queue)
        else:
            assert not isinstance(self._start, str)
            offset = await self._calls.at(self.queue, int(self._start.timestamp() * 1000))
        # At once: whoever takes over before the first message must not skip what came since.
        await self._places.write(self.queue, offset)
        return offset

    async def _pull(self, offset: int, hand: Hand) -> int:
        """Where to go on."""
        pulled = await self._calls.pull(
            self.queue, offset, self._wanted, version=self._version, most=PULLED, hold_s=HOLD_S
        )
        fresh = [message for message in pulled.messages if message.queue_offset >= offset]
        for message in fresh:
            self._room.take(hand, message.queue_offset, len(message.body))
        if pulled.next_offset < offset:
            # The queue ends before what we know of it: its broker has lost its end.
            log.warning("queue=%s goes back from %d to %s", self.queue, offset, pulled.next_offset)
            self._waiting.drop(self)
            self._room.give_up(hand)
            self._hand = None
            return pulled.next_offset
        hand.passed(pulled.next_offset)
        self._waiting.put(self, [Delivery(message, hand) for message in fresh])
        return pulled.next_offset
