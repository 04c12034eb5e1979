"""Consumer groups against a model: a dict of members and a dict of subscriptions per group."""

from __future__ import annotations

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
EXPIRED_MS = 100

names = st.sampled_from(["g", "h"])
client_ids = st.sampled_from("abcd")
channels = st.sampled_from([FakePeer("1"), FakePeer("2"), FakePeer("3"), FakePeer("4")])
wanted = st.dictionaries(st.sampled_from(["orders", "stock", "mail"]), st.integers(0, 4))


class GroupsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = MemberTable[FakePeer](
            members_max=MEMBERS_MAX, per_channel_max=PER_CHANNEL_MAX, timeout_ms=EXPIRED_MS
        )
        self.groups = ConsumerGroups(self.table)
        self.members: dict[tuple[str, str], tuple[FakePeer, int]] = {}  # channel, last seen
        self.topics: dict[str, dict[str, int]] = {}  # group -> topic -> version
        self.prints: dict[str, int] = {}
        self.now_ms = 0

    @rule(
        name=names,
        client_id=client_ids,
        channel=channels,
        topics=wanted,
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
        has_room = key in self.members or len(self.members) < MEMBERS_MAX
        on_channel = sum(where == channel for where, _ in self.members.values())
        is_refused = is_new and (not has_room or on_channel >= PER_CHANNEL_MAX)
        try:
            joined = self.groups.heartbeat(
                name,
                GroupClient(client_id=client_id, channel=channel),
                settings=ConsumerGroupSettings(),
                subscriptions=[Subscription(topic=t, version=v) for t, v in topics.items()],
                fingerprint=fingerprint,
                without_sub=without_sub,
                now_ms=self.now_ms,
            )
        except TableFull:
            assert is_refused
            return
        assert not is_refused
        self.members[key] = channel, self.now_ms
        before = self.topics.setdefault(name, {})
        fingerprint_before = self.prints.get(name, 0)
        assert joined.needs_subscriptions is (fingerprint == 0 or fingerprint != fingerprint_before)
        if fingerprint and without_sub:
            assert joined.has_changed is is_new
            return
        assert joined.has_changed is (is_new or set(before) != set(topics))
        self.prints[name] = fingerprint
        self.topics[name] = {t: max(v, before.get(t, v)) for t, v in topics.items()}

    @rule(name=names, client_id=client_ids, channel=channels)
    def unregister(self, name: str, client_id: str, channel: FakePeer) -> None:
        key = name, client_id
        is_member = key in self.members and self.members[key][0] == channel
        assert self.groups.unregister(name, client_id, channel) is is_member
        self.depart([key] if is_member else [])

    @rule(channel=channels)
    def close(self, channel: FakePeer) -> None:
        expected = sorted(key for key, (where, _) in self.members.items() if where == channel)
        gone = self.groups.channel_closed(channel)
        assert [(member.group, member.client.client_id) for member in gone] == expected
        self.depart(expected)

    @rule(passes_ms=st.integers(0, 80))
    def wait(self, passes_ms: int) -> None:
        self.now_ms += passes_ms
        expected = sorted(
            key for key, (_, seen) in self.members.items() if self.now_ms - seen > EXPIRED_MS
        )
        gone = self.groups.expire(self.now_ms)
        assert sorted((member.group, member.client.client_id) for member in gone) == expected
        self.depart(expected)

    def depart(self, keys: list[tuple[str, str]]) -> None:
        for key in keys:
            del self.members[key]
            if all(name != key[0] for name, _ in self.members):
                self.topics.pop(key[0], None)
                self.prints.pop(key[0], None)

    @invariant()
    def every_group_is_as_its_heartbeats_said(self) -> None:
        assert sorted(self.groups.names()) == sorted(self.topics)
        for name in ("g", "h"):
            expected = {
                client: channel
                for (group, client), (channel, _) in self.members.items()
                if group == name
            }
            assert sorted(self.groups.member_ids(name)) == sorted(expected)
            assert sorted(map(str, self.groups.channels_to_notify(name))) == sorted(
                map(str, expected.values())
            )
            for client, channel in expected.items():
                assert self.groups.channel_of(name, client) == channel
            group = self.groups.find(name)
            versions = {t: s.version for t, s in group.subscriptions.items()} if group else {}
            assert versions == self.topics.get(name, {})

    def teardown(self) -> None:
        """Check that nothing is left when all members have left."""
        for channel in {channel for channel, _ in self.members.values()}:
            self.groups.channel_closed(channel)
        assert len(self.table) == 0
        assert leftovers(self.table) == {}
        assert leftovers(self.groups) == {}


TestConsumerGroups = pytest.mark.slow(GroupsMachine.TestCase)
