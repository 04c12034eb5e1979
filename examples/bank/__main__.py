"""Bob pays Smith while processes are killed, decisions are lost and local transactions fail.
Some transactions are stranded, and an operator explains, resumes and decides them.
Then Spark reconciles the broker's records with the books of both banks.
"""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from escrowmq.errors import EscrowError
from examples.bank.audit import audit, start_spark, verdict_table
from examples.bank.banks import (
    BOB,
    RECEIPTS_TOPIC,
    SMITH,
    TOPIC,
    BankComparison,
    compare_banks,
    database_url,
)
from examples.bank.branch import TRANSFER_COUNT
from examples.bank.scenario import KillCounts, Scenario

DEFAULT_DIRECTORY: Final = Path("escrowmq-demo")
MARKER_FILE: Final = ".escrowmq-demo"  # marks a directory that the next demo may empty


@click.command(help=__doc__)
@click.option("--transfers", type=click.IntRange(10), default=3000, show_default=True)
@click.option("--db", "server", help="A postgresql://… database instead of SQLite files.")
@click.option("--seed", type=int, help="Repeat the random choices of an earlier run.")
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    default=DEFAULT_DIRECTORY,
    show_default=True,
    help="Directory for data, logs and report; those of an earlier demo are removed.",
)
@click.option("--spark/--no-spark", "with_spark", default=True, help="Also reconcile with Spark.")
def main(
    transfers: int, server: str | None, seed: int | None, keep: Path, with_spark: bool
) -> None:
    console = Console(highlight=False)
    seed = random.randrange(1 << 31) if seed is None else seed
    try:
        if with_spark:
            _check_spark()
        directory = _empty_directory(keep)
        bob_url, smith_url = (database_url(bank, directory, server) for bank in (BOB, SMITH))
        scenario = Scenario(directory, transfers, seed, bob_url, smith_url)
        is_right = run_demo(scenario, console, with_spark=with_spark)
    except EscrowError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(0 if is_right else 1)


def _check_spark() -> None:
    """Check Java and PySpark first, not after two minutes of transfers."""
    from escrowmq.spark.session import check_java, check_pyspark

    check_pyspark()
    check_java()


def _empty_directory(directory: Path) -> Path:
    if directory.exists() and any(directory.iterdir()):
        if not (directory / MARKER_FILE).exists():
            raise click.UsageError(
                f"{directory} is not empty and no demo made it; choose another: --keep DIR"
            )
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MARKER_FILE).touch()
    return directory.resolve()


def run_demo(scenario: Scenario, console: Console, *, with_spark: bool) -> bool:
    console.print(
        f"Bob pays Smith {scenario.transfers:,} times: two banks, two databases, one broker. "
        f"Processes are killed meanwhile (--seed {scenario.seed})."
    )
    with scenario.running_services():
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
            tried_task = progress.add_task("tried   ", total=scenario.transfers)
            credited_task = progress.add_task("credited", total=scenario.transfers)

            def show_progress(tried: int, credited: int) -> None:
                progress.update(tried_task, completed=tried)
                progress.update(credited_task, completed=credited)

            scenario.run(show_progress, lambda line: progress.console.print(line, markup=False))
        books = compare_banks(scenario.bob, scenario.smith)
        console.print(_result_table(scenario, books))
        console.print(
            "[green]Both banks agree.[/]"
            if books.is_consistent
            else "[red]The banks do not agree.[/]"
        )
        return (
            _run_audit(scenario, books, console) if with_spark else True
        ) and books.is_consistent


def _run_audit(scenario: Scenario, comparison: BankComparison, console: Console) -> bool:
    console.print("Spark reads the broker's records and compares them with both banks.")
    with console.status("Starting Spark, making the ledger, reconciling…"):
        spark = start_spark()
        try:
            summary, report = audit(
                spark,
                servers=scenario.broker.servers,
                bob_url=scenario.bob_url,
                smith_url=scenario.smith_url,
                directory=scenario.directory,
            )
        finally:
            spark.stop()
    console.print(verdict_table(summary, comparison))
    console.print(
        "[green]Ledger and databases agree.[/]"
        if summary.is_consistent
        else "[red]Ledger and databases do not agree.[/]"
    )
    console.print(f"Open the report in a browser: {report}", soft_wrap=True)
    return summary.is_consistent


def _result_table(scenario: Scenario, comparison: BankComparison) -> Table:
    receipts = scenario.message_count(RECEIPTS_TOPIC)
    rolled_back = scenario.decided_count("rolled_back")
    checked = scenario.checked_count("committed"), scenario.checked_count("rolled_back")
    table = Table("result", "count", title="Bob pays Smith")
    table.columns[1].justify = "right"
    rows = (
        ("transfers tried, with those of the branch", scenario.transfers + TRANSFER_COUNT),
        ("debited at Bob's bank", comparison.debits),
        ("credited at Smith's bank", comparison.credits_booked),
        ("messages committed", scenario.decided_count("committed")),
        ("  one for each debit", scenario.message_count(TOPIC)),
        ("  and a receipt for some", receipts),
        ("messages rolled back", rolled_back),
        ("resolved by check-back", f"{sum(checked):,} ({checked[0]:,} committed)"),
        ("stranded, then decided after all", scenario.stranded),
        ("processes killed with SIGKILL", _kills_text(scenario.kills)),
        ("still open", scenario.open_count()),
        ("messages lost", comparison.lost),
        ("credits doubled", comparison.doubled),
        ("credits without a debit", comparison.invented),
        ("money before", f"{comparison.cents_before / 100:,.2f}"),
        ("money after", f"{comparison.cents_after / 100:,.2f}"),
    )
    for name, value in rows:
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    return table


def _kills_text(kills: KillCounts) -> str:
    return f"{kills.payers_killed} of Bob's, {kills.payees_killed} of Smith's, the broker once"


if __name__ == "__main__":
    main()
