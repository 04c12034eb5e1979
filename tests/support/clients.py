"""Helpers for tests of the client. They work with EscrowMQ and with Apache RocketMQ."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Protocol

from escrowmq import Consumer, Message, Producer, PullConsumer
from escrowmq.client.messages import MessageQueue
from escrowmq.errors import NoRoute
from tests.support.waiting import wait_until_async

WAIT_S = 60.0
# A message that is sent back is redelivered after one second, however often it was sent back.
CONF = {"messageDelayLevel": "1s 1s 1s 1s 1s 1s"}


class Broker(Protocol):
    """A running broker with its name server."""

    @property
    def namesrv_address(self) -> str: ...

    @property
    def address(self) -> str: ...


async def send(
    broker: Broker, topic: str, *bodies: bytes, tags: str = "", sharding_key: str = ""
) -> None:
    """Send messages and wait until the name server has a route for their topic."""
    async with Producer(broker.namesrv_address, group="p") as producer:
        for body in bodies:
            await producer.send(Message(topic, body, tags=tags, sharding_key=sharding_key))
        async with asyncio.timeout(WAIT_S):
            # RocketMQ registers a new topic a moment after its first message.
            while True:
                with contextlib.suppress(NoRoute):
                    # Private: producer.queues() would return the queues of the template topic, and
                    # clients refresh their routes only every half minute.
                    await producer._routes.get(topic, fresh=True)
                    break
                await asyncio.sleep(0.05)


async def send_to(broker: Broker, topic: str, queue_id: int, *bodies: bytes) -> None:
    """Send messages to one queue of an existing topic."""
    async with Producer(broker.namesrv_address, group="p") as producer:
        queues = await producer.queues(topic)
        queue = next(queue for queue in queues if queue.queue_id == queue_id)
        for body in bodies:
            await producer.send(Message(topic, body), queue=queue)


async def receive(consumer: Consumer, count: int) -> list[bytes]:
    """Receive messages and return their bodies."""
    async with asyncio.timeout(WAIT_S):
        return [(await consumer.receive()).body for _ in range(count)]


async def wait_until_caught_up(broker: Broker, consumer: Consumer, topic: str) -> None:
    """Wait until the consumer has processed all messages that the topic has now."""
    async with PullConsumer(broker.namesrv_address, group="observer") as observer:
        queues = await observer.queues(topic)
        ends = {queue: await observer.latest_offset(queue) for queue in queues}
    # Private: the broker gets the offsets only every five seconds.
    fetchers = consumer._rebalancer.fetchers
    await wait_until_async(
        lambda: all(
            queue in fetchers and fetchers[queue].commit_offset == end
            for queue, end in ends.items()
        )
    )


def numbered_bodies(count: int, prefix: str = "") -> list[bytes]:
    """Return bodies that sort in the order of their numbers."""
    return [f"{prefix}{number:03}".encode() for number in range(count)]


def queues_of_topic(queues: Iterable[MessageQueue], topic: str) -> set[MessageQueue]:
    return {queue for queue in queues if queue.topic == topic}
