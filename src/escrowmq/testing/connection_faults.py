"""Faults between a broker and its clients: late and lost responses, refused connections.

    socket transport ── data_received() ──▶ FaultyConnection ──▶ ServerConnection
                     ◀── write() ── late, lost ◀── write() ──

The broker handles every request as ever; the faults are in what its clients see. They apply to all
connections of a port, also to those that are open already.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from escrowmq.errors import RemoteProtocolError
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.command import Command, decode_command
from escrowmq.remoting.frame import FrameDecoder, encode_frame

Bytes = bytes | bytearray | memoryview

# Requests of applications by what they do: there are several codes for some of them.
REQUEST_CODES: Final[Mapping[str, tuple[RequestCode, ...]]] = {
    "send": (
        *(RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2),
        *(RequestCode.SEND_BATCH_MESSAGE,),
    ),
    "end": (RequestCode.END_TRANSACTION, RequestCode.END_TRANSACTIONS),
    "pull": (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE),
    "send_back": (RequestCode.CONSUMER_SEND_MSG_BACK,),
    "commit_offset": (RequestCode.UPDATE_CONSUMER_OFFSET,),
    "heartbeat": (RequestCode.HEART_BEAT,),
    "route": (RequestCode.GET_ROUTEINFO_BY_TOPIC,),
}
# The first request of connections that have no faults. The broker registers at its own name server
# with the first one: without it, clients would find no broker for a second after each fault. With
# the others the assertions begin, which must not use up a fault.
_FIRST_OF_EXEMPT: Final = frozenset(
    (
        RequestCode.REGISTER_BROKER,
        RequestCode.GET_TOPIC_STATS_INFO,
        RequestCode.LIST_TRANSACTIONS,
        RequestCode.SHOW_TRANSACTION,
    )
)


@dataclass(slots=True)
class _Loss:
    """Responses to lose: to the next `remaining` requests with one of these codes."""

    codes: frozenset[int]
    remaining: int
    lost: int = 0


class ConnectionFaults:
    """The faults of a broker. Use it only on the event loop of the broker."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.refuses_connections = False
        self._losses: dict[int, _Loss] = {}
        self._last_number = 0
        self._connections: set[FaultyConnection] = set()

    def wrap(self, connection: asyncio.Protocol) -> asyncio.Protocol:
        """Return the protocol of a new connection; see `RemotingServer`."""
        return FaultyConnection(self, connection)

    def set_delay(self, seconds: float) -> None:
        """Send each response so much later. What is late already leaves with the first change."""
        self.delay_s = seconds
        for connection in self._connections:
            connection.send_late()

    def refuse_connections(self, refuses: bool) -> None:
        """Close all connections, now and as soon as they are open; or accept them again."""
        self.refuses_connections = refuses
        if refuses:
            for connection in list(self._connections):
                if not connection.is_exempt:
                    connection.abort()

    def begin_loss(self, codes: Collection[int], count: int) -> int:
        """Lose the next `count` responses to requests with these codes. Return a number for it."""
        self._last_number += 1
        self._losses[self._last_number] = _Loss(frozenset(codes), count)
        return self._last_number

    def end_loss(self, number: int) -> int:
        """Lose no more of them. Return how many were lost."""
        return self._losses.pop(number).lost

    def find_loss(self, command: Command) -> _Loss | None:
        """Return what loses the response to this request, and count it; else None."""
        if command.is_response or command.is_oneway:
            return None
        for loss in self._losses.values():
            if command.code in loss.codes and loss.remaining:
                loss.remaining -= 1
                return loss
        return None

    @property
    def has_losses(self) -> bool:
        return bool(self._losses)

    def opened(self, connection: FaultyConnection) -> None:
        self._connections.add(connection)

    def closed(self, connection: FaultyConnection) -> None:
        self._connections.discard(connection)


class FaultyConnection(asyncio.Protocol, asyncio.Transport):
    """The protocol of a socket's transport, and the transport of a connection of the server.

    A response is lost in the way in which networks lose them: the connection breaks before it.
    """

    def __init__(self, faults: ConnectionFaults, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._faults = faults
        self._protocol = protocol
        self._transport: asyncio.Transport  # from connection_made() on
        self._is_refused = False
        self._requests: FrameDecoder[None] | None = FrameDecoder(self._request_received)
        self._responses: FrameDecoder[tuple[int, bytes, bytes]] = FrameDecoder(
            lambda serializer, header, body: (
                *(serializer, header),
                encode_frame(serializer, header, body),
            )
        )
        self.is_exempt = False  # it has no faults
        self._has_received = False
        self._losses: dict[int, _Loss] = {}  # of requests in flight, by opaque
        self._late: deque[tuple[float, bytes]] = deque()  # when to send what

    # --- the protocol of the socket --------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._faults.refuses_connections:
            self._is_refused = True
            self._transport.abort()
            return
        self._faults.opened(self)
        self._protocol.connection_made(self)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._requests is not None:
            try:
                self._requests.receive(data)
                for _ in self._requests.frames():
                    pass
            except RemoteProtocolError:
                self._requests = None  # garbage; the server closes the connection
        self._protocol.data_received(data)

    def _request_received(self, serializer: int, header: bytes, body: memoryview) -> None:
        if self._has_received and not self._faults.has_losses:
            return
        command = decode_command(serializer, header)
        if not self._has_received:
            self._has_received = True
            self.is_exempt = command.code in _FIRST_OF_EXEMPT
        loss = None if self.is_exempt else self._faults.find_loss(command)
        if loss is not None:
            self._losses[command.opaque] = loss

    def eof_received(self) -> bool | None:
        return None if self._is_refused else self._protocol.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._faults.closed(self)
        if not self._is_refused:
            self._protocol.connection_lost(error)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    # --- the transport of the connection ---------------------------------------------------------

    def write(self, data: Bytes) -> None:
        if self.is_closing():
            return
        frames: list[bytes] = []
        self._responses.receive(bytes(data))
        for serializer, header, frame in self._responses.frames():
            if self._losses and self._is_lost(decode_command(serializer, header)):
                self._transport.writelines(frames)
                self._transport.abort()
                return
            frames.append(frame)
        if not self._faults.delay_s or self.is_exempt:
            self._transport.writelines(frames)
            return
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._faults.delay_s
        self._late.extend((due_s, frame) for frame in frames)
        loop.call_at(due_s, self._send_due, due_s)

    def writelines(self, pieces: Iterable[Bytes]) -> None:
        self.write(b"".join(pieces))

    def _is_lost(self, command: Command) -> bool:
        if not command.is_response or command.opaque not in self._losses:
            return False
        for loss in self._losses.values():  # the others in flight are lost with the connection
            loss.lost += 1
        self._losses.clear()
        return True

    def _send_due(self, due_s: float) -> None:
        """Send what is due at this time of the event loop."""
        while self._late and self._late[0][0] <= due_s and not self.is_closing():
            self._transport.write(self._late.popleft()[1])

    def send_late(self) -> None:
        """Send now what is late."""
        self._send_due(math.inf)

    def close(self) -> None:
        self.send_late()
        self._transport.close()

    def abort(self) -> None:
        self._late.clear()
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
        # Without a socket, the server writes to its transport instead, which is this object.
        return default if name == "socket" else self._transport.get_extra_info(name, default)
