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

from escrowmq.database.marker import INBOX, MARKERS
from escrowmq.errors import CannotReconcile
from escrowmq.pipeline.job import has_class, reason_of

T = TypeVar("T")

ROWS_AT_ONCE: Final = 10_000
ROWS_PER_RANGE: Final = 200_000
RANGES_PER_CORE: Final = 2
RANGES_MAX: Final = 1_000
CORES_UNKNOWN: Final = 32
_CENT: Final = Decimal("0.000001")

Types = dict[str, str]  # column: its type in Spark
MARKER_TYPES: Final[Types] = {
    "id": "string",
    "outcome": "string",
    "at_ms": "bigint",
    "producer_group": "string",
    "messages": "int",
}
INBOX_TYPES: Final[Types] = {
    "consumer_group": "string",
    "message_id": "string",
    "at_ms": "bigint",
}
_BOOK_TYPES: Final[Types] = {
    "transaction_id": "string",
    "amount": "decimal(28,6)",
    "at_ms": "bigint",
}
_ARROW: Final = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "decimal(28,6)": pa.decimal128(28, 6),
}
_PLAIN: Final = {str: pa.string(), int: pa.int64()}
_POSTGRES: Final = "org.postgresql.Driver"
_MARIA: Final = "org.mariadb.jdbc.Driver"
_DRIVERS: Final = {
    "postgresql": (_POSTGRES, "jdbc:postgresql"),
    "mysql": (_MARIA, "jdbc:mariadb"),
    "mariadb": (_MARIA, "jdbc:mariadb"),
}


def marker_rows(spark: SparkSession, url: str, since_ms: int = 0) -> DataFrame | None:
    """None if this database has no such table."""
    return _table(open_database(spark, url), MARKERS, MARKER_TYPES, since_ms)


def inbox_rows(spark: SparkSession, url: str, since_ms: int = 0) -> DataFrame | None:
    """None if this database has no such table."""
    return _table(open_database(spark, url), INBOX, INBOX_TYPES, since_ms)


def query_rows(spark: SparkSession, url: str, query: str) -> DataFrame:
    """Of a query that has a column transaction_id, and perhaps amount and at_ms."""
    database = open_database(spark, url)
    query = query.strip().rstrip(";")
    columns = database.columns(query)
    if "transaction_id" not in columns:
        raise CannotReconcile(
            "the query has no column transaction_id, only "
            f"{', '.join(columns)}: name it with AS in --sql"
        )
    types = {name: kind for name, kind in _BOOK_TYPES.items() if name in columns}
    return database.frame(query, types, key="transaction_id")


def _table(database: Database, table: str, types: Types, since_ms: int) -> DataFrame | None:
    query = f"SELECT {', '.join(types)} FROM {table}"
    if not database.has(table):
        return None
    if since_ms:
        query += f" WHERE at_ms >= {since_ms:d}"
    return database.frame(query, types, key="at_ms")


def open_database(spark: SparkSession, url: str) -> Database:
    if url.startswith("jdbc:"):
        return JdbcDatabase(spark, url, {})
    try:
        parsed = _absolute(make_url(url))
        parsed.get_dialect()
    except (ArgumentError, NoSuchModuleError, ImportError, ModuleNotFoundError) as error:
        raise CannotReconcile(
            f"{_hidden(url)}: {error}; give an address as SQLAlchemy has it "
            "(postgresql+psycopg://user:password@host/name, sqlite:///file.db) or jdbc:…"
        ) from error
    driver, scheme = _DRIVERS.get(parsed.get_backend_name(), ("", ""))
    if driver and not parsed.query and has_class(spark, driver):
        address = f"{scheme}://{parsed.host or 'localhost'}"
        address += f":{parsed.port}" if parsed.port else ""
        login = {"user": parsed.username, "password": parsed.password}
        settings = {name: str(value) for name, value in login.items() if value is not None}
        return JdbcDatabase(spark, f"{address}/{parsed.database}", {**settings, "driver": driver})
    return SqlDatabase(spark, parsed)


def _absolute(url: URL) -> URL:
    """Executors may run elsewhere in the file system. Of SQLite a file that is not there would be
    made, and be empty."""
    if url.get_backend_name() != "sqlite":
        return url
    if not url.database or url.database == ":memory:":
        raise CannotReconcile("a SQLite database in memory is nobody else's: give its file")
    path = Path(url.database)
    if not path.is_file():
        raise CannotReconcile(f"there is no file {path}")
    return url.set(database=str(path.resolve()))


