"""Queries in a real Spark session: the few tests of the source that need a JVM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.interop.remoting import Client
from tests.support.brokers import Server
from tests.support.spark_session import IGNORED_WARNINGS, retry_slow_start, spark

__all__ = ["spark"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # a busy machine takes minutes to start a JVM and its workers
    *(pytest.mark.filterwarnings(rule) for rule in IGNORED_WARNINGS),
]

COUNT = 300


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("queries")) as served:
        with served.client() as client:
            client.create_topic("orders", queues=4)
            send(client, 0, COUNT)
        yield served


def send(client: Client, first: int, count: int, topic: str = "orders") -> None:
    for number in range(first, first + count):
        properties = {"UNIQ_KEY": f"m{number}", "TAGS": "ab"[number % 2], "KEYS": f"k{number}"}
        client.send(topic, b"%d" % number, properties, queue_id=number % 4)


def load(spark: SparkSession, served: Server, **options: Any) -> DataFrame:
    reader = spark.read.format("escrowmq").option("servers", served.namesrv_address)
    return reader.options(**options).load()


def test_a_topic_can_be_queried_as_a_table(spark: SparkSession, served: Server) -> None:
    orders = load(spark, served, subscribe="orders", minPartitions=3)
    orders.createOrReplaceTempView("orders")
    [row] = spark.sql(
        "select count(distinct message_id) n, sum(cast(cast(body as string) as int)) total, "
        "min(tags) low, max(properties['KEYS']) high, max(store_time) < now() past from orders"
    ).collect()
    expected = {"n": COUNT, "total": sum(range(COUNT)), "low": "a", "high": "k99", "past": True}
    assert row.asDict() == expected
    # The filter of the first query must not remain in the DataFrame.
    assert orders.where("queue_id = 1").count() == COUNT // 4
    assert orders.count() == COUNT


def test_rocketmq_names_of_options_work_and_only_selected_columns_are_read(
    spark: SparkSession, served: Server
) -> None:
    reader = spark.read.format("rocketmq").option("nameServer", served.namesrv_address)
    orders = reader.option("topic", "orders").option("columns", "keys,queue_offset").load()
    assert orders.columns == ["keys", "queue_offset"]
    assert orders.where("queue_offset = 0").count() == 4


def test_files_and_transactions_can_be_queried_as_tables(
    spark: SparkSession, served: Server
) -> None:
    with served.client() as client:
        client.send_half("orders", b"half", {"UNIQ_KEY": "tx"})
    files = spark.read.format("escrowmq").load(str(served.data))
    assert files.where("topic = 'orders'").count() >= COUNT
    rows = load(spark, served, mode="transactions").where("kind = 'half'").collect()
    assert [(row["transaction_id"], row["topic"]) for row in rows] == [("tx", "orders")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subscribes": "orders"}, "did you mean subscribe"),
        ({"subscribe": "order"}, "no broker has a topic 'order'; did you mean orders"),
    ],
)
def test_a_user_sees_the_message_of_an_error(
    spark: SparkSession, served: Server, options: dict[str, str], message: str
) -> None:
    with pytest.raises(PySparkException, match=message):
        load(spark, served, **options).count()


def test_a_stream_that_is_started_again_continues_and_misses_no_message(
    spark: SparkSession, served: Server, tmp_path: Path
) -> None:
    out = str(tmp_path / "out")

    def run() -> StreamingQuery:
        stream = (
            spark.readStream.format("escrowmq")
            .option("servers", served.namesrv_address)
            .option("subscribe", "flow")
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", 60)
            .load()
        )
        query = (
            stream.writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(out)
        )
        assert query.awaitTermination(120)
        return query

    with served.client() as client:
        client.create_topic("flow", queues=4)
        send(client, 0, 100, "flow")
        query = retry_slow_start(run)
        assert [progress["numInputRows"] for progress in query.recentProgress] == [60, 40]
        assert query.recentProgress[-1]["sources"][0]["latestOffset"]
        send(client, 100, 30, "flow")
    retry_slow_start(run)
    rows = spark.read.parquet(out)
    assert rows.count() == rows.select("message_id").distinct().count() == 130
