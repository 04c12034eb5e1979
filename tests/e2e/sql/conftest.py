"""One database server of each kind for the whole run, and a new database for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine

from tests.support.brokers import LocalServer
from tests.support.databases import DatabaseServer, MariaDB, Postgres
from tests.support.sql_bank import tables

SERVERS: dict[str, type[DatabaseServer]] = {"postgresql": Postgres, "mariadb": MariaDB}
KINDS = ("sqlite", *SERVERS)


@pytest.fixture(scope="session")
def server() -> Iterator[LocalServer]:
    """Run a broker that checks open transactions after half a second."""
    with LocalServer() as server:
        yield server


@pytest.fixture(scope="session")
def database_servers() -> Iterator[dict[str, DatabaseServer]]:
    """Yield the database servers that are running, by kind; url_of adds to them."""
    running: dict[str, DatabaseServer] = {}
    yield running
    for server in running.values():
        server.__exit__(None, None, None)


def url_of(kind: str, database_servers: dict[str, DatabaseServer], directory: Path) -> str:
    """Return the URL of a new database. Skips the test if its server cannot be started here."""
    if kind == "sqlite":
        return f"sqlite:///{directory / 'bank.db'}"
    if kind not in database_servers:
        if reason := SERVERS[kind].unavailable_reason():
            pytest.skip(f"{kind}: {reason}")
        database_servers[kind] = SERVERS[kind]().__enter__()
    return database_servers[kind].new_database()


@pytest.fixture(params=KINDS)
def url(
    request: pytest.FixtureRequest, database_servers: dict[str, DatabaseServer], tmp_path: Path
) -> str:
    return url_of(request.param, database_servers, tmp_path)


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    """Yield an engine for each kind of database, with the tables of the bank."""
    engine = create_engine(url)
    tables.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path / 'bank.db'}")
    tables.create_all(engine)
    yield engine
    engine.dispose()
