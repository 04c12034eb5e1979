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

from escrowmq.broker.dispatch import Line, body_of
from escrowmq.broker.transactions.end import Transactions
from escrowmq.broker.turn import Turn
from escrowmq.errors import NoSuchTransaction, RequestRefused, TransactionContradicted, WriterFenced
from escrowmq.escrow.coordinator import (
    HALVES_MAX,
    Change,
    decide_many,
    is_under_way,
    mark_deciding,
    pieces,
    queues_of,
    refuse_unreadable,
    settle_all,
    unmark_deciding,
)
from escrowmq.escrow.writers import Decision, Winner, Writer, decision_record
from escrowmq.message import names
from escrowmq.message.batch import ToAppend
from escrowmq.message.record import NewRecord
from escrowmq.message.transaction import State, Verdict
from escrowmq.remoting.bodies import (
    BatchWinners,
    HalfPlaces,
    WinningAttempt,
    WriterState,
    encode_body,
)
from escrowmq.remoting.codes import ResponseCode
from escrowmq.remoting.headers import (
    DecideBatch,
    EndTransactions,
    EndTransactionsAnswer,
    RegisterWriter,
    WriterName,
)
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import answer, refuse
from escrowmq.store.commit_log import Placed
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)

_VERDICTS = {verdict.value: verdict for verdict in (Verdict.COMMIT, Verdict.ROLLBACK)}
Done = Callable[[int], None]


class Decisions:
    def __init__(
        self,
        store: MessageStore,
        turn: Turn,
        transactions: Transactions,
        arrived: Callable[[Sequence[ToAppend]], None],
    ) -> None:
        self._store = store
        self._turn = turn
        self._transactions = transactions
        self._escrow = transactions.escrow
        self._arrived = arrived
        self._unfinished: deque[_Unfinished] = deque()
        self._is_stuck = False  # a piece could not be stored; `tick` tries again
        # Where something is out of sight, or will be. Whoever else decides over several halves and
        # has one there waits: it would be seen in part, or keep another's part back.
        self._held: set[tuple[str, int]] = set()

    # --- requests --------------------------------------------------------------------------------

    def end_many(self, line: Line, request: Request[EndTransactions], now_ms: int) -> None:
        fields = request.head.fields
        verdict = _VERDICTS.get(fields.commit_or_rollback)
        places = body_of(HalfPlaces, request).halves
        if verdict is None or not places or len(places) > HALVES_MAX:
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER,
                f"commitOrRollback must be 8 or 12, and of 1 to {HALVES_MAX} halves",
            )
        decision = _refusing(
            lambda: decide_many(
                self._escrow, places, fields.producer_group, verdict, by=f"group {line.peer}"
            )
        )
        if self._waits(decision, self.end_many, line, request, now_ms):
            return
        state = State.COMMITTED if verdict is Verdict.COMMIT else State.ROLLED_BACK
        count = 0 if decision is None else len(decision.commits) + len(decision.rolls_back)
        fields_back = EndTransactionsAnswer(state=state.text, count=count)
        self._decide(decision, lambda code: line.write(_answer(request, code, fields_back)), now_ms)

    def register(self, line: Line, request: Request[RegisterWriter], now_ms: int) -> None:
        """A new fence for a writer: whoever had the one before decides nothing any more."""
        fields = request.head.fields
        name, run = _refuse_bad_name(fields.writer), fields.run
        if run:
            _refuse_bad_name(run)
        writers = self._escrow.writers
        decision = _refusing(lambda: writers.registration(name, run, fields.fence))
        # His own fence, not the one of whoever registers before this is durable.
        told = _told(name, decision or writers.find(name))
        self._decide(decision, lambda code: line.write(_tell(request, code, told)), now_ms)

    def decide_batch(self, line: Line, request: Request[DecideBatch], now_ms: int) -> None:
        fields, body = request.head.fields, body_of(BatchWinners, request)
        name = _refuse_bad_name(fields.writer)
        if fields.batch < 0:
            raise RequestRefused(ResponseCode.INVALID_PARAMETER, "batches are numbered from 0 on")
        winners = [Winner(winner.attempt, winner.count) for winner in body.winners]
        decision = _refusing(
            lambda: self._escrow.writers.decide(
                name,
                fields.batch,
                fields.fence,
                winners,
                body.fingerprint,
                f"writer {name}",
                is_last=fields.last,
            )
        )
        if self._waits(decision, self.decide_batch, line, request, now_ms):
            return
        told = _told(name, decision or self._escrow.writers.find(name))
        self._decide(decision, lambda code: line.write(_tell(request, code, told)), now_ms)

    def query(self, line: Line, request: Request[WriterName], now_ms: int) -> None:
        name = request.head.fields.writer
        told = WriterState(writer=name)

        # What it says must be durable, a decision that is read is acted on: so it says what is in
        # the log when this turn ends, and not what has come to it when that is flushed.
        def stored(_: Sequence[Placed]) -> None:
            nonlocal told
            told = _told(name, self._escrow.writers.find(name))

        self._turn.put([], lambda code, _: line.write(_tell(request, code, told)), stored=stored)

    # --- what follows ----------------------------------------------------------------------------

    def _waits(
        self,
        decision: Decision | None,
        handler: Callable[[Line, Request[Any], int], None],
        line: Line,
        request: Request[Any],
        now_ms: int,
    ) -> bool:
        """Whether somebody is faster with one of its halves, or one of its queues: then it is
        looked at again once he is done."""
        if decision is None:
            return False
        is_behind = self._held and not self._held.isdisjoint(queues_of(self._escrow, decision))
        if not is_behind and not is_under_way(self._escrow, decision):
            return False

        def once_more(code: int, _: Sequence[Placed]) -> None:
            try:
                handler(line, request, now_ms)
            except RequestRefused as error:
                line.write(refuse(request, error))

        self._turn.put([], once_more)
        return True

    def _decide(self, decision: Decision | None, done: Done, now_ms: int) -> None:
        if decision is None:  # it is decided; told again, once that is durable
            self._turn.put([], lambda code, _: done(code))
            return
        _refusing(lambda: refuse_unreadable(self._escrow, decision))
        mark_deciding(self._escrow, decision)
        unfinished = _Unfinished(decision, pieces(self._escrow, decision, now_ms=now_ms), done)
        self._escrow.writers.expect(decision)
        self._put_piece(unfinished, [decision_record(decision, now_ms=now_ms)], now_ms)

    def tick(self) -> None:
        """There may be room again."""
        self._is_stuck = False

    @property
    def has_more(self) -> bool:
        """Whether another turn would bring something forward."""
        return bool(self._unfinished) and not self._is_stuck

    def end_turn(self, now_ms: int) -> None:
        """The next piece of whatever is under way."""
        for _ in range(len(self._unfinished) if self.has_more else 0):
            self._put_piece(self._unfinished.popleft(), [], now_ms)

    def _put_piece(self, unfinished: _Unfinished, before: list[ToAppend], now_ms: int) -> None:
        piece = unfinished.next_piece()
        records: list[ToAppend] = list(before)
        for change in piece:
            records += self._transactions.rerouted(change, now_ms)
        following = unfinished.peek()
        if following is not None and before:
            unfinished.queues = set(queues_of(self._escrow, unfinished.decision))
            self._held |= unfinished.queues

        def stored(places: Sequence[Placed]) -> None:
            if following is not None:
                self._hold(unfinished, records[len(before) :], places[len(before) :])
            offsets = [place.queue_offset for place in places[len(before) :]]
            settle_all(self._escrow, piece, offsets, now_ms=now_ms)
            if before:
                self._escrow.writers.note(unfinished.decision, places[0].log_offset)
                unfinished.place = places[0].queue_offset
            if following is not None:
                self._escrow.unfinished.add(unfinished.place)
                self._unfinished.append(unfinished)
            else:
                self._escrow.unfinished.discard(unfinished.place)
                self._show(unfinished)

        def answered(code: int, places: Sequence[Placed]) -> None:
            if places:
                if following is None:
                    unfinished.done(code)
            elif before:  # it was never decided
                unmark_deciding(self._escrow, unfinished.decision)
                self._escrow.writers.take_back(unfinished.decision)
                self._show(unfinished)
                unfinished.done(code)
            else:  # decided, and the rest could not be stored now: it will be
                unfinished.give_back(piece)
                self._unfinished.append(unfinished)
                self._is_stuck = True

        self._turn.put(records, answered, stored=stored)

    def _hold(
        self, unfinished: _Unfinished, records: list[ToAppend], places: Sequence[Placed]
    ) -> None:
        """Nobody has seen them yet: they were appended in this very turn."""
        for record, place in zip(records, places, strict=True):
            queue = record.topic, record.queue_id
            if record.topic != names.OP_TOPIC and queue not in unfinished.held:
                unfinished.held.add(queue)
                self._store.hold(*queue, place.queue_offset)

    def _show(self, unfinished: _Unfinished) -> None:
        self._held -= unfinished.queues
        for topic, queue_id in unfinished.held:
            self._store.show(topic, queue_id)
        if unfinished.held:
            self._arrived([NewRecord(topic, queue_id, b"") for topic, queue_id in unfinished.held])


