"""A server of another protocol: it sends the same bytes to every client, and closes.

with CannedServer(b"HTTP/1.1 400 Bad Request\\r\\n\\r\\n") as server:
    Producer(server.address, group="g")
"""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType


class CannedServer:
    """Waits for the first bytes of a client, answers with `response`, and closes."""

    def __init__(self, response: bytes) -> None:
        self._response = response
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> CannedServer:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(65_536)
                    connection.sendall(self._response)
