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
    EscrowFull,
    NoSuchRecord,
    NoSuchTransaction,
    TransactionContradicted,
)
from escrowmq.escrow.checks import Counts, DueTimes, EscrowRules
from escrowmq.escrow.half_table import Cursors, Half, OpenHalves, SettledHalves
from escrowmq.escrow.records import NOWHERE, HalfFacts, Past, copy_of, finals_of, op_of, stranded_of
from escrowmq.escrow.writers import Decision, Writers
from escrowmq.message import names
from escrowmq.message.batch import ToAppend
from escrowmq.message.record import LogOffset, NewRecord, StoredRecord
from escrowmq.message.transaction import COMMITTED, ROLLED_BACK, STATE_OF, STRANDED, State, Verdict

log = logging.getLogger(__name__)

REMEMBERED_MAX: Final = 65_536  # keys of settled halves, for a send that is repeated late


class HalfLog(Protocol):
    """What the escrow reads: the store, or whatever holds the records."""

    def record_at(self, log_offset: int) -> StoredRecord: ...
    def entry_at(self, topic: str, queue_id: int, queue_offset: int) -> LogOffset | None: ...


class Change(msgspec.Struct, frozen=True):
    """Records to append, and what will be so once they are stored."""

    half: Half
    state: State
    records: list[ToAppend]


@dataclass(frozen=True, slots=True)
class Recorded:
    """It has been decided before; the same again does nothing."""

    queue_offset: int
    log_offset: int
    state: State


