"""Run an App inside a test, and look at the dead letters of its group."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from escrowmq import PullConsumer, ReceivedMessage
from escrowmq.app import App
from escrowmq.app.dispatch import HANDLED
from escrowmq.client.messages import MessageQueue
from escrowmq.errors import NoRoute
from tests.support.clients import WAIT_S, Broker
from tests.support.waiting import wait_until_async

# Retries are delivered when they are due, and open transactions are checked soon.
CONF = {
    "timerPrecisionMs": 10,
    "transactionTimeOut": 500,
    "transactionCheckInterval": 500,
    "transactionCheckMax": 1000,
}


@asynccontextmanager
async def running(app: App, *, shutdown_timeout_s: float = 30.0) -> AsyncIterator[None]:
    """Run an App while the block runs, and stop it as a signal would."""
    task = asyncio.create_task(app.run(shutdown_timeout_s=shutdown_timeout_s))
    try:
        await wait_until_async(lambda: task.done() or app.not_ready_reason is None)
        if task.done():
            await task  # raises why it could not start
        yield
    finally:
        app.stop()
        await task


def outcomes(app: App) -> dict[str, int]:
    """Return how many messages the handlers of a running App had done, retried and given up."""
    totals: dict[str, int] = defaultdict(int)
    for samples in app.collect():
        if samples.family is HANDLED:
            for labels, value in samples.samples:
                assert isinstance(value, int)
                totals[labels[-1]] += value
    return dict(totals)


async def topic_messages(server: Broker, topic: str) -> list[ReceivedMessage]:
    """Return all messages of a topic; none if it does not exist yet."""
    async with PullConsumer(server.namesrv_address, group="operator") as consumer:
        try:
            queues = await consumer.queues(topic)
        except NoRoute:
            return []
        return [message for queue in queues for message in await _pull_all(consumer, queue)]


async def _pull_all(consumer: PullConsumer, queue: MessageQueue) -> list[ReceivedMessage]:
    messages: list[ReceivedMessage] = []
    offset = 0
    while (result := await consumer.pull(queue, offset)).messages:
        messages += result.messages
        offset = result.next_offset
    return messages


async def wait_messages(server: Broker, topic: str, count: int) -> list[ReceivedMessage]:
    """Wait until a topic has so many messages, and return all that it has."""
    async with asyncio.timeout(WAIT_S):
        while True:
            messages = await topic_messages(server, topic)
            if len(messages) >= count:
                return messages
            await asyncio.sleep(0.05)


async def wait_dead_letters(server: Broker, group: str, count: int = 1) -> list[ReceivedMessage]:
    """Wait until a group has so many dead letters, and return them."""
    return await wait_messages(server, f"%DLQ%{group}", count)


async def wait_all_acknowledged(server: Broker, group: str, topic: str) -> None:
    """Wait until the group has acknowledged a topic; a consumer commits every five seconds."""
    async with asyncio.timeout(WAIT_S):
        while True:
            if not await unacknowledged_count(server, group, topic):
                return
            await asyncio.sleep(0.05)


async def unacknowledged_count(server: Broker, group: str, topic: str) -> int:
    """Return how many messages of a topic the group has not acknowledged."""
    async with PullConsumer(server.namesrv_address, group=group) as consumer:
        return sum(
            [
                await consumer.latest_offset(queue) - (await consumer.committed(queue) or 0)
                for queue in await consumer.queues(topic)
            ]
        )
