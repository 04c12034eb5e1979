"""Match answers to requests on one line. Either end may ask; both are this class.

    receive(bytes), then for event in events():
        Request   they ask; answers.py makes the bytes to send back
        Refused   they ask, but we do not know the request or cannot read its fields
        Answer    to one of our calls
        Stray     an answer nobody waits for: too late, or never asked

    call()    bytes to send, and a Call to wait for
    post()    the same one way: no answer will come
    expire()  calls whose deadline has passed
    close()   all calls that are left; afterwards nothing can be sent

A call ends in exactly one of four ways: Answer, expire(), close(), forget(). The last three do not
say whether it took effect. After a RemoteProtocolError the line is to be closed; receive() and
events() raise the same error again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from escrowmq.errors import NotSent, OutcomeUnknown, RemoteProtocolError, RequestRefused
from escrowmq.remoting.codes import FLAG_ONEWAY, JSON, request_name
from escrowmq.remoting.command import INT32_MAX, Command, decode_command, encode_command
from escrowmq.remoting.frame import FRAME_LENGTH_MAX, FrameCutter, encode_frame
from escrowmq.remoting.headers import Header, NoFields, encode_header
from escrowmq.remoting.requests import Body, Head, Request, decode_head, head_of

CALLS_MAX: Final = 65_535


@dataclass(frozen=True, slots=True)
class Refused:
    request: Request[NoFields]
    error: RequestRefused


class Call(msgspec.Struct, frozen=True, gc=False):
    opaque: int
    code: int
    deadline_s: float


class Answer(msgspec.Struct, frozen=True, gc=False):
    call: Call
    command: Command
    body: Body


@dataclass(frozen=True, slots=True)
class Stray:
    command: Command
    body: Body


@dataclass(frozen=True, slots=True)
class Failed:
    call: Call
    error: OutcomeUnknown


Event = Request[Any] | Refused | Answer | Stray
Fields = Header | dict[str, str] | None  # what a request says: typed, or as the wire has it
Sign = Callable[[dict[str, str], Body], dict[str, str]]  # extFields and body; extFields, signed


class Connection:
    def __init__(
        self,
        *,
        frame_length_max: int = FRAME_LENGTH_MAX,
        calls_max: int = CALLS_MAX,
        serializer: int = JSON,
        opaque_max: int = INT32_MAX,
        keeps_headers: bool = False,
        sign: Sign | None = None,
    ) -> None:
        """`keeps_headers`: requests carry theirs as it came. `sign`: what we ask is signed so."""
        assert calls_max <= opaque_max, "a free number must always be found"
        make = self._event_and_header if keeps_headers else self._event
        self._reader = FrameCutter(make, frame_length_max=frame_length_max)
        self._sign = sign
        self._calls_max = calls_max
        self._opaque_max = opaque_max
        self._serializer = serializer
        self._calls: dict[int, Call] = {}
        self._next_opaque = 0
        self._closed = False

    # What they send.

    def receive(self, data: bytes) -> None:
        self._reader.receive(data)

    def events(self) -> Iterator[Event]:
        return self._reader.frames()

    @property
    def partial(self) -> tuple[int, int]:
        """How much has come of a frame whose end has not, and the how many-th of its kind it is."""
        return self._reader.partial_bytes, self._reader.begun

    def _event(self, serializer: int, header: bytes, body: Body) -> Event:
        # A code of one digit is an answer's: a client need not look among the requests for it.
        if serializer == JSON and header[9:10] != b",":
            head = decode_head(header)
            if head is not None:
                return Request(head, body, JSON)
        return self._read_slowly(serializer, header, body)

    def _event_and_header(self, serializer: int, header: bytes, body: Body) -> Event:
        event = self._event(serializer, header, body)
        if type(event) is Request:
            return Request(event.head, event.body, event.serializer, header)
        return event

    def _read_slowly(self, serializer: int, header: bytes, body: Body) -> Event:
        try:
            command = decode_command(serializer, header)
        except RemoteProtocolError as error:
            self._reader.fail(error)
        if command.is_response:
            call = self._calls.pop(command.opaque, None)
            if call is None:
                return Stray(command, body)
            return Answer(call, command, body)
        try:
            return Request(head_of(command), body, serializer)
        except RequestRefused as error:
            head = Head(
                code=command.code,
                opaque=command.opaque,
                flag=command.flag,
                version=command.version,
                remark=command.remark,
                fields=NoFields(),
            )
            return Refused(Request(head, body, serializer), error)

    # What we ask.

    def call(
        self, code: int, fields: Fields = None, body: Body = b"", *, deadline_s: float
    ) -> tuple[Call, bytes]:
        if len(self._calls) >= self._calls_max:
            raise NotSent(f"{self._calls_max} calls are waiting for their answers")
        opaque = self._take_opaque()
        data = self._encode(code, opaque, 0, fields, body)
        call = self._calls[opaque] = Call(opaque, code, deadline_s)
        return call, data

    def post(
        self, code: int, fields: Fields = None, body: Body = b"", *, remark: str = ""
    ) -> bytes:
        return self._encode(code, self._take_opaque(), FLAG_ONEWAY, fields, body, remark)

    def forget(self, call: Call) -> None:
        """Nobody waits for it any more. Its answer, if it comes, is a Stray."""
        if self._calls.get(call.opaque) is call:
            del self._calls[call.opaque]

    def expire(self, *, now_s: float) -> list[Failed]:
        late = [call for call in self._calls.values() if call.deadline_s <= now_s]
        return self._fail(late, "no answer in time")

    def close(self) -> list[Failed]:
        self._closed = True
        self._reader.let_go()  # whoever still knows this object may do so for long
        return self._fail(list(self._calls.values()), "the connection closed before the answer")

    @property
    def calls_waiting(self) -> int:
        return len(self._calls)

    def _fail(self, calls: list[Call], why: str) -> list[Failed]:
        for call in calls:
            del self._calls[call.opaque]
        return [Failed(call, OutcomeUnknown(f"{request_name(call.code)}: {why}")) for call in calls]

    def _encode(
        self, code: int, opaque: int, flag: int, fields: Fields, body: Body, remark: str = ""
    ) -> bytes:
        if self._closed:
            raise NotSent("the connection is closed")
        ext_fields = encode_header(fields) if isinstance(fields, Header) else fields or {}
        if self._sign is not None:
            ext_fields = self._sign(ext_fields, body)
        command = Command(code=code, opaque=opaque, flag=flag, remark=remark, ext_fields=ext_fields)
        return encode_frame(self._serializer, encode_command(command, self._serializer), body)

    def _take_opaque(self) -> int:
        # Never negative: C++ clients drop the sign. Never one that still waits, after a wrap.
        opaque = self._next_opaque
        while opaque in self._calls:
            opaque = self._after(opaque)
        self._next_opaque = self._after(opaque)
        return opaque

    def _after(self, opaque: int) -> int:
        return 0 if opaque == self._opaque_max else opaque + 1
