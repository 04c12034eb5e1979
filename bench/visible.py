"""Latency from a commit to a waiting consumer: alone, and beside other transactions."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from bench.broker import ResultTable, shaped
from bench.generator import Outcome, run
from bench.measure import Plan
from bench.samples import directory
from bench.servers import EscrowMQ, client
from tests.interop.remoting import COMMIT, Client
from tests.support.brokers import next_response, start_pull

COLUMNS = ("what", "p50", "p99", "goal")
TOPIC, OTHERS = "bench-visible", "bench-others"
COUNT = 2_000
NOTES = (
    "From just before the commit is sent until its own answer and that of a pull which waits for "
    "the message are both read, in one Python process: its own work is in the figure.",
)


def rows(plan: Plan) -> ResultTable:
    results: list[Sequence[str]] = []
    notes = list(NOTES)
    with directory() as path:
        server = EscrowMQ(path / "ours", {})
        server.start()
        try:
            with client(server) as admin:
                admin.create_topic(TOPIC, queues=1)
                admin.create_topic(OTHERS, queues=4)
            results.append(_row("alone", _seconds(server)))
            beside = _Beside(server, plan)
            results.append(_row("beside other transactions", _seconds(server)))
            outcome = beside.outcome()
        finally:
            server.stop()
    share = outcome.server_cpu_s / outcome.seconds
    notes.append(
        f"The others: {outcome.rate:,.0f} transactions a second on two connections; the broker "
        f"used {share:.0%} of its core."
    )
    return ResultTable(results, notes, COLUMNS)


class _Beside(threading.Thread):
    """Run other transactions until the measurement ends."""

    def __init__(self, server: EscrowMQ, plan: Plan) -> None:
        super().__init__(daemon=True)
        seconds = max(plan.seconds, 20.0)
        self._load = replace(shaped("tx", plan, 2, 1), topic=OTHERS, seconds=seconds)
        self._server = server
        self._outcome: Outcome | None = None
        self.start()

    def run(self) -> None:
        self._outcome = run(self._load, self._server.ports, self._server.pids)

    def outcome(self) -> Outcome:
        self.join()
        assert self._outcome is not None, "the load failed"
        return self._outcome


def _seconds(server: EscrowMQ) -> list[float]:
    with client(server) as producer, client(server) as consumer:
        first = producer.max_offset(TOPIC, 0)
        return sorted(_one(producer, consumer, first + number) for number in range(COUNT))


def _one(producer: Client, consumer: Client, offset: int) -> float:
    half = producer.send_half(TOPIC, bytes(1024), {"UNIQ_KEY": f"visible-{offset}"})
    start_pull(consumer, TOPIC, offset)
    began_s = time.perf_counter()
    producer.end_transaction(half, COMMIT, topic=TOPIC)
    answer = next_response(consumer)
    took_s = time.perf_counter() - began_s
    assert answer.code == 0, answer
    return took_s


def _row(what: str, seconds: list[float]) -> Sequence[str]:
    p50, p99 = statistics.median(seconds), seconds[int(len(seconds) * 0.99)]
    return what, f"{p50 * 1000:.2f} ms", f"{p99 * 1000:.2f} ms", "2 ms, 20 ms"
