"""What one broker says about its topics, groups and itself, as values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from escrowmq.cli.call import SyncConnection
from escrowmq.errors import BrokenBody, RequestRefused
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
from escrowmq.remoting.headers import ConsumerGroupHeader
from escrowmq.remoting.headers_admin import GetBrokerConsumeStats, GetConsumeStats, TopicHeader

QueueOffsets = dict[QueueName, TopicOffset]
GroupProgress = dict[QueueName, ConsumeOffset]
# A request about one of many may come too late: somebody has deleted it meanwhile.
NOT_FOUND_CODES: Final = (ResponseCode.TOPIC_NOT_EXIST, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST)


# --- topics --------------------------------------------------------------------------------------


def topic_configs(connection: SyncConnection) -> dict[str, TopicConfig]:
    body = connection.call(RequestCode.GET_ALL_TOPIC_CONFIG).body
    return decode_body(TopicConfigs, body).topic_config_table


def topic_config(connection: SyncConnection, topic: str) -> TopicConfig:
    body = connection.call(RequestCode.GET_TOPIC_CONFIG, TopicHeader(topic=topic)).body
    return decode_body(TopicConfig, body)


def system_topics(connection: SyncConnection) -> set[str]:
    """Those that belong to the broker."""
    body = connection.call(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER).body
    return set(decode_body(TopicList, body).topic_list)


def topic_offsets(connection: SyncConnection, topics: Sequence[str]) -> dict[str, QueueOffsets]:
    """By topic; those that are not there are left out."""
    names = (TopicHeader(topic=topic) for topic in topics)
    found = {}
    answers = connection.call_many(RequestCode.GET_TOPIC_STATS_INFO, names)
    for topic, reply in zip(topics, answers, strict=True):
        if not isinstance(reply, RequestRefused):
            found[topic] = _by_queue(decode_queue_tables(reply.body), TopicOffset)
        elif reply.code not in NOT_FOUND_CODES:
            raise reply
    return found


def groups_of_topic(connection: SyncConnection, topic: str) -> list[str]:
    body = connection.call(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, TopicHeader(topic=topic)).body
    return decode_body(GroupList, body).group_list


# --- groups --------------------------------------------------------------------------------------


def group_configs(connection: SyncConnection) -> dict[str, dict[str, Any]]:
    body = connection.call(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body
    table = _require_table(parse_lenient_json(body)).get("subscriptionGroupTable")
    return dict(_require_table(table))


def all_progress(connection: SyncConnection) -> dict[str, GroupProgress]:
    """How far every group is, by its name."""
    body = connection.call(RequestCode.GET_BROKER_CONSUME_STATS, GetBrokerConsumeStats()).body
    found: dict[str, GroupProgress] = {}
    for entry in _require_table(decode_queue_tables(body)).get("consumeStatsList", ()):
        for group, tables in _require_table(entry).items():
            progress = found.setdefault(group, {})
            for table in tables:
                progress.update(_by_queue(table, ConsumeOffset))
    return found


def group_progress(
    connection: SyncConnection, group: str, topic: str | None = None
) -> GroupProgress:
    asked = GetConsumeStats(consumer_group=group, topic=topic)
    body = connection.call(RequestCode.GET_CONSUME_STATS, asked).body
    return _by_queue(decode_queue_tables(body), ConsumeOffset)


def consumer_connections(
    connection: SyncConnection, groups: Sequence[str]
) -> dict[str, ConsumerConnections]:
    """Of those groups of which anybody is connected."""
    asked = (ConsumerGroupHeader(consumer_group=group) for group in groups)
    found = {}
    replies = connection.call_many(RequestCode.GET_CONSUMER_CONNECTION_LIST, asked)
    for group, reply in zip(groups, replies, strict=True):
        if not isinstance(reply, RequestRefused):
            found[group] = decode_body(ConsumerConnections, reply.body)
        elif reply.code != ResponseCode.CONSUMER_NOT_ONLINE:
            raise reply
    return found


def total_lag(progress: Iterable[ConsumeOffset]) -> int:
    return sum(max(0, one.broker_offset - one.consumer_offset) for one in progress)


# --- the broker ----------------------------------------------------------------------------------


def broker_runtime(connection: SyncConnection) -> dict[str, str]:
    body = connection.call(RequestCode.GET_BROKER_RUNTIME_INFO).body
    return decode_body(RuntimeTable, body).table


def broker_settings(connection: SyncConnection) -> dict[str, str]:
    text = str(connection.call(RequestCode.GET_BROKER_CONFIG).body, "utf-8", "replace")
    lines = (line.partition("=") for line in text.splitlines() if not line.startswith("#"))
    return {name.strip(): value.strip() for name, equals, value in lines if equals}


# --- small things --------------------------------------------------------------------------------


def _by_queue(content: Any, value_type: type[Any]) -> dict[QueueName, Any]:
    table = _require_table(_require_table(content).get("offsetTable", {}))
    try:
        return {
            decode_queue_key(key): msgspec.convert(value, value_type)
            for key, value in table.items()
        }
    except msgspec.ValidationError as error:
        raise BrokenBody(f"a table by queue: {error}") from error


def _require_table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BrokenBody("an answer that is no table")
    return value
