"""A connection of a database driver as `escrowmq.database.statements` uses it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from escrowmq.errors import ConfigError


class DatabaseConnection(Protocol):
    """A connection of psycopg 3, sqlite3 or PyMySQL."""

    def cursor(self) -> Any:
        """Open a cursor."""

    def commit(self) -> None:
        """Commit the transaction."""

    def rollback(self) -> None:
        """Roll the transaction back."""

    def close(self) -> None:
        """Disconnect, which rolls back."""


@dataclass(frozen=True, slots=True)
class Driver:
    """What differs between the drivers.

    `open_cursor` opens a cursor whose rows are tuples, whatever the connection is set to.
    """

    vendor: str
    placeholder: str
    commits_by_itself: Callable[[Any], bool]
    open_cursor: Callable[[Any], Any]


def _sqlite_commits(connection: Any) -> bool:
    # The attribute exists from Python 3.12 on. -1 is the mode of older ones, in which our BEGIN is
    # enough.
    return getattr(connection, "autocommit", -1) is True


def _sqlite_cursor(connection: Any) -> Any:
    cursor = connection.cursor()
    cursor.row_factory = None
    return cursor


def _psycopg_cursor(connection: Any) -> Any:
    return connection.cursor(row_factory=importlib.import_module("psycopg.rows").tuple_row)


def _pymysql_cursor(connection: Any) -> Any:
    return connection.cursor(importlib.import_module("pymysql.cursors").Cursor)


_DRIVERS: Final = {
    "sqlite3": Driver(
        "sqlite", "?", lambda c: getattr(c, "autocommit", -1) is True, _sqlite_cursor
    ),
    "psycopg": Driver("postgresql", "%s", lambda c: c.autocommit, _psycopg_cursor),
    "pymysql": Driver("mysql", "%s", lambda c: c.get_autocommit(), _pymysql_cursor),
}


class DriverConnection:
    """A connection of one of the supported drivers.

    Raises ConfigError for a connection of another driver, and for one that commits each statement
    by itself.
    """

    def __init__(self, connection: DatabaseConnection) -> None:
        self._connection = connection
        name, self._driver = _find_driver(connection)
        if self._driver.commits_by_itself(connection):
            raise ConfigError(
                "the connection commits each statement by itself; set autocommit to False"
            )
        errors = importlib.import_module(name)
        self.vendor = self._driver.vendor
        self.integrity_error: type[Exception] = errors.IntegrityError
        self.database_error: type[Exception] = errors.Error

    def begin(self) -> None:
        """Begin a transaction if the driver would not do so before the next statement."""
        if self.vendor == "sqlite" and not getattr(self._connection, "in_transaction", True):
            self.execute("BEGIN")

    def execute(self, sql: str, values: Sequence[str | int] = ()) -> int:
        with self._open_cursor() as cursor:
            cursor.execute(self._translate(sql), tuple(values))
            return int(cursor.rowcount)

    def query(self, sql: str, values: Sequence[str | int] = ()) -> list[tuple[Any, ...]]:
        with self._open_cursor() as cursor:
            cursor.execute(self._translate(sql), tuple(values))
            return list(cursor.fetchall()) if cursor.description else []

    def execute_many(self, sql: str, rows: Sequence[Sequence[str | int]]) -> None:
        with self._open_cursor() as cursor:
            cursor.executemany(self._translate(sql), rows)

    @contextmanager
    def atomic(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        except BaseException:
            self.roll_back()
            raise
        self.commit()

    def commit(self) -> None:
        self._connection.commit()

    def roll_back(self) -> None:
        self._connection.rollback()

    def _open_cursor(self) -> closing[Any]:
        return closing(self._driver.open_cursor(self._connection))

    def _translate(self, sql: str) -> str:
        return sql.replace("%s", self._driver.placeholder)


def _find_driver(connection: DatabaseConnection) -> tuple[str, Driver]:
    """Return the name and the description of the driver of a connection. Raises ConfigError."""
    for base in type(connection).__mro__:
        name = base.__module__.partition(".")[0]
        if name in _DRIVERS:
            return name, _DRIVERS[name]
    raise ConfigError(
        f"a connection of {type(connection).__module__} is not supported; use one of "
        f"{', '.join(_DRIVERS)}, or escrowmq.sql"
    )
