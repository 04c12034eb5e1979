"""A broker, producers, writers, a consumer, an operator and failures, simulated in one process.

The seed determines everything: network, disk, clock, what each client does and when it dies. Each
step advances the clock, delivers data and lets every client act once. Then the model
(`escrow_model.py`) asserts that the visible messages are allowed to be visible.

`run_until_idle` ends a run: without failures, with all clients alive, until no work is left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from escrowmq.clock import ManualClock
from escrowmq.config import TransactionConfig
from escrowmq.errors import StoreError, StoreFailed, StoreFull, StoreUnavailable
from escrowmq.testing.disks import FaultyDisk, PowerCut, Survival
from escrowmq.testing.network import NO_FAULTS, Endpoint, Network, NetworkFaults
from tests.simulation.escrow_broker import ESCROW, BrokerProcess, TracebackCollector
from tests.simulation.escrow_clients import (
    Client,
    Consumer,
    EndMode,
    Operator,
    Producer,
    WriterDriver,
)
from tests.simulation.escrow_model import EscrowModel, HalfPosition, check_disk

UNRELIABLE_NETWORK = NetworkFaults(loss=0.08, duplication=0.08, lateness=0.15)
VERY_UNRELIABLE_NETWORK = NetworkFaults(loss=0.2, duplication=0.2, lateness=0.3)
STEPS_UNTIL_IDLE_MAX = 1_500
YEAR_MS = 365 * 86_400_000


@dataclass(frozen=True)
class EventProbabilities:
    """The probability of each event in a step."""

    begin: float = 0.35
    writer: float = 0.03
    crash: float = 0.02
    client_death: float = 0.02
    disconnect: float = 0.02
    clock_jump: float = 0.01
    disk_fault: float = 0.02
    maintenance: float = 0.25


class Simulation:
    """A whole run: the broker, its clients, and the model that checks them."""

    def __init__(
        self,
        seed: int,
        *,
        producers: int = 2,
        faults: NetworkFaults = NO_FAULTS,
        config: TransactionConfig = ESCROW,
        has_unreliable_clients: bool = False,
    ) -> None:
        self.rng = Random(seed)
        # Unreliable clients are slow and respond only to some checks.
        self.has_unreliable_clients = has_unreliable_clients
        self.ignores_checks = False  # if True, producers respond to no checks
        self.clock = ManualClock()
        self.disk = FaultyDisk(clock=self.clock, seed=seed)
        self.network = Network(Random(seed + 1), self.clock, faults)
        self.model = EscrowModel()
        self.config = config
        self.process: BrokerProcess | None = None
        self._restart_s = 0.0  # when the broker starts again
        self._name_count = 0
        self._writers: list[str] = []
        self.producers = [Producer(self, f"p{number}") for number in range(producers)]
        self.drivers: list[WriterDriver] = []
        self.consumer = Consumer(self, "c")
        self.operator = Operator(self, "o")
        self.traceback_collector = TracebackCollector()
        self.survivals: tuple[Survival, ...] = ("none", "all", "mixed", "mixed")
        self._fails_next_write = False
        self.start_count = 0
        self.power_cut_count = 0
        self.checks_disk = True  # at every start, which is slow

    # --- for clients -----------------------------------------------------------------------------

    def new_name(self, prefix: str) -> str:
        """Return a name of letters and digits, as the keys of real clients are."""
        self._name_count += 1
        return f"{prefix}n{self._name_count}"

    def connect(self, client: Client) -> Endpoint | None:
        if self.process is None:
            return None
        process = self.process
        client_endpoint, server_endpoint = self.network.connect(client, process)
        process.endpoints[server_endpoint] = None
        server_endpoint.on_oneway = partial(self.model.check_oneway, process)
        return client_endpoint

    def has_expired(self, position: HalfPosition) -> bool:
        """Return whether the log no longer has the half, so that its state cannot be reported."""
        return self.process is not None and position[1] < self.process.store.begin

    def has_many_messages(self, key: str) -> bool:
        return len(self.model.members[self.model.messages[key].transaction]) > 1

    @property
    def clients(self) -> list[Client]:
        return [*self.producers, *self.drivers, self.consumer, self.operator]

    # --- time ------------------------------------------------------------------------------------

    def run(self, steps: int, probabilities: EventProbabilities | None = None) -> None:
        for _ in range(steps):
            self.step(probabilities)

    def step(self, probabilities: EventProbabilities | None = None) -> None:
        self.clock.advance(ms=self.rng.choice((5, 20, 20, 50, 100)))
        self.attempt(self._serve)
        for client in self.clients:
            if client.is_alive:
                self.attempt(client.act)
        if probabilities is not None:
            self.attempt(lambda: self._inject_events(probabilities))
        if self.process is not None:
            try:
                self.model.check_visible(self.process)
            except PowerCut:  # a read opens files, and the power may fail at any call
                self.power_cut()
            except (StoreError, MemoryError):
                if self.disk.calls != self.disk.fail_at:
                    raise
                # The fault has met this check. The next step makes it again.
        assert not self.traceback_collector.tracebacks, self.traceback_collector.tracebacks[0]

    def attempt(self, step: Callable[[], None]) -> None:
        """Run a step in which the power or the disk may fail."""
        try:
            step()
        except PowerCut:
            self.power_cut()
        except (StoreError, MemoryError) as error:
            process = self.process
            if process is not None and not isinstance(error, StoreFull | StoreUnavailable):
                process.store.fail(error)
        if self.process is not None:
            self.model.record_flush(self.process)
            if self.process.store.has_failed:  # only a restart can help
                self.kill()

    def _serve(self) -> None:
        if self.process is None:
            if self.clock.elapsed_s() >= self._restart_s:
                self.start()
            return
        self.model.checked_in_turn.clear()
        self.network.deliver()
        process = self.process
        if self._fails_next_write:
            self._fail_write(process)
        process.end_turn()
        process.tick()
        if not self.has_unreliable_clients or self.rng.random() < 0.7:
            process.finish_flush()
        process.begin_flush()
        process.end_turn()

    # --- runs of the broker ----------------------------------------------------------------------

    def start(self) -> None:
        try:
            process = BrokerProcess(self.disk, self.clock, config=self.config)
        except StoreError as error:
            raise AssertionError(f"the broker does not start: {error}") from error
        self.process = process
        self.start_count += 1
        power_cut_at, self.disk.power_cut_at = self.disk.power_cut_at, None
        self.model.check_start(process)
        if self.checks_disk or self.power_cut_count:
            check_disk(process, self.model.unjournaled)
        self.disk.power_cut_at = power_cut_at
        self.consumer.forget_lost_messages()

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()
            self._handle_exit()

    def kill(self) -> None:
        """Kill the process but not the machine."""
        if self.process is not None:
            self.model.check_visible(self.process)
            self.process.kill()
            self._handle_exit()

    def power_cut(self) -> None:
        self.power_cut_count += 1
        if self.process is not None:
            self.model.record_flush(self.process)
        self.disk = self.disk.power_cut(self.rng, self.rng.choice(self.survivals))
        if self.has_unreliable_clients and self.rng.random() < 0.2:
            self.disk.power_cut_at = self.rng.randint(1, 40)  # a second cut, during the next start
        self._handle_exit()

    def _handle_exit(self) -> None:
        process, self.process = self.process, None
        if self.has_unreliable_clients and self.rng.random() < 0.3:
            self._jump()  # the clock is wrong at one start and may be right at the next
        self._restart_s = self.clock.elapsed_s() + self.rng.choice((0.01, 0.3))
        if process is not None:
            for endpoint in list(process.endpoints):
                self.network.disconnect(endpoint)

    # --- events ----------------------------------------------------------------------------------

    def start_writer(self, writer: str, batches: int = 2) -> WriterDriver:
        if writer not in self._writers:
            self._writers.append(writer)
        driver = WriterDriver(self, self.new_name(writer), writer, batches)
        self.drivers.append(driver)
        return driver

    def _inject_events(self, probabilities: EventProbabilities) -> None:
        rng = self.rng

        def happens(probability: float) -> bool:
            return rng.random() < probability

        if happens(probabilities.begin):
            self._begin_transaction()
        if happens(probabilities.writer):
            self.start_writer(rng.choice(("w0", "w1")))
        if happens(probabilities.client_death):
            client = rng.choice([*self.producers, *self.drivers])
            client.die()
        for producer in self.producers:
            if not producer.is_alive and happens(0.1):
                producer.is_alive = True
        if happens(probabilities.disconnect):
            endpoints = [client.endpoint for client in self.clients if client.endpoint is not None]
            if endpoints:
                self.network.disconnect(rng.choice(endpoints))
        if happens(probabilities.clock_jump):
            self._jump()
        if happens(probabilities.maintenance):
            self._run_maintenance()
        if happens(probabilities.disk_fault):
            self._fail_disk()
        if happens(probabilities.crash):
            self._crash()

    def _jump(self) -> None:
        """Set the wall clock, back or by so much that no restart could have taken as long."""
        self.clock.step_wall_clock(ms=self.rng.choice((-YEAR_MS, -5_000, 90_000, YEAR_MS)))

    def _begin_transaction(self) -> None:
        rng = self.rng
        live_producers = [producer for producer in self.producers if producer.is_alive]
        if live_producers:
            end_modes: tuple[EndMode, ...] = ("acknowledged", "one way", "never", "contradicted")
            rng.choice(live_producers).begin(
                rng.choice((1, 1, 1, 2, 4)),
                commits=rng.random() < 0.7,
                end_mode=rng.choice(end_modes),
                size=rng.choice((20, 20, 300)),
            )

    def maintain(self, task: Callable[[BrokerProcess], None]) -> None:
        """Run a maintenance task of the broker, if it runs."""
        process = self.process
        if process is not None:
            self.attempt(lambda: task(process))

    def _run_maintenance(self) -> None:
        process = self.process
        if process is not None:
            self.rng.choice(
                (
                    process.begin_checkpoint,
                    process.finish_checkpoint,
                    process.save_snapshot,
                    process.save,
                    process.expire,
                    process.time_out_flush_waiters,
                )
            )()

    def _fail_disk(self) -> None:
        """Let the next write of the log, or a flush of it, fail.

        After a failed flush the kernel may consider pages clean that it never wrote. A process that
        starts on the same machine cannot detect that, so a power cut follows the failed flush.
        """
        process, disk = self.process, self.disk
        if process is None:
            return
        disk.error = self.rng.choice((StoreFull, StoreFull, StoreFailed))
        if self.rng.random() < 0.8:
            self._fails_next_write = True
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
        """Let the write of this turn fail, if the turn writes to the log and to no other file."""
        disk, broker = self.disk, process.broker
        if broker.topics.is_dirty or broker.groups.is_dirty:
            return
        calls = disk.calls
        disk.fail_at = calls + 1
        try:
            process.end_turn()
        finally:
            disk.fail_at = None
            self._fails_next_write = disk.calls == calls
            if not self._fails_next_write:
                self.model.unjournaled |= self.model.checked_in_turn

    def _crash(self) -> None:
        match self.rng.choice(("kill", "stop", "power cut", "power cut", "power cut")):
            case "kill":
                self.kill()
            case "stop":
                self.stop()
            case "power cut":
                self.disk.power_cut_at = self.disk.calls + self.rng.randint(1, 60)

    # --- end -------------------------------------------------------------------------------------

    def run_until_idle(self) -> None:
        """Run without failures and new transactions until everything open is decided."""
        self.network.faults = NO_FAULTS
        self.has_unreliable_clients = self.ignores_checks = self._fails_next_write = False
        self.disk.power_cut_at = None
        for producer in self.producers:
            producer.is_alive = True
        for driver in self.drivers:
            driver.die()
        for writer in self._writers:  # a new driver decides the open batches
            self.start_writer(writer, batches=1)
        for _ in range(STEPS_UNTIL_IDLE_MAX):
            self.step()
            if self._is_idle():
                break
        else:
            raise AssertionError(f"still busy: {self._describe_open_work()}")
        assert self.process is not None
        self.model.check_final_state(self.process)
        self.consumer.check_received_all()
        self.stop()
        self.start()
        self.model.check_final_state(self.process)

    def _is_idle(self) -> bool:
        process = self.process
        if process is None or len(process.broker.transactions.coordinator.halves):
            return False
        if not all(client.is_idle for client in self.clients if client.is_alive):
            return False
        next_offsets = self.consumer.next_offsets
        return next_offsets == {queue: process.store.max_offset(*queue) for queue in next_offsets}

    def _describe_open_work(self) -> str:
        if self.process is None:
            return "the broker does not run"
        halves = [
            f"{half.key.decode()} stranded={half.is_stranded} deciding={half.is_being_decided}"
            f" reason={half.reason!r} checks={half.checks}"
            f" due in {half.due_ms - self.process.now_ms()} ms"
            for half in self.process.broker.transactions.coordinator.halves
        ]
        requests = [
            f"{client.name}: {pending.code} {pending.fields}"
            for client in self.clients
            if client.is_alive
            for pending in client.pending_requests
        ]
        return f"halves {halves}, requests {requests}, consumer {self.consumer.next_offsets}"

    def __enter__(self) -> Simulation:
        logger = logging.getLogger("escrowmq")
        logger.addHandler(self.traceback_collector)
        self._logger_state = logger.level, logger.propagate
        logger.setLevel(logging.ERROR)
        logger.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("escrowmq")
        logger.removeHandler(self.traceback_collector)
        logger.level, logger.propagate = self._logger_state


def run_random(seed: int) -> Simulation:
    """Run a simulation with random events. The seed determines all of them."""
    rng = Random(seed)
    faults = rng.choice((NO_FAULTS, UNRELIABLE_NETWORK, VERY_UNRELIABLE_NETWORK))
    probabilities = EventProbabilities(
        crash=rng.choice((0.0, 0.02, 0.05)),
        client_death=rng.choice((0.0, 0.02)),
        disk_fault=rng.choice((0.0, 0.06)),
        clock_jump=rng.choice((0.0, 0.0, 0.02)),
        maintenance=rng.choice((0.05, 0.3)),
    )
    with Simulation(
        seed, producers=rng.randint(1, 3), faults=faults, has_unreliable_clients=True
    ) as simulation:
        simulation.run(rng.randint(40, 120), probabilities)
        simulation.run_until_idle()
    return simulation
