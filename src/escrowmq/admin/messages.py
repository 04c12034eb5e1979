"""Find messages by key, id or offset on all brokers, and follow a topic as messages arrive.

Nothing is committed: queues are read by offset, in RocketMQ's own group for tools, so no consumer
group moves and the broker stores nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from escrowmq.admin.cluster import BrokerAddress, Cluster
from escrowmq.admin.offsets import EARLIEST, LATEST, StartPosition
from escrowmq.admin.queries import search_offset, topic_configs, topic_offsets
from escrowmq.client.sync_connection import OutgoingRequest, SyncConnection
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import (
    CorruptRecord,
    EscrowError,
    NoRoute,
    RecordNotFound,
    RemoteProtocolError,
)
from escrowmq.message.keys import decode_host, decode_offset_id, encode_offset_id
from escrowmq.message.names import TOOLS_CONSUMER_GROUP
from escrowmq.message.record import LogOffset, StoredRecord, decode_record
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import PullMessage, QueryMessage, ViewMessage

MAX_TIMESTAMP_MS: Final = (1 << 63) - 1

_SUBSCRIPTION_FLAG: Final = 4  # sysFlag of a pull that carries its own filter
_UNIQUE_KEY_LIMIT: Final = 32
_PULL_LIMIT: Final = 32
_EMPTY_ROUNDS_MAX: Final = 1_000  # of one poll in which a filter skips everything
_REFRESH_INTERVAL_S: Final = 5.0  # how often new queues and restarted brokers are looked for
_LOG_OFFSET_POSITION: Final = 28  # of the log offset in an encoded record


@dataclass(frozen=True, slots=True)
class MessageView:
    """A message as a broker stores it."""

    broker: str
    record: StoredRecord

    @property
    def offset_id(self) -> str:
        """The broker's address and the log offset, as RocketMQ writes them."""
        return encode_offset_id(self.record.store_host, self.record.log_offset)


def decode_messages(body: bytes | memoryview, broker: str) -> Iterator[MessageView]:
    """Yield the records of a response. Raises CorruptRecord at one that cannot be read."""
    data = bytes(body)
    begin = 0
    while begin < len(data):
        size = int.from_bytes(data[begin : begin + 4], "big", signed=True)
        position = begin + _LOG_OFFSET_POSITION
        log_offset = LogOffset(int.from_bytes(data[position : position + 8], "big"))
        if size <= 0:
            raise CorruptRecord(log_offset, f"{broker} sent a message of {size} bytes")
        yield MessageView(broker, decode_record(data, begin, log_offset))
        begin += size


# --- find ----------------------------------------------------------------------------------------


def find_by_key(cluster: Cluster, query: QueryMessage) -> list[MessageView]:
    """Return the messages that the key index of each broker finds, the oldest first."""
    bodies = cluster.ask_all(
        lambda connection: connection.call(RequestCode.QUERY_MESSAGE, query).body,
        ignored_codes=(ResponseCode.QUERY_NOT_FOUND, ResponseCode.TOPIC_NOT_EXIST),
    )
    return _oldest_first(
        message for broker, body in bodies for message in decode_messages(body, broker.name)
    )


def find_by_unique_key(cluster: Cluster, unique_key: str, topic: str | None) -> list[MessageView]:
    """Return the messages with this unique key, in one topic or in all of them."""
    if topic is not None:
        return find_by_key(cluster, unique_key_query(topic, unique_key))

    def query_all_topics(connection: SyncConnection) -> list[bytes | memoryview]:
        requests = (
            OutgoingRequest(RequestCode.QUERY_MESSAGE, unique_key_query(name, unique_key))
            for name in topic_configs(connection)
        )
        return [reply.body for reply in connection.call_many(requests) if not reply.code]

    return _oldest_first(
        message
        for broker, bodies in cluster.ask_all(query_all_topics)
        for body in bodies
        for message in decode_messages(body, broker.name)
    )


def find_by_id(cluster: Cluster, message_id: str, topic: str | None) -> list[MessageView]:
    """Return the message with an offset id, or those with a unique key.

    Both are 32 hexadecimal digits. An offset id contains the address of its broker, so a text with
    the address of a broker of this cluster is one; every other text is a unique key.
    """
    position = _parse_offset_id(cluster, message_id)
    if position is None:
        return find_by_unique_key(cluster, message_id, topic)
    broker, log_offset = position
    header = ViewMessage(offset=log_offset, topic=topic)
    bodies = cluster.ask_all(
        lambda connection: connection.call(RequestCode.VIEW_MESSAGE_BY_ID, header).body,
        brokers=[broker],
        ignored_codes=(ResponseCode.SYSTEM_ERROR, ResponseCode.QUERY_NOT_FOUND),
    )
    return [message for _, body in bodies for message in decode_messages(body, broker.name)]


