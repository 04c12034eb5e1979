"""The protocol state of one connection: match responses to requests.

Both ends of a connection are this class, because brokers also send requests to clients. It does no
I/O: it takes received bytes and returns events, and returns the bytes to send.

    receive(bytes), then for event in events():
        Request             the peer sent a request; responses.py makes the bytes to send back
        InvalidRequest      the peer sent a request with an unknown code or an invalid header
        Response            a response to one of our calls
        UnmatchedResponse   a response without a call: it came too late, or was never expected

    call()         the bytes of a request, and a Call to wait for
    send_oneway()  the bytes of a request that gets no response
    end_call()     end a call whose response was read without receive()
    expire()       fail the calls whose deadline has passed
    close()        fail all pending calls; afterwards nothing can be sent

A call ends in exactly one of five ways: with a Response, or by end_call(), expire(), close() or
cancel(). After the last three it is unknown whether the request took effect. After a
RemoteProtocolError the connection must be closed; receive() and events() raise the same error
again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from escrowmq.errors import (
    BrokenResponse,
    NotSent,
    OutcomeUnknown,
    RemoteProtocolError,
    RequestRefused,
)
from escrowmq.remoting.codes import FLAG_ONEWAY, JSON, request_name
from escrowmq.remoting.command import INT32_MAX, Command, decode_command, encode_command
from escrowmq.remoting.frame import (
    FRAME_LENGTH_MAX,
    HEADER_LENGTH_MAX,
    FrameDecoder,
    encode_frame,
    frame_prefix,
)
from escrowmq.remoting.headers import Header, NoFields, encode_header
from escrowmq.remoting.requests import (
    Body,
    Request,
    RequestHead,
    decode_request_head,
    request_head_from_command,
)

CALLS_MAX: Final = 65_535
INT64_MAX: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class InvalidRequest:
    """A request that cannot be handled. `error` is the response that it should get."""

    request: Request[NoFields]
    error: RequestRefused


class Call(msgspec.Struct, frozen=True, gc=False):
    """A request that waits for its response. `opaque` identifies it on the wire."""

    opaque: int
    code: int
    deadline_s: float


class Response(msgspec.Struct, frozen=True, gc=False):
    """The response to `call`, successful or not."""

    call: Call
    command: Command
    body: Body


class Reply(NamedTuple):
    """A response as clients hand it out. `version` is the remoting version of its sender."""

    code: int
    remark: str
    ext_fields: dict[str, str]
    body: Body
    version: int = 0

    def int_field(self, name: str, default: int | None = None, *, minimum: int = 0) -> int:
        """Return a number of the header. Raises BrokenResponse; see `parse_int_field`."""
        return parse_int_field(self.ext_fields, name, default, minimum=minimum)


_INTEGER: Final = re.compile("-?[0-9]{1,19}")  # no number of the protocol has more digits


def parse_int_field(
    ext_fields: Mapping[str, str], name: str, default: int | None = None, *, minimum: int = 0
) -> int:
    """Return a number of a response's header, or the default if it is not there.

    Raises BrokenResponse if it is missing without a default, is not a number, is below `minimum`,
    or does not fit into 64 bits.
    """
    text = ext_fields.get(name)
    if text is None:
        if default is None:
            raise BrokenResponse(f"the response has no {name}")
        return default
    if not _INTEGER.fullmatch(text) or not minimum <= int(text) <= INT64_MAX:
        raise BrokenResponse(f"the response has an impossible {name}: {text[:40]!r}")
    return int(text)


@dataclass(frozen=True, slots=True)
class UnmatchedResponse:
    """A response that no call waits for."""

    command: Command
    body: Body


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A call that ended without a response."""

    call: Call
    error: OutcomeUnknown


Event = Request[Any] | InvalidRequest | Response | UnmatchedResponse
RequestFields = Header | dict[str, str] | None  # a typed header, or the extFields themselves
# Takes a header and a body, and returns the extFields of the header with a signature.
SignFunction = Callable[[Command, Body], dict[str, str]]


