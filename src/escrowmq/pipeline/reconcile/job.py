"""A whole reconciliation: read both sides, find out who belongs to whom, compare, count.

with reconcile(spark, Wanted("ledger", ("postgresql+psycopg://…",), Limits(now_ms))) as result:
    result.summary.agree
    result.differences.show()

What a reconciliation says in numbers: few of them, however long the ledger is.

Two passes over a few columns of the ledger: its extent, then one small table of counts that all
charts are made from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Final

from py4j.protocol import Py4JError
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from escrowmq.clock import utc_text
from escrowmq.errors import CannotReconcile
from escrowmq.pipeline.job import reason_of
from escrowmq.pipeline.ledger import job as ledger_run
from escrowmq.pipeline.reconcile.compare import (
    DAY_MS,
    KINDS,
    TAKEN_ONCE,
    Limits,
    Sides,
    consumers_of,
    findings,
    groups_of,
    window,
)
from escrowmq.pipeline.reconcile.databases import inbox_rows, marker_rows, query_rows

OUTCOMES: Final = ("committed", "rolled_back", "stranded", "open")
STEPS_MAX: Final = 48  # of the time axis
# Widths that people count in.
_SECOND: Final = 1000
WIDTHS_MS: Final = tuple(
    _SECOND * seconds
    for seconds in (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400)
)
LATENCY_MS: Final = (3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 60_000, 600_000)
CHECKS: Final = (1, 2, 3, 4, 8, 16)


@dataclass(slots=True)
class Summary:
    """`over_time`: for each step of `width_ms` from `first_ms`, how many ended how."""

    now_ms: int
    since_ms: int
    transactions: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    by_check: dict[str, int] = field(default_factory=dict)  # outcomes of those that were asked
    messages: int = 0
    first_ms: int = 0
    last_ms: int = 0
    width_ms: int = 1000
    over_time: dict[str, list[int]] = field(default_factory=dict)
    latency: list[int] = field(default_factory=list)
    checks: list[int] = field(default_factory=list)
    decision_ms: dict[str, int | None] = field(default_factory=dict)  # percentiles
    groups: list[str] = field(default_factory=list)
    consumers: dict[str, list[str]] = field(default_factory=dict)
    not_compared: int = 0  # transactions of other groups
    repeats_taken_once: int = 0
    sums: dict[str, str] = field(default_factory=dict)
    differences: dict[str, int] = field(default_factory=dict)

    @property
    def agree(self) -> bool:
        return not any(self.differences.values())

    @property
    def resolved_by_check(self) -> int:
        return sum(self.by_check.get(name, 0) for name in ("committed", "rolled_back"))

    def as_json(self) -> dict[str, Any]:
        return {
            "agree": self.agree,
            "differences": self.differences,
            "transactions": self.transactions,
            "messages": self.messages,
            "outcomes": self.outcomes,
            "resolved_by_check": self.resolved_by_check,
            "decision_ms": self.decision_ms,
            "groups": self.groups,
            "consumers": self.consumers,
            "not_compared": self.not_compared,
            "repeats_taken_once": self.repeats_taken_once,
            "sums": self.sums,
            "first": utc_text(self.first_ms) if self.transactions else None,
            "last": utc_text(self.last_ms) if self.transactions else None,
            "at": utc_text(self.now_ms),
        }


def summarize(ledger: DataFrame, found: DataFrame, sides: Sides, limits: Limits) -> Summary:
    """`found`: `findings`, kept by the caller, since they are read several times."""
    told = Summary(limits.now_ms, limits.since_ms)
    told.groups = sorted(sides.groups)
    told.consumers = {group: sorted(topics) for group, topics in sides.consumers.items()}
    told.differences = dict.fromkeys(KINDS, 0)
    for kind, count in found.groupBy("kind").count().collect():
        told.differences[kind] = count
    told.repeats_taken_once = told.differences.pop(TAKEN_ONCE, 0)
    at = F.coalesce("parked_at", "first_check", "decided_at")
    all_groups = window(ledger, limits).withColumn("at_ms", F.unix_millis(at))
    all_groups = all_groups.where(F.col("at_ms") >= limits.since_ms)
    rows = all_groups.where(F.col("group").isin(list(sides.groups))) if sides.groups else all_groups
    _extent(told, rows)
    if sides.groups:
        told.not_compared = all_groups.count() - told.transactions
    _counts(told, rows)
    for name, side in (("sent", sides.sent), ("received", sides.received)):
        if side is not None and "amount" in side.columns:
            total = side.agg(F.sum("amount")).collect()[0][0]
            told.sums[name] = str(total or 0)
    return told


def _extent(told: Summary, rows: DataFrame) -> None:
    shares = {"median": 0.5, "p95": 0.95, "p99": 0.99}
    ranks = F.percentile_approx("decision_ms", list(shares.values()), 1000)
    count, messages, first, last, found = rows.agg(
        F.count("*"), F.sum("messages"), F.min("at_ms"), F.max("at_ms"), ranks
    ).collect()[0]
    told.transactions, told.messages = count, messages or 0
    told.first_ms, told.last_ms = first or 0, last or 0
    told.decision_ms = dict(zip(shares, found or [None] * len(shares), strict=True))
    span = told.last_ms - told.first_ms + 1
    days = -(-span // (STEPS_MAX * WIDTHS_MS[-1])) * WIDTHS_MS[-1]
    told.width_ms = next((w for w in WIDTHS_MS if span <= w * (STEPS_MAX - 1)), days)
    told.first_ms -= told.first_ms % told.width_ms


def _counts(told: Summary, rows: DataFrame) -> None:
    step = ((F.col("at_ms") - told.first_ms) / told.width_ms).cast("int")
    table = rows.groupBy(
        "outcome",
        step.alias("step"),
        _class("decision_ms", LATENCY_MS).alias("latency"),
        _class("checks", CHECKS).alias("checks"),
    )
    steps = (told.last_ms - told.first_ms) // told.width_ms + 1 if told.transactions else 0
    told.over_time = {name: [0] * steps for name in OUTCOMES}
    told.latency = [0] * (len(LATENCY_MS) + 1)
    told.checks = [0] * (len(CHECKS) + 1)
    outcomes, asked = Counter[str](), Counter[str]()
    for outcome, at, latency, checks, count in table.count().toLocalIterator():
        outcomes[outcome] += count
        told.over_time[outcome][at] += count
        told.checks[checks or 0] += count
        if checks:
            asked[outcome] += count
        if latency is not None:
            told.latency[latency] += count
    told.outcomes = {name: outcomes[name] for name in OUTCOMES}
    told.by_check = {name: asked[name] for name in OUTCOMES}


def _class(name: str, limits: Sequence[int]) -> Column:
    """The number of the class that a value falls in; null stays null."""
    over = [F.when(F.col(name) >= limit, 1).otherwise(0) for limit in limits]
    found = over[0]
    for one in over[1:]:
        found = found + one
    return F.when(F.col(name).isNotNull(), found)


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
