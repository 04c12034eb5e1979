"""A fetcher does not pull as fast as it can from a server that holds no pulls."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from escrowmq.client.consumer.fetcher import (
    NOT_HELD_MAX,
    NOT_HELD_S,
    RETRY_PAUSE_S,
    ConsumerLimits,
    DeliveryQueue,
    InFlightLimiter,
    PullBackoff,
    QueueFetcher,
)
from escrowmq.client.consumer.queue_client import PullResult, QueueClient
from escrowmq.client.messages import MessageQueue
from escrowmq.message.filter import FilterExpression


class EmptyQueueClient:
    """Answers each pull at once with nothing, also if it should be held."""

    def __init__(self) -> None:
        self.pull_count = 0

    async def pull(self, queue: MessageQueue, offset: int, *args: Any, **kwargs: Any) -> PullResult:
        self.pull_count += 1
        await asyncio.sleep(0)
        return PullResult([], offset, 0, offset)


async def test_pulls_that_are_not_held_are_not_repeated_at_once() -> None:
    client = EmptyQueueClient()
    fetcher = QueueFetcher(
        MessageQueue("T", "b", 0),
        FilterExpression(),
        version=0,
        start="earliest",
        is_new_queue=False,
        queue_client=cast(QueueClient, client),
        offset_store=cast(Any, None),
        limiter=InFlightLimiter(ConsumerLimits()),
        delivery_queue=DeliveryQueue(),
    )
    fetcher.start(offset=0)
    for _ in range(500):  # turns of the event loop, which take some milliseconds
        await asyncio.sleep(0)
    assert 0 < client.pull_count <= 3 * NOT_HELD_MAX
    await fetcher.stop()


def test_the_pauses_grow_up_to_a_limit() -> None:
    backoff = PullBackoff()
    pauses = []
    for _ in range(2_000):
        backoff.pull_ended(is_progress=False, elapsed_s=0.0)
        pauses.append(backoff.pause_s)
    assert pauses[: NOT_HELD_MAX - 1] == [0.0] * (NOT_HELD_MAX - 1)
    assert pauses == sorted(pauses)
    assert pauses[-1] == RETRY_PAUSE_S


@pytest.mark.parametrize(("is_progress", "elapsed_s"), [(True, 0.0), (False, NOT_HELD_S)])
def test_progress_or_a_held_pull_ends_the_pauses(is_progress: bool, elapsed_s: float) -> None:
    backoff = PullBackoff()
    for _ in range(NOT_HELD_MAX):
        backoff.pull_ended(is_progress=False, elapsed_s=0.0)
    assert backoff.pause_s > 0
    backoff.pull_ended(is_progress=is_progress, elapsed_s=elapsed_s)
    assert backoff.pause_s == 0
