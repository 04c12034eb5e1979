"""Keep a ledger up to date in a directory.

    OUT/day=2024-05-01      links, for readers that know no manifest
    OUT/_manifest.json      which directories are the ledger now, and how far it has merged
    OUT/_parts/…            days as they were built
    OUT/_events/…           what brokers wrote down, as it was read: two tables
    OUT/_checkpoint/…       how far their topics were read

A round reads what is new, finds the days it is about, builds these anew from all that is known of
them and puts them in place of the old ones, all at once. So a late record needs no other treatment
than an early one, and a round that was cut off is done again.
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
from pyspark.sql.types import StructType

from escrowmq.errors import PipelineFailed
from escrowmq.pipeline.ledger import EVENT_COLUMNS, FINAL_COLUMNS, events_of, finals_of, ledger_of
from escrowmq.pipeline.ledger_copies import PARQUET, check_format, copy_days
from escrowmq.pipeline.ledger_days import of_days, touched_days
from escrowmq.pipeline.ledger_schema import LEDGER
from escrowmq.pipeline.progress import Progress, Report, silent
from escrowmq.pipeline.session import check_time_zone, plain_errors
from escrowmq.pipeline.sources import Source, read_now
from escrowmq.pipeline.tables import Part, Table, part_of_directory
from escrowmq.spark.schema import MESSAGE, TRANSACTION

KIND: Final = "an escrowmq ledger"
EVENTS: Final[StructType] = TRANSACTION.only(EVENT_COLUMNS).spark()
FINALS: Final[StructType] = MESSAGE.only(FINAL_COLUMNS).spark()
_SMALL_BYTES: Final = 256 << 20
_FILE_BYTES: Final = 128 << 20
_SMALL_MAX: Final = 16
_READ_OF_FINALS: Final = ",".join((*FINAL_COLUMNS, "transaction_id"))


@dataclass(frozen=True, slots=True)
class Round:
    records: int  # read from brokers
    days: tuple[str, ...]  # built anew
    rows: int  # transactions in them


def read_ledger(spark: SparkSession, directory: str | Path) -> DataFrame:
    """A ledger as it is now. Raises PipelineFailed if there is none."""
    return _existing(Path(directory)).read(spark, LEDGER)


def _existing(directory: Path) -> Table:
    table = Table(directory, KIND)
    if not (directory / "_manifest.json").exists():
        raise PipelineFailed(
            f"there is no ledger in {directory}: `escrowmq pipeline ledger --out` makes one"
        )
    return table


def run_ledger(
    spark: SparkSession,
    out: str | Path,
    *,
    source: Source | None = None,
    paths: Sequence[str | Path] = (),
    every_s: float | None = None,
    stop: threading.Event | None = None,
    report: Report = silent,
    table_format: str = PARQUET,
) -> Round:
    """Bring a ledger up to date: from a cluster, or from brokers' directories. With `every_s` again
    and again, until `stop` is set. The last round. `table_format`: one of FORMATS; Parquet is
    there in any case.

    Raises PipelineFailed.
    """
    if (source is None) == (not paths):
        raise PipelineFailed("a ledger is made from a cluster or from files: name one of them")
    check_time_zone(spark)
    check_format(spark, table_format)
    run = _Ledger(spark, Path(out), report, table_format)
    with run.table.writing(), plain_errors():
        run.check_origin("files" if source is None else "cluster")
        if source is None:
            return run.from_files([Path(path) for path in paths])
        done = run.round(source)
        while every_s is not None and not (stop or threading.Event()).wait(every_s):
            done = run.round(source)
        return done


class _Ledger:
    def __init__(self, spark: SparkSession, out: Path, report: Report, table_format: str) -> None:
        self._format = table_format
        self._spark = spark
        self._out = out
        self._report = report
        self.table = Table(out, KIND)
        self._events = Table(out / "_events" / "transactions", "records of transactions")
        self._finals = Table(out / "_events" / "finals", "delivered messages")

    def check_origin(self, origin: str) -> None:
        known = self.table.manifest.names.get("origin", [origin])
        if known != [origin]:
            raise PipelineFailed(
                f"{self._out} was made from {known[0]}, not from {origin}: name another directory"
            )
        self.table.publish(names={**self.table.manifest.names, "origin": [origin]})

    # --- reading ---------------------------------------------------------------------------------

    def round(self, source: Source) -> Round:
        checkpoint = self._out / "_checkpoint"
        with self._events.writing(), self._finals.writing():
            records = read_now(
                self._spark,
                source,
                {"mode": "transactions"},
                checkpoint / "transactions",
                self._events,
                events_of,
                step="transactions",
                report=self._report,
            )
            # Finals after the ops that speak of them: a commit whose op is known has its final.
            if topics := self._topics():
                pattern = "|".join(re.escape(topic) for topic in topics)
                which = {"subscribePattern": pattern, "includeSystem": "true"}
                records += read_now(
                    self._spark,
                    source,
                    {**which, "columns": _READ_OF_FINALS},
                    checkpoint / "finals",
                    self._finals,
                    finals_of,
                    step="messages",
                    report=self._report,
                )
            days, rows = self._merge()
            self._compact()
        return Round(records, days, rows)

    def from_files(self, paths: Sequence[Path]) -> Round:
        """From the beginning: files cannot be read from where one was."""
        names = [str(path.absolute()) for path in paths]
        with self._events.writing(), self._finals.writing():
            self._replace(self._events, map(events_of, self._files(names, mode="transactions")))
            topics = self._topics_of(self._events.manifest.parts)
            found = self._files(names, subscribe=",".join(topics)) if topics else []
            self._replace(self._finals, map(finals_of, found))
            days, rows = self._merge(all_days=True)
        return Round(self._events.read(self._spark, EVENTS).count(), days, rows)

    def _files(self, names: Sequence[str], **options: str) -> list[DataFrame]:
        """Offsets are a broker's own, and files do not say whose they are: their place does."""
        from pyspark.sql.functions import lit

        reader = self._spark.read.format("escrowmq").options(**options)
        return [reader.load(name).withColumn("broker", lit(name)) for name in names]

    def _replace(self, table: Table, frames: Iterable[DataFrame]) -> None:
        found = list(frames)
        parts = []
        if found:
            path = table.write(reduce(DataFrame.unionByName, found))
            parts = [part_of_directory(table, path, 0)]
        table.publish(parts=parts, next_batch=1)

    def _topics(self) -> list[str]:
        """Those that any half was meant for."""
        known = set(self.table.manifest.names.get("topics", []))
        found = sorted(known | set(self._topics_of(self._new(self._events, "transactions"))))
        if set(found) != known:
            self.table.publish(names={**self.table.manifest.names, "topics": found})
        return found

    def _topics_of(self, parts: Sequence[Part]) -> list[str]:
        halves = self._events.read(self._spark, EVENTS, parts).where("kind = 'half'")
        rows = halves.where("topic is not null").select("topic").distinct().collect()
        return sorted(row["topic"] for row in rows)

    def _new(self, table: Table, name: str) -> list[Part]:
        merged = self.table.manifest.state.get(name, 0)
        return [part for part in table.manifest.parts if part.last >= merged]

    # --- merging ---------------------------------------------------------------------------------

    def _merge(self, *, all_days: bool = False) -> tuple[tuple[str, ...], int]:
        spark, manifest = self._spark, self.table.manifest
        new_events = self._new(self._events, "transactions")
        new_finals = self._new(self._finals, "finals")
        if not (new_events or new_finals or all_days):
            return (), 0
        self._report(Progress("building days"))
        events = self._events.read(spark, EVENTS)
        finals = self._finals.read(spark, FINALS)
        days = None
        if manifest.parts and not all_days:
            days = touched_days(
                events,
                self._events.read(spark, EVENTS, new_events),
                self._finals.read(spark, FINALS, new_finals),
            )
            rows = of_days(events, finals, days)
        else:
            rows = ledger_of(events, finals)
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
        self.table.publish(parts=now, state=merged, names=self._copy(now, parts, days))
        self._link()
        count = self.table.read(spark, LEDGER, parts).count() if parts else 0
        return tuple(day.name.removeprefix("day=") for day in made), count

    def _copy(
        self, parts: Sequence[Part], new: Sequence[Part], days: Sequence[str] | None
    ) -> dict[str, list[str]]:
        """The days that were built anew (None: all) to the other format, before these parts are the
        ledger: a round that is cut off here is done again. The manifest's names, with which format
        has all of it then: a copy that one round has passed over is made anew."""
        names = self.table.manifest.names
        copies: list[str] = []
        if self._format != PARQUET:
            has_the_rest = self._format in names.get("copies", []) and len(new) < len(parts)
            rows = self.table.read(self._spark, LEDGER, new if has_the_rest else parts)
            copy_days(rows, self._out, self._format, days if has_the_rest else None)
            copies = [self._format]
        return {**names, "copies": copies}

    def _link(self) -> None:
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
        orders: Mapping[Table, tuple[StructType, str]] = {
            self._events: (EVENTS, "log_offset"),
            self._finals: (FINALS, "prepared_offset"),
        }
        for table, (schema, order) in orders.items():
            table.compact(
                self._spark,
                schema,
                lambda rows, size, order=order: rows.repartitionByRange(  # type: ignore[misc]
                    1 + size // _FILE_BYTES, "broker", order
                ).sortWithinPartitions("broker", order),
                small_bytes=_SMALL_BYTES,
                at_least=_SMALL_MAX,
            )


def _day_of(part: Part) -> str:
    return Path(part.path).name
