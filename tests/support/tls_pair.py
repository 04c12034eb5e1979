"""A TLS client and a `TlsConnection` that are joined in memory, without sockets."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Iterable

from escrowmq.server.tls_connection import TlsConnection
from tests.support.fake_transport import FakeTransport


class RecordingProtocol(asyncio.Protocol):
    """Records what its transport calls."""

    def __init__(self) -> None:
        self.received = b""
        self.events: list[str] = []
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.events.append("made")

    def data_received(self, data: bytes) -> None:
        assert data
        self.received += data

    def eof_received(self) -> None:
        self.events.append("eof")

    def pause_writing(self) -> None:
        self.events.append("paused")

    def resume_writing(self) -> None:
        self.events.append("resumed")

    def connection_lost(self, error: Exception | None) -> None:
        self.events.append("lost")


class TlsPair:
    """One connection, seen from both ends. Needs a running event loop."""

    def __init__(self, server: ssl.SSLContext, client: ssl.SSLContext) -> None:
        self.protocol = RecordingProtocol()
        self.socket = FakeTransport(4_711)
        self.connection = TlsConnection(lambda: self.protocol, server)
        self.connection.connection_made(self.socket)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.client = client.wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1")

    def shake_hands(
        self,
        cut: Callable[[bytes], Iterable[bytes]] = lambda data: [data],
        first_message: bytes = b"",
    ) -> None:
        """Complete the handshake. `cut` divides what the client sends.

        The first message of the client is sent together with the end of its handshake.
        """
        is_done = False
        while not is_done:
            try:
                self.client.do_handshake()
                is_done = True
            except ssl.SSLWantReadError:
                pass
            for piece in cut(self.encrypted(first_message if is_done else b"")):
                self.connection.data_received(piece)
            self._move_to_client()

    def encrypted(self, data: bytes) -> bytes:
        """Return what the client sends for these bytes."""
        if data:
            self.client.write(data)
        return self._outgoing.read()

    def close_notify(self) -> bytes:
        """Return what the client sends at the end of its stream."""
        with contextlib.suppress(ssl.SSLError):  # the server has not answered yet
            self.client.unwrap()
        return self._outgoing.read()

    def read_all(self) -> bytes:
        """Return what the client reads to the end of the stream. Raises ssl.SSLError.

        An end without a close_notify raises ssl.SSLEOFError.
        """
        self._move_to_client()
        self._incoming.write_eof()
        received = b""
        while piece := self.client.read(65_536):
            received += piece
        return received

    def _move_to_client(self) -> None:
        self._incoming.write(b"".join(self.socket.written))
        self.socket.written.clear()
