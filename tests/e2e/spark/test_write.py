"""Spark queries that write to a real broker: batches, streams, restarts, and errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from escrowmq.spark.data_source import EscrowSource
from tests.interop.records import Record
from tests.support.brokers import Server
from tests.support.spark_session import spark as spark  # the fixture

QUEUES = 4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("spark-write"), wait_s=90) as server:
        yield server


@pytest.fixture(autouse=True)
def _register_source(spark: SparkSession) -> None:
    spark.dataSource.register(EscrowSource)


def create_topic(served: Server, name: str) -> str:
    with served.client() as client:
        client.create_topic(name, queues=QUEUES)
    return name


def save(table: DataFrame, served: Server, topic: str, **options: Any) -> None:
    writer = table.write.format("escrowmq").mode("append")
    writer = writer.option("servers", served.namesrv_address).option("topic", topic)
    for name, value in options.items():
        writer = writer.option(name.replace("_", "."), value)
    writer.save()


def stored_records(served: Server, topic: str) -> list[Record]:
    with served.client(timeout_s=60) as client:
        return [record for queue_id in range(QUEUES) for record in client.pull_all(topic, queue_id)]


def bodies(served: Server, topic: str) -> Counter[str]:
    return Counter(record.body.decode() for record in stored_records(served, topic))


def test_every_column_of_a_table_is_written(spark: SparkSession, served: Server) -> None:
    topic = create_topic(served, "columns")
    table = spark.sql(
        "SELECT string(id) AS body, 'red' AS tags, array('k', string(id)) AS keys, "
        "map('own', 'yes') AS properties, string(id % 2) AS sharding_key FROM range(20)"
    )
    save(table, served, topic)
    records = stored_records(served, topic)
    assert Counter(record.body.decode() for record in records) == Counter(map(str, range(20)))
    record = next(record for record in records if record.body == b"7")
    expected = {"TAGS": "red", "KEYS": "k 7", "own": "yes", "__SHARDINGKEY": "1"}
    assert expected.items() <= record.properties.items()
    for key in ("0", "1"):
        queue_ids = {r.queue_id for r in records if r.properties["__SHARDINGKEY"] == key}
        assert len(queue_ids) == 1


def test_a_repeated_batch_with_a_transactional_id_writes_nothing(
    spark: SparkSession, served: Server
) -> None:
    topic = create_topic(served, "named")
    table = spark.range(500).selectExpr("string(id) AS body")
    for _ in range(2):
        save(table, served, topic, transactional_id="nightly", epoch=20240131)
    assert bodies(served, topic) == Counter(map(str, range(500)))
    save(table, served, topic, transactional_id="nightly", epoch=20240201)
    assert set(bodies(served, topic).values()) == {2}
    with pytest.raises(Exception, match="epoch 20240131 of sink nightly is past"):
        save(table, served, topic, transactional_id="nightly", epoch=20240131)


def test_a_batch_that_fails_halfway_writes_nothing(spark: SparkSession, served: Server) -> None:
    topic = create_topic(served, "fails")
    table = spark.range(0, 3000, numPartitions=3).selectExpr(
        "if(id = 2999, raise_error('planted'), string(id)) AS body"
    )
    with pytest.raises(Exception, match="planted"):
        save(table, served, topic, batchBytes=1000)
    assert not stored_records(served, topic)


def test_errors_of_a_write_name_the_cause(spark: SparkSession, served: Server) -> None:
    table = spark.range(1).selectExpr("string(id) AS body")
    with pytest.raises(Exception, match="did you mean topic"):
        save(table, served, "t", topik="u")
    with pytest.raises(Exception, match="did you mean tags"):
        save(table.selectExpr("body", "'x' AS tag"), served, "t")
    writer = table.write.format("escrowmq").option("servers", served.namesrv_address)
    with pytest.raises(Exception, match="cannot be overwritten"):
        writer.option("topic", "t").mode("overwrite").save()


def test_a_restarted_stream_continues_and_writes_nothing_twice(
    spark: SparkSession, served: Server, tmp_path: Path
) -> None:
    topic = create_topic(served, "stream")
    source, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    source.mkdir()

    def run() -> None:
        lines = spark.readStream.option("maxFilesPerTrigger", 1).text(str(source))
        query = (
            lines.selectExpr("value AS body")
            .writeStream.format("escrowmq")
            .option("servers", served.namesrv_address)
            .option("topic", topic)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    (source / "1.txt").write_text("".join(f"{number}\n" for number in range(100)))
    run()
    (source / "2.txt").write_text("".join(f"{number}\n" for number in range(100, 150)))
    run()
    assert bodies(served, topic) == Counter(map(str, range(150)))
    newest = max(checkpoint.joinpath("commits").glob("[0-9]*"), key=lambda path: int(path.name))
    newest.unlink()  # as if the driver had died before it recorded the commit
    for crc in checkpoint.joinpath("commits").glob(f".{newest.name}.crc"):
        crc.unlink()
    run()
    assert bodies(served, topic) == Counter(map(str, range(150)))


def test_a_repeated_batch_of_foreach_batch_writes_nothing_twice(
    spark: SparkSession, served: Server, tmp_path: Path
) -> None:
    """The batch fails between two writes, as it does when the second of two sinks is down."""
    topics = [create_topic(served, "first-of-two"), create_topic(served, "second-of-two")]
    source = tmp_path / "in"
    source.mkdir()
    for number in range(2):
        lines = "".join(f"{line}\n" for line in range(100 * number, 100 * number + 100))
        (source / f"{number}.txt").write_text(lines)
    failures = iter([False, True])  # the first attempt of the second epoch fails
    epochs = []

    def write_twice(rows: DataFrame, epoch: int) -> None:
        epochs.append(epoch)
        save(rows, served, topics[0], transactional_id=topics[0], epoch=epoch)
        if next(failures, False):
            raise RuntimeError("planted")
        save(rows, served, topics[1], transactional_id=topics[1], epoch=epoch)

    def run() -> None:
        lines = spark.readStream.option("maxFilesPerTrigger", 1).text(str(source))
        query = lines.selectExpr("value AS body").writeStream.foreachBatch(write_twice)
        query = query.option("checkpointLocation", str(tmp_path / "checkpoint"))
        query.trigger(availableNow=True).start().awaitTermination()

    with pytest.raises(Exception, match="planted"):
        run()
    run()
    assert epochs == [0, 1, 1]
    for topic in topics:
        assert bodies(served, topic) == Counter(map(str, range(200)))
