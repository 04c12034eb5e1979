"""Connected clients: the groups that they belong to, and the queues that they have locked.

    MemberTable      which clients are in which groups, and on which channel each is connected
    ConsumerGroups   consumer groups with their subscriptions, as heartbeats describe them
    ProducerGroups   producer groups: which client can be asked about a half, or receive a reply
    QueueLocks       queues that orderly consumers have locked

A client is a member of a group under its client id, on one channel. When it comes back on a new
channel, the closing of the old channel no longer concerns it. Times may come from any clock, as
long as it is always the same one.

A consumer group has one subscription per topic. Heartbeats change it like this:

    the heartbeat brings                        effect on the group     counts as a change
    a new client, or a new channel of a client  has a new member        yes
    a topic that is not subscribed yet          adds the subscription   yes
    no longer a topic that was subscribed       drops the subscription  yes
    a newer version of a subscription           replaces it             no
    the same or an older version                keeps it                no

After a change every member is notified, and the members rebalance: they share the queues anew.

Newer clients leave their subscriptions out of a heartbeat if nothing has changed, and send a
fingerprint of them instead (`without_sub`). A fingerprint is stored with the subscriptions that it
came with and is removed with them. So a client whose subscriptions are unknown here is always asked
to send them again, whatever was lost in between.

Any client can claim any number of names. So names have a maximum length, everything that is kept is
counted in `ClientMemory` for the channel that brought it, and a full table makes room for a channel
with few members at the cost of the channel that has most.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Generic, NamedTuple, TypeVar

from escrowmq.client_memory import ClientMemory, MemoryUse, text_bytes
from escrowmq.consume.subscription import Subscription
from escrowmq.errors import TableFull
from escrowmq.fair_shares import FairShares
from escrowmq.peer import DISCONNECTED, Peer

MEMBER_TIMEOUT_MS: Final = 120_000  # without a heartbeat; clients send one every 30 s
MEMBERS_MAX: Final = 100_000
MEMBERS_PER_CHANNEL_MAX: Final = 1_000
# What a member takes without its names, and a consumer group without its subscriptions. Measured on
# CPython 3.11 by tests/unit/test_memory_estimates.py: 900 bytes for one of many members of a
# connection, 2,150 for the only one; a group takes 650.
MEMBER_BYTES: Final = 2_400
GROUP_BYTES: Final = 800

# The owner's type of channel. The tables hand channels out again as the type they were given.
C = TypeVar("C", bound=Peer)


# --- members of groups ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupClient(Generic[C]):
    """A client, as its heartbeat describes it."""

    client_id: str
    channel: C
    language: str = "JAVA"
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member(Generic[C]):
    """A client in one group."""

    group: str
    client: GroupClient[C]
    last_heartbeat_ms: int

    @property
    def retained_bytes(self) -> int:
        # Twice, because a renewed member brings new copies, and the keys of the tables are the old
        # ones.
        return MEMBER_BYTES + 2 * (text_bytes(self.group) + text_bytes(self.client.client_id))


class MemberTable(Generic[C]):
    """The members of all groups. A group without members is not stored."""

    def __init__(
        self,
        *,
        members_max: int = MEMBERS_MAX,
        per_channel_max: int = MEMBERS_PER_CHANNEL_MAX,
        timeout_ms: int = MEMBER_TIMEOUT_MS,
        memory: ClientMemory | None = None,
    ) -> None:
        self._memory = ClientMemory() if memory is None else memory
        self._members_max = members_max
        self._per_channel_max = per_channel_max
        self._timeout_ms = timeout_ms
        self._count = 0
        # The same members three times, because each is looked up on a path that is called often.
        self._groups: dict[str, OrderedDict[str, Member[C]]] = {}  # group -> client id -> member
        # channel -> group and client id; ordered, so that a simulation can be repeated
        self._channels: dict[C, dict[tuple[str, str], None]] = {}
        self._clients: dict[str, dict[str, Member[C]]] = {}  # client id -> group -> member
        self._shares: FairShares[C] = FairShares()  # members of each channel

    def __len__(self) -> int:
        return self._count

    def __contains__(self, group: str) -> bool:
        return group in self._groups

    def join(self, group: str, client: GroupClient[C], *, now_ms: int) -> bool:
        """Add a client to a group, or renew its membership.

        Return whether the client is new in the group or came back on another channel. Raises
        TableFull; the table is unchanged then.
        """
        previous = self.find(group, client.client_id)
        is_new = previous is None or previous.client.channel != client.channel
        member = Member(group=group, client=client, last_heartbeat_ms=now_ms)
        if is_new:
            self._check_limits(client.channel, is_new_member=previous is None)
            self._memory.reserve(client.channel, MemoryUse.MEMBERS, member.retained_bytes)
        if is_new and previous is not None:
            self._unlink_channel(previous)
        self._count += previous is None
        self._groups.setdefault(group, OrderedDict())[client.client_id] = member
        self._clients.setdefault(client.client_id, {})[group] = member
        self._channels.setdefault(client.channel, {})[group, client.client_id] = None
        if is_new:
            self._shares.add(client.channel, 1)
        return is_new

    def make_room(self, channel: C) -> Member[C] | None:
        """Remove and return a member of a greedy channel, so that this channel can have one.

        Return None if there is room, or if this channel and its origin have their share.
        """
        if self._count < self._members_max:
            return None
        greedy = self._shares.find_greedy(channel)
        if greedy is None:
            return None
        group, client_id = next(iter(self._channels[greedy]))
        member = self._groups[group][client_id]
        self._remove(member)
        return member

    def leave(self, group: str, client_id: str, channel: C) -> Member[C] | None:
        """Remove and return a member.

        Return None if the client is no member on this channel: a late goodbye on an old channel
        does not count once the client has reconnected.
        """
        member = self.find(group, client_id)
        if member is None or member.client.channel != channel:
            return None
        self._remove(member)
        return member

    def channel_closed(self, channel: C, *, count_max: int | None = None) -> list[Member[C]]:
        """Remove and return the members on a closed channel.

        With `count_max`, remove no more than so many; call it again while there are any.
        """
        keys = list(islice(self._channels.get(channel, ()), count_max))
        removed = [self._groups[group][client_id] for group, client_id in keys]
        for member in removed:
            self._remove(member)
        return removed

    def expire(self, now_ms: int) -> list[Member[C]]:
        """Remove and return the members whose last heartbeat is too old."""
        return [member for member in self.release_expired(now_ms) if member is not None]

    def release_expired(self, now_ms: int) -> Iterator[Member[C] | None]:
        """Remove and yield the members whose last heartbeat is too old; yield None for others.

        The caller may pause after each.
        """
        oldest_ms = now_ms - self._timeout_ms
        for group in list(self._groups):
            members = self.members_of(group)
            members.reverse()
            while members:
                member = members.pop()  # so that it is freed now, and not with all others
                # It may have left, or come back, while the caller paused.
                is_current = self.find(group, member.client.client_id) is member
                if is_current and member.last_heartbeat_ms < oldest_ms:
                    self._remove(member)
                    yield member
                else:
                    yield None

    def find(self, group: str, client_id: str) -> Member[C] | None:
        members = self._groups.get(group)
        return None if members is None else members.get(client_id)

    def first_member(self, group: str) -> Member[C]:
        """Return one member of a group that has members."""
        return next(iter(self._groups[group].values()))

    def members_of(self, group: str) -> list[Member[C]]:
        return list(self._groups.get(group, {}).values())

    def has_others(self, group: str, client_id: str) -> bool:
        """Return whether a group has members beside this client."""
        members = self._groups.get(group)
        return members is not None and len(members) > (client_id in members)

    def names(self) -> list[str]:
        return list(self._groups)

    def next_member(self, group: str) -> Member[C] | None:
        """Return the members of a group in turn, one per call; None if there is none."""
        members = self._groups.get(group)
        if members is None:
            return None
        client_id, member = next(iter(members.items()))
        members.move_to_end(client_id)
        return member

    def most_recent_member(self, client_id: str) -> Member[C] | None:
        """Return the membership of a client with the latest heartbeat, in any group."""
        memberships = self._clients.get(client_id, {}).values()
        return max(memberships, key=lambda member: member.last_heartbeat_ms, default=None)

    def _check_limits(self, channel: C, *, is_new_member: bool) -> None:
        if is_new_member and self._count >= self._members_max:
            raise TableFull(f"too many members of groups: the limit is {self._members_max}")
        if len(self._channels.get(channel, ())) >= self._per_channel_max:
            raise TableFull(
                f"too many members of groups on one connection: the limit is "
                f"{self._per_channel_max}"
            )

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
        channel = member.client.channel
        self._memory.release(channel, MemoryUse.MEMBERS, member.retained_bytes)
        self._shares.add(channel, -1)
        keys = self._channels[channel]
        del keys[member.group, member.client.client_id]
        if not keys:
            del self._channels[channel]


# --- consumer groups -----------------------------------------------------------------------------

BROADCASTING: Final = "BROADCASTING"
CLUSTERING: Final = "CLUSTERING"
SUBSCRIPTIONS_MAX: Final = 1_000  # in one group


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerGroupSettings:
    """How a group consumes. Names and values are RocketMQ's."""

    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = CLUSTERING
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"

    @property
    def retained_bytes(self) -> int:
        texts = (self.consume_type, self.message_model, self.consume_from_where)
        return sum(map(text_bytes, texts))


