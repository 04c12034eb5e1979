"""Replies: the answer to a request message, pushed to the client that waits for it, then stored."""

from __future__ import annotations

from escrowmq.broker.line import Line
from escrowmq.broker.sends import Sends
from escrowmq.consume.groups import ProducerGroups
from escrowmq.errors import RequestRefused
from escrowmq.message.properties import decode_properties
from escrowmq.wire.answers import succeed
from escrowmq.wire.codes import RequestCode, ResponseCode
from escrowmq.wire.fastpath import Request
from escrowmq.wire.headers_send import PushReplyMessage, SendMessage

REPLY_TO = "REPLY_TO_CLIENT"


class Replies:
    def __init__(self, sends: Sends, producers: ProducerGroups, *, stores: bool) -> None:
        self._stores = stores
        self._sends = sends
        self._producers = producers

    def handle(self, line: Line, request: Request[SendMessage], now_ms: int) -> None:
        fields = request.head.fields
        client_id = decode_properties(fields.properties.encode()).get(REPLY_TO)
        if client_id is None:
            raise RequestRefused(
                ResponseCode.SYSTEM_ERROR, f"a reply without the property {REPLY_TO}"
            )
        waiting = self._producers.line_of(client_id)
        pushed = PushReplyMessage(
            producer_group=fields.producer_group,
            topic=fields.topic,
            default_topic=fields.default_topic,
            default_topic_queue_nums=fields.default_topic_queue_nums,
            queue_id=fields.queue_id,
            sys_flag=fields.sys_flag,
            born_timestamp=fields.born_timestamp,
            flag=fields.flag,
            properties=fields.properties,
            reconsume_times=fields.reconsume_times,
            unit_mode=fields.unit_mode,
            born_host=line.peer,
            store_host=line.peer,
            store_timestamp=now_ms,
        )
        if waiting is not None:
            waiting.post(  # type: ignore[attr-defined]  # consume/ does not know what a line is
                RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, pushed, bytes(request.body)
            )
        if self._stores:
            # So that it can be found; the replier is answered like any sender.
            self._sends.accept(line, request, now_ms)
        else:
            line.write(succeed(request))
