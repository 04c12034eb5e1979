"""Appending to the commit log: records are encoded for the place they will have, then written in
one call (two when the batch crosses into the next file).

A batch counts once it is written whole. If that fails, what it may have left behind is wiped, so
that recovery cannot find it later.
"""

from __future__ import annotations

from escrowmq.errors import StoreError, StoreFailed
from escrowmq.message.offsets import LogOffset
from escrowmq.message.record import BLANK, NewRecord, encode_blank, record_pieces
from escrowmq.store.commitlog import CommitLog


class Batch:
    """Records on their way into the log: encoded, placed, not yet written."""

    __slots__ = (
        "_at",
        "_full",
        "_log",
        "_piece_begin",
        "_pieces",
        "_room",
        "_sealed",
        "_store_host",
    )

    def __init__(self, log: CommitLog) -> None:
        log.refuse_if_failed()
        self._log = log
        self._store_host = log.store_host
        self._sealed = log.sealed
        self._at = log.end
        self._room = log.segment_bytes - BLANK.size - self._at % log.segment_bytes
        self._pieces: list[bytes] = []
        self._piece_begin = self._at
        self._full: list[tuple[LogOffset, bytes]] = []  # what fills up a file, and where

    def add(self, record: NewRecord, queue_offset: int, stored_ms: int) -> tuple[LogOffset, int]:
        """Place one record behind the others: its log offset and its size."""
        at = self._at
        host, sealed = self._store_host, self._sealed
        size, pieces = record_pieces(record, queue_offset, at, stored_ms, host, sealed)
        if size > self._room:
            at = self._roll(at)
            size, pieces = record_pieces(record, queue_offset, at, stored_ms, host, sealed)
        self._pieces += pieces
        self._at = at + size  # type: ignore[assignment]  # no LogOffset(): every send comes by here
        self._room -= size
        return at, size

    def write(self) -> None:
        """All of it into the log, or none of it and an error."""
        log, pieces = self._log, self._pieces
        data = b"".join(pieces)
        try:
            for begin, filled in self._full:
                self._write_at(begin, filled)
            if data:
                self._write_at(self._piece_begin, data)
        except StoreError as error:
            self._undo(error)
            raise
        log.end = self._at

    def _write_at(self, begin: LogOffset, data: bytes) -> None:
        segment = self._log.segment_at(begin // self._log.segment_bytes)
        segment.file.write_at(begin - segment.base, data)

    def _roll(self, at: LogOffset) -> LogOffset:
        """Fill this file up with the blank record; go on in the next."""
        remaining = self._room + BLANK.size
        self._pieces.append(encode_blank(remaining))
        self._full.append((self._piece_begin, b"".join(self._pieces)))
        self._pieces = []
        self._piece_begin = LogOffset(at + remaining)
        self._room = self._log.segment_bytes - BLANK.size
        return self._piece_begin

    def _undo(self, cause: StoreError) -> None:
        """Nothing of a refused batch may be found again, also not after a crash."""
        try:
            self._log.wipe(self._log.end)
        except StoreError as error:
            self._log.fail(error)
            raise StoreFailed(f"{cause}; and what it left could not be wiped: {error}") from cause
