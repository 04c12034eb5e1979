"""Read queues by hand: which, from where, how far. Nothing happens that is not asked for.

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
from escrowmq.client.answering import Answering
from escrowmq.client.assignment import Strategy, average
from escrowmq.client.calls import Pulled, QueueCalls
from escrowmq.client.filters import Filter, Wanted, parse_filter
from escrowmq.client.membership import Membership
from escrowmq.client.messages import Queue
from escrowmq.client.namespace import wrap
from escrowmq.client.places import Moment
from escrowmq.client.producer import own_address
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import RequestRefused
from escrowmq.wire.bodies import ConsumerEntry
from escrowmq.wire.codes import ResponseCode


class PullConsumer:
    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        group: str,
        share: Strategy = average,
        namespace: str = "",
        clock: Clock | None = None,
        access: Access | None = None,
    ) -> None:
        self.group = group
        self._namespace = namespace
        self._share = share
        self._topics: set[str] = set()
        clock = clock or SystemClock()
        self._version = clock.now_ms()
        self._membership = Membership(
            servers,
            Answering().asked,
            group=wrap(namespace, group),
            client_id=f"{own_address()}@{os.getpid()}#{secrets.token_hex(4)}",
            entry=self._entry,
            clock=clock,
            access=access,
        )
        line_to = self._membership.quiet_line_to
        self._calls = QueueCalls(line_to, self._membership.group, namespace=namespace)
        self._heartbeat: asyncio.Task[None] | None = None

    async def __aenter__(self) -> PullConsumer:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            await asyncio.gather(self._heartbeat, return_exceptions=True)
        await self._membership.leave()

    # --- queues ----------------------------------------------------------------------------------

    async def queues(self, topic: str) -> list[Queue]:
        """All of a topic. Raises NoRoute."""
        name = wrap(self._namespace, topic)
        return sorted((await self._membership.routes.of(name, fresh=True)).readable)

    async def assigned(self, topic: str) -> list[Queue]:
        """Those that are this member's, if all members of the group ask so. From then on it is
        one; who only reads is not."""
        queues = await self.queues(topic)
        if self._heartbeat is None:
            self._heartbeat = asyncio.create_task(self._membership.keep_known())
        self._topics.add(wrap(self._namespace, topic))
        addresses = sorted({queue.address for queue in queues})
        address = await self._membership.introduce(addresses)
        members = await self._membership.members(address)
        return self._share(queues, members, self._membership.client_id)

    # --- messages --------------------------------------------------------------------------------

    async def pull(
        self,
        queue: Queue,
        offset: int,
        wanted: Wanted = "*",
        *,
        most: int = 32,
        wait_s: float = 0.0,
    ) -> Pulled:
        """What is there from this offset on, and where to go on. If there is nothing, the broker
        waits so long for something to come."""
        found = parse_filter(wanted)
        return await self._calls.pull(queue, offset, found, most=most, hold_s=wait_s)

    # --- offsets ---------------------------------------------------------------------------------

    async def committed(self, queue: Queue) -> int | None:
        """Where the group goes on; None if it was never here."""
        return await self._calls.committed(queue)

    async def commit(self, queue: Queue, offset: int) -> None:
        """`offset` is that of the next message to read."""
        if offset < 0:
            raise ValueError("an offset is not negative")
        try:
            await self._calls.commit(queue, offset)
        except RequestRefused as error:
            if error.code != ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
                raise
            await self._membership.make_group(queue.address)  # nobody is in it yet
            await self._calls.commit(queue, offset)

    async def earliest(self, queue: Queue) -> int:
        return await self._calls.earliest(queue)

    async def latest(self, queue: Queue) -> int:
        """That of the next message to come."""
        return await self._calls.latest(queue)

    async def at(self, queue: Queue, moment: Moment) -> int:
        """That of the first message stored then or later."""
        return await self._calls.at(queue, int(moment.timestamp() * 1000))

    def _entry(self) -> ConsumerEntry:
        return ConsumerEntry(
            group_name=self._membership.group,
            consume_type="CONSUME_ACTIVELY",
            subscription_data_set=[
                Filter().entry(topic, self._version) for topic in sorted(self._topics)
            ],
        )
