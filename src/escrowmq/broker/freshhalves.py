"""What it takes to commit a half, kept for those that came last.

Most halves are small and committed within milliseconds. Those need not be read from the log and
taken apart again. It is a help, not a record: whatever is not here is read.
"""

from __future__ import annotations

from typing import Final

import msgspec

KEPT: Final = 4096  # up to twice as many are here
BODY_BYTES_MAX: Final = 4096  # of one that is kept


class FreshHalf(msgspec.Struct, frozen=True, gc=False):
    """Of its final, everything but the place that it will have."""

    body: bytes
    properties: bytes
    derived: tuple[int, list[bytes]] | None
    flag: int
    sys_flag: int
    born_ms: int
    born_host: bytes
    reconsume_times: int


class FreshHalves:
    """By half-queue offset, in two generations: the older one goes all at once."""

    def __init__(self) -> None:
        self._young: dict[int, FreshHalf] = {}
        self._old: dict[int, FreshHalf] = {}

    def put(self, queue_offset: int, half: FreshHalf) -> None:
        if len(self._young) >= KEPT:
            self._old, self._young = self._young, {}
        self._young[queue_offset] = half

    def take(self, queue_offset: int) -> FreshHalf | None:
        return self._young.pop(queue_offset, None) or self._old.pop(queue_offset, None)
