"""Sockets: bytes in, turns, bytes out.

One turn of the event loop is one unit of work. Every line that has data hands its requests over;
at the end of the turn the sends of all of them are appended in one write, and every line with
answers is written to once. That is worth more than any other trick here.

A line that does not read its answers is not read from until it does, so what it can hold in
memory is bounded: its own write buffer, and the answers to one chunk of requests. A request must be
here whole as soon as a line may not be silent for longer, however slowly it comes; and if all that
have begun take too much room, the one that began first is given up with its line.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from escrowmq.clock import Clock
from escrowmq.metrics import SECONDS, Distribution
from escrowmq.server.door import Door
from escrowmq.server.line import TcpLine
from escrowmq.server.silence import Silence
from escrowmq.server.tls import Tls
from escrowmq.wire.answers import refuse
from escrowmq.wire.connection import Answer, Connection, Event, Refused
from escrowmq.wire.fastpath import Request

log = logging.getLogger(__name__)

EVENTS_IN_TURN_MAX = 64  # of one line


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens: who connects now is served once there is a Port for it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    bound.setblocking(False)
    return bound


def port_of(bound: socket.socket) -> int:
    """The system's choice, if 0 was asked for."""
    return int(bound.getsockname()[1])


def reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "") else host


class Answering(Protocol):
    """What answers the requests of a port: the broker, or the name server."""

    def handle(self, line: TcpLine, request: Request[Any], now_ms: int) -> None: ...
    def end_turn(self, now_ms: int) -> bool:
        """Whether it wants another turn soon."""

    def line_closed(self, line: TcpLine) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PortLimits:
    lines_max: int = 10_000
    idle_max_s: float = 120
    unsent_bytes_max: int = 256 << 20
    line_unsent_bytes_max: int = 1 << 20  # above it a line is not read from until it reads


@dataclass(frozen=True, slots=True, kw_only=True)
class PortSecurity:
    """`tls`: None where it is not served. `keeps_headers`: somebody checks signatures."""

    tls: Tls | None = None
    enforces_tls: bool = False
    keeps_headers: bool = False


