"""Read tables of business databases as DataFrames: over JDBC if Spark has the driver, else with
SQLAlchemy.

    open_database(url) ─ JdbcDatabase | SqlDatabase ─ range_boundaries() ─ one query per range

In both cases the executors read the rows, each a range of the key, from a cursor of the server. The
driver only queries where the ranges begin. Ranges are not read in one snapshot: a row that changes
meanwhile is younger than the grace time or older than what is compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from sqlalchemy import Connection, TextClause, create_engine, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from escrowmq.database.marker import INBOX_TABLE, MARKER_TABLE
from escrowmq.errors import ReconcileFailed
from escrowmq.pipeline.job import has_java_class, spark_error_text

T = TypeVar("T")

FETCH_ROWS: Final = 10_000  # per round trip of a cursor, and per Arrow batch
ROWS_PER_RANGE: Final = 200_000  # at least
RANGES_PER_CORE: Final = 2
MAX_RANGES: Final = 1_000
DEFAULT_CORES: Final = 32  # if Spark does not say how many it has
_DECIMAL_STEP: Final = Decimal("0.000001")

ColumnTypes = dict[str, str]  # name of a column: its type in Spark
MARKER_TYPES: Final[ColumnTypes] = {
    "id": "string",
    "outcome": "string",
    "at_ms": "bigint",
    "producer_group": "string",
    "messages": "int",
}
INBOX_TYPES: Final[ColumnTypes] = {
    "consumer_group": "string",
    "message_id": "string",
    "at_ms": "bigint",
}
_BOOK_TYPES: Final[ColumnTypes] = {
    "transaction_id": "string",
    "amount": "decimal(28,6)",
    "at_ms": "bigint",
}
_ARROW_TYPES: Final = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "decimal(28,6)": pa.decimal128(28, 6),
}
_ARROW_TYPES_OF_PYTHON: Final = {str: pa.string(), int: pa.int64()}
_POSTGRES_DRIVER: Final = "org.postgresql.Driver"
_MARIADB_DRIVER: Final = "org.mariadb.jdbc.Driver"
_JDBC_DRIVERS: Final = {
    "postgresql": (_POSTGRES_DRIVER, "jdbc:postgresql"),
    "mysql": (_MARIADB_DRIVER, "jdbc:mariadb"),
    "mariadb": (_MARIADB_DRIVER, "jdbc:mariadb"),
}


def read_markers(spark: SparkSession, url: str, since_ms: int = 0) -> DataFrame | None:
    """Return the markers of the database binding; None if the database has no such table."""
    return _read_table(open_database(spark, url), MARKER_TABLE, MARKER_TYPES, since_ms)


def read_inbox(spark: SparkSession, url: str, since_ms: int = 0) -> DataFrame | None:
    """Return the inbox of consumers; None if the database has no such table."""
    return _read_table(open_database(spark, url), INBOX_TABLE, INBOX_TYPES, since_ms)


def read_query(spark: SparkSession, url: str, query: str) -> DataFrame:
    """Return the rows of a query with a column transaction_id, and optionally amount and at_ms.

    Raises ReconcileFailed.
    """
    database = open_database(spark, url)
    query = query.strip().rstrip(";")
    columns = database.columns(query)
    if "transaction_id" not in columns:
        raise ReconcileFailed(
            "the query has no column transaction_id, only "
            f"{', '.join(columns)}: name it with AS in the query"
        )
    types = {name: kind for name, kind in _BOOK_TYPES.items() if name in columns}
    return database.read_frame(query, types, key="transaction_id")


def _read_table(
    database: Database, table: str, types: ColumnTypes, since_ms: int
) -> DataFrame | None:
    query = f"SELECT {', '.join(types)} FROM {table}"
    if not database.has_table(table):
        return None
    if since_ms:
        query += f" WHERE at_ms >= {since_ms:d}"
    return database.read_frame(query, types, key="at_ms")


def open_database(spark: SparkSession, url: str) -> Database:
    """Return a reader for an address of SQLAlchemy or JDBC. Raises ReconcileFailed."""
    if url.startswith("jdbc:"):
        return JdbcDatabase(spark, url, {})
    try:
        parsed = _with_absolute_path(make_url(url))
        parsed.get_dialect()
    except (ArgumentError, NoSuchModuleError, ImportError, ModuleNotFoundError) as error:
        raise ReconcileFailed(
            f"{_without_password(url)}: {error}; use an address of SQLAlchemy "
            "(postgresql+psycopg://user:password@host/name, sqlite:///file.db) or jdbc:…"
        ) from error
    driver, scheme = _JDBC_DRIVERS.get(parsed.get_backend_name(), ("", ""))
    if driver and not parsed.query and has_java_class(spark, driver):
        address = f"{scheme}://{parsed.host or 'localhost'}"
        address += f":{parsed.port}" if parsed.port else ""
        login = {"user": parsed.username, "password": parsed.password}
        settings = {name: str(value) for name, value in login.items() if value is not None}
        return JdbcDatabase(spark, f"{address}/{parsed.database}", {**settings, "driver": driver})
    return SqlDatabase(spark, parsed)


def _with_absolute_path(url: URL) -> URL:
    """Return the address with an absolute path, if it is one of SQLite. Raises ReconcileFailed.

    Executors may run in another directory, where SQLite would create an empty file.
    """
    if url.get_backend_name() != "sqlite":
        return url
    if not url.database or url.database == ":memory:":
        raise ReconcileFailed(
            "a SQLite database in memory cannot be read by other processes: use a file"
        )
    path = Path(url.database)
    if not path.is_file():
        raise ReconcileFailed(f"there is no file {path}")
    return url.set(database=str(path.resolve()))


def _without_password(url: str) -> str:
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return "the address of a database"


class Database(Protocol):
    """A database: short queries by the driver, and frames that the executors read.

    All methods raise ReconcileFailed.
    """

    def fetch(self, query: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query with few rows, at most MAX_RANGES, in any order.

        Over JDBC the query becomes a derived table, and MariaDB ignores ORDER BY in one.
        """

    def columns(self, query: str) -> list[str]:
        """Return the names of the columns of a query, in lower case."""

    def has_table(self, table: str) -> bool:
        """Return whether there is such a table."""

    def read_frame(self, query: str, types: ColumnTypes, *, key: str) -> DataFrame:
        """Return the rows of a query, which are read in ranges of `key`."""


