"""A transaction's story, as the log tells it: parked, asked about, set aside, decided by whom.

    half       found by its unique key; copies of it are the same transaction at later places
    journal    who was asked when, and who answered that he does not know
    op         how it ended, who decided and why; of a commit it lies behind the final
    final      where it was delivered

Nothing of this is kept in memory: a settled transaction is told of for as long as the log has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from escrowmq.broker.dispatch import Channel
from escrowmq.consume.members import ProducerGroups
from escrowmq.errors import CorruptRecord, RecordNotFound, RemoteProtocolError
from escrowmq.escrow.coordinator import TransactionCoordinator
from escrowmq.escrow.half_table import Half
from escrowmq.escrow.records import HalfProperties, Op, decode_journal_entry, decode_op, parse_half
from escrowmq.message import names
from escrowmq.message.keys import decode_host, decode_offset_id, encode_offset_id
from escrowmq.message.names import TIMER_TOPIC
from escrowmq.message.record import StoredRecord
from escrowmq.message.transaction import TransactionState
from escrowmq.remoting.bodies import TransactionEntry, TransactionHistory, TransactionStep
from escrowmq.store.key_index import RESULTS_MAX
from escrowmq.store.store import MessageStore

JOURNAL_ENTRIES_MAX: Final = 1_000  # of the journal, the newest
_OP_SEARCH_RECORDS_MAX: Final = 8  # records in which its op is looked for

_PositionedStep = tuple[
    int, TransactionStep
]  # by log offset, which is the order in which it happened


@dataclass(frozen=True, slots=True)
class LocatedTransaction:
    """A transaction that was found: the half if it is not settled, the record if it is."""

    queue_offset: int
    log_offset: int
    half: Half | None


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

    # --- finding ---------------------------------------------------------------------------------

    def find(self, name: str) -> LocatedTransaction | None:
        """By transaction id, or by the offset id of a half or of a stranded message."""
        half = (
            self._coordinator.halves.find_by_key(name.encode("utf-8", "replace")) if name else None
        )
        if half is not None:
            return LocatedTransaction(half.queue_offset, half.log_offset, half)
        for record in self._find_halves(name)[:1]:
            return self._locate(record)
        return self._find_by_offset_id(name)

    def _find_by_offset_id(self, offset_id: str) -> LocatedTransaction | None:
        try:
            host, log_offset = decode_offset_id(offset_id)
            record = self._store.record_at(log_offset)
        except (RemoteProtocolError, RecordNotFound, CorruptRecord):
            return None
        if host not in (self._store_host, record.store_host):
            return None  # of another broker, where something else lies at this place
        if record.topic == names.HALF_TOPIC:
            return self._locate(record)
        facts = parse_half(record) if record.topic == names.STRANDED_TOPIC else None
        return None if facts is None or not facts.key else self.find(_decode_key(facts.key))

    def _locate(self, record: StoredRecord) -> LocatedTransaction | None:
        place = self._coordinator.aliases.get(record.queue_offset, record.queue_offset)
        half = self._coordinator.halves.find(place)
        if half is not None:
            return LocatedTransaction(half.queue_offset, half.log_offset, half)
        if self._coordinator.states.get(record.queue_offset) is None:
            return None  # the queue begins behind it
        return LocatedTransaction(record.queue_offset, record.log_offset, None)

    def _find_halves(self, key: str) -> list[StoredRecord]:
        """The newest first."""
        return self._store.find_by_key(names.HALF_TOPIC, key, count_max=RESULTS_MAX) if key else []

    # --- one line of a list ----------------------------------------------------------------------

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

    def count_checks(self, queue_offset: int) -> int:
        """How often a half was asked about that is not in memory any more."""
        found = self._store.find_by_key(names.JOURNAL_TOPIC, str(queue_offset), count_max=1)
        try:
            return decode_journal_entry(found[0]).check_number if found else 0
        except CorruptRecord:
            return 0

    def _transaction_id(self, key: bytes, log_offset: int) -> str:
        # A half without a key can only have been written by somebody else.
        return _decode_key(key) if key else encode_offset_id(self._store_host, log_offset)

    # --- the whole of it -------------------------------------------------------------------------

    def read_history(self, located: LocatedTransaction, now_ms: int) -> TransactionHistory:
        """Raises NoSuchRecord or CorruptRecord if the half cannot be read."""
        half = located.half
        record = self._store.record_at(located.log_offset)
        facts = parse_half(record)
        if facts is None:
            raise CorruptRecord(record.log_offset, "no half that could be delivered")
        state = self._coordinator.states.get(located.queue_offset) or TransactionState.OPEN
        copies = self._copies(record, facts)
        steps: list[_PositionedStep] = [(copies[0].log_offset, _parked_step(copies[0], facts))]
        for copy in copies:
            steps += self._journal_steps(copy.queue_offset)
            steps += self._op_steps(copy.queue_offset)
        if state is TransactionState.COMMITTED:
            steps.append(self._commit_step(copies, facts))
        elif state is TransactionState.ROLLED_BACK and all(s.what != state.text for _, s in steps):
            steps.append((self._store.end, TransactionStep(at=0, what=state.text)))
        steps.sort(key=lambda placed: placed[0])
        told = [step for _, step in steps]
        if half is None:
            checks = self.count_checks(record.queue_offset)
            entry = self.make_decided_entry(record, facts, state, checks)
            why = "" if state.is_decided else "it could not be read when the broker started"
            return TransactionHistory(transaction=entry, steps=told, pending_because=why)
        return TransactionHistory(
            transaction=self.make_entry(half),
            steps=told,
            pending_because=self._pending_reason(half, told, now_ms),
        )

    def _copies(self, record: StoredRecord, properties: HalfProperties) -> list[StoredRecord]:
        """The same transaction at all its places, the oldest first."""
        found = {record.log_offset: record}
        for other in self._find_halves(_decode_key(properties.key)):
            about = parse_half(other)
            if about is not None and about.group == properties.group:
                found[other.log_offset] = other
        return [found[at] for at in sorted(found)]

    def _journal_steps(self, queue_offset: int) -> Iterator[_PositionedStep]:
        for record in self._find_all_by_key(names.JOURNAL_TOPIC, str(queue_offset)):
            try:
                step = decode_journal_entry(record)
            except CorruptRecord:
                continue
            who, _, reason = step.peer.partition("\n")
            detail = f"check {step.check_number}" if step.event != "resumed" else ""
            yield (
                record.log_offset,
                TransactionStep(
                    at=step.stored_ms, what=step.event, who=who, reason=reason, detail=detail
                ),
            )

    def _find_all_by_key(self, topic: str, key: str) -> Iterator[StoredRecord]:
        """All of them, the newest first: one look-up gives no more than FOUND_MAX."""
        seen: set[int] = set()
        end_ms = 1 << 62
        while len(seen) < JOURNAL_ENTRIES_MAX:
            found = self._store.find_by_key(topic, key, count_max=RESULTS_MAX, end_ms=end_ms)
            new = [record for record in found if record.log_offset not in seen]
            yield from new
            seen.update(record.log_offset for record in new)
            if not new or len(found) < RESULTS_MAX:
                return
            end_ms = min(record.stored_ms for record in new)

    def _op_steps(self, queue_offset: int) -> Iterator[_PositionedStep]:
        """Those of commits have no key."""
        for record in self._store.find_by_key(
            names.OP_TOPIC, str(queue_offset), count_max=RESULTS_MAX
        ):
            op = decode_op(record)
            if op is not None and op.state is not None:
                what = "appended_again" if op.state is TransactionState.OPEN else op.state.text
                yield record.log_offset, _decided_step(record, op, what)

    def _commit_step(
        self, copies: list[StoredRecord], properties: HalfProperties
    ) -> _PositionedStep:
        places: dict[int, int] = {copy.log_offset: copy.queue_offset for copy in copies}
        finals = [
            record
            for topic in (properties.topic, names.SCHEDULE_TOPIC, TIMER_TOPIC)
            for record in self._store.find_by_key(
                topic, _decode_key(properties.key), count_max=RESULTS_MAX
            )
            if record.prepared_offset in places
        ]
        what = TransactionState.COMMITTED.text
        if not finals:
            return self._store.end, TransactionStep(at=0, what=what)
        final = min(finals, key=lambda record: record.log_offset)
        detail = _delivery_detail(
            next((r for r in finals if r.topic == properties.topic), final), properties
        )
        for record in self._records_after(final):
            op = decode_op(record) if record.topic == names.OP_TOPIC else None
            if op is not None and places[final.prepared_offset] in op.half_offsets:
                return record.log_offset, _decided_step(record, op, what, detail)
        return final.log_offset, TransactionStep(at=final.stored_ms, what=what, detail=detail)

    def _records_after(self, record: StoredRecord) -> Iterator[StoredRecord]:
        try:
            yield from islice(
                self._store.records(record.log_offset + record.size), _OP_SEARCH_RECORDS_MAX
            )
        except (CorruptRecord, RecordNotFound):
            return

    def _pending_reason(self, half: Half, steps: list[TransactionStep], now_ms: int) -> str:
        if half.is_stranded:
            reasons = [step.reason for step in steps if step.what == TransactionState.STRANDED.text]
            return f"{reasons[-1] if reasons else half.reason}; it waits for an operator"
        if half.reason:
            return half.reason
        if half.is_being_decided:
            return "it is being decided just now"
        if half.attempt is not None:
            writer, batch, name, _ = half.attempt
            return f"writer {writer} has not decided batch {batch} yet (attempt {name})"
        heard = next((s.what for s in reversed(steps) if s.what in ("asked", "unknown")), "")
        if half.due_ms <= now_ms and not self._producers.members(half.group):
            return (
                f"it is due, and nobody of producer group {half.group} is connected: "
                "whoever connects first is asked"
            )
        if half.due_ms <= now_ms:
            return "it is due, and is asked about as soon as its producers have answered others"
        if not half.checks:
            return "its producer has not decided yet, and has time until it is due"
        answered = "answered that it does not know" if heard == "unknown" else "has not answered"
        return f"check {half.checks} is sent, and whoever was asked {answered}"


def _parked_step(record: StoredRecord, properties: HalfProperties) -> TransactionStep:
    address, port = decode_host(record.born_host)
    who = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    detail = (
        f"by producer group {properties.group}, for queue {properties.queue_id} of "
        f"{properties.topic}"
    )
    return TransactionStep(at=record.stored_ms, what="parked", who=who, detail=detail)


def _decided_step(record: StoredRecord, op: Op, event: str, detail: str = "") -> TransactionStep:
    return TransactionStep(
        at=record.stored_ms, what=event, who=op.by, reason=op.reason, detail=detail
    )


def _delivery_detail(final: StoredRecord, properties: HalfProperties) -> str:
    if final.topic != properties.topic:
        return (
            f"to be delivered to queue {properties.queue_id} of {properties.topic} after its delay"
        )
    return f"delivered to queue {final.queue_id} of {final.topic} at {final.queue_offset}"


def _decode_key(key: bytes) -> str:
    return key.decode("utf-8", "replace")
