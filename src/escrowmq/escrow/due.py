"""When each half is to be asked about: what is due now costs its own number, not that of the rest.

Half-queue offsets lie in slots of a tenth of a second, eight bytes each. Nothing is taken out when
a half is decided: whoever takes a slot looks at each half anyway, and finds it gone.
"""

from __future__ import annotations

import heapq
from array import array
from typing import Final

SLOT_MS: Final = 100


class DueTimes:
    def __init__(self) -> None:
        self._slots: dict[int, array[int]] = {}
        self._order: list[int] = []  # a heap of the slots there are
        self._last_ms, self._last = -1, array("q")  # most come in runs for the same time

    def add(self, offset: int, due_ms: int) -> None:
        if due_ms != self._last_ms:
            self._last_ms, self._last = due_ms, self._slot(-(-due_ms // SLOT_MS))
        self._last.append(offset)

    def _slot(self, number: int) -> array[int]:
        """By its end: nothing in it comes up before its time."""
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = array("q")
            heapq.heappush(self._order, number)
        return slot

    def take(self, now_ms: int, count_max: int) -> list[int]:
        """What is due, the longest overdue first, at most so many; the rest is due still."""
        found: list[int] = []
        self._last_ms = -1  # its slot may go
        while self._order and self._order[0] * SLOT_MS <= now_ms and len(found) < count_max:
            number = self._order[0]
            slot = self._slots[number]
            wanted = count_max - len(found)
            if len(slot) <= wanted:
                found += slot
                del self._slots[number]
                heapq.heappop(self._order)
            else:
                found += slot[-wanted:]  # from the end, or taking a million would cost its square
                del slot[-wanted:]
        return found

    def next_ms(self) -> int | None:
        return self._order[0] * SLOT_MS if self._order else None
