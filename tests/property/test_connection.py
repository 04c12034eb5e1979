"""Two ends of a line against a model: every call ends once, and with the answer meant for it.

The network delivers what was written, in pieces of any size; either end asks, answers in any
order or never, lets calls expire, forgets them. The model is a dictionary of what is open.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from escrowmq.errors import NotSent
from escrowmq.remoting import responses as answers
from escrowmq.remoting.codes import JSON, ROCKETMQ, RequestCode
from escrowmq.remoting.connection import Call, Connection, Response, UnmatchedResponse
from escrowmq.remoting.headers import QueueHeader
from escrowmq.remoting.requests import Request

CALLS_MAX = 3
ends = st.integers(0, 1)


class Line(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.lines = [
            Connection(calls_max=CALLS_MAX, serializer=serializer)
            for serializer in (JSON, ROCKETMQ)
        ]
        self.flying = [b"", b""]  # on the way to this end
        self.asked: list[list[Request[Any]]] = [[], []]  # at this end, not yet answered
        self.open: list[dict[int, tuple[Call, int]]] = [{}, {}]  # token -> call, of this end
        self.tokens = 0
        self.now_s = 0.0

    @rule(end=ends, patience_s=st.integers(1, 5))
    def call(self, end: int, patience_s: int) -> None:
        self.tokens += 1
        fields = QueueHeader(topic="t", queue_id=self.tokens)
        try:
            call, data = self.lines[end].call(
                RequestCode.GET_MAX_OFFSET, fields, deadline_s=self.now_s + patience_s
            )
        except NotSent:
            assert len(self.open[end]) == CALLS_MAX
            return
        assert len(self.open[end]) < CALLS_MAX
        assert all(call.opaque != other.opaque for other, _ in self.open[end].values())
        self.open[end][self.tokens] = (call, self.tokens)
        self.flying[1 - end] += data

    @rule(end=ends)
    def post(self, end: int) -> None:
        fields = QueueHeader(topic="one way", queue_id=0)
        self.flying[1 - end] += self.lines[end].send_oneway(RequestCode.GET_MAX_OFFSET, fields)

    @rule(end=ends, count=st.integers(1, 300))
    def deliver(self, end: int, count: int) -> None:
        data, self.flying[end] = self.flying[end][:count], self.flying[end][count:]
        self.lines[end].receive(data)
        for event in self.lines[end].events():
            match event:
                case Request():
                    self.asked[end].append(event)
                case Response(call=call, body=body):
                    known, token = self.open[end].pop(int(bytes(body)))
                    assert known is call
                    assert token == int(bytes(body))
                case UnmatchedResponse(body=body):
                    assert int(bytes(body)) not in self.open[end]
                case _:
                    raise AssertionError(event)

    @rule(end=ends, data=st.data())
    def reply(self, end: int, data: st.DataObject) -> None:
        if not self.asked[end]:
            return
        request = self.asked[end].pop(data.draw(st.integers(0, len(self.asked[end]) - 1)))
        written = answers.encode_response(request, body=b"%d" % request.head.fields.queue_id)
        assert bool(written) != (request.head.fields.topic == "one way")
        self.flying[1 - end] += written

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds
        for end in (0, 1):
            failed = {one.call.opaque for one in self.lines[end].expire(now_s=self.now_s)}
            due = {
                token: call
                for token, (call, _) in self.open[end].items()
                if call.deadline_s <= self.now_s
            }
            assert failed == {call.opaque for call in due.values()}
            for token in due:
                del self.open[end][token]

    @precondition(lambda self: self.open[0])
    @rule()
    def forget(self) -> None:
        _, (call, _) = self.open[0].popitem()
        self.lines[0].cancel(call)

    @invariant()
    def what_waits_is_what_is_open(self) -> None:
        for end in (0, 1):
            assert self.lines[end].pending_calls == len(self.open[end])

    def teardown(self) -> None:
        for end in (0, 1):
            failed = {one.call.opaque for one in self.lines[end].close()}
            assert failed == {call.opaque for call, _ in self.open[end].values()}


TestLine = Line.TestCase
