"""A transport without a socket, for tests that hand bytes to a connection themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


class FakeTransport(asyncio.Transport):
    """Records what is written. `fails` makes every write raise, as a broken connection might."""

    def __init__(self, port: int, *, host: str = "127.0.0.1") -> None:
        super().__init__({"peername": (host, port)})
        self.written: list[bytes] = []
        self.fails = False
        self._is_reading = True
        self._is_closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.fails:
            raise OSError("broken")
        self.written.append(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        for data in list_of_data:
            self.write(data)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_reading(self) -> bool:
        return self._is_reading

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    def abort(self) -> None:
        self._is_closing = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return super().get_extra_info(name, default)
