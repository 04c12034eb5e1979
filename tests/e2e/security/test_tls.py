"""TLS on the same port: which clients are served and which are refused."""

from __future__ import annotations

import socket
import ssl
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


def closed(line: socket.socket) -> bool:
    line.settimeout(WAIT_S)
    try:
        while line.recv(4096):  # an alert may come first
            pass
    except ConnectionError:
        pass
    return True


def test_messages_pass_unchanged_through_tls(enforcing: Server, certificates: Certificates) -> None:
    bodies = [bytes([number]) * (number * 40_000) for number in range(1, 11)]
    with SignedClient(enforcing.address, tls=certificates.client()) as client:
        client.create_topic("long", queues=1)
        for body in bodies:
            client.send("long", body)
        assert [record.body for record in client.pull_all("long", 0)] == bodies
    with SignedClient(enforcing.namesrv_address, tls=certificates.client()) as names:
        assert names.route("long") is not None


def test_a_client_without_tls_is_refused(enforcing: Server) -> None:
    for address in (enforcing.address, enforcing.namesrv_address):
        with pytest.raises(ConnectionError), SignedClient(address) as client:
            client.request(105, {"topic": "orders"})


GARBAGE = {
    "a hello of noise": b"\x16\x03\x01\x02\x00" + b"\xff" * 512,
    "an endless record": b"\x16\x03\x01\xff\xff" + b"\x01" * 70_000,
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "nothing but the first byte, then the end": b"\x16",
}


@pytest.mark.parametrize("what", GARBAGE)
def test_a_connection_that_sends_garbage_is_closed(
    enforcing: Server, certificates: Certificates, what: str
) -> None:
    host, port = enforcing.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as line:
        line.sendall(GARBAGE[what])
        if what.endswith("the end"):
            line.shutdown(socket.SHUT_WR)
        assert closed(line)
    with SignedClient(enforcing.address, tls=certificates.client()) as client:
        client.create_topic("still-there")


def test_a_stalled_handshake_times_out_and_blocks_no_other_client(
    enforcing: Server, certificates: Certificates
) -> None:
    host, port = enforcing.address.rsplit(":", 1)
    begun = [socket.create_connection((host, int(port)), timeout=60) for _ in range(50)]
    try:
        for number, line in enumerate(begun):
            line.sendall(b"\x16\x03\x01\x02\x00\x01" if number % 2 else b"")
        with SignedClient(enforcing.address, tls=certificates.client()) as client:
            client.create_topic("quick")  # nobody waits for them
        for line in begun:
            assert closed(line)
    finally:
        for line in begun:
            line.close()


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
        with SignedClient(server.address, tls=certificates.client()) as hidden:
            hidden.send("orders", b"hidden")
            assert [record.body for record in hidden.pull_all("orders", 0)] == [b"plain", b"hidden"]


def test_without_certificates_tls_is_closed_at_once(tmp_path: Path) -> None:
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
    with Server(tmp_path, conf=conf) as server:  # its broker registered with its name server
        good = certificates.client(certificates.client_pem)
        with SignedClient(server.address, tls=good) as client:
            client.create_topic("orders")
        for bad in (certificates.client(), certificates.client(certificates.untrusted_pem)):
            with (
                pytest.raises((ConnectionError, ssl.SSLError)),
                SignedClient(server.address, tls=bad) as client,
            ):
                client.create_topic("orders")


def test_certificates_are_reloaded(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certificates")
    with Server(tmp_path, conf=certificates.conf()) as server:

        def shown() -> bytes:
            host, port = server.address.rsplit(":", 1)
            with (
                socket.create_connection((host, int(port)), timeout=WAIT_S) as line,
                certificates.client().wrap_socket(line, server_hostname=host) as tls,
            ):
                return tls.getpeercert(binary_form=True) or b""

        before = shown()
        certificates.key.write_text("no key at all")
        wait_until(lambda: "not reloaded, the old" in server.errors, "the invalid file is reported")
        assert shown() == before
        certificates.issue()
        wait_until(lambda: shown() != before, "the new certificate is used")
