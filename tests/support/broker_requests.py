"""Requests for a broker, a channel that records its responses, and readers of its store."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from escrowmq.errors import LocalProtocolError
from escrowmq.message.keys import encode_host, encode_offset_id, encode_offset_ids
from escrowmq.message.properties import decode_properties
from escrowmq.message.record import StoredRecord
from escrowmq.peer import host_of
from escrowmq.remoting.codes import FLAG_ONEWAY, JSON, RequestCode, ResponseCode
from escrowmq.remoting.frame import FRAME_LENGTH_MAX
from escrowmq.remoting.headers import (
    Header,
    PullMessage,
    PullMessageResponse,
    SendMessage,
    SendMessageResponse,
    encode_header,
)
from escrowmq.remoting.requests import Body, Request, RequestHead
from escrowmq.store.store import MessageStore
from tests.interop.remoting import Response
from tests.support.stores import HOST

VERSION = 401

_opaques = itertools.count(1)


class FakeChannel:
    """Record the responses of a broker without encoding them; `tests/unit/remoting` tests encoders.

    Like a real connection it drops responses to one-way requests, refuses a body that is too large
    for a frame, and compares and hashes by identity.
    """

    def __init__(self, name: str = "127.0.0.1:40000") -> None:
        self.address = name
        address, _, port = name.rpartition(":")
        self.peer_host = encode_host(address, int(port)) if address else HOST
        self.origin = host_of(name)
        self.is_open = True
        self.can_send = True
        self.oneway_requests: list[tuple[int, Header, bytes]] = []
        self._responses: list[Response] = []

    def set_account(self, access_key: str) -> None:
        self.origin = f"account {access_key}"

    def respond(
        self,
        request: Request[Any],
        header: Header | None = None,
        *,
        code: int = ResponseCode.SUCCESS,
        remark: str = "",
        body: Body = b"",
    ) -> None:
        if request.head.flag & FLAG_ONEWAY:
            return
        if len(body) > FRAME_LENGTH_MAX:
            raise LocalProtocolError("a frame cannot hold the response")
        fields = {} if header is None else encode_header(header)
        self._responses.append(Response(code, remark, fields, bytes(body)))

    def respond_in_pieces(
        self, request: Request[Any], header: Header, body: Sequence[Body]
    ) -> None:
        self.respond(request, header, body=b"".join(body))

    def respond_send(
        self,
        request: Request[Any],
        log_offset: int,
        queue_id: int,
        queue_offset: int,
        code: int = ResponseCode.SUCCESS,
        transaction_id: str | None = None,
    ) -> None:
        header = SendMessageResponse(
            msg_id=encode_offset_id(HOST, log_offset),
            queue_id=queue_id,
            queue_offset=queue_offset,
            transaction_id=transaction_id,
        )
        self.respond(request, header, code=code)

    def respond_send_batch(
        self,
        request: Request[Any],
        log_offsets: Sequence[int],
        queue_id: int,
        queue_offset: int,
        code: int = ResponseCode.SUCCESS,
    ) -> None:
        ids = ",".join(encode_offset_ids(HOST, log_offsets))
        header = SendMessageResponse(msg_id=ids, queue_id=queue_id, queue_offset=queue_offset)
        self.respond(request, header, code=code)

    def respond_pull(
        self,
        request: Request[Any],
        *,
        next_offset: int,
        min_offset: int,
        max_offset: int,
        topic_sys_flag: int = 0,
        group_sys_flag: int = 0,
        code: int = ResponseCode.SUCCESS,
        remark: str = "",
        slices: Sequence[Body] = (),
    ) -> None:
        header = PullMessageResponse(
            suggest_which_broker_id=0,
            next_begin_offset=next_offset,
            min_offset=min_offset,
            max_offset=max_offset,
            topic_sys_flag=topic_sys_flag,
            group_sys_flag=group_sys_flag,
        )
        self.respond(request, header, code=code, remark=remark, body=b"".join(slices))

    def send_oneway(self, code: int, fields: Header, body: Body = b"") -> bool:
        if self.is_open:
            self.oneway_requests.append((code, fields, bytes(body)))
        return self.is_open

    def responses(self) -> list[Response]:
        """Return the responses since the last call."""
        responses, self._responses = self._responses, []
        return responses

    def response(self) -> Response:
        """Return the only response since the last call."""
        [response] = self.responses()
        return response


class CallableChannel(FakeChannel):
    """A client that receives requests. A test calls `on_response` with the response."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[int, Header, bytes, Any]] = []

    def call(
        self,
        code: int,
        fields: Header,
        body: Body,
        on_response: Any,
        *,
        requester: object,
        timeout_s: float,
    ) -> bool:
        self.calls.append((code, fields, bytes(body), on_response))
        return self.is_open


def new_request(
    code: int, fields: Header, body: bytes = b"", *, flag: int = 0, version: int = VERSION
) -> Request[Any]:
    """Return a request with an opaque number that no other request has."""
    head = RequestHead(code=code, opaque=next(_opaques), flag=flag, version=version, fields=fields)
    return Request(head, body, JSON)


def send_request(topic: str = "T", body: bytes = b"body", **changes: Any) -> Request[SendMessage]:
    """Return a SEND_MESSAGE request. `changes` are header fields, `one_way` and `version`."""
    flag = FLAG_ONEWAY if changes.pop("one_way", False) else 0
    version = changes.pop("version", VERSION)
    fields = {"producer_group": "p", "topic": topic, "default_topic": "TBW102", "queue_id": 0}
    header = SendMessage(**{**fields, **changes})
    return new_request(RequestCode.SEND_MESSAGE, header, body, flag=flag, version=version)


def pull_request(topic: str = "T", queue_offset: int = 0, **changes: Any) -> Request[PullMessage]:
    """Return a PULL_MESSAGE request that may be held. `changes` replaces header fields."""
    fields: dict[str, Any] = {
        "consumer_group": "g",
        "topic": topic,
        "queue_id": 0,
        "queue_offset": queue_offset,
        "max_msg_nums": 32,
        "sys_flag": 6,
        "suspend_timeout_millis": 1000,
        "subscription": "*",
        "expression_type": "TAG",
    }
    return new_request(RequestCode.PULL_MESSAGE, PullMessage(**{**fields, **changes}))


def stored_records(store: MessageStore, topic: str, queue_id: int = 0) -> list[StoredRecord]:
    """Return the records of one queue from the log."""
    return [
        record for record in store.records() if (record.topic, record.queue_id) == (topic, queue_id)
    ]


def bodies(store: MessageStore, topic: str, queue_id: int = 0) -> list[bytes]:
    return [bytes(record.body) for record in stored_records(store, topic, queue_id)]


def decoded_properties(record: StoredRecord) -> dict[str, str]:
    return decode_properties(record.properties)
