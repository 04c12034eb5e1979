"""Log lines that are repeated: each one at first, then only a few, so that none fills the disk.

LimitedLog     warnings that clients cause: some in each period, then their number
RepeatedLog    one warning about a state that lasts: at first, and then once in a while
"""

from __future__ import annotations

import logging
from typing import Final

LINES_MAX: Final = 10
PERIOD_MS: Final = 10_000
REPEAT_S: Final = 60.0


class LimitedLog:
    """Pass up to `lines_max` warnings per period on to a logger, and count the others.

    The first warning of the next period says how many were not logged. The caller says what time
    it is, so this can be used where no clock may be read.
    """

    def __init__(
        self, log: logging.Logger, *, lines_max: int = LINES_MAX, period_ms: int = PERIOD_MS
    ) -> None:
        self._log = log
        self._lines_max = lines_max
        self._period_ms = period_ms
        self._period_end_ms = 0
        self._lines = 0
        self._omitted = 0

    def warning(self, now_ms: int, message: str, *args: object) -> None:
        """Log a warning, unless this period has enough of them."""
        if self._permits(now_ms):
            self._log.warning(message, *args)

    def exception(self, now_ms: int, message: str, *args: object) -> None:
        """Log an error with the exception that is being handled, unless this period has enough."""
        if self._permits(now_ms):
            self._log.exception(message, *args)

    def _permits(self, now_ms: int) -> bool:
        # A clock that was set back starts a new period, or nothing would be logged for long.
        if not self._period_end_ms - self._period_ms <= now_ms < self._period_end_ms:
            self._period_end_ms = now_ms + self._period_ms
            self._lines = 0
        if self._lines >= self._lines_max:
            self._omitted += 1
            return False
        self._lines += 1
        if self._omitted:
            self._log.warning("%d similar warnings were not logged", self._omitted)
            self._omitted = 0
        return True


class RepeatedLog:
    """Log a warning about a state when it begins, and every `repeat_s` while it lasts."""

    def __init__(self, log: logging.Logger, *, repeat_s: float = REPEAT_S) -> None:
        self._log = log
        self._repeat_s = repeat_s
        self._next_s: dict[str, float] = {}  # by state

    def warning(self, now_s: float, state: str, message: str, *args: object) -> None:
        """Log a warning, unless it was logged for this state a short while ago."""
        if self.is_due(now_s, state):
            self._log.warning(message, *args)

    def is_due(self, now_s: float, state: str) -> bool:
        """Return whether to log now. The caller then does: the next one is due `repeat_s` later."""
        if now_s < self._next_s.get(state, now_s):
            return False
        self._next_s[state] = now_s + self._repeat_s
        return True

    def ended(self, state: str) -> bool:
        """Forget a state, so that it is logged at once when it comes back.

        Return whether it was logged.
        """
        return self._next_s.pop(state, None) is not None
