"""A database of Django as `escrowmq.database.statements` uses it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import IntegrityError, connections, transaction
from django.db.utils import DatabaseError


class AliasConnection:
    """The connection of the current thread to the database with an alias."""

    integrity_error: type[Exception] = IntegrityError
    database_error: type[Exception] = DatabaseError

    def __init__(self, alias: str) -> None:
        self._alias = alias

    @property
    def vendor(self) -> str:
        return connections[self._alias].vendor

    def execute(self, sql: str, values: Sequence[str | int] = ()) -> int:
        with connections[self._alias].cursor() as cursor:
            cursor.execute(sql, list(values))
            return int(cursor.rowcount)

    def query(self, sql: str, values: Sequence[str | int] = ()) -> list[tuple[Any, ...]]:
        with connections[self._alias].cursor() as cursor:
            cursor.execute(sql, list(values))
            return list(cursor.fetchall()) if cursor.description else []

    def execute_many(self, sql: str, rows: Sequence[Sequence[str | int]]) -> None:
        with connections[self._alias].cursor() as cursor:
            cursor.executemany(sql, rows)

    @contextmanager
    def atomic(self) -> Iterator[None]:
        with transaction.atomic(using=self._alias):
            yield
