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

from escrowmq.errors import ReconcileFailed
from escrowmq.parsing import format_timestamp
from escrowmq.pipeline.job import spark_error_text
from escrowmq.pipeline.ledger import job as ledger_run
from escrowmq.pipeline.reconcile.compare import (
    DAY_MS,
    DIFFERENCE_KINDS,
    TAKEN_ONCE,
    ReconcileInputs,
    ReconcileLimits,
    consumer_topics,
    findings,
    ledger_window,
    producer_groups,
)
from escrowmq.pipeline.reconcile.databases import read_inbox, read_markers, read_query

OUTCOMES: Final = ("committed", "rolled_back", "stranded", "open")
MAX_TIME_STEPS: Final = 48  # of the time axis
# Widths that people count in.
_SECOND_MS: Final = 1000
STEP_WIDTHS_MS: Final = tuple(
    _SECOND_MS * seconds
    for seconds in (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400)
)
LATENCY_BUCKETS_MS: Final = (3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 60_000, 600_000)
CHECK_BUCKETS: Final = (1, 2, 3, 4, 8, 16)


@dataclass(slots=True)
class ReconcileSummary:
    """`over_time`: for each step of `width_ms` from `first_ms`, how many ended how."""

    now_ms: int
    since_ms: int
    transactions: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    outcomes_by_check: dict[str, int] = field(
        default_factory=dict
    )  # outcomes of those that were asked
    messages: int = 0
    first_ms: int = 0
    last_ms: int = 0
    step_ms: int = 1000
    outcomes_over_time: dict[str, list[int]] = field(default_factory=dict)
    latency_counts: list[int] = field(default_factory=list)
    check_counts: list[int] = field(default_factory=list)
    decision_ms: dict[str, int | None] = field(default_factory=dict)  # percentiles
    groups: list[str] = field(default_factory=list)
    consumers: dict[str, list[str]] = field(default_factory=dict)
    not_compared: int = 0  # transactions of other groups
    repeats_taken_once: int = 0
    sums: dict[str, str] = field(default_factory=dict)
    differences: dict[str, int] = field(default_factory=dict)

    @property
    def is_consistent(self) -> bool:
        return not any(self.differences.values())

    @property
    def resolved_by_check(self) -> int:
        return sum(self.outcomes_by_check.get(name, 0) for name in ("committed", "rolled_back"))

    def as_json(self) -> dict[str, Any]:
        return {
            "agree": self.is_consistent,
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
            "first": format_timestamp(self.first_ms) if self.transactions else None,
            "last": format_timestamp(self.last_ms) if self.transactions else None,
            "at": format_timestamp(self.now_ms),
        }


def summarize(
    ledger: DataFrame, finding_rows: DataFrame, inputs: ReconcileInputs, limits: ReconcileLimits
) -> ReconcileSummary:
    """`found`: `findings`, kept by the caller, since they are read several times."""
    told = ReconcileSummary(limits.now_ms, limits.since_ms)
    told.groups = sorted(inputs.groups)
    told.consumers = {group: sorted(topics) for group, topics in inputs.consumers.items()}
    told.differences = dict.fromkeys(DIFFERENCE_KINDS, 0)
    for kind, count in finding_rows.groupBy("kind").count().collect():
        told.differences[kind] = count
    told.repeats_taken_once = told.differences.pop(TAKEN_ONCE, 0)
    at = F.coalesce("parked_at", "first_check", "decided_at")
    all_groups = ledger_window(ledger, limits).withColumn("at_ms", F.unix_millis(at))
    all_groups = all_groups.where(F.col("at_ms") >= limits.since_ms)
    rows = (
        all_groups.where(F.col("group").isin(list(inputs.groups))) if inputs.groups else all_groups
    )
    _add_extent(told, rows)
    if inputs.groups:
        told.not_compared = all_groups.count() - told.transactions
    _add_counts(told, rows)
    for name, side in (("sent", inputs.sent), ("received", inputs.received)):
        if side is not None and "amount" in side.columns:
            total = side.agg(F.sum("amount")).collect()[0][0]
            told.sums[name] = str(total or 0)
    return told


