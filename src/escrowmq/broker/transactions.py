"""Transactional messages: sends that are parked, ends that decide, checks that ask.

The protocol is in `escrow/`; here requests become calls of it, and its records go to the turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from escrowmq.broker.checks import Checks
from escrowmq.broker.escrowmemory import EscrowMemory, Reroute, rerouted
from escrowmq.broker.line import Line
from escrowmq.broker.turn import Turn
from escrowmq.consume.groups import ProducerGroups
from escrowmq.consume.offsets import ConsumerOffsets
from escrowmq.errors import (
    CorruptRecord,
    EscrowFull,
    NoSuchRecord,
    NoSuchTransaction,
    RequestRefused,
    TransactionContradicted,
)
from escrowmq.escrow.escrow import Change, EscrowRules, Recorded
from escrowmq.escrow.halves import Attempt, Half
from escrowmq.escrow.shapes import HalfFacts, attempt_of, half_of, immunity_ms
from escrowmq.escrow.verdict import State, Verdict
from escrowmq.message.ids import encode_offset_id
from escrowmq.message.offsets import LogOffset
from escrowmq.message.properties import decode_properties, find_property
from escrowmq.message.record import NewRecord
from escrowmq.store.disk import Disk
from escrowmq.store.store import MessageStore, Placed
from escrowmq.wire.answers import SendAnswers, answer
from escrowmq.wire.codes import ResponseCode
from escrowmq.wire.fastpath import Request
from escrowmq.wire.headers_send import EndTransaction, EndTransactionAnswer, SendMessage

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
        *,
        reroute: Reroute = lambda record, now_ms: record,
    ) -> None:
        self._store = store
        self._turn = turn
        self._answers = answers
        self._reroute = reroute
        self._rejects = rules.rejects
        self.memory = EscrowMemory(store, disk, offsets, rules.escrow, reroute)
        escrow = self.memory.escrow
        self._parking: set[bytes] = set()  # keys of halves in this turn's batch
        self.escrow = escrow
        self.checks = Checks(escrow, turn, producers, self.append, store_host=answers.store_host)

    # --- parking ---------------------------------------------------------------------------------

    def park(
        self, line: Line, request: Request[SendMessage], record: NewRecord, now_ms: int, waits: bool
    ) -> None:
        """A send with TRAN_MSG: stored where no consumer looks, answered like any send."""
        if self._rejects:
            raise RequestRefused(
                ResponseCode.NO_PERMISSION, "this broker does not take transactional messages"
            )
        half = half_of(record)
        immunity = find_property(half.properties, b"CHECK_IMMUNITY_TIME_IN_SECONDS")
        facts = HalfFacts(
            topic=record.topic,
            queue_id=record.queue_id,
            group=_text(find_property(half.properties, b"PGROUP")),
            key=find_property(half.properties, b"UNIQ_KEY") or b"",
            immunity_ms=immunity_ms(None if immunity is None else _text(immunity)),
            attempt=_attempt(half),
        )
        key = _text(facts.key)
        if self.escrow.find_sent(facts.group, facts.key) is not None or facts.key in self._parking:
            self.escrow.counts.duplicate_sends += 1
            self._turn.put(
                [], lambda code, _: self._answer_again(line, request, facts, code), waits=waits
            )
            return
        try:
            self.escrow.refuse_if_full(facts.group, len(record.body) + len(record.properties))
        except EscrowFull as error:
            raise RequestRefused(ResponseCode.SYSTEM_BUSY, str(error)) from error
        self._parking.add(facts.key)

        def stored(places: Sequence[Placed]) -> None:
            self._parking.discard(facts.key)
            [place] = places
            self.escrow.counts.parked += 1
            self.escrow.parked(
                facts,
                queue_offset=place.queue_offset,
                log_offset=place.log_offset,
                size=place.size,
                parked_ms=now_ms,
                sender=line,
            )

        def done(code: int, places: Sequence[Placed]) -> None:
            self._parking.discard(facts.key)
            self._answer_parked(line, request, record.queue_id, key, code, places)

        self._turn.put([half], done, stored=stored, waits=waits)

    def _answer_parked(
        self,
        line: Line,
        request: Request[SendMessage],
        queue_id: int,
        key: str,
        code: int,
        places: Sequence[Placed],
    ) -> None:
        if not places:
            line.write(answer(request, code=code, remark="the half was not stored"))
            return
        place = places[0]
        line.write(
            self._answers.sent(request, place.log_offset, queue_id, place.queue_offset, code, key)
        )

    def _answer_again(
        self, line: Line, request: Request[SendMessage], facts: HalfFacts, code: int
    ) -> None:
        """It was sent before, and this is the answer that got lost."""
        found = self.escrow.find_sent(facts.group, facts.key)
        if found is None or code != ResponseCode.SUCCESS:
            code = code or ResponseCode.SYSTEM_ERROR
            line.write(answer(request, code=code, remark="the half was not stored"))
            return
        queue_offset, log_offset = found
        key = _text(facts.key)
        line.write(self._answers.sent(request, log_offset, facts.queue_id, queue_offset, code, key))

    # --- ending ----------------------------------------------------------------------------------

    def end(self, line: Line, request: Request[EndTransaction], now_ms: int) -> None:
        fields = request.head.fields
        verdict = _VERDICTS.get(fields.commit_or_rollback)
        if verdict is None:
            raise RequestRefused(
                ResponseCode.SYSTEM_ERROR,
                f"commitOrRollback {fields.commit_or_rollback} is not 0, 8 or 12",
            )
        try:
            half = self.escrow.find(fields.tran_state_table_offset, fields.commit_log_offset)
            if half is not None and fields.from_transaction_check:
                unknown = verdict is Verdict.UNKNOWN
                self.checks.answered(half, line, unknown=unknown, now_ms=now_ms)
            if verdict is Verdict.UNKNOWN:
                self._answer_state(line, request, half)
            elif half is not None and half.is_deciding:
                # Somebody is faster by less than a turn: what he decided is the answer.
                self._turn.put([], lambda code, _: self._end_after(line, request, now_ms))
            else:
                self._decide(line, request, verdict, now_ms)
        except NoSuchTransaction as error:
            raise RequestRefused(ResponseCode.SYSTEM_ERROR, str(error)) from error

    def _end_after(self, line: Line, request: Request[EndTransaction], now_ms: int) -> None:
        try:
            self.end(line, request, now_ms)
        except RequestRefused as error:
            line.write(answer(request, code=error.code, remark=error.remark))

    def _decide(
        self, line: Line, request: Request[EndTransaction], verdict: Verdict, now_ms: int
    ) -> None:
        fields = request.head.fields
        try:
            change = self.escrow.end(
                fields.tran_state_table_offset,
                fields.commit_log_offset,
                fields.producer_group,
                verdict,
                by=f"{'check' if fields.from_transaction_check else 'producer'} {line.peer}",
                now_ms=now_ms,
            )
        except TransactionContradicted as error:
            log.warning("contradiction peer=%s: %s", line.peer, error)
            raise RequestRefused(ResponseCode.TRANSACTION_CONTRADICTED, str(error)) from error
        except (CorruptRecord, NoSuchRecord) as error:
            raise RequestRefused(ResponseCode.SYSTEM_ERROR, str(error)) from error
        if isinstance(change, Recorded):
            self._turn.put([], lambda code, _: self._answer_recorded(line, request, change, code))
            return
        self.append(
            change,
            lambda code, places: self._answer_decided(line, request, change, code, places),
            now_ms=now_ms,
        )

    def append(
        self,
        change: Change,
        done: Callable[[int, Sequence[Placed]], None] | None = None,
        *,
        now_ms: int = 0,
    ) -> None:
        """The records of a change go with this turn; then it is so, or it is as it was."""
        records = self.rerouted(change, now_ms)

        def stored(places: Sequence[Placed]) -> None:
            self.escrow.settled_as(change, places[-1].queue_offset)

        def answered(code: int, places: Sequence[Placed]) -> None:
            if not places:
                self.escrow.reopen(change)
            if done is not None:
                done(code, places)

        self._turn.put(records, answered, stored=stored)

    def rerouted(self, change: Change, now_ms: int) -> list[NewRecord]:
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
        fields = request.head.fields
        state = self.escrow.settled.state(fields.tran_state_table_offset)
        if half is None and state is None:
            raise NoSuchTransaction(f"no half was parked at {fields.tran_state_table_offset}")
        text = State.OPEN.text if state is None else state.text
        line.write(answer(request, EndTransactionAnswer(state=text)))

    def _fields(self, half: Half, state: State, final: Placed | None) -> EndTransactionAnswer:
        host = self._answers.store_host
        return EndTransactionAnswer(
            state=state.text,
            transaction_id=_text(half.key),
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
        """Halves that are open are in the log from here on."""
        half = self.escrow.open.first()
        return None if half is None else LogOffset(half.log_offset)

    def make_way(self, log_offset: int, now_ms: int) -> None:
        """The log below has to go: what is open there is appended again, a slice at a time."""
        for half in self.escrow.needed_below(log_offset)[:RENEWED_MAX]:
            if not half.is_deciding and not half.why.startswith("unreadable"):
                self.renew(half, now_ms)

    def renew(self, half: Half, now_ms: int, done: Callable[[int], None] | None = None) -> None:
        record = self.escrow.read(half)
        if record is None:
            return
        records = self.escrow.renew(half, record, now_ms=now_ms)

        def stored(places: Sequence[Placed]) -> None:
            copy, op = places
            self.escrow.renewed(
                half, copy.queue_offset, copy.log_offset, op.queue_offset, now_ms=now_ms
            )

        def answered(code: int, places: Sequence[Placed]) -> None:
            if not places:
                half.is_deciding = False
            if done is not None:
                done(code)

        self._turn.put(records, answered, stored=stored)

    def line_closed(self, line: Line) -> None:
        self.checks.line_closed(line)


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("utf-8", "replace")


def _attempt(half: NewRecord) -> Attempt | None:
    if b"ESCROW_WRITER\x01" not in half.properties:
        return None
    return attempt_of(decode_properties(half.properties))
