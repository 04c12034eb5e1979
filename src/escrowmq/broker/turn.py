"""One turn of the loop: everything that is to be appended in it goes to the log in one write.

A send or a put hands its records over while the turn lasts. `settle`, once per turn, appends all
of them and answers everybody. Nobody is answered before his records are as durable as he asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from escrowmq.broker.dispatch import CODES_OF_PUTS, Line
from escrowmq.broker.statistics import Counts
from escrowmq.errors import RecordRefused, StoreError, StoreFailed
from escrowmq.message.batch import NewRun, ToAppend
from escrowmq.message.keys import encode_offset_ids
from escrowmq.message.record import NewRecord
from escrowmq.remoting.codes import ResponseCode
from escrowmq.remoting.headers import SendMessageAnswer
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import SendAnswers, answer
from escrowmq.store.commit_log import Placed
from escrowmq.store.status import PutStatus, status_of
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)


class _Send(msgspec.Struct, gc=False):
    """A send whose records are in the batch: `count` of them from `first` on, or one run."""

    line: Line
    request: Request[Any]
    first: int
    count: int
    is_alone: bool  # one message
    queue_id: int  # that was asked for, wherever the record goes first
    waits: bool  # for the flush, if the broker flushes before it answers


# Told the code of the answer, and where the records went; nowhere if they were not stored.
Done = Callable[[int, Sequence[Placed]], None]


class Part(Protocol):
    """Whose records are in the batch: `count` of them from `first` on. Told where all records of
    the turn went, for its own are among them: a turn has hundreds of parts, and many have one."""

    first: int
    count: int
    waits: bool

    def stored(self, placed: Sequence[Placed]) -> None:
        """They are in the log."""

    def done(self, code: int, placed: Sequence[Placed]) -> None:
        """They are as durable as a send would be, or it is clear that they are not. Nothing was
        placed if they were not stored."""


class _Put(msgspec.Struct, gc=False):
    """Records of the broker's own in the batch."""

    count: int
    when_stored: Callable[[Sequence[Placed]], None] | None
    when_done: Done | None
    waits: bool
    first: int = 0

    def stored(self, placed: Sequence[Placed]) -> None:
        if self.when_stored is not None:
            self.when_stored(placed[self.first : self.first + self.count])

    def done(self, code: int, placed: Sequence[Placed]) -> None:
        if self.when_done is not None:
            self.when_done(code, placed[self.first : self.first + self.count])


# Told the end of an append, calls back once it is durable, or is not in time.
WhenFlushed = Callable[[int, Callable[[PutStatus], None]], None]
_S = TypeVar("_S", _Send, Part)


