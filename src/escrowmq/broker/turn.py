"""One turn of the loop: everything that is to be appended in it goes to the log in one write.

A send or a put hands its records over while the turn lasts. `settle`, once per turn, appends all
of them and answers everybody. Nobody is answered before his records are as durable as he asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from escrowmq.broker.dispatch import Channel, response_code
from escrowmq.broker.statistics import BrokerCounters
from escrowmq.errors import RecordRefused, StoreError, StoreFailed
from escrowmq.message.batch import Appendable, RecordRun
from escrowmq.message.record import NewRecord
from escrowmq.remoting.codes import ResponseCode
from escrowmq.remoting.requests import Request
from escrowmq.store.commit_log import AppendResult
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)


class _PendingSend(msgspec.Struct, gc=False):
    """A send whose records are in the batch: `count` of them from `first` on, or one run."""

    channel: Channel
    request: Request[Any]
    first_index: int
    count: int
    is_single: bool  # one message
    queue_id: int  # that was asked for, wherever the record goes first
    waits_for_flush: bool  # for the flush, if the broker flushes before it answers


# Told the code of the answer, and where the records went; nowhere if they were not stored.
DoneCallback = Callable[[int, Sequence[AppendResult]], None]


class PendingAppend(Protocol):
    """Whose records are in the batch: `count` of them from `first` on. Told where all records of
    the turn went, for its own are among them: a turn has hundreds of parts, and many have one."""

    first_index: int
    count: int
    waits_for_flush: bool

    def on_stored(self, results: Sequence[AppendResult]) -> None:
        """They are in the log."""

    def on_done(self, code: int, results: Sequence[AppendResult]) -> None:
        """They are as durable as a send would be, or it is clear that they are not. Nothing was
        placed if they were not stored."""


class _PendingRecords(msgspec.Struct, gc=False):
    """Records of the broker's own in the batch."""

    count: int
    stored_callback: Callable[[Sequence[AppendResult]], None] | None
    done_callback: DoneCallback | None
    waits_for_flush: bool
    first_index: int = 0

    def on_stored(self, results: Sequence[AppendResult]) -> None:
        if self.stored_callback is not None:
            self.stored_callback(results[self.first_index : self.first_index + self.count])

    def on_done(self, code: int, results: Sequence[AppendResult]) -> None:
        if self.done_callback is not None:
            self.done_callback(code, results[self.first_index : self.first_index + self.count])


# Called with the end of an append and a callback. The callback is called once: with None when the
# append is durable, with FlushTimeout if it is not in time, with another StoreError if it failed.
WhenFlushed = Callable[[int, Callable[[StoreError | None], None]], None]
_AppendT = TypeVar("_AppendT", _PendingSend, PendingAppend)


