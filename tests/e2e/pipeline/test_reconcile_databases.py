"""Database tables as data frames: read in ranges without gaps or overlaps, and over JDBC."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from sqlalchemy import create_engine, insert
from sqlalchemy.engine import make_url

from escrowmq.errors import ReconcileFailed
from escrowmq.pipeline.reconcile import databases
from escrowmq.sql.statements import create_tables, marker_table
from tests.support.databases import Postgres
from tests.support.spark_session import IGNORED_WARNINGS, spark  # noqa: F401

pytestmark = [
    *(pytest.mark.filterwarnings(rule) for rule in IGNORED_WARNINGS),
    pytest.mark.timeout(600),
]

DERBY = "jdbc:derby:memory:reconcile;create=true"


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read tables in ranges of seven rows."""
    monkeypatch.setattr(databases, "ROWS_PER_RANGE", 7)
    monkeypatch.setattr(databases, "RANGES_PER_CORE", 10)


def marker_rows(count: int) -> list[dict[str, Any]]:
    """Return marker rows, three of them for each time, so that a range cannot end anywhere."""
    return [
        {
            "id": f"escrow-{number}",
            "outcome": "committed",
            "at_ms": 1_790_000_000_000 + number // 3,
            "producer_group": "ba'nk",
            "messages": 1,
        }
        for number in range(count)
    ]


def test_ranges_contain_every_row_once(
    spark: SparkSession,  # noqa: F811
    tmp_path: Path,
    small_ranges: None,
) -> None:
    path = tmp_path / "bank.db"
    with sqlite3.connect(path) as bank:
        bank.execute("CREATE TABLE line (transaction_id, cents)")
        ids = [None, None, *(f"it's {number % 40}:a" for number in range(98))]
        bank.executemany("INSERT INTO line VALUES (?, ?)", [(id_, 0.1) for id_ in ids])
    bank.close()
    query = "SELECT transaction_id, cents AS Amount FROM line WHERE 'a:b' <> '100%';"
    frame = databases.read_query(spark, f"sqlite:///{path}", query)
    assert frame.rdd.getNumPartitions() > 5
    rows = [tuple(row) for row in frame.collect()]
    assert sorted(str(transaction_id) for transaction_id, _ in rows) == sorted(map(str, ids))
    assert {amount for _, amount in rows} == {Decimal("0.1")}


class UnorderedDatabase(databases.SqlDatabase):
    """A database that returns rows in another order than its query asks for.

    Over JDBC, Spark makes every query a derived table, which loses the order of its rows.
    """

    def fetch(self, query: str) -> list[tuple[Any, ...]]:
        return super().fetch(query)[::-1]


def test_ranges_are_ascending_for_any_order_of_the_rows(
    spark: SparkSession,  # noqa: F811
    tmp_path: Path,
    small_ranges: None,
) -> None:
    path = tmp_path / "bank.db"
    with sqlite3.connect(path) as bank:
        bank.execute("CREATE TABLE line (transaction_id, cents)")
        bank.executemany("INSERT INTO line VALUES (?, ?)", [(f"t{n:02d}", n) for n in range(50)])
    bank.close()
    database = UnorderedDatabase(spark, make_url(f"sqlite:///{path}"))
    boundaries = databases.range_boundaries(spark, database, "SELECT cents FROM line", "cents")
    assert boundaries == [6, 13, 20, 27, 34, 41, 48]


def test_a_database_without_a_marker_table_has_no_markers(
    spark: SparkSession,  # noqa: F811
    tmp_path: Path,
) -> None:
    path = tmp_path / "bank.db"
    sqlite3.connect(path).close()
    path.touch()
    assert databases.read_markers(spark, f"sqlite:///{path}") is None
    with pytest.raises(ReconcileFailed, match="in memory"):
        databases.read_markers(spark, "sqlite://")


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    if Postgres.unavailable_reason():
        pytest.skip(Postgres.unavailable_reason())
    with Postgres() as server:
        yield server.new_database()


