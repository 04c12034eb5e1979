"""The port of a broker or name server: connections, turns, limits on memory and idle time.

    data_received(chunk) → requests → RequestHandler.handle()        of all connections, one turn
    end_turn() → RequestHandler.end_turn() → one write per connection

One iteration of the event loop is one turn. Every connection that has data hands its requests over;
at the end of the turn the sends of all of them are appended in one write, and each connection with
responses is written to once. No other optimisation here gains as much.

Memory is bounded. A connection that does not read its responses is not read from, and the requests
that it has sent already are not handled, until it does. Responses wait here and are handed to the
transport in portions: what is in the transport cannot be counted exactly, least of all with TLS,
which encrypts everything at once. An incomplete request is dropped with its connection when it is
older than the idle timeout, however steadily its bytes arrive; and when all incomplete requests
together take too much memory, the oldest is dropped. All of this is counted in `ClientMemory`,
beside what the handler keeps for a connection, and `MemoryWatermark` limits the total.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

from escrowmq.client_memory import ClientMemory, MemoryUse
from escrowmq.clock import Clock
from escrowmq.config import NetworkConfig
from escrowmq.errors import NotSent, RemoteProtocolError
from escrowmq.message.keys import encode_host
from escrowmq.metrics import LATENCY_BOUNDS_S, Distribution
from escrowmq.remoting.codes import ResponseCode
from escrowmq.remoting.command import Command
from escrowmq.remoting.connection import (
    Call,
    CallFailed,
    Connection,
    Event,
    InvalidRequest,
    Response,
)
from escrowmq.remoting.headers import Header
from escrowmq.remoting.requests import Body, Request
from escrowmq.remoting.responses import (
    SendResponseEncoder,
    encode_error,
    encode_pull_response,
    encode_response,
    encode_success,
)
from escrowmq.server.connection_limits import IdleTracker, MemoryWatermark, memory_limits
from escrowmq.server.security import TlsContext, TlsDetector

log = logging.getLogger(__name__)

JOINED_WRITE_BYTES_MAX = 8 * 1024  # below it, one joined write is cheaper than many pieces
# So much is handed to the transport at once, and the transport asks for a pause when it could not
# send so much.
PORTION_BYTES = 256 * 1024
TLS_PORTION_BYTES = 64 * 1024
# Responses of one connection in one turn; then the others have a turn.
TURN_RESPONSE_BYTES_MAX = 1024 * 1024
# Estimates of a connection's own objects; with TLS, of OpenSSL's state and the buffers of the
# event loop: up to two portions on the way out, and what has arrived in between.
CONNECTION_BYTES = 8 * 1024
TLS_CONNECTION_BYTES = 160 * 1024


class ServerConnection(asyncio.Protocol):
    """One client connection. For the broker it is a `Channel`."""

    def __init__(self, server: RemotingServer) -> None:
        self._server = server
        self._connection = server.new_connection()
        self._encode_send_response = server.send_response_encoder.encode
        self._transport: asyncio.Transport | None = None
        self._portion_bytes = PORTION_BYTES
        self._outgoing: list[Body] = []  # responses of this turn
        # Of the responses of this turn; those to sends, which are short, are not counted.
        self.turn_response_bytes = 0
        self._unsent: deque[Body] = deque()  # not handed to the transport yet
        self._unsent_bytes = 0
        self._is_write_paused = False
        self._is_held = False
        self._is_silent = True  # no complete request has arrived yet
        self._pending_calls: dict[Call, Callable[[Command | None, bytes], None]] = {}
        # The events of a chunk that are left for the next turn.
        self._remaining_events: Iterator[Event] | None = None
        self._is_continue_scheduled = False
        self.last_active_s = server.elapsed_s()
        self.partial = 0, 0  # incomplete request: bytes received so far, and its number
        self.address = ""
        self.peer_host = b"\0" * 8

    # --- asyncio ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        address = transport.get_extra_info("peername") or ("0.0.0.0", 0)
        self.address = f"{address[0]}:{address[1]}"
        self.peer_host = encode_host(address[0].partition("%")[0], address[1])
        has_tls = transport.get_extra_info("sslcontext") is not None
        if has_tls:
            self._portion_bytes = TLS_PORTION_BYTES
        self._transport.set_write_buffer_limits(high=self._portion_bytes)
        if self._server.admit(self):
            own_bytes = TLS_CONNECTION_BYTES if has_tls else CONNECTION_BYTES
            self._server.memory.add(self, MemoryUse.CONNECTIONS, own_bytes)
        else:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        connection = self._connection
        try:
            connection.receive(data)
            events = connection.events()
            self._handle(self._watch_first(events) if self._is_silent else events)
        except RemoteProtocolError as error:
            log.info("connection closed peer=%s: %s", self.address, error)
            self.close()
        if connection.partial_frame != self.partial:
            before, self.partial = self.partial, connection.partial_frame
            self._server.update_partial(self, before)

    def _handle(self, events: Iterator[Event]) -> None:
        server = self._server
        server.schedule_turn()
        self.last_active_s = server.turn_start_s
        if not server.handle_events(self, events):
            # Let the other connections have a turn first.
            self._remaining_events = events
            self._update_reading()
            waiting_bytes = self._connection.buffered_bytes
            server.memory.set(self, MemoryUse.WAITING_REQUESTS, waiting_bytes)
            self._schedule_continue()

    def _watch_first(self, events: Iterator[Event]) -> Iterator[Event]:
        """Yield the events, and note that the connection is not silent before the first."""
        for event in events:
            if self._is_silent:
                self._is_silent = False
                self._server.request_received(self)
            yield event

    def _schedule_continue(self) -> None:
        """Handle the remaining events in the next turn, unless too many responses are unsent."""
        if (
            self._remaining_events is not None
            and not self._is_continue_scheduled
            and not (self.is_congested or self._is_held)
        ):
            self._is_continue_scheduled = True
            self._server.call_soon(self._continue)

    def _continue(self) -> None:
        self._is_continue_scheduled = False
        if self._remaining_events is None or self.is_congested or self._is_held:
            return
        events, self._remaining_events = self._remaining_events, None
        self._server.memory.set(self, MemoryUse.WAITING_REQUESTS, 0)
        if not self.is_open:
            return
        try:
            self._handle(events)
            self._update_reading()
            if self._connection.partial_frame != self.partial:
                before, self.partial = self.partial, self._connection.partial_frame
                self._server.update_partial(self, before)
        except RemoteProtocolError as error:
            log.info("connection closed peer=%s: %s", self.address, error)
            self.close()

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self.last_active_s = self._server.elapsed_s()
        self._send_unsent()
        self._server.update_unsent(self)
        self._update_reading()
        self._schedule_continue()

    def hold_reading(self, is_held: bool) -> None:
        """Stop or resume reading, depending on the memory that all connections together use."""
        if is_held != self._is_held:
            self._is_held = is_held
            self._update_reading()
            self._schedule_continue()

    def _update_reading(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        should_read = not (self._is_held or self._remaining_events is not None or self.is_congested)
        if should_read and not transport.is_reading():
            transport.resume_reading()
        elif not should_read and transport.is_reading():
            transport.pause_reading()

    @property
    def is_congested(self) -> bool:
        """Whether so many responses are unsent that no more may be added."""
        if not self._is_write_paused:
            return False
        unsent_bytes = self.turn_response_bytes + self._unsent_bytes
        return unsent_bytes >= self._server.connection_unsent_bytes_max()

    def unsent_bytes(self) -> int:
        """Return how many bytes of responses are kept, here and in the transport."""
        transport = self._transport
        return self._unsent_bytes + (0 if transport is None else transport.get_write_buffer_size())

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._discard()
        self._fail_calls(self._connection.close())
        self._server.connection_closed(self)

    # --- what the broker uses: see broker.dispatch.Channel ---------------------------------------

    def respond(
        self,
        request: Request[Any],
        header: Header | None = None,
        *,
        code: int = ResponseCode.SUCCESS,
        remark: str = "",
        body: Body = b"",
    ) -> None:
        if header is None and not (code or remark or body):
            self.write(encode_success(request))
        else:
            self.write(encode_response(request, header, code=code, remark=remark, body=body))

    def respond_send(
        self,
        request: Request[Any],
        log_offset: int,
        queue_id: int,
        queue_offset: int,
        code: int = ResponseCode.SUCCESS,
        transaction_id: str | None = None,
    ) -> None:
        data = self._encode_send_response(
            request, log_offset, queue_id, queue_offset, code, transaction_id
        )
        if data:  # the body of write(), inlined because every send passes here
            if not self._outgoing:
                self._server.schedule_flush(self)
            self._outgoing.append(data)

    def respond_send_batch(
        self,
        request: Request[Any],
        log_offsets: Sequence[int],
        queue_id: int,
        queue_offset: int,
        code: int = ResponseCode.SUCCESS,
    ) -> None:
        encoder = self._server.send_response_encoder
        self.write(encoder.encode_batch(request, log_offsets, queue_id, queue_offset, code))

    def respond_pull(
        self,
        request: Request[Any],
        *,
        next_offset: int,
        min_offset: int,
        max_offset: int,
        topic_sys_flag: int = 0,
        group_sys_flag: int = 0,
        code: int = ResponseCode.SUCCESS,
        remark: str = "",
        slices: Sequence[Body] = (),
    ) -> None:
        self.write_pieces(
            encode_pull_response(
                request,
                next_offset=next_offset,
                min_offset=min_offset,
                max_offset=max_offset,
                topic_sys_flag=topic_sys_flag,
                group_sys_flag=group_sys_flag,
                code=code,
                remark=remark,
                body=slices,
            )
        )

    def write(self, data: bytes) -> None:
        if data:
            if not self._outgoing:
                self._server.schedule_flush(self)
            self._outgoing.append(data)
            self.turn_response_bytes += len(data)

    def write_pieces(self, pieces: Sequence[Body]) -> None:
        if pieces:
            if not self._outgoing:
                self._server.schedule_flush(self)
            self._outgoing += pieces
            self.turn_response_bytes += sum(map(len, pieces))

    @property
    def can_send(self) -> bool:
        """Whether the client reads what it gets, so that requests can be sent to it."""
        return (
            self._transport is not None
            and not self._is_write_paused
            and self.turn_response_bytes < TURN_RESPONSE_BYTES_MAX
        )

    def send_oneway(self, code: int, fields: Header, body: Body = b"") -> bool:
        if not self.can_send:
            return False
        try:
            self.write(self._connection.send_oneway(code, fields, body))
        except NotSent:
            return False
        return True

    def call(
        self,
        code: int,
        fields: Header,
        body: Body,
        on_response: Callable[[Command | None, bytes], None],
        *,
        timeout_s: float,
    ) -> bool:
        if not self.can_send:
            return False
        deadline_s = self._server.elapsed_s() + timeout_s
        try:
            call, data = self._connection.call(code, fields, body, deadline_s=deadline_s)
        except NotSent:
            return False
        self._pending_calls[call] = on_response
        self.write(data)
        self._server.add_calling(self)
        return True

    def response_received(self, response: Response) -> None:
        on_response = self._pending_calls.pop(response.call, None)
        if on_response is not None:
            on_response(response.command, bytes(response.body))

    def expire_calls(self, now_s: float) -> bool:
        """Fail the calls whose time is over. Return whether others still wait for a response."""
        self._fail_calls(self._connection.expire(now_s=now_s))
        return bool(self._pending_calls)

    def _fail_calls(self, failures: list[CallFailed]) -> None:
        for failure in failures:
            on_response = self._pending_calls.pop(failure.call, None)
            if on_response is not None:
                on_response(None, b"")

    def flush(self) -> None:
        """Hand the responses of this turn to the transport, as far as it takes them."""
        out, self._outgoing = self._outgoing, []
        self.turn_response_bytes = 0
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        size = sum(map(len, out))
        if size > self._portion_bytes or self._is_write_paused or self._unsent:
            self._unsent.extend(out)
            self._unsent_bytes += size
            self._send_unsent()
        elif len(out) == 1:
            transport.write(out[0])
        elif size <= JOINED_WRITE_BYTES_MAX:
            transport.write(b"".join(out))
        else:
            transport.writelines(out)

    def _send_unsent(self) -> None:
        """Hand unsent responses to the transport in portions, until it asks for a pause."""
        transport, unsent = self._transport, self._unsent
        if transport is None or transport.is_closing():
            return
        while unsent and not self._is_write_paused:
            portion: list[Body] = []
            remaining = self._portion_bytes
            while unsent and remaining > 0:
                piece = unsent.popleft()
                if len(piece) > remaining:
                    view = memoryview(piece)
                    unsent.appendleft(view[remaining:])
                    piece = view[:remaining]
                portion.append(piece)
                remaining -= len(piece)
            self._unsent_bytes -= self._portion_bytes - remaining
            transport.writelines(portion)

    def close(self) -> None:
        """Close the connection after the client has read its responses."""
        if self._transport is not None:
            self.flush()
            if self._unsent and not self._transport.is_closing():
                # The transport waits for what it has, as it would for the rest.
                self._transport.writelines(self._unsent)
                self._unsent.clear()
                self._unsent_bytes = 0
            self._transport.close()

    def drop(self) -> None:
        """Close the connection at once, without waiting for a client that does not read."""
        if self._transport is not None:
            self.flush()
            self._transport.abort()
            self._discard()

    def _discard(self) -> None:
        """Free the bytes of a connection that is closed. Others may refer to it for a while."""
        self._unsent.clear()
        self._unsent_bytes = 0
        self._outgoing.clear()
        self._remaining_events = None
        self._connection.discard_received()


# --- the port ------------------------------------------------------------------------------------

EVENTS_PER_TURN_MAX = 64  # of one connection
PENDING_HANDSHAKES_MIN = 64
# The longest field is a value of the name server's settings, 65,536 characters, each of which JSON
# may write as six. Everything else that is long is in the body of a request.
REQUEST_HEADER_BYTES_MAX = 512 * 1024


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Clients can connect at once and are served after `listen()`.

    Raises OSError with the address in its text.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening_socket = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    listening_socket.setblocking(False)
    return listening_socket


def bound_port(listening_socket: socket.socket) -> int:
    """Return the port of a socket; the system chose it if port 0 was requested."""
    return int(listening_socket.getsockname()[1])


def reachable_host(host: str) -> str:
    """Return an address under which this machine reaches a port that listens on `host`."""
    return "127.0.0.1" if host in ("0.0.0.0", "") else host


class RequestHandler(Protocol):
    """Handler of the requests of a port: the broker, or the name server."""

    def handle(self, connection: ServerConnection, request: Request[Any], now_ms: int) -> None: ...
    def end_turn(self, now_ms: int) -> bool:
        """Finish the turn. Return whether another turn is needed soon."""

    def channel_closed(self, connection: ServerConnection) -> None: ...


class RemotingServer:
    """One listening port and its connections."""

    def __init__(
        self,
        handler: RequestHandler,
        clock: Clock,
        config: NetworkConfig,
        *,
        tls: TlsContext | None = None,
        requires_tls: bool = False,
        keeps_headers: bool = False,
        send_response_encoder: SendResponseEncoder | None = None,
        watermark: MemoryWatermark | None = None,
    ) -> None:
        """Without `tls`, TLS is not served. `keeps_headers` is for a handler that verifies
        signatures. Pass the encoder of the broker's send responses if `handler` is a broker.
        `watermark` has the memory in which the handler counts what it keeps for connections; the
        ports of a process share it."""
        self.send_response_encoder = send_response_encoder or SendResponseEncoder(
            store_host=bytes(8)
        )
        self._tls = tls
        self._requires_tls = requires_tls
        self._keeps_headers = keeps_headers
        self._tls_detector: TlsDetector | None = None
        self._handler = handler
        self._clock = clock
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._unflushed: list[ServerConnection] = []
        self._is_turn_scheduled = False
        self.turn_start_ms, self.turn_start_s = clock.now_ms(), clock.elapsed_s()
        self._server: asyncio.Server | None = None
        self.watermark = watermark or MemoryWatermark(ClientMemory(memory_limits(config)))
        self.memory = self.watermark.memory
        self._unsent_bytes: dict[ServerConnection, int] = {}  # not yet accepted by the socket
        self._total_unsent_bytes = 0
        # Connections that are not read from, because responses of all of them are unsent.
        self._held_connections: set[ServerConnection] = set()
        self._silent_connections: dict[ServerConnection, None] = {}  # the oldest first
        self._idle_tracker: IdleTracker[ServerConnection] = IdleTracker(
            config.idle_max_s, now_s=clock.elapsed_s()
        )
        # When an incomplete request began to arrive, oldest first.
        self._partial_since_s: dict[ServerConnection, float] = {}
        self.partial_bytes = 0
        self.dropped_partial_requests = 0
        self.connections: set[ServerConnection] = set()
        self.refused_connections = 0
        self.refused_requests: defaultdict[int, int] = defaultdict(int)  # by response code
        self.turn_seconds = Distribution(LATENCY_BOUNDS_S)
        self._calling: set[ServerConnection] = set()  # with calls that are not answered

    async def listen(self, listening_socket: socket.socket) -> None:
        tls = self._tls
        if tls is not None:
            self._tls_detector = TlsDetector(
                lambda: ServerConnection(self),
                lambda: tls.ssl_context,
                is_enforcing=self._requires_tls,
                idle_max_s=self._config.idle_max_s,
                has_capacity=self._has_capacity,
                pending_max=max(PENDING_HANDSHAKES_MIN, self._config.connections_max // 10),
            )
            self._tls_detector.listen(listening_socket)
            return
        self._server = await self._loop.create_server(
            lambda: ServerConnection(self), sock=listening_socket
        )

    async def close(self) -> None:
        """Finish the turn, send its responses and close every connection."""
        self.stop_reading()
        self.end_turn()
        for connection in list(self.connections):
            connection.close()
        await asyncio.sleep(0)

    def stop_reading(self) -> None:
        """Accept no new connections and read nothing more from the open ones."""
        if self._server is not None:
            self._server.close()
        if self._tls_detector is not None:
            self._tls_detector.close()
        for connection in self.connections:
            connection.hold_reading(True)

    def refused_handshakes(self) -> int:
        """Return the number of connections closed because of missing TLS or a failed handshake."""
        return 0 if self._tls_detector is None else self._tls_detector.refused

    def _has_capacity(self, pending: int) -> bool:
        if len(self.connections) + pending < self._config.connections_max or self._close_silent():
            return True
        self.refused_connections += 1
        return False

    # --- for its connections ---------------------------------------------------------------------

    def admit(self, connection: ServerConnection) -> bool:
        if len(self.connections) >= self._config.connections_max and not self._close_silent():
            self.refused_connections += 1
            return False
        self.connections.add(connection)
        self._silent_connections[connection] = None
        self._idle_tracker.watch(connection)
        return True

    def request_received(self, connection: ServerConnection) -> None:
        """Note that a connection has sent its first request."""
        self._silent_connections.pop(connection, None)

    def _close_silent(self) -> bool:
        """Close the oldest connection that has never sent a request; False if there is none."""
        oldest = next(iter(self._silent_connections), None)
        if oldest is None:
            return False
        log.info("connection closed peer=%s: it sent no request, others wait", oldest.address)
        oldest.drop()
        self.connection_closed(oldest)
        return True

    def handle_events(self, connection: ServerConnection, events: Iterator[Event]) -> bool:
        """Handle the events of one chunk; responses are sent at the end of the turn.

        Return False if the connection has used its share of the turn and may have more events.
        """
        handle, now_ms, remaining = self._handler.handle, self.turn_start_ms, EVENTS_PER_TURN_MAX
        for event in events:
            if type(event) is Request:
                handle(connection, event, now_ms)
            elif type(event) is InvalidRequest:
                self.refused_requests[event.error.code] += 1
                connection.write(encode_error(event.request, event.error))
            elif type(event) is Response:
                connection.response_received(event)
            remaining -= 1
            if not remaining or connection.turn_response_bytes >= TURN_RESPONSE_BYTES_MAX:
                return False
        return True

    def call_soon(self, step: Callable[[], None]) -> None:
        self._loop.call_soon(step)

    def connection_closed(self, connection: ServerConnection) -> None:
        self._total_unsent_bytes -= self._unsent_bytes.pop(connection, 0)
        self._clear_partial(connection)
        if connection in self.connections:
            self.connections.discard(connection)
            self._silent_connections.pop(connection, None)
            self._held_connections.discard(connection)
            self._calling.discard(connection)
            self._idle_tracker.remove(connection)
            self._handler.channel_closed(connection)
        self.watermark.connection_closed(connection)

    def update_partial(self, connection: ServerConnection, before: tuple[int, int]) -> None:
        """Account for a chunk that ended inside a request, or completed one."""
        now_bytes, number = connection.partial
        self.partial_bytes += now_bytes - before[0]
        self.memory.set(connection, MemoryUse.PARTIAL_REQUESTS, now_bytes)
        if not now_bytes or number != before[1]:
            self._partial_since_s.pop(connection, None)
        if now_bytes:
            self._partial_since_s.setdefault(connection, connection.last_active_s)
        while self.partial_bytes > self._config.in_flight_bytes_max and self._partial_since_s:
            self._drop_partial(
                next(iter(self._partial_since_s)),
                "incomplete requests of all connections take too much memory",
            )

    def _drop_partial(self, connection: ServerConnection, reason: str) -> None:
        log.warning("connection closed peer=%s: incomplete request: %s", connection.address, reason)
        self.dropped_partial_requests += 1
        self._clear_partial(connection)
        connection.drop()

    def _clear_partial(self, connection: ServerConnection) -> None:
        self._partial_since_s.pop(connection, None)
        self.partial_bytes -= connection.partial[0]
        connection.partial = 0, 0
        self.memory.set(connection, MemoryUse.PARTIAL_REQUESTS, 0)

    def update_unsent(self, connection: ServerConnection) -> None:
        """Account for responses that were handed to the transport, or sent by it."""
        unsent = connection.unsent_bytes()
        before = self._unsent_bytes.get(connection, 0)
        if unsent == before:
            return
        self._total_unsent_bytes += unsent - before
        self.memory.set(connection, MemoryUse.UNSENT_RESPONSES, unsent)
        if not unsent:
            del self._unsent_bytes[connection]
            return
        self._unsent_bytes[connection] = unsent
        unsent_max = self._config.in_flight_bytes_max
        is_greedy = unsent * len(self._unsent_bytes) >= unsent_max  # more than an equal part of it
        if self._total_unsent_bytes > unsent_max and is_greedy:
            self._held_connections.add(connection)
            connection.hold_reading(True)

    def schedule_flush(self, connection: ServerConnection) -> None:
        """Flush the connection at the end of the turn."""
        self._unflushed.append(connection)
        self.schedule_turn()

    def schedule_turn(self) -> None:
        if not self._is_turn_scheduled:
            self._is_turn_scheduled = True
            self.turn_start_ms, self.turn_start_s = self._clock.now_ms(), self._clock.elapsed_s()
            self._loop.call_soon(self.end_turn)

    def end_turn(self) -> None:
        wants_more = False
        try:
            wants_more = self._handler.end_turn(self.turn_start_ms)
        except Exception:  # a bug must not hold back the responses of other requests
            log.exception("turn failed")
        unflushed, self._unflushed = self._unflushed, []
        was_scheduled = self._is_turn_scheduled
        self._is_turn_scheduled = False  # only now: end_turn() above wrote responses of this turn
        for connection in unflushed:
            connection.flush()
            self.update_unsent(connection)
        if self.memory.is_above_soft:
            self.watermark.enforce(self.turn_start_ms)
        if was_scheduled:
            self.turn_seconds.observe(self._clock.elapsed_s() - self.turn_start_s)
        if wants_more:
            self.schedule_turn()  # requests that have arrived by then are part of it

    def sweep_connections(self) -> None:
        """Close idle connections and resume reading where memory allows it; call it regularly."""
        for connection in self._idle_tracker.find_idle(self._clock.elapsed_s()):
            log.info(
                "connection closed peer=%s: idle for %d s",
                connection.address,
                self._config.idle_max_s,
            )
            connection.drop()
        began_before_s = self._clock.elapsed_s() - self._config.idle_max_s
        while (
            self._partial_since_s
            and (first := next(iter(self._partial_since_s.items())))[1] < began_before_s
        ):
            self._drop_partial(first[0], "the rest did not arrive in time")
        for connection in list(self._unsent_bytes):
            self.update_unsent(connection)
        self.watermark.enforce(self._clock.now_ms())
        self.watermark.release()
        if self._total_unsent_bytes <= self._config.in_flight_bytes_max:
            while self._held_connections:
                connection = self._held_connections.pop()
                connection.hold_reading(self.watermark.is_holding(connection))
        self._calling = {
            connection for connection in self._calling if connection.expire_calls(self.elapsed_s())
        }

    def change_config(self, config: NetworkConfig) -> None:
        """Apply new limits. Open connections stay open, and the idle timeout does not change."""
        self._config = config
        self.memory.limits = memory_limits(config)

    def add_calling(self, connection: ServerConnection) -> None:
        self._calling.add(connection)

    def unsent_bytes(self) -> int:
        return self._total_unsent_bytes

    def elapsed_s(self) -> float:
        return self._clock.elapsed_s()

    def new_connection(self) -> Connection:
        return Connection(
            header_length_max=REQUEST_HEADER_BYTES_MAX, keep_headers=self._keeps_headers
        )

    def connection_unsent_bytes_max(self) -> int:
        """Above this, requests of a connection wait until its client has read its responses."""
        return self._config.connection_in_flight_bytes_max
