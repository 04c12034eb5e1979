"""Java's String.hashCode, which RocketMQ uses for tags and for the key index."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import mul
from typing import Final

_WORD = 0xFFFFFFFF
_LENGTH_MAX = 256
_LANE_BYTES = 8
_MASK_LANE = _WORD.to_bytes(_LANE_BYTES, "little")

# 31^0, 31^1, … and, by length, the same in falling order: a hash is then one sum of products.
POWERS: Final = [pow(31, exponent, 1 << 32) for exponent in range(_LENGTH_MAX + 1)]
DESCENDING_POWERS: Final = [POWERS[:length][::-1] for length in range(_LENGTH_MAX + 1)]


def java_hash(text: str) -> int:
    """h = 31 h + u over the UTF-16 code units, as a signed 32-bit number."""
    value = unsigned_hash(text)
    return value - (1 << 32) if value & 0x80000000 else value


def unsigned_hash(text: str) -> int:
    units = text.encode() if text.isascii() else _utf16_units(text)
    value = 0
    for begin in range(0, len(units), _LENGTH_MAX):
        part = units[begin : begin + _LENGTH_MAX]
        total: int = sum(map(mul, part, DESCENDING_POWERS[len(part)]))
        value = (value * POWERS[len(part)] + total) & _WORD
    return value


def hashes_of_tails(before: Sequence[int], tails: Sequence[bytes]) -> Sequence[int]:
    """Unsigned hashes of texts that end in these, which are ASCII and of one length. `before`: the
    hashes of what is before them, as numbers of up to 33 bits."""
    begun = struct.pack(f"<{len(tails)}Q", *before)
    return _hash_on(begun, b"".join(tails), len(tails[0]), 0)


def hashes_with_head(before: int, joined: bytes, length: int, head_bytes: int) -> Sequence[int]:
    """The same for texts of one length, joined, that all begin alike. `before`: the hash of what is
    before the rest of each."""
    begun = before.to_bytes(_LANE_BYTES, "little") * (len(joined) // length)
    return _hash_on(begun, joined, length, head_bytes)


def _hash_on(begun: bytes, joined: bytes, length: int, first: int) -> Sequence[int]:
    """All at once, in lanes of eight bytes of one large number: a step grows a lane by five bits,
    so that six steps fit before the lanes have to be cut back to 32."""
    count = len(joined) // length
    mask = int.from_bytes(_MASK_LANE * count, "little")
    total = int.from_bytes(begun, "little")
    for step, column in enumerate(range(first, length)):
        lanes = bytearray(_LANE_BYTES * count)
        lanes[::_LANE_BYTES] = joined[column::length]
        total = total * 31 + int.from_bytes(lanes, "little")
        if step % 6 == 5:
            total &= mask
    return memoryview((total & mask).to_bytes(_LANE_BYTES * count, "little")).cast("Q")


def _utf16_units(text: str) -> memoryview:
    return memoryview(text.encode("utf-16-le", "surrogatepass")).cast("H")
