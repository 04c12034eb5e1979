"""What tests of the client share. Any broker will do: ours, or Apache RocketMQ."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Protocol

from escrowmq import Consumer, Message, Producer, PullConsumer
from escrowmq.client.messages import MessageQueue
from escrowmq.errors import NoRoute

WAIT_S = 60.0
# A message that is given back comes again after a second, whichever time it is.
CONF = {"messageDelayLevel": "1s 1s 1s 1s 1s 1s"}


class Broker(Protocol):
    @property
    def namesrv_address(self) -> str: ...

    @property
    def address(self) -> str: ...


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def send(
    broker: Broker, topic: str, *bodies: bytes, tags: str = "", sharding_key: str = ""
) -> None:
    async with Producer(broker.namesrv_address, group="p") as producer:
        for body in bodies:
            await producer.send(Message(topic, body, tags=tags, sharding_key=sharding_key))
        async with asyncio.timeout(WAIT_S):
            while True:  # RocketMQ makes a topic known a moment after its first message
                with contextlib.suppress(NoRoute):
                    await producer._routes.get(topic, fresh=True)
                    break
                await asyncio.sleep(0.05)


async def send_to(broker: Broker, topic: str, queue_id: int, *bodies: bytes) -> None:
    """To one queue of a topic that is there."""
    async with Producer(broker.namesrv_address, group="p") as producer:
        route = await producer._routes.get(topic)
        queue = next(queue for queue in route.writable_queues if queue.queue_id == queue_id)
        for body in bodies:
            await producer.send(Message(topic, body), queue=queue)


async def receive(consumer: Consumer, count: int) -> list[bytes]:
    async with asyncio.timeout(WAIT_S):
        return [(await consumer.receive()).body for _ in range(count)]


async def caught_up(broker: Broker, consumer: Consumer, topic: str) -> None:
    """Until it is done with everything that is in the topic now."""
    async with PullConsumer(broker.namesrv_address, group="looks-on") as puller:
        ends = {queue: await puller.latest_offset(queue) for queue in await puller.queues(topic)}
    pulls = consumer._rebalancer.fetchers
    await until(
        lambda: all(
            queue in pulls and pulls[queue].commit_offset == end for queue, end in ends.items()
        )
    )


def numbered(count: int, prefix: str = "") -> list[bytes]:
    return [f"{prefix}{number:03}".encode() for number in range(count)]


def of_topic(queues: Iterable[MessageQueue], topic: str) -> set[MessageQueue]:
    return {queue for queue in queues if queue.topic == topic}
