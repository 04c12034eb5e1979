"""Bodies of the requests that only our broker knows (`headers_transaction.py`)."""

from __future__ import annotations

import msgspec

from escrowmq.wire.bodies import JsonBody
from escrowmq.wire.command import Int32, Int64


class HalfPlaces(JsonBody, frozen=True, kw_only=True):
    """Halves, each as its queue offset and its log offset: what the send's answer said."""

    halves: list[tuple[Int64, Int64]]


class WinningAttempt(JsonBody, frozen=True, kw_only=True):
    attempt: str
    count: Int64  # of its halves: a decision over other than all of them is refused


class BatchWinners(JsonBody, frozen=True, kw_only=True):
    winners: list[WinningAttempt]
    fingerprint: str = ""  # of what the batch was made from, for whoever compares


class WriterState(JsonBody, frozen=True, kw_only=True):
    """A writer, and the last batch that it decided; -1 if none."""

    writer: str
    fence: Int64 = 0
    batch: Int64 = -1
    winners: list[WinningAttempt] = msgspec.field(default_factory=list)
    fingerprint: str = ""
    run: str = ""  # that registered last, if it said what it is called


class TransactionEntry(JsonBody, frozen=True, kw_only=True, omit_defaults=True):
    """One transaction, as a list shows it. Times are milliseconds since 1970."""

    transaction_id: str
    group: str
    topic: str
    queue_id: Int32
    state: str
    parked_at: Int64
    checks: Int32
    next_due: Int64 | None = None
    queue_offset: Int64
    log_offset: Int64
    size: Int64
    why: str = ""


class TransactionList(JsonBody, frozen=True, kw_only=True):
    transactions: list[TransactionEntry] = msgspec.field(default_factory=list)
    more: bool = False
    next_after: Int64 = -1  # if there is more: where to go on


class TransactionStep(JsonBody, frozen=True, kw_only=True):
    at: Int64  # 0: nobody noted when
    what: str  # parked, asked, unknown, stranded, resumed, appended_again, committed, rolled_back
    who: str = ""
    reason: str = ""  # of whoever decided
    detail: str = ""


class TransactionStory(JsonBody, frozen=True, kw_only=True):
    transaction: TransactionEntry
    steps: list[TransactionStep] = msgspec.field(default_factory=list)
    pending_because: str = ""
