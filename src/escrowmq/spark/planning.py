"""Plan a read in the driver: which queues, which range of each, and how they are split into tasks.

    options ── select_queues() ── resolve_offsets(), clip_range() ── split_ranges() ──> tasks

A task costs Spark about 60 ms. So little data makes few tasks, more data one task per core, and
very much data two per core, so that the last tasks end at about the same time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from escrowmq.client.messages import MessageQueue
from escrowmq.errors import DataLost, InvalidOption, NoRoute
from escrowmq.message import names
from escrowmq.spark import options
from escrowmq.spark.offsets import (
    EARLIEST_OFFSET,
    LATEST_OFFSET,
    Offsets,
    QueueTimes,
    SymbolicOffset,
)
from escrowmq.spark.options import Options, Position
from escrowmq.spark.queues import TRANSACTION_TOPICS, OffsetBounds, ReadCluster
from escrowmq.spark.range_pull import PullRequest, QueueRange, RangePull
from escrowmq.spark.records import Records

DEFAULT_GROUP: Final = "escrowmq-spark"
MAX_SAMPLED_QUEUES: Final = 64
MIN_TASK_BYTES: Final = 16 << 20
LARGE_TASK_BYTES: Final = 256 << 20
_SAMPLE_MESSAGES: Final = 32
_DEFAULT_MESSAGE_BYTES: Final = 1024


def make_pull_request(parsed_options: Options) -> PullRequest:
    sql = parsed_options[options.SQL]
    return PullRequest(
        group=parsed_options[options.CONSUMER_GROUP] or DEFAULT_GROUP,
        expression=sql or parsed_options[options.TAGS],
        expression_type="SQL92" if sql else "TAG",
        max_messages=parsed_options[options.PULL_BATCH_SIZE],
        fail_on_data_loss=parsed_options[options.FAIL_ON_DATA_LOSS],
    )


# --- queues --------------------------------------------------------------------------------------


def select_queues(cluster: ReadCluster, parsed_options: Options) -> dict[MessageQueue, str]:
    """Return the queues to read and the addresses of their brokers.

    Raises NoRoute, InvalidOption.
    """
    if parsed_options[options.MODE] == options.TRANSACTIONS:
        fail_on_data_loss = parsed_options[options.FAIL_ON_DATA_LOSS]
        topics = _transaction_topics(cluster, fail_on_data_loss=fail_on_data_loss)
        return _queues_of_topics(cluster, topics)
    assigned = parsed_options[options.ASSIGN]
    if assigned is not None:
        existing = _queues_of_topics(cluster, sorted({queue.topic for queue in assigned}))
        for queue in assigned:
            if queue not in existing:
                raise InvalidOption(
                    f"option assign: there is no queue {queue}; there are {_listed(existing)}"
                )
        return {queue: existing[queue] for queue in assigned}
    pattern = parsed_options[options.SUBSCRIBE_PATTERN]
    if pattern:
        include_system = parsed_options[options.INCLUDE_SYSTEM]
        topics = cluster.topics_matching(pattern, include_system=include_system)
        return _queues_of_topics(cluster, topics)
    return _queues_of_topics(cluster, parsed_options[options.SUBSCRIBE])


def _transaction_topics(cluster: ReadCluster, *, fail_on_data_loss: bool) -> list[str]:
    """Return the topics of transactions that exist. Raises NoRoute if the needed ones do not.

    EscrowMQ and RocketMQ 5 create half and op topic at their start. RocketMQ 4 does not register
    its op topic, and without it nothing tells which halves are decided.
    """
    topics = []
    for topic in TRANSACTION_TOPICS:
        try:
            cluster.readable_queues(topic)
            topics.append(topic)
        except NoRoute:
            continue
    if fail_on_data_loss and not {names.HALF_TOPIC, names.OP_TOPIC} <= set(topics):
        raise NoRoute(
            "these brokers do not show their op topic (RocketMQ 4 does not): read their files with "
            "option path, or read the other topics with failOnDataLoss=false"
        )
    return topics


def _queues_of_topics(cluster: ReadCluster, topics: list[str]) -> dict[MessageQueue, str]:
    return {
        queue: address
        for topic in topics
        for queue, address in cluster.readable_queues(topic).items()
    }


# --- ranges --------------------------------------------------------------------------------------


def resolve_offsets(
    cluster: ReadCluster,
    queues: Mapping[MessageQueue, str],
    bounds: OffsetBounds,
    position: Position,
    *,
    is_end: bool,
) -> Offsets:
    """Return the offset of each queue that a position of the options stands for.

    Queues that the position does not name start at their first message, or end behind their last.
    Raises InvalidOption.
    """
    default = LATEST_OFFSET if is_end else EARLIEST_OFFSET
    if isinstance(position, SymbolicOffset):
        offset = LATEST_OFFSET if position is SymbolicOffset.LATEST else EARLIEST_OFFSET
        return {queue: _resolve_offset(offset, bounds[queue]) for queue in queues}
    if isinstance(position, QueueTimes):
        _check_queues_known(position.by_queue, queues)
        times = {
            queue: time for queue in queues if (time := position.time_ms_of(queue)) is not None
        }
        offsets = cluster.offsets_at_times(queues, times)
        # If no message is late enough, RocketMQ responds with an offset behind the last one.
        return {
            queue: min(
                offsets.get(queue, _resolve_offset(default, bounds[queue])), bounds[queue][1]
            )
            for queue in queues
        }
    _check_queues_known(position, queues)
    return {queue: _resolve_offset(position.get(queue, default), bounds[queue]) for queue in queues}


def _resolve_offset(offset: int, bounds: tuple[int, int]) -> int:
    if offset == EARLIEST_OFFSET:
        return bounds[0]
    return bounds[1] if offset == LATEST_OFFSET else offset


def _check_queues_known(
    offsets: Mapping[MessageQueue, int], queues: Mapping[MessageQueue, str]
) -> None:
    for queue in offsets:
        if queue not in queues:
            raise InvalidOption(
                f"an offset is given for {queue}, which is not read; read are {_listed(queues)}"
            )


def _listed(queues: Mapping[MessageQueue, str]) -> str:
    return ", ".join(map(str, sorted(queues)))


def clip_range(
    queue: MessageQueue, begin: int, end: int, bounds: tuple[int, int], fail_on_data_loss: bool
) -> range:
    """Return the existing part of a range. Raises DataLost if that is less and it shall fail."""
    low, high = bounds
    if fail_on_data_loss and (begin < low or begin > high or end > high):
        raise DataLost(
            f"{queue}: messages {begin} to {end} are requested, but only {low} to {high} exist; "
            f"choose other offsets, or read what exists with failOnDataLoss=false"
        )
    begin = min(max(begin, low), high)
    return range(begin, max(begin, min(end, high)))


def mean_message_sizes(
    cluster: ReadCluster, ranges: list[QueueRange], group: str
) -> dict[MessageQueue, float]:
    """Estimate the bytes of a message in each queue, from a few in the middle of its range.

    Only the largest ranges are sampled.
    """
    largest = sorted(ranges, key=lambda item: item.begin - item.end)[:MAX_SAMPLED_QUEUES]
    request = PullRequest(group=group, max_messages=_SAMPLE_MESSAGES, fail_on_data_loss=False)
    means: dict[MessageQueue, float] = {}
    for queue_range in largest:
        if queue_range.begin >= queue_range.end:
            continue
        middle = (queue_range.begin + queue_range.end - _SAMPLE_MESSAGES) // 2
        begin = max(queue_range.begin, middle)
        sample = queue_range._replace(
            begin=begin, end=min(queue_range.end, begin + _SAMPLE_MESSAGES)
        )
        connection = cluster.connection(queue_range.address)
        sizes = [
            (block.size, len(Records.from_buffer(block)))
            for block in RangePull(connection, sample, request).blocks()
        ]
        messages = sum(count for _, count in sizes)
        if messages:
            means[queue_range.queue] = sum(size for size, _ in sizes) / messages
    return means


# --- tasks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskSizing:
    cores: int = 0  # 0: as many as this machine has
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


def make_task_sizing(parsed_options: Options, cores: int) -> TaskSizing:
    return TaskSizing(
        cores,
        parsed_options[options.MIN_PARTITIONS],
        parsed_options[options.MAX_BYTES_PER_PARTITION],
    )


def split_ranges(
    ranges: Sequence[QueueRange],
    sizing: TaskSizing,
    mean_sizes: Mapping[MessageQueue, float] | None = None,
) -> list[list[QueueRange]]:
    """Split ranges into tasks of about the same number of bytes, in their order.

    `mean_sizes` has the bytes of a message per queue; other queues get the mean of these.
    """
    mean_sizes = mean_sizes or {}
    default_size = (
        sum(mean_sizes.values()) / len(mean_sizes) if mean_sizes else _DEFAULT_MESSAGE_BYTES
    )
    ranges = [item for item in ranges if item.begin < item.end]
    sizes = [mean_sizes.get(item.queue, default_size) for item in ranges]
    total_bytes = sum(
        (item.end - item.begin) * size for item, size in zip(ranges, sizes, strict=True)
    )
    message_count = sum(item.end - item.begin for item in ranges)
    task_count = min(sizing.task_count(total_bytes), message_count)
    task_bytes = total_bytes / task_count if task_count else 0
    tasks: list[list[QueueRange]] = [[]]
    free_bytes = task_bytes
    for item, message_bytes in zip(ranges, sizes, strict=True):
        remaining = item
        while remaining.begin < remaining.end:
            count = remaining.end - remaining.begin
            if len(tasks) < task_count:  # the last task takes everything that remains
                count = min(count, max(1, round(free_bytes / message_bytes)))
            tasks[-1].append(remaining._replace(end=remaining.begin + count))
            remaining = remaining._replace(begin=remaining.begin + count)
            free_bytes -= count * message_bytes
            if free_bytes < message_bytes / 2 and len(tasks) < task_count:
                tasks.append([])
                free_bytes += task_bytes
    return [task for task in tasks if task]
