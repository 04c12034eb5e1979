"""END_TRANSACTION and everything else that decides one half or moves it.

The protocol is in `escrow/coordinator.py`. Here requests become calls of it, and the records it
returns go to the turn:

    decide  ─▶ Decision ─▶ Turn.add(PendingDecision) ─┬▶ stored: coordinator.apply, respond
                                                      └▶ not stored: coordinator.cancel, refuse
            ─▶ AlreadyDecided: respond when the turn is durable
            ─▶ InProgress: decide again after the turn

`EndProcessor` also puts the parts of the transaction service together and owns what happens now
and then: checks, snapshots, and moving halves out of segments that expire.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from escrowmq.broker.dispatch import Channel, ErrorCodes, Handler, RequestPermissions, respond_error
from escrowmq.broker.statistics import BrokerCounters
from escrowmq.broker.transactions.check import TransactionChecker
from escrowmq.broker.transactions.park import HalfProcessor
from escrowmq.broker.transactions.persistence import CoordinatorStorage
from escrowmq.broker.turn import DoneCallback, Turn
from escrowmq.config import TransactionConfig
from escrowmq.consume.members import ProducerGroups
from escrowmq.consume.offsets import ConsumerOffsets
from escrowmq.errors import EscrowError, RequestRefused, TransactionConflict, TransactionNotFound
from escrowmq.escrow.coordinator import TransactionCoordinator
from escrowmq.escrow.decisions import AlreadyDecided, Decision
from escrowmq.escrow.half_table import Half, HalfTable
from escrowmq.escrow.records import BY_PRODUCER, DecidedBy, Redirect, short_remark
from escrowmq.escrow.snapshot import TimeConversion
from escrowmq.escrow.writers import Writer, make_decision_record
from escrowmq.limited_log import LimitedLog
from escrowmq.message.keys import encode_offset_id
from escrowmq.message.record import LogOffset
from escrowmq.message.transaction import TransactionState, Verdict
from escrowmq.remoting.codes import FLAG_ONEWAY, RequestCode, ResponseCode
from escrowmq.remoting.headers import EndTransaction, EndTransactionResponse
from escrowmq.remoting.requests import Request
from escrowmq.store.commit_log import AppendResult
from escrowmq.store.disk import Disk
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)

_VERDICTS = {verdict.value: verdict for verdict in Verdict}
MOVED_PER_CALL_MAX: Final = 1_000


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
        config: TransactionConfig,
        counters: BrokerCounters,
        *,
        store_host: bytes,
        broker_name: str | None = None,
        age_max_ms: int,
        piece_bytes: int,
        redirect: Redirect | None = None,
        times: TimeConversion | None = None,
        halves: HalfTable | None = None,
    ) -> None:
        self._store = store
        self._turn = turn
        self._counters = counters
        self.store_host = store_host
        self._limited_log = LimitedLog(log)
        self._moved_log_end = LogOffset(0)  # the end of the log after the last move
        self.storage = CoordinatorStorage(
            store,
            disk,
            offsets,
            config,
            redirect,
            age_max_ms=age_max_ms,
            piece_bytes=piece_bytes,
            times=times,
            halves=halves,
        )
        self.coordinator = self.storage.coordinator
        self.half_processor = HalfProcessor(
            turn,
            self.coordinator,
            counters,
            segment_bytes=store.config.segment_bytes,
            rejects_transactions=config.refuses_halves,
        )
        self.checker = TransactionChecker(
            self.coordinator,
            turn,
            producers,
            self.append_decision,
            lambda: (
                sum(counters.requests.values()) - counters.requests[RequestCode.END_TRANSACTION]
            ),
            store_host=store_host,
            broker_name=broker_name,
        )

    def change_config(self, config: TransactionConfig, age_max_ms: int) -> None:
        """Apply new settings. Due times that are set already do not change."""
        self.coordinator.config = config
        self.coordinator.age_max_ms = age_max_ms
        self.half_processor.rejects_transactions = config.refuses_halves

    def handlers(self) -> list[Handler]:
        return [
            Handler(RequestCode.END_TRANSACTION, self.end, RequestPermissions.end, END_ERRORS),
        ]

    # --- END_TRANSACTION -------------------------------------------------------------------------

    def end(self, channel: Channel, request: Request[EndTransaction], now_ms: int) -> None:
        """Decide the half that the request names."""
        fields = request.head.fields
        verdict = _VERDICTS.get(fields.commit_or_rollback)
        by = BY_PRODUCER
        if fields.from_transaction_check or not verdict:  # UNKNOWN is 0
            if verdict is None:
                raise RequestRefused(
                    ResponseCode.SYSTEM_ERROR,
                    f"commitOrRollback is {fields.commit_or_rollback}, not 0, 8 or 12",
                )
            self._receive_answer(channel, request, verdict, now_ms)
            if verdict is Verdict.UNKNOWN:
                return
            if fields.from_transaction_check:
                by = DecidedBy.CHECK
        # Commits, which are most of the ends, have none worth keeping.
        remark = "" if verdict is Verdict.COMMIT else request.head.remark
        try:
            result = self.coordinator.decide(
                fields.tran_state_table_offset,
                fields.commit_log_offset,
                verdict,
                group=fields.producer_group,
                by=by,
                reason=remark,
                born_host=channel.peer_host,
                now_ms=now_ms,
            )
        except TransactionConflict as error:
            log.warning("decision contradicted peer=%s: %s", channel.address, error)
            raise
        if type(result) is Decision:
            if remark:
                self._log_rollback(channel, result.half, remark, now_ms)
            on_done = None
            if not request.head.flag & FLAG_ONEWAY:
                on_done = partial(self._respond_decided, channel, request, result)
            self.append_decision(result, on_done, now_ms=now_ms)
        elif isinstance(result, AlreadyDecided):
            self._respond_when_durable(channel, request, result.state)
        else:
            # Another request of this turn decides the half: its outcome is the response.
            self._turn.add_records(
                [], lambda code, _: self._end_after_turn(channel, request, now_ms)
            )

    def _receive_answer(
        self, channel: Channel, request: Request[EndTransaction], verdict: Verdict, now_ms: int
    ) -> None:
        """Note the answer to a check. If it is UNKNOWN, respond with the state of the half."""
        fields = request.head.fields
        queue_offset = fields.tran_state_table_offset
        half = self.coordinator.find_open(
            queue_offset, fields.commit_log_offset, fields.producer_group
        )
        is_unknown = verdict is Verdict.UNKNOWN
        remark = short_remark(request.head.remark)
        if half is not None and fields.from_transaction_check:
            self.checker.check_answered(
                half, channel, is_unknown=is_unknown, remark=remark, now_ms=now_ms
            )
        if not is_unknown:
            return
        if half is not None and not fields.from_transaction_check:
            self.checker.undecided_at_send(half, channel, remark, now_ms)
        if half is None:
            state = self.coordinator.decided_state(
                queue_offset, fields.commit_log_offset, fields.producer_group
            )
        else:
            state = TransactionState.STRANDED if half.is_stranded else TransactionState.OPEN
        self._respond_when_durable(channel, request, state)

    def _log_rollback(self, channel: Channel, half: Half, remark: str, now_ms: int) -> None:
        self._limited_log.warning(
            now_ms,
            "transaction rolled back by its producer id=%s group=%s peer=%s: %s",
            half.key.decode("utf-8", "replace"),
            half.group,
            channel.address,
            short_remark(remark),
        )

    def _end_after_turn(
        self, channel: Channel, request: Request[EndTransaction], now_ms: int
    ) -> None:
        try:
            self.end(channel, request, now_ms)
        except EscrowError as error:
            code = respond_error(channel, request, error, END_ERRORS)
            self._counters.refused[request.head.code, code] += 1

    def append_decision(
        self, decision: Decision, on_done: DoneCallback | None = None, *, now_ms: int
    ) -> None:
        """Add the records of a decision to this turn, and apply or cancel it afterwards."""
        records = decision.records
        self._turn.add(
            PendingDecision(self.coordinator, decision, on_done, now_ms, len(records)), records
        )

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
        header = EndTransactionResponse(
            state=decision.state.text,
            transaction_id=half.key.decode("utf-8", "replace"),
            topic=half.topic,
            queue_id=half.queue_id,
            queue_offset=None if final is None else final.queue_offset,
            msg_id=None if final is None else encode_offset_id(self.store_host, final.log_offset),
        )
        channel.respond(request, header)

    def _respond_when_durable(
        self, channel: Channel, request: Request[EndTransaction], state: TransactionState
    ) -> None:
        """Respond with a state that is in the log, but perhaps not flushed yet."""

        def on_done(code: int, _: Sequence[AppendResult]) -> None:
            if code == ResponseCode.SUCCESS:
                channel.respond(request, EndTransactionResponse(state=state.text))
            else:
                channel.respond(request, code=code, remark="the decision is not durable yet")

        self._turn.add_records([], on_done)

    # --- now and then ----------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        self.checker.tick(now_ms)
        self.storage.tick(now_ms)

    def save(self, *, force: bool = False) -> None:
        self.storage.save(force=force)

    def channel_closed(self, channel: Channel) -> None:
        self.checker.channel_closed(channel)

    # --- segments that expire --------------------------------------------------------------------

    def oldest_needed_offset(self) -> LogOffset | None:
        """Return the log offset below which no undecided half and no writer is stored.

        None: nothing is needed. The start of the log: nothing may be deleted now.
        """
        if self.coordinator.unfinished_decisions:
            return self._store.begin  # hidden messages must not expire before they are visible
        if self._store.flushed_offset < self._moved_log_end:
            return self._store.begin  # the copies of moved halves are not durable yet
        needed = [writer.log_offset for writer in self.coordinator.writers if not writer.is_last]
        half = self.coordinator.halves.oldest()
        if half is not None:
            needed.append(half.log_offset)
        return LogOffset(min(needed)) if needed else None

    def move_halves_below(self, log_offset: int, now_ms: int) -> None:
        """Append undecided halves below `log_offset` again, up to 1,000 per call, and writers.

        An unreadable half is rolled back: its message is lost already, and keeping the log for it
        would fill the disk.
        """
        for half in self.coordinator.undecided_below(log_offset, MOVED_PER_CALL_MAX):
            if not half.is_being_decided:
                self.move_half(half, now_ms, is_resume=False)
            if half.is_unreadable and not half.is_being_decided:
                self._roll_back_unreadable(half, now_ms)
        for writer in self.coordinator.writers:
            if writer.log_offset < log_offset and not writer.is_last:
                self._move_writer(writer, now_ms)

    def move_half(
        self,
        half: Half,
        now_ms: int,
        on_done: Callable[[int], None] | None = None,
        *,
        is_resume: bool = True,
    ) -> None:
        """Append a half again. `on_done` is called with the response code.

        Does nothing, and does not call `on_done`, if the half cannot be read.
        """
        record = self.coordinator.read_half(half)
        if record is None:
            return
        check_state, records = self.coordinator.move(
            half, record, is_resume=is_resume, now_ms=now_ms
        )

        def on_stored(results: Sequence[AppendResult]) -> None:
            copy, op = results
            self.coordinator.moved(half, check_state, copy, op)
            self._moved_log_end = self._store.end

        def on_appended(code: int, results: Sequence[AppendResult]) -> None:
            if not results:
                self.coordinator.move_failed(half)
            if on_done is not None:
                on_done(code)

        self._turn.add_records(records, on_appended, on_stored=on_stored)

    def _roll_back_unreadable(self, half: Half, now_ms: int) -> None:
        log.error(
            "unreadable half message rolled back queue_offset=%d: %s",
            half.queue_offset,
            half.reason,
        )
        decision = self.coordinator.decide(
            half.queue_offset,
            half.log_offset,
            Verdict.ROLLBACK,
            group=None,
            by=DecidedBy.BROKER,
            reason=half.reason,
            now_ms=now_ms,
        )
        assert isinstance(decision, Decision), "the half is open"
        self.append_decision(decision, now_ms=now_ms)

    def _move_writer(self, writer: Writer, now_ms: int) -> None:
        writers = self.coordinator.writers
        record = writers.make_copy(writer)
        if record is not None:

            def on_stored(results: Sequence[AppendResult]) -> None:
                writers.apply(record, results[0].log_offset)
                self._moved_log_end = self._store.end

            self._turn.add_records(
                [make_decision_record(record, now_ms=now_ms)], on_stored=on_stored
            )


class PendingDecision(msgspec.Struct, gc=False):
    """A decision whose records are in the turn's batch. A `PendingAppend`."""

    coordinator: TransactionCoordinator
    decision: Decision
    done_callback: DoneCallback | None
    now_ms: int
    count: int
    waits_for_flush: bool = True
    first_index: int = 0

    def on_stored(self, results: Sequence[AppendResult]) -> None:
        self.coordinator.apply(self.decision, results, self.first_index, now_ms=self.now_ms)

    def on_done(self, code: int, results: Sequence[AppendResult]) -> None:
        if not results:
            self.coordinator.cancel(self.decision)
        if self.done_callback is not None:
            self.done_callback(code, results[self.first_index : self.first_index + self.count])
