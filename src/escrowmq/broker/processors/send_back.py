"""Messages that could not be processed: sent back by their consumers, or past all hope.

The decisions are in `consume/retry.py`; here they become records.

Replies: the answer to a request message, pushed to the client that waits for it, then stored.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from escrowmq.broker.dispatch import Line
from escrowmq.broker.metadata import Groups, Topics
from escrowmq.broker.processors.send import Sends
from escrowmq.broker.turn import Turn
from escrowmq.consume.members import ProducerGroups, QueueLocks
from escrowmq.consume.retry import (
    Again,
    Failed,
    RetryRules,
    divert,
    group_of_retry_topic,
    send_back,
)
from escrowmq.errors import CorruptRecord, NoSuchRecord, RequestRefused
from escrowmq.message.keys import encode_offset_id
from escrowmq.message.properties import decode_properties, encode_properties
from escrowmq.message.record import NewRecord, StoredRecord, moved
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import ConsumerSendMessageBack, PushReplyMessage, SendMessage
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import answer, succeed
from escrowmq.store.config_files import GroupConfig
from escrowmq.store.store import MessageStore


class Retries:
    def __init__(
        self,
        store: MessageStore,
        topics: Topics,
        groups: Groups,
        locks: QueueLocks,
        reroute: Callable[[NewRecord, int], NewRecord],
        turn: Turn,
        *,
        seed: int = 0,
    ) -> None:
        self._store = store
        self._topics = topics
        self._groups = groups
        self._locks = locks
        self._reroute = reroute
        self.turn = turn
        self._random = Random(seed)

    def sent_back(self, line: Line, request: Request[ConsumerSendMessageBack], now_ms: int) -> None:
        fields = request.head.fields
        group = self._group(fields.group)
        try:
            record = self._store.record_at(fields.offset)
        except (NoSuchRecord, CorruptRecord) as error:
            raise RequestRefused(ResponseCode.SYSTEM_ERROR, str(error)) from error
        failed = Failed(
            topic=record.topic,
            reconsume_times=record.reconsume_times,
            properties=decode_properties(record.properties),
            offset_id=encode_offset_id(record.store_host, record.log_offset),
        )
        rules = RetryRules(
            queue_count=group.retry_queue_nums,
            times_max=group.retry_max_times,
            asked_max=fields.max_reconsume_times,
            client_version=request.head.version,
        )
        again = send_back(failed, fields.group, rules, delay_level=fields.delay_level)
        if again is None:
            line.write(succeed(request))
            return
        stored = self._reroute(self._record(again, record, now_ms), now_ms)
        self.turn.put([stored], lambda code, _: line.write(_stored_answer(request, code)))

    def retried(
        self, record: NewRecord, fields: SendMessage, version: int, now_ms: int
    ) -> NewRecord:
        """A send to a retry topic: as it is, or to the dead letters."""
        name = group_of_retry_topic(record.topic) or ""
        group = self._group(name)
        again = divert(
            decode_properties(record.properties),
            name,
            RetryRules(
                queue_count=group.retry_queue_nums,
                times_max=group.retry_max_times,
                asked_max=fields.max_reconsume_times,
                client_version=version,
            ),
            reconsume_times=record.reconsume_times,
            group_has_locks=self._locks.group_has_locks(name, now_ms=now_ms),
        )
        return record if again is None else self._record(again, record, now_ms)

    def _group(self, name: str) -> GroupConfig:
        group = self._groups.find(name)
        if group is None:
            raise RequestRefused(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"group {name} does not exist"
            )
        return group

    def _record(self, again: Again, record: StoredRecord | NewRecord, now_ms: int) -> NewRecord:
        topic = self._topics.make(again.topic, queues=again.queue_count, now_ms=now_ms)
        return moved(
            record,
            topic=again.topic,
            queue_id=self._random.randrange(max(1, topic.write_queue_nums)),
            properties=encode_properties(again.properties),
            reconsume_times=again.reconsume_times,
        )


def _stored_answer(request: Request[ConsumerSendMessageBack], code: int) -> bytes:
    if code == ResponseCode.SUCCESS:
        return succeed(request)
    return answer(request, code=code, remark="the message could not be stored again")


REPLY_TO = "REPLY_TO_CLIENT"


class Replies:
    def __init__(self, sends: Sends, producers: ProducerGroups, *, stores: bool) -> None:
        self._stores = stores
        self._sends = sends
        self._producers = producers

    def handle(self, line: Line, request: Request[SendMessage], now_ms: int) -> None:
        fields = request.head.fields
        client_id = decode_properties(fields.properties.encode()).get(REPLY_TO)
        if client_id is None:
            raise RequestRefused(
                ResponseCode.SYSTEM_ERROR, f"a reply without the property {REPLY_TO}"
            )
        waiting = self._producers.line_of(client_id)
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
            born_host=line.peer,
            store_host=line.peer,
            store_timestamp=now_ms,
        )
        if waiting is not None:
            waiting.post(  # type: ignore[attr-defined]  # consume/ does not know what a line is
                RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, pushed, bytes(request.body)
            )
        if self._stores:
            # So that it can be found; the replier is answered like any sender.
            self._sends.accept(line, request, now_ms)
        else:
            line.write(succeed(request))
