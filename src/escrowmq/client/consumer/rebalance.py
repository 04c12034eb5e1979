"""Rebalance: decide which queues this member of a group consumes, and run a fetcher for each.

Every member computes the assignment by itself from the same two lists, the queues of a topic and
the members of the group, so no member has to be asked. It is computed at the start, when a broker
reports that a member joined or left, and every 20 seconds.

A queue that goes to another member is committed and dropped. A queue that may come from a member
that still runs is started a moment later, so that this member has time to commit.

An orderly consumer fetches a queue only while it holds the queue's lock, and unlocks it when the
message it has delivered is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from escrowmq.client.access import Access
from escrowmq.client.callbacks import keep_running
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
from escrowmq.client.heartbeat import ConsumerHeartbeat, new_client_id, subscription_entry
from escrowmq.client.messages import MessageQueue, Namespace
from escrowmq.client.mistakes import check_group
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import EscrowError, NoRoute
from escrowmq.limited_log import RepeatedLog
from escrowmq.message.filter import FilterExpression, check_topic
from escrowmq.message.names import is_group_topic, retry_topic
from escrowmq.remoting.bodies import ConsumerEntry

log = logging.getLogger(__name__)

REBALANCE_INTERVAL_S: Final = 20.0
REBALANCE_MIN_INTERVAL_S: Final = 0.5  # however often a broker reports changes
REBALANCE_RETRY_S: Final = 1.0  # after a topic, a lock or a response was missing
COMMIT_INTERVAL_S: Final = 5.0
LOCK_INTERVAL_S: Final = 20.0  # how often a lock is extended
LOCK_TIMEOUT_S: Final = 30.0  # a lock that could not be extended for so long counts as lost
TAKEOVER_DELAY_S: Final = 1.5  # before a queue of a running member is started
RELEASE_TIMEOUT_S: Final = 20.0  # how long an orderly queue waits for the delivered message
VIRTUAL_NODES: Final = 10

# --- assignment strategies -----------------------------------------------------------------------
#
# A strategy gets all queues of a topic, the client ids of all members, and the client id whose
# queues to return. All members of a group must use the same strategy, including those that run
# another client of RocketMQ: these use `average` unless configured otherwise.

AssignmentStrategy = Callable[[Sequence[MessageQueue], Sequence[str], str], list[MessageQueue]]


def average(
    queues: Sequence[MessageQueue], members: Sequence[str], client_id: str
) -> list[MessageQueue]:
    """Assign neighbouring queues to the same member. The first members get the remainder."""
    ranked, ordered = sorted(set(members)), sorted(queues)
    if client_id not in ranked:
        return []
    rank = ranked.index(client_id)
    size, remainder = divmod(len(ordered), len(ranked))
    begin = rank * size + min(rank, remainder)
    return ordered[begin : begin + size + (rank < remainder)]


def average_by_circle(
    queues: Sequence[MessageQueue], members: Sequence[str], client_id: str
) -> list[MessageQueue]:
    """Assign queues to the members in turn."""
    ranked = sorted(set(members))
    if client_id not in ranked:
        return []
    return sorted(queues)[ranked.index(client_id) :: len(ranked)]


def machine_room(rooms: Collection[str]) -> AssignmentStrategy:
    """Assign only queues of brokers in these rooms. Brokers must be named `room@name`."""
    allowed = frozenset(rooms)

    def assign(
        queues: Sequence[MessageQueue], members: Sequence[str], client_id: str
    ) -> list[MessageQueue]:
        ranked = sorted(set(members))
        if client_id not in ranked:
            return []
        candidates = [queue for queue in sorted(queues) if _room(queue) in allowed]
        rank, size = ranked.index(client_id), len(candidates) // len(ranked)
        own_queues = candidates[rank * size : (rank + 1) * size]
        # The remainder is assigned one by one from the end, as RocketMQ does it.
        return own_queues + candidates[size * len(ranked) + rank :][:1]

    return assign


def machine_room_nearby(
    room_of_broker: Callable[[str], str],
    room_of_member: Callable[[str], str],
    inner: AssignmentStrategy = average,
) -> AssignmentStrategy:
    """Assign queues to members in the broker's room, or to all members if that room has none."""

    def assign(
        queues: Sequence[MessageQueue], members: Sequence[str], client_id: str
    ) -> list[MessageQueue]:
        if client_id not in members:
            return []
        members_by_room: dict[str, list[str]] = {}
        for member in members:
            members_by_room.setdefault(room_of_member(member), []).append(member)
        own_queues: list[MessageQueue] = []
        for room in sorted({room_of_broker(queue.broker) for queue in queues}):
            room_queues = [queue for queue in queues if room_of_broker(queue.broker) == room]
            own_queues += inner(room_queues, members_by_room.get(room, members), client_id)
        return own_queues

    return assign


