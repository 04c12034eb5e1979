"""A line that keeps what is written to it, and requests as a broker is handed them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from escrowmq.broker.metadata import TopicTableRules
from escrowmq.message.keys import encode_host
from escrowmq.message.properties import decode_properties
from escrowmq.message.record import StoredRecord
from escrowmq.remoting.codes import JSON, RequestCode
from escrowmq.remoting.headers import Header, PullMessage, SendMessage
from escrowmq.remoting.requests import Body, Request, RequestHead
from escrowmq.store.store import MessageStore
from tests.interop.remoting import Answer
from tests.support.stores import HOST

RULES = TopicTableRules(cluster="DefaultCluster", broker_name="broker-a")
VERSION = 401

_opaques = itertools.count(1)


class FakeLine:
    """Compares and hashes as itself, like a connection."""

    def __init__(self, name: str = "127.0.0.1:40000") -> None:
        self.address = name
        address, _, port = name.rpartition(":")
        self.peer_host = encode_host(address, int(port)) if address else HOST
        self.is_open = True
        self.posted: list[tuple[int, Header, bytes]] = []
        self._written = b""

    def write(self, data: bytes) -> None:
        self._written += data

    def write_pieces(self, pieces: Sequence[Body]) -> None:
        self._written += b"".join(pieces)

    def send_oneway(self, code: int, fields: Header, body: Body = b"") -> bool:
        if self.is_open:
            self.posted.append((code, fields, bytes(body)))
        return self.is_open

    def answers(self) -> list[Answer]:
        """Those since it was asked last."""
        found = []
        while self._written:
            size = int.from_bytes(self._written[:4], "big")
            frame, self._written = self._written[4 : 4 + size], self._written[4 + size :]
            length = int.from_bytes(frame[1:4], "big")
            header = json.loads(frame[4 : 4 + length])
            fields = header.get("extFields") or {}
            answer = Answer(header["code"], header.get("remark") or "", fields, frame[4 + length :])
            found.append(answer)
        return found

    def answer(self) -> Answer:
        [answer] = self.answers()
        return answer


def ask(
    code: int, fields: Header, body: bytes = b"", *, flag: int = 0, version: int = VERSION
) -> Request[Any]:
    head = RequestHead(code=code, opaque=next(_opaques), flag=flag, version=version, fields=fields)
    return Request(head, body, JSON)


def a_send(topic: str = "T", body: bytes = b"body", **changes: Any) -> Request[SendMessage]:
    flag, version = changes.pop("one_way", 0), changes.pop("version", VERSION)
    fields = {"producer_group": "p", "topic": topic, "default_topic": "TBW102", "queue_id": 0}
    header = SendMessage(**{**fields, **changes})
    return ask(RequestCode.SEND_MESSAGE, header, body, flag=flag, version=version)


def a_pull(topic: str = "T", queue_offset: int = 0, **changes: Any) -> Request[PullMessage]:
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
    return ask(RequestCode.PULL_MESSAGE, PullMessage(**{**fields, **changes}))


def stored(store: MessageStore, topic: str, queue_id: int = 0) -> list[StoredRecord]:
    return [
        record for record in store.records() if (record.topic, record.queue_id) == (topic, queue_id)
    ]


def bodies(store: MessageStore, topic: str, queue_id: int = 0) -> list[bytes]:
    return [bytes(record.body) for record in stored(store, topic, queue_id)]


def properties_of(record: StoredRecord) -> dict[str, str]:
    return decode_properties(record.properties)
