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

from escrowmq.broker.dispatch import Channel, ErrorCodes, Handler, RequestPermissions, respond_error
from escrowmq.broker.statistics import BrokerCounters
from escrowmq.broker.transactions.check import TransactionChecker
from escrowmq.broker.transactions.park import HalfProcessor
from escrowmq.broker.transactions.persistence import CoordinatorStorage, Redirect, redirect_finals
from escrowmq.broker.turn import DoneCallback, Turn
from escrowmq.consume.members import ProducerGroups
from escrowmq.consume.offsets import ConsumerOffsets
from escrowmq.errors import EscrowError, RequestRefused, TransactionConflict, TransactionNotFound
from escrowmq.escrow.checks import CoordinatorRules
from escrowmq.escrow.coordinator import AlreadyDecided, Decision, TransactionCoordinator
from escrowmq.escrow.half_table import CachedFinal, Half
from escrowmq.escrow.records import BY_PRODUCER
from escrowmq.escrow.writers import Writer, make_decision_record
from escrowmq.message.batch import Appendable
from escrowmq.message.keys import encode_offset_id
from escrowmq.message.record import TRANSACTION_COMMIT, LogOffset, NewRecord
from escrowmq.message.transaction import COMMIT, STATE_BY_VERDICT, TransactionState, Verdict
from escrowmq.remoting.codes import FLAG_ONEWAY, RequestCode, ResponseCode
from escrowmq.remoting.headers import EndTransaction, EndTransactionResponse
from escrowmq.remoting.requests import Request
from escrowmq.store.commit_log import AppendResult
from escrowmq.store.disk import Disk
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)

_VERDICTS = {verdict.value: verdict for verdict in Verdict}
MOVED_PER_CALL_MAX: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionRules:
    coordinator: CoordinatorRules = field(default_factory=CoordinatorRules)
    rejects_transactions: bool = False  # rejectTransactionMessage


# RocketMQ responds with SYSTEM_ERROR to the end of a half that it cannot find.
END_ERRORS: Final[ErrorCodes] = {TransactionNotFound: ResponseCode.SYSTEM_ERROR}