def consistent_hash(virtual_nodes: int = VIRTUAL_NODES) -> AssignmentStrategy:
    """Assign queues by consistent hashing: few queues move when a member joins or leaves."""

    def assign(
        queues: Sequence[MessageQueue], members: Sequence[str], client_id: str
    ) -> list[MessageQueue]:
        ring: dict[int, str] = {}
        for member in sorted(set(members)):
            for number in range(virtual_nodes):
                ring[_hash(f"{member}-{number}")] = member
        points = sorted(ring)
        own_queues = []
        for queue in sorted(queues) if client_id in members else ():
            index = bisect_left(points, _hash(_java_text(queue)))
            if ring[points[index % len(points)]] == client_id:
                own_queues.append(queue)
        return own_queues

    return assign


def by_config(fixed: Collection[tuple[str, str, int]]) -> AssignmentStrategy:
    """Assign fixed queues, each a MessageQueue or (topic, broker, queue id).

    Nothing checks that the members together cover all queues. Topics that do not occur in
    `fixed`, such as the group's retry topic, are assigned by `average`.
    """
    fixed_queues = {(topic, broker, queue_id) for topic, broker, queue_id in fixed}
    fixed_topics = {topic for topic, _, _ in fixed_queues}

    def assign(
        queues: Sequence[MessageQueue], members: Sequence[str], client_id: str
    ) -> list[MessageQueue]:
        others = [queue for queue in queues if queue.topic not in fixed_topics]
        own_queues = [queue for queue in sorted(queues) if queue in fixed_queues]
        return own_queues + average(others, members, client_id)

    return assign


def _room(queue: MessageQueue) -> str | None:
    parts = queue.broker.split("@")
    return parts[0] if len(parts) == 2 else None


def _hash(text: str) -> int:
    digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big")


def _java_text(queue: MessageQueue) -> str:
    """Return RocketMQ's text of a queue, which its clients hash."""
    topic, broker, queue_id = queue
    return f"MessageQueue [topic={topic}, brokerName={broker}, queueId={queue_id}]"


# --- the rebalancer ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    """How a member consumes. Raises ValueError for settings that exclude each other."""

    start: ConsumeFrom = "earliest"
    assignment: AssignmentStrategy = average
    orderly: bool = False
    broadcast: bool = False
    offsets_file: Path | None = None  # of a broadcast consumer
    limits: ConsumerLimits = field(default_factory=ConsumerLimits)
    namespace: Namespace = field(default_factory=Namespace)
    is_active: bool = False  # the application polls; otherwise messages are pushed to it
    auto_commit: bool = True

    def __post_init__(self) -> None:
        consume_from_where(self.start)
        if self.orderly and self.broadcast:
            raise ValueError(
                "orderly and broadcast exclude each other: a queue cannot be locked by one member "
                "if every member reads it"
            )
        if self.offsets_file is not None and not self.broadcast:
            raise ValueError(
                "offsets_file= needs broadcast=True; the broker stores the offsets of a group"
            )


