"""A member of a group: which queues are its own, and a pull for each of them.

Queues are shared out when it begins, when the broker says that somebody came or went, and now and
then. A queue that goes to another member is noted as far as it is done with, and let go. One that
comes from a member that is still there is begun a moment later, so that the other has done that.

In order: a queue is pulled only while its lock is ours. It is unlocked when the message that is
out is done with.

Which queues of a topic are whose. Every member computes the same from the same lists.

A strategy takes the queues, the ids of all members, and whose share is wanted. `average` is
RocketMQ's default. All members of a group must use the same one, those of other clients too.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from escrowmq.client.access import Access
from escrowmq.client.connection import RequestCallback
from escrowmq.client.consumer.fetcher import (
    ConsumerLimits,
    Delivery,
    DeliveryQueue,
    InFlightLimiter,
    QueueFetcher,
)
from escrowmq.client.consumer.offset_store import (
    BrokerOffsetStore,
    ConsumeFrom,
    FileOffsetStore,
    OffsetStore,
    consume_from_where,
    default_offsets_path,
)
from escrowmq.client.consumer.queue_client import QueueClient
from escrowmq.client.heartbeat import ConsumerHeartbeat, subscription_entry
from escrowmq.client.messages import MessageQueue, wrap
from escrowmq.client.producer.producer import local_address
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import EscrowError, NoRoute
from escrowmq.message.filter import FilterExpression
from escrowmq.message.names import retry_topic
from escrowmq.remoting.bodies import ConsumerEntry

AssignmentStrategy = Callable[[Sequence[MessageQueue], Sequence[str], str], list[MessageQueue]]

VIRTUAL_NODES: Final = 10


def average(
    queues: Sequence[MessageQueue], members: Sequence[str], client_id: str
) -> list[MessageQueue]:
    """Neighbouring queues go to one member; the first members get one more if it does not come
    out even."""
    ranked, ordered = sorted(set(members)), sort_queues(queues)
    if client_id not in ranked:
        return []
    at = ranked.index(client_id)
    share, rest = divmod(len(ordered), len(ranked))
    begin = at * share + min(at, rest)
    return ordered[begin : begin + share + (at < rest)]


def average_by_circle(
    queues: Sequence[MessageQueue], members: Sequence[str], client_id: str
) -> list[MessageQueue]:
    """Dealt out like cards."""
    ranked = sorted(set(members))
    return (
        sort_queues(queues)[ranked.index(client_id) :: len(ranked)] if client_id in ranked else []
    )


def machine_room(rooms: Collection[str]) -> AssignmentStrategy:
    """Only queues of brokers in these rooms: brokers that are called `room@name`."""
    wanted = frozenset(rooms)

    def share(
        queues: Sequence[MessageQueue], members: Sequence[str], me: str
    ) -> list[MessageQueue]:
        ranked = sorted(set(members))
        if me not in ranked:
            return []
        ours = [queue for queue in sort_queues(queues) if _room(queue) in wanted]
        at, size = ranked.index(me), len(ours) // len(ranked)
        mine = ours[at * size : (at + 1) * size]
        # What does not come out even is dealt from the end, one each.
        return mine + ours[size * len(ranked) + at :][:1]

    return share


def machine_room_nearby(
    room_of_broker: Callable[[str], str],
    room_of_member: Callable[[str], str],
    inner: AssignmentStrategy = average,
) -> AssignmentStrategy:
    """Queues go to members in their own room; those of a room with no member, to everybody."""

    def share(
        queues: Sequence[MessageQueue], members: Sequence[str], me: str
    ) -> list[MessageQueue]:
        if me not in members:
            return []
        rooms: dict[str, list[str]] = {}
        for member in members:
            rooms.setdefault(room_of_member(member), []).append(member)
        mine: list[MessageQueue] = []
        for room in sorted({room_of_broker(queue.broker) for queue in queues}):
            there = [queue for queue in queues if room_of_broker(queue.broker) == room]
            mine += inner(there, rooms.get(room, members), me)
        return mine

    return share


def consistent_hash(virtual_nodes: int = VIRTUAL_NODES) -> AssignmentStrategy:
    """Few queues change hands when a member comes or goes."""

    def share(
        queues: Sequence[MessageQueue], members: Sequence[str], me: str
    ) -> list[MessageQueue]:
        ring: dict[int, str] = {}
        for member in sorted(set(members)):
            for number in range(virtual_nodes):
                ring[_hash(f"{member}-{number}")] = member
        places = sorted(ring)
        mine = []
        for queue in sort_queues(queues) if me in members else ():
            at = bisect_left(places, _hash(_java_text(queue)))
            if ring[places[at % len(places)]] == me:
                mine.append(queue)
        return mine

    return share


def by_config(fixed: Collection[tuple[str, str, int]]) -> AssignmentStrategy:
    """Always these: topic, broker and number of a queue. Nothing checks that each is somebody's.
    Topics that are not named, the group's retries among them, are shared out by `average`."""
    wanted = {(topic, broker, queue_id) for topic, broker, queue_id in fixed}
    topics = {topic for topic, _, _ in wanted}

    def share(
        queues: Sequence[MessageQueue], members: Sequence[str], me: str
    ) -> list[MessageQueue]:
        named = [queue for queue in sort_queues(queues) if queue.topic in topics]
        others = [queue for queue in queues if queue.topic not in topics]
        return [queue for queue in named if queue[:3] in wanted] + average(others, members, me)

    return share


