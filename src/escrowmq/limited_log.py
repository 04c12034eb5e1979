"""Log lines that clients cause: each one at first, then only a few, so that none fills the disk."""

from __future__ import annotations

import logging
from typing import Final

LINES_MAX: Final = 10
PERIOD_MS: Final = 10_000


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
