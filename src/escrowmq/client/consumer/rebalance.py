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
from escrowmq.client.connection import Asked
from escrowmq.client.consumer.fetcher import Delivery, Limits, QueuePull, Room, Waiting
from escrowmq.client.consumer.offset_store import (
    BrokerPlaces,
    FilePlaces,
    Places,
    Start,
    consume_from,
    default_path,
)
from escrowmq.client.consumer.queue_client import QueueCalls
from escrowmq.client.filters import Filter
from escrowmq.client.heartbeat import Membership
from escrowmq.client.messages import Queue, wrap
from escrowmq.client.producer.producer import own_address
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import EscrowError, NoRoute
from escrowmq.remoting.bodies import ConsumerEntry

Strategy = Callable[[Sequence[Queue], Sequence[str], str], list[Queue]]

VIRTUAL_NODES: Final = 10


def average(queues: Sequence[Queue], members: Sequence[str], me: str) -> list[Queue]:
    """Neighbouring queues go to one member; the first members get one more if it does not come
    out even."""
    ranked, ordered = sorted(set(members)), in_order(queues)
    if me not in ranked:
        return []
    at = ranked.index(me)
    share, rest = divmod(len(ordered), len(ranked))
    begin = at * share + min(at, rest)
    return ordered[begin : begin + share + (at < rest)]


def circle(queues: Sequence[Queue], members: Sequence[str], me: str) -> list[Queue]:
    """Dealt out like cards."""
    ranked = sorted(set(members))
    return in_order(queues)[ranked.index(me) :: len(ranked)] if me in ranked else []


def machine_room(rooms: Collection[str]) -> Strategy:
    """Only queues of brokers in these rooms: brokers that are called `room@name`."""
    wanted = frozenset(rooms)

    def share(queues: Sequence[Queue], members: Sequence[str], me: str) -> list[Queue]:
        ranked = sorted(set(members))
        if me not in ranked:
            return []
        ours = [queue for queue in in_order(queues) if _room(queue) in wanted]
        at, size = ranked.index(me), len(ours) // len(ranked)
        mine = ours[at * size : (at + 1) * size]
        # What does not come out even is dealt from the end, one each.
        return mine + ours[size * len(ranked) + at :][:1]

    return share


def nearby(
    room_of_broker: Callable[[str], str],
    room_of_member: Callable[[str], str],
    inner: Strategy = average,
) -> Strategy:
    """Queues go to members in their own room; those of a room with no member, to everybody."""

    def share(queues: Sequence[Queue], members: Sequence[str], me: str) -> list[Queue]:
        if me not in members:
            return []
        rooms: dict[str, list[str]] = {}
        for member in members:
            rooms.setdefault(room_of_member(member), []).append(member)
        mine: list[Queue] = []
        for room in sorted({room_of_broker(queue.broker) for queue in queues}):
            there = [queue for queue in queues if room_of_broker(queue.broker) == room]
            mine += inner(there, rooms.get(room, members), me)
        return mine

    return share


def consistent_hash(virtual_nodes: int = VIRTUAL_NODES) -> Strategy:
    """Few queues change hands when a member comes or goes."""

    def share(queues: Sequence[Queue], members: Sequence[str], me: str) -> list[Queue]:
        ring: dict[int, str] = {}
        for member in sorted(set(members)):
            for number in range(virtual_nodes):
                ring[_hash(f"{member}-{number}")] = member
        places = sorted(ring)
        mine = []
        for queue in in_order(queues) if me in members else ():
            at = bisect_left(places, _hash(_java_text(queue)))
            if ring[places[at % len(places)]] == me:
                mine.append(queue)
        return mine

    return share


