"""A TCP relay whose connections can be reset, and that can be closed for a while.

The broker listens on 127.0.0.1 and says that it lives at 127.0.0.2 (brokerIP1), where this is.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from types import TracebackType

_RESETS = struct.pack("ii", 1, 0)  # SO_LINGER: a close is a reset


class Relay:
    def __init__(self, port: int, *, host: str = "127.0.0.2", behind: str = "127.0.0.1") -> None:
        self._port = port
        self._host = host
        self._behind = behind
        self._server: asyncio.Server | None = None
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self.is_cut = False
        self.resets = 0

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._pass, self._host, self._port)
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

    def reset(self, choose: random.Random, share: float) -> None:
        """Both ends of each pair hear of it at once, whatever was under way."""
        for pair in list(self._pairs):
            if choose.random() < share:
                self.resets += 1
                for writer in pair:
                    _abort(writer)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            _abort(writer)
            return
        try:
            onward = await asyncio.open_connection(self._behind, self._port)
        except OSError:
            _abort(writer)
            return
        pair = writer, onward[1]
        self._pairs.add(pair)
        try:
            await asyncio.gather(_copy(reader, onward[1]), _copy(onward[0], writer))
        finally:
            self._pairs.discard(pair)
            for one in pair:
                one.close()


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
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS)
    writer.transport.abort()
