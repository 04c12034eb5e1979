"""What a consumer has in hand of one queue, and how far that lets its group go on.

The offset that is committed is that of the first message not done with: after a crash nothing is
skipped, and what was done behind it comes again.
"""

from __future__ import annotations


class Hand:
    def __init__(self, next_offset: int) -> None:
        self._next = next_offset
        self._open: dict[int, int] = {}  # queue offset: bytes, in the order they came
        self.bytes = 0

    def take(self, queue_offset: int, size: int = 0) -> None:
        """Offsets come in ascending order, as a queue has them."""
        self._open[queue_offset] = size
        self.bytes += size
        self._next = max(self._next, queue_offset + 1)

    def passed(self, next_offset: int) -> None:
        """Nothing of ours lies before it: what was between did not match."""
        self._next = max(self._next, next_offset)

    def done(self, queue_offset: int) -> int | None:
        """Its size; None if it was not in hand."""
        size = self._open.pop(queue_offset, None)
        if size is not None:
            self.bytes -= size
        return size

    def __len__(self) -> int:
        return len(self._open)

    @property
    def committable(self) -> int:
        return next(iter(self._open), self._next)

    @property
    def span(self) -> int:
        """How many would come again after a crash now, at most."""
        return self._next - self.committable
