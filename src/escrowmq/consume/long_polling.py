"""Pulls that wait for a message.

A pull is held in the same step as the read that found nothing, so no append comes in between. From
then on it leaves in one of three ways, once: a message arrives that it wants, its time is over, or
its line closes.

Every append asks whether somebody waits for it, so that question is one look into a dict. Answering
costs what waits on that one queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from escrowmq.message.record import QueueOffset

HELD_PULLS_MAX: Final = 100_000
HELD_PULLS_PER_CHANNEL_MAX: Final = 10_000
_HEAP_SLACK: Final = (
    64  # pulls that have left and may still lie in the heap, beside one per waiting one
)

P = TypeVar("P")
A = TypeVar("A")


@dataclass(slots=True, kw_only=True, eq=False)
class HeldPull(Generic[P]):
    topic: str
    queue_id: int
    queue_offset: QueueOffset
    due_ms: int  # answer it then, with nothing
    channel: Hashable
    payload: P  # the broker's own
    tag_filter: Callable[[int], bool] | None = None  # asked with tags codes; None: everything
    property_filter: Callable[[bytes], bool] | None = None  # the same, asked with properties
    is_held: bool = False


class LongPolls(Generic[P]):
    def __init__(
        self, *, pulls_max: int = HELD_PULLS_MAX, per_channel_max: int = HELD_PULLS_PER_CHANNEL_MAX
    ) -> None:
        self._pulls_max = pulls_max
        self._per_channel_max = per_channel_max
        self._queues: dict[tuple[str, int], dict[HeldPull[P], None]] = {}
        self._channels: dict[Hashable, dict[HeldPull[P], None]] = {}
        self._heap: list[tuple[int, int, HeldPull[P]]] = []  # due, order of coming
        self._count = 0
        self._sequence = 0

    def __len__(self) -> int:
        return self._count

    def add(self, pull: HeldPull[P]) -> bool:
        """False: too many wait already. Answer it now; its client will ask again."""
        on_line = self._channels.get(pull.channel, ())
        if self._count >= self._pulls_max or len(on_line) >= self._per_channel_max:
            return False
        self._queues.setdefault((pull.topic, pull.queue_id), {})[pull] = None
        self._channels.setdefault(pull.channel, {})[pull] = None
        self._sequence += 1
        heapq.heappush(self._heap, (pull.due_ms, self._sequence, pull))
        self._count += 1
        pull.is_held = True
        return True

    def has_pulls(self, topic: str, queue_id: int) -> bool:
        """Whether it is worth finding out the tags codes of what arrived."""
        return (topic, queue_id) in self._queues

    def take_ready(
        self,
        topic: str,
        queue_id: int,
        max_offset: int,
        tags_codes: Sequence[int] | None = None,
        properties: Sequence[bytes] | None = None,
    ) -> list[HeldPull[P]]:
        """The pulls to answer now, those that came first before the others.

        `tags_codes` and `properties` are those of the last messages before `max_offset`, in order;
        None if they are not known, and then every filter counts as accepting.
        """
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            return []
        ready = [pull for pull in queue if _is_ready(pull, max_offset, tags_codes, properties)]
        self._release(ready)
        return ready

    def expire(self, now_ms: int) -> list[HeldPull[P]]:
        """The pulls whose time is over, the earliest first."""
        heap = self._heap
        over: list[HeldPull[P]] = []
        while heap and (heap[0][0] <= now_ms or not heap[0][2].is_held):
            pull = heapq.heappop(heap)[2]
            if pull.is_held:
                over.append(pull)
                self._remove(pull)
        return over

    def next_due_ms(self) -> int | None:
        """When `expire` has something to do."""
        heap = self._heap
        while heap and not heap[0][2].is_held:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def channel_closed(self, channel: Hashable) -> list[HeldPull[P]]:
        """The pulls that nobody will hear the answer of."""
        gone = list(self._channels.get(channel, ()))
        self._release(gone)
        return gone

    def release_all(self) -> list[HeldPull[P]]:
        """At the end of the day: everybody is to be answered."""
        everybody = [pull for queue in self._queues.values() for pull in queue]
        self._release(everybody)
        return everybody

    def _release(self, pulls: Sequence[HeldPull[P]]) -> None:
        for pull in pulls:
            self._remove(pull)
        # What leaves early stays in the heap. On a busy queue that is nearly everything, for
        # many seconds each: clear it out when it is more than what waits.
        if len(self._heap) > 2 * self._count + _HEAP_SLACK:
            self._heap = [entry for entry in self._heap if entry[2].is_held]
            heapq.heapify(self._heap)

    def _remove(self, pull: HeldPull[P]) -> None:
        pull.is_held = False
        self._count -= 1
        key = pull.topic, pull.queue_id
        queue, on_line = self._queues[key], self._channels[pull.channel]
        del queue[pull], on_line[pull]
        if not queue:
            del self._queues[key]
        if not on_line:
            del self._channels[pull.channel]


def _is_ready(
    pull: HeldPull[P],
    max_offset: int,
    tags_codes: Sequence[int] | None,
    properties: Sequence[bytes] | None,
) -> bool:
    if pull.queue_offset >= max_offset:
        return False
    if pull.tag_filter is not None and tags_codes is not None:
        return any(map(pull.tag_filter, _messages_from(pull.queue_offset, max_offset, tags_codes)))
    if pull.property_filter is not None and properties is not None:
        return any(
            map(pull.property_filter, _messages_from(pull.queue_offset, max_offset, properties))
        )
    return True


def _messages_from(queue_offset: int, max_offset: int, values: Sequence[A]) -> Sequence[A]:
    before = queue_offset - (max_offset - len(values))  # arrived, but lie before what is wanted
    return values[before:] if before > 0 else values
