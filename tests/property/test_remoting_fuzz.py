"""Valid streams, damaged: bits flipped, pieces cut out, doubled, spliced in from elsewhere.

Whatever arrives, a Connection gives events, or raises a RemoteProtocolError once and for ever; a
request that cannot be read can still be answered. HYPOTHESIS_PROFILE=long makes it a night's work.
"""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import BrokenBody, RemoteProtocolError
from escrowmq.message.batch import decode_batch
from escrowmq.parsing import parse_lenient_json
from escrowmq.remoting import bodies
from escrowmq.remoting import responses as answers
from escrowmq.remoting.codes import FLAG_RESPONSE
from escrowmq.remoting.command import Command, encode_command
from escrowmq.remoting.connection import Connection, InvalidRequest
from escrowmq.remoting.frame import encode_frame
from escrowmq.remoting.headers import encode_header
from escrowmq.remoting.requests import REQUESTS, Request
from tests.support.remoting_strategies import headers_of, int32, split_stream

FRAME_LENGTH_MAX = 4_096

payloads = st.one_of(
    st.binary(max_size=60),
    st.just(b'{"clientID":"c","consumerDataSet":[{"groupName":"g","messageModel":1}]}'),
    st.just(b'{"brokerDatas":[{"brokerName":"a","brokerAddrs":{0:"x:1"}}],"queueDatas":[]}'),
)


@st.composite
def valid_frames(draw: st.DrawFn) -> bytes:
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
    stream = bytearray(b"".join(draw(st.lists(valid_frames(), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(0, 5))):
        begin = draw(st.integers(0, len(stream)))
        end = min(len(stream), begin + draw(st.integers(0, 20)))
        match draw(st.sampled_from(["flip", "cut", "double", "splice", "truncate"])):
            case "flip" if begin < len(stream):
                stream[begin] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del stream[begin:end]
            case "double":
                stream[begin:begin] = stream[begin:end]
            case "splice":
                stream[begin:end] = draw(st.binary(max_size=20))
            case "truncate":
                del stream[max(begin, len(stream) // 2) :]
    return bytes(stream)


@given(damaged_streams(), st.data())
def test_a_connection_survives_anything(stream: bytes, data: st.DataObject) -> None:
    line = Connection(frame_length_max=FRAME_LENGTH_MAX)
    outstanding, _ = line.call(34, deadline_s=1.0)
    failure = None
    try:
        for chunk in data.draw(split_stream(stream)):
            line.receive(chunk)
            handle_all(line)
    except RemoteProtocolError as error:
        failure = error
    if failure is not None:
        with pytest.raises(RemoteProtocolError) as again:
            line.receive(b"more")
        assert again.value is failure
    assert {failed.call for failed in line.close()} <= {outstanding}


def handle_all(line: Connection) -> None:
    for event in line.events():
        match event:
            case Request():
                answers.encode_response(event, remark=event.head.remark)
                read_body(event.body)
            case InvalidRequest(request=request, error=error):
                assert error.remark
                answers.encode_error(request, error)


def read_body(body: bytes | memoryview) -> None:
    for kind in (bodies.Heartbeat, bodies.TopicRoute):
        with contextlib.suppress(BrokenBody):
            bodies.encode_body(bodies.decode_body(kind, body))
    with contextlib.suppress(BrokenBody):
        decode_batch(body)
    with contextlib.suppress(BrokenBody):
        parse_lenient_json(body)
