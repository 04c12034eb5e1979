"""What the coordinator remembers of half messages, from the most to the least detail.

    HalfTable         the undecided halves: all that is needed to decide, check and list each
    PythonHalfTable    the same in Python; the native module has another one
    HalfStates        two bits for every half that the log still holds
    RocketMQCursors   where Apache RocketMQ would have to continue with this directory
    FinalCache        finals of the halves that were parked last

A broker may have a million undecided halves, so a table entry is small and the message itself
stays in the log. The states of a hundred million halves take 25 MB. With them a repeated END and a
contradicting one can be told apart for as long as the log keeps the half, without an object for
each decided transaction.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Final, NamedTuple, Protocol

import msgspec

from escrowmq.message.record import NewRecord
from escrowmq.message.transaction import TransactionState
from escrowmq.native import NativePath
from escrowmq.peer import Peer

# --- undecided halves ----------------------------------------------------------------------------


class Attempt(NamedTuple):
    """The attempt of a writer that a half belongs to. The writer decides it; no checks are sent."""

    writer: str
    batch: int
    name: str
    fence: int


# What identifies a transaction on a broker. A key is unique within its group at best: any client
# can send any key, so a key alone identifies nothing.
GroupTopicKey = tuple[str, str, bytes]


class Half(Protocol):
    """A half message that is not decided: open or stranded."""

    queue_offset: int
    log_offset: int
    size: int
    queue_id: int
    parked_ms: int
    due_ms: int
    producer: Peer | None  # the connection that sent it, or that answered a check last
    checks: int  # that were handed to a socket
    unknown_answers: int  # of these checks
    is_stranded: bool
    is_being_decided: bool  # its records are in this turn's batch
    reason: str  # why it is stranded, or why it cannot be checked
    previous_offsets: tuple[int, ...]  # queue offsets it had before it was moved
    attempt: Attempt | None
    last_remark: str  # what its producer said with its last UNKNOWN
    # Its properties begin with those of its final, so many bytes; 0 if that is not known.
    final_properties_bytes: int

    @property
    def topic(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def key(self) -> bytes: ...
    @property
    def group_topic_key(self) -> GroupTopicKey: ...
    @property
    def is_unreadable(self) -> bool:
        """Whether the log could not read it the last time."""


class PythonHalf(msgspec.Struct, gc=False):
    """A half of a `PythonHalfTable`."""

    queue_offset: int
    log_offset: int
    size: int
    topic: str
    queue_id: int
    group: str
    key: bytes
    parked_ms: int
    due_ms: int
    producer: Peer | None = None
    checks: int = 0
    unknown_answers: int = 0
    is_stranded: bool = False
    is_being_decided: bool = False
    reason: str = ""
    previous_offsets: tuple[int, ...] = ()
    attempt: Attempt | None = None
    last_remark: str = ""
    final_properties_bytes: int = 0

    @property
    def group_topic_key(self) -> GroupTopicKey:
        return self.group, self.topic, self.key

    @property
    def is_unreadable(self) -> bool:
        return self.reason.startswith("unreadable")


class UndecidedTotals(Protocol):
    """How many halves, and how many bytes they have in the log."""

    @property
    def count(self) -> int: ...
    @property
    def size(self) -> int: ...


# Returns when a half was parked, when it is due, and up to which log offset the same holds for
# halves with equal arguments. The arguments are topic, group, stored time and log offset.
RestoredTimes = Callable[[str, str, int, int], tuple[int, int, int]]


# Returns how long to wait for a verdict, from topic, group and number of checks.
CheckInterval = Callable[[str, str, int], int]
CHECK_HISTORY: Final = struct.Struct("<qqII")
REMARK_OFFSET: Final = struct.Struct("<q")


class HalfTable(Protocol):
    """The undecided halves by queue offset and by unique key, and totals by group and topic.

    It also recognises repeated sends, by the keys of halves that are being appended in this turn
    and of halves that were decided lately.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Half]:
        """Yield the halves in the order of the log."""

    def new_half(
        self,
        topic: str,
        queue_id: int,
        group: str,
        key: bytes,
        parked_ms: int,
        due_ms: int,
        producer: Peer | None,
    ) -> Half:
        """Return a half without offsets and size, which is not in the table."""

    def reserve(self, half: Half) -> bool:
        """Reserve the key of a half that is about to be appended.

        Return False if it is a repeated send: a half with this group, topic and key is in the
        table, is reserved, or was decided lately.
        """

    def release(self, half: Half) -> None:
        """Release the key of a half that could not be appended."""

    def add(self, half: Half) -> None:
        """Add a half that is stored. Its key is not reserved any more."""

    def remove(self, half: Half) -> None: ...

    def close(self, half: Half) -> None:
        """Remove a half that is decided, and remember its key for a while."""

    def remember_decided(
        self, group: str, topic: str, key: bytes, queue_offset: int, log_offset: int
    ) -> None:
        """Remember the key of a half that was decided before the start."""

    def restore(
        self, first_offset: int, entries: bytes, data: bytes, data_begin: int, times: RestoredTimes
    ) -> list[tuple[int, int]]:
        """Add halves that recovery has read from the log, up to the first one that is not plain.

        `entries` are the queue entries from `first_offset` on, and `data` is a part of the log with
        their records. Return due times, and for each of them the number of halves, one after the
        other, that have it. A table may add fewer halves than it could, or none.
        """

    def plain_commits(
        self, first_offset: int, entries: bytes, data: bytes, data_begin: int
    ) -> bytes:
        """Return the halves that ops commit, up to the first op that is no plain commit.

        The ops are given as the halves of `restore` are. The result has a 64-bit number for each
        op. A table may read fewer ops than it could, or none.
        """

    def strand(self, half: Half) -> None: ...
    def find(self, queue_offset: int) -> Half | None: ...

    def undecided(self, queue_offsets: array[int]) -> list[int]:
        """Return those of these queue offsets at which the table has a half."""

    def find_by_key(self, group: str, topic: str, key: bytes) -> Half | None:
        """Return the undecided half of this group and topic with this key."""

    def find_duplicate(self, group: str, topic: str, key: bytes) -> tuple[int, int] | None:
        """Return queue and log offset of the half with this key, also if it is decided."""

    def oldest(self) -> Half | None:
        """Return the half with the lowest log offset."""

    def check_histories(self, interval_ms: CheckInterval) -> tuple[bytes, dict[str, bytes]]:
        """Return what came of checks, for a snapshot: packed, because there may be a million.

        The first part has a `CHECK_HISTORY` for each half that was checked or has a remark: queue
        offset, time of the last check, number of checks and of unknown answers. The second has the
        queue offsets (`REMARK_OFFSET`) of the halves with each remark.
        """

    def restore_checks(
        self, histories: bytes, shift_ms: int, interval_ms: CheckInterval
    ) -> list[tuple[int, bytes]]:
        """Set what came of checks of open halves that `restore` has added.

        `histories` are records of `check_histories`; `shift_ms` is added to the times of the last
        checks. Return due times, and the queue offsets of the halves that are due then as 64-bit
        numbers.
        """

    def restore_remark(self, remark: str, queue_offsets: Sequence[int]) -> None:
        """Set the last remark of open halves that `restore` has added."""

    def stored_before(self, log_offset: int, count_max: int) -> Sequence[int]:
        """Return up to `count_max` queue offsets of halves with lower log offsets, in order."""

    def group_totals(self, group: str) -> UndecidedTotals: ...
    @property
    def total(self) -> UndecidedTotals: ...
    @property
    def count_by_topic(self) -> Mapping[str, int]: ...
    @property
    def stranded_count(self) -> int: ...


