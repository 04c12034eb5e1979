"""Requests of operators: list and show transactions, decide and resume them by hand.

A list is returned in pages, and a page takes a bounded time, however many transactions are open: it
walks along the half queue, skips decided halves in large steps, and looks at a limited number of
the others. A decision by hand is stored like any other, with the name of the operator and the
reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from escrowmq.broker.dispatch import Channel, Handler, RequestPermissions
from escrowmq.broker.transactions.end import EndProcessor
from escrowmq.broker.transactions.history import HistoryReader, LocatedTransaction
from escrowmq.broker.turn import Turn
from escrowmq.consume.members import ProducerGroups
from escrowmq.errors import CorruptRecord, RecordNotFound, RequestRefused
from escrowmq.escrow.decisions import AlreadyDecided, InProgress
from escrowmq.escrow.records import (
    REASON_LENGTH_MAX,
    DecidedBy,
    JournalEntry,
    make_journal_record,
    parse_half,
)
from escrowmq.message import names
from escrowmq.message.record import StoredRecord
from escrowmq.message.transaction import TransactionState, Verdict
from escrowmq.remoting.bodies import (
    TransactionCursors,
    TransactionEntry,
    TransactionList,
    encode_body,
)
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import (
    ListTransactions,
    ResumeCheckHalfMessage,
    ResumeTransaction,
    SettleTransaction,
    SettleTransactionResponse,
    TransactionCursorsHeader,
    TransactionHeader,
)
from escrowmq.remoting.requests import Request
from escrowmq.sliced_work import SlicedResult, SlicedWork
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)

_VERDICTS = {verdict.value: verdict for verdict in (Verdict.COMMIT, Verdict.ROLLBACK)}
# The state in a request, and the `is_stranded` that it asks for. Without a state: both.
_STRANDED_BY_PENDING_STATE: Final = {None: None, "open": False, "stranded": True}
_DECIDED_STATES: Final = {
    state.text: state for state in (TransactionState.COMMITTED, TransactionState.ROLLED_BACK)
}
# Limits of one page:
PAGE_ENTRIES_MAX: Final = 2_000
PAGE_SCANNED_MAX: Final = 10_000  # states looked at
PAGE_READS_MAX: Final = 1_000  # decided halves read from the log
PAGE_LOOKUPS_MAX: Final = 16  # look-ups in the key index
OPERATOR_NAME_LENGTH_MAX: Final = 100


class TransactionAdmin:
    def __init__(
        self,
        store: MessageStore,
        turn: Turn,
        transactions: EndProcessor,
        producers: ProducerGroups[Channel],
    ) -> None:
        self._store = store
        self._turn = turn
        self._transactions = transactions
        self._coordinator = transactions.coordinator
        host = transactions.store_host
        self._history_reader = HistoryReader(store, transactions.coordinator, producers, host)

    def handlers(self) -> list[Handler]:
        code, permissions = RequestCode, RequestPermissions
        return [
            Handler(code.LIST_TRANSACTIONS, self.list_transactions, permissions.read_cluster),
            Handler(code.SHOW_TRANSACTION, self.show_transaction, permissions.read_cluster),
            Handler(code.TRANSACTION_CURSORS, self.show_cursors, permissions.read_cluster),
            Handler(code.SETTLE_TRANSACTION, self.settle_transaction),
            Handler(code.RESUME_TRANSACTION, self.resume_transaction),
            Handler(code.RESUME_CHECK_HALF_MESSAGE, self.resume_check_half),
        ]

    # --- list and show-----------------------------------------------------------------------------

    def list_transactions(
        self, channel: Channel, request: Request[ListTransactions], now_ms: int
    ) -> SlicedWork:
        fields = request.head.fields
        if fields.count_max < 1:
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER,
                f"countMax is {fields.count_max}, and must be 1 or more",
            )
        if fields.state in _STRANDED_BY_PENDING_STATE:
            page = yield from self._list_pending(fields, now_ms)
        elif fields.state in _DECIDED_STATES:
            page = yield from self._list_decided(fields, _DECIDED_STATES[fields.state], now_ms)
        else:
            states = ", ".join(state.text for state in TransactionState)
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER,
                f"unknown state {fields.state!r}; expected one of {states}",
            )
        channel.respond(request, body=encode_body(page))

    def _list_pending(self, fields: ListTransactions, now_ms: int) -> SlicedResult[TransactionList]:
        """Return undecided transactions in the order of the half queue, after `fields.after`."""
        coordinator, matches = self._coordinator, _matcher(fields, now_ms)
        states = coordinator.states
        count_max = min(fields.count_max, PAGE_ENTRIES_MAX)
        is_stranded = _STRANDED_BY_PENDING_STATE[fields.state]
        entries: list[TransactionEntry] = []
        queue_offset = states.first_undecided(max(fields.after, -1) + 1)
        for _ in range(PAGE_SCANNED_MAX):
            if queue_offset >= states.next_offset or len(entries) >= count_max:
                break
            half = coordinator.halves.find(queue_offset)  # None: it has moved
            if (
                half is not None
                and is_stranded in (None, half.is_stranded)
                and matches(half.topic, half.group, half.parked_ms)
                and half.checks >= (fields.checks_min or 0)
            ):
                entries.append(self._history_reader.make_entry(half))
            queue_offset = states.first_undecided(queue_offset + 1)
            yield
        more = queue_offset < states.next_offset
        next_after = queue_offset - 1 if more else -1
        return TransactionList(transactions=entries, more=more, next_after=next_after)

    def _list_decided(
        self, fields: ListTransactions, state: TransactionState, now_ms: int
    ) -> SlicedResult[TransactionList]:
        """Return decided transactions, the newest first, from before `fields.after` on."""
        states, matches = self._coordinator.states, _matcher(fields, now_ms)
        count_max = min(fields.count_max, PAGE_ENTRIES_MAX)
        first_offset = max(states.base_offset, self._store.min_offset(names.HALF_TOPIC, 0))
        entries: dict[tuple[str, str, str], TransactionEntry] = {}
        queue_offset = states.next_offset
        if fields.after >= 0:
            queue_offset = min(fields.after, queue_offset)
        scanned = reads = lookups = 0
        while queue_offset > first_offset and len(entries) < count_max:
            if (
                scanned >= PAGE_SCANNED_MAX
                or reads >= PAGE_READS_MAX
                or lookups >= PAGE_LOOKUPS_MAX
            ):
                break
            yield
            queue_offset -= 1
            scanned += 1
            if states.get(queue_offset) is not state:
                continue
            reads += 1
            record = self._read_half(queue_offset)
            properties = None if record is None else parse_half(record)
            if record is None or properties is None:
                continue
            if matches(properties.topic, properties.group, record.stored_ms):
                lookups += 1
                checks = yield from self._history_reader.count_checks(queue_offset)
                if checks >= (fields.checks_min or 0):
                    entry = self._history_reader.make_decided_entry(
                        record, properties, state, checks
                    )
                    # The newest copy of a moved half comes first: ignore the others.
                    name = entry.group, entry.topic, entry.transaction_id
                    entries.setdefault(name, entry)
        more = queue_offset > first_offset
        next_after = queue_offset if more else -1
        return TransactionList(
            transactions=list(entries.values()), more=more, next_after=next_after
        )

    def _read_half(self, queue_offset: int) -> StoredRecord | None:
        log_offset = self._store.log_offset_of(names.HALF_TOPIC, 0, queue_offset)
        if log_offset is None:
            return None
        try:
            return self._store.record_at(log_offset)
        except (CorruptRecord, RecordNotFound):
            return None

    def show_transaction(
        self, channel: Channel, request: Request[TransactionHeader], now_ms: int
    ) -> SlicedWork:
        reader = self._history_reader
        located = yield from self._locate(request.head.fields)
        history = yield from reader.read_history(located, now_ms)
        # Another client may have decided it between two slices. It can be decided only once, and is
        # moved rarely, so this ends.
        while not reader.is_current(located):
            located = yield from self._locate(request.head.fields)
            history = yield from reader.read_history(located, now_ms)
        body = encode_body(history)

        # An operator acts on a decision that is shown, so it has to be durable.
        def on_done(code: int, _: object) -> None:
            if code:
                channel.respond(
                    request, code=code, remark="the state is not flushed yet; try again"
                )
            else:
                channel.respond(request, body=body)

        self._turn.add_records([], on_done)

    def show_cursors(
        self, channel: Channel, request: Request[TransactionCursorsHeader], now_ms: int
    ) -> None:
        coordinator, states = self._coordinator, self._coordinator.states
        coordinator.advance_cursors()
        first_open = states.first_open(states.base_offset)
        cursors = TransactionCursors(
            half_cursor=coordinator.cursors.half_offset,
            half_end=self._store.max_offset(names.HALF_TOPIC, 0),
            op_cursor=coordinator.cursors.op_offset,
            op_end=self._store.max_offset(names.OP_TOPIC, 0),
            first_open=first_open if first_open < states.next_offset else None,
            open=len(coordinator.halves) - coordinator.halves.stranded_count,
            stranded=coordinator.halves.stranded_count,
            next_due=coordinator.schedule.next_due_ms(coordinator.halves),
        )
        channel.respond(request, body=encode_body(cursors))

    # --- decide and resume -----------------------------------------------------------------------

    def settle_transaction(
        self, channel: Channel, request: Request[SettleTransaction], now_ms: int
    ) -> SlicedWork:
        fields = request.head.fields
        verdict = _VERDICTS.get(fields.commit_or_rollback)
        if verdict is None:
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER,
                f"commitOrRollback is {fields.commit_or_rollback}, and must be 8 or 12",
            )
        operator = _operator_name(fields.operator, channel)
        reason = _validate_reason(fields.reason, is_required=True)
        located = yield from self._locate(fields)
        result = self._coordinator.decide(
            located.queue_offset,
            located.log_offset,
            verdict,
            group=None,
            by=DecidedBy.OPERATOR,
            by_name=operator,
            reason=reason,
            now_ms=now_ms,
        )
        if isinstance(result, InProgress):
            raise _being_decided()
        header = SettleTransactionResponse(
            transaction_id=fields.transaction_id,
            state=result.state.text,
            already=isinstance(result, AlreadyDecided),
        )

        def on_done(code: int, _: object) -> None:
            if code:
                _respond_not_durable(channel, request, code)
            else:
                channel.respond(request, header)

        if isinstance(result, AlreadyDecided):
            self._turn.add_records([], on_done)
            return
        log.info(
            "transaction decided by an operator id=%s state=%s operator=%r reason=%r peer=%s",
            fields.transaction_id,
            result.state.text,
            operator,
            reason,
            channel.address,
        )
        self._transactions.append_decision(result, on_done, now_ms=now_ms)

    def resume_transaction(
        self, channel: Channel, request: Request[ResumeTransaction], now_ms: int
    ) -> SlicedWork:
        fields = request.head.fields
        operator = _operator_name(fields.operator, channel)
        reason = _validate_reason(fields.reason, is_required=False)
        located = yield from self._locate(fields)
        self._resume(channel, request, located, operator, reason, now_ms)

    def resume_check_half(
        self, channel: Channel, request: Request[ResumeCheckHalfMessage], now_ms: int
    ) -> SlicedWork:
        """Handle RocketMQ's own request: it names the stranded message by its offset id."""
        fields = TransactionHeader(transaction_id=request.head.fields.msg_id)
        located = yield from self._locate(fields)
        self._resume(channel, request, located, _operator_name("", channel), "", now_ms)

    def _resume(
        self,
        channel: Channel,
        request: Request[Any],
        located: LocatedTransaction,
        operator: str,
        reason: str,
        now_ms: int,
    ) -> None:
        half = located.half
        if half is None or not (half.is_stranded or half.reason):
            state = TransactionState.OPEN
            if half is None:
                state = self._coordinator.states.get(located.queue_offset) or state
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER,
                f"the transaction is {state.text}; only a transaction that is "
                "stranded or set aside can be resumed",
            )
        if half.is_being_decided:
            raise _being_decided()
        if self._coordinator.read_half(half) is None:
            raise RequestRefused(ResponseCode.SYSTEM_ERROR, half.reason)
        log.info(
            "transaction resumed by an operator id=%s operator=%r reason=%r peer=%s",
            half.key.decode("utf-8", "replace"),
            operator,
            reason,
            channel.address,
        )
        peer = f"{DecidedBy.OPERATOR} {operator}"
        entry = JournalEntry(half.queue_offset, "resumed", half.checks, peer, reason)
        self._turn.add_records([make_journal_record(entry, now_ms=now_ms)], waits_for_flush=False)

        def on_done(code: int) -> None:
            if code:
                _respond_not_durable(channel, request, code)
            else:
                channel.respond(request)

        self._transactions.move_half(half, now_ms, on_done)

    def _locate(self, fields: TransactionHeader) -> SlicedResult[LocatedTransaction]:
        name = fields.transaction_id
        reader = self._history_reader
        located = yield from reader.find(name, fields.producer_group, fields.half_offset)
        if located is None:
            raise RequestRefused(
                ResponseCode.QUERY_NOT_FOUND,
                f"this broker has no transaction {name[:100]!r}, or it has expired",
            )
        return located


