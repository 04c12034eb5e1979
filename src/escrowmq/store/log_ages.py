"""How long ago each part of the log was written, measured without believing the wall clock.

The wall clock may be far ahead at one start and right at the next, so neither stored times nor the
times of files say how old a record is. This module counts *measured time*: the time that a process
was observed to run, and the time between two processes of the same boot of the machine, for which
the monotonic clock of the kernel can be compared. Time in which the machine was off is not counted.
So measured time is never longer than real time, whatever the wall clock does.

    add_mark()      now and then: the log ends here, at this measured time
    age_ms()        at least this long ago, the log up to this offset was complete
    PastTimes       converts the times that an earlier process recorded to the time of this process

The marks are saved in `escrowmq.ages`. Without the file everything counts as just written: nothing
expires too early. A damaged file is reported. Marks get fewer with their age, so an age is too
short by up to 6 %.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Final
from zlib import crc32

import msgspec

from escrowmq.errors import StoreError
from escrowmq.store.damage import DamageKind, DamageReports
from escrowmq.store.disk import Disk, read_file, replace_file

AGES_PATH: Final = "escrowmq.ages"
_LOG_OFFSET_MAX: Final = (1 << 63) - 1
MARK_INTERVAL_MS: Final = 1_000
# What a damaged file costs.
WITHOUT_AGES: Final = "the segments count as just written and are kept longer"
_RESOLUTION: Final = 64  # marks that are closer together than this part of their age are dropped
_MARKS_MAX: Final = 2_048  # before some of them are dropped; about 800 stay
_STARTS_MAX: Final = 100  # marks of starts that stay however close together they are
# After a reboot, the wall clock may say how long the machine was off, but only up to this time.
_DOWNTIME_MAX_MS: Final = 3_600_000


class LogMark(msgspec.Struct, frozen=True, array_like=True):
    """What was known at one moment."""

    log_end: int
    measured_ms: int
    broker_ms: int  # the time of the process: what it recorded then is relative to this
    is_start: bool = False  # the first mark of a process


class _SavedAges(msgspec.Struct, frozen=True, kw_only=True):
    """The content of escrowmq.ages; the field names are stored."""

    boot_id: str
    elapsed_ms: int  # of the monotonic clock, to be compared only within one boot
    wall_ms: int
    measured_ms: int
    marks: list[LogMark]


class LogAges:
    """The marks of a log. Elapsed times come from the monotonic clock, which is handed in."""

    def __init__(self, boot_id: str, saved: _SavedAges | None) -> None:
        self._boot_id = boot_id
        self._marks: list[LogMark] = [] if saved is None else list(saved.marks)
        self._measured_ms = 0 if saved is None else saved.measured_ms
        self._elapsed_ms = 0 if saved is None else saved.elapsed_ms
        self.is_same_boot = saved is not None and saved.boot_id == boot_id != ""
        # How much the wall clock was changed since the last save; 0 if that cannot be known.
        self.wall_change_ms = 0

    @classmethod
    def load(
        cls,
        disk: Disk,
        *,
        boot_id: str,
        log_end: int,
        elapsed_ms: int,
        wall_ms: int,
        damage: DamageReports | None = None,
    ) -> LogAges:
        """Return the ages of a log that was just opened and ends at `log_end`.

        `boot_id`: elapsed times can be compared between processes with the same id, unless empty.
        `damage`: a damaged file is reported there.
        """
        saved, problem = _load(disk)
        if problem and damage is not None:
            damage.add(DamageKind.AGES, AGES_PATH, f"{problem}: {WITHOUT_AGES}", is_repaired=False)
        ages = cls(boot_id, saved)
        if saved is not None:
            passed_ms = elapsed_ms - saved.elapsed_ms if ages.is_same_boot else 0
            ages._measured_ms += max(0, passed_ms)
            change_ms = wall_ms - saved.wall_ms - passed_ms
            # After a reboot a clock that is ahead looks like a machine that was off.
            ages.wall_change_ms = change_ms if ages.is_same_boot else min(0, change_ms)
        ages._elapsed_ms = elapsed_ms
        # A power cut or another program may have cut the log: what is written there from now on is
        # new.
        ages._marks = [mark for mark in ages._marks if mark.log_end <= log_end]
        return ages

    def start(self, log_end: int, *, elapsed_ms: int, broker_ms: int) -> None:
        """Add the first mark of this process: what it records is relative to its own time."""
        mark = LogMark(log_end, self._advance(elapsed_ms), broker_ms, is_start=True)
        self._marks.append(mark)

    def add_mark(self, log_end: int, *, elapsed_ms: int, broker_ms: int) -> None:
        """Note that the log ends here now. Pass only what a power cut cannot take away."""
        measured_ms = self._advance(elapsed_ms)
        # An older mark with the same end says more: the log was complete even then.
        if not self._marks or self._marks[-1].log_end < log_end:
            self._marks.append(LogMark(log_end, measured_ms, broker_ms))
            if len(self._marks) > _MARKS_MAX:
                self._marks = _thin(self._marks, measured_ms)

    def age_ms(self, log_offset: int, *, elapsed_ms: int) -> int:
        """Return how long ago, at least, everything below this log offset was written."""
        mark = self._mark_at_or_after(log_offset)
        return 0 if mark is None else self._advance(elapsed_ms) - mark.measured_ms

    def past_times(self, *, elapsed_ms: int, now_ms: int) -> PastTimes:
        """Return what converts recorded times to a time that is `now_ms` at present."""
        return PastTimes(now_ms, self._advance(elapsed_ms), self._marks, self.is_same_boot)

    def encode(self, *, log_begin: int, elapsed_ms: int, wall_ms: int) -> bytes:
        """Return what is to be saved. Marks below the beginning of the log are dropped."""
        measured_ms = self._advance(elapsed_ms)
        marks = [mark for mark in self._marks if mark.log_end >= log_begin]
        self._marks = _thin(marks, measured_ms)
        saved = _SavedAges(
            boot_id=self._boot_id,
            elapsed_ms=elapsed_ms,
            wall_ms=wall_ms,
            measured_ms=measured_ms,
            marks=self._marks,
        )
        data = msgspec.json.encode(saved)
        return b"%08x\n%s\n" % (crc32(data), data)

    def _advance(self, elapsed_ms: int) -> int:
        self._measured_ms += max(0, elapsed_ms - self._elapsed_ms)
        self._elapsed_ms = elapsed_ms
        return self._measured_ms

    def _mark_at_or_after(self, log_offset: int) -> LogMark | None:
        index = bisect_left(self._marks, log_offset, key=_log_end)
        return self._marks[index] if index < len(self._marks) else None


@dataclass(frozen=True, slots=True)
class PastTimes:
    """Converts times that earlier processes recorded, as they are at the start of this one.

    A converted time is as long before `now_ms` as the recorded one really was, as far as that is
    known. It does not matter whether the clock was wrong then, or is wrong now.
    """

    now_ms: int
    measured_ms: int
    marks: list[LogMark]
    is_same_boot: bool

    def stored_ms(self, stored_ms: int, log_offset: int) -> int:
        """Convert the stored time of the record at a log offset."""
        index = bisect_right(self.marks, log_offset, key=_log_end)
        # The record was written between two marks. If its stored time is not possible, a clock was
        # or is wrong, and the record counts as young: nothing happens to it too early.
        after, before = self.marks[index : index + 1], self.marks[max(0, index - 1) : index]
        age_min_ms = self.measured_ms - after[0].measured_ms if after else 0
        age_max_ms = self.measured_ms - before[0].measured_ms if before else age_min_ms
        if not before or not self.is_same_boot:
            age_max_ms += _DOWNTIME_MAX_MS
        age_ms = self.now_ms - stored_ms
        return self.now_ms - (age_ms if age_min_ms <= age_ms <= age_max_ms else age_min_ms)

    def same_until(self, log_offset: int) -> int:
        """Return the log offset up to which equal stored times are converted equally."""
        index = bisect_right(self.marks, log_offset, key=_log_end)
        return self.marks[index].log_end if index < len(self.marks) else _LOG_OFFSET_MAX

    def broker_ms(self, time_ms: int, log_offset: int, stored_ms: int) -> int:
        """Convert a time that the broker wrote into the record at a log offset.

        `stored_ms`: the stored time of that record, which is used if no mark precedes it.
        """
        index = bisect_right(self.marks, log_offset, key=_log_end)
        if index == 0:
            return self.stored_ms(stored_ms, log_offset) + time_ms - stored_ms
        # This mark is of the process that wrote the record, because each begins with one.
        mark = self.marks[index - 1]
        return self.now_ms - (self.measured_ms - mark.measured_ms) - (mark.broker_ms - time_ms)

    def file_ms(self, time_ms: int, log_offset: int, saved_ms: int) -> int:
        """Convert a time in a file that the broker saved when the log ended at an offset.

        `saved_ms`: the time of the broker when it saved the file.
        """
        index = bisect_left(self.marks, log_offset, key=_log_end)
        after = self.marks[index : index + 1]
        age_ms = self.measured_ms - after[0].measured_ms if after else 0
        return self.now_ms - age_ms - (saved_ms - time_ms)


def save_ages(disk: Disk, data: bytes) -> None:
    """Save what `LogAges.encode` returned. May be called in a thread. Raises StoreError."""
    replace_file(disk, AGES_PATH, data)


def _log_end(mark: LogMark) -> int:
    return mark.log_end


def _thin(marks: list[LogMark], now_measured_ms: int) -> list[LogMark]:
    """Drop marks that are closer together than their age requires. The newest stays."""
    kept: list[LogMark] = []
    starts = 0
    for mark in reversed(marks):
        age_ms = now_measured_ms - mark.measured_ms
        distance_ms = max(MARK_INTERVAL_MS, age_ms // _RESOLUTION)
        starts += mark.is_start
        is_needed = mark.is_start and starts <= _STARTS_MAX
        if is_needed or not kept or kept[-1].measured_ms - mark.measured_ms >= distance_ms:
            kept.append(mark)
    return kept[::-1]


def find_damage(disk: Disk) -> str:
    """Return what is wrong with the saved ages; an empty text if nothing is."""
    return _load(disk)[1]


def _load(disk: Disk) -> tuple[_SavedAges | None, str]:
    """Return what was saved, if it can be used, and what is damaged."""
    try:
        content = read_file(disk, AGES_PATH)
    except StoreError as error:
        return None, str(error)
    if content is None:
        return None, ""  # a new directory, one of RocketMQ, or a restored backup
    checksum, _, data = content.strip().partition(b"\n")
    if not data or checksum != b"%08x" % crc32(data):
        return None, "has a wrong checksum"
    try:
        saved = msgspec.json.decode(data, type=_SavedAges)
    except msgspec.MsgspecError:  # written by another version
        return None, ""
    is_sorted = all(
        first.log_end <= second.log_end and first.measured_ms <= second.measured_ms
        for first, second in zip(saved.marks, saved.marks[1:], strict=False)
    )
    return (saved, "") if is_sorted else (None, "has marks that are not in order")
