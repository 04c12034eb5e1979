"""Connections of a client: one asyncio connection with its calls, and the pool of a client."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable
from typing import Any, Final, cast

from escrowmq.client.access import NO_ACCESS, Access
from escrowmq.client.wrong_address import describe_connect_error, describe_strange_server
from escrowmq.errors import (
    ClientClosed,
    NotSent,
    OutcomeUnknown,
    RemoteProtocolError,
    RequestRefused,
    WrongEventLoop,
    WrongProcess,
)
from escrowmq.parsing import parse_address
from escrowmq.remoting.codes import request_name
from escrowmq.remoting.command import Command
from escrowmq.remoting.connection import (
    Connection,
    InvalidRequest,
    Reply,
    RequestFields,
    Response,
    SignFunction,
)
from escrowmq.remoting.foreign_protocols import FOREIGN_BYTES
from escrowmq.remoting.requests import Body, Request
from escrowmq.remoting.responses import encode_error

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 3.0
RESPONSE_TIMEOUT_S: Final = 3.0  # for requests whose timeout users cannot set
# Responses to requests of a broker that it has not read. A broker sends few requests and waits for
# each response, so one that lets this much gather reads nothing.
UNREAD_BYTES_MAX: Final = 32 << 20
SWEEP_INTERVAL_S: Final = 0.1  # how often a connection looks for calls that have timed out


# Handles a request from the broker, such as a transaction check or a change of group members. The
# connection it arrived on is the one to respond on.
RequestCallback = Callable[["ClientConnection", Request[Any]], None]


class ClientConnection(asyncio.Protocol):
    """One connection to a broker or a name server.

    Every call ends exactly once: with a Reply, or with NotSent or OutcomeUnknown.
    """

    def __init__(
        self,
        address: str,
        on_request: RequestCallback,
        sign: SignFunction | None = None,
    ) -> None:
        self.address = address
        self._on_request = on_request
        self._protocol = Connection(sign=sign)
        self._transport: asyncio.Transport | None = None
        self._pending: dict[int, asyncio.Future[tuple[Command, Body]]] = {}  # by opaque
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._outgoing: list[bytes] = []  # collected in this turn of the event loop
        self._has_written = False  # something was written in this turn
        self._is_sweeping = False
        # What it has sent until its first valid frame: if there is none, it says what it is.
        self._first_bytes: bytearray | None = bytearray()
        self.is_open = True
        self.is_escrowmq: bool | None = None  # set by `heartbeat.is_escrowmq`

    @classmethod
    async def connect(
        cls,
        address: str,
        on_request: RequestCallback,
        *,
        sign: SignFunction | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> ClientConnection:
        """Connect to `host:port`. Raises NotSent after CONNECT_TIMEOUT_S, or if it fails."""
        connection = cls(address, on_request, sign)
        loop = asyncio.get_running_loop()
        try:
            host, port = parse_address(address)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.create_connection(lambda: connection, host, port, ssl=ssl_context)
        except OSError as error:  # TimeoutError and ssl.SSLError are two
            log.debug("connection failed address=%s", address, exc_info=True)
            raise NotSent(
                describe_connect_error(
                    address, error, timeout_s=CONNECT_TIMEOUT_S, has_tls=ssl_context is not None
                )
            ) from None
        except ValueError as error:  # the name of the host is impossible
            raise NotSent(f"{address} cannot be reached: {error}") from None
        return connection

    # --- calls -----------------------------------------------------------------------------------

    async def call(
        self,
        code: int,
        fields: RequestFields = None,
        body: Body = b"",
        *,
        timeout_s: float,
        remark: str = "",
    ) -> Reply:
        """Send a request and return the response, whatever its code.

        Raises NotSent if the connection is closed, and OutcomeUnknown if no response arrives
        within `timeout_s` or the connection closes before it does.
        """
        if not self._can_write.is_set():
            await self.drain(timeout_s)
        if self._transport is None:
            raise NotSent(f"the connection to {self.address} is closed")
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        call, data = self._protocol.call(code, fields, body, deadline_s=deadline_s, remark=remark)
        response = loop.create_future()
        self._pending[call.opaque] = response
        self._write(data)
        if not self._is_sweeping:
            self._is_sweeping = True
            loop.call_later(SWEEP_INTERVAL_S, self._expire_calls, loop)
        try:
            command, response_body = await response
        finally:
            del self._pending[call.opaque]
            self._protocol.cancel(call)
        return Reply(
            command.code, command.remark, command.ext_fields, response_body, command.version
        )

    async def call_checked(
        self, code: int, fields: RequestFields = None, body: Body = b"", *, timeout_s: float
    ) -> Reply:
        """Send a request and return the response; raise RequestRefused unless it is a success."""
        reply = await self.call(code, fields, body, timeout_s=timeout_s)
        if reply.code:
            raise RequestRefused(reply.code, reply.remark or f"{self.address}: code {reply.code}")
        return reply

    def send_oneway(
        self, code: int, fields: RequestFields = None, body: Body = b"", *, remark: str = ""
    ) -> None:
        """Send a request that gets no response. Raises NotSent if the connection is closed."""
        if self._transport is None:
            raise NotSent(f"the connection to {self.address} is closed")
        self._write(self._protocol.send_oneway(code, fields, body, remark=remark))

    async def drain(self, timeout_s: float = RESPONSE_TIMEOUT_S) -> None:
        """Wait until the socket's buffer has room. Call it before many one-way requests.

        Raises NotSent after `timeout_s`, and gives the connection up: the peer reads nothing.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._can_write.wait()
        except TimeoutError:
            self._abort()
            raise NotSent(f"{self.address} has read nothing for {timeout_s:g} s") from None

    def write(self, data: bytes) -> None:
        """Write an encoded response to a request of the broker. Ignored once closed.

        Nothing waits here, so a broker that reads no responses loses the connection.
        """
        transport = self._transport
        if transport is None or not data:
            return
        if not self._can_write.is_set():
            unread_bytes = transport.get_write_buffer_size() + sum(map(len, self._outgoing))
            if unread_bytes + len(data) > UNREAD_BYTES_MAX:
                log.warning(
                    "connection closed address=%s: it has not read %d bytes of responses",
                    self.address,
                    unread_bytes,
                )
                self._abort()
                return
        self._write(data)

    def close(self) -> None:
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _abort(self) -> None:
        """Give the connection up at once, without waiting for a peer that may read nothing."""
        if self._transport is not None:
            self._transport.abort()

    def _write(self, data: bytes) -> None:
        # The first write of a turn goes to the socket at once, so that a single call is not
        # delayed. The following ones of the same turn are joined into one write.
        if self._has_written:
            self._outgoing.append(data)
        elif self._transport is not None:
            self._has_written = True
            asyncio.get_running_loop().call_soon(self._flush)
            self._transport.write(data)

    def _flush(self) -> None:
        self._has_written = False
        outgoing, self._outgoing = self._outgoing, []
        if outgoing and self._transport is not None:
            self._transport.write(outgoing[0] if len(outgoing) == 1 else b"".join(outgoing))

    def _expire_calls(self, loop: asyncio.AbstractEventLoop) -> None:
        # One timer serves all calls of a connection: thousands may be pending, and few ever
        # time out, so a timer for each call would be wasted.
        for failed in self._protocol.expire(now_s=loop.time()):
            response = self._pending.get(failed.call.opaque)
            if response is not None and not response.done():
                name = request_name(failed.call.code)
                response.set_exception(
                    OutcomeUnknown(
                        f"{self.address} did not respond to {name} in time"
                        f"{self._hint() if self._first_bytes else ''}"
                    )
                )
        self._is_sweeping = bool(self._pending)
        if self._is_sweeping:
            loop.call_later(SWEEP_INTERVAL_S, self._expire_calls, loop)

    # --- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._first_bytes is not None and len(self._first_bytes) < FOREIGN_BYTES:
            self._first_bytes += data[:FOREIGN_BYTES]
        try:
            self._protocol.receive(data)
            for event in self._protocol.events():
                self._first_bytes = None
                if isinstance(event, Response):
                    response = self._pending.get(event.call.opaque)
                    if response is not None and not response.done():
                        response.set_result((event.command, event.body))
                elif isinstance(event, Request):
                    self._on_request(self, event)
                elif isinstance(event, InvalidRequest):
                    self.write(encode_error(event.request, event.error))
        except RemoteProtocolError as error:
            log.warning(
                "connection closed address=%s: protocol error: %s%s",
                self.address,
                error,
                self._hint(),
            )
            self._abort()
        except Exception:
            # A bug, or a request that no handler expected. What follows in the stream is lost.
            log.exception("connection closed address=%s: a request failed", self.address)
            self._abort()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._transport = None
        self._can_write.set()
        self._protocol.close()
        for response in self._pending.values():
            if not response.done():
                response.set_exception(
                    OutcomeUnknown(
                        f"the connection to {self.address} closed before the response{self._hint()}"
                    )
                )

    def _hint(self) -> str:
        """Return what to look at if the server has never sent a valid response here."""
        if self._first_bytes is None:
            return ""
        return f"; {describe_strange_server(self._first_bytes)}"