def sort_queues(queues: Sequence[MessageQueue]) -> list[MessageQueue]:
    return sorted(queues, key=lambda queue: (queue.topic, queue.broker, queue.queue_id))


def _room(queue: MessageQueue) -> str | None:
    parts = queue.broker.split("@")
    return parts[0] if len(parts) == 2 else None


def _hash(text: str) -> int:
    digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big")


def _java_text(queue: MessageQueue) -> str:
    """How RocketMQ writes a queue: what it hashes."""
    topic, broker, queue_id = queue[:3]
    return f"MessageQueue [topic={topic}, brokerName={broker}, queueId={queue_id}]"


log = logging.getLogger(__name__)

REBALANCE_INTERVAL_S: Final = 20.0
REBALANCE_MIN_INTERVAL_S: Final = 0.5  # between two times, however much news there is
REBALANCE_RETRY_S: Final = 1.0  # something is missing: a topic, a lock, an answer
COMMIT_INTERVAL_S: Final = 5.0
LOCK_INTERVAL_S: Final = 20.0  # a lock is asked for again
LOCK_TIMEOUT_S: Final = 30.0  # and is not believed in after that long without an answer
TAKEOVER_DELAY_S: Final = 1.5
RELEASE_TIMEOUT_S: Final = 20.0  # an orderly queue waits so long for the message that is out


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    """How a member consumes. `offsets`: the file of who broadcasts."""

    start: ConsumeFrom = "earliest"
    assignment: AssignmentStrategy = average
    orderly: bool = False
    broadcast: bool = False
    offsets_file: Path | None = None
    limits: ConsumerLimits = field(default_factory=ConsumerLimits)
    namespace: str = ""
    is_active: bool = False  # it asks for messages; else they are pushed to handlers
    auto_commit: bool = True  # notes now and then what is done with

    def __post_init__(self) -> None:
        consume_from_where(self.start)
        if self.orderly and self.broadcast:
            raise ValueError("a consumer is orderly or it broadcasts: each member has all queues")
        if self.offsets_file is not None and not self.broadcast:
            raise ValueError("offsets= is for broadcast=True: a group's are kept by the broker")


