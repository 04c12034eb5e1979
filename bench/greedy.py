"""Latency of an honest client and memory of the broker while a greedy client attacks.

The attacks are those of tests/e2e/broker/test_greedy_clients.py, one after the other, in each round
against a broker of its own. The honest client is measured before the attack and beside it. The
attack has a process of its own, because to make requests of megabytes would delay the threads
beside it, and is repeated as long as the honest client is measured.
"""

from __future__ import annotations

import multiprocessing
import os
import ssl
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Event
from pathlib import Path

from bench.broker import ResultTable
from bench.measure import Plan
from bench.scale import allow_files
from tests.e2e.broker.test_greedy_clients import ATTACKS, CONF
from tests.support.brokers import Server
from tests.support.greedy import MIB, Attack, GreedyReport, Target, watch_honest

COLUMNS = (
    "attack",
    "honest p50 / p99",
    "quiet broker",
    "quiet broker, busy machine",
    "p99 to quiet",
    "p99 to busy machine",
    "memory",
    "honest requests refused",
)
READY_S = 60.0
GREEDY_HOST = "127.0.0.2"  # the honest client has 127.0.0.1


def rows(plan: Plan) -> ResultTable:
    allow_files()
    report: list[Sequence[str]] = []
    for attack in ATTACKS:
        rounds = [measured(attack, plan) for _ in range(plan.rounds)]
        quiet, busy, greedy = (Latency.of(reports) for reports in zip(*rounds, strict=True))
        grown_bytes = max(greedy.peak_bytes - quiet.before_bytes for quiet, _, greedy in rounds)
        row = (
            attack.__name__.replace("_", " "),
            str(greedy),
            str(quiet),
            str(busy),
            f"{greedy.p99_s / quiet.p99_s:.2f}",
            f"{greedy.p99_s / busy.p99_s:.2f}",
            f"{grown_bytes // MIB:+} MiB",
            str(sum(len(greedy.honest_failures) for _, _, greedy in rounds)),
        )
        print(*row, sep="  ")
        report.append(row)
    notes = [
        "Each round has a broker of its own, and measures it quiet, on a busy machine and under "
        "the attack, one after the other. A figure is the median of the rounds; memory is the most "
        "of them, and refused requests are those of all.",
        "A time is that from a send to its delivery to a held pull, for a client that also joins a "
        "group and locks a queue in each round. The attack runs at full speed with the processor "
        "time that the broker and the honest client leave over (SCHED_IDLE), because greedy "
        "clients have machines of their own; it also has a host address of its own. A busy machine "
        "is one on which another such process computes and sends nothing.",
        f"Memory is what the broker takes more than before the attack, with a limit of "
        f"{CONF['escrowClientMemoryMax'] // MIB} MiB for all clients.",
        "Goal: p99 at most three times that of a quiet broker, and no honest request refused.",
    ]
    return ResultTable(report, notes, COLUMNS)


@dataclass(frozen=True)
class Latency:
    """The latency of the honest client: medians over the rounds."""

    p50_s: float
    p99_s: float

    @classmethod
    def of(cls, reports: Sequence[GreedyReport]) -> Latency:
        return cls(
            statistics.median(report.p50_s for report in reports),
            statistics.median(report.p99_s for report in reports),
        )

    def __str__(self) -> str:
        return f"{self.p50_s * 1000:.2f} / {self.p99_s * 1000:.2f} ms"


def measured(attack: Attack, plan: Plan) -> tuple[GreedyReport, GreedyReport, GreedyReport]:
    """Return the reports of a quiet broker, of one on a busy machine, and of one under attack."""
    with (
        tempfile.TemporaryDirectory(prefix="escrowmq-greedy-") as name,
        Server(Path(name), conf=CONF) as server,
    ):
        quiet = watch_honest(server, plan.seconds)
        with _beside(_compute):
            busy = watch_honest(server, plan.seconds)
        with _beside(_repeat_attack, attack, replace(Target.of(server), source_host=GREEDY_HOST)):
            return quiet, busy, watch_honest(server, plan.seconds)


@contextmanager
def _beside(target: Callable[..., None], *args: object) -> Iterator[None]:
    """Run a function in a process of its own as long as the block."""
    spawn = multiprocessing.get_context("spawn")
    has_begun = spawn.Event()
    process = spawn.Process(target=_run_when_idle, args=(target, has_begun, *args), daemon=True)
    process.start()
    try:
        if not has_begun.wait(READY_S):
            raise TimeoutError(f"{target.__name__} does not begin")
        yield
    finally:
        process.kill()
        process.join()


def _run_when_idle(target: Callable[..., None], *args: object) -> None:
    """Run a function with the processor time that nobody else wants.

    Greedy clients have machines of their own. On the same cores they would delay the honest client
    by the time slices of the kernel, whatever the broker does.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    target(*args)


def _compute(has_begun: Event) -> None:
    has_begun.set()
    while True:
        sum(range(1_000))


def _repeat_attack(has_begun: Event, attack: Attack, target: Target) -> None:
    allow_files()
    while True:
        try:
            for _ in attack(target):
                has_begun.set()
        except (OSError, ssl.SSLError):
            has_begun.set()  # the server has closed a connection of the attack
