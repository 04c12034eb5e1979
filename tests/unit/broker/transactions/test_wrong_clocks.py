"""Open halves survive a clock that is wrong at one start and right at the next.

Whatever the wall clock shows, a half is checked when its immunity or the interval between checks
has really passed, and no half is stranded because it looks old.
"""

from __future__ import annotations

import pytest

from escrowmq.broker.broker import Broker
from escrowmq.clock import ManualClock, SteadyClock
from escrowmq.config import BrokerConfig, Config, TransactionConfig
from escrowmq.message.keys import UniqueKeyGenerator
from escrowmq.message.record import LogOffset
from escrowmq.remoting.bodies import Heartbeat, ProducerEntry, encode_body
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import NoFields
from escrowmq.server.tasks import StoreMaintenance
from escrowmq.store.store import MessageStore
from escrowmq.testing.disks import MemoryDisk
from tests.support.broker_requests import FakeChannel, new_request, send_request
from tests.support.escrows import SMALL_SEGMENTS
from tests.support.stores import HOST, NOW_MS

DAY_MS = 86_400_000
IMMUNITY_MS = 6_000
INTERVAL_MS = 30_000
CONFIG = TransactionConfig(immunity_ms=IMMUNITY_MS, check_interval_ms=INTERVAL_MS, checks_max=15)
JUMPS = pytest.mark.parametrize(
    "jump_ms", [-1000 * DAY_MS, -5_000, 0, 5_000, 1000 * DAY_MS], ids=lambda ms: f"{ms // 1000} s"
)
ENDS = pytest.mark.parametrize("end", ["stop", "kill"])


class BrokerRuns:
    """A broker through several starts, as the server runs it."""

    def __init__(self, *, wrong_by_ms: int = 0) -> None:
        self.clock = ManualClock(NOW_MS + wrong_by_ms)
        self.disk = MemoryDisk(clock=self.clock)
        self.start()

    def start(self) -> None:
        self.store = MessageStore.open(self.disk, SMALL_SEGMENTS, store_host=HOST)
        self.steady = SteadyClock(self.clock)
        self.maintenance = StoreMaintenance(self.store, self.disk, self.steady, SMALL_SEGMENTS)
        self.broker = Broker(
            self.disk,
            self.store,
            Config(broker=BrokerConfig(), store=SMALL_SEGMENTS, transaction=CONFIG),
            UniqueKeyGenerator(address="127.0.0.1", process_id=1, salt=2),
            store_host=HOST,
            wall_ms=lambda now_ms: self.clock.now_ms(),
            past_times=self.maintenance.past_times(),
        )
        self.channel = FakeChannel("producer")
        body = encode_body(
            Heartbeat(client_id="p", producer_data_set=[ProducerEntry(group_name="g")])
        )
        self.handle(new_request(RequestCode.HEART_BEAT, NoFields(), body))

    def handle(self, request: object) -> None:
        now_ms = self.steady.now_ms()
        self.broker.handle(self.channel, request, now_ms)  # type: ignore[arg-type]  # any request
        self.broker.end_turn(now_ms)

    def park(self, key: str) -> None:
        properties = f"UNIQ_KEY\x01{key}\x02TRAN_MSG\x01true\x02PGROUP\x01g\x02"
        self.handle(send_request(body=b"x" * 100, properties=properties, sys_flag=4))

    async def run(self, ms: int) -> None:
        for _ in range(0, ms, 500):
            self.clock.advance(ms=500)
            now_ms = self.steady.now_ms()
            self.broker.tick(now_ms)
            self.broker.end_turn(now_ms)
            self.store.flush()
            await self.maintenance.measure_ages()

    def restart(self, end: str, *, jump_ms: int, off_ms: int = 500, reboots: bool = False) -> None:
        self.store.flush()
        if end == "stop":
            self.broker.transactions.save(force=True)
            self.maintenance.save_ages()
            self.store.close()
        else:
            self.store.abandon()
        if reboots:
            self.clock.reboot(off_ms=off_ms)
        else:
            self.clock.advance(ms=off_ms)
        self.clock.step_wall_clock(ms=jump_ms)
        self.start()

    @property
    def checks(self) -> int:
        return self.broker.transactions.checker.counters.sent

    @property
    def stranded(self) -> int:
        return self.broker.transactions.coordinator.counters.stranded


