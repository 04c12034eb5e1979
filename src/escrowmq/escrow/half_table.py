"""The open halves: what is needed to decide, to ask and to list each, and no more.

There may be a million of them, so an entry is small: the message itself stays in the log.

What became of every half that the log still holds: two bits each, by half-queue offset.

A hundred million halves are 25 MB, so that a late answer can be told from a repeated one for as
long as the log keeps the half, and no object is kept for what is over.

How far RocketMQ would have to read, if it took the directory over.

Its two cursors, kept as offsets of the group CID_RMQ_SYS_TRANS: the first half that is open, and
the first op that says something about that half or a later one. Everything before them is over.

What it takes to commit a half, kept for those that came last.

Most halves are small and committed within milliseconds. Those need not be read from the log and
taken apart again. It is a help, not a record: whatever is not here is read.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from escrowmq.message.transaction import TransactionState


class Attempt(NamedTuple):
    """Whose batch a half belongs to: his decision settles it, and nobody is asked."""

    writer: str
    batch: int
    name: str
    fence: int


class Half(msgspec.Struct, gc=False):
    """One that is not settled: open, or stranded."""

    queue_offset: int
    log_offset: int
    size: int
    topic: str
    queue_id: int
    group: str
    key: bytes
    parked_ms: int
    due_ms: int
    producer: Hashable | None = None  # the line that it came by
    checks: int = 0  # that were handed to a socket
    is_stranded: bool = False
    is_being_decided: bool = False  # its records are in this turn's batch
    reason: str = ""  # why it is stranded, or cannot be asked about
    previous_offsets: tuple[int, ...] = ()  # places it had before it was appended again
    attempt: Attempt | None = None

    @property
    def is_unreadable(self) -> bool:
        """The log could not give it when it was last asked."""
        return self.reason.startswith("unreadable")


@dataclass(slots=True)
class HalfTotals:
    count: int = 0
    size: int = 0


_NO_TOTALS = HalfTotals()


class HalfTable:
    """By place, by unique key, and how many each group has."""

    def __init__(self) -> None:
        self._by_offset: dict[int, Half] = {}
        # By key alone, as keys are unique; of several groups with one key, the others by both.
        self._by_key: dict[bytes | tuple[str, bytes], int] = {}
        self._names: dict[str, str] = {}  # topics and groups, once each
        self._totals_by_group: dict[str, HalfTotals] = {}
        self.count_by_topic: dict[str, int] = {}
        self.total = HalfTotals()
        self.stranded_count = 0  # of them

    def __len__(self) -> int:
        return len(self._by_offset)

    def __iter__(self) -> Iterator[Half]:
        return iter(self._by_offset.values())

    def intern_name(self, text: str) -> str:
        """The one object for this name: a million halves share it."""
        return self._names.setdefault(text, text)

    def add(self, half: Half) -> None:
        self._by_offset[half.queue_offset] = half
        self.add_key(half)
        self.stranded_count += half.is_stranded
        self._update_totals(half, 1)

    def add_key(self, half: Half) -> None:
        """It is the one that its key leads to."""
        key = half.key
        if key:
            taken = self._by_key.get(key)
            first = None if taken is None else self._by_offset.get(taken)
            is_taken = first is not None and first.group != half.group
            self._by_key[(half.group, key) if is_taken else key] = half.queue_offset

    def remove(self, half: Half) -> None:
        del self._by_offset[half.queue_offset]
        self.stranded_count -= half.is_stranded
        if self._by_key.get(half.key) == half.queue_offset:
            del self._by_key[half.key]
        elif self._by_key.get((half.group, half.key)) == half.queue_offset:
            del self._by_key[half.group, half.key]
        self._update_totals(half, -1)

    def strand(self, half: Half) -> None:
        half.is_stranded = True
        self.stranded_count += 1

    def unstrand(self, half: Half) -> None:
        half.is_stranded = False
        self.stranded_count -= 1

    def find(self, queue_offset: int) -> Half | None:
        return self._by_offset.get(queue_offset)

    def find_by_key(self, key: bytes, group: str | None = None) -> Half | None:
        """Of this group, or of any."""
        half = self._by_offset.get(self._by_key.get(key, -1))
        if group is None or (half is not None and half.group == group):
            return half
        return self._by_offset.get(self._by_key.get((group, key), -1))

    def oldest(self) -> Half | None:
        """The one that has been in the log for longest."""
        return next(iter(self._by_offset.values()), None)

    def group_totals(self, group: str) -> HalfTotals:
        return self._totals_by_group.get(group) or _NO_TOTALS

    def _update_totals(self, half: Half, sign: int) -> None:
        load = self._totals_by_group.get(half.group)
        if load is None:
            load = self._totals_by_group[self.intern_name(half.group)] = HalfTotals()
        size, total, topic, by_topic = sign * half.size, self.total, half.topic, self.count_by_topic
        load.count += sign
        load.size += size
        total.count += sign
        total.size += size
        if not load.count:
            del self._totals_by_group[half.group]
        count = by_topic.get(topic, 0) + sign
        if count:
            by_topic[topic] = count
        else:
            del by_topic[topic]


_HALVES_PER_BYTE = 4
_GROWTH_BYTES = 4096  # at a time: the bits are longer than what they say


class _StateFilter:
    """Halves in any of these states, and a search for bytes that hold one."""

    def __init__(self, *states: TransactionState) -> None:
        self.states = frozenset(states)
        having = [
            byte
            for byte in range(256)
            if any(byte >> shift & 3 in self.states for shift in (0, 2, 4, 6))
        ]
        self.search_bytes = re.compile(b"[%b]" % re.escape(bytes(having))).search


_OPEN = _StateFilter(TransactionState.OPEN)
_UNDECIDED = _StateFilter(TransactionState.OPEN, TransactionState.STRANDED)
_DECIDED = _StateFilter(TransactionState.COMMITTED, TransactionState.ROLLED_BACK)
_STATES = tuple(TransactionState)


class HalfStates:
    """Halves from `base` up to `next`; all of them open until said otherwise."""

    def __init__(self, base_offset: int = 0, next_offset: int = 0, bits: bytes = b"") -> None:
        self.base_offset = (
            base_offset - base_offset % _HALVES_PER_BYTE
        )  # whole bytes are forgotten at the front
        self.next_offset = max(self.base_offset, next_offset)
        self._bits = bytearray(bits)
        self._grow()

    def get(self, queue_offset: int) -> TransactionState | None:
        """None: no half was parked there, or it is forgotten."""
        if not self.base_offset <= queue_offset < self.next_offset:
            return None
        at, shift = divmod(queue_offset - self.base_offset, _HALVES_PER_BYTE)
        return _STATES[self._bits[at] >> 2 * shift & 3]

    def put(self, queue_offset: int, state: TransactionState) -> None:
        if queue_offset < self.base_offset:
            return
        if queue_offset >= self.next_offset:
            self.extend_to(queue_offset)
        at, shift = divmod(queue_offset - self.base_offset, _HALVES_PER_BYTE)
        self._bits[at] = self._bits[at] & ~(3 << 2 * shift) | state << 2 * shift

    def extend_to(self, queue_offset: int) -> None:
        """There are halves up to this one now."""
        if queue_offset >= self.next_offset:
            self.next_offset = queue_offset + 1
            if queue_offset - self.base_offset >= len(self._bits) * _HALVES_PER_BYTE:
                self._grow()

    def purge_below(self, queue_offset: int) -> None:
        """Their records are gone from the log."""
        whole = min(queue_offset, self.next_offset) - self.base_offset
        if whole >= _HALVES_PER_BYTE:
            del self._bits[: whole // _HALVES_PER_BYTE]
            self.base_offset += whole - whole % _HALVES_PER_BYTE

    def first_open(self, begin: int) -> int:
        """The first half from `begin` on that is open; `next` if none is."""
        return self._first(begin, _OPEN)

    def first_undecided(self, begin: int) -> int:
        """The first that is open or stranded."""
        return self._first(begin, _UNDECIDED)

    def first_decided(self, begin: int) -> int:
        """The first that is neither."""
        return self._first(begin, _DECIDED)

    def _first(self, begin: int, state_filter: _StateFilter) -> int:
        at = max(begin, self.base_offset)
        while at < self.next_offset:
            place, rest = divmod(at - self.base_offset, _HALVES_PER_BYTE)
            if not rest:  # past whole bytes without any: there may be millions
                found = state_filter.search_bytes(self._bits, place)
                if found is None:
                    break
                if found.start() > place:
                    at = self.base_offset + found.start() * _HALVES_PER_BYTE
                    continue
            if _STATES[self._bits[place] >> 2 * rest & 3] in state_filter.states:
                return at
            at += 1
        return self.next_offset

    def dump(self) -> bytes:
        return bytes(self._bits[: self._used_bytes()])

    def _used_bytes(self) -> int:
        return (self.next_offset - self.base_offset + _HALVES_PER_BYTE - 1) // _HALVES_PER_BYTE

    def _grow(self) -> None:
        missing = self._used_bytes() - len(self._bits)
        if missing > 0:
            self._bits += bytes(missing + _GROWTH_BYTES)


class RocketMQCursors:
    def __init__(self, half_offset: int = 0, op_offset: int = 0) -> None:
        self.half_offset = half_offset
        self.op_offset = op_offset
        self._half_offset_of_ops: array[int] = array("q")  # of the ops from `op` on, in order
        self._passed_count = 0  # of those, at the front: the array is cut now and then

    def add_op(self, op_offset: int, half_offset: int) -> None:
        """In the order of the op queue. An op over several halves counts with the last of them."""
        waiting = len(self._half_offset_of_ops) - self._passed_count
        unseen = (
            op_offset - self.op_offset - waiting
        )  # ops that nobody could read: they settle nothing
        if not waiting:
            self.op_offset += unseen
        elif unseen:
            self._half_offset_of_ops.extend([-1] * unseen)
        self._half_offset_of_ops.append(half_offset)

    def advance(self, first_open_offset: int) -> None:
        self.half_offset = max(self.half_offset, first_open_offset)
        halves = self._half_offset_of_ops
        while self._passed_count < len(halves) and halves[self._passed_count] < self.half_offset:
            self._passed_count += 1
            self.op_offset += 1
        if self._passed_count > 65_536 or self._passed_count == len(halves):
            del halves[: self._passed_count]
            self._passed_count = 0


CACHE_GENERATION_SIZE: Final = 4096  # up to twice as many are here
CACHED_BODY_BYTES_MAX: Final = 4096  # of one that is kept


class CachedFinal(msgspec.Struct, frozen=True, gc=False):
    """Of its final, everything but the place that it will have."""

    body: bytes
    properties: bytes
    tags_and_keys: tuple[int, list[bytes]] | None
    flag: int
    sys_flag: int
    born_ms: int
    born_host: bytes
    reconsume_times: int


class FinalCache:
    """By half-queue offset, in two generations: the older one goes all at once."""

    def __init__(self) -> None:
        self._young: dict[int, CachedFinal] = {}
        self._old: dict[int, CachedFinal] = {}

    def put(self, queue_offset: int, final: CachedFinal) -> None:
        if len(self._young) >= CACHE_GENERATION_SIZE:
            self._old, self._young = self._young, {}
        self._young[queue_offset] = final

    def take(self, queue_offset: int) -> CachedFinal | None:
        return self._young.pop(queue_offset, None) or self._old.pop(queue_offset, None)
