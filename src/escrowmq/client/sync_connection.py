"""A blocking connection to a broker or name server, for code that runs no event loop.

The command line, `escrowmq.admin` and Spark's tasks use it:

    call()                            one request, one response
    call_many()                       many requests, up to 64 of them unanswered at a time
    send(), receive()                 the caller keeps track of what is unanswered
    send(), receive_head(), receive_into()
                                      the same, and the body goes straight into the caller's buffer

`remoting.Connection` encodes, numbers and signs the requests. Responses are read here, because a
pull of Spark is megabytes long and should be copied once only: from the socket into the block that
is decoded. A SyncConnection is not thread-safe.
"""

from __future__ import annotations

import math
import select
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Final, NamedTuple, NoReturn

from escrowmq.client.access import NO_ACCESS, Access
from escrowmq.client.wrong_address import (
    describe_connect_error,
    describe_strange_server,
    describe_unknown_request,
)
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import (
    LocalProtocolError,
    NotSent,
    OutcomeUnknown,
    RemoteProtocolError,
    RequestRefused,
    TransportError,
    UnknownRequest,
)
from escrowmq.parsing import parse_address
from escrowmq.remoting.codes import ResponseCode, request_name
from escrowmq.remoting.command import Command, decode_command
from escrowmq.remoting.connection import Connection, Reply
from escrowmq.remoting.frame import decode_prefix
from escrowmq.remoting.headers import Header
from escrowmq.remoting.requests import Body

DEFAULT_TIMEOUT_S: Final = 10.0
CONNECT_TIMEOUT_S: Final = 10.0
DEFAULT_WINDOW: Final = 64

_PREFIX_BYTES: Final = 8
_NO_DEADLINE: Final = math.inf  # of a call: the socket has a timeout, and `expire` is not used
# Bytes that are read ahead. Enough for the heads of a dozen responses in one system call; little
# enough that copying them out of the buffer does not count beside a response of a megabyte.
_READ_AHEAD_BYTES: Final = 4096
# A part of at least this size is passed to the socket as it is; smaller ones are joined first,
# because a system call for each would cost more than the copy.
_LARGE_PART_BYTES: Final = 32 << 10
# A peer that sends a response byte by byte would keep the caller waiting for days.
_SLOWEST_BYTES_PER_S: Final = 64 << 10


class OutgoingRequest(NamedTuple):
    """A request for `call_many`."""

    code: int
    header: Header | None = None
    body: Body = b""