class Turn:
    def __init__(
        self,
        store: MessageStore,
        answers: SendAnswers,
        *,
        when_flushed: WhenFlushed | None = None,
        arrived: Callable[[Sequence[ToAppend]], None] = lambda records: None,
        counts: Counts | None = None,
        wall_ms: Callable[[int], int] = lambda now_ms: now_ms,
    ) -> None:
        """`wall_ms`: what records are stamped with, where the broker's own time is another."""
        self._store = store
        self._wall_ms = wall_ms
        self._answers = answers
        self._when_flushed = when_flushed
        self._arrived = arrived
        self._counts = Counts() if counts is None else counts
        self._records: list[ToAppend] = []
        self._sends: list[_Send] = []
        self._puts: list[Part] = []

    # --- while it lasts --------------------------------------------------------------------------

    def send(self, line: Line, request: Request[Any], record: NewRecord, queue_id: int) -> None:
        """One message of a client, who waits for the flush."""
        records = self._records
        self._sends.append(_Send(line, request, len(records), 1, True, queue_id, True))
        records.append(record)

    def send_all(
        self,
        line: Line,
        request: Request[Any],
        records: Sequence[ToAppend],
        queue_id: int,
        *,
        waits: bool,
    ) -> None:
        first, count = len(self._records), len(records)
        is_alone = count == 1 and type(records[0]) is not NewRun
        self._sends.append(_Send(line, request, first, count, is_alone, queue_id, waits))
        self._records += records

    def put(
        self,
        records: Sequence[ToAppend],
        done: Done | None = None,
        *,
        stored: Callable[[Sequence[Placed]], None] | None = None,
        waits: bool = True,
    ) -> None:
        """Records of the broker's own: all of them, or none.

        `stored` is called as soon as they are in the log; `done` once they are as durable as a
        send would be, or once it is clear that they are not. With no records at all, `done` is
        called when everything is durable that is in the log by then.
        """
        self.join(_Put(len(records), stored, done, waits), records)

    def join(self, part: Part, records: Sequence[ToAppend]) -> None:
        """The same for one that knows itself what is to be done then."""
        part.first = len(self._records)
        self._puts.append(part)
        self._records += records

    # --- when it ends ----------------------------------------------------------------------------

    def settle(self, now_ms: int) -> None:
        """Append everything that was handed over, in one write, and answer."""
        if not self._records and not self._puts:
            return
        records, self._records = self._records, []
        sends, self._sends = self._sends, []
        puts, self._puts = self._puts, []
        try:
            placed = self._store.append(records, now_ms=self._wall_ms(now_ms)) if records else []
        except RecordRefused as error:
            if len(sends) + len(puts) == 1:
                self._refuse_all(sends, puts, error)
            else:
                self._settle_one_by_one(sends, puts, records, now_ms)
            return
        except StoreError as error:
            self._refuse_all(sends, puts, error)
            return
        except Exception as error:  # a bug of ours: nobody may wait for ever because of it
            log.exception("append failed records=%d", len(records))
            self._refuse_all(sends, puts, StoreFailed(f"internal error: {error}"))
            return
        self._counts.appended(sends, records, placed)
        for put in puts:
            put.stored(placed)
        self._arrived(records)
        self._answer_when_due(sends, puts, placed)

    def refuse(self, error: StoreError) -> None:
        """Everything that was handed over: what it needs could not be stored."""
        sends, self._sends = self._sends, []
        puts, self._puts = self._puts, []
        self._records = []
        self._refuse_all(sends, puts, error)

    def _answer_when_due(self, sends: list[_Send], puts: list[Part], placed: list[Placed]) -> None:
        answered = self._counts.answered
        began_s = self._counts.turn_began_s()
        if self._when_flushed is None:
            self._answer_all(sends, puts, placed, ResponseCode.SUCCESS)
            answered(sends, ResponseCode.SUCCESS, began_s)
            return
        hasty, patient = _split(sends)
        hasty_puts, patient_puts = _split(puts)
        self._answer_all(hasty, hasty_puts, placed, ResponseCode.SUCCESS)
        answered(hasty, ResponseCode.SUCCESS, began_s)
        if patient or patient_puts:

            def flushed(status: PutStatus) -> None:
                code = CODES_OF_PUTS.get(status, ResponseCode.SYSTEM_ERROR)
                self._answer_all(patient, patient_puts, placed, code)
                answered(patient, code, began_s)

            self._when_flushed(self._store.end, flushed)

    def _settle_one_by_one(
        self, sends: list[_Send], puts: list[Part], records: list[ToAppend], now_ms: int
    ) -> None:
        """Somebody's record does not fit: the others of this turn must not pay for it."""
        everybody: list[_Send | Part] = [*sends, *puts]
        for one in sorted(everybody, key=lambda one: one.first):
            self._records = records[one.first : one.first + one.count]
            one.first = 0
            self._sends = [one] if isinstance(one, _Send) else []
            self._puts = [] if isinstance(one, _Send) else [one]
            self.settle(now_ms)

    def _refuse_all(self, sends: list[_Send], puts: list[Part], error: StoreError) -> None:
        code = CODES_OF_PUTS.get(status_of(error), ResponseCode.SYSTEM_ERROR)
        for send in sends:
            send.line.write(answer(send.request, code=code, remark=str(error)))
            self._counts.refused[send.request.head.code, code] += 1
        for put in puts:
            put.done(code, ())

    def _answer_all(
        self, sends: list[_Send], puts: list[Part], placed: list[Placed], code: int
    ) -> None:
        for put in puts:
            put.done(code, placed)
        sent = self._answers.sent
        for send in sends:
            if send.is_alone:
                place = placed[send.first]
                log_offset, queue_offset = place.log_offset, place.queue_offset
                data = sent(send.request, log_offset, send.queue_id, queue_offset, code)
                send.line.write(data)
            else:
                self._answer_batch(send, placed, code)

    def _answer_batch(self, send: _Send, placed: list[Placed], code: int) -> None:
        places = placed[send.first : send.first + send.count]
        run = places[0].run
        log_offsets = run.log_offsets if run else [place.log_offset for place in places]
        if send.request.head.fields.bulk:
            log_offsets = log_offsets[:1]
        answers = self._answers
        fields = SendMessageAnswer(
            msg_id=",".join(encode_offset_ids(answers.store_host, log_offsets)),
            queue_id=send.queue_id,
            queue_offset=places[0].queue_offset,
            region=answers.region,
            trace_on=answers.trace_on,
        )
        send.line.write(answer(send.request, fields, code=code))


def _split(ones: list[_S]) -> tuple[list[_S], list[_S]]:
    """Those who want their answer at once, and those who wait for the flush."""
    return [one for one in ones if not one.waits], [one for one in ones if one.waits]
