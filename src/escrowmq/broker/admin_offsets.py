"""Where groups go on: send one elsewhere, let another go on where one is, show a queue's entries.

A group that is sent elsewhere gets its new offsets here at once, also if nobody of it is connected.
Its members, if there are any, are told (RESET_CONSUMER_CLIENT_OFFSET), so that they drop what they
hold; one that does not understand it is sent to the new place by its next pull.
"""

from __future__ import annotations

from typing import Final

from escrowmq.broker.admin_groups import subscription_entry
from escrowmq.broker.groups import Groups
from escrowmq.broker.line import Line
from escrowmq.broker.topics import Topics
from escrowmq.consume.groups import ConsumerGroups
from escrowmq.consume.offsets import ConsumerOffsets
from escrowmq.consume.subscription import TAG, tag_filter
from escrowmq.errors import RequestRefused
from escrowmq.store.configfiles import TopicConfig
from escrowmq.store.store import MessageStore
from escrowmq.wire.answers import answer, succeed
from escrowmq.wire.bodies import QueueName, encode_body
from escrowmq.wire.bodies_admin import (
    QueueEntries,
    QueueEntry,
    QueueOffsetForC,
    ResetOffsetsForC,
    by_queue,
)
from escrowmq.wire.codes import LanguageName, RequestCode, ResponseCode
from escrowmq.wire.fastpath import Request
from escrowmq.wire.headers_admin import CloneGroupOffset, QueryConsumeQueue, ResetOffset
from escrowmq.wire.headers_consume import ResetConsumerOffset

ENTRIES_MAX: Final = 10_000  # shown at once
TO_THE_END: Final = -1


class AdminOffsets:
    def __init__(
        self,
        store: MessageStore,
        topics: Topics,
        groups: Groups,
        offsets: ConsumerOffsets,
        consumers: ConsumerGroups,
    ) -> None:
        self._store = store
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._consumers = consumers

    def reset(self, line: Line, request: Request[ResetOffset], now_ms: int) -> None:
        fields = request.head.fields
        topic = self._topic(fields.topic)
        if self._groups.find(fields.group) is None:
            raise _no_group(fields.group)
        if fields.queue_id >= topic.read_queue_nums:
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER,
                f"queue {fields.queue_id} of {fields.topic}, which has {topic.read_queue_nums}",
            )
        one = fields.queue_id >= 0
        wanted = [fields.queue_id] if one else range(topic.read_queue_nums)
        targets = {queue_id: self._target(fields, queue_id) for queue_id in wanted}
        is_connected = self._consumers.find(fields.group) is not None
        for queue_id, target in targets.items():
            if is_connected:
                self._offsets.reset(fields.topic, fields.group, queue_id, target)
            else:
                self._offsets.move(fields.topic, fields.group, queue_id, target)
        table = {self._queue(fields.topic, queue_id): at for queue_id, at in targets.items()}
        self._tell_members(fields, table)
        line.write(answer(request, body=by_queue(table)))

    def _target(self, fields: ResetOffset, queue_id: int) -> int:
        store, topic = self._store, fields.topic
        first, end = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
        if fields.offset is not None and fields.offset >= 0:
            if not first <= fields.offset <= end:
                raise RequestRefused(
                    ResponseCode.INVALID_PARAMETER,
                    f"offset {fields.offset} of queue {queue_id}, which has {first} to {end}",
                )
            return fields.offset
        if fields.timestamp == TO_THE_END:
            return end
        found = store.offset_by_time(topic, queue_id, max(0, fields.timestamp))
        read = self._offsets.query(topic, fields.group, queue_id)
        if read is not None and not fields.is_force:
            return min(found, read)
        return found

    def _tell_members(self, fields: ResetOffset, table: dict[QueueName, int]) -> None:
        header = ResetConsumerOffset(
            topic=fields.topic, group=fields.group, timestamp=fields.timestamp, is_force=True
        )
        for_java = by_queue(table)
        for_c = ResetOffsetsForC(
            offset_table=[
                QueueOffsetForC(
                    topic=queue.topic,
                    broker_name=queue.broker_name,
                    queue_id=queue.queue_id,
                    offset=at,
                )
                for queue, at in table.items()
            ]
        )
        for member in self._consumers.members(fields.group):
            is_c = member.client.language == LanguageName.CPP
            member.client.line.post(  # type: ignore[attr-defined]  # consume/ knows no lines
                RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
                header,
                encode_body(for_c) if is_c else for_java,
            )

    def clone(self, line: Line, request: Request[CloneGroupOffset], now_ms: int) -> None:
        fields = request.head.fields
        if self._groups.find(fields.src_group) is None:
            raise _no_group(fields.src_group)
        if self._groups.find_or_make(fields.dest_group, now_ms=now_ms) is None:
            raise _no_group(fields.dest_group)
        topics = [fields.topic] if fields.topic else self._offsets.topics_of(fields.src_group)
        for topic in topics:
            if self._topics.find(topic) is not None:
                self._offsets.clone(topic, fields.src_group, fields.dest_group)
        line.write(succeed(request))

    def entries(self, line: Line, request: Request[QueryConsumeQueue], now_ms: int) -> None:
        """What a queue holds, entry by entry."""
        fields = request.head.fields
        if (fields.topic, fields.queue_id) not in self._store.queues():
            raise RequestRefused(
                ResponseCode.SYSTEM_ERROR, f"{fields.topic[:100]} has no queue {fields.queue_id}"
            )
        subscription = None
        if fields.consumer_group:
            subscription = self._consumers.subscription(fields.consumer_group, fields.topic)
        accepts = None
        if subscription is not None and subscription.kind == TAG:
            accepts = tag_filter(subscription)
        count = max(0, min(fields.count, ENTRIES_MAX))
        found = self._store.entries(fields.topic, fields.queue_id, fields.index, count)
        body = QueueEntries(
            max_queue_index=self._store.max_offset(fields.topic, fields.queue_id),
            min_queue_index=self._store.min_offset(fields.topic, fields.queue_id),
            queue_data=[
                QueueEntry(
                    physic_offset=log_offset,
                    physic_size=size,
                    tags_code=tags_code,
                    eval=subscription is not None and (accepts is None or accepts(tags_code)),
                )
                for log_offset, size, tags_code in found
            ],
            subscription_data=None if subscription is None else subscription_entry(subscription),
            filter_data=None if subscription is None else subscription.expression,
        )
        line.write(answer(request, body=encode_body(body)))

    def _topic(self, name: str) -> TopicConfig:
        found = self._topics.find(name)
        if found is None:
            raise RequestRefused(ResponseCode.TOPIC_NOT_EXIST, f"topic {name[:100]} does not exist")
        return found

    def _queue(self, topic: str, queue_id: int) -> QueueName:
        return QueueName(topic=topic, broker_name=self._topics.broker_name, queue_id=queue_id)


def _no_group(name: str) -> RequestRefused:
    return RequestRefused(
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"group {name[:100]} does not exist"
    )
