"""What a TlsConnection does for its protocol besides passing bytes on."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import pytest

from escrowmq.server.tls_connection import (
    SHORT_RECORD_BYTES,
    SHORT_RECORDS_MAX,
    TlsConnection,
)
from tests.support.signing import Certificates
from tests.support.tls_pair import RecordingProtocol, TlsPair

Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    certificates = Certificates(tmp_path_factory.mktemp("certificates"))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificates.cert, certificates.key)
    return server, certificates.client()


async def test_the_protocol_is_paused_when_the_socket_is(contexts: Contexts) -> None:
    pair = TlsPair(*contexts)
    pair.connection.pause_writing()
    pair.connection.resume_writing()  # there is no protocol during the handshake
    pair.shake_hands()
    pair.connection.pause_writing()
    pair.connection.resume_writing()
    assert pair.protocol.events == ["made", "paused", "resumed"]


async def test_reading_and_closing_are_those_of_the_socket(contexts: Contexts) -> None:
    pair = TlsPair(*contexts)
    pair.shake_hands()
    pair.connection.pause_reading()
    assert not pair.socket.is_reading()
    assert not pair.connection.is_reading()
    pair.connection.resume_reading()
    assert pair.socket.is_reading()
    pair.connection.abort()
    assert pair.socket.is_closing()
    assert pair.connection.is_closing()
    assert pair.socket.written == []


async def test_the_protocol_sees_the_context_and_the_peer(contexts: Contexts) -> None:
    pair = TlsPair(*contexts)
    pair.shake_hands()
    assert pair.connection.get_extra_info("sslcontext") is contexts[0]
    assert pair.connection.get_extra_info("peername") == ("127.0.0.1", 4_711)


async def test_a_request_in_one_chunk_with_the_end_of_the_handshake_is_received(
    contexts: Contexts,
) -> None:
    pair = TlsPair(*contexts)
    pair.shake_hands(first_message=b"at once")
    assert pair.protocol.received == b"at once"


async def test_a_protocol_that_refuses_the_connection_receives_nothing(contexts: Contexts) -> None:
    class RefusingProtocol(RecordingProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            assert self.transport is not None
            self.transport.abort()

    pair = TlsPair(*contexts)
    pair.protocol = RefusingProtocol()
    pair.shake_hands(first_message=b"at once")
    assert pair.protocol.events == ["made"]
    assert pair.protocol.received == b""


async def test_the_client_gets_an_alert_for_a_record_that_is_not_valid(contexts: Contexts) -> None:
    pair = TlsPair(*contexts)
    pair.shake_hands()
    good, bad = pair.encrypted(b"good"), bytearray(pair.encrypted(b"bad"))
    bad[-1] ^= 1
    pair.connection.data_received(good + bad)
    assert pair.protocol.received == b"good"
    assert pair.socket.is_closing()
    with pytest.raises(ssl.SSLError, match="ALERT_BAD_RECORD_MAC"):
        pair.read_all()


async def test_a_connection_lost_in_the_handshake_makes_no_protocol(contexts: Contexts) -> None:
    pair = TlsPair(*contexts)
    pair.connection.connection_lost(None)
    with pytest.raises(ConnectionResetError):
        await pair.connection.handshake
    assert pair.protocol.events == []


async def test_a_lost_connection_is_passed_on(contexts: Contexts) -> None:
    pair = TlsPair(*contexts)
    pair.shake_hands()
    pair.connection.connection_lost(OSError("broken"))
    assert pair.protocol.events == ["made", "lost"]


async def test_a_certificate_that_the_client_does_not_trust_fails_the_handshake(
    contexts: Contexts, tmp_path: Path
) -> None:
    stranger = Certificates(tmp_path).client()
    pair = TlsPair(contexts[0], stranger)
    with pytest.raises(ssl.SSLCertVerificationError):
        pair.shake_hands()
    pair.connection.data_received(pair.encrypted(b""))  # the alert of the client
    with pytest.raises(ssl.SSLError, match="ALERT_UNKNOWN_CA"):
        await pair.connection.handshake
    assert pair.socket.is_closing()


async def test_what_the_socket_does_not_take_waits_in_its_transport(contexts: Contexts) -> None:
    server, client = contexts
    protocol = RecordingProtocol()
    connection = TlsConnection(lambda: protocol, server)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    body = bytes(range(256)) * 20_000

    def read_all() -> bytes:
        """Read to the orderly end."""
        received = b""
        while piece := client_socket.recv(1 << 20):
            received += piece
        return received

    loop = asyncio.get_running_loop()
    await loop.connect_accepted_socket(lambda: connection, ours)
    client_socket = await asyncio.to_thread(
        client.wrap_socket, theirs, server_hostname="127.0.0.1", suppress_ragged_eofs=False
    )
    with client_socket:
        await connection.handshake
        connection.write(body)
        assert 0 < connection.get_write_buffer_size() < len(body)
        connection.write(b"the end")
        connection.close()
        assert await asyncio.to_thread(read_all) == body + b"the end"


async def test_a_client_that_sends_very_many_very_short_records_is_disconnected(
    contexts: Contexts, caplog: pytest.LogCaptureFixture
) -> None:
    pair = TlsPair(*contexts)
    pair.shake_hands()
    pair.connection.data_received(_records(pair, b"x", SHORT_RECORDS_MAX))
    assert pair.socket.is_closing()
    assert pair.protocol.received == b""
    assert "it sends very many very short TLS records" in caplog.text


@pytest.mark.parametrize(
    ("content", "count"),
    [(b"x", SHORT_RECORDS_MAX - 1), (b"x" * SHORT_RECORD_BYTES, 2 * SHORT_RECORDS_MAX)],
)
async def test_a_client_that_sends_many_records_is_served(
    contexts: Contexts, content: bytes, count: int
) -> None:
    pair = TlsPair(*contexts)
    pair.shake_hands()
    pair.connection.data_received(_records(pair, content, count))
    assert not pair.socket.is_closing()
    assert pair.protocol.received == content * count


def _records(pair: TlsPair, content: bytes, count: int) -> bytes:
    return b"".join(pair.encrypted(content) for _ in range(count))
