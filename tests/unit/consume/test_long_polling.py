"""Held pulls: when each of them is released, and how many there may be."""

from __future__ import annotations

import pytest

from escrowmq.consume.long_polling import HeldPull, LongPolls
from escrowmq.consume.subscription import MATCH_ALL, MessageFilter
from escrowmq.message.record import QueueOffset
from tests.support.fake_peers import FakePeer
from tests.support.leftovers import leftovers


def pull(
    name: str = "p",
    *,
    topic: str = "orders",
    queue_id: int = 0,
    queue_offset: int = 10,
    due_ms: int = 15_000,
    channel: str = "channel",
    message_filter: MessageFilter = MATCH_ALL,
) -> HeldPull[str]:
    return HeldPull(
        topic=topic,
        queue_id=queue_id,
        queue_offset=QueueOffset(queue_offset),
        due_ms=due_ms,
        channel=FakePeer(channel),
        payload=name,
        message_filter=message_filter,
    )


TAG_SEVEN = MessageFilter(frozenset({7}))


def arrivals(tags_codes: list[int] | None) -> list[tuple[int, bytes]] | None:
    return None if tags_codes is None else [(tags_code, b"") for tags_code in tags_codes]


def names(pulls: list[HeldPull[str]]) -> list[str]:
    return [pull.payload for pull in pulls]


def wake(
    polls: LongPolls[str],
    topic: str,
    queue_id: int,
    max_offset: int,
    new: list[tuple[int, bytes]] | None = None,
) -> list[HeldPull[str]]:
    """Return the pulls that new messages wake."""
    polls.arrived(topic, queue_id, max_offset, new)
    return polls.take_ready(1_000)


def test_a_message_wakes_the_pulls_of_its_queue_in_order() -> None:
    polls = LongPolls[str](pulls_max=1000)
    for held in (pull("a"), pull("b"), pull("c", queue_id=1), pull("d", topic="stock")):
        assert polls.add(held)
    assert names(wake(polls, "orders", 0, 11)) == ["a", "b"]
    assert wake(polls, "orders", 0, 12) == []
    assert len(polls) == 2


def test_a_pull_waits_for_its_offset() -> None:
    polls = LongPolls[str](pulls_max=1000)
    polls.add(pull(queue_offset=10))
    assert wake(polls, "orders", 0, 10) == []
    assert names(wake(polls, "orders", 0, 11)) == ["p"]


@pytest.mark.parametrize(
    ("codes", "is_woken"),
    [([1], False), ([7], True), ([1, 7], True), ([1, 2, 3], False), ([], False), (None, True)],
)
def test_a_filter_by_tags_must_match_an_arrival(codes: list[int] | None, is_woken: bool) -> None:
    polls = LongPolls[str](pulls_max=1000)
    polls.add(pull(message_filter=TAG_SEVEN))
    woken = wake(polls, "orders", 0, 10 + len(codes or [0]), arrivals(codes))
    assert bool(woken) is is_woken


def test_a_filter_by_properties_must_match_an_arrival() -> None:
    polls = LongPolls[str](pulls_max=1000)
    polls.add(pull(message_filter=MessageFilter(matches_properties=b"yes".__eq__)))
    assert wake(polls, "orders", 0, 12, [(0, b"no"), (0, b"never")]) == []
    assert names(wake(polls, "orders", 0, 13, [(0, b"yes")])) == ["p"]


def test_messages_before_the_offset_of_a_pull_do_not_wake_it() -> None:
    polls = LongPolls[str](pulls_max=1000)
    polls.add(pull(queue_offset=10, message_filter=TAG_SEVEN))
    assert wake(polls, "orders", 0, 12, arrivals([7, 1, 1])) == []  # offsets 9, 10, 11
    assert names(wake(polls, "orders", 0, 13, arrivals([7]))) == ["p"]


def test_has_pulls_says_whether_a_queue_has_held_pulls() -> None:
    polls = LongPolls[str](pulls_max=1000)
    assert not polls.has_pulls("orders", 0)
    polls.add(pull())
    assert polls.has_pulls("orders", 0)
    assert not polls.has_pulls("orders", 1)
    wake(polls, "orders", 0, 11)
    assert not polls.has_pulls("orders", 0)


def test_a_pull_expires_exactly_at_its_due_time() -> None:
    polls = LongPolls[str](pulls_max=1000)
    polls.add(pull("late", due_ms=200))
    polls.add(pull("soon", due_ms=100))
    assert polls.next_due_ms() == 100
    assert polls.expire(99) == []
    assert names(polls.expire(100)) == ["soon"]
    assert polls.expire(150) == []
    assert polls.next_due_ms() == 200
    assert names(polls.expire(10_000)) == ["late"]
    assert polls.next_due_ms() is None
    assert len(polls) == 0


