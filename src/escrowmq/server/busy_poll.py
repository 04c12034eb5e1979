"""Busy polling: look for the next request for a moment before the event loop sleeps.

A client that waits for each response sends its next request some microseconds later. If the broker
sleeps by then, the kernel has to wake it: the client pays for that when it sends, and both wait.
On a virtual machine, which gives an idle processor back to its host, that takes longer than to
handle the request.

So after a turn the event loop looks at its sockets a few more times without sleeping. What that
costs is bounded twice: there are few polls, and after each turn for which they were in vain the
next turns are not followed by any, twice as many each time. A client that takes its time is hardly
ever polled for, and an idle broker never.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

SKIPPED_TURNS_MAX: Final = 256


class BusyPoll:
    """Lets the event loop poll after turns, as long as this finds requests."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object], polls_max: int) -> None:
        """`call_soon` is that of the event loop, which polls its sockets before it calls."""
        self._call_soon = call_soon
        self._polls_max = polls_max
        self._remaining_polls = 0
        self._skipped_turns = 1  # how many to skip after the next polls that are in vain
        self._turns_to_skip = 0

    def turn_began(self) -> None:
        """Stop polling, because there is something to do."""
        if self._remaining_polls:
            self._remaining_polls = 0
            self._skipped_turns = 1

    def turn_ended(self) -> None:
        """Begin to poll, unless that was in vain after the last turns."""
        if self._turns_to_skip:
            self._turns_to_skip -= 1
        elif self._polls_max:
            self._remaining_polls = self._polls_max
            self._call_soon(self._poll)

    def _poll(self) -> None:
        if not self._remaining_polls:
            return
        self._remaining_polls -= 1
        if self._remaining_polls:
            self._call_soon(self._poll)
        else:
            self._turns_to_skip = self._skipped_turns
            self._skipped_turns = min(2 * self._skipped_turns, SKIPPED_TURNS_MAX)
