"""Java's String.hashCode, which RocketMQ uses for tags and for the key index."""

from __future__ import annotations

from operator import mul
from typing import Final

_WORD = 0xFFFFFFFF
_LENGTH_MAX = 256

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


def _utf16_units(text: str) -> memoryview:
    return memoryview(text.encode("utf-16-le", "surrogatepass")).cast("H")
