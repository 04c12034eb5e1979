"""Consumer groups against a model: a dict of members, and a dict of topics for each group."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from escrowmq.consume.members import ConsumerGroups, ConsumerGroupSettings, GroupClient, MemberTable
from escrowmq.consume.subscription import Subscription
from escrowmq.errors import TableFull
from tests.support.fake_peers import FakePeer
from tests.support.leftovers import leftovers

MEMBERS_MAX = 6
PER_CHANNEL_MAX = 3
TIMEOUT_MS = 100

group_names = st.sampled_from(["g", "h"])
client_ids = st.sampled_from("abcd")
channels = st.sampled_from([FakePeer("1"), FakePeer("2"), FakePeer("3"), FakePeer("4")])
topic_versions = st.dictionaries(st.sampled_from(["orders", "stock", "mail"]), st.integers(0, 4))


class GroupsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = MemberTable[FakePeer](
            members_max=MEMBERS_MAX, per_channel_max=PER_CHANNEL_MAX, timeout_ms=TIMEOUT_MS
        )
        self.groups = ConsumerGroups(self.table)
        # (group, client id) -> channel, time of the last heartbeat
        self.members: dict[tuple[str, str], tuple[FakePeer, int]] = {}
        self.topic_versions: dict[str, dict[str, int]] = {}  # group -> topic -> version
        self.fingerprints: dict[str, int] = {}
        self.now_ms = 0

    @rule(
        name=group_names,
        client_id=client_ids,
        channel=channels,
        topics=topic_versions,
        fingerprint=st.integers(0, 2),
        without_sub=st.booleans(),
    )
    def heartbeat(
        self,
        name: str,
        client_id: str,
        channel: FakePeer,
        topics: dict[str, int],
        fingerprint: int,
        without_sub: bool,
    ) -> None:
        key = name, client_id
        is_new = key not in self.members or self.members[key][0] != channel
        has_space = key in self.members or len(self.members) < MEMBERS_MAX
        members_on_channel = sum(
            member_channel == channel for member_channel, _ in self.members.values()
        )
        counts = Counter(str(member_channel) for member_channel, _ in self.members.values())
        # A full table makes room for a channel below the average, at the cost of a greedy one.
        greedy_count = members_on_channel + 2
        makes_room = (
            not has_space
            and members_on_channel * len(counts) < len(self.members)
            and max(counts.values()) >= greedy_count
        )
        is_refused = is_new and (
            not (has_space or makes_room) or members_on_channel >= PER_CHANNEL_MAX
        )
        try:
            result = self.groups.heartbeat(
                name,
                GroupClient(client_id=client_id, channel=channel),
                settings=ConsumerGroupSettings(),
                subscriptions=[
                    Subscription(topic=topic, version=version) for topic, version in topics.items()
                ],
                fingerprint=fingerprint,
                without_sub=without_sub,
                now_ms=self.now_ms,
            )
        except TableFull:
            assert is_refused
            return
        assert not is_refused
        assert (result.evicted is not None) is makes_room
        if result.evicted is not None:
            evicted = result.evicted
            assert counts[str(evicted.client.channel)] >= greedy_count
            self.remove_members([(evicted.group, evicted.client.client_id)])
        self.members[key] = channel, self.now_ms
        old_topics = self.topic_versions.setdefault(name, {})
        old_fingerprint = self.fingerprints.get(name, 0)
        assert result.needs_subscriptions is (fingerprint == 0 or fingerprint != old_fingerprint)
        if fingerprint and without_sub:
            assert result.has_changed is is_new
            return
        assert result.has_changed is (is_new or set(old_topics) != set(topics))
        self.fingerprints[name] = fingerprint
        self.topic_versions[name] = {
            topic: max(version, old_topics.get(topic, version)) for topic, version in topics.items()
        }

    @rule(name=group_names, client_id=client_ids, channel=channels)
    def unregister(self, name: str, client_id: str, channel: FakePeer) -> None:
        key = name, client_id
        is_member = key in self.members and self.members[key][0] == channel
        assert self.groups.unregister(name, client_id, channel) is is_member
        self.remove_members([key] if is_member else [])

    @rule(channel=channels)
    def close(self, channel: FakePeer) -> None:
        expected = sorted(
            key for key, (member_channel, _) in self.members.items() if member_channel == channel
        )
        departed = self.groups.channel_closed(channel)
        assert sorted((member.group, member.client.client_id) for member in departed) == expected
        self.remove_members(expected)

    @rule(elapsed_ms=st.integers(0, 80))
    def wait(self, elapsed_ms: int) -> None:
        self.now_ms += elapsed_ms
        expected = sorted(
            key
            for key, (_, last_seen_ms) in self.members.items()
            if self.now_ms - last_seen_ms > TIMEOUT_MS
        )
        departed = self.groups.expire(self.now_ms)
        assert sorted((member.group, member.client.client_id) for member in departed) == expected
        self.remove_members(expected)

    def remove_members(self, keys: list[tuple[str, str]]) -> None:
        """Remove members from the model. A group without members is removed too."""
        for key in keys:
            del self.members[key]
            if all(name != key[0] for name, _ in self.members):
                self.topic_versions.pop(key[0], None)
                self.fingerprints.pop(key[0], None)

    @invariant()
    def groups_equal_the_model(self) -> None:
        assert sorted(self.groups.names()) == sorted(self.topic_versions)
        for name in ("g", "h"):
            expected = {
                client: channel
                for (group, client), (channel, _) in self.members.items()
                if group == name
            }
            assert sorted(self.groups.member_ids(name)) == sorted(expected)
            channels = filter(None, self.groups.channels_to_notify(name))
            assert sorted(map(str, channels)) == sorted(set(map(str, expected.values())))
            for client, channel in expected.items():
                assert self.groups.channel_of(name, client) == channel
            group = self.groups.find(name)
            versions = {s.topic: s.version for s in group.subscriptions.values()} if group else {}
            assert versions == self.topic_versions.get(name, {})

    def teardown(self) -> None:
        """Check that the tables are empty when all members have left."""
        for channel in {channel for channel, _ in self.members.values()}:
            self.groups.channel_closed(channel)
        assert len(self.table) == 0
        assert leftovers(self.table) == {}
        assert leftovers(self.groups) == {}


TestConsumerGroups = pytest.mark.slow(GroupsMachine.TestCase)