class Rebalancer:
    def __init__(
        self,
        servers: str | Sequence[str],
        group: str,
        settings: ConsumerSettings,
        on_request: RequestCallback,
        clock: Clock | None = None,
        access: Access | None = None,
    ) -> None:
        if not group:
            raise ValueError("a consumer has a group: say which with group=")
        self.settings = settings
        self.group = wrap(settings.namespace, group)
        self._clock = clock or SystemClock()
        self.heartbeat = ConsumerHeartbeat(
            servers,
            on_request,
            group=self.group,
            client_id=f"{local_address()}@{os.getpid()}#{secrets.token_hex(4)}",
            entry=self.consumer_entry,
            clock=self._clock,
            access=access,
        )
        self.queue_client = QueueClient(
            self.heartbeat.connect, self.group, namespace=settings.namespace
        )
        self.limiter = InFlightLimiter(settings.limits)
        self.delivery_queue: DeliveryQueue[QueueFetcher, Delivery] = DeliveryQueue(
            orderly=settings.orderly
        )
        self.fetchers: dict[MessageQueue, QueueFetcher] = {}
        self.filters: dict[str, FilterExpression] = {}
        self.rebalance_requested = asyncio.Event()
        self._version = self.started_ms = self._clock.now_ms()
        self._offset_store: OffsetStore | None = None
        self._manual_queues: list[MessageQueue] | None = None
        self._last_members: dict[str, set[str]] = {}  # by topic
        self._lock_confirmed_s: dict[MessageQueue, float] = {}
        self._releasing: dict[MessageQueue, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_first_rebalance = True
        self._rebalance_lock = asyncio.Lock()

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self.settings.broadcast:
            self._offset_store = FileOffsetStore(
                self.settings.offsets_file or default_offsets_path(self.group)
            )
        else:
            self._offset_store = BrokerOffsetStore(self.queue_client)
        try:
            if await self._rebalance():
                self.rebalance_requested.set()
        except BaseException:
            await self.close()
            raise
        loops = [self._rebalance_loop(), self.heartbeat.run()]
        if self.settings.auto_commit:
            loops.append(self._commit_loop())
        if self.settings.orderly:
            loops.append(self._lock_loop())
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    async def stop(self) -> None:
        """Pull and hand out nothing more; what is out can still be done with."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pull in self.fetchers.values():
            await pull.stop()
        self.delivery_queue.close()

    async def close(self) -> None:
        """Note what is done with, and leave the group."""
        await self.stop()
        await asyncio.gather(*self._releasing.values(), return_exceptions=True)
        if self.settings.auto_commit:
            await self.commit()
        if self.settings.orderly:
            await self.heartbeat.unlock(self.fetchers)
        for pull in self.fetchers.values():
            pull.drop()
        self.fetchers.clear()
        await self.heartbeat.leave()
        if self._offset_store is not None:
            self._offset_store.close()

    async def commit(self) -> None:
        for pull in list(self.fetchers.values()):
            await _try_commit(pull)
        if self._offset_store is not None:
            await self._offset_store.flush()

    # --- what is wanted --------------------------------------------------------------------------

    def subscribe(self, topic: str, expression: FilterExpression) -> None:
        """Also later on: then the brokers are told."""
        if not topic:
            raise ValueError("a subscription names a topic")
        self.filters[wrap(self.settings.namespace, topic)] = expression
        self._version = max(self._version + 1, self._clock.now_ms())
        for queue, pull in self.fetchers.items():
            if queue.topic == wrap(self.settings.namespace, topic):
                pull.change_filter(expression, self._version)
        self.rebalance_requested.set()

    def subscription(self, topic: str) -> FilterExpression | None:
        return self.filters.get(wrap(self.settings.namespace, topic))

    async def assign(self, queues: Sequence[MessageQueue]) -> None:
        """These and no others, whatever the other members have."""
        self._manual_queues = list(queues)
        for queue in queues:
            self.filters.setdefault(queue.topic, FilterExpression())
        async with self._rebalance_lock:
            for queue in [queue for queue in self.fetchers if queue not in queues]:
                await self._release(queue)
            self._start_fetching(set(queues) - set(self.fetchers), grace_s=0.0)

    def consumer_entry(self) -> ConsumerEntry:
        wanted = [
            subscription_entry(topic, filter, self._version)
            for topic, filter in self._subscriptions().items()
        ]
        return ConsumerEntry(
            group_name=self.group,
            consume_type="CONSUME_ACTIVELY" if self.settings.is_active else "CONSUME_PASSIVELY",
            message_model="BROADCASTING" if self.settings.broadcast else "CLUSTERING",
            consume_from_where=consume_from_where(self.settings.start),
            subscription_data_set=wanted,
        )

    def _subscriptions(self) -> dict[str, FilterExpression]:
        if self.settings.broadcast or self.settings.is_active:
            return dict(self.filters)
        # Last: its broker makes it when it hears of us for the first time.
        return {**self.filters, retry_topic(self.group): FilterExpression()}

    # --- sharing out -----------------------------------------------------------------------------

    async def _rebalance(self) -> bool:
        """Whether to look again soon."""
        async with self._rebalance_lock:
            is_soon = False
            for topic in self._subscriptions() if self._manual_queues is None else ():
                is_soon |= await self._rebalance_topic(topic)
            self._is_first_rebalance = False
            return is_soon

    async def _rebalance_topic(self, topic: str) -> bool:
        try:
            mine, shifted = await self._compute_assignment(topic)
        except NoRoute:
            return True  # nobody has sent to it yet; what we have of it, we keep
        except EscrowError as error:
            if self._is_first_rebalance:
                raise
            log.warning("queues not shared out topic=%s: %s", topic, error)
            return True
        for queue in [q for q in self.fetchers if q.topic == topic and q not in mine]:
            await self._release(queue)
        wanted = mine - set(self.fetchers) - set(self._releasing)
        if self.settings.orderly and wanted:
            wanted = await self._lock(wanted)
        self._start_fetching(wanted - shifted, grace_s=0.0)
        self._start_fetching(wanted & shifted, grace_s=TAKEOVER_DELAY_S)
        return not mine <= set(self.fetchers)

    async def _compute_assignment(self, topic: str) -> tuple[set[MessageQueue], set[MessageQueue]]:
        """Which are ours now, and which may come from a member that is still there."""
        route = await self.heartbeat.routes.get(topic, fresh=True)
        addresses = list(route.broker_addresses.values())
        if not addresses:
            raise NoRoute(f"no broker of {topic} is there")
        address = await self.heartbeat.send_heartbeats(addresses)
        if self._is_first_rebalance:
            await self.heartbeat.check_filters(address)
        if self.settings.broadcast:
            return set(route.readable_queues), set()
        members = await self.heartbeat.members(address)
        mine = set(
            self.settings.assignment(route.readable_queues, members, self.heartbeat.client_id)
        )
        before = self._last_members.get(topic, set())
        self._last_members[topic] = set(members)
        others = set(members) - {self.heartbeat.client_id}
        if self.settings.orderly or not others:
            return mine, set()  # a lock tells, or nobody is there
        if others - before:
            return mine, mine
        shifted: set[MessageQueue] = set()
        for other in others if before != set(members) else ():
            shifted.update(self.settings.assignment(route.readable_queues, sorted(before), other))
        return mine, shifted

    def _start_fetching(self, queues: set[MessageQueue], grace_s: float) -> None:
        assert self._offset_store is not None, "begin comes first"
        for queue in queues:
            pull = self.fetchers[queue] = QueueFetcher(
                queue,
                self._subscriptions().get(queue.topic, FilterExpression()),
                version=self._version,
                start=self.settings.start,
                is_new_queue=not self._is_first_rebalance,
                queue_client=self.queue_client,
                offset_store=self._offset_store,
                limiter=self.limiter,
                delivery_queue=self.delivery_queue,
            )
            pull.start(grace_s=grace_s)

    async def _release(self, queue: MessageQueue) -> None:
        pull = self.fetchers.pop(queue)
        await pull.stop()
        if not self.settings.orderly:
            if self.settings.auto_commit:
                await _try_commit(pull)
            pull.drop()
            return
        leaving = self._releasing[queue] = asyncio.create_task(self._release_orderly(pull))
        leaving.add_done_callback(lambda _: self._releasing.pop(queue, None))

    async def _release_orderly(self, fetcher: QueueFetcher) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await self.delivery_queue.wait_released(fetcher)
        await _try_commit(fetcher)
        fetcher.drop()
        self._lock_confirmed_s.pop(fetcher.queue, None)
        await self.heartbeat.unlock([fetcher.queue])

    async def _lock(self, queues: set[MessageQueue]) -> set[MessageQueue]:
        asked_s = self._clock.elapsed_s()
        answers = await self.heartbeat.lock(queues)
        for queue, is_ours in answers.items():
            self._lock_confirmed_s[queue] = asked_s if is_ours else float("-inf")
        return {queue for queue, is_ours in answers.items() if is_ours}

    # --- now and then ----------------------------------------------------------------------------

    async def _rebalance_loop(self) -> None:
        wait_s = REBALANCE_INTERVAL_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.rebalance_requested.wait()
            self.rebalance_requested.clear()
            try:
                is_soon = await self._rebalance()
            except Exception:
                log.exception("queues not shared out group=%s", self.group)
                is_soon = True
            wait_s = REBALANCE_RETRY_S if is_soon else REBALANCE_INTERVAL_S
            # Members that want different things make a broker report a change at each heartbeat.
            await asyncio.sleep(REBALANCE_MIN_INTERVAL_S)

    async def _commit_loop(self) -> None:
        while True:
            await asyncio.sleep(COMMIT_INTERVAL_S)
            await self.commit()

    async def _lock_loop(self) -> None:
        while True:
            await asyncio.sleep(LOCK_INTERVAL_S)
            async with self._rebalance_lock:
                await self._lock(set(self.fetchers))
                old_s = self._clock.elapsed_s() - LOCK_TIMEOUT_S
                lost = [queue for queue in self.fetchers if self._lock_confirmed_s[queue] <= old_s]
                for queue in lost:
                    log.warning("lock lost queue=%s", queue)
                    await self._release(queue)
            if lost:
                self.rebalance_requested.set()


async def _try_commit(fetcher: QueueFetcher) -> None:
    try:
        await fetcher.commit()
    except EscrowError as error:
        log.warning("offset not noted queue=%s: %s", fetcher.queue, error)
