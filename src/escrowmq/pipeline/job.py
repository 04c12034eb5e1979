"""What every pipeline needs before it can begin: a cluster that answers, Spark, and its errors in
one line.

How far a pipeline is: rows, rate, lag and time left; for people, or a line of JSON each.

Streams of a cluster into tables, a batch at a time, each exactly once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from pyspark.errors import PySparkException
from rich.console import Console
from rich.status import Status

from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import PipelineFailed
from escrowmq.pipeline.parquet_table import ParquetTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_TIME_ZONE: Final = "spark.sql.session.timeZone"
_SETTINGS: Final = {
    "spark.ui.showConsoleProgress": "false",
    _TIME_ZONE: "UTC",
    "spark.log.level": "ERROR",
}
_ESCROWMQ_ERROR_PATTERN: Final = re.compile(r"escrowmq\.errors\.\w+: ([^\n]+)")
_TASK_ERROR_PATTERN: Final = re.compile(
    r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*)"
)


def pipeline_session(
    name: str, master: str | None, extra_settings: Mapping[str, str] | None = None
) -> SparkSession:
    """`more`: settings of Spark. Raises SparkMissing, PipelineFailed."""
    from escrowmq.spark import local_session

    settings = dict(_SETTINGS)
    if master is None or master.startswith("local"):
        settings["spark.sql.shuffle.partitions"] = "8"  # a handful of cores; AQE joins them
    settings |= extra_settings or {}
    try:
        return local_session(f"escrowmq {name}", master=master, settings=settings)
    except Exception as error:  # what a JVM throws has no common class here
        if type(error).__module__.startswith("escrowmq."):
            raise
        said = str(error).strip() or type(error).__name__
        raise PipelineFailed(
            f"Spark did not start with master {master or 'local[*]'}: {said.splitlines()[0]}"
        ) from error


def check_time_zone(spark: SparkSession) -> None:
    """A table's days are UTC's, whoever writes it. Raises PipelineFailed."""
    found = spark.conf.get(_TIME_ZONE)
    if found not in ("UTC", "Etc/UTC"):
        raise PipelineFailed(
            f"days would be those of {found}: spark.conf.set('{_TIME_ZONE}', 'UTC') before this"
        )


def has_java_class(spark: SparkSession, name: str) -> bool:
    """Whether a jar of Spark's has it."""
    try:
        jvm: Any = spark.sparkContext._jvm
        jvm.java.lang.Thread.currentThread().getContextClassLoader().loadClass(name)
    except Exception:  # no such class, or Spark Connect, which shows no classes
        return False
    return True


def check_cluster(servers: str, options: Mapping[str, str]) -> list[str]:
    """The topics of a cluster: a wrong address is known before Spark is started.

    Raises BadOption, TransportError.
    """
    from escrowmq.spark.data_source import check_java, check_pyspark

    check_pyspark()
    check_java()
    from escrowmq.spark.cluster import ReadCluster
    from escrowmq.spark.options import READ_OPTIONS, parse_access, parse_options

    cluster = ReadCluster(servers, parse_access(parse_options(options, READ_OPTIONS)))
    try:
        return cluster.topics()
    finally:
        cluster.close()


