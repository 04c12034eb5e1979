"""Lookup of messages, and tailing a topic whose brokers fail and come back."""

from __future__ import annotations

from typing import Any

import pytest

from escrowmq.admin.messages import MessageTail, TailRequest, find_by_id, find_by_offset
from escrowmq.admin.offsets import EARLIEST, LATEST
from escrowmq.clock import ManualClock
from escrowmq.errors import NoRoute
from escrowmq.message.keys import encode_host, encode_offset_id
from escrowmq.message.record import NewRecord, encode_record
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import PullMessageResponse
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import encode_response
from tests.support.scripted_broker import ScriptedBroker, json_response

HOST = encode_host("127.0.0.1", 10911)


def record(body: bytes, queue_offset: int, *, stored_ms: int = 1_000, queue_id: int = 0) -> bytes:
    """Return an encoded record of topic `orders`."""
    message = NewRecord("orders", queue_id, body, born_host=HOST)
    return encode_record(message, queue_offset, 4096 + queue_offset, stored_ms, HOST)


class Queues:
    """Queues that respond to pulls. A message is None if the filter of the pull skips it."""

    def __init__(self, *queues: list[tuple[bytes, int] | None]) -> None:
        self.queues = queues

    def pull(self, request: Request[Any]) -> bytes:
        header = request.head.fields
        messages, begin = self.queues[header.queue_id], header.queue_offset
        end = min(len(messages), begin + 2)  # at most two messages per pull
        matching = [
            record(message[0], number, stored_ms=message[1], queue_id=header.queue_id)
            for number, message in enumerate(messages[begin:end], begin)
            if message is not None
        ]
        fields = PullMessageResponse(
            next_begin_offset=end,
            min_offset=0,
            max_offset=len(messages),
            suggest_which_broker_id=0,
        )
        code = ResponseCode.SUCCESS if matching else ResponseCode.PULL_RETRY_IMMEDIATELY
        if begin == end:
            code = ResponseCode.PULL_NOT_FOUND
        return encode_response(request, fields, code=code, body=b"".join(matching))


def serve(broker: ScriptedBroker, queues: Queues) -> None:
    broker.serve_topic("orders", *((0, len(messages)) for messages in queues.queues))
    broker.responses[RequestCode.PULL_MESSAGE] = queues.pull


def poll_all(tail: MessageTail) -> list[bytes]:
    bodies: list[bytes] = []
    while messages := tail.poll():
        bodies += [bytes(message.record.body) for message in messages]
    return bodies


def test_a_tail_reads_all_queues_from_the_beginning() -> None:
    queues = Queues([(b"a", 1), (b"c", 3), (b"d", 4)], [(b"b", 2)])
    with ScriptedBroker() as broker, broker.cluster() as cluster:
        serve(broker, queues)
        tail = MessageTail(cluster, TailRequest("orders", EARLIEST), ManualClock())
        assert poll_all(tail) == [b"a", b"b", b"c", b"d"]


def test_a_tail_from_the_end_shows_only_new_messages() -> None:
    messages: list[tuple[bytes, int] | None] = [(b"old", 1)]
    with ScriptedBroker() as broker, broker.cluster() as cluster:
        serve(broker, Queues(messages))
        tail = MessageTail(cluster, TailRequest("orders", LATEST), ManualClock())
        assert tail.poll() == []
        messages.append((b"new", 2))
        assert poll_all(tail) == [b"new"]


def test_one_poll_reads_past_messages_that_the_filter_skips() -> None:
    queues = Queues([None, None, None, None, None, (b"match", 1)])
    with ScriptedBroker() as broker, broker.cluster() as cluster:
        serve(broker, queues)
        tail = MessageTail(cluster, TailRequest("orders", EARLIEST, "A"), ManualClock())
        assert [bytes(message.record.body) for message in tail.poll()] == [b"match"]


def test_after_a_failure_a_broker_is_read_from_where_it_was() -> None:
    clock = ManualClock()
    messages: list[tuple[bytes, int] | None] = [(b"a", 1)]
    queues = Queues(messages)
    with ScriptedBroker() as broker, broker.cluster() as cluster:
        serve(broker, queues)
        tail = MessageTail(cluster, TailRequest("orders", EARLIEST), clock)
        assert poll_all(tail) == [b"a"]
        broker.responses[RequestCode.PULL_MESSAGE] = lambda request: None  # closes the connection
        assert tail.poll() == []
        assert len(cluster.failures) == 1
        messages.append((b"b", 2))
        serve(broker, queues)
        assert tail.poll() == []  # a broker that failed is left alone for some seconds
        clock.advance(ms=6_000)
        assert poll_all(tail) == [b"b"]


def test_a_queue_that_is_created_later_is_read_from_its_beginning() -> None:
    clock = ManualClock()
    with ScriptedBroker() as broker, broker.cluster() as cluster:
        serve(broker, Queues([(b"old", 1)]))
        tail = MessageTail(cluster, TailRequest("orders", LATEST), clock)
        assert tail.poll() == []
        serve(broker, Queues([(b"old", 1)], [(b"new", 2)]))
        clock.advance(ms=6_000)
        assert poll_all(tail) == [b"new"]


def test_a_tail_of_an_unknown_topic_is_an_error() -> None:
    with ScriptedBroker() as broker, broker.cluster() as cluster:
        serve(broker, Queues([]))
        with pytest.raises(NoRoute, match="there is no topic missing-topic"):
            MessageTail(cluster, TailRequest("missing-topic"), ManualClock()).poll()


def test_an_id_with_the_address_of_a_broker_is_a_position_in_its_log() -> None:
    with ScriptedBroker() as broker, broker.cluster() as cluster:
        broker.responses[RequestCode.VIEW_MESSAGE_BY_ID] = json_response(record(b"x", 3))
        host, _, port = broker.address.rpartition(":")
        offset_id = encode_offset_id(encode_host(host, int(port)), 4099)
        [message] = find_by_id(cluster, offset_id, None)
        assert message.record.body == b"x"
        assert broker.requests[-1].head.fields.offset == 4099


def test_any_other_id_is_a_unique_key() -> None:
    with ScriptedBroker() as broker, broker.cluster() as cluster:
        broker.responses[RequestCode.QUERY_MESSAGE] = json_response(record(b"x", 3))
        offset_id = encode_offset_id(encode_host("10.9.8.7", 1), 4099)
        [message] = find_by_id(cluster, offset_id, "orders")
        assert message.record.body == b"x"
        header = broker.requests[-1].head.fields
        assert (header.key, header.is_unique_key) == (offset_id, True)


def test_an_expired_offset_finds_nothing() -> None:
    """A broker may return the next message instead, if the requested one has expired."""
    with ScriptedBroker() as broker, broker.cluster() as cluster:
        broker.responses[RequestCode.PULL_MESSAGE] = json_response(record(b"x", 3))
        assert find_by_offset(cluster, "orders", 0, 2) == []
        assert len(find_by_offset(cluster, "orders", 0, 3)) == 1
