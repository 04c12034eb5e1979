"""Check-back: when to ask a producer about a half message, and what to do when it is due.

    CheckSchedule    which halves are due
    next_step        what to do with a half that is due
    CheckBacklog     due halves that wait until a producer of their group has capacity
    CheckPace        how many checks may be sent now

`broker/transactions/check.py` executes the steps. The rules and the counters are
here; the settings are in `config/settings.py`.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from escrowmq.config import TransactionConfig
from escrowmq.escrow.half_table import Half, HalfTable
from escrowmq.escrow.writers import WriterTable
from escrowmq.metrics import Distribution
from escrowmq.peer import Peer

# RocketMQ's bounds for the time from half to decision, and the times in which most of ours end.
FINISH_BUCKETS_S: Final = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 5, 15, 60, 300, 1800, 7200, 86400)

# --- counters ------------------------------------------------------------------------------------


@dataclass(slots=True)
class TransactionCounters:
    """Counts since the start of the broker; shown as metrics."""

    parked: int = 0
    committed: dict[str, int] = field(default_factory=dict)  # by topic
    rolled_back: dict[str, int] = field(default_factory=dict)  # by topic
    stranded: int = 0
    finish_seconds: Distribution = field(default_factory=lambda: Distribution(FINISH_BUCKETS_S))
    repeated_ends: int = 0
    conflicts: int = 0
    duplicate_sends: int = 0
    unreadable_halves: int = 0
    set_aside_halves: int = 0  # their check failed with an error of the broker's own


# --- what to do with a half that is due ----------------------------------------------------------

RETRY_DELAY_MS: Final = 1_000  # until a step that was not possible now is tried again


@dataclass(frozen=True, slots=True)
class Strand:
    """Send no more checks. An operator has to decide."""

    reason: str


@dataclass(frozen=True, slots=True)
class Check:
    """Ask a producer of the group."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing until this time; None: until an operator acts."""

    until_ms: int | None


@dataclass(frozen=True, slots=True)
class FollowWriter:
    """Roll back: the writer has decided for another attempt, or lost its fence."""

    writer: str


def next_step(
    half: Half, now_ms: int, config: TransactionConfig, writers: WriterTable, *, age_max_ms: int
) -> Strand | Check | Wait | FollowWriter:
    """Return what to do now with an undecided half."""
    if half.is_stranded or half.reason:  # a reason without being stranded: it cannot be checked
        return Wait(None)
    if not is_check_due(half, now_ms):
        return Wait(half.due_ms if half.due_ms > now_ms else now_ms + RETRY_DELAY_MS)
    if half.checks >= config.checks_max:
        return Strand(_checks_summary(half))
    if now_ms - half.parked_ms > age_max_ms:
        return Strand(f"open for more than {age_max_ms // 3_600_000} hours")
    if half.attempt is not None:
        # Only the writer decides. A half whose attempt can still win is looked at again later.
        writer, batch, _, fence = half.attempt
        if writers.has_lost(writer, batch, fence):
            return FollowWriter(writer)
        return Wait(now_ms + config.next_check_after_ms(half.topic, half.group, half.checks))
    return Check()


def _checks_summary(half: Half) -> str:
    """Say what came of the checks: `checked 3 times: 3 UNKNOWN, last: database is down`."""
    unanswered = half.checks - half.unknown_answers
    results = [
        f"{half.unknown_answers} UNKNOWN" if half.unknown_answers else "",
        f"{unanswered} without an answer" if unanswered else "",
        f"last: {half.last_remark}" if half.last_remark else "",
    ]
    return f"checked {half.checks} times: {', '.join(filter(None, results))}"


def is_check_due(half: Half, now_ms: int) -> bool:
    """Whether the half's time has come and nothing is deciding it in this turn."""
    return half.due_ms <= now_ms and not half.is_being_decided


# --- which halves are due ------------------------------------------------------------------------

SLOT_MS: Final = 20
PASSED_ENTRIES_MAX: Final = 200_000
EXAMINED_ENTRIES_MAX: Final = 50_000  # in one call: a few milliseconds


