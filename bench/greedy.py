"""Latency of an honest client and memory of the broker while a greedy client attacks.

The attacks are those of tests/e2e/broker/test_greedy_clients.py, one after the other, each against
a broker of its own. The honest client is measured before the attack and beside it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.broker import ResultTable
from bench.measure import Plan
from bench.scale import allow_files
from tests.e2e.broker.test_greedy_clients import ATTACKS, CONF
from tests.support.brokers import Server
from tests.support.greedy import MIB, Attack, GreedyReport, quiet_latency, watch

COLUMNS = ("attack", "honest p50 / p99", "p99 to quiet", "memory", "honest requests refused")


def rows(plan: Plan) -> ResultTable:
    allow_files()
    report: list[Sequence[str]] = []
    for attack in ATTACKS:
        quiet, greedy = measured(attack, plan)
        report.append(
            (
                attack.__name__.replace("_", " "),
                f"{_times(greedy)} (quiet: {_times(quiet)})",
                f"{greedy.p99_s / quiet.p99_s:.2f}",
                f"{greedy.grown_bytes // MIB:+} MiB",
                str(len(greedy.honest_failures)),
            )
        )
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
    with (
        tempfile.TemporaryDirectory(prefix="escrowmq-greedy-") as name,
        Server(Path(name), conf=CONF) as server,
    ):
        return quiet_latency(server, plan.seconds), watch(server, attack, honest_rounds_after=100)


def _times(report: GreedyReport) -> str:
    return f"{report.p50_s * 1000:.2f} / {report.p99_s * 1000:.2f} ms"