@dataclass(slots=True)
class HalfTotals:
    count: int = 0
    size: int = 0


_NO_TOTALS = HalfTotals()
DECIDED_KEYS_MAX: Final = 65_536  # of decided halves, to recognise a late repeated send


class PythonHalfTable:
    """The table in Python, and the specification of the native one."""

    def __init__(self, *, decided_max: int = DECIDED_KEYS_MAX) -> None:
        self._by_offset: dict[int, Half] = {}
        # Unique keys are unique in most cases, so the key alone is enough and a tuple per half is
        # saved. Clients choose keys, though. If halves of several groups or topics have one key,
        # the first has it alone and the others with their group and topic.
        self._by_key: dict[bytes | GroupTopicKey, int] = {}
        self._reserved: set[GroupTopicKey] = set()
        # Queue offset and log offset of the halves that were decided last.
        self._decided: OrderedDict[GroupTopicKey, tuple[int, int]] = OrderedDict()
        self._decided_max = decided_max
        self._names: dict[str, str] = {}  # topics and groups
        self._totals_by_group: dict[str, HalfTotals] = {}
        self._last_due_ms = 0
        self.count_by_topic: dict[str, int] = {}
        self.total = HalfTotals()
        self.stranded_count = 0

    def __len__(self) -> int:
        return len(self._by_offset)

    def __iter__(self) -> Iterator[Half]:
        return iter(self._by_offset.values())

    def new_half(
        self,
        topic: str,
        queue_id: int,
        group: str,
        key: bytes,
        parked_ms: int,
        due_ms: int,
        producer: Peer | None,
    ) -> Half:
        # A million halves hold names and times, so equal ones share an object.
        if due_ms != self._last_due_ms:
            self._last_due_ms = due_ms
        topic, group = self._names.get(topic, topic), self._names.get(group, group)
        return PythonHalf(
            0, 0, 0, topic, queue_id, group, key, parked_ms, self._last_due_ms, producer
        )

    def reserve(self, half: Half) -> bool:
        group_topic_key = half.group, half.topic, half.key
        if group_topic_key in self._reserved or self.find_duplicate(*group_topic_key):
            return False
        self._reserved.add(group_topic_key)
        return True

    def release(self, half: Half) -> None:
        self._reserved.discard((half.group, half.topic, half.key))

    def add(self, half: Half) -> None:
        self._reserved.discard((half.group, half.topic, half.key))
        # A name is shared as long as a half has it.
        self._names.setdefault(half.topic, half.topic)
        self._names.setdefault(half.group, half.group)
        self._by_offset[half.queue_offset] = half
        key = half.key
        if key:
            first_offset = self._by_key.get(key)
            first = None if first_offset is None else self._by_offset.get(first_offset)
            is_taken = first is not None and (first.group, first.topic) != (half.group, half.topic)
            self._by_key[half.group_topic_key if is_taken else key] = half.queue_offset
        self.stranded_count += half.is_stranded
        self._update_totals(half, 1)

    def remove(self, half: Half) -> None:
        del self._by_offset[half.queue_offset]
        self.stranded_count -= half.is_stranded
        if self._by_key.get(half.key) == half.queue_offset:
            del self._by_key[half.key]
        elif self._by_key.get(half.group_topic_key) == half.queue_offset:
            del self._by_key[half.group_topic_key]
        self._update_totals(half, -1)

    def close(self, half: Half) -> None:
        self.remove(half)
        if half.key:
            group_topic_key = half.group, half.topic, half.key
            self._decided[group_topic_key] = half.queue_offset, half.log_offset
            self._decided.move_to_end(group_topic_key)  # it may have been there from before
            if len(self._decided) > self._decided_max:
                self._decided.popitem(last=False)

    def remember_decided(
        self, group: str, topic: str, key: bytes, queue_offset: int, log_offset: int
    ) -> None:
        name = self._names.get
        self._decided[name(group, group), name(topic, topic), key] = queue_offset, log_offset

    def restore(
        self, first_offset: int, entries: bytes, data: bytes, data_begin: int, times: RestoredTimes
    ) -> list[tuple[int, int]]:
        return []  # recovery restores halves one by one, and this would be the same

    def plain_commits(
        self, first_offset: int, entries: bytes, data: bytes, data_begin: int
    ) -> bytes:
        return b""  # recovery reads ops one by one, and this would be the same

    def strand(self, half: Half) -> None:
        half.is_stranded = True
        self.stranded_count += 1

    def find(self, queue_offset: int) -> Half | None:
        return self._by_offset.get(queue_offset)

    def undecided(self, queue_offsets: array[int]) -> list[int]:
        by_offset = self._by_offset
        return [queue_offset for queue_offset in queue_offsets if queue_offset in by_offset]

    def find_by_key(self, group: str, topic: str, key: bytes) -> Half | None:
        half = self._by_offset.get(self._by_key.get(key, -1))
        if half is not None and half.group == group and half.topic == topic:
            return half
        return self._by_offset.get(self._by_key.get((group, topic, key), -1))

    def find_duplicate(self, group: str, topic: str, key: bytes) -> tuple[int, int] | None:
        half = self.find_by_key(group, topic, key)
        if half is not None:
            return half.queue_offset, half.log_offset
        return self._decided.get((group, topic, key))

    def oldest(self) -> Half | None:
        # Halves are added in the order of the log, and dictionaries keep that order.
        return next(iter(self._by_offset.values()), None)

    def check_histories(self, interval_ms: CheckInterval) -> tuple[bytes, dict[str, bytes]]:
        histories: list[bytes] = []
        remarks: dict[str, list[bytes]] = {}
        for half in self._by_offset.values():
            if half.checks or half.last_remark:
                checked_ms = half.due_ms - interval_ms(half.topic, half.group, half.checks)
                histories.append(
                    CHECK_HISTORY.pack(
                        half.queue_offset, checked_ms, half.checks, half.unknown_answers
                    )
                )
            if half.last_remark:
                offset = REMARK_OFFSET.pack(half.queue_offset)
                remarks.setdefault(half.last_remark, []).append(offset)
        by_remark = {remark: b"".join(offsets) for remark, offsets in remarks.items()}
        return b"".join(histories), by_remark

    def restore_checks(
        self, histories: bytes, shift_ms: int, interval_ms: CheckInterval
    ) -> list[tuple[int, bytes]]:
        due: list[tuple[int, bytes]] = []
        for queue_offset, checked_ms, checks, unknown in CHECK_HISTORY.iter_unpack(histories):
            half = self._by_offset.get(queue_offset)
            if half is not None and checks:
                half.checks, half.unknown_answers = checks, min(unknown, checks)
                half.due_ms = checked_ms + shift_ms + interval_ms(half.topic, half.group, checks)
                due.append((half.due_ms, array("q", [queue_offset]).tobytes()))
        return due

    def restore_remark(self, remark: str, queue_offsets: Sequence[int]) -> None:
        for queue_offset in queue_offsets:
            half = self._by_offset.get(queue_offset)
            if half is not None:
                half.last_remark = remark

    def stored_before(self, log_offset: int, count_max: int) -> list[int]:
        halves = takewhile(lambda half: half.log_offset < log_offset, self._by_offset.values())
        return [half.queue_offset for half in islice(halves, count_max)]

    def group_totals(self, group: str) -> HalfTotals:
        return self._totals_by_group.get(group) or _NO_TOTALS

    def _update_totals(self, half: Half, sign: int) -> None:
        group_total = self._totals_by_group.get(half.group)
        if group_total is None:
            group_total = self._totals_by_group[half.group] = HalfTotals()
        size, total, topic, by_topic = sign * half.size, self.total, half.topic, self.count_by_topic
        group_total.count += sign
        group_total.size += size
        total.count += sign
        total.size += size
        if not group_total.count:
            del self._totals_by_group[half.group]
            self._names.pop(half.group, None)
        count = by_topic.get(topic, 0) + sign
        if count:
            by_topic[topic] = count
        else:
            del by_topic[topic]
            self._names.pop(topic, None)


