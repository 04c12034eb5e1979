"""Queries with output mode `update` or `complete` that write with `foreach_batch_writer`."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from escrowmq.errors import InvalidOption
from escrowmq.spark import foreach_batch_writer
from escrowmq.spark.data_source import EscrowSource
from tests.support.brokers import Server
from tests.support.spark_session import retry_slow_start
from tests.support.spark_session import spark as spark  # the fixture

QUEUES = 4
Write = Callable[[DataFrame, int], None]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("foreach-batch"), wait_s=90) as server:
        yield server


@pytest.fixture(autouse=True)
def _register_source(spark: SparkSession) -> None:
    spark.dataSource.register(EscrowSource)


@pytest.fixture
def topic(server: Server, request: pytest.FixtureRequest) -> str:
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)[:100]
    create_topic(server, name)
    return name


def create_topic(server: Server, name: str) -> None:
    with server.client() as client:
        client.create_topic(name, queues=QUEUES)


def totals_in(server: Server, topic: str) -> Counter[tuple[str, int]]:
    """Return how often each total, a color and its count, is in the topic."""
    with server.client(timeout_s=60) as client:
        bodies = [
            json.loads(record.body)
            for queue_id in range(QUEUES)
            for record in client.pull_all(topic, queue_id)
        ]
    return Counter((body["value"], body["count"]) for body in bodies)


class Colors:
    """A query that counts colors: each file of the source is a micro-batch."""

    def __init__(self, spark: SparkSession, directory: Path, mode: str = "update") -> None:
        self._spark = spark
        self._mode = mode
        self._source = directory / "in"
        self._source.mkdir(exist_ok=True)
        self._checkpoint = directory / "checkpoint"

    def add(self, *colors: str) -> None:
        number = len(list(self._source.iterdir()))
        path = self._source / f"{number}.txt"
        path.write_text("".join(f"{color}\n" for color in colors))
        os.utime(path, (number, number))  # Spark reads the files in the order of these times

    def run(self, write: Write, name: str = "checkpoint") -> None:
        """Run the query until all files are counted."""
        lines = self._spark.readStream.option("maxFilesPerTrigger", 1).text(str(self._source))
        totals = lines.groupBy("value").count().selectExpr("to_json(struct(*)) AS body")
        query = totals.writeStream.outputMode(self._mode).foreachBatch(write)
        query = query.option("checkpointLocation", str(self._checkpoint.with_name(name)))
        retry_slow_start(lambda: query.trigger(availableNow=True).start().awaitTermination())

    def forget_last_commit(self) -> None:
        """Leave the checkpoint as a driver leaves it that dies before it records the commit."""
        commits = self._checkpoint / "commits"
        newest = max(commits.glob("[0-9]*"), key=lambda path: int(path.name))
        newest.unlink()
        (commits / f".{newest.name}.crc").unlink(missing_ok=True)


def with_an_error_at(rows: DataFrame, color: str) -> DataFrame:
    return rows.selectExpr(f"if(body LIKE '%{color}%', raise_error('planted'), body) AS body")


# What the two micro-batches below bring about.
BATCHES = (("red", "red", "blue"), ("red", "green"))
CHANGES = Counter({("red", 2): 1, ("blue", 1): 1, ("red", 3): 1, ("green", 1): 1})
ALL_TOTALS = CHANGES + Counter({("blue", 1): 1})


@pytest.mark.parametrize(("mode", "expected"), [("update", CHANGES), ("complete", ALL_TOTALS)])
def test_each_micro_batch_is_written_once_although_the_query_is_restarted(
    spark: SparkSession,
    server: Server,
    topic: str,
    tmp_path: Path,
    mode: str,
    expected: Counter[tuple[str, int]],
) -> None:
    colors = Colors(spark, tmp_path, mode)
    for batch in BATCHES:
        colors.add(*batch)
        colors.run(foreach_batch_writer(servers=server.namesrv_address, topic=topic))
    assert totals_in(server, topic) == expected
    colors.forget_last_commit()
    colors.run(foreach_batch_writer(servers=server.namesrv_address, topic=topic))
    assert totals_in(server, topic) == expected


@pytest.mark.parametrize("is_written", [True, False])
def test_a_micro_batch_that_fails_is_repeated_and_written_once(
    spark: SparkSession, server: Server, topic: str, tmp_path: Path, is_written: bool
) -> None:
    writer = foreach_batch_writer(servers=server.namesrv_address, topic=topic)
    failures = iter([True, False])
    epochs = []

    def fail_in_the_second_epoch(rows: DataFrame, epoch: int) -> None:
        epochs.append(epoch)
        if epoch == 1 and next(failures):
            if is_written:
                writer(rows, epoch)
            else:  # one task fails, when others may have parked their rows
                broken = rows.selectExpr(
                    "if(body LIKE '%green%', raise_error('planted'), body) AS body"
                )
                writer(broken, epoch)
            raise RuntimeError("planted")
        writer(rows, epoch)

    colors = Colors(spark, tmp_path)
    for batch in BATCHES:
        colors.add(*batch)
    with pytest.raises(Exception, match="planted"):
        colors.run(fail_in_the_second_epoch)
    colors.run(fail_in_the_second_epoch)
    assert epochs == [0, 1, 1]
    assert totals_in(server, topic) == CHANGES


def test_a_function_may_repeat_a_write_that_failed(
    spark: SparkSession, server: Server, topic: str, tmp_path: Path
) -> None:
    writer = foreach_batch_writer(servers=server.namesrv_address, topic=topic)

    def write_again_after_a_failure(rows: DataFrame, epoch: int) -> None:
        with pytest.raises(Exception, match="planted"):
            writer(
                rows.selectExpr("if(body LIKE '%red%', raise_error('planted'), body) AS body"),
                epoch,
            )
        for _ in range(2):
            writer(rows, epoch)

    colors = Colors(spark, tmp_path)
    for batch in BATCHES:
        colors.add(*batch)
    colors.run(write_again_after_a_failure)
    assert totals_in(server, topic) == CHANGES


def test_several_writers_of_a_query_need_different_names(
    spark: SparkSession, server: Server, topic: str, tmp_path: Path
) -> None:
    create_topic(server, f"{topic}-2")
    servers = server.namesrv_address
    first = foreach_batch_writer(servers=servers, topic=topic)
    second = foreach_batch_writer(servers=servers, topic=f"{topic}-2")
    same_name = foreach_batch_writer(servers=servers, topic=topic)

    def write_to_both(rows: DataFrame, epoch: int) -> None:
        first(rows, epoch)
        second(rows, epoch)

    def write_twice(rows: DataFrame, epoch: int) -> None:
        first(rows, epoch)
        same_name(rows, epoch)

    colors = Colors(spark, tmp_path)
    colors.add(*BATCHES[0])
    colors.run(write_to_both)
    assert totals_in(server, topic) == totals_in(server, f"{topic}-2") != Counter()
    colors.add(*BATCHES[1])
    with pytest.raises(Exception, match="two writers of one query have the name"):
        colors.run(write_twice)


def test_another_query_cannot_take_over_a_name(
    spark: SparkSession, server: Server, topic: str, tmp_path: Path
) -> None:
    colors = Colors(spark, tmp_path)
    colors.add(*BATCHES[0])

    def run(checkpoint: str) -> None:
        writer = foreach_batch_writer(
            servers=server.namesrv_address, topic=topic, transactional_id=f"id-{topic}"
        )
        colors.run(writer, checkpoint)

    run("checkpoint")
    with pytest.raises(Exception, match="was decided by another query"):
        run("another-checkpoint")


def test_wrong_options_are_refused_before_the_query_starts() -> None:
    with pytest.raises(InvalidOption, match="did you mean batchBytes"):
        foreach_batch_writer(servers="127.0.0.1:9876", batchbyte=1)
    with pytest.raises(InvalidOption, match="takes the epoch from Spark"):
        foreach_batch_writer(servers="127.0.0.1:9876", Epoch=1)
    with pytest.raises(InvalidOption, match="servers"):
        foreach_batch_writer(servers="")
