"""One client connection of a port: requests in, responses out, within its share of a turn.

    data_received(chunk) → RemotingServer.handle_events() → RequestHandler.handle()
    requests that exceed the share → wait for slices behind the responses of each turn
    respond…() → flush() at the end of the turn → transport, in portions

The responses of a connection keep the order of its requests: while one of them waits, nothing more
is read. A connection whose client does not read its responses is suspended until it does.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from escrowmq.client_memory import MemoryUse
from escrowmq.errors import NotSent, RemoteProtocolError, TableFull
from escrowmq.message.keys import encode_host
from escrowmq.peer import host_of
from escrowmq.remoting.codes import ResponseCode
from escrowmq.remoting.command import Command
from escrowmq.remoting.connection import (
    Call,
    CallFailed,
    Event,
    Response,
)
from escrowmq.remoting.foreign_protocols import FOREIGN_BYTES, foreign_protocol
from escrowmq.remoting.headers import Header
from escrowmq.remoting.requests import Body, Request
from escrowmq.remoting.responses import (
    encode_pull_response,
    encode_response,
    encode_response_in_pieces,
    encode_success,
)
from escrowmq.sliced_work import SlicedWork

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from escrowmq.broker.dispatch import Channel
    from escrowmq.server.remoting_server import RemotingServer

JOINED_BODY_BYTES_MAX = 8 * 1024  # below it, one joined write is cheaper than two pieces
WRITTEN_PIECES_MAX = 1024  # that one system call writes (IOV_MAX)
# So much is handed to the transport at once, and the transport asks for a pause when it could not
# send so much.
PORTION_BYTES = 256 * 1024
# Responses of one connection in one turn; then the others have a turn.
TURN_RESPONSE_BYTES_MAX = 256 * 1024
# Of the connection's own objects. Measured on CPython 3.11 as the growth of a broker's memory with
# thousands of connections that have sent a request: 3,900 bytes each.
CONNECTION_BYTES = 8 * 1024
# The same with the state of OpenSSL and its two buffers, which grow with what passes them: 23,100
# bytes after a short request, 113,700 after a message of 100 KB in each direction.
# tests/e2e/broker/test_greedy_clients.py repeats all three measurements.
TLS_CONNECTION_BYTES = 128 * 1024
IPV4_HOST_BYTES = 8
# A chunk as long as this means that more bytes wait in the socket. They are read in a later turn:
# the event loop would read up to 32 such chunks of one connection before it serves another one.
LONG_CHUNK_BYTES = 128 * 1024
PLAIN_FRAME_BYTES_MAX = 64 * 1024  # longer frames are not plain
# Of a call that waits for a client, with the request that is responded to afterwards. Measured on
# CPython 3.11 by tests/unit/test_memory_estimates.py: 1,670 bytes with two names of 255 bytes.
CALL_BYTES = 2_000


class _PendingCall(NamedTuple):
    on_response: Callable[[Command | None, bytes], None]
    requester: ServerConnection


class ServerConnection(asyncio.Protocol):
    """One client connection. For the broker it is a `Channel`."""

    def __init__(self, server: RemotingServer) -> None:
        self._server = server
        self._connection = server.new_connection()
        self._encode_send_response = server.send_response_encoder.encode
        self._transport: asyncio.Transport | None = None
        self._has_tls = False
        self._socket_number: int | None = None  # None: responses go through the transport
        self._outgoing: list[Body] = []  # responses of this turn
        # Of the responses of this turn; those to sends, which are short, are not counted.
        self.turn_response_bytes = 0
        self._unsent: deque[Body] = deque()  # not handed to the transport yet
        self._unsent_bytes = 0
        self._is_write_paused = False
        self._is_held = False
        self._has_read_enough = False  # in this turn
        self._closes_when_sent = False  # nothing more is read, and responses are sent to the end
        self.is_silent = True  # no complete request has arrived yet
        self._first_bytes = b""  # of the chunk that ended its silence, or violates the protocol
        self._has_account = False
        self._pending_calls: dict[Call, _PendingCall] = {}
        # Calls on other connections that wait for this one: its requests are responded to by them.
        self._calls_for_this: set[tuple[ServerConnection, Call]] = set()
        # The requests of a chunk that was not handled within one share wait for a slice, or here
        # until the client has read its responses.
        self._has_waiting_events = False
        self._suspended_events: Iterator[Event] | None = None
        self.turn_number = -1  # the turn to which the next two belong
        self.share_end_s = 0.0
        self.exceeds_share = False  # it had more requests than its share when it was served last
        self.share_events = 0  # how many more of them fit into the share of this turn
        self.last_active_s = server.elapsed_s()
        self.partial = 0, 0  # incomplete request: bytes received so far, and its number
        self.incomplete = b""  # the beginning of a frame, for the plain path
        self._incomplete_count = 0
        self._can_be_plain = False
        self.address = ""
        self.origin = ""
        self.peer_host = b"\0" * 8

    # --- asyncio ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        address = transport.get_extra_info("peername") or ("0.0.0.0", 0)
        self.address = f"{address[0]}:{address[1]}"
        self.origin = host_of(self.address)
        self.peer_host = encode_host(address[0].partition("%")[0], address[1])
        self._has_tls = transport.get_extra_info("sslcontext") is not None
        if not self._has_tls and (socket := transport.get_extra_info("socket")) is not None:
            self._socket_number = socket.fileno()
        self._can_be_plain = (
            self._server.plain_requests is not None and len(self.peer_host) == IPV4_HOST_BYTES
        )
        self._transport.set_write_buffer_limits(high=PORTION_BYTES)
        if self._server.admit(self):
            own_bytes = TLS_CONNECTION_BYTES if self._has_tls else CONNECTION_BYTES
            self._server.memory.add(self, MemoryUse.CONNECTIONS, own_bytes)
        else:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        server = self._server
        if self._closes_when_sent:
            return  # received before reading could be paused
        if len(data) >= LONG_CHUNK_BYTES and not self._has_read_enough:
            self._has_read_enough = True
            self._update_reading()
            server.pause_for_turn(self)
        # Behind a request of this turn that was not plain, nothing is: the order is kept.
        is_behind_other = self.turn_number == server.turn_number or self._has_waiting_events
        if self._can_be_plain and not is_behind_other:
            server.add_chunk(self, data)
            self.last_active_s = server.turn_start_s
        else:
            self._receive(self.take_incomplete() + data)

    def turn_ended(self) -> None:
        """Read again after a long chunk."""
        self._has_read_enough = False
        self._update_reading()

    def take_incomplete(self) -> bytes:
        """Remove and return the beginning of a frame that the last chunk of this turn cut."""
        incomplete, self.incomplete = self.incomplete, b""
        return incomplete

    def receive_leftover(self, rest: bytes, *, is_stopped: bool, is_new_frame: bool) -> None:
        """Go on with what the plain path has left of a chunk.

        `is_stopped`: it begins with a request that is not plain. Otherwise it is the beginning of
        a frame; `is_new_frame`: another one than before.
        """
        if self.is_silent and is_new_frame:
            self.is_silent = False
            self._server.request_received(self)
        if is_stopped:
            self._receive(rest)
            return
        self.incomplete = rest
        self._incomplete_count += is_new_frame
        self._update_partial()

    def _receive(self, data: bytes) -> None:
        """Handle requests in the Python path."""
        server, connection = self._server, self._connection
        try:
            connection.receive(data)
            server.schedule_turn()
            self.last_active_s = server.turn_start_s
            events = connection.events()
            if self.is_silent:
                self._first_bytes = data[:FOREIGN_BYTES]
                events = self._watch_first(events)
            remaining_work = server.handle_events(self, events)
        except RemoteProtocolError as error:
            self._close_after(error)
        else:
            if remaining_work is not None:
                # Read nothing more until it is done: the responses keep the order of the requests.
                self._has_waiting_events = True
                self._update_reading()
                server.memory.set(self, MemoryUse.WAITING_REQUESTS, connection.buffered_bytes)
                server.add_waiting(self, self._continue(events, remaining_work))
        self._return_partial()
        self._update_partial()

    def _return_partial(self) -> None:
        """Let the plain path go on with a frame that is not complete, if it is short."""
        partial_bytes, number = self._connection.partial_frame
        is_handled = not self._has_waiting_events and self.is_open
        if self._can_be_plain and is_handled and 0 < partial_bytes < PLAIN_FRAME_BYTES_MAX:
            self.incomplete = self._connection.take_partial()
            self._incomplete_count = number

    def _watch_first(self, events: Iterator[Event]) -> Iterator[Event]:
        """Yield the events, and note that the connection is not silent before the first."""
        for event in events:
            if self.is_silent:
                self.is_silent = False
                self._server.request_received(self)
            yield event

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
                if self._must_wait:
                    self._suspended_events = events
                    return
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
        self._server.memory.set(self, MemoryUse.WAITING_REQUESTS, 0)
        self._return_partial()
        self._update_reading()
        self._update_partial()

    @property
    def _must_wait(self) -> bool:
        """Whether the next request has to wait until responses were sent, or memory was freed."""
        return (
            self._is_held
            or self.is_congested
            or self.turn_response_bytes >= TURN_RESPONSE_BYTES_MAX
        )

    def resume_events(self) -> None:
        """Go on with requests that were suspended, if nothing holds them back any more."""
        if self._suspended_events is not None and not self._must_wait:
            events, self._suspended_events = self._suspended_events, None
            self._server.add_waiting(self, self._continue(events, nothing_begun()))

    def _close_after(self, error: RemoteProtocolError) -> None:
        protocol = foreign_protocol(self._first_bytes) if self.is_silent else ""
        if protocol:
            self._server.foreign_client_came(self.address, protocol)
        else:
            log.info("connection closed peer=%s: %s", self.address, error)
        self.close()

    def eof_received(self) -> bool:
        """Let a client that sends no more read its responses. Return whether to stay open."""
        self._server.handle_chunks()  # the requests that it has sent last
        if self._has_tls:  # it cannot be open in one direction only
            self._discard()
            self._server.update_unsent(self)
            return False
        self._server.close_after_turn(self)
        return True

    def _update_partial(self) -> None:
        partial = self._connection.partial_frame
        if self.incomplete:
            partial = len(self.incomplete), self._incomplete_count
        if partial != self.partial:
            before, self.partial = self.partial, partial
            self._server.update_partial(self, before)

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self.last_active_s = self._server.elapsed_s()
        self._send_unsent()
        self._server.update_unsent(self)
        self._update_reading()
        self.resume_events()

    def hold_reading(self, is_held: bool) -> None:
        """Stop or resume reading, depending on the memory that all connections together use."""
        if is_held != self._is_held:
            self._is_held = is_held
            self._update_reading()

    def _update_reading(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        should_read = not (
            self._closes_when_sent
            or self._is_held
            or self._has_read_enough
            or self._has_waiting_events
            or self.is_congested
        )
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
        self._drop_calls_for_this()
        self._server.connection_closed(self)

    # --- what the broker uses: see broker.dispatch.Channel ---------------------------------------

    def set_account(self, access_key: str) -> None:
        if not self._has_account:
            self._has_account = True
            self.origin = f"account {access_key}"
            self._server.origin_changed(self)

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
        elif len(body) > JOINED_BODY_BYTES_MAX:
            self.write_pieces(
                encode_response_in_pieces(request, header, (body,), code=code, remark=remark)
            )
        else:
            self.write(encode_response(request, header, code=code, remark=remark, body=body))

    def respond_in_pieces(
        self, request: Request[Any], header: Header, body: Sequence[Body]
    ) -> None:
        self.write_pieces(encode_response_in_pieces(request, header, body))

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

    def write(self, data: Body) -> None:
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

    def write_at_once(self, data: Body) -> None:
        """Write a response without waiting for the end of the turn, if none waits before it.

        For a client with one request in flight, the end of the turn costs more than the system
        call.
        """
        transport = self._transport
        if (
            self._socket_number is None
            or self._outgoing
            or transport is None
            or transport.is_closing()
            or self._server.has_unsent(self)
        ):
            self.write(data)
            return
        self._server.has_written = True
        try:
            sent_bytes = os.write(self._socket_number, data)
        except (BlockingIOError, InterruptedError):
            sent_bytes = 0
        except OSError:
            self.abort()  # the client has closed or reset the connection
            return
        if sent_bytes < len(data):
            self.write(memoryview(data)[sent_bytes:])

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
            self.write_pieces(self._connection.send_oneway_in_parts(code, fields, body))
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
        requester: Channel,
        timeout_s: float,
    ) -> bool:
        if not self.can_send:
            return False
        waiting = cast(ServerConnection, requester)  # all channels of a server are connections
        deadline_s = self._server.elapsed_s() + timeout_s
        try:
            call, data = self._connection.call(code, fields, body, deadline_s=deadline_s)
        except NotSent:
            return False
        try:
            self._server.memory.reserve(waiting, MemoryUse.PENDING_CALLS, CALL_BYTES)
        except TableFull:
            self._connection.cancel(call)
            raise
        self._pending_calls[call] = _PendingCall(on_response, waiting)
        waiting._calls_for_this.add((self, call))
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
        pending = self._pending_calls.pop(call, None)
        if pending is None:
            return
        pending.requester._calls_for_this.discard((self, call))
        self._server.memory.release(pending.requester, MemoryUse.PENDING_CALLS, CALL_BYTES)
        try:
            pending.on_response(command, bytes(body))
        except Exception:  # it costs the one who waits for this response, and nobody else
            log.exception("response not handled peer=%s code=%d", self.address, call.code)

    def _drop_calls_for_this(self) -> None:
        """Stop waiting for responses that would be passed on to this connection."""
        calls, self._calls_for_this = self._calls_for_this, set()
        for connection, call in calls:
            connection._pending_calls.pop(call, None)
            connection._connection.cancel(call)

    def flush(self) -> None:
        """Hand the responses of this turn to the transport, as far as it takes them."""
        out, self._outgoing = self._outgoing, []
        self.turn_response_bytes = 0
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._socket_number is not None and not self._has_unsent_bytes:
            out = self._send_directly(self._socket_number, out)
            if not out:
                return
        # What is kept is copied: views of large blocks of the log would keep the whole blocks.
        out = [piece if type(piece) is bytes else bytes(piece) for piece in out]
        size = sum(map(len, out))
        if size > PORTION_BYTES or self._is_write_paused or self._unsent:
            self._unsent.extend(out)
            self._unsent_bytes += size
            self._send_unsent()
        else:
            transport.writelines(out)

    @property
    def _has_unsent_bytes(self) -> bool:
        transport = self._transport
        return bool(self._unsent) or (
            transport is not None and transport.get_write_buffer_size() > 0
        )

    def _send_directly(self, socket_number: int, out: list[Body]) -> list[Body]:
        """Write responses to the socket, past the transport. Return what did not fit.

        Nothing may be unsent before.
        """
        try:
            if len(out) == 1:
                sent_bytes = os.write(socket_number, out[0])
            elif len(out) <= WRITTEN_PIECES_MAX:
                sent_bytes = os.writev(socket_number, out)
            else:
                sent_bytes = os.write(socket_number, b"".join(out))
        except (BlockingIOError, InterruptedError):
            sent_bytes = 0
        except OSError:
            self.abort()  # the client has closed or reset the connection
            return []
        for index, piece in enumerate(out):
            if sent_bytes < len(piece):
                return [memoryview(piece)[sent_bytes:], *out[index + 1 :]]
            sent_bytes -= len(piece)
        return []

    def _send_unsent(self) -> None:
        """Hand unsent responses to the transport in portions, until it asks for a pause."""
        transport, unsent = self._transport, self._unsent
        if transport is None or transport.is_closing():
            return
        while unsent and not self._is_write_paused:
            portion: list[Body] = []
            remaining = PORTION_BYTES
            while unsent and remaining > 0:
                piece = unsent.popleft()
                if len(piece) > remaining:
                    view = memoryview(piece)
                    unsent.appendleft(view[remaining:])
                    piece = view[:remaining]
                portion.append(piece)
                remaining -= len(piece)
            self._unsent_bytes -= PORTION_BYTES - remaining
            transport.writelines(portion)
        if self._closes_when_sent and not unsent:
            transport.close()

    def close(self) -> None:
        """Read nothing more, and close the connection when the client has read its responses.

        They stay in our own queue until then. In the transport they could not be counted, and a
        client that never reads them would keep them there.
        """
        self._closes_when_sent = True
        self.flush()
        if self._transport is not None and not self._unsent:
            self._transport.close()
        self._server.update_unsent(self)
        self._update_reading()

    def close_at_stop(self) -> None:
        """Hand all responses to the transport and close the connection: the server stops."""
        if self._transport is not None:
            self.flush()
            if self._unsent and not self._transport.is_closing():
                # The transport waits for what it has, as it would for the rest.
                self._transport.writelines(self._unsent)
                self._unsent.clear()
                self._unsent_bytes = 0
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once, without writing anything."""
        if self._transport is not None:
            self._transport.abort()
        self._discard()

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
        self._suspended_events = None
        self._connection.discard_received()


def nothing_begun() -> SlicedWork:
    """Return work for a connection whose last request is done, but not all of its requests."""
    yield from ()
