"""One connection of a server: bytes to requests, answers to bytes, bounded both ways."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

from escrowmq.errors import NotSent, RemoteProtocolError
from escrowmq.message.ids import encode_host
from escrowmq.wire.command import Command
from escrowmq.wire.connection import Answer, Call, Event, Failed
from escrowmq.wire.fastpath import Body
from escrowmq.wire.headers import Header

if TYPE_CHECKING:
    from escrowmq.server.tcp import Port

log = logging.getLogger(__name__)

JOINED_BYTES_MAX = 8 * 1024  # below it, one joined write is cheaper than many pieces


class TcpLine(asyncio.Protocol):
    """One connection, as the broker sees it."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._connection = port.new_connection()
        self._transport: asyncio.Transport | None = None
        self._out: list[Body] = []
        self._paused = False
        self._held = False
        self._answered: dict[Call, Callable[[Command | None, bytes], None]] = {}
        self._rest: Iterator[Event] | None = None  # of a chunk that was too much for one turn
        self.active_s = port.elapsed_s()
        self.partial = 0, 0  # of a request: bytes that came, and its number
        self.peer = ""
        self.peer_host = b"\0" * 8

    # --- asyncio ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        address = transport.get_extra_info("peername") or ("0.0.0.0", 0)
        self.peer = f"{address[0]}:{address[1]}"
        self.peer_host = encode_host(address[0].partition("%")[0], address[1])
        self._transport.set_write_buffer_limits(high=self._port.line_unsent_bytes_max())
        if not self._port.admit(self):
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        connection = self._connection
        try:
            connection.receive(data)
            self._handle(connection.events())
        except RemoteProtocolError as error:
            log.info("line closed peer=%s: %s", self.peer, error)
            self.close()
        if connection.partial != self.partial:
            before, self.partial = self.partial, connection.partial
            self._port.partly_read(self, before)

    def _handle(self, events: Iterator[Event]) -> None:
        port = self._port
        port.turn_soon()
        self.active_s = port.turn_s
        if not port.handle_some(self, events):
            # Others have their turn before this one goes on.
            self._rest = events
            self._read_or_not()
            port.call_soon(self._go_on)

    def _go_on(self) -> None:
        events, self._rest = self._rest, None
        if events is None or not self.is_open:
            return
        try:
            self._handle(events)
            self._read_or_not()
            if self._connection.partial != self.partial:
                before, self.partial = self.partial, self._connection.partial
                self._port.partly_read(self, before)
        except RemoteProtocolError as error:
            log.info("line closed peer=%s: %s", self.peer, error)
            self.close()

    def pause_writing(self) -> None:
        self._paused = True
        self._read_or_not()

    def resume_writing(self) -> None:
        self._paused = False
        self.active_s = self._port.elapsed_s()
        self._read_or_not()

    def hold(self, held: bool) -> None:
        """Too much waits in memory for all lines together: read no more from this one."""
        if held != self._held:
            self._held = held
            self._read_or_not()

    def _read_or_not(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        wanted = not (self._paused or self._held or self._rest is not None)
        if wanted and not transport.is_reading():
            transport.resume_reading()
        elif not wanted and transport.is_reading():
            transport.pause_reading()

    def unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._give_up(self._connection.close())
        self._port.gone(self)

    # --- the broker ------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if data:
            if not self._out:
                self._port.written(self)
            self._out.append(data)

    def write_pieces(self, pieces: Sequence[Body]) -> None:
        if pieces:
            if not self._out:
                self._port.written(self)
            self._out += pieces

    def post(self, code: int, fields: Header, body: Body = b"") -> bool:
        if self._transport is None or self._paused:
            return False
        try:
            self.write(self._connection.post(code, fields, body))
        except NotSent:
            return False
        return True

    def ask(
        self,
        code: int,
        fields: Header,
        body: Body,
        answered: Callable[[Command | None, bytes], None],
        *,
        wait_s: float,
    ) -> bool:
        if self._transport is None or self._paused:
            return False
        deadline_s = self._port.elapsed_s() + wait_s
        try:
            call, data = self._connection.call(code, fields, body, deadline_s=deadline_s)
        except NotSent:
            return False
        self._answered[call] = answered
        self.write(data)
        self._port.asks(self)
        return True

    def answered(self, answer: Answer) -> None:
        answered = self._answered.pop(answer.call, None)
        if answered is not None:
            answered(answer.command, bytes(answer.body))

    def expire_calls(self, now_s: float) -> bool:
        """Whether it still waits for an answer."""
        self._give_up(self._connection.expire(now_s=now_s))
        return bool(self._answered)

    def _give_up(self, failed: list[Failed]) -> None:
        for one in failed:
            answered = self._answered.pop(one.call, None)
            if answered is not None:
                answered(None, b"")

    def flush(self) -> int:
        """Hand the answers over: how much of them the peer has not taken yet."""
        out, self._out = self._out, []
        transport = self._transport
        if transport is None or transport.is_closing():
            return 0
        if len(out) == 1:
            transport.write(out[0])
        elif sum(map(len, out)) <= JOINED_BYTES_MAX:
            transport.write(b"".join(out))
        elif out:
            transport.writelines(out)
        return transport.get_write_buffer_size()

    def close(self) -> None:
        if self._transport is not None:
            self.flush()
            self._transport.close()

    def drop(self) -> None:
        """Close it, and do not wait for a peer that reads nothing either."""
        self.close()
        if self._transport is not None and self.unsent_bytes():
            self._transport.abort()
