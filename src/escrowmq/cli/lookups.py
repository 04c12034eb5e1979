"""Look for messages on all brokers: by key, by id, by place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from escrowmq.cli.brokers import Cluster
from escrowmq.cli.call import SyncConnection
from escrowmq.cli.figures import topic_configs
from escrowmq.cli.rendering import MessageView, decode_messages
from escrowmq.errors import RecordNotFound, RemoteProtocolError, RequestRefused
from escrowmq.message.keys import decode_host, decode_offset_id
from escrowmq.message.names import TOOLS_CONSUMER_GROUP
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import PullMessage, QueryMessage, ViewMessage

# RocketMQ's own group for this: it commits nothing, so nobody is disturbed.
PULL_SUBSCRIPTION_FLAG: Final = 4
MAX_TIMESTAMP_MS: Final = (1 << 63) - 1
_NOT_FOUND_CODES: Final = (ResponseCode.QUERY_NOT_FOUND, ResponseCode.TOPIC_NOT_EXIST)


def find_by_key(cluster: Cluster, query: QueryMessage) -> list[MessageView]:
    """The oldest first."""
    return _oldest_first(
        found
        for place, body in cluster.ask_all(
            lambda caller: _query(caller, query), ignored_codes=_NOT_FOUND_CODES
        )
        for found in decode_messages(body, place.name)
    )


def _query(connection: SyncConnection, query: QueryMessage) -> bytes:
    return connection.call(RequestCode.QUERY_MESSAGE, query).body


def unique_key_query(topic: str, key: str) -> QueryMessage:
    return QueryMessage(
        topic=topic,
        key=key,
        max_num=32,
        begin_timestamp=0,
        end_timestamp=MAX_TIMESTAMP_MS,
        is_unique_key=True,
    )


def find_by_unique_key(cluster: Cluster, key: str, topic: str | None) -> list[MessageView]:
    """In one topic, or in all of them."""
    if topic is not None:
        return find_by_key(cluster, unique_key_query(topic, key))

    def question(caller: SyncConnection) -> list[bytes]:
        asked = (unique_key_query(name, key) for name in topic_configs(caller))
        replies = caller.call_many(RequestCode.QUERY_MESSAGE, asked)
        return [reply.body for reply in replies if not isinstance(reply, RequestRefused)]

    return _oldest_first(
        found
        for place, bodies in cluster.ask_all(question)
        for body in bodies
        for found in decode_messages(body, place.name)
    )


def find_by_id(cluster: Cluster, message_id: str, topic: str | None) -> list[MessageView]:
    """`name`: where it lies (offset id) or what its sender calls it (unique key)."""
    place = _parse_offset_id(cluster, message_id)
    if place is None:
        return find_by_unique_key(cluster, message_id, topic)
    address, log_offset = place
    known = cluster.brokers
    cluster.brokers = [broker for broker in known if broker.address == address]
    asked = ViewMessage(offset=log_offset, topic=topic)
    try:
        return [
            found
            for broker, body in cluster.ask_all(
                lambda caller: caller.call(RequestCode.VIEW_MESSAGE_BY_ID, asked).body,
                ignored_codes=(ResponseCode.SYSTEM_ERROR, ResponseCode.QUERY_NOT_FOUND),
            )
            for found in decode_messages(body, broker.name)
        ]
    finally:
        cluster.brokers = known


def _parse_offset_id(cluster: Cluster, message_id: str) -> tuple[str, int] | None:
    """Unique keys look the same; only an id of one of these brokers has its address in it."""
    try:
        host, log_offset = decode_offset_id(message_id)
        address, port = decode_host(host)
    except (RemoteProtocolError, ValueError):
        return None
    text = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    is_known = any(broker.address == text for broker in cluster.brokers)
    return (text, log_offset) if is_known else None


def find_by_offset(
    cluster: Cluster, topic: str, queue_id: int, queue_offset: int
) -> list[MessageView]:
    """The message at that place, on each broker that has it."""
    asked = PullMessage(
        consumer_group=TOOLS_CONSUMER_GROUP,
        topic=topic,
        queue_id=queue_id,
        queue_offset=queue_offset,
        max_msg_nums=1,
        sys_flag=PULL_SUBSCRIPTION_FLAG,
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
        for place, body in cluster.ask_all(
            lambda caller: caller.call(RequestCode.PULL_MESSAGE, asked).body, ignored_codes=nothing
        )
        for found in decode_messages(body, place.name)
        if found.record.queue_offset == queue_offset
    ]


def message_not_found(cluster: Cluster, description: str) -> RecordNotFound:
    asked = ", ".join(place.name for place in cluster.brokers)
    return RecordNotFound(
        f"no message {description} on {asked}: it never was there, or it has expired"
    )


def _oldest_first(messages: Iterable[MessageView]) -> list[MessageView]:
    return sorted(
        messages, key=lambda one: (one.record.stored_ms, one.broker, one.record.log_offset)
    )
