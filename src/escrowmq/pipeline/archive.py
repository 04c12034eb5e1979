"""Topics to Parquet, each message once, by day and hour of its store time.

OUT/_manifest.json                        which parts count
OUT/_parts/part=7/day=…/hour=…/*.parquet  one micro-batch each, or many that were put together
OUT/_checkpoint/…                         how far the topics were read
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import DateType, IntegerType, StructField, StructType

from escrowmq.errors import PipelineFailed
from escrowmq.pipeline.progress import Progress, Report, silent
from escrowmq.pipeline.session import check_time_zone, plain_errors
from escrowmq.pipeline.sources import Source, read_now
from escrowmq.pipeline.tables import Table
from escrowmq.spark.schema import MESSAGE

KIND: Final = "an escrowmq archive"
BY: Final = ("day", "hour")
ARCHIVE: Final = StructType(
    [*MESSAGE.spark().fields, StructField("day", DateType()), StructField("hour", IntegerType())]
)
_SMALL_BYTES: Final = 512 << 20
_SMALL_MAX: Final = 16
_FILE_ROWS: Final = 2_000_000


@dataclass(frozen=True, slots=True)
class Archived:
    messages: int  # read now
    compacted: int  # parts that were put together


def read_archive(spark: SparkSession, directory: str | Path) -> DataFrame:
    """All messages of an archive as it is now, each once, with `day` and `hour`.

    Raises PipelineFailed if there is none.
    """
    return archive_table(directory).read(spark, ARCHIVE)


def archive_table(directory: str | Path) -> Table:
    table = Table(Path(directory), KIND)
    if not (table.directory / "_manifest.json").exists():
        raise PipelineFailed(
            f"there is no archive in {directory}: `escrowmq pipeline archive --out` makes one"
        )
    return table


def by_hour(messages: DataFrame) -> DataFrame:
    rows = messages.withColumn("day", f.to_date("store_time"))
    return rows.withColumn("hour", f.hour("store_time"))


def run_archive(
    spark: SparkSession,
    out: str | Path,
    *,
    source: Source,
    topics: Sequence[str],
    every_s: float | None = None,
    compact: bool = False,
    stop: threading.Event | None = None,
    report: Report = silent,
) -> Archived:
    """Add what is new; with `every_s` again and again, until `stop` is set. Small parts are put
    together when there are many, or with `compact` at once. The last round.

    Raises PipelineFailed.
    """
    check_time_zone(spark)
    table = Table(Path(out), KIND)
    with table.writing(), plain_errors():
        _check_topics(table, topics)
        done = _round(spark, table, source, topics, 2 if compact else _SMALL_MAX, report)
        while every_s is not None and not (stop or threading.Event()).wait(every_s):
            done = _round(spark, table, source, topics, _SMALL_MAX, report)
        return done


def _check_topics(table: Table, topics: Sequence[str]) -> None:
    """More topics may join; one that is left out would have a gap when it comes back."""
    known = table.manifest.names.get("topics", [])
    if missing := sorted(set(known) - set(topics)):
        raise PipelineFailed(
            f"{table.directory} also archives {', '.join(missing)}: name all of its topics, "
            f"or another directory"
        )
    table.publish(names={**table.manifest.names, "topics": sorted(topics)})


def _round(
    spark: SparkSession,
    table: Table,
    source: Source,
    topics: Sequence[str],
    at_least: int,
    report: Report,
) -> Archived:
    messages = read_now(
        spark,
        source,
        {"subscribe": ",".join(topics)},
        table.directory / "_checkpoint",
        table,
        by_hour,
        step="messages",
        partition_by=BY,
        report=report,
    )
    report(Progress("putting small parts together", messages))
    compacted = table.compact(
        spark, ARCHIVE, _arranged, partition_by=BY, small_bytes=_SMALL_BYTES, at_least=at_least
    )
    return Archived(messages, compacted)


def _arranged(rows: DataFrame, size: int) -> DataFrame:
    """One file for each hour, or a few: rows of an hour meet in one task, in the log's order."""
    order = ("day", "hour", "broker", "topic", "queue_id", "queue_offset")
    files = 1 + size // _SMALL_BYTES
    spread = rows.repartition(files * 8, "day", "hour", f.pmod(f.hash("broker"), f.lit(files)))
    return spread.sortWithinPartitions(*order)
