"""Real queries in a real Spark: the handful that only a JVM can judge."""

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
    pytest.mark.timeout(900),  # a busy machine takes minutes to start a JVM and its helpers
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
        given = {"UNIQ_KEY": f"m{number}", "TAGS": "ab"[number % 2], "KEYS": f"k{number}"}
        client.send(topic, b"%d" % number, given, queue_id=number % 4)


def load(spark: SparkSession, served: Server, name: str = "escrowmq", **given: Any) -> DataFrame:
    reader = spark.read.format(name).option("servers", served.namesrv_address)
    return reader.options(**given).load()


def test_a_topic_is_a_table(spark: SparkSession, served: Server) -> None:
    orders = load(spark, served, subscribe="orders", minPartitions=3)
    orders.createOrReplaceTempView("orders")
    [row] = spark.sql(
        "select count(distinct message_id) n, sum(cast(cast(body as string) as int)) total, "
        "min(tags) low, max(properties['KEYS']) high, max(store_time) < now() past from orders"
    ).collect()
    expected = {"n": COUNT, "total": sum(range(COUNT)), "low": "a", "high": "k99", "past": True}
    assert row.asDict() == expected
    # The same DataFrame twice, filtered and not: nothing of the first query stays in it.
    assert orders.where("queue_id = 1").count() == COUNT // 4
    assert orders.count() == COUNT


def test_the_old_names_work_and_only_wanted_columns_are_made(
    spark: SparkSession, served: Server
) -> None:
    reader = spark.read.format("rocketmq").option("nameServer", served.namesrv_address)
    some = reader.option("topic", "orders").option("columns", "keys,queue_offset").load()
    assert some.columns == ["keys", "queue_offset"]
    assert some.where("queue_offset = 0").count() == 4


def test_files_and_transactions_are_tables_too(spark: SparkSession, served: Server) -> None:
    with served.client() as client:
        client.send_half("orders", b"half", {"UNIQ_KEY": "tx"})
    files = spark.read.format("escrowmq").load(str(served.data))
    assert files.where("topic = 'orders'").count() >= COUNT
    rows = load(spark, served, mode="transactions").where("kind = 'half'").collect()
    assert [(row["transaction_id"], row["topic"]) for row in rows] == [("tx", "orders")]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"subscribes": "orders"}, "did you mean subscribe"),
        ({"subscribe": "order"}, "no broker has a topic 'order'; did you mean orders"),
    ],
)
def test_an_error_reaches_whoever_asked(
    spark: SparkSession, served: Server, given: dict[str, str], why: str
) -> None:
    with pytest.raises(PySparkException, match=why):
        load(spark, served, **given).count()


def test_a_stream_ends_goes_on_and_misses_nothing(
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
    found = spark.read.parquet(out)
    assert found.count() == found.select("message_id").distinct().count() == 130
