"""Rows that a task reads from a database: their batches, and conversion to the column types."""

import sqlite3
from decimal import Decimal
from pathlib import Path

import pyarrow as pa

from escrowmq.pipeline.reconcile.databases import FETCH_ROWS, RangeReader

TYPES = {"name": "string", "n": "bigint", "amount": "decimal(28,6)"}


def read(path: Path, query: str) -> list[pa.RecordBatch]:
    reader = RangeReader(f"sqlite:///{path}", [query], TYPES)
    numbers = pa.RecordBatch.from_arrays([pa.array([0])], names=["id"])
    return list(reader.read(iter([numbers])))


def test_rows_are_read_in_batches(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "a.db") as database:
        database.execute("CREATE TABLE t (n INTEGER)")
        rows = range(2 * FETCH_ROWS + 5)
        database.executemany("INSERT INTO t VALUES (?)", [(n,) for n in rows])
    batches = read(tmp_path / "a.db", "SELECT 'x' AS name, n, 1 AS amount FROM t ORDER BY n")
    assert [batch.num_rows for batch in batches] == [FETCH_ROWS, FETCH_ROWS, 5]
    assert [n for batch in batches for n in batch.column("n").to_pylist()] == list(rows)


def test_values_of_another_type_are_converted_to_that_of_the_column(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "a.db").close()
    rows = "('a', 1, '2.5'), (7, '8', 9), (NULL, NULL, NULL)"
    query = f"SELECT column1 AS name, column2 AS n, column3 AS amount FROM (VALUES {rows})"
    (batch,) = read(tmp_path / "a.db", query)
    assert batch.column("name").to_pylist() == ["a", "7", None]
    assert batch.column("n").to_pylist() == [1, 8, None]
    assert batch.column("amount").to_pylist() == [Decimal("2.50"), Decimal("9.00"), None]
