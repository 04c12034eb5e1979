"""What became of every half that the log still holds: two bits each, by half-queue offset.

A hundred million halves are 25 MB, so that a late answer can be told from a repeated one for as
long as the log keeps the half, and no object is kept for what is over.
"""

from __future__ import annotations

from escrowmq.escrow.verdict import State

_PER_BYTE = 4
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
            self._grow()

    def forget_below(self, offset: int) -> None:
        """Their records are gone from the log."""
        whole = min(offset, self.next) - self.base
        if whole >= _PER_BYTE:
            del self._bits[: whole // _PER_BYTE]
            self.base += whole - whole % _PER_BYTE

    def first_open(self, begin: int) -> int:
        """The first half from `begin` on that is open; `next` if none is."""
        at = max(begin, self.base)
        while at < self.next:
            if (at - self.base) % _PER_BYTE == 0:
                at = self._skip_bytes(at)
                if at >= self.next:
                    break
            if self.state(at) is State.OPEN:
                return at
            at += 1
        return self.next

    def _skip_bytes(self, at: int) -> int:
        """Past whole bytes in which nothing is open."""
        place = (at - self.base) // _PER_BYTE
        last = (self.next - self.base) // _PER_BYTE
        while place < last and _HAS_NO_OPEN[self._bits[place]]:
            place += 1
        return self.base + place * _PER_BYTE

    def dump(self) -> bytes:
        return bytes(self._bits)

    def _grow(self) -> None:
        missing = (self.next - self.base + _PER_BYTE - 1) // _PER_BYTE - len(self._bits)
        if missing > 0:
            self._bits += bytes(missing)


_HAS_NO_OPEN = tuple(all(byte >> shift & 3 for shift in (0, 2, 4, 6)) for byte in range(256))
