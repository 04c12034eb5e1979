"""A program for spark-submit: read a topic and write it exactly once, as a stream and as a batch.

Both are run twice; the second run must write nothing. The program prints the bodies that it read
and the working directories of the executors that read them.

    spark-submit --master URL cluster_program.py SERVERS CHECKPOINT
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import SparkSession

from escrowmq.spark import register


def main(servers: str, checkpoint: str) -> None:
    spark = SparkSession.builder.appName("read and write").getOrCreate()
    register(spark)
    source = {"servers": servers, "subscribe": "orders", "startingOffsets": "earliest"}
    orders = spark.read.format("escrowmq").options(**source).option("minPartitions", 4).load()
    bodies = [row["body"].decode() for row in orders.select("body").collect()]

    def working_directory(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield pa.RecordBatch.from_pydict({"directory": [os.getcwd()]})

    located = orders.select("body").mapInArrow(working_directory, "directory string")
    directories = [row["directory"] for row in located.distinct().collect()]
    for _ in range(2):  # a query that is started again has nothing left to do
        limits = {"maxOffsetsPerTrigger": "30", "minPartitions": "2"}
        stream = spark.readStream.format("escrowmq").options(**source, **limits).load()
        sink = stream.select("body", "tags").writeStream.format("escrowmq")
        sink = sink.option("servers", servers).option("topic", "streamed")
        sink = sink.option("guarantee", "exactly-once").option("checkpointLocation", checkpoint)
        sink.trigger(availableNow=True).start().awaitTermination()
    for _ in range(2):  # a batch with an epoch is written once
        batch = orders.select("body").write.format("escrowmq").mode("append")
        batch = batch.option("servers", servers).option("topic", "batched")
        batch.option("transactional.id", "nightly").option("epoch", 1).save()
    spark.stop()
    sys.stdout.write(json.dumps({"read": bodies, "places": directories}))


if __name__ == "__main__":
    main(*sys.argv[1:])
