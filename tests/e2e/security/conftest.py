"""Fixtures: a broker with access control, a client of its administrator, and certificates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.acl_broker import ADMIN, SECRETS, broker_with_acl
from tests.support.brokers import Server
from tests.support.ports import free_ports
from tests.support.signing import Certificates, SignedClient


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("secured")
    (port,) = free_ports(1)
    conf = {"metricsExporterType": "PROM", "metricsPromExporterPort": port}
    with broker_with_acl(directory, conf) as server:
        with SignedClient(server.address, *ADMIN) as admin:
            for topic in ("orders", "others"):
                admin.create_topic(topic, queues=1)
        yield server
    for secret in SECRETS:
        assert secret not in server.errors, "a secret is in the log"


@pytest.fixture
def admin(served: Server) -> Iterator[SignedClient]:
    with SignedClient(served.address, *ADMIN) as client:
        yield client


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))