def _matcher(fields: ListTransactions, now_ms: int) -> Callable[[str, str, int], bool]:
    latest_ms = now_ms - (fields.older_than_ms or 0)

    def matches(topic: str, group: str, parked_ms: int) -> bool:
        return (
            parked_ms <= latest_ms
            and fields.topic in (None, topic)
            and fields.group in (None, group)
        )

    return matches


def _being_decided() -> RequestRefused:
    return RequestRefused(
        ResponseCode.SYSTEM_BUSY, "the transaction is being decided right now; try again"
    )


def _operator_name(name: str, channel: Channel) -> str:
    """Return the name to record: the given one, or else the address of the client."""
    if len(name) > OPERATOR_NAME_LENGTH_MAX or not name.isprintable():
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER,
            f"the operator's name must have at most {OPERATOR_NAME_LENGTH_MAX} printable "
            "characters",
        )
    return name.strip() or channel.address


def _validate_reason(text: str, *, is_required: bool) -> str:
    reason = text.strip()
    if is_required and not reason:
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER, "a decision by hand needs a reason; it is stored"
        )
    if len(reason) > REASON_LENGTH_MAX or not reason.isprintable():
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER,
            f"the reason must be one line of at most {REASON_LENGTH_MAX} printable characters",
        )
    return reason


def _respond_not_durable(channel: Channel, request: Request[Any], code: int) -> None:
    channel.respond(
        request,
        code=code,
        remark="the decision is stored but not flushed yet; run `escrowmq transaction show` "
        "before you retry",
    )
