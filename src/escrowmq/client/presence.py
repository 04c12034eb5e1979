"""Be known to the brokers: a broker can ask only those producers that it knows.

A line is introduced before anything is sent by it, and again every half minute. Whoever has
checkers is introduced to every broker there is, although it has nothing to send, and to one that
comes back at once: an earlier process of its group may have left a transaction open there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final
from weakref import WeakKeyDictionary

from escrowmq.client.line import Line
from escrowmq.client.lines import Lines
from escrowmq.client.routes import Routes
from escrowmq.errors import EscrowError
from escrowmq.wire.bodies import Heartbeat, ProducerEntry, encode_body
from escrowmq.wire.codes import RequestCode, ResponseCode
from escrowmq.wire.headers_transaction import WriterName

log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 30.0
LOOK_S: Final = (
    1.0  # so often: is a connection lost? And so soon after a failure, it is tried again
)


class Presence:
    def __init__(
        self,
        group: str,
        client_id: str,
        lines: Lines,
        routes: Routes,
        *,
        timeout_s: float,
        heartbeat_s: float,
        has_checkers: Callable[[], bool],
    ) -> None:
        beat = Heartbeat(client_id=client_id, producer_data_set=[ProducerEntry(group_name=group)])
        self._beat = encode_body(beat)
        self._lines = lines
        self._routes = routes
        self._timeout_s = timeout_s
        self._heartbeat_s = heartbeat_s
        self._has_checkers = has_checkers
        self._introduced: dict[str, Line] = {}  # by address
        self._introducing: dict[Line, asyncio.Task[None]] = {}
        self._is_ours: WeakKeyDictionary[Line, bool] = WeakKeyDictionary()
        self._wanted = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    # --- lines -----------------------------------------------------------------------------------

    def ready(self, address: str) -> Line | None:
        """A line that needs no waiting."""
        line = self._introduced.get(address)
        return line if line is not None and line.is_open and self._lines.is_usable else None

    async def line(self, address: str) -> Line:
        """Raises TransportError, or RequestRefused if the broker does not want us."""
        line = await self._lines.to(address)
        self.begin()
        if self._introduced.get(address) is not line:
            introducing = self._introducing.get(line)
            if introducing is None:
                introducing = asyncio.ensure_future(self._introduce(line))
                self._introducing[line] = introducing
                introducing.add_done_callback(lambda task: self._met(line, task))
            await asyncio.shield(introducing)
        return line

    async def is_ours(self, line: Line) -> bool:
        """Whether this broker remembers how transactions ended: an end may be repeated, a delay
        counts from the commit. Told by a request that RocketMQ's brokers do not know."""
        known = self._is_ours.get(line)
        if known is None:
            fields = WriterName(writer="-")
            code = RequestCode.QUERY_WRITER
            reply = await line.call(code, fields, timeout_s=self._timeout_s)
            known = reply.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED
            self._is_ours[line] = known
        return known

    async def _introduce(self, line: Line) -> None:
        await line.ask(RequestCode.HEART_BEAT, body=self._beat, timeout_s=self._timeout_s)
        self._introduced[line.address] = line

    def _met(self, line: Line, introducing: asyncio.Task[None]) -> None:
        del self._introducing[line]
        if not introducing.cancelled():
            introducing.exception()  # those who waited have it

    # --- now and then ----------------------------------------------------------------------------

    def begin(self) -> None:
        if self._keeping is None:
            self._keeping = asyncio.ensure_future(self._keep())

    def want(self) -> None:
        """There is a new checker: all brokers should know of it now."""
        self._wanted.set()

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = look_s = min(LOOK_S, self._heartbeat_s)
        beat_s = loop.time() + self._heartbeat_s
        while True:
            is_well = await self._announce()
            pause_s = self._heartbeat_s if is_well else min(2 * pause_s, self._heartbeat_s)
            await self._wait(pause_s, look_s)
            if loop.time() >= beat_s:  # whether all brokers are there or not
                beat_s = loop.time() + self._heartbeat_s
                await self._routes.refresh()
                await self._beat_all()

    async def _wait(self, seconds: float, look_s: float) -> None:
        """So long, or less if there is a reason to look around at once."""
        for _ in range(round(seconds / look_s)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(look_s):
                    await self._wanted.wait()
            if self._wanted.is_set():
                self._wanted.clear()
                return
            if self._has_checkers() and not all(one.is_open for one in self._introduced.values()):
                return  # a broker that comes back has questions

    async def _announce(self) -> bool:
        """To all brokers, if they may ask us. False: somebody was not there."""
        self._introduced = {at: line for at, line in self._introduced.items() if line.is_open}
        if not self._has_checkers():
            return True
        is_well = True
        try:
            addresses = await self._routes.all_masters()
        except EscrowError as error:
            log.warning("no name server says which brokers there are: %s", error)
            return False
        for address in addresses:
            try:
                await self.line(address)
            except EscrowError as error:
                is_well = False
                log.warning("not known to a broker yet: %s", error)
        return is_well

    async def _beat_all(self) -> None:
        for line in list(self._introduced.values()):
            try:
                await self._introduce(line)
            except EscrowError as error:
                log.warning("heartbeat not answered address=%s: %s", line.address, error)
