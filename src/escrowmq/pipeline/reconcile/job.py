"""Run a reconciliation: read the inputs, compare, and count.

    request = ReconcileRequest("ledger", ("postgresql+psycopg://…",), ReconcileLimits(now_ms))
    with run_reconcile(spark, request) as result:
        print(result.summary.is_consistent)
        result.differences.show()

The summary has a fixed size, however long the ledger is. It takes two passes over a few columns of
the ledger: one for its extent, one for a small table of counts from which all charts are made. If
the books have amounts, a third pass sums those of the compared transactions.
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
from escrowmq.pipeline.ledger import job as ledger_job
from escrowmq.pipeline.reconcile.compare import (
    DAY_MS,
    DIFFERENCE_KINDS,
    TAKEN_ONCE,
    ReconcileInputs,
    ReconcileLimits,
    booking_totals,
    consumer_topics,
    findings,
    ledger_window,
    producer_groups,
)
from escrowmq.pipeline.reconcile.databases import read_inbox, read_markers, read_query

OUTCOMES: Final = ("committed", "rolled_back", "stranded", "open")
MAX_TIME_STEPS: Final = 48  # of the time axis
# Widths of a step of the time axis, in ms: round numbers of seconds, minutes and hours.
STEP_WIDTHS_MS: Final = tuple(
    1000 * seconds
    for seconds in (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400)
)
# Upper limits of the classes of the two histograms; the last class has none.
LATENCY_BUCKETS_MS: Final = (3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 60_000, 600_000)
CHECK_BUCKETS: Final = (1, 2, 3, 4, 8, 16)
REQUIRED_COLUMNS: Final = frozenset(
    (
        *("transaction_id", "group", "topics", "messages", "message_ids", "parked_at"),
        *("first_check", "checks", "outcome", "decided_at", "decision_ms", "finals", "day"),
    )
)

# --- run -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReconcileRequest:
    """What to compare.

    If `groups` or `consumers` are empty, they are derived from the marker and inbox tables.
    """

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
    """The result of a run. The frames are valid inside the `with` block of `run_reconcile()`."""

    ledger: DataFrame
    differences: DataFrame
    summary: ReconcileSummary

    def head(self, count: int) -> list[Row]:
        """Return the first differences, ordered by kind, time and id."""
        return self.differences.orderBy("kind", "at", "transaction_id").limit(count).collect()


@contextmanager
def run_reconcile(spark: SparkSession, request: ReconcileRequest) -> Iterator[ReconcileResult]:
    """Compare a ledger with databases. Raises ReconcileFailed.

    The differences stay on the executors' disks until the block ends.
    """
    try:
        with ExitStack() as stack:

            def persist(frame: DataFrame) -> DataFrame:
                stack.callback(frame.unpersist)
                return frame.persist(StorageLevel.DISK_ONLY)

            ledger = read_ledger(spark, request.ledger)
            inputs = read_inputs(spark, ledger, request, persist)
            all_findings = persist(findings(ledger, inputs, request.limits))
            summary = summarize(ledger, all_findings, inputs, request.limits)
            differences = all_findings.where(F.col("kind") != TAKEN_ONCE)
            yield ReconcileResult(ledger, differences, summary)
    except (PySparkException, Py4JError) as error:  # a job that fails in a task raises the latter
        raise ReconcileFailed(f"Spark could not finish: {spark_error_text(error)}") from error


def read_ledger(spark: SparkSession, directory: str) -> DataFrame:
    """Return the ledger of `pipeline ledger`, or any Parquet with its columns.

    Raises ReconcileFailed.
    """
    hint = "create it with `escrowmq pipeline ledger --out DIR`"
    try:
        if (Path(directory) / "_manifest.json").exists():
            ledger = ledger_job.read_ledger(spark, Path(directory))
        else:
            ledger = spark.read.parquet(directory)
    except PySparkException as error:
        raise ReconcileFailed(
            f"no ledger in {directory}: {spark_error_text(error)}; {hint}"
        ) from error
    missing = REQUIRED_COLUMNS - set(ledger.columns)
    if missing:
        raise ReconcileFailed(
            f"{directory} is not a ledger, it lacks {', '.join(sorted(missing))}; {hint}"
        )
    return ledger


def read_inputs(
    spark: SparkSession,
    ledger: DataFrame,
    request: ReconcileRequest,
    persist: Callable[[DataFrame], DataFrame],
) -> ReconcileInputs:
    """Read the databases. Their rows are used several times, so `persist` keeps them.

    Raises ReconcileFailed.
    """
    # A day more than compared: rows of a database can be older than the half of their transaction.
    since_ms = max(0, request.limits.since_ms - DAY_MS)
    databases = [*request.databases, *request.receivers]
    markers = inbox = None
    if request.use_tables:
        markers = _union_all(lambda url: read_markers(spark, url, since_ms), databases, persist)
        inbox = _union_all(lambda url: read_inbox(spark, url, since_ms), databases, persist)
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
            "no database has a table escrowmq_marker or escrowmq_inbox; check --database, or "
            "give --sql"
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
    """Return the rows of all databases; None if none of them has the table."""
    frames = [frame for frame in map(read, urls) if frame is not None]
    return persist(reduce(DataFrame.unionByName, frames)) if frames else None


# --- summary -------------------------------------------------------------------------------------


@dataclass(slots=True)
class ReconcileSummary:
    """The figures of a reconciliation.

    `outcomes_over_time` has, per outcome, the number of transactions in each step of `step_ms`,
    beginning at `first_ms`.
    """

    now_ms: int
    since_ms: int
    transactions: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    outcomes_by_check: dict[str, int] = field(default_factory=dict)  # of checked transactions
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
    """Return the figures. `finding_rows` are read several times; the caller persists them."""
    summary = ReconcileSummary(limits.now_ms, limits.since_ms)
    summary.groups = sorted(inputs.groups)
    summary.consumers = {group: sorted(topics) for group, topics in inputs.consumers.items()}
    summary.differences = dict.fromkeys(DIFFERENCE_KINDS, 0)
    for kind, count in finding_rows.groupBy("kind").count().collect():
        summary.differences[kind] = count
    summary.repeats_taken_once = summary.differences.pop(TAKEN_ONCE, 0)
    at = F.coalesce("parked_at", "first_check", "decided_at")
    all_groups = ledger_window(ledger, limits).withColumn("at_ms", F.unix_millis(at))
    all_groups = all_groups.where(F.col("at_ms") >= limits.since_ms)
    rows = all_groups
    if inputs.groups:
        rows = all_groups.where(F.col("group").isin(list(inputs.groups)))
    _add_extent(summary, rows)
    if inputs.groups:
        summary.not_compared = all_groups.count() - summary.transactions
    _add_counts(summary, rows)
    totals = booking_totals(ledger, inputs, limits)
    summary.sums = {side: str(total) for side, total in totals.items()}
    return summary


def _add_extent(summary: ReconcileSummary, rows: DataFrame) -> None:
    """Set the totals, the percentiles, and the time axis."""
    shares = {"median": 0.5, "p95": 0.95, "p99": 0.99}
    percentiles = F.percentile_approx("decision_ms", list(shares.values()), 1000)
    count, messages, first_ms, last_ms, decision_ms = rows.agg(
        F.count("*"), F.sum("messages"), F.min("at_ms"), F.max("at_ms"), percentiles
    ).collect()[0]
    summary.transactions, summary.messages = count, messages or 0
    summary.first_ms, summary.last_ms = first_ms or 0, last_ms or 0
    summary.decision_ms = dict(zip(shares, decision_ms or [None] * len(shares), strict=True))
    span_ms = summary.last_ms - summary.first_ms + 1
    # The smallest width with at most MAX_TIME_STEPS steps; for a longer time, whole days.
    day_ms = STEP_WIDTHS_MS[-1]
    days_ms = -(-span_ms // (MAX_TIME_STEPS * day_ms)) * day_ms
    fitting = (width for width in STEP_WIDTHS_MS if span_ms <= width * (MAX_TIME_STEPS - 1))
    summary.step_ms = next(fitting, days_ms)
    summary.first_ms -= summary.first_ms % summary.step_ms


def _add_counts(summary: ReconcileSummary, rows: DataFrame) -> None:
    """Set the counts by outcome, time, latency and number of checks, from one aggregation."""
    step = ((F.col("at_ms") - summary.first_ms) / summary.step_ms).cast("int")
    table = rows.groupBy(
        "outcome",
        step.alias("step"),
        _bucket_number("decision_ms", LATENCY_BUCKETS_MS).alias("latency"),
        _bucket_number("checks", CHECK_BUCKETS).alias("checks"),
    )
    step_count = 0
    if summary.transactions:
        step_count = (summary.last_ms - summary.first_ms) // summary.step_ms + 1
    summary.outcomes_over_time = {name: [0] * step_count for name in OUTCOMES}
    summary.latency_counts = [0] * (len(LATENCY_BUCKETS_MS) + 1)
    summary.check_counts = [0] * (len(CHECK_BUCKETS) + 1)
    outcomes, checked = Counter[str](), Counter[str]()
    for outcome, step_number, latency, checks, count in table.count().toLocalIterator():
        outcomes[outcome] += count
        summary.outcomes_over_time[outcome][step_number] += count
        summary.check_counts[checks or 0] += count
        if checks:
            checked[outcome] += count
        if latency is not None:
            summary.latency_counts[latency] += count
    summary.outcomes = {name: outcomes[name] for name in OUTCOMES}
    summary.outcomes_by_check = {name: checked[name] for name in OUTCOMES}


def _bucket_number(column: str, limits: Sequence[int]) -> Column:
    """Return the number of limits that a value reaches; null stays null."""
    reached = [F.when(F.col(column) >= limit, 1).otherwise(0) for limit in limits]
    return F.when(F.col(column).isNotNull(), reduce(Column.__add__, reached))
