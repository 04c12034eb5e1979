"""How much a consumer keeps in memory. At a bound, nothing more is pulled until there is room.

What a pull that is under way brings comes on top: one answer of a broker for each queue.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from escrowmq.client.hand import Hand


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
