"""Which queues of a topic are whose. Every member computes the same from the same lists."""

from __future__ import annotations

from collections.abc import Sequence

from escrowmq.client.messages import Queue


def share_evenly(queues: Sequence[Queue], members: Sequence[str], me: str) -> list[Queue]:
    """Neighbouring queues go to one member; the first members get one more if it does not come
    out even. RocketMQ's default: members of other clients compute the same."""
    ranked = sorted(members)
    if me not in ranked:
        return []
    ordered = sorted(queues, key=lambda queue: (queue.topic, queue.broker, queue.queue_id))
    at, count, total = ranked.index(me), len(ranked), len(ordered)
    share, rest = divmod(total, count)
    size = share + (1 if at < rest else 0)
    begin = at * share + min(at, rest)
    return ordered[begin : begin + size]
