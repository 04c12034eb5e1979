"""What a user hands to spark-submit: read a topic, write it exactly once, as a stream and as a
batch, each twice. Prints what it has read, and the directories of the executors that did it.

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
    given = {"servers": servers, "subscribe": "orders", "startingOffsets": "earliest"}
    orders = spark.read.format("escrowmq").options(**given).option("minPartitions", 4).load()
    bodies = [row["body"].decode() for row in orders.select("body").collect()]

    def where(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield pa.RecordBatch.from_pydict({"place": [os.getcwd()]})

    places = orders.select("body").mapInArrow(where, "place string").distinct().collect()
    for _ in range(2):  # a query that is started again has nothing left to do
        limits = {"maxOffsetsPerTrigger": "30", "minPartitions": "2"}
        stream = spark.readStream.format("escrowmq").options(**given, **limits).load()
        sink = stream.select("body", "tags").writeStream.format("escrowmq")
        sink = sink.option("servers", servers).option("topic", "streamed")
        sink = sink.option("guarantee", "exactly-once").option("checkpointLocation", checkpoint)
        sink.trigger(availableNow=True).start().awaitTermination()
    for _ in range(2):  # a batch with a number is written once
        batch = orders.select("body").write.format("escrowmq").mode("append")
        batch = batch.option("servers", servers).option("topic", "batched")
        batch.option("transactional.id", "nightly").option("epoch", 1).save()
    spark.stop()
    sys.stdout.write(json.dumps({"read": bodies, "places": [row["place"] for row in places]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
