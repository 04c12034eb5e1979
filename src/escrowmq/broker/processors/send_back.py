"""Messages that could not be processed: sent back by their consumers, or past all hope.

The decisions are in `consume/retry.py`; here they become records.

Replies: the answer to a request message, pushed to the client that waits for it, then stored.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from escrowmq.broker.dispatch import Channel, Handler, RequestPermissions
from escrowmq.broker.metadata import SubscriptionGroups, TopicTable
from escrowmq.broker.processors.send import SEND_ERRORS, SendProcessor
from escrowmq.broker.turn import Turn
from escrowmq.consume.members import ProducerGroups, QueueLocks
from escrowmq.consume.retry import FailedMessage, Redelivery, RetryPolicy, redirect, send_back
from escrowmq.errors import RequestRefused
from escrowmq.message.keys import encode_offset_id
from escrowmq.message.names import REPLY_TO, group_of_retry_topic
from escrowmq.message.properties import decode_properties, encode_properties
from escrowmq.message.record import NewRecord, StoredRecord, copy_record
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import ConsumerSendMessageBack, PushReplyMessage, SendMessage
from escrowmq.remoting.requests import Request
from escrowmq.store.config_files import GroupConfig
from escrowmq.store.store import MessageStore


class SendBackProcessor:
    def __init__(
        self,
        store: MessageStore,
        topics: TopicTable,
        groups: SubscriptionGroups,
        locks: QueueLocks,
        redirect: Callable[[NewRecord, int], NewRecord],
        turn: Turn,
        *,
        seed: int = 0,
    ) -> None:
        self._store = store
        self._topics = topics
        self._groups = groups
        self._locks = locks
        self._redirect = redirect
        self.turn = turn
        self._random = Random(seed)

    def handlers(self) -> list[Handler]:
        return [
            Handler(
                RequestCode.CONSUMER_SEND_MSG_BACK, self.send_back, RequestPermissions.send_back
            )
        ]

    def send_back(
        self, channel: Channel, request: Request[ConsumerSendMessageBack], now_ms: int
    ) -> None:
        fields = request.head.fields
        group = self._get_group(fields.group)
        record = self._store.record_at(fields.offset)
        failed = FailedMessage(
            topic=record.topic,
            reconsume_times=record.reconsume_times,
            properties=decode_properties(record.properties),
            offset_id=encode_offset_id(record.store_host, record.log_offset),
        )
        rules = RetryPolicy(
            retry_queue_count=group.retry_queue_nums,
            max_reconsume_times=group.retry_max_times,
            requested_max_times=fields.max_reconsume_times,
            client_version=request.head.version,
        )
        again = send_back(failed, fields.group, rules, delay_level=fields.delay_level)
        if again is None:
            channel.respond(request)
            return
        stored = self._redirect(self._make_record(again, record, now_ms), now_ms)
        self.turn.add_records([stored], lambda code, _: _respond_stored(channel, request, code))

    def redirect_retry(
        self, record: NewRecord, fields: SendMessage, version: int, now_ms: int
    ) -> NewRecord:
        """A send to a retry topic: as it is, or to the dead letters."""
        name = group_of_retry_topic(record.topic) or ""
        group = self._get_group(name)
        again = redirect(
            decode_properties(record.properties),
            name,
            RetryPolicy(
                retry_queue_count=group.retry_queue_nums,
                max_reconsume_times=group.retry_max_times,
                requested_max_times=fields.max_reconsume_times,
                client_version=version,
            ),
            reconsume_times=record.reconsume_times,
            group_has_locks=self._locks.group_has_locks(name, now_ms=now_ms),
        )
        return record if again is None else self._make_record(again, record, now_ms)

    def _get_group(self, name: str) -> GroupConfig:
        group = self._groups.find(name)
        if group is None:
            raise RequestRefused(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"group {name} does not exist"
            )
        return group

    def _make_record(
        self, redelivery: Redelivery, record: StoredRecord | NewRecord, now_ms: int
    ) -> NewRecord:
        topic = self._topics.ensure(
            redelivery.topic, queue_count=redelivery.queue_count, now_ms=now_ms
        )
        return copy_record(
            record,
            topic=redelivery.topic,
            queue_id=self._random.randrange(max(1, topic.write_queue_nums)),
            properties=encode_properties(redelivery.properties),
            reconsume_times=redelivery.reconsume_times,
        )


def _respond_stored(channel: Channel, request: Request[ConsumerSendMessageBack], code: int) -> None:
    remark = "" if code == ResponseCode.SUCCESS else "the message could not be stored again"
    channel.respond(request, code=code, remark=remark)


class ReplyProcessor:
    def __init__(
        self,
        send_processor: SendProcessor,
        producers: ProducerGroups[Channel],
        *,
        stores_replies: bool,
    ) -> None:
        self._stores_replies = stores_replies
        self._send_processor = send_processor
        self._producers = producers

    def handlers(self) -> list[Handler]:
        return [
            Handler(code, self.send_reply, RequestPermissions.reply, SEND_ERRORS)
            for code in (RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2)
        ]

    def send_reply(self, channel: Channel, request: Request[SendMessage], now_ms: int) -> None:
        fields = request.head.fields
        client_id = decode_properties(fields.properties.encode()).get(REPLY_TO)
        if client_id is None:
            raise RequestRefused(
                ResponseCode.SYSTEM_ERROR, f"a reply without the property {REPLY_TO}"
            )
        waiting = self._producers.channel_of_client(client_id)
        pushed = PushReplyMessage(
            producer_group=fields.producer_group,
            topic=fields.topic,
            default_topic=fields.default_topic,
            default_topic_queue_nums=fields.default_topic_queue_nums,
            queue_id=fields.queue_id,
            sys_flag=fields.sys_flag,
            born_timestamp=fields.born_timestamp,
            flag=fields.flag,
            properties=fields.properties,
            reconsume_times=fields.reconsume_times,
            unit_mode=fields.unit_mode,
            born_host=channel.address,
            store_host=channel.address,
            store_timestamp=now_ms,
        )
        if waiting is not None:
            waiting.send_oneway(
                RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, pushed, bytes(request.body)
            )
        if self._stores_replies:
            # So that it can be found; the replier is answered like any sender.
            self._send_processor.send(channel, request, now_ms)
        else:
            channel.respond(request)
