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
from escrowmq.remoting.frame import FrameCutter, frame_prefix
from escrowmq.remoting.headers import Header, encode_header
from escrowmq.remoting.requests import Body
from escrowmq.spark.options import Access

CONNECT_S: Final = 5.0
_CHUNK: Final = 256 << 10
_LONG_PIECES: Final = 32 << 10  # bytes of a piece that is better sent than copied
_PAUSES_S: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # between tries; the last one stays

_LATER: Final = frozenset(
    (
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.GO_AWAY,
    )
)

_clock = SystemClock()
_pause = threading.Event().wait  # nobody sets it


Frame = tuple[Body, ...]  # its beginning, and what follows


class Reply(NamedTuple):
    code: int
    remark: str
    body: Body


class Line:
    """`timeout_s`: how long one request may take, however often it has to be sent again."""

    def __init__(
        self,
        address: str,
        access: Access,
        *,
        timeout_s: float,
        in_flight_bytes: int = 8 << 20,
    ) -> None:
        self.address = address
        self._access = access
        self._timeout_s = timeout_s
        self._in_flight_max = in_flight_bytes
        self._socket: socket.socket | None = None
        self._cutter = FrameCutter(self._answer)
        self._opaque = 0
        self._unanswered: dict[int, Frame] = {}  # sends, in the order they were made
        self._in_flight = 0
        self._again: list[Frame] = []  # sends that were put off by the broker
        self._replies: dict[int, Reply] = {}
        self._asked: set[int] = set()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # --- questions -------------------------------------------------------------------------------

    def ask(self, code: RequestCode, fields: Header | None = None, body: bytes = b"") -> Body:
        """Raises RequestRefused, or TransportError once the time is up."""
        deadline_s = _clock.elapsed_s() + self._timeout_s
        for pause_s in _pauses():
            try:
                reply = self._ask_once(code, fields, body)
            except (NotSent, OutcomeUnknown):
                self._drop()
                if _clock.elapsed_s() + pause_s > deadline_s:
                    raise
            else:
                if reply.code == ResponseCode.SUCCESS:
                    return reply.body
                if reply.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                    raise UnknownRequest(
                        reply.code, f"{self.address} does not know {request_name(code)}"
                    )
                if reply.code not in _LATER or _clock.elapsed_s() + pause_s > deadline_s:
                    raise RequestRefused(reply.code, f"{self.address}: {reply.remark}")
            _pause(pause_s)
        raise AssertionError("pauses have no end")

    def _ask_once(self, code: RequestCode, fields: Header | None, body: bytes) -> Reply:
        opaque, frame = self._frame(code, fields, (body,), len(body))
        self._asked.add(opaque)
        self._send(frame)
        while opaque not in self._replies:
            self._receive()
        self._asked.discard(opaque)
        return self._replies.pop(opaque)

    # --- sends -----------------------------------------------------------------------------------

    def send(
        self, code: RequestCode, fields: Header, pieces: Iterable[Body], body_bytes: int
    ) -> None:
        """It is on its way. Waits while too many are; raises as `flush`."""
        opaque, frame = self._frame(code, fields, pieces, body_bytes)
        self._unanswered[opaque] = frame
        self._in_flight += _size(frame)
        self._persist(lambda: self._send(frame), lambda: self._in_flight > self._in_flight_max)

    def flush(self) -> None:
        """All that was sent is stored. Raises RequestRefused or TransportError if it is not."""
        self._persist(lambda: None, lambda: bool(self._unanswered))

    def _persist(self, step: Callable[[], None], waits: Callable[[], bool]) -> None:
        """Do it, and read answers while it has to wait; all over again if the connection goes."""
        deadline_s = _clock.elapsed_s() + self._timeout_s
        pauses = _pauses()
        while True:
            try:
                step()
                while waits():
                    if self._again:
                        _pause(next(pauses))
                        again, self._again = self._again, []
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
                self._drop()
                if _clock.elapsed_s() > deadline_s:
                    raise
                _pause(next(pauses))
                step = self._send_all_again
            else:
                return

    def _send_all_again(self) -> None:
        self._again = []
        for frame in list(self._unanswered.values()):
            self._send(frame)

    # --- bytes -----------------------------------------------------------------------------------

    def _frame(
        self, code: RequestCode, fields: Header | None, pieces: Iterable[Body], body_bytes: int
    ) -> tuple[int, Frame]:
        self._opaque += 1
        ext_fields = {} if fields is None else encode_header(fields)
        if self._access.access_key:
            pieces = (b"".join(pieces),)
            ext_fields = self._access.signed(ext_fields, *pieces)
        command = Command(code=code, opaque=self._opaque, ext_fields=ext_fields)
        header = encode_command(command, JSON)
        prefix = frame_prefix(JSON, len(header), body_bytes)
        return self._opaque, (prefix + header, *pieces)

    def _send(self, frame: Frame) -> None:
        if self._socket is None:
            self._socket = self._access.connect(self.address, min(CONNECT_S, self._timeout_s))
            self._cutter = FrameCutter(self._answer)
        self._socket.settimeout(self._access.timeout_s)
        try:
            for piece in _few(frame):
                self._socket.sendall(piece)
        except OSError as error:
            raise OutcomeUnknown(f"{self.address}: {error}") from error

    def _receive(self) -> None:
        assert self._socket is not None, "something was sent"
        try:
            self._socket.settimeout(min(self._access.timeout_s, self._timeout_s))
            data = self._socket.recv(_CHUNK)
        except OSError as error:
            raise OutcomeUnknown(f"{self.address}: {error}") from error
        if not data:
            raise OutcomeUnknown(f"{self.address} closed the connection before it answered")
        try:
            self._cutter.receive(data)
            for _ in self._cutter.frames():
                pass
        except RemoteProtocolError as error:
            raise OutcomeUnknown(f"{self.address}: {error}") from error

    def _answer(self, serializer: int, header: bytes, body: Body) -> None:
        command = decode_command(serializer, header)
        opaque, code = command.opaque, command.code
        if not command.is_response:
            return
        if opaque in self._asked:
            self._replies[opaque] = Reply(code, command.remark, bytes(body))
            return
        frame = self._unanswered.get(opaque)
        if frame is None:
            return
        if code == ResponseCode.SUCCESS or code in _STORED:
            del self._unanswered[opaque]
            self._in_flight -= _size(frame)
        elif code in _LATER:
            self._again.append(frame)
        else:
            raise _refusal(self.address, command)

    def _drop(self) -> None:
        self.close()
        self._asked.clear()
        self._replies.clear()


# A replica or a flush was slow: it is stored, and a decision over halves counts what is there.
_STORED: Final = frozenset(
    (
        ResponseCode.FLUSH_DISK_TIMEOUT,
        ResponseCode.SLAVE_NOT_AVAILABLE,
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
    )
)


def _size(frame: Frame) -> int:
    return sum(map(len, frame))


def _few(frame: Frame) -> Frame:
    """Long pieces as they are; many short ones are joined, for each is a call of its own."""
    is_long = _size(frame) >= _LONG_PIECES * len(frame)
    return frame if is_long else (b"".join(frame),)


def _refusal(address: str, command: Command) -> EscrowError:
    return RequestRefused(command.code, f"{address}: {command.remark or command.code}")


def _pauses() -> Iterator[float]:
    yield from _PAUSES_S
    while True:
        yield _PAUSES_S[-1]
