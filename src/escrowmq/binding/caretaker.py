"""The work that nobody waits for: removing rows that are done with."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from escrowmq.binding.marker import HOUR_MS, ROWS_AT_ONCE
from escrowmq.clock import Clock

log = logging.getLogger(__name__)

ROUND_S: Final = 10.0
ACKNOWLEDGED_MAX: Final = 100_000  # ids that wait for their removal; age removes what is beyond


class Chores:
    """What is to be removed, and when to look again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looked_ms = clock.now_ms()  # a start is busy enough
        self._acknowledged: deque[str] = deque(maxlen=ACKNOWLEDGED_MAX)

    def acknowledged(self, transaction_id: str) -> None:
        self._acknowledged.append(transaction_id)

    def some_acknowledged(self) -> list[str]:
        """Ids whose rows may go now; empty when there are no more."""
        waiting = min(len(self._acknowledged), ROWS_AT_ONCE)
        return [self._acknowledged.popleft() for _ in range(waiting)]

    def is_time(self) -> bool:
        """Once an hour."""
        if self._clock.now_ms() - self._looked_ms < HOUR_MS:
            return False
        self._looked_ms = self._clock.now_ms()
        return True


class Caretaker:
    """A thread that does one round of work now and then, until it is stopped."""

    def __init__(self, work: Callable[[], None], *, name: str, every_s: float = ROUND_S) -> None:
        self._work = work
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                self._work()
            except Exception:
                log.exception("a round of the caretaker failed; the next one tries again")
