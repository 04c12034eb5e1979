"""Read a JSON request header in one step: one typed decoder per request code.

    {"code":310,"extFields":{"a":"group","b":"topic",...},"flag":0,"opaque":7,...}
    ^^^^^^^^^^^^ picks the decoder; every client we know writes the code first

The decoder builds the typed header straight from the bytes and skips what it does not know, so no
map of strings is made. It is never the judge: what it refuses, or what turns out to be an
answer, is read again the slow way, by command.py and headers.py. What it accepts, the slow way
reads as the same value; tests/property/test_fastpath.py holds it to that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic

import msgspec

from escrowmq.wire.codes import FLAG_ONEWAY, FLAG_RESPONSE, LanguageName
from escrowmq.wire.command import Command, Int32
from escrowmq.wire.headers import H, Header, decode_header
from escrowmq.wire.requests import REQUESTS, request_kind

Body = bytes | memoryview


class Head(msgspec.Struct, Generic[H], frozen=True, kw_only=True, gc=False):
    """A request's header, typed."""

    code: Int32
    opaque: Int32 = 0
    flag: Int32 = 0
    version: Int32 = 0
    remark: str = ""
    language: LanguageName = LanguageName.OTHER
    fields: H = msgspec.field(name="extFields")

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & FLAG_ONEWAY)


class Request(msgspec.Struct, Generic[H], frozen=True, gc=False):
    head: Head[H]
    body: Body
    serializer: int  # the answer uses the same: C++ clients cannot read ROCKETMQ
    header: bytes = (
        b""  # as it came, if the connection keeps it: a signature is made over all of it
    )


class _CodeOnly(msgspec.Struct, gc=False):
    code: Int32


_Decode = Callable[[bytes], Head[Any]]

_decoders: dict[int, tuple[int, _Decode]] = {
    # mypy wants a name it can see between the brackets; msgspec wants the type.
    int(code): (int(code), msgspec.json.Decoder(Head[kind.request], strict=False).decode)  # type: ignore[name-defined]
    for code, kind in REQUESTS.items()
}
_decode_code = msgspec.json.Decoder(_CodeOnly, strict=False).decode

# Looked up by a prefix of fixed length, which is cheaper than finding where the number ends: 12
# characters hold a code of two digits and the next quote, or one of three; 15 hold one of six.
_openings = {
    (b'{"code":%d,"' % code)[: 15 if code > 999 else 12]: found for code, found in _decoders.items()
}


def decode_head(header: bytes) -> Head[Any] | None:
    """The request in this JSON header; None if it takes the slow way to tell."""
    try:
        # msgspec checks UTF-8 only in what it keeps; the slow way checks all of it.
        if not header.isascii():
            header.decode()
        found = _openings.get(header[:12])
        if found is None:
            found = _openings.get(header[:15]) or _decoders.get(_decode_code(header).code)
            if found is None:
                return None
        code, decode = found
        head = decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    # A header may hold `code` twice: the last one counts, and it may need another decoder.
    if head.code != code or head.flag & FLAG_RESPONSE:
        return None
    return head


def head_of(command: Command) -> Head[Header]:
    """The slow way. Raises UnknownRequest or BadField, both of which can be answered."""
    return Head(
        code=command.code,
        opaque=command.opaque,
        flag=command.flag,
        version=command.version,
        remark=command.remark,
        language=LanguageName(command.language.name),
        fields=decode_header(request_kind(command.code).request, command.ext_fields),
    )
