"""The run of the demo: start everything, pay, kill processes, wait until all is decided.

While Bob's processes pay, they are killed with SIGKILL at random moments, and so are Smith's
process and, once, the broker. Some local transactions fail and some decisions never reach the
broker. None of this is repaired by hand: the broker's checks resolve every open transaction.

Then a branch of Bob's bank cannot answer its checks (`branch.py`): its transactions are stranded,
and an operator resumes or decides them.
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

from escrowmq.admin import Cluster
from escrowmq.admin.queries import message_count, topic_offsets
from escrowmq.admin.transactions import TransactionListing, list_transactions
from escrowmq.clock import SystemClock
from escrowmq.remoting.headers import ListTransactions
from examples.bank import branch
from examples.bank.banks import BOB, SMITH, create_bank, open_bank, transfer_count
from examples.bank.processes import BrokerProcess, ChildProcess, DemoFailed, last_line

PAYER_COUNT: Final = 3
POLL_INTERVAL_S: Final = 0.1
DECISION_TIMEOUT_S: Final = 300.0
KILL_INTERVAL_S: Final = (0.5, 2.0)
BROKER_SETTINGS: Final[dict[str, object]] = {
    "transactionTimeOut": 2000,
    "transactionCheckInterval": 2000,
    "defaultTopicQueueNums": 4,
    **branch.BROKER_SETTINGS,
}


@dataclass(slots=True)
class KillCounts:
    """How many processes of each kind were killed."""

    payers_killed: int = 0
    payees_killed: int = 0
    brokers_killed: int = 0


@dataclass(slots=True)
class PayerRun:
    """A range of transfers, and the process that works on it."""

    process: ChildProcess
    next_transfer: int
    end_transfer: int

    def read_progress(self) -> None:
        line = last_line(self.process.output_file)
        if line:
            self.next_transfer = max(self.next_transfer, int(line) + 1)


@dataclass(slots=True)
class Scenario:
    directory: Path
    transfers: int
    seed: int
    bob_url: str
    smith_url: str
    kills: KillCounts = field(default_factory=KillCounts)
    stranded: int = 0  # transactions of the branch that were set aside
    broker: BrokerProcess = field(init=False)
    bob: Engine = field(init=False)
    smith: Engine = field(init=False)
    _clock: SystemClock = field(default_factory=SystemClock)
    _credited_at_start: int = 0  # credits when the payee was last started

    @contextmanager
    def running_services(self) -> Iterator[None]:
        """Create both databases and run the broker inside the block."""
        create_bank(BOB, self.bob_url)
        create_bank(SMITH, self.smith_url)
        self.bob, self.smith = open_bank(self.bob_url), open_bank(self.smith_url)
        self.broker = BrokerProcess(self.directory, BROKER_SETTINGS)
        try:
            self.broker.start()
            yield
        finally:
            self.broker.process.stop()
            self.bob.dispose()
            self.smith.dispose()

    def run(self, on_progress: Callable[[int, int], None], show: Callable[[str], None]) -> None:
        """Run until every transfer was tried and is decided on both sides.

        `on_progress` gets the number of transfers tried and the number credited. `show` gets the
        lines of what the operator does.
        """
        rng = random.Random(self.seed)
        share = -(-self.transfers // PAYER_COUNT)
        payers = [
            PayerRun(ChildProcess(f"payer-{i}", self.directory), i * share, (i + 1) * share)
            for i in range(PAYER_COUNT)
        ]
        payers[-1].end_transfer = self.transfers
        payee = ChildProcess("payee", self.directory)
        processes = [payee, *(payer.process for payer in payers)]
        try:
            self._start_payee(payee)
            for payer in payers:
                self._start_payer(payer)
            self._pay(payers, payee, rng, on_progress)
            self._wait_until_decided(payers, payee, on_progress)
            self._strand_and_operate(show)
            self._wait_until_credited(payee, on_progress)
        finally:
            for process in processes:
                process.kill()

    def _pay(
        self,
        payers: list[PayerRun],
        payee: ChildProcess,
        rng: random.Random,
        on_progress: Callable[[int, int], None],
    ) -> None:
        next_kill_s = self._clock.elapsed_s() + rng.uniform(*KILL_INTERVAL_S)
        while busy := [payer for payer in payers if payer.process.exit_code is None]:
            threading.Event().wait(POLL_INTERVAL_S)
            tried = self._tried_count(payers)
            on_progress(tried, transfer_count(self.smith))
            if not self.kills.brokers_killed and tried > self.transfers // 2:
                self.kills.brokers_killed += 1
                self.broker.process.kill()
                self.broker.start()
            if self._clock.elapsed_s() >= next_kill_s:
                next_kill_s = self._clock.elapsed_s() + rng.uniform(*KILL_INTERVAL_S)
                self._kill_one(busy, payee, rng)
        self._raise_if_failed(payers)

    def _kill_one(
        self, running_payers: list[PayerRun], payee: ChildProcess, rng: random.Random
    ) -> None:
        """Kill one process that has made progress since its start.

        On a slow machine, processes that are killed while they start would never get anything done.
        """
        credited = transfer_count(self.smith)
        at_work = [payer for payer in running_payers if last_line(payer.process.output_file)]
        if rng.random() < 0.25 and credited > self._credited_at_start:
            self._credited_at_start = credited
            payee.kill()
            self.kills.payees_killed += 1
            self._start_payee(payee)
        elif at_work:
            victim = rng.choice(at_work)
            victim.process.kill()
            victim.read_progress()
            self.kills.payers_killed += 1
            self._start_payer(victim)

    def _wait_until_decided(
        self, payers: list[PayerRun], payee: ChildProcess, on_progress: Callable[[int, int], None]
    ) -> None:
        """Wait until no transaction is open and every debit is credited.

        The payers have exited, but checks need a live member of their producer group, so one payer
        is started again and only waits.
        """
        checker = payers[0]
        checker.next_transfer = checker.end_transfer
        deadline_s = self._clock.elapsed_s() + DECISION_TIMEOUT_S
        self._start_payer(checker, "--wait")
        while self.open_count() and self._clock.elapsed_s() < deadline_s:
            threading.Event().wait(POLL_INTERVAL_S)
            on_progress(self.transfers, transfer_count(self.smith))
        checker.process.stop()
        self._wait_until_credited(payee, on_progress)

    def _wait_until_credited(
        self, payee: ChildProcess, on_progress: Callable[[int, int], None]
    ) -> None:
        """Wait until every debit is credited. If not in time, the comparison shows what is missing.

        A doubled credit would hide a missing one here, and the comparison shows that too.
        """
        deadline_s = self._clock.elapsed_s() + DECISION_TIMEOUT_S
        while transfer_count(self.smith) < transfer_count(self.bob):
            if self._clock.elapsed_s() > deadline_s:
                return
            if payee.exit_code is not None:
                self._start_payee(payee)
            threading.Event().wait(POLL_INTERVAL_S)
            on_progress(self.transfers, transfer_count(self.smith))

    def _strand_and_operate(self, show: Callable[[str], None]) -> None:
        show("A branch of Bob's bank cannot answer checks: its transactions are stranded.")
        scene = branch.Branch(self.bob, self.broker.servers, show)
        scene.pay(self.transfers)
        scene.wait_until_stranded(self.open_count, DECISION_TIMEOUT_S)
        stranded = self._list(ListTransactions(state="stranded"))
        self.stranded = len(stranded)
        if stranded:  # on a very slow machine, the branch may have answered before it broke
            scene.operate([listing.entry.transaction_id for listing in stranded])
            scene.wait_until_decided(self.open_count, DECISION_TIMEOUT_S)

    def open_count(self) -> int:
        return self._count(ListTransactions(state="open"))

    def checked_count(self, state: str) -> int:
        """Count the transactions in this state that were decided after a check."""
        return self._count(ListTransactions(state=state, checks_min=1))

    def decided_count(self, state: str) -> int:
        return self._count(ListTransactions(state=state))

    def message_count(self, topic: str) -> int:
        """Count the messages that were delivered to a topic."""
        with Cluster(self.broker.servers) as cluster:
            offsets = cluster.ask_all(lambda connection: topic_offsets(connection, [topic]))
            return sum(message_count(table[topic]) for _, table in offsets if topic in table)

    def _count(self, request: ListTransactions) -> int:
        return len(self._list(request))

    def _list(self, request: ListTransactions) -> list[TransactionListing]:
        with Cluster(self.broker.servers) as cluster:
            listings = list(list_transactions(cluster, [request]))
        if cluster.failures:
            raise DemoFailed("; ".join(map(str, cluster.failures)))
        return listings

    def _tried_count(self, payers: list[PayerRun]) -> int:
        for payer in payers:
            payer.read_progress()
        share = payers[0].end_transfer
        return sum(payer.next_transfer - i * share for i, payer in enumerate(payers))

    def _start_payer(self, payer: PayerRun, *extra_arguments: str) -> None:
        arguments = (
            self.bob_url,
            self.broker.servers,
            payer.next_transfer,
            payer.end_transfer,
            self.seed,
        )
        payer.process.start("examples.bank.payer", *arguments, *extra_arguments)

    def _start_payee(self, payee: ChildProcess) -> None:
        payee.start("examples.bank.payee", self.smith_url, self.broker.servers)

    def _raise_if_failed(self, payers: list[PayerRun]) -> None:
        for payer in payers:
            if payer.process.exit_code:
                raise DemoFailed(f"{payer.process.name} failed: see {payer.process.log_file}")
