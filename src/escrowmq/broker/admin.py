"""Looking after topics and groups: make, change, show, delete.

A deletion is answered when it is durable, in this order: offsets, settings, queues. Whatever a
crash leaves of it, no message is skipped, and the same request again finishes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from escrowmq.broker.groups import Groups, is_group_name, is_system_group
from escrowmq.broker.line import Line
from escrowmq.broker.topics import Topics, is_system_topic, refuse_bad_topic_name
from escrowmq.consume.offsets import ConsumerOffsets
from escrowmq.errors import BrokenBody, RequestRefused, StoreError
from escrowmq.message.fastjson import lenient_json
from escrowmq.store.configfiles import GroupConfig, TopicConfig, plain
from escrowmq.store.store import MessageStore
from escrowmq.wire.answers import answer, refuse, succeed
from escrowmq.wire.bodies import TopicList, encode_body
from escrowmq.wire.codes import ResponseCode
from escrowmq.wire.fastpath import Request
from escrowmq.wire.headers_admin import CreateTopic, DeleteGroup, GroupName, TopicName

QUEUES_MAX: Final = 65_536
ATTRIBUTES_MAX: Final = 100
DELETIONS_WAITING_MAX: Final = 1_000


class Admin:
    def __init__(
        self,
        store: MessageStore,
        topics: Topics,
        groups: Groups,
        offsets: ConsumerOffsets,
        save_offsets: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._save_offsets = save_offsets
        self._deletions: list[tuple[Line, Request[TopicName]]] = []  # that wait for their files

    # --- topics ----------------------------------------------------------------------------------

    def create_topic(self, line: Line, request: Request[CreateTopic], now_ms: int) -> None:
        fields = request.head.fields
        _refuse_system_topic(fields.topic)
        for count in (fields.read_queue_nums, fields.write_queue_nums):
            if not 0 <= count <= QUEUES_MAX:
                raise _bad(f"{count} queues, not 0 to {QUEUES_MAX}")
        if not 0 <= fields.perm <= 7:
            raise _bad(f"perm {fields.perm}: 2 is write, 4 is read, 6 is both")
        known = self._topics.find(fields.topic)
        wanted = TopicConfig(
            topic_name=fields.topic,
            read_queue_nums=fields.read_queue_nums,
            write_queue_nums=fields.write_queue_nums,
            perm=fields.perm,
            topic_filter_type=fields.topic_filter_type,
            topic_sys_flag=fields.topic_sys_flag,
            order=fields.order,
            attributes=_changed({} if known is None else known.attributes, fields.attributes),
        )
        if wanted != known:
            self._topics.put(wanted, now_ms=now_ms)
        line.write(succeed(request))

    def delete_topic(self, line: Line, request: Request[TopicName], now_ms: int) -> None:
        _refuse_system_topic(request.head.fields.topic)
        if len(self._deletions) >= DELETIONS_WAITING_MAX:
            raise RequestRefused(ResponseCode.SYSTEM_BUSY, "too many topics are being deleted")
        self._deletions.append((line, request))
        self.tick(now_ms)

    def tick(self, now_ms: int) -> None:
        """Delete what waited until nobody writes to its files."""
        waiting, self._deletions = self._deletions, []
        for line, request in waiting:
            topic = request.head.fields.topic
            if not self._store.may_remove_topic(topic):
                self._deletions.append((line, request))
                continue
            try:
                self._delete(topic, now_ms)
            except StoreError as error:
                failed = RequestRefused(ResponseCode.SYSTEM_ERROR, f"{topic} not deleted: {error}")
                line.write(refuse(request, failed))
            else:
                line.write(succeed(request))

    def _delete(self, topic: str, now_ms: int) -> None:
        self._offsets.remove_topic(topic)
        self._save_offsets()
        if self._topics.remove(topic, now_ms=now_ms):
            self._topics.save()
        self._store.remove_topic(topic)

    def clean_unused(self, line: Line, request: Request[Any], now_ms: int) -> None:
        """Queues of topics that are not there."""
        known = self._topics.all()
        for topic in {topic for topic, _ in self._store.queues()} - set(known):
            if not is_system_topic(topic) and self._store.may_remove_topic(topic):
                self._store.remove_topic(topic)
        line.write(succeed(request))

    def topic_config(self, line: Line, request: Request[TopicName], now_ms: int) -> None:
        topic = request.head.fields.topic
        found = self._topics.find(topic)
        if found is None:
            raise RequestRefused(
                ResponseCode.TOPIC_NOT_EXIST, f"topic {topic[:100]} does not exist"
            )
        line.write(answer(request, body=_json(found)))

    def all_topics(self, line: Line, request: Request[Any], now_ms: int) -> None:
        table = {"topicConfigTable": self._topics.all(), "dataVersion": self._topics.version}
        line.write(answer(request, body=_json(table)))

    def system_topics(self, line: Line, request: Request[Any], now_ms: int) -> None:
        names = sorted(filter(self._topics.is_system, self._topics.all()))
        line.write(answer(request, body=encode_body(TopicList(topic_list=names))))

    # --- groups ----------------------------------------------------------------------------------

    def create_group(self, line: Line, request: Request[Any], now_ms: int) -> None:
        try:
            config = msgspec.convert(lenient_json(request.body), GroupConfig, strict=False)
        except (BrokenBody, msgspec.ValidationError, RecursionError) as error:
            raise RequestRefused(ResponseCode.SYSTEM_ERROR, f"the group: {error}") from error
        if not is_group_name(config.group_name):
            raise _bad(f"{config.group_name[:100]!r} names no group")
        if not 0 <= config.retry_queue_nums <= QUEUES_MAX:
            raise _bad(f"{config.retry_queue_nums} retry queues, not 0 to {QUEUES_MAX}")
        self._groups.put(config, now_ms=now_ms)
        line.write(succeed(request))

    def delete_group(self, line: Line, request: Request[DeleteGroup], now_ms: int) -> None:
        fields = request.head.fields
        name = fields.group_name
        if is_system_group(name):
            raise _bad(f"{name} belongs to the broker")
        try:
            if fields.clean_offset or fields.remove_offset:
                self._offsets.remove_group(name)
                self._save_offsets()
            if self._groups.remove(name, now_ms=now_ms):
                self._groups.save()
        except StoreError as error:
            raise RequestRefused(
                ResponseCode.SYSTEM_ERROR, f"{name[:100]} not deleted: {error}"
            ) from error
        line.write(succeed(request))

    def group_config(self, line: Line, request: Request[GroupName], now_ms: int) -> None:
        name = request.head.fields.group
        found = self._groups.find_or_make(name, now_ms=now_ms)
        if found is None:
            raise RequestRefused(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"group {name[:100]} does not exist"
            )
        line.write(answer(request, body=_json(found)))

    def all_groups(self, line: Line, request: Request[Any], now_ms: int) -> None:
        table = {
            "subscriptionGroupTable": self._groups.all(),
            "forbiddenTable": {},
            "dataVersion": self._groups.version,
        }
        line.write(answer(request, body=_json(table)))


def _bad(why: str) -> RequestRefused:
    return RequestRefused(ResponseCode.INVALID_PARAMETER, why)


def _refuse_system_topic(topic: str) -> None:
    refuse_bad_topic_name(topic)
    if is_system_topic(topic):
        raise _bad(f"{topic} belongs to the broker")


def _changed(attributes: dict[str, str], text: str | None) -> dict[str, str]:
    """`+name=value` sets one, `-name` takes it away; commas between them."""
    changed = dict(attributes)
    for part in filter(None, (text or "").split(",")):
        name, equals, value = part[1:].partition("=")
        if part[0] == "+" and equals and name:
            changed[name] = value
        elif part[0] == "-" and name and not equals:
            changed.pop(name, None)
        else:
            raise _bad(f"attribute {part[:100]!r} is neither +name=value nor -name")
    if len(changed) > ATTRIBUTES_MAX:
        raise _bad(f"{len(changed)} attributes, limit {ATTRIBUTES_MAX}")
    return changed


def _json(value: Any) -> bytes:
    return msgspec.json.encode(plain(value))
