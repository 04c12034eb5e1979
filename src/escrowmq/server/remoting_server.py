"""The port of a broker or name server: connections, turns, limits on memory and idle time.

    data_received(chunk) → requests → RequestHandler.handle()        of all connections, one turn
    end_turn() → RequestHandler.end_turn() → one write per connection

One iteration of the event loop is one turn. Every connection that has data hands its requests over;
at the end of the turn the sends of all of them are appended in one write, and each connection with
responses is written to once. No other optimisation here gains as much.

A turn is bounded by time, and connections are served fairly. Each has a share of the turn, in time
and in requests. What exceeds it waits, with the requests behind it, and so does a request that its
handler carries out in slices. At the end of every turn those that wait get a slice each, round
robin. New requests of other connections come before them, so a client with few requests waits for
about one slice, whatever the others send.

Memory is bounded. A connection that does not read its responses is not read from until it does, so
it holds at most its write buffer and the responses to one chunk of requests. An incomplete request
is dropped with its connection when it is older than the idle timeout, however steadily its bytes
arrive; and when all incomplete requests together take too much memory, the oldest is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

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
from escrowmq.server.security import TlsContext, TlsDetector
from escrowmq.sliced_work import SlicedWork, SliceScheduler

log = logging.getLogger(__name__)

JOINED_WRITE_BYTES_MAX = 8 * 1024  # below it, one joined write is cheaper than many pieces


class ServerConnection(asyncio.Protocol):
    """One client connection. For the broker it is a `Channel`."""

    def __init__(self, server: RemotingServer) -> None:
        self._server = server
        self._connection = server.new_connection()
        self._encode_send_response = server.send_response_encoder.encode
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[Body] = []
        self._is_write_paused = False
        self._is_held = False
        self._pending_calls: dict[Call, Callable[[Command | None, bytes], None]] = {}
        self._has_waiting_events = False  # of a chunk that was not handled within one share
        self.turn_number = -1  # the turn to which the next two belong
        self.share_end_s = 0.0
        self.share_events = 0  # how many more of them fit into the share of this turn
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
        self._transport.set_write_buffer_limits(high=self._server.connection_unsent_bytes_max())
        if not self._server.admit(self):
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        server, connection = self._server, self._connection
        try:
            connection.receive(data)
            server.schedule_turn()
            self.last_active_s = server.turn_start_s
            events = connection.events()
            remaining_work = server.handle_events(self, events)
        except RemoteProtocolError as error:
            self._close_after(error)
        else:
            if remaining_work is not None:
                # Read nothing more until it is done: the responses keep the order of the requests.
                self._has_waiting_events = True
                self._update_reading()
                server.add_waiting(self._continue(events, remaining_work))
        self._update_partial()

    def _continue(self, events: Iterator[Event], begun: SlicedWork) -> SlicedWork:
        """Finish a request that was begun, then handle the other events of its chunk."""
        handle_event = self._server.handle_event
        work: SlicedWork | None = begun
        try:
            while self.is_open:
                if work is not None:
                    for _ in work:
                        yield
                        if not self.is_open:
                            return  # nobody reads the result
                event = next(events, None)
                if event is None:
                    break
                self.last_active_s = self._server.turn_start_s
                work = handle_event(self, event)
                yield
        except RemoteProtocolError as error:
            self._close_after(error)
        except Exception:
            log.exception("connection closed peer=%s: a request failed", self.address)
            self.abort()
        self._has_waiting_events = False
        self._update_reading()
        self._update_partial()

    def _close_after(self, error: RemoteProtocolError) -> None:
        log.info("connection closed peer=%s: %s", self.address, error)
        self.close()

    def _update_partial(self) -> None:
        if self._connection.partial_frame != self.partial:
            before, self.partial = self.partial, self._connection.partial_frame
            self._server.update_partial(self, before)

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self._update_reading()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self.last_active_s = self._server.elapsed_s()
        self._update_reading()

    def hold_reading(self, is_held: bool) -> None:
        """Stop or resume reading, depending on the memory that all connections together use."""
        if is_held != self._is_held:
            self._is_held = is_held
            self._update_reading()

    def _update_reading(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        should_read = not (self._is_write_paused or self._is_held or self._has_waiting_events)
        if should_read and not transport.is_reading():
            transport.resume_reading()
        elif not should_read and transport.is_reading():
            transport.pause_reading()

    def unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
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

    def write_pieces(self, pieces: Sequence[Body]) -> None:
        if pieces:
            if not self._outgoing:
                self._server.schedule_flush(self)
            self._outgoing += pieces

    def send_oneway(self, code: int, fields: Header, body: Body = b"") -> bool:
        if self._transport is None or self._is_write_paused:
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
        if self._transport is None or self._is_write_paused:
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
        self._end_call(response.call, response.command, response.body)

    def expire_calls(self, now_s: float) -> bool:
        """Fail the calls whose time is over. Return whether others still wait for a response."""
        self._fail_calls(self._connection.expire(now_s=now_s))
        return bool(self._pending_calls)

    def _fail_calls(self, failures: list[CallFailed]) -> None:
        for failure in failures:
            self._end_call(failure.call, None, b"")

    def _end_call(self, call: Call, command: Command | None, body: Body) -> None:
        on_response = self._pending_calls.pop(call, None)
        if on_response is None:
            return
        try:
            on_response(command, bytes(body))
        except Exception:  # it costs the one who waits for this response, and nobody else
            log.exception("response not handled peer=%s code=%d", self.address, call.code)

    def flush(self) -> int:
        """Write the responses to the socket. Return how many bytes it has not accepted yet."""
        out, self._outgoing = self._outgoing, []
        transport = self._transport
        if transport is None or transport.is_closing():
            return 0
        if len(out) == 1:
            transport.write(out[0])
        elif sum(map(len, out)) <= JOINED_WRITE_BYTES_MAX:
            transport.write(b"".join(out))
        elif out:
            transport.writelines(out)
        return transport.get_write_buffer_size()

    def close(self) -> None:
        if self._transport is not None:
            self.flush()
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once, without writing anything."""
        self._outgoing = []
        if self._transport is not None:
            self._transport.abort()

    def drop(self) -> None:
        """Close the connection, without waiting for a peer that does not read."""
        self.close()
        if self._transport is not None and self.unsent_bytes():
            self._transport.abort()


