"""Plain and TLS on one port: the first byte tells, as in RocketMQ.

    0x16    a TLS handshake          anything else    the length of a frame; none is that long

A connection is looked at before it is anybody's: its first byte is read and left where it is, then
the socket goes on as it is, or behind TLS. Who says nothing, or stops in the middle of a handshake,
has a deadline, and his place is counted; nobody waits for him.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

HANDSHAKE_FIRST_BYTE: Final = 0x16
HANDSHAKE_S: Final = 10.0
ACCEPTED_AT_ONCE: Final = 100
PAUSE_S: Final = 0.2  # if the process has no files left


class Door:
    """`context` is asked for every connection: certificates change. `has_room`: for one more."""

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        context: Callable[[], ssl.SSLContext],
        *,
        enforcing: bool,
        silent_max_s: float,
        has_room: Callable[[int], bool],
    ) -> None:
        self._make = make
        self._context = context
        self._enforcing = enforcing
        # A plain client may be silent for a while; where only TLS is served, a handshake is due.
        self._silent_max_s = min(silent_max_s, HANDSHAKE_S) if enforcing else silent_max_s
        self._has_room = has_room
        self._loop = asyncio.get_running_loop()
        self._bound: socket.socket | None = None
        self._entering: set[asyncio.Task[None]] = set()
        self.refused = 0  # handshakes that failed, and plain connections where TLS is wanted

    def open(self, bound: socket.socket) -> None:
        self._bound = bound
        self._loop.add_reader(bound.fileno(), self._accept)

    def close(self) -> None:
        if self._bound is not None:
            self._loop.remove_reader(self._bound.fileno())
            self._bound.close()
            self._bound = None
        for task in self._entering:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            if self._bound is None:
                return
            try:
                accepted, _ = self._bound.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("a connection could not be accepted: %s", error)
                self._loop.remove_reader(self._bound.fileno())
                self._loop.call_later(PAUSE_S, self._accept_again)
                return
            if not self._has_room(len(self._entering)):
                accepted.close()
                continue
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._enter(accepted))
            self._entering.add(task)
            task.add_done_callback(self._entering.discard)

    def _accept_again(self) -> None:
        if self._bound is not None:
            self._loop.add_reader(self._bound.fileno(), self._accept)

    async def _enter(self, accepted: socket.socket) -> None:
        first: int | None = None
        try:
            async with asyncio.timeout(self._silent_max_s):
                first = await self._first_byte(accepted)
        except (OSError, TimeoutError) as error:
            self._refuse(accepted, str(error) or "nothing came in time")
            return
        except asyncio.CancelledError:
            accepted.close()
            raise
        if first is None:
            accepted.close()
        elif first == HANDSHAKE_FIRST_BYTE:
            await self._shake_hands(accepted)
        elif self._enforcing:
            self._refuse(accepted, "this port speaks TLS alone")
        else:
            with contextlib.suppress(OSError):  # gone again
                await self._loop.connect_accepted_socket(self._make, accepted)

    async def _shake_hands(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make, accepted, ssl=self._context(), ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError as error:  # ssl.SSLError is one; the loop has closed the socket
            self.refused += 1
            log.info("no TLS with a client: %s", getattr(error, "reason", None) or error)

    def _refuse(self, accepted: socket.socket, why: str) -> None:
        self.refused += 1
        log.info("connection closed at the door: %s", why)
        accepted.close()

    async def _first_byte(self, accepted: socket.socket) -> int | None:
        """Without taking it; None if there is none to come."""
        readable = asyncio.Event()
        self._loop.add_reader(accepted.fileno(), readable.set)
        try:
            while True:
                await readable.wait()
                with contextlib.suppress(BlockingIOError, InterruptedError):
                    first = accepted.recv(1, socket.MSG_PEEK)
                    return first[0] if first else None
                readable.clear()
        finally:
            self._loop.remove_reader(accepted.fileno())
