"""Queries of clients: offsets of queues and groups, and single messages by key or by id."""

from __future__ import annotations

import itertools

from escrowmq.broker.closed_names import check_offsets_are_open
from escrowmq.broker.dispatch import Channel, Handler, RequestPermissions
from escrowmq.broker.metadata import SubscriptionGroups, TopicTable
from escrowmq.client_memory import ClientMemory, MemoryUse, Reservation
from escrowmq.consume.offsets import ConsumerOffsets, initial_offset
from escrowmq.errors import RequestRefused
from escrowmq.message.record import LogOffset
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import (
    OffsetResponse,
    QueryConsumerOffset,
    QueryMessage,
    QueryMessageResponse,
    QueueHeader,
    SearchOffset,
    TimestampResponse,
    UpdateConsumerOffset,
    ViewMessage,
)
from escrowmq.remoting.requests import Body, Request
from escrowmq.sliced_work import SlicedWork
from escrowmq.store.store import MessageStore

UNIQUE_KEY_RESULTS_MAX = 32
QUERY_RESULT_BYTES_MAX = 8 << 20  # of messages in one response; a frame holds 16 MiB


class QueryProcessor:
    def __init__(
        self,
        store: MessageStore,
        topics: TopicTable,
        groups: SubscriptionGroups,
        offsets: ConsumerOffsets,
        *,
        memory: ClientMemory,
    ) -> None:
        self._memory = memory
        self._store = store
        self._topics = topics
        self._groups = groups
        self._offsets = offsets

    def handlers(self) -> list[Handler]:
        code, permissions = RequestCode, RequestPermissions
        query, commit = permissions.query_offset, permissions.commit_offset
        read = permissions.read_topic
        return [
            Handler(code.QUERY_CONSUMER_OFFSET, self.query_consumer_offset, query),
            Handler(code.UPDATE_CONSUMER_OFFSET, self.update_consumer_offset, commit),
            Handler(code.GET_MAX_OFFSET, self.get_max_offset, read),
            Handler(code.GET_MIN_OFFSET, self.get_min_offset, read),
            Handler(code.SEARCH_OFFSET_BY_TIMESTAMP, self.search_offset, read),
            Handler(code.GET_EARLIEST_MSG_STORETIME, self.get_earliest_time, read),
            Handler(code.QUERY_MESSAGE, self.query_by_key, read),
            Handler(code.VIEW_MESSAGE_BY_ID, self.view_by_id, permissions.read_record),
        ]

    def query_consumer_offset(
        self, channel: Channel, request: Request[QueryConsumerOffset], now_ms: int
    ) -> None:
        fields = request.head.fields
        min_offset = self._store.min_offset(fields.topic, fields.queue_id)
        offset = initial_offset(
            self._offsets.query(fields.topic, fields.consumer_group, fields.queue_id),
            min_offset,
            fields.set_zero_if_not_found,
            is_young=min_offset == 0,
        )
        if offset is None:
            raise RequestRefused(
                ResponseCode.QUERY_NOT_FOUND,
                f"group {fields.consumer_group} has no offset for queue {fields.queue_id} of "
                f"topic {fields.topic}",
            )
        channel.respond(request, OffsetResponse(offset=offset))

    def update_consumer_offset(
        self, channel: Channel, request: Request[UpdateConsumerOffset], now_ms: int
    ) -> None:
        fields = request.head.fields
        check_offsets_are_open(fields.topic, fields.consumer_group)
        topic = self._topics.get(fields.topic)
        self._groups.get(fields.consumer_group)  # it must exist
        # As RocketMQ: a commit for a queue that does not exist is accepted and ignored.
        if 0 <= fields.queue_id < topic.read_queue_nums:
            self._offsets.commit(
                fields.topic, fields.consumer_group, fields.queue_id, fields.commit_offset
            )
        channel.respond(request)

    def get_max_offset(self, channel: Channel, request: Request[QueueHeader], now_ms: int) -> None:
        fields = request.head.fields
        offset = self._store.max_offset(fields.topic, fields.queue_id)
        channel.respond(request, OffsetResponse(offset=offset))

    def get_min_offset(self, channel: Channel, request: Request[QueueHeader], now_ms: int) -> None:
        fields = request.head.fields
        offset = self._store.min_offset(fields.topic, fields.queue_id)
        channel.respond(request, OffsetResponse(offset=offset))

    def search_offset(self, channel: Channel, request: Request[SearchOffset], now_ms: int) -> None:
        fields = request.head.fields
        offset = self._store.offset_by_time(
            fields.topic,
            fields.queue_id,
            fields.timestamp,
            upper=(fields.boundary_type or "").lower() == "upper",
        )
        channel.respond(request, OffsetResponse(offset=offset))

    def get_earliest_time(
        self, channel: Channel, request: Request[QueueHeader], now_ms: int
    ) -> None:
        fields = request.head.fields
        stored_ms = self._store.earliest_stored_ms(fields.topic, fields.queue_id)
        channel.respond(request, TimestampResponse(timestamp=stored_ms))

    def query_by_key(
        self, channel: Channel, request: Request[QueryMessage], now_ms: int
    ) -> SlicedWork:
        fields = request.head.fields
        count_max = UNIQUE_KEY_RESULTS_MAX if fields.is_unique_key else max(1, fields.max_num)
        records = yield from self._store.search_by_key(
            fields.topic,
            fields.key,
            count_max=count_max,
            begin_ms=fields.begin_timestamp,
            end_ms=fields.end_timestamp,
            with_bodies=False,  # they are read at once when their number is known
        )
        if not records:
            channel.respond(
                request,
                QueryMessageResponse(index_last_update_timestamp=0, index_last_update_phyoffset=0),
                code=ResponseCode.QUERY_NOT_FOUND,
                remark=f"no message of topic {fields.topic} has this key",
            )
            return
        sizes = itertools.accumulate(record.size for record in records)
        fitting = max(1, sum(1 for size in sizes if size <= QUERY_RESULT_BYTES_MAX))
        header = QueryMessageResponse(
            index_last_update_timestamp=now_ms,
            index_last_update_phyoffset=self._store.last_record_offset,
        )
        with Reservation(self._memory, channel, MemoryUse.RESULTS) as result:
            result.add(sum(record.size for record in records[:fitting]))
            pieces: list[Body] = []
            for record in records[:fitting]:
                for piece in self._store.record_pieces(record):
                    pieces.append(piece)
                    yield
            channel.respond_in_pieces(request, header, pieces)

    def view_by_id(self, channel: Channel, request: Request[ViewMessage], now_ms: int) -> None:
        record = self._store.record_at(LogOffset(request.head.fields.offset))
        channel.respond(request, body=self._store.record_bytes(record))
