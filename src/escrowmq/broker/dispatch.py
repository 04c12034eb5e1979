"""What the broker needs of a connection. `server/remoting_server.py` has the real one.

A request's JSON body, or a refusal that says what is wrong with it.

What each request needs to be allowed, in RocketMQ's words.

Names in a request are the client's claim. Where it points at a record by its offset, the record's
own topic is what counts: RocketMQ believes the header, and so shows any message to anybody.

A group's retry topic and its dead letters belong to the group. What is not listed here is for
administrators, so a request that is new is closed until somebody thinks about it.

How a put ended, as the code of the answer. What is not here is a SYSTEM_ERROR.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeVar

from escrowmq.auth.acl import Action, Permission, ResourceType
from escrowmq.errors import (
    BrokenBody,
    CorruptRecord,
    RecordNotFound,
    RequestRefused,
    TransactionNotFound,
)
from escrowmq.escrow.coordinator import TransactionCoordinator
from escrowmq.message.names import (
    BROKER_ONLY_TOPICS,
    DLQ_PREFIX,
    RETRY_PREFIX,
    TRACE_TOPIC,
    reply_topic,
)
from escrowmq.message.record import LogOffset
from escrowmq.peer import Peer
from escrowmq.remoting.bodies import (
    CheckClientConfig,
    HalfPositions,
    Heartbeat,
    JsonBody,
    LockBatch,
    decode_body,
)
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.command import Command
from escrowmq.remoting.headers import Header
from escrowmq.remoting.requests import Body, Request
from escrowmq.store.status import PutStatus
from escrowmq.store.store import MessageStore


class Channel(Peer, Protocol):
    """A client connection as the broker sees it."""

    peer_host: bytes  # packed as records store it

    # Processors hand over values and the front behind the channel encodes them. A one-way request
    # gets no response: the front drops it, so processors respond to every request. Responses leave
    # at the end of the turn, all responses of a connection in one write.

    def respond(
        self,
        request: Request[Any],
        header: Header | None = None,
        *,
        code: int = ResponseCode.SUCCESS,
        remark: str = "",
        body: Body = b"",
    ) -> None:
        """Respond to a request. Raise LocalProtocolError if a frame cannot hold the response."""

    def respond_send(
        self,
        request: Request[Any],
        log_offset: int,
        queue_id: int,
        queue_offset: int,
        code: int = ResponseCode.SUCCESS,
        transaction_id: str | None = None,
    ) -> None:
        """Respond to a send of one message that is in the log, flushed (SUCCESS) or not."""

    def respond_send_batch(
        self,
        request: Request[Any],
        log_offsets: Sequence[int],
        queue_id: int,
        queue_offset: int,
        code: int = ResponseCode.SUCCESS,
    ) -> None:
        """Respond to a send of several messages. `queue_offset` is that of the first."""

    def respond_pull(
        self,
        request: Request[Any],
        *,
        next_offset: int,
        min_offset: int,
        max_offset: int,
        code: int = ResponseCode.SUCCESS,
        remark: str = "",
        slices: Sequence[Body] = (),
    ) -> None:
        """Respond to a pull. The slices of the log are handed to the socket without a copy."""

    def send_oneway(self, code: int, fields: Header, body: Body = b"") -> bool:
        """Send a one-way request of the broker's own.

        Return False if the connection is closed or its peer does not read; nothing is sent then.
        """


# What the peer answered; None if it did not, in time or at all.
ResponseCallback = Callable[[Command | None, bytes], None]


class RequestChannel(Channel, Protocol):
    def call(
        self,
        code: int,
        fields: Header,
        body: Body,
        on_response: ResponseCallback,
        *,
        timeout_s: float,
    ) -> bool:
        """A request of ours that the peer answers. False if the line is gone or stuffed;
        `answered` is then never called, and otherwise once."""


B = TypeVar("B", bound=JsonBody)


def decode_request_body(body_type: type[B], request: Request[Any]) -> B:
    try:
        return decode_body(body_type, request.body)
    except BrokenBody as error:
        raise RequestRefused(ResponseCode.SYSTEM_ERROR, str(error)) from error


_READ: Final = Action.SUB | Action.GET
_COMMIT_OFFSET: Final = Action.SUB | Action.UPDATE

PermissionLookup = Callable[[Request[Any]], Iterable[Permission]]


class RequestPermissions:
    def __init__(
        self, store: MessageStore, coordinator: TransactionCoordinator, *, cluster: str
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._reply_topic = reply_topic(cluster)
        self._cluster_read = Permission(ResourceType.CLUSTER, cluster, Action.GET)
        self._cluster_update = Permission(ResourceType.CLUSTER, cluster, Action.UPDATE)
        self._lookups = self._lookups_by_code()

    def required(self, request: Request[Any]) -> Iterable[Permission]:
        return self._lookups.get(request.head.code, self._administrator)(request)

    def _lookups_by_code(self) -> dict[int, PermissionLookup]:
        code = RequestCode
        return {
            code.SEND_MESSAGE: self._send,
            code.SEND_MESSAGE_V2: self._send,
            code.SEND_BATCH_MESSAGE: self._send,
            code.SEND_REPLY_MESSAGE: self._reply,
            code.SEND_REPLY_MESSAGE_V2: self._reply,
            code.PULL_MESSAGE: self._pull,
            code.LITE_PULL_MESSAGE: self._pull,
            code.CONSUMER_SEND_MSG_BACK: self._send_back,
            code.END_TRANSACTION: self._end,
            code.END_TRANSACTIONS: self._end_many,
            code.REGISTER_WRITER: self._writer,
            code.DECIDE_BATCH: self._writer,
            code.QUERY_WRITER: self._writer,
            code.LIST_TRANSACTIONS: lambda _: (self._cluster_read,),
            code.SHOW_TRANSACTION: lambda _: (self._cluster_read,),
            code.HEART_BEAT: self._heartbeat,
            code.UNREGISTER_CLIENT: self._unregister,
            code.CHECK_CLIENT_CONFIG: self._check_config,
            code.GET_CONSUMER_LIST_BY_GROUP: self._members,
            code.LOCK_BATCH_MQ: self._lock,
            code.UNLOCK_BATCH_MQ: self._lock,
            code.QUERY_CONSUMER_OFFSET: lambda asked: self._offset(asked, _READ),
            code.UPDATE_CONSUMER_OFFSET: lambda asked: self._offset(asked, _COMMIT_OFFSET),
            code.GET_MAX_OFFSET: self._read,
            code.GET_MIN_OFFSET: self._read,
            code.SEARCH_OFFSET_BY_TIMESTAMP: self._read,
            code.GET_EARLIEST_MSG_STORETIME: self._read,
            code.QUERY_MESSAGE: self._read,
            code.VIEW_MESSAGE_BY_ID: lambda asked: self._record_permissions(
                asked.head.fields.offset
            ),
            code.UPDATE_AND_CREATE_TOPIC: lambda asked: self._manage_topic(asked, Action.CREATE),
            code.DELETE_TOPIC_IN_BROKER: lambda asked: self._manage_topic(asked, Action.DELETE),
        }

    def _administrator(self, request: Request[Any]) -> Iterable[Permission]:
        return (self._cluster_update,)

    # --- messages --------------------------------------------------------------------------------

    def _topic_permission(self, topic: str, actions: Action) -> Permission:
        for prefix in (RETRY_PREFIX, DLQ_PREFIX):
            if topic.startswith(prefix):
                return _group_permission(
                    topic.removeprefix(prefix), Action.SUB | actions & ~Action.PUB
                )
        if topic in BROKER_ONLY_TOPICS:
            # Halves and delayed messages of every topic lie there.
            return self._cluster_update if actions & Action.PUB else self._cluster_read
        return Permission(ResourceType.TOPIC, topic, actions)

    def _send(self, request: Request[Any]) -> Iterable[Permission]:
        topic = request.head.fields.topic
        return () if topic == TRACE_TOPIC else (self._topic_permission(topic, Action.PUB),)

    def _reply(self, request: Request[Any]) -> Iterable[Permission]:
        """Who may read a question may answer it."""
        topic = request.head.fields.topic
        return () if topic == self._reply_topic else (self._topic_permission(topic, Action.PUB),)

    def _pull(self, request: Request[Any]) -> Iterable[Permission]:
        fields = request.head.fields
        return self._topic_permission(fields.topic, Action.SUB), _group_permission(
            fields.consumer_group, Action.SUB
        )

    def _read(self, request: Request[Any]) -> Iterable[Permission]:
        return (self._topic_permission(request.head.fields.topic, _READ),)

    def _record_permissions(self, log_offset: int) -> Iterator[Permission]:
        try:
            yield self._topic_permission(self._store.record_at(LogOffset(log_offset)).topic, _READ)
        except (RecordNotFound, CorruptRecord):
            return  # there is nothing to hide; the handler says so

    def _manage_topic(self, request: Request[Any], action: Action) -> Iterable[Permission]:
        return (Permission(ResourceType.TOPIC, request.head.fields.topic, action),)

    # --- transactions ----------------------------------------------------------------------------

    def _end(self, request: Request[Any]) -> Iterable[Permission]:
        fields = request.head.fields
        return self._half_permissions(fields.tran_state_table_offset, fields.commit_log_offset)

    def _end_many(self, request: Request[Any]) -> Iterator[Permission]:
        needs: dict[Permission, None] = {}
        for queue_offset, log_offset in decode_request_body(HalfPositions, request).halves:
            needs.update(dict.fromkeys(self._half_permissions(queue_offset, log_offset)))
        yield from needs

    def _half_permissions(self, queue_offset: int, log_offset: int) -> Iterator[Permission]:
        try:
            half = self._coordinator.find_open(queue_offset, log_offset)
        except TransactionNotFound:
            return  # the handler says so
        if half is not None:  # what is settled can only be told again
            yield self._topic_permission(half.topic, Action.PUB)

    def _writer(self, request: Request[Any]) -> Iterable[Permission]:
        return (_group_permission(request.head.fields.writer, Action.PUB),)

    # --- groups ----------------------------------------------------------------------------------

    def _heartbeat(self, request: Request[Any]) -> Iterator[Permission]:
        for consumer in decode_request_body(Heartbeat, request).consumer_data_set:
            yield _group_permission(consumer.group_name, Action.SUB)
            for wanted in consumer.subscription_data_set:
                yield self._topic_permission(wanted.topic, Action.SUB)

    def _unregister(self, request: Request[Any]) -> Iterator[Permission]:
        if request.head.fields.consumer_group:
            yield _group_permission(request.head.fields.consumer_group, Action.SUB)

    def _check_config(self, request: Request[Any]) -> Iterator[Permission]:
        told = decode_request_body(CheckClientConfig, request)
        yield _group_permission(told.group, Action.SUB)
        yield self._topic_permission(told.subscription_data.topic, Action.SUB)

    def _members(self, request: Request[Any]) -> Iterable[Permission]:
        return (_group_permission(request.head.fields.consumer_group, _READ),)

    def _lock(self, request: Request[Any]) -> Iterator[Permission]:
        wanted = decode_request_body(LockBatch, request)
        yield _group_permission(wanted.consumer_group, Action.SUB)
        for topic in {queue.topic for queue in wanted.mq_set}:
            yield self._topic_permission(topic, Action.SUB)

    def _offset(self, request: Request[Any], actions: Action) -> Iterable[Permission]:
        fields = request.head.fields
        return self._topic_permission(fields.topic, actions), _group_permission(
            fields.consumer_group, actions
        )

    def _send_back(self, request: Request[Any]) -> Iterator[Permission]:
        """To the retry topic of a group, which must be able to read it as it is."""
        yield _group_permission(request.head.fields.group, Action.SUB)
        yield from self._record_permissions(request.head.fields.offset)


def _group_permission(name: str, actions: Action) -> Permission:
    return Permission(ResourceType.GROUP, name, actions)


RESPONSE_CODE_BY_PUT_STATUS: Final = {
    PutStatus.PUT_OK: ResponseCode.SUCCESS,
    PutStatus.FLUSH_DISK_TIMEOUT: ResponseCode.FLUSH_DISK_TIMEOUT,
    PutStatus.FLUSH_SLAVE_TIMEOUT: ResponseCode.FLUSH_SLAVE_TIMEOUT,
    PutStatus.SLAVE_NOT_AVAILABLE: ResponseCode.SLAVE_NOT_AVAILABLE,
    PutStatus.SERVICE_NOT_AVAILABLE: ResponseCode.SERVICE_NOT_AVAILABLE,
    PutStatus.MESSAGE_ILLEGAL: ResponseCode.MESSAGE_ILLEGAL,
    PutStatus.PROPERTIES_SIZE_EXCEEDED: ResponseCode.MESSAGE_ILLEGAL,
    PutStatus.OS_PAGE_CACHE_BUSY: ResponseCode.SYSTEM_BUSY,
}
