"""Fixtures: a broker for each test file, two clients, and names that are unique for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interop.remoting import Client
from tests.support.brokers import Server
from tests.support.messaging import unique_numbers


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("broker")) as server:
        yield server
    server.assert_clean()
    assert "Traceback" not in server.errors, server.errors


@pytest.fixture
def client(served: Server) -> Iterator[Client]:
    with served.client() as client:
        yield client


@pytest.fixture
def other(served: Server) -> Iterator[Client]:
    with served.client() as client:
        yield client


@pytest.fixture
def topic(client: Client) -> str:
    name = f"topic-{next(unique_numbers)}"
    client.create_topic(name)
    return name


@pytest.fixture
def group() -> str:
    return f"group-{next(unique_numbers)}"