def test_a_pull_that_was_woken_does_not_expire() -> None:
    polls = LongPolls[str](pulls_max=1000)
    polls.add(pull("woken", due_ms=100))
    polls.add(pull("held", due_ms=300, queue_id=1))
    wake(polls, "orders", 0, 11)
    assert polls.next_due_ms() == 300
    assert polls.expire(100) == []
    assert len(polls) == 1


def test_the_pulls_of_a_closed_channel_are_removed() -> None:
    polls = LongPolls[str](pulls_max=1000)
    polls.add(pull("a"))
    polls.add(pull("b", queue_id=1))
    polls.add(pull("c", channel="other"))
    assert names(polls.channel_closed(FakePeer("channel"))) == ["a", "b"]
    assert polls.channel_closed(FakePeer("channel")) == []
    assert names(wake(polls, "orders", 0, 11)) == ["c"]
    assert not polls.has_pulls("orders", 1)


def test_release_all_returns_every_pull() -> None:
    polls = LongPolls[str](pulls_max=1000)
    polls.add(pull("a"))
    polls.add(pull("b", queue_id=1, channel="other"))
    assert sorted(names(polls.release_all())) == ["a", "b"]
    assert len(polls) == 0
    assert polls.expire(1 << 60) == []


def test_a_pull_above_the_limit_is_refused_and_not_held() -> None:
    polls = LongPolls[str](pulls_max=2)
    assert polls.add(pull("a", channel="1"))
    assert polls.add(pull("b", channel="2"))
    refused = pull("c", channel="3", queue_id=5)
    assert not polls.add(refused)
    assert not refused.is_held
    assert not polls.has_pulls("orders", 5)
    polls.channel_closed(FakePeer("1"))
    assert polls.add(refused)


def test_the_pulls_of_one_channel_are_limited() -> None:
    polls = LongPolls[str](pulls_max=100, per_channel_max=1)
    assert polls.add(pull("a"))
    assert not polls.add(pull("b"))
    assert polls.add(pull("c", channel="other"))


def test_released_pulls_do_not_accumulate_in_memory() -> None:
    polls = LongPolls[str](pulls_max=1000)
    polls.add(pull("held", queue_id=1, due_ms=99_999))
    for number in range(10_000):
        polls.add(pull(str(number), queue_offset=number))
        assert names(wake(polls, "orders", 0, number + 1)) == [str(number)]
    assert len(polls._heap) < 100  # private: no response shows the size of the heap
    assert polls.next_due_ms() == 99_999


def test_after_a_rebuild_of_the_heap_the_earliest_pull_comes_first() -> None:
    polls = LongPolls[str](pulls_max=1000)
    polls.add(pull("woken", due_ms=100))
    polls.add(pull("late", queue_id=1, due_ms=900))
    polls.add(pull("soon", queue_id=1, due_ms=200))
    for number in range(100):
        polls.add(pull(str(number), due_ms=1_000))
    assert len(wake(polls, "orders", 0, 11)) == 101  # most of the heap, so it is rebuilt
    assert polls.next_due_ms() == 200
    assert names(polls.expire(200)) == ["soon"]
    assert names(polls.expire(900)) == ["late"]


def test_a_full_channel_accepts_a_pull_after_another_is_released() -> None:
    polls = LongPolls[str](pulls_max=2, per_channel_max=1)
    assert polls.add(pull("a"))
    assert not polls.add(pull("b", queue_id=1))
    assert names(wake(polls, "orders", 0, 11)) == ["a"]
    assert polls.add(pull("b", queue_id=1))


@pytest.mark.parametrize("release", ["arrival", "expiry", "closed channels", "release_all"])
def test_the_tables_are_empty_when_all_pulls_are_released(release: str) -> None:
    polls = LongPolls[str](pulls_max=1000)
    for number in range(4):
        polls.add(pull(queue_id=number % 2, channel=f"channel-{number}"))
    if release == "arrival":
        for queue_id in range(2):
            wake(polls, "orders", queue_id, 11)
    elif release == "expiry":
        polls.expire(15_000)
    elif release == "closed channels":
        for number in range(4):
            polls.channel_closed(FakePeer(f"channel-{number}"))
    else:
        polls.release_all()
    assert polls.next_due_ms() is None
    assert leftovers(polls) == {}
