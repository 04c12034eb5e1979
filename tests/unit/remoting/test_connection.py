"""Two connections whose bytes a test exchanges: calls, responses, deadlines and errors."""

from __future__ import annotations

from typing import Any

import pytest

from escrowmq.errors import BrokenHeader, InvalidField, NotSent, UnknownRequest
from escrowmq.remoting import responses
from escrowmq.remoting.codes import JSON, ROCKETMQ, RequestCode, ResponseCode
from escrowmq.remoting.command import Command, encode_command
from escrowmq.remoting.connection import (
    Connection,
    Event,
    InvalidRequest,
    Response,
    UnmatchedResponse,
)
from escrowmq.remoting.frame import encode_frame
from escrowmq.remoting.headers import (
    CheckTransactionState,
    ConsumerGroupHeader,
    OffsetResponse,
    QueueHeader,
)
from escrowmq.remoting.requests import Request

QUEUE = QueueHeader(topic="orders", queue_id=1)


def events(connection: Connection, data: bytes) -> list[Event]:
    """Let a connection receive bytes, and return its events."""
    connection.receive(data)
    return list(connection.events())


def only_request(connection: Connection, data: bytes) -> Request[Any]:
    (request,) = events(connection, data)
    assert isinstance(request, Request)
    return request


def only_response(connection: Connection, data: bytes) -> Response:
    (response,) = events(connection, data)
    assert isinstance(response, Response)
    return response


@pytest.mark.parametrize("serializer", [JSON, ROCKETMQ])
def test_a_call_gets_its_response(serializer: int) -> None:
    client, server = Connection(serializer=serializer), Connection()
    call, data = client.call(RequestCode.GET_MAX_OFFSET, QUEUE, b"body", deadline_s=3.0)
    request = only_request(server, data)
    assert request.head.fields == QUEUE
    assert bytes(request.body) == b"body"
    assert request.serializer == serializer

    data = responses.encode_response(request, OffsetResponse(offset=42), body=b"response")
    response = only_response(client, data)
    assert response.call is call
    assert response.command.ext_fields == {"offset": "42"}
    assert bytes(response.body) == b"response"
    assert client.pending_calls == 0


def test_responses_may_come_in_any_order() -> None:
    client, server = Connection(), Connection()
    calls = [client.call(RequestCode.GET_MAX_OFFSET, QUEUE, deadline_s=3.0) for _ in range(3)]
    requests = events(server, b"".join(data for _, data in calls))
    encoded = [
        responses.encode_success(request) for request in requests if isinstance(request, Request)
    ]
    received = events(client, b"".join(reversed(encoded)))
    completed = [response.call for response in received if isinstance(response, Response)]
    assert completed == [call for call, _ in reversed(calls)]


def test_both_ends_may_use_the_same_opaque() -> None:
    client, server = Connection(), Connection()
    client_call, client_data = client.call(RequestCode.GET_MAX_OFFSET, QUEUE, deadline_s=3.0)
    server_call, server_data = server.call(
        RequestCode.NOTIFY_CONSUMER_IDS_CHANGED,
        ConsumerGroupHeader(consumer_group="g"),
        deadline_s=3.0,
    )
    assert client_call.opaque == server_call.opaque
    assert only_request(client, server_data).head.fields == ConsumerGroupHeader(consumer_group="g")
    request = only_request(server, client_data)
    assert only_response(client, responses.encode_success(request)).call is client_call
    assert server.pending_calls == 1


def test_a_one_way_request_is_no_pending_call() -> None:
    server, producer = Connection(), Connection()
    check = CheckTransactionState(tran_state_table_offset=1, commit_log_offset=2)
    data = server.send_oneway(RequestCode.CHECK_TRANSACTION_STATE, check, b"half")
    assert server.pending_calls == 0
    request = only_request(producer, data)
    assert request.head.is_oneway
    assert responses.encode_success(request) == b""


def test_a_response_without_a_call_is_unmatched() -> None:
    client, server = Connection(), Connection()
    call, data = client.call(RequestCode.GET_MAX_OFFSET, QUEUE, deadline_s=3.0)
    response_data = responses.encode_success(only_request(server, data))
    client.cancel(call)
    (unmatched,) = events(client, response_data)
    assert isinstance(unmatched, UnmatchedResponse)
    assert unmatched.command.opaque == call.opaque


def test_a_response_that_arrives_twice_is_unmatched_the_second_time() -> None:
    client, server = Connection(), Connection()
    _, data = client.call(RequestCode.GET_MAX_OFFSET, QUEUE, deadline_s=3.0)
    response_data = responses.encode_success(only_request(server, data))
    first, second = events(client, response_data + response_data)
    assert isinstance(first, Response)
    assert isinstance(second, UnmatchedResponse)


def test_calls_expire_at_their_deadline_and_not_before() -> None:
    client = Connection()
    early, _ = client.call(RequestCode.GET_MAX_OFFSET, QUEUE, deadline_s=3.0)
    late, _ = client.call(RequestCode.GET_MIN_OFFSET, QUEUE, deadline_s=5.0)
    assert client.expire(now_s=2.9) == []
    (failed,) = client.expire(now_s=3.0)
    assert failed.call is early
    assert failed.error.may_have_happened
    assert "GET_MAX_OFFSET" in str(failed.error)
    assert [failed.call for failed in client.expire(now_s=9.0)] == [late]
    assert client.pending_calls == 0


