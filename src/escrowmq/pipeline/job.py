"""What all pipelines share: the Spark session, one-line errors, progress, and streams into tables.

    check_cluster() ── pipeline_session() ── append_available() ── await_query() ── progress
                                                    └─ ParquetTable.append(), once per batch

This module can be imported without PySpark, so that the command line can say what is missing.
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
from rich.console import Console
from rich.status import Status

from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import EscrowError, PipelineFailed
from escrowmq.pipeline.parquet_table import ParquetTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

DEFAULT_BATCH_MESSAGES: Final = 1_000_000  # of a micro-batch
_TIME_ZONE: Final = "spark.sql.session.timeZone"
_SETTINGS: Final = {
    "spark.ui.showConsoleProgress": "false",
    _TIME_ZONE: "UTC",
    "spark.log.level": "ERROR",
}
_WORKER_START_FAILED: Final = "failed to connect back"  # in Spark's message
_MAX_STARTS: Final = 5
_POLL_INTERVAL_S: Final = 1

# --- before a pipeline ---------------------------------------------------------------------------


def check_cluster(servers: str, options: Mapping[str, str]) -> list[str]:
    """Return the topics of a cluster. A wrong address is reported before Spark is started.

    Raises SparkNotAvailable, InvalidOption, TransportError.
    """
    from escrowmq.spark.session import check_java, check_pyspark

    check_pyspark()
    check_java()
    from escrowmq.spark.options import READ_OPTIONS, parse_options
    from escrowmq.spark.readers import open_cluster

    with open_cluster(parse_options({**options, "servers": servers}, READ_OPTIONS)) as cluster:
        return cluster.topics()


def pipeline_session(
    name: str, master: str | None, extra_settings: Mapping[str, str] | None = None
) -> SparkSession:
    """Start a Spark session for a pipeline. Raises SparkNotAvailable, PipelineFailed."""
    from escrowmq.spark import local_session

    settings = dict(_SETTINGS)
    if master is None or master.startswith("local"):
        # 200 partitions, Spark's default, are too many for the cores of one machine.
        settings["spark.sql.shuffle.partitions"] = "8"
    settings |= extra_settings or {}
    try:
        return local_session(f"escrowmq {name}", master=master, settings=settings)
    except EscrowError:
        raise
    except Exception as error:  # py4j raises errors without a common base class here
        text = str(error).strip() or type(error).__name__
        raise PipelineFailed(
            f"Spark did not start with master {master or 'local[*]'}: {text.splitlines()[0]}"
        ) from error


def check_time_zone(spark: SparkSession) -> None:
    """Raise PipelineFailed unless the session's time zone is UTC.

    The days of a table are days in UTC, whichever machine writes them.
    """
    time_zone = spark.conf.get(_TIME_ZONE)
    if time_zone not in ("UTC", "Etc/UTC"):
        raise PipelineFailed(
            f"the session's time zone is {time_zone}, so days would not be UTC days: call "
            f"spark.conf.set('{_TIME_ZONE}', 'UTC') first"
        )


def has_java_class(spark: SparkSession, name: str) -> bool:
    """Return whether Spark's driver can load a Java class, that is, whether it has the jar."""
    try:
        jvm: Any = spark.sparkContext._jvm
        jvm.java.lang.Thread.currentThread().getContextClassLoader().loadClass(name)
    except Exception:  # there is no such class, or this is Spark Connect, which shows none
        return False
    return True


# --- errors --------------------------------------------------------------------------------------

_ESCROWMQ_ERROR_PATTERN: Final = re.compile(r"escrowmq\.errors\.\w+: ([^\n]+)")
_TASK_ERROR_PATTERN: Final = re.compile(
    r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*)"
)


