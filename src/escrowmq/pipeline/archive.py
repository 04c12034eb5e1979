"""Topics to Parquet, each message once, by day and hour of its store time.

OUT/_manifest.json                        which parts count
OUT/_parts/part=7/day=…/hour=…/*.parquet  one micro-batch each, or many that were put together
OUT/_checkpoint/…                         how far the topics were read

An archive back into a topic: in chunks of time, each a named batch of the sink, so that a replay
that was cut off goes on, and one that is done is not done twice.

A replay has a name. Its plan is made once and kept under that name: the chunks, and how many of
them are done. Chunk N is epoch N of the sink `replay-NAME`, and brokers decide an epoch once: a
crash between a chunk and the note that it is done sends nothing again.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import DateType, IntegerType, StructField, StructType

from escrowmq.clock import Clock, SystemClock, Timestamp, epoch_ms
from escrowmq.errors import PipelineFailed
from escrowmq.message.names import SHARDING_KEY
from escrowmq.parsing import format_timestamp
from escrowmq.pipeline.job import (
    ClusterSource,
    PipelineProgress,
    PipelineProgressCallback,
    append_available,
    check_time_zone,
    ignore_progress,
    translate_spark_errors,
)
from escrowmq.pipeline.parquet_table import ParquetTable
from escrowmq.spark.schema import MESSAGE_COLUMNS

ARCHIVE_KIND: Final = "an escrowmq archive"
PARTITION_COLUMNS: Final = ("day", "hour")
ARCHIVE_SCHEMA: Final = StructType(
    [
        *MESSAGE_COLUMNS.spark_schema().fields,
        StructField("day", DateType()),
        StructField("hour", IntegerType()),
    ]
)
_SMALL_BYTES: Final = 512 << 20
_MIN_SMALL_PARTS: Final = 16
_FILE_ROWS: Final = 2_000_000


@dataclass(frozen=True, slots=True)
class ArchiveResult:
    messages: int  # read now
    compacted: int  # parts that were put together


def read_archive(spark: SparkSession, directory: str | Path) -> DataFrame:
    """All messages of an archive as it is now, each once, with `day` and `hour`.

    Raises PipelineFailed if there is none.
    """
    return open_archive(directory).read(spark, ARCHIVE_SCHEMA)


def open_archive(directory: str | Path) -> ParquetTable:
    table = ParquetTable(Path(directory), ARCHIVE_KIND)
    if not (table.directory / "_manifest.json").exists():
        raise PipelineFailed(
            f"there is no archive in {directory}: `escrowmq pipeline archive --out` makes one"
        )
    return table


def add_day_and_hour(messages: DataFrame) -> DataFrame:
    rows = messages.withColumn("day", f.to_date("store_time"))
    return rows.withColumn("hour", f.hour("store_time"))


def run_archive(
    spark: SparkSession,
    out: str | Path,
    *,
    source: ClusterSource,
    topics: Sequence[str],
    interval_s: float | None = None,
    compact: bool = False,
    stop: threading.Event | None = None,
    on_progress: PipelineProgressCallback = ignore_progress,
) -> ArchiveResult:
    """Add what is new; with `every_s` again and again, until `stop` is set. Small parts are put
    together when there are many, or with `compact` at once. The last round.

    Raises PipelineFailed.
    """
    check_time_zone(spark)
    table = ParquetTable(Path(out), ARCHIVE_KIND)
    with table.write_lock(), translate_spark_errors():
        _check_topics(table, topics)
        done = _archive_available(
            spark, table, source, topics, 2 if compact else _MIN_SMALL_PARTS, on_progress
        )
        while interval_s is not None and not (stop or threading.Event()).wait(interval_s):
            done = _archive_available(spark, table, source, topics, _MIN_SMALL_PARTS, on_progress)
        return done


def _check_topics(table: ParquetTable, topics: Sequence[str]) -> None:
    """More topics may join; one that is left out would have a gap when it comes back."""
    known = table.manifest.names.get("topics", [])
    if missing := sorted(set(known) - set(topics)):
        raise PipelineFailed(
            f"{table.directory} also archives {', '.join(missing)}: name all of its topics, "
            f"or another directory"
        )
    table.publish(names={**table.manifest.names, "topics": sorted(topics)})


def _archive_available(
    spark: SparkSession,
    table: ParquetTable,
    source: ClusterSource,
    topics: Sequence[str],
    min_parts: int,
    on_progress: PipelineProgressCallback,
) -> ArchiveResult:
    messages = append_available(
        spark,
        source,
        {"subscribe": ",".join(topics)},
        table.directory / "_checkpoint",
        table,
        add_day_and_hour,
        step="messages",
        partition_by=PARTITION_COLUMNS,
        on_progress=on_progress,
    )
    on_progress(PipelineProgress("putting small parts together", messages))
    compacted = table.compact(
        spark,
        ARCHIVE_SCHEMA,
        _arrange_by_hour,
        partition_by=PARTITION_COLUMNS,
        small_bytes=_SMALL_BYTES,
        min_parts=min_parts,
    )
    return ArchiveResult(messages, compacted)


def _arrange_by_hour(rows: DataFrame, size: int) -> DataFrame:
    """One file for each hour, or a few: rows of an hour meet in one task, in the log's order."""
    order = ("day", "hour", "broker", "topic", "queue_id", "queue_offset")
    files = 1 + size // _SMALL_BYTES
    spread = rows.repartition(files * 8, "day", "hour", f.pmod(f.hash("broker"), f.lit(files)))
    return spread.sortWithinPartitions(*order)


