"""Transactional messages: sends that are parked, ends that decide, checks that ask.

The protocol is in `escrow/`; here requests become calls of it, and its records go to the turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from escrowmq.broker.dispatch import Line
from escrowmq.broker.statistics import Counts
from escrowmq.broker.transactions.check import Checks
from escrowmq.broker.transactions.park import Parking
from escrowmq.broker.transactions.persistence import EscrowMemory, Reroute, rerouted
from escrowmq.broker.turn import Done, Turn
from escrowmq.consume.members import ProducerGroups
from escrowmq.consume.offsets import ConsumerOffsets
from escrowmq.errors import (
    CorruptRecord,
    NoSuchRecord,
    NoSuchTransaction,
    RequestRefused,
    TransactionContradicted,
)
from escrowmq.escrow.checks import EscrowRules
from escrowmq.escrow.coordinator import Change, Escrow, Recorded
from escrowmq.escrow.half_table import FreshHalf, Half
from escrowmq.escrow.records import PRODUCER
from escrowmq.escrow.writers import Writer, decision_record
from escrowmq.message.batch import ToAppend
from escrowmq.message.keys import encode_offset_id
from escrowmq.message.record import TRANSACTION_COMMIT, LogOffset, NewRecord
from escrowmq.message.transaction import COMMIT, STATE_OF, State, Verdict
from escrowmq.remoting.codes import FLAG_ONEWAY, ResponseCode
from escrowmq.remoting.headers import EndTransaction, EndTransactionAnswer
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import SendAnswers, answer
from escrowmq.store.commit_log import Placed
from escrowmq.store.disk import Disk
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)

_VERDICTS = {verdict.value: verdict for verdict in Verdict}
RENEWED_MAX: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionRules:
    escrow: EscrowRules = field(default_factory=EscrowRules)
    rejects: bool = False  # rejectTransactionMessage


class Transactions:
    def __init__(
        self,
        store: MessageStore,
        disk: Disk,
        turn: Turn,
        offsets: ConsumerOffsets,
        producers: ProducerGroups,
        answers: SendAnswers,
        rules: TransactionRules,
        counts: Counts,
        *,
        reroute: Reroute = lambda record, now_ms: record,
    ) -> None:
        self._store = store
        self._turn = turn
        self.answers = answers
        self._reroute = reroute
        self._moved_end = LogOffset(0)  # of the log, when a half was last appended again
        self.memory = EscrowMemory(store, disk, offsets, rules.escrow, reroute)
        escrow = self.memory.escrow
        self.escrow = escrow
        self.parking = Parking(turn, escrow, answers, counts, rejects=rules.rejects)
        self.checks = Checks(escrow, turn, producers, self.append, store_host=answers.store_host)

    def change_rules(self, rules: TransactionRules) -> None:
        """A half that is due already stays due then; limits count from now on."""
        self.escrow.rules = rules.escrow
        self.parking.rejects = rules.rejects

    # --- ending ----------------------------------------------------------------------------------

    def end(self, line: Line, request: Request[EndTransaction], now_ms: int) -> None:
        fields = request.head.fields
        verdict = _VERDICTS.get(fields.commit_or_rollback)
        half = self.escrow.open.find(fields.tran_state_table_offset)
        if (
            half is None
            or half.log_offset != fields.commit_log_offset
            or half.group != fields.producer_group
            or half.is_deciding
            or fields.from_transaction_check
            or not verdict
        ):
            self._end_with_care(line, request, verdict, now_ms)
            return
        fresh = self.parking.fresh.take(half.queue_offset)
        final = None
        if fresh is not None and verdict is COMMIT and not half.older:
            final = _final(half, fresh)
        self._settle(line, request, half, verdict, now_ms, final)

    def _end_with_care(
        self,
        line: Line,
        request: Request[EndTransaction],
        verdict: Verdict | None,
        now_ms: int,
    ) -> None:
        """Anything may be wrong with it, or it is not the first."""
        fields = request.head.fields
        if verdict is None:
            raise RequestRefused(
                ResponseCode.SYSTEM_ERROR,
                f"commitOrRollback {fields.commit_or_rollback} is not 0, 8 or 12",
            )
        try:
            half = self.escrow.find(fields.tran_state_table_offset, fields.commit_log_offset)
            if half is not None and half.group != fields.producer_group:
                raise NoSuchTransaction(
                    f"the half at {fields.tran_state_table_offset} is of producer group "
                    f"{half.group}, not {fields.producer_group}"
                )
            if half is not None and fields.from_transaction_check:
                unknown = verdict is Verdict.UNKNOWN
                self.checks.answered(half, line, unknown=unknown, now_ms=now_ms)
            if verdict is Verdict.UNKNOWN:
                self._answer_state(line, request, half)
            elif half is None:
                self._repeat(line, request, verdict)
            elif half.is_deciding:
                # Somebody is faster by less than a turn: what he decided is the answer.
                self._turn.put([], lambda code, _: self._end_after(line, request, now_ms))
            else:
                self._settle(line, request, half, verdict, now_ms)
        except NoSuchTransaction as error:
            raise RequestRefused(ResponseCode.SYSTEM_ERROR, str(error)) from error

    def _end_after(self, line: Line, request: Request[EndTransaction], now_ms: int) -> None:
        try:
            self.end(line, request, now_ms)
        except RequestRefused as error:
            line.write(answer(request, code=error.code, remark=error.remark))

    def _repeat(self, line: Line, request: Request[EndTransaction], verdict: Verdict) -> None:
        """It is not open: the recorded outcome again, or a refusal."""
        fields = request.head.fields
        queue_offset, log_offset = fields.tran_state_table_offset, fields.commit_log_offset
        try:
            recorded = self.escrow.recorded(queue_offset, log_offset, STATE_OF[verdict])
        except TransactionContradicted as error:
            log.warning("contradiction peer=%s: %s", line.peer, error)
            raise RequestRefused(ResponseCode.TRANSACTION_CONTRADICTED, str(error)) from error
        self._turn.put([], lambda code, _: self._answer_recorded(line, request, recorded, code))

    def _settle(
        self,
        line: Line,
        request: Request[EndTransaction],
        half: Half,
        verdict: Verdict,
        now_ms: int,
        final: NewRecord | None = None,
    ) -> None:
        by = "check" if request.head.fields.from_transaction_check else PRODUCER
        try:
            change = self.escrow.change(
                half, STATE_OF[verdict], by=by, host=line.peer_host, now_ms=now_ms, final=final
            )
        except (CorruptRecord, NoSuchRecord) as error:
            raise RequestRefused(ResponseCode.SYSTEM_ERROR, str(error)) from error
        done = None
        if not request.head.flag & FLAG_ONEWAY:
            done = partial(self._answer_decided, line, request, change)
        if final is None:
            self.append(change, done, now_ms=now_ms)
        else:  # nothing in its properties asks for another place than its own
            settling = _Settling(self.escrow, change, done, now_ms, len(change.records))
            self._turn.join(settling, change.records)

    def append(
        self,
        change: Change,
        done: Done | None = None,
        *,
        now_ms: int,
    ) -> None:
        """The records of a change go with this turn; then it is so, or it is as it was."""
        records = rerouted(change, self._reroute, now_ms)
        settling = _Settling(self.escrow, change, done, now_ms, len(records))
        self._turn.join(settling, records)

    def rerouted(self, change: Change, now_ms: int) -> list[ToAppend]:
        return rerouted(change, self._reroute, now_ms)

    def _answer_decided(
        self,
        line: Line,
        request: Request[EndTransaction],
        change: Change,
        code: int,
        places: Sequence[Placed],
    ) -> None:
        if not places or code != ResponseCode.SUCCESS:
            line.write(answer(request, code=code, remark="the decision was not stored"))
            return
        half, final = change.half, None
        if change.state is State.COMMITTED:
            final = places[0]
        line.write(answer(request, self._fields(half, change.state, final)))

    def _answer_recorded(
        self, line: Line, request: Request[EndTransaction], recorded: Recorded, code: int
    ) -> None:
        if code != ResponseCode.SUCCESS:
            line.write(answer(request, code=code, remark="the decision is not durable yet"))
            return
        line.write(answer(request, EndTransactionAnswer(state=recorded.state.text)))

    def _answer_state(
        self, line: Line, request: Request[EndTransaction], half: Half | None
    ) -> None:
        queue_offset = request.head.fields.tran_state_table_offset
        state = self.escrow.settled.state(queue_offset)
        if half is not None:
            state = State.STRANDED if half.is_stranded else State.OPEN
        if state is None:
            raise NoSuchTransaction(f"no half was parked at {queue_offset}")
        recorded = Recorded(queue_offset, request.head.fields.commit_log_offset, state)
        self._turn.put([], lambda code, _: self._answer_recorded(line, request, recorded, code))

    def _fields(self, half: Half, state: State, final: Placed | None) -> EndTransactionAnswer:
        host = self.answers.store_host
        return EndTransactionAnswer(
            state=state.text,
            transaction_id=half.key.decode("utf-8", "replace"),
            topic=half.topic,
            queue_id=half.queue_id,
            queue_offset=None if final is None else final.queue_offset,
            msg_id=None if final is None else encode_offset_id(host, final.log_offset),
        )

    # --- now and then ----------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        self.checks.tick(now_ms)
        self.memory.note_cursors()

    def save(self, *, at_once: bool = False) -> None:
        self.memory.save(at_once=at_once)

    def keep_from(self) -> LogOffset | None:
        """Halves that are open, and the last word of each writer, are in the log from here on."""
        if self.escrow.unfinished:  # something is out of sight: it must not go before it is seen
            return self._store.begin
        if self._store.flushed < self._moved_end:  # what was moved is not safe where it is now
            return self._store.begin
        needed = [writer.log_offset for writer in self.escrow.writers if not writer.is_last]
        half = self.escrow.open.first()
        if half is not None:
            needed.append(half.log_offset)
        return LogOffset(min(needed)) if needed else None

    def make_way(self, log_offset: int, now_ms: int) -> None:
        """The log below has to go: what is open there is appended again, a slice at a time."""
        for half in self.escrow.needed_below(log_offset)[:RENEWED_MAX]:
            if not half.is_deciding:
                self.renew(half, now_ms, resumes=False)
            if half.is_unreadable and not half.is_deciding:
                self._give_up(half, now_ms)
        for writer in self.escrow.writers:
            if writer.log_offset < log_offset and not writer.is_last:
                self._remember(writer, now_ms)

    def _give_up(self, half: Half, now_ms: int) -> None:
        """Its message is lost already. To keep the log for it would lose the disk too."""
        log.error("half given up queue_offset=%d: %s", half.queue_offset, half.why)
        change = self.escrow.change(
            half, State.ROLLED_BACK, by="broker", reason=half.why, now_ms=now_ms
        )
        self.append(change, now_ms=now_ms)

    def _remember(self, writer: Writer, now_ms: int) -> None:
        writers = self.escrow.writers
        decision = writers.remembrance(writer)
        if decision is not None:

            def stored(places: Sequence[Placed]) -> None:
                writers.note(decision, places[0].log_offset)
                self._moved_end = self._store.end

            self._turn.put([decision_record(decision, now_ms=now_ms)], stored=stored)

    def renew(
        self,
        half: Half,
        now_ms: int,
        done: Callable[[int], None] | None = None,
        *,
        resumes: bool = True,
    ) -> None:
        record = self.escrow.read(half)
        if record is None:
            return
        past, records = self.escrow.renew(half, record, resumes=resumes, now_ms=now_ms)

        def stored(places: Sequence[Placed]) -> None:
            copy, op = places
            self.escrow.renewed(half, past, copy.queue_offset, copy.log_offset, op.queue_offset)
            self._moved_end = self._store.end

        def answered(code: int, places: Sequence[Placed]) -> None:
            if not places:
                half.is_deciding = False
            if done is not None:
                done(code)

        self._turn.put(records, answered, stored=stored)

    def line_closed(self, line: Line) -> None:
        self.checks.line_closed(line)


def _final(half: Half, fresh: FreshHalf) -> NewRecord:
    return NewRecord(
        half.topic,
        half.queue_id,
        fresh.body,
        fresh.properties,
        fresh.flag,
        fresh.sys_flag | TRANSACTION_COMMIT,
        fresh.born_ms,
        fresh.born_host,
        fresh.reconsume_times,
        half.log_offset,
        fresh.derived,
    )


class _Settling(msgspec.Struct, gc=False):
    """A change on its way into the log: afterwards it is so, or it is as it was."""

    escrow: Escrow
    change: Change
    when_done: Done | None
    now_ms: int
    count: int
    waits: bool = True
    first: int = 0

    def stored(self, placed: Sequence[Placed]) -> None:
        op = placed[self.first + self.count - 1]
        self.escrow.settled_as(self.change, op.queue_offset, now_ms=self.now_ms)

    def done(self, code: int, placed: Sequence[Placed]) -> None:
        if not placed:
            self.escrow.reopen(self.change)
        if self.when_done is not None:
            self.when_done(code, placed[self.first : self.first + self.count])