class ConnectionPool:
    """The connections of one client: one for each address, made when it is first needed."""

    def __init__(self, on_request: RequestCallback, access: Access | None = None) -> None:
        access = access or NO_ACCESS
        self._access = access
        self._ssl_context = access.ssl_context()
        self._on_request = on_request
        self._connections: dict[str, asyncio.Task[ClientConnection]] = {}  # by address
        self._process_id = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None  # of the connections, once there is one
        self._is_closed = False

    async def get(self, address: str) -> ClientConnection:
        """Return the open connection to an address, connecting if there is none.

        Raises NotSent if it cannot connect, ClientClosed, WrongProcess after a fork, or
        WrongEventLoop.
        """
        self.check_usable()
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        task = self._connections.get(address)
        if task is None or _has_ended(task):
            task = asyncio.ensure_future(
                ClientConnection.connect(
                    address,
                    self._on_request,
                    sign=self._access.signer(),
                    ssl_context=self._ssl_context,
                )
            )
            self._connections[address] = task
        # Callers share the attempt. The shield keeps it alive if one of them is cancelled.
        return await asyncio.shield(task)

    async def close(self) -> None:
        self._is_closed = True
        for task in self._connections.values():
            if _has_ended(task):
                continue
            if task.done():
                task.result().close()
            else:
                task.cancel()
        await asyncio.sleep(0)  # let the transports write what they still hold

    @property
    def is_usable(self) -> bool:
        """Whether the pool is open, and belongs to this process and event loop."""
        return (
            not self._is_closed
            and os.getpid() == self._process_id
            and self._loop is asyncio.get_running_loop()
        )

    def check_usable(self) -> None:
        """Raise ClientClosed, WrongProcess or WrongEventLoop if the client cannot be used here."""
        if self._is_closed:
            raise ClientClosed("this client is closed; create a new one")
        self.check_owner()

    def check_owner(self) -> None:
        """Raise WrongProcess or WrongEventLoop if the client belongs to another one."""
        if os.getpid() != self._process_id:
            raise WrongProcess(
                "this client was created before a fork and its connections belong to the parent "
                "process; create a client in each child (producers of escrowmq.blocking reconnect "
                "by themselves)"
            )
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            raise WrongEventLoop(
                "this client is connected in another event loop; create a client in each "
                "asyncio.run(), or use escrowmq.blocking"
            )


def _has_ended(task: asyncio.Task[ClientConnection]) -> bool:
    """Return whether the attempt failed, or its connection has been closed since."""
    if not task.done():
        return False
    if task.cancelled() or task.exception() is not None:
        return True
    return not task.result().is_open