def test_closing_fails_every_call_with_outcome_unknown() -> None:
    client = Connection()
    calls = [client.call(RequestCode.GET_MAX_OFFSET, QUEUE, deadline_s=3.0)[0] for _ in range(3)]
    failures = client.close()
    assert [failure.call for failure in failures] == calls
    assert all(failure.error.may_have_happened for failure in failures)
    assert client.close() == []


def test_nothing_is_sent_on_a_closed_connection() -> None:
    client = Connection()
    client.close()
    with pytest.raises(NotSent):
        client.call(RequestCode.GET_MAX_OFFSET, QUEUE, deadline_s=3.0)
    with pytest.raises(NotSent):
        client.send_oneway(RequestCode.GET_MAX_OFFSET, QUEUE)
    assert client.pending_calls == 0


def test_the_number_of_pending_calls_is_limited() -> None:
    client = Connection(calls_max=2)
    first, _ = client.call(RequestCode.GET_MAX_OFFSET, QUEUE, deadline_s=3.0)
    client.call(RequestCode.GET_MAX_OFFSET, QUEUE, deadline_s=3.0)
    with pytest.raises(NotSent):
        client.call(RequestCode.GET_MAX_OFFSET, QUEUE, deadline_s=3.0)
    client.cancel(first)
    client.call(RequestCode.GET_MAX_OFFSET, QUEUE, deadline_s=3.0)


def test_opaques_wrap_to_zero_and_skip_pending_calls() -> None:
    client = Connection(calls_max=3, opaque_max=3)
    first, second, third = (
        client.call(RequestCode.GET_MAX_OFFSET, QUEUE, deadline_s=3.0)[0] for _ in range(3)
    )
    client.cancel(second)
    client.cancel(third)
    fourth, _ = client.call(RequestCode.GET_MAX_OFFSET, QUEUE, deadline_s=3.0)
    fifth, _ = client.call(RequestCode.GET_MAX_OFFSET, QUEUE, deadline_s=3.0)
    assert [first.opaque, fourth.opaque, fifth.opaque] == [0, 3, 1]


def test_cancelling_a_call_does_not_cancel_a_later_one_with_its_opaque() -> None:
    client = Connection(calls_max=1, opaque_max=1)
    first, _ = client.call(RequestCode.GET_MAX_OFFSET, QUEUE, deadline_s=1.0)
    client.expire(now_s=1.0)
    client.send_oneway(RequestCode.GET_MAX_OFFSET, QUEUE)
    second, _ = client.call(RequestCode.GET_MAX_OFFSET, QUEUE, deadline_s=3.0)
    assert second.opaque == first.opaque
    client.cancel(first)
    assert client.pending_calls == 1


def test_a_call_that_was_ended_is_not_pending() -> None:
    """SyncConnection receives responses itself and then ends their calls."""
    client = Connection(calls_max=2)
    first, _ = client.call(RequestCode.GET_MAX_OFFSET, QUEUE, deadline_s=3.0)
    second, _ = client.call(RequestCode.GET_MIN_OFFSET, QUEUE, deadline_s=3.0)
    assert client.oldest_call is first
    client.end_call(first.opaque)
    client.end_call(first.opaque)  # a second call is harmless
    assert client.oldest_call is second
    assert client.close()[0].call is second
    assert client.oldest_call is None


def test_an_unknown_request_and_an_invalid_field_get_a_response() -> None:
    server, client = Connection(), Connection()
    _, unknown = client.call(98765, QUEUE, deadline_s=3.0)
    _, without_fields = client.call(
        RequestCode.GET_MAX_OFFSET, ConsumerGroupHeader(consumer_group="g"), deadline_s=3
    )
    errors, response_data = [], b""
    for invalid in events(server, unknown + without_fields):
        assert isinstance(invalid, InvalidRequest)
        errors.append(type(invalid.error))
        response_data += responses.encode_error(invalid.request, invalid.error)
    assert errors == [UnknownRequest, InvalidField]
    received = events(client, response_data)
    codes = [event.command.code for event in received if isinstance(event, Response)]
    assert codes == [ResponseCode.REQUEST_CODE_NOT_SUPPORTED, ResponseCode.SYSTEM_ERROR]


def test_a_refused_one_way_request_gets_no_response() -> None:
    (invalid,) = events(Connection(), Connection().send_oneway(98765))
    assert isinstance(invalid, InvalidRequest)
    assert responses.encode_error(invalid.request, invalid.error) == b""


def test_requests_before_a_broken_header_are_returned_before_the_error() -> None:
    server = Connection()
    valid = encode_frame(JSON, encode_command(Command(code=34, opaque=1)))
    server.receive(valid + encode_frame(JSON, b"{broken") + valid)
    stream = server.events()
    assert isinstance(next(stream), Request)
    with pytest.raises(BrokenHeader) as first:
        next(stream)
    with pytest.raises(BrokenHeader) as second:
        server.receive(valid)
    assert second.value is first.value