def _hidden(url: str) -> str:
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return "the address of a database"


class Database(Protocol):
    """What is asked on the driver, and a frame that the executors read."""

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        """A few rows. Raises CannotReconcile."""

    def columns(self, query: str) -> list[str]: ...

    def has(self, table: str) -> bool: ...

    def frame(self, query: str, types: Types, *, key: str) -> DataFrame: ...


def cuts(spark: SparkSession, database: Database, query: str, key: str) -> list[Any]:
    """Keys between ranges of about the same number of rows, in the database's own order.

    A key without an index costs a look at the whole table for every range, so there are not more
    of them than keep the cores busy: rows come from a cursor, and their number does not matter.
    """
    rows = int(database.ask(f"SELECT count(*) AS n FROM ({query}) q")[0][0])
    ranges = min(RANGES_MAX, RANGES_PER_CORE * _cores(spark))
    step = max(ROWS_PER_RANGE, -(-rows // ranges))
    if rows <= step:
        return []
    numbered = f"SELECT {key} AS k, row_number() OVER (ORDER BY {key}) AS n FROM ({query}) q"
    found = database.ask(f"SELECT k FROM ({numbered}) p WHERE n % {step:d} = 0 ORDER BY n")
    return [key for key in dict.fromkeys(row[0] for row in found) if key is not None]


def _cores(spark: SparkSession) -> int:
    try:
        return spark.sparkContext.defaultParallelism
    except Exception:  # Spark Connect has no context, and says so in several ways
        return CORES_UNKNOWN


def _ranges(key: str, cut: Sequence[Any], kind: str) -> list[str]:
    """A condition for each range."""

    def shown(one: Any) -> str:
        return _literal(one, escapes=kind in ("mysql", "mariadb"))

    if not cut:
        return ["1 = 1"]
    first = f"{key} < {shown(cut[0])} OR {key} IS NULL"
    inner = [f"{key} >= {shown(low)} AND {key} < {shown(high)}" for low, high in pairwise(cut)]
    return [first, *inner, f"{key} >= {shown(cut[-1])}"]


def _literal(key: Any, *, escapes: bool) -> str:
    """`escapes`: a backslash in it would not be one."""
    if isinstance(key, int):
        return str(key)
    text = str(key).replace("\\", "\\\\") if escapes else str(key)
    return "'" + text.replace("'", "''") + "'"


class JdbcDatabase:
    """Only of servers that number rows as we ask is the key cut; others are read by one task."""

    def __init__(self, spark: SparkSession, url: str, settings: Mapping[str, str]) -> None:
        self._spark = spark
        self._name = url.partition("?")[0]
        self._url, driver = _known_to_spark(url)
        self._settings = {**driver, **settings, "fetchsize": str(ROWS_AT_ONCE)}

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self._read(query).limit(RANGES_MAX).collect()]

    def columns(self, query: str) -> list[str]:
        return [name.lower() for name in self._read(query).columns]

    def has(self, table: str) -> bool:
        try:
            self._read(f"SELECT * FROM {table} WHERE 1 = 0")
        except CannotReconcile:
            self._read(f"SELECT count(*) AS n FROM {_ANY_TABLE.get(self._kind, '(VALUES 1) v')}")
            return False  # it answers, so it is the table that is not there
        return True

    def frame(self, query: str, types: Types, *, key: str) -> DataFrame:
        cut = cuts(self._spark, self, query, key) if self._kind in _ANY_TABLE else []
        read = self._spark.read.jdbc(
            self._url,
            f"({query}) q",
            predicates=_ranges(key, cut, self._kind),
            properties=self._settings,
        )
        return read.select(*(F.col(name).cast(kind).alias(name) for name, kind in types.items()))

    @property
    def _kind(self) -> str:
        return self._url.split(":")[1]

    def _read(self, query: str) -> DataFrame:
        try:
            return self._spark.read.jdbc(self._url, f"({query}) q", properties=self._settings)
        except (PySparkException, Py4JJavaError) as error:
            said = reason_of(error)
            if "suitable driver" in said or "ClassNotFound" in said:
                said += "; give Spark the driver's jar: --conf spark.jars=FILE"
            raise CannotReconcile(f"{self._name}: {said}") from error


def _known_to_spark(url: str) -> tuple[str, Mapping[str, str]]:
    """Java finds a driver whose jar came later only if it is named. And Spark knows MariaDB by the
    name of MySQL alone: by its own it would be asked for "id", which it takes for a text and no
    column."""
    address, _, query = url.partition("?")
    if address.startswith("jdbc:postgresql:"):
        return url, {"driver": _POSTGRES}
    if not address.startswith("jdbc:mariadb:"):
        return url, {}
    address = "jdbc:mysql:" + address.removeprefix("jdbc:mariadb:")
    query = f"{query}&permitMysqlScheme" if query else "permitMysqlScheme"
    return f"{address}?{query}", {"driver": _MARIA}


_ANY_TABLE: Final = dict.fromkeys(("postgresql", "mariadb", "mysql"), "(SELECT 1 AS one) v")


class SqlDatabase:
    def __init__(self, spark: SparkSession, url: URL) -> None:
        self._spark = spark
        self._url = url

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        return self._with(lambda connection: _told(connection, query))

    def columns(self, query: str) -> list[str]:
        def names(connection: Connection) -> list[str]:
            result = connection.execute(_text(f"SELECT * FROM ({query}) q WHERE 1 = 0"))
            return [name.lower() for name in result.keys()]  # noqa: SIM118

        return self._with(names)

    def has(self, table: str) -> bool:
        return self._with(lambda connection: inspect(connection).has_table(table))

    def frame(self, query: str, types: Types, *, key: str) -> DataFrame:
        cut = cuts(self._spark, self, query, key)
        bounds = _ranges(key, cut, self._url.get_backend_name())
        parts = [f"SELECT {', '.join(types)} FROM ({query}) q WHERE {bound}" for bound in bounds]
        reader = RangeReader(self._url.render_as_string(hide_password=False), parts, types)
        schema = ", ".join(f"{name} {kind}" for name, kind in types.items())
        numbers = self._spark.range(0, len(parts), 1, len(parts))
        return numbers.mapInArrow(reader.read, schema)

    def _with(self, work: Callable[[Connection], T]) -> T:
        try:
            engine = create_engine(self._url, poolclass=NullPool)
            with engine.connect() as connection:
                return work(connection)
        except (SQLAlchemyError, ImportError) as error:
            where = self._url.render_as_string(hide_password=True)
            raise CannotReconcile(f"{where}: {reason_of(error)}") from error


@dataclass(frozen=True, slots=True)
class RangeReader:
    """In a task: the rows of one range, some thousands at a time."""

    url: str
    parts: Sequence[str]
    types: Types

    def read(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        engine = create_engine(self.url, poolclass=NullPool)
        for batch in batches:
            for number in batch.column(0).to_pylist():
                with engine.connect() as connection:
                    stream = connection.execution_options(yield_per=ROWS_AT_ONCE)
                    found = stream.execute(_text(self.parts[number]))
                    # Said once more: by itself it is a row at a time where there is no cursor.
                    for rows in found.partitions(ROWS_AT_ONCE):
                        yield self._batch(rows)

    def _batch(self, rows: Sequence[Any]) -> pa.RecordBatch:
        columns = zip(self.types.values(), zip(*rows, strict=True), strict=True)
        arrays = [_array(kind, values) for kind, values in columns]
        return pa.RecordBatch.from_arrays(arrays, names=list(self.types))


def _array(kind: str, values: Sequence[Any]) -> pa.Array:
    plain = str if kind == "string" else int
    if set(map(type, values)) <= {plain, type(None)}:
        return pa.array(values, type=_PLAIN[plain]).cast(_ARROW[kind])
    as_kind = plain if kind in ("string", "int", "bigint") else _money
    return pa.array([None if one is None else as_kind(one) for one in values], type=_ARROW[kind])


def _money(value: Any) -> Decimal:
    return Decimal(str(value)).quantize(_CENT)


def _told(connection: Connection, query: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in connection.execute(_text(query)).fetchmany(RANGES_MAX)]


def _text(query: str) -> TextClause:
    """As it is: a colon in a query of the user's is no parameter."""
    return text(re.sub(r"(?<![:\w\\]):(?=\w)", r"\\:", query))