class Port:
    """One listening port and the lines that came through it."""

    def __init__(
        self,
        service: Answering,
        clock: Clock,
        limits: PortLimits = PortLimits(),  # noqa: B008
        security: PortSecurity = PortSecurity(),  # noqa: B008
    ) -> None:
        self._security = security
        self._door: Door | None = None
        self._service = service
        self._clock = clock
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._written: list[TcpLine] = []
        self._turn_scheduled = False
        self.turn_ms, self.turn_s = clock.now_ms(), clock.elapsed_s()  # when this turn began
        self._server: asyncio.Server | None = None
        self._unsent: dict[TcpLine, int] = {}  # bytes that a line's peer has not read yet
        self._held: set[TcpLine] = set()  # not read from, because of what all lines hold
        self._silence: Silence[TcpLine] = Silence(limits.idle_max_s, now_s=clock.elapsed_s())
        self._partial: dict[TcpLine, float] = {}  # since when a part of a request is here, in order
        self.partial_bytes = 0
        self.dropped_partial = 0
        self.lines: set[TcpLine] = set()
        self.refused_lines = 0
        self.refused_requests: defaultdict[int, int] = defaultdict(int)  # by response code
        self.turn_seconds = Distribution(SECONDS)
        self._asking: set[TcpLine] = set()  # that wait for answers of their peers

    async def listen(self, bound: socket.socket) -> None:
        tls = self._security.tls
        if tls is not None:
            self._door = Door(
                lambda: TcpLine(self),
                lambda: tls.context,
                enforcing=self._security.enforces_tls,
                silent_max_s=self._limits.idle_max_s,
                has_room=self._has_room,
            )
            self._door.open(bound)
            return
        self._server = await self._loop.create_server(lambda: TcpLine(self), sock=bound)

    async def close(self) -> None:
        """No new lines; what is under way is answered, then every line is closed."""
        self.stop_reading()
        self.end_turn()
        for line in list(self.lines):
            line.close()
        await asyncio.sleep(0)

    def stop_reading(self) -> None:
        """No new lines, and nothing more from those there are."""
        if self._server is not None:
            self._server.close()
        if self._door is not None:
            self._door.close()
        for line in self.lines:
            line.hold(True)

    def refused_at_door(self) -> int:
        """Connections that ended before they were lines: without TLS, or with a bad one."""
        return 0 if self._door is None else self._door.refused

    def _has_room(self, entering: int) -> bool:
        if len(self.lines) + entering < self._limits.lines_max:
            return True
        self.refused_lines += 1
        return False

    # --- for its lines ---------------------------------------------------------------------------

    def admit(self, line: TcpLine) -> bool:
        if len(self.lines) >= self._limits.lines_max:
            self.refused_lines += 1
            return False
        self.lines.add(line)
        self._silence.watch(line)
        return True

    def handle_some(self, line: TcpLine, events: Iterator[Event]) -> bool:
        """What came in one chunk; answers leave at the end of the turn. False: there is more of it
        than one line may have of a turn."""
        handle, now_ms, left = self._service.handle, self.turn_ms, EVENTS_IN_TURN_MAX
        for event in events:
            if type(event) is Request:
                handle(line, event, now_ms)
            elif type(event) is Refused:
                self.refused_requests[event.error.code] += 1
                line.write(refuse(event.request, event.error))
            elif type(event) is Answer:
                line.answered(event)
            left -= 1
            if not left:
                return False
        return True

    def call_soon(self, step: Callable[[], None]) -> None:
        self._loop.call_soon(step)

    def gone(self, line: TcpLine) -> None:
        self._unsent.pop(line, None)
        self._forget_partial(line)
        if line in self.lines:
            self.lines.discard(line)
            self._held.discard(line)
            self._asking.discard(line)
            self._silence.forget(line)
            self._service.line_closed(line)

    def partly_read(self, line: TcpLine, before: tuple[int, int]) -> None:
        """Its chunk ended inside a request, or such a one is whole now."""
        now_bytes, number = line.partial
        self.partial_bytes += now_bytes - before[0]
        if not now_bytes or number != before[1]:
            self._partial.pop(line, None)
        if now_bytes:
            self._partial.setdefault(line, line.active_s)
        while self.partial_bytes > self._limits.unsent_bytes_max and self._partial:
            self._drop_partial(next(iter(self._partial)), "too much waits for its end")

    def _drop_partial(self, line: TcpLine, why: str) -> None:
        log.warning("line closed peer=%s: half a request, and %s", line.peer, why)
        self.dropped_partial += 1
        self._forget_partial(line)
        line.drop()

    def _forget_partial(self, line: TcpLine) -> None:
        self._partial.pop(line, None)
        self.partial_bytes -= line.partial[0]
        line.partial = 0, 0

    def written(self, line: TcpLine) -> None:
        """This line has something to send at the end of the turn."""
        self._written.append(line)
        self.turn_soon()

    def turn_soon(self) -> None:
        if not self._turn_scheduled:
            self._turn_scheduled = True
            self.turn_ms, self.turn_s = self._clock.now_ms(), self._clock.elapsed_s()
            self._loop.call_soon(self.end_turn)

    def end_turn(self) -> None:
        wants_more = False
        try:
            wants_more = self._service.end_turn(self.turn_ms)
        except Exception:  # a bug of ours must not keep back the answers of others
            log.exception("a turn failed")
        written, self._written = self._written, []
        was_scheduled = self._turn_scheduled
        self._turn_scheduled = False  # only now: what was written so far leaves with this turn
        for line in written:
            unsent = line.flush()
            if unsent:
                self._unsent[line] = unsent
                if sum(self._unsent.values()) > self._limits.unsent_bytes_max:
                    self._held.add(line)
                    line.hold(True)
        if was_scheduled:
            self.turn_seconds.observe(self._clock.elapsed_s() - self.turn_s)
        if wants_more:
            self.turn_soon()  # after those whose requests have come by then

    def look_after_lines(self) -> None:
        """Now and then: close the silent ones, read on from those that were held."""
        for line in self._silence.silent(self._clock.elapsed_s()):
            log.info("line closed peer=%s: silent for %d s", line.peer, self._limits.idle_max_s)
            line.drop()
        began_before_s = self._clock.elapsed_s() - self._limits.idle_max_s
        while self._partial and (first := next(iter(self._partial.items())))[1] < began_before_s:
            self._drop_partial(first[0], "the rest did not come")
        self._unsent = {line: unsent for line in self._unsent if (unsent := line.unsent_bytes())}
        if sum(self._unsent.values()) <= self._limits.unsent_bytes_max:
            while self._held:
                self._held.pop().hold(False)
        self._asking = {line for line in self._asking if line.expire_calls(self.elapsed_s())}

    def change_limits(self, limits: PortLimits) -> None:
        """From now on; lines that are open stay, and how long one may be silent stays as it was."""
        self._limits = limits

    def asks(self, line: TcpLine) -> None:
        self._asking.add(line)

    def unsent_bytes(self) -> int:
        return sum(line.unsent_bytes() for line in self._unsent)

    def elapsed_s(self) -> float:
        return self._clock.elapsed_s()

    def new_connection(self) -> Connection:
        return Connection(keeps_headers=self._security.keeps_headers)

    def line_unsent_bytes_max(self) -> int:
        return self._limits.line_unsent_bytes_max
