"""Requests about one queue: pull messages, read and commit offsets, send a message back."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple

from escrowmq.client.connection import RESPONSE_TIMEOUT_S, ClientConnection
from escrowmq.client.heartbeat import is_escrowmq
from escrowmq.client.messages import (
    MessageQueue,
    Namespace,
    ReceivedMessage,
    retained_bytes,
    to_received_message,
)
from escrowmq.errors import BrokenBody, BrokenResponse, CorruptRecord, RequestRefused
from escrowmq.message import names
from escrowmq.message.delivery_failure import (
    NO_REPORT,
    FailureReport,
    client_properties,
    without_failure,
)
from escrowmq.message.filter import FilterExpression
from escrowmq.message.names import (
    ORIGIN_MESSAGE_ID,
    RETRY_PREFIX,
    RETRY_TOPIC,
    TEMPLATE_TOPIC,
    retry_topic,
)
from escrowmq.message.properties import encode_properties
from escrowmq.message.record import RECORD_BYTES_MIN, LogOffset, decode_record
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import (
    ConsumerSendMessageBack,
    PullMessage,
    QueryConsumerOffset,
    QueueHeader,
    SearchOffset,
    SendMessageV2,
    UpdateConsumerOffset,
)
from escrowmq.remoting.requests import Body

log = logging.getLogger(__name__)

# Added to the time a broker may hold a pull. RocketMQ looks at held pulls only every five seconds.
PULL_TIMEOUT_MARGIN_S: Final = 15.0
MAY_SUSPEND, HAS_SUBSCRIPTION = 2, 4  # bits of a pull's sysFlag
DEFAULT_MAX_RECONSUME_TIMES: Final = 16
FIRST_RETRY_DELAY_LEVEL: Final = 3
DEAD_LETTER_DELAY_LEVEL: Final = -1  # sends a message to the dead letters at once
# The delays of RocketMQ's levels, if a broker is not configured otherwise; the first is level 1.
DELAY_LEVELS_S: Final = (1, 5, 10, 30, *range(60, 601, 60), 1_200, 1_800, 3_600, 7_200)
_LOG_OFFSET_INDEX: Final = 28  # of the log offset in a stored record
PULL_BYTES_MAX: Final = 64 << 20  # of the decompressed messages of one pull, but for the last
# Messages may be stored while a broker reads, so a pull may continue behind the end it reports.
_OFFSET_MARGIN: Final = 1 << 20
_EMPTY_PULL_CODES: Final = frozenset(
    (
        ResponseCode.PULL_NOT_FOUND,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        ResponseCode.PULL_OFFSET_MOVED,
    )
)

Connect = Callable[[MessageQueue], Awaitable[ClientConnection]]  # to the broker of a queue


class PullResult(NamedTuple):
    """The result of one pull. All offsets are queue offsets."""

    messages: list[ReceivedMessage]  # empty if nothing matched the filter
    next_offset: int  # where to continue; also set if there were no messages
    min_offset: int  # of the oldest message in the queue
    max_offset: int  # of the next message that will be stored


class QueueClient:
    """Requests of one consumer group about one queue at a time.

    All methods raise TransportError if the broker does not respond, and RequestRefused if it
    responds with an error.
    """

    def __init__(self, connect: Connect, group: str, *, namespace: Namespace | None = None) -> None:
        self._connect = connect
        self.group = group
        self.namespace = namespace or Namespace()

    # --- messages --------------------------------------------------------------------------------

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        expression: FilterExpression,
        *,
        version: int = 0,
        max_messages: int = 32,
        hold_s: float = 0.0,
        free_bytes: Callable[[], int] = lambda: PULL_BYTES_MAX,
    ) -> PullResult:
        """Pull messages from a queue offset on.

        If there are none, the broker holds the request for up to `hold_s` seconds. `version` is
        that of the subscription in the consumer's heartbeat.

        `free_bytes` is called when the response has arrived. When the messages, decompressed, take
        as many bytes, the others are left out, and `next_offset` is that of the first of them.
        There may be no message at all.

        Raises BrokenResponse if the response cannot be true.
        """
        result = await self._pull(
            queue, offset, expression, version, max_messages, hold_s, free_bytes
        )
        if result is None and max_messages > 1:
            # The response begins with bytes that are no record. Only the first message is affected
            # for certain, so pull it alone.
            result = await self._pull(queue, offset, expression, version, 1, hold_s, free_bytes)
        if result is None:
            log.error("skipped unreadable message queue=%s offset=%d", queue, offset)
            return PullResult([], offset + 1, 0, 0)
        return result

    async def _pull(
        self,
        queue: MessageQueue,
        offset: int,
        expression: FilterExpression,
        version: int,
        max_messages: int,
        hold_s: float,
        free_bytes: Callable[[], int],
    ) -> PullResult | None:
        """Pull once. Return None if the response does not begin with a record."""
        fields = PullMessage(
            consumer_group=self.group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=offset,
            max_msg_nums=max_messages,
            sys_flag=HAS_SUBSCRIPTION | (MAY_SUSPEND if hold_s else 0),
            suspend_timeout_millis=int(hold_s * 1000),
            subscription=expression.expression,
            sub_version=version,
            expression_type=expression.expression_type,
        )
        connection = await self._connect(queue)
        reply = await connection.call(
            RequestCode.PULL_MESSAGE, fields, timeout_s=hold_s + PULL_TIMEOUT_MARGIN_S
        )
        if reply.code and reply.code not in _EMPTY_PULL_CODES:
            raise RequestRefused(reply.code, reply.remark)
        next_offset = reply.int_field("nextBeginOffset", offset)
        min_offset, max_offset = reply.int_field("minOffset", 0), reply.int_field("maxOffset", 0)
        if next_offset > max(offset, max_offset) + _OFFSET_MARGIN:
            raise BrokenResponse(
                f"{queue}: a pull at {offset} continues at {next_offset}, but the queue ends at "
                f"{max_offset}"
            )
        if reply.code != ResponseCode.SUCCESS:
            return PullResult([], next_offset, min_offset, max_offset)
        decoded = decode_messages(
            reply.body, queue.broker, offsets=range(offset, next_offset), bytes_max=free_bytes()
        )
        if decoded.stopped_at is not None:
            if decoded.stopped_at == offset and not decoded.is_full:
                return None
            next_offset = decoded.stopped_at
        messages = [
            self.with_original_topic(message)
            for message in decoded.messages
            if expression.matches_tag(message.tags)
        ]
        return PullResult(messages, next_offset, min_offset, max_offset)

    def with_original_topic(self, message: ReceivedMessage) -> ReceivedMessage:
        """Return the message with the topic it was sent to, without retry topic and namespace."""
        topic = message.topic
        if topic.startswith(RETRY_PREFIX):
            topic = message.properties.get(RETRY_TOPIC, topic)
        topic = self.namespace.unwrap(topic)
        return message if topic == message.topic else replace(message, topic=topic)

    async def send_back(
        self,
        message: ReceivedMessage,
        queue: MessageQueue,
        *,
        delay_level: int = 0,
        delay_ms: int | None = None,
        max_reconsume_times: int = DEFAULT_MAX_RECONSUME_TIMES,
        report: FailureReport = NO_REPORT,
        now_ms: int = 0,
    ) -> None:
        """Send a message that could not be processed back to its broker.

        The broker delivers it again through the group's retry topic, after a delay that grows
        with each time (`delay_level` 0) or is given, and moves it to the dead letters after
        `max_reconsume_times`, or at once with DEAD_LETTER_DELAY_LEVEL. Apache
        RocketMQ does not know `delay_ms` and uses the delay level. The message that is stored
        has the failure of the `report`. An Apache RocketMQ broker would lose it, so there a message
        that becomes a dead letter is sent as a copy that has it; `now_ms` is the time of the copy.
        """
        fields = ConsumerSendMessageBack(
            offset=message.log_offset,
            group=self.group,
            delay_level=delay_level,
            origin_msg_id=message.message_id,
            origin_topic=self.namespace.wrap(message.topic),
            max_reconsume_times=max_reconsume_times,
            broker_name=queue.broker,
            error_type=report.error_type or None,
            error_text=report.error_text or None,
            consumer_host=report.host or None,
            attempts=report.attempts or None,
            delay_ms=delay_ms,
        )
        connection = await self._connect(queue)
        copy = self._retry_copy_header(
            message, queue, delay_level, max_reconsume_times, report, now_ms
        )
        is_last = delay_level < 0 or message.reconsume_times >= max_reconsume_times
        if is_last and report.has_cause and not await is_escrowmq(connection):
            try:
                await connection.call_checked(
                    RequestCode.SEND_MESSAGE_V2, copy, message.body, timeout_s=RESPONSE_TIMEOUT_S
                )
            except RequestRefused as error:
                log.warning(
                    "dead letter is stored without its cause, because the broker refused a copy "
                    "message=%s: %s",
                    message.message_id,
                    error,
                )
            else:
                return
        try:
            await connection.call_checked(
                RequestCode.CONSUMER_SEND_MSG_BACK, fields, timeout_s=RESPONSE_TIMEOUT_S
            )
        except RequestRefused as error:
            # The broker refers to the stored message, which may have expired. The consumer still
            # has the message, so it sends a copy to the retry topic instead.
            log.info("sending a copy to the retry topic message=%s: %s", message.message_id, error)
            await connection.call_checked(
                RequestCode.SEND_MESSAGE_V2, copy, message.body, timeout_s=RESPONSE_TIMEOUT_S
            )

    def _retry_copy_header(
        self,
        message: ReceivedMessage,
        queue: MessageQueue,
        delay_level: int,
        max_reconsume_times: int,
        report: FailureReport,
        now_ms: int,
    ) -> SendMessageV2:
        is_dead = delay_level < 0
        if delay_level <= 0:
            delay_level = FIRST_RETRY_DELAY_LEVEL + message.reconsume_times
        failure = client_properties(report, now_ms=now_ms) if report != NO_REPORT else {}
        properties = {
            **without_failure(message.properties),
            **failure,
            RETRY_TOPIC: self.namespace.wrap(message.topic),
            ORIGIN_MESSAGE_ID: message.properties.get(ORIGIN_MESSAGE_ID, message.offset_id),
            names.DELAY_LEVEL: str(delay_level),
        }
        # A committed message still has its transactional property. With it, the copy would
        # become a half message.
        properties.pop(names.TRANSACTIONAL, None)
        return SendMessageV2(
            producer_group=self.group,
            topic=retry_topic(self.group),
            default_topic=TEMPLATE_TOPIC,
            default_topic_queue_nums=1,
            queue_id=0,
            born_timestamp=message.born_ms,
            flag=message.flag,
            properties=encode_properties(properties).decode(),
            # Above the limit, the broker moves the message to the dead letters.
            reconsume_times=(max_reconsume_times if is_dead else message.reconsume_times) + 1,
            max_reconsume_times=max_reconsume_times,
            broker_name=queue.broker,
        )

    # --- offsets ---------------------------------------------------------------------------------

    async def committed(
        self, queue: MessageQueue, *, zero_if_not_found: bool = False
    ) -> int | None:
        """Return the offset that the group committed; None if it never did.

        With `zero_if_not_found` the broker returns 0 instead of None, if the queue still has all
        its messages.
        """
        fields = QueryConsumerOffset(
            consumer_group=self.group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            set_zero_if_not_found=zero_if_not_found,
        )
        connection = await self._connect(queue)
        reply = await connection.call(
            RequestCode.QUERY_CONSUMER_OFFSET, fields, timeout_s=RESPONSE_TIMEOUT_S
        )
        if reply.code == ResponseCode.QUERY_NOT_FOUND:
            return None
        if reply.code:
            raise RequestRefused(reply.code, reply.remark)
        offset = reply.int_field("offset", minimum=-1)
        return offset if offset >= 0 else None

    async def commit(self, queue: MessageQueue, offset: int) -> None:
        """Commit the offset of the next message to read."""
        fields = UpdateConsumerOffset(
            consumer_group=self.group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            commit_offset=offset,
        )
        connection = await self._connect(queue)
        await connection.call_checked(
            RequestCode.UPDATE_CONSUMER_OFFSET, fields, timeout_s=RESPONSE_TIMEOUT_S
        )

    async def earliest_offset(self, queue: MessageQueue) -> int:
        """Return the offset of the oldest message."""
        return await self._call_for_offset(RequestCode.GET_MIN_OFFSET, queue, _queue_header(queue))

    async def latest_offset(self, queue: MessageQueue) -> int:
        """Return the offset of the next message that will be stored."""
        return await self._call_for_offset(RequestCode.GET_MAX_OFFSET, queue, _queue_header(queue))

    async def offset_at_time(self, queue: MessageQueue, time_ms: int) -> int:
        """Return the offset of the first message stored at that time or later."""
        fields = SearchOffset(topic=queue.topic, queue_id=queue.queue_id, timestamp=time_ms)
        return await self._call_for_offset(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, queue, fields)

    async def _call_for_offset(self, code: RequestCode, queue: MessageQueue, fields: Any) -> int:
        connection = await self._connect(queue)
        reply = await connection.call_checked(code, fields, timeout_s=RESPONSE_TIMEOUT_S)
        return reply.int_field("offset")


def delay_level_for(delay_s: float) -> int:
    """Return the first level whose delay is not shorter, or the longest one."""
    level = bisect_left(DELAY_LEVELS_S, delay_s) + 1
    return min(level, len(DELAY_LEVELS_S))


def _queue_header(queue: MessageQueue) -> QueueHeader:
    return QueueHeader(topic=queue.topic, queue_id=queue.queue_id)


class DecodedMessages(NamedTuple):
    """The messages in the body of a pull response."""

    messages: list[ReceivedMessage]
    # The queue offset of the first message that was not decoded; None if all were.
    stopped_at: int | None = None
    is_full: bool = False  # the others were left out because of the limit of bytes


def decode_messages(
    body: Body, broker: str, *, offsets: range, bytes_max: int = PULL_BYTES_MAX
) -> DecodedMessages:
    """Decode the records in the body of a pull response.

    A record that cannot be read is logged and skipped, so that it does not block its queue; so is
    one whose queue offset is not among `offsets` or not behind the one before it. If its size is
    impossible too, the records behind it cannot be found, and decoding stops. It also stops when
    the messages take `bytes_max` bytes, so that a few compressed ones cannot fill the memory.
    """
    messages: list[ReceivedMessage] = []
    view, position, message_bytes = memoryview(body), 0, 0
    next_offset = offsets.start
    while position < len(view):
        if message_bytes >= bytes_max:
            return DecodedMessages(messages, next_offset, is_full=True)
        size = int.from_bytes(view[position : position + 4], "big")
        if not RECORD_BYTES_MIN <= size <= len(view) - position:
            log.error("unreadable response broker=%s: a record of %d bytes", broker, size)
            return DecodedMessages(messages, next_offset)
        index = position + _LOG_OFFSET_INDEX
        log_offset = LogOffset(int.from_bytes(view[index : index + 8], "big"))
        try:
            record = decode_record(view, position, log_offset)
            if not next_offset <= record.queue_offset < offsets.stop:
                raise CorruptRecord(
                    log_offset, f"its queue offset {record.queue_offset} was not asked for"
                )
            next_offset = record.queue_offset + 1
            message = to_received_message(record, broker)
        except (CorruptRecord, BrokenBody) as error:
            log.error("skipped unreadable message broker=%s: %s", broker, error)
        else:
            message_bytes += retained_bytes(message)
            messages.append(message)
        position += size
    return DecodedMessages(messages)
