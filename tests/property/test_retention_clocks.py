"""Retention with a clock that does anything: in any order of runs, jumps, restarts and reboots.

The test knows the real time. A segment must never be removed before it is really older than the
retention time, and must be removed once a broker has run for that long.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from escrowmq.clock import ManualClock, SteadyClock
from escrowmq.server.tasks import StoreMaintenance
from escrowmq.store.log_ages import AGES_PATH
from escrowmq.store.store import MessageStore
from escrowmq.testing import MemoryDisk
from tests.support.stores import NOW_MS, TINY, open_store, sample

HOUR_MS = 3_600_000
SETTINGS = replace(TINY, reserved_hours=5, delete_hours=tuple(range(24)))
RETENTION_MS = SETTINGS.retention_ms
JUMPS_MS = st.sampled_from(
    [-10_000 * HOUR_MS, -6 * HOUR_MS, -60_000, 60_000, 6 * HOUR_MS, 700 * HOUR_MS]
)


class ClocksAndRetention(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(NOW_MS)
        self.real_ms = 0
        self.disk = MemoryDisk(clock=self.clock)
        self.complete_ms: dict[int, int] = {}  # end of a segment -> real time
        self.store: MessageStore
        self.maintenance: StoreMaintenance
        self.start()

    def start(self) -> None:
        self.store = open_store(self.disk, SETTINGS)
        self.maintenance = StoreMaintenance(
            self.store, self.disk, SteadyClock(self.clock), SETTINGS
        )

    def maintain(self) -> None:
        async def maintain() -> None:
            await self.maintenance.checkpoint()
            await self.maintenance.measure_ages()
            await self.maintenance.expire()

        begin = self.store.begin
        asyncio.run(maintain())
        for end in range(begin + SETTINGS.segment_bytes, self.store.begin + 1, 4096):
            age_ms = self.real_ms - self.complete_ms[end]
            assert age_ms > RETENTION_MS, f"a segment was removed after {age_ms} ms"

    @rule(count=st.integers(1, 40))
    def write(self, count: int) -> None:
        for number in range(count):
            self.store.append([sample(number)], now_ms=self.clock.now_ms())
        for end in range(SETTINGS.segment_bytes, self.store.end + 1, SETTINGS.segment_bytes):
            self.complete_ms.setdefault(end, self.real_ms)
        self.maintain()

    @rule(ms=st.sampled_from([1_000, 70_000, HOUR_MS, 4 * HOUR_MS]))
    def run(self, ms: int) -> None:
        self.clock.advance(ms=ms)
        self.real_ms += ms
        self.maintain()

    @rule(ms=JUMPS_MS)
    def jump(self, ms: int) -> None:
        self.clock.step_wall_clock(ms=ms)
        self.maintain()

    @rule(
        is_clean=st.booleans(),
        is_reboot=st.booleans(),
        off_ms=st.sampled_from([0, 1_000, 3 * HOUR_MS]),
        jump_ms=st.just(0) | JUMPS_MS,
        loses_ages=st.booleans(),
    )
    def restart(
        self, is_clean: bool, is_reboot: bool, off_ms: int, jump_ms: int, loses_ages: bool
    ) -> None:
        if is_clean:
            self.maintenance.save_ages()
            self.store.close()
        else:
            self.store.abandon()
        self.real_ms += off_ms
        if is_reboot:
            self.clock.reboot(off_ms=off_ms)
        else:
            self.clock.advance(ms=off_ms)
        self.clock.step_wall_clock(ms=jump_ms)
        if loses_ages and self.disk.exists(AGES_PATH):
            self.disk.remove(AGES_PATH)
        self.start()
        self.maintain()

    @rule(jump_ms=JUMPS_MS)
    def run_for_long(self, jump_ms: int) -> None:
        """What is complete now is removed after the retention time, whatever the clock shows."""
        last_end = self.store.end // SETTINGS.segment_bytes * SETTINGS.segment_bytes
        self.clock.step_wall_clock(ms=jump_ms)
        for _ in range(6):
            self.run(HOUR_MS)
        if last_end < self.store.end:  # the last segment of a log always stays
            assert self.store.begin >= last_end

    @invariant()
    def the_log_is_readable(self) -> None:
        assert all(record.stored_ms for record in self.store.records())


TestClocksAndRetention = ClocksAndRetention.TestCase
