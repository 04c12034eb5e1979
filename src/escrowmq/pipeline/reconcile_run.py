"""A whole reconciliation: read both sides, find out who belongs to whom, compare, count.

with reconcile(spark, Wanted("ledger", ("postgresql+psycopg://…",), Limits(now_ms))) as result:
    result.summary.agree
    result.differences.show()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Final

from py4j.protocol import Py4JError
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from escrowmq.errors import CannotReconcile
from escrowmq.pipeline import ledger_run
from escrowmq.pipeline.reconcile import consumers_of, findings, groups_of, window
from escrowmq.pipeline.reconcile_databases import (
    inbox_rows,
    marker_rows,
    query_rows,
)
from escrowmq.pipeline.reconcile_sides import DAY_MS, TAKEN_ONCE, Limits, Sides
from escrowmq.pipeline.reconcile_summary import Summary, summarize
from escrowmq.pipeline.session import reason_of

COLUMNS: Final = frozenset(
    (
        "transaction_id",
        "group",
        "topics",
        "messages",
        "message_ids",
        "parked_at",
        "first_check",
        "checks",
        "outcome",
        "decided_at",
        "decision_ms",
        "finals",
        "day",
    )
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to compare. `groups` and `consumers` are found out if they are not given."""

    ledger: str
    databases: Sequence[str]
    limits: Limits
    sql: str | None = None
    receivers: Sequence[str] = ()
    receiver_sql: str | None = None
    groups: Sequence[str] = ()
    consumers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    use_tables: bool = True


@dataclass(frozen=True, slots=True)
class Result:
    ledger: DataFrame
    differences: DataFrame  # kept until the block is left
    summary: Summary

    def head(self, rows: int) -> list[Row]:
        """The first ones, kind by kind, in a fixed order."""
        return self.differences.orderBy("kind", "at", "transaction_id").limit(rows).collect()


@contextmanager
def reconcile(spark: SparkSession, wanted: Wanted) -> Iterator[Result]:
    """Raises CannotReconcile."""
    try:
        with ExitStack() as until_the_end:

            def keep(frame: DataFrame) -> DataFrame:
                until_the_end.callback(frame.unpersist)
                return frame.persist(StorageLevel.DISK_ONLY)

            ledger = read_ledger(spark, wanted.ledger)
            sides = sides_of(spark, ledger, wanted, keep)
            found = keep(findings(ledger, sides, wanted.limits))
            summary = summarize(ledger, found, sides, wanted.limits)
            yield Result(ledger, found.where(F.col("kind") != TAKEN_ONCE), summary)
    except (PySparkException, Py4JError) as error:  # a job that fails in its tasks is the latter
        raise CannotReconcile(f"Spark could not finish: {reason_of(error)}") from error


def read_ledger(spark: SparkSession, place: str) -> DataFrame:
    """What `pipeline ledger` keeps, or any Parquet with its columns."""
    how = "make it with `escrowmq pipeline ledger --out DIR`"
    try:
        if (Path(place) / "_manifest.json").exists():
            ledger = ledger_run.read_ledger(spark, Path(place))
        else:
            ledger = spark.read.parquet(place)
    except PySparkException as error:
        raise CannotReconcile(f"no ledger in {place}: {reason_of(error)}; {how}") from error
    missing = COLUMNS - set(ledger.columns)
    if missing:
        raise CannotReconcile(f"{place} lacks {', '.join(sorted(missing))}: no ledger; {how}")
    return ledger


def sides_of(
    spark: SparkSession,
    ledger: DataFrame,
    wanted: Wanted,
    keep: Callable[[DataFrame], DataFrame],
) -> Sides:
    """`keep`: databases are asked once, however often their rows are used."""
    since_ms = max(0, wanted.limits.since_ms - DAY_MS)
    everywhere = [*wanted.databases, *wanted.receivers]
    markers = inbox = None
    if wanted.use_tables:
        markers = _all(lambda url: marker_rows(spark, url, since_ms), everywhere, keep)
        inbox = _all(lambda url: inbox_rows(spark, url, since_ms), everywhere, keep)
    sent = received = None
    if wanted.sql is not None:
        sql = wanted.sql
        sent = _all(lambda url: query_rows(spark, url, sql), wanted.databases, keep)
    if wanted.receiver_sql is not None:
        receiver_sql = wanted.receiver_sql
        received = _all(lambda url: query_rows(spark, url, receiver_sql), wanted.receivers, keep)
    if markers is inbox is sent is received is None:
        raise CannotReconcile(
            "no database has a table escrowmq_marker or escrowmq_inbox; give the right "
            "--database, or --sql"
        )
    groups, consumers = wanted.groups, wanted.consumers
    if not groups and markers is not None:
        groups = groups_of(markers)
    if not consumers and inbox is not None:
        consumers = consumers_of(window(ledger, wanted.limits), inbox)
    return Sides(markers, inbox, sent, received, groups, consumers)


def _all(
    read: Callable[[str], DataFrame | None],
    urls: Sequence[str],
    keep: Callable[[DataFrame], DataFrame],
) -> DataFrame | None:
    """What these databases say together."""
    found = [frame for frame in map(read, urls) if frame is not None]
    return keep(reduce(DataFrame.unionByName, found)) if found else None
