"""A small blocking remoting client that checks ours independently.

    | length 4 | serializer 1, header length 3 | JSON header | body |

It shares no code with `escrowmq.remoting`: if the two read the same bytes differently, one of them
is wrong. One request is in flight at a time. Other frames that arrive in the meantime, such as a
check from the broker, are collected in `Client.pending_frames`.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

from tests.interop.records import Record, decode_records, encode_properties

HEADER_VERSION = 401  # RocketMQ 4.9.4, the first version that gets strict JSON from a name server
OLD_VERSION = 399  # RocketMQ 4.9.3
RESPONSE, ONE_WAY = 1, 2  # bits of `flag`

SUCCESS, SYSTEM_BUSY, PULL_NOT_FOUND, QUERY_NOT_FOUND = 0, 2, 19, 22
# Remarks with which Apache's broker refuses a request that waited too long in its queue. The broker
# stored nothing, and every real client retries.
FLOW_CONTROL_REMARKS = ("[TIMEOUT_CLEAN_QUEUE]", "[PCBUSY_CLEAN_QUEUE]")
FLOW_CONTROL_RETRIES, FLOW_CONTROL_PAUSE_S = 20, 0.25
COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0
PREPARED = 4  # sysFlag of a half message
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"


class Response(NamedTuple):
    """A response: its code, its remark, its header fields as text, and its body."""

    code: int
    remark: str
    ext_fields: dict[str, str]
    body: bytes


class ResponseError(Exception):
    """The peer responded with a code that the caller does not allow."""

    def __init__(self, request_code: int, response: Response) -> None:
        super().__init__(f"request {request_code} was answered {response.code}: {response.remark}")
        self.response = response


@dataclass(frozen=True, slots=True)
class SendResult:
    """Where the broker stored a message."""

    message_id: str  # the offset id: IP address, port and log offset in hexadecimal
    queue_id: int
    queue_offset: int
    transaction_id: str

    @property
    def log_offset(self) -> int:
        return int(self.message_id[-16:], 16)


class Client:
    """One connection to a name server or a broker."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 10.0,
        version: int = HEADER_VERSION,
        source_host: str = "",
    ) -> None:
        self.address = address
        self.version = version
        host, port = address.rsplit(":", 1)
        source = (source_host, 0) if source_host else None
        self.socket = socket.create_connection(
            (host, int(port)), timeout=timeout_s, source_address=source
        )
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as every client does
        self._opaque = 0
        self.pending_frames: list[tuple[dict[str, Any], bytes]] = []
        # The last request and its response, as they were on the wire.
        self.sent_frame = b""
        self.received_frame = b""

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    # Requests of any kind.

    def request(
        self, code: int, ext_fields: Mapping[str, object] | None = None, body: bytes = b""
    ) -> Response:
        """Send a request and return its response, whatever its code."""
        opaque = self.send_request(code, ext_fields, body, flag=0)
        while True:
            header, response_body = self.receive_frame()
            if header.get("flag", 0) & RESPONSE and header["opaque"] == opaque:
                fields = {
                    name: str(value) for name, value in (header.get("extFields") or {}).items()
                }
                return Response(header["code"], header.get("remark") or "", fields, response_body)
            self.pending_frames.append((header, response_body))

    def send_one_way(
        self, code: int, ext_fields: Mapping[str, object] | None = None, body: bytes = b""
    ) -> None:
        """Send a request to which the peer does not respond."""
        self.send_request(code, ext_fields, body, flag=ONE_WAY)

    def respond(self, request_header: Mapping[str, Any], *, code: int = SUCCESS) -> None:
        """Respond to a request of the broker without fields and body."""
        header = {"code": code, "opaque": request_header["opaque"], "flag": RESPONSE}
        encoded = json.dumps({**header, "language": "PYTHON", "version": self.version}).encode()
        self.socket.sendall(struct.pack(">II", 4 + len(encoded), len(encoded)) + encoded)

    def expect(
        self,
        code: int,
        ext_fields: Mapping[str, object] | None = None,
        body: bytes = b"",
        *,
        allowed: tuple[int, ...] = (SUCCESS,),
    ) -> Response:
        """Send a request and return its response. Raises ResponseError unless its code is allowed.

        Retries what the broker refused because its queue was full.
        """
        response = self.request(code, ext_fields, body)
        for _ in range(FLOW_CONTROL_RETRIES):
            if not _is_flow_control(response) or SYSTEM_BUSY in allowed:
                break
            time.sleep(FLOW_CONTROL_PAUSE_S)  # the client backs off, as real clients do
            response = self.request(code, ext_fields, body)
        if response.code not in allowed:
            raise ResponseError(code, response)
        return response

    def send_request(
        self, code: int, ext_fields: Mapping[str, object] | None, body: bytes, *, flag: int
    ) -> int:
        """Send a request without waiting for its response. Returns its opaque number."""
        self._opaque += 1
        header = {
            "code": code,
            "language": "PYTHON",
            "version": self.version,
            "opaque": self._opaque,
            "flag": flag,
            "extFields": {name: java_text(value) for name, value in (ext_fields or {}).items()},
        }
        encoded = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        length = 4 + len(encoded) + len(body)
        self.sent_frame = struct.pack(">II", length, len(encoded)) + encoded + body
        self.socket.sendall(self.sent_frame)
        return self._opaque

    def next_frame(self) -> tuple[dict[str, Any], bytes]:
        """Return header and body of the next frame: a response, or a request from the peer."""
        return self.pending_frames.pop(0) if self.pending_frames else self.receive_frame()

    def receive_frame(self) -> tuple[dict[str, Any], bytes]:
        """Read a frame from the socket, even if other frames are pending."""
        length_field = self._read(4)
        rest = self._read(int.from_bytes(length_field, "big"))
        self.received_frame = length_field + rest
        serializer, header_length = rest[0], int.from_bytes(rest[1:4], "big")
        if serializer != 0:
            raise ValueError(f"serializer {serializer} in the response to a JSON request")
        return loads(rest[4 : 4 + header_length].decode()), rest[4 + header_length :]

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = self.socket.recv(size - len(data))
            if not chunk:
                raise ConnectionError("the peer closed the connection")
            data += chunk
        return bytes(data)

    # Name server requests.

    def route(self, topic: str) -> dict[str, Any] | None:
        """Return the route of a topic, or None if the name server has none."""
        response = self.expect(105, {"topic": topic}, allowed=(SUCCESS, 17))
        return loads(response.body.decode()) if response.code == SUCCESS else None

    # Broker requests: topics and groups.

    def create_topic(self, topic: str, *, queues: int = 4, attributes: str = "") -> None:
        """Create a topic. Example of `attributes`: "+message.type=TRANSACTION"."""
        self.expect(
            17,
            {
                "topic": topic,
                "defaultTopic": "TBW102",
                "readQueueNums": queues,
                "writeQueueNums": queues,
                "perm": 6,
                "topicFilterType": "SINGLE_TAG",
                "topicSysFlag": 0,
                "order": False,
                **({"attributes": attributes} if attributes else {}),
            },
        )

    def create_group(self, group: str) -> None:
        self.expect(200, body=json.dumps({"groupName": group}).encode())

    def heartbeat(self, client_id: str, *, producer_groups: tuple[str, ...]) -> Response:
        groups = [{"groupName": group} for group in producer_groups]
        body = {"clientID": client_id, "producerDataSet": groups, "consumerDataSet": []}
        return self.expect(34, body=json.dumps(body).encode())

    # Broker requests: sending.

    def send(
        self,
        topic: str,
        body: bytes,
        properties: Mapping[str, str] | None = None,
        *,
        queue_id: int = 0,
        group: str = "interop-producers",
        sys_flag: int = 0,
        flag: int = 0,
        reconsume_times: int = 0,
        born_ms: int | None = None,
    ) -> SendResult:
        response = self.expect(
            310,
            {
                "a": group,
                "b": topic,
                "c": "TBW102",
                "d": 4,
                "e": queue_id,
                "f": sys_flag,
                "g": time.time_ns() // 1_000_000 if born_ms is None else born_ms,
                "h": flag,
                "i": encode_properties(properties or {}),
                "j": reconsume_times,
                "k": False,
                "m": False,
            },
            body,
        )
        fields = response.ext_fields
        return SendResult(
            message_id=fields["msgId"],
            queue_id=int(fields["queueId"]),
            queue_offset=int(fields["queueOffset"]),
            # RocketMQ 4 does not return it; its clients use their unique key, which is the same.
            transaction_id=fields.get("transactionId") or (properties or {}).get("UNIQ_KEY", ""),
        )

    def send_half(
        self,
        topic: str,
        body: bytes,
        properties: Mapping[str, str],
        *,
        queue_id: int = 0,
        group: str = "interop-producers",
        born_ms: int | None = None,
    ) -> SendResult:
        """Send a half message. `properties` must contain UNIQ_KEY, as every client sets it."""
        half_properties = {**properties, "TRAN_MSG": "true", "PGROUP": group}
        return self.send(
            *(topic, body, half_properties),
            queue_id=queue_id,
            group=group,
            sys_flag=PREPARED,
            born_ms=born_ms,
        )

    def end_transaction(
        self, half: SendResult, verdict: int, *, topic: str, group: str = "interop-producers"
    ) -> Response:
        """End a transaction. Times out for UNKNOWN at Apache, which does not respond to it."""
        return self.request(
            37,
            {
                "topic": topic,
                "producerGroup": group,
                "tranStateTableOffset": half.queue_offset,
                "commitLogOffset": half.log_offset,
                "commitOrRollback": verdict,
                "fromTransactionCheck": False,
                "msgId": half.transaction_id,
                "transactionId": half.transaction_id,
            },
        )

    # Broker requests: reading.

    def pull(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        *,
        group: str = "interop-consumers",
        subscription: str = "*",
        expression_type: str = "TAG",
        max_messages: int = 32,
    ) -> Response:
        """Pull once, without long polling. The request contains the subscription."""
        return self.request(
            11,
            {
                "consumerGroup": group,
                "topic": topic,
                "queueId": queue_id,
                "queueOffset": queue_offset,
                "maxMsgNums": max_messages,
                "sysFlag": 4,
                "commitOffset": 0,
                "suspendTimeoutMillis": 0,
                "subscription": subscription,
                "subVersion": 0,
                "expressionType": expression_type,
            },
        )

    def pull_all(self, topic: str, queue_id: int) -> list[Record]:
        """Return every message of a queue."""
        records: list[Record] = []
        queue_offset, end = self.min_offset(topic, queue_id), self.max_offset(topic, queue_id)
        while queue_offset < end:
            response = self.pull(topic, queue_id, queue_offset)
            if response.code != SUCCESS:
                raise ResponseError(11, response)
            records += decode_records(response.body)
            queue_offset = int(response.ext_fields["nextBeginOffset"])
        return records

    def query_by_key(
        self, topic: str, key: str, *, unique: bool = False, max_messages: int = 32
    ) -> list[Record]:
        """Return the messages with a key. `unique` searches by unique key instead."""
        fields: dict[str, object] = {
            "topic": topic,
            "key": key,
            "maxNum": max_messages,
            "beginTimestamp": 0,
            "endTimestamp": 2**63 - 1,
        }
        if unique:
            fields["_UNIQUE_KEY_QUERY"] = True
        response = self.expect(12, fields, allowed=(SUCCESS, QUERY_NOT_FOUND))
        return decode_records(response.body)

    def view_by_id(self, message_id: str) -> Record:
        """Return the message with this offset id."""
        response = self.expect(33, {"offset": int(message_id[-16:], 16)})
        [record] = decode_records(response.body)
        return record

    def max_offset(self, topic: str, queue_id: int) -> int:
        return self._offset(30, topic, queue_id)

    def min_offset(self, topic: str, queue_id: int) -> int:
        return self._offset(31, topic, queue_id)

    def search_offset(self, topic: str, queue_id: int, *, timestamp_ms: int) -> int:
        return self._offset(29, topic, queue_id, timestamp=timestamp_ms)

    def _offset(self, code: int, topic: str, queue_id: int, **fields: object) -> int:
        response = self.expect(code, {"topic": topic, "queueId": queue_id, **fields})
        return int(response.ext_fields["offset"])

    # Broker requests: committed offsets.

    def commit_offset(self, group: str, topic: str, queue_id: int, queue_offset: int) -> None:
        fields = {"consumerGroup": group, "topic": topic, "queueId": queue_id}
        self.expect(15, {**fields, "commitOffset": queue_offset})

    def committed_offset(self, group: str, topic: str, queue_id: int) -> int | None:
        """Return the queue offset that a group committed, or None."""
        fields = {"consumerGroup": group, "topic": topic, "queueId": queue_id}
        response = self.expect(14, fields, allowed=(SUCCESS, QUERY_NOT_FOUND))
        return int(response.ext_fields["offset"]) if response.code == SUCCESS else None


def _is_flow_control(response: Response) -> bool:
    return response.code == SYSTEM_BUSY and response.remark.startswith(FLOW_CONTROL_REMARKS)


# fastjson may write numeric keys without quotes: `{0:"127.0.0.1:10911"}`.

_STRING_OR_BARE_KEY = re.compile(r'"(?:\\.|[^"\\])*"|([{,]\s*)(-?\d+)(?=\s*:)')


def loads(text: str) -> dict[str, Any]:
    """Decode a JSON object, which may have numeric keys without quotes."""
    quoted = _STRING_OR_BARE_KEY.sub(
        lambda match: f'{match[1]}"{match[2]}"' if match[2] else match[0], text
    )
    decoded = json.loads(quoted)
    if not isinstance(decoded, dict):
        raise ValueError(f"expected a JSON object, got {quoted[:40]}")
    return decoded


def java_text(value: object) -> str:
    """Return a value as Java writes it in headers and property files: `true`, not `True`."""
    return str(value).lower() if isinstance(value, bool) else str(value)