class Escrow:
    def __init__(self, halves: HalfLog, rules: EscrowRules) -> None:
        self.rules = rules
        self.open = OpenHalves()
        self.settled = SettledHalves()
        self.cursors = Cursors()
        self.due = DueTimes()
        self.counts = Counts()
        self.writers = Writers()
        self.aliases: dict[int, int] = {}  # places of halves that were appended again
        self.unfinished: set[int] = set()  # places of decisions that are not carried out yet
        self._log = halves
        self._last_due_ms = 0
        # Settled ones by key: group, queue and log offset.
        self.remembered: OrderedDict[bytes, tuple[str, int, int]] = OrderedDict()

    # --- park ------------------------------------------------------------------------------------

    def refuse_if_full(self, group: str, size: int) -> None:
        rules, total, load = self.rules, self.open.total, self.open.load_of(group)
        if (
            total.count < rules.open_max
            and load.count < rules.group_open_max
            and total.size + size <= rules.open_bytes_max
            and load.size + size <= rules.group_open_bytes_max
        ):
            return
        for what, used, limit in (
            ("open transactions", total.count + 1, rules.open_max),
            ("bytes of open transactions", total.size + size, rules.open_bytes_max),
            (f"open transactions of group {group}", load.count + 1, rules.group_open_max),
            (f"bytes of group {group}", load.size + size, rules.group_open_bytes_max),
        ):
            if used > limit:
                raise EscrowFull(f"{limit} {what} are the limit: decide some first")

    def find_sent(self, group: str, key: bytes) -> tuple[int, int] | None:
        """Where a half with this key was parked: the send is a repeated one. Queue, log offset."""
        half = self.open.find_by_key(key, group)
        if half is not None:
            return half.queue_offset, half.log_offset
        remembered = self.remembered.get(key)
        if remembered is not None and remembered[0] == group:
            return remembered[1:]
        return None

    def parked(
        self, facts: HalfFacts, *, queue_offset: int, log_offset: int, size: int, parked_ms: int
    ) -> Half:
        """The half is in the log, and was found there."""
        topic, group = facts.topic, facts.group
        half = self.half_to_be(
            topic, facts.queue_id, group, facts.key, parked_ms, None, facts.immunity_ms
        )
        half.attempt = facts.attempt
        half.queue_offset, half.log_offset, half.size = queue_offset, log_offset, size
        self.hold(half)
        return half

    def half_to_be(
        self,
        topic: str,
        queue_id: int,
        group: str,
        key: bytes,
        parked_ms: int,
        sender: Hashable | None,
        immunity_ms: int | None = None,
    ) -> Half:
        """One that is on its way into the log: nobody knows yet where it will lie."""
        name = self.open.name
        due_ms = parked_ms + self.rules.immunity_of(topic, group, immunity_ms)
        if due_ms != self._last_due_ms:  # the same object: halves parked together share it
            self._last_due_ms = due_ms
        due_ms = self._last_due_ms
        return Half(0, 0, 0, name(topic), queue_id, name(group), key, parked_ms, due_ms, sender)

    def hold(self, half: Half) -> None:
        """It is in the log."""
        self.settled.park(half.queue_offset)
        self.open.add(half)
        self.due.add(half.queue_offset, half.due_ms)
        if half.attempt is not None:
            self._join_attempt(half)

    # --- end -------------------------------------------------------------------------------------

    def end(
        self,
        queue_offset: int,
        log_offset: int,
        group: str | None,
        verdict: Verdict,
        *,
        by: str,
        reason: str = "",
        now_ms: int,
    ) -> Change | Recorded:
        """Decide a half, for the first time or again. `group` None: an operator's word.

        Raises NoSuchTransaction, TransactionContradicted; CorruptRecord if it cannot be read.
        """
        wanted = STATE_OF[verdict]
        half = self.find(queue_offset, log_offset)
        if half is None:
            return self.recorded(queue_offset, log_offset, wanted)
        if group is not None and half.group != group:
            raise NoSuchTransaction(
                f"the half at {queue_offset} is of producer group {half.group}, not {group}"
            )
        return self.change(half, wanted, by=by, reason=reason, now_ms=now_ms)

    def change(
        self,
        half: Half,
        state: State,
        *,
        by: str,
        reason: str = "",
        host: bytes = NOWHERE,
        now_ms: int,
        final: NewRecord | None = None,
    ) -> Change:
        """The records that settle it: final, or finals, and op side by side, in this order.
        `final`: its caller has it already."""
        records: list[ToAppend] = [
            op_of(half.queue_offset, state, by, reason, also=half.older, host=host, now_ms=now_ms)
        ]
        if final is not None:
            records.insert(0, final)
        elif state is COMMITTED:
            record = self._log.record_at(half.log_offset)
            records[:0] = finals_of(record, half.topic, half.queue_id)
        half.is_deciding = True
        return Change(half, state, records)

    def find(self, queue_offset: int, log_offset: int) -> Half | None:
        """The living half that these two numbers name; None if it is settled."""
        half = self.open.find(self.aliases.get(queue_offset, queue_offset))
        if half is None:
            return None
        if half.queue_offset == queue_offset:
            own_offset: int | None = half.log_offset
        else:
            own_offset = self._log.entry_at(names.HALF_TOPIC, 0, queue_offset)
        if own_offset is not None and own_offset != log_offset:
            raise NoSuchTransaction(
                f"the half at {queue_offset} has the log offset {own_offset}, not {log_offset}"
            )
        return half

    def recorded(self, queue_offset: int, log_offset: int, wanted: State) -> Recorded:
        """How a half ended that is not open any more, if that is how it was wanted."""
        state = self.settled.state(queue_offset)
        own_offset = self._log.entry_at(names.HALF_TOPIC, 0, queue_offset)
        if state is None or own_offset is None:
            raise NoSuchTransaction(f"no half was parked at {queue_offset}, or it is forgotten")
        if own_offset != log_offset:
            raise NoSuchTransaction(
                f"the half at {queue_offset} has the log offset {own_offset}, not {log_offset}"
            )
        if not state.is_settled:
            raise NoSuchTransaction(f"the half at {queue_offset} cannot be read")
        if state is not wanted:
            self.counts.contradictions += 1
            raise TransactionContradicted(
                f"the transaction at {queue_offset} is {state.text}: it cannot be {wanted.text}",
                state.text,
            )
        self.counts.repeats += 1
        return Recorded(queue_offset, own_offset, state)

    def settled_as(self, change: Change, op_offset: int, *, now_ms: int) -> None:
        """The records of a change are in the log, its op at this place of the op queue."""
        half, state = change.half, change.state
        half.is_deciding = False
        self.settled.put(half.queue_offset, state)
        self.cursors.op_written(op_offset, half.queue_offset)
        if state is STRANDED:
            self.open.strand(half)
            self.counts.stranded += 1
        else:
            self.close(half, state)
            self.counts.finish_seconds.observe(max(0, now_ms - half.parked_ms) / 1000)
            by_topic = self.counts.committed
            if state is ROLLED_BACK:
                by_topic = self.counts.rolled_back
            by_topic[half.topic] = by_topic.get(half.topic, 0) + 1

    def reopen(self, change: Change) -> None:
        """They are not: the half is as it was."""
        change.half.is_deciding = False
        if change.state is State.STRANDED:
            change.half.why = ""

    def close(self, half: Half, state: State) -> None:
        """It is settled, in all the places that it had."""
        self.open.remove(half)
        for old in half.older:
            self.settled.put(old, state)
            self.aliases.pop(old, None)
        if half.attempt is not None:
            self.leave_attempt(half)
        if half.key:
            self.remembered[half.key] = half.group, half.queue_offset, half.log_offset
            if len(self.remembered) > REMEMBERED_MAX:
                self.remembered.popitem(last=False)

    def _join_attempt(self, half: Half) -> None:
        if half.attempt is not None:
            writer, batch, attempt, _ = half.attempt
            self.writers.attempts.add(writer, batch, attempt, half.queue_offset)

    def leave_attempt(self, half: Half) -> None:
        if half.attempt is not None:
            writer, batch, attempt, _ = half.attempt
            self.writers.attempts.remove(writer, batch, attempt, half.queue_offset)

    # --- check -----------------------------------------------------------------------------------

    def take_due(self, now_ms: int, count_max: int) -> list[Half]:
        """The halves to ask about now. Each comes up again only when it is told when."""
        found = []
        for queue_offset in self.due.take(now_ms, count_max):
            half = self.open.find(queue_offset)
            if half is None or half.is_stranded or half.why:
                continue
            if half.due_ms > now_ms:
                continue  # it was put off since; its new time is noted
            if half.is_deciding:
                self.put_off(half, now_ms + 1000)
                continue
            found.append(half)
        return found

    def is_spent(self, half: Half, now_ms: int) -> str:
        """Why it is not to be asked about any more; "" if it is."""
        if half.checks >= self.rules.checks_max:
            return f"asked {half.checks} times without an answer"
        if now_ms - half.parked_ms > self.rules.age_max_ms:
            return f"open for more than {self.rules.age_max_ms // 3_600_000} hours"
        return ""

    def read(self, half: Half) -> StoredRecord | None:
        """The message; None, and reported, if the log cannot give it: nobody waits behind it."""
        try:
            return self._log.record_at(half.log_offset)
        except (CorruptRecord, NoSuchRecord) as error:
            self.counts.unreadable += not half.is_unreadable
            half.why = f"unreadable: {error}"
            log.error("half unreadable queue_offset=%d: %s", half.queue_offset, error)
            return None

    def asked(self, half: Half, now_ms: int) -> None:
        """A question about it is on its way: only such count."""
        half.checks += 1
        self.put_off(half, now_ms + self.interval_ms(half))

    def put_off(self, half: Half, due_ms: int) -> None:
        half.due_ms = due_ms
        self.due.add(half.queue_offset, due_ms)

    def strand(self, half: Half, why: str, record: StoredRecord, *, now_ms: int) -> Change:
        half.is_deciding = True
        half.why = why
        records: list[ToAppend] = [
            stranded_of(record, why),
            op_of(half.queue_offset, State.STRANDED, "broker", why, now_ms=now_ms),
        ]
        return Change(half, State.STRANDED, records)

    # --- appended again --------------------------------------------------------------------------

    def renew(
        self, half: Half, record: StoredRecord, *, resumes: bool, now_ms: int
    ) -> tuple[Past, list[NewRecord]]:
        """The half once more, and that its old place is done with: because its log file is to go,
        or because an operator wants a stranded one asked about again."""
        half.is_deciding = True
        past = Past(half.parked_ms, half.due_ms, half.checks, half.is_stranded)
        if resumes and half.is_stranded:
            past = Past(now_ms, now_ms, 0, False)
        moved = op_of(half.queue_offset, State.OPEN, "broker", "appended again", now_ms=now_ms)
        places = *half.older, half.queue_offset
        return past, [copy_of(record, *places, past=past), moved]

    def renewed(
        self, half: Half, past: Past, queue_offset: int, log_offset: int, op_offset: int
    ) -> None:
        """It lives at the new place; the old one still leads to it."""
        old = half.queue_offset
        self.open.remove(half)
        self.leave_attempt(half)
        half.older += (old,)
        for place in half.older:
            self.aliases[place] = queue_offset
        self.settled.park(queue_offset)
        self.settled.put(old, State.STRANDED)  # not open, and not decided: its copy is
        self.cursors.op_written(op_offset, old)
        half.queue_offset, half.log_offset = queue_offset, log_offset
        half.is_deciding = False
        half.parked_ms, half.due_ms, half.checks, half.is_stranded = past
        if half.is_stranded:
            self.settled.put(queue_offset, State.STRANDED)
        else:
            half.why = ""
        self.open.add(half)
        self.due.add(queue_offset, half.due_ms)
        self._join_attempt(half)

    def needed_below(self, log_offset: int) -> list[Half]:
        """Halves that would go with the log below this place."""
        return [half for half in self.open if half.log_offset < log_offset]

    def forget_below(self, min_queue_offset: int) -> None:
        """The half queue begins here now."""
        self.settled.forget_below(min_queue_offset)

    def advance_cursors(self) -> None:
        self.cursors.advance(self.settled.first_open(self.cursors.half))

    def interval_ms(self, half: Half) -> int:
        return self.rules.interval_of(half.topic, half.group, half.checks)


