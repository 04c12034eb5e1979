"""Administration of consumer and producer groups.

    GroupAdmin      who is connected, and how far each group has consumed
    OffsetAdmin     reset and clone offsets, show the entries of a queue
    ConsumerRelay   requests that only a consumer can respond to: they are relayed to it

A reset changes the offsets of a group at once, also if no member is connected. Connected members
are notified (RESET_CONSUMER_CLIENT_OFFSET), so that they drop the messages in flight. A client that
does not understand this request is sent to the new offset by the response to its next pull.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

import msgspec

from escrowmq.broker.closed_names import (
    check_group_is_open,
    check_offsets_are_open,
    check_records_are_open,
)
from escrowmq.broker.dispatch import (
    Channel,
    ErrorCodes,
    Handler,
    RequestChannel,
    respond_failure,
)
from escrowmq.broker.metadata import SubscriptionGroups, TopicTable
from escrowmq.broker.processors.admin_metadata import CHANGE_ERRORS, changed_offsets
from escrowmq.broker.statistics import Statistics
from escrowmq.client_memory import ClientMemory, MemoryUse, Reservation
from escrowmq.consume.members import ConsumerGroups, Member, ProducerGroups
from escrowmq.consume.offsets import ConsumerOffsets
from escrowmq.consume.subscription import Subscription
from escrowmq.errors import (
    CorruptRecord,
    RecordNotFound,
    RemoteProtocolError,
    RequestRefused,
    StoreError,
)
from escrowmq.message.keys import decode_offset_id
from escrowmq.message.names import is_closed_topic
from escrowmq.remoting.bodies import QueueName, SubscriptionEntry, TopicList, encode_body
from escrowmq.remoting.bodies_admin import (
    ClientEntry,
    ConsumeOffset,
    ConsumerConnections,
    CppQueueOffset,
    CppResetOffsets,
    GroupList,
    GroupSubscription,
    ProducerConnections,
    ProducerInfo,
    QueueEntries,
    QueueEntry,
    TimeSpan,
    TimeSpans,
    TopicOffset,
    encode_broker_consume_stats,
    encode_list_in_slices,
    encode_queue_table_in_slices,
    encode_table_in_slices,
)
from escrowmq.remoting.codes import LanguageName, RequestCode, ResponseCode
from escrowmq.remoting.command import Command
from escrowmq.remoting.headers import (
    ConsumeMessageDirectly,
    ConsumerGroupHeader,
    GetConsumerRunningInfo,
    Header,
    NoFields,
    ResetConsumerOffset,
)
from escrowmq.remoting.headers_admin import (
    CloneGroupOffset,
    GetBrokerConsumeStats,
    GetConsumeStats,
    GroupHeader,
    ProducerGroupHeader,
    QueryConsumeQueue,
    ResetOffset,
    TopicGroupHeader,
    TopicHeader,
)
from escrowmq.remoting.requests import Request, request_for_response
from escrowmq.sliced_work import SlicedResult, SlicedWork
from escrowmq.store.store import MessageStore

_SHOWN_LENGTH_MAX: Final = 100


class GroupAdmin:
    def __init__(
        self,
        store: MessageStore,
        topics: TopicTable,
        groups: SubscriptionGroups,
        offsets: ConsumerOffsets,
        consumers: ConsumerGroups[Channel],
        producers: ProducerGroups[Channel],
        statistics: Statistics,
        *,
        address: str,
        memory: ClientMemory,
    ) -> None:
        self._memory = memory
        self._store = store
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._consumers = consumers
        self._producers = producers
        self._statistics = statistics
        self._address = address

    def handlers(self) -> list[Handler]:
        code = RequestCode
        return [
            Handler(code.GET_CONSUMER_CONNECTION_LIST, self.list_consumer_connections),
            Handler(code.GET_PRODUCER_CONNECTION_LIST, self.list_producer_connections),
            Handler(code.GET_ALL_PRODUCER_INFO, self.list_producers),
            Handler(code.QUERY_TOPIC_CONSUME_BY_WHO, self.list_groups_of_topic),
            Handler(code.QUERY_TOPICS_BY_CONSUMER, self.list_topics_of_group),
            Handler(code.QUERY_SUBSCRIPTION_BY_CONSUMER, self.get_subscription),
            Handler(code.GET_TOPIC_STATS_INFO, self.get_topic_stats),
            Handler(code.GET_CONSUME_STATS, self.get_consume_stats),
            Handler(code.GET_BROKER_CONSUME_STATS, self.get_broker_consume_stats),
            Handler(code.QUERY_CONSUME_TIME_SPAN, self.get_consume_time_spans),
        ]

    # --- who is connected ------------------------------------------------------------------------

    def list_consumer_connections(
        self, channel: Channel, request: Request[ConsumerGroupHeader], now_ms: int
    ) -> SlicedWork:
        name = request.head.fields.consumer_group
        group = self._consumers.find(name)
        if group is None:
            raise RequestRefused(
                ResponseCode.CONSUMER_NOT_ONLINE,
                f"no member of group {_truncate(name)} is connected",
            )
        connections = ConsumerConnections(
            connection_set=[],
            subscription_table={
                topic: subscription_entry(subscription)
                for topic, subscription in group.subscriptions.items()
            },
            consume_type=group.settings.consume_type,
            message_model=group.settings.message_model,
            consume_from_where=group.settings.consume_from_where,
        )
        clients = map(_client_entry, self._consumers.members(name))
        body = yield from encode_list_in_slices(connections, "connectionSet", clients)
        channel.respond(request, body=body)

    def list_producer_connections(
        self, channel: Channel, request: Request[ProducerGroupHeader], now_ms: int
    ) -> SlicedWork:
        name = request.head.fields.producer_group
        members = self._producers.members(name)
        if not members:
            raise RequestRefused(
                ResponseCode.SYSTEM_ERROR,
                f"no member of producer group {_truncate(name)} is connected",
            )
        body = yield from encode_list_in_slices(
            ProducerConnections(connection_set=[]), "connectionSet", map(_client_entry, members)
        )
        channel.respond(request, body=body)

    def list_producers(self, channel: Channel, request: Request[Any], now_ms: int) -> SlicedWork:
        table: list[tuple[bytes, bytes]] = []
        for name in self._producers.names():
            members = bytearray(b"[")
            for member in self._producers.members(name):
                if len(members) > 1:
                    members += b","
                members += encode_body(_producer_info(member))
                yield
            table.append((msgspec.json.encode(name), bytes(members + b"]")))
        channel.respond(request, body=(yield from encode_table_in_slices("data", table)))

    def list_groups_of_topic(
        self, channel: Channel, request: Request[TopicHeader], now_ms: int
    ) -> None:
        topic = request.head.fields.topic
        names = {*self._consumers.subscribers(topic), *self._offsets.groups_of(topic)}
        channel.respond(request, body=encode_body(GroupList(group_list=sorted(names))))

    def list_topics_of_group(
        self, channel: Channel, request: Request[GroupHeader], now_ms: int
    ) -> None:
        topics = self._topics_of(request.head.fields.group)
        body = TopicList(topic_list=topics, broker_addr=self._address)
        channel.respond(request, body=encode_body(body))

    def get_subscription(
        self, channel: Channel, request: Request[TopicGroupHeader], now_ms: int
    ) -> None:
        fields = request.head.fields
        subscription = self._consumers.subscription(fields.group, fields.topic)
        if subscription is None:
            raise RequestRefused(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"no connected member of group {_truncate(fields.group)} subscribes to topic "
                f"{_truncate(fields.topic)}",
            )
        body = GroupSubscription(
            topic=fields.topic,
            group=fields.group,
            subscription_data=subscription_entry(subscription),
        )
        channel.respond(request, body=encode_body(body))

    # --- progress --------------------------------------------------------------------------------

    # The results of these requests are long if a topic has many queues. Rows are encoded one by one
    # and counted for the client, who may send the request on many connections at once.

    def get_topic_stats(
        self, channel: Channel, request: Request[TopicHeader], now_ms: int
    ) -> SlicedWork:
        name = request.head.fields.topic
        topic = self._topics.get(name)
        minute, _, _ = self._statistics.topic_rates(name, 0, now_ms)
        count = max(topic.read_queue_nums, topic.write_queue_nums)
        with self._new_result(channel) as result:
            body = yield from encode_queue_table_in_slices(
                self._topic_rows(name, count), result.add, topicPutTps=minute.per_s
            )
            channel.respond(request, body=body)

    def _topic_rows(self, name: str, count: int) -> Iterator[tuple[QueueName, TopicOffset]]:
        store = self._store
        for queue in self._queues(name, count):
            end = store.max_offset(name, queue.queue_id)
            yield (
                queue,
                TopicOffset(
                    min_offset=store.min_offset(name, queue.queue_id),
                    max_offset=end,
                    last_update_timestamp=self._stored_ms(name, queue.queue_id, end - 1),
                ),
            )

    def get_consume_stats(
        self, channel: Channel, request: Request[GetConsumeStats], now_ms: int
    ) -> SlicedWork:
        fields = request.head.fields
        group = fields.consumer_group
        topics = [fields.topic] if fields.topic else self._topics_of(group)
        per_s = sum(
            self._statistics.group_rates(topic, group, 0, now_ms)[0].per_s for topic in topics
        )
        rows = (row for topic in topics for row in self._progress_rows(group, topic))
        with self._new_result(channel) as result:
            body = yield from encode_queue_table_in_slices(
                rows, result.add, consumeTps=float(per_s)
            )
            channel.respond(request, body=body)

    def get_broker_consume_stats(
        self, channel: Channel, request: Request[GetBrokerConsumeStats], now_ms: int
    ) -> SlicedWork:
        only_ordered = request.head.fields.is_order
        groups, total_lag = [], 0

        def rows(group: str, topic: str) -> Iterator[tuple[QueueName, ConsumeOffset]]:
            nonlocal total_lag
            for queue, offsets in self._progress_rows(group, topic):
                total_lag += offsets.broker_offset - offsets.consumer_offset
                yield queue, offsets

        with self._new_result(channel) as result:
            for name, group in self._groups.configs().items():
                encoded_topics = []
                for topic in self._topics_of(name) if group.consume_enable else []:
                    config = self._topics.find(topic)
                    if config is None or (only_ordered and not config.order):
                        continue
                    per_s = self._statistics.group_rates(topic, name, 0, now_ms)[0].per_s
                    encoded_topics.append(
                        (
                            yield from encode_queue_table_in_slices(
                                rows(name, topic), result.add, consumeTps=per_s
                            )
                        )
                    )
                groups.append((name, encoded_topics))
                yield
            body = encode_broker_consume_stats(groups, address=self._address, total_diff=total_lag)
            channel.respond(request, body=body)

    def get_consume_time_spans(
        self, channel: Channel, request: Request[TopicGroupHeader], now_ms: int
    ) -> SlicedWork:
        name, group = request.head.fields.topic, request.head.fields.group
        topic = self._topics.get(name)
        queues = self._queues(name, topic.write_queue_nums)
        spans = (self._time_span(group, queue, now_ms) for queue in queues)
        with self._new_result(channel) as result:
            body = yield from encode_list_in_slices(
                TimeSpans(consume_time_span_set=[]), "consumeTimeSpanSet", spans, result.add
            )
            channel.respond(request, body=body)

    def _time_span(self, group: str, queue: QueueName, now_ms: int) -> TimeSpan:
        name, queue_id = queue.topic, queue.queue_id
        end = self._store.max_offset(name, queue_id)
        offset = self._offsets.query(name, group, queue_id) or 0
        waiting_ms = self._stored_ms(name, queue_id, offset) if offset < end else now_ms
        return TimeSpan(
            message_queue=queue,
            min_time_stamp=self._store.earliest_stored_ms(name, queue_id),
            max_time_stamp=self._stored_ms(name, queue_id, end - 1),
            consume_time_stamp=self._stored_ms(name, queue_id, offset - 1),
            delay_time=max(0, now_ms - waiting_ms),
        )

    def _progress_rows(self, group: str, name: str) -> Iterator[tuple[QueueName, ConsumeOffset]]:
        topic = self._topics.find(name)
        for queue in self._queues(name, 0 if topic is None else topic.read_queue_nums):
            offset = self._offsets.query(name, group, queue.queue_id) or 0
            yield (
                queue,
                ConsumeOffset(
                    broker_offset=self._store.max_offset(name, queue.queue_id),
                    consumer_offset=offset,
                    pull_offset=offset,
                    last_timestamp=self._stored_ms(name, queue.queue_id, offset - 1),
                ),
            )

    def _new_result(self, channel: Channel) -> Reservation:
        return Reservation(self._memory, channel, MemoryUse.RESULTS)

    def _topics_of(self, group: str) -> list[str]:
        """Return the topics that a group subscribes to or has offsets of."""
        connected = self._consumers.find(group)
        subscribed = set() if connected is None else set(connected.subscriptions)
        return sorted(subscribed.union(self._offsets.topics_of(group)))

    def _queues(self, topic: str, count: int) -> Iterator[QueueName]:
        broker_name = self._topics.broker_name
        return (
            QueueName(topic=topic, broker_name=broker_name, queue_id=queue_id)
            for queue_id in range(count)
        )

    def _stored_ms(self, topic: str, queue_id: int, queue_offset: int) -> int:
        """Return when the message at this offset was stored, or 0 if there is none."""
        if not self._store.min_offset(topic, queue_id) <= queue_offset:
            return 0
        try:
            return self._store.stored_ms(topic, queue_id, queue_offset) or 0
        except (RecordNotFound, CorruptRecord):
            return 0


def subscription_entry(subscription: Subscription) -> SubscriptionEntry:
    return SubscriptionEntry(
        topic=subscription.topic,
        sub_string=subscription.expression,
        tags_set=list(subscription.tags),
        code_set=sorted(subscription.tag_filter.tags_codes or ()),
        sub_version=subscription.version,
        expression_type=subscription.expression_type,
    )


def _client_entry(member: Member[Channel]) -> ClientEntry:
    client = member.client
    return ClientEntry(
        client_id=client.client_id,
        client_addr=client.channel.address,
        language=client.language,
        version=client.version,
    )


def _producer_info(member: Member[Channel]) -> ProducerInfo:
    client = member.client
    return ProducerInfo(
        client_id=client.client_id,
        remote_ip=f"/{client.channel.address}",  # as Java formats addresses
        language=client.language,
        version=client.version,
        last_update_timestamp=member.last_heartbeat_ms,
    )


def _is_cpp(member: Member[Channel]) -> bool:
    return member.client.language == LanguageName.CPP


def _truncate(name: str) -> str:
    return name[:_SHOWN_LENGTH_MAX]


# --- offsets -------------------------------------------------------------------------------------

QUEUE_ENTRIES_MAX: Final = 10_000  # in one response
LATEST_TIMESTAMP: Final = -1
NOTIFICATION_BYTES_MAX: Final = 1 << 20  # offsets of about 15,000 queues


class OffsetAdmin:
    def __init__(
        self,
        store: MessageStore,
        topics: TopicTable,
        groups: SubscriptionGroups,
        offsets: ConsumerOffsets,
        consumers: ConsumerGroups[Channel],
        save_offsets: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._consumers = consumers
        self._save_offsets = save_offsets

    def handlers(self) -> list[Handler]:
        code = RequestCode
        return [
            Handler(code.INVOKE_BROKER_TO_RESET_OFFSET, self.reset_offsets, errors=CHANGE_ERRORS),
            Handler(code.CLONE_GROUP_OFFSET, self.clone_offsets, errors=CHANGE_ERRORS),
            Handler(code.QUERY_CONSUME_QUEUE, self.list_queue_entries),
        ]

    def reset_offsets(
        self, channel: Channel, request: Request[ResetOffset], now_ms: int
    ) -> SlicedWork:
        fields = request.head.fields
        check_offsets_are_open(fields.topic, fields.group)
        topic = self._topics.get(fields.topic)
        self._groups.get(fields.group)  # it must exist
        if fields.queue_id >= topic.read_queue_nums:
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER,
                f"topic {fields.topic} has no queue {fields.queue_id}, "
                f"only {topic.read_queue_nums} queues",
            )
        has_queue = fields.queue_id >= 0  # otherwise all queues are reset
        queue_ids = [fields.queue_id] if has_queue else range(topic.read_queue_nums)
        targets: dict[int, int] = {}
        table: dict[QueueName, int] = {}
        for queue_id in queue_ids:
            targets[queue_id] = self._target_offset(fields, queue_id)
            table[self._queue_name(fields.topic, queue_id)] = targets[queue_id]
            yield
        # The bodies come before the change: a client that goes away meanwhile changes nothing.
        java_body = yield from encode_queue_table_in_slices(table.items(), lambda count: None)
        cpp_body = b""
        if len(java_body) <= NOTIFICATION_BYTES_MAX:
            cpp_body = yield from self._encode_for_cpp(fields.group, table)
        with changed_offsets(self._offsets):
            if self._consumers.find(fields.group) is not None:
                # A member commits its old offset until it learns of the reset. Remember the new
                # one, so that the next pull of the member is sent there.
                self._offsets.reset(fields.topic, fields.group, targets)
            else:
                self._offsets.set_offsets(fields.topic, fields.group, targets)
            self._save_offsets()
        channel.respond(request, body=java_body)
        yield from self._notify_members(fields, java_body, cpp_body)

    def _target_offset(self, fields: ResetOffset, queue_id: int) -> int:
        store, topic = self._store, fields.topic
        first, end = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
        if fields.offset is not None and fields.offset >= 0:
            if not first <= fields.offset <= end:
                raise RequestRefused(
                    ResponseCode.INVALID_PARAMETER,
                    f"offset {fields.offset} is not in queue {queue_id}: it has {first} to {end}",
                )
            return fields.offset
        if fields.timestamp == LATEST_TIMESTAMP:
            return end
        target = store.offset_by_time(topic, queue_id, max(0, fields.timestamp))
        committed = self._offsets.query(topic, fields.group, queue_id)
        if committed is not None and not fields.is_force:
            return min(target, committed)  # without force, a reset only goes back
        return target

    def _encode_for_cpp(self, group: str, table: dict[QueueName, int]) -> SlicedResult[bytes]:
        """Return the offsets for the C++ members of a group; empty if it has none.

        C++ clients cannot parse a JSON object whose keys are objects, so they get a list.
        """
        if not any(_is_cpp(member) for member in self._consumers.members(group)):
            return b""
        offsets = (
            CppQueueOffset(
                topic=queue.topic,
                broker_name=queue.broker_name,
                queue_id=queue.queue_id,
                offset=offset,
            )
            for queue, offset in table.items()
        )
        empty = CppResetOffsets(offset_table=[])
        return (yield from encode_list_in_slices(empty, "offsetTable", offsets))

    def _notify_members(self, fields: ResetOffset, java_body: bytes, cpp_body: bytes) -> SlicedWork:
        """Tell the members of a group where to continue, each connection once.

        A reset of very many queues is not announced: every member would get a copy. The members
        learn of it by their next pulls.
        """
        if len(java_body) > NOTIFICATION_BYTES_MAX:
            return
        header = ResetConsumerOffset(
            topic=fields.topic, group=fields.group, timestamp=fields.timestamp, is_force=True
        )
        is_cpp_by_channel = {
            member.client.channel: _is_cpp(member)
            for member in self._consumers.members(fields.group)
        }
        for channel, is_cpp in is_cpp_by_channel.items():
            body = cpp_body if is_cpp else java_body
            if body:  # a C++ member that has joined meanwhile is told by its next pull
                channel.send_oneway(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, header, body)
            yield

    def clone_offsets(
        self, channel: Channel, request: Request[CloneGroupOffset], now_ms: int
    ) -> SlicedWork:
        fields = request.head.fields
        check_offsets_are_open(fields.topic or "", fields.dest_group)
        check_group_is_open(fields.src_group)
        self._groups.get(fields.src_group)  # it must exist
        if self._groups.get_or_create(fields.dest_group, now_ms=now_ms) is None:
            raise self._groups.not_found(fields.dest_group)
        # There may be offsets of ten thousand topics. They are collected in slices, and changed and
        # saved in one step.
        cloned = {}
        for topic in [fields.topic] if fields.topic else self._offsets.topics_of(fields.src_group):
            if self._topics.find(topic) is not None and not is_closed_topic(topic):
                offsets = self._offsets.queue_offsets(topic, fields.src_group)
                if offsets:
                    cloned[topic] = offsets
            yield
        with changed_offsets(self._offsets):
            self._offsets.put_topics(fields.dest_group, cloned)
            self._save_offsets()
        channel.respond(request)

    def list_queue_entries(
        self, channel: Channel, request: Request[QueryConsumeQueue], now_ms: int
    ) -> None:
        """List the entries of a queue, and whether each matches the subscription of a group."""
        fields = request.head.fields
        if not self._store.has_queue(fields.topic, fields.queue_id):
            raise RequestRefused(
                ResponseCode.SYSTEM_ERROR,
                f"topic {_truncate(fields.topic)} has no queue {fields.queue_id}",
            )
        subscription = None
        if fields.consumer_group:
            subscription = self._consumers.subscription(fields.consumer_group, fields.topic)
        count = max(0, min(fields.count, QUEUE_ENTRIES_MAX))
        entries = self._store.entries(fields.topic, fields.queue_id, fields.index, count)
        body = QueueEntries(
            max_queue_index=self._store.max_offset(fields.topic, fields.queue_id),
            min_queue_index=self._store.min_offset(fields.topic, fields.queue_id),
            queue_data=[
                QueueEntry(
                    physic_offset=log_offset,
                    physic_size=size,
                    tags_code=tags_code,
                    eval=subscription is not None
                    and subscription.tag_filter.matches(tags_code, b""),
                )
                for log_offset, size, tags_code in entries
            ],
            subscription_data=None if subscription is None else subscription_entry(subscription),
            filter_data=None if subscription is None else subscription.expression,
        )
        channel.respond(request, body=encode_body(body))

    def _queue_name(self, topic: str, queue_id: int) -> QueueName:
        return QueueName(topic=topic, broker_name=self._topics.broker_name, queue_id=queue_id)


# --- relayed requests ----------------------------------------------------------------------------

RELAY_TIMEOUT_S: Final = 10.0  # as in RocketMQ
# Requests that wait for a consumer, of one connection and in all. Operators send a few of them.
RELAYS_PER_CHANNEL_MAX: Final = 100
RELAYS_MAX: Final = 1_000
_RELAY_ERRORS: Final[ErrorCodes] = {
    RemoteProtocolError: ResponseCode.QUERY_NOT_FOUND,  # not a message id
    StoreError: ResponseCode.QUERY_NOT_FOUND,
}


class ConsumerRelay:
    def __init__(
        self,
        store: MessageStore,
        topics: TopicTable,
        groups: SubscriptionGroups,
        consumers: ConsumerGroups[Channel],
    ) -> None:
        self._store = store
        self._topics = topics
        self._groups = groups
        self._consumers = consumers
        self._waiting: Counter[Channel] = Counter()  # requests that are relayed, by their sender

    def handlers(self) -> list[Handler]:
        code = RequestCode
        return [
            Handler(code.GET_CONSUMER_RUNNING_INFO, self.get_running_info),
            Handler(code.CONSUME_MESSAGE_DIRECTLY, self.consume_directly, errors=_RELAY_ERRORS),
        ]

    def get_running_info(
        self, channel: Channel, request: Request[GetConsumerRunningInfo], now_ms: int
    ) -> None:
        fields = request.head.fields
        self._relay(channel, request, fields.consumer_group, fields.client_id, fields)

    def consume_directly(
        self, channel: Channel, request: Request[ConsumeMessageDirectly], now_ms: int
    ) -> None:
        fields = request.head.fields
        if not fields.client_id:
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER,
                "clientId is empty; name the client that is to consume",
            )
        record = self._store.record_at(decode_offset_id(fields.msg_id or "")[1])
        check_records_are_open(record.topic)
        body = bytes(self._store.record_bytes(record))
        topic = self._topics.find(fields.topic or "")
        group = self._groups.find(fields.consumer_group)
        relayed = msgspec.structs.replace(
            fields,
            broker_name=self._topics.broker_name,
            topic_sys_flag=None if topic is None else topic.topic_sys_flag,
            group_sys_flag=None if group is None else group.group_sys_flag,
        )
        self._relay(channel, request, fields.consumer_group, fields.client_id, relayed, body)

    def _relay(
        self,
        channel: Channel,
        request: Request[Any],
        group: str,
        client_id: str,
        fields: Header,
        body: bytes = b"",
    ) -> None:
        if self._waiting[channel] >= RELAYS_PER_CHANNEL_MAX or self._waiting.total() >= RELAYS_MAX:
            raise RequestRefused(
                ResponseCode.SYSTEM_BUSY, "too many requests wait for consumers; retry later"
            )
        consumer = self._consumers.channel_of(group, client_id)
        code, request = request.head.code, request_for_response(request, NoFields())

        def on_response(command: Command | None, body: bytes) -> None:
            self._waiting -= Counter((channel,))  # drops those that reach zero
            try:
                if command is None:
                    remark = (
                        f"client {_truncate(client_id)} of group {_truncate(group)} "
                        "did not respond in time"
                    )
                    channel.respond(request, code=ResponseCode.CONSUME_MSG_TIMEOUT, remark=remark)
                else:
                    channel.respond(request, code=command.code, remark=command.remark, body=body)
            except Exception as error:  # the consumer's response may be too long to be passed on
                respond_failure(channel, request, error)

        if consumer is None or not cast(RequestChannel, consumer).call(
            code, fields, body, on_response, requester=channel, timeout_s=RELAY_TIMEOUT_S
        ):
            raise RequestRefused(
                ResponseCode.SYSTEM_ERROR,
                f"client {_truncate(client_id)} of group {_truncate(group)} is not connected",
            )
        self._waiting[channel] += 1
