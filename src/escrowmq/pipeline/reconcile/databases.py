"""Tables of a business database as frames: over JDBC if Spark has the driver, else SQLAlchemy.

Either way the executors read, each a range of the key, row by row from a cursor of the server's.
The driver asks where the ranges begin and nothing more. Ranges are read at different moments;
what changes meanwhile is younger than the grace time, or older than what is compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
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

FETCH_ROWS: Final = 10_000
ROWS_PER_RANGE: Final = 200_000
RANGES_PER_CORE: Final = 2
MAX_RANGES: Final = 1_000
DEFAULT_CORES: Final = 32
_DECIMAL_STEP: Final = Decimal("0.000001")

ColumnTypes = dict[str, str]  # column: its type in Spark
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
    """None if this database has no such table."""
    return _read_table(open_database(spark, url), MARKER_TABLE, MARKER_TYPES, since_ms)


def read_inbox(spark: SparkSession, url: str, since_ms: int = 0) -> DataFrame | None:
    """None if this database has no such table."""
    return _read_table(open_database(spark, url), INBOX_TABLE, INBOX_TYPES, since_ms)


def read_query(spark: SparkSession, url: str, query: str) -> DataFrame:
    """Of a query that has a column transaction_id, and perhaps amount and at_ms."""
    database = open_database(spark, url)
    query = query.strip().rstrip(";")
    columns = database.columns(query)
    if "transaction_id" not in columns:
        raise ReconcileFailed(
            "the query has no column transaction_id, only "
            f"{', '.join(columns)}: name it with AS in --sql"
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
    if url.startswith("jdbc:"):
        return JdbcDatabase(spark, url, {})
    try:
        parsed = _with_absolute_path(make_url(url))
        parsed.get_dialect()
    except (ArgumentError, NoSuchModuleError, ImportError, ModuleNotFoundError) as error:
        raise ReconcileFailed(
            f"{_without_password(url)}: {error}; give an address as SQLAlchemy has it "
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
    """Executors may run elsewhere in the file system. Of SQLite a file that is not there would be
    made, and be empty."""
    if url.get_backend_name() != "sqlite":
        return url
    if not url.database or url.database == ":memory:":
        raise ReconcileFailed("a SQLite database in memory is nobody else's: give its file")
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
    """What is asked on the driver, and a frame that the executors read."""

    def fetch(self, query: str) -> list[tuple[Any, ...]]:
        """A few rows. Raises CannotReconcile."""

    def columns(self, query: str) -> list[str]: ...

    def has_table(self, table: str) -> bool: ...

    def read_frame(self, query: str, types: ColumnTypes, *, key: str) -> DataFrame: ...


def range_boundaries(spark: SparkSession, database: Database, query: str, key: str) -> list[Any]:
    """Keys between ranges of about the same number of rows, in the database's own order.

    A key without an index costs a look at the whole table for every range, so there are not more
    of them than keep the cores busy: rows come from a cursor, and their number does not matter.
    """
    rows = int(database.fetch(f"SELECT count(*) AS n FROM ({query}) q")[0][0])
    ranges = min(MAX_RANGES, RANGES_PER_CORE * _core_count(spark))
    step = max(ROWS_PER_RANGE, -(-rows // ranges))
    if rows <= step:
        return []
    numbered = f"SELECT {key} AS k, row_number() OVER (ORDER BY {key}) AS n FROM ({query}) q"
    found = database.fetch(f"SELECT k FROM ({numbered}) p WHERE n % {step:d} = 0 ORDER BY n")
    return [key for key in dict.fromkeys(row[0] for row in found) if key is not None]


def _core_count(spark: SparkSession) -> int:
    try:
        return spark.sparkContext.defaultParallelism
    except Exception:  # Spark Connect has no context, and says so in several ways
        return DEFAULT_CORES


def _range_conditions(key: str, boundaries: Sequence[Any], dialect: str) -> list[str]:
    """A condition for each range."""

    def shown(one: Any) -> str:
        return _literal(one, escape_backslash=dialect in ("mysql", "mariadb"))

    if not boundaries:
        return ["1 = 1"]
    first = f"{key} < {shown(boundaries[0])} OR {key} IS NULL"
    inner = [
        f"{key} >= {shown(low)} AND {key} < {shown(high)}" for low, high in pairwise(boundaries)
    ]
    return [first, *inner, f"{key} >= {shown(boundaries[-1])}"]


def _literal(key: Any, *, escape_backslash: bool) -> str:
    """`escapes`: a backslash in it would not be one."""
    if isinstance(key, int):
        return str(key)
    text = str(key).replace("\\", "\\\\") if escape_backslash else str(key)
    return "'" + text.replace("'", "''") + "'"


class JdbcDatabase:
    """Only of servers that number rows as we ask is the key cut; others are read by one task."""

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
            self._read(
                f"SELECT count(*) AS n FROM {_PROBE_TABLES.get(self._dialect, '(VALUES 1) v')}"
            )
            return False  # it answers, so it is the table that is not there
        return True

    def read_frame(self, query: str, types: ColumnTypes, *, key: str) -> DataFrame:
        cut = (
            range_boundaries(self._spark, self, query, key)
            if self._dialect in _PROBE_TABLES
            else []
        )
        read = self._spark.read.jdbc(
            self._url,
            f"({query}) q",
            predicates=_range_conditions(key, cut, self._dialect),
            properties=self._settings,
        )
        return read.select(*(F.col(name).cast(kind).alias(name) for name, kind in types.items()))

    @property
    def _dialect(self) -> str:
        return self._url.split(":")[1]

    def _read(self, query: str) -> DataFrame:
        try:
            return self._spark.read.jdbc(self._url, f"({query}) q", properties=self._settings)
        except (PySparkException, Py4JJavaError) as error:
            said = spark_error_text(error)
            if "suitable driver" in said or "ClassNotFound" in said:
                said += "; give Spark the driver's jar: --conf spark.jars=FILE"
            raise ReconcileFailed(f"{self._name}: {said}") from error


def _spark_jdbc_url(url: str) -> tuple[str, Mapping[str, str]]:
    """Java finds a driver whose jar came later only if it is named. And Spark knows MariaDB by the
    name of MySQL alone: by its own it would be asked for "id", which it takes for a text and no
    column."""
    address, _, query = url.partition("?")
    if address.startswith("jdbc:postgresql:"):
        return url, {"driver": _POSTGRES_DRIVER}
    if not address.startswith("jdbc:mariadb:"):
        return url, {}
    address = "jdbc:mysql:" + address.removeprefix("jdbc:mariadb:")
    query = f"{query}&permitMysqlScheme" if query else "permitMysqlScheme"
    return f"{address}?{query}", {"driver": _MARIADB_DRIVER}


_PROBE_TABLES: Final = dict.fromkeys(("postgresql", "mariadb", "mysql"), "(SELECT 1 AS one) v")


class SqlDatabase:
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
        cut = range_boundaries(self._spark, self, query, key)
        bounds = _range_conditions(key, cut, self._url.get_backend_name())
        parts = [f"SELECT {', '.join(types)} FROM ({query}) q WHERE {bound}" for bound in bounds]
        reader = RangeReader(self._url.render_as_string(hide_password=False), parts, types)
        schema = ", ".join(f"{name} {kind}" for name, kind in types.items())
        numbers = self._spark.range(0, len(parts), 1, len(parts))
        return numbers.mapInArrow(reader.read, schema)

    def _run(self, work: Callable[[Connection], T]) -> T:
        try:
            engine = create_engine(self._url, poolclass=NullPool)
            with engine.connect() as connection:
                return work(connection)
        except (SQLAlchemyError, ImportError) as error:
            where = self._url.render_as_string(hide_password=True)
            raise ReconcileFailed(f"{where}: {spark_error_text(error)}") from error


@dataclass(frozen=True, slots=True)
class RangeReader:
    """In a task: the rows of one range, some thousands at a time."""

    url: str
    queries: Sequence[str]
    types: ColumnTypes

    def read(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        engine = create_engine(self.url, poolclass=NullPool)
        for batch in batches:
            for number in batch.column(0).to_pylist():
                with engine.connect() as connection:
                    stream = connection.execution_options(yield_per=FETCH_ROWS)
                    found = stream.execute(_sql_text(self.queries[number]))
                    # Said once more: by itself it is a row at a time where there is no cursor.
                    for rows in found.partitions(FETCH_ROWS):
                        yield self._batch(rows)

    def _batch(self, rows: Sequence[Any]) -> pa.RecordBatch:
        columns = zip(self.types.values(), zip(*rows, strict=True), strict=True)
        arrays = [_array(kind, values) for kind, values in columns]
        return pa.RecordBatch.from_arrays(arrays, names=list(self.types))


def _array(spark_type: str, values: Sequence[Any]) -> pa.Array:
    plain = str if spark_type == "string" else int
    if set(map(type, values)) <= {plain, type(None)}:
        return pa.array(values, type=_ARROW_TYPES_OF_PYTHON[plain]).cast(_ARROW_TYPES[spark_type])
    as_kind = plain if spark_type in ("string", "int", "bigint") else _to_decimal
    return pa.array(
        [None if one is None else as_kind(one) for one in values], type=_ARROW_TYPES[spark_type]
    )


def _to_decimal(value: Any) -> Decimal:
    return Decimal(str(value)).quantize(_DECIMAL_STEP)


def _fetch_rows(connection: Connection, query: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in connection.execute(_sql_text(query)).fetchmany(MAX_RANGES)]


def _sql_text(query: str) -> TextClause:
    """As it is: a colon in a query of the user's is no parameter."""
    return text(re.sub(r"(?<![:\w\\]):(?=\w)", r"\\:", query))
