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

WAITING_MAX: Final = 100_000
WAITING_PER_LINE_MAX: Final = 10_000
_SLACK: Final = 64  # pulls that have left and may still lie in the heap, beside one per waiting one

P = TypeVar("P")
A = TypeVar("A")


@dataclass(slots=True, kw_only=True, eq=False)
class HeldPull(Generic[P]):
    topic: str
    queue_id: int
    wanted: QueueOffset
    due_ms: int  # answer it then, with nothing
    line: Hashable
    payload: P  # the broker's own
    accepts: Callable[[int], bool] | None = None  # asked with tags codes; None: everything
    wants: Callable[[bytes], bool] | None = None  # the same, asked with properties
    is_waiting: bool = False


class WaitingPulls(Generic[P]):
    def __init__(
        self, *, waiting_max: int = WAITING_MAX, per_line_max: int = WAITING_PER_LINE_MAX
    ) -> None:
        self._waiting_max = waiting_max
        self._per_line_max = per_line_max
        self._queues: dict[tuple[str, int], dict[HeldPull[P], None]] = {}
        self._lines: dict[Hashable, dict[HeldPull[P], None]] = {}
        self._heap: list[tuple[int, int, HeldPull[P]]] = []  # due, order of coming
        self._count = 0
        self._number = 0

    def __len__(self) -> int:
        return self._count

    def add(self, pull: HeldPull[P]) -> bool:
        """False: too many wait already. Answer it now; its client will ask again."""
        on_line = self._lines.get(pull.line, ())
        if self._count >= self._waiting_max or len(on_line) >= self._per_line_max:
            return False
        self._queues.setdefault((pull.topic, pull.queue_id), {})[pull] = None
        self._lines.setdefault(pull.line, {})[pull] = None
        self._number += 1
        heapq.heappush(self._heap, (pull.due_ms, self._number, pull))
        self._count += 1
        pull.is_waiting = True
        return True

    def has(self, topic: str, queue_id: int) -> bool:
        """Whether it is worth finding out the tags codes of what arrived."""
        return (topic, queue_id) in self._queues

    def arrived(
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
        ready = [pull for pull in queue if _wants(pull, max_offset, tags_codes, properties)]
        self._release(ready)
        return ready

    def expire(self, now_ms: int) -> list[HeldPull[P]]:
        """The pulls whose time is over, the earliest first."""
        heap = self._heap
        over: list[HeldPull[P]] = []
        while heap and (heap[0][0] <= now_ms or not heap[0][2].is_waiting):
            pull = heapq.heappop(heap)[2]
            if pull.is_waiting:
                over.append(pull)
                self._remove(pull)
        return over

    def next_due_ms(self) -> int | None:
        """When `expire` has something to do."""
        heap = self._heap
        while heap and not heap[0][2].is_waiting:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def line_closed(self, line: Hashable) -> list[HeldPull[P]]:
        """The pulls that nobody will hear the answer of."""
        gone = list(self._lines.get(line, ()))
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
        if len(self._heap) > 2 * self._count + _SLACK:
            self._heap = [entry for entry in self._heap if entry[2].is_waiting]
            heapq.heapify(self._heap)

    def _remove(self, pull: HeldPull[P]) -> None:
        pull.is_waiting = False
        self._count -= 1
        key = pull.topic, pull.queue_id
        queue, on_line = self._queues[key], self._lines[pull.line]
        del queue[pull], on_line[pull]
        if not queue:
            del self._queues[key]
        if not on_line:
            del self._lines[pull.line]


def _wants(
    pull: HeldPull[P],
    max_offset: int,
    tags_codes: Sequence[int] | None,
    properties: Sequence[bytes] | None,
) -> bool:
    if pull.wanted >= max_offset:
        return False
    if pull.accepts is not None and tags_codes is not None:
        return any(map(pull.accepts, _from(pull.wanted, max_offset, tags_codes)))
    if pull.wants is not None and properties is not None:
        return any(map(pull.wants, _from(pull.wanted, max_offset, properties)))
    return True


def _from(wanted: int, max_offset: int, arrived: Sequence[A]) -> Sequence[A]:
    before = wanted - (max_offset - len(arrived))  # arrived, but lie before what is wanted
    return arrived[before:] if before > 0 else arrived
