"""Limits of messages in flight: at any limit a queue waits until a message is done."""

from __future__ import annotations

import asyncio

import pytest

from escrowmq import ConsumerLimits
from escrowmq.client.consumer.fetcher import InFlight, InFlightLimiter

WIDE = 1_000


def limits(**narrow: int) -> ConsumerLimits:
    wide = dict.fromkeys(("per_queue", "per_queue_bytes", "total", "total_bytes", "span"), WIDE)
    return ConsumerLimits(**(wide | narrow))


@pytest.mark.parametrize(
    "narrow", [{"per_queue": 2}, {"per_queue_bytes": 20}, {"total": 2}, {"total_bytes": 20}]
)
async def test_a_queue_waits_at_each_limit(narrow: dict[str, int]) -> None:
    room, hand = InFlightLimiter(limits(**narrow)), InFlight(0)
    await room.wait_for_capacity(hand)
    room.add(hand, 0, 10)
    await room.wait_for_capacity(hand)
    room.add(hand, 1, 10)
    waiting = asyncio.create_task(room.wait_for_capacity(hand))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert room.remove(hand, 1)
    await waiting


async def test_a_message_that_is_never_done_blocks_only_its_own_queue() -> None:
    room, stuck, other = InFlightLimiter(limits(span=3)), InFlight(0), InFlight(0)
    for offset in range(3):
        room.add(stuck, offset, 1)
    room.remove(stuck, 1)
    room.remove(stuck, 2)
    waiting = asyncio.create_task(room.wait_for_capacity(stuck))
    await room.wait_for_capacity(other)
    await asyncio.sleep(0)
    assert not waiting.done()
    room.remove(stuck, 0)
    await waiting


async def test_a_removed_queue_frees_its_capacity() -> None:
    room, gone, other = InFlightLimiter(limits(total=2)), InFlight(0), InFlight(0)
    room.add(gone, 0, 5)
    room.add(gone, 1, 5)
    waiting = asyncio.create_task(room.wait_for_capacity(other))
    await asyncio.sleep(0)
    room.remove_all(gone)
    await waiting
    assert (room.message_count, room.body_bytes) == (0, 0)


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="per_queue must be at least 1"):
        ConsumerLimits(per_queue=0)
