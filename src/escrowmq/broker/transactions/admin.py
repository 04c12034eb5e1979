"""What operators ask: which transactions are pending and why, and what is to become of them.

A list is given in pages, each over soon, however many are open: it walks along the half queue, past
what is settled in great steps, and looks at a bounded number of the rest. A decision by hand
goes the way of any other: first a record in the log, with who decided and why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from escrowmq.broker.dispatch import Line
from escrowmq.broker.transactions.end import Transactions
from escrowmq.broker.transactions.history import Named, Stories
from escrowmq.broker.turn import Turn
from escrowmq.consume.members import ProducerGroups
from escrowmq.errors import (
    CorruptRecord,
    NoSuchRecord,
    NoSuchTransaction,
    RequestRefused,
    TransactionContradicted,
)
from escrowmq.escrow.coordinator import Recorded
from escrowmq.escrow.half_table import Half
from escrowmq.escrow.records import Step, facts_of, journal_of
from escrowmq.message import names
from escrowmq.message.record import StoredRecord
from escrowmq.message.transaction import State, Verdict
from escrowmq.remoting.bodies import TransactionEntry, TransactionList, encode_body
from escrowmq.remoting.codes import ResponseCode
from escrowmq.remoting.headers import (
    ListTransactions,
    ResumeCheckHalfMessage,
    ResumeTransaction,
    SettleTransaction,
    SettleTransactionAnswer,
    TransactionName,
)
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import answer, succeed
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)

_VERDICTS = {verdict.value: verdict for verdict in (Verdict.COMMIT, Verdict.ROLLBACK)}
_PENDING: Final = {None: None, "open": False, "stranded": True}  # whether it is to be stranded
_SETTLED: Final = {state.text: state for state in (State.COMMITTED, State.ROLLED_BACK)}
LISTED_MAX: Final = 2_000  # in one answer
LOOKED_AT_MAX: Final = 10_000  # for one answer
READ_MAX: Final = 1_000  # of settled ones, which are read from the log
LOOKED_UP_MAX: Final = 16  # of these, in the key index
NAME_MAX: Final = 100
REASON_MAX: Final = 500


class Operators:
    def __init__(
        self,
        store: MessageStore,
        turn: Turn,
        transactions: Transactions,
        producers: ProducerGroups,
    ) -> None:
        self._store = store
        self._turn = turn
        self._transactions = transactions
        self._escrow = transactions.escrow
        host = transactions.answers.store_host
        self._stories = Stories(store, transactions.escrow, producers, host)

    # --- looking ---------------------------------------------------------------------------------

    def list(self, line: Line, request: Request[ListTransactions], now_ms: int) -> None:
        fields = request.head.fields
        if fields.count_max < 1:
            raise RequestRefused(ResponseCode.INVALID_PARAMETER, "countMax must be 1 or more")
        if fields.state in _PENDING:
            page = self._pending(fields, now_ms)
        elif fields.state in _SETTLED:
            page = self._settled(fields, _SETTLED[fields.state], now_ms)
        else:
            states = ", ".join(state.text for state in State)
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER, f"state {fields.state!r} is none of {states}"
            )
        line.write(answer(request, body=encode_body(page)))

    def _pending(self, fields: ListTransactions, now_ms: int) -> TransactionList:
        """In the order of the half queue, from behind `after` on."""
        escrow, wants = self._escrow, _matcher(fields, now_ms)
        count_max = min(fields.count_max, LISTED_MAX)
        stranded = _PENDING[fields.state]
        found: list[TransactionEntry] = []
        at = escrow.settled.first_unsettled(max(fields.after, -1) + 1)
        for _ in range(LOOKED_AT_MAX):
            if at >= escrow.settled.next or len(found) >= count_max:
                break
            half = escrow.open.find(at)  # None: it lives at another place
            if (
                half is not None
                and stranded in (None, half.is_stranded)
                and wants(half.topic, half.group, half.parked_ms)
                and half.checks >= (fields.checks_min or 0)
            ):
                found.append(self._stories.entry_of(half))
            at = escrow.settled.first_unsettled(at + 1)
        more = at < escrow.settled.next
        return TransactionList(transactions=found, more=more, next_after=at - 1 if more else -1)

    def _settled(self, fields: ListTransactions, state: State, now_ms: int) -> TransactionList:
        """The newest first; `after` is the place before which to go on."""
        settled, wants = self._escrow.settled, _matcher(fields, now_ms)
        count_max = min(fields.count_max, LISTED_MAX)
        first = max(settled.base, self._store.min_offset(names.HALF_TOPIC, 0))
        found: dict[str, TransactionEntry] = {}
        at = settled.next if fields.after < 0 else min(fields.after, settled.next)
        looked_at = read = looked_up = 0
        while at > first and len(found) < count_max:
            if looked_at >= LOOKED_AT_MAX or read >= READ_MAX or looked_up >= LOOKED_UP_MAX:
                break
            at -= 1
            looked_at += 1
            if settled.state(at) is not state:
                continue
            read += 1
            record = self._half_at(at)
            facts = None if record is None else facts_of(record)
            if record is None or facts is None:
                continue
            if wants(facts.topic, facts.group, record.stored_ms):
                looked_up += 1
                checks = self._stories.checks_of(at)
                if checks >= (fields.checks_min or 0):
                    entry = self._stories.entry_of_settled(record, facts, state, checks)
                    found.setdefault(entry.transaction_id, entry)  # not its older copies
        more = at > first
        entries = [*found.values()]
        return TransactionList(transactions=entries, more=more, next_after=at if more else -1)

    def _half_at(self, queue_offset: int) -> StoredRecord | None:
        log_offset = self._store.entry_at(names.HALF_TOPIC, 0, queue_offset)
        if log_offset is None:
            return None
        try:
            return self._store.record_at(log_offset)
        except (CorruptRecord, NoSuchRecord):
            return None

    def show(self, line: Line, request: Request[TransactionName], now_ms: int) -> None:
        named = self._named(request.head.fields.transaction_id)
        try:
            story = self._stories.tell(named, now_ms)
        except (CorruptRecord, NoSuchRecord) as error:
            raise RequestRefused(ResponseCode.SYSTEM_ERROR, str(error)) from error
        told = answer(request, body=encode_body(story))
        # What it says must be durable: who reads of a decision acts on it.
        self._turn.put([], lambda code, _: line.write(told if not code else _failed(request, code)))

    # --- deciding --------------------------------------------------------------------------------

    def settle(self, line: Line, request: Request[SettleTransaction], now_ms: int) -> None:
        fields = request.head.fields
        verdict = _VERDICTS.get(fields.commit_or_rollback)
        if verdict is None:
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER,
                f"commitOrRollback {fields.commit_or_rollback} is not 8 or 12",
            )
        by, reason = _operator(fields.operator, line), _reason(fields.reason, is_needed=True)
        named = self._named(fields.transaction_id)
        if named.half is not None:
            _refuse_deciding(named.half)
        change = _refusing(
            lambda: self._escrow.end(
                *(named.queue_offset, named.log_offset, None, verdict),
                by=by,
                reason=reason,
                now_ms=now_ms,
            )
        )
        already = isinstance(change, Recorded)
        told = SettleTransactionAnswer(
            transaction_id=fields.transaction_id, state=change.state.text, already=already
        )

        def done(code: int, _: object) -> None:
            line.write(_failed(request, code) if code else answer(request, told))

        if isinstance(change, Recorded):
            self._turn.put([], done)
            return
        log.info(
            "by hand id=%s state=%s by=%r reason=%r peer=%s",
            *(fields.transaction_id, change.state.text, by, reason, line.peer),
        )
        self._transactions.append(change, done, now_ms=now_ms)

    def resume(self, line: Line, request: Request[ResumeTransaction], now_ms: int) -> None:
        fields = request.head.fields
        by, reason = _operator(fields.operator, line), _reason(fields.reason, is_needed=False)
        self._resume(line, request, self._named(fields.transaction_id), by, reason, now_ms)

    def resume_check(
        self, line: Line, request: Request[ResumeCheckHalfMessage], now_ms: int
    ) -> None:
        """RocketMQ's way: by the offset id of the message in the topic of stranded ones."""
        named = self._named(request.head.fields.msg_id)
        self._resume(line, request, named, _operator("", line), "", now_ms)

    def _resume(
        self, line: Line, request: Request[Any], named: Named, by: str, reason: str, now_ms: int
    ) -> None:
        half = named.half
        if half is None or not half.is_stranded:
            state = self._escrow.settled.state(named.queue_offset) or State.OPEN
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER,
                f"it is {state.text if half is None else State.OPEN.text}, and only stranded "
                "transactions can be resumed",
            )
        _refuse_deciding(half)
        if self._escrow.read(half) is None:
            raise RequestRefused(ResponseCode.SYSTEM_ERROR, half.why)
        log.info("resumed by hand id=%s by=%r reason=%r peer=%s", half.key, by, reason, line.peer)
        step = Step(half.queue_offset, "resumed", half.checks, f"{by}\n{reason}")
        self._turn.put([journal_of(step, now_ms=now_ms)], waits=False)

        def done(code: int) -> None:
            line.write(_failed(request, code) if code else succeed(request))

        self._transactions.renew(half, now_ms, done)

    def _named(self, name: str) -> Named:
        named = self._stories.find(name)
        if named is None:
            raise RequestRefused(
                ResponseCode.QUERY_NOT_FOUND,
                f"no transaction {name[:100]!r} is here, or it is gone from the log",
            )
        return named