class CheckSchedule:
    """Queue offsets of halves by due time, in slots of 20 ms, eight bytes each.

    Taking the due ones costs time for these only, not for all. A half that is decided stays in its
    slot until the slot is due, and is passed then.
    """

    def __init__(self) -> None:
        self._slots: dict[int, array[int]] = {}
        self._slot_heap: list[int] = []  # the keys of `_slots`
        # Most halves come in runs with the same due time: keep the slot of the last one at hand.
        self._last_due_ms, self._last_slot = -1, array("q")

    def add(self, queue_offset: int, due_ms: int) -> None:
        if due_ms != self._last_due_ms:
            # A slot is named by its end, so that nothing in it comes up too early.
            self._last_slot = self._get_or_create_slot(-(-due_ms // SLOT_MS))
            self._last_due_ms = due_ms
        self._last_slot.append(queue_offset)

    def add_many(self, queue_offsets: array[int], due_ms: int) -> None:
        """Add halves that are due at the same time."""
        self._get_or_create_slot(-(-due_ms // SLOT_MS)).extend(queue_offsets)

    def _get_or_create_slot(self, slot_number: int) -> array[int]:
        slot = self._slots.get(slot_number)
        if slot is None:
            slot = self._slots[slot_number] = array("q")
            heapq.heappush(self._slot_heap, slot_number)
        return slot

    def take_due(self, now_ms: int, count_max: int, halves: HalfTable) -> list[int]:
        """Remove and return up to `count_max` undecided halves whose time has come.

        The oldest slot comes first. Entries of decided halves are most of a slot: they are removed
        and do not count, up to a limit that bounds the time of a call. A half that was rescheduled
        has several entries: compare its `due_ms`.
        """
        due: list[int] = []
        examined = 0
        self._last_due_ms = -1  # its slot may be removed below
        while (
            self._slot_heap
            and self._slot_heap[0] * SLOT_MS <= now_ms
            and (len(due) < count_max and examined < EXAMINED_ENTRIES_MAX)
        ):
            number = self._slot_heap[0]
            slot = self._slots[number]
            # From the end: removing from the front would move the whole slot every time.
            remaining = count_max - len(due)
            part = slot[-remaining:]
            del slot[-remaining:]
            examined += len(part)
            due += halves.undecided(part)
            if not slot:
                del self._slots[number]
                heapq.heappop(self._slot_heap)
        return due

    @property
    def next_slot_ms(self) -> int | None:
        """The time at which the next slot is due. It may have only halves that are decided."""
        return self._slot_heap[0] * SLOT_MS if self._slot_heap else None

    def next_due_ms(self, halves: HalfTable) -> int | None:
        """Return when the next check is due; None if none is scheduled.

        Decided halves are still in the slots. So that an operator's look costs little, the end of
        a slot is returned if many of them would have to be passed.
        """
        passed = 0
        for number in sorted(self._slots):
            due_times: list[int] = []
            for queue_offset in self._slots[number]:
                half = halves.find(queue_offset)
                if half is not None and -(-half.due_ms // SLOT_MS) == number and not half.reason:
                    due_times.append(half.due_ms)
            if due_times:
                return min(due_times)
            passed += len(self._slots[number])
            if passed > PASSED_ENTRIES_MAX:
                return number * SLOT_MS
        return None


# --- due halves and the capacity of producers ----------------------------------------------------

UNANSWERED_CHECKS_MAX: Final = 100
CHECK_TIMEOUT_MS: Final = 1_000


class CheckBacklog:
    """Due halves by group, and the unanswered checks of every channel.

    A channel takes up to 100 unanswered checks per second. One that never answers gets no more
    than that and does not slow the others down. If no producer of a group is connected, its halves
    wait for the first one that connects, and nothing counts as a check.
    """

    def __init__(self, *, unanswered_max: int = UNANSWERED_CHECKS_MAX) -> None:
        self._unanswered_max = unanswered_max
        # By channel: queue offsets of halves, in the order of the time at which the check was sent.
        self._unanswered: dict[Peer, OrderedDict[int, int]] = {}
        self._channel_by_offset: dict[int, Peer] = {}
        self._backlogs: dict[str, deque[int]] = {}

    def add(self, half: Half) -> None:
        backlog = self._backlogs.get(half.group)
        if backlog is None:
            backlog = self._backlogs[half.group] = deque()
        backlog.append(half.queue_offset)

    def groups(self) -> list[str]:
        return list(self._backlogs)

    def size(self, group: str) -> int:
        return len(self._backlogs.get(group, ()))

    @property
    def waits_for_answers(self) -> bool:
        """Whether halves wait while checks are unanswered, which are given up after a second."""
        return bool(self._backlogs) and bool(self._channel_by_offset)

    def take(self, group: str) -> Iterator[int]:
        """Remove and yield the halves of a group in order. Stopping early leaves the others."""
        backlog = self._backlogs.get(group)
        while backlog:
            yield backlog.popleft()
        if backlog is not None:
            self._backlogs.pop(group, None)

    def put_back(self, half: Half) -> None:
        """Make a half the next one of its group again."""
        self._backlogs.setdefault(half.group, deque()).appendleft(half.queue_offset)

    def has_capacity(self, channel: Peer, now_ms: int) -> bool:
        unanswered = self._unanswered.get(channel)
        if unanswered is None:
            return True
        while unanswered and next(iter(unanswered.values())) <= now_ms - CHECK_TIMEOUT_MS:
            queue_offset, _ = unanswered.popitem(last=False)
            self._channel_by_offset.pop(queue_offset, None)
        return len(unanswered) < self._unanswered_max

    def check_sent(self, channel: Peer, half: Half, now_ms: int) -> None:
        self.check_answered(half.queue_offset)
        self._unanswered.setdefault(channel, OrderedDict())[half.queue_offset] = now_ms
        self._channel_by_offset[half.queue_offset] = channel

    def check_answered(self, queue_offset: int) -> None:
        channel = self._channel_by_offset.pop(queue_offset, None)
        if channel is not None and channel in self._unanswered:
            self._unanswered[channel].pop(queue_offset, None)

    def channel_closed(self, channel: Peer) -> None:
        for queue_offset in self._unanswered.pop(channel, ()):
            self._channel_by_offset.pop(queue_offset, None)


# --- how many checks at a time -------------------------------------------------------------------

# A check and its answer take about 65 microseconds of the broker. Without a limit, a producer that
# answers at once gets the next checks at once, and a million due halves keep the broker busy until
# all of them are decided. Turns with 16 sends each took 3.7 ms of CPU time beside answers UNKNOWN
# (p50; p99 9.9 ms). With these limits they take 0.24 ms (p99 1.5 ms), and 0.22 ms if nothing is due
# (p99 0.55 ms).
CHECKS_PER_MS: Final = 10
CHECKS_AT_ONCE_MAX: Final = 100
# While there are other requests. Some checks together cost less than one after the other.
BESIDE_OTHERS_PER_MS: Final = 2
BESIDE_OTHERS_AT_ONCE: Final = 8
OTHERS_LAST_MS: Final = 100  # after the last one


class CheckPace:
    """Limits how many checks are sent in a time, so that other requests are served meanwhile."""

    def __init__(self) -> None:
        self._saved = CHECKS_AT_ONCE_MAX
        self._updated_ms = 0
        self._others_until_ms = 0
        self._other_count = 0

    def turn_ended(self, now_ms: int, other_count: int) -> None:
        """Note how many requests there were in all, other than answers to checks."""
        if other_count != self._other_count:
            self._other_count = other_count
            self._others_until_ms = now_ms + OTHERS_LAST_MS

    def allowed(self, now_ms: int) -> int:
        """Return how many checks may be sent now."""
        # A clock that was set back must not stop all checks.
        passed_ms = max(0, now_ms - self._updated_ms)
        self._updated_ms = now_ms
        if not now_ms < self._others_until_ms <= now_ms + OTHERS_LAST_MS:
            self._saved = min(CHECKS_AT_ONCE_MAX, self._saved + passed_ms * CHECKS_PER_MS)
            return self._saved
        self._saved = min(BESIDE_OTHERS_AT_ONCE, self._saved + passed_ms * BESIDE_OTHERS_PER_MS)
        return self._saved if self._saved >= BESIDE_OTHERS_AT_ONCE else 0

    def check_sent(self) -> None:
        self._saved -= 1
