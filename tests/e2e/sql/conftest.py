"""One database server of each kind for the whole run, and a new database for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine

from tests.support.brokers import Server
from tests.support.databases import DatabaseServer, MariaDB, Postgres
from tests.support.sql_bank import tables

SERVERS: dict[str, type[DatabaseServer]] = {"postgresql": Postgres, "mariadb": MariaDB}
KINDS = ("sqlite", *SERVERS)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a broker that checks open transactions after half a second."""
    conf = {
        "transactionTimeOut": 500,
        "transactionCheckInterval": 500,
        "transactionCheckMax": 1000,
    }
    with Server(tmp_path_factory.mktemp("sql"), conf=conf) as served:
        yield served


@pytest.fixture(scope="session")
def servers() -> Iterator[dict[str, DatabaseServer]]:
    """Yield the database servers that are running, by kind; url_of adds to them."""
    running: dict[str, DatabaseServer] = {}
    yield running
    for server in running.values():
        server.__exit__(None, None, None)


def url_of(kind: str, servers: dict[str, DatabaseServer], directory: Path) -> str:
    """Return the URL of a new database. Skips the test if its server cannot be started here."""
    if kind == "sqlite":
        return f"sqlite:///{directory / 'bank.db'}"
    if kind not in servers:
        if reason := SERVERS[kind].unavailable_reason():
            pytest.skip(f"{kind}: {reason}")
        servers[kind] = SERVERS[kind]().__enter__()
    return servers[kind].new_database()


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, servers: dict[str, DatabaseServer], tmp_path: Path) -> str:
    return url_of(request.param, servers, tmp_path)


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
