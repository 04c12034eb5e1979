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

from escrowmq.errors import CorruptRecord, RecordNotFound
from escrowmq.escrow.coordinator import HalfLog, TransactionCoordinator
from escrowmq.escrow.half_table import Half, HalfStates
from escrowmq.escrow.records import (
    HalfProperties,
    decode_journal_entry,
    decode_op,
    is_escrowmq_half,
    is_packed,
    make_finals,
    make_op,
    parse_half,
)
from escrowmq.escrow.writers import DecisionRecord, WriterTable, decode_decision
from escrowmq.message import names
from escrowmq.message.batch import iter_records
from escrowmq.message.names import CHECK_TIMES
from escrowmq.message.properties import find_property
from escrowmq.message.record import TRANSACTION_COMMIT, NewRecord, StoredRecord, transaction_type
from escrowmq.message.transaction import TransactionState


class HalfSummary(Protocol):
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


class RecoveryLog(HalfLog, Protocol):
    def min_offset(self, topic: str, queue_id: int) -> int: ...
    def max_offset(self, topic: str, queue_id: int) -> int: ...
    def find_by_key(self, topic: str, key: str, *, count_max: int = 32) -> list[StoredRecord]: ...

    def record_summaries(
        self, topic: str, queue_id: int, begin: int, end: int
    ) -> Iterator[HalfSummary]: ...

    @property
    def last_record_offset(self) -> int: ...


RECENT_HALVES_MAX: Final = 16_384  # halves: a fraction of a second of a start


def load_recent_keys(coordinator: TransactionCoordinator, store: RecoveryLog) -> None:
    """Of several with one key, the last is the one that lived."""
    end = coordinator.states.next_offset
    begin = max(store.min_offset(names.HALF_TOPIC, 0), end - RECENT_HALVES_MAX)
    for half in store.record_summaries(names.HALF_TOPIC, 0, begin, end):
        state = coordinator.states.get(half.queue_offset)
        if state is None or not state.is_decided:
            continue
        facts = parse_half(half)
        if facts is not None and facts.key:
            group = coordinator.halves.intern_name(facts.group)
            coordinator.recent_keys[facts.key] = group, half.queue_offset, half.log_offset


_CHECK_TIMES_KEY = f"{CHECK_TIMES}\x01".encode()


class KeyLookup(Protocol):
    def find_by_key(self, topic: str, key: str, *, count_max: int = 32) -> list[StoredRecord]: ...


class RocketMQTakeover:
    """Notes of a start: was RocketMQ here, and what has it settled?"""

    def __init__(self) -> None:
        self.is_detected = False
        self._states: dict[tuple[str, bytes], TransactionState] = {}

    def add_decided(self, properties: HalfProperties | None, state: TransactionState) -> None:
        """One of its ops says so, of this half or of a copy of it."""
        self.is_detected = True
        if properties is not None and properties.key:
            self._states[properties.group, properties.key] = state

    def inspect_half(self, properties: bytes) -> None:
        """The properties of a half that looks open."""
        if _CHECK_TIMES_KEY in properties or not is_escrowmq_half(properties):
            self.is_detected = True

    def decided_state(self, half: Half, store: KeyLookup) -> TransactionState | None:
        """None: it is as open as it looks."""
        if not half.key:
            return None
        key = half.key.decode("utf-8", "replace")
        for record in store.find_by_key(half.topic, key):
            is_final = transaction_type(record.sys_flag) == TRANSACTION_COMMIT
            if is_final and find_property(record.properties, b"PGROUP") == half.group.encode():
                return TransactionState.COMMITTED
        settled = self._states.get((half.group, half.key))
        if settled is not None:
            return settled
        for record in store.find_by_key(names.STRANDED_TOPIC, key):
            if record.log_offset > half.log_offset:  # else it was resumed since
                return TransactionState.STRANDED
        return None


SNAPSHOT_PATH: Final = "escrowmq.escrow"


class CoordinatorSnapshot(msgspec.Struct, frozen=True, kw_only=True):
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


def encode_snapshot(snapshot: CoordinatorSnapshot) -> bytes:
    data = msgspec.msgpack.encode(snapshot)
    return crc32(data).to_bytes(4, "big") + data