class Connection:
    def __init__(
        self,
        *,
        frame_length_max: int = FRAME_LENGTH_MAX,
        header_length_max: int = HEADER_LENGTH_MAX,
        calls_max: int = CALLS_MAX,
        serializer: int = JSON,
        opaque_max: int = INT32_MAX,
        keep_headers: bool = False,
        sign: SignFunction | None = None,
    ) -> None:
        """Create the state of a new connection.

        With `keep_headers`, every Request has the bytes of its header, as an access check needs
        them. `sign` is applied to every request that is sent.
        """
        assert calls_max <= opaque_max, "there must always be a free opaque"
        build = self._decode_event_with_header if keep_headers else self._decode_event
        self._decoder = FrameDecoder(
            build, frame_length_max=frame_length_max, header_length_max=header_length_max
        )
        self._sign = sign
        self._calls_max = calls_max
        self._opaque_count = opaque_max + 1
        self._serializer = serializer
        self._calls: dict[int, Call] = {}
        self._next_opaque = 0
        self._is_closed = False

    # --- receiving -------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Accept received bytes. All earlier events must have been read. Raises ProtocolError."""
        self._decoder.receive(data)

    def events(self) -> Iterator[Event]:
        """Yield what the received bytes contain. Raises RemoteProtocolError."""
        return self._decoder.frames()

    @property
    def partial_frame(self) -> tuple[int, int]:
        """The number of bytes received of an incomplete frame, and a number that identifies it."""
        return self._decoder.partial_bytes, self._decoder.partial_frames

    @property
    def buffered_bytes(self) -> int:
        """The number of bytes received whose events have not been read."""
        return self._decoder.buffered_bytes

    def take_partial(self) -> bytes:
        """Remove and return the beginning of an incomplete frame, for another reader."""
        return self._decoder.take_partial()

    def discard_received(self) -> None:
        """Free received bytes that are not read. Call this when the connection is closed."""
        self._decoder.discard()

    def _decode_event(self, serializer: int, header: bytes, body: Body) -> Event:
        # No request has a code of one digit, so a client skips the fast path for most responses.
        if serializer == JSON and header[9:10] != b",":
            head = decode_request_head(header)
            if head is not None:
                return Request(head, body, JSON)
        return self._decode_general(serializer, header, body)

    def _decode_event_with_header(self, serializer: int, header: bytes, body: Body) -> Event:
        event = self._decode_event(serializer, header, body)
        if type(event) is Request:
            return Request(event.head, event.body, event.serializer, header)
        return event

    def _decode_general(self, serializer: int, header: bytes, body: Body) -> Event:
        try:
            command = decode_command(serializer, header)
        except RemoteProtocolError as error:
            self._decoder.fail(error)
        if command.is_response:
            call = self._calls.pop(command.opaque, None)
            if call is None:
                return UnmatchedResponse(command, body)
            return Response(call, command, body)
        try:
            return Request(request_head_from_command(command), body, serializer)
        except RequestRefused as error:
            head = RequestHead(
                code=command.code,
                opaque=command.opaque,
                flag=command.flag,
                version=command.version,
                remark=command.remark,
                fields=NoFields(),
            )
            return InvalidRequest(Request(head, body, serializer), error)

    # --- sending ---------------------------------------------------------------------------------

    def call(
        self,
        code: int,
        fields: RequestFields = None,
        body: Body = b"",
        *,
        deadline_s: float,
        remark: str = "",
    ) -> tuple[Call, bytes]:
        """Return a new call and the bytes of its request.

        `deadline_s` is compared with the `now_s` of `expire`. Raises NotSent if the connection is
        closed or has too many pending calls, LocalProtocolError if the request is too long.
        """
        if len(self._calls) >= self._calls_max:
            raise NotSent(f"the connection has {self._calls_max} pending calls, which is the limit")
        opaque = self._take_opaque()
        data = self._encode(code, opaque, 0, fields, body, remark)
        call = self._calls[opaque] = Call(opaque, code, deadline_s)
        return call, data

    def call_in_parts(
        self, code: int, fields: RequestFields, body_parts: Sequence[Body], *, deadline_s: float
    ) -> tuple[Call, list[Body]]:
        """As `call`, but return the frame in parts, so that a large body is sent without a copy.

        A signature covers the whole body, so a connection that signs joins the parts first.
        """
        if len(self._calls) >= self._calls_max:
            raise NotSent(f"the connection has {self._calls_max} pending calls, which is the limit")
        if self._sign is not None:
            body_parts = (b"".join(body_parts),)
        opaque = self._take_opaque()
        header = self._encode_header(code, opaque, 0, fields, body_parts[0] if body_parts else b"")
        prefix = frame_prefix(self._serializer, len(header), sum(map(len, body_parts)))
        call = self._calls[opaque] = Call(opaque, code, deadline_s)
        return call, [prefix + header, *body_parts]

    def send_oneway(
        self, code: int, fields: RequestFields = None, body: Body = b"", *, remark: str = ""
    ) -> bytes:
        """Return the bytes of a request without a response. Raises as `call` does."""
        return self._encode(code, self._take_opaque(), FLAG_ONEWAY, fields, body, remark)

    def send_oneway_in_parts(self, code: int, fields: RequestFields, body: Body) -> list[Body]:
        """As `send_oneway`, but return header and body: many requests can share a long body."""
        header = self._encode_header(code, self._take_opaque(), FLAG_ONEWAY, fields, body)
        return [frame_prefix(self._serializer, len(header), len(body)) + header, body]

    def cancel(self, call: Call) -> None:
        """Stop waiting for a call. Its response, if one comes, is an UnmatchedResponse."""
        if self._calls.get(call.opaque) is call:
            del self._calls[call.opaque]

    def end_call(self, opaque: int) -> None:
        """End the call with this opaque, if one is pending.

        For a reader that decodes responses itself and passes nothing to `receive`.
        """
        self._calls.pop(opaque, None)

    def expire(self, *, now_s: float) -> list[CallFailed]:
        """Fail the calls whose deadline has passed, and return them."""
        late = [call for call in self._calls.values() if call.deadline_s <= now_s]
        return self._fail_calls(late, "no response in time")

    def close(self) -> list[CallFailed]:
        """Fail all pending calls and return them. Nothing can be sent afterwards."""
        self._is_closed = True
        # Others may hold a reference to this object for long; do not hold up to 16 MiB for them.
        self._decoder.discard()
        return self._fail_calls(
            list(self._calls.values()), "the connection closed before the response"
        )

    @property
    def pending_calls(self) -> int:
        return len(self._calls)

    @property
    def oldest_call(self) -> Call | None:
        """The pending call that was made first."""
        return next(iter(self._calls.values()), None)

    def _fail_calls(self, calls: list[Call], reason: str) -> list[CallFailed]:
        for call in calls:
            del self._calls[call.opaque]
        return [
            CallFailed(call, OutcomeUnknown(f"{request_name(call.code)}: {reason}"))
            for call in calls
        ]

    def _encode(
        self, code: int, opaque: int, flag: int, fields: RequestFields, body: Body, remark: str = ""
    ) -> bytes:
        header = self._encode_header(code, opaque, flag, fields, body, remark)
        return encode_frame(self._serializer, header, body)

    def _encode_header(
        self, code: int, opaque: int, flag: int, fields: RequestFields, body: Body, remark: str = ""
    ) -> bytes:
        if self._is_closed:
            raise NotSent("the connection is closed")
        ext_fields = encode_header(fields) if isinstance(fields, Header) else fields or {}
        command = Command(code=code, opaque=opaque, flag=flag, remark=remark, ext_fields=ext_fields)
        if self._sign is not None:
            signed_fields = self._sign(command, body)
            command = msgspec.structs.replace(command, ext_fields=signed_fields)
        return encode_command(command, self._serializer)

    def _take_opaque(self) -> int:
        # An opaque is never negative, because C++ clients drop the sign. After a wrap it is never
        # that of a call which still waits.
        opaque = self._next_opaque
        while opaque in self._calls:
            opaque = (opaque + 1) % self._opaque_count
        self._next_opaque = (opaque + 1) % self._opaque_count
        return opaque
