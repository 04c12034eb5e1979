"""Frames are decoded the same however the network splits the stream, with little memory."""

from __future__ import annotations

import tracemalloc
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import RemoteProtocolError
from escrowmq.remoting.frame import Frame, FrameDecoder, encode_frame
from tests.support.remoting_strategies import bodies, cut

FrameValues = tuple[int, bytes, bytes]

frames = st.tuples(st.integers(0, 1), bodies, bodies)


def read_frames(decoder: FrameDecoder[Frame]) -> list[FrameValues]:
    return [(frame.serializer, frame.header, bytes(frame.body)) for frame in decoder.frames()]


@given(st.lists(frames, max_size=5), st.data())
def test_a_split_stream_is_decoded_into_the_same_frames(
    sent_frames: list[FrameValues], data: st.DataObject
) -> None:
    stream = b"".join(encode_frame(*frame) for frame in sent_frames)
    decoder = FrameDecoder(Frame)
    received_frames: list[FrameValues] = []
    for chunk in data.draw(cut(stream)):
        decoder.receive(chunk)
        received_frames += read_frames(decoder)
    assert received_frames == sent_frames
    assert decoder.buffered_bytes == 0


@given(st.lists(frames, min_size=1, max_size=3), bodies)
def test_each_frame_is_returned_with_its_last_byte(
    sent_frames: list[FrameValues], incomplete_header: bytes
) -> None:
    encoded_frames = [encode_frame(*frame) for frame in sent_frames]
    stream = b"".join(encoded_frames) + encode_frame(0, incomplete_header)[:-1]
    frame_ends = list(accumulate(map(len, encoded_frames)))
    decoder = FrameDecoder(Frame)
    received_ends = []
    for position in range(len(stream)):
        decoder.receive(stream[position : position + 1])
        if read_frames(decoder):
            received_ends.append(position + 1)
    assert received_ends == frame_ends


@given(st.binary(max_size=200), st.data())
def test_garbage_raises_the_same_error_wherever_it_is_split(
    garbage: bytes, data: st.DataObject
) -> None:
    outcomes = []
    for chunks in ([garbage], data.draw(cut(garbage))):
        decoder = FrameDecoder(Frame, frame_length_max=64)
        received_frames: list[FrameValues] = []
        error_text = ""
        try:
            for chunk in chunks:
                decoder.receive(chunk)
                for frame in decoder.frames():
                    received_frames.append((frame.serializer, frame.header, bytes(frame.body)))
        except RemoteProtocolError as error:
            error_text = repr(error)
        if error_text:
            with pytest.raises(RemoteProtocolError) as second_error:
                decoder.receive(b"more")
            assert repr(second_error.value) == error_text
        outcomes.append((received_frames, error_text))
    assert outcomes[0] == outcomes[1]


@given(st.binary(max_size=400), st.integers(1, 16))
def test_at_most_one_frame_is_buffered(stream: bytes, chunk_size: int) -> None:
    decoder = FrameDecoder(Frame, frame_length_max=100)
    try:
        for position in range(0, len(stream), chunk_size):
            decoder.receive(stream[position : position + chunk_size])
            read_frames(decoder)
            assert decoder.buffered_bytes <= 104
    except RemoteProtocolError:
        assert decoder.buffered_bytes == 0


def test_a_large_frame_in_small_chunks_needs_little_more_than_its_size() -> None:
    body = b"b" * 4_000_000
    stream = encode_frame(0, b"{}", body)
    chunks = [stream[position : position + 1_000] for position in range(0, len(stream), 1_000)]
    decoder = FrameDecoder(Frame)
    tracemalloc.start()
    try:
        for chunk in chunks:
            decoder.receive(chunk)
            for frame in decoder.frames():
                assert frame.body == memoryview(body)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1.25 * len(stream)  # a bytearray grows by an eighth at a time
