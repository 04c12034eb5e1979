"""Which queues of a topic are whose. Every member computes the same from the same lists.

A strategy takes the queues, the ids of all members, and whose share is wanted. `average` is
RocketMQ's default. All members of a group must use the same one, those of other clients too.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from typing import Final

from escrowmq.client.messages import Queue

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
