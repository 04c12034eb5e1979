"""TLS on the same port: which clients are served and which are refused."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.brokers import WAIT_S, Server
from tests.support.signing import Certificates, SignedClient
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def enforcing(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("enforcing"), conf=certificates.conf()) as server:
        yield server


def wait_for_close(connection: socket.socket) -> None:
    """Wait until the server closes the connection. Raises TimeoutError."""
    connection.settimeout(WAIT_S)
    with contextlib.suppress(ConnectionError):
        while connection.recv(4096):  # an alert may come first
            pass


def test_messages_pass_unchanged_through_tls(enforcing: Server, certificates: Certificates) -> None:
    bodies = [bytes([number]) * (number * 40_000) for number in range(1, 11)]
    with SignedClient(enforcing.address, tls=certificates.client()) as client:
        client.create_topic("long", queues=1)
        for body in bodies:
            client.send("long", body)
        assert [record.body for record in client.pull_all("long", 0)] == bodies
    with SignedClient(enforcing.namesrv_address, tls=certificates.client()) as name_server:
        assert name_server.route("long") is not None


def test_a_client_without_tls_is_refused(enforcing: Server) -> None:
    for address in (enforcing.address, enforcing.namesrv_address):
        with pytest.raises(ConnectionError), SignedClient(address) as client:
            client.request(105, {"topic": "orders"})


ONLY_FIRST_BYTE = "only the first byte of a hello"
GARBAGE = {
    "an invalid hello": b"\x16\x03\x01\x02\x00" + b"\xff" * 512,
    "a record that is too long": b"\x16\x03\x01\xff\xff" + b"\x01" * 70_000,
    "an HTTP request": b"GET / HTTP/1.1\r\n\r\n",
    ONLY_FIRST_BYTE: b"\x16",
}


@pytest.mark.parametrize("name", GARBAGE)
def test_a_connection_that_sends_garbage_is_closed(
    enforcing: Server, certificates: Certificates, name: str
) -> None:
    host, port = enforcing.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        connection.sendall(GARBAGE[name])
        if name == ONLY_FIRST_BYTE:
            connection.shutdown(socket.SHUT_WR)
        wait_for_close(connection)
    with SignedClient(enforcing.address, tls=certificates.client()) as client:
        client.create_topic("after-garbage")


def test_a_stalled_handshake_times_out_and_blocks_no_other_client(
    enforcing: Server, certificates: Certificates
) -> None:
    host, port = enforcing.address.rsplit(":", 1)
    stalled = [socket.create_connection((host, int(port)), timeout=60) for _ in range(50)]
    try:
        for number, connection in enumerate(stalled):
            connection.sendall(b"\x16\x03\x01\x02\x00\x01" if number % 2 else b"")
        with SignedClient(enforcing.address, tls=certificates.client()) as client:
            client.create_topic("meanwhile")
        for connection in stalled:
            wait_for_close(connection)
    finally:
        for connection in stalled:
            connection.close()


def test_renegotiation_is_refused(enforcing: Server) -> None:
    """It would let a client make the server compute. OpenSSL's own client asks for it by an R."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no `openssl` on the path")
    command = [openssl, "s_client", "-tls1_2", "-state", "-connect", enforcing.address]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as client:
        assert client.stdin is not None
        client.stdin.write("R\n")
        client.stdin.flush()
        output, _ = client.communicate(timeout=WAIT_S)
    assert "RENEGOTIATING" in output
    assert "no renegotiation" in output


def test_a_client_that_does_not_trust_the_server_closes_the_connection(enforcing: Server) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        SignedClient(enforcing.address, tls=ssl.create_default_context())


def test_permissive_mode_serves_clients_with_and_without_tls(
    tmp_path: Path, certificates: Certificates
) -> None:
    with Server(tmp_path, conf=certificates.conf("permissive")) as server:
        with server.client() as plain:
            plain.create_topic("orders", queues=1)
            plain.send("orders", b"plain")
        with SignedClient(server.address, tls=certificates.client()) as encrypted:
            encrypted.send("orders", b"encrypted")
            bodies = [record.body for record in encrypted.pull_all("orders", 0)]
        assert bodies == [b"plain", b"encrypted"]


def test_a_server_without_certificates_closes_tls_connections(tmp_path: Path) -> None:
    with Server(tmp_path) as server, pytest.raises((ConnectionError, ssl.SSLError)):
        SignedClient(server.address, tls=ssl.create_default_context())


def test_a_client_certificate_is_required_if_configured(
    tmp_path: Path, certificates: Certificates
) -> None:
    conf = {
        **certificates.conf(),
        "tls.server.need.client.auth": "require",
        "tls.server.trustCertPath": certificates.ca,
    }
    # The start also shows that the broker has a certificate when it registers.
    with Server(tmp_path, conf=conf) as server:
        trusted = certificates.client(certificates.client_pem)
        with SignedClient(server.address, tls=trusted) as client:
            client.create_topic("orders")
        for untrusted in (certificates.client(), certificates.client(certificates.untrusted_pem)):
            with (
                pytest.raises((ConnectionError, ssl.SSLError)),
                SignedClient(server.address, tls=untrusted) as client,
            ):
                client.create_topic("orders")


def test_certificates_are_reloaded(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certificates")
    with Server(tmp_path, conf=certificates.conf()) as server:

        def server_certificate() -> bytes:
            host, port = server.address.rsplit(":", 1)
            with (
                socket.create_connection((host, int(port)), timeout=WAIT_S) as connection,
                certificates.client().wrap_socket(connection, server_hostname=host) as tls,
            ):
                return tls.getpeercert(binary_form=True) or b""

        first = server_certificate()
        certificates.key.write_text("not a key")
        wait_until(lambda: "not reloaded, the old" in server.errors, "the invalid file is reported")
        assert server_certificate() == first
        certificates.issue()
        wait_until(lambda: server_certificate() != first, "the new certificate is used")
