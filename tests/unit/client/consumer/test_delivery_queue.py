"""Queues take turns, and an orderly queue has one message delivered at a time."""

from __future__ import annotations

import asyncio

from escrowmq.client.consumer.fetcher import DeliveryQueue


def drain(waiting: DeliveryQueue[str, int]) -> list[int]:
    found = []
    while (got := waiting.get_nowait()) is not None:
        found.append(got[1])
    return found


async def test_queues_take_turns() -> None:
    waiting = DeliveryQueue[str, int]()
    waiting.put("a", [1, 2, 3])
    waiting.put("b", [10])
    waiting.put("a", [4])
    assert len(waiting) == 5
    assert drain(waiting) == [1, 10, 2, 3, 4]


async def test_an_orderly_queue_waits_until_the_delivered_message_is_released() -> None:
    waiting = DeliveryQueue[str, int](orderly=True)
    waiting.put("a", [1, 2])
    waiting.put("b", [10])
    assert drain(waiting) == [1, 10]
    back = asyncio.create_task(waiting.wait_released("a"))
    await asyncio.sleep(0)
    assert not back.done()
    waiting.put_front("a", 1)  # it failed
    assert drain(waiting) == []
    waiting.release("a")
    await back
    assert drain(waiting) == [1]
    waiting.release("a")
    assert drain(waiting) == [2]


async def test_a_paused_queue_delivers_nothing_and_loses_nothing() -> None:
    waiting = DeliveryQueue[str, int]()
    waiting.put("a", [1])
    waiting.pause("a")
    waiting.put("a", [2])
    assert drain(waiting) == []
    waiting.resume("a")
    assert drain(waiting) == [1, 2]


async def test_messages_of_a_removed_queue_are_not_delivered() -> None:
    waiting = DeliveryQueue[str, int]()
    waiting.put("a", [1])
    waiting.clear("a")
    waiting.put("b", [2])
    assert await waiting.get() == ("b", 2)


async def test_get_returns_none_when_the_queue_is_closed() -> None:
    waiting = DeliveryQueue[str, int]()
    asking = [asyncio.create_task(waiting.get()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting.close()
    assert await asyncio.gather(*asking) == [None] * 3
    waiting.put("a", [1])
    assert await waiting.get() is None