def decode_snapshot(content: bytes, log_begin: int, log_end: int) -> CoordinatorSnapshot | None:
    """None if there is none that fits this log: it can be done without."""
    data = content[4:]
    if len(content) <= 4 or crc32(data) != int.from_bytes(content[:4], "big"):
        return None
    try:
        snapshot = msgspec.msgpack.decode(data, type=CoordinatorSnapshot)
    except msgspec.MsgspecError:  # of another version
        return None
    # Of what the log has lost it must not speak, nor of another log.
    return snapshot if log_begin <= snapshot.log_offset <= log_end else None


log = logging.getLogger(__name__)

# So many open halves are looked up at every start, which takes a quarter of a second. RocketMQ may
# have delivered one that we parked and have lost the op in a crash: then nothing shows that it was
# here but the message itself.
TAKEOVER_LOOKUPS_MAX: Final = 10_000


@dataclass(slots=True)
class RecoveryResult:
    half_count: int = 0
    op_count: int = 0
    open_count: int = 0
    records: list[NewRecord] = field(default_factory=list)  # what the crash cut off
    unfinished_decisions: list[DecisionRecord] = field(
        default_factory=list
    )  # that may not be carried out yet
    takeover: RocketMQTakeover = field(default_factory=RocketMQTakeover)


def recover(
    coordinator: TransactionCoordinator,
    store: RecoveryLog,
    snapshot: CoordinatorSnapshot | None,
    rocketmq_cursor: int | None,
    *,
    now_ms: int,
) -> RecoveryResult:
    """Fill an empty escrow. The records it returns are to be appended before anybody is served.

    `cursor`: the first half that RocketMQ would look at, if it has been here; it never stands
    behind a half that is open.
    """
    found = RecoveryResult()
    first = store.min_offset(names.HALF_TOPIC, 0)
    ops_from, steps_from = (
        store.min_offset(names.OP_TOPIC, 0),
        store.min_offset(names.JOURNAL_TOPIC, 0),
    )
    asked: dict[int, tuple[int, int]] = {}
    if snapshot is None:
        coordinator.states = HalfStates(first, first)
    else:
        coordinator.states = HalfStates(snapshot.base, snapshot.halves_read, snapshot.bits)
        coordinator.states.purge_below(first)
        coordinator.aliases = dict(snapshot.aliases)
        coordinator.writers = WriterTable.load(snapshot.writers)
        ops_from = max(ops_from, snapshot.op_cursor)  # those it has read already, for the cursor
        steps_from = max(steps_from, snapshot.steps_read)
        asked = dict(snapshot.checks)
    coordinator.states.extend_to(store.max_offset(names.HALF_TOPIC, 0) - 1)
    coordinator.cursors.half_offset = max(first, snapshot.half_cursor if snapshot else 0)
    _read_ops(coordinator, store, ops_from, found)
    asked |= _read_checks(store, steps_from)
    passed = _mark_passed(coordinator, store, first, rocketmq_cursor)
    _read_open_halves(coordinator, store, first, asked, found, now_ms)
    _alias_passed_copies(coordinator, store, passed)
    _complete_last_record(coordinator, store, found, now_ms)
    if (
        snapshot is None
        or found.takeover.is_detected
        or len(coordinator.halves) <= TAKEOVER_LOOKUPS_MAX
    ):
        _complete_takeover(coordinator, store, found, now_ms)
    _read_decisions(coordinator, store, 0 if snapshot is None else snapshot.decisions_read, found)
    load_recent_keys(coordinator, store)
    coordinator.advance_cursors()
    found.open_count = len(coordinator.halves)
    return found


def _read_decisions(
    coordinator: TransactionCoordinator, store: RecoveryLog, begin: int, result: RecoveryResult
) -> None:
    first = max(begin, store.min_offset(names.DECISION_TOPIC, 0))
    for _, record in _read_records(store, names.DECISION_TOPIC, first):
        try:
            decision = decode_decision(record)
        except CorruptRecord as error:
            log.error("decision unreadable: %s", error)
            continue
        coordinator.writers.apply(decision, record.log_offset)
        halves = (*decision.commits, *decision.rolls_back)
        if any(coordinator.halves.find(coordinator.aliases.get(half, half)) for half in halves):
            result.unfinished_decisions.append(decision)