HALVES_MAX: Final = 1_000_000


def decide_many(
    escrow: Escrow,
    places: Sequence[tuple[int, int]],
    group: str,
    verdict: Verdict,
    *,
    by: str,
) -> Decision | None:
    """The decision over these halves, by queue offset and log offset; None if all are decided so.

    Raises NoSuchTransaction or TransactionContradicted, and then nothing has changed.
    """
    wanted = STATE_OF[verdict]
    open_halves: dict[int, None] = {}  # each once, by whatever places it was named
    for queue_offset, log_offset in dict.fromkeys(places):
        half = escrow.find(queue_offset, log_offset)
        if half is None:
            escrow.recorded(queue_offset, log_offset, wanted)
        elif half.group != group:
            raise NoSuchTransaction(
                f"the half at {queue_offset} is of producer group {half.group}, not {group}"
            )
        else:
            open_halves[half.queue_offset] = None
    if not open_halves:
        return None
    if wanted is State.COMMITTED:
        return Decision(commits=list(open_halves), by=by)
    return Decision(rolls_back=list(open_halves), by=by)


def is_under_way(escrow: Escrow, decision: Decision) -> bool:
    """Whether somebody else is deciding one of these halves just now."""
    return any(half.is_deciding for half in _halves(escrow, decision))


