"""The other end of a connection, as far as the sans-IO core has to know it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Protocol


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
    def origin(self) -> str:
        """The account that the client uses, or else its host; `fair_shares.py` counts by it."""

    @property
    def is_open(self) -> bool:
        """Return False once the connection is closed. It never opens again."""


class _Disconnected:
    """Stands for all clients that have closed their connections."""

    address = "disconnected"
    origin = "disconnected"
    is_open = False


# The owner of what has to be kept for a while after its connection was closed.
DISCONNECTED: Final = _Disconnected()


def host_of(address: str) -> str:
    """Return the origin of a client without an account, from its `ip:port`.

    For IPv6 this is the network of 64 bits: a single client may use any address of it.
    """
    host = address.rpartition(":")[0] or address
    if ":" not in host:
        return host
    groups = host.partition("%")[0].split(":")
    if "" in groups:  # the abbreviation :: stands for as many zeros as are missing
        gap = groups.index("")
        behind = [group for group in groups[gap:] if group]
        groups = [group for group in groups[:gap] if group]
        groups += ["0"] * (8 - len(groups) - len(behind)) + behind
    return ":".join(groups[:4])