def _mark_passed(
    coordinator: TransactionCoordinator,
    store: RecoveryLog,
    first_offset: int,
    rocketmq_cursor: int | None,
) -> list[int]:
    """What RocketMQ has passed is over, though nothing says how: it kept no memory of that. What
    we stranded and then appended again was passed too, and only its own record says so."""
    passed = []
    for queue_offset in range(
        first_offset, min(rocketmq_cursor or 0, coordinator.states.next_offset)
    ):
        if coordinator.states.get(queue_offset) is not TransactionState.OPEN:
            continue
        facts = _half_properties_at(store, queue_offset)
        if facts is not None and facts.check_state is not None and facts.check_state.is_stranded:
            coordinator.states.put(queue_offset, TransactionState.STRANDED)
        else:
            coordinator.states.put(queue_offset, TransactionState.ROLLED_BACK)
            passed.append(queue_offset)
    return passed


def _half_properties_at(store: RecoveryLog, queue_offset: int) -> HalfProperties | None:
    """None if the half cannot be read."""
    log_offset = store.log_offset_of(names.HALF_TOPIC, 0, queue_offset)
    if log_offset is None:
        return None
    try:
        return parse_half(store.record_at(log_offset))
    except (RecordNotFound, CorruptRecord):
        return None


def _alias_passed_copies(
    coordinator: TransactionCoordinator, store: RecoveryLog, passed_offsets: list[int]
) -> None:
    """It appends a half anew for every check: a late end may name any of the older copies."""
    for queue_offset in passed_offsets:
        facts = _half_properties_at(store, queue_offset)
        living = (
            coordinator.halves.find_by_key(facts.key, facts.group) if facts is not None else None
        )
        if living is not None:
            coordinator.states.put(queue_offset, TransactionState.STRANDED)
            coordinator.aliases[queue_offset] = living.queue_offset
            living.previous_offsets += (queue_offset,)


def _read_records(store: RecoveryLog, topic: str, begin: int) -> Iterator[tuple[int, StoredRecord]]:
    for queue_offset in range(begin, store.max_offset(topic, 0)):
        log_offset = store.log_offset_of(topic, 0, queue_offset)
        if log_offset is None:
            continue
        try:
            yield queue_offset, store.record_at(log_offset)
        except (RecordNotFound, CorruptRecord) as error:
            log.error("unreadable topic=%s queue_offset=%d: %s", topic, queue_offset, error)


def _read_ops(
    coordinator: TransactionCoordinator, store: RecoveryLog, begin: int, result: RecoveryResult
) -> None:
    coordinator.cursors.op_offset = begin
    for queue_offset, record in _read_records(store, names.OP_TOPIC, begin):
        op = decode_op(record)
        result.op_count += 1
        if op is None:
            coordinator.cursors.add_op(queue_offset, -1)
            continue
        coordinator.cursors.add_op(queue_offset, max(op.half_offsets))
        for half in op.half_offsets:
            known = coordinator.states.get(half)
            if known is None or known.is_decided:
                continue  # below the log; or RocketMQ wrote it twice: the first decision stands
            state = op.state
            if state is None:
                facts, state = _decided_state(store, half)
                result.takeover.add_decided(facts, state)
            # Moved: not open and not decided here; its copy says more.
            coordinator.states.put(
                half, TransactionState.STRANDED if state is TransactionState.OPEN else state
            )
            for old in op.previous_offsets:
                coordinator.states.put(old, state)


def _decided_state(
    store: RecoveryLog, queue_offset: int
) -> tuple[HalfProperties | None, TransactionState]:
    """How a half ended of which RocketMQ only says that it did: was it delivered?"""
    log_offset = store.log_offset_of(names.HALF_TOPIC, 0, queue_offset)
    if log_offset is None:
        return None, TransactionState.ROLLED_BACK
    try:
        facts = parse_half(store.record_at(log_offset))
    except (RecordNotFound, CorruptRecord):
        return None, TransactionState.ROLLED_BACK
    is_there = (
        facts is not None and _find_final(store, facts.topic, facts.key, log_offset) is not None
    )
    return facts, TransactionState.COMMITTED if is_there else TransactionState.ROLLED_BACK


