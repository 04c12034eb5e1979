"""The table of members: joining, leaving, channels and limits."""

from __future__ import annotations

import pytest

from escrowmq.consume.members import MEMBER_TIMEOUT_MS, GroupClient, MemberTable
from escrowmq.errors import TableFull
from tests.support.fake_peers import FakePeer
from tests.support.leftovers import leftovers


def client(client_id: str, channel: str = "channel-1") -> GroupClient[FakePeer]:
    return GroupClient(client_id=client_id, channel=FakePeer(channel))


def ids(members: MemberTable[FakePeer], group: str) -> list[str]:
    return [member.client.client_id for member in members.members_of(group)]


def test_only_the_first_heartbeat_of_a_client_is_a_join() -> None:
    members = MemberTable[FakePeer]()
    assert members.join("g", client("a"), now_ms=0)
    assert not members.join("g", client("a"), now_ms=5)
    member = members.find("g", "a")
    assert member is not None
    assert member.last_heartbeat_ms == 5
    assert len(members) == 1


def test_a_client_that_reconnects_joins_again_and_its_old_channel_is_ignored() -> None:
    members = MemberTable[FakePeer]()
    members.join("g", client("a", "old"), now_ms=0)
    assert members.join("g", client("a", "new"), now_ms=1)
    assert members.channel_closed(FakePeer("old")) == []
    assert members.leave("g", "a", FakePeer("old")) is None
    assert ids(members, "g") == ["a"]
    assert [member.client.channel for member in members.channel_closed(FakePeer("new"))] == ["new"]
    assert "g" not in members
    assert len(members) == 0


def test_a_closed_channel_ends_all_its_memberships() -> None:
    members = MemberTable[FakePeer]()
    members.join("g", client("a"), now_ms=0)
    members.join("h", client("a"), now_ms=0)
    members.join("h", client("b"), now_ms=0)
    members.join("h", client("c", "channel-2"), now_ms=0)
    removed = members.channel_closed(FakePeer("channel-1"))
    assert [(member.group, member.client.client_id) for member in removed] == [
        ("g", "a"),
        ("h", "a"),
        ("h", "b"),
    ]
    assert members.names() == ["h"]
    assert members.channel_closed(FakePeer("channel-1")) == []


@pytest.mark.parametrize(
    ("idle_ms", "is_expired"), [(MEMBER_TIMEOUT_MS, False), (MEMBER_TIMEOUT_MS + 1, True)]
)
def test_a_membership_without_heartbeats_expires(idle_ms: int, is_expired: bool) -> None:
    members = MemberTable[FakePeer]()
    members.join("g", client("a"), now_ms=1_000)
    assert bool(members.expire(1_000 + idle_ms)) is is_expired
    assert ("g" in members) is not is_expired


def test_members_take_turns() -> None:
    members = MemberTable[FakePeer]()
    for client_id in "abc":
        members.join("g", client(client_id), now_ms=0)
    turns = [members.next_member("g") for _ in range(6)]
    assert [turn and turn.client.client_id for turn in turns] == list("abcabc")
    members.leave("g", "b", FakePeer("channel-1"))
    turns = [members.next_member("g") for _ in range(4)]
    assert [turn and turn.client.client_id for turn in turns] == list("acac")
    assert members.next_member("unknown") is None


def test_a_heartbeat_does_not_change_the_order_of_turns() -> None:
    members = MemberTable[FakePeer]()
    for client_id in "ab":
        members.join("g", client(client_id), now_ms=0)
    members.join("g", client("a"), now_ms=1)
    turn = members.next_member("g")
    assert turn is not None
    assert turn.client.client_id == "a"


def test_a_client_is_found_by_its_latest_heartbeat() -> None:
    members = MemberTable[FakePeer]()
    members.join("g", client("a", "one"), now_ms=5)
    members.join("h", client("a", "two"), now_ms=9)
    last = members.most_recent_member("a")
    assert last is not None
    assert last.client.channel == "two"
    members.channel_closed(FakePeer("two"))
    last = members.most_recent_member("a")
    assert last is not None
    assert last.client.channel == "one"
    assert members.most_recent_member("unknown") is None


def test_a_full_table_refuses_new_members_and_keeps_the_others() -> None:
    members = MemberTable[FakePeer](members_max=2)
    members.join("g", client("a"), now_ms=0)
    members.join("g", client("b"), now_ms=0)
    with pytest.raises(TableFull):
        members.join("h", client("a"), now_ms=0)
    assert "h" not in members
    assert not members.join("g", client("a"), now_ms=1)
    assert members.join("g", client("b", "channel-2"), now_ms=1)


def test_the_members_of_one_channel_are_limited() -> None:
    members = MemberTable[FakePeer](per_channel_max=1)
    members.join("g", client("a"), now_ms=0)
    with pytest.raises(TableFull):
        members.join("h", client("a"), now_ms=0)
    members.join("g", client("b", "channel-2"), now_ms=0)
    with pytest.raises(TableFull):
        members.join("g", client("b", "channel-1"), now_ms=0)
    assert [member.client.channel for member in members.members_of("g")] == [
        "channel-1",
        "channel-2",
    ]


def test_a_member_on_a_full_channel_can_still_send_heartbeats() -> None:
    members = MemberTable[FakePeer](per_channel_max=2)
    members.join("g", client("a"), now_ms=0)
    members.join("h", client("a"), now_ms=0)
    assert not members.join("g", client("a"), now_ms=7)
    member = members.find("g", "a")
    assert member is not None
    assert member.last_heartbeat_ms == 7


def test_a_full_channel_accepts_a_member_after_another_has_left() -> None:
    members = MemberTable[FakePeer](members_max=2, per_channel_max=1)
    members.join("g", client("a"), now_ms=0)
    members.leave("g", "a", FakePeer("channel-1"))
    assert members.join("h", client("b"), now_ms=0)
    assert members.join("h", client("b", "channel-2"), now_ms=0)
    assert members.join("g", client("a"), now_ms=0)
    assert len(members) == 2


@pytest.mark.parametrize("departure", ["unregistered", "closed channel", "expired"])
def test_the_tables_are_empty_when_all_members_have_left(departure: str) -> None:
    members = MemberTable[FakePeer]()
    for group, client_id in (("g", "a"), ("h", "a"), ("g", "b")):
        members.join(group, client(client_id, "old"), now_ms=0)
        members.join(group, client(client_id, "new"), now_ms=0)
    if departure == "unregistered":
        for group, client_id in (("g", "a"), ("h", "a"), ("g", "b")):
            members.leave(group, client_id, FakePeer("new"))
    elif departure == "closed channel":
        members.channel_closed(FakePeer("new"))
    else:
        members.expire(MEMBER_TIMEOUT_MS + 1)
    assert len(members) == 0
    assert leftovers(members) == {}
