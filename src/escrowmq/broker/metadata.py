"""The topics and the subscription groups that exist, as tables with a file each.

A send to an unknown topic names a template (`TBW102`). If topics may inherit from the template,
the topic is created with as many queues as the client asks for and the template allows. Every
change advances the data version, by which name servers notice it.

Any client can make up names, so nothing is created automatically when there are very many topics or
groups already. Administrators can still create some.

A change is made in memory first. The broker saves it before it responds to the request, and undoes
it with `revert` if that fails; so a client is told what is on the disk.

Subscription groups are the configuration of consumer groups. `consume/members.py` knows which
members are connected.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec

from escrowmq.config import BrokerConfig
from escrowmq.errors import RequestRefused
from escrowmq.limited_log import LimitedLog
from escrowmq.message import names
from escrowmq.message.names import (
    BENCHMARK_TOPIC,
    NAME_PATTERN,
    OFFSET_MOVED_TOPIC,
    RETRY_PREFIX,
    SELF_TEST_TOPIC,
    SYSTEM_GROUPS,
    TEMPLATE_TOPIC,
    TIMER_TOPIC,
    has_control_characters,
    is_closed_group,
    is_system_topic,
    is_writable_topic,
    reply_topic,
    topic_name_error,
)
from escrowmq.message.topic_config import (
    PERM_INHERIT,
    PERM_READ,
    PERM_WRITE,
    DataVersion,
    TopicConfig,
)
from escrowmq.remoting.codes import ResponseCode
from escrowmq.store.config_files import (
    REMOVED_TOPICS_KEY,
    TOPIC_TABLE_KEY,
    ConfigFile,
    GroupConfig,
    missing_topics,
)
from escrowmq.store.damage import DamageKind, DamageReports

log = logging.getLogger(__name__)

GROUP_NAME_LENGTH_MAX: Final = 120
REMOVED_TOPICS_MAX: Final = 1_000  # names of deleted topics that are kept
_SHOWN_LENGTH_MAX: Final = 100  # of a client's text that an error repeats


def check_topic_name(topic: str) -> None:
    """Raise RequestRefused if a topic cannot have this name."""
    if error := topic_name_error(topic):
        raise RequestRefused(ResponseCode.INVALID_PARAMETER, error)


def check_is_printable(kind: str, name: str) -> None:
    """Raise RequestRefused if a name has control characters, of which line breaks are the worst."""
    if has_control_characters(name):
        raise RequestRefused(
            ResponseCode.INVALID_PARAMETER,
            f"{kind} {name[:_SHOWN_LENGTH_MAX]!r} contains control characters",
        )


def is_valid_group_name(name: str) -> bool:
    return bool(NAME_PATTERN.fullmatch(name)) and len(name) <= GROUP_NAME_LENGTH_MAX


# --- topics --------------------------------------------------------------------------------------


class TopicTable:
    """The topics that exist. `on_changed` is called after every change, to inform name servers."""

    def __init__(
        self,
        file: ConfigFile,
        config: BrokerConfig,
        on_changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._file = file
        self._config = config
        self._on_changed = on_changed
        self._topics = file.entries(TOPIC_TABLE_KEY, TopicConfig)
        # Topics that were deleted, the last ones; see REMOVED_TOPICS_KEY.
        self._removed = dict.fromkeys(file.names(REMOVED_TOPICS_KEY))
        self.version: DataVersion = file.version()
        self.change_count = 0  # also of changes that were undone
        self.is_dirty = False
        self.is_file_uncertain = False  # a save has failed, so the file may differ from the table
        # What each changed topic was when the table was saved; None if it did not exist.
        self._unsaved: dict[str, TopicConfig | None] = {}
        self._staged: list[tuple[TopicConfig, int]] | None = None
        self._limited_log = LimitedLog(log)
        self.refused_creations = 0
        # Number of queues of each topic that clients may send to. Every send reads it.
        self.sendable_queue_counts: dict[str, int] = {}
        self._create_system_topics()
        self._update_all_queue_counts()

    def is_system(self, topic: str) -> bool:
        """Return whether the broker owns a topic, by its name or by that of its cluster."""
        config = self._config
        cluster, broker = config.cluster_name, config.broker_name
        if config.has_trace_topic and topic == config.trace_topic:
            return True
        return is_system_topic(topic) or topic in (cluster, broker, reply_topic(cluster))

    @property
    def broker_name(self) -> str:
        return self._config.broker_name

    def find(self, topic: str) -> TopicConfig | None:
        return self._topics.get(topic)

    def get(self, topic: str) -> TopicConfig:
        """Return the topic. Raise RequestRefused with TOPIC_NOT_EXIST."""
        config = self._topics.get(topic)
        if config is None:
            raise RequestRefused(
                ResponseCode.TOPIC_NOT_EXIST, f"topic {topic[:_SHOWN_LENGTH_MAX]} does not exist"
            )
        return config

    def configs(self) -> dict[str, TopicConfig]:
        return dict(self._topics)

    def put(self, config: TopicConfig, *, now_ms: int) -> None:
        self._unsaved.setdefault(config.topic_name, self._topics.get(config.topic_name))
        self._topics[config.topic_name] = config
        self._removed.pop(config.topic_name, None)
        self._update_queue_count(config)
        self._mark_changed(now_ms)

    def remove(self, topic: str, *, now_ms: int) -> bool:
        config = self._topics.pop(topic, None)
        if config is None:
            return False
        self._unsaved.setdefault(topic, config)
        self._note_removed(topic)
        self.sendable_queue_counts.pop(topic, None)
        self._mark_changed(now_ms)
        return True

    def _note_removed(self, topic: str) -> None:
        self._removed.pop(topic, None)
        self._removed[topic] = None
        if len(self._removed) > REMOVED_TOPICS_MAX:
            del self._removed[next(iter(self._removed))]

    def change_config(self, config: BrokerConfig, *, now_ms: int) -> None:
        self._config = config
        self._create_system_topics()
        if self.is_dirty:
            self._update_all_queue_counts()
            self._mark_changed(now_ms)

    def get_or_create(
        self, topic: str, *, template: str, queue_count: int, now_ms: int
    ) -> TopicConfig | None:
        """Return the topic, created from its template if need be; None if that is not allowed.

        Raises RequestRefused with TOPIC_NOT_EXIST if there are too many topics to create another.
        """
        config = self._topics.get(topic)
        if config is not None:
            return config
        if topic.startswith(RETRY_PREFIX):
            return self.ensure(topic, queue_count=1, now_ms=now_ms)
        parent = self._topics.get(template)
        # The topics of the cluster and of the broker are templates too, as is any that an operator
        # has created with this permission. The setting holds for all of them.
        if not self._config.creates_topics or parent is None or not parent.perm & PERM_INHERIT:
            return None
        self._check_room(topic, now_ms)
        count = max(0, min(queue_count, parent.write_queue_nums))
        perm = parent.perm & ~PERM_INHERIT
        return self.ensure(topic, queue_count=count, perm=perm, now_ms=now_ms)

    def _check_room(self, topic: str, now_ms: int) -> None:
        """Raise RequestRefused if no topic may be created automatically any more."""
        # These are all topics that clients can send to. The retry topics are as many as the groups.
        topics_max = self._config.auto_topics_max
        if len(self.sendable_queue_counts) < topics_max:
            return
        self.refused_creations += 1
        reason = f"there are escrowAutoTopicsMax={topics_max} topics or more"
        self._limited_log.warning(now_ms, "topic not created topic=%s: %s", topic, reason)
        raise RequestRefused(
            ResponseCode.TOPIC_NOT_EXIST,
            f"topic {topic[:_SHOWN_LENGTH_MAX]} does not exist and is not created automatically: "
            f"{reason}; create it, or raise the limit",
        )

    def queue_count(self, topic: str) -> int | None:
        """Return the number of queues of a topic; None if there is no such topic."""
        config = self._topics.get(topic)
        return None if config is None else max(config.read_queue_nums, config.write_queue_nums)

    def ensure(
        self, topic: str, *, queue_count: int, now_ms: int, perm: int = PERM_READ | PERM_WRITE
    ) -> TopicConfig:
        """Return the topic, created if need be. No template is needed."""
        config = self._topics.get(topic)
        if config is None:
            config = _new_topic(topic, queue_count, perm)
            if self._staged is None:
                self.put(config, now_ms=now_ms)
            else:
                self._topics[topic] = config
                self._staged.append((config, now_ms))
        return config

    def stage_creations(self) -> None:
        """Let topics that are created from now on wait for `end_creations()`."""
        self._staged = []

    def end_creations(self, *, is_kept: bool) -> None:
        """Keep the topics that were created since `stage_creations()`, or forget them."""
        staged, self._staged = self._staged or [], None
        for config, now_ms in staged:
            del self._topics[config.topic_name]
            if is_kept:
                self.put(config, now_ms=now_ms)

    def save(self) -> None:
        """Save the table, durably. Raises StoreError."""
        self.is_file_uncertain = True
        tables: dict[str, Any] = {TOPIC_TABLE_KEY: self._topics, "dataVersion": self.version}
        if self._removed or self._file.names(REMOVED_TOPICS_KEY):
            tables[REMOVED_TOPICS_KEY] = list(self._removed)
        self._file.save(**tables)
        self.is_dirty = self.is_file_uncertain = False
        self._unsaved.clear()

    def revert(self) -> None:
        """Undo every change since the table was saved, because it could not be saved again."""
        self.change_count += 1
        for name, config in self._unsaved.items():
            if config is None:
                self._topics.pop(name, None)
                self.sendable_queue_counts.pop(name, None)
            else:
                self._topics[name] = config
                self._update_queue_count(config)
        self._unsaved.clear()
        self._removed = dict.fromkeys(self._file.names(REMOVED_TOPICS_KEY))
        self.is_dirty = False
        self._on_changed()

    def restore_missing(self, queues: Iterable[tuple[str, int]], damage: DamageReports) -> None:
        """Report the topics of queues that the table does not have, and create them again.

        Its file was damaged, or somebody has put an older one back. Their settings are lost, except
        for the number of queues that have messages. A file that this broker has not written is
        believed: RocketMQ leaves queues of topics that it has deleted, and an operator may have
        removed a topic from it. So such topics are reported once and stay deleted.
        """
        is_restoring = self._file.has_checksum or not self._file.was_intact
        for topic, count in missing_topics(self._file, queues).items():
            if topic in self._topics:
                continue  # a system topic, created just now
            self.is_dirty = True
            description = f"topic {topic} has messages but was not in the table; "
            if is_restoring:
                self._topics[topic] = _new_topic(topic, count, PERM_READ | PERM_WRITE)
                self._update_queue_count(self._topics[topic])
                description += f"it was created again with {count} queues and default settings"
            else:
                self._note_removed(topic)
                description += (
                    "the file was not written by this broker, so the topic counts as deleted; "
                    f"create it with {count} queues to read them"
                )
            damage.add(
                DamageKind.CONFIG, "config/topics.json", description, is_repaired=is_restoring
            )

    def _update_all_queue_counts(self) -> None:
        for config in self._topics.values():
            self._update_queue_count(config)

    def _update_queue_count(self, config: TopicConfig) -> None:
        self.change_count += 1
        name = config.topic_name
        is_closed = not is_writable_topic(name) or name.startswith(RETRY_PREFIX)
        if is_closed or not config.perm & PERM_WRITE:
            self.sendable_queue_counts.pop(name, None)
        else:
            self.sendable_queue_counts[name] = max(config.read_queue_nums, config.write_queue_nums)

    def _mark_changed(self, now_ms: int) -> None:
        self.change_count += 1
        self.version = self.version.next(now_ms)
        self.is_dirty = True
        self._on_changed()

    def _create_system_topics(self) -> None:
        config, read_write = self._config, PERM_READ | PERM_WRITE
        inheritable = read_write | PERM_INHERIT
        system_topics = [
            (SELF_TEST_TOPIC, 1, read_write),
            (BENCHMARK_TOPIC, 1024, read_write),
            *([(config.cluster_name, 16, inheritable)] if config.has_cluster_topic else []),
            *([(config.broker_name, 1, inheritable)] if config.has_broker_topic else []),
            *([(config.trace_topic, 1, read_write)] if config.has_trace_topic else []),
            (OFFSET_MOVED_TOPIC, 1, read_write),
            (names.SCHEDULE_TOPIC, 18, read_write),
            (reply_topic(config.cluster_name), 1, read_write),
            (names.HALF_TOPIC, 1, read_write),
            (names.OP_TOPIC, 1, read_write),
            (names.STRANDED_TOPIC, 1, read_write),
            (names.JOURNAL_TOPIC, 1, read_write),
            (names.DECISION_TOPIC, 1, read_write),
            (names.DELIVERY_TOPIC, 1, read_write),
            (TIMER_TOPIC, 1, read_write),
        ]
        template = self._topics.get(TEMPLATE_TOPIC)
        if config.creates_topics and template is None:
            system_topics.append((TEMPLATE_TOPIC, config.topic_queues, inheritable))
        elif template is not None and config.creates_topics != bool(template.perm & PERM_INHERIT):
            # Clients look at this bit to see whether they may send to unknown topics.
            self._topics[TEMPLATE_TOPIC] = msgspec.structs.replace(
                template, perm=template.perm ^ PERM_INHERIT
            )
            self.is_dirty = True
        for topic, queue_count, perm in system_topics:
            if topic not in self._topics:
                self._topics[topic] = _new_topic(topic, queue_count, perm)
                self.is_dirty = True


def _new_topic(name: str, queue_count: int, perm: int) -> TopicConfig:
    return TopicConfig(
        topic_name=name, read_queue_nums=queue_count, write_queue_nums=queue_count, perm=perm
    )


# --- groups --------------------------------------------------------------------------------------


class SubscriptionGroups:
    """The consumer groups that exist, with their settings."""

    def __init__(
        self, file: ConfigFile, *, auto_create: bool, auto_groups_max: int = 10_000
    ) -> None:
        self._file = file
        self.auto_create = auto_create
        self.auto_groups_max = auto_groups_max
        self._limited_log = LimitedLog(log)
        self.refused_creations = 0
        self._groups = file.entries("subscriptionGroupTable", GroupConfig)
        self.version: DataVersion = file.version()
        self.change_count = 0  # also of changes that were undone
        self.is_dirty = False
        self.is_file_uncertain = False  # a save has failed, so the file may differ from the table
        # What each changed group was when the table was saved; None if it did not exist.
        self._unsaved: dict[str, GroupConfig | None] = {}
        self._staged: list[tuple[GroupConfig, int]] | None = None
        for name in SYSTEM_GROUPS:
            self._groups.setdefault(name, GroupConfig(group_name=name))

    def find(self, name: str) -> GroupConfig | None:
        return self._groups.get(name)

    def get(self, name: str) -> GroupConfig:
        """Return the group. Raise RequestRefused with SUBSCRIPTION_GROUP_NOT_EXIST."""
        config = self._groups.get(name)
        if config is None:
            raise self.not_found(name)
        return config

    def not_found(self, name: str) -> RequestRefused:
        """Return the refusal of a request that names a group which does not exist."""
        shown = name[:_SHOWN_LENGTH_MAX]
        remark = f"group {shown} does not exist"
        if self._can_have_name(name) and self._is_full:
            remark += (
                f" and is not created automatically: there are escrowAutoGroupsMax="
                f"{self.auto_groups_max} groups or more; create it, or raise the limit"
            )
        return RequestRefused(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark)

    def _can_have_name(self, name: str) -> bool:
        """Return whether a group with this name may be created automatically."""
        return self.auto_create and is_valid_group_name(name) and not is_closed_group(name)

    @property
    def _is_full(self) -> bool:
        return len(self._groups) >= self.auto_groups_max

    def get_or_create(self, name: str, *, now_ms: int) -> GroupConfig | None:
        """Return the group, created if need be.

        Return None if the settings or its name forbid that, or if there are too many groups.
        """
        config = self._groups.get(name)
        if config is None and self._can_have_name(name):
            if self._is_full:
                self.refused_creations += 1
                self._limited_log.warning(
                    now_ms,
                    "group not created group=%s: there are escrowAutoGroupsMax=%d groups or more",
                    name,
                    self.auto_groups_max,
                )
                return None
            config = GroupConfig(group_name=name)
            if self._staged is None:
                self.put(config, now_ms=now_ms)
            else:
                self._groups[name] = config
                self._staged.append((config, now_ms))
        return config

    def stage_creations(self) -> None:
        """Let groups that are created from now on wait for `end_creations()`."""
        self._staged = []

    def end_creations(self, *, is_kept: bool) -> None:
        """Keep the groups that were created since `stage_creations()`, or forget them."""
        staged, self._staged = self._staged or [], None
        for config, now_ms in staged:
            del self._groups[config.group_name]
            if is_kept:
                self.put(config, now_ms=now_ms)

    def require(self, name: str, *, now_ms: int) -> GroupConfig:
        """Return the group, created if need be. Raise SUBSCRIPTION_GROUP_NOT_EXIST."""
        config = self.get_or_create(name, now_ms=now_ms)
        if config is None:
            raise self.not_found(name)
        return config

    def put(self, config: GroupConfig, *, now_ms: int) -> None:
        self._unsaved.setdefault(config.group_name, self._groups.get(config.group_name))
        self._groups[config.group_name] = config
        self.version = self.version.next(now_ms)
        self.change_count += 1
        self.is_dirty = True

    def remove(self, name: str, *, now_ms: int) -> bool:
        config = self._groups.pop(name, None)
        if config is None:
            return False
        self._unsaved.setdefault(name, config)
        self.version = self.version.next(now_ms)
        self.change_count += 1
        self.is_dirty = True
        return True

    def configs(self) -> dict[str, GroupConfig]:
        return dict(self._groups)

    def save(self) -> None:
        """Save the table, durably. Raises StoreError."""
        self.is_file_uncertain = True
        self._file.save(subscriptionGroupTable=self._groups, dataVersion=self.version)
        self.is_dirty = self.is_file_uncertain = False
        self._unsaved.clear()

    def revert(self) -> None:
        """Undo every change since the table was saved, because it could not be saved again."""
        self.change_count += 1
        for name, config in self._unsaved.items():
            if config is None:
                self._groups.pop(name, None)
            else:
                self._groups[name] = config
        self._unsaved.clear()
        self.is_dirty = False


# --- creation by requests ------------------------------------------------------------------------


@contextlib.contextmanager
def creations_of_request(topics: TopicTable, groups: SubscriptionGroups) -> Iterator[None]:
    """Keep what is created in this block only if it ends without an error.

    A request may create a topic or a group before it is refused for another reason. A refused
    request has no effect, so both are forgotten then.
    """
    topics.stage_creations()
    groups.stage_creations()
    is_kept = False
    try:
        yield
        is_kept = True
    finally:
        topics.end_creations(is_kept=is_kept)
        groups.end_creations(is_kept=is_kept)