CHUNK_ROWS: Final = 200_000
_CHUNK_S: Final = 5  # of a limited rate
_MINUTE_MS: Final = 60_000
_HOUR_MS: Final = 60 * _MINUTE_MS
_MAX_TIMESTAMP_MS: Final = 4_102_444_800_000  # 2100
_REPLAY_ORDER: Final = ("store_time", "broker", "queue_id", "queue_offset")


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """What to replay, and where to."""

    archive: str
    servers: str
    topic: str
    since: Timestamp | None = None
    until: Timestamp | None = None
    where: str = ""
    name: str = ""  # nothing: one that says all of the above
    rate: int = 0  # messages a second; 0: no limit
    at_least_once: bool = False  # all that RocketMQ can do

    def effective_name(self) -> str:
        if self.name:
            return self.name
        parts = (os.path.abspath(self.archive), self.topic, self.since, self.until, self.where)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class ReplayChunk(msgspec.Struct, frozen=True):
    """Messages that were stored from one time on, up to another."""

    first_ms: int
    end_ms: int
    rows: int  # about


class ReplayPlan(msgspec.Struct, frozen=True):
    topic: str
    since: str
    until: str
    where: str
    chunks: list[ReplayChunk]
    done: int = 0


@dataclass(frozen=True, slots=True)
class ReplayResult:
    name: str
    messages: int  # sent now
    was_done: bool  # before


def run_replay(
    spark: SparkSession,
    request: ReplayRequest,
    *,
    on_progress: PipelineProgressCallback = ignore_progress,
    clock: Clock | None = None,
) -> ReplayResult:
    """Raises PipelineFailed."""
    clock = SystemClock() if clock is None else clock
    check_time_zone(spark)
    name = request.effective_name()
    if not re.fullmatch(r"[\w.-]{1,100}", name):
        raise PipelineFailed(f"a replay's name has letters, digits, . _ -, not {name!r}")
    with translate_spark_errors():
        rows = read_archive(spark, request.archive)
        if request.where:
            rows = rows.where(f.expr(request.where))
        file = Path(request.archive) / "_replays" / f"{name}.json"
        plan = load_plan(file)
        if plan is None:
            plan = _make_plan(rows, request)
            save_plan(file, plan)
        _check_same_request(plan, request, name)
        was_done = plan.done == len(plan.chunks)
        return ReplayResult(
            name,
            _send_chunks(rows, replace(request, name=name), plan, on_progress, clock),
            was_done,
        )


def _send_chunks(
    rows: DataFrame,
    request: ReplayRequest,
    plan: ReplayPlan,
    on_progress: PipelineProgressCallback,
    clock: Clock,
) -> int:
    file = Path(request.archive) / "_replays" / f"{request.name}.json"
    total = sum(chunk.rows for chunk in plan.chunks[plan.done :])
    begun_s, sent = clock.elapsed_s(), 0
    pause = threading.Event()  # nobody sets it
    for number in range(plan.done, len(plan.chunks)):
        chunk = plan.chunks[number]
        send_chunk(rows, request, chunk, number)
        plan = msgspec.structs.replace(plan, done=number + 1)
        save_plan(file, plan)
        sent += chunk.rows
        took_s = max(clock.elapsed_s() - begun_s, 0.001)
        rate, lag = sent / took_s, total - sent
        on_progress(PipelineProgress("replay", sent, rate, lag, lag / (request.rate or rate or 1)))
        if request.rate and lag:
            pause.wait(max(0.0, sent / request.rate - took_s))
    return sent


def send_chunk(rows: DataFrame, request: ReplayRequest, chunk: ReplayChunk, epoch: int) -> None:
    """One epoch of the sink; the same one again sends nothing."""
    writer = (
        to_sink_rows(rows.where(_is_in_chunk(chunk)))
        .write.format("escrowmq")
        .mode("append")
        .option("servers", request.servers)
        .option("topic", request.topic)
        .option("transactional.id", f"replay-{request.effective_name()}")
        .option("epoch", epoch)
    )
    if request.at_least_once:
        writer = writer.option("guarantee", "at-least-once")
    writer.save()


