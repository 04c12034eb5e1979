"""Limits of messages in flight: at each limit a queue waits until a message is done."""

from __future__ import annotations

import asyncio

import pytest

from escrowmq import ConsumerLimits
from escrowmq.client.consumer.fetcher import InFlight, InFlightLimiter

HIGH = 1_000


def limits(**changes: int) -> ConsumerLimits:
    """Return limits that are too high to matter, except those in `changes`."""
    high = dict.fromkeys(("per_queue", "per_queue_bytes", "total", "total_bytes", "span"), HIGH)
    return ConsumerLimits(**(high | changes))


@pytest.mark.parametrize(
    "changes", [{"per_queue": 2}, {"per_queue_bytes": 20}, {"total": 2}, {"total_bytes": 20}]
)
async def test_a_queue_waits_at_each_limit(changes: dict[str, int]) -> None:
    limiter, in_flight = InFlightLimiter(limits(**changes)), InFlight(0)
    await limiter.wait_for_capacity(in_flight)
    limiter.add(in_flight, 0, 10)
    await limiter.wait_for_capacity(in_flight)
    limiter.add(in_flight, 1, 10)
    waiting = asyncio.create_task(limiter.wait_for_capacity(in_flight))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert limiter.remove(in_flight, 1)
    await waiting


async def test_a_message_that_is_never_done_blocks_only_its_own_queue() -> None:
    limiter, stuck, other = InFlightLimiter(limits(span=3)), InFlight(0), InFlight(0)
    for offset in range(3):
        limiter.add(stuck, offset, 1)
    limiter.remove(stuck, 1)
    limiter.remove(stuck, 2)
    waiting = asyncio.create_task(limiter.wait_for_capacity(stuck))
    await limiter.wait_for_capacity(other)
    await asyncio.sleep(0)
    assert not waiting.done()
    limiter.remove(stuck, 0)
    await waiting


async def test_a_removed_queue_frees_its_capacity() -> None:
    limiter, removed, other = InFlightLimiter(limits(total=2)), InFlight(0), InFlight(0)
    limiter.add(removed, 0, 5)
    limiter.add(removed, 1, 5)
    waiting = asyncio.create_task(limiter.wait_for_capacity(other))
    await asyncio.sleep(0)
    assert not waiting.done()
    limiter.remove_all(removed)
    await waiting
    assert (limiter.message_count, limiter.message_bytes) == (0, 0)


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="per_queue must be at least 1"):
        ConsumerLimits(per_queue=0)
