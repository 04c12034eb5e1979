"""END_TRANSACTIONS, DECIDE_BATCH, REGISTER_WRITER: one request that decides many halves.

The decision record and its consequences (finals and ops) go to the log in one append. If that is
more than a megabyte they go in pieces, one per turn, so that other requests are served in between:

    turn 1    [decision record, finals, ops]    from here on everything is decided
    turn 2    [finals, ops]
    turn n    [finals, ops]                     the response; all messages become visible

The messages of the first pieces are hidden from consumers until the last piece is stored, so that
consumers see all of them or none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from escrowmq.broker.dispatch import (
    FRAME_BODY_BYTES_MAX,
    Channel,
    Handler,
    HandlerFunction,
    RequestPermissions,
    respond_failure,
)
from escrowmq.broker.transactions.end import END_ERRORS, EndProcessor
from escrowmq.broker.turn import Turn
from escrowmq.errors import EscrowError, RequestRefused
from escrowmq.escrow.coordinator import DECISION_HALVES_MAX
from escrowmq.escrow.decisions import AlreadyDecided, DecisionPiece, GroupDecision, InProgress
from escrowmq.escrow.records import DecidedBy, short_remark
from escrowmq.escrow.writers import DecisionRecord, Winner, Writer
from escrowmq.message import names
from escrowmq.message.batch import Appendable
from escrowmq.message.record import NewRecord
from escrowmq.message.transaction import STATE_BY_VERDICT, Verdict
from escrowmq.remoting.bodies import (
    BatchWinners,
    WinningAttempt,
    WriterState,
    decode_half_positions,
    decode_request_body,
    encode_body,
)
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import (
    DecideBatch,
    EndTransactions,
    EndTransactionsResponse,
    NoFields,
    RegisterWriter,
    WriterHeader,
)
from escrowmq.remoting.requests import Request, request_for_response
from escrowmq.sliced_work import SlicedWork, SliceScheduler
from escrowmq.store.commit_log import AppendResult
from escrowmq.store.store import MessageStore

_VERDICTS = {verdict.value: verdict for verdict in (Verdict.COMMIT, Verdict.ROLLBACK)}
PIECES_PER_TURN_MAX: Final = 2
CodeCallback = Callable[[int], None]
GroupResult = GroupDecision | AlreadyDecided | InProgress


class GroupDecisions:
    def __init__(
        self,
        store: MessageStore,
        turn: Turn,
        transactions: EndProcessor,
        messages_arrived: Callable[[Sequence[Appendable]], None],
        background_work: SliceScheduler,
    ) -> None:
        self.coordinator = transactions.coordinator
        self._store = store
        self._turn = turn
        self._messages_arrived = messages_arrived
        self._background_work = background_work
        self._unfinished: deque[_UnfinishedDecision] = deque()
        self._is_blocked = False  # a piece could not be stored; `tick` allows another attempt

    def handlers(self) -> list[Handler]:
        code, writer = RequestCode, RequestPermissions.writer
        return [
            Handler(
                code.END_TRANSACTIONS,
                self.end_transactions,
                RequestPermissions.end_many,
                END_ERRORS,
                has_many_permissions=True,
                body_bytes_max=FRAME_BODY_BYTES_MAX,
            ),
            Handler(code.REGISTER_WRITER, self.register_writer, writer, END_ERRORS),
            Handler(
                code.DECIDE_BATCH,
                self.decide_batch,
                writer,
                END_ERRORS,
                body_bytes_max=FRAME_BODY_BYTES_MAX,
            ),
            Handler(code.QUERY_WRITER, self.query_writer, writer),
        ]

    # --- requests --------------------------------------------------------------------------------

    def end_transactions(
        self, channel: Channel, request: Request[EndTransactions], now_ms: int
    ) -> SlicedWork:
        fields = request.head.fields
        verdict = _VERDICTS.get(fields.commit_or_rollback)
        positions = decode_half_positions(request.body)
        if verdict is None or not positions or len(positions) > DECISION_HALVES_MAX:
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER,
                f"commitOrRollback must be 8 or 12 and the body must name 1 to "
                f"{DECISION_HALVES_MAX} half messages",
            )
        result = yield from self.coordinator.decide_many(
            positions,
            verdict,
            group=fields.producer_group,
            by=DecidedBy.GROUP,
            by_name=channel.address,
            reason=short_remark(request.head.remark) if verdict is Verdict.ROLLBACK else "",
            now_ms=now_ms,
        )
        header = EndTransactionsResponse(
            state=STATE_BY_VERDICT[verdict].text,
            count=result.half_count if isinstance(result, GroupDecision) else 0,
        )

        def on_done(code: int) -> None:
            if code == ResponseCode.SUCCESS:
                channel.respond(request, header)
            else:
                channel.respond(request, code=code, remark="the decision was not stored")

        if isinstance(result, InProgress):
            self._retry_after_turn(self.end_transactions, channel, request, now_ms)
        else:
            self._append(result, on_done, now_ms)

    def register_writer(
        self, channel: Channel, request: Request[RegisterWriter], now_ms: int
    ) -> None:
        """Give a writer a new fence. A process with an older fence can decide nothing any more."""
        fields = request.head.fields
        name, run = _check_writer_name(fields.writer), fields.run
        if run:
            _check_writer_name(run)
        result = self.coordinator.register_writer(name, run, fields.fence, now_ms=now_ms)
        self._append_and_respond(name, result, self.register_writer, channel, request, now_ms)

    def decide_batch(
        self, channel: Channel, request: Request[DecideBatch], now_ms: int
    ) -> SlicedWork:
        fields, body = request.head.fields, decode_request_body(BatchWinners, request.body)
        name = _check_writer_name(fields.writer)
        if fields.batch < 0:
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER, f"batch is {fields.batch}; batches count from 0"
            )
        winners = [Winner(winner.attempt, winner.count) for winner in body.winners]
        result = yield from self.coordinator.decide_batch(
            name,
            fields.batch,
            fields.fence,
            winners,
            body.fingerprint,
            is_last=fields.last,
            now_ms=now_ms,
        )
        self._append_and_respond(name, result, self.decide_batch, channel, request, now_ms)

    def query_writer(self, channel: Channel, request: Request[WriterHeader], now_ms: int) -> None:
        name = request.head.fields.writer
        state = WriterState(writer=name)
        request_to_keep = request_for_response(request, NoFields())

        # A client acts on the decision that it reads, so the response must be durable. Read the
        # state when this turn is stored, not when it is flushed: by then another turn, which is
        # not flushed yet, may have changed it.
        def on_stored(_: Sequence[AppendResult]) -> None:
            nonlocal state
            state = _writer_state(name, self.coordinator.writers.find(name))

        self._turn.add_records(
            [],
            lambda code, _: _respond_writer(channel, request_to_keep, code, state),
            on_stored=on_stored,
        )

    def _append_and_respond(
        self,
        name: str,
        result: GroupResult,
        handler: HandlerFunction,
        channel: Channel,
        request: Request[Any],
        now_ms: int,
    ) -> None:
        if isinstance(result, InProgress):
            self._retry_after_turn(handler, channel, request, now_ms)
            return
        request = request_for_response(request, NoFields())
        # Respond with the state that this request has caused. A later request may have changed it
        # again before this one is durable.
        writer: Writer | DecisionRecord | None
        if isinstance(result, GroupDecision):
            writer = result.record
        else:
            writer = self.coordinator.writers.find(name)
        state = _writer_state(name, writer)
        self._append(result, lambda code: _respond_writer(channel, request, code, state), now_ms)

    def _retry_after_turn(
        self,
        handler: HandlerFunction,
        channel: Channel,
        request: Request[Any],
        now_ms: int,
    ) -> None:
        """Handle a request again, because another one is deciding a half or using a queue of it."""

        def work() -> SlicedWork:
            try:
                remaining = handler(channel, request, now_ms)
                if remaining is not None:
                    yield from remaining
            except EscrowError as error:
                respond_failure(channel, request, error, END_ERRORS)

        self._turn.add_records([], lambda code, _: self._background_work.add(work()))

    # --- pieces ----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Try pieces again that could not be stored: there may be disk space now."""
        self._is_blocked = False

    @property
    def is_blocked(self) -> bool:
        """Whether pieces wait for the next tick, because they could not be stored."""
        return self._is_blocked and bool(self._unfinished)

    @property
    def has_pending_pieces(self) -> bool:
        """Whether another turn would store a piece."""
        return bool(self._unfinished) and not self._is_blocked

    def end_turn(self, now_ms: int) -> None:
        """Add the next piece of some unfinished decisions to the turn, in turn."""
        count = len(self._unfinished) if self.has_pending_pieces else 0
        for _ in range(min(count, PIECES_PER_TURN_MAX)):
            self._append_piece(self._unfinished.popleft(), now_ms)

    def _append(
        self, result: GroupDecision | AlreadyDecided, on_done: CodeCallback, now_ms: int
    ) -> None:
        if isinstance(result, GroupDecision):
            self._append_piece(_UnfinishedDecision(result, on_done), now_ms)
        else:  # decided before: respond when that is durable
            self._turn.add_records([], lambda code, _: on_done(code))

    def _append_piece(self, unfinished: _UnfinishedDecision, now_ms: int) -> None:
        piece = unfinished.decision.next_piece()
        pending = PendingPiece(self, unfinished, piece, now_ms, len(piece.records))
        self._turn.add(pending, piece.records)

    def piece_stored(
        self,
        unfinished: _UnfinishedDecision,
        piece: DecisionPiece,
        results: Sequence[AppendResult],
        now_ms: int,
    ) -> None:
        if not piece.is_last:
            self._hide(unfinished, piece.records, results)
        self.coordinator.apply_piece(unfinished.decision, piece, results, now_ms=now_ms)
        if piece.is_last:
            self._unhide(unfinished)
        else:
            self._unfinished.append(unfinished)

    def piece_failed(
        self, unfinished: _UnfinishedDecision, piece: DecisionPiece, code: int
    ) -> None:
        self.coordinator.cancel_piece(unfinished.decision, piece)
        if piece.has_decision_record:  # nothing is decided
            unfinished.on_done(code)
        else:
            self._unfinished.append(unfinished)
            self._is_blocked = True

    def _hide(
        self,
        unfinished: _UnfinishedDecision,
        records: Sequence[Appendable],
        results: Sequence[AppendResult],
    ) -> None:
        """Hide new messages. No consumer has seen them: they were appended in this very turn."""
        for record, result in zip(records, results, strict=True):
            queue = record.topic, record.queue_id
            is_final = record.topic not in (names.OP_TOPIC, names.DECISION_TOPIC)
            if is_final and queue not in unfinished.hidden_queues:
                unfinished.hidden_queues[queue] = None
                self._store.hide(*queue, result.queue_offset)

    def _unhide(self, unfinished: _UnfinishedDecision) -> None:
        for topic, queue_id in unfinished.hidden_queues:
            self._store.unhide(topic, queue_id)
        if unfinished.hidden_queues:
            self._messages_arrived(
                [NewRecord(topic, queue_id, b"") for topic, queue_id in unfinished.hidden_queues]
            )


