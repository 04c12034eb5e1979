"""Which queues are read, and from where to where.

Cut ranges of queues into tasks of about the same number of bytes.

A task costs Spark about 60 ms, so a little data makes few of them; much data makes one for each
core, and very much two, so that the last one is not waited for alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from escrowmq.errors import BadOption, DataLost, NoRoute
from escrowmq.message import names
from escrowmq.spark import options
from escrowmq.spark.cluster import TRANSACTION_TOPICS, Cluster
from escrowmq.spark.offsets import (
    EARLIEST_NUMBER,
    LATEST_NUMBER,
    Offsets,
    Position,
    QueueKey,
    Times,
)
from escrowmq.spark.options import Chosen
from escrowmq.spark.range_pull import Piece, RangePull, Wish
from escrowmq.spark.records import Records

SAMPLED_QUEUES_MAX: Final = 64
_SAMPLED: Final = 32
DEFAULT_GROUP: Final = "escrowmq-spark"

Bounds = Mapping[QueueKey, tuple[int, int]]


def wish_of(chosen: Chosen) -> Wish:
    sql = chosen[options.SQL]
    return Wish(
        group=chosen[options.CONSUMER_GROUP] or DEFAULT_GROUP,
        expression=sql or chosen[options.TAGS],
        kind="SQL92" if sql else "TAG",
        count_max=chosen[options.PULL_BATCH],
        fail_on_data_loss=chosen[options.FAIL_ON_DATA_LOSS],
    )


def queues_of(cluster: Cluster, chosen: Chosen) -> dict[QueueKey, str]:
    """With the addresses of their brokers. Raises NoRoute."""
    if chosen[options.MODE] == options.TRANSACTIONS:
        fail = chosen[options.FAIL_ON_DATA_LOSS]
        return _of_topics(cluster, _transaction_topics(cluster, fail=fail))
    assigned = chosen[options.ASSIGN]
    if assigned is not None:
        known = _of_topics(cluster, sorted({queue.topic for queue in assigned}))
        for queue in assigned:
            if queue not in known:
                there = ", ".join(map(str, sorted(known)))
                raise BadOption(f"option assign: there is no queue {queue}; there are {there}")
        return {queue: known[queue] for queue in assigned}
    pattern = chosen[options.SUBSCRIBE_PATTERN]
    if pattern:
        include = chosen[options.INCLUDE_SYSTEM]
        topics = cluster.topics_like(pattern, include_system=include)
        return _of_topics(cluster, topics)
    return _of_topics(cluster, chosen[options.SUBSCRIBE])


def _transaction_topics(cluster: Cluster, *, fail: bool) -> list[str]:
    """RocketMQ 5 and we have the first two from the start; RocketMQ 4 shows the op topic to nobody,
    and without it there is no telling what was settled."""
    found = []
    for topic in TRANSACTION_TOPICS:
        try:
            cluster.route(topic)
            found.append(topic)
        except NoRoute:
            continue
    if fail and not {names.HALF_TOPIC, names.OP_TOPIC} <= set(found):
        raise NoRoute(
            "these brokers do not show their op topic (RocketMQ 4 does not): read their files with "
            "option path, or what there is with failOnDataLoss=false"
        )
    return found


def _of_topics(cluster: Cluster, topics: list[str]) -> dict[QueueKey, str]:
    return {queue: address for topic in topics for queue, address in cluster.route(topic).items()}


def places(
    cluster: Cluster, queues: Mapping[QueueKey, str], bounds: Bounds, said: Any, *, is_end: bool
) -> Offsets:
    """Of each queue, the offset that options speak of. Queues that these do not name begin with
    their first message and end with their last."""
    unnamed = LATEST_NUMBER if is_end else EARLIEST_NUMBER
    if isinstance(said, Position):
        number = LATEST_NUMBER if said is Position.LATEST else EARLIEST_NUMBER
        return {queue: _placed(number, bounds[queue]) for queue in queues}
    if isinstance(said, Times):
        times = {queue: time for queue in queues if (time := said.of(queue)) is not None}
        _refuse_unknown(said.by_queue, queues)
        found = cluster.at_times(queues, times)
        # RocketMQ answers with its last message where none is late enough.
        return {
            queue: min(found.get(queue, _placed(unnamed, bounds[queue])), bounds[queue][1])
            for queue in queues
        }
    _refuse_unknown(said, queues)
    return {queue: _placed(said.get(queue, unnamed), bounds[queue]) for queue in queues}


def _placed(number: int, bounds: tuple[int, int]) -> int:
    if number == EARLIEST_NUMBER:
        return bounds[0]
    return bounds[1] if number == LATEST_NUMBER else number


def _refuse_unknown(said: Mapping[QueueKey, int], queues: Mapping[QueueKey, str]) -> None:
    for queue in said:
        if queue not in queues:
            there = ", ".join(map(str, sorted(queues)))
            raise BadOption(f"offsets for {queue}, which is not read here; read are {there}")


def within(queue: QueueKey, begin: int, end: int, bounds: tuple[int, int], fail: bool) -> range:
    """What of a wanted range is there. Raises DataLost if that is less, and `fail`."""
    low, high = bounds
    if fail and (begin < low or begin > high or end > high):
        raise DataLost(
            f"{queue}: wanted are {begin} to {end}, there are {low} to {high}; "
            f"choose offsets that are there, or read what is with failOnDataLoss=false"
        )
    begin = min(max(begin, low), high)
    return range(begin, max(begin, min(end, high)))


def mean_sizes(cluster: Cluster, pieces: list[Piece], group: str) -> dict[QueueKey, float]:
    """Of a message of each queue, judged by a few from the middle of its range."""
    largest = sorted(pieces, key=lambda piece: piece.begin - piece.end)[:SAMPLED_QUEUES_MAX]
    found: dict[QueueKey, float] = {}
    for piece in largest:
        if piece.begin >= piece.end:
            continue
        middle = max(piece.begin, (piece.begin + piece.end - _SAMPLED) // 2)
        some = piece._replace(begin=middle, end=min(piece.end, middle + _SAMPLED))
        wish = Wish(group=group, count_max=_SAMPLED, fail_on_data_loss=False)
        line = cluster.line_to(piece.address)
        sizes = [
            (block.size, len(Records.all_of(block)))
            for block in RangePull(line, some, wish).blocks()
        ]
        count = sum(count for _, count in sizes)
        if count:
            found[piece.queue] = sum(size for size, _ in sizes) / count
    return found


WORTH_A_TASK_BYTES: Final = 16 << 20
MANY_BYTES: Final = 256 << 20
_GUESS_BYTES: Final = 1024


@dataclass(frozen=True)
class Rules:
    cores: int = 0  # 0: those of this machine
    tasks_min: int = 1
    task_bytes_max: int = 0  # 0: no limit

    def tasks(self, total_bytes: float) -> int:
        cores = self.cores or os.cpu_count() or 1
        tasks = min(cores, math.ceil(total_bytes / WORTH_A_TASK_BYTES))
        if total_bytes > cores * MANY_BYTES:
            tasks = 2 * cores
        if self.task_bytes_max:
            tasks = max(tasks, math.ceil(total_bytes / self.task_bytes_max))
        return max(1, tasks, self.tasks_min)


def split(
    pieces: Sequence[Piece], rules: Rules, sizes: Mapping[QueueKey, float] | None = None
) -> list[list[Piece]]:
    """`sizes`: the mean size of a message of each queue. Order is kept; nothing is left out."""
    sizes = sizes or {}
    usual = sum(sizes.values()) / len(sizes) if sizes else _GUESS_BYTES
    pieces = [piece for piece in pieces if piece.begin < piece.end]
    weights = [(piece.end - piece.begin) * sizes.get(piece.queue, usual) for piece in pieces]
    total = sum(weights)
    messages = sum(piece.end - piece.begin for piece in pieces)
    tasks = min(rules.tasks(total), messages)
    share = total / tasks if tasks else 0
    found: list[list[Piece]] = [[]]
    room = share
    for piece, weight in zip(pieces, weights, strict=True):
        each = weight / (piece.end - piece.begin)
        while piece.begin < piece.end:
            count = piece.end - piece.begin
            if len(found) < tasks:
                count = min(count, max(1, round(room / each)))
            found[-1].append(piece._replace(end=piece.begin + count))
            piece = piece._replace(begin=piece.begin + count)
            room -= count * each
            if room < each / 2 and len(found) < tasks:
                found.append([])
                room += share
    return [task for task in found if task]