def _matcher(fields: ListTransactions, now_ms: int) -> Callable[[str, str, int], bool]:
    topic, group = fields.topic, fields.group
    newest_ms = now_ms - (fields.older_than_ms or 0)

    def wants(its_topic: str, its_group: str, parked_ms: int) -> bool:
        return parked_ms <= newest_ms and topic in (None, its_topic) and group in (None, its_group)

    return wants


def _refuse_deciding(half: Half) -> None:
    if half.is_deciding:
        raise RequestRefused(ResponseCode.SYSTEM_BUSY, "it is being decided just now: ask again")


def _refusing(step: Callable[[], Any]) -> Any:
    try:
        return step()
    except TransactionContradicted as error:
        raise RequestRefused(ResponseCode.TRANSACTION_CONTRADICTED, str(error)) from error
    except NoSuchTransaction as error:
        raise RequestRefused(ResponseCode.QUERY_NOT_FOUND, str(error)) from error
    except (CorruptRecord, NoSuchRecord) as error:
        raise RequestRefused(ResponseCode.SYSTEM_ERROR, str(error)) from error


def _operator(name: str, line: Line) -> str:
    """As it is recorded: who says so, or where he sits."""
    if len(name) > NAME_MAX or not name.isprintable():
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER,
            f"an operator's name has at most {NAME_MAX} printable characters",
        )
    return f"operator {name.strip() or line.peer}"


def _reason(text: str, *, is_needed: bool) -> str:
    reason = text.strip()
    if is_needed and not reason:
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER, "a decision by hand needs a reason, which is kept"
        )
    if len(reason) > REASON_MAX or not reason.isprintable():
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER,
            f"a reason has at most {REASON_MAX} printable characters, on one line",
        )
    return reason


def _failed(request: Request[Any], code: int) -> bytes:
    return answer(request, code=code, remark="it is not durable: look again before you repeat it")
