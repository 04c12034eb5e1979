"""One file in memory, and what a power cut leaves of it.

Every sector changed since the last sync is remembered as it was then, and so is every length. A
cut leaves each of those sectors old, new or torn (new up to some byte, old from there; only
"scrambled" mixes them by the word, as no drive should), and the file at one of those lengths.
"""

from __future__ import annotations

import itertools
import mmap
from random import Random
from typing import Literal

from escrowmq.clock import Clock
from escrowmq.store.disk import Bytes

PAGE = 4096  # what a sparse file takes room in
SECTOR = 512  # what a drive writes whole, or tears

Survival = Literal["none", "all", "mixed", "scrambled"]

# Mixed, often nearly all is kept, or lost: one odd sector among many is the hardest to notice.
_KEPT_RATIOS: dict[Survival, list[float]] = {
    "none": [0],
    "all": [1],
    "mixed": [0.1, 0.5, 0.9],
    "scrambled": [0.1, 0.5, 0.9],
}


class Cut:
    """What one power cut leaves of what was not safe."""

    def __init__(self, rng: Random, survival: Survival) -> None:
        self._rng = rng
        self._ratio = rng.choice(_KEPT_RATIOS[survival])
        self._scrambles = survival == "scrambled"

    def keeps(self) -> bool:
        return self._rng.random() < self._ratio

    def sector(self, old: bytes, new: bytes) -> bytes:
        if self._ratio in (0, 1) or self._rng.random() >= 0.15:
            return new if self.keeps() else old
        if not self._scrambles:
            at = self._rng.randint(0, SECTOR)
            return new[:at] + old[at:]
        words = ((self._rng.choice((old, new)), at) for at in range(0, SECTOR, 8))
        return b"".join(source[at : at + 8] for source, at in words)


class Inode:
    """A file, under its name or still open under none; or a directory."""

    def __init__(self, clock: Clock, *, is_directory: bool = False) -> None:
        self._clock = clock
        self.is_directory = is_directory
        self.buffer = _zeros(0)
        self.pages: set[int] = set()  # those ever written
        self.modified_ms = clock.now_ms()
        self.locked = False
        self._sizes = [0]  # the safe one, then all since
        self._safe: dict[int, bytes] = {}  # of each sector changed since the last sync
        self._forgotten: dict[int, bytes] = {}  # the same, but no later sync will write them
        # What each cut of the file took away since, by its place among the sizes: if the power
        # goes before that cut is safe, it may all be there again.
        self._cut_away: list[tuple[int, dict[int, bytes]]] = []

    def write(self, position: int, data: Bytes) -> None:
        self._remember(covered(position, len(data), SECTOR))
        self._put(position, data)
        self.modified_ms = self._clock.now_ms()

    def resize(self, size: int) -> None:
        if size < len(self.buffer):
            gone = {s: self._sector(s) for s in self._safe if (s + 1) * SECTOR > size}
            self._cut_away.append((len(self._sizes), gone))
        for page in [page for page in self.pages if (page + 1) * PAGE > size]:
            self._remember(covered(page * PAGE, PAGE, SECTOR))
        before, self.buffer = self.buffer, _zeros(size)
        pages, self.pages = self.pages, set()
        for page in sorted(pages):  # not all of it: most of a large file was never touched
            self._put(page * PAGE, before[page * PAGE : (page + 1) * PAGE])
        if size != self._sizes[-1]:
            self._sizes.append(size)
        self.modified_ms = self._clock.now_ms()

    def sync(self) -> None:
        self._safe.clear()
        self._cut_away.clear()
        del self._sizes[:-1]

    def fail_sync(self, *, forgets: bool) -> None:
        """After a failed flush Linux takes the pages for clean: the next one skips them."""
        if forgets:
            self._forgotten |= self._safe
            self._safe.clear()

    def after(self, cut: Cut) -> Inode:
        left = Inode(self._clock, is_directory=self.is_directory)
        later_sizes = itertools.takewhile(lambda size: cut.keeps(), self._sizes[1:])
        sizes = [self._sizes[0], *later_sizes]
        left.resize(sizes[-1])
        for page in sorted(self.pages):
            left._put(page * PAGE, self.buffer[page * PAGE : (page + 1) * PAGE])
        back_again: dict[int, bytes] = {}
        for place, gone in reversed(self._cut_away):
            if place >= len(sizes):
                back_again |= gone
        for sector, old in (self._safe | self._forgotten).items():
            new = back_again.get(sector) or self._sector(sector)
            left._put(sector * SECTOR, cut.sector(old, new))
        left.sync()
        left.modified_ms = self.modified_ms
        return left

    def _put(self, position: int, data: Bytes) -> None:
        """What of it lies inside the file."""
        fitting = data[: max(0, len(self.buffer) - position)]
        self.buffer[position : position + len(fitting)] = fitting
        self.pages.update(covered(position, len(fitting), PAGE))

    def _remember(self, sectors: range) -> None:
        for sector in sectors:
            if sector not in self._safe:
                forgotten = self._forgotten.pop(sector, None)
                self._safe[sector] = self._sector(sector) if forgotten is None else forgotten

    def _sector(self, sector: int) -> bytes:
        return bytes(self.buffer[sector * SECTOR : (sector + 1) * SECTOR]).ljust(SECTOR, b"\0")


def _zeros(size: int) -> bytearray | mmap.mmap:
    """A large file takes no memory where it was never written, and no time to make."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return bytearray(size) if size <= 1 << 16 else mmap.mmap(-1, size, flags=flags)


def covered(position: int, length: int, unit: int) -> range:
    return range(position // unit, -(-(position + length) // unit)) if length else range(0)
