"""Access control of name server and metrics, reloads, and the refusal of open addresses."""

from __future__ import annotations

import base64
import http.client
from pathlib import Path

import pytest

from tests.support.acl_broker import (
    ADMIN,
    READER,
    RULES,
    SECRETS,
    USER,
    WRITER,
    assert_refused,
    broker_with_acl,
    send_fields,
)
from tests.support.brokers import WAIT_S, Server, StartFailed
from tests.support.signing import SignedClient
from tests.support.waiting import wait_until

# --- name server and metrics ---------------------------------------------------------------------


def test_the_name_server_also_checks_access(served: Server) -> None:
    with SignedClient(served.namesrv_address) as unsigned:
        assert_refused(unsigned.request(105, {"topic": "orders"}))
        assert_refused(unsigned.request(106))
    identity = {
        "brokerName": "intruder",
        "brokerAddr": "10.9.9.9:1",
        "clusterName": "DefaultCluster",
    }
    registration = {**identity, "haServerAddr": "", "brokerId": 0, "compressed": False}
    for keys in (("", ""), WRITER, READER, USER):
        with SignedClient(served.namesrv_address, *keys) as client:
            assert_refused(client.request(103, registration, b"{}"))
            assert_refused(
                client.request(104, {**identity, "brokerName": "broker-a", "brokerId": 0})
            )
            assert_refused(client.request(216, {"topic": "orders"}))
            assert_refused(client.request(100, {"namespace": "n", "key": "k", "value": "v"}))
    with SignedClient(served.namesrv_address, *READER) as client:
        route = client.route("orders")
        assert route is not None
        assert [broker["brokerName"] for broker in route["brokerDatas"]] == ["broker-a"]


def test_refusals_are_logged_without_secrets(served: Server) -> None:
    clients = [
        (("writer-key", "wrong-secret-77"), "access_key=writer-key", "the signature is wrong"),
        (WRITER[::-1], "access_key=writ...", "no enabled account has this access key"),
        (("", ""), "access_key=", "the request has no access key"),
    ]
    for address in (served.address, served.namesrv_address):
        for keys, _, _ in clients:
            with SignedClient(address, *keys) as client:
                assert_refused(client.request(105, {"topic": "orders"}))
    lines = [line for line in served.errors.splitlines() if "request refused" in line]
    for _, shown_key, reason in clients:
        assert any(f" {shown_key} " in line and reason in line for line in lines), lines
    assert "wrong-secret-77" not in served.errors
    assert WRITER[1] not in served.errors


def get_status(served: Server, path: str, keys: tuple[str, str] | None = None) -> int:
    """Return the HTTP status of a page of the metrics port. No page may contain a secret."""
    port = int(served.conf.read_text().partition("metricsPromExporterPort=")[2].split()[0])
    headers = {}
    if keys is not None:
        credentials = base64.b64encode(":".join(keys).encode()).decode()
        headers["Authorization"] = f"Basic {credentials}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        page = response.read().decode()
        assert not [secret for secret in SECRETS if secret in page]
        return response.status
    finally:
        connection.close()


def test_metrics_are_only_for_administrators(served: Server) -> None:
    assert get_status(served, "/metrics") == 401
    assert get_status(served, "/metrics", WRITER) == 401
    assert get_status(served, "/metrics", (ADMIN[0], "wrong-secret")) == 401
    assert get_status(served, "/metrics", ("", "")) == 401
    assert get_status(served, "/metrics", ADMIN) == 200
    assert get_status(served, "/health/ready") == 200


# --- reload --------------------------------------------------------------------------------------


def test_rules_are_reloaded_and_an_invalid_file_is_ignored(tmp_path: Path) -> None:
    with broker_with_acl(tmp_path) as server:
        rules = tmp_path / "acl.yml"
        with SignedClient(server.address, *ADMIN) as admin:
            admin.create_topic("orders", queues=1)
        with SignedClient(server.address, *WRITER) as writer:

            def can_send() -> bool:
                return writer.request(310, send_fields("orders"), b"x").code == 0

            assert can_send()
            rules.write_text(RULES.replace("[orders=PUB]", "[orders=SUB]"))
            wait_until(lambda: not can_send(), "the permission is withdrawn")
            rules.write_text(RULES)
            wait_until(can_send, "the permission is granted again")
            rules.write_text(RULES + f"\n  {SECRETS[0]}: [")
            wait_until(
                lambda: "not reloaded, the old" in server.errors, "the invalid file is reported"
            )
            assert can_send()
            rules.unlink()
            wait_until(
                lambda: server.errors.count("not reloaded, the old") == 2,
                "the missing file is reported",
            )
            assert can_send()
            rules.write_text(RULES.replace(WRITER[1], "changed-secret-9"))
            # The connection stays open, but its signatures are no longer valid.
            wait_until(lambda: not can_send(), "the changed secret is used")
        for secret in SECRETS:
            assert secret not in server.errors


# --- public addresses ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "conf", "setting"),
    [
        ("all", {"brokerIP1": "10.1.2.3"}, "bindAddress=0.0.0.0"),
        ("namesrv", {"bindAddress": "0.0.0.0"}, "bindAddress=0.0.0.0"),
        (
            "broker",
            {"metricsExporterType": "PROM", "metricsPromExporterHost": "0.0.0.0"},
            "metricsPromExporterHost",
        ),
    ],
)
def test_without_access_control_a_public_address_is_refused(
    tmp_path: Path, role: str, conf: dict[str, object], setting: str
) -> None:
    server = Server(tmp_path, role=role, conf=conf)
    with pytest.raises(StartFailed) as refused:
        server.start()
    assert refused.value.exit_code == 2
    assert setting in refused.value.errors
    assert "--insecure" in refused.value.errors
    assert not server.data.exists()


def test_a_public_address_needs_insecure_or_access_control(tmp_path: Path) -> None:
    server = Server(tmp_path, conf={"bindAddress": "0.0.0.0", "brokerIP1": "127.0.0.1"})
    server.arguments.append("--insecure")
    with server, server.client() as client:
        client.create_topic("orders")
    secured = broker_with_acl(
        tmp_path / "secured", {"bindAddress": "0.0.0.0", "brokerIP1": "127.0.0.1"}
    )
    with secured, SignedClient(secured.address, *ADMIN) as client:
        client.create_topic("orders")


def test_a_broker_does_not_start_with_an_invalid_acl_file(tmp_path: Path) -> None:
    server = broker_with_acl(tmp_path)
    (tmp_path / "acl.yml").write_text(
        f"accounts: [{{accessKey: abcdefgh, secretKy: {SECRETS[0]}}}]"
    )
    with pytest.raises(StartFailed) as refused:
        server.start()
    assert "acl.yml" in refused.value.errors
    assert SECRETS[0] not in refused.value.errors
