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

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeVar

from escrowmq.auth.acl import Action, Kind, Need
from escrowmq.broker.metadata import CLOSED_TO_SENDERS, DLQ_PREFIX, RETRY_PREFIX
from escrowmq.errors import (
    BrokenBody,
    CorruptRecord,
    NoSuchRecord,
    NoSuchTransaction,
    RequestRefused,
)
from escrowmq.escrow.coordinator import Escrow
from escrowmq.message.record import LogOffset
from escrowmq.remoting.bodies import (
    CheckClientConfig,
    HalfPlaces,
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


class Line(Hashable, Protocol):
    peer: str  # ip:port, for people
    peer_host: bytes  # as records hold it

    @property
    def is_open(self) -> bool: ...

    def write(self, data: bytes) -> None:
        """An answer, or nothing. It leaves at the end of this turn, with the others."""

    def write_pieces(self, pieces: Sequence[Body]) -> None:
        """An answer whose body is slices of the log."""

    def post(self, code: int, fields: Header, body: Body = b"") -> bool:
        """A request of ours, one way. False if the line is gone or stuffed."""


# What the peer answered; None if it did not, in time or at all.
Answered = Callable[[Command | None, bytes], None]


class AskableLine(Line, Protocol):
    def ask(
        self, code: int, fields: Header, body: Body, answered: Answered, *, wait_s: float
    ) -> bool:
        """A request of ours that the peer answers. False if the line is gone or stuffed;
        `answered` is then never called, and otherwise once."""


B = TypeVar("B", bound=JsonBody)


def body_of(kind: type[B], request: Request[Any]) -> B:
    try:
        return decode_body(kind, request.body)
    except BrokenBody as error:
        raise RequestRefused(ResponseCode.SYSTEM_ERROR, str(error)) from error


TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"  # every client may write it
_READ: Final = Action.SUB | Action.GET
_NOTE: Final = Action.SUB | Action.UPDATE

Needs = Callable[[Request[Any]], Iterable[Need]]


class Permissions:
    def __init__(self, store: MessageStore, escrow: Escrow, *, cluster: str) -> None:
        self._store = store
        self._escrow = escrow
        self._reply_topic = f"{cluster}_REPLY_TOPIC"
        self._look = Need(Kind.CLUSTER, cluster, Action.GET)
        self._change = Need(Kind.CLUSTER, cluster, Action.UPDATE)
        self._table = self._needs_by_code()

    def of(self, request: Request[Any]) -> Iterable[Need]:
        return self._table.get(request.head.code, self._administrator)(request)

    def _needs_by_code(self) -> dict[int, Needs]:
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
            code.LIST_TRANSACTIONS: lambda _: (self._look,),
            code.SHOW_TRANSACTION: lambda _: (self._look,),
            code.HEART_BEAT: self._heartbeat,
            code.UNREGISTER_CLIENT: self._unregister,
            code.CHECK_CLIENT_CONFIG: self._check_config,
            code.GET_CONSUMER_LIST_BY_GROUP: self._members,
            code.LOCK_BATCH_MQ: self._lock,
            code.UNLOCK_BATCH_MQ: self._lock,
            code.QUERY_CONSUMER_OFFSET: lambda asked: self._offset(asked, _READ),
            code.UPDATE_CONSUMER_OFFSET: lambda asked: self._offset(asked, _NOTE),
            code.GET_MAX_OFFSET: self._read,
            code.GET_MIN_OFFSET: self._read,
            code.SEARCH_OFFSET_BY_TIMESTAMP: self._read,
            code.GET_EARLIEST_MSG_STORETIME: self._read,
            code.QUERY_MESSAGE: self._read,
            code.VIEW_MESSAGE_BY_ID: lambda asked: self._record(asked.head.fields.offset),
            code.UPDATE_AND_CREATE_TOPIC: lambda asked: self._manage(asked, Action.CREATE),
            code.DELETE_TOPIC_IN_BROKER: lambda asked: self._manage(asked, Action.DELETE),
        }

    def _administrator(self, request: Request[Any]) -> Iterable[Need]:
        return (self._change,)

    # --- messages --------------------------------------------------------------------------------

    def _topic(self, topic: str, actions: Action) -> Need:
        for prefix in (RETRY_PREFIX, DLQ_PREFIX):
            if topic.startswith(prefix):
                return _group(topic.removeprefix(prefix), Action.SUB | actions & ~Action.PUB)
        if topic in CLOSED_TO_SENDERS:
            # Halves and delayed messages of every topic lie there.
            return self._change if actions & Action.PUB else self._look
        return Need(Kind.TOPIC, topic, actions)

    def _send(self, request: Request[Any]) -> Iterable[Need]:
        topic = request.head.fields.topic
        return () if topic == TRACE_TOPIC else (self._topic(topic, Action.PUB),)

    def _reply(self, request: Request[Any]) -> Iterable[Need]:
        """Who may read a question may answer it."""
        topic = request.head.fields.topic
        return () if topic == self._reply_topic else (self._topic(topic, Action.PUB),)

    def _pull(self, request: Request[Any]) -> Iterable[Need]:
        fields = request.head.fields
        return self._topic(fields.topic, Action.SUB), _group(fields.consumer_group, Action.SUB)

    def _read(self, request: Request[Any]) -> Iterable[Need]:
        return (self._topic(request.head.fields.topic, _READ),)

    def _record(self, offset: int) -> Iterator[Need]:
        try:
            yield self._topic(self._store.record_at(LogOffset(offset)).topic, _READ)
        except (NoSuchRecord, CorruptRecord):
            return  # there is nothing to hide; the handler says so

    def _manage(self, request: Request[Any], action: Action) -> Iterable[Need]:
        return (Need(Kind.TOPIC, request.head.fields.topic, action),)

    # --- transactions ----------------------------------------------------------------------------

    def _end(self, request: Request[Any]) -> Iterable[Need]:
        fields = request.head.fields
        return self._half(fields.tran_state_table_offset, fields.commit_log_offset)

    def _end_many(self, request: Request[Any]) -> Iterator[Need]:
        needs: dict[Need, None] = {}
        for queue_offset, log_offset in body_of(HalfPlaces, request).halves:
            needs.update(dict.fromkeys(self._half(queue_offset, log_offset)))
        yield from needs

    def _half(self, queue_offset: int, log_offset: int) -> Iterator[Need]:
        try:
            half = self._escrow.find(queue_offset, log_offset)
        except NoSuchTransaction:
            return  # the handler says so
        if half is not None:  # what is settled can only be told again
            yield self._topic(half.topic, Action.PUB)

    def _writer(self, request: Request[Any]) -> Iterable[Need]:
        return (_group(request.head.fields.writer, Action.PUB),)

    # --- groups ----------------------------------------------------------------------------------

    def _heartbeat(self, request: Request[Any]) -> Iterator[Need]:
        for consumer in body_of(Heartbeat, request).consumer_data_set:
            yield _group(consumer.group_name, Action.SUB)
            for wanted in consumer.subscription_data_set:
                yield self._topic(wanted.topic, Action.SUB)

    def _unregister(self, request: Request[Any]) -> Iterator[Need]:
        if request.head.fields.consumer_group:
            yield _group(request.head.fields.consumer_group, Action.SUB)

    def _check_config(self, request: Request[Any]) -> Iterator[Need]:
        told = body_of(CheckClientConfig, request)
        yield _group(told.group, Action.SUB)
        yield self._topic(told.subscription_data.topic, Action.SUB)

    def _members(self, request: Request[Any]) -> Iterable[Need]:
        return (_group(request.head.fields.consumer_group, _READ),)

    def _lock(self, request: Request[Any]) -> Iterator[Need]:
        wanted = body_of(LockBatch, request)
        yield _group(wanted.consumer_group, Action.SUB)
        for topic in {queue.topic for queue in wanted.mq_set}:
            yield self._topic(topic, Action.SUB)

    def _offset(self, request: Request[Any], actions: Action) -> Iterable[Need]:
        fields = request.head.fields
        return self._topic(fields.topic, actions), _group(fields.consumer_group, actions)

    def _send_back(self, request: Request[Any]) -> Iterator[Need]:
        """To the retry topic of a group, which must be able to read it as it is."""
        yield _group(request.head.fields.group, Action.SUB)
        yield from self._record(request.head.fields.offset)


def _group(name: str, actions: Action) -> Need:
    return Need(Kind.GROUP, name, actions)


CODES_OF_PUTS: Final = {
    PutStatus.PUT_OK: ResponseCode.SUCCESS,
    PutStatus.FLUSH_DISK_TIMEOUT: ResponseCode.FLUSH_DISK_TIMEOUT,
    PutStatus.FLUSH_SLAVE_TIMEOUT: ResponseCode.FLUSH_SLAVE_TIMEOUT,
    PutStatus.SLAVE_NOT_AVAILABLE: ResponseCode.SLAVE_NOT_AVAILABLE,
    PutStatus.SERVICE_NOT_AVAILABLE: ResponseCode.SERVICE_NOT_AVAILABLE,
    PutStatus.MESSAGE_ILLEGAL: ResponseCode.MESSAGE_ILLEGAL,
    PutStatus.PROPERTIES_SIZE_EXCEEDED: ResponseCode.MESSAGE_ILLEGAL,
    PutStatus.OS_PAGE_CACHE_BUSY: ResponseCode.SYSTEM_BUSY,
}
