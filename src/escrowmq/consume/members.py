"""Which clients are in which groups, and over which line each can be reached.

A client is in a group under its id, on one line: when it comes back on a new line, the old line's
closing no longer concerns it. Times are those of any one clock, as long as it is always the same.

Who consumes and who produces: groups as heartbeats describe them.

A consumer group has one subscription per topic, that of the member who spoke last and newest:

    heartbeat says                          the group        counts as a change
    a client, or a line of it, unknown      has a member     yes
    a topic not subscribed to so far        adds it          yes
    a topic left out                        drops it         yes
    a topic with a newer version            replaces it      no
    a topic with the same or an older one   keeps what is    no

After a change every member is told, and they share the queues out anew.

Newer clients spare us the subscriptions when nothing has changed: they send a fingerprint of the
heartbeat instead (`without_sub`). A fingerprint is remembered with the subscriptions that came with
it and lives no longer than they do, so a client whose subscriptions we do not have is always asked
to send them again, whatever was lost in between.

Queue locks of orderly consumers: one member of a group reads a queue, the others wait.

A lock is valid for 60 s since its owner last asked for it; owners ask every 20 s. A line that
closes releases nothing: the client behind it may still be working on the queue, and believes in
its lock for a while.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from escrowmq.consume.subscription import Subscription
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


BROADCASTING: Final = "BROADCASTING"
CLUSTERING: Final = "CLUSTERING"
SUBSCRIPTIONS_MAX: Final = 1_000  # in one group


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How a group consumes, by RocketMQ's names."""

    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = CLUSTERING
    consume_from: str = "CONSUME_FROM_LAST_OFFSET"


@dataclass(slots=True, kw_only=True)
class ConsumerGroup:
    """One that is connected. For reading; ConsumerGroups writes it."""

    name: str
    habits: Habits
    subscriptions: dict[str, Subscription] = field(default_factory=dict)  # by topic
    fingerprint: int = 0  # of the heartbeat that brought the subscriptions; 0: it had none

    @property
    def is_broadcasting(self) -> bool:
        return self.habits.message_model == BROADCASTING


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    changed: bool  # tell every member
    wants_subscriptions: bool  # the next heartbeat must bring them (IS_SUB_CHANGE)


class ConsumerGroups:
    def __init__(
        self, members: Members | None = None, *, subscriptions_max: int = SUBSCRIPTIONS_MAX
    ) -> None:
        self._members = Members() if members is None else members
        self._subscriptions_max = subscriptions_max
        self._groups: dict[str, ConsumerGroup] = {}

    def heartbeat(
        self,
        name: str,
        client: Client,
        *,
        habits: Habits,
        subscriptions: Sequence[Subscription],
        fingerprint: int = 0,
        without_sub: bool = False,
        now_ms: int,
    ) -> Joined:
        """Raises TableFull, and then nothing has changed."""
        if len(subscriptions) > self._subscriptions_max:
            raise TableFull(f"{len(subscriptions)} topics, limit {self._subscriptions_max}")
        is_new = self._members.join(name, client, now_ms=now_ms)
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = ConsumerGroup(name=name, habits=habits)
        group.habits = habits
        wants = fingerprint == 0 or fingerprint != group.fingerprint
        if fingerprint and without_sub:
            return Joined(changed=is_new, wants_subscriptions=wants)
        group.fingerprint = fingerprint
        topics_changed = _subscribe(group.subscriptions, subscriptions)
        return Joined(changed=is_new or topics_changed, wants_subscriptions=wants)

    def unregister(self, name: str, client_id: str, line: Line) -> bool:
        """Whether a member left."""
        member = self._members.leave(name, client_id, line)
        return bool(self._forget_empty([] if member is None else [member]))

    def line_closed(self, line: Line) -> list[Member]:
        """The members that are gone; their groups have changed."""
        return self._forget_empty(self._members.line_closed(line))

    def expire(self, now_ms: int) -> list[Member]:
        """The members that are gone; their groups have changed."""
        return self._forget_empty(self._members.expire(now_ms))

    def find(self, name: str) -> ConsumerGroup | None:
        """None: nobody of it is connected."""
        return self._groups.get(name)

    def subscription(self, name: str, topic: str) -> Subscription | None:
        group = self._groups.get(name)
        return None if group is None else group.subscriptions.get(topic)

    def names(self) -> list[str]:
        return list(self._groups)

    def subscribers(self, topic: str) -> list[str]:
        """The groups that want something of a topic."""
        return [name for name, group in self._groups.items() if topic in group.subscriptions]

    def members(self, name: str) -> list[Member]:
        return self._members.of(name)

    def member_ids(self, name: str) -> list[str]:
        return [member.client.client_id for member in self._members.of(name)]

    def line_of(self, name: str, client_id: str) -> Line | None:
        member = self._members.find(name, client_id)
        return None if member is None else member.client.line

    def lines_to_notify(self, name: str) -> list[Line]:
        """Whom to tell of a change. In a broadcasting group there is nothing to share out."""
        group = self._groups.get(name)
        if group is None or group.is_broadcasting:
            return []
        return [member.client.line for member in self._members.of(name)]

    def _forget_empty(self, gone: list[Member]) -> list[Member]:
        for member in gone:
            if member.group not in self._members:
                self._groups.pop(member.group, None)
        return gone


