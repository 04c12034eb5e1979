"""One blocking connection to a broker: questions one by one, sends many at a time.

An answer that does not come, or says "later", is waited for until the time is up: the connection is
made again, and everything unanswered is sent again in its order. A half that was stored by then is
recognised by its key; whoever sends anything else may store it twice.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from escrowmq.clock import SystemClock
from escrowmq.errors import (
    EscrowError,
    NotSent,
    OutcomeUnknown,
    RemoteProtocolError,
    RequestRefused,
    UnknownRequest,
)
from escrowmq.remoting.codes import JSON, RequestCode, ResponseCode, request_name
from escrowmq.remoting.command import Command, decode_command, encode_command
from escrowmq.remoting.frame import FrameDecoder, frame_prefix
from escrowmq.remoting.headers import Header, encode_header
from escrowmq.remoting.requests import Body
from escrowmq.spark.options import SparkAccess

CONNECT_TIMEOUT_S: Final = 5.0
_CHUNK_BYTES: Final = 256 << 10
_LARGE_PART_BYTES: Final = 32 << 10  # bytes of a piece that is better sent than copied
_RETRY_DELAYS_S: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # between tries; the last one stays

_RETRIABLE_CODES: Final = frozenset(
    (
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.GO_AWAY,
    )
)

_clock = SystemClock()
_sleep = threading.Event().wait  # nobody sets it


FrameParts = tuple[Body, ...]  # its beginning, and what follows


class _Reply(NamedTuple):
    code: int
    remark: str
    body: Body


class SendConnection:
    """`timeout_s`: how long one request may take, however often it has to be sent again."""

    def __init__(
        self,
        address: str,
        access: SparkAccess,
        *,
        timeout_s: float,
        in_flight_bytes: int = 8 << 20,
    ) -> None:
        self.address = address
        self._access = access
        self._timeout_s = timeout_s
        self._max_in_flight_bytes = in_flight_bytes
        self._socket: socket.socket | None = None
        self._frame_decoder = FrameDecoder(self._frame_received)
        self._opaque = 0
        self._unanswered: dict[int, FrameParts] = {}  # sends, in the order they were made
        self._in_flight_bytes = 0
        self._frames_to_resend: list[FrameParts] = []  # sends that were put off by the broker
        self._replies: dict[int, _Reply] = {}
        self._pending_calls: set[int] = set()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # --- questions -------------------------------------------------------------------------------

    def call(self, code: RequestCode, header: Header | None = None, body: bytes = b"") -> Body:
        """Raises RequestRefused, or TransportError once the time is up."""
        deadline_s = _clock.elapsed_s() + self._timeout_s
        for pause_s in _retry_delays():
            try:
                reply = self._call_once(code, header, body)
            except (NotSent, OutcomeUnknown):
                self._disconnect()
                if _clock.elapsed_s() + pause_s > deadline_s:
                    raise
            else:
                if reply.code == ResponseCode.SUCCESS:
                    return reply.body
                if reply.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                    raise UnknownRequest(
                        reply.code, f"{self.address} does not know {request_name(code)}"
                    )
                if reply.code not in _RETRIABLE_CODES or _clock.elapsed_s() + pause_s > deadline_s:
                    raise RequestRefused(reply.code, f"{self.address}: {reply.remark}")
            _sleep(pause_s)
        raise AssertionError("pauses have no end")

    def _call_once(self, code: RequestCode, header: Header | None, body: bytes) -> _Reply:
        opaque, frame = self._encode_frame(code, header, (body,), len(body))
        self._pending_calls.add(opaque)
        self._send(frame)
        while opaque not in self._replies:
            self._receive()
        self._pending_calls.discard(opaque)
        return self._replies.pop(opaque)

    # --- sends -----------------------------------------------------------------------------------

    def send(
        self, code: RequestCode, header: Header, body_parts: Iterable[Body], body_bytes: int
    ) -> None:
        """It is on its way. Waits while too many are; raises as `flush`."""
        opaque, frame = self._encode_frame(code, header, body_parts, body_bytes)
        self._unanswered[opaque] = frame
        self._in_flight_bytes += _frame_bytes(frame)
        self._run_until(
            lambda: self._send(frame), lambda: self._in_flight_bytes > self._max_in_flight_bytes
        )

    def flush(self) -> None:
        """All that was sent is stored. Raises RequestRefused or TransportError if it is not."""
        self._run_until(lambda: None, lambda: bool(self._unanswered))

    def _run_until(self, action: Callable[[], None], must_wait: Callable[[], bool]) -> None:
        """Do it, and read answers while it has to wait; all over again if the connection goes."""
        deadline_s = _clock.elapsed_s() + self._timeout_s
        pauses = _retry_delays()
        while True:
            try:
                action()
                while must_wait():
                    if self._frames_to_resend:
                        _sleep(next(pauses))
                        again, self._frames_to_resend = self._frames_to_resend, []
                        for frame in again:
                            self._send(frame)
                    before = len(self._unanswered)
                    self._receive()
                    if len(self._unanswered) < before:
                        deadline_s = _clock.elapsed_s() + self._timeout_s
                    elif _clock.elapsed_s() > deadline_s:
                        raise OutcomeUnknown(
                            f"{self.address} has stored nothing for {self._timeout_s:.0f} s"
                        )
            except (NotSent, OutcomeUnknown):
                self._disconnect()
                if _clock.elapsed_s() > deadline_s:
                    raise
                _sleep(next(pauses))
                action = self._resend_all
            else:
                return

    def _resend_all(self) -> None:
        self._frames_to_resend = []
        for frame in list(self._unanswered.values()):
            self._send(frame)

    # --- bytes -----------------------------------------------------------------------------------

    def _encode_frame(
        self, code: RequestCode, fields: Header | None, body_parts: Iterable[Body], body_bytes: int
    ) -> tuple[int, FrameParts]:
        self._opaque += 1
        ext_fields = {} if fields is None else encode_header(fields)
        if self._access.access_key:
            body_parts = (b"".join(body_parts),)
            ext_fields = self._access.sign(ext_fields, *body_parts)
        command = Command(code=code, opaque=self._opaque, ext_fields=ext_fields)
        header = encode_command(command, JSON)
        prefix = frame_prefix(JSON, len(header), body_bytes)
        return self._opaque, (prefix + header, *body_parts)

    def _send(self, frame: FrameParts) -> None:
        if self._socket is None:
            self._socket = self._access.connect(
                self.address, min(CONNECT_TIMEOUT_S, self._timeout_s)
            )
            self._frame_decoder = FrameDecoder(self._frame_received)
        self._socket.settimeout(self._access.timeout_s)
        try:
            for piece in _coalesce(frame):
                self._socket.sendall(piece)
        except OSError as error:
            raise OutcomeUnknown(f"{self.address}: {error}") from error

    def _receive(self) -> None:
        assert self._socket is not None, "something was sent"
        try:
            self._socket.settimeout(min(self._access.timeout_s, self._timeout_s))
            data = self._socket.recv(_CHUNK_BYTES)
        except OSError as error:
            raise OutcomeUnknown(f"{self.address}: {error}") from error
        if not data:
            raise OutcomeUnknown(f"{self.address} closed the connection before it answered")
        try:
            self._frame_decoder.receive(data)
            for _ in self._frame_decoder.frames():
                pass
        except RemoteProtocolError as error:
            raise OutcomeUnknown(f"{self.address}: {error}") from error

    def _frame_received(self, serializer: int, header: bytes, body: Body) -> None:
        command = decode_command(serializer, header)
        opaque, code = command.opaque, command.code
        if not command.is_response:
            return
        if opaque in self._pending_calls:
            self._replies[opaque] = _Reply(code, command.remark, bytes(body))
            return
        frame = self._unanswered.get(opaque)
        if frame is None:
            return
        if code == ResponseCode.SUCCESS or code in _STORED_CODES:
            del self._unanswered[opaque]
            self._in_flight_bytes -= _frame_bytes(frame)
        elif code in _RETRIABLE_CODES:
            self._frames_to_resend.append(frame)
        else:
            raise _refused_error(self.address, command)

    def _disconnect(self) -> None:
        self.close()
        self._pending_calls.clear()
        self._replies.clear()


# A replica or a flush was slow: it is stored, and a decision over halves counts what is there.
_STORED_CODES: Final = frozenset(
    (
        ResponseCode.FLUSH_DISK_TIMEOUT,
        ResponseCode.SLAVE_NOT_AVAILABLE,
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
    )
)


def _frame_bytes(frame: FrameParts) -> int:
    return sum(map(len, frame))


def _coalesce(frame: FrameParts) -> FrameParts:
    """Long pieces as they are; many short ones are joined, for each is a call of its own."""
    is_long = _frame_bytes(frame) >= _LARGE_PART_BYTES * len(frame)
    return frame if is_long else (b"".join(frame),)


def _refused_error(address: str, command: Command) -> EscrowError:
    return RequestRefused(command.code, f"{address}: {command.remark or command.code}")


def _retry_delays() -> Iterator[float]:
    yield from _RETRY_DELAYS_S
    while True:
        yield _RETRY_DELAYS_S[-1]
