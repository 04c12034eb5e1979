"""The rule for checks as a table: what happens now with an undecided half."""

from __future__ import annotations

from typing import Any

import pytest

from escrowmq.config import TransactionConfig
from escrowmq.escrow.checks import (
    RETRY_DELAY_MS,
    Check,
    FollowWriter,
    Strand,
    Wait,
    next_step,
)
from escrowmq.escrow.half_table import Attempt, Half, PythonHalf
from escrowmq.escrow.writers import Writer, WriterTable

NOW_MS = 1_000_000_000
HOUR_MS = 3_600_000
AGE_MAX_MS = 72 * HOUR_MS
CONFIG = TransactionConfig(
    check_interval_ms=30_000, checks_max=3, check_intervals_ms=(("slow topic", 90_000),)
)
WRITERS = WriterTable([Writer("w", fence=5, batch=7)])


def new_half(**changes: Any) -> Half:
    """Return a half that is due now and was never checked. `changes` replaces fields."""
    fields: dict[str, Any] = {
        "queue_offset": 0,
        "log_offset": 0,
        "size": 100,
        "topic": "T",
        "queue_id": 0,
        "group": "p",
        "key": b"k",
        "parked_ms": NOW_MS - 6_000,
        "due_ms": NOW_MS,
    }
    return PythonHalf(**{**fields, **changes})


def new_attempt(*, writer: str = "w", batch: int = 8, fence: int = 5) -> Attempt:
    return Attempt(writer, batch, "attempt", fence)


TABLE: list[tuple[str, dict[str, Any], Strand | Check | Wait | FollowWriter]] = [
    ("due", {}, Check()),
    ("overdue", {"due_ms": NOW_MS - HOUR_MS}, Check()),
    ("not due yet", {"due_ms": NOW_MS + 1}, Wait(NOW_MS + 1)),
    ("one check left", {"checks": 2}, Check()),
    ("checked too often", {"checks": 3}, Strand("checked 3 times: 3 without an answer")),
    (
        "answered with UNKNOWN every time",
        {"checks": 3, "unknown_answers": 3, "last_remark": "database is down"},
        Strand("checked 3 times: 3 UNKNOWN, last: database is down"),
    ),
    (
        "answered with UNKNOWN once",
        {"checks": 3, "unknown_answers": 1},
        Strand("checked 3 times: 1 UNKNOWN, 2 without an answer"),
    ),
    (
        "UNKNOWN after the send, then no answer",
        {"checks": 3, "last_remark": "timeout"},
        Strand("checked 3 times: 3 without an answer, last: timeout"),
    ),
    ("at the maximum age", {"parked_ms": NOW_MS - 72 * HOUR_MS}, Check()),
    (
        "too old",
        {"parked_ms": NOW_MS - 72 * HOUR_MS - 1},
        Strand("open for more than 72 hours"),
    ),
    ("too old, but not due", {"parked_ms": 0, "due_ms": NOW_MS + 5}, Wait(NOW_MS + 5)),
    ("being decided", {"is_being_decided": True}, Wait(NOW_MS + RETRY_DELAY_MS)),
    (
        "being decided and checked too often",
        {"is_being_decided": True, "checks": 3},
        Wait(NOW_MS + RETRY_DELAY_MS),
    ),
    (
        "being decided and not due yet",
        {"is_being_decided": True, "due_ms": NOW_MS + 5_000},
        Wait(NOW_MS + 5_000),
    ),
    ("stranded", {"is_stranded": True, "reason": "checked 3 times"}, Wait(None)),
    ("unreadable", {"reason": "unreadable: bad CRC"}, Wait(None)),
    ("attempt can still win", {"attempt": new_attempt()}, Wait(NOW_MS + 30_000)),
    (
        "attempt can still win, own interval of the topic",
        {"attempt": new_attempt(), "topic": "slow topic"},
        Wait(NOW_MS + 90_000),
    ),
    ("attempt of an unknown writer", {"attempt": new_attempt(writer="x")}, Wait(NOW_MS + 30_000)),
    ("attempt of the decided batch", {"attempt": new_attempt(batch=7)}, FollowWriter("w")),
    ("attempt of an earlier batch", {"attempt": new_attempt(batch=6)}, FollowWriter("w")),
    ("attempt with an old fence", {"attempt": new_attempt(fence=4)}, FollowWriter("w")),
    (
        "attempt that is too old",
        {"attempt": new_attempt(), "parked_ms": 0},
        Strand("open for more than 72 hours"),
    ),
]


@pytest.mark.parametrize(
    ("changes", "step"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_next_step(changes: dict[str, Any], step: Strand | Check | Wait | FollowWriter) -> None:
    assert next_step(new_half(**changes), NOW_MS, CONFIG, WRITERS, age_max_ms=AGE_MAX_MS) == step


def test_next_step_changes_nothing() -> None:
    for _, changes, _ in TABLE:
        half = new_half(**changes)
        next_step(half, NOW_MS, CONFIG, WRITERS, age_max_ms=AGE_MAX_MS)
        assert half == new_half(**changes)
