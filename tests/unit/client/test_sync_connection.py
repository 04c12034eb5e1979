"""SyncConnection over real sockets: order of responses, buffers of the caller, failures."""

from __future__ import annotations

import random
from typing import Any

import pytest

from escrowmq.client.access import Access
from escrowmq.client.sync_connection import OutgoingRequest, SyncConnection
from escrowmq.clock import ManualClock
from escrowmq.errors import (
    LocalProtocolError,
    NotSent,
    OutcomeUnknown,
    RequestRefused,
    UnknownRequest,
)
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.connection import Connection
from escrowmq.remoting.headers_admin import TopicHeader
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import encode_response
from tests.support.scripted_server import ScriptedServer

CODE = RequestCode.GET_TOPIC_STATS_INFO


def echo_topic(request: Request[Any]) -> bytes:
    return encode_response(request, body=request.head.fields.topic.encode())


def requests_for(*topics: str) -> list[OutgoingRequest]:
    return [OutgoingRequest(CODE, TopicHeader(topic=topic)) for topic in topics]


@pytest.mark.parametrize("chunk_bytes", [0, 1, 7])
def test_a_response_is_read_from_chunks_of_any_size(chunk_bytes: int) -> None:
    body = random.Random(1).randbytes(10_000)
    with (
        ScriptedServer(
            lambda request: encode_response(request, body=body), chunk_bytes=chunk_bytes
        ) as server,
        SyncConnection(server.address) as connection,
    ):
        response = connection.call(RequestCode.GET_BROKER_RUNTIME_INFO)
    assert (response.code, response.body) == (ResponseCode.SUCCESS, body)


def test_call_many_returns_responses_in_the_order_of_the_requests() -> None:
    """The server responds to three requests at a time, to the last one first."""
    held: list[bytes] = []

    def respond(request: Request[Any]) -> bytes:
        held.insert(0, echo_topic(request))
        if len(held) < 3:
            return b""
        data = b"".join(held)
        held.clear()
        return data

    topics = [f"t{number}" for number in range(12)]
    with ScriptedServer(respond) as server, SyncConnection(server.address) as connection:
        responses = list(connection.call_many(requests_for(*topics), window=3))
    assert [bytes(response.body).decode() for response in responses] == topics


def test_call_many_has_at_most_a_window_of_requests_unanswered() -> None:
    taken: list[OutgoingRequest] = []

    def requests() -> Any:
        for request in requests_for(*(f"t{number}" for number in range(10))):
            taken.append(request)
            yield request

    with ScriptedServer(echo_topic) as server, SyncConnection(server.address) as connection:
        responses = connection.call_many(requests(), window=4)
        next(responses)
        assert len(taken) == 4


def test_call_many_yields_refusals_as_responses() -> None:
    def respond(request: Request[Any]) -> bytes:
        if request.head.fields.topic == "unknown":
            return encode_response(request, code=ResponseCode.TOPIC_NOT_EXIST, remark="no topic")
        return echo_topic(request)

    with ScriptedServer(respond) as server, SyncConnection(server.address) as connection:
        codes = [
            response.code for response in connection.call_many(requests_for("a", "unknown", "b"))
        ]
    assert codes == [0, ResponseCode.TOPIC_NOT_EXIST, 0]


def test_responses_of_an_abandoned_call_many_are_dropped() -> None:
    with ScriptedServer(echo_topic) as server, SyncConnection(server.address) as connection:
        responses = connection.call_many(requests_for("a", "b", "c"), window=3)
        next(responses)
        responses.close()  # type: ignore[attr-defined]  # a generator, declared as an iterator
        assert connection.call(CODE, TopicHeader(topic="d")).body == b"d"


def test_a_refusal_raises_with_the_remark_of_the_broker() -> None:
    def respond(request: Request[Any]) -> bytes:
        return encode_response(request, code=ResponseCode.NO_PERMISSION, remark="not allowed")

    with ScriptedServer(respond) as server, SyncConnection(server.address) as connection:
        with pytest.raises(RequestRefused, match="not allowed") as refused:
            connection.call(CODE, TopicHeader(topic="a"))
        assert refused.value.code == ResponseCode.NO_PERMISSION


def test_an_unknown_request_is_named() -> None:
    def respond(request: Request[Any]) -> bytes:
        return encode_response(request, code=ResponseCode.REQUEST_CODE_NOT_SUPPORTED)

    with (
        ScriptedServer(respond) as server,
        SyncConnection(server.address) as connection,
        pytest.raises(UnknownRequest, match="LIST_TRANSACTIONS"),
    ):
        connection.call(RequestCode.LIST_TRANSACTIONS)


def test_bodies_are_received_into_the_buffer_of_the_caller() -> None:
    bodies = [random.Random(size).randbytes(size) for size in (0, 1, 5_000, 300_000)]

    def respond(request: Request[Any]) -> bytes:
        return encode_response(request, body=bodies[int(request.head.fields.topic)])

    with ScriptedServer(respond) as server, SyncConnection(server.address) as connection:
        opaques = [connection.send(CODE, TopicHeader(topic=str(n))) for n in range(len(bodies))]
        for opaque, body in zip(opaques, bodies, strict=True):
            command, body_bytes = connection.receive_head()
            buffer = bytearray(body_bytes)
            connection.receive_into(memoryview(buffer))
            assert (command.opaque, bytes(buffer)) == (opaque, body)


