"""A TCP relay that can reset connections and refuse new ones.

The broker listens on 127.0.0.1 but registers the address 127.0.0.2 (brokerIP1), where the relay
listens.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from types import TracebackType

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER with timeout 0: a close sends RST


class Relay:
    """Forwards connections to the same port of another host.

    While `refuses_connections` is set, it resets new connections.
    """

    def __init__(self, port: int, *, host: str = "127.0.0.2", target: str = "127.0.0.1") -> None:
        self._port = port
        self._host = host
        self._target = target
        self._server: asyncio.Server | None = None
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self.refuses_connections = False
        self.reset_count = 0

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._forward, self._host, self._port)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.reset(random.Random(0), 1.0)

    def reset(self, generator: random.Random, share: float) -> None:
        """Reset a random share of the connections, at both ends."""
        for pair in list(self._pairs):
            if generator.random() < share:
                self.reset_count += 1
                for writer in pair:
                    _abort(writer)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses_connections:
            _abort(writer)
            return
        try:
            target_reader, target_writer = await asyncio.open_connection(self._target, self._port)
        except OSError:
            _abort(writer)
            return
        pair = writer, target_writer
        self._pairs.add(pair)
        try:
            await asyncio.gather(_copy(reader, target_writer), _copy(target_reader, writer))
        finally:
            self._pairs.discard(pair)
            for end in pair:
                end.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        _abort(writer)


def _abort(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None and not writer.transport.is_closing():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
