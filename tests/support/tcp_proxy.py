"""A TCP proxy before a database that lets a request pass and then cuts the connection."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType


class CuttingProxy:
    """A proxy that a test tells to cut off the next response or to refuse connections."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.cut_next_response = False
        self.refuses_connections = False
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> CuttingProxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.refuses_connections:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._server_port))
                for arguments in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._forward, args=arguments, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_response: bool) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                if is_response and self.cut_next_response:
                    self.cut_next_response = False
                    break
                target.sendall(chunk)
        for connection in (source, target):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