def by_config(fixed: Collection[tuple[str, str, int]]) -> Strategy:
    """Always these: topic, broker and number of a queue. Nothing checks that each is somebody's.
    Topics that are not named, the group's retries among them, are shared out by `average`."""
    wanted = {(topic, broker, queue_id) for topic, broker, queue_id in fixed}
    topics = {topic for topic, _, _ in wanted}

    def share(queues: Sequence[Queue], members: Sequence[str], me: str) -> list[Queue]:
        named = [queue for queue in in_order(queues) if queue.topic in topics]
        others = [queue for queue in queues if queue.topic not in topics]
        return [queue for queue in named if queue[:3] in wanted] + average(others, members, me)

    return share


def in_order(queues: Sequence[Queue]) -> list[Queue]:
    return sorted(queues, key=lambda queue: (queue.topic, queue.broker, queue.queue_id))


def _room(queue: Queue) -> str | None:
    parts = queue.broker.split("@")
    return parts[0] if len(parts) == 2 else None


def _hash(text: str) -> int:
    digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big")


def _java_text(queue: Queue) -> str:
    """How RocketMQ writes a queue: what it hashes."""
    topic, broker, queue_id = queue[:3]
    return f"MessageQueue [topic={topic}, brokerName={broker}, queueId={queue_id}]"


log = logging.getLogger(__name__)

