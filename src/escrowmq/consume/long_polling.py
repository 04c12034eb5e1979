"""Long polling: pulls that found no message and wait for one.

A pull is held in the same step as the read that found nothing, so no append can come in between.
From then on it leaves exactly once, for one of three reasons: a message that it wants arrives, its
time is over, or its channel closes.

Every append checks whether a pull waits for its queue, so that check is one look into a dict. To
wake pulls costs as much as there are pulls held on that queue. There may be very many, so they are
released one by one (`release_ready`, `release_expired`), and their owner may pause in between. Each
channel has its turn: one that holds thousands of pulls does not delay the pulls of others.

When too many pulls are held, a channel with few gets room at the cost of the channel with most.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Generic, TypeVar

from escrowmq.client_memory import ClientMemory, MemoryUse
from escrowmq.consume.subscription import MATCH_ALL, MessageFilter
from escrowmq.errors import TableFull
from escrowmq.fair_shares import FairShares
from escrowmq.message.record import QueueOffset
from escrowmq.peer import Peer

HELD_PULLS_PER_CHANNEL_MAX: Final = 10_000
# What a held pull takes with its request, and without its filter. The names of its topic and group
# have at most 255 bytes each. Measured on CPython 3.11 by tests/unit/test_memory_estimates.py:
# 1,900 bytes for one of many pulls of a connection, 3,100 for the only one.
HELD_PULL_BYTES: Final = 3_500
_HEAP_SLACK: Final = 64

Arrival = tuple[int, bytes]  # tags code and encoded properties of a message that was just stored

P = TypeVar("P")


@dataclass(slots=True, kw_only=True, eq=False)
class HeldPull(Generic[P]):
    """One pull that waits. `payload` is what its owner needs to respond to it."""

    topic: str
    queue_id: int
    queue_offset: QueueOffset
    due_ms: int  # respond without a message then
    channel: Peer
    payload: P
    message_filter: MessageFilter = MATCH_ALL
    sequence: int = 0  # set while it is held

    @property
    def is_held(self) -> bool:
        return self.sequence > 0

    @property
    def retained_bytes(self) -> int:
        return HELD_PULL_BYTES + self.message_filter.retained_bytes


class LongPolls(Generic[P]):
    """The held pulls of a broker, by queue, by channel and by due time."""

    def __init__(
        self,
        *,
        pulls_max: int,
        per_channel_max: int = HELD_PULLS_PER_CHANNEL_MAX,
        memory: ClientMemory | None = None,
    ) -> None:
        self._memory = ClientMemory() if memory is None else memory
        self._pulls_max = pulls_max
        self._per_channel_max = per_channel_max
        # The inner dicts are ordered sets: pulls of a channel that came first are woken first.
        self._queues: dict[tuple[str, int], dict[Peer, dict[HeldPull[P], None]]] = {}
        self._channels: dict[Peer, dict[HeldPull[P], None]] = {}
        # The heap has no pulls, only their numbers: a pull that leaves early is freed at once, and
        # not with thousands of others when the heap is rebuilt.
        self._heap: list[tuple[int, int]] = []  # due time, sequence number
        self._by_sequence: dict[int, HeldPull[P]] = {}
        self._shares: FairShares[Peer] = FairShares()  # pulls of each channel
        self._count = 0
        self._sequence = 0

    def __len__(self) -> int:
        return self._count

    def add(self, pull: HeldPull[P]) -> bool:
        """Hold a pull. Return False if too many are held; respond to it now in that case."""
        channel_pulls = self._channels.get(pull.channel, ())
        if self._count >= self._pulls_max or len(channel_pulls) >= self._per_channel_max:
            return False
        try:
            self._memory.reserve(pull.channel, MemoryUse.HELD_PULLS, pull.retained_bytes)
        except TableFull:
            return False
        queue_channels = self._queues.setdefault((pull.topic, pull.queue_id), {})
        queue_channels.setdefault(pull.channel, {})[pull] = None
        self._channels.setdefault(pull.channel, {})[pull] = None
        self._sequence += 1
        pull.sequence = self._sequence
        self._by_sequence[pull.sequence] = pull
        heapq.heappush(self._heap, (pull.due_ms, pull.sequence))
        self._count += 1
        self._shares.add(pull.channel, 1)
        return True

    def make_room(self, channel: Peer) -> HeldPull[P] | None:
        """Remove and return the newest pull of a greedy channel; respond to it now.

        Return None if there is room, or if this channel and its origin have their share.
        """
        if self._count < self._pulls_max:
            return None
        greedy = self._shares.find_greedy(channel)
        if greedy is None:
            return None
        pull = next(reversed(self._channels[greedy]))
        self._release([pull])
        return pull

    def has_pulls(self, topic: str, queue_id: int) -> bool:
        """Return whether pulls wait for this queue, so that its arrivals have to be collected."""
        return (topic, queue_id) in self._queues

    def take_ready(
        self,
        topic: str,
        queue_id: int,
        max_offset: int,
        arrivals: Sequence[Arrival] | None = None,
    ) -> list[HeldPull[P]]:
        """Remove and return all pulls that `release_ready` yields."""
        pulls = self.release_ready(topic, queue_id, max_offset, arrivals)
        return [pull for pull in pulls if pull is not None]

    def release_ready(
        self,
        topic: str,
        queue_id: int,
        max_offset: int,
        arrivals: Sequence[Arrival] | None = None,
    ) -> Iterator[HeldPull[P] | None]:
        """Remove and yield the pulls to respond to now; yield None for one that goes on waiting.

        The first pull of every channel comes first, then the second of every channel, and so on.
        Pulls that are held after the call are not looked at. `arrivals` are the last messages
        before `max_offset`, in order. With None they are unknown, and every filter counts as
        matching.
        """
        channels = self._queues.get((topic, queue_id))
        if channels is None:
            return
        # Each list is used up from its end, so that a pull is freed as soon as it is responded to.
        # To free a hundred thousand of them at once would take 0.1 s.
        rounds = deque(list(reversed(pulls)) for pulls in channels.values())
        while rounds:
            if not rounds[0]:
                rounds.popleft()
                continue
            pull = rounds[0].pop()
            rounds.rotate(-1)
            if pull.is_held and _is_ready(pull, max_offset, arrivals):
                self._remove(pull)
                yield pull
            else:
                yield None
        self._shrink_heap()

    def expire(self, now_ms: int) -> list[HeldPull[P]]:
        """Remove and return the pulls whose time is over, the earliest first."""
        return list(self.release_expired(now_ms))

    def release_expired(self, now_ms: int) -> Iterator[HeldPull[P]]:
        """Remove and yield the pulls whose time is over, the earliest first."""
        heap, by_sequence = self._heap, self._by_sequence
        while heap and (heap[0][0] <= now_ms or heap[0][1] not in by_sequence):
            pull = by_sequence.get(heapq.heappop(heap)[1])
            if pull is not None:
                self._remove(pull)
                yield pull
            heap = self._heap  # it may have been rebuilt meanwhile

    def next_due_ms(self) -> int | None:
        """Return when `expire` will have something to do; None if no pull is held."""
        heap = self._heap
        while heap and heap[0][1] not in self._by_sequence:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def channel_closed(self, channel: Peer, *, count_max: int | None = None) -> list[HeldPull[P]]:
        """Remove and return the pulls of a closed channel. No response can reach them.

        With `count_max`, remove no more than so many; call it again while there are any.
        """
        closed = list(islice(self._channels.get(channel, ()), count_max))
        self._release(closed)
        return closed

    def release_all(self) -> list[HeldPull[P]]:
        """Remove and return every pull, before the broker stops."""
        pulls = [
            pull
            for channels in self._queues.values()
            for channel_pulls in channels.values()
            for pull in channel_pulls
        ]
        self._release(pulls)
        return pulls

    def _release(self, pulls: Sequence[HeldPull[P]]) -> None:
        for pull in pulls:
            self._remove(pull)
        self._shrink_heap()

    def _shrink_heap(self) -> None:
        # A pull that leaves before its due time stays in the heap, because removing it from the
        # middle would cost a search. On a busy queue nearly all pulls leave early, and each would
        # stay for many seconds. So rebuild the heap once most of it has left; the slack keeps a
        # heap of a few pulls from being rebuilt all the time.
        if len(self._heap) > 2 * self._count + _HEAP_SLACK:
            self._heap = [entry for entry in self._heap if entry[1] in self._by_sequence]
            heapq.heapify(self._heap)

    def _remove(self, pull: HeldPull[P]) -> None:
        del self._by_sequence[pull.sequence]
        pull.sequence = 0
        self._count -= 1
        self._shares.add(pull.channel, -1)
        self._memory.release(pull.channel, MemoryUse.HELD_PULLS, pull.retained_bytes)
        key, channel = (pull.topic, pull.queue_id), pull.channel
        queue_channels, channel_pulls = self._queues[key], self._channels[channel]
        queue_pulls = queue_channels[channel]
        del queue_pulls[pull], channel_pulls[pull]
        if not queue_pulls:
            del queue_channels[channel]
        if not queue_channels:
            del self._queues[key]
        if not channel_pulls:
            del self._channels[channel]


def _is_ready(pull: HeldPull[P], max_offset: int, arrivals: Sequence[Arrival] | None) -> bool:
    if pull.queue_offset >= max_offset:
        return False
    if arrivals is None or pull.message_filter.matches_all:
        return True
    # A pull may wait for an offset further ahead: arrivals before it do not count.
    skipped = max(0, pull.queue_offset - (max_offset - len(arrivals)))
    candidates = arrivals[skipped:]
    if len(candidates) > pull.message_filter.scan_max:
        return True  # too many to test here; the read that follows continues where it stops
    matches = pull.message_filter.matches
    return any(matches(tags_code, properties) for tags_code, properties in candidates)
