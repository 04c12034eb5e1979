"""The Spark sink: rows of 1 KiB to a topic, at least once and exactly once, on local[2].

What counts is the CPU time of all processes (JVM, Python workers, broker) per row: unlike a rate,
it hardly depends on other work on the machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from bench.broker import ResultTable
from bench.cpu_time import Meter
from bench.figures import ratio
from bench.measure import Plan
from bench.memory import full_of_pages
from bench.samples import directory
from bench.servers import EscrowMQ, client

COLUMNS = ("what", "rows/s", "CPU us/row", "of which broker", "to at-least-once", "goal")
BODY_BYTES = 1024
QUEUES = 8
WARM_UPS = 4  # warm-up rounds: a cold JVM costs several times more
NOTES = (
    "Rows are made by the JVM (`range`, a constant body). Variants take turns; a figure is the "
    "median of its rounds. Processor time is that of the JVM, its Python workers and the broker, "
    "user and system together. `noop` throws the same rows away inside the JVM.",
    "Memory is full of file pages before it begins (`bench/memory.py`).",
)


def rows(plan: Plan) -> ResultTable:
    from bench.spark_read import session  # Spark is an extra

    count = 50_000 if plan.quick else 300_000
    spark = session()
    kinds = ("noop", "at-least-once", "exactly-once")
    results: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
    with directory() as path, full_of_pages(path, plan):
        server = EscrowMQ(path / "server", {})
        server.start()
        try:
            for number in range(plan.rounds + WARM_UPS):
                for kind in kinds:
                    figures = _measured(spark, server, kind, count, f"bench-{kind}")
                    if number >= WARM_UPS:
                        results[kind].append(figures)
        finally:
            server.stop()
            spark.stop()
    return ResultTable(_table(results), list(NOTES), COLUMNS)


def _measured(
    spark: Any, server: EscrowMQ, kind: str, count: int, topic: str
) -> tuple[float, float, float]:
    """Return rows per second, and CPU microseconds per row: of all, and of the broker."""
    jvm = spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()
    table = spark.range(0, count, numPartitions=2).selectExpr(
        f"cast(repeat('x', {BODY_BYTES}) as binary) as body"
    )
    writer = table.write.format("noop").mode("overwrite")
    if kind != "noop":
        with client(server) as creator:
            creator.create_topic(topic, queues=QUEUES)
        writer = table.write.format("escrowmq").mode("append").option("topic", topic)
        writer = writer.option("servers", server.namesrv_address).option("guarantee", kind)
    meter, broker, began_s = Meter(jvm), Meter(*server.pids), time.perf_counter()
    writer.save()
    took_s = time.perf_counter() - began_s
    broker_s, spark_s = broker.spent_s(), meter.spent_s()
    return count / took_s, (spark_s + broker_s) * 1e6 / count, broker_s * 1e6 / count


def _table(results: dict[str, list[tuple[float, float, float]]]) -> list[Sequence[str]]:
    medians = {
        kind: tuple(statistics.median(column) for column in zip(*rounds, strict=True))
        for kind, rounds in results.items()
    }
    base = medians["at-least-once"]
    goals = {"at-least-once": "8-9 us", "exactly-once": "15 us, rate 0.50"}
    return [
        (
            kind,
            f"{rate:,.0f}",
            f"{cpu:.1f}",
            f"{broker:.1f}",
            f"rate {ratio(rate, base[0])}, CPU {ratio(cpu, base[1])}",
            goals.get(kind, ""),
        )
        for kind, (rate, cpu, broker) in medians.items()
    ]
