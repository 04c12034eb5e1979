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

from escrowmq.errors import RequestRefused
from escrowmq.message import names
from escrowmq.remoting.codes import ResponseCode
from escrowmq.store.config_files import ConfigFile, DataVersion, GroupConfig, TopicConfig

READ: Final = 4
WRITE: Final = 2
INHERIT: Final = 1

TEMPLATE_TOPIC: Final = "TBW102"
RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"
SELF_TEST_TOPIC: Final = "SELF_TEST_TOPIC"
OFFSET_MOVED_TOPIC: Final = "OFFSET_MOVED_EVENT"
TIMER_TOPIC: Final = "rmq_sys_wheel_timer"

# Only the broker itself writes here.
CLOSED_TO_SENDERS: Final = frozenset(
    (
        names.SCHEDULE_TOPIC,
        names.HALF_TOPIC,
        names.OP_TOPIC,
        names.STRANDED_TOPIC,
        names.JOURNAL_TOPIC,
        names.DECISION_TOPIC,
        SELF_TEST_TOPIC,
        OFFSET_MOVED_TOPIC,
        TIMER_TOPIC,
    )
)

# Nobody makes or removes these by hand.
SYSTEM_TOPICS: Final = CLOSED_TO_SENDERS | {TEMPLATE_TOPIC, "BenchmarkTest"}


def is_system_topic(topic: str) -> bool:
    return topic in SYSTEM_TOPICS or topic.startswith("rmq_sys_")


_NAME = re.compile(r"[%|a-zA-Z0-9_-]+")
_NAME_LENGTH_MAX = 127
_LONG_NAME_LENGTH_MAX = 255


def refuse_bad_topic_name(topic: str) -> None:
    long = topic.startswith((RETRY_PREFIX, DLQ_PREFIX))
    limit = _LONG_NAME_LENGTH_MAX if long else _NAME_LENGTH_MAX
    if not _NAME.fullmatch(topic):
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER,
            f"the topic {topic[:100]!r} may only have letters, digits and %|_-",
        )
    if len(topic) > limit:
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER, f"a topic of {len(topic)} characters, limit {limit}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRules:
    cluster: str
    broker_name: str
    auto_create: bool = True
    template_queues: int = 8
    has_cluster_topic: bool = True
    has_broker_topic: bool = True


