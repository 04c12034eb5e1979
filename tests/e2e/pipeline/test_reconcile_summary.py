"""The summary of a reconciliation, counted from a ledger of a few rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from pyspark.sql import SparkSession

from escrowmq.pipeline.reconcile.compare import (
    DIFFERENCE_KINDS,
    TAKEN_ONCE,
    ReconcileInputs,
    ReconcileLimits,
)
from escrowmq.pipeline.reconcile.job import (
    CHECK_BUCKETS,
    LATENCY_BUCKETS_MS,
    ReconcileSummary,
    summarize,
)
from tests.support.ledgers import NOW_MS, OPEN_MS, ledger_row, write_ledger
from tests.support.spark_session import IGNORED_WARNINGS, spark  # noqa: F401

pytestmark = [
    *(pytest.mark.filterwarnings(rule) for rule in IGNORED_WARNINGS),
    pytest.mark.timeout(600),
]

START_MS: Final = NOW_MS - 10 * OPEN_MS
UNDECIDED: Final[dict[str, Any]] = {
    "decided_at": None,
    "decided_by": None,
    "decision_ms": None,
    "finals": [],
}


def summary_of(
    session: SparkSession,
    directory: Path,
    rows: list[dict[str, Any]],
    *,
    kinds: Sequence[str] = (),
    groups: Sequence[str] = (),
) -> ReconcileSummary:
    """Summarize a ledger. `kinds` has the kind of each difference that the comparison found."""
    write_ledger(directory, rows)
    ledger = session.read.parquet(str(directory))
    findings = session.createDataFrame([(kind,) for kind in kinds], "kind string")
    return summarize(ledger, findings, ReconcileInputs(groups=groups), ReconcileLimits(NOW_MS))


def test_transactions_are_counted_by_their_number_of_checks(
    spark: SparkSession,  # noqa: F811
    tmp_path: Path,
) -> None:
    check_counts = [None, 0, 0, 1, 2, 2, 3, 4, 7, 8, 15, 16, 99]
    rows = [
        ledger_row(f"t{number}", START_MS + number, checks=checks)
        for number, checks in enumerate(check_counts)
    ]
    summary = summary_of(spark, tmp_path / "ledger", rows)
    assert CHECK_BUCKETS == (1, 2, 3, 4, 8, 16)
    assert summary.check_counts == [3, 1, 2, 1, 2, 2, 2]
    assert summary.outcomes_by_check == {
        "committed": 10,
        "rolled_back": 0,
        "stranded": 0,
        "open": 0,
    }
    assert summary.resolved_by_check == 10


def test_outcomes_are_counted_with_and_without_checks(
    spark: SparkSession,  # noqa: F811
    tmp_path: Path,
) -> None:
    rolled_back = {"outcome": "rolled_back", "finals": []}
    rows = [
        ledger_row("t0", START_MS),
        ledger_row("t1", START_MS, checks=1),
        ledger_row("t2", START_MS, **rolled_back),
        ledger_row("t3", START_MS, checks=2, **rolled_back),
        ledger_row("t4", START_MS, checks=5, **rolled_back),
        ledger_row("t5", START_MS, checks=15, outcome="stranded", **UNDECIDED),
        ledger_row("t6", START_MS, outcome="open", **UNDECIDED),
    ]
    summary = summary_of(spark, tmp_path / "ledger", rows)
    assert summary.outcomes == {"committed": 2, "rolled_back": 3, "stranded": 1, "open": 1}
    assert summary.outcomes_by_check == {"committed": 1, "rolled_back": 2, "stranded": 1, "open": 0}
    assert summary.resolved_by_check == 3


def test_differences_are_counted_by_kind_and_repeats_that_an_inbox_ignored_apart(
    spark: SparkSession,  # noqa: F811
    tmp_path: Path,
) -> None:
    kinds = ["stranded", TAKEN_ONCE, "still_open", "stranded", TAKEN_ONCE, TAKEN_ONCE]
    rows = [ledger_row("t0", START_MS)]
    summary = summary_of(spark, tmp_path / "ledger", rows, kinds=kinds)
    assert summary.differences == dict.fromkeys(DIFFERENCE_KINDS, 0) | {
        "stranded": 2,
        "still_open": 1,
    }
    assert summary.repeats_taken_once == 3
    assert not summary.is_consistent


def test_latencies_are_counted_for_decided_transactions(
    spark: SparkSession,  # noqa: F811
    tmp_path: Path,
) -> None:
    latencies_ms = [0, 2, 3, 29, 30, 999, 1000, 600_000]
    rows = [
        ledger_row(f"t{number}", START_MS, decision_ms=latency_ms)
        for number, latency_ms in enumerate(latencies_ms)
    ]
    rows.append(ledger_row("undecided", START_MS, outcome="open", **UNDECIDED))
    summary = summary_of(spark, tmp_path / "ledger", rows)
    assert LATENCY_BUCKETS_MS == (3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 60_000, 600_000)
    assert summary.latency_counts == [2, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 1]


def test_transactions_are_counted_by_the_time_step_in_which_they_started(
    spark: SparkSession,  # noqa: F811
    tmp_path: Path,
) -> None:
    rows = [
        ledger_row("t0", START_MS),
        ledger_row("t1", START_MS + 999),
        ledger_row("t2", START_MS + 2000),
        ledger_row("t3", START_MS + 2500, outcome="open", **UNDECIDED),
        ledger_row("t4", START_MS, group="shop"),
    ]
    summary = summary_of(spark, tmp_path / "ledger", rows, groups=["bank"])
    assert (summary.first_ms, summary.last_ms, summary.step_ms) == (
        START_MS,
        START_MS + 2500,
        1000,
    )
    assert summary.outcomes_over_time["committed"] == [2, 0, 1]
    assert summary.outcomes_over_time["open"] == [0, 0, 1]
    assert summary.transactions == 4
    assert summary.not_compared == 1