def queues_of(escrow: Escrow, decision: Decision) -> Iterator[tuple[str, int]]:
    """Where its messages will be seen."""
    for queue_offset in decision.commits:
        half = escrow.open.find(queue_offset)
        if half is not None:
            yield half.topic, half.queue_id


def mark_deciding(escrow: Escrow, decision: Decision) -> None:
    for half in _halves(escrow, decision):
        half.is_deciding = True


def unmark_deciding(escrow: Escrow, decision: Decision) -> None:
    for half in _halves(escrow, decision):
        half.is_deciding = False


def refuse_unreadable(escrow: Escrow, decision: Decision) -> None:
    """All or nothing: one that cannot be delivered refuses the rest too, before it is too late."""
    for queue_offset in decision.commits:
        half = escrow.open.find(queue_offset)
        if half is not None and escrow.read(half) is None:
            raise NoSuchTransaction(f"the half at {queue_offset} cannot be read: {half.why}")


def pieces(escrow: Escrow, decision: Decision, *, now_ms: int) -> Iterator[list[Change]]:
    """What follows from a decision and is not done yet, in portions of bounded size."""
    piece: list[Change] = []
    size = 0
    for state, offsets in (
        (State.COMMITTED, decision.commits),
        (State.ROLLED_BACK, decision.rolls_back),
    ):
        for queue_offset in offsets:
            half = escrow.open.find(escrow.aliases.get(queue_offset, queue_offset))
            if half is None:
                continue
            try:
                piece.append(escrow.change(half, state, by=decision.by, now_ms=now_ms))
            except (CorruptRecord, NoSuchRecord):
                escrow.read(half)  # reported; the others are delivered
                continue
            size += half.size
            if size >= escrow.rules.piece_bytes:
                yield piece
                piece, size = [], 0
    if piece:
        yield piece


def settle_all(
    escrow: Escrow, piece: Sequence[Change], queue_offsets: Sequence[int], *, now_ms: int
) -> None:
    """A piece is in the log; these are the places of its records in their queues."""
    at = 0
    for change in piece:
        at += len(change.records)
        escrow.settled_as(change, queue_offsets[at - 1], now_ms=now_ms)


def _halves(escrow: Escrow, decision: Decision) -> Iterator[Half]:
    for queue_offset in (*decision.commits, *decision.rolls_back):
        half = escrow.open.find(queue_offset)
        if half is not None:
            yield half
