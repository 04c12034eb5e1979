"""How strings become numbers, and numbers are compared: as Java does it.

A property that is compared with a number must be written the way that number is. Beside `0` it is
an int (32 bits), beside `3000000000` a long, beside `0.5` a double. `1.0` is no int: compared
with `1` it can only fail.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Final

from escrowmq.consume.sql92.tree import INT_MAX, LONG_MAX, NumberKind
from escrowmq.errors import NotComparable

_INTEGER: Final = re.compile(r"[+-]?\d{1,40}")
_DOUBLE: Final = re.compile(
    r"(?P<decimal>[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?))[fFdD]?"
    r"|(?P<hex>[+-]?0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?"
    r"|(?P<word>[+-]?(?:NaN|Infinity))"
)
_BLANKS: Final = "".join(map(chr, range(0x21)))  # what Java's trim takes away


def to_int(text: str) -> int:
    return _to_integer(text, INT_MAX)


def to_long(text: str) -> int:
    return _to_integer(text, LONG_MAX)


def to_double(text: str) -> float:
    match = _DOUBLE.fullmatch(text.strip(_BLANKS))
    if match is None:
        raise NotComparable
    if match["hex"] is None:
        return float(match["decimal"] or match["word"])
    try:
        return float.fromhex(match["hex"])
    except OverflowError:
        return -math.inf if text.lstrip(_BLANKS).startswith("-") else math.inf


def _to_integer(text: str, most: int) -> int:
    if not _INTEGER.fullmatch(text):
        raise NotComparable
    value = int(text)
    if not -most - 1 <= value <= most:
        raise NotComparable
    return value


READERS: Final[dict[NumberKind, Callable[[str], int | float]]] = {
    "int": to_int,
    "long": to_long,
    "double": to_double,
}


def ordered(left: float, right: float) -> int:
    """Java's order of doubles: NaN is the largest and equals itself, -0.0 is less than 0.0."""
    left_key, right_key = _place(left), _place(right)
    return (left_key > right_key) - (left_key < right_key)


def _place(value: float) -> tuple[bool, float, float]:
    if math.isnan(value):
        return True, 0.0, 0.0
    return False, value, math.copysign(1.0, value) if value == 0 else 0.0


def compared(left: int | float, right: int | float) -> int:
    """Two numbers; as doubles if one of them is one."""
    if isinstance(left, int) and isinstance(right, int):
        return (left > right) - (left < right)
    return ordered(float(left), float(right))
