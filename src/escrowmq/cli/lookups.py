"""Look for messages on all brokers: by key, by id, by place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from escrowmq.cli.brokers import Brokers
from escrowmq.cli.call import Caller
from escrowmq.cli.figures import topic_configs
from escrowmq.cli.rendering import Found, records_in
from escrowmq.errors import NoSuchRecord, RemoteProtocolError, RequestRefused
from escrowmq.message.keys import decode_host, decode_offset_id
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import PullMessage, QueryMessage, ViewMessage

# RocketMQ's own group for this: it commits nothing, so nobody is disturbed.
TOOLS_GROUP: Final = "TOOLS_CONSUMER"
HAS_SUBSCRIPTION: Final = 4
ALWAYS_MS: Final = (1 << 63) - 1
_NONE: Final = (ResponseCode.QUERY_NOT_FOUND, ResponseCode.TOPIC_NOT_EXIST)


def by_key(brokers: Brokers, query: QueryMessage) -> list[Found]:
    """The oldest first."""
    return _sorted(
        found
        for place, body in brokers.ask(lambda caller: _query(caller, query), unless=_NONE)
        for found in records_in(body, place.name)
    )


def _query(caller: Caller, query: QueryMessage) -> bytes:
    return caller.call(RequestCode.QUERY_MESSAGE, query).body


def unique(topic: str, key: str) -> QueryMessage:
    return QueryMessage(
        topic=topic,
        key=key,
        max_num=32,
        begin_timestamp=0,
        end_timestamp=ALWAYS_MS,
        is_unique_key=True,
    )


def by_unique_key(brokers: Brokers, key: str, topic: str | None) -> list[Found]:
    """In one topic, or in all of them."""
    if topic is not None:
        return by_key(brokers, unique(topic, key))

    def question(caller: Caller) -> list[bytes]:
        asked = (unique(name, key) for name in topic_configs(caller))
        replies = caller.call_many(RequestCode.QUERY_MESSAGE, asked)
        return [reply.body for reply in replies if not isinstance(reply, RequestRefused)]

    return _sorted(
        found
        for place, bodies in brokers.ask(question)
        for body in bodies
        for found in records_in(body, place.name)
    )


def by_id(brokers: Brokers, name: str, topic: str | None) -> list[Found]:
    """`name`: where it lies (offset id) or what its sender calls it (unique key)."""
    place = _place(brokers, name)
    if place is None:
        return by_unique_key(brokers, name, topic)
    address, log_offset = place
    known = brokers.brokers
    brokers.brokers = [broker for broker in known if broker.address == address]
    asked = ViewMessage(offset=log_offset, topic=topic)
    try:
        return [
            found
            for broker, body in brokers.ask(
                lambda caller: caller.call(RequestCode.VIEW_MESSAGE_BY_ID, asked).body,
                unless=(ResponseCode.SYSTEM_ERROR, ResponseCode.QUERY_NOT_FOUND),
            )
            for found in records_in(body, broker.name)
        ]
    finally:
        brokers.brokers = known


def _place(brokers: Brokers, name: str) -> tuple[str, int] | None:
    """Unique keys look the same; only an id of one of these brokers has its address in it."""
    try:
        host, log_offset = decode_offset_id(name)
        address, port = decode_host(host)
    except (RemoteProtocolError, ValueError):
        return None
    text = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    is_known = any(broker.address == text for broker in brokers.brokers)
    return (text, log_offset) if is_known else None


def by_offset(brokers: Brokers, topic: str, queue_id: int, offset: int) -> list[Found]:
    """The message at that place, on each broker that has it."""
    asked = PullMessage(
        consumer_group=TOOLS_GROUP,
        topic=topic,
        queue_id=queue_id,
        queue_offset=offset,
        max_msg_nums=1,
        sys_flag=HAS_SUBSCRIPTION,
        subscription="*",
        expression_type="TAG",
    )
    nothing = (
        ResponseCode.PULL_NOT_FOUND,
        ResponseCode.PULL_OFFSET_MOVED,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.SYSTEM_ERROR,  # a queue that it does not have
    )
    return [
        found
        for place, body in brokers.ask(
            lambda caller: caller.call(RequestCode.PULL_MESSAGE, asked).body, unless=nothing
        )
        for found in records_in(body, place.name)
        if found.record.queue_offset == offset
    ]


def nothing_found(brokers: Brokers, what: str) -> NoSuchRecord:
    asked = ", ".join(place.name for place in brokers.brokers)
    return NoSuchRecord(f"no message {what} on {asked}: it never was there, or it has expired")


def _sorted(found: Iterable[Found]) -> list[Found]:
    return sorted(found, key=lambda one: (one.record.stored_ms, one.broker, one.record.log_offset))