def _find_final(store: RecoveryLog, topic: str, key: bytes, half_log_offset: int) -> object | None:
    for record in store.find_by_key(topic, key.decode("utf-8", "replace")) if key else ():
        is_final = transaction_type(record.sys_flag) == TRANSACTION_COMMIT
        if is_final and record.prepared_offset == half_log_offset:
            return record
    return None


def _read_checks(store: RecoveryLog, begin: int) -> dict[int, tuple[int, int]]:
    """By half: how often it was asked about, and when last."""
    found: dict[int, tuple[int, int]] = {}
    for _, record in _read_records(store, names.JOURNAL_TOPIC, begin):
        try:
            step = decode_journal_entry(record)
        except CorruptRecord:
            continue
        if step.event == "asked":
            found[step.half_offset] = step.check_number, step.stored_ms
    return found


def _read_open_halves(
    coordinator: TransactionCoordinator,
    store: RecoveryLog,
    first_offset: int,
    checks: dict[int, tuple[int, int]],
    result: RecoveryResult,
    now_ms: int,
) -> None:
    for glance in _read_undecided(coordinator, store, first_offset):
        queue_offset = glance.queue_offset
        state = coordinator.states.get(queue_offset)
        result.half_count += 1
        facts = parse_half(glance)
        result.takeover.inspect_half(glance.properties)
        if state is None or facts is None:
            continue
        older: tuple[int, ...] = ()
        before = coordinator.halves.find_by_key(facts.key, facts.group)
        if before is not None:
            # Appended again, by us or by RocketMQ: the newest is the one that lives.
            if coordinator.states.get(before.queue_offset) is TransactionState.OPEN:
                moved = make_op(before.queue_offset, TransactionState.OPEN, "broker", now_ms=now_ms)
                result.records.append(moved)
            older = _replace_copy(coordinator, before, queue_offset)
        half = _restore_half(coordinator, glance, facts, state, checks.get(queue_offset))
        # A place that the log has lost still leads to it: whoever parked it may know no other.
        half.previous_offsets = tuple(dict.fromkeys((*facts.previous_offsets, *older)))
        coordinator.aliases.update(dict.fromkeys(facts.previous_offsets, queue_offset))


def _read_undecided(
    coordinator: TransactionCoordinator, store: RecoveryLog, first_offset: int
) -> Iterator[HalfSummary]:
    """Run by run: most of a long queue may be settled, and then nothing of it is read."""
    at = first_offset
    while (at := coordinator.states.first_undecided(at)) < coordinator.states.next_offset:
        end = coordinator.states.first_decided(at)
        for glance in store.record_summaries(names.HALF_TOPIC, 0, at, end):
            _report_gap(coordinator, at, glance.queue_offset)
            at = glance.queue_offset + 1
            yield glance
        _report_gap(coordinator, at, end)
        at = end


def _report_gap(coordinator: TransactionCoordinator, begin: int, end: int) -> None:
    """Halves that nothing says are settled, and that the log cannot give."""
    if begin < end:
        coordinator.counters.unreadable_halves += end - begin
        log.error("halves unreadable queue_offsets=%d..%d: lost", begin, end - 1)


def _restore_half(
    coordinator: TransactionCoordinator,
    summary: HalfSummary,
    properties: HalfProperties,
    state: TransactionState,
    check: tuple[int, int] | None,
) -> Half:
    half = coordinator.restore_half(
        properties,
        queue_offset=summary.queue_offset,
        log_offset=summary.log_offset,
        size=summary.size,
        parked_ms=summary.stored_ms,
    )
    if properties.check_state is not None:
        half.parked_ms, half.due_ms, half.checks, is_stranded = properties.check_state
        coordinator.schedule.add(half.queue_offset, half.due_ms)
        if is_stranded and state is TransactionState.OPEN:
            state = TransactionState.STRANDED
            coordinator.states.put(half.queue_offset, state)
    if state is TransactionState.STRANDED:
        coordinator.halves.strand(half)
        half.reason = "stranded before this start"
        half.checks = half.checks if check is None else check[0]
    elif check is not None:
        half.checks = check[0] - 1
        coordinator.check_sent(half, check[1])
    return half


