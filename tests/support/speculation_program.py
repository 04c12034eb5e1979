"""For spark-submit with speculation on: a batch is written exactly once although its first task
hangs in the middle, with rows parked, and Spark starts it a second time on the other machine.
Prints what the broker has of each attempt.

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
BODY_BYTES = 60_000  # or what goes before the hang stays in buffers
HANGS_AT = 4  # of the six batches that it has
SETTLES_S = 120
HANGS_S = 300  # much longer than the other attempt takes; Spark ends it


def main(servers: str, signs: str) -> None:
    spark = SparkSession.builder.appName("speculation").getOrCreate()
    register(spark)

    def hang_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The first attempt of the first task stops on its way."""
        context = TaskContext.get()
        assert context is not None
        attempt = context.attemptNumber()
        hangs = context.partitionId() == 0 and attempt == 0
        (Path(signs) / f"{context.partitionId()}-{attempt}").touch()
        for number, batch in enumerate(batches):
            if hangs and number == HANGS_AT:
                Event().wait(HANGS_S)
            yield batch

    numbers = spark.range(0, ROWS, numPartitions=PARTITIONS)
    body = f"rpad(cast(id as string), {BODY_BYTES}, ' ') as body"
    rows = numbers.selectExpr(body).mapInArrow(hang_once, "body string")
    sink = rows.write.format("escrowmq").mode("append").option("servers", servers)
    # Each row is a half of its own, so that the one that hangs has some.
    sink.option("topic", "speculated").option("batchBytes", 1).save()
    deadline_s = time.monotonic() + SETTLES_S
    # A half that came behind the decision is open until its writer is looked at.
    found = attempts(spark, servers)
    while any(verdict is None for _, verdict, _ in found):
        assert time.monotonic() < deadline_s, found
        Event().wait(1)
        found = attempts(spark, servers)
    sys.stdout.write(json.dumps(found))
    spark.stop()


def attempts(spark: SparkSession, servers: str) -> list[tuple[str, str | None, int]]:
    """Attempt, verdict, and how many halves of it have it."""
    reader = spark.read.format("escrowmq").option("servers", servers)
    told = reader.option("mode", "transactions").load()
    halves = told.where("kind = 'half' AND writer IS NOT NULL").select("half_offset", "attempt")
    ops = told.where("kind = 'op'").select("half_offset", "verdict")
    counted = halves.join(ops, "half_offset", "left").groupBy("attempt", "verdict").count()
    return [(row[0], row[1], row[2]) for row in counted.collect()]


if __name__ == "__main__":
    main(*sys.argv[1:])
