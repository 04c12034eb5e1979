"""Questions that only a consumer can answer: they are handed on to it, and its answer back."""

from __future__ import annotations

from typing import Any, Final, cast

from escrowmq.broker.line import AskableLine, Line
from escrowmq.consume.groups import ConsumerGroups
from escrowmq.errors import CorruptRecord, NoSuchRecord, RemoteProtocolError, RequestRefused
from escrowmq.message.ids import decode_offset_id
from escrowmq.store.store import MessageStore
from escrowmq.wire.answers import answer, refuse
from escrowmq.wire.codes import ResponseCode
from escrowmq.wire.command import Command
from escrowmq.wire.fastpath import Request
from escrowmq.wire.headers import Header
from escrowmq.wire.headers_consume import ConsumeDirectly, ConsumerRunning

WAIT_S: Final = 10.0  # as RocketMQ


class AdminRelay:
    def __init__(self, store: MessageStore, consumers: ConsumerGroups) -> None:
        self._store = store
        self._consumers = consumers

    def running_info(self, line: Line, request: Request[ConsumerRunning], now_ms: int) -> None:
        fields = request.head.fields
        self._hand_on(line, request, fields.consumer_group, fields.client_id, fields)

    def consume_directly(self, line: Line, request: Request[ConsumeDirectly], now_ms: int) -> None:
        fields = request.head.fields
        if not fields.client_id:
            raise RequestRefused(ResponseCode.INVALID_PARAMETER, "which client? clientId is empty")
        body = self._message(fields.msg_id or "")
        self._hand_on(line, request, fields.consumer_group, fields.client_id, fields, body)

    def _message(self, offset_id: str) -> bytes:
        try:
            record = self._store.record_at(decode_offset_id(offset_id)[1])
        except (RemoteProtocolError, NoSuchRecord, CorruptRecord) as error:
            raise RequestRefused(ResponseCode.QUERY_NOT_FOUND, str(error)) from error
        return bytes(self._store.bytes_of(record))

    def _hand_on(
        self,
        line: Line,
        request: Request[Any],
        group: str,
        client_id: str,
        fields: Header,
        body: bytes = b"",
    ) -> None:
        consumer = self._consumers.line_of(group, client_id)

        def answered(command: Command | None, body: bytes) -> None:
            if command is None:
                late = RequestRefused(
                    ResponseCode.CONSUME_MSG_TIMEOUT, f"{client_id} of {group} did not answer"
                )
                line.write(refuse(request, late))
            else:
                line.write(answer(request, code=command.code, remark=command.remark, body=body))

        code = request.head.code
        if consumer is None or not cast(AskableLine, consumer).ask(
            code, fields, body, answered, wait_s=WAIT_S
        ):
            raise RequestRefused(
                ResponseCode.SYSTEM_ERROR,
                f"client {client_id[:100]} of group {group[:100]} is not connected",
            )
