"""Which clients are in which groups, and over which line each can be reached.

A client is in a group under its id, on one line: when it comes back on a new line, the old line's
closing no longer concerns it. Times are those of any one clock, as long as it is always the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from escrowmq.errors import TableFull

EXPIRED_MS: Final = 120_000  # without a heartbeat; clients send one every 30 s
MEMBERS_MAX: Final = 100_000
MEMBERS_PER_LINE_MAX: Final = 1_000

Line = Hashable  # a connection; who made it knows what it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    client_id: str
    line: Line
    language: str = "JAVA"
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    group: str
    client: Client
    seen_ms: int


class Members:
    """Groups with nobody in them are not kept."""

    def __init__(
        self,
        *,
        members_max: int = MEMBERS_MAX,
        per_line_max: int = MEMBERS_PER_LINE_MAX,
        expired_ms: int = EXPIRED_MS,
    ) -> None:
        self._members_max = members_max
        self._per_line_max = per_line_max
        self._expired_ms = expired_ms
        self._count = 0
        self._groups: dict[str, OrderedDict[str, Member]] = {}
        self._lines: dict[Line, set[tuple[str, str]]] = {}  # group and client id
        self._clients: dict[str, dict[str, Member]] = {}  # client id -> group -> member

    def __len__(self) -> int:
        return self._count

    def __contains__(self, group: str) -> bool:
        return group in self._groups

    def join(self, group: str, client: Client, *, now_ms: int) -> bool:
        """Whether it is new here, or came back on another line. Raises TableFull."""
        before = self.find(group, client.client_id)
        is_new = before is None or before.client.line != client.line
        if is_new:
            self._refuse_if_full(client.line, adds=before is None)
        if is_new and before is not None:
            self._forget_line(before)
        self._count += before is None
        member = Member(group=group, client=client, seen_ms=now_ms)
        self._groups.setdefault(group, OrderedDict())[client.client_id] = member
        self._clients.setdefault(client.client_id, {})[group] = member
        self._lines.setdefault(client.line, set()).add((group, client.client_id))
        return is_new

    def leave(self, group: str, client_id: str, line: Line) -> Member | None:
        """A goodbye on a line that the client has left since does not count."""
        member = self.find(group, client_id)
        if member is None or member.client.line != line:
            return None
        self._remove(member)
        return member

    def line_closed(self, line: Line) -> list[Member]:
        """Those who are gone with it."""
        keys = sorted(self._lines.get(line, ()))
        gone = [self._groups[group][client_id] for group, client_id in keys]
        for member in gone:
            self._remove(member)
        return gone

    def expire(self, now_ms: int) -> list[Member]:
        """Those who were silent for too long, and are gone now."""
        seen_before_ms = now_ms - self._expired_ms
        gone = [
            member
            for members in self._groups.values()
            for member in members.values()
            if member.seen_ms < seen_before_ms
        ]
        for member in gone:
            self._remove(member)
        return gone

    def find(self, group: str, client_id: str) -> Member | None:
        members = self._groups.get(group)
        return None if members is None else members.get(client_id)

    def of(self, group: str) -> list[Member]:
        return list(self._groups.get(group, {}).values())

    def names(self) -> list[str]:
        return list(self._groups)

    def next_of(self, group: str) -> Member | None:
        """One after the other, round and round."""
        members = self._groups.get(group)
        if members is None:
            return None
        client_id, member = next(iter(members.items()))
        members.move_to_end(client_id)
        return member

    def last_seen(self, client_id: str) -> Member | None:
        """This client in whichever group it was heard of last."""
        known = self._clients.get(client_id, {}).values()
        return max(known, key=lambda member: member.seen_ms, default=None)

    def _refuse_if_full(self, line: Line, *, adds: bool) -> None:
        if adds and self._count >= self._members_max:
            raise TableFull(f"{self._count} members of groups, limit {self._members_max}")
        if len(self._lines.get(line, ())) >= self._per_line_max:
            raise TableFull(f"{self._per_line_max} memberships on one line")

    def _remove(self, member: Member) -> None:
        group, client_id = member.group, member.client.client_id
        self._count -= 1
        self._forget_line(member)
        del self._groups[group][client_id]
        if not self._groups[group]:
            del self._groups[group]
        del self._clients[client_id][group]
        if not self._clients[client_id]:
            del self._clients[client_id]

    def _forget_line(self, member: Member) -> None:
        line = member.client.line
        keys = self._lines[line]
        keys.discard((member.group, member.client.client_id))
        if not keys:
            del self._lines[line]
