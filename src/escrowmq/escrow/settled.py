"""What became of every half that the log still holds: two bits each, by half-queue offset.

A hundred million halves are 25 MB, so that a late answer can be told from a repeated one for as
long as the log keeps the half, and no object is kept for what is over.
"""

from __future__ import annotations

import re

from escrowmq.escrow.verdict import State

_PER_BYTE = 4
_GROWN_BYTES = 4096  # at a time: the bits are longer than what they say


class _Wanted:
    """Halves in any of these states, and a search for bytes that hold one."""

    def __init__(self, *states: State) -> None:
        self.states = frozenset(states)
        having = [
            byte
            for byte in range(256)
            if any(byte >> shift & 3 in self.states for shift in (0, 2, 4, 6))
        ]
        self.in_bytes = re.compile(b"[%b]" % re.escape(bytes(having))).search


_OPEN = _Wanted(State.OPEN)
_UNSETTLED = _Wanted(State.OPEN, State.STRANDED)
_SETTLED = _Wanted(State.COMMITTED, State.ROLLED_BACK)
_STATES = tuple(State)


class SettledHalves:
    """Halves from `base` up to `next`; all of them open until said otherwise."""

    def __init__(self, base: int = 0, next_offset: int = 0, bits: bytes = b"") -> None:
        self.base = base - base % _PER_BYTE  # whole bytes are forgotten at the front
        self.next = max(self.base, next_offset)
        self._bits = bytearray(bits)
        self._grow()

    def state(self, offset: int) -> State | None:
        """None: no half was parked there, or it is forgotten."""
        if not self.base <= offset < self.next:
            return None
        at, shift = divmod(offset - self.base, _PER_BYTE)
        return _STATES[self._bits[at] >> 2 * shift & 3]

    def put(self, offset: int, state: State) -> None:
        if offset < self.base:
            return
        if offset >= self.next:
            self.park(offset)
        at, shift = divmod(offset - self.base, _PER_BYTE)
        self._bits[at] = self._bits[at] & ~(3 << 2 * shift) | state << 2 * shift

    def park(self, offset: int) -> None:
        """There are halves up to this one now."""
        if offset >= self.next:
            self.next = offset + 1
            if offset - self.base >= len(self._bits) * _PER_BYTE:
                self._grow()

    def forget_below(self, offset: int) -> None:
        """Their records are gone from the log."""
        whole = min(offset, self.next) - self.base
        if whole >= _PER_BYTE:
            del self._bits[: whole // _PER_BYTE]
            self.base += whole - whole % _PER_BYTE

    def first_open(self, begin: int) -> int:
        """The first half from `begin` on that is open; `next` if none is."""
        return self._first(begin, _OPEN)

    def first_unsettled(self, begin: int) -> int:
        """The first that is open or stranded."""
        return self._first(begin, _UNSETTLED)

    def first_settled(self, begin: int) -> int:
        """The first that is neither."""
        return self._first(begin, _SETTLED)

    def _first(self, begin: int, wanted: _Wanted) -> int:
        at = max(begin, self.base)
        while at < self.next:
            place, rest = divmod(at - self.base, _PER_BYTE)
            if not rest:  # past whole bytes without any: there may be millions
                found = wanted.in_bytes(self._bits, place)
                if found is None:
                    break
                if found.start() > place:
                    at = self.base + found.start() * _PER_BYTE
                    continue
            if _STATES[self._bits[place] >> 2 * rest & 3] in wanted.states:
                return at
            at += 1
        return self.next

    def dump(self) -> bytes:
        return bytes(self._bits[: self._used()])

    def _used(self) -> int:
        return (self.next - self.base + _PER_BYTE - 1) // _PER_BYTE

    def _grow(self) -> None:
        missing = self._used() - len(self._bits)
        if missing > 0:
            self._bits += bytes(missing + _GROWN_BYTES)