def find_by_offset(
    cluster: Cluster, topic: str, queue_id: int, queue_offset: int
) -> list[MessageView]:
    """Return the message at a queue offset, from each broker that has such a queue."""
    header = _pull_header(topic, queue_id, queue_offset, limit=1)
    bodies = cluster.ask_all(
        lambda connection: connection.call(RequestCode.PULL_MESSAGE, header).body,
        ignored_codes=(
            ResponseCode.PULL_NOT_FOUND,
            ResponseCode.PULL_OFFSET_MOVED,
            ResponseCode.PULL_RETRY_IMMEDIATELY,
            ResponseCode.TOPIC_NOT_EXIST,
            ResponseCode.SYSTEM_ERROR,  # the broker has the topic, but not this queue
        ),
    )
    return [
        message
        for broker, body in bodies
        for message in decode_messages(body, broker.name)
        if message.record.queue_offset == queue_offset
    ]


def read_queue(
    connection: SyncConnection, broker: str, topic: str, queue_id: int, offsets: range
) -> Iterator[list[MessageView]]:
    """Yield the messages of one queue between two offsets, as many at a time as a pull returns.

    Offsets whose messages have expired are skipped. `broker` is the name that the messages get.
    """
    code, queue_offset = RequestCode.PULL_MESSAGE, offsets.start
    while queue_offset < offsets.stop:
        header = _pull_header(topic, queue_id, queue_offset, limit=_PULL_LIMIT)
        [reply] = connection.call_many([OutgoingRequest(code, header)])
        if reply.code not in _PULL_CODES:
            raise connection.refusal(code, reply)
        messages = decode_messages(reply.body, broker)
        yield [message for message in messages if message.record.queue_offset in offsets]
        next_offset = reply.int_field("nextBeginOffset", 0)
        if next_offset <= queue_offset:
            return
        queue_offset = next_offset


def message_not_found(cluster: Cluster, description: str) -> RecordNotFound:
    """Return the error for a message that no broker has."""
    return RecordNotFound(
        f"no message {description} on {cluster.broker_names()}: it was never stored there, or it "
        "has expired"
    )


def unique_key_query(topic: str, unique_key: str) -> QueryMessage:
    """Return the query for all messages of a topic with this unique key."""
    return QueryMessage(
        topic=topic,
        key=unique_key,
        max_num=_UNIQUE_KEY_LIMIT,
        begin_timestamp=0,
        end_timestamp=MAX_TIMESTAMP_MS,
        is_unique_key=True,
    )


def _parse_offset_id(cluster: Cluster, message_id: str) -> tuple[BrokerAddress, int] | None:
    try:
        store_host, log_offset = decode_offset_id(message_id)
        host, port = decode_host(store_host)
    except (RemoteProtocolError, ValueError):
        return None
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    for broker in cluster.brokers():
        if broker.address == address:
            return broker, log_offset
    return None


def _oldest_first(messages: Iterable[MessageView]) -> list[MessageView]:
    return sorted(
        messages,
        key=lambda message: (message.record.stored_ms, message.broker, message.record.log_offset),
    )


def _pull_header(
    topic: str,
    queue_id: int,
    queue_offset: int,
    *,
    limit: int,
    expression: str = "*",
    expression_type: str = "TAG",
) -> PullMessage:
    return PullMessage(
        consumer_group=TOOLS_CONSUMER_GROUP,
        topic=topic,
        queue_id=queue_id,
        queue_offset=queue_offset,
        max_msg_nums=limit,
        sys_flag=_SUBSCRIPTION_FLAG,
        subscription=expression,
        expression_type=expression_type,
    )


# --- tail ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TailRequest:
    """The topic to follow, where to begin, and which messages to show."""

    topic: str
    start: StartPosition = LATEST
    expression: str = "*"
    expression_type: str = "TAG"


