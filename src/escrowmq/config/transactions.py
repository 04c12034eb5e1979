"""Settings of transactional messages."""

from __future__ import annotations

from dataclasses import dataclass

from escrowmq.config.groups import _Group, _ms, _setting, _yes_no
from escrowmq.config.kinds import PerName, Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionConfig(_Group):
    """Halves: when their producer is asked, and how often."""

    immunity_ms: int = _ms(
        6_000, "transactionTimeOut", "A half is left alone for so long.", at_least=0
    )
    checks_max: int = _setting(
        15, Whole(1), "transactionCheckMax", "checks", "After so many a half is stranded."
    )
    check_interval_ms: int = _ms(
        30_000, "transactionCheckInterval", "Time between two checks of one half."
    )
    refuses_halves: bool = _yes_no(
        False, "rejectTransactionMessage", "Whether transactional messages are refused."
    )
    check_backoff_percent: int = _setting(
        100,
        Whole(100, 1_000),
        "escrowCheckBackoffPercent",
        "%",
        "The time between two checks, against the time before: 100 keeps it, 200 doubles it.",
    )
    immunities_ms: tuple[tuple[str, int], ...] = _setting(
        (),
        PerName(),
        "escrowTimeOuts",
        "ms",
        "For single topics or groups, instead of transactionTimeOut.",
    )
    check_intervals_ms: tuple[tuple[str, int], ...] = _setting(
        (),
        PerName(),
        "escrowCheckIntervals",
        "ms",
        "For single topics or groups, instead of transactionCheckInterval.",
    )
    open_max: int = _setting(
        2_000_000, Whole(1), "escrowOpenMax", "transactions", "At most so many are open."
    )
    group_open_max: int = _setting(
        1_000_000,
        Whole(1),
        "escrowOpenPerGroupMax",
        "transactions",
        "At most so many of one producer group are open.",
    )
    open_bytes_max: int = _setting(
        64 << 30,
        Whole(1, 1 << 50),
        "escrowOpenBytesMax",
        "bytes",
        "At most so much of the log is open transactions.",
    )
    group_open_bytes_max: int = _setting(
        32 << 30,
        Whole(1, 1 << 50),
        "escrowOpenBytesPerGroupMax",
        "bytes",
        "At most so much of the log is open transactions of one producer group.",
    )
