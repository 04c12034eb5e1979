"""Our broker and its files read into Spark, beside ready-made Arrow batches.

The limit is a source that yields the same columns ready-made, so that only the cost of Spark itself
remains. Every variant writes to `noop` in one session on two cores; they take turns.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from bench.broker import ResultTable
from bench.cpu_time import Meter
from bench.measure import Plan
from bench.samples import NOW_MS, TOPIC, directory, open_store, sample
from bench.servers import EscrowMQ
from escrowmq.message.record import encode_record
from escrowmq.spark import local_session
from escrowmq.spark.columns import MessageColumns
from escrowmq.spark.records import Records
from escrowmq.spark.schema import MESSAGE_COLUMNS, Columns
from tests.interop.remoting import Client

QUEUES = 4
BATCH_ROWS = 10_000
SOME = "body,keys,queue_id,queue_offset,store_time"
COLUMNS = ("what", "body, keys, place and time", "all 17 columns", "goal")


@dataclass(frozen=True)
class Ready(InputPartition):
    rows: int


class ReadyMade(DataSource):
    """A source of the same columns, built once per task."""

    @classmethod
    def name(cls) -> str:
        return "readymade"

    def _columns(self) -> Columns:
        requested = self.options.get("columns")
        return MESSAGE_COLUMNS.select(requested.split(",")) if requested else MESSAGE_COLUMNS

    def schema(self) -> StructType:
        return self._columns().spark_schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        return ReadyMadeReader(self._columns(), int(self.options["rows"]))


class ReadyMadeReader(DataSourceReader):
    def __init__(self, columns: Columns, rows: int) -> None:
        self._columns = columns
        self._rows = rows

    def partitions(self) -> Sequence[InputPartition]:
        return [Ready(self._rows // 2), Ready(self._rows - self._rows // 2)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Ready)
        batch = MessageColumns(_block(), TOPIC, "broker-a").to_record_batch(self._columns)
        for _ in range(partition.rows // BATCH_ROWS):
            yield batch


@cache
def _block() -> Records:
    host = bytes(8)
    data = b"".join(
        encode_record(sample(number), number, number, NOW_MS, host) for number in range(BATCH_ROWS)
    )
    return Records.from_buffer(np.frombuffer(data, np.uint8))


def rows(plan: Plan) -> ResultTable:
    count = 50_000 if plan.quick else 400_000
    rounds = plan.rounds
    with directory() as path:
        server = EscrowMQ(path / "server", {"diskMaxUsedSpaceRatio": 99})
        fill(server.data, count)
        server.start()
        try:
            with Client(f"127.0.0.1:{server.port}") as client:
                client.create_topic(TOPIC, queues=QUEUES)
            spark = session()
            try:
                return measured(spark, server, count, rounds)
            finally:
                spark.stop()
        finally:
            server.stop()


def session(jars: Sequence[Path] = ()) -> SparkSession:
    root = str(Path(__file__).parent.parent)
    paths = [root, str(Path(root) / "src"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {"spark.ui.showConsoleProgress": "false", "spark.driver.memory": "2g"}
    if jars:
        settings["spark.jars"] = ",".join(map(str, jars))
    spark = local_session("bench", master="local[2]", settings=settings)
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(ReadyMade)
    return spark


def fill(data: Path, count: int) -> None:
    data.mkdir(parents=True)
    store = open_store(data)
    for at in range(0, count, 500):
        records = [sample(number, queues=QUEUES) for number in range(at, at + 500)]
        store.append(records, now_ms=NOW_MS)
    store.checkpoint()
    store.close()


@dataclass
class Figure:
    rates: list[float]
    cpu_us: list[float]

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def words(self, limit: float) -> str:
        cpu = statistics.median(self.cpu_us)
        return f"{self.rate:,.0f}/s, {self.rate / limit:.0%} of the limit, {cpu:.1f} us"


def measured(spark: SparkSession, server: EscrowMQ, count: int, rounds: int) -> ResultTable:
    jvm = spark.sparkContext._gateway.proc.pid  # type: ignore[union-attr]
    report: dict[str, list[str]] = {}
    kinds = ("limit", "broker", "files")
    for columns in (SOME, ""):
        frames = {kind: frame(spark, server, kind, columns, count) for kind in kinds}
        figures = {kind: Figure([], []) for kind in kinds}
        for frame_ in frames.values():  # the first run of each includes imports and compilation
            frame_.write.format("noop").mode("overwrite").save()
        for _ in range(rounds):
            for kind in kinds:
                meter, began = Meter(jvm, *server.pids), time.perf_counter()
                frames[kind].write.format("noop").mode("overwrite").save()
                took = time.perf_counter() - began
                figures[kind].rates.append(count / took)
                figures[kind].cpu_us.append(meter.spent_s() * 1e6 / count)
        limit = figures["limit"].rate
        for kind in kinds:
            report.setdefault(kind, []).append(figures[kind].words(limit))
    names = {"limit": "Arrow batches, ready-made", "broker": "our broker", "files": "its log files"}
    goals = {"limit": "", "broker": "40 %", "files": "60 %"}
    cells = [(names[kind], *report[kind], goals[kind]) for kind in kinds]
    notes = [
        f"{count:,} messages with bodies of 1 KiB in {QUEUES} queues, local[2], to `noop`. A cell: "
        "messages a second, their share of the limit beside it, processor time for each (JVM, "
        "Python and broker together).",
        "The limit yields the same columns from memory, so it is Spark's own share. Variants take "
        "turns; a figure is the median of its rounds. The broker shares the two cores with Spark.",
        f"Load of the machine at the end: {os.getloadavg()[0]:.1f}.",
    ]
    return ResultTable(list(cells), notes, COLUMNS)


def frame(spark: SparkSession, server: EscrowMQ, kind: str, columns: str, count: int) -> DataFrame:
    given = {"columns": columns} if columns else {}
    if kind == "limit":
        return spark.read.format("readymade").options(rows=count, **given).load()
    reader = spark.read.format("escrowmq").options(subscribe=TOPIC, **given)
    if kind == "files":
        return reader.load(str(server.data))
    return reader.option("servers", server.namesrv_address).load()
