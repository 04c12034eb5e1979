"""An idle server sleeps: the background work of a broker in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import cast

from escrowmq.clock import ManualClock, SteadyClock
from escrowmq.config import Config
from escrowmq.message.record import LogOffset
from escrowmq.server.remoting_server import RemotingServer

# The list of all background work is private: only `serve` starts it.
from escrowmq.server.serve import _background_loops
from escrowmq.server.tasks import StoreMaintenance, background_tasks
from escrowmq.testing import FaultyDisk
from tests.support.broker_bench import BrokerBench
from tests.support.broker_requests import send_request
from tests.support.stores import NOW_MS, TINY
from tests.support.virtual_time import VirtualTimeLoop
from tests.support.waiting import wait_until_async

MINUTE_S = 60


class QuietServer:
    """A port without connections."""

    def __init__(self, bench: BrokerBench, clock: SteadyClock) -> None:
        self._bench = bench
        self._clock = clock
        self.sweeps = 0
        self.on_turn_end: Callable[[], None] = lambda: None

    def schedule_turn(self) -> None:
        asyncio.get_running_loop().call_soon(self.end_turn)

    def end_turn(self) -> None:
        self._bench.broker.end_turn(self._clock.now_ms())
        self.on_turn_end()

    def sweep_connections(self) -> None:
        self.sweeps += 1


class ServedBroker:
    def __init__(self, clock: ManualClock) -> None:
        self.clock = SteadyClock(clock)
        self.disk = FaultyDisk(clock=clock)
        self.bench = BrokerBench(
            self.disk, config=Config(store=replace(TINY, flush_interval_ms=500))
        )
        self.store = self.bench.store
        self.server = QuietServer(self.bench, self.clock)
        self.failed = asyncio.Event()

    async def run(self, work: Callable[[ServedBroker], Awaitable[None]]) -> None:
        config = self.bench.config
        maintenance = StoreMaintenance(self.store, self.disk, self.clock, config.store)
        server = cast(RemotingServer, self.server)
        loops = _background_loops(
            config, self.clock, self.bench.broker, server, maintenance, self.failed
        )
        async with background_tasks(self.failed, *loops):
            await work(self)


def run_in_virtual_time(work: Callable[[ServedBroker], Awaitable[None]]) -> VirtualTimeLoop:
    loop = VirtualTimeLoop(ManualClock(NOW_MS))
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(ServedBroker(loop.clock).run(work))
    return loop


def test_an_idle_broker_wakes_up_at_most_twice_a_second() -> None:
    wake_ups = 0

    async def sleep_a_minute(served: ServedBroker) -> None:
        nonlocal wake_ups
        await asyncio.sleep(10)  # what the start leaves to do
        before, sweeps = loop_of().wake_ups, served.server.sweeps
        await asyncio.sleep(MINUTE_S)
        wake_ups = loop_of().wake_ups - before
        assert served.server.sweeps - sweeps >= MINUTE_S - 1

    run_in_virtual_time(sleep_a_minute)
    assert wake_ups <= 2 * MINUTE_S


def loop_of() -> VirtualTimeLoop:
    return cast(VirtualTimeLoop, asyncio.get_running_loop())


def test_a_message_is_flushed_after_the_interval_of_flushes() -> None:
    async def send(served: ServedBroker) -> None:
        await asyncio.sleep(MINUTE_S)
        began_s = loop_of().time()
        served.bench.turn(send_request(), at_ms=served.clock.now_ms())
        store = served.store
        await wait_until_async(lambda: store.flushed_offset == store.end)
        assert loop_of().time() - began_s >= 0.5  # virtual seconds; the flush takes real ones
        await wait_until_async(lambda: store.is_checkpointed)
        assert store.checkpointed_offset > LogOffset(0)

    run_in_virtual_time(send)


def test_a_failed_store_stops_the_process_without_a_poll() -> None:
    async def fail(served: ServedBroker) -> None:
        await asyncio.sleep(MINUTE_S)
        before = loop_of().wake_ups
        served.store.fail(OSError("the disk is gone"))
        await served.failed.wait()
        assert loop_of().wake_ups == before

    run_in_virtual_time(fail)
