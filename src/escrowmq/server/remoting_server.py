"""The port of a broker or name server: connections, turns, limits on memory and idle time.

    data_received(chunk) → requests → RequestHandler.handle()        of all connections, one turn
    end_turn() → RequestHandler.end_turn() → one write per connection → slices of what waits

One iteration of the event loop is one turn. Every connection that has data hands its requests over;
at the end of the turn the sends of all of them are appended in one write, and each connection with
responses is written to once. No other optimisation here gains as much.

A turn is bounded by time, and connections are served fairly. Each has a share of the turn, in time
and in requests. What exceeds it waits, with the requests behind it, and so does a request that its
handler carries out in slices. Behind the responses of every turn those that wait get a slice each,
round robin. New requests of other connections come before them, so a client with few requests waits
for about one slice, whatever the others send.

Memory is bounded. A connection that does not read its responses is not read from, and the requests
that it has sent already are not handled, until it does. Responses wait here and are handed to the
transport in portions: what is in the transport cannot be taken back. An incomplete request is
dropped with its connection when it is older than the idle timeout, however steadily its bytes
arrive; and when all incomplete requests together take too much memory, the oldest is dropped. All
of this is counted in `ClientMemory`, beside what the handler keeps for a connection, and
`MemoryWatermark` limits the total.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast

from escrowmq.client_memory import ClientMemory, MemoryUse
from escrowmq.clock import Clock
from escrowmq.config import NetworkConfig
from escrowmq.fair_shares import FairShares
from escrowmq.limited_log import LimitedLog
from escrowmq.metrics import LATENCY_BOUNDS_S, Distribution
from escrowmq.peer import Peer, host_of
from escrowmq.remoting.connection import (
    Connection,
    Event,
    InvalidRequest,
    Response,
)
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import (
    SendResponseEncoder,
    encode_error,
)
from escrowmq.server.connection_limits import IdleTracker, MemoryWatermark, memory_limits
from escrowmq.server.security import TlsContext, TlsDetector
from escrowmq.server.server_connection import (
    TURN_RESPONSE_BYTES_MAX,
    ServerConnection,
    nothing_begun,
)
from escrowmq.sliced_work import SlicedWork, SliceScheduler

log = logging.getLogger(__name__)

# The share of one connection in a turn, unless the turn is over before. Sixty-four sends take less
# than a millisecond; the time is for requests that cost more.
SHARE_EVENTS_MAX = 64
SHARE_S = 0.001
# Of both, the part for a connection that had more than its share when it was served last: others,
# and their responses, wait for less time then.
GREEDY_PART = 1 / 3
# How long a turn accepts new requests, beside those of the plain path. A request that comes during
# a turn waits for its end, so a turn is short: with 20 ms instead of 3, sixty connections that
# pipeline pulls made turns of 22 ms of CPU time, and now 7 ms. The end of a turn costs 0.1 ms.
TURN_S = 0.003
# If many connections have requests in one turn they share its time equally, and each gets so much:
# enough for one or two ordinary requests, so that a client which has no more is served at once.
SHARE_MIN_S = 0.0001
# How many connections are read in one turn among those that send more than a long chunk holds: each
# has 256 KiB then, which have to be copied and looked at. Forty of them made turns of 17 ms.
LONG_CHUNKS_MAX = 4
# How many connections are closed in one turn among those that their clients have closed. One takes
# a tenth of a millisecond, and when a process ends all of its connections do.
CLOSED_PER_TURN_MAX = 8
PENDING_HANDSHAKES_MIN = 64
SILENT_SEARCHED_MAX = 100  # connections without a request that are looked at to make room
# A header is decoded in one step. The longest field is a value of the name server's settings,
# 65,536 characters, each of which JSON may write as six. Everything else that is long is in the
# body of a request.
REQUEST_HEADER_BYTES_MAX = 512 * 1024
SKIPPED_TURNS_MAX = 256  # see BusyPoll

_NOTHING_LEFT = b"", False  # what is left of a chunk that was plain to its end


class PlainRequestHandler(Protocol):
    """Handles simple requests straight from the received bytes. The native path does so."""

    def handle(self, chunks: list[Any], now_ms: int) -> Sequence[tuple[int, bytes, bool]]:
        """Take tuples of connection, address, incomplete frame and bytes.

        Return what is left: index of the chunk, bytes, and whether they begin with a request that
        is not plain. If they do not, they are the beginning of an incomplete frame.
        """


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


class _Newcomer(NamedTuple):
    """A client that has connected and for which there is no connection object yet."""

    address: str
    origin: str
    is_open: bool = True


# Returns the protocol that receives the events of a connection, and passes them on.
ConnectionWrapper = Callable[[asyncio.Protocol], asyncio.Protocol]


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
        plain_requests: PlainRequestHandler | None = None,
        wrap_connection: ConnectionWrapper | None = None,
    ) -> None:
        """Without `tls`, TLS is not served. `keeps_headers` is for a handler that verifies
        signatures. Pass the encoder of the broker's send responses if `handler` is a broker.
        `watermark` has the memory in which the handler counts what it keeps for connections; the
        ports of a process share it. `plain_requests` handles whatever it can of the received
        bytes, before the requests are decoded for `handler`. `wrap_connection` puts a protocol
        between each connection and its transport."""
        self._wrap_connection = wrap_connection
        self.plain_requests = plain_requests
        self.on_turn_end: Callable[[], None] = lambda: None
        # The bytes that each connection has received in this turn.
        self._chunks: dict[ServerConnection, bytes] = {}
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
        self.has_written = False  # whether a response of this turn has left before its end
        # Connections that sent a long chunk. They are read again in turn, some in each turn.
        self._paused_for_turn: deque[ServerConnection] = deque()
        self._ended_connections: deque[ServerConnection] = deque()  # they are closed in turn
        self._is_turn_scheduled = False
        self._share_s = SHARE_S  # of each connection in this turn
        self.turn_number = 0
        self._elapsed_s = clock.elapsed_s
        self._busy_poll = BusyPoll(self._loop.call_soon, config.busy_polls_max)
        # Connections whose requests did not fit into their share.
        self._waiting = SliceScheduler(clock.elapsed_s)
        self.turn_start_ms, self.turn_start_s = clock.now_ms(), clock.elapsed_s()
        self._accepts_until_s = self.turn_start_s + TURN_S  # new requests wait afterwards
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
        self._shares: FairShares[Peer] = FairShares()  # connections of each origin
        self._limited_log = LimitedLog(log)
        self.refused_connections = 0
        self.refused_requests: defaultdict[int, int] = defaultdict(int)  # by response code
        self.turn_seconds = Distribution(LATENCY_BOUNDS_S)
        self._calling: set[ServerConnection] = set()  # with calls that are not answered

    async def listen(self, listening_socket: socket.socket) -> None:
        tls = self._tls
        if tls is not None:
            self._tls_detector = TlsDetector(
                self._accept_connection,
                lambda: tls.ssl_context,
                is_enforcing=self._requires_tls,
                idle_max_s=self._config.idle_max_s,
                has_capacity=self._has_capacity,
                pending_max=max(PENDING_HANDSHAKES_MIN, self._config.connections_max // 10),
            )
            self._tls_detector.listen(listening_socket)
            return
        self._server = await self._loop.create_server(
            self._accept_connection, sock=listening_socket
        )

    def _accept_connection(self) -> asyncio.Protocol:
        connection = ServerConnection(self)
        return connection if self._wrap_connection is None else self._wrap_connection(connection)

    async def close(self) -> None:
        """Finish the turn, send its responses and close every connection."""
        self.stop_reading()
        self._finish_turn()
        for connection in list(self.connections):
            connection.close_at_stop()
        await asyncio.sleep(0)

    async def abort(self) -> None:
        """Close the port and every connection at once, without a response."""
        self.stop_reading()
        for connection in list(self.connections):
            connection.abort()
        await asyncio.sleep(0)  # what is scheduled for this turn runs while the store is open

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

    def _has_capacity(self, host: str, pending: int) -> bool:
        if len(self.connections) + pending < self._config.connections_max:
            return True
        return self._make_room(_Newcomer(f"{host}:0", host_of(f"{host}:0")))

    # --- for its connections ---------------------------------------------------------------------

    def admit(self, connection: ServerConnection) -> bool:
        if len(self.connections) >= self._config.connections_max and not self._make_room(
            connection
        ):
            return False
        self.connections.add(connection)
        self._shares.add(connection, 1)
        self._silent_connections[connection] = None
        self._idle_tracker.watch(connection)
        return True

    def request_received(self, connection: ServerConnection) -> None:
        """Note that a connection has sent its first request."""
        self._silent_connections.pop(connection, None)

    def foreign_client_came(self, address: str, protocol: str) -> None:
        """Log that a client speaks another protocol: it has a wrong port, or is a wrong client."""
        advice = "this port serves RocketMQ's remoting protocol only"
        if protocol == "TLS":
            advice = "this port has no TLS: set tls.server.certPath and keyPath, or connect without"
        self._limited_log.warning(
            self.turn_start_ms,
            "connection closed peer=%s: this looks like %s; %s",
            address,
            protocol,
            advice,
        )

    def _make_room(self, newcomer: Peer) -> bool:
        """Close a connection, so that there is room for another one; False if none has to go."""
        closed = self._find_silent(newcomer)
        if closed is not None:
            log.info("connection closed peer=%s: it sent no request, others wait", closed.address)
        elif (greedy := self._shares.find_greedy(newcomer)) is not None:
            closed = cast(ServerConnection, greedy)  # only connections are counted
            self._limited_log.warning(
                self.turn_start_ms,
                "connection closed peer=%s: there are escrowConnectionsMax=%d connections, most of "
                "them from %s, and others wait",
                closed.address,
                self._config.connections_max,
                closed.origin,
            )
        else:
            self.refused_connections += 1
            return False
        closed.drop()
        self.connection_closed(closed)
        return True

    def _find_silent(self, newcomer: Peer) -> ServerConnection | None:
        """Return the oldest connection without a request whose origin has no fewer connections."""
        own_count = self._shares.origin_amount_of(newcomer)
        for connection in itertools.islice(self._silent_connections, SILENT_SEARCHED_MAX):
            if self._shares.origin_amount_of(connection) >= own_count:
                return connection
        return None

    def origin_changed(self, connection: ServerConnection) -> None:
        """Count a connection for the account that it uses, instead of its host."""
        self._shares.update_origin(connection)
        self.memory.update_origin(connection)

    def handle_events(
        self, connection: ServerConnection, events: Iterator[Event]
    ) -> SlicedWork | None:
        """Handle the events of one chunk; responses are sent at the end of the turn.

        Return None when all of them are handled. Otherwise the connection has used its share of the
        turn: return what is left of the last request, which comes before the remaining events.
        """
        elapsed_s = self._elapsed_s
        if connection.turn_number != self.turn_number:
            connection.turn_number = self.turn_number
            connection.share_events = SHARE_EVENTS_MAX
            begin_s, share_s = min(elapsed_s(), self._accepts_until_s), self._share_s
            if connection.exceeds_share:
                begin_s = min(begin_s, self._accepts_until_s - TURN_S * (1 - GREEDY_PART))
                share_s *= GREEDY_PART
            connection.share_end_s = begin_s + share_s
        remaining, end_s = connection.share_events, connection.share_end_s
        if not remaining or elapsed_s() >= end_s:
            return nothing_begun()
        connection.exceeds_share = True
        handle_event = self.handle_event
        for event in events:
            work = handle_event(connection, event)
            if work is not None:  # its first slice; most requests that could take long do not
                for _ in work:
                    if elapsed_s() >= end_s:
                        return work
            remaining -= 1
            if (
                not remaining
                or elapsed_s() >= end_s
                or connection.turn_response_bytes >= TURN_RESPONSE_BYTES_MAX
            ):
                connection.share_events = remaining
                return nothing_begun()
        connection.share_events = remaining
        connection.exceeds_share = False
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

    def add_chunk(self, connection: ServerConnection, data: bytes) -> None:
        """Let the plain path read the bytes of a connection at the end of the turn."""
        self.schedule_turn()
        earlier = self._chunks.get(connection)
        self._chunks[connection] = data if earlier is None else earlier + data

    def handle_chunks(self) -> None:
        """Handle the plain requests of all connections, then whatever they leave.

        Also those of a connection that its client has closed in the meantime: it may have sent the
        end of a transaction last, and expects no response.
        """
        if self.plain_requests is None or not self._chunks:
            return
        began_s = self._elapsed_s()
        received, self._chunks = self._chunks, {}
        chunks = [
            (connection, connection.peer_host, connection.take_incomplete(), data)
            for connection, data in received.items()
        ]
        leftovers = {
            index: (rest, is_stopped)
            for index, rest, is_stopped in self.plain_requests.handle(chunks, self.turn_start_ms)
        }
        # However long the plain requests have taken, the others get their time of this turn.
        self._accepts_until_s += self._elapsed_s() - began_s
        self._share_s = min(SHARE_S, max(SHARE_MIN_S, TURN_S / len(chunks)))
        # Most have sent whole plain requests, and not their first ones. Of the others, those with
        # the fewest bytes come first. They are served in this turn, while behind others that use up
        # its time they would have to wait for a slice.
        unfinished = [
            index
            for index, (connection, _, incomplete, _) in enumerate(chunks)
            if incomplete or index in leftovers or connection.is_silent
        ]
        unfinished.sort(key=lambda index: len(leftovers.get(index, _NOTHING_LEFT)[0]))
        for index in unfinished:
            connection, _, incomplete, data = chunks[index]
            rest, is_stopped = leftovers.get(index, _NOTHING_LEFT)
            is_new_frame = len(rest) < len(incomplete) + len(data)
            try:
                connection.receive_leftover(rest, is_stopped=is_stopped, is_new_frame=is_new_frame)
            except Exception:  # it costs this connection, and no other its requests
                log.exception("connection closed peer=%s: a request failed", connection.address)
                connection.abort()

    def add_waiting(self, connection: ServerConnection, work: SlicedWork) -> None:
        """Go on with the work of a connection behind this turn, in slices."""
        self._waiting.add(work, origin=connection.origin)
        self.schedule_turn()

    def add_background_work(self, work: SlicedWork) -> None:
        """Go on with work that no connection waits for behind this turn, in slices."""
        self._waiting.add(work)
        self.schedule_turn()

    def connection_closed(self, connection: ServerConnection) -> None:
        self._total_unsent_bytes -= self._unsent_bytes.pop(connection, 0)
        self._clear_partial(connection)
        if connection in self.connections:
            self.connections.discard(connection)
            self._shares.remove(connection)
            self._silent_connections.pop(connection, None)
            self._held_connections.discard(connection)
            self._calling.discard(connection)
            self._idle_tracker.remove(connection)
            try:
                self._handler.channel_closed(connection)
            except Exception:  # a bug must not cost the loop that closes connections
                log.exception("closed connection not cleaned up peer=%s", connection.address)
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

    def has_unsent(self, connection: ServerConnection) -> bool:
        """Return whether responses wait until the client has read others."""
        return connection in self._unsent_bytes

    def schedule_flush(self, connection: ServerConnection) -> None:
        """Flush the connection at the end of the turn."""
        self._unflushed.append(connection)
        self.schedule_turn()

    def pause_for_turn(self, connection: ServerConnection) -> None:
        """Read from the connection again when those that have waited longer are read."""
        self._paused_for_turn.append(connection)
        self.schedule_turn()

    def close_after_turn(self, connection: ServerConnection) -> None:
        """Close the connection when the responses of this turn are sent, or somewhat later."""
        self._ended_connections.append(connection)
        self.schedule_turn()

    def schedule_turn(self) -> None:
        if not self._is_turn_scheduled:
            self._is_turn_scheduled = True
            self.turn_start_ms, self.turn_start_s = self._clock.now_ms(), self._clock.elapsed_s()
            self._accepts_until_s = self.turn_start_s + TURN_S
            self._share_s = SHARE_S
            self._loop.call_soon(self.end_turn)
            self._busy_poll.turn_began()

    def end_turn(self) -> None:
        self._finish_turn()
        self._run_slices()

    def _finish_turn(self) -> None:
        """Handle what has arrived, and send the responses of this turn."""
        self.handle_chunks()
        wants_more = False
        try:
            wants_more = self._handler.end_turn(self.turn_start_ms)
        except Exception:  # a bug must not hold back the responses of other requests
            log.exception("turn failed")
        unflushed, self._unflushed = self._unflushed, []
        has_written, self.has_written = self.has_written, False
        was_scheduled = self._is_turn_scheduled
        self._is_turn_scheduled = False  # only now: end_turn() above wrote responses of this turn
        self.turn_number += 1
        paused = self._paused_for_turn
        for _ in range(min(len(paused), LONG_CHUNKS_MAX)):
            paused.popleft().turn_ended()
        for connection in unflushed:
            self._flush(connection)
            self.update_unsent(connection)
            connection.resume_events()
        ended = self._ended_connections
        for _ in range(min(len(ended), CLOSED_PER_TURN_MAX)):
            ended.popleft().close()
        if self.memory.is_above_soft:
            self.watermark.enforce(self.turn_start_ms)
        if was_scheduled:
            self.turn_seconds.observe(self._clock.elapsed_s() - self.turn_start_s)
        self.on_turn_end()
        if wants_more or paused or ended:
            self.schedule_turn()  # requests that have arrived by then are part of it
        elif (unflushed or has_written) and not self._waiting:
            self._busy_poll.turn_ended()

    def _run_slices(self) -> None:
        """Begin the next turn with the requests that wait, if there are any.

        The responses of the turn before have left by now: whoever got one can send the next request
        meanwhile, and does not wait for slices of others twice.
        """
        if self._waiting:
            self.schedule_turn()
            self._waiting.run_turn()
            # However long the slices have taken, new requests get their time of this turn.
            self._accepts_until_s = self._elapsed_s() + TURN_S

    def _flush(self, connection: ServerConnection) -> None:
        try:
            connection.flush()
        except Exception:  # a broken connection must not cost the others their responses
            log.exception("connection closed peer=%s: responses not written", connection.address)
            connection.abort()

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


class BusyPoll:
    """Lets the event loop look for the next request for a moment before it sleeps.

    A client that waits for each response sends its next request some microseconds later. If the
    broker sleeps by then, the kernel has to wake it: the client pays for that when it sends, and
    both wait. On a virtual machine, which gives an idle processor back to its host, that takes
    longer than to handle the request.

    So after a turn the event loop looks at its sockets a few more times. What that costs is bounded
    twice: there are few polls, and after each turn for which they were in vain the next turns are
    not followed by any, twice as many each time. A client that takes its time is hardly ever polled
    for, and an idle broker never.
    """

    def __init__(self, call_soon: Callable[[Callable[[], None]], object], polls_max: int) -> None:
        """`call_soon` is that of the event loop, which polls its sockets before it calls."""
        self._call_soon = call_soon
        self._polls_max = polls_max
        self._remaining_polls = 0
        self._skipped_turns = 1  # how many to skip after the next polls that are in vain
        self._turns_to_skip = 0

    def turn_began(self) -> None:
        """Stop polling, because there is something to do."""
        if self._remaining_polls:
            self._remaining_polls = 0
            self._skipped_turns = 1

    def turn_ended(self) -> None:
        """Begin to poll, unless that was in vain after the last turns."""
        if self._turns_to_skip:
            self._turns_to_skip -= 1
        elif self._polls_max:
            self._remaining_polls = self._polls_max
            self._call_soon(self._poll)

    def _poll(self) -> None:
        if not self._remaining_polls:
            return
        self._remaining_polls -= 1
        if self._remaining_polls:
            self._call_soon(self._poll)
        else:
            self._turns_to_skip = self._skipped_turns
            self._skipped_turns = min(2 * self._skipped_turns, SKIPPED_TURNS_MAX)