class SyncConnection:
    """A connection to `address` (HOST:PORT). The constructor opens it, and raises NotSent.

    `timeout_s` limits the wait for the next bytes of a response, and for the whole response too,
    with a second more for each `_SLOWEST_BYTES_PER_S` bytes of it. Every method raises
    OutcomeUnknown if the connection breaks, if it times out, or if the peer does not speak the
    remoting protocol. The connection is then closed, and every later use raises NotSent.
    """

    def __init__(
        self,
        address: str,
        access: Access = NO_ACCESS,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._clock = SystemClock() if clock is None else clock
        self._connection = Connection(sign=access.signer())
        # Requests of `call` and `call_many` without a response, or with one in `_replies`.
        self._awaited: dict[int, int] = {}  # opaque -> request code
        self._replies: dict[int, Reply] = {}  # responses that overtook an earlier one
        self._chunk = b""  # what was read ahead: chunk[position:]
        self._position = 0
        self._is_open = True
        self._has_responded = False  # it has sent a valid response
        self._deadline_s = math.inf  # of the response that is being read
        self._socket = _open_socket(address, access, min(timeout_s, CONNECT_TIMEOUT_S))
        self._socket.settimeout(timeout_s)

    def __enter__(self) -> SyncConnection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket. Requests without a response may or may not take effect."""
        self._is_open = False
        self._connection.close()
        self._socket.close()

    def is_usable(self) -> bool:
        """Return whether an idle connection is still open on both sides.

        A peer sends nothing on an idle connection. If it is readable, the peer has closed it, as
        brokers do after two minutes, or has sent a request that is not meant for this client.
        """
        if not self._is_open:
            return False
        if self._connection.pending_calls:
            return True
        idle = select.poll()  # select() cannot take descriptors above 1023
        idle.register(self._socket, select.POLLIN)
        return not idle.poll(0)

    # --- requests with their responses -----------------------------------------------------------

    def call(self, code: int, header: Header | None = None, body: Body = b"") -> Reply:
        """Send one request and return its response. Raises RequestRefused if its code is not 0."""
        reply = self._wait(self._call(code, header, body))
        if reply.code != ResponseCode.SUCCESS:
            raise self.refusal(code, reply)
        return reply

    def call_many(
        self, requests: Iterable[OutgoingRequest], window: int = DEFAULT_WINDOW
    ) -> Iterator[Reply]:
        """Yield the responses in the order of the requests, whatever their codes are.

        At most `window` requests are unanswered at a time. That is one round trip, or one flush of
        the broker, for many requests.
        """
        opaques: deque[int] = deque()
        try:
            for request in requests:
                opaques.append(self._call(request.code, request.header, request.body))
                if len(opaques) >= window:
                    yield self._wait(opaques.popleft())
            while opaques:
                yield self._wait(opaques.popleft())
        finally:
            # If the caller stopped early, the responses are dropped when they arrive.
            for opaque in opaques:
                del self._awaited[opaque]
                self._replies.pop(opaque, None)
                self._connection.end_call(opaque)

    def refusal(self, code: int, reply: Reply) -> RequestRefused:
        """Return the error for a response whose code is not 0. `code` is that of the request."""
        if reply.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            return UnknownRequest(reply.code, describe_unknown_request(self.address, code))
        return RequestRefused(reply.code, reply.remark or f"{self.address}: code {reply.code}")

    def _call(self, code: int, header: Header | None, body: Body) -> int:
        if self._connection.pending_calls > len(self._awaited) - len(self._replies):
            raise LocalProtocolError("call() while requests of send() are unanswered")
        opaque = self.send(code, header, (body,) if body else ())
        self._awaited[opaque] = code
        return opaque

    def _wait(self, opaque: int) -> Reply:
        deadline_s = self._clock.elapsed_s() + self.timeout_s
        while opaque not in self._replies:
            if self._clock.elapsed_s() > deadline_s:
                self._fail(self._timed_out(self._awaited[opaque]))
            received_opaque, reply = self.receive()
            if received_opaque in self._awaited:
                self._replies[received_opaque] = reply
                # Others were waiting for it in the same connection, so this is progress.
                deadline_s = self._clock.elapsed_s() + self.timeout_s
        del self._awaited[opaque]
        return self._replies.pop(opaque)

    # --- sending and receiving by themselves -----------------------------------------------------

    def send(self, code: int, header: Header | None = None, body_parts: Sequence[Body] = ()) -> int:
        """Send a request and return its opaque, the number that its response will carry."""
        if not self._is_open:
            raise NotSent(f"{self.address}: the connection is closed")
        call, frame = self._connection.call_in_parts(
            code, header, body_parts, deadline_s=_NO_DEADLINE
        )
        try:
            for part in _coalesce(frame):
                self._socket.sendall(part)
        except OSError as error:
            self._fail(OutcomeUnknown(f"{self.address}: {_os_error_text(error)}"), error)
        return call.opaque

    def receive(self) -> tuple[int, Reply]:
        """Return the next response and its opaque."""
        command, body_bytes = self.receive_head()
        body = self._read(body_bytes) if body_bytes else b""
        reply = Reply(command.code, command.remark, command.ext_fields, body, command.version)
        return command.opaque, reply

    def receive_head(self) -> tuple[Command, int]:
        """Return the next response without its body, and the length of the body in bytes.

        The caller must read the body with `receive_into` next, unless it is empty. Brokers send
        requests to members of groups only; a SyncConnection is none, so requests are skipped.
        """
        self._deadline_s = self._clock.elapsed_s() + self.timeout_s
        while True:
            try:
                serializer, header_length, body_bytes = decode_prefix(self._read(_PREFIX_BYTES))
                self._deadline_s += (header_length + body_bytes) / _SLOWEST_BYTES_PER_S
                command = decode_command(serializer, self._read(header_length))
            except RemoteProtocolError as error:
                self._fail(
                    OutcomeUnknown(
                        f"{self.address} does not speak the remoting protocol: {error}"
                        f"{self._hint()}"
                    ),
                    error,
                )
            self._has_responded = True
            if command.is_response:
                self._connection.end_call(command.opaque)
                return command, body_bytes
            self._read(body_bytes)
            if self._clock.elapsed_s() > self._deadline_s:
                self._fail(OutcomeUnknown(f"{self.address} sends requests and no response"))

    def receive_into(self, buffer: memoryview) -> None:
        """Fill the buffer with the next bytes of the connection."""
        size = len(buffer)
        position = min(size, len(self._chunk) - self._position)
        if position:
            buffer[:position] = self._read(position)
        while position < size:
            position += self._receive_some(buffer[position:])

    def _read(self, byte_count: int) -> bytes:
        """Return the next bytes. Short reads are served from what was read ahead."""
        end = self._position + byte_count
        if end > len(self._chunk):
            if byte_count > _READ_AHEAD_BYTES:
                buffer = bytearray(byte_count)
                self.receive_into(memoryview(buffer))
                return bytes(buffer)
            self._read_ahead(byte_count)
            end = byte_count
        data = self._chunk[self._position : end]
        self._position = end
        return data

    def _read_ahead(self, byte_count: int) -> None:
        """Receive until at least this many bytes are in the chunk, with its position at 0."""
        unread = self._chunk[self._position :]
        buffer = memoryview(bytearray(_READ_AHEAD_BYTES))
        end = len(unread)
        buffer[:end] = unread
        while end < byte_count:
            if not self._has_responded:
                self._chunk = bytes(buffer[:end])  # for the hint, if nothing more comes
            end += self._receive_some(buffer[end:])
        self._chunk = bytes(buffer[:end])
        self._position = 0

    def _receive_some(self, buffer: memoryview) -> int:
        if not self._is_open:
            raise NotSent(f"{self.address}: the connection is closed")
        if self._clock.elapsed_s() > self._deadline_s:
            oldest = self._connection.oldest_call
            self._fail(self._timed_out(None if oldest is None else oldest.code))
        try:
            received = self._socket.recv_into(buffer)
        except TimeoutError as error:
            oldest = self._connection.oldest_call
            self._fail(self._timed_out(None if oldest is None else oldest.code), error)
        except OSError as error:
            self._fail(
                OutcomeUnknown(f"{self.address}: {_os_error_text(error)}{self._hint()}"), error
            )
        if not received:
            self._fail(
                OutcomeUnknown(
                    f"{self.address} closed the connection before it responded{self._hint()}"
                )
            )
        return received

    def _hint(self) -> str:
        """Return what to look at if the server has never sent a valid response."""
        return "" if self._has_responded else f"; {describe_strange_server(self._chunk)}"

    def _timed_out(self, code: int | None) -> OutcomeUnknown:
        request = "" if code is None else f" to {request_name(code)}"
        return OutcomeUnknown(f"{self.address}: no response{request} in {self.timeout_s:g} s")

    def _fail(self, error: TransportError, cause: BaseException | None = None) -> NoReturn:
        """Close the connection and raise. A part of a frame may have been sent or read, so no
        other frame can follow."""
        self.close()
        raise error from cause


def _coalesce(frame: Sequence[Body]) -> Sequence[Body]:
    is_large = sum(map(len, frame)) >= _LARGE_PART_BYTES * len(frame)
    return frame if is_large or len(frame) == 1 else (b"".join(frame),)


def _open_socket(address: str, access: Access, timeout_s: float) -> socket.socket:
    try:
        host, port = parse_address(address)
    except ValueError as error:
        raise NotSent(str(error)) from None
    context = access.ssl_context()
    opened: socket.socket | None = None
    try:
        opened = socket.create_connection((host, port), timeout=timeout_s)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is None:
            return opened
        return context.wrap_socket(opened, server_hostname=host)
    except (OSError, ValueError) as error:  # ValueError: the name of the host is impossible
        if opened is not None:
            opened.close()
        raise NotSent(
            describe_connect_error(address, error, timeout_s=timeout_s, has_tls=context is not None)
        ) from None


def _os_error_text(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
