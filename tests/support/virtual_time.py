"""An event loop whose time passes only while it has nothing to do.

    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(clock)) as runner:
        runner.run(main())  # a minute of sleeping takes no time

Time jumps to the next timer as soon as nothing else is ready. Sockets and threads take real time,
which does not pass here, so use it for code that waits for timers and events.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

from escrowmq.clock import ManualClock


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Counts how often it would have slept, and moves `clock` with its own time."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(_NonBlockingSelector(self))
        self.clock = clock
        self.wake_ups = 0

    def time(self) -> float:
        return self.clock.elapsed_s()

    def sleep(self, seconds: float) -> None:
        """Let time pass instead of waiting. Timers have a resolution of a millisecond."""
        self.wake_ups += 1
        self.clock.advance(ms=max(1, round(seconds * 1000)))


class _NonBlockingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready: list[Any] = super().select(0 if timeout is not None else None)
        if not ready and timeout is not None and timeout > 0:
            self._loop.sleep(timeout)
        return ready