def new_half_table(native: NativePath) -> HalfTable:
    """Return an empty table: the native one if the native path is used."""
    if native.module is None:
        return PythonHalfTable()
    table: HalfTable = native.module.HalfTable(decided_max=DECIDED_KEYS_MAX)
    return table


# --- states of all halves ------------------------------------------------------------------------

_HALVES_PER_BYTE = 4
_GROWTH_BYTES = 4096  # allocated in advance, so that most halves need no new memory


class _StateFilter:
    """A set of states, and a search for bytes that contain at least one of them."""

    def __init__(self, *states: TransactionState) -> None:
        self.states = frozenset(states)
        matching_bytes = [
            byte
            for byte in range(256)
            if any(byte >> shift & 3 in self.states for shift in (0, 2, 4, 6))
        ]
        self.search_bytes = re.compile(b"[%b]" % re.escape(bytes(matching_bytes))).search


_OPEN = _StateFilter(TransactionState.OPEN)
_UNDECIDED = _StateFilter(TransactionState.OPEN, TransactionState.STRANDED)
_NOT_OPEN = _StateFilter(*(state for state in TransactionState if state.name != "OPEN"))
_DECIDED = _StateFilter(TransactionState.COMMITTED, TransactionState.ROLLED_BACK)
_STATES = tuple(TransactionState)


