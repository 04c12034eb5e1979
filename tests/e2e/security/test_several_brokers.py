"""`serve --brokers N` with accounts and TLS: brokers register, and their secret stays hidden."""

from __future__ import annotations

import base64
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.interop.remoting import loads
from tests.support.brokers import WAIT_S, Server
from tests.support.ports import free_ports
from tests.support.signing import Certificates, SignedClient

pytestmark = pytest.mark.slow

ADMIN = "operator-key", "operator-secret-1"
RULES = f"accounts:\n- {{accessKey: {ADMIN[0]}, secretKey: {ADMIN[1]}, admin: true}}\n"
VARIABLE = b"ESCROWMQ_INNER_CLIENT_AUTHENTICATION_CREDENTIALS="


def secret_of(pid: int) -> str:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    [value] = [entry.removeprefix(VARIABLE) for entry in entries if entry.startswith(VARIABLE)]
    return str(loads(value.decode())["secretKey"])


def children_of(served: Server) -> list[int]:
    lines = [line for line in served.errors.splitlines() if "broker started name=" in line]
    return [int(line.split(" pid=")[1]) for line in lines]


def test_brokers_with_accounts_register_and_their_secret_is_not_visible(
    tmp_path: Path,
) -> None:
    (tmp_path / "acl.yml").write_text(RULES)
    conf = {"aclEnable": "true", "escrowAclFile": tmp_path / "acl.yml"}
    served = Server(tmp_path, conf=conf, wait_s=3 * WAIT_S)
    (metrics_port,) = free_ports(1)
    served.arguments[served.arguments.index("--port") + 1] = "0"
    served.arguments += ["--brokers", "2", "--metrics-port", str(metrics_port)]
    with served:
        with SignedClient(served.namesrv_address, *ADMIN) as name_server:
            addresses = loads(name_server.expect(106).body.decode())["brokerAddrTable"]
        assert sorted(addresses) == ["broker-a-0", "broker-a-1"]
        request = Request(f"http://127.0.0.1:{metrics_port}/metrics")
        credentials = base64.b64encode(":".join(ADMIN).encode()).decode()
        request.add_header("Authorization", f"Basic {credentials}")
        with urlopen(request, timeout=WAIT_S) as response:
            metrics = response.read().decode()
        assert 'node_id="broker-a-0"' in metrics
        assert 'node_id="broker-a-1"' in metrics
        pids = children_of(served)
        secrets = {secret_of(pid) for pid in pids}
        assert len(pids) == 2
        assert len(secrets) == 1
        for pid in (*pids, served.pid):
            command_line = Path(f"/proc/{pid}/cmdline").read_text()
            assert not any(secret in command_line for secret in secrets)
        assert not any(secret in metrics or secret in served.startup_output for secret in secrets)
    assert not any(secret in served.errors for secret in secrets)


def test_brokers_that_enforce_tls_register(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    conf = {
        "tls.server.mode": "enforcing",
        "tls.server.certPath": certificates.cert,
        "tls.server.keyPath": certificates.key,
    }
    served = Server(tmp_path, conf=conf, wait_s=3 * WAIT_S)
    served.arguments[served.arguments.index("--port") + 1] = "0"
    served.arguments += ["--brokers", "1"]
    with served:  # ready only when its broker has registered
        assert "broker-a-0" in served.startup_output
