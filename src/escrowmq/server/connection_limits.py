"""When a connection is held back or closed: it uses too much memory, or nothing comes from it.

    MemoryWatermark   when the server keeps too much for its clients, the greedy are limited
    IdleTracker       which connections have been idle for too long

What the watermark does:

    below the soft limit    nothing
    above the soft limit    connections with more than their fair share are not read from, until the
                            total is below it again; and what they request to be kept is refused
    above the hard limit    the connections with most are closed, until the total is below the soft
                            limit

`client_memory.py` counts. Connections that have less than their fair share notice nothing, and
neither do those of an account or host that has less than its share.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar, cast

from escrowmq.client_memory import ClientMemory, MemoryLimits
from escrowmq.config import NetworkConfig
from escrowmq.limited_log import LimitedLog
from escrowmq.peer import Peer

log = logging.getLogger(__name__)

# --- memory ---------------------------------------------------------------------------------------

DEFAULT_SHARE: Final = 4  # by default, clients get a quarter of the memory
CLIENT_MEMORY_MIN: Final = 64 << 20
_CGROUP_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def memory_limits(config: NetworkConfig) -> MemoryLimits:
    """Return the limits that the settings ask for."""
    hard_max = config.client_memory_max or max(
        CLIENT_MEMORY_MIN, available_memory_bytes() // DEFAULT_SHARE
    )
    return MemoryLimits(
        connection_max=min(config.connection_in_flight_bytes_max, hard_max), hard_max=hard_max
    )


def available_memory_bytes() -> int:
    """Return the memory of the machine, or of the container if that has less."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine_bytes, *filter(None, map(_limit_in_file, _CGROUP_LIMITS))])


def _limit_in_file(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # another version of cgroups, or the word "max"
        return None


class LimitedConnection(Peer, Protocol):
    """A connection that can be held back or closed."""

    def hold_reading(self, is_held: bool) -> None:
        """Stop or resume reading from the client."""

    def drop(self) -> None:
        """Close the connection at once, with everything that is kept for it."""


class MemoryWatermark:
    """Hold the greedy connections back, and close them when that is not enough."""

    def __init__(self, memory: ClientMemory) -> None:
        self.memory = memory
        self._held: set[LimitedConnection] = set()
        self._dropped: set[LimitedConnection] = set()  # until they are closed
        self._enforced_total = 0  # to look at all connections only if something has changed
        self._limited_log = LimitedLog(log)
        self.closed_connections = 0

    @property
    def held_count(self) -> int:
        return len(self._held)

    def enforce(self, now_ms: int) -> None:
        """Apply the limits. Call it at the end of a turn if the total is above the soft limit."""
        memory = self.memory
        excess = memory.total - memory.limits.soft_max
        is_above_hard = memory.is_above_hard
        growth = memory.total - self._enforced_total
        if excess <= 0 or (growth < memory.limits.soft_max >> 6 and not is_above_hard):
            return
        self._enforced_total = memory.total
        for owner, count in memory.greediest():
            if excess <= 0:
                break
            if not is_above_hard and not memory.is_greedy(owner):
                continue
            # Only connections own memory; the core knows them as peers.
            connection = cast(LimitedConnection, owner)
            excess -= count
            if connection in self._dropped:
                continue  # the event loop is about to close it
            if is_above_hard:
                # Also one that is being closed: its client may never read the last responses.
                self._close(connection, count, now_ms)
            elif connection not in self._held:
                self._held.add(connection)
                connection.hold_reading(True)

    def release(self) -> None:
        """Read from the held connections again if there is enough memory. Call it regularly."""
        memory = self.memory
        self._enforced_total = min(self._enforced_total, memory.total)
        for connection in list(self._held):
            is_greedy = memory.is_above_soft and memory.is_greedy(connection)
            if not is_greedy or not connection.is_open:
                self._held.discard(connection)
                connection.hold_reading(False)

    def is_holding(self, connection: LimitedConnection) -> bool:
        return connection in self._held

    def connection_closed(self, connection: LimitedConnection) -> None:
        self._held.discard(connection)
        self._dropped.discard(connection)
        self.memory.forget(connection)

    def _close(self, connection: LimitedConnection, count: int, now_ms: int) -> None:
        uses = ", ".join(f"{use.label} {size}" for use, size in self.memory.uses_of(connection))
        self._limited_log.warning(
            now_ms,
            "connection closed peer=%s: the server keeps more than escrowClientMemoryMax=%d bytes "
            "for its clients, and %d for this one: %s",
            connection.address,
            self.memory.limits.hard_max,
            count,
            uses,
        )
        self.closed_connections += 1
        self._dropped.add(connection)
        connection.drop()


# --- idle connections ----------------------------------------------------------------------------


class HasLastActivity(Hashable, Protocol):
    last_active_s: float  # when data was last received


L = TypeVar("L", bound=HasLastActivity)


class IdleTracker(Generic[L]):
    """Find the connections that have been idle for too long.

    A connection is filed under the second in which its idle time would be over if it stayed idle.
    When that second has passed, it is either idle or filed again. So each connection is looked at
    once per idle time, however many there are, and receiving data costs nothing here.
    """

    def __init__(self, idle_max_s: float, *, now_s: float) -> None:
        self._idle_max_s = idle_max_s
        self._checked_s = int(now_s)
        self._due: dict[int, set[L]] = {}
        self._due_by_connection: dict[L, int] = {}

    def watch(self, connection: L) -> None:
        due_s = max(int(connection.last_active_s + self._idle_max_s), self._checked_s) + 1
        self._due.setdefault(due_s, set()).add(connection)
        self._due_by_connection[connection] = due_s

    def remove(self, connection: L) -> None:
        due_s = self._due_by_connection.pop(connection, None)
        if due_s is not None:
            connections = self._due[due_s]
            connections.discard(connection)
            if not connections:
                del self._due[due_s]

    def find_idle(self, now_s: float) -> list[L]:
        """Return the connections that have been idle for too long. They stay watched."""
        due: list[L] = []
        while self._checked_s < int(now_s):
            self._checked_s += 1
            due += self._due.get(self._checked_s, ())
        for connection in due:
            self.remove(connection)
            self.watch(connection)
        return [
            connection for connection in due if now_s - connection.last_active_s > self._idle_max_s
        ]
