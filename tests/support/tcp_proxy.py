"""A line to a database that can be cut at the worst moment: the request goes through, the answer
does not."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType


class CuttingProxy:
    def __init__(self, port: int) -> None:
        self._target = port
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
                near, _ = self._listener.accept()
                if self.refuses_connections:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._target))
                for one, other, is_answer in ((near, far, False), (far, near, True)):
                    arguments = (one, other, is_answer)
                    threading.Thread(target=self._pump, args=arguments, daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while chunk := one.recv(65536):
                if is_answer and self.cut_next_response:
                    self.cut_next_response = False
                    break
                other.sendall(chunk)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
