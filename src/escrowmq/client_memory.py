"""How many bytes the server keeps for each client connection, and in all.

What outlives the request that brought it is counted here, by the table that keeps it: incomplete
requests, unsent responses, held pulls, members of groups, subscriptions, locks, calls that wait for
a client, registrations, and what a request collects over many turns. The counts are estimates of
what the objects take, rounded up; `tests/unit/test_memory_estimates.py` compares them with what is
measured.

    reserve()   before something is kept at a client's wish; refuses the greedy with TableFull
    add()       for what is there already, such as the bytes of an incomplete request
    release()   when it is gone
    forget()    when the connection is closed: whatever is still counted for it is gone

There are three limits. One connection may reserve up to `connection_max`. Above `soft_max` in all,
a connection that has more than its fair share gets nothing more. Above `hard_max`, the connections
that have most are closed; `server/connection_limits.py` does this and stops reading from the greedy
before it comes to that. A connection has more than its share if it exceeds an equal part of the
memory, and all connections of its account or host together do too (`fair_shares.py`). One below
FAIR_BYTES_MIN is never refused: honest clients are small, and are served while others are greedy.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from escrowmq.errors import TableFull
from escrowmq.fair_shares import FairShares
from escrowmq.peer import Peer

FAIR_BYTES_MIN: Final = 256 << 10
SOFT_PERCENT: Final = 75  # of the hard limit
NAME_BYTES_MAX: Final = 255  # of a client id, a group and every other name that is kept
_TEXT_BYTES: Final = 96  # of an empty str; sys.getsizeof says 49 to 80, before it is rounded


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
    QUEUE_LOCKS = 8
    PENDING_CALLS = 9  # requests that the server has sent to a client for another one
    RESULTS = 10  # of requests that are being handled in slices

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


class ClientMemory:
    """The bytes that are kept for all connections of a process."""

    def __init__(self, limits: MemoryLimits = UNLIMITED) -> None:
        self.limits = limits
        self._shares: FairShares[Peer] = FairShares()
        self._by_use = [0] * len(MemoryUse)
        self._uses: dict[Peer, list[int]] = {}  # the bytes of each connection, by use
        self.refused = 0  # reservations

    @property
    def total(self) -> int:
        return self._shares.total

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
        if self.total + count > limits.soft_max and self.is_greedy(owner, count):
            self.refused += 1
            raise TableFull(
                f"the server keeps {self.total} bytes for its clients, which is close to the limit "
                f"of {limits.hard_max} (escrowClientMemoryMax), and {owner_bytes} would be for "
                "this connection"
            )
        self.add(owner, use, count)

    def add(self, owner: Peer, use: MemoryUse, count: int) -> None:
        """Count bytes that are kept. A negative count releases them."""
        uses = self._uses.get(owner)
        if uses is None:
            uses = self._uses[owner] = [0] * len(MemoryUse)
        uses[use] += count
        self._by_use[use] += count
        self._shares.add(owner, count)

    def release(self, owner: Peer, use: MemoryUse, count: int) -> None:
        """Stop counting bytes. An owner that was forgotten has none."""
        if owner in self._uses:
            self.add(owner, use, -count)

    def set(self, owner: Peer, use: MemoryUse, count: int) -> None:
        """Count exactly so many bytes for this use of the owner."""
        uses = self._uses.get(owner)
        before = 0 if uses is None else uses[use]
        if count != before:
            self.add(owner, use, count - before)

    def forget(self, owner: Peer) -> None:
        """Release everything that is counted for a closed connection."""
        for use, count in enumerate(self._uses.pop(owner, ())):
            self._by_use[use] -= count
        self._shares.remove(owner)

    def update_origin(self, owner: Peer) -> None:
        """Count a connection under another origin, because its own has changed."""
        self._shares.update_origin(owner)

    def bytes_of(self, owner: Peer) -> int:
        return self._shares.amount_of(owner)

    def bytes_for(self, use: MemoryUse) -> int:
        return self._by_use[use]

    def uses_of(self, owner: Peer) -> Iterator[tuple[MemoryUse, int]]:
        """Yield what is kept for a connection, by use."""
        for use, count in zip(MemoryUse, self._uses.get(owner, ()), strict=False):
            if count:
                yield use, count

    def is_greedy(self, owner: Peer, count: int = 0) -> bool:
        """Return whether a connection has more than its share of the memory, with `count` more."""
        shares, soft_max = self._shares, self.limits.soft_max
        fair_bytes = max(FAIR_BYTES_MIN, soft_max // max(1, len(shares)))
        if shares.amount_of(owner) + count <= fair_bytes:
            return False
        return shares.origin_amount_of(owner) + count > soft_max // max(1, shares.origin_count)

    @property
    def is_above_soft(self) -> bool:
        return self.total > self.limits.soft_max

    @property
    def is_above_hard(self) -> bool:
        return self.total > self.limits.hard_max

    def greediest(self) -> list[tuple[Peer, int]]:
        """Return all connections with their bytes, the greediest first."""
        return self._shares.by_greed()


def text_bytes(text: str) -> int:
    """Return how many bytes a text takes, rounded up. Another copy of it takes as much again."""
    # Other characters have up to four bytes, and up to four more in UTF-8, which Python may keep
    # beside them. The number must not depend on whether it does: what is reserved is released.
    return _TEXT_BYTES + len(text) * (1 if text.isascii() else 8)


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