@contextmanager
def translate_spark_errors() -> Iterator[None]:
    """Raise PipelineFailed, with one line of text, for every error of Spark in the block."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:  # a job that fails in a task raises the latter
        raise PipelineFailed(spark_error_text(error)) from error


def spark_error_text(error: BaseException) -> str:
    """Return the cause in one line; Spark's own text is pages long.

    That is the text of an error of this package if there is one, else of the Python error in a
    task, else the first line of Spark's.
    """
    text = str(error)
    for pattern in (_ESCROWMQ_ERROR_PATTERN, _TASK_ERROR_PATTERN):
        if matches := pattern.findall(text):
            return str(matches[-1])
    java_text = str(getattr(error, "java_exception", error)).strip()
    return java_text.splitlines()[0] if java_text else type(error).__name__


# --- progress ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PipelineProgress:
    step: str
    rows: int = 0
    rows_per_s: float = 0.0
    lag: int | None = None  # messages that are still to be read; None: unknown
    remaining_s: float | None = None

    def as_text(self) -> str:
        parts = [f"{self.step}: {self.rows:,} rows"]
        if self.rows_per_s:
            parts.append(f"{self.rows_per_s:,.0f} per second")
        if self.lag is not None:
            parts.append(f"{self.lag:,} behind")
        if self.remaining_s is not None and self.lag:
            parts.append(f"{self.remaining_s:,.0f} s left")
        return ", ".join(parts)

    def as_json(self) -> str:
        remaining_s = None if self.remaining_s is None else round(self.remaining_s, 1)
        return json.dumps(
            {
                "step": self.step,
                "rows": self.rows,
                "rate": round(self.rows_per_s, 1),
                "lag": self.lag,
                "left_s": remaining_s,
            }
        )


PipelineProgressCallback = Callable[[PipelineProgress], None]


def ignore_progress(progress: PipelineProgress) -> None:
    """Do nothing: the default of functions that report progress."""


@contextmanager
def progress_output(*, as_json: bool) -> Iterator[PipelineProgressCallback]:
    """Yield a callback that shows progress.

    It prints JSON lines to standard output, or a status line to standard error if that is a
    terminal; otherwise it prints nothing.
    """
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
    """Wait until a query ends, and report its progress. Return the number of rows it has read."""
    clock = SystemClock() if clock is None else clock
    start_s = clock.elapsed_s()
    rows, last_batch = 0, -1
    while True:
        has_ended = query.awaitTermination(_POLL_INTERVAL_S)
        for batch in query.recentProgress:
            if batch["batchId"] <= last_batch:
                continue
            last_batch = batch["batchId"]
            rows += batch["numInputRows"] or 0
            rate = rows / max(clock.elapsed_s() - start_s, 0.001)
            lag = query_lag(batch["sources"])
            remaining_s = None if lag is None or not rate else lag / rate
            on_progress(PipelineProgress(step, rows, rate, lag, remaining_s))
        if has_ended:
            return rows


def query_lag(sources: Any) -> int | None:
    """Return the number of messages that a query has not read yet; None if it does not say."""
    lag = 0
    for source in sources:
        end, latest = _next_offsets(source["endOffset"]), _next_offsets(source["latestOffset"])
        if end is None or latest is None:
            return None
        lag += sum(max(0, offset - end.get(queue, 0)) for queue, offset in latest.items())
    return lag


def _next_offsets(offset: Any) -> dict[tuple[str, str, str], int] | None:
    """Parse an offset as the stream reader writes it: {"next": topic -> broker -> queue -> n}."""
    decoded = json.loads(offset) if isinstance(offset, str) else offset
    if not isinstance(decoded, Mapping) or "next" not in decoded:
        return None
    return {
        (topic, broker, queue): next_offset
        for topic, brokers in decoded["next"].items()
        for broker, queues in brokers.items()
        for queue, next_offset in queues.items()
    }


# --- streams -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClusterSource:
    """A cluster to read from. `options` are options of the Spark source (accessKey, tls, …)."""

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
    """Append all messages that the cluster has now and that were not read before, exactly once.

    Spark may run a batch again after a crash; the table skips a batch that it has. Return the
    number of messages. Raises PipelineFailed if the checkpoint is lost.
    """
    if table.manifest.next_batch and not (checkpoint / "offsets").is_dir():
        raise PipelineFailed(
            f"{checkpoint}, which says what {table.directory} has read, is missing: "
            f"restore it, or start in a new directory"
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

    def append_batch(frame: DataFrame, batch: int) -> None:
        table.append(batch, transform(frame), partition_by)

    writer = (
        stream.writeStream.foreachBatch(append_batch)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
    )
    return _run_to_end(writer, step, on_progress)


def _run_to_end(writer: DataStreamWriter, step: str, on_progress: PipelineProgressCallback) -> int:
    """Run a query to its end, and return the number of rows.

    Spark gives a Python worker ten seconds to start, which is too short on a busy machine. The
    query is started again then; it continues where it was.
    """
    from pyspark.errors import PySparkException

    starts_left = _MAX_STARTS
    while True:
        starts_left -= 1
        query = writer.start()
        try:
            return await_query(query, step, on_progress)
        except PySparkException as error:
            if _WORKER_START_FAILED not in str(error) or not starts_left:
                raise
        finally:
            query.stop()
