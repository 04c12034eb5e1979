"""Work in slices: what takes long is interrupted, so that others are served in between.

Work is a generator that yields wherever it may be interrupted, at least once per millisecond:

    def find_all(entries: Iterable[Entry]) -> SlicedWork:
        for entry in entries:
            ...
            yield

Work may be dropped where it yields, for example when the client that wants the result has gone. So
it yields only where it has changed nothing yet, or where a part of its changes is valid by itself.

A `SliceScheduler` runs such work in turn. It reads no clock itself: its owner hands in a function.

New work takes turns with work that has had a slice. So what is done within one slice, which is most
of it, does not wait for a slice of everything that takes long, however much of that there is.
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
# How long all slices of one turn take together. At least one slice is run, and new requests are
# served between two turns.
TURN_S: Final = 0.001


class _OriginWork:
    """The work of one origin: new work in turn with old work, and each of them round robin."""

    def __init__(self) -> None:
        self.new: deque[SlicedWork] = deque()
        self.old: deque[SlicedWork] = deque()  # what has had a slice and is not finished
        self._is_next_old = False

    def __len__(self) -> int:
        return len(self.new) + len(self.old)

    def take(self) -> SlicedWork:
        # Over the turns too: a turn may have time for one slice only.
        is_old = bool(self.old) and (self._is_next_old or not self.new)
        self._is_next_old = not is_old
        return self.old.popleft() if is_old else self.new.popleft()


class SliceScheduler:
    """Runs work in slices. Every origin gets a slice before one gets two.

    So a client does not get more time by opening more connections. Work of one origin takes turns
    as `_OriginWork` says.
    """

    def __init__(
        self, elapsed_s: Callable[[], float], *, slice_s: float = SLICE_S, turn_s: float = TURN_S
    ) -> None:
        self._elapsed_s = elapsed_s
        self._slice_s = slice_s
        self._turn_s = turn_s
        self._origins: dict[str, _OriginWork] = {}  # the first one is next

    def __len__(self) -> int:
        """Return how many pieces of work are not finished."""
        return sum(map(len, self._origins.values()))

    def add(self, work: SlicedWork, *, origin: str = "") -> None:
        """Let work wait for its first slice, behind all other new work of its origin."""
        works = self._origins.get(origin)
        if works is None:
            works = self._origins[origin] = _OriginWork()
        works.new.append(work)

    def run_turn(self) -> bool:
        """Run slices until the time of a turn is used up. Return whether work is left."""
        origins, elapsed_s = self._origins, self._elapsed_s
        if not origins:
            return False
        end_s = elapsed_s() + self._turn_s
        while origins:
            origin, works = next(iter(origins.items()))
            work = works.take()
            if not self._run_slice(work):
                works.old.append(work)
            del origins[origin]
            if works:
                origins[origin] = works  # behind the other origins
            if elapsed_s() >= end_s:
                break
        return bool(origins)

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
