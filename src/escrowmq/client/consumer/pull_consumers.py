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
from escrowmq.client.consumer.broker_requests import Answering
from escrowmq.client.consumer.fetcher import Delivery, Limits, QueuePull
from escrowmq.client.consumer.offset_store import Moment, Start
from escrowmq.client.consumer.queue_client import Pulled, QueueCalls
from escrowmq.client.consumer.rebalance import Habits, Member, Strategy, average
from escrowmq.client.filters import Filter, Subscribed, Wanted, parse_filter
from escrowmq.client.heartbeat import Membership
from escrowmq.client.messages import Queue, ReceivedMessage, wrap
from escrowmq.client.producer.producer import own_address
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import LocalProtocolError, RequestRefused
from escrowmq.remoting.bodies import ConsumerEntry
from escrowmq.remoting.codes import ResponseCode

POLLED = 32


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
        subscribe: Subscribed | None = None,
        start: Start = "earliest",
        share: Strategy = average,
        auto_commit: bool = True,
        limits: Limits | None = None,
        namespace: str = "",
        clock: Clock | None = None,
        access: Access | None = None,
    ) -> None:
        self.group = group
        self._namespace = namespace
        habits = Habits(
            start=start,
            share=share,
            limits=limits or Limits(),
            namespace=namespace,
            is_active=True,
            commits=auto_commit,
        )
        answering = self._answering = Answering()
        self._member = answering.member = Member(
            servers, group, habits, answering.asked, clock, access
        )
        self._is_shared = bool(subscribe)
        for topic, wanted in (subscribe or {}).items():
            self._member.subscribe(topic, parse_filter(wanted))
        self._polled: list[tuple[QueuePull, Delivery]] = []

    # --- life ------------------------------------------------------------------------------------

    async def __aenter__(self) -> LiteConsumer:
        await self._member.begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._acknowledge()
        await self.close()

    async def close(self) -> None:
        await self._answering.close()
        await self._member.end()

    # --- which queues ----------------------------------------------------------------------------

    async def queues(self, topic: str) -> list[Queue]:
        """All of them, whoever has them now. Raises NoRoute."""
        route = await self._member.membership.routes.of(wrap(self._namespace, topic), fresh=True)
        return sorted(route.readable)

    async def assign(self, queues: Sequence[Queue], wanted: Wanted = "*") -> None:
        """These and no others; the other members are not asked."""
        if self._is_shared:
            raise LocalProtocolError("a consumer that subscribes has its queues shared out")
        found = parse_filter(wanted)
        for queue in queues:
            self._member.subscribe(queue.topic, found)
        await self._member.assign(queues)

    @property
    def assigned(self) -> list[Queue]:
        return sorted(self._member.pulls)

    # --- messages --------------------------------------------------------------------------------

    async def poll(self, timeout_s: float = 5.0, *, most: int = POLLED) -> list[ReceivedMessage]:
        """What is there, at most so many; none after so long. Acknowledges those before."""
        self._acknowledge()
        waiting = self._member.waiting
        try:
            async with asyncio.timeout(timeout_s):
                got = await waiting.get()
        except TimeoutError:
            return []
        while got is not None:
            self._polled.append(got)
            got = waiting.get_nowait() if len(self._polled) < most else None
        return [delivery.message for _, delivery in self._polled]

    def _acknowledge(self) -> None:
        for pull, delivery in self._polled:
            pull.done(delivery)
        self._polled = []

    async def commit(self) -> None:
        """Note everything that was polled. Raises TransportError or RequestRefused."""
        self._acknowledge()
        for pull in list(self._member.pulls.values()):
            await pull.commit()

    async def committed(self, queue: Queue) -> int | None:
        """What the group has noted there."""
        return await self._member.calls.committed(queue)

    # --- where to read ---------------------------------------------------------------------------

    async def seek(self, queue: Queue, offset: int) -> None:
        """Go on from there."""
        if offset < 0:
            raise ValueError("an offset is not negative")
        pull = self._pull(queue)
        self._polled = [each for each in self._polled if each[0] is not pull]
        await pull.seek(offset)

    async def seek_to_begin(self, queue: Queue) -> None:
        await self.seek(queue, await self._member.calls.earliest(queue))

    async def seek_to_end(self, queue: Queue) -> None:
        await self.seek(queue, await self._member.calls.latest(queue))

    async def seek_to_time(self, queue: Queue, moment: Moment) -> None:
        """The first that was stored then or later."""
        found = await self._member.calls.at(queue, int(moment.timestamp() * 1000))
        await self.seek(queue, found)

    def pause(self, *queues: Queue) -> None:
        """`poll` brings nothing of these until they are resumed."""
        for queue in queues:
            self._pull(queue).pause()

    def resume(self, *queues: Queue) -> None:
        for queue in queues:
            self._pull(queue).resume()

    def _pull(self, queue: Queue) -> QueuePull:
        pull = self._member.pulls.get(queue)
        if pull is None:
            raise LocalProtocolError(f"{queue} is not this consumer's: see `assigned`")
        return pull


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
