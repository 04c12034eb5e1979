"""A broker for all tests of applications, and the databases of the tests of `escrowmq.sql`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.sql.conftest import database_servers, engine, sqlite, url
from tests.support.apps import CONF
from tests.support.brokers import Server

__all__ = ["database_servers", "engine", "server", "sqlite", "url"]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("app"), conf=CONF) as server:
        yield server
