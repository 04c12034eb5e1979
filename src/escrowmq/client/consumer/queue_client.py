"""What is asked of the broker of a queue: messages, offsets, and to take a message back.

Messages that could not be processed go back to their broker: it keeps them for a while, longer
each time, and puts them into the group's retry topic, or in the end among its dead letters.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple

from escrowmq.client.connection import ClientConnection
from escrowmq.client.messages import (
    MessageQueue,
    ReceivedMessage,
    to_received_message,
    unwrap,
    wrap,
)
from escrowmq.errors import BrokenBody, CorruptRecord, RequestRefused
from escrowmq.message import names
from escrowmq.message.filter import FilterExpression
from escrowmq.message.names import (
    ORIGIN_MESSAGE_ID,
    RETRY_PREFIX,
    RETRY_TOPIC,
    TEMPLATE_TOPIC,
    retry_topic,
)
from escrowmq.message.properties import encode_properties
from escrowmq.message.record import LogOffset, decode_record
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

RESPONSE_TIMEOUT_S: Final = 3.0
PULL_TIMEOUT_MARGIN_S: Final = (
    15.0  # RocketMQ looks at pulls that wait every five seconds, and not for long
)
MAY_SUSPEND, HAS_SUBSCRIPTION = 2, 4
_LOG_OFFSET_INDEX: Final = 28
_EMPTY_PULL_CODES: Final = frozenset(
    (
        ResponseCode.PULL_NOT_FOUND,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        ResponseCode.PULL_OFFSET_MOVED,
    )
)

Connect = Callable[[str], Awaitable[ClientConnection]]


class PullResult(NamedTuple):
    """`next_offset` is where to go on, also if nothing that is wanted was there."""

    messages: list[ReceivedMessage]
    next_offset: int
    min_offset: int
    max_offset: int


class QueueClient:
    """All of them raise TransportError or RequestRefused."""

    def __init__(self, connect: Connect, group: str, *, namespace: str = "") -> None:
        self._connect = connect
        self.group = group
        self.namespace = namespace

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        expression: FilterExpression,
        *,
        version: int = 0,
        max_messages: int = 32,
        hold_s: float = 0.0,
    ) -> PullResult:
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
        line = await self._connect(queue.address)
        reply = await line.call(
            RequestCode.PULL_MESSAGE, fields, timeout_s=hold_s + PULL_TIMEOUT_MARGIN_S
        )
        if reply.code and reply.code not in _EMPTY_PULL_CODES:
            raise RequestRefused(reply.code, reply.remark)
        told = reply.ext_fields
        messages = []
        if reply.code == ResponseCode.SUCCESS:
            found = decode_messages(reply.body, queue.broker)
            messages = [
                self.with_original_topic(each)
                for each in found
                if expression.matches_tag(each.tags)
            ]
        return PullResult(
            messages,
            int(told.get("nextBeginOffset", offset)),
            int(told.get("minOffset", 0)),
            int(told.get("maxOffset", 0)),
        )

    def with_original_topic(self, message: ReceivedMessage) -> ReceivedMessage:
        """As its user knows it: under the topic that it was sent to."""
        topic = message.topic
        if topic.startswith(RETRY_PREFIX):
            topic = message.properties.get(RETRY_TOPIC, topic)
        topic = unwrap(self.namespace, topic)
        return message if topic == message.topic else replace(message, topic=topic)

    async def committed(
        self, queue: MessageQueue, *, zero_if_not_found: bool = False
    ) -> int | None:
        """Where the group goes on; None if it was never here.

        `zero_if_young`: then zero, if the queue still has all its messages.
        """
        fields = QueryConsumerOffset(
            consumer_group=self.group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            set_zero_if_not_found=zero_if_not_found,
        )
        line = await self._connect(queue.address)
        reply = await line.call(
            RequestCode.QUERY_CONSUMER_OFFSET, fields, timeout_s=RESPONSE_TIMEOUT_S
        )
        if reply.code == ResponseCode.QUERY_NOT_FOUND:
            return None
        if reply.code:
            raise RequestRefused(reply.code, reply.remark)
        offset = int(reply.ext_fields["offset"])
        return offset if offset >= 0 else None

    async def commit(self, queue: MessageQueue, offset: int) -> None:
        fields = UpdateConsumerOffset(
            consumer_group=self.group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            commit_offset=offset,
        )
        line = await self._connect(queue.address)
        await line.call_checked(
            RequestCode.UPDATE_CONSUMER_OFFSET, fields, timeout_s=RESPONSE_TIMEOUT_S
        )

    async def earliest_offset(self, queue: MessageQueue) -> int:
        return await self._call_for_offset(RequestCode.GET_MIN_OFFSET, queue, _queue_header(queue))

    async def latest_offset(self, queue: MessageQueue) -> int:
        """That of the next message to come."""
        return await self._call_for_offset(RequestCode.GET_MAX_OFFSET, queue, _queue_header(queue))

    async def offset_at_time(self, queue: MessageQueue, time_ms: int) -> int:
        """The first that was stored then or later."""
        fields = SearchOffset(topic=queue.topic, queue_id=queue.queue_id, timestamp=time_ms)
        return await self._call_for_offset(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, queue, fields)

    async def _call_for_offset(self, code: RequestCode, queue: MessageQueue, fields: Any) -> int:
        line = await self._connect(queue.address)
        return int(
            (await line.call_checked(code, fields, timeout_s=RESPONSE_TIMEOUT_S)).ext_fields[
                "offset"
            ]
        )


def _queue_header(queue: MessageQueue) -> QueueHeader:
    return QueueHeader(topic=queue.topic, queue_id=queue.queue_id)


def decode_messages(body: Body, broker: str) -> list[ReceivedMessage]:
    """One that cannot be read is reported and passed over: the others are not to wait for it."""
    found = []
    view, at = memoryview(body), 0
    while at < len(view):
        size = int.from_bytes(view[at : at + 4], "big")
        place = at + _LOG_OFFSET_INDEX
        log_offset = LogOffset(int.from_bytes(view[place : place + 8], "big"))
        try:
            found.append(to_received_message(decode_record(view, at, log_offset), broker))
        except (CorruptRecord, BrokenBody) as error:
            log.error("a message that cannot be read broker=%s: %s", broker, error)
            if size <= 0:
                break
        at += size
    return found


DEFAULT_MAX_RECONSUME_TIMES: Final = 16
FIRST_RETRY_DELAY_LEVEL: Final = 3
DEAD_LETTER_DELAY_LEVEL: Final = -1  # the delay level that means: to the dead letters, now


async def send_back(
    message: ReceivedMessage,
    queue: MessageQueue,
    *,
    connect: Connect,
    group: str,
    namespace: str = "",
    delay_level: int = 0,
    max_reconsume_times: int = DEFAULT_MAX_RECONSUME_TIMES,
) -> None:
    """`delay_level`: 0 is longer each time. Raises TransportError or RequestRefused."""
    fields = ConsumerSendMessageBack(
        offset=message.log_offset,
        group=group,
        delay_level=delay_level,
        origin_msg_id=message.message_id,
        origin_topic=wrap(namespace, message.topic),
        max_reconsume_times=max_reconsume_times,
        broker_name=queue.broker,
    )
    line = await connect(queue.address)
    try:
        await line.call_checked(
            RequestCode.CONSUMER_SEND_MSG_BACK, fields, timeout_s=RESPONSE_TIMEOUT_S
        )
    except RequestRefused as error:
        # The broker may have lost the original, which expires: the copy at hand does it too.
        log.info("sent again instead of back message=%s: %s", message.message_id, error)
        header = _retry_copy_header(
            message, queue, group, namespace, delay_level, max_reconsume_times
        )
        await line.call_checked(
            RequestCode.SEND_MESSAGE_V2, header, message.body, timeout_s=RESPONSE_TIMEOUT_S
        )


def _retry_copy_header(
    message: ReceivedMessage,
    queue: MessageQueue,
    group: str,
    namespace: str,
    delay_level: int,
    max_reconsume_times: int,
) -> SendMessageV2:
    times = (
        max_reconsume_times + 1
        if delay_level == DEAD_LETTER_DELAY_LEVEL
        else message.reconsume_times + 1
    )
    level = delay_level if delay_level > 0 else FIRST_RETRY_DELAY_LEVEL + message.reconsume_times
    properties = {
        **message.properties,
        RETRY_TOPIC: wrap(namespace, message.topic),
        ORIGIN_MESSAGE_ID: message.properties.get(ORIGIN_MESSAGE_ID, message.offset_id),
        names.DELAY_LEVEL: str(level),
    }
    properties.pop(names.TRANSACTIONAL, None)  # it was decided long ago
    return SendMessageV2(
        producer_group=group,
        topic=retry_topic(group),
        default_topic=TEMPLATE_TOPIC,
        default_topic_queue_nums=1,
        queue_id=0,
        born_timestamp=message.born_ms,
        flag=message.flag,
        properties=encode_properties(properties).decode(),
        reconsume_times=times,
        max_reconsume_times=max_reconsume_times,
        broker_name=queue.broker,
    )
