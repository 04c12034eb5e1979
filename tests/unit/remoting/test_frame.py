"""Frames byte by byte: what is refused and how early, and what is not copied."""

from __future__ import annotations

import pytest

from escrowmq.errors import (
    FrameTooLong,
    HeaderTooLong,
    LocalProtocolError,
    RemoteProtocolError,
    UnknownSerializer,
)
from escrowmq.remoting.codes import JSON, ROCKETMQ
from escrowmq.remoting.frame import (
    FRAME_LENGTH_MAX,
    Frame,
    FrameDecoder,
    encode_frame,
    frame_prefix,
)


def frames_of(decoder: FrameDecoder[Frame], chunk: bytes) -> list[Frame]:
    decoder.receive(chunk)
    return list(decoder.frames())


def test_a_frame_has_the_known_bytes() -> None:
    assert encode_frame(ROCKETMQ, b"head", b"body") == bytes.fromhex(
        "0000000c 01000004 68656164 626f6479"
    )


def test_a_body_inside_one_chunk_is_a_view_of_it() -> None:
    chunk = encode_frame(JSON, b"{}", b"first") + encode_frame(JSON, b"{}", b"second")
    bodies = [frame.body for frame in frames_of(FrameDecoder(Frame), chunk)]
    assert [bytes(body) for body in bodies] == [b"first", b"second"]
    assert all(body.obj is chunk for body in bodies)


def test_the_views_of_a_frame_that_spans_chunks_are_read_only() -> None:
    stream = encode_frame(JSON, b"{}", b"body")
    decoder = FrameDecoder(Frame)
    assert frames_of(decoder, stream[:11]) == []
    (frame,) = frames_of(decoder, stream[11:])
    assert bytes(frame.body) == b"body"
    assert frame.body.readonly


def test_a_frame_after_one_that_spanned_chunks_is_not_copied() -> None:
    stream = encode_frame(JSON, b"{}", b"first") + encode_frame(JSON, b"{}", b"second")
    decoder = FrameDecoder(Frame)
    frames_of(decoder, stream[:3])
    second_chunk = stream[3:]
    _, second = frames_of(decoder, second_chunk)
    assert second.body.obj is second_chunk


def test_an_empty_frame_has_an_empty_header_and_body() -> None:
    (frame,) = frames_of(FrameDecoder(Frame), bytes.fromhex("00000004 00000000"))
    assert (frame.serializer, frame.header, bytes(frame.body)) == (JSON, b"", b"")


@pytest.mark.parametrize(
    ("beginning", "error"),
    [
        ("00fffffd", FrameTooLong),
        ("ffffffff", FrameTooLong),
        ("00000003", FrameTooLong),
        ("00000000", FrameTooLong),
        ("00000010 0000000d", HeaderTooLong),
        ("00000010 02000004", UnknownSerializer),
        ("00000010 ff000004", UnknownSerializer),
        ("16030100", FrameTooLong),  # a TLS handshake
        ("47455420", FrameTooLong),  # "GET "
    ],
)
@pytest.mark.parametrize("step", [1, 3, 100])
def test_an_invalid_frame_is_refused_as_soon_as_its_prefix_is_complete(
    beginning: str, error: type[RemoteProtocolError], step: int
) -> None:
    stream = bytes.fromhex(beginning)
    decoder = FrameDecoder(Frame)
    last = (len(stream) - 1) // step * step
    for index in range(0, last, step):
        frames_of(decoder, stream[index : index + step])
    with pytest.raises(error):
        frames_of(decoder, stream[last:])
    assert decoder.buffered_bytes == 0


def test_the_longest_frame_is_accepted_and_one_byte_more_is_not() -> None:
    decoder = FrameDecoder(Frame, frame_length_max=16)
    assert frames_of(decoder, encode_frame(JSON, b"12345678", b"body"))
    with pytest.raises(FrameTooLong):
        frames_of(decoder, encode_frame(JSON, b"123456789", b"body"))
    assert FRAME_LENGTH_MAX + 4 == 16 * 1024 * 1024


def test_frames_before_an_invalid_one_are_returned_first() -> None:
    decoder = FrameDecoder(Frame)
    decoder.receive(encode_frame(JSON, b"{}", b"valid") + bytes.fromhex("00000000 00000000"))
    frames = decoder.frames()
    assert bytes(next(frames).body) == b"valid"
    with pytest.raises(FrameTooLong):
        next(frames)


def test_after_an_error_a_decoder_raises_the_same_error_again() -> None:
    decoder = FrameDecoder(Frame)
    with pytest.raises(FrameTooLong) as first:
        frames_of(decoder, b"\xff" * 8)
    with pytest.raises(FrameTooLong) as second:
        decoder.receive(encode_frame(JSON, b"{}"))
    with pytest.raises(FrameTooLong) as third:
        list(decoder.frames())
    assert first.value is second.value is third.value


def test_a_caller_may_stop_reading_and_continue_later() -> None:
    decoder = FrameDecoder(Frame)
    decoder.receive(encode_frame(JSON, b"1") + encode_frame(JSON, b"2") + encode_frame(JSON, b"3"))
    assert next(decoder.frames()).header == b"1"
    assert [frame.header for frame in decoder.frames()] == [b"2", b"3"]


def test_receiving_before_all_frames_are_read_is_a_local_error() -> None:
    decoder = FrameDecoder(Frame)
    decoder.receive(encode_frame(JSON, b"1"))
    with pytest.raises(LocalProtocolError):
        decoder.receive(b"more")


def test_a_frame_that_would_be_too_long_is_not_encoded() -> None:
    assert frame_prefix(JSON, 4, FRAME_LENGTH_MAX - 8) == bytes.fromhex("00fffffc 00000004")
    with pytest.raises(LocalProtocolError):
        frame_prefix(JSON, 4, FRAME_LENGTH_MAX - 7)
