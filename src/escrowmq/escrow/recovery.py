"""The escrow again, from the log: after a stop, after a crash, after RocketMQ had the directory.

    halves   all of them are open
    ops      those are not; ours say how they ended
    finals   one whose op a crash cut off lies at the very end of the log: its half is committed
    steps    how often each was asked about

Where RocketMQ was before us an op may be missing for other reasons, and a half may have older
copies; a half is then looked for among the delivered messages before anybody is asked about it.

What a start of the escrow reads of the log.

Keys of settled halves after a start: a send that comes late once more is still recognised.

Only so many of the last halves are looked at, without their bodies, so that a start takes no
longer the longer the log is.

What became of transactions while RocketMQ had the directory.

It asks about a copy of a half, a new one each time, and settles that copy; the half itself, and
copies that an end passed by, stay as they were. A stop saves how far it was, a crash does not. So
a half that looks open is over if any copy of it is, or if its message was delivered or discarded.

What the escrow knows, in a small file, so that a start need not read every op there ever was.

It holds the two bits of every half and how far the queues were read for them; the open halves
themselves are read again from the log, which is where they are. Derived and disposable: without it
everything is read again, and comes out the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol
from zlib import crc32

import msgspec

from escrowmq.errors import CorruptRecord, NoSuchRecord
from escrowmq.escrow.coordinator import Escrow, HalfLog
from escrowmq.escrow.half_table import Half, SettledHalves
from escrowmq.escrow.records import (
    CHECK_TIMES,
    HalfFacts,
    decode_op,
    decode_step,
    facts_of,
    finals_of,
    is_laid_by_us,
    is_packed,
    op_of,
)
from escrowmq.escrow.writers import Decision, Writers, decode_decision
from escrowmq.message import names
from escrowmq.message.batch import one_by_one
from escrowmq.message.properties import find_property
from escrowmq.message.record import TRANSACTION_COMMIT, NewRecord, StoredRecord, transaction_type
from escrowmq.message.transaction import State


class Glance(Protocol):
    """A record's place and properties, without its body."""

    @property
    def queue_offset(self) -> int: ...
    @property
    def log_offset(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def stored_ms(self) -> int: ...
    @property
    def properties(self) -> bytes: ...


class RecoveredLog(HalfLog, Protocol):
    def min_offset(self, topic: str, queue_id: int) -> int: ...
    def max_offset(self, topic: str, queue_id: int) -> int: ...
    def find_by_key(self, topic: str, key: str, *, count_max: int = 32) -> list[StoredRecord]: ...

    def glances(self, topic: str, queue_id: int, begin: int, end: int) -> Iterator[Glance]: ...

    @property
    def last_record(self) -> int: ...


LOOKED_AT_MAX: Final = 16_384  # halves: a fraction of a second of a start


def remember_settled(escrow: Escrow, store: RecoveredLog) -> None:
    """Of several with one key, the last is the one that lived."""
    end = escrow.settled.next
    begin = max(store.min_offset(names.HALF_TOPIC, 0), end - LOOKED_AT_MAX)
    for half in store.glances(names.HALF_TOPIC, 0, begin, end):
        state = escrow.settled.state(half.queue_offset)
        if state is None or not state.is_settled:
            continue
        facts = facts_of(half)
        if facts is not None and facts.key:
            group = escrow.open.name(facts.group)
            escrow.remembered[facts.key] = group, half.queue_offset, half.log_offset


_COPIED = f"{CHECK_TIMES}\x01".encode()


class Delivered(Protocol):
    def find_by_key(self, topic: str, key: str, *, count_max: int = 32) -> list[StoredRecord]: ...


class Takeover:
    """Notes of a start: was RocketMQ here, and what has it settled?"""

    def __init__(self) -> None:
        self.was_here = False
        self._settled: dict[tuple[str, bytes], State] = {}

    def settled(self, facts: HalfFacts | None, state: State) -> None:
        """One of its ops says so, of this half or of a copy of it."""
        self.was_here = True
        if facts is not None and facts.key:
            self._settled[facts.group, facts.key] = state

    def saw(self, properties: bytes) -> None:
        """The properties of a half that looks open."""
        if _COPIED in properties or not is_laid_by_us(properties):
            self.was_here = True

    def outcome(self, half: Half, store: Delivered) -> State | None:
        """None: it is as open as it looks."""
        if not half.key:
            return None
        key = half.key.decode("utf-8", "replace")
        for record in store.find_by_key(half.topic, key):
            is_final = transaction_type(record.sys_flag) == TRANSACTION_COMMIT
            if is_final and find_property(record.properties, b"PGROUP") == half.group.encode():
                return State.COMMITTED
        settled = self._settled.get((half.group, half.key))
        if settled is not None:
            return settled
        for record in store.find_by_key(names.STRANDED_TOPIC, key):
            if record.log_offset > half.log_offset:  # else it was resumed since
                return State.STRANDED
        return None


PATH: Final = "escrowmq.escrow"


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    log_offset: int  # all of it speaks of the log below
    halves_read: int
    steps_read: int
    decisions_read: int
    base: int
    bits: bytes
    half_cursor: int
    op_cursor: int
    checks: dict[int, tuple[int, int]]  # of halves that were asked about: how often, when last
    aliases: dict[int, int]
    writers: bytes = b""


def encode_snapshot(snapshot: Snapshot) -> bytes:
    data = msgspec.msgpack.encode(snapshot)
    return crc32(data).to_bytes(4, "big") + data


def decode_snapshot(content: bytes, log_begin: int, log_end: int) -> Snapshot | None:
    """None if there is none that fits this log: it can be done without."""
    data = content[4:]
    if len(content) <= 4 or crc32(data) != int.from_bytes(content[:4], "big"):
        return None
    try:
        snapshot = msgspec.msgpack.decode(data, type=Snapshot)
    except msgspec.MsgspecError:  # of another version
        return None
    # Of what the log has lost it must not speak, nor of another log.
    return snapshot if log_begin <= snapshot.log_offset <= log_end else None


log = logging.getLogger(__name__)

# So many open halves are looked up at every start, which takes a quarter of a second. RocketMQ may
# have delivered one that we parked and have lost the op in a crash: then nothing shows that it was
# here but the message itself.
LOOKED_UP_MAX: Final = 10_000


@dataclass(slots=True)
class Recovered:
    halves: int = 0
    ops: int = 0
    open: int = 0
    records: list[NewRecord] = field(default_factory=list)  # what the crash cut off
    decisions: list[Decision] = field(default_factory=list)  # that may not be carried out yet
    takeover: Takeover = field(default_factory=Takeover)


def recover_escrow(
    escrow: Escrow,
    store: RecoveredLog,
    snapshot: Snapshot | None,
    cursor: int | None,
    *,
    now_ms: int,
) -> Recovered:
    """Fill an empty escrow. The records it returns are to be appended before anybody is served.

    `cursor`: the first half that RocketMQ would look at, if it has been here; it never stands
    behind a half that is open.
    """
    found = Recovered()
    first = store.min_offset(names.HALF_TOPIC, 0)
    ops_from, steps_from = (
        store.min_offset(names.OP_TOPIC, 0),
        store.min_offset(names.JOURNAL_TOPIC, 0),
    )
    asked: dict[int, tuple[int, int]] = {}
    if snapshot is None:
        escrow.settled = SettledHalves(first, first)
    else:
        escrow.settled = SettledHalves(snapshot.base, snapshot.halves_read, snapshot.bits)
        escrow.settled.forget_below(first)
        escrow.aliases = dict(snapshot.aliases)
        escrow.writers = Writers.load(snapshot.writers)
        ops_from = max(ops_from, snapshot.op_cursor)  # those it has read already, for the cursor
        steps_from = max(steps_from, snapshot.steps_read)
        asked = dict(snapshot.checks)
    escrow.settled.park(store.max_offset(names.HALF_TOPIC, 0) - 1)
    escrow.cursors.half = max(first, snapshot.half_cursor if snapshot else 0)
    _read_ops(escrow, store, ops_from, found)
    asked |= _steps(store, steps_from)
    passed = _pass_over(escrow, store, first, cursor)
    _read_open_halves(escrow, store, first, asked, found, now_ms)
    _lead_to_living(escrow, store, passed)
    _complete_last_final(escrow, store, found, now_ms)
    if snapshot is None or found.takeover.was_here or len(escrow.open) <= LOOKED_UP_MAX:
        _complete_taken_over(escrow, store, found, now_ms)
    _read_decisions(escrow, store, 0 if snapshot is None else snapshot.decisions_read, found)
    remember_settled(escrow, store)
    escrow.advance_cursors()
    found.open = len(escrow.open)
    return found


def _read_decisions(escrow: Escrow, store: RecoveredLog, begin: int, found: Recovered) -> None:
    first = max(begin, store.min_offset(names.DECISION_TOPIC, 0))
    for _, record in _records(store, names.DECISION_TOPIC, first):
        try:
            decision = decode_decision(record)
        except CorruptRecord as error:
            log.error("decision unreadable: %s", error)
            continue
        escrow.writers.note(decision, record.log_offset)
        halves = (*decision.commits, *decision.rolls_back)
        if any(escrow.open.find(escrow.aliases.get(half, half)) for half in halves):
            found.decisions.append(decision)


def _pass_over(escrow: Escrow, store: RecoveredLog, first: int, cursor: int | None) -> list[int]:
    """What RocketMQ has passed is over, though nothing says how: it kept no memory of that. What
    we stranded and then appended again was passed too, and only its own record says so."""
    passed = []
    for queue_offset in range(first, min(cursor or 0, escrow.settled.next)):
        if escrow.settled.state(queue_offset) is not State.OPEN:
            continue
        facts = _facts_at(store, queue_offset)
        if facts is not None and facts.past is not None and facts.past.is_stranded:
            escrow.settled.put(queue_offset, State.STRANDED)
        else:
            escrow.settled.put(queue_offset, State.ROLLED_BACK)
            passed.append(queue_offset)
    return passed


def _facts_at(store: RecoveredLog, queue_offset: int) -> HalfFacts | None:
    """None if the half cannot be read."""
    log_offset = store.entry_at(names.HALF_TOPIC, 0, queue_offset)
    if log_offset is None:
        return None
    try:
        return facts_of(store.record_at(log_offset))
    except (NoSuchRecord, CorruptRecord):
        return None


def _lead_to_living(escrow: Escrow, store: RecoveredLog, passed: list[int]) -> None:
    """It appends a half anew for every check: a late end may name any of the older copies."""
    for queue_offset in passed:
        facts = _facts_at(store, queue_offset)
        living = escrow.open.find_by_key(facts.key, facts.group) if facts is not None else None
        if living is not None:
            escrow.settled.put(queue_offset, State.STRANDED)
            escrow.aliases[queue_offset] = living.queue_offset
            living.older += (queue_offset,)


def _records(store: RecoveredLog, topic: str, begin: int) -> Iterator[tuple[int, StoredRecord]]:
    for queue_offset in range(begin, store.max_offset(topic, 0)):
        log_offset = store.entry_at(topic, 0, queue_offset)
        if log_offset is None:
            continue
        try:
            yield queue_offset, store.record_at(log_offset)
        except (NoSuchRecord, CorruptRecord) as error:
            log.error("unreadable topic=%s queue_offset=%d: %s", topic, queue_offset, error)


def _read_ops(escrow: Escrow, store: RecoveredLog, begin: int, found: Recovered) -> None:
    escrow.cursors.op = begin
    for queue_offset, record in _records(store, names.OP_TOPIC, begin):
        op = decode_op(record)
        found.ops += 1
        if op is None:
            escrow.cursors.op_written(queue_offset, -1)
            continue
        escrow.cursors.op_written(queue_offset, max(op.halves))
        for half in op.halves:
            known = escrow.settled.state(half)
            if known is None or known.is_settled:
                continue  # below the log; or RocketMQ wrote it twice: the first decision stands
            state = op.state
            if state is None:
                facts, state = _outcome(store, half)
                found.takeover.settled(facts, state)
            # Moved: not open and not decided here; its copy says more.
            escrow.settled.put(half, State.STRANDED if state is State.OPEN else state)
            for old in op.also:
                escrow.settled.put(old, state)


def _outcome(store: RecoveredLog, queue_offset: int) -> tuple[HalfFacts | None, State]:
    """How a half ended of which RocketMQ only says that it did: was it delivered?"""
    log_offset = store.entry_at(names.HALF_TOPIC, 0, queue_offset)
    if log_offset is None:
        return None, State.ROLLED_BACK
    try:
        facts = facts_of(store.record_at(log_offset))
    except (NoSuchRecord, CorruptRecord):
        return None, State.ROLLED_BACK
    is_there = facts is not None and _final(store, facts.topic, facts.key, log_offset) is not None
    return facts, State.COMMITTED if is_there else State.ROLLED_BACK


def _final(store: RecoveredLog, topic: str, key: bytes, half_log_offset: int) -> object | None:
    for record in store.find_by_key(topic, key.decode("utf-8", "replace")) if key else ():
        is_final = transaction_type(record.sys_flag) == TRANSACTION_COMMIT
        if is_final and record.prepared_offset == half_log_offset:
            return record
    return None


def _steps(store: RecoveredLog, begin: int) -> dict[int, tuple[int, int]]:
    """By half: how often it was asked about, and when last."""
    found: dict[int, tuple[int, int]] = {}
    for _, record in _records(store, names.JOURNAL_TOPIC, begin):
        try:
            step = decode_step(record)
        except CorruptRecord:
            continue
        if step.what == "asked":
            found[step.half] = step.number, step.at_ms
    return found


def _read_open_halves(
    escrow: Escrow,
    store: RecoveredLog,
    first: int,
    asked: dict[int, tuple[int, int]],
    found: Recovered,
    now_ms: int,
) -> None:
    for glance in _unsettled(escrow, store, first):
        queue_offset = glance.queue_offset
        state = escrow.settled.state(queue_offset)
        found.halves += 1
        facts = facts_of(glance)
        found.takeover.saw(glance.properties)
        if state is None or facts is None:
            continue
        older: tuple[int, ...] = ()
        before = escrow.open.find_by_key(facts.key, facts.group)
        if before is not None:
            # Appended again, by us or by RocketMQ: the newest is the one that lives.
            if escrow.settled.state(before.queue_offset) is State.OPEN:
                moved = op_of(before.queue_offset, State.OPEN, "broker", now_ms=now_ms)
                found.records.append(moved)
            older = _replace(escrow, before, queue_offset)
        half = _enter(escrow, glance, facts, state, asked.get(queue_offset))
        # A place that the log has lost still leads to it: whoever parked it may know no other.
        half.older = tuple(dict.fromkeys((*facts.older, *older)))
        escrow.aliases.update(dict.fromkeys(facts.older, queue_offset))


def _unsettled(escrow: Escrow, store: RecoveredLog, first: int) -> Iterator[Glance]:
    """Run by run: most of a long queue may be settled, and then nothing of it is read."""
    at = first
    while (at := escrow.settled.first_unsettled(at)) < escrow.settled.next:
        end = escrow.settled.first_settled(at)
        for glance in store.glances(names.HALF_TOPIC, 0, at, end):
            _report_gap(escrow, at, glance.queue_offset)
            at = glance.queue_offset + 1
            yield glance
        _report_gap(escrow, at, end)
        at = end


def _report_gap(escrow: Escrow, begin: int, end: int) -> None:
    """Halves that nothing says are settled, and that the log cannot give."""
    if begin < end:
        escrow.counts.unreadable += end - begin
        log.error("halves unreadable queue_offsets=%d..%d: lost", begin, end - 1)


def _enter(
    escrow: Escrow,
    glance: Glance,
    facts: HalfFacts,
    state: State,
    asked: tuple[int, int] | None,
) -> Half:
    half = escrow.parked(
        facts,
        queue_offset=glance.queue_offset,
        log_offset=glance.log_offset,
        size=glance.size,
        parked_ms=glance.stored_ms,
    )
    if facts.past is not None:
        half.parked_ms, half.due_ms, half.checks, is_stranded = facts.past
        escrow.due.add(half.queue_offset, half.due_ms)
        if is_stranded and state is State.OPEN:
            state = State.STRANDED
            escrow.settled.put(half.queue_offset, state)
    if state is State.STRANDED:
        escrow.open.strand(half)
        half.why = "stranded before this start"
        half.checks = half.checks if asked is None else asked[0]
    elif asked is not None:
        half.checks = asked[0] - 1
        escrow.asked(half, asked[1])
    return half


def _replace(escrow: Escrow, before: Half, new: int) -> tuple[int, ...]:
    escrow.open.remove(before)
    escrow.leave_attempt(before)
    escrow.settled.put(before.queue_offset, State.STRANDED)
    older = (*before.older, before.queue_offset)
    for place in older:
        escrow.aliases[place] = new
    return older


def _complete_last_final(
    escrow: Escrow, store: RecoveredLog, found: Recovered, now_ms: int
) -> None:
    """Final and op are one append, in this order: only the last record of all can lack its op."""
    if store.last_record < 0:
        return
    try:
        last = store.record_at(store.last_record)
    except (NoSuchRecord, CorruptRecord):
        return
    if transaction_type(last.sys_flag) == TRANSACTION_COMMIT:
        _complete(escrow, store, last, found, now_ms)
    elif last.topic == names.STRANDED_TOPIC:
        _complete_stranded(escrow, last, found, now_ms)


def _complete(
    escrow: Escrow, store: RecoveredLog, last: StoredRecord, found: Recovered, now_ms: int
) -> None:
    try:
        record = store.record_at(last.prepared_offset)
    except (NoSuchRecord, CorruptRecord):
        return
    half = escrow.open.find(record.queue_offset) if record.topic == names.HALF_TOPIC else None
    if half is None or half.log_offset != last.prepared_offset:
        return
    key = find_property(last.properties, b"UNIQ_KEY") or b""
    if is_packed(record.properties):
        finals = list(one_by_one(finals_of(record, half.topic, half.queue_id)))
        keys = [find_property(final.properties, b"UNIQ_KEY") for final in finals]
        if key not in keys:
            return
        found.records += finals[keys.index(key) + 1 :]  # they are one append as well: a prefix
    elif key != half.key:
        return  # a message that only says that it was committed; the first half of all lies at 0
    why, older = "its final was there", half.older
    found.records.append(
        op_of(half.queue_offset, State.COMMITTED, "broker", why, also=older, now_ms=now_ms)
    )
    escrow.settled.put(half.queue_offset, State.COMMITTED)
    escrow.close(half, State.COMMITTED)


def _complete_stranded(escrow: Escrow, last: StoredRecord, found: Recovered, now_ms: int) -> None:
    facts = facts_of(last)
    half = escrow.open.find_by_key(facts.key, facts.group) if facts is not None else None
    if half is not None and not half.is_stranded:
        escrow.open.strand(half)
        half.why = "stranded before this start"
        escrow.settled.put(half.queue_offset, State.STRANDED)
        found.records.append(
            op_of(half.queue_offset, State.STRANDED, "broker", half.why, now_ms=now_ms)
        )


def _complete_taken_over(
    escrow: Escrow, store: RecoveredLog, found: Recovered, now_ms: int
) -> None:
    """Without our memory, or where RocketMQ was: what is over is not asked about."""
    for half in list(escrow.open):
        state = found.takeover.outcome(half, store)
        if state is None or half.is_stranded:
            continue
        why = "so RocketMQ left it"
        older = half.older if state.is_settled else ()
        found.records.append(
            op_of(half.queue_offset, state, "broker", why, also=older, now_ms=now_ms)
        )
        escrow.settled.put(half.queue_offset, state)
        if state is State.STRANDED:
            escrow.open.strand(half)
            half.why = why
            continue
        escrow.close(half, state)
