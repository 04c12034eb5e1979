"""The topics of a broker: what exists, what may be created, what goes to the name server.

A producer that asks for an unknown topic names a template (`TBW102`); if the template may be
inherited from, the topic is made with as many queues as both sides allow. Every change moves the
data version, by which name servers notice it.

Consumer groups as they are configured; who is connected is in `consume/members.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from escrowmq.errors import RequestRefused
from escrowmq.message import names
from escrowmq.message.names import (
    BENCHMARK_TOPIC,
    BROKER_ONLY_TOPICS,
    OFFSET_MOVED_TOPIC,
    RETRY_PREFIX,
    SELF_TEST_TOPIC,
    SYSTEM_GROUPS,
    TEMPLATE_TOPIC,
    TIMER_TOPIC,
    is_group_topic,
    is_system_topic,
    reply_topic,
)
from escrowmq.message.topic_config import (
    PERM_INHERIT,
    PERM_READ,
    PERM_WRITE,
    DataVersion,
    TopicConfig,
)
from escrowmq.remoting.codes import ResponseCode
from escrowmq.store.config_files import ConfigFile, GroupConfig

_NAME_PATTERN = re.compile(r"[%|a-zA-Z0-9_-]+")
_TOPIC_LENGTH_MAX = 127
_GROUP_TOPIC_LENGTH_MAX = 255


def check_topic_name(topic: str) -> None:
    long = is_group_topic(topic)
    limit = _GROUP_TOPIC_LENGTH_MAX if long else _TOPIC_LENGTH_MAX
    if not _NAME_PATTERN.fullmatch(topic):
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER,
            f"the topic {topic[:100]!r} may only have letters, digits and %|_-",
        )
    if len(topic) > limit:
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER, f"a topic of {len(topic)} characters, limit {limit}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicTableRules:
    cluster: str
    broker_name: str
    auto_create: bool = True
    template_queue_count: int = 8
    has_cluster_topic: bool = True
    has_broker_topic: bool = True


class TopicTable:
    """`changed` is called after every change, so that name servers hear of it at once."""

    def __init__(
        self,
        file: ConfigFile,
        rules: TopicTableRules,
        on_changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._file = file
        self._rules = rules
        self._on_changed = on_changed
        self._topics = file.entries("topicConfigTable", TopicConfig)
        self.version: DataVersion = file.version()
        self.is_dirty = False
        # How many queues a topic has, if anybody may send to it: asked for every send.
        self.sendable_queue_counts: dict[str, int] = {}
        self._create_system_topics()
        self._update_all_queue_counts()

    def is_system(self, topic: str) -> bool:
        """Also those that have the name of the broker or of its cluster."""
        cluster, broker = self._rules.cluster, self._rules.broker_name
        return is_system_topic(topic) or topic in (cluster, broker, reply_topic(cluster))

    @property
    def broker_name(self) -> str:
        return self._rules.broker_name

    def find(self, topic: str) -> TopicConfig | None:
        return self._topics.get(topic)

    def configs(self) -> dict[str, TopicConfig]:
        return dict(self._topics)

    def put(self, config: TopicConfig, *, now_ms: int) -> None:
        self._topics[config.topic_name] = config
        self._update_queue_count(config)
        self._mark_changed(now_ms)

    def remove(self, topic: str, *, now_ms: int) -> bool:
        if self._topics.pop(topic, None) is None:
            return False
        self.sendable_queue_counts.pop(topic, None)
        self._mark_changed(now_ms)
        return True

    def change_rules(self, rules: TopicTableRules, *, now_ms: int) -> None:
        self._rules = rules
        self._create_system_topics()
        if self.is_dirty:
            self._update_all_queue_counts()
            self._mark_changed(now_ms)

    def get_or_create(
        self, topic: str, *, template: str, queue_count: int, now_ms: int
    ) -> TopicConfig | None:
        """The topic, made from its template if that is allowed; None if it is not."""
        found = self._topics.get(topic)
        if found is not None:
            return found
        if topic.startswith(RETRY_PREFIX):
            return self.ensure(topic, queue_count=1, now_ms=now_ms)
        pattern = self._topics.get(template)
        if pattern is None or not pattern.perm & PERM_INHERIT:
            return None
        if template == TEMPLATE_TOPIC and not self._rules.auto_create:
            return None
        count = max(0, min(queue_count, pattern.write_queue_nums))
        return self.ensure(
            topic, queue_count=count, perm=pattern.perm & ~PERM_INHERIT, now_ms=now_ms
        )

    def ensure(
        self, topic: str, *, queue_count: int, now_ms: int, perm: int = PERM_READ | PERM_WRITE
    ) -> TopicConfig:
        found = self._topics.get(topic)
        if found is None:
            found = TopicConfig(
                topic_name=topic,
                read_queue_nums=queue_count,
                write_queue_nums=queue_count,
                perm=perm,
            )
            self.put(found, now_ms=now_ms)
        return found

    def save(self) -> None:
        self._file.save(topicConfigTable=self._topics, dataVersion=self.version)
        self.is_dirty = False

    def _update_all_queue_counts(self) -> None:
        for config in self._topics.values():
            self._update_queue_count(config)

    def _update_queue_count(self, config: TopicConfig) -> None:
        name = config.topic_name
        closed = name in BROKER_ONLY_TOPICS or name.startswith(RETRY_PREFIX)
        if closed or not config.perm & PERM_WRITE:
            self.sendable_queue_counts.pop(name, None)
        else:
            self.sendable_queue_counts[name] = max(config.read_queue_nums, config.write_queue_nums)

    def _mark_changed(self, now_ms: int) -> None:
        self.version = self.version.next(now_ms)
        self.is_dirty = True
        self._on_changed()

    def _create_system_topics(self) -> None:
        rules, open_to_all = self._rules, PERM_READ | PERM_WRITE | PERM_INHERIT
        wanted = [
            (SELF_TEST_TOPIC, 1, PERM_READ | PERM_WRITE),
            (BENCHMARK_TOPIC, 1024, PERM_READ | PERM_WRITE),
            *([(rules.cluster, 16, open_to_all)] if rules.has_cluster_topic else []),
            *([(rules.broker_name, 1, open_to_all)] if rules.has_broker_topic else []),
            (OFFSET_MOVED_TOPIC, 1, PERM_READ | PERM_WRITE),
            (names.SCHEDULE_TOPIC, 18, PERM_READ | PERM_WRITE),
            (reply_topic(rules.cluster), 1, PERM_READ | PERM_WRITE),
            (names.HALF_TOPIC, 1, PERM_READ | PERM_WRITE),
            (names.OP_TOPIC, 1, PERM_READ | PERM_WRITE),
            (names.STRANDED_TOPIC, 1, PERM_READ | PERM_WRITE),
            (names.JOURNAL_TOPIC, 1, PERM_READ | PERM_WRITE),
            (names.DECISION_TOPIC, 1, PERM_READ | PERM_WRITE),
            (TIMER_TOPIC, 1, PERM_READ | PERM_WRITE),
        ]
        template = self._topics.get(TEMPLATE_TOPIC)
        if rules.auto_create and template is None:
            wanted.append((TEMPLATE_TOPIC, rules.template_queue_count, open_to_all))
        elif template is not None and rules.auto_create != bool(template.perm & PERM_INHERIT):
            # Clients ask for the template and look at this bit before they use it.
            self._topics[TEMPLATE_TOPIC] = msgspec.structs.replace(
                template, perm=template.perm ^ PERM_INHERIT
            )
            self.is_dirty = True
        for topic, queues, perm in wanted:
            if topic not in self._topics:
                self._topics[topic] = TopicConfig(
                    topic_name=topic, read_queue_nums=queues, write_queue_nums=queues, perm=perm
                )
                self.is_dirty = True


GROUP_NAME_LENGTH_MAX: Final = 120


def is_valid_group_name(name: str) -> bool:
    return bool(_NAME_PATTERN.fullmatch(name)) and len(name) <= GROUP_NAME_LENGTH_MAX


class SubscriptionGroups:
    def __init__(self, file: ConfigFile, *, auto_create: bool) -> None:
        self._file = file
        self.auto_create = auto_create
        self._groups = file.entries("subscriptionGroupTable", GroupConfig)
        self.version: DataVersion = file.version()
        self.is_dirty = False
        for name in SYSTEM_GROUPS:
            self._groups.setdefault(name, GroupConfig(group_name=name))

    def find(self, name: str) -> GroupConfig | None:
        return self._groups.get(name)

    def get_or_create(self, name: str, *, now_ms: int) -> GroupConfig | None:
        """None if it may not be made: by the settings, or by its name."""
        found = self._groups.get(name)
        if found is None and self.auto_create and is_valid_group_name(name):
            found = GroupConfig(group_name=name)
            self.put(found, now_ms=now_ms)
        return found

    def put(self, config: GroupConfig, *, now_ms: int) -> None:
        self._groups[config.group_name] = config
        self.version = self.version.next(now_ms)
        self.is_dirty = True

    def remove(self, name: str, *, now_ms: int) -> bool:
        if self._groups.pop(name, None) is None:
            return False
        self.version = self.version.next(now_ms)
        self.is_dirty = True
        return True

    def configs(self) -> dict[str, GroupConfig]:
        return dict(self._groups)

    def save(self) -> None:
        self._file.save(subscriptionGroupTable=self._groups, dataVersion=self.version)
        self.is_dirty = False
