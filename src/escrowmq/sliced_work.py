"""Work in slices: what takes long is interrupted, so that others are served in between.

Work is a generator that yields wherever it may be interrupted, at least once per millisecond:

    def find_all(entries: Iterable[Entry]) -> SlicedWork:
        for entry in entries:
            ...
            yield

Work may be dropped where it yields, for example when the client that wants the result has gone. So
it yields only where it has changed nothing yet, or where a part of its changes is valid by itself.

A `SliceScheduler` runs such work in turn. It reads no clock itself: its owner hands in a function.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator
from typing import Final, TypeAlias, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

SlicedWork: TypeAlias = Generator[None, None, None]
# The same with a result, for `result = yield from ...`.
SlicedResult: TypeAlias = Generator[None, None, T]

# How long the work of one owner goes on before the next one has its slice. A client that waits for
# a response notices a few milliseconds; a slice costs the scheduler about a microsecond.
SLICE_S: Final = 0.001
# How long all slices of one turn take together. At least one slice is run.
TURN_S: Final = 0.002


class SliceScheduler:
    """Runs work in slices, round robin: every piece of work gets a slice before one gets two.

    Work may have an origin. Then every origin gets a slice before one gets two, so a client does
    not get more time by opening more connections.
    """

    def __init__(
        self, elapsed_s: Callable[[], float], *, slice_s: float = SLICE_S, turn_s: float = TURN_S
    ) -> None:
        self._elapsed_s = elapsed_s
        self._slice_s = slice_s
        self._turn_s = turn_s
        self._waiting: dict[str, deque[SlicedWork]] = {}  # by origin; the first one is next

    def __len__(self) -> int:
        """Return how many pieces of work are not finished."""
        return sum(map(len, self._waiting.values()))

    def add(self, work: SlicedWork, *, origin: str = "") -> None:
        """Let work wait for its first slice, behind all other work of its origin."""
        self._waiting.setdefault(origin, deque()).append(work)

    def run_turn(self) -> bool:
        """Run slices until the time of a turn is used up. Return whether work is left."""
        waiting, elapsed_s = self._waiting, self._elapsed_s
        if not waiting:
            return False
        end_s = elapsed_s() + self._turn_s
        while waiting:
            origin, works = next(iter(waiting.items()))
            work = works.popleft()
            if not self._run_slice(work):
                works.append(work)
            del waiting[origin]
            if works:
                waiting[origin] = works  # behind the other origins
            if elapsed_s() >= end_s:
                break
        return bool(waiting)

    def _run_slice(self, work: SlicedWork) -> bool:
        """Run one slice. Return whether the work is finished."""
        elapsed_s = self._elapsed_s
        end_s = elapsed_s() + self._slice_s
        try:
            for _ in work:
                if elapsed_s() >= end_s:
                    return False
        except Exception:  # a bug in one piece of work must not stop the others
            log.exception("work given up")
        return True


def run_to_end(work: SlicedResult[T]) -> T:
    """Run work without an interruption, and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as stop:
            result: T = stop.value
            return result