@dataclass(slots=True, kw_only=True)
class ConsumerGroup:
    """A connected consumer group. Only ConsumerGroups changes it."""

    name: str
    settings: ConsumerGroupSettings
    subscriptions: dict[str, Subscription] = field(default_factory=dict)  # by topic
    fingerprint: int = 0  # of the heartbeat with the subscriptions; 0 if it had none
    subscription_bytes: int = 0
    subscription_owner: Peer | None = None  # the channel for which these bytes are counted

    @property
    def is_broadcasting(self) -> bool:
        return self.settings.message_model == BROADCASTING


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatResult(Generic[C]):
    has_changed: bool  # notify every member
    needs_subscriptions: bool  # the next heartbeat must contain them (IS_SUB_CHANGE)
    evicted: Member[C] | None = None  # lost its place to make room; its group has changed
    # Topics that other members of the group do not subscribe to, or with another filter, or that
    # only others subscribe to. Messages of these are not delivered to every member that wants them.
    disputed_topics: tuple[str, ...] = ()


class ConsumerGroups(Generic[C]):
    """The connected consumer groups."""

    def __init__(
        self,
        members: MemberTable[C] | None = None,
        *,
        subscriptions_max: int = SUBSCRIPTIONS_MAX,
        memory: ClientMemory | None = None,
    ) -> None:
        self._memory = ClientMemory() if memory is None else memory
        self._members: MemberTable[C] = (
            MemberTable(memory=self._memory) if members is None else members
        )
        self._subscriptions_max = subscriptions_max
        self._groups: dict[str, ConsumerGroup] = {}
        self.change_count = 0  # of changes that concern what a group may pull

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
    ) -> HeartbeatResult[C]:
        """Apply a heartbeat to its group. Raises TableFull; nothing has changed then."""
        if len(subscriptions) > self._subscriptions_max:
            raise TableFull(
                f"the heartbeat has {len(subscriptions)} subscriptions, "
                f"the limit is {self._subscriptions_max}"
            )
        evicted: Member[C] | None = None
        if self._members.find(name, client.client_id) is None:
            evicted = self._members.make_room(client.channel)
            self._remove_empty_groups([] if evicted is None else [evicted])
        is_new = self._members.join(name, client, now_ms=now_ms)
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = ConsumerGroup(name=name, settings=settings)
            self.change_count += 1
        self.change_count += group.settings != settings
        group.settings = settings
        needs_subscriptions = fingerprint == 0 or fingerprint != group.fingerprint
        has_changed = is_new
        brings_subscriptions = not (fingerprint and without_sub)
        try:
            if brings_subscriptions or group.subscription_owner is None:
                self._count_subscriptions(group, client.channel, subscriptions)
        except TableFull:
            if is_new:
                self.unregister(name, client.client_id, client.channel)
            raise
        disputed_topics: tuple[str, ...] = ()
        if brings_subscriptions:
            if self._members.has_others(name, client.client_id):
                disputed_topics = _disputed_topics(group, subscriptions)
            group.fingerprint = fingerprint
            has_changed = self._update_subscriptions(group, subscriptions) or is_new
        return HeartbeatResult(
            has_changed=has_changed,
            needs_subscriptions=needs_subscriptions,
            evicted=evicted,
            disputed_topics=disputed_topics,
        )

    def _update_subscriptions(
        self, group: ConsumerGroup, subscriptions: Sequence[Subscription]
    ) -> bool:
        """Apply the subscriptions of a heartbeat. Return whether a topic was added or dropped."""
        table = group.subscriptions
        previous_topics = set(table)
        for subscription in subscriptions:
            current = table.get(subscription.topic)
            if current is None or subscription.version > current.version:
                table[subscription.topic] = subscription
                self.change_count += 1
        for topic in previous_topics.difference(
            subscription.topic for subscription in subscriptions
        ):
            del table[topic]
            self.change_count += 1
        return previous_topics != set(table)

    def _count_subscriptions(
        self, group: ConsumerGroup, channel: C, subscriptions: Sequence[Subscription]
    ) -> None:
        """Count the subscriptions of a group for the channel that brings them. Raise TableFull."""
        count = GROUP_BYTES + group.settings.retained_bytes
        count += sum(subscription.retained_bytes for subscription in subscriptions)
        if count == group.subscription_bytes and channel is group.subscription_owner:
            return
        self._release_subscriptions(group)
        self._memory.reserve(channel, MemoryUse.SUBSCRIPTIONS, count)
        group.subscription_bytes, group.subscription_owner = count, channel

    def _release_subscriptions(self, group: ConsumerGroup) -> None:
        if group.subscription_owner is not None:
            self._memory.release(
                group.subscription_owner, MemoryUse.SUBSCRIPTIONS, group.subscription_bytes
            )
            group.subscription_bytes, group.subscription_owner = 0, None

    def unregister(self, name: str, client_id: str, channel: C) -> bool:
        """Remove a member that says goodbye. Return whether there was such a member."""
        member = self._members.leave(name, client_id, channel)
        return bool(self._remove_empty_groups([] if member is None else [member]))

    def channel_closed(self, channel: C, *, count_max: int | None = None) -> list[Member[C]]:
        """Remove and return the members on a closed channel. Their groups have changed.

        With `count_max`, remove no more than so many; call it again while there are any.
        """
        return self._remove_empty_groups(self._members.channel_closed(channel, count_max=count_max))

    def expire(self, now_ms: int) -> list[Member[C]]:
        """Remove and return members without heartbeats. Their groups have changed."""
        return [member for member in self.release_expired(now_ms) if member is not None]

    def release_expired(self, now_ms: int) -> Iterator[Member[C] | None]:
        """Remove and yield members without heartbeats, one by one; yield None for others."""
        for member in self._members.release_expired(now_ms):
            if member is not None:
                self._remove_empty_groups([member])
            yield member

    def find(self, name: str) -> ConsumerGroup | None:
        """Return the group; None if no member of it is connected."""
        return self._groups.get(name)

    def subscription(self, name: str, topic: str) -> Subscription | None:
        group = self._groups.get(name)
        return None if group is None else group.subscriptions.get(topic)

    def names(self) -> list[str]:
        return list(self._groups)

    def subscribers(self, topic: str) -> list[str]:
        """Return the names of the groups with a subscription to a topic."""
        return [name for name, group in self._groups.items() if topic in group.subscriptions]

    def members(self, name: str) -> list[Member[C]]:
        return self._members.members_of(name)

    def member_ids(self, name: str) -> list[str]:
        return [member.client.client_id for member in self._members.members_of(name)]

    def channel_of(self, name: str, client_id: str) -> C | None:
        member = self._members.find(name, client_id)
        return None if member is None else member.client.channel

    def channels_to_notify(self, name: str) -> Iterator[C | None]:
        """Yield the channels to notify of a change, each once; None for any other member.

        A broadcasting group has none: each of its members reads every queue, so there is nothing to
        rebalance. The caller may pause after each.
        """
        group = self._groups.get(name)
        if group is None or group.is_broadcasting:
            return
        seen: set[C] = set()  # a channel may have many members of the group
        for member in self._members.members_of(name):
            channel = member.client.channel
            yield None if channel in seen else channel
            seen.add(channel)

    def _remove_empty_groups(self, removed: list[Member[C]]) -> list[Member[C]]:
        for member in removed:
            group = self._groups.get(member.group)
            if group is None:
                continue
            if member.group not in self._members:
                self._release_subscriptions(group)
                del self._groups[member.group]
                self.change_count += 1
            elif member.client.channel is group.subscription_owner:
                self._pass_subscriptions_on(group)
        return removed

    def _pass_subscriptions_on(self, group: ConsumerGroup) -> None:
        """Count the subscriptions for another member: the one that brought them has left."""
        count = group.subscription_bytes
        self._release_subscriptions(group)
        owner = self._members.first_member(group.name).client.channel
        self._memory.add(owner, MemoryUse.SUBSCRIPTIONS, count)
        group.subscription_bytes, group.subscription_owner = count, owner