@JUMPS
@ENDS
@pytest.mark.parametrize("reboots", [False, True])
async def test_a_half_is_checked_after_its_immunity(jump_ms: int, end: str, reboots: bool) -> None:
    runs = BrokerRuns()
    runs.park("k")
    await runs.run(1_000)
    runs.restart(end, jump_ms=jump_ms, reboots=reboots)
    await runs.run(2_500)
    # After a reboot the clock may say that the machine was off for a while; that is believed.
    assert runs.checks == (1 if reboots and jump_ms == 5_000 else 0)
    await runs.run(6_000)
    assert runs.checks == 1
    assert runs.stranded == 0


@JUMPS
@ENDS
async def test_a_half_of_a_time_with_a_wrong_clock_is_checked(jump_ms: int, end: str) -> None:
    """The clock is wrong when the half is parked, and right at the next start."""
    runs = BrokerRuns(wrong_by_ms=jump_ms)
    runs.park("k")
    await runs.run(1_000)
    runs.restart(end, jump_ms=-jump_ms)
    await runs.run(2_500)
    assert runs.checks == 0
    await runs.run(6_000)
    assert runs.checks == 1
    assert runs.stranded == 0


@JUMPS
@ENDS
async def test_the_next_check_comes_after_the_interval(jump_ms: int, end: str) -> None:
    runs = BrokerRuns()
    runs.park("k")
    await runs.run(10_000)
    assert runs.checks == 1
    runs.restart(end, jump_ms=jump_ms)
    await runs.run(15_000)
    assert runs.checks == 0
    await runs.run(25_000)
    assert runs.checks == 1
    assert runs.stranded == 0


@JUMPS
@ENDS
async def test_a_jump_while_the_broker_runs_and_its_correction_at_the_next_start(
    jump_ms: int, end: str
) -> None:
    runs = BrokerRuns()
    runs.park("before")
    await runs.run(500)
    runs.clock.step_wall_clock(ms=jump_ms)
    runs.park("after")
    await runs.run(500)
    runs.restart(end, jump_ms=-jump_ms)
    await runs.run(3_000)
    assert runs.checks == 0
    await runs.run(6_000)
    assert runs.checks == 2
    assert runs.stranded == 0


@JUMPS
@ENDS
async def test_a_half_that_was_moved_is_checked(jump_ms: int, end: str) -> None:
    """A moved half carries its times with it."""
    runs = BrokerRuns(wrong_by_ms=jump_ms)
    runs.park("k")
    await runs.run(1_000)
    runs.broker.transactions.move_halves_below(LogOffset(runs.store.end), runs.steady.now_ms())
    runs.broker.end_turn(runs.steady.now_ms())
    await runs.run(500)
    for _ in range(2):
        runs.restart(end, jump_ms=-jump_ms)
        jump_ms = -jump_ms
        await runs.run(500)
    assert runs.checks == 0
    await runs.run(8_000)
    assert runs.checks == 1
    assert runs.stranded == 0


async def test_a_half_is_stranded_after_it_was_really_open_for_too_long() -> None:
    runs = BrokerRuns()
    runs.channel.is_open = False
    runs.broker.channel_closed(runs.channel)  # nobody can be asked
    runs.park("k")
    runs.broker.transactions.coordinator.age_max_ms = 60_000
    await runs.run(40_000)
    runs.restart("stop", jump_ms=-DAY_MS)
    runs.broker.transactions.coordinator.age_max_ms = 60_000
    runs.channel.is_open = False
    runs.broker.channel_closed(runs.channel)
    await runs.run(10_000)
    assert runs.stranded == 0
    runs.restart("kill", jump_ms=DAY_MS, off_ms=20_000)
    runs.broker.transactions.coordinator.age_max_ms = 60_000
    await runs.run(1_000)
    assert runs.stranded == 1
