"""One request to one queue, and what its answer says."""

from __future__ import annotations

from typing import Final

from escrowmq.client.line import Reply
from escrowmq.client.messages import Queue, SendResult, SendStatus
from escrowmq.client.packing import Packed
from escrowmq.client.routes import QUEUES_MADE, TEMPLATE
from escrowmq.errors import RequestRefused

_STATUSES: Final = {status.value: status for status in SendStatus}
_QUEUES_MADE: Final = str(QUEUES_MADE)


def send_fields(packed: Packed, queue: Queue, *, group: str, now_ms: int) -> dict[str, str]:
    """Of SEND_MESSAGE_V2 and SEND_BATCH_MESSAGE, by their short names (headers_send.py). Written
    out: this is on the path of every send."""
    return {
        "a": group,
        "b": packed.topic,
        "c": TEMPLATE,
        "d": _QUEUES_MADE,
        "e": str(queue.queue_id),
        "f": str(packed.sys_flag),
        "g": str(now_ms),
        "h": str(packed.flag),
        "i": packed.properties,
        "j": "0",
        "k": "false",
        "m": "true" if packed.batch else "false",
        "n": queue.broker,
    }


def result_of(reply: Reply, queue: Queue, message_id: str) -> SendResult:
    """Raises RequestRefused: it is not stored there."""
    status = _STATUSES.get(reply.code)
    if status is None:
        raise RequestRefused(reply.code, reply.remark or f"code {reply.code}")
    fields = reply.ext_fields
    queue_id = int(fields.get("queueId", queue.queue_id))
    return SendResult(
        status,
        message_id,
        fields.get("msgId", ""),
        queue if queue_id == queue.queue_id else queue._replace(queue_id=queue_id),
        int(fields.get("queueOffset", -1)),
        fields.get("transactionId", ""),
    )
