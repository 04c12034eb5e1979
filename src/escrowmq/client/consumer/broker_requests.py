"""What a broker asks of a consumer, mostly for an operator: what do you do, where are you, go on
from there, process this one now. And: somebody came or went, share out anew.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

from escrowmq.client.connection import Line
from escrowmq.client.consumer.handlers import Handlers
from escrowmq.client.consumer.queue_client import decoded
from escrowmq.client.consumer.rebalance import Member
from escrowmq.client.messages import Queue
from escrowmq.errors import RequestRefused
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import answer, refuse

log = logging.getLogger(__name__)

# RocketMQ writes maps whose keys are queues: {"offsetTable":{{"topic":…}:12}}.
_KEYED = re.compile(r"(\{[^{}]*\})\s*:\s*(-?\d+)")

Answer = Callable[[Member, Any, bytes], Awaitable[bytes]]


class Answering:
    """`handlers` is None for who asks for messages itself."""

    def __init__(self, handlers: Handlers | None = None) -> None:
        self.member: Member | None = None
        self._handlers = handlers
        self._running: set[asyncio.Task[None]] = set()
        self._answers: dict[int, Answer] = {
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET: _reset,
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: _positions,
            RequestCode.GET_CONSUMER_RUNNING_INFO: _running,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self._consume,
        }

    def asked(self, line: Line, request: Request[Any]) -> None:
        member = self.member
        if member is None:
            return
        if request.head.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED:
            member.changed.set()
        elif request.head.code in self._answers:
            body = bytes(request.body)  # the chunk that it is a view of is about to go
            task = asyncio.create_task(self._answer(member, line, request, body))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _answer(self, member: Member, line: Line, request: Request[Any], body: bytes) -> None:
        fields = request.head.fields
        try:
            group = getattr(fields, "consumer_group", None) or fields.group
            if group != member.group:
                raise RequestRefused(
                    ResponseCode.SYSTEM_ERROR, f"this client is not in group {group}"
                )
            found = await self._answers[request.head.code](member, fields, body)
        except RequestRefused as error:
            line.write(refuse(request, error))
        except Exception as error:
            log.exception("no answer to code=%d", request.head.code)
            line.write(answer(request, code=ResponseCode.SYSTEM_ERROR, remark=repr(error)))
        else:
            line.write(answer(request, body=found))

    async def _consume(self, member: Member, fields: Any, body: bytes) -> bytes:
        """An operator sends one message to this client alone; no offset moves."""
        if self._handlers is None or not self._handlers.topics:
            raise RequestRefused(ResponseCode.SYSTEM_ERROR, "this consumer has no handlers")
        messages = decoded(body, fields.broker_name or "")
        if not messages:
            raise RequestRefused(ResponseCode.SYSTEM_ERROR, "the message cannot be read")
        began_s = asyncio.get_running_loop().time()
        told = {"order": member.habits.orderly, "autoCommit": True, "consumeResult": "CR_SUCCESS"}
        try:
            await self._handlers.call(member.calls.restored(messages[0]))
        except Exception as error:
            log.exception("handler failed id=%s", messages[0].message_id)
            told |= {"consumeResult": "CR_THROW_EXCEPTION", "remark": repr(error)}
        spent_ms = int((asyncio.get_running_loop().time() - began_s) * 1000)
        return json.dumps({**told, "spentTimeMills": spent_ms}).encode()


async def _reset(member: Member, fields: Any, body: bytes) -> bytes:
    offsets = queue_offsets(body)
    for queue, pull in list(member.pulls.items()):
        offset = offsets.get(queue[:3])
        if offset is not None and queue.topic == fields.topic:
            log.info("reset queue=%s to %d", queue, offset)
            await pull.seek(offset)
            await pull.commit()
    return b""


async def _positions(member: Member, fields: Any, body: bytes) -> bytes:
    rows = [
        (queue, str(pull.position))
        for queue, pull in member.pulls.items()
        if pull.position is not None and fields.topic in ("", queue.topic)
    ]
    return b'{"consumerTable":{},"messageQueueTable":%b}' % keyed(rows)


async def _running(member: Member, fields: Any, body: bytes) -> bytes:
    entry = member.entry()
    rows = []
    for queue, pull in member.pulls.items():
        messages, size = pull.in_hand
        state = {
            "commitOffset": pull.position or 0,
            "cachedMsgCount": messages,
            "cachedMsgSizeInMiB": size >> 20,
            "locked": member.habits.orderly,
            "droped": False,
        }
        rows.append((queue, json.dumps(state)))
    properties = {
        "PROP_CONSUME_TYPE": str(entry.consume_type),
        "PROP_CONSUMEORDERLY": str(member.habits.orderly).lower(),
        "PROP_CLIENT_VERSION": "V5_3_3",
        "PROP_CONSUMER_START_TIMESTAMP": str(member.begun_ms),
    }
    subscriptions = [
        {
            "topic": each.topic,
            "subString": each.sub_string,
            "tagsSet": each.tags_set,
            "codeSet": each.code_set,
            "subVersion": each.sub_version,
            "expressionType": each.expression_type,
        }
        for each in entry.subscription_data_set
    ]
    return b'{"properties":%b,"subscriptionSet":%b,"statusTable":{},"mqTable":%b}' % (
        json.dumps(properties).encode(),
        json.dumps(subscriptions).encode(),
        keyed(rows),
    )


def keyed(rows: list[tuple[Queue, str]]) -> bytes:
    """A map whose keys are queues, as RocketMQ's tools read it. It is not JSON."""
    parts = []
    for queue, value in rows:
        name = {"brokerName": queue.broker, "queueId": queue.queue_id, "topic": queue.topic}
        parts.append(f"{json.dumps(name)}:{value}")
    return ("{" + ",".join(parts) + "}").encode()


def queue_offsets(body: bytes) -> dict[tuple[str, str, int], int]:
    """From such a map, or from the list that C++ clients are sent. Raises RequestRefused."""
    try:
        text = body.decode()
        rows = [(json.loads(name), int(offset)) for name, offset in _KEYED.findall(text)]
        if not rows:
            table = json.loads(text)["offsetTable"]
            rows = [(row, int(row["offset"])) for row in table] if table else []
        return {
            (name["topic"], name["brokerName"], int(name["queueId"])): offset
            for name, offset in rows
        }
    except (ValueError, KeyError, TypeError) as error:
        raise RequestRefused(
            ResponseCode.SYSTEM_ERROR, f"the offsets cannot be read: {error!r}"
        ) from error
