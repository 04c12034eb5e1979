"""The second part of the demo: make the ledger with Spark and reconcile it with both banks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.table import Table

from escrowmq.clock import SystemClock
from examples.bank.banks import BankComparison

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from escrowmq.pipeline.reconcile.job import ReconcileSummary

BOOKS_QUERY: Final = "SELECT transaction_id, cents / 100.0 AS amount, at_ms FROM transfer"
_LOST_KINDS: Final = ("row_without_message", "consumed_without_effect")
_SETTINGS: Final = {
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "4",
    # Short jobs: a quick start matters more than peak speed.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}

MakeLedger = Callable[["SparkSession", str, Path], None]


def stream_ledger(spark: SparkSession, servers: str, out: Path) -> None:
    """Make the ledger, as `escrowmq pipeline ledger --once` does."""
    from escrowmq.pipeline import ClusterSource, run_ledger

    run_ledger(spark, out, source=ClusterSource(servers))


def start_spark() -> SparkSession:
    from escrowmq.spark import local_session

    # PySpark warns that it does not fully support pandas 3 yet. The demo does not use pandas.
    warnings.filterwarnings("ignore", message=".*pandas.*", category=FutureWarning)
    return local_session("escrowmq demo", settings=_SETTINGS)


def audit(
    spark: SparkSession,
    *,
    servers: str,
    bob_url: str,
    smith_url: str,
    directory: Path,
    make_ledger: MakeLedger = stream_ledger,
) -> tuple[ReconcileSummary, Path]:
    """Make the ledger, reconcile it with both banks, and return the summary and the report file."""
    from escrowmq.cli.commands.pipeline import write_report
    from escrowmq.pipeline.reconcile.compare import ReconcileLimits
    from escrowmq.pipeline.reconcile.job import ReconcileRequest, run_reconcile

    ledger = directory / "ledger"
    make_ledger(spark, servers, ledger)
    report = directory / "report.html"
    # Every process has stopped, so no transaction may still be open or in transit.
    limits = ReconcileLimits(SystemClock().now_ms() + 1, grace_ms=0, open_ms=0)
    request = ReconcileRequest(
        ledger=str(ledger),
        databases=(bob_url,),
        sql=BOOKS_QUERY,
        receivers=(smith_url,),
        receiver_sql=BOOKS_QUERY,
        limits=limits,
    )
    with run_reconcile(spark, request) as result:
        write_report(result, report, title="Bob pays Smith")
        return result.summary, report


def verdict_table(summary: ReconcileSummary, comparison: BankComparison) -> Table:
    table = Table("Spark's result", "count", title="Ledger against both databases")
    table.columns[1].justify = "right"
    differences = summary.differences
    lost = sum(differences[kind] for kind in _LOST_KINDS)
    is_conserved = (
        comparison.cents_before == comparison.cents_after and not differences["amount_differs"]
    )
    rows = (
        ("transactions in the ledger", f"{summary.transactions:,}"),
        ("their messages", f"{summary.messages:,}"),
        ("committed", f"{summary.outcomes['committed']:,}"),
        ("rolled back", f"{summary.outcomes['rolled_back']:,}"),
        ("open or stranded", f"{summary.outcomes['open'] + summary.outcomes['stranded']:,}"),
        ("resolved by check-back", f"{summary.resolved_by_check:,}"),
        ("delivered again, applied once", f"{summary.repeats_taken_once:,}"),
        ("lost", _colored_count(lost)),
        ("doubled", _colored_count(differences["delivered_twice"])),
        ("messages without a database row", _colored_count(differences["message_without_row"])),
        ("transfers with differing amounts", _colored_count(differences["amount_differs"])),
        ("left Bob's bank", _format_money(summary.sums["sent"])),
        ("arrived at Smith's bank", _format_money(summary.sums["received"])),
        ("money conserved", "[green]yes[/]" if is_conserved else "[red]no[/]"),
    )
    for name, value in rows:
        table.add_row(name, value)
    return table


def _colored_count(count: int) -> str:
    return f"[{'red' if count else 'green'}]{count:,}[/]"


def _format_money(total: str) -> str:
    return f"{float(total):,.2f}"
