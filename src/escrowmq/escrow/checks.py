"""What an escrow may hold and how long it waits, and what it has seen so far.

When each half is to be asked about: what is due now costs its own number, not that of the rest.

Half-queue offsets lie in slots of a tenth of a second, eight bytes each. Nothing is taken out when
a half is decided: whoever takes a slot looks at each half anyway, and finds it gone.

Who is asked about a half that nobody decided, and how many at once.

What is due waits in the backlog of its group until somebody of the group has room: the line that it
came by if it lives and answers, else the others in turn. A line has room for so many unanswered
questions a second; one that never answers is not asked faster than that, and does not hold the
others up.
A backlog of which nobody is there waits for whoever comes first, and nothing of it counts as asked.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Final

from escrowmq.escrow.half_table import Half
from escrowmq.metrics import Distribution

# RocketMQ's bounds for the time from half to decision, and the times in which most of ours end.
FINISH_BUCKETS_S: Final = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 5, 15, 60, 300, 1800, 7200, 86400)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorRules:
    immunity_ms: int = 6_000
    interval_ms: int = 30_000
    checks_max: int = 15
    age_max_ms: int = 72 * 3_600_000
    backoff: float = 1.0  # each wait is so many times the one before
    backoff_max_ms: int = 3_600_000
    open_count_max: int = 2_000_000
    open_bytes_max: int = 64 << 30
    group_open_count_max: int = 1_000_000
    group_open_bytes_max: int = 32 << 30
    piece_bytes: int = 1 << 20  # of a decision over many halves goes to the log at a time
    intervals_ms: dict[str, int] = field(default_factory=dict)  # by topic or group
    immunities_ms: dict[str, int] = field(default_factory=dict)

    def check_immunity_ms(self, topic: str, group: str, requested_ms: int | None) -> int:
        """How long a half is left alone: as it wishes itself, or its topic, or its group."""
        if requested_ms is not None:
            return requested_ms
        by_topic, by_group = self.immunities_ms.get(topic), self.immunities_ms.get(group)
        return by_topic or by_group or self.immunity_ms

    def check_interval_ms(self, topic: str, group: str, checks: int) -> int:
        """How long to wait after so many checks."""
        by_topic, by_group = self.intervals_ms.get(topic), self.intervals_ms.get(group)
        interval = by_topic or by_group or self.interval_ms
        if self.backoff > 1 and checks > 1:
            grown = interval * self.backoff ** min(checks - 1, 64)
            interval = max(interval, int(min(grown, self.backoff_max_ms)))
        return interval


@dataclass(slots=True)
class TransactionCounters:
    """Since the start; shown as metrics."""

    parked: int = 0
    committed: dict[str, int] = field(default_factory=dict)  # by topic
    rolled_back: dict[str, int] = field(default_factory=dict)
    stranded: int = 0
    finish_seconds: Distribution = field(default_factory=lambda: Distribution(FINISH_BUCKETS_S))
    repeated_ends: int = 0
    conflicts: int = 0
    duplicate_sends: int = 0
    unreadable_halves: int = 0


SLOT_MS: Final = 100


class CheckSchedule:
    def __init__(self) -> None:
        self._slots: dict[int, array[int]] = {}
        self._slot_heap: list[int] = []  # a heap of the slots there are
        self._last_due_ms, self._last_slot = -1, array("q")  # most come in runs for the same time

    def add(self, queue_offset: int, due_ms: int) -> None:
        if due_ms != self._last_due_ms:
            self._last_due_ms, self._last_slot = (
                due_ms,
                self._get_or_create_slot(-(-due_ms // SLOT_MS)),
            )
        self._last_slot.append(queue_offset)

    def _get_or_create_slot(self, slot_number: int) -> array[int]:
        """By its end: nothing in it comes up before its time."""
        slot = self._slots.get(slot_number)
        if slot is None:
            slot = self._slots[slot_number] = array("q")
            heapq.heappush(self._slot_heap, slot_number)
        return slot

    def take_due(self, now_ms: int, count_max: int) -> list[int]:
        """What is due, the longest overdue first, at most so many; the rest is due still."""
        found: list[int] = []
        self._last_due_ms = -1  # its slot may go
        while self._slot_heap and self._slot_heap[0] * SLOT_MS <= now_ms and len(found) < count_max:
            number = self._slot_heap[0]
            slot = self._slots[number]
            wanted = count_max - len(found)
            if len(slot) <= wanted:
                found += slot
                del self._slots[number]
                heapq.heappop(self._slot_heap)
            else:
                found += slot[-wanted:]  # from the end, or taking a million would cost its square
                del slot[-wanted:]
        return found

    def next_due_ms(self) -> int | None:
        return self._slot_heap[0] * SLOT_MS if self._slot_heap else None


UNANSWERED_CHECKS_MAX: Final = 100
CHECK_TIMEOUT_MS: Final = 1_000


class CheckBacklog:
    def __init__(self, *, unanswered_max: int = UNANSWERED_CHECKS_MAX) -> None:
        self._unanswered_max = unanswered_max
        self._unanswered: dict[Hashable, OrderedDict[int, int]] = {}
        self._channel_by_offset: dict[int, Hashable] = {}
        self._backlogs: dict[str, deque[int]] = {}

    # --- what waits ------------------------------------------------------------------------------

    def add(self, half: Half) -> None:
        backlog = self._backlogs.get(half.group)
        if backlog is None:
            backlog = self._backlogs[half.group] = deque()
        backlog.append(half.queue_offset)

    def groups(self) -> list[str]:
        return list(self._backlogs)

    def size(self, group: str) -> int:
        return len(self._backlogs.get(group, ()))

    def take(self, group: str) -> Iterator[int]:
        """What waits, first come first; whoever stops early leaves the rest where it is."""
        backlog = self._backlogs.get(group)
        while backlog:
            yield backlog.popleft()
        if backlog is not None:
            self._backlogs.pop(group, None)

    def put_back(self, half: Half) -> None:
        self._backlogs.setdefault(half.group, deque()).appendleft(half.queue_offset)

    # --- who has room ----------------------------------------------------------------------------

    def has_capacity(self, channel: Hashable, now_ms: int) -> bool:
        unanswered = self._unanswered.get(channel)
        if unanswered is None:
            return True
        while unanswered and next(iter(unanswered.values())) <= now_ms - CHECK_TIMEOUT_MS:
            offset, _ = unanswered.popitem(last=False)
            self._channel_by_offset.pop(offset, None)
        return len(unanswered) < self._unanswered_max

    def check_sent(self, channel: Hashable, half: Half, now_ms: int) -> None:
        self.check_answered(half.queue_offset)
        self._unanswered.setdefault(channel, OrderedDict())[half.queue_offset] = now_ms
        self._channel_by_offset[half.queue_offset] = channel

    def check_answered(self, queue_offset: int) -> None:
        line = self._channel_by_offset.pop(queue_offset, None)
        if line is not None and line in self._unanswered:
            self._unanswered[line].pop(queue_offset, None)

    def channel_closed(self, channel: Hashable) -> None:
        for offset in self._unanswered.pop(channel, ()):
            self._channel_by_offset.pop(offset, None)
