"""How a request reaches its processor, and how the result gets back to the client.

    Channel              the client's connection: where responses go
    Handler              a request code, the function that handles it, the permission it needs
    RequestPermissions   which resources a request touches, for the access check
    RESPONSE_CODES       which response code each error becomes

Every processor returns its `handlers()`. `Broker` joins them into one table and applies permission
and error table around each call, so that a processor contains neither.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

from escrowmq.auth.acl import Action, Permission, ResourceType
from escrowmq.errors import (
    AmbiguousTransaction,
    BrokenBody,
    ConfigError,
    CorruptRecord,
    EscrowError,
    FlushTimeout,
    InvalidSubscription,
    LocalProtocolError,
    RecordNotFound,
    RecordRefused,
    RequestRefused,
    StoreError,
    StoreFull,
    StoreUnavailable,
    TableFull,
    TooManyOpenTransactions,
    TransactionConflict,
    TransactionNotFound,
    WriterFenced,
)
from escrowmq.escrow.coordinator import TransactionCoordinator
from escrowmq.escrow.records import parse_half
from escrowmq.message.names import (
    BROKER_ONLY_TOPICS,
    DLQ_PREFIX,
    HALF_TOPIC,
    RETRY_PREFIX,
    TRACE_TOPIC,
    WRITER,
    reply_topic,
)
from escrowmq.message.properties import find_property
from escrowmq.message.record import LogOffset
from escrowmq.peer import Peer
from escrowmq.remoting.bodies import (
    CheckClientConfig,
    LockBatch,
    decode_half_positions,
    decode_heartbeat,
    decode_request_body,
)
from escrowmq.remoting.codes import ResponseCode
from escrowmq.remoting.command import Command
from escrowmq.remoting.headers import Header
from escrowmq.remoting.requests import Body, Request
from escrowmq.sliced_work import SlicedWork
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)

# --- channels ------------------------------------------------------------------------------------


class Channel(Peer, Protocol):
    """A client connection as the broker sees it. `server/remoting_server.py` has the real one.

    Processors hand over values and the front behind the channel encodes them. A one-way request
    gets no response: the front drops it, so processors respond to every request alike. Responses
    leave at the end of the turn, all responses of a connection in one write.
    """

    peer_host: bytes  # the peer's address, packed as records store it

    def set_account(self, access_key: str) -> None:
        """Count what is kept for this connection for an account, instead of its host."""

    @property
    def can_send(self) -> bool:
        """Whether the client reads what it is sent, so that it can get more than it asked for."""

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

    def respond_in_pieces(
        self, request: Request[Any], header: Header, body: Sequence[Body]
    ) -> None:
        """Do the same with a long body that is in several pieces. They are not copied."""

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
        topic_sys_flag: int = 0,
        group_sys_flag: int = 0,
        code: int = ResponseCode.SUCCESS,
        remark: str = "",
        slices: Sequence[Body] = (),
    ) -> None:
        """Respond to a pull. The slices of the log are handed to the socket without a copy."""

    def send_oneway(self, code: int, fields: Header, body: Body = b"") -> bool:
        """Send a one-way request of the broker's own.

        Return False if the connection is closed or its peer does not read; nothing is sent then.
        """


# Called with the peer's response, or with None if none came in time.
ResponseCallback = Callable[[Command | None, bytes], None]


class RequestChannel(Channel, Protocol):
    """A channel on which the broker can also wait for the response to its own request."""

    def call(
        self,
        code: int,
        fields: Header,
        body: Body,
        on_response: ResponseCallback,
        *,
        requester: Channel,
        timeout_s: float,
    ) -> bool:
        """Send a request of the broker's own and call `on_response` once.

        Return False, and never call it, if the connection is closed or its peer does not read. What
        is kept for the response is counted for `requester`, and dropped when that is closed. Raises
        TableFull if the requester may have no more.
        """


# --- errors --------------------------------------------------------------------------------------

ErrorCodes: TypeAlias = Mapping[type[EscrowError], int]

# The closest base class counts. RequestRefused carries its own code. An error that is not here is
# a bug: it is logged with its traceback and becomes a SYSTEM_ERROR without details.
RESPONSE_CODES: Final[ErrorCodes] = {
    BrokenBody: ResponseCode.SYSTEM_ERROR,
    LocalProtocolError: ResponseCode.SYSTEM_ERROR,  # the response does not fit into a frame
    ConfigError: ResponseCode.INVALID_PARAMETER,
    InvalidSubscription: ResponseCode.SUBSCRIPTION_PARSE_FAILED,
    TableFull: ResponseCode.SYSTEM_BUSY,
    RecordRefused: ResponseCode.MESSAGE_ILLEGAL,
    StoreFull: ResponseCode.SERVICE_NOT_AVAILABLE,
    StoreUnavailable: ResponseCode.SYSTEM_BUSY,
    FlushTimeout: ResponseCode.FLUSH_DISK_TIMEOUT,
    StoreError: ResponseCode.SYSTEM_ERROR,
    TooManyOpenTransactions: ResponseCode.SYSTEM_BUSY,
    TransactionNotFound: ResponseCode.QUERY_NOT_FOUND,
    TransactionConflict: ResponseCode.TRANSACTION_CONFLICT,
    AmbiguousTransaction: ResponseCode.TRANSACTION_AMBIGUOUS,
    WriterFenced: ResponseCode.TRANSACTION_FENCED,
}
NO_OVERRIDES: Final[ErrorCodes] = {}
REMARK_LENGTH_MAX: Final = 4_096


def response_code(error: Exception, overrides: ErrorCodes = NO_OVERRIDES) -> int | None:
    """Return the response code of an error, or None if the error is not expected.

    `overrides` are those of a handler and are looked at before RESPONSE_CODES.
    """
    if isinstance(error, RequestRefused):
        return error.code
    for codes in (overrides, RESPONSE_CODES):
        for error_type in type(error).__mro__:
            code = codes.get(error_type)
            if code is not None:
                return code
    return None


def respond_error(
    channel: Channel,
    request: Request[Any],
    error: Exception,
    overrides: ErrorCodes = NO_OVERRIDES,
) -> int:
    """Respond to a request whose handler raised `error`, and return the response code."""
    code = response_code(error, overrides)
    if code is None:
        log.error(
            "request failed code=%d peer=%s",
            request.head.code,
            channel.address,
            exc_info=error,
        )
        code, remark = int(ResponseCode.SYSTEM_ERROR), "internal error, see the broker's log"
    else:
        remark = error.remark if isinstance(error, RequestRefused) else str(error)
    # An error may repeat what the client sent, which may be as long as a frame.
    channel.respond(request, code=code, remark=remark[:REMARK_LENGTH_MAX])
    return code


def respond_failure(
    channel: Channel,
    request: Request[Any],
    error: Exception,
    overrides: ErrorCodes = NO_OVERRIDES,
) -> int:
    """Do the same as `respond_error`, and never raise: if that fails too, log it.

    For loops over the requests of several clients, where one must not cost the others theirs.
    """
    try:
        return respond_error(channel, request, error, overrides)
    except Exception:
        log.exception("request not responded to peer=%s", channel.address)
        return int(ResponseCode.SYSTEM_ERROR)


# --- permissions ---------------------------------------------------------------------------------

_READ: Final = Action.SUB | Action.GET
_COMMIT_OFFSET: Final = Action.SUB | Action.UPDATE
_WRITER_MARK: Final = f"{WRITER}\x01"


class RequestPermissions:
    """Name the resources that a request touches, and the actions on them, in RocketMQ's terms.

    Names in a request are only the client's claim. Where a request refers to a record by its
    offset, the topic stored in the record counts. RocketMQ trusts the header there, which lets a
    client read any message.

    The retry topic and the dead-letter topic of a group belong to the group.
    """

    def __init__(
        self, store: MessageStore, coordinator: TransactionCoordinator, *, cluster: str
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._reply_topic = reply_topic(cluster)
        self._cluster_read = Permission(ResourceType.CLUSTER, cluster, Action.GET)
        self._cluster_update = Permission(ResourceType.CLUSTER, cluster, Action.UPDATE)

    def administrator(self, request: Request[Any]) -> Iterable[Permission]:
        return (self._cluster_update,)

    def read_cluster(self, request: Request[Any]) -> Iterable[Permission]:
        return (self._cluster_read,)

    # --- messages --------------------------------------------------------------------------------

    def send(self, request: Request[Any]) -> Iterable[Permission]:
        fields = request.head.fields
        topic, properties = fields.topic, fields.properties
        required = () if topic == TRACE_TOPIC else (self._topic(topic, Action.PUB),)
        if _WRITER_MARK in properties:
            # A half of a writer takes part in the writer's batches, so it needs what a
            # registration of the writer needs.
            writer = find_property(properties.encode(), WRITER.encode()) or b""
            return (*required, _group(writer.decode("utf-8", "replace"), Action.PUB))
        return required

    def reply(self, request: Request[Any]) -> Iterable[Permission]:
        """Require nothing for the reply topic: a client that could read a request may reply."""
        topic = request.head.fields.topic
        return () if topic == self._reply_topic else (self._topic(topic, Action.PUB),)

    def pull(self, request: Request[Any]) -> Iterable[Permission]:
        fields = request.head.fields
        return self._topic(fields.topic, Action.SUB), _group(fields.consumer_group, Action.SUB)

    def send_back(self, request: Request[Any]) -> Iterator[Permission]:
        """Require that the group may read the record, which goes to the group's retry topic."""
        yield _group(request.head.fields.group, Action.SUB)
        yield from self.read_record(request)

    def read_topic(self, request: Request[Any]) -> Iterable[Permission]:
        return (self._topic(request.head.fields.topic, _READ),)

    def read_record(self, request: Request[Any]) -> Iterator[Permission]:
        try:
            record = self._store.record_at(LogOffset(request.head.fields.offset))
        except (RecordNotFound, CorruptRecord):
            return  # nothing to protect; the handler reports it
        yield self._topic(record.topic, _READ)._replace(is_hidden=True)

    def create_topic(self, request: Request[Any]) -> Iterable[Permission]:
        return (Permission(ResourceType.TOPIC, request.head.fields.topic, Action.CREATE),)

    def delete_topic(self, request: Request[Any]) -> Iterable[Permission]:
        return (Permission(ResourceType.TOPIC, request.head.fields.topic, Action.DELETE),)

    def _topic(self, topic: str, actions: Action) -> Permission:
        for prefix in (RETRY_PREFIX, DLQ_PREFIX):
            if topic.startswith(prefix):
                return _group(topic.removeprefix(prefix), Action.SUB | actions & ~Action.PUB)
        if topic in BROKER_ONLY_TOPICS:
            # These hold half messages and delayed messages of every topic.
            return self._cluster_update if actions & Action.PUB else self._cluster_read
        return Permission(ResourceType.TOPIC, topic, actions)

    # --- transactions ----------------------------------------------------------------------------

    def end(self, request: Request[Any]) -> Iterable[Permission]:
        fields = request.head.fields
        return self._half(
            fields.tran_state_table_offset, fields.commit_log_offset, fields.producer_group
        )

    def end_many(self, request: Request[Any]) -> Iterator[Permission]:
        # One for each half, also if they are equal: the check may be interrupted behind each.
        group = request.head.fields.producer_group
        for queue_offset, log_offset in decode_half_positions(request.body):
            yield from self._half(queue_offset, log_offset, group)

    def _half(self, queue_offset: int, log_offset: int, group: str) -> Iterator[Permission]:
        """Require what a send to the topic of the half needs, also to learn how it ended."""
        try:
            half = self._coordinator.find_open(queue_offset, log_offset, group)
            topic = self._stored_topic(log_offset) if half is None else half.topic
        except (TransactionNotFound, RecordNotFound, CorruptRecord):
            return  # the handler reports it
        if topic is not None:
            yield self._topic(topic, Action.PUB)._replace(is_hidden=True)

    def _stored_topic(self, log_offset: int) -> str | None:
        """Return the topic of the half at this log offset; None if there is no half."""
        record = self._store.record_at(LogOffset(log_offset))
        properties = parse_half(record) if record.topic == HALF_TOPIC else None
        return None if properties is None else properties.topic

    def writer(self, request: Request[Any]) -> Iterable[Permission]:
        return (_group(request.head.fields.writer, Action.PUB),)

    # --- groups ----------------------------------------------------------------------------------

    def heartbeat(self, request: Request[Any]) -> Iterator[Permission]:
        for consumer in decode_heartbeat(request.body).consumer_data_set:
            yield _group(consumer.group_name, Action.SUB)
            for subscription in consumer.subscription_data_set:
                yield self._topic(subscription.topic, Action.SUB)

    def unregister(self, request: Request[Any]) -> Iterator[Permission]:
        if request.head.fields.consumer_group:
            yield _group(request.head.fields.consumer_group, Action.SUB)

    def check_config(self, request: Request[Any]) -> Iterator[Permission]:
        config = decode_request_body(CheckClientConfig, request.body)
        yield _group(config.group, Action.SUB)
        yield self._topic(config.subscription_data.topic, Action.SUB)

    def list_members(self, request: Request[Any]) -> Iterable[Permission]:
        return (_group(request.head.fields.consumer_group, _READ),)

    def lock(self, request: Request[Any]) -> Iterator[Permission]:
        batch = decode_request_body(LockBatch, request.body)
        yield _group(batch.consumer_group, Action.SUB)
        for topic in {queue.topic for queue in batch.mq_set}:
            yield self._topic(topic, Action.SUB)

    def query_offset(self, request: Request[Any]) -> Iterable[Permission]:
        return self._consumer_offset(request, _READ)

    def commit_offset(self, request: Request[Any]) -> Iterable[Permission]:
        return self._consumer_offset(request, _COMMIT_OFFSET)

    def _consumer_offset(self, request: Request[Any], actions: Action) -> Iterable[Permission]:
        fields = request.head.fields
        return self._topic(fields.topic, actions), _group(fields.consumer_group, actions)