# --- producer groups -----------------------------------------------------------------------------


def _disputed_topics(
    group: ConsumerGroup, subscriptions: Sequence[Subscription]
) -> tuple[str, ...]:
    """Return the topics for which a heartbeat and the group have different subscriptions."""
    filters = {subscription.topic: subscription.expression for subscription in subscriptions}
    current = {topic: known.expression for topic, known in group.subscriptions.items()}
    return tuple(
        sorted(
            topic
            for topic in {*filters, *current}
            if current and filters.get(topic) != current.get(topic)
        )
    )


class ProducerGroups(Generic[C]):
    """The connected producer groups: who can be checked about a half, or receive a reply."""

    def __init__(
        self, members: MemberTable[C] | None = None, *, memory: ClientMemory | None = None
    ) -> None:
        self._members: MemberTable[C] = MemberTable(memory=memory) if members is None else members

    def heartbeat(self, name: str, client: GroupClient[C], *, now_ms: int) -> bool:
        """Add or renew a member. Return whether it or its channel is new. Raises TableFull."""
        if self._members.find(name, client.client_id) is None:
            self._members.make_room(client.channel)
        return self._members.join(name, client, now_ms=now_ms)

    def unregister(self, name: str, client_id: str, channel: C) -> bool:
        """Remove a member that says goodbye. Return whether there was such a member."""
        return self._members.leave(name, client_id, channel) is not None

    def channel_closed(self, channel: C, *, count_max: int | None = None) -> list[Member[C]]:
        return self._members.channel_closed(channel, count_max=count_max)

    def expire(self, now_ms: int) -> list[Member[C]]:
        return self._members.expire(now_ms)

    def release_expired(self, now_ms: int) -> Iterator[Member[C] | None]:
        """Remove and yield members without heartbeats, one by one; yield None for others."""
        return self._members.release_expired(now_ms)

    def names(self) -> list[str]:
        return self._members.names()

    def members(self, name: str) -> list[Member[C]]:
        return self._members.members_of(name)

    def next_channel(self, name: str) -> C | None:
        """Return the channels of a group in turn, so that checks are spread over its members."""
        member = self._members.next_member(name)
        return None if member is None else member.client.channel

    def channel_in_group(self, name: str, client_id: str) -> C | None:
        member = self._members.find(name, client_id)
        return None if member is None else member.client.channel

    def channel_of_client(self, client_id: str) -> C | None:
        """Return the channel of a client in any group: a reply names a client, not a group."""
        member = self._members.most_recent_member(client_id)
        return None if member is None else member.client.channel


