"""The protocol: park a half, decide it once, ask when nobody decides.

              park                end: commit, rollback
      (send) ------> OPEN -------------------------------> COMMITTED, ROLLED_BACK
                      |  ^                                    ^
     asked too often, |  | resume                             | end, by a producer after all
     or too old       v  |                                    | or by an operator
                     STRANDED --------------------------------+

Whatever changes is first a record in the log. `end`, `strand` and `renew` say which records; once
they are stored the caller comes back with `settled_as` or `renewed`, or with `reopen` if not.
The first decision wins: until it is settled a half that is being decided takes no other, and
afterwards a repeat gets the recorded outcome and a contradiction a refusal.

One decision over many halves: all of them, or none.

The decision is a record of its own and goes to the log first; finals and ops follow, in the same
append, or in several if they are many. Once the decision is there everything else follows from it:
a start after a crash appends whatever is missing.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from escrowmq.errors import (
    CorruptRecord,
    RecordNotFound,
    TooManyOpenTransactions,
    TransactionConflict,
    TransactionNotFound,
)
from escrowmq.escrow.checks import CheckSchedule, CoordinatorRules, TransactionCounters
from escrowmq.escrow.half_table import Half, HalfStates, HalfTable, RocketMQCursors
from escrowmq.escrow.records import (
    NO_HOST,
    CheckState,
    HalfProperties,
    make_copy,
    make_finals,
    make_op,
    make_stranded,
)
from escrowmq.escrow.writers import DecisionRecord, WriterTable
from escrowmq.message import names
from escrowmq.message.batch import Appendable
from escrowmq.message.record import LogOffset, NewRecord, StoredRecord
from escrowmq.message.transaction import (
    COMMITTED,
    ROLLED_BACK,
    STATE_BY_VERDICT,
    STRANDED,
    TransactionState,
    Verdict,
)

log = logging.getLogger(__name__)

RECENT_KEYS_MAX: Final = 65_536  # keys of settled halves, for a send that is repeated late


class HalfLog(Protocol):
    """What the escrow reads: the store, or whatever holds the records."""

    def record_at(self, log_offset: int) -> StoredRecord: ...
    def log_offset_of(self, topic: str, queue_id: int, queue_offset: int) -> LogOffset | None: ...


class Decision(msgspec.Struct, frozen=True):
    """Records to append, and what will be so once they are stored."""

    half: Half
    state: TransactionState
    records: list[Appendable]


@dataclass(frozen=True, slots=True)
class AlreadyDecided:
    """It has been decided before; the same again does nothing."""

    queue_offset: int
    log_offset: int
    state: TransactionState


class TransactionCoordinator:
    def __init__(self, half_log: HalfLog, rules: CoordinatorRules) -> None:
        self.rules = rules
        self.halves = HalfTable()
        self.states = HalfStates()
        self.cursors = RocketMQCursors()
        self.schedule = CheckSchedule()
        self.counters = TransactionCounters()
        self.writers = WriterTable()
        self.aliases: dict[int, int] = {}  # places of halves that were appended again
        self.unfinished_decisions: set[int] = (
            set()
        )  # places of decisions that are not carried out yet
        self._half_log = half_log
        self._last_due_ms = 0
        # Settled ones by key: group, queue and log offset.
        self.recent_keys: OrderedDict[bytes, tuple[str, int, int]] = OrderedDict()

    # --- park ------------------------------------------------------------------------------------

    def check_limits(self, group: str, size: int) -> None:
        rules, total, load = self.rules, self.halves.total, self.halves.group_totals(group)
        if (
            total.count < rules.open_count_max
            and load.count < rules.group_open_count_max
            and total.size + size <= rules.open_bytes_max
            and load.size + size <= rules.group_open_bytes_max
        ):
            return
        for what, used, limit in (
            ("open transactions", total.count + 1, rules.open_count_max),
            ("bytes of open transactions", total.size + size, rules.open_bytes_max),
            (f"open transactions of group {group}", load.count + 1, rules.group_open_count_max),
            (f"bytes of group {group}", load.size + size, rules.group_open_bytes_max),
        ):
            if used > limit:
                raise TooManyOpenTransactions(f"{limit} {what} are the limit: decide some first")

    def find_duplicate(self, group: str, key: bytes) -> tuple[int, int] | None:
        """Where a half with this key was parked: the send is a repeated one. Queue, log offset."""
        half = self.halves.find_by_key(key, group)
        if half is not None:
            return half.queue_offset, half.log_offset
        remembered = self.recent_keys.get(key)
        if remembered is not None and remembered[0] == group:
            return remembered[1:]
        return None

    def restore_half(
        self,
        properties: HalfProperties,
        *,
        queue_offset: int,
        log_offset: int,
        size: int,
        parked_ms: int,
    ) -> Half:
        """The half is in the log, and was found there."""
        topic, group = properties.topic, properties.group
        half = self.new_half(
            topic,
            properties.queue_id,
            group,
            properties.key,
            parked_ms,
            None,
            properties.immunity_ms,
        )
        half.attempt = properties.attempt
        half.queue_offset, half.log_offset, half.size = queue_offset, log_offset, size
        self.track(half)
        return half

    def new_half(
        self,
        topic: str,
        queue_id: int,
        group: str,
        key: bytes,
        parked_ms: int,
        producer: Hashable | None,
        immunity_ms: int | None = None,
    ) -> Half:
        """One that is on its way into the log: nobody knows yet where it will lie."""
        name = self.halves.intern_name
        due_ms = parked_ms + self.rules.check_immunity_ms(topic, group, immunity_ms)
        if due_ms != self._last_due_ms:  # the same object: halves parked together share it
            self._last_due_ms = due_ms
        due_ms = self._last_due_ms
        return Half(0, 0, 0, name(topic), queue_id, name(group), key, parked_ms, due_ms, producer)

    def track(self, half: Half) -> None:
        """It is in the log."""
        self.states.extend_to(half.queue_offset)
        self.halves.add(half)
        self.schedule.add(half.queue_offset, half.due_ms)
        if half.attempt is not None:
            self._add_to_attempt(half)

    # --- end -------------------------------------------------------------------------------------

    def decide(
        self,
        queue_offset: int,
        log_offset: int,
        group: str | None,
        verdict: Verdict,
        *,
        by: str,
        reason: str = "",
        now_ms: int,
    ) -> Decision | AlreadyDecided:
        """Decide a half, for the first time or again. `group` None: an operator's word.

        Raises NoSuchTransaction, TransactionContradicted; CorruptRecord if it cannot be read.
        """
        wanted = STATE_BY_VERDICT[verdict]
        half = self.find_open(queue_offset, log_offset)
        if half is None:
            return self.find_decision(queue_offset, log_offset, wanted)
        if group is not None and half.group != group:
            raise TransactionNotFound(
                f"the half at {queue_offset} is of producer group {half.group}, not {group}"
            )
        return self.make_decision(half, wanted, by=by, reason=reason, now_ms=now_ms)

    def make_decision(
        self,
        half: Half,
        state: TransactionState,
        *,
        by: str,
        reason: str = "",
        born_host: bytes = NO_HOST,
        now_ms: int,
        final: NewRecord | None = None,
    ) -> Decision:
        """The records that settle it: final, or finals, and op side by side, in this order.
        `final`: its caller has it already."""
        records: list[Appendable] = [
            make_op(
                half.queue_offset,
                state,
                by,
                reason,
                previous_offsets=half.previous_offsets,
                born_host=born_host,
                now_ms=now_ms,
            )
        ]
        if final is not None:
            records.insert(0, final)
        elif state is COMMITTED:
            record = self._half_log.record_at(half.log_offset)
            records[:0] = make_finals(record, half.topic, half.queue_id)
        half.is_being_decided = True
        return Decision(half, state, records)

    def find_open(self, queue_offset: int, log_offset: int) -> Half | None:
        """The living half that these two numbers name; None if it is settled."""
        half = self.halves.find(self.aliases.get(queue_offset, queue_offset))
        if half is None:
            return None
        if half.queue_offset == queue_offset:
            own_offset: int | None = half.log_offset
        else:
            own_offset = self._half_log.log_offset_of(names.HALF_TOPIC, 0, queue_offset)
        if own_offset is not None and own_offset != log_offset:
            raise TransactionNotFound(
                f"the half at {queue_offset} has the log offset {own_offset}, not {log_offset}"
            )
        return half

    def find_decision(
        self, queue_offset: int, log_offset: int, expected_state: TransactionState
    ) -> AlreadyDecided:
        """How a half ended that is not open any more, if that is how it was wanted."""
        state = self.states.get(queue_offset)
        own_offset = self._half_log.log_offset_of(names.HALF_TOPIC, 0, queue_offset)
        if state is None or own_offset is None:
            raise TransactionNotFound(f"no half was parked at {queue_offset}, or it is forgotten")
        if own_offset != log_offset:
            raise TransactionNotFound(
                f"the half at {queue_offset} has the log offset {own_offset}, not {log_offset}"
            )
        if not state.is_decided:
            raise TransactionNotFound(f"the half at {queue_offset} cannot be read")
        if state is not expected_state:
            self.counters.conflicts += 1
            raise TransactionConflict(
                f"the transaction at {queue_offset} is {state.text}: it cannot be "
                f"{expected_state.text}",
                state.text,
            )
        self.counters.repeated_ends += 1
        return AlreadyDecided(queue_offset, own_offset, state)

    def apply(self, decision: Decision, op_offset: int, *, now_ms: int) -> None:
        """The records of a change are in the log, its op at this place of the op queue."""
        half, state = decision.half, decision.state
        half.is_being_decided = False
        self.states.put(half.queue_offset, state)
        self.cursors.add_op(op_offset, half.queue_offset)
        if state is STRANDED:
            self.halves.strand(half)
            self.counters.stranded += 1
        else:
            self.close(half, state)
            self.counters.finish_seconds.observe(max(0, now_ms - half.parked_ms) / 1000)
            by_topic = self.counters.committed
            if state is ROLLED_BACK:
                by_topic = self.counters.rolled_back
            by_topic[half.topic] = by_topic.get(half.topic, 0) + 1

    def cancel(self, decision: Decision) -> None:
        """They are not: the half is as it was."""
        decision.half.is_being_decided = False
        if decision.state is TransactionState.STRANDED:
            decision.half.reason = ""

    def close(self, half: Half, state: TransactionState) -> None:
        """It is settled, in all the places that it had."""
        self.halves.remove(half)
        for old in half.previous_offsets:
            self.states.put(old, state)
            self.aliases.pop(old, None)
        if half.attempt is not None:
            self.remove_from_attempt(half)
        if half.key:
            self.recent_keys[half.key] = half.group, half.queue_offset, half.log_offset
            if len(self.recent_keys) > RECENT_KEYS_MAX:
                self.recent_keys.popitem(last=False)

    def _add_to_attempt(self, half: Half) -> None:
        if half.attempt is not None:
            writer, batch, attempt, _ = half.attempt
            self.writers.attempts.add(writer, batch, attempt, half.queue_offset)

    def remove_from_attempt(self, half: Half) -> None:
        if half.attempt is not None:
            writer, batch, attempt, _ = half.attempt
            self.writers.attempts.remove(writer, batch, attempt, half.queue_offset)

    # --- check -----------------------------------------------------------------------------------

    def take_due(self, now_ms: int, count_max: int) -> list[Half]:
        """The halves to ask about now. Each comes up again only when it is told when."""
        found = []
        for queue_offset in self.schedule.take_due(now_ms, count_max):
            half = self.halves.find(queue_offset)
            if half is None or half.is_stranded or half.reason:
                continue
            if half.due_ms > now_ms:
                continue  # it was put off since; its new time is noted
            if half.is_being_decided:
                self.reschedule(half, now_ms + 1000)
                continue
            found.append(half)
        return found

    def strand_reason(self, half: Half, now_ms: int) -> str:
        """Why it is not to be asked about any more; "" if it is."""
        if half.checks >= self.rules.checks_max:
            return f"asked {half.checks} times without an answer"
        if now_ms - half.parked_ms > self.rules.age_max_ms:
            return f"open for more than {self.rules.age_max_ms // 3_600_000} hours"
        return ""

    def read_half(self, half: Half) -> StoredRecord | None:
        """The message; None, and reported, if the log cannot give it: nobody waits behind it."""
        try:
            return self._half_log.record_at(half.log_offset)
        except (CorruptRecord, RecordNotFound) as error:
            self.counters.unreadable_halves += not half.is_unreadable
            half.reason = f"unreadable: {error}"
            log.error("half unreadable queue_offset=%d: %s", half.queue_offset, error)
            return None

    def check_sent(self, half: Half, now_ms: int) -> None:
        """A question about it is on its way: only such count."""
        half.checks += 1
        self.reschedule(half, now_ms + self.check_interval_ms(half))

    def reschedule(self, half: Half, due_ms: int) -> None:
        half.due_ms = due_ms
        self.schedule.add(half.queue_offset, due_ms)

    def strand(self, half: Half, reason: str, record: StoredRecord, *, now_ms: int) -> Decision:
        half.is_being_decided = True
        half.reason = reason
        records: list[Appendable] = [
            make_stranded(record, reason),
            make_op(half.queue_offset, TransactionState.STRANDED, "broker", reason, now_ms=now_ms),
        ]
        return Decision(half, TransactionState.STRANDED, records)

    # --- appended again --------------------------------------------------------------------------

    def move(
        self, half: Half, record: StoredRecord, *, is_resume: bool, now_ms: int
    ) -> tuple[CheckState, list[NewRecord]]:
        """The half once more, and that its old place is done with: because its log file is to go,
        or because an operator wants a stranded one asked about again."""
        half.is_being_decided = True
        past = CheckState(half.parked_ms, half.due_ms, half.checks, half.is_stranded)
        if is_resume and half.is_stranded:
            past = CheckState(now_ms, now_ms, 0, False)
        moved = make_op(
            half.queue_offset, TransactionState.OPEN, "broker", "appended again", now_ms=now_ms
        )
        places = *half.previous_offsets, half.queue_offset
        return past, [make_copy(record, *places, check_state=past), moved]

    def moved(
        self,
        half: Half,
        check_state: CheckState,
        queue_offset: int,
        log_offset: int,
        op_offset: int,
    ) -> None:
        """It lives at the new place; the old one still leads to it."""
        old = half.queue_offset
        self.halves.remove(half)
        self.remove_from_attempt(half)
        half.previous_offsets += (old,)
        for place in half.previous_offsets:
            self.aliases[place] = queue_offset
        self.states.extend_to(queue_offset)
        self.states.put(old, TransactionState.STRANDED)  # not open, and not decided: its copy is
        self.cursors.add_op(op_offset, old)
        half.queue_offset, half.log_offset = queue_offset, log_offset
        half.is_being_decided = False
        half.parked_ms, half.due_ms, half.checks, half.is_stranded = check_state
        if half.is_stranded:
            self.states.put(queue_offset, TransactionState.STRANDED)
        else:
            half.reason = ""
        self.halves.add(half)
        self.schedule.add(queue_offset, half.due_ms)
        self._add_to_attempt(half)

    def open_halves_below(self, log_offset: int) -> list[Half]:
        """Halves that would go with the log below this place."""
        return [half for half in self.halves if half.log_offset < log_offset]

    def purge_below(self, min_queue_offset: int) -> None:
        """The half queue begins here now."""
        self.states.purge_below(min_queue_offset)

    def advance_cursors(self) -> None:
        self.cursors.advance(self.states.first_open(self.cursors.half_offset))

    def check_interval_ms(self, half: Half) -> int:
        return self.rules.check_interval_ms(half.topic, half.group, half.checks)


DECISION_HALVES_MAX: Final = 1_000_000


def decide_many(
    coordinator: TransactionCoordinator,
    positions: Sequence[tuple[int, int]],
    group: str,
    verdict: Verdict,
    *,
    by: str,
) -> DecisionRecord | None:
    """The decision over these halves, by queue offset and log offset; None if all are decided so.

    Raises NoSuchTransaction or TransactionContradicted, and then nothing has changed.
    """
    wanted = STATE_BY_VERDICT[verdict]
    open_halves: dict[int, None] = {}  # each once, by whatever places it was named
    for queue_offset, log_offset in dict.fromkeys(positions):
        half = coordinator.find_open(queue_offset, log_offset)
        if half is None:
            coordinator.find_decision(queue_offset, log_offset, wanted)
        elif half.group != group:
            raise TransactionNotFound(
                f"the half at {queue_offset} is of producer group {half.group}, not {group}"
            )
        else:
            open_halves[half.queue_offset] = None
    if not open_halves:
        return None
    if wanted is TransactionState.COMMITTED:
        return DecisionRecord(commits=list(open_halves), by=by)
    return DecisionRecord(rolls_back=list(open_halves), by=by)


def is_being_decided(coordinator: TransactionCoordinator, decision_record: DecisionRecord) -> bool:
    """Whether somebody else is deciding one of these halves just now."""
    return any(half.is_being_decided for half in _open_halves(coordinator, decision_record))


def decision_queues(
    coordinator: TransactionCoordinator, decision_record: DecisionRecord
) -> Iterator[tuple[str, int]]:
    """Where its messages will be seen."""
    for queue_offset in decision_record.commits:
        half = coordinator.halves.find(queue_offset)
        if half is not None:
            yield half.topic, half.queue_id


def mark_being_decided(
    coordinator: TransactionCoordinator, decision_record: DecisionRecord
) -> None:
    for half in _open_halves(coordinator, decision_record):
        half.is_being_decided = True


def unmark_being_decided(
    coordinator: TransactionCoordinator, decision_record: DecisionRecord
) -> None:
    for half in _open_halves(coordinator, decision_record):
        half.is_being_decided = False


def check_readable(coordinator: TransactionCoordinator, decision_record: DecisionRecord) -> None:
    """All or nothing: one that cannot be delivered refuses the rest too, before it is too late."""
    for queue_offset in decision_record.commits:
        half = coordinator.halves.find(queue_offset)
        if half is not None and coordinator.read_half(half) is None:
            raise TransactionNotFound(f"the half at {queue_offset} cannot be read: {half.reason}")


def decision_pieces(
    coordinator: TransactionCoordinator, decision_record: DecisionRecord, *, now_ms: int
) -> Iterator[list[Decision]]:
    """What follows from a decision and is not done yet, in portions of bounded size."""
    piece: list[Decision] = []
    size = 0
    for state, offsets in (
        (TransactionState.COMMITTED, decision_record.commits),
        (TransactionState.ROLLED_BACK, decision_record.rolls_back),
    ):
        for queue_offset in offsets:
            half = coordinator.halves.find(coordinator.aliases.get(queue_offset, queue_offset))
            if half is None:
                continue
            try:
                piece.append(
                    coordinator.make_decision(half, state, by=decision_record.by, now_ms=now_ms)
                )
            except (CorruptRecord, RecordNotFound):
                coordinator.read_half(half)  # reported; the others are delivered
                continue
            size += half.size
            if size >= coordinator.rules.piece_bytes:
                yield piece
                piece, size = [], 0
    if piece:
        yield piece


def apply_piece(
    coordinator: TransactionCoordinator,
    piece: Sequence[Decision],
    queue_offsets: Sequence[int],
    *,
    now_ms: int,
) -> None:
    """A piece is in the log; these are the places of its records in their queues."""
    at = 0
    for change in piece:
        at += len(change.records)
        coordinator.apply(change, queue_offsets[at - 1], now_ms=now_ms)


def _open_halves(
    coordinator: TransactionCoordinator, decision_record: DecisionRecord
) -> Iterator[Half]:
    for queue_offset in (*decision_record.commits, *decision_record.rolls_back):
        half = coordinator.halves.find(queue_offset)
        if half is not None:
            yield half
