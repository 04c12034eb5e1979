"""Wrong addresses, ports, protocols and credentials: the client and the server's log say what."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from escrowmq import Access, Consumer, Message, Producer, blocking
from escrowmq.errors import AccessRefused, NotSent, RequestRefused, TransportError
from tests.support.acl_broker import READER, WRITER, broker_with_acl
from tests.support.brokers import Server
from tests.support.canned_server import CannedServer
from tests.support.commands import run
from tests.support.ports import free_ports
from tests.support.programs import run_program
from tests.support.signing import Certificates
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

SETTINGS_FRAME = bytes.fromhex("00000c040000000000000300000064000400100000")
HTTP_RESPONSE = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
HTTP_REQUEST = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS_FRAME
TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(190)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("addresses")) as server:
        yield server


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_server(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("tls"), conf=certificates.conf()) as server:
        yield server


async def send_error(address: str, access: Access | None = None) -> str:
    """Return the error of a producer, which is also that of a consumer's start."""
    async with Producer(address, group="g", access=access) as producer:
        with pytest.raises(TransportError) as sending:
            await producer.send(Message("orders", b"x"))
    consumer = Consumer(address, group="g", subscribe="orders", access=access)
    with pytest.raises(TransportError) as starting:
        await consumer.__aenter__()
    assert str(starting.value) == str(sending.value)
    return str(sending.value)


# --- the wrong port -------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_nothing_listens_at_the_address(host: str) -> None:
    address = f"{host}:{free_ports(1)[0]}"
    sentence = (
        f"{address} cannot be reached: nothing listens there; is `escrowmq serve` running, and is "
        "this its address?"
    )
    assert asyncio.run(send_error(address)) == sentence
    with (
        blocking.Producer(address, group="g") as producer,
        pytest.raises(NotSent, match=re.escape(sentence)),
    ):
        producer.send(Message("orders", b"x"))
    assert run("topic", "list", "-n", address).err.startswith("escrowmq: ")
    assert sentence in run("topic", "list", "-n", address).err


BLOCKING_PROGRAM = """
    import sys
    from escrowmq import Message
    from escrowmq.blocking import Producer
    with Producer(sys.argv[1], group="g") as producer:
        producer.send(Message("orders", b"x"))
"""
ASYNCIO_PROGRAM = """
    import asyncio, sys
    from escrowmq import Message, Producer

    async def main():
        async with Producer(sys.argv[1], group="g") as producer:
            await producer.send(Message("orders", b"x"))

    asyncio.run(main())
"""


@pytest.mark.parametrize("source", [BLOCKING_PROGRAM, ASYNCIO_PROGRAM], ids=["blocking", "asyncio"])
def test_the_traceback_of_a_wrong_address_is_short(source: str) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    result = run_program(source, address)
    assert result.last_error.startswith(
        f"escrowmq.errors.NotSent: {address} cannot be reached: nothing listens there; is "
    )
    frames = re.findall(r'File "(.*)", line', result.err)
    assert len([frame for frame in frames if "escrowmq" in frame]) <= 3, result.err
    assert result.err.count("Traceback") == 1


def test_the_frames_of_an_error_are_logged_for_debugging() -> None:
    source = f"import logging\nlogging.basicConfig(level=logging.DEBUG)\n{ASYNCIO_PROGRAM}"
    source = "\n".join(line.removeprefix("    ") for line in source.splitlines())
    result = run_program(source, f"127.0.0.1:{free_ports(1)[0]}")
    assert "ConnectionRefusedError" in result.err
    assert "in _call_any" in result.err


def test_the_port_of_the_broker_instead_of_the_name_server(server: Server) -> None:
    sentence = (
        f"{server.address} is no name server: it does not know GET_ROUTEINFO_BY_TOPIC; if this is "
        "the port of a broker, give that of its name server, by default 9876"
    )
    assert asyncio.run(send_error(server.address)) == sentence
    result = run("topic", "list", "-n", server.address)
    assert "is no name server: it does not know GET_" in result.err


def test_the_port_of_the_name_server_instead_of_the_broker(server: Server) -> None:
    result = run("transaction", "list", "--broker", server.namesrv_address)
    assert f"{server.namesrv_address} does not support LIST_TRANSACTIONS" in result.err
    assert "and neither has a name server" in result.err


@pytest.mark.parametrize(
    ("response", "protocol"),
    [
        (HTTP_RESPONSE, "HTTP/1"),
        (SETTINGS_FRAME, "HTTP/2, as gRPC uses it (a RocketMQ 5 gRPC client, or the port of a"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "SSH"),
    ],
    ids=["HTTP", "gRPC", "SSH"],
)
def test_the_port_of_another_protocol(response: bytes, protocol: str) -> None:
    with CannedServer(response) as other:
        error = asyncio.run(send_error(other.address))
        assert f"its answer looks like {protocol}" in error
        assert "is this the port of a name server or broker?" in error
        assert f"its answer looks like {protocol}" in run("topic", "list", "-n", other.address).err


