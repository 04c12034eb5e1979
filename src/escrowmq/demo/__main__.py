"""Bob pays Smith, while processes are killed, decisions get lost and local transactions fail.
Then Spark compares what the broker wrote down with the books of both banks.
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

from escrowmq.demo.audit import audit, session, verdict_table
from escrowmq.demo.banks import BOB, SMITH, Books, compare, database_url
from escrowmq.demo.conductor import Deeds, Story
from escrowmq.errors import EscrowError

DIRECTORY: Final = Path("escrowmq-demo")
MARK: Final = ".escrowmq-demo"  # in a directory that the next demo may empty


@click.command(help=__doc__)
@click.option("--transfers", type=click.IntRange(10), default=3000, show_default=True)
@click.option("--db", "server", help="A postgresql://… database instead of SQLite files.")
@click.option("--seed", type=int, help="Choose who is killed when, as in an earlier run.")
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    default=DIRECTORY,
    show_default=True,
    help="Data, logs and report are left here; those of an earlier demo go.",
)
@click.option("--spark/--no-spark", "with_spark", default=True, help="The second part.")
def main(
    transfers: int, server: str | None, seed: int | None, keep: Path, with_spark: bool
) -> None:
    console = Console(highlight=False)
    seed = random.randrange(1 << 31) if seed is None else seed
    try:
        if with_spark:
            _check_spark()
        directory = _emptied(keep)
        bob_url, smith_url = (database_url(bank, directory, server) for bank in (BOB, SMITH))
        story = Story(directory, transfers, seed, bob_url, smith_url)
        is_right = tell(story, console, with_spark=with_spark)
    except EscrowError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(0 if is_right else 1)


def _check_spark() -> None:
    """Before anything else: nobody wants to hear it after two minutes."""
    from escrowmq.spark.data_source import check_java, check_pyspark

    check_pyspark()
    check_java()


def _emptied(directory: Path) -> Path:
    if directory.exists() and any(directory.iterdir()):
        if not (directory / MARK).exists():
            raise click.UsageError(f"{directory} is not empty, and no demo has made it: --keep DIR")
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MARK).touch()
    return directory.resolve()


def tell(story: Story, console: Console, *, with_spark: bool) -> bool:
    console.print(
        f"Bob pays Smith {story.transfers:,} times: two banks, two databases, one broker. "
        f"Processes are killed on the way (--seed {story.seed})."
    )
    with story.stage():
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
            paid = progress.add_task("tried   ", total=story.transfers)
            came = progress.add_task("credited", total=story.transfers)

            def shown(tried: int, credited: int) -> None:
                progress.update(paid, completed=tried)
                progress.update(came, completed=credited)

            story.play(shown)
        books = compare(story.bob, story.smith)
        console.print(_table(story, books))
        console.print(
            "[green]Both banks agree.[/]" if books.agree else "[red]The banks do not agree.[/]"
        )
        return (_audited(story, books, console) if with_spark else True) and books.agree


def _audited(story: Story, books: Books, console: Console) -> bool:
    console.print("Now Spark reads what the broker wrote down, and compares it with both banks.")
    with console.status("Spark starts, makes the ledger and reconciles…"):
        spark = session()
        try:
            told, report = audit(
                spark,
                servers=story.broker.servers,
                bob_url=story.bob_url,
                smith_url=story.smith_url,
                directory=story.directory,
            )
        finally:
            spark.stop()
    console.print(verdict_table(told, books))
    console.print(
        "[green]Ledger and databases agree.[/]"
        if told.agree
        else "[red]Ledger and databases do not agree.[/]"
    )
    console.print(f"The report, for a browser: {report}", soft_wrap=True)
    return told.agree


def _table(story: Story, books: Books) -> Table:
    committed, rolled_back = story.settled("committed"), story.settled("rolled_back")
    asked = story.asked_about("committed"), story.asked_about("rolled_back")
    table = Table("what", "how many", title="Bob pays Smith")
    table.columns[1].justify = "right"
    rows = (
        ("transfers tried", story.transfers),
        ("debited at Bob's bank", books.sent),
        ("credited at Smith's bank", books.credited),
        ("messages committed", committed),
        ("messages rolled back", rolled_back),
        ("resolved by check-back", f"{sum(asked):,} ({asked[0]:,} committed)"),
        ("processes killed with -9", _killed(story.deeds)),
        ("still open", story.open_transactions()),
        ("messages lost", books.lost),
        ("credits doubled", books.doubled),
        ("credits without a debit", books.invented),
        ("money before", f"{books.cents_before / 100:,.2f}"),
        ("money after", f"{books.cents_after / 100:,.2f}"),
    )
    for name, value in rows:
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    return table


def _killed(deeds: Deeds) -> str:
    return f"{deeds.payers_killed} of Bob's, {deeds.payees_killed} of Smith's, the broker once"


if __name__ == "__main__":
    main()
