"""Parking: a transactional send is stored where no consumer looks, and answered like any send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from escrowmq.broker.counts import TRANSACTION, Counts
from escrowmq.broker.line import Line
from escrowmq.broker.turn import Turn
from escrowmq.errors import EscrowFull, RequestRefused
from escrowmq.escrow.escrow import Escrow
from escrowmq.escrow.shapes import HalfFacts, facts_of, half_of, plain_half
from escrowmq.message import names
from escrowmq.message.record import NewRecord
from escrowmq.message.sysflag import TRANSACTION_MASK
from escrowmq.store.store import Placed
from escrowmq.wire.answers import SendAnswers, answer
from escrowmq.wire.codes import ResponseCode
from escrowmq.wire.fastpath import Request
from escrowmq.wire.headers_send import SendMessage

_REJECTED: Final = "this broker does not take transactional messages"


class Parking:
    def __init__(
        self,
        turn: Turn,
        escrow: Escrow,
        answers: SendAnswers,
        counts: Counts,
        *,
        rejects: bool = False,
    ) -> None:
        self.counts = counts
        self._turn = turn
        self.rejects = rejects
        self.escrow = escrow
        self.answers = answers
        self.under_way: set[tuple[str, bytes]] = set()  # groups and keys of this turn's halves

    def park(
        self,
        line: Line,
        request: Request[SendMessage],
        record: NewRecord,
        now_ms: int,
        waits: bool,
        packed: int = 0,
    ) -> None:
        """A send with TRAN_MSG: stored where no consumer looks, answered like any send.

        `packed`: its body holds so many messages.
        """
        if self.rejects:
            raise RequestRefused(ResponseCode.NO_PERMISSION, _REJECTED)
        half = half_of(record, packed=packed)
        facts = facts_of(half)
        assert facts is not None, "half_of says where it wants to go"
        self._park(_Parking(self, line, request, facts, now_ms), half, waits)

    def park_plain(
        self, line: Line, request: Request[SendMessage], queue_id: int, added: bytes, now_ms: int
    ) -> None:
        """The same for one with nothing out of the ordinary in its properties."""
        if self.rejects:
            raise RequestRefused(ResponseCode.NO_PERMISSION, _REJECTED)
        fields = request.head.fields
        topic = fields.topic
        properties, group, key = plain_half(fields.properties, added.decode(), topic, queue_id)
        facts = HalfFacts(topic=topic, queue_id=queue_id, group=group, key=key.encode())
        half = NewRecord(
            names.HALF_TOPIC,
            0,
            request.body,  # type: ignore[arg-type]  # a view: it is appended before this turn ends
            properties,
            fields.flag,
            fields.sys_flag & ~TRANSACTION_MASK,
            fields.born_timestamp,
            line.peer_host,
            fields.reconsume_times,
        )
        self._park(_Parking(self, line, request, facts, now_ms), half, True)

    def _park(self, parking: _Parking, half: NewRecord, waits: bool) -> None:
        facts, escrow = parking.facts, self.escrow
        sent = facts.group, facts.key
        if sent in self.under_way or escrow.find_sent(*sent) is not None:
            escrow.counts.duplicate_sends += 1
            self._turn.put([], parking.done_again, waits=waits)
            return
        try:
            escrow.refuse_if_full(facts.group, len(half.body) + len(half.properties))
        except EscrowFull as error:
            raise RequestRefused(ResponseCode.SYSTEM_BUSY, str(error)) from error
        self.under_way.add(sent)
        self._turn.put((half,), parking.done, stored=parking.stored, waits=waits)


class _Parking:
    """A half on its way into the log, and whom to tell."""

    __slots__ = ("_line", "_now_ms", "_owner", "_request", "facts")

    def __init__(
        self,
        owner: Parking,
        line: Line,
        request: Request[SendMessage],
        facts: HalfFacts,
        now_ms: int,
    ) -> None:
        self._owner = owner
        self._line = line
        self._request = request
        self._now_ms = now_ms
        self.facts = facts

    def stored(self, places: Sequence[Placed]) -> None:
        place, owner = places[0], self._owner
        owner.under_way.discard((self.facts.group, self.facts.key))
        owner.escrow.counts.parked += 1
        owner.counts.came(self.facts.topic, TRANSACTION, place.size)
        owner.escrow.parked(
            self.facts,
            queue_offset=place.queue_offset,
            log_offset=place.log_offset,
            size=place.size,
            parked_ms=self._now_ms,
            sender=self._line,
        )

    def done(self, code: int, places: Sequence[Placed]) -> None:
        if places:
            self._answer(places[0].queue_offset, places[0].log_offset, code)
        else:
            self._owner.under_way.discard((self.facts.group, self.facts.key))
            self._fail(code)

    def done_again(self, code: int, places: Sequence[Placed]) -> None:
        """It was sent before, and this is the answer that got lost."""
        found = self._owner.escrow.find_sent(self.facts.group, self.facts.key)
        if found is None or code != ResponseCode.SUCCESS:
            self._fail(code or ResponseCode.SYSTEM_ERROR)
        else:
            self._answer(*found, code)

    def _answer(self, queue_offset: int, log_offset: int, code: int) -> None:
        facts = self.facts
        sent = self._owner.answers.sent
        key = facts.key.decode("utf-8", "replace")
        self._line.write(sent(self._request, log_offset, facts.queue_id, queue_offset, code, key))

    def _fail(self, code: int) -> None:
        self._owner.counts.refused[self._request.head.code, code] += 1
        self._line.write(answer(self._request, code=code, remark="the half was not stored"))
