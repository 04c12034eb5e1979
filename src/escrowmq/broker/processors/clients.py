"""Who is there: heartbeats, goodbyes, member lists, queue locks, and news for the members."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from escrowmq.broker.dispatch import Line, body_of
from escrowmq.broker.metadata import Groups, Topics
from escrowmq.consume.members import (
    Client,
    ConsumerGroups,
    Habits,
    Member,
    ProducerGroups,
    QueueLocks,
)
from escrowmq.consume.pull import SQL_NOT_ENABLED
from escrowmq.consume.retry import retry_topic
from escrowmq.consume.subscription import TAG, Subscription, heard_subscription, parse_subscription
from escrowmq.errors import BadSubscription, RequestRefused, TableFull
from escrowmq.remoting.bodies import (
    CheckClientConfig,
    ConsumerEntry,
    ConsumerList,
    Heartbeat,
    LockBatch,
    LockBatchAnswer,
    encode_body,
)
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import ConsumerGroup, HeartbeatAnswer, UnregisterClient
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import answer, succeed

log = logging.getLogger(__name__)


class Clients:
    def __init__(
        self,
        topics: Topics,
        groups: Groups,
        consumers: ConsumerGroups,
        producers: ProducerGroups,
        locks: QueueLocks,
        *,
        producer_joined: Callable[[str, int], None] = lambda group, now_ms: None,
        allows_sql: bool = False,
    ) -> None:
        self._topics = topics
        self._groups = groups
        self._consumers = consumers
        self._producers = producers
        self._locks = locks
        self._producer_joined = producer_joined
        self.allows_sql = allows_sql

    def heartbeat(self, line: Line, request: Request[Any], now_ms: int) -> None:
        beat = body_of(Heartbeat, request)
        client = Client(
            client_id=beat.client_id,
            line=line,
            language=request.head.language,
            version=request.head.version,
        )
        wants_subscriptions = True
        try:
            for producer in beat.producer_data_set:
                if self._producers.heartbeat(producer.group_name, client, now_ms=now_ms):
                    self._producer_joined(producer.group_name, now_ms)
            for consumer in beat.consumer_data_set:
                wants_subscriptions = self._consumer(beat, consumer, client, now_ms)
        except TableFull as error:
            raise RequestRefused(ResponseCode.SYSTEM_BUSY, str(error)) from error
        fields = HeartbeatAnswer(is_support_heart_beat_v2=True, is_sub_change=wants_subscriptions)
        line.write(answer(request, fields))

    def _consumer(self, beat: Heartbeat, entry: ConsumerEntry, client: Client, now_ms: int) -> bool:
        group = self._groups.find_or_make(entry.group_name, now_ms=now_ms)
        if group is None:
            return True  # as RocketMQ: unknown groups are passed over
        self._topics.make(
            retry_topic(entry.group_name), queues=group.retry_queue_nums, now_ms=now_ms
        )
        joined = self._consumers.heartbeat(
            entry.group_name,
            client,
            habits=Habits(
                consume_type=str(entry.consume_type),
                message_model=str(entry.message_model),
                consume_from=str(entry.consume_from_where),
            ),
            subscriptions=list(_subscriptions(entry)),
            fingerprint=beat.heartbeat_fingerprint,
            without_sub=beat.without_sub,
            now_ms=now_ms,
        )
        if joined.changed:
            self._notify(entry.group_name)
        return joined.wants_subscriptions

    def unregister(self, line: Line, request: Request[UnregisterClient], now_ms: int) -> None:
        fields = request.head.fields
        if fields.producer_group:
            self._producers.unregister(fields.producer_group, fields.client_id, line)
        if fields.consumer_group and self._consumers.unregister(
            fields.consumer_group, fields.client_id, line
        ):
            self._notify(fields.consumer_group)
        line.write(succeed(request))

    def check_config(self, line: Line, request: Request[Any], now_ms: int) -> None:
        wanted = body_of(CheckClientConfig, request).subscription_data
        kind = wanted.expression_type or TAG
        if kind != TAG and not self.allows_sql:
            raise RequestRefused(ResponseCode.SYSTEM_ERROR, SQL_NOT_ENABLED)
        try:
            if kind != TAG:
                parse_subscription(wanted.topic, wanted.sub_string, kind=kind)
        except BadSubscription as error:
            code = ResponseCode.SUBSCRIPTION_PARSE_FAILED
            raise RequestRefused(code, str(error)) from error
        line.write(succeed(request))

    def members(self, line: Line, request: Request[ConsumerGroup], now_ms: int) -> None:
        group = request.head.fields.consumer_group
        ids = self._consumers.member_ids(group)
        if not ids:
            raise RequestRefused(ResponseCode.SYSTEM_ERROR, f"nobody of {group} is connected")
        line.write(answer(request, body=encode_body(ConsumerList(consumer_id_list=ids))))

    def lock(self, line: Line, request: Request[Any], now_ms: int) -> None:
        wanted = body_of(LockBatch, request)
        granted = set(
            self._locks.lock(
                wanted.consumer_group,
                wanted.client_id,
                [(queue.topic, queue.queue_id) for queue in wanted.mq_set],
                now_ms=now_ms,
            )
        )
        locked = [queue for queue in wanted.mq_set if (queue.topic, queue.queue_id) in granted]
        line.write(answer(request, body=encode_body(LockBatchAnswer(locked=locked))))

    def unlock(self, line: Line, request: Request[Any], now_ms: int) -> None:
        wanted = body_of(LockBatch, request)
        queues = [(queue.topic, queue.queue_id) for queue in wanted.mq_set]
        self._locks.unlock(wanted.consumer_group, wanted.client_id, queues)
        line.write(succeed(request))

    # --- nobody asks for these -------------------------------------------------------------------

    def line_closed(self, line: Line) -> None:
        self._producers.line_closed(line)
        self._tell_groups_of(self._consumers.line_closed(line))

    def expire(self, now_ms: int) -> None:
        self._producers.expire(now_ms)
        self._locks.expire(now_ms)
        self._tell_groups_of(self._consumers.expire(now_ms))

    def _tell_groups_of(self, gone: Iterable[Member]) -> None:
        for group in {member.group for member in gone}:
            self._notify(group)

    def _notify(self, group: str) -> None:
        """Somebody came or went: share the queues out anew."""
        for line in self._consumers.lines_to_notify(group):
            line.post(  # type: ignore[attr-defined]  # consume/ does not know what a line is
                RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, ConsumerGroup(consumer_group=group)
            )


def _subscriptions(entry: ConsumerEntry) -> Iterable[Subscription]:
    for item in entry.subscription_data_set:
        try:
            yield heard_subscription(
                item.topic, item.sub_string, kind=item.expression_type, version=item.sub_version
            )
        except BadSubscription as error:
            # The others of this heartbeat are still good; a pull of this one will say why.
            log.warning("subscription passed over group=%s: %s", entry.group_name, error)
