"""Receive messages as a member of a group: the queues are shared out, each message goes to one.

    async with Consumer("127.0.0.1:9876", group="billing", subscribe={"orders": "*"}) as consumer:
        async for message in consumer:     # asking for the next acknowledges this one
            ...

Leaving the loop by an exception does not acknowledge the message in hand: it comes again. So does
whatever was delivered and not acknowledged when a process dies: at least once, never less.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

from escrowmq.client.access import Access
from escrowmq.client.assignment import share_evenly
from escrowmq.client.line import Line
from escrowmq.client.lines import Lines
from escrowmq.client.messages import Queue, ReceivedMessage
from escrowmq.client.producer import own_address
from escrowmq.client.pulling import ANSWER_S, QueuePull
from escrowmq.client.routes import Routes
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import EscrowError, NoRoute
from escrowmq.message.javahash import java_hash
from escrowmq.wire.bodies import (
    ConsumerEntry,
    ConsumerList,
    Heartbeat,
    SubscriptionEntry,
    decode_body,
    encode_body,
)
from escrowmq.wire.codes import RequestCode
from escrowmq.wire.fastpath import Request
from escrowmq.wire.headers_consume import ConsumerGroup, UnregisterClient
from escrowmq.wire.headers_send import ConsumerSendMessageBack

log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 30.0
REBALANCE_S: Final = 20.0
COMMIT_S: Final = 5.0
WAITING_MAX: Final = 256  # messages that are pulled and not asked for yet
FIRST, LAST = "CONSUME_FROM_FIRST_OFFSET", "CONSUME_FROM_LAST_OFFSET"


class Consumer:
    """`subscribe`: topics, each with the tags that are wanted: "*", or "a || b".

    `from_first`: where a group that has never been here begins.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        group: str,
        subscribe: Mapping[str, str],
        from_first: bool = True,
        clock: Clock | None = None,
        access: Access | None = None,
    ) -> None:
        if not subscribe:
            raise ValueError("a consumer subscribes to a topic at least")
        self.group = group
        self._from_first = from_first
        self._clock = clock or SystemClock()
        self._subscribed = {**subscribe, f"%RETRY%{group}": "*"}
        self._version = self._clock.now_ms()
        self._lines = Lines(self._asked, self._clock, access)
        self._routes = Routes(servers, self._lines, self._clock)
        self._client_id = f"{own_address()}@{os.getpid()}#{secrets.token_hex(4)}"
        self._pulls: dict[Queue, tuple[QueuePull, asyncio.Task[None]]] = {}
        self._waiting: asyncio.Queue[tuple[QueuePull, ReceivedMessage]] = asyncio.Queue(WAITING_MAX)
        self._in_hand: tuple[QueuePull, ReceivedMessage] | None = None
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # --- life ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Consumer:
        await self._rebalance()
        self._tasks = [
            asyncio.create_task(self._keep_balanced()),
            asyncio.create_task(self._keep_known()),
            asyncio.create_task(self._keep_committed()),
        ]
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
        """What was acknowledged is noted; the group is told to share out anew."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for queue in list(self._pulls):
            await self._stop(queue)
        fields = UnregisterClient(client_id=self._client_id, consumer_group=self.group)
        for line in self._lines.open_ones():
            with contextlib.suppress(EscrowError):
                await line.ask(RequestCode.UNREGISTER_CLIENT, fields, timeout_s=ANSWER_S)
        await self._lines.close()

    # --- messages --------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        return self._messages()

    async def _messages(self) -> AsyncIterator[ReceivedMessage]:
        while True:
            yield await self.receive()
            self._acknowledge()

    async def receive(self) -> ReceivedMessage:
        """The next message. Asking for it acknowledges the one before."""
        self._acknowledge()
        while True:
            pull, message = await self._waiting.get()
            if pull.queue in self._pulls:  # else the queue is somebody else's by now
                self._in_hand = pull, message
                return message

    async def later(self, message: ReceivedMessage, *, delay_level: int = 0) -> None:
        """Give it back: it comes again after a while, longer each time, and in the end it goes to
        the dead letters of the group."""
        address = next(q.address for q in self._pulls if q.broker == message.broker)
        fields = ConsumerSendMessageBack(
            offset=message.log_offset,
            group=self.group,
            delay_level=delay_level,
            origin_msg_id=message.message_id,
            origin_topic=message.topic,
            max_reconsume_times=16,
        )
        line = await self._lines.to(address)
        await line.ask(RequestCode.CONSUMER_SEND_MSG_BACK, fields, timeout_s=ANSWER_S)
        self._acknowledge()

    def _acknowledge(self) -> None:
        if self._in_hand is not None:
            pull, message = self._in_hand
            self._in_hand = None
            pull.done(message)

    async def _deliver(self, pull: QueuePull, message: ReceivedMessage) -> None:
        await self._waiting.put((pull, message))

    # --- sharing out -----------------------------------------------------------------------------

    async def _rebalance(self) -> None:
        mine: set[Queue] = set()
        for topic in self._subscribed:
            try:
                route = await self._routes.of(topic, fresh=True)
            except NoRoute:
                continue  # nobody has sent to it yet
            for address in route.addresses.values():
                await self._introduce(await self._lines.to(address))
            members = await self._members(list(route.addresses.values()))
            mine.update(share_evenly(route.readable, members, self._client_id))
        for queue in [queue for queue in self._pulls if queue not in mine]:
            await self._stop(queue)
        for queue in mine - set(self._pulls):
            self._start(queue)

    async def _members(self, addresses: Sequence[str]) -> list[str]:
        fields = ConsumerGroup(consumer_group=self.group)
        code = RequestCode.GET_CONSUMER_LIST_BY_GROUP
        line = await self._lines.to(addresses[0])
        reply = await line.ask(code, fields, timeout_s=ANSWER_S)
        return decode_body(ConsumerList, reply.body).consumer_id_list

    def _start(self, queue: Queue) -> None:
        pull = QueuePull(
            queue,
            group=self.group,
            expression=self._subscribed[queue.topic],
            version=self._version,
            from_first=self._from_first,
            line_to=self._lines.to,
            deliver=self._deliver,
        )
        self._pulls[queue] = pull, asyncio.create_task(pull.run())

    async def _stop(self, queue: Queue) -> None:
        pull, task = self._pulls.pop(queue)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(EscrowError):
            await pull.commit()

    def _asked(self, line: Line, request: Request[Any]) -> None:
        if request.head.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED:
            self._changed.set()

    # --- now and then ----------------------------------------------------------------------------

    async def _keep_balanced(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REBALANCE_S):
                    await self._changed.wait()
            self._changed.clear()
            try:
                await self._rebalance()
            except EscrowError as error:
                log.warning("queues not shared out anew group=%s: %s", self.group, error)
                await asyncio.sleep(1)
                self._changed.set()

    async def _keep_known(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for address in set(self._routes.brokers().values()):
                with contextlib.suppress(EscrowError):
                    await self._introduce(await self._lines.to(address))

    async def _keep_committed(self) -> None:
        while True:
            await asyncio.sleep(COMMIT_S)
            for pull, _ in list(self._pulls.values()):
                with contextlib.suppress(EscrowError):
                    await pull.commit()

    async def _introduce(self, line: Line) -> None:
        entries = [self._subscription(topic, tags) for topic, tags in self._subscribed.items()]
        entry = ConsumerEntry(
            group_name=self.group,
            consume_from_where=FIRST if self._from_first else LAST,
            subscription_data_set=entries,
        )
        body = encode_body(Heartbeat(client_id=self._client_id, consumer_data_set=[entry]))
        await line.ask(RequestCode.HEART_BEAT, body=body, timeout_s=ANSWER_S)

    def _subscription(self, topic: str, expression: str) -> SubscriptionEntry:
        tags = [tag.strip() for tag in expression.split("||")]
        named = [] if tags == ["*"] else tags
        return SubscriptionEntry(
            topic=topic,
            sub_string=expression,
            tags_set=named,
            code_set=[java_hash(tag) for tag in named],
            sub_version=self._version,
        )
