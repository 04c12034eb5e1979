"""A program for spark-submit with speculation: write a batch whose first task hangs half-way.

Rows of that task are parked when it hangs, and Spark starts a second attempt on the other worker.
The program prints how many halves of each attempt the broker has, by verdict. It creates a file
in SIGNS for each attempt that starts.

    spark-submit --master URL --conf spark.speculation=true speculation_program.py SERVERS SIGNS
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

from escrowmq.spark import register

ROWS, PARTITIONS = 120, 4
BODY_BYTES = 60_000  # large, so that rows before the hang do not stay in buffers
HANGING_BATCH = 4  # of six batches
DECISION_TIMEOUT_S = 120
HANG_S = 300  # much longer than the other attempt takes; Spark kills the task


def main(servers: str, signs: str) -> None:
    spark = SparkSession.builder.appName("speculation").getOrCreate()
    register(spark)

    def hang_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Pass batches on, and hang in the first attempt of the first task."""
        context = TaskContext.get()
        assert context is not None
        attempt = context.attemptNumber()
        is_hanging = context.partitionId() == 0 and attempt == 0
        (Path(signs) / f"{context.partitionId()}-{attempt}").touch()
        for number, batch in enumerate(batches):
            if is_hanging and number == HANGING_BATCH:
                Event().wait(HANG_S)
            yield batch

    numbers = spark.range(0, ROWS, numPartitions=PARTITIONS)
    body = f"rpad(cast(id as string), {BODY_BYTES}, ' ') as body"
    rows = numbers.selectExpr(body).mapInArrow(hang_once, "body string")
    sink = rows.write.format("escrowmq").mode("append").option("servers", servers)
    # Each row becomes its own half, so that the hanging attempt has parked some.
    sink.option("topic", "speculated").option("batchBytes", 1).save()
    # A half that arrived after the decision of its batch stays open until the broker checks it.
    deadline_s = time.monotonic() + DECISION_TIMEOUT_S
    counts = count_halves(spark, servers)
    while any(verdict is None for _, verdict, _ in counts):
        assert time.monotonic() < deadline_s, counts
        Event().wait(1)
        counts = count_halves(spark, servers)
    sys.stdout.write(json.dumps(counts))
    spark.stop()


def count_halves(spark: SparkSession, servers: str) -> list[tuple[str, str | None, int]]:
    """Return (attempt, verdict, number of halves)."""
    reader = spark.read.format("escrowmq").option("servers", servers)
    records = reader.option("mode", "transactions").load()
    halves = records.where("kind = 'half' AND writer IS NOT NULL").select("half_offset", "attempt")
    ops = records.where("kind = 'op'").select("half_offset", "verdict")
    counts = halves.join(ops, "half_offset", "left").groupBy("attempt", "verdict").count()
    return [(row[0], row[1], row[2]) for row in counts.collect()]


if __name__ == "__main__":
    main(*sys.argv[1:])
