"""Rebuild the coordinator from the log: after a stop, a crash, or a time under RocketMQ.

    halves     every half is open,
    ops        unless an op says that it is decided; ours also say how
    journal    how often each half was checked
    decisions  writers, and group decisions that may not be carried out yet
    finals     final and op are one append, so only the very last record of the log can be a final
               without its op; its half is committed

A snapshot makes this short: it holds the states of all halves, and how far the queues were read
for them. The undecided halves themselves are always read from the log. The snapshot is derived and
disposable; without it everything is read, with the same result.

If RocketMQ ran on this directory, an op may be missing for other reasons. RocketMQ appends a half
again for every check and decides the newest copy, and older copies stay as they were. A half that
looks open is therefore decided if any copy of it is, or if its message was delivered or discarded.

Clients choose the key, the group and the body of a message, and in an old log also the flags of a
plain one. None of these proves anything. A final is one only if its prepared offset, which no
client can set, names a half of the same origin. Two records are copies of one half only if they
have the same origin: the address and the time they came from, which copies keep, and the body. The
cursors that RocketMQ keeps as offsets of a consumer group are not read at all: what they would
skip is decided by ops, or it is open.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from escrowmq.errors import CorruptRecord, RecordNotFound
from escrowmq.escrow.coordinator import TransactionCoordinator
from escrowmq.escrow.decisions import Decision, HalfLog
from escrowmq.escrow.half_table import (
    GroupTopicKey,
    Half,
    HalfStates,
)
from escrowmq.escrow.records import (
    HalfProperties,
    MessageOrigin,
    decode_journal_entry,
    decode_op,
    is_delayed,
    is_escrowmq_half,
    is_final_of,
    is_packed,
    origin_of,
    parse_half,
    plain_commit_offset,
)
from escrowmq.escrow.snapshot import (
    CheckHistories,
    CheckHistory,
    CoordinatorSnapshot,
    TimeConversion,
)
from escrowmq.escrow.writers import DecisionRecord, WriterTable, decode_decision
from escrowmq.message import names
from escrowmq.message.batch import iter_records
from escrowmq.message.names import CHECK_TIMES
from escrowmq.message.properties import find_property
from escrowmq.message.record import TRANSACTION_COMMIT, NewRecord, StoredRecord, transaction_type
from escrowmq.message.transaction import COMMITTED, ROLLED_BACK, STRANDED, TransactionState

log = logging.getLogger(__name__)

# Up to this many open halves are looked up among the delivered messages at every start, which
# takes a quarter of a second. RocketMQ may have delivered a half that we parked and have lost the
# op in a crash; then the delivered message is the only trace of it.
TAKEOVER_LOOKUPS_MAX: Final = 10_000
SINGLE_RECORDS_MAX: Final = 4_096  # read one by one before the table is offered many again
WINDOW_OPS_MAX: Final = 4_096  # offered to the table at once
WINDOW_OPS_MIN: Final = 16
RECENT_HALVES_MAX: Final = 16_384  # whose keys are read at a start, in a fraction of a second


class HalfSummary(Protocol):
    """Position and properties of a record, without its body."""

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


class HalfWindow(Protocol):
    """Queue entries of halves, and a part of the log that has their records."""

    @property
    def count(self) -> int: ...
    @property
    def entries(self) -> bytes: ...
    @property
    def data(self) -> bytes: ...
    @property
    def data_begin(self) -> int: ...


class KeyLookup(Protocol):
    def find_by_key(self, topic: str, key: str, *, count_max: int = 32) -> list[StoredRecord]: ...


class RecoveryLog(HalfLog, KeyLookup, Protocol):
    """The part of the store that recovery reads."""

    def min_offset(self, topic: str, queue_id: int) -> int: ...
    def max_offset(self, topic: str, queue_id: int) -> int: ...

    def record_summaries(
        self, topic: str, queue_id: int, begin: int, end: int
    ) -> Iterator[HalfSummary]: ...

    def record_window(self, topic: str, queue_id: int, begin: int, end: int) -> HalfWindow | None:
        """Return neighbouring records of a queue from `begin` on; None if they are far apart."""

    @property
    def last_record_offset(self) -> int: ...


# --- recovery ------------------------------------------------------------------------------------


@dataclass(slots=True)
class RecoveryResult:
    """What was read, and what has to be appended before the broker serves requests.

    Append `decisions` and then `move_ops`, in one append. The decisions come first, because the
    next recovery finds a commit without op only if its final is the last record of the log.
    """

    half_count: int = 0
    op_count: int = 0
    decisions: list[Decision] = field(default_factory=list)  # that a crash cut off
    move_ops: list[NewRecord] = field(default_factory=list)  # of halves replaced by a copy
    unfinished_decisions: list[DecisionRecord] = field(default_factory=list)
    takeover: RocketMQTakeover = field(default_factory=lambda: RocketMQTakeover())


def recover(
    coordinator: TransactionCoordinator,
    store: RecoveryLog,
    snapshot: CoordinatorSnapshot | None,
    *,
    times: TimeConversion,
) -> RecoveryResult:
    """Fill an empty coordinator from the log."""
    result, now_ms = RecoveryResult(), times.now_ms
    first_half = store.min_offset(names.HALF_TOPIC, 0)
    first_op = store.min_offset(names.OP_TOPIC, 0)
    first_journal_entry = store.min_offset(names.JOURNAL_TOPIC, 0)
    checks = CheckHistories(snapshot, times)
    if snapshot is None:
        coordinator.states = HalfStates(first_half, first_half)
    else:
        coordinator.states = HalfStates(snapshot.base, snapshot.halves_read, snapshot.bits)
        coordinator.states.purge_below(first_half)
        coordinator.aliases = dict(snapshot.aliases)
        coordinator.writers = WriterTable.load(snapshot.writers)
        # Ops from the cursor on are read again, although their states are known, for the cursor.
        first_op = max(first_op, snapshot.op_cursor)
        first_journal_entry = max(first_journal_entry, snapshot.steps_read)
    coordinator.states.extend_to(store.max_offset(names.HALF_TOPIC, 0) - 1)
    coordinator.cursors.half_offset = max(first_half, snapshot.half_cursor if snapshot else 0)
    _read_ops(coordinator, store, first_op, result)
    _read_checks(store, first_journal_entry, checks, times)
    checks.sort_changed()
    _read_undecided_halves(coordinator, store, first_half, checks, result, times)
    _complete_last_record(coordinator, store, result, now_ms)
    if (
        snapshot is None
        or result.takeover.is_detected
        or len(coordinator.halves) <= TAKEOVER_LOOKUPS_MAX
    ):
        _complete_takeover(coordinator, store, result, now_ms)
    _read_decisions(coordinator, store, 0 if snapshot is None else snapshot.decisions_read, result)
    _load_recent_keys(coordinator, store)
    coordinator.advance_cursors()
    return result


def _read_records(
    store: RecoveryLog, topic: str, begin: int, end: int | None = None
) -> Iterator[tuple[int, StoredRecord]]:
    """Yield queue offset and record; log those that cannot be read."""
    for queue_offset in range(begin, store.max_offset(topic, 0) if end is None else end):
        log_offset = store.log_offset_of(topic, 0, queue_offset)
        if log_offset is None:
            continue
        try:
            yield queue_offset, store.record_at(log_offset)
        except (RecordNotFound, CorruptRecord) as error:
            log.error("record unreadable topic=%s queue_offset=%d: %s", topic, queue_offset, error)


def _read_ops(
    coordinator: TransactionCoordinator, store: RecoveryLog, begin: int, result: RecoveryResult
) -> None:
    coordinator.cursors.op_offset = begin
    offset, end = begin, store.max_offset(names.OP_TOPIC, 0)
    single_count, window_ops = 1, WINDOW_OPS_MIN
    while offset < end:
        # Most ops are plain commits, and the table may be able to read many at once.
        count = _read_plain_commits(coordinator, store, offset, end, window_ops)
        offset += count
        result.op_count += count
        # Where others are among them, the records behind the next one would be read in vain: with
        # a quarter of others, 29,000 ops took four seconds.
        window_ops = max(WINDOW_OPS_MIN, min(2 * count, WINDOW_OPS_MAX))
        single_count = 1 if count else min(2 * single_count, SINGLE_RECORDS_MAX)
        single_end = min(end, offset + single_count)
        _read_ops_one_by_one(coordinator, store, offset, single_end, result)
        offset = single_end


def _read_plain_commits(
    coordinator: TransactionCoordinator,
    store: RecoveryLog,
    begin: int,
    end: int,
    window_ops: int,
) -> int:
    """Let the table read plain commits from an offset on, and return how many it read.

    It looks at `window_ops` records at first, and at twice as many whenever all were plain.
    """
    states, offset = coordinator.states, begin
    while True:
        window = store.record_window(names.OP_TOPIC, 0, offset, min(end, offset + window_ops))
        if window is None:
            break
        committed = array("q")
        committed.frombytes(
            coordinator.halves.plain_commits(offset, window.entries, window.data, window.data_begin)
        )
        coordinator.cursors.add_ops(offset, committed)
        for queue_offset in committed:
            recorded = states.get(queue_offset)
            if recorded is not None and not recorded.is_decided:
                states.put(queue_offset, COMMITTED)
        offset += len(committed)
        if len(committed) < window.count:
            break  # the next one is not plain
        window_ops = min(2 * window_ops, WINDOW_OPS_MAX)
    return offset - begin


def _read_ops_one_by_one(
    coordinator: TransactionCoordinator,
    store: RecoveryLog,
    begin: int,
    end: int,
    result: RecoveryResult,
) -> None:
    states, cursors = coordinator.states, coordinator.cursors
    for op_offset, record in _read_records(store, names.OP_TOPIC, begin, end):
        result.op_count += 1
        committed = plain_commit_offset(record)
        if committed is not None:
            cursors.add_op(op_offset, committed)
            recorded = states.get(committed)
            if recorded is not None and not recorded.is_decided:
                states.put(committed, COMMITTED)
            continue
        op = decode_op(record)
        if op is None:
            cursors.add_op(op_offset, -1)
            continue
        cursors.add_op(op_offset, max(op.half_offsets))
        for queue_offset in op.half_offsets:
            recorded = states.get(queue_offset)
            if recorded is None or recorded.is_decided:
                continue  # expired; or RocketMQ wrote two ops, and the first decision stands
            state = op.state
            if state is None:
                state = _decided_state(store, queue_offset, result.takeover)
            # OPEN means moved: neither open nor decided at this position.
            states.put(queue_offset, STRANDED if state is TransactionState.OPEN else state)
            for previous_offset in op.previous_offsets:
                states.put(previous_offset, state)


def _decided_state(
    store: RecoveryLog, queue_offset: int, takeover: RocketMQTakeover
) -> TransactionState:
    """Find out how a half ended for which RocketMQ wrote an op: it is committed if delivered."""
    takeover.is_detected = True
    log_offset = store.log_offset_of(names.HALF_TOPIC, 0, queue_offset)
    half = None if log_offset is None else _read_record(store, log_offset)
    properties = None if half is None else parse_half(half)
    if half is None or properties is None:
        return ROLLED_BACK
    is_delivered = any(
        is_final_of(final, half, properties)
        for final in _find_finals(
            store, properties.topic, properties.key, is_delayed(half.properties)
        )
    )
    state = COMMITTED if is_delivered else ROLLED_BACK
    takeover.add_decided(half, properties, state)
    return state


def _find_finals(
    store: KeyLookup, topic: str, key: bytes, has_delay: bool
) -> Iterator[StoredRecord]:
    """Yield the records that claim to be finals of a half with this key."""
    topics = (topic, names.SCHEDULE_TOPIC, names.TIMER_TOPIC) if has_delay else (topic,)
    for final_topic in topics if key else ():
        for record in store.find_by_key(final_topic, key.decode("utf-8", "replace")):
            if transaction_type(record.sys_flag) == TRANSACTION_COMMIT:
                yield record


def _read_record(store: HalfLog, log_offset: int) -> StoredRecord | None:
    """Return a record; None if it cannot be read."""
    try:
        return store.record_at(log_offset)
    except (RecordNotFound, CorruptRecord):
        return None


def _read_checks(
    store: RecoveryLog, begin: int, checks: CheckHistories, times: TimeConversion
) -> None:
    """Add what the journal says from `begin` on, by half."""
    for _, record in _read_records(store, names.JOURNAL_TOPIC, begin):
        try:
            entry = decode_journal_entry(record)
        except CorruptRecord:
            continue
        history = checks.get(entry.half_offset)
        if entry.event == "asked":
            checked_ms = times.stored_ms(entry.stored_ms, record.log_offset)
            history = history._replace(checks=entry.check_number, last_check_ms=checked_ms)
        elif entry.event == "unknown":
            history = history._replace(unknown_answers=history.unknown_answers + 1)
        if entry.event in ("unknown", "unknown_at_send") and entry.reason:
            history = history._replace(last_remark=entry.reason)
        checks.put(entry.half_offset, history)


# --- undecided halves ----------------------------------------------------------------------------


def _read_undecided_halves(
    coordinator: TransactionCoordinator,
    store: RecoveryLog,
    first_offset: int,
    checks: CheckHistories,
    result: RecoveryResult,
    times: TimeConversion,
) -> None:
    """Read run by run. Most of a long queue may be decided, and none of that is read."""
    copies, states = _Copies(coordinator, store), coordinator.states
    offset = open_end = first_offset
    while (offset := states.first_undecided(offset)) < states.next_offset:
        end = states.first_decided(offset)
        single_count = 1
        while offset < end:
            if offset >= open_end:
                open_end = states.first_not_open(offset)
            # Most halves are plain and open, and the table may be able to restore many at once.
            count = _restore_many(coordinator, store, offset, min(end, open_end), checks, times)
            offset += count
            result.half_count += count
            single_count = 1 if count else min(2 * single_count, SINGLE_RECORDS_MAX)
            single_end = min(end, offset + single_count)
            for summary in store.record_summaries(names.HALF_TOPIC, 0, offset, single_end):
                _report_gap(coordinator, offset, summary.queue_offset)
                offset = summary.queue_offset + 1
                _read_half(coordinator, summary, copies, checks, result, times)
            _report_gap(coordinator, offset, single_end)
            offset = single_end


def _restore_many(
    coordinator: TransactionCoordinator,
    store: RecoveryLog,
    begin: int,
    end: int,
    checks: CheckHistories,
    times: TimeConversion,
) -> int:
    """Let the table restore plain halves from an offset on, and return how many it took."""

    def times_of(topic: str, group: str, stored_ms: int, log_offset: int) -> tuple[int, int, int]:
        parked_ms = times.stored_ms(stored_ms, log_offset)
        immunity_ms = coordinator.config.immunity_of_ms(topic, group, None)
        return parked_ms, parked_ms + immunity_ms, times.same_until(log_offset)

    halves, offset = coordinator.halves, begin
    while (window := store.record_window(names.HALF_TOPIC, 0, offset, end)) is not None:
        first_offset = offset
        for due_ms, count in halves.restore(
            offset, window.entries, window.data, window.data_begin, times_of
        ):
            coordinator.schedule.add_many(array("q", range(offset, offset + count)), due_ms)
            offset += count
        _restore_checks(coordinator, first_offset, offset, checks)
        if offset - first_offset < window.count:
            break  # the next one is not plain
    return offset - begin


def _restore_checks(
    coordinator: TransactionCoordinator, begin: int, end: int, checks: CheckHistories
) -> None:
    """Set what came of the checks of open halves that the table has restored."""
    halves, interval_ms = coordinator.halves, coordinator.config.next_check_after_ms
    saved = checks.saved_between(begin, end)
    for due_ms, packed in halves.restore_checks(saved, checks.shift_ms, interval_ms):
        coordinator.schedule.add_many(array("q", packed), due_ms)
    for remark, queue_offsets in checks.saved_remarks_between(begin, end).items():
        halves.restore_remark(remark, queue_offsets)
    for queue_offset in checks.changed_between(begin, end):
        half = halves.find(queue_offset)
        if half is not None:
            half.unknown_answers = 0  # what was saved is a part of the whole history
            history = checks.get(queue_offset)
            _apply_history(coordinator, half, TransactionState.OPEN, history)


def _read_half(
    coordinator: TransactionCoordinator,
    summary: HalfSummary,
    copies: _Copies,
    checks: CheckHistories,
    result: RecoveryResult,
    times: TimeConversion,
) -> None:
    queue_offset = summary.queue_offset
    state = coordinator.states.get(queue_offset)
    result.half_count += 1
    properties = parse_half(summary)
    result.takeover.inspect_half(summary)
    if state is None or properties is None:
        return
    replaced_offsets: tuple[int, ...] = ()
    previous = copies.find_previous(summary, properties)
    if previous is not None:
        # Appended again, by us or by RocketMQ: the newest copy is the half.
        if coordinator.states.get(previous.queue_offset) is TransactionState.OPEN:
            result.move_ops.append(coordinator.make_move_op(previous, now_ms=times.now_ms))
        replaced_offsets = _replace_copy(coordinator, previous, queue_offset)
    history = checks.get(queue_offset)
    half = _restore_half(coordinator, summary, properties, state, history, times)
    copies.add(half)
    # Positions that the log has lost lead to it too: its producer may know no other one.
    half.previous_offsets = tuple(dict.fromkeys((*properties.previous_offsets, *replaced_offsets)))
    coordinator.aliases.update(dict.fromkeys(properties.previous_offsets, queue_offset))


class _Copies:
    """Finds the older copy that a half was appended again from.

    Halves with the same group, topic and key are copies of one half in most cases. They may also
    be halves of several clients, because clients choose all three; then each stays a half of its
    own. Records are read, to compare them, only for halves that have all three in common.
    """

    def __init__(self, coordinator: TransactionCoordinator, store: RecoveryLog) -> None:
        self._halves = coordinator.halves
        self._store = store
        self._by_origin: dict[GroupTopicKey, dict[MessageOrigin | None, Half]] = {}

    def find_previous(self, summary: HalfSummary, properties: HalfProperties) -> Half | None:
        group_topic_key = properties.group, properties.topic, properties.key
        halves = self._by_origin.get(group_topic_key)
        if halves is None:
            first = self._halves.find_by_key(*group_topic_key)
            if first is None:
                return None
            halves = self._by_origin[group_topic_key] = {self._origin(first.log_offset): first}
        origin = self._origin(summary.log_offset)
        if origin is not None and origin in halves:
            return halves[origin]
        unreadable = halves.get(None)  # then only the copy can tell where it was copied from
        if unreadable is not None and unreadable.queue_offset in properties.previous_offsets:
            return unreadable
        return None

    def add(self, half: Half) -> None:
        halves = self._by_origin.get(half.group_topic_key)
        if halves is not None:
            halves[self._origin(half.log_offset)] = half

    def _origin(self, log_offset: int) -> MessageOrigin | None:
        record = _read_record(self._store, log_offset)
        return None if record is None else origin_of(record)


def _report_gap(coordinator: TransactionCoordinator, begin: int, end: int) -> None:
    """Report halves that no op decides and that the log cannot read."""
    if begin < end:
        coordinator.counters.unreadable_halves += end - begin
        log.error("half messages lost: unreadable queue_offsets=%d..%d", begin, end - 1)


def _restore_half(
    coordinator: TransactionCoordinator,
    summary: HalfSummary,
    properties: HalfProperties,
    state: TransactionState,
    history: CheckHistory,
    times: TimeConversion,
) -> Half:
    half = coordinator.restore_half(
        properties,
        queue_offset=summary.queue_offset,
        log_offset=summary.log_offset,
        size=summary.size,
        parked_ms=times.stored_ms(summary.stored_ms, summary.log_offset),
    )
    if properties.check_state is not None:
        immunity_ms = half.due_ms - half.parked_ms
        parked_ms, due_ms, half.checks, is_stranded, half.unknown_answers = properties.check_state
        parked_ms, due_ms = (
            times.broker_ms(time_ms, summary.log_offset, summary.stored_ms)
            for time_ms in (parked_ms, due_ms)
        )
        # Whatever the clocks were: it is not parked in the future, and not due later than a half
        # that is parked or checked now.
        wait_max_ms = max(immunity_ms, coordinator.check_interval_ms(half))
        half.parked_ms = min(parked_ms, times.now_ms)
        half.due_ms = min(due_ms, times.now_ms + wait_max_ms)
        coordinator.schedule.add(half.queue_offset, half.due_ms)
        if is_stranded and state is TransactionState.OPEN:
            state = STRANDED
            coordinator.states.put(half.queue_offset, state)
    _apply_history(coordinator, half, state, history)
    return half


def _apply_history(
    coordinator: TransactionCoordinator, half: Half, state: TransactionState, history: CheckHistory
) -> None:
    if state is STRANDED:
        coordinator.halves.strand(half)
        half.reason = "stranded before the broker started"
        half.checks = history.checks or half.checks
    elif history.checks:
        half.checks = history.checks - 1
        coordinator.check_sent(half, history.last_check_ms)
    half.unknown_answers = min(half.unknown_answers + history.unknown_answers, half.checks)
    half.last_remark = history.last_remark


def _replace_copy(
    coordinator: TransactionCoordinator, previous: Half, queue_offset: int
) -> tuple[int, ...]:
    """Let all positions of a half lead to its newer copy, and return them."""
    coordinator.halves.remove(previous)
    coordinator.remove_from_attempt(previous)
    coordinator.states.put(previous.queue_offset, STRANDED)
    replaced_offsets = (*previous.previous_offsets, previous.queue_offset)
    for replaced_offset in replaced_offsets:
        coordinator.aliases[replaced_offset] = queue_offset
    return replaced_offsets


# --- decisions that a crash cut off --------------------------------------------------------------


def _complete_last_record(
    coordinator: TransactionCoordinator, store: RecoveryLog, result: RecoveryResult, now_ms: int
) -> None:
    """Complete the last record of the log, if it is a final or a stranded message without op."""
    if store.last_record_offset < 0:
        return
    try:
        last_record = store.record_at(store.last_record_offset)
    except (RecordNotFound, CorruptRecord):
        return
    decision: Decision | None = None
    if transaction_type(last_record.sys_flag) == TRANSACTION_COMMIT:
        decision = _complete_commit(coordinator, store, last_record, now_ms)
    elif last_record.topic == names.STRANDED_TOPIC:
        decision = _complete_stranded(coordinator, last_record, now_ms)
    if decision is not None:
        result.decisions.append(decision)


def _complete_commit(
    coordinator: TransactionCoordinator, store: RecoveryLog, final: StoredRecord, now_ms: int
) -> Decision | None:
    try:
        record = store.record_at(final.prepared_offset)
    except (RecordNotFound, CorruptRecord):
        return None
    if record.topic != names.HALF_TOPIC:
        return None
    half = coordinator.halves.find(record.queue_offset)
    if half is None or half.log_offset != final.prepared_offset:
        return None
    properties = parse_half(record)
    # An ordinary message may have this flag, and its prepared offset 0 is also that of a half.
    if properties is None or not is_final_of(final, record, properties):
        return None
    missing_finals: list[NewRecord] = []
    if is_packed(record.properties):
        finals = list(iter_records(coordinator.make_finals(half, record, now_ms)))
        keys = [find_property(record.properties, b"UNIQ_KEY") for record in finals]
        key = find_property(final.properties, b"UNIQ_KEY")
        if key not in keys or finals[keys.index(key)].body != final.body:
            return None
        # The finals of a packed half are one append too: those up to the last record are stored.
        missing_finals = finals[keys.index(key) + 1 :]
    return coordinator.complete(
        half, COMMITTED, "its final was stored", missing_finals, now_ms=now_ms
    )


def _complete_stranded(
    coordinator: TransactionCoordinator, stranded: StoredRecord, now_ms: int
) -> Decision | None:
    properties = parse_half(stranded)
    if properties is None:
        return None
    half = coordinator.halves.find_by_key(properties.group, properties.topic, properties.key)
    if half is None or half.is_stranded:
        return None
    record = coordinator.read_half(half)
    if record is None or origin_of(record) != origin_of(stranded):
        return None
    return coordinator.complete(half, STRANDED, "stranded before the broker started", now_ms=now_ms)


def _read_decisions(
    coordinator: TransactionCoordinator, store: RecoveryLog, begin: int, result: RecoveryResult
) -> None:
    first = max(begin, store.min_offset(names.DECISION_TOPIC, 0))
    for _, record in _read_records(store, names.DECISION_TOPIC, first):
        try:
            decision = decode_decision(record)
        except CorruptRecord as error:
            log.error("decision record unreadable: %s", error)
            continue
        coordinator.writers.apply(decision, record.log_offset)
        halves = (*decision.commits, *decision.rolls_back)
        if any(coordinator.halves.find(coordinator.aliases.get(half, half)) for half in halves):
            result.unfinished_decisions.append(decision)


# --- RocketMQ ------------------------------------------------------------------------------------

_CHECK_TIMES_KEY = f"{CHECK_TIMES}\x01".encode()


class RocketMQTakeover:
    """What a recovery finds out about the time under RocketMQ, if there was any."""

    def __init__(self) -> None:
        self.is_detected = False
        # Log offset and state of the halves for which RocketMQ wrote an op.
        self._decided: dict[GroupTopicKey, list[tuple[int, TransactionState]]] = {}
        self._delayed_offsets: set[int] = set()  # queue offsets of open halves with a delay

    def add_decided(
        self, half: StoredRecord, properties: HalfProperties, state: TransactionState
    ) -> None:
        """Add a half, or a copy of one, for which RocketMQ wrote an op."""
        if properties.key:
            group_topic_key = properties.group, properties.topic, properties.key
            self._decided.setdefault(group_topic_key, []).append((half.log_offset, state))

    def inspect_half(self, summary: HalfSummary) -> None:
        """Look for RocketMQ's marks in the properties of a half that looks open."""
        properties = summary.properties
        if _CHECK_TIMES_KEY in properties or not is_escrowmq_half(properties):
            self.is_detected = True
        if is_delayed(properties):
            self._delayed_offsets.add(summary.queue_offset)

    def decided_state(self, half: Half, store: RecoveryLog) -> TransactionState | None:
        """Return the state in which RocketMQ left a half that looks open; None if it is open."""
        if not half.key:
            return None
        has_delay = half.queue_offset in self._delayed_offsets
        for final in _find_finals(store, half.topic, half.key, has_delay):
            if _is_final_of_copy(final, half, store):
                return COMMITTED
        for log_offset, state in self._decided.get(half.group_topic_key, ()):
            if _is_copy(_read_record(store, log_offset), half, store):
                return state
        for stranded in store.find_by_key(
            names.STRANDED_TOPIC, half.key.decode("utf-8", "replace")
        ):
            # Before the half: it was resumed since.
            if stranded.log_offset > half.log_offset and _is_copy(stranded, half, store):
                return STRANDED
        return None


