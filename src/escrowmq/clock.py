"""Time as a value that is handed in. Only this module reads the clock of the system.

There are two kinds of time, for two questions. `now_ms` is wall time in milliseconds since 1970: it
goes over the network and on disk, and it may jump. `elapsed_s` only measures how long something
took. A test checks that no other module imports `time` or `datetime`.
"""

from __future__ import annotations

import datetime
import time
from typing import Final, Protocol

# A time for users, always with a time zone. Modules that must not read the clock import it here.
Timestamp = datetime.datetime
UTC: Final = datetime.UTC


class Clock(Protocol):
    def now_ms(self) -> int:
        """Return the wall time in milliseconds since 1970."""

    def elapsed_s(self) -> float:
        """Return a time in seconds that never jumps. Only differences have a meaning."""


class SystemClock:
    """The clock of the operating system."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def elapsed_s(self) -> float:
        return time.monotonic()


class SteadyClock:
    """Wall time without jumps, for timeouts and delays.

    It runs like `elapsed_s`. If the wall clock is set forwards or back, it follows by a tenth of
    the time that passes: after five minutes it has caught up by half a minute. It never runs
    backwards. It starts at `not_before_ms` at the earliest, so that times which were recorded as
    past before a restart stay past.
    """

    CATCH_UP_RATE: Final = 0.1

    def __init__(self, clock: Clock, *, not_before_ms: int = 0) -> None:
        self._clock = clock
        self._now_ms = float(max(clock.now_ms(), not_before_ms))
        self._read_s = clock.elapsed_s()

    def now_ms(self) -> int:
        read_s = self._clock.elapsed_s()
        passed_ms = (read_s - self._read_s) * 1000
        self._read_s = read_s
        gap_ms = self._clock.now_ms() - (self._now_ms + passed_ms)
        limit_ms = passed_ms * self.CATCH_UP_RATE
        self._now_ms += passed_ms + min(max(gap_ms, -limit_ms), limit_ms)
        return int(self._now_ms)

    def elapsed_s(self) -> float:
        return self._clock.elapsed_s()


class ManualClock:
    """A clock for tests, which moves only by `advance` and `step_wall_clock`."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._elapsed_s = 0.0

    def now_ms(self) -> int:
        return self._now_ms

    def elapsed_s(self) -> float:
        return self._elapsed_s

    def advance(self, *, ms: int) -> None:
        """Let time pass: wall time and elapsed time."""
        self._now_ms += ms
        self._elapsed_s += ms / 1000

    def step_wall_clock(self, *, ms: int) -> None:
        """Change wall time alone, as `date` or NTP would."""
        self._now_ms += ms


def epoch_ms(timestamp: Timestamp) -> int:
    """Return a time as milliseconds since 1970."""
    return round(timestamp.timestamp() * 1000)


def local_day(timestamp_ms: int) -> int:
    """Return the number of the day in the local calendar. It changes at local midnight."""
    return Timestamp.fromtimestamp(timestamp_ms / 1000).astimezone().toordinal()


def local_hour(timestamp_ms: int) -> int:
    """Return the hour of the day in local time, 0 to 23."""
    return Timestamp.fromtimestamp(timestamp_ms / 1000).astimezone().hour
