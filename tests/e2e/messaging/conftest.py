"""Fixtures: a broker for each test file, two clients, and names that are unique for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interop.remoting import Client
from tests.support.brokers import LocalServer, no_logged_tracebacks
from tests.support.messaging import unique_numbers


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    directory = tmp_path_factory.mktemp("broker")
    with no_logged_tracebacks(), LocalServer(directory=directory) as server:
        yield server
    server.assert_clean()


@pytest.fixture
def client(server: LocalServer) -> Iterator[Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def other(server: LocalServer) -> Iterator[Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def topic(client: Client) -> str:
    name = f"topic-{next(unique_numbers)}"
    client.create_topic(name)
    return name


@pytest.fixture
def group() -> str:
    return f"group-{next(unique_numbers)}"
