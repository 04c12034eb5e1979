"""Parking: a transactional send is stored where no consumer looks, and answered like any send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from escrowmq.broker.dispatch import Line
from escrowmq.broker.statistics import TRANSACTION, Counts
from escrowmq.broker.turn import Turn
from escrowmq.errors import EscrowFull, RequestRefused
from escrowmq.escrow.coordinator import Escrow
from escrowmq.escrow.half_table import BODY_BYTES_MAX, FreshHalf, FreshHalves, Half
from escrowmq.escrow.records import facts_of, half_of, plain_half
from escrowmq.message import names
from escrowmq.message.record import TRANSACTION_MASK, NewRecord
from escrowmq.remoting.codes import ResponseCode
from escrowmq.remoting.headers import SendMessage
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import SendAnswers, answer
from escrowmq.store.commit_log import Placed

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
        self.fresh = FreshHalves()
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
        entry = self.escrow.half_to_be(
            facts.topic, facts.queue_id, facts.group, facts.key, now_ms, line, facts.immunity_ms
        )
        entry.attempt = facts.attempt
        self._park(_Parking(self, line, request, entry, None, waits), half)

    def park_plain(
        self, line: Line, request: Request[SendMessage], queue_id: int, added: str, now_ms: int
    ) -> None:
        """The same for one with nothing out of the ordinary in its properties."""
        if self.rejects:
            raise RequestRefused(ResponseCode.NO_PERMISSION, _REJECTED)
        fields, host = request.head.fields, line.peer_host
        properties, of_final, group, key, derived = plain_half(
            fields.properties, added, fields.topic, queue_id
        )
        body, fresh = request.body, None
        flag, sys_flag = fields.flag, fields.sys_flag & ~TRANSACTION_MASK
        born_ms, times = fields.born_timestamp, fields.reconsume_times
        if len(body) <= BODY_BYTES_MAX:
            body = bytes(body)
            fresh = FreshHalf(body, of_final, derived, flag, sys_flag, born_ms, host, times)
        half = NewRecord(
            names.HALF_TOPIC,
            0,
            body,  # type: ignore[arg-type]  # if a view: it is appended before this turn ends
            properties,
            flag,
            sys_flag,
            born_ms,
            host,
            times,
            0,
            derived,
        )
        entry = self.escrow.half_to_be(fields.topic, queue_id, group, key, now_ms, line)
        self._park(_Parking(self, line, request, entry, fresh, True), half)

    def _park(self, parking: _Parking, half: NewRecord) -> None:
        entry, escrow = parking.half, self.escrow
        sent = entry.group, entry.key
        if sent in self.under_way or escrow.find_sent(*sent) is not None:
            escrow.counts.duplicate_sends += 1
            self._turn.put([], parking.done_again, waits=parking.waits)
            return
        try:
            escrow.refuse_if_full(entry.group, len(half.body) + len(half.properties))
        except EscrowFull as error:
            raise RequestRefused(ResponseCode.SYSTEM_BUSY, str(error)) from error
        self.under_way.add(sent)
        self._turn.join(parking, (half,))


class _Parking(msgspec.Struct, gc=False):
    """A half on its way into the log, and whom to tell. A part of the turn."""

    owner: Parking
    line: Line
    request: Request[SendMessage]
    half: Half
    fresh: FreshHalf | None
    waits: bool
    first: int = 0
    count: int = 1

    def stored(self, placed: Sequence[Placed]) -> None:
        place, owner, half = placed[self.first], self.owner, self.half
        half.queue_offset, half.log_offset = place.queue_offset, place.log_offset
        half.size = place.size
        owner.under_way.discard((half.group, half.key))
        owner.escrow.counts.parked += 1
        owner.counts.came(half.topic, TRANSACTION, place.size)
        owner.escrow.hold(half)
        if self.fresh is not None:
            owner.fresh.put(place.queue_offset, self.fresh)

    def done(self, code: int, placed: Sequence[Placed]) -> None:
        if placed:
            place = placed[self.first]
            self._answer(place.queue_offset, place.log_offset, code)
        else:
            self.owner.under_way.discard((self.half.group, self.half.key))
            self._fail(code)

    def done_again(self, code: int, placed: Sequence[Placed]) -> None:
        """It was sent before, and this is the answer that got lost."""
        found = self.owner.escrow.find_sent(self.half.group, self.half.key)
        if found is None or code != ResponseCode.SUCCESS:
            self._fail(code or ResponseCode.SYSTEM_ERROR)
        else:
            self._answer(*found, code)

    def _answer(self, queue_offset: int, log_offset: int, code: int) -> None:
        half, sent = self.half, self.owner.answers.sent
        key = half.key.decode("utf-8", "replace")
        self.line.write(sent(self.request, log_offset, half.queue_id, queue_offset, code, key))

    def _fail(self, code: int) -> None:
        self.owner.counts.refused[self.request.head.code, code] += 1
        self.line.write(answer(self.request, code=code, remark="the half was not stored"))
