"""Groups: what a heartbeat changes, and which members are notified."""

from __future__ import annotations

import pytest

from escrowmq.consume.members import (
    BROADCASTING,
    MEMBER_TIMEOUT_MS,
    ConsumerGroups,
    ConsumerGroupSettings,
    GroupClient,
    HeartbeatResult,
    MemberTable,
    ProducerGroups,
)
from escrowmq.consume.subscription import Subscription
from escrowmq.errors import TableFull
from tests.support.fake_peers import FakePeer


def topics(*names: str, version: int = 1, expression: str = "*") -> list[Subscription]:
    return [Subscription(topic=name, expression=expression, version=version) for name in names]


def heartbeat(
    groups: ConsumerGroups[FakePeer],
    client_id: str = "a",
    *,
    channel: str = "",
    subscriptions: list[Subscription] | None = None,
    settings: ConsumerGroupSettings | None = None,
    fingerprint: int = 0,
    without_sub: bool = False,
    now_ms: int = 0,
) -> HeartbeatResult[FakePeer]:
    return groups.heartbeat(
        "g",
        GroupClient(client_id=client_id, channel=FakePeer(channel or f"channel-{client_id}")),
        settings=settings or ConsumerGroupSettings(),
        subscriptions=topics("orders") if subscriptions is None else subscriptions,
        fingerprint=fingerprint,
        without_sub=without_sub,
        now_ms=now_ms,
    )


def notified_channels(groups: ConsumerGroups[FakePeer], name: str) -> list[FakePeer]:
    return [channel for channel in groups.channels_to_notify(name) if channel is not None]


def test_the_first_heartbeat_is_a_change_and_the_second_is_not() -> None:
    groups = ConsumerGroups[FakePeer]()
    assert heartbeat(groups).has_changed
    assert not heartbeat(groups).has_changed
    assert groups.member_ids("g") == ["a"]
    assert heartbeat(groups, "b").has_changed
    assert notified_channels(groups, "g") == ["channel-a", "channel-b"]


def test_a_new_channel_of_the_same_client_is_a_change() -> None:
    groups = ConsumerGroups[FakePeer]()
    heartbeat(groups)
    assert heartbeat(groups, channel="other").has_changed
    assert notified_channels(groups, "g") == ["other"]
    assert groups.channel_of("g", "a") == "other"


@pytest.mark.parametrize(
    ("subscriptions", "has_changed", "expressions"),
    [
        (topics("orders", "stock"), False, {"orders": "*", "stock": "*"}),
        (
            topics("orders", "stock", "bills"),
            True,
            {"orders": "*", "stock": "*", "bills": "*"},
        ),
        (topics("orders"), True, {"orders": "*"}),
        ([], True, {}),
        (
            topics("orders", version=2, expression="x") + topics("stock"),
            False,
            {"orders": "x", "stock": "*"},
        ),
        (
            topics("orders", version=1, expression="x") + topics("stock"),
            False,
            {"orders": "*", "stock": "*"},
        ),
        (
            topics("orders", version=0, expression="x") + topics("stock"),
            False,
            {"orders": "*", "stock": "*"},
        ),
    ],
    ids=["same", "added", "removed", "all removed", "newer", "same version", "older"],
)
def test_a_heartbeat_replaces_subscriptions_of_older_versions(
    subscriptions: list[Subscription], has_changed: bool, expressions: dict[str, str]
) -> None:
    groups = ConsumerGroups[FakePeer]()
    heartbeat(groups, subscriptions=topics("orders", "stock"))
    assert heartbeat(groups, subscriptions=subscriptions).has_changed is has_changed
    group = groups.find("g")
    assert group is not None
    assert {
        name: subscription.expression for name, subscription in group.subscriptions.items()
    } == expressions


def test_group_settings_are_those_of_the_last_heartbeat() -> None:
    groups = ConsumerGroups[FakePeer]()
    heartbeat(groups)
    assert not heartbeat(
        groups, settings=ConsumerGroupSettings(message_model=BROADCASTING)
    ).has_changed
    group = groups.find("g")
    assert group is not None
    assert group.is_broadcasting