@contextmanager
def translate_spark_errors() -> Iterator[None]:
    """Spark's errors are pages; ours are somewhere in them. Raises PipelineFailed."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:  # a job that fails in its tasks is the latter
        raise PipelineFailed(spark_error_text(error)) from error


def spark_error_text(error: BaseException) -> str:
    """In one line: what we said, else Python in a task, else Spark."""
    text = str(error)
    for pattern in (_ESCROWMQ_ERROR_PATTERN, _TASK_ERROR_PATTERN):
        if found := pattern.findall(text):
            return str(found[-1])
    said = str(getattr(error, "java_exception", error)).strip()
    return said.splitlines()[0] if said else type(error).__name__


_POLL_INTERVAL_S: Final = 1


@dataclass(frozen=True, slots=True)
class PipelineProgress:
    step: str
    rows: int = 0
    rows_per_s: float = 0.0  # rows a second
    lag: int | None = None  # messages that are still to be read
    remaining_s: float | None = None

    def as_text(self) -> str:
        parts = [f"{self.step}: {self.rows:,} rows"]
        if self.rows_per_s:
            parts.append(f"{self.rows_per_s:,.0f} a second")
        if self.lag is not None:
            parts.append(f"{self.lag:,} behind")
        if self.remaining_s is not None and self.lag:
            parts.append(f"{self.remaining_s:,.0f} s left")
        return ", ".join(parts)

    def as_json(self) -> str:
        left_s = None if self.remaining_s is None else round(self.remaining_s, 1)
        told = {"step": self.step, "rows": self.rows, "rate": round(self.rows_per_s, 1)}
        return json.dumps({**told, "lag": self.lag, "left_s": left_s})


PipelineProgressCallback = Callable[[PipelineProgress], None]


def ignore_progress(progress: PipelineProgress) -> None:
    """Of those who import a pipeline and do not care."""


@contextmanager
def progress_output(*, as_json: bool) -> Iterator[PipelineProgressCallback]:
    """To standard error for people, where a terminal is; to standard output for machines."""
    if as_json:
        yield lambda progress: click.echo(progress.as_json())
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield ignore_progress
        return
    with Status("starting Spark", console=console) as status:
        yield lambda progress: status.update(progress.as_text())


def await_query(
    query: StreamingQuery,
    step: str,
    on_progress: PipelineProgressCallback,
    clock: Clock | None = None,
) -> int:
    """Wait for a query to end, and tell how far it is. The rows it has read."""
    clock = SystemClock() if clock is None else clock
    begun_s = clock.elapsed_s()
    rows, seen = 0, -1
    while True:
        has_ended = query.awaitTermination(_POLL_INTERVAL_S)
        for told in query.recentProgress:
            if told["batchId"] <= seen:
                continue
            seen = told["batchId"]
            rows += told["numInputRows"] or 0
            rate = rows / max(clock.elapsed_s() - begun_s, 0.001)
            lag = query_lag(told["sources"])
            left_s = None if lag is None or not rate else lag / rate
            on_progress(PipelineProgress(step, rows, rate, lag, left_s))
        if has_ended:
            return rows


def query_lag(sources: Any) -> int | None:
    """Messages between where a query is and where its queues end; None if it does not say."""
    lag = 0
    for source in sources:
        end, latest = _next_offsets(source["endOffset"]), _next_offsets(source["latestOffset"])
        if end is None or latest is None:
            return None
        lag += sum(max(0, number - end.get(queue, 0)) for queue, number in latest.items())
    return lag


def _next_offsets(offset: Any) -> dict[tuple[str, str, str], int] | None:
    told = json.loads(offset) if isinstance(offset, str) else offset
    if not isinstance(told, Mapping) or "next" not in told:
        return None
    return {
        (topic, broker, queue): number
        for topic, brokers in told["next"].items()
        for broker, queues in brokers.items()
        for queue, number in queues.items()
    }


_WORKER_START_FAILED: Final = "failed to connect back"
_MAX_STARTS: Final = 5
DEFAULT_BATCH_MESSAGES: Final = 1_000_000  # of a micro-batch


@dataclass(frozen=True, slots=True)
class ClusterSource:
    """A cluster, and how to speak with it: options of the Spark source (accessKey, tls, …)."""

    servers: str
    options: Mapping[str, str] = field(default_factory=dict)
    batch_messages: int = DEFAULT_BATCH_MESSAGES


def append_available(
    spark: SparkSession,
    source: ClusterSource,
    read_options: Mapping[str, str],
    checkpoint: Path,
    table: ParquetTable,
    transform: Callable[[DataFrame], DataFrame],
    *,
    step: str,
    partition_by: tuple[str, ...] = (),
    on_progress: PipelineProgressCallback = ignore_progress,
) -> int:
    """Append to the table what is there now and was not read before. How many messages it was."""
    if table.manifest.next_batch and not (checkpoint / "offsets").is_dir():
        raise PipelineFailed(
            f"{checkpoint} is gone, which says what {table.directory} has read: "
            f"bring it back, or begin in a new directory"
        )
    stream = (
        spark.readStream.format("escrowmq")
        .option("servers", source.servers)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", source.batch_messages)
        .options(**source.options)
        .options(**read_options)
        .load()
    )

    def each(frame: DataFrame, batch: int) -> None:
        table.append(batch, transform(frame), partition_by)

    writer = (
        stream.writeStream.foreachBatch(each)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
    )
    return _run_to_end(writer, step, on_progress)


def _run_to_end(writer: DataStreamWriter, step: str, on_progress: PipelineProgressCallback) -> int:
    """Spark gives a Python process ten seconds to come up, which a busy machine may not have. A
    query goes on where it was, so it is started again."""
    left = _MAX_STARTS
    while True:
        left -= 1
        query = writer.start()
        try:
            return await_query(query, step, on_progress)
        except PySparkException as error:
            if _WORKER_START_FAILED not in str(error) or not left:
                raise
        finally:
            query.stop()
