"""What a consumer has in hand of one queue, and how far that lets its group go on.

The offset that is committed is that of the first message not done with: after a crash nothing is
skipped, and what was done behind it comes again.
"""

from __future__ import annotations


class Hand:
    def __init__(self, next_offset: int) -> None:
        self._next = next_offset
        self._open: dict[int, None] = {}  # in the order they came

    def take(self, queue_offset: int) -> None:
        self._open[queue_offset] = None
        self._next = max(self._next, queue_offset + 1)

    def passed(self, next_offset: int) -> None:
        """Nothing of ours lies before it: what was between did not match."""
        self._next = max(self._next, next_offset)

    def done(self, queue_offset: int) -> None:
        self._open.pop(queue_offset, None)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def committable(self) -> int:
        return min(self._open) if self._open else self._next
