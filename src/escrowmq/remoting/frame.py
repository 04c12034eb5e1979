"""Cut a byte stream into remoting frames.

    | length 4 | serializer 1, header length 3 | header | body |

`length` counts all that follows it. Feed what the socket gave to `receive`, then drain `frames`.

The body of a frame that lies inside one chunk is a view of that chunk: it is not copied, and it
keeps the chunk alive, so whoever keeps a body for long copies it. Only a frame that spans chunks
is put together, every byte of it once. What is held is at most one frame and one chunk:
lengths are judged as soon as they can be read, before anything is collected.
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

FRAME_LENGTH_MAX: Final = 16_777_212  # with its own four bytes, 16 MiB
HEADER_LENGTH_MAX: Final = 0xFFFFFF

_PREFIX = struct.Struct(">II")
_LENGTH = struct.Struct(">I")
_EMPTY_VIEW = memoryview(b"")
_MARK_MAX = ROCKETMQ << 24 | HEADER_LENGTH_MAX  # above it, the serializer is not one we know


class Frame(msgspec.Struct, frozen=True, gc=False):
    serializer: int
    header: bytes  # a copy: it is short, and about to be decoded
    body: memoryview


T = TypeVar("T")


class FrameDecoder(Generic[T]):
    """Once it has raised a RemoteProtocolError it raises the same one for ever.

    `make` is given serializer, header and body of every frame and makes what `frames` hands out:
    a Frame, or at once what its reader wants of it.
    """

    def __init__(
        self,
        build: Callable[[int, bytes, memoryview], T],
        *,
        frame_length_max: int = FRAME_LENGTH_MAX,
    ) -> None:
        self._build = build
        self._frame_length_max = frame_length_max
        self._failure: RemoteProtocolError | None = None
        self._partial = bytearray()  # the beginning of a frame that spans chunks
        self._chunk = b""
        self._view = _EMPTY_VIEW
        self._position = 0
        self.partial_frames = 0  # frames whose end was not in the chunk that they began in

    def receive(self, chunk: bytes) -> None:
        self._raise_failure()
        if self._position < len(self._chunk):
            raise LocalProtocolError("drain frames() before receiving more")
        self._chunk = chunk
        self._view = memoryview(chunk)
        self._position = 0

    def frames(self) -> Iterator[T]:
        self._raise_failure()
        if self._partial and (joined := self._join()) is not None:
            yield self._build(*joined)
        chunk, view, unpack, make = self._chunk, self._view, _PREFIX.unpack_from, self._build
        end, length_max = len(chunk), self._frame_length_max
        while end - (at := self._position) >= 8:
            length, mark = unpack(chunk, at)
            header_length = mark & HEADER_LENGTH_MAX
            if length > length_max or header_length > length - 4 or mark > _MARK_MAX:
                self._check(length, mark)
            following = at + 4 + length
            if following > end:
                break
            body_at = at + 8 + header_length
            self._position = following  # before the yield: the caller may not come back
            yield make(mark >> 24, chunk[at + 8 : body_at], view[body_at:following])
        if self._position < end:
            self._save_partial()
        self._release_chunk()

    def fail(self, failure: RemoteProtocolError) -> NoReturn:
        """Give this stream up. Also for a reader of headers who found one broken."""
        self._failure = failure
        self._partial = bytearray()
        self._release_chunk()
        raise failure

    def discard_partial(self) -> None:
        """Nothing more will come: what was kept of a frame is of no use."""
        self._partial = bytearray()

    @property
    def partial_bytes(self) -> int:
        """What has come of a frame whose end has not."""
        return len(self._partial)

    @property
    def buffered_bytes(self) -> int:
        return len(self._partial) + len(self._chunk) - self._position

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _save_partial(self) -> None:
        """The chunk ends inside a frame: copy that part, so that the chunk can go."""
        self._partial += self._view[self._position :]
        self.partial_frames += 1
        self._check_partial()

    def _release_chunk(self) -> None:
        self._chunk, self._view, self._position = b"", _EMPTY_VIEW, 0

    def _join(self) -> tuple[int, bytes, memoryview] | None:
        """Fill the partial frame from the chunk, first its prefix, then the rest."""
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
        body_at = 8 + (mark & HEADER_LENGTH_MAX)
        return mark >> 24, bytes(whole[8:body_at]), whole[body_at:]

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
        header_length, serializer = mark & HEADER_LENGTH_MAX, mark >> 24
        if length > self._frame_length_max:
            self.fail(
                FrameTooLong(f"a frame of {length} bytes, the limit is {self._frame_length_max}")
            )
        if length < 4:
            self.fail(FrameTooLong(f"a frame of {length} bytes cannot hold its header's length"))
        if header_length > length - 4:
            self.fail(HeaderTooLong(f"a header of {header_length} bytes in a frame of {length}"))
        if serializer not in (JSON, ROCKETMQ):
            self.fail(UnknownSerializer(f"serializer {serializer}, not {JSON} or {ROCKETMQ}"))


class FrameReader(FrameDecoder[Frame]):
    def __init__(self, *, frame_length_max: int = FRAME_LENGTH_MAX) -> None:
        super().__init__(Frame, frame_length_max=frame_length_max)


def frame_prefix(serializer: int, header_length: int, body_length: int) -> bytes:
    """The eight bytes before a header, for whoever sends a body without joining it."""
    length = 4 + header_length + body_length
    if header_length > HEADER_LENGTH_MAX or length > FRAME_LENGTH_MAX:
        raise LocalProtocolError(f"a frame of {length} bytes, the limit is {FRAME_LENGTH_MAX}")
    return _PREFIX.pack(length, serializer << 24 | header_length)


def encode_frame(serializer: int, header: bytes, body: bytes | memoryview = b"") -> bytes:
    return b"".join((frame_prefix(serializer, len(header), len(body)), header, body))
