"""Ledger and reconcile against an independent computation: exactly the planted differences.

The ledger is computed from a broker's log and must have exactly the rows of the transactions that
were written to the log. DuckDB computes the differences from the same tables in another way: with
sets and anti-joins for each kind, where ours is one wide join.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Final

import duckdb
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

from escrowmq.cli.commands.pipeline import reconcile as command
from escrowmq.errors import ReconcileFailed
from escrowmq.pipeline.ledger.job import run_ledger
from escrowmq.pipeline.reconcile.compare import ReconcileLimits
from escrowmq.pipeline.reconcile.job import ReconcileRequest, run_reconcile
from tests.support.ledgers import GRACE_MS, LEDGER, NOW_MS, OPEN_MS, TABLES, Bank
from tests.support.spark_session import COMMAND_OPTIONS, IGNORED_WARNINGS, spark  # noqa: F401

pytestmark = [pytest.mark.filterwarnings(rule) for rule in IGNORED_WARNINGS]

LIMITS: Final = ReconcileLimits(NOW_MS, grace_ms=GRACE_MS, open_ms=OPEN_MS)
OVERFLOW: Final = "abs(cents * 0 - 1 - 9223372036854775807)"
BOOKINGS: Final = "SELECT transaction_id, cents AS amount, at_ms FROM transfer"

# `l` is the bank's part of the ledger; `ripe` has the transactions decided before the grace time.
INDEPENDENT: Final = """
WITH l AS (SELECT * FROM ledger WHERE "group" = 'bank'),
ripe AS (SELECT * FROM l WHERE outcome IN ('committed', 'rolled_back')
         AND epoch_ms(decided_at) < $ripe),
per_message AS (SELECT transaction_id, outcome, unnest(message_ids) AS message_id FROM l),
places AS (SELECT transaction_id, topics, len(message_ids) AS ids,
           unnest(finals).topic AS topic FROM ripe WHERE outcome = 'committed'),
into_topic AS (SELECT transaction_id, topic, any_value(topics) AS topics, any_value(ids) AS ids,
               count(*) AS times FROM places GROUP BY 1, 2)
SELECT 'stranded' AS kind, transaction_id FROM l WHERE outcome = 'stranded'
UNION SELECT 'still_open', transaction_id FROM l
    WHERE outcome = 'open' AND epoch_ms(parked_at) < $open
UNION SELECT 'row_without_message', id FROM markers ANTI JOIN l ON id = transaction_id
    WHERE markers.outcome = 'committed' AND at_ms < $ripe
UNION SELECT 'row_without_message', id FROM markers JOIN ripe ON id = transaction_id
    WHERE markers.outcome = 'committed'
    AND (ripe.outcome = 'rolled_back' OR len(finals) < markers.messages)
UNION SELECT 'message_without_row', transaction_id FROM ripe WHERE outcome = 'committed'
    AND transaction_id NOT IN (SELECT id FROM markers WHERE outcome = 'committed')
UNION SELECT 'message_without_row', transaction_id FROM per_message
    WHERE outcome = 'rolled_back' AND message_id IN (SELECT message_id FROM inbox)
UNION SELECT 'delivered_twice', transaction_id FROM into_topic
    WHERE topic = 'receipts' AND times > ids - len(list_filter(topics, lambda t: t <> 'receipts'))
UNION SELECT 'delivered_twice', transaction_id FROM per_message JOIN
    (SELECT message_id FROM inbox GROUP BY ALL HAVING count(*) > 1) USING (message_id)
UNION SELECT 'consumed_without_effect', transaction_id FROM (
    SELECT transaction_id, least(times, ids) AS due,
        (SELECT count(DISTINCT p.message_id) FROM per_message p JOIN inbox USING (message_id)
         WHERE p.transaction_id = t.transaction_id) AS done
    FROM into_topic t WHERE topic = 'transfers') WHERE done = 0 OR done < due AND due < 2
UNION SELECT 'amount_differs', s.transaction_id FROM sent s JOIN received r USING (transaction_id)
    WHERE s.cents <> r.cents
