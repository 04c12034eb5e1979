"""A world in one process: a broker, producers, writers, consumers, an operator, and failures.

Everything follows from one seed: network, disk, clock, what each client does and when it dies. Each
step moves the clock, delivers data, lets every client act once, and asserts with `escrow_truth.py`
that what is visible now may be visible.

`rest` ends a run: no more failures, all clients alive and answering, until nothing remains to do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from escrowmq.clock import ManualClock
from escrowmq.config import TransactionConfig
from escrowmq.errors import StoreError, StoreFailed, StoreFull
from escrowmq.testing.disks import FaultyDisk, PowerCut, Survival
from escrowmq.testing.network import NO_FAULTS, Endpoint, Network, NetworkFaults
from tests.simulation.escrow_actors import Client, Consumer, Driver, How, Operator, Producer
from tests.simulation.escrow_broker import ESCROW, BrokerProcess, Complaints
from tests.simulation.escrow_truth import Place, Truth, judge_disk

STORM = NetworkFaults(loss=0.08, duplication=0.08, lateness=0.15)
REST_STEPS = 1_500


@dataclass(frozen=True)
class Odds:
    """Probabilities of events, per step."""

    begin: float = 0.35
    writer: float = 0.03
    crash: float = 0.02
    death: float = 0.02
    broken_line: float = 0.02
    clock_jump: float = 0.01
    disk_fault: float = 0.02
    upkeep: float = 0.25


class World:
    def __init__(
        self,
        seed: int,
        *,
        producers: int = 2,
        weather: NetworkFaults = NO_FAULTS,
        config: TransactionConfig = ESCROW,
        is_wild: bool = False,
    ) -> None:
        self.rng = Random(seed)
        self.is_wild = is_wild  # clients are slow and do not always answer
        self.is_silent = False  # producers ignore checks
        self.clock = ManualClock()
        self.disk = FaultyDisk(clock=self.clock, seed=seed)
        self.network = Network(Random(seed + 1), self.clock, weather)
        self.truth = Truth()
        self.config = config
        self.process: BrokerProcess | None = None
        self._starts_s = 0.0  # when it is started again
        self._names = 0
        self._writers: list[str] = []
        self._latest_ms = 0
        self.producers = [Producer(self, f"p{number}") for number in range(producers)]
        self.drivers: list[Driver] = []
        self.consumer = Consumer(self, "c")
        self.operator = Operator(self, "o")
        self.complaints = Complaints()
        self.survivals: tuple[Survival, ...] = ("none", "all", "mixed", "mixed")
        self._write_fails = False
        self.starts = 0
        self.cuts = 0
        self.judges_disk = True  # at every start, which is slow

    # --- for clients -----------------------------------------------------------------------------

    def new_name(self, of: str) -> str:
        self._names += 1
        return f"{of}-{self._names}"

    def connect(self, client: Client) -> Endpoint | None:
        if self.process is None:
            return None
        process = self.process
        near, far = self.network.connect(client, process)
        process.lines[far] = None
        far.on_oneway = lambda code, fields: self.truth.posted(process, code, fields)
        return near

    def is_gone(self, place: Place) -> bool:
        """Whether the log no longer holds the half: its outcome cannot be reported."""
        return self.process is not None and place[1] < self.process.store.begin

    def is_one_of_many(self, key: str) -> bool:
        return len(self.truth.members[self.truth.messages[key].transaction]) > 1

    @property
    def everybody(self) -> list[Client]:
        return [*self.producers, *self.drivers, self.consumer, self.operator]

    # --- time ------------------------------------------------------------------------------------

    def run(self, steps: int, odds: Odds | None = None) -> None:
        for _ in range(steps):
            self.step(odds)

    def step(self, odds: Odds | None = None) -> None:
        self.clock.advance(ms=self.rng.choice((5, 20, 20, 50, 100)))
        self._latest_ms = max(self._latest_ms, self.clock.now_ms())
        self.doing(self._serve)
        for client in self.everybody:
            if client.is_alive:
                self.doing(client.act)
        if odds is not None:
            self.doing(lambda: self._suffer(odds))
        if self.process is not None:
            self.truth.look(self.process)
        assert not self.complaints.found, self.complaints.found[0]

    def doing(self, step: Callable[[], None]) -> None:
        """Run a step in which the power or the disk may fail."""
        try:
            step()
        except PowerCut:
            self.power_cut()
        except StoreError as error:
            process = self.process
            if process is not None and not isinstance(error, StoreFull):
                process.store.fail(error)
        if self.process is not None:
            self.truth.was_flushed(self.process)
            if self.process.store.has_failed:  # only a restart can help
                self.kill()

    def _serve(self) -> None:
        if self.process is None:
            if self.clock.elapsed_s() >= self._starts_s:
                self.start()
            return
        self.truth.just_asked.clear()
        self.network.deliver()
        process = self.process
        if self._write_fails:
            self._fail_write(process)
        process.end_turn()
        process.tick()
        if not self.is_wild or self.rng.random() < 0.7:
            process.finish_flush()
        process.begin_flush()
        process.end_turn()

    # --- runs of the broker ----------------------------------------------------------------------

    def start(self) -> None:
        try:
            process = BrokerProcess(self.disk, self.clock, config=self.config)
        except StoreError as error:
            raise AssertionError(f"it does not start: {error}") from error
        self.process = process
        self.starts += 1
        cut_at, self.disk.power_cut_at = self.disk.power_cut_at, None
        self.truth.judge_start(process)
        if self.judges_disk or self.cuts:
            judge_disk(process, self.truth.unnoted)
        self.disk.power_cut_at = cut_at
        self.consumer.rewind()

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()
            self._gone()

    def kill(self) -> None:
        """Kill the process; the machine goes on."""
        if self.process is not None:
            self.truth.look(self.process)
            self.process.kill()
            self._gone()

    def power_cut(self) -> None:
        self.cuts += 1
        if self.process is not None:
            self.truth.was_flushed(self.process)
        self.disk = self.disk.power_cut(self.rng, self.rng.choice(self.survivals))
        if self.is_wild and self.rng.random() < 0.2:
            self.disk.power_cut_at = self.rng.randint(1, 40)  # and once more, while it starts
        self._gone()

    def _gone(self) -> None:
        process, self.process = self.process, None
        self._starts_s = self.clock.elapsed_s() + self.rng.choice((0.01, 0.3))
        if process is not None:
            for end in list(process.lines):
                self.network.disconnect(end)

    # --- events ----------------------------------------------------------------------------------

    def begin_writer(self, writer: str, batches: int = 2) -> Driver:
        if writer not in self._writers:
            self._writers.append(writer)
        driver = Driver(self, self.new_name(writer), writer, batches)
        self.drivers.append(driver)
        return driver

    def _suffer(self, odds: Odds) -> None:
        rng = self.rng

        def happens(probability: float) -> bool:
            return rng.random() < probability

        if happens(odds.begin):
            self._begin_something()
        if happens(odds.writer):
            self.begin_writer(rng.choice(("w0", "w1")))
        if happens(odds.death):
            client = rng.choice([*self.producers, *self.drivers])
            client.die()
        for producer in self.producers:
            if not producer.is_alive and happens(0.1):
                producer.is_alive = True
        if happens(odds.broken_line):
            lines = [client.line for client in self.everybody if client.line is not None]
            if lines:
                self.network.disconnect(rng.choice(lines))
        if happens(odds.clock_jump):
            self.clock.step_wall_clock(ms=rng.choice((-5_000, -500, 500, 5_000, 90_000)))
            self.truth.asked_ms.clear()
        if happens(odds.upkeep):
            self._look_after()
        if happens(odds.disk_fault):
            self._fault()
        if happens(odds.crash):
            self._crash()

    def _begin_something(self) -> None:
        rng = self.rng
        alive = [producer for producer in self.producers if producer.is_alive]
        if alive:
            hows: tuple[How, ...] = ("acknowledged", "one way", "forgotten", "contradicted")
            rng.choice(alive).begin(
                rng.choice((1, 1, 1, 2, 4)),
                commits=rng.random() < 0.7,
                how=rng.choice(hows),
                size=rng.choice((20, 20, 300)),
            )

    def tend(self, what: str) -> None:
        """Run a maintenance task of the server, if it is up."""
        if self.process is not None:
            self.doing(getattr(self.process, what))

    def _look_after(self) -> None:
        process = self.process
        if process is not None:
            self.rng.choice(
                (
                    process.begin_checkpoint,
                    process.finish_checkpoint,
                    process.note,
                    process.save,
                    process.expire,
                    process.lose_patience,
                )
            )()

    def _fault(self) -> None:
        """Let the next write of the log or its flush fail.

        After a failed flush the kernel may consider pages clean that it never wrote. A process that
        starts on the same machine cannot know that, so the machine goes down as well.
        """
        process, disk = self.process, self.disk
        if process is None:
            return
        disk.error = self.rng.choice((StoreFull, StoreFull, StoreFailed))
        if self.rng.random() < 0.8:
            self._write_fails = True
            return
        process.end_turn()
        disk.fail_at = disk.calls + 1
        try:
            process.begin_flush()
            process.finish_flush()
            if process.store.has_failed:
                raise PowerCut
        finally:
            disk.fail_at = None

    def _fail_write(self, process: BrokerProcess) -> None:
        """Fail the write of this turn, if it writes to the log and to nothing else."""
        disk, broker = self.disk, process.broker
        if broker.topics.is_dirty or broker.groups.is_dirty:
            return
        calls = disk.calls
        disk.fail_at = calls + 1
        try:
            process.end_turn()
        finally:
            disk.fail_at = None
            self._write_fails = disk.calls == calls
            if not self._write_fails:
                self.truth.unnoted |= self.truth.just_asked

    def _crash(self) -> None:
        match self.rng.choice(("kill", "stop", "cut", "cut", "cut")):
            case "kill":
                self.kill()
            case "stop":
                self.stop()
            case "cut":
                self.disk.power_cut_at = self.disk.calls + self.rng.randint(1, 60)

    # --- end -------------------------------------------------------------------------------------

    def rest(self) -> None:
        """Run without failures and new transactions until everything open is decided."""
        self.network.faults = NO_FAULTS
        self.is_wild = self.is_silent = self._write_fails = False
        self.disk.power_cut_at = None
        for producer in self.producers:
            producer.is_alive = True
        for driver in self.drivers:
            driver.die()
        for writer in self._writers:  # a new driver decides what earlier ones have left
            self.begin_writer(writer, batches=1)
        self.clock.step_wall_clock(ms=max(0, self._latest_ms - self.clock.now_ms()))
        self.truth.asked_ms.clear()
        for _ in range(REST_STEPS):
            self.step()
            if self._is_quiet():
                break
        else:
            raise AssertionError(f"no rest: {self._what_is_left()}")
        assert self.process is not None
        self.truth.judge_rest(self.process)
        self.consumer.judge()
        self.stop()
        self.start()
        self.truth.judge_rest(self.process)

    def _is_quiet(self) -> bool:
        process = self.process
        if process is None or len(process.broker.transactions.coordinator.halves):
            return False
        if not all(client.is_idle for client in self.everybody if client.is_alive):
            return False
        ends = {queue: process.store.max_offset(*queue) for queue in self.consumer.positions}
        return self.consumer.positions == ends

    def _what_is_left(self) -> str:
        if self.process is None:
            return "the broker does not run"
        halves = [
            f"{half.key.decode()} stranded={half.is_stranded} deciding={half.is_being_decided}"
            f" why={half.reason!r} checks={half.checks} due in {half.due_ms - self.clock.now_ms()}"
            for half in self.process.broker.transactions.coordinator.halves
        ]
        errands = [
            f"{client.name}: {errand.code} {errand.fields}"
            for client in self.everybody
            if client.is_alive
            for errand in client.errands
        ]
        return f"halves {halves}, errands {errands}, consumer {self.consumer.positions}"

    def __enter__(self) -> World:
        logger = logging.getLogger("escrowmq")
        logger.addHandler(self.complaints)
        self._quiet = logger.level, logger.propagate
        logger.setLevel(logging.ERROR)
        logger.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("escrowmq")
        logger.removeHandler(self.complaints)
        logger.level, logger.propagate = self._quiet


def live(seed: int) -> World:
    """Run a world with random events; the seed determines all of them."""
    rng = Random(seed)
    weather = rng.choice((NO_FAULTS, STORM, NetworkFaults(loss=0.2, duplication=0.2, lateness=0.3)))
    odds = Odds(
        crash=rng.choice((0.0, 0.02, 0.05)),
        death=rng.choice((0.0, 0.02)),
        disk_fault=rng.choice((0.0, 0.06)),
        clock_jump=rng.choice((0.0, 0.0, 0.02)),
        upkeep=rng.choice((0.05, 0.3)),
    )
    with World(seed, producers=rng.randint(1, 3), weather=weather, is_wild=True) as world:
        world.run(rng.randint(40, 120), odds)
        world.rest()
    return world
