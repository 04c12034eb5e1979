"""One connection to a name server or a broker.

The connections of one client, by address: made when they are wanted, one each.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable
from typing import Any, Final, NamedTuple, cast

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
from escrowmq.remoting.codes import request_name
from escrowmq.remoting.command import Command
from escrowmq.remoting.connection import Answer, Connection, Fields, Refused, Sign
from escrowmq.remoting.requests import Body, Request
from escrowmq.remoting.responses import refuse

log = logging.getLogger(__name__)

CONNECT_S: Final = 3.0
SWEEP_S: Final = 0.1  # how often calls are looked for whose time is over


class Reply(NamedTuple):
    code: int
    remark: str
    ext_fields: dict[str, str]
    body: Body


# What the other side asks of us: a check, a change of members. The line it came by is told along.
Asked = Callable[["Line", Request[Any]], None]


class Line(asyncio.Protocol):
    """Calls and their answers; a call ends with an answer, or with an error that says which."""

    def __init__(self, address: str, asked: Asked, clock: Clock, sign: Sign | None = None) -> None:
        self.address = address
        self._asked = asked
        self._clock = clock
        self._connection = Connection(sign=sign)
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[tuple[Command, Body]]] = {}
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._outgoing: list[bytes] = []  # of this turn of the loop
        self._has_written = False  # in this turn
        self._sweeping = False
        self.is_open = True

    @classmethod
    async def connect(
        cls,
        address: str,
        asked: Asked,
        clock: Clock,
        *,
        sign: Sign | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> Line:
        host, _, port = address.rpartition(":")
        line = cls(address, asked, clock, sign)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.create_connection(lambda: line, host.strip("[]"), int(port), ssl=tls)
        except (OSError, ValueError, TimeoutError) as error:
            raise NotSent(f"{address} cannot be reached: {error or 'no answer'}") from error
        return line

    # --- asking ----------------------------------------------------------------------------------

    async def call(
        self, code: int, fields: Fields = None, body: Body = b"", *, timeout_s: float
    ) -> Reply:
        """The answer, whatever it says. Raises NotSent or OutcomeUnknown if there is none."""
        if not self._may_write.is_set():
            await self._may_write.wait()
        if self._transport is None:
            raise NotSent(f"{self.address}: the connection is closed")
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        call, data = self._connection.call(code, fields, body, deadline_s=deadline_s)
        answered = loop.create_future()
        self._waiting[call.opaque] = answered
        self._write(data)
        if not self._sweeping:
            self._sweeping = True
            loop.call_later(SWEEP_S, self._sweep, loop)
        try:
            command, answer_body = await answered
        finally:
            del self._waiting[call.opaque]
            self._connection.forget(call)
        return Reply(command.code, command.remark, command.ext_fields, answer_body)

    async def ask(
        self, code: int, fields: Fields = None, body: Body = b"", *, timeout_s: float
    ) -> Reply:
        """The same; any code but success is raised as RequestRefused."""
        reply = await self.call(code, fields, body, timeout_s=timeout_s)
        if reply.code:
            raise RequestRefused(reply.code, reply.remark or f"{self.address}: code {reply.code}")
        return reply

    def post(self, code: int, fields: Fields = None, body: Body = b"", *, remark: str = "") -> None:
        """One way. Raises NotSent."""
        if self._transport is None:
            raise NotSent(f"{self.address}: the connection is closed")
        self._write(self._connection.post(code, fields, body, remark=remark))

    async def room(self) -> None:
        """For whoever posts much: wait until the other side has read some of it."""
        await self._may_write.wait()

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

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """One timer for all calls of the line: there may be thousands, and few are ever late."""
        for failed in self._connection.expire(now_s=loop.time()):
            answered = self._waiting.get(failed.call.opaque)
            if answered is not None and not answered.done():
                name = request_name(failed.call.code)
                answered.set_exception(
                    OutcomeUnknown(f"{self.address}: no answer to {name} in time")
                )
        self._sweeping = bool(self._waiting)
        if self._sweeping:
            loop.call_later(SWEEP_S, self._sweep, loop)

    # --- asyncio ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._connection.receive(data)
            for event in self._connection.events():
                if isinstance(event, Answer):
                    answered = self._waiting.get(event.call.opaque)
                    if answered is not None and not answered.done():
                        answered.set_result((event.command, event.body))
                elif isinstance(event, Request):
                    self._asked(self, event)
                elif isinstance(event, Refused):
                    self.write(refuse(event.request, event.error))
        except RemoteProtocolError as error:
            log.warning("line closed address=%s: %s", self.address, error)
            self.close()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._transport = None
        self._may_write.set()
        self._connection.close()
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_exception(
                    OutcomeUnknown(f"{self.address}: the connection closed before the answer")
                )


class Lines:
    def __init__(self, asked: Asked, clock: Clock, access: Access | None = None) -> None:
        shown = access or NO_ACCESS
        self._sign = shown.signer()
        self._tls = shown.context()
        self._asked = asked
        self._clock = clock
        self._lines: dict[str, asyncio.Task[Line]] = {}
        self._process_id = os.getpid()
        self._is_closed = False

    async def to(self, address: str) -> Line:
        """Raises NotSent. Whoever asks while it is being made waits for the same one."""
        self._refuse_if_forked()
        making = self._lines.get(address)
        if making is None or _is_over(making):
            making = asyncio.ensure_future(
                Line.connect(address, self._asked, self._clock, sign=self._sign, tls=self._tls)
            )
            self._lines[address] = making
        # Not cancelled with one of those who wait for it.
        return await asyncio.shield(making)

    def open_ones(self) -> list[Line]:
        return [
            task.result() for task in self._lines.values() if task.done() and not _is_over(task)
        ]

    async def close(self) -> None:
        self._is_closed = True
        for task in self._lines.values():
            if _is_over(task):
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

    def _refuse_if_forked(self) -> None:
        if self._is_closed:
            raise ClientClosed("this client is closed: make another one")
        if os.getpid() != self._process_id:
            raise WrongProcess(
                "this client was made in another process (fork): its connections are the parent's; "
                "make a client in each child; those of escrowmq.blocking do it by themselves"
            )


def _is_over(making: asyncio.Task[Line]) -> bool:
    """Whether it failed, or what it made is closed by now."""
    if not making.done():
        return False
    if making.cancelled() or making.exception() is not None:
        return True
    return not making.result().is_open
