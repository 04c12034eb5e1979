"""A server on loopback, in a thread, whose responses a test scripts; for blocking clients.

    with ScriptedServer(lambda request: encode_success(request)) as server:
        SyncConnection(server.address).call(RequestCode.GET_BROKER_RUNTIME_INFO)

`respond` is called with each request and returns the bytes to send, or None to close the
connection. Responses are sent in pieces of `chunk_bytes`, if it is not 0.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from escrowmq.remoting.connection import Connection
from escrowmq.remoting.requests import Request

Respond = Callable[[Request[Any]], bytes | None]


class ScriptedServer:
    """A server that calls a function for each request and records the requests."""

    def __init__(self, respond: Respond, *, chunk_bytes: int = 0) -> None:
        self._respond = respond
        self._chunk_bytes = chunk_bytes
        self.requests: list[Request[Any]] = []
        self.connection_count = 0
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> ScriptedServer:
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.disconnect_all()
        for thread in self._threads:
            thread.join()

    def disconnect_all(self) -> None:
        """Close every connection, as a broker does with idle ones."""
        while self._open:
            connection = self._open.pop()
            with contextlib.suppress(OSError):  # the client closed it first
                connection.shutdown(socket.SHUT_RDWR)

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return  # the listener is closed: the test is over
            self.connection_count += 1
            self._open.append(accepted)
            self._start(lambda accepted=accepted: self._serve(accepted))  # type: ignore[misc]  # bound now

    def _serve(self, accepted: socket.socket) -> None:
        connection = Connection()
        with accepted:
            try:
                while data := accepted.recv(65_536):
                    connection.receive(data)
                    for event in connection.events():
                        assert isinstance(event, Request), event
                        request = Request(event.head, bytes(event.body), event.serializer)
                        self.requests.append(request)
                        response = self._respond(request)
                        if response is None:
                            return
                        self._send(accepted, response)
            except OSError:
                return  # the client is gone

    def _send(self, accepted: socket.socket, data: bytes) -> None:
        size = self._chunk_bytes or max(1, len(data))
        for begin in range(0, len(data), size):
            accepted.sendall(data[begin : begin + size])
