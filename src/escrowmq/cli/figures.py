"""What one broker says about its topics, groups and itself, as values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from escrowmq.broker.metadata import DLQ_PREFIX, RETRY_PREFIX, is_system_group
from escrowmq.cli.call import Caller
from escrowmq.errors import BrokenBody, RequestRefused
from escrowmq.parsing import lenient_json
from escrowmq.remoting.bodies import QueueName, TopicConfig, TopicConfigs, TopicList, decode_body
from escrowmq.remoting.bodies_admin import (
    ConsumeOffset,
    ConsumerConnections,
    GroupList,
    Table,
    TopicOffset,
    queue_of,
    queue_tables,
)
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import ConsumerGroup
from escrowmq.remoting.headers_admin import BrokerConsumeStats, ConsumeStatsOf, TopicName

Offsets = dict[QueueName, TopicOffset]
Progress = dict[QueueName, ConsumeOffset]
# A request about one of many may come too late: somebody has deleted it meanwhile.
GONE: Final = (ResponseCode.TOPIC_NOT_EXIST, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST)

is_own_group = is_system_group


def is_inner(topic: str) -> bool:
    """Of a group, not of somebody who sends."""
    return topic.startswith((RETRY_PREFIX, DLQ_PREFIX))


# --- topics --------------------------------------------------------------------------------------


def topic_configs(caller: Caller) -> dict[str, TopicConfig]:
    body = caller.call(RequestCode.GET_ALL_TOPIC_CONFIG).body
    return decode_body(TopicConfigs, body).topic_config_table


def topic_config(caller: Caller, topic: str) -> TopicConfig:
    body = caller.call(RequestCode.GET_TOPIC_CONFIG, TopicName(topic=topic)).body
    return decode_body(TopicConfig, body)


def own_topics(caller: Caller) -> set[str]:
    """Those that belong to the broker."""
    body = caller.call(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER).body
    return set(decode_body(TopicList, body).topic_list)


def topic_offsets(caller: Caller, topics: Sequence[str]) -> dict[str, Offsets]:
    """By topic; those that are not there are left out."""
    names = (TopicName(topic=topic) for topic in topics)
    found = {}
    answers = caller.call_many(RequestCode.GET_TOPIC_STATS_INFO, names)
    for topic, reply in zip(topics, answers, strict=True):
        if not isinstance(reply, RequestRefused):
            found[topic] = _by_queue(queue_tables(reply.body), TopicOffset)
        elif reply.code not in GONE:
            raise reply
    return found


def groups_of(caller: Caller, topic: str) -> list[str]:
    body = caller.call(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, TopicName(topic=topic)).body
    return decode_body(GroupList, body).group_list


# --- groups --------------------------------------------------------------------------------------


def group_configs(caller: Caller) -> dict[str, dict[str, Any]]:
    body = caller.call(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body
    table = _table(lenient_json(body)).get("subscriptionGroupTable")
    return dict(_table(table))


def progress_of_all(caller: Caller) -> dict[str, Progress]:
    """How far every group is, by its name."""
    body = caller.call(RequestCode.GET_BROKER_CONSUME_STATS, BrokerConsumeStats()).body
    found: dict[str, Progress] = {}
    for entry in _table(queue_tables(body)).get("consumeStatsList", ()):
        for group, tables in _table(entry).items():
            progress = found.setdefault(group, {})
            for table in tables:
                progress.update(_by_queue(table, ConsumeOffset))
    return found


def progress_of(caller: Caller, group: str, topic: str | None = None) -> Progress:
    asked = ConsumeStatsOf(consumer_group=group, topic=topic)
    body = caller.call(RequestCode.GET_CONSUME_STATS, asked).body
    return _by_queue(queue_tables(body), ConsumeOffset)


def connections(caller: Caller, groups: Sequence[str]) -> dict[str, ConsumerConnections]:
    """Of those groups of which anybody is connected."""
    asked = (ConsumerGroup(consumer_group=group) for group in groups)
    found = {}
    replies = caller.call_many(RequestCode.GET_CONSUMER_CONNECTION_LIST, asked)
    for group, reply in zip(groups, replies, strict=True):
        if not isinstance(reply, RequestRefused):
            found[group] = decode_body(ConsumerConnections, reply.body)
        elif reply.code != ResponseCode.CONSUMER_NOT_ONLINE:
            raise reply
    return found


def lag_of(progress: Iterable[ConsumeOffset]) -> int:
    return sum(max(0, one.broker_offset - one.consumer_offset) for one in progress)


# --- the broker ----------------------------------------------------------------------------------


def runtime(caller: Caller) -> dict[str, str]:
    body = caller.call(RequestCode.GET_BROKER_RUNTIME_INFO).body
    return decode_body(Table, body).table


def settings(caller: Caller) -> dict[str, str]:
    text = str(caller.call(RequestCode.GET_BROKER_CONFIG).body, "utf-8", "replace")
    lines = (line.partition("=") for line in text.splitlines() if not line.startswith("#"))
    return {name.strip(): value.strip() for name, equals, value in lines if equals}


# --- small things --------------------------------------------------------------------------------


def _by_queue(content: Any, kind: type[Any]) -> dict[QueueName, Any]:
    table = _table(_table(content).get("offsetTable", {}))
    try:
        return {queue_of(key): msgspec.convert(value, kind) for key, value in table.items()}
    except msgspec.ValidationError as error:
        raise BrokenBody(f"a table by queue: {error}") from error


def _table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BrokenBody("an answer that is no table")
    return value
