"""One request, many halves: group decisions, and the batches of a writer.

A decision and what follows from it go to the log in one append. If that would be more than a
megabyte it goes in pieces, one per turn, so that others are served in between; what has been
delivered stays out of sight until the last piece is there.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from escrowmq.broker.dispatch import Channel, Handler, RequestPermissions, respond_error
from escrowmq.broker.transactions.end import END_ERRORS, EndProcessor
from escrowmq.broker.turn import Turn
from escrowmq.errors import EscrowError, RequestRefused
from escrowmq.escrow.coordinator import (
    DECISION_HALVES_MAX,
    Decision,
    apply_piece,
    check_readable,
    decide_many,
    decision_pieces,
    decision_queues,
    is_being_decided,
    mark_being_decided,
    unmark_being_decided,
)
from escrowmq.escrow.writers import DecisionRecord, Winner, Writer, make_decision_record
from escrowmq.message import names
from escrowmq.message.batch import Appendable
from escrowmq.message.record import NewRecord
from escrowmq.message.transaction import TransactionState, Verdict
from escrowmq.remoting.bodies import (
    BatchWinners,
    HalfPositions,
    WinningAttempt,
    WriterState,
    decode_body,
    encode_body,
)
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import (
    DecideBatch,
    EndTransactions,
    EndTransactionsResponse,
    RegisterWriter,
    WriterHeader,
)
from escrowmq.remoting.requests import Request
from escrowmq.store.commit_log import AppendResult
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)

_VERDICTS = {verdict.value: verdict for verdict in (Verdict.COMMIT, Verdict.ROLLBACK)}
CodeCallback = Callable[[int], None]


class GroupDecisions:
    def __init__(
        self,
        store: MessageStore,
        turn: Turn,
        transactions: EndProcessor,
        messages_arrived: Callable[[Sequence[Appendable]], None],
    ) -> None:
        self._store = store
        self._turn = turn
        self._transactions = transactions
        self._coordinator = transactions.coordinator
        self._messages_arrived = messages_arrived
        self._unfinished: deque[_UnfinishedDecision] = deque()
        self._is_blocked = False  # a piece could not be stored; `tick` tries again
        # Where something is out of sight, or will be. Whoever else decides over several halves and
        # has one there waits: it would be seen in part, or keep another's part back.
        self._hidden_queues: set[tuple[str, int]] = set()

    def handlers(self) -> list[Handler]:
        code, writer = RequestCode, RequestPermissions.writer
        return [
            Handler(
                code.END_TRANSACTIONS,
                self.end_transactions,
                RequestPermissions.end_many,
                END_ERRORS,
            ),
            Handler(code.REGISTER_WRITER, self.register_writer, writer, END_ERRORS),
            Handler(code.DECIDE_BATCH, self.decide_batch, writer, END_ERRORS),
            Handler(code.QUERY_WRITER, self.query_writer, writer),
        ]

    # --- requests --------------------------------------------------------------------------------

    def end_transactions(
        self, channel: Channel, request: Request[EndTransactions], now_ms: int
    ) -> None:
        fields = request.head.fields
        verdict = _VERDICTS.get(fields.commit_or_rollback)
        places = decode_body(HalfPositions, request.body).halves
        if verdict is None or not places or len(places) > DECISION_HALVES_MAX:
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER,
                f"commitOrRollback must be 8 or 12, and of 1 to {DECISION_HALVES_MAX} halves",
            )
        decision = decide_many(
            self._coordinator,
            places,
            fields.producer_group,
            verdict,
            by=f"group {channel.address}",
        )
        if self._defer_if_busy(decision, self.end_transactions, channel, request, now_ms):
            return
        state = (
            TransactionState.COMMITTED
            if verdict is Verdict.COMMIT
            else TransactionState.ROLLED_BACK
        )
        count = 0 if decision is None else len(decision.commits) + len(decision.rolls_back)
        fields_back = EndTransactionsResponse(state=state.text, count=count)
        self._decide(
            decision, lambda code: _respond_end(channel, request, code, fields_back), now_ms
        )

    def register_writer(
        self, channel: Channel, request: Request[RegisterWriter], now_ms: int
    ) -> None:
        """A new fence for a writer: whoever had the one before decides nothing any more."""
        fields = request.head.fields
        name, run = _check_writer_name(fields.writer), fields.run
        if run:
            _check_writer_name(run)
        writers = self._coordinator.writers
        decision = writers.make_registration(name, run, fields.fence)
        # His own fence, not the one of whoever registers before this is durable.
        told = _writer_state(name, decision or writers.find(name))
        self._decide(decision, lambda code: _respond_writer(channel, request, code, told), now_ms)

    def decide_batch(self, channel: Channel, request: Request[DecideBatch], now_ms: int) -> None:
        fields, body = request.head.fields, decode_body(BatchWinners, request.body)
        name = _check_writer_name(fields.writer)
        if fields.batch < 0:
            raise RequestRefused(ResponseCode.INVALID_PARAMETER, "batches are numbered from 0 on")
        winners = [Winner(winner.attempt, winner.count) for winner in body.winners]
        decision = self._coordinator.writers.decide_batch(
            name,
            fields.batch,
            fields.fence,
            winners,
            body.fingerprint,
            f"writer {name}",
            is_last=fields.last,
        )
        if self._defer_if_busy(decision, self.decide_batch, channel, request, now_ms):
            return
        told = _writer_state(name, decision or self._coordinator.writers.find(name))
        self._decide(decision, lambda code: _respond_writer(channel, request, code, told), now_ms)

    def query_writer(self, channel: Channel, request: Request[WriterHeader], now_ms: int) -> None:
        name = request.head.fields.writer
        told = WriterState(writer=name)

        # What it says must be durable, a decision that is read is acted on: so it says what is in
        # the log when this turn ends, and not what has come to it when that is flushed.
        def stored(_: Sequence[AppendResult]) -> None:
            nonlocal told
            told = _writer_state(name, self._coordinator.writers.find(name))

        self._turn.add_records(
            [],
            lambda code, _: _respond_writer(channel, request, code, told),
            on_stored=stored,
        )

    # --- what follows ----------------------------------------------------------------------------

    def _defer_if_busy(
        self,
        decision_record: DecisionRecord | None,
        handler: Callable[[Channel, Request[Any], int], None],
        channel: Channel,
        request: Request[Any],
        now_ms: int,
    ) -> bool:
        """Whether somebody is faster with one of its halves, or one of its queues: then it is
        looked at again once he is done."""
        if decision_record is None:
            return False
        is_behind = self._hidden_queues and not self._hidden_queues.isdisjoint(
            decision_queues(self._coordinator, decision_record)
        )
        if not is_behind and not is_being_decided(self._coordinator, decision_record):
            return False

        def once_more(code: int, _: Sequence[AppendResult]) -> None:
            try:
                handler(channel, request, now_ms)
            except EscrowError as error:
                respond_error(channel, request, error, END_ERRORS)

        self._turn.add_records([], once_more)
        return True

    def _decide(self, decision: DecisionRecord | None, on_done: CodeCallback, now_ms: int) -> None:
        if decision is None:  # it is decided; told again, once that is durable
            self._turn.add_records([], lambda code, _: on_done(code))
            return
        check_readable(self._coordinator, decision)
        mark_being_decided(self._coordinator, decision)
        unfinished = _UnfinishedDecision(
            decision, decision_pieces(self._coordinator, decision, now_ms=now_ms), on_done
        )
        self._coordinator.writers.stage(decision)
        self._append_piece(unfinished, [make_decision_record(decision, now_ms=now_ms)], now_ms)

    def tick(self) -> None:
        """There may be room again."""
        self._is_blocked = False

    @property
    def has_pending_pieces(self) -> bool:
        """Whether another turn would bring something forward."""
        return bool(self._unfinished) and not self._is_blocked

    def end_turn(self, now_ms: int) -> None:
        """The next piece of whatever is under way."""
        for _ in range(len(self._unfinished) if self.has_pending_pieces else 0):
            self._append_piece(self._unfinished.popleft(), [], now_ms)

    def _append_piece(
        self, unfinished: _UnfinishedDecision, leading_records: list[Appendable], now_ms: int
    ) -> None:
        piece = unfinished.next_piece()
        records: list[Appendable] = list(leading_records)
        for change in piece:
            records += self._transactions.redirect_finals(change, now_ms)
        following = unfinished.peek()
        if following is not None and leading_records:
            unfinished.queues = set(decision_queues(self._coordinator, unfinished.decision_record))
            self._hidden_queues |= unfinished.queues

        def stored(places: Sequence[AppendResult]) -> None:
            if following is not None:
                self._hide(
                    unfinished, records[len(leading_records) :], places[len(leading_records) :]
                )
            offsets = [place.queue_offset for place in places[len(leading_records) :]]
            apply_piece(self._coordinator, piece, offsets, now_ms=now_ms)
            if leading_records:
                self._coordinator.writers.apply(unfinished.decision_record, places[0].log_offset)
                unfinished.queue_offset = places[0].queue_offset
            if following is not None:
                self._coordinator.unfinished_decisions.add(unfinished.queue_offset)
                self._unfinished.append(unfinished)
            else:
                self._coordinator.unfinished_decisions.discard(unfinished.queue_offset)
                self._unhide(unfinished)

        def answered(code: int, places: Sequence[AppendResult]) -> None:
            if places:
                if following is None:
                    unfinished.on_done(code)
            elif leading_records:  # it was never decided
                unmark_being_decided(self._coordinator, unfinished.decision_record)
                self._coordinator.writers.unstage(unfinished.decision_record)
                self._unhide(unfinished)
                unfinished.on_done(code)
            else:  # decided, and the rest could not be stored now: it will be
                unfinished.put_back(piece)
                self._unfinished.append(unfinished)
                self._is_blocked = True

        self._turn.add_records(records, answered, on_stored=stored)

    def _hide(
        self,
        unfinished: _UnfinishedDecision,
        records: list[Appendable],
        results: Sequence[AppendResult],
    ) -> None:
        """Nobody has seen them yet: they were appended in this very turn."""
        for record, place in zip(records, results, strict=True):
            queue = record.topic, record.queue_id
            if record.topic != names.OP_TOPIC and queue not in unfinished.hidden_queues:
                unfinished.hidden_queues.add(queue)
                self._store.hide(*queue, place.queue_offset)

    def _unhide(self, unfinished: _UnfinishedDecision) -> None:
        self._hidden_queues -= unfinished.queues
        for topic, queue_id in unfinished.hidden_queues:
            self._store.unhide(topic, queue_id)
        if unfinished.hidden_queues:
            self._messages_arrived(
                [NewRecord(topic, queue_id, b"") for topic, queue_id in unfinished.hidden_queues]
            )


class _UnfinishedDecision:
    """A decision, and the pieces that are left of it."""

    def __init__(
        self,
        decision_record: DecisionRecord,
        piece_iterator: Iterator[list[Decision]],
        on_done: CodeCallback,
    ) -> None:
        self.decision_record = decision_record
        self.on_done = on_done
        self.queue_offset = -1  # of the decision, in its queue
        self.queues: set[tuple[str, int]] = set()  # all that it will be seen in
        self.hidden_queues: set[tuple[str, int]] = set()
        self._piece_iterator = piece_iterator
        self._following_piece: list[Decision] | None = next(piece_iterator, None)

    def peek(self) -> list[Decision] | None:
        return self._following_piece

    def next_piece(self) -> list[Decision]:
        piece, self._following_piece = self._following_piece or [], None
        if piece:
            self._following_piece = next(self._piece_iterator, None)
        return piece

    def put_back(self, piece: list[Decision]) -> None:
        later = self._piece_iterator
        ahead = [self._following_piece] if self._following_piece is not None else []

        def again() -> Iterator[list[Decision]]:
            yield from ahead
            yield from later

        self._piece_iterator, self._following_piece = again(), piece


def _check_writer_name(name: str) -> str:
    if not 1 <= len(name) <= 255 or not name.isprintable():
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER, "a writer's name has 1 to 255 printable characters"
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


def _respond_end(
    channel: Channel, request: Request[Any], code: int, fields: EndTransactionsResponse
) -> None:
    if code == ResponseCode.SUCCESS:
        channel.respond(request, fields)
    else:
        channel.respond(request, code=code, remark="the decision was not stored")
