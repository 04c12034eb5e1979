"""The history of one transaction, as the log has it: parked, checked, stranded, decided.

    half       found by its unique key; moved copies are the same transaction at later positions
    journal    which client was checked when, and which answered UNKNOWN
    op         how it ended, what decided it and why; the op of a commit is right behind the final
    final      where it was delivered

Nothing of this is held in memory. The history of a decided transaction can be read for as long as
the log has its records.

Everything here is found by keys, and clients choose keys: thousands of them may have the hash of
the one that is searched. So all of it is done in slices. Other requests are handled in between, so
a transaction is located from memory only when everything that takes long is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from escrowmq.broker.dispatch import Channel
from escrowmq.consume.members import ProducerGroups
from escrowmq.errors import (
    AmbiguousTransaction,
    CorruptRecord,
    RecordNotFound,
    RemoteProtocolError,
)
from escrowmq.escrow.coordinator import TransactionCoordinator
from escrowmq.escrow.half_table import Half
from escrowmq.escrow.records import HalfProperties, Op, decode_journal_entry, decode_op, parse_half
from escrowmq.message import names
from escrowmq.message.keys import decode_host, decode_offset_id, encode_offset_id
from escrowmq.message.names import TIMER_TOPIC
from escrowmq.message.record import StoredRecord
from escrowmq.message.transaction import TransactionState
from escrowmq.remoting.bodies import (
    StepRecord,
    TransactionEntry,
    TransactionHistory,
    TransactionStep,
)
from escrowmq.sliced_work import SlicedResult
from escrowmq.store.key_index import RESULTS_MAX
from escrowmq.store.store import MessageStore

JOURNAL_ENTRIES_MAX: Final = 1_000  # the newest ones
_OP_SEARCH_RECORDS_MAX: Final = 8  # behind a final

# With its log offset, because the order of the log is the order in which things happened.
_PositionedStep = tuple[int, TransactionStep]


@dataclass(frozen=True, slots=True)
class LocatedTransaction:
    """The position of a transaction. `half` is None if it is decided."""

    queue_offset: int
    log_offset: int
    half: Half | None
    group: str
    topic: str


class HistoryReader:
    def __init__(
        self,
        store: MessageStore,
        coordinator: TransactionCoordinator,
        producers: ProducerGroups[Channel],
        store_host: bytes,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._producers = producers
        self._store_host = store_host

    # --- find ----------------------------------------------------------------------------------

    def find(
        self, name: str, group: str | None = None, half_offset: int | None = None
    ) -> SlicedResult[LocatedTransaction | None]:
        """Find a transaction by its id, or by the offset id of its half or stranded message.

        Clients choose ids, so several transactions may have the same. `group` and `half_offset`,
        the offset in the half queue, tell them apart. Raises AmbiguousTransaction.
        """
        candidates = yield from self._find_by_id(name, group)
        if half_offset is not None:
            candidates = [located for located in candidates if self._was_at(located, half_offset)]
        if len(candidates) > 1:
            raise AmbiguousTransaction(_ambiguity_text(name, candidates))
        if candidates:
            return candidates[0]
        located = yield from self._find_by_offset_id(name)
        if located is None or group not in (None, located.group):
            return None
        return located if half_offset is None or self._was_at(located, half_offset) else None

    def _find_by_id(self, name: str, group: str | None) -> SlicedResult[list[LocatedTransaction]]:
        """Return every transaction with this id; of one that was moved, the newest copy."""
        records = yield from self._find_halves(name)
        open_offsets: list[int] = []
        if len(records) >= RESULTS_MAX:
            # There may be more of them than the index returns. Strangers may have sent them to
            # hide one, so look at all that are open; only an operator's request gets here.
            open_offsets = yield from self._open_offsets(name.encode("utf-8", "replace"))
        undecided: dict[int, LocatedTransaction] = {}
        for queue_offset in open_offsets:
            half = self._find_half(queue_offset)
            if half is not None:  # not decided meanwhile
                undecided[half.queue_offset] = _located_half(half)
        decided: dict[tuple[str, str], LocatedTransaction] = {}
        for record in records:
            located = self._locate(record)
            if located is None:
                continue
            if located.half is not None:
                undecided.setdefault(located.queue_offset, located)
            else:
                decided.setdefault((located.group, located.topic), located)
        open_names = {(located.group, located.topic) for located in undecided.values()}
        candidates = [
            *undecided.values(),
            *(located for names, located in decided.items() if names not in open_names),
        ]
        return [located for located in candidates if group in (None, located.group)]

    def _open_offsets(self, key: bytes) -> SlicedResult[list[int]]:
        """Return the queue offsets of all undecided halves with a key."""
        states, halves = self._coordinator.states, self._coordinator.halves
        offsets: list[int] = []
        queue_offset = states.first_undecided(states.base_offset)
        # Not in the order of the table, which may change between two slices.
        while queue_offset < states.next_offset:
            half = halves.find(queue_offset)
            if half is not None and half.key == key:
                offsets.append(queue_offset)
            yield
            queue_offset = states.first_undecided(queue_offset + 1)
        return offsets

    def _find_half(self, queue_offset: int) -> Half | None:
        """Return the undecided half that has or had this offset of the half queue."""
        coordinator = self._coordinator
        return coordinator.halves.find(coordinator.aliases.get(queue_offset, queue_offset))

    def _was_at(self, located: LocatedTransaction, half_offset: int) -> bool:
        """Return whether a transaction is or was at this offset of the half queue."""
        half = located.half
        previous_offsets = () if half is None else half.previous_offsets
        return half_offset == located.queue_offset or half_offset in previous_offsets

    def _find_by_offset_id(self, offset_id: str) -> SlicedResult[LocatedTransaction | None]:
        try:
            host, log_offset = decode_offset_id(offset_id)
            record = self._store.record_at(log_offset)
        except (RemoteProtocolError, RecordNotFound, CorruptRecord):
            return None
        if host not in (self._store_host, record.store_host):
            return None  # an id of another broker, whose log has something else at this offset
        if record.topic == names.HALF_TOPIC:
            return self._locate(record)
        properties = parse_half(record) if record.topic == names.STRANDED_TOPIC else None
        if properties is None or not properties.key:
            return None
        same_id = yield from self._find_by_id(_decode_key(properties.key), properties.group)
        candidates = [located for located in same_id if located.topic == properties.topic]
        if len(candidates) > 1:
            raise AmbiguousTransaction(_ambiguity_text(_decode_key(properties.key), candidates))
        return candidates[0] if candidates else None

    def _locate(self, record: StoredRecord) -> LocatedTransaction | None:
        half = self._find_half(record.queue_offset)
        if half is not None:
            return _located_half(half)
        if self._coordinator.states.get(record.queue_offset) is None:
            return None  # the half queue begins behind it
        properties = parse_half(record)
        group, topic = ("", "") if properties is None else (properties.group, properties.topic)
        return LocatedTransaction(record.queue_offset, record.log_offset, None, group, topic)

    def _find_halves(self, key: str) -> SlicedResult[list[StoredRecord]]:
        """Return all copies of a half, the newest first."""
        return self._find_by_key(names.HALF_TOPIC, key)

    def _find_by_key(self, topic: str, key: str) -> SlicedResult[list[StoredRecord]]:
        if not key:
            return []
        return (yield from self._store.search_by_key(topic, key, count_max=RESULTS_MAX))

    # --- entries of a list -----------------------------------------------------------------------

    def make_entry(self, half: Half) -> TransactionEntry:
        waits_for_operator = half.is_stranded or bool(half.reason)
        return TransactionEntry(
            transaction_id=self._transaction_id(half.key, half.log_offset),
            group=half.group,
            topic=half.topic,
            queue_id=half.queue_id,
            state=(TransactionState.STRANDED if half.is_stranded else TransactionState.OPEN).text,
            parked_at=half.parked_ms,
            checks=half.checks,
            next_due=None if waits_for_operator else half.due_ms,
            queue_offset=half.queue_offset,
            log_offset=half.log_offset,
            size=half.size,
            why=half.reason,
        )

    def make_decided_entry(
        self, record: StoredRecord, properties: HalfProperties, state: TransactionState, checks: int
    ) -> TransactionEntry:
        return TransactionEntry(
            transaction_id=self._transaction_id(properties.key, record.log_offset),
            group=properties.group,
            topic=properties.topic,
            queue_id=properties.queue_id,
            state=state.text,
            parked_at=record.stored_ms,
            checks=checks,
            queue_offset=record.queue_offset,
            log_offset=record.log_offset,
            size=record.size,
        )

    def count_checks(self, queue_offset: int) -> SlicedResult[int]:
        """Return the number of checks of a decided half, which the table does not have any more."""
        records = yield from self._store.search_by_key(
            names.JOURNAL_TOPIC, str(queue_offset), count_max=1
        )
        try:
            return decode_journal_entry(records[0]).check_number if records else 0
        except CorruptRecord:
            return 0

    def _transaction_id(self, key: bytes, log_offset: int) -> str:
        # We give every half a key. One without can only come from RocketMQ.
        return _decode_key(key) if key else encode_offset_id(self._store_host, log_offset)

    # --- the history of one -----------------------------------------------------------------------

    def is_current(self, located: LocatedTransaction) -> bool:
        """Return whether a transaction has been neither decided nor moved since it was located."""
        half = self._find_half(located.queue_offset)
        return half is located.half and (half is None or half.queue_offset == located.queue_offset)

    def read_history(
        self, located: LocatedTransaction, now_ms: int
    ) -> SlicedResult[TransactionHistory]:
        """Read all steps. Raises RecordNotFound or CorruptRecord if the half cannot be read.

        If the transaction is not current afterwards, the result may have only a part of what
        happened meanwhile.
        """
        half = located.half
        record = self._store.record_at(located.log_offset)
        properties = parse_half(record)
        if properties is None:
            raise CorruptRecord(record.log_offset, "the half message names no topic and queue")
        state = self._coordinator.states.get(located.queue_offset) or TransactionState.OPEN
        steps = yield from self._read_steps(record, properties, state)
        if half is None:
            checks = yield from self.count_checks(record.queue_offset)
            entry = self.make_decided_entry(record, properties, state, checks)
            reason = "" if state.is_decided else "it was unreadable when the broker started"
            return TransactionHistory(transaction=entry, steps=steps, pending_because=reason)
        return TransactionHistory(
            transaction=self.make_entry(half),
            steps=steps,
            pending_because=self._pending_reason(half, steps, now_ms),
        )

    def _read_steps(
        self, record: StoredRecord, properties: HalfProperties, state: TransactionState
    ) -> SlicedResult[list[TransactionStep]]:
        copies = yield from self._copies(record, properties)
        stored = [
            *copies,
            *(yield from self._find_by_key(names.STRANDED_TOPIC, _decode_key(properties.key))),
        ]
        steps: list[_PositionedStep] = [(copies[0].log_offset, _parked_step(copies[0], properties))]
        for copy in copies:
            steps += yield from self._journal_steps(copy.queue_offset)
            steps += yield from self._op_steps(copy.queue_offset, stored)
        if state is TransactionState.COMMITTED:
            steps.append((yield from self._commit_step(copies, properties)))
        elif state is TransactionState.ROLLED_BACK and all(
            step.what != state.text for _, step in steps
        ):
            # RocketMQ's ops have no key, so this one cannot be found: who and when is unknown.
            steps.append((self._store.end, TransactionStep(at=0, what=state.text)))
        steps.sort(key=lambda positioned: positioned[0])
        return [step for _, step in steps]

    def _copies(
        self, record: StoredRecord, properties: HalfProperties
    ) -> SlicedResult[list[StoredRecord]]:
        """Return the records of a transaction at all positions it had, the oldest first."""
        copies = {record.log_offset: record}
        for candidate in (yield from self._find_halves(_decode_key(properties.key))):
            candidate_properties = parse_half(candidate)
            if candidate_properties is not None and (
                (candidate_properties.group, candidate_properties.topic)
                == (properties.group, properties.topic)
            ):
                copies[candidate.log_offset] = candidate
        return [copies[log_offset] for log_offset in sorted(copies)]

    def _journal_steps(self, queue_offset: int) -> SlicedResult[list[_PositionedStep]]:
        steps: list[_PositionedStep] = []
        records = yield from self._find_all_by_key(names.JOURNAL_TOPIC, str(queue_offset))
        for record in records:
            try:
                entry = decode_journal_entry(record)
            except CorruptRecord:
                continue
            is_check = entry.event in ("asked", "unknown")
            step = TransactionStep(
                at=entry.stored_ms,
                what=entry.event,
                who=entry.peer,
                reason=entry.reason,
                detail=f"check {entry.check_number}" if is_check else "",
            )
            steps.append((record.log_offset, step))
        return steps

    def _find_all_by_key(self, topic: str, key: str) -> SlicedResult[list[StoredRecord]]:
        """Return the newest records first. One look-up returns no more than RESULTS_MAX."""
        journal_records: dict[int, StoredRecord] = {}  # by log offset
        end_ms = 1 << 62
        while len(journal_records) < JOURNAL_ENTRIES_MAX:
            records = yield from self._store.search_by_key(
                topic, key, count_max=RESULTS_MAX, end_ms=end_ms
            )
            new = [record for record in records if record.log_offset not in journal_records]
            journal_records.update((record.log_offset, record) for record in new)
            if not new or len(records) < RESULTS_MAX:
                break
            end_ms = min(record.stored_ms for record in new)
        return list(journal_records.values())

    def _op_steps(
        self, queue_offset: int, stored: list[StoredRecord]
    ) -> SlicedResult[list[_PositionedStep]]:
        """Return the ops of a half, except that of a commit, which has no key.

        `stored` are the copies of the half and its stranded messages. An op that refers to one of
        them is right behind it in the log.
        """
        steps: list[_PositionedStep] = []
        for record in (yield from self._find_by_key(names.OP_TOPIC, str(queue_offset))):
            op = decode_op(record)
            if op is not None and op.state is not None:
                is_move = op.state is TransactionState.OPEN
                event = "appended_again" if is_move else op.state.text
                before = [r for r in stored if r.log_offset + r.size == record.log_offset]
                step = _decided_step(record, op, event, records=before)
                steps.append((record.log_offset, step))
        return steps

    def _commit_step(
        self, copies: list[StoredRecord], properties: HalfProperties
    ) -> SlicedResult[_PositionedStep]:
        queue_offsets: dict[int, int] = {copy.log_offset: copy.queue_offset for copy in copies}
        finals: list[StoredRecord] = []
        for topic in (properties.topic, names.SCHEDULE_TOPIC, TIMER_TOPIC):
            records = yield from self._find_by_key(topic, _decode_key(properties.key))
            finals += [record for record in records if record.prepared_offset in queue_offsets]
        event = TransactionState.COMMITTED.text
        if not finals:
            return self._store.end, TransactionStep(at=0, what=event)
        # A delayed message has two: the one that waits, and the one that is delivered in the end.
        first_final = min(finals, key=lambda record: record.log_offset)
        delivered = next((r for r in finals if r.topic == properties.topic), first_final)
        detail = _delivery_detail(delivered, properties)
        half_offset = queue_offsets[first_final.prepared_offset]
        finals.sort(key=lambda record: record.log_offset)
        for record in self._records_after(first_final):
            op = decode_op(record) if record.topic == names.OP_TOPIC else None
            if op is not None and half_offset in op.half_offsets:
                step = _decided_step(record, op, event, detail, finals)
                return record.log_offset, step
        step = TransactionStep(
            at=first_final.stored_ms, what=event, detail=detail, records=_step_records(finals)
        )
        return first_final.log_offset, step

    def _records_after(self, record: StoredRecord) -> Iterator[StoredRecord]:
        try:
            yield from islice(
                self._store.records(record.log_offset + record.size), _OP_SEARCH_RECORDS_MAX
            )
        except (CorruptRecord, RecordNotFound):
            return

    def _pending_reason(self, half: Half, steps: list[TransactionStep], now_ms: int) -> str:
        """Say why a transaction is not decided, for operators."""
        if half.is_stranded:
            reasons = [step.reason for step in steps if step.what == TransactionState.STRANDED.text]
            return f"{reasons[-1] if reasons else half.reason}; it waits for an operator"
        if half.reason:
            return half.reason
        if half.is_being_decided:
            return "it is being decided right now"
        if half.attempt is not None:
            writer, batch, name, _ = half.attempt
            return f"writer {writer} has not decided batch {batch} yet (attempt {name})"
        if half.due_ms <= now_ms and not self._producers.members(half.group):
            return (
                f"a check is due, but no producer of group {half.group} is connected; "
                "the first one that connects is checked"
            )
        if half.due_ms <= now_ms:
            return "a check is due and is sent when its producers have answered earlier checks"
        if not half.checks:
            at_send = next((step for step in steps if step.what == "unknown_at_send"), None)
            if at_send is not None:
                remark = f" ({at_send.reason})" if at_send.reason else ""
                return f"its producer does not know yet{remark}; the first check is not due yet"
            return "its producer has not decided yet; the first check is not due yet"
        last = next((step for step in reversed(steps) if step.what in ("asked", "unknown")), None)
        if last is not None and last.what == "unknown":
            remark = f": {last.reason}" if last.reason else ""
            return f"check {half.checks} was answered with UNKNOWN{remark}"
        return f"check {half.checks} was sent and has not been answered"


CANDIDATES_SHOWN_MAX: Final = 10


def _located_half(half: Half) -> LocatedTransaction:
    return LocatedTransaction(half.queue_offset, half.log_offset, half, half.group, half.topic)


def _ambiguity_text(name: str, located_transactions: Sequence[LocatedTransaction]) -> str:
    """Return which transactions an id may mean, for operators."""
    candidates = "; ".join(
        f"group {located.group!r}, topic {located.topic!r}, half offset {located.queue_offset}, "
        f"log offset {located.log_offset}, {'decided' if located.half is None else 'undecided'}"
        for located in located_transactions[:CANDIDATES_SHOWN_MAX]
    )
    more = len(located_transactions) - CANDIDATES_SHOWN_MAX
    return (
        f"{len(located_transactions)} transactions have the id {name[:100]!r}: {candidates}"
        f"{f'; and {more} more' if more > 0 else ''}. Name the group or the half offset as well"
    )


def _parked_step(record: StoredRecord, properties: HalfProperties) -> TransactionStep:
    address, port = decode_host(record.born_host)
    who = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    detail = (
        f"by producer group {properties.group} for queue {properties.queue_id} of topic "
        f"{properties.topic}"
    )
    records = _step_records([record])
    return TransactionStep(
        at=record.stored_ms, what="parked", who=who, detail=detail, records=records
    )


def _decided_step(
    record: StoredRecord,
    op: Op,
    event: str,
    detail: str = "",
    records: Sequence[StoredRecord] = (),
) -> TransactionStep:
    """Return the step of an op; `records` are the others that it stored."""
    return TransactionStep(
        at=record.stored_ms,
        what=event,
        who=op.by,
        reason=op.reason,
        detail=detail,
        records=_step_records([*records, record]),
    )


_KIND_BY_TOPIC: Final = {
    names.HALF_TOPIC: "half",
    names.OP_TOPIC: "op",
    names.STRANDED_TOPIC: "stranded",
}


def _step_records(records: Sequence[StoredRecord]) -> list[StepRecord]:
    return [
        StepRecord(
            kind=_KIND_BY_TOPIC.get(record.topic, "final"),
            topic=record.topic,
            queue_id=record.queue_id,
            queue_offset=record.queue_offset,
            log_offset=record.log_offset,
        )
        for record in records
    ]


def _delivery_detail(final: StoredRecord, properties: HalfProperties) -> str:
    queue = f"queue {properties.queue_id} of topic {properties.topic}"
    if final.topic != properties.topic:
        return f"will be delivered to {queue} after its delay"
    return f"delivered to {queue} at offset {final.queue_offset}"


def _decode_key(key: bytes) -> str:
    return key.decode("utf-8", "replace")
