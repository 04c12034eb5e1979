"""Damaged streams of requests: flipped bits, and bytes that are removed, repeated or replaced.

Whatever arrives, a Connection returns events or raises a RemoteProtocolError, and then raises it
for all later bytes too. A request that cannot be decoded still gets a response.
HYPOTHESIS_PROFILE=long runs many more examples.
"""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import BrokenBody, RemoteProtocolError
from escrowmq.message.batch import decode_batch
from escrowmq.parsing import parse_lenient_json
from escrowmq.remoting import bodies, responses
from escrowmq.remoting.codes import FLAG_RESPONSE
from escrowmq.remoting.command import Command, encode_command
from escrowmq.remoting.connection import Connection, InvalidRequest
from escrowmq.remoting.frame import encode_frame
from escrowmq.remoting.headers import encode_header
from escrowmq.remoting.requests import REQUESTS, Request
from tests.support.remoting_strategies import cut, headers_of, int32

FRAME_LENGTH_MAX = 4_096

payloads = st.one_of(
    st.binary(max_size=60),
    st.just(b'{"clientID":"c","consumerDataSet":[{"groupName":"g","messageModel":1}]}'),
    st.just(b'{"brokerDatas":[{"brokerName":"a","brokerAddrs":{0:"x:1"}}],"queueDatas":[]}'),
)


@st.composite
def valid_frames(draw: st.DrawFn) -> bytes:
    """Draw an encoded frame with a request or a response."""
    code = draw(st.sampled_from(sorted(REQUESTS)))
    serializer = draw(st.integers(0, 1)) if code < 32_768 else 0
    command = Command(
        code=code,
        opaque=draw(int32),
        flag=draw(st.sampled_from([0, 0, 2, FLAG_RESPONSE])),
        ext_fields=encode_header(draw(headers_of(REQUESTS[code].request))),
    )
    return encode_frame(serializer, encode_command(command, serializer), draw(payloads))


@st.composite
def damaged_streams(draw: st.DrawFn) -> bytes:
    """Draw a few frames, with up to five places of damage."""
    stream = bytearray(b"".join(draw(st.lists(valid_frames(), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(0, 5))):
        begin = draw(st.integers(0, len(stream)))
        end = min(len(stream), begin + draw(st.integers(0, 20)))
        match draw(st.sampled_from(["flip", "remove", "repeat", "replace", "truncate"])):
            case "flip" if begin < len(stream):
                stream[begin] ^= 1 << draw(st.integers(0, 7))
            case "remove":
                del stream[begin:end]
            case "repeat":
                stream[begin:begin] = stream[begin:end]
            case "replace":
                stream[begin:end] = draw(st.binary(max_size=20))
            case "truncate":
                del stream[max(begin, len(stream) // 2) :]
    return bytes(stream)


@given(damaged_streams(), st.data())
def test_a_damaged_stream_gives_events_or_a_lasting_protocol_error(
    stream: bytes, data: st.DataObject
) -> None:
    connection = Connection(frame_length_max=FRAME_LENGTH_MAX)
    open_call, _ = connection.call(34, deadline_s=1.0)
    failure = None
    try:
        for chunk in data.draw(cut(stream)):
            connection.receive(chunk)
            handle_all(connection)
    except RemoteProtocolError as error:
        failure = error
    if failure is not None:
        with pytest.raises(RemoteProtocolError) as second_error:
            connection.receive(b"more")
        assert second_error.value is failure
    assert {failed_call.call for failed_call in connection.close()} <= {open_call}


def handle_all(connection: Connection) -> None:
    """Decode the body of each request and encode a response to it."""
    for event in connection.events():
        match event:
            case Request():
                responses.encode_response(event, remark=event.head.remark)
                decode_body_in_every_way(event.body)
            case InvalidRequest(request=request, error=error):
                assert error.remark
                responses.encode_error(request, error)


def decode_body_in_every_way(body: bytes | memoryview) -> None:
    """Assert that each decoder returns a value or raises BrokenBody."""
    for body_type in (bodies.Heartbeat, bodies.TopicRoute):
        with contextlib.suppress(BrokenBody):
            bodies.encode_body(bodies.decode_body(body_type, body))
    with contextlib.suppress(BrokenBody):
        decode_batch(body)
    with contextlib.suppress(BrokenBody):
        parse_lenient_json(body)
