"""Request and reply over messages, in the form RocketMQ's clients use.

    producer.request   sends a message with CORRELATION_ID, REPLY_TO_CLIENT and TTL, and waits
    consumer.reply     sends SEND_REPLY_MESSAGE_V2 to the broker that the message came from
    broker             sends PUSH_REPLY_MESSAGE_TO_CLIENT to the client that waits

A reply goes to one process, and only while it waits. It is pushed once and not repeated.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from escrowmq.client.connection import RESPONSE_TIMEOUT_S, ClientConnection
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

# --- the producer's side -------------------------------------------------------------------------

SendWithProperties = Callable[[dict[str, str]], Awaitable[SendResult]]  # adds these properties


class PendingReplies:
    """The requests of one producer that wait for a reply.

    `client_id` is the one in the producer's heartbeats, by which the broker finds it.
    """

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id
        self._pending: dict[str, asyncio.Future[ReceivedMessage]] = {}  # by correlation id

    async def request(self, send: SendWithProperties, timeout_s: float) -> ReceivedMessage:
        """Send a request and wait for its reply.

        Raises OutcomeUnknown if none arrives within `timeout_s`, and what `send` raises.
        """
        correlation_id = secrets.token_hex(16)
        properties = {
            CORRELATION_ID: correlation_id,
            REPLY_TO: self._client_id,
            TTL_MS: str(max(1, int(timeout_s * 1000))),
        }
        reply: asyncio.Future[ReceivedMessage] = asyncio.get_running_loop().create_future()
        self._pending[correlation_id] = reply
        try:
            async with asyncio.timeout(timeout_s):
                await send(properties)
                return await reply
        except TimeoutError as error:
            raise OutcomeUnknown(
                f"no reply in {timeout_s:g} s: a consumer of the topic must call reply() in time"
            ) from error
        finally:
            del self._pending[correlation_id]

    def on_reply(self, connection: ClientConnection, request: Request[PushReplyMessage]) -> None:
        """Handle a reply that a broker pushes."""
        connection.write(encode_success(request))
        fields = request.head.fields
        properties = decode_properties(fields.properties.encode("utf-8", "replace"))
        # Only a reply that somebody waits for is decompressed.
        reply = self._pending.get(properties.get(CORRELATION_ID, ""))
        if reply is None or reply.done():
            log.info("ignored late reply id=%.100r", properties.get(names.UNIQUE_KEY, ""))
            return
        try:
            reply.set_result(_parse_reply(fields, properties, bytes(request.body)))
        except RemoteProtocolError as error:
            log.warning("ignored unreadable reply address=%s: %s", connection.address, error)


def _parse_reply(
    fields: PushReplyMessage, properties: Mapping[str, str], body: bytes
) -> ReceivedMessage:
    return ReceivedMessage(
        topic=fields.topic,
        body=decompress_body(body, fields.sys_flag, body_bytes_max=BODY_BYTES_MAX),
        keys=properties.get(names.KEYS, ""),
        tags=properties.get(names.TAGS, ""),
        properties=properties,
        message_id=properties.get(names.UNIQUE_KEY, ""),
        offset_id="",
        queue_id=fields.queue_id,
        queue_offset=-1,  # a pushed reply is not read from a queue
        born_ms=fields.born_timestamp,
        stored_ms=fields.store_timestamp,
        reconsume_times=fields.reconsume_times,
        flag=fields.flag,
        log_offset=-1,
    )


# --- the consumer's side -------------------------------------------------------------------------


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
    """Send a reply to `message` through the broker of `queue`.

    Raises LocalProtocolError if the message is no request, TransportError or RequestRefused.
    """
    request = message.properties
    if CORRELATION_ID not in request or REPLY_TO not in request:
        raise LocalProtocolError(
            f"message {message.message_id} is not a request; only messages sent with "
            "producer.request() can be replied to"
        )
    reply_properties = {
        MESSAGE_TYPE: "reply",
        CORRELATION_ID: request[CORRELATION_ID],
        REPLY_TO: request[REPLY_TO],
        TTL_MS: request.get(TTL_MS) or DEFAULT_TTL_MS,
        names.UNIQUE_KEY: secrets.token_hex(16).upper(),
        names.WAIT_STORE_OK: "true",
    }
    header = SendMessageV2(
        producer_group=group,
        topic=reply_topic(request.get(CLUSTER, DEFAULT_CLUSTER)),
        default_topic=TEMPLATE_TOPIC,
        default_topic_queue_nums=1,
        queue_id=0,
        born_timestamp=now_ms,
        properties=encode_properties({**properties, **reply_properties}).decode(),
        broker_name=queue.broker,
    )
    await connection.call_checked(
        RequestCode.SEND_REPLY_MESSAGE_V2, header, body, timeout_s=RESPONSE_TIMEOUT_S
    )