class HalfStates:
    """The state of every half from `base_offset` up to `next_offset`; OPEN unless set."""

    def __init__(self, base_offset: int = 0, next_offset: int = 0, bits: bytes = b"") -> None:
        # Only whole bytes are purged, so the base is a multiple of four.
        self.base_offset = base_offset - base_offset % _HALVES_PER_BYTE
        self.next_offset = max(self.base_offset, next_offset)
        self._bits = bytearray(bits)
        self._grow()

    def get(self, queue_offset: int) -> TransactionState | None:
        """Return the state of a half; None if there is none at this offset, or it was purged."""
        if not self.base_offset <= queue_offset < self.next_offset:
            return None
        index, shift = divmod(queue_offset - self.base_offset, _HALVES_PER_BYTE)
        return _STATES[self._bits[index] >> 2 * shift & 3]

    def put(self, queue_offset: int, state: TransactionState) -> None:
        """Set the state of a half. A purged half is ignored."""
        if queue_offset < self.base_offset:
            return
        if queue_offset >= self.next_offset:
            self.extend_to(queue_offset)
        index, shift = divmod(queue_offset - self.base_offset, _HALVES_PER_BYTE)
        self._bits[index] = self._bits[index] & ~(3 << 2 * shift) | state << 2 * shift

    def put_many(self, queue_offsets: array[int], state: TransactionState) -> None:
        """Set the state of many halves."""
        for queue_offset in queue_offsets:
            self.put(queue_offset, state)

    def extend_to(self, queue_offset: int) -> None:
        """Add open halves up to and including this one."""
        if queue_offset >= self.next_offset:
            self.next_offset = queue_offset + 1
            if queue_offset - self.base_offset >= len(self._bits) * _HALVES_PER_BYTE:
                self._grow()

    def purge_below(self, queue_offset: int) -> None:
        """Drop the states of halves whose records are gone from the log."""
        count = min(queue_offset, self.next_offset) - self.base_offset
        if count >= _HALVES_PER_BYTE:
            del self._bits[: count // _HALVES_PER_BYTE]
            self.base_offset += count - count % _HALVES_PER_BYTE

    def first_open(self, begin: int) -> int:
        """Return the first open half from `begin` on; `next_offset` if there is none."""
        return self._first(begin, _OPEN)

    def first_not_open(self, begin: int) -> int:
        """Return the first half from `begin` on that is not open; `next_offset` if all are."""
        return self._first(begin, _NOT_OPEN)

    def first_undecided(self, begin: int) -> int:
        """Return the first open or stranded half from `begin` on, or `next_offset`."""
        return self._first(begin, _UNDECIDED)

    def first_decided(self, begin: int) -> int:
        """Return the first committed or rolled back half from `begin` on, or `next_offset`."""
        return self._first(begin, _DECIDED)

    def _first(self, begin: int, state_filter: _StateFilter) -> int:
        queue_offset = max(begin, self.base_offset)
        while queue_offset < self.next_offset:
            index, shift = divmod(queue_offset - self.base_offset, _HALVES_PER_BYTE)
            if not shift:  # skip whole bytes with a search in C: there may be millions of them
                match = state_filter.search_bytes(self._bits, index)
                if match is None:
                    break
                if match.start() > index:
                    queue_offset = self.base_offset + match.start() * _HALVES_PER_BYTE
                    continue
            if _STATES[self._bits[index] >> 2 * shift & 3] in state_filter.states:
                return queue_offset
            queue_offset += 1
        return self.next_offset

    def dump(self) -> bytes:
        return bytes(self._bits[: self._used_bytes()])

    def _used_bytes(self) -> int:
        return (self.next_offset - self.base_offset + _HALVES_PER_BYTE - 1) // _HALVES_PER_BYTE

    def _grow(self) -> None:
        missing = self._used_bytes() - len(self._bits)
        if missing > 0:
            self._bits += bytes(missing + _GROWTH_BYTES)


# --- RocketMQ's cursors --------------------------------------------------------------------------


class RocketMQCursors:
    """The two offsets from which RocketMQ would continue if it took this directory over.

    RocketMQ keeps them as consumer offsets of the group CID_RMQ_SYS_TRANS: the first half that is
    open, and the first op about that half or a later one. All halves and ops before are done.
    """

    def __init__(self, half_offset: int = 0, op_offset: int = 0) -> None:
        self.half_offset = half_offset
        self.op_offset = op_offset
        # The half of every op from `op_offset` on, in order. Passed ops stay at the front for a
        # while, because removing each from the front of an array would cost its whole length.
        self._half_offset_of_ops: array[int] = array("q")
        self._passed_count = 0

    def add_op(self, op_offset: int, half_offset: int) -> None:
        """Add an op, in the order of the op queue. For several halves, name the last of them."""
        waiting = len(self._half_offset_of_ops) - self._passed_count
        # Ops in between could not be read and decide nothing.
        unread = op_offset - self.op_offset - waiting
        if not waiting:
            self.op_offset += unread
        elif unread:
            self._half_offset_of_ops.extend([-1] * unread)
        self._half_offset_of_ops.append(half_offset)

    def add_ops(self, first_op_offset: int, half_offsets: array[int]) -> None:
        """Add ops with consecutive offsets, each for one half."""
        if half_offsets:
            self.add_op(first_op_offset, half_offsets[0])
            self._half_offset_of_ops.extend(half_offsets[1:])

    def advance(self, first_open_offset: int) -> None:
        self.half_offset = max(self.half_offset, first_open_offset)
        halves = self._half_offset_of_ops
        while self._passed_count < len(halves) and halves[self._passed_count] < self.half_offset:
            self._passed_count += 1
            self.op_offset += 1
        if self._passed_count > 65_536 or self._passed_count == len(halves):
            del halves[: self._passed_count]
            self._passed_count = 0


# --- cached finals -------------------------------------------------------------------------------

CACHE_GENERATION_SIZE: Final = 4096  # finals; the cache holds up to two generations
CACHED_BODY_BYTES_MAX: Final = 4096


class FinalCache:
    """The finals of small halves that were parked last, by queue offset of the half.

    Most halves are small and are committed within milliseconds. With this cache they need not be
    read from the log and parsed again. A final that is not cached is made from the log.

    There are two generations, and the older one is dropped as a whole, so that no order of use
    has to be kept.
    """

    def __init__(self) -> None:
        self._young: dict[int, NewRecord] = {}
        self._old: dict[int, NewRecord] = {}

    def put(self, queue_offset: int, final: NewRecord) -> None:
        if len(self._young) >= CACHE_GENERATION_SIZE:
            self._old, self._young = self._young, {}
        self._young[queue_offset] = final

    def take(self, queue_offset: int) -> NewRecord | None:
        """Remove and return a final."""
        return self._young.pop(queue_offset, None) or self._old.pop(queue_offset, None)
