"""`--since`: earlier transactions are not compared; one on both sides of the time is complete."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from escrowmq.cli.commands.pipeline import reconcile as command
from escrowmq.clock import SystemClock
from escrowmq.parsing import format_timestamp
from escrowmq.pipeline.reconcile.compare import DAY_MS, ReconcileLimits
from escrowmq.pipeline.reconcile.job import ReconcileRequest, ReconcileSummary, run_reconcile
from tests.support.ledgers import TABLES, ledger_row, write_ledger
from tests.support.spark_session import COMMAND_OPTIONS, IGNORED_WARNINGS, spark  # noqa: F401

pytestmark = [
    *(pytest.mark.filterwarnings(rule) for rule in IGNORED_WARNINGS),
    pytest.mark.timeout(600),
]

HOUR_MS: Final = 3_600_000
SINCE_MS: Final = 20_000 * DAY_MS  # midnight, where the ledger begins another day
NOW_MS: Final = SINCE_MS + 5 * DAY_MS
BOOKINGS: Final = "SELECT transaction_id, cents AS amount, at_ms FROM transfer"
# Times before and in the window, by name.
OUTSIDE: Final = {
    "long before": SINCE_MS - 3 * DAY_MS,
    "hours before": SINCE_MS - 7 * HOUR_MS,
    "just before": SINCE_MS - 1,
}
INSIDE: Final = {"at its start": SINCE_MS, "later": SINCE_MS + DAY_MS}


@dataclass(frozen=True)
class Books:
    """A ledger and a database, to be filled by a test."""

    directory: Path

    @property
    def ledger(self) -> Path:
        return self.directory / "ledger"

    @property
    def database(self) -> str:
        return f"sqlite:///{self.directory / 'bank.db'}"

    def insert(self, table: str, rows: Sequence[tuple[object, ...]]) -> None:
        """Add rows to a table, which is created if it does not exist."""
        placeholders = ", ".join("?" * len(rows[0]))
        with closing(sqlite3.connect(self.directory / "bank.db")) as bank, bank:
            bank.execute(f"CREATE TABLE IF NOT EXISTS {table} ({TABLES[table]})")
            bank.executemany(f"INSERT INTO {table} VALUES ({placeholders})", rows)

    def compare(
        self, session: SparkSession, **changes: Any
    ) -> tuple[set[tuple[str, str]], ReconcileSummary]:
        """Return the differences since SINCE_MS as (kind, transaction id), and the summary."""
        limits = ReconcileLimits(NOW_MS, since_ms=SINCE_MS)
        comparison = ReconcileRequest(str(self.ledger), (self.database,), limits, **changes)
        with run_reconcile(session, comparison) as result:
            rows = result.differences.select("kind", "transaction_id").collect()
            return {(row[0], row[1]) for row in rows}, result.summary


@pytest.fixture
def books(tmp_path: Path) -> Books:
    return Books(tmp_path)


def marker(transaction_id: str, at_ms: int) -> tuple[object, ...]:
    return transaction_id, "committed", at_ms, "bank", 1


def test_differences_from_before_the_window_are_not_reported(
    spark: SparkSession,  # noqa: F811
    books: Books,
) -> None:
    moments = OUTSIDE | INSIDE
    books.insert(
        "escrowmq_marker",
        [marker(f"row {name}", at_ms) for name, at_ms in moments.items()],
    )
    messages = [ledger_row(f"message {name}", at_ms) for name, at_ms in moments.items()]
    stranded = [
        ledger_row(f"stranded {name}", at_ms, outcome="stranded", decided_at=None, finals=[])
        for name, at_ms in moments.items()
    ]
    write_ledger(books.ledger, messages + stranded)
    differences, summary = books.compare(spark)
    assert differences == {
        *(("row_without_message", f"row {name}") for name in INSIDE),
        *(("message_without_row", f"message {name}") for name in INSIDE),
        *(("stranded", f"stranded {name}") for name in INSIDE),
    }
    assert summary.since_ms == SINCE_MS
    assert summary.transactions == 2 * len(INSIDE)
    assert summary.outcomes == {"committed": 2, "rolled_back": 0, "stranded": 2, "open": 0}
    assert summary.first_ms == SINCE_MS


def test_a_transaction_on_both_sides_of_the_start_of_the_window_has_no_difference(
    spark: SparkSession,  # noqa: F811
    books: Books,
) -> None:
    before_ms, after_ms = SINCE_MS - 5, SINCE_MS + 5
    # The clocks of a database, a broker and a consumer differ, so each can be the first.
    books.insert(
        "escrowmq_marker", [marker("marker first", before_ms), marker("ledger first", after_ms)]
    )
    books.insert("escrowmq_inbox", [("smith", "message of marker first", before_ms)])
    write_ledger(
        books.ledger, [ledger_row("marker first", after_ms), ledger_row("ledger first", before_ms)]
    )
    differences, summary = books.compare(spark, consumers={"smith": ["transfers"]})
    assert differences == set()
    assert summary.transactions == 1


def test_bookings_from_before_the_window_are_not_reported(
    spark: SparkSession,  # noqa: F811
    books: Books,
) -> None:
    moments = OUTSIDE | INSIDE
    books.insert("transfer", [(f"row {name}", 100, at_ms) for name, at_ms in moments.items()])
    write_ledger(books.ledger, [ledger_row(f"message {n}", at_ms) for n, at_ms in moments.items()])
    differences, _ = books.compare(spark, sql=BOOKINGS)
    assert differences == {
        *(("row_without_message", f"row {name}") for name in INSIDE),
        *(("message_without_row", f"message {name}") for name in INSIDE),
    }


def test_bookings_without_a_time_have_the_time_of_their_transaction(
    spark: SparkSession,  # noqa: F811
    books: Books,
) -> None:
    moments = OUTSIDE | INSIDE
    books.insert("transfer", [(name, 100, at_ms) for name, at_ms in moments.items()])
    write_ledger(books.ledger, [ledger_row(name, at_ms) for name, at_ms in moments.items()])
    differences, summary = books.compare(spark, sql="SELECT transaction_id FROM transfer")
    assert differences == set()
    assert summary.transactions == len(INSIDE)


@pytest.mark.parametrize("columns", ["at_ms, transaction_id", "transaction_id"])
def test_sums_include_the_transactions_in_the_window(
    spark: SparkSession,  # noqa: F811
    books: Books,
    columns: str,
) -> None:
    moments = OUTSIDE | INSIDE
    books.insert("transfer", [(name, 100, at_ms) for name, at_ms in moments.items()])
    # This transfer is booked before the window. Its transaction is in the window and is compared,
    # so its amount counts.
    books.insert("transfer", [("on both sides", 7, SINCE_MS - 5)])
    rows = [ledger_row(name, at_ms) for name, at_ms in moments.items()]
    write_ledger(books.ledger, [*rows, ledger_row("on both sides", SINCE_MS + 5)])
    differences, summary = books.compare(
        spark, sql=f"SELECT {columns}, cents AS amount FROM transfer"
    )
    assert differences == set()
    assert summary.sums == {"sent": "207.000000"}


def as_a_time(now_ms: int) -> str:
    return format_timestamp(now_ms - 2 * DAY_MS)


def as_a_duration(_: int) -> str:
    return "2d"


@pytest.mark.parametrize("since", [as_a_time, as_a_duration])
def test_the_command_compares_since_a_time_or_for_a_duration(
    spark: SparkSession,  # noqa: F811
    books: Books,
    since: Callable[[int], str],
) -> None:
    now_ms = SystemClock().now_ms()
    ages_ms = {"old": 2 * DAY_MS + HOUR_MS, "young": 2 * DAY_MS - HOUR_MS}
    books.insert(
        "escrowmq_marker",
        [marker(f"row {name}", now_ms - age_ms) for name, age_ms in ages_ms.items()],
    )
    rows = [ledger_row(f"message {n}", now_ms - age_ms) for n, age_ms in ages_ms.items()]
    write_ledger(books.ledger, rows)
    arguments = ["--ledger", str(books.ledger), "--database", books.database, "--json"]
    result = CliRunner().invoke(command, [*COMMAND_OPTIONS, *arguments, "--since", since(now_ms)])
    assert result.exit_code == 1, result.output
    summary = json.loads(result.stdout)
    assert summary["transactions"] == 1
    assert {kind: count for kind, count in summary["differences"].items() if count} == {
        "row_without_message": 1,
        "message_without_row": 1,
    }