class Turn:
    def __init__(
        self,
        store: MessageStore,
        *,
        when_flushed: WhenFlushed | None = None,
        messages_arrived: Callable[[Sequence[Appendable]], None] = lambda records: None,
        counters: BrokerCounters | None = None,
        wall_ms: Callable[[int], int] = lambda now_ms: now_ms,
    ) -> None:
        """`wall_ms`: what records are stamped with, where the broker's own time is another."""
        self._store = store
        self._wall_ms = wall_ms
        self._when_flushed = when_flushed
        self._messages_arrived = messages_arrived
        self._counters = BrokerCounters() if counters is None else counters
        self._records: list[Appendable] = []
        self._sends: list[_PendingSend] = []
        self._pending: list[PendingAppend] = []

    # --- while it lasts --------------------------------------------------------------------------

    def add_send(
        self, channel: Channel, request: Request[Any], record: NewRecord, queue_id: int
    ) -> None:
        """One message of a client, who waits for the flush."""
        records = self._records
        self._sends.append(_PendingSend(channel, request, len(records), 1, True, queue_id, True))
        records.append(record)

    def add_send_records(
        self,
        channel: Channel,
        request: Request[Any],
        records: Sequence[Appendable],
        queue_id: int,
        *,
        waits_for_flush: bool,
    ) -> None:
        first, count = len(self._records), len(records)
        is_alone = count == 1 and type(records[0]) is not RecordRun
        self._sends.append(
            _PendingSend(channel, request, first, count, is_alone, queue_id, waits_for_flush)
        )
        self._records += records

    def add_records(
        self,
        records: Sequence[Appendable],
        on_done: DoneCallback | None = None,
        *,
        on_stored: Callable[[Sequence[AppendResult]], None] | None = None,
        waits_for_flush: bool = True,
    ) -> None:
        """Records of the broker's own: all of them, or none.

        `stored` is called as soon as they are in the log; `done` once they are as durable as a
        send would be, or once it is clear that they are not. With no records at all, `done` is
        called when everything is durable that is in the log by then.
        """
        self.add(_PendingRecords(len(records), on_stored, on_done, waits_for_flush), records)

    def add(self, pending: PendingAppend, records: Sequence[Appendable]) -> None:
        """The same for one that knows itself what is to be done then."""
        pending.first_index = len(self._records)
        self._pending.append(pending)
        self._records += records

    # --- when it ends ----------------------------------------------------------------------------

    def append_all(self, now_ms: int) -> None:
        """Append everything that was handed over, in one write, and answer."""
        if not self._records and not self._pending:
            return
        records, self._records = self._records, []
        sends, self._sends = self._sends, []
        puts, self._pending = self._pending, []
        try:
            placed = self._store.append(records, now_ms=self._wall_ms(now_ms)) if records else []
        except RecordRefused as error:
            if len(sends) + len(puts) == 1:
                self._refuse_all(sends, puts, error)
            else:
                self._append_one_by_one(sends, puts, records, now_ms)
            return
        except StoreError as error:
            self._refuse_all(sends, puts, error)
            return
        except Exception as error:  # a bug of ours: nobody may wait for ever because of it
            log.exception("append failed records=%d", len(records))
            self._refuse_all(sends, puts, StoreFailed(f"internal error: {error}"))
            return
        self._counters.record_append(sends, records, placed)
        for put in puts:
            put.on_stored(placed)
        self._messages_arrived(records)
        self._respond_when_durable(sends, puts, placed)

    def fail_all(self, error: StoreError) -> None:
        """Everything that was handed over: what it needs could not be stored."""
        sends, self._sends = self._sends, []
        puts, self._pending = self._pending, []
        self._records = []
        self._refuse_all(sends, puts, error)

    def _respond_when_durable(
        self, sends: list[_PendingSend], pending: list[PendingAppend], results: list[AppendResult]
    ) -> None:
        answered = self._counters.record_responses
        began_s = self._counters.turn_start_s()
        if self._when_flushed is None:
            self._respond_all(sends, pending, results, ResponseCode.SUCCESS)
            answered(sends, ResponseCode.SUCCESS, began_s)
            return
        hasty, patient = _split_by_flush(sends)
        hasty_puts, patient_puts = _split_by_flush(pending)
        self._respond_all(hasty, hasty_puts, results, ResponseCode.SUCCESS)
        answered(hasty, ResponseCode.SUCCESS, began_s)
        if patient or patient_puts:

            def flushed(error: StoreError | None) -> None:
                code = ResponseCode.SUCCESS if error is None else _response_code(error)
                self._respond_all(patient, patient_puts, results, code)
                answered(patient, code, began_s)

            self._when_flushed(self._store.end, flushed)

    def _append_one_by_one(
        self,
        sends: list[_PendingSend],
        pending: list[PendingAppend],
        records: list[Appendable],
        now_ms: int,
    ) -> None:
        """Somebody's record does not fit: the others of this turn must not pay for it."""
        everybody: list[_PendingSend | PendingAppend] = [*sends, *pending]
        for one in sorted(everybody, key=lambda one: one.first_index):
            self._records = records[one.first_index : one.first_index + one.count]
            one.first_index = 0
            self._sends = [one] if isinstance(one, _PendingSend) else []
            self._pending = [] if isinstance(one, _PendingSend) else [one]
            self.append_all(now_ms)

    def _refuse_all(
        self, sends: list[_PendingSend], pending: list[PendingAppend], error: StoreError
    ) -> None:
        code = _response_code(error)
        for send in sends:
            send.channel.respond(send.request, code=code, remark=str(error))
            self._counters.refused[send.request.head.code, code] += 1
        for put in pending:
            put.on_done(code, ())

    def _respond_all(
        self,
        sends: list[_PendingSend],
        pending: list[PendingAppend],
        results: list[AppendResult],
        code: int,
    ) -> None:
        for put in pending:
            put.on_done(code, results)
        for send in sends:
            if send.is_single:
                place = results[send.first_index]
                log_offset, queue_offset = place.log_offset, place.queue_offset
                send.channel.respond_send(
                    send.request, log_offset, send.queue_id, queue_offset, code
                )
            else:
                self._respond_batch(send, results, code)

    def _respond_batch(self, send: _PendingSend, results: list[AppendResult], code: int) -> None:
        places = results[send.first_index : send.first_index + send.count]
        run = places[0].run
        log_offsets = run.log_offsets if run else [place.log_offset for place in places]
        if send.request.head.fields.bulk:
            log_offsets = log_offsets[:1]
        send.channel.respond_send_batch(
            send.request, log_offsets, send.queue_id, places[0].queue_offset, code
        )


def _response_code(error: StoreError) -> int:
    return response_code(error) or ResponseCode.SYSTEM_ERROR


def _split_by_flush(appends: list[_AppendT]) -> tuple[list[_AppendT], list[_AppendT]]:
    """Those who want their answer at once, and those who wait for the flush."""
    return [one for one in appends if not one.waits_for_flush], [
        one for one in appends if one.waits_for_flush
    ]
