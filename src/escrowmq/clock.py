"""Time, handed in as a value.

Two clocks, because they answer two questions. `now_ms` is wall time: it goes on the wire and
on disk, and it may jump. `elapsed_s` only measures how long something took. No other module
reads `time` or `datetime`; tests/test_tidy.py holds us to that.
"""

from __future__ import annotations

import datetime
import time
from typing import Final, Protocol

Timestamp = datetime.datetime  # always with a time zone
UTC: Final = datetime.UTC


class Clock(Protocol):
    def now_ms(self) -> int: ...
    def elapsed_s(self) -> float: ...


class SystemClock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def elapsed_s(self) -> float:
        return time.monotonic()


class SteadyClock:
    """Wall time without its jumps: whoever measures a time that must pass reads it here.

    It runs as `elapsed_s` does. If wall time is set forwards or back, it follows by a tenth of the
    time that passes, so after five minutes it has made up for half a minute, and it never
    runs backwards. It does not begin before `not_before_ms`: what was noted as past stays past.
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
        follows_ms = passed_ms * self.CATCH_UP_RATE
        self._now_ms += passed_ms + min(max(gap_ms, -follows_ms), follows_ms)
        return int(self._now_ms)

    def elapsed_s(self) -> float:
        return self._clock.elapsed_s()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._elapsed_s = 0.0

    def now_ms(self) -> int:
        return self._now_ms

    def elapsed_s(self) -> float:
        return self._elapsed_s

    def advance(self, *, ms: int) -> None:
        self._now_ms += ms
        self._elapsed_s += ms / 1000

    def step_wall_clock(self, *, ms: int) -> None:
        """Jump wall time alone, as an operator's `date` or NTP would."""
        self._now_ms += ms


def epoch_ms(timestamp: Timestamp) -> int:
    return round(timestamp.timestamp() * 1000)


def local_day(timestamp_ms: int) -> int:
    """The days of this place's calendar, numbered."""
    return Timestamp.fromtimestamp(timestamp_ms / 1000).astimezone().toordinal()


def local_hour(timestamp_ms: int) -> int:
    return Timestamp.fromtimestamp(timestamp_ms / 1000).astimezone().hour
