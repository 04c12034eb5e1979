"""Reset the offsets of a consumer group: plan the changes, show them, then apply them.

changes = plan_reset(cluster, "billing", None, EARLIEST)
cluster.require_all_answered()
apply_reset(cluster, "billing", changes, EARLIEST)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from escrowmq.admin.cluster import BrokerAddress, Cluster
from escrowmq.admin.queries import (
    NOT_FOUND_CODES,
    GroupProgress,
    group_configs,
    group_progress,
    search_offset,
    topic_offsets,
)
from escrowmq.client.sync_connection import SyncConnection
from escrowmq.errors import NoRoute
from escrowmq.message.names import retry_topic
from escrowmq.remoting.bodies import QueueName
from escrowmq.remoting.bodies_admin import TopicOffset, decode_offset_table, decode_queue_key
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers_admin import ResetOffset

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
StartPosition = str | int  # EARLIEST, LATEST, or a time in milliseconds since 1970

# RocketMQ's timestamps for both ends of a queue.
_RESET_TIMESTAMPS: Final = {EARLIEST: 0, LATEST: -1}


@dataclass(frozen=True, slots=True)
class OffsetChange:
    """The offset of a group in one queue, before and after a reset."""

    broker: BrokerAddress
    queue: QueueName
    old_offset: int
    new_offset: int


@dataclass(frozen=True, slots=True)
class AppliedOffset:
    """The offset from which a group continues in one queue, as its broker reports it."""

    broker: BrokerAddress
    queue: QueueName
    offset: int


def plan_reset(
    cluster: Cluster, group: str, topic: str | None, target: StartPosition
) -> list[OffsetChange]:
    """Return what a reset would change, and change nothing.

    Without a topic, all topics are reset that the group has read. Its retry topic is left alone:
    those messages were read once already and are delivered again in any case. Raises NoRoute if no
    broker has the group. Brokers that do not answer are listed in `cluster.failures`.
    """

    def plan(connection: SyncConnection) -> dict[QueueName, tuple[int, int]] | None:
        if group not in group_configs(connection):
            return None
        progress = group_progress(connection, group, topic)
        if topic is None:
            retries = retry_topic(group)
            progress = {
                queue: offset for queue, offset in progress.items() if queue.topic != retries
            }
        return _new_offsets(connection, progress, target)

    answers = cluster.ask_all(plan, ignored_codes=NOT_FOUND_CODES)
    if all(offsets is None for _, offsets in answers) and not cluster.failures:
        raise group_not_found(cluster, group)
    return [
        OffsetChange(broker, queue, old_offset, new_offset)
        for broker, offsets in answers
        for queue, (old_offset, new_offset) in (offsets or {}).items()
    ]


def apply_reset(
    cluster: Cluster, group: str, changes: Sequence[OffsetChange], target: StartPosition
) -> list[AppliedOffset]:
    """Reset the topics of these changes on their brokers, and return the new offsets.

    The broker looks the offsets up again, so messages that arrived since the plan are counted.
    Members that are connected are told by their broker.
    """
    timestamp = _RESET_TIMESTAMPS.get(str(target))
    time_ms = int(target) if timestamp is None else timestamp
    brokers = list(dict.fromkeys(change.broker for change in changes))
    applied: list[AppliedOffset] = []
    for topic in sorted({change.queue.topic for change in changes}):
        header = ResetOffset(topic=topic, group=group, timestamp=time_ms, is_force=True)

        def reset(connection: SyncConnection, header: ResetOffset = header) -> dict[str, int]:
            body = connection.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header).body
            return decode_offset_table(bytes(body))

        for broker, table in cluster.ask_all(reset, brokers=brokers):
            applied += _applied_offsets(broker, table)
    return applied


def group_not_found(cluster: Cluster, group: str) -> NoRoute:
    """Return the error for a consumer group that no broker of the cluster has."""
    return NoRoute(
        f"there is no group {group} on {cluster.broker_names()}: `escrowmq group list` shows them"
    )


def _new_offsets(
    connection: SyncConnection, progress: GroupProgress, target: StartPosition
) -> dict[QueueName, tuple[int, int]]:
    """Return the old and the new offset of each queue that the group has read."""
    topics = sorted({queue.topic for queue in progress})
    return {
        queue: (
            progress[queue].consumer_offset,
            _target_offset(connection, queue, bounds, target),
        )
        for offsets in topic_offsets(connection, topics).values()
        for queue, bounds in sorted(offsets.items(), key=lambda item: item[0].queue_id)
        if queue in progress
    }


def _target_offset(
    connection: SyncConnection, queue: QueueName, bounds: TopicOffset, target: StartPosition
) -> int:
    if target == EARLIEST:
        return bounds.min_offset
    if target == LATEST:
        return bounds.max_offset
    return search_offset(connection, queue.topic, queue.queue_id, int(target))


def _applied_offsets(broker: BrokerAddress, table: dict[str, int]) -> Iterator[AppliedOffset]:
    for key, offset in table.items():
        yield AppliedOffset(broker, decode_queue_key(key), offset)
