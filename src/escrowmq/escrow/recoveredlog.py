"""What a start of the escrow reads of the log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from escrowmq.escrow.escrow import HalfLog
from escrowmq.message.record import StoredRecord


class Glance(Protocol):
    """A record's place and properties, without its body."""

    @property
    def queue_offset(self) -> int: ...
    @property
    def log_offset(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def stored_ms(self) -> int: ...
    @property
    def properties(self) -> bytes: ...


class RecoveredLog(HalfLog, Protocol):
    def min_offset(self, topic: str, queue_id: int) -> int: ...
    def max_offset(self, topic: str, queue_id: int) -> int: ...
    def find_by_key(self, topic: str, key: str, *, count_max: int = 32) -> list[StoredRecord]: ...

    def glances(self, topic: str, queue_id: int, begin: int, end: int) -> Iterator[Glance]: ...

    @property
    def last_record(self) -> int: ...
