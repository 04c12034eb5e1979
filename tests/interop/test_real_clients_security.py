"""Unmodified clients of other projects sign their requests and use TLS with our broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop.clients.scenarios import ScenarioResult, run_scenario
from tests.interop.skipping import call_or_skip
from tests.support.brokers import Served
from tests.support.signing import Certificates, SignedClient

ADMIN = "operator-key", "operator-secret-1"
CLIENT = "client-key", "client-secret-22"
WRONG_SECRET = "client-key", "not-its-secret-3"
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
IN_CI = {("java-5.5.0", "sync")}


def broker(directory: Path, conf: dict[str, object]) -> Served:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "acl.yml").write_text(RULES)
    short_delays = {
        "messageDelayLevel": "1s 1s 1s 1s 1s 2s",
        "transactionTimeOut": 2_000,
        "transactionCheckInterval": 1_000,
    }
    return Served(directory, conf={**short_delays, **conf}, wait_s=60)


def broker_with_acl(directory: Path, conf: dict[str, object] | None = None) -> Served:
    access = {"aclEnable": "true", "escrowAclFile": directory / "acl.yml"}
    return broker(directory, {**access, **(conf or {})})


def run(
    client: str, scenario: str, server: Served, directory: Path, **options: Any
) -> ScenarioResult:
    return call_or_skip(
        f"client {client}",
        lambda: run_scenario(
            client,
            scenario,
            namesrv=server.namesrv_address,
            topic="orders",
            group=GROUP,
            directory=directory,
            **options,
        ),
    )


def assert_received(result: ScenarioResult, server: Served) -> None:
    details = f"\n{result}\nour log:\n{server.errors[-3000:]}"
    assert not result.all("failed"), details
    assert result.all("done"), details
    assert result.received, details
    received_bodies = {event["body"] for event in result.received}
    assert received_bodies <= {event["body"] for event in result.sent}, details


def cases() -> Iterator[Any]:
    for client in (*JAVA, "ali-ons"):
        for scenario in SCENARIOS if client in JAVA else ("sync", "retry"):
            marks = [pytest.mark.slow]
            if client in JAVA:
                marks.append(pytest.mark.apache)
            if (client, scenario) not in IN_CI:
                marks.append(pytest.mark.nightly)
            yield pytest.param(client, scenario, id=f"{client}-{scenario}", marks=marks)


@pytest.mark.parametrize(("client", "scenario"), list(cases()))
def test_a_client_that_signs_its_requests_is_served(
    client: str, scenario: str, tmp_path: Path
) -> None:
    with broker_with_acl(tmp_path / "ours") as server:
        with SignedClient(server.address, *ADMIN) as admin:
            admin.create_topic("orders", queues=4)
        result = run(client, scenario, server, tmp_path / "client", credentials=CLIENT)
        assert_received(result, server)


@pytest.mark.slow
@pytest.mark.apache
@pytest.mark.nightly
@pytest.mark.parametrize("client", JAVA)
@pytest.mark.parametrize("credentials", [None, WRONG_SECRET], ids=["unsigned", "wrong secret"])
def test_a_client_without_a_valid_signature_neither_sends_nor_receives(
    client: str, credentials: tuple[str, str] | None, tmp_path: Path
) -> None:
    with (
        broker_with_acl(tmp_path / "ours") as server,
        SignedClient(server.address, *ADMIN) as admin,
    ):
        admin.create_topic("orders", queues=1)
        result = run(client, "oneway", server, tmp_path / "client", credentials=credentials)
        assert result.all("done") or result.all("failed"), str(result)  # the driver ran
        assert not result.received
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
def test_a_client_that_uses_tls_and_signs_is_served(
    client: str, scenario: str, tmp_path: Path
) -> None:
    """The client verifies our certificate with that of the authority that issued it."""
    certificates = Certificates(tmp_path / "certificates")
    options = (
        "-Dtls.enable=true",
        "-Dtls.test.mode.enable=false",
        "-Dtls.client.authServer=true",
        f"-Dtls.client.trustCertPath={certificates.ca}",
    )
    with broker_with_acl(tmp_path / "ours", certificates.conf()) as server:
        with SignedClient(server.address, *ADMIN, tls=certificates.client()) as admin:
            admin.create_topic("orders", queues=4)
        result = run(
            client, scenario, server, tmp_path / "client", credentials=CLIENT, java_options=options
        )
        assert_received(result, server)


@pytest.mark.slow
@pytest.mark.apache
@pytest.mark.nightly
def test_a_java_client_in_its_tls_test_mode_is_served(tmp_path: Path) -> None:
    """In this mode the client does not verify the certificate of the server."""
    certificates = Certificates(tmp_path / "certificates")
    with broker(tmp_path / "ours", certificates.conf("permissive")) as server:
        with server.client() as client:
            client.create_topic("orders", queues=4)
        options = ("-Dtls.enable=true",)
        result = run("java-5.5.0", "sync", server, tmp_path / "client", java_options=options)
        assert_received(result, server)