class MessageTail:
    """Read all queues of a topic round after round. Call `poll` until you have seen enough."""

    def __init__(self, cluster: Cluster, request: TailRequest, clock: Clock | None = None) -> None:
        self._cluster = cluster
        self._request = request
        self._clock = SystemClock() if clock is None else clock
        self._offsets: dict[BrokerAddress, dict[int, int]] = {}  # next offset, by queue id
        self._failed_offsets: dict[BrokerAddress, dict[int, int]] = {}  # of brokers that failed
        self._refreshed_s: float | None = None

    def poll(self) -> list[MessageView]:
        """Return new messages in the order in which they were stored; empty if there are none now.

        A broker that fails is listed in the failures of the cluster. It is asked again after some
        seconds and continues where it was. Raises NoRoute if no broker has the topic at first.
        """
        self._refresh_if_due()
        messages: list[MessageView] = []
        for _ in range(_EMPTY_ROUNDS_MAX):
            messages, has_advanced = self._pull_all()
            # A filter may skip all messages of a pull: those behind them may match.
            if messages or not has_advanced:
                break
        return sorted(messages, key=lambda message: message.record.stored_ms)

    def _refresh_if_due(self) -> None:
        """Look for new queues, and for brokers that were not reachable."""
        now_s = self._clock.elapsed_s()
        is_first = self._refreshed_s is None
        if self._refreshed_s is not None and now_s - self._refreshed_s < _REFRESH_INTERVAL_S:
            return
        self._refreshed_s = now_s
        topic = self._request.topic
        # Messages of a queue that is created later are new, whatever the request says.
        start = self._request.start if is_first else EARLIEST
        for broker, offsets in self._cluster.ask_all(
            lambda connection: self._start_offsets(connection, start)
        ):
            if offsets is not None:
                current = self._offsets.get(broker) or self._failed_offsets.pop(broker, {})
                self._offsets[broker] = {**offsets, **current}
        if is_first and not self._offsets and not self._cluster.failures:
            raise NoRoute(
                f"there is no topic {topic} on {self._cluster.broker_names()}: "
                "`escrowmq topic list` shows them"
            )

    def _start_offsets(
        self, connection: SyncConnection, start: StartPosition
    ) -> dict[int, int] | None:
        """Return where to begin in each queue, by queue id; None without such a topic."""
        topic = self._request.topic
        queues = topic_offsets(connection, [topic]).get(topic)
        if queues is None:
            return None
        if start == EARLIEST:
            return {queue.queue_id: bounds.min_offset for queue, bounds in queues.items()}
        if start == LATEST:
            return {queue.queue_id: bounds.max_offset for queue, bounds in queues.items()}
        return {
            queue.queue_id: search_offset(connection, topic, queue.queue_id, int(start))
            for queue in queues
        }

    def _pull_all(self) -> tuple[list[MessageView], bool]:
        """Pull each queue once; return the messages, and whether any queue has advanced."""
        messages: list[MessageView] = []
        has_advanced = False
        for broker, offsets in list(self._offsets.items()):
            try:
                for queue_id, (next_offset, pulled) in self._pull_broker(broker, offsets).items():
                    has_advanced = has_advanced or next_offset > offsets[queue_id]
                    offsets[queue_id] = max(next_offset, offsets[queue_id])
                    messages += pulled
            except EscrowError as error:
                self._cluster.report_failure(broker, error)
                self._failed_offsets[broker] = self._offsets.pop(broker)
        return messages, has_advanced

    def _pull_broker(
        self, broker: BrokerAddress, offsets: dict[int, int]
    ) -> dict[int, tuple[int, list[MessageView]]]:
        """Return the next offset and the messages of each queue."""
        connection = self._cluster.connection(broker.address)
        request, code = self._request, RequestCode.PULL_MESSAGE
        queue_ids = sorted(offsets)
        pulls = (
            OutgoingRequest(
                code,
                _pull_header(
                    request.topic,
                    queue_id,
                    offsets[queue_id],
                    limit=_PULL_LIMIT,
                    expression=request.expression,
                    expression_type=request.expression_type,
                ),
            )
            for queue_id in queue_ids
        )
        results = {}
        for queue_id, reply in zip(queue_ids, connection.call_many(pulls), strict=True):
            if reply.code not in _PULL_CODES:
                raise connection.refusal(code, reply)
            next_offset = reply.int_field("nextBeginOffset", 0)
            results[queue_id] = next_offset, list(decode_messages(reply.body, broker.name))
        return results


_PULL_CODES: Final = (
    ResponseCode.SUCCESS,
    ResponseCode.PULL_NOT_FOUND,
    ResponseCode.PULL_RETRY_IMMEDIATELY,
    ResponseCode.PULL_OFFSET_MOVED,
)
