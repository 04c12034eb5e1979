"""However the network cuts the stream, the same frames come out, and little is held meanwhile."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import RemoteProtocolError
from escrowmq.remoting.frame import Frame, FrameDecoder, encode_frame
from tests.support.remoting_strategies import bodies, split_stream

Plain = tuple[int, bytes, bytes]

frames = st.tuples(st.integers(0, 1), bodies, bodies)


def drain(reader: FrameDecoder[Frame]) -> list[Plain]:
    return [(frame.serializer, frame.header, bytes(frame.body)) for frame in reader.frames()]


@given(st.lists(frames, max_size=5), st.data())
def test_chunk_boundaries_do_not_matter(sent: list[Plain], data: st.DataObject) -> None:
    stream = b"".join(encode_frame(*frame) for frame in sent)
    reader = FrameDecoder(Frame)
    got: list[Plain] = []
    for chunk in data.draw(split_stream(stream)):
        reader.receive(chunk)
        got += drain(reader)
    assert got == sent
    assert reader.buffered_bytes == 0


@given(st.lists(frames, min_size=1, max_size=3), bodies)
def test_byte_by_byte_gives_each_frame_with_its_last_byte(
    sent: list[Plain], beginning: bytes
) -> None:
    stream = b"".join(encode_frame(*frame) for frame in sent) + encode_frame(0, beginning)[:-1]
    ends = {
        len(b"".join(encode_frame(*frame) for frame in sent[: n + 1])) for n in range(len(sent))
    }
    reader, got_at = FrameDecoder(Frame), set()
    for at in range(len(stream)):
        reader.receive(stream[at : at + 1])
        if drain(reader):
            got_at.add(at + 1)
    assert got_at == ends


@given(st.binary(max_size=200), st.data())
def test_garbage_is_a_remote_error_wherever_it_is_cut(garbage: bytes, data: st.DataObject) -> None:
    outcomes = []
    for chunks in ([garbage], data.draw(split_stream(garbage))):
        reader = FrameDecoder(Frame, frame_length_max=64)
        got: list[Plain] = []
        failure = ""
        try:
            for chunk in chunks:
                reader.receive(chunk)
                for frame in reader.frames():
                    got.append((frame.serializer, frame.header, bytes(frame.body)))
        except RemoteProtocolError as error:
            failure = repr(error)
        if failure:
            with pytest.raises(RemoteProtocolError) as again:
                reader.receive(b"more")
            assert repr(again.value) == failure
        outcomes.append((got, failure))
    assert outcomes[0] == outcomes[1]


@given(st.binary(max_size=400), st.integers(1, 16))
def test_no_more_than_a_frame_is_ever_held(stream: bytes, chunk_size: int) -> None:
    reader = FrameDecoder(Frame, frame_length_max=100)
    try:
        for at in range(0, len(stream), chunk_size):
            reader.receive(stream[at : at + chunk_size])
            drain(reader)
            assert reader.buffered_bytes <= 104
    except RemoteProtocolError:
        assert reader.buffered_bytes == 0


def test_a_large_frame_in_small_chunks_costs_its_own_size() -> None:
    body = b"b" * 4_000_000
    stream = encode_frame(0, b"{}", body)
    chunks = [stream[at : at + 1_000] for at in range(0, len(stream), 1_000)]
    reader = FrameDecoder(Frame)
    tracemalloc.start()
    try:
        for chunk in chunks:
            reader.receive(chunk)
            for frame in reader.frames():
                assert frame.body == memoryview(body)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1.25 * len(stream)  # a bytearray grows by an eighth at a time
