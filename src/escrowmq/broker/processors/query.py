"""Questions about offsets and single messages."""

from __future__ import annotations

import itertools
from typing import Any

from escrowmq.broker.dispatch import Line
from escrowmq.broker.metadata import Groups, Topics
from escrowmq.consume.offsets import ConsumerOffsets, start_of
from escrowmq.errors import CorruptRecord, NoSuchRecord, RequestRefused
from escrowmq.message.record import LogOffset
from escrowmq.remoting.codes import ResponseCode
from escrowmq.remoting.headers import (
    OffsetAnswer,
    QueryConsumerOffset,
    QueryMessage,
    QueryMessageAnswer,
    QueueOf,
    SearchOffset,
    TimestampAnswer,
    UpdateConsumerOffset,
    ViewMessage,
)
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import answer, succeed
from escrowmq.store.store import MessageStore

FOUND_BY_UNIQUE_KEY_MAX = 32
FOUND_BYTES_MAX = 8 << 20  # of a look-up; a frame holds no more than 16 MiB


class Queries:
    def __init__(
        self, store: MessageStore, topics: Topics, groups: Groups, offsets: ConsumerOffsets
    ) -> None:
        self._store = store
        self._topics = topics
        self._groups = groups
        self._offsets = offsets

    def consumer_offset(
        self, line: Line, request: Request[QueryConsumerOffset], now_ms: int
    ) -> None:
        fields = request.head.fields
        first = self._store.min_offset(fields.topic, fields.queue_id)
        found = start_of(
            self._offsets.query(fields.topic, fields.consumer_group, fields.queue_id),
            first,
            fields.set_zero_if_not_found,
            is_young=first == 0,
        )
        if found is None:
            raise RequestRefused(
                ResponseCode.QUERY_NOT_FOUND,
                f"{fields.consumer_group} has no offset for queue {fields.queue_id} of "
                f"{fields.topic}",
            )
        line.write(answer(request, OffsetAnswer(offset=found)))

    def update_consumer_offset(
        self, line: Line, request: Request[UpdateConsumerOffset], now_ms: int
    ) -> None:
        fields = request.head.fields
        topic = self._topics.find(fields.topic)
        if topic is None:
            raise RequestRefused(
                ResponseCode.TOPIC_NOT_EXIST, f"topic {fields.topic} does not exist"
            )
        if self._groups.find(fields.consumer_group) is None:
            raise RequestRefused(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"group {fields.consumer_group} does not exist",
            )
        if 0 <= fields.queue_id < topic.read_queue_nums:
            self._offsets.commit(
                fields.topic, fields.consumer_group, fields.queue_id, fields.commit_offset
            )
        line.write(succeed(request))

    def max_offset(self, line: Line, request: Request[QueueOf], now_ms: int) -> None:
        fields = request.head.fields
        offset = self._store.max_offset(fields.topic, fields.queue_id)
        line.write(answer(request, OffsetAnswer(offset=offset)))

    def min_offset(self, line: Line, request: Request[QueueOf], now_ms: int) -> None:
        fields = request.head.fields
        offset = self._store.min_offset(fields.topic, fields.queue_id)
        line.write(answer(request, OffsetAnswer(offset=offset)))

    def search_offset(self, line: Line, request: Request[SearchOffset], now_ms: int) -> None:
        fields = request.head.fields
        offset = self._store.offset_by_time(
            fields.topic,
            fields.queue_id,
            fields.timestamp,
            upper=(fields.boundary_type or "").lower() == "upper",
        )
        line.write(answer(request, OffsetAnswer(offset=offset)))

    def earliest_time(self, line: Line, request: Request[QueueOf], now_ms: int) -> None:
        fields = request.head.fields
        stored_ms = self._store.earliest_stored_ms(fields.topic, fields.queue_id)
        line.write(answer(request, TimestampAnswer(timestamp=stored_ms)))

    def by_key(self, line: Line, request: Request[QueryMessage], now_ms: int) -> None:
        fields = request.head.fields
        count_max = FOUND_BY_UNIQUE_KEY_MAX if fields.is_unique_key else max(1, fields.max_num)
        found = self._store.find_by_key(
            fields.topic,
            fields.key,
            count_max=count_max,
            begin_ms=fields.begin_timestamp,
            end_ms=fields.end_timestamp,
        )
        if not found:
            raise RequestRefused(
                ResponseCode.QUERY_NOT_FOUND, f"no message of {fields.topic} has this key"
            )
        last = self._store.last_record
        sizes = itertools.accumulate(record.size for record in found)
        fitting = sum(1 for size in sizes if size <= FOUND_BYTES_MAX)
        body = b"".join(self._store.bytes_of(record) for record in found[: max(1, fitting)])
        about = QueryMessageAnswer(
            index_last_update_timestamp=now_ms, index_last_update_phyoffset=last
        )
        line.write(answer(request, about, body=body))

    def by_id(self, line: Line, request: Request[ViewMessage], now_ms: int) -> None:
        offset = LogOffset(request.head.fields.offset)
        try:
            record = self._store.record_at(offset)
        except (NoSuchRecord, CorruptRecord) as error:
            raise RequestRefused(ResponseCode.SYSTEM_ERROR, str(error)) from error
        line.write(answer(request, body=self._store.bytes_of(record)))


def unsupported(line: Line, request: Request[Any], now_ms: int) -> None:
    raise RequestRefused(
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        f"request code {request.head.code} is not supported",
    )
