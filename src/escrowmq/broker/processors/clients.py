"""Clients and their groups: heartbeats, member lists and queue locks.

A heartbeat registers a client in its groups. When the members of a consumer group change, all of
them are notified and rebalance. `consume/members.py` holds the groups and locks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from escrowmq.broker.closed_names import check_group_is_open
from escrowmq.broker.dispatch import Channel, Handler, RequestPermissions
from escrowmq.broker.metadata import SubscriptionGroups, TopicTable, check_is_printable
from escrowmq.client_memory import name_error
from escrowmq.consume.members import (
    ConsumerGroups,
    ConsumerGroupSettings,
    GroupClient,
    HeartbeatResult,
    ProducerGroups,
    QueueLocks,
)
from escrowmq.consume.pull import SQL_NOT_ENABLED
from escrowmq.consume.subscription import (
    Subscription,
    parse_heartbeat_subscription,
    parse_subscription,
    prepare_subscription,
)
from escrowmq.errors import InvalidSubscription, RequestRefused
from escrowmq.limited_log import LimitedLog
from escrowmq.message.filter import TAG
from escrowmq.message.names import retry_topic
from escrowmq.remoting.bodies import (
    CheckClientConfig,
    ConsumerEntry,
    ConsumerList,
    Heartbeat,
    LockBatch,
    LockBatchResponse,
    QueueName,
    decode_heartbeat,
    decode_request_body,
    encode_body,
)
from escrowmq.remoting.bodies_admin import encode_list_in_slices
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import ConsumerGroupHeader, HeartbeatResponse, UnregisterClient
from escrowmq.remoting.requests import Request
from escrowmq.sliced_work import SlicedResult, SlicedWork, SliceScheduler

log = logging.getLogger(__name__)

_SHOWN_LENGTH_MAX: Final = 100  # of a client's text that a log line repeats
QUEUES_PER_SLICE: Final = 128  # of a request to lock or unlock
CLOSED_PER_SLICE: Final = 16  # members of a closed channel that are removed at once
DISPUTES_LOGGED_MAX: Final = 3  # in a minute; members repeat their heartbeats
DISPUTED_TOPICS_SHOWN: Final = 5


class ClientProcessor:
    def __init__(
        self,
        topics: TopicTable,
        groups: SubscriptionGroups,
        consumers: ConsumerGroups[Channel],
        producers: ProducerGroups[Channel],
        locks: QueueLocks,
        *,
        on_producer_joined: Callable[[str, int], None] = lambda group, now_ms: None,
        allows_sql: bool = False,
        background_work: SliceScheduler,
    ) -> None:
        self._topics = topics
        self._groups = groups
        self._consumers = consumers
        self._producers = producers
        self._locks = locks
        self._on_producer_joined = on_producer_joined
        self.allows_sql = allows_sql
        self._background_work = background_work
        self._is_expiring = False
        self._dispute_log = LimitedLog(log, lines_max=DISPUTES_LOGGED_MAX, period_ms=60_000)
        self._changed_groups: dict[str, None] = {}  # whose members are not notified yet

    def handlers(self) -> list[Handler]:
        code, permissions = RequestCode, RequestPermissions
        return [
            Handler(
                code.HEART_BEAT, self.heartbeat, permissions.heartbeat, has_many_permissions=True
            ),
            Handler(code.UNREGISTER_CLIENT, self.unregister, permissions.unregister),
            Handler(code.CHECK_CLIENT_CONFIG, self.check_config, permissions.check_config),
            Handler(code.GET_CONSUMER_LIST_BY_GROUP, self.list_members, permissions.list_members),
            Handler(code.LOCK_BATCH_MQ, self.lock, permissions.lock, has_many_permissions=True),
            Handler(code.UNLOCK_BATCH_MQ, self.unlock, permissions.lock, has_many_permissions=True),
        ]

    def heartbeat(self, channel: Channel, request: Request[Any], now_ms: int) -> SlicedWork:
        heartbeat = decode_heartbeat(request.body)
        client = GroupClient(
            client_id=heartbeat.client_id,
            channel=channel,
            language=request.head.language,
            version=request.head.version,
        )
        _check_names(heartbeat)
        needs_subscriptions, warning = True, ""
        for producer in heartbeat.producer_data_set:
            if self._producers.heartbeat(producer.group_name, client, now_ms=now_ms):
                self._on_producer_joined(producer.group_name, now_ms)
            yield
        for consumer in heartbeat.consumer_data_set:
            subscriptions = yield from _parse_subscriptions(consumer)
            result = self._register_consumer(heartbeat, consumer, subscriptions, client, now_ms)
            needs_subscriptions = result is None or result.needs_subscriptions
            if result is not None and result.disputed_topics:
                warning = _dispute_warning(consumer.group_name, result.disputed_topics)
                self._dispute_log.warning(now_ms, "client=%s: %s", client.client_id, warning)
            yield
        header = HeartbeatResponse(is_support_heart_beat_v2=True, is_sub_change=needs_subscriptions)
        channel.respond(request, header, remark=warning)  # clients of ours log it

    def _register_consumer(
        self,
        heartbeat: Heartbeat,
        entry: ConsumerEntry,
        subscriptions: list[Subscription],
        client: GroupClient[Channel],
        now_ms: int,
    ) -> HeartbeatResult[Channel] | None:
        """Return None if the group does not exist: as RocketMQ, the broker ignores it then."""
        group = self._groups.get_or_create(entry.group_name, now_ms=now_ms)
        if group is None:
            return None
        self._topics.ensure(
            retry_topic(entry.group_name), queue_count=group.retry_queue_nums, now_ms=now_ms
        )
        result = self._consumers.heartbeat(
            entry.group_name,
            client,
            settings=ConsumerGroupSettings(
                consume_type=str(entry.consume_type),
                message_model=str(entry.message_model),
                consume_from_where=str(entry.consume_from_where),
            ),
            subscriptions=subscriptions,
            fingerprint=heartbeat.heartbeat_fingerprint,
            without_sub=heartbeat.without_sub,
            now_ms=now_ms,
        )
        if result.evicted is not None:
            self._notify(result.evicted.group)
        if result.has_changed:
            self._notify(entry.group_name)
        return result

    def unregister(self, channel: Channel, request: Request[UnregisterClient], now_ms: int) -> None:
        fields = request.head.fields
        check_group_is_open(fields.consumer_group or "")
        if fields.producer_group:
            self._producers.unregister(fields.producer_group, fields.client_id, channel)
        if fields.consumer_group and self._consumers.unregister(
            fields.consumer_group, fields.client_id, channel
        ):
            self._notify(fields.consumer_group)
        channel.respond(request)

    def check_config(self, channel: Channel, request: Request[Any], now_ms: int) -> None:
        """Check the subscription of a consumer that starts. Raise InvalidSubscription."""
        entry = decode_request_body(CheckClientConfig, request.body).subscription_data
        expression_type = entry.expression_type or TAG
        if expression_type != TAG:
            if not self.allows_sql:
                raise RequestRefused(ResponseCode.SYSTEM_ERROR, SQL_NOT_ENABLED)
            parse_subscription(entry.topic, entry.sub_string, expression_type=expression_type)
        channel.respond(request)

    def list_members(
        self, channel: Channel, request: Request[ConsumerGroupHeader], now_ms: int
    ) -> SlicedWork:
        group = request.head.fields.consumer_group
        members = self._consumers.members(group)
        if not members:
            reason = f"no member of group {group} is connected"
            if self._groups.find(group) is None:
                reason = (
                    f"group {group} does not exist, and this broker creates none by itself: set "
                    "autoCreateSubscriptionGroup=true, or create it with mqadmin updateSubGroup"
                )
            raise RequestRefused(ResponseCode.SYSTEM_ERROR, reason)
        ids = (member.client.client_id for member in members)
        empty = ConsumerList(consumer_id_list=[])
        channel.respond(
            request, body=(yield from encode_list_in_slices(empty, "consumerIdList", ids))
        )

    def lock(self, channel: Channel, request: Request[Any], now_ms: int) -> SlicedWork:
        batch = decode_request_body(LockBatch, request.body)
        check_group_is_open(batch.consumer_group)
        _check_length("clientId", batch.client_id)
        self._groups.require(batch.consumer_group, now_ms=now_ms)
        locked: list[QueueName] = []
        for part in _parts(batch.mq_set):
            # Only queues that exist: a client could make up any number of others.
            queues = [
                (queue.topic, queue.queue_id)
                for queue in part
                if self._has_queue(queue.topic, queue.queue_id)
            ]
            granted = set(
                self._locks.lock(
                    batch.consumer_group, batch.client_id, queues, now_ms=now_ms, channel=channel
                )
            )
            locked += [queue for queue in part if (queue.topic, queue.queue_id) in granted]
            yield
        channel.respond(request, body=encode_body(LockBatchResponse(locked=locked)))

    def _has_queue(self, topic: str, queue_id: int) -> bool:
        config = self._topics.find(topic)
        return config is not None and 0 <= queue_id < max(
            config.read_queue_nums, config.write_queue_nums
        )

    def unlock(self, channel: Channel, request: Request[Any], now_ms: int) -> SlicedWork:
        batch = decode_request_body(LockBatch, request.body)
        check_group_is_open(batch.consumer_group)
        for part in _parts(batch.mq_set):
            queues = [(queue.topic, queue.queue_id) for queue in part]
            self._locks.unlock(batch.consumer_group, batch.client_id, queues)
            yield
        channel.respond(request)

    # --- without a request -----------------------------------------------------------------------

    def channel_closed(self, channel: Channel) -> bool:
        """Remove some members of a closed channel. Return whether there may be more."""
        limit = CLOSED_PER_SLICE
        self._locks.channel_closed(channel)
        producers = self._producers.channel_closed(channel, count_max=limit)
        consumers = self._consumers.channel_closed(channel, count_max=limit)
        for group in {member.group for member in consumers}:
            self._notify(group)
        return max(len(producers), len(consumers)) == limit

    def expire(self, now_ms: int) -> None:
        """Let members and locks be removed whose time is over, in slices."""
        self._locks.expire(now_ms)
        if not self._is_expiring:
            self._is_expiring = True
            self._background_work.add(self._expire_members(now_ms))

    def _expire_members(self, now_ms: int) -> SlicedWork:
        try:
            for _ in self._producers.release_expired(now_ms):
                yield
            for member in self._consumers.release_expired(now_ms):
                if member is not None:
                    self._notify(member.group)
                yield
        finally:
            self._is_expiring = False

    def _notify(self, group: str) -> None:
        """Let the members of a group be told to rebalance.

        In slices, and once for all changes of a turn: a group may have very many members.
        """
        if not self._changed_groups:
            self._background_work.add(self._notify_members())
        self._changed_groups[group] = None

    def _notify_members(self) -> SlicedWork:
        while self._changed_groups:
            group = next(iter(self._changed_groups))
            del self._changed_groups[group]
            header = ConsumerGroupHeader(consumer_group=group)
            for channel in self._consumers.channels_to_notify(group):
                try:
                    if channel is not None:
                        channel.send_oneway(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, header)
                except Exception:  # the other members have to know
                    log.exception("member not notified group=%s", group)
                yield


def _parts(queues: list[QueueName]) -> Iterator[list[QueueName]]:
    for begin in range(0, len(queues), QUEUES_PER_SLICE):
        yield queues[begin : begin + QUEUES_PER_SLICE]


def _check_names(heartbeat: Heartbeat) -> None:
    """Raise RequestRefused if a client joins a group of the broker, or has an unprintable name.

    Log lines and lists have these names, and none of them may look like two. Also raise it if a
    name is too long to be kept.
    """
    producers, consumers = heartbeat.producer_data_set, heartbeat.consumer_data_set
    groups = [entry.group_name for entry in producers]
    groups += [entry.group_name for entry in consumers]
    for group in groups:
        _check_length("group", group)
        check_is_printable("group", group)
    _check_length("clientID", heartbeat.client_id)
    check_is_printable("client id", heartbeat.client_id)
    for consumer in consumers:
        check_group_is_open(consumer.group_name)
        _check_length("consumeType", str(consumer.consume_type))
        _check_length("messageModel", str(consumer.message_model))
        _check_length("consumeFromWhere", str(consumer.consume_from_where))


def _dispute_warning(group: str, topics: Sequence[str]) -> str:
    shown = ", ".join(topic[:_SHOWN_LENGTH_MAX] for topic in topics[:DISPUTED_TOPICS_SHOWN])
    return (
        f"the members of group {group} have different subscriptions to {shown}: each has a part of "
        "the queues, so messages are missed; use another group for other subscriptions"
    )


def _check_length(field_name: str, name: str) -> None:
    if error := name_error(field_name, name):
        raise RequestRefused(ResponseCode.INVALID_PARAMETER, error)


def _parse_subscriptions(entry: ConsumerEntry) -> SlicedResult[list[Subscription]]:
    subscriptions: list[Subscription] = []
    for item in entry.subscription_data_set:
        yield from prepare_subscription(
            item.topic,
            item.sub_string,
            expression_type=item.expression_type,
            version=item.sub_version,
        )
        try:
            subscription = parse_heartbeat_subscription(
                item.topic,
                item.sub_string,
                expression_type=item.expression_type,
                version=item.sub_version,
            )
            subscriptions.append(subscription)
        except InvalidSubscription as error:
            # The other subscriptions of the heartbeat are valid. A pull of this topic will get the
            # error as its response.
            log.warning(
                "subscription ignored group=%s topic=%s: %s",
                entry.group_name,
                item.topic[:_SHOWN_LENGTH_MAX],
                error,
            )
        yield
    return subscriptions
