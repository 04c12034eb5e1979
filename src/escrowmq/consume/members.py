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
from typing import Final, Generic, NamedTuple, TypeVar

from escrowmq.consume.subscription import Subscription
from escrowmq.errors import TableFull

MEMBER_TIMEOUT_MS: Final = 120_000  # without a heartbeat; clients send one every 30 s
MEMBERS_MAX: Final = 100_000
MEMBERS_PER_CHANNEL_MAX: Final = 1_000

# A connection. The groups only compare and hash it, and hand it out again as the same type.
C = TypeVar("C", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupClient(Generic[C]):
    client_id: str
    channel: C
    language: str = "JAVA"
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member(Generic[C]):
    group: str
    client: GroupClient[C]
    last_heartbeat_ms: int


class MemberTable(Generic[C]):
    """Groups with nobody in them are not kept."""

    def __init__(
        self,
        *,
        members_max: int = MEMBERS_MAX,
        per_channel_max: int = MEMBERS_PER_CHANNEL_MAX,
        timeout_ms: int = MEMBER_TIMEOUT_MS,
    ) -> None:
        self._members_max = members_max
        self._per_channel_max = per_channel_max
        self._timeout_ms = timeout_ms
        self._count = 0
        self._groups: dict[str, OrderedDict[str, Member[C]]] = {}
        self._channels: dict[C, set[tuple[str, str]]] = {}  # group and client id
        self._clients: dict[str, dict[str, Member[C]]] = {}  # client id -> group -> member

    def __len__(self) -> int:
        return self._count

    def __contains__(self, group: str) -> bool:
        return group in self._groups

    def join(self, group: str, client: GroupClient[C], *, now_ms: int) -> bool:
        """Whether it is new here, or came back on another line. Raises TableFull."""
        before = self.find(group, client.client_id)
        is_new = before is None or before.client.channel != client.channel
        if is_new:
            self._check_limits(client.channel, is_new_member=before is None)
        if is_new and before is not None:
            self._unlink_channel(before)
        self._count += before is None
        member = Member(group=group, client=client, last_heartbeat_ms=now_ms)
        self._groups.setdefault(group, OrderedDict())[client.client_id] = member
        self._clients.setdefault(client.client_id, {})[group] = member
        self._channels.setdefault(client.channel, set()).add((group, client.client_id))
        return is_new

    def leave(self, group: str, client_id: str, channel: C) -> Member[C] | None:
        """A goodbye on a line that the client has left since does not count."""
        member = self.find(group, client_id)
        if member is None or member.client.channel != channel:
            return None
        self._remove(member)
        return member

    def channel_closed(self, channel: C) -> list[Member[C]]:
        """Those who are gone with it."""
        keys = sorted(self._channels.get(channel, ()))
        gone = [self._groups[group][client_id] for group, client_id in keys]
        for member in gone:
            self._remove(member)
        return gone

    def expire(self, now_ms: int) -> list[Member[C]]:
        """Those who were silent for too long, and are gone now."""
        seen_before_ms = now_ms - self._timeout_ms
        gone = [
            member
            for members in self._groups.values()
            for member in members.values()
            if member.last_heartbeat_ms < seen_before_ms
        ]
        for member in gone:
            self._remove(member)
        return gone

    def find(self, group: str, client_id: str) -> Member[C] | None:
        members = self._groups.get(group)
        return None if members is None else members.get(client_id)

    def members_of(self, group: str) -> list[Member[C]]:
        return list(self._groups.get(group, {}).values())

    def names(self) -> list[str]:
        return list(self._groups)

    def next_member(self, group: str) -> Member[C] | None:
        """One after the other, round and round."""
        members = self._groups.get(group)
        if members is None:
            return None
        client_id, member = next(iter(members.items()))
        members.move_to_end(client_id)
        return member

    def most_recent_member(self, client_id: str) -> Member[C] | None:
        """This client in whichever group it was heard of last."""
        known = self._clients.get(client_id, {}).values()
        return max(known, key=lambda member: member.last_heartbeat_ms, default=None)

    def _check_limits(self, channel: C, *, is_new_member: bool) -> None:
        if is_new_member and self._count >= self._members_max:
            raise TableFull(f"{self._count} members of groups, limit {self._members_max}")
        if len(self._channels.get(channel, ())) >= self._per_channel_max:
            raise TableFull(f"{self._per_channel_max} memberships on one line")

    def _remove(self, member: Member[C]) -> None:
        group, client_id = member.group, member.client.client_id
        self._count -= 1
        self._unlink_channel(member)
        del self._groups[group][client_id]
        if not self._groups[group]:
            del self._groups[group]
        del self._clients[client_id][group]
        if not self._clients[client_id]:
            del self._clients[client_id]

    def _unlink_channel(self, member: Member[C]) -> None:
        line = member.client.channel
        keys = self._channels[line]
        keys.discard((member.group, member.client.client_id))
        if not keys:
            del self._channels[line]


BROADCASTING: Final = "BROADCASTING"
CLUSTERING: Final = "CLUSTERING"
SUBSCRIPTIONS_MAX: Final = 1_000  # in one group


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerGroupSettings:
    """How a group consumes, by RocketMQ's names."""

    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = CLUSTERING
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"


@dataclass(slots=True, kw_only=True)
class ConsumerGroup:
    """One that is connected. For reading; ConsumerGroups writes it."""

    name: str
    settings: ConsumerGroupSettings
    subscriptions: dict[str, Subscription] = field(default_factory=dict)  # by topic
    fingerprint: int = 0  # of the heartbeat that brought the subscriptions; 0: it had none

    @property
    def is_broadcasting(self) -> bool:
        return self.settings.message_model == BROADCASTING


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatResult:
    has_changed: bool  # tell every member
    needs_subscriptions: bool  # the next heartbeat must bring them (IS_SUB_CHANGE)


class ConsumerGroups(Generic[C]):
    def __init__(
        self, members: MemberTable[C] | None = None, *, subscriptions_max: int = SUBSCRIPTIONS_MAX
    ) -> None:
        self._members: MemberTable[C] = MemberTable() if members is None else members
        self._subscriptions_max = subscriptions_max
        self._groups: dict[str, ConsumerGroup] = {}

    def heartbeat(
        self,
        name: str,
        client: GroupClient[C],
        *,
        settings: ConsumerGroupSettings,
        subscriptions: Sequence[Subscription],
        fingerprint: int = 0,
        without_sub: bool = False,
        now_ms: int,
    ) -> HeartbeatResult:
        """Raises TableFull, and then nothing has changed."""
        if len(subscriptions) > self._subscriptions_max:
            raise TableFull(f"{len(subscriptions)} topics, limit {self._subscriptions_max}")
        is_new = self._members.join(name, client, now_ms=now_ms)
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = ConsumerGroup(name=name, settings=settings)
        group.settings = settings
        wants = fingerprint == 0 or fingerprint != group.fingerprint
        if fingerprint and without_sub:
            return HeartbeatResult(has_changed=is_new, needs_subscriptions=wants)
        group.fingerprint = fingerprint
        topics_changed = _update_subscriptions(group.subscriptions, subscriptions)
        return HeartbeatResult(has_changed=is_new or topics_changed, needs_subscriptions=wants)

    def unregister(self, name: str, client_id: str, channel: C) -> bool:
        """Whether a member left."""
        member = self._members.leave(name, client_id, channel)
        return bool(self._remove_empty_groups([] if member is None else [member]))

    def channel_closed(self, channel: C) -> list[Member[C]]:
        """The members that are gone; their groups have changed."""
        return self._remove_empty_groups(self._members.channel_closed(channel))

    def expire(self, now_ms: int) -> list[Member[C]]:
        """The members that are gone; their groups have changed."""
        return self._remove_empty_groups(self._members.expire(now_ms))

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

    def members(self, name: str) -> list[Member[C]]:
        return self._members.members_of(name)

    def member_ids(self, name: str) -> list[str]:
        return [member.client.client_id for member in self._members.members_of(name)]

    def channel_of(self, name: str, client_id: str) -> C | None:
        member = self._members.find(name, client_id)
        return None if member is None else member.client.channel

    def channels_to_notify(self, name: str) -> list[C]:
        """Whom to tell of a change. In a broadcasting group there is nothing to share out."""
        group = self._groups.get(name)
        if group is None or group.is_broadcasting:
            return []
        return [member.client.channel for member in self._members.members_of(name)]

    def _remove_empty_groups(self, removed: list[Member[C]]) -> list[Member[C]]:
        for member in removed:
            if member.group not in self._members:
                self._groups.pop(member.group, None)
        return removed


def _update_subscriptions(
    table: dict[str, Subscription], subscriptions: Sequence[Subscription]
) -> bool:
    """Whether a topic came or went."""
    before = set(table)
    for subscription in subscriptions:
        known = table.get(subscription.topic)
        if known is None or subscription.version > known.version:
            table[subscription.topic] = subscription
    for topic in before.difference(subscription.topic for subscription in subscriptions):
        del table[topic]
    return before != set(table)


class ProducerGroups(Generic[C]):
    """Who can be asked about a half of its group, or be handed a reply."""

    def __init__(self, members: MemberTable[C] | None = None) -> None:
        self._members: MemberTable[C] = MemberTable() if members is None else members

    def heartbeat(self, name: str, client: GroupClient[C], *, now_ms: int) -> bool:
        """Whether it is new, or on a new line. Raises TableFull."""
        return self._members.join(name, client, now_ms=now_ms)

    def unregister(self, name: str, client_id: str, channel: C) -> bool:
        return self._members.leave(name, client_id, channel) is not None

    def channel_closed(self, channel: C) -> list[Member[C]]:
        return self._members.channel_closed(channel)

    def expire(self, now_ms: int) -> list[Member[C]]:
        return self._members.expire(now_ms)

    def names(self) -> list[str]:
        return self._members.names()

    def members(self, name: str) -> list[Member[C]]:
        return self._members.members_of(name)

    def next_channel(self, name: str) -> C | None:
        """Another member each time, so that questions are spread over the group."""
        member = self._members.next_member(name)
        return None if member is None else member.client.channel

    def channel_in_group(self, name: str, client_id: str) -> C | None:
        member = self._members.find(name, client_id)
        return None if member is None else member.client.channel

    def channel_of_client(self, client_id: str) -> C | None:
        """In any group: a reply is addressed to a client, not to a group."""
        member = self._members.most_recent_member(client_id)
        return None if member is None else member.client.channel


LOCK_VALID_MS: Final = 60_000
LOCKS_MAX: Final = 100_000

LockedQueue = tuple[str, int]  # topic and queue id


class _Lock(NamedTuple):
    owner: str
    renewed_ms: int

    def is_valid(self, now_ms: int) -> bool:
        return now_ms - self.renewed_ms <= LOCK_VALID_MS


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
