"""One queue of one consumer: pull while there is room, line up what came, note how far it is."""

from __future__ import annotations

import asyncio
import logging
from typing import Final, NamedTuple

from escrowmq.client.calls import QueueCalls
from escrowmq.client.filters import Filter
from escrowmq.client.hand import Hand
from escrowmq.client.limits import Room
from escrowmq.client.messages import Queue, ReceivedMessage
from escrowmq.client.places import Places, Start
from escrowmq.client.waiting import Waiting
from escrowmq.errors import EscrowError

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
