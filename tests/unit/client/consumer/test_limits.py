"""Room for messages: at any of its bounds a queue waits, until something is done with."""

from __future__ import annotations

import asyncio

import pytest

from escrowmq import Limits
from escrowmq.client.consumer.fetcher import Hand, Room

WIDE = 1_000


def limits(**narrow: int) -> Limits:
    wide = dict.fromkeys(("per_queue", "per_queue_bytes", "total", "total_bytes", "span"), WIDE)
    return Limits(**(wide | narrow))


@pytest.mark.parametrize(
    "narrow", [{"per_queue": 2}, {"per_queue_bytes": 20}, {"total": 2}, {"total_bytes": 20}]
)
async def test_a_queue_waits_at_each_bound(narrow: dict[str, int]) -> None:
    room, hand = Room(limits(**narrow)), Hand(0)
    await room.wait(hand)
    room.take(hand, 0, 10)
    await room.wait(hand)
    room.take(hand, 1, 10)
    waiting = asyncio.create_task(room.wait(hand))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert room.done(hand, 1)
    await waiting


async def test_one_that_is_never_done_with_bounds_its_own_queue_alone() -> None:
    room, stuck, other = Room(limits(span=3)), Hand(0), Hand(0)
    for offset in range(3):
        room.take(stuck, offset, 1)
    room.done(stuck, 1)
    room.done(stuck, 2)
    waiting = asyncio.create_task(room.wait(stuck))
    await room.wait(other)
    await asyncio.sleep(0)
    assert not waiting.done()
    room.done(stuck, 0)
    await waiting


async def test_what_is_given_up_leaves_its_room_to_others() -> None:
    room, gone, other = Room(limits(total=2)), Hand(0), Hand(0)
    room.take(gone, 0, 5)
    room.take(gone, 1, 5)
    waiting = asyncio.create_task(room.wait(other))
    await asyncio.sleep(0)
    room.give_up(gone)
    await waiting
    assert (room.messages, room.bytes) == (0, 0)


def test_a_bound_is_at_least_one() -> None:
    with pytest.raises(ValueError, match="per_queue is at least 1"):
        Limits(per_queue=0)
