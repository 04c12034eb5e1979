"""What operators ask about topics and groups: who is connected, how far everybody is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from escrowmq.broker.groups import Groups
from escrowmq.broker.line import Line
from escrowmq.broker.statistics import Statistics
from escrowmq.broker.topics import Topics
from escrowmq.consume.groups import ConsumerGroups, ProducerGroups
from escrowmq.consume.members import Member
from escrowmq.consume.offsets import ConsumerOffsets
from escrowmq.consume.subscription import Subscription
from escrowmq.errors import CorruptRecord, NoSuchRecord, RequestRefused
from escrowmq.store.configfiles import TopicConfig
from escrowmq.store.store import MessageStore
from escrowmq.wire.answers import answer
from escrowmq.wire.bodies import QueueName, SubscriptionEntry, TopicList, encode_body
from escrowmq.wire.bodies_admin import (
    ClientEntry,
    ConsumeOffset,
    ConsumerConnections,
    GroupList,
    ProducerConnections,
    ProducerInfo,
    Producers,
    SubscriptionOf,
    TimeSpan,
    TimeSpans,
    TopicOffset,
    broker_consume_stats,
    by_queue,
)
from escrowmq.wire.codes import ResponseCode
from escrowmq.wire.fastpath import Request
from escrowmq.wire.headers_admin import (
    BrokerConsumeStats,
    ConsumeStatsOf,
    GroupName,
    ProducerGroup,
    TopicAndGroup,
    TopicName,
)
from escrowmq.wire.headers_consume import ConsumerGroup

_SHOWN_MAX: Final = 100


class AdminGroups:
    def __init__(
        self,
        store: MessageStore,
        topics: Topics,
        groups: Groups,
        offsets: ConsumerOffsets,
        consumers: ConsumerGroups,
        producers: ProducerGroups,
        statistics: Statistics,
        *,
        address: str,
    ) -> None:
        self._store = store
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._consumers = consumers
        self._producers = producers
        self._statistics = statistics
        self._address = address

    # --- who is connected ------------------------------------------------------------------------

    def consumer_connections(
        self, line: Line, request: Request[ConsumerGroup], now_ms: int
    ) -> None:
        name = request.head.fields.consumer_group
        group = self._consumers.find(name)
        if group is None:
            raise RequestRefused(
                ResponseCode.CONSUMER_NOT_ONLINE, f"nobody of group {_shown(name)} is connected"
            )
        found = ConsumerConnections(
            connection_set=[_client(member) for member in self._consumers.members(name)],
            subscription_table={
                topic: subscription_entry(one) for topic, one in group.subscriptions.items()
            },
            consume_type=group.habits.consume_type,
            message_model=group.habits.message_model,
            consume_from_where=group.habits.consume_from,
        )
        line.write(answer(request, body=encode_body(found)))

    def producer_connections(
        self, line: Line, request: Request[ProducerGroup], now_ms: int
    ) -> None:
        name = request.head.fields.producer_group
        members = self._producers.members(name)
        if not members:
            raise RequestRefused(
                ResponseCode.SYSTEM_ERROR, f"nobody of producer group {_shown(name)} is connected"
            )
        found = ProducerConnections(connection_set=[_client(member) for member in members])
        line.write(answer(request, body=encode_body(found)))

    def all_producers(self, line: Line, request: Request[Any], now_ms: int) -> None:
        found = Producers(
            data={
                name: [_producer(member) for member in self._producers.members(name)]
                for name in self._producers.names()
            }
        )
        line.write(answer(request, body=encode_body(found)))

    def groups_of_topic(self, line: Line, request: Request[TopicName], now_ms: int) -> None:
        topic = request.head.fields.topic
        names = {*self._consumers.subscribers(topic), *self._offsets.groups_of(topic)}
        line.write(answer(request, body=encode_body(GroupList(group_list=sorted(names)))))

    def topics_of_group(self, line: Line, request: Request[GroupName], now_ms: int) -> None:
        topics = self._topics_of(request.head.fields.group)
        found = TopicList(topic_list=topics, broker_addr=self._address)
        line.write(answer(request, body=encode_body(found)))

    def subscription(self, line: Line, request: Request[TopicAndGroup], now_ms: int) -> None:
        fields = request.head.fields
        found = self._consumers.subscription(fields.group, fields.topic)
        if found is None:
            raise RequestRefused(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"nobody of {_shown(fields.group)} is connected and wants {_shown(fields.topic)}",
            )
        body = SubscriptionOf(
            topic=fields.topic, group=fields.group, subscription_data=subscription_entry(found)
        )
        line.write(answer(request, body=encode_body(body)))

    # --- how far everybody is --------------------------------------------------------------------

    def topic_stats(self, line: Line, request: Request[TopicName], now_ms: int) -> None:
        name = request.head.fields.topic
        topic = self._topic(name)
        store = self._store
        table = {
            queue: TopicOffset(
                min_offset=store.min_offset(name, queue.queue_id),
                max_offset=(end := store.max_offset(name, queue.queue_id)),
                last_update_timestamp=self._stored_ms(name, queue.queue_id, end - 1),
            )
            for queue in self._queues(name, max(topic.read_queue_nums, topic.write_queue_nums))
        }
        minute, _, _ = self._statistics.of_topic(name, 0, now_ms)
        line.write(answer(request, body=by_queue(table, topicPutTps=minute.per_s)))

    def consume_stats(self, line: Line, request: Request[ConsumeStatsOf], now_ms: int) -> None:
        fields = request.head.fields
        group = fields.consumer_group
        topics = [fields.topic] if fields.topic else self._topics_of(group)
        table: dict[QueueName, ConsumeOffset] = {}
        per_s = 0.0
        for topic in topics:
            table.update(self._progress(group, topic))
            per_s += self._statistics.of_group(topic, group, 0, now_ms)[0].per_s
        line.write(answer(request, body=by_queue(table, consumeTps=per_s)))

    def all_consume_stats(
        self, line: Line, request: Request[BrokerConsumeStats], now_ms: int
    ) -> None:
        groups, total = [], 0
        for name, config in self._groups.all().items():
            of_topics = []
            for topic in self._topics_of(name) if config.consume_enable else []:
                found = self._topics.find(topic)
                if found is None or (request.head.fields.is_order and not found.order):
                    continue
                table = self._progress(name, topic)
                total += sum(one.broker_offset - one.consumer_offset for one in table.values())
                per_s = self._statistics.of_group(topic, name, 0, now_ms)[0].per_s
                of_topics.append(by_queue(table, consumeTps=per_s))
            groups.append((name, of_topics))
        body = broker_consume_stats(groups, address=self._address, total_diff=total)
        line.write(answer(request, body=body))

    def time_spans(self, line: Line, request: Request[TopicAndGroup], now_ms: int) -> None:
        name, group = request.head.fields.topic, request.head.fields.group
        topic = self._topic(name)
        spans = []
        for queue in self._queues(name, topic.write_queue_nums):
            end = self._store.max_offset(name, queue.queue_id)
            read = self._offsets.query(name, group, queue.queue_id) or 0
            consumed_ms = self._stored_ms(name, queue.queue_id, read - 1)
            waiting_ms = self._stored_ms(name, queue.queue_id, read) if read < end else now_ms
            spans.append(
                TimeSpan(
                    message_queue=queue,
                    min_time_stamp=self._store.earliest_stored_ms(name, queue.queue_id),
                    max_time_stamp=self._stored_ms(name, queue.queue_id, end - 1),
                    consume_time_stamp=consumed_ms,
                    delay_time=max(0, now_ms - waiting_ms),
                )
            )
        line.write(answer(request, body=encode_body(TimeSpans(consume_time_span_set=spans))))

    def _progress(self, group: str, name: str) -> dict[QueueName, ConsumeOffset]:
        topic = self._topics.find(name)
        found = {}
        for queue in self._queues(name, 0 if topic is None else topic.read_queue_nums):
            read = self._offsets.query(name, group, queue.queue_id) or 0
            found[queue] = ConsumeOffset(
                broker_offset=self._store.max_offset(name, queue.queue_id),
                consumer_offset=read,
                pull_offset=read,
                last_timestamp=self._stored_ms(name, queue.queue_id, read - 1),
            )
        return found

    def _topics_of(self, group: str) -> list[str]:
        connected = self._consumers.find(group)
        wanted = set() if connected is None else set(connected.subscriptions)
        return sorted(wanted.union(self._offsets.topics_of(group)))

    def _topic(self, name: str) -> TopicConfig:
        found = self._topics.find(name)
        if found is None:
            raise RequestRefused(
                ResponseCode.TOPIC_NOT_EXIST, f"topic {_shown(name)} does not exist"
            )
        return found

    def _queues(self, topic: str, count: int) -> Iterator[QueueName]:
        broker = self._topics.broker_name
        return (QueueName(topic=topic, broker_name=broker, queue_id=n) for n in range(count))

    def _stored_ms(self, topic: str, queue_id: int, queue_offset: int) -> int:
        """Of the message at this place; 0 if there is none."""
        if not self._store.min_offset(topic, queue_id) <= queue_offset:
            return 0
        try:
            return self._store.stored_ms(topic, queue_id, queue_offset) or 0
        except (NoSuchRecord, CorruptRecord):
            return 0


def subscription_entry(found: Subscription) -> SubscriptionEntry:
    return SubscriptionEntry(
        topic=found.topic,
        sub_string=found.expression,
        tags_set=list(found.tags),
        code_set=sorted(found.codes),
        sub_version=found.version,
        expression_type=found.kind,
    )


def _client(member: Member) -> ClientEntry:
    client = member.client
    return ClientEntry(
        client_id=client.client_id,
        client_addr=client.line.peer,  # type: ignore[attr-defined]  # consume/ knows no lines
        language=client.language,
        version=client.version,
    )


def _producer(member: Member) -> ProducerInfo:
    client = member.client
    return ProducerInfo(
        client_id=client.client_id,
        remote_ip=f"/{client.line.peer}",  # type: ignore[attr-defined]  # as Java shows it
        language=client.language,
        version=client.version,
        last_update_timestamp=member.seen_ms,
    )


def _shown(name: str) -> str:
    return name[:_SHOWN_MAX]
