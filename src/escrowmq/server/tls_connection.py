"""TLS of one client connection, between the socket's transport and the protocol of a port.

    socket transport ── data_received() ──▶ OpenSSL ──▶ protocol.data_received()
                     ◀── write() ── OpenSSL ◀── write(), writelines() ── protocol

OpenSSL does all of TLS. This module moves bytes in and out of its two memory buffers, once for a
chunk that was received and once for the responses of a turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import Callable, Iterable
from typing import Any, Final, cast

log = logging.getLogger(__name__)

RECORD_BYTES_MAX: Final = 16 * 1024  # of plain bytes: one call reads one record
# A record takes a microsecond however short it is: a chunk of 256 KiB with each byte in a record of
# its own took 12 ms. Requests are longer than SHORT_RECORD_BYTES, so a client that sends so many
# records in one chunk, shorter than that on average, only keeps the broker busy.
SHORT_RECORDS_MAX: Final = 1024
SHORT_RECORD_BYTES: Final = 64
# So much passes through a buffer of OpenSSL at once: they grow, and never become smaller.
PASSED_BYTES_MAX: Final = 32 * 1024

Bytes = bytes | bytearray | memoryview


class _TooManyShortRecords(Exception):
    """The client sends records that cost more than their contents can be worth."""


class TlsConnection(asyncio.Protocol, asyncio.Transport):
    """The protocol of a socket's transport, and the transport of the protocol behind TLS.

    `new_protocol` is called when the handshake is done, and `handshake` is then complete. If it
    fails, `handshake` raises OSError, of which ssl.SSLError is one. The caller limits its time.

    A client that ends its stream, with or without a close_notify, is disconnected when its protocol
    has seen the end: TLS has no connections that are open in one direction only.
    """

    def __init__(
        self, new_protocol: Callable[[], asyncio.Protocol], context: ssl.SSLContext
    ) -> None:
        super().__init__()
        self._new_protocol = new_protocol
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._transport: asyncio.Transport  # of the socket, from connection_made() on
        self._socket_number: int | None = None  # None: everything is written to the transport
        self._protocol: asyncio.Protocol | None = None  # until the handshake is done
        self.handshake: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # --- the protocol of the socket --------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if (socket := transport.get_extra_info("socket")) is not None:
            self._socket_number = socket.fileno()

    def data_received(self, data: bytes) -> None:
        received: list[bytes] = []
        is_end, failure = False, None
        try:
            if len(data) <= PASSED_BYTES_MAX:
                is_end = self._decrypt(data, received)
            else:
                for start in range(0, len(data), PASSED_BYTES_MAX):
                    is_end = self._decrypt(data[start : start + PASSED_BYTES_MAX], received)
                    if is_end:
                        break
        except ssl.SSLError as error:
            failure = error
        except _TooManyShortRecords:
            log.warning(
                "connection closed peer=%s: it sends very many very short TLS records",
                self.get_extra_info("peername"),
            )
            self._transport.abort()
        if self._transport.is_closing():
            return  # refused: above, or by the protocol because the port is full
        if failure is not None:
            self._fail(failure)  # the records before it are valid, and are still handed over
        elif self._outgoing.pending:  # of the handshake, or because a later message requires it
            self._send_encrypted()
        if received and self._protocol is not None:
            self._protocol.data_received(received[0] if len(received) == 1 else b"".join(received))
        if is_end:
            self.eof_received()

    def _decrypt(self, data: bytes, received: list[bytes]) -> bool:
        """Add the contents of all complete records. Return whether the client has ended its stream.

        Raises _TooManyShortRecords.

        A call that finds no complete record costs more than one that reads a record. So there is
        none if the last record is complete: then OpenSSL has left nothing in its buffer.
        """
        incoming, tls = self._incoming, self._tls
        incoming.write(data)
        try:
            if self._protocol is None:
                tls.do_handshake()
                self._handshake_done()
            while incoming.pending:
                record = tls.read(RECORD_BYTES_MAX)
                if not record:
                    return True  # a close_notify; nothing that comes behind it counts
                received.append(record)
                if len(received) % SHORT_RECORDS_MAX == 0 and _are_short(received):
                    raise _TooManyShortRecords
        except ssl.SSLWantReadError:
            pass
        return False

    def _handshake_done(self) -> None:
        self._protocol = self._new_protocol()
        self._protocol.connection_made(self)
        if not self.handshake.done():
            self.handshake.set_result(None)

    def _fail(self, error: ssl.SSLError) -> None:
        """Close the connection after an error of TLS, behind the alert that OpenSSL has written."""
        if self._protocol is None:
            self._handshake_failed(error)
        else:
            log.info("connection closed peer=%s: %s", self.get_extra_info("peername"), error)
        self._send_encrypted()
        self._transport.close()

    def _handshake_failed(self, error: OSError) -> None:
        if not self.handshake.done():
            self.handshake.set_exception(error)

    def eof_received(self) -> bool:
        if self._protocol is not None:
            self._protocol.eof_received()
        self.close()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        if self._protocol is not None:
            self._protocol.connection_lost(error)
        else:
            self._handshake_failed(ConnectionResetError("the client has gone"))

    def pause_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.resume_writing()

    # --- the transport of the protocol -----------------------------------------------------------

    def write(self, data: Bytes) -> None:
        if self._transport.is_closing():
            return
        if len(data) <= PASSED_BYTES_MAX:
            if data:
                self._tls.write(data)
        else:
            view = memoryview(data)
            for start in range(0, len(data), PASSED_BYTES_MAX):
                self._tls.write(view[start : start + PASSED_BYTES_MAX])
                self._send_encrypted()
        self._send_encrypted()

    def writelines(self, pieces: Iterable[Bytes]) -> None:
        self.write(b"".join(pieces))

    def _send_encrypted(self) -> None:
        """Write what OpenSSL has encrypted to the socket, past the transport if nothing waits.

        The transport gets what the socket does not take (see ServerConnection.flush). Nothing is
        written once it is closing: the number of its socket may soon be that of another one.
        """
        transport = self._transport
        if not self._outgoing.pending or transport.is_closing():
            return
        data = self._outgoing.read()
        if self._socket_number is not None and not transport.get_write_buffer_size():
            try:
                data = data[os.write(self._socket_number, data) :]
            except (BlockingIOError, InterruptedError):
                pass
            except OSError:
                transport.abort()  # the client has closed or reset the connection
                return
        if data:
            transport.write(data)

    def close(self) -> None:
        """Close the connection when all is sent, with a close_notify at the end."""
        if self._transport.is_closing():
            return
        with contextlib.suppress(ssl.SSLError):
            # It raises SSLWantReadError: nobody waits for the close_notify of the client.
            self._tls.unwrap()
        self._send_encrypted()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def is_reading(self) -> bool:
        return self._transport.is_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "sslcontext":
            return self._tls.context
        return self._transport.get_extra_info(name, default)


def _are_short(records: list[bytes]) -> bool:
    return sum(map(len, records)) < len(records) * SHORT_RECORD_BYTES