def test_postgresql_is_read_by_ranges_of_time(
    spark: SparkSession,  # noqa: F811
    postgres: str,
    small_ranges: None,
) -> None:
    engine = create_engine(postgres)
    with engine.connect() as connection:
        create_tables(connection)
        with connection.begin():
            connection.execute(insert(marker_table), marker_rows(50))
    engine.dispose()
    since_ms = 1_790_000_000_002
    frame = databases.read_markers(spark, postgres, since_ms)
    assert frame is not None
    assert frame.rdd.getNumPartitions() > 4
    expected = sorted(tuple(row.values()) for row in marker_rows(50) if row["at_ms"] >= since_ms)
    assert sorted(tuple(row) for row in frame.collect()) == expected
    with pytest.raises(ReconcileFailed, match="nowhere"):
        databases.read_query(spark, postgres, "SELECT transaction_id FROM nowhere")


def execute_in_derby(
    session: SparkSession, url: str, statements: Sequence[str], directory: Path
) -> None:
    """Run statements in a database inside Spark's JVM, whose driver comes with Spark."""
    jvm: Any = session.sparkContext._jvm  # PySpark has no public name for its JVM
    jvm.java.lang.System.setProperty("derby.stream.error.file", str(directory / "derby.log"))
    connection = jvm.java.sql.DriverManager.getConnection(url)
    for statement in statements:
        connection.createStatement().execute(statement)
    connection.close()


def test_a_database_whose_driver_spark_has_is_read_over_jdbc(
    spark: SparkSession,  # noqa: F811
    tmp_path: Path,
) -> None:
    columns = "id varchar(64), outcome varchar(16), at_ms bigint, producer_group varchar(9)"
    statements = [
        f"CREATE TABLE escrowmq_marker ({columns}, messages integer)",
        "INSERT INTO escrowmq_marker VALUES ('escrow-1', 'committed', 5, 'bank', 2)",
    ]
    execute_in_derby(spark, DERBY, statements, tmp_path)
    frame = databases.read_markers(spark, DERBY)
    assert frame is not None
    assert frame.columns == list(databases.MARKER_TYPES)
    assert [tuple(row) for row in frame.collect()] == [("escrow-1", "committed", 5, "bank", 2)]
    assert databases.read_inbox(spark, DERBY) is None
    query = "SELECT id AS transaction_id, messages * 1.5 AS amount FROM escrowmq_marker"
    bookings = databases.read_query(spark, DERBY, query)
    assert [tuple(row) for row in bookings.collect()] == [("escrow-1", Decimal(3))]
    with pytest.raises(ReconcileFailed, match="jdbc:derby"):
        databases.read_markers(spark, "jdbc:derby:memory:nothing-there")
    with pytest.raises(ReconcileFailed, match=r"jdbc:mariadb://nowhere/bank: .* spark\.jars=FILE"):
        databases.read_markers(spark, "jdbc:mariadb://nowhere/bank?password=secret")


def test_a_query_over_jdbc_returns_a_limited_number_of_rows(
    spark: SparkSession,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = "jdbc:derby:memory:queries;create=true"
    values = ", ".join(f"('escrow-{number}', {number})" for number in range(9))
    statements = [
        "CREATE TABLE line (transaction_id varchar(64), cents bigint)",
        f"INSERT INTO line VALUES {values}",
    ]
    execute_in_derby(spark, url, statements, tmp_path)
    database = databases.JdbcDatabase(spark, url, {})
    rows = database.fetch("SELECT transaction_id, cents FROM line WHERE cents > 6")
    assert sorted(rows) == [("escrow-7", 7), ("escrow-8", 8)]
    assert database.fetch("SELECT cents FROM line WHERE cents > 9") == []
    # A few rows are one range, which has no boundaries.
    assert databases.range_boundaries(spark, database, "SELECT cents FROM line", "cents") == []
    monkeypatch.setattr(databases, "MAX_RANGES", 4)
    assert len(database.fetch("SELECT cents FROM line")) == 4
