"""The delivery queue: queues take turns, and an orderly queue delivers one message at a time."""

from __future__ import annotations

import asyncio

from escrowmq.client.consumer.fetcher import DeliveryQueue


def drain(queue: DeliveryQueue[str, int]) -> list[int]:
    """Take everything that can be delivered now."""
    messages = []
    while (item := queue.get_nowait()) is not None:
        messages.append(item[1])
    return messages


async def test_queues_take_turns() -> None:
    queue = DeliveryQueue[str, int]()
    queue.put("a", [1, 2, 3])
    queue.put("b", [10])
    queue.put("a", [4])
    assert len(queue) == 5
    assert drain(queue) == [1, 10, 2, 3, 4]


async def test_an_orderly_queue_waits_until_the_delivered_message_is_released() -> None:
    queue = DeliveryQueue[str, int](orderly=True)
    queue.put("a", [1, 2])
    queue.put("b", [10])
    assert drain(queue) == [1, 10]
    released = asyncio.create_task(queue.wait_released("a"))
    await asyncio.sleep(0)
    assert not released.done()
    queue.put_front("a", 1)  # as after a failure of its handler
    assert drain(queue) == []
    queue.release("a")
    await released
    assert drain(queue) == [1]
    queue.release("a")
    assert drain(queue) == [2]


async def test_a_paused_queue_delivers_nothing_and_loses_nothing() -> None:
    queue = DeliveryQueue[str, int]()
    queue.put("a", [1])
    queue.pause("a")
    queue.put("a", [2])
    assert drain(queue) == []
    queue.resume("a")
    assert drain(queue) == [1, 2]


async def test_messages_of_a_removed_queue_are_not_delivered() -> None:
    queue = DeliveryQueue[str, int]()
    queue.put("a", [1])
    queue.clear("a")
    queue.put("b", [2])
    assert await queue.get() == ("b", 2)


async def test_get_returns_none_when_the_queue_is_closed() -> None:
    queue = DeliveryQueue[str, int]()
    getters = [asyncio.create_task(queue.get()) for _ in range(3)]
    await asyncio.sleep(0)
    queue.close()
    assert await asyncio.gather(*getters) == [None] * 3
    queue.put("a", [1])
    assert await queue.get() is None


async def test_a_queue_whose_messages_are_delivered_leaves_nothing_behind() -> None:
    queue = DeliveryQueue[str, int](orderly=True)
    for number in range(100):  # as with keys that come once
        queue.put(f"key {number}", [number])
        assert drain(queue) == [number]
        queue.release(f"key {number}")
    # Private: memory that grows with the number of keys cannot be seen otherwise.
    assert not queue._messages
    # The same.
    assert not queue._delivered | queue._scheduled
