"""Every door asks: name server and metrics too. Rules are read again; no door is open."""

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
    eventually,
    guarded,
    refused,
    send_fields,
)
from tests.support.brokers import WAIT_S, NotStarted, Served
from tests.support.signing import SignedClient

# --- name server and metrics ---------------------------------------------------------------------


def test_the_name_server_asks_too(served: Served) -> None:
    with SignedClient(served.namesrv_address) as stranger:
        refused(stranger.request(105, {"topic": "orders"}))
        refused(stranger.request(106))
    identity = {"brokerName": "evil", "brokerAddr": "10.9.9.9:1", "clusterName": "DefaultCluster"}
    registration = {**identity, "haServerAddr": "", "brokerId": 0, "compressed": False}
    for keys in (("", ""), WRITER, READER, USER):
        with SignedClient(served.namesrv_address, *keys) as client:
            refused(client.request(103, registration, b"{}"))
            refused(client.request(104, {**identity, "brokerName": "broker-a", "brokerId": 0}))
            refused(client.request(216, {"topic": "orders"}))
            refused(client.request(100, {"namespace": "n", "key": "k", "value": "v"}))
    with SignedClient(served.namesrv_address, *READER) as client:
        route = client.route("orders")
        assert route is not None
        assert [broker["brokerName"] for broker in route["brokerDatas"]] == ["broker-a"]


def get(served: Served, path: str, keys: tuple[str, str] | None = None) -> int:
    port = int(served.conf.read_text().partition("metricsPromExporterPort=")[2].split()[0])
    headers = {}
    if keys is not None:
        told = base64.b64encode(":".join(keys).encode()).decode()
        headers["Authorization"] = f"Basic {told}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        page = answer.read().decode()
        assert not [secret for secret in SECRETS if secret in page]
        return answer.status
    finally:
        connection.close()


def test_metrics_are_for_administrators(served: Served) -> None:
    assert get(served, "/metrics") == 401
    assert get(served, "/metrics", WRITER) == 401
    assert get(served, "/metrics", (ADMIN[0], "wrong-secret")) == 401
    assert get(served, "/metrics", ("", "")) == 401
    assert get(served, "/metrics", ADMIN) == 200
    assert get(served, "/health/ready") == 200


# --- the file changes ----------------------------------------------------------------------------


def test_rules_are_read_again_and_broken_ones_are_not_used(tmp_path: Path) -> None:
    with guarded(tmp_path) as server:
        rules = tmp_path / "acl.yml"
        with SignedClient(server.address, *ADMIN) as admin:
            admin.create_topic("orders", queues=1)
        with SignedClient(server.address, *WRITER) as writer:

            def may() -> bool:
                return writer.request(310, send_fields("orders"), b"x").code == 0

            assert may()
            rules.write_text(RULES.replace("[orders=PUB]", "[orders=SUB]"))
            eventually(lambda: not may())
            rules.write_text(RULES)
            eventually(may)
            rules.write_text(RULES + f"\n  {SECRETS[0]}: [")
            eventually(lambda: "cannot be used" in server.errors)
            assert may()
            rules.unlink()
            eventually(lambda: server.errors.count("cannot be used") == 2)
            assert may()
            rules.write_text(RULES.replace(WRITER[1], "changed-secret-9"))
            eventually(lambda: not may())  # on the same connection
        for secret in SECRETS:
            assert secret not in server.errors


# --- open doors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "conf", "named"),
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
def test_no_door_is_open_without_a_lock(
    tmp_path: Path, role: str, conf: dict[str, object], named: str
) -> None:
    server = Served(tmp_path, role=role, conf=conf)
    with pytest.raises(NotStarted) as caught:
        server.start()
    assert caught.value.exit_code == 2
    assert named in caught.value.errors
    assert "--insecure" in caught.value.errors
    assert not server.data.exists()


def test_whoever_means_it_says_so(tmp_path: Path) -> None:
    server = Served(tmp_path, conf={"bindAddress": "0.0.0.0", "brokerIP1": "127.0.0.1"})
    server.arguments.append("--insecure")
    with server, server.client() as client:
        client.create_topic("orders")
    wide = guarded(tmp_path / "locked", {"bindAddress": "0.0.0.0", "brokerIP1": "127.0.0.1"})
    with wide, SignedClient(wide.address, *ADMIN) as client:
        client.create_topic("orders")


def test_accounts_that_cannot_be_read_stop_the_start(tmp_path: Path) -> None:
    server = guarded(tmp_path)
    (tmp_path / "acl.yml").write_text(
        f"accounts: [{{accessKey: abcdefgh, secretKy: {SECRETS[0]}}}]"
    )
    with pytest.raises(NotStarted) as caught:
        server.start()
    assert "acl.yml" in caught.value.errors
    assert SECRETS[0] not in caught.value.errors