def test_a_broadcasting_group_is_not_notified() -> None:
    groups = ConsumerGroups[FakePeer]()
    assert heartbeat(groups, settings=ConsumerGroupSettings(message_model=BROADCASTING)).has_changed
    assert notified_channels(groups, "g") == []
    assert notified_channels(groups, "unknown") == []


# --- fingerprints -------------------------------------------------------------------------------


def test_without_a_fingerprint_subscriptions_are_always_needed() -> None:
    groups = ConsumerGroups[FakePeer]()
    assert heartbeat(groups).needs_subscriptions
    assert heartbeat(groups).needs_subscriptions


def test_subscriptions_may_be_omitted_once_their_fingerprint_is_known() -> None:
    groups = ConsumerGroups[FakePeer]()
    assert heartbeat(groups, fingerprint=7).needs_subscriptions
    assert not heartbeat(groups, fingerprint=7).needs_subscriptions
    result = heartbeat(groups, subscriptions=[], fingerprint=7, without_sub=True)
    assert result == HeartbeatResult(has_changed=False, needs_subscriptions=False)
    assert groups.subscription("g", "orders") is not None


def test_subscriptions_of_an_unknown_fingerprint_are_requested_until_they_arrive() -> None:
    groups = ConsumerGroups[FakePeer]()
    for _ in range(2):  # the first response may have been lost
        assert heartbeat(
            groups, subscriptions=[], fingerprint=7, without_sub=True
        ).needs_subscriptions
    assert groups.member_ids("g") == ["a"]
    assert groups.subscription("g", "orders") is None
    assert heartbeat(groups, fingerprint=7).has_changed


def test_a_fingerprint_is_removed_with_its_group() -> None:
    groups = ConsumerGroups[FakePeer]()
    heartbeat(groups, fingerprint=7)
    groups.channel_closed(FakePeer("channel-a"))
    assert heartbeat(groups, subscriptions=[], fingerprint=7, without_sub=True).needs_subscriptions


def test_another_member_replaces_the_fingerprint() -> None:
    groups = ConsumerGroups[FakePeer]()
    heartbeat(groups, "a", fingerprint=7)
    heartbeat(groups, "b", fingerprint=0)
    assert heartbeat(
        groups, "a", subscriptions=[], fingerprint=7, without_sub=True
    ).needs_subscriptions


def test_without_a_fingerprint_omitted_subscriptions_are_removed() -> None:
    groups = ConsumerGroups[FakePeer]()
    heartbeat(groups)
    assert heartbeat(groups, subscriptions=[], without_sub=True).has_changed
    assert groups.subscription("g", "orders") is None


# --- leaving --------------------------------------------------------------------------------------


def test_unregistering_works_only_on_the_channel_of_the_member() -> None:
    groups = ConsumerGroups[FakePeer]()
    heartbeat(groups)
    heartbeat(groups, "b")
    assert not groups.unregister("g", "a", FakePeer("another channel"))
    assert not groups.unregister("h", "a", FakePeer("channel-a"))
    assert groups.unregister("g", "a", FakePeer("channel-a"))
    assert not groups.unregister("g", "a", FakePeer("channel-a"))
    assert notified_channels(groups, "g") == ["channel-b"]


def test_a_group_ends_with_its_last_member() -> None:
    groups = ConsumerGroups[FakePeer]()
    heartbeat(groups)
    heartbeat(groups, "b")
    assert [member.group for member in groups.channel_closed(FakePeer("channel-a"))] == ["g"]
    assert groups.find("g") is not None
    assert groups.unregister("g", "b", FakePeer("channel-b"))
    assert groups.find("g") is None
    assert groups.names() == []
    assert groups.member_ids("g") == []