class EndProcessor:
    def __init__(
        self,
        store: MessageStore,
        disk: Disk,
        turn: Turn,
        offsets: ConsumerOffsets,
        producers: ProducerGroups[Channel],
        rules: TransactionRules,
        counters: BrokerCounters,
        *,
        store_host: bytes,
        redirect: Redirect = lambda record, now_ms: record,
    ) -> None:
        self._store = store
        self._turn = turn
        self.store_host = store_host
        self._redirect = redirect
        self._moved_log_end = LogOffset(0)  # of the log, when a half was last appended again
        self.storage = CoordinatorStorage(store, disk, offsets, rules.coordinator, redirect)
        escrow = self.storage.coordinator
        self.coordinator = escrow
        self.half_processor = HalfProcessor(
            turn,
            escrow,
            counters,
            rejects_transactions=rules.rejects_transactions,
        )
        self.checker = TransactionChecker(
            escrow, turn, producers, self.append_decision, store_host=store_host
        )

    def change_rules(self, rules: TransactionRules) -> None:
        """A half that is due already stays due then; limits count from now on."""
        self.coordinator.rules = rules.coordinator
        self.half_processor.rejects_transactions = rules.rejects_transactions

    def handlers(self) -> list[Handler]:
        return [
            Handler(RequestCode.END_TRANSACTION, self.end, RequestPermissions.end, END_ERRORS),
        ]

    # --- ending ----------------------------------------------------------------------------------

    def end(self, channel: Channel, request: Request[EndTransaction], now_ms: int) -> None:
        fields = request.head.fields
        verdict = _VERDICTS.get(fields.commit_or_rollback)
        half = self.coordinator.halves.find(fields.tran_state_table_offset)
        if (
            half is None
            or half.log_offset != fields.commit_log_offset
            or half.group != fields.producer_group
            or half.is_being_decided
            or fields.from_transaction_check
            or not verdict
        ):
            self._end_validated(channel, request, verdict, now_ms)
            return
        fresh = self.half_processor.final_cache.take(half.queue_offset)
        final = None
        if fresh is not None and verdict is COMMIT and not half.previous_offsets:
            final = _make_final(half, fresh)
        self._decide(channel, request, half, verdict, now_ms, final)

    def _end_validated(
        self,
        channel: Channel,
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
        half = self.coordinator.find_open(fields.tran_state_table_offset, fields.commit_log_offset)
        if half is not None and half.group != fields.producer_group:
            raise TransactionNotFound(
                f"the half at {fields.tran_state_table_offset} is of producer group "
                f"{half.group}, not {fields.producer_group}"
            )
        if half is not None and fields.from_transaction_check:
            unknown = verdict is Verdict.UNKNOWN
            self.checker.check_answered(half, channel, is_unknown=unknown, now_ms=now_ms)
        if verdict is Verdict.UNKNOWN:
            self._respond_state(channel, request, half)
        elif half is None:
            self._repeat_decision(channel, request, verdict)
        elif half.is_being_decided:
            # Somebody is faster by less than a turn: what he decided is the answer.
            self._turn.add_records(
                [], lambda code, _: self._end_after_turn(channel, request, now_ms)
            )
        else:
            self._decide(channel, request, half, verdict, now_ms)

    def _end_after_turn(
        self, channel: Channel, request: Request[EndTransaction], now_ms: int
    ) -> None:
        try:
            self.end(channel, request, now_ms)
        except EscrowError as error:
            respond_error(channel, request, error, END_ERRORS)

    def _repeat_decision(
        self, channel: Channel, request: Request[EndTransaction], verdict: Verdict
    ) -> None:
        """It is not open: the recorded outcome again, or a refusal."""
        fields = request.head.fields
        queue_offset, log_offset = fields.tran_state_table_offset, fields.commit_log_offset
        try:
            recorded = self.coordinator.find_decision(
                queue_offset, log_offset, STATE_BY_VERDICT[verdict]
            )
        except TransactionConflict as error:
            log.warning("contradiction peer=%s: %s", channel.address, error)
            raise
        self._turn.add_records(
            [], lambda code, _: self._respond_already_decided(channel, request, recorded, code)
        )

    def _decide(
        self,
        channel: Channel,
        request: Request[EndTransaction],
        half: Half,
        verdict: Verdict,
        now_ms: int,
        final: NewRecord | None = None,
    ) -> None:
        by = "check" if request.head.fields.from_transaction_check else BY_PRODUCER
        change = self.coordinator.make_decision(
            half,
            STATE_BY_VERDICT[verdict],
            by=by,
            born_host=channel.peer_host,
            now_ms=now_ms,
            final=final,
        )
        done = None
        if not request.head.flag & FLAG_ONEWAY:
            done = partial(self._respond_decided, channel, request, change)
        if final is None:
            self.append_decision(change, done, now_ms=now_ms)
        else:  # nothing in its properties asks for another place than its own
            settling = _PendingDecision(self.coordinator, change, done, now_ms, len(change.records))
            self._turn.add(settling, change.records)

    def append_decision(
        self,
        decision: Decision,
        on_done: DoneCallback | None = None,
        *,
        now_ms: int,
    ) -> None:
        """The records of a change go with this turn; then it is so, or it is as it was."""
        records = redirect_finals(decision, self._redirect, now_ms)
        settling = _PendingDecision(self.coordinator, decision, on_done, now_ms, len(records))
        self._turn.add(settling, records)

    def redirect_finals(self, decision: Decision, now_ms: int) -> list[Appendable]:
        return redirect_finals(decision, self._redirect, now_ms)

    def _respond_decided(
        self,
        channel: Channel,
        request: Request[EndTransaction],
        decision: Decision,
        code: int,
        results: Sequence[AppendResult],
    ) -> None:
        if not results or code != ResponseCode.SUCCESS:
            channel.respond(request, code=code, remark="the decision was not stored")
            return
        half, final = decision.half, None
        if decision.state is TransactionState.COMMITTED:
            final = results[0]
        channel.respond(request, self._make_response(half, decision.state, final))

    def _respond_already_decided(
        self,
        channel: Channel,
        request: Request[EndTransaction],
        already_decided: AlreadyDecided,
        code: int,
    ) -> None:
        if code != ResponseCode.SUCCESS:
            channel.respond(request, code=code, remark="the decision is not durable yet")
            return
        channel.respond(request, EndTransactionResponse(state=already_decided.state.text))

    def _respond_state(
        self, channel: Channel, request: Request[EndTransaction], half: Half | None
    ) -> None:
        queue_offset = request.head.fields.tran_state_table_offset
        state = self.coordinator.states.get(queue_offset)
        if half is not None:
            state = TransactionState.STRANDED if half.is_stranded else TransactionState.OPEN
        if state is None:
            raise TransactionNotFound(f"no half was parked at {queue_offset}")
        recorded = AlreadyDecided(queue_offset, request.head.fields.commit_log_offset, state)
        self._turn.add_records(
            [], lambda code, _: self._respond_already_decided(channel, request, recorded, code)
        )

    def _make_response(
        self, half: Half, state: TransactionState, final: AppendResult | None
    ) -> EndTransactionResponse:
        host = self.store_host
        return EndTransactionResponse(
            state=state.text,
            transaction_id=half.key.decode("utf-8", "replace"),
            topic=half.topic,
            queue_id=half.queue_id,
            queue_offset=None if final is None else final.queue_offset,
            msg_id=None if final is None else encode_offset_id(host, final.log_offset),
        )

    # --- now and then ----------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        self.checker.tick(now_ms)
        self.storage.commit_cursors()

    def save(self, *, force: bool = False) -> None:
        self.storage.save(force=force)

    def oldest_needed_offset(self) -> LogOffset | None:
        """Halves that are open, and the last word of each writer, are in the log from here on."""
        if (
            self.coordinator.unfinished_decisions
        ):  # something is out of sight: it must not go before it is seen
            return self._store.begin
        if (
            self._store.flushed_offset < self._moved_log_end
        ):  # what was moved is not safe where it is now
            return self._store.begin
        needed = [writer.log_offset for writer in self.coordinator.writers if not writer.is_last]
        half = self.coordinator.halves.oldest()
        if half is not None:
            needed.append(half.log_offset)
        return LogOffset(min(needed)) if needed else None

    def move_halves_below(self, log_offset: int, now_ms: int) -> None:
        """The log below has to go: what is open there is appended again, a slice at a time."""
        for half in self.coordinator.open_halves_below(log_offset)[:MOVED_PER_CALL_MAX]:
            if not half.is_being_decided:
                self.move_half(half, now_ms, is_resume=False)
            if half.is_unreadable and not half.is_being_decided:
                self._roll_back_unreadable(half, now_ms)
        for writer in self.coordinator.writers:
            if writer.log_offset < log_offset and not writer.is_last:
                self._move_writer(writer, now_ms)

    def _roll_back_unreadable(self, half: Half, now_ms: int) -> None:
        """Its message is lost already. To keep the log for it would lose the disk too."""
        log.error("half given up queue_offset=%d: %s", half.queue_offset, half.reason)
        change = self.coordinator.make_decision(
            half, TransactionState.ROLLED_BACK, by="broker", reason=half.reason, now_ms=now_ms
        )
        self.append_decision(change, now_ms=now_ms)

    def _move_writer(self, writer: Writer, now_ms: int) -> None:
        writers = self.coordinator.writers
        decision = writers.make_copy(writer)
        if decision is not None:

            def stored(places: Sequence[AppendResult]) -> None:
                writers.apply(decision, places[0].log_offset)
                self._moved_log_end = self._store.end

            self._turn.add_records(
                [make_decision_record(decision, now_ms=now_ms)], on_stored=stored
            )

    def move_half(
        self,
        half: Half,
        now_ms: int,
        on_done: Callable[[int], None] | None = None,
        *,
        is_resume: bool = True,
    ) -> None:
        record = self.coordinator.read_half(half)
        if record is None:
            return
        past, records = self.coordinator.move(half, record, is_resume=is_resume, now_ms=now_ms)

        def stored(places: Sequence[AppendResult]) -> None:
            copy, op = places
            self.coordinator.moved(half, past, copy.queue_offset, copy.log_offset, op.queue_offset)
            self._moved_log_end = self._store.end

        def answered(code: int, places: Sequence[AppendResult]) -> None:
            if not places:
                half.is_being_decided = False
            if on_done is not None:
                on_done(code)

        self._turn.add_records(records, answered, on_stored=stored)

    def channel_closed(self, channel: Channel) -> None:
        self.checker.channel_closed(channel)


def _make_final(half: Half, cached_final: CachedFinal) -> NewRecord:
    return NewRecord(
        half.topic,
        half.queue_id,
        cached_final.body,
        cached_final.properties,
        cached_final.flag,
        cached_final.sys_flag | TRANSACTION_COMMIT,
        cached_final.born_ms,
        cached_final.born_host,
        cached_final.reconsume_times,
        half.log_offset,
        cached_final.tags_and_keys,
    )


class _PendingDecision(msgspec.Struct, gc=False):
    """A change on its way into the log: afterwards it is so, or it is as it was."""

    coordinator: TransactionCoordinator
    decision: Decision
    done_callback: DoneCallback | None
    now_ms: int
    count: int
    waits_for_flush: bool = True
    first_index: int = 0

    def on_stored(self, results: Sequence[AppendResult]) -> None:
        op = results[self.first_index + self.count - 1]
        self.coordinator.apply(self.decision, op.queue_offset, now_ms=self.now_ms)

    def on_done(self, code: int, results: Sequence[AppendResult]) -> None:
        if not results:
            self.coordinator.cancel(self.decision)
        if self.done_callback is not None:
            self.done_callback(code, results[self.first_index : self.first_index + self.count])
