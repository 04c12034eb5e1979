"""Unmodified clients of others sign their requests and speak TLS; ours is the broker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop.clients.environments import Unavailable
from tests.interop.clients.play import Told, play
from tests.support.brokers import Server
from tests.support.signing import Certificates, SignedClient

ADMIN = "operator-key", "operator-secret-1"
CLIENT = "client-key", "client-secret-22"
STRANGER = "client-key", "not-its-secret-3"
RULES = f"""
accounts:
- {{accessKey: {ADMIN[0]}, secretKey: {ADMIN[1]}, admin: true}}
- accessKey: {CLIENT[0]}
  secretKey: {CLIENT[1]}
  topicPerms: [orders=PUB|SUB]
  groupPerms: [readers=SUB, readers-pullers=SUB]
"""
GROUP = "readers"
JAVA = ("java-5.5.0", "java-4.9.7")
SCENARIOS = ("sync", "orderly", "retry", "pull", "transaction-check")
QUICK = {("java-5.5.0", "sync")}


def served(directory: Path, conf: dict[str, object]) -> Server:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "acl.yml").write_text(RULES)
    quick = {
        "messageDelayLevel": "1s 1s 1s 1s 1s 2s",
        "transactionTimeOut": 2_000,
        "transactionCheckInterval": 1_000,
    }
    return Server(directory, conf={**quick, **conf}, wait_s=60)


def guarded(directory: Path, conf: dict[str, object] | None = None) -> Server:
    access = {"aclEnable": "true", "escrowAclFile": directory / "acl.yml"}
    return served(directory, {**access, **(conf or {})})


def played(client: str, scenario: str, server: Server, directory: Path, **more: Any) -> Told:
    try:
        return play(
            client,
            scenario,
            namesrv=server.namesrv_address,
            topic="orders",
            group=GROUP,
            directory=directory,
            **more,
        )
    except Unavailable as reason:
        pytest.skip(f"client {client}: {reason}")


def arrived(told: Told, server: Server) -> None:
    shown = f"\n{told}\nour log:\n{server.errors[-3000:]}"
    assert not told.all("failed"), shown
    assert told.all("done"), shown
    assert told.got, shown
    assert {line["body"] for line in told.got} <= {line["body"] for line in told.sent}, shown


def cells() -> Iterator[Any]:
    for client in (*JAVA, "D"):
        for scenario in SCENARIOS if client in JAVA else ("sync", "retry"):
            marks = [pytest.mark.slow]
            if client in JAVA:
                marks.append(pytest.mark.apache)
            if (client, scenario) not in QUICK:
                marks.append(pytest.mark.nightly)
            yield pytest.param(client, scenario, id=f"{client}-{scenario}", marks=marks)


@pytest.mark.parametrize(("client", "scenario"), list(cells()))
def test_a_client_that_signs_is_served(client: str, scenario: str, tmp_path: Path) -> None:
    with guarded(tmp_path / "ours") as server:
        with SignedClient(server.address, *ADMIN) as admin:
            admin.create_topic("orders", queues=4)
        told = played(client, scenario, server, tmp_path / "client", keys=CLIENT)
        arrived(told, server)


@pytest.mark.slow
@pytest.mark.apache
@pytest.mark.nightly
@pytest.mark.parametrize("client", JAVA)
@pytest.mark.parametrize("keys", [None, STRANGER], ids=["unsigned", "wrong"])
def test_a_client_that_does_not_gets_nothing(
    client: str, keys: tuple[str, str] | None, tmp_path: Path
) -> None:
    with guarded(tmp_path / "ours") as server, SignedClient(server.address, *ADMIN) as admin:
        admin.create_topic("orders", queues=1)
        told = played(client, "oneway", server, tmp_path / "client", keys=keys)
        assert not told.got
        assert admin.max_offset("orders", 0) == 0


@pytest.mark.slow
@pytest.mark.apache
@pytest.mark.parametrize(
    ("client", "scenario"),
    [
        ("java-5.5.0", "sync"),
        pytest.param("java-5.5.0", "big", marks=pytest.mark.nightly),
        pytest.param("java-5.5.0", "transaction-check", marks=pytest.mark.nightly),
        pytest.param("java-4.9.7", "sync", marks=pytest.mark.nightly),
        pytest.param("java-4.9.7", "transaction-check", marks=pytest.mark.nightly),
    ],
)
def test_a_client_that_speaks_tls_is_served(client: str, scenario: str, tmp_path: Path) -> None:
    """And signs as well: it believes our certificate because its authority vouches for it."""
    certificates = Certificates(tmp_path / "certificates")
    options = (
        "-Dtls.enable=true",
        "-Dtls.test.mode.enable=false",
        "-Dtls.client.authServer=true",
        f"-Dtls.client.trustCertPath={certificates.ca}",
    )
    with guarded(tmp_path / "ours", certificates.conf()) as server:
        with SignedClient(server.address, *ADMIN, tls=certificates.client()) as admin:
            admin.create_topic("orders", queues=4)
        told = played(
            client, scenario, server, tmp_path / "client", keys=CLIENT, java_options=options
        )
        arrived(told, server)
        assert Counter(line["body"] for line in told.got)


@pytest.mark.slow
@pytest.mark.apache
@pytest.mark.nightly
def test_a_java_client_in_its_test_mode_is_served(tmp_path: Path) -> None:
    """It believes anybody; our server need not make a certificate up for it."""
    certificates = Certificates(tmp_path / "certificates")
    with served(tmp_path / "ours", certificates.conf("permissive")) as server:
        with server.client() as plain:
            plain.create_topic("orders", queues=4)
        options = ("-Dtls.enable=true",)
        told = played("java-5.5.0", "sync", server, tmp_path / "client", java_options=options)
        arrived(told, server)
