"""One connection to a name server or a broker.

The connections of one client, by address: made when they are wanted, one each.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable
from typing import Any, Final, cast

from escrowmq.client.access import NO_ACCESS, Access
from escrowmq.clock import Clock
from escrowmq.errors import (
    ClientClosed,
    NotSent,
    OutcomeUnknown,
    RemoteProtocolError,
    RequestRefused,
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
from escrowmq.remoting.requests import Body, Request
from escrowmq.remoting.responses import encode_error

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 3.0
SWEEP_INTERVAL_S: Final = 0.1  # how often calls are looked for whose time is over


# What the other side asks of us: a check, a change of members. The line it came by is told along.
RequestCallback = Callable[["ClientConnection", Request[Any]], None]


class ClientConnection(asyncio.Protocol):
    """Calls and their answers; a call ends with an answer, or with an error that says which."""

    def __init__(
        self,
        address: str,
        on_request: RequestCallback,
        clock: Clock,
        sign: SignFunction | None = None,
    ) -> None:
        self.address = address
        self._on_request = on_request
        self._clock = clock
        self._connection = Connection(sign=sign)
        self._transport: asyncio.Transport | None = None
        self._pending: dict[int, asyncio.Future[tuple[Command, Body]]] = {}
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._outgoing: list[bytes] = []  # of this turn of the loop
        self._has_written = False  # in this turn
        self._is_sweeping = False
        self.is_open = True

    @classmethod
    async def connect(
        cls,
        address: str,
        on_request: RequestCallback,
        clock: Clock,
        *,
        sign: SignFunction | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> ClientConnection:
        line = cls(address, on_request, clock, sign)
        loop = asyncio.get_running_loop()
        try:
            host, port = parse_address(address)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.create_connection(lambda: line, host, port, ssl=ssl_context)
        except (OSError, ValueError, TimeoutError) as error:
            raise NotSent(f"{address} cannot be reached: {error or 'no answer'}") from error
        return line

    # --- asking ----------------------------------------------------------------------------------

    async def call(
        self, code: int, fields: RequestFields = None, body: Body = b"", *, timeout_s: float
    ) -> Reply:
        """The answer, whatever it says. Raises NotSent or OutcomeUnknown if there is none."""
        if not self._can_write.is_set():
            await self._can_write.wait()
        if self._transport is None:
            raise NotSent(f"{self.address}: the connection is closed")
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        call, data = self._connection.call(code, fields, body, deadline_s=deadline_s)
        answered = loop.create_future()
        self._pending[call.opaque] = answered
        self._write(data)
        if not self._is_sweeping:
            self._is_sweeping = True
            loop.call_later(SWEEP_INTERVAL_S, self._expire_calls, loop)
        try:
            command, answer_body = await answered
        finally:
            del self._pending[call.opaque]
            self._connection.cancel(call)
        return Reply(command.code, command.remark, command.ext_fields, answer_body, command.version)

    async def call_checked(
        self, code: int, fields: RequestFields = None, body: Body = b"", *, timeout_s: float
    ) -> Reply:
        """The same; any code but success is raised as RequestRefused."""
        reply = await self.call(code, fields, body, timeout_s=timeout_s)
        if reply.code:
            raise RequestRefused(reply.code, reply.remark or f"{self.address}: code {reply.code}")
        return reply

    def send_oneway(
        self, code: int, fields: RequestFields = None, body: Body = b"", *, remark: str = ""
    ) -> None:
        """One way. Raises NotSent."""
        if self._transport is None:
            raise NotSent(f"{self.address}: the connection is closed")
        self._write(self._connection.send_oneway(code, fields, body, remark=remark))

    async def drain(self) -> None:
        """For whoever posts much: wait until the other side has read some of it."""
        await self._can_write.wait()

    def write(self, data: bytes) -> None:
        """An answer to what was asked."""
        if self._transport is not None and data:
            self._write(data)

    def close(self) -> None:
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _write(self, data: bytes) -> None:
        """The first of a turn goes at once, for who has only one; the others go together."""
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
        """One timer for all calls of the line: there may be thousands, and few are ever late."""
        for failed in self._connection.expire(now_s=loop.time()):
            answered = self._pending.get(failed.call.opaque)
            if answered is not None and not answered.done():
                name = request_name(failed.call.code)
                answered.set_exception(
                    OutcomeUnknown(f"{self.address}: no answer to {name} in time")
                )
        self._is_sweeping = bool(self._pending)
        if self._is_sweeping:
            loop.call_later(SWEEP_INTERVAL_S, self._expire_calls, loop)

    # --- asyncio ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._connection.receive(data)
            for event in self._connection.events():
                if isinstance(event, Response):
                    answered = self._pending.get(event.call.opaque)
                    if answered is not None and not answered.done():
                        answered.set_result((event.command, event.body))
                elif isinstance(event, Request):
                    self._on_request(self, event)
                elif isinstance(event, InvalidRequest):
                    self.write(encode_error(event.request, event.error))
        except RemoteProtocolError as error:
            log.warning("line closed address=%s: %s", self.address, error)
            self.close()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._transport = None
        self._can_write.set()
        self._connection.close()
        for answered in self._pending.values():
            if not answered.done():
                answered.set_exception(
                    OutcomeUnknown(f"{self.address}: the connection closed before the answer")
                )


class ConnectionPool:
    def __init__(
        self, on_request: RequestCallback, clock: Clock, access: Access | None = None
    ) -> None:
        shown = access or NO_ACCESS
        self._sign = shown.signer()
        self._ssl_context = shown.ssl_context()
        self._on_request = on_request
        self._clock = clock
        self._connections: dict[str, asyncio.Task[ClientConnection]] = {}
        self._process_id = os.getpid()
        self._is_closed = False

    async def get(self, address: str) -> ClientConnection:
        """Raises NotSent. Whoever asks while it is being made waits for the same one."""
        self._check_usable()
        making = self._connections.get(address)
        if making is None or _has_ended(making):
            making = asyncio.ensure_future(
                ClientConnection.connect(
                    address,
                    self._on_request,
                    self._clock,
                    sign=self._sign,
                    ssl_context=self._ssl_context,
                )
            )
            self._connections[address] = making
        # Not cancelled with one of those who wait for it.
        return await asyncio.shield(making)

    def open_connections(self) -> list[ClientConnection]:
        return [
            task.result()
            for task in self._connections.values()
            if task.done() and not _has_ended(task)
        ]

    async def close(self) -> None:
        self._is_closed = True
        for task in self._connections.values():
            if _has_ended(task):
                continue
            if task.done():
                task.result().close()
            else:
                task.cancel()
        await asyncio.sleep(0)  # what was written leaves

    @property
    def is_usable(self) -> bool:
        """Not closed, and not in a child of the process that made it."""
        return not self._is_closed and os.getpid() == self._process_id

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ClientClosed("this client is closed: make another one")
        if os.getpid() != self._process_id:
            raise WrongProcess(
                "this client was made in another process (fork): its connections are the parent's; "
                "make a client in each child; those of escrowmq.blocking do it by themselves"
            )


def _has_ended(connecting: asyncio.Task[ClientConnection]) -> bool:
    """Whether it failed, or what it made is closed by now."""
    if not connecting.done():
        return False
    if connecting.cancelled() or connecting.exception() is not None:
        return True
    return not connecting.result().is_open