def test_a_server_that_closes_without_an_answer() -> None:
    with CannedServer(b"") as other:
        error = asyncio.run(send_error(other.address))
    assert "closed before the response; is it a name server or broker, and does its port" in error
    assert "require TLS, Access(tls=True)?" in error


# --- TLS on one side ------------------------------------------------------------------------------


def test_a_server_without_tls_and_a_client_with_it(server: Server) -> None:
    error = asyncio.run(send_error(server.namesrv_address, Access(tls=True)))
    assert error.startswith(f"{server.namesrv_address} cannot be reached: the TLS handshake failed")
    assert error.endswith("does this port have TLS?")
    text = "this looks like TLS; this port has no TLS: set tls.server.certPath and keyPath, or"
    wait_for_line(server, text)


def test_a_server_with_tls_and_a_client_without_it(tls_server: Server) -> None:
    error = asyncio.run(send_error(tls_server.namesrv_address))
    assert error.endswith("its answer looks like TLS: give access=Access(tls=True)")
    text = "this port requires TLS, and this looks like RocketMQ's remoting protocol without TLS"
    wait_for_line(tls_server, text)
    result = run("topic", "list", "-n", tls_server.namesrv_address)
    assert "its answer looks like TLS: give access=Access(tls=True)" in result.err


def test_a_certificate_of_an_unknown_authority(tls_server: Server) -> None:
    error = asyncio.run(send_error(tls_server.namesrv_address, Access(tls=True)))
    assert "certificate verify failed: " in error
    assert error.endswith("give the certificate of its authority as Access(ca_file=…)")


# --- the log of the server ------------------------------------------------------------------------


@pytest.mark.both_paths
def test_the_log_of_the_server_names_what_connected(tmp_path: Path, request_path: str) -> None:
    requests = {"HTTP/1": HTTP_REQUEST, "HTTP/2, as gRPC": HTTP2_PREFACE, "TLS": TLS_HELLO}
    with Server(tmp_path) as server:
        for address in (server.address, server.namesrv_address):
            for protocol, request in requests.items():
                host, port = address.split(":")
                with socket.create_connection((host, int(port)), timeout=60) as connection:
                    connection.sendall(request)
                    peer = "{}:{}".format(*connection.getsockname())
                    assert connection.recv(1) == b""
                wait_for_line(server, f"closed peer={peer}: this looks like {protocol}")


def wait_for_line(server: Server, text: str) -> None:
    wait_until(lambda: text in server.errors, lambda: server.errors)


# --- wrong credentials ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def acl_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with broker_with_acl(tmp_path_factory.mktemp("acl")) as server:
        yield server


NO_KEY = (
    "this server requires an access key and a signature; configure both in the client (code 16)"
)
WRONG_KEY = "the access key or the signature is wrong; check both keys (code 16)"


@pytest.mark.parametrize(
    ("access", "text"),
    [
        (None, NO_KEY),
        (Access("nobody", "secret"), WRONG_KEY),
        (Access(WRITER[0], "another secret"), WRONG_KEY),
    ],
    ids=["none", "unknown", "wrong secret"],
)
async def test_wrong_credentials(acl_server: Server, access: Access | None, text: str) -> None:
    async with Producer(acl_server.namesrv_address, group="loader", access=access) as producer:
        with pytest.raises(AccessRefused, match=re.escape(text)):
            await producer.send(Message("orders", b"x"))
    consumer = Consumer(
        acl_server.namesrv_address, group="readers", subscribe="orders", access=access
    )
    with pytest.raises(AccessRefused, match=re.escape(text)):
        await consumer.__aenter__()


async def test_an_account_without_the_permission_names_it(acl_server: Server) -> None:
    address, reader = acl_server.namesrv_address, Access(*READER)
    async with Producer(address, group="loader", access=Access(*WRITER)) as producer:
        await producer.send(Message("orders", b"x"))
    async with Producer(address, group="loader", access=reader) as producer:
        with pytest.raises(RequestRefused, match="reader-key has no permission: PUB on topic ord"):
            await producer.send(Message("orders", b"x"))
    stranger: Any = Consumer(address, group="strangers", subscribe="orders", access=reader)
    with pytest.raises(
        RequestRefused, match="reader-key has no permission: SUB on group strangers"
    ):
        await stranger.__aenter__()
