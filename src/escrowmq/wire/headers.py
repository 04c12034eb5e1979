"""What a header's extFields hold, typed: the base, and both directions.

On the wire a header is a flat map of strings. Here it is a struct whose fields are named as the
wire names them, in snake case. Unknown keys are skipped, so that a newer peer can talk to us.
A required key is one that no client leaves out and no handler can do without.

Numbers and booleans are read from text: `true` and `false` in any case, and 1 and 0, which is how
C++ clients write them. Numbers are bounded as in Java, int or long, so that what is read here
fits a record there. Booleans are written `true` and `false`; None is not written.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from escrowmq.errors import BadField
from escrowmq.wire.codes import ResponseCode

H = TypeVar("H", bound="Header")


class Header(msgspec.Struct, frozen=True, kw_only=True, rename="camel", gc=False):
    pass


class NoFields(Header, frozen=True):
    """For a request or an answer that has no fields of its own."""


def decode_header(kind: type[H], ext_fields: dict[str, str]) -> H:
    """Raises BadField, which names the field, if one is missing or does not fit its type."""
    try:
        return msgspec.convert(ext_fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise BadField(ResponseCode.SYSTEM_ERROR, f"{kind.__name__}: {error}") from error


def encode_header(header: Header) -> dict[str, str]:
    values = zip(header.__struct_encode_fields__, msgspec.structs.astuple(header), strict=True)
    return {name: _text(value) for name, value in values if value is not None}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
