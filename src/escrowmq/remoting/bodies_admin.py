"""Bodies of administration requests, as RocketMQ's tools read them.

Java has some of its tables by queue, and fastjson writes such a table with objects as keys:

    {"offsetTable":{{"brokerName":"a","queueId":0,"topic":"orders"}:{"maxOffset":3},...}}

This is not JSON, but the tools of every release read it. `encode_queue_table` writes it,
`decode_queue_tables` reads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec
from msgspec import field

from escrowmq.errors import BrokenBody
from escrowmq.parsing import Int32, Int64, parse_lenient_json
from escrowmq.remoting.bodies import (
    JsonBody,
    QueueName,
    SubscriptionEntry,
    decode_body,
    encode_body,
)
from escrowmq.sliced_work import SlicedResult, run_to_end


class TopicOffset(JsonBody, frozen=True, kw_only=True):
    """The offsets of one queue, in the response to GET_TOPIC_STATS_INFO."""

    min_offset: Int64
    max_offset: Int64
    last_update_timestamp: Int64


class ConsumeOffset(JsonBody, frozen=True, kw_only=True):
    """The progress of a group in one queue, in the response to GET_CONSUME_STATS."""

    broker_offset: Int64
    consumer_offset: Int64
    pull_offset: Int64 = 0  # RocketMQ 4.9 has none
    last_timestamp: Int64  # when the last consumed message was stored


class ClientEntry(JsonBody, frozen=True, kw_only=True):
    client_id: str
    client_addr: str
    language: str
    version: Int32


class ProducerConnections(JsonBody, frozen=True, kw_only=True):
    connection_set: list[ClientEntry]


class ConsumerConnections(JsonBody, frozen=True, kw_only=True):
    connection_set: list[ClientEntry]
    subscription_table: dict[str, SubscriptionEntry]
    consume_type: str
    message_model: str
    consume_from_where: str


class ProducerInfo(JsonBody, frozen=True, kw_only=True):
    client_id: str
    remote_ip: str = field(name="remoteIP")
    language: str
    version: Int32
    last_update_timestamp: Int64


class GroupList(JsonBody, frozen=True, kw_only=True):
    group_list: list[str]


class GroupSubscription(JsonBody, frozen=True, kw_only=True):
    topic: str
    group: str
    subscription_data: SubscriptionEntry


class TimeSpan(JsonBody, frozen=True, kw_only=True):
    message_queue: QueueName
    min_time_stamp: Int64
    max_time_stamp: Int64
    consume_time_stamp: Int64
    delay_time: Int64


class Rate(JsonBody, frozen=True, kw_only=True):
    sum: Int64
    tps: float
    avgpt: float  # average per request


class Rates(JsonBody, frozen=True, kw_only=True):
    stats_minute: Rate
    stats_hour: Rate
    stats_day: Rate


class TimeSpans(JsonBody, frozen=True, kw_only=True):
    """The response to QUERY_CONSUME_TIME_SPAN."""

    consume_time_span_set: list[TimeSpan]


class QueueEntry(JsonBody, frozen=True, kw_only=True):
    physic_offset: Int64
    physic_size: Int32
    tags_code: Int64
    eval: bool = False  # whether the filter of the group passes it
    msg: str | None = None


class QueueEntries(JsonBody, frozen=True, kw_only=True):
    max_queue_index: Int64
    min_queue_index: Int64
    queue_data: list[QueueEntry]
    subscription_data: SubscriptionEntry | None = None
    filter_data: str | None = None


class CppQueueOffset(JsonBody, frozen=True, kw_only=True):
    topic: str
    broker_name: str
    queue_id: Int32
    offset: Int64


class CppResetOffsets(JsonBody, frozen=True, kw_only=True):
    """RESET_CONSUMER_CLIENT_OFFSET for C++ clients, which read a list instead of a table."""

    offset_table: list[CppQueueOffset]


class RuntimeTable(JsonBody, frozen=True, kw_only=True):
    """The response to GET_BROKER_RUNTIME_INFO."""

    table: dict[str, str]


Reserve = Callable[[int], None]  # counts bytes that are kept until the response is made


def _count_nothing(count: int) -> None:
    """Reserve bytes that need not be counted."""


def encode_queue_table(table: Mapping[QueueName, JsonBody | int], **others: object) -> bytes:
    """Return a body with an `offsetTable` whose keys are queues, and with the other fields."""
    return run_to_end(encode_queue_table_in_slices(table.items(), _count_nothing, **others))


def encode_queue_table_in_slices(
    rows: Iterable[tuple[QueueName, JsonBody | int]], reserve: Reserve, **others: object
) -> SlicedResult[bytes]:
    """Do the same in slices: a topic may have thousands of queues.

    The rows are taken one by one, so an iterator can compute them meanwhile. `reserve` is called
    with the bytes that are added, and may raise.
    """
    encoded = ((_encode(queue), _encode(value)) for queue, value in rows)
    return (yield from encode_table_in_slices("offsetTable", encoded, reserve, **others))


def encode_table_in_slices(
    name: str,
    table: Iterable[tuple[bytes, bytes]],
    reserve: Reserve = _count_nothing,
    **others: object,
) -> SlicedResult[bytes]:
    """Return a body with a table of encoded keys and values, and with the other fields."""
    encoded = bytearray(b'{"%b":{' % name.encode())
    separator = b""
    for key, value in table:
        row = b"%b%b:%b" % (separator, key, value)
        reserve(len(row))
        encoded += row
        separator = b","
        yield
    encoded += b"}"
    for other_name, other in others.items():
        encoded += b',"%b":%b' % (other_name.encode(), _encode(other))
    return bytes(encoded + b"}")


def encode_list_in_slices(
    body: JsonBody,
    name: str,
    items: Iterable[JsonBody | str],
    reserve: Reserve = _count_nothing,
) -> SlicedResult[bytes]:
    """Encode a body with items in its list `name`, which is empty in `body`.

    A list may have a hundred thousand items, so each is encoded by itself.
    """
    # Not a list of entries: to join and free a hundred thousand of them takes 20 ms, in one step.
    entries = bytearray()
    for item in items:
        entry = _encode(item)
        reserve(len(entry) + 1)
        if entries:
            entries += b","
        entries += entry
        yield
    # A text cannot contain the list: the quotes in it are escaped.
    before, empty, after = encode_body(body).partition(b'"%b":[]' % name.encode())
    assert empty, f"{type(body).__name__} has no empty list {name}"
    return b'%b"%b":[%b]%b' % (before, name.encode(), bytes(entries), after)


# A string is matched as a whole; an object that is followed by a colon is a key.
_STRING_OR_QUEUE: Final = re.compile(
    r"""
      (?P<key>\{(?:[^{}"]|"(?:[^"\\]|\\.)*+")*+\})(?=\s*+:)
    | "(?:[^"\\]|\\.)*+(?:"|\\?\Z)
    """,
    re.VERBOSE | re.DOTALL,
)


def decode_queue_tables(body: bytes) -> Any:
    """Return the decoded body. Raises BrokenBody.

    Keys that are queues become texts; `decode_queue_key` decodes them.
    """
    try:
        text = _STRING_OR_QUEUE.sub(_quote_queue, str(body, "utf-8"))
    except UnicodeDecodeError as error:
        raise BrokenBody(f"cannot decode a table by queue: {error}") from error
    return parse_lenient_json(text.encode())


def _quote_queue(match: re.Match[str]) -> str:
    key = match["key"]
    return match[0] if key is None else _encode(key).decode()


class OffsetTable(JsonBody, frozen=True, kw_only=True):
    """The response to INVOKE_BROKER_TO_RESET_OFFSET. The keys are queues."""

    offset_table: dict[str, Int64] = field(default_factory=dict)


def decode_offset_table(body: bytes) -> dict[str, int]:
    """Return the offsets of a response by their keys, which are queues. Raises BrokenBody."""
    try:
        return msgspec.convert(decode_queue_tables(body), OffsetTable, strict=False).offset_table
    except (msgspec.ValidationError, RecursionError) as error:
        raise BrokenBody(f"offsetTable: {error}") from error


def decode_queue_key(key: str) -> QueueName:
    return decode_body(QueueName, key.encode())


def encode_broker_consume_stats(
    groups: Iterable[tuple[str, list[bytes]]], *, address: str, total_diff: int
) -> bytes:
    """Return the response to GET_BROKER_CONSUME_STATS.

    Each group comes with one `encode_queue_table` for each of its topics.
    """
    entries = b",".join(
        b"{%b:[%b]}" % (_encode(name), b",".join(tables)) for name, tables in groups
    )
    return b'{"brokerAddr":%b,"consumeStatsList":[%b],"totalDiff":%d,"totalInflightDiff":0}' % (
        _encode(address),
        entries,
        total_diff,
    )


_encode = msgspec.json.Encoder().encode


# --- users and access rules, as RocketMQ 5's tools read them --------------------------------------

MASKED_PASSWORD: Final = "***"


class UserInfo(JsonBody, frozen=True, kw_only=True):
    username: str
    password: str = MASKED_PASSWORD  # RocketMQ sends the real one
    user_type: str  # Super, Normal
    user_status: str  # enable, disable


class PolicyEntryInfo(JsonBody, frozen=True, kw_only=True):
    resource: str  # Topic:name, Topic:prefix*, *
    actions: list[str]
    source_ips: list[str] | None = None
    decision: str  # Allow, Deny


class PolicyInfo(JsonBody, frozen=True, kw_only=True):
    policy_type: str  # Custom, Default
    entries: list[PolicyEntryInfo]


class AclInfo(JsonBody, frozen=True, kw_only=True):
    subject: str
    policies: list[PolicyInfo]
