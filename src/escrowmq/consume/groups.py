"""Who consumes and who produces: groups as heartbeats describe them.

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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from escrowmq.consume.members import Client, Line, Member, Members
from escrowmq.consume.subscription import Subscription
from escrowmq.errors import TableFull

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