@dataclass(slots=True)
class _UnfinishedDecision:
    """A group decision of which not all pieces are stored."""

    decision: GroupDecision
    on_done: CodeCallback
    # A dict keeps the order of the queues. The order of a set changes from process to process, so
    # a simulation could not be repeated.
    hidden_queues: dict[tuple[str, int], None] = field(default_factory=dict)


class PendingPiece(msgspec.Struct):
    """A piece of a group decision whose records are in the turn's batch. A `PendingAppend`."""

    group_decisions: GroupDecisions
    unfinished: _UnfinishedDecision
    piece: DecisionPiece
    now_ms: int
    count: int
    waits_for_flush: bool = True
    first_index: int = 0

    def on_stored(self, results: Sequence[AppendResult]) -> None:
        own_results = results[self.first_index : self.first_index + self.count]
        self.group_decisions.piece_stored(self.unfinished, self.piece, own_results, self.now_ms)

    def on_done(self, code: int, results: Sequence[AppendResult]) -> None:
        if not results:
            self.group_decisions.piece_failed(self.unfinished, self.piece, code)
        elif self.piece.is_last:
            self.unfinished.on_done(code)


def _check_writer_name(name: str) -> str:
    if not 1 <= len(name) <= 255 or not name.isprintable():
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER,
            "the name of a writer or of a run must have 1 to 255 printable characters",
        )
    return name


def _writer_state(name: str, writer: Writer | DecisionRecord | None) -> WriterState:
    if writer is None:
        return WriterState(writer=name)
    return WriterState(
        writer=name,
        fence=writer.fence,
        batch=writer.batch,
        winners=[WinningAttempt(attempt=w.attempt, count=w.count) for w in writer.winners],
        fingerprint=writer.fingerprint,
        run=writer.run,
    )


def _respond_writer(channel: Channel, request: Request[Any], code: int, state: WriterState) -> None:
    if code == ResponseCode.SUCCESS:
        channel.respond(request, body=encode_body(state))
    else:
        channel.respond(request, code=code, remark="the decision was not stored")
