"""Ledger and reconcile against an independent computation: all planted differences, and no other.

The ledger is made from a broker's log; it must be, row by row, what the lives say that were written
into it. DuckDB reads those and the same tables, with other words: sets and anti-joins for each kind
where ours is one wide join.
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
from tests.support.spark_session import IGNORED_WARNINGS, spark  # noqa: F401

pytestmark = [pytest.mark.filterwarnings(rule) for rule in IGNORED_WARNINGS]

LIMITS: Final = ReconcileLimits(NOW_MS, grace_ms=GRACE_MS, open_ms=OPEN_MS)
OVERFLOW: Final = "abs(cents * 0 - 1 - 9223372036854775807)"
BOOKS: Final = "SELECT transaction_id, cents AS amount, at_ms FROM transfer"

# `l` is the bank's part of the ledger; `ripe` what was decided before the grace time.
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


def view(engine: duckdb.DuckDBPyConnection, name: str, directory: Path) -> None:
    engine.execute(
        f"CREATE VIEW {name} AS SELECT * FROM "
        f"read_parquet('{directory}/day=*/*.parquet', hive_partitioning = true)"
    )


def not_as_it_was(bank: Bank, made: Path) -> list[object]:
    """Rows of a ledger that are not what happened, and the other way round; by DuckDB alone."""
    columns = ", ".join(
        f'epoch_us("{field.name}")' if pa.types.is_timestamp(field.type) else f'"{field.name}"'
        for field in LEDGER
    )
    with duckdb.connect() as engine:
        view(engine, "made", made)
        view(engine, "happened", bank.ledger)
        return [
            row
            for one, other in (("made", "happened"), ("happened", "made"))
            for row in engine.execute(
                f"SELECT '{one}', {columns} FROM {one} "
                f"EXCEPT ALL SELECT '{one}', {columns} FROM {other} LIMIT 5"
            ).fetchall()
        ]


def computed(bank: Bank) -> set[tuple[str, str]]:
    """By DuckDB alone."""
    with duckdb.connect() as engine:
        view(engine, "ledger", bank.ledger)
        tables = {
            "markers": rows_of(bank.bob, "escrowmq_marker"),
            "sent": rows_of(bank.bob, "transfer"),
            "received": rows_of(bank.smith, "transfer"),
            "inbox": pa.concat_tables(
                [rows_of(path, "escrowmq_inbox") for path in (bank.bob, bank.smith)]
            ),
        }
        for name, table in tables.items():
            engine.register(name, table)
        bounds = {"ripe": NOW_MS - GRACE_MS, "open": NOW_MS - OPEN_MS}
        return set(engine.execute(INDEPENDENT, bounds).fetchall())


def rows_of(path: Path, table: str) -> pa.Table:
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
def test_every_planted_difference_is_found_and_none_is_invented(
    spark: SparkSession,  # noqa: F811
    tmp_path: Path,
    transactions: int,
) -> None:
    bank = Bank(tmp_path, transactions=transactions, seed=7)
    prove(spark, bank, tmp_path / "made")


def prove(spark: SparkSession, bank: Bank, made: Path) -> None:  # noqa: F811
    run_ledger(spark, made, paths=[bank.data])
    assert not_as_it_was(bank, made) == []
    wanted = ReconcileRequest(
        ledger=str(made),
        databases=(f"sqlite:///{bank.bob}",),
        sql=BOOKS,
        receivers=(f"sqlite:///{bank.smith}",),
        receiver_sql=BOOKS,
        limits=LIMITS,
    )
    with run_reconcile(spark, wanted) as result:
        # PySpark has no public name for the physical plan.
        plan = result.differences._jdf.queryExecution().executedPlan().toString()
        rows = result.differences.select("kind", "transaction_id").collect()
        told = result.summary
    found = [tuple(row) for row in rows]
    expected = computed(bank)

    assert expected == bank.expected_differences
    assert len(found) == len(set(found))
    assert set(found) == expected
    assert told.differences == dict(Counter(kind for kind, _ in expected))
    assert told.repeats_taken_once > 0
    assert told.not_compared > 0
    assert told.consumers == {"smith-bank": ["transfers"]}
    # No side is so small that each task could have all of it.
    assert "SortMergeJoin" in plan
    assert "BroadcastHashJoin" not in plan


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return Bank(tmp_path_factory.mktemp("small"), transactions=60, seed=3)


def asked(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(one) for one in arguments])


@pytest.mark.timeout(600)
def test_the_command_says_what_it_found_and_ends_with_one(
    spark: SparkSession,  # noqa: F811
    small: Bank,
    tmp_path: Path,
) -> None:
    report, out = tmp_path / "made" / "report.html", tmp_path / "out"
    done = asked(
        *("--ledger", small.ledger, "--database", f"sqlite:///{small.bob}"),
        *("--receiver", f"sqlite:///{small.smith}", "--since", "all", "--json"),
        *("--report", report, "--out", out),
    )
    assert done.exit_code == 1, done.output
    told = json.loads(done.stdout)
    # Now is long past what is young in these books: everything is ripe, so more is found.
    assert told["agree"] is False
    assert told["differences"]["stranded"] == 1
    written = spark.read.parquet(str(out / "parquet"))
    lines = spark.read.option("header", "true").csv(str(out / "csv"))
    assert written.count() == lines.count() == sum(told["differences"].values())
    assert "differences between ledger and databases" in report.read_text()


@pytest.mark.timeout(600)
def test_the_command_ends_with_zero_if_nothing_differs(
    spark: SparkSession,  # noqa: F811
    tmp_path: Path,
) -> None:
    bank = Bank(tmp_path, transactions=30, seed=5, with_differences=False)
    done = asked(
        *("--ledger", bank.ledger, "--since", "all", "--amount"),
        *("--database", f"sqlite:///{bank.bob}", "--sql", BOOKS),
        *("--receiver", f"sqlite:///{bank.smith}", "--receiver-sql", BOOKS),
    )
    assert done.exit_code == 0, done.output
    assert "Ledger and databases agree." in done.output


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
            "integer overflow",  # in a task, which to Spark is a job that failed
        ),
    ],
)
def test_what_cannot_be_read_is_said(
    spark: SparkSession,  # noqa: F811
    small: Bank,
    tmp_path: Path,
    arguments: list[str],
    reason: str,
) -> None:
    empty = tmp_path / "empty.db"
    empty.touch()
    names = {"ledger": small.ledger, "bob": small.bob, "empty": empty}
    done = asked(*(one.format(**names) for one in arguments))
    assert isinstance(done.exception, ReconcileFailed)
    assert reason in str(done.exception)


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
def test_options_that_make_no_sense_are_refused(arguments: list[str], reason: str) -> None:
    done = asked("--ledger", "l", "--database", "d", *arguments)
    assert done.exit_code == 2
    assert reason in done.output
