"""Patterns of client addresses, as RocketMQ's two generations write them.

    *                       everybody               192.168.0.{1,7,9}     one of them
    192.168.0.7             one                     10.0.0.1,10.0.0.2     several
    192.168.0.*             a net                   192.168.1-10.*        a range, then all below
    192.168.0.0/24          a net (5.x)             fe80:0:0:0:1:*        the same with colons

A pattern that is empty fits nobody. An IPv4 address that came over IPv6 is an IPv4 address.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable
from typing import Final

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Fits = Callable[[Address], bool]
_OUTSIDE_BRACES: Final = re.compile(r",(?![^{]*\})")
_PART: Final = re.compile(r"[0-9A-Fa-f]{1,4}|[0-9A-Fa-f]{1,4}-[0-9A-Fa-f]{1,4}|\*|\{[^{}]*\}")


class Addresses:
    """Those that one of the patterns fits. ValueError says which pattern cannot be read."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(pattern.strip() for pattern in patterns)
        self._fits = [
            _parse(part.strip())
            for pattern in self.patterns
            for part in _OUTSIDE_BRACES.split(pattern)
            if part.strip()
        ]

    def __contains__(self, host: str) -> bool:
        if not self._fits:
            return False
        address = _address(host)
        return address is not None and any(fits(address) for fits in self._fits)

    def __bool__(self) -> bool:
        return bool(self._fits)


def _address(host: str) -> Address | None:
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address


def _parse(pattern: str) -> _Fits:
    try:
        if pattern in ("*", "*.*.*.*", "*:*:*:*:*:*:*:*"):
            return lambda address: True
        if "/" in pattern:
            network = ipaddress.ip_network(pattern, strict=False)
            return lambda address: address in network
        exact = _address(pattern)
        if exact is not None:
            return lambda address: address == exact
        return _by_parts(pattern)
    except ValueError as error:
        raise ValueError(f"{pattern!r} is no pattern of addresses") from error


def _by_parts(pattern: str) -> _Fits:
    is_new = ":" in pattern
    count, base, most = (8, 16, 0xFFFF) if is_new else (4, 10, 255)
    texts = _parts(pattern, ":" if is_new else ".", count)
    allowed = [_numbers(text, base, most) for text in texts]
    version = 6 if is_new else 4

    def fits(address: Address) -> bool:
        if address.version != version:
            return False
        packed, size = address.packed, 2 if is_new else 1
        return all(
            int.from_bytes(packed[at * size : (at + 1) * size]) in allowed[at]
            for at in range(count)
        )

    return fits


def _parts(pattern: str, separator: str, count: int) -> list[str]:
    if separator == ":" and "::" in pattern:
        head, _, tail = pattern.partition("::")
        before, after = head.split(":") if head else [], tail.split(":") if tail else []
        texts = [*before, *["0"] * (count - len(before) - len(after)), *after]
    else:
        texts = pattern.split(separator)
    if texts[-1] == "*":  # the rest too
        texts += ["*"] * (count - len(texts))
    if len(texts) != count or not all(_PART.fullmatch(text) for text in texts):
        raise ValueError(pattern)
    return texts


def _numbers(text: str, base: int, most: int) -> range | frozenset[int]:
    if text == "*":
        return range(most + 1)
    if text.startswith("{"):
        found = frozenset(int(part.strip(), base) for part in text[1:-1].split(","))
        if not all(0 <= number <= most for number in found):
            raise ValueError(text)
        return found
    first, _, last = text.partition("-")
    begin, end = int(first, base), int(last or first, base)
    if not 0 <= begin <= end <= most:
        raise ValueError(text)
    return range(begin, end + 1)
