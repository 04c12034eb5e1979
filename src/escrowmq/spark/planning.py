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

from escrowmq.errors import DataLost, InvalidOption, NoRoute
from escrowmq.message import names
from escrowmq.spark import options
from escrowmq.spark.cluster import TRANSACTION_TOPICS, ReadCluster
from escrowmq.spark.offsets import (
    EARLIEST_OFFSET,
    LATEST_OFFSET,
    Offsets,
    QueueKey,
    QueueTimes,
    SymbolicOffset,
)
from escrowmq.spark.options import Options
from escrowmq.spark.range_pull import PullRequest, QueueRange, RangePull
from escrowmq.spark.records import Records

MAX_SAMPLED_QUEUES: Final = 64
_SAMPLE_MESSAGES: Final = 32
DEFAULT_GROUP: Final = "escrowmq-spark"

OffsetBounds = Mapping[QueueKey, tuple[int, int]]


def make_pull_request(parsed_options: Options) -> PullRequest:
    sql = parsed_options[options.SQL]
    return PullRequest(
        group=parsed_options[options.CONSUMER_GROUP] or DEFAULT_GROUP,
        expression=sql or parsed_options[options.TAGS],
        expression_type="SQL92" if sql else "TAG",
        max_messages=parsed_options[options.PULL_BATCH_SIZE],
        fail_on_data_loss=parsed_options[options.FAIL_ON_DATA_LOSS],
    )


def select_queues(cluster: ReadCluster, parsed_options: Options) -> dict[QueueKey, str]:
    """With the addresses of their brokers. Raises NoRoute."""
    if parsed_options[options.MODE] == options.TRANSACTIONS:
        fail = parsed_options[options.FAIL_ON_DATA_LOSS]
        return _queues_of_topics(cluster, _transaction_topics(cluster, fail_on_data_loss=fail))
    assigned = parsed_options[options.ASSIGN]
    if assigned is not None:
        known = _queues_of_topics(cluster, sorted({queue.topic for queue in assigned}))
        for queue in assigned:
            if queue not in known:
                there = ", ".join(map(str, sorted(known)))
                raise InvalidOption(f"option assign: there is no queue {queue}; there are {there}")
        return {queue: known[queue] for queue in assigned}
    pattern = parsed_options[options.SUBSCRIBE_PATTERN]
    if pattern:
        include = parsed_options[options.INCLUDE_SYSTEM]
        topics = cluster.topics_matching(pattern, include_system=include)
        return _queues_of_topics(cluster, topics)
    return _queues_of_topics(cluster, parsed_options[options.SUBSCRIBE])


def _transaction_topics(cluster: ReadCluster, *, fail_on_data_loss: bool) -> list[str]:
    """RocketMQ 5 and we have the first two from the start; RocketMQ 4 shows the op topic to nobody,
    and without it there is no telling what was settled."""
    found = []
    for topic in TRANSACTION_TOPICS:
        try:
            cluster.route(topic)
            found.append(topic)
        except NoRoute:
            continue
    if fail_on_data_loss and not {names.HALF_TOPIC, names.OP_TOPIC} <= set(found):
        raise NoRoute(
            "these brokers do not show their op topic (RocketMQ 4 does not): read their files with "
            "option path, or what there is with failOnDataLoss=false"
        )
    return found


def _queues_of_topics(cluster: ReadCluster, topics: list[str]) -> dict[QueueKey, str]:
    return {queue: address for topic in topics for queue, address in cluster.route(topic).items()}


def resolve_offsets(
    cluster: ReadCluster,
    queues: Mapping[QueueKey, str],
    bounds: OffsetBounds,
    requested: Any,
    *,
    is_end: bool,
) -> Offsets:
    """Of each queue, the offset that options speak of. Queues that these do not name begin with
    their first message and end with their last."""
    unnamed = LATEST_OFFSET if is_end else EARLIEST_OFFSET
    if isinstance(requested, SymbolicOffset):
        number = LATEST_OFFSET if requested is SymbolicOffset.LATEST else EARLIEST_OFFSET
        return {queue: _resolve_offset(number, bounds[queue]) for queue in queues}
    if isinstance(requested, QueueTimes):
        times = {
            queue: time for queue in queues if (time := requested.time_ms_of(queue)) is not None
        }
        _check_queues_known(requested.by_queue, queues)
        found = cluster.offsets_at_times(queues, times)
        # RocketMQ answers with its last message where none is late enough.
        return {
            queue: min(found.get(queue, _resolve_offset(unnamed, bounds[queue])), bounds[queue][1])
            for queue in queues
        }
    _check_queues_known(requested, queues)
    return {
        queue: _resolve_offset(requested.get(queue, unnamed), bounds[queue]) for queue in queues
    }