# --- queue locks ---------------------------------------------------------------------------------

LOCK_VALID_MS: Final = 60_000
# While many locks are held, those that are no longer valid are searched so often at most.
_EXPIRE_INTERVAL_MS: Final = 1_000
LOCKS_MAX: Final = 100_000
# Half of the table is for channels that have fewer locks than this, and half of that for origins
# that have fewer.
FEW_LOCKS: Final = 256
# What a lock takes without its names. Measured on CPython 3.11 by
# tests/unit/test_memory_estimates.py: 500 bytes for one of many locks of a connection, 1,300 for
# the only one.
LOCK_BYTES: Final = 1_400

LockedQueue = tuple[str, int]  # topic and queue id


class _LockingChannel:
    """The locks that were requested over one channel."""

    __slots__ = ("count", "lock_bytes", "origin", "peer")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer  # DISCONNECTED after the channel has closed
        self.origin = peer.origin  # stays the same
        self.count = 0
        self.lock_bytes = 0


class _Lock(NamedTuple):
    owner: str  # client id
    renewed_ms: int
    channel: _LockingChannel
    retained_bytes: int

    def is_valid(self, now_ms: int) -> bool:
        return now_ms - self.renewed_ms <= LOCK_VALID_MS


class QueueLocks:
    """Locks of orderly consumers: one member of a group reads a queue, the others wait.

    A lock is valid for 60 s after its owner last requested it; owners repeat the request every
    20 s. A channel that closes releases no lock: the client may still be processing messages of the
    queue and considers itself the owner until the lock expires.

    Callers check that the queue exists and that names are not too long; this bounds a lock. When
    half of the table is in use, only channels with few locks get new ones, and in the last quarter
    only channels of origins with few locks. So the channels of one origin cannot take all of them,
    also if they close and come back: a lock counts for its origin until it is released. Its bytes
    are counted for its channel, and after that has closed for DISCONNECTED.
    """

    def __init__(self, *, locks_max: int = LOCKS_MAX, memory: ClientMemory | None = None) -> None:
        self._memory = ClientMemory() if memory is None else memory
        self._locks_max = locks_max
        self._count = 0
        self._groups: dict[str, dict[LockedQueue, _Lock]] = {}
        self._channels: dict[Peer, _LockingChannel] = {}
        self._origin_counts: Counter[str] = Counter()
        self._next_expiry_ms = 0

    def __len__(self) -> int:
        return self._count

    def lock(
        self,
        group: str,
        client_id: str,
        queues: Iterable[LockedQueue],
        *,
        now_ms: int,
        channel: Peer = DISCONNECTED,
    ) -> list[LockedQueue]:
        """Lock or renew queues. Return those that the client owns now.

        Queues that another client owns are left out, and new locks beyond the limits are too.
        """
        if self._count >= self._locks_max // 2 and now_ms >= self._next_expiry_ms:
            self._next_expiry_ms = now_ms + _EXPIRE_INTERVAL_MS
            self.expire(now_ms)
        return [
            queue
            for queue in dict.fromkeys(queues)
            if self._lock_one(group, client_id, queue, now_ms, channel)
        ]

    def _lock_one(
        self, group: str, client_id: str, queue: LockedQueue, now_ms: int, channel: Peer
    ) -> bool:
        held = self._groups.get(group, {}).get(queue)
        count = LOCK_BYTES + text_bytes(group) + text_bytes(client_id) + text_bytes(queue[0])
        if held is None and not self._has_capacity(channel):
            return False
        if held is not None and held.owner != client_id and held.is_valid(now_ms):
            return False
        if held is not None and held.owner == client_id:
            # It is there already and must not be lost, so this is never refused.
            self._memory.add(channel, MemoryUse.QUEUE_LOCKS, count)
        else:
            try:
                self._memory.reserve(channel, MemoryUse.QUEUE_LOCKS, count)
            except TableFull:
                return False
        if held is not None:
            self._remove(group, queue)
        locking_channel = self._channels.get(channel)
        if locking_channel is None:
            locking_channel = self._channels[channel] = _LockingChannel(channel)
        self._add(group, queue, _Lock(client_id, now_ms, locking_channel, count))
        return True

    def _has_capacity(self, channel: Peer) -> bool:
        if self._count < self._locks_max // 2:
            return True
        if self._count >= self._locks_max:
            return False
        if self._origin_counts[channel.origin] < FEW_LOCKS:
            return True
        locking_channel = self._channels.get(channel)
        has_few = locking_channel is None or locking_channel.count < FEW_LOCKS
        return has_few and self._count < self._locks_max * 3 // 4

    def unlock(self, group: str, client_id: str, queues: Iterable[LockedQueue]) -> None:
        """Release queues. Locks of other clients stay."""
        for queue in queues:
            held = self._groups.get(group, {}).get(queue)
            if held is not None and held.owner == client_id:
                self._remove(group, queue)

    def channel_closed(self, channel: Peer) -> None:
        """Count the locks of a closed channel for nobody; they stay until they expire."""
        locking_channel = self._channels.pop(channel, None)
        if locking_channel is None or channel is DISCONNECTED:
            return
        # The locks do not keep the channel either, which has many more bytes than they have.
        locking_channel.peer = DISCONNECTED
        self._memory.release(channel, MemoryUse.QUEUE_LOCKS, locking_channel.lock_bytes)
        self._memory.add(DISCONNECTED, MemoryUse.QUEUE_LOCKS, locking_channel.lock_bytes)

    def is_locked_by(self, group: str, client_id: str, queue: LockedQueue, *, now_ms: int) -> bool:
        held = self._groups.get(group, {}).get(queue)
        return held is not None and held.owner == client_id and held.is_valid(now_ms)

    def group_has_locks(self, group: str, *, now_ms: int) -> bool:
        """Return whether a group holds a valid lock, which means that it consumes in order."""
        return any(held.is_valid(now_ms) for held in self._groups.get(group, {}).values())

    def expire(self, now_ms: int) -> int:
        """Remove locks that are no longer valid. Return how many."""
        expired = [
            (group, queue)
            for group, locks in self._groups.items()
            for queue, held in locks.items()
            if not held.is_valid(now_ms)
        ]
        for group, queue in expired:
            self._remove(group, queue)
        return len(expired)

    def _add(self, group: str, queue: LockedQueue, lock: _Lock) -> None:
        self._count += 1
        lock.channel.count += 1
        self._origin_counts[lock.channel.origin] += 1
        lock.channel.lock_bytes += lock.retained_bytes
        self._groups.setdefault(group, {})[queue] = lock

    def _remove(self, group: str, queue: LockedQueue) -> None:
        self._count -= 1
        lock = self._groups[group].pop(queue)
        if not self._groups[group]:
            del self._groups[group]
        channel = lock.channel
        channel.count -= 1
        self._origin_counts[channel.origin] -= 1
        if not self._origin_counts[channel.origin]:
            del self._origin_counts[channel.origin]
        channel.lock_bytes -= lock.retained_bytes
        self._memory.release(channel.peer, MemoryUse.QUEUE_LOCKS, lock.retained_bytes)
        if not channel.count and self._channels.get(channel.peer) is channel:
            del self._channels[channel.peer]
