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

from escrowmq.clock import Clock, Moment, SystemClock, since_1970_ms, utc_text
from escrowmq.errors import PipelineFailed
from escrowmq.pipeline.job import (
    Progress,
    Report,
    Source,
    check_time_zone,
    plain_errors,
    read_now,
    silent,
)
from escrowmq.pipeline.parquet_table import Table
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


CHUNK_ROWS: Final = 200_000
_CHUNK_S: Final = 5  # of a limited rate
_MINUTE_MS: Final = 60_000
_HOUR_MS: Final = 60 * _MINUTE_MS
_FAR_MS: Final = 4_102_444_800_000  # 2100
_ORDER: Final = ("store_time", "broker", "queue_id", "queue_offset")
_SHARDING: Final = "__SHARDINGKEY"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to replay, and where to."""

    archive: str
    servers: str
    topic: str
    since: Moment | None = None
    until: Moment | None = None
    where: str = ""
    name: str = ""  # nothing: one that says all of the above
    rate: int = 0  # messages a second; 0: no limit
    at_least_once: bool = False  # all that RocketMQ can do

    def full_name(self) -> str:
        if self.name:
            return self.name
        parts = (os.path.abspath(self.archive), self.topic, self.since, self.until, self.where)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class Chunk(msgspec.Struct, frozen=True):
    """Messages that were stored from one time on, up to another."""

    first_ms: int
    end_ms: int
    rows: int  # about


class Plan(msgspec.Struct, frozen=True):
    topic: str
    since: str
    until: str
    where: str
    chunks: list[Chunk]
    done: int = 0


@dataclass(frozen=True, slots=True)
class Replayed:
    name: str
    messages: int  # sent now
    was_done: bool  # before


def run_replay(
    spark: SparkSession, wanted: Wanted, *, report: Report = silent, clock: Clock | None = None
) -> Replayed:
    """Raises PipelineFailed."""
    clock = SystemClock() if clock is None else clock
    check_time_zone(spark)
    name = wanted.full_name()
    if not re.fullmatch(r"[\w.-]{1,100}", name):
        raise PipelineFailed(f"a replay's name has letters, digits, . _ -, not {name!r}")
    with plain_errors():
        rows = read_archive(spark, wanted.archive)
        if wanted.where:
            rows = rows.where(f.expr(wanted.where))
        file = Path(wanted.archive) / "_replays" / f"{name}.json"
        plan = _load(file)
        if plan is None:
            plan = _planned(rows, wanted)
            save_plan(file, plan)
        _check_same(plan, wanted, name)
        was_done = plan.done == len(plan.chunks)
        return Replayed(
            name, _send(rows, replace(wanted, name=name), plan, report, clock), was_done
        )


def _send(rows: DataFrame, wanted: Wanted, plan: Plan, report: Report, clock: Clock) -> int:
    file = Path(wanted.archive) / "_replays" / f"{wanted.name}.json"
    total = sum(chunk.rows for chunk in plan.chunks[plan.done :])
    begun_s, sent = clock.elapsed_s(), 0
    pause = threading.Event()  # nobody sets it
    for number in range(plan.done, len(plan.chunks)):
        chunk = plan.chunks[number]
        send_chunk(rows, wanted, chunk, number)
        plan = msgspec.structs.replace(plan, done=number + 1)
        save_plan(file, plan)
        sent += chunk.rows
        took_s = max(clock.elapsed_s() - begun_s, 0.001)
        rate, lag = sent / took_s, total - sent
        report(Progress("replay", sent, rate, lag, lag / (wanted.rate or rate or 1)))
        if wanted.rate and lag:
            pause.wait(max(0.0, sent / wanted.rate - took_s))
    return sent


def send_chunk(rows: DataFrame, wanted: Wanted, chunk: Chunk, epoch: int) -> None:
    """One epoch of the sink; the same one again sends nothing."""
    writer = (
        messages_of(rows.where(_within(chunk)))
        .write.format("escrowmq")
        .mode("append")
        .option("servers", wanted.servers)
        .option("topic", wanted.topic)
        .option("transactional.id", f"replay-{wanted.full_name()}")
        .option("epoch", epoch)
    )
    if wanted.at_least_once:
        writer = writer.option("guarantee", "at-least-once")
    writer.save()


def messages_of(rows: DataFrame) -> DataFrame:
    """As the sink wants them. What shared a queue stays in order, if it has a sharding key."""
    key = f.col("properties")[_SHARDING].alias("sharding_key")
    ordered = rows.repartition("broker", "topic", "queue_id").sortWithinPartitions(*_ORDER)
    return ordered.select("body", "tags", "keys", "properties", key)


# --- plans ---------------------------------------------------------------------------------------


def _planned(rows: DataFrame, wanted: Wanted) -> Plan:
    at_ms = f.unix_millis("store_time")
    wide = Chunk(
        since_1970_ms(wanted.since) if wanted.since else 0,
        since_1970_ms(wanted.until) if wanted.until else 2**53,
        0,
    )
    minute = (f.floor(at_ms / _MINUTE_MS) * _MINUTE_MS).cast("bigint").alias("minute")
    counts = rows.where(_within(wide)).groupBy(minute).count().orderBy("minute").collect()
    most = min(CHUNK_ROWS, wanted.rate * _CHUNK_S) if wanted.rate else CHUNK_ROWS
    chunks = chunked([(row["minute"], row["count"]) for row in counts], most)
    chunks = [
        Chunk(max(one.first_ms, wide.first_ms), min(one.end_ms, wide.end_ms), one.rows)
        for one in chunks
        if one.first_ms < wide.end_ms and one.end_ms > wide.first_ms
    ]
    return Plan(wanted.topic, _text(wanted.since), _text(wanted.until), wanted.where, chunks)


def chunked(minutes: Sequence[tuple[int, int]], most: int) -> list[Chunk]:
    """Minutes and their counts, in order, as chunks of about `most` rows. They touch: what comes
    into the archive late, between two of them, is in one of them."""
    cuts: list[tuple[int, int]] = []  # where one begins, and its rows
    for minute, count in minutes:
        if cuts and cuts[-1][1] + count <= most:
            cuts[-1] = (cuts[-1][0], cuts[-1][1] + count)
            continue
        pieces = min(-(-count // most), _MINUTE_MS)
        for piece in range(pieces):
            share = count * (piece + 1) // pieces - count * piece // pieces
            cuts.append((minute + _MINUTE_MS * piece // pieces, share))
    ends = [begin for begin, _ in cuts[1:]]
    if minutes:
        ends.append(minutes[-1][0] + _MINUTE_MS)
    return [Chunk(begin, end, rows) for (begin, rows), end in zip(cuts, ends, strict=True)]


def _within(chunk: Chunk) -> Column:
    """By time, and by the directories that can hold it."""
    at_ms = f.unix_millis("store_time")
    hour = f.expr("timestampadd(HOUR, hour, cast(day AS timestamp))")
    first_ms, end_ms = max(0, chunk.first_ms - _HOUR_MS), min(chunk.end_ms, _FAR_MS)
    is_near = hour.between(f.timestamp_millis(f.lit(first_ms)), f.timestamp_millis(f.lit(end_ms)))
    return is_near & (at_ms >= chunk.first_ms) & (at_ms < chunk.end_ms)


def _text(moment: Moment | None) -> str:
    return "" if moment is None else utc_text(since_1970_ms(moment))


def _check_same(plan: Plan, wanted: Wanted, name: str) -> None:
    asked = (wanted.topic, _text(wanted.since), _text(wanted.until), wanted.where)
    if asked != (plan.topic, plan.since, plan.until, plan.where):
        raise PipelineFailed(
            f"replay {name} was planned with other arguments (topic {plan.topic}, since "
            f"{plan.since or 'ever'}, until {plan.until or 'its start'}, where "
            f"{plan.where or 'all'}): give these, or another --name"
        )


def _load(file: Path) -> Plan | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Plan)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise PipelineFailed(f"the plan {file} cannot be read: {error}") from error


def save_plan(file: Path, plan: Plan) -> None:
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
