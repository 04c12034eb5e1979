"""The turn: everything that one iteration of the event loop appends goes to the log in one write.

Processors add records while the turn lasts. `Turn.append_all`, once at its end, stores all of them
and lets every request be answered. A request is answered only when its records are as durable as
it asked for.

    add_send, add_send_records    messages of clients
    add(PendingAppend, records)   records whose owner has to do something when they are stored
    add_records                   the same with callbacks, for what is rare

If the store refuses a record, the records of every owner are appended separately, so that only the
owner of that record gets the error. An owner that raises while it is told the result, for example
because its response does not fit into a frame, costs nobody else the response.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

import msgspec

from escrowmq.broker.dispatch import Channel, respond_failure, response_code
from escrowmq.broker.statistics import BrokerCounters
from escrowmq.errors import RecordRefused, StoreError, StoreFailed, panic_as_exception
from escrowmq.message.batch import Appendable, RecordRun
from escrowmq.message.record import NewRecord
from escrowmq.remoting.codes import ResponseCode
from escrowmq.remoting.requests import Request
from escrowmq.store.commit_log import AppendResult
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)

_SUCCESS: Final = int(ResponseCode.SUCCESS)  # a plain int is formatted faster than an enum member

# Called with the response code and the positions of the records; without any if not stored.
DoneCallback = Callable[[int, Sequence[AppendResult]], None]
# Called with the end of an append and a callback. The callback is called once: with None when the
# append is durable, with FlushTimeout if it is not in time, with another StoreError if it failed.
WhenFlushed = Callable[[int, Callable[[StoreError | None], None]], None]


class PendingAppend(Protocol):
    """The owner of records in the turn's batch: `count` records from `first_index` on.

    Both methods get the results of the whole turn. A turn has hundreds of owners, most of them
    with one or two records, and a slice for each would cost more than an index.
    """

    first_index: int  # set by the turn
    count: int
    waits_for_flush: bool  # whether on_done() waits for the flush, if the broker flushes

    def on_stored(self, results: Sequence[AppendResult]) -> None:
        """Update memory: the records are in the log. Called before anybody can read them."""

    def on_done(self, code: int, results: Sequence[AppendResult]) -> None:
        """Respond: the records are durable, or could not be stored (then `results` is empty)."""


class _PendingSend(msgspec.Struct, gc=False):
    """A send: `count` records from `first_index` on, or one run of records.

    Sends are no PendingAppends. They do nothing when they are stored, and the turn counts and
    answers all of them in one loop, without a call for each.
    """

    channel: Channel
    request: Request[Any]
    first_index: int
    count: int
    is_single: bool  # one message
    queue_id: int  # that was asked for, even if the record is stored elsewhere first
    waits_for_flush: bool


class _PendingRecords(msgspec.Struct, gc=False):
    """Records with callbacks."""

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
        """`when_flushed`: None answers without waiting for a flush. `wall_ms`: converts the
        broker's time to the time with which records are stamped."""
        self._store = store
        self._wall_ms = wall_ms
        self._when_flushed = when_flushed
        self._messages_arrived = messages_arrived
        self._counters = BrokerCounters() if counters is None else counters
        self._records: list[Appendable] = []
        self._sends: list[_PendingSend] = []
        self._pending: list[PendingAppend] = []

    # --- while the turn lasts --------------------------------------------------------------------

    def add_send(
        self, channel: Channel, request: Request[Any], record: NewRecord, queue_id: int
    ) -> None:
        """Add one message of a client that waits for the flush."""
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
        """Add the messages of one send request."""
        first_index, count = len(self._records), len(records)
        is_single = count == 1 and type(records[0]) is not RecordRun
        self._sends.append(
            _PendingSend(channel, request, first_index, count, is_single, queue_id, waits_for_flush)
        )
        self._records += records

    def add(self, pending: PendingAppend, records: Sequence[Appendable]) -> None:
        """Add records that are stored together or not at all. `pending.count` is their number."""
        pending.first_index = len(self._records)
        self._pending.append(pending)
        self._records += records

    def add_records(
        self,
        records: Sequence[Appendable],
        on_done: DoneCallback | None = None,
        *,
        on_stored: Callable[[Sequence[AppendResult]], None] | None = None,
        waits_for_flush: bool = True,
    ) -> None:
        """Add records that are stored together or not at all.

        `on_stored` is called as soon as they are in the log; `on_done` when they are as durable
        as a send would be, or cannot be stored. Without records, `on_done` is called when
        everything that is in the log at the end of this turn is durable.
        """
        self.add(_PendingRecords(len(records), on_stored, on_done, waits_for_flush), records)

    @property
    def has_pending(self) -> bool:
        """Whether something was added since the last append, for the next one."""
        return bool(self._pending or self._sends)

    # --- when it ends ----------------------------------------------------------------------------

    def append_all(self, now_ms: int) -> None:
        """Append all records that were added, in one write, and respond."""
        if not self._records and not self._pending:
            return
        records, self._records = self._records, []
        sends, self._sends = self._sends, []
        pending, self._pending = self._pending, []
        try:
            results = self._store.append(records, now_ms=self._wall_ms(now_ms)) if records else []
        except RecordRefused as error:
            if len(sends) + len(pending) == 1:
                self._refuse_all(sends, pending, error)
            else:
                self._append_separately(sends, pending, records, now_ms)
            return
        except StoreError as error:
            self._refuse_all(sends, pending, error)
            return
        except Exception as error:  # a bug must not leave clients without a response
            log.exception("append failed records=%d", len(records))
            self._refuse_all(sends, pending, StoreFailed(f"internal error: {error}"))
            return
        try:
            for append in pending:
                append.on_stored(results)
        except BaseException as raised:  # a panic of the native table is no Exception
            # The records are in the log, but memory does not know what they mean: a decision could
            # be made twice. Only a restart reads the truth, so nothing more may be written.
            failure = panic_as_exception(raised)
            log.exception("stored records could not be applied records=%d", len(records))
            self._store.fail(failure)
            self._respond_all(sends, pending, results, ResponseCode.SYSTEM_ERROR)
            return
        try:
            self._counters.record_append(sends, records, results)
            self._messages_arrived(records)
        except Exception:
            log.exception("stored records not announced records=%d", len(records))
        self._respond_when_durable(sends, pending, results)

    def fail_all(self, error: StoreError) -> None:
        """Refuse everything that was added, because something it depends on was not stored."""
        sends, self._sends = self._sends, []
        pending, self._pending = self._pending, []
        self._records = []
        self._refuse_all(sends, pending, error)

    def _respond_when_durable(
        self, sends: list[_PendingSend], pending: list[PendingAppend], results: list[AppendResult]
    ) -> None:
        record_responses = self._counters.record_responses
        start_s = self._counters.turn_start_s()
        if self._when_flushed is None:
            self._respond_all(sends, pending, results, _SUCCESS)
            record_responses(sends, _SUCCESS, start_s)
            return
        sends_now, sends_later = _split_by_flush(sends)
        pending_now, pending_later = _split_by_flush(pending)
        self._respond_all(sends_now, pending_now, results, _SUCCESS)
        record_responses(sends_now, _SUCCESS, start_s)
        if sends_later or pending_later:
            for send in sends_later:
                # Its body is in the log, and is a view of a buffer that may be much longer.
                request = send.request
                send.request = Request(request.head, b"", request.serializer)

            def on_flushed(error: StoreError | None) -> None:
                code = _SUCCESS if error is None else _response_code(error)
                self._respond_all(sends_later, pending_later, results, code)
                record_responses(sends_later, code, start_s)

            self._when_flushed(self._store.end, on_flushed)

    def _append_separately(
        self,
        sends: list[_PendingSend],
        pending: list[PendingAppend],
        records: list[Appendable],
        now_ms: int,
    ) -> None:
        """Append the records of every owner alone: one refused record must not fail the others."""
        appends: list[_PendingSend | PendingAppend] = [*sends, *pending]
        for append in sorted(appends, key=lambda append: append.first_index):
            self._records = records[append.first_index : append.first_index + append.count]
            append.first_index = 0
            self._sends = [append] if isinstance(append, _PendingSend) else []
            self._pending = [] if isinstance(append, _PendingSend) else [append]
            self.append_all(now_ms)

    def _refuse_all(
        self, sends: list[_PendingSend], pending: list[PendingAppend], error: StoreError
    ) -> None:
        code = _response_code(error)
        for send in sends:
            self._counters.refused[send.request.head.code, code] += 1
            try:
                send.channel.respond(send.request, code=code, remark=str(error))
            except Exception:
                log.exception("send not responded to peer=%s", send.channel.address)
        for append in pending:
            _finish(append, code, ())

    def _respond_all(
        self,
        sends: list[_PendingSend],
        pending: list[PendingAppend],
        results: list[AppendResult],
        code: int,
    ) -> None:
        for append in pending:
            _finish(append, code, results)
        for send in sends:
            try:
                if send.is_single:
                    result = results[send.first_index]
                    log_offset, queue_offset = result.log_offset, result.queue_offset
                    send.channel.respond_send(
                        send.request, log_offset, send.queue_id, queue_offset, code
                    )
                else:
                    self._respond_batch(send, results, code)
            except Exception as error:  # it is stored, but its own response cannot be made
                respond_failure(send.channel, send.request, error)

    def _respond_batch(self, send: _PendingSend, results: list[AppendResult], code: int) -> None:
        send_results = results[send.first_index : send.first_index + send.count]
        run = send_results[0].run
        log_offsets = run.log_offsets if run else [result.log_offset for result in send_results]
        if send.request.head.fields.bulk:
            log_offsets = log_offsets[:1]  # a bulk sender needs no ids of single messages
        send.channel.respond_send_batch(
            send.request, log_offsets, send.queue_id, send_results[0].queue_offset, code
        )


def _finish(append: PendingAppend, code: int, results: Sequence[AppendResult]) -> None:
    try:
        append.on_done(code, results)
    except Exception:
        log.exception("stored records not responded to owner=%s", type(append).__name__)


def _response_code(error: StoreError) -> int:
    return response_code(error) or ResponseCode.SYSTEM_ERROR


def _split_by_flush(appends: list[_AppendT]) -> tuple[list[_AppendT], list[_AppendT]]:
    """Return those that respond at once, and those that wait for the flush."""
    at_once = [append for append in appends if not append.waits_for_flush]
    return at_once, [append for append in appends if append.waits_for_flush]