def test_a_body_is_sent_in_parts() -> None:
    parts = [b"a" * 10, b"b" * 100_000, b"c" * 100_000]
    with (
        ScriptedServer(lambda request: encode_response(request, body=request.body)) as server,
        SyncConnection(server.address) as connection,
    ):
        opaque = connection.send(RequestCode.UPDATE_BROKER_CONFIG, None, parts)
        received_opaque, response = connection.receive()
    assert (received_opaque, response.body) == (opaque, b"".join(parts))


def test_a_signature_covers_all_parts_of_a_body() -> None:
    access = Access(access_key="billing", secret_key="secret-of-billing")

    def frame(*parts: bytes) -> bytes:
        connection = Connection(sign=access.signer())
        _, frame_parts = connection.call_in_parts(CODE, None, parts, deadline_s=1.0)
        return b"".join(frame_parts)

    assert frame(b"x=1", b"y=2") == frame(b"x=1y=2")
    assert frame(b"x=1", b"y=2") != frame(b"x=1", b"y=3")


def test_requests_of_the_broker_are_skipped() -> None:
    notification = Connection().send_oneway(
        RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "g"}, b"body"
    )
    with (
        ScriptedServer(lambda request: notification + echo_topic(request)) as server,
        SyncConnection(server.address) as connection,
    ):
        assert connection.call(CODE, TopicHeader(topic="a")).body == b"a"


def test_call_is_refused_while_sends_are_unanswered() -> None:
    with ScriptedServer(echo_topic) as server, SyncConnection(server.address) as connection:
        connection.send(CODE, TopicHeader(topic="a"))
        with pytest.raises(LocalProtocolError):
            connection.call(CODE, TopicHeader(topic="b"))
        connection.receive()
        assert connection.call(CODE, TopicHeader(topic="b")).body == b"b"


def test_a_connection_that_closes_before_the_response_leaves_the_outcome_unknown() -> None:
    with ScriptedServer(lambda request: None) as server:
        connection = SyncConnection(server.address)
        with pytest.raises(OutcomeUnknown, match="closed the connection"):
            connection.call(CODE, TopicHeader(topic="a"))
        with pytest.raises(NotSent, match="is closed"):
            connection.call(CODE, TopicHeader(topic="a"))


def test_no_response_in_time_leaves_the_outcome_unknown() -> None:
    with (
        ScriptedServer(lambda request: b"") as server,
        SyncConnection(server.address, timeout_s=0.05) as connection,
        pytest.raises(OutcomeUnknown, match=r"no response to GET_TOPIC_STATS_INFO in 0.05 s"),
    ):
        connection.call(CODE, TopicHeader(topic="a"))


@pytest.mark.parametrize(
    "garbage",
    [
        b"HTTP/1.1 400 Bad Request\r\n",  # the length is too large
        b"\0\0\0\3\0\0\0\0",  # the frame is too short for the length of a header
        b"\0\0\0\x10\0\0\0\x20",  # the header is longer than its frame
        b"\0\0\0\x10\7\0\0\4",  # the serializer is unknown
        b"\0\0\0\x08\0\0\0\4none",  # the header is not JSON
    ],
)
def test_another_protocol_is_recognised(garbage: bytes) -> None:
    with (
        ScriptedServer(lambda request: garbage) as server,
        SyncConnection(server.address) as connection,
        pytest.raises(OutcomeUnknown, match="does not speak the remoting protocol"),
    ):
        connection.call(CODE, TopicHeader(topic="a"))


@pytest.mark.parametrize("address", ["", "host", "host:", ":9876", "host:0", "host:65536", "h:x"])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(NotSent, match="is not an address"):
        SyncConnection(address)


# --- servers that lie ----------------------------------------------------------------------------


class TickingClock(ManualClock):
    """A clock on which a second passes each time it is read."""

    def elapsed_s(self) -> float:
        self.advance(ms=1000)
        return super().elapsed_s()


def test_a_response_that_comes_byte_by_byte_does_not_take_for_ever() -> None:
    def respond(request: Request[Any]) -> bytes:
        return encode_response(request, body=bytes(200_000))

    with (
        ScriptedServer(respond, chunk_bytes=1) as server,
        SyncConnection(server.address, clock=TickingClock()) as connection,
        pytest.raises(OutcomeUnknown, match="no response"),
    ):
        connection.call(CODE, TopicHeader(topic="t"))


def test_a_server_that_only_asks_does_not_take_for_ever() -> None:
    def respond(request: Request[Any]) -> bytes:
        client = Connection()
        return b"".join(client.send_oneway(CODE, TopicHeader(topic="t")) for _ in range(10_000))

    with (
        ScriptedServer(respond) as server,
        SyncConnection(server.address, clock=TickingClock()) as connection,
        pytest.raises(OutcomeUnknown),
    ):
        connection.call(CODE, TopicHeader(topic="t"))


@pytest.mark.parametrize("host", ["a..b", "x" * 300, "\ud800", "a\0b"])
def test_an_impossible_host_cannot_be_reached(host: str) -> None:
    with pytest.raises(NotSent):
        SyncConnection(f"{host}:1")
