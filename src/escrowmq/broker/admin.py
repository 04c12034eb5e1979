"""Looking after topics and groups, as far as ordinary clients do it."""

from __future__ import annotations

from typing import Any

import msgspec

from escrowmq.broker.groups import Groups, is_group_name
from escrowmq.broker.line import Line
from escrowmq.broker.topics import Topics, is_system_topic, refuse_bad_topic_name
from escrowmq.consume.offsets import ConsumerOffsets
from escrowmq.errors import BrokenBody, RequestRefused
from escrowmq.message.fastjson import lenient_json
from escrowmq.store.configfiles import GroupConfig, TopicConfig
from escrowmq.wire.answers import succeed
from escrowmq.wire.codes import ResponseCode
from escrowmq.wire.fastpath import Request
from escrowmq.wire.headers_admin import CreateTopic, DeleteTopicInBroker

QUEUES_MAX = 65_536


class Admin:
    def __init__(self, topics: Topics, groups: Groups, offsets: ConsumerOffsets) -> None:
        self._topics = topics
        self._groups = groups
        self._offsets = offsets

    def create_topic(self, line: Line, request: Request[CreateTopic], now_ms: int) -> None:
        fields = request.head.fields
        refuse_bad_topic_name(fields.topic)
        if is_system_topic(fields.topic):
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER, f"{fields.topic} belongs to the broker"
            )
        for count in (fields.read_queue_nums, fields.write_queue_nums):
            if not 0 <= count <= QUEUES_MAX:
                raise RequestRefused(
                    ResponseCode.INVALID_PARAMETER, f"{count} queues, not 0 to {QUEUES_MAX}"
                )
        known = self._topics.find(fields.topic)
        wanted = TopicConfig(
            topic_name=fields.topic,
            read_queue_nums=fields.read_queue_nums,
            write_queue_nums=fields.write_queue_nums,
            perm=fields.perm & 7,
            topic_filter_type=fields.topic_filter_type,
            topic_sys_flag=fields.topic_sys_flag,
            order=fields.order,
            attributes={} if known is None else known.attributes,
        )
        if wanted != known:
            self._topics.put(wanted, now_ms=now_ms)
        line.write(succeed(request))

    def delete_topic(self, line: Line, request: Request[DeleteTopicInBroker], now_ms: int) -> None:
        topic = request.head.fields.topic
        if is_system_topic(topic):
            raise RequestRefused(ResponseCode.INVALID_PARAMETER, f"{topic} belongs to the broker")
        if self._topics.remove(topic, now_ms=now_ms):
            self._offsets.remove_topic(topic)
        line.write(succeed(request))

    def create_group(self, line: Line, request: Request[Any], now_ms: int) -> None:
        try:
            config = msgspec.convert(lenient_json(request.body), GroupConfig, strict=False)
        except (BrokenBody, msgspec.ValidationError) as error:
            raise RequestRefused(ResponseCode.SYSTEM_ERROR, f"the group: {error}") from error
        if not is_group_name(config.group_name):
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER, f"{config.group_name[:100]!r} names no group"
            )
        if not 0 <= config.retry_queue_nums <= QUEUES_MAX:
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER,
                f"{config.retry_queue_nums} retry queues, not 0 to {QUEUES_MAX}",
            )
        self._groups.put(config, now_ms=now_ms)
        line.write(succeed(request))
