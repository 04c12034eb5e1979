"""Long polling: pulls that found no message and wait for one.

A pull is held in the same step as the read that found nothing, so no append can come in between.
From then on it leaves exactly once, for one of three reasons: a message that it wants arrives, its
time is over, or its channel closes.

Every append checks whether a pull waits for its queue, so that check is one look into a dict. To
wake pulls costs as much as there are pulls held on that queue, so this is done in slices: `arrived`
notes the messages, and `take_ready` looks at no more pulls than it is told to.

When too many pulls are held, a channel with few gets room at the cost of the channel with most.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from escrowmq.client_memory import ClientMemory, MemoryUse
from escrowmq.consume.subscription import MATCH_ALL, MessageFilter
from escrowmq.errors import TableFull
from escrowmq.message.record import QueueOffset
from escrowmq.peer import Peer

HELD_PULLS_PER_CHANNEL_MAX: Final = 10_000
HELD_PULL_BYTES: Final = 1_500  # an estimate, with its request and without its filter
ARRIVALS_MAX: Final = 256  # of a queue that wait for being looked at; then all filters match
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
    is_held: bool = False
    # The last wake-up of its queue with whose messages it was compared, and the end of these.
    compared_wakeup: int = 0
    compared_offset: int = 0

    @property
    def retained_bytes(self) -> int:
        return HELD_PULL_BYTES + self.message_filter.retained_bytes


@dataclass(slots=True)
class _Wakeup:
    """Messages of a queue with which not all of its pulls have been compared.

    `arrivals` are the last messages before `max_offset`. None: they are unknown or too many.
    """

    number: int
    max_offset: int
    arrivals: list[Arrival] | None


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
        # The inner dicts are ordered sets. In a queue, the pull that was compared longest ago is
        # the first; if all were compared with the same messages, the pull that came first.
        self._queues: dict[tuple[str, int], OrderedDict[HeldPull[P], None]] = {}
        self._channels: dict[Peer, dict[HeldPull[P], None]] = {}
        self._heap: list[tuple[int, int, HeldPull[P]]] = []  # due time, sequence number, pull
        self._wakeups: dict[tuple[str, int], _Wakeup] = {}  # the oldest first
        self._wakeup_number = 0
        self._greediest: Peer | None = None  # the channel that had most pulls when it was searched
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
        key = pull.topic, pull.queue_id
        queue_pulls = self._queues.get(key)
        if queue_pulls is None:
            queue_pulls = self._queues[key] = OrderedDict()
        queue_pulls[pull] = None
        pull.compared_wakeup = self._wakeup_number  # it has just read what arrived before
        self._channels.setdefault(pull.channel, {})[pull] = None
        self._sequence += 1
        heapq.heappush(self._heap, (pull.due_ms, self._sequence, pull))
        self._count += 1
        pull.is_held = True
        return True

    def make_room(self, channel: Peer) -> HeldPull[P] | None:
        """Remove and return the newest pull of a greedy channel; respond to it now.

        Return None if there is room, or if this channel has its share: as many as the average.
        """
        own_count = len(self._channels.get(channel, ()))
        if self._count < self._pulls_max or own_count * len(self._channels) >= self._count:
            return None
        greedy = self._find_greedy(own_count + 2)
        if greedy is None:
            return None
        pull = next(reversed(self._channels[greedy]))
        self._release([pull])
        return pull

    def _find_greedy(self, count_min: int) -> Peer | None:
        """Return a channel with so many pulls or more, the greediest if it has to be searched."""
        # Looking at all channels for every pull would take long, so the channel that was found is
        # used again for as long as it has enough.
        channel = self._greediest
        if channel is None or len(self._channels.get(channel, ())) < count_min:
            channel = max(self._channels, key=lambda channel: len(self._channels[channel]))
            self._greediest = channel
        return channel if len(self._channels[channel]) >= count_min else None

    def has_pulls(self, topic: str, queue_id: int) -> bool:
        """Return whether pulls wait for this queue, so that its arrivals have to be collected."""
        return (topic, queue_id) in self._queues

    @property
    def has_wakeups(self) -> bool:
        """Whether `take_ready` has pulls to look at."""
        return bool(self._wakeups)

    def arrived(
        self,
        topic: str,
        queue_id: int,
        max_offset: int,
        arrivals: Sequence[Arrival] | None = None,
    ) -> None:
        """Note that messages were stored in a queue. `take_ready` returns the pulls they wake.

        `arrivals` are the last messages before `max_offset`, in order. With None they are unknown,
        and every filter counts as matching.
        """
        key = topic, queue_id
        if key not in self._queues:
            return
        self._wakeup_number += 1
        wakeup = self._wakeups.get(key)
        if wakeup is None:
            known = None if arrivals is None else list(arrivals)
            self._wakeups[key] = _Wakeup(self._wakeup_number, max_offset, known)
            return
        wakeup.number, wakeup.max_offset = self._wakeup_number, max_offset
        if wakeup.arrivals is not None:
            if arrivals is None or len(wakeup.arrivals) + len(arrivals) > ARRIVALS_MAX:
                wakeup.arrivals = None
            else:
                wakeup.arrivals += arrivals

    def take_ready(self, count_max: int) -> list[HeldPull[P]]:
        """Look at up to `count_max` pulls. Remove and return those to respond to now, in order."""
        ready: list[HeldPull[P]] = []
        while self._wakeups and count_max > 0:
            key, wakeup = next(iter(self._wakeups.items()))
            queue_pulls = self._queues.get(key)
            while queue_pulls and count_max > 0:
                pull = next(iter(queue_pulls))
                if pull.compared_wakeup >= wakeup.number:
                    break  # so have all behind it
                count_max -= 1
                if _is_ready(pull, wakeup.max_offset, wakeup.arrivals):
                    ready.append(pull)
                    self._remove(pull)
                else:
                    pull.compared_wakeup = wakeup.number
                    pull.compared_offset = wakeup.max_offset
                    queue_pulls.move_to_end(pull)
            if count_max > 0:
                del self._wakeups[key]
        self._release(())
        return ready

    def expire(self, now_ms: int, count_max: int | None = None) -> list[HeldPull[P]]:
        """Remove and return the pulls whose time is over, the earliest first.

        Returns no more than `count_max`; the others are returned by the next call.
        """
        heap = self._heap
        expired: list[HeldPull[P]] = []
        while heap and (heap[0][0] <= now_ms or not heap[0][2].is_held):
            if len(expired) == count_max:
                break
            pull = heapq.heappop(heap)[2]
            if pull.is_held:
                expired.append(pull)
                self._remove(pull)
        return expired

    def next_due_ms(self) -> int | None:
        """Return when `expire` will have something to do; None if no pull is held."""
        heap = self._heap
        while heap and not heap[0][2].is_held:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def channel_closed(self, channel: Peer) -> list[HeldPull[P]]:
        """Remove and return the pulls of a closed channel. No response can reach them."""
        closed = list(self._channels.get(channel, ()))
        self._release(closed)
        return closed

    def release_all(self) -> list[HeldPull[P]]:
        """Remove and return every pull, before the broker stops."""
        pulls = [pull for queue_pulls in self._queues.values() for pull in queue_pulls]
        self._release(pulls)
        return pulls

    def _release(self, pulls: Sequence[HeldPull[P]]) -> None:
        for pull in pulls:
            self._remove(pull)
        # A pull that leaves before its due time stays in the heap, because removing it from the
        # middle would cost a search. On a busy queue nearly all pulls leave early, and each would
        # stay for many seconds. So rebuild the heap once most of it has left; the slack keeps a
        # heap of a few pulls from being rebuilt all the time.
        if len(self._heap) > 2 * self._count + _HEAP_SLACK:
            self._heap = [entry for entry in self._heap if entry[2].is_held]
            heapq.heapify(self._heap)

    def _remove(self, pull: HeldPull[P]) -> None:
        pull.is_held = False
        self._count -= 1
        self._memory.release(pull.channel, MemoryUse.HELD_PULLS, pull.retained_bytes)
        key = pull.topic, pull.queue_id
        queue_pulls, channel_pulls = self._queues[key], self._channels[pull.channel]
        del queue_pulls[pull], channel_pulls[pull]
        if not queue_pulls:
            del self._queues[key]
        if not channel_pulls:
            del self._channels[pull.channel]
            if pull.channel is self._greediest:
                self._greediest = None


def _is_ready(pull: HeldPull[P], max_offset: int, arrivals: Sequence[Arrival] | None) -> bool:
    if pull.queue_offset >= max_offset:
        return False
    if arrivals is None or pull.message_filter.matches_all:
        return True
    # Arrivals before the offset of the pull, and those that it was compared with, do not count.
    first_offset = max_offset - len(arrivals)
    skipped = max(0, max(pull.queue_offset, pull.compared_offset) - first_offset)
    matches = pull.message_filter.matches
    return any(matches(tags_code, properties) for tags_code, properties in arrivals[skipped:])