# --- idle connections ----------------------------------------------------------------------------


class HasLastActivity(Hashable, Protocol):
    last_active_s: float  # when data was last received


L = TypeVar("L", bound=HasLastActivity)


class IdleTracker(Generic[L]):
    """Find the connections that have been idle for too long.

    A connection is filed under the second in which its idle time would be over if it stayed idle.
    When that second has passed, it is either idle or filed again. So each connection is looked at
    once per idle time, however many there are, and receiving data costs nothing here.
    """

    def __init__(self, idle_max_s: float, *, now_s: float) -> None:
        self._idle_max_s = idle_max_s
        self._checked_s = int(now_s)
        self._due: dict[int, set[L]] = {}
        self._due_by_connection: dict[L, int] = {}

    def watch(self, connection: L) -> None:
        due_s = max(int(connection.last_active_s + self._idle_max_s), self._checked_s) + 1
        self._due.setdefault(due_s, set()).add(connection)
        self._due_by_connection[connection] = due_s

    def remove(self, connection: L) -> None:
        due_s = self._due_by_connection.pop(connection, None)
        if due_s is not None:
            connections = self._due[due_s]
            connections.discard(connection)
            if not connections:
                del self._due[due_s]

    def find_idle(self, now_s: float) -> list[L]:
        """Return the connections that have been idle for too long. They stay watched."""
        due: list[L] = []
        while self._checked_s < int(now_s):
            self._checked_s += 1
            due += self._due.get(self._checked_s, ())
        for connection in due:
            self.remove(connection)
            self.watch(connection)
        return [
            connection for connection in due if now_s - connection.last_active_s > self._idle_max_s
        ]


# --- the port ------------------------------------------------------------------------------------

# The share of one connection in a turn, unless the turn is over before. Sixty-four sends take less
# than a millisecond; the time is for requests that cost more.
SHARE_EVENTS_MAX = 64
SHARE_S = 0.001
# A header is decoded in one step. Properties of 32 KiB and a filter of 64 KiB fit, however escaped.
REQUEST_HEADER_BYTES_MAX = 512 << 10
# How long a turn accepts new requests. A turn of this length appends thousands of messages.
TURN_S = 0.02


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

    def handle(
        self, connection: ServerConnection, request: Request[Any], now_ms: int
    ) -> SlicedWork | None:
        """Handle a request, or return work that does so in slices.

        The connection's next request is not handled before the work is done. The work is dropped
        when the connection closes.
        """

    def end_turn(self, now_ms: int) -> bool:
        """Finish the turn. Return whether another turn is needed soon."""

    def channel_closed(self, connection: ServerConnection) -> None: ...


