"""What the broker needs of a connection. `server/tcp.py` has the real one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from escrowmq.wire.command import Command
from escrowmq.wire.fastpath import Body
from escrowmq.wire.headers import Header


class Line(Hashable, Protocol):
    peer: str  # ip:port, for people
    peer_host: bytes  # as records hold it

    @property
    def is_open(self) -> bool: ...

    def write(self, data: bytes) -> None:
        """An answer, or nothing. It leaves at the end of this turn, with the others."""

    def write_pieces(self, pieces: Sequence[Body]) -> None:
        """An answer whose body is slices of the log."""

    def post(self, code: int, fields: Header, body: Body = b"") -> bool:
        """A request of ours, one way. False if the line is gone or stuffed."""


# What the peer answered; None if it did not, in time or at all.
Answered = Callable[[Command | None, bytes], None]


class AskableLine(Line, Protocol):
    def ask(
        self, code: int, fields: Header, body: Body, answered: Answered, *, wait_s: float
    ) -> bool:
        """A request of ours that the peer answers. False if the line is gone or stuffed;
        `answered` is then never called, and otherwise once."""
