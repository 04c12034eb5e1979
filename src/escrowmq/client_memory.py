"""How many bytes the server keeps for each client connection, and in all.

What outlives the request that brought it is counted here, by the table that keeps it: incomplete
requests, unsent responses, held pulls, members of groups, subscriptions, registrations. The counts
are estimates of what the objects take. Locks and calls that wait for a client are limited by number
and are not counted. What a request collects over many turns is counted as well.

    reserve()   before something is kept at a client's wish; refuses the greedy with TableFull
    add()       for what is there already, such as the bytes of an incomplete request
    release()   when it is gone
    forget()    when the connection is closed: whatever is still counted for it is gone

There are three limits. One connection may reserve up to `connection_max`. Above `soft_max` in all,
a connection that has more than its fair share gets nothing more. Above `hard_max`, the connections
that have most are closed; `server/connection_limits.py` does this and stops reading from the greedy
before it comes to that. A connection below FAIR_BYTES_MIN is never refused: honest clients are
small, and are served while others are greedy.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from escrowmq.errors import TableFull
from escrowmq.peer import Peer

FAIR_BYTES_MIN: Final = 256 << 10
SOFT_PERCENT: Final = 75  # of the hard limit
NAME_BYTES_MAX: Final = 255  # of a client id, a group and every other name that is kept


class MemoryUse(enum.IntEnum):
    """What the bytes are kept for."""

    CONNECTIONS = 0  # the connections themselves: objects, TLS state and buffers
    PARTIAL_REQUESTS = 1
    WAITING_REQUESTS = 2  # received together, and not handled yet
    UNSENT_RESPONSES = 3
    HELD_PULLS = 4
    MEMBERS = 5
    SUBSCRIPTIONS = 6
    REGISTRATIONS = 7  # of brokers, at the name server
    RESULTS = 8  # of requests that are being handled in slices

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """The limits in bytes."""

    connection_max: int
    hard_max: int

    @property
    def soft_max(self) -> int:
        return self.hard_max * SOFT_PERCENT // 100


UNLIMITED: Final = MemoryLimits(connection_max=1 << 62, hard_max=1 << 62)


class _Account:
    """The bytes of one connection."""

    __slots__ = ("by_use", "total")

    def __init__(self) -> None:
        self.total = 0
        self.by_use = [0] * len(MemoryUse)


class ClientMemory:
    """The bytes that are kept for all connections of a process."""

    def __init__(self, limits: MemoryLimits = UNLIMITED) -> None:
        self.limits = limits
        self.total = 0
        self._by_use = [0] * len(MemoryUse)
        self._accounts: dict[Peer, _Account] = {}
        self.refused = 0  # reservations

    def reserve(
        self, owner: Peer, use: MemoryUse, count: int, *, ignores_connection_max: bool = False
    ) -> None:
        """Count bytes that are about to be kept. Raise TableFull if the owner may have no more."""
        limits = self.limits
        owner_bytes = self.bytes_of(owner) + count
        if owner_bytes > limits.connection_max and not ignores_connection_max:
            self.refused += 1
            raise TableFull(
                f"the server would keep {owner_bytes} bytes for this connection, the limit is "
                f"{limits.connection_max} (escrowConnectionInFlightBytesMax)"
            )
        if self.total + count > limits.soft_max and owner_bytes > self.fair_bytes():
            self.refused += 1
            raise TableFull(
                f"the server keeps {self.total} bytes for its clients, which is close to the limit "
                f"of {limits.hard_max} (escrowClientMemoryMax), and {owner_bytes} would be for "
                "this connection"
            )
        self.add(owner, use, count)

    def add(self, owner: Peer, use: MemoryUse, count: int) -> None:
        """Count bytes that are kept. A negative count releases them."""
        account = self._accounts.get(owner)
        if account is None:
            account = self._accounts[owner] = _Account()
        account.by_use[use] += count
        account.total += count
        self._by_use[use] += count
        self.total += count

    def release(self, owner: Peer, use: MemoryUse, count: int) -> None:
        """Stop counting bytes. An owner that was forgotten has none."""
        if owner in self._accounts:
            self.add(owner, use, -count)

    def set(self, owner: Peer, use: MemoryUse, count: int) -> None:
        """Count exactly so many bytes for this use of the owner."""
        account = self._accounts.get(owner)
        before = 0 if account is None else account.by_use[use]
        if count != before:
            self.add(owner, use, count - before)

    def forget(self, owner: Peer) -> None:
        """Release everything that is counted for a closed connection."""
        account = self._accounts.pop(owner, None)
        if account is not None:
            self.total -= account.total
            for use, count in enumerate(account.by_use):
                self._by_use[use] -= count

    def bytes_of(self, owner: Peer) -> int:
        account = self._accounts.get(owner)
        return 0 if account is None else account.total

    def bytes_for(self, use: MemoryUse) -> int:
        return self._by_use[use]

    def uses_of(self, owner: Peer) -> Iterator[tuple[MemoryUse, int]]:
        """Yield what is kept for a connection, by use."""
        account = self._accounts.get(owner)
        for use in MemoryUse if account is not None else ():
            if account is not None and account.by_use[use]:
                yield use, account.by_use[use]

    def fair_bytes(self) -> int:
        """Return what a connection may have while memory is short: an equal part of it."""
        return max(FAIR_BYTES_MIN, self.limits.soft_max // max(1, len(self._accounts)))

    @property
    def is_above_soft(self) -> bool:
        return self.total > self.limits.soft_max

    @property
    def is_above_hard(self) -> bool:
        return self.total > self.limits.hard_max

    def greediest(self) -> list[tuple[Peer, int]]:
        """Return all connections with their bytes, the greediest first."""
        owners = ((owner, account.total) for owner, account in self._accounts.items())
        return sorted(owners, key=lambda item: item[1], reverse=True)


class Reservation:
    """Bytes that are reserved little by little, and released together.

    with Reservation(memory, channel, MemoryUse.RESULTS) as reservation:
        reservation.add(len(row))
    """

    def __init__(self, memory: ClientMemory, owner: Peer, use: MemoryUse) -> None:
        self._memory = memory
        self._owner = owner
        self._use = use
        self._count = 0

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._memory.release(self._owner, self._use, self._count)

    def add(self, count: int) -> None:
        """Reserve more bytes. Raise TableFull if the owner may have no more."""
        self._memory.reserve(self._owner, self._use, count)
        self._count += count


def name_error(field_name: str, name: str) -> str:
    """Return why a name is too long to be kept; an empty text if it is not."""
    # A character has up to four bytes, so most names need not be encoded to be measured.
    if len(name) * 4 <= NAME_BYTES_MAX or len(name.encode("utf-8", "replace")) <= NAME_BYTES_MAX:
        return ""
    return f"{field_name} has {len(name)} characters, the limit is {NAME_BYTES_MAX} bytes"