def _subscribe(table: dict[str, Subscription], wanted: Sequence[Subscription]) -> bool:
    """Whether a topic came or went."""
    before = set(table)
    for subscription in wanted:
        known = table.get(subscription.topic)
        if known is None or subscription.version > known.version:
            table[subscription.topic] = subscription
    for topic in before.difference(subscription.topic for subscription in wanted):
        del table[topic]
    return before != set(table)


class ProducerGroups:
    """Who can be asked about a half of its group, or be handed a reply."""

    def __init__(self, members: Members | None = None) -> None:
        self._members = Members() if members is None else members

    def heartbeat(self, name: str, client: Client, *, now_ms: int) -> bool:
        """Whether it is new, or on a new line. Raises TableFull."""
        return self._members.join(name, client, now_ms=now_ms)

    def unregister(self, name: str, client_id: str, line: Line) -> bool:
        return self._members.leave(name, client_id, line) is not None

    def line_closed(self, line: Line) -> list[Member]:
        return self._members.line_closed(line)

    def expire(self, now_ms: int) -> list[Member]:
        return self._members.expire(now_ms)

    def names(self) -> list[str]:
        return self._members.names()

    def members(self, name: str) -> list[Member]:
        return self._members.of(name)

    def pick_line(self, name: str) -> Line | None:
        """Another member each time, so that questions are spread over the group."""
        member = self._members.next_of(name)
        return None if member is None else member.client.line

    def line_in(self, name: str, client_id: str) -> Line | None:
        member = self._members.find(name, client_id)
        return None if member is None else member.client.line

    def line_of(self, client_id: str) -> Line | None:
        """In any group: a reply is addressed to a client, not to a group."""
        member = self._members.last_seen(client_id)
        return None if member is None else member.client.line


VALID_MS: Final = 60_000
LOCKS_MAX: Final = 100_000

LockedQueue = tuple[str, int]  # topic and queue id


class _Lock(NamedTuple):
    owner: str
    asked_ms: int

    def is_valid(self, now_ms: int) -> bool:
        return now_ms - self.asked_ms <= VALID_MS


class QueueLocks:
    def __init__(self, *, locks_max: int = LOCKS_MAX) -> None:
        self._locks_max = locks_max
        self._count = 0
        self._groups: dict[str, dict[LockedQueue, _Lock]] = {}

    def __len__(self) -> int:
        return self._count

    def lock(
        self, group: str, client_id: str, queues: Iterable[LockedQueue], *, now_ms: int
    ) -> list[LockedQueue]:
        """Those it has now: free, expired or its own. None of the others, nor past the bound."""
        if self._count >= self._locks_max:
            self.expire(now_ms)
        granted = []
        for queue in dict.fromkeys(queues):
            held = self._groups.get(group, {}).get(queue)
            if held is None and self._count >= self._locks_max:
                continue
            if held is None or held.owner == client_id or not held.is_valid(now_ms):
                self._groups.setdefault(group, {})[queue] = _Lock(client_id, now_ms)
                self._count += held is None
                granted.append(queue)
        return granted

    def unlock(self, group: str, client_id: str, queues: Iterable[LockedQueue]) -> None:
        for queue in queues:
            held = self._groups.get(group, {}).get(queue)
            if held is not None and held.owner == client_id:
                self._remove(group, queue)

    def is_locked_by(self, group: str, client_id: str, queue: LockedQueue, *, now_ms: int) -> bool:
        held = self._groups.get(group, {}).get(queue)
        return held is not None and held.owner == client_id and held.is_valid(now_ms)

    def group_has_locks(self, group: str, *, now_ms: int) -> bool:
        """Whether it is one that consumes in order."""
        return any(held.is_valid(now_ms) for held in self._groups.get(group, {}).values())

    def expire(self, now_ms: int) -> int:
        """Forget locks that are no longer valid: how many."""
        over = [
            (group, queue)
            for group, locks in self._groups.items()
            for queue, held in locks.items()
            if not held.is_valid(now_ms)
        ]
        for group, queue in over:
            self._remove(group, queue)
        return len(over)

    def _remove(self, group: str, queue: LockedQueue) -> None:
        self._count -= 1
        del self._groups[group][queue]
        if not self._groups[group]:
            del self._groups[group]
