"""Messages that could not be processed go back to their broker: it keeps them for a while, longer
each time, and puts them into the group's retry topic, or in the end among its dead letters."""

from __future__ import annotations

import logging
from typing import Final

from escrowmq.client.calls import ANSWER_S, RETRY_TOPIC, LineTo
from escrowmq.client.messages import Queue, ReceivedMessage
from escrowmq.client.namespace import wrap
from escrowmq.client.routes import TEMPLATE
from escrowmq.errors import RequestRefused
from escrowmq.message import names
from escrowmq.message.properties import encode_properties
from escrowmq.wire.codes import RequestCode
from escrowmq.wire.headers_send import ConsumerSendMessageBack, SendMessageV2

log = logging.getLogger(__name__)

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
