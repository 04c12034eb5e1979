"""Who is asked about a half that nobody decided, and how many at once.

What is due waits in the backlog of its group until somebody of the group has room: the line that it
came by if it lives and answers, else the others in turn. A line has room for so many unanswered
questions a second; one that never answers is not asked faster than that, and does not hold the
others up.
A backlog of which nobody is there waits for whoever comes first, and nothing of it counts as asked.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from typing import Final

from escrowmq.escrow.halves import Half

UNANSWERED_MAX: Final = 100
PATIENCE_MS: Final = 1_000


class Asking:
    def __init__(self, *, unanswered_max: int = UNANSWERED_MAX) -> None:
        self._unanswered_max = unanswered_max
        self._unanswered: dict[Hashable, OrderedDict[int, int]] = {}
        self._asked_on: dict[int, Hashable] = {}
        self._backlogs: dict[str, deque[int]] = {}

    # --- what waits ------------------------------------------------------------------------------

    def add(self, half: Half) -> None:
        backlog = self._backlogs.get(half.group)
        if backlog is None:
            backlog = self._backlogs[half.group] = deque()
        backlog.append(half.queue_offset)

    def groups(self) -> list[str]:
        return list(self._backlogs)

    def waiting(self, group: str) -> int:
        return len(self._backlogs.get(group, ()))

    def take(self, group: str) -> Iterator[int]:
        """What waits, first come first; whoever stops early leaves the rest where it is."""
        backlog = self._backlogs.get(group)
        while backlog:
            yield backlog.popleft()
        if backlog is not None:
            self._backlogs.pop(group, None)

    def put_back(self, half: Half) -> None:
        self._backlogs.setdefault(half.group, deque()).appendleft(half.queue_offset)

    # --- who has room ----------------------------------------------------------------------------

    def has_room(self, line: Hashable, now_ms: int) -> bool:
        unanswered = self._unanswered.get(line)
        if unanswered is None:
            return True
        while unanswered and next(iter(unanswered.values())) <= now_ms - PATIENCE_MS:
            offset, _ = unanswered.popitem(last=False)
            self._asked_on.pop(offset, None)
        return len(unanswered) < self._unanswered_max

    def asked(self, line: Hashable, half: Half, now_ms: int) -> None:
        self.answered(half.queue_offset)
        self._unanswered.setdefault(line, OrderedDict())[half.queue_offset] = now_ms
        self._asked_on[half.queue_offset] = line

    def answered(self, queue_offset: int) -> None:
        line = self._asked_on.pop(queue_offset, None)
        if line is not None and line in self._unanswered:
            self._unanswered[line].pop(queue_offset, None)

    def line_closed(self, line: Hashable) -> None:
        for offset in self._unanswered.pop(line, ()):
            self._asked_on.pop(offset, None)
