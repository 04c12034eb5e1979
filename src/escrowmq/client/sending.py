"""One message to one queue: the request, and what its answer says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from escrowmq.client.line import Reply
from escrowmq.client.messages import Message, Queue, SendResult, SendStatus
from escrowmq.client.routes import QUEUES_MADE, TEMPLATE
from escrowmq.errors import RequestRefused
from escrowmq.message.properties import encode_properties
from escrowmq.wire.codes import ResponseCode
from escrowmq.wire.headers_send import SendMessageV2

_STATUSES: Final = {status.value: status for status in SendStatus}

# Another broker, or the same one a little later, may take it.
RETRIED: Final = frozenset(
    (
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.NO_PERMISSION,
        ResponseCode.GO_AWAY,
    )
)


def send_header(
    message: Message,
    queue: Queue,
    properties: Mapping[str, str],
    *,
    group: str,
    now_ms: int,
    sys_flag: int = 0,
    batch: bool = False,
) -> SendMessageV2:
    return SendMessageV2(
        producer_group=group,
        topic=message.topic,
        default_topic=TEMPLATE,
        default_topic_queue_nums=QUEUES_MADE,
        queue_id=queue.queue_id,
        sys_flag=sys_flag,
        born_timestamp=now_ms,
        flag=message.flag,
        properties=encode_properties(properties).decode(),
        batch=batch,
        broker_name=queue.broker,
    )


def result_of(reply: Reply, queue: Queue, message_id: str) -> SendResult:
    """Raises RequestRefused: it is not stored there."""
    status = _STATUSES.get(reply.code)
    if status is None:
        raise RequestRefused(reply.code, reply.remark or f"code {reply.code}")
    fields = reply.ext_fields
    return SendResult(
        status=status,
        message_id=message_id,
        offset_id=fields.get("msgId", ""),
        queue=queue._replace(queue_id=int(fields.get("queueId", queue.queue_id))),
        queue_offset=int(fields.get("queueOffset", -1)),
        transaction_id=fields.get("transactionId", ""),
    )