"""


def create_view(engine: duckdb.DuckDBPyConnection, name: str, directory: Path) -> None:
    engine.execute(
        f"CREATE VIEW {name} AS SELECT * FROM "
        f"read_parquet('{directory}/day=*/*.parquet', hive_partitioning = true)"
    )


def ledger_differences(bank: Bank, ledger: Path) -> list[object]:
    """Return rows that only one of the ledger and the expected ledger has; by DuckDB alone."""
    columns = ", ".join(
        f'epoch_us("{field.name}")' if pa.types.is_timestamp(field.type) else f'"{field.name}"'
        for field in LEDGER
    )
    with duckdb.connect() as engine:
        create_view(engine, "actual", ledger)
        create_view(engine, "expected", bank.ledger)
        return [
            row
            for name, other in (("actual", "expected"), ("expected", "actual"))
            for row in engine.execute(
                f"SELECT '{name}', {columns} FROM {name} "
                f"EXCEPT ALL SELECT '{name}', {columns} FROM {other} LIMIT 5"
            ).fetchall()
        ]


def compute_differences(bank: Bank) -> set[tuple[str, str]]:
    """Return the differences as (kind, transaction id), by DuckDB alone."""
    with duckdb.connect() as engine:
        create_view(engine, "ledger", bank.ledger)
        tables = {
            "markers": read_table(bank.bob, "escrowmq_marker"),
            "sent": read_table(bank.bob, "transfer"),
            "received": read_table(bank.smith, "transfer"),
            "inbox": pa.concat_tables(
                [read_table(path, "escrowmq_inbox") for path in (bank.bob, bank.smith)]
            ),
        }
        for name, table in tables.items():
            engine.register(name, table)
        bounds = {"ripe": NOW_MS - GRACE_MS, "open": NOW_MS - OPEN_MS}
        return set(engine.execute(INDEPENDENT, bounds).fetchall())


def read_table(path: Path, table: str) -> pa.Table:
    names = [column.split()[0] for column in TABLES[table].split(", ")][:5]
    names = [name for name in names if name not in ("primary", "message_id)")]
    database = sqlite3.connect(path)
    try:
        rows = database.execute(f"SELECT * FROM {table}").fetchall()
    finally:
        database.close()
    columns = list(zip(*rows, strict=True)) or [()] * len(names)
    texts = {"id", "outcome", "producer_group", "consumer_group", "message_id", "transaction_id"}
    types = [pa.string() if name in texts else pa.int64() for name in names]
    arrays = [pa.array(column, type=kind) for column, kind in zip(columns, types, strict=True)]
    return pa.Table.from_arrays(arrays, names=names)


@pytest.mark.parametrize(
    "transactions",
    [
        pytest.param(5_000, marks=pytest.mark.timeout(900)),
        pytest.param(1_000_000, marks=(pytest.mark.nightly, pytest.mark.timeout(7200))),
    ],
)
def test_exactly_the_planted_differences_are_found(
    spark: SparkSession,  # noqa: F811
    tmp_path: Path,
    transactions: int,
) -> None:
    bank = Bank(tmp_path, transactions=transactions, seed=7)
    assert_planted_differences_are_found(spark, bank, tmp_path / "ledger-of-log")


def assert_planted_differences_are_found(
    spark: SparkSession,  # noqa: F811
    bank: Bank,
    ledger: Path,
) -> None:
    run_ledger(spark, ledger, paths=[bank.data])
    assert ledger_differences(bank, ledger) == []
    request = ReconcileRequest(
        ledger=str(ledger),
        databases=(f"sqlite:///{bank.bob}",),
        sql=BOOKINGS,
        receivers=(f"sqlite:///{bank.smith}",),
        receiver_sql=BOOKINGS,
        limits=LIMITS,
    )
    with run_reconcile(spark, request) as result:
        # PySpark has no public name for the physical plan.
        plan = result.differences._jdf.queryExecution().executedPlan().toString()
        rows = result.differences.select("kind", "transaction_id").collect()
        summary = result.summary
    differences = [tuple(row) for row in rows]
    expected = compute_differences(bank)

    assert expected == bank.expected_differences
    assert len(differences) == len(set(differences))
    assert set(differences) == expected
    assert summary.differences == dict(Counter(kind for kind, _ in expected))
    assert summary.repeats_taken_once > 0
    assert summary.not_compared > 0
    assert summary.consumers == {"smith-bank": ["transfers"]}
    # No side of a join may be broadcast: none is certain to fit into every task's memory.
    assert "SortMergeJoin" in plan
    assert "BroadcastHashJoin" not in plan


@pytest.fixture(scope="module")
def small_bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return Bank(tmp_path_factory.mktemp("small_bank"), transactions=60, seed=3)


def run_command(*arguments: object) -> Result:
    return CliRunner().invoke(command, [*COMMAND_OPTIONS, *map(str, arguments)])


@pytest.mark.timeout(600)
def test_the_command_reports_differences_and_exits_with_1(
    spark: SparkSession,  # noqa: F811
    small_bank: Bank,
    tmp_path: Path,
) -> None:
    report, out = tmp_path / "new" / "report.html", tmp_path / "out"
    result = run_command(
        *("--ledger", small_bank.ledger, "--database", f"sqlite:///{small_bank.bob}"),
        *("--receiver", f"sqlite:///{small_bank.smith}", "--since", "all", "--json"),
        *("--report", report, "--out", out),
    )
    assert result.exit_code == 1, result.output
    summary = json.loads(result.stdout)
    # The command compares at the current time, when the grace time of all transactions is over, so
    # there are more differences than planted ones.
    assert summary["agree"] is False
    assert summary["differences"]["stranded"] == 1
    parquet_rows = spark.read.parquet(str(out / "parquet"))
    csv_rows = spark.read.option("header", "true").csv(str(out / "csv"))
    assert parquet_rows.count() == csv_rows.count() == sum(summary["differences"].values())
    assert "differences between ledger and databases" in report.read_text()


@pytest.mark.timeout(600)
def test_the_command_exits_with_0_without_differences(
    spark: SparkSession,  # noqa: F811
    tmp_path: Path,
) -> None:
    bank = Bank(tmp_path, transactions=30, seed=5, with_differences=False)
    result = run_command(
        *("--ledger", bank.ledger, "--since", "all", "--amount"),
        *("--database", f"sqlite:///{bank.bob}", "--sql", BOOKINGS),
        *("--receiver", f"sqlite:///{bank.smith}", "--receiver-sql", BOOKINGS),
    )
    assert result.exit_code == 0, result.output
    assert "Ledger and databases agree." in result.output


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--ledger", "/nowhere", "--database", "sqlite:///{bob}"], "no ledger in /nowhere"),
        (["--ledger", "{ledger}", "--database", "sqlite:////no.db"], "there is no file /no.db"),
        (["--ledger", "{ledger}", "--database", "bob"], "use an address"),
        (
            ["--ledger", "{ledger}", "--database", "sqlite:///{empty}"],
            "no database has a table escrowmq_marker or escrowmq_inbox",
        ),
        (
            ["--ledger", "{ledger}", "--database", "sqlite:///{bob}", "--sql", "select 1 as one"],
            "no column transaction_id, only one",
        ),
        (
            ["--ledger", "{ledger}", "--database", "sqlite:///{bob}", "--sql", "select x from y"],
            "no such table: y",
        ),
        (
            [
                *("--ledger", "{ledger}", "--database", "sqlite:///{bob}", "--since", "all"),
                *("--sql", f"select transaction_id, {OVERFLOW} as amount from transfer"),
            ],
            "integer overflow",  # in a task, so Spark reports a failed job
        ),
    ],
)
def test_an_input_that_cannot_be_read_is_refused_with_the_reason(
    spark: SparkSession,  # noqa: F811
    small_bank: Bank,
    tmp_path: Path,
    arguments: list[str],
    reason: str,
) -> None:
    empty = tmp_path / "empty.db"
    empty.touch()
    names = {"ledger": small_bank.ledger, "bob": small_bank.bob, "empty": empty}
    result = run_command(*(argument.format(**names) for argument in arguments))
    assert isinstance(result.exception, ReconcileFailed)
    assert reason in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--amount"], "--amount needs --sql and --receiver-sql"),
        (["--only-sql"], "needs --sql"),
        (["--receiver-sql", "select"], "--receiver-sql needs --receiver"),
        (["--grace", "soon"], "is not a duration"),
        (["--consumer", "bank"], "is not GROUP=TOPIC"),
        (["--since", "2026-99-01"], "2026-99-01"),
    ],
)
def test_contradictory_or_invalid_options_are_refused(arguments: list[str], reason: str) -> None:
    result = run_command("--ledger", "l", "--database", "d", *arguments)
    assert result.exit_code == 2
    assert reason in result.output
