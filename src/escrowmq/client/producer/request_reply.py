"""Ask by a message and be answered by one, as RocketMQ's clients do it.

    producer.request   a message with CORRELATION_ID, REPLY_TO_CLIENT and TTL, stored like any other
    consumer.reply     SEND_REPLY_MESSAGE_V2 to the broker that it came from, which knows who asked
    the broker         PUSH_REPLY_MESSAGE_TO_CLIENT to the client that waits

A reply is for one process, and for as long as it waits: it is pushed once, and not again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from escrowmq.client.connection import ClientConnection
from escrowmq.client.consumer.queue_client import RESPONSE_TIMEOUT_S
from escrowmq.client.messages import BODY_BYTES_MAX, MessageQueue, ReceivedMessage, SendResult
from escrowmq.errors import LocalProtocolError, OutcomeUnknown, RemoteProtocolError
from escrowmq.message import names
from escrowmq.message.compression import decompress_body
from escrowmq.message.names import (
    CLUSTER,
    CORRELATION_ID,
    MESSAGE_TYPE,
    REPLY_TO,
    TEMPLATE_TOPIC,
    TTL_MS,
    reply_topic,
)
from escrowmq.message.properties import decode_properties, encode_properties
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import PushReplyMessage, SendMessageV2
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import encode_success

log = logging.getLogger(__name__)

DEFAULT_TTL_MS: Final = "3000"
DEFAULT_CLUSTER: Final = "DefaultCluster"

SendWithProperties = Callable[[dict[str, str]], Awaitable[SendResult]]  # with these properties more


class PendingReplies:
    """The side that asks: who waits for what."""

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id  # as the brokers know it from its heartbeats
        self._pending: dict[str, asyncio.Future[ReceivedMessage]] = {}

    async def request(self, send: SendWithProperties, timeout_s: float) -> ReceivedMessage:
        """Raises OutcomeUnknown if no reply came in time, and what sending raises."""
        correlation_id = secrets.token_hex(16)
        marks = {
            CORRELATION_ID: correlation_id,
            REPLY_TO: self._client_id,
            TTL_MS: str(max(1, int(timeout_s * 1000))),
        }
        replied: asyncio.Future[ReceivedMessage] = asyncio.get_running_loop().create_future()
        self._pending[correlation_id] = replied
        try:
            async with asyncio.timeout(timeout_s):
                await send(marks)
                return await replied
        except TimeoutError as error:
            raise OutcomeUnknown(
                f"no reply in {timeout_s:g} s: a consumer of the topic must call reply(), in time"
            ) from error
        finally:
            del self._pending[correlation_id]

    def on_reply(self, connection: ClientConnection, request: Request[PushReplyMessage]) -> None:
        connection.write(encode_success(request))
        try:
            message = _parse_reply(request.head.fields, bytes(request.body))
        except RemoteProtocolError as error:
            log.warning("a reply cannot be read address=%s: %s", connection.address, error)
            return
        replied = self._pending.get(message.properties.get(CORRELATION_ID, ""))
        if replied is None or replied.done():
            log.info("a reply that nobody waits for any more id=%s", message.message_id)
            return
        replied.set_result(message)


def _parse_reply(fields: PushReplyMessage, body: bytes) -> ReceivedMessage:
    properties = decode_properties(fields.properties.encode())
    return ReceivedMessage(
        topic=fields.topic,
        body=decompress_body(body, fields.sys_flag, body_bytes_max=BODY_BYTES_MAX),
        keys=properties.get(names.KEYS, ""),
        tags=properties.get(names.TAGS, ""),
        properties=properties,
        message_id=properties.get(names.UNIQUE_KEY, ""),
        offset_id="",
        queue_id=fields.queue_id,
        queue_offset=-1,  # pushed, not read from a queue
        born_ms=fields.born_timestamp,
        stored_ms=fields.store_timestamp,
        reconsume_times=fields.reconsume_times,
        flag=fields.flag,
        log_offset=-1,
    )


async def send_reply(
    message: ReceivedMessage,
    body: bytes,
    properties: Mapping[str, str],
    *,
    connection: ClientConnection,
    queue: MessageQueue,
    group: str,
    now_ms: int,
) -> None:
    """To the broker that `queue` is on. Raises TransportError or RequestRefused."""
    asked = message.properties
    if CORRELATION_ID not in asked or REPLY_TO not in asked:
        raise LocalProtocolError(
            f"message {message.message_id} is no request: it was not sent by producer.request"
        )
    marks = {
        MESSAGE_TYPE: "reply",
        CORRELATION_ID: asked[CORRELATION_ID],
        REPLY_TO: asked[REPLY_TO],
        TTL_MS: asked.get(TTL_MS) or DEFAULT_TTL_MS,
        names.UNIQUE_KEY: secrets.token_hex(16).upper(),
        names.WAIT_STORE_OK: "true",
    }
    header = SendMessageV2(
        producer_group=group,
        topic=reply_topic(asked.get(CLUSTER, DEFAULT_CLUSTER)),
        default_topic=TEMPLATE_TOPIC,
        default_topic_queue_nums=1,
        queue_id=0,
        born_timestamp=now_ms,
        properties=encode_properties({**properties, **marks}).decode(),
        broker_name=queue.broker,
    )
    await connection.call_checked(
        RequestCode.SEND_REPLY_MESSAGE_V2, header, body, timeout_s=RESPONSE_TIMEOUT_S
    )
