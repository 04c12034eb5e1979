"""Which lines have been silent for too long, found by looking only at those that may have been.

A line is noted under the second in which it will have been silent for too long if nothing comes
from it. When that second is over, it has been, or it is noted again for later: one look at a line
in each such span, however many lines there are, and nothing to do when data comes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar


class Heard(Hashable, Protocol):
    active_s: float  # when something came last


L = TypeVar("L", bound=Heard)


class Silence(Generic[L]):
    def __init__(self, idle_max_s: float, *, now_s: float) -> None:
        self._idle_max_s = idle_max_s
        self._looked_s = int(now_s)
        self._due: dict[int, set[L]] = {}
        self._due_of: dict[L, int] = {}

    def watch(self, line: L) -> None:
        due_s = max(int(line.active_s + self._idle_max_s), self._looked_s) + 1
        self._due.setdefault(due_s, set()).add(line)
        self._due_of[line] = due_s

    def forget(self, line: L) -> None:
        due_s = self._due_of.pop(line, None)
        if due_s is not None:
            noted = self._due[due_s]
            noted.discard(line)
            if not noted:
                del self._due[due_s]

    def silent(self, now_s: float) -> list[L]:
        """Those that were silent for longer than they may; they are watched on."""
        due: list[L] = []
        while self._looked_s < int(now_s):
            self._looked_s += 1
            due += self._due.get(self._looked_s, ())
        for line in due:
            self.forget(line)
            self.watch(line)
        return [line for line in due if now_s - line.active_s > self._idle_max_s]
