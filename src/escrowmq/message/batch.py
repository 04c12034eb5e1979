"""The body of SEND_BATCH_MESSAGE: several messages of one topic, back to back.

    size 4 | magic 4 | crc 4 | flag 4 | body length 4 | body | properties length 2 | properties

`size` counts all of it, itself too. Magic and crc are zero; the broker computes the crc of
each body when it stores it. Properties are encoded as in properties.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

import msgspec

from escrowmq.errors import BrokenBody, LocalProtocolError

PROPERTIES_BYTES_MAX: Final = 0x7FFF

BATCH_HEAD: Final = struct.Struct(">iiiii")
_PROPERTIES_LENGTH = struct.Struct(">h")
_HEAD_BYTES = BATCH_HEAD.size
_FIXED_BYTES = BATCH_HEAD.size + _PROPERTIES_LENGTH.size


class BatchItem(msgspec.Struct, frozen=True, gc=False):
    flag: int
    body: bytes | memoryview
    properties: bytes = b""


def encode_batch(items: Iterable[BatchItem]) -> bytes:
    pieces: list[bytes | memoryview] = []
    for item in items:
        size = _FIXED_BYTES + len(item.body) + len(item.properties)
        try:
            head = BATCH_HEAD.pack(size, 0, 0, item.flag, len(item.body))
            properties_length = _PROPERTIES_LENGTH.pack(len(item.properties))
        except struct.error as error:
            raise LocalProtocolError(f"message {len(pieces) // 4} of a batch: {error}") from error
        pieces += (head, item.body, properties_length, item.properties)
    return b"".join(pieces)


def decode_batch(body: bytes | memoryview) -> list[BatchItem]:
    """Bodies are views, properties are copies. Raises BrokenBody, whatever is wrong."""
    view, whole = memoryview(body), bytes(body)  # short pieces of bytes are cheaper than views
    items: list[BatchItem] = []
    at, end, last = 0, len(whole), len(whole) - _FIXED_BYTES
    head, properties_length, add = (
        BATCH_HEAD.unpack_from,
        _PROPERTIES_LENGTH.unpack_from,
        items.append,
    )
    while at < end:
        if at > last:
            raise BrokenBody(f"message {len(items)} of a batch: {end - at} bytes are no message")
        size, _, _, flag, body_length = head(whole, at)
        following = at + size
        body_at = at + _HEAD_BYTES
        body_end = body_at + body_length
        if body_length < 0 or body_end + 2 > following or following > end:
            raise BrokenBody(
                f"message {len(items)} of a batch: {size} bytes with a body of {body_length}, "
                f"{end - at} are left"
            )
        if body_end + 2 + properties_length(whole, body_end)[0] != following:
            raise BrokenBody(
                f"message {len(items)} of a batch: its properties do not end where it does"
            )
        add(BatchItem(flag, view[body_at:body_end], whole[body_end + 2 : following]))
        at = following
    return items
