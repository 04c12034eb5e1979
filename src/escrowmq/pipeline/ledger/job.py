"""Keep a ledger up to date in a directory.

    OUT/day=2024-05-01      links, for readers that know no manifest
    OUT/_manifest.json      which directories are the ledger now, and how far it has merged
    OUT/_parts/…            days as they were built
    OUT/_events/…           what brokers wrote down, as it was read: two tables
    OUT/_checkpoint/…       how far their topics were read

A round reads what is new, finds the days it is about, builds these anew from all that is known of
them and puts them in place of the old ones, all at once. So a late record needs no other treatment
than an early one, and a round that was cut off is done again.

Which days new records are about, and all that is known of these days.

Offsets grow with time, so the records of a day lie between two offsets of each broker. Parquet
knows the smallest and largest of every block of rows, and reads no other.

The ledger's days once more, as a Delta or an Iceberg table, if Spark has the jars for it.

    OUT/delta     a Delta table
    OUT/iceberg   the warehouse of an Iceberg catalog of the Hadoop kind; its table is `ledger`

Days are put in place of the old ones in one commit of that table, before the ledger's own manifest
names them. A round that was cut off in between is done again, with the same days.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from escrowmq.errors import PipelineFailed
from escrowmq.pipeline.job import (
    ClusterSource,
    PipelineProgress,
    PipelineProgressCallback,
    append_available,
    check_time_zone,
    has_java_class,
    ignore_progress,
    translate_spark_errors,
)
from escrowmq.pipeline.ledger.model import (
    EVENT_COLUMNS,
    FINAL_COLUMNS,
    LEDGER_SCHEMA,
    build_ledger,
    to_events,
    to_finals,
)
from escrowmq.pipeline.parquet_table import ParquetTable, TablePart, part_of_directory
from escrowmq.spark.schema import MESSAGE_COLUMNS, TRANSACTION_COLUMNS


def affected_days(events: DataFrame, new_events: DataFrame, new_finals: DataFrame) -> list[str]:
    """The days that the transactions of these new records are in, or were in before: each day that
    one of their halves came on."""
    halves = events.where("kind = 'half'")
    # A half that is new, and halves that something new was said of.
    found = [new_events.where("kind = 'half'")]
    said = new_events.where("kind not in ('half', 'stranded')").select("broker", "half_offset")
    found.append(_halves_matching(halves, said, "half_offset"))
    delivered = new_finals.selectExpr("broker", "prepared_offset AS log_offset")
    found.append(_halves_matching(halves, delivered, "log_offset"))
    given_up = new_events.where("kind = 'stranded'").select("message_id").distinct()
    if not given_up.isEmpty():  # rare, and named by the message alone
        found.append(halves.join(given_up, "message_id", "left_semi"))
    touched = reduce(
        DataFrame.unionByName, [rows.select(_transaction_id(), "at") for rows in found]
    )
    [span] = touched.agg(_utc_day(f.min("at")), _utc_day(f.max("at"))).collect()
    if span[0] is None:
        return []
    # Its day is that of its first half, which may be the day before; and if that one is read
    # late, the transaction stood where its other halves are.
    near = halves.where(_is_near_days(span[0], span[1])).select(_transaction_id(), "at")
    whole = near.join(touched.select("id").distinct(), "id", "left_semi")
    days = whole.select(_utc_day(f.col("at")).alias("day")).distinct()
    return sorted(row["day"] for row in days.collect())


def ledger_of_days(events: DataFrame, finals: DataFrame, days: Sequence[str]) -> DataFrame:
    """The ledger of some days. A transaction whose halves are more than a day apart is cut."""
    window = reduce(Column.__or__, [_is_near_days(day, day) for day in days], f.lit(False))
    is_half = f.col("kind") == "half"
    halves = events.where(is_half & window)
    about = _is_in_range(halves, "half_offset", "half_offset")
    others = (f.col("kind") == "stranded") | (~is_half & about)
    scoped = events.where((is_half & window) | others)
    rows = build_ledger(scoped, finals.where(_is_in_range(halves, "log_offset", "prepared_offset")))
    return rows.where(f.col("day").cast("string").isin(list(days)))


def _transaction_id() -> Column:
    place = f.concat_ws(":", "broker", "half_offset")
    return f.coalesce("marker_id", "message_id", place).alias("id")


def _halves_matching(halves: DataFrame, keys: DataFrame, column: str) -> DataFrame:
    some = halves.where(_is_in_range(keys, column, column))
    return some.join(keys.distinct(), ["broker", column], "left_semi")


def _is_in_range(rows: DataFrame, bounds_column: str, column: str) -> Column:
    """That `by` lies between the least and the greatest `of`; a broker each."""
    ends = (
        rows.groupBy("broker")
        .agg(f.min(bounds_column).alias("low"), f.max(bounds_column).alias("high"))
        .collect()
    )
    within = [
        (f.col("broker") == end["broker"]) & f.col(column).between(end["low"], end["high"])
        for end in ends
        if end["low"] is not None
    ]
    return reduce(Column.__or__, within, f.lit(False))


def _utc_day(time: Column) -> Column:
    return f.to_date(time).cast("string")


def _is_near_days(first: str, last: str) -> Column:
    """At most a day before the first and a day after the last."""
    low = f.date_sub(f.lit(first).cast("date"), 1).cast("timestamp")
    end = f.date_add(f.lit(last).cast("date"), 2).cast("timestamp")
    return (f.col("at") >= low) & (f.col("at") < end)


PARQUET: Final = "parquet"
DELTA: Final = "delta"
ICEBERG: Final = "iceberg"
FORMATS: Final = (PARQUET, DELTA, ICEBERG)
_DELTA_EXTENSION: Final = "io.delta.sql.DeltaSparkSessionExtension"
_FORMAT_CLASSES: Final = {
    DELTA: _DELTA_EXTENSION,
    ICEBERG: "org.apache.iceberg.spark.SparkCatalog",
}
_FORMAT_PACKAGES: Final = {
    DELTA: "io.delta:delta-spark_4.2_2.13:4.4.0",
    ICEBERG: "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0",
}
_ICEBERG_CATALOG: Final = "escrowmq_ledger"
_ICEBERG_TABLE: Final = f"{_ICEBERG_CATALOG}.ledger"


def format_settings(table_format: str) -> Mapping[str, str]:
    """What a session must have from its start."""
    if table_format != DELTA:
        return {}
    return {
        "spark.sql.extensions": _DELTA_EXTENSION,
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    }


def check_format(spark: SparkSession, table_format: str) -> None:
    """Raises PipelineFailed if Spark does not have what it takes."""
    if table_format not in FORMATS:
        raise PipelineFailed(f"there is no format {table_format!r}, only {', '.join(FORMATS)}")
    if table_format != PARQUET and not has_java_class(spark, _FORMAT_CLASSES[table_format]):
        raise PipelineFailed(
            f"format {table_format}: Spark has no jar for it; give it one, "
            f"as --conf spark.jars.packages={_FORMAT_PACKAGES[table_format]}, or --conf "
            "spark.jars=FILE"
        )
    missing = [name for name in format_settings(table_format) if not spark.conf.get(name, None)]
    if missing:
        raise PipelineFailed(
            f"format {table_format}: the session must be started with {missing[0]}"
        )


def copy_days(rows: DataFrame, out: Path, table_format: str, days: Sequence[str] | None) -> None:
    """Put these days in place of what the copy has of them; None: of all that it has."""
    if table_format == DELTA:
        _copy_to_delta(rows, str((out / DELTA).absolute()), days)
    elif table_format == ICEBERG:
        _copy_to_iceberg(rows, str((out / ICEBERG).absolute()), days)


def _copy_to_delta(rows: DataFrame, path: str, days: Sequence[str] | None) -> None:
    writer = rows.write.format("delta").mode("overwrite").partitionBy("day")
    if days is not None and (Path(path) / "_delta_log").is_dir():
        named = ", ".join(f"'{day}'" for day in days)
        writer = writer.option("replaceWhere", f"day IN ({named})")
    writer.save(path)


def _copy_to_iceberg(rows: DataFrame, warehouse: str, days: Sequence[str] | None) -> None:
    from pyspark.sql import functions  # the command line names formats without Spark

    spark = rows.sparkSession
    spark.conf.set(f"spark.sql.catalog.{_ICEBERG_CATALOG}", _FORMAT_CLASSES[ICEBERG])
    spark.conf.set(f"spark.sql.catalog.{_ICEBERG_CATALOG}.type", "hadoop")
    spark.conf.set(f"spark.sql.catalog.{_ICEBERG_CATALOG}.warehouse", warehouse)
    if days is not None and spark.catalog.tableExists(_ICEBERG_TABLE):
        # Named, not those that have rows: a day whose last transaction has moved is empty now.
        rows.writeTo(_ICEBERG_TABLE).overwrite(functions.col("day").isin(*days))
    else:
        rows.writeTo(_ICEBERG_TABLE).using("iceberg").partitionedBy("day").createOrReplace()


LEDGER_KIND: Final = "an escrowmq ledger"
EVENT_SCHEMA: Final[StructType] = TRANSACTION_COLUMNS.select(EVENT_COLUMNS).spark_schema()
FINAL_SCHEMA: Final[StructType] = MESSAGE_COLUMNS.select(FINAL_COLUMNS).spark_schema()
_SMALL_BYTES: Final = 256 << 20
_FILE_BYTES: Final = 128 << 20
_MIN_SMALL_PARTS: Final = 16
_FINAL_READ_COLUMNS: Final = ",".join((*FINAL_COLUMNS, "transaction_id"))


@dataclass(frozen=True, slots=True)
class LedgerResult:
    records: int  # read from brokers
    days: tuple[str, ...]  # built anew
    rows: int  # transactions in them


def read_ledger(spark: SparkSession, directory: str | Path) -> DataFrame:
    """A ledger as it is now. Raises PipelineFailed if there is none."""
    return _open_ledger(Path(directory)).read(spark, LEDGER_SCHEMA)


def _open_ledger(directory: Path) -> ParquetTable:
    table = ParquetTable(directory, LEDGER_KIND)
    if not (directory / "_manifest.json").exists():
        raise PipelineFailed(
            f"there is no ledger in {directory}: `escrowmq pipeline ledger --out` makes one"
        )
    return table


def run_ledger(
    spark: SparkSession,
    out: str | Path,
    *,
    source: ClusterSource | None = None,
    paths: Sequence[str | Path] = (),
    interval_s: float | None = None,
    stop: threading.Event | None = None,
    on_progress: PipelineProgressCallback = ignore_progress,
    table_format: str = PARQUET,
) -> LedgerResult:
    """Bring a ledger up to date: from a cluster, or from brokers' directories. With `every_s` again
    and again, until `stop` is set. The last round. `table_format`: one of FORMATS; Parquet is
    there in any case.

    Raises PipelineFailed.
    """
    if (source is None) == (not paths):
        raise PipelineFailed("a ledger is made from a cluster or from files: name one of them")
    check_time_zone(spark)
    check_format(spark, table_format)
    run = _LedgerRun(spark, Path(out), on_progress, table_format)
    with run.table.write_lock(), translate_spark_errors():
        run.check_origin("files" if source is None else "cluster")
        if source is None:
            return run.rebuild_from_files([Path(path) for path in paths])
        done = run.update(source)
        while interval_s is not None and not (stop or threading.Event()).wait(interval_s):
            done = run.update(source)
        return done


class _LedgerRun:
    def __init__(
        self,
        spark: SparkSession,
        out: Path,
        on_progress: PipelineProgressCallback,
        table_format: str,
    ) -> None:
        self._format = table_format
        self._spark = spark
        self._out = out
        self._report = on_progress
        self.table = ParquetTable(out, LEDGER_KIND)
        self._events = ParquetTable(out / "_events" / "transactions", "records of transactions")
        self._finals = ParquetTable(out / "_events" / "finals", "delivered messages")

    def check_origin(self, origin: str) -> None:
        known = self.table.manifest.names.get("origin", [origin])
        if known != [origin]:
            raise PipelineFailed(
                f"{self._out} was made from {known[0]}, not from {origin}: name another directory"
            )
        self.table.publish(names={**self.table.manifest.names, "origin": [origin]})

    # --- reading ---------------------------------------------------------------------------------

    def update(self, source: ClusterSource) -> LedgerResult:
        checkpoint = self._out / "_checkpoint"
        with self._events.write_lock(), self._finals.write_lock():
            records = append_available(
                self._spark,
                source,
                {"mode": "transactions"},
                checkpoint / "transactions",
                self._events,
                to_events,
                step="transactions",
                on_progress=self._report,
            )
            # Finals after the ops that speak of them: a commit whose op is known has its final.
            if topics := self._topics():
                pattern = "|".join(re.escape(topic) for topic in topics)
                which = {"subscribePattern": pattern, "includeSystem": "true"}
                records += append_available(
                    self._spark,
                    source,
                    {**which, "columns": _FINAL_READ_COLUMNS},
                    checkpoint / "finals",
                    self._finals,
                    to_finals,
                    step="messages",
                    on_progress=self._report,
                )
            days, rows = self._merge()
            self._compact()
        return LedgerResult(records, days, rows)

    def rebuild_from_files(self, paths: Sequence[Path]) -> LedgerResult:
        """From the beginning: files cannot be read from where one was."""
        names = [str(path.absolute()) for path in paths]
        with self._events.write_lock(), self._finals.write_lock():
            self._replace(
                self._events, map(to_events, self._read_files(names, mode="transactions"))
            )
            topics = self._topics_of(self._events.manifest.parts)
            found = self._read_files(names, subscribe=",".join(topics)) if topics else []
            self._replace(self._finals, map(to_finals, found))
            days, rows = self._merge(all_days=True)
        return LedgerResult(self._events.read(self._spark, EVENT_SCHEMA).count(), days, rows)

    def _read_files(self, names: Sequence[str], **options: str) -> list[DataFrame]:
        """Offsets are a broker's own, and files do not say whose they are: their place does."""
        from pyspark.sql.functions import lit

        reader = self._spark.read.format("escrowmq").options(**options)
        return [reader.load(name).withColumn("broker", lit(name)) for name in names]

    def _replace(self, table: ParquetTable, frames: Iterable[DataFrame]) -> None:
        found = list(frames)
        parts = []
        if found:
            path = table.write(reduce(DataFrame.unionByName, found))
            parts = [part_of_directory(table, path, 0)]
        table.publish(parts=parts, next_batch=1)

    def _topics(self) -> list[str]:
        """Those that any half was meant for."""
        known = set(self.table.manifest.names.get("topics", []))
        found = sorted(
            known | set(self._topics_of(self._unmerged_parts(self._events, "transactions")))
        )
        if set(found) != known:
            self.table.publish(names={**self.table.manifest.names, "topics": found})
        return found

    def _topics_of(self, parts: Sequence[TablePart]) -> list[str]:
        halves = self._events.read(self._spark, EVENT_SCHEMA, parts).where("kind = 'half'")
        rows = halves.where("topic is not null").select("topic").distinct().collect()
        return sorted(row["topic"] for row in rows)

    def _unmerged_parts(self, table: ParquetTable, name: str) -> list[TablePart]:
        merged = self.table.manifest.state.get(name, 0)
        return [part for part in table.manifest.parts if part.last >= merged]

    # --- merging ---------------------------------------------------------------------------------

    def _merge(self, *, all_days: bool = False) -> tuple[tuple[str, ...], int]:
        spark, manifest = self._spark, self.table.manifest
        new_events = self._unmerged_parts(self._events, "transactions")
        new_finals = self._unmerged_parts(self._finals, "finals")
        if not (new_events or new_finals or all_days):
            return (), 0
        self._report(PipelineProgress("building days"))
        events = self._events.read(spark, EVENT_SCHEMA)
        finals = self._finals.read(spark, FINAL_SCHEMA)
        days = None
        if manifest.parts and not all_days:
            days = affected_days(
                events,
                self._events.read(spark, EVENT_SCHEMA, new_events),
                self._finals.read(spark, FINAL_SCHEMA, new_finals),
            )
            rows = ledger_of_days(events, finals, days)
        else:
            rows = build_ledger(events, finals)
        # A day in few files, but a long one in several: no task gets more than it can hold.
        path = self.table.write(rows.hint("rebalance", "day"), ["day"])
        made = sorted((self.table.parts_directory / path).glob("day=*"))
        parts = [part_of_directory(self.table, f"{path}/{day.name}", 0) for day in made]
        # A day that has no rows any more goes with the others that are built anew.
        anew = None if days is None else [f"day={day}" for day in days]
        kept = [] if anew is None else [p for p in manifest.parts if _day_of(p) not in anew]
        merged = {
            "transactions": self._events.manifest.next_batch,
            "finals": self._finals.manifest.next_batch,
        }
        now = sorted([*kept, *parts], key=_day_of)
        self.table.publish(parts=now, state=merged, names=self._copy_to_format(now, parts, days))
        self._link_days()
        count = self.table.read(spark, LEDGER_SCHEMA, parts).count() if parts else 0
        return tuple(day.name.removeprefix("day=") for day in made), count

    def _copy_to_format(
        self, parts: Sequence[TablePart], new: Sequence[TablePart], days: Sequence[str] | None
    ) -> dict[str, list[str]]:
        """The days that were built anew (None: all) to the other format, before these parts are the
        ledger: a round that is cut off here is done again. The manifest's names, with which format
        has all of it then: a copy that one round has passed over is made anew."""
        names = self.table.manifest.names
        copies: list[str] = []
        if self._format != PARQUET:
            has_the_rest = self._format in names.get("copies", []) and len(new) < len(parts)
            rows = self.table.read(self._spark, LEDGER_SCHEMA, new if has_the_rest else parts)
            copy_days(rows, self._out, self._format, days if has_the_rest else None)
            copies = [self._format]
        return {**names, "copies": copies}

    def _link_days(self) -> None:
        """Each link is replaced at once; a file system without links goes without."""
        days = {_day_of(part) for part in self.table.manifest.parts}
        with suppress(OSError, NotImplementedError):
            for link in self._out.glob("day=*"):
                if link.name not in days:
                    link.unlink()
            for part in self.table.manifest.parts:
                new = self._out / "_link"
                new.unlink(missing_ok=True)
                new.symlink_to(Path("_parts") / part.path, target_is_directory=True)
                os.replace(new, self._out / _day_of(part))

    def _compact(self) -> None:
        """Only what is merged is in it then, so nothing looks new again."""
        orders: Mapping[ParquetTable, tuple[StructType, str]] = {
            self._events: (EVENT_SCHEMA, "log_offset"),
            self._finals: (FINAL_SCHEMA, "prepared_offset"),
        }
        for table, (schema, order) in orders.items():
            table.compact(
                self._spark,
                schema,
                lambda rows, size, order=order: rows.repartitionByRange(  # type: ignore[misc]
                    1 + size // _FILE_BYTES, "broker", order
                ).sortWithinPartitions("broker", order),
                small_bytes=_SMALL_BYTES,
                min_parts=_MIN_SMALL_PARTS,
            )


def _day_of(part: TablePart) -> str:
    return Path(part.path).name