class Topics:
    """`changed` is called after every change, so that name servers hear of it at once."""

    def __init__(
        self, file: ConfigFile, rules: TopicRules, changed: Callable[[], None] = lambda: None
    ) -> None:
        self._file = file
        self._rules = rules
        self._changed = changed
        self._topics = file.entries("topicConfigTable", TopicConfig)
        self.version: DataVersion = file.version()
        self.dirty = False
        # How many queues a topic has, if anybody may send to it: asked for every send.
        self.open_queues: dict[str, int] = {}
        self._make_system_topics()
        self._note_all_open()

    def is_system(self, topic: str) -> bool:
        """Also those that have the name of the broker or of its cluster."""
        cluster, broker = self._rules.cluster, self._rules.broker_name
        return is_system_topic(topic) or topic in (cluster, broker, f"{cluster}_REPLY_TOPIC")

    @property
    def broker_name(self) -> str:
        return self._rules.broker_name

    def find(self, topic: str) -> TopicConfig | None:
        return self._topics.get(topic)

    def all(self) -> dict[str, TopicConfig]:
        return dict(self._topics)

    def put(self, config: TopicConfig, *, now_ms: int) -> None:
        self._topics[config.topic_name] = config
        self._note_open(config)
        self._touch(now_ms)

    def remove(self, topic: str, *, now_ms: int) -> bool:
        if self._topics.pop(topic, None) is None:
            return False
        self.open_queues.pop(topic, None)
        self._touch(now_ms)
        return True

    def change_rules(self, rules: TopicRules, *, now_ms: int) -> None:
        self._rules = rules
        self._make_system_topics()
        if self.dirty:
            self._note_all_open()
            self._touch(now_ms)

    def find_or_make(
        self, topic: str, *, template: str, queues: int, now_ms: int
    ) -> TopicConfig | None:
        """The topic, made from its template if that is allowed; None if it is not."""
        found = self._topics.get(topic)
        if found is not None:
            return found
        if topic.startswith(RETRY_PREFIX):
            return self.make(topic, queues=1, now_ms=now_ms)
        pattern = self._topics.get(template)
        if pattern is None or not pattern.perm & INHERIT:
            return None
        if template == TEMPLATE_TOPIC and not self._rules.auto_create:
            return None
        count = max(0, min(queues, pattern.write_queue_nums))
        return self.make(topic, queues=count, perm=pattern.perm & ~INHERIT, now_ms=now_ms)

    def make(
        self, topic: str, *, queues: int, now_ms: int, perm: int = READ | WRITE
    ) -> TopicConfig:
        found = self._topics.get(topic)
        if found is None:
            found = TopicConfig(
                topic_name=topic, read_queue_nums=queues, write_queue_nums=queues, perm=perm
            )
            self.put(found, now_ms=now_ms)
        return found

    def save(self) -> None:
        self._file.save(topicConfigTable=self._topics, dataVersion=self.version)
        self.dirty = False

    def _note_all_open(self) -> None:
        for config in self._topics.values():
            self._note_open(config)

    def _note_open(self, config: TopicConfig) -> None:
        name = config.topic_name
        closed = name in CLOSED_TO_SENDERS or name.startswith(RETRY_PREFIX)
        if closed or not config.perm & WRITE:
            self.open_queues.pop(name, None)
        else:
            self.open_queues[name] = max(config.read_queue_nums, config.write_queue_nums)

    def _touch(self, now_ms: int) -> None:
        self.version = self.version.next(now_ms)
        self.dirty = True
        self._changed()

    def _make_system_topics(self) -> None:
        rules, open_to_all = self._rules, READ | WRITE | INHERIT
        wanted = [
            (SELF_TEST_TOPIC, 1, READ | WRITE),
            ("BenchmarkTest", 1024, READ | WRITE),
            *([(rules.cluster, 16, open_to_all)] if rules.has_cluster_topic else []),
            *([(rules.broker_name, 1, open_to_all)] if rules.has_broker_topic else []),
            (OFFSET_MOVED_TOPIC, 1, READ | WRITE),
            (names.SCHEDULE_TOPIC, 18, READ | WRITE),
            (f"{rules.cluster}_REPLY_TOPIC", 1, READ | WRITE),
            (names.HALF_TOPIC, 1, READ | WRITE),
            (names.OP_TOPIC, 1, READ | WRITE),
            (names.STRANDED_TOPIC, 1, READ | WRITE),
            (names.JOURNAL_TOPIC, 1, READ | WRITE),
            (names.DECISION_TOPIC, 1, READ | WRITE),
            (TIMER_TOPIC, 1, READ | WRITE),
        ]
        template = self._topics.get(TEMPLATE_TOPIC)
        if rules.auto_create and template is None:
            wanted.append((TEMPLATE_TOPIC, rules.template_queues, open_to_all))
        elif template is not None and rules.auto_create != bool(template.perm & INHERIT):
            template.perm ^= INHERIT  # clients must take it for one now, or must not
            self.dirty = True
        for topic, queues, perm in wanted:
            if topic not in self._topics:
                self._topics[topic] = TopicConfig(
                    topic_name=topic, read_queue_nums=queues, write_queue_nums=queues, perm=perm
                )
                self.dirty = True


NAME_LENGTH_MAX: Final = 120
# Those that RocketMQ's own tools and brokers use.
_SYSTEM_GROUPS: Final = (
    "TOOLS_CONSUMER",
    "SELF_TEST_C_GROUP",
    "CID_RMQ_SYS_TRANS",
    "CID_ONSAPI_OWNER",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_PULL",
    "CID_SYS_RMQ_TRANS",
)


def is_system_group(name: str) -> bool:
    return name in _SYSTEM_GROUPS


def is_group_name(name: str) -> bool:
    return bool(_NAME.fullmatch(name)) and len(name) <= NAME_LENGTH_MAX


class Groups:
    def __init__(self, file: ConfigFile, *, auto_create: bool) -> None:
        self._file = file
        self.auto_create = auto_create
        self._groups = file.entries("subscriptionGroupTable", GroupConfig)
        self.version: DataVersion = file.version()
        self.dirty = False
        for name in _SYSTEM_GROUPS:
            self._groups.setdefault(name, GroupConfig(group_name=name))

    def find(self, name: str) -> GroupConfig | None:
        return self._groups.get(name)

    def find_or_make(self, name: str, *, now_ms: int) -> GroupConfig | None:
        """None if it may not be made: by the settings, or by its name."""
        found = self._groups.get(name)
        if found is None and self.auto_create and is_group_name(name):
            found = GroupConfig(group_name=name)
            self.put(found, now_ms=now_ms)
        return found

    def put(self, config: GroupConfig, *, now_ms: int) -> None:
        self._groups[config.group_name] = config
        self.version = self.version.next(now_ms)
        self.dirty = True

    def remove(self, name: str, *, now_ms: int) -> bool:
        if self._groups.pop(name, None) is None:
            return False
        self.version = self.version.next(now_ms)
        self.dirty = True
        return True

    def all(self) -> dict[str, GroupConfig]:
        return dict(self._groups)

    def save(self) -> None:
        self._file.save(subscriptionGroupTable=self._groups, dataVersion=self.version)
        self.dirty = False