def range_boundaries(spark: SparkSession, database: Database, query: str, key: str) -> list[Any]:
    """Return the keys between ranges of about the same number of rows, in the database's order.

    If the key has no index, each range scans the whole table. So there are only as many ranges as
    keep the cores busy. Rows come from a cursor, so a large range needs no memory.
    """
    row_count = int(database.fetch(f"SELECT count(*) AS n FROM ({query}) q")[0][0])
    ranges = min(MAX_RANGES, RANGES_PER_CORE * _core_count(spark))
    step = max(ROWS_PER_RANGE, -(-row_count // ranges))
    if row_count <= step:
        return []
    numbered = f"SELECT {key} AS k, row_number() OVER (ORDER BY {key}) AS n FROM ({query}) q"
    rows = database.fetch(f"SELECT n, k FROM ({numbered}) p WHERE n % {step:d} = 0")
    boundaries = [key for _, key in sorted(rows, key=itemgetter(0))]
    # The same key can occur at several steps; ranges must not be empty.
    return [key for key in dict.fromkeys(boundaries) if key is not None]


def _core_count(spark: SparkSession) -> int:
    try:
        return spark.sparkContext.defaultParallelism
    except Exception:  # Spark Connect has no context, and raises different errors
        return DEFAULT_CORES


def _range_conditions(key: str, boundaries: Sequence[Any], dialect: str) -> list[str]:
    """Return the SQL condition of each range."""
    escape_backslash = dialect in ("mysql", "mariadb")
    literals = [_literal(value, escape_backslash=escape_backslash) for value in boundaries]
    if not literals:
        return ["1 = 1"]
    first = f"{key} < {literals[0]} OR {key} IS NULL"
    inner = [f"{key} >= {low} AND {key} < {high}" for low, high in pairwise(literals)]
    return [first, *inner, f"{key} >= {literals[-1]}"]


def _literal(value: Any, *, escape_backslash: bool) -> str:
    """Return a key as SQL. MySQL and MariaDB take a backslash in a string for an escape."""
    if isinstance(value, int):
        return str(value)
    text = str(value).replace("\\", "\\\\") if escape_backslash else str(value)
    return "'" + text.replace("'", "''") + "'"


class JdbcDatabase:
    """A database that Spark reads over JDBC.

    Ranges need row_number() in the form above. Other servers are read by one task.
    """

    def __init__(self, spark: SparkSession, url: str, settings: Mapping[str, str]) -> None:
        self._spark = spark
        self._name = url.partition("?")[0]
        self._url, driver = _spark_jdbc_url(url)
        self._settings = {**driver, **settings, "fetchsize": str(FETCH_ROWS)}

    def fetch(self, query: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self._read(query).limit(MAX_RANGES).collect()]

    def columns(self, query: str) -> list[str]:
        return [name.lower() for name in self._read(query).columns]

    def has_table(self, table: str) -> bool:
        try:
            self._read(f"SELECT * FROM {table} WHERE 1 = 0")
        except ReconcileFailed:
            # Was it the table or the connection? A query without a table fails only if the
            # connection does.
            self._read(
                f"SELECT count(*) AS n FROM {_PROBE_TABLES.get(self._dialect, '(VALUES 1) v')}"
            )
            return False
        return True

    def read_frame(self, query: str, types: ColumnTypes, *, key: str) -> DataFrame:
        boundaries: list[Any] = []
        if self._dialect in _PROBE_TABLES:
            boundaries = range_boundaries(self._spark, self, query, key)
        rows = self._spark.read.jdbc(
            self._url,
            f"({query}) q",
            predicates=_range_conditions(key, boundaries, self._dialect),
            properties=self._settings,
        )
        return rows.select(*(F.col(name).cast(kind).alias(name) for name, kind in types.items()))

    @property
    def _dialect(self) -> str:
        return self._url.split(":")[1]

    def _read(self, query: str) -> DataFrame:
        try:
            return self._spark.read.jdbc(self._url, f"({query}) q", properties=self._settings)
        except (PySparkException, Py4JJavaError) as error:
            cause = spark_error_text(error)
            if "suitable driver" in cause or "ClassNotFound" in cause:
                cause += "; give Spark the driver's jar: --conf spark.jars=FILE"
            raise ReconcileFailed(f"{self._name}: {cause}") from error


def _spark_jdbc_url(url: str) -> tuple[str, Mapping[str, str]]:
    """Return the address and the settings with which Spark reads a JDBC address.

    Java does not find a driver whose jar was added after its start unless the class is named. For
    MariaDB, the scheme must be that of MySQL: Spark has no dialect for MariaDB and would quote
    columns as "id", which MariaDB takes for a string.
    """
    address, _, query = url.partition("?")
    if address.startswith("jdbc:postgresql:"):
        return url, {"driver": _POSTGRES_DRIVER}
    if not address.startswith("jdbc:mariadb:"):
        return url, {}
    address = "jdbc:mysql:" + address.removeprefix("jdbc:mariadb:")
    query = f"{query}&permitMysqlScheme" if query else "permitMysqlScheme"
    return f"{address}?{query}", {"driver": _MARIADB_DRIVER}


# A table expression that always exists, for the dialects that can be read in ranges.
_PROBE_TABLES: Final = dict.fromkeys(("postgresql", "mariadb", "mysql"), "(SELECT 1 AS one) v")


class SqlDatabase:
    """A database that is read with SQLAlchemy, in the driver and in Python tasks."""

    def __init__(self, spark: SparkSession, url: URL) -> None:
        self._spark = spark
        self._url = url

    def fetch(self, query: str) -> list[tuple[Any, ...]]:
        return self._run(lambda connection: _fetch_rows(connection, query))

    def columns(self, query: str) -> list[str]:
        def names(connection: Connection) -> list[str]:
            result = connection.execute(_sql_text(f"SELECT * FROM ({query}) q WHERE 1 = 0"))
            return [name.lower() for name in result.keys()]  # noqa: SIM118

        return self._run(names)

    def has_table(self, table: str) -> bool:
        return self._run(lambda connection: inspect(connection).has_table(table))

    def read_frame(self, query: str, types: ColumnTypes, *, key: str) -> DataFrame:
        boundaries = range_boundaries(self._spark, self, query, key)
        conditions = _range_conditions(key, boundaries, self._url.get_backend_name())
        columns = ", ".join(types)
        queries = [f"SELECT {columns} FROM ({query}) q WHERE {test}" for test in conditions]
        reader = RangeReader(self._url.render_as_string(hide_password=False), queries, types)
        schema = ", ".join(f"{name} {kind}" for name, kind in types.items())
        numbers = self._spark.range(0, len(queries), 1, len(queries))
        return numbers.mapInArrow(reader.read, schema)

    def _run(self, work: Callable[[Connection], T]) -> T:
        try:
            engine = create_engine(self._url, poolclass=NullPool)
            with engine.connect() as connection:
                return work(connection)
        except (SQLAlchemyError, ImportError) as error:
            address = self._url.render_as_string(hide_password=True)
            raise ReconcileFailed(f"{address}: {spark_error_text(error)}") from error


@dataclass(frozen=True, slots=True)
class RangeReader:
    """Runs in a task: reads the rows of its range, FETCH_ROWS at a time."""

    url: str
    queries: Sequence[str]
    types: ColumnTypes

    def read(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        engine = create_engine(self.url, poolclass=NullPool)
        for batch in batches:
            for number in batch.column(0).to_pylist():
                with engine.connect() as connection:
                    stream = connection.execution_options(yield_per=FETCH_ROWS)
                    result = stream.execute(_sql_text(self.queries[number]))
                    # The size is repeated here: without it, drivers without a server-side cursor
                    # return one row at a time.
                    for rows in result.partitions(FETCH_ROWS):
                        yield self._batch(rows)

    def _batch(self, rows: Sequence[Any]) -> pa.RecordBatch:
        columns = zip(self.types.values(), zip(*rows, strict=True), strict=True)
        arrays = [_array(kind, values) for kind, values in columns]
        return pa.RecordBatch.from_arrays(arrays, names=list(self.types))


def _array(spark_type: str, values: Sequence[Any]) -> pa.Array:
    """Return the values as an Arrow array, converted one by one only if their types differ."""
    plain = str if spark_type == "string" else int
    if set(map(type, values)) <= {plain, type(None)}:
        return pa.array(values, type=_ARROW_TYPES_OF_PYTHON[plain]).cast(_ARROW_TYPES[spark_type])
    convert = plain if spark_type in ("string", "int", "bigint") else _to_decimal
    return pa.array(
        [None if value is None else convert(value) for value in values],
        type=_ARROW_TYPES[spark_type],
    )


def _to_decimal(value: Any) -> Decimal:
    return Decimal(str(value)).quantize(_DECIMAL_STEP)


def _fetch_rows(connection: Connection, query: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in connection.execute(_sql_text(query)).fetchmany(MAX_RANGES)]


def _sql_text(query: str) -> TextClause:
    """Return the query unchanged: a colon in a user's query does not start a parameter."""
    return text(re.sub(r"(?<![:\w\\]):(?=\w)", r"\\:", query))
