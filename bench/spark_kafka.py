"""Our source and sink beside Spark's own for Kafka: the same rows, machine, session and round.

What counts is the CPU time of all processes per row: the JVM of Spark, its Python workers (Kafka
has none) and the broker, user and system, until the broker is idle again.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession

from bench.broker import ResultTable
from bench.cpu_time import Meter
from bench.figures import ratio
from bench.kafka import CONNECTOR, KAFKA, Kafka, connector_jars
from bench.measure import Plan
from bench.memory import full_of_pages
from bench.samples import directory
from bench.servers import EscrowMQ, client
from bench.spark_read import session

COLUMNS: Final = ("what", "rows/s", "CPU us/row", "Spark", "broker", "CPU to Kafka's", "goal")
BODY_BYTES: Final = 1024
QUEUES: Final = 8
# The columns of Kafka's source, except for the type of its time.
LIKE_KAFKA: Final = "keys,body,topic,queue_id,queue_offset,store_time"
READS: Final = 2  # more rows than are written, because a read is fast
WARM_UPS: Final = 6  # warm-up runs of each: a cold JVM costs ten times more, and two are too few
REST_S: Final = 1.5
KAFKA_READ, KAFKA_WRITE = "Kafka: read", "Kafka: write"
READ: Final = "ours: read, the same columns"
AT_LEAST_ONCE, EXACTLY_ONCE = "ours: write, at least once", "ours: write, exactly once"
GOALS: Final = {READ: 1.0, AT_LEAST_ONCE: 1.2, EXACTLY_ONCE: 2.0}


@dataclass(frozen=True)
class Cost:
    """CPU time of one run per row."""

    rate: float
    spark_us: float
    broker_us: float

    @property
    def cpu_us(self) -> float:
        return self.spark_us + self.broker_us


@dataclass(frozen=True)
class Variant:
    run: Callable[[], None]
    broker: Kafka | EscrowMQ
    beside: str
    rows: int
    rest_s: float = 0.0  # our broker writes its index once a second


def rows(plan: Plan) -> ResultTable:
    """Run the benchmark. Raises Unavailable if Kafka cannot be fetched."""
    count = 50_000 if plan.quick else 200_000
    jars = connector_jars()
    with directory() as path, full_of_pages(path, plan):
        kafka = Kafka(path / "kafka", partitions=QUEUES)
        ours = EscrowMQ(path / "ours", {"diskMaxUsedSpaceRatio": 99})
        spark = None
        try:
            kafka.start()
            ours.start()
            spark = session(jars)
            results = _measured(spark, _variants(spark, kafka, ours, count), plan)
        finally:
            if spark is not None:
                spark.stop()
            ours.stop()
            kafka.stop()
    return ResultTable(_table(results), _notes(count), COLUMNS)


def _variants(spark: SparkSession, kafka: Kafka, ours: EscrowMQ, count: int) -> dict[str, Variant]:
    made = spark.range(0, count, numPartitions=2)
    body = f"cast(repeat('x', {BODY_BYTES}) as binary)"
    for_kafka, for_ours = made.selectExpr(f"{body} as value"), made.selectExpr(f"{body} as body")
    with client(ours) as creator:
        for topic in ("read", "once", "exactly"):
            creator.create_topic(topic, queues=QUEUES)
    kafka.create_topics(spark.sparkContext._jvm, "read", "written")
    to_kafka, to_ours = partial(_to_kafka, for_kafka, kafka), partial(_to_ours, for_ours, ours)
    for _ in range(READS):
        to_kafka("read")
        to_ours("read", "at-least-once")
    return {
        KAFKA_READ: Variant(
            partial(_discard, _from_kafka(spark, kafka)), kafka, KAFKA_READ, READS * count
        ),
        READ: Variant(
            partial(_discard, _from_ours(spark, ours, LIKE_KAFKA)), ours, KAFKA_READ, READS * count
        ),
        KAFKA_WRITE: Variant(partial(to_kafka, "written"), kafka, KAFKA_WRITE, count, REST_S),
        AT_LEAST_ONCE: Variant(
            partial(to_ours, "once", "at-least-once"), ours, KAFKA_WRITE, count, REST_S
        ),
        EXACTLY_ONCE: Variant(
            partial(to_ours, "exactly", "exactly-once"), ours, KAFKA_WRITE, count, REST_S
        ),
    }


def _to_kafka(table: DataFrame, kafka: Kafka, topic: str) -> None:
    writer = table.write.format("kafka").option("kafka.bootstrap.servers", kafka.address)
    writer.option("topic", topic).save()


def _to_ours(table: DataFrame, ours: EscrowMQ, topic: str, guarantee: str) -> None:
    writer = table.write.format("escrowmq").mode("append").option("servers", ours.namesrv_address)
    writer.option("topic", topic).option("guarantee", guarantee).save()


def _from_kafka(spark: SparkSession, kafka: Kafka) -> DataFrame:
    reader = spark.read.format("kafka").option("kafka.bootstrap.servers", kafka.address)
    return reader.option("subscribe", "read").load()


def _from_ours(spark: SparkSession, ours: EscrowMQ, columns: str) -> DataFrame:
    reader = spark.read.format("escrowmq").option("servers", ours.namesrv_address)
    return reader.option("subscribe", "read").option("columns", columns).load()


def _discard(table: DataFrame) -> None:
    table.write.format("noop").mode("overwrite").save()


def _measured(
    spark: SparkSession, variants: dict[str, Variant], plan: Plan
) -> dict[str, tuple[Cost, str]]:
    """Return the median of each, and its ratio to Kafka."""
    jvm: Any = spark.sparkContext._jvm
    pid = int(jvm.java.lang.ProcessHandle.current().pid())
    results: dict[str, list[Cost]] = {name: [] for name in variants}
    for number in range(plan.rounds + WARM_UPS):
        for name, variant in variants.items():
            cost = _cost(pid, variant)
            report = f"{cost.spark_us:.1f} + {cost.broker_us:.1f} us/row"
            print(f"round {number - WARM_UPS + 1}, {name}: {report}", file=sys.stderr, flush=True)
            if number >= WARM_UPS:
                results[name].append(cost)
    return {name: (_median(costs), variants[name].beside) for name, costs in results.items()}


def _cost(jvm: int, variant: Variant) -> Cost:
    spark, broker = Meter(jvm), Meter(*variant.broker.pids)
    began_s = time.perf_counter()
    variant.run()
    took_s = time.perf_counter() - began_s
    spark_s = spark.spent_s()
    time.sleep(variant.rest_s)
    broker_s = broker.spent_s()
    rows = variant.rows
    return Cost(rows / took_s, spark_s * 1e6 / rows, broker_s * 1e6 / rows)


def _median(costs: Sequence[Cost]) -> Cost:
    return Cost(
        statistics.median(cost.rate for cost in costs),
        statistics.median(cost.spark_us for cost in costs),
        statistics.median(cost.broker_us for cost in costs),
    )


def _table(results: dict[str, tuple[Cost, str]]) -> list[Sequence[str]]:
    return [
        (
            name,
            f"{cost.rate:,.0f}",
            f"{cost.cpu_us:.1f}",
            f"{cost.spark_us:.1f}",
            f"{cost.broker_us:.1f}",
            ratio(cost.cpu_us, results[beside][0].cpu_us),
            f"{GOALS[name]:.1f}" if name in GOALS else "",
        )
        for name, (cost, beside) in results.items()
    ]


def _notes(count: int) -> list[str]:
    return [
        f"{count:,} rows with bodies of 1 KiB, {READS} times as many for a read, {QUEUES} queues "
        f"or partitions, local[2]. Kafka {KAFKA} as it comes, one node; Spark's source and sink "
        f"for it are those of {CONNECTOR}. "
        "Nothing is compressed, nobody waits for the disk.",
        "Read into `noop`; written rows are made by the JVM (`range`, a constant body). Kafka's "
        "source has key, value, topic, partition, offset and time; ours is told to give the same.",
        "Kafka's sink writes at least once. Exactly once it cannot.",
        "Variants take turns in one session; a figure is the median of its rounds. Processor time "
        "is that of Spark's JVM and its Python workers, and of the broker until a while after.",
        "Memory is full of file pages before it begins (`bench/memory.py`): on a fresh virtual "
        "machine the kernel waits for the host at every new page of a log.",
        "EscrowMQ flushes its log twice a second, in its own time; Kafka leaves that to the "
        "kernel, whose time is nobody's here.",
        f"Load of the machine at the end: {os.getloadavg()[0]:.1f}.",
    ]
