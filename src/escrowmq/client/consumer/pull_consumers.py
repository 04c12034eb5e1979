"""Ask for messages in batches, and say where to read: a consumer between push and pull.

async with LiteConsumer("127.0.0.1:9876", group="report", subscribe={"orders": "*"}) as lite:
    while messages := await lite.poll(timeout_s=5):
        ...                            # asking for the next acknowledges these

Read queues by hand: which, from where, how far. Nothing happens that is not asked for.

async with PullConsumer("127.0.0.1:9876", group="audit") as puller:
    for queue in await puller.queues("orders"):
        offset = await puller.committed(queue) or 0
        messages, offset, *_ = await puller.pull(queue, offset)
        await puller.commit(queue, offset)
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Sequence
from types import TracebackType

from escrowmq.client.access import Access
from escrowmq.client.consumer.broker_requests import BrokerRequests
from escrowmq.client.consumer.fetcher import ConsumerLimits, Delivery, QueueFetcher
from escrowmq.client.consumer.offset_store import ConsumeFrom, SupportsTimestamp
from escrowmq.client.consumer.queue_client import PullResult, QueueClient
from escrowmq.client.consumer.rebalance import (
    AssignmentStrategy,
    ConsumerSettings,
    Rebalancer,
    average,
)
from escrowmq.client.heartbeat import ConsumerHeartbeat, subscription_entry
from escrowmq.client.messages import MessageQueue, ReceivedMessage, wrap
from escrowmq.client.producer.producer import local_address
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import LocalProtocolError, RequestRefused
from escrowmq.message.filter import FilterExpression, FilterLike, Subscriptions, parse_filter
from escrowmq.remoting.bodies import ConsumerEntry
from escrowmq.remoting.codes import ResponseCode

POLL_BATCH_SIZE = 32


class LiteConsumer:
    """Queues are shared out among the group (`subscribe`), or taken by hand (`assign`).

    `auto_commit`: what was polled before is noted every five seconds and at the end. Without it,
    nothing is noted until `commit` is called.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        group: str,
        subscribe: Subscriptions | None = None,
        start: ConsumeFrom = "earliest",
        assignment: AssignmentStrategy = average,
        auto_commit: bool = True,
        limits: ConsumerLimits | None = None,
        namespace: str = "",
        clock: Clock | None = None,
        access: Access | None = None,
    ) -> None:
        self.group = group
        self._namespace = namespace
        habits = ConsumerSettings(
            start=start,
            assignment=assignment,
            limits=limits or ConsumerLimits(),
            namespace=namespace,
            is_active=True,
            auto_commit=auto_commit,
        )
        answering = self._broker_requests = BrokerRequests()
        self._rebalancer = answering.rebalancer = Rebalancer(
            servers, group, habits, answering.on_request, clock, access
        )
        self._is_subscribed = bool(subscribe)
        for topic, wanted in (subscribe or {}).items():
            self._rebalancer.subscribe(topic, parse_filter(wanted))
        self._unacknowledged: list[tuple[QueueFetcher, Delivery]] = []

    # --- life ------------------------------------------------------------------------------------

    async def __aenter__(self) -> LiteConsumer:
        await self._rebalancer.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is None:
            self._acknowledge()
        await self.close()

    async def close(self) -> None:
        await self._broker_requests.close()
        await self._rebalancer.close()

    # --- which queues ----------------------------------------------------------------------------

    async def queues(self, topic: str) -> list[MessageQueue]:
        """All of them, whoever has them now. Raises NoRoute."""
        route = await self._rebalancer.heartbeat.routes.get(
            wrap(self._namespace, topic), fresh=True
        )
        return sorted(route.readable_queues)

    async def assign(self, queues: Sequence[MessageQueue], expression: FilterLike = "*") -> None:
        """These and no others; the other members are not asked."""
        if self._is_subscribed:
            raise LocalProtocolError("a consumer that subscribes has its queues shared out")
        found = parse_filter(expression)
        for queue in queues:
            self._rebalancer.subscribe(queue.topic, found)
        await self._rebalancer.assign(queues)

    @property
    def assigned_queues(self) -> list[MessageQueue]:
        return sorted(self._rebalancer.fetchers)

    # --- messages --------------------------------------------------------------------------------

    async def poll(
        self, timeout_s: float = 5.0, *, max_messages: int = POLL_BATCH_SIZE
    ) -> list[ReceivedMessage]:
        """What is there, at most so many; none after so long. Acknowledges those before."""
        self._acknowledge()
        waiting = self._rebalancer.delivery_queue
        try:
            async with asyncio.timeout(timeout_s):
                got = await waiting.get()
        except TimeoutError:
            return []
        while got is not None:
            self._unacknowledged.append(got)
            got = waiting.get_nowait() if len(self._unacknowledged) < max_messages else None
        return [delivery.message for _, delivery in self._unacknowledged]

    def _acknowledge(self) -> None:
        for pull, delivery in self._unacknowledged:
            pull.mark_done(delivery)
        self._unacknowledged = []

    async def commit(self) -> None:
        """Note everything that was polled. Raises TransportError or RequestRefused."""
        self._acknowledge()
        for pull in list(self._rebalancer.fetchers.values()):
            await pull.commit()

    async def committed(self, queue: MessageQueue) -> int | None:
        """What the group has noted there."""
        return await self._rebalancer.queue_client.committed(queue)

    # --- where to read ---------------------------------------------------------------------------

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Go on from there."""
        if offset < 0:
            raise ValueError("an offset is not negative")
        pull = self._fetcher(queue)
        self._unacknowledged = [each for each in self._unacknowledged if each[0] is not pull]
        await pull.seek(offset)

    async def seek_to_begin(self, queue: MessageQueue) -> None:
        await self.seek(queue, await self._rebalancer.queue_client.earliest_offset(queue))

    async def seek_to_end(self, queue: MessageQueue) -> None:
        await self.seek(queue, await self._rebalancer.queue_client.latest_offset(queue))

    async def seek_to_time(self, queue: MessageQueue, moment: SupportsTimestamp) -> None:
        """The first that was stored then or later."""
        found = await self._rebalancer.queue_client.offset_at_time(
            queue, int(moment.timestamp() * 1000)
        )
        await self.seek(queue, found)

    def pause(self, *queues: MessageQueue) -> None:
        """`poll` brings nothing of these until they are resumed."""
        for queue in queues:
            self._fetcher(queue).pause()

    def resume(self, *queues: MessageQueue) -> None:
        for queue in queues:
            self._fetcher(queue).resume()

    def _fetcher(self, queue: MessageQueue) -> QueueFetcher:
        pull = self._rebalancer.fetchers.get(queue)
        if pull is None:
            raise LocalProtocolError(f"{queue} is not this consumer's: see `assigned`")
        return pull


class PullConsumer:
    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        group: str,
        assignment: AssignmentStrategy = average,
        namespace: str = "",
        clock: Clock | None = None,
        access: Access | None = None,
    ) -> None:
        self.group = group
        self._namespace = namespace
        self._assignment = assignment
        self._topics: set[str] = set()
        clock = clock or SystemClock()
        self._version = clock.now_ms()
        self._consumer_heartbeat = ConsumerHeartbeat(
            servers,
            BrokerRequests().on_request,
            group=wrap(namespace, group),
            client_id=f"{local_address()}@{os.getpid()}#{secrets.token_hex(4)}",
            entry=self._consumer_entry,
            clock=clock,
            access=access,
        )
        line_to = self._consumer_heartbeat.connect_without_heartbeat
        self._queue_client = QueueClient(
            line_to, self._consumer_heartbeat.group, namespace=namespace
        )
        self._heartbeat_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> PullConsumer:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._heartbeat_task is not None:
            self._heartbeat_task.cancel()
            await asyncio.gather(self._heartbeat_task, return_exceptions=True)
        await self._consumer_heartbeat.leave()

    # --- queues ----------------------------------------------------------------------------------

    async def queues(self, topic: str) -> list[MessageQueue]:
        """All of a topic. Raises NoRoute."""
        name = wrap(self._namespace, topic)
        return sorted((await self._consumer_heartbeat.routes.get(name, fresh=True)).readable_queues)

    async def assigned_queues(self, topic: str) -> list[MessageQueue]:
        """Those that are this member's, if all members of the group ask so. From then on it is
        one; who only reads is not."""
        queues = await self.queues(topic)
        if self._heartbeat_task is None:
            self._heartbeat_task = asyncio.create_task(self._consumer_heartbeat.run())
        self._topics.add(wrap(self._namespace, topic))
        addresses = sorted({queue.address for queue in queues})
        address = await self._consumer_heartbeat.send_heartbeats(addresses)
        members = await self._consumer_heartbeat.members(address)
        return self._assignment(queues, members, self._consumer_heartbeat.client_id)

    # --- messages --------------------------------------------------------------------------------

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        expression: FilterLike = "*",
        *,
        max_messages: int = 32,
        wait_s: float = 0.0,
    ) -> PullResult:
        """What is there from this offset on, and where to go on. If there is nothing, the broker
        waits so long for something to come."""
        found = parse_filter(expression)
        return await self._queue_client.pull(
            queue, offset, found, max_messages=max_messages, hold_s=wait_s
        )

    # --- offsets ---------------------------------------------------------------------------------

    async def committed(self, queue: MessageQueue) -> int | None:
        """Where the group goes on; None if it was never here."""
        return await self._queue_client.committed(queue)

    async def commit(self, queue: MessageQueue, offset: int) -> None:
        """`offset` is that of the next message to read."""
        if offset < 0:
            raise ValueError("an offset is not negative")
        try:
            await self._queue_client.commit(queue, offset)
        except RequestRefused as error:
            if error.code != ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
                raise
            await self._consumer_heartbeat.create_group(queue.address)  # nobody is in it yet
            await self._queue_client.commit(queue, offset)

    async def earliest_offset(self, queue: MessageQueue) -> int:
        return await self._queue_client.earliest_offset(queue)

    async def latest_offset(self, queue: MessageQueue) -> int:
        """That of the next message to come."""
        return await self._queue_client.latest_offset(queue)

    async def offset_at_time(self, queue: MessageQueue, moment: SupportsTimestamp) -> int:
        """That of the first message stored then or later."""
        return await self._queue_client.offset_at_time(queue, int(moment.timestamp() * 1000))

    def _consumer_entry(self) -> ConsumerEntry:
        return ConsumerEntry(
            group_name=self._consumer_heartbeat.group,
            consume_type="CONSUME_ACTIVELY",
            subscription_data_set=[
                subscription_entry(topic, FilterExpression(), self._version)
                for topic in sorted(self._topics)
            ],
        )
