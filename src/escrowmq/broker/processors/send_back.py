"""Messages that go back: failed messages to their group, replies to the client that waits.

    CONSUMER_SEND_MSG_BACK   a consumer could not process a message. It is stored again in the
                             retry topic of the group, or in its dead-letter topic.
    SEND_REPLY_MESSAGE       a reply to a request message. It is pushed to the requester's
                             connection and stored like any message. The response says whether the
                             requester has received it.

`consume/retry.py` decides where a failed message goes; here the decision becomes a record.

A client that gets no response sends a message back again. While the first retry waits, and at least
for two minutes, the repeated request gets the response of the first one and nothing is stored.
Afterwards the same message may have failed again, so it is a request of its own. The first retry is
found by its key. Thousands of other keys may have the same hash, so it is searched in slices.

A consumer may say why the delivery failed. The retry or dead letter has this, and what the broker
knows of it, in properties that only a broker writes (`message/delivery_failure.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, cast

import msgspec

from escrowmq.broker.closed_names import check_group_is_open, check_records_are_open
from escrowmq.broker.dispatch import (
    FRAME_BODY_BYTES_MAX,
    Channel,
    Handler,
    RequestChannel,
    RequestPermissions,
    respond_failure,
)
from escrowmq.broker.metadata import SubscriptionGroups, TopicTable, creations_of_request
from escrowmq.broker.processors.send import SEND_ERRORS, SendProcessor
from escrowmq.broker.statistics import NORMAL, BrokerCounters
from escrowmq.broker.turn import Turn
from escrowmq.consume.members import ProducerGroups, QueueLocks
from escrowmq.consume.retry import FailedMessage, Redelivery, RetryPolicy, redirect, send_back
from escrowmq.errors import RequestRefused
from escrowmq.message.broker_marks import CLIENT_SYS_FLAGS, remove_broker_properties
from escrowmq.message.delivery_failure import (
    FailureReport,
    broker_properties,
    failure_of,
    report_of_client,
    without_failure,
)
from escrowmq.message.keys import decode_host, encode_offset_id
from escrowmq.message.names import (
    PUSH_REPLY_TIME,
    REAL_TOPIC,
    REPLY_TO,
    RETRY_OF,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    UNIQUE_KEY,
    group_of_retry_topic,
    retry_topic,
)
from escrowmq.message.properties import (
    change_properties,
    decode_properties,
    encode_properties,
    find_property,
)
from escrowmq.message.record import PROPERTIES_BYTES_MAX, NewRecord, StoredRecord, copy_record
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.command import Command
from escrowmq.remoting.headers import (
    ConsumerSendMessageBack,
    NoFields,
    PushReplyMessage,
    SendMessage,
    SendMessageResponse,
)
from escrowmq.remoting.requests import Request, request_for_response
from escrowmq.sliced_work import SlicedResult, SlicedWork, SliceScheduler
from escrowmq.store.commit_log import AppendResult
from escrowmq.store.config_files import GroupConfig
from escrowmq.store.store import MessageStore

REPEATED_AFTER_MAX_MS: Final = 120_000
# Kept free in a record that a client sends or sends back: delays and the record CRC need room too.
_BROKER_PROPERTIES_BYTES: Final = 512


class SendBackProcessor:
    def __init__(
        self,
        store: MessageStore,
        topics: TopicTable,
        groups: SubscriptionGroups,
        locks: QueueLocks,
        redirect: Callable[[NewRecord, int], NewRecord],
        turn: Turn,
        background_work: SliceScheduler,
        *,
        is_waiting: Callable[[StoredRecord], bool] = lambda record: False,
        seed: int = 0,
    ) -> None:
        """`is_waiting`: returns whether a delayed message is not delivered yet."""
        self._store = store
        self._is_waiting = is_waiting
        self._background_work = background_work
        # Group and log offset of the messages that are being sent back: their retry is searched, or
        # is not stored yet.
        self._in_progress: set[tuple[str, int]] = set()
        self._topics = topics
        self._groups = groups
        self._locks = locks
        self._redirect = redirect
        self._turn = turn
        self._random = Random(seed)

    def handlers(self) -> list[Handler]:
        return [
            Handler(
                RequestCode.CONSUMER_SEND_MSG_BACK,
                self.send_back,
                RequestPermissions.send_back,
                is_flow_controlled=True,
            )
        ]

    def send_back(
        self, channel: Channel, request: Request[ConsumerSendMessageBack], now_ms: int
    ) -> SlicedWork:
        fields = request.head.fields
        check_group_is_open(fields.group)
        failed_key = fields.group, fields.offset
        if failed_key in self._in_progress:
            self._retry_after_turn(channel, request, now_ms)
            return
        redelivery, key = self._plan(channel, request, now_ms)
        self._in_progress.add(failed_key)
        is_added = False
        try:
            is_repeated = yield from self._is_repeated(redelivery, key, fields.offset)
            with creations_of_request(self._topics, self._groups):
                is_added = self._add_retry(channel, request, redelivery, is_repeated, now_ms)
        finally:
            if not is_added:
                self._in_progress.discard(failed_key)

    def _plan(
        self, channel: Channel, request: Request[ConsumerSendMessageBack], now_ms: int
    ) -> tuple[Redelivery | None, str]:
        """Return what to do with a failed message, and its unique key.

        Nothing is created for it yet. The message itself, which may be long, is not kept while its
        retry is searched.
        """
        fields = request.head.fields
        record = self._store.record_at(fields.offset)
        check_records_are_open(record.topic)
        failed = FailedMessage(
            topic=record.topic,
            reconsume_times=record.reconsume_times,
            properties=without_failure(
                decode_properties(remove_broker_properties(record.properties, keeps_added=True))
            ),
            offset_id=encode_offset_id(record.store_host, record.log_offset),
        )
        group = self._groups.find(fields.group) or GroupConfig(group_name=fields.group)
        policy = _retry_policy(group, fields.max_reconsume_times, request.head.version)
        key = find_property(record.properties, UNIQUE_KEY.encode()) or b""
        redelivery = send_back(
            failed,
            fields.group,
            policy,
            delay_level=fields.delay_level,
            delay_ms=fields.delay_ms,
        )
        if redelivery is not None:
            report = FailureReport.cleaned(
                fields.error_type, fields.error_text, fields.consumer_host, fields.attempts
            )
            # A retry of this group has the failure before this one: this broker stored it.
            is_retry = record.topic == retry_topic(fields.group)
            earlier = decode_properties(record.properties) if is_retry else {}
            _add_failure(
                redelivery,
                report,
                earlier,
                address=channel.address,
                attempts=redelivery.reconsume_times,
                now_ms=now_ms,
            )
        return redelivery, key.decode("utf-8", "replace")

    def _add_retry(
        self,
        channel: Channel,
        request: Request[ConsumerSendMessageBack],
        redelivery: Redelivery | None,
        is_repeated: bool,
        now_ms: int,
    ) -> bool:
        """Add the retry to this turn, unless there is one. Return whether it was added."""
        fields = request.head.fields
        self._groups.require(fields.group, now_ms=now_ms)
        if redelivery is None:  # the group has no retry queues: the message is dropped
            channel.respond(request)
            return False
        if is_repeated:
            # The retry may have been stored a moment ago and not be durable yet.
            self._turn.add_records([], lambda code, _: _respond_stored(channel, request, code))
            return False
        redelivery.properties[RETRY_OF] = str(fields.offset)
        record = self._store.record_at(fields.offset)
        copy = self._redirect(self._make_record(redelivery, record, now_ms), now_ms)

        def on_done(code: int, _: Sequence[AppendResult]) -> None:
            self._in_progress.discard((fields.group, fields.offset))
            _respond_stored(channel, request, code)

        self._turn.add_records([copy], on_done)
        return True

    def _retry_after_turn(
        self, channel: Channel, request: Request[ConsumerSendMessageBack], now_ms: int
    ) -> None:
        """Handle a request again, because the same message is being sent back already."""

        def work() -> SlicedWork:
            try:
                yield from self.send_back(channel, request, now_ms)
            except Exception as error:
                respond_failure(channel, request, error)

        self._turn.add_records([], lambda code, _: self._background_work.add(work()))

    def _is_repeated(
        self, redelivery: Redelivery | None, key: str, log_offset: int
    ) -> SlicedResult[bool]:
        """Return whether the same message was sent back before, a moment ago or still waiting."""
        if redelivery is None or not key:
            return False
        failed_offset = b"%d" % log_offset
        topics = (redelivery.topic,) if redelivery.is_dead_letter else (SCHEDULE_TOPIC, TIMER_TOPIC)
        for topic in topics:
            for stored in (yield from self._store.search_by_key(topic, key)):
                if find_property(stored.properties, RETRY_OF.encode()) != failed_offset:
                    continue
                target = find_property(stored.properties, REAL_TOPIC.encode())
                if not redelivery.is_dead_letter and target != redelivery.topic.encode():
                    continue  # the retry of another group
                age_ms = self._store.last_stored_ms - stored.stored_ms
                if age_ms <= REPEATED_AFTER_MAX_MS or self._is_waiting(stored):
                    return True
        return False

    def redirect_retry(
        self, record: NewRecord, fields: SendMessage, version: int, now_ms: int
    ) -> NewRecord:
        """Return the record to store for a send to a retry topic: itself, or a dead letter."""
        name = group_of_retry_topic(record.topic) or ""
        properties = decode_properties(record.properties)
        redelivery = redirect(
            without_failure(properties),
            name,
            _retry_policy(
                self._groups.require(name, now_ms=now_ms), fields.max_reconsume_times, version
            ),
            reconsume_times=record.reconsume_times,
            group_has_locks=self._locks.group_has_locks(name, now_ms=now_ms),
        )
        if redelivery is None:
            return record
        report = report_of_client(properties)
        _add_failure(
            redelivery,
            report,
            {},
            address="{}:{}".format(*decode_host(record.born_host)),
            # A client that wants a dead letter claims more attempts than the limit.
            attempts=report.attempts or redelivery.reconsume_times,
            now_ms=now_ms,
        )
        return self._make_record(redelivery, record, now_ms)

    def _make_record(
        self, redelivery: Redelivery, record: StoredRecord | NewRecord, now_ms: int
    ) -> NewRecord:
        topic = self._topics.ensure(
            redelivery.topic, queue_count=redelivery.queue_count, now_ms=now_ms
        )
        copy = copy_record(
            record,
            topic=redelivery.topic,
            queue_id=self._random.randrange(max(1, topic.write_queue_nums)),
            properties=encode_properties(redelivery.properties),
            reconsume_times=redelivery.reconsume_times,
        )
        # It may be the copy of a final, and is a message of its own.
        sys_flag = record.sys_flag & CLIENT_SYS_FLAGS
        return msgspec.structs.replace(copy, sys_flag=sys_flag, prepared_offset=0)


def _add_failure(
    redelivery: Redelivery,
    report: FailureReport,
    earlier: Mapping[str, str],
    *,
    address: str,
    attempts: int,
    now_ms: int,
) -> None:
    """Add why the delivery failed, if anything is known of it or the message is a dead letter."""
    if not redelivery.is_dead_letter and not report.has_cause and failure_of(earlier) is None:
        return
    used_bytes = len(encode_properties(redelivery.properties)) + _BROKER_PROPERTIES_BYTES
    redelivery.properties.update(
        broker_properties(
            report,
            earlier,
            address=address,
            attempts=attempts,
            now_ms=now_ms,
            bytes_max=PROPERTIES_BYTES_MAX - used_bytes,
        )
    )


def _retry_policy(
    group: GroupConfig, max_reconsume_times: int | None, client_version: int
) -> RetryPolicy:
    return RetryPolicy(
        retry_queue_count=group.retry_queue_nums,
        max_reconsume_times=group.retry_max_times,
        requested_max_times=max_reconsume_times,
        client_version=client_version,
    )


def _respond_stored(channel: Channel, request: Request[ConsumerSendMessageBack], code: int) -> None:
    remark = "" if code == ResponseCode.SUCCESS else "the message was not stored again"
    channel.respond(request, code=code, remark=remark)


PUSH_TIMEOUT_S: Final = 10.0  # as in RocketMQ


class ReplyProcessor:
    def __init__(
        self,
        send_processor: SendProcessor,
        turn: Turn,
        producers: ProducerGroups[Channel],
        counters: BrokerCounters,
        *,
        store_host: bytes,
        stores_replies: bool,
        wall_ms: Callable[[int], int] = lambda now_ms: now_ms,
    ) -> None:
        self._send_processor = send_processor
        self._turn = turn
        self._producers = producers
        self._counters = counters
        self._store_address = "{}:{}".format(*decode_host(store_host))
        self._stores_replies = stores_replies
        self._wall_ms = wall_ms

    def handlers(self) -> list[Handler]:
        return [
            Handler(
                code,
                self.send_reply,
                RequestPermissions.reply,
                SEND_ERRORS,
                is_flow_controlled=True,
                body_bytes_max=FRAME_BODY_BYTES_MAX,
            )
            for code in (RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2)
        ]

    def send_reply(self, channel: Channel, request: Request[SendMessage], now_ms: int) -> None:
        """Store a reply and push it to the requester; respond when the requester has responded."""
        record = self._send_processor.make_record(channel, request, now_ms)
        # Without what is long: the reply may wait for the requester, and its bytes need not.
        reply = _PushedReply(channel, request_for_response(request, NoFields()), record.queue_id)
        if self._stores_replies:
            # Stored so that operators can find it, also if it cannot be pushed.
            def on_stored(results: Sequence[AppendResult]) -> None:
                [reply.stored] = results
                self._counters.record_message(record.topic, NORMAL, results[0].size)

            self._turn.add_records([record], on_stored=on_stored)
        self._push(reply, request, now_ms)

    def _push(self, reply: _PushedReply, request: Request[SendMessage], now_ms: int) -> None:
        fields, store_ms = request.head.fields, self._wall_ms(now_ms)
        client_id = decode_properties(fields.properties.encode()).get(REPLY_TO)
        if client_id is None:
            raise RequestRefused(ResponseCode.SYSTEM_ERROR, f"the reply has no property {REPLY_TO}")
        properties = change_properties(
            remove_broker_properties(fields.properties.encode()),
            update={PUSH_REPLY_TIME: str(store_ms)},
        )
        header = PushReplyMessage(
            producer_group=fields.producer_group,
            topic=fields.topic,
            default_topic=fields.default_topic,
            default_topic_queue_nums=fields.default_topic_queue_nums,
            queue_id=fields.queue_id,
            sys_flag=fields.sys_flag & CLIENT_SYS_FLAGS,
            born_timestamp=fields.born_timestamp,
            flag=fields.flag,
            properties=properties.decode(),
            reconsume_times=fields.reconsume_times,
            unit_mode=fields.unit_mode,
            born_host=reply.channel.address,
            store_host=self._store_address,
            store_timestamp=store_ms,
        )
        requester = self._producers.channel_of_client(client_id)
        if requester is None or not cast(RequestChannel, requester).call(
            RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT,
            header,
            request.body,
            reply.on_response,
            requester=reply.channel,
            timeout_s=PUSH_TIMEOUT_S,
        ):
            raise RequestRefused(
                ResponseCode.SYSTEM_ERROR,
                f"the requester {client_id[:100]} is not connected to this broker",
            )


@dataclass(slots=True)
class _PushedReply:
    """A reply that was pushed. Its sender waits for the response of the requester."""

    channel: Channel
    request: Request[NoFields]
    queue_id: int
    stored: AppendResult | None = None

    def on_response(self, command: Command | None, body: bytes) -> None:
        if command is None or command.code != ResponseCode.SUCCESS:
            # No response: its time is over, or the connection is closed.
            problem = "respond to" if command is None else "accept"
            remark = f"the requester did not {problem} the reply"
            self.channel.respond(self.request, code=ResponseCode.SYSTEM_ERROR, remark=remark)
        elif self.stored is not None:
            self.channel.respond_send(
                self.request, self.stored.log_offset, self.queue_id, self.stored.queue_offset
            )
        else:
            # As RocketMQ: clients need these fields although nothing is stored.
            header = SendMessageResponse(msg_id="0", queue_id=self.queue_id, queue_offset=0)
            self.channel.respond(self.request, header)
