"""Latency of an honest client and memory of the broker while a greedy client attacks.

The attacks are those of tests/e2e/broker/test_greedy_clients.py, one after the other, each against
a broker of its own. The honest client is measured before the attack and beside it. The attack has a
process of its own, because to make requests of megabytes would delay the threads beside it, and is
repeated as long as the honest client is measured.
"""

from __future__ import annotations

import multiprocessing
import ssl
import tempfile
from collections.abc import Sequence
from multiprocessing.synchronize import Event
from pathlib import Path

from bench.broker import ResultTable
from bench.measure import Plan
from bench.scale import allow_files
from tests.e2e.broker.test_greedy_clients import ATTACKS, CONF
from tests.support.brokers import Server
from tests.support.greedy import MIB, Attack, GreedyReport, Target, watch_honest

COLUMNS = ("attack", "honest p50 / p99", "p99 to quiet", "memory", "honest requests refused")
READY_S = 60.0


def rows(plan: Plan) -> ResultTable:
    allow_files()
    report: list[Sequence[str]] = []
    for attack in ATTACKS:
        quiet, greedy = measured(attack, plan)
        row = (
            attack.__name__.replace("_", " "),
            f"{_times(greedy)} (quiet: {_times(quiet)})",
            f"{greedy.p99_s / quiet.p99_s:.2f}",
            f"{(greedy.peak_bytes - quiet.before_bytes) // MIB:+} MiB",
            str(len(greedy.honest_failures)),
        )
        print(*row, sep="  ")
        report.append(row)
    notes = [
        "A time is that from a send to its delivery to a held pull, for a client that also joins a "
        "group and locks a queue in each round. The attack runs at full speed; on few cores it "
        "shares them with the broker and the honest client, so a ratio counts the machine as well.",
        f"Memory is what the broker takes more than before the attack, with a limit of "
        f"{CONF['escrowClientMemoryMax'] // MIB} MiB for all clients.",
        "Goal: p99 at most three times that of a quiet broker, and no honest request refused.",
    ]
    return ResultTable(report, notes, COLUMNS)


def measured(attack: Attack, plan: Plan) -> tuple[GreedyReport, GreedyReport]:
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="escrowmq-greedy-") as name,
        Server(Path(name), conf=CONF) as server,
    ):
        quiet = watch_honest(server, plan.seconds)
        has_begun = spawn.Event()
        attacker = spawn.Process(
            target=_repeat_attack, args=(attack, Target.of(server), has_begun), daemon=True
        )
        attacker.start()
        try:
            if not has_begun.wait(READY_S):
                raise TimeoutError(f"{attack.__name__} does not begin")
            return quiet, watch_honest(server, plan.seconds)
        finally:
            attacker.kill()
            attacker.join()


def _repeat_attack(attack: Attack, target: Target, has_begun: Event) -> None:
    allow_files()
    while True:
        try:
            for _ in attack(target):
                has_begun.set()
        except (OSError, ssl.SSLError):
            has_begun.set()  # the server has closed a connection of the attack


def _times(report: GreedyReport) -> str:
    return f"{report.p50_s * 1000:.2f} / {report.p99_s * 1000:.2f} ms"