def _nothing_begun() -> SlicedWork:
    """Return work for a connection whose last request is done, but not all of its requests."""
    yield from ()


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
    ) -> None:
        """Without `tls`, TLS is not served. `keeps_headers` is for a handler that verifies
        signatures. Pass the encoder of the broker's send responses if `handler` is a broker."""
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
        self._turn_number = 0
        self._elapsed_s = clock.elapsed_s
        # Connections whose requests did not fit into their share.
        self._waiting = SliceScheduler(clock.elapsed_s)
        self.turn_start_ms, self.turn_start_s = clock.now_ms(), clock.elapsed_s()
        self._server: asyncio.Server | None = None
        self._unsent_bytes: dict[ServerConnection, int] = {}  # not yet accepted by the socket
        # Connections that are not read from, because all together use too much memory.
        self._held_connections: set[ServerConnection] = set()
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
        if len(self.connections) + pending < self._config.connections_max:
            return True
        self.refused_connections += 1
        return False

    # --- for its connections ---------------------------------------------------------------------

    def admit(self, connection: ServerConnection) -> bool:
        if len(self.connections) >= self._config.connections_max:
            self.refused_connections += 1
            return False
        self.connections.add(connection)
        self._idle_tracker.watch(connection)
        return True

    def handle_events(
        self, connection: ServerConnection, events: Iterator[Event]
    ) -> SlicedWork | None:
        """Handle the events of one chunk; responses are sent at the end of the turn.

        Return None when all of them are handled. Otherwise the connection has used its share of the
        turn: return what is left of the last request, which comes before the remaining events.
        """
        elapsed_s = self._elapsed_s
        if connection.turn_number != self._turn_number:
            connection.turn_number = self._turn_number
            connection.share_events = SHARE_EVENTS_MAX
            connection.share_end_s = min(elapsed_s(), self.turn_start_s + TURN_S) + SHARE_S
        remaining, end_s = connection.share_events, connection.share_end_s
        if not remaining or elapsed_s() >= end_s:
            return _nothing_begun()
        handle_event = self.handle_event
        for event in events:
            work = handle_event(connection, event)
            if work is not None:  # its first slice; most requests that could take long do not
                for _ in work:
                    if elapsed_s() >= end_s:
                        return work
            remaining -= 1
            if not remaining or elapsed_s() >= end_s:
                connection.share_events = remaining
                return _nothing_begun()
        connection.share_events = remaining
        return None

    def handle_event(self, connection: ServerConnection, event: Event) -> SlicedWork | None:
        """Handle one event, or return the work that does so in slices."""
        try:
            if type(event) is Request:
                return self._handler.handle(connection, event, self.turn_start_ms)
            if type(event) is InvalidRequest:
                self.refused_requests[event.error.code] += 1
                connection.write(encode_error(event.request, event.error))
            elif type(event) is Response:
                connection.response_received(event)
        except Exception:  # not even an error could be sent: it costs this request alone
            log.exception("request not responded to peer=%s", connection.address)
        return None

    def add_waiting(self, work: SlicedWork) -> None:
        """Go on with the work of a connection at the end of this turn, in slices."""
        self._waiting.add(work)

    def connection_closed(self, connection: ServerConnection) -> None:
        self._unsent_bytes.pop(connection, None)
        self._clear_partial(connection)
        if connection in self.connections:
            self.connections.discard(connection)
            self._held_connections.discard(connection)
            self._calling.discard(connection)
            self._idle_tracker.remove(connection)
            try:
                self._handler.channel_closed(connection)
            except Exception:  # a bug must not cost the loop that closes connections
                log.exception("closed connection not cleaned up peer=%s", connection.address)

    def update_partial(self, connection: ServerConnection, before: tuple[int, int]) -> None:
        """Account for a chunk that ended inside a request, or completed one."""
        now_bytes, number = connection.partial
        self.partial_bytes += now_bytes - before[0]
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
        wants_more = self._waiting.run_turn()
        try:
            wants_more = self._handler.end_turn(self.turn_start_ms) or wants_more
        except Exception:  # a bug must not hold back the responses of other requests
            log.exception("turn failed")
        unflushed, self._unflushed = self._unflushed, []
        was_scheduled = self._is_turn_scheduled
        self._is_turn_scheduled = False  # only now: end_turn() above wrote responses of this turn
        self._turn_number += 1
        for connection in unflushed:
            unsent = self._flush(connection)
            if unsent:
                self._unsent_bytes[connection] = unsent
                if sum(self._unsent_bytes.values()) > self._config.in_flight_bytes_max:
                    self._held_connections.add(connection)
                    connection.hold_reading(True)
        if was_scheduled:
            self.turn_seconds.observe(self._clock.elapsed_s() - self.turn_start_s)
        if wants_more:
            self.schedule_turn()  # requests that have arrived by then are part of it

    def _flush(self, connection: ServerConnection) -> int:
        try:
            return connection.flush()
        except Exception:  # a broken connection must not cost the others their responses
            log.exception("connection closed peer=%s: responses not written", connection.address)
            connection.abort()
            return 0

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
        self._unsent_bytes = {
            connection: unsent
            for connection in self._unsent_bytes
            if (unsent := connection.unsent_bytes())
        }
        if sum(self._unsent_bytes.values()) <= self._config.in_flight_bytes_max:
            while self._held_connections:
                self._held_connections.pop().hold_reading(False)
        self._calling = {
            connection for connection in self._calling if connection.expire_calls(self.elapsed_s())
        }

    def change_config(self, config: NetworkConfig) -> None:
        """Apply new limits. Open connections stay open, and the idle timeout does not change."""
        self._config = config

    def add_calling(self, connection: ServerConnection) -> None:
        self._calling.add(connection)

    def unsent_bytes(self) -> int:
        return sum(connection.unsent_bytes() for connection in self._unsent_bytes)

    def elapsed_s(self) -> float:
        return self._clock.elapsed_s()

    def new_connection(self) -> Connection:
        return Connection(
            keep_headers=self._keeps_headers, header_length_max=REQUEST_HEADER_BYTES_MAX
        )

    def connection_unsent_bytes_max(self) -> int:
        return self._config.connection_unsent_bytes_max
