"""Queue locks of orderly consumers: one member of a group reads a queue, the others wait.

A lock is valid for 60 s since its owner last asked for it; owners ask every 20 s. A line that
closes releases nothing: the client behind it may still be working on the queue, and believes in
its lock for a while.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

VALID_MS: Final = 60_000
LOCKS_MAX: Final = 100_000

LockedQueue = tuple[str, int]  # topic and queue id


class _Lock(NamedTuple):
    owner: str
    asked_ms: int

    def is_valid(self, now_ms: int) -> bool:
        return now_ms - self.asked_ms <= VALID_MS


class QueueLocks:
    def __init__(self, *, locks_max: int = LOCKS_MAX) -> None:
        self._locks_max = locks_max
        self._count = 0
        self._groups: dict[str, dict[LockedQueue, _Lock]] = {}

    def __len__(self) -> int:
        return self._count

    def lock(
        self, group: str, client_id: str, queues: Iterable[LockedQueue], *, now_ms: int
    ) -> list[LockedQueue]:
        """Those it has now: free, expired or its own. None of the others, nor past the bound."""
        if self._count >= self._locks_max:
            self.expire(now_ms)
        granted = []
        for queue in dict.fromkeys(queues):
            held = self._groups.get(group, {}).get(queue)
            if held is None and self._count >= self._locks_max:
                continue
            if held is None or held.owner == client_id or not held.is_valid(now_ms):
                self._groups.setdefault(group, {})[queue] = _Lock(client_id, now_ms)
                self._count += held is None
                granted.append(queue)
        return granted

    def unlock(self, group: str, client_id: str, queues: Iterable[LockedQueue]) -> None:
        for queue in queues:
            held = self._groups.get(group, {}).get(queue)
            if held is not None and held.owner == client_id:
                self._remove(group, queue)

    def is_locked_by(self, group: str, client_id: str, queue: LockedQueue, *, now_ms: int) -> bool:
        held = self._groups.get(group, {}).get(queue)
        return held is not None and held.owner == client_id and held.is_valid(now_ms)

    def group_has_locks(self, group: str, *, now_ms: int) -> bool:
        """Whether it is one that consumes in order."""
        return any(held.is_valid(now_ms) for held in self._groups.get(group, {}).values())

    def expire(self, now_ms: int) -> int:
        """Forget locks that are no longer valid: how many."""
        over = [
            (group, queue)
            for group, locks in self._groups.items()
            for queue, held in locks.items()
            if not held.is_valid(now_ms)
        ]
        for group, queue in over:
            self._remove(group, queue)
        return len(over)

    def _remove(self, group: str, queue: LockedQueue) -> None:
        self._count -= 1
        del self._groups[group][queue]
        if not self._groups[group]:
            del self._groups[group]
