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

from escrowmq.broker.metadata import TIMER_TOPIC
from escrowmq.consume.members import ProducerGroups
from escrowmq.errors import CorruptRecord, NoSuchRecord, RemoteProtocolError
from escrowmq.escrow.coordinator import Escrow
from escrowmq.escrow.half_table import Half
from escrowmq.escrow.records import HalfFacts, Op, decode_op, decode_step, facts_of
from escrowmq.message import names
from escrowmq.message.keys import decode_host, decode_offset_id, encode_offset_id
from escrowmq.message.record import StoredRecord
from escrowmq.message.transaction import State
from escrowmq.remoting.bodies import TransactionEntry, TransactionStep, TransactionStory
from escrowmq.store.key_index import FOUND_MAX
from escrowmq.store.store import MessageStore

STEPS_MAX: Final = 1_000  # of the journal, the newest
_BEHIND_FINAL_MAX: Final = 8  # records in which its op is looked for

_Placed = tuple[int, TransactionStep]  # by log offset, which is the order in which it happened


@dataclass(frozen=True, slots=True)
class Named:
    """A transaction that was found: the half if it is not settled, the record if it is."""

    queue_offset: int
    log_offset: int
    half: Half | None


class Stories:
    def __init__(
        self, store: MessageStore, escrow: Escrow, producers: ProducerGroups, store_host: bytes
    ) -> None:
        self._store = store
        self._escrow = escrow
        self._producers = producers
        self._store_host = store_host

    # --- finding ---------------------------------------------------------------------------------

    def find(self, name: str) -> Named | None:
        """By transaction id, or by the offset id of a half or of a stranded message."""
        half = self._escrow.open.find_by_key(name.encode("utf-8", "replace")) if name else None
        if half is not None:
            return Named(half.queue_offset, half.log_offset, half)
        for record in self._halves_with(name)[:1]:
            return self._named(record)
        return self._find_by_place(name)

    def _find_by_place(self, offset_id: str) -> Named | None:
        try:
            host, log_offset = decode_offset_id(offset_id)
            record = self._store.record_at(log_offset)
        except (RemoteProtocolError, NoSuchRecord, CorruptRecord):
            return None
        if host not in (self._store_host, record.store_host):
            return None  # of another broker, where something else lies at this place
        if record.topic == names.HALF_TOPIC:
            return self._named(record)
        facts = facts_of(record) if record.topic == names.STRANDED_TOPIC else None
        return None if facts is None or not facts.key else self.find(_text(facts.key))

    def _named(self, record: StoredRecord) -> Named | None:
        place = self._escrow.aliases.get(record.queue_offset, record.queue_offset)
        half = self._escrow.open.find(place)
        if half is not None:
            return Named(half.queue_offset, half.log_offset, half)
        if self._escrow.settled.state(record.queue_offset) is None:
            return None  # the queue begins behind it
        return Named(record.queue_offset, record.log_offset, None)

    def _halves_with(self, key: str) -> list[StoredRecord]:
        """The newest first."""
        return self._store.find_by_key(names.HALF_TOPIC, key, count_max=FOUND_MAX) if key else []

    # --- one line of a list ----------------------------------------------------------------------

    def entry_of(self, half: Half) -> TransactionEntry:
        waits_for_operator = half.is_stranded or bool(half.why)
        return TransactionEntry(
            transaction_id=self._id_of(half.key, half.log_offset),
            group=half.group,
            topic=half.topic,
            queue_id=half.queue_id,
            state=(State.STRANDED if half.is_stranded else State.OPEN).text,
            parked_at=half.parked_ms,
            checks=half.checks,
            next_due=None if waits_for_operator else half.due_ms,
            queue_offset=half.queue_offset,
            log_offset=half.log_offset,
            size=half.size,
            why=half.why,
        )

    def entry_of_settled(
        self, record: StoredRecord, facts: HalfFacts, state: State, checks: int
    ) -> TransactionEntry:
        return TransactionEntry(
            transaction_id=self._id_of(facts.key, record.log_offset),
            group=facts.group,
            topic=facts.topic,
            queue_id=facts.queue_id,
            state=state.text,
            parked_at=record.stored_ms,
            checks=checks,
            queue_offset=record.queue_offset,
            log_offset=record.log_offset,
            size=record.size,
        )

    def checks_of(self, queue_offset: int) -> int:
        """How often a half was asked about that is not in memory any more."""
        found = self._store.find_by_key(names.JOURNAL_TOPIC, str(queue_offset), count_max=1)
        try:
            return decode_step(found[0]).number if found else 0
        except CorruptRecord:
            return 0

    def _id_of(self, key: bytes, log_offset: int) -> str:
        # A half without a key can only have been written by somebody else.
        return _text(key) if key else encode_offset_id(self._store_host, log_offset)

    # --- the whole of it -------------------------------------------------------------------------

    def tell(self, named: Named, now_ms: int) -> TransactionStory:
        """Raises NoSuchRecord or CorruptRecord if the half cannot be read."""
        half = named.half
        record = self._store.record_at(named.log_offset)
        facts = facts_of(record)
        if facts is None:
            raise CorruptRecord(record.log_offset, "no half that could be delivered")
        state = self._escrow.settled.state(named.queue_offset) or State.OPEN
        copies = self._copies(record, facts)
        steps: list[_Placed] = [(copies[0].log_offset, _parked(copies[0], facts))]
        for copy in copies:
            steps += self._journal(copy.queue_offset)
            steps += self._ops(copy.queue_offset)
        if state is State.COMMITTED:
            steps.append(self._commit(copies, facts))
        elif state is State.ROLLED_BACK and all(s.what != state.text for _, s in steps):
            steps.append((self._store.end, TransactionStep(at=0, what=state.text)))
        steps.sort(key=lambda placed: placed[0])
        told = [step for _, step in steps]
        if half is None:
            checks = self.checks_of(record.queue_offset)
            entry = self.entry_of_settled(record, facts, state, checks)
            why = "" if state.is_settled else "it could not be read when the broker started"
            return TransactionStory(transaction=entry, steps=told, pending_because=why)
        return TransactionStory(
            transaction=self.entry_of(half),
            steps=told,
            pending_because=self._pending_because(half, told, now_ms),
        )

    def _copies(self, record: StoredRecord, facts: HalfFacts) -> list[StoredRecord]:
        """The same transaction at all its places, the oldest first."""
        found = {record.log_offset: record}
        for other in self._halves_with(_text(facts.key)):
            about = facts_of(other)
            if about is not None and about.group == facts.group:
                found[other.log_offset] = other
        return [found[at] for at in sorted(found)]

    def _journal(self, queue_offset: int) -> Iterator[_Placed]:
        for record in self._all_with_key(names.JOURNAL_TOPIC, str(queue_offset)):
            try:
                step = decode_step(record)
            except CorruptRecord:
                continue
            who, _, reason = step.peer.partition("\n")
            detail = f"check {step.number}" if step.what != "resumed" else ""
            yield (
                record.log_offset,
                TransactionStep(
                    at=step.at_ms, what=step.what, who=who, reason=reason, detail=detail
                ),
            )

    def _all_with_key(self, topic: str, key: str) -> Iterator[StoredRecord]:
        """All of them, the newest first: one look-up gives no more than FOUND_MAX."""
        seen: set[int] = set()
        end_ms = 1 << 62
        while len(seen) < STEPS_MAX:
            found = self._store.find_by_key(topic, key, count_max=FOUND_MAX, end_ms=end_ms)
            new = [record for record in found if record.log_offset not in seen]
            yield from new
            seen.update(record.log_offset for record in new)
            if not new or len(found) < FOUND_MAX:
                return
            end_ms = min(record.stored_ms for record in new)

    def _ops(self, queue_offset: int) -> Iterator[_Placed]:
        """Those of commits have no key."""
        for record in self._store.find_by_key(
            names.OP_TOPIC, str(queue_offset), count_max=FOUND_MAX
        ):
            op = decode_op(record)
            if op is not None and op.state is not None:
                what = "appended_again" if op.state is State.OPEN else op.state.text
                yield record.log_offset, _decided(record, op, what)

    def _commit(self, copies: list[StoredRecord], facts: HalfFacts) -> _Placed:
        places: dict[int, int] = {copy.log_offset: copy.queue_offset for copy in copies}
        finals = [
            record
            for topic in (facts.topic, names.SCHEDULE_TOPIC, TIMER_TOPIC)
            for record in self._store.find_by_key(topic, _text(facts.key), count_max=FOUND_MAX)
            if record.prepared_offset in places
        ]
        what = State.COMMITTED.text
        if not finals:
            return self._store.end, TransactionStep(at=0, what=what)
        final = min(finals, key=lambda record: record.log_offset)
        detail = _delivery(next((r for r in finals if r.topic == facts.topic), final), facts)
        for record in self._behind(final):
            op = decode_op(record) if record.topic == names.OP_TOPIC else None
            if op is not None and places[final.prepared_offset] in op.halves:
                return record.log_offset, _decided(record, op, what, detail)
        return final.log_offset, TransactionStep(at=final.stored_ms, what=what, detail=detail)

    def _behind(self, record: StoredRecord) -> Iterator[StoredRecord]:
        try:
            yield from islice(
                self._store.records(record.log_offset + record.size), _BEHIND_FINAL_MAX
            )
        except (CorruptRecord, NoSuchRecord):
            return

    def _pending_because(self, half: Half, steps: list[TransactionStep], now_ms: int) -> str:
        if half.is_stranded:
            reasons = [step.reason for step in steps if step.what == State.STRANDED.text]
            return f"{reasons[-1] if reasons else half.why}; it waits for an operator"
        if half.why:
            return half.why
        if half.is_deciding:
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


def _parked(record: StoredRecord, facts: HalfFacts) -> TransactionStep:
    address, port = decode_host(record.born_host)
    who = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    detail = f"by producer group {facts.group}, for queue {facts.queue_id} of {facts.topic}"
    return TransactionStep(at=record.stored_ms, what="parked", who=who, detail=detail)


def _decided(record: StoredRecord, op: Op, what: str, detail: str = "") -> TransactionStep:
    return TransactionStep(
        at=record.stored_ms, what=what, who=op.by, reason=op.reason, detail=detail
    )


def _delivery(final: StoredRecord, facts: HalfFacts) -> str:
    if final.topic != facts.topic:
        return f"to be delivered to queue {facts.queue_id} of {facts.topic} after its delay"
    return f"delivered to queue {final.queue_id} of {final.topic} at {final.queue_offset}"


def _text(key: bytes) -> str:
    return key.decode("utf-8", "replace")
