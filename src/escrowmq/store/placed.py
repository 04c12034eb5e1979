"""Where appended records lie."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from escrowmq.message.offsets import LogOffset, QueueOffset

Place = tuple[int, int, int]  # log offset, queue offset, size


class Placed(msgspec.Struct, frozen=True, gc=False):
    """Where a record went; of a run where the first one went, the size of all, and each of them."""

    log_offset: LogOffset
    queue_offset: QueueOffset
    size: int
    run: Sequence[Place] = ()

    @classmethod
    def of_run(cls, places: Sequence[Place]) -> Placed:
        log_offset, queue_offset, _ = places[0]
        size = sum([size for _, _, size in places])
        return cls(LogOffset(log_offset), QueueOffset(queue_offset), size, places)