class Rebalancer:
    """One member of a consumer group: its subscriptions, its queues and their fetchers.

    Messages arrive in `delivery_queue`. Setting `rebalance_requested` starts a rebalance soon.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        group: str,
        settings: ConsumerSettings,
        on_request: RequestCallback,
        clock: Clock | None = None,
        access: Access | None = None,
    ) -> None:
        check_group(group)
        self.settings = settings
        self.group = settings.namespace.wrap(group)
        self._clock = clock or SystemClock()
        self._topic_log = RepeatedLog(log)  # topics that do not exist, or cannot be read
        self._pull_log = RepeatedLog(log)  # pulls that fail
        self.heartbeat = ConsumerHeartbeat(
            servers,
            on_request,
            group=self.group,
            client_id=new_client_id(),
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
        self.filters: dict[str, FilterExpression] = {}  # by topic
        self.rebalance_requested = asyncio.Event()
        self._version = self.started_ms = self._clock.now_ms()  # of the subscriptions
        self._offset_store: OffsetStore | None = None
        self._manual_queues: list[MessageQueue] | None = None
        self._last_members: dict[str, set[str]] = {}  # by topic
        self._lock_confirmed_s: dict[MessageQueue, float] = {}
        self._releasing: dict[MessageQueue, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_first_rebalance = True
        self._rebalance_lock = asyncio.Lock()

    # --- start and stop --------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the group, start fetching and start the background tasks.

        Raises TransportError, RequestRefused, InvalidSubscription, or ConfigError for the file
        of offsets.
        """
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
        loops = {"rebalance": self._rebalance_loop, "heartbeat": self.heartbeat.run}
        if self.settings.auto_commit:
            loops["commit"] = self._commit_loop
        if self.settings.orderly:
            loops["lock"] = self._lock_loop
        self._tasks = [asyncio.create_task(keep_running(*loop)) for loop in loops.items()]

    async def stop(self) -> None:
        """Stop pulling and delivering. Delivered messages can still be marked done."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for fetcher in self.fetchers.values():
            await fetcher.stop()
        self.delivery_queue.close()

    async def close(self) -> None:
        """Stop, commit what is done, and leave the group."""
        await self.stop()
        await asyncio.gather(*self._releasing.values(), return_exceptions=True)
        if self.settings.auto_commit:
            await self.commit()
        if self.settings.orderly:
            await self.heartbeat.unlock(self.fetchers)
        for fetcher in self.fetchers.values():
            fetcher.drop()
        self.fetchers.clear()
        await self.heartbeat.leave()
        if self._offset_store is not None:
            self._offset_store.close()

    async def commit(self) -> None:
        """Commit all queues. A failure is logged; the next commit tries again."""
        for fetcher in list(self.fetchers.values()):
            await _try_commit(fetcher)
        if self._offset_store is not None:
            await self._offset_store.flush()

    # --- subscriptions ---------------------------------------------------------------------------

    def subscribe(self, topic: str, expression: FilterExpression) -> None:
        """Subscribe to a topic, or change its filter. Also possible while consuming."""
        check_topic(topic)
        topic = self.settings.namespace.wrap(topic)
        self.filters[topic] = expression
        # Brokers keep the subscription with the highest version.
        self._version = max(self._version + 1, self._clock.now_ms())
        for queue, fetcher in self.fetchers.items():
            if queue.topic == topic:
                fetcher.change_filter(expression, self._version)
        self.rebalance_requested.set()

    def subscription(self, topic: str) -> FilterExpression | None:
        return self.filters.get(self.settings.namespace.wrap(topic))

    async def assign(self, queues: Sequence[MessageQueue]) -> None:
        """Consume exactly these queues from now on, without rebalancing."""
        self._manual_queues = list(queues)
        for queue in queues:
            self.filters.setdefault(queue.topic, FilterExpression())
        async with self._rebalance_lock:
            for queue in [queue for queue in self.fetchers if queue not in queues]:
                await self._release(queue)
            self._start_fetching(set(queues) - set(self.fetchers), grace_s=0.0)

    def consumer_entry(self) -> ConsumerEntry:
        """Return the entry of this consumer in a heartbeat."""
        subscriptions = [
            subscription_entry(topic, expression, self._version)
            for topic, expression in self._subscriptions().items()
        ]
        return ConsumerEntry(
            group_name=self.group,
            consume_type="CONSUME_ACTIVELY" if self.settings.is_active else "CONSUME_PASSIVELY",
            message_model="BROADCASTING" if self.settings.broadcast else "CLUSTERING",
            consume_from_where=consume_from_where(self.settings.start),
            subscription_data_set=subscriptions,
        )

    def _subscriptions(self) -> dict[str, FilterExpression]:
        if self.settings.broadcast or self.settings.is_active:
            return dict(self.filters)
        # The retry topic comes last, because a broker creates it when it gets the first heartbeat
        # of the group, and the rebalance of the topics before sends that heartbeat.
        return {**self.filters, retry_topic(self.group): FilterExpression()}

    # --- rebalance -------------------------------------------------------------------------------

    async def _rebalance(self) -> bool:
        """Rebalance all topics. Return whether to try again soon."""
        async with self._rebalance_lock:
            retry_soon = False
            for topic in self._subscriptions() if self._manual_queues is None else ():
                retry_soon |= await self._rebalance_topic(topic)
            self._is_first_rebalance = False
            return retry_soon

    async def _rebalance_topic(self, topic: str) -> bool:
        try:
            own_queues, shifted = await self._compute_assignment(topic)
        except NoRoute:
            # The topic does not exist yet, or its broker restarts: keep its queues.
            await self._warn_missing(topic)
            return True
        except EscrowError as error:
            if self._is_first_rebalance:
                raise
            self._topic_log.warning(
                self._clock.elapsed_s(),
                f"rebalance {topic}",
                "rebalance failed, retrying every second group=%s topic=%s: %s",
                self.group,
                topic,
                error,
            )
            return True
        self._topic_log.ended(f"rebalance {topic}")
        self._warn_idle(topic, own_queues)
        for queue in [q for q in self.fetchers if q.topic == topic and q not in own_queues]:
            await self._release(queue)
        new_queues = own_queues - set(self.fetchers) - set(self._releasing)
        if self.settings.orderly and new_queues:
            new_queues = await self._lock(new_queues)
        self._start_fetching(new_queues - shifted, grace_s=0.0)
        self._start_fetching(new_queues & shifted, grace_s=TAKEOVER_DELAY_S)
        return not own_queues <= set(self.fetchers)

    async def _warn_missing(self, topic: str) -> None:
        """Warn that a topic does not exist: it may be misspelt. A broker creates retry topics."""
        if is_group_topic(topic) or not self._topic_log.is_due(self._clock.elapsed_s(), topic):
            return
        log.warning(
            "group=%s waits for a topic: %s",
            self.group,
            await self.heartbeat.routes.describe_missing(topic),
        )

    def _warn_idle(self, topic: str, own_queues: set[MessageQueue]) -> None:
        """Warn if other members have all queues of a topic, so that no message comes here."""
        state, member_count = f"idle {topic}", len(self._last_members.get(topic, ()))
        if own_queues or member_count < 2 or is_group_topic(topic):
            self._topic_log.ended(state)
            return
        self._topic_log.warning(
            self._clock.elapsed_s(),
            state,
            "this member gets no messages group=%s topic=%s: the other ones of %d members have all "
            "queues; give the topic more queues, or the group fewer members",
            self.group,
            topic,
            member_count,
        )

    async def _compute_assignment(self, topic: str) -> tuple[set[MessageQueue], set[MessageQueue]]:
        """Return this member's queues, and those that another running member may still have."""
        route = await self.heartbeat.routes.get(topic, fresh=True)
        addresses = list(route.broker_addresses.values())
        if not addresses:
            raise NoRoute(f"no broker of {topic} is running")
        if self._topic_log.ended(topic):
            log.info("topic found group=%s topic=%s", self.group, topic)
        address = await self.heartbeat.send_heartbeats(addresses)
        if self._is_first_rebalance:
            await self.heartbeat.check_filters(address)
        if self.settings.broadcast:
            return set(route.readable_queues), set()
        members = await self.heartbeat.members(address)
        assign, queues = self.settings.assignment, route.readable_queues
        own_queues = set(assign(queues, members, self.heartbeat.client_id))
        previous_members = self._last_members.get(topic, set())
        self._last_members[topic] = set(members)
        others = set(members) - {self.heartbeat.client_id}
        if self.settings.orderly or not others:
            return own_queues, set()  # locks exclude an overlap, or there is no other member
        if others - previous_members:
            return own_queues, own_queues  # a member is new here; it may have any of the queues
        shifted: set[MessageQueue] = set()
        if previous_members != set(members):
            for other in others:
                shifted.update(assign(queues, sorted(previous_members), other))
        return own_queues, shifted

    def _start_fetching(self, queues: set[MessageQueue], grace_s: float) -> None:
        assert self._offset_store is not None, "start() was not called"
        for queue in queues:
            fetcher = self.fetchers[queue] = QueueFetcher(
                queue,
                self._subscriptions().get(queue.topic, FilterExpression()),
                version=self._version,
                start=self.settings.start,
                is_new_queue=not self._is_first_rebalance,
                queue_client=self.queue_client,
                offset_store=self._offset_store,
                limiter=self.limiter,
                delivery_queue=self.delivery_queue,
                repeated_log=self._pull_log,
            )
            fetcher.start(grace_s=grace_s)

    async def _release(self, queue: MessageQueue) -> None:
        fetcher = self.fetchers.pop(queue)
        await fetcher.stop()
        if not self.settings.orderly:
            if self.settings.auto_commit:
                await _try_commit(fetcher)
            fetcher.drop()
            return
        # The delivered message must be done before another member may have the next one. That can
        # take a while, so it is not waited for here.
        task = self._releasing[queue] = asyncio.create_task(self._release_orderly(fetcher))
        task.add_done_callback(lambda _: self._releasing.pop(queue, None))

    async def _release_orderly(self, fetcher: QueueFetcher) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await self.delivery_queue.wait_released(fetcher)
        await _try_commit(fetcher)
        fetcher.drop()
        self._lock_confirmed_s.pop(fetcher.queue, None)
        await self.heartbeat.unlock([fetcher.queue])

    async def _lock(self, queues: set[MessageQueue]) -> set[MessageQueue]:
        """Lock queues and return those that are locked. The time of the request counts."""
        requested_s = self._clock.elapsed_s()
        locked = await self.heartbeat.lock(queues)
        for queue, is_locked in locked.items():
            self._lock_confirmed_s[queue] = requested_s if is_locked else float("-inf")
        return {queue for queue, is_locked in locked.items() if is_locked}

    # --- background tasks ------------------------------------------------------------------------

    async def _rebalance_loop(self) -> None:
        wait_s = REBALANCE_INTERVAL_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.rebalance_requested.wait()
            self.rebalance_requested.clear()
            try:
                retry_soon = await self._rebalance()
            except Exception:
                log.exception("rebalance failed, retrying in 1 s group=%s", self.group)
                retry_soon = True
            wait_s = REBALANCE_RETRY_S if retry_soon else REBALANCE_INTERVAL_S
            # If members of a group have different subscriptions, a broker reports a change at
            # each heartbeat. This pause keeps them from rebalancing without end.
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
                expired_s = self._clock.elapsed_s() - LOCK_TIMEOUT_S
                lost = [
                    queue
                    for queue in self.fetchers
                    if self._lock_confirmed_s.get(queue, float("-inf")) <= expired_s
                ]
                for queue in lost:
                    log.warning("lock lost queue=%s", queue)
                    await self._release(queue)
            if lost:
                self.rebalance_requested.set()


async def _try_commit(fetcher: QueueFetcher) -> None:
    try:
        await fetcher.commit()
    except EscrowError as error:
        log.warning("commit failed, will retry queue=%s: %s", fetcher.queue, error)
