"""Held pulls: when each is released, and how many there may be."""

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


def test_a_message_wakes_the_pulls_of_its_queue_in_order() -> None:
    waiting = LongPolls[str](pulls_max=1000)
    for held in (pull("a"), pull("b"), pull("c", queue_id=1), pull("d", topic="stock")):
        assert waiting.add(held)
    assert names(waiting.take_ready("orders", 0, 11)) == ["a", "b"]
    assert waiting.take_ready("orders", 0, 12) == []
    assert len(waiting) == 2


def test_a_pull_waits_for_its_offset() -> None:
    waiting = LongPolls[str](pulls_max=1000)
    waiting.add(pull(queue_offset=10))
    assert waiting.take_ready("orders", 0, 10) == []
    assert names(waiting.take_ready("orders", 0, 11)) == ["p"]


@pytest.mark.parametrize(
    ("codes", "wakes"),
    [([1], False), ([7], True), ([1, 7], True), ([1, 2, 3], False), ([], False), (None, True)],
)
def test_a_filter_by_tags_must_match_an_arrival(codes: list[int] | None, wakes: bool) -> None:
    waiting = LongPolls[str](pulls_max=1000)
    waiting.add(pull(message_filter=TAG_SEVEN))
    assert bool(waiting.take_ready("orders", 0, 10 + len(codes or [0]), arrivals(codes))) is wakes


def test_a_filter_by_properties_must_match_an_arrival() -> None:
    waiting = LongPolls[str](pulls_max=1000)
    waiting.add(pull(message_filter=MessageFilter(matches_properties=b"yes".__eq__)))
    assert waiting.take_ready("orders", 0, 12, [(0, b"no"), (0, b"never")]) == []
    assert names(waiting.take_ready("orders", 0, 13, [(0, b"yes")])) == ["p"]


def test_messages_before_the_offset_of_a_pull_do_not_wake_it() -> None:
    waiting = LongPolls[str](pulls_max=1000)
    waiting.add(pull(queue_offset=10, message_filter=TAG_SEVEN))
    assert waiting.take_ready("orders", 0, 12, arrivals([7, 1, 1])) == []  # offsets 9, 10, 11
    assert names(waiting.take_ready("orders", 0, 13, arrivals([7]))) == ["p"]


def test_has_pulls_tells_whether_a_queue_has_held_pulls() -> None:
    waiting = LongPolls[str](pulls_max=1000)
    assert not waiting.has_pulls("orders", 0)
    waiting.add(pull())
    assert waiting.has_pulls("orders", 0)
    assert not waiting.has_pulls("orders", 1)
    waiting.take_ready("orders", 0, 11)
    assert not waiting.has_pulls("orders", 0)


def test_a_pull_expires_exactly_at_its_due_time() -> None:
    waiting = LongPolls[str](pulls_max=1000)
    waiting.add(pull("late", due_ms=200))
    waiting.add(pull("soon", due_ms=100))
    assert waiting.next_due_ms() == 100
    assert waiting.expire(99) == []
    assert names(waiting.expire(100)) == ["soon"]
    assert waiting.expire(150) == []
    assert waiting.next_due_ms() == 200
    assert names(waiting.expire(10_000)) == ["late"]
    assert waiting.next_due_ms() is None
    assert len(waiting) == 0


def test_a_pull_that_was_woken_does_not_expire() -> None:
    waiting = LongPolls[str](pulls_max=1000)
    waiting.add(pull("woken", due_ms=100))
    waiting.add(pull("held", due_ms=300, queue_id=1))
    waiting.take_ready("orders", 0, 11)
    assert waiting.next_due_ms() == 300
    assert waiting.expire(100) == []
    assert len(waiting) == 1


def test_the_pulls_of_a_closed_channel_are_removed() -> None:
    waiting = LongPolls[str](pulls_max=1000)
    waiting.add(pull("a"))
    waiting.add(pull("b", queue_id=1))
    waiting.add(pull("c", channel="other"))
    assert names(waiting.channel_closed(FakePeer("channel"))) == ["a", "b"]
    assert waiting.channel_closed(FakePeer("channel")) == []
    assert names(waiting.take_ready("orders", 0, 11)) == ["c"]
    assert not waiting.has_pulls("orders", 1)


def test_release_all_returns_every_pull() -> None:
    waiting = LongPolls[str](pulls_max=1000)
    waiting.add(pull("a"))
    waiting.add(pull("b", queue_id=1, channel="other"))
    assert sorted(names(waiting.release_all())) == ["a", "b"]
    assert len(waiting) == 0
    assert waiting.expire(1 << 60) == []


def test_a_pull_above_the_limit_is_refused_and_leaves_no_trace() -> None:
    waiting = LongPolls[str](pulls_max=2)
    assert waiting.add(pull("a", channel="1"))
    assert waiting.add(pull("b", channel="2"))
    refused = pull("c", channel="3", queue_id=5)
    assert not waiting.add(refused)
    assert not refused.is_held
    assert not waiting.has_pulls("orders", 5)
    waiting.channel_closed(FakePeer("1"))
    assert waiting.add(refused)


def test_the_pulls_of_one_channel_are_limited() -> None:
    waiting = LongPolls[str](pulls_max=100, per_channel_max=1)
    assert waiting.add(pull("a"))
    assert not waiting.add(pull("b"))
    assert waiting.add(pull("c", channel="other"))


def test_pulls_that_left_early_do_not_accumulate() -> None:
    waiting = LongPolls[str](pulls_max=1000)
    waiting.add(pull("patient", queue_id=1, due_ms=99_999))
    for number in range(10_000):
        waiting.add(pull(str(number), queue_offset=number))
        assert names(waiting.take_ready("orders", 0, number + 1)) == [str(number)]
    assert len(waiting._heap) < 100  # private: nothing else shows what the heap still holds
    assert waiting.next_due_ms() == 99_999


def test_after_a_rebuild_of_the_heap_the_earliest_pull_comes_first() -> None:
    waiting = LongPolls[str](pulls_max=1000)
    waiting.add(pull("woken", due_ms=100))
    waiting.add(pull("late", queue_id=1, due_ms=900))
    waiting.add(pull("soon", queue_id=1, due_ms=200))
    for number in range(100):
        waiting.add(pull(str(number), due_ms=1_000))
    assert len(waiting.take_ready("orders", 0, 11)) == 101  # far more than what waits
    assert waiting.next_due_ms() == 200
    assert names(waiting.expire(200)) == ["soon"]
    assert names(waiting.expire(900)) == ["late"]


def test_a_channel_that_was_full_has_room_again_when_a_pull_leaves() -> None:
    waiting = LongPolls[str](pulls_max=2, per_channel_max=1)
    assert waiting.add(pull("a"))
    assert not waiting.add(pull("b", queue_id=1))
    assert names(waiting.take_ready("orders", 0, 11)) == ["a"]
    assert waiting.add(pull("b", queue_id=1))


@pytest.mark.parametrize("departure", ["a message", "time", "closed channels", "the end"])
def test_nothing_stays_when_all_pulls_have_left(departure: str) -> None:
    waiting = LongPolls[str](pulls_max=1000)
    for number in range(4):
        waiting.add(pull(queue_id=number % 2, channel=f"channel-{number}"))
    if departure == "a message":
        for queue_id in range(2):
            waiting.take_ready("orders", queue_id, 11)
    elif departure == "time":
        waiting.expire(15_000)
    elif departure == "closed channels":
        for number in range(4):
            waiting.channel_closed(FakePeer(f"channel-{number}"))
    else:
        waiting.release_all()
    assert waiting.next_due_ms() is None
    assert leftovers(waiting) == {}
