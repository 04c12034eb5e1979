"""Transactions as people and programs read them: rows of a table, fields, a story, JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from escrowmq.cli.cluster import Listed, Told
from escrowmq.cli.record import printable, utc
from escrowmq.cli.table import Column, table_lines
from escrowmq.wire.bodies_transaction import TransactionEntry, TransactionStep

_COLUMNS: Final = (
    Column("TRANSACTION"),  # never cut, or nobody could copy it
    Column("STATE"),
    Column("GROUP", gives_way=True),
    Column("TOPIC", gives_way=True),
    Column("AGE"),
    Column("CHECKS"),
    Column("NEXT DUE"),
)
_SETTLED: Final = ("committed", "rolled_back")
_WHATS: Final = {"unknown": "answered", "appended_again": "appended again"}


# --- for programs --------------------------------------------------------------------------------


def entry_json(listed: Listed) -> dict[str, Any]:
    entry = listed.entry
    return {
        "transaction_id": entry.transaction_id,
        "group": entry.group,
        "topic": entry.topic,
        "state": entry.state,
        "parked_at": utc(entry.parked_at),
        "checks": entry.checks,
        "next_due": None if entry.next_due is None else utc(entry.next_due),
        "broker": listed.broker.name,
        "queue_id": entry.queue_id,
        "queue_offset": entry.queue_offset,
        "log_offset": entry.log_offset,
        "size": entry.size,
        "why": entry.why,
    }


def story_json(told: Told) -> dict[str, Any]:
    story = told.story
    return {
        **entry_json(Listed(told.broker, story.transaction)),
        "pending_because": story.pending_because,
        "steps": [
            {
                "at": utc(step.at) if step.at else None,
                "what": step.what,
                "who": step.who,
                "reason": step.reason,
                "detail": step.detail,
            }
            for step in story.steps
        ],
    }


# --- a table -------------------------------------------------------------------------------------


def pending_lines(rows: Iterable[Listed], now_ms: int, width: int | None) -> Iterator[str]:
    return table_lines(_COLUMNS, (_cells(listed.entry, now_ms) for listed in rows), width)


def _cells(entry: TransactionEntry, now_ms: int) -> tuple[str, ...]:
    return (
        printable(entry.transaction_id),
        entry.state,
        printable(entry.group),
        printable(entry.topic),
        duration_text(now_ms - entry.parked_at),
        str(entry.checks),
        _due_text(entry, now_ms),
    )


def _due_text(entry: TransactionEntry, now_ms: int) -> str:
    if entry.next_due is None:
        return "-"
    left_ms = entry.next_due - now_ms
    return f"in {duration_text(left_ms)}" if left_ms > 0 else f"since {duration_text(-left_ms)}"


def duration_text(ms: int) -> str:
    seconds = max(0, ms) // 1000
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


# --- one of them ---------------------------------------------------------------------------------


def field_lines(told: Told) -> Iterator[str]:
    fields = story_json(told)
    steps = fields.pop("steps")
    for name, value in fields.items():
        yield f"{name:<16} {'-' if value in (None, '') else printable(str(value))}"
    yield f"{'steps':<16} {', '.join(step['what'] for step in steps)}"


def story_lines(told: Told) -> Iterator[str]:
    entry = told.story.transaction
    name = printable(entry.transaction_id)
    yield (
        f"transaction {name} of group {printable(entry.group)} for topic "
        f"{printable(entry.topic)}, on {told.broker.name}: {entry.state}"
    )
    for step in told.story.steps:
        at = utc(step.at) if step.at else f"{'(time not noted)':<24}"
        yield f"  {at}  {_WHATS.get(step.what, step.what):<14}  {printable(_step_text(step))}"
    if told.story.pending_because:
        yield f"why:   {printable(told.story.pending_because)}"
    yield f"next:  {_next(entry, name)}"


def _step_text(step: TransactionStep) -> str:
    reason = f': "{step.reason}"' if step.reason else ""
    match step.what:
        case "parked":
            return f"{step.detail}; sent from {step.who}"
        case "asked":
            return f"{step.who} ({step.detail})"
        case "unknown":
            return f"unknown, says {step.who} ({step.detail})"
    detail = f"; {step.detail}" if step.detail else ""
    return f"by {step.who or 'somebody who left no name'}{reason}{detail}"


def _next(entry: TransactionEntry, name: str) -> str:
    if entry.state in _SETTLED:
        return "nothing: it is settled for good"
    if entry.next_due is None:
        return f"nothing by itself: escrowmq transaction resume|commit|rollback {name}"
    return f"if nobody decides, its producer is asked when due: {utc(entry.next_due)}"