REBALANCE_S: Final = 20.0
GAP_S: Final = 0.5  # between two times, however much news there is
SOON_S: Final = 1.0  # something is missing: a topic, a lock, an answer
COMMIT_S: Final = 5.0
LOCK_S: Final = 20.0  # a lock is asked for again
LOCK_LOST_S: Final = 30.0  # and is not believed in after that long without an answer
GRACE_S: Final = 1.5
LET_GO_S: Final = 20.0  # an orderly queue waits so long for the message that is out


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How a member consumes. `offsets`: the file of who broadcasts."""

    start: Start = "earliest"
    share: Strategy = average
    orderly: bool = False
    broadcast: bool = False
    offsets: Path | None = None
    limits: Limits = field(default_factory=Limits)
    namespace: str = ""
    is_active: bool = False  # it asks for messages; else they are pushed to handlers
    commits: bool = True  # notes now and then what is done with

    def __post_init__(self) -> None:
        consume_from(self.start)
        if self.orderly and self.broadcast:
            raise ValueError("a consumer is orderly or it broadcasts: each member has all queues")
        if self.offsets is not None and not self.broadcast:
            raise ValueError("offsets= is for broadcast=True: a group's are kept by the broker")


class Member:
    def __init__(
        self,
        servers: str | Sequence[str],
        group: str,
        habits: Habits,
        asked: Asked,
        clock: Clock | None = None,
        access: Access | None = None,
    ) -> None:
        if not group:
            raise ValueError("a consumer has a group: say which with group=")
        self.habits = habits
        self.group = wrap(habits.namespace, group)
        self._clock = clock or SystemClock()
        self.membership = Membership(
            servers,
            asked,
            group=self.group,
            client_id=f"{own_address()}@{os.getpid()}#{secrets.token_hex(4)}",
            entry=self.entry,
            clock=self._clock,
            access=access,
        )
        self.calls = QueueCalls(self.membership.line_to, self.group, namespace=habits.namespace)
        self.room = Room(habits.limits)
        self.waiting: Waiting[QueuePull, Delivery] = Waiting(orderly=habits.orderly)
        self.pulls: dict[Queue, QueuePull] = {}
        self.filters: dict[str, Filter] = {}
        self.changed = asyncio.Event()
        self._version = self.begun_ms = self._clock.now_ms()
        self._places: Places | None = None
        self._assigned: list[Queue] | None = None
        self._known_members: dict[str, set[str]] = {}  # by topic
        self._locked_s: dict[Queue, float] = {}
        self._leaving: dict[Queue, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_first = True
        self._sharing = asyncio.Lock()

    # --- life ------------------------------------------------------------------------------------

    async def begin(self) -> None:
        if self.habits.broadcast:
            self._places = FilePlaces(self.habits.offsets or default_path(self.group))
        else:
            self._places = BrokerPlaces(self.calls)
        try:
            if await self._rebalance():
                self.changed.set()
        except BaseException:
            await self.end()
            raise
        loops = [self._keep_balanced(), self.membership.keep_known()]
        if self.habits.commits:
            loops.append(self._keep_committed())
        if self.habits.orderly:
            loops.append(self._keep_locked())
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    async def halt(self) -> None:
        """Pull and hand out nothing more; what is out can still be done with."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pull in self.pulls.values():
            await pull.halt()
        self.waiting.close()

    async def end(self) -> None:
        """Note what is done with, and leave the group."""
        await self.halt()
        await asyncio.gather(*self._leaving.values(), return_exceptions=True)
        if self.habits.commits:
            await self.commit()
        if self.habits.orderly:
            await self.membership.unlock(self.pulls)
        for pull in self.pulls.values():
            pull.give_up()
        self.pulls.clear()
        await self.membership.leave()
        if self._places is not None:
            self._places.close()

    async def commit(self) -> None:
        for pull in list(self.pulls.values()):
            await _note(pull)
        if self._places is not None:
            await self._places.flush()

    # --- what is wanted --------------------------------------------------------------------------

    def subscribe(self, topic: str, wanted: Filter) -> None:
        """Also later on: then the brokers are told."""
        if not topic:
            raise ValueError("a subscription names a topic")
        self.filters[wrap(self.habits.namespace, topic)] = wanted
        self._version = max(self._version + 1, self._clock.now_ms())
        for queue, pull in self.pulls.items():
            if queue.topic == wrap(self.habits.namespace, topic):
                pull.want(wanted, self._version)
        self.changed.set()

    def wanted(self, topic: str) -> Filter | None:
        return self.filters.get(wrap(self.habits.namespace, topic))

    async def assign(self, queues: Sequence[Queue]) -> None:
        """These and no others, whatever the other members have."""
        self._assigned = list(queues)
        for queue in queues:
            self.filters.setdefault(queue.topic, Filter())
        async with self._sharing:
            for queue in [queue for queue in self.pulls if queue not in queues]:
                await self._let_go(queue)
            self._take(set(queues) - set(self.pulls), grace_s=0.0)

    def entry(self) -> ConsumerEntry:
        wanted = [filter.entry(topic, self._version) for topic, filter in self._topics().items()]
        return ConsumerEntry(
            group_name=self.group,
            consume_type="CONSUME_ACTIVELY" if self.habits.is_active else "CONSUME_PASSIVELY",
            message_model="BROADCASTING" if self.habits.broadcast else "CLUSTERING",
            consume_from_where=consume_from(self.habits.start),
            subscription_data_set=wanted,
        )

    def _topics(self) -> dict[str, Filter]:
        if self.habits.broadcast or self.habits.is_active:
            return dict(self.filters)
        # Last: its broker makes it when it hears of us for the first time.
        return {**self.filters, f"%RETRY%{self.group}": Filter()}

    # --- sharing out -----------------------------------------------------------------------------

    async def _rebalance(self) -> bool:
        """Whether to look again soon."""
        async with self._sharing:
            is_soon = False
            for topic in self._topics() if self._assigned is None else ():
                is_soon |= await self._rebalance_topic(topic)
            self._is_first = False
            return is_soon

    async def _rebalance_topic(self, topic: str) -> bool:
        try:
            mine, shifted = await self._share(topic)
        except NoRoute:
            return True  # nobody has sent to it yet; what we have of it, we keep
        except EscrowError as error:
            if self._is_first:
                raise
            log.warning("queues not shared out topic=%s: %s", topic, error)
            return True
        for queue in [q for q in self.pulls if q.topic == topic and q not in mine]:
            await self._let_go(queue)
        wanted = mine - set(self.pulls) - set(self._leaving)
        if self.habits.orderly and wanted:
            wanted = await self._lock(wanted)
        self._take(wanted - shifted, grace_s=0.0)
        self._take(wanted & shifted, grace_s=GRACE_S)
        return not mine <= set(self.pulls)

    async def _share(self, topic: str) -> tuple[set[Queue], set[Queue]]:
        """Which are ours now, and which may come from a member that is still there."""
        route = await self.membership.routes.of(topic, fresh=True)
        addresses = list(route.addresses.values())
        if not addresses:
            raise NoRoute(f"no broker of {topic} is there")
        address = await self.membership.introduce(addresses)
        if self._is_first:
            await self.membership.check_filters(address)
        if self.habits.broadcast:
            return set(route.readable), set()
        members = await self.membership.members(address)
        mine = set(self.habits.share(route.readable, members, self.membership.client_id))
        before = self._known_members.get(topic, set())
        self._known_members[topic] = set(members)
        others = set(members) - {self.membership.client_id}
        if self.habits.orderly or not others:
            return mine, set()  # a lock tells, or nobody is there
        if others - before:
            return mine, mine
        shifted: set[Queue] = set()
        for other in others if before != set(members) else ():
            shifted.update(self.habits.share(route.readable, sorted(before), other))
        return mine, shifted

    def _take(self, queues: set[Queue], grace_s: float) -> None:
        assert self._places is not None, "begin comes first"
        for queue in queues:
            pull = self.pulls[queue] = QueuePull(
                queue,
                self._topics().get(queue.topic, Filter()),
                version=self._version,
                start=self.habits.start,
                is_late=not self._is_first,
                calls=self.calls,
                places=self._places,
                room=self.room,
                waiting=self.waiting,
            )
            pull.begin(grace_s=grace_s)

    async def _let_go(self, queue: Queue) -> None:
        pull = self.pulls.pop(queue)
        await pull.halt()
        if not self.habits.orderly:
            if self.habits.commits:
                await _note(pull)
            pull.give_up()
            return
        leaving = self._leaving[queue] = asyncio.create_task(self._unlock(pull))
        leaving.add_done_callback(lambda _: self._leaving.pop(queue, None))

    async def _unlock(self, pull: QueuePull) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LET_GO_S):
                await self.waiting.until_back(pull)
        await _note(pull)
        pull.give_up()
        self._locked_s.pop(pull.queue, None)
        await self.membership.unlock([pull.queue])

    async def _lock(self, queues: set[Queue]) -> set[Queue]:
        asked_s = self._clock.elapsed_s()
        answers = await self.membership.lock(queues)
        for queue, is_ours in answers.items():
            self._locked_s[queue] = asked_s if is_ours else float("-inf")
        return {queue for queue, is_ours in answers.items() if is_ours}

    # --- now and then ----------------------------------------------------------------------------

    async def _keep_balanced(self) -> None:
        wait_s = REBALANCE_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.changed.wait()
            self.changed.clear()
            try:
                is_soon = await self._rebalance()
            except Exception:
                log.exception("queues not shared out group=%s", self.group)
                is_soon = True
            wait_s = SOON_S if is_soon else REBALANCE_S
            # Members that want different things make a broker report a change at each heartbeat.
            await asyncio.sleep(GAP_S)

    async def _keep_committed(self) -> None:
        while True:
            await asyncio.sleep(COMMIT_S)
            await self.commit()

    async def _keep_locked(self) -> None:
        while True:
            await asyncio.sleep(LOCK_S)
            async with self._sharing:
                await self._lock(set(self.pulls))
                old_s = self._clock.elapsed_s() - LOCK_LOST_S
                lost = [queue for queue in self.pulls if self._locked_s[queue] <= old_s]
                for queue in lost:
                    log.warning("lock lost queue=%s", queue)
                    await self._let_go(queue)
            if lost:
                self.changed.set()


async def _note(pull: QueuePull) -> None:
    try:
        await pull.commit()
    except EscrowError as error:
        log.warning("offset not noted queue=%s: %s", pull.queue, error)