class _Unfinished:
    """A decision, and the pieces that are left of it."""

    def __init__(
        self,
        decision: Decision,
        portions: Iterator[list[Change]],
        done: Done,
    ) -> None:
        self.decision = decision
        self.done = done
        self.place = -1  # of the decision, in its queue
        self.queues: set[tuple[str, int]] = set()  # all that it will be seen in
        self.held: set[tuple[str, int]] = set()
        self._portions = portions
        self._ahead: list[Change] | None = next(portions, None)

    def peek(self) -> list[Change] | None:
        return self._ahead

    def next_piece(self) -> list[Change]:
        piece, self._ahead = self._ahead or [], None
        if piece:
            self._ahead = next(self._portions, None)
        return piece

    def give_back(self, piece: list[Change]) -> None:
        later = self._portions
        ahead = [self._ahead] if self._ahead is not None else []

        def again() -> Iterator[list[Change]]:
            yield from ahead
            yield from later

        self._portions, self._ahead = again(), piece


def _refusing(step: Callable[[], Any]) -> Any:
    try:
        return step()
    except NoSuchTransaction as error:
        raise RequestRefused(ResponseCode.SYSTEM_ERROR, str(error)) from error
    except TransactionContradicted as error:
        raise RequestRefused(ResponseCode.TRANSACTION_CONTRADICTED, str(error)) from error
    except WriterFenced as error:
        raise RequestRefused(ResponseCode.TRANSACTION_FENCED, str(error)) from error


def _refuse_bad_name(name: str) -> str:
    if not 1 <= len(name) <= 255 or not name.isprintable():
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER, "a writer's name has 1 to 255 printable characters"
        )
    return name


def _told(name: str, writer: Writer | Decision | None) -> WriterState:
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


def _tell(request: Request[Any], code: int, state: WriterState) -> bytes:
    if code != ResponseCode.SUCCESS:
        return answer(request, code=code, remark="the decision was not stored")
    return answer(request, body=encode_body(state))


def _answer(request: Request[Any], code: int, fields: EndTransactionsAnswer) -> bytes:
    if code != ResponseCode.SUCCESS:
        return answer(request, code=code, remark="the decision was not stored")
    return answer(request, fields)
