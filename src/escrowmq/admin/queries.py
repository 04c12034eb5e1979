"""Ask one broker about its topics, its consumer groups and itself.

Each function takes an open connection and returns values; `Cluster.ask_all` runs one on all
brokers. They work with EscrowMQ and with Apache RocketMQ. All of them raise RequestRefused,
TransportError, or BrokenBody if a response cannot be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from escrowmq.client.sync_connection import OutgoingRequest, SyncConnection
from escrowmq.errors import BrokenBody
from escrowmq.message.topic_config import TopicConfig
from escrowmq.parsing import parse_lenient_json
from escrowmq.remoting.bodies import QueueName, TopicConfigs, TopicList, decode_body
from escrowmq.remoting.bodies_admin import (
    ConsumeOffset,
    ConsumerConnections,
    GroupList,
    RuntimeTable,
    TopicOffset,
    decode_queue_key,
    decode_queue_tables,
)
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import (
    ConsumerGroupHeader,
    OffsetResponse,
    SearchOffset,
    decode_header,
)
from escrowmq.remoting.headers_admin import GetBrokerConsumeStats, GetConsumeStats, TopicHeader

QueueOffsets = dict[QueueName, TopicOffset]
GroupProgress = dict[QueueName, ConsumeOffset]

# Codes for a topic or group that does not exist. One that was just listed may be deleted before
# the next request asks about it.
NOT_FOUND_CODES: Final = (ResponseCode.TOPIC_NOT_EXIST, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST)


# --- topics --------------------------------------------------------------------------------------


def topic_configs(connection: SyncConnection) -> dict[str, TopicConfig]:
    """Return all topics of the broker, with those of the system."""
    body = connection.call(RequestCode.GET_ALL_TOPIC_CONFIG).body
    return decode_body(TopicConfigs, body).topic_config_table


def topic_config(connection: SyncConnection, topic: str) -> TopicConfig:
    """Return one topic. Raises RequestRefused with one of NOT_FOUND_CODES if there is none."""
    body = connection.call(RequestCode.GET_TOPIC_CONFIG, TopicHeader(topic=topic)).body
    return decode_body(TopicConfig, body)


def system_topics(connection: SyncConnection) -> set[str]:
    """Return the names of the topics that the broker uses itself."""
    body = connection.call(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER).body
    return set(decode_body(TopicList, body).topic_list)


def topic_offsets(connection: SyncConnection, topics: Sequence[str]) -> dict[str, QueueOffsets]:
    """Return the offsets of every queue, by topic. Topics that do not exist are left out."""
    code = RequestCode.GET_TOPIC_STATS_INFO
    requests = (OutgoingRequest(code, TopicHeader(topic=topic)) for topic in topics)
    offsets = {}
    for topic, reply in zip(topics, connection.call_many(requests), strict=True):
        if not reply.code:
            offsets[topic] = _by_queue(decode_queue_tables(bytes(reply.body)), TopicOffset)
        elif reply.code not in NOT_FOUND_CODES:
            raise connection.refusal(code, reply)
    return offsets


def message_count(offsets: QueueOffsets) -> int:
    """Return how many messages are stored in these queues."""
    return sum(queue.max_offset - queue.min_offset for queue in offsets.values())


def search_offset(connection: SyncConnection, topic: str, queue_id: int, time_ms: int) -> int:
    """Return the offset of the first message of a queue that was stored at `time_ms` or later."""
    header = SearchOffset(topic=topic, queue_id=queue_id, timestamp=time_ms)
    reply = connection.call(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header)
    return decode_header(OffsetResponse, reply.ext_fields).offset


def groups_of_topic(connection: SyncConnection, topic: str) -> list[str]:
    """Return the groups that have read the topic."""
    body = connection.call(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, TopicHeader(topic=topic)).body
    return decode_body(GroupList, body).group_list


# --- consumer groups -----------------------------------------------------------------------------


def group_configs(connection: SyncConnection) -> dict[str, dict[str, Any]]:
    """Return the settings of all groups, by RocketMQ's names."""
    body = connection.call(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body
    table = _require_table(parse_lenient_json(body)).get("subscriptionGroupTable")
    return dict(_require_table(table))


def all_progress(connection: SyncConnection) -> dict[str, GroupProgress]:
    """Return the offsets of every group that has committed any, by group."""
    body = connection.call(RequestCode.GET_BROKER_CONSUME_STATS, GetBrokerConsumeStats()).body
    content = _require_table(decode_queue_tables(bytes(body)))
    progress: dict[str, GroupProgress] = {}
    for entry in _require_list(content.get("consumeStatsList", [])):
        for group, tables in _require_table(entry).items():
            offsets = progress.setdefault(group, {})
            for table in _require_list(tables):
                offsets.update(_by_queue(table, ConsumeOffset))
    return progress


def group_progress(
    connection: SyncConnection, group: str, topic: str | None = None
) -> GroupProgress:
    """Return the offsets of one group, of one topic or of all that it reads."""
    header = GetConsumeStats(consumer_group=group, topic=topic)
    body = connection.call(RequestCode.GET_CONSUME_STATS, header).body
    return _by_queue(decode_queue_tables(bytes(body)), ConsumeOffset)


def consumer_connections(
    connection: SyncConnection, groups: Sequence[str]
) -> dict[str, ConsumerConnections]:
    """Return the connected members of groups. Groups without a connected member are left out."""
    code = RequestCode.GET_CONSUMER_CONNECTION_LIST
    requests = (
        OutgoingRequest(code, ConsumerGroupHeader(consumer_group=group)) for group in groups
    )
    connections = {}
    for group, reply in zip(groups, connection.call_many(requests), strict=True):
        if not reply.code:
            connections[group] = decode_body(ConsumerConnections, reply.body)
        elif reply.code != ResponseCode.CONSUMER_NOT_ONLINE:
            raise connection.refusal(code, reply)
    return connections


def total_lag(offsets: Iterable[ConsumeOffset]) -> int:
    """Return how many messages of these queues a group has not read."""
    return sum(max(0, queue.broker_offset - queue.consumer_offset) for queue in offsets)


# --- the broker ----------------------------------------------------------------------------------

_UNITS_S: Final = {"days": 86_400, "hours": 3_600, "minutes": 60, "seconds": 1}


def broker_runtime(connection: SyncConnection) -> dict[str, str]:
    """Return the figures of a broker as texts, by RocketMQ's names."""
    body = connection.call(RequestCode.GET_BROKER_RUNTIME_INFO).body
    return decode_body(RuntimeTable, body).table


def uptime_s(runtime: Mapping[str, str]) -> int:
    """Return the seconds since the broker started; it says `[ 1 days, 2 hours, 3 minutes, … ]`."""
    parts = re.findall(r"([0-9]{1,9}) (days|hours|minutes|seconds)", runtime.get("runtime", ""))
    return sum(int(count) * _UNITS_S[unit] for count, unit in parts)


def recent_rate(runtime: Mapping[str, str], name: str) -> float:
    """Return a rate per second over the last ten seconds: the first of three in a figure."""
    try:
        return float(runtime.get(name, "").partition(" ")[0])
    except ValueError:
        return 0.0


def disk_used_ratio(runtime: Mapping[str, str]) -> float | None:
    """Return how full the disk of the commit log is, from 0 to 1; None if it is not known."""
    try:
        return float(runtime["commitLogDiskRatio"])
    except (KeyError, ValueError):
        return None


def broker_settings(connection: SyncConnection) -> dict[str, str]:
    """Return the settings of a running broker. Secrets are replaced by `***`."""
    text = str(connection.call(RequestCode.GET_BROKER_CONFIG).body, "utf-8", "replace")
    lines = (line.partition("=") for line in text.splitlines() if not line.startswith("#"))
    return {name.strip(): value.strip() for name, equals, value in lines if equals}


# --- tables by queue -----------------------------------------------------------------------------


def _by_queue(content: Any, value_type: type[Any]) -> dict[QueueName, Any]:
    table = _require_table(_require_table(content).get("offsetTable", {}))
    try:
        return {
            decode_queue_key(key): msgspec.convert(value, value_type)
            for key, value in table.items()
        }
    except msgspec.ValidationError as error:
        raise BrokenBody(f"offsetTable: {error}") from error


def _require_table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BrokenBody(f"the response is not a JSON object but {type(value).__name__}")
    return value


def _require_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise BrokenBody(f"the response has {type(value).__name__} where a list was expected")
    return value
