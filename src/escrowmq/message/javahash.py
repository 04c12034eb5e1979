"""Java's String.hashCode, which RocketMQ uses for tags and for the key index."""

from __future__ import annotations

from functools import lru_cache
from operator import mul

_WORD = 0xFFFFFFFF
_POWERS = [1]
for _ in range(1023):
    _POWERS.append(_POWERS[-1] * 31 & _WORD)


def java_hash(text: str) -> int:
    """h = 31 h + u over the UTF-16 code units, as a signed 32-bit number."""
    return signed(unsigned_hash(text))


def unsigned_hash(text: str) -> int:
    units = text.encode("latin-1") if text.isascii() else _utf16_units(text)
    count = len(units)
    if count > len(_POWERS):
        value = 0
        for unit in units:
            value = (value * 31 + unit) & _WORD
        return value
    total: int = sum(map(mul, units, _descending(count)))
    return total & _WORD


def signed(word: int) -> int:
    return word - (1 << 32) if word & 0x80000000 else word


@lru_cache(maxsize=1024)
def _descending(count: int) -> list[int]:
    return _POWERS[count - 1 :: -1] if count else []


def _utf16_units(text: str) -> memoryview:
    return memoryview(text.encode("utf-16-le", "surrogatepass")).cast("H")