def _replace_copy(
    coordinator: TransactionCoordinator, previous: Half, queue_offset: int
) -> tuple[int, ...]:
    coordinator.halves.remove(previous)
    coordinator.remove_from_attempt(previous)
    coordinator.states.put(previous.queue_offset, TransactionState.STRANDED)
    older = (*previous.previous_offsets, previous.queue_offset)
    for place in older:
        coordinator.aliases[place] = queue_offset
    return older


def _complete_last_record(
    coordinator: TransactionCoordinator, store: RecoveryLog, result: RecoveryResult, now_ms: int
) -> None:
    """Final and op are one append, in this order: only the last record of all can lack its op."""
    if store.last_record_offset < 0:
        return
    try:
        last = store.record_at(store.last_record_offset)
    except (RecordNotFound, CorruptRecord):
        return
    if transaction_type(last.sys_flag) == TRANSACTION_COMMIT:
        _complete_commit(coordinator, store, last, result, now_ms)
    elif last.topic == names.STRANDED_TOPIC:
        _complete_stranded(coordinator, last, result, now_ms)


def _complete_commit(
    coordinator: TransactionCoordinator,
    store: RecoveryLog,
    last_record: StoredRecord,
    result: RecoveryResult,
    now_ms: int,
) -> None:
    try:
        record = store.record_at(last_record.prepared_offset)
    except (RecordNotFound, CorruptRecord):
        return
    half = (
        coordinator.halves.find(record.queue_offset) if record.topic == names.HALF_TOPIC else None
    )
    if half is None or half.log_offset != last_record.prepared_offset:
        return
    key = find_property(last_record.properties, b"UNIQ_KEY") or b""
    if is_packed(record.properties):
        finals = list(iter_records(make_finals(record, half.topic, half.queue_id)))
        keys = [find_property(final.properties, b"UNIQ_KEY") for final in finals]
        if key not in keys:
            return
        result.records += finals[keys.index(key) + 1 :]  # they are one append as well: a prefix
    elif key != half.key:
        return  # a message that only says that it was committed; the first half of all lies at 0
    why, older = "its final was there", half.previous_offsets
    result.records.append(
        make_op(
            half.queue_offset,
            TransactionState.COMMITTED,
            "broker",
            why,
            previous_offsets=older,
            now_ms=now_ms,
        )
    )
    coordinator.states.put(half.queue_offset, TransactionState.COMMITTED)
    coordinator.close(half, TransactionState.COMMITTED)


def _complete_stranded(
    coordinator: TransactionCoordinator,
    last_record: StoredRecord,
    result: RecoveryResult,
    now_ms: int,
) -> None:
    facts = parse_half(last_record)
    half = coordinator.halves.find_by_key(facts.key, facts.group) if facts is not None else None
    if half is not None and not half.is_stranded:
        coordinator.halves.strand(half)
        half.reason = "stranded before this start"
        coordinator.states.put(half.queue_offset, TransactionState.STRANDED)
        result.records.append(
            make_op(
                half.queue_offset, TransactionState.STRANDED, "broker", half.reason, now_ms=now_ms
            )
        )


def _complete_takeover(
    coordinator: TransactionCoordinator, store: RecoveryLog, result: RecoveryResult, now_ms: int
) -> None:
    """Without our memory, or where RocketMQ was: what is over is not asked about."""
    for half in list(coordinator.halves):
        state = result.takeover.decided_state(half, store)
        if state is None or half.is_stranded:
            continue
        why = "so RocketMQ left it"
        older = half.previous_offsets if state.is_decided else ()
        result.records.append(
            make_op(half.queue_offset, state, "broker", why, previous_offsets=older, now_ms=now_ms)
        )
        coordinator.states.put(half.queue_offset, state)
        if state is TransactionState.STRANDED:
            coordinator.halves.strand(half)
            half.reason = why
            continue
        coordinator.close(half, state)
