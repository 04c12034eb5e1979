"""Where appended records lie."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from escrowmq.message.offsets import LogOffset, QueueOffset


class RunPlaces(NamedTuple):
    """Of each record of a run; in their queue they lie one behind the other."""

    log_offsets: list[int]
    sizes: list[int]


class Placed(msgspec.Struct, frozen=True, gc=False):
    """Where a record went; of a run where the first one went, the size of all, and each of them."""

    log_offset: LogOffset
    queue_offset: QueueOffset
    size: int
    run: RunPlaces | None = None

    @classmethod
    def of_run(cls, places: RunPlaces, queue_next: QueueOffset) -> Placed:
        """`queue_next`: behind the last of them."""
        log_offsets, sizes = places
        queue_offset = QueueOffset(queue_next - len(sizes))
        return cls(LogOffset(log_offsets[0]), queue_offset, sum(sizes), places)
