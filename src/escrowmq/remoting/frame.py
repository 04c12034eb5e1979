"""Split a byte stream into remoting frames, and build frames.

    | length 4 | serializer 1, header length 3 | header | body |

`length` counts all bytes behind it. Pass what the socket received to `receive`, then read `frames`
to the end.

The body of a frame that lies inside one chunk is a view of that chunk. It is not copied, and it
keeps the chunk alive, so a body that is kept for long should be copied. Only a frame that spans
chunks is joined, and each of its bytes is copied once. A decoder holds at most one frame and one
chunk: lengths are checked as soon as they can be read, before anything is collected.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Final, Generic, NoReturn, TypeVar

import msgspec

from escrowmq.errors import (
    FrameTooLong,
    HeaderTooLong,
    LocalProtocolError,
    RemoteProtocolError,
    UnknownSerializer,
)
from escrowmq.remoting.codes import JSON, ROCKETMQ

FRAME_LENGTH_MAX: Final = 16_777_212  # 16 MiB together with the four bytes of `length`
HEADER_LENGTH_MAX: Final = 0xFFFFFF

_PREFIX = struct.Struct(">II")
_LENGTH = struct.Struct(">I")
_EMPTY_VIEW = memoryview(b"")
_MARK_MAX = ROCKETMQ << 24 | HEADER_LENGTH_MAX  # above it, the serializer is unknown


class Frame(msgspec.Struct, frozen=True, gc=False):
    serializer: int
    header: bytes  # a copy, because it is short and will be decoded at once
    body: memoryview


T = TypeVar("T")


class FrameDecoder(Generic[T]):
    """Splits a stream into frames.

    `build` is called with serializer, header and body of every frame, and `frames` yields what it
    returns: a `Frame`, or whatever its reader makes of it without that step in between.

    After a RemoteProtocolError the decoder is unusable and raises the same error again.
    """

    def __init__(
        self,
        build: Callable[[int, bytes, memoryview], T],
        *,
        frame_length_max: int = FRAME_LENGTH_MAX,
        header_length_max: int = HEADER_LENGTH_MAX,
    ) -> None:
        self._build = build
        self._frame_length_max = frame_length_max
        self._header_length_max = header_length_max
        self._failure: RemoteProtocolError | None = None
        self._partial = bytearray()  # the beginning of a frame that spans chunks
        self._chunk = b""
        self._view = _EMPTY_VIEW
        self._position = 0
        self.partial_frames = 0  # frames so far that did not end in the chunk they began in

    def receive(self, chunk: bytes) -> None:
        """Accept the next bytes of the stream. All frames before it must have been read."""
        self._raise_failure()
        if self._position < len(self._chunk):
            raise LocalProtocolError("read frames() to the end before receiving more")
        self._chunk = chunk
        self._view = memoryview(chunk)
        self._position = 0

    def frames(self) -> Iterator[T]:
        """Yield the frames that are complete. Raises RemoteProtocolError."""
        self._raise_failure()
        if self._partial and (joined := self._join()) is not None:
            yield self._build(*joined)
        chunk, view, unpack, build = self._chunk, self._view, _PREFIX.unpack_from, self._build
        end, length_max, header_max = len(chunk), self._frame_length_max, self._header_length_max
        while end - (begin := self._position) >= 8:
            length, mark = unpack(chunk, begin)
            header_length = mark & HEADER_LENGTH_MAX
            if (
                length > length_max
                or header_length > length - 4
                or mark > _MARK_MAX
                or header_length > header_max
            ):
                self._check(length, mark)
            frame_end = begin + 4 + length
            if frame_end > end:
                break
            body_begin = begin + 8 + header_length
            # Before the yield, because the caller may abandon the iterator there.
            self._position = frame_end
            yield build(mark >> 24, chunk[begin + 8 : body_begin], view[body_begin:frame_end])
        if self._position < end:
            self._save_partial()
        self._release_chunk()

    def fail(self, failure: RemoteProtocolError) -> NoReturn:
        """Give up the stream and raise `failure`, now and at every later call.

        Also for a caller that cannot decode the header of a frame.
        """
        self._failure = failure
        self._partial = bytearray()
        self._release_chunk()
        raise failure

    def discard(self) -> None:
        """Release all received bytes. Call this when the stream has ended."""
        self._partial = bytearray()
        self._release_chunk()

    def take_partial(self) -> bytes:
        """Remove and return the beginning of an incomplete frame."""
        partial, self._partial = bytes(self._partial), bytearray()
        return partial

    @property
    def partial_bytes(self) -> int:
        """The number of bytes received of an incomplete frame."""
        return len(self._partial)

    @property
    def buffered_bytes(self) -> int:
        """The number of bytes received and not yet returned as frames."""
        return len(self._partial) + len(self._chunk) - self._position

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _save_partial(self) -> None:
        """Copy the beginning of a frame that the chunk cuts, so that the chunk can be freed."""
        self._partial += self._view[self._position :]
        self.partial_frames += 1
        self._check_partial()

    def _release_chunk(self) -> None:
        self._chunk, self._view, self._position = b"", _EMPTY_VIEW, 0

    def _join(self) -> tuple[int, bytes, memoryview] | None:
        """Complete the partial frame from the chunk: first its prefix, then header and body."""
        partial = self._partial
        self._extend_partial(8 - len(partial))
        self._check_partial()
        if len(partial) < 8:
            return None
        length, mark = _PREFIX.unpack_from(partial)
        self._extend_partial(4 + length - len(partial))
        if len(partial) < 4 + length:
            return None
        self._partial = bytearray()
        whole = memoryview(partial).toreadonly()
        body_begin = 8 + (mark & HEADER_LENGTH_MAX)
        return mark >> 24, bytes(whole[8:body_begin]), whole[body_begin:]

    def _extend_partial(self, count: int) -> None:
        if count > 0:
            taken = self._view[self._position : self._position + count]
            self._partial += taken
            self._position += len(taken)

    def _check_partial(self) -> None:
        partial = self._partial
        if len(partial) >= 8:
            self._check(*_PREFIX.unpack_from(partial))
        elif len(partial) >= 4:
            (length,) = _LENGTH.unpack_from(partial)
            self._check(length, mark=0)

    def _check(self, length: int, mark: int) -> None:
        try:
            _check_prefix(length, mark, self._frame_length_max)
            if (header_length := mark & HEADER_LENGTH_MAX) > self._header_length_max:
                raise HeaderTooLong(
                    f"the header has {header_length} bytes, the limit is {self._header_length_max}"
                )
        except RemoteProtocolError as error:
            self.fail(error)


def decode_prefix(prefix: bytes) -> tuple[int, int, int]:
    """Return serializer, header length and body length of the eight bytes before a header.

    For readers that take a body from the socket without a FrameDecoder. Raises
    RemoteProtocolError.
    """
    length, mark = _PREFIX.unpack(prefix)
    header_length = mark & HEADER_LENGTH_MAX
    body_length = length - 4 - header_length
    if length > FRAME_LENGTH_MAX or body_length < 0 or mark > _MARK_MAX:
        _check_prefix(length, mark, FRAME_LENGTH_MAX)
    return mark >> 24, header_length, body_length


def _check_prefix(length: int, mark: int, frame_length_max: int) -> None:
    header_length, serializer = mark & HEADER_LENGTH_MAX, mark >> 24
    if length > frame_length_max:
        raise FrameTooLong(f"the frame has {length} bytes, the limit is {frame_length_max}")
    if length < 4:
        raise FrameTooLong(f"a frame of {length} bytes cannot hold the length of its header")
    if header_length > length - 4:
        raise HeaderTooLong(f"the header has {header_length} bytes, its frame has {length}")
    if serializer not in (JSON, ROCKETMQ):
        raise UnknownSerializer(f"the serializer is {serializer}, expected {JSON} or {ROCKETMQ}")


def frame_prefix(serializer: int, header_length: int, body_length: int) -> bytes:
    """Return the eight bytes before a header, to send header and body without joining them.

    Raises LocalProtocolError if the frame would be too long.
    """
    length = 4 + header_length + body_length
    if header_length > HEADER_LENGTH_MAX or length > FRAME_LENGTH_MAX:
        raise LocalProtocolError(
            f"the frame would have {length} bytes, the limit is {FRAME_LENGTH_MAX}"
        )
    return _PREFIX.pack(length, serializer << 24 | header_length)


def encode_frame(serializer: int, header: bytes, body: bytes | memoryview = b"") -> bytes:
    """Return a whole frame. Raises LocalProtocolError if it would be too long."""
    return b"".join((frame_prefix(serializer, len(header), len(body)), header, body))
