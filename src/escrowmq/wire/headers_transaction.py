"""Headers of requests that only our broker knows: many halves at once, writers, operators.

A RocketMQ broker answers them with REQUEST_CODE_NOT_SUPPORTED; a client that gets that falls back
to one END_TRANSACTION per half. Bodies are JSON, described in `bodies_transaction.py`.
"""

from __future__ import annotations

from escrowmq.wire.command import Int32, Int64
from escrowmq.wire.headers import Header


class EndTransactions(Header, frozen=True, kw_only=True):
    """The body names the halves."""

    producer_group: str
    commit_or_rollback: Int32  # 8 commit, 12 rollback


class EndTransactionsAnswer(Header, frozen=True, kw_only=True):
    state: str  # committed, rolled_back
    count: Int32  # of halves that were still open


class WriterName(Header, frozen=True, kw_only=True):
    writer: str


class RegisterWriter(Header, frozen=True, kw_only=True):
    writer: str
    run: str = ""  # one life of the writer: it gets one fence, and loses it for good to the next
    fence: Int64 | None = None  # only if this is still his: whoever gives up disturbs nobody


class DecideBatch(Header, frozen=True, kw_only=True):
    """The body names the attempts that won."""

    writer: str
    batch: Int64
    fence: Int64
    last: bool = False  # he will decide nothing more, and need not be remembered for ever


class ListTransactions(Header, frozen=True, kw_only=True):
    """Those that are not settled in the order they were parked, those that are the newest first."""

    state: str | None = None  # open, stranded; both without; or committed, or rolled_back
    topic: str | None = None
    group: str | None = None
    older_than_ms: Int64 | None = None
    checks_min: Int32 | None = None
    after: Int64 = -1  # go on where the list before ended: its `next_after`
    count_max: Int32 = 1_000


class TransactionName(Header, frozen=True, kw_only=True):
    transaction_id: str


class SettleTransaction(Header, frozen=True, kw_only=True):
    transaction_id: str
    commit_or_rollback: Int32
    reason: str
    operator: str = ""


class SettleTransactionAnswer(Header, frozen=True, kw_only=True):
    transaction_id: str
    state: str  # committed, rolled_back
    already: bool = False  # it was so before


class ResumeTransaction(Header, frozen=True, kw_only=True):
    transaction_id: str
    reason: str = ""
    operator: str = ""