def _group(name: str, actions: Action) -> Permission:
    return Permission(ResourceType.GROUP, name, actions)


# --- handlers ------------------------------------------------------------------------------------

# Called with the channel, the request and the time in milliseconds. A handler that may take longer
# than a millisecond or two is a generator: it yields where it may be interrupted or dropped.
HandlerFunction: TypeAlias = Callable[[Channel, Request[Any], int], SlicedWork | None]
PermissionRule: TypeAlias = Callable[[RequestPermissions, Request[Any]], Iterable[Permission]]


BODY_BYTES_MAX: Final = 1 << 20  # of requests that are not messages
FRAME_BODY_BYTES_MAX: Final = 16 << 20  # as long as a frame can be: the handler limits it


@dataclass(frozen=True, slots=True)
class Handler:
    """How the broker handles one request code.

    `permission` is a method of RequestPermissions. A request whose handler names none is for
    administrators, so a new request is closed until its author opens it. If it may require very
    many, `has_many_permissions`, and they are checked in slices. A longer body than
    `body_bytes_max` is refused before it is decoded, which takes many times its memory.
    """

    code: int
    function: HandlerFunction
    permission: PermissionRule = RequestPermissions.administrator
    errors: ErrorCodes = field(default_factory=dict)  # where they differ from RESPONSE_CODES
    is_flow_controlled: bool = False
    has_many_permissions: bool = False
    body_bytes_max: int = BODY_BYTES_MAX