def _resolve_offset(number: int, bounds: tuple[int, int]) -> int:
    if number == EARLIEST_OFFSET:
        return bounds[0]
    return bounds[1] if number == LATEST_OFFSET else number


def _check_queues_known(requested: Mapping[QueueKey, int], queues: Mapping[QueueKey, str]) -> None:
    for queue in requested:
        if queue not in queues:
            there = ", ".join(map(str, sorted(queues)))
            raise InvalidOption(f"offsets for {queue}, which is not read here; read are {there}")


def clip_range(
    queue: QueueKey, begin: int, end: int, bounds: tuple[int, int], fail_on_data_loss: bool
) -> range:
    """What of a wanted range is there. Raises DataLost if that is less, and `fail`."""
    low, high = bounds
    if fail_on_data_loss and (begin < low or begin > high or end > high):
        raise DataLost(
            f"{queue}: wanted are {begin} to {end}, there are {low} to {high}; "
            f"choose offsets that are there, or read what is with failOnDataLoss=false"
        )
    begin = min(max(begin, low), high)
    return range(begin, max(begin, min(end, high)))


def mean_message_sizes(
    cluster: ReadCluster, ranges: list[QueueRange], group: str
) -> dict[QueueKey, float]:
    """Of a message of each queue, judged by a few from the middle of its range."""
    largest = sorted(ranges, key=lambda piece: piece.begin - piece.end)[:MAX_SAMPLED_QUEUES]
    found: dict[QueueKey, float] = {}
    for piece in largest:
        if piece.begin >= piece.end:
            continue
        middle = max(piece.begin, (piece.begin + piece.end - _SAMPLE_MESSAGES) // 2)
        some = piece._replace(begin=middle, end=min(piece.end, middle + _SAMPLE_MESSAGES))
        wish = PullRequest(group=group, max_messages=_SAMPLE_MESSAGES, fail_on_data_loss=False)
        line = cluster.connection_to(piece.address)
        sizes = [
            (block.size, len(Records.from_buffer(block)))
            for block in RangePull(line, some, wish).blocks()
        ]
        count = sum(count for _, count in sizes)
        if count:
            found[piece.queue] = sum(size for size, _ in sizes) / count
    return found


MIN_TASK_BYTES: Final = 16 << 20
LARGE_TASK_BYTES: Final = 256 << 20
_DEFAULT_MESSAGE_BYTES: Final = 1024


@dataclass(frozen=True)
class TaskSizing:
    cores: int = 0  # 0: those of this machine
    min_tasks: int = 1
    max_task_bytes: int = 0  # 0: no limit

    def task_count(self, total_bytes: float) -> int:
        cores = self.cores or os.cpu_count() or 1
        tasks = min(cores, math.ceil(total_bytes / MIN_TASK_BYTES))
        if total_bytes > cores * LARGE_TASK_BYTES:
            tasks = 2 * cores
        if self.max_task_bytes:
            tasks = max(tasks, math.ceil(total_bytes / self.max_task_bytes))
        return max(1, tasks, self.min_tasks)


def split_ranges(
    ranges: Sequence[QueueRange],
    sizing: TaskSizing,
    mean_sizes: Mapping[QueueKey, float] | None = None,
) -> list[list[QueueRange]]:
    """`sizes`: the mean size of a message of each queue. Order is kept; nothing is left out."""
    mean_sizes = mean_sizes or {}
    usual = sum(mean_sizes.values()) / len(mean_sizes) if mean_sizes else _DEFAULT_MESSAGE_BYTES
    ranges = [piece for piece in ranges if piece.begin < piece.end]
    weights = [(piece.end - piece.begin) * mean_sizes.get(piece.queue, usual) for piece in ranges]
    total = sum(weights)
    messages = sum(piece.end - piece.begin for piece in ranges)
    tasks = min(sizing.task_count(total), messages)
    share = total / tasks if tasks else 0
    found: list[list[QueueRange]] = [[]]
    room = share
    for piece, weight in zip(ranges, weights, strict=True):
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
