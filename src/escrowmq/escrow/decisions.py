"""The results of deciding: what has to be stored, or why nothing has to be.

Decision          one half: [final, op], stored in one append
NativeChanges     plain halves that the native path has parked and decided
GroupDecision     many halves: a decision record, then DecisionPieces of bounded size
AlreadyDecided    nothing to store: the same verdict was given before
InProgress        not now: another request of this turn decides the half
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from escrowmq.errors import TransactionNotFound
from escrowmq.escrow.half_table import Half
from escrowmq.escrow.writers import DecisionRecord
from escrowmq.message.batch import Appendable
from escrowmq.message.record import LogOffset, NewRecord, StoredRecord
from escrowmq.message.transaction import TransactionState


class HalfLog(Protocol):
    """The part of the store that the coordinator reads."""

    def record_at(self, log_offset: int) -> StoredRecord: ...
    def log_offset_of(self, topic: str, queue_id: int, queue_offset: int) -> LogOffset | None: ...


class StoredPosition(Protocol):
    """Where the store put a record: its `AppendResult`."""

    @property
    def log_offset(self) -> int: ...
    @property
    def queue_offset(self) -> int: ...
    @property
    def size(self) -> int: ...


class Decision(msgspec.Struct, frozen=True):
    """The records that decide one half: its finals, if it is committed, and then its op."""

    half: Half
    state: TransactionState
    records: list[Appendable]


class NativeChanges(Protocol):
    """What the native path has done to halves. Queue offsets are packed as 64-bit numbers."""

    half_count: int  # parked, with consecutive queue offsets
    last_half_offset: int
    due: list[tuple[int, bytes]]  # due time, queue offsets of halves
    first_op_offset: int
    ended: bytes  # queue offsets of halves, in the order of their ops
    committed: bytes
    rolled_back: bytes
    # Topic, whether they were committed, milliseconds since they were parked, number of halves.
    outcomes: list[tuple[str, bool, int, int]]


@dataclass(frozen=True, slots=True)
class AlreadyDecided:
    """The half was decided before, with the same verdict. Nothing has to be stored."""

    state: TransactionState


@dataclass(frozen=True, slots=True)
class InProgress:
    """The half is being decided in this turn. Decide again when the turn has ended."""


class DecisionPiece(msgspec.Struct, frozen=True):
    """The part of a group decision that goes to the log in one append."""

    records: list[Appendable]
    decisions: list[Decision]
    has_decision_record: bool  # as the first of `records`
    is_last: bool


class GroupDecision:
    """A decision about many halves: a decision record, and its consequences in pieces."""

    def __init__(
        self,
        record: DecisionRecord,
        pieces: Iterator[list[Decision]],
        first_record: NewRecord | None = None,
    ) -> None:
        """`first_record`: the encoded decision record; None if it is in the log already."""
        self.record = record
        self.reserved_queues: frozenset[tuple[str, int]] = frozenset()
        self.queue_offset = -1  # of the decision record
        self._pieces = pieces
        self._first_record = first_record
        self._following = next(pieces, None)
        self._returned_piece: DecisionPiece | None = None

    @property
    def half_count(self) -> int:
        return len(self.record.commits) + len(self.record.rolls_back)

    def next_piece(self) -> DecisionPiece:
        piece, self._returned_piece = self._returned_piece, None
        if piece is not None:
            return piece
        decisions = self._following or []
        if decisions:
            self._following = next(self._pieces, None)
        records: list[Appendable] = []
        first_record, self._first_record = self._first_record, None
        if first_record is not None:
            records.append(first_record)
        for decision in decisions:
            records += decision.records
        return DecisionPiece(records, decisions, first_record is not None, self._following is None)

    def put_back(self, piece: DecisionPiece) -> None:
        """Let `next_piece()` return this piece again, because it is not stored yet."""
        self._returned_piece = piece


def no_half(queue_offset: int, log_offset: int, group: str | None) -> TransactionNotFound:
    """Return the error for a half that cannot be found. It repeats only what the caller said."""
    of_group = "" if group is None else f" of producer group {group}"
    return TransactionNotFound(
        f"no half message at queue offset {queue_offset} and log offset {log_offset}{of_group}, "
        "or it has expired"
    )
