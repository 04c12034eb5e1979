"""Busy polling: look for the next request for a moment before the event loop sleeps.

A client that waits for each response sends its next request some microseconds later. If the broker
sleeps by then, the kernel has to wake it: the client pays for that when it sends, and both wait.
On a virtual machine whose idle processor is given back to the host, that takes longer than to
handle the request.

So after a turn the event loop polls without sleeping for up to `period_s`. What that costs is
bounded twice: a period is short, and after each that was in vain the next ones are skipped, twice
as many each time. A client that takes its time, or an idle broker, is polled for hardly ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

SKIPPED_TURNS_MAX: Final = 256


class BusyPoll:
    """Polls after turns, as long as this finds requests."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, elapsed_s: Callable[[], float], *, period_s: float
    ) -> None:
        self._loop = loop
        self._elapsed_s = elapsed_s
        self._period_s = period_s
        self._end_s = 0.0
        self._is_polling = False
        self._skipped_turns = 1  # how many to skip after the next period that is in vain
        self._turns_to_skip = 0

    def turn_began(self) -> None:
        """Note that there is something to do: the polling has paid, or was not necessary."""
        if self._is_polling:
            self._is_polling = False
            self._skipped_turns = 1

    def turn_ended(self) -> None:
        """Poll for a while, unless the last periods were in vain."""
        if self._turns_to_skip:
            self._turns_to_skip -= 1
        elif self._period_s:
            self._end_s = self._elapsed_s() + self._period_s
            self._is_polling = True
            self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        if not self._is_polling:
            return
        if self._elapsed_s() < self._end_s:
            self._loop.call_soon(self._poll)  # the event loop polls its sockets, and calls again
            return
        self._is_polling = False
        self._turns_to_skip = self._skipped_turns
        self._skipped_turns = min(2 * self._skipped_turns, SKIPPED_TURNS_MAX)
