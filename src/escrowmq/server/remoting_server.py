"""Sockets: bytes in, turns, bytes out.

One turn of the event loop is one unit of work. Every line that has data hands its requests over;
at the end of the turn the sends of all of them are appended in one write, and every line with
answers is written to once. That is worth more than any other trick here.

A line that does not read its answers is not read from until it does, so what it can hold in
memory is bounded: its own write buffer, and the answers to one chunk of requests. A request must be
here whole as soon as a line may not be silent for longer, however slowly it comes; and if all that
have begun take too much room, the one that began first is given up with its line.

One connection of a server: bytes to requests, answers to bytes, bounded both ways.

Which lines have been silent for too long, found by looking only at those that may have been.

A line is noted under the second in which it will have been silent for too long if nothing comes
from it. When that second is over, it has been, or it is noted again for later: one look at a line
in each such span, however many lines there are, and nothing to do when data comes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

from escrowmq.clock import Clock
from escrowmq.errors import NotSent, RemoteProtocolError
from escrowmq.message.keys import encode_host
from escrowmq.metrics import SECONDS, Distribution
from escrowmq.remoting.command import Command
from escrowmq.remoting.connection import Answer, Call, Connection, Event, Failed, Refused
from escrowmq.remoting.headers import Header
from escrowmq.remoting.requests import Body, Request
from escrowmq.remoting.responses import refuse
from escrowmq.server.security import Door, Tls

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


class Heard(Hashable, Protocol):
    active_s: float  # when something came last


L = TypeVar("L", bound=Heard)


class Silence(Generic[L]):
    def __init__(self, idle_max_s: float, *, now_s: float) -> None:
        self._idle_max_s = idle_max_s
        self._looked_s = int(now_s)
        self._due: dict[int, set[L]] = {}
        self._due_of: dict[L, int] = {}

    def watch(self, line: L) -> None:
        due_s = max(int(line.active_s + self._idle_max_s), self._looked_s) + 1
        self._due.setdefault(due_s, set()).add(line)
        self._due_of[line] = due_s

    def forget(self, line: L) -> None:
        due_s = self._due_of.pop(line, None)
        if due_s is not None:
            noted = self._due[due_s]
            noted.discard(line)
            if not noted:
                del self._due[due_s]

    def silent(self, now_s: float) -> list[L]:
        """Those that were silent for longer than they may; they are watched on."""
        due: list[L] = []
        while self._looked_s < int(now_s):
            self._looked_s += 1
            due += self._due.get(self._looked_s, ())
        for line in due:
            self.forget(line)
            self.watch(line)
        return [line for line in due if now_s - line.active_s > self._idle_max_s]


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
