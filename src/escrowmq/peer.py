"""The other end of a connection, as far as the sans-IO core has to know it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol


class Peer(Hashable, Protocol):
    """A connected client.

    The core remembers peers as producers of half messages and as members of groups. It compares
    and hashes them, shows their address and asks whether they are still connected. It never writes
    to them: the broker does, and knows them as `broker.dispatch.Channel`.
    """

    @property
    def address(self) -> str:
        """`ip:port`, for logs and for operators."""

    @property
    def is_open(self) -> bool:
        """Return False once the connection is closed. It never opens again."""
