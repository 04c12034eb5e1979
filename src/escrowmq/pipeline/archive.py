"""Archive topics to Parquet, and replay an archive into a topic.

Archive: every message once, in directories by day and hour (UTC) of its store time.

    OUT/_manifest.json                        which parts make up the archive
    OUT/_parts/part=7/day=…/hour=…/*.parquet  one micro-batch each, or several that were merged
    OUT/_checkpoint/…                         how far the topics were read
    OUT/_replays/NAME.json                    the plan of a replay, and how far it is

Replay: the messages are sent in chunks of time. The plan, with the list of chunks, is made once and
stored under the name of the replay. Chunk N is epoch N of the transactional sink `replay-NAME`, and
brokers decide an epoch only once. So an interrupted replay continues where it was, and a crash
between sending a chunk and storing that it is done sends nothing twice.
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
from pyspark.sql import functions as F  # noqa: N812
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

# --- archive -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArchiveResult:
    """What the last round did."""

    messages: int  # read
    compacted: int  # parts that were merged


def read_archive(spark: SparkSession, directory: str | Path) -> DataFrame:
    """Return all messages of an archive as it is now, with the columns `day` and `hour`.

    Raises PipelineFailed if the directory has no archive.
    """
    return open_archive(directory).read(spark, ARCHIVE_SCHEMA)


def open_archive(directory: str | Path) -> ParquetTable:
    table = ParquetTable(Path(directory), ARCHIVE_KIND)
    if not (table.directory / "_manifest.json").exists():
        raise PipelineFailed(
            f"there is no archive in {directory}; create it with `escrowmq pipeline archive --out`"
        )
    return table


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
    """Add the new messages of these topics to an archive.

    With `interval_s`, repeat until `stop` is set. Small parts are merged when there are many of
    them, or in the first round if `compact`. Return the result of the last round. Raises
    PipelineFailed.
    """
    check_time_zone(spark)
    table = ParquetTable(Path(out), ARCHIVE_KIND)
    with table.write_lock(), translate_spark_errors():
        _check_topics(table, topics)
        min_parts = 2 if compact else _MIN_SMALL_PARTS
        result = _archive_available(spark, table, source, topics, min_parts, on_progress)
        while interval_s is not None and not (stop or threading.Event()).wait(interval_s):
            result = _archive_available(spark, table, source, topics, _MIN_SMALL_PARTS, on_progress)
        return result


def add_day_and_hour(messages: DataFrame) -> DataFrame:
    """Add the partition columns. No shuffle."""
    rows = messages.withColumn("day", F.to_date("store_time"))
    return rows.withColumn("hour", F.hour("store_time"))


def _check_topics(table: ParquetTable, topics: Sequence[str]) -> None:
    """Store the topics. Raise PipelineFailed if one that is archived already is left out.

    The stream has one checkpoint for all topics. A topic that is left out for some rounds would
    have a gap when it comes back; new topics are read from their beginning.
    """
    archived = table.manifest.names.get("topics", [])
    if missing := sorted(set(archived) - set(topics)):
        raise PipelineFailed(
            f"{table.directory} also archives {', '.join(missing)}: name all of its topics, "
            f"or use another directory"
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
    on_progress(PipelineProgress("merging small parts", messages))
    compacted = table.compact(
        spark,
        ARCHIVE_SCHEMA,
        _arrange_by_hour,
        partition_by=PARTITION_COLUMNS,
        small_bytes=_SMALL_BYTES,
        min_parts=min_parts,
    )
    return ArchiveResult(messages, compacted)


def _arrange_by_hour(rows: DataFrame, size_bytes: int) -> DataFrame:
    """Bring the rows of an hour into one task, or a few, in the order of the log. One shuffle."""
    order = ("day", "hour", "broker", "topic", "queue_id", "queue_offset")
    files = 1 + size_bytes // _SMALL_BYTES
    spread = rows.repartition(files * 8, "day", "hour", F.pmod(F.hash("broker"), F.lit(files)))
    return spread.sortWithinPartitions(*order)


# --- replay --------------------------------------------------------------------------------------

CHUNK_ROWS: Final = 200_000
_RATE_LIMITED_CHUNK_S: Final = 5  # a chunk of a replay with a rate takes about this long
_MINUTE_MS: Final = 60_000
_HOUR_MS: Final = 60 * _MINUTE_MS
_MAX_TIMESTAMP_MS: Final = 4_102_444_800_000  # 2100: Spark cannot represent every int64
_REPLAY_ORDER: Final = ("store_time", "broker", "queue_id", "queue_offset")


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """Which messages of an archive to send, and where to."""

    archive: str
    servers: str
    topic: str
    since: Timestamp | None = None
    until: Timestamp | None = None
    where: str = ""
    name: str = ""  # default: a hash of the fields above, without servers
    rate: int = 0  # messages per second; 0: no limit
    at_least_once: bool = False  # for RocketMQ, which cannot do more

    def effective_name(self) -> str:
        """Return the name, or one that is derived from what is replayed."""
        if self.name:
            return self.name
        parts = (os.path.abspath(self.archive), self.topic, self.since, self.until, self.where)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class ReplayChunk(msgspec.Struct, frozen=True):
    """The messages that were stored from `first_ms` to before `end_ms`."""

    first_ms: int
    end_ms: int
    rows: int  # approximate: messages can be archived later


class ReplayPlan(msgspec.Struct, frozen=True):
    """The chunks of a replay and how many of them are done, as stored in its file."""

    topic: str
    since: str
    until: str
    where: str
    chunks: list[ReplayChunk]
    done: int = 0


@dataclass(frozen=True, slots=True)
class ReplayResult:
    name: str
    messages: int  # sent by this run
    was_done: bool  # by an earlier run; nothing was sent


def run_replay(
    spark: SparkSession,
    request: ReplayRequest,
    *,
    on_progress: PipelineProgressCallback = ignore_progress,
    clock: Clock | None = None,
) -> ReplayResult:
    """Send the messages of an archive to a topic, or continue to. Raises PipelineFailed."""
    clock = SystemClock() if clock is None else clock
    check_time_zone(spark)
    name = request.effective_name()
    if not re.fullmatch(r"[\w.-]{1,100}", name):
        raise PipelineFailed(
            f"invalid name of a replay {name!r}: use up to 100 letters, digits, '.', '_', '-'"
        )
    request = replace(request, name=name)
    with translate_spark_errors():
        rows = read_archive(spark, request.archive)
        if request.where:
            rows = rows.where(F.expr(request.where))
        plan = load_plan(_plan_file(request))
        if plan is None:
            plan = _make_plan(rows, request)
            save_plan(_plan_file(request), plan)
        _check_same_request(plan, request)
        was_done = plan.done == len(plan.chunks)
        messages = _send_chunks(rows, request, plan, on_progress, clock)
        return ReplayResult(name, messages, was_done)


def _send_chunks(
    rows: DataFrame,
    request: ReplayRequest,
    plan: ReplayPlan,
    on_progress: PipelineProgressCallback,
    clock: Clock,
) -> int:
    """Send the chunks that are not done. Return the number of messages."""
    total = sum(chunk.rows for chunk in plan.chunks[plan.done :])
    start_s, sent = clock.elapsed_s(), 0
    never_set = threading.Event()  # to wait without a busy loop
    for epoch in range(plan.done, len(plan.chunks)):
        chunk = plan.chunks[epoch]
        send_chunk(rows, request, chunk, epoch)
        plan = msgspec.structs.replace(plan, done=epoch + 1)
        save_plan(_plan_file(request), plan)
        sent += chunk.rows
        elapsed_s = max(clock.elapsed_s() - start_s, 0.001)
        rate, lag = sent / elapsed_s, total - sent
        remaining_s = lag / (request.rate or rate or 1)
        on_progress(PipelineProgress("replay", sent, rate, lag, remaining_s))
        if request.rate and lag:
            never_set.wait(max(0.0, sent / request.rate - elapsed_s))
    return sent


def send_chunk(rows: DataFrame, request: ReplayRequest, chunk: ReplayChunk, epoch: int) -> None:
    """Send a chunk as one epoch of the sink. Sending the same epoch again has no effect."""
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
    """Select the columns that the sink writes, in the order of each queue. One shuffle.

    Messages that were in one queue stay in order if they have a sharding key, which brings them
    into one queue again.
    """
    sharding_key = F.col("properties")[SHARDING_KEY].alias("sharding_key")
    ordered = rows.repartition("broker", "topic", "queue_id").sortWithinPartitions(*_REPLAY_ORDER)
    return ordered.select("body", "tags", "keys", "properties", sharding_key)


# --- plans ---------------------------------------------------------------------------------------


def _make_plan(rows: DataFrame, request: ReplayRequest) -> ReplayPlan:
    """Count the messages per minute and split them into chunks. Collects one row per minute."""
    store_time_ms = F.unix_millis("store_time")
    whole = ReplayChunk(
        epoch_ms(request.since) if request.since else 0,
        epoch_ms(request.until) if request.until else 2**53,
        0,
    )
    minute = (F.floor(store_time_ms / _MINUTE_MS) * _MINUTE_MS).cast("bigint").alias("minute")
    counts = rows.where(_is_in_chunk(whole)).groupBy(minute).count().orderBy("minute").collect()
    max_rows = CHUNK_ROWS
    if request.rate:
        max_rows = min(CHUNK_ROWS, request.rate * _RATE_LIMITED_CHUNK_S)
    chunks = split_into_chunks([(row["minute"], row["count"]) for row in counts], max_rows)
    # Minutes at both ends reach beyond the requested time.
    chunks = [
        ReplayChunk(
            max(chunk.first_ms, whole.first_ms), min(chunk.end_ms, whole.end_ms), chunk.rows
        )
        for chunk in chunks
        if chunk.first_ms < whole.end_ms and chunk.end_ms > whole.first_ms
    ]
    return ReplayPlan(
        request.topic,
        _format_time(request.since),
        _format_time(request.until),
        request.where,
        chunks,
    )


def split_into_chunks(minutes: Sequence[tuple[int, int]], max_rows: int) -> list[ReplayChunk]:
    """Split minutes, given with their number of rows, into chunks of about `max_rows` rows.

    Chunks are adjacent: a message that is archived later, between two minutes that have rows, still
    belongs to a chunk. A minute with more rows is split into equal times.
    """
    starts: list[tuple[int, int]] = []  # of each chunk: its first millisecond and its rows
    for minute, count in minutes:
        if starts and starts[-1][1] + count <= max_rows:
            starts[-1] = (starts[-1][0], starts[-1][1] + count)
            continue
        pieces = min(-(-count // max_rows), _MINUTE_MS)
        for piece in range(pieces):
            share = count * (piece + 1) // pieces - count * piece // pieces
            starts.append((minute + _MINUTE_MS * piece // pieces, share))
    ends = [first_ms for first_ms, _ in starts[1:]]
    if minutes:
        ends.append(minutes[-1][0] + _MINUTE_MS)
    return [
        ReplayChunk(first_ms, end_ms, rows)
        for (first_ms, rows), end_ms in zip(starts, ends, strict=True)
    ]


def _is_in_chunk(chunk: ReplayChunk) -> Column:
    """Test the store time. The test of day and hour lets Spark skip all other directories."""
    store_time_ms = F.unix_millis("store_time")
    hour = F.expr("timestampadd(HOUR, hour, cast(day AS timestamp))")
    first_ms, end_ms = max(0, chunk.first_ms - _HOUR_MS), min(chunk.end_ms, _MAX_TIMESTAMP_MS)
    is_near = hour.between(F.timestamp_millis(F.lit(first_ms)), F.timestamp_millis(F.lit(end_ms)))
    return is_near & (store_time_ms >= chunk.first_ms) & (store_time_ms < chunk.end_ms)


def _format_time(time: Timestamp | None) -> str:
    return "" if time is None else format_timestamp(epoch_ms(time))


def _check_same_request(plan: ReplayPlan, request: ReplayRequest) -> None:
    requested = (
        request.topic,
        _format_time(request.since),
        _format_time(request.until),
        request.where,
    )
    if requested != (plan.topic, plan.since, plan.until, plan.where):
        raise PipelineFailed(
            f"replay {request.name} was planned with other arguments (topic {plan.topic}, since "
            f"{plan.since or 'the beginning'}, until {plan.until or 'its start'}, where "
            f"{plan.where or 'all'}): repeat these, or choose another --name"
        )


def _plan_file(request: ReplayRequest) -> Path:
    return Path(request.archive) / "_replays" / f"{request.name}.json"


def load_plan(file: Path) -> ReplayPlan | None:
    """Return the stored plan; None if there is none. Raises PipelineFailed."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=ReplayPlan)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise PipelineFailed(f"the replay plan {file} cannot be read: {error}") from error


def save_plan(file: Path, plan: ReplayPlan) -> None:
    """Replace the stored plan in one step, and sync it. Raises PipelineFailed."""
    new_file = file.with_suffix(".new")
    try:
        file.parent.mkdir(exist_ok=True)
        with new_file.open("wb") as output:
            output.write(msgspec.json.encode(plan))
            output.flush()
            os.fsync(output.fileno())
        new_file.replace(file)
    except OSError as error:
        raise PipelineFailed(
            f"the replay plan {file} cannot be written: {error.strerror}"
        ) from error
