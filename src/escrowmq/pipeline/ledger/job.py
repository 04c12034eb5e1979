"""Keep a ledger up to date in a directory.

    OUT/day=2024-05-01      links, for readers that do not know the manifest
    OUT/_manifest.json      which directories are the ledger now, and which batches are merged
    OUT/_parts/…            days as they were built
    OUT/_events/…           the records of brokers as they were read: two tables
    OUT/_checkpoint/…       how far the brokers' topics were read

A round reads new records, finds the days that they affect, builds these days again from everything
that is known about them, and replaces the old ones in one step. So a late record needs no special
treatment, and a round that was interrupted is simply repeated.
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

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from escrowmq.errors import PipelineFailed
from escrowmq.pipeline.job import (
    ClusterSource,
    PipelineProgress,
    PipelineProgressCallback,
    append_available,
    check_time_zone,
    ignore_progress,
    translate_spark_errors,
)
from escrowmq.pipeline.ledger.model import (
    EVENT_SCHEMA,
    FINAL_COLUMNS,
    FINAL_SCHEMA,
    LEDGER_SCHEMA,
    affected_days,
    build_ledger,
    ledger_of_days,
    to_events,
    to_finals,
)
from escrowmq.pipeline.ledger.table_formats import PARQUET, check_format, copy_days
from escrowmq.pipeline.parquet_table import ParquetTable, TablePart, part_of_directory

LEDGER_KIND: Final = "an escrowmq ledger"
_SMALL_BYTES: Final = 256 << 20
_FILE_BYTES: Final = 128 << 20
_MIN_SMALL_PARTS: Final = 16
_FINAL_READ_COLUMNS: Final = ",".join((*FINAL_COLUMNS, "transaction_id"))


@dataclass(frozen=True, slots=True)
class LedgerResult:
    """What a round did."""

    records: int  # read from brokers
    days: tuple[str, ...]  # built again
    rows: int  # transactions in these days


def read_ledger(spark: SparkSession, directory: str | Path) -> DataFrame:
    """Return a ledger as it is now. Raises PipelineFailed if the directory has none."""
    directory = Path(directory)
    if not (directory / "_manifest.json").exists():
        raise PipelineFailed(
            f"there is no ledger in {directory}; create it with `escrowmq pipeline ledger --out`"
        )
    return ParquetTable(directory, LEDGER_KIND).read(spark, LEDGER_SCHEMA)


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
    """Bring a ledger up to date from a cluster (`source`) or from brokers' directories (`paths`).

    With `interval_s`, repeat until `stop` is set. Besides Parquet, write a copy in `table_format`,
    one of FORMATS. Return the result of the last round. Raises PipelineFailed.
    """
    if (source is None) == (not paths):
        raise PipelineFailed("a ledger is made from a cluster or from files: give one of them")
    check_time_zone(spark)
    check_format(spark, table_format)
    run = _LedgerRun(spark, Path(out), on_progress, table_format)
    with run.table.write_lock(), translate_spark_errors():
        run.check_origin("files" if source is None else "cluster")
        if source is None:
            return run.rebuild_from_files([Path(path) for path in paths])
        result = run.update(source)
        while interval_s is not None and not (stop or threading.Event()).wait(interval_s):
            result = run.update(source)
        return result


class _LedgerRun:
    """The tables of one ledger, and the steps of a round. The caller holds the write lock."""

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
        self._on_progress = on_progress
        self.table = ParquetTable(out, LEDGER_KIND)
        self._events = ParquetTable(out / "_events" / "transactions", "records of transactions")
        self._finals = ParquetTable(out / "_events" / "finals", "delivered messages")

    def check_origin(self, origin: str) -> None:
        """Raise PipelineFailed if the ledger was made from another kind of source.

        Records of files carry the path as broker name, so the two cannot be mixed.
        """
        stored = self.table.manifest.names.get("origin", [origin])
        if stored != [origin]:
            raise PipelineFailed(
                f"{self._out} was made from {stored[0]}, not from {origin}: use another directory"
            )
        self.table.publish(names={**self.table.manifest.names, "origin": [origin]})

    # --- read ------------------------------------------------------------------------------------

    def update(self, source: ClusterSource) -> LedgerResult:
        """Read the new records of a cluster and merge them."""
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
                on_progress=self._on_progress,
            )
            # Finals are read after the ops: for every commit that is known, the final is in the log
            # by now, so a committed transaction is never shown without its message.
            if topics := self._update_topics():
                pattern = "|".join(re.escape(topic) for topic in topics)
                records += append_available(
                    self._spark,
                    source,
                    {
                        "subscribePattern": pattern,
                        "includeSystem": "true",
                        "columns": _FINAL_READ_COLUMNS,
                    },
                    checkpoint / "finals",
                    self._finals,
                    to_finals,
                    step="messages",
                    on_progress=self._on_progress,
                )
            days, rows = self._merge()
            self._compact()
        return LedgerResult(records, days, rows)

    def rebuild_from_files(self, paths: Sequence[Path]) -> LedgerResult:
        """Build the whole ledger again: reading files cannot continue where it ended last time."""
        names = [str(path.absolute()) for path in paths]
        with self._events.write_lock(), self._finals.write_lock():
            self._replace(
                self._events, map(to_events, self._read_files(names, mode="transactions"))
            )
            topics = self._topics_of_halves(self._events.manifest.parts)
            messages = self._read_files(names, subscribe=",".join(topics)) if topics else []
            self._replace(self._finals, map(to_finals, messages))
            days, rows = self._merge(all_days=True)
        return LedgerResult(self._events.read(self._spark, EVENT_SCHEMA).count(), days, rows)

    def _read_files(self, names: Sequence[str], **options: str) -> list[DataFrame]:
        # Offsets are unique within a broker, but files do not name their broker. The directory
        # takes its place.
        reader = self._spark.read.format("escrowmq").options(**options)
        return [reader.load(name).withColumn("broker", F.lit(name)) for name in names]

    def _replace(self, table: ParquetTable, frames: Iterable[DataFrame]) -> None:
        """Replace the content of a table by these frames."""
        all_frames = list(frames)
        parts = []
        if all_frames:
            path = table.write(reduce(DataFrame.unionByName, all_frames))
            parts = [part_of_directory(table, path, 0)]
        table.publish(parts=parts, next_batch=1)

    def _update_topics(self) -> list[str]:
        """Return all topics that a half was ever sent to, and store them in the manifest."""
        stored = set(self.table.manifest.names.get("topics", []))
        new_parts = self._unmerged_parts(self._events, "transactions")
        topics = sorted(stored | set(self._topics_of_halves(new_parts)))
        if set(topics) != stored:
            self.table.publish(names={**self.table.manifest.names, "topics": topics})
        return topics

    def _topics_of_halves(self, parts: Sequence[TablePart]) -> list[str]:
        halves = self._events.read(self._spark, EVENT_SCHEMA, parts).where("kind = 'half'")
        rows = halves.where("topic is not null").select("topic").distinct().collect()
        return sorted(row["topic"] for row in rows)

    def _unmerged_parts(self, table: ParquetTable, name: str) -> list[TablePart]:
        merged = self.table.manifest.state.get(name, 0)
        return [part for part in table.manifest.parts if part.last >= merged]

    # --- merge -----------------------------------------------------------------------------------

    def _merge(self, *, all_days: bool = False) -> tuple[tuple[str, ...], int]:
        """Build the affected days and publish them. Return the days and their number of rows."""
        spark, manifest = self._spark, self.table.manifest
        new_events = self._unmerged_parts(self._events, "transactions")
        new_finals = self._unmerged_parts(self._finals, "finals")
        if not (new_events or new_finals or all_days):
            return (), 0
        self._on_progress(PipelineProgress("building days"))
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
        # The hint gives each day few files, but splits a large day, so that no task gets too much.
        path = self.table.write(rows.hint("rebalance", "day"), ["day"])
        directories = sorted((self.table.parts_directory / path).glob("day=*"))
        new_parts = [
            part_of_directory(self.table, f"{path}/{directory.name}", 0)
            for directory in directories
        ]
        # An affected day can have no rows any more. Its old part goes as well.
        replaced_days = None if days is None else {f"day={day}" for day in days}
        retained = (
            []
            if replaced_days is None
            else [part for part in manifest.parts if _day_of(part) not in replaced_days]
        )
        parts = sorted([*retained, *new_parts], key=_day_of)
        merged = {
            "transactions": self._events.manifest.next_batch,
            "finals": self._finals.manifest.next_batch,
        }
        names = self._copy_to_format(parts, new_parts, days)
        self.table.publish(parts=parts, state=merged, names=names)
        self._link_days()
        count = self.table.read(spark, LEDGER_SCHEMA, new_parts).count() if new_parts else 0
        return tuple(directory.name.removeprefix("day=") for directory in directories), count

    def _copy_to_format(
        self, parts: Sequence[TablePart], new_parts: Sequence[TablePart], days: Sequence[str] | None
    ) -> dict[str, list[str]]:
        """Copy the days that were built (None: all) to the other format, if there is one.

        This happens before `parts` is published, so an interrupted round copies them again. Return
        the names for the manifest: they say which format is complete. A copy that missed a round,
        because that round ran with another format, is written again as a whole.
        """
        names = self.table.manifest.names
        copies: list[str] = []
        if self._format != PARQUET:
            is_complete = self._format in names.get("copies", []) and len(new_parts) < len(parts)
            rows = self.table.read(self._spark, LEDGER_SCHEMA, new_parts if is_complete else parts)
            copy_days(rows, self._out, self._format, days if is_complete else None)
            copies = [self._format]
        return {**names, "copies": copies}

    def _link_days(self) -> None:
        """Point the links OUT/day=… to the current parts, one at a time.

        Links are a convenience. On a file system without links there are none.
        """
        days = {_day_of(part) for part in self.table.manifest.parts}
        with suppress(OSError, NotImplementedError):
            for link in self._out.glob("day=*"):
                if link.name not in days:
                    link.unlink()
            for part in self.table.manifest.parts:
                new_link = self._out / "_link"
                new_link.unlink(missing_ok=True)
                new_link.symlink_to(Path("_parts") / part.path, target_is_directory=True)
                os.replace(new_link, self._out / _day_of(part))

    def _compact(self) -> None:
        """Merge small parts of both tables of records.

        All records are merged into the ledger at this time, so no part looks unmerged afterwards.
        """
        sort_columns: Mapping[ParquetTable, tuple[StructType, str]] = {
            self._events: (EVENT_SCHEMA, "log_offset"),
            self._finals: (FINAL_SCHEMA, "prepared_offset"),
        }
        for table, (schema, column) in sort_columns.items():
            table.compact(
                self._spark,
                schema,
                lambda rows, size, column=column: rows.repartitionByRange(  # type: ignore[misc]
                    1 + size // _FILE_BYTES, "broker", column
                ).sortWithinPartitions("broker", column),
                small_bytes=_SMALL_BYTES,
                min_parts=_MIN_SMALL_PARTS,
            )


def _day_of(part: TablePart) -> str:
    return Path(part.path).name
