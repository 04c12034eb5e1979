"""Peers for tests of tables that hold channels and never write to them."""

from __future__ import annotations

from escrowmq.peer import host_of


class FakePeer(str):
    """A peer that equals its address, so that tests can compare it with a string."""

    __slots__ = ()

    @property
    def address(self) -> str:
        return str(self)

    @property
    def origin(self) -> str:
        return host_of(self)

    @property
    def is_open(self) -> bool:
        return True
