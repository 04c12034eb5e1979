"""One decision over many halves: all of them, or none.

The decision is a record of its own and goes to the log first; finals and ops follow, in the same
append, or in several if they are many. Once the decision is there everything else follows from it:
a start after a crash appends whatever is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from escrowmq.errors import CorruptRecord, NoSuchRecord, NoSuchTransaction
from escrowmq.escrow.escrow import Change, Escrow
from escrowmq.escrow.halves import Half
from escrowmq.escrow.verdict import STATE_OF, State, Verdict
from escrowmq.escrow.writers import Decision

HALVES_MAX: Final = 1_000_000


def decide_many(
    escrow: Escrow,
    places: Sequence[tuple[int, int]],
    group: str,
    verdict: Verdict,
    *,
    by: str,
) -> Decision | None:
    """The decision over these halves, by queue offset and log offset; None if all are decided so.

    Raises NoSuchTransaction or TransactionContradicted, and then nothing has changed.
    """
    wanted = STATE_OF[verdict]
    open_halves: dict[int, None] = {}  # each once, by whatever places it was named
    for queue_offset, log_offset in dict.fromkeys(places):
        half = escrow.find(queue_offset, log_offset)
        if half is None:
            escrow.recorded(queue_offset, log_offset, wanted)
        elif half.group != group:
            raise NoSuchTransaction(
                f"the half at {queue_offset} is of producer group {half.group}, not {group}"
            )
        else:
            open_halves[half.queue_offset] = None
    if not open_halves:
        return None
    if wanted is State.COMMITTED:
        return Decision(commits=list(open_halves), by=by)
    return Decision(rolls_back=list(open_halves), by=by)


def is_under_way(escrow: Escrow, decision: Decision) -> bool:
    """Whether somebody else is deciding one of these halves just now."""
    return any(half.is_deciding for half in _halves(escrow, decision))


def queues_of(escrow: Escrow, decision: Decision) -> Iterator[tuple[str, int]]:
    """Where its messages will be seen."""
    for queue_offset in decision.commits:
        half = escrow.open.find(queue_offset)
        if half is not None:
            yield half.topic, half.queue_id


def mark_deciding(escrow: Escrow, decision: Decision) -> None:
    for half in _halves(escrow, decision):
        half.is_deciding = True


def unmark_deciding(escrow: Escrow, decision: Decision) -> None:
    for half in _halves(escrow, decision):
        half.is_deciding = False


def refuse_unreadable(escrow: Escrow, decision: Decision) -> None:
    """All or nothing: one that cannot be delivered refuses the rest too, before it is too late."""
    for queue_offset in decision.commits:
        half = escrow.open.find(queue_offset)
        if half is not None and escrow.read(half) is None:
            raise NoSuchTransaction(f"the half at {queue_offset} cannot be read: {half.why}")


def pieces(escrow: Escrow, decision: Decision, *, now_ms: int) -> Iterator[list[Change]]:
    """What follows from a decision and is not done yet, in portions of bounded size."""
    piece: list[Change] = []
    size = 0
    for state, offsets in (
        (State.COMMITTED, decision.commits),
        (State.ROLLED_BACK, decision.rolls_back),
    ):
        for queue_offset in offsets:
            half = escrow.open.find(escrow.aliases.get(queue_offset, queue_offset))
            if half is None:
                continue
            try:
                piece.append(escrow.change(half, state, by=decision.by, now_ms=now_ms))
            except (CorruptRecord, NoSuchRecord):
                escrow.read(half)  # reported; the others are delivered
                continue
            size += half.size
            if size >= escrow.rules.piece_bytes:
                yield piece
                piece, size = [], 0
    if piece:
        yield piece


def settle_all(
    escrow: Escrow, piece: Sequence[Change], queue_offsets: Sequence[int], *, now_ms: int
) -> None:
    """A piece is in the log; these are the places of its records in their queues."""
    at = 0
    for change in piece:
        at += len(change.records)
        escrow.settled_as(change, queue_offsets[at - 1], now_ms=now_ms)


def _halves(escrow: Escrow, decision: Decision) -> Iterator[Half]:
    for queue_offset in (*decision.commits, *decision.rolls_back):
        half = escrow.open.find(queue_offset)
        if half is not None:
            yield half
