"""The story in order: start everything, let them pay, break things, wait until it is settled.

While Bob's processes pay, they are killed with -9 at moments nobody chose, and so are Smith's
process and, once, the broker. Some local transactions fail and some decisions never reach the
broker. Afterwards nobody repairs anything: the broker asks, the databases answer.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sqlalchemy import Engine

from escrowmq.cli.cluster import Cluster
from escrowmq.clock import SystemClock
from escrowmq.demo.banks import BOB, SMITH, booked, found_bank, open_bank
from escrowmq.demo.processes import BrokerProcess, Process, last_line
from escrowmq.errors import DemoFailed
from escrowmq.remoting.headers import ListTransactions

PAYERS: Final = 3
STEP_S: Final = 0.1
SETTLED_S: Final = 300.0
KILLED_EVERY_S: Final = (0.5, 2.0)
SETTINGS: Final[dict[str, object]] = {
    "transactionTimeOut": 2000,
    "transactionCheckInterval": 2000,
    "defaultTopicQueueNums": 4,
}


@dataclass(slots=True)
class Deeds:
    """What was done to them."""

    payers_killed: int = 0
    payees_killed: int = 0
    brokers_killed: int = 0


@dataclass(slots=True)
class Payer:
    """A share of the transfers, and the process that is at it."""

    process: Process
    next: int
    last: int

    def note(self) -> None:
        said = last_line(self.process.said)
        if said:
            self.next = max(self.next, int(said) + 1)


@dataclass(slots=True)
class Story:
    directory: Path
    transfers: int
    seed: int
    bob_url: str
    smith_url: str
    deeds: Deeds = field(default_factory=Deeds)
    broker: BrokerProcess = field(init=False)
    bob: Engine = field(init=False)
    smith: Engine = field(init=False)
    _clock: SystemClock = field(default_factory=SystemClock)
    _credited: int = 0  # when Smith's process was last started

    @contextmanager
    def stage(self) -> Iterator[None]:
        """Both databases and the broker; everything has ended when this is left."""
        found_bank(BOB, self.bob_url)
        found_bank(SMITH, self.smith_url)
        self.bob, self.smith = open_bank(self.bob_url), open_bank(self.smith_url)
        self.broker = BrokerProcess(self.directory, SETTINGS)
        try:
            self.broker.start()
            yield
        finally:
            self.broker.process.stop()
            self.bob.dispose()
            self.smith.dispose()

    def play(self, shown: Callable[[int, int], None]) -> None:
        """Until every transfer was tried, and each is settled on both sides. `shown` is told how
        many were tried and how many are credited."""
        choose = random.Random(self.seed)
        share = -(-self.transfers // PAYERS)
        payers = [
            Payer(Process(f"payer-{i}", self.directory), i * share, (i + 1) * share)
            for i in range(PAYERS)
        ]
        payers[-1].last = self.transfers
        payee = Process("payee", self.directory)
        processes = [payee, *(payer.process for payer in payers)]
        try:
            self._start_payee(payee)
            for payer in payers:
                self._start_payer(payer)
            self._pay(payers, payee, choose, shown)
            self._settle(payers, payee, shown)
        finally:
            for process in processes:
                process.kill()

    def _pay(
        self,
        payers: list[Payer],
        payee: Process,
        choose: random.Random,
        shown: Callable[[int, int], None],
    ) -> None:
        killed_s = self._clock.elapsed_s() + choose.uniform(*KILLED_EVERY_S)
        while busy := [payer for payer in payers if payer.process.exit_code is None]:
            threading.Event().wait(STEP_S)
            tried = self._tried(payers)
            shown(tried, booked(self.smith))
            if not self.deeds.brokers_killed and tried > self.transfers // 2:
                self.deeds.brokers_killed += 1
                self.broker.process.kill()
                self.broker.start()
            if self._clock.elapsed_s() >= killed_s:
                killed_s = self._clock.elapsed_s() + choose.uniform(*KILLED_EVERY_S)
                self._kill_one(busy, payee, choose)
        self._refuse_failures(payers)

    def _kill_one(self, busy: list[Payer], payee: Process, choose: random.Random) -> None:
        """Of those that have begun to work: on a slow machine nobody would get anywhere else."""
        credited = booked(self.smith)
        at_work = [payer for payer in busy if last_line(payer.process.said)]
        if choose.random() < 0.25 and credited > self._credited:
            self._credited = credited
            payee.kill()
            self.deeds.payees_killed += 1
            self._start_payee(payee)
        elif at_work:
            victim = choose.choice(at_work)
            victim.process.kill()
            victim.note()
            self.deeds.payers_killed += 1
            self._start_payer(victim)

    def _settle(
        self, payers: list[Payer], payee: Process, shown: Callable[[int, int], None]
    ) -> None:
        """The payers are gone, but somebody of their group must be there to be asked."""
        witness = payers[0]
        witness.next = witness.last
        deadline_s = self._clock.elapsed_s() + SETTLED_S
        self._start_payer(witness, "--wait")
        while self.open_transactions() or booked(self.smith) < booked(self.bob):
            if self._clock.elapsed_s() > deadline_s:
                return  # the books will show what is missing
            if payee.exit_code is not None:
                self._start_payee(payee)
            threading.Event().wait(STEP_S)
            shown(self.transfers, booked(self.smith))
        witness.process.stop()

    def open_transactions(self) -> int:
        return self._count(ListTransactions(state="open"))

    def asked_about(self, state: str) -> int:
        """How many that ended like this were settled by a question of the broker's."""
        return self._count(ListTransactions(state=state, checks_min=1))

    def settled(self, state: str) -> int:
        return self._count(ListTransactions(state=state))

    def _count(self, wanted: ListTransactions) -> int:
        cluster = Cluster(self.broker.servers, None)
        count = sum(1 for _ in cluster.entries([wanted]))
        if cluster.failed:
            raise DemoFailed("; ".join(cluster.failed))
        return count

    def _tried(self, payers: list[Payer]) -> int:
        for payer in payers:
            payer.note()
        share = payers[0].last
        return sum(payer.next - i * share for i, payer in enumerate(payers))

    def _start_payer(self, payer: Payer, *more: str) -> None:
        arguments = self.bob_url, self.broker.servers, payer.next, payer.last, self.seed
        payer.process.start("escrowmq.demo.payer", *arguments, *more)

    def _start_payee(self, payee: Process) -> None:
        payee.start("escrowmq.demo.payee", self.smith_url, self.broker.servers)

    def _refuse_failures(self, payers: list[Payer]) -> None:
        for payer in payers:
            if payer.process.exit_code:
                raise DemoFailed(f"{payer.process.name} failed: see {payer.process.log}")
