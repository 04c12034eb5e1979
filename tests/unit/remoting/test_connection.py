"""Two ends of one line, joined by hand: who gets which answer, and what happens without one."""

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


def events(line: Connection, data: bytes) -> list[Event]:
    line.receive(data)
    return list(line.events())


def only_request(line: Connection, data: bytes) -> Request[Any]:
    (request,) = events(line, data)
    assert isinstance(request, Request)
    return request


def only_answer(line: Connection, data: bytes) -> Response:
    (answer,) = events(line, data)
    assert isinstance(answer, Response)
    return answer


@pytest.mark.parametrize("serializer", [JSON, ROCKETMQ])
def test_a_call_gets_its_response(serializer: int) -> None:
    client, server = Connection(serializer=serializer), Connection()
    call, data = client.call(RequestCode.GET_MAX_OFFSET, QUEUE, b"body", deadline_s=3.0)
    request = only_request(server, data)
    assert request.head.fields == QUEUE
    assert bytes(request.body) == b"body"
    assert request.serializer == serializer

    data = responses.encode_response(request, OffsetResponse(offset=42), body=b"back")
    answer = only_answer(client, data)
    assert answer.call is call
    assert answer.command.ext_fields == {"offset": "42"}
    assert bytes(answer.body) == b"back"
    assert client.pending_calls == 0


def test_responses_may_come_in_any_order() -> None:
    client, server = Connection(), Connection()
    calls = [client.call(RequestCode.GET_MAX_OFFSET, QUEUE, deadline_s=3.0) for _ in range(3)]
    requests = events(server, b"".join(data for _, data in calls))
    replies = [
        responses.encode_success(request) for request in requests if isinstance(request, Request)
    ]
    got = events(client, b"".join(reversed(replies)))
    assert [answer.call for answer in got if isinstance(answer, Response)] == [
        call for call, _ in reversed(calls)
    ]


def test_both_ends_may_use_the_same_opaque() -> None:
    client, server = Connection(), Connection()
    ours, data = client.call(RequestCode.GET_MAX_OFFSET, QUEUE, deadline_s=3.0)
    theirs, back = server.call(
        RequestCode.NOTIFY_CONSUMER_IDS_CHANGED,
        ConsumerGroupHeader(consumer_group="g"),
        deadline_s=3.0,
    )
    assert ours.opaque == theirs.opaque
    assert only_request(client, back).head.fields == ConsumerGroupHeader(consumer_group="g")
    request = only_request(server, data)
    assert only_answer(client, responses.encode_success(request)).call is ours
    assert server.pending_calls == 1


def test_a_one_way_request_waits_for_nothing() -> None:
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
    reply = responses.encode_success(only_request(server, data))
    client.cancel(call)
    (stray,) = events(client, reply)
    assert isinstance(stray, UnmatchedResponse)
    assert stray.command.opaque == call.opaque


def test_a_response_that_comes_twice_is_unmatched_the_second_time() -> None:
    client, server = Connection(), Connection()
    _, data = client.call(RequestCode.GET_MAX_OFFSET, QUEUE, deadline_s=3.0)
    reply = responses.encode_success(only_request(server, data))
    first, second = events(client, reply + reply)
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
    failed = client.close()
    assert [one.call for one in failed] == calls
    assert all(one.error.may_have_happened for one in failed)
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


def test_cancelling_a_call_does_not_touch_a_later_one_with_its_opaque() -> None:
    client = Connection(calls_max=1, opaque_max=1)
    first, _ = client.call(RequestCode.GET_MAX_OFFSET, QUEUE, deadline_s=1.0)
    client.expire(now_s=1.0)
    client.send_oneway(RequestCode.GET_MAX_OFFSET, QUEUE)
    second, _ = client.call(RequestCode.GET_MAX_OFFSET, QUEUE, deadline_s=3.0)
    assert second.opaque == first.opaque
    client.cancel(first)
    assert client.pending_calls == 1


def test_a_call_whose_response_was_read_elsewhere_is_not_pending() -> None:
    client = Connection(calls_max=2)
    first, _ = client.call(RequestCode.GET_MAX_OFFSET, QUEUE, deadline_s=3.0)
    second, _ = client.call(RequestCode.GET_MIN_OFFSET, QUEUE, deadline_s=3.0)
    assert client.oldest_call is first
    client.end_call(first.opaque)
    client.end_call(first.opaque)  # there is none any more
    assert client.oldest_call is second
    assert client.close()[0].call is second
    assert client.oldest_call is None


def test_an_unknown_request_and_an_invalid_field_get_a_response() -> None:
    server, client = Connection(), Connection()
    _, unknown = client.call(98765, QUEUE, deadline_s=3.0)
    _, bad = client.call(
        RequestCode.GET_MAX_OFFSET, ConsumerGroupHeader(consumer_group="g"), deadline_s=3
    )
    refusals = events(server, unknown + bad)
    errors, replies = [], b""
    for refused in refusals:
        assert isinstance(refused, InvalidRequest)
        errors.append(type(refused.error))
        replies += responses.encode_error(refused.request, refused.error)
    assert errors == [UnknownRequest, InvalidField]
    codes = [event.command.code for event in events(client, replies) if isinstance(event, Response)]
    assert codes == [ResponseCode.REQUEST_CODE_NOT_SUPPORTED, ResponseCode.SYSTEM_ERROR]


def test_a_refused_one_way_request_gets_no_response() -> None:
    (refused,) = events(Connection(), Connection().send_oneway(98765))
    assert isinstance(refused, InvalidRequest)
    assert responses.encode_error(refused.request, refused.error) == b""


def test_requests_before_a_broken_header_are_returned_before_the_error() -> None:
    server = Connection()
    good = encode_frame(JSON, encode_command(Command(code=34, opaque=1)))
    server.receive(good + encode_frame(JSON, b"{broken") + good)
    stream = server.events()
    assert isinstance(next(stream), Request)
    with pytest.raises(BrokenHeader) as first:
        next(stream)
    with pytest.raises(BrokenHeader) as again:
        server.receive(good)
    assert again.value is first.value
