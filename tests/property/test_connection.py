"""Two connected endpoints against a model: every call ends once, with the response to that call.

The network delivers the written bytes in chunks of any size. Either endpoint sends requests,
responds in any order or never, lets calls expire and cancels them. The model is a dictionary of
the open calls.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from escrowmq.errors import NotSent
from escrowmq.remoting import responses
from escrowmq.remoting.codes import JSON, ROCKETMQ, RequestCode
from escrowmq.remoting.connection import Call, Connection, Response, UnmatchedResponse
from escrowmq.remoting.headers import QueueHeader
from escrowmq.remoting.requests import Request

CALLS_MAX = 3
ONE_WAY_TOPIC = "one way"
endpoints = st.integers(0, 1)


class ConnectionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.connections = [
            Connection(calls_max=CALLS_MAX, serializer=serializer)
            for serializer in (JSON, ROCKETMQ)
        ]
        # Each list has one element per endpoint.
        self.in_transit = [b"", b""]  # bytes on the way to this endpoint
        self.requests: list[list[Request[Any]]] = [[], []]  # received and not answered yet
        self.open_calls: list[dict[int, Call]] = [{}, {}]  # by call number
        self.call_count = 0
        self.now_s = 0.0

    @rule(endpoint=endpoints, timeout_s=st.integers(1, 5))
    def call(self, endpoint: int, timeout_s: int) -> None:
        self.call_count += 1
        # The queue id carries the number of the call, which the response returns in its body.
        fields = QueueHeader(topic="t", queue_id=self.call_count)
        try:
            call, data = self.connections[endpoint].call(
                RequestCode.GET_MAX_OFFSET, fields, deadline_s=self.now_s + timeout_s
            )
        except NotSent:
            assert len(self.open_calls[endpoint]) == CALLS_MAX
            return
        assert len(self.open_calls[endpoint]) < CALLS_MAX
        assert all(call.opaque != other.opaque for other in self.open_calls[endpoint].values())
        self.open_calls[endpoint][self.call_count] = call
        self.in_transit[1 - endpoint] += data

    @rule(endpoint=endpoints)
    def send_oneway(self, endpoint: int) -> None:
        fields = QueueHeader(topic=ONE_WAY_TOPIC, queue_id=0)
        data = self.connections[endpoint].send_oneway(RequestCode.GET_MAX_OFFSET, fields)
        self.in_transit[1 - endpoint] += data

    @rule(endpoint=endpoints, count=st.integers(1, 300))
    def deliver(self, endpoint: int, count: int) -> None:
        data = self.in_transit[endpoint]
        self.in_transit[endpoint] = data[count:]
        self.connections[endpoint].receive(data[:count])
        for event in self.connections[endpoint].events():
            match event:
                case Request():
                    self.requests[endpoint].append(event)
                case Response(call=call, body=body):
                    assert self.open_calls[endpoint].pop(int(bytes(body))) is call
                case UnmatchedResponse(body=body):
                    assert int(bytes(body)) not in self.open_calls[endpoint]
                case _:
                    raise AssertionError(event)

    @precondition(lambda self: any(self.requests))
    @rule(endpoint=endpoints, data=st.data())
    def respond(self, endpoint: int, data: st.DataObject) -> None:
        requests = self.requests[endpoint]
        if not requests:
            return
        request = requests.pop(data.draw(st.integers(0, len(requests) - 1)))
        encoded = responses.encode_response(request, body=b"%d" % request.head.fields.queue_id)
        assert bool(encoded) != (request.head.fields.topic == ONE_WAY_TOPIC)
        self.in_transit[1 - endpoint] += encoded

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds
        for connection, open_calls in zip(self.connections, self.open_calls, strict=True):
            due_calls = {
                number: call for number, call in open_calls.items() if call.deadline_s <= self.now_s
            }
            failures = connection.expire(now_s=self.now_s)
            assert {failure.call.opaque for failure in failures} == {
                call.opaque for call in due_calls.values()
            }
            for number in due_calls:
                del open_calls[number]

    @precondition(lambda self: self.open_calls[0])
    @rule()
    def cancel(self) -> None:
        _, call = self.open_calls[0].popitem()
        self.connections[0].cancel(call)

    @invariant()
    def pending_calls_are_the_open_calls(self) -> None:
        for connection, open_calls in zip(self.connections, self.open_calls, strict=True):
            assert connection.pending_calls == len(open_calls)

    def teardown(self) -> None:
        for connection, open_calls in zip(self.connections, self.open_calls, strict=True):
            failures = connection.close()
            assert {failure.call.opaque for failure in failures} == {
                call.opaque for call in open_calls.values()
            }


TestConnection = ConnectionMachine.TestCase
