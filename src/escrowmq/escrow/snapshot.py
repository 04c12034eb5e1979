"""What a snapshot of the coordinator holds, and what a start takes from it.

A snapshot shortens a start: it has the states of all halves, what came of their checks, and how far
the queues were read for them. It is derived from the log and disposable.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import msgspec

from escrowmq.escrow.half_table import CHECK_HISTORY, REMARK_OFFSET

_LOG_OFFSET_MAX: Final = (1 << 63) - 1


class TimeConversion(Protocol):
    """Converts times that an earlier process recorded to the time of this one.

    The wall clock may have been wrong then, or may be wrong now. No converted time is after
    `now_ms`, unless it was in the future when it was recorded.
    """

    @property
    def now_ms(self) -> int: ...
    def stored_ms(self, stored_ms: int, log_offset: int) -> int:
        """Convert the stored time of a record."""

    def same_until(self, log_offset: int) -> int:
        """Return the log offset up to which equal stored times are converted equally."""

    def broker_ms(self, time_ms: int, log_offset: int, stored_ms: int) -> int:
        """Convert a time of the broker that is written in a record."""

    def file_ms(self, time_ms: int, log_offset: int, saved_ms: int) -> int:
        """Convert a time in a file that was saved when the log ended at `log_offset`.

        All times of one file are converted by adding the same number.
        """


@dataclass(frozen=True, slots=True)
class UnchangedTimes:
    """Believes all recorded times, for a log whose clock was never wrong."""

    now_ms: int

    def stored_ms(self, stored_ms: int, log_offset: int) -> int:
        return stored_ms

    def same_until(self, log_offset: int) -> int:
        return _LOG_OFFSET_MAX

    def broker_ms(self, time_ms: int, log_offset: int, stored_ms: int) -> int:
        return time_ms

    def file_ms(self, time_ms: int, log_offset: int, saved_ms: int) -> int:
        return time_ms


class CheckHistory(NamedTuple):
    """What came of the checks of a half, from the journal."""

    checks: int = 0
    last_check_ms: int = 0
    unknown_answers: int = 0
    last_remark: str = ""


NO_CHECKS: Final = CheckHistory()


class CoordinatorSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a coordinator that has seen the log below `log_offset`."""

    log_offset: int
    halves_read: int
    steps_read: int
    decisions_read: int
    base: int
    bits: bytes
    half_cursor: int
    op_cursor: int
    checks: bytes  # see HalfTable.check_histories
    remarks: dict[str, bytes]
    aliases: dict[int, int]
    writers: bytes = b""
    saved_ms: int = 0  # the time of the broker, to which `checks` are relative


def encode_snapshot(snapshot: CoordinatorSnapshot) -> bytes:
    return msgspec.msgpack.encode(snapshot)


def decode_snapshot(data: bytes, log_begin: int, log_end: int) -> CoordinatorSnapshot | None:
    """Return the snapshot; None if another version has written it or it does not fit the log."""
    try:
        snapshot = msgspec.msgpack.decode(data, type=CoordinatorSnapshot)
    except msgspec.MsgspecError:  # written by another version
        return None
    # One that is ahead of the log, or of another log, would report transactions as decided whose
    # ops do not exist.
    return snapshot if log_begin <= snapshot.log_offset <= log_end else None


class CheckHistories:
    """What came of checks, by half: saved in the snapshot, and changed by the journal behind it.

    A million halves may have been checked, so what is saved stays packed and is not looked at one
    by one if the table can restore it.
    """

    def __init__(self, snapshot: CoordinatorSnapshot | None, times: TimeConversion) -> None:
        self.shift_ms = 0  # to be added to the times that are saved
        self._saved = b""
        # The halves that have a remark, in order, and their remarks.
        self._remark_offsets: list[int] = []
        self._remarks: list[str] = []
        self._changed: dict[int, CheckHistory] = {}
        self._changed_offsets: list[int] = []
        if snapshot is not None:
            saved_ms = snapshot.saved_ms
            self.shift_ms = times.file_ms(saved_ms, snapshot.log_offset, saved_ms) - saved_ms
            self._saved = snapshot.checks
            pairs = sorted(
                (queue_offset, remark)
                for remark, offsets in snapshot.remarks.items()
                for (queue_offset,) in REMARK_OFFSET.iter_unpack(offsets)
            )
            self._remark_offsets = [queue_offset for queue_offset, _ in pairs]
            self._remarks = [remark for _, remark in pairs]

    def get(self, queue_offset: int) -> CheckHistory:
        changed = self._changed.get(queue_offset)
        if changed is not None:
            return changed
        index = self._saved_index(queue_offset)
        if index >= len(self._saved) // CHECK_HISTORY.size:
            return NO_CHECKS
        saved_offset, checked_ms, checks, unknown_answers = self._saved_at(index)
        if saved_offset != queue_offset:
            return NO_CHECKS
        remark = next(iter(self.saved_remarks_between(queue_offset, queue_offset + 1)), "")
        return CheckHistory(checks, checked_ms + self.shift_ms, unknown_answers, remark)

    def put(self, queue_offset: int, history: CheckHistory) -> None:
        self._changed[queue_offset] = history

    def sort_changed(self) -> None:
        """Call this after the last `put`, and before `changed_between`."""
        self._changed_offsets = sorted(self._changed)

    def changed_between(self, begin: int, end: int) -> list[int]:
        offsets = self._changed_offsets
        return offsets[bisect_left(offsets, begin) : bisect_left(offsets, end)]

    def saved_between(self, begin: int, end: int) -> bytes:
        first, last = self._saved_index(begin), self._saved_index(end)
        return self._saved[first * CHECK_HISTORY.size : last * CHECK_HISTORY.size]

    def saved_remarks_between(self, begin: int, end: int) -> dict[str, list[int]]:
        """Return the queue offsets of the halves with each remark."""
        first, last = (bisect_left(self._remark_offsets, offset) for offset in (begin, end))
        by_remark: dict[str, list[int]] = {}
        for index in range(first, last):
            by_remark.setdefault(self._remarks[index], []).append(self._remark_offsets[index])
        return by_remark

    def _saved_index(self, queue_offset: int) -> int:
        count = len(self._saved) // CHECK_HISTORY.size
        return bisect_left(range(count), queue_offset, key=lambda index: self._saved_at(index)[0])

    def _saved_at(self, index: int) -> tuple[int, int, int, int]:
        queue_offset, checked_ms, checks, unknown_answers = CHECK_HISTORY.unpack_from(
            self._saved, index * CHECK_HISTORY.size
        )
        return queue_offset, checked_ms, checks, unknown_answers
