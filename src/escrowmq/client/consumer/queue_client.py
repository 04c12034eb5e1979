"""What is asked of the broker of a queue: messages, offsets, and to take a message back.

Messages that could not be processed go back to their broker: it keeps them for a while, longer
each time, and puts them into the group's retry topic, or in the end among its dead letters.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple

from escrowmq.client.connection import Line
from escrowmq.client.filters import Filter
from escrowmq.client.messages import Queue, ReceivedMessage, received, unwrap, wrap
from escrowmq.client.routes import TEMPLATE
from escrowmq.errors import BrokenBody, CorruptRecord, RequestRefused
from escrowmq.message import names
from escrowmq.message.properties import encode_properties
from escrowmq.message.record import LogOffset, decode_record
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import (
    ConsumerSendMessageBack,
    PullMessage,
    QueryConsumerOffset,
    QueueOf,
    SearchOffset,
    SendMessageV2,
    UpdateConsumerOffset,
)
from escrowmq.remoting.requests import Body

log = logging.getLogger(__name__)

ANSWER_S: Final = 3.0
HELD_S: Final = 15.0  # RocketMQ looks at pulls that wait every five seconds, and not for long
RETRY_TOPIC: Final = "RETRY_TOPIC"  # the property that says where a message came from
MAY_SUSPEND, HAS_SUBSCRIPTION = 2, 4
_LOG_OFFSET_AT: Final = 28
_NOTHING: Final = frozenset(
    (
        ResponseCode.PULL_NOT_FOUND,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        ResponseCode.PULL_OFFSET_MOVED,
    )
)

LineTo = Callable[[str], Awaitable[Line]]


class Pulled(NamedTuple):
    """`next_offset` is where to go on, also if nothing that is wanted was there."""

    messages: list[ReceivedMessage]
    next_offset: int
    min_offset: int
    max_offset: int


class QueueCalls:
    """All of them raise TransportError or RequestRefused."""

    def __init__(self, line_to: LineTo, group: str, *, namespace: str = "") -> None:
        self._line_to = line_to
        self.group = group
        self.namespace = namespace

    async def pull(
        self,
        queue: Queue,
        offset: int,
        wanted: Filter,
        *,
        version: int = 0,
        most: int = 32,
        hold_s: float = 0.0,
    ) -> Pulled:
        fields = PullMessage(
            consumer_group=self.group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=offset,
            max_msg_nums=most,
            sys_flag=HAS_SUBSCRIPTION | (MAY_SUSPEND if hold_s else 0),
            suspend_timeout_millis=int(hold_s * 1000),
            subscription=wanted.text,
            sub_version=version,
            expression_type=wanted.kind,
        )
        line = await self._line_to(queue.address)
        reply = await line.call(RequestCode.PULL_MESSAGE, fields, timeout_s=hold_s + HELD_S)
        if reply.code and reply.code not in _NOTHING:
            raise RequestRefused(reply.code, reply.remark)
        told = reply.ext_fields
        messages = []
        if reply.code == ResponseCode.SUCCESS:
            found = decoded(reply.body, queue.broker)
            messages = [self.restored(each) for each in found if wanted.accepts(each.tags)]
        return Pulled(
            messages,
            int(told.get("nextBeginOffset", offset)),
            int(told.get("minOffset", 0)),
            int(told.get("maxOffset", 0)),
        )

    def restored(self, message: ReceivedMessage) -> ReceivedMessage:
        """As its user knows it: under the topic that it was sent to."""
        topic = message.topic
        if topic.startswith("%RETRY%"):
            topic = message.properties.get(RETRY_TOPIC, topic)
        topic = unwrap(self.namespace, topic)
        return message if topic == message.topic else replace(message, topic=topic)

    async def committed(self, queue: Queue, *, zero_if_young: bool = False) -> int | None:
        """Where the group goes on; None if it was never here.

        `zero_if_young`: then zero, if the queue still has all its messages.
        """
        fields = QueryConsumerOffset(
            consumer_group=self.group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            set_zero_if_not_found=zero_if_young,
        )
        line = await self._line_to(queue.address)
        reply = await line.call(RequestCode.QUERY_CONSUMER_OFFSET, fields, timeout_s=ANSWER_S)
        if reply.code == ResponseCode.QUERY_NOT_FOUND:
            return None
        if reply.code:
            raise RequestRefused(reply.code, reply.remark)
        offset = int(reply.ext_fields["offset"])
        return offset if offset >= 0 else None

    async def commit(self, queue: Queue, offset: int) -> None:
        fields = UpdateConsumerOffset(
            consumer_group=self.group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            commit_offset=offset,
        )
        line = await self._line_to(queue.address)
        await line.ask(RequestCode.UPDATE_CONSUMER_OFFSET, fields, timeout_s=ANSWER_S)

    async def earliest(self, queue: Queue) -> int:
        return await self._offset(RequestCode.GET_MIN_OFFSET, queue, _place(queue))

    async def latest(self, queue: Queue) -> int:
        """That of the next message to come."""
        return await self._offset(RequestCode.GET_MAX_OFFSET, queue, _place(queue))

    async def at(self, queue: Queue, time_ms: int) -> int:
        """The first that was stored then or later."""
        fields = SearchOffset(topic=queue.topic, queue_id=queue.queue_id, timestamp=time_ms)
        return await self._offset(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, queue, fields)

    async def _offset(self, code: RequestCode, queue: Queue, fields: Any) -> int:
        line = await self._line_to(queue.address)
        return int((await line.ask(code, fields, timeout_s=ANSWER_S)).ext_fields["offset"])


def _place(queue: Queue) -> QueueOf:
    return QueueOf(topic=queue.topic, queue_id=queue.queue_id)


def decoded(body: Body, broker: str) -> list[ReceivedMessage]:
    """One that cannot be read is reported and passed over: the others are not to wait for it."""
    found = []
    view, at = memoryview(body), 0
    while at < len(view):
        size = int.from_bytes(view[at : at + 4], "big")
        place = at + _LOG_OFFSET_AT
        log_offset = LogOffset(int.from_bytes(view[place : place + 8], "big"))
        try:
            found.append(received(decode_record(view, at, log_offset), broker))
        except (CorruptRecord, BrokenBody) as error:
            log.error("a message that cannot be read broker=%s: %s", broker, error)
            if size <= 0:
                break
        at += size
    return found


TIMES_MAX: Final = 16
FIRST_LEVEL: Final = 3
DEAD: Final = -1  # the delay level that means: to the dead letters, now
_ORIGIN_ID: Final = "ORIGIN_MESSAGE_ID"


async def send_back(
    message: ReceivedMessage,
    queue: Queue,
    *,
    line_to: LineTo,
    group: str,
    namespace: str = "",
    delay_level: int = 0,
    times_max: int = TIMES_MAX,
) -> None:
    """`delay_level`: 0 is longer each time. Raises TransportError or RequestRefused."""
    fields = ConsumerSendMessageBack(
        offset=message.log_offset,
        group=group,
        delay_level=delay_level,
        origin_msg_id=message.message_id,
        origin_topic=wrap(namespace, message.topic),
        max_reconsume_times=times_max,
        broker_name=queue.broker,
    )
    line = await line_to(queue.address)
    try:
        await line.ask(RequestCode.CONSUMER_SEND_MSG_BACK, fields, timeout_s=ANSWER_S)
    except RequestRefused as error:
        # The broker may have lost the original, which expires: the copy at hand does it too.
        log.info("sent again instead of back message=%s: %s", message.message_id, error)
        header = _copy(message, queue, group, namespace, delay_level, times_max)
        await line.ask(RequestCode.SEND_MESSAGE_V2, header, message.body, timeout_s=ANSWER_S)


def _copy(
    message: ReceivedMessage,
    queue: Queue,
    group: str,
    namespace: str,
    delay_level: int,
    times_max: int,
) -> SendMessageV2:
    times = times_max + 1 if delay_level == DEAD else message.reconsume_times + 1
    level = delay_level if delay_level > 0 else FIRST_LEVEL + message.reconsume_times
    properties = {
        **message.properties,
        RETRY_TOPIC: wrap(namespace, message.topic),
        _ORIGIN_ID: message.properties.get(_ORIGIN_ID, message.offset_id),
        names.DELAY_LEVEL: str(level),
    }
    properties.pop(names.TRANSACTIONAL, None)  # it was decided long ago
    return SendMessageV2(
        producer_group=group,
        topic=f"%RETRY%{group}",
        default_topic=TEMPLATE,
        default_topic_queue_nums=1,
        queue_id=0,
        born_timestamp=message.born_ms,
        flag=message.flag,
        properties=encode_properties(properties).decode(),
        reconsume_times=times,
        max_reconsume_times=times_max,
        broker_name=queue.broker,
    )