def _is_final_of_copy(final: StoredRecord, half: Half, store: RecoveryLog) -> bool:
    """Return whether a record delivers a half or an older copy of it."""
    copy = _read_record(store, final.prepared_offset)
    properties = None if copy is None else parse_half(copy)
    return (
        copy is not None
        and properties is not None
        and copy.topic == names.HALF_TOPIC
        and is_final_of(final, copy, properties)
        and _is_copy(copy, half, store)
    )


def _is_copy(record: StoredRecord | None, half: Half, store: RecoveryLog) -> bool:
    """Return whether a record of the half topic or of the stranded topic is a copy of a half."""
    properties = None if record is None else parse_half(record)
    own_record = _read_record(store, half.log_offset)
    return (
        record is not None
        and properties is not None
        and own_record is not None
        and (properties.group, properties.topic, properties.key) == half.group_topic_key
        and origin_of(record) == origin_of(own_record)
    )


def _complete_takeover(
    coordinator: TransactionCoordinator, store: RecoveryLog, result: RecoveryResult, now_ms: int
) -> None:
    """Write ops for halves that RocketMQ has finished, so that no check is sent for them."""
    for half in coordinator.halves:
        if half.is_stranded or half.is_being_decided:
            continue
        state = result.takeover.decided_state(half, store)
        if state is not None:
            decision = coordinator.complete(half, state, "decided by RocketMQ", now_ms=now_ms)
            result.decisions.append(decision)


# --- recent keys ---------------------------------------------------------------------------------


def _load_recent_keys(coordinator: TransactionCoordinator, store: RecoveryLog) -> None:
    """Remember the keys of the last decided halves, so that a late repeated send is recognised.

    Only a bounded number of halves is read, without bodies, so that the time for a start does not
    grow with the log.
    """
    end = coordinator.states.next_offset
    begin = max(store.min_offset(names.HALF_TOPIC, 0), end - RECENT_HALVES_MAX)
    # If very many halves are open, the last ones are, and need not be read again.
    begin = coordinator.states.first_decided(begin)
    for summary in store.record_summaries(names.HALF_TOPIC, 0, begin, end):
        state = coordinator.states.get(summary.queue_offset)
        if state is None or not state.is_decided:
            continue
        properties = parse_half(summary)
        if properties is not None and properties.key:
            # Of several copies with one key, the last one wins: it was the living half.
            coordinator.halves.remember_decided(
                properties.group,
                properties.topic,
                properties.key,
                summary.queue_offset,
                summary.log_offset,
            )
