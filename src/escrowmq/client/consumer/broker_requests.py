"""Requests that a broker sends to a consumer, most of them for an operator.

NOTIFY_CONSUMER_IDS_CHANGED       a member joined or left: rebalance
RESET_CONSUMER_CLIENT_OFFSET      continue at these offsets
GET_CONSUMER_STATUS_FROM_CLIENT   report the offsets
GET_CONSUMER_RUNNING_INFO         report subscriptions, queues and messages in flight
CONSUME_MESSAGE_DIRECTLY          process this message now
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

from escrowmq.client.callbacks import describe
from escrowmq.client.connection import ClientConnection
from escrowmq.client.consumer.handlers import HandlerRegistry
from escrowmq.client.consumer.queue_client import decode_messages
from escrowmq.client.consumer.rebalance import Rebalancer
from escrowmq.client.messages import MessageQueue
from escrowmq.errors import RequestRefused
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.connection import INT64_MAX
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import encode_error, encode_response

log = logging.getLogger(__name__)

# RocketMQ writes maps whose keys are queues: {"offsetTable":{{"topic":...}:12}}.
_QUEUE_KEYED_ENTRY = re.compile(r"(\{[^{}]*\})\s*:\s*(-?\d+)")

REQUESTS_MAX: Final = 32  # that are handled at a time

BrokerRequestFunction = Callable[[Rebalancer, Any, bytes], Awaitable[bytes]]


class BrokerRequests:
    """Responds to the requests of brokers.

    `rebalancer` is set once it exists; requests that arrive before are ignored. `handlers` is
    None for consumers without handlers, which refuse CONSUME_MESSAGE_DIRECTLY.
    """

    def __init__(self, handlers: HandlerRegistry | None = None) -> None:
        self.rebalancer: Rebalancer | None = None
        self._handlers = handlers
        self._tasks: set[asyncio.Task[None]] = set()
        self._functions: dict[int, BrokerRequestFunction] = {
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET: _reset_offsets,
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: _consumer_status,
            RequestCode.GET_CONSUMER_RUNNING_INFO: _running_info,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self._consume_directly,
        }

    def on_request(self, connection: ClientConnection, request: Request[Any]) -> None:
        """Start to handle a request. The response follows when it is done."""
        rebalancer = self.rebalancer
        if rebalancer is None:
            return
        if request.head.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED:
            rebalancer.rebalance_requested.set()
        elif len(self._tasks) >= REQUESTS_MAX:
            busy = RequestRefused(ResponseCode.SYSTEM_BUSY, "this consumer handles other requests")
            connection.write(encode_error(request, busy))
        elif request.head.code in self._functions:
            body = bytes(request.body)  # a copy: a view would keep the received chunk alive
            task = asyncio.create_task(self._respond(rebalancer, connection, request, body))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _respond(
        self,
        rebalancer: Rebalancer,
        connection: ClientConnection,
        request: Request[Any],
        body: bytes,
    ) -> None:
        fields = request.head.fields
        try:
            group = getattr(fields, "consumer_group", None) or fields.group
            if group != rebalancer.group:
                raise RequestRefused(
                    ResponseCode.SYSTEM_ERROR, f"this client is not in group {group}"
                )
            response_body = await self._functions[request.head.code](rebalancer, fields, body)
        except RequestRefused as error:
            connection.write(encode_error(request, error))
        except Exception as error:
            log.exception("request of a broker failed code=%d", request.head.code)
            connection.write(
                encode_response(request, code=ResponseCode.SYSTEM_ERROR, remark=describe(error))
            )
        else:
            connection.write(encode_response(request, body=response_body))

    async def _consume_directly(self, rebalancer: Rebalancer, fields: Any, body: bytes) -> bytes:
        """Run the handler for one message that an operator chose. No offset moves."""
        if self._handlers is None or not self._handlers.topics:
            raise RequestRefused(ResponseCode.SYSTEM_ERROR, "this consumer has no handlers")
        messages = decode_messages(
            body, fields.broker_name or "", offsets=range(INT64_MAX), bytes_max=1
        ).messages
        if not messages:
            raise RequestRefused(ResponseCode.SYSTEM_ERROR, "the message cannot be read")
        started_s = asyncio.get_running_loop().time()
        result: dict[str, object] = {
            "order": rebalancer.settings.orderly,
            "autoCommit": True,
            "consumeResult": "CR_SUCCESS",
        }
        try:
            await self._handlers.call(rebalancer.queue_client.with_original_topic(messages[0]))
        except Exception as error:
            log.exception("handler failed id=%s", messages[0].message_id)
            result |= {"consumeResult": "CR_THROW_EXCEPTION", "remark": describe(error)}
        spent_ms = int((asyncio.get_running_loop().time() - started_s) * 1000)
        return json.dumps({**result, "spentTimeMills": spent_ms}).encode()


async def _reset_offsets(rebalancer: Rebalancer, fields: Any, body: bytes) -> bytes:
    offsets = decode_queue_offsets(body)
    for queue, fetcher in list(rebalancer.fetchers.items()):
        offset = offsets.get(queue)
        if offset is not None and queue.topic == fields.topic:
            log.info("offset reset by the broker queue=%s offset=%d", queue, offset)
            await fetcher.seek(offset)
            await fetcher.commit()
    return b""


async def _consumer_status(rebalancer: Rebalancer, fields: Any, body: bytes) -> bytes:
    rows = [
        (queue, str(fetcher.commit_offset))
        for queue, fetcher in rebalancer.fetchers.items()
        if fetcher.commit_offset is not None and fields.topic in ("", queue.topic)
    ]
    return b'{"consumerTable":{},"messageQueueTable":%b}' % encode_queue_map(rows)


async def _running_info(rebalancer: Rebalancer, fields: Any, body: bytes) -> bytes:
    consumer = rebalancer.consumer_entry()
    rows = []
    for queue, fetcher in rebalancer.fetchers.items():
        message_count, message_bytes = fetcher.in_flight_totals
        state = {
            "commitOffset": fetcher.commit_offset or 0,
            "cachedMsgCount": message_count,
            "cachedMsgSizeInMiB": message_bytes >> 20,
            "locked": rebalancer.settings.orderly,
            "droped": False,  # RocketMQ's spelling
        }
        rows.append((queue, json.dumps(state)))
    properties = {
        "PROP_CONSUME_TYPE": str(consumer.consume_type),
        "PROP_CONSUMEORDERLY": str(rebalancer.settings.orderly).lower(),
        "PROP_CLIENT_VERSION": "V5_3_3",
        "PROP_CONSUMER_START_TIMESTAMP": str(rebalancer.started_ms),
    }
    subscriptions = [
        {
            "topic": entry.topic,
            "subString": entry.sub_string,
            "tagsSet": entry.tags_set,
            "codeSet": entry.code_set,
            "subVersion": entry.sub_version,
            "expressionType": entry.expression_type,
        }
        for entry in consumer.subscription_data_set
    ]
    return b'{"properties":%b,"subscriptionSet":%b,"statusTable":{},"mqTable":%b}' % (
        json.dumps(properties).encode(),
        json.dumps(subscriptions).encode(),
        encode_queue_map(rows),
    )


def encode_queue_map(rows: list[tuple[MessageQueue, str]]) -> bytes:
    """Encode a map with queues as keys, as RocketMQ's tools read it. The result is not JSON."""
    entries = []
    for queue, value in rows:
        name = {"brokerName": queue.broker, "queueId": queue.queue_id, "topic": queue.topic}
        entries.append(f"{json.dumps(name)}:{value}")
    return ("{" + ",".join(entries) + "}").encode()


def decode_queue_offsets(body: bytes) -> dict[MessageQueue, int]:
    """Decode the offsets of a reset: a map with queues as keys, or the list that brokers send to
    C++ clients. Raises RequestRefused."""
    try:
        text = body.decode()
        rows = [
            (json.loads(name), int(offset)) for name, offset in _QUEUE_KEYED_ENTRY.findall(text)
        ]
        if not rows:
            table = json.loads(text)["offsetTable"]
            rows = [(row, int(row["offset"])) for row in table] if table else []
        if any(not 0 <= offset <= INT64_MAX for _, offset in rows):
            raise ValueError("an offset is negative or does not fit into 64 bits")
        return {
            MessageQueue(name["topic"], name["brokerName"], int(name["queueId"])): offset
            for name, offset in rows
        }
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RequestRefused(
            ResponseCode.SYSTEM_ERROR, f"the offsets cannot be read: {describe(error)}"
        ) from error