def test_a_group_without_heartbeats_expires() -> None:
    groups = ConsumerGroups[FakePeer]()
    heartbeat(groups)
    heartbeat(groups, "b", now_ms=MEMBER_TIMEOUT_MS)
    assert [member.client.client_id for member in groups.expire(MEMBER_TIMEOUT_MS + 1)] == ["a"]
    assert groups.member_ids("g") == ["b"]
    [expired] = groups.expire(3 * MEMBER_TIMEOUT_MS)
    assert expired.client.channel == "channel-b"
    assert groups.find("g") is None


def test_the_subscribers_of_a_topic_are_listed() -> None:
    groups = ConsumerGroups[FakePeer]()
    heartbeat(groups)
    assert groups.subscribers("orders") == ["g"]
    assert groups.subscribers("stock") == []
    assert [member.last_heartbeat_ms for member in groups.members("g")] == [0]


def test_a_full_table_changes_nothing() -> None:
    groups = ConsumerGroups(MemberTable[FakePeer](members_max=1), subscriptions_max=2)
    with pytest.raises(TableFull):
        heartbeat(groups, subscriptions=topics("a", "b", "c"))
    assert groups.names() == []
    heartbeat(groups)
    with pytest.raises(TableFull):
        heartbeat(groups, "b", subscriptions=topics("stock"))
    assert groups.member_ids("g") == ["a"]
    assert groups.subscribers("orders") == ["g"]


# --- producers ----------------------------------------------------------------------------------


def two_producers() -> ProducerGroups[FakePeer]:
    groups = ProducerGroups[FakePeer]()
    for client_id in ("a", "b"):
        client = GroupClient(client_id=client_id, channel=FakePeer(f"channel-{client_id}"))
        assert groups.heartbeat("p", client, now_ms=0)
        assert not groups.heartbeat("p", client, now_ms=0)
    return groups


def test_producers_are_returned_in_turn() -> None:
    groups = two_producers()
    assert [groups.next_channel("p") for _ in range(3)] == ["channel-a", "channel-b", "channel-a"]
    assert groups.unregister("p", "b", FakePeer("channel-b"))
    assert [groups.next_channel("p") for _ in range(2)] == ["channel-a", "channel-a"]
    [member] = groups.channel_closed(FakePeer("channel-a"))
    assert member.client.client_id == "a"
    assert groups.next_channel("p") is None
    assert groups.names() == []


def test_a_reply_finds_its_client_in_any_group() -> None:
    groups = two_producers()
    assert groups.channel_of_client("b") == "channel-b"
    assert groups.channel_in_group("p", "b") == "channel-b"
    assert groups.channel_in_group("q", "b") is None
    assert groups.channel_of_client("c") is None
    assert len(groups.expire(MEMBER_TIMEOUT_MS + 1)) == 2
    assert groups.channel_of_client("b") is None
    assert groups.members("p") == []


@pytest.mark.parametrize(
    ("first", "second", "disputed"),
    [
        (topics("orders"), topics("orders"), ()),
        (topics("orders"), topics("orders", version=2), ()),
        (topics("orders"), topics("stock", version=2), ("orders", "stock")),
        (topics("orders", "stock"), topics("orders"), ("stock",)),
        (topics("orders", expression="a"), topics("orders", expression="b"), ("orders",)),
    ],
)
def test_members_with_different_subscriptions_dispute_topics(
    first: list[Subscription], second: list[Subscription], disputed: tuple[str, ...]
) -> None:
    groups = ConsumerGroups[FakePeer]()
    assert heartbeat(groups, "a", subscriptions=first).disputed_topics == ()
    assert heartbeat(groups, "b", subscriptions=second).disputed_topics == disputed


def test_a_single_member_may_change_its_subscriptions() -> None:
    groups = ConsumerGroups[FakePeer]()
    heartbeat(groups, "a", subscriptions=topics("orders"))
    changed = heartbeat(groups, "a", subscriptions=topics("stock", version=2))
    assert changed.disputed_topics == ()
