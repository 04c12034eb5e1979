"""Time as a value that is handed in. Only this module reads the clock of the system.

There are two kinds of time, for two questions. `now_ms` is wall time in milliseconds since 1970: it
goes over the network and on disk, and it may jump, or be far ahead at one start and right at the
next. `elapsed_s` only measures how long something took; nothing is deleted or given up for another
reason (store/log_ages.py). A test checks that no other module imports `time` or `datetime`.
"""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

# A time for users, always with a time zone. Modules that must not read the clock import it here.
Timestamp = datetime.datetime
UTC: Final = datetime.UTC


class Clock(Protocol):
    def now_ms(self) -> int:
        """Return the wall time in milliseconds since 1970."""

    def elapsed_s(self) -> float:
        """Return a time in seconds that never jumps. Only differences have a meaning."""

    def boot_id(self) -> str:
        """Return a name for the time in which the machine has been running.

        Processes with the same name can compare their `elapsed_s`. An empty name says that they
        cannot.
        """


class SystemClock:
    """The clock of the operating system."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def elapsed_s(self) -> float:
        return time.monotonic()

    def boot_id(self) -> str:
        # On Linux the monotonic clock counts from the boot of the machine, plus what a container
        # may add to it.
        try:
            boot_id = _BOOT_ID.read_text().strip()
        except OSError:
            return ""
        try:
            return f"{boot_id} {_NAMESPACE_OFFSETS.read_text().strip()}"
        except OSError:  # a kernel without such containers
            return boot_id


_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE_OFFSETS: Final = Path("/proc/self/timens_offsets")


class SteadyClock:
    """Wall time without jumps, for timeouts and delays.

    It starts with the wall clock and runs like `elapsed_s`. If the wall clock is set forwards or
    back, it follows by a tenth of the time that passes: after five minutes it has caught up by half
    a minute. It never runs backwards. Times that an earlier process recorded have to be converted
    (`PastTimes` in store/log_ages.py): the wall clock may have been wrong then, or may be now.
    """

    CATCH_UP_RATE: Final = 0.1

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._now_ms = float(clock.now_ms())
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

    def boot_id(self) -> str:
        return self._clock.boot_id()

    def offset_ms(self) -> int:
        """Return how far the wall clock is ahead of this clock; negative if it is behind."""
        return self._clock.now_ms() - self.now_ms()


class JumpDetector:
    """Notices that the wall clock was set, or that the machine slept. Call `check` regularly."""

    JUMP_MS: Final = 2_000

    def __init__(self, clock: SteadyClock) -> None:
        self._clock = clock
        self.offset_ms = clock.offset_ms()
        self.jumps = 0

    def check(self) -> int:
        """Return by how much the clock was set since the last call; 0 if it was not."""
        offset_ms = self._clock.offset_ms()
        change_ms, self.offset_ms = offset_ms - self.offset_ms, offset_ms
        if abs(change_ms) < self.JUMP_MS:
            return 0
        self.jumps += 1
        return change_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReport:
    """What was noticed about a wall clock."""

    jumps: int = 0  # how often it was set, at the start or since
    change_at_start_ms: int = 0  # by how much it was set since the process before this one
    stored_ahead_ms: int = 0  # how far the newest message was stored in the future


class ManualClock:
    """A clock for tests, which moves only by `advance`, `step_wall_clock` and `reboot`."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._elapsed_s = 0.0
        self._boots = 1

    def now_ms(self) -> int:
        """Return the wall clock, in milliseconds since 1970."""
        return self._now_ms

    def elapsed_s(self) -> float:
        """Return the seconds since the clock was created."""
        return self._elapsed_s

    def boot_id(self) -> str:
        """Return a text that changes whenever the machine starts."""
        return f"boot {self._boots}"

    def advance(self, *, ms: int) -> None:
        """Let time pass: wall time and elapsed time."""
        self._now_ms += ms
        self._elapsed_s += ms / 1000

    def step_wall_clock(self, *, ms: int) -> None:
        """Change wall time alone, as `date` or NTP would."""
        self._now_ms += ms

    def reboot(self, *, off_ms: int) -> None:
        """Let the machine be off for a while: wall time passes, elapsed time begins anew."""
        self._now_ms += off_ms
        self._elapsed_s = 0.0
        self._boots += 1


def epoch_ms(timestamp: Timestamp) -> int:
    """Return a time as milliseconds since 1970."""
    return round(timestamp.timestamp() * 1000)


def local_day(timestamp_ms: int) -> int:
    """Return the number of the day in the local calendar. It changes at local midnight."""
    return Timestamp.fromtimestamp(timestamp_ms / 1000).astimezone().toordinal()


def local_hour(timestamp_ms: int) -> int:
    """Return the hour of the day in local time, 0 to 23."""
    return Timestamp.fromtimestamp(timestamp_ms / 1000).astimezone().hour