def _add_extent(summary: ReconcileSummary, rows: DataFrame) -> None:
    shares = {"median": 0.5, "p95": 0.95, "p99": 0.99}
    ranks = F.percentile_approx("decision_ms", list(shares.values()), 1000)
    count, messages, first, last, found = rows.agg(
        F.count("*"), F.sum("messages"), F.min("at_ms"), F.max("at_ms"), ranks
    ).collect()[0]
    summary.transactions, summary.messages = count, messages or 0
    summary.first_ms, summary.last_ms = first or 0, last or 0
    summary.decision_ms = dict(zip(shares, found or [None] * len(shares), strict=True))
    span = summary.last_ms - summary.first_ms + 1
    days = -(-span // (MAX_TIME_STEPS * STEP_WIDTHS_MS[-1])) * STEP_WIDTHS_MS[-1]
    summary.step_ms = next((w for w in STEP_WIDTHS_MS if span <= w * (MAX_TIME_STEPS - 1)), days)
    summary.first_ms -= summary.first_ms % summary.step_ms


def _add_counts(summary: ReconcileSummary, rows: DataFrame) -> None:
    step = ((F.col("at_ms") - summary.first_ms) / summary.step_ms).cast("int")
    table = rows.groupBy(
        "outcome",
        step.alias("step"),
        _bucket_number("decision_ms", LATENCY_BUCKETS_MS).alias("latency"),
        _bucket_number("checks", CHECK_BUCKETS).alias("checks"),
    )
    steps = (
        (summary.last_ms - summary.first_ms) // summary.step_ms + 1 if summary.transactions else 0
    )
    summary.outcomes_over_time = {name: [0] * steps for name in OUTCOMES}
    summary.latency_counts = [0] * (len(LATENCY_BUCKETS_MS) + 1)
    summary.check_counts = [0] * (len(CHECK_BUCKETS) + 1)
    outcomes, asked = Counter[str](), Counter[str]()
    for outcome, at, latency, checks, count in table.count().toLocalIterator():
        outcomes[outcome] += count
        summary.outcomes_over_time[outcome][at] += count
        summary.check_counts[checks or 0] += count
        if checks:
            asked[outcome] += count
        if latency is not None:
            summary.latency_counts[latency] += count
    summary.outcomes = {name: outcomes[name] for name in OUTCOMES}
    summary.outcomes_by_check = {name: asked[name] for name in OUTCOMES}


def _bucket_number(column: str, limits: Sequence[int]) -> Column:
    """The number of the class that a value falls in; null stays null."""
    over = [F.when(F.col(column) >= limit, 1).otherwise(0) for limit in limits]
    found = over[0]
    for one in over[1:]:
        found = found + one
    return F.when(F.col(column).isNotNull(), found)


REQUIRED_COLUMNS: Final = frozenset(
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
class ReconcileRequest:
    """What to compare. `groups` and `consumers` are found out if they are not given."""

    ledger: str
    databases: Sequence[str]
    limits: ReconcileLimits
    sql: str | None = None
    receivers: Sequence[str] = ()
    receiver_sql: str | None = None
    groups: Sequence[str] = ()
    consumers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    use_tables: bool = True


@dataclass(frozen=True, slots=True)
class ReconcileResult:
    ledger: DataFrame
    differences: DataFrame  # kept until the block is left
    summary: ReconcileSummary

    def head(self, count: int) -> list[Row]:
        """The first ones, kind by kind, in a fixed order."""
        return self.differences.orderBy("kind", "at", "transaction_id").limit(count).collect()


@contextmanager
def reconcile(spark: SparkSession, request: ReconcileRequest) -> Iterator[ReconcileResult]:
    """Raises CannotReconcile."""
    try:
        with ExitStack() as until_the_end:

            def keep(frame: DataFrame) -> DataFrame:
                until_the_end.callback(frame.unpersist)
                return frame.persist(StorageLevel.DISK_ONLY)

            ledger = read_ledger(spark, request.ledger)
            sides = read_inputs(spark, ledger, request, keep)
            found = keep(findings(ledger, sides, request.limits))
            summary = summarize(ledger, found, sides, request.limits)
            yield ReconcileResult(ledger, found.where(F.col("kind") != TAKEN_ONCE), summary)
    except (PySparkException, Py4JError) as error:  # a job that fails in its tasks is the latter
        raise ReconcileFailed(f"Spark could not finish: {spark_error_text(error)}") from error


def read_ledger(spark: SparkSession, directory: str) -> DataFrame:
    """What `pipeline ledger` keeps, or any Parquet with its columns."""
    how = "make it with `escrowmq pipeline ledger --out DIR`"
    try:
        if (Path(directory) / "_manifest.json").exists():
            ledger = ledger_run.read_ledger(spark, Path(directory))
        else:
            ledger = spark.read.parquet(directory)
    except PySparkException as error:
        raise ReconcileFailed(
            f"no ledger in {directory}: {spark_error_text(error)}; {how}"
        ) from error
    missing = REQUIRED_COLUMNS - set(ledger.columns)
    if missing:
        raise ReconcileFailed(f"{directory} lacks {', '.join(sorted(missing))}: no ledger; {how}")
    return ledger


def read_inputs(
    spark: SparkSession,
    ledger: DataFrame,
    request: ReconcileRequest,
    persist: Callable[[DataFrame], DataFrame],
) -> ReconcileInputs:
    """`keep`: databases are asked once, however often their rows are used."""
    since_ms = max(0, request.limits.since_ms - DAY_MS)
    everywhere = [*request.databases, *request.receivers]
    markers = inbox = None
    if request.use_tables:
        markers = _union_all(lambda url: read_markers(spark, url, since_ms), everywhere, persist)
        inbox = _union_all(lambda url: read_inbox(spark, url, since_ms), everywhere, persist)
    sent = received = None
    if request.sql is not None:
        sql = request.sql
        sent = _union_all(lambda url: read_query(spark, url, sql), request.databases, persist)
    if request.receiver_sql is not None:
        receiver_sql = request.receiver_sql
        received = _union_all(
            lambda url: read_query(spark, url, receiver_sql), request.receivers, persist
        )
    if markers is inbox is sent is received is None:
        raise ReconcileFailed(
            "no database has a table escrowmq_marker or escrowmq_inbox; give the right "
            "--database, or --sql"
        )
    groups, consumers = request.groups, request.consumers
    if not groups and markers is not None:
        groups = producer_groups(markers)
    if not consumers and inbox is not None:
        consumers = consumer_topics(ledger_window(ledger, request.limits), inbox)
    return ReconcileInputs(markers, inbox, sent, received, groups, consumers)


def _union_all(
    read: Callable[[str], DataFrame | None],
    urls: Sequence[str],
    persist: Callable[[DataFrame], DataFrame],
) -> DataFrame | None:
    """What these databases say together."""
    found = [frame for frame in map(read, urls) if frame is not None]
    return persist(reduce(DataFrame.unionByName, found)) if found else None