def to_sink_rows(rows: DataFrame) -> DataFrame:
    """As the sink wants them. What shared a queue stays in order, if it has a sharding key."""
    key = f.col("properties")[SHARDING_KEY].alias("sharding_key")
    ordered = rows.repartition("broker", "topic", "queue_id").sortWithinPartitions(*_REPLAY_ORDER)
    return ordered.select("body", "tags", "keys", "properties", key)


# --- plans ---------------------------------------------------------------------------------------


def _make_plan(rows: DataFrame, request: ReplayRequest) -> ReplayPlan:
    at_ms = f.unix_millis("store_time")
    wide = ReplayChunk(
        epoch_ms(request.since) if request.since else 0,
        epoch_ms(request.until) if request.until else 2**53,
        0,
    )
    minute = (f.floor(at_ms / _MINUTE_MS) * _MINUTE_MS).cast("bigint").alias("minute")
    counts = rows.where(_is_in_chunk(wide)).groupBy(minute).count().orderBy("minute").collect()
    most = min(CHUNK_ROWS, request.rate * _CHUNK_S) if request.rate else CHUNK_ROWS
    chunks = split_into_chunks([(row["minute"], row["count"]) for row in counts], most)
    chunks = [
        ReplayChunk(max(one.first_ms, wide.first_ms), min(one.end_ms, wide.end_ms), one.rows)
        for one in chunks
        if one.first_ms < wide.end_ms and one.end_ms > wide.first_ms
    ]
    return ReplayPlan(
        request.topic,
        _format_moment(request.since),
        _format_moment(request.until),
        request.where,
        chunks,
    )


def split_into_chunks(minutes: Sequence[tuple[int, int]], max_rows: int) -> list[ReplayChunk]:
    """Minutes and their counts, in order, as chunks of about `most` rows. They touch: what comes
    into the archive late, between two of them, is in one of them."""
    cuts: list[tuple[int, int]] = []  # where one begins, and its rows
    for minute, count in minutes:
        if cuts and cuts[-1][1] + count <= max_rows:
            cuts[-1] = (cuts[-1][0], cuts[-1][1] + count)
            continue
        pieces = min(-(-count // max_rows), _MINUTE_MS)
        for piece in range(pieces):
            share = count * (piece + 1) // pieces - count * piece // pieces
            cuts.append((minute + _MINUTE_MS * piece // pieces, share))
    ends = [begin for begin, _ in cuts[1:]]
    if minutes:
        ends.append(minutes[-1][0] + _MINUTE_MS)
    return [ReplayChunk(begin, end, rows) for (begin, rows), end in zip(cuts, ends, strict=True)]


def _is_in_chunk(chunk: ReplayChunk) -> Column:
    """By time, and by the directories that can hold it."""
    at_ms = f.unix_millis("store_time")
    hour = f.expr("timestampadd(HOUR, hour, cast(day AS timestamp))")
    first_ms, end_ms = max(0, chunk.first_ms - _HOUR_MS), min(chunk.end_ms, _MAX_TIMESTAMP_MS)
    is_near = hour.between(f.timestamp_millis(f.lit(first_ms)), f.timestamp_millis(f.lit(end_ms)))
    return is_near & (at_ms >= chunk.first_ms) & (at_ms < chunk.end_ms)


def _format_moment(moment: Timestamp | None) -> str:
    return "" if moment is None else format_timestamp(epoch_ms(moment))


def _check_same_request(plan: ReplayPlan, request: ReplayRequest, name: str) -> None:
    asked = (
        request.topic,
        _format_moment(request.since),
        _format_moment(request.until),
        request.where,
    )
    if asked != (plan.topic, plan.since, plan.until, plan.where):
        raise PipelineFailed(
            f"replay {name} was planned with other arguments (topic {plan.topic}, since "
            f"{plan.since or 'ever'}, until {plan.until or 'its start'}, where "
            f"{plan.where or 'all'}): give these, or another --name"
        )


def load_plan(file: Path) -> ReplayPlan | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=ReplayPlan)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise PipelineFailed(f"the plan {file} cannot be read: {error}") from error


def save_plan(file: Path, plan: ReplayPlan) -> None:
    new = file.with_suffix(".new")
    try:
        file.parent.mkdir(exist_ok=True)
        with new.open("wb") as to:
            to.write(msgspec.json.encode(plan))
            to.flush()
            os.fsync(to.fileno())
        new.replace(file)
    except OSError as error:
        raise PipelineFailed(f"the plan {file} cannot be written: {error.strerror}") from error
