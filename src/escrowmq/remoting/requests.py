"""Requests with typed headers, and the decoder that reads a JSON header in one step.

    {"code":310,"extFields":{"a":"group","b":"topic",...},"flag":0,"opaque":7,...}
    ^^^^^^^^^^^^ selects the decoder; every known client writes the code first

There is one decoder for each request code. It builds the typed header straight from the bytes and
skips what it does not know, so no map of strings is made. This is the fast path; its specification
is the plain path, `decode_command` followed by `request_head_from_command`. A header that the fast
path refuses, and a header that turns out to be a response, is decoded again by the plain path,
which also says what is wrong. tests/property/test_fastpath.py proves that both return the same
value for everything that the fast path accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Generic

import msgspec

from escrowmq.errors import UnknownRequest

# headers_admin is imported so that its headers are registered before they are collected here.
from escrowmq.parsing import Int32
from escrowmq.remoting import headers, headers_admin  # noqa: F401
from escrowmq.remoting.codes import (
    FLAG_ONEWAY,
    FLAG_RESPONSE,
    LanguageName,
    ResponseCode,
)
from escrowmq.remoting.command import Command
from escrowmq.remoting.headers import H, Header, HeaderTypes, decode_header

Body = bytes | memoryview

# The headers of every request that is understood, by request code.
REQUESTS: Final[Mapping[int, HeaderTypes]] = headers.registered_requests()


def header_types(code: int) -> HeaderTypes:
    """Return the headers of a request code. Raises UnknownRequest."""
    try:
        return REQUESTS[code]
    except KeyError:
        raise UnknownRequest(
            ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f"request code {code} is not supported"
        ) from None


class RequestHead(msgspec.Struct, Generic[H], frozen=True, kw_only=True, gc=False):
    """The header of a request; `fields` are its extFields, typed."""

    code: Int32
    opaque: Int32 = 0
    flag: Int32 = 0
    version: Int32 = 0
    remark: str = ""
    language: LanguageName = LanguageName.OTHER
    fields: H = msgspec.field(name="extFields")

    @property
    def is_oneway(self) -> bool:
        """Whether the sender expects no response."""
        return bool(self.flag & FLAG_ONEWAY)


class Request(msgspec.Struct, Generic[H], frozen=True, gc=False):
    """A received request."""

    head: RequestHead[H]
    body: Body
    # The response has to use the same serializer: C++ clients cannot read ROCKETMQ.
    serializer: int
    # The bytes of the header, if the connection keeps them: a signature covers all of them.
    raw_header: bytes = b""


def request_for_response(request: Request[Any], fields: H) -> Request[H]:
    """Return a request from which only a response can be made, with other fields.

    Keep this if a response is made after the turn. The request itself may have a body, a remark and
    fields of many megabytes, and its body may be a view of a much longer buffer.
    """
    head = request.head
    return Request(
        RequestHead(code=head.code, opaque=head.opaque, flag=head.flag, fields=fields),
        b"",
        request.serializer,
    )


# --- the plain path ------------------------------------------------------------------------------


def request_head_from_command(command: Command) -> RequestHead[Header]:
    """Return the typed header of a decoded command.

    Raises UnknownRequest or InvalidField. Both are RequestRefused, so the request can be answered.
    """
    return RequestHead(
        code=command.code,
        opaque=command.opaque,
        flag=command.flag,
        version=command.version,
        remark=command.remark,
        language=LanguageName(command.language.name),
        fields=decode_header(header_types(command.code).request, command.ext_fields),
    )


# --- the fast path -------------------------------------------------------------------------------


class _CodeOnly(msgspec.Struct, gc=False):
    code: Int32


_Decode = Callable[[bytes], RequestHead[Any]]

_decoders: dict[int, tuple[int, _Decode]] = {
    # mypy wants a name that it can see between the brackets; msgspec wants the type.
    int(code): (int(code), msgspec.json.Decoder(RequestHead[types.request], strict=False).decode)  # type: ignore[name-defined]
    for code, types in REQUESTS.items()
}
_decode_code = msgspec.json.Decoder(_CodeOnly, strict=False).decode

# Decoders are looked up by a prefix of the header of fixed length, which is cheaper than finding
# the end of the number: 12 characters hold a code of two digits and the next quote, or a code of
# three digits; 15 characters hold a code of up to six.
_decoders_by_prefix = {
    (b'{"code":%d,"' % code)[: 15 if code > 999 else 12]: entry for code, entry in _decoders.items()
}


def decode_request_head(header: bytes) -> RequestHead[Any] | None:
    """Return the request in this JSON header, or None if the plain path has to decode it."""
    try:
        # msgspec checks UTF-8 only in the values that it keeps; the plain path checks all of it.
        if not header.isascii():
            header.decode()
        entry = _decoders_by_prefix.get(header[:12])
        if entry is None:
            entry = _decoders_by_prefix.get(header[:15]) or _decoders.get(_decode_code(header).code)
            if entry is None:
                return None
        code, decode = entry
        head = decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    # A header may hold `code` twice: the last one counts, and it may need another decoder.
    if head.code != code or head.flag & FLAG_RESPONSE:
        return None
    return head
