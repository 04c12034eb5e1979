"""Consumers that the application drives: LiteConsumer polls batches, PullConsumer reads queues."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Final

from escrowmq.client.access import Access
from escrowmq.client.callbacks import keep_running, wait_for_close
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
from escrowmq.client.heartbeat import ConsumerHeartbeat, new_client_id, subscription_entry
from escrowmq.client.messages import MessageQueue, Namespace, ReceivedMessage
from escrowmq.client.mistakes import (
    AsyncioClient,
    check_group,
    check_seconds,
    short_traceback,
)
from escrowmq.client.termination import termination
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import ClientClosed, LocalProtocolError, RequestRefused
from escrowmq.message.filter import (
    FilterExpression,
    FilterLike,
    Subscriptions,
    parse_filter,
    parse_subscriptions,
)
from escrowmq.parsing import suggest_arguments
from escrowmq.remoting.bodies import ConsumerEntry
from escrowmq.remoting.codes import ResponseCode

POLL_BATCH_SIZE: Final = 32


@suggest_arguments
class LiteConsumer(AsyncioClient):
    """A consumer that is polled for batches and can seek.

        async with LiteConsumer(servers, group="report", subscribe={"orders": "*"}) as consumer:
            while messages := await consumer.poll(timeout_s=5):
                ...                    # the next poll acknowledges these

    The queues of subscribed topics are divided among the members of the group. Without
    `subscribe`, `assign` takes queues by hand, and other members are ignored.

    `servers`: addresses of name servers, "127.0.0.1:9876" or several.
    `start`: where a group without committed offsets starts: "earliest", "latest" or a datetime.
    `assignment`: how queues are divided, see `escrowmq.client.consumer.rebalance`.
    `auto_commit`: commit acknowledged messages every five seconds and at the end. Without it,
    only `commit` does.
    `limits`: how many messages are kept in memory.
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
        self._namespace = Namespace(namespace)
        settings = ConsumerSettings(
            start=start,
            assignment=assignment,
            limits=limits or ConsumerLimits(),
            namespace=self._namespace,
            is_active=True,
            auto_commit=auto_commit,
        )
        self._broker_requests = BrokerRequests()
        self._rebalancer = self._broker_requests.rebalancer = Rebalancer(
            servers, group, settings, self._broker_requests.on_request, clock, access
        )
        subscriptions = parse_subscriptions(subscribe)
        self._is_subscribed = bool(subscriptions)
        for topic, expression in subscriptions.items():
            self._rebalancer.subscribe(topic, expression)
        self._unacknowledged: list[tuple[QueueFetcher, Delivery]] = []
        self._is_started = False

    # --- start and stop --------------------------------------------------------------------------

    @short_traceback
    async def __aenter__(self) -> LiteConsumer:
        self._rebalancer.heartbeat.check_usable()
        if not self._is_started:
            self._is_started = True
            await self._rebalancer.start()
            termination.watch(self)
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
        """Leave the group and disconnect. Commits first, unless `auto_commit` is off."""
        try:
            await wait_for_close(asyncio.create_task(self._close()), self._close)
        finally:
            await termination.unwatch_async(self)

    async def _close(self) -> None:
        await self._broker_requests.close()
        await self._rebalancer.close()

    # --- queues ----------------------------------------------------------------------------------

    @short_traceback
    async def queues(self, topic: str) -> list[MessageQueue]:
        """Return all queues of a topic, whichever member has them. Raises NoRoute."""
        routes = self._rebalancer.heartbeat.routes
        route = await routes.get_existing(self._namespace.wrap(topic))
        return sorted(route.readable_queues)

    async def assign(self, queues: Sequence[MessageQueue], expression: FilterLike = "*") -> None:
        """Read exactly these queues, whatever other members read.

        Raises LocalProtocolError if the consumer subscribes to topics, and ClientClosed if it was
        not started.
        """
        if self._is_subscribed:
            raise LocalProtocolError(
                "assign() cannot be combined with subscribe=: the group divides the queues"
            )
        self._check_started()
        parsed = parse_filter(expression)
        for queue in queues:
            self._rebalancer.subscribe(queue.topic, parsed)
        await self._rebalancer.assign(queues)

    @property
    def assigned_queues(self) -> list[MessageQueue]:
        """The queues that this consumer reads now."""
        return sorted(self._rebalancer.fetchers)

    # --- messages --------------------------------------------------------------------------------

    async def poll(
        self, timeout_s: float = 5.0, *, max_messages: int = POLL_BATCH_SIZE
    ) -> list[ReceivedMessage]:
        """Return up to `max_messages` messages; an empty list if none came within `timeout_s`.

        Acknowledges the messages of the poll before. Raises ClientClosed if the consumer is closed
        or was not started, and LocalProtocolError if it neither subscribes to a topic nor has
        assigned queues.
        """
        check_seconds("timeout_s", timeout_s)
        self._check_started()
        if not self._rebalancer.filters:
            raise LocalProtocolError(
                "this consumer reads nothing: give subscribe=, or choose queues with assign()"
            )
        self._acknowledge()
        await termination.check_async(self)
        entries = await self._rebalancer.delivery_queue.get_batch(max_messages, timeout_s)
        if entries is None:
            raise ClientClosed("the consumer is closed; create a new one to receive more")
        self._unacknowledged = entries
        return [delivery.message for _, delivery in self._unacknowledged]

    def _check_started(self) -> None:
        if not self._is_started:
            raise ClientClosed(
                "this consumer is not started: use it in a block, `async with LiteConsumer(…) as "
                "consumer:`, or a plain `with` if it is from escrowmq.blocking"
            )
        self._rebalancer.heartbeat.check_owner()

    @property
    def has_messages_in_hand(self) -> bool:
        """Whether messages were polled and are not acknowledged yet."""
        return bool(self._unacknowledged)

    def _acknowledge(self) -> None:
        for fetcher, delivery in self._unacknowledged:
            fetcher.mark_done(delivery)
        self._unacknowledged = []

    @short_traceback
    async def commit(self) -> None:
        """Acknowledge and commit all messages polled. Raises TransportError or RequestRefused."""
        self._acknowledge()
        for fetcher in list(self._rebalancer.fetchers.values()):
            await fetcher.commit()

    @short_traceback
    async def committed(self, queue: MessageQueue) -> int | None:
        """Return the queue offset that the group committed; None if it never did."""
        return await self._rebalancer.queue_client.committed(queue)

    # --- positions -------------------------------------------------------------------------------

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Continue at a queue offset. Messages of the queue polled before are not acknowledged.

        Raises LocalProtocolError if the queue is not in `assigned_queues`.
        """
        if offset < 0:
            raise ValueError(f"an offset cannot be negative, got {offset}")
        fetcher = self._fetcher(queue)
        self._unacknowledged = [entry for entry in self._unacknowledged if entry[0] is not fetcher]
        await fetcher.seek(offset)

    @short_traceback
    async def seek_to_begin(self, queue: MessageQueue) -> None:
        """Continue at the oldest message of a queue."""
        await self.seek(queue, await self._rebalancer.queue_client.earliest_offset(queue))

    @short_traceback
    async def seek_to_end(self, queue: MessageQueue) -> None:
        """Skip all messages that are in a queue now."""
        await self.seek(queue, await self._rebalancer.queue_client.latest_offset(queue))

    @short_traceback
    async def seek_to_time(self, queue: MessageQueue, moment: SupportsTimestamp) -> None:
        """Continue at the first message that was stored at that time or later."""
        offset = await self._rebalancer.queue_client.offset_at_time(
            queue, int(moment.timestamp() * 1000)
        )
        await self.seek(queue, offset)

    def pause(self, *queues: MessageQueue) -> None:
        """Make `poll` return no messages of these queues until `resume`."""
        for queue in queues:
            self._fetcher(queue).pause()

    def resume(self, *queues: MessageQueue) -> None:
        """Undo `pause`."""
        for queue in queues:
            self._fetcher(queue).resume()

    def _fetcher(self, queue: MessageQueue) -> QueueFetcher:
        fetcher = self._rebalancer.fetchers.get(queue)
        if fetcher is None:
            raise LocalProtocolError(
                f"queue {queue} is not assigned to this consumer; see assigned_queues"
            )
        return fetcher


@suggest_arguments
class PullConsumer(AsyncioClient):
    """A consumer that reads queues by hand: which, from where, how much.

        async with PullConsumer(servers, group="audit") as consumer:
            for queue in await consumer.queues("orders"):
                offset = await consumer.committed(queue) or 0
                result = await consumer.pull(queue, offset)
                ...
                await consumer.commit(queue, result.next_offset)

    It joins the group only if `assigned_queues` is called. Parameters are as in LiteConsumer.
    Methods raise TransportError or RequestRefused if a broker does not respond or refuses.
    """

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
        check_group(group)
        self.group = group
        self._namespace = Namespace(namespace)
        self._assignment = assignment
        self._topics: set[str] = set()
        clock = clock or SystemClock()
        self._version = clock.now_ms()
        self._heartbeat = ConsumerHeartbeat(
            servers,
            BrokerRequests().on_request,
            group=self._namespace.wrap(group),
            client_id=new_client_id(),
            entry=self._consumer_entry,
            clock=clock,
            access=access,
        )
        self._queue_client = QueueClient(
            self._heartbeat.connect_without_heartbeat,
            self._heartbeat.group,
            namespace=self._namespace,
        )
        self._heartbeat_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> PullConsumer:
        self._heartbeat.check_usable()
        termination.watch(self)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Leave the group if it was joined, and disconnect. Nothing is committed."""
        if self._heartbeat_task is not None:
            self._heartbeat_task.cancel()
            await asyncio.gather(self._heartbeat_task, return_exceptions=True)
        try:
            await self._heartbeat.leave()
        finally:
            await termination.unwatch_async(self)

    # --- queues ----------------------------------------------------------------------------------

    @short_traceback
    async def queues(self, topic: str) -> list[MessageQueue]:
        """Return all queues of a topic. Raises NoRoute."""
        route = await self._heartbeat.routes.get_existing(self._namespace.wrap(topic))
        return sorted(route.readable_queues)

    @short_traceback
    async def assigned_queues(self, topic: str) -> list[MessageQueue]:
        """Join the group, and return this member's share of the queues of a topic.

        The shares do not overlap if all members of the group use this method. Call it again from
        time to time: the share changes when members join or leave.
        """
        queues = await self.queues(topic)
        if self._heartbeat_task is None:
            self._heartbeat_task = asyncio.create_task(
                keep_running("heartbeat", self._heartbeat.run)
            )
        self._topics.add(self._namespace.wrap(topic))
        masters = self._heartbeat.routes.master_addresses
        addresses = sorted({masters[queue.broker] for queue in queues})
        address = await self._heartbeat.send_heartbeats(addresses)
        members = await self._heartbeat.members(address)
        return self._assignment(queues, members, self._heartbeat.client_id)

    # --- messages --------------------------------------------------------------------------------

    @short_traceback
    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        expression: FilterLike = "*",
        *,
        max_messages: int = 32,
        wait_s: float = 0.0,
    ) -> PullResult:
        """Pull messages from a queue offset on.

        If there are none, the broker waits up to `wait_s` seconds for one. Continue at
        `next_offset` of the result, also if it has no messages.
        """
        return await self._queue_client.pull(
            queue, offset, parse_filter(expression), max_messages=max_messages, hold_s=wait_s
        )

    # --- offsets ---------------------------------------------------------------------------------

    @short_traceback
    async def committed(self, queue: MessageQueue) -> int | None:
        """Return the queue offset that the group committed; None if it never did."""
        return await self._queue_client.committed(queue)

    @short_traceback
    async def commit(self, queue: MessageQueue, offset: int) -> None:
        """Commit the queue offset of the next message to read. Creates the group if needed."""
        if offset < 0:
            raise ValueError(f"an offset cannot be negative, got {offset}")
        try:
            await self._queue_client.commit(queue, offset)
        except RequestRefused as error:
            if error.code != ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
                raise
            await self._heartbeat.create_group(queue)
            await self._queue_client.commit(queue, offset)

    @short_traceback
    async def earliest_offset(self, queue: MessageQueue) -> int:
        """Return the queue offset of the oldest message."""
        return await self._queue_client.earliest_offset(queue)

    @short_traceback
    async def latest_offset(self, queue: MessageQueue) -> int:
        """Return the queue offset of the next message that will be stored."""
        return await self._queue_client.latest_offset(queue)

    @short_traceback
    async def offset_at_time(self, queue: MessageQueue, moment: SupportsTimestamp) -> int:
        """Return the queue offset of the first message stored at that time or later."""
        return await self._queue_client.offset_at_time(queue, int(moment.timestamp() * 1000))

    @property
    def has_messages_in_hand(self) -> bool:
        """False, because the application commits by itself: nothing is known here."""
        return False

    def _consumer_entry(self) -> ConsumerEntry:
        return ConsumerEntry(
            group_name=self._heartbeat.group,
            consume_type="CONSUME_ACTIVELY",
            subscription_data_set=[
                subscription_entry(topic, FilterExpression(), self._version)
                for topic in sorted(self._topics)
            ],
        )
